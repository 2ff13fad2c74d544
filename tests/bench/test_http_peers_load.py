"""Load generator and upstream of `bench.http_peers`."""

from __future__ import annotations

import asyncio
import urllib.request
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from bench.http_peers_load import Client, Load, Upstream

STEP_S = 0.002


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    """Yield the port of an upstream."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(STEP_S, 9), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def load(port: int, **more: Any) -> Load:
    given: dict[str, Any] = {"mode": "rate", "connection_count": 3, "output_tokens": 5}
    given |= {"warm_up_s": 0.05, "seconds": 0.2}
    return Load([port], {"authorization": "Bearer x"}, {}, prompt="a b c", **given | more)


@pytest.mark.parametrize("streams", [False, True])
async def test_whole_and_streamed_answers_are_complete_and_timed(port: int, streams: bool) -> None:
    seen = await Client(load(port, streams=streams)).run()

    assert not seen.failures
    assert 0 < seen.request_count <= len(seen.delivered)
    assert set(seen.statuses) == {200}
    first_ms = STEP_S * 1000 * (1 if streams else 5)
    assert min(seen.ttft_ms) >= first_ms * 0.9, "an answer takes a step per token"


async def test_a_burst_is_one_request_on_each_connection(port: int) -> None:
    seen = await Client(load(port, mode="burst", connection_count=20)).run()

    assert seen.statuses == {200: 20}
    assert len(set(seen.delivered)) == 20


async def test_an_answer_of_wrong_length_fails(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Upstream._chat
    monkeypatch.setattr(
        Upstream, "_chat", lambda self, requested: serve(self, {**requested, "max_tokens": 4})
    )

    seen = await Client(load(port)).run()

    assert seen.failures[0].startswith("not 5 tokens")


async def test_the_upstream_lists_its_records(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Upstream, "record_ids", set())
    call_id = str(uuid.uuid4())
    url = f"http://127.0.0.1:{port}/records"
    body = f'[{{"litellm_call_id": "{call_id}", "id": "x"}}]'.encode()

    def exchange() -> bytes:
        urllib.request.urlopen(url, body).close()
        with urllib.request.urlopen(url) as answer:
            return bytes(answer.read())

    assert await asyncio.to_thread(exchange) == f'["{call_id}"]'.encode()


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
async def test_the_upstream_reads_a_chunked_body_in_any_pieces(port: int, piece_bytes: int) -> None:
    """Gateways that pass requests on stream the body."""
    body = b'{"messages": [{"content": "a b"}], "max_tokens": 2}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    data = head + b"%x\r\n%s\r\n" % (20, body[:20])
    data += b"%X\r\n%s\r\n0\r\n\r\n" % (len(body) - 20, body[20:])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    for _ in range(2):  # the second request begins where the first one ended
        for start in range(0, len(data), piece_bytes):
            writer.write(data[start : start + piece_bytes])
            await writer.drain()
        answer = await reader.readuntil(b'"cached_tokens": 0}}}')

        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b'"prompt_tokens": 2' in answer
    writer.close()
