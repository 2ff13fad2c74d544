"""Delivery of alerts to webhooks: attempted by the worker until they are answered, for a day, at least once each.

One worker at a time sends to one organization's webhook: an advisory lock on a connection of its own, which the server frees when
the worker dies. An attempt is recorded before it is made, so a worker that dies in it leaves a trace, and the next worker sends the
same again. After a failure the webhook rests, longer each time; what was attempted least goes first. So a webhook that hangs delays
no other, and an alert that is always refused delays no other. An attempt sends the same body each time, follows no redirect, reads
only the head of the answer, and has a time limit.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import random
import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from socket import AddressFamily
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from common.incidents import Retries
from metering.alerts.alerts import AlertWebhook, InvoiceEvent, InvoiceFacts, ListedAlert, facts_of, find_alert
from metering.alerts.webhooks import AddressRefused, Place, checked_places, checked_url
from metering.core.errors import InvalidValue, StoreAway
from metering.core.models import QuotaDimension
from metering.core.money import to_decimal
from metering.quotas.quota_rules import DIMENSIONS, NO_WINDOW, Kind, window_end
from metering.store.db import Sessions, lock_holder, try_lock

ATTEMPT_S = 5.0  # from the look-up to the head of the answer: who has more to do than to take it, does it afterwards
SIGNATURE_HEADER = "Weir-Signature"
ERROR_CHARS_MAX = 300


class Resolved(AbstractResolver):
    """Answers with the places that were checked, whatever it is asked."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places

    async def resolve(self, host: str, port: int = 0, family: AddressFamily = AddressFamily.AF_UNSPEC) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=each.host, port=each.port, family=each.family, proto=0, flags=0)
            for each in self._places
        ]

    async def close(self) -> None:
        """See `AbstractResolver`."""


async def send(url: str, secret: str, body: bytes, *, private: bool, attempt_s: float = ATTEMPT_S) -> str:
    """Make one attempt: empty if it was answered with 2xx, else what went wrong. Never raises for what the other side does."""
    try:
        checked_url(url, private=private)
        async with asyncio.timeout(attempt_s):
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            places = await checked_places(parts.hostname or "", port, private=private)
            return await _post(url, signed_headers(secret, body, int(time.time())), body, places)
    except TimeoutError:
        return f"no answer within {attempt_s:g} s"
    except InvalidValue as refused:  # what the operator allows has changed since
        return str(refused)[:ERROR_CHARS_MAX]
    except aiohttp.ClientResponseError as unread:  # as a text it has the whole URL, which may be a secret, and goes to a log
        return f"answered what is no HTTP: {unread.message}"[:ERROR_CHARS_MAX]
    except aiohttp.InvalidURL:
        return "the URL cannot be called: give another"
    except (AddressRefused, aiohttp.ClientError, OSError, ValueError) as error:
        return (str(error) or type(error).__name__)[:ERROR_CHARS_MAX]


async def _post(url: str, headers: dict[str, str], body: bytes, places: list[Place]) -> str:
    connector = aiohttp.TCPConnector(resolver=Resolved(places), use_dns_cache=False, force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False) as session,
        session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
    ):
        if 200 <= answer.status < 300:
            return ""
        if 300 <= answer.status < 400:
            return f"answered {answer.status}: redirects are not followed; give the URL that it leads to"
        return f"answered {answer.status}"


def signed_headers(secret: str, body: bytes, at_s: int) -> dict[str, str]:
    """Headers of an attempt. at_s: seconds since 1970; it is signed with the body, so that nobody can send it again later."""
    return {
        "Content-Type": "application/json",
        "User-Agent": f"weir/{version('weir')}",
        SIGNATURE_HEADER: f"t={at_s},v1={signature(secret, body, at_s)}",
    }


def signature(secret: str, body: bytes, at_s: int) -> str:
    """HMAC-SHA256 over the time, a point and the body, in hexadecimal."""
    return hmac.new(secret.encode(), f"{at_s}.".encode() + body, hashlib.sha256).hexdigest()


def body_of(listed: ListedAlert) -> bytes:
    """An alert as JSON. Values are texts: they may be more than JavaScript can count."""
    alert, organization, quota = listed.alert, listed.organization, listed.quota
    content: dict[str, object] = {
        "id": str(alert.id),
        "type": listed.kind,
        "time": alert.fired_at.isoformat(),
        "organization": {"id": str(organization.id), "name": organization.name, "currency": organization.currency_code},
        "text": f"A test of the alerts of {organization.name}.",
    }
    if quota is not None and alert.window_start is not None:
        dimension = QuotaDimension(quota.dimension)
        is_of_credit = dimension is QuotaDimension.PREPAID_CREDIT_PICOS
        ends_at = window_end(dimension, alert.window_start)
        content |= {
            "text": text_of(listed),
            "quota": {
                "id": str(quota.id),
                "subject": quota.subject,
                "subject_id": str(quota.subject_id),
                "subject_name": listed.subject_name,
                "model": quota.model,
                "dimension": quota.dimension,
            },
            "left_picos_threshold" if is_of_credit else "percent_threshold": str(alert.threshold),
            "limit": str(alert.limit_value),
            "used": str(alert.used),
            "window_start": None if alert.window_start == NO_WINDOW else alert.window_start.isoformat(),
            "window_end": None if ends_at is None else ends_at.isoformat(),
        }
    if alert.invoice_event is not None:
        facts = facts_of(alert)
        content |= {
            "text": payment_text(listed, facts),
            "invoice": {
                "stripe_id": alert.stripe_invoice_id,
                "stripe_number": facts.stripe_number,
                "month": facts.month,
                "currency": facts.currency_code,
                "amount_due_picos": str(facts.amount_due_picos),
                "amount_paid_picos": str(facts.amount_paid_picos),
                "hosted_url": facts.hosted_url,
            },
        }
    return json.dumps(content, ensure_ascii=False, sort_keys=True).encode()


def payment_text(listed: ListedAlert, facts: InvoiceFacts) -> str:
    invoice = f"The invoice of {listed.organization.name} for {facts.month}"
    if listed.alert.invoice_event == InvoiceEvent.PAID:
        return f"{invoice} is paid: {to_decimal(facts.amount_paid_picos):,.2f} {facts.currency_code}."
    return f"{invoice} could not be charged: {to_decimal(facts.amount_due_picos):,.2f} {facts.currency_code} are due."


def text_of(listed: ListedAlert) -> str:
    alert, quota = listed.alert, listed.quota
    assert quota is not None
    assert alert.used is not None
    assert alert.limit_value is not None
    dimension, currency = QuotaDimension(quota.dimension), listed.organization.currency_code

    def amount(value: int) -> str:
        return f"{to_decimal(value):,.2f} {currency}" if DIMENSIONS[dimension][0] is Kind.MONEY else f"{value:,} tokens"

    if dimension is QuotaDimension.PREPAID_CREDIT_PICOS:
        return f"{listed.subject_name} has {amount(max(alert.limit_value - alert.used, 0))} of prepaid credit left."
    model = f" for {quota.model}" if quota.model else ""
    per = dimension.rpartition("_")[2]
    share = alert.used * 100 // alert.limit_value
    told = f"{amount(alert.used)} of {amount(alert.limit_value)}"
    return f"{listed.subject_name} has used {share} % of its limit per {per}{model}: {told}."


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
    """Send what waits, until nothing does or the time is over. Any number may run at once. private: see `webhooks.py`."""
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
        if retries.is_due(organization_id) and await try_lock(locks, f"alerts of {organization_id}"):
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
