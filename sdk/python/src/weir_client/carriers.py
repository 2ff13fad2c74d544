"""Interfaces between an exchange and its streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from weir.v1 import inference_service_pb2 as pb

from weir_client import errors

if TYPE_CHECKING:
    from weir_client.exchange import Exchange


class Carrier(Protocol):
    """Stream that an exchange runs on."""

    def send_cancel(self, exchange: Exchange) -> None:
        """Write a cancel frame soon; never blocks."""

    def send_update(self, exchange: Exchange, update: pb.UpdateFrame) -> None:
        """Write an update frame soon; never blocks. Raises: Unavailable if there is no stream."""

    def send_credit(self, exchange: Exchange, token_count: int) -> None:
        """Write a credit frame soon; never blocks."""

    def release(self, exchange: Exchange) -> None:
        """Forget an exchange that has ended; its later frames are ignored."""


class Continuation(Protocol):
    """Moves an exchange to another stream.

    `broken` and `refused` return the final error, or None if the exchange will continue.
    """

    def broken(self, cause: errors.WeirError) -> errors.WeirError | None:
        """Handle the end of the stream."""

    def refused(self, error: errors.WeirError) -> errors.WeirError | None:
        """Handle the server's refusal to continue on this stream."""

    def resumed(self) -> None:
        """Handle the continuation of the exchange."""

    def stop(self) -> None:
        """Handle the end of the exchange."""
