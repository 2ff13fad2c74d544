"""Plan rules applied to a month: free allowances, graduated and volume prices, a commitment. Pure
and exact.

A plan applies to the totals of a completed month, never to single requests: `plan_lines(rules,
usage)` takes the month's tokens per model, price version, service tier and kind, each at its price
of admission, and returns the additional lines of the bill. Discounts are negative. The result
depends neither on the order of the rules nor on that of the usage.

1. Free allowances, the most specific first. Covered tokens are free and count for no other rule. An
   allowance is shared between its (model, kind, tier) groups in proportion to their tokens; within
   a group the oldest price version is covered first.
2. Graduated and volume prices, on tokens that no allowance covered. A token has at most one
   (`PlanRules` refuses two that overlap). Graduated: each step prices the tokens within it, counted
   from the oldest price version, interactive before batch. Volume: the step that contains the total
   prices all tokens.
3. The commitment: the shortfall of list price and previous lines is charged.

The price of a step is whole picos per token, or thousandths of the price at admission. Only the
latter can produce a fraction of a pico: `whole_picos` carries it from line to line, and at the end
of the month less than one pico is dropped in the customer's favor.

`apply_credit(grants, amount_due_picos)` spends prepaid credit in the order of (last month, id),
each grant down to zero, and never more than is due. The caller passes the grants usable in the
billing month with their remaining amounts.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from enum import StrEnum
from itertools import pairwise

from metering.core.errors import InvalidValue
from metering.core.models import ServiceTier, TokenKind

LIST_PRICE_MILLI = 1000  # thousandths of the price at admission: unchanged
PRICE_MILLI_MAX = 1_000_000  # a factor of 1000; a larger one is a mistake in the unit
KIND_ORDER = {kind: index for index, kind in enumerate(TokenKind)}
# Kinds of token whose rules apply to another kind as well.
CONTAINING = {TokenKind.REASONING: TokenKind.OUTPUT}
TIER_ORDER = {tier: index for index, tier in enumerate(ServiceTier)}


class LineKind(StrEnum):
    """Kind of an invoice line: usage of this or an earlier month, a charge, or the rounding."""

    USAGE = "usage"
    LATE_USAGE = "late_usage"
    ALLOWANCE = "allowance"
    GRADUATED = "graduated"
    VOLUME = "volume"
    COMMITMENT = "commitment"
    ADJUSTMENT = "adjustment"
    CREDIT = "credit"
    ROUNDING = "rounding"

    @property
    def is_charge(self) -> bool:
        """True unless the line is for usage or rounding."""
        return self not in (LineKind.USAGE, LineKind.LATE_USAGE, LineKind.ROUNDING)


@dataclass(frozen=True, slots=True)
class Selector:
    """Tokens that a rule applies to. None and an empty model match everything.

    A rule on output applies to reasoning too, which is part of the output that requests report.
    """

    model: str = ""
    token_kind: TokenKind | None = None
    tier: ServiceTier | None = None

    def matches(self, model: str, token_kind: TokenKind, tier: ServiceTier) -> bool:
        """Return True if the rule applies to these tokens."""
        return (
            self.model in ("", model)
            and self.token_kind in (None, token_kind, CONTAINING.get(token_kind))
            and self.tier in (None, tier)
        )

    def overlaps(self, other: Selector) -> bool:
        """Return True if any token could match both selectors."""
        kinds = [self.token_kind, other.token_kind]
        if {*kinds} == {TokenKind.OUTPUT, TokenKind.REASONING}:
            kinds = [None, None]
        pairs = ((self.model or None, other.model or None), kinds, (self.tier, other.tier))
        return all(one is None or another is None or one == another for one, another in pairs)

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key: the most specific first, then a fixed order."""
        return (
            -(bool(self.model) + (self.token_kind is not None) + (self.tier is not None)),
            self.token_kind not in CONTAINING,
            self.model,
            -1 if self.token_kind is None else KIND_ORDER[self.token_kind],
            -1 if self.tier is None else TIER_ORDER[self.tier],
        )

    def __str__(self) -> str:
        """Format the selector for an invoice line: "all models, output, batch"."""
        return ", ".join(
            [
                self.model or "all models",
                *(str(part) for part in (self.token_kind, self.tier) if part is not None),
            ]
        )


@dataclass(frozen=True, slots=True)
class Allowance:
    """Free tokens per month."""

    selector: Selector
    token_count: int


@dataclass(frozen=True, slots=True)
class PriceStep:
    """Price up to a number of tokens in the month, inclusive; None means no upper bound.

    Either whole picos per token, or thousandths of the price at admission.
    """

    up_to_token_count: int | None
    price_picos: int | None = None
    price_milli: int | None = None

    def charge_milli(self, token_count: int, unit_price_picos: int) -> int:
        """Compute the difference to the list price, in thousandths of a pico."""
        if self.price_picos is not None:
            return token_count * (self.price_picos - unit_price_picos) * LIST_PRICE_MILLI
        assert self.price_milli is not None
        return token_count * unit_price_picos * (self.price_milli - LIST_PRICE_MILLI)


@dataclass(frozen=True, slots=True)
class TieredPrice:
    """Price that depends on the month's usage. `kind` is graduated or volume."""

    kind: LineKind
    selector: Selector
    steps: tuple[PriceStep, ...]


@dataclass(frozen=True, slots=True)
class PlanRules:
    """Rules of one plan version. Raises: InvalidValue for rules that contradict each other."""

    allowances: tuple[Allowance, ...] = ()
    tiered_prices: tuple[TieredPrice, ...] = ()
    commitment_picos: int = 0

    def __post_init__(self) -> None:
        """Raise InvalidValue for ambiguous rules."""
        if self.commitment_picos < 0:
            raise InvalidValue("commitment", "must be 0 or more")
        for index, allowance in enumerate(self.allowances):
            if allowance.token_count < 1:
                raise InvalidValue(f"allowances[{index}].tokens", "must be 1 or more")
            if any(allowance.selector == other.selector for other in self.allowances[:index]):
                raise InvalidValue(
                    f"allowances[{index}]",
                    f"there is already an allowance for {allowance.selector}: combine them",
                )
        for index, tiered in enumerate(self.tiered_prices):
            _check_steps(f"tiered_prices[{index}]", tiered)
            for other in self.tiered_prices[:index]:
                if tiered.selector.overlaps(other.selector):
                    raise InvalidValue(
                        f"tiered_prices[{index}]",
                        f"{tiered.selector} overlaps {other.selector}: a token can have only one"
                        " price",
                    )


def _check_steps(field: str, tiered: TieredPrice) -> None:
    """Raise InvalidValue unless the bounds rise and only the last step has none."""
    if tiered.kind not in (LineKind.GRADUATED, LineKind.VOLUME):
        raise InvalidValue(f"{field}.kind", "must be graduated or volume")
    if not tiered.steps or tiered.steps[-1].up_to_token_count is not None:
        raise InvalidValue(
            f"{field}.steps", "the last step must have no up_to: it prices all further tokens"
        )
    bounds = [0, *(step.up_to_token_count for step in tiered.steps[:-1])]
    for index, (before, bound) in enumerate(pairwise(bounds)):
        if bound is None or before is None or bound <= before:
            raise InvalidValue(
                f"{field}.steps[{index}].up_to",
                "each step must end beyond the previous one; only the last has no end",
            )
    for index, step in enumerate(tiered.steps):
        if (step.price_picos is None) == (step.price_milli is None):
            raise InvalidValue(
                f"{field}.steps[{index}]",
                "must have either a price per token or a share of the price at admission",
            )
        if (step.price_picos or 0) < 0 or not 0 <= (step.price_milli or 0) <= PRICE_MILLI_MAX:
            raise InvalidValue(
                f"{field}.steps[{index}]",
                f"a price must be 0 or more; a share must be 0 to {PRICE_MILLI_MAX} thousandths",
            )


@dataclass(frozen=True, slots=True)
class MonthUsage:
    """Tokens of one kind in a month at one price, which is in force from `effective_at` on."""

    model: str
    price_version: int
    tier: ServiceTier
    token_kind: TokenKind
    token_count: int
    unit_price_picos: int
    effective_at: datetime

    @property
    def amount_picos(self) -> int:
        """Exact amount at the price at admission."""
        return self.token_count * self.unit_price_picos


@dataclass(frozen=True, slots=True)
class PlanLine:
    """Invoice line besides usage; negative if it reduces the total. `source_id` is its cause."""

    kind: LineKind
    description: str
    amount_picos: int
    model: str = ""
    token_kind: TokenKind | None = None
    token_count: int | None = None
    source_id: uuid.UUID | None = None


@dataclass(frozen=True, slots=True)
class UsableGrant:
    """Grant of prepaid credit that a month can use: remaining amount and last valid month."""

    grant_id: uuid.UUID
    last_month: date
    remaining_picos: int


@dataclass(frozen=True, slots=True)
class CreditApplication:
    """Positive amount spent from one grant."""

    grant_id: uuid.UUID
    amount_picos: int


def plan_lines(rules: PlanRules, usage: Iterable[MonthUsage]) -> tuple[PlanLine, ...]:
    """Compute a plan's invoice lines for a month. Rows of equal price are merged."""
    rows = _merged(usage)
    total_picos = sum(row.amount_picos for row in rows)
    lines: list[PlanLine] = []
    for allowance in sorted(rules.allowances, key=lambda each: each.selector.order):
        free, rows = _allowed(allowance, rows)
        lines += free
    carried_milli = 0
    for tiered in sorted(rules.tiered_prices, key=lambda each: each.selector.order):
        for step, token_count, charge_milli in _stepped(
            tiered, [row for row in rows if tiered.selector.matches(*group_of(row))]
        ):
            amount_picos, carried_milli = whole_picos(charge_milli, carried_milli)
            lines.append(_step_line(tiered, step, token_count, amount_picos))
    missing_picos = rules.commitment_picos - total_picos - sum(line.amount_picos for line in lines)
    if missing_picos > 0:
        lines.append(PlanLine(LineKind.COMMITMENT, "rest of the month's commitment", missing_picos))
    return tuple(lines)


def apply_credit(
    grants: Iterable[UsableGrant], amount_due_picos: int
) -> tuple[CreditApplication, ...]:
    """Spend grants on an amount, the earliest-ending first; return the amounts spent."""
    applications: list[CreditApplication] = []
    due = max(amount_due_picos, 0)
    for grant in sorted(grants, key=lambda each: (each.last_month, each.grant_id)):
        spent = min(max(grant.remaining_picos, 0), due)
        if spent:
            applications.append(CreditApplication(grant.grant_id, spent))
            due -= spent
    return tuple(applications)


def whole_picos(charge_milli: int, carried_milli: int) -> tuple[int, int]:
    """Convert thousandths of a pico to picos; return them and the rest to carry, 0 to 999.

    The only division of a plan; exact: `1000 * picos + rest` equals the input.
    """
    return divmod(charge_milli + carried_milli, LIST_PRICE_MILLI)


def shared(total: int, weights: Sequence[int]) -> list[int]:
    """Split a total into whole parts in proportion to weights.

    The parts add up to the total: the remainder goes to the largest fractions, the first among
    equals. No part exceeds its weight unless the total exceeds their sum.
    """
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    parts = [total * weight // whole for weight in weights]
    by_rest = sorted(
        range(len(weights)), key=lambda index: (-(total * weights[index] % whole), index)
    )
    for index in by_rest[: total - sum(parts)]:
        parts[index] += 1
    return parts


def group_of(row: MonthUsage) -> tuple[str, TokenKind, ServiceTier]:
    """Return the attributes of a row that selectors match."""
    return row.model, row.token_kind, row.tier


def _merged(usage: Iterable[MonthUsage]) -> list[MonthUsage]:
    """Merge rows of the same model, kind, tier and version, and sort them by these and time."""
    counts: defaultdict[MonthUsage, int] = defaultdict(int)
    for row in usage:
        counts[replace(row, token_count=0)] += row.token_count
    merged = [replace(row, token_count=count) for row, count in counts.items() if count]
    return sorted(
        merged,
        key=lambda row: (
            row.model,
            KIND_ORDER[row.token_kind],
            row.effective_at,
            TIER_ORDER[row.tier],
            row.price_version,
        ),
    )


def _allowed(
    allowance: Allowance, rows: Sequence[MonthUsage]
) -> tuple[list[PlanLine], list[MonthUsage]]:
    groups: defaultdict[tuple[str, TokenKind, ServiceTier], list[MonthUsage]] = defaultdict(list)
    for row in rows:
        if allowance.selector.matches(*group_of(row)):
            groups[group_of(row)].append(row)
    sums = [sum(row.token_count for row in group) for group in groups.values()]
    left = {id(row): row for row in rows}
    lines = []
    for ((model, kind, tier), group), part in zip(
        groups.items(), shared(min(allowance.token_count, sum(sums)), sums), strict=True
    ):
        rest, discount_picos = part, 0
        for row in group:
            covered = min(rest, row.token_count)
            rest -= covered
            discount_picos += covered * row.unit_price_picos
            left[id(row)] = replace(row, token_count=row.token_count - covered)
        if part:
            description = (
                f"free allowance of {allowance.token_count:,} tokens a month"
                f" ({allowance.selector}): {tier}"
            )
            lines.append(
                PlanLine(LineKind.ALLOWANCE, description, -discount_picos, model, kind, part)
            )
    return lines, [row for row in left.values() if row.token_count]


def _stepped(
    tiered: TieredPrice, rows: Sequence[MonthUsage]
) -> Iterator[tuple[PriceStep, int, int]]:
    """Yield each step with its tokens and its price difference in thousandths of a pico."""
    ordered = sorted(
        rows,
        key=lambda row: (
            row.effective_at,
            TIER_ORDER[row.tier],
            row.model,
            KIND_ORDER[row.token_kind],
        ),
    )
    total = sum(row.token_count for row in ordered)
    steps = tiered.steps
    if tiered.kind is LineKind.VOLUME:
        steps = (
            next(
                step
                for step in steps
                if step.up_to_token_count is None or total <= step.up_to_token_count
            ),
        )
    begins = 0
    for step in steps:
        ends = (
            total
            if step.up_to_token_count is None or len(steps) == 1
            else min(step.up_to_token_count, total)
        )
        position, charge_milli = 0, 0
        for row in ordered:
            inside = min(position + row.token_count, ends) - max(position, begins)
            charge_milli += step.charge_milli(max(inside, 0), row.unit_price_picos)
            position += row.token_count
        if charge_milli:
            yield step, ends - begins, charge_milli
        begins = max(begins, ends)


def _step_line(
    tiered: TieredPrice, step: PriceStep, token_count: int, amount_picos: int
) -> PlanLine:
    selector = tiered.selector
    bounds = [each.up_to_token_count for each in tiered.steps[:-1]]
    if step.up_to_token_count is not None:
        reach = f"up to {step.up_to_token_count:,} tokens a month"
    else:
        reach = f"beyond {bounds[-1]:,} tokens a month" if bounds else "all tokens"
    price = (
        f"{step.price_picos} picos per token"
        if step.price_milli is None
        else f"{step.price_milli / 10:g} % of the price"
    )
    description = f"{tiered.kind} price of {selector}, {reach}: {price}"
    return PlanLine(
        tiered.kind, description, amount_picos, selector.model, selector.token_kind, token_count
    )
