"""Hostile bytes on the wire: as messages of every call, frames in any order, metadata, connections.

An administrator lists live requests all the while. Each call must end with a status that is
neither unknown nor an incident, and at the end nothing is left: no hold, permit, task, executor
work, live request or file descriptor.

`WEIR_TEST_WIRE_EXAMPLES` sets the number of attacks. `WEIR_FUZZ_FRAMES` repeats them with new seeds
until that many frames were sent, and prints their results:

    WEIR_FUZZ_FRAMES=1000000 python -m pytest tests/e2e/test_fuzz_wire.py -s
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import uuid
from collections import Counter
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from weir.v1 import admin_service_pb2_grpc as admin_pb_grpc
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import live_requests_pb2 as live_pb

from api.core.health import SERVICES
from api.core.rate_limiter import RateLimiter
from api.server import REFLECTION_V1
from metering.core.models import QuotaDimension
from tests.e2e.test_fuzz import any_start, good
from tests.service import (
    MODEL,
    PATIENCE_S,
    Inside,
    Service,
    Tenant,
    bearer,
    cancel,
    run_inside,
    start,
    until,
)

EXAMPLES = int(os.environ.get("WEIR_TEST_WIRE_EXAMPLES", "150"))
FRAMES = int(os.environ.get("WEIR_FUZZ_FRAMES", "0"))
FRAMES_PER_S_MIN = 50  # far below the rate of a busy machine: for the timeout of a long run
GENERATE = "/weir.v1.InferenceService/Generate"
PATHS = [
    f"/{name}/{method.name}"
    for name in (*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
    for method in Default().FindServiceByName(name).methods
] + [f"/{REFLECTION_V1}/ServerReflectionInfo"]
# Few, so that ids are reused.
IDS = [f"00000000-0000-4000-8000-00000000000{number}" for number in range(4)]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# A stream that is not cancelled must end by itself: its requests are short.
SHORT: dict[str, Any] = {"max_output_tokens": 3}
# From grpc.aio: a message was not written because the call had ended.
WRITE_FAILED = "Internal error from Core"
BURST_SIZES, BURST_MESSAGES = (1, 20, 200), 4
FILES_SLACK = 20  # connections of pools and of the client that stay open for some time

KINDS = ["none", *(field.name for field in pb.ClientFrame.DESCRIPTOR.oneofs_by_name["kind"].fields)]


def any_frame(kind: str, request_id: str, number: int, fields: dict[str, Any]) -> pb.ClientFrame:
    """Return a frame of a kind with this number in each numeric field. fields: of a start."""
    match kind:
        case "start":
            return start(request_id, **(SHORT | fields))
        case "cancel":
            return cancel(request_id)
        case "none":
            return pb.ClientFrame(request_id=request_id)
    frame = pb.ClientFrame(request_id=request_id)
    content = getattr(frame, kind)
    content.SetInParent()
    for field in content.DESCRIPTOR.fields:
        if number and field.cpp_type == field.CPPTYPE_INT64:
            setattr(content, field.name, number)
    return frame


def damaged(message: bytes, number: int) -> bytes:
    """Return the message with some bytes changed, cut off or repeated."""
    chance = random.Random(number)
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


numbers = st.sampled_from([0, 0, 1, 3, -1, 2**31, -(2**63), 2**63 - 1])
names = st.sampled_from([MODEL, f"{MODEL}\0", "\0", "x" * 300, "ｔｉｎｙ", "\u200b"])
# Ordinary starts, but short: each admitted one must reach its end.
start_fields = st.builds(
    lambda model, rest: (
        {"model": model}
        | {
            name: value
            for name, value in rest.items()
            if name not in ("max_output_tokens", "model")
        }
    ),
    names,
    good | any_start,
)
frames = st.builds(
    any_frame,
    st.sampled_from(KINDS),
    st.sampled_from([*IDS, "", "no id", "\0"]),
    numbers,
    st.just({}) | start_fields,
)
messages = st.builds(
    lambda some: pb.GenerateRequest(frames=some).SerializeToString(), st.lists(frames, max_size=5)
)
bodies = st.one_of(
    messages, st.builds(damaged, messages, st.integers(0, 2**32)), st.binary(max_size=300)
)
keys = st.sampled_from(
    [
        "authorization",
        "grpc-timeout",
        "x",
        "x-bin",
        "te",
        "grpc-encoding",
        "traceparent",
        "content-type",
        "a.b_c-d",
    ]
)
values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40) | st.sampled_from(
    ["Bearer", "Bearer ", "1n", "gzip"]
)
metadata = st.lists(st.tuples(keys, values), max_size=4)
attacks = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from(PATHS), st.binary(max_size=200)),
    st.tuples(st.just("stream"), st.lists(bodies, max_size=5), st.booleans()),
    st.tuples(
        st.just("burst"),
        st.lists(frames, min_size=1, max_size=8),
        st.integers(0, 2**32),
        st.booleans(),
    ),
    st.tuples(st.just("metadata"), st.sampled_from(PATHS), metadata),
    st.tuples(st.just("connection"), st.booleans(), st.binary(max_size=400)),
)


def burst(some: Sequence[pb.ClientFrame], number: int) -> list[bytes]:
    """Draw messages of many frames, some few kinds in any order, for known and new requests."""
    chance = random.Random(number)
    size = chance.choice(BURST_SIZES)
    return [
        pb.GenerateRequest(
            frames=[renamed(chance.choice(some), chance) for _ in range(size)]
        ).SerializeToString()
        for _ in range(chance.randint(1, BURST_MESSAGES))
    ]


def renamed(frame: pb.ClientFrame, chance: random.Random) -> pb.ClientFrame:
    """Return the frame, sometimes for an unknown request."""
    if chance.random() < 0.5:
        return frame
    other = pb.ClientFrame()
    other.CopyFrom(frame)
    other.request_id = str(uuid.UUID(int=chance.getrandbits(128), version=4))
    return other


def count_frames(message: bytes) -> int:
    """Return the number of frames of a message; 1 if it cannot be parsed."""
    try:
        return len(pb.GenerateRequest.FromString(message).frames)
    except DecodeError:
        return 1


class Attacker:
    """Attacks on a service in this process, with checks of their ends."""

    def __init__(self, service: Service, tenant: Tenant, channel: grpc.aio.Channel) -> None:
        self.service = service
        self.tenant = tenant
        self.channel = channel
        self.codes: Counter[grpc.StatusCode] = Counter()
        self.frame_count = 0

    async def attack(self, kind: str, *details: Any) -> None:
        """Make one attack."""
        async with asyncio.timeout(PATIENCE_S):
            match kind:
                case "unary":
                    await self.call(details[0], [details[1]], bearer(self.tenant.secret))
                case "stream":
                    await self.call(
                        GENERATE, details[0], bearer(self.tenant.secret), hang_up=details[1]
                    )
                case "burst":
                    await self.call(
                        GENERATE,
                        burst(*details[:2]),
                        bearer(self.tenant.secret),
                        hang_up=details[2],
                    )
                case "metadata":
                    await self.call(
                        details[0],
                        [b""],
                        [(key, as_metadata(key, value)) for key, value in details[1]],
                    )
                case _:
                    await self.connect(*details)

    async def call(
        self,
        path: str,
        sent: Sequence[bytes],
        given_metadata: Sequence[tuple[str, Any]],
        *,
        hang_up: bool = False,
    ) -> None:
        """Send raw messages to any call as if it streamed in both directions, as on the wire."""
        opening: Any = self.channel.stream_stream(path)
        try:
            opened = opening(metadata=given_metadata, timeout=PATIENCE_S)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for message in sent:
                    if path == GENERATE:
                        self.frame_count += count_frames(message)
                    await opened.write(message)
                if hang_up:
                    opened.cancel()
                await opened.done_writing()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                async for _ in opened:
                    if path.endswith("/Watch"):  # it never ends
                        opened.cancel()
            self.judge(await opened.code(), await opened.details(), path)
        except ValueError:
            return  # the client's library would not send it

    def judge(self, code: grpc.StatusCode, details: str, path: str) -> None:
        """Check that the status blames the client."""
        self.codes[code] += 1
        assert code is not grpc.StatusCode.INTERNAL or details == WRITE_FAILED, (path, details)
        assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS), (path, details)
        assert "incident" not in details, (path, details)

    async def connect(self, with_preface: bool, content: bytes) -> None:
        """Send bytes on a connection that is not a call."""
        host, _, port = self.service.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            writer.write((PREFACE if with_preface else b"") + content)
            writer.write_eof()
            while await reader.read(65_536):
                pass
        writer.close()


def as_metadata(key: str, value: str) -> str | bytes:
    """Return the value in the type that gRPC requires for this key."""
    return value.encode() if key.endswith("-bin") else value


class Watcher:
    """Administrator who lists live requests without a pause."""

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        self._admin = admin_pb_grpc.AdminServiceStub(channel)
        self._secret = secret
        self.poll_count = 0
        self.seen_count = 0

    async def watch(self) -> None:
        """List until cancelled. Each call must be answered."""
        while True:
            request = live_pb.ListLiveRequestsRequest()
            answer = await self._admin.ListLiveRequests(
                request, metadata=bearer(self._secret), timeout=PATIENCE_S
            )
            self.poll_count += 1
            self.seen_count += len(answer.requests)


def open_files() -> Counter[str]:
    """Return the number of open files of this process, which is also the server's, by kind."""
    kinds = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the directory itself
            kinds[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
    return kinds


@pytest.mark.timeout(300 + FRAMES / FRAMES_PER_S_MIN)
async def test_any_bytes_get_a_status_and_leave_nothing(
    tmp_path: Path, model: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(tmp_path, database_url, model)
    if FRAMES:  # of one key, which the pace would admit over hours; the short run is paced
        monkeypatch.setattr(RateLimiter, "wait_s", lambda *_: 0.0)
    with capture_logs() as logs:
        async with run_inside(service, monkeypatch) as inside, service.channel() as channel:
            tenant = await service.tenant(
                {QuotaDimension.CONCURRENT_REQUESTS: 3}, scopes=("inference", "billing", "admin")
            )
            attacker = Attacker(service, tenant, channel)
            watcher = Watcher(channel, (await service.tenant(scopes=("admin",))).secret)
            await attacker.attack(
                "stream", [pb.GenerateRequest(frames=[start(**SHORT)]).SerializeToString()], False
            )
            assert set(attacker.codes) == {grpc.StatusCode.OK}, "the attacker is heard"
            before, files_before = len(asyncio.all_tasks()), open_files()
            logs.clear()  # the test database is not durable, which the server logs at start

            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(watcher.watch())
                for path in PATHS:  # each at least once, whatever the search chooses
                    await attacker.attack("unary", path, b"")
                    await attacker.attack("unary", path, b"\xff\xff")
                loop = asyncio.get_running_loop()
                await asyncio.to_thread(search, loop, attacker)
                for number in itertools.takewhile(
                    lambda _: attacker.frame_count < FRAMES, itertools.count()
                ):
                    await asyncio.to_thread(search, loop, attacker, number)
                    logs[:] = errors(logs)  # the rest would fill the memory
                watching.cancel()

            await still_serves(inside, tenant)
            await inside.check_empty()
            await until(lambda: len(asyncio.all_tasks()) <= before, "the tasks of streams to end")
            await until(
                lambda: open_files().total() <= files_before.total() + FILES_SLACK,
                "file descriptors to be closed",
            )
    assert {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.CANCELLED,
    } <= set(attacker.codes)
    assert watcher.poll_count
    assert errors(logs) == []
    assert service.database.held_hold_count() == 0
    if FRAMES:
        codes = ", ".join(f"{code.name} {count:,}" for code, count in attacker.codes.most_common())
        print(f"\n{attacker.frame_count:,} frames; calls by status: {codes}")
        print(
            f"{watcher.poll_count:,} lists of live requests with {watcher.seen_count:,} requests in"
            " them"
        )


def errors(logs: Sequence[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    """Return the log lines of errors in the server."""
    return [line for line in logs if line["log_level"] in ("error", "critical")]


def search(loop: asyncio.AbstractEventLoop, attacker: Attacker, number: int | None = None) -> None:
    """Search for a successful attack, in a thread, since the server runs in the loop."""

    @settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(some=st.lists(attacks, min_size=1, max_size=3))
    def attack(some: list[tuple[Any, ...]]) -> None:
        async def all_at_once() -> None:
            async with asyncio.TaskGroup() as tasks:
                for each in some:
                    tasks.create_task(attacker.attack(*each))

        asyncio.run_coroutine_threadsafe(all_at_once(), loop).result()

    (attack if number is None else seed(number)(attack))()


async def still_serves(inside: Inside, tenant: Tenant) -> None:
    """Check that a request of another tenant gets all its tokens."""
    async with inside.service.stream(tenant.secret) as stream:
        finished = await stream.finished(await stream.begin())
    assert finished.usage.delivered_token_count == 20
