"""Sequences on engines that are not ours: what their answers say, as events of the engine protocol. No clock.

Lists of tokens are cumulative and may shrink, several tokens may come at once and none may; so what is new is counted here. Text
is made here too, from the ids: it is final when it is given out, and a stop sequence is found wherever tokens meet in it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
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
    TokenLogprob,
    TokenLogprobs,
    TokensGenerated,
)
from inference.errors import EngineFailed
from inference.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Handling:
    """What an engine may be asked, and for how long it is waited for.

    abort_running: whether a sequence is aborted in the engine; otherwise one that is cancelled runs on unseen. abort_prefill: even
    before its first token; otherwise at it. abort_with_logprobs: also one that reports log-probabilities. abort_drain_s: how long
    the final count is waited for, since an abort may never be answered. empty_answer_count_max: so many answers without a token,
    one after the other, are taken for a broken cache; 0 for no limit.
    """

    abort_running: bool = True
    abort_prefill: bool = False
    abort_with_logprobs: bool = False
    abort_drain_s: float = 1.5
    empty_answer_count_max: int = 16


class Answer(NamedTuple):
    """What the engine says of a sequence at one moment. cached_token_count: of its prompt, served from the engine's cache."""

    output: Output
    cached_token_count: int


class Answers(Protocol):
    """One sequence in the engine."""

    def read(self) -> AsyncGenerator[Answer, None]:
        """Its answers, in order. Raises: an `EngineError` where this sequence cannot go on; anything else ends the engine."""
        ...

    def abort(self) -> None:
        """Ask the engine to stop it; never blocks. Raises whatever shows that the engine is dead."""
        ...


@dataclass(slots=True)
class Output:
    """One output as far as it has come. TensorRT-LLM's own `CompletionOutput` has the same fields.

    finish_reason: why it ended; None while it runs. stop_reason: the stop token that ended it, None for the end token.
    logprobs: for each token a mapping from ids to what is known of them.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, TokenLogprob]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Choice:
    """One output while it runs. answers: the engine's, once it was submitted. silent_since_s: of its last sign of life.

    ended: how, once it was reported; the engine may still be busy with it. aborted: it was told to stop. stalled: it was given up
    as stuck, and keeps its place until the engine lets go of it.
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
    aborted: bool = False
    stalled: bool = False
    rank: float = field(init=False)
    overtaken_count: int = 0

    def __post_init__(self) -> None:
        wanted = self.request.wanted
        self.rank = wanted.rank
        for count, token_id in enumerate(wanted.output_token_ids, 1):
            # Its text was given out where the token was generated; what was held back there is held back here.
            self._take_token(token_id, count)

    @property
    def number(self) -> int:
        return self.request.number

    def take(self, output: Output, now_s: float) -> list[SequenceEvent]:
        """What a response adds. Sets `ended` if the output is over by it. Raises: EngineFailed if the response cannot be."""
        before, new_ids = len(self.request.wanted.output_token_ids), list(output.token_ids[self.token_count :])
        # Whether the end token itself is in the list is not documented; here it always is.
        ended_silently = (output.finish_reason == "stop" and not (new_ids or self.token_count)) or self._lacks_end(output, new_ids)
        if ended_silently and (end := self._end_token(output)) is not None:
            new_ids.append(end)
        taken: list[int] = []
        text = ""
        for token_id in new_ids:
            taken.append(token_id)
            text += self._take_token(token_id, before + self.token_count + len(taken))
            if self.ended is not None:
                break
        if not taken:
            self._take_end(output)
            return []
        logprobs = self._logprobs(output, taken)
        self.token_count += len(taken)
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
        if self.ended is None:
            self._take_end(output)
        return [TokensGenerated(tuple(taken), text, logprobs, self.index)]

    def _take_token(self, token_id: int, count: int) -> str:
        """The text that a token lets go; sets `ended` if it is the last. count: of the output's tokens, with this one."""
        stop = self.request.wanted.stop
        if token_id in self.request.end_token_ids:
            self.ended = EngineFinishReason.STOP
            return ""
        piece = self.detokenizer.push(token_id, may_stop=count > stop.min_output_tokens)
        if piece.stopped:
            self.ended = EngineFinishReason.STOP_SEQUENCE
        elif count >= stop.max_output_tokens:
            self.ended = EngineFinishReason.LENGTH
        return piece.text

    def rest(self) -> str:
        """What was held back, at the end. Bytes that only the end makes final may complete a stop sequence."""
        if self.ended is EngineFinishReason.STOP_SEQUENCE:
            return ""
        piece = self.detokenizer.finish()
        if piece.stopped and self.ended is not EngineFinishReason.CANCELLED:
            self.ended = EngineFinishReason.STOP_SEQUENCE
        return piece.text

    def _lacks_end(self, output: Output, new_ids: list[int]) -> bool:
        if output.finish_reason != "stop":
            return False
        last = new_ids[-1] if new_ids else None
        return last not in self.request.end_token_ids

    def _end_token(self, output: Output) -> int | None:
        """The id that ended the output by the engine's account: the stop token that it names, or the first of the end tokens."""
        if isinstance(output.stop_reason, int):
            return output.stop_reason
        return min(self.request.end_token_ids, default=None)

    def _take_end(self, output: Output) -> None:
        match output.finish_reason:
            case None:
                return
            case "stop":
                self.ended = EngineFinishReason.STOP
            case "length":
                self.ended = EngineFinishReason.LENGTH
            case "cancelled":
                if not self.aborted:
                    raise EngineFailed("the engine cancelled a sequence that nobody had cancelled")
                self.ended = EngineFinishReason.CANCELLED
            case other:
                raise EngineFailed(f"the engine ended a sequence for a reason that it was not asked for: {other}")

    def _logprobs(self, output: Output, taken: list[int]) -> tuple[TokenLogprobs, ...]:
        wanted = self.request.wanted.sampling.top_logprobs
        if wanted is None:
            return ()
        told = output.logprobs[self.token_count : self.token_count + len(taken)]
        if len(told) < len(taken):
            raise EngineFailed("the engine reported fewer log-probabilities than tokens")
        return tuple(token_logprobs(token_id, known, wanted) for token_id, known in zip(taken, told, strict=True))


@dataclass(slots=True, eq=False)
class Request:
    """A request of the parent's. number: its handle. end_token_ids: what ends its outputs. ends: of choices that were reported."""

    number: int
    wanted: GenerationRequest
    end_token_ids: frozenset[int]
    arrived_at_s: float
    submitted_at_s: float | None = None
    cached_token_count: int | None = None
    choices: list[Choice] = field(default_factory=list)
    ends: dict[int, EngineFinishReason] = field(default_factory=dict)

    def schedule(self, cached_token_count: int) -> list[SequenceEvent]:
        """The engine has answered for the first time. cached_token_count: of the prompt, as far as the first choice found it.

        Raises: EngineFailed for a count that cannot be: it is billed.
        """
        if self.cached_token_count is not None:
            return []
        prompt_token_count, before = len(self.wanted.prompt_token_ids), len(self.wanted.output_token_ids)
        if not 0 <= cached_token_count <= prompt_token_count + before:
            raise EngineFailed(
                f"the engine says that {cached_token_count} of {prompt_token_count + before} prompt tokens were cached"
            )
        self.cached_token_count = min(cached_token_count, prompt_token_count)
        return [Scheduled(self.cached_token_count)]

    def finish(self, choice: Choice, now_s: float) -> list[SequenceEvent]:
        """A choice has ended, as its `ended` says; with the last one the request."""
        text = choice.rest()
        assert choice.ended is not None, "whoever calls has seen its end"
        self.ends[choice.index] = choice.ended
        # The engine gets no more sequences than have a place in its batch, so it has begun with one that was cancelled unanswered.
        has_begun = self.submitted_at_s is not None and choice.ended is EngineFinishReason.CANCELLED
        events: list[SequenceEvent] = self.schedule(0) if has_begun else []
        if self.wanted.choice_count > 1:
            events.append(ChoiceFinished(choice.index, choice.ended, text))
            text = ""
        if len(self.ends) == self.wanted.choice_count:
            events.append(self._finished(text, now_s))
        return events

    def _finished(self, text: str, now_s: float) -> SequenceFinished:
        first = self.choices[0]
        submitted_s = now_s if self.submitted_at_s is None else self.submitted_at_s
        first_token_s = now_s if first.first_token_at_s is None else first.first_token_at_s
        return SequenceFinished(
            reason=self.ends[0],
            text=text,
            prompt_token_count=len(self.wanted.prompt_token_ids),
            cached_token_count=self.cached_token_count or 0,
            generated_token_count=len(self.wanted.output_token_ids) + sum(choice.token_count for choice in self.choices),
            timings=EngineTimings(
                queue_ms=(submitted_s - self.arrived_at_s) * 1e3,
                prefill_ms=(first_token_s - submitted_s) * 1e3,
                decode_ms=(now_s - first_token_s) * 1e3,
            ),
        )


def token_logprobs(token_id: int, known: Mapping[int, Any], top_count: int) -> TokenLogprobs:
    """From the engine's mapping of ids to `Logprob`. Raises: EngineFailed if the token itself is not in it."""
    if token_id not in known:
        raise EngineFailed("the engine reported log-probabilities without the token that it chose")
    ranked = sorted(known.items(), key=lambda entry: (-entry[1].logprob, entry[0]))[:top_count]
    return TokenLogprobs(
        TokenLogprob(token_id, float(known[token_id].logprob)),
        tuple(TokenLogprob(id_, float(entry.logprob)) for id_, entry in ranked),
    )


class EmptyAnswers:
    """Counts those of one engine that came in a row."""

    def __init__(self, count_max: int) -> None:
        """count_max: so many show a fault; 0 looks for none."""
        self._count_max = count_max
        self._salts: deque[str] = deque(maxlen=count_max)  # of the empty ones since one was not

    def show_a_fault(self, choice: Choice, inside: Iterable[Choice]) -> bool:
        """Whether it is the engine's fault, now that this choice has ended. inside: what the engine has.

        What one tenant is given shows nothing while the engine serves others: they would pay for a restart with their streams.
        """
        wanted = choice.request.wanted
        if choice.ended is EngineFinishReason.CANCELLED or not self._count_max:
            return False
        if wanted.output_token_ids or wanted.stop.stop_token_ids or wanted.sampling.logit_bias:
            return False  # it may have been asked for
        if choice.token_count > 1 or choice.ended is not EngineFinishReason.STOP:
            self._salts.clear()
            return False
        self._salts.append(wanted.cache_salt)
        known = {*self._salts}
        serves_others = any(other.request.wanted.cache_salt not in known for other in inside)
        return len(self._salts) == self._count_max and (len(known) > 1 or not serves_others)
