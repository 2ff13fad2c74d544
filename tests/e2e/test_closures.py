"""Organizations and projects that are closed for good, in several api processes."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError
from weir.v1 import closures_pb2 as pb

from metering.tenants.admin_requests import take_changes_lock
from metering.tenants.api_keys import create_api_key
from tests.calls import calls
from tests.e2e.test_suspensions import WITHIN_S, Pair, http_refusal, operator, pair, slow_model
from tests.service import Service, Tenant, picos

WHY = "acme ended its contract"
__all__ = ["pair", "slow_model"]  # fixtures


async def close(service: Service, tenant: Tenant, **fields: Any) -> Any:
    """Close the organization of a tenant as the operator."""
    given = {"organization": tenant.name, "confirm_name": tenant.name, "reason": WHY} | fields
    return await operator(service, "CloseOrganization", **given)


SUBJECTS = [
    ("CloseOrganization", "organization", "ORGANIZATION_CLOSED"),
    ("CloseProject", "project", "PROJECT_CLOSED"),
]


@pytest.mark.parametrize(("call_name", "field", "reason"), SUBJECTS)
async def test_running_requests_end_and_bill_and_keys_are_revoked(
    pair: Pair, call_name: str, field: str, reason: str
) -> None:
    """In every process, for every key, and not those of another organization."""
    first, second = pair
    tenant, other = await first.tenant(), await first.tenant()
    _, another_key = await first.new_key(tenant)
    _, owner_key = await first.new_key(tenant, role="owner")
    is_whole = field == "organization"
    target = tenant.name if is_whole else f"{tenant.name}/main"
    name = tenant.name if is_whole else "main"
    async with first.stream(other.secret) as untouched:
        spared = await untouched.begin(max_output_tokens=4000)
        async with (
            first.stream(tenant.secret) as here,
            second.stream(another_key) as there,
            second.stream(another_key) as idle,
        ):
            await idle.begin(max_output_tokens=1)
            streams = {
                await stream.begin(max_output_tokens=3000): stream for stream in (here, there)
            }
            for request_id, stream in streams.items():
                await stream.received(request_id, 5)
            preview = await operator(second, call_name, **{field: target}, validate_only=True)
            assert preview.effects.running_request_count == 2
            assert preview.effects.active_key_count == 3
            assert not getattr(preview, field).HasField("closure")

            async with asyncio.timeout(WITHIN_S):
                closed = await operator(
                    first, call_name, **{field: target}, confirm_name=name, reason=WHY
                )
                ends = {each: await stream.failed(each) for each, stream in streams.items()}
            late = [await stream.failed(await stream.begin()) for stream in (here, there, idle)]

        assert getattr(closed, field).closure.reason == WHY
        assert not getattr(closed, field).HasField("suspension")
        for request_id, end in ends.items():
            assert (end.code, end.reason) == (StatusCode.UNAUTHENTICATED, reason)
            assert WHY in end.status.message
            event = first.database.event(tenant, request_id)
            assert end.frame is not None
            assert end.frame.usage.delivered_token_count == event["delivered_token_count"] >= 5
            assert first.database.billed(tenant)[request_id], "what was delivered is billed"
            assert picos(end.frame.cost) > 0
        assert {each.reason for each in late} == {reason}
        for process in pair:
            async with calls(process, tenant.secret) as call:
                assert (await call.refused("ListModels")).reason == reason
            async with calls(process, owner_key) as call:
                assert (await call.refused("ListApiKeys")).reason == reason
            assert await http_refusal(process, another_key) == (401, reason.lower())
        await untouched.cancel(spared)
        await untouched.finished(spared)
    await first.no_hold_left(tenant)
    [row] = first.database.rows(
        """SELECT count(*) FILTER (WHERE revoked_at IS NULL) AS active_count
           FROM api_keys WHERE project_id = %s""",
        tenant.project_id,
    )
    assert row["active_count"] == 0
    listed = await operator(first, "ListProjects", organization=tenant.name)
    assert [each.HasField("closure") for each in listed.projects] == [not is_whole]


async def test_no_key_survives_that_is_made_or_rotated_meanwhile(pair: Pair) -> None:
    """Changes in both processes come before the closing, and are undone, or are refused."""
    first, second = pair
    tenant = await first.tenant()
    _, rotated = await first.new_key(tenant, role="owner")
    prefix, refusals = rotated[:11], list[str]()
    secret = (await first.tenant(scopes=("admin",))).secret
    async with calls(first, secret) as one, calls(second, secret) as two:

        async def change(number: int) -> str:
            call = (one, two)[number % 2]
            key = {"project": "main", "name": f"k{number}", "scopes": ["inference"]}
            try:
                if number % 3:
                    made = await call("CreateApiKey", organization=tenant.name, **key)
                else:
                    made = await call("RotateApiKey", api_key=prefix)
            except AioRpcError as error:
                refusals.append(error.details() or "")
                return ""
            return str(made.secret)

        changes = [asyncio.create_task(change(each)) for each in range(24)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(close(first, tenant))
        secrets = [each for each in await asyncio.gather(*changes) if each]
        await closing
        refused = await one.refused(
            "CreateApiKey",
            organization=tenant.name,
            project="main",
            name="late",
            scopes=["inference"],
        )

    assert (refused.code, refused.fields) == (StatusCode.INVALID_ARGUMENT, ["organization"])
    assert all("closed for good" in each or "is revoked" in each for each in refusals)
    assert {await http_refusal(second, each) for each in secrets} <= {
        (401, "organization_closed"),
        (401, "invalid_api_key"),  # replaced by a rotation
    }
    rows = first.database.rows(
        "SELECT 1 FROM api_keys WHERE project_id = %s AND revoked_at IS NULL", tenant.project_id
    )
    assert rows == []


async def test_a_closing_waits_for_a_key_that_is_being_made(service: Service) -> None:
    """And revokes it, although it could not see it before."""
    tenant = await service.tenant()
    secret = (await service.tenant(scopes=("admin",))).secret
    given = {"organization": tenant.name, "confirm_name": tenant.name, "reason": WHY}
    async with calls(service, secret) as call:
        async with service.session() as session:
            await take_changes_lock(session, alone=False)
            _, late = await create_api_key(
                session, organization=tenant.name, project="main", name="late", actor="test"
            )
            closing = asyncio.create_task(call("CloseOrganization", **given))
            await asyncio.wait([closing], timeout=0.5)
            assert not closing.done()
        await closing

    assert await http_refusal(service, late) == (401, "organization_closed")
    rows = service.database.rows(
        "SELECT 1 FROM api_keys WHERE project_id = %s AND revoked_at IS NULL", tenant.project_id
    )
    assert rows == []


async def test_a_configuration_changes_no_closed_organization(service: Service) -> None:
    tenant = await service.tenant()
    await close(service, tenant)
    secret = (await service.tenant(scopes=("admin",))).secret
    key = {"name": "k", "scopes": ["inference"]}
    owner = {"name": tenant.name, "projects": [{"name": "main", "keys": [key]}]}

    async with calls(service, secret) as call:
        for dry_run in (True, False):
            answer = await call(
                "ApplyConfiguration", configuration={"organizations": [owner]}, dry_run=dry_run
            )
            [violation] = answer.violations
            assert violation.field.startswith("organizations[0].projects[0].keys[0]")
            assert "closed for good" in violation.description
            assert not answer.changes


async def test_only_the_operator_closes_an_organization_and_owners_its_projects(
    service: Service,
) -> None:
    tenant = await service.tenant()
    keys = {role: (await service.new_key(tenant, role=role))[1] for role in ("owner", "admin")}
    async with calls(service, keys["owner"]) as owner, calls(service, keys["admin"]) as admin:
        await owner("CreateProject", organization=tenant.name, name="web")
        await owner("CreateProject", organization=tenant.name, name="held")
        await operator(service, "SuspendProject", project=f"{tenant.name}/held", reason="abuse")
        web = {"project": f"{tenant.name}/web", "confirm_name": "web", "reason": WHY}
        held = {"project": f"{tenant.name}/held", "confirm_name": "held", "reason": WHY}
        for call in (owner, admin):
            refused = await call.refused(
                "CloseOrganization",
                organization=tenant.name,
                confirm_name=tenant.name,
                reason=WHY,
            )
            assert refused.reason == "PERMISSION_DENIED"
        assert (await admin.refused("CloseProject", **web)).reason == "PERMISSION_DENIED"
        assert (await owner.refused("CloseProject", **held)).fields == ["project"]

        closed = await owner("CloseProject", **web)
        again = await owner("CloseProject", **web)

        assert (closed.project.closure.by_operator, closed.project) == (False, again.project)
        refused = await owner.refused("ResumeProject", project=web["project"])
        assert refused.fields == ["project"]
        entries = (await owner("ListAuditEntries", page_size=100)).entries
        assert "project.close" in {each.action for each in entries}


async def test_foreign_projects_are_like_unknown_ones(service: Service) -> None:
    victim, stranger = await service.tenant(), await service.tenant()
    _, secret = await service.new_key(stranger, role="owner")
    async with calls(service, secret) as call:
        for ref in (f"{victim.name}/main", str(victim.project_id), "nobody/main"):
            for more in ({"confirm_name": "main", "reason": WHY}, {"validate_only": True}):
                refused = await call.refused("CloseProject", project=ref, **more)
                assert refused.code is StatusCode.NOT_FOUND
    async with service.stream(victim.secret) as stream:
        await stream.finished(await stream.begin(max_output_tokens=1))


async def test_an_unknown_choice_for_the_credit_is_refused(service: Service) -> None:
    tenant = await service.tenant()
    secret = (await service.tenant(scopes=("admin",))).secret
    async with calls(service, secret) as call:
        refused = await call.refused(
            "CloseOrganization",
            organization=tenant.name,
            confirm_name=tenant.name,
            reason=WHY,
            remaining_credit=9,
        )
    assert refused.fields == ["remaining_credit"]
    closed = await close(service, tenant, remaining_credit=pb.REMAINING_CREDIT_KEEP)
    assert closed.organization.closure.remaining_credit == pb.REMAINING_CREDIT_KEEP
    assert uuid.UUID(closed.organization.organization_id) == tenant.organization_id
