"""Holds of one process: taken, extended and ended through group commit on connections of its own.

Owns the list of holds that this process answers for, and the ends that it owes them. A hold that this process forgets (a crash, an
answer lost with its connection) ends all the same: by the journal's recovery, by `Renew`, or by expiry.
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
from sqlalchemy import text

from common.incidents import Retries
from metering.core.errors import HoldEnded, InvariantViolated, MeteringError, StoreAway
from metering.core.models import QuotaDimension, QuotaSubject
from metering.holds.batch import BATCH_SIZE_MAX, EXPIRY_S, HoldConnection
from metering.holds.known import OwnHolds
from metering.holds.lease_clock import LeaseClock
from metering.holds.operations import (
    Admit,
    Admitted,
    Ended,
    Expire,
    Extend,
    Extended,
    Fits,
    HoldAnswer,
    HoldOperation,
    Renew,
    Renewed,
    Settle,
    Settled,
    Void,
)
from metering.holds.standing_holds import Bindings, GraceTerms, StandingHolds
from metering.quotas.quotas import QuotaExceeded
from metering.receipts.chaining import BatchSigner
from metering.store.db import Sessions, StoreGate
from metering.store.group_commit import (
    WORTHWHILE_COUNT,
    Answered,
    Entry,
    GroupCommit,
    GroupCommitStatistics,
    Patience,
    Pending,
    awaited,
)

RENEW_INTERVAL_S = 15.0  # a quarter of the expiry: three renewals may fail before anything is lost

WAITING_COUNT_MAX = 10_000  # admissions beyond this wait longer than a client would

RETRY_S_MIN, RETRY_S_MAX = 0.05, 5.0  # until an operation that the database has not answered is tried again

ANSWER_WAIT_S = 5.0  # a client that waits longer for its admission has lost the good of an exact answer

PROBE_INTERVAL_S = 1.0  # so soon an idle process finds out that the database is away

LOOP_RETRY_S_MIN, LOOP_RETRY_S_MAX = 0.1, 5.0  # a hold lapses after a minute: its loops are never left alone for long

PROBE = Expire(uuid.UUID(int=0))  # of no hold: asks whether the database answers at all

TEND_INTERVAL_S = 1.0  # so soon something stands for a key that has begun to ask


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HoldStatistics:
    """Holds that this process answers for, those among them that no request has, and how its operations were batched.

    open_operation_count: those that wait or are in the database now. owed_end_count: those that it did not answer, and that are
    tried again.
    refusals: admissions that quotas have refused since the start, by the dimension and the subject of the quota in front.
    """

    live_hold_count: int
    standing_hold_count: int
    open_operation_count: int
    owed_end_count: int
    group_commit: GroupCommitStatistics
    refusals: Mapping[tuple[QuotaDimension, QuotaSubject], int]


Execute = Callable[[Sequence[HoldOperation]], Awaitable[Sequence[HoldAnswer | Exception]]]


class HoldStore:
    """The one way in which this process touches holds. `run` must be running for anything to be answered.

    Admissions have a connection of their own, so that a batch of them and one of all else are under way at the same time. From the
    answers follows what is known of this process's holds: which are live, until when they are ours, whether the database is there.
    """

    def __init__(
        self,
        database_url: str,
        owner_id: uuid.UUID,
        *,
        expiry_s: float = EXPIRY_S,
        answer_wait_s: float = ANSWER_WAIT_S,
        gate: StoreGate | None = None,
        grace: tuple[GraceTerms, Bindings] | None = None,
        signer: BatchSigner | None = None,
        used: Callable[[], None] = lambda: None,
        measured: Callable[[int, float], None] | None = None,
    ) -> None:
        """gate: shared with all others of this process that connect to the same database.

        answer_wait_s: how long an admission or an extension waits for a database that does not answer.
        grace: what is set aside to let requests in while the database is away, and where that is written down; None: nothing is.
        signer: of the receipts; None: they are not signed. used: called when usage has been written; must not block.
        measured: told of each batch how many operations it had, and how many seconds it took.
        """
        self.owner_id = owner_id
        self.gate = gate or StoreGate()
        self._expiry_s = expiry_s
        self._answer_wait_s = answer_wait_s
        self._leases = LeaseClock(expiry_s)
        self.may_have_lapsed = self._leases.may_have_lapsed  # any hold of this process; `lapse` tells of each
        self._standing = StandingHolds(*grace, self._leases) if grace else None
        self._own: OwnHolds = {}
        self._others, self._admitting = (
            HoldConnection(database_url, owner_id, expiry_s=expiry_s, gate=self.gate, signer=signer, own=self._own)
            for _ in range(2)
        )
        self._admission_turn, self._turn = asyncio.Lock(), asyncio.Lock()  # who needs both takes that of admissions first
        self._spared: set[uuid.UUID] = set()
        self._used = used
        self._answered_at: float | None = None
        self._is_answering = False
        self._has_lost_admissions = False  # whose answers never came: whatever they have taken stands in the way of a second try
        self._tending = asyncio.Lock()  # held while holds are being set aside: none may come after all were given back
        self._put_off: dict[Entry[HoldOperation], asyncio.TimerHandle] = {}
        self._measured = measured
        self._began_at = self._leases.now()
        self._closed = False
        late = f"the quota store has not answered within {answer_wait_s:g} s"
        self._commits = self._group_commit(self._execute)
        self._admissions = self._group_commit(
            self._execute_admissions,
            patience=Patience(answer_wait_s, lambda: StoreAway(late)),
            refused=self.gate.refusal,
        )

    def _group_commit(self, execute: Execute, **options: Any) -> GroupCommit[HoldOperation, HoldAnswer]:
        return GroupCommit(
            execute,
            orphaned=self._orphaned,
            droppable=lambda op: isinstance(op, Admit | Extend),
            batch_size_max=BATCH_SIZE_MAX,
            waiting_count_max=WAITING_COUNT_MAX,
            overflow=lambda: StoreAway("the database does not keep up with admissions"),
            put_off=self._puts_off,
            fair_share=self._fair_share,
            measured=self._measured,
            **options,
        )

    def _fair_share(self) -> int:
        """Half of all that is open: while one half is in the database, the answers of the other are taken and new work is made."""
        return max((self._commits.open_count + self._admissions.open_count + 1) // 2, WORTHWHILE_COUNT)

    async def run(self) -> None:
        """Run batches and renew expiries until cancelled; whoever still waits then is told `StoreAway`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                loops: dict[str, Callable[[], Awaitable[None]]] = {
                    "hold batches": self._commits.run,
                    "admission batches": self._admissions.run,
                    "hold renewal": self._renew_regularly,
                    "store probe": self._probe_regularly,
                }
                if self._standing is not None:
                    loops["standing holds"] = partial(self._tend_regularly, self._standing)
                for name, loop in loops.items():
                    retries = Retries(name.replace(" ", "_"), shortest_s=LOOP_RETRY_S_MIN, longest_s=LOOP_RETRY_S_MAX)
                    tasks.create_task(retries.keep_running(loop), name=name)
        finally:
            self._closed = True
            for commits in (self._commits, self._admissions):
                commits.close(StoreAway("this process is shutting down"))
            self._try_again_now()
            for connection in (self._others, self._admitting):
                await connection.close()

    def begin_admit(self, op: Admit, done: Callable[[Admitted | Exception], None]) -> Pending:
        """Take a hold: from the database, or while that is away from what was set aside.

        done: told of `Admitted` or of QuotaExceeded, PriceMissing, KeyInvalid, RequestIdReused, RequestInFlight, RequestSettled,
        StoreAway; never inside this call. Once the answer is abandoned the hold is given back.
        """
        if self._standing is None:
            return self._admissions.begin(op, done)
        return BackedAdmission(self._standing, self._admissions.begin, self._void_all, op, done)

    def begin_settle(self, op: Settle, done: Callable[[Settled | Exception], None]) -> None:
        """End a hold with its usage. Tries until the database has answered.

        done: told of `Settled` or of InvariantViolated, HoldEnded; never inside this call. Of StoreAway only if `run` has ended:
        the journal's recovery settles it then.
        """
        self._commits.begin(op, done)

    def begin_void(self, hold_id: uuid.UUID, done: Callable[[Ended | Exception], None]) -> None:
        """End a hold as if it had never been. Tries until the database has answered. done: as of `begin_settle`, with `Ended`."""
        self._commits.begin(Void(hold_id), done)

    async def check_room(self, op: Admit) -> None:
        """Raise what the admission would be refused with now; it is not taken. Only where it is unlikely to fit this takes time.

        While the database is away nothing is raised where holds are set aside for that. Raises: as `admit`.
        """
        if self._has_given() or not self._admitting.seems_to_fit(op):
            await awaited(partial(self.begin_admit, structs.replace(op, only_asks=True)), lambda _: None)

    async def extend(self, op: Extend) -> Extended:
        """Lease more output tokens. While the database is away this waits for it, for a bounded time.

        Raises: QuotaExceeded, HoldEnded, StoreAway; the lease is then what it was.
        """
        try:
            async with asyncio.timeout(self._answer_wait_s):
                extended = await self._commits.submit(op)
        except TimeoutError:
            raise StoreAway("the quota store does not answer, and what was leased is used up") from None
        assert isinstance(extended, Extended)
        return extended

    @property
    def has_answered(self) -> bool:
        """Whether the database has answered this process at all."""
        return self._answered_at is not None

    @property
    def away_s(self) -> float | None:
        """For how long the database has not answered, from the start of this process if it never did; None while it answers."""
        return self.gate.away_s if self.has_answered else self._leases.now() - self._began_at

    def lapse(self, hold_id: uuid.UUID) -> HoldEnded | StoreAway | None:
        """Why nothing more may be delivered under a hold that could not be renewed in time; None while that may go on."""
        found = self._leases.deadlines.get(hold_id.int)  # as `left_s`, without the call
        if found is not None and found[1] > self._leases.now():
            return None
        if self.gate.away_s is not None:
            return StoreAway("the quota store is away for longer than this request's hold lasts")
        return HoldEnded(f"hold {hold_id} was not renewed in time: this process was stopped, or cut off from the quota store")

    async def release_standing(self) -> None:
        """Give back what is set aside and set nothing aside any more, as far as the database answers in time."""
        if self._standing is None:
            return
        with contextlib.suppress(TimeoutError, StoreAway):
            async with asyncio.timeout(self._answer_wait_s), self._tending:
                released = asyncio.Event()
                self._void_all(self._standing.release_all(), released.set)
                await released.wait()

    def statistics(self) -> HoldStatistics:
        """Never blocks."""
        standing_count = self._standing.standing_count if self._standing else 0
        commits = self._commits.statistics().plus(self._admissions.statistics())
        open_count, owed_count = self._commits.open_count + self._admissions.open_count, len(self._put_off)
        return HoldStatistics(len(self._leases), standing_count, open_count, owed_count, commits, self._admitting.refusals.counts)

    def _void_all(self, hold_ids: Sequence[uuid.UUID], then: Callable[[], None]) -> None:
        """Void holds, and call `then` once they have ended, as far as the database answers in time; never inside this call."""
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
        """Try what a request cannot go without again, soon, and as soon as the database answers."""
        op = entry.op
        if not isinstance(error, StoreAway) or not isinstance(op, Settle | Void | Extend) or self._closed:
            return False
        if isinstance(op, Extend) and entry.done is None:
            return False
        log.warning("hold_operation_delayed", operation=type(op).__name__, hold_id=str(op.hold_id), cause=str(error))
        delay_s = min(RETRY_S_MIN * 2**entry.attempt_count, RETRY_S_MAX) * random.uniform(0.5, 1.5)
        entry.attempt_count += 1
        self._put_off[entry] = asyncio.get_running_loop().call_later(delay_s, self._try_again, entry)
        return True

    def _try_again(self, entry: Entry[HoldOperation]) -> None:
        self._put_off.pop(entry).cancel()
        self._commits.again(entry)

    def _try_again_now(self) -> None:
        for entry in list(self._put_off):
            self._try_again(entry)

    async def _execute(self, operations: Sequence[HoldOperation]) -> Sequence[HoldAnswer | Exception]:
        """A batch of all but admissions."""
        if not (self._has_given() or Renew in map(type, operations)):
            async with self._turn:
                return await self._execute_on(self._others, operations)
        # Whoever renews ends what nobody knows of: no admission may be half known then.
        async with self._admission_turn, self._turn:
            if not await self._bind():
                return [StoreAway("the database does not answer")] * len(operations)
            return await self._execute_on(self._others, operations)

    async def _execute_admissions(self, operations: Sequence[HoldOperation]) -> Sequence[HoldAnswer | Exception]:
        """A batch of admissions."""
        async with self._admission_turn:
            if self._has_given():
                async with self._turn:
                    if not await self._bind():
                        return [StoreAway("the database does not answer")] * len(operations)
            return await self._execute_on(self._admitting, operations)

    async def _execute_on(
        self, connection: HoldConnection, operations: Sequence[HoldOperation]
    ) -> Sequence[HoldAnswer | Exception]:
        sent_at = self._leases.now()
        batch = [self._renewal() if isinstance(op, Renew) else op for op in operations]
        answers = await connection.execute(batch)
        self._note(batch, answers, sent_at)
        self._note_answer()
        return answers

    def _note_answer(self) -> None:
        """Note whether the database is there; tell that it is again after an outage or a broken connection."""
        if self.gate.away_s is not None:
            self._is_answering = False
            return
        was_away = self._answered_at is not None and not self._is_answering
        self._answered_at, self._is_answering = self._leases.now(), True
        if was_away or self._has_lost_admissions:
            self._has_lost_admissions = False
            self._came_back()

    def _note(self, batch: Sequence[HoldOperation], answers: Sequence[HoldAnswer | Exception], sent_at: float) -> None:
        """Keep the list of live holds, and until when they are ours, as the database has just answered."""
        begun: list[uuid.UUID] = []
        ended: list[uuid.UUID] = []
        has_used = False
        for op, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Admitted):
                begun.append(answer.hold_id)
            elif isinstance(answer, StoreAway):
                self._has_lost_admissions = self._has_lost_admissions or type(op) is Admit
            elif isinstance(op, Settle | Void):
                ended.append(op.hold_id)
                has_used = has_used or isinstance(answer, Settled)
                if self._standing is not None:
                    self._standing.ended(op.hold_id)
                if isinstance(answer, InvariantViolated):
                    # Voiding it would lose what was delivered, renewing it would hold its quotas for ever.
                    self._spared.add(op.hold_id)
            elif isinstance(op, Extend) and isinstance(answer, Extended):
                self._leases.extend(op.hold_id, sent_at)
            elif isinstance(answer, Renewed):
                self._leases.renew(answer.hold_ids, sent_at)
        self._leases.begin(begun, sent_at)
        self._leases.end(ended)
        if has_used:
            self._used()

    def _renewal(self) -> Renew:
        """Of all holds that are live now."""
        return Renew(self.owner_id, frozenset(self._leases.hold_ids), frozenset(self._spared))

    def _has_given(self) -> bool:
        """Whether requests were let in that the database does not know of yet."""
        return self._standing is not None and bool(self._standing.given)

    async def _bind(self) -> bool:
        """After an outage, before all else: tell the database which request has which hold. Whether it was told."""
        standing = self._standing
        if standing is None or not standing.given:
            return True
        given = standing.given
        answers = await self._others.bind(given, self._renewal())
        if any(isinstance(answer, StoreAway) for answer in answers):
            self._note_answer()
            return False
        for bind, answer in zip(given, answers, strict=True):
            standing.bound(bind.hold_id)
            if answer != Ended(done=True):
                log.error("request_not_bound", hold_id=str(bind.hold_id), request_id=str(bind.request_id), cause=str(answer))
        return True

    async def _renew_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._expiry_s * RENEW_INTERVAL_S / EXPIRY_S)
            self._commits.begin(Renew(self.owner_id, frozenset()), None)

    def _came_back(self) -> None:
        """Renew at once what may soon lapse after an outage; and end by that what was taken without an answer."""
        self._admissions.begin(PROBE, None)  # a connection that the outage has broken is found before a request finds it
        self._try_again_now()
        self._commits.begin(Renew(self.owner_id, frozenset()), None)

    async def _probe_regularly(self) -> None:
        """See to it that an idle process, too, knows whether the database answers, and that someone tries while nobody asks."""
        for commits in (self._commits, self._admissions):
            commits.begin(PROBE, None)
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S if self.gate.away_s is None else self.gate.pause_s)
            is_quiet = self._answered_at is None or self._leases.now() - self._answered_at >= PROBE_INTERVAL_S / 2
            if is_quiet and not self._commits.open_count:
                self._commits.begin(PROBE, None)
                self._admissions.begin(PROBE, None)

    async def _tend_regularly(self, standing: StandingHolds) -> None:
        """Keep enough set aside for each key in use."""
        while True:
            await asyncio.sleep(TEND_INTERVAL_S)
            if self.gate.away_s is not None:
                continue
            async with self._tending:
                for hold_id in standing.surplus():
                    self._commits.begin(Void(hold_id), None)
                due = standing.due()
                answers = await asyncio.gather(*map(self._admissions.submit, due), return_exceptions=True)
                for op, answer in zip(due, answers, strict=True):
                    if isinstance(answer, Admitted):
                        standing.taken(op, answer)

    def _orphaned(self, op: HoldOperation, answer: HoldAnswer | Exception) -> None:
        """Nobody takes the answer: end what an admission obtained, and log the end that was refused."""
        if isinstance(answer, Admitted):
            # Not ours any more: a renewal voids it too, before its request can be bound to what was given to it meanwhile.
            self._leases.end((answer.hold_id,))
            self._commits.begin(Void(answer.hold_id), None)
        elif isinstance(op, Settle) and isinstance(answer, Exception):
            log.error("hold_end_refused", hold_id=str(op.hold_id), cause=str(answer))


class BackedAdmission:
    """One admission in a process that has holds set aside: given back where it does not fit, given to it in an outage."""

    __slots__ = ("_ask", "_asked", "_done", "_give_back", "_has_released", "_op", "_standing")

    def __init__(
        self,
        standing: StandingHolds,
        ask: Callable[[Admit, Answered], Pending],
        give_back: Callable[[Sequence[uuid.UUID], Callable[[], None]], None],
        op: Admit,
        done: Answered,
    ) -> None:
        """ask: the database. give_back: holds, and what to call then."""
        self._standing = standing
        self._ask = ask
        self._give_back = give_back
        self._op = op
        self._done: Answered | None = done
        self._has_released = False
        self._asked = ask(op, self._answered)

    def abandon(self) -> None:
        """As `Pending`."""
        self._done = None
        self._asked.abandon()

    def _answered(self, answer: Any) -> None:
        op, standing = self._op, self._standing
        if isinstance(answer, QuotaExceeded) and not self._has_released:
            self._has_released = True
            if released := standing.release(op.payer.organization_id):
                self._give_back(released, self._ask_again)
                return
        if isinstance(answer, StoreAway):
            try:
                answer = Fits() if op.only_asks else standing.give(op)
            except MeteringError as refusal:
                answer = refusal
        elif isinstance(answer, Admitted):
            standing.admitted(op, answer)
        if self._done is not None:
            self._done(answer)

    def _ask_again(self) -> None:
        if self._done is not None:
            self._asked = self._ask(self._op, self._answered)


CHANNEL = "weir_usage"

NOTICE_INTERVAL_S = 0.1  # so a busy process costs the database ten tiny transactions a second, whatever it settles

NOTICE_TIMEOUT_S = 2.0  # a notice that takes longer is late for what it is for

NOTIFY = text(f"NOTIFY {CHANNEL}")


class UsageNotices:
    """One process's notices. `run` must be running for any to go out."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._due = asyncio.Event()

    def used(self) -> None:
        """Something was settled and is committed. Never blocks."""
        self._due.set()

    async def run(self) -> None:
        """Send what is due until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                async with asyncio.timeout(NOTICE_TIMEOUT_S), self._sessions.begin() as session:
                    await session.execute(NOTIFY)
            except (StoreAway, TimeoutError) as away:
                log.debug("usage_notice_lost", cause=str(away))
            await asyncio.sleep(NOTICE_INTERVAL_S)
