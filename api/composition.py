"""Construction of the parts of an api process from its settings; system limits, logging and drain.

`serving.py` puts the parts together.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import logging
import os
import resource
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

import grpc.aio
import structlog

from api.access.auth import Authenticator
from api.access.throttle import SharedFailures
from api.access.tls import Tls
from api.console.console import ROOT, Console
from api.core.addresses import Proxies
from api.core.endpoint import local_url
from api.core.errors import Draining
from api.core.rate_limiter import RateLimiter
from api.core.settings import Settings
from api.generation.request import control
from api.generation.request.admission import Capacity
from api.generation.request.peers import Peer, PeerCertificates
from api.generation.request.registry import RequestRegistry
from api.metrics.operator_http import Probes
from api.observability.observer import Observer
from api.observability.spans import Spans
from api.openai.gateway import Gateway
from api.openai.listener import Handle, Listener, paced
from api.server import Servicers
from common.settings import SettingInvalid
from inference.routing.router import Router
from inference.safety.safety import SafetyRulesInvalid
from inference.safety.safety_file import Safety, read_safety
from inference.text.tokenizer import Tokenizer
from metering.control.control_channel import ControlChannel
from metering.core.errors import InvalidValue
from metering.holds.holds import HoldStore
from metering.holds.journal import UsageJournal
from metering.holds.preauthorized_holds import GraceTerms
from metering.holds.usage_notices import UsageNotices
from metering.receipts.signing import Signer, load_signer
from metering.store.db import Sessions, StoreGate
from metering.tenants.key_uses import KeyUses

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
# Files other than client connections: journals, libraries, pipes, database, other processes.
OTHER_FILES = 1000
LARGE_BYTES = 64 * 2**10  # a piece of a message; other allocations of a request are far smaller
ARENAS_MAX = 2  # transport threads allocate pieces of messages and free those of other threads

log = structlog.get_logger(__name__)

INTERVAL_S = 60.0  # sufficient for graphs; a day of it is less than the log of a busy second
SETTLE_GRACE_S = 10.0  # after the drain timeout, for settlements


class Unfailing(io.TextIOBase):
    """Text stream that ignores failed writes, so that a full disk does not break logged work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure_logs(level: str) -> None:
    """Log events of this level and above, as text on a terminal and as JSON elsewhere."""
    minimum = LEVELS.get(level.lower(), logging.INFO)
    on_terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer()
        if on_terminal
        else structlog.processors.JSONRenderer(sort_keys=True)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if on_terminal else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(minimum),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Unfailing(sys.stderr))),
    )
    logging.basicConfig(
        level=max(minimum, logging.WARNING),
        format="%(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )


# Parameters of mallopt in the GNU C library's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


def allow_open_files(settings: Settings) -> None:
    """Raise the soft limit of open files to what the connection limits require.

    Logs a warning if the system does not permit it.
    """
    required = settings.connections.count_max + settings.http.connections_max + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= required:
        return
    allowed = required if hard == resource.RLIM_INFINITY else min(required, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError) as error:  # macOS has another limit besides the one it reports
        log.warning("open_files_not_raised", open_file_count_max=soft, cause=str(error))
        return
    if allowed < required:
        remedy = (
            "let the system allow more, or lower WEIR_CONNECTIONS_MAX and WEIR_HTTP_CONNECTIONS_MAX"
        )
        log.warning(
            "open_files_too_few", open_file_count_max=allowed, required=required, remedy=remedy
        )


def return_freed_memory() -> None:
    """Configure glibc to return large free blocks to the operating system at once.

    By default it raises its threshold with each large block that is freed, up to 32 MiB, and keeps
    the memory of a burst of large messages. Does nothing with other C libraries.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(M_ARENA_MAX, ARENAS_MAX)
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)


def statistics_of(process: RequestRegistry) -> dict[str, Any]:
    """Collect the statistics for the log: admissions, refusals by limit (`dimension/subject`),
    queues with their expected waits, and replicas.
    """
    refusals = process.admission.holds.statistics().refusals
    return {
        "admitted_count": process.admission.admitted_count,
        "quota_refusals": {
            f"{dimension}/{subject}": count
            for (dimension, subject), count in sorted(refusals.items())
        },
        "live_request_count": len(process.running()),
        "queues": {
            model: {
                "waiting_count": queue.waiting_count,
                "waiting_count_peak": queue.waiting_count_peak,
                "refused_count": queue.refused_count,
                "reservation_count": queue.reservation_count,
                "engine_pending_count": queue.engine_pending_count,
                "longest_wait_s": (
                    None if queue.longest_wait_s is None else round(queue.longest_wait_s, 3)
                ),
            }
            for model, queue in (
                (model, queue.statistics()) for model, queue in process.queues.items()
            )
        },
        "replicas": {
            report.name: {
                "state": report.state.value,
                "live_sequence_count": report.live_sequence_count,
            }
            for _, report in process.router.reports()
        },
    }


async def log_statistics_regularly(
    process: RequestRegistry, interval_s: float = INTERVAL_S
) -> None:
    """Log the statistics every `interval_s` seconds if they have changed. Runs until cancelled."""
    before: dict[str, Any] = {}
    while True:
        await asyncio.sleep(interval_s)
        now = statistics_of(process)
        if now != before:
            log.info("admission_statistics", **now)
        before = now


async def drain(
    settings: Settings,
    capacity: Capacity,
    process: RequestRegistry,
    server: grpc.aio.Server,
    listener: Listener,
) -> None:
    """Refuse new requests, wait up to `drain_s` for running ones, then end and settle the rest."""
    capacity.drain()
    async with asyncio.TaskGroup() as tasks:
        closing = tasks.create_task(close_listeners(settings, server, listener), name="closing")
        await finish(settings, capacity, process)
        closing.cancel()


async def close_listeners(settings: Settings, server: grpc.aio.Server, listener: Listener) -> None:
    """Stop accepting connections and calls, after `drain_notice_s` for clients to move elsewhere.

    Open streams continue, but new requests on them are refused.
    """
    await asyncio.sleep(settings.drain.notice_s)
    listener.stop_accepting()
    await server.stop(grace=settings.drain.timeout_s + SETTLE_GRACE_S)


async def finish(settings: Settings, capacity: Capacity, process: RequestRegistry) -> None:
    """Wait up to `drain_s` for running requests, then end those that still run."""
    try:
        async with asyncio.timeout(settings.drain.timeout_s):
            await capacity.idle()
            if process.relays is not None:
                await process.relays.idle()
    except TimeoutError:
        log.warning("drain_time_over", running_request_count=capacity.taken_count)
        process.fail_all(
            Draining(
                "the server shut down before the request was done; delivered tokens are settled"
            )
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_GRACE_S):
                await capacity.idle()


@contextlib.contextmanager
def stop_signals(stopping: asyncio.Event) -> Iterator[None]:
    """Set `stopping` on SIGTERM or SIGINT for the duration of the block."""
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stopping.set)
    yield
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(signal_number)


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


def load_tokenizers(router: Router, settings: Settings) -> dict[str, Tokenizer]:
    """Load the tokenizer of each model. Raises: SettingInvalid, CheckpointInvalid."""
    directories = {
        backend.model.name: Path(backend.model.directory) for backend in router.backends()
    }
    formats = settings.models.tool_call_formats
    if unknown := sorted(formats.keys() - directories.keys()):
        raise SettingInvalid(
            f"WEIR_TOOL_CALL_FORMATS: no model is named {', '.join(unknown)}; known are"
            f" {', '.join(directories)}"
        )
    tokenizers = {
        name: Tokenizer(directory, formats.get(name)) for name, directory in directories.items()
    }
    for backend in router.backends():
        tokenizer = tokenizers[backend.model.name]
        tokenizer.check_fits(backend.model.vocabulary_size)
        if faults := tokenizer.template_faults():
            log.warning("chat_template_refuses", model=backend.model.name, conversations=faults)
    return tokenizers


def open_signer(settings: Settings) -> Signer | None:
    """Load the signer of receipts; None if no key is configured. Raises: SettingInvalid."""
    try:
        signer = load_signer(settings.to_environment())
    except InvalidValue as error:
        raise SettingInvalid(str(error)) from error
    log.info("receipts_signed", key_id=signer.key_id) if signer else log.info("receipts_not_signed")
    return signer


def open_holds(
    settings: Settings,
    journal: UsageJournal,
    gate: StoreGate,
    signer: Signer | None,
    notices: UsageNotices,
    observer: Observer,
) -> HoldStore:
    """Create the hold store, with the configured policy for an unavailable database."""
    terms = GraceTerms(
        settings.database.grace_holds_per_key,
        settings.database.grace_input_tokens,
        settings.leases.slice_tokens,
    )
    return HoldStore(
        settings.database.url,
        journal.process_id,
        expiry_s=settings.leases.expiry_s,
        answer_wait_s=settings.database.timeout_s,
        gate=gate,
        grace=(terms, journal.bindings)
        if settings.database.unavailable_policy == "grace"
        else None,
        signer=signer,
        used=notices.used,
        measured=observer.batches.measured,
    )


def open_authenticator(
    settings: Settings, sessions: Sessions, uses: KeyUses, pace: RateLimiter
) -> Authenticator:
    """Create the authenticator, with the configured policy for an unavailable database.

    `uses` records each use of a key. `pace` limits the calls of each key.
    """
    grace_s = settings.leases.expiry_s if settings.database.unavailable_policy == "grace" else 0.0
    return Authenticator(
        sessions,
        answer_wait_s=settings.database.timeout_s,
        grace_s=grace_s,
        failures_per_minute=settings.access.failures_per_minute,
        used=uses.note,
        proxies=Proxies(settings.access.proxy_networks()),
        pace=pace,
    )


def open_control(
    settings: Settings,
    process_id: uuid.UUID,
    peer: Peer,
    accepted: PeerCertificates,
    process: RequestRegistry,
    authenticator: Authenticator,
) -> ControlChannel:
    """Create the channel on which other processes cancel requests here and ask what is running."""
    return ControlChannel(
        settings.database.url,
        process_id,
        control.process_name(),
        peer=(peer.address, peer.certificate),
        peers=accepted.replace,
        stop=lambda command: control.apply_command(process, authenticator, command),
        report=lambda: control.report(process),
        drain=lambda commands: control.apply_drains(process, commands),
        report_replicas=lambda: control.report_replicas(process),
        broadcaster=SharedFailures(authenticator.throttle, process_id),
    )


def openai_url(settings: Settings, listener: Listener, tls: Tls | None) -> str:
    """Bind the HTTP listener and return its base URL; empty if it is off. Raises: OSError."""
    address = settings.listen.openai_address()
    return (
        ""
        if address is None
        else local_url(address[0], listener.bind(address), "/v1", tls=tls is not None)
    )


def http_handle(
    settings: Settings,
    process: RequestRegistry,
    authenticator: Authenticator,
    sessions: Sessions,
    servicers: Servicers,
    probes: Probes,
) -> Handle:
    """Create the handler of the HTTP port: health checks, the API and, if on, the console."""
    gateway = Gateway(process, authenticator, sessions).handle
    if not settings.listen.console:
        return probes.before(paced(gateway, process.pace))
    console = Console(
        servicers,
        authenticator,
        gateway,
        observer=process.observer,
        stall_max_s=settings.delivery.stall_max_s,
    )
    return probes.before(paced(console.handle, process.pace))


def console_url(settings: Settings, openai_url: str) -> str:
    """Return the URL of the console for browsers on this machine; empty if the console is off."""
    return (
        f"{openai_url.removesuffix('/v1')}{ROOT}/" if openai_url and settings.listen.console else ""
    )


def open_spans(process_id: uuid.UUID, environment: Mapping[str, str] = os.environ) -> Spans | None:
    """Create the exporter of OpenTelemetry spans. Returns None if no variable names a collector.

    `process_id` identifies this process, as in holds. Raises: SettingInvalid.
    """
    named = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    is_off = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environment.get("OTEL_TRACES_EXPORTER") == "none"
    )
    if not named or is_off:
        return None
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if environment.get(variable, "grpc") not in ("", "grpc"):
            raise SettingInvalid(
                f"{variable}={environment[variable]!r}: must be grpc, which collectors take on port"
                " 4317"
            )
    try:
        from api.observability.otlp import OtlpSender
    except ModuleNotFoundError as missing:
        remedy = "in a clone of the repository: pip install -e sdk/python -e '.[otel]'"
        raise SettingInvalid(
            f"OTEL_EXPORTER_OTLP_ENDPOINT={named!r} needs the package {missing.name}, {remedy}"
        ) from missing
    log.info("spans_sent", endpoint=named)
    return Spans(OtlpSender(process_id))
