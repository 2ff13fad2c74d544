"""What a receipt says, and its one encoding as bytes (docs/receipts.md). Pure.

The encoding is fixed for ever: who holds a receipt of today must be able to verify it with the program of today. Another content
gets another version, and another first line.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

VERSION = 1
MAGIC = b"weir.receipt.v1\n"  # 16 bytes, like an id
HASH_SIZE = 32  # bytes of SHA-256
NO_HASH = bytes(HASH_SIZE)  # before the first receipt of a chain
# Magic, four ids, ten numbers of 64 bits, the hash of the receipt before. Three texts follow.
FIXED = struct.Struct(">16s64s10q32s")
LENGTH = struct.Struct(">q")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Receipt:
    """One receipt. Counts in tokens, the cost in picos of `currency_code`, times in microseconds since 1970 (UTC).

    part: 0 for the settlement of a request; 1 for what was found after it had been settled. sequence: 1 for the first of a project.
    """

    organization_id: uuid.UUID
    project_id: uuid.UUID
    api_key_id: uuid.UUID
    request_id: uuid.UUID
    part: int
    input_token_count: int
    cached_input_token_count: int
    billed_token_count: int
    embedding_token_count: int
    price_version: int
    cost_picos: int
    admitted_at_us: int
    settled_at_us: int
    sequence: int
    previous_hash: bytes
    currency_code: str
    model: str
    outcome: str

    @property
    def encoded(self) -> bytes:
        """The bytes that are hashed."""
        ids = (self.organization_id, self.project_id, self.api_key_id, self.request_id)
        return encode(
            b"".join(each.bytes for each in ids),
            (
                self.part,
                self.input_token_count,
                self.cached_input_token_count,
                self.billed_token_count,
                self.embedding_token_count,
                self.price_version,
                self.cost_picos,
                self.admitted_at_us,
                self.settled_at_us,
                self.sequence,
            ),
            self.previous_hash,
            texts(self.currency_code, self.model, self.outcome),
        )


def encode(ids: bytes, numbers: tuple[int, ...], previous_hash: bytes, texts: bytes) -> bytes:
    """The bytes of a receipt, from parts that are at hand where it is made.

    ids: those of organization, project, API key and request, 64 bytes. numbers: the ten of `Receipt` in its order.
    """
    return FIXED.pack(MAGIC, ids, *numbers, previous_hash) + texts


@functools.lru_cache(maxsize=4096)  # currencies x models x outcomes
def texts(currency_code: str, model: str, outcome: str) -> bytes:
    """The end of the encoding: each text with its length before it."""
    encoded = (text.encode() for text in (currency_code, model, outcome))
    return b"".join(LENGTH.pack(len(each)) + each for each in encoded)


def decode(encoded: bytes) -> Receipt:
    """The receipt that was encoded. Raises: ValueError for bytes that no receipt has."""
    ids, numbers, previous_hash, found = parts_of(encoded)
    values: tuple[Any, ...] = (*owners_in(ids[:48]), uuid.UUID(bytes=ids[48:]), *numbers, previous_hash, *found)
    return Receipt(*values)


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


def hash_of(encoded: bytes) -> bytes:
    """SHA-256 of the encoding: what the next receipt of the project names, and what is signed."""
    return hashlib.sha256(encoded).digest()


@functools.lru_cache(maxsize=4096)  # what was admitted together has one time
def micros(at: datetime) -> int:
    """Microseconds since 1970, exactly."""
    return (at - EPOCH) // MICROSECOND
