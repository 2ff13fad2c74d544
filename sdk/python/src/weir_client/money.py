"""Exact amounts."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from functools import total_ordering
from typing import Self

from weir_client.plain import Value

PICOS_PER_UNIT = 10**12  # scale of all prices and costs

# ISO 4217: currencies whose minor unit has other than two decimals.
_CODES_BY_MINOR_DIGITS = {
    0: "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF",
    3: "BHD IQD JOD KWD LYD OMR TND",
    4: "CLF UYW",
}
MINOR_DIGITS = {
    code: digits for digits, codes in _CODES_BY_MINOR_DIGITS.items() for code in codes.split()
}


def minor_digits(currency_code: str) -> int:
    """Return the number of decimals of a currency's minor unit: 2 for USD, 0 for JPY, 3 for KWD."""
    return MINOR_DIGITS.get(currency_code, 2)


NUMBER_FORMATS = tuple("eEfFgGn")  # ends of a format specification of a number


@total_ordering
@dataclass(frozen=True, slots=True)
class Money(Value):
    """Exact amount of money: a whole number of picos (1e-12) of one unit of a currency.

    Amounts of one currency add, subtract and compare; those of two raise ValueError. The sum of
    amounts needs no start, unless there may be none.

    >>> cost = Money.of("0.05", "USD")
    >>> cost
    Money.of('0.05', 'USD')
    >>> print(sum([cost, cost]), f"{cost:.4f}", cost < cost * 2)
    0.10 USD 0.0500 True
    >>> sum([], start=Money("USD", 0))
    Money.of('0.00', 'USD')
    """

    currency_code: str
    picos: int

    @classmethod
    def of(cls, amount: str | int | Decimal, currency_code: str) -> Self:
        """Convert an amount in units of the currency, such as dollars.

        Raises: ValueError for an invalid amount, or one finer than a pico.
        """
        refusal = ValueError(
            f"{amount!r} is not an amount in whole picos: give a string like '0.05', a Decimal or"
            " an int"
        )
        if isinstance(amount, float):
            raise refusal
        try:
            sign, digits, exponent = Decimal(amount).as_tuple()
        except ArithmeticError:
            raise refusal from None
        if not isinstance(exponent, int):  # not a number, or infinite
            raise refusal
        whole, rest = divmod(
            int("".join(map(str, digits))) * 10 ** max(exponent + 12, 0),
            10 ** max(-12 - exponent, 0),
        )
        if rest:
            raise ValueError(
                f"{amount} is finer than a pico (twelve decimals): give an amount in whole picos"
            )
        return cls(currency_code, -whole if sign else whole)

    @property
    def amount(self) -> Decimal:
        """Amount in units of the currency, exact, with at least the currency's decimals."""
        picos, exponent = abs(self.picos), -12
        while exponent < -minor_digits(self.currency_code) and picos % 10 == 0:
            picos, exponent = picos // 10, exponent + 1
        return Decimal((int(self.picos < 0), tuple(map(int, str(picos))), exponent))

    def __add__(self, other: Money) -> Money:
        if not isinstance(other, Money):
            return NotImplemented
        self._check_same_currency(other, "added")
        return Money(self.currency_code, self.picos + other.picos)

    def __radd__(self, other: int) -> Money:
        """Return the amount unchanged, as `sum` starts with 0."""
        return NotImplemented if other else self

    def __sub__(self, other: Money) -> Money:
        if not isinstance(other, Money):
            return NotImplemented
        self._check_same_currency(other, "subtracted")
        return Money(self.currency_code, self.picos - other.picos)

    def __neg__(self) -> Money:
        return Money(self.currency_code, -self.picos)

    def __mul__(self, count: int) -> Money:
        if not isinstance(count, int):
            return NotImplemented
        return Money(self.currency_code, self.picos * count)

    __rmul__ = __mul__

    def __lt__(self, other: Money) -> bool:
        if not isinstance(other, Money):
            return NotImplemented
        self._check_same_currency(other, "compared")
        return self.picos < other.picos

    def __str__(self) -> str:
        """Format the exact amount, with at least the currency's decimals: `0.00184 USD`."""
        return f"{self.amount:f} {self.currency_code}"

    def __format__(self, spec: str) -> str:
        """Format the number alone by a specification of a number such as `.4f`, else the text."""
        return format(self.amount if spec.endswith(NUMBER_FORMATS) else str(self), spec)

    def __repr__(self) -> str:
        return f"Money.of({f'{self.amount:f}'!r}, {self.currency_code!r})"

    def _check_same_currency(self, other: Money, how: str) -> None:
        if self.currency_code != other.currency_code:
            raise ValueError(
                f"{self} and {other} cannot be {how}: amounts of two currencies are not converted,"
                " so add up each currency by itself"
            )
