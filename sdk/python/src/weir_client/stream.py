"""The bidirectional stream that all requests of a client share.

Reuse saves time: a request on an open stream costs about a fifth of a new RPC. Frames written at
the same moment leave in one message. When the stream breaks, new and resumed requests open another
(`resumption`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

import grpc
import grpc.aio
from google.rpc import code_pb2
from weir.v1 import inference_service_pb2 as pb

from weir_client import errors
from weir_client.api_key import FUNCTION_FAILED, CurrentKey
from weir_client.attempt import Attempt
from weir_client.connection import log
from weir_client.status import error_from_rpc

BATCH_BYTES = 1024 * 1024  # of frames in one message; a larger frame is sent alone
BATCH_FRAMES = 500  # of one message, far below a server's limit
IN_FLIGHT_MAX = 1000  # requests at once per client, a server's limit per stream
DRAINING = "DRAINING"  # the server's reason for refusing new requests
# This client's reason for ending a stream; another one would fail in the same way.
UNREADABLE = "UNREADABLE"
CLOSE_TIMEOUT_S = 1.0  # after the last request, the server only has to answer a half-close

Call = grpc.aio.StreamStreamCall[pb.GenerateRequest, pb.GenerateResponse]
OpenCall = Callable[[], Awaitable[Call]]


class StreamConnection:
    """Open `Generate` call and the requests on it. `run` serves it until it ends.

    `open` is true until the stream ends, `accepting` until then or until the server starts to
    drain. When it drains, requests finish on this stream, and new ones use another stream, which a
    load balancer routes to another server. So it is when the key of the stream is refused, if
    another one can be had.
    """

    def __init__(self, open_call: OpenCall, tried: str, key: CurrentKey) -> None:
        """Store how `run` opens the call, and the server's address (`tried`) for error messages."""
        self._tried = tried
        self._key = key
        self._used_key = ""
        self.open = True
        self.accepting = True
        self._open_call = open_call
        self._attempts: dict[str, Attempt] = {}
        self._outgoing: deque[pb.ClientFrame] = deque()
        self._wake = asyncio.Event()
        self._closing = False

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Attempts on this stream that have not ended."""
        return tuple(self._attempts.values())

    def start(self, attempt: Attempt, frame: pb.ClientFrame) -> None:
        """Begin a request on this stream.

        Raises: Aborted if a request with this id runs on this client already, ResourceExhausted
        beyond `IN_FLIGHT_MAX` requests.
        """
        request_id = attempt.request_id
        if request_id in self._attempts:
            raise errors.Aborted(
                "a request with this id is running on this client",
                reason="REQUEST_IN_FLIGHT",
                request_id=request_id,
            )
        if len(self._attempts) >= IN_FLIGHT_MAX:
            raise errors.ResourceExhausted(
                f"{IN_FLIGHT_MAX} requests are running on this client", request_id=request_id
            )
        self._attempts[request_id] = attempt
        self._send(frame)

    def send_cancel(self, attempt: Attempt) -> None:
        """Queue a cancel frame; never blocks."""
        if self.open and attempt.request_id in self._attempts:
            self._send(pb.ClientFrame(request_id=attempt.request_id, cancel=pb.CancelFrame()))

    def send_update(self, attempt: Attempt, update: pb.UpdateFrame) -> None:
        """Queue an update frame; never blocks."""
        self._send(pb.ClientFrame(request_id=attempt.request_id, update=update))

    def send_credit(self, attempt: Attempt, token_count: int) -> None:
        """Queue a frame that grants credit for more output tokens; never blocks."""
        if self.open and attempt.request_id in self._attempts:
            self._send(
                pb.ClientFrame(
                    request_id=attempt.request_id, credit=pb.CreditFrame(token_count=token_count)
                )
            )

    def release(self, attempt: Attempt) -> None:
        """Remove an attempt that has ended from the stream. Its later frames are ignored."""
        if self._attempts.get(attempt.request_id) is attempt:
            del self._attempts[attempt.request_id]
            self._wake.set()

    def half_close(self) -> None:
        """Close the sending side of the call as soon as the requests on this stream have ended."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Read and write until the stream ends, then fail its requests. Raises no WeirError."""
        cause: errors.WeirError = errors.Unavailable("the client was closed")
        call: Call | None = None
        try:
            try:
                call = await self._open_call()
            except errors.WeirError as error:
                cause = error
                return
            self._used_key = self._key.text
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(call))
                cause = await self._read(call)
                writer.cancel()
        finally:
            self.open = self.accepting = False
            log.debug("stream to %s ended: %s", self._tried, cause.message)
            if call is not None:
                call.cancel()
            for attempt in self.attempts:
                attempt.break_off(_copy(cause, attempt.request_id))

    def _send(self, frame: pb.ClientFrame) -> None:
        self._outgoing.append(frame)
        self._wake.set()

    async def _read(self, call: Call) -> errors.WeirError:
        """Pass frames to their requests until the stream ends. Return the cause of the end."""
        try:
            while True:
                message = await call.read()
                if not isinstance(message, pb.GenerateResponse):
                    return errors.Unavailable("the server ended the stream")
                for frame in message.frames:
                    attempt = self._attempts.get(frame.request_id)
                    if attempt is not None:  # frames of abandoned requests are ignored
                        attempt.receive(frame)
                        if frame.HasField("failed") and (
                            attempt.refusal == DRAINING
                            or self._is_key_refused(frame.failed.status.code)
                        ):
                            self.accepting = False
                            self.half_close()
        except grpc.aio.AioRpcError as broken:
            self._is_key_refused(broken.code().value[0])
            return error_from_rpc(broken, tried=self._tried)
        except Exception as error:  # an unreadable message ends its requests, not the client
            return errors.Internal(
                f"the server's answer could not be read: {error!r}", reason=UNREADABLE
            )
        finally:
            # Before any waiting task runs, so that a retry opens a new stream.
            self.open = self.accepting = False

    def _is_key_refused(self, code: int) -> bool:
        """Return whether the server has refused the stream's key and there will be another."""
        return code == code_pb2.UNAUTHENTICATED and self._key.refused(self._used_key)

    async def _write(self, call: Call) -> None:
        """Send queued frames, several in one message. `_read` reports a broken stream."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outgoing:
                    await call.write(pb.GenerateRequest(frames=self._next_batch()))
                # While requests run, a cancel may have to follow.
                if self._closing and not self._attempts:
                    await call.done_writing()
                    return
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    def _next_batch(self) -> list[pb.ClientFrame]:
        batch = [self._outgoing.popleft()]
        size = batch[0].ByteSize()
        while self._outgoing and len(batch) < BATCH_FRAMES:
            size += self._outgoing[0].ByteSize()
            if size > BATCH_BYTES:
                break
            batch.append(self._outgoing.popleft())
        return batch


class SharedStream:
    """Stream shared by a client's requests, opened again when it ends or its server drains."""

    keep_max_s = math.inf  # longest keep time of the servers, if known

    def __init__(self, open_call: OpenCall, tried: str, key: CurrentKey) -> None:
        """Store how to open a stream, and the server's address (`tried`) for error messages."""
        self._open_call = open_call
        self._key = key
        self._tried = tried
        self._connection: StreamConnection | None = None
        self._running: dict[asyncio.Task[None], StreamConnection] = {}
        self._suspended: set[Attempt] = set()
        self._waiting: set[asyncio.Event] = set()
        self._closed = False  # accepts no new requests
        self._ended = False  # opens no new streams

    @property
    def closed(self) -> bool:
        """True if the client is closed, so that new requests are refused."""
        return self._closed

    def renews(self, error: errors.WeirError) -> bool:
        """Return whether the next stream has another key after this error."""
        return (
            self._key.is_renewable
            and isinstance(error, errors.Unauthenticated)
            and error.reason != FUNCTION_FAILED
        )

    def start(self, attempt: Attempt, frame: pb.ClientFrame) -> None:
        """Begin a request on the open stream, or on a new one.

        Raises: WeirError if the client is closed or cannot begin the request (see
        `StreamConnection.start`).
        """
        if self._closed:
            raise errors.Cancelled("the client is closed", request_id=attempt.request_id)
        self.resume(attempt, frame)

    def resume(self, attempt: Attempt, frame: pb.ClientFrame) -> None:
        """Continue a request on the open stream or a new one. Raises: WeirError.

        This works even while the client closes, so that a cancel can be delivered.
        """
        if self._ended:
            raise errors.Cancelled("the client is closed", request_id=attempt.request_id)
        connection = self._connection
        if connection is None or not connection.accepting:
            log.debug("opening a stream to %s", self._tried)
            connection = self._connection = StreamConnection(
                self._open_call, self._tried, self._key
            )
            task = asyncio.create_task(connection.run())
            self._running[task] = connection
            task.add_done_callback(self._running.pop)
        log.debug("request %s: sent (%s)", attempt.request_id, frame.WhichOneof("kind"))
        connection.start(attempt, frame)
        attempt.ride(connection, frame.start.initial_credit_tokens)

    def suspend(self, attempt: Attempt) -> None:
        """Track a request that has no stream, until `resume` or `forget` is called for it."""
        self._suspended.add(attempt)

    def forget(self, attempt: Attempt) -> None:
        """Stop tracking a request, which has ended."""
        self._suspended.discard(attempt)

    @contextlib.contextmanager
    def woken_at_close(self, event: asyncio.Event) -> Iterator[None]:
        """Set the event when the client is closed, or at once if it is closed already."""
        self._waiting.add(event)
        if self._closed:
            event.set()
        try:
            yield
        finally:
            self._waiting.discard(event)

    async def close(self) -> None:
        """Cancel all requests, wait a limited time for their final frames, and end the streams."""
        self._closed = True
        for event in self._waiting:
            event.set()
        try:
            await self._settle()
        finally:
            self._ended = True
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)

    async def _settle(self) -> None:
        attempts = {
            attempt for connection in self._running.values() for attempt in connection.attempts
        } | self._suspended
        for attempt in attempts:
            attempt.cancel()
        for attempt in attempts:
            await attempt.wait_ended()  # bounded: each gives up after its grace period
        self._ended = True
        for connection in list(self._running.values()):
            connection.half_close()
        if self._running:
            await asyncio.wait(self._running, timeout=CLOSE_TIMEOUT_S)


def _copy(error: errors.WeirError, request_id: str) -> errors.WeirError:
    """Copy an error for one request, so that the tracebacks of several requests do not mix."""
    return type(error)(
        error.message,
        code=error.code,
        reason=error.reason,
        request_id=request_id,
        details=error.details,
    )
