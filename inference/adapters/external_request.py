"""Request of an external engine: its choices, their output so far, and the events for the caller.

The engine's token lists are cumulative, may shrink, and may grow by any number of tokens, so new
tokens are counted and checked here, and an invalid answer fails only its own choice. Text is
decoded here too, from the token ids: text that was sent is final, and a stop sequence is found even
where it spans tokens. An engine that ends an output at a stop sequence must agree.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from inference.engine import (
    ChoiceFinished,
    EngineFinishReason,
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
from inference.errors import EngineFailed
from inference.text.detokenizer import NOTHING, Detokenizer, GivenParts, TextPiece
from inference.text.reasoning import Split

TAKEN_AT_ONCE_MAX = 1024  # tokens of one answer before other sequences go on: some 5 ms
LOGPROB_MAX = 0.01  # logarithms of probabilities are at most 0; sums in bfloat16 exceed it a little
_log = logging.getLogger("weir.inference.adapters")


class Answer(NamedTuple):
    """State of a sequence as reported by the engine. `cached_token_count` counts its cached prompt
    tokens.

    With `is_final`, that count will not change. With `awaits_count`, the engine reports it only in
    its last message.
    """

    output: Output
    cached_token_count: int
    is_final: bool = True
    awaits_count: bool = False


class Answers(Protocol):
    """Answers of an engine to one submitted sequence."""

    def read(self) -> AsyncGenerator[Answer, None]:
        """Yield answers in order. Raises EngineError if only this sequence failed."""
        ...

    def abort(self) -> None:
        """Ask the engine to stop the sequence; never blocks. Any exception means a dead engine."""
        ...


@dataclass(slots=True)
class Output:
    """Output of one choice so far. It has the same fields as TensorRT-LLM's `CompletionOutput`.

    `finish_reason` is None while the output runs, and `stop_sequence` if the engine found one.
    `stop_reason` is the stop token that ended it, None for the end token. `logprobs` has for each
    token a mapping from token ids to log-probabilities. `thinking_token_count` is reported by the
    engine at the end.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, TokenLogprob]] = field(default_factory=list)
    thinking_token_count: int | None = None


@dataclass(slots=True, eq=False)
class Choice:
    """One running output. `answers` is set on submission, and `silent_since_s` is the time of the
    last answer.

    `ended` is the finish reason that was reported; the engine may still be running the output. With
    `awaits_last`, the output is complete and is reported when the engine's last message arrives.
    `last` is its held-back text once that was taken. `aborted` tells that an abort was sent. A
    choice that is `stalled` was reported as stuck, but stays in the batch until the engine returns
    it. With `is_whole`, the engine answers once, at the end. For `stopped_by` see
    `SequenceFinished`.
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
    is_whole: bool = False
    stopped_here: bool = False  # by a token that the engine does not know as an end
    stopped_by: StoppedBy = None
    number: int = field(init=False)  # of the request
    # Prompt for the engine, followed by output that was generated elsewhere.
    sent_token_ids: tuple[int, ...] = field(init=False)
    token_count_max: int = field(init=False)  # that the engine may still generate
    rank: float = field(init=False)
    overtaken_count: int = 0

    def __post_init__(self) -> None:
        request = self.request.generation
        self.number, self.rank = self.request.number, request.rank
        self.sent_token_ids = request.prompt_token_ids + request.output_token_ids
        self.token_count_max = request.stop.max_output_tokens - len(request.output_token_ids)
        for count, token_id in enumerate(request.output_token_ids, 1):
            # The previous engine sent the same text; text that it held back is held back here too.
            self._take_token(token_id, count)

    @property
    def splits_text(self) -> bool:
        """True if thinking is found in the text, with or without ids."""
        return isinstance(self.detokenizer, Split) or (
            isinstance(self.detokenizer, GivenParts) and isinstance(self.detokenizer.text, Split)
        )

    def take(self, output: Output, now_s: float) -> list[SequenceEvent]:
        """Process an answer, or its next tokens, into events; set `ended` at the end of the output.

        Raises EngineFailed if the answer is invalid.
        """
        generation, total_count = self.request.generation, len(output.token_ids)
        if (
            total_count == self.token_count + 1 <= self.token_count_max
            and output.finish_reason is None
            and generation.sampling.top_logprobs is None
        ):
            return [self._take_one(output.token_ids[-1], now_s)]
        before = len(generation.output_token_ids)
        if total_count > self.token_count_max:
            raise EngineFailed(
                f"the engine sent {total_count} tokens, {self.token_count_max} were asked for"
            )
        ids = list(output.token_ids[self.token_count : self.token_count + TAKEN_AT_ONCE_MAX])
        is_whole = self.token_count + len(ids) >= total_count
        finish_reason = output.finish_reason if is_whole else None
        check_token_ids(ids, self.request.vocabulary_size)
        # It is not documented whether the end token itself is in the list; here it always is.
        last, ends = ids[-1] if ids else None, self.request.end_token_ids
        if finish_reason == "stop" and last not in ends:
            ids += self._end_of(output)
        # Events: the index of the first token of each, its text, thinking and number of thoughts.
        steps: list[tuple[int, str, str, int]] = []
        plain_count, text = self._take_plain(ids) if len(ids) > 1 else (0, "")
        begin, reasoning, thought_count = 0, "", 0
        total = before + self.token_count + plain_count
        for index in range(plain_count, len(ids)):
            token_id = ids[index]
            total += 1
            more_text, _, more_reasoning, count = self._take_token(token_id, total)
            if more_reasoning and text:  # thinking precedes the text of its event
                steps.append((begin, text, reasoning, thought_count))
                begin, text, reasoning, thought_count = index, "", "", 0
            text += more_text
            reasoning += more_reasoning
            thought_count += count
            if self.ended is not None:
                del ids[index + 1 :]
                break
        more_count = 0
        if finish_reason is not None:
            # The outputs of TensorRT-LLM's library have no such count.
            reported = getattr(output, "thinking_token_count", None)
            more_count = self.detokenizer.settle(reported, self.token_count + len(ids))
        if not ids:
            self._take_end(finish_reason)
            more = TokensGenerated((), "", (), self.index, (), "", more_count)
            return [more] if more_count else []
        logprobs = self._logprobs(output, ids)
        self.token_count += len(ids)
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
        if self.ended is None and finish_reason is not None:
            self._take_end(finish_reason)
        count = thought_count + more_count
        steps.append((begin, text, reasoning, count))
        if len(steps) == 1:
            return [TokensGenerated(tuple(ids), text, logprobs, self.index, (), reasoning, count)]
        return self._events(steps, ids, logprobs)

    def _events(
        self,
        steps: list[tuple[int, str, str, int]],
        ids: list[int],
        logprobs: tuple[TokenLogprobs, ...],
    ) -> list[SequenceEvent]:
        """Build an event of each step of `take`."""
        ends = (*(step[0] for step in steps[1:]), len(ids))
        return [
            TokensGenerated(
                tuple(ids[begin:end]), text, logprobs[begin:end], self.index, (), reasoning, count
            )
            for (begin, text, reasoning, count), end in zip(steps, ends, strict=True)
        ]

    def _end_of(self, output: Output) -> list[int]:
        """Return the end token that the engine left out; empty if there is none.

        Raises EngineFailed if the engine reports one that ends no output.
        """
        reported, ends = output.stop_reason, self.request.end_token_ids
        if not isinstance(reported, int):
            return sorted(self.request.model_end_token_ids or ends)[:1]
        if reported not in ends:
            raise EngineFailed(f"the engine stopped at token {reported}, which ends no output")
        return [reported]

    def _take_one(self, token_id: int, now_s: float) -> TokensGenerated:
        """Process a token that arrives alone, as most of a stream do."""
        request, size = self.request, self.request.vocabulary_size
        if size is not None and not (type(token_id) is int and 0 <= token_id < size):
            check_token_ids((token_id,), size)
        self.token_count += 1
        count = len(request.generation.output_token_ids) + self.token_count
        text, _, reasoning, thought_count = self._take_token(token_id, count)
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
        return TokensGenerated((token_id,), text, (), self.index, (), reasoning, thought_count)

    def _take_plain(self, new_ids: list[int]) -> tuple[int, str]:
        """Decode all new tokens but the last at once if none of them ends the output; return how
        many these are, and their text.
        """
        count, request = len(new_ids) - 1, self.request
        if self.token_count + count >= self.token_count_max:
            return 0, ""
        plain = new_ids[:count]
        if not (
            request.end_token_ids.isdisjoint(plain)
            and request.answer_end_token_ids.isdisjoint(plain)
        ):
            return 0, ""
        text = self.detokenizer.push_all(plain)
        return (0, "") if text is None else (count, text)

    def _take_token(self, token_id: int, count: int) -> TextPiece:
        """Decode a token and return the text that it releases. `count` is the number of output
        tokens including it; `ended` is set if it is the last.
        """
        request, stop = self.request, self.request.generation.stop
        if token_id in request.end_token_ids or (
            token_id in request.answer_end_token_ids and not self.detokenizer.thinks
        ):
            self.ended = EngineFinishReason.STOP
            self.stopped_here = token_id not in request.end_token_ids
            self.stopped_by = None if token_id in request.model_end_token_ids else token_id
            return NOTHING._replace(reasoning_token_count=int(self.detokenizer.thinks))
        piece = self.detokenizer.push(token_id, may_stop=count > stop.min_output_tokens)
        if piece.stop:
            self.ended, self.stopped_by = EngineFinishReason.STOP_SEQUENCE, piece.stop
        elif count >= stop.max_output_tokens:
            self.ended = EngineFinishReason.LENGTH
        return piece

    def rest(self) -> TextPiece:
        """Flush the held-back text at the end of the output, which may complete a stop sequence."""
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
    """A client's request, identified by `number`. `end_token_ids` are the end tokens that the
    engine knows, `model_end_token_ids` those among them that come from the model or the format.

    `vocabulary_size` is the upper bound of token ids in the output; None if the engine sends no
    ids. `answer_end_token_ids` are more end tokens, valid outside of thinking, which the engine
    does not know. `ends` has the reported finish reasons.
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
        """Record the engine's first answer and build its event. Only the first choice counts, since
        the prompt is billed once.

        Raises EngineFailed if the count is out of range.
        """
        if self.cached_token_count is not None:
            return []
        return [Scheduled(self.note_cached(cached_token_count, is_final=is_final), is_final)]

    def note_cached(self, cached_token_count: int, *, is_final: bool) -> int:
        """Record and return the cached tokens of the prompt. Raises EngineFailed if impossible."""
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
        """Build the events for the end of a choice, and of the request with its last choice."""
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
                decode_ms=0.0 if first.is_whole else (now_s - first_token_s) * 1e3,
            ),
        )


def unreadable(error: Exception) -> EngineFailed:
    """Log an unexpected exception from an answer, and convert it to an error of its sequence."""
    _log.error("an answer of the engine cannot be read", exc_info=error)
    return EngineFailed(f"an answer of the engine cannot be read: {error!r:.200}")


def check_token_ids(token_ids: Collection[Any], vocabulary_size: int | None) -> None:
    """Raise EngineFailed for a token id outside the vocabulary; skip the check if that is None."""
    if vocabulary_size is None or not token_ids:
        return
    # bool is an int, and a float may equal one
    if (
        {*map(type, token_ids)} == {int}
        and min(token_ids) >= 0
        and max(token_ids) < vocabulary_size
    ):
        return
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocabulary_size:
            # The text of a number of thousands of digits raises ValueError.
            is_short = isinstance(token_id, int) and abs(token_id) < 1 << 64
            raise EngineFailed(
                f"the engine sent {token_id if is_short else type(token_id).__name__} as a token of"
                f" a vocabulary of {vocabulary_size}"
            )


def token_logprobs(
    token_id: int, known: Mapping[int, Any], top_count: int, vocabulary_size: int | None
) -> TokenLogprobs:
    """Convert the engine's mapping to `TokenLogprobs`, leaving out tokens that a grammar excludes
    (probability 0). Raises EngineFailed if `token_id` is missing or a number is impossible.
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
