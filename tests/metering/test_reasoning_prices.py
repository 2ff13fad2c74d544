"""Reasoning tokens at a price of their own: exact in quotas, credit, ledger and receipts."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metering.core.models import QuotaDimension, TokenKind
from metering.holds.batch import HoldConnection
from metering.holds.journal import Delivered, UsageJournal
from metering.holds.operations import Admit, Admitted, Expire, Extend, Extended, Settled, Void
from metering.holds.recovery import recover_journals
from metering.ledger.rating import rate_all_pending
from metering.pricing.prices import TokenPrices
from metering.quotas.quota_rules import NO_WINDOW, Claim, money_scale
from metering.quotas.quotas import QuotaExceeded
from metering.store.db import Sessions
from tests.metering.hold_world import CACHED_PICOS, INPUT_PICOS, HoldWorld, admit, settle
from tests.metering.hold_world import hold_world as world_of
from tests.metering.invariants import check_invariants

PRICES = [(7, 11), (7, 2), (7, 0), (0, 5), (7, None)]  # of output and reasoning
MONEY = (
    QuotaDimension.COST_PICOS_PER_DAY,
    QuotaDimension.COST_PICOS_PER_MONTH,
    QuotaDimension.PREPAID_CREDIT_PICOS,
)
counts = st.integers(0, 400)
rates = st.integers(0, 9)


@pytest.fixture
def world(database_url: str) -> Iterator[HoldWorld]:
    with world_of(database_url) as world:
        yield world


def events(world: HoldWorld) -> list[tuple[Any, ...]]:
    """Return delivered, reasoning and billed reasoning tokens, and cost, the oldest first."""
    return world.rows(
        "SELECT delivered_token_count, reasoning_token_count, billed_reasoning_token_count,"
        " cost_picos FROM usage_events ORDER BY id"
    )


@given(rates, rates, rates, rates, st.data())
def test_a_request_never_costs_more_than_it_holds_and_in_the_end_what_its_tokens_cost(
    sent_picos: int, cached_picos: int, output_picos: int, reasoning_picos: int, data: st.DataObject
) -> None:
    """Whatever is thinking, and whenever that is known."""
    prices = TokenPrices(1, "USD", sent_picos, cached_picos, output_picos, 0, reasoning_picos)
    scale = money_scale(prices)
    sent, lease = data.draw(counts), data.draw(counts)
    cached, known, delivered = data.draw(st.integers(0, sent)), 0, 0
    claim = Claim(prices, sent, 0, lease, 0, NO_WINDOW, NO_WINDOW)
    used = 0
    for extension in range(data.draw(st.integers(0, 3))):
        delivered = data.draw(st.integers(delivered, lease))
        known = data.draw(st.integers(known, delivered))
        held = claim.charge(scale, lease)
        if not extension:
            claim = claim._replace(cached_input_token_count=cached)
        moved = claim.moved_on(delivered, known, NO_WINDOW)
        moved = moved._replace(leased_token_count=lease)
        used += moved.posted(scale) - claim.posted(scale)
        assert 0 <= moved.charge(scale, lease) <= held
        claim = moved
    delivered = data.draw(st.integers(delivered, lease))
    known = data.draw(st.integers(known, delivered))

    consumed = claim.consumed_by(scale, (sent, delivered, known))

    counted = claim.cached_input_token_count
    cost = prices.cost_picos(sent, counted, delivered, reasoning_token_count=known)
    assert used + consumed == cost <= prices.worst_cost_picos(sent, lease)
    assert 0 <= consumed <= claim.charge(scale, lease)


@given(rates, rates, rates, st.integers(0, 9_000), counts, st.data())
def test_the_largest_lease_for_some_room_is_the_largest_whose_charge_fits(
    sent_picos: int, output_picos: int, reasoning_picos: int, room: int, sent: int, data: Any
) -> None:
    prices = TokenPrices(1, "USD", sent_picos, sent_picos, output_picos, 0, reasoning_picos)
    scale, delivered = money_scale(prices), data.draw(st.integers(0, 50))
    claim = Claim(prices, sent, 0, 100, 0, NO_WINDOW, NO_WINDOW)
    if data.draw(st.booleans()):
        known = data.draw(st.integers(0, delivered))
        claim = claim.moved_on(delivered, known, NO_WINDOW)
    rule: Any = type("Rule", (), {"kind": None, "scale": lambda _, prices: money_scale(prices)})()

    largest = claim.most_output(rule, room)

    if largest is None:
        assert prices.dearest_output_picos_per_token == 0
    elif largest >= 100:
        assert claim.charge(scale, largest) <= room < claim.charge(scale, largest + 1)


class Life:
    """A request of a random workload."""

    def __init__(self, op: Admit, admitted: Admitted) -> None:
        self.op = op
        self.leased = admitted.leased_token_count
        self.delivered = self.reasoning = 0
        self.expired = False

    def go_on(self, chance: random.Random) -> None:
        """Deliver more tokens, some of which turn out to be thinking."""
        self.delivered = chance.randint(self.delivered, self.leased)
        self.reasoning = chance.randint(self.reasoning, self.delivered)


@pytest.mark.parametrize(("output", "reasoning"), PRICES)
@pytest.mark.parametrize("remembering", [False, True], ids=["locked", "guessed"])
async def test_quotas_on_money_are_exact_and_never_exceeded_whatever_is_thinking(
    world: HoldWorld, output: int, reasoning: int | None, *, remembering: bool
) -> None:
    """Requests that are extended over minutes and days, end, expire and report late."""
    world.set_price(output_picos=output, reasoning_picos=reasoning)
    chance = random.Random(f"{output}/{reasoning}")
    payer = world.tenant()
    limits = {each: world.quota(payer, each, 2_000) for each in MONEY}
    world.quota(payer, QuotaDimension.TOKENS_PER_MINUTE, 10_000)
    lives: list[Life] = []
    refused = 0
    async with HoldConnection(world.url, uuid.uuid4()) as owner:
        run = owner.execute if remembering else lambda ops: world.run(*ops)
        for step in range(60):
            if len(lives) < 6:
                op = admit(payer, slice_tokens=chance.randint(1, 40))
                [answer] = await run([op])
                refused += isinstance(answer, QuotaExceeded)
                if isinstance(answer, Admitted):
                    lives.append(Life(op, answer))
            for life in chance.sample(lives, min(3, len(lives))):
                life.go_on(chance)
                hold_id, act = life.op.hold_id, chance.random()
                told = life.delivered, 4, chance.randint(1, 20), life.reasoning
                if life.expired or act < 0.5:
                    end = settle(hold_id, life.delivered, reasoning_tokens=life.reasoning)
                    [answer] = await run([end])
                    assert isinstance(answer, Settled), answer
                    lives.remove(life)
                elif act < 0.8:
                    [answer] = await run([Extend(hold_id, *told)])
                    if isinstance(answer, Extended):
                        life.leased = answer.leased_token_count
                elif act < 0.9 and not life.delivered:
                    await run([Void(hold_id)])
                    lives.remove(life)
                elif act > 0.95:
                    world.execute("UPDATE holds SET expires_at = now() WHERE id = %s", hold_id)
                    await world.run(Expire(hold_id))
                    life.expired = True
            if step % 6 == 0:
                check_invariants(world.url)
            for dimension, quota_id in limits.items():
                for used, held in world.counters(quota_id):
                    is_late = dimension is QuotaDimension.PREPAID_CREDIT_PICOS
                    assert used + held <= 2_000 or is_late
            world.advance(chance.choice([0, 1, 20, 50]))
            if step % 20 == 19:
                world.execute(
                    "UPDATE holds SET expires_at = now() + interval '1 day' WHERE state = 'held'"
                )
                world.advance(43_000)
    assert refused, "the limits were reached"
    check_invariants(world.url)
    for count, known, billed, _ in events(world):
        assert count >= known == billed


@pytest.mark.parametrize(("output", "reasoning"), PRICES)
async def test_the_ledger_has_an_entry_for_each_kind_and_their_sum_is_the_cost(
    world: HoldWorld, sessions: Sessions, output: int, reasoning: int | None
) -> None:
    world.set_price(output_picos=output, reasoning_picos=reasoning)
    op = admit(world.tenant())
    await world.run(op)
    [settled] = await world.run(settle(op.hold_id, 15, cached_tokens=4, reasoning_tokens=9))

    await rate_all_pending(sessions)

    price = output if reasoning is None else reasoning
    cost = 6 * INPUT_PICOS + 4 * CACHED_PICOS + 6 * output + 9 * price
    assert isinstance(settled, Settled)
    assert events(world) == [(15, 9, 9, cost)]
    posted = {
        kind: (count, -amount)
        for kind, count, amount in world.rows(
            "SELECT token_kind, token_count, amount_picos FROM ledger_entries"
            " WHERE token_kind IS NOT NULL"
        )
    }
    assert posted == {
        TokenKind.INPUT: (6, 6 * INPUT_PICOS),
        TokenKind.CACHED_INPUT: (4, 4 * CACHED_PICOS),
        TokenKind.OUTPUT: (6, 6 * output),
        TokenKind.REASONING: (9, 9 * price),
    }
    check_invariants(world.url, all_ended=True)


@pytest.mark.parametrize("taken", [(15, 9), (12, 9), (9, 9), (5, 5), (7, 3), (0, 0)])
@pytest.mark.parametrize("extended", [False, True])
async def test_a_recovered_request_is_billed_at_both_prices(
    world: HoldWorld, tmp_path: Path, taken: tuple[int, int], *, extended: bool
) -> None:
    """Marks have both totals of what the transport took: outputs of several choices interleave."""
    world.set_price(output_picos=7, reasoning_picos=11)
    payer = world.tenant()
    quota_id = world.quota(payer, QuotaDimension.COST_PICOS_PER_MONTH, 10_000)
    journal = UsageJournal(tmp_path, uuid.uuid4())
    op = admit(payer)
    await world.run(op, process_id=journal.process_id)
    if extended and taken[0]:
        await world.run(
            Extend(op.hold_id, min(taken[0], 4), 4, 10, min(taken[1], 3)),
            process_id=journal.process_id,
        )
    journal.record([Delivered(op.hold_id, 10, 4, 15, 15, 9)])
    journal.took(op.hold_id, *taken)
    journal.close()

    await recover_journals(tmp_path, world.url)

    if not taken[0]:
        assert events(world) == []
        assert world.counters(quota_id) == [(0, 0)]
    else:
        delivered, known = taken
        cost = 6 * INPUT_PICOS + 4 * CACHED_PICOS + (delivered - known) * 7 + known * 11
        assert events(world) == [(delivered, known, known, cost)]
        assert world.counters(quota_id) == [(cost, 0)]
    check_invariants(world.url, all_ended=True)


async def test_an_expired_request_bills_the_thinking_of_its_last_extension_and_the_rest_later(
    world: HoldWorld,
) -> None:
    world.set_price(output_picos=7, reasoning_picos=2)
    payer = world.tenant()
    quota_id = world.quota(payer, QuotaDimension.COST_PICOS_PER_MONTH, 10_000)
    op = admit(payer)
    await world.run(op)
    await world.run(Extend(op.hold_id, 6, 0, 10, 4))
    world.advance(61)
    await world.run(Expire(op.hold_id))
    assert events(world) == [(6, 4, 4, 30 + 2 * 7 + 4 * 2)]

    await world.run(settle(op.hold_id, 12, reasoning_tokens=5))

    assert events(world)[1:] == [(6, 1, 1, 5 * 7 + 1 * 2)]
    assert world.counters(quota_id) == [(30 + 7 * 7 + 5 * 2, 0)]
    check_invariants(world.url, all_ended=True)
