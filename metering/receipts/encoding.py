"""Content of a receipt and its encoding as bytes (docs/reference/receipts.md). Pure.

The encoding never changes: the holder of a receipt must be able to verify it with today's program
at any later time. Other content needs another version, with another first line. Version 2 has the
number of reasoning tokens, and only receipts that bill such tokens have it. Version 3 has that
number, and how fast the answer came, if the usage event has timings. Version 4 has the hashes of
an end user or labels, and the timings if there are any.
"""

from __future__ import annotations

import functools
import struct
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

MAGIC = b"weir.receipt.v1\n"  # 16 bytes, like an id
MAGIC_REASONING = b"weir.receipt.v2\n"
MAGIC_TIMED = b"weir.receipt.v3\n"
MAGIC_SUBJECTS = b"weir.receipt.v4\n"
HASH_SIZE = 32  # bytes of SHA-256
NO_HASH = bytes(HASH_SIZE)  # before the first receipt of a chain
# Magic, four ids, ten or eleven numbers of 64 bits, the hash of the previous receipt. Three texts
# follow.
FIXED = struct.Struct(">16s64s10q32s")
FIXED_REASONING = struct.Struct(">16s64s11q32s")
FIXED_TIMED = struct.Struct(">16s64s11q32s6q")
# Ends with the sum of HAS_TIMES, HAS_END_USER and HAS_LABELS: the parts that follow.
HAS_TIMES, HAS_END_USER, HAS_LABELS = 1, 2, 4
FIXED_SUBJECTS = struct.Struct(">16s64s11q32sq")
# With those parts, by the number; a part that is missing has size 0.
WITH_SUBJECTS = {
    has: struct.Struct(
        FIXED_SUBJECTS.format
        + "6q" * bool(has & HAS_TIMES)
        + ("32s" if has & HAS_END_USER else "0s")
        + ("32s" if has & HAS_LABELS else "0s")
    )
    for has in range(HAS_END_USER, HAS_TIMES + HAS_END_USER + HAS_LABELS + 1)
}
# Timings of a usage event in a receipt, in thousandths of their units.
TIMED = (
    "ttft_ms",
    "tokens_per_second",
    "itl_p50_ms",
    "itl_p99_ms",
    "itl_max_ms",
    "client_stall_ms",
)
REASONING = 5  # index of the tokens of reasoning among the numbers
LENGTH = struct.Struct(">q")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Of end user and of labels; empty: not in the receipt.
Hashes = tuple[bytes, bytes]
NO_HASHES = (b"", b"")
# Ids, numbers, previous hash, texts, times and hashes of a receipt.
Parts = tuple[bytes, tuple[int, ...], bytes, tuple[str, ...], tuple[int, ...], Hashes]
MICROSECOND = timedelta(microseconds=1)


def timed(timings: Mapping[str, float] | None) -> tuple[int, ...]:
    """Convert the timings of a usage event to the integers of a receipt; empty without timings.

    They are rounded as PostgreSQL rounds the same numbers (`receipt_checks.py`).
    """
    if timings is None:
        return ()
    thousandths: list[int] = []
    for name in TIMED:
        thousandths.append(int(timings.get(name, 0.0) * 1000 + 0.5))
    return tuple(thousandths)


def encode(
    ids: bytes,
    numbers: tuple[int, ...],
    previous_hash: bytes,
    texts: bytes,
    times: tuple[int, ...] = (),
    hashes: Hashes = NO_HASHES,
) -> bytes:
    """Encode a receipt as bytes.

    `ids` are organization, project, API key and request, 64 bytes. `numbers` are part (0: the
    settlement of a request; 1: usage found later); tokens of input, cached input, billed output,
    embedding and reasoning; price version; cost in picos; times of admission and settlement in
    microseconds since 1970 (UTC); and sequence (1 for a project's first). `times` come from
    `timed`, `hashes` from `subjects.py`.
    """
    end_user, labels = hashes
    if end_user or labels:
        has = HAS_TIMES * bool(times) + HAS_END_USER * bool(end_user) + HAS_LABELS * bool(labels)
        parts = *numbers, previous_hash, has, *times, end_user, labels
        return WITH_SUBJECTS[has].pack(MAGIC_SUBJECTS, ids, *parts) + texts
    if times:
        return FIXED_TIMED.pack(MAGIC_TIMED, ids, *numbers, previous_hash, *times) + texts
    part, sent, cached, billed, embedded, reasoning, *others = numbers
    if reasoning:
        return FIXED_REASONING.pack(MAGIC_REASONING, ids, *numbers, previous_hash) + texts
    fixed = FIXED.pack(MAGIC, ids, part, sent, cached, billed, embedded, *others, previous_hash)
    return fixed + texts


@functools.lru_cache(maxsize=4096)  # currencies x models x outcomes
def texts(currency_code: str, model: str, outcome: str) -> bytes:
    """Encode the texts at the end of a receipt, each after its length."""
    encoded = (text.encode() for text in (currency_code, model, outcome))
    return b"".join(LENGTH.pack(len(each)) + each for each in encoded)


def parts_of(encoded: bytes) -> Parts:
    """Decode a receipt into its parts. Raises: ValueError."""
    if encoded.startswith(MAGIC_SUBJECTS) and len(encoded) >= FIXED_SUBJECTS.size:
        return parts_with_subjects(encoded)
    if encoded.startswith(MAGIC_TIMED) and len(encoded) >= FIXED_TIMED.size:
        _, ids, *values = FIXED_TIMED.unpack_from(encoded)
        found = texts_in(encoded[FIXED_TIMED.size :])
        return ids, tuple(values[:11]), values[11], found, tuple(values[12:]), NO_HASHES
    has_reasoning = encoded.startswith(MAGIC_REASONING)
    fixed = FIXED_REASONING if has_reasoning else FIXED
    if len(encoded) < fixed.size or not (has_reasoning or encoded.startswith(MAGIC)):
        raise ValueError("these are not the bytes of a receipt of version 1, 2, 3 or 4")
    _, ids, *numbers, previous_hash = fixed.unpack_from(encoded)
    if not has_reasoning:
        numbers.insert(REASONING, 0)
    elif not numbers[REASONING]:
        raise ValueError("a receipt without reasoning tokens has version 1")
    return ids, tuple(numbers), previous_hash, texts_in(encoded[fixed.size :]), (), NO_HASHES


def parts_with_subjects(encoded: bytes) -> Parts:
    """Decode a receipt of version 4 into its parts. Raises: ValueError."""
    (has,) = LENGTH.unpack_from(encoded, FIXED_SUBJECTS.size - LENGTH.size)
    if (form := WITH_SUBJECTS.get(has)) is None:
        raise ValueError("a receipt of version 4 has the hash of an end user or of labels")
    if len(encoded) < form.size:
        raise ValueError("the receipt ends before its texts do")
    _, ids, *values, end_user, labels = form.unpack_from(encoded)
    found = texts_in(encoded[form.size :])
    return ids, tuple(values[:11]), values[11], found, tuple(values[13:]), (end_user, labels)


@functools.lru_cache(maxsize=4096)  # the keys in use
def owners_in(ids: bytes) -> tuple[uuid.UUID, ...]:
    """Split concatenated ids, such as organization, project and API key, into UUIDs."""
    return tuple(uuid.UUID(bytes=ids[start : start + 16]) for start in range(0, len(ids), 16))


@functools.lru_cache(maxsize=4096)  # currencies x models x outcomes
def texts_in(encoded: bytes) -> tuple[str, ...]:
    """Decode the texts encoded by `texts`. Raises: ValueError."""
    decoded: list[str] = []
    at = 0
    for _ in range(3):
        if len(encoded) < at + LENGTH.size:
            raise ValueError("the receipt ends before its texts do")
        (length,) = LENGTH.unpack_from(encoded, at)
        at += LENGTH.size
        if not 0 <= length <= len(encoded) - at:
            raise ValueError("the receipt ends before its texts do")
        decoded.append(encoded[at : at + length].decode())
        at += length
    if at != len(encoded):
        raise ValueError("the receipt continues after its texts")
    return tuple(decoded)


@functools.lru_cache(maxsize=4096)  # requests admitted together share a time
def micros(at: datetime) -> int:
    """Convert a time to microseconds since 1970, exactly."""
    return (at - EPOCH) // MICROSECOND
