"""End users as lists show them: with their usage of the month, and their tightest limit.

Functions take a session and change nothing. A page costs by the end users on it, however many the
organization has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import NotFound
from metering.core.models import Organization, UsageSubject
from metering.quotas.quota_rules import QuotaState
from metering.quotas.quota_states import quotas_of_end_users, tightest
from metering.reports.usage_reports import Days, usage_of_end_users, utc_date
from metering.store.db import database_now
from metering.tenants.usage_subjects import EndUserState, find_end_user, state_of


@dataclass(frozen=True, slots=True)
class ListedEndUser:
    """End user with its limits, and the cost and number of its requests in the current month.

    `month_cost_picos` is None if the usage was not asked for; the limits are empty then.
    """

    subject: UsageSubject
    state: EndUserState
    currency_code: str
    month_cost_picos: int | None = None
    month_request_count: int = 0
    quotas: Sequence[QuotaState] = ()

    @property
    def tightest_quota(self) -> QuotaState | None:
        return tightest(self.quotas)


async def with_usage(
    session: AsyncSession, owner: Organization, end_users: Sequence[UsageSubject]
) -> list[ListedEndUser]:
    """Read the usage and the limits of end users, in their order."""
    today = utc_date(await database_now(session))
    # Days rather than the month of the bill, which would read all of its ledger transactions.
    month = Days(today.replace(day=1), today)
    used = await usage_of_end_users(session, owner.id, month, [each.id for each in end_users])
    quotas = await quotas_of_end_users(session, owner.id, end_users)

    def listed(each: UsageSubject) -> ListedEndUser:
        row = used.get(each.id)
        return ListedEndUser(
            each,
            state_of(each),
            owner.currency_code,
            month_cost_picos=0 if row is None else row.cost_picos,
            month_request_count=0 if row is None else row.request_count,
            quotas=quotas.get(each.id, ()),
        )

    return [listed(each) for each in end_users]


async def get_end_user(session: AsyncSession, owner: Organization, ref: str) -> ListedEndUser:
    """Read an end user, by name or id, with its usage and its limits. Raises: NotFound."""
    found = await find_end_user(session, owner.id, ref)
    if found is None:
        raise NotFound("end user", ref)
    [listed] = await with_usage(session, owner, [found])
    return listed
