"""Limits on the output of a running request: tokens, which its client may change, and cost.

Both are converted to a number of tokens, so that checking a token costs one comparison.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core.errors import FieldViolation, InvalidRequest
from api.core.texts import Violations
from metering.core.models import Outcome
from metering.core.money import PICOS_PER_UNIT, exact_text
from metering.pricing.prices import TokenPrices

UNBOUNDED = sys.maxsize


@dataclass(frozen=True, slots=True)
class Cost:
    """Maximum cost of a request."""

    currency_code: str
    picos: int


@dataclass(frozen=True, slots=True)
class LimitChange:
    """Change of limits that a client requests. None leaves a limit unchanged."""

    max_output_tokens: int | None = None
    max_cost: Cost | None = None


def check_cost(message: types_pb2.Money, field: str, wrong: Violations) -> None:
    """Check that a maximum cost is above zero and names a currency."""
    right = (
        message.units >= 0
        and 0 <= message.picos < PICOS_PER_UNIT
        and message.units + message.picos > 0
    )
    wrong.check(right, field, "must be more than 0, with picos from 0 to 999,999,999,999")
    wrong.check(
        bool(message.currency_code),
        f"{field}.currency_code",
        "must name the currency of your organization",
    )
    wrong.check_text(message.currency_code, f"{field}.currency_code")


def cost_of(message: types_pb2.Money) -> Cost:
    """Convert the maximum cost in a message that passed `check_cost`."""
    return Cost(message.currency_code, message.units * PICOS_PER_UNIT + message.picos)


def parse_update(message: pb.UpdateFrame) -> LimitChange:
    """Parse a change of limits. Raises InvalidRequest, which lists every violation."""
    wrong = Violations()
    has_tokens, has_cost = message.HasField("max_output_tokens"), message.HasField("max_cost")
    wrong.check(has_tokens or has_cost, "update", "must set max_output_tokens, max_cost, or both")
    if has_tokens:
        count = message.max_output_tokens
        wrong.check(count >= 1, "update.max_output_tokens", f"must be at least 1, got {count}")
    if has_cost:
        check_cost(message.max_cost, "update.max_cost", wrong)
    wrong.raise_if_any()
    return LimitChange(
        message.max_output_tokens if has_tokens else None,
        cost_of(message.max_cost) if has_cost else None,
    )


class OutputLimits:
    """Limits of one admitted request, at its prices.

    At most `token_count_max` output tokens may be delivered in total; a request that reaches them
    ends with `outcome`. The engine enforces `engine_token_count_max` for each choice.
    """

    token_count_max = UNBOUNDED
    outcome = Outcome.LENGTH
    # Total and cached input tokens, known once the engine has started.
    _input_token_counts = 0, 0

    def __init__(
        self, prices: TokenPrices, engine_token_count_max: int, max_cost: Cost | None
    ) -> None:
        """`max_cost` is not validated here, but by `check_input`."""
        self.engine_token_count_max = engine_token_count_max
        self.requested_token_count_max = engine_token_count_max
        self.max_cost = max_cost
        self._prices = prices

    def check_input(self, input_token_count: int) -> None:
        """Raise InvalidRequest if the maximum cost has another currency or may not suffice.

        It must cover the prompt, all of which counts as uncached, and one output token.
        """
        if self.max_cost is None:
            return
        self.check_currency(self.max_cost, "max_cost")
        prices = self._prices
        minimum_picos = prices.cost_picos(input_token_count, 0, 0)
        minimum_picos += prices.dearest_output_picos_per_token
        if minimum_picos > self.max_cost.picos:
            currency_code = self.max_cost.currency_code
            amount = f"{exact_text(minimum_picos, currency_code)} {currency_code}"
            wrong = (
                f"must be at least {amount}, the cost of the uncached prompt and one output token"
            )
            raise InvalidRequest([FieldViolation("max_cost", wrong)])

    def begun(self, input_token_count: int, cached_input_token_count: int | None) -> None:
        """Record the billed input once the engine has started.

        `cached_input_token_count` is None if the engine reports it only at the end; until then the
        prompt counts at the higher of its two prices.
        """
        if cached_input_token_count is None:
            prices = self._prices
            is_dearer = prices.cached_input_picos_per_token > prices.input_picos_per_token
            cached_input_token_count = input_token_count if is_dearer else 0
        self._input_token_counts = input_token_count, cached_input_token_count
        if self.max_cost is not None:
            self._reckon()

    def check_currency(self, cost: Cost, field: str) -> None:
        """Raise InvalidRequest if a cost is not in the currency of the prices."""
        if cost.currency_code != self._prices.currency_code:
            wrong = (
                f"must be {self._prices.currency_code}, your organization's currency, got"
                f" {cost.currency_code[:8]!r}"
            )
            raise InvalidRequest([FieldViolation(f"{field}.currency_code", wrong)])

    def change(self, change: LimitChange) -> None:
        """Apply a change of limits."""
        if change.max_output_tokens is not None:
            self.requested_token_count_max = change.max_output_tokens
        if change.max_cost is not None:
            self.max_cost = change.max_cost
        self._reckon()

    def _reckon(self) -> None:
        requested = self.requested_token_count_max
        by_length = requested if requested < self.engine_token_count_max else UNBOUNDED
        by_cost, per_token = UNBOUNDED, self._prices.dearest_output_picos_per_token
        if self.max_cost is not None and per_token:
            input_cost_picos = self._prices.cost_picos(*self._input_token_counts, 0)
            by_cost = max(self.max_cost.picos - input_cost_picos, 0) // per_token
        self.token_count_max = min(by_length, by_cost)
        self.outcome = Outcome.COST_LIMIT if by_cost < by_length else Outcome.LENGTH
