"""Webhooks of organizations: set, listed, tried, removed.

Functions take a session and never commit; every change of a webhook writes the audit log.
"""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.alerts.alert_models import Alert, AlertDelivery, AlertWebhook, DeliveryState
from metering.alerts.webhook_urls import checked_url
from metering.errors import NotFound
from metering.models import Organization
from metering.tenants.audit import record_change, snapshot
from metering.tenants.tenants import find_organization

SECRET_PREFIX = "wh_"  # so that scanners of leaked secrets can tell it
REMOVED = "the webhook was removed"


@dataclass(frozen=True, slots=True)
class WebhookState:
    """A webhook, and how what is sent to it fares. last_error: of the latest attempt that failed; empty if none did."""

    webhook: AlertWebhook
    organization: Organization
    pending_count: int
    last_error: str


LAST_ERROR = text("""
SELECT last_error FROM alert_deliveries WHERE organization_id = :organization_id AND last_error IS NOT NULL
ORDER BY attempted_at DESC NULLS LAST LIMIT 1
""")


async def set_webhook(session: AsyncSession, *, organization: str, url: str, private: bool, actor: str) -> tuple[WebhookState, str]:
    """Send an organization's alerts to a URL from now on; with the secret that signs them, which nobody is told again.

    What waits for the one before goes there, too. Raises: NotFound, InvalidValue.
    """
    checked_url(url, private=private)
    owner = await find_organization(session, organization)
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
    standing = await _locked(session, owner.id)
    before = None if standing is None else snapshot(standing)
    values = {"url": url, "secret": secret, "created_at": func.now(), "failure_count": 0, "rests_until": None}
    set_it = insert(AlertWebhook).values(organization_id=owner.id, **values)
    set_it = set_it.on_conflict_do_update(index_elements=[AlertWebhook.organization_id], set_=values)
    await session.execute(set_it)
    webhook = await session.get_one(AlertWebhook, owner.id, populate_existing=True)
    await record_change(
        session, actor=actor, action="alert_webhook.set", subject_id=str(owner.id), before=before, after=snapshot(webhook)
    )
    return await _state(session, webhook, owner), secret


async def remove_webhook(session: AsyncSession, *, organization: str, actor: str) -> None:
    """Send them nowhere. What waits is given up. Raises: NotFound."""
    owner = await find_organization(session, organization)
    webhook = await _locked(session, owner.id)
    if webhook is None:
        raise NotFound("alert webhook", organization)
    before = snapshot(webhook)
    await session.delete(webhook)
    waiting = update(AlertDelivery).where(AlertDelivery.organization_id == owner.id, AlertDelivery.state == DeliveryState.PENDING)
    await session.execute(waiting.values(state=DeliveryState.FAILED, ended_at=func.now(), last_error=REMOVED))
    await record_change(session, actor=actor, action="alert_webhook.delete", subject_id=str(owner.id), before=before, after=None)


async def list_webhooks(session: AsyncSession, *, organization: str = "") -> list[WebhookState]:
    """All, or that of one organization, by its name. Raises: NotFound."""
    query = select(AlertWebhook, Organization).join(Organization).order_by(Organization.name)
    if organization:
        query = query.where(Organization.id == (await find_organization(session, organization)).id)
    return [await _state(session, webhook, owner) for webhook, owner in (await session.execute(query)).all()]


async def try_webhook(session: AsyncSession, *, organization: str) -> uuid.UUID:
    """Send a test there, as soon as a worker looks, whatever failed before; tells its id. Raises: NotFound."""
    owner = await find_organization(session, organization)
    webhook = await _locked(session, owner.id)
    if webhook is None:
        raise NotFound("alert webhook", organization)
    now: datetime = (await session.scalars(select(func.now()))).one()
    made = insert(Alert).values(organization_id=owner.id, fired_at=now).returning(Alert.id)
    alert_id = (await session.scalars(made)).one()
    await session.execute(insert(AlertDelivery).values(alert_id=alert_id, organization_id=owner.id, created_at=now))
    webhook.rests_until = None
    await session.flush()
    return alert_id


async def _locked(session: AsyncSession, organization_id: uuid.UUID) -> AlertWebhook | None:
    """The webhook, locked against whoever changes it or notes what became of an attempt."""
    return await session.get(AlertWebhook, organization_id, with_for_update=True, populate_existing=True)


async def _state(session: AsyncSession, webhook: AlertWebhook, owner: Organization) -> WebhookState:
    waiting = select(func.count()).where(AlertDelivery.organization_id == owner.id, AlertDelivery.state == DeliveryState.PENDING)
    pending_count: int = (await session.scalars(waiting)).one()
    last_error = await session.scalar(LAST_ERROR, {"organization_id": owner.id})
    return WebhookState(webhook, owner, pending_count, last_error or "")
