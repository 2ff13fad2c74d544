"""Memory of refused requests: their text is freed at once.

A reference cycle lives until a garbage collection, which depends on the number of objects and not
on their size.
"""

from __future__ import annotations

import asyncio
import gc
import io
import json
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from weir.v1 import inference_service_pb2 as pb

from tests.service import MODEL, Inside, Service, bearer, run_inside, start, until

TEXT = "hotel " * 500_000
REQUESTS = 5
# Of all requests together: a closing connection may keep the last one.
KEPT_BYTES_MAX = len(TEXT) * 3 // 2
SERVICE = "/weir.v1.InferenceService"

COUNT = pb.CountTokensRequest(model=MODEL, text=TEXT).SerializeToString()
QUOTE = pb.QuoteRequest(start=pb.StartFrame(model=MODEL, text=TEXT)).SerializeToString()
EMBED = pb.EmbedRequest(
    model=MODEL, request_id=start().request_id, inputs=[pb.EmbedInput(text=TEXT)]
).SerializeToString()
CALLS = {"CountTokens": COUNT, "Quote": QUOTE, "Embed": EMBED}
CONCURRENT_CALLS = 16
RECEIVED = (pb.CountTokensRequest, pb.QuoteRequest, pb.EmbedRequest, pb.GenerateRequest)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disable garbage collection, so that reference cycles remain."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def refuse_by_call(name: str, message: bytes, inside: Inside, secret: str) -> None:
    """Send a unary call."""
    async with inside.service.channel() as channel:
        call: Any = channel.unary_unary(f"{SERVICE}/{name}")
        for _ in range(REQUESTS):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(message, metadata=bearer(secret))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def refuse_on_stream(frame: pb.ClientFrame, inside: Inside, secret: str) -> None:
    """Send a request on a stream."""
    async with inside.service.stream(secret) as stream:
        for _ in range(REQUESTS):
            frame.request_id = start().request_id
            await stream.send(frame)
            await stream.failed(frame.request_id)


async def refuse_over_http(path: str, body: bytes, inside: Inside, secret: str) -> None:
    """Send an HTTP request as OpenAI's clients do."""
    async with aiohttp.ClientSession(headers=dict(bearer(secret))) as session:
        for _ in range(REQUESTS):
            status = HTTPStatus.TOO_MANY_REQUESTS
            # On a slow machine this much text has to wait for its turn.
            while status == HTTPStatus.TOO_MANY_REQUESTS:
                async with session.post(
                    f"{inside.service.openai_url}{path}", data=io.BytesIO(body)
                ) as answer:
                    status, text = HTTPStatus(answer.status), await answer.text()
                if status == HTTPStatus.TOO_MANY_REQUESTS:
                    await asyncio.sleep(float(answer.headers["retry-after"]))
            assert status == HTTPStatus.BAD_REQUEST, text


Refuse = Callable[[Inside, str], Awaitable[None]]
WAYS: dict[str, Refuse] = {
    "CountTokens": lambda *to: refuse_by_call("CountTokens", COUNT, *to),
    "Quote": lambda *to: refuse_by_call("Quote", QUOTE, *to),
    "Embed": lambda *to: refuse_by_call("Embed", EMBED, *to),
    "Generate": lambda *to: refuse_on_stream(start(text=TEXT), *to),
    "/completions": lambda *to: refuse_over_http(
        "/completions", json.dumps({"model": MODEL, "prompt": TEXT}).encode(), *to
    ),
    "/chat/completions": lambda *to: refuse_over_http(
        "/chat/completions",
        json.dumps({"model": MODEL, "messages": [{"role": "user", "content": TEXT}]}).encode(),
        *to,
    ),
    "/responses": lambda *to: refuse_over_http(
        "/responses", json.dumps({"model": MODEL, "input": TEXT}).encode(), *to
    ),
    "/embeddings": lambda *to: refuse_over_http(
        "/embeddings", json.dumps({"model": MODEL, "input": TEXT}).encode(), *to
    ),
}


async def test_text_that_is_refused_is_not_kept(
    tmp_path: Path,
    model: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    no_collection: None,
) -> None:
    service = Service(tmp_path, database_url, model)
    async with run_inside(service, monkeypatch) as inside:
        kept: dict[str, int] = {}
        for name, refuse in WAYS.items():
            tenant = await service.tenant()  # this much refused text of one key would have to wait
            await refuse(inside, tenant.secret)  # caches are filled before the measurement
            gc.collect()
            tracemalloc.start()
            await refuse(inside, tenant.secret)
            # The server's side of a connection may still have its request when the client has the
            # answer.
            for _ in range(100):
                await asyncio.sleep(0.01)
                kept[name], _ = tracemalloc.get_traced_memory()
                if kept[name] <= KEPT_BYTES_MAX:
                    break
            tracemalloc.stop()
    assert {name: size for name, size in kept.items() if size > KEPT_BYTES_MAX} == {}


def received() -> list[Any]:
    """Return all live messages. Their text is outside of Python's memory and `tracemalloc`."""
    return [each for each in gc.get_objects() if isinstance(each, RECEIVED)]


async def test_concurrent_calls_that_are_refused_keep_no_message(
    tmp_path: Path,
    model: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    no_collection: None,
) -> None:
    service = Service(tmp_path, database_url, model)
    async with run_inside(service, monkeypatch) as inside:
        tenant = await service.tenant()

        async def refuse_each() -> None:
            async with inside.service.channel() as channel:
                for name, message in CALLS.items():
                    call: Any = channel.unary_unary(f"{SERVICE}/{name}")
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call(message, metadata=bearer(tenant.secret))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONCURRENT_CALLS):
                tasks.create_task(refuse_each())

        await until(lambda: not received(), "the messages to be freed")


async def test_a_stream_keeps_no_message_that_it_has_read(
    tmp_path: Path,
    model: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    no_collection: None,
) -> None:
    refused = pb.GenerateRequest(frames=[start(text=TEXT)]).SerializeToString()
    ending = pb.GenerateRequest(frames=[start(text=TEXT), pb.ClientFrame()]).SerializeToString()
    service = Service(tmp_path, database_url, model)
    async with run_inside(service, monkeypatch) as inside:
        tenant = await service.tenant()
        async with inside.service.channel() as channel:
            # Without serializers: the client makes no messages.
            generate: Any = channel.stream_stream(f"{SERVICE}/Generate")
            stream = generate(metadata=bearer(tenant.secret))
            await stream.write(refused)
            assert pb.GenerateResponse.FromString(await stream.read()).frames[0].HasField("failed")
            await until(lambda: not received(), "an open stream to free the message")

            await stream.write(ending)
            assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
            await until(lambda: not received(), "a stream that ended to free the message")
