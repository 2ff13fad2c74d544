"""HTTP requests that end early: output handed to the connection is billed, and nothing leaks.

The server runs in this process, so that tests can inspect it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

import openai
import pytest
from structlog.testing import capture_logs

from api.core.errors import Draining
from api.generation.request.live_request import LiveRequest
from api.openai import listener as http_requests
from metering.core.models import Outcome, QuotaDimension
from tests.e2e.inside import inside_fixtures
from tests.e2e.openai_clients import TO_THE_END, connect_async, cost_of, extension, user_message
from tests.e2e.test_openai_bad_input import Socket, post
from tests.service import INPUT_PICOS, MODEL, PATIENCE_S, Inside, Service, Tenant, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUEUED_TOKENS = 400
CONNECTIONS = 20

Value = TypeVar("Value")


inside, service, _ = inside_fixtures(
    patch=lambda monkeypatch: monkeypatch.setattr(http_requests, "BODY_WAIT_S", 0.2),
    client_stall_max_s=1.0,
    outbox_tokens_per_request_max=QUEUED_TOKENS,
    lease_slice_tokens=24,
    lease_margin_tokens=8,
    http_idle_max_s=1.0,
    http_connections_max=CONNECTIONS,
)


async def the_one_running(inside: Inside, token_count: int) -> LiveRequest:
    """Return the running request, once it has generated this many tokens."""
    await until(
        lambda: any(
            each.usage.generated_token_count >= token_count for each in inside.process.running()
        ),
        "tokens",
    )
    [request] = inside.process.running()
    assert isinstance(request, LiveRequest)
    return request


async def the_event(service: Service, tenant: Tenant) -> dict[str, Any]:
    """Return the tenant's only usage event, once it exists."""
    await until(lambda: service.database.events(tenant), "the settlement")
    [event] = service.database.events(tenant)
    assert event["billed_token_count"] == event["delivered_token_count"]
    assert event["cost_picos"] == cost_of(event)
    return event


async def dial(service: Service, *, receive_bytes: int | None = None) -> Socket:
    """Connect, optionally with a bound on the unread bytes in the client's kernel."""
    url = urlsplit(service.openai_url)
    raw = socket.socket()
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (str(url.hostname), int(url.port or 0)))
    return Socket(*await asyncio.open_connection(sock=raw))


@pytest.mark.parametrize("k", [1, 24, 100])
async def test_a_client_that_hangs_up_pays_what_was_sent(service: Service, k: int) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10**9})

    async with connect_async(service, tenant.secret) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=user_message("Go"),
            max_tokens=3000,
            stream=True,
            logprobs=True,
            extra_body=TO_THE_END,
        )
        received = 0
        async for chunk in stream:
            reported = chunk.choices[0].logprobs
            received += len(reported.content or []) if reported is not None else 0
            if received >= k:
                break
        await stream.close()
        event = await the_event(service, tenant)

    assert event["outcome"] == "cancelled"
    assert k <= received <= event["delivered_token_count"] < 3000
    used, held = service.database.counters(tenant)["tokens_per_month"]
    assert (used, held) == (event["input_token_count"] + event["delivered_token_count"], 0)


async def test_hanging_up_early_costs_no_output(inside: Inside, service: Service) -> None:
    tenant = await service.tenant()
    body = json.dumps(
        {"model": MODEL, "messages": user_message("Go"), "max_tokens": 3000, "n": 4} | TO_THE_END
    ).encode()

    line = await dial(service)
    await line.append(post(tenant.secret, body))
    running = await the_one_running(inside, 50)
    assert running.usage.delivered_token_count == 0
    line.writer.close()
    event = await the_event(service, tenant)

    assert (event["outcome"], event["delivered_token_count"]) == ("cancelled", 0)
    assert event["cost_picos"] == event["input_token_count"] * INPUT_PICOS


async def test_a_broken_whole_answer_is_free(inside: Inside, service: Service) -> None:
    """Nothing was delivered, so the client may retry."""
    tenant = await service.tenant()

    async with connect_async(service, tenant.secret) as client, asyncio.TaskGroup() as tasks:
        requested = client.completions.create(
            model=MODEL, prompt=["Go", "On"], max_tokens=2000, extra_body=TO_THE_END
        )
        call = tasks.create_task(refused(requested))
        await until(
            lambda: (
                sum(each.usage.generated_token_count > 5 for each in inside.process.running()) == 2
            ),
            "tokens of both",
        )
        inside.process.running()[1].stop(Outcome.FAILED, Draining("to be served elsewhere"))
        error = await call

    assert isinstance(error, openai.InternalServerError)
    assert (error.status_code, error.code) == (503, "draining")
    assert int(error.response.headers["retry-after"]) >= 1
    await until(lambda: service.database.holds(tenant) == {"voided": 2}, "both to be voided")
    assert service.database.events(tenant) == []


async def test_a_broken_stream_bills_what_was_sent(inside: Inside, service: Service) -> None:
    tenant = await service.tenant()

    async with connect_async(service, tenant.secret) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=user_message("Go"),
            max_tokens=3000,
            stream=True,
            extra_body=TO_THE_END,
        )
        await anext(aiter(stream))
        inside.process.fail_all(Draining("to be served elsewhere"))
        with pytest.raises(openai.APIError, match="new Idempotency-Key") as broken:
            async for _ in stream:
                pass
        response = await client.responses.create(
            model=MODEL, input="Go", max_output_tokens=3000, stream=True, extra_body=TO_THE_END
        )
        await anext(aiter(response))
        inside.process.fail_all(Draining("to be served elsewhere"))
        *_, last = [event async for event in response]

    assert broken.value.code == "interrupted"
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert extension(last.response)["reason"] == "INTERRUPTED"
    assert extension(last.response)["cause"] == "DRAINING"
    assert all(
        event["outcome"] == "failed" and event["delivered_token_count"] > 0
        for event in service.database.events(tenant)
    )


async def test_an_answer_that_a_quota_cuts_is_whole_as_far_as_it_goes(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 100})

    async with connect_async(service, tenant.secret) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=user_message("Go"),
            max_tokens=3000,
            logprobs=True,
            extra_body=TO_THE_END,
        )

    assert answer.choices[0].finish_reason == "length"
    assert extension(answer)["finish_reasons"] == ["QUOTA_EXHAUSTED"]
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 100
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or []) == answer.usage.completion_tokens
    event = await the_event(service, tenant)
    assert event["delivered_token_count"] == answer.usage.completion_tokens


async def test_a_client_that_does_not_read_is_given_up(inside: Inside, service: Service) -> None:
    tenant = await service.tenant()
    fields = {
        "model": MODEL,
        "messages": user_message("Go"),
        "max_tokens": 3000,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
    }

    line = await dial(service, receive_bytes=4096)
    await line.append(post(tenant.secret, json.dumps(fields | TO_THE_END).encode()))
    event = await the_event(service, tenant)
    await inside.check_empty()

    assert event["outcome"] == "slow_consumer"
    assert 0 < event["delivered_token_count"] < 3000
    assert b"[DONE]" not in await line.ended()
    line.writer.close()


async def test_a_connection_without_a_complete_request_is_closed(service: Service) -> None:
    tenant = await service.tenant()
    silent, headless, bodiless = [await dial(service) for _ in range(3)]

    await headless.append(b"POST /v1/chat/completions HTTP/1.1\r\nhost: we")
    await bodiless.append(post(tenant.secret, b"{}")[:-1])

    response = await bodiless.response()
    assert (response.status, response.error["code"]) == (408, "request_timeout")
    assert [await each.ended() for each in (silent, headless)] == [b"", b""]
    for each in (silent, headless, bodiless):
        each.writer.close()


@pytest.mark.parametrize("complete_count", [0, 1])
async def test_a_slow_head_loses_its_connection(service: Service, complete_count: int) -> None:
    """Even after complete requests: only a whole head is progress."""
    line = await dial(service)
    for _ in range(complete_count):
        await line.append(b"GET /v1/models HTTP/1.1\r\nhost: weir\r\n\r\n")
        assert (await line.response()).status == 401

    await line.append(b"POST /v1/chat/completions HTTP/1.1\r\nx: ")

    assert await fed(line, line.ended()) == b""


async def test_a_body_sent_byte_by_byte_is_refused(service: Service, tenant: Tenant) -> None:
    line = await dial(service)

    await line.append(post(tenant.secret, b" " * 100_000)[:-90_000])
    answer = await fed(line, line.response())

    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert "was not received within" in answer.error["message"]


async def fed(line: Socket, answer: Coroutine[Any, Any, Value]) -> Value:
    """Send a byte every few milliseconds until the server answers."""
    answered = asyncio.ensure_future(answer)
    while not (await asyncio.wait([answered], timeout=0.02))[0]:
        with contextlib.suppress(ConnectionError):
            await line.append(b" ")
    line.writer.close()
    return await answered


async def test_a_client_that_reads_no_answers_is_disconnected(service: Service) -> None:
    """With small answers, each written in one piece."""
    line = await dial(service, receive_bytes=4096)

    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ConnectionError):
            await send_endlessly(line, b"GET /v1/nothing HTTP/1.1\r\nhost: weir\r\n\r\n" * 1000)
    line.writer.close()


async def test_a_body_without_a_length_ends_with_its_connection(service: Service) -> None:
    tenant = await service.tenant()
    chat = {"model": MODEL, "messages": user_message("Go"), "max_tokens": 2}
    body = json.dumps(chat | {"stream": True}).encode()
    requested = post(tenant.secret, body, "connection: keep-alive").replace(
        b"HTTP/1.1", b"HTTP/1.0"
    )

    line = await dial(service)
    await line.append(requested)
    head, _, answer = (await line.ended()).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.0 200")
    assert b"keep-alive" not in head.lower()
    assert answer.startswith(b"data: {")
    assert answer.endswith(b"data: [DONE]\n\n")
    line.writer.close()


async def test_a_short_whole_answer_is_sent_at_once_with_its_length(service: Service) -> None:
    tenant = await service.tenant()
    body = json.dumps({"model": MODEL, "messages": user_message("Go"), "max_tokens": 2}).encode()
    old = post(tenant.secret, body, "connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0")

    line = await dial(service)
    for requested in (post(tenant.secret, body), old):
        await line.append(requested)
        response = await line.response()

        assert "transfer-encoding" not in response.headers
        assert int(response.headers["content-length"]) == len(response.body)
        assert json.loads(response.body)["usage"]["completion_tokens"] == 2
    line.writer.close()


async def test_connections_are_bounded_and_come_back(service: Service, tenant: Tenant) -> None:
    with capture_logs() as logs:
        lines = [await dial(service) for _ in range(CONNECTIONS + 1)]
        assert await lines[-1].ended() == b""
    assert "http_connection_refused" in {entry["event"] for entry in logs}
    for line in lines:
        line.writer.close()

    async with connect_async(service, tenant.secret, max_retries=100) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]


async def send_endlessly(line: Socket, data: bytes) -> None:
    """Send until the server disconnects. Raises: ConnectionError."""
    while True:
        await line.append(data)


async def refused(call: Any) -> openai.APIStatusError:
    """Return the error of a call, which must fail."""
    async with asyncio.timeout(PATIENCE_S):
        try:
            answer = await call
        except openai.APIStatusError as error:
            return error
    raise AssertionError(f"the call was not refused: {answer!r}")
