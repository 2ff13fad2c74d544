"""Months under a plan equal a model that prices every single token."""

from __future__ import annotations

import uuid
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metering.core.errors import InvalidValue
from metering.core.models import ServiceTier, TokenKind
from metering.plans.plans import (
    Allowance,
    LineKind,
    MonthUsage,
    PlanLine,
    PlanRules,
    PriceStep,
    Selector,
    TieredPrice,
    UsableGrant,
    apply_credit,
    plan_lines,
    shared,
)

MODELS = ("alpha", "beta")
SOME_TIME = datetime(2026, 1, 1, tzinfo=UTC)

selectors = st.builds(
    Selector,
    st.sampled_from(["", *MODELS]),
    st.sampled_from([None, *TokenKind]),
    st.sampled_from([None, *ServiceTier]),
)

STEP = PriceStep(None, price_picos=1)


@st.composite
def months(draw: st.DrawFn) -> list[MonthUsage]:
    """Draw tokens of several models, versions, tiers and kinds; rows may repeat."""
    prices: dict[tuple[int, TokenKind], int] = {}
    rows = []
    for _ in range(draw(st.integers(0, 8))):
        version = draw(st.integers(1, 4))
        kind = draw(st.sampled_from(list(TokenKind)))
        prices.setdefault((version, kind), draw(st.integers(0, 3_000)))
        # A version has one model, tier and time.
        model, tier = MODELS[version % 2], list(ServiceTier)[version // 3]
        effective_at = SOME_TIME + timedelta(days=version // 2)
        rows.append(
            MonthUsage(
                model,
                version,
                tier,
                kind,
                draw(st.integers(0, 40)),
                prices[version, kind],
                effective_at,
            )
        )
    return rows


@st.composite
def plans(draw: st.DrawFn) -> PlanRules:
    """Draw rules that do not contradict each other."""
    allowances = {draw(selectors): draw(st.integers(1, 60)) for _ in range(draw(st.integers(0, 3)))}
    tiered: list[TieredPrice] = []
    for _ in range(draw(st.integers(0, 3))):
        selector = draw(selectors)
        if any(selector.overlaps(each.selector) for each in tiered):
            continue
        bounds = sorted(draw(st.sets(st.integers(1, 80), max_size=3)))
        steps = tuple(
            PriceStep(bound, price_picos=draw(st.integers(0, 3_000)))
            if draw(st.booleans())
            else PriceStep(bound, price_milli=draw(st.integers(0, 2_000)))
            for bound in [*bounds, None]
        )
        tiered.append(
            TieredPrice(
                draw(st.sampled_from([LineKind.GRADUATED, LineKind.VOLUME])), selector, steps
            )
        )
    commitment = draw(st.one_of(st.just(0), st.integers(0, 100_000)))
    return PlanRules(
        tuple(Allowance(*each) for each in allowances.items()), tuple(tiered), commitment
    )


def cost_by_token(rules: PlanRules, usage: list[MonthUsage]) -> tuple[int, Fraction]:
    """Return the free tokens and the cost by the model, token by token."""
    order = sorted(
        (row for row in usage for _ in range(row.token_count)),
        key=lambda row: (
            row.effective_at,
            list(ServiceTier).index(row.tier),
            row.model,
            list(TokenKind).index(row.token_kind),
        ),
    )
    free_count = 0
    for allowance in sorted(rules.allowances, key=lambda each: each.selector.order):
        groups: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for index, row in enumerate(order):
            if allowance.selector.matches(row.model, row.token_kind, row.tier):
                key = (
                    row.model,
                    list(TokenKind).index(row.token_kind),
                    list(ServiceTier).index(row.tier),
                )
                groups[key].append(index)
        matching = sum(map(len, groups.values()))
        covered = min(allowance.token_count, matching)
        gone: set[int] = set()
        parts = {key: Fraction(covered * len(group), matching) for key, group in groups.items()}
        ranked = sorted(parts, key=lambda key: (-(parts[key] % 1), first_of(usage, key)))
        extra = covered - sum(int(part) for part in parts.values())
        for key, group in groups.items():
            gone |= set(group[: int(parts[key]) + (key in ranked[:extra])])
        free_count += len(gone)
        order = [row for index, row in enumerate(order) if index not in gone]
    cost = Fraction(0)
    for tiered in rules.tiered_prices:
        mine = [
            row for row in order if tiered.selector.matches(row.model, row.token_kind, row.tier)
        ]
        for position, row in enumerate(mine, start=1):
            tier = position if tiered.kind is LineKind.GRADUATED else len(mine)
            step = next(
                each
                for each in tiered.steps
                if each.up_to_token_count is None or tier <= each.up_to_token_count
            )
            cost += (
                step.price_picos
                if step.price_picos is not None
                else Fraction(row.unit_price_picos * step.price_milli, 1000)  # type: ignore[operator]
            )
    for row in order:
        if not any(
            each.selector.matches(row.model, row.token_kind, row.tier)
            for each in rules.tiered_prices
        ):
            cost += row.unit_price_picos
    return free_count, cost


def first_of(usage: list[MonthUsage], key: tuple[str, int, int]) -> tuple[object, ...]:
    """Return the rank of a group: by model, kind, then the first version's time and tier."""
    model, kind, tier = key
    times = [
        row.effective_at
        for row in usage
        if row.token_count and (row.model, row.token_kind, row.tier) == named(key)
    ]
    return model, kind, min(times), tier


def named(key: tuple[str, int, int]) -> tuple[str, TokenKind, ServiceTier]:
    """Return the named group."""
    return key[0], list(TokenKind)[key[1]], list(ServiceTier)[key[2]]


@given(plans(), months(), st.randoms(use_true_random=False))
def test_the_lines_are_what_each_single_token_costs(
    rules: PlanRules, usage: list[MonthUsage], chance: object
) -> None:
    """The difference is less than one pico, in any order."""
    free_count, cost = cost_by_token(rules, usage)

    lines = plan_lines(rules, usage)
    shuffled = list(usage)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    turned = PlanRules(rules.allowances[::-1], rules.tiered_prices[::-1], rules.commitment_picos)

    charged = sum(row.amount_picos for row in usage) + sum(
        line.amount_picos for line in lines if line.kind is not LineKind.COMMITMENT
    )
    assert charged == cost // 1
    assert charged + sum(
        line.amount_picos for line in lines if line.kind is LineKind.COMMITMENT
    ) == max(charged, rules.commitment_picos)
    assert (
        sum(line.token_count or 0 for line in lines if line.kind is LineKind.ALLOWANCE)
        == free_count
    )
    assert plan_lines(turned, shuffled) == lines


@given(st.integers(0, 10**20), st.lists(st.integers(0, 10**12), max_size=8))
def test_shares_add_up_and_are_in_proportion(total: int, weights: list[int]) -> None:
    """Each share is within one unit of the exact one, and at most its weight."""
    total = min(total, sum(weights))

    parts = shared(total, weights)

    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(Fraction(part) - Fraction(total * weight, sum(weights) or 1)) < 1
        assert 0 <= part <= weight


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**15)), max_size=6),
    st.integers(-(10**15), 10**16),
    st.randoms(use_true_random=False),
)
def test_credit_is_spent_once_and_the_first_to_end_first(
    given_: list[tuple[int, int]], due: int, chance: object
) -> None:
    """Every amount due is paid while there is credit, from the grant that ends first."""
    grants = [
        UsableGrant(uuid.UUID(int=index), date(2026, 1 + month, 1), left)
        for index, (month, left) in enumerate(given_)
    ]
    shuffled = list(grants)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]

    applied = {each.grant_id: each.amount_picos for each in apply_credit(shuffled, due)}

    assert sum(applied.values()) == max(min(due, sum(grant.remaining_picos for grant in grants)), 0)
    ordered = sorted(grants, key=lambda each: (each.last_month, each.grant_id))
    for earlier, later in pairwise(ordered):
        assert (
            not applied.get(later.grant_id)
            or applied.get(earlier.grant_id, 0) == earlier.remaining_picos
        )
    assert all(
        0 < amount <= grants[grant_id.int].remaining_picos for grant_id, amount in applied.items()
    )


def usage_of(
    count: int, price: int, kind: TokenKind = TokenKind.OUTPUT, version: int = 1
) -> MonthUsage:
    return MonthUsage(
        "alpha",
        version,
        ServiceTier.INTERACTIVE,
        kind,
        count,
        price,
        SOME_TIME + timedelta(days=version),
    )


def test_a_month_by_hand() -> None:
    """10 of 110 output tokens are free, 50 at full price, 50 at 90 %."""
    rules = PlanRules(
        (Allowance(Selector(token_kind=TokenKind.OUTPUT), 10),),
        (
            TieredPrice(
                LineKind.GRADUATED,
                Selector("alpha", TokenKind.OUTPUT),
                (PriceStep(50, price_milli=1000), PriceStep(None, price_milli=900)),
            ),
        ),
        11_000,
    )

    lines = plan_lines(rules, [usage_of(60, 100), usage_of(50, 110, version=2)])

    assert lines == (
        PlanLine(
            LineKind.ALLOWANCE,
            "free allowance of 10 tokens a month (all models, output): interactive",
            -1_000,
            "alpha",
            TokenKind.OUTPUT,
            10,
        ),
        PlanLine(
            LineKind.GRADUATED,
            "graduated price of alpha, output, beyond 50 tokens a month: 90 % of the price",
            -550,
            "alpha",
            TokenKind.OUTPUT,
            50,
        ),
        PlanLine(
            LineKind.COMMITMENT, "rest of the month's commitment", 11_000 - (11_500 - 1_000 - 550)
        ),
    )


@pytest.mark.parametrize(("count", "amount_picos"), [(99, -990), (100, -1_000), (101, -5_050)])
def test_a_volume_step_takes_in_its_last_token(count: int, amount_picos: int) -> None:
    """Up to 100 tokens includes the hundredth; then all of them have the next step's price."""
    steps = (PriceStep(100, price_picos=90), PriceStep(None, price_picos=50))
    rules = PlanRules(
        tiered_prices=(TieredPrice(LineKind.VOLUME, Selector("alpha", TokenKind.OUTPUT), steps),)
    )

    (line,) = plan_lines(rules, [usage_of(count, 100)])

    assert (line.token_count, line.amount_picos) == (count, amount_picos)


@pytest.mark.parametrize(
    ("allowances", "tiered", "commitment", "field"),
    [
        ([], [], -1, "commitment"),
        ([Allowance(Selector(), 0)], [], 0, "allowances[0].tokens"),
        ([Allowance(Selector(), 1), Allowance(Selector(), 2)], [], 0, "allowances[1]"),
        ([], [TieredPrice(LineKind.ALLOWANCE, Selector(), (STEP,))], 0, "tiered_prices[0].kind"),
        ([], [TieredPrice(LineKind.VOLUME, Selector(), ())], 0, "tiered_prices[0].steps"),
        (
            [],
            [TieredPrice(LineKind.VOLUME, Selector(), (PriceStep(5, price_picos=1),))],
            0,
            "tiered_prices[0].steps",
        ),
        (
            [],
            [TieredPrice(LineKind.VOLUME, Selector(), (PriceStep(0, 1), STEP))],
            0,
            "tiered_prices[0].steps[0].up_to",
        ),
        (
            [],
            [TieredPrice(LineKind.VOLUME, Selector(), (PriceStep(9, 1), PriceStep(9, 1), STEP))],
            0,
            "tiered_prices[0].steps[1].up_to",
        ),
        (
            [],
            [TieredPrice(LineKind.VOLUME, Selector(), (PriceStep(None, 1, 1),))],
            0,
            "tiered_prices[0].steps[0]",
        ),
        (
            [],
            [TieredPrice(LineKind.VOLUME, Selector(), (PriceStep(None),))],
            0,
            "tiered_prices[0].steps[0]",
        ),
        (
            [],
            [TieredPrice(LineKind.VOLUME, Selector(), (PriceStep(None, -1),))],
            0,
            "tiered_prices[0].steps[0]",
        ),
        (
            [],
            [TieredPrice(LineKind.VOLUME, Selector(m), (STEP,)) for m in ("", "alpha")],
            0,
            "tiered_prices[1]",
        ),
    ],
)
def test_rules_that_contradict_each_other_are_refused_by_field(
    allowances: list[Allowance], tiered: list[TieredPrice], commitment: int, field: str
) -> None:
    """The error names the field to correct."""
    with pytest.raises(InvalidValue) as refused:
        PlanRules(tuple(allowances), tuple(tiered), commitment)

    assert refused.value.field == field
