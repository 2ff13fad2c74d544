"""The scheduler against an independent model of what every KV position holds, through thousands of random acts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from inference.detokenizer import Detokenizer
from inference.engine import EngineFinishReason, GenerationRequest
from inference.errors import InvariantViolated
from inference.kv_cache import KV_BLOCK_TOKENS, BlockKey, BlockPool, CachedBlock
from inference.limits import EngineLimits, request_fault
from inference.scheduler import Scheduler, StepPlan
from inference.sequence import Sequence
from tests.inference.running import make_request

VOCABULARY_SIZE = 6  # tokens: so few that random prompts share prefixes


class NoText:
    """A text stream for sequences whose text does not matter."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def new_sequence(number: int, request: GenerationRequest) -> Sequence:
    return Sequence(number, request, seed=0, end_token_ids=frozenset(), detokenizer=Detokenizer(NoText(), ()))


class ModelledEngine:
    """A scheduler with a stand-in for the model: it notes in each slot which tokens under which salt were computed there.

    So a slot's value names the whole prefix that its KV depends on, and a sequence must find its own prefix in every slot that
    it counts as computed.
    """

    def __init__(
        self, block_count: int, limits: EngineLimits, hash_block: Callable[[int, tuple[int, ...]], int] | None = None
    ) -> None:
        self.pool = BlockPool(block_count) if hash_block is None else BlockPool(block_count, hash_block)
        self.limits = limits
        self.scheduler = Scheduler(self.pool, limits)
        self.slots: dict[tuple[int, int], int] = {}
        self.sequences: dict[int, Sequence] = {}
        self.steps_since_arrival: dict[int, int] = {}
        self.entered: list[int] = []
        self.computed_position_count = 0
        self.rng = random.Random(0)

    def add(self, number: int, request: GenerationRequest) -> None:
        assert request_fault(request, self.limits, VOCABULARY_SIZE, self.pool.block_count_total) is None
        sequence = new_sequence(number, request)
        self.sequences[number] = sequence
        self.steps_since_arrival[number] = 0
        self.scheduler.add(sequence)

    def remove(self, number: int) -> None:
        self.scheduler.remove(self.sequences.pop(number))
        self.check()

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan.token_count <= self.limits.step_token_count_max
        assert len(self.scheduler.running) <= self.limits.running_sequence_count_max
        for sequence in plan.entered:
            assert sequence.cached_token_count == sequence.computed_token_count
            self.entered.append(sequence.number)
        finishing = [chunk.sequence for chunk in plan.chunks if chunk.completes]
        for chunk in plan.chunks:
            self._compute(chunk.sequence, chunk.token_count)
        self.scheduler.commit(plan)
        for sequence in finishing:
            appended = sequence.append(self.rng.randrange(VOCABULARY_SIZE), now_s=0.0)
            if appended.finish_reason is EngineFinishReason.LENGTH:
                del self.sequences[sequence.number]
                self.scheduler.remove(sequence)
        for number in self.sequences:
            self.steps_since_arrival[number] += 1
        self.check()
        return plan

    def check(self) -> None:
        self.scheduler.check_conservation()
        if self.pool.block_count_total < 100:  # the deep check looks at every block
            self.pool.check_deeply(sequence.block_table for sequence in self.scheduler.running)

    def _compute(self, sequence: Sequence, token_count: int) -> None:
        """All positions before are what this sequence needs, then the new ones are written."""
        value = hash((sequence.request.cache_salt, "root"))
        start = sequence.computed_token_count
        for position, token_id in enumerate(sequence.token_ids[: start + token_count]):
            value = hash((value, token_id))
            slot = (sequence.block_table[position // KV_BLOCK_TOKENS], position % KV_BLOCK_TOKENS)
            if position < start:
                assert self.slots[slot] == value, "a sequence reads KV of other tokens or of another tenant"
            else:
                self.slots[slot] = value
        self.computed_position_count += token_count


def random_request(rng: random.Random, context_window_tokens: int) -> GenerationRequest:
    prompt_length = rng.choice([1, 15, 16, 17, 40, 100, context_window_tokens // 2])
    prefix = [rng.randrange(2)] * rng.choice([0, 16, 32, 48])
    prompt = (prefix + [rng.randrange(VOCABULARY_SIZE) for _ in range(prompt_length)])[: context_window_tokens - 1]
    output = rng.randrange(1, min(80, context_window_tokens - len(prompt)) + 1)
    return make_request(prompt, output, cache_salt=rng.choice(["", "tenant a", "tenant b"]))


@pytest.mark.parametrize("seed", range(6))
def test_random_arrivals_cancels_and_exhaustion_keep_every_promise(seed: int) -> None:
    """No leak, no foreign KV, no overtaken sequence that starves; with collisions in half of the runs."""
    rng = random.Random(seed)
    limits = EngineLimits(
        context_window_tokens=256,
        step_token_count_max=rng.choice([8, 32, 200]),
        running_sequence_count_max=8,
        owed_output_token_count_max=rng.choice([1, 16, 256]),
    )
    engine = ModelledEngine(
        block_count=rng.choice([16, 20, 48]),
        limits=limits,
        hash_block=(lambda parent, tokens: hash((parent, tokens)) % 11) if seed % 2 else None,
    )
    engine.rng = rng
    number = 0
    for _ in range(2000):
        act = rng.random()
        if act < 0.25 and len(engine.sequences) < 30:
            engine.add(number, random_request(rng, limits.context_window_tokens))
            number += 1
        elif act < 0.30 and engine.sequences:
            engine.remove(rng.choice(list(engine.sequences)))
        elif engine.sequences:
            engine.step()

    # Everything that is left gets done, within the steps that its own work and that of all others could need.
    bound = sum(sequence.request.stop.max_output_tokens + len(sequence.token_ids) for sequence in engine.sequences.values())
    for _ in range(4 * bound + 10):
        if not engine.sequences:
            break
        engine.step()

    assert not engine.sequences, "sequences starve"
    assert engine.pool.block_count_held == 0
    assert number > 200


def test_without_pressure_the_cached_count_is_exactly_what_was_computed_before() -> None:
    """One after the other in a pool that never evicts: an independent set of prefixes predicts every count."""
    rng = random.Random(42)
    engine = ModelledEngine(block_count=4000, limits=EngineLimits(256, step_token_count_max=64))
    known: set[tuple[str, tuple[int, ...]]] = set()
    for number in range(150):
        request = random_request(rng, 256)
        prompt, salt = request.prompt_token_ids, request.cache_salt
        expected = 0
        while expected + 16 < len(prompt) and (salt, prompt[: expected + 16]) in known:
            expected += 16
        engine.add(number, request)
        sequence = engine.sequences[number]

        while engine.sequences:
            engine.step()

        assert sequence.cached_token_count == expected
        computed = sequence.token_ids[:-1]  # the last token is never computed
        known |= {(salt, tuple(computed[:end])) for end in range(16, len(computed) + 1, 16)}


def test_a_prefix_that_fifty_requests_share_is_computed_once() -> None:
    """The reference workload's shape: 1,025 tokens in, of which 200 are the same for all, arriving at once."""
    rng = random.Random(1)
    engine = ModelledEngine(block_count=50 * 74, limits=EngineLimits(2048))
    shared = [rng.randrange(VOCABULARY_SIZE) for _ in range(200)]
    for number in range(50):
        tail = [number % VOCABULARY_SIZE, number // VOCABULARY_SIZE % VOCABULARY_SIZE, number // VOCABULARY_SIZE**2]
        engine.add(number, make_request([*shared, *tail, *(rng.randrange(VOCABULARY_SIZE) for _ in range(822))], 3))
    sequences = list(engine.sequences.values())

    while engine.sequences:
        engine.step()

    assert [sequence.cached_token_count for sequence in sequences] == [0] + [192] * 49
    assert engine.computed_position_count == 50 * 1025 - 49 * 192 + 50 * 2


def test_a_long_prompt_does_not_stall_running_streams() -> None:
    """While 1,500 tokens are computed in chunks, the running sequence gets a token in every step."""
    engine = ModelledEngine(block_count=400, limits=EngineLimits(2048, step_token_count_max=64))
    engine.add(0, make_request([1] * 10, 60))
    engine.step()
    running = engine.sequences[0]
    engine.add(1, make_request([2, 3] * 750, 5))

    for _ in range(20):
        before = running.output_token_count
        plan = engine.step()

        assert running.output_token_count == before + 1
        assert plan.token_count == 64


def test_the_youngest_gives_way_and_keeps_its_place_in_the_queue() -> None:
    engine = ModelledEngine(block_count=8, limits=EngineLimits(128, owed_output_token_count_max=1))
    for number in range(3):
        engine.add(number, make_request([number] * 30, 60))
    waiting_seen = set()

    while 0 in engine.sequences:
        engine.step()
        waiting_seen |= {sequence.number for sequence in engine.scheduler.waiting}

    assert waiting_seen == {1, 2}
    assert engine.scheduler.preemption_count > 0
    assert [sequence.number for sequence in engine.scheduler.waiting] == sorted(
        sequence.number for sequence in engine.scheduler.waiting
    )


def test_sequences_enter_in_order_of_arrival_even_if_a_later_one_would_fit() -> None:
    engine = ModelledEngine(block_count=16, limits=EngineLimits(256))
    engine.add(0, make_request([1] * 100, 50))
    engine.add(1, make_request([2] * 200, 50))
    engine.add(2, make_request([3] * 5, 5))

    while engine.sequences:
        engine.step()

    assert engine.entered == [0, 1, 2]


def test_a_plan_without_work_is_reported_not_spun_on() -> None:
    """A planted fault: a running sequence with nothing to compute."""
    engine = ModelledEngine(block_count=16, limits=EngineLimits(256))
    engine.add(0, make_request([1] * 4, 50))
    engine.step()
    engine.sequences[0].computed_token_count = len(engine.sequences[0].token_ids)

    with pytest.raises(InvariantViolated, match="no work"):
        engine.scheduler.schedule()


def test_the_step_check_sees_a_table_that_lost_a_block() -> None:
    engine = ModelledEngine(block_count=16, limits=EngineLimits(256))
    engine.add(0, make_request([1] * 40, 50))
    engine.step()
    engine.sequences[0].block_table.pop()

    with pytest.raises(InvariantViolated, match="3 readers, but tables have 2"):
        engine.scheduler.check_conservation()


@pytest.mark.parametrize("trusted", ["tokens and predecessor", "salt"])
def test_the_model_sees_a_cache_that_trusts_its_hash(monkeypatch: pytest.MonkeyPatch, trusted: str) -> None:
    """A planted fault: `match` believes the hash, or tokens without their salt, where prompts of two tenants collide."""

    def careless_find(pool: BlockPool, key: BlockKey, parent: CachedBlock | None, cache_salt: str) -> CachedBlock | None:
        content = pool._index.get(key.key)
        if content is None or (trusted == "salt" and content.token_ids != key.token_ids):
            return None
        return content

    monkeypatch.setattr(BlockPool, "_find", careless_find)
    engine = ModelledEngine(64, EngineLimits(256), hash_block=lambda parent, tokens: 1)
    engine.add(0, make_request([1] * 40, 5, cache_salt="tenant a"))
    while engine.sequences:
        engine.step()
    engine.add(1, make_request([1] * 40 if trusted == "salt" else [2] * 40, 5, cache_salt="tenant b"))

    with pytest.raises(AssertionError, match="another tenant"):
        engine.step()


def test_the_model_sees_foreign_kv() -> None:
    """A planted fault: one slot is overwritten behind the scheduler's back."""
    engine = ModelledEngine(block_count=16, limits=EngineLimits(256))
    engine.add(0, make_request([1] * 40, 50))
    engine.step()
    engine.slots[(engine.sequences[0].block_table[0], 3)] = 0

    with pytest.raises(AssertionError, match="another tenant"):
        engine.step()
