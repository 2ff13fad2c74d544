"""Finance through commands and service: close, read, prove and correct months; and its refusals."""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pypdf import PdfReader
from sqlalchemy import insert, text
from typer.testing import CliRunner
from weir_cli.__main__ import app
from weir_client import (
    AsyncBillingClient,
    BillingProfile,
    DocumentFormat,
    FailedPrecondition,
    InvalidRequest,
    Money,
    NotFound,
    PermissionDenied,
)

from metering.core.models import PriceVersion
from metering.pricing.prices import get_price
from tests.metering.usage import Consumed, Customer, add_usage
from tests.service import Service, Tenant

OCTOBER = datetime(2025, 10, 10, 12, tzinfo=UTC)
CENT = 10**10


@dataclass(frozen=True, slots=True)
class Finance:
    """Customer with usage in October 2025, and two people of finance."""

    service: Service
    tenant: Tenant
    ann: str
    bob: str
    home: Path

    async def weir(self, *arguments: str, key: str = "", status: int = 0) -> str:
        """Return the output of a command, stderr after stdout."""
        environment = {
            "WEIR_ADDRESS": self.service.address,
            "WEIR_API_KEY": key or self.ann,
            "WEIR_HOME": str(self.home),
            "COLUMNS": "200",
        }
        # In a thread: the command has its own event loop.
        result = await asyncio.to_thread(
            CliRunner(env=environment).invoke, app, arguments, catch_exceptions=False
        )
        text = result.stdout + result.stderr
        assert result.exit_code == status, text
        return text

    def client(self, key: str = "") -> AsyncBillingClient:
        """Return the SDK's client."""
        return AsyncBillingClient(self.service.address, key or self.ann, tls=False)


@pytest.fixture
async def finance(service: Service, tmp_path: Path) -> Finance:
    """Yield a tenant with past usage, and two admin keys."""
    tenant = await service.tenant()
    (_, ann), (_, bob) = [await service.new_key(tenant, "admin") for _ in range(2)]
    async with service.session() as session:
        values = {
            "model": f"m-{uuid.uuid4()}",
            "currency_code": "USD",
            "effective_at": datetime(2025, 1, 1, tzinfo=UTC),
        }
        prices = {
            "input_picos_per_token": 150_000,
            "cached_input_picos_per_token": 15_000,
            "output_picos_per_token": 600_000,
        }
        version = (
            await session.scalars(
                insert(PriceVersion).values(values | prices).returning(PriceVersion.id)
            )
        ).one()
        customer = Customer(tenant.organization_id, tenant.name, tenant.key, tenant.secret)
        used = [
            Consumed(1_000_003, 1_000, 10_007, "stop", OCTOBER),
            Consumed(9, 0, 1, "cancelled", OCTOBER),
        ]
        await add_usage(session, customer, await get_price(session, version), used)
    return Finance(service, tenant, ann, bob, tmp_path)


async def test_a_month_is_closed_and_corrected(finance: Finance, tmp_path: Path) -> None:
    name = finance.tenant.name
    org = ("--org", name)

    checked = await finance.weir("month", "close", "2025-10", *org, "--check")
    closed = await finance.weir("month", "close", "2025-10", *org)
    again = await finance.weir("month", "close", "2025-10", *org)
    [month] = [
        m
        for m in json.loads(await finance.weir("month", "list", *org, "--json"))
        if m["month"] == "2025-10"
    ]
    await finance.weir(
        "month", "show", "2025-10", *org, "--format", "csv", "--output", str(tmp_path / "month.csv")
    )
    await finance.weir(
        "month", "show", "2025-10", *org, "--format", "pdf", "--output", str(tmp_path / "month.pdf")
    )
    document = await finance.weir("month", "show", "2025-10", *org, "--format", "json")
    shown = await finance.weir("month", "show", "2025-10", *org)
    verified = await finance.weir("month", "verify", "2025-10", *org)

    number = month["invoice_number"]
    assert checked == f"{name} 2025-10: can be closed\n"
    assert closed == f"{name} 2025-10: closed: invoice {number}, 0.16 USD\n"
    assert again == f"{name} 2025-10: was closed before: invoice {number}, 0.16 USD\n"
    assert hashlib.sha256((tmp_path / "month.csv").read_bytes()).hexdigest() == month["csv_sha256"]
    assert hashlib.sha256((tmp_path / "month.pdf").read_bytes()).hexdigest() == month["pdf_sha256"]
    assert hashlib.sha256(document.encode()).hexdigest() == month["json_sha256"]
    assert f"invoice {number}" in shown
    assert "reproduced" in verified

    proposed = await finance.weir(
        "credit-note", "create", number, "0.05", "--reason", "an outage", "--json"
    )
    adjustment_id = json.loads(proposed)["adjustment_id"]
    own = await finance.weir("adjustment", "approve", adjustment_id, status=1)
    approved = await finance.weir("adjustment", "approve", adjustment_id, key=finance.bob)
    less = json.loads(
        await finance.weir(
            "adjustment", "create", "-0.001", *org, "--reason", "good will", "--json"
        )
    )
    rejected = await finance.weir("adjustment", "reject", less["adjustment_id"])
    notes = await finance.weir("credit-note", "list", *org)

    for file in ("first.pdf", "second.pdf"):
        note = approved.split()[2]
        await finance.weir("credit-note", "show", note, "--pdf", str(tmp_path / file))
        pdf = ("--format", "pdf", "--output", str(tmp_path / f"month-{file}"))
        await finance.weir("month", "show", "2025-10", *org, *pdf)
    page = PdfReader(tmp_path / "first.pdf").pages[0].extract_text()
    lines = {line.strip() for line in page.splitlines()}
    assert {"Credit note", note, number, "an outage", "USD -0.05"} <= lines
    for kind in ("", "month-"):
        first, second = (
            (tmp_path / f"{kind}{each}.pdf").read_bytes() for each in ("first", "second")
        )
        assert first == second

    assert "Another person has to approve it" in own
    assert "credit note CN-" in approved
    assert "rejected" in rejected
    assert "an outage" in notes
    assert "good will" not in notes
    assert "reproduced" in await finance.weir("month", "verify", "2025-10", *org)
    actions = [
        row["action"]
        for row in finance.service.database.rows(
            "SELECT action FROM audit_log WHERE after->>'organization_id' = %s ORDER BY id",
            str(finance.tenant.organization_id),
        )
    ]
    assert [each for each in actions if each.startswith(("month", "adjustment"))] == [
        *(
            "month.close",
            "adjustment.create",
            "adjustment.approve",
            "adjustment.create",
            "adjustment.reject",
        )
    ]


async def test_obstacles_are_shown_with_kinds_and_remedies(finance: Finance) -> None:
    present = f"{datetime.now(UTC):%Y-%m}"

    async with finance.client() as client:
        checked = await client.close_month(finance.tenant.name, present, validate_only=True)
        with pytest.raises(FailedPrecondition) as refusal:
            await client.close_month(finance.tenant.name, present)
    reported = await finance.weir("month", "close", present, "--org", finance.tenant.name, status=1)

    kinds = [each.kind for each in refusal.value.details.preconditions]
    assert kinds == [each.kind for each in checked.obstacles]
    assert kinds[0] == "MONTH_NOT_OVER"
    assert "EARLIER_MONTH_OPEN" in kinds
    assert refusal.value.reason == "MONTH_NOT_CLOSABLE"
    assert "MONTH_NOT_OVER" in reported


async def test_finance_reads_its_own_and_changes_nothing(finance: Finance) -> None:
    service, tenant = finance.service, finance.tenant
    _, reader = await service.new_key(tenant, "billing")
    stranger_tenant = await service.tenant()
    _, stranger = await service.new_key(stranger_tenant, "billing")
    async with finance.client() as client:
        number = (await client.close_month(tenant.name, "2025-10")).month.invoice_number

    async with finance.client(reader) as client:
        invoice = await client.get_invoice(number)
        document = await client.get_month_document(tenant.name, "2025-10", DocumentFormat.CSV)
        assert invoice == await client.get_invoice(organization=tenant.name, month="2025-10")
        for change in (
            client.close_month(tenant.name, "2025-10"),
            client.create_adjustment(tenant.name, Money("USD", CENT), "more"),
            client.create_credit_note(number, Money("USD", CENT), "less"),
            client.approve_adjustment(str(uuid.uuid4())),
            client.reject_adjustment(str(uuid.uuid4())),
        ):
            with pytest.raises(PermissionDenied):
                await change
    async with finance.client(stranger) as client:
        for reading in (
            client.get_invoice(number),
            client.get_invoice(organization=tenant.name, month="2025-10"),
            client.get_month_document(tenant.name, "2025-10", DocumentFormat.JSON),
            client.list_months(tenant.name),
            client.verify_month(tenant.name, "2025-10"),
            anext(client.list_adjustments(tenant.name)),
        ):
            with pytest.raises(NotFound):
                await reading

    assert invoice.total.picos == sum(line.amount.picos for line in invoice.lines) == 16 * CENT
    assert document.startswith(b"record_type,")


async def test_finance_sees_the_customer_and_the_payment_state(finance: Finance) -> None:
    service, tenant = finance.service, finance.tenant
    _, reader = await service.new_key(tenant, "billing")
    stripe_id = f"in_{uuid.uuid4().hex}"
    await finance.weir(
        "org",
        "billing",
        tenant.name,
        "--email",
        "billing@acme.example",
        "--legal-name",
        "Acme GmbH",
    )
    await finance.weir("month", "close", "2025-10", "--org", tenant.name)
    async with service.session() as session:
        await session.execute(
            text("""
            INSERT INTO stripe_invoices (id, organization_id, customer_id, currency_code,
                                         period_start, period_end, amount_due_minor,
                                         amount_paid_minor, finalized_at, payment_failed_at,
                                         last_event_at)
            VALUES (:id, :organization_id, 'cus_1', 'USD', '2025-10-01Z', '2025-11-01Z', 16, 0,
                now(), now(), now())
            """),
            {"id": stripe_id, "organization_id": tenant.organization_id},
        )

    async with finance.client(reader) as client:
        invoice = await client.get_invoice(organization=tenant.name, month="2025-10")
        [month] = [
            each for each in await client.list_months(tenant.name) if each.month == "2025-10"
        ]
        report = await client.get_month_report(tenant.name, "2025-10")
    shown = await finance.weir("month", "list", "--org", tenant.name)
    refused = await finance.weir("org", "billing", tenant.name, "--country", "Germany", status=1)

    assert month.payments == invoice.payments
    [payment] = month.payments
    assert (payment.stripe_invoice_id, payment.state, payment.amount_due) == (
        stripe_id,
        "failed",
        Money("USD", 16 * CENT),
    )
    profile = BillingProfile(emails=("billing@acme.example",), legal_name="Acme GmbH")
    assert report.billing_profile == profile
    assert "failed" in shown
    assert "--country" in refused
    assert "ISO 3166-1" in refused


async def test_bad_amounts_and_reasons_are_refused(finance: Finance) -> None:
    name = finance.tenant.name
    async with finance.client() as client:
        number = (await client.close_month(name, "2025-10")).month.invoice_number
        for requested, field in (
            (client.create_adjustment(name, Money("USD", 0), "none"), "amount"),
            (client.create_adjustment(name, Money("EUR", CENT), "other"), "amount.currency_code"),
            (client.create_adjustment(name, Money("USD", CENT), "=1+1"), "reason"),
            (client.create_adjustment(name, Money("USD", CENT), ""), "reason"),
            (client.create_credit_note(number, Money("USD", -CENT), "less"), "amount"),
            (client.create_credit_note(number, Money("USD", 1), "a pico"), "amount"),
            (client.create_credit_note(number, Money("USD", 17 * CENT), "more than all"), "amount"),
        ):
            with pytest.raises(InvalidRequest) as refusal:
                await requested
            assert [each.field for each in refusal.value.details.field_violations] == [field]
        request_id = str(uuid.uuid4())
        first = await client.create_adjustment(name, Money("", CENT), "once", request_id=request_id)

        again = await client.create_adjustment(name, Money("", CENT), "once", request_id=request_id)
        assert again == first
        adjustments = client.list_adjustments(name, undecided_only=True)
        [undecided] = [each async for each in adjustments]
        assert undecided.reason == "once"
