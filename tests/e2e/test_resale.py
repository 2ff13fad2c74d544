"""Resale by a customer itself, with a `billing` key: prices, statements and their files."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import uuid
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pypdf import PdfReader
from sqlalchemy import insert
from typer.testing import CliRunner
from weir_cli.__main__ import app
from weir_client import AsyncBillingClient, InvalidRequest, NotFound, PermissionDenied

from metering.core.models import PriceVersion, UsageSubject
from metering.pricing.prices import get_price
from metering.pricing.resale_prices import ResalePrice
from tests.metering.usage import Consumed, Customer, add_usage
from tests.service import Service, Tenant

OCTOBER = datetime(2025, 10, 10, 12, tzinfo=UTC)
MODEL_PICOS = 150_000
HOUR = timedelta(hours=1)
Weir = Callable[..., Coroutine[Any, Any, str]]


@pytest.fixture
async def reseller(service: Service) -> Tenant:
    """Create a customer with usage in October 2025, which it sells at 1.5 times its cost."""
    tenant = await service.tenant()
    async with service.session() as session:
        priced = {
            "model": f"m-{uuid.uuid4()}",
            "currency_code": "USD",
            "input_picos_per_token": MODEL_PICOS,
            "cached_input_picos_per_token": 0,
            "output_picos_per_token": 4 * MODEL_PICOS,
            "effective_at": datetime(2025, 1, 1, tzinfo=UTC),
        }
        [version] = await session.scalars(
            insert(PriceVersion).values(priced).returning(PriceVersion.id)
        )
        of = {"organization_id": tenant.organization_id}
        user = of | {"kind": "end_user", "name": "ada"}
        [ada] = await session.scalars(insert(UsageSubject).values(user).returning(UsageSubject.id))
        resale = {"model": "", "markup_milli": 1_500, "request_picos": 0, "effective_at": OCTOBER}
        await session.execute(insert(ResalePrice).values(of | resale))
        customer = Customer(tenant.organization_id, tenant.name, tenant.key, tenant.secret)
        used = [
            Consumed(1_000_000, 0, 10_000, settled_at=OCTOBER, end_user_id=ada),
            Consumed(9, 0, 1, settled_at=OCTOBER),
        ]
        await add_usage(session, customer, await get_price(session, version), used)
    return tenant


@pytest.fixture
async def weir(service: Service, reseller: Tenant, tmp_path: Path) -> Weir:
    """Return a function that runs a command with a `billing` key, and returns its output."""
    _, key = await service.new_key(reseller, "billing")
    environment = {
        "WEIR_ADDRESS": service.address,
        "WEIR_API_KEY": key,
        "WEIR_HOME": str(tmp_path),
        "COLUMNS": "200",
    }

    async def run(*arguments: str, status: int = 0) -> str:
        # In a thread: the command has its own event loop.
        result = await asyncio.to_thread(
            CliRunner(env=environment).invoke, app, arguments, catch_exceptions=False
        )
        text = result.stdout + result.stderr
        assert result.exit_code == status, text
        return result.stdout if status == 0 else text

    return run


async def test_statements_through_the_command_line(
    service: Service, reseller: Tenant, weir: Weir, tmp_path: Path
) -> None:
    org = ("--org", reseller.name)
    _, admin = await service.new_key(reseller, "admin")
    async with AsyncBillingClient(service.address, admin, tls=False) as finance:
        await finance.close_month(reseller.name, "2025-10")

    listed = json.loads(await weir("resale", "statements", "2025-10", *org, "--json"))
    shown = await weir("resale", "statement", "ada", "2025-10", *org)
    document = await weir("resale", "statement", "ada", "2025-10", *org, "--json")
    sheet = await weir("resale", "statement", "ada", "2025-10", *org, "--csv")
    pdf = tmp_path / "ada.pdf"
    await weir("resale", "statement", "ada", "2025-10", *org, "--pdf", str(pdf))
    nobody = json.loads(await weir("resale", "statement", "", "2025-10", *org, "--json"))

    assert [each["end_user"] for each in listed] == ["", "ada"]
    assert "0.234" in shown  # 0.156 of cost
    found = json.loads(document)
    assert (found["cost"], found["total"], found["total_rounded"]) == ("0.156", "0.234", "0.23")
    assert nobody["end_user"] is None
    assert nobody["cost"] == "0.00000195"
    rows = {row["record_type"]: row for row in csv.DictReader(io.StringIO(sheet))}
    assert rows["total_rounded"]["amount"] == "0.23"
    text = "".join(page.extract_text() for page in PdfReader(pdf).pages)
    assert "0.234" in text
    assert "ada" in text
    assert "0.156" not in text  # the end user does not see the cost
    again = tmp_path / "again.pdf"
    await weir("resale", "statement", "ada", "2025-10", *org, "--pdf", str(again))
    assert again.read_bytes() == pdf.read_bytes()


async def test_a_customer_sets_its_own_prices_only(
    service: Service, reseller: Tenant, weir: Weir
) -> None:
    other = await service.tenant()
    org = ("--org", reseller.name)

    await weir("resale", "price", "set", "demo", *org, "--markup", "1.25", "--request", "0.001")
    listed = json.loads(await weir("resale", "price", "list", *org, "--json"))
    await weir("resale", "price", "set", "demo", *org, "--withdraw")
    after = json.loads(await weir("resale", "price", "list", *org, "--json"))
    wrong = await weir("resale", "price", "set", *org, status=1)
    foreign = await weir("resale", "price", "set", "--org", other.name, "--markup", "2", status=1)
    absent = await weir("resale", "statement", "nobody", "2025-10", *org, status=1)

    assert [(each["model"], each["markup_milli"]) for each in listed] == [
        ("", 1500),
        ("demo", 1250),
    ]
    assert listed[1]["request_picos"] == 10**9
    assert [each["model"] for each in after] == [""]
    assert "markup" in wrong
    assert "not found" in foreign.lower() or other.name in foreign
    assert "nobody" in absent

    _, key = await service.new_key(reseller, "billing")
    async with AsyncBillingClient(service.address, key, tls=False) as client:
        request_id = str(uuid.uuid4())
        first = await client.set_resale_price(markup_milli=3_000, request_id=request_id)
        repeated = await client.set_resale_price(markup_milli=3_000, request_id=request_id)
        assert repeated == first
        with pytest.raises(InvalidRequest) as refused:
            await client.set_resale_price(markup_milli=-1)
        assert [each.field for each in refused.value.field_violations] == ["markup_milli"]
        with pytest.raises(NotFound):
            await client.get_resale_statement("ada", "2025-10", organization=other.name)
        for month in ("2025-13", ""):
            with pytest.raises(InvalidRequest):
                [each async for each in client.list_resale_statements(month)]
    async with AsyncBillingClient(service.address, reseller.secret, tls=False) as client:
        with pytest.raises(PermissionDenied):
            await client.set_resale_price(markup_milli=1_000)


async def test_rentals_of_replicas_through_the_command_line(
    service: Service, reseller: Tenant, weir: Weir
) -> None:
    org = ("--org", reseller.name)
    start = datetime.now(UTC).replace(microsecond=0) + timedelta(minutes=1)
    begins, ends = f"{start:%Y-%m-%dT%H:%M:%SZ}", f"{start + HOUR:%Y-%m-%dT%H:%M:%SZ}"
    rent = ("resale", "rental", "start", "ada", "demo", *org)

    unpriced = await weir(*rent, status=1)
    await weir("resale", "price", "set", *org, "--markup", "1.5", "--replica-hour", "4.00")
    made = json.loads(await weir(*rent, "--replicas", "2", "--from", begins, "--json"))
    again = await weir(*rent, "--from", begins, status=1)
    ended = await weir("resale", "rental", "end", str(made["rental_id"]), "--at", ends, *org)
    listed = json.loads(await weir("resale", "rental", "list", *org, "--json"))
    prices = await weir("resale", "price", "list", *org)
    past = await weir(*rent, "--from", "1999-01-01", status=1)

    assert "price per hour" in unpriced
    assert (made["replica_count"], made["end_time"]) == (2, None)
    assert "already exists for this end user and model" in again
    assert "open: end it first" in again
    assert ends[11:-1] in ended
    assert [(each["end_user"], each["end_time"]) for each in listed] == [("ada", ends)]
    assert "4.00" in prices
    assert "--from: must be a time from 2000 to 2200" in past
    _, key = await service.new_key(reseller, "billing")
    other = await service.tenant()
    _, foreign = await service.new_key(other, "billing")
    async with AsyncBillingClient(service.address, key, tls=False) as client:
        request_id = str(uuid.uuid4())
        first, second = [
            await client.rent_replicas(
                "bob", "demo", 1, request_id=request_id, start_time=start, end_time=start + HOUR
            )
            for _ in "12"
        ]
        assert first == second
        found = [each async for each in client.list_replica_rentals("bob")]
        assert found == [first]
        with pytest.raises(InvalidRequest) as refused:
            await client.rent_replicas("carol", "demo", 0)
        assert [each.field for each in refused.value.field_violations] == ["replica_count"]
    async with AsyncBillingClient(service.address, foreign, tls=False) as client:
        with pytest.raises(NotFound):
            await client.end_replica_rental(first.rental_id)
        assert [each async for each in client.list_replica_rentals()] == []
