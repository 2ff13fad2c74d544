"""Connection of one process for batches of hold operations: one transaction each, atomic.

A batch takes the fast path as far as the cache decides it (`fast_path.py`), and the rest of it the
slow path (`slow_path.py`). The connection is opened on demand and dropped after every failure.
Every operation is answered: conflicts are retried, an unavailable or slow database answers
`DatabaseUnavailable`, and the operation that breaks a batch is found by running each one alone.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import structlog

from common.backoff import Backoff
from metering.core.errors import DatabaseUnavailable, InvariantViolated, WriteConflict
from metering.holds.bindings import Bind
from metering.holds.decide import END_USERS_MAX, HoldOwner, OwnHolds
from metering.holds.fast_path import (
    FastBatch,
    attach_rules,
    execute_fast,
    plan_admissions,
    plan_extensions,
    plan_settlements,
    seems_to_fit,
)
from metering.holds.hold_cache import HoldCache, cache_of
from metering.holds.operations import Admit, Admitted, Ended, HoldAnswer, HoldOperation, Renew
from metering.holds.preauthorized_holds import execute_binds
from metering.holds.read import SELECT_RULES_BY_ID, rules_of_rows
from metering.holds.slow_path import execute_slow
from metering.quotas.refusals import Refusals
from metering.receipts.chaining import BatchSigner
from metering.store.db import (
    CONNECT_TIMEOUT_S,
    KEEPALIVES,
    BoundedConnection,
    StoreGate,
    psycopg_conninfo,
)
from metering.store.pipeline import Connection, id_number_array, run_pipeline
from metering.store.refusals import LOST, PAUSE_MAX_S, PAUSE_MIN_S, REPEATED, cause_of

EXPIRY_S = 60.0  # longest pause of a process (suspension, slow database) that keeps its holds
BATCH_SIZE_MAX = 128  # decided in one event-loop turn, 0.03 ms per operation (bench/admission.py)
CONFLICT_ATTEMPTS_MAX = 5  # two processes racing for the same new request id need one retry
BATCH_TIMEOUT_S = 8.0  # above the server's time limits: exceeded by a frozen server or network only

SERVER_LIMITS = (
    # Batches take milliseconds. A process that pauses longer between two statements is frozen, and
    # holds counter locks that every other process waits for.
    "idle_in_transaction_session_timeout=2000",
    "lock_timeout=4000",  # above it, so that a batch outwaits a frozen one
    "statement_timeout=6000",
)

# Every statement of a batch finds its rows by key. Generic plans, because planning costs as much as
# running; index scans only, because a plan made on empty tables would keep scanning them.
PLANS = (
    "plan_cache_mode=force_generic_plan",
    "enable_seqscan=off",
    "enable_hashjoin=off",
    "enable_mergejoin=off",
    "jit=off",
)

# Ends the connections of the same process to this database, and waits at most 1 s for each. The
# application name contains the owner's id.
TERMINATE_OTHERS = """
SELECT pg_terminate_backend(pid, 1000)
FROM pg_stat_get_activity(NULL)
WHERE application_name = current_setting('application_name')
  AND datid = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND pid <> pg_backend_pid()
"""

# Sent on each new connection: the database may have been replaced, and receipts signed with a key
# that it lacks could not be verified.
PUBLISH_KEY = "INSERT INTO receipt_keys (id, public_key) VALUES (%s, %s) ON CONFLICT DO NOTHING"
log = structlog.get_logger(__name__)
Op = TypeVar("Op")
Answers = Coroutine[Any, Any, list[HoldAnswer | Exception]]
Plan = Callable[[HoldCache, OwnHolds, Sequence[HoldOperation]], FastBatch | None]

# Ways to decide a batch of admissions, and another batch: its ends before its extensions.
ADMISSION_PLANS: tuple[Plan, ...] = (plan_admissions,)
CHANGE_PLANS: tuple[Plan, ...] = (plan_settlements, plan_extensions)


class HoldConnection:
    """Connection for batches of hold operations, one at a time. Close it, or use it in `with`."""

    def __init__(
        self,
        database_url: str,
        process_id: uuid.UUID,
        *,
        expiry_s: float = EXPIRY_S,
        gate: StoreGate | None = None,
        signer: BatchSigner | None = None,
        own: OwnHolds | None = None,
        end_users_max: int = END_USERS_MAX,
    ) -> None:
        """Store the parameters; the first batch connects.

        `gate` is shared by all connections of this process to the same database. `signer` signs
        receipts; with None they are unsigned. `own` is shared by all connections of the same owner.
        An organization may have `end_users_max` end users.
        """
        self._conninfo = psycopg_conninfo(database_url)
        self._owner = HoldOwner(
            process_id, expiry_s, signer, {} if own is None else own, end_users_max
        )
        self._own = self._owner.own
        self._gate = gate or StoreGate()
        self.refusals = Refusals()
        self._connection: BoundedConnection | None = None
        self._cache: HoldCache | None = None  # cache of the connection
        self._watchdog: asyncio.TimerHandle | None = None  # of the batch under way
        self._late_at, self._is_late = math.inf, False

    async def __aenter__(self) -> HoldConnection:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def seems_to_fit(self, op: Admit) -> bool:
        """Return True if an admission fits by the cache, which may be outdated. Sends no query."""
        return self._cache is not None and seems_to_fit(self._cache, op)

    async def execute(self, batch: Sequence[HoldOperation]) -> list[HoldAnswer | Exception]:
        """Execute a batch and return the answers in order, errors included.

        An operation answered with `DatabaseUnavailable` may have been committed.
        """
        plans = ADMISSION_PLANS
        if {*map(type, batch)} != {Admit}:
            plans = CHANGE_PLANS
            if self._cache is not None and (missing := attach_rules(self._cache, self._own, batch)):
                await self._execute(partial(self._read_rules, missing), [])
                if self._cache is not None:
                    attach_rules(self._cache, self._own, batch)
        done: dict[int, HoldAnswer | Exception] = {}
        for plan in plans:
            if (
                self._cache is not None
                and (fast := plan(self._cache, self._own, batch)) is not None
            ):
                indexes, operations, _ = zip(*fast.decided, strict=True)
                run = partial(execute_fast, self._cache, fast, self._owner, self.close)
                done |= zip(indexes, await self._execute(run, operations), strict=False)
                if len(done) == len(batch):
                    break
        if len(done) == len(batch) > 0:
            answers = list(map(done.__getitem__, range(len(batch))))
        else:
            run = partial(execute_slow, owner=self._owner, refusals=self.refusals)
            left = iter(
                await self._execute(
                    run, [op for index, op in enumerate(batch) if index not in done]
                )
            )
            answers = [done[index] if index in done else next(left) for index in range(len(batch))]
        for op, answer in zip(batch, answers, strict=True) if self.refusals.counts else ():
            if isinstance(op, Admit) and isinstance(answer, Admitted):
                request = op.payer.project_id, op.request_id
                self.refusals.on_returned(request, answer.quotas.rules)
        return answers

    async def _read_rules(
        self, missing: Collection[int], connection: Connection, _: Sequence[HoldOperation]
    ) -> list[HoldAnswer | Exception]:
        """Read rules of own holds into the cache; if that fails, they take the slow path.

        Later changes of these rules are detected by the checks of every batch.
        """
        [rows] = await run_pipeline(
            connection, [(SELECT_RULES_BY_ID, (id_number_array(list(missing)),))]
        )
        cache_of(connection).add_rules(rules_of_rows(connection, rows).values())
        return []

    async def bind(self, binds: Sequence[Bind], renewal: Renew) -> list[HoldAnswer | Exception]:
        """Bind holds to requests admitted during an outage; return the answers in order.

        `renewal` renews all holds that the owner knows. It runs first, because it voids holds of
        the same request ids whose answers were lost; run no other operation meanwhile. If a request
        id is still in use, both run once more: a frozen server may have committed late.
        """
        answers: list[HoldAnswer | Exception] = []
        for _ in range(2):
            [renewed] = await self.execute([renewal])
            if isinstance(renewed, DatabaseUnavailable):
                return [renewed] * len(binds)
            answers = await self._execute(
                partial(execute_binds, end_users_max=self._owner.end_users_max), binds
            )
            if Ended(done=False) not in answers:
                break
        return answers

    async def _execute(
        self, run: Callable[[Connection, Sequence[Op]], Answers], batch: Sequence[Op]
    ) -> list[HoldAnswer | Exception]:
        began_at, cause = time.monotonic(), ""
        pauses: Backoff | None = None
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            try:
                return await self._execute_in_time(run, batch)
            except DatabaseUnavailable as away:
                return [away] * len(batch)
            except REPEATED as conflict:
                cause = type(conflict).__name__
                log.info("hold_batch_repeated", cause=cause, operation_count=len(batch))
                await self.close()
                if time.monotonic() - began_at > BATCH_TIMEOUT_S:
                    break
                pauses = pauses or Backoff(PAUSE_MIN_S, PAUSE_MAX_S)
                await asyncio.sleep(pauses.next_s() * (0.5 + random.random()))
            except LOST as away:
                log.warning("database_away", cause=str(away).strip() or type(away).__name__)
                await self.close()
                return [
                    DatabaseUnavailable(cause_of(away), retry_after_s=max(self._gate.pause_s, 1.0))
                ] * len(batch)
            except Exception as broken:
                await self.close()
                if len(batch) > 1:
                    return [answer for op in batch for answer in await self._execute(run, [op])]
                log.exception(
                    "hold_operation_failed", operation=[type(op).__name__ for op in batch]
                )
                return [
                    InvariantViolated(f"{type(op).__name__} failed: {broken!r}") for op in batch
                ]
            except BaseException:
                await self.close()
                raise
        return [WriteConflict(cause)] * len(batch)

    async def end_other_connections(self) -> None:
        """Terminate all other connections of the same owner, whose process must be dead.

        The server may still run what that process sent, such as a batch that waits for a lock.
        After this call, nothing more of it commits. Raises: DatabaseUnavailable.
        """
        [ended] = await self._execute(self._terminate_others, [None])
        if isinstance(ended, Exception):
            raise ended

    async def _terminate_others(
        self, connection: Connection, _: Sequence[None]
    ) -> list[HoldAnswer | Exception]:
        cursor = await connection.execute(TERMINATE_OTHERS)
        if all(terminated for [terminated] in await cursor.fetchall()):
            return [Ended(done=True)]
        return [DatabaseUnavailable("a connection of a dead process is still open")]

    async def close(self) -> None:
        """Close the connection. The next batch opens a new one."""
        connection, self._connection, self._cache = self._connection, None, None
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if connection is not None:
            await connection.close()

    async def _execute_in_time(
        self, run: Callable[[Connection, Sequence[Op]], Answers], batch: Sequence[Op]
    ) -> list[HoldAnswer | Exception]:
        """Run one attempt with a time limit; if it times out, report an outage to the gate.

        A broken connection alone is not an outage: the database may have been restarted.
        """
        connection = self._connection or await self._connect()
        self._is_late, self._late_at = False, time.monotonic() + BATCH_TIMEOUT_S
        if self._watchdog is None:
            self._watchdog = asyncio.get_running_loop().call_later(BATCH_TIMEOUT_S, self._watch)
        try:
            answers = await run(connection, batch)
        except LOST:
            if self._is_late:
                self._gate.failed()
            raise
        finally:
            self._late_at = math.inf
        self._gate.answered()
        return answers

    def _watch(self) -> None:
        """Abort the connection if the batch is late. Batches share the timer, which costs less."""
        self._watchdog = None
        if self._late_at == math.inf or self._connection is None:
            return
        if (left_s := self._late_at - time.monotonic()) > 0:
            self._watchdog = asyncio.get_running_loop().call_later(left_s, self._watch)
        else:
            self._is_late = True
            self._connection.abort()

    async def _connect(self) -> BoundedConnection:
        with self._gate.attempt():
            connection = await BoundedConnection.connect(
                self._conninfo,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                settings=(
                    *SERVER_LIMITS,
                    *PLANS,
                    f"application_name=weir-{self._owner.process_id}",
                ),
                **KEEPALIVES,
            )
            self._connection, self._cache = connection, cache_of(connection)
            if (signer := self._owner.signer) is not None:
                await connection.execute(PUBLISH_KEY, (signer.key_id, signer.public_key))
        return connection
