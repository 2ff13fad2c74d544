"""Who receives a request that runs: hands it from stream to stream, and lets it go on for a while when nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weir.v1 import inference_service_pb2 as pb

from api.core.errors import FieldViolation, InvalidRequest
from api.generation.feed import Feed
from api.generation.life import Life
from api.generation.receiver import Receiver
from metering.core.errors import RequestInFlight
from metering.core.models import Outcome


class Attendance:
    """The `Source` of a request while it runs."""

    def __init__(
        self,
        feed: Feed,
        keep_s: float | None,
        life: Life,
        update: Callable[[pb.UpdateFrame], None],
    ) -> None:
        """keep_s: how long it goes on unattended; None: not at all. update: changes its limits."""
        self.feed = feed
        self._life = life
        self._keep_s = keep_s
        self._update = update
        self._unattended: asyncio.TimerHandle | None = None
        if feed.receiver is not None:
            feed.receiver.source = self

    def stop(self, outcome: Outcome) -> None:
        """End the request."""
        self._life.stop(outcome)

    def grant(self, token_count: int) -> None:
        """The client takes so many more tokens; a number below 1 ends the request as a cancellation does."""
        if token_count < 1:
            wrong = FieldViolation("credit.token_count", f"must be at least 1, not {token_count}")
            self._life.stop(Outcome.CANCELLED, InvalidRequest([wrong]))
        else:
            self.feed.grant(token_count)

    def update(self, message: pb.UpdateFrame) -> None:
        """Change its limits, and tell the client what holds from now on."""
        self._update(message)

    def attach(self, receiver: Receiver, after_seq: int, credit_token_count: int) -> None:
        """From now on this one receives it. Raises: OutputGone; RequestInFlight if it is just being ended."""
        if self._life.end is not None and self.feed.mailbox is None:
            raise RequestInFlight("the request with this request_id is just being ended: ask again in a moment")
        receiver.source = self
        self.feed.attach(receiver, after_seq, credit_token_count, running=True)
        self._attended()

    def shut_out(self, receiver: Receiver, error: Exception) -> None:
        """End the request: who may not receive it may not have it run, either."""
        if self.feed.receiver is receiver:
            self._life.stop(Outcome.CANCELLED, error)

    def leave(self, receiver: Receiver, outcome: Outcome) -> None:
        """The stream that received it is gone, in this way: it ends, or goes on unattended for as long as the client wants."""
        if self.feed.receiver is not receiver:
            return
        if self._keep_s is None:
            self.stop(outcome)
        else:
            self.feed.detach()
            self._unattended = asyncio.get_running_loop().call_later(self._keep_s, self.stop, Outcome.CANCELLED)

    def ended(self) -> None:
        """The request is over: whoever still reads its output turns to what is kept of it, and nobody here to the request."""
        self._attended()
        self._update = _ended
        if self.feed.receiver is not None:
            self.feed.receiver.source = self.feed

    def _attended(self) -> None:
        if self._unattended is not None:
            self._unattended.cancel()
            self._unattended = None


def _ended(*_: object) -> None:
    """What there was to change has ended."""
