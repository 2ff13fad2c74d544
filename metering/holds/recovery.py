"""Recovery of holds whose owners are dead: from journals on this machine, and by expiry.

Idempotent, and safe to run in several processes at once: a journal is locked while it is processed,
and a hold ends only once.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from common.incidents import Retries
from metering.core.errors import DatabaseUnavailable, HoldEnded
from metering.core.models import Outcome
from metering.holds.bindings import Bind
from metering.holds.hold_connection import BATCH_SIZE_MAX, HoldConnection
from metering.holds.journal import AbandonedJournal, Delivered, abandoned_journals
from metering.holds.operations import Ended, Expire, HoldAnswer, Renew, Settle, Settled
from metering.receipts.chaining import BatchSigner
from metering.store.db import CONNECT_TIMEOUT_S, BoundedConnection, StoreGate, psycopg_conninfo

log = structlog.get_logger(__name__)

# Keys: ids of the processes of journals.
retries = Retries("journal_recovery", passing=(DatabaseUnavailable, OSError))


@dataclass(frozen=True, slots=True)
class Recovered:
    """Result of a recovery: journals processed, holds settled, and tokens delivered under them."""

    journal_count: int = 0
    settled_hold_count: int = 0
    delivered_token_count: int = 0


async def recover_journals(
    directory: Path,
    database_url: str,
    gate: StoreGate | None = None,
    signer: BatchSigner | None = None,
) -> Recovered:
    """Settle the holds of all dead processes on this machine; void those without delivered tokens.

    Journalled tokens count as delivered if the transport had taken them. `gate` is shared by all
    connections of this process to the same database. `signer` signs receipts; with None they are
    unsigned. Raises: DatabaseUnavailable; the journals are kept then.
    """
    done = Recovered()
    for journal in abandoned_journals(directory):
        if not retries.is_due(journal.process_id):
            continue
        with retries.survive(journal.process_id):
            async with HoldConnection(
                database_url, journal.process_id, gate=gate, signer=signer
            ) as holds:
                one = await recover(holds, journal)
            log.info(
                "journal_recovered",
                process_id=str(journal.process_id),
                settled_hold_count=one.settled_hold_count,
            )
            done = Recovered(
                done.journal_count + 1,
                done.settled_hold_count + one.settled_hold_count,
                done.delivered_token_count + one.delivered_token_count,
            )
    return done


async def recover(holds: HoldConnection, journal: AbandonedJournal) -> Recovered:
    """Settle the holds of one journal, void the owner's other holds, and delete the journal.

    It is set aside instead if an entry was refused. Raises: DatabaseUnavailable; the journal is
    kept then.
    """
    await holds.end_other_connections()
    taken = journal.taken()
    settlements = [
        settlement(entry, *taken.get(entry.hold_id, (0, 0))) for entry in journal.delivered()
    ]
    delivered_ids = frozenset(op.hold_id for op in settlements if op.delivered_token_count)
    # A renewal without holds voids all others of the owner: those without delivered tokens. It runs
    # first, because a voided hold may have the request id of a request admitted during the outage.
    renewal = Renew(journal.process_id, frozenset(), spared_ids=delivered_ids)
    (voided,) = await holds.execute([renewal])
    if isinstance(voided, DatabaseUnavailable):
        raise voided
    await bind(
        holds, [bind for bind in journal.bindings() if bind.hold_id in delivered_ids], renewal
    )
    settled_count = voided_count = 0
    for start in range(0, len(settlements), BATCH_SIZE_MAX):
        batch = settlements[start : start + BATCH_SIZE_MAX]
        for operation, answer in zip(batch, await holds.execute(batch), strict=True):
            if isinstance(answer, Settled):
                settled_count += 1
            elif isinstance(answer, HoldEnded) and operation.hold_id not in delivered_ids:
                voided_count += 1  # by the renewal; an expired hold was settled without tokens
            elif isinstance(answer, DatabaseUnavailable):
                raise answer
            else:
                log.error("journal_entry_refused", operation=repr(operation), cause=str(answer))
    if settled_count + voided_count == len(settlements):
        journal.remove()
    else:
        journal.set_aside()
    return Recovered(1, settled_count, sum(each.delivered_token_count for each in settlements))


async def bind(holds: HoldConnection, binds: Sequence[Bind], renewal: Renew) -> None:
    """Bind holds to the requests admitted during an outage. Raises: DatabaseUnavailable."""
    for start in range(0, len(binds), BATCH_SIZE_MAX):
        batch = binds[start : start + BATCH_SIZE_MAX]
        for one, answer in zip(batch, await holds.bind(batch, renewal), strict=True):
            if isinstance(answer, DatabaseUnavailable):
                raise answer
            if answer != Ended(done=True):
                log.error(
                    "request_not_bound",
                    hold_id=str(one.hold_id),
                    request_id=str(one.request_id),
                    cause=str(answer),
                )


def settlement(
    entry: Delivered, taken_token_count: int, taken_reasoning_token_count: int = 0
) -> Settle:
    """Build the settlement of a request whose server died: failed, billed as delivered.

    Without delivered tokens nothing is billed, not even the input. A mark exceeds the journal only
    if the machine crashed and lost the journal's end.
    """
    delivered_token_count = min(taken_token_count, entry.delivered_token_count)
    return Settle(
        hold_id=entry.hold_id,
        input_token_count=entry.input_token_count if delivered_token_count else 0,
        cached_input_token_count=entry.cached_input_token_count if delivered_token_count else 0,
        generated_token_count=entry.generated_token_count,
        delivered_token_count=delivered_token_count,
        outcome=Outcome.FAILED,
        recovered=True,
        journalled_token_count=entry.delivered_token_count,
        reasoning_token_count=min(taken_reasoning_token_count, entry.reasoning_token_count),
    )


sweep_retries = Retries("hold_sweep")  # per hold


async def sweep_expired_holds(
    database_url: str, *, limit: int = 1000, signer: BatchSigner | None = None
) -> int:
    """Expire up to `limit` overdue holds and return how many ended. Concurrent calls are safe.

    `signer` signs receipts; with None they are unsigned. Raises: psycopg.OperationalError or
    DatabaseUnavailable.
    """
    async with await BoundedConnection.connect(
        psycopg_conninfo(database_url), autocommit=True, connect_timeout=CONNECT_TIMEOUT_S
    ) as connection:
        cursor = await connection.execute(
            "SELECT id FROM holds WHERE state = 'held' AND expires_at <= now() AND id <> ALL(%s)"
            " ORDER BY expires_at LIMIT %s",
            (sweep_retries.resting(), limit),
        )
        overdue = [Expire(row[0]) for row in await cursor.fetchall()]
    answers: list[HoldAnswer | Exception] = []
    async with HoldConnection(database_url, uuid.uuid4(), signer=signer) as holds:
        for start in range(0, len(overdue), BATCH_SIZE_MAX):
            answers += await holds.execute(overdue[start : start + BATCH_SIZE_MAX])
    for hold, answer in zip(overdue, answers, strict=True):
        if isinstance(answer, DatabaseUnavailable):
            raise answer
        if isinstance(answer, Exception):
            sweep_retries.failed(answer, hold.hold_id)
    return sum(1 for answer in answers if isinstance(answer, Ended) and answer.done)
