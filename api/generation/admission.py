"""The one decision to serve: a permit in memory, then a hold in PostgreSQL. There is no other way to reach an engine.

Entering takes both or neither; leaving ends the hold exactly once, on every exit alike, and gives the permit back.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import OrderedDict
from functools import partial
from types import TracebackType
from typing import Self

import structlog

from api.core.errors import Draining, Overloaded
from api.core.settings import Settings
from api.generation.endings import OUTCOMES, Action, cause_of, charge_of, phase_of
from api.generation.outbox import UsageSoFar
from metering.core.errors import MeteringError
from metering.core.models import Outcome
from metering.holds.holds import HoldStore
from metering.holds.journal import UsageJournal
from metering.holds.operations import Admit, Admitted, Extend, Settle, Settled
from metering.quotas.quotas import QuotaExceeded

REFUSED_S = 5.0  # after a refusal by a quota: so long the key's short prompts are not tokenized before the quotas are asked
REFUSED_KEYS_MAX = 10_000

log = structlog.get_logger(__name__)


class Capacity:
    """Permits to run requests in this process: overload is shed here, before the database is touched."""

    def __init__(self, permit_count_max: int) -> None:
        self._permit_count_max = permit_count_max
        self._taken_count = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def taken_count(self) -> int:
        """Requests that hold a permit now."""
        return self._taken_count

    def take(self) -> None:
        """Take a permit, to be given back once. Raises: Draining, Overloaded."""
        if self._draining or self._taken_count >= self._permit_count_max:
            self.check()
        if not self._taken_count:
            self._idle.clear()
        self._taken_count += 1

    def check(self) -> None:
        """Raise what taking a permit would raise: Draining, Overloaded."""
        if self._draining:
            raise Draining("this server is shutting down: the same request will be served elsewhere")
        if self._taken_count >= self._permit_count_max:
            raise Overloaded(f"this server runs {self._taken_count} requests, as many as it may")

    def give_back(self) -> None:
        """The request has ended."""
        self._taken_count -= 1
        if not self._taken_count:
            self._idle.set()

    @property
    def is_draining(self) -> bool:
        """Whether no more permits are given."""
        return self._draining

    def drain(self) -> None:
        """Give no more permits."""
        self._draining = True

    async def idle(self) -> None:
        """Wait until no permit is out."""
        await self._idle.wait()


class Lease:
    """The hold and the permit of one admitted request while it runs: a context manager, and leaving it ends both.

    Set `outcome`, `timings` and `migration_count` before leaving; with no outcome, or by an exception, the exit is a failure.
    `endings.py` says what it costs. `settled` is there afterwards, unless the hold was voided.
    """

    def __init__(self, admission: Admission, max_output_token_count: int, admitted: Admitted, usage: UsageSoFar) -> None:
        self.admitted = admitted
        # Why no more tokens may leave under this hold, whatever is leased; None while they may. Each token asks.
        self.lapse = partial(admission.holds.lapse, admitted.hold_id)
        self.usage = usage
        self.outcome: Outcome | None = None
        self.timings: dict[str, float] | None = None
        self.migration_count = 0
        self.settled: Settled | None = None
        self._admission = admission
        self._max_output_token_count = max_output_token_count
        self.leased_token_count = admitted.leased_token_count
        self._lock: asyncio.Lock | None = None  # made by the first extension
        self._anticipating = False

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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Settle or void the hold, as the table of endings says."""
        admission, usage, hold_id = self._admission, self.usage, self.admitted.hold_id
        try:
            cause = cause_of(self.outcome, error)
            charge = charge_of(phase_of(usage), cause)
            if charge.action is Action.VOID:
                await admission.holds.void(hold_id)
            else:
                self.settled = await admission.holds.settle(
                    Settle(
                        hold_id=hold_id,
                        input_token_count=usage.input_token_count if charge.bills_input else 0,
                        cached_input_token_count=usage.cached_input_token_count if charge.bills_input else 0,
                        generated_token_count=max(usage.generated_token_count, usage.delivered_token_count),
                        delivered_token_count=usage.delivered_token_count if charge.bills_output else 0,
                        outcome=self.outcome or OUTCOMES[cause],
                        timings=self.timings,
                        migration_count=self.migration_count,
                    )
                )
            admission.journal.forget(hold_id)
        finally:
            admission.capacity.give_back()


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
        self._refused_at: OrderedDict[int, float] = OrderedDict()  # by the API key's number; the last that was refused stands last

    def was_refused(self, api_key_id: uuid.UUID) -> bool:
        """Whether the last request of a key was refused by a quota, a moment ago."""
        return time.monotonic() - self._refused_at.get(api_key_id.int, -math.inf) < REFUSED_S

    def _note_refusal(self, api_key_id: uuid.UUID) -> None:
        self._refused_at[api_key_id.int] = time.monotonic()
        self._refused_at.move_to_end(api_key_id.int)
        if len(self._refused_at) > REFUSED_KEYS_MAX:
            self._refused_at.popitem(last=False)

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
            self._note_refusal(op.payer.api_key_id)
            raise

    async def admit(self, op: Admit, usage: UsageSoFar) -> Lease:
        """Hold what the request may cost. Whoever gets the lease enters it at once: leaving it ends the hold by `usage`.

        op: its first slice is all the output that the request and the context window allow; a slice of that is leased at first.
        Raises: Draining, Overloaded, QuotaExceeded, PriceMissing, KeyInvalid, RequestIdReused, RequestInFlight, RequestSettled,
        StoreAway. A refused request leaves no trace.
        """
        settings, max_output_token_count = self.settings, op.first_slice_token_count
        op.first_slice_token_count = min(settings.lease_slice_tokens, max_output_token_count)
        op.least_slice_token_count = min(settings.lease_least_tokens, op.first_slice_token_count)
        self.capacity.take()
        try:
            admitted = await self.holds.admit(op)
        except BaseException as error:
            self.capacity.give_back()
            if isinstance(error, QuotaExceeded):
                self._note_refusal(op.payer.api_key_id)
            raise
        self._refused_at.pop(op.payer.api_key_id.int, None)
        self.admitted_count += 1
        return Lease(self, max_output_token_count, admitted, usage)
