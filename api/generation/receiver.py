"""One stream that receives one request, and whom it may turn to about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weir.v1 import inference_service_pb2 as pb

from api.generation.outbox import Delivery, Outbox
from metering.core.models import Outcome


class Source(Protocol):
    """What a stream may do to a request that it receives, whether that runs here, elsewhere, or has ended. Nothing blocks."""

    def stop(self, outcome: Outcome) -> None:
        """End the request."""
        ...

    def grant(self, token_count: int) -> None:
        """Let it send so many more tokens."""
        ...

    def update(self, message: pb.UpdateFrame) -> None:
        """Change its limits. The answer comes as a frame."""
        ...

    def shut_out(self, receiver: Receiver, error: Exception) -> None:
        """The stream may not receive it any more: what it is told, and no more."""
        ...

    def leave(self, receiver: Receiver, outcome: Outcome) -> None:
        """The stream is gone, in this way. Nothing happens if another one receives the request by now."""
        ...

    def attach(self, receiver: Receiver, after_seq: int, credit_token_count: int) -> None:
        """From now on this one receives it. Raises: OutputGone, RequestInFlight; nothing has changed then."""
        ...


class Receiver:
    """Made by a stream, bound to whatever has the output for it. After `end` nothing more is pushed."""

    def __init__(self, outbox: Outbox, given_id: str, on_end: Callable[[Receiver], None]) -> None:
        """given_id: the request id as this client spells it. on_end: called once, when the last frame has been pushed."""
        self.outbox = outbox
        self.given_id = given_id
        self.delivery: Delivery  # made by whoever it is bound to
        self.source: Source
        self.payload_hash: bytes | None = None  # of the `start` that asked for it, if one did
        self.is_refused = False  # it has ended without anything of a request
        self._on_end = on_end

    def push(self, frame: pb.ServerFrame, token_count: int = 0) -> None:
        """Put a frame into the stream's outbox. token_count: output tokens that it carries."""
        frame.request_id = self.given_id
        self.outbox.push(self.delivery, frame, token_count)

    def end(self, frame: pb.ServerFrame | None) -> None:
        """Push the last frame; None: there is none, since this process ends."""
        if frame is not None:
            self.is_refused = frame.HasField("failed") and not frame.failed.HasField("usage")
            self.push(frame)
        self._on_end(self)
