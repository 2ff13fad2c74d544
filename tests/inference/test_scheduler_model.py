"""Scheduler and KV cache in 100,000 random acts, compared with a naive model, which must also
detect planted faults.

`WEIR_TEST_OPERATIONS=2000000 WEIR_TEST_SEEDS=41,42,43 pytest
tests/inference/test_scheduler_model.py` runs longer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from inference.core.kv_cache import BlockKey, BlockPool, CachedBlock
from inference.core.scheduler import Scheduler, StepPlan
from inference.core.sequence import Sequence as EngineSequence
from inference.engine import GenerationRequest
from inference.errors import InvariantViolated
from inference.limits import EngineLimits
from tests.inference.running import make_request
from tests.inference.scheduler_model import VOCABULARY_SIZE, ModelledEngine

OPERATIONS = int(os.environ.get("WEIR_TEST_OPERATIONS", "100000"))  # over all seeds
SEEDS = [int(seed) for seed in os.environ.get("WEIR_TEST_SEEDS", "1,2,3,4,5,6,7,8").split(",")]
# 7 blocks: long enough for chains, short enough that thousands of sequences come and go.
CONTEXT_TOKENS = 112
SALTS = ("", "group of two tenants", "tenant alone")
LIVE_MAX = 24  # sequences, several times as many as may run

CROWDED = 51  # collides, so that the order of entering is not judged and only the wait is


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Parameters of a run. Pools of one context are often exhausted, larger ones seldom."""

    block_count: int
    step_token_count_max: int
    running_sequence_count_max: int
    owed_output_token_count_max: int
    collisions: bool
    ranks: str


def circumstances(seed: int) -> Circumstances:
    """Return scarce pools, colliding hashes, and ranks of all kinds."""
    rng = random.Random(seed)
    return Circumstances(
        block_count=rng.choice([7, 8, 12]) if seed % 2 else rng.choice([24, 60]),
        step_token_count_max=rng.choice([8, 20, 64]),
        running_sequence_count_max=rng.choice([3, 8]),
        owed_output_token_count_max=rng.choice([1, 16]),
        collisions=seed % 4 == 3,
        ranks=("equal", "random", "falling")[seed % 3],
    )


def random_rank(rng: random.Random, ranks: str, number: int) -> float:
    """Steps are about as large as prompts, so that some are displaced and some are not."""
    return {
        "equal": 0.0,
        "random": rng.choice([0.0, 30.0, 60.0, 500.0]),
        "falling": number * -40.0,
    }[ranks]


def random_request(rng: random.Random, rank: float = 0.0) -> GenerationRequest:
    """Return a short or long request, mostly with a shared prefix."""
    shared = [rng.randrange(2)] * rng.choice([0, 16, 32, 48])
    own = [rng.randrange(VOCABULARY_SIZE) for _ in range(rng.choice([1, 3, 15, 16, 17, 32]))]
    prompt = shared + own
    room = CONTEXT_TOKENS - len(prompt)
    output = min(rng.choice([1, 16, rng.randrange(1, room + 1), room]), room)
    return make_request(
        prompt,
        output,
        cache_salt=rng.choice(SALTS),
        choice_count=rng.choice([1, 1, 1, 1, 2, 3]),
        rank=rank,
    )


def new_engine(seed: int) -> ModelledEngine:
    """Return an engine in the circumstances of the seed."""
    given = circumstances(seed)
    limits = EngineLimits(
        CONTEXT_TOKENS,
        step_token_count_max=given.step_token_count_max,
        running_sequence_count_max=given.running_sequence_count_max,
        waiting_sequence_count_max=LIVE_MAX,
        owed_output_token_count_max=given.owed_output_token_count_max,
    )
    hash_block = (lambda block: hash(block) % 13) if given.collisions else None
    return ModelledEngine(given.block_count, limits, hash_block)


def drive(engine: ModelledEngine, seed: int, operation_count: int) -> int:
    """Run random operations, then steps until all ended. Returns the number of requests."""
    rng = engine.rng = random.Random(seed)
    number = 0
    for _ in range(operation_count):
        act = rng.random()
        if act < 0.15 and len(engine.live) < LIVE_MAX and not engine.scheduler.waiting_is_full:
            engine.add(
                number, random_request(rng, random_rank(rng, circumstances(seed).ranks, number))
            )
            number += 1
        elif act < 0.18 and engine.live:
            engine.remove(rng.choice(list(engine.live))[0])
        elif engine.live:
            engine.step(rng.choice([None, None, 1, 5, 16]))
    while engine.live:  # terminates by the deadlines
        engine.step()
    return number


@pytest.mark.parametrize("seed", SEEDS)
def test_random_acts_are_as_the_model_says(seed: int) -> None:
    """No leak, no foreign KV, exact counts, no stall, no starvation, order kept."""
    engine = new_engine(seed)

    arrivals = drive(engine, seed, OPERATIONS // len(SEEDS))

    assert engine.pool.block_count_held == 0
    assert engine.pool.block_count_available == engine.pool.block_count_total
    # The run had the intended variety.
    assert arrivals > OPERATIONS // len(SEEDS) // 50
    assert engine.cached_token_count > 0
    assert engine.scheduler.preemption_count > 0 or circumstances(seed).block_count > 12
    assert engine.closest_deadline >= 0
    assert engine.overtaken_peak <= LIVE_MAX
    assert engine.displaced_count > 0 or circumstances(seed).ranks == "equal"


def careless_release(pool: BlockPool, block_ids: Sequence[int]) -> None:
    """Faulty release: every tenth block is kept."""
    original_release(pool, [block_id for block_id in block_ids if block_id % 10 != 3])


def find_by(*, tokens: bool, salt: bool, parent: bool) -> Callable[..., CachedBlock | None]:
    """Return a faulty lookup that trusts the hash for fields it does not compare."""

    def find(
        pool: BlockPool, key: BlockKey, before: CachedBlock | None, cache_salt: str
    ) -> CachedBlock | None:
        content = pool._index.get(key.key)
        if content is None or (parent and content.parent is not before):
            return None
        if (tokens and content.token_ids != key.token_ids) or (
            salt and content.cache_salt != cache_salt
        ):
            return None
        return content

    return find


def short_match(pool: BlockPool, keys: Sequence[BlockKey], cache_salt: str) -> list[CachedBlock]:
    """Faulty lookup: one block is missing."""
    return original_match(pool, keys, cache_salt)[:-1]


def miscounting_schedule(
    scheduler: Scheduler, prompt_token_count_max: int | None = None
) -> StepPlan:
    """Faulty count, off by one."""
    plan = original_schedule(scheduler, prompt_token_count_max)
    for sequence in plan.entered:
        if sequence.cached_token_count:
            sequence.cached_token_count -= 1
    return plan


def forgetful_schedule(scheduler: Scheduler, prompt_token_count_max: int | None = None) -> StepPlan:
    """Faulty schedule: preempted sequences go to the end of the queue."""
    plan = original_schedule(scheduler, prompt_token_count_max)
    scheduler._waiting.sort(key=lambda waiting: waiting.cached_token_count is not None)
    return plan


def unjust_schedule(scheduler: Scheduler, prompt_token_count_max: int | None = None) -> StepPlan:
    """Faulty schedule: the oldest is preempted first."""
    if len(scheduler._running) > 1 and not scheduler._pool.block_count_free:
        scheduler._running.append(scheduler._running.pop(0))
    return original_schedule(scheduler, prompt_token_count_max)


def stalling_schedule(scheduler: Scheduler, prompt_token_count_max: int | None = None) -> StepPlan:
    """Faulty schedule: while a prompt is computed, the youngest decode waits."""
    plan = original_schedule(scheduler, prompt_token_count_max)
    if len(plan.chunks) > 2 and plan.chunks[-1].token_count > 1 and plan.chunks[-1].completes:
        plan.drop(plan.chunks[1].sequence)
    return plan


def greedy_schedule(scheduler: Scheduler, prompt_token_count_max: int | None = None) -> StepPlan:
    """Faulty schedule without a budget."""
    limits, scheduler._limits = (
        scheduler._limits,
        replace(scheduler._limits, step_token_count_max=10**6),
    )
    plan = original_schedule(scheduler, prompt_token_count_max)
    scheduler._limits = limits
    return plan


def shunning_schedule(scheduler: Scheduler, prompt_token_count_max: int | None = None) -> StepPlan:
    """Faulty schedule: some never enter while there are others."""
    shunned = [sequence for sequence in scheduler._waiting if sequence.number % 10 == 7]
    others = [sequence for sequence in scheduler._waiting if sequence not in shunned]
    if shunned and (others or scheduler._running):
        scheduler._waiting[:] = others
        plan = original_schedule(scheduler, prompt_token_count_max)
        scheduler._waiting[:] = sorted(
            scheduler._waiting + shunned, key=lambda waiting: waiting.precedence[1:]
        )
        return plan
    return original_schedule(scheduler, prompt_token_count_max)


def youngest_first_schedule(
    scheduler: Scheduler, prompt_token_count_max: int | None = None
) -> StepPlan:
    """Faulty schedule: the last arrival enters first."""
    others, scheduler._waiting[:] = scheduler._waiting[:-1], scheduler._waiting[-1:]
    plan = original_schedule(scheduler, prompt_token_count_max)
    scheduler._waiting[:] = sorted(
        scheduler._waiting + others, key=lambda waiting: waiting.precedence
    )
    return plan


def eager_displaceable(
    scheduler: Scheduler, sequence: EngineSequence, *_: object
) -> list[EngineSequence]:
    """Faulty displacement: all later sequences are displaced, however close."""
    return [running for running in scheduler._running if running.rank > sequence.rank]


def late_forget(pool: BlockPool, block_id: int) -> None:
    """Faulty eviction: an evicted block can still be found."""
    pool._contents[block_id] = None


original_release, original_match, original_schedule = (
    BlockPool.release,
    BlockPool.match,
    Scheduler.schedule,
)
SCARCE, AMPLE, COLLIDING, FALLING = 1, 6, 3, 5  # seeds
FAULTS: dict[str, tuple[int, str, object, str]] = {
    "a block leaks": (
        SCARCE,
        "inference.core.kv_cache.BlockPool.release",
        careless_release,
        "leak",
    ),
    "a hash is believed without its tokens": (
        COLLIDING,
        "inference.core.kv_cache.BlockPool._find",
        find_by(tokens=False, salt=True, parent=True),
        "of another tenant|was made findable",
    ),
    "a hash is believed without its predecessor": (
        COLLIDING,
        "inference.core.kv_cache.BlockPool._find",
        find_by(tokens=True, salt=True, parent=False),
        "of another tenant|was made findable",
    ),
    "a count of blocks is off by one": (
        AMPLE,
        "inference.core.kv_cache.BlockPool.match",
        short_match,
        "longest registered prefix",
    ),
    "a count of tokens is off by one": (
        AMPLE,
        "inference.core.scheduler.Scheduler.schedule",
        miscounting_schedule,
        "cached count",
    ),
    "the last token is served too": (
        AMPLE,
        "inference.core.scheduler.matchable_block_count",
        lambda count: count // 16,
        "other blocks than|leak|chunk is empty",
    ),
    "a preempted one loses its place": (
        SCARCE,
        "inference.core.scheduler.Scheduler.schedule",
        forgetful_schedule,
        "out of order",
    ),
    "the oldest gives way": (
        SCARCE,
        "inference.core.scheduler.Scheduler.schedule",
        unjust_schedule,
        "comes after it|everybody|gets nowhere",
    ),
    "a decode stalls": (
        AMPLE,
        "inference.core.scheduler.Scheduler.schedule",
        stalling_schedule,
        "decode stalls",
    ),
    "the budget is forgotten": (
        AMPLE,
        "inference.core.scheduler.Scheduler.schedule",
        greedy_schedule,
        "budget is exceeded",
    ),
    "prompts forget their pace": (
        AMPLE,
        "inference.core.scheduler.Scheduler.schedule",
        lambda scheduler, prompt_token_count_max: original_schedule(scheduler),
        "more beside decodes than they may",
    ),
    "one waits for no reason": (
        AMPLE,
        "inference.core.scheduler.Scheduler.schedule",
        shunning_schedule,
        "comes before it",
    ),
    "a sequence starves": (
        CROWDED,
        "inference.core.scheduler.Scheduler.schedule",
        youngest_first_schedule,
        "starves",
    ),
    "ranks are forgotten": (
        FALLING,
        "inference.core.scheduler._precedence",
        lambda sequence: (0.0, sequence.number, sequence.choice_index),
        "comes before it|out of order",
    ),
    "overtaking has no end": (
        FALLING,
        "inference.core.scheduler.Scheduler._note_overtaking",
        lambda *_: None,
        "out of order|comes before it",
    ),
    "a small lead displaces": (
        FALLING,
        "inference.core.scheduler.Scheduler._displaceable",
        eager_displaceable,
        "hardly behind",
    ),
    "an evicted block is found": (
        SCARCE,
        "inference.core.kv_cache.BlockPool._forget",
        late_forget,
        "of another tenant|findable|prefix",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_model_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One planted fault each; the model itself must detect it."""
    seed, target, fault, words = FAULTS[name]
    monkeypatch.setattr(target, fault)
    monkeypatch.setattr(Scheduler, "check_conservation", lambda scheduler: None)

    with pytest.raises(AssertionError, match=words):
        drive(new_engine(seed), seed, 20_000)


def test_the_model_sees_a_salt_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults at both places that separate tenants: the first hash, the comparison."""
    monkeypatch.setattr("inference.core.kv_cache.salt_hash", lambda cache_salt: 0)
    monkeypatch.setattr(BlockPool, "_find", find_by(tokens=True, salt=False, parent=True))

    with pytest.raises(AssertionError, match="another tenant"):
        drive(new_engine(AMPLE), AMPLE, 20_000)


@pytest.mark.parametrize("lost", ["the first hash", "the comparison"])
def test_either_of_both_keeps_tenants_apart(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No KV passes between tenants while one of the two works."""
    if lost == "the first hash":
        monkeypatch.setattr("inference.core.kv_cache.salt_hash", lambda cache_salt: 0)
    else:
        monkeypatch.setattr(BlockPool, "_find", find_by(tokens=True, salt=False, parent=True))
    engine = new_engine(AMPLE)
    engine.pool.model.exact = False  # a collision between tenants is a miss, which is allowed

    drive(engine, AMPLE, 3_000)


def test_the_products_own_check_sees_a_leak_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in production after every step."""
    monkeypatch.setattr(BlockPool, "release", careless_release)

    with pytest.raises(InvariantViolated, match="readers"):
        drive(new_engine(SCARCE), SCARCE, 20_000)
