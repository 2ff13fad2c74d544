"""Prices and invoices as Stripe has them.

Prices are picos per token as `unit_amount_decimal`, exactly or not at all. Invoices are those of our subscriptions, read from
Stripe whatever a webhook reported of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from metering.core.errors import InvalidValue
from metering.core.money import MINOR_DIGITS, PICO_DIGITS
from metering.export.stripe_gateway import StripeGateway

DECIMALS_MAX = 12  # digits after the point that Stripe keeps of an amount in minor units

# Digits of Stripe's minor unit where they are not those of ISO 4217, or not supported with them.
ZERO_DECIMAL = frozenset(["BIF", "CLP", "DJF", "GNF", "JPY", "KMF", "KRW", "MGA", "PYG", "RWF", "VND", "VUV", "XAF", "XOF", "XPF"])
TWO_DECIMAL = frozenset({"ISK", "UGX"})  # without minor unit by ISO; Stripe counts hundredths all the same
THREE_DECIMAL = frozenset(["BHD", "JOD", "KWD", "OMR", "TND"])


def stripe_digits(currency_code: str) -> int:
    """Digits of the minor unit that Stripe counts in. Raises: InvalidValue for a currency that it does not bill."""
    if currency_code in ZERO_DECIMAL:
        return 0
    if currency_code in THREE_DECIMAL:
        return 3
    if currency_code in TWO_DECIMAL or MINOR_DIGITS.get(currency_code) == 2:
        return 2
    raise InvalidValue("currency_code", f"Stripe does not bill in {currency_code}: give the organization another currency")


def minor_unit_picos(currency_code: str) -> int:
    """What Stripe counts amounts in. Raises: InvalidValue for a currency that it does not bill."""
    picos: int = 10 ** (PICO_DIGITS - stripe_digits(currency_code))
    return picos


def unit_amount_decimal(picos_per_token: int, currency_code: str) -> str:
    """The price of one token in minor units: 150,000 picos of USD are `0.000015`.

    Raises: InvalidValue if Stripe could not keep every digit.
    """
    shift = PICO_DIGITS - stripe_digits(currency_code)
    amount = Decimal((0, tuple(map(int, str(picos_per_token))), -shift))
    whole, _, fraction = f"{amount:f}".partition(".")
    fraction = fraction.rstrip("0")
    if len(fraction) > DECIMALS_MAX:
        raise InvalidValue("price", f"{picos_per_token} picos of {currency_code} have more than {DECIMALS_MAX} decimals at Stripe")
    return f"{whole}.{fraction}" if fraction else whole


Invoice = Mapping[str, Any]


async def usage_invoices(gateway: StripeGateway, customer: str, ends: datetime) -> list[Invoice]:
    """A customer's invoices of usage until a month's end, one for each of its subscriptions. Raises: StripeFailed."""
    subscriptions = await gateway.list_all("/v1/subscriptions", customer=customer, status="all")
    ours = {each["id"] for each in subscriptions if (each.get("metadata") or {}).get("namespace") == gateway.settings.namespace}
    if not ours:
        return []
    moment = int(ends.timestamp())
    return [
        each
        for each in await gateway.list_all("/v1/invoices", customer=customer, created={"gte": moment})
        if subscription_of(each) in ours and each["period_start"] < each["period_end"] == moment and each["status"] != "void"
    ]


def subscription_of(invoice: Invoice) -> str:
    """Whose invoice it is; empty for one that is of no subscription."""
    details = (invoice.get("parent") or {}).get("subscription_details") or {}
    return str(details.get("subscription") or "")


def begins_within(invoice: Invoice, begins: datetime) -> bool:
    """Whether all of its period is after this."""
    return int(invoice["period_start"]) >= int(begins.timestamp())


def finalized_at(invoices: Iterable[Invoice]) -> datetime | None:
    """When the last of them became final; None if there is none, or one that is not."""
    times = [(each.get("status_transitions") or {}).get("finalized_at") for each in invoices]
    known = [each for each in times if each is not None]
    return datetime.fromtimestamp(max(known), UTC) if known and len(known) == len(times) else None
