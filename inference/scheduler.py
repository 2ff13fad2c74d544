"""Decides what each step computes: in-flight batching, chunked prefill, admission, preemption.

Owns the waiting queue, the running list and the sequences' use of the block pool. One step is `schedule`, then the model runner,
then `commit`. Rules, in the order in which they are applied:

1. Decoding sequences get their one token first, so a long prompt never stalls running streams; the rest of the step's token
   budget, or what of it the time allows (`StepPace`), goes to prompts in order of arrival, a long one in several chunks.
2. A waiting sequence enters in order of arrival, when its tokens and a share of the output that it and all running ones still
   owe fit the pool. Nobody overtakes one that does not fit, so nobody starves.
3. One whose next prefix block is being computed by a running sequence is passed over until that block is there: a prefix that
   fifty requests share is computed once. The wait is bounded, since the running one gets on with every step.
4. If blocks run out all the same, the youngest running sequence gives its blocks back, waits at its old place, and is computed
   again later. The oldest is never evicted for others, and `request_fault` has seen to it that it fits alone: no deadlock.
"""

from __future__ import annotations

import bisect
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from inference.errors import InvariantViolated
from inference.kv_cache import KV_BLOCK_TOKENS, BlockKey, BlockPool, PrefixMatch, blocks_for, matchable_block_count
from inference.limits import EngineLimits
from inference.sequence import Sequence


class Chunk(NamedTuple):
    """The next `token_count` uncomputed tokens of a sequence, to be computed in this step.

    copied: a KV block and the one that its content goes to before anything is computed: beams share the first and write their own.
    """

    sequence: Sequence
    token_count: int
    copied: tuple[int, int] | None = None

    @property
    def completes(self) -> bool:
        """Whether nothing is uncomputed afterwards, so that the next token is wanted."""
        return self.token_count == self.sequence.uncomputed_token_count


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
        self.chunks.append(Chunk(sequence, token_count, copied))
        self.token_count += token_count

    @property
    def decoded_count(self) -> int:
        """Sequences of which only the newest token is computed."""
        return sum(chunk.token_count == 1 for chunk in self.chunks)

    def drop(self, sequence: Sequence) -> None:
        """Compute nothing of a sequence after all."""
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        self.token_count = sum(chunk.token_count for chunk in self.chunks)


class Scheduler:
    """Queues and blocks of one engine. Not thread-safe: only the step loop uses it."""

    def __init__(self, pool: BlockPool, limits: EngineLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._waiting: list[Sequence] = []  # in order of arrival, the preempted ones at their old places
        self._running: list[Sequence] = []  # in order of arrival
        self._preemption_count = 0

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without a place, the first to enter first."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with a place, in order of arrival."""
        return tuple(self._running)

    @property
    def preemption_count(self) -> int:
        """How often a running sequence had to give its blocks back."""
        return self._preemption_count

    @property
    def waiting_is_full(self) -> bool:
        """Whether the queue takes no more. Preempted sequences do not count: they were let in before."""
        fresh = sum(sequence.cached_token_count is None for sequence in self._waiting)
        return fresh >= self._limits.waiting_sequence_count_max

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue at the place that its number gives it: at the end, unless it was long in coming."""
        sequence.prefix_keys = self._prefix_keys(sequence)
        bisect.insort(self._waiting, sequence, key=lambda waiting: waiting.place)

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
        bisect.insort(self._running, child, key=lambda running: running.place)

    def schedule(self, prompt_token_count_max: int | None = None) -> StepPlan:
        """Choose the next step's work and allocate its blocks. Empty only if there is no sequence at all.

        prompt_token_count_max: tokens of prompts if there are sequences that decode; None for as many as the step takes.
        """
        plan = StepPlan(self._limits.step_token_count_max)
        preemption_count = self._preemption_count
        filling = []
        for sequence in list(self._running):
            if not sequence.may_decode:
                filling.append(sequence)
            elif sequence.has_room and plan.token_count < plan.token_count_max:
                if self._preemption_count == preemption_count or sequence in self._running:
                    plan.add(sequence, 1)
            else:
                self._plan_chunk(plan, sequence)
        if plan.chunks and prompt_token_count_max is not None:
            plan.token_count_max = min(plan.token_count_max, plan.token_count + prompt_token_count_max)
        for sequence in filling:
            self._plan_chunk(plan, sequence)
        if self._preemption_count == preemption_count:  # who has just been preempted must not come back at once
            self._admit(plan)
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
        """Add what the budget allows of a running sequence, preempting younger ones while blocks are short."""
        budget = plan.token_count_max - plan.token_count
        token_count = min(sequence.uncomputed_token_count if sequence.may_decode else sequence.fillable_token_count, budget)
        if token_count <= 0 or sequence not in self._running:
            return
        missing = sequence.missing_block_count(sequence.computed_token_count + token_count)
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
        self._preemption_count += 1
        return self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> list[Sequence]:
        """Take all blocks back, of beams together with those of all others. Returns who has lost theirs."""
        preempted = [sequence] if sequence.group is None else list(sequence.group.beams)
        for each in preempted:
            self._running.remove(each)
            self._release(each)
        waiting = sequence if sequence.group is None else sequence.group.collapse()
        waiting.prefix_keys = self._prefix_keys(waiting)  # its own output may be found again too
        bisect.insort(self._waiting, waiting, key=lambda waiting: waiting.place)
        return preempted

    def _admit(self, plan: StepPlan) -> None:
        """Let waiting sequences enter while there are places, budget and blocks."""
        if not self._waiting:
            return
        in_progress = {key for sequence in self._running for key in self._uncomputed_keys(sequence)}
        owed = sum(self._owed_block_count(sequence, len(sequence.block_table)) for sequence in self._running)
        for sequence in list(self._waiting):
            if self._place_count() + sequence.place_count > self._limits.running_sequence_count_max:
                return
            if plan.token_count >= plan.token_count_max:
                return
            match = self._pool.match(sequence.prefix_keys, sequence.cache_salt)
            if self._next_block_is_in_progress(sequence, match, in_progress):
                continue
            wanted = self._owed_block_count(sequence, len(match.blocks)) + self._pool.evictable_count(match)
            if self._running and owed + wanted > self._pool.block_count_available:
                return
            self._enter(sequence, match, plan)
            in_progress |= self._uncomputed_keys(sequence)
            owed += self._owed_block_count(sequence, len(sequence.block_table))

    def _place_count(self) -> int:
        """Places that the running sequences take; beams that are to come have theirs already."""
        return sum(sequence.place_count for sequence in self._running)

    def _enter(self, sequence: Sequence, match: PrefixMatch, plan: StepPlan) -> None:
        self._waiting.remove(sequence)
        bisect.insort(self._running, sequence, key=lambda running: running.place)
        sequence.block_table = self._pool.hold(match)
        sequence.computed_token_count = match.token_count
        sequence.registered_block_count = len(match.blocks)
        sequence.registered_tip = match.blocks[-1] if match.blocks else None
        if sequence.cached_token_count is None:
            sequence.cached_token_count = match.token_count
            plan.entered.append(sequence)
        self._plan_chunk(plan, sequence)

    def _next_block_is_in_progress(self, sequence: Sequence, match: PrefixMatch, in_progress: set[int]) -> bool:
        matched = len(match.blocks)
        return matched < len(sequence.prefix_keys) and sequence.prefix_keys[matched].key in in_progress

    def _uncomputed_keys(self, sequence: Sequence) -> set[int]:
        """Keys of the prefix blocks that a running sequence is still to compute."""
        first = sequence.computed_token_count // KV_BLOCK_TOKENS
        return {key.key for key in sequence.prefix_keys[first:]}

    def _owed_block_count(self, sequence: Sequence, covered_block_count: int) -> int:
        """Blocks that a sequence, and beams that it is to have, still need for tokens and the reserved share of future output."""
        owed_output = min(sequence.owed_output_token_count, self._limits.owed_output_token_count_max)
        needed = blocks_for(len(sequence.token_ids) + owed_output)
        of_beams = (sequence.place_count - 1) * (needed - len(sequence.token_ids) // KV_BLOCK_TOKENS)
        return max(needed - covered_block_count, 0) + of_beams

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
        return self._pool.keys(sequence.token_ids, sequence.cache_salt, count)

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.computed_token_count = 0
        sequence.registered_block_count = 0
        sequence.registered_tip = None
