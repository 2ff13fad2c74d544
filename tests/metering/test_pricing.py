"""Cost of tokens as the sum of its lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from metering.pricing.prices import TokenPrices

counts = st.integers(0, 10**9)
picos = st.integers(0, 10**9)


@given(picos, picos, picos, counts, counts, counts)
def test_the_cost_is_the_sum_of_the_lines(
    input_price: int, cached_price: int, output_price: int, uncached: int, cached: int, output: int
) -> None:
    """Both are computed separately: each request needs the sum, and the lines are needed once."""
    prices = TokenPrices(1, "USD", input_price, cached_price, output_price)

    lines = list(prices.lines(uncached + cached, cached, output))

    assert prices.cost_picos(uncached + cached, cached, output) == sum(
        line.amount_picos for line in lines
    )
    assert sum(line.token_count for line in lines) == uncached + cached + output
