"""The life of one request, from its start frame to its settlement, as one task of the process.

A request does not belong to the stream it came on: the stream going away stops it, or lets it go on unattended if the client wants
that, and it ends and is settled by itself, with nobody's cancellation able to cut that short. Other streams may take it over.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import structlog
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import ApiError, CancelledEarly, Cause, DeadlineBeforeStart, EngineLost, EngineLostMidway, NotAdmittedYet
from api.core.statuses import status_of
from api.generation import frames
from api.generation.admission import Lease
from api.generation.endings import cause_of
from api.generation.engine_run import RETRY_S_MIN, EngineRun, check_output_change, wait_until_ready
from api.generation.life import End, Interruptible, Life, State, Stopwatch
from api.generation.outbox import Receiver, UsageSoFar
from api.generation.output import Flow, LiveOutput, Output, ReplayOutput
from api.generation.output_limits import LimitChange, OutputLimits, parse_update
from api.generation.preparation import (
    admission_request,
    arrival_of,
    check_output_bound,
    is_bounded,
    prepare,
    routed,
    smallest_admission,
)
from api.generation.reply import Reply
from api.generation.start_frame import ValidStart
from api.generation.tools import call_reading
from api.observability.observer import Ending
from api.observability.spans import NO_TRACE, TraceContext
from api.queue.fair_queue import Outlook, Place
from inference.engine import (
    Engine,
    EngineState,
    GenerationRequest,
)
from inference.errors import EngineFailed
from inference.routing.router import Route
from metering.core.errors import RequestInFlight
from metering.core.models import Outcome
from metering.holds.operations import RequestSettled, Settled
from metering.quotas.quota_rules import Payer
from metering.tenants.networks import Address
from metering.tenants.tenants import NO_BOUNDS, TokenBounds

if TYPE_CHECKING:
    from api.generation.process import Process


log = structlog.get_logger(__name__)


class Stopped(Exception):
    """The request was stopped before it reached the engine."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, with what key, and since when. received_at and deadline, the latest time to begin, on the monotonic clock.

    bounds: what the key may have in one request. address: from where; None: not known. trace: the one that it belongs to.
    secret_hash: of the secret that it came with. let_in: called once the request is admitted.
    """

    payer: Payer
    auth_ms: float
    received_at: float
    deadline: float | None = None
    secret: str = field(default="", repr=False)
    trace: TraceContext = NO_TRACE
    bounds: TokenBounds = NO_BOUNDS
    address: Address | None = None
    secret_hash: bytes = field(default=b"", repr=False)
    let_in: Callable[[], None] = lambda: None


class LiveRequest:
    """One request."""

    def __init__(self, caller: Caller, start: ValidStart, process: Process, receiver: Receiver) -> None:
        self.caller = caller
        self.start = start
        self.life = Life(self._on_stop)
        self.place: Place | None = None  # in the queue, once it has been let in
        self._process = process
        stall_max_s = process.admission.settings.client_stall_max_s
        flow = Flow(start.initial_credit_tokens, stall_max_s, lambda: self.life.stop(Outcome.SLOW_CONSUMER))
        self.output: Output
        if start.keep_s is None:
            self.output = LiveOutput(receiver, start.model, flow, self.life, self.update)
        else:
            buffer = process.replays.open(caller.payer.organization_id)
            self.output = ReplayOutput(receiver, start.model, flow, self.life, self.update, start.keep_s, buffer)
        self._reply = Reply(self.output, start, self.life)
        self._watch = Stopwatch(caller.received_at, caller.auth_ms)
        self._engine_run: EngineRun | None = None  # once it was its turn
        self._lease: Lease | None = None  # while the request waits or runs under it
        self._engine_outcome: Outcome | None = None  # once the engine has ended it
        self._limits: OutputLimits | None = None  # once it is admitted
        self._request: GenerationRequest | None = None
        self._route: Route | None = None  # once it is known where it goes
        self._work_s = 0.0  # of a thread, for its prompt
        self.end_cause: Cause | None = None  # once it has ended

    @property
    def routed_model(self) -> str:
        """The canonical name of its model; empty before it is routed, since a client may have sent anything."""
        return self.start.model if self._route is not None else ""

    @property
    def hold_id(self) -> uuid.UUID | None:
        """Its hold, once it has one."""
        return self.output.hold_id

    @property
    def usage(self) -> UsageSoFar:
        """Its tokens so far."""
        return self.output.usage

    @property
    def tokens_per_second(self) -> float:
        """Delivered tokens per second since the first one; 0 before the second."""
        later_token_count, elapsed_s = self.usage.delivered_token_count - 1, self._watch.since_first_token_s
        return later_token_count / elapsed_s if later_token_count > 0 and elapsed_s > 0 else 0.0

    def ends(self) -> dict[int, Outcome]:
        """How each choice has ended, by index, once nothing more is generated."""
        ended = self.life.end.outcome if self.life.end is not None else self._engine_outcome or Outcome.FAILED
        return self._reply.ends_of_choices(ended) or {0: ended}

    def stop(self, outcome: Outcome, error: Exception | None = None) -> None:
        """See `Life.stop`."""
        self.life.stop(outcome, error)

    def _on_stop(self, end: End) -> None:
        if end.error is not None and self.output.takes_whole:  # a part of an answer is no answer
            self.life.discards = True
        self._reply.stopped()
        if end.error is not None:
            self.output.fail()
        if self._engine_run is not None:
            self._engine_run.cancel()

    @property
    def _migration_count(self) -> int:
        return self._engine_run.migration_count if self._engine_run is not None else 0

    def update(self, message: pb.UpdateFrame) -> None:
        """Change the limits of the request, and tell the client which ones hold. Never raises; the request goes on in any case."""
        if self.life.end is not None or (self._engine_run is not None and self._engine_run.has_ended):
            return
        refusal = None
        try:
            self._change_limits(parse_update(message))
        except ApiError as error:
            refusal = status_of(error)
        self.output.push(frames.updated(self._limits, refusal))
        if refusal is None:
            self._reply.end_at_limit()

    def _change_limits(self, change: LimitChange) -> None:
        """Raises: InvalidRequest, NotAdmittedYet; nothing has changed then."""
        limits, lease, request, route = self._limits, self._lease, self._request, self._route
        if limits is None or lease is None or request is None or route is None:
            raise NotAdmittedYet("the request has not been admitted yet: change its limits after the `admitted` frame")
        if change.max_cost is not None:
            limits.check_currency(change.max_cost, "update.max_cost")
        if change.max_output_tokens is not None:
            check_output_bound(self.caller.bounds, change.max_output_tokens, request.choice_count, "update.max_output_tokens")
            check_output_change(request, route.engine.model, change.max_output_tokens)
            lease.allow(change.max_output_tokens)
        limits.change(change)

    async def run(self) -> None:
        """The whole life, as a task of the process."""
        lease: Lease | None = None
        end: pb.ServerFrame | None = None
        broken: Exception | None = None
        timings: dict[str, float] = {}
        try:
            structlog.contextvars.bind_contextvars(request_id=str(self.start.request_id))  # of this task alone, so never unbound
            self.life.become(State.PREPARING)
            with Interruptible(self.life, self._error_before_hold):
                route, request = await self._prepare()
                place = self._enter_queue(route, request)
                asked = admission_request(self.start, request, self.caller.payer)
                lease = await self._process.admission.admit(asked, self.usage)
                self.life.become(State.ADMITTED)
            async with lease:
                self._watch.lap("admission")
                await self._generate(route.engine, request, lease, place)
            self._watch.lap("settle")
            ends = self._reply.ends_of_choices(self.life.end.outcome if self.life.end is not None else Outcome.CANCELLED)
            reply, timings = self._reply, self._watch.timings()
            end = frames.finished(lease, timings, reply.exhausted, ends, self._migration_count, reply.called_choices)
        except RequestSettled as error:
            end, broken = frames.failed(status_of(error), error.settled), error
        except RequestInFlight as error:
            if not self._process.receive_elsewhere(self):
                end, broken = frames.failed(status_of(error), None), error
        except EngineFailed:  # its own log says why
            settled = lease.settled if lease else None
            broken = self._engine_loss(settled)
            end = frames.failed(status_of(broken), settled)
        except Exception as error:
            end, broken = frames.failed(status_of(error), lease.settled if lease else None), error
        finally:
            if self.place is not None:
                self.place.leave()
            if lease is None:
                self._process.pace.spent(self.caller.payer, self._work_s)
            self.end_cause = cause_of(lease.outcome if lease is not None else None, broken)
            self._process.generated(self, can_be_received=lease is not None and lease.settled is not None)
            self.output.end(end)
            if end is not None:
                self._tell(lease, broken, timings or self._watch.timings())
            # What refers to itself in a circle goes only with a collection, which stops all streams meanwhile.
            self.life.over()
            broken = None

    def _tell(self, lease: Lease | None, broken: Exception | None, timings: Mapping[str, float]) -> None:
        """Tell operators how it has ended, and where its time went. broken: what it was refused or has failed with."""
        start = self.start
        self._process.observer.ended(
            Ending(
                self.caller,
                start,
                lease.outcome if lease is not None else None,
                broken,
                timings,
                lease.settled if lease is not None else None,
                0 if start.beam_search is not None else start.choice_count,
                self._migration_count,
            )
        )

    def _engine_loss(self, settled: Settled | None) -> EngineLost | EngineLostMidway:
        """What the client is told of an engine that broke: whether anything is billed decides with which id it may try again."""
        if settled is not None:
            return EngineLostMidway(settled.delivered_token_count)
        assert self._route is not None, "an engine that was lost was chosen"
        return EngineLost(max(self._route.engine.condition().retry_after_s, RETRY_S_MIN))

    async def _prepare(self) -> tuple[Route, GenerationRequest]:
        process, caller = self._process, self.caller
        self.start, route = routed(self.start, process.router)
        self._route, tokenizer = route, process.tokenizers[route.served]
        prepared = await prepare(
            self.start,
            route,
            tokenizer,
            process.safety,
            caller.payer,
            caller.bounds,
            process.text_work,
            self._check_room,
            asks_first=process.admission.was_refused(caller.payer.api_key_id),
        )
        request, self._work_s = prepared.request, prepared.work_s
        if self.start.tool_use.tools:
            self._reply.call_reading = call_reading(self.start.tool_use, tokenizer, self.start.model)
        self._watch.lap("tokenize")
        return route, request

    async def _check_room(self, least_token_count: int) -> None:
        asked = smallest_admission(self.start, least_token_count, self.caller.payer)
        await self._process.admission.check_room(asked)

    def _enter_queue(self, route: Route, request: GenerationRequest) -> Place:
        """A place in the queue, taken before the hold, so that what is refused here has touched nothing. Raises as `enter`."""
        caller, weights, engine = self.caller, self._process.admission.settings.queue_weights, route.engine
        engine_wait_s = 0.0 if engine.healthy() else engine.condition().retry_after_s
        arrival = arrival_of(self.start, request, caller.payer, weights, caller.received_at, caller.deadline)
        self.place = self._process.queues[route.served].enter(arrival, engine_wait_s)
        return self.place

    async def _generate(self, engine: Engine, request: GenerationRequest, lease: Lease, place: Place) -> None:
        """Run the request under its hold, and leave `lease` with how it ended. Raises what breaks it."""
        limits = OutputLimits(lease.admitted.prices, request.stop.max_output_tokens, self.start.max_cost)
        limits.check_input(len(request.prompt_token_ids))
        self._limits, self._request = limits, request
        self._reply.open(lease, limits, self._process.admission.settings, self._process.safety)
        self.output.fence = partial(self._may_send, lease)
        self._lease = lease
        predicted = engine.predict_cached_token_count(request.prompt_token_ids, request.cache_salt)
        bounded = is_bounded(self.caller.bounds, self.start.stop.max_output_tokens, request)
        self.caller.let_in()
        self.output.push(frames.admitted(lease.admitted, request, predicted, bounded_by_key=bounded))
        timer = self._start_timer()
        try:
            with Interruptible(self.life, lambda end: end.error or Stopped()):
                await self._wait_for_turn(engine, place, lease)
            self._engine_run = EngineRun(request, place, limits, self._reply, self._watch, self.life, self.usage)
            self._engine_outcome = await self._engine_run.run(engine)
        except Stopped:
            assert self.life.end is not None
            lease.outcome = self.life.end.outcome
            return
        except Exception:
            if self.output.takes_whole:
                self._reply.discard()
            raise
        finally:
            self._lease = None
            lease.migration_count = self._migration_count
            if timer is not None:
                timer.cancel()
            place.leave()  # the engine is done with it; settling it is nothing that others wait for
            # On every way out: what still waits here would be delivered after it had been settled without.
            await self._reply.flush()
            self.life.become(State.SETTLING)
        end = self.life.end
        if end is not None and end.error is not None:
            if end.outcome is not Outcome.FAILED:  # ended by others, not broken: it counts as what it was ended as
                lease.outcome = end.outcome
            raise end.error
        if self._engine_outcome is Outcome.CANCELLED and end is None:
            raise EngineFailed("the engine was closed while the request ran")
        lease.outcome = self._engine_outcome if end is None else end.outcome
        self._watch.lap("client_stall")
        lease.timings = self._watch.timings()

    def end_if_lapsed(self) -> None:
        """End the request if its hold has lapsed, whatever it was about to do."""
        if self._lease is not None and (lapse := self._lease.lapse()) is not None:
            self.stop(Outcome.FAILED, lapse)

    def _may_send(self, lease: Lease) -> bool:
        """Whether tokens may leave. Where one hold has lapsed, most have: this process was asleep."""
        if lease.lapse() is None:
            return True
        if self.life.end is None:
            self._process.end_lapsed()
        return False

    def _start_timer(self) -> asyncio.TimerHandle | None:
        """End the request as `DEADLINE` if the engine has not begun with it in time, wherever it waits then."""
        if self.start.start_timeout_s is None:
            return None
        left_s = self.caller.received_at + self.start.start_timeout_s - time.monotonic()
        return asyncio.get_running_loop().call_later(left_s, self._stop_unless_begun)

    def _stop_unless_begun(self) -> None:
        if not self.usage.input_token_count:
            self.life.stop(Outcome.DEADLINE)

    async def _wait_for_turn(self, engine: Engine, place: Place, lease: Lease) -> None:
        """Wait for the engine, and for the turn with it."""
        if not engine.healthy():
            await self._load(engine)
        self.life.become(State.QUEUED)
        await place.turn()
        self._watch.lap("queue")
        if not engine.healthy():  # it may have gone meanwhile
            await self._load(engine)
            self.life.become(State.QUEUED)
        # This process may have slept while the request waited: then the engine is to spend nothing on it.
        if (lapse := lease.lapse()) is not None:
            raise lapse

    async def _load(self, engine: Engine) -> None:
        self.life.become(State.LOADING)
        self.tell_progress(None)
        await wait_until_ready(engine, self.start.model, self._process.admission.settings.cold_start_wait_s)
        self._watch.lap("cold_start")

    @staticmethod
    def _error_before_hold(end: End) -> Exception:
        """What a request that was stopped before it had its hold ends with."""
        if end.error is not None:
            return end.error
        if end.outcome is Outcome.DEADLINE:
            return DeadlineBeforeStart("the deadline passed before the request was admitted")
        return CancelledEarly("the request was cancelled before it was admitted")

    def tell_progress(self, outlook: Outlook | None) -> None:
        """Send a progress frame if the request waits for something that takes long. outlook: None if it is the engine's already."""
        if self.life.state is State.LOADING and self._route is not None:
            condition = self._route.engine.condition()
            if condition.state is not EngineState.READY:
                self.output.push(frames.loading(condition))
        elif self.life.state is State.QUEUED:
            position, wait_s = (outlook.position, outlook.wait_s) if outlook is not None else (0, None)
            self.output.push(frames.queued(position, wait_s))
