"""Webhooks of alerts: their settings, and deliveries, retried for a day, at least once each.

One worker at a time sends to an organization's webhook: it holds an advisory lock on a connection
of its own, which the server releases when the worker dies. An attempt is recorded before it is
made, so a worker that dies during one leaves a trace, and the next worker sends the same again.
After a failure the webhook is paused, longer each time, and the alerts with the fewest attempts go
first. So neither a webhook that hangs nor an alert that is always refused delays others. Each
attempt sends the same body, follows no redirect, reads only the head of the response, and has a
time limit.

Functions take a session and never commit; every
change of a webhook writes the audit log.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import random
import secrets
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import aiohttp
from aiohttp.abc import ResolveResult
from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from common.incidents import Retries
from metering.alerts.alerts import (
    Alert,
    AlertDelivery,
    AlertWebhook,
    DeliveryState,
    InvoiceEvent,
    InvoiceFacts,
    KeyChange,
    ListedAlert,
    facts_of,
    find_alert,
)
from metering.core import outbound
from metering.core.audit import record_change, snapshot
from metering.core.errors import DatabaseUnavailable, InvalidValue, NotFound
from metering.core.models import Organization, Quota, QuotaDimension, QuotaSubject
from metering.core.money import to_decimal
from metering.core.outbound import USER_AGENT, AddressRefused, addresses_of, connector
from metering.core.pages import PAGE_SIZE, SortKey, page_of
from metering.quotas.quota_rules import DIMENSIONS, NO_WINDOW, Kind, window_end
from metering.quotas.quotas import counted, noun_of, window_text
from metering.store.db import Sessions, database_now, lock_holder, try_lock
from metering.tenants.tenants import check_open, find_organization

PRIVATE_ALLOWED = "WEIR_ALERT_WEBHOOKS_PRIVATE"
SECRET_PREFIX = "wh_"  # identifies secrets to scanners for leaks
REMOVED = "the webhook was removed"
ATTEMPT_S = 5.0  # from name resolution to the head of the response: receivers should process later
SIGNATURE_HEADER = "Weir-Signature"
ERROR_CHARS_MAX = 300
WEBHOOKS_AT_ONCE = 16  # attempts in flight per worker
CANDIDATES_MAX = 128  # considered per round: other workers may hold the locks of the first ones
# Per run, plus attempts in flight: rating shares the worker and should not wait long.
BUDGET_S = 3.0
GIVE_UP_AFTER = timedelta(hours=24)
RETRY_DELAY_S_MIN = 10.0
RETRY_DELAY_S_MAX = 3600.0
DOUBLINGS_MAX = 20  # caps the exponent of the backoff


def checked_url(url: str, *, private: bool) -> str:
    """Validate the URL of a webhook, as `outbound.checked_url` does. Raises: InvalidValue."""
    example = "https://example.com/alerts"
    return outbound.checked_url(url, private=private, setting=PRIVATE_ALLOWED, example=example)


def allows_private(environment: Mapping[str, str]) -> bool:
    """Read whether webhooks may use private networks and plain HTTP. Raises: InvalidValue."""
    text = environment.get(PRIVATE_ALLOWED, "0").lower()
    if text not in ("", "0", "1", "false", "true"):
        raise InvalidValue(PRIVATE_ALLOWED, "must be 1 or 0")
    return text in ("1", "true")


@dataclass(frozen=True, slots=True)
class WebhookState:
    """A webhook, the number of pending deliveries, and the error of the latest failed attempt."""

    webhook: AlertWebhook
    organization: Organization
    pending_count: int
    last_error: str


LAST_ERROR = text("""
SELECT last_error
FROM alert_deliveries
WHERE organization_id = :organization_id AND last_error IS NOT NULL
ORDER BY attempted_at DESC NULLS LAST
LIMIT 1
""")


async def set_webhook(
    session: AsyncSession, *, organization: str, url: str, private: bool, actor: str
) -> tuple[WebhookState, str]:
    """Create or replace an organization's webhook and its signing secret.

    Returns the webhook's state and the secret, which cannot be read again. Alerts pending for a
    previous URL are sent to the new one. Raises: NotFound, InvalidValue.
    """
    checked_url(url, private=private)
    owner = await find_organization(session, organization)
    await check_open(session, owner)
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
    existing = await _locked(session, owner.id)
    before = None if existing is None else snapshot(existing)
    values = {
        "url": url,
        "secret": secret,
        "created_at": func.now(),
        "failure_count": 0,
        "paused_until": None,
    }
    set_it = insert(AlertWebhook).values(organization_id=owner.id, **values)
    set_it = set_it.on_conflict_do_update(
        index_elements=[AlertWebhook.organization_id], set_=values
    )
    await session.execute(set_it)
    webhook = await session.get_one(AlertWebhook, owner.id, populate_existing=True)
    await record_change(
        session, actor, "alert_webhook.set", str(owner.id), before=before, after=snapshot(webhook)
    )
    return await _state(session, webhook, owner), secret


async def remove_webhook(session: AsyncSession, *, organization: str, actor: str) -> None:
    """Delete an organization's webhook and mark its pending alerts as failed. Raises: NotFound."""
    owner = await find_organization(session, organization)
    webhook = await _locked(session, owner.id)
    if webhook is None:
        raise NotFound("alert webhook", organization)
    before = snapshot(webhook)
    await session.delete(webhook)
    waiting = update(AlertDelivery).where(
        AlertDelivery.organization_id == owner.id, AlertDelivery.state == DeliveryState.PENDING
    )
    await session.execute(
        waiting.values(state=DeliveryState.FAILED, ended_at=func.now(), last_error=REMOVED)
    )
    await record_change(session, actor, "alert_webhook.delete", str(owner.id), before=before)


async def list_webhooks(
    session: AsyncSession,
    *,
    organization: str = "",
    page_size: int = PAGE_SIZE,
    page_token: str = "",
) -> tuple[list[WebhookState], str]:
    """List a page of all webhooks by organization, or only that of the named one.

    Returns the token of the next page too. Raises: NotFound, InvalidValue.
    """
    query = select(AlertWebhook, Organization).join(Organization)
    if organization:
        query = query.where(Organization.id == (await find_organization(session, organization)).id)
    key = SortKey(Organization.name)
    rows, following = await page_of(session, query, key, page_size=page_size, page_token=page_token)
    return [await _state(session, webhook, owner) for webhook, owner in rows], following


async def try_webhook(session: AsyncSession, *, organization: str) -> uuid.UUID:
    """Queue a test alert, end any pause, and return the alert's id. Raises: NotFound."""
    owner = await find_organization(session, organization)
    webhook = await _locked(session, owner.id)
    if webhook is None:
        raise NotFound("alert webhook", organization)
    now = await database_now(session)
    made = insert(Alert).values(organization_id=owner.id, fired_at=now).returning(Alert.id)
    alert_id = (await session.scalars(made)).one()
    await session.execute(
        insert(AlertDelivery).values(alert_id=alert_id, organization_id=owner.id, created_at=now)
    )
    webhook.paused_until = None
    await session.flush()
    return alert_id


async def _locked(session: AsyncSession, organization_id: uuid.UUID) -> AlertWebhook | None:
    """Load the webhook and lock its row, so that no attempt is recorded meanwhile."""
    return await session.get(
        AlertWebhook, organization_id, with_for_update=True, populate_existing=True
    )


async def _state(session: AsyncSession, webhook: AlertWebhook, owner: Organization) -> WebhookState:
    waiting = select(func.count()).where(
        AlertDelivery.organization_id == owner.id, AlertDelivery.state == DeliveryState.PENDING
    )
    pending_count: int = (await session.scalars(waiting)).one()
    last_error = await session.scalar(LAST_ERROR, {"organization_id": owner.id})
    return WebhookState(webhook, owner, pending_count, last_error or "")


async def send(
    url: str, secret: str, body: bytes, *, private: bool, attempt_s: float = ATTEMPT_S
) -> str:
    """Send one request to a webhook and return the error as text, empty for a 2xx response.

    Never raises for failures of the receiver. `attempt_s` limits the whole attempt, including DNS.
    """
    try:
        checked_url(url, private=private)
        async with asyncio.timeout(attempt_s):
            addresses = await addresses_of(url, private=private)
            return await _post(url, signed_headers(secret, body, int(time.time())), body, addresses)
    except TimeoutError:
        return f"no answer within {attempt_s:g} s"
    except InvalidValue as refused:  # the operator's setting has changed since
        return str(refused)[:ERROR_CHARS_MAX]
    # Its text has the whole URL, which may be secret and would be logged.
    except aiohttp.ClientResponseError as unread:
        return f"the response is not valid HTTP: {unread.message}"[:ERROR_CHARS_MAX]
    except aiohttp.InvalidURL:
        return "the URL is not valid: set another"
    except (AddressRefused, aiohttp.ClientError, OSError, ValueError) as error:
        return (str(error) or type(error).__name__)[:ERROR_CHARS_MAX]


async def _post(
    url: str, headers: dict[str, str], body: bytes, addresses: list[ResolveResult]
) -> str:
    async with (
        aiohttp.ClientSession(
            connector=connector(addresses),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        ) as session,
        session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
    ):
        if 200 <= answer.status < 300:
            return ""
        if 300 <= answer.status < 400:
            return (
                f"answered {answer.status}: redirects are not followed; set the URL of the target"
            )
        return f"answered {answer.status}"


def signed_headers(secret: str, body: bytes, at_s: int) -> dict[str, str]:
    """Build the headers of an attempt, with a signature over `at_s` (Unix time) and the body."""
    return {
        "Content-Type": "application/json",
        "User-Agent": USER_AGENT,
        SIGNATURE_HEADER: f"t={at_s},v1={signature(secret, body, at_s)}",
    }


def signature(secret: str, body: bytes, at_s: int) -> str:
    """Compute the HMAC-SHA256, in hexadecimal, of the Unix time, a full stop and the body."""
    return hmac.new(secret.encode(), f"{at_s}.".encode() + body, hashlib.sha256).hexdigest()


def body_of(listed: ListedAlert) -> bytes:
    """Encode an alert as JSON. Numbers are strings: they may exceed JavaScript's integers."""
    alert, organization, quota = listed.alert, listed.organization, listed.quota
    content: dict[str, object] = {
        "id": str(alert.id),
        "type": listed.kind,
        "time": alert.fired_at.isoformat(),
        "organization": {
            "id": str(organization.id),
            "name": organization.name,
            "currency": organization.currency_code,
        },
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
                "subject": QuotaSubject(quota.subject).spelling,
                "subject_id": str(quota.subject_id),
                "subject_name": listed.subject_name,
                "model": quota.model,
                "dimension": dimension.spelling,
                **_within(listed, quota),
            },
            "remaining_picos_threshold" if is_of_credit else "percent_threshold": str(
                alert.threshold
            ),
            "limit": str(alert.limit_value),
            "used": str(alert.used),
            "window_start": (
                None if alert.window_start == NO_WINDOW else alert.window_start.isoformat()
            ),
            "window_end": None if ends_at is None else ends_at.isoformat(),
        }
    if listed.entry is not None:
        change = KeyChange.of(listed.entry)
        content |= {"text": change.text, "api_key": asdict(change)}
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


def _within(listed: ListedAlert, quota: Quota) -> dict[str, str]:
    """Build the fields for the scope of a limit on an end user or label value; else none."""
    if quota.within_id is None:
        return {}
    return {"within_id": str(quota.within_id), "within_name": listed.within_name}


def payment_text(listed: ListedAlert, facts: InvoiceFacts) -> str:
    invoice = f"The invoice of {listed.organization.name} for {facts.month}"
    if listed.alert.invoice_event == InvoiceEvent.PAID:
        return (
            f"{invoice} is paid: {to_decimal(facts.amount_paid_picos):,.2f} {facts.currency_code}."
        )
    return (
        f"{invoice} could not be charged: {to_decimal(facts.amount_due_picos):,.2f}"
        f" {facts.currency_code} are due."
    )


def text_of(listed: ListedAlert) -> str:
    alert, quota = listed.alert, listed.quota
    assert quota is not None
    assert alert.used is not None
    assert alert.limit_value is not None
    dimension, currency = QuotaDimension(quota.dimension), listed.organization.currency_code

    def amount(value: int) -> str:
        return (
            f"{to_decimal(value):,.2f} {currency}"
            if DIMENSIONS[dimension][0] is Kind.MONEY
            else counted(value, noun_of(dimension))
        )

    if dimension is QuotaDimension.PREPAID_CREDIT_PICOS:
        return (
            f"{listed.subject_name} has {amount(max(alert.limit_value - alert.used, 0))} of prepaid"
            " credit left."
        )
    model = f" for {quota.model}" if quota.model else ""
    within = f" within {listed.within_name}" if listed.within_name else ""
    window = window_text(DIMENSIONS[dimension][1], 0)
    share = alert.used * 100 // alert.limit_value
    usage = f"{amount(alert.used)} of {amount(alert.limit_value)}"
    return f"{listed.subject_name} has used {share} % of its limit{window}{model}{within}: {usage}."


log = logging.getLogger(__name__)
retries = Retries("alert_delivery", passing=(DatabaseUnavailable,))  # per organization and alert


# Webhooks without a failure first, then the longest waiting.
CANDIDATES = text("""
SELECT organization_id
FROM alert_webhooks w
WHERE (paused_until IS NULL OR paused_until <= now())
  AND EXISTS (
      SELECT
      FROM alert_deliveries d
      WHERE d.organization_id = w.organization_id AND d.state = 'pending'
  )
ORDER BY paused_until NULLS FIRST, organization_id
LIMIT :limit
""")
UNLOCK = text("SELECT pg_advisory_unlock_all()")
CLAIM_ALERT = text("""
UPDATE alert_deliveries
SET attempt_count = attempt_count + 1, attempted_at = now()
WHERE alert_id = (
    SELECT alert_id
    FROM alert_deliveries
    WHERE organization_id = :organization_id AND state = 'pending'
    ORDER BY attempt_count, created_at, alert_id
    LIMIT 1
    FOR UPDATE
)
RETURNING alert_id
""")
RECORD_DELIVERY = text("""
WITH ended AS (
    UPDATE alert_deliveries
    SET state = 'delivered', ended_at = now()
    WHERE alert_id = :id AND state = 'pending'
)
UPDATE alert_webhooks
SET failure_count = 0, paused_until = NULL
WHERE organization_id = :organization_id AND failure_count > 0
""")
RECORD_FAILURE = text("""
WITH failed AS (
    UPDATE alert_deliveries SET last_error = :error WHERE alert_id = :id
)
UPDATE alert_webhooks
SET failure_count = failure_count + 1,
    paused_until = now() + interval '1 second' * :part
        * least(:longest, :shortest * pow(2, least(failure_count, :doublings)))
WHERE organization_id = :organization_id AND url = :url
""")
GIVE_UP = text("""
UPDATE alert_deliveries
SET state = 'failed',
    ended_at = now(),
    last_error = coalesce(last_error, 'no attempt was made in time: check that a worker runs')
WHERE state = 'pending' AND created_at < now() - :after
RETURNING alert_id, last_error
""")


@dataclass(slots=True)
class Run:
    """Progress of one call of `deliver_alerts`: the alerts delivered and those that failed."""

    sessions: Sessions
    private: bool
    deadline: float
    delivered: list[uuid.UUID] = field(default_factory=list)
    failed: list[uuid.UUID] = field(default_factory=list)

    @property
    def may_continue(self) -> bool:
        """True until the time budget is used up."""
        return time.monotonic() < self.deadline


async def deliver_alerts(
    sessions: Sessions, *, private: bool = False, budget_s: float = BUDGET_S
) -> Run:
    """Deliver pending alerts until none is left or `budget_s` seconds have passed.

    Concurrent runs are safe: each organization is locked by one of them.
    """
    run = Run(sessions, private, time.monotonic() + budget_s)
    async with sessions.begin() as session:
        for alert_id, error in await session.execute(GIVE_UP, {"after": GIVE_UP_AFTER}):
            log.warning("alert %s was not delivered: %s", alert_id, error)
    async with lock_holder(sessions) as locks:
        while run.may_continue and (organizations := await _lock(locks)):
            async with asyncio.TaskGroup() as tasks:
                for organization_id in organizations:
                    tasks.create_task(
                        _deliver_to(run, organization_id), name=f"alerts of {organization_id}"
                    )
            await locks.execute(UNLOCK)
    return run


async def _lock(locks: AsyncSession) -> list[uuid.UUID]:
    held: list[uuid.UUID] = []
    for organization_id in (await locks.scalars(CANDIDATES, {"limit": CANDIDATES_MAX})).all():
        if retries.is_due(organization_id) and await try_lock(
            locks, f"alerts of {organization_id}"
        ):
            held.append(organization_id)
        if len(held) == WEBHOOKS_AT_ONCE:
            break
    return held


async def _deliver_to(run: Run, organization_id: uuid.UUID) -> None:
    """Send an organization's pending alerts in order, and stop at the first failure."""
    with retries.survive(organization_id):
        while run.may_continue:
            async with run.sessions.begin() as session:
                webhook = await session.scalar(
                    select(AlertWebhook).where(AlertWebhook.organization_id == organization_id)
                )
                alert_id = await session.scalar(CLAIM_ALERT, {"organization_id": organization_id})
                if webhook is None or alert_id is None:
                    return
            try:
                async with run.sessions() as session:
                    body = body_of(await find_alert(session, alert_id))
                error = await send(webhook.url, webhook.secret, body, private=run.private)
            except DatabaseUnavailable:
                raise
            # Counts as a failed attempt: the webhook is paused, and its other alerts go first.
            except Exception as failure:
                error = f"incident {retries.failed(failure, alert_id)}"
            await _record(run, webhook, alert_id, error)
            if error:
                return


async def _record(run: Run, webhook: AlertWebhook, alert_id: uuid.UUID, error: str) -> None:
    parameters = {"id": alert_id, "organization_id": webhook.organization_id}
    async with run.sessions.begin() as session:
        if not error:
            await session.execute(RECORD_DELIVERY, parameters)
            run.delivered.append(alert_id)
            return
        rest = {
            "shortest": RETRY_DELAY_S_MIN,
            "longest": RETRY_DELAY_S_MAX,
            "doublings": DOUBLINGS_MAX,
            "part": random.uniform(0.5, 1.0),
        }
        await session.execute(
            RECORD_FAILURE, parameters | rest | {"error": error, "url": webhook.url}
        )
        run.failed.append(alert_id)
