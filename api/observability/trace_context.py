"""The trace that a call belongs to, as its client tells it: W3C's `traceparent` and `tracestate`, carried as they came."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)  # version 00, and no other is defined
# Lists of members, as W3C has them: what is none is not handed to a library that would log it, line breaks and all.
MEMBER = re.compile(r"[a-z0-9][a-z0-9_*/@-]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]", re.ASCII)
TRACESTATE_CHARS_MAX = 512  # that whoever passes one on has to keep; more is not kept


class TraceContext(NamedTuple):
    """Both empty if the client has no trace, or told nothing that could be one."""

    traceparent: str = ""
    tracestate: str = ""


NO_TRACE = TraceContext()


def trace_of(traceparent: str | None, tracestate: str | None) -> TraceContext:
    """From what a client tells; what is no traceparent is ignored, as W3C asks."""
    if not traceparent or TRACEPARENT.fullmatch(traceparent) is None:
        return NO_TRACE
    return TraceContext(traceparent, tracestate if tracestate and _is_tracestate(tracestate) else "")


def _is_tracestate(told: str) -> bool:
    if len(told) > TRACESTATE_CHARS_MAX:
        return False
    members = [member.strip(" \t") for member in told.split(",")]
    return all(not member or MEMBER.fullmatch(member) for member in members)


def trace_of_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> TraceContext:
    """From the metadata of a gRPC call."""
    told = {key: value for key, value in metadata or () if key in ("traceparent", "tracestate") and isinstance(value, str)}
    return trace_of(told.get("traceparent"), told.get("tracestate")) if told else NO_TRACE
