"""Calls about a month's usage, over the wire: access, pages, the forecast, files, and refusals."""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from pypdf import PdfReader
from weir.v1 import billing_service_pb2_grpc
from weir.v1 import usage_reports_pb2 as pb
from weir_client import (
    AsyncBillingClient,
    InvalidRequest,
    MonthExportFormat,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    UsageGrouping,
)

from api.access.auth import Authenticator
from api.access.servicer import Reports
from api.admin.billing_service import BillingServicer
from api.core.interceptor import Guard, GuardedServices
from api.core.messages import COUNT_FIELDS
from metering.core.models import TokenKind
from metering.invoicing.invoice_document import Issuer
from metering.ledger.rating import rate_all_pending
from metering.pricing.prices import COUNTS_OF_EVENT, ModelPrice
from metering.store.db import Sessions
from metering.tenants.api_keys import create_api_key
from metering.tenants.key_terms import KeyTerms
from metering.tenants.usage_subjects import create_usage_subject
from tests.metering.focus_rules import broken_rules, read
from tests.metering.usage import Consumed, Customer, add_usage, new_customer, new_price

MONTH = "2026-09"  # a past month on any day
FIRST = datetime(2026, 9, 1, tzinfo=UTC)
DAY, REQUEST = UsageGrouping.DAY, UsageGrouping.REQUEST


class Desk:
    """Billing service on a socket, and its clients."""

    def __init__(
        self, sessions: Sessions, address: str, customer: Customer, price: ModelPrice
    ) -> None:
        self.sessions, self.address, self.customer, self.price = sessions, address, customer, price

    @contextlib.asynccontextmanager
    async def client(self, secret: str = "") -> AsyncIterator[AsyncBillingClient]:
        """Return a client with a key, by default the customer's admin key."""
        async with AsyncBillingClient(self.address, secret or self.customer.secret) as client:
            yield client

    async def key(self, *scopes: str, organization: str = "acme") -> str:
        """Return the secret of a new key."""
        async with self.sessions.begin() as session:
            _, secret = await create_api_key(
                session,
                organization=organization,
                project="search",
                name="-".join(scopes),
                terms=KeyTerms(scopes=scopes),
                actor="test",
            )
        return secret


@pytest.fixture
async def desk(sessions: Sessions, tmp_path: Path) -> AsyncIterator[Desk]:
    """Yield `acme` and `bolt` with usage in a past month."""
    async with sessions.begin() as session:
        acme, bolt = await new_customer(session, "acme"), await new_customer(session, "bolt")
        price = await new_price(session)
    async with sessions.begin() as session:
        used = [Consumed(n, 0, n, "stop", FIRST.replace(day=n)) for n in range(1, 6)]
        await add_usage(session, acme, price, used)
        await add_usage(session, bolt, price, [Consumed(1_000, 0, 0, "stop", FIRST)])
    await rate_all_pending(sessions)
    server = grpc.aio.server()
    servicer = BillingServicer(
        Authenticator(sessions), sessions, Reports(sessions, 3), Issuer("Weir Operations GmbH")
    )
    billing_service_pb2_grpc.add_BillingServiceServicer_to_server(
        servicer, cast(grpc.aio.Server, GuardedServices(server, Guard()))
    )
    address = f"unix:{tmp_path}/desk"
    server.add_insecure_port(address)
    await server.start()
    yield Desk(sessions, address, acme, price)
    await server.stop(None)


async def test_pages_follow_each_other_and_the_first_has_the_total(desk: Desk) -> None:
    async with desk.client() as client:
        first, second = [
            page async for page in client.get_usage(MONTH, [DAY], organization="acme", page_size=3)
        ]

    assert [each.day for each in [*first.rows, *second.rows]] == [
        f"2026-09-0{n}" for n in range(1, 6)
    ]
    assert (first.has_more, second.has_more) == (True, False)
    assert first.total is not None
    assert second.total is None
    total = sum(row.amount.picos for row in (*first.rows, *second.rows))
    assert first.total.amount.picos == total == 15 * 750_000
    assert first.total.amount.currency_code == "USD"
    assert (first.total.token_count, first.total.request_count) == (30, 5)


async def test_a_billing_key_sees_its_own_customer_and_no_other(desk: Desk) -> None:
    secret = await desk.key("billing")
    async with desk.client(secret) as client:
        own = await anext(client.get_usage(MONTH, [UsageGrouping.ORGANIZATION]))
        for ask in (
            anext(client.get_usage(MONTH, [DAY], organization="bolt")),
            client.get_forecast("bolt"),
            client.export_month(MONTH, MonthExportFormat.FOCUS_CSV, organization="bolt"),
            client.export_month(MONTH, MonthExportFormat.INVOICE_PDF, organization="bolt"),
            client.get_month_report("bolt", MONTH),
            anext(client.get_usage(MONTH, [DAY], organization="nobody")),
        ):
            with pytest.raises(NotFound):
                await ask

    assert [row.organization_name for row in own.rows] == ["acme"]


async def test_another_customers_project_or_key_is_not_to_be_found(desk: Desk) -> None:
    bolts = await desk.key("inference", organization="bolt")
    async with desk.client() as client:
        for project, key in (("nowhere", ""), ("", bolts[:11]), ("", "wk_00000000")):
            with pytest.raises(NotFound):
                await anext(
                    client.get_usage(
                        MONTH, [DAY], organization="acme", project=project, api_key=key
                    )
                )
        with pytest.raises(InvalidRequest, match="organization"):
            await anext(client.get_usage(MONTH, [DAY], project="search"))


async def test_an_admin_key_sees_all_and_a_key_for_inference_nothing(desk: Desk) -> None:
    async with desk.client() as client:
        everyone = await anext(client.get_usage(MONTH, [UsageGrouping.ORGANIZATION]))
    async with desk.client(await desk.key("inference")) as client:
        for ask in (
            anext(client.get_usage(MONTH, [DAY])),
            client.get_forecast(),
            client.export_month(MONTH, MonthExportFormat.FOCUS_CSV),
        ):
            with pytest.raises(PermissionDenied):
                await ask
    async with desk.client("wk_nobody00_" + "0" * 43) as client:
        with pytest.raises(Unauthenticated):
            await client.export_month(MONTH, MonthExportFormat.INVOICE_PDF)

    shown = {(row.organization_name, row.token_count) for row in everyone.rows}
    assert shown == {("acme", 30), ("bolt", 1_000)}
    assert everyone.total is None


async def test_requests_are_shown_without_prompts_or_labels(desk: Desk) -> None:
    async with desk.client() as client:
        page = await anext(
            client.get_usage(
                MONTH, [REQUEST], organization="acme", day="2026-09-03", project="search"
            )
        )

    (row,) = page.rows
    assert (row.outcome, row.settle_time, row.output_token_count) == (
        "STOP",
        FIRST.replace(day=3),
        3,
    )
    assert row.request_id
    assert row.api_key_prefix == desk.customer.key.prefix


async def test_an_end_user_belongs_to_its_organization_and_pages_reach_all(desk: Desk) -> None:
    """Both customers have an end user `alice`; the rows without one are on a page too."""
    async with desk.sessions.begin() as session:
        bolt = await new_customer(session, "bolt-2")
        for who in (desk.customer, bolt):
            made = [
                (await create_usage_subject(session, who.organization_id, "end_user", "", name))[0]
                for name in ("alice", "bob", "carol")
            ]
            used = [
                Consumed(n, settled_at=FIRST, end_user_id=each.id, labels={"team": each.name or ""})
                for n, each in enumerate(made, 1)
            ]
            await add_usage(session, who, desk.price, used)
    secret = await desk.key("billing")
    by = ["end_user", "label:team", "hour"]
    async with desk.client(secret) as client:
        for largest_first in (False, True):
            pages = [
                page
                async for page in client.get_usage(
                    MONTH, by, page_size=2, largest_first=largest_first
                )
            ]
            rows = [row for page in pages for row in page.rows]
            assert len(rows) == 8, "three end users, and five hours without"
            assert pages[0].total is not None
            assert sum(row.cost.picos for row in rows) == pages[0].total.cost.picos
            assert [row.label_value for row in rows].count(None) == 5
            assert {row.end_user for row in rows} == {"", "alice", "bob", "carol"}
        [alice] = (await anext(client.get_usage(MONTH, ["end_user"], end_user="alice"))).rows
        assert alice.input_token_count == 1
        for name in ("", "alice"):
            with pytest.raises(NotFound):
                await anext(client.get_usage(MONTH, by, organization="bolt-2", end_user=name))
    async with desk.client() as client:
        everyone = await anext(client.get_usage(MONTH, ["end_user"], labels={"team": "alice"}))
        assert {(row.organization_name, row.end_user) for row in everyone.rows} == {
            ("acme", "alice"),
            ("bolt-2", "alice"),
        }
        with pytest.raises(InvalidRequest, match="organization"):
            await anext(client.get_usage(MONTH, by, end_user="alice"))


async def test_bad_questions_name_their_field(desk: Desk) -> None:
    requested: dict[str, Any] = {
        "month": MONTH,
        "organization": "acme",
        "group_by": [pb.USAGE_GROUPING_DAY],
    }
    async with desk.client() as client:
        for ask, field in (
            (anext(client.get_usage("2026-9", [DAY], organization="acme")), "month"),
            (anext(client.get_usage(MONTH, [], organization="acme")), "group_by"),
            (anext(client.get_usage(MONTH, [DAY], organization="acme", day="tuesday")), "day"),
            (
                anext(client.get_usage(MONTH, [DAY], organization="acme", page_size=10_001)),
                "page_size",
            ),
            (
                client._call(
                    client._stub.GetUsage, pb.GetUsageRequest(**requested, page_token="x")
                ),
                "page_token",
            ),
            (anext(client.get_usage(MONTH, ["week"], organization="acme")), "group_by"),
            (anext(client.get_usage(MONTH, ["label:\n"], organization="acme")), "label_key"),
            (anext(client.get_usage(MONTH, [DAY], organization="acme", end_user=" ")), "end_user"),
            (anext(client.get_usage(MONTH, [DAY], largest_first=True)), "largest_first"),
            (
                client._call(
                    client._stub.GetUsage, pb.GetUsageRequest(**requested, label_key="team")
                ),
                "label_key",
            ),
            (client.get_forecast("acme", "2999-01"), "month"),
            (client.export_month("2026-99", MonthExportFormat.INVOICE_PDF), "month"),
        ):
            with pytest.raises(InvalidRequest, match=field):
                await ask


async def test_a_forecast_of_a_month_that_is_over_and_of_the_present_one(desk: Desk) -> None:
    async with desk.client() as client:
        over = await client.get_forecast("acme", MONTH)
        present = await client.get_forecast()

    assert over.month_to_date.picos == 15 * 750_000
    assert over.expected is not None
    assert over.expected.picos == 0  # 0.00001125 is below the smallest coin
    assert (over.organization_name, over.month, over.confidence_percent) == ("acme", MONTH, 80)
    assert (present.month_to_date.picos, present.expected) == (0, None)
    assert present.month == f"{present.as_of_time.astimezone(UTC):%Y-%m}"


async def test_the_files_of_a_month_come_whole(desk: Desk) -> None:
    async with desk.sessions.begin() as session:
        key_count = 40
        for number in range(key_count):
            key, secret = await create_api_key(
                session,
                organization="acme",
                project="search",
                name=f"key-{number}",
                terms=KeyTerms(scopes=("inference",)),
                actor="test",
            )
            other = Customer(desk.customer.organization_id, "acme", key, secret)
            await add_usage(
                session,
                other,
                desk.price,
                [Consumed(5, 1, 5, "stop", FIRST.replace(day=d)) for d in (7, 8)],
            )
    await rate_all_pending(desk.sessions)

    async with desk.client() as client:
        focus = await client.export_month(MONTH, MonthExportFormat.FOCUS_CSV, organization="acme")
        pdf = MonthExportFormat.INVOICE_PDF
        invoice = await client.export_month(MONTH, pdf, organization="acme")

    assert (focus.file_name, focus.media_type) == (
        "focus-1.4-acme-2026-09.csv",
        "text/csv; charset=utf-8",
    )
    assert len(focus.content) > 2 * 64 * 1024
    assert broken_rules(focus.content.decode()) == []
    assert len(read(focus.content.decode())) == 5 * 2 + key_count * 2 * 3
    assert (invoice.file_name, invoice.media_type) == ("draft-acme-2026-09.pdf", "application/pdf")
    assert "Weir Operations GmbH" in PdfReader(io.BytesIO(invoice.content)).pages[0].extract_text()


def test_every_kind_of_token_has_a_separate_field() -> None:
    assert set(COUNT_FIELDS.values()) <= set(pb.UsageRow.DESCRIPTOR.fields_by_name)
    assert set(COUNT_FIELDS) == set(TokenKind) == set(COUNTS_OF_EVENT)
