"""Usage journal: token totals, on local disk before the tokens are sent.

One append-only file per process and one write per step for all requests of the step. The write
reaches the kernel before the tokens reach the transport. It is not synced: it guards against the
death of the process, not of the machine (for that, holds carry the delivered count of their last
extension). The file is locked while its process lives: a process that obtains the lock may settle
for the dead owner (`recovery.py`).

The journal is the upper bound of the bill; a second file, mapped into memory, has the totals of
each hold that the transport has taken. Both count reasoning tokens separately, which have a price
of their own. During an outage of the database, a third file records which request was admitted
under which hold (`bindings.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import struct
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from metering.core.errors import JournalUnavailable
from metering.holds.bindings import BINDINGS_SUFFIX, Bind, BindingLog, read_bindings

# Owner and segment.
NAME_FORM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.[0-9]+\.journal2?", re.ASCII)
UNFINISHED_SUFFIX = ".new"
TAKEN_BITS = 32  # bits of a mark's token count; reasoning is above
MARKS_AT_FIRST = 2048  # requests with output at once; more make the file grow
# Written and removed to find out whether the disk takes data again: more than a block, since the
# rest of the last block of a file is free even on a full disk.
PROBE_BYTES = 64 * 2**10
LOCKS_REMEDY = "set WEIR_HOME to a directory on a local file system, one for each machine"
ROTATE_BYTES = 16 * 2**20  # half a million records: minutes of a busy process, recovered in ms
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Format:
    """File format of a journal.

    `counts` packs a record before its CRC-32: hold id; input, cached, generated and delivered token
    counts; and reasoning tokens where the format has them. `mark` packs a hold id and the output
    tokens that the transport has taken, with the reasoning tokens among them in the upper half.
    """

    suffix: str
    counts: struct.Struct
    marks_suffix: str
    mark: struct.Struct
    record_size: int = field(init=False)  # in bytes, with its crc32
    mark_words: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute the sizes once; every step of a batch needs them."""
        object.__setattr__(self, "record_size", self.counts.size + 4)
        object.__setattr__(self, "mark_words", self.mark.size // 8)


# By suffix: of release 0.1.0, whose journals are recovered after an upgrade, and of this server. An
# older server ignores files that it cannot read: the suffixes differ.
FORMATS = {
    each.suffix: each
    for each in (
        Format(".journal", struct.Struct("<16sIIII"), ".taken", struct.Struct("<16sI")),
        Format(".journal2", struct.Struct("<16sIIIII"), ".taken2", struct.Struct("<16sQ")),
    )
}
FORMAT = FORMATS[".journal2"]


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """Token totals of a hold so far, including the tokens of the message to be sent."""

    hold_id: uuid.UUID
    input_token_count: int
    cached_input_token_count: int
    generated_token_count: int
    delivered_token_count: int
    reasoning_token_count: int = 0  # part of the delivered ones


class UsageJournal:
    """Journal of this process. Not thread-safe: use it from one event loop.

    `fault` is the reason why the disk refuses writes, empty while it accepts them.
    """

    def __init__(
        self, directory: Path, process_id: uuid.UUID, *, rotate_bytes: int = ROTATE_BYTES
    ) -> None:
        self.directory = directory
        self.process_id = process_id
        self.fault = ""
        self._rotate_bytes = self._rotate_at_bytes = rotate_bytes
        self._live: dict[int, Delivered] = {}  # by integer hold id: UUIDs hash in Python
        self._segment = 0
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.bindings = BindingLog(directory, process_id, self.failed)
        self._marks_path = directory / f"{process_id}{FORMAT.marks_suffix}"
        self._marks = memoryview(b"").cast("Q")
        self._offsets: dict[int, int] = {}  # of marks, in words, by integer hold id
        self._free_marks: list[int] = []
        self._add_marks(MARKS_AT_FIRST)
        self._fd, self._path = self._create_segment(())
        self._size_bytes = 0
        self._torn = False
        self._outlived: list[tuple[int, Path]] = []  # old segments that could not be removed yet

    @property
    def size_bytes(self) -> int:
        """Size of the current segment file."""
        return self._size_bytes

    @property
    def unsettled_count(self) -> int:
        """Number of requests with delivered tokens that are not settled."""
        return len(self._live)

    def record(self, entries: Sequence[Delivered]) -> None:
        """Append new totals of holds. Only then may the tokens that they count be sent.

        Raises: JournalUnavailable if the disk refuses; the file is then unchanged, and nothing may
        be sent.
        """
        offsets = self._offsets
        try:
            if self._torn:  # the truncation failed
                self._cut()
            for entry in entries:
                if (number := entry.hold_id.int) not in offsets:
                    if not self._free_marks:
                        self._add_marks(len(offsets))
                    start = self._free_marks.pop()
                    FORMAT.mark.pack_into(self._marks, 8 * start, entry.hold_id.bytes, 0)
                    offsets[number] = start + FORMAT.mark_words - 1
            data = encode(entries[0]) if len(entries) == 1 else b"".join(map(encode, entries))
            self._torn = True
            if (written_count := os.write(self._fd, data)) < len(data):
                write_all(self._fd, data[written_count:])
            self._torn = False
        except OSError as error:
            if self._torn:
                with contextlib.suppress(OSError):
                    self._cut()
            raise self.failed(error) from error
        self._size_bytes += FORMAT.record_size * len(entries)
        for entry in entries:
            self._live[entry.hold_id.int] = entry
        if self._size_bytes >= self._rotate_at_bytes:
            try:
                self._rotate()
            except OSError as error:  # the old segment, which has the new record, stays in use
                log.warning(
                    "journal_rotation_delayed", cause=str(error), size_bytes=self._size_bytes
                )
                self._rotate_at_bytes = self._size_bytes + self._rotate_bytes

    def took(self, hold_id: uuid.UUID, token_count: int, reasoning_token_count: int = 0) -> None:
        """Mark how many tokens of a hold the transport has taken.

        One store of a word into the page cache, so a killed process leaves both totals or neither.
        """
        if (offset := self._offsets.get(hold_id.int)) is not None:
            self._marks[offset] = token_count | reasoning_token_count << TAKEN_BITS

    def failed(self, error: OSError) -> JournalUnavailable:
        """Record that the disk refuses, log it the first time, and return the error to raise."""
        if not self.fault:
            log.error("journal_failed", cause=str(error))
        self.fault = str(error) or type(error).__name__
        return JournalUnavailable()

    def check(self) -> None:
        """Raise JournalUnavailable while the disk refuses writes, so that no request starts."""
        if self.fault:
            raise JournalUnavailable()

    def can_write(self) -> bool:
        """Return True if the journal can be written. After a failure, this tries a new segment."""
        if self.fault:
            try:
                if not self._free_marks:
                    self._add_marks(max(len(self._offsets), 1))
                self._rotate()
                self._torn = True
                write_all(self._fd, bytes(PROBE_BYTES))
                self._cut()
            except OSError:
                return False
            log.warning("journal_works_again")
            self.fault = ""
        return True

    def _cut(self) -> None:
        """Remove a torn record, which would hide all later ones. Truncation needs no disk space."""
        os.ftruncate(self._fd, self._size_bytes)
        self._torn = False

    def forget(self, hold_id: uuid.UUID) -> None:
        """Drop the totals of a hold that is settled."""
        self._live.pop(hold_id.int, None)
        if (offset := self._offsets.pop(hold_id.int, None)) is not None:
            self._free_marks.append(offset - FORMAT.mark_words + 1)

    def close(self) -> None:
        """Close the files; leave them for recovery if totals are unsettled. Idempotent."""
        self.bindings.close(keep=bool(self._live))
        if self._fd >= 0:
            self._remove_outlived()
            if not self._live:
                self._path.unlink(missing_ok=True)
                self._marks_path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
            for fd, _ in self._outlived:
                os.close(fd)

    def _add_marks(self, count: int) -> None:
        """Grow the file of marks. Raises: OSError.

        Space is allocated, because a store to a page without disk space would kill the process.
        """
        before = len(self._marks) // FORMAT.mark_words
        fd = os.open(self._marks_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size_bytes = (before + count) * FORMAT.mark.size
            os.posix_fallocate(fd, 0, size_bytes)
            self._marks = memoryview(mmap.mmap(fd, size_bytes)).cast("Q")
        finally:
            os.close(fd)
        words = range(
            before * FORMAT.mark_words, (before + count) * FORMAT.mark_words, FORMAT.mark_words
        )
        self._free_marks += reversed(words)

    def _rotate(self) -> None:
        """Start a new segment with all unsettled totals and remove the old one.

        Raises: OSError; nothing has changed then.
        """
        old = self._fd, self._path
        self._fd, self._path = self._create_segment(self._live.values())
        self._torn = False
        self._size_bytes = FORMAT.record_size * len(self._live)
        self._rotate_at_bytes = self._size_bytes + self._rotate_bytes
        self._outlived.append(old)
        self._remove_outlived()

    def _remove_outlived(self) -> None:
        """Remove old segments. One that remains stays locked, or it would be recovered."""
        for fd, path in list(self._outlived):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                self._outlived.remove((fd, path))
                os.close(fd)

    def _create_segment(self, entries: Iterable[Delivered]) -> tuple[int, Path]:
        self._segment += 1
        path = self.directory / f"{self.process_id}.{self._segment}{FORMAT.suffix}"
        unfinished = path.with_suffix(UNFINISHED_SUFFIX)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(fd, b"".join(map(encode, entries)))
            unfinished.rename(path)
        except BaseException:
            os.close(fd)
            unfinished.unlink(missing_ok=True)
            raise
        return fd, path


def check_locks(directory: Path) -> None:
    """Raise OSError if file locks have no effect in the directory, because recovery relies on them.

    Two locks of one process conflict like those of two processes: a lock belongs to the open file.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / f"{uuid.uuid4()}.locktest"
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        other = os.open(path, os.O_RDWR)
        try:
            if not os.path.samestat(os.fstat(held), os.fstat(other)):
                raise OSError(
                    f"opening one file twice in {directory} returned two files: {LOCKS_REMEDY}"
                )
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        finally:
            os.close(other)
    finally:
        os.close(held)
        path.unlink(missing_ok=True)
    raise OSError(f"two locks on one file in {directory} were granted at once: {LOCKS_REMEDY}")


def segment_of(path: Path) -> int:
    """Parse the segment number of a journal's file name, higher for newer files; -1 if none."""
    number = path.name.split(".")[1]
    return int(number) if number.isdecimal() else -1


def encode(entry: Delivered) -> bytes:
    """Encode an entry as a record with its CRC-32."""
    body = FORMAT.counts.pack(
        entry.hold_id.int.to_bytes(16, "big"),
        entry.input_token_count,
        entry.cached_input_token_count,
        entry.generated_token_count,
        entry.delivered_token_count,
        entry.reasoning_token_count,
    )
    return body + zlib.crc32(body).to_bytes(4, "little")


def decode(data: bytes, form: Format = FORMAT) -> Iterator[Delivered]:
    """Decode the records up to the first torn one. Tokens of a torn record were never sent."""
    size = form.record_size
    for offset in range(0, len(data) - size + 1, size):
        body, crc = data[offset : offset + size - 4], data[offset + size - 4 : offset + size]
        if zlib.crc32(body) != int.from_bytes(crc, "little"):
            return
        hold_id, *counts = form.counts.unpack(body)
        yield Delivered(uuid.UUID(bytes=hold_id), *counts)


def write_all(fd: int, data: bytes) -> None:
    """Write all data, in several writes if needed. Raises: OSError, such as for a full disk."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class AbandonedJournal:
    """Journal of a dead process, locked by this process. Use it as a context manager."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.process_id = uuid.UUID(path.name.split(".")[0])
        self._format = FORMATS[path.suffix]
        self._fd = fd

    def __enter__(self) -> AbandonedJournal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def delivered(self) -> list[Delivered]:
        """Read the last totals of each hold from all segments."""
        last: dict[uuid.UUID, Delivered] = {}
        for path in sorted(self._segments(), key=segment_of):
            with contextlib.suppress(FileNotFoundError):  # removed by another recovery
                records = decode(path.read_bytes(), self._format)
                last |= {entry.hold_id: entry for entry in records}
        return list(last.values())

    def taken(self) -> Mapping[uuid.UUID, tuple[int, int]]:
        """Read how many tokens of each hold the transport took, and its reasoning tokens."""
        mark = self._format.mark
        try:
            data = self._marks_path.read_bytes()
        except FileNotFoundError:
            return {}
        whole = data[: len(data) // mark.size * mark.size]
        return {
            uuid.UUID(bytes=hold_id): (word % (1 << TAKEN_BITS), word >> TAKEN_BITS)
            for hold_id, word in mark.iter_unpack(whole)
        }

    def _segments(self) -> Iterator[Path]:
        return self.path.parent.glob(f"{self.process_id}.*{self._format.suffix}")

    @property
    def _marks_path(self) -> Path:
        return self.path.with_name(f"{self.process_id}{self._format.marks_suffix}")

    def bindings(self) -> list[Bind]:
        """Read the requests that the dead process admitted during an outage, in order."""
        return read_bindings(self.path.parent, self.process_id)

    def remove(self) -> None:
        """Delete the journal's segments and bindings. Call it once everything is settled."""
        self.path.with_name(f"{self.process_id}{BINDINGS_SUFFIX}").unlink(missing_ok=True)
        for unfinished in self.path.parent.glob(f"{self.process_id}.*{UNFINISHED_SUFFIX}"):
            unfinished.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        if not any(self._segments()):
            self._marks_path.unlink(missing_ok=True)

    def set_aside(self) -> None:
        """Rename a journal with refused entries for manual inspection; recovery skips it."""
        self.path.rename(self.path.with_suffix(".refused"))


def journal_files(directory: Path) -> Iterator[Path]:
    """Yield the journal files of all formats in a directory."""
    for suffix in FORMATS:
        yield from directory.glob(f"*{suffix}")


def abandoned_journals(directory: Path) -> Iterator[AbandonedJournal]:
    """Yield the journals of dead processes. Each is locked until the next is requested."""
    for path in sorted(journal_files(directory)):
        if NAME_FORM.fullmatch(path.name) is None:
            continue  # not a journal
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        if not path.exists():  # removed by another recovery
            os.close(fd)
            continue
        with AbandonedJournal(path, fd) as journal:
            yield journal


class JournalBacklog(NamedTuple):
    """Number of journals that await recovery, the age of the oldest, and the number set aside."""

    abandoned_count: int
    oldest_age_s: float
    refused_count: int


def journal_backlog(directory: Path) -> JournalBacklog:
    """Count the journals. The brief locks may make a concurrent recovery skip a file once."""
    ages_s = []
    for path in journal_files(directory):
        # Removed meanwhile, or its owner is alive.
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            ages_s.append(time.time() - os.fstat(file.fileno()).st_mtime)
    refused_count = sum(1 for _ in directory.glob("*.refused"))
    return JournalBacklog(len(ages_s), max(ages_s, default=0.0), refused_count)
