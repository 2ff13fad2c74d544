"""What a receipt says, and its one encoding as bytes (docs/reference/receipts.md). Pure.

The encoding is fixed for ever: who holds a receipt of today must be able to verify it with the program of today. Another content
gets another version, and another first line.
"""

from __future__ import annotations

import functools
import struct
import uuid
from datetime import UTC, datetime, timedelta

VERSION = 1
MAGIC = b"weir.receipt.v1\n"  # 16 bytes, like an id
HASH_SIZE = 32  # bytes of SHA-256
NO_HASH = bytes(HASH_SIZE)  # before the first receipt of a chain
# Magic, four ids, ten numbers of 64 bits, the hash of the receipt before. Three texts follow.
FIXED = struct.Struct(">16s64s10q32s")
LENGTH = struct.Struct(">q")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def encode(ids: bytes, numbers: tuple[int, ...], previous_hash: bytes, texts: bytes) -> bytes:
    """The bytes of a receipt, from parts that are at hand where it is made.

    ids: those of organization, project, API key and request, 64 bytes. numbers: part (0: the settlement of a request; 1: what was
    found after it), tokens of input, cached input, billed output and embedding, price version, cost in picos, times of admission
    and settlement in microseconds since 1970 (UTC), sequence (1 for the first of a project).
    """
    return FIXED.pack(MAGIC, ids, *numbers, previous_hash) + texts


@functools.lru_cache(maxsize=4096)  # currencies x models x outcomes
def texts(currency_code: str, model: str, outcome: str) -> bytes:
    """The end of the encoding: each text with its length before it."""
    encoded = (text.encode() for text in (currency_code, model, outcome))
    return b"".join(LENGTH.pack(len(each)) + each for each in encoded)


def parts_of(encoded: bytes) -> tuple[bytes, tuple[int, ...], bytes, tuple[str, ...]]:
    """What `encode` made them of: ids, numbers, hash of the receipt before, and the three texts. Raises: ValueError."""
    if len(encoded) < FIXED.size or not encoded.startswith(MAGIC):
        raise ValueError("these are not the bytes of a receipt of version 1")
    _, ids, *numbers, previous_hash = FIXED.unpack_from(encoded)
    return ids, tuple(numbers), previous_hash, texts_in(encoded[FIXED.size :])


@functools.lru_cache(maxsize=4096)  # the keys in use
def owners_in(ids: bytes) -> tuple[uuid.UUID, ...]:
    """Organization, project and API key."""
    return tuple(uuid.UUID(bytes=ids[start : start + 16]) for start in range(0, len(ids), 16))


@functools.lru_cache(maxsize=4096)  # currencies x models x outcomes
def texts_in(encoded: bytes) -> tuple[str, ...]:
    """What `texts` has encoded. Raises: ValueError."""
    found: list[str] = []
    at = 0
    for _ in range(3):
        if len(encoded) < at + LENGTH.size:
            raise ValueError("the receipt ends before its texts do")
        (length,) = LENGTH.unpack_from(encoded, at)
        at += LENGTH.size
        if not 0 <= length <= len(encoded) - at:
            raise ValueError("the receipt ends before its texts do")
        found.append(encoded[at : at + length].decode())
        at += length
    if at != len(encoded):
        raise ValueError("the receipt goes on after its texts")
    return tuple(found)


@functools.lru_cache(maxsize=4096)  # what was admitted together has one time
def micros(at: datetime) -> int:
    """Microseconds since 1970, exactly."""
    return (at - EPOCH) // MICROSECOND
