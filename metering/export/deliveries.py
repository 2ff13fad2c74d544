"""Handing batches to the biller: the second half of the stage posted → exported.

The intent is committed, then the biller is called outside any transaction, then its answer is recorded. A worker that dies in
between leaves the batch `sent`; whoever comes next hands it over again under the same identifier. One stream (customer and meter)
is worked on by one worker at a time: an advisory lock on a connection of its own, which the server frees when the worker dies.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from common.incidents import Retries
from metering.errors import StoreAway
from metering.export.export_models import BatchState
from metering.export.exporting import Answer, Exporter, Quantity, Stream, Verdict
from metering.models import TokenKind
from metering.store.db import Sessions, lock_holder

log = logging.getLogger(__name__)
retries = Retries("usage_delivery", passing=(StoreAway,))  # by stream, and by batch

STREAMS_AT_ONCE = 8  # calls in flight per worker: at 50 ms each some 160 per second, far below Stripe's 1,000
CANDIDATES_MAX = 64  # streams looked at for each round: other workers may hold the locks of the first ones
BUDGET_S = 3.0  # of one run: rating shares the worker, and should not wait long
BACKOFF_S_MIN = 5.0
BACKOFF_S_MAX = 3600.0  # of one batch
PAUSE_S_MAX = 600.0  # of everything, while the biller does not answer
BACKOFF_DOUBLINGS_MAX = 20  # keeps the power small
ERROR_LENGTH_MAX = 500
UNKNOWN_TOO_LONG = "nobody knows whether it was counted, and the biller may have forgotten its identifier: compare, then settle it"

# Streams with something to hand over, the oldest first. Where the biller has customers and meters, only those that it knows.
CANDIDATES = text("""
SELECT organization_id, price_version_id, token_kind FROM meter_batches b
WHERE state IN ('pending', 'sent') AND next_attempt_at <= now() AND (
    :account = '' OR (
        EXISTS (SELECT 1 FROM stripe_objects
                WHERE (account, kind, ref) = (:account, 'customer', b.organization_id::text))
        AND EXISTS (SELECT 1 FROM stripe_objects
                    WHERE (account, kind, ref) = (:account, 'meter', b.price_version_id || ':' || b.token_kind))))
GROUP BY 1, 2, 3 ORDER BY min(hour), 1, 2, 3 LIMIT :limit
""")
LOCK = text("SELECT pg_try_advisory_lock(hashtextextended(:name, 0))")
UNLOCK = text("SELECT pg_advisory_unlock_all()")
# `was` is how the batch stood before: one that was `sent` stays in doubt, whatever this attempt is told.
CLAIM = text("""
WITH next AS (
    SELECT id, state AS was FROM meter_batches
    WHERE (organization_id, price_version_id, token_kind) = (:organization_id, :price_version, :token_kind)
      AND state IN ('pending', 'sent') AND next_attempt_at <= now()
    ORDER BY hour, part LIMIT 1 FOR UPDATE SKIP LOCKED
)
UPDATE meter_batches b
SET state = CASE WHEN b.sent_at < now() - :remembers_for THEN 'parked' ELSE 'sent' END,
    attempt_count = b.attempt_count + CASE WHEN b.sent_at < now() - :remembers_for THEN 0 ELSE 1 END,
    sent_at = coalesce(b.sent_at, now()),
    last_error = CASE WHEN b.sent_at < now() - :remembers_for THEN :unknown ELSE b.last_error END
FROM next WHERE b.id = next.id
RETURNING b.id, b.hour, b.token_count, b.attempt_count, b.state, next.was,
          (SELECT stripe_id FROM stripe_objects
           WHERE (account, kind, ref) = (:account, 'customer', b.organization_id::text)) AS customer
""")
# Only of a batch that still waits for this answer: an error report may have come first, and it knows better.
RECORD = text("""
UPDATE meter_batches
SET state = :state, last_error = :error, next_attempt_at = now() + :delay,
    delivered_at = CASE WHEN :state = 'delivered' THEN now() END,
    sent_at = CASE WHEN :state <> 'pending' THEN sent_at END
WHERE id = :id AND state = 'sent'
""")
PAUSED = text("SELECT paused_until > now() FROM export_progress")
PAUSE = text("""
UPDATE export_progress SET failure_count = failure_count + 1, pause_reason = :reason,
    paused_until = now() + coalesce(:told, least(:longest, :shortest * pow(2, least(failure_count, :doublings))))
""")
RESUME = text("UPDATE export_progress SET failure_count = 0, pause_reason = NULL, paused_until = NULL WHERE failure_count > 0")


class Claimed(NamedTuple):
    """A batch that is about to be handed over, or that was parked instead."""

    id: uuid.UUID
    hour: datetime
    token_count: int
    attempt_count: int
    state: str
    was: str
    customer: str | None


@dataclass(slots=True)
class Run:
    """One run of `deliver_pending`: what it did, and what ended it early. Trouble with one batch ends it for all."""

    sessions: Sessions
    exporter: Exporter
    deadline: float
    delivered_count: int = 0
    parked_count: int = 0
    rejected: list[str] = field(default_factory=list)
    trouble: Answer | None = None

    @property
    def goes_on(self) -> bool:
        """Whether another batch may be claimed."""
        return self.trouble is None and time.monotonic() < self.deadline


async def deliver_pending(sessions: Sessions, exporter: Exporter, budget_s: float = BUDGET_S) -> Run:
    """Hand over what waits, until nothing does, the time is over or the biller has trouble. Any number may run at once."""
    run = Run(sessions, exporter, time.monotonic() + budget_s)
    async with sessions() as session:
        if await session.scalar(PAUSED):
            return run
    async with lock_holder(sessions) as locks:
        while run.goes_on and (streams := await _lock_streams(locks, exporter.account)):
            async with asyncio.TaskGroup() as tasks:
                for stream in streams:
                    tasks.create_task(_deliver_stream(run, stream), name=stream.lock_name)
            await locks.execute(UNLOCK)
    await _note(run)
    return run


async def _lock_streams(locks: AsyncSession, account: str) -> list[Stream]:
    found = (await locks.execute(CANDIDATES, {"account": account, "limit": CANDIDATES_MAX})).all()
    held: list[Stream] = []
    for organization_id, price_version, token_kind in found:
        stream = Stream(organization_id, price_version, TokenKind(token_kind))
        if retries.is_due(stream.lock_name) and await locks.scalar(LOCK, {"name": stream.lock_name}):
            held.append(stream)
        if len(held) == STREAMS_AT_ONCE:
            break
    return held


async def _deliver_stream(run: Run, stream: Stream) -> None:
    with retries.survive(stream.lock_name):
        await _deliver_batches(run, stream)


async def _deliver_batches(run: Run, stream: Stream) -> None:
    while run.goes_on and (batch := await _claim(run, stream)) is not None:
        if batch.state == BatchState.PARKED:
            run.parked_count += 1
            log.warning("meter batch %s is parked: %s", batch.id, UNKNOWN_TOO_LONG)
            continue
        quantity = Quantity(str(batch.id), stream, batch.hour, batch.token_count, batch.attempt_count, batch.customer or "")
        try:
            answer = await run.exporter.deliver(quantity)
        except StoreAway:
            raise
        except Exception as error:  # it says nothing of other batches, so the run goes on
            incident = Answer(Verdict.LATER, f"incident {retries.failed(error, batch.id)}", certain=False)
            await _record(run, batch, incident, is_trouble=False)
        else:
            await _record(run, batch, answer)


async def _claim(run: Run, stream: Stream) -> Claimed | None:
    parameters = {
        "organization_id": stream.organization_id,
        "price_version": stream.price_version,
        "token_kind": str(stream.token_kind),
        "account": run.exporter.account,
        "remembers_for": run.exporter.remembers_for,
        "unknown": UNKNOWN_TOO_LONG,
    }
    async with run.sessions.begin() as session:
        row = (await session.execute(CLAIM, parameters)).one_or_none()
    return None if row is None else Claimed(*row)


async def _record(run: Run, batch: Claimed, answer: Answer, *, is_trouble: bool = True) -> None:
    state = state_after(batch.was, answer)
    delay_s = answer.retry_after_s if answer.retry_after_s is not None else backoff_s(batch.attempt_count)
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
        case _ if is_trouble:
            run.trouble = answer


def state_after(was: str, answer: Answer) -> BatchState:
    """Where an answer puts a batch that stood as `was` when it was claimed."""
    in_doubt = was == BatchState.SENT  # an earlier attempt may have been counted, and this answer says nothing of that one
    match answer.verdict:
        case Verdict.DELIVERED:
            return BatchState.DELIVERED
        case Verdict.REFUSED:
            return BatchState.PARKED if in_doubt else BatchState.REJECTED
        case Verdict.LATER | Verdict.BLOCKED:
            return BatchState.SENT if in_doubt or not answer.certain else BatchState.PENDING


def backoff_s(attempt: int) -> float:
    """Seconds until the next attempt: doubling, with a random part so that many do not come back at once."""
    longest = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2.0 ** min(attempt - 1, BACKOFF_DOUBLINGS_MAX))
    return longest * random.uniform(0.5, 1.0)


async def _note(run: Run) -> None:
    """Give the biller a rest after trouble, and none after success."""
    if run.trouble is None and not run.delivered_count:
        return
    async with run.sessions.begin() as session:
        if run.trouble is None:
            await session.execute(RESUME)
            return
        told = run.trouble.retry_after_s
        parameters = {
            "reason": run.trouble.reason[:ERROR_LENGTH_MAX],
            "told": None if told is None else timedelta(seconds=told),
            "shortest": timedelta(seconds=BACKOFF_S_MIN),
            "longest": timedelta(seconds=PAUSE_S_MAX),
            "doublings": BACKOFF_DOUBLINGS_MAX,
        }
        await session.execute(PAUSE, parameters)
    log.warning("the export rests: %s", run.trouble.reason)
