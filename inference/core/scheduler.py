"""Decides what each step computes: in-flight batching, chunked prefill, admission, preemption.

Owns the waiting queue, the running list and the sequences' use of the block pool. One step is `schedule`, then the model runner,
then `commit`. Rules, in the order in which they are applied:

1. Decoding sequences get their one token first, so a long prompt never stalls running streams; the rest of the step's token
   budget, or what of it the time allows (`StepPace`), goes to prompts in order of rank and then of arrival, those that run already
   and those that enter alike; a long one in several chunks.
2. A waiting sequence enters in that order, when its tokens and a share of the output that it and all running ones still owe fit
   the pool. Nobody else enters before one that does not fit.
3. One that finds no place or no blocks takes them from running ones that come after it by more than its own prompt's tokens, the
   last one first. Their full blocks stay in the prefix cache, so that going on costs them little.
4. One whose next prefix block is being computed by a running sequence that comes before it is passed over until that block is
   there: a prefix that fifty requests share is computed once. The wait is bounded, since the running one gets on.
5. If blocks run out all the same, the last running sequence gives its blocks back, waits at its old place, and is computed again
   later. The first is never evicted for those after it, and `request_fault` has seen to it that it fits alone: no deadlock.
6. A sequence that still waits, for a place or for its prompt, is overtaken by at most as many later ones as may wait at once. From
   then on nobody comes before it who came after it, whatever the ranks: nobody starves.

`Commitments` is what running sequences will still need, by which the scheduler decides who may enter: KV blocks for tokens to come,
and the prefix blocks that they are about to compute.
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
    BlockKey,
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


class Chunk(NamedTuple):
    """The next `token_count` uncomputed tokens of a sequence, to be computed in this step.

    completes: nothing is uncomputed afterwards, so that the next token is wanted. copied: a KV block and the one that its content
    goes to before anything is computed: beams share the first and write their own.
    """

    sequence: Sequence
    token_count: int
    completes: bool
    copied: tuple[int, int] | None = None


@dataclass(slots=True)
class StepPlan:
    """What a step computes.

    token_count: rows of the step's batch, at most token_count_max. entered: sequences that left the queue for the first time.
    """

    token_count_max: int = sys.maxsize
    chunks: list[Chunk] = field(default_factory=list)
    entered: list[Sequence] = field(default_factory=list)
    token_count: int = 0

    def add(self, sequence: Sequence, token_count: int, copied: tuple[int, int] | None = None) -> None:
        """Compute so many more tokens of a sequence. copied: see `Chunk`."""
        completes = sequence.computed_token_count + token_count == len(sequence.token_ids)
        self.chunks.append(Chunk(sequence, token_count, completes, copied))
        self.token_count += token_count

    def drop(self, sequence: Sequence) -> None:
        """Compute nothing of a sequence after all."""
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        self.token_count = sum(chunk.token_count for chunk in self.chunks)


class Scheduler:
    """Queues and blocks of one engine. Not thread-safe: only the step loop uses it."""

    def __init__(self, pool: BlockPool, limits: EngineLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._waiting: list[Sequence] = []  # in order of precedence, the preempted ones too
        self._running: list[Sequence] = []  # in order of precedence
        self.preemption_count = 0  # how often a running sequence had to give its blocks back

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without a place, the first to enter first."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with a place, the one that gives it up last first."""
        return tuple(self._running)

    def counts(self) -> tuple[int, int]:
        """Sequences without a place, and with one."""
        return len(self._waiting), len(self._running)

    @property
    def waiting_is_full(self) -> bool:
        """Whether the queue takes no more. Preempted sequences do not count: they were let in before."""
        limit = self._limits.waiting_sequence_count_max
        return len(self._waiting) >= limit and sum(each.cached_token_count is None for each in self._waiting) >= limit

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue, where its rank and its number place it."""
        sequence.prefix_keys = self._prefix_keys(sequence)
        bisect.insort(self._waiting, sequence, key=_precedence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is, and take its blocks back: it finished or was cancelled."""
        queue = self._running if sequence in self._running else self._waiting
        queue.remove(sequence)
        self._release(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child of a running parent run too. It shares all blocks; who writes into one that is shared gets a copy first."""
        child.block_table = self._pool.share(parent.block_table)
        child.computed_token_count = parent.computed_token_count
        child.registered_block_count, child.registered_tip = parent.registered_block_count, parent.registered_tip
        bisect.insort(self._running, child, key=_precedence)

    def schedule(self, prompt_token_count_max: int | None = None) -> StepPlan:
        """Choose the next step's work and allocate its blocks. Empty only if there is no sequence at all.

        prompt_token_count_max: tokens of prompts if there are sequences that decode; None for as many as the step takes.
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
            plan.token_count_max = min(plan.token_count_max, plan.token_count + prompt_token_count_max)
        # Who has just been preempted must not come back at once.
        self._plan_prompts(plan, filling, list(self._waiting) if self.preemption_count == preemption_count else [])
        if not plan.chunks and (self._running or self._waiting):
            raise InvariantViolated("the scheduler found no work although sequences wait")
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Note that the plan's chunks are computed: their full blocks become findable for others."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed_token_count += chunk.token_count
            if sequence.computed_token_count // KV_BLOCK_TOKENS > sequence.registered_block_count:
                self._register(sequence)

    def check_conservation(self) -> None:
        """Raise `InvariantViolated` unless every block is free, cached or held, and held by a running sequence."""
        self._pool.check_conservation(sum(len(sequence.block_table) for sequence in self._running))
        if any(sequence.block_table for sequence in self._waiting):
            raise InvariantViolated("a waiting sequence holds KV blocks")

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence) -> None:
        """Add what the budget allows of a running sequence, preempting those after it while blocks are short."""
        token_count = min(sequence.plannable_token_count, plan.token_count_max - plan.token_count)
        if token_count <= 0 or sequence not in self._running:
            return
        missing = max(blocks_for(sequence.computed_token_count + token_count) - len(sequence.block_table), 0)
        while missing + self._writes_shared_block(sequence) > self._pool.block_count_available:
            preempted = self._preempt(self._running[-1])
            for each in preempted:
                plan.drop(each)
            if sequence in preempted:
                return
        copied = self._own_last_block(sequence) if self._writes_shared_block(sequence) else None
        sequence.block_table += self._pool.allocate(missing)
        plan.add(sequence, token_count, copied)

    def _writes_shared_block(self, sequence: Sequence) -> bool:
        """Whether its next token goes into a block that another beam reads as well."""
        if sequence.group is None:
            return False
        index, slot = divmod(sequence.computed_token_count, KV_BLOCK_TOKENS)
        return slot > 0 and self._pool.is_shared(sequence.block_table[index])

    def _own_last_block(self, sequence: Sequence) -> tuple[int, int]:
        """Give it a block in place of the shared one that it is to write; which one, and by which."""
        *others, shared = sequence.block_table
        [own] = self._pool.allocate(1)
        self._pool.release([shared])
        sequence.block_table = [*others, own]  # a new list: a table that others have seen only grows
        return shared, own

    def turn(self, sequence: Sequence, rotary_offset: int) -> None:
        """Turn all positions of a running sequence otherwise, and of all beams of its group: they are to be computed anew."""
        for each in [sequence] if sequence.group is None else sequence.group.beams:
            each.rotary_offset = rotary_offset
        self._requeue(sequence)

    def _preempt(self, sequence: Sequence) -> list[Sequence]:
        """Take all blocks back, since others want them. Returns who has lost theirs."""
        self.preemption_count += 1
        return self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> list[Sequence]:
        """Take all blocks back, of beams together with those of all others. Returns who has lost theirs."""
        preempted = [sequence] if sequence.group is None else list(sequence.group.beams)
        for each in preempted:
            self._running.remove(each)
            self._release(each)
        waiting = sequence if sequence.group is None else sequence.group.collapse()
        waiting.prefix_keys = self._prefix_keys(waiting)  # its own output may be found again too
        bisect.insort(self._waiting, waiting, key=_precedence)
        return preempted

    def _plan_prompts(self, plan: StepPlan, filling: list[Sequence], waiting: list[Sequence]) -> None:
        """Compute what the budget allows of prompts that run, and let waiting ones enter while there are places and blocks."""
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
                entering.clear()  # another is next by now: it was displaced, or overtaken for the last time
            elif not self._let_in(sequence, matched, plan, commitments):
                entering.clear()

    def _let_in(self, sequence: Sequence, matched: list[CachedBlock], plan: StepPlan, commitments: Commitments) -> bool:
        """Let a waiting sequence enter, if there is room or if it may take that of others."""
        missing_places = commitments.place_count + sequence.place_count - self._limits.running_sequence_count_max
        wanted = commitments.owed_by(sequence, len(matched)) + self._pool.evictable_count(matched)
        missing_blocks = commitments.owed_block_count + wanted - self._pool.block_count_available if self._running else 0
        if missing_places > 0 or missing_blocks > 0:
            displaced = self._displaceable(sequence, matched, missing_places, missing_blocks, commitments)
            if not displaced:
                return False
            for each in displaced:
                commitments.owed_block_count -= commitments.owed_by(each, len(each.block_table))
                commitments.place_count -= each.place_count
                self._preempt(each)
                plan.drop(each)
        self._enter(sequence, matched, plan)
        commitments.add(sequence)
        return True

    def _displaceable(
        self, sequence: Sequence, matched: list[CachedBlock], places: int, blocks: int, commitments: Commitments
    ) -> list[Sequence]:
        """The last running sequences that give so many places and blocks, if a waiting one may take these; else nobody.

        Beams stay: they would have to be computed anew, all of them.
        """
        kept = {block.block_id for block in matched}
        displaced: list[Sequence] = []
        for running in reversed(self._running):
            if places <= 0 and blocks <= 0:
                return displaced
            if running.rank <= sequence.request.rank + sequence.prompt_token_count:
                return []
            if running.group is None:
                displaced.append(running)
                places -= 1
                blocks -= commitments.owed_by(running, len(running.block_table))
                blocks -= sum(not self._pool.is_shared(each) and each not in kept for each in running.block_table)
        return displaced if places <= 0 and blocks <= 0 else []

    def _enter(self, sequence: Sequence, matched: list[CachedBlock], plan: StepPlan) -> None:
        self._waiting.remove(sequence)
        bisect.insort(self._running, sequence, key=_precedence)
        sequence.block_table = self._pool.hold(matched)
        sequence.computed_token_count = len(matched) * KV_BLOCK_TOKENS
        sequence.registered_block_count = len(matched)
        sequence.registered_tip = matched[-1] if matched else None
        if sequence.cached_token_count is None:
            # Of a sequence that is continued output may be found too.
            sequence.cached_token_count = min(sequence.computed_token_count, sequence.prompt_token_count)
            plan.entered.append(sequence)
        self._note_overtaking(sequence)
        self._plan_chunk(plan, sequence)

    def _note_overtaking(self, entered: Sequence) -> None:
        """Count for whom a later one has entered first; who was overtaken often enough comes before all that follow."""
        first = entered.precedence
        after = self._waiting[bisect.bisect(self._waiting, first, key=_precedence) :]
        after += self._running[bisect.bisect(self._running, first, key=_precedence) :]
        for sequence in after:
            if sequence.number < entered.number and not (sequence.block_table and sequence.may_decode):
                sequence.overtaken_count += 1
                if sequence.overtaken_count >= self._limits.waiting_sequence_count_max:
                    sequence.rank = -math.inf
                    self._waiting.sort(key=_precedence)
                    self._running.sort(key=_precedence)

    def _register(self, sequence: Sequence) -> None:
        full_block_count = sequence.computed_token_count // KV_BLOCK_TOKENS
        while sequence.registered_block_count < full_block_count:
            index = sequence.registered_block_count
            if index > 0 and sequence.registered_tip is None:
                return  # an earlier block could not be made findable, so nothing after it can
            tokens = tuple(sequence.token_ids[index * KV_BLOCK_TOKENS : (index + 1) * KV_BLOCK_TOKENS])
            tip = self._pool.register(sequence.block_table[index], tokens, sequence.cache_salt, sequence.registered_tip)
            sequence.registered_tip = tip
            sequence.registered_block_count += 1

    def _prefix_keys(self, sequence: Sequence) -> list[BlockKey]:
        count = matchable_block_count(len(sequence.token_ids))
        return block_keys(sequence.token_ids, sequence.cache_salt, count, self._pool.hash_block)

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.computed_token_count = 0
        sequence.registered_block_count = 0
        sequence.registered_tip = None


class Commitments:
    """Those of the sequences that were added."""

    def __init__(self, limits: EngineLimits) -> None:
        self.owed_block_count = 0
        self.place_count = 0  # with places of beams that are to come
        self._limits = limits
        self._in_progress: dict[int, Sequence] = {}  # the first that computes a prefix block, by its key

    def add(self, sequence: Sequence) -> None:
        self.owed_block_count += self.owed_by(sequence, len(sequence.block_table))
        self.place_count += sequence.place_count
        for block in sequence.prefix_keys[sequence.computed_token_count // KV_BLOCK_TOKENS :]:
            first = self._in_progress.setdefault(block.key, sequence)
            if sequence is not first and sequence.precedence < first.precedence:
                self._in_progress[block.key] = sequence

    def owed_by(self, sequence: Sequence, covered_block_count: int) -> int:
        """Blocks that a sequence, and beams that it is to have, still need for tokens and the reserved share of future output."""
        owed_output = min(sequence.owed_output_token_count, self._limits.owed_output_token_count_max)
        needed = blocks_for(len(sequence.token_ids) + owed_output)
        of_beams = (sequence.place_count - 1) * (needed - len(sequence.token_ids) // KV_BLOCK_TOKENS)
        return max(needed - covered_block_count, 0) + of_beams

    def has_in_progress(self, sequence: Sequence, matched: list[CachedBlock]) -> bool:
        """Whether the next prefix block of a waiting sequence is being computed by one that comes before it.

        One that comes after it does not count: that one may get on only when this one has.
        """
        if len(matched) >= len(sequence.prefix_keys):
            return False
        first = self._in_progress.get(sequence.prefix_keys[len(matched)].key)
        return first is not None and first.precedence < sequence.precedence
