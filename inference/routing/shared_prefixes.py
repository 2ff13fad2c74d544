"""Hashes of prompt blocks, which api processes announce when they send them to shared servers.

Each process remembers which prompts it has sent to a replica (`SentPrefixes`), and places the next
one by that. A broadcast announces new blocks to the others, so that a prompt goes to the replica
that has its prefix, whichever process takes it. A process that has just connected to a server asks
the others for the blocks that they know, and they repeat the newest ones between them.

Nothing depends on it: a lost broadcast costs a cache miss, and blocks beyond the room of one
broadcast wait for the next, or are dropped. Blocks of requests that may not leave their region are
never announced.
"""

from __future__ import annotations

import itertools
import logging
import struct
import uuid
from collections.abc import Iterator, Sequence

import msgspec

from inference.engine import pool_of
from inference.routing.replica import Replica
from inference.routing.replica_set import ReplicaSet
from inference.routing.router import Router

BYTES_MAX = 6900  # of one broadcast as JSON
POOL_BYTES = 8  # of JSON around the name of a pool
KEY_BYTES = 8
_log = logging.getLogger("weir.inference.routing")


class SentBlocks(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Broadcast message. `owner` is the process that sent the blocks.

    `blocks` has the hashes by pool (`Pooled.pool`), each in eight bytes, as packed by `packed`.
    `earlier` has blocks that were announced before, and `requested` the pools whose earlier blocks
    the owner needs.
    """

    owner: str
    blocks: dict[str, bytes] = {}
    earlier: dict[str, bytes] = {}
    requested: list[str] = []


class SharedPrefixes:
    """Broadcaster of the blocks that this process has sent. Implements `Broadcaster`."""

    def __init__(self, router: Router, process_id: uuid.UUID) -> None:
        """`process_id` identifies this process, so that it ignores its own broadcasts."""
        self._router = router
        self._owner = process_id.hex
        self._rotation = 0  # of the replicas, so that each comes first at times
        self._requested: set[Replica] = set()  # whose earlier blocks this process has asked for
        self.process_count = 1  # that the database knows, this one included

    def next_broadcast(self) -> str:
        """Return the next blocks that the others do not know; empty for none, or without others."""
        if self.process_count < 2:
            return ""
        replicas = list(self._replicas())
        first = self._rotation % len(replicas) if replicas else 0
        self._rotation += 1
        sent, room = SentBlocks(self._owner), BYTES_MAX
        for replica in (*replicas[first:], *replicas[:first]):
            if (unshared := replica.prefixes.unshared) and (count := room_for(replica, room)):
                keys = [unshared.popleft() for _ in range(min(len(unshared), count))]
                room -= added(sent.blocks, replica, keys)
        room -= self._request(sent.requested, replicas, room)
        for replica in (*replicas[first:], *replicas[:first]):
            if (recalled := replica.prefixes.recalled) and (count := room_for(replica, room)):
                keys = list(itertools.islice(recalled, count))
                for key in keys:
                    del recalled[key]
                room -= added(sent.earlier, replica, keys)
        is_empty = not (sent.blocks or sent.earlier or sent.requested)
        return "" if is_empty else msgspec.json.encode(sent).decode()

    def _request(self, requested: list[str], replicas: Sequence[Replica], room: int) -> int:
        """Ask for earlier blocks of servers that take requests now; return the bytes it takes.

        Again when a server is back: others may not have lost it.
        """
        is_healthy = {replica: replica.engine.healthy() for replica in replicas}
        self._requested = {replica for replica in self._requested if is_healthy.get(replica)}
        byte_count = 0
        for replica in replicas:
            if is_healthy[replica] and replica not in self._requested:
                pool = pool_of(replica.engine)
                if (byte_count := byte_count + POOL_BYTES + 6 * len(pool)) > room:
                    return room
                self._requested.add(replica)
                requested.append(pool)
        return byte_count

    def receive(self, text: str) -> None:
        """Implement `Broadcaster`."""
        try:
            sent = msgspec.json.decode(text, type=SentBlocks)
            blocks = {pool: unpacked(keys) for pool, keys in sent.blocks.items()}
            earlier = {pool: unpacked(keys) for pool, keys in sent.earlier.items()}
        except (msgspec.MsgspecError, struct.error) as error:  # from a process of another version
            _log.info("blocks that another process sent are unreadable: %s", error)
            return
        if sent.owner == self._owner:
            return
        for replica in self._replicas():
            pool, prefixes = pool_of(replica.engine), replica.prefixes
            if not replica.engine.healthy():
                continue
            if keys := earlier.get(pool):
                prefixes.sent_earlier(keys)
            if keys := blocks.get(pool):
                prefixes.sent_elsewhere(keys)
            if pool in sent.requested:
                prefixes.recall()

    def _replicas(self) -> Iterator[Replica]:
        """Yield the replicas that other processes use too."""
        for backend in self._router.backends():
            if isinstance(backend, ReplicaSet):
                yield from (each for each in backend.replicas if pool_of(each.engine))


def room_for(replica: Replica, room: int) -> int:
    """Return how many blocks of a replica fit into so many bytes of JSON."""
    return max(room - POOL_BYTES - 6 * len(pool_of(replica.engine)), 0) // 4 * 3 // KEY_BYTES


def added(blocks: dict[str, bytes], replica: Replica, keys: Sequence[int]) -> int:
    """Add blocks of a replica to a message; return the bytes of JSON that they take at most."""
    pool = pool_of(replica.engine)
    blocks[pool] = blocks.get(pool, b"") + packed(keys)
    return POOL_BYTES + 6 * len(pool) + len(keys) * KEY_BYTES * 4 // 3 + 4


def packed(keys: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(keys)}q", *keys)


def unpacked(keys: bytes) -> tuple[int, ...]:
    """Raises: struct.error."""
    return struct.unpack(f"<{len(keys) // KEY_BYTES}q", keys)
