"""Phases of a request: each is a class that carries what exists in it.

    Received → Preparing → Asking → Queued ⇄ Loading
                                      ↓
                                  Submitted → Running → Generated      (embedding: Encoding)
                                      ↓          ↓          ↓
                              any of the held → Flushing → Settling → Ended

`Preparing` knows the route. From `Queued` to `Settling` the request is admitted: `admitted` holds
permit and hold, the queue entry, and for a generate request all that its output needs. Only the
phases with a `sequence` have one. A request that is refused goes from any of the first three to
`Ended`, or to `Preparing` for another model (`fallback.py`). A generate request asks in `Asking`;
the task of an embedding does so while `Preparing`, and it has nothing to flush. `NEXT` is the
table; tests check every transition against it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

import msgspec

from api.core.errors import Cause
from api.generation.parsing.tools import CallReading
from api.generation.request.admission import HoldHandle
from api.generation.request.limits import OutputLimits
from api.generation.request.output_processor import OutputProcessor
from api.queue.fair_queue import QueueEntry
from inference.engine import EngineTimings, GenerationRequest, SequenceHandle
from inference.routing.router import EncoderRoute, Route
from metering.core.models import Outcome

A = TypeVar("A", bound="AdmittedRequest")
R = TypeVar("R", Route, EncoderRoute)
STREAMING = "streaming"
# In the live view and in metrics.
PHASE_NAMES = ("preparing", "queued", "loading", STREAMING, "ending")


class AdmittedRequest(msgspec.Struct, eq=False):
    """State of a request from admission to settlement. `entry` is its first queue entry."""

    hold: HoldHandle
    entry: QueueEntry

    @property
    def hold_id(self) -> uuid.UUID:
        """Id of the hold."""
        return self.hold.admitted.hold_id


class AdmittedGeneration(AdmittedRequest, eq=False):
    """State of a generate request from its admission to its settlement.

    `begin_timer` ends the request unless an engine starts on it in time; None without a limit.
    `part_timings` has an entry for each sequence that has ended, several if the client raised the
    limit.
    """

    route: Route
    request: GenerationRequest
    limits: OutputLimits
    processor: OutputProcessor
    begin_timer: asyncio.TimerHandle | None = None
    part_timings: list[EngineTimings] = []
    migration_count: int = 0


class Phase(msgspec.Struct, eq=False):
    """Phase of a request. If `is_over`, no more output is generated."""

    name: ClassVar[str] = "preparing"
    is_over: ClassVar[bool] = False


class Received(Phase, eq=False):
    """The request is parsed; the name of its model is not resolved yet."""


class Preparing(Phase, Generic[R], eq=False):
    """The prompt is being rendered, tokenized and checked.

    `call_reading` says how tool calls are parsed; None without tools. `work_s` is the processor
    time spent on the prompt.
    """

    route: R
    call_reading: CallReading | None = None
    work_s: float = 0.0


class Asking(Preparing[Route], eq=False, kw_only=True):
    """The request is waiting for its permit and its hold."""

    request: GenerationRequest
    entry: QueueEntry
    hold: HoldHandle


class Held(Phase, Generic[A], eq=False):
    """Base of the phases in which the request has a hold."""

    admitted: A


class Loading(Held[A], Generic[A], eq=False):
    """The request is waiting for an engine to start."""

    name: ClassVar[str] = "loading"


class Queued(Held[A], Generic[A], eq=False):
    """The request is waiting in the queue."""

    name: ClassVar[str] = "queued"


class Sequenced(Held[AdmittedGeneration], eq=False):
    """Base of the phases in which an engine has a sequence of the request."""

    name: ClassVar[str] = STREAMING
    sequence: SequenceHandle


class Submitted(Sequenced, eq=False):
    """An engine has the sequence, but has not started on it."""

    name: ClassVar[str] = "queued"


class Running(Sequenced, eq=False):
    """The engine has started on the sequence."""


class Generated(Sequenced, eq=False):
    """The sequence has ended, but safety checks or the lease still hold back output.

    `stalled_s` is how long the client had stalled by then.
    """

    outcome: Outcome
    stalled_s: float


class Encoding(Held[AdmittedRequest], eq=False):
    """The encoder is working on a part of the texts."""

    name: ClassVar[str] = STREAMING


class Flushing(Held[AdmittedGeneration], eq=False):
    """The client is receiving the rest of the output. `result` is an outcome or an error."""

    name: ClassVar[str] = STREAMING
    is_over: ClassVar[bool] = True
    result: Outcome | Exception
    stalled_s: float


class Settling(Held[A], Generic[A], eq=False):
    """The hold is being settled or voided."""

    name: ClassVar[str] = "ending"
    is_over: ClassVar[bool] = True


class Ended(Phase, eq=False):
    """The request has ended. `ends` has the outcome of each choice, by its index."""

    name: ClassVar[str] = "ending"
    is_over: ClassVar[bool] = True
    cause: Cause
    ends: Mapping[int, Outcome] = {}


WAITING = (Loading, Queued, Submitted)
NEXT: Mapping[type[Phase], tuple[type[Phase], ...]] = {
    Received: (Preparing, Ended),
    Preparing: (Preparing, Asking, Queued, Ended),
    Asking: (Preparing, Queued, Ended),
    Loading: (Queued, Encoding, Flushing, Settling),
    # Each part of an embedding queues again.
    Queued: (Loading, Queued, Submitted, Encoding, Flushing, Settling),
    Submitted: (Running, Generated, Flushing),
    # A raised limit needs another sequence, for which the engine may have to be started. A sequence
    # that moves to another engine stays one.
    Running: (Running, Loading, Generated, Flushing),
    Generated: (Flushing,),
    Encoding: (Queued, Settling),
    Flushing: (Settling,),
    Settling: (Ended,),
    Ended: (),
}
