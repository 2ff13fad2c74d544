"""Composition root of an api process: settings, database, engines, servers, drain on SIGTERM.

All background work is a task of the `IncidentTaskGroup` here, or of a stream's group.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

import grpc.aio
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from api.access.auth import Authenticator
from api.access.tls import open_tls
from api.admin.admin_service import AdminServicer
from api.admin.billing_service import BillingServicer, ReceiptServicer, Reports
from api.composition import (
    allow_open_files,
    build_safety,
    configure_logs,
    console_url,
    drain,
    http_handle,
    load_tokenizers,
    log_statistics_regularly,
    open_authenticator,
    open_control,
    open_holds,
    open_signer,
    open_spans,
    openai_url,
    return_freed_memory,
    stop_signals,
)
from api.core.addresses import is_local
from api.core.endpoint import NOT_STARTED, AddressUnavailable, Endpoint, make_private
from api.core.health import Health, keep_health
from api.core.rate_limiter import RateLimiter
from api.core.settings import SettingInvalid, Settings
from api.core.wire import use_signer
from api.fleet.fleet import build_serving
from api.generation.request.admission import Admission, Capacity
from api.generation.request.peers import PeerCertificates, make_identity
from api.generation.request.registry import RequestRegistry
from api.generation.request.relay import Relays
from api.metrics.operator_http import BacklogReader, Handle, MetricsListener, Parts, Probes, Scrapes
from api.observability.observer import Observer
from api.openai.listener import Listener
from api.rpc.inference_service import InferenceServicer
from api.server import Servicers, build_peer_server, build_server
from common.incidents import IncidentTaskGroup, Retries, sole_cause
from inference.engine import Backend
from inference.errors import CheckpointInvalid, EngineError
from inference.routing.router import Router
from inference.safety.classifiers import ClassifierProcess
from inference.workers.process import SpareWorkers
from metering.control.control_channel import ControlChannel
from metering.core.errors import DatabaseUnavailable
from metering.holds.journal import UsageJournal, check_locks
from metering.holds.lease_clock import boot_time_s
from metering.holds.recovery import recover_journals
from metering.holds.usage_notices import UsageNotices
from metering.invoicing.invoice_document import Issuer
from metering.receipts.signing import Signer
from metering.store.db import (
    Sessions,
    StoreGate,
    create_engine,
    create_lookups,
    create_sessions,
    undurable_settings,
)
from metering.tenants.key_uses import KeyUses

KEY_CONNECTIONS = 2  # separate from those of reports: a key lookup takes a millisecond
# Thresholds of garbage collection. Requests leave no garbage and gRPC little, but a collection
# walks all new objects and stops all streams: 0.2 ms for 10,000. With fewer it would walk the
# objects of running requests.
COLLECT_AFTER = 10_000, 3, 200

# Seconds that a thread rendering a prompt may delay the event loop by Python's lock: a tenth of the
# default.
SWITCH_INTERVAL_S = 0.0005
NOT_STARTED_BY = (SettingInvalid, CheckpointInvalid, AddressUnavailable)

log = structlog.get_logger(__name__)


async def start_classifiers(classifiers: ClassifierProcess) -> None:
    """Wait until the safety classifiers are loaded, before requests are admitted.

    Raises SettingInvalid if they cannot be loaded.
    """
    if (failure := await classifiers.loaded()) is not None:
        raise SettingInvalid(f"WEIR_SAFETY_RULES: {failure}")


async def start_engine(engine: Backend) -> None:
    """Load a model before its first request. A failure is logged; requests then get the error."""
    try:
        await engine.start()
    except EngineError as error:
        log.error("engine_start_failed", model=engine.model.name, cause=str(error))


def serve_engines(router: Router, tasks: asyncio.TaskGroup) -> None:
    """Run all engines as tasks, and load the models that do not start on demand."""
    for engine in router.backends():
        tasks.create_task(engine.serve(), name=f"engine {engine.model.name}")
        if not engine.condition().starts_on_demand:
            tasks.create_task(start_engine(engine), name=f"engine start {engine.model.name}")


async def warn_of_undurable_server(sessions: Sessions) -> None:
    """Log an error if the database server can lose commits in a crash, as those of tests can."""
    with contextlib.suppress(DatabaseUnavailable):
        if settings := await undurable_settings(sessions):
            log.error(
                "database_not_durable",
                off=settings,
                remedy="set them to on in postgresql.conf, and reload",
            )


def warn_of_open_metrics(settings: Settings) -> None:
    """Log a warning if other machines can read the metrics, which need no key."""
    address = settings.metrics_listen
    if address not in ("", "off") and not is_local(address):
        log.warning(
            "metrics_reachable_from_other_machines",
            address=address,
            remedy="metrics have neither TLS nor a key: let only collectors and probes reach this"
            " port, or set WEIR_METRICS_LISTEN to an address on 127.0.0.1",
        )


async def recover(settings: Settings, gate: StoreGate, signer: Signer | None) -> None:
    """Recover the journals of dead processes on this machine; later if the database is away."""
    try:
        await recover_journals(settings.journal_directory, settings.database_url, gate, signer)
    except (DatabaseUnavailable, OSError) as away:
        log.warning("recovery_delayed", cause=str(away).strip())


async def recover_regularly(settings: Settings, gate: StoreGate, signer: Signer | None) -> None:
    """Recover journals now, and then every `recovery_interval_s`."""
    while True:
        await recover(settings, gate, signer)
        await asyncio.sleep(settings.recovery_interval_s)


@dataclass(frozen=True, slots=True)
class Listeners:
    """Servers and listeners of the process, each bound to its address."""

    server: grpc.aio.Server
    peer_server: grpc.aio.Server
    listener: Listener
    metrics: MetricsListener

    async def open(self, scrape: Handle) -> None:
        """Start accepting connections, last on the gRPC port. `scrape` handles the metrics port."""
        await self.peer_server.start()
        await self.listener.start()
        await self.metrics.start(scrape)
        await self.server.start()

    async def close(self, router: Router) -> None:
        """Close the gRPC port, the engines, the HTTP port, and last the metrics port."""
        await self.server.stop(grace=1.0)
        for engine in router.backends():
            await engine.close()
        await self.listener.stop()
        await self.metrics.stop()


def in_background(
    tasks: asyncio.TaskGroup,
    process: RequestRegistry,
    control: ControlChannel,
    notices: UsageNotices,
    uses: KeyUses,
    spares: SpareWorkers,
    recovery: Callable[[], Awaitable[None]],
) -> list[asyncio.Task[None]]:
    """Start the background loops. A loop that raises is restarted with backoff."""
    loops: dict[str, Callable[[], Awaitable[None]]] = {
        "control channel": control.run,
        "usage notices": notices.run,
        "key uses": uses.run,
        "recovery": recovery,
        "progress": process.report_progress_regularly,
        "statistics log": lambda: log_statistics_regularly(process),
        "loop lag": partial(process.observer.loop_lag.measure, process.pace.late),
        "spare workers": spares.serve,
    }
    holds = tasks.create_task(process.admission.holds.run(), name="holds")
    return [holds, *(keep_running(tasks, name, run) for name, run in loops.items())]


def keep_running(
    tasks: asyncio.TaskGroup, name: str, run: Callable[[], Awaitable[None]]
) -> asyncio.Task[None]:
    """Start a background loop as a task. If it raises, it is restarted with backoff."""
    return tasks.create_task(Retries(name.replace(" ", "_")).keep_running(run), name=name)


def open_pools(settings: Settings, gate: StoreGate) -> list[AsyncEngine]:
    """Create the connection pools for requests, keys, reports and administration.

    They are separate so that none of these has to wait for another.
    """
    return [
        create_engine(settings.database_url, pool_size=pool_size, gate=gate)
        for pool_size in (
            settings.database_connections_max,
            KEY_CONNECTIONS,
            settings.report_connections_max,
            settings.admin_connections_max,
        )
    ]


def build_servicers(
    settings: Settings,
    process: RequestRegistry,
    authenticator: Authenticator,
    sessions: Sessions,
    admin_sessions: Sessions,
    reports: Reports,
    signer: Signer | None,
    issuer: Issuer,
) -> Servicers:
    """Build the gRPC services for clients."""
    admin = AdminServicer(
        process.router,
        authenticator,
        admin_sessions,
        settings.database_url,
        signer,
        issuer,
        in_thread=process.in_thread,
        private_webhooks=settings.private_webhooks,
    )
    return Servicers(
        InferenceServicer(process, authenticator, sessions),
        admin,
        BillingServicer(authenticator, admin_sessions, reports, issuer),
        ReceiptServicer(authenticator, reports),
    )


async def serve(settings: Settings, spares: SpareWorkers | None = None) -> None:
    """Run one api process until SIGTERM or SIGINT. `spares` may already have a worker.

    Raises: SettingInvalid, CheckpointInvalid, AddressUnavailable.
    """
    process_id = uuid.uuid4()
    tls, safety, issuer = open_tls(settings), build_safety(settings), settings.issuer()
    make_private(settings.home)
    check_locks(settings.journal_directory)
    spares = spares or SpareWorkers()
    spares.count = settings.spare_workers
    serving = build_serving(settings, spares.open)
    router = Router(serving.engines, serving.encoders, serving.catalog, serving.encoder_catalog)
    tokenizers = load_tokenizers(router, settings)
    gate, signer = StoreGate(), open_signer(settings)
    await recover(settings, gate, signer)
    use_signer(signer)
    stopping = asyncio.Event()
    store, key_store, report_store, admin_store = pools = open_pools(settings, gate)
    sessions, admin_sessions = create_sessions(store), create_sessions(admin_store)
    await warn_of_undurable_server(admin_sessions)
    reports = Reports(create_sessions(report_store), settings.report_connections_max)
    journal, notices = UsageJournal(settings.journal_directory, process_id), UsageNotices(sessions)
    spans = open_spans(process_id)
    observer = Observer((model.name for model in router.models()), spans)
    holds = open_holds(settings, journal, gate, signer, notices, observer)
    capacity, health = Capacity(settings.requests_per_process_max), Health()
    uses = KeyUses(sessions, settings.key_use_interval_s, boot_time_s)
    pace = RateLimiter(settings.frames_share_max)
    authenticator = open_authenticator(settings, create_lookups(key_store), uses, pace)
    async with IncidentTaskGroup() as tasks:
        identity = make_identity(process_id)
        relays = Relays(sessions, process_id, tasks, identity)
        admission = Admission(settings, capacity, holds, journal, tasks)
        process = RequestRegistry(
            admission, router, tokenizers, safety.checker, relays, observer, pace
        )
        servicers = build_servicers(
            settings, process, authenticator, sessions, admin_sessions, reports, signer, issuer
        )
        for_peers = InferenceServicer(process, authenticator, sessions, for_peers=True)
        accepted = PeerCertificates(identity)
        peer_server, peer = build_peer_server(settings, for_peers, identity, accepted)
        server, port = build_server(
            settings,
            servicers,
            health,
            tls,
            observer.call_failed,
            pace,
            authenticator.share_to_read,
            process.in_thread,
        )
        watch = observer.loop_lag.watch
        watch.start()
        probes, backlog_reader = Probes(health, watch), BacklogReader(admin_sessions)
        listener = Listener(
            http_handle(settings, process, authenticator, sessions, servicers, probes),
            settings,
            tls,
            lambda: process.is_draining,
        )
        url = openai_url(settings, listener, tls)
        warn_of_open_metrics(settings)
        metrics = MetricsListener(settings.metrics_address(), settings.metrics_port_count)
        parts = Parts(
            process,
            authenticator,
            servicers.inference.open_streams,
            for_peers.open_streams,
            listener.connection_count,
        )
        address, with_tls = settings.listen_address, tls is not None
        urls = {
            "openai_url": url,
            "console_url": console_url(settings, url),
            "metrics_url": metrics.url,
        }
        endpoint = Endpoint(settings.home, address, port, tls=with_tls, urls=urls)
        serve_engines(router, tasks)
        control = open_control(settings, process_id, peer, accepted, process, authenticator)
        background = in_background(
            tasks,
            process,
            control,
            notices,
            uses,
            spares,
            partial(recover_regularly, settings, gate, signer),
        )
        if safety.classifiers is not None:
            background.append(keep_running(tasks, "classifiers", safety.classifiers.serve))
            await start_classifiers(safety.classifiers)
        # These objects live until the end: a full collection of them would stop all streams for 5
        # ms.
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        listeners = Listeners(server, peer_server, listener, metrics)
        await listeners.open(probes.before(Scrapes(parts, backlog_reader).handle, with_parts=True))
        background.append(
            keep_running(tasks, "books", lambda: backlog_reader.watch_workers(health))
        )
        health_task = tasks.create_task(
            keep_health(health, endpoint, router, holds, journal, settings, stopping), name="health"
        )
        log.info(
            "listening", address=address, port=port, tls=with_tls, models=sorted(tokenizers), **urls
        )
        with stop_signals(stopping):
            await stopping.wait()
        log.info("draining", running_request_count=capacity.taken_count)
        await health_task
        await drain(settings, capacity, process, server, listener)
        await relays.close()
        await peer_server.stop(grace=1.0)
        await holds.release_preauthorized()
        await listeners.close(router)
        for task in background:
            task.cancel()
    watch.stop()
    await uses.write()
    journal.close()
    if spans is not None:
        await asyncio.to_thread(spans.close)
    for pool in pools:
        await pool.dispose()
    log.info("stopped")


def run(
    runner: asyncio.Runner, spares: SpareWorkers, environment: Mapping[str, str] = os.environ
) -> None:
    """Run one api process. If its configuration is wrong, print why and exit with NOT_STARTED."""
    configure_logs(environment.get("WEIR_LOG", "info"))
    try:
        settings = Settings.from_environment(environment)
        allow_open_files(settings)
        return_freed_memory()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        runner.run(serve(settings, spares))
    except (BaseExceptionGroup, *NOT_STARTED_BY) as error:
        cause = sole_cause(error)
        if not isinstance(cause, NOT_STARTED_BY):
            raise cause from None
        print(cause, file=sys.stderr)
        sys.exit(NOT_STARTED)
