"""The endpoint for Stripe's events: one path, one method, small bodies, one request per connection.

It answers 2xx only after the event is committed. The standard library's streams do: what they are used for here fits a page, and no
web framework has to be kept up to date for one path. TLS is the business of the proxy in front.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from metering.core.errors import InvalidValue, StoreAway
from metering.export.export_settings import WebhookSettings
from metering.export.stripe_inbox import store_event
from metering.store.db import Sessions

log = logging.getLogger(__name__)

PATH = "/stripe/events"
HEAD_MAX_BYTES = 16 * 1024  # Stripe's heads are below 1 kB
BODY_MAX_BYTES = 1024 * 1024  # of an event; an invoice with many lines is some 100 kB
REQUEST_TIMEOUT_S = 10.0  # Stripe's own patience is longer; a slow sender must not keep a connection
CONNECTIONS_MAX = 256  # beyond it the connection whose request has been awaited for longest gives way


class Answered(Exception):
    """Ends a request with this status."""

    def __init__(self, status: HTTPStatus, why: str = "") -> None:
        super().__init__(why or status.phrase)
        self.status = status


@dataclass(slots=True)
class Endpoint:
    """Takes one event per connection."""

    sessions: Sessions
    secrets: Sequence[str]
    reading: dict[asyncio.StreamWriter, None] = field(default_factory=dict)  # whose requests are not complete, the oldest first
    open_count: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its request to its end."""
        self.open_count += 1
        self.reading[writer] = None
        if self.open_count > CONNECTIONS_MAX:  # slow senders must not keep Stripe's events away
            next(iter(self.reading)).transport.abort()
        try:
            status, why = await self._answer(reader, writer)
            body = f"{why}\n".encode()
            writer.write(
                f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await writer.drain()
        except (ConnectionError, TimeoutError):
            pass  # the sender is gone; it comes again if it was not answered
        finally:
            self.open_count -= 1
            self.reading.pop(writer, None)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[HTTPStatus, str]:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                headers, body = await read_request(reader)
                self.reading.pop(writer, None)
                new = await store_event(self.sessions, body, headers.get("stripe-signature", ""), self.secrets)
        except Answered as answered:
            return answered.status, str(answered)
        except InvalidValue as error:
            return HTTPStatus.BAD_REQUEST, str(error)
        except TimeoutError:
            return HTTPStatus.REQUEST_TIMEOUT, "too slow"
        except StoreAway:
            log.warning("an event of Stripe is not stored: the database is away")
            return HTTPStatus.SERVICE_UNAVAILABLE, "come again"
        except Exception:  # whatever it was, Stripe sends the event again
            log.exception("an event of Stripe is not stored")
            return HTTPStatus.INTERNAL_SERVER_ERROR, "come again"
        return HTTPStatus.OK, "stored" if new else "known"


async def read_request(reader: asyncio.StreamReader) -> tuple[Mapping[str, str], bytes]:
    """Headers with small names, and the body. Raises: Answered for anything but a POST of an event."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise Answered(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from error
    except asyncio.IncompleteReadError as error:
        raise Answered(HTTPStatus.BAD_REQUEST) from error
    request_line, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    words = request_line.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Answered(HTTPStatus.BAD_REQUEST)
    if words[1].partition("?")[0] != PATH:
        raise Answered(HTTPStatus.NOT_FOUND)
    if words[0] != "POST":
        raise Answered(HTTPStatus.METHOD_NOT_ALLOWED)
    pairs = [line.partition(":") for line in lines]
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    length = headers.get("content-length", "")
    # A length that two readers could understand differently is how requests are smuggled past a proxy.
    if len(headers) != len(pairs) or "transfer-encoding" in headers or not (length.isascii() and length.isdigit()):
        raise Answered(HTTPStatus.LENGTH_REQUIRED)
    if len(length) > len(str(BODY_MAX_BYTES)) or int(length) > BODY_MAX_BYTES:
        raise Answered(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    try:
        return headers, await reader.readexactly(int(length))
    except asyncio.IncompleteReadError as error:
        raise Answered(HTTPStatus.BAD_REQUEST) from error


@contextlib.asynccontextmanager
async def webhook_server(sessions: Sessions, settings: WebhookSettings) -> AsyncIterator[str]:
    """Listens inside the block, which gets the address."""
    endpoint = Endpoint(sessions, settings.secrets)
    server = await asyncio.start_server(endpoint.serve, settings.listen_host, settings.listen_port, limit=HEAD_MAX_BYTES)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}{PATH}"


async def serve_webhooks(sessions: Sessions, settings: WebhookSettings, report: Callable[[str], None]) -> None:
    """Take events until SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with webhook_server(sessions, settings) as address:
        report(address)
        await stopping.wait()
