"""Three journeys through the console: a new customer, a flood, and the close of a month.

With `WEIR_PICTURES` set to a folder, each journey also writes its pictures there: `make pictures`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from grpc import StatusCode

from infra import console_page
from metering.invoicing.closing import close_month
from metering.pricing.prices import ModelPrice
from metering.tenants.api_keys import find_api_key
from metering.tenants.invitations import accept_invitation, invite
from metering.tenants.members import find_person
from metering.tenants.sign_in import create_link
from tests.e2e.test_console_browser import BROWSER_WAIT_S, faults
from tests.metering.usage import Consumed, Customer, add_usage, new_price
from tests.node import chromium, node_of
from tests.service import Refusal, Service, Tenant, until

PICTURES = "WEIR_PICTURES"
PICTURE_BYTES_MAX = 60_000
LAST_MONTH = datetime.now(UTC).replace(day=1, hour=12) - timedelta(days=3)
MONTH = f"{LAST_MONTH:%Y-%m}"
CODE_WAIT_S = 60.0


async def travelled(service: Service, journey: str, **more: Any) -> dict[str, Any]:
    """Make a journey in Chromium; return what its person saw."""
    requested = {
        "program": chromium(),
        "url": f"{service.openai_url.removesuffix('/v1')}/console/",
        "journey": journey,
        "month": MONTH,
        "pictures": os.environ.get(PICTURES, ""),
        **more,
    }
    done = await asyncio.to_thread(
        subprocess.run,
        [node_of(console_page.missing()), "tests/journeys.mjs"],
        cwd=console_page.SOURCE,
        input=json.dumps(requested),
        capture_output=True,
        text=True,
        timeout=BROWSER_WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert faults(found) == {}
    return found


async def use_last_month(service: Service, customer: Customer) -> None:
    """Add usage of 0.15 USD in the month before this one."""
    async with service.session() as session:
        price: ModelPrice = await new_price(session, f"m-{uuid.uuid4()}")
        await add_usage(session, customer, price, [Consumed(1_000_000, settled_at=LAST_MONTH)])


async def test_a_new_customer_from_the_invitation_to_the_first_invoice(service: Service) -> None:
    operator = await service.tenant(scopes=("admin",))
    organization = f"nordwind-{uuid.uuid4().hex[:6]}"

    async def bill() -> None:
        """Close the month before, in which the new customer has used something."""
        query = (
            "SELECT k.prefix, o.id AS organization_id FROM api_keys k"
            " JOIN projects p ON p.id = k.project_id JOIN organizations o"
            " ON o.id = p.organization_id WHERE o.name = %s AND k.name = 'production'"
        )
        await until(lambda: bool(service.database.rows(query, organization)), "the first key")
        [made] = service.database.rows(query, organization)
        async with service.session() as session:
            key = await find_api_key(session, made["prefix"])
        await use_last_month(service, Customer(made["organization_id"], organization, key, ""))
        issuer = service.settings.issuer.build()
        await close_month(
            service.sessions,
            organization=organization,
            month=MONTH,
            actor="test",
            issuer=issuer,
        )

    async with asyncio.TaskGroup() as tasks:
        billing = tasks.create_task(bill())
        found = await travelled(
            service,
            "customer",
            key=operator.secret,
            organization=organization,
            email=f"mia-{uuid.uuid4().hex[:6]}@example.com",
        )
        assert billing.done()

    assert "Try a model in the playground" in found["steps"]
    assert "40 tokens" in found["chat"]
    for language, code in found["code"].items():
        shown = ran(language, code, found["secret"])
        assert "cost" in shown or "currency_code" in shown, f"{language}: {shown}"
    assert "Spent this month" in found["spent"]
    assert "0.00" in found["spent"]
    assert "First steps" not in found["spent"]
    assert "0.15" in found["invoice"]
    billed = "SELECT count(*) AS n FROM usage_events e JOIN organizations o"
    billed += " ON o.id = e.organization_id WHERE o.name = %s"
    # The chat, the two runs of its code, and the usage of the month before
    assert service.database.rows(billed, organization)[0]["n"] == 4


def ran(language: str, code: str, secret: str) -> str:
    """Run the code that the playground shows; return its output."""
    command = [sys.executable, "-c", code] if language == "Python" else ["bash", "-c", code]
    done = subprocess.run(
        command,
        env=os.environ | {"WEIR_API_KEY": secret},
        capture_output=True,
        text=True,
        timeout=CODE_WAIT_S,
        check=True,
    )
    return done.stdout


@contextlib.asynccontextmanager
async def flood(service: Service, tenant: Tenant) -> AsyncIterator[list[Refusal]]:
    """Keep three long requests of a tenant running; yield those that failed, as they come."""
    ends: list[Refusal] = []

    async def keep() -> None:
        while True:
            async with service.stream(tenant.secret) as stream:
                request_id = await stream.begin(max_output_tokens=3000, min_output_tokens=3000)
                frame = await stream.end(request_id)
                if frame.WhichOneof("kind") == "failed":
                    ends.append(Refusal(frame.failed.status, frame.failed))
                    await asyncio.sleep(0.2)

    tasks = [asyncio.create_task(keep()) for _ in range(3)]
    try:
        yield ends
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_operator_limits_and_informs_a_tenant_that_floods(service: Service) -> None:
    operator, tenant = await service.tenant(scopes=("admin",)), await service.tenant()
    viewer = (await service.new_key(tenant, role="viewer"))[1]
    reason = "Your batch job sends too many requests at once. Please write to support."

    async with flood(service, tenant) as ends:
        found = await travelled(
            service,
            "incident",
            key=operator.secret,
            customer=viewer,
            organization=tenant.name,
            reason=reason,
        )
        await until(lambda: len({each.code for each in ends}) > 1, "both kinds of ends")

    assert tenant.name in found["busiest"]
    assert "concurrent requests" in found["limit"]
    assert "ended" in found["ended"]
    assert "concurrent requests" in found["theirs"]
    assert any(reason in each.status.message for each in ends), ends
    assert any(each.code is StatusCode.RESOURCE_EXHAUSTED for each in ends), ends


async def test_finance_closes_a_month_with_a_correction_and_two_persons(service: Service) -> None:
    operators, customer = await service.tenant(scopes=("admin",)), await service.tenant()
    buyer = Customer(customer.organization_id, customer.name, customer.key, customer.secret)
    await use_last_month(service, buyer)
    links = []
    async with service.session() as session:
        for name in ("ada", "ben"):
            email = f"{name}-{uuid.uuid4().hex[:8]}@example.com"
            _, token = await invite(
                session,
                organization=operators.name,
                email=email,
                role="operator",
                actor="test",
            )
            await accept_invitation(session, token=token, display_name=name.title())
            person = await find_person(session, email)
            links.append(await create_link(session, person, actor="test"))

    found = await travelled(
        service,
        "month",
        organization=customer.name,
        links=links,
        reason="Two hours without answers",
    )

    assert MONTH in found["concern"]
    assert found["closed"].startswith(f"{MONTH} is closed: invoice INV-")
    assert "Approve" not in found["own"]
    assert "is approved" in found["approved"]
    assert "CN-" in found["row"]
    persons = (
        "SELECT p.display_name, a.action FROM audit_log a JOIN persons p"
        " ON p.id = a.actor_person_id JOIN memberships m ON m.person_id = p.id"
        " WHERE m.organization_id = %s AND a.action ~ '^(month|adjustment)' ORDER BY a.id"
    )
    rows = service.database.rows(persons, operators.organization_id)
    assert [(row["display_name"], row["action"]) for row in rows] == [
        *(("Ada", "month.close"), ("Ada", "adjustment.create"), ("Ben", "adjustment.approve")),
    ]


def test_pictures_are_small() -> None:
    folder = Path(os.environ.get(PICTURES) or console_page.ROOT / "docs" / "screenshots")
    taken = sorted(folder.glob("*.webp"))

    assert len(taken) <= 8
    assert [each.name for each in taken if each.stat().st_size > PICTURE_BYTES_MAX] == []
