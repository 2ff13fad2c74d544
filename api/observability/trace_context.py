"""The trace that a call belongs to, as its client tells it: W3C's `traceparent` and `tracestate`, carried as they came."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

TRACEPARENT_CHARS = 55  # of version 00, and no other is defined
TRACESTATE_CHARS_MAX = 512  # that whoever passes one on has to keep; more is not kept


class TraceContext(NamedTuple):
    """Both empty if the client has no trace, or told nothing that could be one."""

    traceparent: str = ""
    tracestate: str = ""


NO_TRACE = TraceContext()


def trace_context(get: Callable[[str], str | None]) -> TraceContext:
    """From headers. get: a header by its name in small letters."""
    traceparent, tracestate = get("traceparent"), get("tracestate") or ""
    if traceparent is None or len(traceparent) != TRACEPARENT_CHARS:
        return NO_TRACE
    return TraceContext(traceparent, tracestate if len(tracestate) <= TRACESTATE_CHARS_MAX else "")


def trace_of_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> TraceContext:
    """From the metadata of a gRPC call."""
    told = {key: value for key, value in metadata or () if key in ("traceparent", "tracestate") and isinstance(value, str)}
    return trace_context(told.get) if told else NO_TRACE
