"""Rules of FOCUS 1.4 for the exported columns, as a checker of CSV files: types, allowed values,
and nullability.

Written from the column pages of the specification, independently of the exporter. `broken_rules`
names each broken rule with its row, so that a test can plant a fault and find its name.
"""

from __future__ import annotations

import csv
import io
import json
import re
import uuid
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation

REMOVED = ("ProviderName", "PublisherName")  # removed in version 1.4
NOT_NEGATIVE = ("ListUnitPrice", "ContractedUnitPrice")
ALLOWED = {
    "ChargeCategory": {"Usage", "Purchase", "Tax", "Credit", "Adjustment"},
    "ChargeClass": {"", "Correction"},
    "ChargeFrequency": {"One-Time", "Recurring", "Usage-Based"},
    "PricingCategory": {"", "Standard", "Dynamic", "Committed", "Other"},
    "ServiceCategory": {"AI and Machine Learning"},
    "ServiceSubcategory": {
        "AI Platforms",
        "Bots",
        "Generative AI",
        "Machine Learning",
        "Natural Language Processing",
        "Other (AI and Machine Learning)",
    },
}
NUMBER = re.compile(r"-?\d+(\.\d+)?(E-?\d+)?")
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
UNIT = re.compile(r"(\d+ )?[A-Z][A-Za-z-]*s")


MANDATORY = """
    BilledCost BillingAccountId BillingAccountName BillingCurrency BillingPeriodEnd
    BillingPeriodStart ChargeCategory ChargeClass ChargeDescription ChargePeriodEnd
    ChargePeriodStart ContractedCost EffectiveCost HostProviderName InvoiceIssuerName ListCost
    PricingQuantity PricingUnit ServiceCategory ServiceName ServiceProviderName
"""
# Columns whose condition applies here: usage is measured, unit prices are published and negotiated,
# and invoices are issued.
CONDITIONAL = """
    ConsumedQuantity ConsumedUnit ContractedUnitPrice ListUnitPrice PricingCategory InvoiceId
    InvoiceDetailId ResourceId ResourceName ResourceType SkuId SkuMeter SkuPriceId SkuPriceDetails
    SubAccountId SubAccountName
"""
DECIMALS = """
    BilledCost EffectiveCost ListCost ContractedCost ListUnitPrice ContractedUnitPrice
    ConsumedQuantity PricingQuantity
"""
NEVER_NULL = """
    BilledCost EffectiveCost ListCost ContractedCost BillingAccountId BillingAccountType
    BillingCurrency BillingPeriodStart BillingPeriodEnd ChargeCategory ChargeFrequency
    ChargePeriodStart ChargePeriodEnd HostProviderName InvoiceIssuerName ServiceCategory
    ServiceSubcategory ServiceName ServiceProviderName
"""
Row = dict[str, str]


def read(file: str) -> list[Row]:
    """Return the rows of a file by column."""
    return list(csv.DictReader(io.StringIO(file, newline=""), strict=True))


def broken_rules(file: str) -> list[str]:
    """Return each broken rule with its row; none for a correct file."""
    header = next(csv.reader(io.StringIO(file, newline="")))
    found = list(broken_header(header))
    for number, row in enumerate(read(file), 1):
        found += [f"row {number}: {rule}" for rule in broken_row(row)]
    return found


def broken_header(header: list[str]) -> Iterator[str]:
    """Yield broken rules of presence, form and order of columns."""
    for column in (*MANDATORY.split(), *CONDITIONAL.split()):
        if column not in header:
            yield f"{column} is missing"
    for column in header:
        if column in REMOVED:
            yield f"{column} is no column of this version"
        if not re.fullmatch(r"x_[A-Za-z0-9]+|[A-Z][A-Za-z0-9]{0,49}", column):
            yield f"{column} is no name of a column"
    own = [column.startswith("x_") for column in header]
    if own != sorted(own):
        yield "custom columns come last"
    if len(set(header)) < len(header):
        yield "a column is there twice"


def broken_row(row: Row) -> Iterator[str]:
    """Yield broken rules of types, values, nulls, and relations of columns in a row."""
    for column in NEVER_NULL.split():
        if not row[column].strip():
            yield f"{column} must not be null"
    for column, values in ALLOWED.items():
        if row[column] not in values:
            yield f"{column} {row[column]!r} is not allowed"
    for column in DECIMALS.split():
        if row[column] and not NUMBER.fullmatch(row[column]):
            yield f"{column} {row[column]!r} is no number"
        if column in NOT_NEGATIVE and row[column].startswith("-"):
            yield f"{column} must not be negative"
    for column in (
        "BillingPeriodStart",
        "BillingPeriodEnd",
        "ChargePeriodStart",
        "ChargePeriodEnd",
    ):
        if not MOMENT.fullmatch(row[column]):
            yield f"{column} {row[column]!r} is no date and time in UTC"
    for column in ("ConsumedUnit", "PricingUnit"):
        if row[column] and not UNIT.fullmatch(row[column]):
            yield f"{column} {row[column]!r} is no unit"
    for column in ("BillingAccountId", "SubAccountId", "ResourceId"):
        if row[column]:
            yield from unless(is_uuid(row[column]), f"{column} is not the id")
    yield from unless(
        re.fullmatch(r"[A-Z]{3}", row["BillingCurrency"]) is not None,
        "BillingCurrency is no ISO 4217 code",
    )
    yield from unless(
        row["ChargePeriodStart"] < row["ChargePeriodEnd"], "ChargePeriodEnd is exclusive and later"
    )
    yield from unless(
        row["BillingPeriodStart"] < row["BillingPeriodEnd"],
        "BillingPeriodEnd is exclusive and later",
    )
    yield from broken_pricing(row)
    yield from broken_groups(row)


def broken_pricing(row: Row) -> Iterator[str]:
    """Yield broken rules of prices, quantities and costs."""
    is_usage, has_price = row["ChargeCategory"] == "Usage", bool(row["SkuPriceId"])
    for column in (
        "SkuPriceId",
        "SkuId",
        "ListUnitPrice",
        "ContractedUnitPrice",
        "PricingQuantity",
        "PricingUnit",
        "PricingCategory",
    ):
        yield from unless(
            bool(row[column]) or not is_usage or row["ChargeClass"] == "Correction",
            f"{column} is null for usage",
        )
        yield from unless(bool(row[column]) == has_price, f"{column} goes with SkuPriceId")
    yield from unless(
        bool(row["ConsumedQuantity"]) == is_usage, "ConsumedQuantity is of usage alone"
    )
    yield from unless(
        bool(row["ConsumedUnit"]) == bool(row["ConsumedQuantity"]),
        "ConsumedUnit goes with ConsumedQuantity",
    )
    yield from unless(
        row["ChargeFrequency"] != "Usage-Based" or row["ChargeCategory"] != "Purchase",
        "a purchase is not usage-based",
    )
    try:
        cost = {
            name: Decimal(row[f"{name}Cost"])
            for name in ("Billed", "Effective", "List", "Contracted")
        }
        for name in ("List", "Contracted"):
            if row["PricingQuantity"] and row[f"{name}UnitPrice"]:
                product = Decimal(row[f"{name}UnitPrice"]) * Decimal(row["PricingQuantity"])
                yield from unless(
                    cost[name] == product,
                    f"{name}Cost is not {name}UnitPrice times PricingQuantity",
                )
    except InvalidOperation:
        return
    yield from unless(
        bool(row["ListUnitPrice"]) or cost["List"] == cost["Billed"],
        "ListCost without a price is BilledCost",
    )
    yield from unless(
        row["ChargeCategory"] != "Credit" or cost["Contracted"] == cost["Billed"],
        "ContractedCost of a credit",
    )
    yield from unless(
        cost["Effective"] == cost["Billed"],
        "EffectiveCost is BilledCost where nothing covers anything",
    )


def broken_groups(row: Row) -> Iterator[str]:
    """Yield broken rules of columns that are only valid together."""
    for one, others in (
        ("SubAccountId", ("SubAccountName", "SubAccountType")),
        ("ResourceId", ("ResourceName", "ResourceType")),
        ("SkuId", ("SkuMeter",)),
        ("SkuPriceId", ("SkuPriceDetails",)),
        ("InvoiceId", ("InvoiceDetailId",)),
    ):
        for other in others:
            yield from unless(bool(row[other]) == bool(row[one]), f"{other} goes with {one}")
    if row["Tags"]:
        tags = json.loads(row["Tags"])
        flat = isinstance(tags, dict) and all(isinstance(value, str) for value in tags.values())
        yield from unless(flat, "Tags is a flat object")
    if row["SkuPriceDetails"]:
        details = json.loads(row["SkuPriceDetails"])
        flat = isinstance(details, dict) and all(
            isinstance(value, str | int | float | bool) for value in details.values()
        )
        yield from unless(
            flat and all(key.startswith("x_") for key in details),
            "SkuPriceDetails is a flat object with our own keys",
        )


def unless(holds: bool, rule: str) -> Iterator[str]:
    """Yield the rule if it does not hold."""
    if not holds:
        yield rule


def is_uuid(value: str) -> bool:
    """Return whether the value is a UUID."""
    try:
        return str(uuid.UUID(value)) == value
    except ValueError:
        return False
