"""Invoices of usage as they stand at Stripe: those of our subscriptions, whatever a webhook has told of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from metering.export.stripe_gateway import StripeGateway

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
