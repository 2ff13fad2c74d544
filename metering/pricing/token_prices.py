"""Token prices: the cost of tokens, here and in SQL, and which price a request has. Pure; the rows are in `price_versions`."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from metering.core.models import ServiceTier, TokenKind

# By kind of token, as `TokenPrices.lines` has it: how a usage event's tokens are counted, and the column of their price.
COUNTS_OF_EVENT = {
    TokenKind.INPUT: ("input_token_count - cached_input_token_count", "input_picos_per_token"),
    TokenKind.CACHED_INPUT: ("cached_input_token_count", "cached_input_picos_per_token"),
    TokenKind.OUTPUT: ("billed_token_count", "output_picos_per_token"),
    TokenKind.EMBEDDING: ("embedding_token_count", "embedding_picos_per_token"),
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
    embedding_picos_per_token: int = 0

    def cost_picos(
        self, input_token_count: int, cached_input_token_count: int, output_token_count: int, embedding_token_count: int = 0
    ) -> int:
        """Exact cost. Cached tokens are part of the input and priced apart, never twice; those embedded are no part of it."""
        return (
            (input_token_count - cached_input_token_count) * self.input_picos_per_token
            + cached_input_token_count * self.cached_input_picos_per_token
            + output_token_count * self.output_picos_per_token
            + embedding_token_count * self.embedding_picos_per_token
        )

    def lines(
        self, input_token_count: int, cached_input_token_count: int, output_token_count: int, embedding_token_count: int = 0
    ) -> Iterator[PricedTokens]:
        """The cost by kind of token, in the order of `TokenKind`; kinds without tokens are left out."""
        counts = (
            (TokenKind.INPUT, input_token_count - cached_input_token_count, self.input_picos_per_token),
            (TokenKind.CACHED_INPUT, cached_input_token_count, self.cached_input_picos_per_token),
            (TokenKind.OUTPUT, output_token_count, self.output_picos_per_token),
            (TokenKind.EMBEDDING, embedding_token_count, self.embedding_picos_per_token),
        )
        return (PricedTokens(kind, count, price) for kind, count, price in counts if count)


@functools.lru_cache(maxsize=4096)
def embedding_terms(prices: TokenPrices) -> TokenPrices:
    """The same version for a request whose input is embedded: that is all it has, cached or not, and costs the embedding price."""
    each = prices.embedding_picos_per_token
    return replace(prices, input_picos_per_token=each, cached_input_picos_per_token=each)


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


# Of a price: model, currency, the number of the organization whose own it is or None for the list, and service tier.
PricePlace = tuple[str, str, int | None, str]


@dataclass(slots=True)
class PriceBook:
    """The versions in force at one moment, and which of them a request has.

    A customer's own price wins over the list's; within each, a tier without a row of its own has the interactive one. None stands
    for an own price that was withdrawn.
    """

    in_force: dict[PricePlace, TokenPrices | None] = field(default_factory=dict)

    def add(
        self,
        prices: TokenPrices,
        *,
        model: str,
        organization_id: uuid.UUID | None,
        tier: str,
        withdrawn: bool,
    ) -> None:
        owner = None if organization_id is None else organization_id.int
        self.in_force[model, prices.currency_code, owner, tier] = None if withdrawn else prices

    def find(self, model: str, currency_code: str, organization_id: uuid.UUID, tier: str) -> TokenPrices | None:
        """What the customer pays; None if there is no price."""
        get = self.in_force.get
        for owner in (organization_id.int, None):
            for each in (tier, ServiceTier.INTERACTIVE) if tier != ServiceTier.INTERACTIVE else (tier,):
                if (model, currency_code, owner, each) in self.in_force:
                    if (prices := get((model, currency_code, owner, each))) is not None:
                        return prices
                    break  # withdrawn: as the list has it
        return None
