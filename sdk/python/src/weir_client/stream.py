"""The one bidi stream that all requests of a client share.

Reuse is what makes it worth having: a request on an open stream costs about a fifth of a new RPC. Frames that are written at
the same moment leave in one message. When the stream breaks, the next request opens a new one, and so do those that
go on (`resumption`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator

import grpc
import grpc.aio
from weir.v1 import inference_service_pb2 as pb

from weir_client import errors
from weir_client.exchange import Exchange
from weir_client.status import error_from_rpc

BATCH_BYTES = 1024 * 1024  # frames are put into one message up to this; a larger frame travels alone
BATCH_FRAMES = 500  # and up to so many, far below what a server takes in one message
IN_FLIGHT_MAX = 1000  # requests at once per client: what a server lets run on one stream
DRAINING = "DRAINING"  # the server's reason for taking no new requests
UNREADABLE = "UNREADABLE"  # this client's reason for giving up a stream; another stream would say the same
CLOSE_TIMEOUT_S = 1.0  # after the last request has ended, the server only has to answer a half-close

Call = grpc.aio.StreamStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class StreamConnection:
    """One open `Generate` call and the requests on it. `run` is its whole life.

    `open` until the stream ends; `accepting` until then or until the server says that it drains: its requests finish, and the
    next ones belong on another stream, which a load balancer leads to another server.
    """

    def __init__(self, call: Call) -> None:
        self.open = True
        self.accepting = True
        self._call = call
        self._exchanges: dict[str, Exchange] = {}
        self._outgoing: deque[pb.ClientFrame] = deque()
        self._wake = asyncio.Event()
        self._closing = False

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The requests that have not ended."""
        return tuple(self._exchanges.values())

    def start(self, exchange: Exchange, frame: pb.ClientFrame) -> None:
        """Begins a request.

        Raises: Aborted if one of that id runs on this client, ResourceExhausted beyond `IN_FLIGHT_MAX`.
        """
        request_id = exchange.request_id
        if request_id in self._exchanges:
            raise errors.Aborted(
                "a request with this id is running on this client", reason="REQUEST_IN_FLIGHT", request_id=request_id
            )
        if len(self._exchanges) >= IN_FLIGHT_MAX:
            raise errors.ResourceExhausted(f"{IN_FLIGHT_MAX} requests are running on this client", request_id=request_id)
        self._exchanges[request_id] = exchange
        self._send(frame)

    def send_cancel(self, exchange: Exchange) -> None:
        """Writes a cancel frame, soon; never blocks."""
        if self.open and exchange.request_id in self._exchanges:
            self._send(pb.ClientFrame(request_id=exchange.request_id, cancel=pb.CancelFrame()))

    def send_update(self, exchange: Exchange, update: pb.UpdateFrame) -> None:
        """Writes an update frame, soon; never blocks."""
        self._send(pb.ClientFrame(request_id=exchange.request_id, update=update))

    def send_credit(self, exchange: Exchange, token_count: int) -> None:
        """Writes a credit frame, soon; never blocks."""
        if self.open and exchange.request_id in self._exchanges:
            self._send(pb.ClientFrame(request_id=exchange.request_id, credit=pb.CreditFrame(token_count=token_count)))

    def release(self, exchange: Exchange) -> None:
        """Forgets an exchange that has ended; its later frames are strays."""
        if self._exchanges.get(exchange.request_id) is exchange:
            del self._exchanges[exchange.request_id]
            self._wake.set()

    def half_close(self) -> None:
        """Tells the server that nothing more comes, as soon as the requests on this stream have ended."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Reads and writes until the stream ends, then ends every request that is left. Never raises but for cancellation."""
        cause: errors.WeirError = errors.Unavailable("the client was closed")
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write())
                cause = await self._read()
                writer.cancel()
        finally:
            self.open = self.accepting = False
            self._call.cancel()
            for exchange in self.exchanges:
                exchange.break_off(_copy(cause, exchange.request_id))

    def _send(self, frame: pb.ClientFrame) -> None:
        self._outgoing.append(frame)
        self._wake.set()

    async def _read(self) -> errors.WeirError:
        """Hands frames to their requests until the stream ends; returns why it ended."""
        try:
            while True:
                message = await self._call.read()
                if not isinstance(message, pb.GenerateResponse):
                    return errors.Unavailable("the server ended the stream")
                for frame in message.frames:
                    exchange = self._exchanges.get(frame.request_id)
                    if exchange is not None:  # a stray frame is late news of a request that was given up here
                        exchange.receive(frame)
                        if frame.HasField("failed") and exchange.refusal == DRAINING:
                            self.accepting = False
                            self.half_close()
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)
        except Exception as error:  # a message that this client cannot read: its requests end, the client lives on
            return errors.Internal(f"the server's answer could not be read: {error!r}", reason=UNREADABLE)
        finally:
            self.open = self.accepting = False  # before any waiting task runs, so that a retry opens a new stream

    async def _write(self) -> None:
        """Writes what is waiting, in as few messages as the size allows. A broken stream is the reader's to report."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outgoing:
                    await self._call.write(pb.GenerateRequest(frames=self._next_batch()))
                if self._closing and not self._exchanges:  # while requests run, a cancel may have to follow
                    await self._call.done_writing()
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
    """Opens the stream when it is first needed, and again after it ended or its server began to drain."""

    keep_max_s = math.inf  # for so long the servers keep requests, as far as they have said

    def __init__(self, open_call: Callable[[], Call], tasks: asyncio.TaskGroup) -> None:
        self._open_call = open_call
        self._tasks = tasks
        self._connection: StreamConnection | None = None
        self._running: dict[asyncio.Task[None], StreamConnection] = {}
        self._suspended: set[Exchange] = set()
        self._waiting: set[asyncio.Event] = set()
        self._closed = False  # takes nothing new
        self._ended = False  # opens no stream any more

    @property
    def closed(self) -> bool:
        """Whether it takes nothing new."""
        return self._closed

    def start(self, exchange: Exchange, frame: pb.ClientFrame) -> None:
        """Begins a request on the open stream, or on a new one.

        Raises: WeirError if the client is closed or will not take this request (see `StreamConnection.start`).
        """
        if self._closed:
            raise errors.Cancelled("the client is closed", request_id=exchange.request_id)
        self.resume(exchange, frame)

    def resume(self, exchange: Exchange, frame: pb.ClientFrame) -> None:
        """Goes on with a request; while the client closes too, because what runs on must be told to stop. Raises: WeirError."""
        if self._ended:
            raise errors.Cancelled("the client is closed", request_id=exchange.request_id)
        connection = self._connection
        if connection is None or not connection.accepting:
            connection = self._connection = StreamConnection(self._open_call())
            task = self._tasks.create_task(connection.run())
            self._running[task] = connection
            task.add_done_callback(self._running.pop)
        connection.start(exchange, frame)
        exchange.ride(connection, frame.start.initial_credit_tokens)

    def suspend(self, exchange: Exchange) -> None:
        """Knows a request that is between two streams, until `resume` or `forget`."""
        self._suspended.add(exchange)

    def forget(self, exchange: Exchange) -> None:
        """It is not between two streams any more."""
        self._suspended.discard(exchange)

    @contextlib.contextmanager
    def woken_at_close(self, event: asyncio.Event) -> Iterator[None]:
        """Sets the event if the client is closed, or has been."""
        self._waiting.add(event)
        if self._closed:
            event.set()
        try:
            yield
        finally:
            self._waiting.discard(event)

    async def close(self) -> None:
        """Cancels what runs, waits a bounded time for the final frames, and ends the streams; at once if it is cancelled itself."""
        self._closed = True
        for event in self._waiting:
            event.set()
        try:
            await self._settle()
        finally:
            self._ended = True
            for task in self._running:
                task.cancel()

    async def _settle(self) -> None:
        exchanges = {exchange for connection in self._running.values() for exchange in connection.exchanges} | self._suspended
        for exchange in exchanges:
            exchange.cancel()
        for exchange in exchanges:
            await exchange.wait_ended()  # bounded: each gives up by itself
        self._ended = True
        for connection in list(self._running.values()):
            connection.half_close()
        if self._running:
            await asyncio.wait(self._running, timeout=CLOSE_TIMEOUT_S)


def _copy(error: errors.WeirError, request_id: str) -> errors.WeirError:
    """An exception of its own for each request: one object raised in many tasks would mix their tracebacks."""
    return type(error)(error.message, code=error.code, reason=error.reason, request_id=request_id, details=error.details)
