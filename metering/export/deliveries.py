"""Pipeline stage posted → exported: hourly batches of rated usage, and their delivery to the
biller.

A new part of an hour is computed as the sum of its usage events less the existing parts, so nothing
has to be remembered. The part number is unique: two workers that compute a part write it once.

A delivery commits the intent, calls the biller outside any transaction, and records the answer. If
the worker dies in between, the batch stays `sent` and the next worker delivers it again under the
same identifier. One worker at a time delivers a stream (customer and meter): it holds an advisory
lock on a connection of its own, which the server releases when the worker dies.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from common.backoff import backoff_s
from common.incidents import Retries
from metering.core.errors import DatabaseUnavailable
from metering.core.models import TokenKind
from metering.export.export_settings import Destination, export_settings
from metering.export.exporting import (
    Answer,
    BatchState,
    Exporter,
    FileExporter,
    Quantity,
    Stream,
    Verdict,
    derived_id,
)
from metering.ledger.ledger import POSTING_LOCK
from metering.pricing.prices import TOKENS_BY_KIND
from metering.store.db import Sessions, lock_holder, patience, try_lock

# After the end of an hour: most of its usage is rated by then, so that most hours have one part.
CLOSE_DELAY = timedelta(minutes=2)
BACK_TO = timedelta(days=35)  # how far the first run looks back: billers reject older usage
CLOSE_AT_ONCE = timedelta(hours=1)  # per statement: a day of a busy service exceeds the time limit
CLOSE_BUDGET_S = 20.0  # per run: bounds the first one, which covers 35 days; the next run continues
FORM_S = 30.0  # for an hour of some ten million events; the statement blocks no other
LONG_STATEMENTS = text(f"SET LOCAL statement_timeout = '{FORM_S:.0f}s'")
# `rated_at` is the start of its transaction; it becomes visible at the commit, at most a minute
# later by the task's time limit.
SCAN_MARGIN = timedelta(seconds=150)

# The identifier does not include the quantity: see `exporting.py`.
BATCH_ID = derived_id(
    "'meter batch'",
    "organization_id",
    "price_version_id",
    "token_kind",
    "extract(epoch FROM hour)::bigint",
    "parts.count",
)
# Joins the organizations, since the index of the events begins with their id.
FORM = text(f"""
WITH used AS (
    SELECT organization_id, price_version_id, kind.token_kind,
           date_trunc('hour', settled_at, 'UTC') AS hour, sum(kind.token_count) AS token_count
    FROM organizations o
    JOIN usage_events ON organization_id = o.id,
    {TOKENS_BY_KIND}
    WHERE rated_at IS NOT NULL
      AND settled_at >= :begins
      AND settled_at < :ends
      AND (CAST(:organization_id AS uuid) IS NULL OR o.id = :organization_id)
    GROUP BY 1, 2, 3, 4
)
INSERT INTO meter_batches
    (id, organization_id, price_version_id, token_kind, hour, part, token_count)
SELECT {BATCH_ID},
       organization_id, price_version_id, token_kind, hour, parts.count,
       used.token_count - parts.token_count
FROM used,
LATERAL (
    SELECT count(*) AS count,
           coalesce(sum(b.token_count) FILTER (WHERE b.state <> 'cancelled'), 0) AS token_count
    FROM meter_batches b
    WHERE (b.organization_id, b.price_version_id, b.token_kind, b.hour)
        = (used.organization_id, used.price_version_id, used.token_kind, used.hour)
) AS parts
WHERE used.token_count > parts.token_count
ON CONFLICT (organization_id, price_version_id, token_kind, hour, part) DO NOTHING
""")
# First hour of a range that has rated usage. Usage rated later is late, here as everywhere.
FIRST_USED = text("""
SELECT date_trunc('hour', min(used.settled_at), 'UTC')
FROM organizations o,
LATERAL (
    SELECT settled_at
    FROM usage_events
    WHERE organization_id = o.id
      AND rated_at IS NOT NULL
      AND settled_at >= :begins
      AND settled_at < :ends
    ORDER BY settled_at
    LIMIT 1
) AS used
""")
BEGIN = text("""
INSERT INTO export_progress (id, closed_until, scanned_until)
VALUES (1, date_trunc('hour', now() - :back_to, 'UTC'), now())
ON CONFLICT DO NOTHING
""")
# A process that finds the row locked leaves the work to the process that holds it.
LOCK_PROGRESS = text("""
SELECT closed_until, scanned_until, now() AS now,
       date_trunc('hour', now() - :close_delay, 'UTC') AS closable_until
FROM export_progress
FOR UPDATE SKIP LOCKED
""")
LATE = text("""
SELECT DISTINCT organization_id, date_trunc('hour', settled_at, 'UTC') AS hour
FROM usage_events
WHERE rated_at >= :since AND settled_at < :closed_until
ORDER BY 2, 1
""")
# A month close rates as well, in a transaction that may outlast the margin.
CLOSING = text(f"""
SELECT EXISTS (
    SELECT
    FROM pg_locks
    WHERE locktype = 'advisory'
      AND classid = {POSTING_LOCK}
      AND objsubid = 2
      AND granted
      AND mode = 'ExclusiveLock'
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
""")

# Calls in flight per worker: at 50 ms each some 160 per second, far below Stripe's 1,000.
STREAMS_AT_ONCE = 8
# Streams looked at for each round: other workers may hold the locks of the first ones.
CANDIDATES_MAX = 64
BUDGET_S = 3.0  # per run: rating shares the worker and should not wait long
BACKOFF_S_MIN = 5.0
BACKOFF_S_MAX = 3600.0  # maximum pause of one batch
PAUSE_S_MAX = 600.0  # of all deliveries, while the biller does not answer
BACKOFF_DOUBLINGS_MAX = 20  # caps the exponent of the backoff
ERROR_LENGTH_MAX = 500
UNKNOWN_TOO_LONG = (
    "it is unknown whether it was counted, and the biller may have forgotten its identifier:"
    " compare, then settle it"
)


async def form_batches(sessions: Sessions) -> int:
    """Form the missing batches of completed hours, late usage included; return their number."""
    formed = 0
    async with sessions.begin() as session:
        await session.execute(BEGIN, {"back_to": BACK_TO})
    deadline = time.monotonic() + CLOSE_BUDGET_S
    with patience(FORM_S + 2):
        while time.monotonic() < deadline:
            async with sessions.begin() as session:
                progress = await _lock_progress(session)
                if progress is None or progress.closed_until >= progress.closable_until:
                    break
                hours = {"begins": progress.closed_until, "ends": progress.closable_until}
                begins = await session.scalar(FIRST_USED, hours) or progress.closable_until
                ends = min(begins + CLOSE_AT_ONCE, progress.closable_until)
                formed += await form(session, begins, ends)
                await session.execute(
                    text("UPDATE export_progress SET closed_until = :ends"), {"ends": ends}
                )
        async with sessions.begin() as session:
            if (progress := await _lock_progress(session)) is not None:
                formed += await _form_late(session, progress)
    return formed


async def form(
    session: AsyncSession,
    begins: datetime,
    ends: datetime,
    organization_id: uuid.UUID | None = None,
) -> int:
    """Form the missing batches of the hours in [begins, ends), of one organization or all.

    Returns the number of batches.
    """
    parameters = {"begins": begins, "ends": ends, "organization_id": organization_id}
    result = await session.execute(FORM, parameters)
    return int(getattr(result, "rowcount", 0))


async def _form_late(session: AsyncSession, progress: Row[Any]) -> int:
    # Checked first: a close that commits later is scanned again.
    closing = await session.scalar(CLOSING)
    parameters = {
        "since": progress.scanned_until - SCAN_MARGIN,
        "closed_until": progress.closed_until,
    }
    late = (await session.execute(LATE, parameters)).all()
    formed = 0
    for organization_id, hour in late:
        formed += await form(session, hour, hour + timedelta(hours=1), organization_id)
    if not closing:
        await session.execute(
            text("UPDATE export_progress SET scanned_until = :now"), {"now": progress.now}
        )
    return formed


async def _lock_progress(session: AsyncSession) -> Row[Any] | None:
    await session.execute(LONG_STATEMENTS)
    return (await session.execute(LOCK_PROGRESS, {"close_delay": CLOSE_DELAY})).one_or_none()


log = logging.getLogger(__name__)
retries = Retries("usage_delivery", passing=(DatabaseUnavailable,))  # per stream and batch


# Streams with batches to deliver, the oldest first; where the biller has customers and meters, only
# known ones.
CANDIDATES = text("""
SELECT organization_id, price_version_id, token_kind
FROM meter_batches b
WHERE state IN ('pending', 'sent')
  AND next_attempt_at <= now()
  AND (
      :account = ''
      OR (
          EXISTS (
              SELECT
              FROM stripe_objects
              WHERE (account, kind, ref) = (:account, 'customer', b.organization_id::text)
          )
          AND EXISTS (
              SELECT
              FROM stripe_objects
              WHERE (account, kind, ref)
                  = (:account, 'meter', b.price_version_id || ':' || b.token_kind)
          )
      )
  )
GROUP BY 1, 2, 3
ORDER BY min(hour), 1, 2, 3
LIMIT :limit
""")
UNLOCK = text("SELECT pg_advisory_unlock_all()")
# `was` is the previous state: a batch that was `sent` stays in doubt, whatever this attempt
# returns.
CLAIM_BATCH = text("""
WITH next AS (
    SELECT id, state AS was, sent_at < now() - :remembers_for AS is_too_old
    FROM meter_batches
    WHERE (organization_id, price_version_id, token_kind)
        = (:organization_id, :price_version, :token_kind)
      AND state IN ('pending', 'sent')
      AND next_attempt_at <= now()
    ORDER BY hour, part
    LIMIT 1
    FOR UPDATE SKIP LOCKED
)
UPDATE meter_batches b
SET state = CASE WHEN next.is_too_old THEN 'parked' ELSE 'sent' END,
    attempt_count = b.attempt_count + CASE WHEN next.is_too_old THEN 0 ELSE 1 END,
    sent_at = coalesce(b.sent_at, now()),
    last_error = CASE WHEN next.is_too_old THEN :unknown ELSE b.last_error END
FROM next
WHERE b.id = next.id
RETURNING b.id, b.hour, b.token_count, b.attempt_count, b.state, next.was,
          (
              SELECT stripe_id
              FROM stripe_objects
              WHERE (account, kind, ref) = (:account, 'customer', b.organization_id::text)
          ) AS customer
""")
# Applies only while the batch waits for this answer: an error report that came first takes
# precedence.
RECORD = text("""
UPDATE meter_batches
SET state = :state,
    last_error = :error,
    next_attempt_at = now() + :delay,
    delivered_at = CASE WHEN :state = 'delivered' THEN now() END,
    sent_at = CASE WHEN :state <> 'pending' THEN sent_at END
WHERE id = :id AND state = 'sent'
""")
PAUSED = text("SELECT paused_until > now() FROM export_progress")
PAUSE = text("""
UPDATE export_progress
SET failure_count = failure_count + 1,
    pause_reason = :reason,
    paused_until = now() + coalesce(
        :retry_after, least(:longest, :shortest * pow(2, least(failure_count, :doublings))))
""")
RESUME = text("""
UPDATE export_progress
SET failure_count = 0, pause_reason = NULL, paused_until = NULL
WHERE failure_count > 0
""")


@dataclass(slots=True)
class Run:
    """Progress of one `deliver_pending`. `failure` is the biller's failure that ended it."""

    sessions: Sessions
    exporter: Exporter
    deadline: float
    delivered_count: int = 0
    parked_count: int = 0
    rejected: list[str] = field(default_factory=list)
    failure: Answer | None = None

    @property
    def may_continue(self) -> bool:
        """True until the biller fails or the time budget is used up."""
        return self.failure is None and time.monotonic() < self.deadline


async def deliver_pending(
    sessions: Sessions, exporter: Exporter, budget_s: float = BUDGET_S
) -> Run:
    """Deliver pending batches until none is left, the biller fails, or `budget_s` is over.

    Concurrent runs are safe: each stream is locked by one of them.
    """
    run = Run(sessions, exporter, time.monotonic() + budget_s)
    async with sessions() as session:
        if await session.scalar(PAUSED):
            return run
    async with lock_holder(sessions) as locks:
        while run.may_continue and (streams := await _lock_streams(locks, exporter.account)):
            async with asyncio.TaskGroup() as tasks:
                for stream in streams:
                    tasks.create_task(_deliver_stream(run, stream), name=stream.lock_name)
            await locks.execute(UNLOCK)
    await _note(run)
    return run


async def _lock_streams(locks: AsyncSession, account: str) -> list[Stream]:
    candidates = (
        await locks.execute(CANDIDATES, {"account": account, "limit": CANDIDATES_MAX})
    ).all()
    held: list[Stream] = []
    for organization_id, price_version, token_kind in candidates:
        stream = Stream(organization_id, price_version, TokenKind(token_kind))
        if retries.is_due(stream.lock_name) and await try_lock(locks, stream.lock_name):
            held.append(stream)
        if len(held) == STREAMS_AT_ONCE:
            break
    return held


async def _deliver_stream(run: Run, stream: Stream) -> None:
    with retries.survive(stream.lock_name):
        while run.may_continue and (batch := await _claim(run, stream)) is not None:
            if batch.state == BatchState.PARKED:
                run.parked_count += 1
                log.warning("meter batch %s is parked: %s", batch.id, UNKNOWN_TOO_LONG)
                continue
            quantity = Quantity(
                str(batch.id),
                stream,
                batch.hour,
                batch.token_count,
                batch.attempt_count,
                batch.customer or "",
            )
            try:
                answer = await run.exporter.deliver(quantity)
            except DatabaseUnavailable:
                raise
            except Exception as error:  # other batches are not affected, so the run continues
                incident = Answer(
                    Verdict.LATER, f"incident {retries.failed(error, batch.id)}", certain=False
                )
                await _record(run, batch, incident, is_run_failure=False)
            else:
                await _record(run, batch, answer)


async def _claim(run: Run, stream: Stream) -> Row[Any] | None:
    """Claim a stream's next batch (columns of `CLAIM_BATCH`), or park it if it is too old."""
    parameters = {
        "organization_id": stream.organization_id,
        "price_version": stream.price_version,
        "token_kind": str(stream.token_kind),
        "account": run.exporter.account,
        "remembers_for": run.exporter.remembers_for,
        "unknown": UNKNOWN_TOO_LONG,
    }
    async with run.sessions.begin() as session:
        return (await session.execute(CLAIM_BATCH, parameters)).one_or_none()


async def _record(
    run: Run, batch: Row[Any], answer: Answer, *, is_run_failure: bool = True
) -> None:
    state = state_after(batch.was, answer)
    delay_s = (
        answer.retry_after_s
        if answer.retry_after_s is not None
        else retry_delay_s(batch.attempt_count)
    )
    parameters = {
        "id": batch.id,
        "state": str(state),
        "error": answer.reason[:ERROR_LENGTH_MAX] or None,
        "delay": timedelta(seconds=delay_s),
    }
    async with run.sessions.begin() as session:
        await session.execute(RECORD, parameters)
    match state:
        case BatchState.DELIVERED:
            run.delivered_count += 1
        case BatchState.REJECTED | BatchState.PARKED:
            run.rejected.append(str(batch.id))
            log.warning("meter batch %s is %s: %s", batch.id, state, answer.reason)
        case _ if is_run_failure:
            run.failure = answer


def state_after(was: str, answer: Answer) -> BatchState:
    """Return the new state of a batch, from its state `was` when it was claimed and the answer."""
    # An earlier attempt may have been counted, whatever this answer says.
    in_doubt = was == BatchState.SENT
    match answer.verdict:
        case Verdict.DELIVERED:
            return BatchState.DELIVERED
        case Verdict.REFUSED:
            return BatchState.PARKED if in_doubt else BatchState.REJECTED
        case Verdict.LATER | Verdict.BLOCKED:
            return BatchState.SENT if in_doubt or not answer.certain else BatchState.PENDING


def retry_delay_s(attempt_count: int) -> float:
    """Compute the seconds until the next attempt, with jitter."""
    return backoff_s(attempt_count, BACKOFF_S_MIN, BACKOFF_S_MAX) * random.uniform(0.5, 1.0)


async def _note(run: Run) -> None:
    """Pause the export after a failure of the biller; end the pause after a success."""
    if run.failure is None and not run.delivered_count:
        return
    async with run.sessions.begin() as session:
        if run.failure is None:
            await session.execute(RESUME)
            return
        retry_after_s = run.failure.retry_after_s
        parameters = {
            "reason": run.failure.reason[:ERROR_LENGTH_MAX],
            "retry_after": (None if retry_after_s is None else timedelta(seconds=retry_after_s)),
            "shortest": timedelta(seconds=BACKOFF_S_MIN),
            "longest": timedelta(seconds=PAUSE_S_MAX),
            "doublings": BACKOFF_DOUBLINGS_MAX,
        }
        await session.execute(PAUSE, parameters)
    log.warning("the export is paused: %s", run.failure.reason)


export_retries = Retries("usage_export", passing=(DatabaseUnavailable,))  # per stage


async def export_usage(sessions: Sessions, environment: Mapping[str, str]) -> None:
    """Form batches, deliver them and handle Stripe's events. Does nothing if the export is off.

    If a stage fails unexpectedly, it is retried later and the others run. Raises: InvalidValue with
    the name of an invalid setting.
    """
    settings = export_settings(environment)
    if settings.destination is Destination.OFF:
        return
    stages: list[Callable[[], Awaitable[object]]] = [partial(form_batches, sessions)]
    if settings.stripe is None:
        stages.append(partial(deliver_pending, sessions, FileExporter(settings.file)))
    else:
        # Imported here: the import takes a second, which only installations that bill with Stripe
        # need.
        from metering.export.invoice_items import invoice_late_usage, settle_months
        from metering.export.stripe_gateway import StripeGateway
        from metering.export.stripe_inbox import handle_events

        billing = (deliver_pending, handle_events, invoice_late_usage, settle_months)
        stages += (partial(stage, sessions, StripeGateway(settings.stripe)) for stage in billing)
    for number, stage in enumerate(stages):
        if export_retries.is_due(number):
            with export_retries.survive(number):
                await stage()
