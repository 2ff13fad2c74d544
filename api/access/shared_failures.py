"""Failed authentications as the processes of a deployment tell them to each other: an address has one count, and not one in each.

Only failures are told, never a key, and only while there are any: about once a second from each process. What a process has not
heard yet an address may fail there once more: a flood costs as many lookups as it may have failures, and what comes in that second.
"""

from __future__ import annotations

import uuid

import msgspec
import structlog
from msgspec import Struct

from api.access.throttle import Throttle
from metering.control.control_channel import BYTES_MAX

ADDRESS_BYTES = 60  # of one address with its count, at most
ADDRESSES_AT_ONCE = BYTES_MAX // ADDRESS_BYTES - 1  # those with most failures first, the others the next time

log = structlog.get_logger(__name__)


class Failures(Struct, forbid_unknown_fields=True):
    """One text. owner: the process that has seen them. counts: by address."""

    owner: str
    counts: dict[str, int]


class SharedFailures:
    """The `Gossip` of a throttle."""

    def __init__(self, throttle: Throttle, owner_id: uuid.UUID) -> None:
        """owner_id: this process, which hears itself."""
        self._throttle = throttle
        self._owner = owner_id.hex

    def told(self) -> str:
        """See `Gossip`."""
        counts = self._throttle.take_untold(ADDRESSES_AT_ONCE)
        return msgspec.json.encode(Failures(self._owner, counts)).decode() if counts else ""

    def heard(self, text: str) -> None:
        """See `Gossip`."""
        try:
            failures = msgspec.json.decode(text, type=Failures)
        except msgspec.MsgspecError as error:  # of a process of another version
            log.info("failures_unread", cause=str(error))
            return
        if failures.owner != self._owner:
            self._throttle.add(failures.counts)
