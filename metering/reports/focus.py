"""Month as FOCUS CSV: one row per charge, with the columns of the FinOps Open Cost and Usage
Specification 1.4.

Dataset: Cost and Usage. Usage has one charge per day (UTC), API key, price version and token kind.
It is followed by the lines of plan, adjustments and credit, and by the rounding, so that the
BilledCost of an invoice sums up to its total. Charges are split further only by the labels, or the
end user, that the reader asks for as tags. Costs are exact. Prices are per million tokens, as
published; consumed quantities are tokens. Weir's own columns begin with `x_`. Null is an empty
field. Rows of a closed month and their order never change, except for tags once an end user is
erased: its id takes the place of its name, and labels with this value are gone. Rows are read and
written in batches: a month may have a hundred thousand.
"""

from __future__ import annotations

import csv
import io
import json
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvalidValue
from metering.core.models import ServiceTier, TokenKind, record_of
from metering.core.money import exact_text
from metering.core.retained import check_details
from metering.invoicing.invoices import TOKENS_PER_PRICE
from metering.invoicing.month_report import MonthReport, csv_cell
from metering.ledger.ledger import month_bounds, month_text
from metering.plans.plans import LineKind, PlanLine
from metering.pricing.prices import COUNTS_OF_EVENT, PRICES
from metering.reports.usage_reports import (
    DETAILS,
    GROUPS,
    NOT_GIVEN,
    Grouping,
    UsageFilter,
    parameters_of,
    utc_date,
    where,
)
from metering.tenants.usage_subjects import checked_label_key

FOCUS_VERSION = "1.4"
# Provider without a configured issuer, since the specification requires a name.
PROVIDER = "Weir"
SERVICE = "LLM inference"
PRICING_UNIT = f"{TOKENS_PER_PRICE} Tokens"

# In the order of the file.
COLUMN_NAMES = """
    BilledCost BillingAccountId BillingAccountName BillingAccountType BillingCurrency
    BillingPeriodEnd BillingPeriodStart ChargeCategory ChargeClass ChargeDescription
    ChargeFrequency ChargePeriodEnd ChargePeriodStart ConsumedQuantity ConsumedUnit
    ContractedCost ContractedUnitPrice EffectiveCost HostProviderName InvoiceDetailId InvoiceId
    InvoiceIssuerName ListCost ListUnitPrice PricingCategory PricingQuantity PricingUnit
    ResourceId ResourceName ResourceType ServiceCategory ServiceName ServiceProviderName
    ServiceSubcategory SkuId SkuMeter SkuPriceDetails SkuPriceId SubAccountId SubAccountName
    SubAccountType Tags x_FocusVersion x_MonthState x_Model x_TokenKind x_ServiceTier x_PriceVersion
    x_RequestCount x_CancelledTokenCount
"""
COLUMNS = tuple(COLUMN_NAMES.split())
FocusRow = dict[str, str]

CHARGE_KEYS = ("day", "project_id", "api_key_id", "price_version_id")
TAG_KEYS_MAX = 8  # each can multiply the rows
# Tags of the provider have a prefix, as the specification requires, and never equal a label.
TAG_PREFIX = "weir/"
BATCH_ROWS = 500  # groups read and written at a time, in some milliseconds
_SUMS = ", ".join(
    f"sum({count}) AS {kind}_tokens, coalesce(sum(event_count) FILTER (WHERE part = 0 AND {count} >"
    f" 0), 0)::bigint AS {kind}_requests, coalesce(sum({count}) FILTER (WHERE outcome ="
    f" ANY(:cancelled)), 0) AS {kind}_cancelled"
    for kind, (count, _) in COUNTS_OF_EVENT.items()
)
_PRICES = ", ".join(
    f"{price} AS {kind}_price, coalesce({price.replace('p.', 'l.')}, {price}) AS {kind}_list_price"
    for kind, price in PRICES.items()
)


@dataclass(frozen=True, slots=True)
class Tags:
    """Labels, by key, and the end user that split charges and become their tags.

    Raises: InvalidValue.
    """

    label_keys: tuple[str, ...] = ()
    end_user: bool = False

    def __post_init__(self) -> None:
        if len(self.label_keys) > TAG_KEYS_MAX or len(set(self.label_keys)) < len(self.label_keys):
            raise InvalidValue(
                "tag_label_keys", f"must have at most {TAG_KEYS_MAX} keys, each once"
            )
        for key in self.label_keys:
            checked_label_key(key, "tag_label_keys")
            if key.startswith(TAG_PREFIX):
                raise InvalidValue("tag_label_keys", f"must not begin with {TAG_PREFIX!r}")

    def __bool__(self) -> bool:
        return bool(self.label_keys) or self.end_user

    @property
    def columns(self) -> list[str]:
        """Expressions of the tags on a usage event u, which are never NULL."""
        labels = [
            GROUPS[Grouping.LABEL].key.replace(":label_key", f":tag_{n}")
            for n in range(len(self.label_keys))
        ]
        return [*labels, *([GROUPS[Grouping.END_USER].key] if self.end_user else [])]

    def text(self, row: Row[Any]) -> str:
        """Format the tags of a row as a JSON object; empty for none."""
        found = {}
        for number, key in enumerate(self.label_keys):
            if value := getattr(row, f"tag_{number}"):
                found[key] = value[1:]
        end_user_id = getattr(row, f"tag_{len(self.label_keys)}") if self.end_user else NOT_GIVEN
        if end_user_id != NOT_GIVEN:
            is_erased = row.end_user_name is None
            name = "end_user_id" if is_erased else "end_user"
            found[TAG_PREFIX + name] = str(end_user_id) if is_erased else row.end_user_name
        return json.dumps(found, ensure_ascii=False) if found else ""


@dataclass(frozen=True, slots=True)
class UsageCharge:
    """Posted tokens of one kind, day, API key and price version, and of the tags asked for.

    `list_price_picos` is the price per token for customers without a price of their own.
    """

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
    tags: str = ""

    @property
    def amount_picos(self) -> int:
        """Posted amount, at the price in force at admission."""
        return self.token_count * self.unit_price_picos


class FocusMonth:
    """Builder of the rows of one month: adds their common columns and their invoice lines."""

    def __init__(self, report: MonthReport, issuer_name: str) -> None:
        begins, ends = month_bounds(report.month)
        self._report = report
        self._invoice = report.closed.invoice_number if report.closed else ""
        self._lines = {
            (line.late_month, line.price_version, line.token_kind): str(number)
            for number, line in enumerate(report.lines, 1)
        }
        provider = issuer_name or PROVIDER
        self._common: FocusRow = {
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

    def usage(self, charge: UsageCharge) -> FocusRow:
        late_month = month_text(charge.day)
        late_month = late_month if late_month < self._report.month else ""
        begins = datetime(charge.day.year, charge.day.month, charge.day.day, tzinfo=UTC)
        billed = self._money(charge.amount_picos)
        kind = charge.token_kind
        details = {
            "x_Model": charge.model,
            "x_TokenKind": kind.value,
            "x_ServiceTier": charge.tier.value,
        }
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
            "ChargeDescription": (
                f"{charge.model}, {meter(kind).lower()}"
                + (f", late usage of {late_month}" if late_month else "")
            ),
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
            "Tags": charge.tags,
            **details,
            "x_PriceVersion": str(charge.price_version),
            "x_RequestCount": str(charge.request_count),
            "x_CancelledTokenCount": str(charge.cancelled_token_count),
        }

    def charges(self) -> Iterator[FocusRow]:
        """Yield the rows of plan, adjustments, credit, and the rounding of an invoice."""
        for number, charge in enumerate(self._report.charges, len(self._report.lines) + 1):
            yield self._charge(charge) | {"InvoiceDetailId": str(number) if self._invoice else ""}
        rounding = self._report.total_rounded_picos - self._report.total_picos
        if self._invoice and rounding:
            description = (
                "Rounding to minor units, including rounding carried from earlier invoices"
            )
            yield self._row(rounding, "Adjustment", description, "One-Time") | {
                "InvoiceDetailId": "rounding"
            }

    def _charge(self, charge: PlanLine) -> FocusRow:
        category = "Credit" if charge.kind is LineKind.CREDIT else "Adjustment"
        is_recurring = charge.kind not in (LineKind.CREDIT, LineKind.ADJUSTMENT)
        frequency = "Recurring" if is_recurring else "One-Time"
        return self._row(charge.amount_picos, category, charge.description, frequency) | {
            "ChargeClass": "Correction" if charge.kind is LineKind.ADJUSTMENT else "",
            "x_Model": charge.model,
            "x_TokenKind": charge.token_kind.value if charge.token_kind else "",
        }

    def _row(self, amount_picos: int, category: str, description: str, frequency: str) -> FocusRow:
        """Build the row of an amount without a unit price, whose costs are all equal."""
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
    return f"{kind.value.replace('_', ' ')} tokens".title()


def moment(time: datetime) -> str:
    """Format a time as ISO 8601 in UTC, to the second, as the specification requires."""
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def millions(token_count: int) -> str:
    """Format a token count in millions, exactly."""
    return exact_text(token_count * (10**12 // TOKENS_PER_PRICE), "JPY")


# The list price next to a customer's own price is the one in force at the end of the day of use, of
# the same tier if it has one.
CHARGES = """
WITH used AS (
    SELECT {day} AS day, u.project_id, u.api_key_id, u.price_version_id{tags}, {sums}
    FROM {usage} u
    WHERE {where} AND u.rated_at IS NOT NULL
    GROUP BY {grouped}
)
SELECT used.*, j.name AS project_name, k.name AS api_key_name, p.model, p.tier{name}, {prices}
FROM used
{end_users}
JOIN projects j ON j.id = used.project_id
JOIN api_keys k ON k.id = used.api_key_id
JOIN price_versions p ON p.id = used.price_version_id
LEFT JOIN LATERAL (
    SELECT *
    FROM price_versions l
    WHERE p.organization_id IS NOT NULL
      AND l.organization_id IS NULL
      AND l.model = p.model
      AND l.currency_code = p.currency_code
      AND l.tier IN (p.tier, '{interactive}')
      AND l.effective_at < used.day + interval '1 day'
    ORDER BY l.tier = p.tier DESC, l.effective_at DESC
    LIMIT 1
) l ON true
ORDER BY {ordered}
"""


async def focus_csv(
    session: AsyncSession, report: MonthReport, issuer_name: str, tags: Tags | None = None
) -> AsyncIterator[str]:
    """Yield the CSV file in chunks. `issuer_name` is provider and invoice issuer, or empty."""
    tags = tags or Tags()
    of = UsageFilter(report.month, report.organization_id)
    parameters = await parameters_of(session, of)
    if tags:
        await check_details(
            session, parameters["first"], "tags", "end users and labels of requests"
        )
    parameters |= {f"tag_{number}": key for number, key in enumerate(tags.label_keys)}
    columns = {f"tag_{number}": column for number, column in enumerate(tags.columns)}
    keys = [*CHARGE_KEYS, *columns]
    statement = CHARGES.format(
        usage=f"({DETAILS})" if tags else "usage_sums",
        where=where(of, parameters),
        tags="".join(f", {column} AS {name}" for name, column in columns.items()),
        grouped=", ".join(keys),
        ordered=", ".join(f"used.{key}" for key in keys),
        name=", s.name AS end_user_name" if tags.end_user else "",
        end_users=(
            f"LEFT JOIN usage_subjects s ON s.id = used.tag_{len(tags.label_keys)}"
            if tags.end_user
            else ""
        ),
        day=GROUPS[Grouping.DAY].key,
        sums=_SUMS,
        prices=_PRICES,
        interactive=ServiceTier.INTERACTIVE,
    )
    month = FocusMonth(report, issuer_name)
    yield csv_text([dict(zip(COLUMNS, COLUMNS, strict=True))])
    result = await session.stream(text(statement), parameters)
    async for rows in result.partitions(BATCH_ROWS):
        yield csv_text(month.usage(charge) for row in rows for charge in charges_of(row, tags))
    yield csv_text(month.charges())


def charges_of(row: Row[Any], tags: Tags) -> Iterator[UsageCharge]:
    """Convert a row to one charge for each kind of token in it."""
    values = row._mapping
    tags_text = tags.text(row)
    for kind in COUNTS_OF_EVENT:
        if token_count := int(values[f"{kind}_tokens"]):
            yield record_of(
                UsageCharge,
                row,
                day=utc_date(row.day),
                price_version=row.price_version_id,
                token_kind=kind,
                token_count=token_count,
                cancelled_token_count=int(values[f"{kind}_cancelled"]),
                request_count=values[f"{kind}_requests"],
                unit_price_picos=values[f"{kind}_price"],
                list_price_picos=values[f"{kind}_list_price"],
                tags=tags_text,
            )


def csv_text(rows: Iterable[dict[str, str]]) -> str:
    """Format rows as RFC 4180 CSV without a header; missing columns are null."""

    target = io.StringIO()
    writer = csv.DictWriter(target, COLUMNS, restval="", lineterminator="\r\n")
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    return target.getvalue()
