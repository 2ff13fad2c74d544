"""Scheduling and output processing for engines that this project does not implement.

An external engine admits sequences first come, first served, and may never answer for a sequence
that is aborted in its queue. So at most one batch of sequences is submitted; the rest wait here,
ordered by rank. Everything runs on one event loop.

The engine's token lists are cumulative, may shrink, and may grow by any number of tokens, so new
tokens are counted and checked here: whatever is wrong in an answer fails its choice alone. Text is
decoded here too, from the token ids: text that was sent is final, and a stop sequence is found even
where it spans tokens. An engine that ends an output at a stop sequence must agree.

`StallWatch` distinguishes a stuck sequence from a stuck engine by how many are silent while others
progress.

`KvEventIndex` holds the prefixes that an engine caches, built from its KV cache events. Block
hashes are the engine's own, so blocks are identified by their position in its tree. Events may have
no salts: where caches are separated by salt, combine the index with the prefixes sent under a salt
to predict cache hits.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from inference.engine import (
    ChoiceFinished,
    EngineFinishReason,
    EngineStatistics,
    EngineTimings,
    GenerationRequest,
    Scheduled,
    SequenceEvent,
    SequenceFinished,
    StoppedBy,
    TokenLogprob,
    TokenLogprobs,
    TokensGenerated,
)
from inference.errors import EngineError, EngineFailed
from inference.limits import EngineLimits
from inference.sequences import ThinkingStart, choice_seed
from inference.text.detokenizer import (
    NOTHING,
    Detokenizer,
    GivenTextDecoder,
    TextDecoder,
    TextPiece,
)
from inference.workers.protocol import Message, Pulse

# Between two tokens of all sequences together: a long prompt is computed in between.
USUAL_GAP_S = 1.0

END_WAIT_S = 2.0  # seconds for an engine's last message after the last token
READ_ON_TOKENS_MAX = 16  # tokens of an engine that goes on after a stop sequence; none is billed
TAKEN_AT_ONCE_MAX = 1024  # tokens of one answer before other sequences go on: some 5 ms
LOGPROB_MAX = 0.01  # logarithms of probabilities are at most 0; sums in bfloat16 exceed it a little
# Stuck sequences that keep their place, while others progress, before the engine counts as stuck.
STALLS_MAX = 3
PARENTS_MAX = 64  # blocks of equal tokens to follow, one per tenant; a lookup then takes 2 ms


@dataclass(frozen=True, slots=True)
class Handling:
    """Engine-specific limits on aborting, and fault thresholds.

    abort_running: whether a running sequence may be aborted; if False, a cancelled sequence runs on
    with its output dropped. abort_prefill: whether it may be aborted before its first token; if
    False, the abort waits for it. abort_with_logprobs: whether a sequence that reports
    log-probabilities may be aborted. abort_drain_s: seconds to wait for the final token count,
    since an abort may never be answered. empty_answer_count_max: consecutive outputs without a
    token that indicate a broken KV cache; 0 for no limit.
    """

    abort_running: bool = True
    abort_prefill: bool = False
    abort_with_logprobs: bool = False
    abort_drain_s: float = 1.5
    empty_answer_count_max: int = 16


class Answer(NamedTuple):
    """State of a sequence as reported by the engine. cached_token_count: cached prompt tokens.

    is_final: the engine does not change the count any more. awaits_count: the engine reports it in
    its last message only.
    """

    output: Output
    cached_token_count: int
    is_final: bool = True
    awaits_count: bool = False


class Answers(Protocol):
    """One sequence in the engine."""

    def read(self) -> AsyncGenerator[Answer, None]:
        """Yield answers in order. Raises: EngineError if only this sequence failed."""
        ...

    def abort(self) -> None:
        """Ask the engine to stop the sequence; never blocks. Any exception means a dead engine."""
        ...


@dataclass(slots=True)
class Output:
    """Output of one choice so far. Has the same fields as TensorRT-LLM's `CompletionOutput`.

    finish_reason: None while the output runs; `stop_sequence` if the engine found one.
    stop_reason: the stop token that ended it, None for the end token. logprobs: for each token, a
    mapping from token ids to log-probabilities. thinking_token_count: as the engine counts it at
    the end.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, TokenLogprob]] = field(default_factory=list)
    thinking_token_count: int | None = None


@dataclass(slots=True, eq=False)
class Choice:
    """One output while it runs. answers: set on submission. silent_since_s: time of its last
    answer.

    ended: the reported finish reason; the engine may still be running it. awaits_last: it is whole,
    and reported when the engine's last message has come. last: its held-back text, if taken.
    aborted: an abort was sent. stalled: reported as stuck; it stays in the batch until the engine
    returns it. stopped_by: see `SequenceFinished`.
    """

    request: Request
    index: int
    seed: int
    detokenizer: Detokenizer
    answers: Answers | None = None
    silent_since_s: float = -math.inf
    first_token_at_s: float | None = None
    token_count: int = 0
    ended: EngineFinishReason | None = None
    awaits_last: bool = False
    last: TextPiece | None = None
    aborted: bool = False
    stalled: bool = False
    stopped_here: bool = False  # by a token that the engine does not know as an end
    stopped_by: StoppedBy = None
    rank: float = field(init=False)
    overtaken_count: int = 0

    def __post_init__(self) -> None:
        request = self.request.generation
        self.rank = request.rank
        for count, token_id in enumerate(request.output_token_ids, 1):
            # The previous engine sent the same text; text that it held back is held back here too.
            self._take_token(token_id, count)

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def sent_token_ids(self) -> tuple[int, ...]:
        """Prompt for the engine: output generated elsewhere becomes part of it."""
        request = self.request.generation
        return request.prompt_token_ids + request.output_token_ids

    @property
    def token_count_max(self) -> int:
        """Output tokens that the engine may generate."""
        request = self.request.generation
        return request.stop.max_output_tokens - len(request.output_token_ids)

    def take(self, output: Output, now_s: float) -> list[SequenceEvent]:
        """Process a response, or its next tokens; set `ended` at the output's end.

        Raises: EngineFailed if invalid.
        """
        before = len(self.request.generation.output_token_ids)
        if len(output.token_ids) > self.token_count_max:
            raise EngineFailed(
                f"the engine sent {len(output.token_ids)} tokens, {self.token_count_max} were asked"
                " for"
            )
        new_ids = list(output.token_ids[self.token_count : self.token_count + TAKEN_AT_ONCE_MAX])
        is_whole = self.token_count + len(new_ids) >= len(output.token_ids)
        finish_reason = output.finish_reason if is_whole else None
        check_token_ids(new_ids, self.request.vocabulary_size)
        # It is not documented whether the end token itself is in the list; here it always is.
        last, ends = new_ids[-1] if new_ids else None, self.request.end_token_ids
        if finish_reason == "stop" and last not in ends:
            reported = output.stop_reason
            first = min(self.request.model_end_token_ids or ends, default=None)
            if isinstance(reported, int) and reported not in ends:
                raise EngineFailed(f"the engine stopped at token {reported}, which ends no output")
            if (end := reported if isinstance(reported, int) else first) is not None:
                new_ids.append(end)
        taken: list[int] = []
        steps: list[tuple[int, TextPiece]] = []  # events, by the token that each begins with
        for token_id in new_ids:
            taken.append(token_id)
            piece = self._take_token(token_id, before + self.token_count + len(taken))
            if steps and not (steps[-1][1].text and piece.reasoning):
                piece, begin = _joined(steps[-1][1], piece), steps.pop()[0]
                steps.append((begin, piece))
            else:  # thinking precedes the text of its event
                steps.append((len(taken) - 1, piece))
            if self.ended is not None:
                break
        more_count = 0
        if finish_reason is not None:
            total = self.token_count + len(taken)
            # The outputs of TensorRT-LLM's library have no such count.
            reported = getattr(output, "thinking_token_count", None)
            more_count = self.detokenizer.settle(reported, total)
        if not taken:
            self._take_end(finish_reason)
            more = TokensGenerated((), "", (), self.index, (), "", more_count)
            return [more] if more_count else []
        begin, piece = steps.pop()
        count = piece.reasoning_token_count + more_count
        steps.append((begin, piece._replace(reasoning_token_count=count)))
        logprobs = self._logprobs(output, taken)
        self.token_count += len(taken)
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
        if self.ended is None:
            self._take_end(finish_reason)
        ends_of_steps = (*(begin for begin, _ in steps[1:]), len(taken))
        return [
            TokensGenerated(
                tuple(taken[begin:end]),
                piece.text,
                logprobs[begin:end],
                self.index,
                (),
                piece.reasoning,
                piece.reasoning_token_count,
            )
            for (begin, piece), end in zip(steps, ends_of_steps, strict=True)
        ]

    def _take_token(self, token_id: int, count: int) -> TextPiece:
        """Return the text released by a token; set `ended` on the last. count: tokens with it."""
        stop, request, thinks = self.request.generation.stop, self.request, self.detokenizer.thinks
        if token_id in request.end_token_ids or (
            token_id in request.answer_end_token_ids and not thinks
        ):
            self.ended = EngineFinishReason.STOP
            self.stopped_here = token_id not in request.end_token_ids
            self.stopped_by = None if token_id in request.model_end_token_ids else token_id
            return NOTHING._replace(reasoning_token_count=int(thinks))
        piece = self.detokenizer.push(token_id, may_stop=count > stop.min_output_tokens)
        if piece.stopped:
            self.ended, self.stopped_by = EngineFinishReason.STOP_SEQUENCE, piece.stop
        elif count >= stop.max_output_tokens:
            self.ended = EngineFinishReason.LENGTH
        return piece

    def rest(self) -> TextPiece:
        """Return the held-back text at the end of the output; it may complete a stop sequence."""
        if self.last is not None:
            return self.last
        if self.ended is EngineFinishReason.STOP_SEQUENCE:
            return NOTHING
        piece = self.detokenizer.finish()
        if piece.stopped and self.ended is not EngineFinishReason.CANCELLED:
            self.ended, self.stopped_by = EngineFinishReason.STOP_SEQUENCE, piece.stop
        return piece

    def _take_end(self, finish_reason: str | None) -> None:
        match finish_reason:
            case None:
                return
            case "stop":
                self.ended = EngineFinishReason.STOP
            case "length":
                self.ended = EngineFinishReason.LENGTH
            case "stop_sequence":
                self.last = self.detokenizer.finish()
                if not self.last.stopped:
                    raise EngineFailed("the engine found a stop sequence that the output lacks")
                self.ended = EngineFinishReason.STOP_SEQUENCE
            case "cancelled":
                if not self.aborted:
                    raise EngineFailed(
                        "the engine cancelled a sequence that had not been cancelled"
                    )
                self.ended = EngineFinishReason.CANCELLED
            case other:
                raise EngineFailed(
                    f"the engine ended a sequence with an unknown finish reason: {other}"
                )

    def _logprobs(self, output: Output, taken: list[int]) -> tuple[TokenLogprobs, ...]:
        top_count = self.request.generation.sampling.top_logprobs
        if top_count is None:
            return ()
        reported = output.logprobs[self.token_count : self.token_count + len(taken)]
        if len(reported) < len(taken):
            raise EngineFailed("the engine reported fewer log-probabilities than tokens")
        return tuple(
            token_logprobs(token_id, known, top_count, self.request.vocabulary_size)
            for token_id, known in zip(taken, reported, strict=True)
        )


@dataclass(slots=True, eq=False)
class Request:
    """Client request. number: its handle. end_token_ids: those that the engine knows.
    model_end_token_ids: those of them that the model or the format has.
    vocabulary_size: token ids of its output are below; None if the engine sends no token ids.
    answer_end_token_ids: more end tokens, outside the thinking, which the engine does not know.
    ends: reported finish reasons.
    """

    number: int
    generation: GenerationRequest
    end_token_ids: frozenset[int]
    arrived_at_s: float
    vocabulary_size: int | None
    submitted_at_s: float | None = None
    cached_token_count: int | None = None
    is_cached_final: bool = False  # the count does not change any more
    choices: list[Choice] = field(default_factory=list)
    ends: dict[int, EngineFinishReason] = field(default_factory=dict)
    answer_end_token_ids: frozenset[int] = frozenset()
    model_end_token_ids: frozenset[int] = frozenset()

    def schedule(self, cached_token_count: int, *, is_final: bool = True) -> list[SequenceEvent]:
        """Record the engine's first answer. The counts are those of the first choice: the prompt is
        billed once.

        Raises: EngineFailed if the count is out of range.
        """
        if self.cached_token_count is not None:
            return []
        return [Scheduled(self.note_cached(cached_token_count, is_final=is_final), is_final)]

    def note_cached(self, cached_token_count: int, *, is_final: bool) -> int:
        """Record and return the cached tokens of the prompt. Raises: EngineFailed if impossible."""
        prompt_token_count = len(self.generation.prompt_token_ids)
        sent_count = prompt_token_count + len(self.generation.output_token_ids)
        if not 0 <= cached_token_count <= sent_count:
            raise EngineFailed(
                f"the engine says that {cached_token_count} of {sent_count} prompt tokens were"
                " cached"
            )
        self.cached_token_count = min(cached_token_count, prompt_token_count)
        self.is_cached_final = is_final
        return self.cached_token_count

    def finish(self, choice: Choice, now_s: float) -> list[SequenceEvent]:
        """Return the events for the end of a choice, and of the request with its last choice."""
        piece = choice.rest()
        assert choice.ended is not None, "the caller checked that the choice ended"
        self.ends[choice.index] = choice.ended
        # Only as many sequences are submitted as the batch holds, so a cancelled one without an
        # answer had begun.
        has_begun = self.submitted_at_s is not None and choice.ended is EngineFinishReason.CANCELLED
        events: list[SequenceEvent] = self.schedule(0) if has_begun else []
        if self.generation.choice_count > 1:
            events.append(
                ChoiceFinished(
                    choice.index, choice.ended, piece.text, piece.reasoning, choice.stopped_by
                )
            )
            piece = NOTHING
        if len(self.ends) == self.generation.choice_count:
            events.append(self._finished(piece, now_s))
        return events

    def _finished(self, piece: TextPiece, now_s: float) -> SequenceFinished:
        first = self.choices[0]
        submitted_s = now_s if self.submitted_at_s is None else self.submitted_at_s
        first_token_s = now_s if first.first_token_at_s is None else first.first_token_at_s
        return SequenceFinished(
            reason=self.ends[0],
            text=piece.text,
            reasoning=piece.reasoning,
            stopped_by=first.stopped_by,
            prompt_token_count=len(self.generation.prompt_token_ids),
            cached_token_count=self.cached_token_count or 0,
            generated_token_count=len(self.generation.output_token_ids)
            + sum(choice.token_count for choice in self.choices),
            timings=EngineTimings(
                queue_ms=(submitted_s - self.arrived_at_s) * 1e3,
                prefill_ms=(first_token_s - submitted_s) * 1e3,
                decode_ms=(now_s - first_token_s) * 1e3,
            ),
        )


def _joined(first: TextPiece, second: TextPiece) -> TextPiece:
    """Return the text of two tokens."""
    return TextPiece(
        first.text + second.text,
        second.stop,
        first.reasoning + second.reasoning,
        first.reasoning_token_count + second.reasoning_token_count,
    )


@contextmanager
def odd_answers_failing() -> Iterator[None]:
    """Turn an unexpected exception of the block into the failure of one sequence, and log it.

    Raises: EngineError.
    """
    try:
        yield
    except (EngineError, AssertionError):
        raise
    except Exception as error:
        _log.exception("an answer of the engine cannot be read")
        raise EngineFailed(f"an answer of the engine cannot be read: {error!r:.200}") from error


def check_token_ids(token_ids: Iterable[Any], vocabulary_size: int | None) -> None:
    """Raise EngineFailed for an id outside the vocabulary; None: ids are not the engine's."""
    for token_id in token_ids if vocabulary_size is not None else ():
        # bool is an int, and a float may equal one
        if type(token_id) is not int or not 0 <= token_id < (vocabulary_size or 0):
            # The text of a number of thousands of digits raises ValueError.
            is_short = isinstance(token_id, int) and abs(token_id) < 1 << 64
            raise EngineFailed(
                f"the engine sent {token_id if is_short else type(token_id).__name__} as a token of"
                f" a vocabulary of {vocabulary_size}"
            )


def token_logprobs(
    token_id: int, known: Mapping[int, Any], top_count: int, vocabulary_size: int | None
) -> TokenLogprobs:
    """Convert the engine's mapping to `TokenLogprobs`, without the tokens that a grammar excludes
    (probability 0). Raises: EngineFailed without `token_id`, and for impossible numbers.
    """
    if token_id not in known:
        raise EngineFailed("the engine reported log-probabilities without the token that it chose")
    check_token_ids(known, vocabulary_size)
    for each, entry in known.items():
        excluded = entry.logprob == -math.inf and each != token_id
        if not excluded and not -math.inf < entry.logprob <= LOGPROB_MAX:
            raise EngineFailed(f"the engine sent {entry.logprob!r:.40} as a log-probability")
    ranked = sorted(
        (entry for entry in known.items() if entry[1].logprob > -math.inf),
        key=lambda entry: (-entry[1].logprob, entry[0]),
    )[:top_count]
    return TokenLogprobs(
        TokenLogprob(token_id, float(known[token_id].logprob)),
        tuple(TokenLogprob(id_, float(entry.logprob)) for id_, entry in ranked),
    )


class EmptyAnswers:
    """Detect a broken KV cache from consecutive empty outputs of one engine."""

    def __init__(self, count_max: int) -> None:
        """count_max: consecutive empty outputs that indicate a fault; 0 disables detection."""
        self._count_max = count_max
        # salts of the current run of empty outputs
        self._salts: deque[str] = deque(maxlen=count_max)

    def show_a_fault(self, choice: Choice, inside: Iterable[Choice]) -> bool:
        """Return whether the end of this choice indicates an engine fault. inside: choices in the
        engine.

        Empty outputs of one tenant do not count while the engine serves other tenants: a restart
        would end their streams.
        """
        request = choice.request.generation
        if choice.ended is EngineFinishReason.CANCELLED or not self._count_max:
            return False
        if request.output_token_ids or request.stop.stop_token_ids or request.sampling.logit_bias:
            return False  # the request may ask for an empty output
        if choice.token_count > 1 or choice.ended is not EngineFinishReason.STOP:
            self._salts.clear()
            return False
        self._salts.append(request.cache_salt)
        known = {*self._salts}
        serves_others = any(other.request.generation.cache_salt not in known for other in inside)
        return len(self._salts) == self._count_max and (len(known) > 1 or not serves_others)


_log = logging.getLogger("weir.inference.adapters")
Tell = Callable[[int, SequenceEvent | EngineError], None]


class OutsideCore:
    """Request queue of an external engine. Events go out through `tell`, in order for each request.

    submit: submits a choice. Raises: EngineError if the engine rejects it; anything else ends the
    engine. vocabulary_size: as in `Request`. format_end_token_ids: additional end tokens of
    requests with a response format. broken: called with the reason when the whole engine has
    failed.
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
        handling: Handling,
        tell: Tell,
        broken: Callable[[str], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._submit_choice = submit
        self._decoder = decoder
        self._vocabulary_size = vocabulary_size
        self._model_end_token_ids = model_end_token_ids
        self._format_end_token_ids = format_end_token_ids
        self._limits = limits
        self._handling = handling
        self._tell = tell
        self._broken = broken
        self._tasks = tasks
        self._requests: dict[int, Request] = {}
        # min-heap by rank, then by arrival
        self._waiting: list[tuple[float, int, int, Choice]] = []
        self._inside: dict[Choice, asyncio.Task[None]] = {}
        self._ended_count = 0  # choices that ended while queued and may still be in the heap
        self._empty_answers = EmptyAnswers(handling.empty_answer_count_max)
        self._prompt_token_count = self._cached_token_count = self._output_token_count = 0
        self.reported = EngineStatistics()  # block and step counts that the engine reported last
        self.moved_at_s = -math.inf  # time of the last token of any sequence

    @property
    def idle(self) -> bool:
        """True if no sequence is queued or in the engine."""
        return not self._inside and not self._waiting

    @property
    def owes(self) -> bool:
        """True if a request has not ended yet."""
        return bool(self._requests)

    def pulse(self) -> Pulse:
        """Return how long the engine has generated nothing, though it has outputs to continue.

        Zero while it computes prompts only, which may take long. Thread-safe.
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
        """Queue a validated request. number: greater than all earlier ones."""
        ends = frozenset() if request.stop.ignore_eos else self._model_end_token_ids
        if request.response_format is not None:
            ends |= self._format_end_token_ids
        model_ends = ends
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
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
            self._tell(number, event)
        self._report_end(added.choices[0])

    def cancel(self, number: int) -> None:
        """Cancel a request: at once if queued, on the engine's answer if running. Idempotent."""
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
        """Drop all requests without reporting their end, which the caller does."""
        for choice in self.inside:
            if choice.awaits_last:
                self._report_end(choice)
        self._requests.clear()
        self._waiting.clear()

    def fail(self, choice: Choice, why: EngineError) -> None:
        """End the request with an error, unless only the last message of a whole output failed."""
        if choice.awaits_last:
            self._report_end(choice)
            return
        request = self._requests.pop(choice.number, None)
        if request is None:
            return
        self._tell(choice.number, why)
        for other in request.choices:
            if other.ended is None:
                other.ended = EngineFinishReason.CANCELLED
                self._abort(other)

    def statistics(self) -> EngineStatistics:
        """Return the counts of sequences here, with the last blocks and steps of the engine."""
        return msgspec.structs.replace(
            self.reported,
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
        """Prevent starvation: a choice is overtaken `waiting_sequence_count_max` times at most."""
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

    async def _follow(self, choice: Choice, answers: Answers) -> None:
        """Read a sequence until the engine ends it, which may be after its end was reported."""
        try:
            async with aclosing(answers.read()) as reader:
                async for answer in reader:
                    with odd_answers_failing():
                        while self._take(choice, answer):  # noqa: ASYNC110 - others go on
                            await asyncio.sleep(0)
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
        """Take an answer, or its next tokens; return whether it has more."""
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
        if output.token_ids or output.finish_reason in ("stop", "length"):
            self._take_counts(choice, answer)
        was_running = choice.ended is None
        for event in choice.take(output, now_s) if was_running else ():
            assert isinstance(event, TokensGenerated)
            self.moved_at_s = now_s
            self._output_token_count += len(event.token_ids)
            self._tell(choice.number, event)
        if choice.ended is not None:
            if was_running and self._empty_answers.show_a_fault(choice, self.inside):
                self._broken(f"{self._handling.empty_answer_count_max} answers in a row were empty")
            self._take_end(choice, answer)
        return choice.ended is None and choice.token_count < len(output.token_ids)

    def _take_counts(self, choice: Choice, answer: Answer) -> None:
        """Take the cached tokens of the prompt, which is billed as the first choice computes it."""
        request, cached_token_count = choice.request, answer.cached_token_count
        for event in request.schedule(cached_token_count, is_final=answer.is_final):
            self._prompt_token_count += len(request.generation.prompt_token_ids)
            self._cached_token_count += cached_token_count
            self._tell(choice.number, event)
            # The first choice has computed the prompt, so the other choices find it in the cache.
            self._enter(*request.choices[1:])
        if answer.is_final and not request.is_cached_final and choice is request.choices[0]:
            self._cached_token_count -= request.cached_token_count or 0
            request.note_cached(cached_token_count, is_final=True)
            self._cached_token_count += cached_token_count

    def _take_end(self, choice: Choice, answer: Answer) -> None:
        """Report the end of an output, or wait for its last message with the cached tokens.

        An engine that does not know why the output ended runs on: it is aborted, at the latest
        after some more tokens.
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
        """Abort a sequence in the engine. Returns False if it cannot be aborted now."""
        if choice.aborted:
            return True
        task = self._inside.get(choice)
        begun = choice.first_token_at_s is not None or self._handling.abort_prefill
        told_apart = (
            choice.request.generation.sampling.top_logprobs is None
            or self._handling.abort_with_logprobs
        )
        if (
            task is None
            or choice.answers is None
            or not (self._handling.abort_running and begun and told_apart)
        ):
            return False
        choice.aborted = True
        try:
            choice.answers.abort()
        except Exception as error:  # an AssertionError or AttributeError if the executor is gone
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
        if len(request.ends) == request.generation.choice_count:
            del self._requests[request.number]


class StallWatch:
    """Detects sequences without new tokens. Timeouts in seconds, to the first token and between.

    abort_frees: whether an aborted sequence certainly gives its place in the engine to others.
    """

    def __init__(
        self,
        core: OutsideCore,
        first_token_timeout_s: float,
        inter_token_timeout_s: float,
        *,
        abort_frees: bool = False,
    ) -> None:
        self._core = core
        self._first_token_timeout_s = first_token_timeout_s
        self._inter_token_timeout_s = inter_token_timeout_s
        self._abort_frees = abort_frees
        self._stall_count = 0

    def look(self) -> str | None:
        """Fail the sequences that are stuck. Returns the reason if the engine itself is stuck."""
        now_s = time.monotonic()
        stuck, shortest_s = [], self._first_token_timeout_s
        for choice in self._core.inside:
            first = choice.first_token_at_s is None
            limit_s = self._first_token_timeout_s if first else self._inter_token_timeout_s
            if choice.aborted or choice.stalled:
                continue  # limited by abort_drain_s, or already counted
            if now_s - choice.silent_since_s > limit_s:
                stuck.append(choice)
                shortest_s = min(shortest_s, limit_s)
        if not stuck:
            return None
        silent = f"{len(stuck)} sequences have been silent for too long"
        if now_s - self._core.moved_at_s >= shortest_s / 2:
            return silent
        for choice in stuck:
            choice.stalled = True
            _log.error("sequence %d is stuck while others progress", choice.number)
            self._core.fail(choice, EngineFailed("the engine has stopped generating this sequence"))
            self._stall_count += not (choice.aborted and self._abort_frees)
        return silent if self._stall_count >= STALLS_MAX else None


class KvCacheChange(Message, tag="kv_cache", frozen=True):
    """Changes to the KV cache, applied in order: `reset`, then `stored` as (parent, block, tokens),
    then `removed`.

    reset: events were lost, so the previous state is discarded. A parent of 0 is the root.
    """

    reset: bool
    stored: list[tuple[int, int, list[int]]]
    removed: list[int]


class KvEventIndex:
    """Tree of the blocks that an engine holds, bounded by its number of blocks."""

    def __init__(self) -> None:
        # Blocks by parent and tokens: several if the engine separates tenants, since events carry
        # no salt.
        self._children: dict[tuple[int, tuple[int, ...]], dict[int, None]] = {}
        self._places: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._block_tokens = 0

    def __len__(self) -> int:
        return len(self._places)

    def apply(self, change: KvCacheChange) -> None:
        if change.reset:
            self.clear()
        for parent, block, tokens in change.stored:
            place = (parent, tuple(tokens))
            self._block_tokens = max(self._block_tokens, len(tokens))
            self._remove(block)
            self._places[block] = place
            self._children.setdefault(place, {})[block] = None
        for block in change.removed:
            self._remove(block)

    def clear(self) -> None:
        self._children.clear()
        self._places.clear()

    def matched_token_count(self, token_ids: Sequence[int], root: int = 0) -> int:
        """Return the leading tokens cached in whole blocks; not the whole prompt.

        root: parent of the first blocks of a salt. Blocks whose events have no salt count, too.
        """
        count, parents = 0, [0, root] if root else [0]
        while self._block_tokens and count + self._block_tokens < len(token_ids):
            tokens = tuple(token_ids[count : count + self._block_tokens])
            parents = [
                block for parent in parents for block in self._children.get((parent, tokens), ())
            ][:PARENTS_MAX]
            if not parents:
                break
            count += self._block_tokens
        return count

    def _remove(self, block: int) -> None:
        place = self._places.pop(block, None)
        if place is not None:
            del self._children[place][block]
            if not self._children[place]:
                del self._children[place]
