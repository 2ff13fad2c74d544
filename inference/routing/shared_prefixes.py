"""Hashes of prompt blocks, which api processes announce when they send them to shared servers.

Each process remembers which prompts it has sent to a replica (`SentPrefixes`), and places the next
one by that. A broadcast announces new blocks to the others, so that a prompt goes to the replica
that has its prefix, whichever process takes it. Nothing depends on it: a lost broadcast costs a
cache miss, and blocks beyond the room of one broadcast wait for the next, or are dropped. Blocks of
requests that may not leave their region are never announced.
"""

from __future__ import annotations

import logging
import struct
import uuid
from collections.abc import Iterator

import msgspec

from inference.engine import pool_of
from inference.routing.replica import Replica
from inference.routing.replica_set import ReplicaSet
from inference.routing.router import Router

BYTES_MAX = 6900  # of one broadcast as JSON
POOL_BYTES = 8  # of JSON around the name of a pool
KEY_BYTES = 8
_log = logging.getLogger("weir.inference.routing")


class SentBlocks(msgspec.Struct, forbid_unknown_fields=True):
    """Broadcast message. `owner` is the process that sent the blocks.

    `blocks` has the hashes by pool (`Pooled.pool`), each in eight bytes, as packed by `packed`.
    """

    owner: str
    blocks: dict[str, bytes]


class SharedPrefixes:
    """Broadcaster of the blocks that this process has sent. Implements `Broadcaster`."""

    def __init__(self, router: Router, process_id: uuid.UUID) -> None:
        """`process_id` identifies this process, so that it ignores its own broadcasts."""
        self._router = router
        self._owner = process_id.hex
        self._rotation = 0  # of the replicas, so that each comes first at times
        self.process_count = 1  # that the database knows, this one included

    def next_broadcast(self) -> str:
        """Return the next blocks that the others do not know; empty for none, or without others."""
        replicas = list(self._replicas()) if self.process_count > 1 else []
        waiting = [each for each in replicas if each.prefixes.unshared]
        if not waiting:
            return ""
        self._rotation += 1
        first = self._rotation % len(waiting)
        blocks: dict[str, bytes] = {}
        room = BYTES_MAX
        for replica in (*waiting[first:], *waiting[:first]):
            pool, unshared = pool_of(replica.engine), replica.prefixes.unshared
            room -= POOL_BYTES + 6 * len(pool)  # as JSON escapes it
            count = min(len(unshared), room // 4 * 3 // KEY_BYTES)
            if count <= 0:
                break
            keys = [unshared.popleft() for _ in range(count)]
            blocks[pool] = blocks.get(pool, b"") + packed(keys)
            room -= count * KEY_BYTES * 4 // 3 + 4
        return msgspec.json.encode(SentBlocks(self._owner, blocks)).decode() if blocks else ""

    def receive(self, text: str) -> None:
        """Implement `Broadcaster`."""
        try:
            sent = msgspec.json.decode(text, type=SentBlocks)
            blocks = {pool: unpacked(keys) for pool, keys in sent.blocks.items()}
        except (msgspec.MsgspecError, struct.error) as error:  # from a process of another version
            _log.info("blocks that another process sent are unreadable: %s", error)
            return
        if sent.owner == self._owner:
            return
        for replica in self._replicas():
            if (keys := blocks.get(pool_of(replica.engine))) and replica.engine.healthy():
                replica.prefixes.sent_elsewhere(keys)

    def _replicas(self) -> Iterator[Replica]:
        """Yield the replicas that other processes use too."""
        for backend in self._router.backends():
            if isinstance(backend, ReplicaSet):
                yield from (each for each in backend.replicas if pool_of(each.engine))


def packed(keys: list[int]) -> bytes:
    return struct.pack(f"<{len(keys)}q", *keys)


def unpacked(keys: bytes) -> tuple[int, ...]:
    """Raises: struct.error."""
    return struct.unpack(f"<{len(keys) // KEY_BYTES}q", keys)
