"""Amounts: exact when read and written, rounded in one place and in one way."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metering.core import money
from metering.core.errors import InvalidValue

AMOUNTS = st.integers(min_value=-(10**30), max_value=10**30)
CURRENCIES = st.sampled_from(["USD", "JPY", "KWD", "CLF"])

MONTHS = st.lists(
    st.lists(st.integers(min_value=-(10**14), max_value=10**14), max_size=8),
    min_size=1,
    max_size=14,
)


def picos_of(amount: Decimal) -> int:
    """Return the exact picos of an amount in units."""
    picos: Fraction = Fraction(amount) * money.PICOS_PER_UNIT
    assert picos.denominator == 1
    return picos.numerator


@given(AMOUNTS, CURRENCIES)
def test_every_way_of_writing_an_amount_leads_back_to_it(amount: int, currency_code: str) -> None:
    assert picos_of(money.to_decimal(amount)) == amount
    assert picos_of(Decimal(money.exact_text(amount, currency_code))) == amount


@given(AMOUNTS, CURRENCIES)
def test_rounding_moves_by_half_a_minor_unit_at_most_once(amount: int, currency_code: str) -> None:
    minor_unit = money.PICOS_PER_UNIT // 10 ** money.minor_digits(currency_code)

    rounded = money.round_to_minor_unit(amount, currency_code)

    assert rounded % minor_unit == 0
    assert abs(rounded - amount) * 2 <= minor_unit
    assert money.round_to_minor_unit(rounded, currency_code) == rounded
    assert money.round_to_minor_unit(-amount, currency_code) == -rounded


@pytest.mark.parametrize(
    ("amount", "currency_code", "rounded"),
    [
        ("0.005", "USD", "0.01"),
        ("0.004999999999", "USD", "0.00"),
        ("-0.005", "USD", "-0.01"),
        ("1.005", "USD", "1.01"),
        ("2.5", "JPY", "3"),
        ("0.0005", "KWD", "0.001"),
        ("0", "USD", "0.00"),
    ],
)
def test_half_a_unit_rounds_away_from_zero(amount: str, currency_code: str, rounded: str) -> None:
    picos = picos_of(Decimal(amount))

    assert (
        money.exact_text(money.round_to_minor_unit(picos, currency_code), currency_code) == rounded
    )


@pytest.mark.parametrize(
    ("picos", "text"),
    [(1, "0.000000000001"), (10**12, "1.00"), (-(10**11), "-0.10"), (123_450_000_000, "0.12345")],
)
def test_an_amount_has_all_its_digits_and_at_least_cents(picos: int, text: str) -> None:
    assert money.exact_text(picos, "USD") == text


def test_a_currency_that_does_not_exist_is_refused() -> None:
    assert money.checked_currency("EUR") == "EUR"
    for code in ("EURO", "eur", "UDS", ""):
        with pytest.raises(InvalidValue, match="currency_code"):
            money.checked_currency(code)


def test_no_currency_is_listed_twice() -> None:
    assert all(len(code) == 3 for code in money.MINOR_DIGITS)
    assert [money.MINOR_DIGITS[code] for code in ("USD", "JPY", "KWD")] == [2, 0, 3]


@given(MONTHS, CURRENCIES)
def test_rounded_lines_add_up_to_each_months_total_and_nothing_is_lost_over_the_months(
    months: list[list[int]], currency_code: str
) -> None:
    minor_unit = money.PICOS_PER_UNIT // 10 ** money.minor_digits(currency_code)
    carried = invoiced = 0

    for amounts in months:
        parts = money.round_parts(amounts, carried, currency_code)
        total = money.round_total(sum(amounts), carried, currency_code)
        left = sum(amounts) + carried - total

        assert sum(parts) == total
        assert all(part % minor_unit == 0 for part in parts)
        assert all(
            abs(part - amount) <= minor_unit for part, amount in zip(parts, amounts, strict=True)
        )
        assert abs(left) * 2 <= minor_unit
        if sum(amounts):
            assert sum(parts) == money.round_to_minor_unit(sum(amounts) + carried, currency_code)
        carried, invoiced = left, invoiced + sum(parts)

    assert invoiced + carried == sum(map(sum, months))


@pytest.mark.parametrize("carried", [5 * 10**9, -5 * 10**9])
def test_a_month_that_owes_nothing_has_no_invoice_and_carries_the_same(carried: int) -> None:
    """Otherwise half a cent would move between empty months endlessly."""
    assert money.round_total(0, carried, "USD") == 0
    assert money.round_parts([], carried, "USD") == ()
    assert money.round_parts([0, 0], carried, "USD") == (0, 0)
    assert sum(money.round_parts([7, -7], carried, "USD")) == 0


def test_many_small_lines_are_rounded_together() -> None:
    assert money.round_parts([4 * 10**9] * 3, 0, "USD") == (0, 10**10, 0)
    assert money.round_parts([4 * 10**11] * 3, 3 * 10**11, "JPY") == (10**12, 0, 10**12)
