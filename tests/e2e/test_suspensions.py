"""Organizations and projects that are renamed, suspended and resumed, in several api processes."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from grpc import StatusCode
from weir.v1 import admin_service_pb2 as pb
from weir.v1.inference_service_pb2 import ServerFrame

from metering.core.models import QuotaDimension
from tests.calls import calls
from tests.e2e.conftest import Serve
from tests.inference.checkpoints import LlamaShape, make_checkpoint
from tests.service import MODEL, Service, Stream, Tenant, picos, start

WITHIN_S = 2.0  # of the commit, for every request of every process
WHY = "invoice INV-000007 is unpaid"
Pair = tuple[Service, Service]


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of 3 ms per token, so that answers still run on the quickest machine."""
    directory = tmp_path_factory.mktemp("slow")
    make_checkpoint(directory, shape=LlamaShape(layer_count=120, context_window_tokens=4096))
    return directory


@pytest.fixture(scope="module")
def pair(serve: Serve, slow_model: Path) -> Pair:
    """Return two processes, each with its own engine."""
    return serve(slow_model, is_drained=True), serve(slow_model, is_drained=True)


async def operator(service: Service, name: str, **fields: Any) -> Any:
    """Make a call as the operator."""
    secret = (await service.tenant(scopes=("admin",))).secret
    async with calls(service, secret) as call:
        return await call(name, **fields)


async def http_refusal(service: Service, secret: str) -> tuple[int, str]:
    """Return status and code with which a completion is refused over HTTP."""
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {secret}"}) as http:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        async with http.post(f"{service.openai_url}/completions", json=body) as response:
            return response.status, (await response.json())["error"]["code"]


SUBJECTS = [
    ("SuspendOrganization", "ResumeOrganization", "organization", "ORGANIZATION_SUSPENDED"),
    ("SuspendProject", "ResumeProject", "project", "PROJECT_SUSPENDED"),
]


@pytest.mark.parametrize(("suspend", "resume", "field", "reason"), SUBJECTS)
async def test_running_requests_end_and_bill_and_new_ones_are_refused(
    pair: Pair, suspend: str, resume: str, field: str, reason: str
) -> None:
    """In every process, for every key, and not those of another organization."""
    first, second = pair
    tenant, other = await first.tenant(), await first.tenant()
    _, another_key = await first.new_key(tenant)
    target = tenant.name if field == "organization" else f"{tenant.name}/main"
    async with first.stream(other.secret) as untouched:
        spared = await untouched.begin(max_output_tokens=4000)
        async with (
            first.stream(tenant.secret) as here,
            second.stream(another_key) as there,
            second.stream(another_key) as idle,
        ):
            await idle.begin(max_output_tokens=1)
            streams = {
                await stream.begin(max_output_tokens=3000): stream for stream in (here, here, there)
            }
            for request_id, stream in streams.items():
                await stream.received(request_id, 5)

            await operator(first, suspend, **{field: target}, reason=WHY)
            ends = {each: await stream.failed(each) for each, stream in streams.items()}
            late = [await stream.failed(await stream.begin()) for stream in (here, there, idle)]

        for request_id, end in ends.items():
            assert (end.code, end.reason) == (StatusCode.PERMISSION_DENIED, reason)
            assert WHY in end.status.message
            assert "can resume it: ask them" in end.status.message
            event = first.database.event(tenant, request_id)
            assert end.frame is not None
            assert end.frame.usage.delivered_token_count == event["delivered_token_count"] >= 5
            assert len(streams[request_id].token_ids(request_id)) == event["delivered_token_count"]
            assert first.database.billed(tenant)[request_id], "what was delivered is billed"
            assert picos(end.frame.cost) > 0
        assert {each.reason for each in late} == {reason}
        [row] = first.database.rows(
            """SELECT max(extract(epoch FROM settled_at - c.created_at))::float8 AS elapsed_s
               FROM usage_events u JOIN cancel_commands c ON c.owner_id = any(%s)
               WHERE u.request_id = any(%s)""",
            [tenant.organization_id, tenant.project_id],
            [uuid.UUID(each) for each in ends],
        )
        assert 0 < row["elapsed_s"] < WITHIN_S
        for process in pair:
            async with calls(process, tenant.secret) as call:
                assert (await call.refused("ListModels")).reason == reason
            assert await http_refusal(process, another_key) == (403, reason.lower())

        await operator(second, resume, **{field: target})
        for process in pair:
            async with process.stream(tenant.secret) as stream:
                await stream.finished(await stream.begin(max_output_tokens=1))
        await untouched.cancel(spared)
        await untouched.finished(spared)
    await first.no_hold_left(tenant)


@pytest.mark.parametrize(("suspend", "resume", "field", "reason"), SUBJECTS)
async def test_an_answer_over_http_ends_too(
    pair: Pair, suspend: str, resume: str, field: str, reason: str
) -> None:
    """And the next request is refused at once, although its key was checked a moment ago."""
    first, second = pair
    tenant = await first.tenant()
    target = tenant.name if field == "organization" else f"{tenant.name}/main"
    headers = {"authorization": f"Bearer {tenant.secret}"}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3000, "stream": True}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{second.openai_url}/completions", json=body) as response,
    ):
        await response.content.readline()
        await operator(first, suspend, **{field: target}, reason=WHY)
        async with asyncio.timeout(WITHIN_S):
            rest = (await response.content.read()).decode()

    assert reason.lower() in rest
    assert WHY in rest
    assert await http_refusal(second, tenant.secret) == (403, reason.lower())
    await second.no_hold_left(tenant)
    [billed] = second.database.billed(tenant).values()
    assert billed, "what was delivered is billed"
    await operator(first, resume, **{field: target})


async def test_an_open_stream_works_again_after_the_resumption(service: Service) -> None:
    tenant = await service.tenant()
    async with service.stream(tenant.secret) as stream:
        await stream.finished(await stream.begin(max_output_tokens=1))
        await operator(service, "SuspendOrganization", organization=tenant.name, reason=WHY)
        refused = await first_end(stream, "failed")
        await operator(service, "ResumeOrganization", organization=tenant.name)
        await first_end(stream, "finished")

    assert refused.failed.status.message.startswith("Your organization is suspended")


async def first_end(stream: Stream, kind: str) -> ServerFrame:
    """Send short requests until one ends like that; return its last frame."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            frame = start(max_output_tokens=1)
            await stream.send(frame)
            end = await stream.end(frame.request_id)
            if end.WhichOneof("kind") == kind:
                return end


async def test_own_roles_see_why_and_change_but_cannot_resume(service: Service) -> None:
    tenant = await service.tenant()
    _, owner_secret = await service.new_key(tenant, role="owner")
    _, admin_secret = await service.new_key(tenant, role="admin")
    project = f"{tenant.name}/main"
    await operator(service, "SuspendOrganization", organization=tenant.name, reason=WHY)
    await operator(service, "SuspendProject", project=project, reason="abuse")
    for secret in (owner_secret, admin_secret):
        async with calls(service, secret) as call:
            [seen] = (await call("ListOrganizations")).organizations
            assert (seen.suspension.reason, seen.suspension.by_operator) == (WHY, True)
            listed = (await call("ListProjects", organization=tenant.name)).projects
            [shown] = [each for each in listed if each.name == "main"]
            assert (shown.suspension.reason, shown.suspension.by_operator) == ("abuse", True)
            name = f"p{uuid.uuid4().hex[:8]}"
            await call("CreateProject", organization=tenant.name, name=name)
            await call("SuspendProject", project=f"{tenant.name}/{name}", reason="ours")
            await call("ResumeProject", project=f"{tenant.name}/{name}")

            for act, more in (("Suspend", {"reason": "ours"}), ("Resume", {})):
                refused = await call.refused(f"{act}Project", project=project, **more)
                assert (refused.code, refused.fields) == (StatusCode.INVALID_ARGUMENT, ["project"])
                assert "only the operator" in refused.status.message
                refused = await call.refused(f"{act}Organization", organization=tenant.name, **more)
                assert refused.reason == "PERMISSION_DENIED"
    rows = service.database.rows(
        "SELECT reason FROM suspensions WHERE organization_id = %s ORDER BY reason",
        tenant.organization_id,
    )
    assert [row["reason"] for row in rows] == ["abuse", WHY]
    # The operator takes over what the organization suspended.
    async with calls(service, owner_secret) as owner:
        await operator(service, "ResumeProject", project=project)
        await owner("SuspendProject", project=project, reason="ours")
        await operator(service, "SuspendProject", project=project, reason="abuse")
        assert (await owner.refused("ResumeProject", project=project)).fields == ["project"]
        entries = (await owner("ListAuditEntries", page_size=100)).entries
    acts = {"project.suspend", "project.resume", "organization.suspend"}
    assert acts <= {each.action for each in entries}


async def test_foreign_names_are_like_unknown_ones(service: Service) -> None:
    victim, stranger = await service.tenant(), await service.tenant()
    _, secret = await service.new_key(stranger, role="owner")
    async with calls(service, secret) as call:
        for act, more in (
            ("SuspendProject", {"reason": WHY}),
            ("ResumeProject", {}),
            ("UpdateProject", {"name": "x"}),
        ):
            refusals = [
                await call.refused(act, project=ref, **more)
                for ref in (f"{victim.name}/main", str(victim.project_id), "nobody/main")
            ]
            assert {each.code for each in refusals} == {StatusCode.NOT_FOUND}, act
        for ref in (victim.name, str(victim.organization_id), "nobody"):
            refused = await call.refused("UpdateOrganization", organization=ref, name="x")
            assert refused.code is StatusCode.NOT_FOUND
    async with service.stream(victim.secret) as stream:
        await stream.finished(await stream.begin(max_output_tokens=1))


BAD_REASONS = ["", " ", "a\nb", "a" * 201]


@pytest.mark.parametrize("reason", BAD_REASONS)
async def test_a_reason_is_required(service: Service, reason: str) -> None:
    tenant = await service.tenant()
    secret = (await service.tenant(scopes=("admin",))).secret
    async with calls(service, secret) as call:
        refused = await call.refused("SuspendOrganization", organization=tenant.name, reason=reason)
    assert (refused.code, refused.fields) == (StatusCode.INVALID_ARGUMENT, ["reason"])


async def test_a_suspension_is_recorded_once(service: Service) -> None:
    """Repeating it changes nothing, another reason changes it, and resuming twice is one end."""
    tenant = await service.tenant()
    for reason in (WHY, WHY, "more"):
        answer = await operator(
            service, "SuspendOrganization", organization=tenant.name, reason=reason
        )
        assert answer.organization.suspension.reason == reason
    for _ in range(2):
        answer = await operator(service, "ResumeOrganization", organization=tenant.name)
        assert not answer.organization.HasField("suspension")
    rows = service.database.rows(
        """SELECT action, before ->> 'reason' AS before, after ->> 'reason' AS after
           FROM audit_log WHERE subject_id = %s AND action <> 'organization.create' ORDER BY id""",
        str(tenant.organization_id),
    )
    assert [tuple(row.values()) for row in rows] == [
        ("organization.suspend", None, WHY),
        ("organization.suspend", WHY, "more"),
        ("organization.resume", "more", None),
    ]


async def test_a_renamed_organization_keeps_all_but_its_name(service: Service) -> None:
    tenant: Tenant = await service.tenant({QuotaDimension.REQUESTS_PER_DAY: 5})
    _, secret = await service.new_key(tenant, role="owner")
    new, taken = f"n{uuid.uuid4().hex[:20]}", (await service.tenant()).name
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=3)
        await stream.finished(request_id)
        async with calls(service, secret) as owner:
            renamed = await owner("UpdateOrganization", organization=tenant.name, name=new)
            clash = await owner.refused("UpdateOrganization", organization=new, name=taken)
            bad = await owner.refused("UpdateOrganization", organization=new, name="No Name")
            project = await owner("UpdateProject", project=f"{new}/main", name="web")
            await owner("CreateProject", organization=new, name="other")
            same = await owner.refused("UpdateProject", project=f"{new}/other", name="web")
            quotas = (await owner("ListQuotas", organization=new)).quotas
            gone = await owner.refused("ListProjects", organization=tenant.name)
            month = f"{datetime.now(UTC):%Y-%m}"
            report = await owner("GetMonthReport", organization=new, month=month)
        await stream.finished(await stream.begin(max_output_tokens=1))  # the stream goes on

    assert renamed.organization == pb.Organization(
        organization_id=str(tenant.organization_id),
        name=new,
        currency_code="USD",
        create_time=renamed.organization.create_time,
        queue_weight_milli=1000,
    )
    assert (project.project.project_id, project.project.name) == (str(tenant.project_id), "web")
    for refused in (clash, same):
        assert refused.code is StatusCode.ALREADY_EXISTS
        assert "choose another one" in refused.status.message
    assert (bad.code, bad.fields) == (StatusCode.INVALID_ARGUMENT, ["name"])
    assert gone.code is StatusCode.NOT_FOUND
    assert [(each.limit_value, each.used_value) for each in quotas] == [(5, 1)]
    assert (report.organization_id, report.organization_name) == (
        str(tenant.organization_id),
        new,
    )
    rows = service.database.rows(
        """SELECT action, before ->> 'name' AS before, after ->> 'name' AS after
           FROM audit_log WHERE action LIKE '%%.rename' AND subject_id = any(%s) ORDER BY id""",
        [str(tenant.organization_id), str(tenant.project_id)],
    )
    assert [tuple(row.values()) for row in rows] == [
        ("organization.rename", tenant.name, new),
        ("project.rename", "main", "web"),
    ]
