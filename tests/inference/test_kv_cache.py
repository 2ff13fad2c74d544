"""Block pool and prefix cache: hits, misses, and conservation of blocks."""

from __future__ import annotations

import pytest

from inference.core.kv_cache import BlockPool, block_keys, matchable_block_count
from inference.errors import InvariantViolated
from inference.kv_blocks import KV_BLOCK_TOKENS
from tests.inference.running import check_deeply

TOKENS = list(range(4 * KV_BLOCK_TOKENS))


def fill(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    """Hold and register all full blocks of a sequence, as if they had been computed."""
    count = len(token_ids) // KV_BLOCK_TOKENS
    table = pool.allocate(count)
    parent = None
    for index, key in enumerate(block_keys(token_ids, "", count)):
        parent = pool.register(table[index], key.token_ids, salt, parent)
    return table


def cached_tokens(pool: BlockPool, token_ids: list[int], salt: str = "") -> int:
    """Return the cached tokens that a prompt of these tokens finds."""
    keys = block_keys(token_ids, salt, matchable_block_count(len(token_ids)), pool.hash_block)
    return len(pool.match(keys, salt)) * KV_BLOCK_TOKENS


def test_a_prefix_is_found_block_by_block_and_the_last_token_is_always_left() -> None:
    pool = BlockPool(8)
    fill(pool, TOKENS)

    assert cached_tokens(pool, [*TOKENS, 99]) == 64
    assert cached_tokens(pool, TOKENS) == 48
    assert cached_tokens(pool, [*TOKENS[:40], 99]) == 32
    assert cached_tokens(pool, [99, *TOKENS]) == 0


def test_another_salt_finds_nothing() -> None:
    pool = BlockPool(8)
    fill(pool, TOKENS, salt="tenant a")

    assert cached_tokens(pool, [*TOKENS, 99], salt="tenant a") == 64
    assert cached_tokens(pool, [*TOKENS, 99], salt="tenant b") == 0


def test_a_hash_collision_never_serves_another_prompt() -> None:
    """With a constant hash, only exact content may be found."""
    pool = BlockPool(16, hash_block=lambda block: 7)
    fill(pool, TOKENS[:16])
    fill(pool, TOKENS[16:32])

    assert cached_tokens(pool, [*TOKENS[:16], 99]) == 16
    assert cached_tokens(pool, [*TOKENS[16:32], 99]) == 0
    assert cached_tokens(pool, [*TOKENS[:16], *TOKENS[:16], 99]) == 16, (
        "a block must follow what it followed before"
    )
    assert cached_tokens(pool, [*TOKENS[:16], 99], salt="other") == 0


def test_equal_second_blocks_after_different_first_ones_are_different() -> None:
    pool = BlockPool(8)
    fill(pool, [1] * 16 + [5] * 16)

    assert cached_tokens(pool, [2] * 16 + [5] * 16 + [9]) == 0


def test_the_tail_is_evicted_before_the_head() -> None:
    pool = BlockPool(4)
    pool.release(fill(pool, TOKENS))

    pool.allocate(2)

    assert cached_tokens(pool, [*TOKENS, 99]) == 32


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(4)
    old, new = [1] * 32, [2] * 32
    pool.release(fill(pool, old))
    pool.release(fill(pool, new))
    again = pool.match(block_keys(old, "", 2), "")
    pool.release(pool.hold(again))

    pool.allocate(2)

    assert cached_tokens(pool, [*old, 9]) == 32
    assert cached_tokens(pool, [*new, 9]) == 0


def test_a_block_computed_twice_is_found_once_and_the_chain_continues() -> None:
    pool = BlockPool(16)
    first = fill(pool, TOKENS[:32])
    fill(pool, TOKENS)

    match = pool.match(block_keys(TOKENS, "", 4), "")

    assert len(match) * KV_BLOCK_TOKENS == 64
    assert [block.block_id for block in match[:2]] == first


def test_content_whose_head_was_evicted_does_not_block_its_successor() -> None:
    """A tail that no chain leads to is replaced when the same prefix is computed again."""
    pool = BlockPool(4)
    head = fill(pool, TOKENS[:16])
    table = fill(pool, TOKENS[:32])  # its first block is a private copy, its second follows `head`
    pool.release(head)
    taken = pool.allocate(2)  # evicts the head; the second block still follows it
    assert cached_tokens(pool, [*TOKENS[:32], 99]) == 0
    pool.release(taken)
    pool.release(table)

    pool.release(fill(pool, TOKENS[:32]))

    assert cached_tokens(pool, [*TOKENS[:32], 99]) == 32
    check_deeply(pool, [])


def test_allocating_too_much_is_refused() -> None:
    pool = BlockPool(2)

    with pytest.raises(InvariantViolated, match="3 KV blocks requested, 2 available"):
        pool.allocate(3)


def test_releasing_twice_is_refused() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.release(table)

    with pytest.raises(InvariantViolated, match="more often than held"):
        pool.release(table)


class TestPlantedFaults:
    """Each check detects the fault that it is for."""

    def test_conservation_sees_a_lost_block(self) -> None:
        pool = BlockPool(4)
        pool.allocate(1)
        pool._free.pop()

        with pytest.raises(InvariantViolated, match="is not 4"):
            pool.check_conservation(1)

    def test_conservation_sees_a_wrong_reference_count(self) -> None:
        pool = BlockPool(4)
        table = pool.allocate(1)
        pool._reference_counts[table[0]] = 2

        with pytest.raises(InvariantViolated, match="2 readers"):
            pool.check_conservation(1)

    def test_conservation_sees_a_reader_that_vanished(self) -> None:
        pool = BlockPool(4)
        table = pool.allocate(1)
        pool._reference_counts[table[0]] = 0

        with pytest.raises(InvariantViolated, match="is not 4"):
            pool.check_conservation(1)

    def test_the_deep_check_sees_counts_swapped_between_blocks(self) -> None:
        pool = BlockPool(4)
        table = pool.allocate(2)
        pool._reference_counts[table[0]], pool._reference_counts[table[1]] = 2, 0

        with pytest.raises(InvariantViolated, match="wrong reference counts"):
            check_deeply(pool, [table])

    def test_the_deep_check_sees_a_held_block_in_the_free_list(self) -> None:
        pool = BlockPool(4)
        table = pool.allocate(1)
        pool._free.append(table[0])

        with pytest.raises(InvariantViolated, match="2 states"):
            check_deeply(pool, [table])
