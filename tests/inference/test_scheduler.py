"""Decisions of the scheduler, case by case; `test_scheduler_model.py` has random runs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from inference.errors import InvariantViolated
from inference.limits import EngineLimits
from tests.inference.running import make_request
from tests.inference.scheduler_model import VOCABULARY_SIZE, ModelledEngine
from tests.inference.test_scheduler_model import random_request


def test_without_pressure_the_cached_count_is_exactly_what_was_computed_before() -> None:
    """In a pool that never evicts, a set of prefixes predicts every count."""
    rng = random.Random(42)
    engine = ModelledEngine(block_count=1000, limits=EngineLimits(256, step_token_count_max=64))
    known: set[tuple[str, tuple[int, ...]]] = set()
    for number in range(150):
        request = replace(random_request(rng), choice_count=1)
        prompt, salt = request.prompt_token_ids, request.cache_salt
        expected = 0
        while expected + 16 < len(prompt) and (salt, prompt[: expected + 16]) in known:
            expected += 16
        engine.add(number, request)
        sequence = engine.live[number, 0]

        while engine.live:
            engine.step()

        assert sequence.cached_token_count == expected
        computed = sequence.token_ids[:-1]  # the last token is never computed
        known |= {(salt, tuple(computed[:end])) for end in range(16, len(computed) + 1, 16)}


def test_a_prefix_that_fifty_requests_share_is_computed_once() -> None:
    """The reference workload: 1,025 tokens in, 200 of them shared, all at once."""
    rng = random.Random(1)
    engine = ModelledEngine(block_count=50 * 74, limits=EngineLimits(2048))
    shared = [rng.randrange(VOCABULARY_SIZE) for _ in range(200)]
    for number in range(50):
        tail = [
            number % VOCABULARY_SIZE,
            number // VOCABULARY_SIZE % VOCABULARY_SIZE,
            number // VOCABULARY_SIZE**2,
        ]
        engine.add(
            number,
            make_request(
                [*shared, *tail, *(rng.randrange(VOCABULARY_SIZE) for _ in range(822))], 3
            ),
        )
    sequences = list(engine.live.values())

    while engine.live:
        engine.step()

    assert [sequence.cached_token_count for sequence in sequences] == [0] + [192] * 49
    assert engine.computed_position_count == 50 * 1025 - 49 * 192 + 50 * 2


def test_a_long_prompt_does_not_stall_running_streams() -> None:
    """While 1,500 tokens are computed in chunks, the other decodes in every step."""
    engine = ModelledEngine(block_count=400, limits=EngineLimits(2048, step_token_count_max=64))
    engine.add(0, make_request([1] * 10, 60))
    engine.step()
    running = engine.live[0, 0]
    engine.add(1, make_request([2, 3] * 750, 5))

    for _ in range(20):
        before = running.output_token_count
        plan = engine.step()

        assert running.output_token_count == before + 1
        assert plan.token_count == 64


def test_the_youngest_gives_way_and_keeps_its_position_in_the_queue() -> None:
    engine = ModelledEngine(block_count=8, limits=EngineLimits(128, owed_output_token_count_max=1))
    for number in range(3):
        engine.add(number, make_request([number] * 30, 60))
    waiting_seen = set()

    while (0, 0) in engine.live:
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

    while engine.live:
        engine.step()

    assert engine.entered == [0, 1, 2]


def test_a_lower_rank_enters_first_and_equal_ones_in_order_of_arrival() -> None:
    engine = ModelledEngine(block_count=100, limits=EngineLimits(256, running_sequence_count_max=1))
    for number, rank in enumerate([0.0, 50.0, 20.0, 50.0, 20.0]):
        engine.add(number, make_request([number] * 30, 5, rank=rank))

    while engine.live:
        engine.step()

    assert engine.entered == [0, 2, 4, 1, 3]


def test_a_lower_rank_overtakes_a_prompt_that_is_half_computed() -> None:
    """Its first token is as early as alone, although a long prompt began before it."""
    engine = ModelledEngine(block_count=400, limits=EngineLimits(2048, step_token_count_max=64))
    engine.add(0, make_request([1] * 1500, 5, rank=5000.0))
    engine.step()
    engine.add(1, make_request([2] * 100, 5, rank=0.0))
    late = engine.live[1, 0]

    engine.step()
    engine.step()

    assert late.output_token_count == 1
    assert engine.live[0, 0].computed_token_count == 64 + 28


@pytest.mark.parametrize(("block_count", "indexes"), [(100, 2), (9, 8)])
def test_a_long_sequence_displaces_the_last_one_cheaply(block_count: int, indexes: int) -> None:
    """Too few places and blocks; the displaced prefix is found in the cache again."""
    limits = EngineLimits(128, running_sequence_count_max=indexes, owed_output_token_count_max=16)
    engine = ModelledEngine(block_count, limits)
    for number in range(2):
        engine.add(number, make_request([number] * 40, 40, rank=1000.0 + number))
    for _ in range(3):
        engine.step()
    last = engine.live[1, 0]

    engine.add(2, make_request([2] * 20, 5, rank=0.0))
    engine.step()

    assert [sequence.number for sequence in engine.scheduler.running] == [2, 0]
    assert engine.scheduler.waiting == (last,)
    while (2, 0) in engine.live:
        engine.step()
    if indexes == 2:
        while last in engine.scheduler.waiting:
            engine.step()
        assert last.computed_token_count >= 40, "full blocks were kept"


@pytest.mark.parametrize("rank", [0.0, 995.0, 2000.0])
def test_a_sequence_slightly_ahead_waits(rank: float) -> None:
    engine = ModelledEngine(block_count=100, limits=EngineLimits(256, running_sequence_count_max=1))
    engine.add(0, make_request([1] * 30, 20, rank=20.0 if rank == 0.0 else 1000.0))
    engine.step()
    engine.add(1, make_request([2] * 30, 5, rank=rank))

    while engine.live:
        engine.step()

    assert engine.entered == [0, 1]
    assert engine.scheduler.preemption_count == 0


def test_no_sequence_is_overtaken_more_often_than_the_queue_is_long() -> None:
    """Each new sequence has a lower rank; the first one still gets its turn."""
    engine = ModelledEngine(
        block_count=100,
        limits=EngineLimits(256, running_sequence_count_max=1, waiting_sequence_count_max=10),
    )
    engine.add(0, make_request([0] * 30, 20, rank=0.0))
    for number in range(1, 40):
        engine.add(number, make_request([number % VOCABULARY_SIZE] * 30, 2, rank=number * -1000.0))
        while (number, 0) in engine.live and (0, 0) in engine.live:
            engine.step()
        if (0, 0) not in engine.live:
            break

    assert number == 11
    assert engine.overtaken_peak == 10


def test_a_request_does_not_wait_for_a_prefix_that_a_later_one_computes() -> None:
    """Otherwise the first would wait for the last, which gets no tokens while others precede it."""
    engine = ModelledEngine(
        block_count=200,
        limits=EngineLimits(512, step_token_count_max=16, running_sequence_count_max=8),
    )
    engine.add(0, make_request([1] * 200, 5, rank=9000.0))
    engine.step()
    engine.add(1, make_request([1] * 200, 5, rank=0.0))

    engine.step()

    assert engine.live[1, 0].computed_token_count > 0


def test_a_plan_without_work_is_reported_not_spun_on() -> None:
    """A planted fault: a running sequence with nothing to compute."""
    engine = ModelledEngine(block_count=16, limits=EngineLimits(256))
    engine.add(0, make_request([1] * 4, 50))
    engine.step()
    engine.live[0, 0].computed_token_count = len(engine.live[0, 0].token_ids)

    with pytest.raises(InvariantViolated, match="no work"):
        engine.scheduler.schedule()


def test_the_step_check_sees_a_table_that_lost_a_block() -> None:
    engine = ModelledEngine(block_count=16, limits=EngineLimits(256))
    engine.add(0, make_request([1] * 40, 50))
    engine.step()
    engine.live[0, 0].block_table.pop()

    with pytest.raises(InvariantViolated, match="3 readers, but tables have 2"):
        engine.scheduler.check_conservation()


def test_the_model_sees_foreign_kv() -> None:
    """A planted fault: one slot is overwritten behind the scheduler's back."""
    engine = ModelledEngine(block_count=16, limits=EngineLimits(256))
    engine.add(0, make_request([1] * 40, 50))
    engine.step()
    engine.slots[engine.live[0, 0].block_table[0]][3] = 0

    with pytest.raises(AssertionError, match="another tenant"):
        engine.step()
