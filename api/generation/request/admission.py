"""Admission of requests: a permit in memory, then a hold in PostgreSQL.

No request reaches an engine without both. A `HoldHandle` takes them, and releases each exactly
once, however the request ends.
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
from api.generation.charges import Action
from api.generation.endings import OUTCOMES, UsageSoFar, cause_of, charge_of, phase_of
from metering.core.errors import MeteringError
from metering.core.models import Outcome
from metering.holds.holds import HoldStore
from metering.holds.journal import UsageJournal
from metering.holds.operations import Admit, Admitted, Ended, Extend, Settle, Settled
from metering.quotas.quotas import QuotaExceeded
from metering.store.group_commit import Pending

# After a quota refusal, quotas are checked for this many seconds before a prompt of that key is
# tokenized.
REFUSED_S = 5.0
REFUSED_KEYS_MAX = 10_000

log = structlog.get_logger(__name__)


class Capacity:
    """Permits to run requests in this process. Sheds overload before it reaches the database."""

    def __init__(self, permit_count_max: int) -> None:
        self.permit_count_max = permit_count_max
        self.taken_count = 0  # requests that hold a permit
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False  # if set, no more permits are issued

    def take(self) -> None:
        """Take a permit, which must be given back once. Raises: Draining, Overloaded."""
        if self.is_draining or self.taken_count >= self.permit_count_max:
            self.check()
        if not self.taken_count:
            self._idle.clear()
        self.taken_count += 1

    def check(self) -> None:
        """Raise the error that `take` would raise: Draining or Overloaded."""
        if self.is_draining:
            raise Draining()
        if self.taken_count >= self.permit_count_max:
            raise Overloaded(
                f"This server already runs {self.taken_count} requests, which is its limit. Send"
                " the request again, to another server if there is one."
            )

    def give_back(self) -> None:
        """Give back a permit."""
        self.taken_count -= 1
        if not self.taken_count:
            self._idle.set()

    def drain(self) -> None:
        """Refuse all further permits."""
        self.is_draining = True

    async def idle(self) -> None:
        """Wait until all permits are given back."""
        await self._idle.wait()


class HoldHandle:
    """Permit and hold of one request, from admission to settlement. Each is released exactly once.

    `leased_token_count` output tokens may be delivered in total. `outcome` is how the request
    ended. `settled` is the final charge; None if the hold was voided (see `endings.py`).
    """

    admitted: Admitted  # set on admission
    is_held = False
    leased_token_count = 0
    # Watermark below the lease: up to this total, tokens need no call of `anticipate`.
    unchecked_until = 0
    outcome: Outcome | None = None
    settled: Settled | None = None
    _pending: Pending | None = None  # while the admission is pending
    _lock: asyncio.Lock | None = None  # created by the first extension
    _anticipating = False

    def __init__(
        self, admission: Admission, op: Admit, usage: UsageSoFar, max_output_token_count: int = 0
    ) -> None:
        """The lease grows from the first slice of `op` to `max_output_token_count` at most.

        The hold is settled with the token counts in `usage`.
        """
        # Returns why tokens may no longer be delivered under this hold, or None. Called for each
        # token.
        self.lapse: Callable[[], Exception | None] = no_lapse
        self.usage = usage
        self._op = op
        self._admission = admission
        self._max_output_token_count = max_output_token_count

    def ask(self, done: Callable[[Exception | None], None]) -> None:
        """Request a permit and a hold. A refused request leaves no trace.

        `done` is called later, with None or the refusal: QuotaExceeded, PriceMissing, KeyInvalid,
        RequestIdReused, RequestInFlight, RequestSettled, DatabaseUnavailable. Raises: Draining,
        Overloaded, JournalUnavailable.
        """
        admission = self._admission
        if admission.journal.fault:
            admission.journal.check()
        admission.capacity.take()
        self._pending = admission.holds.begin_admit(self._op, partial(self._answered, done))

    def _answered(
        self, done: Callable[[Exception | None], None], answer: Admitted | Exception
    ) -> None:
        admission, key_number = self._admission, self._op.payer.api_key_id.int
        self._pending = None
        if isinstance(answer, Exception):
            admission.capacity.give_back()
            if isinstance(answer, QuotaExceeded):
                admission.note_refusal(key_number)
            done(answer)
            return
        admission.refused_at.pop(key_number, None)
        admission.admitted_count += 1
        self.admitted, self.is_held = answer, True
        self._lease(answer.leased_token_count, self._max_output_token_count)
        self.lapse = partial(admission.holds.lapse, answer.hold_id)
        done(None)

    def abandon(self) -> None:
        """Release permit and hold without calling `done`. Must not be called after `end`."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None
        elif self.is_held:
            self._admission.holds.begin_void(self.admitted.hold_id, lambda _: None)
        else:
            return
        self._admission.capacity.give_back()

    def allow(self, max_output_token_count: int) -> None:
        """Raise the limit on the request's output to at least this many tokens in total."""
        self._lease(
            self.leased_token_count, max(self._max_output_token_count, max_output_token_count)
        )

    async def cover(self, token_count: int) -> None:
        """Extend the lease until this many output tokens in total may be delivered.

        Raises: QuotaExceeded if a quota has no room, HoldEnded, DatabaseUnavailable. Earlier leases
        stay valid.
        """
        while token_count > self.leased_token_count:
            await self._extend_beyond(self.leased_token_count)
        self.anticipate(token_count)

    def _lease(self, leased_token_count: int, max_output_token_count: int) -> None:
        """Record a lease. If it covers all output, it never needs an extension."""
        self.leased_token_count = leased_token_count
        self._max_output_token_count = max_output_token_count
        self.unchecked_until = leased_token_count
        if leased_token_count < max_output_token_count:
            self.unchecked_until -= self._admission.leases.margin_tokens + 1

    def anticipate(self, token_count: int) -> None:
        """Extend the lease in the background before it runs out, so that streams do not wait."""
        if token_count > self.unchecked_until and not self._anticipating:
            self._anticipating = True
            self._admission.tasks.create_task(
                self._extend_quietly(self.leased_token_count), name="lease extension"
            )

    async def _extend_quietly(self, leased_token_count: int) -> None:
        try:
            await self._extend_beyond(leased_token_count)
        except MeteringError as refusal:
            # `cover` repeats the extension when the tokens are needed; a refusal matters only then.
            log.debug(
                "lease_extension_refused", hold_id=str(self.admitted.hold_id), cause=str(refusal)
            )

    async def _extend_beyond(self, leased_token_count: int) -> None:
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self.leased_token_count > leased_token_count:
                return
            target = min(
                self._admission.leases.slice_tokens,
                self._max_output_token_count - self.leased_token_count,
            )
            assert target > 0, "the engine may not produce more than the request allows"
            extended = await self._admission.holds.extend(
                Extend(
                    self.admitted.hold_id,
                    self.usage.taken_token_count,
                    self.usage.cached_input_token_count if self.usage.is_cached_final else 0,
                    target,
                    self.usage.taken_reasoning_token_count,
                )
            )
            self._lease(extended.leased_token_count, self._max_output_token_count)
            self._anticipating = False

    def end(
        self,
        outcome: Outcome | None,
        error: BaseException | None,
        done: Callable[[Exception | None], None],
        timings: dict[str, float] | None = None,
        migration_count: int = 0,
    ) -> None:
        """Settle or void the hold, as the table in `endings.py` says, and release the permit.

        `outcome` and `error` are how the request ended. `done` is called later, with the error if
        the hold could not be ended.
        """
        usage, hold_id = self.usage, self.admitted.hold_id
        cause = cause_of(outcome, error)
        charge = charge_of(phase_of(usage), cause)
        self.outcome = outcome
        if charge.action is Action.VOID:
            self._admission.holds.begin_void(hold_id, partial(self._ended, done))
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
            journalled_token_count=usage.journalled_token_count,
            reasoning_token_count=(
                usage.delivered_reasoning_token_count if charge.bills_output else 0
            ),
        )
        self._admission.holds.begin_settle(op, partial(self._ended, done))

    def _ended(
        self, done: Callable[[Exception | None], None], answer: Settled | Ended | Exception
    ) -> None:
        self._admission.capacity.give_back()
        if isinstance(answer, Exception):
            done(answer)
            return
        if isinstance(answer, Settled):
            self.settled = answer
        self._admission.journal.forget(self.admitted.hold_id)
        done(None)


def no_lapse() -> None:
    """Return None: there is no hold yet that could lapse."""


class Admission:
    """Admits requests to this process, and settles or voids the hold of each."""

    def __init__(
        self,
        settings: Settings,
        capacity: Capacity,
        holds: HoldStore,
        journal: UsageJournal,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.settings = settings
        self.leases = settings.leases
        self.capacity = capacity
        self.holds = holds
        self.journal = journal
        self.tasks = tasks
        self.admitted_count = 0  # since the start of the process
        # Key: the API key's id as an integer; the latest refusal is last
        self.refused_at: OrderedDict[int, float] = OrderedDict()

    def was_refused(self, api_key_id: uuid.UUID) -> bool:
        """Return whether a quota refused the key's last request less than `REFUSED_S` ago."""
        return time.monotonic() - self.refused_at.get(api_key_id.int, -math.inf) < REFUSED_S

    def note_refusal(self, key_number: int) -> None:
        """Record that a quota refused a request of this API key."""
        self.refused_at[key_number] = time.monotonic()
        self.refused_at.move_to_end(key_number)
        if len(self.refused_at) > REFUSED_KEYS_MAX:
            self.refused_at.popitem(last=False)

    async def check_room(self, op: Admit) -> None:
        """Raise the refusal that a request of at least this size would get, before any work.

        The tokens in `op` are lower bounds. Raises: Draining, Overloaded, JournalUnavailable, and
        the errors of `HoldStore.check_room`.
        """
        self.capacity.check()
        self.journal.check()
        try:
            await self.holds.check_room(op)
        except QuotaExceeded:
            self.note_refusal(op.payer.api_key_id.int)
            raise

    async def admit(
        self, op: Admit, usage: UsageSoFar, max_output_token_count: int = 0
    ) -> HoldHandle:
        """Take a permit and a hold, and return their handle, which the caller must end.

        Raises the refusals of `HoldHandle.ask`. If cancelled, releases both.
        """
        hold = HoldHandle(self, op, usage, max_output_token_count)
        try:
            await answered(hold.ask)
        except asyncio.CancelledError:
            hold.abandon()
            raise
        return hold


async def answered(ask: Callable[[Callable[[Exception | None], None]], None]) -> None:
    """Call `ask`, wait for its callback, and raise the error that the callback receives."""
    answer: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    ask(lambda error: None if answer.done() else answer.set_result(error))
    if (error := await answer) is not None:
        raise error
