"""Reading alerts, page by page, the latest first."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from metering.alerts.alert_models import Alert, AlertDelivery
from metering.errors import InvalidValue, NotFound
from metering.models import Organization, Quota, QuotaDimension
from metering.quotas.quota_states import subject_names

PAGE_SIZE_MAX = 1000  # alerts; one page is one answer, and an answer must fit a message


@dataclass(frozen=True, slots=True)
class ListedAlert:
    """An alert with what it is about. quota: None for a test and for a payment.

    delivery: None where the organization had no webhook.
    """

    alert: Alert
    organization: Organization
    quota: Quota | None
    delivery: AlertDelivery | None
    subject_name: str = ""

    @property
    def kind(self) -> str:
        """`quota`, `credit`, `test`, or what Stripe told of an invoice."""
        if self.alert.invoice_event is not None:
            return self.alert.invoice_event
        if self.quota is None:
            return "test"
        return "credit" if self.quota.dimension == QuotaDimension.PREPAID_CREDIT_PICOS else "quota"


@dataclass(frozen=True, slots=True)
class Mark:
    """The last alert of a page: the next one begins after it."""

    fired_at: datetime
    alert_id: uuid.UUID

    def __str__(self) -> str:
        return f"{self.fired_at.astimezone(UTC).isoformat()}_{self.alert_id}"

    @classmethod
    def parse(cls, token: str) -> Mark:
        """Raises: InvalidValue."""
        try:
            at, alert_id = token.split("_")
            mark = cls(datetime.fromisoformat(at), uuid.UUID(alert_id))
            is_ours = str(mark) == token
        except (ValueError, OverflowError):  # a time that is outside the calendar in UTC
            is_ours = False
        if not is_ours:
            raise InvalidValue("page_token", "give `next_page_token` of the page before, as it came")
        return mark


LISTED = (
    select(Alert, Organization, Quota, AlertDelivery)
    .join(Organization, Organization.id == Alert.organization_id)
    .outerjoin(Quota, Quota.id == Alert.quota_id)
    .outerjoin(AlertDelivery, AlertDelivery.alert_id == Alert.id)
)


async def list_alerts(
    session: AsyncSession, *, organization_id: uuid.UUID | None, page_size: int = 100, page_token: str = ""
) -> tuple[list[ListedAlert], str]:
    """A page, and the token of the next one; empty if this is the last. organization_id: None for all. Raises: InvalidValue."""
    if not 1 <= page_size <= PAGE_SIZE_MAX:
        raise InvalidValue("page_size", f"give 1 to {PAGE_SIZE_MAX}")
    query = LISTED.order_by(Alert.fired_at.desc(), Alert.id.desc()).limit(page_size + 1)
    if organization_id is not None:
        query = query.where(Alert.organization_id == organization_id)
    if page_token:
        mark = Mark.parse(page_token)
        query = query.where(tuple_(Alert.fired_at, Alert.id) < tuple_(mark.fired_at, mark.alert_id))
    found = [ListedAlert(*row) for row in await session.execute(query)]
    page = await _named(session, found[:page_size])
    return page, str(Mark(page[-1].alert.fired_at, page[-1].alert.id)) if len(found) > page_size else ""


async def find_alert(session: AsyncSession, alert_id: uuid.UUID) -> ListedAlert:
    """One alert. Raises: NotFound."""
    row = (await session.execute(LISTED.where(Alert.id == alert_id))).one_or_none()
    if row is None:
        raise NotFound("alert", str(alert_id))
    [found] = await _named(session, [ListedAlert(*row)])
    return found


async def _named(session: AsyncSession, found: list[ListedAlert]) -> list[ListedAlert]:
    names = await subject_names(session, {each.quota.subject_id for each in found if each.quota is not None})
    return [each if each.quota is None else replace(each, subject_name=names.get(each.quota.subject_id, "")) for each in found]
