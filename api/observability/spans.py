"""Spans of ended requests, exported by OTLP: one trace per request, one span per stage.

A request leaves a small record in a bounded queue; a thread converts records to spans and sends
them. If the collector is slow or unavailable, traces are dropped and counted, and no request waits.
Records contain neither prompts nor output. This module owns the thread and the queue.

Disabled unless OpenTelemetry's own variables name a collector; then it needs the packages of the
extra `otel`.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog

from metering.holds.operations import Settled

# Stages of a request, in order. Repeated waits for an engine or a turn are added up.
STAGES = (
    "auth",
    "tokenize",
    "admission",
    "cold_start",
    "queue",
    "prefill",
    "decode",
    "client_stall",
    "settle",
)
# Version 00, the only defined one.
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)

# A member of a W3C trace state. Invalid text is not passed to a library that would log it with its
# line breaks.
MEMBER = re.compile(
    r"[a-z0-9][a-z0-9_*/@-]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]",
    re.ASCII,
)
TRACESTATE_CHARS_MAX = 512  # minimum that intermediaries must keep; longer values are dropped
RECORDS_MAX = 4096  # waiting requests, below a kilobyte each: some ten seconds of a busy process
BATCH_MAX = 64  # requests per message, of up to eleven spans each
INTERVAL_S = 1.0  # seconds that the last record waits for more
CLOSE_MAX_S = 5.0  # for sending waiting records at shutdown

log = structlog.get_logger(__name__)


class TraceContext(NamedTuple):
    """W3C trace context of a client. Both fields are empty if the client sent none."""

    traceparent: str = ""
    tracestate: str = ""


NO_TRACE = TraceContext()


def trace_of(traceparent: str | None, tracestate: str | None) -> TraceContext:
    """Parse a client's trace context. An invalid traceparent is ignored, as W3C requires."""
    if not traceparent or TRACEPARENT.fullmatch(traceparent) is None:
        return NO_TRACE
    return TraceContext(
        traceparent, tracestate if tracestate and _is_tracestate(tracestate) else ""
    )


def _is_tracestate(text: str) -> bool:
    if len(text) > TRACESTATE_CHARS_MAX:
        return False
    members = [member.strip(" \t") for member in text.split(",")]
    return all(not member or MEMBER.fullmatch(member) for member in members)


def trace_of_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> TraceContext:
    """Parse the trace context in the metadata of a gRPC call."""
    values = {
        key: value
        for key, value in metadata or ()
        if key in ("traceparent", "tracestate") and isinstance(value, str)
    }
    return trace_of(values.get("traceparent"), values.get("tracestate")) if values else NO_TRACE


@dataclass(slots=True)
class Record:
    """Ended request.

    `outcome` is set if it ran, `reason` if it was refused or failed. `ended_at_ns` is wall-clock
    time. `requested_model` is set if `model` was its fallback.
    """

    request_id: uuid.UUID
    organization_id: uuid.UUID
    project_id: uuid.UUID
    operation: str
    model: str
    tier: str
    outcome: str
    reason: str
    timings: Mapping[str, float]
    settled: Settled | None
    migration_count: int
    trace: TraceContext
    ended_at_ns: int
    end_user: str
    labels: Mapping[str, str]
    requested_model: str = ""


class SpanCounts(NamedTuple):
    """Numbers of traces since the start: sent, dropped because of the collector, and waiting."""

    sent: int
    dropped: int
    waiting: int


class Sender(Protocol):
    """Exporter that converts records to spans and sends them."""

    def send(self, records: list[Record]) -> bool:
        """Send the spans of these records, and return whether the collector accepted them.

        May block as long as the collector does. Never raises the collector's errors.
        """
        ...

    def close(self) -> None: ...


class Spans:
    """Queue of ended requests, with the thread that sends them as spans."""

    def __init__(self, sender: Sender, *, records_max: int = RECORDS_MAX) -> None:
        self._sender = sender
        self._records_max = records_max
        self._waiting: deque[Record] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._sent_count = 0
        self._dropped_count = 0  # by the event loop, because the queue was full
        self._lost_count = 0  # by the thread, because the collector did not accept them
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Add a record, or drop it if the queue is full. Never blocks."""
        if len(self._waiting) >= self._records_max:
            self._dropped_count += 1
            return
        self._waiting.append(record)
        if len(self._waiting) >= BATCH_MAX and not self._wake.is_set():
            self._wake.set()

    def close(self, wait_s: float = CLOSE_MAX_S) -> None:
        """Send the waiting records, for at most `wait_s` seconds, and end the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join(wait_s)

    def counts(self) -> SpanCounts:
        """Count the traces that were sent, were dropped, and are waiting."""
        return SpanCounts(
            self._sent_count, self._dropped_count + self._lost_count, len(self._waiting)
        )

    def _run(self) -> None:
        while True:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            stopping = self._stopping
            while self._waiting:
                self._send(
                    [self._waiting.popleft() for _ in range(min(BATCH_MAX, len(self._waiting)))]
                )
            if stopping:
                self._sender.close()
                return

    def _send(self, batch: list[Record]) -> None:
        try:
            taken = self._sender.send(batch)
        except Exception:  # an error must not end the thread, and with it all tracing
            log.exception("spans_not_sent")
            taken = False
        if taken:
            self._sent_count += len(batch)
        else:
            self._lost_count += len(batch)
