"""Calls of admins and finance: effects, refusals, and an audit entry for every change."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode
from weir.v1 import billing_service_pb2, types_pb2

from metering.ledger.rating import rate_all_pending
from tests.calls import Calls
from tests.service import MODEL, Service, Tenant, picos

ORGANIZATION = types_pb2.QUOTA_SUBJECT_ORGANIZATION
TOKENS = types_pb2.QUOTA_DIMENSION_TOKENS_PER_MONTH
CENTURY_S = 100 * 366 * 86_400

KINDS = ("input", "cached_input", "output")
SOME_PRICE = {f"{kind}_picos_per_token": 1 for kind in KINDS}
NEW_KEY = {"organization": "{tenant}", "project": "main", "name": "k"}
LIMIT = {"subject": ORGANIZATION, "subject_ref": "{tenant}", "dimension": TOKENS}
PRICE = {"model": "m", **SOME_PRICE}
LIFETIMES_S = (0, -1, CENTURY_S, 2**63 - 1, -(2**63))
TIMES = ({"seconds": 2**62}, {"seconds": -(2**62)}, {"seconds": 1, "nanos": -5}, {"seconds": 0})
INVALID: list[tuple[str, dict[str, Any], str]] = [  # with the invalid field
    ("CreateOrganization", {"name": ""}, "name"),
    ("CreateOrganization", {"name": "Caps"}, "name"),
    ("CreateOrganization", {"name": "a" * 64}, "name"),
    ("CreateOrganization", {"name": "a\0b"}, "name"),
    ("CreateOrganization", {"name": "fine", "currency_code": "usd"}, "currency_code"),
    ("CreateOrganization", {"name": "fine", "currency_code": "XXY"}, "currency_code"),
    ("CreateProject", {"organization": "{tenant}", "name": "P"}, "name"),
    ("CreateApiKey", NEW_KEY | {"name": ""}, "name"),
    ("CreateApiKey", NEW_KEY | {"name": "k" * 101}, "name"),
    ("CreateApiKey", NEW_KEY | {"scopes": ["root"]}, "scopes"),
    *(
        ("CreateApiKey", NEW_KEY | {"lifetime": Duration(seconds=seconds)}, "lifetime")
        for seconds in LIFETIMES_S
    ),
    ("RevokeApiKey", {"api_key": "wk_aaaaaaaa\0"}, "api_key"),
    ("SetQuota", {"subject_ref": "{tenant}", "dimension": TOKENS}, "subject"),
    ("SetQuota", {"subject": ORGANIZATION, "subject_ref": "{tenant}"}, "dimension"),
    ("SetQuota", LIMIT | {"subject": 99, "dimension": 99}, "subject"),
    ("SetQuota", LIMIT | {"limit_value": -1}, "limit_value"),
    ("SetPrice", PRICE | {"model": ""}, "model"),
    ("SetPrice", PRICE | {"model": "a b"}, "model"),
    ("SetPrice", PRICE | {"currency_code": "$"}, "currency_code"),
    ("SetPrice", PRICE | {"output_picos_per_token": -1}, "output_picos_per_token"),
    ("SetPrice", PRICE | {"input_picos_per_token": 2**63 - 1}, "input_picos_per_token"),
    *(("SetPrice", PRICE | {"effective_time": Timestamp(**at)}, "effective_time") for at in TIMES),
    ("ListAuditEntries", {"page_size": -1}, "page_size"),
    ("ListAuditEntries", {"page_size": 1001}, "page_size"),
]
MALFORMED = (
    *("", "2026", "2026-13", "2026-00", "0000-01", "26-11", "2026-11-01", "2026-1", "٢٠٢٦-١١"),
    "x\0",
)
IMPOSSIBLE: list[tuple[str, dict[str, Any], StatusCode]] = [
    ("CreateOrganization", {"name": "{tenant}"}, StatusCode.ALREADY_EXISTS),
    ("CreateProject", {"organization": "{tenant}", "name": "main"}, StatusCode.ALREADY_EXISTS),
    ("CreateProject", {"organization": "nobody", "name": "p"}, StatusCode.NOT_FOUND),
    ("CreateProject", {"organization": "", "name": "p"}, StatusCode.NOT_FOUND),
    ("ListProjects", {"organization": "nobody"}, StatusCode.NOT_FOUND),
    ("CreateApiKey", NEW_KEY | {"project": "no"}, StatusCode.NOT_FOUND),
    ("RevokeApiKey", {"api_key": ""}, StatusCode.NOT_FOUND),
    ("RevokeApiKey", {"api_key": "wk_aaaaaaaa"}, StatusCode.NOT_FOUND),
    ("ListApiKeys", {"organization": "nobody"}, StatusCode.NOT_FOUND),
    ("SetQuota", LIMIT | {"subject_ref": "nobody"}, StatusCode.NOT_FOUND),
    ("SetQuota", LIMIT | {"model": "gpt", "limit_value": 1}, StatusCode.NOT_FOUND),
    ("DeleteQuota", {"quota_id": "x"}, StatusCode.NOT_FOUND),
    ("DeleteQuota", {"quota_id": str(uuid.uuid4())}, StatusCode.NOT_FOUND),
    ("ListQuotas", {"organization": "nobody"}, StatusCode.NOT_FOUND),
]


class Admin(Calls):
    """Calls of an admin of a tenant."""

    def __init__(self, channel: Any, tenant: Tenant, secret: str) -> None:
        super().__init__(channel, secret)
        self.tenant = tenant

    async def organization(self, name: str) -> Any:
        """Return the listed organization of a name."""
        organizations = (await self("ListOrganizations")).organizations
        [organization] = [each for each in organizations if each.name == name]
        return organization

    async def audit(self, subject_id: str) -> list[Any]:
        """Return the audit entries of an object, oldest first."""
        entries = (await self("ListAuditEntries", page_size=1000)).entries
        return [entry for entry in reversed(entries) if entry.subject_id == subject_id]


@pytest.fixture
async def admin(service: Service, tenant: Tenant) -> AsyncIterator[Admin]:
    """Yield an admin of a new tenant."""
    _, secret = await service.new_key(tenant, "admin")
    async with service.channel() as channel:
        yield Admin(channel, tenant, secret)


def unique(prefix: str) -> str:
    """Return an unused name."""
    return f"{prefix}{uuid.uuid4().hex[:16]}"


def of(tenant: Tenant, fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with the tenant's name."""
    return {key: tenant.name if value == "{tenant}" else value for key, value in fields.items()}


def later(**delta: float) -> Timestamp:
    """Return a time from now."""
    message = Timestamp()
    message.FromDatetime(datetime.now(UTC) + timedelta(**delta))
    return message


async def test_a_billing_profile_is_set_and_listed(service: Service, admin: Admin) -> None:
    name = unique("c")
    organization = (await admin("CreateOrganization", name=name)).organization
    whole = types_pb2.BillingProfile(
        emails=["billing@acme.example"],
        legal_name="Acme GmbH",
        address_line1="Lindenstraße 1",
        country="DE",
    )

    changed = await admin("SetBillingProfile", organization=name, billing_profile=whole)
    await admin("SetBillingProfile", organization=name, billing_profile=whole)

    assert not organization.HasField("billing_profile")
    listed = await admin.organization(name)
    assert changed.organization.billing_profile == listed.billing_profile == whole
    audit = await admin.audit(organization.organization_id)
    entries = [each for each in audit if each.action == "billing_profile.set"]
    assert [json.loads(each.after_json)["country"] for each in entries] == ["DE"]
    wrong = types_pb2.BillingProfile(legal_name="a\x00b")
    assert (
        await admin.refused("SetBillingProfile", organization=name, billing_profile=wrong)
    ).code is StatusCode.INVALID_ARGUMENT
    unprintable = types_pb2.BillingProfile(legal_name="Acme", address_line1="東京", country="JP")
    refusal = await admin.refused(
        "SetBillingProfile", organization=name, billing_profile=unprintable
    )
    assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, ["address_line1"])
    assert "no font shows 東 (U+6771), 京 (U+4EAC): set WEIR_INVOICE_FONT" in refusal.status.message
    assert (await admin.organization(name)).billing_profile == whole
    unknown = await admin.refused("SetBillingProfile", organization="nobody", billing_profile=whole)
    assert unknown.code is StatusCode.NOT_FOUND


async def test_a_customer_is_created_and_requests(service: Service, admin: Admin) -> None:
    name = unique("c")
    organization = (await admin("CreateOrganization", name=name)).organization
    project = (await admin("CreateProject", organization=name, name="search")).project
    created = await admin(
        "CreateApiKey",
        organization=name,
        project="search",
        name="laptop",
        lifetime=Duration(seconds=3600),
    )

    assert (organization.name, organization.currency_code) == (name, "USD")
    organization_id = organization.organization_id
    assert project.organization_id == organization_id == created.api_key.organization_id
    assert created.api_key.scopes == ["inference"]
    assert created.secret.startswith(created.api_key.prefix + "_")
    key = created.api_key
    assert key.expire_time.ToDatetime() - key.create_time.ToDatetime() == timedelta(hours=1)
    assert name in [each.name for each in (await admin("ListOrganizations")).organizations]
    assert [
        each.name
        for each in (
            await admin("ListProjects", organization=organization.organization_id)
        ).projects
    ] == ["search"]
    assert [
        each.api_key_id for each in (await admin("ListApiKeys", organization=name)).api_keys
    ] == [created.api_key.api_key_id]
    async with service.stream(created.secret) as stream:
        assert (await stream.finished(await stream.begin())).usage.delivered_token_count == 20

    for subject_id, action in (
        (organization.organization_id, "organization.create"),
        (project.project_id, "project.create"),
        (created.api_key.api_key_id, "api_key.create"),
    ):
        [entry] = await admin.audit(subject_id)
        assert (entry.action, entry.before_json) == (action, "")
        assert entry.actor == admin.secret[:11], "the admin's key, by its prefix"
        assert created.secret not in entry.after_json
        assert json.loads(entry.after_json)


async def test_a_key_is_revoked_once(service: Service, admin: Admin) -> None:
    key, secret = await service.new_key(admin.tenant)

    first = (await admin("RevokeApiKey", api_key=key.prefix)).api_key
    second = (await admin("RevokeApiKey", api_key=str(key.id))).api_key

    assert first == second
    assert first.HasField("revoke_time")
    actions = [entry.action for entry in await admin.audit(str(key.id))]
    assert actions == ["api_key.create", "api_key.revoke"]
    async with service.stream(secret) as stream:
        assert await stream.closed() is StatusCode.UNAUTHENTICATED


async def test_a_limit_is_set_changed_and_removed(service: Service, admin: Admin) -> None:
    tenant = admin.tenant
    fields = {"subject": ORGANIZATION, "subject_ref": tenant.name, "dimension": TOKENS}

    quota = (await admin("SetQuota", **fields, limit_value=25)).quota
    async with service.stream(tenant.secret) as stream:
        refusal = await stream.failed(await stream.begin(max_output_tokens=20))
        raised = (await admin("SetQuota", **fields, limit_value=100)).quota
        await stream.finished(await stream.begin(max_output_tokens=20))
        [listed] = (await admin("ListQuotas", organization=tenant.name)).quotas
        deleted = await admin("DeleteQuota", quota_id=quota.quota_id)
        await stream.finished(await stream.begin(max_output_tokens=200))

    assert refusal.info.metadata["limit"] == "25"
    assert (raised.quota_id, raised.limit_value) == (quota.quota_id, 100)
    assert (listed.used_value, listed.held_value, listed.remaining_value) == (30, 0, 70)
    missing_quota = await admin.refused("DeleteQuota", quota_id=quota.quota_id)
    assert missing_quota.code is StatusCode.NOT_FOUND
    assert deleted.deleted
    for missing in (quota.quota_id, "abc"):
        assert not (await admin("DeleteQuota", quota_id=missing, allow_missing=True)).deleted
    actions = [entry.action for entry in await admin.audit(quota.quota_id)]
    assert actions == ["quota.set", "quota.set", "quota.delete"]


async def test_limits_hang_on_projects_and_keys_too(service: Service, admin: Admin) -> None:
    tenant = admin.tenant
    for subject, ref in (
        (types_pb2.QUOTA_SUBJECT_PROJECT, f"{tenant.name}/main"),
        (types_pb2.QUOTA_SUBJECT_API_KEY, tenant.key.prefix),
    ):
        limit = {"dimension": TOKENS, "model": MODEL, "limit_value": 1000}
        await admin("SetQuota", subject=subject, subject_ref=ref, **limit)

    async with service.client(tenant.secret) as client:
        quotas = await client.get_quota(MODEL)

    limited = [(str(quota.subject), quota.model) for quota in quotas]
    assert limited == [("project", MODEL), ("api-key", MODEL)]


async def test_a_price_applies_from_its_time_on(service: Service, admin: Admin) -> None:
    model = unique("m")
    prices = SOME_PRICE | {"output_picos_per_token": 2}

    first = (await admin("SetPrice", model=model, **prices)).version
    second = (await admin("SetPrice", model=model, **prices, effective_time=later(days=1))).version
    past = later(seconds=-1)
    passed = await admin.refused("SetPrice", model=model, **prices, effective_time=past)

    assert second > first
    assert (passed.code, passed.fields) == (StatusCode.INVALID_ARGUMENT, ["effective_time"])
    [entry] = await admin.audit(str(first))
    assert (entry.action, json.loads(entry.after_json)["model"]) == ("price.set", model)


async def test_an_invalid_call_names_its_field_and_changes_nothing(admin: Admin) -> None:
    before = await admin("ListAuditEntries", page_size=1)

    for call, fields, wrong in INVALID:
        refusal = await admin.refused(call, **of(admin.tenant, fields))
        assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, [wrong]), fields
        assert refusal.reason
    for call, fields, code in IMPOSSIBLE:
        refusal = await admin.refused(call, **of(admin.tenant, fields))
        assert (refusal.code, refusal.fields) == (code, []), (call, fields)
        assert refusal.reason

    assert await admin("ListAuditEntries", page_size=1) == before


async def test_the_audit_log_is_read_page_by_page(admin: Admin) -> None:
    for _ in range(3):
        await admin("CreateOrganization", name=unique("p"))

    first = (await admin("ListAuditEntries", page_size=2)).entries
    last_id = first[-1].entry_id
    second = (await admin("ListAuditEntries", page_size=2, before_entry_id=last_id)).entries

    ids = [entry.entry_id for entry in (*first, *second)]
    assert len(ids) == 4
    assert ids == sorted(ids, reverse=True)


async def test_a_month_report_explains_every_token(service: Service, admin: Admin) -> None:
    tenant = admin.tenant
    async with service.stream(tenant.secret) as stream:
        begun = [await stream.begin(max_output_tokens=n) for n in (10, 20, 30)]
        finished = [await stream.finished(each) for each in begun]
        cancelled = await stream.begin(max_output_tokens=3000)
        await stream.received(cancelled, 5)
        await stream.cancel(cancelled)
        finished.append(await stream.finished(cancelled))
    month = f"{datetime.now(UTC):%Y-%m}"
    unrated = await admin("GetMonthReport", organization=tenant.name, month=month)
    await rate_all_pending(service.sessions)
    report = await admin("GetMonthReport", organization=tenant.name, month=month)

    assert (unrated.unrated_event_count, list(unrated.lines)) == (4, [])
    assert unrated.reconciliation.balanced
    assert report.unrated_event_count == 0
    assert report.reconciliation.balanced
    assert (
        picos(report.total)
        == sum(picos(each.cost) for each in finished)
        == sum(picos(line.amount) for line in report.lines)
    )
    kind = billing_service_pb2.TOKEN_KIND_OUTPUT
    output = [line for line in report.lines if line.token_kind == kind]
    assert sum(line.token_count for line in output) == sum(
        each.usage.billed_token_count for each in finished
    )
    cut = sum(line.cancelled_token_count for line in output)
    assert cut == finished[-1].usage.billed_token_count
    counts = report.request_counts
    assert (counts.total_count, counts.completed_count, counts.cancelled_count) == (4, 3, 1)


@pytest.mark.parametrize("month", MALFORMED)
async def test_a_malformed_month_is_refused(admin: Admin, month: str) -> None:
    refusal = await admin.refused("GetMonthReport", organization=admin.tenant.name, month=month)

    assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, ["month"])
