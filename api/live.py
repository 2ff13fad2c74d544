"""The life of one request, from its start frame to its settlement, as one task of the process.

A request does not belong to the stream it came on: the stream going away stops it, and it then ends and is settled by itself, with
nobody's cancellation able to cut that short.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import structlog
from weir.v1 import inference_service_pb2 as pb

from api import frames
from api.admission import Admission, AdmissionRequest, Lease
from api.decoding import check_against_model
from api.errors import CancelledEarly, DeadlineBeforeStart, FieldViolation, InvalidRequest, PromptTooLong, status_of
from api.outbox import Delivery, Outbox, UsageSoFar
from api.output_filter import OutputFilter, open_filters
from api.stopwatch import Stopwatch
from api.tokenizing import check_prompt, tokenize
from api.wire import OUTCOMES, ValidStart
from inference.engine import (
    ChoiceFinished,
    Engine,
    EngineState,
    GenerationRequest,
    Scheduled,
    SequenceFinished,
    SequenceId,
    SequenceStream,
    TokenLogprobs,
    TokensGenerated,
)
from inference.errors import EngineFailed, EngineStartFailed
from inference.router import Router
from inference.safety import SafetyChecker
from inference.tokenizer import Tokenizer
from metering.errors import QuotaExceeded, RequestSettled
from metering.operations import Outcome, Payer, QuotaState

log = structlog.get_logger(__name__)

UNDELIVERED_OUTCOMES = frozenset({Outcome.CANCELLED, Outcome.DEADLINE, Outcome.SLOW_CONSUMER})


class Phase(Enum):
    """Where a request stands."""

    PREPARING = auto()
    LOADING = auto()
    QUEUED = auto()
    STREAMING = auto()
    ENDING = auto()


class Stopped(Exception):
    """The request was stopped before it reached the engine."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, over what, and since when. received_at on the monotonic clock."""

    payer: Payer
    outbox: Outbox
    auth_ms: float
    received_at: float


class LiveRequest:
    """One request."""

    def __init__(self, caller: Caller, start: ValidStart, process: Process, on_end: Callable[[LiveRequest], None]) -> None:
        self.caller = caller
        self.start = start
        self.phase = Phase.PREPARING
        self.delivery = Delivery(start.given_id, UsageSoFar())
        self._process = process
        self._on_end = on_end
        self._outbox = caller.outbox
        self._watch = Stopwatch(caller.received_at, caller.auth_ms)
        self._task: asyncio.Task[None] | None = None
        self._can_be_interrupted = False
        self._sequence: SequenceStream | None = None
        self._stop_outcome: Outcome | None = None
        self._stop_error: Exception | None = None
        self._exhausted: tuple[QuotaState, ...] = ()
        self._seq = 0
        self._filters: tuple[OutputFilter, ...] = ()  # by choice; empty: outputs are not checked
        self._choice_ends: dict[int, Outcome] = {}  # of several choices, those that have ended

    def run_in(self, tasks: asyncio.TaskGroup) -> None:
        """Begin."""
        self._task = tasks.create_task(self._run(), name=f"request {self.start.request_id}")

    def stop(self, outcome: Outcome, error: Exception | None = None) -> None:
        """End the request as soon as possible, for this reason; the first reason given stands. Never blocks.

        error: for `FAILED`, what to tell the client. What was delivered is settled all the same.
        """
        if self._stop_outcome is not None or self.phase is Phase.ENDING:
            return
        self._stop_outcome, self._stop_error = outcome, error
        if outcome in UNDELIVERED_OUTCOMES:
            self._outbox.discard(self.delivery)
        if self._sequence is not None:
            self._sequence.cancel()
        elif self._task is not None and self._can_be_interrupted:
            self._task.cancel()

    async def _run(self) -> None:
        lease: Lease | None = None
        try:
            with structlog.contextvars.bound_contextvars(request_id=str(self.start.request_id)):
                async with contextlib.AsyncExitStack() as stack:
                    with self._interruptible():
                        engine, request = await self._prepare()
                        admission = self._process.admission.admit(self._admission_request(request), self.delivery.usage)
                        lease = await stack.enter_async_context(admission)
                        self._watch.lap("admission")
                    await self._generate(engine, request, lease)
                self._watch.lap("settle")
                self._push(frames.finished(lease, self._watch.timings(), self._exhausted, self._ends_of_choices()))
        except RequestSettled as error:
            self._push(frames.failed(status_of(error), error.settled))
        except Exception as error:
            self._push(frames.failed(status_of(error), lease.settled if lease else None))
        finally:
            self._process.ended(self)
            self._on_end(self)

    async def _prepare(self) -> tuple[Engine, GenerationRequest]:
        """Everything that can be known without holding anything: model, tokens, context window."""
        engine = self._process.router.choose(self.start.model)
        prompt_token_ids = await tokenize(self._process.tokenizers[self.start.model], self.start.prompt)
        window = engine.model.context_window_tokens
        wanted, room = self.start.stop.max_output_tokens, window - len(prompt_token_ids)
        if (wanted or 1) > room:
            raise PromptTooLong(len(prompt_token_ids), wanted, window)
        if (size := engine.model.vocabulary_size) <= max(prompt_token_ids, default=0) or min(prompt_token_ids, default=0) < 0:
            raise InvalidRequest([FieldViolation("token_ids.ids", f"must each be from 0 to {size - 1}")])
        request = GenerationRequest(
            sequence_id=SequenceId(str(uuid.uuid4())),
            prompt_token_ids=prompt_token_ids,
            sampling=self.start.sampling.over(engine.model.default_sampling),
            stop=self.start.stop.within(room),
            cache_salt=str(self.caller.payer.organization_id),
            response_format=self.start.response_format,
            choice_count=self.start.choice_count,
        )
        check_against_model(request, size)
        if self._process.safety is not None:
            await check_prompt(self._process.safety, self._process.tokenizers[self.start.model], self.start.prompt)
        self._watch.lap("tokenize")
        return engine, request

    def _ends_of_choices(self) -> dict[int, Outcome]:
        """How each of several choices ended; what the end of the whole request cut off ended as that did."""
        if self.start.choice_count == 1:
            return {}
        cut = self._stop_outcome or Outcome.CANCELLED
        ends = {index: self._choice_ends.get(index, cut) for index in range(self.start.choice_count)}
        return {index: cut if end is Outcome.CANCELLED else end for index, end in ends.items()}

    def _admission_request(self, request: GenerationRequest) -> AdmissionRequest:
        return AdmissionRequest(
            payer=self.caller.payer,
            request_id=self.start.request_id,
            payload_hash=self.start.payload_hash,
            model=self.start.model,
            input_token_count=len(request.prompt_token_ids),
            max_output_token_count=request.stop.max_output_tokens * request.choice_count,
            labels=self.start.labels,
        )

    async def _generate(self, engine: Engine, request: GenerationRequest, lease: Lease) -> None:
        """Run the request under its hold, and leave `lease` with how it ended. Raises what breaks it."""
        self.delivery.hold_id = lease.admitted.hold_id
        self._filters = open_filters(self._process.safety, request.choice_count)
        predicted = engine.predict_cached_token_count(request.prompt_token_ids, request.cache_salt)
        self._push(frames.admitted(lease.admitted, len(request.prompt_token_ids), predicted))
        try:
            with self._interruptible():
                await self._wait_until_ready(engine)
            self.phase = Phase.QUEUED
            self._watch.lap("cold_start")
            async with engine.generate(request) as sequence:
                self._sequence = sequence
                if self._stop_outcome is not None:  # while the engine was taking it
                    sequence.cancel()
                outcome = await self._stream(sequence, request, lease)
        except Stopped:
            assert self._stop_outcome is not None
            lease.outcome = self._stop_outcome
            return
        finally:
            self._sequence = None
            # On every way out: what still waits here would be delivered after it had been settled without.
            await self._flush()
        if self._stop_error is not None:
            raise self._stop_error
        self.phase = Phase.ENDING
        lease.outcome = self._stop_outcome or outcome
        self._watch.lap("client_stall")
        lease.timings = self._watch.timings()

    async def _wait_until_ready(self, engine: Engine) -> None:
        if engine.healthy():
            return
        self.phase = Phase.LOADING
        try:
            async with asyncio.timeout(self._process.admission.settings.cold_start_wait_s):
                await engine.start()
        except TimeoutError:
            raise EngineStartFailed(f"the engine of model {self.start.model!r} is still not ready") from None

    async def _stream(self, sequence: SequenceStream, request: GenerationRequest, lease: Lease) -> Outcome:
        """Hand on what the engine generates; the outcome as the engine saw it."""
        usage = self.delivery.usage
        async for event in sequence:
            match event:
                case Scheduled():
                    self.phase = Phase.STREAMING
                    usage.input_token_count = len(request.prompt_token_ids)
                    usage.cached_input_token_count = event.cached_token_count
                case TokensGenerated():
                    self._watch.first_token()
                    usage.generated_token_count += len(event.token_ids)
                    await self._hand_on_checked(event, lease)
                case ChoiceFinished():
                    await self._hand_on_rest(event.choice_index, event.text, lease)
                    if self._stop_outcome is None:  # else its last tokens were not handed on, and it ended as the request does
                        self._choice_ends[event.choice_index] = OUTCOMES[event.reason]
                case SequenceFinished():
                    self._watch.engine_finished(event.timings)
                    usage.generated_token_count = event.generated_token_count
                    if request.choice_count == 1:
                        await self._hand_on_rest(0, event.text, lease)
                    return OUTCOMES[event.reason]
        raise EngineFailed("the engine's events ended without a last one")

    async def _hand_on_checked(self, event: TokensGenerated, lease: Lease) -> None:
        """Give on what of the new output, and of what was held back before, the safety stage lets go."""
        if not self._filters:
            await self._hand_on(event, lease)
        elif self._stop_outcome is None:
            output = self._filters[event.choice_index]
            for part in await output.push(event):
                await self._hand_on(part, lease)
            self._note_filtered(output, event.choice_index)

    async def _hand_on_rest(self, choice_index: int, text: str, lease: Lease) -> None:
        """A choice has ended: what was held back of it goes out, unless the request was stopped."""
        if self._stop_outcome is not None:
            return
        if self._filters:
            output = self._filters[choice_index]
            for part in await output.finish(text):
                await self._hand_on(part, lease)
            self._note_filtered(output, choice_index)
        elif text:
            self._push_delta(text, choice_index=choice_index)

    def _note_filtered(self, output: OutputFilter, choice_index: int) -> None:
        if output.hit is not None:
            log.info("output_filtered", rule=output.hit, choice_index=choice_index)
            self.stop(Outcome.FILTERED)

    async def _hand_on(self, event: TokensGenerated, lease: Lease) -> None:
        """Give one step's tokens to the outbox, if the lease covers them and nobody has stopped the request."""
        if self._stop_outcome is not None:
            return
        try:
            await lease.cover(self.delivery.queued_token_count + len(event.token_ids))
        except QuotaExceeded as refusal:
            self._exhausted = refusal.failing
            self.stop(Outcome.QUOTA_EXHAUSTED)
        if self._stop_outcome is not None:
            return
        before = self.delivery.queued_token_count
        self._push_delta(event.text, event.token_ids, event.logprobs, event.choice_index)
        interval = self.start.usage_interval_tokens
        if interval and before // interval != self.delivery.queued_token_count // interval:
            self._push(frames.usage(self.delivery, lease.admitted.prices))
        if self.delivery.unsent_token_count > self._process.admission.settings.outbox_tokens_per_request_max:
            self.stop(Outcome.SLOW_CONSUMER)

    async def _flush(self) -> None:
        """Wait until the client has taken everything; one that reads nothing for too long is given up."""
        before = None
        while before != (unsent := self.delivery.unsent_frame_count):
            before = unsent
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._process.admission.settings.client_stall_max_s):
                    await self._outbox.flushed(self.delivery)
                    return
        self.stop(Outcome.SLOW_CONSUMER)
        self._outbox.discard(self.delivery)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let `stop` cancel the task inside this block, and turn that into an error of the request.

        Only here: a task that is cancelled before its first step never runs at all, and so would never end its request. Any other
        cancellation is the process ending.
        """
        if self._stop_outcome is not None:
            raise self._interruption()
        self._can_be_interrupted = True
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stop_outcome is None or task is None:
                raise
            task.uncancel()
            raise self._interruption() from None
        finally:
            self._can_be_interrupted = False

    def _interruption(self) -> Exception:
        """What a request that was stopped before it streamed ends with."""
        if self._stop_error is not None:
            return self._stop_error
        if self.delivery.hold_id is not None:
            return Stopped()
        if self._stop_outcome is Outcome.DEADLINE:
            return DeadlineBeforeStart("the deadline passed before the request was admitted")
        return CancelledEarly("the request was cancelled before it was admitted")

    def tell_progress(self, queue_position: int) -> None:
        """Send a progress frame if the request waits for something that takes long."""
        if self.phase is Phase.LOADING:  # so the model exists
            condition = self._process.router.choose(self.start.model).condition()
            if condition.state is not EngineState.READY:
                self._push(frames.loading(condition.retry_after_s))
        elif self.phase is Phase.QUEUED:
            self._push(frames.queued(queue_position))

    def _push_delta(
        self, text: str, token_ids: tuple[int, ...] = (), logprobs: tuple[TokenLogprobs, ...] = (), choice_index: int = 0
    ) -> None:
        self._seq += 1
        self._push(frames.delta(self._seq, choice_index, text, token_ids, logprobs), len(token_ids))

    def _push(self, frame: pb.ServerFrame, token_count: int = 0) -> None:
        frame.request_id = self.delivery.request_id
        self._outbox.push(self.delivery, frame, token_count)


class Process:
    """What all requests of this process share, and the set of those that run."""

    def __init__(
        self, admission: Admission, router: Router, tokenizers: Mapping[str, Tokenizer], safety: SafetyChecker | None = None
    ) -> None:
        """safety: what prompts and outputs are checked by; None if they are not."""
        self.safety = safety
        self.admission = admission
        self.router = router
        self.tokenizers = tokenizers
        self._live: dict[LiveRequest, None] = {}  # in order of arrival

    def begin(self, caller: Caller, start: ValidStart, on_end: Callable[[LiveRequest], None]) -> LiveRequest:
        """Run a request. Its end comes through the caller's outbox; `on_end` is called after that was pushed."""
        request = LiveRequest(caller, start, self, on_end)
        self._live[request] = None
        request.run_in(self.admission.tasks)
        return request

    def ended(self, request: LiveRequest) -> None:
        """Forget a request that has ended."""
        self._live.pop(request, None)

    def fail_all(self, error: Exception) -> None:
        """Stop everything that runs; what was delivered is settled, and the clients are told why."""
        for request in list(self._live):
            request.stop(Outcome.FAILED, error)

    async def tell_progress_regularly(self) -> None:
        """Send progress frames to whoever waits, until cancelled."""
        while True:
            await asyncio.sleep(self.admission.settings.progress_interval_s)
            position: Counter[str] = Counter()
            for request in list(self._live):
                request.tell_progress(position[request.start.model])
                if request.phase in (Phase.LOADING, Phase.QUEUED):
                    position[request.start.model] += 1
