"""What an exchange needs of the streams that it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from weir.v1 import inference_service_pb2 as pb

from weir_client import errors

if TYPE_CHECKING:
    from weir_client.exchange import Exchange


class Carrier(Protocol):
    """The stream that an exchange runs on, as far as the exchange needs it."""

    def send_cancel(self, exchange: Exchange) -> None:
        """Writes a cancel frame, soon; never blocks."""

    def send_update(self, exchange: Exchange, update: pb.UpdateFrame) -> None:
        """Writes an update frame, soon; never blocks. Raises: Unavailable if there is no stream."""

    def send_credit(self, exchange: Exchange, token_count: int) -> None:
        """Writes a credit frame, soon; never blocks."""

    def release(self, exchange: Exchange) -> None:
        """Forgets an exchange that has ended; its later frames are strays."""


class Continuation(Protocol):
    """Who brings an exchange to another stream. Both calls return what it ends with, or None if it will go on."""

    def broken(self, cause: errors.WeirError) -> errors.WeirError | None:
        """The stream ended under it."""

    def refused(self, error: errors.WeirError) -> errors.WeirError | None:
        """The server will not go on with it on this stream."""

    def resumed(self) -> None:
        """It goes on."""

    def stop(self) -> None:
        """It has ended."""
