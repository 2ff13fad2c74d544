"""Keys restricted to networks: for every entry, in every process, and for running requests."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc

from api.generation.request.peers import VOUCHER, Peer, make_identity
from metering.tenants.api_keys import update_api_key
from metering.tenants.networks import parse_address
from tests.calls import Calls, calls
from tests.e2e.conftest import Serve
from tests.e2e.openai_clients import connect_async, user_message
from tests.e2e.test_console import console_url
from tests.peers import publish
from tests.scraped import scrape
from tests.service import MODEL, PATIENCE_S, Refusal, Service, Tenant, bearer, refused, start, until

INSIDE, OTHER_INSIDE, OUTSIDE = "203.0.113.5", "2001:db8::7", "198.51.100.9"
NETWORKS = ["203.0.113.0/24", "2001:db8::/32"]
KEPT: dict[str, Any] = {"keep_on_disconnect": {"seconds": 60}}
Pair = tuple[Service, Service]
CHECKED_DAILY_S = 86_400.0  # so that open streams notice changes by a notification


def behind_proxy(address: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that a proxy on this machine adds for its client."""
    return (("x-forwarded-for", address),)


@pytest.fixture(scope="module")
def pair(serve: Serve, model: Path) -> Pair:
    """Return two api processes on one database, behind a proxy on this machine."""
    settings = {
        "trusted_proxies": "127.0.0.0/8",
        "stream_key_check_s": CHECKED_DAILY_S,
        "key_use_interval_s": 0.1,
    }
    return (serve(model, is_drained=True, **settings), serve(model, is_drained=True, **settings))


class Key:
    """Key of a tenant, and calls of an admin who changes it through one process."""

    def __init__(self, tenant: Tenant, admin: Calls) -> None:
        self.tenant, self.secret, self.prefix = tenant, tenant.secret, tenant.key.prefix
        self.admin = admin

    async def limit(self, networks: Sequence[str] = (), **fields: Any) -> admin_pb.ApiKey:
        """Restrict the key to these networks."""
        limits = {"allowed_networks": networks, **fields}
        answer = await self.admin("UpdateApiKey", api_key=self.prefix, **limits)
        return answer.api_key  # type: ignore[no-any-return]


@pytest.fixture
async def key(pair: Pair) -> AsyncIterator[Key]:
    """Yield a key without limits, changed through the first process."""
    here, _ = pair
    tenant, admin = await here.tenant(), await here.tenant(scopes=("admin",))
    async with calls(here, admin.secret) as call:
        yield Key(tenant, call)


def is_outside(refusal: Refusal, address: str) -> bool:
    """Return whether it is the refusal of an address that is not allowed."""
    reported = refusal.code, refusal.reason, refusal.info.metadata["address"]
    message = refusal.status.message
    return (
        reported == (StatusCode.PERMISSION_DENIED, "ADDRESS_NOT_ALLOWED", address)
        and address in message
        and "203.0.113" not in message
    )


async def on_every_call(
    service: Service, secret: str, metadata: Sequence[tuple[str, str]]
) -> list[Refusal]:
    """Return the refusals of each kind of gRPC call."""
    async with (
        calls(service, secret, *metadata) as call,
        service.stream(secret, metadata=metadata) as stream,
    ):
        await until(lambda: stream.over, "the stream to be refused")
        assert stream.error is not None
        return [
            Refusal.of(stream.error),
            await call.refused("Embed", request_id=str(uuid.uuid4()), model=MODEL),
            await call.refused("CountTokens", model=MODEL, text="a"),
            await call.refused("Quote", start=start().start),
            await call.refused("ListModels"),
        ]


async def test_other_networks_are_refused(pair: Pair, key: Key) -> None:
    _, there = pair
    await key.limit(NETWORKS)
    before = await scrape(there.metrics_url)

    refusals = await on_every_call(there, key.secret, behind_proxy(OUTSIDE))
    unforwarded = await on_every_call(there, key.secret, ())
    wrong = await on_every_call(there, key.secret[:-1] + "~", behind_proxy(INSIDE))
    headers = {"x-forwarded-for": OUTSIDE}
    async with connect_async(there, key.secret, default_headers=headers) as client:
        for attempt in (
            client.chat.completions.create(model=MODEL, messages=user_message("a")),
            client.embeddings.create(model=MODEL, input="a"),
            client.models.retrieve(MODEL),
        ):
            with pytest.raises(openai.PermissionDeniedError) as raised:
                await attempt
            assert raised.value.code == "address_not_allowed"
            assert OUTSIDE in str(raised.value)
    after = await scrape(there.metrics_url)
    billing = await there.new_key(key.tenant, "billing")
    await key.admin("UpdateApiKey", api_key=billing[0].prefix, allowed_networks=tuple(NETWORKS))
    async with aiohttp.ClientSession() as http:
        for address, status in ((OUTSIDE, 403), (INSIDE, 200), (f"{INSIDE}, {OUTSIDE}", 403)):
            seen = {"authorization": f"Bearer {billing[1]}", "x-forwarded-for": address}
            async with http.get(console_url(there, "api/session"), headers=seen) as session:
                assert session.status == status
            async with http.post(
                console_url(there, "api/BillingService/GetUsage"), headers=seen, json={}
            ) as usage:
                assert (usage.status == 403) is (status == 403)

    assert all(is_outside(refusal, OUTSIDE) for refusal in refusals)
    assert all(is_outside(refusal, "127.0.0.1") for refusal in unforwarded)
    assert {each.code for each in wrong} == {StatusCode.UNAUTHENTICATED}
    assert {each.reason for each in wrong} == {"UNAUTHENTICATED"}
    for address in (INSIDE, OTHER_INSIDE):
        async with there.stream(key.secret, metadata=behind_proxy(address)) as stream:
            await stream.finished(await stream.begin())
    async with connect_async(
        there, key.secret, default_headers={"x-forwarded-for": INSIDE}
    ) as client:
        assert (
            await client.chat.completions.create(
                model=MODEL, messages=user_message("a"), max_tokens=3
            )
        ).usage
    for call, count in (("Generate", 2), ("Embed", 2), ("CountTokens", 2), ("http", 3)):
        labels = {"call": call, "reason": "ADDRESS_NOT_ALLOWED"}
        added = after.value("weir_failed_calls_total", **labels) - before.value(
            "weir_failed_calls_total", **labels
        )
        assert added == count, call
    assert len(there.database.events(key.tenant)) == 3


async def test_an_address_in_the_clients_headers_is_ignored(
    service: Service, pair: Pair, key: Key
) -> None:
    """Without a trusted proxy no header counts; behind one, only the part that it added."""
    direct = await service.tenant()
    async with service.session() as session:
        await update_api_key(
            session,
            api_key=direct.key.prefix,
            terms=lambda old: replace(old, allowed_networks=tuple(NETWORKS)),
            actor="test",
        )
    await key.limit(NETWORKS)
    _, there = pair

    spoofed = await on_every_call(service, direct.secret, behind_proxy(INSIDE))
    added = await on_every_call(there, key.secret, behind_proxy(f"{INSIDE}, {OUTSIDE}"))
    twice = await on_every_call(there, key.secret, (*behind_proxy(INSIDE), *behind_proxy(OUTSIDE)))
    unknown = await on_every_call(there, key.secret, behind_proxy(f"{INSIDE}, unknown"))
    async with connect_async(
        service, direct.secret, default_headers={"x-forwarded-for": INSIDE}
    ) as client:
        with pytest.raises(openai.PermissionDeniedError, match=r"127\.0\.0\.1"):
            await client.chat.completions.create(model=MODEL, messages=user_message("a"))

    assert all(is_outside(refusal, "127.0.0.1") for refusal in spoofed)
    assert all(is_outside(refusal, OUTSIDE) for refusal in (*added, *twice))
    assert all(is_outside(refusal, "an unknown address") for refusal in unknown)
    async with there.stream(
        key.secret, metadata=behind_proxy(f"{OUTSIDE}, {INSIDE}, 127.0.0.7")
    ) as stream:
        await stream.finished(await stream.begin())


async def test_narrowing_ends_requests_outside(pair: Pair, key: Key) -> None:
    """The other process has cached the key, and checks its streams once a day only."""
    _, there = pair
    outside, inside = behind_proxy(OUTSIDE), behind_proxy(INSIDE)
    async with (
        there.stream(key.secret, metadata=outside) as out,
        there.stream(key.secret, metadata=inside) as within,
        connect_async(there, key.secret, default_headers=dict(outside)) as client,
    ):
        long = await out.begin(max_output_tokens=4000)
        kept = await out.begin(max_output_tokens=4000, **KEPT)
        goes_on = await within.begin(max_output_tokens=400, initial_credit_tokens=5)
        for stream, request_id in ((out, long), (out, kept), (within, goes_on)):
            await stream.received(request_id, 1)
        chunks = await client.chat.completions.create(
            model=MODEL, messages=user_message("a"), stream=True, extra_body={"ignore_eos": True}
        )
        chat = aiter(chunks)
        await anext(chat)

        await key.limit(NETWORKS)
        ends = [await out.failed(long), await out.failed(kept)]
        with pytest.raises(openai.APIError, match="may not be used from"):
            async for _ in chat:
                pass
        later = await out.failed(await out.begin())
        await out.attach(goes_on)
        attached = await out.failed(goes_on)
        await within.credit(goes_on, 1000)
        end = await within.finished(goes_on)
        await key.limit(all_networks=True)
        async with asyncio.timeout(PATIENCE_S):
            while (await out.end(await out.begin(max_output_tokens=1))).WhichOneof(
                "kind"
            ) == "failed":
                pass

    assert all(is_outside(refusal, OUTSIDE) for refusal in (*ends, later, attached))
    assert all(each.frame and each.frame.usage.delivered_token_count > 0 for each in ends)
    assert end.usage.delivered_token_count == 400
    outcomes = sorted(event["outcome"] for event in there.database.events(key.tenant))
    assert outcomes.count("cancelled") == 3


async def test_a_rotation_ends_running_requests(pair: Pair, key: Key) -> None:
    """On streams, kept requests, relays and HTTP; requests with the new secret go on."""
    here, there = pair
    first = await key.admin("RotateApiKey", api_key=key.prefix)
    old, new = key.secret, first.secret
    async with (
        there.stream(old) as stream,
        there.stream(new) as other,
        here.stream(old) as relayed,
        connect_async(there, old) as client,
    ):
        long = await stream.begin(max_output_tokens=4000)
        kept = await stream.begin(max_output_tokens=4000, **KEPT)
        spared = await other.begin(max_output_tokens=4000, **KEPT)
        for each, request_id in ((stream, long), (stream, kept), (other, spared)):
            await each.received(request_id, 1)
        await relayed.attach(spared)
        await relayed.received(spared, 1)
        chunks = await client.chat.completions.create(
            model=MODEL, messages=user_message("a"), stream=True, extra_body={"ignore_eos": True}
        )
        chat = aiter(chunks)
        await anext(chat)
        begun = await other.begin(max_output_tokens=4000, **KEPT)
        await other.received(begun, 1)

        newest = await key.admin("RotateApiKey", api_key=key.prefix, overlap=Duration())
        ends = [
            await stream.failed(long),
            await stream.failed(kept),
            await relayed.failed(spared),
            await other.failed(begun),
        ]
        with pytest.raises(openai.APIError, match="was replaced"):
            async for _ in chat:
                pass
        refusals = [await each.failed(await each.begin()) for each in (stream, other, relayed)]
    async with there.stream(newest.secret) as fresh:
        await fresh.finished(await fresh.begin())

    assert {(end.code, end.reason) for end in ends} == {(StatusCode.UNAUTHENTICATED, "KEY_REVOKED")}
    assert {refusal.code for refusal in refusals} == {StatusCode.UNAUTHENTICATED}
    events = there.database.events(key.tenant)
    assert sorted(event["outcome"] for event in events) == ["cancelled"] * 5 + ["length"]
    assert all(event["delivered_token_count"] < 4000 for event in events)


async def test_a_revoked_key_receives_nothing(pair: Pair, key: Key) -> None:
    """Its streams are attached to them, in their process and through another one."""
    here, there = pair
    _, owner_secret = await here.new_key(key.tenant)
    async with (
        there.stream(owner_secret) as owner,
        there.stream(key.secret) as attached,
        here.stream(key.secret) as relayed,
    ):
        streams = attached, relayed
        taken = [(stream, await owner.begin(max_output_tokens=4000, **KEPT)) for stream in streams]
        for stream, request_id in taken:
            await owner.received(request_id, 1)
            await stream.attach(request_id)
            await stream.received(request_id, 1)
        await key.admin("RevokeApiKey", api_key=key.prefix)
        ends = [await stream.failed(request_id) for stream, request_id in taken]
        refusals = [await stream.failed(await stream.begin()) for stream in streams]
        for _, request_id in taken:
            await owner.cancel(request_id)

    assert {(end.code, end.reason) for end in ends} == {(StatusCode.UNAUTHENTICATED, "KEY_REVOKED")}
    assert {refusal.code for refusal in refusals} == {StatusCode.UNAUTHENTICATED}


async def test_an_expired_secret_raises_no_limit(pair: Pair, key: Key) -> None:
    """Running requests go on within their earlier limits."""
    here, there = pair
    async with there.stream(key.secret) as stream, here.stream(key.secret) as relayed:
        plain = await stream.begin(max_output_tokens=100, initial_credit_tokens=5)
        kept = await stream.begin(max_output_tokens=100, initial_credit_tokens=5, **KEPT)
        for request_id in (plain, kept):
            await stream.received(request_id, 1)
        await relayed.attach(kept)
        await relayed.first(kept, "attached")
        await key.admin("RotateApiKey", api_key=key.prefix, overlap=Duration(nanos=1_000_000))
        for each in (stream, relayed):
            while (await each.end(await each.begin(max_output_tokens=1))).WhichOneof(
                "kind"
            ) != "failed":
                pass
        for each, request_id in ((stream, plain), (relayed, kept)):
            await each.update(request_id, max_output_tokens=200)
            await each.credit(request_id, 1000)
        updates = [await stream.first(plain, "updated"), await relayed.first(kept, "updated")]
        ends = [await stream.finished(plain), await relayed.finished(kept)]

    assert [update.refusal.code for update in updates] == [StatusCode.UNAUTHENTICATED.value[0]] * 2
    assert [end.usage.delivered_token_count for end in ends] == [100, 100]


@pytest.mark.parametrize(("change", "status"), [("narrowed", 403), ("rotated", 401)])
async def test_a_request_whose_key_ends_before_its_body_arrives_is_refused(
    pair: Pair, key: Key, change: str, status: int
) -> None:
    """The key was valid when its headers arrived."""
    _, there = pair
    host, port = there.openai_url.removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    requested = {"model": MODEL, "messages": user_message("a"), "max_tokens": 3}
    body = json.dumps(requested).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer"
        f" {key.secret}\r\ncontent-length: {len(body)}\r\n"
    )
    writer.write(f"{head}x-forwarded-for: {OUTSIDE}\r\nexpect: 100-continue\r\n\r\n".encode())
    assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")

    async with there.stream(key.secret, metadata=behind_proxy(OUTSIDE)) as stream:
        await (
            key.limit(NETWORKS)
            if change == "narrowed"
            else key.admin("RotateApiKey", api_key=key.prefix, overlap=Duration())
        )
        while (await stream.end(await stream.begin(max_output_tokens=1))).WhichOneof(
            "kind"
        ) != "failed":
            pass  # the notification has not come yet
    writer.write(body)
    answer = await reader.readuntil(b"\r\n\r\n")
    writer.close()

    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


async def test_attaching_follows_the_networks(pair: Pair, key: Key) -> None:
    """The relaying process reports the client's address, which is trusted only from peers."""
    here, there = pair
    await key.limit(NETWORKS)
    inside = behind_proxy(INSIDE)
    async with (
        there.stream(key.secret, metadata=inside) as first,
        here.stream(key.secret, metadata=inside) as second,
    ):
        request_id = await first.begin(max_output_tokens=300, **KEPT, initial_credit_tokens=5)
        await first.received(request_id, 1)
        await second.attach(request_id)
        await second.credit(request_id, 1000)
        received = await second.finished(request_id)
    [row] = there.database.rows(
        "SELECT peer_address, peer_certificate FROM live_reports r JOIN holds h USING (process_id)"
        " WHERE request_id = %s",
        request_id,
    )
    stranger, other = make_identity(uuid.uuid4()), make_identity(uuid.uuid4())
    await publish(there, other)
    address = parse_address(INSIDE)
    assert address is not None
    refusals = []
    for forged in (
        (),
        inside,
        ((VOUCHER, stranger.vouch(key.secret, address)),),
        ((VOUCHER, "nonsense"),),
    ):
        async with Peer(row["peer_address"], row["peer_certificate"]).channel(other) as channel:
            metadata = (*bearer(key.secret), *forged)
            call = pb_grpc.InferenceServiceStub(channel).Generate(metadata=metadata)
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                refusals.append(Refusal.of(error))

    assert received.usage.delivered_token_count == 300
    assert [is_outside(refusal, "an unknown address") for refusal in refusals] == [True] * 4


async def test_networks_are_set_and_shown(pair: Pair, key: Key) -> None:
    _, there = pair
    limited = await key.limit(["203.0.113.7", *NETWORKS, "203.0.113.7/32"])
    rotated = await key.admin("RotateApiKey", api_key=key.prefix)
    named = {"organization": key.tenant.name, "project": "main", "name": "bot"}
    created = await key.admin("CreateApiKey", **named, allowed_networks=NETWORKS)
    other = await key.admin.refused("CreateApiKey", **named, allow_existing=True)
    wrong = await refused(key.limit(["10.0.0.1/8"]))
    both = await refused(key.limit(NETWORKS, all_networks=True))
    own = key.admin.secret[:11]
    revoke = await key.admin.refused("UpdateApiKey", api_key=own, allowed_networks=tuple(NETWORKS))
    async with calls(there, rotated.secret, *behind_proxy(OUTSIDE)) as call:
        kept = await call.refused("GetQuota")
    async with calls(there, rotated.secret, *behind_proxy(INSIDE)) as call:
        reported = await call("GetQuota")

    async def is_noted() -> bool:
        [found] = (await key.admin("ListApiKeys", api_key=key.prefix)).api_keys
        return bool(found.HasField("last_use_time"))

    async with asyncio.timeout(PATIENCE_S):
        while not await is_noted():
            pass
    [unused] = (await key.admin("ListApiKeys", api_key=created.api_key.prefix)).api_keys
    entries = (
        await key.admin("ListAuditEntries", subject=key.prefix, action_prefix="api_key.update")
    ).entries

    assert (
        list(limited.allowed_networks)
        == list(rotated.api_key.allowed_networks)
        == ["2001:db8::/32", "203.0.113.0/24", "203.0.113.7/32"]
    )
    assert is_outside(kept, OUTSIDE)
    assert list(reported.restrictions.allowed_networks) == list(limited.allowed_networks)
    assert other.code is StatusCode.ALREADY_EXISTS
    assert (wrong.fields, both.fields) == (["allowed_networks"], ["all_networks"])
    assert (revoke.code, revoke.fields) == (StatusCode.INVALID_ARGUMENT, ["allowed_networks"])
    assert "127.0.0.1" in revoke.status.message
    assert not unused.HasField("last_use_time")
    assert json.loads(entries[0].before_json)["allowed_networks"] == []
    assert json.loads(entries[0].after_json)["allowed_networks"] == list(limited.allowed_networks)
