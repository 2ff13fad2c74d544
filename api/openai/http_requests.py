"""What every HTTP request has in common, whoever answers it: who sends it, its key, its body within bounds, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from api.access.auth import BEARER
from api.core.errors import Unauthenticated
from api.core.pace import VISIT, FramePace, Visit, measured
from api.openai.refusals import INVALID_HTTP, HttpFault, no_http

Handle = Callable[[web.BaseRequest], Coroutine[Any, Any, web.StreamResponse]]

BODY_WAIT_S = 30.0  # seconds: a body of 4 MiB comes through the slowest of lines; who sends it byte by byte is not waited for


def peer_of(request: web.BaseRequest) -> str:
    """Who has connected, as gRPC names it."""
    host, port, *_ = request.get_extra_info("peername") or ("", 0)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def secret_of(request: web.BaseRequest) -> str:
    """The API key of a request. Raises: Unauthenticated saying how to send it."""
    keys = request.headers.getall("authorization", [])
    if len(keys) > 1:
        raise Unauthenticated("several API keys: send one header `Authorization: Bearer <API key>`")
    given = keys[0] if keys else ""
    if given.lower().startswith(BEARER):
        return given[len(BEARER) :].strip()
    raise Unauthenticated("no API key: send the header `Authorization: Bearer <API key>`")


async def read_body(request: web.BaseRequest, most: int) -> bytes:
    """The body of at most so many bytes, as it was sent. Raises: HttpFault, ConnectionError."""
    if any(each.strip().lower() != "identity" for each in request.headers.getall("content-encoding", ())):
        raise HttpFault(415, "send the body as it is, without content-encoding", "unsupported_encoding")
    if request.headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
        raise HttpFault(400, no_http("transfer-encoding can only be chunked"), INVALID_HTTP, closing=True)
    too_large = HttpFault(413, f"the body is too large: at most {most} bytes are taken", "request_too_large", closing=True)
    if (request.content_length or 0) > most:
        raise too_large
    if (expected := request.headers.get("expect")) is not None:
        if expected.lower() != "100-continue":
            raise HttpFault(417, "the header Expect can only be 100-continue", "expectation_failed", closing=True)
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # it is not the response
    try:
        async with asyncio.timeout(BODY_WAIT_S):
            content = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except TimeoutError:
        raise HttpFault(408, f"the body did not come within {BODY_WAIT_S:.0f} s", "request_timeout", closing=True) from None
    except HttpProcessingError as error:
        raise HttpFault(400, no_http(error.message), INVALID_HTTP, closing=True) from None
    if len(content) > most:
        raise too_large
    return content


def visited(handle: Handle, pace: FramePace) -> Handle:
    """A handler whose HTTP requests are counted; one that has had no turn waits before its answer."""

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        visit = Visit(pace, peer_of(request))
        VISIT.set(visit)
        try:
            response = await measured(visit, handle(request))
            if not response.prepared:
                await visit.turn()
            return response
        finally:
            visit.over()

    return serve
