"""Prices and invoices as Stripe has them.

Prices are picos per token as `unit_amount_decimal`, exactly or not at all. Invoices are those of our subscriptions, read from
Stripe whatever a webhook reported of them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from metering.core.errors import InvalidValue
from metering.core.money import MINOR_DIGITS, PICO_DIGITS
from metering.export.stripe_gateway import StripeGateway
from metering.pricing.token_prices import COUNTS_OF_EVENT

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


# SQL of what a token of a batch costs: `b` is its batch, `p` its price version.
PRICE_CASES = " ".join(f"WHEN '{kind}' THEN p.{price}" for kind, (_, price) in COUNTS_OF_EVENT.items())
PICOS_PER_TOKEN = f"CASE b.token_kind {PRICE_CASES} END"
Invoice = Mapping[str, Any]


async def known_items(gateway: StripeGateway, label: str, customer: str) -> dict[str, str]:
    """A customer's invoice items by our ids, which they carry under the label: of calls whose answers were lost, too.

    Raises: StripeFailed.
    """
    items = await gateway.list_all("/v1/invoiceitems", customer=customer)
    return {str(carried): str(item["id"]) for item in items if (carried := (item.get("metadata") or {}).get(label))}


async def create_item(gateway: StripeGateway, label: str, item_id: uuid.UUID, key: str, currency_code: str, **terms: Any) -> str:
    """Create an invoice item that carries our id under the label; its id at Stripe. key: once per item. Raises: StripeFailed."""
    metadata = {label: str(item_id)}
    item = await gateway.call("post", "/v1/invoiceitems", key, currency=currency_code.lower(), metadata=metadata, **terms)
    return str(item["id"])


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
