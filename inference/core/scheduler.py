"""Scheduler: in-flight batching, chunked prefill, admission, preemption.

Each sequence has tokens whose KV is computed, and some whose is not. A step computes some of the
uncomputed ones. When none is left, the logits of the last one give the next token, which is
uncomputed again. So a decoding sequence has one uncomputed token, a new or preempted one has many,
and prefill, decode and recomputing are the same operation: computed tokens catch up with all.

Owns the waiting queue, the running list and the sequences' use of the block pool. One step is
`schedule`, then the model runner, then `commit`. Rules, in the order of application:

1. Decoding sequences get their one token first, so a long prompt never stalls running streams. The
   rest of the step's token budget, limited by the time allowed (`StepPace`), goes to prompts of
   running and entering sequences, in order of rank and then arrival; long ones are split.
2. Waiting sequences enter in that order, if their tokens and a share of the output still owed by
   them and all running sequences fit the pool. A sequence that does not fit blocks those after it.
3. A sequence without a place or blocks takes them from running sequences that come after it by more
   than its own prompt's tokens, the last first. Their full blocks stay in the prefix cache, so
   resuming is cheap.
4. A sequence whose next prefix block is being computed by a running sequence before it is skipped
   until the block is ready: a prefix shared by fifty requests is computed once.
5. If blocks run out anyway, the last running sequence releases its blocks, waits at its old
   position, and is recomputed later. The first is never evicted, and `request_fault` ensures that
   it fits alone: no deadlock.
6. A sequence waiting for a place or for its prompt is overtaken at most
   `waiting_sequence_count_max` times. Afterwards no later sequence precedes it, whatever the ranks:
   no starvation.

`Commitments` holds what running sequences still need, to decide on admission: KV blocks for future
tokens, and the prefix blocks they are about to compute.
"""

from __future__ import annotations

import bisect
import heapq
import math
import sys
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from inference.core.kv_cache import (
    BlockPool,
    CachedBlock,
    block_keys,
    matchable_block_count,
)
from inference.core.sequence import Sequence
from inference.errors import InvariantViolated
from inference.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from inference.limits import EngineLimits

_precedence = attrgetter("precedence")

# Prompt tokens of a step with log-probabilities: their logits take up to 80 MB with 150,000 tokens
SCORED_COUNT_MAX = 128


class Chunk(NamedTuple):
    """The next `token_count` uncomputed tokens of a sequence, computed in this step.

    With `completes`, no token is uncomputed afterwards, so the next one is sampled. `draft` are
    tokens that may follow, computed too; see `prompt_lookup.py`. `scored_count` rows, before that
    of the next token, have logits that give log-probabilities of the prompt.
    """

    sequence: Sequence
    token_count: int
    completes: bool
    draft: tuple[int, ...] = ()
    scored_count: int = 0

    @property
    def logit_row_count(self) -> int:
        """Number of rows, at the end of the chunk, whose logits are needed."""
        return self.scored_count + (1 + len(self.draft) if self.completes else 0)


@dataclass(slots=True)
class StepPlan:
    """Work of one step.

    `token_count` is the number of rows without drafts, at most `token_count_max`. `entered` are the
    sequences admitted for the first time. `scored_count` is the sum over all chunks.
    """

    token_count_max: int = sys.maxsize
    chunks: list[Chunk] = field(default_factory=list)
    entered: list[Sequence] = field(default_factory=list)
    token_count: int = 0
    scored_count: int = 0

    def add(self, sequence: Sequence, token_count: int) -> None:
        """Add `token_count` tokens of a sequence."""
        completes = sequence.computed_token_count + token_count == len(sequence.token_ids)
        scored_count = sequence.scored_token_count(token_count) if sequence.prompt_logprobs else 0
        self.chunks.append(Chunk(sequence, token_count, completes, (), scored_count))
        self.token_count += token_count
        self.scored_count += scored_count

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence from the step, because its blocks are released."""
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        self.token_count = sum(chunk.token_count for chunk in self.chunks)
        self.scored_count = sum(chunk.scored_count for chunk in self.chunks)


class Scheduler:
    """Queues and block tables of one engine. Not thread-safe: only the step loop uses it."""

    def __init__(self, pool: BlockPool, limits: EngineLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._waiting: list[Sequence] = []  # in order of precedence, including preempted ones
        self._running: list[Sequence] = []  # in order of precedence
        self.preemption_count = 0  # number of preemptions so far

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Waiting sequences, in order of admission."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Running sequences, in order of precedence; the last is preempted first."""
        return tuple(self._running)

    def counts(self) -> tuple[int, int]:
        """Count the waiting and the running sequences."""
        return len(self._waiting), len(self._running)

    @property
    def waiting_is_full(self) -> bool:
        """True if the queue is full. Preempted sequences do not count: they were admitted once."""
        limit = self._limits.waiting_sequence_count_max
        return (
            len(self._waiting) >= limit
            and sum(each.cached_token_count is None for each in self._waiting) >= limit
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a new or preempted sequence by its rank, then by its number."""
        if sequence.scores_prompt:
            sequence.prefix_keys = []
        else:  # of its own output too, which may be cached if it was preempted
            count = matchable_block_count(len(sequence.token_ids))
            sequence.prefix_keys = block_keys(
                sequence.token_ids, sequence.cache_salt, count, self._pool.hash_block
            )
        bisect.insort(self._waiting, sequence, key=_precedence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence and release its blocks."""
        queue = self._running if sequence in self._running else self._waiting
        queue.remove(sequence)
        self._pool.release(sequence.block_table)
        sequence.block_table = []

    def schedule(self, prompt_token_count_max: int | None = None) -> StepPlan:
        """Choose the next step's work and allocate its blocks. The plan is empty only if there are
        no sequences.

        `prompt_token_count_max` limits the prompt tokens while sequences decode; None for the limit
        of a step.
        """
        plan = StepPlan(self._limits.step_token_count_max)
        preemption_count = self.preemption_count
        filling = []
        for sequence in list(self._running):
            if not sequence.may_decode:
                filling.append(sequence)
            elif sequence.has_room and plan.token_count < plan.token_count_max:
                if self.preemption_count == preemption_count or sequence in self._running:
                    plan.add(sequence, 1)
            else:
                self._plan_chunk(plan, sequence)
        if plan.chunks and prompt_token_count_max is not None:
            plan.token_count_max = min(
                plan.token_count_max, plan.token_count + prompt_token_count_max
            )
        # Sequences preempted in this step must not re-enter at once.
        self._plan_prompts(
            plan, filling, list(self._waiting) if self.preemption_count == preemption_count else []
        )
        if not plan.chunks and (self._running or self._waiting):
            raise InvariantViolated("the scheduler found no work although sequences wait")
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Record the plan's chunks as computed; register full blocks in the prefix cache."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed_token_count += chunk.token_count
            if sequence.computed_token_count // KV_BLOCK_TOKENS > sequence.registered_block_count:
                self._register(sequence)

    def make_room(self, sequence: Sequence, token_count: int) -> bool:
        """Allocate blocks for a sequence's next tokens; False if others may need the blocks now."""
        covered = len(sequence.block_table)
        missing = max(blocks_for(sequence.computed_token_count + token_count) - covered, 0)
        if missing > max(self._pool.block_count_available - len(self._running), 0):
            return False
        sequence.block_table += self._pool.allocate(missing)
        return True

    def accept(self, sequence: Sequence) -> None:
        """Record that the KV of a sequence's last token was computed as part of the draft."""
        sequence.computed_token_count += 1
        if sequence.computed_token_count // KV_BLOCK_TOKENS > sequence.registered_block_count:
            self._register(sequence)

    def check_conservation(self) -> None:
        """Raise InvariantViolated unless every block is free, cached, or held by a sequence."""
        self._pool.check_conservation(sum(len(sequence.block_table) for sequence in self._running))
        if any(sequence.block_table for sequence in self._waiting):
            raise InvariantViolated("a waiting sequence holds KV blocks")

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence) -> None:
        """Plan a running sequence's tokens within the budget; preempt later ones for blocks."""
        token_count = min(sequence.uncomputed_token_count, plan.token_count_max - plan.token_count)
        if sequence.scores_prompt:
            token_count = min(token_count, SCORED_COUNT_MAX - plan.scored_count)
        if token_count <= 0 or sequence not in self._running:
            return
        missing = max(
            blocks_for(sequence.computed_token_count + token_count) - len(sequence.block_table), 0
        )
        while missing > self._pool.block_count_available:
            preempted = self._running[-1]
            self._preempt(preempted)
            plan.drop(preempted)
            if preempted is sequence:
                return
        sequence.block_table += self._pool.allocate(missing)
        plan.add(sequence, token_count)

    def rotate(self, sequence: Sequence, rotary_offset: int) -> None:
        """Change the rotary offset of a running sequence, and recompute it."""
        sequence.rotary_offset = rotary_offset
        self._requeue(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Release all blocks of a running sequence for others."""
        self.preemption_count += 1
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.release(sequence.block_table)
        sequence.block_table, sequence.registered_tip = [], None
        sequence.computed_token_count = sequence.registered_block_count = 0
        self.add(sequence)

    def _plan_prompts(
        self, plan: StepPlan, filling: list[Sequence], waiting: list[Sequence]
    ) -> None:
        """Plan prompts of running sequences within the budget, and admit waiting ones that fit."""
        entering, passed_over = set(waiting), set[Sequence]()
        commitments = Commitments(self._limits)
        for sequence in self._running if entering else ():
            commitments.add(sequence)
        for sequence in heapq.merge(filling, waiting, key=_precedence):
            if plan.token_count >= plan.token_count_max:
                return
            if sequence not in entering:
                preemption_count = self.preemption_count
                self._plan_chunk(plan, sequence)
                if self.preemption_count > preemption_count:
                    entering.clear()
                continue
            matched = self._pool.match(sequence.prefix_keys, sequence.cache_salt)
            if commitments.has_in_progress(sequence, matched):
                passed_over.add(sequence)
            elif sequence is not next(each for each in self._waiting if each not in passed_over):
                # the order changed: the sequence was displaced or must not be overtaken again
                entering.clear()
            elif not self._let_in(sequence, matched, plan, commitments):
                entering.clear()

    def _let_in(
        self,
        sequence: Sequence,
        matched: list[CachedBlock],
        plan: StepPlan,
        commitments: Commitments,
    ) -> bool:
        """Admit a waiting sequence if it fits, or if it may displace running ones."""
        missing_rows = len(self._running) + 1 - self._limits.running_sequence_count_max
        needed_blocks = commitments.owed_by(sequence, len(matched)) + self._pool.evictable_count(
            matched
        )
        missing_blocks = (
            commitments.owed_block_count + needed_blocks - self._pool.block_count_available
            if self._running
            else 0
        )
        if missing_rows > 0 or missing_blocks > 0:
            displaced = self._displaceable(
                sequence, matched, missing_rows, missing_blocks, commitments
            )
            if not displaced:
                return False
            for each in displaced:
                commitments.owed_block_count -= commitments.owed_by(each, len(each.block_table))
                self._preempt(each)
                plan.drop(each)
        self._waiting.remove(sequence)
        bisect.insort(self._running, sequence, key=_precedence)
        sequence.block_table = self._pool.hold(matched)
        sequence.computed_token_count = len(matched) * KV_BLOCK_TOKENS
        sequence.registered_block_count = len(matched)
        sequence.registered_tip = matched[-1] if matched else None
        if sequence.cached_token_count is None:
            # The cached prefix of a continued sequence may include output.
            sequence.cached_token_count = min(
                sequence.computed_token_count, sequence.prompt_token_count
            )
            plan.entered.append(sequence)
        self._note_overtaking(sequence)
        self._plan_chunk(plan, sequence)
        commitments.add(sequence)
        return True

    def _displaceable(
        self,
        sequence: Sequence,
        matched: list[CachedBlock],
        rows: int,
        blocks: int,
        commitments: Commitments,
    ) -> list[Sequence]:
        """Find the last running sequences that free enough places and blocks for a new one; empty
        if it may not displace them.
        """
        kept = {block.block_id for block in matched}
        displaced: list[Sequence] = []
        for running in reversed(self._running):
            if rows <= 0 and blocks <= 0:
                return displaced
            if running.rank <= sequence.request.rank + sequence.prompt_token_count:
                return []
            displaced.append(running)
            rows -= 1
            blocks -= commitments.owed_by(running, len(running.block_table))
            blocks -= sum(
                not self._pool.is_shared(each) and each not in kept for each in running.block_table
            )
        return displaced if rows <= 0 and blocks <= 0 else []

    def _note_overtaking(self, entered: Sequence) -> None:
        """Count the sequences just overtaken; those at the limit now precede all later ones."""
        first = entered.precedence
        after = self._waiting[bisect.bisect(self._waiting, first, key=_precedence) :]
        after += self._running[bisect.bisect(self._running, first, key=_precedence) :]
        for sequence in after:
            if sequence.number < entered.number and not (
                sequence.block_table and sequence.may_decode
            ):
                sequence.overtaken_count += 1
                if sequence.overtaken_count >= self._limits.waiting_sequence_count_max:
                    sequence.precedence = (-math.inf, *sequence.precedence[1:])
                    self._waiting.sort(key=_precedence)
                    self._running.sort(key=_precedence)

    def _register(self, sequence: Sequence) -> None:
        full_block_count = sequence.computed_token_count // KV_BLOCK_TOKENS
        while sequence.registered_block_count < full_block_count:
            index = sequence.registered_block_count
            if index > 0 and sequence.registered_tip is None:
                return  # an earlier block could not be registered, so later ones cannot be either
            tokens = tuple(
                sequence.token_ids[index * KV_BLOCK_TOKENS : (index + 1) * KV_BLOCK_TOKENS]
            )
            tip = self._pool.register(
                sequence.block_table[index], tokens, sequence.cache_salt, sequence.registered_tip
            )
            sequence.registered_tip = tip
            sequence.registered_block_count += 1


class Commitments:
    """Blocks that the running sequences will need, and prefixes that they are about to compute."""

    def __init__(self, limits: EngineLimits) -> None:
        self.owed_block_count = 0
        self._limits = limits
        # first sequence computing a prefix block, by block key
        self._in_progress: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        self.owed_block_count += self.owed_by(sequence, len(sequence.block_table))
        for block in sequence.prefix_keys[sequence.computed_token_count // KV_BLOCK_TOKENS :]:
            first = self._in_progress.setdefault(block.key, sequence)
            if sequence is not first and sequence.precedence < first.precedence:
                self._in_progress[block.key] = sequence

    def owed_by(self, sequence: Sequence, covered_block_count: int) -> int:
        """Count the blocks that a sequence still needs."""
        owed_output = min(
            sequence.owed_output_token_count, self._limits.owed_output_token_count_max
        )
        needed = blocks_for(len(sequence.token_ids) + owed_output)
        return max(needed - covered_block_count, 0)

    def has_in_progress(self, sequence: Sequence, matched: list[CachedBlock]) -> bool:
        """Return whether an earlier sequence is computing the next prefix block of a waiting one.

        Later sequences do not count: they may be blocked by the waiting one.
        """
        if len(matched) >= len(sequence.prefix_keys):
            return False
        first = self._in_progress.get(sequence.prefix_keys[len(matched)].key)
        return first is not None and first.precedence < sequence.precedence
