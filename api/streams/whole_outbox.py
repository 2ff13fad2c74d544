"""The outbox of a client that takes its answer in one piece: nothing leaves before everything that belongs to it is there.

So a request that breaks half-way has delivered nothing and costs nothing, and the client may be told of it
as if it had never begun.
"""

from __future__ import annotations

from collections.abc import Callable

from weir.v1 import inference_service_pb2 as pb

from api.streams.outbox import Delivery, Outbox, Pending
from metering.holds.journal import UsageJournal


class WholeOutbox(Outbox):
    """Holds all frames back until each of its requests has generated everything, or has ended; then they go out as one message."""

    takes_whole = True

    def __init__(self, journal: UsageJournal, request_count: int, on_failure: Callable[[str], None]) -> None:
        """request_count: so many requests make up the answer. on_failure: called with the id of each that has failed."""
        super().__init__(journal)
        self._request_count = request_count
        self._on_failure = on_failure
        self._complete: set[Delivery] = set()  # those that add no more output
        self._is_open = False

    def push(self, delivery: Delivery, frame: pb.ServerFrame, token_count: int = 0) -> None:
        """See `Outbox.push`."""
        super().push(delivery, frame, token_count)
        if frame.HasField("failed"):
            self._on_failure(delivery.request_id)
        if frame.HasField("failed") or frame.HasField("finished"):
            self.complete(delivery)

    def complete(self, delivery: Delivery) -> None:
        """See `Outbox.complete`."""
        self._complete.add(delivery)
        if len(self._complete) == self._request_count:
            self._is_open = True
            self._arrived.set()

    def close(self) -> None:
        """See `Outbox.close`."""
        self._is_open = True
        super().close()

    def _note_arrival(self) -> None:
        if self._is_open:
            super()._note_arrival()

    def _take_batch(self) -> list[Pending]:
        """All of it: the answer's length is bounded by the context windows of its requests."""
        batch = list(self._pending)
        self._pending.clear()
        return batch
