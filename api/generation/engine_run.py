"""One admitted request on its engine: events become output, counts and times; it goes on where its client has raised the limit."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

import structlog

from api.core.errors import FieldViolation, InvalidRequest
from api.core.wire import OUTCOMES
from api.generation.life import Life, State, Stopwatch
from api.generation.outbox import UsageSoFar
from api.generation.output_limits import OutputLimits
from api.generation.reply import Reply
from api.queue.fair_queue import Place
from inference.engine import (
    Backend,
    ChoiceFinished,
    Engine,
    EngineFinishReason,
    EngineTimings,
    GenerationRequest,
    ModelInfo,
    Scheduled,
    Sequence,
    SequenceEvent,
    SequenceFinished,
    TokensGenerated,
)
from inference.errors import EngineError, EngineStartFailed
from metering.core.models import Outcome

TOKENS_PER_CHARGE = 8  # tenants take turns by what was generated; a few tokens more or less change no order

log = structlog.get_logger(__name__)


class EngineRun:
    """Where a request is while the engine has it. migration_count: how often it has changed its engine after its first token.

    has_ended: it has all its output, and its limits are of no more use."""

    def __init__(
        self,
        request: GenerationRequest,
        place: Place,
        limits: OutputLimits,
        reply: Reply,
        watch: Stopwatch,
        life: Life,
        usage: UsageSoFar,
    ) -> None:
        self.migration_count = 0
        self.has_ended = False
        self._request = request
        self._place = place
        self._limits = limits
        self._reply = reply
        self._watch = watch
        self._usage = usage
        self._sequence: Sequence | None = None
        self._events: deque[SequenceEvent | EngineError] = deque()  # that the task has not read
        self._reader: asyncio.Future[None] | None = None  # while the task waits for one
        self._left_over: TokensGenerated | None = None  # counted, and not handed on
        self._life = life
        self._uncharged_token_count = 0  # that the queue has not been told of
        self._first_timings: EngineTimings | None = None  # of one that was continued

    def cancel(self) -> None:
        """The request was stopped: so is its sequence. Idempotent, never blocks."""
        if self._sequence is not None:
            self._sequence.cancel()

    async def run(self, engine: Engine) -> Outcome:
        """Hand on what the engine generates; the outcome as the engine saw it. Raises what breaks it."""
        request = replace(self._request, rank=self._place.rank)
        while True:
            sequence = self._sequence = engine.submit(request, self._told)
            if self._life.end is not None:  # before its engine had it
                sequence.cancel()
            try:
                outcome = await self._stream()
            finally:
                self._sequence = None  # which refers to this run
                sequence.close()
                self._charge()
            if outcome is not None:
                return outcome
            limits = self._limits
            limits.engine_token_count_max = limits.asked_token_count_max
            stop = replace(request.stop, max_output_tokens=limits.engine_token_count_max)
            request = replace(request, stop=stop, output_token_ids=tuple(sequence.outputs[0]))

    def _told(self, event: SequenceEvent | EngineError) -> None:
        """The engine's next event: past the task only where that has read everything and was not woken."""
        reader = self._reader
        if reader is not None and not (self._events or reader.done() or isinstance(event, SequenceFinished | EngineError)):
            try:
                if self._take(event):
                    return
            except Exception as error:
                reader.set_exception(error)
                return
        self._events.append(event)
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def _stream(self) -> Outcome | None:
        """The outcome, or None if it is to go on from where it has ended."""
        while True:
            while not self._events:
                self._reader = asyncio.get_running_loop().create_future()
                try:
                    await self._reader
                finally:
                    self._reader = None
            match event := self._events.popleft():
                case Scheduled():
                    self._begin(event)
                case TokensGenerated():
                    if event is not self._left_over and self._take(event):
                        continue
                    await self._reply.hand_on(event)
                case ChoiceFinished():
                    await self._reply.hand_on_rest(event.choice_index, event.text)
                    self._reply.end_choice(event.choice_index, OUTCOMES[event.reason])
                case SequenceFinished():
                    return await self._finish(event)
                case _:
                    raise event

    def _begin(self, event: Scheduled) -> None:
        """The engine has begun with the request."""
        usage, request = self._usage, self._request
        if not self._first_timings:
            self._life.become(State.RUNNING)
            self._place.begun()
            usage.input_token_count = len(request.prompt_token_ids)
            usage.cached_input_token_count = event.cached_token_count
            self._limits.begun(usage.input_token_count, usage.cached_input_token_count)

    def _take(self, event: SequenceEvent) -> bool:
        """Count new output, and hand it on if nothing has to be waited for; False leaves that to the task."""
        if type(event) is not TokensGenerated:
            if type(event) is Scheduled:
                self._begin(event)
                return True
            return False
        token_count, usage = len(event.token_ids), self._usage
        if not usage.generated_token_count:
            self._watch.first_token()
        usage.generated_token_count += token_count
        self._uncharged_token_count += token_count
        if self._uncharged_token_count >= TOKENS_PER_CHARGE or usage.generated_token_count == token_count:
            self._charge()
        if self._reply.hand_on_now(event):
            return True
        self._left_over = event
        return False

    def _charge(self) -> None:
        """Tell the queue of what was generated."""
        count, self._uncharged_token_count = self._uncharged_token_count, 0
        if count:
            self._place.generated(count)

    async def _finish(self, event: SequenceFinished) -> Outcome | None:
        self._usage.generated_token_count = event.generated_token_count
        if event.migration_count:
            self.migration_count += event.migration_count
            log.info("request_migrated", migration_count=event.migration_count)
        if event.reason is EngineFinishReason.LENGTH and self._limits.is_raised and self._life.end is None:
            # What is held back is not told: the engine that goes on reads the same tokens, and holds it back itself.
            self._first_timings = self._first_timings or event.timings
            return None
        self.has_ended = True
        self._watch.engine_finished(self._first_timings or event.timings)
        if self._request.choice_count == 1:
            await self._reply.hand_on_rest(0, event.text)
        return OUTCOMES[event.reason]


def check_output_change(request: GenerationRequest, model: ModelInfo, max_output_tokens: int) -> None:
    """Raises: InvalidRequest if a request that runs cannot have so many output tokens in all."""
    wrong, room = "", model.context_window_tokens - len(request.prompt_token_ids)
    if request.choice_count > 1 or request.beam_search is not None:
        wrong = "cannot be changed for several choices or beam search"
    elif max_output_tokens > room:
        wrong = f"must be at most {room}, which the context window leaves, not {max_output_tokens}"
    elif max_output_tokens > request.stop.max_output_tokens and not model.can_continue(request):
        why = "by the engine of this model"
        if request.response_format is not None:
            why = "with a response format"
        elif model.continues_output:
            why += " with a seed or penalties"
        wrong = f"cannot be raised above {request.stop.max_output_tokens} {why}"
    if wrong:
        raise InvalidRequest([FieldViolation("update.max_output_tokens", wrong)])


RETRY_S_MIN = 0.1  # seconds: below it a client that was told of a broken engine would be back before anybody noticed


async def wait_until_ready(backend: Backend, model: str, wait_s: float) -> None:
    """Start an engine, and return when it takes requests. model: as clients call it.

    Raises: EngineStartFailed, EngineUnavailable.
    """
    try:
        async with asyncio.timeout(wait_s):
            await backend.start()
    except TimeoutError:
        condition = backend.condition()
        raise EngineStartFailed(
            f"the engine of model {model!r} is still not ready: {condition.reason or condition.state.value}",
            max(condition.retry_after_s, RETRY_S_MIN),
        ) from None
