"""A month as FOCUS data: one row per charge with the columns of the FinOps Open Cost and Usage Specification, version 1.4. Pure.

Dataset: Cost and Usage. A charge of usage is a day (UTC) of one API key, price version and kind of token; then come the lines of
plan, adjustments and credit, and what rounding adds, so that the BilledCost of an invoice sums up to its total. Costs are exact.
Prices are per million tokens, as they are set and published; what was consumed is counted in tokens. Columns of our own begin
with `x_`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from metering.billing.months import month_text
from metering.billing.reports import Charge, ChargeKind, MonthReport, month_bounds
from metering.models import ServiceTier, TokenKind
from metering.money import exact_text

FOCUS_VERSION = "1.4"
PROVIDER = "Weir"  # where no issuer is set: the specification wants a name, and this is what serves the tokens
SERVICE = "LLM inference"
TOKENS_PER_PRICE = 1_000_000
PRICING_UNIT = f"{TOKENS_PER_PRICE} Tokens"

COLUMNS = (
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingAccountType",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedCost",
    "ContractedUnitPrice",
    "EffectiveCost",
    "HostProviderName",
    "InvoiceDetailId",
    "InvoiceId",
    "InvoiceIssuerName",
    "ListCost",
    "ListUnitPrice",
    "PricingCategory",
    "PricingQuantity",
    "PricingUnit",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "ServiceCategory",
    "ServiceName",
    "ServiceProviderName",
    "ServiceSubcategory",
    "SkuId",
    "SkuMeter",
    "SkuPriceDetails",
    "SkuPriceId",
    "SubAccountId",
    "SubAccountName",
    "SubAccountType",
    "x_FocusVersion",
    "x_MonthState",
    "x_Model",
    "x_TokenKind",
    "x_ServiceTier",
    "x_PriceVersion",
    "x_RequestCount",
    "x_CancelledTokenCount",
)
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class UsageCharge:
    """Posted tokens of one kind, day, API key and price version. list_price_picos: per token, what one without a contract pays."""

    day: date
    project_id: uuid.UUID
    project_name: str
    api_key_id: uuid.UUID
    api_key_name: str
    model: str
    price_version: int
    tier: ServiceTier
    token_kind: TokenKind
    token_count: int
    cancelled_token_count: int
    request_count: int
    unit_price_picos: int
    list_price_picos: int

    @property
    def amount_picos(self) -> int:
        """At the price of its admission, as posted."""
        return self.token_count * self.unit_price_picos


class FocusMonth:
    """Makes the rows of one month; knows what all of them share, and which line of the invoice each one is in."""

    def __init__(self, report: MonthReport, issuer_name: str) -> None:
        begins, ends = month_bounds(report.month)
        self._report = report
        self._invoice = report.closed.invoice_number if report.closed else ""
        self._lines = {
            (line.late_month, line.price_version, line.token_kind): str(number) for number, line in enumerate(report.lines, 1)
        }
        provider = issuer_name or PROVIDER
        self._common: Row = {
            "BillingAccountId": str(report.organization_id),
            "BillingAccountName": report.organization_name,
            "BillingAccountType": "Organization",
            "BillingCurrency": report.currency_code,
            "BillingPeriodStart": moment(begins),
            "BillingPeriodEnd": moment(ends),
            "HostProviderName": provider,
            "InvoiceIssuerName": provider,
            "ServiceProviderName": provider,
            "InvoiceId": self._invoice,
            "ServiceCategory": "AI and Machine Learning",
            "ServiceSubcategory": "Generative AI",
            "ServiceName": SERVICE,
            "x_FocusVersion": FOCUS_VERSION,
            "x_MonthState": report.state,
        }

    def usage(self, charge: UsageCharge) -> Row:
        """The row of tokens."""
        late_month = month_text(charge.day)
        late_month = late_month if late_month < self._report.month else ""
        begins = datetime(charge.day.year, charge.day.month, charge.day.day, tzinfo=UTC)
        billed = self._money(charge.amount_picos)
        kind = charge.token_kind
        details = {"x_Model": charge.model, "x_TokenKind": kind.value, "x_ServiceTier": charge.tier.value}
        line = self._lines.get((late_month, charge.price_version, kind), "")
        return self._common | {
            "BilledCost": billed,
            "EffectiveCost": billed,
            "ContractedCost": billed,
            "ContractedUnitPrice": self._money(charge.unit_price_picos * TOKENS_PER_PRICE),
            "ListCost": self._money(charge.token_count * charge.list_price_picos),
            "ListUnitPrice": self._money(charge.list_price_picos * TOKENS_PER_PRICE),
            "ChargeCategory": "Usage",
            "ChargeClass": "Correction" if late_month else "",
            "ChargeDescription": f"{charge.model}, {meter(kind).lower()}" + (f", late usage of {late_month}" if late_month else ""),
            "ChargeFrequency": "Usage-Based",
            "ChargePeriodStart": moment(begins),
            "ChargePeriodEnd": moment(begins + timedelta(days=1)),
            "ConsumedQuantity": str(charge.token_count),
            "ConsumedUnit": "Tokens",
            "PricingCategory": "Standard",
            "PricingQuantity": millions(charge.token_count),
            "PricingUnit": PRICING_UNIT,
            "InvoiceDetailId": line if self._invoice else "",
            "ResourceId": str(charge.api_key_id),
            "ResourceName": charge.api_key_name,
            "ResourceType": "API key",
            "SkuId": f"{charge.model}/{kind.value}",
            "SkuMeter": meter(kind),
            "SkuPriceId": f"{charge.model}/{kind.value}/{charge.tier.value}",
            "SkuPriceDetails": json.dumps(details),
            "SubAccountId": str(charge.project_id),
            "SubAccountName": charge.project_name,
            "SubAccountType": "Project",
            "x_Model": charge.model,
            "x_TokenKind": kind.value,
            "x_ServiceTier": charge.tier.value,
            "x_PriceVersion": str(charge.price_version),
            "x_RequestCount": str(charge.request_count),
            "x_CancelledTokenCount": str(charge.cancelled_token_count),
        }

    def charges(self) -> Iterator[Row]:
        """The rows beside the usage: plan, adjustments, credit; and of an invoice what rounding adds to its lines."""
        for number, charge in enumerate(self._report.charges, len(self._report.lines) + 1):
            yield self._beside(charge) | {"InvoiceDetailId": str(number) if self._invoice else ""}
        rounding = self._report.total_rounded_picos - self._report.total_picos
        if self._invoice and rounding:
            words = "Rounding of the total to whole coins, with what rounding left of earlier invoices"
            yield self._row(rounding, "Adjustment", words, "One-Time") | {"InvoiceDetailId": "rounding"}

    def _beside(self, charge: Charge) -> Row:
        match charge.kind:
            case ChargeKind.CREDIT:
                return self._row(charge.amount_picos, "Credit", charge.description, "One-Time")
            case ChargeKind.ADJUSTMENT:
                return self._row(charge.amount_picos, "Adjustment", charge.description, "One-Time") | {"ChargeClass": "Correction"}
            case _:
                of = {"x_Model": charge.model, "x_TokenKind": charge.token_kind.value if charge.token_kind else ""}
                return self._row(charge.amount_picos, "Adjustment", charge.description, "Recurring") | of

    def _row(self, amount_picos: int, category: str, description: str, frequency: str) -> Row:
        """An amount without a unit price: its costs are all the same."""
        amount = self._money(amount_picos)
        return self._common | {
            "BilledCost": amount,
            "EffectiveCost": amount,
            "ContractedCost": amount,
            "ListCost": amount,
            "ChargeCategory": category,
            "ChargeDescription": description,
            "ChargeFrequency": frequency,
            "ChargePeriodStart": self._common["BillingPeriodStart"],
            "ChargePeriodEnd": self._common["BillingPeriodEnd"],
        }

    def _money(self, amount_picos: int) -> str:
        return exact_text(amount_picos, self._report.currency_code)


def meter(kind: TokenKind) -> str:
    """What is counted, in words."""
    return f"{kind.value.replace('_', ' ')} tokens".title()


def moment(time: datetime) -> str:
    """ISO 8601 in UTC, to the second, as the specification wants it."""
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def millions(token_count: int) -> str:
    """A count in units of the price, exact."""
    return exact_text(token_count * (10**12 // TOKENS_PER_PRICE), "JPY")
