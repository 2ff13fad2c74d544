"""One generate request, from its start frame to its settlement.

A request does not belong to the stream that started it. If that stream closes, the request is
stopped, or continues unattended if the client asked for that; other streams may attach to it. It
ends and settles by itself, and no cancellation can interrupt that.

It is a state machine whose phases (`phases.py`) carry what exists in them. An event is one method:

                begin      _ask    _answered  _proceed   take       output_  _settle   _settled
                                                                    ended
    Received    Preparing
    Preparing              Asking
    Asking                         Queued
    Queued                                    Loading,
                                              Submitted
    Loading                                   Queued (`_load`)
    Submitted                                            Running,
                                                         Generated
    Running                                   Running,   Running,
                                              Loading    Generated
    Generated                                                       Flushing
    Flushing                                                                 Settling
    Settling                                                                           Ended

`_fail` leads from the first three to `Ended`, or to `begin` with another model, and from the next
five to `Flushing`; later it has no effect. A stop (`_on_stop`) interrupts the task of `Preparing`
and of `Loading`, abandons the hold of `Asking`, and cancels the sequence, whose last event then
ends the request. `update` and `report_progress` change no phase.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import structlog
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import ApiError, Cause, Draining, NotAdmittedYet
from api.core.statuses import status_of
from api.core.wire import OUTCOMES_BY_REASON
from api.generation import state
from api.generation.delivery import frames
from api.generation.delivery.output_buffer import (
    FlowControl,
    OutputBuffer,
    SendBuffer,
    end_slow_reader,
)
from api.generation.delivery.replayable_buffer import ReplayableBuffer
from api.generation.delivery.stream_writer import Subscription
from api.generation.endings import cause_of
from api.generation.parsing.start_frame import ValidStart
from api.generation.parsing.tokenizing import TextJob, tokenize_at_once
from api.generation.parsing.tools import call_reading
from api.generation.request.admission import HoldHandle
from api.generation.request.caller import Caller
from api.generation.request.fallback import (
    CAUSES,
    OF_ONE_MODEL,
    FallbackSearch,
    can_take,
    is_bound,
)
from api.generation.request.limits import OutputLimits, parse_update
from api.generation.request.output_processor import OutputProcessor
from api.generation.request.phases import (
    AdmittedGeneration,
    Asking,
    Ended,
    Flushing,
    Generated,
    Held,
    Loading,
    Preparing,
    Queued,
    Received,
    Running,
    Sequenced,
    Settling,
    Submitted,
)
from api.generation.request.preparation import (
    admission_request,
    arrival_of,
    check_change,
    check_room,
    checked_request,
    is_bounded,
    max_output_token_count,
    prepared,
)
from api.generation.request.readiness import (
    RETRY_S_MIN,
    engine_lost,
    interrupted,
    wait_until_ready,
)
from api.generation.request.registry import RequestRegistry
from api.generation.state import (
    End,
    EndDecision,
    Interruptible,
    Stopped,
    Stopwatch,
    error_before_hold,
)
from api.observability.observer import Ending
from api.queue.fair_queue import ExpectedWait
from inference.engine import (
    EngineFinishReason,
    EngineState,
    GenerationRequest,
    Scheduled,
    SequenceEvent,
    SequenceFinished,
    StoppedBy,
    TokensGenerated,
)
from inference.errors import EngineError, EngineFailed, RequestImpossible
from inference.routing.router import Route
from metering.core.errors import JournalUnavailable, RequestInFlight
from metering.core.models import Outcome
from metering.holds.operations import RequestSettled, Settled

# The queue orders tenants by generated tokens; a few more or less do not change the order.
TOKENS_PER_CHARGE = 8
RECEIVED = Received()

log = structlog.get_logger(__name__)

GenerationPhase = (
    Received
    | Preparing[Route]
    | Asking
    | Loading[AdmittedGeneration]
    | Queued[AdmittedGeneration]
    | Submitted
    | Running
    | Generated
    | Flushing
    | Settling[AdmittedGeneration]
    | Ended
)


class LiveRequest:
    """State machine of one request, driven by its client, the hold store, the queue and the engine.

    Each event is a call that never blocks. Work that has to wait (long prompts, engine starts,
    output checks) runs in a task started by `run`, which ends with the next event.

    `usage` has the token counts so far, and `stops` the stop sequence or token of the request that
    ended a choice, by its index.
    """

    stops: Mapping[int, StoppedBy] = MappingProxyType({})
    _search: FallbackSearch | None = None  # once the requested model cannot take the request

    def __init__(
        self,
        caller: Caller,
        start: ValidStart,
        registry: RequestRegistry,
        subscription: Subscription,
    ) -> None:
        """`subscription` is that of the stream which starts the request. It is begun later."""
        subscription.payload_hash = start.payload_hash
        self.caller = caller
        self.start = start
        self.phase: GenerationPhase = RECEIVED
        self.decision = decision = EndDecision(self._on_stop)
        delivery = registry.settings.delivery
        flow = FlowControl(
            start.initial_credit_tokens,
            delivery.stall_max_s,
            partial(end_slow_reader, decision, delivery.tokens_per_s_min, delivery.stall_max_s),
            delivery.tokens_per_s_min,
        )
        self.output: OutputBuffer
        if start.keep_s is None:
            self.output = SendBuffer(subscription, start.model, flow, decision, self.update)
        else:
            buffer = registry.replays.open(caller.payer.organization_id)
            self.output = ReplayableBuffer(
                subscription, start.model, flow, decision, self.update, start.keep_s, buffer
            )
        self.output.end_user = start.end_user
        self.usage = self.output.usage
        self.watch = Stopwatch(caller.received_at, caller.auth_ms)
        self._registry = registry
        # Up to this total, tokens skip the checks of the processor, and the report to the queue.
        self._unchecked_until = 0

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt; empty unless the request is admitted and has not ended."""
        phase = self.phase
        return phase.admitted.request.prompt_token_ids if isinstance(phase, Held) else ()

    def ends(self) -> Mapping[int, Outcome]:
        """Return each choice's outcome once generation has ended; empty after a failure."""
        phase = self.phase
        if isinstance(phase, Flushing):
            end = self.decision.end
            outcome = end.outcome if end else phase.result
            if isinstance(outcome, Exception):
                return {}
            return phase.admitted.processor.ends_of_choices(outcome) or {0: outcome}
        return phase.ends if isinstance(phase, Ended) else {}

    # Stops and changes, in any phase.

    def stop(self, outcome: Outcome, error: Exception | None = None) -> None:
        """Implement `EndDecision.stop`."""
        self.decision.stop(outcome, error)

    def _on_stop(self, end: End) -> None:
        self._unchecked_until = 0
        phase, decision = self.phase, self.decision
        has_failed = end.error is not None
        # A partial answer cannot be sent whole.
        if has_failed and self.output.is_whole:
            decision.discards = True
        if isinstance(phase, Held):
            phase.admitted.processor.stopped()
        elif decision.discards:
            self.output.discard()
        if has_failed:
            self.output.fail()
        call_soon = asyncio.get_running_loop().call_soon
        if isinstance(phase, Sequenced):
            phase.sequence.cancel()  # its last event ends the request
        elif isinstance(phase, Queued):
            call_soon(self._fail, end.error or Stopped())
        elif isinstance(phase, Asking):
            phase.hold.abandon()
            call_soon(self._fail, error_before_hold(end))
        # In `Loading` and `Preparing` nothing: `EndDecision.stop` cancels the task inside its
        # `Interruptible`, which raises the error that ends the request.

    def update(self, message: pb.UpdateFrame) -> None:
        """Change the limits of the request, and send the client the limits in force.

        Never raises: an invalid change is answered with a refusal, and the request continues.
        """
        phase = self.phase
        if self.decision.is_stopped or phase.is_over or isinstance(phase, Generated):
            return
        refusal = None
        try:
            change = parse_update(message)
            if not isinstance(phase, Held):
                raise NotAdmittedYet(
                    "Your request is not admitted yet. Change its limits after the `admitted`"
                    " frame."
                )
            admitted = phase.admitted
            check_change(
                change,
                admitted.limits,
                admitted.request,
                admitted.route.engine.model,
                self.caller.bounds,
            )
            admitted.hold.allow(change.max_output_tokens or 0)
            admitted.limits.change(change)
            self._unchecked_until = 0
        except ApiError as error:
            refusal = status_of(error)
        if isinstance(phase, Held):
            self.output.push(frames.updated(phase.admitted.limits, refusal))
            phase.admitted.processor.end_at_limit()
        else:
            self.output.push(frames.updated(None, refusal))

    def end_if_lapsed(self) -> None:
        """End the request if its hold has lapsed."""
        phase = self.phase
        if isinstance(phase, Held) and not phase.is_over and (lapse := phase.admitted.hold.lapse()):
            self.stop(Outcome.FAILED, lapse)

    def report_progress(self, outlook: ExpectedWait | None) -> None:
        """Send a progress frame if the request is waiting.

        `outlook` is its expected wait in the queue; None if the engine already has the request.
        """
        phase = self.phase
        if isinstance(phase, Loading):
            condition = phase.admitted.route.reach.condition()
            if condition.state is not EngineState.READY:
                self.output.push(frames.loading(condition))
        elif isinstance(phase, Queued | Submitted):
            position, wait_s = (outlook.position, outlook.wait_s) if outlook else (0, None)
            self.output.push(frames.queued(position, wait_s))

    # Received, preparing and asking.

    def begin(self, model: str = "") -> None:
        """Prepare the prompt, at once if it is short, and ask for admission.

        `model` is tried instead of the requested one. Errors go to the current subscription as the
        last frame. The request never ends in this call, but in a later turn of the loop.
        """
        registry, caller, start = self._registry, self.caller, self.start
        registry.add(self)
        try:
            bound = ""
            if caller.region or registry.bindings:
                bound = registry.bound_region_of(caller, start)
            route = registry.router.route(
                model or start.model, start.request_id, start.region, bound
            )
            start.model, tokenizer = route.model, registry.tokenizers[route.served]
            preparing = Preparing(route)
            self.phase = preparing
            if route.fallback and not model and not can_take(route.reach):
                condition = route.reach.condition()
                raise condition.fault(max(condition.retry_after_s, RETRY_S_MIN))
            tools = start.tool_use.tools
            if tools:
                preparing.call_reading = call_reading(
                    start.tool_use, tokenizer, start.model, start.choice_count
                )
            admission = registry.admission
            asks_first = bool(admission.refused_at) and admission.was_refused(
                caller.payer.api_key_id
            )
            tokenized = None
            if registry.safety is None and not asks_first:
                tokenized = tokenize_at_once(tokenizer, start.prompt, tools, start.thinking)
            if tokenized is None:
                job = TextJob(
                    registry.text_work,
                    caller.payer,
                    tokenizer,
                    route.engine.model.context_window_tokens,
                    check_room=partial(check_room, admission, start, caller.payer),
                    asks_first=asks_first,
                )
                self.run(self._prepare(preparing, job))
            else:
                token_ids, preparing.work_s = tokenized
                request = checked_request(
                    start, route, tokenizer, token_ids, caller.payer, caller.bounds
                )
                self._ask(preparing, request)
        except Exception as error:
            # After the stream has registered the request.
            asyncio.get_running_loop().call_soon(self._fail, error)

    async def _prepare(self, preparing: Preparing[Route], job: TextJob) -> None:
        with Interruptible(self.decision, error_before_hold):
            request, preparing.work_s = await prepared(
                self.start, preparing.route, job, self._registry.safety, self.caller.bounds
            )
        self._ask(preparing, request)

    def _ask(self, preparing: Preparing[Route], request: GenerationRequest) -> None:
        """Enter the queue, then ask for permit and hold: so its refusal leaves no trace."""
        registry, caller, route = self._registry, self.caller, preparing.route
        self.watch.lap(state.TOKENIZE)
        arrival = arrival_of(
            self.start,
            request,
            caller.payer,
            registry.weights,
            caller.received_at,
            caller.deadline,
        )
        is_requested = arrival.deadline is not None and not route.reach.healthy()
        engine_wait_s = route.reach.condition().retry_after_s if is_requested else 0.0
        op = admission_request(self.start, request, caller.payer, registry.settings.leases)
        asking = Asking(
            route,
            preparing.call_reading,
            preparing.work_s,
            request=request,
            entry=registry.queue_of[route.engine].enter(arrival, engine_wait_s),
            hold=HoldHandle(
                registry.admission, op, self.output.usage, max_output_token_count(request)
            ),
        )
        self.phase = asking
        asking.hold.ask(partial(self._answered, asking))

    def _answered(self, asking: Asking, refusal: Exception | None) -> None:
        """Handle the result of the admission. `refusal` is None if the request is admitted."""
        if refusal is not None:
            self._fail(refusal)
            return
        request, route, hold, start = asking.request, asking.route, asking.hold, self.start
        limits = OutputLimits(hold.admitted.prices, request.stop.max_output_tokens, start.max_cost)
        registry, output = self._registry, self.output
        processor = OutputProcessor(
            self, hold, limits, asking.call_reading, registry.settings.delivery
        )
        admitted = AdmittedGeneration(hold, asking.entry, route, request, limits, processor)
        self.phase, self.stops = Queued(admitted), processor.stops
        try:
            self.watch.lap(state.ADMISSION)
            processor.open(registry.safety)
            limits.check_input(len(request.prompt_token_ids))
            output.fence = self._may_send
            request.is_whole = output.is_whole and not processor.needs_steps
            predicted = route.engine.predict_cached_token_count(
                request.prompt_token_ids, request.cache_salt
            )
            bounded = is_bounded(self.caller.bounds, start.stop.max_output_tokens, request)
            self.caller.on_admitted()
            if start.requested_model and self._search is not None:
                output.model = start.model
                self._search.found(self.caller, start)
            models = start.model, start.requested_model
            output.push(
                frames.admitted(hold.admitted, request, predicted, *models, limited_by_key=bounded)
            )
            if start.start_timeout_s is not None:
                loop = asyncio.get_running_loop()
                left_s = self.caller.received_at + start.start_timeout_s - time.monotonic()
                admitted.begin_timer = loop.call_later(left_s, self._stop_unless_begun)
            self._proceed(admitted)
        except Exception as error:
            self._fail(error)

    # Fallback to another model.

    def _tries_another(self, phase: Preparing[Route], error: Exception) -> bool:
        """Try the next model that may take the request after this refusal, if there is one.

        Returns False if the refusal is to be answered. If no model takes the request, the answer is
        what the requested one refused it with.
        """
        registry, caller, start, search = self._registry, self.caller, self.start, self._search
        if self.decision.is_stopped:
            return False
        if search is None:
            fallback = phase.route.fallback
            if not (fallback and isinstance(error, CAUSES)):
                return False
            queue = registry.queue_of[phase.route.engine]
            names = () if is_bound(start) else fallback
            search = FallbackSearch(self.output.model, start.model, queue, names, error)
            self._search = search
        elif not isinstance(error, OF_ONE_MODEL):
            return False
        bound = phase.route.regions[0] if phase.route.is_bound else ""
        name = search.next_name(registry.router, caller, start, bound)
        is_requested = name in ("", search.requested)
        start.requested_model = "" if is_requested else search.model
        if not name:
            start.model = search.model
            self._refused(search.answer(error))
            return True
        if isinstance(phase, Asking):
            phase.entry.leave()
        registry.pace.charge(caller.payer, phase.work_s)
        self.begin(name)
        return True

    # Waiting.

    def _stop_unless_begun(self) -> None:
        """End the request with `DEADLINE` if no engine has started on it."""
        if not self.usage.input_token_count:
            self.decision.stop(Outcome.DEADLINE)

    def _proceed(self, admitted: AdmittedGeneration) -> None:
        """Take the next step: wait for the engine or for dispatch, or submit the sequence."""
        phase, route, entry = self.phase, admitted.route, admitted.entry
        if phase.is_over or self.decision.is_stopped:
            return
        try:
            if not route.reach.healthy():
                self.phase = Loading(admitted)
                self.report_progress(None)
                self.run(self._load(admitted))
                return
            if not (entry.is_dispatched or entry.join(partial(self._dispatched, admitted))):
                return
            if not admitted.part_timings:
                self.watch.lap(state.QUEUE)
            # This process may have been suspended meanwhile; the engine must not work without a
            # hold.
            if (lapse := admitted.hold.lapse()) is not None:
                raise lapse
            admitted.request.rank = entry.rank
            sequence = route.engine.submit(admitted.request, self.take)
            kind = Running if isinstance(phase, Running) else Submitted
            self.phase = kind(admitted, sequence)
        except Exception as error:
            self._fail(error)

    def _dispatched(self, admitted: AdmittedGeneration) -> None:
        """Proceed in a later turn of the loop: the queue must not be used in this one."""
        asyncio.get_running_loop().call_soon(self._proceed, admitted)

    async def _load(self, admitted: AdmittedGeneration) -> None:
        """Wait until the engine is ready, then proceed."""
        with Interruptible(self.decision, lambda end: end.error or Stopped()):
            await wait_until_ready(
                admitted.route.reach,
                self.start.model,
                self._registry.cold_start_wait_s,
            )
        self.watch.lap(state.COLD_START)
        self.phase = Queued(admitted)
        self._proceed(admitted)

    # Running.

    def take(self, event: SequenceEvent | EngineError) -> None:
        """Handle an event of the sequence, or its failure. Called by the engine."""
        try:
            if isinstance(event, TokensGenerated):
                output, token_ids = self.output, event.token_ids
                token_count = output.appended_token_count + len(token_ids)
                if token_count <= self._unchecked_until:
                    output.usage.generated_token_count += len(token_ids)
                    if event.reasoning_token_count:
                        thought = event.reasoning, event.reasoning_token_count
                        output.append(event.choice_index, event.text, token_ids, (), (), thought)
                    else:
                        output.append(event.choice_index, event.text, token_ids)
                    return
                phase = self.phase
                if isinstance(phase, Sequenced):
                    self._take_checked(phase.admitted, event)
                return
            phase = self.phase
            if not isinstance(phase, Sequenced):
                return
            admitted = phase.admitted
            if isinstance(event, Scheduled):
                self.phase = Running(admitted, phase.sequence)
                if not admitted.part_timings:  # else a later part, after a raised limit
                    admitted.entry.begun()
                    self.usage.begun(
                        len(admitted.request.prompt_token_ids),
                        event.cached_token_count,
                        is_final=event.is_final,
                    )
                    admitted.limits.begun(
                        self.usage.input_token_count,
                        event.cached_token_count if event.is_final else None,
                    )
            elif isinstance(event, SequenceFinished):
                self._generated(phase, event)
            elif isinstance(event, RequestImpossible) and event.is_unstarted:
                self.output.usage.input_token_count = 0
                admitted.processor.take(event)
            else:
                admitted.processor.take(event)
        except Exception as error:
            self._fail(error)

    def _take_checked(self, admitted: AdmittedGeneration, event: TokensGenerated) -> None:
        """Append the first tokens, and some later ones, after the checks of the processor."""
        output, processor, entry = self.output, admitted.processor, admitted.entry
        usage, token_ids = output.usage, event.token_ids
        usage.generated_token_count += len(token_ids)
        self.watch.first_token()
        if (count := usage.generated_token_count - entry.generated_token_count) > 0:
            entry.generated(count)
        unchecked_until = processor.unchecked_until
        if (
            output.appended_token_count + len(token_ids) <= unchecked_until
            and not event.reasoning_token_count
        ):
            output.append(event.choice_index, event.text, token_ids)
        else:
            processor.take(event)
            unchecked_until = processor.unchecked_until
        self._unchecked_until = min(
            unchecked_until, output.appended_token_count + TOKENS_PER_CHARGE
        )

    def _generated(self, phase: Sequenced, event: SequenceFinished) -> None:
        """Handle the end of the sequence; continue it if the client has raised the limit."""
        admitted, sequence = phase.admitted, phase.sequence
        limits, request, usage = admitted.limits, admitted.request, self.output.usage
        usage.generated_token_count = event.generated_token_count
        if not usage.is_cached_final and not admitted.part_timings:
            self._take_cached(event.cached_token_count)
        if event.migration_count:
            admitted.migration_count += event.migration_count
            log.info(
                "request_migrated",
                request_id=str(self.start.request_id),
                migration_count=event.migration_count,
            )
        admitted.part_timings.append(event.timings)
        is_raised = limits.requested_token_count_max > limits.engine_token_count_max
        came_together = admitted.request.is_whole and not event.timings.decode_ms
        if came_together and event.generated_token_count > 1:
            self.watch.forget_first_token()
        is_cut = event.reason is EngineFinishReason.LENGTH
        if is_cut and is_raised and not self.decision.is_stopped:
            # Text held back is not sent: the engine that continues reads the same tokens and holds
            # it back again.
            limits.engine_token_count_max = limits.requested_token_count_max
            stop = replace(request.stop, max_output_tokens=limits.engine_token_count_max)
            admitted.request = replace(
                request, stop=stop, output_token_ids=tuple(sequence.outputs[0])
            )
            sequence.close()
            self._proceed(admitted)
            return
        # The client sees one queue and one prefill: those of the first part.
        self.watch.engine_finished(admitted.part_timings[0])
        self.phase = Generated(
            admitted, sequence, OUTCOMES_BY_REASON[event.reason], self.output.stalled_s
        )
        admitted.processor.take(event)

    def _take_cached(self, cached_token_count: int) -> None:
        """Record the final number of cached prompt tokens, also in the journal."""
        usage = self.output.usage
        usage.is_cached_final = True
        if usage.cached_input_token_count != cached_token_count:
            usage.cached_input_token_count = cached_token_count
            if usage.journalled_token_count:
                with contextlib.suppress(JournalUnavailable):  # seen again with the next tokens
                    self._registry.admission.journal.record([self.output.entry(0)])

    def _may_send(self) -> bool:
        """Return whether tokens may be delivered; if not, end all requests with a lapsed hold."""
        phase = self.phase
        if not isinstance(phase, Held) or phase.admitted.hold.lapse() is None:
            return True
        if not self.decision.is_stopped:
            self._registry.end_lapsed()
        return False

    # Background work, and the end of the request.

    def run(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine as a task of the process. An error of the coroutine ends the request."""
        tasks: asyncio.TaskGroup = self._registry.tasks
        tasks.create_task(self._contained(work), name=f"request {self.start.given_id}")

    async def _contained(self, work: Coroutine[None, None, None]) -> None:
        # Binds in the context of this task only, so it is never unbound.
        structlog.contextvars.bind_contextvars(request_id=str(self.start.request_id))
        try:
            await work
        except asyncio.CancelledError:
            self._fail(Draining())
            raise
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the request with an error: a refusal, a failure, or `Stopped`."""
        phase = self.phase
        if phase.is_over:
            return
        if not isinstance(phase, Held):
            if not (isinstance(phase, Preparing) and self._tries_another(phase, error)):
                self._refused(error)
            return
        if self.output.is_whole and not isinstance(error, Stopped):
            phase.admitted.processor.discard()
        self.output_ended(error)

    def output_ended(self, result: Outcome | Exception) -> None:
        """Stop generation, and settle the hold once the client has received the waiting output."""
        phase = self.phase
        if not isinstance(phase, Held) or phase.is_over:
            return
        admitted = phase.admitted
        stalled_s = phase.stalled_s if isinstance(phase, Generated) else 0.0
        flushing = Flushing(admitted, result, stalled_s)
        self.phase = flushing
        self._unchecked_until = 0
        if admitted.begin_timer is not None:
            admitted.begin_timer.cancel()
        if isinstance(phase, Sequenced):
            phase.sequence.close()
        entry, usage = admitted.entry, self.output.usage
        if (count := usage.generated_token_count - entry.generated_token_count) > 0:
            entry.generated(count)
        entry.leave()  # the engine is free again; settlement does not hold up the queue
        # On every path: output delivered after the settlement would not be billed.
        admitted.processor.flush(partial(self._settle, flushing))

    def _settle(self, flushing: Flushing) -> None:
        """Settle or void the hold. Called when the client has taken the output, or never will."""
        admitted, output = flushing.admitted, self.output
        if stalled_s := output.stalled_s:
            self.watch.forwarded(stalled_s, stalled_s - flushing.stalled_s)
        outcome, result = self.decision.close(flushing.result)
        error = result if isinstance(result, Exception) else None
        timings = self.watch.timings()
        token_count = output.usage.generated_token_count
        later_token_count = token_count - self.start.choice_count
        if token_count > 1 and not self.start.beam_search:
            timings |= output.gaps.facts()
        if later_token_count > 0 and timings["decode_ms"]:
            timings["tokens_per_second"] = later_token_count / timings["decode_ms"] * 1000
        self.phase = Settling(admitted)
        admitted.hold.end(
            outcome,
            error,
            partial(self._settled, admitted, result, timings),
            None if error else timings,
            admitted.migration_count,
        )

    def _settled(
        self,
        admitted: AdmittedGeneration,
        result: Outcome | Exception,
        timings: Mapping[str, float],
        settle_error: Exception | None,
    ) -> None:
        """Report the end of an admitted request to client and observer.

        `result` is its outcome or error, `timings` those until the settlement. `settle_error` is
        why the hold could not be ended, or None.
        """
        timings = self.watch.settled(timings)
        hold, processor, settled = admitted.hold, admitted.processor, admitted.hold.settled
        broken: Exception | None = None
        frame: pb.ServerFrame | None = None
        ended = Ended(Cause.SERVICE)
        try:
            result = settle_error or result
            if isinstance(result, Outcome):
                end, is_one = self.decision.end, self.start.choice_count == 1
                ended.ends = {0: result} if is_one else processor.ends_of_choices(result)
                frame = frames.finished(
                    result,
                    settled,
                    hold.admitted.prices.currency_code,
                    timings,
                    processor.exhausted,
                    {} if is_one else ended.ends,
                    admitted.migration_count,
                    processor.called_choices,
                    end.detail if end else "",
                    processor.stops,
                )
                frame.finished.model = self.start.model
                frame.finished.requested_model = self.start.requested_model
            else:
                if isinstance(result, EngineFailed):  # logged where it is raised
                    broken = engine_lost(admitted.route.reach, settled)
                else:
                    broken = interrupted(result, self.output.usage.delivered_token_count)
                frame = frames.failed(status_of(broken), settled)
        finally:
            ended.cause = cause_of(hold.outcome, broken)
            migration_count = admitted.migration_count
            self._end(ended, frame, hold.outcome, broken, timings, settled, migration_count)

    def _refused(self, error: Exception) -> None:
        """Report the end of a request that was never admitted."""
        registry, phase = self._registry, self.phase
        broken: Exception | None = error
        frame: pb.ServerFrame | None = None
        self.decision.close(error)
        try:
            # It turned out to run in another process.
            if (
                isinstance(error, RequestInFlight)
                and registry.relays is not None
                and registry.relays.take_over(self.caller, self.start.request_id, self.output)
            ):
                broken = None
            else:
                settled = error.settled if isinstance(error, RequestSettled) else None
                frame = frames.failed(status_of(error), settled)
        finally:
            if isinstance(phase, Asking):
                phase.entry.leave()
            work_s = phase.work_s if isinstance(phase, Preparing) else 0.0
            registry.pace.charge(self.caller.payer, work_s)
            self._end(Ended(cause_of(None, broken)), frame, None, broken, self.watch.timings())

    def _end(
        self,
        ended: Ended,
        frame: pb.ServerFrame | None,
        outcome: Outcome | None,
        broken: Exception | None,
        timings: Mapping[str, float],
        settled: Settled | None = None,
        migration_count: int = 0,
    ) -> None:
        """Send the last frame, keep output that may be requested again, and report the end.

        Drops all references to the request: a reference cycle would have to wait for a garbage
        collection, which stops all streams.
        """
        caller, start, output, registry = self.caller, self.start, self.output, self._registry
        self.phase = ended
        registry.remove(self)
        if isinstance(output, ReplayableBuffer):
            if settled is not None:
                key = caller.payer.project_id, start.request_id
                registry.replays.keep(key, output, output.keep_s or 0.0)
            else:
                output.discard(kept_too=True)
                registry.replays.close(output.buffer)
        output.end(frame)
        if frame is not None:
            has_gaps = output.usage.generated_token_count > 1 and not start.beam_search
            gaps = output.gaps if has_gaps else None
            facts = outcome, broken, timings, settled, gaps, migration_count
            registry.observer.ended(Ending(caller, start, *facts, start.requested_model))
