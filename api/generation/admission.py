"""The one decision to serve: a permit in memory, then a hold in PostgreSQL. There is no other way to reach an engine.

A request asks for both through its `Lease`, and ends both through it: on every way out alike, exactly once.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import structlog

from api.core.errors import Draining, Overloaded
from api.core.settings import Settings
from api.generation.endings import OUTCOMES, Action, cause_of, charge_of, phase_of
from api.generation.outbox import UsageSoFar
from metering.core.errors import MeteringError
from metering.core.models import Outcome
from metering.holds.holds import HoldStore
from metering.holds.journal import UsageJournal
from metering.holds.operations import Admit, Admitted, Ended, Extend, Settle, Settled
from metering.quotas.quotas import QuotaExceeded
from metering.store.group_commit import Pending

REFUSED_S = 5.0  # after a refusal by a quota: so long the key's short prompts are not tokenized before the quotas are asked
REFUSED_KEYS_MAX = 10_000

log = structlog.get_logger(__name__)


class Capacity:
    """Permits to run requests in this process: overload is shed here, before the database is touched."""

    def __init__(self, permit_count_max: int) -> None:
        self._permit_count_max = permit_count_max
        self.taken_count = 0  # requests that hold a permit now
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False  # no more permits are given

    def take(self) -> None:
        """Take a permit, to be given back once. Raises: Draining, Overloaded."""
        if self.is_draining or self.taken_count >= self._permit_count_max:
            self.check()
        if not self.taken_count:
            self._idle.clear()
        self.taken_count += 1

    def check(self) -> None:
        """Raise what taking a permit would raise: Draining, Overloaded."""
        if self.is_draining:
            raise Draining("this server is shutting down: the same request will be served elsewhere")
        if self.taken_count >= self._permit_count_max:
            raise Overloaded(f"this server runs {self.taken_count} requests, as many as it may")

    def give_back(self) -> None:
        """The request has ended."""
        self.taken_count -= 1
        if not self.taken_count:
            self._idle.set()

    def drain(self) -> None:
        """Give no more permits."""
        self.is_draining = True

    async def idle(self) -> None:
        """Wait until no permit is out."""
        await self._idle.wait()


class Lease:
    """Permit and hold of one request, from admission to settlement. Each ends exactly once.

    leased_token_count: output tokens that may be delivered in all. outcome: what it was ended with. settled: what that has cost,
    unless the hold was voided; `endings.py` says what an end costs.
    """

    def __init__(self, admission: Admission, op: Admit, usage: UsageSoFar) -> None:
        """op: its first slice is all the output that the request may have; a slice of that is leased at first.

        usage: what the hold is ended with.
        """
        self.admitted: Admitted  # from when it was let in
        self.is_held = False
        # Why no more tokens may leave under this hold, whatever is leased; None while they may. Each token asks.
        self.lapse: Callable[[], Exception | None] = no_lapse
        self.usage = usage
        self.leased_token_count = 0
        self.outcome: Outcome | None = None
        self.settled: Settled | None = None
        self._op = op
        self._admission = admission
        self._max_output_token_count = op.first_slice_token_count
        self._pending: Pending | None = None  # while it is asked for
        self._done: Callable[[Exception | None], None] | None = None
        self._lock: asyncio.Lock | None = None  # made by the first extension
        self._anticipating = False

    def ask(self, done: Callable[[Exception | None], None]) -> None:
        """Ask for both. done: called later, with the refusal if there is one; a refused request leaves no trace.

        Raises: Draining, Overloaded. Refusals: QuotaExceeded, PriceMissing, KeyInvalid, RequestIdReused, RequestInFlight,
        RequestSettled, StoreAway.
        """
        op, settings = self._op, self._admission.settings
        op.first_slice_token_count = min(settings.lease_slice_tokens, op.first_slice_token_count)
        op.least_slice_token_count = min(settings.lease_least_tokens, op.first_slice_token_count)
        self._admission.capacity.take()
        self._done = done
        self._pending = self._admission.holds.begin_admit(op, self._answered)

    def _answered(self, answer: Admitted | Exception) -> None:
        admission, key_number = self._admission, self._op.payer.api_key_id.int
        done, self._done, self._pending = self._done, None, None
        assert done is not None, "who asks is answered once"
        if isinstance(answer, Exception):
            admission.capacity.give_back()
            if isinstance(answer, QuotaExceeded):
                admission.note_refusal(key_number)
            done(answer)
            return
        admission.refused_at.pop(key_number, None)
        admission.admitted_count += 1
        self.admitted, self.is_held = answer, True
        self.leased_token_count = answer.leased_token_count
        self.lapse = partial(admission.holds.lapse, answer.hold_id)
        done(None)

    def abandon(self) -> None:
        """Give back permit and hold without calling `done`. Not for a lease that `end` was called for."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = self._done = None
        elif self.is_held:
            self._admission.holds.begin_void(self.admitted.hold_id, lambda _: None)
        else:
            return
        self._admission.capacity.give_back()

    def allow(self, max_output_token_count: int) -> None:
        """The request may have so many output tokens in all, if it could not have more before."""
        self._max_output_token_count = max(self._max_output_token_count, max_output_token_count)

    async def cover(self, token_count: int) -> None:
        """Make sure that so many output tokens in all may be delivered; returns at once where they are leased already.

        Raises: QuotaExceeded if a quota has no room for them, HoldEnded, StoreAway. What was leased before stays leased.
        """
        while token_count > self.leased_token_count:
            await self._extend_beyond(self.leased_token_count)
        self.anticipate(token_count)

    def anticipate(self, token_count: int) -> None:
        """Extend in the background once little is left, so that the stream does not wait for the database later."""
        if self.leased_token_count - token_count > self._admission.settings.lease_margin_tokens:
            return
        if not self._anticipating and self.leased_token_count < self._max_output_token_count:
            self._anticipating = True
            self._admission.tasks.create_task(self._extend_quietly(self.leased_token_count), name="lease extension")

    async def _extend_quietly(self, leased_token_count: int) -> None:
        try:
            await self._extend_beyond(leased_token_count)
        except MeteringError as refusal:
            # `cover` asks again when the tokens are needed, and then it matters.
            log.debug("lease_extension_refused", hold_id=str(self.admitted.hold_id), cause=str(refusal))

    async def _extend_beyond(self, leased_token_count: int) -> None:
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self.leased_token_count > leased_token_count:
                return
            wanted = min(self._admission.settings.lease_slice_tokens, self._max_output_token_count - self.leased_token_count)
            assert wanted > 0, "the engine may not produce more than the request allows"
            extended = await self._admission.holds.extend(
                Extend(self.admitted.hold_id, self.usage.delivered_token_count, self.usage.cached_input_token_count, wanted)
            )
            self.leased_token_count = extended.leased_token_count
            self._anticipating = False

    def end(
        self,
        outcome: Outcome | None,
        error: BaseException | None,
        done: Callable[[Exception | None], None],
        timings: dict[str, float] | None = None,
        migration_count: int = 0,
    ) -> None:
        """Settle or void the hold, as the table of endings says, and give the permit back.

        outcome, error: as `cause_of`. done: called later, with what went wrong if anything did.
        """
        usage, hold_id = self.usage, self.admitted.hold_id
        cause = cause_of(outcome, error)
        charge = charge_of(phase_of(usage), cause)
        self.outcome, self._done = outcome, done
        if charge.action is Action.VOID:
            self._admission.holds.begin_void(hold_id, self._ended)
            return
        op = Settle(
            hold_id=hold_id,
            input_token_count=usage.input_token_count if charge.bills_input else 0,
            cached_input_token_count=usage.cached_input_token_count if charge.bills_input else 0,
            generated_token_count=max(usage.generated_token_count, usage.delivered_token_count),
            delivered_token_count=usage.delivered_token_count if charge.bills_output else 0,
            outcome=outcome or OUTCOMES[cause],
            timings=timings,
            migration_count=migration_count,
        )
        self._admission.holds.begin_settle(op, self._ended)

    def _ended(self, answer: Settled | Ended | Exception) -> None:
        self._admission.capacity.give_back()
        done, self._done = self._done, None
        assert done is not None, "a hold ends once"
        if isinstance(answer, Exception):
            done(answer)
            return
        if isinstance(answer, Settled):
            self.settled = answer
        self._admission.journal.forget(self.admitted.hold_id)
        done(None)


def no_lapse() -> None:
    """Default of `Lease.lapse`: there is no hold yet that could lapse."""


class Admission:
    """Lets requests in, and sees to it that each ends."""

    def __init__(
        self, settings: Settings, capacity: Capacity, holds: HoldStore, journal: UsageJournal, tasks: asyncio.TaskGroup
    ) -> None:
        self.settings = settings
        self.capacity = capacity
        self.holds = holds
        self.journal = journal
        self.tasks = tasks
        self.admitted_count = 0  # since the start
        self.refused_at: OrderedDict[int, float] = OrderedDict()  # by the API key's number; the last that was refused stands last

    def was_refused(self, api_key_id: uuid.UUID) -> bool:
        """Whether the last request of a key was refused by a quota, a moment ago."""
        return time.monotonic() - self.refused_at.get(api_key_id.int, -math.inf) < REFUSED_S

    def note_refusal(self, key_number: int) -> None:
        """A quota has refused a request of this API key."""
        self.refused_at[key_number] = time.monotonic()
        self.refused_at.move_to_end(key_number)
        if len(self.refused_at) > REFUSED_KEYS_MAX:
            self.refused_at.popitem(last=False)

    async def check_room(self, op: Admit) -> None:
        """Raise what a request would be refused with that is at least this large, before any work is spent on it.

        op: with as many input tokens as it may have at least; of its output no more is asked for than it needs to begin. Raises:
        Draining, Overloaded; as `HoldStore.check_room`.
        """
        self.capacity.check()
        op.first_slice_token_count = op.least_slice_token_count = min(1, op.first_slice_token_count)
        try:
            await self.holds.check_room(op)
        except QuotaExceeded:
            self.note_refusal(op.payer.api_key_id.int)
            raise

    async def admit(self, op: Admit, usage: UsageSoFar) -> Lease:
        """See `Lease.ask`, and raises its refusals. Whoever gets the lease ends it."""
        lease = Lease(self, op, usage)
        try:
            await answered(lease.ask)
        except asyncio.CancelledError:
            lease.abandon()
            raise
        return lease


async def answered(ask: Callable[[Callable[[Exception | None], None]], None]) -> None:
    """Call `ask` with a callback and wait until it is called. Raises the error that the callback receives."""
    answer: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    ask(lambda error: None if answer.done() else answer.set_result(error))
    if (error := await answer) is not None:
        raise error
