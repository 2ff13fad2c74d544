"""Reasoning tokens at a price of their own: exact in quotas, credit, ledger and receipts."""

from __future__ import annotations

import csv
import io
import random
import uuid
from collections import Counter, defaultdict
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from metering.core.models import PriceVersion, QuotaDimension, ServiceTier, TokenKind
from metering.export.deliveries import form_batches
from metering.holds.hold_connection import HoldConnection
from metering.holds.journal import Delivered, UsageJournal
from metering.holds.operations import Admit, Admitted, Expire, Extend, Extended, Settled, Void
from metering.holds.recovery import recover_journals
from metering.invoicing.months import month_report
from metering.ledger.rating import rate_all_pending
from metering.pricing.prices import RATES, TokenPrices, get_price
from metering.quotas.quota_rules import NO_WINDOW, Charge, money_scale
from metering.quotas.quotas import QuotaExceeded
from metering.reports.focus import focus_csv
from metering.reports.usage_reports import UsageFilter, usage_total
from metering.store.db import Sessions
from tests.metering.hold_world import CACHED_PICOS, INPUT_PICOS, HoldWorld, admit, settle
from tests.metering.invariants import check_export, check_invariants
from tests.metering.usage import Consumed, Customer, add_usage

PRICES = [(7, 11), (7, 2), (7, 0), (0, 5), (7, None)]  # of output and reasoning
MONEY = (
    QuotaDimension.COST_PICOS_PER_DAY,
    QuotaDimension.COST_PICOS_PER_MONTH,
    QuotaDimension.PREPAID_CREDIT_PICOS,
)
counts = st.integers(0, 400)
rates = st.integers(0, 9)

# Of input, cached input, output, embedding and reasoning, with the thousandths that a batch pays
RATE_CARDS: list[tuple[int, int, int, int, int | None, int]] = [
    (150_000, 15_000, 600_000, 20_000, 1_200_000, 500),
    (150_001, 15_003, 600_007, 0, 999_983, 1000),
    (1_000, 0, 1_000, 0, 1_000_000_000, 250),
    (2_000, 1_000, 3_000, 1_000, 0, 750),
    (2_000, 1_000, 3_000, 1_000, None, 333_000),
    (0, 0, 0, 0, 7, 1000),
]


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
    charge = Charge(prices, sent, 0, lease, 0, NO_WINDOW, NO_WINDOW)
    used = 0
    for extension in range(data.draw(st.integers(0, 3))):
        delivered = data.draw(st.integers(delivered, lease))
        known = data.draw(st.integers(known, delivered))
        held = charge.held_by(scale, lease)
        if not extension:
            charge = charge._replace(cached_input_token_count=cached)
        moved = charge.with_posting(delivered, known, NO_WINDOW)
        moved = moved._replace(leased_token_count=lease)
        used += moved.posted(scale) - charge.posted(scale)
        assert 0 <= moved.held_by(scale, lease) <= held
        charge = moved
    delivered = data.draw(st.integers(delivered, lease))
    known = data.draw(st.integers(known, delivered))

    consumed = charge.consumed_by(scale, (sent, delivered, known))

    counted = charge.cached_input_token_count
    cost = prices.cost_picos(sent, counted, delivered, reasoning_token_count=known)
    assert used + consumed == cost <= prices.worst_cost_picos(sent, lease)
    assert 0 <= consumed <= charge.held_by(scale, lease)


@given(rates, rates, rates, st.integers(0, 9_000), counts, st.data())
def test_the_largest_lease_for_some_room_is_the_largest_whose_charge_fits(
    sent_picos: int, output_picos: int, reasoning_picos: int, room: int, sent: int, data: Any
) -> None:
    prices = TokenPrices(1, "USD", sent_picos, sent_picos, output_picos, 0, reasoning_picos)
    scale, delivered = money_scale(prices), data.draw(st.integers(0, 50))
    charge = Charge(prices, sent, 0, 100, 0, NO_WINDOW, NO_WINDOW)
    if data.draw(st.booleans()):
        known = data.draw(st.integers(0, delivered))
        charge = charge.with_posting(delivered, known, NO_WINDOW)
    rule: Any = type("Rule", (), {"kind": None, "scale": lambda _, prices: money_scale(prices)})()

    largest = charge.most_output(rule, room)

    if largest is None:
        assert prices.dearest_output_picos_per_token == 0
    elif largest >= 100:
        assert charge.held_by(scale, largest) <= room < charge.held_by(scale, largest + 1)


class Usage:
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
    usages: list[Usage] = []
    refused = 0
    async with HoldConnection(world.url, uuid.uuid4()) as owner:
        run = owner.execute if remembering else lambda ops: world.run(*ops)
        for step in range(60):
            if len(usages) < 6:
                op = admit(payer, slice_tokens=chance.randint(1, 40))
                [answer] = await run([op])
                refused += isinstance(answer, QuotaExceeded)
                if isinstance(answer, Admitted):
                    usages.append(Usage(op, answer))
            for usage in chance.sample(usages, min(3, len(usages))):
                usage.go_on(chance)
                hold_id, act = usage.op.hold_id, chance.random()
                reported = usage.delivered, 4, chance.randint(1, 20), usage.reasoning
                if usage.expired or act < 0.5:
                    end = settle(hold_id, usage.delivered, reasoning_tokens=usage.reasoning)
                    [answer] = await run([end])
                    assert isinstance(answer, Settled), answer
                    usages.remove(usage)
                elif act < 0.8:
                    [answer] = await run([Extend(hold_id, *reported)])
                    if isinstance(answer, Extended):
                        usage.leased = answer.leased_token_count
                elif act < 0.9 and not usage.delivered:
                    await run([Void(hold_id)])
                    usages.remove(usage)
                elif act > 0.95:
                    world.execute("UPDATE holds SET expires_at = now() WHERE id = %s", hold_id)
                    await world.run(Expire(hold_id))
                    usage.expired = True
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


async def test_an_expired_request_bills_its_thinking_and_the_rest_later(world: HoldWorld) -> None:
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


def random_usage(chance: random.Random) -> Consumed:
    sent, output = chance.choice([0, 1, 5_000]), chance.choice([0, 1, 7, 9_999])
    is_embedding = chance.random() < 0.15
    return Consumed(
        0 if is_embedding else sent,
        0 if is_embedding else chance.randint(0, sent),
        0 if is_embedding else output,
        chance.choice(["stop", "length", "cancelled"]),
        datetime(2026, 11, chance.randint(1, 26), chance.randrange(24), tzinfo=UTC),
        embedding_token_count=chance.randint(1, 9) * is_embedding,
        reasoning_token_count=0 if is_embedding else chance.choice([0, output, output // 3]),
    )


@pytest.mark.parametrize("seed", range(3))
async def test_ledger_month_usage_focus_and_export_count_each_kind_at_its_price(
    sessions: Sessions, customer: Customer, database_url: str, seed: int
) -> None:
    """Sums by a calculator of the test's own, over random usage at prices of both tiers."""
    chance = random.Random(seed)
    counts: Counter[tuple[int, str]] = Counter()
    prices: dict[tuple[int, str], int] = {}
    async with sessions.begin() as session:
        for index, (*rates, reasoning, milli) in enumerate(RATE_CARDS):
            for tier, factor in ((ServiceTier.INTERACTIVE, 1000), (ServiceTier.BATCH, milli)):
                row = PriceVersion(
                    model=f"model-{index}",
                    currency_code="USD",
                    tier=tier,
                    effective_at=datetime(2025, 1, 1, tzinfo=UTC),
                    multiplier_milli=factor,
                    **dict(zip(RATES, (each * factor // 1000 for each in rates), strict=False)),
                    reasoning_picos_per_token=(
                        None if reasoning is None else reasoning * factor // 1000
                    ),
                )
                session.add(row)
                await session.flush()
                version = await get_price(session, row.id)
                events = [random_usage(chance) for _ in range(12)]
                await add_usage(session, customer, version, events)
                of_output = rates[2] if reasoning is None else reasoning
                for kind, rate in zip(TokenKind, (*rates[:3], of_output, rates[3]), strict=True):
                    prices[row.id, kind] = int(Decimal(rate) * factor / 1000)
                for used in events:
                    cached, thought = used.cached_input_token_count, used.reasoning_token_count
                    counts[row.id, TokenKind.INPUT] += used.input_token_count - cached
                    counts[row.id, TokenKind.CACHED_INPUT] += cached
                    counts[row.id, TokenKind.OUTPUT] += used.output_token_count - thought
                    counts[row.id, TokenKind.REASONING] += thought
                    counts[row.id, TokenKind.EMBEDDING] += used.embedding_token_count
    await rate_all_pending(sessions)
    await form_batches(sessions)
    expected = {key: count for key, count in counts.items() if count}
    total = sum(count * prices[key] for key, count in counts.items())

    async with sessions() as session:
        report = await month_report(session, organization=customer.name, month="2026-11")
        usage = await usage_total(session, UsageFilter("2026-11", customer.organization_id))
        text_of_file = "".join([each async for each in focus_csv(session, report, "Weir")])
        batches = await session.execute(
            text(
                "SELECT price_version_id, token_kind, sum(token_count) FROM meter_batches GROUP BY"
                " 1, 2"
            )
        )
        exported = {(version, kind): int(count) for version, kind, count in batches}

    lines = {(line.price_version, line.token_kind): line for line in report.lines}
    assert {key: line.token_count for key, line in lines.items()} == expected
    assert {key: line.unit_price_picos for key, line in lines.items()} == {
        key: prices[key] for key in expected
    }
    assert sum(line.amount_picos for line in report.lines) == total == usage.amount_picos
    for kind in TokenKind:
        of_kind = sum(count for (_, each), count in counts.items() if each == kind)
        assert usage.token_counts.get(kind, 0) == of_kind
    assert exported == expected
    charged: Counter[tuple[int, str]] = Counter()
    costs: dict[tuple[int, str], Decimal] = defaultdict(Decimal)
    for each in csv.DictReader(io.StringIO(text_of_file)):
        if each["x_PriceVersion"]:
            key = int(each["x_PriceVersion"]), TokenKind(each["x_TokenKind"])
            charged[key] += int(each["ConsumedQuantity"])
            costs[key] += Decimal(each["EffectiveCost"]).scaleb(12)
            assert Decimal(each["ContractedUnitPrice"]).scaleb(6) == prices[key]
    assert dict(charged) == expected
    assert {key: int(cost) for key, cost in costs.items()} == {
        key: count * prices[key] for key, count in expected.items()
    }
    check_export(database_url)
