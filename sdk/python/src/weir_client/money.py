"""Exact amounts."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
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


@dataclass(frozen=True, slots=True, order=True)
class Money(Value):
    """Exact amount of money: a whole number of picos (1e-12) of one unit of a currency.

    >>> Money.of("0.05", "USD")
    Money(currency_code='USD', picos=50000000000)
    >>> print(Money("USD", 50_000_000_000))
    0.05 USD
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
        """Amount in units of the currency, exact to the pico."""
        digits = tuple(int(digit) for digit in str(abs(self.picos)))
        return Decimal((int(self.picos < 0), digits, -12))

    def __str__(self) -> str:
        """Format the exact amount, with at least the currency's decimals: `0.00184 USD`."""
        whole, _, fraction = f"{self.amount:f}".partition(".")
        fraction = fraction.rstrip("0").ljust(minor_digits(self.currency_code), "0")
        return f"{whole}{'.' if fraction else ''}{fraction} {self.currency_code}"
