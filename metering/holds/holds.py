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
from dataclasses import dataclass, replace
from functools import partial

import structlog
from sqlalchemy import text

from common.incidents import Retries
from metering.core.errors import HoldEnded, StoreAway
from metering.core.models import QuotaDimension, QuotaSubject
from metering.holds.connections import BATCH_SIZE_MAX, EXPIRY_S, PairedConnections, Probe
from metering.holds.lease_clock import LeaseClock
from metering.holds.operations import Admit, Admitted, Extend, Extended, HoldAnswer, HoldOperation, Renew, Settle, Settled, Void
from metering.holds.standing_holds import Bindings, GraceTerms, StandingHolds
from metering.quotas.quotas import QuotaExceeded
from metering.receipts.chaining import BatchSigner
from metering.store.db import Sessions, StoreGate
from metering.store.group_commit import GroupCommit, GroupCommitStatistics, Patience

RENEW_INTERVAL_S = 15.0  # a quarter of the expiry: three renewals may fail before anything is lost

WAITING_COUNT_MAX = 10_000  # admissions beyond this wait longer than a client would

SPLIT_COUNT_MIN = 32  # operations; in smaller batches the statements themselves cost more than the wait that is saved

SETTLE_RETRY_MAX_S = 5.0

ANSWER_WAIT_S = 5.0  # a client that waits longer for its admission has lost the good of an exact answer

PROBE_INTERVAL_S = 1.0  # so soon an idle process finds out that the database is away

LOOP_RETRY_S_MIN, LOOP_RETRY_S_MAX = 0.1, 5.0  # a hold lapses after a minute: its loops are never left alone for long

TEND_INTERVAL_S = 1.0  # so soon something stands for a key that has begun to ask


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HoldStatistics:
    """Holds that this process answers for, those among them that no request has, and how its operations were batched.

    open_operation_count: those that wait or are in the database now. owed_end_count: holds whose ends it
    has yet to hear of.
    refusals: admissions that quotas have refused since the start, by the dimension and the subject of the quota in front.
    """

    live_hold_count: int
    standing_hold_count: int
    open_operation_count: int
    owed_end_count: int
    group_commit: GroupCommitStatistics
    refusals: Mapping[tuple[QuotaDimension, QuotaSubject], int]


Execute = Callable[[Sequence[HoldOperation | Probe]], Awaitable[Sequence[HoldAnswer | Exception]]]


class HoldStore:
    """The one way in which this process touches holds. `run` must be running for any other call to return."""

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
        self._standing = StandingHolds(*grace, self._leases) if grace else None
        self._connections = PairedConnections(
            database_url,
            owner_id,
            expiry_s=expiry_s,
            gate=self.gate,
            signer=signer,
            leases=self._leases,
            standing=self._standing,
            used=used,
            came_back=self._came_back,
        )
        self._tending = asyncio.Lock()  # held while holds are being set aside: none may come after all were given back
        self._owed: dict[uuid.UUID, Settle | Void] = {}
        self._measured = measured
        self._began_at = self._leases.now()
        self._closed = False
        late = f"the quota store has not answered within {answer_wait_s:g} s"
        self._commits = self._group_commit(self._connections.execute)
        self._admissions = self._group_commit(
            self._connections.execute_admissions, Patience(answer_wait_s, lambda: StoreAway(late))
        )

    def _group_commit(self, execute: Execute, patience: Patience | None = None) -> GroupCommit[HoldOperation | Probe, HoldAnswer]:
        return GroupCommit(
            execute,
            orphaned=self._orphaned,
            droppable=lambda op: isinstance(op, Admit | Extend),
            batch_size_max=BATCH_SIZE_MAX,
            waiting_count_max=WAITING_COUNT_MAX,
            overflow=lambda: StoreAway("the database does not keep up with admissions"),
            fair_share=self._fair_share,
            measured=self._measured,
            patience=patience,
        )

    def _fair_share(self) -> int:
        """Half of all that is open: while one half is in the database, the answers of the other are taken and new work is made."""
        return max((self._commits.open_count + self._admissions.open_count + 1) // 2, SPLIT_COUNT_MIN)

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
            await self._connections.close()

    async def admit(self, op: Admit) -> Admitted:
        """Take a hold: from the database, or while that is away from what was set aside.

        Raises: QuotaExceeded, PriceMissing, KeyInvalid, RequestIdReused, RequestInFlight, RequestSettled, StoreAway.
        """
        standing = self._standing
        try:
            self.gate.check()
            admitted = await self._admissions.submit(op)
        except QuotaExceeded:
            if standing is None or not (released := standing.release(op.payer.organization_id)):
                raise
            await self._void_all(released)
            self.gate.check()
            admitted = await self._admissions.submit(op)
        except StoreAway:
            if standing is None:
                raise
            return standing.give(op)
        assert isinstance(admitted, Admitted)
        if standing is not None:
            standing.admitted(op, admitted)
        return admitted

    async def check_room(self, op: Admit) -> None:
        """Raise what the admission would be refused with now; it is not taken. Only where it is unlikely to fit this takes time.

        While the database is away nothing is raised where holds are set aside for that. Raises: as `admit`.
        """
        if self._connections.seems_to_fit(op):
            return
        asked = replace(op, only_asks=True)
        try:
            self.gate.check()
            await self._admissions.submit(asked)
        except QuotaExceeded:
            if self._standing is None or not (released := self._standing.release(op.payer.organization_id)):
                raise
            await self._void_all(released)
            self.gate.check()
            await self._admissions.submit(asked)
        except StoreAway:
            if self._standing is None:
                raise

    async def extend(self, op: Extend) -> Extended:
        """Lease more output tokens. While the database is away this waits for it, for a bounded time.

        Raises: QuotaExceeded, HoldEnded, StoreAway; the lease is then what it was.
        """
        try:
            async with asyncio.timeout(self._answer_wait_s):
                answer = await self._until_answered(op, None)
        except TimeoutError:
            raise StoreAway("the quota store does not answer, and what was leased is used up") from None
        assert isinstance(answer, Extended)
        return answer

    async def settle(self, op: Settle) -> Settled:
        """End a hold with its usage. Tries until the database has answered, even after the caller was cancelled.

        Raises: InvariantViolated, HoldEnded; StoreAway only if `run` has ended: the journal's recovery settles it then.
        """
        try:
            answer = await self._commits.submit(op)
        except StoreAway as away:
            answer = await self._until_answered(op, away)
        assert isinstance(answer, Settled)
        return answer

    async def void(self, hold_id: uuid.UUID) -> None:
        """End a hold as if it had never been. Tries until the database has answered."""
        await self._until_answered(Void(hold_id), None)

    @property
    def has_answered(self) -> bool:
        """Whether the database has answered this process at all."""
        return self._connections.has_answered

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
                await self._void_all(self._standing.release_all())

    def statistics(self) -> HoldStatistics:
        """Never blocks."""
        standing_count = self._standing.standing_count if self._standing else 0
        commits = self._commits.statistics().plus(self._admissions.statistics())
        open_count = self._commits.open_count + self._admissions.open_count
        return HoldStatistics(len(self._leases), standing_count, open_count, len(self._owed), commits, self._connections.refusals)

    async def _void_all(self, hold_ids: Sequence[uuid.UUID]) -> None:
        """As far as the database answers in time."""
        with contextlib.suppress(TimeoutError, StoreAway):
            async with asyncio.timeout(self._answer_wait_s):
                await asyncio.gather(*(self._commits.submit(Void(hold_id)) for hold_id in hold_ids))

    async def _until_answered(self, op: Settle | Void | Extend, away: StoreAway | None) -> HoldAnswer:
        """Submit an operation until the database answers it. away: the answer to a first attempt, if there was one."""
        delay_s = 0.05
        while True:
            if away is not None:
                if self._closed:
                    raise away
                log.warning("hold_operation_delayed", operation=type(op).__name__, hold_id=str(op.hold_id), cause=str(away))
                try:
                    await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
                    await self._connections.wait_until_answering(SETTLE_RETRY_MAX_S)
                except asyncio.CancelledError:
                    if not isinstance(op, Extend):
                        self._owed[op.hold_id] = op
                    raise
                delay_s = min(delay_s * 2, SETTLE_RETRY_MAX_S)
            try:
                return await self._commits.submit(op)
            except StoreAway as again:
                away = again

    async def _renew_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._expiry_s * RENEW_INTERVAL_S / EXPIRY_S)
            self._renew()

    def _renew(self) -> None:
        owed, self._owed = self._owed, {}
        for op in owed.values():
            self._commits.post(op)
        self._commits.post(Renew(self.owner_id, frozenset()))

    def _came_back(self) -> None:
        """Renew at once what may soon lapse after an outage; and end by that what was taken without an answer."""
        self._admissions.post(Probe())  # a connection that the outage has broken is found before a request finds it
        self._renew()

    async def _probe_regularly(self) -> None:
        """See to it that an idle process, too, knows whether the database answers, and that someone tries while nobody asks."""
        for commits in (self._commits, self._admissions):
            commits.post(Probe())
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S if self.gate.away_s is None else self.gate.pause_s)
            if self._connections.is_quiet(PROBE_INTERVAL_S / 2) and self._commits.empty():
                self._commits.post(Probe())
                self._admissions.post(Probe())

    async def _tend_regularly(self, standing: StandingHolds) -> None:
        """Keep enough set aside for each key in use."""
        while True:
            await asyncio.sleep(TEND_INTERVAL_S)
            if self.gate.away_s is not None:
                continue
            async with self._tending:
                for hold_id in standing.surplus():
                    self._commits.post(Void(hold_id))
                due = standing.due()
                answers = await asyncio.gather(*map(self._admissions.submit, due), return_exceptions=True)
                for op, answer in zip(due, answers, strict=True):
                    if isinstance(answer, Admitted):
                        standing.taken(op, answer)

    def _orphaned(self, op: HoldOperation | Probe, answer: HoldAnswer | Exception) -> None:
        """Nobody takes the answer: end what an admission obtained, and do later what could not be done now."""
        if isinstance(answer, Admitted):
            # Not ours any more: a renewal voids it too, before its request can be bound to what was given to it meanwhile.
            self._leases.end((answer.hold_id,))
            self._commits.post(Void(answer.hold_id))
        elif isinstance(op, Settle | Void) and isinstance(answer, StoreAway):
            self._owed[op.hold_id] = op
        elif isinstance(op, Settle) and isinstance(answer, Exception):
            log.error("hold_end_refused", hold_id=str(op.hold_id), cause=str(answer))


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
