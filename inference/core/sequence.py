"""One sequence inside the engine: its tokens, its blocks, and how far each has come.

    token_ids      [ prompt .................... | output ......... ]
    positions      [ computed: KV in the blocks of `block_table` | uncomputed ]
                                                  ^ computed_token_count

A step computes some uncomputed tokens. When none is left, the logits of the last give the next token, which is uncomputed
again: a decoding sequence is one with a single uncomputed token, and prefill, decode and recomputing are the same thing.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from inference.core.kv_cache import KV_BLOCK_TOKENS, BlockKey, CachedBlock, blocks_for
from inference.engine import EngineFinishReason, EngineTimings, GenerationRequest
from inference.sampling.grammar import Grammar
from inference.sampling.logit_rules import SeenTokens
from inference.sampling.sampler import Draw
from inference.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from inference.core.beam_group import BeamGroup


class AppendedToken(NamedTuple):
    """What one new token did: text let go, and why the sequence is over if it is."""

    text: str
    finish_reason: EngineFinishReason | None


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence; changed only by the step loop.

    number: the order of arrival, and the handle that the host and its parent share; choices of one request share it too.
    end_token_ids: ids that end it, the model's and the request's. seed: the drawn one if the request had none. grammar: its
    response format's. group: those of the beam search that it is one of. rotary_offset: row of the rotation tables that turns its
    position 0. rank: the request's, until it was overtaken often enough (overtaken_count). ended_before: why nothing is left to
    generate of a sequence that is continued. Times are `time.monotonic()` seconds.
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
    rank: float = field(init=False)
    overtaken_count: int = 0
    group: BeamGroup | None = None
    rotary_offset: int = 0
    ended_before: EngineFinishReason | None = field(init=False, default=None)
    prompt_token_count: int = field(init=False, default=0)
    takes_best: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.rank = self.request.rank
        self.prompt_token_count = len(self.token_ids)
        if self.request.sampling.penalises:
            self.seen = SeenTokens(self.token_ids)
        self.takes_best = self.request.sampling.takes_best and self.grammar is None and self.request.beam_search is None
        for token_id in self.request.output_token_ids:
            # Its text was given out where the token was generated; what was held back there is held back here.
            self.ended_before = self._take_output(token_id).finish_reason

    @property
    def place(self) -> tuple[int, int]:
        """Orders sequences by arrival, and choices among themselves."""
        return self.number, self.choice_index

    @property
    def precedence(self) -> tuple[float, int, int]:
        """Orders sequences by rank, and those of equal rank by arrival: the lower, the sooner."""
        return self.rank, self.number, self.choice_index

    @property
    def output_token_count(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_token_count

    @property
    def uncomputed_token_count(self) -> int:
        """Tokens whose KV is not in the pool yet; at least 1 while the sequence lives."""
        return len(self.token_ids) - self.computed_token_count

    @property
    def owed_output_token_count(self) -> int:
        """Output tokens that may still come."""
        return self.request.stop.max_output_tokens - self.output_token_count

    @property
    def cache_salt(self) -> str:
        """The request's; what is turned otherwise is cached apart."""
        salt = self.request.cache_salt
        return f"{salt}\0{self.rotary_offset}" if self.rotary_offset else salt

    @property
    def place_count(self) -> int:
        """Places in the batch that it takes, those of beams to come included."""
        return 1 if self.group is None else self.group.place_count(self)

    @property
    def may_decode(self) -> bool:
        """Whether its last token may be computed now: that of a beam together with those of all others."""
        return len(self.token_ids) - self.computed_token_count == 1 and (self.group is None or self.group.ready)

    @property
    def has_room(self) -> bool:
        """Whether its next token goes into a block that it has, and that nobody else reads."""
        return self.computed_token_count % KV_BLOCK_TOKENS > 0 and self.group is None

    @property
    def fillable_token_count(self) -> int:
        """Tokens that may be computed before it decodes: of one of several beams all but the last."""
        several = self.group is not None and len(self.group.beams) > 1
        return self.uncomputed_token_count - several

    def missing_block_count(self, token_count: int) -> int:
        """Blocks to add so that the table covers `token_count` positions."""
        return max(blocks_for(token_count) - len(self.block_table), 0)

    @property
    def next_takes_best(self) -> bool:
        """Whether its next token is the one with the largest logit, and nothing else is asked of the row."""
        return self.takes_best and self.output_token_count >= self.request.stop.min_output_tokens

    def draw(self) -> Draw:
        """How the next token is sampled."""
        index = self.output_token_count
        held_off = tuple(self.end_token_ids) if index < self.request.stop.min_output_tokens else ()
        candidate_count = 0 if self.group is None else self.group.candidate_count
        return Draw(self.request.sampling, self.seed, index, self.seen, held_off, self.grammar, candidate_count)

    def twin(self) -> Sequence:
        """Another sequence with the same tokens, which grows by itself; without blocks, and nothing of it computed."""
        twin = copy.copy(self)
        twin.token_ids = list(self.token_ids)
        twin.seen = None if self.seen is None else self.seen.copy()
        twin.block_table, twin.prefix_keys = [], []
        twin.computed_token_count = twin.registered_block_count = 0
        twin.registered_tip = None
        return twin

    def take(self, token_id: int) -> None:
        """One more output token, and nothing but that."""
        self.token_ids.append(token_id)
        if self.seen is not None:
            self.seen.add(token_id)

    def append(self, token_id: int, now_s: float) -> AppendedToken:
        """Take the next output token and decide whether it is the last."""
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
        return self._take_output(token_id)

    def _take_output(self, token_id: int) -> AppendedToken:
        self.take(token_id)
        if token_id in self.end_token_ids:
            return AppendedToken("", EngineFinishReason.STOP)
        piece = self.detokenizer.push(token_id, may_stop=self.output_token_count > self.request.stop.min_output_tokens)
        if piece.stopped:
            return AppendedToken(piece.text, EngineFinishReason.STOP_SEQUENCE)
        if self.owed_output_token_count <= 0:
            return AppendedToken(piece.text, EngineFinishReason.LENGTH)
        return AppendedToken(piece.text, None)

    def timings(self, now_s: float) -> EngineTimings:
        """Durations up to now; a phase that was not reached takes no time."""
        scheduled_s = now_s if self.scheduled_at_s is None else self.scheduled_at_s
        first_token_s = now_s if self.first_token_at_s is None else self.first_token_at_s
        return EngineTimings(
            queue_ms=(scheduled_s - self.arrived_at_s) * 1e3,
            prefill_ms=(first_token_s - scheduled_s) * 1e3,
            decode_ms=(now_s - first_token_s) * 1e3,
        )
