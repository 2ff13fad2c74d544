"""How a request is to be run, and how it is asked for again when a server takes it on other terms only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weir.v1 import inference_service_pb2 as pb

from weir_client import errors
from weir_client.connection import RetryPolicy
from weir_client.resumption import REQUEST_IN_FLIGHT, REQUEST_SETTLED

KEEP_FIELD = "keep_on_disconnect"


@dataclass(frozen=True, slots=True)
class Terms:
    """How one generation is to be run. Times in seconds; None: without."""

    timeout_s: float | None
    retry: RetryPolicy
    keep_s: float | None  # how long a broken stream may be looked for again; the server keeps the request so long
    keep_is_asked: bool = True  # the caller's own wish: a server that refuses it is not asked again without
    prefetch_tokens: int | None = None  # output that may be unread; None: what comes


def set_keep(start: pb.StartFrame, keep_s: float | None) -> None:
    """Writes how long the request outlives its connection; None: not at all."""
    if keep_s is None:
        start.ClearField("keep_on_disconnect")
    else:
        start.keep_on_disconnect.FromNanoseconds(round(keep_s * 1e9))


def asked_differently(
    frame: pb.ClientFrame, terms: Terms, error: errors.WeirError, failure: errors.WeirError | None
) -> tuple[pb.ClientFrame, Terms] | None:
    """What the server's answer suggests to ask instead, and on what terms; None: nothing.

    failure: of the attempt before, if there was one. Then the request may have got in unseen, and is received.
    """
    if not frame.HasField("start") or terms.keep_s is None:
        return None
    if failure is not None and error.reason in (REQUEST_SETTLED, REQUEST_IN_FLIGHT):
        return pb.ClientFrame(request_id=frame.request_id, attach=pb.AttachFrame()), terms
    if terms.keep_is_asked or {each.field for each in error.details.field_violations} != {KEEP_FIELD}:
        return None
    keep_s = _allowed_s(error, terms.keep_s)
    again = pb.ClientFrame()
    again.CopyFrom(frame)
    set_keep(again.start, keep_s)
    return again, replace(terms, keep_s=keep_s)


def _allowed_s(refusal: errors.WeirError, refused_s: float) -> float | None:
    """For how long the operator keeps requests, as the refusal of a longer time tells; None: not at all, or nobody knows."""
    try:
        allowed_s = float(refusal.metadata.get("keep_max_s", 0))
    except ValueError:
        return None
    return allowed_s if 0 < allowed_s < refused_s else None
