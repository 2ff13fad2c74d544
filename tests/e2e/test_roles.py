"""An organization that looks after itself, over gRPC, HTTP and the commands of the contract."""

from __future__ import annotations

import contextlib
import re
import uuid
from datetime import UTC, datetime, timedelta
from itertools import cycle
from typing import Any

import aiohttp
import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode
from weir.v1 import types_pb2, usage_reports_pb2

from metering.core.models import QuotaDimension
from tests.calls import Calls, calls
from tests.e2e.test_key_access import (
    ROLES,
    STRANGERS,
    Victim,
    call,
    methods,
    requests_for,
    scopes_of,
    victim,
)
from tests.service import MODEL, Refusal, Service, Tenant

__all__ = ["victim"]  # a fixture
ORGANIZATION = types_pb2.QUOTA_SUBJECT_ORGANIZATION
PER_DAY = types_pb2.QUOTA_DIMENSION_REQUESTS_PER_DAY


async def role(service: Service, tenant: Tenant, name: str, **terms: Any) -> tuple[str, str]:
    """Return prefix and secret of a new key with a role."""
    key, secret = await service.new_key(tenant, role=name, **terms)
    return key.prefix, secret


async def test_a_customer_manages_its_own_keys(service: Service) -> None:
    """From the owner's key to a developer's program, limits, webhook, bills and the audit log."""
    tenant = await service.tenant({QuotaDimension.REQUESTS_PER_DAY: 5})
    _, secret = await role(service, tenant, "owner")
    async with calls(service, secret) as owner:
        await owner("CreateProject", organization=tenant.name, name="apps")
        of_apps = {"organization": tenant.name, "project": "apps"}
        made = await owner("CreateApiKey", **of_apps, name="dev", role="developer")
        finance = await owner("CreateApiKey", **of_apps, name="accounting", role="finance")
        limit = await owner(
            "SetQuota",
            subject=ORGANIZATION,
            subject_ref=tenant.name,
            dimension=PER_DAY,
            limit_value=1,
        )
        url = "https://example.com/alerts"
        await owner("SetAlertWebhook", organization=tenant.name, url=url)
        [webhook] = (await owner("ListAlertWebhooks")).webhooks
        quotas = (await owner("ListQuotas")).quotas
        entries = (await owner("ListAuditEntries", page_size=100)).entries

        assert (made.api_key.role, list(made.api_key.scopes)) == ("developer", [])
        assert limit.quota.set_by_organization
        assert sorted((each.set_by_organization, each.limit_value) for each in quotas) == [
            (False, 5),
            (True, 1),
        ]
        assert webhook.url == url
        assert {each.actor_role for each in entries} == {"owner", ""}, "created by the test"
        by_owner = [each for each in entries if each.actor_role]
        assert {each.actor_organization_id for each in by_owner} == {str(tenant.organization_id)}

    async with calls(service, made.secret) as developer:
        program = await developer("CreateApiKey", **of_apps, name="program")
        [found] = [
            each for each in (await developer("ListApiKeys")).api_keys if each.name == "program"
        ]
        refusal = await developer.refused(
            "CreateApiKey", organization=tenant.name, project="main", name="elsewhere"
        )
        assert list(found.scopes) == ["inference"]
        assert refusal.code is StatusCode.NOT_FOUND
    async with service.stream(program.secret) as stream:
        await stream.finished(await stream.begin(max_output_tokens=1))
        limited = await stream.failed(await stream.begin(max_output_tokens=1))
        assert limited.reason == "QUOTA_EXCEEDED", "by the owner's limit"
    async with calls(service, finance.secret) as accounting:
        await accounting("SetBillingProfile", organization=tenant.name)
        report = await accounting("GetMonthReport", organization=tenant.name, month="2025-10")
        assert report.organization_name == tenant.name
        refusal = await accounting.refused("SetQuota")
        assert refusal.code is StatusCode.PERMISSION_DENIED
        assert re.search(
            "permission quotas.set of the scope admin, role owner", refusal.status.message
        )


async def test_no_role_gives_itself_more(service: Service) -> None:
    """Creation, update, rotation, and a retry with the same request id."""
    tenant = await service.tenant()
    operator, _ = await service.new_key(tenant, "admin")
    owner, _ = await role(service, tenant, "owner")
    week = Duration(seconds=7 * 86400)
    prefix, secret = await role(service, tenant, "developer", lifetime=timedelta(days=1))
    into = {"organization": tenant.name, "project": "main", "name": "more"}
    before = service.database.rows("SELECT * FROM api_keys ORDER BY id")
    attempts: list[tuple[str, dict[str, Any]]] = [
        ("CreateApiKey", into | {"scopes": ["admin"]}),
        ("CreateApiKey", into | {"scopes": ["billing"]}),
        ("CreateApiKey", into | {"role": "owner"}),
        ("CreateApiKey", into | {"role": "developer"}),  # without an end
        ("CreateApiKey", into | {"role": "developer", "lifetime": week}),
        ("CreateApiKey", into | {"role": "admin", "request_id": str(uuid.uuid4())}),
        ("UpdateApiKey", {"api_key": prefix, "role": "admin"}),
        ("UpdateApiKey", {"api_key": prefix, "never_expires": True}),
        ("UpdateApiKey", {"api_key": tenant.key.prefix, "role": "admin"}),
        ("UpdateApiKey", {"api_key": tenant.key.prefix, "scopes": ["admin"]}),
        ("UpdateApiKey", {"api_key": tenant.key.prefix, "role": "developer"}),
        ("UpdateApiKey", {"api_key": operator.prefix, "name": "mine"}),
        ("RotateApiKey", {"api_key": operator.prefix}),
        ("RotateApiKey", {"api_key": owner}),
        ("RevokeApiKey", {"api_key": owner}),
        ("RevokeApiKey", {"api_key": operator.prefix}),
    ]

    async with calls(service, secret) as developer:
        for name, fields in attempts:
            refusal = await developer.refused(name, **fields)
            assert (refusal.code, refusal.reason) == (
                StatusCode.PERMISSION_DENIED,
                "ROLE_EXCEEDED",
            ), (name, fields, refusal)
        assert service.database.rows("SELECT * FROM api_keys ORDER BY id") == before
        rotated = await developer("RotateApiKey", api_key=prefix)
        assert rotated.secret, "its own key has exactly its rights"
        await developer("RevokeApiKey", api_key=tenant.key.prefix)


async def test_a_request_id_of_another_organization_finds_nothing(service: Service) -> None:
    one, other = await service.tenant(), await service.tenant()
    request_id = str(uuid.uuid4())
    made = []
    for tenant in (one, other):
        _, secret = await role(service, tenant, "admin")
        async with calls(service, secret) as admin:
            fields = {"organization": tenant.name, "name": "same", "request_id": request_id}
            made += [await admin("CreateProject", **fields), await admin("CreateProject", **fields)]

    assert [each.existed for each in made] == [False, True, False, True]
    assert len({each.project.project_id for each in made}) == 2


async def test_an_admin_changes_only_limits_that_its_organization_made(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.REQUESTS_PER_DAY: 5})
    _, secret = await role(service, tenant, "admin")
    async with calls(service, secret) as admin:
        [of_operator] = (await admin("ListQuotas")).quotas
        of_it = {"subject": ORGANIZATION, "subject_ref": tenant.name, "dimension": PER_DAY}
        refusals = [
            await admin.refused("DeleteQuota", quota_id=of_operator.quota_id),
            await admin.refused(
                "OverrideQuota", quota_id=of_operator.quota_id, limit_value=9, reason="more"
            ),
            await admin.refused("SetQuota", **of_it, limit_value=6),
        ]
        own = (await admin("SetQuota", **of_it, limit_value=4)).quota
        await admin("DeleteQuota", quota_id=own.quota_id)
        [left] = (await admin("ListQuotas")).quotas

    assert {each.code for each in refusals} == {StatusCode.INVALID_ARGUMENT}
    assert "set by the operator" in refusals[0].status.message
    assert "must be at most 5" in refusals[2].status.message
    assert (left.quota_id, left.limit_value) == (of_operator.quota_id, 5)


def absent(of: Victim) -> Victim:
    """Return the names and ids of a customer that does not exist, in the same forms."""
    things = {
        name: re.sub("[0-9a-f]{8,}", lambda found: uuid.uuid4().hex[: len(found[0])], value)
        for name, value in of.things.items()
    }
    key = f"wk_{uuid.uuid4().hex[:8]}"
    named = f"t{uuid.uuid4().hex[:20]}"
    things |= dict.fromkeys(("api_key", "subject", "actor"), key)
    things |= dict.fromkeys(("organization", "subject_ref"), named) | {"project": f"{named}/main"}
    things["request_id"] = str(uuid.uuid4())
    for name in ("quota_id", "adjustment_id", "correcting_adjustment_id"):
        things[name] = str(uuid.uuid4())
    tenant = Tenant(named, uuid.uuid4(), uuid.uuid4(), of.tenant.key, "")
    return Victim(tenant, things, ())


def without_names(text: str, of: Victim) -> str:
    """Return a message without the values that a request named."""
    ids = (of.tenant.organization_id, of.tenant.project_id, of.tenant.key.id)
    for value in sorted({*of.things.values(), *map(str, ids)}, key=len, reverse=True):
        text = text.replace(value, "…")
    return text


async def test_a_foreign_object_is_refused_like_one_that_does_not_exist(
    service: Service, victim: Victim
) -> None:
    """The text of no answer tells whether something exists elsewhere."""
    # Several, since the calls of a single organization would wait for its share of the event loop.
    owners = [await role(service, await service.tenant(), "owner") for _ in range(STRANGERS)]
    nobody, compared = absent(victim), 0

    async with service.channel() as channel:
        for method, (_, secret) in zip(methods(), cycle(owners), strict=False):
            if "role:owner" not in scopes_of(method):
                continue
            pairs = zip(requests_for(method, victim), requests_for(method, nobody), strict=True)
            for theirs, none in pairs:
                if "request_id" in theirs.DESCRIPTOR.fields_by_name:
                    theirs.request_id = none.request_id = ""
                answers = [
                    await call(channel, method, request, secret) for request in (theirs, none)
                ]
                shown = [
                    (each.code, each.reason, without_names(each.status.message, of))
                    if isinstance(each, Refusal)
                    else len(each) > 0
                    for each, of in zip(answers, (victim, nobody), strict=True)
                ]
                assert shown[0] == shown[1], method.full_name
                compared += 1

    assert compared > 100, "a walk that finds nothing proves nothing"


async def test_a_page_token_of_another_organization_shows_nothing_of_it(
    service: Service,
) -> None:
    own, foreign = await service.tenant(), await service.tenant()
    (_, mine), (_, theirs) = [await role(service, each, "owner") for each in (own, foreign)]
    names = [f"user-{uuid.uuid4().hex}" for _ in range(3)]
    async with service.stream(own.secret) as stream:
        for name in names:
            await stream.finished(await stream.begin(max_output_tokens=1, end_user=name))
    month = f"{datetime.now(UTC):%Y-%m}"
    by_user = [usage_reports_pb2.USAGE_GROUPING_END_USER]
    lists: dict[str, dict[str, Any]] = {
        "ListEndUsers": {},
        "ListReceipts": {"month": month},
        "GetUsage": {"month": month, "group_by": by_user},
    }

    async with calls(service, mine) as owner, calls(service, theirs) as stranger:
        for method, fields in lists.items():
            page = await owner(method, organization=own.name, page_size=1, **fields)
            assert page.next_page_token, method
            fields |= {"organization": foreign.name, "page_token": page.next_page_token}
            with contextlib.suppress(grpc.aio.AioRpcError):  # a refusal shows nothing either
                shown = (await stranger(method, **fields)).SerializeToString()
                marks = (*names, str(own.organization_id), str(own.key.id))
                assert not any(each.encode() in shown for each in marks), method


PATHS = ("chat/completions", "completions", "responses", "embeddings", "messages")


@pytest.mark.parametrize("name", ROLES)
async def test_a_role_alone_uses_no_model_over_http(service: Service, name: str) -> None:
    tenant = await service.tenant()
    _, secret = await role(service, tenant, name)
    body: dict[str, Any] = {"model": MODEL, "input": "x", "prompt": "x", "max_tokens": 1}
    body["messages"] = [{"role": "user", "content": "x"}]
    headers = {"authorization": f"Bearer {secret}"}

    async with aiohttp.ClientSession(headers=headers) as http:
        for path in PATHS:
            async with http.post(f"{service.openai_url}/{path}", json=body) as answer:
                assert answer.status == 403, (path, await answer.text())
        async with http.get(f"{service.openai_url}/models") as answer:
            assert answer.status == 403


async def test_a_role_and_models_in_one_key(service: Service) -> None:
    tenant = await service.tenant()
    _, secret = await service.new_key(tenant, "inference", role="viewer")
    async with service.stream(secret) as stream:
        await stream.finished(await stream.begin(max_output_tokens=1))
    async with calls(service, secret) as both:
        assert (await both("GetQuota")).restrictions.role == "viewer"
        assert [each.name for each in (await both("ListOrganizations")).organizations] == [
            tenant.name
        ]


async def test_a_changed_role_applies_to_the_next_call(service: Service, admin: Calls) -> None:
    tenant = await service.tenant()
    prefix, secret = await role(service, tenant, "viewer")
    async with calls(service, secret) as own:
        await own("ListApiKeys")
        await admin("UpdateApiKey", api_key=prefix, role="finance")
        await own("SetBillingProfile", organization=tenant.name)
        await admin("UpdateApiKey", api_key=prefix, role="", scopes=["inference"])
        refusal = await own.refused("ListApiKeys")

    assert refusal.code is StatusCode.PERMISSION_DENIED


async def test_an_owner_exports_the_audit_log_of_its_organization(service: Service) -> None:
    """With positions of the whole log, which tell nothing of others."""
    tenant, other = await service.tenant(), await service.tenant()
    _, owner = await service.new_key(tenant, role="owner")
    async with calls(service, owner) as call:
        begun = (await call("ExportAuditEntries")).position
        await service.new_key(other)
        await call("CreateProject", organization=tenant.name, name="audited")
        page = await call("ExportAuditEntries", after_entry_id=begun)
        [entry] = page.entries
        assert (entry.action, entry.actor_role) == ("project.create", "owner")
        assert begun < entry.entry_id <= page.position
        again = await call("ExportAuditEntries", after_entry_id=page.position)
        assert not again.entries
        refused = await call.refused("ExportAuditEntries", after_entry_id=10**12)
        assert refused.fields == ["after_entry_id"]
