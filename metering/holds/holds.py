"""Hold store of one process: takes, extends and ends holds through group commit.

Owns the list of holds that this process is responsible for, and their pending ends. A hold that the
process loses (by a crash or a lost answer) still ends: by journal recovery, renewal or expiry.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from msgspec import structs

from common.incidents import Retries
from metering.core.errors import DatabaseUnavailable, HoldEnded, InvariantViolated
from metering.core.models import QuotaDimension, QuotaSubject
from metering.holds.decide import END_USERS_MAX, OwnHolds
from metering.holds.hold_connection import BATCH_SIZE_MAX, EXPIRY_S, HoldConnection
from metering.holds.lease_clock import LeaseClock
from metering.holds.operations import (
    Admit,
    Admitted,
    Ended,
    Expire,
    Extend,
    Extended,
    HoldAnswer,
    HoldOperation,
    Renew,
    Renewed,
    Settle,
    Settled,
    Void,
)
from metering.holds.preauthorized_holds import (
    BackedAdmission,
    Bindings,
    GraceTerms,
    PreauthorizedHolds,
)
from metering.receipts.chaining import BatchSigner
from metering.store.db import StoreGate
from metering.store.group_commit import (
    Backlog,
    Entry,
    GroupCommit,
    GroupCommitStatistics,
    Patience,
    Pending,
    awaited,
)

RENEW_INTERVAL_S = 15.0  # a quarter of the expiry: three renewals may fail without a loss

WAITING_COUNT_MAX = 10_000  # admissions; later ones would wait longer than a client does

RETRY_S_MIN, RETRY_S_MAX = 0.05, 5.0  # delay before an unanswered operation is retried

ANSWER_WAIT_S = 5.0  # longest wait of an admission for an exact answer

PROBE_INTERVAL_S = 1.0  # within it an idle process detects that the database is unavailable

LOOP_RETRY_S_MIN, LOOP_RETRY_S_MAX = 0.1, 5.0  # short, since a hold lapses after a minute

ENDS = (Settle, Void)  # kinds of operations

PROBE = Expire(uuid.UUID(int=0))  # matches no hold: tests whether the database answers

TEND_INTERVAL_S = 1.0  # within it a newly used key gets its pre-authorized holds

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HoldStatistics:
    """Counts of a hold store.

    `live_hold_count` counts this process's holds, `preauthorized_hold_count` those without a
    request, `open_operation_count` operations that wait or run, `owed_end_count` unanswered
    operations to be retried. `refusals` counts admissions refused since the start, by dimension and
    subject of the first quota that refused.
    """

    live_hold_count: int
    preauthorized_hold_count: int
    open_operation_count: int
    owed_end_count: int
    group_commit: GroupCommitStatistics
    refusals: Mapping[tuple[QuotaDimension, QuotaSubject], int]


Execute = Callable[[Sequence[HoldOperation]], Awaitable[Sequence[HoldAnswer | Exception]]]


class HoldStore:
    """Entry point of this process for all hold operations. They are answered only while `run` runs.

    Admissions have a connection of their own, so that a batch of them runs beside a batch of other
    operations. From the answers the store knows the live holds, their deadlines, and whether the
    database is available.
    """

    def __init__(
        self,
        database_url: str,
        process_id: uuid.UUID,
        *,
        expiry_s: float = EXPIRY_S,
        answer_wait_s: float = ANSWER_WAIT_S,
        gate: StoreGate | None = None,
        grace: tuple[GraceTerms, Bindings] | None = None,
        signer: BatchSigner | None = None,
        used: Callable[[], None] = lambda: None,
        measured: Callable[[int, float], None] | None = None,
        end_users_max: int = END_USERS_MAX,
    ) -> None:
        """Prepare the connections; the first batch connects.

        `gate` is shared by all connections of this process to the same database. An admission or
        extension waits at most `answer_wait_s` for the database. `grace` has the number and size of
        pre-authorized holds and the log of their bindings; with None, requests are refused during
        outages. `signer` signs receipts; with None they are unsigned. `used` is called after usage
        was written and must not block. `measured` is called after each batch with its operation
        count and seconds. An organization may have `end_users_max` end users.
        """
        self.process_id = process_id
        self.gate = gate or StoreGate()
        self._expiry_s = expiry_s
        self._answer_wait_s = answer_wait_s
        self._leases = LeaseClock(expiry_s)
        self.may_have_lapsed = self._leases.may_have_lapsed  # any hold; `lapse` checks one
        self._preauthorized = PreauthorizedHolds(*grace, self._leases) if grace else None
        self._own: OwnHolds = {}
        self._connection, self._admission_connection = (
            HoldConnection(
                database_url,
                process_id,
                expiry_s=expiry_s,
                gate=self.gate,
                signer=signer,
                own=self._own,
                end_users_max=end_users_max,
            )
            for _ in range(2)
        )
        self._admission_lock, self._lock = asyncio.Lock(), asyncio.Lock()  # locked in this order
        self._spared: set[uuid.UUID] = set()
        self._used = used
        self._answered_at: float | None = None
        self._is_answering = False
        self._has_lost_admissions = False  # unanswered ones may have holds that block a retry
        self._tending = asyncio.Lock()  # held while taking holds, so that none follow a release
        self._put_off: dict[Entry[HoldOperation], asyncio.TimerHandle] = {}
        self._measured = measured
        self._began_at = self._leases.now()
        self._closed = False
        late = f"the database did not answer within {answer_wait_s:g} s"
        self._commits = self._group_commit(self._execute)
        self._admissions = self._group_commit(
            self._execute_admissions,
            patience=Patience(answer_wait_s, lambda: DatabaseUnavailable(late)),
            refused=self.gate.refusal,
        )

    def _group_commit(
        self, execute: Execute, **options: Any
    ) -> GroupCommit[HoldOperation, HoldAnswer]:
        return GroupCommit(
            execute,
            orphaned=self._orphaned,
            droppable=lambda op: isinstance(op, Admit | Extend),
            batch_size_max=BATCH_SIZE_MAX,
            backlog=Backlog(
                WAITING_COUNT_MAX,
                lambda: DatabaseUnavailable("The database does not keep up with admissions."),
            ),
            put_off=self._puts_off,
            fair_share=self._fair_share,
            measured=self._measured,
            **options,
        )

    def _fair_share(self) -> int:
        """Compute half of the open operations: one half runs while the other is answered."""
        return (self._commits.open_count + self._admissions.open_count + 1) // 2

    async def run(self) -> None:
        """Run batches and renew holds until cancelled, then answer `DatabaseUnavailable`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                loops: dict[str, Callable[[], Awaitable[None]]] = {
                    "hold batches": self._commits.run,
                    "admission batches": self._admissions.run,
                    "hold renewal": self._renew_regularly,
                    "store probe": self._probe_regularly,
                }
                if self._preauthorized is not None:
                    loops["preauthorized holds"] = partial(
                        self._tend_regularly, self._preauthorized
                    )
                for name, loop in loops.items():
                    retries = Retries(
                        name.replace(" ", "_"),
                        shortest_s=LOOP_RETRY_S_MIN,
                        longest_s=LOOP_RETRY_S_MAX,
                    )
                    tasks.create_task(retries.keep_running(loop), name=name)
        finally:
            self._closed = True
            for commits in (self._commits, self._admissions):
                commits.close(
                    DatabaseUnavailable(
                        "This server is shutting down. Send the request to another one."
                    )
                )
            self._try_again_now()
            for connection in (self._connection, self._admission_connection):
                await connection.close()

    def begin_admit(self, op: Admit, done: Callable[[Admitted | Exception], None]) -> Pending:
        """Take a hold in the database, or a pre-authorized one during an outage.

        `done` is called later, never during this call, with `Admitted` or with QuotaExceeded,
        PriceMissing, KeyInvalid, RequestIdReused, RequestInFlight, RequestSettled or
        DatabaseUnavailable. Abandoning the answer voids the hold.
        """
        if self._preauthorized is None:
            return self._admissions.begin(op, done)
        return BackedAdmission(
            self._preauthorized, self._admissions.begin, self._void_all, op, done
        )

    def begin_settle(self, op: Settle, done: Callable[[Settled | Exception], None]) -> None:
        """End a hold with its usage. Retries until the database answers.

        `done` is called later, never during this call, with `Settled`, InvariantViolated or
        HoldEnded. It gets DatabaseUnavailable only after `run` has ended: journal recovery then
        settles the hold.
        """
        self._commits.begin(op, done)

    def begin_void(self, hold_id: uuid.UUID, done: Callable[[Ended | Exception], None]) -> None:
        """Void a hold; retries until the database answers. `done` gets `Ended` or an error."""
        self._commits.begin(Void(hold_id), done)

    async def check_room(self, op: Admit) -> None:
        """Raise the refusal that an admission would get now. Takes no hold.

        Asks the database only if the cache suggests that the admission does not fit. During an
        outage, nothing is raised if this process pre-authorizes holds. Raises the errors of
        `begin_admit`.
        """
        if self._has_pending_binds() or not self._admission_connection.seems_to_fit(op):
            await awaited(
                partial(self.begin_admit, structs.replace(op, only_asks=True)), lambda _: None
            )

    async def extend(self, op: Extend) -> Extended:
        """Lease more output tokens; wait up to `answer_wait_s` for the database.

        Raises: QuotaExceeded, HoldEnded, DatabaseUnavailable; the lease is then unchanged.
        """
        try:
            async with asyncio.timeout(self._answer_wait_s):
                extended = await self._commits.submit(op)
        except TimeoutError:
            raise DatabaseUnavailable(
                "The database does not answer, and the tokens leased before are used up."
            ) from None
        assert isinstance(extended, Extended)
        return extended

    @property
    def has_answered(self) -> bool:
        """True once the database has answered this process."""
        return self._answered_at is not None

    @property
    def away_s(self) -> float | None:
        """Seconds since the last answer, or since start without one; None while it answers."""
        return self.gate.away_s if self.has_answered else self._leases.now() - self._began_at

    def lapse(self, hold_id: uuid.UUID) -> HoldEnded | DatabaseUnavailable | None:
        """Return the error that must end a request whose hold was not renewed in time, or None."""
        entry = self._leases.deadlines.get(hold_id.int)  # as `left_s`, without the call
        if entry is not None and entry[1] > self._leases.now():
            return None
        if self.gate.away_s is not None:
            return DatabaseUnavailable(
                "The database has been unavailable for longer than your request's hold lasts."
            )
        return HoldEnded(
            "it was not renewed in time, because the server was suspended or cut off from the"
            " database"
        )

    async def release_preauthorized(self) -> None:
        """Void all pre-authorized holds and take no more. Waits up to `answer_wait_s`."""
        if self._preauthorized is None:
            return
        with contextlib.suppress(TimeoutError, DatabaseUnavailable):
            async with asyncio.timeout(self._answer_wait_s), self._tending:
                released = asyncio.Event()
                self._void_all(self._preauthorized.release_all(), released.set)
                await released.wait()

    def statistics(self) -> HoldStatistics:
        """Count the holds, operations and refusals. Never blocks."""
        unbound_count = self._preauthorized.unbound_count if self._preauthorized else 0
        commits = self._commits.statistics().plus(self._admissions.statistics())
        open_count, owed_count = (
            self._commits.open_count + self._admissions.open_count,
            len(self._put_off),
        )
        return HoldStatistics(
            len(self._leases),
            unbound_count,
            open_count,
            owed_count,
            commits,
            self._admission_connection.refusals.counts,
        )

    def _void_all(self, hold_ids: Sequence[uuid.UUID], then: Callable[[], None]) -> None:
        """Void holds and call `then` when they ended or time is up, but never during this call."""
        left = len(hold_ids)

        def ended(_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                timer.cancel()
                then()

        def give_up() -> None:
            for void in voids:
                void.abandon()
            then()

        voids = [self._commits.begin(Void(hold_id), ended) for hold_id in hold_ids]
        wait_s = self._answer_wait_s if voids and self.gate.away_s is None else 0.0
        timer = asyncio.get_running_loop().call_later(wait_s, give_up)

    def _puts_off(self, entry: Entry[HoldOperation], error: Exception) -> bool:
        """Schedule a retry of an unanswered end or extension; return False if it is not retried."""
        op = entry.op
        if (
            not isinstance(error, DatabaseUnavailable)
            or not isinstance(op, Settle | Void | Extend)
            or self._closed
        ):
            return False
        if isinstance(op, Extend) and entry.done is None:
            return False
        log.warning(
            "hold_operation_delayed",
            operation=type(op).__name__,
            hold_id=str(op.hold_id),
            cause=str(error),
        )
        delay_s = min(RETRY_S_MIN * 2**entry.attempt_count, RETRY_S_MAX) * random.uniform(0.5, 1.5)
        entry.attempt_count += 1
        self._put_off[entry] = asyncio.get_running_loop().call_later(
            delay_s, self._try_again, entry
        )
        return True

    def _try_again(self, entry: Entry[HoldOperation]) -> None:
        self._put_off.pop(entry).cancel()
        self._commits.again(entry)

    def _try_again_now(self) -> None:
        for entry in list(self._put_off):
            self._try_again(entry)

    async def _execute(
        self, operations: Sequence[HoldOperation]
    ) -> Sequence[HoldAnswer | Exception]:
        """Run a batch of operations other than admissions."""
        if not (self._has_pending_binds() or Renew in map(type, operations)):
            async with self._lock:
                return await self._execute_on(self._connection, operations)
        # A renewal voids holds that this process does not know: no admission may be in flight.
        async with self._admission_lock, self._lock:
            if not await self._bind():
                return [DatabaseUnavailable("The database does not answer.")] * len(operations)
            return await self._execute_on(self._connection, operations)

    async def _execute_admissions(
        self, operations: Sequence[HoldOperation]
    ) -> Sequence[HoldAnswer | Exception]:
        """Run a batch of admissions."""
        async with self._admission_lock:
            if self._has_pending_binds():
                async with self._lock:
                    if not await self._bind():
                        return [DatabaseUnavailable("The database does not answer.")] * len(
                            operations
                        )
            return await self._execute_on(self._admission_connection, operations)

    async def _execute_on(
        self, connection: HoldConnection, operations: Sequence[HoldOperation]
    ) -> Sequence[HoldAnswer | Exception]:
        sent_at = self._leases.now()
        batch = operations
        if Renew in map(type, operations):
            batch = [self._renewal() if isinstance(op, Renew) else op for op in operations]
        answers = await connection.execute(batch)
        self._note(batch, answers, sent_at)
        self._note_answer()
        return answers

    def _note_answer(self) -> None:
        """Update whether the database is available; start the follow-up work after an outage."""
        if self.gate.away_s is not None:
            self._is_answering = False
            return
        was_away = self._answered_at is not None and not self._is_answering
        self._answered_at, self._is_answering = self._leases.now(), True
        if was_away or self._has_lost_admissions:
            self._has_lost_admissions = False
            self._came_back()

    def _note(
        self,
        batch: Sequence[HoldOperation],
        answers: Sequence[HoldAnswer | Exception],
        sent_at: float,
    ) -> None:
        """Update live holds and deadlines from the answers of a batch."""
        begun: list[uuid.UUID] = []
        ended: list[uuid.UUID] = []
        has_used = False
        for op, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Admitted):
                begun.append(answer.hold_id)
            elif isinstance(answer, DatabaseUnavailable):
                self._has_lost_admissions = self._has_lost_admissions or type(op) is Admit
            elif isinstance(op, ENDS):
                ended.append(op.hold_id)
                has_used = has_used or isinstance(answer, Settled)
                if self._preauthorized is not None:
                    self._preauthorized.ended(op.hold_id)
                if isinstance(answer, InvariantViolated):
                    # Voiding would lose delivered tokens; renewing would hold quotas forever.
                    self._spared.add(op.hold_id)
            elif isinstance(op, Extend) and isinstance(answer, Extended):
                self._leases.extend(op.hold_id, sent_at)
            elif isinstance(answer, Renewed):
                self._leases.renew(answer.hold_ids, sent_at)
        if begun:
            self._leases.begin(begun, sent_at)
        if ended:
            self._leases.end(ended)
        if has_used:
            self._used()

    def _renewal(self) -> Renew:
        """Build a renewal of all live holds."""
        return Renew(self.process_id, frozenset(self._leases.hold_ids), frozenset(self._spared))

    def _has_pending_binds(self) -> bool:
        """Return True if requests were admitted that the database does not know yet."""
        return self._preauthorized is not None and bool(self._preauthorized.pending_binds)

    async def _bind(self) -> bool:
        """Bind holds to requests admitted in an outage; return whether the database answered."""
        preauthorized = self._preauthorized
        if preauthorized is None or not preauthorized.pending_binds:
            return True
        binds = preauthorized.pending_binds
        answers = await self._connection.bind(binds, self._renewal())
        if any(isinstance(answer, DatabaseUnavailable) for answer in answers):
            self._note_answer()
            return False
        for bind, answer in zip(binds, answers, strict=True):
            preauthorized.bound(bind.hold_id)
            if answer != Ended(done=True):
                log.error(
                    "request_not_bound",
                    hold_id=str(bind.hold_id),
                    request_id=str(bind.request_id),
                    cause=str(answer),
                )
        return True

    async def _renew_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._expiry_s * RENEW_INTERVAL_S / EXPIRY_S)
            self._commits.begin(Renew(self.process_id, frozenset()), None)

    def _came_back(self) -> None:
        """Renew all holds right after an outage, which also voids holds whose answers were lost."""
        self._admissions.begin(PROBE, None)  # detects a broken connection before a request uses it
        self._try_again_now()
        self._commits.begin(Renew(self.process_id, frozenset()), None)

    async def _probe_regularly(self) -> None:
        """Probe the database while the process is idle, so that an outage is noticed."""
        for commits in (self._commits, self._admissions):
            commits.begin(PROBE, None)
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S if self.gate.away_s is None else self.gate.pause_s)
            is_quiet = (
                self._answered_at is None
                or self._leases.now() - self._answered_at >= PROBE_INTERVAL_S / 2
            )
            if is_quiet and not self._commits.open_count:
                self._commits.begin(PROBE, None)
                self._admissions.begin(PROBE, None)

    async def _tend_regularly(self, preauthorized: PreauthorizedHolds) -> None:
        """Take pre-authorized holds for each key in use, and void surplus ones."""
        while True:
            await asyncio.sleep(TEND_INTERVAL_S)
            if self.gate.away_s is not None:
                continue
            async with self._tending:
                for hold_id in preauthorized.surplus():
                    self._commits.begin(Void(hold_id), None)
                due = preauthorized.due()
                answers = await asyncio.gather(
                    *map(self._admissions.submit, due), return_exceptions=True
                )
                for op, answer in zip(due, answers, strict=True):
                    if isinstance(answer, Admitted):
                        preauthorized.taken(op, answer)

    def _orphaned(self, op: HoldOperation, answer: HoldAnswer | Exception) -> None:
        """Handle an answer without a caller: void an admitted hold, log a refused settlement."""
        if isinstance(answer, Admitted):
            # Dropped here too: a renewal then voids it before its request is bound elsewhere.
            self._leases.end((answer.hold_id,))
            self._commits.begin(Void(answer.hold_id), None)
        elif isinstance(op, Settle) and isinstance(answer, Exception):
            log.error("hold_end_refused", hold_id=str(op.hold_id), cause=str(answer))
