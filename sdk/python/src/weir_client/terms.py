"""Terms of a request, and their change when a server accepts it on other terms only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weir.v1 import inference_service_pb2 as pb

from weir_client import errors
from weir_client.connection import RetryPolicy
from weir_client.resumption import REQUEST_IN_FLIGHT, REQUEST_SETTLED

KEEP_FIELD = "keep_on_disconnect"


@dataclass(frozen=True, slots=True)
class Terms:
    """Limits and retries of one generation. Times are in seconds; None is unlimited."""

    timeout_s: float | None
    retry: RetryPolicy
    # Time to resume a broken stream, for which the server keeps the request; None: not at all
    keep_s: float | None
    keep_is_requested: bool = (
        True  # explicit wish of the caller: a refusal is not retried without it
    )
    prefetch_tokens: int | None = None  # limit of unread output; None: unlimited


def set_keep(start: pb.StartFrame, keep_s: float | None) -> None:
    """Set for how many seconds the request outlives its connection; None: it ends with it."""
    if keep_s is None:
        start.ClearField("keep_on_disconnect")
    else:
        start.keep_on_disconnect.FromNanoseconds(round(keep_s * 1e9))


def requested_differently(
    frame: pb.ClientFrame, terms: Terms, error: errors.WeirError, failure: errors.WeirError | None
) -> tuple[pb.ClientFrame, Terms] | None:
    """Build the frame and terms for another try after the server's refusal; None: do not try again.

    `failure` is the error of the previous attempt, if any. If the server did accept that attempt,
    the new frame attaches to it.
    """
    if not frame.HasField("start") or terms.keep_s is None:
        return None
    if failure is not None and error.reason in (REQUEST_SETTLED, REQUEST_IN_FLIGHT):
        return pb.ClientFrame(request_id=frame.request_id, attach=pb.AttachFrame()), terms
    if terms.keep_is_requested or {each.field for each in error.details.field_violations} != {
        KEEP_FIELD
    }:
        return None
    keep_s = _allowed_s(error, terms.keep_s)
    again = pb.ClientFrame()
    again.CopyFrom(frame)
    set_keep(again.start, keep_s)
    return again, replace(terms, keep_s=keep_s)


def _allowed_s(refusal: errors.WeirError, refused_s: float) -> float | None:
    """Read the operator's limit of the keep time from a refusal; None if not allowed or unknown."""
    try:
        allowed_s = float(refusal.metadata.get("keep_on_disconnect_max_s", 0))
    except ValueError:
        return None
    return allowed_s if 0 < allowed_s < refused_s else None
