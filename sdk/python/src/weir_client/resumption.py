"""Resumption of requests on another stream. See docs/how-to/resume-a-stream.md.

A state machine on the event loop's timers, so that it can be stopped at any moment.
"""

from __future__ import annotations

import asyncio
import random

from weir.v1 import inference_service_pb2 as pb

from weir_client import errors
from weir_client.attempt import Attempt
from weir_client.connection import log
from weir_client.stream import UNREADABLE, SharedStream

RESUME_S = 30.0  # default: covers a restart of a load balancer or a change of network
# Before the first try, with jitter: all clients of a lost server return at once.
WAIT_FIRST_S = 0.05
WAIT_BASE_S = 0.1  # before the second try without a retry-after of the server; doubles each time
WAIT_MAX_S = 5.0  # between two tries, unless the server asks for more

REQUEST_UNKNOWN = "REQUEST_UNKNOWN"
REQUEST_IN_FLIGHT = "REQUEST_IN_FLIGHT"
REQUEST_SETTLED = "REQUEST_SETTLED"
OUTPUT_GONE = "OUTPUT_GONE"
_FINAL = (
    errors.Unauthenticated,
    errors.PermissionDenied,
    errors.InvalidRequest,
    errors.FailedPrecondition,
)


class Resumption:
    """Handler that moves one attempt from stream to stream, and its carrier between two streams.

    `frame` began the request: a start or an attach frame. From each break it tries for `keep_s`
    seconds, as long as the server keeps the request.
    """

    def __init__(
        self, stream: SharedStream, attempt: Attempt, frame: pb.ClientFrame, keep_s: float
    ) -> None:
        self._stream = stream
        self._attempt = attempt
        self._frame = frame
        self._keep_s = keep_s
        self._is_renewed = False  # the last try was refused for its key
        self._again = False  # the next try repeats the start frame
        self._skip_to: int | None = None  # seq to attach at if earlier output is lost
        self._try_count = 0
        self._cause: errors.WeirError | None = None
        self._try_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        attempt.continuation = self

    def begin(self) -> None:
        """Attach to a request of another client. Raises: WeirError if this client is closed."""
        if self._stream.closed:
            raise errors.Cancelled("the client is closed", request_id=self._attempt.request_id)
        self._suspend()
        self._try()

    def broken(self, cause: errors.WeirError) -> errors.WeirError | None:
        """Look for another stream, unless the request would fail there in the same way."""
        if self._is_key_due(cause):
            self._wait(cause)
            return None
        if isinstance(cause, _FINAL) or cause.reason == UNREADABLE:
            return self._ended(cause)
        log.info(
            "request %s: the stream broke after frame %d, resuming for at most %g s: %s",
            self._attempt.request_id,
            self._attempt.seq,
            self._keep_s,
            cause.message,
        )
        self._wait(cause)
        return None

    def refused(self, error: errors.WeirError) -> errors.WeirError | None:
        """Handle the server's refusal of an attach frame or of a repeated start frame."""
        attempt = self._attempt
        if (
            isinstance(error, errors.Unavailable)
            or error.reason == REQUEST_IN_FLIGHT
            or self._is_key_due(error)
        ):
            self._wait(error)
            return None
        if not attempt.begun or self._again:
            return error  # the first response to the request, or an ordinary refusal
        if (
            error.reason == REQUEST_UNKNOWN
            and not attempt.delivered
            and not attempt.cancelled
            and self._frame.HasField("start")
        ):
            self._again = True
            self._wait(error)
            return None
        if error.reason == OUTPUT_GONE and self._skip_to is None:
            self._skip_to = int(error.metadata.get("last_seq", attempt.seq))
            self._suspend()
            attempt.lose(f"output after frame {attempt.seq} is no longer kept", error)
            self._try()
            return None
        return self._ended(error)

    def resumed(self) -> None:
        """Stop the timers: the server continues the request on the new stream."""
        self.stop()
        log.info("request %s: resumed (try %d)", self._attempt.request_id, self._try_count or 1)
        self._try_count = 0
        self._again = self._is_renewed = False

    def stop(self) -> None:
        """Stop looking for a stream."""
        for timer in (self._try_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        self._try_timer = self._end_timer = None
        self._stream.forget(self._attempt)

    def send_cancel(self, attempt: Attempt) -> None:
        """Look for a stream at once, as the server does not know of the cancel yet."""
        if self._try_timer is not None:
            self._try()

    def send_update(self, attempt: Attempt, update: pb.UpdateFrame) -> None:
        """Raise Unavailable, as there is no stream."""
        raise errors.Unavailable(
            "the connection is broken: retry after it is restored", request_id=attempt.request_id
        )

    def send_credit(self, attempt: Attempt, token_count: int) -> None:
        """Do nothing. The next stream is granted all free credit."""

    def release(self, attempt: Attempt) -> None:
        """Do nothing. `stop` is called next."""

    def _is_key_due(self, error: errors.WeirError) -> bool:
        """Return whether the key of the stream was refused, and the next stream has another."""
        is_due = self._attempt.begun and self._stream.renews(error) and not self._is_renewed
        self._is_renewed |= is_due
        return is_due

    def _suspend(self) -> None:
        attempt = self._attempt
        attempt.release()
        attempt.suspended = True
        attempt.ride(self)
        self._stream.suspend(attempt)
        if self._end_timer is None:
            self._end_timer = asyncio.get_running_loop().call_later(self._keep_s, self._give_up)

    def _wait(self, cause: errors.WeirError) -> None:
        self._suspend()
        self._cause = cause
        spread_s = (
            min(WAIT_BASE_S * 2 ** (self._try_count - 1), WAIT_MAX_S)
            if self._try_count
            else WAIT_FIRST_S
        )
        wait_s = (cause.retry_after_s or 0.0) + random.uniform(spread_s / 2, spread_s)
        self._try_count += 1
        if self._attempt.cancelled:
            wait_s = min(wait_s, WAIT_BASE_S)
        self._try_timer = asyncio.get_running_loop().call_later(wait_s, self._try)

    def _try(self) -> None:
        if self._try_timer is not None:
            self._try_timer.cancel()
            self._try_timer = None
        attempt = self._attempt
        if attempt.outcome is not None:
            return
        if self._again and attempt.cancelled:
            attempt.fail(
                errors.Cancelled("cancelled before its admission", request_id=attempt.request_id)
            )
            return
        try:
            self._stream.resume(attempt, self._next_frame())
        except errors.ResourceExhausted as error:
            self._wait(error)
            return
        except errors.WeirError as error:
            attempt.fail(error)
            return
        self._stream.forget(attempt)
        attempt.resend_cancel()

    def _next_frame(self) -> pb.ClientFrame:
        if self._again:
            return self._frame
        after_seq = self._attempt.seq if self._skip_to is None else self._skip_to
        return pb.ClientFrame(
            request_id=self._attempt.request_id, attach=pb.AttachFrame(after_seq=after_seq)
        )

    def _ended(self, error: errors.WeirError) -> errors.WeirError:
        """Build the final error of the request, with the received output and the bill."""
        attempt = self._attempt
        if not attempt.begun:
            return error
        log.info("request %s: could not be resumed: %s", attempt.request_id, error.message)
        if error.reason == REQUEST_SETTLED:
            how = error.metadata.get("outcome") or "ended"
            message = (
                f"the request was settled ({how}) while the stream was broken, and its output is"
                " not kept"
            )
            return attempt.incomplete(message, error)
        return attempt.incomplete(
            f"the stream ended before the request did, and could not be resumed: {error.message}",
            error,
        )

    def _give_up(self) -> None:
        self._end_timer = None
        message = f"no server could be reached for {self._keep_s:g} s"
        self._attempt.fail(
            self._ended(
                self._cause or errors.Unavailable(message, request_id=self._attempt.request_id)
            )
        )
