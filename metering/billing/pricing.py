"""Prices: what tokens cost, here and in SQL. Pure; the rows live in `price_versions`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from metering.models import TokenKind

# By kind of token, as `TokenPrices.lines` has it: how a usage event's tokens are counted, and the column of their price.
COUNTS_OF_EVENT = {
    TokenKind.INPUT: ("input_token_count - cached_input_token_count", "input_picos_per_token"),
    TokenKind.CACHED_INPUT: ("cached_input_token_count", "cached_input_picos_per_token"),
    TokenKind.OUTPUT: ("billed_token_count", "output_picos_per_token"),
}
# A join that makes of each usage event one row per kind of token.
TOKENS_BY_KIND = "LATERAL (VALUES {}) AS kind (token_kind, token_count)".format(
    ", ".join(f"('{kind}', {count})" for kind, (count, _) in COUNTS_OF_EVENT.items())
)


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """One price version of one model: picos (1e-12 of the currency unit) per token and kind."""

    version: int
    currency_code: str
    input_picos_per_token: int
    cached_input_picos_per_token: int
    output_picos_per_token: int

    def cost_picos(self, input_token_count: int, cached_input_token_count: int, output_token_count: int) -> int:
        """Exact cost. Cached tokens are part of the input and priced apart, never twice."""
        return (
            (input_token_count - cached_input_token_count) * self.input_picos_per_token
            + cached_input_token_count * self.cached_input_picos_per_token
            + output_token_count * self.output_picos_per_token
        )

    def lines(self, input_token_count: int, cached_input_token_count: int, output_token_count: int) -> Iterator[PricedTokens]:
        """The cost by kind of token, in the order of `TokenKind`; kinds without tokens are left out."""
        counts = (
            (TokenKind.INPUT, input_token_count - cached_input_token_count, self.input_picos_per_token),
            (TokenKind.CACHED_INPUT, cached_input_token_count, self.cached_input_picos_per_token),
            (TokenKind.OUTPUT, output_token_count, self.output_picos_per_token),
        )
        return (PricedTokens(kind, count, price) for kind, count, price in counts if count)


@dataclass(frozen=True, slots=True)
class PricedTokens:
    """Tokens of one kind and their unit price."""

    kind: TokenKind
    token_count: int
    unit_price_picos: int

    @property
    def amount_picos(self) -> int:
        """Exact: a price is a whole number of picos per token."""
        return self.token_count * self.unit_price_picos
