"""Relays between a stream of this process and a request in another process of the deployment.

A relay is a client of the process that runs the request, and uses the caller's API key. That
process counts, journals and bills; frames pass through here unchanged. A relay reads no faster than
its client, so a stalled client stalls its request and uses no memory here.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque

import grpc
import structlog
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc

from api.core.errors import Overloaded, ProcessUnavailable, RequestOver, UnknownRequest
from api.core.messages import find_generation
from api.core.statuses import status_of
from api.generation.delivery import frames
from api.generation.delivery.output_buffer import OutputBuffer
from api.generation.delivery.replay import Key
from api.generation.delivery.stream_writer import Subscription
from api.generation.request.caller import Caller
from api.generation.request.peers import VOUCHER, Identity, Peer, PeerChannels
from metering.control.live import Owner, find_owner
from metering.core.errors import MeteringError, RequestInFlight
from metering.core.models import Outcome
from metering.store.db import Sessions
from metering.tenants.networks import Address

FRAMES_UNREAD_MAX = 64  # per relay; above it, reading from the other process pauses
# Per relay; above it, the relay fails, since the other process does not read.
FRAMES_UNWRITTEN_MAX = 1000
FRAMES_PER_MESSAGE_MAX = 100  # below the limit of every process
ANSWER_WAIT_S = 10.0  # for the first frame: some ms, seconds on an overloaded machine

Call = grpc.aio.StreamStreamCall[pb.GenerateRequest, pb.GenerateResponse]

log = structlog.get_logger(__name__)


class Relays:
    """All relays of this process, with its connections to other processes."""

    def __init__(
        self,
        sessions: Sessions,
        process_id: uuid.UUID,
        tasks: asyncio.TaskGroup,
        identity: Identity | None = None,
    ) -> None:
        """`process_id` is this process, to which nothing is relayed.

        `tasks` is its task group. `identity` is presented to peers and signs client addresses; with
        None, peers reject all calls.
        """
        self.identity = identity
        self.sessions = sessions
        self.process_id = process_id
        self._tasks = tasks
        self.channels = PeerChannels(tasks, identity)
        self._running: set[Relay] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running_count(self) -> int:
        """Number of requests in other processes whose output streams of this process receive."""
        return len(self._running)

    def begin(
        self,
        subscription: Subscription,
        key: Key,
        secret: str,
        *,
        after_seq: int,
        credit_token_count: int,
        address: Address | None = None,
        end_user: str = "",
    ) -> None:
        """Relay the request with this key to the subscription.

        `secret` and `address` are the caller's API key and address. With `end_user`, the request
        must be of that one.
        """
        relay = Relay(self, subscription, key, secret, address, end_user)
        relay.attach(subscription, after_seq, credit_token_count)
        relay.run_in(self._tasks)
        self._running.add(relay)
        self._idle.clear()

    def take_over(self, caller: Caller, request_id: uuid.UUID, output: OutputBuffer) -> bool:
        """Relay a request that was started here, and turned out to run in another process.

        Returns False if that is impossible: the other process requires the caller's API key.
        """
        if not caller.secret or (subscription := output.detach()) is None:
            return False
        self.begin(
            subscription,
            (caller.payer.project_id, request_id),
            caller.secret,
            after_seq=0,
            credit_token_count=output.flow.credit or 0,
            address=caller.address,
            end_user=caller.token.end_user if caller.token is not None else "",
        )
        return True

    def ended(self, relay: Relay) -> None:
        """Remove a relay, which has ended."""
        self._running.discard(relay)
        if not self._running:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no relay is left."""
        await self._idle.wait()

    async def close(self) -> None:
        """End all relays and close all connections, at shutdown.

        The requests continue where they run if their clients have asked for that.
        """
        for relay in list(self._running):
            relay.give_up(
                ProcessUnavailable(
                    "This server has shut down. Attach to the request through another one."
                )
            )
        await self.channels.close()


class Relay:
    """Request that runs in another process. Implements `Source` for its stream."""

    def __init__(
        self,
        relays: Relays,
        subscription: Subscription,
        key: Key,
        secret: str,
        address: Address | None,
        end_user: str,
    ) -> None:
        self._relays = relays
        self._subscription: Subscription | None = subscription
        self._key = key
        self._secret = secret
        self._address = address
        self._end_user = end_user
        self._outgoing: deque[pb.ClientFrame] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def run_in(self, tasks: asyncio.TaskGroup) -> None:
        """Start the relay as a task of this group."""
        self._task = tasks.create_task(self._run(), name=f"relay {self._key[1]}")

    def cancel(self) -> None:
        """End the relay without a frame to the client."""
        self._subscription = None
        self._relays.ended(self)
        if self._task is not None:
            self._task.cancel()

    def give_up(self, error: Exception) -> None:
        """End the relay, and send the error to the client."""
        subscription = self._subscription
        self.cancel()
        if subscription is not None:
            subscription.end(frames.failed(status_of(error), None))

    def stop(self, outcome: Outcome) -> None:
        """Cancel the request. Its last frame arrives through the relay."""
        self._send(pb.ClientFrame(cancel=pb.CancelFrame()))

    def grant(self, token_count: int) -> None:
        """Forward credit to the process that runs the request."""
        self._send(pb.ClientFrame(credit=pb.CreditFrame(token_count=token_count)))

    def update(self, message: pb.UpdateFrame) -> None:
        """Forward a change of limits. The answer arrives through the relay."""
        self._send(pb.ClientFrame(update=message))

    def attach(self, subscription: Subscription, after_seq: int, credit_token_count: int) -> None:
        """Attach to the request; if already attached, continue from another delta."""
        subscription.source = self
        subscription.on_taken = self._room.set
        self._subscription = subscription
        self._send(pb.ClientFrame(attach=pb.AttachFrame(after_seq=after_seq)))
        if credit_token_count:
            self.grant(credit_token_count)

    def revoke(self, subscription: Subscription, error: Exception) -> None:
        """End the relay with an error. The process that runs the request sees its stream close."""
        self.give_up(error)

    def leave(self, subscription: Subscription, outcome: Outcome) -> None:
        """End the relay. The process that runs the request stops it, or lets it continue."""
        self.cancel()

    def _send(self, frame: pb.ClientFrame) -> None:
        if len(self._outgoing) >= FRAMES_UNWRITTEN_MAX:
            self.give_up(
                Overloaded(
                    f"{FRAMES_UNWRITTEN_MAX} frames for your request wait to be sent. Read its"
                    " output first."
                )
            )
            return
        frame.request_id = str(self._key[1])
        self._outgoing.append(frame)
        self._wake.set()

    async def _run(self) -> None:
        end = frames.failed(
            status_of(
                ProcessUnavailable(
                    "The server that runs your request does not answer. Attach to it again."
                )
            ),
            None,
        )
        try:
            end = await self._receive()
        except (grpc.aio.AioRpcError, TimeoutError, OSError) as away:
            log.info(
                "relay_broken", request_id=str(self._key[1]), cause=str(away) or type(away).__name__
            )
            try:
                end = await self._end_without_owner() or end
            # The database is down as well; an error that leaves this task would end the process.
            except Exception as unread:
                log.warning("relay_books_unread", request_id=str(self._key[1]), exc_info=unread)
        except Exception as error:
            end = frames.failed(status_of(error), None)
        finally:
            self._relays.ended(self)
            if self._subscription is not None:
                self._subscription.end(end)

    async def _receive(self) -> pb.ServerFrame:
        """Forward all frames, and return the last one. Raises the error that ends the relay."""
        async with self._relays.sessions() as session:
            owner = await find_owner(session, *self._key, self._end_user)
        if owner is None:
            raise UnknownRequest(
                "Your project has no request with this request_id. Check the id, or start it."
            )
        if owner.address and owner.process_id != self._relays.process_id:
            with self._relays.channels.use(Peer(owner.address, owner.certificate)) as channel:
                end = await self._receive_over(channel)
            if end.failed.status.code != grpc.StatusCode.NOT_FOUND.value[0]:
                return end
        return await self._end_without_owner() or frames.failed(
            status_of(self._not_there(owner)), None
        )

    async def _receive_over(self, channel: grpc.aio.Channel) -> pb.ServerFrame:
        """Forward frames over a connection; return the last one. Raises the relay's error."""
        metadata = [("authorization", f"Bearer {self._secret}")]
        if self._relays.identity is not None and self._address is not None:
            metadata.append((VOUCHER, self._relays.identity.vouch(self._secret, self._address)))
        call = pb_grpc.InferenceServiceStub(channel).Generate(metadata=tuple(metadata))
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(call), name="relay writer")
                end = await self._read(call)
                writer.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            call.cancel()
        return end

    def _not_there(self, owner: Owner) -> Exception:
        """Build the error for a request that is recorded as running, but was not found."""
        if owner.process_id == self._relays.process_id:
            return RequestInFlight(
                "A request with this request_id is just starting or ending. Send the frame again in"
                " a moment."
            )
        return ProcessUnavailable(
            "The server that runs your request is down. Attach again until the request is settled."
        )

    async def _write(self, call: Call) -> None:
        # The reader gets the same error and reports it.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outgoing:
                    count = min(len(self._outgoing), FRAMES_PER_MESSAGE_MAX)
                    await call.write(
                        pb.GenerateRequest(frames=[self._outgoing.popleft() for _ in range(count)])
                    )

    async def _read(self, call: Call) -> pb.ServerFrame:
        """Forward all frames but the last, which is returned. Raises: AioRpcError, TimeoutError."""
        async with asyncio.timeout(ANSWER_WAIT_S):
            message = await call.read()
        while isinstance(message, pb.GenerateResponse):
            for frame in message.frames:
                if (
                    frame.WhichOneof("kind") in ("finished", "failed")
                    and not frame.failed.duplicate_start
                ):
                    return frame
                if self._subscription is not None:
                    self._subscription.push(frame)
            await self._until_room()
            message = await call.read()
        raise grpc.aio.AioRpcError(
            await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), "the stream ended early"
        )

    async def _until_room(self) -> None:
        """Wait while the client has too many unread frames."""
        while (
            self._subscription is not None
            and self._subscription.unsent_frame_count > FRAMES_UNREAD_MAX
        ):
            self._room.clear()
            await self._room.wait()

    async def _end_without_owner(self) -> pb.ServerFrame | None:
        """Build the last frame from the database if the hold has ended; None if it is open."""
        try:
            async with self._relays.sessions() as session:
                owner = await find_owner(session, *self._key, self._end_user)
                if owner is None or owner.is_held:
                    return None
                generation = await find_generation(session, *self._key)
        except MeteringError as error:
            return frames.failed(status_of(error), None)
        end = frames.failed(status_of(RequestOver(generation.outcome)), None)
        end.failed.usage.CopyFrom(generation.usage)
        end.failed.cost.CopyFrom(generation.cost)
        end.failed.receipts.extend(generation.receipts)
        return end
