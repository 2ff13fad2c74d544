"""Numbers for people and from people: prices, limits, waits. Exact, with one place per conversion."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Context, Decimal, InvalidOperation

from weir_client import Money, Price, QuotaDimension

TOKENS_PER_PRICE = 1_000_000  # prices are shown per million tokens, as customers compare them
INT64_MAX = 2**63 - 1  # the wire's limit for one value
MONEY = (QuotaDimension.COST_PER_DAY, QuotaDimension.COST_PER_MONTH, QuotaDimension.PREPAID_CREDIT)


def duration_text(seconds: float) -> str:
    """A wait for people: `0.3 s`, `12 s`, `4 min`, `3 h`, `9 d`, rounded up so that waiting so long is enough."""
    if seconds < 1:
        return f"{seconds:.1f} s"
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{-int(-seconds // unit_s)} {unit}"
    return f"{-int(-seconds // 86_400)} d"


def decimal_text(value: Decimal, places: int = 2) -> str:
    """An exact number with thousands separators, at least so many decimals, and no needless zeros beyond them."""
    whole, _, fraction = f"{value:,f}".partition(".")
    fraction = fraction.rstrip("0").ljust(places, "0")
    return f"{whole}.{fraction}" if fraction else whole


def time_text(time: datetime | None, absent: str = "—") -> str:
    """A moment in UTC to the second."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z" if time else absent


def per_million(picos_per_token: int) -> Decimal:
    """A price per million tokens in units of the currency, exact."""
    return Money("", picos_per_token * TOKENS_PER_PRICE).amount


def price_text(price: Price | None, picos_per_token: int) -> str:
    """A price per million tokens with its currency; a dash where there is none."""
    return f"{decimal_text(per_million(picos_per_token))} {price.currency_code}" if price else "—"


def dimension_amount(dimension: QuotaDimension | None, value: int) -> str:
    """A limit or what is left of it, in the unit of its dimension; money in units of the currency."""
    if dimension in MONEY:
        return decimal_text(Money("", value).amount)
    return f"{value:,}"


def units_to_picos(amount: Decimal) -> int:
    """An amount in units of a currency as whole picos. Raises: ValueError if it is finer than a pico."""
    scaled = amount.scaleb(12, Context(prec=len(amount.as_tuple().digits) + 20))  # the default precision would round silently
    if scaled != scaled.to_integral_value():
        raise ValueError(f"{amount} is finer than a pico (twelve decimals)")
    return int(scaled)


def parse_amount(text: str) -> Decimal:
    """A decimal number as people write it, `1,000.50` included. Raises: ValueError."""
    try:
        amount = Decimal(text.replace(",", "").replace("_", ""))
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a number") from None
    if not amount.is_finite():
        raise ValueError(f"{text!r} is not a number")
    return amount


def parse_limit(dimension: QuotaDimension, text: str) -> int:
    """A limit as the API takes it: whole requests or tokens, or money in units of the currency, turned into picos.

    Raises: ValueError with what is wrong and what would do.
    """
    amount = parse_amount(text)
    if amount < 0:
        raise ValueError("a limit is 0 or more; 0 lets nothing in")
    if dimension in MONEY:
        limit = units_to_picos(amount)
    elif amount == amount.to_integral_value():
        limit = int(amount)
    else:
        raise ValueError(f"{dimension.value} counts whole numbers")
    if limit > INT64_MAX:
        most = Money("", INT64_MAX).amount if dimension in MONEY else Decimal(INT64_MAX)
        raise ValueError(f"the largest limit is {decimal_text(most, 0)}")
    return limit


def parse_price(text: str) -> int:
    """A price per million tokens as whole picos per token. Raises: ValueError if it is negative, or too fine to be exact."""
    amount = parse_amount(text)
    if amount < 0:
        raise ValueError("a price is 0 or more")
    picos, rest = divmod(units_to_picos(amount), TOKENS_PER_PRICE)
    if rest:
        raise ValueError(f"{text} per million tokens is finer than a pico per token (six decimals)")
    return picos


def parse_thresholds(text: str) -> list[int]:
    """Percentages, separated by commas; `none` for none. Raises: ValueError."""
    if text == "none":
        return []
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{text!r} is no list of whole percentages: give some such as 50,80,100, or none")
    return [int(part) for part in parts]


def percents_text(values: Iterable[int]) -> str:
    """Percentages for people."""
    text = ", ".join(map(str, values))
    return f"{text} %" if text else "none"


def thresholds_text(dimension: QuotaDimension, values: Iterable[int]) -> str:
    """At what a limit alerts: percent of it, or money that is left."""
    if dimension is not QuotaDimension.PREPAID_CREDIT:
        return percents_text(values)
    text = ", ".join(dimension_amount(dimension, value) for value in values)
    return f"{text} left" if text else "none"
