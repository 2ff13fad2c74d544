"""An api process: opens database, engines and listeners, serves, and drains on SIGTERM.

All background work is a task of the `IncidentTaskGroup` here, or of a stream's group.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import structlog

from api.access.auth import Authenticator
from api.access.issuer_keys import IssuerKeys
from api.access.issuers import TokenVerifier
from api.access.providers import SignInFile, read_sign_in
from api.access.servicer import Reports
from api.access.throttle import SharedFailures
from api.access.tls import Tls, open_tls
from api.access.token_callers import TokenCallers
from api.admin.admin_service import Addresses, AdminServicer
from api.admin.billing_service import BillingServicer, HashedReceiptServicer, ReceiptServicer
from api.console.console import ROOT, Console
from api.console.sign_in import SignIn
from api.core.addresses import Proxies, is_local
from api.core.endpoint import NOT_STARTED, AddressUnavailable, Endpoint, local_url, make_private
from api.core.errors import Draining
from api.core.health import Health, keep_health
from api.core.interceptor import Guard
from api.core.rate_limiter import RateLimiter
from api.core.settings import ListenSettings, Settings
from api.core.statuses import link_to_docs
from api.core.wire import use_signer
from api.fleet.launching import Launching
from api.fleet.running_fleet import RunningFleet
from api.generation.request import control
from api.generation.request.admission import Admission, Capacity
from api.generation.request.peers import Identity, Peer, PeerCertificates, make_identity
from api.generation.request.queue_exchange import QueueExchange
from api.generation.request.registry import RequestRegistry
from api.generation.request.relay import Relays
from api.keda.external_scaler import ExternalScaler
from api.metrics.operator_http import (
    BacklogReader,
    MetricsListener,
    MetricsSource,
    Parts,
    Probes,
    Scrapes,
)
from api.observability.collector import collector_of
from api.observability.observer import Observer
from api.observability.spans import Spans
from api.observability.traffic import TrafficRecorder
from api.openai.gateway import Gateway
from api.openai.listener import Handle, Listener, paced
from api.process import (
    allow_open_files,
    configure_logs,
    log_statistics_regularly,
    return_freed_memory,
    stop_signals,
)
from api.rpc.inference_service import InferenceServicer
from api.rpc.open_streams import BoundedCalls
from api.scim.service import Scim
from api.server import Servicers, build_keda_server, build_peer_server, build_server
from common.incidents import IncidentTaskGroup, Retries, sole_cause
from common.settings import SettingInvalid
from inference.errors import CheckpointInvalid
from inference.routing.shared_prefixes import SharedPrefixes
from inference.safety.classifiers import ClassifierProcess
from inference.safety.safety import SafetyRulesInvalid
from inference.safety.safety_file import Safety, read_safety
from inference.workers.process import SpareWorkers
from metering.control.control_channel import FAILURES, PREFIXES, ControlChannel
from metering.control.fleet_versions import read_newest
from metering.control.live import model_load
from metering.core.errors import DatabaseUnavailable, InvalidValue
from metering.holds.holds import HoldStore
from metering.holds.journal import UsageJournal, check_locks
from metering.holds.lease_clock import boot_time_s
from metering.holds.preauthorized_holds import GraceTerms
from metering.holds.recovery import recover_journals
from metering.holds.usage_notices import UsageNotices
from metering.quotas.quota_preview import Slices
from metering.receipts.signing import Signer, load_signer
from metering.store.db import (
    Sessions,
    StoreGate,
    create_engine,
    create_lookups,
    create_sessions,
    undurable_settings,
)
from metering.tenants.key_uses import KeyUses

if TYPE_CHECKING:
    from api.metrics.otlp import OtlpExport

KEY_CONNECTIONS = 2  # separate from those of reports: a key lookup takes a millisecond
# Thresholds of garbage collection. Requests leave no garbage and gRPC little, but a collection
# walks all new objects and stops all streams: 0.2 ms for 10,000. With fewer it would walk the
# objects of running requests.
COLLECT_AFTER = 10_000, 3, 200

# Seconds that a thread rendering a prompt may delay the event loop by Python's lock: a tenth of the
# default.
SWITCH_INTERVAL_S = 0.0005
NOT_STARTED_BY = (SettingInvalid, CheckpointInvalid, AddressUnavailable)
SETTLE_GRACE_S = 10.0  # after the drain timeout, for settlements

log = structlog.get_logger(__name__)


class Server:
    """Api process. `run` opens it, serves until SIGTERM or SIGINT, drains, and closes.

    Parts are opened in the order in which they need each other. The steps that close them are put
    on one stack and run in reverse, even if a later part cannot be opened.
    """

    def __init__(self, settings: Settings, spares: SpareWorkers | None = None) -> None:
        """`spares` may already have a worker."""
        self.settings = settings
        is_local = settings.listen.is_local and not settings.access.trusted_proxies
        link_to_docs(settings.listen.docs, local=is_local)
        self.process_id = uuid.uuid4()
        self.stopping = asyncio.Event()
        self.gate = StoreGate()
        self.health = Health()
        self._spares = spares or SpareWorkers()
        self._opened = contextlib.AsyncExitStack()
        self.background: list[asyncio.Task[None]] = []
        self.console_url = ""  # for persons, perhaps through a proxy

    async def run(self) -> None:
        """Open the process, serve until a signal, drain and close.

        Raises: SettingInvalid, CheckpointInvalid, AddressUnavailable.
        """
        async with self._opened:
            await self.open()
            with stop_signals(self.stopping):
                await self.stopping.wait()
            await self.drain()
        log.info("stopped")

    async def open(self) -> None:
        """Read the files, connect to the database, start the engines, and listen.

        Raises: SettingInvalid, CheckpointInvalid, AddressUnavailable.
        """
        settings = self.settings
        tls, safety = open_tls(settings), build_safety(settings)
        self.issuer = settings.issuer.build()
        make_private(settings.home)
        check_locks(settings.journal_directory)
        self._spares.count = settings.replicas.spare_workers
        stored = await read_newest(settings.database.url)
        self.fleet = RunningFleet(settings, self._spares.open, stored)
        self.router, tokenizers = self.fleet.router, self.fleet.serving.tokenizers
        self.launching = Launching(settings.database.url, self.process_id)
        self.signer = open_signer(settings)
        await self._recover()
        use_signer(self.signer)
        await self._open_store()
        self.tasks = await self._opened.enter_async_context(IncidentTaskGroup())
        identity = make_identity(self.process_id)
        self.relays = Relays(self.sessions, self.process_id, self.tasks, identity)
        self.capacity = Capacity(settings.requests.per_process_max)
        admission = Admission(settings, self.capacity, self.holds, self.journal, self.tasks)
        self.registry = RequestRegistry(
            admission,
            self.router,
            tokenizers,
            safety.checker,
            self.relays,
            self.observer,
            self.pace,
        )
        live = partial(control.live_phases, self.registry)
        self.traffic = TrafficRecorder(self.admin_sessions, self.observer.counts, live)
        self._opened.push_async_callback(self.traffic.write)
        self.exchange = QueueExchange(settings.database.url, self.process_id)
        self.registry.queues_changed = self._share_queues
        self._share_queues()
        self._bind(tls, identity)
        self.fleet.begin(self.tasks, self.registry, self.admin_sessions, self.launching)
        self.start_loops()
        if safety.classifiers is not None:
            self._keep_running("classifiers", safety.classifiers.serve)
            await start_classifiers(safety.classifiers)
        # These objects live until the end: a full collection of them would stop all streams for 5
        # ms.
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        await self._listen(sorted(tokenizers))

    async def _open_store(self) -> None:
        """Open the connection pools, the journal and the hold store.

        Requests, keys, reports and administration have a pool each, so that none waits for another.
        """
        settings, database = self.settings, self.settings.database
        pools = [
            create_engine(database.url, pool_size=pool_size, gate=self.gate)
            for pool_size in (
                database.connections_max,
                KEY_CONNECTIONS,
                database.report_connections_max,
                database.admin_connections_max,
            )
        ]
        for pool in reversed(pools):
            self._opened.push_async_callback(pool.dispose)
        store, key_store, report_store, admin_store = pools
        self.sessions = create_sessions(store)
        self.admin_sessions = create_sessions(admin_store, region=database.region)
        await warn_of_undurable_server(self.admin_sessions)
        self.reports = Reports(create_sessions(report_store), database.report_connections_max)
        spans = open_spans(self.process_id)
        self.metrics_export = open_metrics_export(self.process_id)
        if spans is not None:
            self._opened.push_async_callback(asyncio.to_thread, spans.close)
        self.journal = UsageJournal(settings.journal_directory, self.process_id)
        self._opened.callback(self.journal.close)
        self.notices = UsageNotices(self.sessions)
        self.uses = KeyUses(self.sessions, settings.access.key_use_interval_s, boot_time_s)
        self._opened.push_async_callback(self.uses.write)
        self.observer = Observer((model.name for model in self.router.models()), spans)
        self._opened.callback(self.observer.loop_lag.watch.stop)
        self.observer.loop_lag.watch.start()
        self.holds = self._open_holds()
        self.pace = RateLimiter(settings.messages.frames_share_max)
        self.issuer_keys = IssuerKeys(private=settings.access.private_issuers)
        self.authenticator = Authenticator(
            create_lookups(key_store),
            answer_wait_s=database.timeout_s,
            grace_s=settings.leases.expiry_s if database.unavailable_policy == "grace" else 0.0,
            failures_per_minute=settings.access.failures_per_minute,
            used=self.uses.note,
            proxies=Proxies(settings.access.proxy_networks()),
            pace=self.pace,
            tokens=TokenCallers(TokenVerifier(self.issuer_keys)),
            region=settings.models.region,
        )

    def _open_holds(self) -> HoldStore:
        """Create the hold store, with the configured policy for an unavailable database."""
        settings, database = self.settings, self.settings.database
        terms = GraceTerms(
            database.grace_holds_per_key,
            database.grace_input_tokens,
            settings.leases.slice_tokens,
        )
        return HoldStore(
            database.url,
            self.process_id,
            expiry_s=settings.leases.expiry_s,
            answer_wait_s=database.timeout_s,
            gate=self.gate,
            grace=(terms, self.journal.bindings)
            if database.unavailable_policy == "grace"
            else None,
            signer=self.signer,
            used=self.notices.used,
            measured=self.observer.batches.measured,
            end_users_max=database.end_users_max,
        )

    def _share_queues(self) -> None:
        """Exchange reports of the queues before engines that other processes use too."""
        if self.settings.queue.order == "fair":
            self.exchange.become(self.registry.shared_queues())

    def _bind(self, tls: Tls | None, identity: Identity) -> None:
        """Build the services and bind the ports, without accepting connections."""
        settings, registry, authenticator = self.settings, self.registry, self.authenticator
        for_peers = InferenceServicer(
            registry, authenticator, self.sessions, self.reports, for_peers=True
        )
        accepted = PeerCertificates(identity)
        self.peer_server, peer = build_peer_server(settings, for_peers, identity, accepted)
        servicers = self._servicers()
        calls = BoundedCalls(authenticator.share_to_read, registry.in_thread)
        guard = Guard(self.observer.call_failed, self.pace)
        self.server, port = build_server(settings, servicers, self.health, tls, calls, guard)
        self.keda = self._bind_keda()
        self.probes = Probes(self.health, self.observer.loop_lag.watch)
        name = settings.access.sign_in_file
        providers = read_sign_in(Path(name)) if name else SignInFile()
        self.sign_in = SignIn(providers, self.admin_sessions, authenticator, tls=tls is not None)
        self.listener = Listener(
            self._http_handle(servicers), settings, tls, lambda: registry.is_draining
        )
        listen = settings.listen
        url = openai_url(listen, self.listener, tls)
        warn_of_open_metrics(listen)
        self.metrics = MetricsListener(listen.metrics_address(), listen.metrics_port_count)
        local = f"{url.removesuffix('/v1')}{ROOT}/" if url and listen.console else ""
        self.console_url = local and (providers.url or local)
        urls = {
            "openai_url": url,
            "console_url": local,
            "metrics_url": self.metrics.url,
        }
        with_tls = tls is not None
        self.endpoint = Endpoint(settings.home, listen.address, port, tls=with_tls, urls=urls)
        self._listening = {"address": listen.address, "port": port, "tls": with_tls, **urls}
        if self.keda is not None:
            self._listening["keda_port"] = self.keda[1]
        self.parts = Parts(
            registry,
            authenticator,
            servicers.inference.open_streams,
            for_peers.open_streams,
            self.listener.connection_count,
            self.launching.counts,
        )
        self.control = self._open_control(peer, accepted)
        self.control.on_weights = registry.set_weights

    def _bind_keda(self) -> tuple[grpc.aio.Server, int] | None:
        """Bind the port of KEDA's external scaler; None if it is off."""
        warn_of_open_scaler(self.settings)
        load = partial(model_load, self.admin_sessions)
        return build_keda_server(self.settings, ExternalScaler(self.router, load))

    def _servicers(self) -> Servicers:
        """Build the gRPC services for clients."""
        leases = self.settings.leases
        admin = AdminServicer(
            self.router,
            self.authenticator,
            self.admin_sessions,
            self.settings.database.url,
            self.signer,
            self.issuer,
            fleet=self.fleet,
            in_thread=self.registry.in_thread,
            addresses=Addresses(
                self.settings.private_webhooks,
                self.settings.access.private_issuers,
                lambda: self.console_url,
            ),
            slices=Slices(leases.slice_tokens, leases.min_tokens),
        )
        is_hashed = self.settings.receipt_subjects == "hashed"
        receipts = HashedReceiptServicer if is_hashed else ReceiptServicer
        return Servicers(
            InferenceServicer(self.registry, self.authenticator, self.sessions, self.reports),
            admin,
            BillingServicer(self.authenticator, self.admin_sessions, self.reports, self.issuer),
            receipts(self.authenticator, self.reports),
        )

    def _http_handle(self, servicers: Servicers) -> Handle:
        """Create the handler of the HTTP port: health checks, the API, SCIM, and the console."""
        handle = Gateway(self.registry, self.authenticator, self.sessions).handle
        if self.settings.listen.console:
            handle = Console(
                servicers,
                self.authenticator,
                handle,
                sign_in=self.sign_in,
                observer=self.observer,
                stall_max_s=self.settings.delivery.stall_max_s,
            ).handle
        scim = Scim(
            self.authenticator,
            self.admin_sessions,
            handle,
            observer=self.observer,
            url=self.sign_in.server_url,
        )
        return self.probes.before(paced(scim.handle, self.pace))

    def _open_control(self, peer: Peer, accepted: PeerCertificates) -> ControlChannel:
        """Create the channel on which other processes cancel requests here and ask what runs."""
        registry = self.registry

        def noting(certificates: Sequence[str]) -> None:
            accepted.replace(certificates)
            self.exchange.note_processes(len(certificates))
            prefixes.process_count = len(certificates)

        failures = SharedFailures(self.authenticator.throttle, self.process_id)
        prefixes = SharedPrefixes(registry.router, self.process_id)
        channel = ControlChannel(
            self.settings.database.url,
            self.process_id,
            control.process_name(),
            peer=(peer.address, peer.certificate),
            peers=noting,
            stop=lambda command: control.apply_command(registry, self.authenticator, command),
            report=lambda: control.report(registry),
            drain=lambda commands: control.apply_drains(registry, commands),
            report_replicas=lambda: control.report_replicas(registry),
            broadcasters={FAILURES: failures, PREFIXES: prefixes},
        )
        channel.fleet = self.fleet
        channel.launches_changed = self.launching.wake
        return channel

    def start_loops(self) -> None:
        """Start the background loops."""
        self.background.append(self.tasks.create_task(self.holds.run(), name="holds"))
        self._keep_running("control channel", self.control.run)
        self._keep_running("launching", self.launching.run)
        self._keep_running("queue exchange", self.exchange.run)
        self._keep_running("fleet changes", self.fleet.run)
        self._keep_running("target names", self.fleet.follow_names)
        self._keep_running("usage notices", self.notices.run)
        self._keep_running("key uses", self.uses.run)
        self._keep_running("issuer keys", self.issuer_keys.run)
        self._keep_running("provider keys", self.sign_in.client.keys.run)
        self._keep_running("recovery", self.recover_regularly)
        self._keep_running("traffic", self.traffic.run)
        self._keep_running("progress", self.registry.report_progress_regularly)
        self._keep_running("statistics log", partial(log_statistics_regularly, self.registry))
        self._keep_running("loop lag", partial(self.observer.loop_lag.measure, self.pace.late))
        self._keep_running("spare workers", self._spares.serve)

    def _keep_running(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Start a background loop as a task. If it raises, it is restarted with backoff."""
        retries = Retries(name.replace(" ", "_"))
        self.background.append(self.tasks.create_task(retries.keep_running(run), name=name))

    async def _recover(self) -> None:
        """Recover the journals of dead processes on this machine; later if the database is away."""
        directory, url = self.settings.journal_directory, self.settings.database.url
        try:
            await recover_journals(directory, url, self.gate, self.signer)
        except (DatabaseUnavailable, OSError) as away:
            log.warning("recovery_delayed", cause=str(away).strip())

    async def recover_regularly(self) -> None:
        """Recover journals now, and then every `recovery_interval_s`."""
        while True:
            await self._recover()
            await asyncio.sleep(self.settings.leases.recovery_interval_s)

    async def _listen(self, models: list[str]) -> None:
        """Start accepting connections, last on the gRPC port."""
        backlog_reader = BacklogReader(self.admin_sessions)
        self.metrics_source = MetricsSource(self.parts, backlog_reader)
        scrapes = Scrapes(self.metrics_source)
        if self.metrics_export is not None:
            self.metrics_source.exports = self.metrics_export.exports
            export = partial(self.metrics_export.run, self.metrics_source)
            self._keep_running("metrics export", export)
        await self.peer_server.start()
        await self.listener.start()
        await self.metrics.start(self.probes.before(scrapes.handle, with_parts=True))
        await self.server.start()
        if self.keda is not None:
            await self.keda[0].start()
        self._keep_running("books", lambda: backlog_reader.watch_workers(self.health))
        health = keep_health(
            self.health,
            self.endpoint,
            self.router,
            self.holds,
            self.journal,
            self.settings.database,
            self.stopping,
        )
        self._health = self.tasks.create_task(health, name="health")
        self._opened.push_async_callback(self._close)
        log.info("listening", models=models, **self._listening)

    async def drain(self) -> None:
        """Refuse new requests, wait for running ones, then end and settle the rest.

        Lasts for the notice even without requests: a balancer that has not noticed yet would send
        one on a connection that closes, and could not know whether it ran.
        """
        log.info("draining", running_request_count=self.capacity.taken_count)
        await self._health
        self.capacity.drain()
        async with asyncio.TaskGroup() as tasks:
            notice = tasks.create_task(asyncio.sleep(self.settings.drain.notice_s), name="notice")
            closing = tasks.create_task(self._stop_accepting(notice), name="closing")
            await self._finish()
            await notice
            closing.cancel()

    async def _stop_accepting(self, notice: asyncio.Task[None]) -> None:
        """Stop accepting connections and calls, after a notice for clients to move elsewhere.

        Open streams continue, but new requests on them are refused.
        """
        await notice
        self.listener.stop_accepting()
        await self.server.stop(grace=self.settings.drain.timeout_s + SETTLE_GRACE_S)

    async def _finish(self) -> None:
        """Wait for running requests, then end those that still run."""
        try:
            async with asyncio.timeout(self.settings.drain.timeout_s):
                await self.capacity.idle()
                await self.relays.idle()
        except TimeoutError:
            log.warning("drain_time_over", running_request_count=self.capacity.taken_count)
            self.registry.fail_all(Draining())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_GRACE_S):
                    await self.capacity.idle()

    async def _close(self) -> None:
        """Close the gRPC port, the engines, the HTTP port, and last the metrics port."""
        await self.relays.close()
        if self.keda is not None:
            await self.keda[0].stop(grace=0.0)
        await self.peer_server.stop(grace=1.0)
        await self.holds.release_preauthorized()
        await self.server.stop(grace=1.0)
        if self.metrics_export is not None:
            await self.metrics_export.close(self.metrics_source)
        await self.fleet.close()
        await self.launching.close()
        await self.listener.stop()
        await self.metrics.stop()
        for task in self.background:
            task.cancel()


async def start_classifiers(classifiers: ClassifierProcess) -> None:
    """Wait until the safety classifiers are loaded, before requests are admitted.

    Raises SettingInvalid if they cannot be loaded.
    """
    if (failure := await classifiers.loaded()) is not None:
        raise SettingInvalid(f"WEIR_SAFETY_RULES: {failure}")


async def warn_of_undurable_server(sessions: Sessions) -> None:
    """Log an error if the database server can lose commits in a crash, as those of tests can."""
    with contextlib.suppress(DatabaseUnavailable):
        if settings := await undurable_settings(sessions):
            log.error(
                "database_not_durable",
                off=settings,
                remedy="set them to on in postgresql.conf, and reload",
            )


def warn_of_open_metrics(listen: ListenSettings) -> None:
    """Log a warning if other machines can read the metrics, which need no key."""
    address = listen.metrics
    if address not in ("", "off") and not is_local(address):
        log.warning(
            "metrics_reachable_from_other_machines",
            address=address,
            remedy="metrics have neither TLS nor a key: let only collectors and probes reach this"
            " port, or set WEIR_METRICS_LISTEN to an address on 127.0.0.1",
        )


def warn_of_open_scaler(settings: Settings) -> None:
    """Log a warning if other machines can ask KEDA's external scaler without a certificate."""
    address = settings.listen.keda
    if address != "off" and not is_local(address) and not settings.listen.keda_client_ca:
        log.warning(
            "keda_port_reachable_from_other_machines",
            address=address,
            remedy="it tells how many requests of each model wait: let only KEDA's operator reach"
            " it, by a NetworkPolicy, or set WEIR_KEDA_CLIENT_CA",
        )


def build_safety(settings: Settings) -> Safety:
    """Read the safety rules.

    Without a file of rules, every text passes. Raises SettingInvalid, which names the file and the
    rule.
    """
    if not settings.models.safety_rules:
        return Safety()
    try:
        return read_safety(Path(settings.models.safety_rules))
    except SafetyRulesInvalid as error:
        raise SettingInvalid(f"WEIR_SAFETY_RULES: {error}") from error


def open_signer(settings: Settings) -> Signer | None:
    """Load the signer of receipts; None if no key is configured. Raises: SettingInvalid."""
    try:
        signer = load_signer(settings.to_environment())
    except InvalidValue as error:
        raise SettingInvalid(str(error)) from error
    log.info("receipts_signed", key_id=signer.key_id) if signer else log.info("receipts_not_signed")
    return signer


def openai_url(listen: ListenSettings, listener: Listener, tls: Tls | None) -> str:
    """Bind the HTTP listener and return its base URL; empty if it is off. Raises: OSError."""
    address = listen.openai_address()
    return (
        ""
        if address is None
        else local_url(address[0], listener.bind(address), "/v1", tls=tls is not None)
    )


def open_spans(process_id: uuid.UUID, environment: Mapping[str, str] = os.environ) -> Spans | None:
    """Create the exporter of OpenTelemetry spans. Returns None if no variable names a collector.

    `process_id` identifies this process, as in holds. Raises: SettingInvalid.
    """
    if not (named := collector_of("TRACES", environment)):
        return None
    with without_otel(named):
        from api.observability.otlp import OtlpSender
    log.info("spans_sent", endpoint=named)
    return Spans(OtlpSender(process_id))


def open_metrics_export(
    process_id: uuid.UUID, environment: Mapping[str, str] = os.environ
) -> OtlpExport | None:
    """Create the export of metrics by OTLP. Returns None if no variable names a collector.

    Raises: SettingInvalid.
    """
    if not (named := collector_of("METRICS", environment)):
        return None
    with without_otel(named):
        from api.metrics.otlp import ExportSettings, OtlpExport
    settings = ExportSettings.from_environment(environment)
    log.info("metrics_sent", endpoint=named)
    return OtlpExport(process_id, settings)


@contextlib.contextmanager
def without_otel(endpoint: str) -> Iterator[None]:
    """Turn a failed import of an optional package into an error that says what to install."""
    try:
        yield
    except ModuleNotFoundError as missing:
        remedy = "in a clone of the repository: pip install -e sdk/python -e '.[otel]'"
        raise SettingInvalid(
            f"OTEL_EXPORTER_OTLP_ENDPOINT={endpoint!r} needs the package {missing.name}, {remedy}"
        ) from missing


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
        runner.run(Server(settings, spares).run())
    except (BaseExceptionGroup, *NOT_STARTED_BY) as error:
        cause = sole_cause(error)
        if not isinstance(cause, NOT_STARTED_BY):
            raise cause from None
        print(cause, file=sys.stderr)
        sys.exit(NOT_STARTED)
