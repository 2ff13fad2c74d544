"""Export of an organization over gRPC: roles, the border, the audit log, several at a time."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import uuid
import zipfile
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode
from weir.v1 import billing_service_pb2 as pb
from weir.v1.billing_service_pb2_grpc import BillingServiceStub
from weir_cli.exports import summary_of
from weir_client import AsyncBillingClient

from tests.calls import calls
from tests.service import Service, Tenant, bearer


async def export(service: Service, secret: str, organization: str = "") -> zipfile.ZipFile:
    file = io.BytesIO()
    async with AsyncBillingClient(service.address, secret) as billing:
        await billing.export_organization(organization, file)
    return zipfile.ZipFile(file)


def rows(archive: zipfile.ZipFile, table: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in archive.read(f"tables/{table}.jsonl").splitlines()]


async def used(service: Service) -> Tenant:
    tenant = await service.tenant()
    async with service.stream(tenant.secret) as stream:
        await stream.finished(await stream.begin(max_output_tokens=3, end_user="alice"))
    await service.no_hold_left(tenant)
    return tenant


async def test_owners_export_their_organization_and_the_operator_each(service: Service) -> None:
    tenant, other = await used(service), await used(service)
    _, owner = await service.new_key(tenant, role="owner")
    operator = (await service.tenant(scopes=("admin",))).secret

    own = await export(service, owner)
    same = await export(service, operator, tenant.name)

    for archive in (own, same):
        summary = summary_of(archive)
        assert summary["organization"] == {"id": str(tenant.organization_id), "name": tenant.name}
        [event] = rows(archive, "usage_events")
        assert event["organization_id"] == str(tenant.organization_id)
        assert [each["name"] for each in rows(archive, "usage_subjects")] == ["alice"]
        assert [each["id"] for each in rows(archive, "organizations")] == [
            str(tenant.organization_id)
        ]
        content = b"".join(map(archive.read, archive.namelist())).decode()
        assert tenant.secret not in content
        assert str(other.organization_id) not in content
    assert [each["action"] for each in rows(own, "audit_log")].count("organization.export") == 1
    async with calls(service, owner) as call:
        entries = (await call("ListAuditEntries", page_size=100)).entries
    exports = [each for each in entries if each.action == "organization.export"]
    assert [each.actor_role for each in exports] == ["operator", "owner"]


async def test_others_export_nothing(service: Service) -> None:
    tenant, victim = await service.tenant(), await used(service)
    async with service.channel() as channel:
        stub = BillingServiceStub(channel)
        for role in ("developer", "finance", "viewer"):
            _, secret = await service.new_key(tenant, role=role)
            assert await refused(stub, secret, tenant.name) == StatusCode.PERMISSION_DENIED
        _, owner = await service.new_key(tenant, role="owner")
        for ref in (victim.name, str(victim.organization_id), "nobody", str(uuid.uuid4())):
            assert await refused(stub, owner, ref) == StatusCode.NOT_FOUND


async def refused(stub: Any, secret: str, organization: str) -> StatusCode:
    call = stub.ExportOrganization(
        pb.ExportOrganizationRequest(organization=organization), metadata=bearer(secret)
    )
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    code: StatusCode = await call.code()
    return code


async def test_an_export_that_is_cancelled_makes_way_for_the_next(service: Service) -> None:
    tenant = await used(service)
    _, owner = await service.new_key(tenant, role="owner")
    async with service.channel() as channel:
        stub: Any = BillingServiceStub(channel)
        for count in range(1, 4):
            call = stub.ExportOrganization(pb.ExportOrganizationRequest(), metadata=bearer(owner))
            with contextlib.suppress(TimeoutError):  # in different phases of the export
                await asyncio.wait_for(call.read(), 0.02 * count)
            call.cancel()

    archives = await asyncio.gather(*(export(service, owner) for _ in range(3)))

    assert len({summary_of(each)["exported_at"] for each in archives}) == 3


async def test_a_file_is_complete_or_absent(service: Service, tmp_path: Path) -> None:
    tenant = await used(service)
    _, owner = await service.new_key(tenant, role="owner")
    path = tmp_path / "x.zip"
    with path.open("w+b") as file:
        file.write(b"what an interrupted transfer left")
        async with AsyncBillingClient(service.address, owner) as billing:
            await billing.export_organization("", file)
    with zipfile.ZipFile(path) as archive:
        assert summary_of(archive)["row_count"] > 10
