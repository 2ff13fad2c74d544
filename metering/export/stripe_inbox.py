"""Inbox of Stripe's events: they are verified, stored once by id, and handled in any order.

The endpoint answers 2xx only after the event is committed and does nothing else; the worker queries
the stored events and handles them. Handling is idempotent, and its result does not depend on their
order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from aiohttp import web
from psycopg.types.json import Jsonb
from sqlalchemy import text
from sqlalchemy.exc import DataError
from sqlalchemy.ext.asyncio import AsyncSession

from common.incidents import Retries
from metering.alerts.alerts import InvoiceEvent, InvoiceFacts, fire_invoice_alert
from metering.core.errors import DatabaseUnavailable, InvalidValue, StripeFailed
from metering.core.models import record_of
from metering.export.export_settings import WebhookSettings
from metering.export.invoice_items import hold_draft
from metering.export.invoice_payments import ONE_INVOICE, PaymentState, payment_of
from metering.export.stripe_gateway import MeterErrors, StripeGateway, verify_signature
from metering.store.db import Sessions

ALERT_OF_EVENT = {
    "invoice.payment_failed": InvoiceEvent.PAYMENT_FAILED,
    "invoice.paid": InvoiceEvent.PAID,
}

PATH = "/stripe/events"
HEAD_MAX_BYTES = 16 * 1024  # per line; all of Stripe's headers are below 1 kB
BODY_MAX_BYTES = 1024 * 1024  # per event; an invoice with many lines is some 100 kB
REQUEST_TIMEOUT_S = 10.0  # below Stripe's own timeout; a slow sender must not keep a connection
CONNECTIONS_MAX = 256  # beyond it the connection with the oldest incomplete request is closed
SHUTDOWN_S = 2.0  # for events that are being stored
EVENTS_MAX = 100  # per run
ATTEMPTS_MAX = 20  # afterwards the event is left to an operator; `weir stripe status` counts it
ERROR_LENGTH_MAX = 500
UUID_LENGTH = 36

ERROR_REPORTS = frozenset(
    {"v1.billing.meter.error_report_triggered", "v1.billing.meter.no_meter_found"}
)

# The column that each event sets: one each, so that no order of events can unset the report of
# another.
INVOICE_CREATED = "invoice.created"

INVOICE_TIMES = {
    "invoice.finalized": "finalized_at",
    "invoice.paid": "paid_at",
    "invoice.payment_failed": "payment_failed_at",
    "invoice.voided": "voided_at",
    "invoice.marked_uncollectible": "uncollectible_at",
    "invoice.overdue": "overdue_at",
}

STORE = text("""
INSERT INTO stripe_events (id, type, payload)
VALUES (:id, :type, :payload)
ON CONFLICT DO NOTHING
RETURNING id
""")


async def alert_on_payment(session: AsyncSession, stripe_invoice_id: str, kind: str) -> None:
    """Insert the alert for a stored payment event of the type `kind`. The caller commits.

    A failure that a payment has made obsolete and an invoice of zero cause no alert.
    """
    invoice = (await session.execute(ONE_INVOICE, {"id": stripe_invoice_id})).one_or_none()
    event = ALERT_OF_EVENT.get(kind)
    if invoice is None or event is None:
        return
    is_stale = event is InvoiceEvent.PAYMENT_FAILED and invoice.payment_state != PaymentState.FAILED
    if is_stale or not (invoice.amount_due_minor or invoice.amount_paid_minor):
        return
    facts = record_of(InvoiceFacts, payment_of(invoice))
    await fire_invoice_alert(session, invoice.organization_id, invoice.id, event, facts)


log = logging.getLogger(__name__)
# Aiohttp logs a traceback for each request that is not HTTP.
http_log = logging.getLogger(f"{__name__}.http")
http_log.setLevel(logging.CRITICAL)
retries = Retries("stripe_events", passing=(DatabaseUnavailable,))  # per event

UNHANDLED = text("""
SELECT id, type
FROM stripe_events
WHERE handled_at IS NULL AND attempt_count < :attempts
ORDER BY attempt_count, received_at
LIMIT :limit
""")

PAYLOAD = text("SELECT payload FROM stripe_events WHERE id = :id AND handled_at IS NULL")

LOCK_EVENT = text("""
SELECT payload
FROM stripe_events
WHERE id = :id AND handled_at IS NULL
FOR UPDATE SKIP LOCKED
""")

RECORD_HANDLING = text(
    "UPDATE stripe_events SET handled_at = now(), outcome = :outcome WHERE id = :id"
)

RECORD_FAILURE = text("""
UPDATE stripe_events
SET attempt_count = attempt_count + 1, outcome = :why
WHERE id = :id AND handled_at IS NULL
""")

# Amounts are those of the latest event, or the larger ones of two events of the same second.
UPSERT_INVOICE = text("""
INSERT INTO stripe_invoices AS known
    (id, organization_id, customer_id, currency_code, period_start, period_end, amount_due_minor,
     amount_paid_minor, total_minor, finalized_at, paid_at, payment_failed_at, voided_at,
     uncollectible_at, overdue_at, stripe_number, hosted_url, last_event_at)
VALUES (
    :id,
    (
        SELECT ref::uuid
        FROM stripe_objects
        WHERE kind = 'customer' AND stripe_id = :customer_id
        LIMIT 1
    ),
    :customer_id, :currency_code, :period_start, :period_end, :amount_due, :amount_paid, :total,
    :finalized_at, :paid_at, :payment_failed_at, :voided_at, :uncollectible_at, :overdue_at,
    :stripe_number, :hosted_url, :last_event_at
)
ON CONFLICT (id) DO UPDATE
SET finalized_at = least(known.finalized_at, excluded.finalized_at),
    paid_at = least(known.paid_at, excluded.paid_at),
    payment_failed_at = greatest(known.payment_failed_at, excluded.payment_failed_at),
    voided_at = least(known.voided_at, excluded.voided_at),
    uncollectible_at = least(known.uncollectible_at, excluded.uncollectible_at),
    overdue_at = least(known.overdue_at, excluded.overdue_at),
    stripe_number = coalesce(known.stripe_number, excluded.stripe_number),
    hosted_url = coalesce(known.hosted_url, excluded.hosted_url),
    amount_paid_minor = greatest(known.amount_paid_minor, excluded.amount_paid_minor),
    amount_due_minor = CASE
        WHEN (excluded.last_event_at, excluded.amount_due_minor)
            > (known.last_event_at, known.amount_due_minor)
        THEN excluded.amount_due_minor ELSE known.amount_due_minor END,
    total_minor = CASE
        WHEN (excluded.last_event_at, excluded.total_minor)
            > (known.last_event_at, coalesce(known.total_minor, excluded.total_minor - 1))
        THEN excluded.total_minor ELSE known.total_minor END,
    last_event_at = greatest(known.last_event_at, excluded.last_event_at)
""")

REJECT = text("""
UPDATE meter_batches
SET state = 'rejected', last_error = :error
WHERE id = :id AND state IN ('pending', 'sent', 'delivered', 'parked')
RETURNING id
""")


async def store_event(
    sessions: Sessions, body: bytes, signature: str, secrets: Sequence[str]
) -> bool:
    """Verify and store an event from Stripe; return False if it was stored before.

    Raises: InvalidValue if the signature or the body is not valid.
    """
    try:
        values = parsed_event(body, signature, secrets)
        async with sessions.begin() as session:
            return await session.scalar(STORE, values) is not None
    except (DataError, UnicodeEncodeError) as error:
        # The database has no NUL, no lone surrogate and no NaN.
        raise InvalidValue("body", "has a NUL, a lone surrogate or a NaN") from error


def parsed_event(body: bytes, signature: str, secrets: Sequence[str]) -> dict[str, Any]:
    """Verify an event and convert it to the parameters of its row. Raises: InvalidValue."""
    verify_signature(body, signature, secrets)
    try:
        payload = json.loads(body)
        event_id, kind = payload["id"], payload["type"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidValue("body", "must be a Stripe event, a JSON object") from error
    if not (isinstance(event_id, str) and isinstance(kind, str)):
        raise InvalidValue("body", "must be a Stripe event, whose id and type are texts")
    return {"id": event_id, "type": kind, "payload": Jsonb(payload)}


async def handle_events(sessions: Sessions, gateway: StripeGateway) -> int:
    """Handle the stored events and return how many succeeded. Failed ones are retried later."""
    async with sessions() as session:
        waiting = (
            await session.execute(UNHANDLED, {"attempts": ATTEMPTS_MAX, "limit": EVENTS_MAX})
        ).all()
    handled = 0
    for event_id, kind in waiting:
        if not retries.is_due(event_id):
            continue
        try:
            # Fetched before the transaction: the webhook only announces a report.
            errors = await gateway.meter_errors(event_id) if kind in ERROR_REPORTS else None
            if kind == INVOICE_CREATED and gateway.settings.finalizes:
                await _hold(sessions, gateway, event_id)
            async with sessions.begin() as session:
                handled += await _handle(session, event_id, kind, errors)
        except DatabaseUnavailable:
            raise
        except Exception as error:
            if isinstance(error, (StripeFailed, KeyError, TypeError, ValueError)):
                log.warning("Stripe event %s is not handled: %s", event_id, error)
                why = str(error)[:ERROR_LENGTH_MAX]
            else:
                why = f"incident {retries.failed(error, event_id)}"
            async with sessions.begin() as session:
                await session.execute(RECORD_FAILURE, {"id": event_id, "why": why})
    return handled


async def _hold(sessions: Sessions, gateway: StripeGateway, event_id: str) -> None:
    """Keep a draft of usage open until its month closes. Raises: StripeFailed, KeyError."""
    async with sessions() as session:
        payload = await session.scalar(PAYLOAD, {"id": event_id})
    if payload is not None:
        await hold_draft(gateway, str(payload["data"]["object"]["id"]))


async def _handle(
    session: AsyncSession, event_id: str, kind: str, errors: MeterErrors | None
) -> int:
    payload = await session.scalar(LOCK_EVENT, {"id": event_id})
    if payload is None:
        return 0  # another worker handles it
    if errors is not None:
        outcome = await _reject(session, errors)
        log.warning("Stripe did not count meter events: %s", outcome)
    elif kind in INVOICE_TIMES:
        facts = invoice_facts(kind, payload)
        await session.execute(UPSERT_INVOICE, facts)
        await alert_on_payment(session, facts["id"], kind)
        outcome = "invoice"
    elif kind == INVOICE_CREATED:
        outcome = "draft"
    else:
        outcome = "not needed"
    await session.execute(RECORD_HANDLING, {"id": event_id, "outcome": outcome[:ERROR_LENGTH_MAX]})
    return 1


async def _reject(session: AsyncSession, errors: MeterErrors) -> str:
    """Reject the batches that a report names as samples; `weir reconcile` finds the others."""
    rejected = 0
    for identifier, reason in errors.by_identifier.items():
        batch_id = batch_of(identifier)
        if batch_id is not None:
            updated = await session.scalar(
                REJECT, {"id": batch_id, "error": reason[:ERROR_LENGTH_MAX]}
            )
            rejected += updated is not None
    return (
        f"{errors.error_count} errors, {len(errors.by_identifier)} named, {rejected} batches"
        " rejected"
    )


def batch_of(identifier: str) -> uuid.UUID | None:
    """Extract the batch id from an identifier or idempotency key; None if it is not ours."""
    try:
        return uuid.UUID(identifier[:UUID_LENGTH])
    except ValueError:
        return None


def invoice_facts(kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an invoice event to the parameters of its row. Raises: KeyError, TypeError."""
    invoice, event_at = payload["data"]["object"], datetime.fromtimestamp(payload["created"], UTC)
    times = dict.fromkeys(INVOICE_TIMES.values()) | {INVOICE_TIMES[kind]: event_at}
    return times | {
        "id": invoice["id"],
        "customer_id": invoice["customer"],
        "currency_code": str(invoice["currency"]).upper(),
        "period_start": datetime.fromtimestamp(invoice["period_start"], UTC),
        "period_end": datetime.fromtimestamp(invoice["period_end"], UTC),
        "amount_due": int(invoice["amount_due"]),
        "amount_paid": int(invoice["amount_paid"]),
        "total": int(invoice.get("total", invoice["amount_due"])),
        "stripe_number": invoice.get("number"),
        "hosted_url": invoice.get("hosted_invoice_url"),
        "last_event_at": event_at,
    }


class EventServer(web.Server):
    """HTTP server for Stripe's events: one path, one method, one request per connection.

    The number of connections is limited. A reverse proxy terminates TLS.
    """

    def __init__(self, sessions: Sessions, secrets: Sequence[str]) -> None:
        self._sessions, self._secrets = sessions, secrets
        # Timeouts of connections whose requests are incomplete, the oldest first.
        self._reading: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        super().__init__(
            self._answer,
            max_line_size=HEAD_MAX_BYTES,
            max_field_size=HEAD_MAX_BYTES,
            access_log=None,
            logger=http_log,
        )

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Implement `web.Server.connection_made`; abort the oldest one above the limit."""
        super().connection_made(handler, transport)
        self._reading[handler] = asyncio.get_running_loop().call_later(
            REQUEST_TIMEOUT_S, transport.abort
        )
        if len(self.connections) > CONNECTIONS_MAX:  # slow senders must not block Stripe's events
            oldest = next(iter(self._reading))
            (oldest.transport or transport).abort()

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        super().connection_lost(handler, exc)
        self._end_reading(handler)

    def _end_reading(self, handler: web.RequestHandler) -> None:
        if (end := self._reading.pop(handler, None)) is not None:
            end.cancel()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        status, why = await self._take(request)
        response = web.Response(status=status, text=f"{why or status.phrase}\n")
        response.force_close()
        return response

    async def _take(self, request: web.BaseRequest) -> tuple[HTTPStatus, str]:
        if request.path != PATH:
            return HTTPStatus.NOT_FOUND, ""
        if request.method != "POST":
            return HTTPStatus.METHOD_NOT_ALLOWED, ""
        if request.content_length is None:
            return HTTPStatus.LENGTH_REQUIRED, ""
        if request.content_length > BODY_MAX_BYTES:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, ""
        body = await request.read()
        self._end_reading(request.protocol)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                new = await store_event(
                    self._sessions, body, request.headers.get("Stripe-Signature", ""), self._secrets
                )
        except InvalidValue as error:
            return HTTPStatus.BAD_REQUEST, str(error)
        except (DatabaseUnavailable, TimeoutError):
            log.warning("a Stripe event is not stored: the database is unavailable")
            return HTTPStatus.SERVICE_UNAVAILABLE, "try again later"
        except Exception:  # Stripe sends the event again
            log.exception("a Stripe event is not stored")
            return HTTPStatus.INTERNAL_SERVER_ERROR, "try again later"
        return HTTPStatus.OK, "stored" if new else "known"


@contextlib.asynccontextmanager
async def webhook_server(sessions: Sessions, settings: WebhookSettings) -> AsyncIterator[str]:
    """Listen for Stripe's events while the context is open; yields the URL."""
    events = EventServer(sessions, settings.secrets)
    server = await asyncio.get_running_loop().create_server(
        events, settings.listen_host, settings.listen_port
    )
    host, port = server.sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}{PATH}"
    finally:
        server.close()
        await events.shutdown(SHUTDOWN_S)


async def serve_webhooks(
    sessions: Sessions, settings: WebhookSettings, report: Callable[[str], None]
) -> None:
    """Serve Stripe's events until SIGTERM or SIGINT. `report` is called with the URL."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with webhook_server(sessions, settings) as address:
        report(address)
        await stopping.wait()
