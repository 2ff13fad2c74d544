"""Alerts on their way to webhooks: attempted by the worker until they are answered, for a day, at least once each.

One worker at a time sends to one organization's webhook: an advisory lock on a connection of its own, which the server frees when
the worker dies. An attempt is noted before it is made, so a worker that dies in it leaves a trace, and whoever comes next sends the
same again. After a failure the webhook rests, longer each time; what was attempted least goes first. So one that hangs holds up
nobody else, and one alert that is always refused holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from common.incidents import Retries
from metering.alerts.alert_models import AlertWebhook
from metering.alerts.listing import find_alert
from metering.alerts.sending import body_of, send
from metering.errors import StoreAway
from metering.store.db import Sessions, lock_holder

log = logging.getLogger(__name__)
retries = Retries("alert_delivery", passing=(StoreAway,))  # by organization, and by alert

WEBHOOKS_AT_ONCE = 16  # attempts in flight per worker
CANDIDATES_MAX = 128  # looked at for each round: other workers may hold the locks of the first ones
BUDGET_S = 3.0  # of one run, beside the attempts that are under way then: rating shares the worker, and should not wait long
GIVE_UP_AFTER = timedelta(hours=24)
REST_S_MIN = 10.0
REST_S_MAX = 3600.0
DOUBLINGS_MAX = 20  # keeps the power small

# Those that nothing failed at first, then those that have waited longest.
CANDIDATES = text("""
SELECT organization_id FROM alert_webhooks w
WHERE (rests_until IS NULL OR rests_until <= now())
  AND EXISTS (SELECT FROM alert_deliveries d WHERE d.organization_id = w.organization_id AND d.state = 'pending')
ORDER BY rests_until NULLS FIRST, organization_id LIMIT :limit
""")
LOCK = text("SELECT pg_try_advisory_lock(hashtextextended(:name, 0))")
UNLOCK = text("SELECT pg_advisory_unlock_all()")
CLAIM = text("""
UPDATE alert_deliveries SET attempt_count = attempt_count + 1, attempted_at = now()
WHERE alert_id = (SELECT alert_id FROM alert_deliveries WHERE organization_id = :organization_id AND state = 'pending'
                  ORDER BY attempt_count, created_at, alert_id LIMIT 1 FOR UPDATE)
RETURNING alert_id
""")
DELIVERED = text("""
WITH ended AS (UPDATE alert_deliveries SET state = 'delivered', ended_at = now() WHERE alert_id = :id AND state = 'pending')
UPDATE alert_webhooks SET failure_count = 0, rests_until = NULL WHERE organization_id = :organization_id AND failure_count > 0
""")
FAILED = text("""
WITH told AS (UPDATE alert_deliveries SET last_error = :error WHERE alert_id = :id)
UPDATE alert_webhooks SET failure_count = failure_count + 1,
    rests_until = now() + :part * least(:longest, :shortest * pow(2, least(failure_count, :doublings))) * interval '1 second'
WHERE organization_id = :organization_id AND url = :url
""")
GIVE_UP = text("""
UPDATE alert_deliveries SET state = 'failed', ended_at = now(),
    last_error = coalesce(last_error, 'no attempt was made in time: see whether a worker runs')
WHERE state = 'pending' AND created_at < now() - :after RETURNING alert_id, last_error
""")


@dataclass(slots=True)
class Run:
    """One run of `deliver_alerts`, and what it did."""

    sessions: Sessions
    private: bool
    deadline: float
    delivered: list[uuid.UUID] = field(default_factory=list)
    failed: list[uuid.UUID] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether another attempt may begin."""
        return time.monotonic() < self.deadline


async def deliver_alerts(sessions: Sessions, *, private: bool = False, budget_s: float = BUDGET_S) -> Run:
    """Send what waits, until nothing does or the time is over. Any number may run at once. private: see `webhook_urls.py`."""
    run = Run(sessions, private, time.monotonic() + budget_s)
    async with sessions.begin() as session:
        for alert_id, error in await session.execute(GIVE_UP, {"after": GIVE_UP_AFTER}):
            log.warning("alert %s was not delivered: %s", alert_id, error)
    async with lock_holder(sessions) as locks:
        while run.goes_on and (organizations := await _lock(locks)):
            async with asyncio.TaskGroup() as tasks:
                for organization_id in organizations:
                    tasks.create_task(_deliver_to(run, organization_id), name=f"alerts of {organization_id}")
            await locks.execute(UNLOCK)
    return run


async def _lock(locks: AsyncSession) -> list[uuid.UUID]:
    held: list[uuid.UUID] = []
    for organization_id in (await locks.scalars(CANDIDATES, {"limit": CANDIDATES_MAX})).all():
        if retries.is_due(organization_id) and await locks.scalar(LOCK, {"name": f"alerts of {organization_id}"}):
            held.append(organization_id)
        if len(held) == WEBHOOKS_AT_ONCE:
            break
    return held


async def _deliver_to(run: Run, organization_id: uuid.UUID) -> None:
    """Send one alert after the other, until one fails."""
    with retries.survive(organization_id):
        await _deliver_alerts_of(run, organization_id)


async def _deliver_alerts_of(run: Run, organization_id: uuid.UUID) -> None:
    while run.goes_on:
        async with run.sessions.begin() as session:
            webhook = await session.scalar(select(AlertWebhook).where(AlertWebhook.organization_id == organization_id))
            alert_id = await session.scalar(CLAIM, {"organization_id": organization_id})
            if webhook is None or alert_id is None:
                return
        try:
            async with run.sessions() as session:
                body = body_of(await find_alert(session, alert_id))
            error = await send(webhook.url, webhook.secret, body, private=run.private)
        except StoreAway:
            raise
        except Exception as failure:  # the attempt counts as failed: the webhook rests, and its other alerts go first
            error = f"incident {retries.failed(failure, alert_id)}"
        await _record(run, webhook, alert_id, error)
        if error:
            return


async def _record(run: Run, webhook: AlertWebhook, alert_id: uuid.UUID, error: str) -> None:
    parameters = {"id": alert_id, "organization_id": webhook.organization_id}
    async with run.sessions.begin() as session:
        if not error:
            await session.execute(DELIVERED, parameters)
            run.delivered.append(alert_id)
            return
        rest = {"shortest": REST_S_MIN, "longest": REST_S_MAX, "doublings": DOUBLINGS_MAX, "part": random.uniform(0.5, 1.0)}
        await session.execute(FAILED, parameters | rest | {"error": error, "url": webhook.url})
        run.failed.append(alert_id)
