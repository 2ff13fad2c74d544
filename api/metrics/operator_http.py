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
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from api.access.auth import Authenticator
from api.core.endpoint import bound_socket, local_url
from api.core.health import Health, store_is_well
from api.generation.life import PHASES
from api.generation.process import Process
from api.observability.observer import Histogram, RequestCounts, Times
from api.observability.spans import SpanCounts
from api.queue.fair_queue import QueueStatistics
from common.incidents import INCIDENT_COUNTS
from inference.engine import EngineStatistics
from inference.routing.router import ReplicaReport, ReplicaState, Router
from metering.backlog import Backlog, read_backlog
from metering.core.errors import StoreAway
from metering.holds.journal import JournalBacklog, journal_backlog
from metering.store.db import Sessions, patience

Labels = tuple[str, ...]
Values = Mapping[Labels, float] | Iterable[tuple[Labels, float]]
MS = 1e-3  # seconds in one: histograms count in ms, and are told in seconds
REQUEST_LABELS, REPLICA_LABELS = ("model", "tier"), ("model", "replica")
Told = list[tuple[tuple[str, str], ReplicaReport]]
Pick = Callable[[EngineStatistics], int]
TOTALS: tuple[tuple[str, str, Pick], ...] = (
    ("weir_engine_steps", "Steps of a replica.", lambda it: it.step_count),
    ("weir_engine_prompt_tokens", "Prompt tokens of sequences that a replica has begun.", lambda it: it.prompt_token_count),
    ("weir_engine_cached_tokens", "Prompt tokens that a replica's prefix cache had.", lambda it: it.cached_token_count),
    ("weir_engine_output_tokens", "Tokens that a replica has generated.", lambda it: it.output_token_count),
    ("weir_engine_preemptions", "Sequences that gave their memory back and began again.", lambda it: it.preemption_count),
)

TIMES: tuple[tuple[str, str, Callable[[Times], Histogram]], ...] = (
    ("weir_time_to_first_token_seconds", "Time from the arrival of a start frame to its first token.", lambda it: it.first_token),
    (
        "weir_inter_token_seconds",
        "Time between two tokens of a request; all of a request at their mean.",
        lambda it: it.inter_token,
    ),
    ("weir_request_seconds", "Time from the arrival of a start frame to the last frame.", lambda it: it.total),
)
QUEUES: tuple[tuple[str, str, Callable[[QueueStatistics], float]], ...] = (
    ("weir_queue_waiting", "Requests that wait for their turn with a model.", lambda it: it.waiting_count),
    ("weir_queue_engine_pending", "Sequences that had their turn, and have not begun.", lambda it: it.engine_pending_count),
    (
        "weir_queue_wait_seconds",
        "Expected wait of the last request in the queue; 0 if none waits.",
        lambda it: it.longest_wait_s or 0.0,
    ),
)
SEQUENCES: Mapping[str, Pick] = {"running": lambda it: it.running_sequence_count, "waiting": lambda it: it.waiting_sequence_count}
# Together they are all that there are.
BLOCKS: Mapping[str, Pick] = {
    "free": lambda it: it.kv_block_count_free,
    "cached": lambda it: it.kv_block_count_cached,
    "held": lambda it: it.kv_block_count_held,
}


def gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=value)


def gauges(name: str, what: str, labels: Sequence[str], values: Values) -> Metric:
    return labelled(GaugeMetricFamily(name, what, labels=labels), values)


def labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for of, value in values.items() if isinstance(values, Mapping) else values:
        family.add_metric(of, value)
    return family


def counter(name: str, what: str, value: float) -> Metric:
    """A count since the start. name: without `_total`."""
    return CounterMetricFamily(name, what, value=value)


def counters(name: str, what: str, labels: Sequence[str], values: Values) -> Metric:
    return labelled(CounterMetricFamily(name, what, labels=labels), values)


def histograms(name: str, what: str, labels: Sequence[str], values: Iterable[tuple[Labels, Histogram]], unit: float = MS) -> Metric:
    """A histogram for each set of labels. unit: what one of its units is in the metric's."""
    family = HistogramMetricFamily(name, what, labels=labels)
    for of, histogram in values:
        family.add_metric(of, histogram.buckets(unit), histogram.sum * unit)
    return family


def request_metrics(counts: RequestCounts) -> Iterator[Metric]:
    yield counters(
        "weir_requests",
        "Ended requests, by finish reason or by the reason of a refusal or a failure.",
        (*REQUEST_LABELS, "outcome"),
        counts.ends,
    )
    yield counters(
        "weir_refusals",
        "Requests that ended unbilled, by reason; for QUOTA_EXCEEDED with dimension and subject of the quota.",
        ("model", "reason", "dimension", "subject"),
        counts.refusals,
    )
    yield counters("weir_tokens", "Tokens billed, by kind; input is without cached_input.", ("model", "kind"), counts.tokens)
    yield counters("weir_failed_calls", "Calls that ended with an error.", ("call", "reason"), counts.failed_calls)
    yield counter("weir_migrations", "Moves of a request to another engine, because its own was lost.", counts.migration_count)
    yield from time_metrics(counts)


def time_metrics(counts: RequestCounts) -> Iterator[Metric]:
    of = [((model, tier.value), times) for (model, tier), times in sorted(counts.times.items())]
    for name, what, pick in TIMES:
        yield histograms(name, what, REQUEST_LABELS, [(labels, pick(times)) for labels, times in of])
    yield histograms(
        "weir_stage_seconds",
        "Time of a request by stage; cold_start only of requests that waited for an engine to start.",
        (*REQUEST_LABELS, "stage"),
        (((*labels, stage), histogram) for labels, times in of for stage, histogram in times.stages.items()),
    )


def engine_metrics(router: Router) -> Iterator[Metric]:
    """Of every replica of every model, those that embed included."""
    replicas = [((model, report.name), report) for model, report in router.every_replica()]
    yield gauges(
        "weir_engine_up",
        "Whether a replica takes requests.",
        REPLICA_LABELS,
        ((labels, float(report.state is ReplicaState.READY)) for labels, report in replicas),
    )
    yield gauges(
        "weir_engine_state",
        "1 for the state that a replica is in.",
        (*REPLICA_LABELS, "state"),
        (((*labels, report.state.value), 1.0) for labels, report in replicas),
    )
    told = [(labels, report) for labels, report in replicas if report.statistics is not None]
    yield gauges(
        "weir_engine_sequences", "Sequences in a replica, by what they do.", (*REPLICA_LABELS, "state"), by_state(told, SEQUENCES)
    )
    yield gauges(
        "weir_engine_batch_places",
        "Most sequences that a replica runs at once; 0 if unknown.",
        REPLICA_LABELS,
        of(told, lambda it: it.running_sequence_count_max),
    )
    yield gauges(
        "weir_kv_blocks", "Blocks of a replica's KV cache, by what they hold.", (*REPLICA_LABELS, "state"), by_state(told, BLOCKS)
    )
    for name, what, pick in TOTALS:
        yield counters(name, what, REPLICA_LABELS, of(told, pick))


def of(told: Told, pick: Pick) -> Iterator[tuple[Labels, float]]:
    return ((labels, float(pick(report.statistics))) for labels, report in told if report.statistics is not None)


def by_state(told: Told, states: Mapping[str, Pick]) -> Iterator[tuple[Labels, float]]:
    for state, pick in states.items():
        yield from (((*labels, state), value) for labels, value in of(told, pick))


def queue_metrics(queues: Mapping[str, QueueStatistics]) -> Iterator[Metric]:
    """Of the queue before each engine. queues: by the name that the engine serves."""
    for name, what, pick in QUEUES:
        yield gauges(name, what, ("model",), [((model,), float(pick(it))) for model, it in queues.items()])
    refused: dict[Labels, float] = {(model,): float(it.refused_count) for model, it in queues.items()}
    yield counters("weir_queue_refusals", "Requests that found no place, or would have started too late.", ("model",), refused)


@dataclass(frozen=True, slots=True)
class Parts:
    """What is looked at. The functions count what is open now."""

    process: Process
    authenticator: Authenticator
    open_streams: Callable[[], int]
    open_peer_streams: Callable[[], int]
    http_connections: Callable[[], int]


def process_metrics(parts: Parts) -> Iterator[Metric]:
    """All of this process but engines, queues, and what became of requests."""
    process, admission = parts.process, parts.process.admission
    phases = Counter(request.life.state.phase for request in process.running())
    running = (((phase,), float(phases[phase])) for phase in dict.fromkeys(PHASES.values()))
    yield gauges("weir_live_requests", "Requests that run or wait in this process, by phase.", ("phase",), running)
    yield gauge("weir_permits_taken", "Requests that count against the limit of this process.", admission.capacity.taken_count)
    yield gauge(
        "weir_permits",
        "Limit of requests of this process: WEIR_REQUESTS_PER_PROCESS_MAX.",
        admission.settings.requests_per_process_max,
    )
    yield gauge("weir_draining", "1 once this process takes no new requests.", float(admission.capacity.is_draining))
    yield counter("weir_admissions", "Requests that got a hold.", admission.admitted_count)
    streams = (("clients",), float(parts.open_streams())), (("peers",), float(parts.open_peer_streams()))
    yield gauges("weir_open_streams", "Open Generate calls, of clients or of other api processes (peers).", ("door",), streams)
    yield gauge("weir_http_connections", "Open connections of OpenAI's clients.", parts.http_connections())
    relay_count = 0 if process.relays is None else process.relays.running_count
    yield gauge("weir_relays", "Requests of other processes that clients of this one receive.", relay_count)
    yield gauge("weir_kept_output_bytes", "Output kept for clients that may come back.", process.replays.byte_count)
    yield gauge("weir_kept_requests", "Requests that have ended and whose output is kept.", process.replays.ended_count)
    lags = [((), process.observer.loop_lag.lags)]
    yield histograms("weir_event_loop_lag_seconds", "Delay of the event loop.", (), lags)
    throttled = parts.authenticator.throttle.refused_count
    yield gauge("weir_throttled_addresses", "Addresses that sent too many wrong keys, so that no more are looked up.", throttled)
    incidents = (((source,), float(count)) for source, count in INCIDENT_COUNTS.items())
    yield counters("weir_background_incidents", "Unexpected failures, by background loop.", ("source",), incidents)
    yield from store_metrics(parts)


def store_metrics(parts: Parts) -> Iterator[Metric]:
    """Holds, the way to the database, and the journal."""
    admission = parts.process.admission
    batches = parts.process.observer.batches
    holds, journal, told = admission.holds, admission.journal, admission.holds.statistics()
    yield gauge(
        "weir_database_up",
        "As in health: 0 once PostgreSQL is away for WEIR_STORE_AWAY_HEALTH_S.",
        float(store_is_well(holds, admission.settings)),
    )
    yield gauge("weir_database_away_seconds", "Time since PostgreSQL has last answered this process.", holds.away_s or 0.0)
    yield gauge("weir_holds", "Holds that this process answers for.", told.live_hold_count)
    yield gauge("weir_standing_holds", "Pre-authorized holds for the time when PostgreSQL is away.", told.standing_hold_count)
    yield gauge("weir_owed_hold_ends", "Ends of holds that are not in PostgreSQL yet.", told.owed_end_count)
    yield gauge("weir_hold_operations_open", "Writes of holds that wait or are under way.", told.open_operation_count)
    yield histograms("weir_hold_batch_seconds", "Duration of a batch of writes of holds.", (), [((), batches.durations)])
    yield histograms("weir_hold_batch_operations", "Writes of holds in one batch.", (), [((), batches.sizes)], unit=1.0)
    yield gauge("weir_journal_bytes", "Size of the usage journal of this process.", journal.size_bytes)
    yield gauge(
        "weir_journal_unsettled_requests",
        "Requests in the usage journal that are not in the database yet.",
        journal.unsettled_count,
    )


def journal_metrics(backlog: JournalBacklog) -> Iterator[Metric]:
    """Of all processes of this machine that share a home directory."""
    yield gauge("weir_abandoned_journals", "Journals of dead processes that wait for recovery.", backlog.abandoned_count)
    yield gauge("weir_abandoned_journal_age_seconds", "Age of the oldest journal that waits for recovery.", backlog.oldest_age_s)
    yield gauge("weir_refused_journals", "Journals that the database refused, set aside for a person.", backlog.refused_count)


def books_metrics(backlog: Backlog) -> Iterator[Metric]:
    """Of the whole deployment: every process tells the same."""
    yield gauge("weir_books_holds", "Holds of all processes; counted up to 10,000.", backlog.hold_count)
    yield gauge("weir_books_overdue_holds", "Holds that should have ended 30 s ago, and have not.", backlog.overdue_hold_count)
    yield gauge(
        "weir_books_unrated_events", "Usage events not in the ledger yet; counted up to 10,000.", backlog.unrated_event_count
    )
    yield gauge("weir_books_unrated_age_seconds", "Age of the oldest usage event not in the ledger.", backlog.unrated_age_s)
    yield gauge("weir_books_unexported_batches", "Hours of usage not exported yet.", backlog.unexported_batch_count)
    yield gauge("weir_books_unexported_age_seconds", "Age of the oldest hour of usage not exported.", backlog.unexported_age_s)
    yield gauge(
        "weir_books_unhandled_stripe_events", "Stored events of Stripe that are not handled.", backlog.unhandled_event_count
    )
    yield gauge("weir_books_undelivered_alerts", "Alerts that wait for webhooks; up to 10,000.", backlog.undelivered_alert_count)
    yield gauge("weir_books_export_paused", "1 while the biller takes nothing.", float(backlog.export_is_paused))
    workers = (((source,), float(count)) for source, count in backlog.worker_incidents.items())
    yield counters("weir_worker_incidents", "Unexpected failures in the workers, by background loop.", ("source",), workers)


def span_metrics(counts: SpanCounts) -> Iterator[Metric]:
    yield counter("weir_traces_sent", "Requests whose spans the collector has taken.", counts.sent)
    yield counter("weir_traces_dropped", "Requests whose spans were dropped: the collector was away, or too slow.", counts.dropped)
    yield gauge("weir_traces_waiting", "Requests whose spans are to be sent.", counts.waiting)


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
        if request.method not in METHODS:
            return web.Response(status=405, text=f"{PATH} takes GET\n", headers={"allow": ", ".join(METHODS)})
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
        yield gauges("weir_build_info", "Always 1.", ("version",), [((version("weir-server"),), 1.0)])
        yield from queue_metrics({name: queue.statistics() for name, queue in process.queues.items()})
        yield from engine_metrics(process.router)
        yield from process_metrics(self._parts)
        yield from journal_metrics(journals)
        yield gauge(
            "weir_books_read", "1 if PostgreSQL could be asked for the other weir_books metrics.", float(backlog is not None)
        )
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
        self._socket: socket.socket | None = None
        if address is not None:
            self._socket = bound_socket(
                address, "for metrics", "WEIR_METRICS_LISTEN", port_count=port_count, backlog=CONNECTIONS_MAX
            )
        self._server: asyncio.Server | None = None
        self._http: MetricsServer | None = None

    @property
    def url(self) -> str:
        """What a collector of this machine asks; empty if there is none."""
        if self._socket is None:
            return ""
        host, port, *_ = self._socket.getsockname()
        return local_url(host, port, PATH)

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


LIVE, READY = "/livez", frozenset({"/readyz", "/healthz", "/health"})


class Probes:
    """Answers health checks."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def before(self, handle: Handle) -> Handle:
        """A handler that answers health checks itself and passes on every other request."""

        async def probed(answer: web.Response) -> web.StreamResponse:
            return answer

        def answer_or_pass_on(request: web.BaseRequest) -> Coroutine[Any, Any, web.StreamResponse]:
            answer = self.answer(request)
            return handle(request) if answer is None else probed(answer)

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
