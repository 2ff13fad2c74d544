"""A limit on money that is used up, or overdrawn, refuses only what costs something."""

from __future__ import annotations

import itertools
import uuid

import pytest

from metering.core.models import QuotaDimension
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admitted, Extend, Extended, Fits, Settled, Void
from metering.holds.preauthorized_holds import has_room
from metering.quotas.quotas import QuotaExceeded
from metering.quotas.quoting import quote
from metering.store.db import create_engine, create_sessions
from tests.metering.hold_world import MODEL, HoldWorld, admit, settle
from tests.metering.invariants import check_invariants

MONEY = [QuotaDimension.COST_PICOS_PER_DAY, QuotaDimension.PREPAID_CREDIT_PICOS]
LIMIT = 1_000_000


def overdraw(world: HoldWorld, quota_id: uuid.UUID, by: int) -> None:
    """Set a limit to this much below what is used and held."""
    world.execute(
        "UPDATE quotas SET limit_value = greatest((SELECT max(used + held) FROM quota_counters"
        " WHERE quota_id = id) - %s, 0) WHERE id = %s",
        by,
        quota_id,
    )


@pytest.mark.parametrize("overdrawn_by", [0, 10**9])
@pytest.mark.parametrize("cached", [False, True], ids=["first batch", "known counters"])
@pytest.mark.parametrize("embedding", [False, True], ids=["generation", "embedding"])
@pytest.mark.parametrize("dimension", MONEY)
async def test_free_requests_pass_a_limit_on_money_that_has_no_room(
    world: HoldWorld,
    holds: HoldConnection,
    dimension: QuotaDimension,
    embedding: bool,
    cached: bool,
    overdrawn_by: int,
) -> None:
    payer = world.tenant()
    quota_id = world.quota(payer, dimension, LIMIT)
    tokens_id = world.quota(payer, QuotaDimension.TOKENS_PER_DAY, LIMIT)
    spent = admit(payer)
    await holds.execute([spent])
    await holds.execute([settle(spent.hold_id, 20)])
    world.set_price(0, 0, 0, 0)
    overdraw(world, quota_id, overdrawn_by)
    before = world.counters(quota_id)
    if cached:
        await holds.execute([admit(payer, embedding=embedding)])
        await holds.execute([admit(payer, embedding=embedding)])

    op = admit(payer, embedding=embedding)
    [admitted] = await holds.execute([op])
    if not embedding:
        [extended] = await holds.execute([Extend(op.hold_id, 20, 0, 20)])
        assert extended == Extended(40)
    [settled] = await holds.execute([settle(op.hold_id, 0 if embedding else 40)])

    assert isinstance(admitted, Admitted)
    assert isinstance(settled, Settled)
    assert settled.cost_picos == 0
    assert world.counters(quota_id)[0][0] == before[0][0]
    assert world.counters(tokens_id)[0][0] == 30 + (10 if embedding else 50)
    assert has_room(admitted)
    world.execute("UPDATE quotas SET limit_value = %s WHERE id = %s", LIMIT, quota_id)
    check_invariants(world.url)


@pytest.mark.parametrize("dimension", MONEY)
async def test_output_without_a_price_extends_a_lease_whose_input_overdraws_the_limit(
    world: HoldWorld, holds: HoldConnection, dimension: QuotaDimension
) -> None:
    world.set_price(3, 1, 0)
    payer = world.tenant()
    quota_id = world.quota(payer, dimension, LIMIT)
    op = admit(payer)
    await holds.execute([op])
    overdraw(world, quota_id, 7)

    for delivered in (20, 40, 60):
        [extended] = await holds.execute([Extend(op.hold_id, delivered, 0, 20)])
        assert extended == Extended(delivered + 20)
    [settled] = await holds.execute([settle(op.hold_id, 70)])

    assert isinstance(settled, Settled)
    assert world.counters(quota_id) == [(30, 0)]
    world.execute("UPDATE quotas SET limit_value = %s WHERE id = %s", LIMIT, quota_id)
    check_invariants(world.url)


@pytest.mark.parametrize("dimension", MONEY)
async def test_what_costs_one_pico_is_refused_without_room(
    world: HoldWorld, holds: HoldConnection, dimension: QuotaDimension
) -> None:
    """The checker of the tests above can see a refusal."""
    world.set_price(0, 0, 1)
    payer = world.tenant()
    quota_id = world.quota(payer, dimension, LIMIT)
    running = admit(payer)
    await holds.execute([running])
    overdraw(world, quota_id, 1)

    refused, extended = await holds.execute([admit(payer), Extend(running.hold_id, 20, 0, 20)])

    assert isinstance(refused, QuotaExceeded)
    assert isinstance(extended, QuotaExceeded)


@pytest.mark.parametrize("cached_tokens", [0, 4, 10])
@pytest.mark.parametrize("dimension", MONEY)
async def test_each_kind_of_token_counts_only_if_it_has_a_price(
    world: HoldWorld, dimension: QuotaDimension, cached_tokens: int
) -> None:
    """Input may turn out to be cached, so it is free beforehand only if both its prices are 0."""
    payer = world.tenant()
    quota_id = world.quota(payer, dimension, LIMIT)
    for prices in itertools.product((0, 1), repeat=4):
        world.set_price(*prices)
        input_picos, cached_picos, output_picos, embedding_picos = prices
        world.execute("UPDATE quotas SET limit_value = %s WHERE id = %s", LIMIT, quota_id)
        running, embedded = admit(payer), admit(payer, embedding=True)
        assert all(isinstance(each, Admitted) for each in await world.run(running, embedded))
        overdraw(world, quota_id, 1)

        again, embedded_again = admit(payer), admit(payer, embedding=True)
        answers = await world.run(again, embedded_again)
        [extended] = await world.run(Extend(running.hold_id, 20, cached_tokens, 20))
        [more] = await world.run(Extend(running.hold_id, 40, cached_tokens, 20))

        is_free = not (input_picos or cached_picos or output_picos)
        assert [isinstance(each, Admitted) for each in answers] == [is_free, not embedding_picos]
        # The hold for the input is larger than its cost if cached tokens are cheaper.
        saved = (10 - cached_tokens) * (cached_picos > input_picos)
        saved += cached_tokens * (input_picos > cached_picos)
        if not output_picos:
            assert (extended, more) == (Extended(40), Extended(60)), prices
        elif saved <= 1:
            assert isinstance(extended, QuotaExceeded), prices
        await world.run(*(Void(each.hold_id) for each in (embedded, again, embedded_again)))
        await world.run(settle(running.hold_id, 40, cached_tokens=cached_tokens))
    world.execute("UPDATE quotas SET limit_value = %s WHERE id = %s", LIMIT, quota_id)
    check_invariants(world.url)


@pytest.mark.parametrize("price", [0, 1])
async def test_quotes_and_checks_agree(world: HoldWorld, holds: HoldConnection, price: int) -> None:
    world.set_price(0, 0, price)
    payer = world.tenant()
    quota_id = world.quota(payer, QuotaDimension.COST_PICOS_PER_DAY, LIMIT)
    await holds.execute([admit(payer)])
    world.execute("UPDATE quota_counters SET used = used + 5 WHERE quota_id = %s", quota_id)
    world.execute("UPDATE quotas SET limit_value = 1 WHERE id = %s", quota_id)
    asking = admit(payer)
    asking.only_asks = True

    [answer] = await holds.execute([asking])
    engine = create_engine(world.url)
    async with create_sessions(engine)() as session:
        quoted = await quote(
            session,
            payer=payer,
            model=MODEL,
            input_token_count=10,
            first_slice_token_count=20,
            least_slice_token_count=1,
        )
    await engine.dispose()

    assert isinstance(answer, QuotaExceeded if price else Fits)
    assert (quoted.refusal is not None) is bool(price)
