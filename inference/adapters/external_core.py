"""The sequences of one engine that is not ours: which wait here, which are in it, and what they tell.

Such an engine admits first come, first served, and a sequence that is aborted in its queue may never answer. So no more are
submitted than have a place in its batch, and the order among those that wait is ours. Everything runs on one event loop.

`StallWatch` tells a stuck sequence from a stuck engine, by which are silent for too long while others go on.
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

import msgspec

from inference.adapters.external_sequences import Answer, Answers, Choice, EmptyAnswers, Handling, Request
from inference.engine import EngineFinishReason, EngineStatistics, GenerationRequest, SequenceEvent, TokensGenerated
from inference.errors import EngineError, EngineFailed
from inference.limits import EngineLimits
from inference.sequences import choice_seed
from inference.text.detokenizer import TextDecoder

_log = logging.getLogger("weir.inference.adapters")
Tell = Callable[[int, SequenceEvent | EngineError], None]


class OutsideCore:
    """Requests in, events out through `tell`, in order for each request. `broken`: the whole engine cannot go on.

    submit: hands a choice to the engine. Raises an `EngineError` where the engine refuses this one; anything else ends the engine.
    """

    def __init__(
        self,
        submit: Callable[[Choice], Answers],
        *,
        decoder: TextDecoder,
        model_end_token_ids: frozenset[int],
        limits: EngineLimits,
        handling: Handling,
        tell: Tell,
        broken: Callable[[str], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._submit_choice = submit
        self._decoder = decoder
        self._model_end_token_ids = model_end_token_ids
        self._limits = limits
        self._handling = handling
        self._tell = tell
        self._broken = broken
        self._tasks = tasks
        self._requests: dict[int, Request] = {}
        self._waiting: list[tuple[float, int, int, Choice]] = []  # a heap: by rank, then by arrival
        self._inside: dict[Choice, asyncio.Task[None]] = {}
        self._ended_count = 0  # of choices that ended while they waited, and may still be in the heap
        self._empty_answers = EmptyAnswers(handling.empty_answer_count_max)
        self._prompt_token_count = self._cached_token_count = self._output_token_count = 0
        self.told = EngineStatistics()  # of blocks and steps: the last that the engine told
        self.moved_at_s = -math.inf  # when the last token of anybody came

    @property
    def idle(self) -> bool:
        """Whether the engine has nothing to do for us."""
        return not self._inside and not self._waiting

    @property
    def owes(self) -> bool:
        """Whether anybody still waits for the end of a request."""
        return bool(self._requests)

    @property
    def inside(self) -> Iterator[Choice]:
        return iter(tuple(self._inside))

    def add(self, number: int, request: GenerationRequest, arrived_at_s: float) -> None:
        """Queue a request that its limits allow. number: above all earlier ones."""
        ends = frozenset() if request.stop.ignore_eos else self._model_end_token_ids
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        added = Request(number, request, ends | request.stop.stop_token_ids, arrived_at_s)
        added.choices = [
            Choice(added, index, choice_seed(seed, index), self._decoder.open(request.stop.stop_sequences))
            for index in range(request.choice_count)
        ]
        self._requests[number] = added
        if added.choices[0].ended is None:
            self._enter(added.choices[0])
            return
        for event in added.schedule(0):  # it is continued, and only its end had not been told
            self._tell(number, event)
        self._report_end(added.choices[0])

    def cancel(self, number: int) -> None:
        """End a request: at once where it waits, when the engine says so where it runs. Unknown numbers have ended already."""
        request = self._requests.get(number)
        for choice in () if request is None else tuple(request.choices):
            if choice.ended is not None:
                continue
            if choice in self._inside and self._abort(choice):
                continue  # its final count comes with the engine's answer, or when that was waited for long enough
            choice.ended = EngineFinishReason.CANCELLED
            self._report_end(choice)
            self._ended_count += 1
        if 2 * self._ended_count > len(self._waiting):
            self._forget_ended()

    def cancel_all(self) -> None:
        for number in tuple(self._requests):
            self.cancel(number)

    def abandon(self) -> None:
        """Forget all requests: somebody else tells what became of them. Nothing is submitted any more."""
        self._requests.clear()
        self._waiting.clear()

    def fail(self, choice: Choice, why: EngineError) -> None:
        request = self._requests.pop(choice.number, None)
        if request is None:
            return
        self._tell(choice.number, why)
        for other in request.choices:
            if other.ended is None:
                other.ended = EngineFinishReason.CANCELLED
                self._abort(other)

    def statistics(self) -> EngineStatistics:
        """Counts of sequences are ours, of blocks and steps the engine's last."""
        return msgspec.structs.replace(
            self.told,
            waiting_sequence_count=sum(choice.ended is None for *_, choice in self._waiting),
            running_sequence_count=sum(choice.ended is None for choice in self._inside),
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
        """Nobody starves, whatever the ranks: who was overtaken by as many as may wait at once comes before all that follow."""
        if not self._waiting or min(number for _, number, _, _ in self._waiting) > entering.number:
            return
        for *_, choice in self._waiting:
            if choice.number < entering.number:
                choice.overtaken_count += 1
                if choice.overtaken_count >= self._limits.waiting_sequence_count_max:
                    choice.rank = -math.inf
        self._waiting = [(choice.rank, choice.number, choice.index, choice) for *_, choice in self._waiting]
        heapq.heapify(self._waiting)

    def _forget_ended(self) -> None:
        """Else whatever is cancelled in the queue of an engine that is full would stay there, with its prompt."""
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
        except Exception as error:  # "LLM is shutting down", or whatever a dead executor raises
            self._broken(f"nothing can be submitted any more: {error!r}")
            return
        if choice.request.submitted_at_s is None:
            choice.request.submitted_at_s = choice.silent_since_s
        self._inside[choice] = self._tasks.create_task(self._follow(choice, answers))

    async def _follow(self, choice: Choice, answers: Answers) -> None:
        """Read a sequence to its end in the engine, which may be later than the end that was reported."""
        try:
            async with aclosing(answers.read()) as told:
                async for answer in told:
                    self._take(choice, answer)
        except EngineError as error:
            _log.error("sequence %d: %r", choice.number, error)
            self.fail(choice, error)
        except AssertionError as error:
            _log.exception("sequence %d", choice.number)
            self.fail(choice, EngineFailed(f"the engine's answer cannot be: {error}"))
        except asyncio.CancelledError:
            pass  # its final answer was waited for long enough
        except Exception as error:  # the library shuts the engine down with it, and tells nobody else
            self._broken(f"the engine broke: {error!r}")
            return
        finally:
            self._inside.pop(choice, None)
        if choice.ended is None:  # the abort was not answered, or the engine let it go without a word
            choice.ended = EngineFinishReason.CANCELLED
            if not choice.aborted:
                self.fail(choice, EngineFailed("the engine ended the sequence without saying how"))
        self._report_end(choice)
        self._fill()

    def _take(self, choice: Choice, answer: Answer) -> None:
        now_s = choice.silent_since_s = time.monotonic()
        output, request = answer.output, choice.request
        if self._requests.get(choice.number) is not request or choice.index in request.ends:
            if output.token_ids and choice.first_token_at_s is None:
                choice.first_token_at_s = now_s
            if output.finish_reason is None:
                self._abort(choice)  # put off until it had its first token
            return
        if output.token_ids:
            for event in request.schedule(answer.cached_token_count):
                self._prompt_token_count += len(request.wanted.prompt_token_ids)
                self._cached_token_count += answer.cached_token_count
                self._tell(choice.number, event)
                # The others find the prompt in the cache now, as the first one has just computed it.
                self._enter(*request.choices[1:])
        for event in choice.take(output, now_s):
            assert isinstance(event, TokensGenerated)
            self.moved_at_s = now_s
            self._output_token_count += len(event.token_ids)
            self._tell(choice.number, event)
        if choice.ended is not None:
            if self._empty_answers.show_a_fault(choice, self.inside):
                self._broken(f"{self._handling.empty_answer_count_max} answers in a row were empty")
            self._report_end(choice)
            if output.finish_reason is None and choice.ended is EngineFinishReason.STOP_SEQUENCE:
                self._abort(choice)  # it is ours: the engine would go on to its own limit

    def _abort(self, choice: Choice) -> bool:
        """Tell the engine to stop a sequence that it has; False if it may not be told, now or ever."""
        if choice.aborted:
            return True
        task = self._inside.get(choice)
        begun = choice.first_token_at_s is not None or self._handling.abort_prefill
        told_apart = choice.request.wanted.sampling.top_logprobs is None or self._handling.abort_with_logprobs
        if task is None or choice.answers is None or not (self._handling.abort_running and begun and told_apart):
            return False
        choice.aborted = True
        try:
            choice.answers.abort()
        except Exception as error:  # an AssertionError or AttributeError where the executor is gone
            self._broken(f"a sequence cannot be aborted: {error!r}")
            return False
        asyncio.get_running_loop().call_later(self._handling.abort_drain_s, task.cancel)
        return True

    def _report_end(self, choice: Choice) -> None:
        request = choice.request
        if self._requests.get(request.number) is not request or choice.index in request.ends:
            return
        for event in request.finish(choice, time.monotonic()):
            self._tell(request.number, event)
        if len(request.ends) == request.wanted.choice_count:
            del self._requests[request.number]


STALLS_MAX = 3  # single sequences that stuck while others went on: after so many it is the engine


class StallWatch:
    """Looks at the silence of a core's sequences. The limits are in seconds: until the first token, and from one to the next."""

    def __init__(self, core: OutsideCore, first_token_timeout_s: float, inter_token_timeout_s: float) -> None:
        self._core = core
        self._first_token_timeout_s = first_token_timeout_s
        self._inter_token_timeout_s = inter_token_timeout_s
        self._stall_count = 0

    def look(self) -> str | None:
        """Fails the sequences that alone are stuck. Returns why the engine cannot go on, if it is the engine."""
        now_s = time.monotonic()
        stuck, shortest_s = [], self._first_token_timeout_s
        for choice in self._core.inside:
            first = choice.first_token_at_s is None
            limit_s = self._first_token_timeout_s if first else self._inter_token_timeout_s
            if choice.aborted or choice.stalled:
                continue  # it is waited for by another clock, or was counted and could not be ended
            if now_s - choice.silent_since_s > limit_s:
                stuck.append(choice)
                shortest_s = min(shortest_s, limit_s)
        if not stuck:
            return None
        self._stall_count += len(stuck)
        moving = now_s - self._core.moved_at_s < shortest_s / 2
        if not moving or self._stall_count >= STALLS_MAX:
            return f"{len(stuck)} sequences have been silent for too long"
        for choice in stuck:
            choice.stalled = True
            _log.error("sequence %d is stuck while others go on", choice.number)
            self._core.fail(choice, EngineFailed("the engine has stopped generating this sequence"))
        return None
