"""Independent, naive model of scheduler and KV cache, and an engine without tensors checked by it.

The model knows no hashes, queues or reservations. It records which tokens under which salt were
computed into each slot, the readers of each block, and the order in which blocks became unused. So
it predicts every answer of the pool, and judges every plan of the scheduler. Where the product
compares hashes, it compares all tokens.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from inference.core.kv_cache import BlockHash, BlockKey, BlockPool, CachedBlock
from inference.core.scheduler import Scheduler, StepPlan
from inference.core.sequence import Sequence as EngineSequence
from inference.engine import GenerationRequest
from inference.kv_blocks import KV_BLOCK_TOKENS
from inference.limits import EngineLimits, request_fault
from inference.text.detokenizer import Detokenizer, TextPiece

VOCABULARY_SIZE = 6  # tokens: few, so that random prompts share prefixes
END_TOKEN = VOCABULARY_SIZE  # never in a prompt; ends a sequence before its length does

Precedences = dict[EngineSequence, tuple[float, int, int]]
Path = tuple[str, tuple[int, ...]]  # a salt, and all tokens from the beginning of the prompt


class NoText(Detokenizer):
    """Detokenizer of sequences whose text does not matter."""

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        """Return no text."""
        return TextPiece("")

    def finish(self) -> TextPiece:
        """Return no text."""
        return TextPiece("")


@dataclass(slots=True, eq=False)
class Registered:
    """Indexed block, found by all tokens up to its end and by its predecessor."""

    path: Path
    block_id: int
    parent: Registered | None


class NaiveCache:
    """Blocks and their states as they must be, from the pool's acts alone.

    exact: whether every result is predicted. With colliding hashes misses are allowed, and hits are
    checked.
    """

    def __init__(self, block_count: int, exact: bool) -> None:
        self.exact = exact
        self.readers = [0] * block_count
        self.free = set(range(block_count))
        # With content but without readers, least recently used first.
        self.idle: dict[int, None] = {}
        self.contents: list[Registered | None] = [None] * block_count
        self.by_path: dict[Path, Registered] = {}

    def longest(self, salt: str, tokens: Sequence[int], block_count: int) -> list[int]:
        """Return the longest registered prefix, of at most this many blocks."""
        found: list[int] = []
        before: Registered | None = None
        for end in range(KV_BLOCK_TOKENS, (block_count + 1) * KV_BLOCK_TOKENS, KV_BLOCK_TOKENS):
            here = self.by_path.get((salt, tuple(tokens[:end])))
            if here is None or here.parent is not before:
                break
            found.append(here.block_id)
            before = here
        return found

    def check_match(self, salt: str, tokens: Sequence[int], block_ids: list[int]) -> None:
        """Check that the pool's match is the prompt's own prefix, and complete."""
        for index, block_id in enumerate(block_ids):
            content = self.contents[block_id]
            path = (salt, tuple(tokens[: (index + 1) * KV_BLOCK_TOKENS]))
            assert content is not None, (
                "a match is of a block without content, perhaps of another tenant"
            )
            assert content.path == path, "a match is of other tokens or of another tenant"
        expected = self.longest(salt, tokens, len(tokens) // KV_BLOCK_TOKENS)
        assert block_ids == expected if self.exact else len(block_ids) <= len(expected), (
            "the longest registered prefix is another"
        )

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add one reader to each."""
        for block_id in block_ids:
            assert block_id not in self.free, "a block without content is read"
            self.readers[block_id] += 1
            self.idle.pop(block_id, None)

    def allocate(self, count: int, block_ids: list[int]) -> None:
        """Allocate blocks, free ones first, then the least recently read."""
        assert len(block_ids) == len(set(block_ids)) == count, (
            "not as many blocks as were asked for"
        )
        assert not any(self.readers[block_id] for block_id in block_ids), (
            "a block in use was given out"
        )
        evicted = list(islice(self.idle, max(count - len(self.free), 0)))
        if self.exact:
            assert [block_id for block_id in block_ids if block_id in self.idle] == evicted, (
                "other blocks ought to be evicted"
            )
        for block_id in block_ids:
            self._forget(block_id)
            self.free.discard(block_id)
            self.idle.pop(block_id, None)
            self.readers[block_id] = 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove one reader from each; the tail becomes unused before the head."""
        for block_id in reversed(block_ids):
            self.readers[block_id] -= 1
            assert self.readers[block_id] >= 0, "a block was given back more often than taken"
            if self.readers[block_id] == 0:
                self._leave(block_id)

    def register(
        self, block_id: int, path: Path, parent: Registered | None, done: bool
    ) -> Registered | None:
        """Record a computed block. done: whether the pool made it findable."""
        if parent is not None and self.by_path.get(parent.path) is not parent:
            expected = None
        else:
            there = self.by_path.get(path)
            if there is None or there.parent is not parent:
                if not (done or self.exact):
                    return None  # its hash is taken
                if there is not None:
                    self._forget(there.block_id)  # no chain leads to it now
                    if self.readers[there.block_id] == 0:
                        del self.idle[there.block_id]
                        self.free.add(there.block_id)
                there = self.by_path[path] = self.contents[block_id] = Registered(
                    path, block_id, parent
                )
            expected = there
        assert done == (expected is not None), (
            "a block is findable that ought not to be, or the other way round"
        )
        return expected

    def check_counts(self, pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
        """Check that every block has the model's state and number of readers."""
        named = Counter(block_id for table in tables for block_id in table)
        assert all(named[block_id] == count for block_id, count in enumerate(self.readers)), (
            "blocks leak: held, but in no table"
        )
        held = sum(count > 0 for count in self.readers)
        assert pool.block_count_held == held, "blocks leak: the pool's held ones are others"
        assert pool.block_count_available == len(self.free) + len(self.idle), (
            "blocks leak: fewer are available"
        )
        if self.exact:
            assert pool.block_count_cached == len(self.idle), (
                "the pool has another number of cached blocks"
            )

    def _leave(self, block_id: int) -> None:
        if self.contents[block_id] is None:
            self.free.add(block_id)
        else:
            self.idle[block_id] = None

    def _forget(self, block_id: int) -> None:
        content = self.contents[block_id]
        if content is not None and self.by_path.get(content.path) is content:
            del self.by_path[content.path]
        self.contents[block_id] = None


class ObservedPool(BlockPool):
    """The product's pool; the model predicts each answer and is told of each act."""

    def __init__(self, block_count: int, hash_block: BlockHash | None = None) -> None:
        if hash_block is None:
            super().__init__(block_count)
        else:
            super().__init__(block_count, hash_block)
        self.model = NaiveCache(block_count, exact=hash_block is None)
        self._registered: dict[CachedBlock, Registered] = {}
        self.on_hold: Callable[[list[int]], None] = lambda block_ids: None
        self.on_release: Callable[[], None] = lambda: None

    def match(self, keys: Sequence[BlockKey], cache_salt: str) -> list[CachedBlock]:
        """Delegate, and record the call."""
        found = super().match(keys, cache_salt)
        tokens = [token_id for key in keys for token_id in key.token_ids]
        self.model.check_match(cache_salt, tokens, [block.block_id for block in found])
        return found

    def hold(self, match: Sequence[CachedBlock]) -> list[int]:
        """Delegate, and record the call."""
        block_ids = super().hold(match)
        self.on_hold(block_ids)
        self.model.hold(block_ids)
        return block_ids

    def allocate(self, block_count: int) -> list[int]:
        """Delegate, and record the call."""
        block_ids = super().allocate(block_count)
        self.model.allocate(block_count, block_ids)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Delegate, and record the call."""
        super().release(block_ids)
        self.on_release()
        self.model.release(block_ids)

    def register(
        self, block_id: int, token_ids: tuple[int, ...], cache_salt: str, parent: CachedBlock | None
    ) -> CachedBlock | None:
        """Delegate, and record the call."""
        before = None if parent is None else self._registered[parent]
        found = super().register(block_id, token_ids, cache_salt, parent)
        path = (cache_salt, (before.path[1] if before else ()) + token_ids)
        expected = self.model.register(block_id, path, before, found is not None)
        if found is not None and expected is not None:
            assert self._registered.setdefault(found, expected) is expected, (
                "another block was made findable"
            )
        return found


class ModelledEngine:
    """Scheduler and pool with a stand-in for the decoder, which records tokens and salt in each
    slot.

    So a slot's value names the whole prefix that its KV depends on, and a sequence must find its
    own prefix in every slot that it counts as computed.

    No sequence starves. Each step computes something of the first running sequence in order of
    rank, which loses nothing unless one with a lower rank enters. A sequence therefore waits at
    most for the tokens of all that lived when it arrived, and for those that had entered while it
    waited for a prefix in progress (at most as many as may run). Each later one that overtakes it
    adds the same once more, its own tokens, and those of the one that it preempted. And no more
    overtake it than may wait at once:

        steps from arrival to end <= tokens of itself and of all that live
            + (1 + overtaken) * (running_sequence_count_max + 2) * context window,  overtaken <=
            waiting_sequence_count_max
    """

    def __init__(
        self,
        block_count: int,
        limits: EngineLimits,
        hash_block: BlockHash | None = None,
    ) -> None:
        self.pool = ObservedPool(block_count, hash_block)
        self.pool.on_hold, self.pool.on_release = self._note_entering, self._note_leaving
        self.limits = limits
        self.scheduler = Scheduler(self.pool, limits)
        self.slots = [[0] * KV_BLOCK_TOKENS for _ in range(block_count)]
        self.live: dict[tuple[int, int], EngineSequence] = {}  # by number and choice
        self.deadlines: dict[EngineSequence, int] = {}  # step by which each must have ended
        # The model's count when each first entered.
        self.first_cached: dict[EngineSequence, int] = {}
        self.values: dict[EngineSequence, list[int]] = {}  # names of all prefixes of each
        self.ranks: dict[EngineSequence, float] = {}
        self.overtaken: Counter[EngineSequence] = Counter()
        self.overtaken_peak = 0
        self.displaced_count = 0
        self.entered: list[int] = []
        self.step_count = 0
        self.computed_position_count = 0
        self.cached_token_count = 0
        # Steps that were left when one ended.
        self.closest_deadline = limits.context_window_tokens * 1000
        self.rng = random.Random(0)
        self._known_running: dict[EngineSequence, None] = {}
        # Sequences that ran before this step, and were not displaced in it.
        self._undisturbed: list[EngineSequence] = []

    def add(self, number: int, request: GenerationRequest) -> None:
        """Handle the arrival of a request with all its choices."""
        assert (
            request_fault(request, self.limits, VOCABULARY_SIZE, self.pool.block_count_total)
            is None
        )
        for choice_index in range(request.choice_count):
            sequence = EngineSequence(
                number,
                request,
                seed=0,
                end_token_ids=frozenset({END_TOKEN}),
                detokenizer=NoText({}, frozenset()),
                choice_index=choice_index,
            )
            self.live[number, choice_index] = sequence
            self.values[sequence] = []
            self.ranks[sequence] = request.rank
            ahead = sum(
                len(each.token_ids) + each.owed_output_token_count for each in self.live.values()
            )
            self.deadlines[sequence] = self.step_count + ahead + self._spare
            self.scheduler.add(sequence)
        fresh = sum(sequence.cached_token_count is None for sequence in self.scheduler.waiting)
        assert self.scheduler.waiting_is_full == (fresh >= self.limits.waiting_sequence_count_max)

    def remove(self, number: int) -> None:
        """Cancel a request with all choices that still run."""
        for index in [index for index in self.live if index[0] == number]:
            self._end(self.live[index])
        self.check()

    def step(self, prompt_token_count_max: int | None = None) -> StepPlan:
        """Run one step with checks. prompt_token_count_max: see `Scheduler.schedule`."""
        before = self.scheduler.running
        decoding = [sequence for sequence in before if sequence.uncomputed_token_count == 1]
        self._known_running = dict.fromkeys(before)
        self._undisturbed = list(before)
        precedence = {sequence: self.precedence(sequence) for sequence in self.live.values()}
        plan = self.scheduler.schedule(prompt_token_count_max)
        self._judge(plan, before, decoding, prompt_token_count_max)
        self._judge_order(plan, before, precedence)
        finishing = [chunk.sequence for chunk in plan.chunks if chunk.completes]
        for chunk in plan.chunks:
            self._compute(chunk.sequence, chunk.token_count)
        self.scheduler.commit(plan)
        self.step_count += 1
        for sequence in finishing:
            token_id = (
                END_TOKEN if self.rng.random() < 0.02 else self.rng.randrange(VOCABULARY_SIZE)
            )
            if sequence.append(token_id, now_s=0.0).finish_reason is not None:
                self.closest_deadline = min(
                    self.closest_deadline, self.deadlines[sequence] - self.step_count
                )
                self._end(sequence)
        assert all(
            self.step_count <= self.deadlines[sequence] for sequence in self.live.values()
        ), "a sequence starves"
        self.check()
        return plan

    def check(self) -> None:
        """Check by the product and by the model that nothing is lost."""
        self.scheduler.check_conservation()
        self.pool.model.check_counts(
            self.pool, [sequence.block_table for sequence in self.scheduler.running]
        )

    def _judge(
        self,
        plan: StepPlan,
        before: tuple[EngineSequence, ...],
        decoding: list[EngineSequence],
        prompt_token_count_max: int | None,
    ) -> None:
        """Check that a plan keeps its budget, loses no sequence, and serves decoding ones."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert plan.token_count == sum(chunk.token_count for chunk in plan.chunks), (
            "the plan's count is not that of its chunks"
        )
        assert plan.token_count <= self.limits.step_token_count_max, "the step's budget is exceeded"
        assert len(running) <= self.limits.running_sequence_count_max, "too many run"
        rows = Counter({chunk.sequence: chunk.token_count for chunk in plan.chunks})
        assert len(rows) == len(plan.chunks), "a sequence has two chunks"
        assert all(count > 0 for count in rows.values()), "a chunk is empty"
        assert all(sequence in running for sequence in rows), "one that does not run is computed"
        gone = [sequence for sequence in before if sequence not in running]
        assert all(sequence in waiting and not sequence.block_table for sequence in gone), (
            "a preempted sequence is lost"
        )
        assert not gone or running, "everybody gave way"
        assert all(rows[sequence] == 1 for sequence in decoding if sequence in running), (
            "a running decode stalls"
        )
        cut = [chunk for chunk in plan.chunks if not chunk.completes]
        if not gone:
            budget = self.limits.step_token_count_max
            if decoding and prompt_token_count_max is not None:
                budget = min(budget, len(decoding) + prompt_token_count_max)
            assert plan.token_count <= budget, "prompts take more beside decodes than they may"
            assert len(cut) <= 1, "two prompts are cut where one would do"
            assert not cut or plan.token_count == budget, "budget is left although a prompt was cut"
        for sequence in plan.entered:
            assert sequence.cached_token_count == self.first_cached[sequence], (
                "the cached count is not what the model found"
            )
            self.cached_token_count += self.first_cached[sequence]
            self.entered.append(sequence.number)

    def _judge_order(
        self, plan: StepPlan, before: tuple[EngineSequence, ...], precedence: Precedences
    ) -> None:
        """Check the order of progress and preemption. precedence: at the start of the step."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        gone = [sequence for sequence in before if sequence not in running]
        for out in gone:
            for in_ in running:
                # It may have been overtaken for the last time just now.
                first = min(precedence[in_], self.precedence(in_))
                assert first < precedence[out], "one gave way to one that comes after it"
        computed = {chunk.sequence for chunk in plan.chunks}
        assert not running or min(running, key=precedence.__getitem__) in computed, (
            "the first gets nowhere"
        )
        assert list(waiting) == sorted(waiting, key=self.precedence), "the queue is out of order"

    def precedence(self, sequence: EngineSequence) -> tuple[float, int, int]:
        """Return the sort key: rank, unless overtaken to the limit, then arrival."""
        exhausted = self.overtaken[sequence] >= self.limits.waiting_sequence_count_max
        return -math.inf if exhausted else self.ranks[sequence], *sequence.precedence[1:]

    @property
    def _spare(self) -> int:
        return (self.limits.running_sequence_count_max + 2) * self.limits.context_window_tokens

    def _judge_entering(self, entered: EngineSequence) -> None:
        """Check that no earlier sequence is skipped without reason; count overtaking."""
        running = self.scheduler.running
        waiting = [sequence for sequence in self.live.values() if sequence not in running]
        displaced = [each for each in self._undisturbed if each not in running]
        # No sequence enters a step without free blocks, so this was the reason.
        for each in displaced:
            lead = self.ranks[each] - self.ranks[entered]
            assert lead > len(entered.request.prompt_token_ids), (
                "one that is hardly behind was displaced"
            )
            self._undisturbed.remove(each)
        self.displaced_count += len(displaced)
        for other in waiting:
            if self.pool.model.exact and self.precedence(other) < self.precedence(entered):
                assert any(self._computes_for(each, other) for each in running), (
                    "one enters before one that comes before it"
                )
        for other in (*waiting, *(each for each in running if each.uncomputed_token_count > 1)):
            if other.number < entered.number and self.precedence(entered) < self.precedence(other):
                self.overtaken[other] += 1
                self.overtaken_peak = max(self.overtaken_peak, self.overtaken[other])
                self.deadlines[other] += self._spare

    def _computes_for(self, running: EngineSequence, waiting: EngineSequence) -> bool:
        """Return whether an earlier sequence computes the next prefix block of this one."""
        salt, tokens = waiting.request.cache_salt, waiting.token_ids
        end = (
            len(self.pool.model.longest(salt, tokens, (len(tokens) - 1) // KV_BLOCK_TOKENS)) + 1
        ) * KV_BLOCK_TOKENS
        same = running.request.cache_salt == salt and running.token_ids[:end] == tokens[:end]
        return (
            same
            and running.computed_token_count < end
            and self.precedence(running) < self.precedence(waiting)
        )

    def _note_entering(self, block_ids: list[int]) -> None:
        """Check that an entered sequence got the blocks that the model predicts."""
        [sequence] = [each for each in self.scheduler.running if each not in self._known_running]
        self._known_running[sequence] = None
        self._judge_entering(sequence)
        tokens, salt = sequence.token_ids, sequence.request.cache_salt
        expected = self.pool.model.longest(salt, tokens, (len(tokens) - 1) // KV_BLOCK_TOKENS)
        if self.pool.model.exact:
            assert block_ids == expected, (
                "a sequence holds other blocks than those of its longest cached prefix"
            )
        self.first_cached.setdefault(sequence, len(block_ids) * KV_BLOCK_TOKENS)

    def _note_leaving(self) -> None:
        running = self.scheduler.running
        self._known_running = {
            sequence: None for sequence in self._known_running if sequence in running
        }

    def _compute(self, sequence: EngineSequence, token_count: int) -> None:
        """Check that all earlier positions are the sequence's own, then write the new ones."""
        values, start = self.values[sequence], sequence.computed_token_count
        value = values[-1] if values else hash((sequence.request.cache_salt, "root"))
        for token_id in sequence.token_ids[len(values) : start + token_count]:
            value = hash((value, token_id))
            values.append(value)
        for index, block_id in enumerate(sequence.block_table[: -(-start // KV_BLOCK_TOKENS)]):
            own = values[index * KV_BLOCK_TOKENS : min((index + 1) * KV_BLOCK_TOKENS, start)]
            assert self.slots[block_id][: len(own)] == own, (
                "a sequence reads KV of other tokens or of another tenant"
            )
        for position in range(start, start + token_count):
            block_id = sequence.block_table[position // KV_BLOCK_TOKENS]
            assert self.pool.model.readers[block_id] == 1, "a block that others read is written"
            self.slots[block_id][position % KV_BLOCK_TOKENS] = values[position]
        self.computed_position_count += token_count

    def _end(self, sequence: EngineSequence) -> None:
        assert sequence.cached_token_count == self.first_cached.get(sequence), (
            "the cached count changed after the first entry"
        )
        del self.live[sequence.precedence[1:]], self.deadlines[sequence], self.values[sequence]
        self.first_cached.pop(sequence, None)
        del self.ranks[sequence], self.overtaken[sequence]
        self.scheduler.remove(sequence)
