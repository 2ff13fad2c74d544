"""What a plan makes of a month: free allowances, graduated and volume prices, a minimum commitment. Pure and exact.

A plan acts on the totals of a closed-up month, never on single requests: `plan_lines(rules, usage)` takes the month's tokens per
model, price version, service tier and kind, each at the price it was admitted at, and answers the lines that go on the bill beside
them. Discounts are negative. The result depends on neither the order of the rules nor that of the usage.

1. Free allowances, the most specific first. What one covers is free and counts for no other rule. It is shared between the
   (model, kind, tier) it applies to in proportion to their tokens; within one of them the oldest price version is covered first.
2. Graduated and volume prices, on what no allowance covered. A token has at most one (`PlanRules` refuses two that overlap).
   Graduated: each step prices the tokens that fall into it, counted from the oldest price version, interactive before batch.
   Volume: the step that the total falls into prices all of them.
3. The commitment: what is missing to it, from list price and the lines before, is charged.

A price of a step is whole picos per token, or thousandths of the price at admission. Only the second can leave a part of a pico:
it is carried from line to line in `whole_picos`, and at the end of the month less than one pico is left in the customer's favour.

`apply_credit(grants, amount_due_picos)` spends prepaid credit in the order of (last month, id), each grant down to zero at most,
and never more than is due. Whoever calls it hands in the grants that are usable in the billing month, with what is left of each.
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

LIST_PRICE_MILLI = 1000  # thousandths of the price at admission that change nothing
PRICE_MILLI_MAX = 1_000_000  # a thousandfold; more would be a unit mixed up
KIND_ORDER = {kind: index for index, kind in enumerate(TokenKind)}
TIER_ORDER = {tier: index for index, tier in enumerate(ServiceTier)}


class LineKind(StrEnum):
    """What a line of a bill is for: usage of the month or of an earlier one; or a charge, of a plan or what else is owed."""

    USAGE = "usage"
    LATE_USAGE = "late_usage"
    ALLOWANCE = "allowance"
    GRADUATED = "graduated"
    VOLUME = "volume"
    COMMITMENT = "commitment"
    ADJUSTMENT = "adjustment"
    CREDIT = "credit"

    @property
    def is_charge(self) -> bool:
        """Whether the line stands beside the usage."""
        return self not in (LineKind.USAGE, LineKind.LATE_USAGE)


@dataclass(frozen=True, slots=True)
class Selector:
    """Which tokens a rule is about; None and the empty model: all."""

    model: str = ""
    token_kind: TokenKind | None = None
    tier: ServiceTier | None = None

    def matches(self, model: str, token_kind: TokenKind, tier: ServiceTier) -> bool:
        """Whether the rule is about these tokens."""
        return self.model in ("", model) and self.token_kind in (None, token_kind) and self.tier in (None, tier)

    def overlaps(self, other: Selector) -> bool:
        """Whether there are tokens that both are about."""
        pairs = ((self.model or None, other.model or None), (self.token_kind, other.token_kind), (self.tier, other.tier))
        return all(mine is None or theirs is None or mine == theirs for mine, theirs in pairs)

    @property
    def order(self) -> tuple[object, ...]:
        """The most specific first; a fixed order among equals."""
        return (
            -(bool(self.model) + (self.token_kind is not None) + (self.tier is not None)),
            self.model,
            -1 if self.token_kind is None else KIND_ORDER[self.token_kind],
            -1 if self.tier is None else TIER_ORDER[self.tier],
        )

    def __str__(self) -> str:
        """For a line of the bill: "all models, output, batch"."""
        return ", ".join([self.model or "all models", *(str(part) for part in (self.token_kind, self.tier) if part is not None)])


@dataclass(frozen=True, slots=True)
class Allowance:
    """So many tokens of a month are free."""

    selector: Selector
    token_count: int


@dataclass(frozen=True, slots=True)
class PriceStep:
    """A price up to so many tokens of the month, those included; None: without end.

    Either whole picos per token, or thousandths of the price at admission.
    """

    up_to_token_count: int | None
    price_picos: int | None = None
    price_milli: int | None = None

    def charge_milli(self, token_count: int, unit_price_picos: int) -> int:
        """What the step changes for tokens of a price, in thousandths of a pico."""
        if self.price_picos is not None:
            return token_count * (self.price_picos - unit_price_picos) * LIST_PRICE_MILLI
        assert self.price_milli is not None
        return token_count * unit_price_picos * (self.price_milli - LIST_PRICE_MILLI)


@dataclass(frozen=True, slots=True)
class TieredPrice:
    """Prices by how much is used in a month. kind: graduated or volume."""

    kind: LineKind
    selector: Selector
    steps: tuple[PriceStep, ...]


@dataclass(frozen=True, slots=True)
class PlanRules:
    """The rules of one plan version. Raises: InvalidValue for rules that contradict each other."""

    allowances: tuple[Allowance, ...] = ()
    tiered_prices: tuple[TieredPrice, ...] = ()
    commitment_picos: int = 0

    def __post_init__(self) -> None:
        """Refuse what could be read in two ways."""
        if self.commitment_picos < 0:
            raise InvalidValue("commitment", "give 0 or more")
        for index, allowance in enumerate(self.allowances):
            if allowance.token_count < 1:
                raise InvalidValue(f"allowances[{index}].tokens", "give 1 or more")
            if any(allowance.selector == other.selector for other in self.allowances[:index]):
                raise InvalidValue(
                    f"allowances[{index}]", f"there is an allowance for {allowance.selector} already: give their sum"
                )
        for index, tiered in enumerate(self.tiered_prices):
            _check_steps(f"tiered_prices[{index}]", tiered)
            for other in self.tiered_prices[:index]:
                if tiered.selector.overlaps(other.selector):
                    raise InvalidValue(
                        f"tiered_prices[{index}]", f"{tiered.selector} overlaps {other.selector}: a token can have one price"
                    )


def _check_steps(field: str, tiered: TieredPrice) -> None:
    """Raises: InvalidValue unless the steps rise and the last one, and only it, is without end."""
    if tiered.kind not in (LineKind.GRADUATED, LineKind.VOLUME):
        raise InvalidValue(f"{field}.kind", "give graduated or volume")
    if not tiered.steps or tiered.steps[-1].up_to_token_count is not None:
        raise InvalidValue(f"{field}.steps", "the last step must have no up_to: it prices all that is beyond the others")
    bounds = [0, *(step.up_to_token_count for step in tiered.steps[:-1])]
    for index, (before, bound) in enumerate(pairwise(bounds)):
        if bound is None or before is None or bound <= before:
            raise InvalidValue(
                f"{field}.steps[{index}].up_to", "each step must end beyond the one before; only the last has no end"
            )
    for index, step in enumerate(tiered.steps):
        if (step.price_picos is None) == (step.price_milli is None):
            raise InvalidValue(f"{field}.steps[{index}]", "give either a price per token or a share of the price at admission")
        if (step.price_picos or 0) < 0 or not 0 <= (step.price_milli or 0) <= PRICE_MILLI_MAX:
            raise InvalidValue(
                f"{field}.steps[{index}]", f"give a price of 0 or more; a share is 0 to {PRICE_MILLI_MAX} thousandths"
            )


@dataclass(frozen=True, slots=True)
class MonthUsage:
    """Tokens of one kind of a month, at one price. effective_at: since when the price version holds."""

    model: str
    price_version: int
    tier: ServiceTier
    token_kind: TokenKind
    token_count: int
    unit_price_picos: int
    effective_at: datetime

    @property
    def amount_picos(self) -> int:
        """At the price of its admission; exact."""
        return self.token_count * self.unit_price_picos


@dataclass(frozen=True, slots=True)
class Charge:
    """A line beside the usage; what the customer pays less for is negative. source_id: of the adjustment or the credit grant."""

    kind: LineKind
    description: str
    amount_picos: int
    model: str = ""
    token_kind: TokenKind | None = None
    token_count: int | None = None
    source_id: uuid.UUID | None = None


@dataclass(frozen=True, slots=True)
class UsableGrant:
    """Prepaid credit that may be spent on a month: what is left of it, and the last month it is good for (its first day)."""

    grant_id: uuid.UUID
    last_month: date
    remaining_picos: int


@dataclass(frozen=True, slots=True)
class CreditApplication:
    """Credit spent: more than nothing, of one grant."""

    grant_id: uuid.UUID
    amount_picos: int


def plan_lines(rules: PlanRules, usage: Iterable[MonthUsage]) -> tuple[Charge, ...]:
    """The lines of a month; see above. Rows of the same price version, tier and kind count as one."""
    rows = _merged(usage)
    total_picos = sum(row.amount_picos for row in rows)
    lines: list[Charge] = []
    for allowance in sorted(rules.allowances, key=lambda each: each.selector.order):
        free, rows = _allowed(allowance, rows)
        lines += free
    carried_milli = 0
    for tiered in sorted(rules.tiered_prices, key=lambda each: each.selector.order):
        for step, token_count, charge_milli in _stepped(tiered, [row for row in rows if tiered.selector.matches(*group_of(row))]):
            amount_picos, carried_milli = whole_picos(charge_milli, carried_milli)
            lines.append(_step_line(tiered, step, token_count, amount_picos))
    missing_picos = rules.commitment_picos - total_picos - sum(line.amount_picos for line in lines)
    if missing_picos > 0:
        lines.append(Charge(LineKind.COMMITMENT, "rest of the month's commitment", missing_picos))
    return tuple(lines)


def apply_credit(grants: Iterable[UsableGrant], amount_due_picos: int) -> tuple[CreditApplication, ...]:
    """What is spent of each grant: those that end first, first. Nothing where nothing is due."""
    applications: list[CreditApplication] = []
    due = max(amount_due_picos, 0)
    for grant in sorted(grants, key=lambda each: (each.last_month, each.grant_id)):
        spent = min(max(grant.remaining_picos, 0), due)
        if spent:
            applications.append(CreditApplication(grant.grant_id, spent))
            due -= spent
    return tuple(applications)


def whole_picos(charge_milli: int, carried_milli: int) -> tuple[int, int]:
    """The one division of a plan: whole picos of thousandths, and the rest to carry to the next line, 0 to 999.

    Nothing is lost: `1000 * picos + rest` is what came in.
    """
    return divmod(charge_milli + carried_milli, LIST_PRICE_MILLI)


def shared(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts of a total in proportion to weights, each at most its weight where the total is at most their sum.

    They add up to the total exactly: what the division leaves goes to the largest remainders, the first among equals.
    """
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    parts = [total * weight // whole for weight in weights]
    by_rest = sorted(range(len(weights)), key=lambda index: (-(total * weights[index] % whole), index))
    for index in by_rest[: total - sum(parts)]:
        parts[index] += 1
    return parts


def group_of(row: MonthUsage) -> tuple[str, TokenKind, ServiceTier]:
    """What selectors tell apart."""
    return row.model, row.token_kind, row.tier


def _merged(usage: Iterable[MonthUsage]) -> list[MonthUsage]:
    """One row per model, kind, tier and version, in a fixed order: within a model and kind by the versions' times."""
    counts: defaultdict[MonthUsage, int] = defaultdict(int)
    for row in usage:
        counts[replace(row, token_count=0)] += row.token_count
    merged = [replace(row, token_count=count) for row, count in counts.items() if count]
    return sorted(
        merged, key=lambda row: (row.model, KIND_ORDER[row.token_kind], row.effective_at, TIER_ORDER[row.tier], row.price_version)
    )


def _allowed(allowance: Allowance, rows: Sequence[MonthUsage]) -> tuple[list[Charge], list[MonthUsage]]:
    groups: defaultdict[tuple[str, TokenKind, ServiceTier], list[MonthUsage]] = defaultdict(list)
    for row in rows:
        if allowance.selector.matches(*group_of(row)):
            groups[group_of(row)].append(row)
    sums = [sum(row.token_count for row in group) for group in groups.values()]
    left = {id(row): row for row in rows}
    lines = []
    for ((model, kind, tier), group), part in zip(groups.items(), shared(min(allowance.token_count, sum(sums)), sums), strict=True):
        rest, discount_picos = part, 0
        for row in group:
            covered = min(rest, row.token_count)
            rest -= covered
            discount_picos += covered * row.unit_price_picos
            left[id(row)] = replace(row, token_count=row.token_count - covered)
        if part:
            description = f"free allowance of {allowance.token_count:,} tokens a month ({allowance.selector}): {tier}"
            lines.append(Charge(LineKind.ALLOWANCE, description, -discount_picos, model, kind, part))
    return lines, [row for row in left.values() if row.token_count]


def _stepped(tiered: TieredPrice, rows: Sequence[MonthUsage]) -> Iterator[tuple[PriceStep, int, int]]:
    """Each step with the tokens that it prices and what that changes, in thousandths of a pico; those that change nothing not."""
    ordered = sorted(rows, key=lambda row: (row.effective_at, TIER_ORDER[row.tier], row.model, KIND_ORDER[row.token_kind]))
    total = sum(row.token_count for row in ordered)
    steps = tiered.steps
    if tiered.kind is LineKind.VOLUME:
        steps = (next(step for step in steps if step.up_to_token_count is None or total <= step.up_to_token_count),)
    begins = 0
    for step in steps:
        ends = total if step.up_to_token_count is None or len(steps) == 1 else min(step.up_to_token_count, total)
        position, charge_milli = 0, 0
        for row in ordered:
            inside = min(position + row.token_count, ends) - max(position, begins)
            charge_milli += step.charge_milli(max(inside, 0), row.unit_price_picos)
            position += row.token_count
        if charge_milli:
            yield step, ends - begins, charge_milli
        begins = max(begins, ends)


def _step_line(tiered: TieredPrice, step: PriceStep, token_count: int, amount_picos: int) -> Charge:
    selector = tiered.selector
    bounds = [each.up_to_token_count for each in tiered.steps[:-1]]
    if step.up_to_token_count is not None:
        reach = f"up to {step.up_to_token_count:,} tokens a month"
    else:
        reach = f"beyond {bounds[-1]:,} tokens a month" if bounds else "all tokens"
    price = f"{step.price_picos} picos per token" if step.price_milli is None else f"{step.price_milli / 10:g} % of the price"
    description = f"{tiered.kind} price of {selector}, {reach}: {price}"
    return Charge(tiered.kind, description, amount_picos, selector.model, selector.token_kind, token_count)
