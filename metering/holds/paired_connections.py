"""The two connections on which holds of one process are taken and ended: whose turn it is, and what each answer tells.

Admissions have one of their own, so that a batch of them and one of all else are under way at the same time. Owns what is known of
this process's holds from the answers: which are live, until when they are ours, whether the database is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from metering.errors import InvariantViolated, StoreAway
from metering.holds.hold_connection import HoldConnection
from metering.holds.lease_clock import LeaseClock
from metering.holds.own_holds import OwnHolds
from metering.holds.standing_holds import StandingHolds
from metering.models import QuotaDimension, QuotaSubject
from metering.operations import (
    Admit,
    Admitted,
    Ended,
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
from metering.receipts.chaining import BatchSigner
from metering.store.store_gate import StoreGate

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks whether the database answers at all."""


class PairedConnections:
    """Runs one batch at a time on each. What needs both takes the turns of both, that of admissions first."""

    def __init__(
        self,
        database_url: str,
        owner_id: uuid.UUID,
        *,
        expiry_s: float,
        gate: StoreGate,
        signer: BatchSigner | None,
        leases: LeaseClock,
        standing: StandingHolds | None,
        used: Callable[[], None],
        came_back: Callable[[], None],
    ) -> None:
        """standing: what is set aside for an outage, if anything.

        used, came_back: called when usage has been written, when the database answers again after it was away or admissions have
        been lost; must not block.
        """
        self._leases = leases
        self._standing = standing
        self.own = OwnHolds()
        self._owner_id = owner_id
        self._gate = gate
        self._others, self._admitting = (
            HoldConnection(database_url, owner_id, expiry_s=expiry_s, gate=gate, signer=signer, own=self.own) for _ in range(2)
        )
        self._admission_turn, self._turn = asyncio.Lock(), asyncio.Lock()
        self._spared: set[uuid.UUID] = set()
        self._used = used
        self._came_back = came_back
        self._answered_at: float | None = None
        self._answering = asyncio.Event()
        self._has_lost_admissions = False  # whose answers never came: whatever they have taken stands in the way of a second try

    async def close(self) -> None:
        """Drop both connections."""
        for connection in (self._others, self._admitting):
            await connection.close()

    @property
    def has_answered(self) -> bool:
        """Whether the database has answered this process at all."""
        return self._answered_at is not None

    @property
    def refusals(self) -> Mapping[tuple[QuotaDimension, QuotaSubject], int]:
        """Admissions that quotas have refused, by the dimension and the subject of the quota in front."""
        return self._admitting.refusals.counts

    def is_quiet(self, for_s: float) -> bool:
        """Whether nothing has been heard of the database for so long."""
        return self._answered_at is None or self._leases.now() - self._answered_at >= for_s

    async def wait_until_answering(self, at_most_s: float) -> None:
        """Until the database answers, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._answering.wait()

    async def execute(self, operations: Sequence[HoldOperation | Probe]) -> Sequence[HoldAnswer | Exception]:
        """A batch of all but admissions."""
        if not (self._has_given() or any(isinstance(op, Renew) for op in operations)):
            async with self._turn:
                return await self._execute_on(self._others, operations)
        # Whoever renews ends what nobody knows of: no admission may be half known then.
        async with self._admission_turn, self._turn:
            if not await self._bind():
                return [StoreAway("the database does not answer")] * len(operations)
            return await self._execute_on(self._others, operations)

    def seems_to_fit(self, op: Admit) -> bool:
        """Whether an admission fits by all that was read for others, which is a guess. Sends no query."""
        return not self._has_given() and self._admitting.seems_to_fit(op)

    async def execute_admissions(self, operations: Sequence[HoldOperation | Probe]) -> Sequence[HoldAnswer | Exception]:
        """A batch of admissions."""
        async with self._admission_turn:
            if self._has_given():
                async with self._turn:
                    if not await self._bind():
                        return [StoreAway("the database does not answer")] * len(operations)
            return await self._execute_on(self._admitting, operations)

    async def _execute_on(
        self, connection: HoldConnection, operations: Sequence[HoldOperation | Probe]
    ) -> Sequence[HoldAnswer | Exception]:
        sent_at = self._leases.now()
        batch = [self._renewal() if isinstance(op, Renew) else op for op in operations if not isinstance(op, Probe)]
        answers = await connection.execute(batch)
        lost = any(type(op) is Admit and type(answer) is StoreAway for op, answer in zip(batch, answers, strict=True))
        self._has_lost_admissions = self._has_lost_admissions or lost
        self._note_answer()
        for op, answer in zip(batch, answers, strict=True):
            self._note(op, answer, sent_at)
        if any(type(answer) is Settled for answer in answers):
            self._used()
        if len(batch) == len(operations):
            return answers
        there, given = Ended(done=self._gate.away_s is None), iter(answers)
        return [there if isinstance(op, Probe) else next(given) for op in operations]

    def _note_answer(self) -> None:
        """Tell whoever waits for the database that it is there, and after an outage or a broken connection that it is again."""
        if self._gate.away_s is not None:
            self._answering.clear()
            return
        was_away = self.has_answered and not self._answering.is_set()
        self._answered_at = self._leases.now()
        self._answering.set()
        if was_away or self._has_lost_admissions:
            self._has_lost_admissions = False
            self._came_back()

    def _note(self, op: HoldOperation, answer: HoldAnswer | Exception, sent_at: float) -> None:
        """Keep the list of live holds, and until when they are ours, as the database has just answered."""
        if isinstance(answer, Admitted):
            self._leases.begin(answer.hold_id, sent_at)
        elif isinstance(op, Settle | Void):
            if isinstance(answer, StoreAway):
                return
            self._leases.end(op.hold_id)
            if self._standing is not None:
                self._standing.ended(op.hold_id)
            if isinstance(answer, InvariantViolated):
                # Voiding it would lose what was delivered, renewing it would hold its quotas for ever.
                self._spared.add(op.hold_id)
        elif isinstance(op, Extend) and isinstance(answer, Extended):
            self._leases.extend(op.hold_id, sent_at)
        elif isinstance(answer, Renewed):
            self._leases.renew(answer.hold_ids, sent_at)

    def _renewal(self) -> Renew:
        """Of all holds that are live now."""
        return Renew(self._owner_id, frozenset(self._leases.hold_ids), frozenset(self._spared))

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
