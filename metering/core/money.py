"""Amounts of money: integers of picos (1e-12 of a unit), their text, the only rounding."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from metering.core.errors import InvalidValue

PICO_DIGITS = 12
PICOS_PER_UNIT = 10**PICO_DIGITS

# ISO 4217: active currencies by the digits of their minor unit, without funds, metals and test
# codes.
_CODES_BY_MINOR_DIGITS = {
    0: "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF",
    2: (
        """
        AED AFN ALL AMD AOA ARS AUD AWG AZN BAM BBD BDT BMD BND BOB BRL BSD BTN BWP BYN BZD CAD
        CDF CHF CNY COP CRC CUP CVE CZK DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD
        GTQ GYD HKD HNL HTG HUF IDR ILS INR IRR JMD KES KGS KHR KPW KYD KZT LAK LBP LKR LRD LSL
        MAD MDL MGA MKD MMK MNT MOP MRU MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK NPR NZD PAB PEN
        PGK PHP PKR PLN QAR RON RSD RUB SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP STN SVC SYP
        SZL THB TJS TMT TOP TRY TTD TWD TZS UAH USD UYU UZS VES WST XCD XCG YER ZAR ZMW ZWG
    """
    ),
    3: "BHD IQD JOD KWD LYD OMR TND",
    4: "CLF UYW",
}
MINOR_DIGITS = {
    code: digits for digits, codes in _CODES_BY_MINOR_DIGITS.items() for code in codes.split()
}


def checked_currency(code: str) -> str:
    """Validate an active ISO 4217 code and return it unchanged. Raises: InvalidValue."""
    if code not in MINOR_DIGITS:
        raise InvalidValue(
            "currency_code",
            f"{code[:64]!r} is not an ISO 4217 code: use three capital letters such as USD, EUR"
            " or JPY",
        )
    return code


def minor_digits(currency_code: str) -> int:
    """Return the decimal places of a currency: 2 for USD, 0 for JPY, 3 for KWD."""
    return MINOR_DIGITS.get(currency_code, 2)


def minor_unit(currency_code: str) -> int:
    """Return a currency's minor unit in picos, such as one cent for USD."""
    coin: int = 10 ** (PICO_DIGITS - minor_digits(currency_code))
    return coin


def round_to_minor_unit(amount_picos: int, currency_code: str) -> int:
    """Round an amount in picos to whole minor units, in picos: the only rounding in the system.

    Half a minor unit is rounded away from zero, so that a credit note of the same amount cancels an
    invoice exactly. Carry the amount minus the result.
    """
    step = minor_unit(currency_code)
    magnitude = (abs(amount_picos) + step // 2) // step * step
    return magnitude if amount_picos >= 0 else -magnitude


def round_total(exact_picos: int, carried_picos: int, currency_code: str) -> int:
    """Add the previous carry to an exact sum and round it to whole minor units; all in picos.

    An exact sum of zero returns 0 and keeps the carry. The new carry is the exact sum plus the
    previous carry minus the result.
    """
    return round_to_minor_unit(exact_picos + carried_picos, currency_code) if exact_picos else 0


def round_parts(
    amounts_picos: Iterable[int], carried_picos: int, currency_code: str
) -> tuple[int, ...]:
    """Split the rounded total among amounts so that the parts add up to it.

    Each part is the growth of the rounded running total. It is within one minor unit of its amount,
    and may differ from the amount rounded alone.
    """
    parts: list[int] = []
    exact = rounded = 0
    for amount in amounts_picos:
        exact += amount
        reached = round_total(exact, carried_picos, currency_code)
        parts.append(reached - rounded)
        rounded = reached
    return tuple(parts)


def to_decimal(amount_picos: int) -> Decimal:
    """Convert picos to an exact Decimal in currency units.

    Arithmetic on the result follows the decimal context and may round.
    """
    digits = tuple(int(digit) for digit in str(abs(amount_picos)))
    return Decimal((int(amount_picos < 0), digits, -PICO_DIGITS))


def exact_text(amount_picos: int, currency_code: str) -> str:
    """Format an amount with all significant digits: `0.00012345`, `1.50`, `-3.00`."""
    units, picos = divmod(abs(amount_picos), PICOS_PER_UNIT)
    fraction = f"{picos:0{PICO_DIGITS}d}".rstrip("0").ljust(minor_digits(currency_code), "0")
    sign = "-" if amount_picos < 0 else ""
    return f"{sign}{units}.{fraction}" if fraction else f"{sign}{units}"
