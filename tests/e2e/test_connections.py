"""Connections under proxies, balancers and clients that half-close: what keeps them, and its end.

The server runs in this process, and breaks silence after a tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import Draining
from api.generation.delivery import stream_writer as writer
from metering.core.models import Outcome
from tests.e2e.inside import inside_fixtures
from tests.e2e.openai_clients import TO_THE_END, user_message
from tests.e2e.test_openai_bad_input import Socket, dial, post
from tests.e2e.test_openai_ends import the_event, the_one_running
from tests.forked_workers import children_of
from tests.service import MODEL, PATIENCE_S, Inside, Service, Tenant, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Path, and the body that asks for a number of tokens.
CHAT = ("/v1/chat/completions", {"messages": user_message("Go")})
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": CHAT,
    "completions": ("/v1/completions", {"prompt": "Go"}),
    "responses": ("/v1/responses", {"input": "Go"}),
    "messages": ("/v1/messages", {"messages": user_message("Go")}),
}
PINGS = {"messages": b'event: ping\ndata: {"type":"ping"}\n\n'}
ENDS = {"responses": b'"usage":{"input_tokens"', "messages": b"message_stop"}


inside, service, _ = inside_fixtures(
    patch=lambda monkeypatch: monkeypatch.setattr(writer, "SILENCE_S", 0.1),
    http_padding_after_s=0.2,
)


@contextlib.contextmanager
def stopped_engine() -> Iterator[None]:
    """Stop the worker process of the engine."""
    workers = children_of(os.getpid(), "inference.adapters.torch_worker")
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)


def requested(secret: str, api: str, *headers: str, token_count: int = 5, **fields: Any) -> bytes:
    path, body = APIS[api]
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    whole = {"model": MODEL, limit: token_count} | body | fields
    return post(secret, json.dumps(whole).encode(), *headers, path=path)


async def read_until(line: Socket, found: bytes, count: int = 1) -> bytes:
    """Read until something has come this many times."""
    data = b""
    async with asyncio.timeout(PATIENCE_S):
        while data.count(found) < count:
            more = await line.reader.read(65_536)
            assert more, data
            data += more
    return data


def body_of(data: bytes) -> bytes:
    """Return the body of a response. Raises: AssertionError if its end is missing."""
    head, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    if b"chunked" not in head.lower():
        assert b"content-length: %d\r\n" % len(rest) in head.lower()
        return rest
    while True:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            assert rest == b"\r\n"
            return body
        body, rest = body + rest[:count], rest[count + 2 :]


@pytest.mark.parametrize("api", APIS)
async def test_a_stream_sends_while_its_engine_is_stopped(service: Service, api: str) -> None:
    tenant = await service.tenant()
    ping = PINGS.get(api, b": waiting\n\n")
    line = await dial(service)

    with stopped_engine():
        await line.append(requested(tenant.secret, api, "connection: close", stream=True))
        before = await read_until(line, ping, 3)
    whole = before + await line.ended()

    assert before.startswith(b"HTTP/1.1 200 ")
    assert ENDS.get(api, b"[DONE]") in body_of(whole)
    line.writer.close()


async def test_a_stream_sends_between_two_tokens(inside: Inside, service: Service) -> None:
    """The kind that no queue explains: text held back, long steps, a replica that restarts."""
    tenant = await service.tenant()
    line = await dial(service)

    await line.append(requested(tenant.secret, "chat", stream=True, token_count=400, **TO_THE_END))
    await the_one_running(inside, 3)
    with stopped_engine():
        await read_until(line, b": waiting\n\n", 3)
    await read_until(line, b"[DONE]")

    assert (await the_event(service, tenant))["delivered_token_count"] == 400
    line.writer.close()


async def test_grpc_sends_progress_between_two_tokens(inside: Inside, service: Service) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=400)
        await stream.received(request_id, 3)
        with stopped_engine():
            await stream.wait(lambda: len(stream.of(request_id, "progress")) > 2)
        finished = await stream.finished(request_id)

    assert stream.of(request_id, "progress")[-1].stage == pb.ProgressFrame.STAGE_RUNNING
    assert finished.usage.delivered_token_count == 400


@pytest.mark.parametrize("api", APIS)
async def test_a_whole_answer_is_padded_with_blanks(service: Service, api: str) -> None:
    tenant = await service.tenant()
    line = await dial(service)

    with stopped_engine():
        await line.append(requested(tenant.secret, api, "connection: close"))
        before = await read_until(line, b"1\r\n \r\n", 3)
    body = body_of(before + await line.ended())

    assert body.startswith(b"   ")
    assert json.loads(body)["usage"]
    line.writer.close()


async def test_an_answer_failed_after_padding_has_no_end(inside: Inside, service: Service) -> None:
    """The status was sent: HTTP clients report a lost connection, and retry."""
    tenant = await service.tenant()
    line = await dial(service)

    await line.append(requested(tenant.secret, "chat", token_count=3000, **TO_THE_END))
    before = await read_until(line, b"1\r\n \r\n", 1)
    inside.process.fail_all(Draining("to be served elsewhere"))
    data = before + await line.ended()

    assert b'"code":"draining"' in data
    assert not data.endswith(b"0\r\n\r\n")
    assert service.database.events(tenant) == []
    line.writer.close()


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("api", APIS)
async def test_a_half_close_gets_the_whole_answer(
    service: Service, tenant: Tenant, api: str, streams: bool
) -> None:
    line = await dial(service)

    await line.append(requested(tenant.secret, api, stream=streams, token_count=50))
    line.writer.write_eof()
    body = body_of(await line.ended())

    if streams:
        assert ENDS.get(api, b"[DONE]") in body
    else:
        assert json.loads(body)["usage"]
    assert (await the_event(service, tenant))["outcome"] in ("stop", "length")
    line.writer.close()


async def test_every_pipelined_request_before_a_half_close_is_answered(service: Service) -> None:
    tenant = await service.tenant()
    line = await dial(service)

    await line.append(requested(tenant.secret, "chat") * 3)
    line.writer.write_eof()
    data = await line.ended()

    assert data.count(b"HTTP/1.1 200 ") == 3
    assert data.lower().count(b"connection: close") == 1
    assert data.lower().index(b"connection: close") > data.lower().rindex(b"http/1.1 200 ")
    line.writer.close()


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("half_closes", [True, False])
async def test_a_client_that_is_gone_is_noticed_whether_it_half_closed_or_not(
    inside: Inside, service: Service, tenant: Tenant, streams: bool, half_closes: bool
) -> None:
    """Even while the engine gives no token that could not be sent."""
    line = await dial(service)

    await line.append(
        requested(tenant.secret, "chat", stream=streams, token_count=3000, **TO_THE_END)
    )
    running = await the_one_running(inside, 3)
    if half_closes:
        line.writer.write_eof()
    with stopped_engine():
        line.writer.close()
        await until(lambda: running.decision.end is not None, "the cancellation")
    event = await the_event(service, tenant)

    assert running.decision.end is not None
    assert running.decision.end.outcome is Outcome.CANCELLED
    assert event["delivered_token_count"] < 3000
    assert streams or event["delivered_token_count"] == 0


async def test_tracing_headers_come_back_and_do_not_identify_a_request(service: Service) -> None:
    tenant = await service.tenant()
    trace = {
        "x-request-id": str(uuid.uuid4()),
        "x-correlation-id": "order-66",
        "x-amzn-trace-id": "Root=1-67891233-abcdef012345678912345678",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    }
    headers = [f"{name}: {value}" for name, value in trace.items()]

    async def send(content: str) -> tuple[int, dict[str, str]]:
        line = await dial(service)
        await line.append(
            requested(tenant.secret, "chat", *headers, messages=user_message(content))
        )
        response = await line.response()
        line.writer.close()
        return response.status, dict(response.headers)

    one_by_one = [await send(content) for content in "ABA"]
    at_once = await asyncio.gather(*map(send, "ABA"))

    assert [status for status, _ in [*one_by_one, *at_once]] == [200] * 6
    assert all(trace.items() <= found.items() for _, found in [*one_by_one, *at_once])
    events = service.database.events(tenant)
    assert len(events) == 6
    assert {str(each["request_id"]) for each in events} == {
        found["weir-request-id"] for _, found in [*one_by_one, *at_once]
    }


async def test_a_tracing_header_that_cannot_be_sent_back_is_left_out(service: Service) -> None:
    line = await dial(service)

    await line.append(
        b"GET /v1/models HTTP/1.1\r\nhost: weir\r\nx-request-id: caf\xc3\xa9\r\n"
        b"x-correlation-id: " + b"a" * 300 + b"\r\n\r\n"
    )
    response = await line.response()

    assert response.status == 401
    assert response.headers["x-request-id"] == response.headers["weir-request-id"]
    assert "x-correlation-id" not in response.headers
    assert response.headers["keep-alive"] == "timeout=75"
    line.writer.close()


async def test_a_draining_server_closes_after_its_answer(inside: Inside, service: Service) -> None:
    tenant = await service.tenant()
    line = await dial(service)
    models = f"GET /v1/models HTTP/1.1\r\nhost: weir\r\nx-api-key: {tenant.secret}\r\n\r\n".encode()

    await line.append(models)
    before = await line.response()
    inside.capacity.is_draining = True
    try:
        await line.append(models)
        last = await line.response()
        rest = await line.ended()
    finally:
        inside.capacity.is_draining = False

    assert (before.status, before.headers.get("connection")) == (200, None)
    assert (last.status, last.headers["connection"], rest) == (200, "close", b"")
    line.writer.close()


@pytest.mark.parametrize(
    ("version", "headers", "persists", "continues"),
    [
        ("1.1", (), True, False),
        ("1.1", ("Connection: close",), False, False),
        ("1.1", ("Expect: 100-continue",), True, True),
        ("1.0", (), False, False),
        ("1.0", ("Connection: keep-alive",), True, False),
        ("1.0", ("Expect: 100-continue",), False, False),
    ],
)
async def test_connections_persist_and_continue_as_http_says(
    service: Service,
    tenant: Tenant,
    version: str,
    headers: tuple[str, ...],
    persists: bool,
    continues: bool,
) -> None:
    line = await dial(service)
    body = json.dumps({"model": MODEL, "input": "a"}).encode()
    head = post(tenant.secret, body, *headers, path="/v1/responses/input_tokens")
    whole = head.replace(b"HTTP/1.1", f"HTTP/{version}".encode())

    await line.append(whole[: -len(body)])
    if continues:
        assert await line.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await line.append(body)
    response = await line.response()
    await line.append(whole)
    again = await (line.response() if persists else line.ended())

    assert response.status == 200
    assert again == (again if persists else b"")
    line.writer.close()


async def test_a_head_request_has_the_headers_of_the_response_and_no_body(service: Service) -> None:
    tenant = await service.tenant()
    line = await dial(service)
    requested = f" /v1/models HTTP/1.1\r\nhost: weir\r\nx-api-key: {tenant.secret}\r\n"

    await line.append(f"HEAD{requested}\r\n".encode())
    head = (await line.reader.readuntil(b"\r\n\r\n")).decode().lower()
    await line.append(f"GET{requested}connection: close\r\n\r\n".encode())
    response = await line.response()

    assert head.startswith("http/1.1 200")
    assert f"content-length: {response.headers['content-length']}" in head
    line.writer.close()
