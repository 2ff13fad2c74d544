"""The rules of a plan: what they say, and which contradict each other. What they make of a month is in `plans.py`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from metering.errors import InvalidValue
from metering.models import ServiceTier, TokenKind

LIST_PRICE_MILLI = 1000  # thousandths of the price at admission that change nothing
PRICE_MILLI_MAX = 1_000_000  # a thousandfold; more would be a unit mixed up
KIND_ORDER = {kind: index for index, kind in enumerate(TokenKind)}
TIER_ORDER = {tier: index for index, tier in enumerate(ServiceTier)}


class PlanLineKind(StrEnum):
    """Which rule a line comes from."""

    ALLOWANCE = "allowance"
    GRADUATED = "graduated"
    VOLUME = "volume"
    COMMITMENT = "commitment"


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

    kind: PlanLineKind
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
    if tiered.kind not in (PlanLineKind.GRADUATED, PlanLineKind.VOLUME):
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
