"""Invalid HTTP requests: refused by status and parameter, not billed, harmless."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from metering.core.models import QuotaDimension
from tests.e2e.openai_clients import connect, user_message
from tests.service import MODEL, PATIENCE_S, Service, Tenant, log_events

CHAT: dict[str, Any] = {"model": MODEL, "messages": user_message("Hi"), "max_tokens": 1}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
SCHEMA = {"type": "array", "uniqueItems": True}

# Refusals in a row cost the key its share of a slow machine: it retries when it is told to.
PATIENT_RETRIES = 10

BROKEN_BODIES = (
    b"zz\r\n",
    b"5\r\nhello\r\n-1\r\n",
    b"2\r\n{}ZZ",
    b"f" * 17 + b"\r\n",
    b"0\r\n" + b"x: y\r\n" * 1000,
)


@pytest.fixture
def no_incident(service: Service) -> Iterator[None]:
    """Check that the service has reported no incident meanwhile."""
    before = len(log_events(service.log, "incident"))
    yield
    assert len(log_events(service.log, "incident")) == before


@pytest.fixture
async def tenant(service: Service, no_incident: None) -> AsyncIterator[Tenant]:
    """Yield a tenant without settled requests at the end."""
    tenant = await service.tenant()
    yield tenant
    await service.no_hold_left(tenant)
    assert service.database.events(tenant) == []


@dataclass(frozen=True, slots=True)
class Response:
    """One response from the socket."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """Body of its error."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


@dataclass(slots=True)
class Socket:
    """Connection that can send anything."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def append(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def response(self) -> Response:
        """Return the next response."""
        async with asyncio.timeout(PATIENCE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.split("\r\n")[:-2]
            headers = {
                name.lower(): value for name, _, value in (line.partition(": ") for line in lines)
            }
            return Response(
                int(first.split()[1]),
                headers,
                await self.reader.readexactly(int(headers.get("content-length", 0))),
            )

    async def ended(self) -> bytes:
        """Return all bytes up to the end of the connection."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


async def dial(service: Service) -> Socket:
    """Connect to the listener."""
    url = urlsplit(service.openai_url)
    return Socket(*await asyncio.open_connection(url.hostname, url.port))


def post(secret: str, body: bytes, *headers: str, path: str = "/v1/chat/completions") -> bytes:
    """Return a whole request."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: weir",
        f"authorization: Bearer {secret}",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def head_of(tenant: Tenant) -> str:
    """Return the beginning of a chat's headers."""
    key = f"authorization: Bearer {tenant.secret}"
    return f"POST /v1/chat/completions HTTP/1.1\r\nhost: weir\r\n{key}\r\n"


@dataclass(frozen=True, slots=True)
class Wrong:
    """Invalid fields of a chat, and the expected error."""

    param: str | None
    words: str
    fields: dict[str, Any] = field(default_factory=dict)


WRONG = (
    Wrong("temperature", "between 0 and 2", {"temperature": 3}),
    Wrong("top_p", "between 0 and 1", {"top_p": -0.1}),
    Wrong("n", "from 1 to 16", {"n": 17}),
    # No object may be made for each before the refusal.
    Wrong("n", "from 1 to 16", {"n": 2**31 - 1}),
    Wrong("stop[1]", "1 to 256", {"stop": ["a", ""]}),
    Wrong("max_tokens", "at least 1", {"max_tokens": 0}),
    Wrong(
        "max_completion_tokens",
        "at least 1",
        {"max_tokens": openai.NOT_GIVEN, "max_completion_tokens": -2},
    ),
    Wrong("presence_penalty", "between -2 and 2", {"presence_penalty": 9}),
    Wrong("logit_bias[5]", "between -100 and 100", {"logit_bias": {"5": 101}}),
    Wrong("logit_bias[399999]", "must be from 0 to", {"logit_bias": {"399999": 1}}),
    Wrong("logit_bias['five']", "token id", {"logit_bias": {"five": 1}}),
    Wrong("top_logprobs", "from 0 to 20", {"logprobs": True, "top_logprobs": 21}),
    Wrong("top_logprobs", "requires logprobs", {"top_logprobs": 2}),
    Wrong("messages", "at least one", {"messages": []}),
    Wrong("messages[0].role", "must be one of", {"messages": [{"role": "robot", "content": "x"}]}),
    Wrong("messages[0].content", "must be text", {"messages": [{"role": "user"}]}),
    Wrong(
        "messages[0].content[1]",
        "send text",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]},
    ),
    Wrong(
        "messages[0].tool_call_id",
        "earlier message",
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
    ),
    Wrong(
        "messages[0].tool_call_id",
        "earlier message",
        {"messages": [{"role": "function", "content": "x", "name": "f"}]},
    ),
    Wrong(
        "tools",
        "does not support tools",
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ),
    Wrong(
        "tools[0].type",
        "must be function",
        {"tools": [{"type": "custom", "name": "f"}], "extra_query": {"strict": "1"}},
    ),
    Wrong(
        "tools[0].function.name",
        "1 to 64",
        {"tools": [{"type": "function", "function": {"name": "f f"}}]},
    ),
    Wrong(
        "tools[0].function.parameters",
        "JSON schema",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
    ),
    Wrong("tools[0].function", "is required", {"tools": [{"type": "function", "name": "f"}]}),
    Wrong("tool_choice", "requires tools", {"tool_choice": "required"}),
    Wrong("functions", "use tools", {"functions": [{"name": "f"}]}),
    Wrong("response_format.type", "must be one of text", {"response_format": {"type": "xml"}}),
    Wrong(
        "response_format.json_schema.schema",
        "is required",
        {"response_format": {"type": "json_schema", "json_schema": {}}},
    ),
    Wrong(
        "response_format.json_schema", "is required", {"response_format": {"type": "json_schema"}}
    ),
    Wrong(
        "response_format.schema",
        "must be in json_schema",
        {"response_format": {"type": "json_schema", "json_schema": {}, "schema": SCHEMA}},
    ),
    Wrong("service_tier", "must be one of", {"service_tier": "surprise"}),
    Wrong("store", "not supported", {"store": True}),
    Wrong("reasoning_effort", "must be one of none, minimal", {"reasoning_effort": "much"}),
    Wrong("reasoning_effort", "no efforts of thinking", {"reasoning_effort": "high"}),
    Wrong("modalities", 'must be ["text"]', {"modalities": ["text", "audio"]}),
    Wrong(
        "user",
        "metadata",
        {"user": "a", "metadata": {"user": "b"}, "extra_body": {"safety_identifier": "c"}},
    ),
    Wrong("metadata['k']", "up to 512", {"metadata": {"k": "v" * 513}}),
    Wrong(
        "surprise",
        "not a parameter",
        {"extra_body": {"surprise": 1}, "extra_query": {"strict": "1"}},
    ),
    Wrong("strict", "0 or 1", {"extra_query": {"strict": "yes"}}),
    Wrong("seed", "whole number", {"seed": 1.5}),
    Wrong("seed", "<= 9223372036854775807", {"seed": 2**63}),
)


async def test_every_wrong_parameter_is_named_with_its_remedy(
    service: Service, tenant: Tenant
) -> None:
    with connect(service, tenant.secret, max_retries=PATIENT_RETRIES) as client:
        for wrong in WRONG:
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**CHAT | wrong.fields)

            assert caught.value.param == wrong.param, wrong
            assert wrong.words in caught.value.message, wrong
            assert caught.value.type == "invalid_request_error", wrong


@pytest.mark.usefixtures("no_incident")
async def test_a_schema_that_cannot_compile_is_named_and_free(service: Service) -> None:
    dimensions = QuotaDimension.REQUESTS_PER_MINUTE, QuotaDimension.TOKENS_PER_MONTH
    tenant = await service.tenant(dict.fromkeys(dimensions, 1000))
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with (
        connect(service, tenant.secret) as client,
        pytest.raises(openai.BadRequestError, match="uniqueItems") as caught,
    ):
        client.chat.completions.create(**CHAT | {"response_format": wrong})

    assert caught.value.param == "response_format.json_schema.schema"
    assert caught.value.type == "invalid_request_error"
    await service.no_hold_left(tenant)
    assert list(service.database.billed(tenant).values()) == [{}]
    assert service.database.counters(tenant) == {
        "requests_per_minute": (1, 0),
        "tokens_per_month": (0, 0),
    }


async def test_unsupported_parameters_are_named(service: Service, tenant: Tenant) -> None:
    responses: dict[str, Any] = {
        "previous_response_id": "resp_1",
        "background": True,
        "store": True,
        "truncation": "middle",
        "conversation": "conv_1",
        "reasoning.effort": {"effort": "high"},
        "text.format.json_schema": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA},
        },
    }
    plain: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
    completions: dict[str, Any] = {"suffix": "x", "best_of": 3, "prompt": [], "logprobs": 30}

    with connect(service, tenant.secret, max_retries=PATIENT_RETRIES) as client:
        for name, value in responses.items():
            parameter = re.split(r"[.\[]", name)[0]
            fields: Any = {parameter: {"format": value} if parameter == "text" else value}
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(model=MODEL, input="Hi", **fields)
            assert caught.value.param == name
        for name, value in completions.items():
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(**plain | {name: value})
            assert caught.value.param == name
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_1"}])
        assert caught.value.param == "input[0].type"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_1")


async def test_invalid_bodies_keep_the_connection(service: Service, tenant: Tenant) -> None:
    bodies = {
        b"": "invalid_json",
        b"{": "invalid_json",
        b'{"model": NaN}': "invalid_json",
        b'{"model": "\xff"}': "invalid_json",
        b'{"model": "\\ud800"}': "invalid_json",
        b"[" * 100_000: "invalid_value",
        b'{"messages":' + b"[" * 100_000: "invalid_json",
        b"[]": "invalid_value",
        b'"text"': "invalid_value",
        b'{"model": 5}': "invalid_value",
        b'{"messages": [{"role": "user", "content": "x"}]}': "invalid_value",
    }
    socket = await dial(service)

    for body, code in bodies.items():
        await socket.append(post(tenant.secret, body))
        response = await socket.response()
        assert (response.status, response.error["code"]) == (400, code), body[:40]
    await socket.append(post("nobody", b"{}"))
    assert (await socket.response()).status == 401
    await socket.append(b"GET /v1/models HTTP/1.1\r\nhost: weir\r\n\r\n")
    keyless = await socket.response()
    assert keyless.status == 401
    assert keyless.headers["www-authenticate"] == "Bearer"
    await socket.append(post(tenant.secret, b"", path="/v1/models"))
    response = await socket.response()
    assert (response.status, response.headers["allow"]) == (405, "GET, HEAD")
    await socket.append(
        b"HEAD /v1/models HTTP/1.1\r\nhost: weir\r\n"
        + f"authorization: Bearer {tenant.secret}\r\n\r\n".encode()
    )
    head = (await socket.reader.readuntil(b"\r\n\r\n")).decode()
    for path, hint in (
        ("/x", "the API serves /v1/"),
        ("/chat/completions", "must end in /v1"),
        ("/v1/responses/resp_1", "answers are not stored"),
        ("/v1/files", "put their text into a message"),
    ):
        await socket.append(f"GET {path} HTTP/1.1\r\nhost: weir\r\n\r\n".encode())
        nothing_there = await socket.response()
        assert nothing_there.error["message"].startswith(f"Unknown URL GET {path}: ")
        assert hint in nothing_there.error["message"]
    await socket.append(b"GET / HTTP/1.1\r\nhost: weir\r\n\r\n")
    to_console = await socket.response()
    assert head.startswith("HTTP/1.1 200")
    assert (to_console.status, to_console.headers["location"]) == (307, "console/")
    socket.writer.close()


async def test_oversized_bodies_are_refused_unread(service: Service, tenant: Tenant) -> None:
    too_long = service.settings.messages.bytes_max + 1
    head = head_of(tenant)

    socket = await dial(service)
    await socket.append(f"{head}content-length: {too_long}\r\n\r\n".encode())
    announced = await socket.response()
    socket.writer.close()
    socket = await dial(service)
    await socket.append(f"{head}transfer-encoding: chunked\r\n\r\n{too_long:x}\r\n".encode())
    await socket.append(b" " * too_long + b"\r\n0\r\n\r\n")
    chunked = await socket.response()
    socket.writer.close()
    socket = await dial(service)
    await socket.append(f"GET /v1/models HTTP/1.1\r\nx: {'y' * 100_000}\r\n\r\n".encode())
    header = await socket.response()
    socket.writer.close()
    socket = await dial(service)
    await socket.append(f"{head}content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{{}}".encode())
    compressed = await socket.response()
    socket.writer.close()

    assert (announced.status, announced.error["code"]) == (413, "request_too_large")
    assert chunked.status == 413
    assert (header.status, header.error["code"]) == (400, "invalid_http")
    assert compressed.status == 415


async def test_bytes_that_are_not_http_are_disconnected(service: Service, tenant: Tenant) -> None:
    greeting_of_tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"
    for garbage in (greeting_of_tls, b"HELLO\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 50_000):
        socket = await dial(service)
        await socket.append(garbage)
        response = await socket.response()
        assert (response.status, response.error["code"]) == (400, "invalid_http"), garbage[:20]
        assert await socket.ended() == b""
        socket.writer.close()


async def test_a_broken_body_is_refused_at_once(service: Service, tenant: Tenant) -> None:
    """Each in its own packet while its request waits for its body, also behind another request."""
    head = head_of(tenant)
    chunked = f"{head}transfer-encoding: chunked\r\n".encode()

    for broken in BROKEN_BODIES:
        for before in (b"", post(tenant.secret, b"{}")):
            socket = await dial(service)
            await socket.append(before + chunked + b"expect: 100-continue\r\n\r\n")
            if before:
                assert (await socket.response()).error["param"] == "model"
            async with asyncio.timeout(PATIENCE_S):
                interim = await socket.reader.readuntil(b"\r\n\r\n")
                assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
            await socket.append(broken)
            response = await socket.response()
            assert (response.status, response.error["code"]) == (400, "invalid_http"), broken
            assert "\n" not in response.error["message"]
            assert await socket.ended() == b""
            socket.writer.close()


async def test_unsupported_headers_are_refused(service: Service, tenant: Tenant) -> None:
    """A header with two values is refused: a proxy in between may have used the other one."""
    wrong = {
        "authorization: Bearer other": (401, "invalid_api_key"),
        "idempotency-key: a\r\nidempotency-key: b": (400, "invalid_value"),
        "content-encoding: identity\r\ncontent-encoding: gzip": (415, "unsupported_encoding"),
        "expect: 200-ok": (417, "expectation_failed"),
    }

    for header, (status, code) in wrong.items():
        socket = await dial(service)
        await socket.append(post(tenant.secret, json.dumps(CHAT).encode(), header))
        response = await socket.response()
        assert (response.status, response.error["code"]) == (status, code)
        socket.writer.close()
    socket = await dial(service)
    head = head_of(tenant)
    await socket.append(
        f"{head}transfer-encoding: gzip, chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode()
    )
    assert (await socket.response()).error["code"] == "invalid_http"
    socket.writer.close()


async def test_pipelined_requests_are_answered_in_order(service: Service, tenant: Tenant) -> None:
    body = json.dumps({"model": "none", "messages": user_message("x")}).encode()
    listing = (
        b"GET /v1/models HTTP/1.1\r\nhost: weir\r\n"
        + f"authorization: Bearer {tenant.secret}\r\n\r\n".encode()
    )
    socket = await dial(service)

    await socket.append((listing + post(tenant.secret, body)) * 50)

    answers = [(await socket.response()).status for _ in range(100)]
    assert answers == [200, 404] * 50
    socket.writer.close()


async def test_a_client_that_sends_expect_gets_a_continue(service: Service, tenant: Tenant) -> None:
    body = json.dumps({"model": "none", "messages": user_message("x")}).encode()
    whole = post(tenant.secret, body, "expect: 100-continue")
    socket = await dial(service)

    await socket.append(whole[: -len(body)])
    async with asyncio.timeout(PATIENCE_S):
        assert await socket.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await socket.append(body)

    assert (await socket.response()).status == 404
    socket.writer.close()
