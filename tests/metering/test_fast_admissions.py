"""Admissions in one round trip equal the slow path after any change."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metering.core.errors import InvariantViolated, KeyInvalid, RequestIdReused, RequestInFlight
from metering.core.models import QuotaDimension, QuotaSubject
from metering.holds import fast_path, slow_path
from metering.holds import read as reading
from metering.holds.hold_cache import cache_of
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admit, Admitted, Ended, HoldAnswer, Renew, Settled, Void
from metering.pricing.prices import TokenPrices
from metering.quotas import quotas
from metering.quotas.quota_rules import NO_WINDOW, Charge, Payer, QuotaRule, Weights, money_scale
from metering.quotas.quotas import Counter, Counters, QuotaExceeded
from metering.store.db import psycopg_conninfo
from tests.metering.hold_world import HoldWorld, admit, settle
from tests.metering.invariants import check_invariants

LIMIT = 100  # requests; each holds 10 + 20 tokens


@pytest.fixture
def slow_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the holds per batch that took the slow path."""
    sizes: list[int] = []
    read_and_lock = reading.read_and_lock

    async def counted(
        connection: object, hold_ids: object, admits: Sequence[Admit] = (), billed_ids: object = ()
    ) -> object:
        sizes.append(len(admits))
        return await read_and_lock(connection, hold_ids, admits, billed_ids)  # type: ignore[arg-type]

    monkeypatch.setattr(slow_path, "read_and_lock", counted)
    return sizes


async def one(holds: HoldConnection, op: Admit) -> HoldAnswer | Exception:
    [answer] = await holds.execute([op])
    return answer


def tenant(world: HoldWorld, name: str = "acme") -> tuple[Payer, dict[QuotaDimension, uuid.UUID]]:
    """Create a tenant with a limit at each level."""
    payer = world.tenant(name)
    levels = {
        QuotaDimension.CONCURRENT_REQUESTS: QuotaSubject.API_KEY,
        QuotaDimension.REQUESTS_PER_MINUTE: QuotaSubject.PROJECT,
        QuotaDimension.TOKENS_PER_MONTH: QuotaSubject.ORGANIZATION,
    }
    room = {QuotaDimension.TOKENS_PER_MONTH: 30 * LIMIT}
    return payer, {
        each: world.quota(payer, each, room.get(each, LIMIT), subject=level)
        for each, level in levels.items()
    }


async def test_the_second_admission_of_a_key_takes_the_fast_path_and_counts_the_same(
    world: HoldWorld, holds: HoldConnection, slow_batches: list[int]
) -> None:
    payer, quotas = tenant(world)

    first = await one(holds, admit(payer))
    quick = await holds.execute([admit(payer) for _ in range(3)])

    assert slow_batches == [1]
    for count, answer in enumerate([first, *quick], 1):
        assert isinstance(answer, Admitted)
        assert {(state.rule.dimension, state.used, state.held) for state in answer.quotas} == {
            (QuotaDimension.CONCURRENT_REQUESTS, 0, count),
            (QuotaDimension.REQUESTS_PER_MINUTE, count, 0),
            (QuotaDimension.TOKENS_PER_MONTH, 0, 30 * count),
        }
        assert answer.admitted_at == world.now
    assert world.counters(quotas[QuotaDimension.TOKENS_PER_MONTH]) == [(0, 120)]
    check_invariants(world.url)


def revoke(world: HoldWorld, payer: Payer) -> None:
    world.execute("UPDATE api_keys SET revoked_at = now() WHERE id = %s", payer.api_key_id)


def expire_key(world: HoldWorld, payer: Payer) -> None:
    """Let the key expire before the minute ends."""
    world.advance(1)


def lower(world: HoldWorld, payer: Payer) -> None:
    world.execute("UPDATE quotas SET limit_value = 1 WHERE subject_id = %s", payer.api_key_id)


def add_quota(world: HoldWorld, payer: Payer) -> None:
    world.quota(payer, QuotaDimension.TOKENS_PER_DAY, 5)


def fill_elsewhere(world: HoldWorld, payer: Payer) -> None:
    world.execute("UPDATE quota_counters SET used = used + %s", 30 * LIMIT)


def end_raise(world: HoldWorld, payer: Payer) -> None:
    """End a raise; more was admitted under it."""
    world.advance(10)


CHANGES: list[tuple[Callable[[HoldWorld, Payer], None], type[Exception]]] = [
    (revoke, KeyInvalid),
    (expire_key, KeyInvalid),
    (lower, QuotaExceeded),
    (add_quota, QuotaExceeded),
    (fill_elsewhere, QuotaExceeded),
    (end_raise, QuotaExceeded),
]


@pytest.mark.parametrize(
    ("change", "refusal"), CHANGES, ids=[change.__name__ for change, _ in CHANGES]
)
async def test_a_change_counts_for_the_very_next_admission(
    world: HoldWorld,
    holds: HoldConnection,
    change: Callable[[HoldWorld, Payer], None],
    refusal: type[Exception],
) -> None:
    payer, quotas = tenant(world)
    if change is expire_key:
        world.execute(
            "UPDATE api_keys SET expires_at = now() + interval '1 second' WHERE id = %s",
            payer.api_key_id,
        )
    if change is end_raise:
        world.execute(
            "UPDATE quotas SET limit_value = 1, override_limit_value = 50, override_until = now() +"
            " interval '10 seconds', override_reason = 'test' WHERE id = %s",
            quotas[QuotaDimension.CONCURRENT_REQUESTS],
        )
    for _ in range(3):
        assert isinstance(await one(holds, admit(payer)), Admitted)

    change(world, payer)

    assert isinstance(await one(holds, admit(payer)), refusal)
    assert world.hold_count() == 3


async def test_a_new_price_counts_for_the_very_next_admission(
    world: HoldWorld, holds: HoldConnection
) -> None:
    payer, _ = tenant(world)
    for _ in range(2):
        await one(holds, admit(payer))

    version = world.set_price(5, 5, 5)

    answer = await one(holds, admit(payer))
    assert isinstance(answer, Admitted)
    assert answer.prices.version == version


async def test_a_price_that_was_set_for_later_counts_from_its_time_on(
    world: HoldWorld, holds: HoldConnection
) -> None:
    payer, _ = tenant(world)
    world.execute(
        "INSERT INTO price_versions (model, currency_code, input_picos_per_token,"
        " cached_input_picos_per_token, output_picos_per_token, effective_at) VALUES ('demo',"
        " 'USD', 5, 5, 5, now() + interval '2 seconds')"
    )
    for _ in range(2):
        before = await one(holds, admit(payer))

    world.advance(2)
    after = await one(holds, admit(payer))

    assert isinstance(before, Admitted)
    assert isinstance(after, Admitted)
    assert (before.prices.input_picos_per_token, after.prices.input_picos_per_token) == (3, 5)


async def test_another_minute_counts_in_its_own_window(
    world: HoldWorld, holds: HoldConnection
) -> None:
    payer, quotas = tenant(world)
    for _ in range(2):
        await one(holds, admit(payer))

    world.advance(60)
    await one(holds, admit(payer))
    await one(holds, admit(payer))

    assert world.counters(quotas[QuotaDimension.REQUESTS_PER_MINUTE]) == [(2, 0), (2, 0)]
    check_invariants(world.url)


async def test_a_request_id_is_taken_once_also_within_one_batch(
    world: HoldWorld, holds: HoldConnection
) -> None:
    payer, _ = tenant(world)
    op = admit(payer)
    await one(holds, op)

    again = replace(op, hold_id=uuid.uuid4())
    other = replace(op, hold_id=uuid.uuid4(), payload_hash=op.payload_hash[:4] + b"x" * 28)
    twice = admit(payer)
    answers = await holds.execute(
        [again, other, twice, replace(twice, hold_id=uuid.uuid4()), admit(payer)]
    )

    assert [type(each) for each in answers] == [
        RequestInFlight,
        RequestIdReused,
        Admitted,
        RequestInFlight,
        Admitted,
    ]
    check_invariants(world.url)


async def test_a_request_repeated_during_its_settlement_neither_waits_nor_blocks(
    world: HoldWorld, holds: HoldConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would hold the counters that the settlement waits for."""
    payer, _ = tenant(world)
    ops = [admit(payer) for _ in range(3)]
    ended, may_go_on = asyncio.Event(), asyncio.Event()
    run_pipeline = vars(fast_path)["run_pipeline"]

    async def paused(connection: Any, statements: Sequence[Any]) -> Any:
        if statements[-1][0] == "COMMIT" and not ended.is_set():  # the settlement's commit
            ended.set()
            await may_go_on.wait()
        return await run_pipeline(connection, statements)

    async with HoldConnection(world.url, uuid.uuid4(), own=holds._own) as ending:
        await holds.execute(ops[:1])
        await holds.execute(ops[1:])
        await ending.execute([settle(ops[0].hold_id, 1)])
        monkeypatch.setattr(fast_path, "run_pipeline", paused)
        settling = asyncio.create_task(ending.execute([settle(ops[1].hold_id, 1)]))
        await ended.wait()
        again, other = await holds.execute([replace(ops[1], hold_id=uuid.uuid4()), admit(payer)])
        may_go_on.set()
        [settled] = await settling

    assert isinstance(again, RequestInFlight)
    assert isinstance(other, Admitted)
    assert isinstance(settled, Settled)
    check_invariants(world.url)


async def test_a_request_that_does_not_fit_is_refused_and_blocks_no_other(
    world: HoldWorld, holds: HoldConnection, slow_batches: list[int]
) -> None:
    (full, _), (roomy, _) = tenant(world, "full"), tenant(world, "roomy")
    world.execute("UPDATE quotas SET limit_value = 2 WHERE subject_id = %s", full.api_key_id)
    await holds.execute([admit(full), admit(roomy)])
    await holds.execute([admit(full), admit(roomy)])
    slow_batches.clear()

    answers = await holds.execute([admit(payer) for payer in (full, roomy, full, roomy)])

    assert [type(each) for each in answers] == [QuotaExceeded, Admitted, QuotaExceeded, Admitted]
    assert slow_batches == [2]
    check_invariants(world.url)


async def test_a_change_that_is_committed_after_a_later_one_is_seen(
    world: HoldWorld, holds: HoldConnection
) -> None:
    """The query asks for unseen rows, since commits may be out of order."""
    (first, _), (second, _) = tenant(world, "first"), tenant(world, "second")
    await holds.execute([admit(first), admit(second)])
    with psycopg.connect(psycopg_conninfo(world.url)) as slow:
        slow.execute("UPDATE quotas SET limit_value = 1 WHERE subject_id = %s", (first.api_key_id,))
        lower(world, second)
        assert isinstance(await one(holds, admit(second)), QuotaExceeded)
        # An uncommitted row does not count.
        assert isinstance(await one(holds, admit(first)), Admitted)
        slow.commit()

    assert isinstance(await one(holds, admit(first)), QuotaExceeded)


async def test_ends_of_a_hold_follow_weights_that_were_changed_while_it_ran(
    world: HoldWorld, holds: HoldConnection
) -> None:
    """After a recount: counters rewritten with the new weights while the holds are locked."""
    payer, quotas = tenant(world)
    op = admit(payer)
    await one(holds, admit(payer))
    await one(holds, op)
    quota = quotas[QuotaDimension.TOKENS_PER_MONTH]
    world.execute("UPDATE quotas SET output_weight_milli = 2000 WHERE id = %s", quota)
    world.execute("UPDATE quota_counters SET held = 2 * (10 + 2 * 20) WHERE quota_id = %s", quota)

    await holds.execute([settle(op.hold_id, 5)])

    assert world.counters(quota) == [(10 + 2 * 5, 10 + 2 * 20)]


async def test_an_end_whose_counter_is_gone_takes_no_other_down_with_it(
    world: HoldWorld, holds: HoldConnection
) -> None:
    (gone, quotas), (there, _) = tenant(world, "gone"), tenant(world, "there")
    ops = [admit(gone), admit(there)]
    await holds.execute(ops)
    world.execute(
        "DELETE FROM quota_counters WHERE quota_id = %s", quotas[QuotaDimension.REQUESTS_PER_MINUTE]
    )

    answers = await holds.execute([Void(op.hold_id) for op in ops])

    assert [type(each) for each in answers] == [InvariantViolated, Ended]
    assert world.hold_count("voided") == 1


async def test_after_a_long_silence_everything_is_read_again(
    world: HoldWorld, holds: HoldConnection, slow_batches: list[int]
) -> None:
    """Rows of changes are deleted after a while."""
    payer, _ = tenant(world)
    await holds.execute([admit(payer)])
    assert holds._connection is not None
    cache = cache_of(holds._connection)
    cache.clock = lambda: cache._changes_read_at_s + 3600
    lower(world, payer)
    world.execute("DELETE FROM rule_changes")
    world.advance(3600)

    assert isinstance(await one(holds, admit(payer)), QuotaExceeded)
    assert slow_batches == [1, 1]


async def test_a_renewal_voids_holds_that_it_does_not_name(
    world: HoldWorld,
) -> None:
    payer, quotas = tenant(world)
    process_id = uuid.uuid4()
    async with HoldConnection(world.url, process_id) as holds:
        await holds.execute([admit(payer)])
        await holds.execute([admit(payer), admit(payer)])
        await holds.execute([Renew(process_id, frozenset())])

    assert world.hold_count("voided") == 3
    assert world.counters(quotas[QuotaDimension.REQUESTS_PER_MINUTE]) == [(0, 0)]
    check_invariants(world.url, all_ended=True)


async def test_an_uncharged_counter_keeps_no_other_key_from_the_fast_path(
    world: HoldWorld, holds: HoldConnection, slow_batches: list[int]
) -> None:
    """A free request leaves no row in a quota on money."""
    world.set_price(0, 0, 0)
    free, other = world.tenant("free"), world.tenant("other")
    world.quota(free, QuotaDimension.COST_PICOS_PER_MONTH, 1000)
    world.quota(other, QuotaDimension.REQUESTS_PER_MINUTE, LIMIT)
    await holds.execute([admit(free), admit(other)])
    slow_batches.clear()

    answers = await holds.execute([admit(free), admit(other)])

    assert [type(each) for each in answers] == [Admitted, Admitted]
    assert slow_batches == [1]
    check_invariants(world.url)


async def test_an_unexpected_error_gives_each_admission_its_own_hold(
    world: HoldWorld, holds: HoldConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated fast batch would answer with the hold of another request."""
    (first, _), (second, _) = tenant(world, "first"), tenant(world, "second")
    await holds.execute([admit(first), admit(second)])
    failures = [psycopg.errors.InternalError_("tuple concurrently updated")] * 2

    write_batch = vars(fast_path)["write_batch"]

    async def failing(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return await write_batch(*arguments, **named)

    monkeypatch.setattr(fast_path, "write_batch", failing)
    ops = [admit(first), admit(second), admit(first)]
    answers = await holds.execute(ops)

    assert [each.hold_id for each in answers if isinstance(each, Admitted)] == [
        op.hold_id for op in ops
    ]
    assert world.hold_count() == 5
    check_invariants(world.url)


async def test_keys_that_were_revoked_are_forgotten(
    world: HoldWorld, holds: HoldConnection
) -> None:
    payer, _ = tenant(world)
    for _ in range(3):
        key = dataclasses.replace(payer, api_key_id=world.key(payer.project_id))
        assert isinstance(await one(holds, admit(key)), Admitted)
        revoke(world, key)
    await one(holds, admit(payer))

    assert holds._connection is not None
    cache = cache_of(holds._connection)
    assert {key for keys in cache._terms_of.values() for key in keys} == cache.terms.keys()
    assert len(cache.terms) == 1


@given(
    dimension=st.sampled_from(QuotaDimension),
    weights=st.builds(Weights, st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000)),
    prices=st.builds(
        TokenPrices,
        st.just(1),
        st.just("USD"),
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    tokens=st.tuples(st.integers(0, 5000), st.integers(0, 5000)),
)
def test_a_rule_weighs_a_new_claim_as_the_long_way_does(
    dimension: QuotaDimension, weights: Weights, prices: TokenPrices, tokens: tuple[int, int]
) -> None:
    rule = QuotaRule(
        uuid.uuid4(), QuotaSubject.API_KEY, uuid.uuid4(), "", dimension, 2**62, weights
    )
    charge = Charge(prices, tokens[0], 0, tokens[1], 0, NO_WINDOW, NO_WINDOW)
    row = Counter(0, 0)

    assert quotas.admit_whole(
        Counters(NO_WINDOW, {rule.key(NO_WINDOW): row}), [rule], money_scale(prices), *tokens
    )

    assert row.used + row.held == quotas.admission_amount(rule, charge)
