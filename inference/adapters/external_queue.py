"""Request queue of an engine that this project does not implement.

An external engine admits sequences first come, first served, and may never answer for a sequence
that is aborted in its queue. So at most one batch of sequences is submitted; the rest wait here,
ordered by rank. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from inference.adapters.external_faults import EmptyAnswers
from inference.adapters.external_request import (
    Answer,
    Answers,
    Choice,
    Output,
    Request,
    unreadable,
)
from inference.engine import (
    EngineFinishReason,
    EngineStatistics,
    GenerationRequest,
    SequenceEvent,
    TokensGenerated,
)
from inference.errors import EngineError, EngineFailed
from inference.limits import EngineLimits
from inference.sequences import ThinkingStart, choice_seed
from inference.text.text_decoder import GivenTextDecoder, TextDecoder
from inference.workers.protocol import Pulse

# Between two tokens of all sequences together: a long prompt is computed in between.
USUAL_GAP_S = 1.0
END_WAIT_S = 2.0  # seconds for an engine's last message after the last token
READ_ON_TOKENS_MAX = 16  # tokens of an engine that goes on after a stop sequence; none is billed
NumberedEventSink = Callable[[int, SequenceEvent | EngineError], None]
_log = logging.getLogger("weir.inference.adapters")


@dataclass(frozen=True, slots=True)
class AbortLimits:
    """Limits on aborting sequences of an engine, and thresholds of its faults.

    `abort_running` tells whether a running sequence may be aborted; if False, a cancelled sequence
    runs on and its output is dropped. `abort_prefill` tells whether it may be aborted before its
    first token; if False, the abort waits for that token. `abort_with_logprobs` tells whether a
    sequence that reports log-probabilities may be aborted. An abort may never be answered, so the
    final token count is awaited for at most `abort_drain_s` seconds. `empty_answer_count_max`
    consecutive outputs without a token indicate a broken KV cache; 0 disables the check.
    """

    abort_running: bool = True
    abort_prefill: bool = False
    abort_with_logprobs: bool = False
    abort_drain_s: float = 1.5
    empty_answer_count_max: int = 16


class ExternalQueue:
    """Request queue of an external engine. It sends events to `sink`, in order for each request.

    `submit` submits a choice; an EngineError from it fails the request, any other exception ends
    the engine. `vocabulary_size` is that of `Request`. `format_end_token_ids` are additional end
    tokens of requests with a response format. `broken` is called with the reason when the whole
    engine has failed.
    """

    def __init__(
        self,
        submit: Callable[[Choice], Answers],
        *,
        decoder: TextDecoder | GivenTextDecoder,
        vocabulary_size: int | None,
        model_end_token_ids: frozenset[int],
        format_end_token_ids: frozenset[int] = frozenset(),
        limits: EngineLimits,
        abort_limits: AbortLimits,
        sink: NumberedEventSink,
        broken: Callable[[str], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._submit_choice = submit
        self._decoder = decoder
        self._vocabulary_size = vocabulary_size
        self._model_end_token_ids = model_end_token_ids
        self._format_end_token_ids = format_end_token_ids
        self._limits = limits
        self._abort_limits = abort_limits
        self._sink = sink
        self._broken = broken
        self._tasks = tasks
        self._requests: dict[int, Request] = {}
        # min-heap by rank, then by arrival
        self._waiting: list[tuple[float, int, int, Choice]] = []
        self._inside: dict[Choice, asyncio.Task[None]] = {}
        self._ended_count = 0  # choices that ended while queued and may still be in the heap
        self._empty_answers = EmptyAnswers(abort_limits.empty_answer_count_max)
        self._prompt_token_count = self._cached_token_count = self._output_token_count = 0
        self.reported = EngineStatistics()  # block and step counts that the engine reported last
        self.moved_at_s = -math.inf  # time of the last token of any sequence

    @property
    def idle(self) -> bool:
        """True if no sequence is queued or in the engine."""
        return not self._inside and not self._waiting

    @property
    def owes(self) -> bool:
        """True if the end of a request is still to be reported."""
        return bool(self._requests)

    def pulse(self) -> Pulse:
        """Measure how long the engine has generated nothing, although it has outputs to continue.

        The time is zero while it computes prompts only, which may take long. Thread-safe.
        """
        decodes = any(
            choice.first_token_at_s is not None and choice.ended is None and not choice.aborted
            for choice in self.inside
        )
        return Pulse(time.monotonic() - self.moved_at_s if decodes else 0.0, USUAL_GAP_S)

    @property
    def inside(self) -> Iterator[Choice]:
        return iter(tuple(self._inside))

    def add(self, number: int, request: GenerationRequest, arrived_at_s: float) -> None:
        """Queue a validated request under `number`, which must be greater than all earlier ones."""
        ends = frozenset() if request.stop.ignore_eos else self._model_end_token_ids
        if request.response_format is not None:
            ends |= self._format_end_token_ids
        model_ends = ends
        seed = request.sampling.seed
        if seed is None:  # a greedy output has no use for it
            seed = secrets.randbits(63) if request.sampling.temperature > 0 else 0
        # While it thinks, the model may write the client's end tokens.
        splits = request.splits_reasoning and self._decoder.reasoning is not None
        answer_ends = request.stop.stop_token_ids - ends if splits else frozenset()
        ends |= request.stop.stop_token_ids - answer_ends
        added = Request(number, request, ends, arrived_at_s, self._vocabulary_size)
        added.answer_end_token_ids, added.model_end_token_ids = answer_ends, model_ends
        # A grammar from the first token leaves no room for thinking.
        unknown = None if request.response_format is None else False
        begun = True if request.thinking is ThinkingStart.PROMPT else unknown
        added.choices = [
            Choice(
                added,
                index,
                choice_seed(seed, index),
                self._decoder.open(
                    request.stop.stop_sequences,
                    request.prompt_token_ids,
                    splits=splits,
                    begun=begun,
                    marked_functions=request.marked_functions,
                ),
            )
            for index in range(request.choice_count)
        ]
        self._requests[number] = added
        if added.choices[0].ended is None:
            self._enter(added.choices[0])
            return
        for event in added.schedule(0):  # a continued request of which only the end was unreported
            self._sink(number, event)
        self._report_end(added.choices[0])

    def cancel(self, number: int) -> None:
        """Cancel a request; a running one ends when the engine has answered. Idempotent."""
        request = self._requests.get(number)
        for choice in () if request is None else tuple(request.choices):
            if choice.ended is not None:
                continue
            if choice in self._inside and self._abort(choice):
                continue  # its final count comes with the engine's answer, or after abort_drain_s
            choice.ended = EngineFinishReason.CANCELLED
            self._report_end(choice)
            self._ended_count += 1
        if 2 * self._ended_count > len(self._waiting):
            self._forget_ended()

    def cancel_all(self) -> None:
        for number in tuple(self._requests):
            self.cancel(number)

    def abandon(self) -> None:
        """Drop all requests without reporting an end; the caller reports it."""
        for choice in self.inside:
            if choice.awaits_last:
                self._report_end(choice)
        self._requests.clear()
        self._waiting.clear()

    def fail(self, choice: Choice, why: EngineError) -> None:
        """End the request of a choice with an error, and abort its other choices.

        A choice that only awaits its last message just ends; an unknown one is ignored.
        """
        if choice.awaits_last:
            self._report_end(choice)
            return
        request = self._requests.pop(choice.number, None)
        if request is None:
            return
        self._sink(choice.number, why)
        for other in request.choices:
            if other.ended is None:
                other.ended = EngineFinishReason.CANCELLED
                self._abort(other)

    def statistics(self) -> EngineStatistics:
        """Count the sequences here, and add the engine's last reported blocks and steps."""
        return msgspec.structs.replace(
            self.reported,
            waiting_sequence_count=[entry[-1].ended for entry in self._waiting].count(None),
            running_sequence_count=[choice.ended for choice in self._inside].count(None),
            prompt_token_count=self._prompt_token_count,
            cached_token_count=self._cached_token_count,
            output_token_count=self._output_token_count,
            running_sequence_count_max=self._limits.running_sequence_count_max,
        )

    def _enter(self, *choices: Choice) -> None:
        for choice in choices:
            heapq.heappush(self._waiting, (choice.rank, choice.number, choice.index, choice))
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._inside) < self._limits.running_sequence_count_max:
            *_, choice = heapq.heappop(self._waiting)
            if choice.ended is None:
                self._note_overtaking(choice)
                self._submit(choice)

    def _note_overtaking(self, entering: Choice) -> None:
        """Prevent starvation: a choice is overtaken at most `waiting_sequence_count_max` times."""
        if not self._waiting or min(number for _, number, _, _ in self._waiting) > entering.number:
            return
        for *_, choice in self._waiting:
            if choice.number < entering.number:
                choice.overtaken_count += 1
                if choice.overtaken_count >= self._limits.waiting_sequence_count_max:
                    choice.rank = -math.inf
        self._waiting = [
            (choice.rank, choice.number, choice.index, choice) for *_, choice in self._waiting
        ]
        heapq.heapify(self._waiting)

    def _forget_ended(self) -> None:
        """Remove ended choices, which would keep prompts in memory while the engine is full."""
        self._waiting = [entry for entry in self._waiting if entry[-1].ended is None]
        heapq.heapify(self._waiting)
        self._ended_count = 0

    def _submit(self, choice: Choice) -> None:
        choice.silent_since_s = time.monotonic()
        try:
            answers = choice.answers = self._submit_choice(choice)
        except EngineError as error:
            _log.exception("request %d was refused by the engine", choice.number)
            self.fail(choice, error)
            return
        except Exception as error:  # "LLM is shutting down", or any error of a dead executor
            self._broken(f"submitting a sequence failed: {error!r}")
            return
        if choice.request.submitted_at_s is None:
            choice.request.submitted_at_s = choice.silent_since_s
        self._inside[choice] = self._tasks.create_task(self._follow(choice, answers))
        if choice.is_whole:  # nothing else shows that it has begun
            self._take_counts(choice, Answer(Output(), 0, is_final=False))

    async def _follow(self, choice: Choice, answers: Answers) -> None:
        """Read a sequence until the engine ends it, perhaps long after its end was reported."""
        try:
            async with aclosing(answers.read()) as reader:
                async for answer in reader:
                    try:
                        while self._take(choice, answer):  # noqa: ASYNC110 - others go on
                            await asyncio.sleep(0)
                    except (EngineError, AssertionError):
                        raise
                    except Exception as error:
                        raise unreadable(error) from error
        except EngineError as error:
            _log.error("sequence %d: %.1000r", choice.number, error)
            self.fail(choice, error)
        except AssertionError as error:
            _log.exception("sequence %d", choice.number)
            self.fail(choice, EngineFailed(f"the engine sent an invalid answer: {error}"))
        except asyncio.CancelledError:
            pass  # abort_drain_s passed without a final answer
        except Exception as error:
            # the library shuts the engine down and does not report it elsewhere
            self._broken(f"the engine broke: {error!r}")
            return
        finally:
            self._inside.pop(choice, None)
        if choice.ended is None:  # the abort was not answered, or the answers ended early
            if not choice.aborted:
                self.fail(
                    choice, EngineFailed("the engine ended the sequence without a finish reason")
                )
            choice.ended = EngineFinishReason.CANCELLED
        self._report_end(choice)
        self._fill()

    def _take(self, choice: Choice, answer: Answer) -> bool:
        """Process an answer, or its next tokens; return whether it has more."""
        now_s = time.monotonic()
        output, request = answer.output, choice.request
        if len(output.token_ids) > choice.token_count or output.finish_reason is not None:
            choice.silent_since_s = now_s  # an answer without new output is not progress
        if self._requests.get(choice.number) is not request or choice.index in request.ends:
            if output.token_ids and choice.first_token_at_s is None:
                choice.first_token_at_s = now_s
            if output.finish_reason is None:
                self._abort(choice)  # postponed until its first token
            return False
        is_counted = request.cached_token_count is not None
        if (not is_counted or (answer.is_final and not request.is_cached_final)) and (
            output.token_ids or output.finish_reason in ("stop", "length")
        ):
            self._take_counts(choice, answer)
        was_running = choice.ended is None
        for event in choice.take(output, now_s) if was_running else ():
            assert isinstance(event, TokensGenerated)
            self.moved_at_s = now_s
            self._output_token_count += len(event.token_ids)
            self._sink(choice.number, event)
        if choice.ended is not None:
            if was_running and self._empty_answers.show_a_fault(choice, self.inside):
                self._broken(
                    f"{self._abort_limits.empty_answer_count_max} answers in a row were empty"
                )
            self._take_end(choice, answer)
        return choice.ended is None and choice.token_count < len(output.token_ids)

    def _take_counts(self, choice: Choice, answer: Answer) -> None:
        """Record the cached tokens of the prompt, as the first choice reports them for the bill."""
        request, cached_token_count = choice.request, answer.cached_token_count
        for event in request.schedule(cached_token_count, is_final=answer.is_final):
            self._prompt_token_count += len(request.generation.prompt_token_ids)
            self._cached_token_count += cached_token_count
            self._sink(choice.number, event)
            # The first choice has computed the prompt, so the other choices find it in the cache.
            if len(request.choices) > 1:
                self._enter(*request.choices[1:])
        if answer.is_final and not request.is_cached_final and choice is request.choices[0]:
            self._cached_token_count -= request.cached_token_count or 0
            request.note_cached(cached_token_count, is_final=True)
            self._cached_token_count += cached_token_count

    def _take_end(self, choice: Choice, answer: Answer) -> None:
        """Report the end of an output, or wait for the engine's last message with the cached
        tokens.

        If the engine does not know why the output ended, it would run on: it is aborted, at the
        latest after some more tokens.
        """
        is_last = answer.output.finish_reason is not None
        runs_on = choice.ended is EngineFinishReason.STOP_SEQUENCE or choice.stopped_here
        more_count = len(answer.output.token_ids) - choice.token_count
        is_known = choice.request.is_cached_final or (runs_on and not answer.awaits_count)
        if is_last or is_known or choice.index or more_count > READ_ON_TOKENS_MAX:
            self._report_end(choice)
            if runs_on and not is_last:
                self._abort(choice)
        elif not choice.awaits_last:
            choice.awaits_last = True
            asyncio.get_running_loop().call_later(END_WAIT_S, self._end_wait, choice, runs_on)

    def _end_wait(self, choice: Choice, runs_on: bool) -> None:
        self._report_end(choice)
        if runs_on and choice in self._inside:
            self._abort(choice)

    def _abort(self, choice: Choice) -> bool:
        """Abort a sequence in the engine; return False if that is not possible now."""
        if choice.aborted:
            return True
        task = self._inside.get(choice)
        begun = choice.first_token_at_s is not None or self._abort_limits.abort_prefill
        may_be_aborted = (
            choice.request.generation.sampling.top_logprobs is None
            or self._abort_limits.abort_with_logprobs
        )
        if (
            task is None
            or choice.answers is None
            or not (self._abort_limits.abort_running and begun and may_be_aborted)
        ):
            return False
        choice.aborted = True
        try:
            choice.answers.abort()
        except Exception as error:  # an AssertionError or AttributeError if the executor is gone
            self._broken(f"a sequence cannot be aborted: {error!r}")
            return False
        asyncio.get_running_loop().call_later(self._abort_limits.abort_drain_s, task.cancel)
        return True

    def _report_end(self, choice: Choice) -> None:
        request = choice.request
        if self._requests.get(request.number) is not request or choice.index in request.ends:
            return
        for event in request.finish(choice, time.monotonic()):
            self._sink(request.number, event)
        if len(request.ends) == request.generation.choice_count:
            del self._requests[request.number]
