"""End users over gRPC and in the console: access, and hostile names."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from grpc import StatusCode
from weir.v1 import alerts_pb2, end_users_pb2, types_pb2, usage_reports_pb2

from tests.calls import calls
from tests.e2e.test_console import ask
from tests.e2e.test_console import http as http  # a fixture
from tests.service import Service, Tenant

NAMES = [
    *("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a/b/../c%2F%00?x=1&y=2#z"),
    *("مستخدم", "👩‍👧", "é" * 256, "--yes", "'; DROP TABLE usage_subjects; --", "two words"),
]
REQUEST, MODEL = (
    usage_reports_pb2.USAGE_GROUPING_REQUEST,
    usage_reports_pb2.USAGE_GROUPING_MODEL,
)


def today() -> str:
    """Return the day in UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


async def use(service: Service, tenant: Tenant, *end_users: str) -> None:
    """Make one request for each end user."""
    async with service.stream(tenant.secret) as stream:
        for name in end_users:
            await stream.finished(await stream.begin(max_output_tokens=2, end_user=name))


async def test_names_pass_the_console_unchanged(
    service: Service, tenant: Tenant, http: Any
) -> None:
    _, billing = await service.new_key(tenant, "billing")
    await use(service, tenant, *NAMES)

    status, listed = await ask(
        http, service, "BillingService/ListEndUsers", billing, {"withUsage": True}
    )

    assert status == 200
    assert [each["name"] for each in listed["endUsers"]] == sorted(NAMES, key=str.encode)
    for each in listed["endUsers"]:
        name, subject_id = each["name"], each["endUserId"]
        assert (each["monthRequestCount"], each["state"]) == ("1", "END_USER_STATE_ACTIVE")
        for ref in (name, subject_id):
            body = {"endUser": ref}
            status, shown = await ask(http, service, "BillingService/GetEndUser", billing, body)
            assert (status, shown["endUser"]["name"]) == (200, name)
        status, found = await ask(
            http, service, "BillingService/ListEndUsers", billing, {"prefix": name[:-1]}
        )
        assert name in [each["name"] for each in found["endUsers"]]
        assert "monthCost" not in found["endUsers"][0], "only if it is asked for"


async def test_a_key_sees_the_end_users_of_its_own_customer_only(
    service: Service, tenant: Tenant
) -> None:
    other = await service.tenant()
    operator = await service.tenant(scopes=("admin",))
    _, billing = await service.new_key(tenant, "billing")
    await use(service, tenant, "alice", "alice")
    await use(service, other, "bob")
    async with calls(service, operator.secret) as call:
        theirs = (await call("ListEndUsers", organization=other.name)).end_users
        ours = (await call("ListEndUsers", organization=tenant.name)).end_users
    assert [each.name for each in (*theirs, *ours)] == ["bob", "alice"]

    async with calls(service, billing) as call:
        assert (await call("ListEndUsers")).end_users == ours
        for organization in (other.name, str(other.organization_id)):
            for name, fields in (
                ("ListEndUsers", {}),
                ("GetEndUser", {"end_user": "bob"}),
                ("ListAlerts", {"end_user": "bob"}),
            ):
                refusal = await call.refused(name, organization=organization, **fields)
                assert refusal.code is StatusCode.NOT_FOUND
        for ref in ("bob", theirs[0].end_user_id, str(uuid.uuid4())):
            refusal = await call.refused("GetEndUser", end_user=ref)
            assert refusal.code is StatusCode.NOT_FOUND
            usage = await call("GetUsage", group_by=[MODEL], first_day=today(), end_user=ref)
            assert list(usage.rows) == []
    for secret, code in (
        (tenant.secret, StatusCode.PERMISSION_DENIED),  # a key for inference
        (None, StatusCode.UNAUTHENTICATED),
    ):
        async with calls(service, secret) as call:
            for name in ("ListEndUsers", "GetEndUser"):
                assert (await call.refused(name)).code is code


async def test_an_erased_end_user_keeps_its_usage_under_its_id(
    service: Service, tenant: Tenant
) -> None:
    operator = await service.tenant(scopes=("admin",))
    who = {"organization": tenant.name}
    await use(service, tenant, "alice", "bob", "alice")
    async with calls(service, operator.secret) as call:
        await call(
            "SetQuota",
            subject=types_pb2.QUOTA_SUBJECT_ORGANIZATION,
            subject_ref=tenant.name,
            dimension=types_pb2.QUOTA_DIMENSION_REQUESTS_PER_DAY,
            limit_value=10,
            for_each="end_user",
        )
        before = await call("GetEndUser", end_user="alice", **who)
        await call("EraseEndUser", end_user="alice", **who)
        after = await call("GetEndUser", end_user=before.end_user.end_user_id, **who)
        listed = await call("ListEndUsers", with_usage=True, **who)
        erased = await call(
            "ListEndUsers", state=end_users_pb2.END_USER_STATE_ERASED, with_usage=True, **who
        )
        requests = await call(
            "GetUsage",
            group_by=[REQUEST],
            first_day=today(),
            end_user=before.end_user.end_user_id,
            latest_first=True,
            **who,
        )

    assert before.end_user.month_request_count == after.end_user.month_request_count == 2
    assert before.end_user.month_cost == after.end_user.month_cost
    assert (before.end_user.tightest_quota.used_value, len(before.quotas)) == (2, 1)
    assert (after.end_user.name, list(after.quotas)) == ("", [])
    assert after.end_user.state == end_users_pb2.END_USER_STATE_ERASED
    assert [each.name for each in listed.end_users] == ["bob", ""]
    assert list(erased.end_users) == [after.end_user]
    times = [each.settle_time.ToDatetime() for each in requests.rows]
    assert len(times) == 2
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("name", "fields", "field"),
    [
        ("ListEndUsers", {"state": 4}, "state"),
        ("ListEndUsers", {"page_size": 1001}, "page_size"),
        ("ListEndUsers", {"page_token": "x"}, "page_token"),
        ("ListEndUsers", {"prefix": "a\0"}, "prefix"),
        ("GetEndUser", {"end_user": "a\0"}, "end_user"),
        ("ListAlerts", {"end_user": "a\0"}, "end_user"),
        (
            "GetUsage",
            {"group_by": [MODEL], "month": "2026-11", "latest_first": True},
            "latest_first",
        ),
    ],
)
async def test_a_wrong_field_is_named(
    service: Service, tenant: Tenant, name: str, fields: dict[str, Any], field: str
) -> None:
    _, billing = await service.new_key(tenant, "billing")
    async with calls(service, billing) as call:
        refusal = await call.refused(name, **fields)
    assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, [field])


async def test_alerts_of_one_end_user_need_its_organization(service: Service) -> None:
    operator = await service.tenant(scopes=("admin",))
    async with calls(service, operator.secret) as call:
        refusal = await call.refused("ListAlerts", alerts_pb2.ListAlertsRequest(end_user="alice"))
    assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, ["organization"])


async def test_the_audit_log_names_an_end_user_until_it_is_erased(
    service: Service, tenant: Tenant
) -> None:
    operator = await service.tenant(scopes=("admin",))
    async with calls(service, operator.secret) as call:
        await call(
            "SetQuota",
            subject=types_pb2.QUOTA_SUBJECT_ORGANIZATION,
            subject_ref=tenant.name,
            dimension=types_pb2.QUOTA_DIMENSION_REQUESTS_PER_DAY,
            limit_value=10,
            end_user="alice",
        )
        found = await call("GetEndUser", organization=tenant.name, end_user="alice")
        subject_id = found.end_user.end_user_id
        [named] = (await call("ListAuditEntries", subject=subject_id)).entries
        await call("EraseEndUser", organization=tenant.name, end_user="alice")
        later = (await call("ListAuditEntries", subject=subject_id)).entries

    assert dict(named.names) == {
        subject_id: "alice",
        str(tenant.organization_id): tenant.name,
    }
    assert all(subject_id not in entry.names for entry in later)
    assert later
