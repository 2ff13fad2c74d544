"""State of one sequence in the engine: tokens, KV blocks and progress.

    token_ids      [ prompt .................... | output ......... ]
    positions      [ computed: KV in the blocks of `block_table` | uncomputed ]
                                                  ^ computed_token_count

Owned by the step loop.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from inference.core.kv_cache import BlockKey, CachedBlock
from inference.engine import (
    EngineFinishReason,
    EngineTimings,
    GenerationRequest,
    SequenceFinished,
    StoppedBy,
    TokenLogprob,
    TokenLogprobs,
)
from inference.kv_blocks import KV_BLOCK_TOKENS
from inference.sampling.grammar import Grammar
from inference.sampling.sampler import Draw, SeenTokens
from inference.text.detokenizer import NOTHING, Detokenizer, TextPiece


class AppendedToken(NamedTuple):
    """Result of appending a token: released text; the finish reason, None if output continues."""

    piece: TextPiece
    finish_reason: EngineFinishReason | None


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence; modified by the step loop only.

    `number` is the order of arrival and the handle, shared with the parent process and by all
    choices of a request. `end_token_ids` are end tokens of the model and the request,
    `answer_end_token_ids` those of them that do not end the thinking. `seed` is random if the
    request has none. `grammar` belongs to the response format. With `candidate_count`, the sequence
    ends with so many candidates of its next token, and draws none. `rotary_offset` is the row of
    the rotation tables for position 0. `precedence` is the sort key: rank, then arrival; the lowest
    comes first. `ended_before` is the finish reason of a continued sequence that is already
    complete. For `stopped_by` see `SequenceFinished`. Times are `time.monotonic()` seconds.
    """

    number: int
    request: GenerationRequest
    seed: int
    end_token_ids: frozenset[int]
    detokenizer: Detokenizer
    arrived_at_s: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    computed_token_count: int = 0
    block_table: list[int] = field(default_factory=list)
    prefix_keys: list[BlockKey] = field(default_factory=list)
    registered_block_count: int = 0
    registered_tip: CachedBlock | None = None
    cached_token_count: int | None = None
    scheduled_at_s: float | None = None
    first_token_at_s: float | None = None
    seen: SeenTokens | None = None
    grammar: Grammar | None = None
    choice_index: int = 0
    precedence: tuple[float, int, int] = field(init=False)
    overtaken_count: int = 0
    candidate_count: int = 0
    rotary_offset: int = 0
    ended_before: EngineFinishReason | None = field(init=False, default=None)
    prompt_token_count: int = field(init=False, default=0)
    prompt_logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    takes_best: bool = field(init=False, default=False)
    answer_end_token_ids: frozenset[int] = frozenset()
    stopped_by: StoppedBy = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.precedence = self.request.rank, self.number, self.choice_index
        self.prompt_token_count = len(self.token_ids)
        sampling = self.request.sampling
        if sampling.prompt_logprobs is not None and self.choice_index == 0:
            self.prompt_logprobs.append(TokenLogprobs(TokenLogprob(self.token_ids[0], 0.0)))
        if penalises := sampling.penalises:
            self.seen = SeenTokens(self.token_ids)
        is_plain = (
            not (penalises or sampling.logit_bias)
            and sampling.top_logprobs is None
            and self.grammar is None
        )
        self.takes_best = is_plain and sampling.temperature == 0.0 and not self.candidate_count
        for token_id in self.request.output_token_ids:
            # The previous engine sent the same text; text that it held back is held back here too.
            self.ended_before = self.append(token_id, None).finish_reason

    @property
    def rank(self) -> float:
        """Request's rank, or minus infinity if the sequence was overtaken too often."""
        return self.precedence[0]

    @property
    def output_token_count(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.prompt_token_count

    @property
    def uncomputed_token_count(self) -> int:
        """Number of tokens whose KV is not in the pool; at least 1 while the sequence runs."""
        return len(self.token_ids) - self.computed_token_count

    @property
    def owed_output_token_count(self) -> int:
        """Maximum number of output tokens that the sequence may still generate."""
        return self.request.stop.max_output_tokens - len(self.token_ids) + self.prompt_token_count

    @property
    def cache_salt(self) -> str:
        """Request's salt with the rotary offset: different rotations are cached separately."""
        salt = self.request.cache_salt
        return f"{salt}\0{self.rotary_offset}" if self.rotary_offset else salt

    @property
    def may_decode(self) -> bool:
        """True if all tokens but the last are computed, so that the next step is a decoding one."""
        return len(self.token_ids) - self.computed_token_count == 1

    @property
    def has_room(self) -> bool:
        """True if its next token goes to a block that is allocated."""
        return self.computed_token_count % KV_BLOCK_TOKENS > 0

    @property
    def scores_prompt(self) -> bool:
        """True while log-probabilities of prompt tokens are still to be computed."""
        return 0 < len(self.prompt_logprobs) < self.prompt_token_count

    def scored_token_count(self, token_count: int) -> int:
        """Count the prompt tokens whose log-probabilities the next `token_count` determine."""
        if not self.scores_prompt:
            return 0
        end = min(self.computed_token_count + token_count + 1, self.prompt_token_count)
        return max(end - len(self.prompt_logprobs), 0)

    @property
    def next_takes_best(self) -> bool:
        """True if the next token is that of the largest logit, and nothing else is needed."""
        return (
            self.takes_best
            and len(self.token_ids) - self.prompt_token_count >= self.request.stop.min_output_tokens
        )

    @property
    def may_be_drafted(self) -> bool:
        """True if several tokens can be sampled at once, as none changes the rules for the next."""
        return (
            not self.candidate_count
            and self.grammar is None
            and self.seen is None
            and len(self.token_ids) - self.prompt_token_count >= self.request.stop.min_output_tokens
        )

    def draw(self, ahead: int = 0) -> Draw:
        """Build the sampling parameters for the next token, or for one `ahead` tokens later."""
        index = self.output_token_count + ahead
        held_off = tuple(self.end_token_ids) if index < self.request.stop.min_output_tokens else ()
        return Draw(
            self.request.sampling,
            self.seed,
            index,
            self.seen,
            held_off,
            self.grammar,
            self.candidate_count,
        )

    def take(self, token_id: int) -> None:
        """Append an output token without checking for the end."""
        self.token_ids.append(token_id)
        if self.seen is not None:
            self.seen.add(token_id)

    def append(self, token_id: int, now_s: float | None) -> AppendedToken:
        """Append an output token and check for the end. `now_s` is None if generated elsewhere."""
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
        self.take(token_id)
        if token_id in self.end_token_ids and not (
            token_id in self.answer_end_token_ids and self.detokenizer.thinks
        ):
            count = int(self.detokenizer.thinks)
            self.stopped_by = self.named_end(token_id)
            return AppendedToken(
                NOTHING._replace(reasoning_token_count=count), EngineFinishReason.STOP
            )
        stop, output_token_count = self.request.stop, len(self.token_ids) - self.prompt_token_count
        piece = self.detokenizer.push(
            token_id, may_stop=output_token_count > stop.min_output_tokens
        )
        if self.grammar is not None and self.grammar.over:
            self.grammar = None
        if piece.stop:
            self.stopped_by = piece.stop
            return AppendedToken(piece, EngineFinishReason.STOP_SEQUENCE)
        return AppendedToken(
            piece,
            EngineFinishReason.LENGTH if output_token_count >= stop.max_output_tokens else None,
        )

    def named_end(self, token_id: int) -> StoppedBy:
        """Return the token that ended the output if the request names it and the model does not."""
        return token_id if token_id in self.answer_end_token_ids else None

    def finished(
        self,
        reason: EngineFinishReason,
        piece: TextPiece,
        generated_token_count: int,
        now_s: float,
    ) -> SequenceFinished:
        """Build the request's last event. A phase that was not reached takes 0 ms."""
        scheduled_s = now_s if self.scheduled_at_s is None else self.scheduled_at_s
        first_token_s = now_s if self.first_token_at_s is None else self.first_token_at_s
        timings = EngineTimings(
            queue_ms=(scheduled_s - self.arrived_at_s) * 1e3,
            prefill_ms=(first_token_s - scheduled_s) * 1e3,
            decode_ms=(now_s - first_token_s) * 1e3,
        )
        cached_token_count = self.cached_token_count or 0
        return SequenceFinished(
            reason,
            piece.text,
            self.prompt_token_count,
            cached_token_count,
            generated_token_count,
            timings,
            reasoning=piece.reasoning,
            stopped_by=self.stopped_by,
        )
