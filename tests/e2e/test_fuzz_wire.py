"""Bytes that no client of ours sends: as messages of every call, as frames in any order, as metadata, as a connection.

Whatever comes, each call ends with a status that is neither unknown nor an incident, and at the end nothing is left of any of it.
`WEIR_TEST_WIRE_EXAMPLES` says how many attacks are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import Default
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from weir.v1 import inference_service_pb2 as pb

from api.server import SERVICES
from metering.models import QuotaDimension
from tests.service import PATIENCE_S, Inside, Service, Tenant, bearer, cancel, run_inside, start, until

EXAMPLES = int(os.environ.get("WEIR_TEST_WIRE_EXAMPLES", "150"))
GENERATE = "/weir.v1.InferenceService/Generate"
PATHS = [
    f"/{name}/{method.name}"
    for name in (*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
    for method in Default().FindServiceByName(name).methods
]
IDS = [f"00000000-0000-4000-8000-00000000000{number}" for number in range(4)]  # few, so that they are used again and again
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# A stream that is not cancelled has to end by itself: its requests are short.
SHORT: dict[str, Any] = {"max_output_tokens": 3}


def any_frame(kind: str, request_id: str) -> pb.ClientFrame:
    """A frame of a kind of the contract, with nothing in it but what makes it one."""
    if kind == "start":
        return start(request_id, **SHORT)
    frame = cancel(request_id) if kind == "cancel" else pb.ClientFrame(request_id=request_id)
    if kind not in ("cancel", "none"):
        getattr(frame, kind).SetInParent()
    return frame


def damaged(message: bytes, seed: int) -> bytes:
    """The message with some bytes changed, cut off or repeated."""
    chance = random.Random(seed)
    content = bytearray(message)
    for _ in range(chance.randint(1, 4)):
        if not content:
            break
        at = chance.randrange(len(content))
        match chance.randrange(4):
            case 0:
                content[at] = chance.randrange(256)
            case 1:
                del content[at:]
            case 2:
                content[at:at] = content[: chance.randrange(40)]
            case _:
                content[at] ^= 1 << chance.randrange(8)
    return bytes(content)


KINDS = ["none", *(field.name for field in pb.ClientFrame.DESCRIPTOR.oneofs_by_name["kind"].fields)]
frames = st.builds(any_frame, st.sampled_from(KINDS), st.sampled_from([*IDS, "", "no id"]))
messages = st.builds(lambda some: pb.GenerateRequest(frames=some).SerializeToString(), st.lists(frames, max_size=5))
bodies = st.one_of(messages, st.builds(damaged, messages, st.integers(0, 2**32)), st.binary(max_size=300))
keys = st.sampled_from(
    ["authorization", "grpc-timeout", "x", "x-bin", "te", "grpc-encoding", "traceparent", "content-type", "a.b_c-d"]
)
values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40) | st.sampled_from(
    ["Bearer", "Bearer ", "1n", "gzip"]
)
metadata = st.lists(st.tuples(keys, values), max_size=4)
attacks = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from(PATHS), st.binary(max_size=200)),
    st.tuples(st.just("stream"), st.lists(bodies, max_size=5), st.booleans()),
    st.tuples(st.just("metadata"), st.sampled_from(PATHS), metadata),
    st.tuples(st.just("connection"), st.booleans(), st.binary(max_size=400)),
)


class Attacker:
    """Makes attacks on a service that runs in this process, and judges how they end."""

    def __init__(self, service: Service, tenant: Tenant, channel: grpc.aio.Channel) -> None:
        self.service = service
        self.tenant = tenant
        self.channel = channel
        self.codes: set[grpc.StatusCode] = set()

    async def attack(self, kind: str, *details: Any) -> None:
        """One of them."""
        async with asyncio.timeout(PATIENCE_S):
            match kind:
                case "unary":
                    await self.call(details[0], [details[1]], bearer(self.tenant.secret))
                case "stream":
                    await self.call(GENERATE, details[0], bearer(self.tenant.secret), hang_up=details[1])
                case "metadata":
                    await self.call(details[0], [b""], [(key, as_metadata(key, value)) for key, value in details[1]])
                case _:
                    await self.connect(*details)

    async def call(
        self, path: str, sent: Sequence[bytes], given_metadata: Sequence[tuple[str, Any]], *, hang_up: bool = False
    ) -> None:
        """Send messages as they are to any call, as if it were a stream both ways: that is what it is on the wire."""
        opening: Any = self.channel.stream_stream(path)
        try:
            opened = opening(metadata=given_metadata, timeout=PATIENCE_S)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for message in sent:
                    await opened.write(message)
                if hang_up:
                    opened.cancel()
                await opened.done_writing()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                async for _ in opened:
                    if path.endswith("/Watch"):  # it goes on for ever
                        opened.cancel()
            self.judge(await opened.code(), await opened.details(), path)
        except ValueError:
            return  # our own library would not send that

    def judge(self, code: grpc.StatusCode, details: str, path: str) -> None:
        """A status that tells what was wrong."""
        self.codes.add(code)
        assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS), (path, details)
        assert "incident" not in details, (path, details)

    async def connect(self, with_preface: bool, content: bytes) -> None:
        """Bytes on a connection that is no call at all."""
        host, _, port = self.service.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            writer.write((PREFACE if with_preface else b"") + content)
            writer.write_eof()
            while await reader.read(65_536):
                pass
        writer.close()


def as_metadata(key: str, value: str) -> str | bytes:
    """As gRPC wants it of this key."""
    return value.encode() if key.endswith("-bin") else value


async def test_whatever_comes_over_the_wire_gets_a_status_and_leaves_nothing(
    tmp_path: Path, model: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(tmp_path, database_url, model)
    with capture_logs() as logs:
        async with run_inside(service, monkeypatch) as inside, service.channel() as channel:
            tenant = await service.tenant({QuotaDimension.CONCURRENT_REQUESTS: 3}, scopes=("inference", "billing", "admin"))
            attacker = Attacker(service, tenant, channel)
            await attacker.attack("stream", [pb.GenerateRequest(frames=[start(**SHORT)]).SerializeToString()], False)
            assert attacker.codes == {grpc.StatusCode.OK}, "the attacker is heard"
            before = len(asyncio.all_tasks())

            for path in PATHS:  # each at least once, whatever the search chooses
                await attacker.attack("unary", path, b"")
                await attacker.attack("unary", path, b"\xff\xff")
            await asyncio.to_thread(search, asyncio.get_running_loop(), attacker)

            await still_serves(inside, tenant)
            await inside.check_empty()
            await until(lambda: len(asyncio.all_tasks()) <= before, "the tasks of streams to end")
    assert {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.CANCELLED} <= attacker.codes
    assert [line for line in logs if line["log_level"] in ("error", "critical")] == []
    assert service.books.held_hold_count() == 0


def search(loop: asyncio.AbstractEventLoop, attacker: Attacker) -> None:
    """Look for an attack that succeeds. In a thread of its own: the search is not asynchronous, and the server is in the loop."""

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(some=st.lists(attacks, min_size=1, max_size=3))
    def attack(some: list[tuple[Any, ...]]) -> None:
        async def all_at_once() -> None:
            async with asyncio.TaskGroup() as tasks:
                for each in some:
                    tasks.create_task(attacker.attack(*each))

        asyncio.run_coroutine_threadsafe(all_at_once(), loop).result()

    attack()


async def still_serves(inside: Inside, tenant: Tenant) -> None:
    """A request of somebody else has all its tokens."""
    async with inside.service.stream(tenant.secret) as stream:
        finished = await stream.finished(await stream.begin())
    assert finished.usage.delivered_token_count == 20
