"""One generate request, from its start frame to its settlement.

A request does not belong to the stream that started it. If that stream closes, the request is
stopped, or continues unattended if the client asked for that; other streams may attach to it. It
ends and settles by itself, and no cancellation can interrupt that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog
from weir.v1 import inference_service_pb2 as pb

from api.access.auth import payer
from api.core.errors import (
    ApiError,
    CancelledEarly,
    Cause,
    DeadlineBeforeStart,
    Draining,
    EngineLost,
    EngineLostMidway,
    FieldViolation,
    InvalidRequest,
    NotAdmittedYet,
    status_of,
)
from api.core.pace import VISIT
from api.core.wire import OUTCOMES
from api.generation import state
from api.generation.delivery import frames
from api.generation.delivery.output_buffer import (
    FlowControl,
    OutputBuffer,
    SendBuffer,
    read_too_slowly,
)
from api.generation.delivery.replayable_buffer import ReplayableBuffer
from api.generation.delivery.stream_writer import Subscription, UsageSoFar
from api.generation.endings import cause_of
from api.generation.parsing.start_frame import ValidStart
from api.generation.parsing.tokenizing import TextJob, tokenize_at_once
from api.generation.parsing.tools import call_reading
from api.generation.request.admission import Lease
from api.generation.request.limits import LimitChange, OutputLimits, parse_update
from api.generation.request.output_processor import Reply
from api.generation.request.preparation import (
    admission_request,
    arrival_of,
    check_output_bound,
    checked_request,
    is_bounded,
    prepared,
    smallest_admission,
)
from api.generation.state import End, Interruptible, Life, State, Stopwatch
from api.observability.observer import Ending
from api.observability.spans import NO_TRACE, TraceContext
from api.queue.fair_queue import Outlook, Place
from inference.engine import (
    Backend,
    Engine,
    EngineFinishReason,
    EngineState,
    EngineTimings,
    GenerationRequest,
    ModelInfo,
    Scheduled,
    Sequence,
    SequenceEvent,
    SequenceFinished,
    StoppedBy,
    TokensGenerated,
)
from inference.errors import EngineError, EngineFailed, EngineStartFailed
from inference.routing.router import Route
from metering.core.errors import JournalUnavailable, RequestInFlight
from metering.core.models import Outcome
from metering.holds.operations import RequestSettled, Settled
from metering.quotas.quota_rules import Payer
from metering.tenants.networks import Address
from metering.tenants.tenants import NO_BOUNDS, Principal, TokenBounds

if TYPE_CHECKING:
    from api.generation.request.registry import Process


# The queue orders tenants by generated tokens; a few more or less do not change the order.
TOKENS_PER_CHARGE = 8
# In seconds; a shorter retry-after would bring clients back before the failure is detected.
RETRY_S_MIN = 0.1

log = structlog.get_logger(__name__)


class Stopped(Exception):
    """Raised inside a request that was stopped before it reached the engine."""


@dataclass(slots=True)
class Caller:
    """Caller of a request: key, time and address. Immutable.

    received_at, deadline (latest time to start): seconds on the monotonic clock. bounds: token
    limits of the key per request. address: None if unknown. trace: the trace that the request
    belongs to. secret_hash: hash of the presented secret. on_admitted: called once the request is
    admitted.
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
    on_admitted: Callable[[], None] = lambda: None

    @classmethod
    def of(
        cls,
        principal: Principal,
        auth_ms: float,
        received_at: float,
        deadline: float | None,
        trace: TraceContext,
    ) -> Caller:
        """Return the caller of a call that carries a single request."""
        visit = VISIT.get()
        return cls(
            payer(principal),
            auth_ms,
            received_at,
            deadline,
            trace=trace,
            bounds=principal.bounds,
            address=principal.address,
            secret_hash=principal.secret_hash,
            on_admitted=(lambda: None) if visit is None else visit.on_admitted,
        )


class LiveRequest:
    """One request: a state machine driven by its client, the hold store, the queue and the engine.

    Each event is a call that never blocks. Work that has to wait (long prompts, engine starts,
    output checks) runs in a task started by `_run`, which ends in the next event.
    """

    def __init__(
        self, caller: Caller, start: ValidStart, process: Process, subscription: Subscription
    ) -> None:
        self.caller = caller
        self.start = start
        self.life = Life(self._on_stop)
        self.place: Place | None = None  # in the queue, once admitted
        self._process = process
        settings = process.admission.settings
        stall_max_s, rate = settings.client_stall_max_s, settings.client_tokens_per_s_min
        flow = FlowControl(
            start.initial_credit_tokens,
            stall_max_s,
            lambda: self.life.stop(
                Outcome.SLOW_CONSUMER, detail=read_too_slowly(rate, stall_max_s)
            ),
            rate,
        )
        self.output: OutputBuffer
        if start.keep_s is None:
            self.output = SendBuffer(subscription, start.model, flow, self.life, self.update)
        else:
            buffer = process.replays.open(caller.payer.organization_id)
            self.output = ReplayableBuffer(
                subscription, start.model, flow, self.life, self.update, start.keep_s, buffer
            )
        self._reply = Reply(self.output, start, self.life, settings)
        self._watch = Stopwatch(caller.received_at, caller.auth_ms)
        self._route: Route | None = None  # once routed
        self._work_s = 0.0  # processor time spent on its prompt, in seconds
        self._request: GenerationRequest | None = None  # once prepared
        self._lease: Lease | None = None  # once it asks for admission
        self._limits: OutputLimits | None = None  # once admitted
        self._sequence: Sequence | None = None  # while an engine runs it
        self._begin_timer: asyncio.TimerHandle | None = None  # until the engine starts on it
        self._charged_token_count = 0  # tokens reported to the queue
        # Up to this total, tokens skip the checks of lease, limit, safety and queue.
        self._free_token_count = 0
        self._first_timings: EngineTimings | None = None  # of the first part of a continued request
        self._migration_count = 0
        self._stalled_s = 0.0  # the client's stall until the engine had finished
        self._engine_outcome: Outcome | None = None  # once the engine has ended it
        self._is_over = False  # no more output is generated
        self._error: Exception | None = None  # refusal or failure
        self.end_cause: Cause | None = None  # once it has ended

    @property
    def routed_model(self) -> str:
        """Canonical model name; empty before routing, since the client's name can be any text."""
        return self.start.model if self._route is not None else ""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Tokens of its prompt; none before it is prepared."""
        return () if self._request is None else self._request.prompt_token_ids

    @property
    def hold_id(self) -> uuid.UUID | None:
        """Id of its hold; None before admission."""
        return self.output.hold_id

    @property
    def usage(self) -> UsageSoFar:
        """Token counts so far."""
        return self.output.usage

    @property
    def tokens_per_second(self) -> float:
        """Delivered tokens per second since the first one; 0 before the second."""
        later_token_count, elapsed_s = (
            self.usage.delivered_token_count - 1,
            self._watch.since_first_token_s,
        )
        return later_token_count / elapsed_s if later_token_count > 0 and elapsed_s > 0 else 0.0

    def ends(self) -> dict[int, Outcome]:
        """Outcome of each choice by index, once generation has ended."""
        ended = (
            self.life.end.outcome
            if self.life.end is not None
            else self._engine_outcome or Outcome.FAILED
        )
        return self._reply.ends_of_choices(ended) or {0: ended}

    @property
    def stops(self) -> Mapping[int, StoppedBy]:
        """The stop of the request that ended a choice, by its index, once generation has ended."""
        return self._reply.stops

    def stop(self, outcome: Outcome, error: Exception | None = None) -> None:
        """Implement `Life.stop`."""
        self.life.stop(outcome, error)

    def _on_stop(self, end: End) -> None:
        self._free_token_count = 0
        # A partial answer cannot be sent whole.
        if end.error is not None and self.output.is_whole:
            self.life.discards = True
        self._reply.stopped()
        if end.error is not None:
            self.output.fail()
        if self._is_over:
            return
        call_soon = asyncio.get_running_loop().call_soon
        if self._sequence is not None:
            self._sequence.cancel()
        elif self.life.state is State.QUEUED:
            call_soon(self._fail, end.error or Stopped())
        elif self._lease is not None and not self._lease.is_held:
            self._lease.abandon()
            call_soon(self._fail, self._error_before_hold(end))

    def update(self, message: pb.UpdateFrame) -> None:
        """Change the limits of the request, and send the client those in force.

        Never raises; the request continues.
        """
        if self.life.end is not None or self._engine_outcome is not None:
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
        """Apply a change of limits.

        Raises: InvalidRequest, NotAdmittedYet; nothing has changed then.
        """
        limits, lease, request, route = self._limits, self._lease, self._request, self._route
        if limits is None or lease is None or request is None or route is None:
            raise NotAdmittedYet(
                "the request is not admitted yet; change its limits after the `admitted` frame"
            )
        if change.max_cost is not None:
            limits.check_currency(change.max_cost, "update.max_cost")
        if change.max_output_tokens is not None:
            check_output_bound(
                self.caller.bounds,
                change.max_output_tokens,
                request.choice_count,
                "update.max_output_tokens",
            )
            check_output_change(request, route.engine.model, change.max_output_tokens)
            lease.allow(change.max_output_tokens)
        limits.change(change)
        self._free_token_count = 0

    # Received and preparing.

    def begin(self) -> None:
        """Prepare the prompt, at once if it is short, and ask for admission.

        Errors are reported to the current subscription.
        """
        process, caller, start = self._process, self.caller, self.start
        process.add(self)
        try:
            self.life.become(State.PREPARING)
            self._route = route = process.router.route(start.model, start.request_id, start.region)
            start.model, tokenizer, tools = (
                route.model,
                process.tokenizers[route.served],
                start.tool_use.tools,
            )
            if tools:
                self._reply.call_reading = call_reading(
                    start.tool_use, tokenizer, start.model, start.choice_count
                )
            admission = process.admission
            asks_first = bool(admission.refused_at) and admission.was_refused(
                caller.payer.api_key_id
            )
            tokenized = None
            if process.safety is None and not asks_first:
                tokenized = tokenize_at_once(tokenizer, start.prompt, tools, start.thinking)
            if tokenized is None:
                window = route.engine.model.context_window_tokens
                work = process.text_work
                job = TextJob(
                    work,
                    caller.payer,
                    tokenizer,
                    window,
                    check_room=self._check_room,
                    asks_first=asks_first,
                )
                self._run(self._prepare(route, job))
            else:
                token_ids, work_s = tokenized
                self._ask(
                    checked_request(
                        start, route, tokenizer, token_ids, caller.payer, caller.bounds
                    ),
                    work_s,
                )
        except Exception as error:
            # After the stream has registered the request.
            asyncio.get_running_loop().call_soon(self._fail, error)

    async def _prepare(self, route: Route, job: TextJob) -> None:
        with Interruptible(self.life, self._error_before_hold):
            request, work_s = await prepared(
                self.start, route, job, self._process.safety, self.caller.bounds
            )
        self._ask(request, work_s)

    async def _check_room(self, least_token_count: int) -> None:
        asked = smallest_admission(self.start, least_token_count, self.caller.payer)
        await self._process.admission.check_room(asked)

    def _ask(self, request: GenerationRequest, work_s: float) -> None:
        """Take a queue entry, then ask for permit and hold.

        In this order a refusal by the queue leaves no trace.
        """
        process, caller, start, route = self._process, self.caller, self.start, self._route
        assert route is not None, "a request is routed before it is prepared"
        self._request, self._work_s = request, work_s
        self._watch.lap(state.TOKENIZE)
        weights = process.admission.settings.queue_weights
        arrival = arrival_of(
            start, request, caller.payer, weights, caller.received_at, caller.deadline
        )
        is_asked = arrival.deadline is not None and not route.engine.healthy()
        engine_wait_s = route.engine.condition().retry_after_s if is_asked else 0.0
        self.place = process.queues[route.served].enter(arrival, engine_wait_s)
        lease = Lease(
            process.admission, admission_request(start, request, caller.payer), self.output.usage
        )
        lease.ask(self._admitted)
        self._lease = lease

    # Admitted and queued.

    def _admitted(self, refusal: Exception | None) -> None:
        """Handle the answer to the admission. refusal: None if the request is admitted."""
        if refusal is not None:
            self._fail(refusal)
            return
        try:
            self.life.become(State.ADMITTED)
            self._watch.lap(state.ADMISSION)
            process, start, request, lease, route = (
                self._process,
                self.start,
                self._request,
                self._lease,
                self._route,
            )
            assert request is not None, "a request is prepared before it is admitted"
            assert lease is not None
            assert route is not None
            self._limits = limits = OutputLimits(
                lease.admitted.prices, request.stop.max_output_tokens, start.max_cost
            )
            self._reply.open(lease, limits, process.safety, self._run, self._wind_up)
            limits.check_input(len(request.prompt_token_ids))
            self.output.fence = self._may_send
            predicted = route.engine.predict_cached_token_count(
                request.prompt_token_ids, request.cache_salt
            )
            bounded = is_bounded(self.caller.bounds, start.stop.max_output_tokens, request)
            self.caller.on_admitted()
            self.output.push(
                frames.admitted(lease.admitted, request, predicted, limited_by_key=bounded)
            )
            if start.start_timeout_s is not None:
                loop = asyncio.get_running_loop()
                left_s = self.caller.received_at + start.start_timeout_s - time.monotonic()
                self._begin_timer = loop.call_later(left_s, self._stop_unless_begun)
            self._go_on()
        except Exception as error:
            self._fail(error)

    def _stop_unless_begun(self) -> None:
        """End the request as `DEADLINE` if the engine has not started on it in time."""
        if not self.usage.input_token_count:
            self.life.stop(Outcome.DEADLINE)

    def _go_on(self) -> None:
        """Take the next step: wait for the engine to load, wait for the turn, or submit the
        sequence."""
        place, route, request, lease = self.place, self._route, self._request, self._lease
        if (
            self._is_over
            or self.life.end is not None
            or place is None
            or route is None
            or request is None
            or lease is None
        ):
            return
        try:
            if not route.engine.healthy():
                self.life.become(State.LOADING)
                self.tell_progress(None)
                self._run(self._load(route.engine))
                return
            if not place.has_turn:
                self.life.become(State.QUEUED)
                if not place.join(partial(asyncio.get_running_loop().call_soon, self._go_on)):
                    return
            if self._first_timings is None:
                self._watch.lap(state.QUEUE)
            # This process may have been suspended meanwhile; the engine must not work without a
            # hold.
            if (lapse := lease.lapse()) is not None:
                raise lapse
            request.rank = place.rank
            self._sequence = route.engine.submit(request, self.take)
        except Exception as error:
            self._fail(error)

    async def _load(self, engine: Engine) -> None:
        """Wait until the engine accepts requests."""
        with Interruptible(self.life, lambda end: end.error or Stopped()):
            await wait_until_ready(
                engine, self.start.model, self._process.admission.settings.cold_start_wait_s
            )
        self._watch.lap(state.COLD_START)
        self.life.become(State.QUEUED)
        self._go_on()

    # Running.

    def take(self, event: SequenceEvent | EngineError) -> None:
        """Handle an event of the sequence. Called by the engine."""
        if self._is_over:
            return
        try:
            if isinstance(event, TokensGenerated):
                output, token_ids = self.output, event.token_ids
                count = len(token_ids)
                output.usage.generated_token_count += count
                if output.appended_token_count + count <= self._free_token_count and not (
                    event.logprobs or event.prompt_logprobs
                ):
                    if event.reasoning_token_count:
                        thought = event.reasoning, event.reasoning_token_count
                        output.append(event.choice_index, event.text, token_ids, (), (), thought)
                    else:
                        output.append(event.choice_index, event.text, token_ids)
                    return
                self._watch.first_token()
                self._charge()
                self._reply.take(event)
                self._free_token_count = min(
                    self._reply.free_token_count, output.appended_token_count + TOKENS_PER_CHARGE
                )
            elif isinstance(event, Scheduled):
                self._begun(event)
            elif isinstance(event, SequenceFinished):
                self._generated(event)
            else:
                self._reply.take(event)
        except Exception as error:
            self._fail(error)

    def _begun(self, event: Scheduled) -> None:
        """Handle that the engine has started on the sequence."""
        place, request, limits, usage = self.place, self._request, self._limits, self.output.usage
        assert place is not None
        assert request is not None
        assert limits is not None
        self.life.become(State.RUNNING)
        if self._first_timings is not None:  # another engine continues it
            return
        place.begun()
        usage.input_token_count = len(request.prompt_token_ids)
        usage.cached_input_token_count = event.cached_token_count
        usage.is_cached_final = event.is_final
        limits.begun(usage.input_token_count, event.cached_token_count if event.is_final else None)

    def _charge(self) -> None:
        """Report generated tokens to the queue."""
        count = self.output.usage.generated_token_count - self._charged_token_count
        if count > 0 and self.place is not None:
            self._charged_token_count += count
            self.place.generated(count)

    def _generated(self, event: SequenceFinished) -> None:
        """Handle the end of the sequence.

        Continue it if the client has raised the limit meanwhile.
        """
        limits, request, sequence = self._limits, self._request, self._sequence
        assert limits is not None
        assert request is not None
        assert sequence is not None
        usage = self.output.usage
        usage.generated_token_count = event.generated_token_count
        if not usage.is_cached_final and self._first_timings is None:
            self._take_cached(event.cached_token_count)
        if event.migration_count:
            self._migration_count += event.migration_count
            log.info(
                "request_migrated",
                request_id=str(self.start.request_id),
                migration_count=event.migration_count,
            )
        timings = self._first_timings or event.timings
        if event.reason is EngineFinishReason.LENGTH and limits.is_raised and self.life.end is None:
            # Text held back is not sent: the engine that continues reads the same tokens and holds
            # it back again.
            self._first_timings = timings
            limits.engine_token_count_max = limits.asked_token_count_max
            stop = replace(request.stop, max_output_tokens=limits.engine_token_count_max)
            self._request = replace(request, stop=stop, output_token_ids=tuple(sequence.outputs[0]))
            sequence.close()
            self._sequence = None
            self._go_on()
            return
        self._engine_outcome = OUTCOMES[event.reason]
        self._watch.engine_finished(timings)
        self._stalled_s = self.output.stalled_s
        self._reply.take(event)

    def _take_cached(self, cached_token_count: int) -> None:
        """Take the final number of cached prompt tokens, which the journal must have, too."""
        usage = self.output.usage
        usage.is_cached_final = True
        if usage.cached_input_token_count != cached_token_count:
            usage.cached_input_token_count = cached_token_count
            if usage.journalled_token_count:
                with contextlib.suppress(JournalUnavailable):  # seen again with the next tokens
                    self._process.admission.journal.record([self.output.entry(0)])

    def end_if_lapsed(self) -> None:
        """End the request if its hold has lapsed."""
        if (
            self._lease is not None
            and not self._is_over
            and (lapse := self._lease.lapse()) is not None
        ):
            self.stop(Outcome.FAILED, lapse)

    def _may_send(self) -> bool:
        """Return whether tokens may be delivered; if not, end all requests with a lapsed hold."""
        if self._lease is None or self._lease.lapse() is None:
            return True
        if self.life.end is None:
            self._process.end_lapsed()
        return False

    def tell_progress(self, outlook: Outlook | None) -> None:
        """Send a progress frame if the request waits.

        outlook: None if the engine has it already.
        """
        if self.life.state is State.LOADING and self._route is not None:
            condition = self._route.engine.condition()
            if condition.state is not EngineState.READY:
                self.output.push(frames.loading(condition))
        elif self.life.state is State.QUEUED:
            position, wait_s = (
                (outlook.position, outlook.wait_s) if outlook is not None else (0, None)
            )
            self.output.push(frames.queued(position, wait_s))

    # Background work, and the end of the request.

    def _run(self, work: Coroutine[None, None, None]) -> None:
        tasks: asyncio.TaskGroup = self._process.tasks
        tasks.create_task(self._contained(work), name=f"request {self.start.given_id}")

    async def _contained(self, work: Coroutine[None, None, None]) -> None:
        # Binds in the context of this task only, so it is never unbound.
        structlog.contextvars.bind_contextvars(request_id=str(self.start.request_id))
        try:
            await work
        except asyncio.CancelledError:
            self._fail(
                Draining("this server is shutting down; retry the request on another server")
            )
            raise
        except Exception as error:
            self._fail(error)

    @staticmethod
    def _error_before_hold(end: End) -> Exception:
        """Return the error of a request that was stopped before it had its hold."""
        if end.error is not None:
            return end.error
        if end.outcome is Outcome.DEADLINE:
            return DeadlineBeforeStart("the deadline passed before the request was admitted")
        return CancelledEarly("the request was cancelled before it was admitted")

    def _fail(self, error: Exception) -> None:
        """End the request with an error: a refusal, a failure, or `Stopped`."""
        if self._is_over:
            return
        if not isinstance(error, Stopped):
            self._error = error
        if self._lease is None or not self._lease.is_held:
            self._is_over = True
            self._end()
            return
        if self._error is not None and self.output.is_whole:
            self._reply.discard()
        self._wind_up()

    def _wind_up(self) -> None:
        """Stop generating, and settle the hold once the client has received the waiting output."""
        if self._is_over:
            return
        self._is_over = True
        if self._begin_timer is not None:
            self._begin_timer.cancel()
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            sequence.close()
        self._charge()
        if self.place is not None:
            self.place.leave()  # the engine is free again; settlement does not hold up the queue
        # On every path: output delivered after the settlement would not be billed.
        self._reply.flush(self._settle)

    def _timings(self) -> dict[str, float]:
        """Return the times so far, with the pace of the tokens, as in `weir.v1.Timings`."""
        timings, start = self._watch.timings(), self.start
        if start.beam_search is None:
            timings |= self.output.gaps.facts()
        later_token_count = self.usage.generated_token_count - start.choice_count
        if later_token_count > 0 and timings["decode_ms"]:
            timings["tokens_per_second"] = later_token_count / timings["decode_ms"] * 1000
        return timings

    def _settle(self) -> None:
        end, error, lease = self.life.end, self._error, self._lease
        assert lease is not None, "only admitted requests are settled"
        outcome, timings = self._engine_outcome if end is None else end.outcome, None
        stalled_s = self.output.stalled_s
        self._watch.handed_on(stalled_s, stalled_s - self._stalled_s)
        if error is None and end is not None and end.error is not None:
            error = end.error
            if outcome is Outcome.FAILED:  # failed; a stopped request keeps the outcome of its stop
                outcome = None
        elif error is not None:
            outcome = None
        elif outcome is Outcome.CANCELLED and end is None:
            error, outcome = EngineFailed("the engine was closed while the request ran"), None
        else:
            timings = self._timings()
        self._error = error
        self.life.become(State.SETTLING)
        lease.end(outcome, error, self._end, timings, self._migration_count)

    def _end(self, settle_error: Exception | None = None) -> None:
        """Report the end to the client and to operators.

        settle_error: why ending the hold failed, or None.
        """
        process, lease = self._process, self._lease
        broken = self._error = settle_error or self._error
        held = lease if lease is not None and lease.is_held else None
        if held is not None:
            self._watch.lap(state.SETTLE)
        settled = held.settled if held is not None else None
        end: pb.ServerFrame | None = None
        timings = self._timings()
        try:
            if isinstance(broken, RequestSettled):
                end = frames.failed(status_of(broken), broken.settled)
            elif isinstance(broken, RequestInFlight) and process.receive_elsewhere(self):
                broken = None
            elif broken is not None:
                if isinstance(broken, EngineFailed):  # logged where it is raised
                    broken = self._engine_loss(settled)
                end = frames.failed(status_of(broken), settled)
            elif held is not None:
                ends = self._reply.ends_of_choices(
                    self.life.end.outcome if self.life.end is not None else Outcome.CANCELLED
                )
                reply = self._reply
                end = frames.finished(
                    held,
                    timings,
                    reply.exhausted,
                    ends,
                    self._migration_count,
                    reply.called_choices,
                    self.life.end.detail if self.life.end is not None else "",
                    reply.stops,
                )
        finally:
            if self.place is not None:
                self.place.leave()
                self.place.on_turn = None
            if held is None:
                process.pace.spent(self.caller.payer, self._work_s)
            self.end_cause = cause_of(held.outcome if held is not None else None, broken)
            process.generated(self, can_be_received=settled is not None)
            self.output.end(end)
            if end is not None:
                start = self.start
                process.observer.ended(
                    Ending(
                        self.caller,
                        start,
                        held.outcome if held is not None else None,
                        broken,
                        timings,
                        settled,
                        None if start.beam_search is not None else self.output.gaps,
                        self._migration_count,
                    )
                )
            # Break reference cycles, which would wait for a garbage collection, which stops all
            # streams.
            self._reply.close()
            self.life.over()
            self._error = broken = None

    def _engine_loss(self, settled: Settled | None) -> EngineLost | EngineLostMidway:
        """Return the error for a lost engine.

        The class depends on whether tokens are billed, which decides the request id of a retry.
        """
        if settled is not None:
            return EngineLostMidway(settled.delivered_token_count)
        assert self._route is not None, "a lost engine was chosen before"
        return EngineLost(max(self._route.engine.condition().retry_after_s, RETRY_S_MIN))


def begin(
    process: Process,
    caller: Caller,
    start: ValidStart,
    subscription: Subscription,
    running: LiveRequest | None = None,
) -> LiveRequest:
    """Start a request, or receive the running one that `start` names again from its first token.

    running: by `Process.same_request`. The end of a new request is reported in a later turn of the
    loop. Raises: OutputGone and RequestInFlight, only for a running one.
    """
    subscription.payload_hash = start.payload_hash
    if running is not None:
        running.output.attach(subscription, 0, start.initial_credit_tokens or 0)
        return running
    request = LiveRequest(caller, start, process, subscription)
    request.begin()
    return request


def check_output_change(
    request: GenerationRequest, model: ModelInfo, max_output_tokens: int
) -> None:
    """Raise InvalidRequest if a running request cannot have this many output tokens in total."""
    wrong, room = "", model.context_window_tokens - len(request.prompt_token_ids)
    if request.choice_count > 1 or request.beam_search is not None:
        wrong = "cannot be changed for several choices or beam search"
    elif max_output_tokens > room:
        wrong = f"must be at most {room} in this context window, got {max_output_tokens}"
    elif max_output_tokens > request.stop.max_output_tokens and not model.can_continue(request):
        why = "by the engine of this model"
        if request.response_format is not None:
            why = "with a response format"
        elif model.continues_output:
            why += " with a seed or penalties"
        wrong = f"cannot be raised above {request.stop.max_output_tokens} {why}"
    if wrong:
        raise InvalidRequest([FieldViolation("update.max_output_tokens", wrong)])


async def wait_until_ready(backend: Backend, model: str, wait_s: float) -> None:
    """Start a backend, and return once it accepts requests. model: name for error messages.

    Raises: EngineStartFailed, EngineUnavailable.
    """
    try:
        async with asyncio.timeout(wait_s):
            await backend.start()
    except TimeoutError:
        condition = backend.condition()
        raise EngineStartFailed(
            f"the engine of model {model!r} is still not ready:"
            f" {condition.told or condition.reason or condition.state.value}",
            max(condition.retry_after_s, RETRY_S_MIN),
        ) from None
