"""The console in Chromium: accessible, within its policy, and with texts of tenants as texts."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from weir.v1 import types_pb2

from infra import console_page
from metering.core.models import QuotaDimension
from metering.invoicing.adjustments import create_adjustment
from metering.tenants.invitations import accept_invitation, invite
from metering.tenants.members import find_person
from metering.tenants.sign_in import create_link
from tests.calls import Calls
from tests.metering.usage import Consumed, Customer, add_usage, new_price
from tests.node import chromium, node_of
from tests.service import Service, Tenant

BROWSER_WAIT_S = 240.0
PAGES = (
    *("overview", "live", "playground", "requests", "usage", "end-users", "keys", "limits"),
    *(
        "members",
        "persons",
        "organizations",
        "alerts",
        "month",
        "reconciliation",
        "prices",
        "fleet",
        "audit",
    ),
)
NARROW, WIDE = (375, 800), (1280, 900)
EVERY_VIEW = [(*size, scheme) for size in (NARROW, WIDE) for scheme in ("light", "dark")]
# Text that would set `window.executed` as markup or as code.
MARK = '<img src=x onerror="window.executed=1">'
# Buttons that make a change, by the page that has them.
CHANGES = {
    "keys": {"Create a key", "Restrict", "Rotate", "Revoke"},
    "limits": {"Set a limit", "Override", "Remove"},
    "members": {"Invite a person", "Create a service account"},
    "organizations": {
        *("Create an organization", "Rename", "Bind to a region", "Suspend", "Close"),
        *("Create a project", "Change the billing profile", "Weight in the queue"),
        "Export everything",
    },
    "alerts": {"Set the webhook", "Test", "Remove"},
    "month": {"Propose an adjustment"},
    "prices": {
        *("Set a price", "Grant credit", "Make prepaid", "Assign a plan", "Create a plan"),
    },
    "fleet": {"Drain"},
}
ALL = {button for buttons in CHANGES.values() for button in buttons} | {"End", "Undrain", "Resume"}


@pytest.fixture
async def marked(service: Service, admin: Calls) -> AsyncIterator[Tenant]:
    """Yield a customer whose users chose hostile texts wherever they may."""
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_DAY: 100_000})
    project = f"{tenant.name}/main"
    made = {"organization": tenant.name, "project": "main", "name": MARK, "group": "<b>g</b>"}
    created = await admin("CreateApiKey", **made)
    await admin(
        "SetQuota",
        subject=types_pb2.QUOTA_SUBJECT_ORGANIZATION,
        subject_ref=tenant.name,
        dimension=types_pb2.QUOTA_DIMENSION_TOKENS_PER_MONTH,
        limit_value=1000,
        end_user=MARK,
    )
    async with service.stream(created.secret) as stream:
        labels = {"team": MARK.replace('"', "'")}
        request_id = await stream.begin(max_output_tokens=2, end_user=MARK, labels=labels)
        await stream.finished(request_id)
    await admin("SuspendProject", project=project, reason=MARK)
    yield tenant
    await admin("ResumeProject", project=project)


async def browsed(service: Service, key: str, organization: str, **more: Any) -> dict[str, Any]:
    """Open the pages with a key, or with the `link` of `more`; return what the browser finds."""
    requested = {
        "program": chromium(),
        "url": f"{service.openai_url.removesuffix('/v1')}/console/",
        "key": key,
        "pages": {name: f"#/{name}?org={organization}" for name in PAGES}
        | {"usage": f"#/usage?org={organization}&by=label&label_key=team"},
        **more,
    }
    done = await asyncio.to_thread(
        subprocess.run,
        [node_of(console_page.missing()), "tests/browser.mjs"],
        cwd=console_page.SOURCE,
        input=json.dumps(requested),
        capture_output=True,
        text=True,
        timeout=BROWSER_WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def faults(found: dict[str, Any]) -> dict[str, list[str]]:
    names = ("axe", "errors", "foreign", "wide", "executed")
    return {name: found[name] for name in names if found[name]}


async def test_every_page_is_accessible_and_shows_hostile_texts_as_text(
    service: Service, marked: Tenant
) -> None:
    admin = await service.tenant(scopes=("admin", "billing", "inference"))

    found = await browsed(service, admin.secret, marked.name, views=EVERY_VIEW, closes=marked.name)

    assert faults(found) == {}
    assert "Keys that are revoked: 2" in found["closing"]
    assert "confirm" in found["closing"]
    for page in ("keys", "limits", "end-users", "organizations", "audit"):
        assert MARK in found["texts"][page], page
    assert MARK.replace('"', "'") in found["texts"]["usage"]
    for page, buttons in CHANGES.items():
        assert buttons - {"Test", "Remove"} <= set(found["buttons"][page]), page


async def test_a_viewer_sees_no_button_that_would_be_refused(
    service: Service, tenant: Tenant
) -> None:
    viewer = (await service.new_key(tenant, role="viewer"))[1]

    found = await browsed(service, viewer, tenant.name, views=[(*WIDE, "light")])

    assert faults(found) == {}
    seen = {page: ALL & set(buttons) for page, buttons in found["buttons"].items()}
    assert seen == {page: set() for page in PAGES}
    assert tenant.key.prefix in found["texts"]["keys"]
    assert "needs a key that may call" in found["texts"]["fleet"]


async def test_an_admin_of_a_customer_works_in_the_browser(
    service: Service, tenant: Tenant
) -> None:
    key = (await service.new_key(tenant, "inference", role="admin"))[1]

    pages = {name: f"#/{name}" for name in ("keys", "limits", "playground")}
    found = await browsed(
        service, key, tenant.name, views=[(*WIDE, "light")], pages=pages, journey=True
    )

    assert faults(found) == {}
    assert found["secret"].startswith("wk_")
    assert not found["keptSecret"], "a secret is shown once"
    assert found["focused"] == "Revoke", "focus returns to the button that opened a dialog"
    assert "20 tokens" in found["chat"]
    made = (
        "SELECT action FROM audit_log WHERE actor <> 'test' AND actor_organization_id = %s"
        " ORDER BY id"
    )
    assert [row["action"] for row in service.database.rows(made, tenant.organization_id)] == [
        *("api_key.create", "api_key.revoke", "quota.set"),
    ]


async def test_two_persons_close_and_correct_a_month(service: Service) -> None:
    admin = await service.tenant(scopes=("admin", "billing"))
    customer = await service.tenant()
    settled_at = datetime.now(UTC).replace(day=1) - timedelta(days=3)
    async with service.session() as session:
        price = await new_price(session, f"m-{uuid.uuid4()}")
        buyer = Customer(customer.organization_id, customer.name, customer.key, customer.secret)
        await add_usage(session, buyer, price, [Consumed(1_000_000, settled_at=settled_at)])
        for reason, actor in (("by the same person", "test"), ("by another person", "another")):
            await create_adjustment(
                session,
                organization=customer.name,
                amount_picos=-(10**12),
                currency_code="USD",
                reason=reason,
                actor=actor,
            )
    month = f"{settled_at:%Y-%m}"

    found = await browsed(
        service,
        admin.secret,
        customer.name,
        views=[(*WIDE, "light")],
        pages={"month": f"#/month?org={customer.name}"},
        bills=month,
    )

    assert faults(found) == {}
    assert "Close the month" not in found["buttons"]["month"], "the present month is not over"
    assert "Total to invoice: 0.15 USD" in found["freeze"]
    assert found["closed"].startswith(f"{month} is closed: invoice INV-")
    assert "\u22121,234.000000000001 USD" in found["own"]
    assert "Approve" not in found["own"]
    assert "APPROVAL_REFUSED" in found["refused"]
    assert "is approved: in " in found["approved"]
    left = "SELECT action, actor FROM audit_log WHERE actor = %s ORDER BY id"
    assert [row["action"] for row in service.database.rows(left, admin.key.prefix)] == [
        *("month.close", "adjustment.create", "adjustment.approve"),
    ]


async def test_prices_and_limits_are_tried_before_they_apply(service: Service) -> None:
    admin = await service.tenant(scopes=("admin", "billing"))
    customer = await service.tenant()
    model = f"m-{uuid.uuid4()}"
    settled_at = datetime.now(UTC).replace(day=1) - timedelta(days=3)
    async with service.session() as session:
        price = await new_price(session, model)
        buyer = Customer(customer.organization_id, customer.name, customer.key, customer.secret)
        used = [
            Consumed(1_000_000, settled_at=each)
            for each in (settled_at, settled_at, datetime.now(UTC) - timedelta(minutes=1))
        ]
        await add_usage(session, buyer, price, used)

    found = await browsed(
        service,
        admin.secret,
        customer.name,
        views=[(*WIDE, "light")],
        pages={name: f"#/{name}?org={customer.name}" for name in ("prices", "limits")},
        prices=model,
    )

    assert faults(found) == {}
    assert "1 of 1 organizations would have paid another amount" in found["simulated"]
    for amount in ("2,000,000", "0.300000", "0.300002", "0.000002"):
        assert amount in found["simulated"], amount
    assert "0.150001" in found["price"]
    assert "0.150000" not in found["price"], "no price is shown rounded"
    assert re.search(r"^([123]) of \1 requests would have been refused", found["previewed"], re.M)
    made = "SELECT action FROM audit_log WHERE actor = %s ORDER BY id"
    assert [row["action"] for row in service.database.rows(made, admin.key.prefix)] == [
        "price.set"
    ], "a simulation and a preview change nothing"


async def test_a_member_signs_in_with_a_link_and_invites_another(
    service: Service, tenant: Tenant
) -> None:
    name, other = f"p{uuid.uuid4().hex[:12]}", await service.tenant()
    email, roles = f"{name}@example.com", {tenant.name: "admin", other.name: "viewer"}
    async with service.session() as session:
        for organization, role in roles.items():
            _, token = await invite(
                session, organization=organization, email=email, role=role, actor="test"
            )
            await accept_invitation(session, token=token, display_name=MARK)
        person = await find_person(session, email)
        link = await create_link(session, person, actor="test")
    guest = f"guest-{name}@example.com"

    found = await browsed(
        service,
        "",
        tenant.name,
        views=[(*NARROW, "light"), (*WIDE, "dark")],
        pages={each: f"#/{each}" for each in ("members", "keys", "playground")},
        organizations=[f"{each} ({role})" for each, role in roles.items()],
        link=link,
        invites=guest,
        name=MARK,
    )

    assert faults(found) == {}
    assert "wk_" not in found["kept"]
    assert link not in found["kept"]
    assert found["elsewhere"] == 0, "a viewer of the other organization invites nobody"
    assert "20 tokens" in found["chat"], "a session chats with a client token"
    text, address = found["guest"]
    assert text.count(MARK) >= 3, "the names of both, and of the signed-in one above"
    assert "wi_" not in address
    assert not {"Invite a person", "Change role", "Remove"} & set(found["guestButtons"])
    made = (
        "SELECT count(*) AS count FROM client_tokens t JOIN api_keys k ON k.id = t.api_key_id"
        " WHERE k.secret_hash IS NULL AND k.project_id = %s"
    )
    assert service.database.rows(made, tenant.project_id)[0]["count"] == 1
