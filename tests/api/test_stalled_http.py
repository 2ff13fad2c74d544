"""Clients of the OpenAI HTTP API that do not read: each stalls only itself and is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from api.core.settings import Settings
from api.generation.request.live_request import LiveRequest
from api.openai import listener as listener_module
from api.openai.gateway import Gateway
from api.openai.listener import Connection, HttpServer, Listener
from metering.store.db import Sessions
from metering.tenants.api_keys import create_api_key
from tests.api.openai_bodies import user
from tests.api.small_process import SmallProcess
from tests.inference.checkpoints import LlamaShape, make_checkpoint
from tests.metering.hold_world import HoldWorld
from tests.service import PATIENCE_S, until

CHATS = 200
# Per client; the first tokens fill buffers that every connection has.
TOKENS_AT_FIRST, TOKENS_THEN = 150, 450
# bytes of buffered output per token; for gRPC, see `test_stalled_memory.py`
BYTES_PER_TOKEN_MAX = 100
QUEUED_TOKENS = 500
LITTLE = 4096  # unread bytes that either side's kernel buffers

MESSAGES = [{"role": "user", "content": "Go"}]
STREAMS: dict[str, dict[str, object]] = {
    "/chat/completions": {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True},
    "/completions": {"prompt": "Go", "max_tokens": 400, "ignore_eos": True},
    "/responses": {"input": "Go", "max_output_tokens": 400, "ignore_eos": True},
    "/messages": {"messages": MESSAGES, "max_tokens": 400},  # answers of random length
}
# Tokens that wait go into one event. Without log-probabilities, which `/messages` does not have, it
# would fit into the buffers of transport and kernel.
WIDE: dict[str, dict[str, object]] = {
    "/chat/completions": {"logprobs": True, "top_logprobs": 20},
    "/completions": {"logprobs": 5},
    "/responses": {"include": ["message.output_text.logprobs"], "top_logprobs": 20},
}


class World:
    """Process with an HTTP listener, and the connections to it."""

    def __init__(self, small: SmallProcess, database: HoldWorld, port: int, secret: str) -> None:
        self.small = small
        self.database = database
        self.port = port
        self.secret = secret
        self.sockets: list[socket.socket] = []

    @property
    def requests(self) -> list[LiveRequest]:
        """Running requests."""
        return [each for each in self.small.process.running() if isinstance(each, LiveRequest)]

    async def ask(self, path: str = "/chat/completions", **fields: object) -> socket.socket:
        """Start another request whose client reads nothing, by default a chat."""
        chat = {"messages": [user("Go")], "max_tokens": 1500, "ignore_eos": True}
        body = json.dumps({"model": "demo", "stream": True} | (fields or chat)).encode()
        head = f"POST /v1{path} HTTP/1.1\r\nhost: weir\r\nauthorization: Bearer {self.secret}\r\n"
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LITTLE)
        connection.setblocking(False)
        self.sockets.append(connection)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", self.port))
        head += f"content-length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(connection, head.encode() + body)
        return connection

    def last_event(self) -> tuple[str, int]:
        """Return the end, and the delivered tokens, of the latest request."""
        [(outcome, count)] = self.database.rows(
            "SELECT outcome, delivered_token_count FROM usage_events ORDER BY id DESC LIMIT 1"
        )
        return outcome, count

    async def generated(self, token_count: int) -> None:
        """Run the engine until it has generated this many tokens in total, and let them settle."""
        engine = self.small.engine
        engine.pause_after(token_count - engine.token_count)
        engine.gate.set()
        async with asyncio.timeout(PATIENCE_S):
            await engine.paused.wait()
        await until(
            lambda: (
                sum(request.output.appended_token_count for request in self.requests) >= token_count
            ),
            "the tokens",
        )


@pytest.fixture
async def world(
    tmp_path: Path,
    database_url: str,
    sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> AsyncIterator[World]:
    """Yield a process with the settings that the test gives as a parameter."""
    monkeypatch.setattr(listener_module, "SEND_BUFFER_BYTES", LITTLE)
    settings = Settings.of(
        database_url=database_url,
        home=tmp_path,
        lease_slice_tokens=2000,
        outbox_tokens_per_request_max=QUEUED_TOKENS,
        **getattr(request, "param", {}),
    )
    checkpoint = make_checkpoint(tmp_path / "checkpoint", shape=LlamaShape())
    with HoldWorld(database_url, now=None) as database:
        database.tenant()
        async with sessions.begin() as session:
            _, secret = await create_api_key(
                session, organization="acme", project="search", name="key", actor="test"
            )
        async with asyncio.TaskGroup() as tasks:
            small = SmallProcess(settings, checkpoint, sessions, tasks, batch_size=CHATS)
            await small.engine.start()
            listener = Listener(
                Gateway(small.process, small.authenticator, sessions).handle, settings, None
            )
            world = World(small, database, listener.bind(("127.0.0.1", 0)), secret)
            await listener.start()
            yield world
            small.engine.gate.set()
            for each in world.sockets:
                each.close()
            await until(lambda: not small.process.running(), "all to end")
            await listener.stop()
            await small.close()


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells memory by Linux's /proc")
async def test_two_hundred_stalled_chats_keep_memory_flat(world: World) -> None:
    world.small.engine.gate.clear()
    for _ in range(CHATS):
        await world.ask()
    await until(lambda: len(world.requests) == CHATS, "all chats to be there")

    await world.generated(CHATS * TOKENS_AT_FIRST)
    before = resident_bytes()
    await world.generated(CHATS * TOKENS_THEN)
    grown = resident_bytes() - before
    requests = world.requests
    delivered = [request.usage.delivered_token_count for request in requests]
    waiting = [request.output.in_flight_token_count for request in requests]

    assert grown / (CHATS * (TOKENS_THEN - TOKENS_AT_FIRST)) < BYTES_PER_TOKEN_MAX
    assert len(requests) == CHATS, "nobody has gone beyond the bound yet"
    assert max(delivered) < TOKENS_AT_FIRST, "what nobody reads is not delivered"
    world.small.engine.gate.set()
    await until(lambda: not world.small.process.running(), "all to be given up")
    rows = world.database.rows(
        "SELECT outcome, count(*), sum(delivered_token_count)::int FROM usage_events GROUP BY"
        " outcome"
    )
    billed = sum(delivered) + sum(waiting)  # a message that waits in the transport is billed
    assert rows == [("slow_consumer", CHATS, billed)]


async def sipped(connection: socket.socket) -> bytes:
    """Read a few bytes every few milliseconds, until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := await asyncio.get_running_loop().sock_recv(connection, 64):
            data += piece
            if data.endswith(b"\r\n0\r\n\r\n"):
                break
            await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=0.005)
    return data


@pytest.mark.parametrize("path", WIDE)
@pytest.mark.parametrize(
    "world",
    [{"client_stall_max_s": 0.3, "client_tokens_per_second_min": 1000.0}],
    indirect=True,
    ids=["200 kB per second"],
)
async def test_a_stream_read_too_slowly_ends_with_its_reason(world: World, path: str) -> None:
    """Every sip is a sign of life, and none restarts the time."""
    outcome = ""
    while outcome in ("", "stop"):  # a short answer fits into the buffers of the kernel
        with capture_logs() as logs:
            received = await sipped(await world.ask(path, **STREAMS[path] | WIDE[path]))
            await until(lambda: not world.small.process.running(), "its end")
        await until(lambda: not world.small.left_over(), "its slot to be free")
        outcome, count = world.last_event()

    assert b"data: " in received
    assert outcome == "slow_consumer"
    assert count < 400
    [stalled] = [entry for entry in logs if entry["event"] == "http_client_stalled"]
    assert "WEIR_CLIENT_TOKENS_PER_SECOND_MIN" in stalled["detail"]


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_read_above_the_least_rate_is_whole(world: World, path: str) -> None:
    received = await sipped(await world.ask(path, **STREAMS[path]))
    await until(lambda: not world.small.process.running(), "its end")

    outcome, count = world.last_event()
    assert count == 400 if outcome == "length" else outcome == "stop"
    assert received.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    "unsent", [[400_000, 300_000, 300_000, 200_000, 200_000, 190_000], [20_000, 20_000]]
)
async def test_a_slow_client_has_time_while_it_reads(unsent: list[int]) -> None:
    """A single response may be large: progress at the least rate counts, not its end."""

    class Slow(asyncio.Transport):
        def get_write_buffer_size(self) -> int:
            return unsent.pop(0)

    async def nothing(request: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError("nobody asks")

    connection = Connection(
        HttpServer(nothing, Settings(), bool),
        stall_max_s=0.001,
        tokens_per_s_min=100_000.0,  # 20,000 bytes in each millisecond
        loop=asyncio.get_running_loop(),
    )
    connection.transport = Slow()
    connection._writable.clear()

    with pytest.raises(TimeoutError):
        await connection.drained()

    assert not unsent


@pytest.mark.parametrize("path", WIDE)
async def test_a_pause_in_a_stream_is_the_clients_stall(world: World, path: str) -> None:
    """The engine finishes meanwhile, so no gap between tokens includes the pause."""
    connection = await world.ask(path, **STREAMS[path] | WIDE[path] | {"temperature": 0})

    await until(lambda: any(each.output.stalled_s > 1.0 for each in world.requests), "the stall")
    loop, data = asyncio.get_running_loop(), b""
    while piece := await loop.sock_recv(connection, 65536):
        data += piece
        if data.endswith(b"0\r\n\r\n"):
            break

    [(timings,)] = world.database.rows("SELECT timings FROM usage_events")
    assert timings["client_stall_ms"] > 1000.0
    assert timings["itl_max_ms"] < timings["client_stall_ms"] < timings["total_ms"]
    assert f'"client_stall_ms":{timings["client_stall_ms"]:.3f}'.rstrip("0").encode() in data
