"""HTTP for operators, without a key: `GET /metrics` on a port of its own, and health checks on that port and the one for clients.

Nothing here says who asked for what. The numbers are read on the event loop, which is where they change, and become text in a
thread, since a thousand lines take milliseconds. Owns the socket of the metrics port, and what was last asked of the database.

Health checks (`/livez`, `/readyz`, `/healthz`, `/health`) answer from what `health.py` has found last: no lookup, no thread, no
queue. The event loop answers, so a process whose loop hangs does not answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, TypeVar

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from api.core.health import Health
from api.metrics.families import (
    Parts,
    books_metrics,
    engine_metrics,
    gauge,
    gauges,
    journal_metrics,
    process_metrics,
    queue_metrics,
    request_metrics,
    span_metrics,
)
from api.observability.counts import RequestCounts
from metering.backlog import Backlog, read_backlog
from metering.core.errors import StoreAway
from metering.holds.journal import JournalBacklog, journal_backlog
from metering.store.db import Sessions, patience

PATH = "/metrics"
BOOKS_INTERVAL_S = 10.0  # between two looks at the database, however many scrape
BOOKS_WAIT_S = 2.0  # for an answer: a scrape has ten seconds for all of it
CONNECTIONS_MAX = 32  # a few collectors, each with a connection or two
HEADER_BYTES_MAX = 8192
IDLE_MAX_S = 120.0  # above the interval of most collectors, which keep their connections
FIRST_REQUEST_MAX_S = 10.0  # a connection that has asked for nothing by then is closed
SHUTDOWN_S = 1.0

log = structlog.get_logger(__name__)

Value = TypeVar("Value")
METHODS = ("GET", "HEAD")
HEADERS = {"content-type": "application/json", "cache-control": "no-store"}
Handle = Callable[[web.BaseRequest], Coroutine[Any, Any, web.StreamResponse]]


class Families(Collector):
    """Families that are there already, as the client library wants them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


class Scrapes:
    """Answers scrapes."""

    def __init__(self, parts: Parts, sessions: Sessions) -> None:
        self._parts = parts
        self._sessions = sessions
        self._process = ProcessCollector(registry=CollectorRegistry())
        self._thread = ThreadPoolExecutor(1, "weir-metrics")  # a scrape never waits behind requests
        self._asking = asyncio.Lock()
        self._asked_at: float | None = None
        self._backlog: Backlog | None = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != PATH:
            return web.Response(status=404, text=f"there is nothing here; metrics are at {PATH}\n")
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text=f"{PATH} takes GET\n", headers={"allow": "GET, HEAD"})
        text = await self.text()
        return web.Response(body=text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4, "cache-control": "no-store"})

    async def text(self) -> bytes:
        """Everything, in the exposition format."""
        backlog = await self._books()
        process = self._parts.process
        journals = await self._apart(journal_backlog, process.admission.settings.journal_directory)
        families = [*self._families(backlog, journals)]
        return await self._apart(self._write, families, process.observer.counts.copy())

    async def _apart(self, call: Callable[..., Value], *arguments: object) -> Value:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _families(self, backlog: Backlog | None, journals: JournalBacklog) -> Iterator[Metric]:
        process = self._parts.process
        yield gauges("weir_build_info", "Always 1.", ("version",), [((version("weir"),), 1.0)])
        yield from queue_metrics({name: queue.statistics() for name, queue in process.queues.items()})
        yield from engine_metrics(process.router)
        yield from process_metrics(self._parts)
        yield from journal_metrics(journals)
        yield gauge("weir_books_read", "Whether what follows could be asked of PostgreSQL.", float(backlog is not None))
        if backlog is not None:
            yield from books_metrics(backlog)
        if process.observer.spans is not None:
            yield from span_metrics(process.observer.spans.counts())

    def _write(self, families: list[Metric], counts: RequestCounts) -> bytes:
        return generate_latest(Families([*families, *request_metrics(counts), *self._process.collect()]))

    async def _books(self) -> Backlog | None:
        """What the database says, or said a moment ago; None while it does not answer."""
        async with self._asking:
            now = time.monotonic()
            if self._asked_at is None or now - self._asked_at >= BOOKS_INTERVAL_S:
                try:
                    with patience(BOOKS_WAIT_S):
                        self._backlog = await read_backlog(self._sessions)
                except StoreAway:
                    self._backlog = None
                except Exception:  # a schema that is being changed, say: all else is told nevertheless
                    log.exception("books_not_read")
                    self._backlog = None
                self._asked_at = now
            return self._backlog


class MetricsServer(web.Server):
    """aiohttp's server, with bounds.

    A connection asks for something within the time that an idle one may have, also one that takes no answer: a few that never read
    would have all the connections that there are. Where there are too many, the one that has been silent for longest makes room.
    """

    def __init__(self, handle: Handle) -> None:
        self._answer = handle
        self._asked: set[web.RequestHandler] = set()  # since they were looked at
        self._looks: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        super().__init__(
            self._handle,
            keepalive_timeout=IDLE_MAX_S,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            lingering_time=SHUTDOWN_S,
            access_log=None,
        )

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """See `web.Server`. A connection too many is closed."""
        super().connection_made(handler, transport)
        if len(self.connections) > CONNECTIONS_MAX:
            log.warning("metrics_connection_refused", connection_count=len(self.connections))
            silent = next((each for each in self._looks if each not in self._asked), handler)
            dropped = transport if silent is handler else silent.transport
            if dropped is not None:
                dropped.abort()
            if silent is handler:
                return
        self._look_later(handler, transport, FIRST_REQUEST_MAX_S)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._asked.discard(handler)
        if (look := self._looks.pop(handler, None)) is not None:
            look.cancel()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._asked.add(request.protocol)
        return await self._answer(request)

    def _look_later(self, handler: web.RequestHandler, transport: asyncio.Transport, wait_s: float) -> None:
        self._looks[handler] = asyncio.get_running_loop().call_later(wait_s, self._look, handler, transport)

    def _look(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        if handler in self._asked:
            self._asked.discard(handler)
            self._look_later(handler, transport, IDLE_MAX_S)
        else:
            transport.abort()


class MetricsListener:
    """The socket from its opening to its end."""

    def __init__(self, address: tuple[str, int] | None, port_count: int = 1) -> None:
        """Take the address, or the first of so many ports from there on that is free; None: listen nowhere. Raises: OSError."""
        self._socket = None if address is None else bound_socket(address, port_count)
        self._server: asyncio.Server | None = None
        self._http: MetricsServer | None = None

    @property
    def url(self) -> str:
        """What a collector of this machine asks; empty if there is none."""
        if self._socket is None:
            return ""
        host, port = self._socket.getsockname()[:2]
        here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{here}:{port}{PATH}"

    async def start(self, handle: Handle) -> None:
        if self._socket is not None:
            self._http = MetricsServer(handle)
            self._server = await asyncio.get_running_loop().create_server(self._http, sock=self._socket)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._http is not None:
            await self._http.shutdown(SHUTDOWN_S)
        if self._socket is not None:
            self._socket.close()


def bound_socket(address: tuple[str, int], port_count: int) -> socket.socket:
    """On the first of so many ports that is free. Raises: OSError naming them, and the setting."""
    host, first = address
    try:
        family, kind, number, _, _ = socket.getaddrinfo(host, first, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        for port in range(first, first + port_count):
            listening = socket.socket(family, kind, number)
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.setblocking(False)
                listening.bind((host, port))
                listening.listen(CONNECTIONS_MAX)  # now, since two may bind a port, and only one may listen there
            except OSError:
                listening.close()
                if port == first + port_count - 1:
                    raise
                continue
            return listening
    except (OSError, OverflowError) as error:
        ports = f"{first} to {first + port_count - 1}" if port_count > 1 else f"{first}"
        wrong = f"cannot listen on {host}, port {ports}, for metrics: {error}; WEIR_METRICS_LISTEN names another, or off"
        raise OSError(wrong) from error
    raise AssertionError("there is at least one port")


LIVE, READY = "/livez", frozenset({"/readyz", "/healthz", "/health"})


class Probes:
    """Answers health checks."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def before(self, handle: Handle) -> Handle:
        """A handler that answers health checks itself and passes on every other request."""

        async def answer_or_pass_on(request: web.BaseRequest) -> web.StreamResponse:
            answer = self.answer(request)
            return await handle(request) if answer is None else answer

        return answer_or_pass_on

    def answer(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a health check; None for any other path."""
        path = request.path
        if path != LIVE and path not in READY:
            return None
        if request.method not in METHODS:
            wrong = {"status": "error", "reasons": [f"{path} takes {' and '.join(METHODS)}"]}
            return answered(405, wrong, {"allow": ", ".join(METHODS)})
        if path == LIVE:
            return answered(200, {"status": "live"})
        reasons = self._health.reasons
        if reasons:
            return answered(503, {"status": "not ready", "reasons": list(reasons)})
        return answered(200, {"status": "ready"})


def answered(status: int, body: Mapping[str, object], more: Mapping[str, str] | None = None) -> web.Response:
    """A response that no proxy keeps. more: further headers."""
    return web.Response(status=status, body=json.dumps(body).encode() + b"\n", headers={**HEADERS, **(more or {})})
