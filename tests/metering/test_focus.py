"""FOCUS export: the specification's rules, and costs that equal the bill."""

from __future__ import annotations

import csv
import io
import uuid
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvalidValue
from metering.core.models import PriceVersion, ServiceTier, TokenKind
from metering.invoicing.month_report import (
    Closed,
    MonthReport,
    Reconciliation,
    RequestCounts,
    csv_cell,
)
from metering.invoicing.months import month_report
from metering.ledger.rating import rate_all_pending
from metering.plans.plans import LineKind, PlanLine
from metering.pricing.prices import ModelPrice, TokenPrices
from metering.reports.focus import (
    COLUMNS,
    FocusMonth,
    Tags,
    UsageCharge,
    csv_text,
    focus_csv,
)
from metering.store.db import Sessions
from tests.metering.focus_rules import Row, broken_rules, read
from tests.metering.usage import Acme, Consumed, Customer, add_usage

FIRST = datetime(2026, 11, 1, tzinfo=UTC)
CLOSED = Closed(datetime(2026, 12, 2, tzinfo=UTC), "test", "INV-000042")
REPORT = MonthReport(
    "acme",
    uuid.UUID(int=7),
    "2026-11",
    "USD",
    (),
    RequestCounts(1, 1, 0, 0, 0),
    0,
    Reconciliation(9, 9, 0),
)
CHARGE = UsageCharge(
    day=date(2026, 11, 3),
    project_id=uuid.UUID(int=1),
    project_name="search",
    api_key_id=uuid.UUID(int=2),
    api_key_name="bot",
    model="demo",
    price_version=1,
    tier=ServiceTier.INTERACTIVE,
    token_kind=TokenKind.OUTPUT,
    token_count=9,
    cancelled_token_count=0,
    request_count=1,
    unit_price_picos=600_000,
    list_price_picos=600_000,
)
CHARGES = (
    PlanLine(LineKind.VOLUME, "10 % off", -1_234_567, "demo", TokenKind.OUTPUT, 100),
    PlanLine(LineKind.ADJUSTMENT, "Outage, 3 hours", -1_000_000_000),
    PlanLine(LineKind.CREDIT, "Welcome credit", -2_000_000_000),
)


async def report_of(sessions: Sessions, month: str = "2026-11") -> MonthReport:
    async with sessions() as session:
        return await month_report(session, organization="acme", month=month)


async def file_of(
    sessions: Sessions,
    report: MonthReport,
    issuer: str = "Weir Operations GmbH",
    tags: Tags | None = None,
) -> str:
    async with sessions() as session:
        return "".join([piece async for piece in focus_csv(session, report, issuer, tags)])


async def add_price(
    session: AsyncSession, organization_id: uuid.UUID | None, factor: int = 1
) -> ModelPrice:
    """Set a list or own price of the year before."""
    rates = {
        "input_picos_per_token": 75_001 * factor,
        "cached_input_picos_per_token": 0,
        "output_picos_per_token": 300_000 * factor,
    }
    begins = FIRST - timedelta(days=365)
    row = PriceVersion(
        model="large",
        currency_code="USD",
        organization_id=organization_id,
        effective_at=begins,
        **rates,
    )
    session.add(row)
    await session.flush()
    return ModelPrice("large", TokenPrices(row.id, "USD", **rates), begins)


@pytest.fixture
async def used(acme: Acme) -> Sessions:
    """A month of `acme` with list and own prices, cancelled and failed requests."""
    async with acme.sessions.begin() as session:
        await add_price(session, None, factor=2)
        own = await add_price(session, acme.organization_id)
        await add_usage(
            session,
            acme.customer,
            acme.price,
            [Consumed(n, n // 2, n, "stop", FIRST + timedelta(hours=9 * n)) for n in range(1, 9)],
        )
        await add_usage(
            session,
            acme.customer,
            acme.price,
            [Consumed(11, 0, 3, "cancelled", FIRST), Consumed(5, 5, 0, "failed", FIRST)],
        )
        await add_usage(
            session, acme.customer, own, [Consumed(100, 20, 10, "stop", FIRST + timedelta(days=29))]
        )
    await rate_all_pending(acme.sessions)
    return acme.sessions


async def test_every_row_keeps_the_rules_of_focus(used: Sessions) -> None:
    report = replace(await report_of(used), charges=CHARGES)

    for each in (report, replace(report, closed=CLOSED, carried_in_picos=3_000_000_000)):
        file = await file_of(used, each)
        assert broken_rules(file) == []
        assert len(read(file)) == 18 + (each.closed is not None)


async def test_costs_add_up_to_the_ledger_and_of_an_invoice_to_its_total(used: Sessions) -> None:
    report = replace(await report_of(used), charges=CHARGES, carried_in_picos=4_999_999_999)

    draft, final = await file_of(used, report), await file_of(used, replace(report, closed=CLOSED))

    assert billed(draft) == Decimal(report.total_picos).scaleb(-12)
    assert billed(final) == Decimal(report.total_rounded_picos).scaleb(-12)
    assert sum(int(row["ConsumedQuantity"] or 0) for row in read(draft)) == sum(
        line.token_count for line in report.lines
    )
    assert {row["InvoiceId"] for row in read(draft)} == {""}
    assert {row["InvoiceId"] for row in read(final)} == {"INV-000042"}


async def test_each_charge_leads_to_its_line_of_the_invoice(used: Sessions) -> None:
    report = replace(await report_of(used), charges=CHARGES, closed=CLOSED)

    rows = read(await file_of(used, report))

    for number, line in enumerate(report.lines, 1):
        of_line = [row for row in rows if row["InvoiceDetailId"] == str(number)]
        assert sum(int(row["ConsumedQuantity"]) for row in of_line) == line.token_count
        assert sum(int(row["x_RequestCount"]) for row in of_line) == line.request_count
        assert (
            sum(int(row["x_CancelledTokenCount"]) for row in of_line) == line.cancelled_token_count
        )
        assert billed("", of_line) == Decimal(line.amount_picos).scaleb(-12)


async def test_late_usage_is_a_correction(acme: Acme) -> None:
    await acme.mark_closed(date(2026, 10, 1), FIRST)
    await acme.use(
        Consumed(7, 0, 7, "stop", FIRST - timedelta(days=1)), Consumed(1, 0, 1, "stop", FIRST)
    )
    await rate_all_pending(acme.sessions)

    file = await file_of(acme.sessions, replace(await report_of(acme.sessions), closed=CLOSED))
    rows = read(file)

    assert broken_rules(file) == []
    assert {row["InvoiceDetailId"] for row in rows} == {"1", "2", "3", "4", "rounding"}
    late = [row for row in rows if row["ChargeClass"] == "Correction"]
    assert [
        (row["ChargePeriodStart"], row["x_TokenKind"], row["ConsumedQuantity"]) for row in late
    ] == [
        ("2026-10-31T00:00:00Z", "input", "7"),
        ("2026-10-31T00:00:00Z", "output", "7"),
    ]
    assert {row["BillingPeriodStart"] for row in rows} == {"2026-11-01T00:00:00Z"}


async def test_an_own_price_is_beside_its_list_price(used: Sessions, customer: Customer) -> None:
    rows = read(await file_of(used, await report_of(used)))

    (own,) = [row for row in rows if row["ContractedUnitPrice"] == "0.075001"]
    assert own["ListUnitPrice"] == "0.150002"
    assert own["ListCost"] == "0.00001200016"
    assert own["BilledCost"] == "0.00000600008"
    assert own["SubAccountName"] == "search"
    assert own["ResourceId"] == str(customer.key.id)
    assert own["SkuPriceId"] == "large/input/interactive"


async def test_without_an_issuer_the_product_provides_and_an_empty_month_is_a_header(
    sessions: Sessions, customer: Customer
) -> None:
    file = await file_of(sessions, await report_of(sessions), "")

    assert file == ",".join(COLUMNS) + "\r\n"
    assert broken_rules(file) == []


async def test_unposted_usage_is_not_a_charge(
    used: Sessions, customer: Customer, price: ModelPrice
) -> None:
    before = await file_of(used, await report_of(used))

    async with used.begin() as session:
        await add_usage(session, customer, price, [Consumed(1_000, 0, 1_000, "stop", FIRST)])

    assert await file_of(used, await report_of(used)) == before


async def test_the_same_month_is_the_same_bytes(used: Sessions) -> None:
    report = await report_of(used)

    assert await file_of(used, report) == await file_of(used, report)
    assert {row["ServiceProviderName"] for row in read(await file_of(used, report, ""))} == {"Weir"}


async def test_tags_split_charges_only_on_request(acme: Acme) -> None:
    alice, bob = await acme.end_user("alice"), await acme.end_user("=bob")
    await acme.use_and_rate(
        *(
            Consumed(count, 0, 1, settled_at=FIRST, end_user_id=who, labels=labels)
            for count, who, labels in (
                (1, None, {}),
                (2, alice, {"team": "search", "feature": "chat"}),
                (4, alice, {"team": "search"}),
                (8, bob, {"team": 'a "b"'}),
            )
        )
    )
    await acme.erase(bob)
    report = await report_of(acme.sessions)
    untagged = await file_of(acme.sessions, report)

    assert len(read(untagged)) == 2, "input and output"
    assert {row["Tags"] for row in read(untagged)} == {""}
    for tags, expected in (
        (Tags(("team",)), {"": 1, '{"team": "search"}': 6, '{"team": "a \\"b\\""}': 8}),
        (
            Tags(end_user=True),
            {
                "": 1,
                '{"weir/end_user": "alice"}': 6,
                f'{{"weir/end_user_id": "{bob}"}}': 8,
            },
        ),
        (
            Tags(("feature",), end_user=True),
            {
                "": 1,
                '{"feature": "chat", "weir/end_user": "alice"}': 2,
                '{"weir/end_user": "alice"}': 4,
                f'{{"weir/end_user_id": "{bob}"}}': 8,
            },
        ),
    ):
        file = await file_of(acme.sessions, report, tags=tags)
        assert broken_rules(file) == []
        assert billed(file) == billed(untagged)
        found = {
            row["Tags"]: int(row["ConsumedQuantity"])
            for row in read(file)
            if row["x_TokenKind"] == "input"
        }
        assert found == expected


@pytest.mark.parametrize("keys", [("",), ("a", "a"), tuple("abcdefghi"), ("weir/x",), ("x" * 65,)])
def test_tags_that_cannot_be_are_refused_by_name(keys: tuple[str, ...]) -> None:
    with pytest.raises(InvalidValue, match="tag_label_keys"):
        Tags(keys)


def billed(file: str, rows: list[Row] | None = None) -> Decimal:
    return sum(
        (Decimal(row["BilledCost"]) for row in (read(file) if rows is None else rows)), Decimal(0)
    )


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"BilledCost": ""}, "BilledCost must not be null"),
        ({"BilledCost": "1,000"}, "is no number"),
        ({"BilledCost": "+1"}, "is no number"),
        ({"ListCost": "1"}, "ListCost is not ListUnitPrice times PricingQuantity"),
        ({"ContractedUnitPrice": "-1"}, "must not be negative"),
        ({"EffectiveCost": "1"}, "EffectiveCost is BilledCost"),
        ({"ChargeCategory": "usage"}, "is not allowed"),
        ({"ChargeClass": "Late"}, "is not allowed"),
        ({"ChargePeriodEnd": "2026-11-01"}, "is no date and time"),
        ({"ChargePeriodStart": "2026-12-24T00:00:00Z"}, "ChargePeriodEnd is exclusive"),
        ({"ConsumedQuantity": ""}, "ConsumedQuantity is of usage alone"),
        ({"PricingUnit": "million tokens"}, "is no unit"),
        ({"SkuPriceId": ""}, "goes with SkuPriceId"),
        ({"SkuPriceDetails": '{"Model": "demo"}'}, "SkuPriceDetails"),
        ({"BillingCurrency": "dollars"}, "ISO 4217"),
        ({"ServiceProviderName": " "}, "ServiceProviderName must not be null"),
        ({"SubAccountId": ""}, "goes with SubAccountId"),
        ({"ResourceId": "key"}, "ResourceId is not the id"),
        ({"InvoiceId": "INV-1"}, "InvoiceDetailId goes with InvoiceId"),
    ],
)
def test_the_checker_sees_a_planted_fault(change: Row, rule: str) -> None:
    header, row = dict(zip(COLUMNS, COLUMNS, strict=True)), FocusMonth(REPORT, "").usage(CHARGE)

    assert broken_rules(csv_text([header, row])) == []
    assert any(rule in broken for broken in broken_rules(csv_text([header, row | change])))


@pytest.mark.parametrize(
    ("header", "rule"),
    [
        ("-BilledCost", "is missing"),
        ("ProviderName", "no column"),
        ("x_y", "last"),
        ("a b", "no name"),
    ],
)
def test_the_checker_sees_a_bad_header(header: str, rule: str) -> None:
    names = [name for name in COLUMNS if f"-{name}" != header]
    if not header.startswith("-"):
        names.insert(0, header)
    target = io.StringIO()
    csv.writer(target).writerow(names)

    assert any(rule in broken for broken in broken_rules(target.getvalue()))


@pytest.mark.parametrize("name", ["=1+1", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_name_is_a_formula_of_a_spreadsheet(name: str) -> None:
    assert csv_cell(name) == f"'{name}"


@pytest.mark.parametrize("value", ["-12.50", "+3", "-0", "12", "", "name", "a=b", "2026-09-01"])
def test_numbers_and_plain_names_stay_as_they_are(value: str) -> None:
    assert csv_cell(value) == value
