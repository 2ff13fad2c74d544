"""Keys over the wire: rotation while requests run, and repeated creation by scripts."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode
from weir.v1 import types_pb2

from tests.calls import Calls, calls
from tests.service import MODEL, PATIENCE_S, Service, Tenant, start, until


async def test_both_secrets_of_a_key_spend_one_quota(service: Service, admin: Calls) -> None:
    tenant = await service.tenant()
    await admin(
        "SetQuota",
        subject=types_pb2.QUOTA_SUBJECT_API_KEY,
        subject_ref=tenant.key.prefix,
        dimension=types_pb2.QUOTA_DIMENSION_TOKENS_PER_MONTH,
        limit_value=60,
    )
    rotated = await admin("RotateApiKey", api_key=tenant.key.prefix)

    async with service.stream(tenant.secret) as old, service.stream(rotated.secret) as new:
        await old.finished(await old.begin(max_output_tokens=20))
        await new.finished(await new.begin(max_output_tokens=20))
        refusal = await new.failed(await new.begin(max_output_tokens=20))

    assert refusal.reason == "QUOTA_EXCEEDED"
    assert refusal.info.metadata["used"] == "60"
    assert {event["api_key_id"] for event in service.database.events(tenant)} == {tenant.key.id}
    assert rotated.api_key.overlap_end_time == rotated.overlap_end_time


async def test_a_replaced_secret_starts_nothing_more(service: Service, admin: Calls) -> None:
    """Without further checks an old secret would live as long as its stream."""
    tenant = await service.tenant()
    rotated = await admin("RotateApiKey", api_key=tenant.key.prefix, overlap=Duration(seconds=2))

    async with service.stream(tenant.secret) as old:
        long = await old.begin(max_output_tokens=4000)
        await old.received(long, 1)
        endings: list[str] = []

        async def is_refused() -> bool:
            frame = await old.end(await old.begin(max_output_tokens=1))
            endings.append(frame.WhichOneof("kind") or "")
            return endings[-1] == "failed"

        async with asyncio.timeout(PATIENCE_S):
            while not await is_refused():
                pass
        refusal = await old.failed(next(reversed(old.frames)))
        await old.finished(long)
    async with service.stream(rotated.secret) as new:
        await new.finished(await new.begin())
    async with service.stream(tenant.secret) as closed:
        await until(lambda: closed.over, "the stream to be refused")

    assert endings[0] == "finished"
    assert (refusal.code, refusal.reason) == (StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert "rotated" in refusal.status.message
    assert await closed.call.code() is StatusCode.UNAUTHENTICATED


async def test_a_repeated_call_gets_the_first_answer(service: Service, admin: Calls) -> None:
    """Scripts may die half-way. Only the secret cannot be returned again: it is not stored."""
    name, ids = f"a{uuid.uuid4().hex[:16]}", [str(uuid.uuid4()) for _ in range(5)]
    kinds = ("input", "cached_input", "output")
    prices = {f"{kind}_picos_per_token": 1 for kind in kinds}
    requested: list[tuple[str, dict[str, Any]]] = [
        ("CreateOrganization", {"name": name}),
        ("CreateProject", {"organization": name, "name": "main"}),
        ("CreateApiKey", {"organization": name, "project": "main", "name": "bot"}),
        ("SetPrice", {"model": name, **prices}),
    ]
    first = [
        await admin(call, **fields, request_id=ids[n]) for n, (call, fields) in enumerate(requested)
    ]
    again = [
        await admin(call, **fields, request_id=ids[n].upper())
        for n, (call, fields) in enumerate(requested)
    ]
    key = first[2].api_key.prefix
    rotate = {"api_key": key, "request_id": ids[4]}
    rotated, rotated_again = [await admin("RotateApiKey", **rotate) for _ in range(2)]

    assert [answer.organization.organization_id for answer in (first[0], again[0])] == [
        first[0].organization.organization_id
    ] * 2
    assert first[1].project == again[1].project
    assert first[2].api_key == again[2].api_key
    assert first[3].version == again[3].version
    assert (first[2].existed, bool(first[2].secret)) == (False, True)
    assert (again[2].existed, again[2].secret) == (True, "")
    assert rotated.secret
    assert (rotated_again.secret, rotated_again.overlap_end_time) == ("", rotated.overlap_end_time)
    assert [entry.action for entry in (await admin("ListAuditEntries", subject=name)).entries] == [
        "api_key.rotate",
        "api_key.create",
        "project.create",
        "organization.create",
    ]
    other = await admin.refused("CreateProject", organization=name, name="other", request_id=ids[1])
    wrong = await admin.refused("CreateProject", organization=name, name="other", request_id="7")
    assert (other.code, other.reason) == (StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
    assert (wrong.code, wrong.fields) == (StatusCode.INVALID_ARGUMENT, ["request_id"])


async def test_allow_existing_accepts_existing_objects(service: Service, admin: Calls) -> None:
    name = f"a{uuid.uuid4().hex[:16]}"
    for existed in (False, True):
        organization = await admin("CreateOrganization", name=name, allow_existing=True)
        project = await admin("CreateProject", organization=name, name="main", allow_existing=True)
        key = await admin(
            "CreateApiKey", organization=name, project="main", name="bot", allow_existing=True
        )
        assert (organization.existed, project.existed, key.existed, key.secret == "") == (
            existed,
        ) * 4

    currency = await admin.refused(
        "CreateOrganization", name=name, currency_code="EUR", allow_existing=True
    )
    scopes = await admin.refused(
        "CreateApiKey",
        organization=name,
        project="main",
        name="bot",
        scopes=["admin"],
        allow_existing=True,
    )
    assert currency.code is scopes.code is StatusCode.ALREADY_EXISTS
    assert "USD" in currency.status.message
    assert "inference" in scopes.status.message
    assert len((await admin("ListApiKeys", organization=name)).api_keys) == 1


async def test_a_key_for_other_models_is_refused_by_name(service: Service, tenant: Tenant) -> None:
    key, secret = await service.new_key(tenant, models=["large@7"])

    async with calls(service, secret) as call, service.stream(secret) as stream:
        listed = await call("ListModels")
        refusals = [
            await stream.failed(await stream.begin()),
            await stream.failed(await stream.begin(model="nobody-has-this")),
            await call.refused("CountTokens", model=MODEL, text="a"),
            await call.refused("Quote", start=start().start),
            await call.refused("GetQuota", model=MODEL),
        ]

    assert [(refusal.code, refusal.reason) for refusal in refusals] == [
        (StatusCode.PERMISSION_DENIED, "MODEL_NOT_ALLOWED")
    ] * 5
    models = [refusal.info.metadata["model"] for refusal in refusals]
    assert models == [MODEL, "nobody-has-this", MODEL, MODEL, MODEL]
    assert all(key.prefix in refusal.status.message for refusal in refusals)
    assert list(listed.models) == []
    assert service.database.events(tenant) == []


async def test_models_of_a_key_are_set_changed_and_lifted(service: Service, admin: Calls) -> None:
    tenant = await service.tenant()
    requested = {"organization": tenant.name, "project": "main", "name": "bot"}
    created = await admin("CreateApiKey", **requested, models=[MODEL, MODEL])
    other = await admin.refused("CreateApiKey", **requested, allow_existing=True)
    again = await admin("CreateApiKey", **requested, models=[MODEL], allow_existing=True)
    unknown = await admin.refused("CreateApiKey", **requested, models=["larg"])
    both = await admin.refused(
        "UpdateApiKey", api_key=created.api_key.prefix, models=[MODEL], all_models=True
    )
    async with service.stream(created.secret) as stream:
        await stream.finished(await stream.begin())
    lifted = await admin("UpdateApiKey", api_key=created.api_key.prefix, all_models=True)
    kept = await admin("UpdateApiKey", api_key=created.api_key.prefix, name="robot")
    limited = await admin("UpdateApiKey", api_key=created.api_key.prefix, models=[MODEL])

    assert [list(each.api_key.models) for each in (created, again, lifted, kept, limited)] == [
        [MODEL],
        [MODEL],
        [],
        [],
        [MODEL],
    ]
    assert (other.code, unknown.code, unknown.reason) == (
        StatusCode.ALREADY_EXISTS,
        StatusCode.NOT_FOUND,
        "MODEL_UNKNOWN",
    )
    assert "tiny" in other.status.message
    assert (both.code, both.fields) == (StatusCode.INVALID_ARGUMENT, ["all_models"])
