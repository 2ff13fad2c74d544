"""Cost of tokens as the sum over their kinds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from metering.pricing.prices import TokenPrices

counts = st.integers(0, 10**9)
picos = st.integers(0, 10**9)


@given(picos, picos, picos, counts, counts, counts)
def test_the_cost_is_the_sum_over_the_kinds_of_tokens(
    input_price: int, cached_price: int, output_price: int, uncached: int, cached: int, output: int
) -> None:
    """Cached tokens are part of the input, at a price of their own."""
    prices = TokenPrices(1, "USD", input_price, cached_price, output_price)

    cost_picos = prices.cost_picos(uncached + cached, cached, output)

    assert cost_picos == uncached * input_price + cached * cached_price + output * output_price
