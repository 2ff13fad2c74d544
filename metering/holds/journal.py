"""The usage journal: what was delivered, on local disk before it is sent, so that a killed process loses no token.

One append-only file per process and one write per step, whatever the number of requests in the step. The write reaches the
kernel before the tokens reach the transport; it is not synced, since it guards against the death of the process, not of the machine
(for that, holds carry the delivered count of their last extension). The file is locked while its process lives: whoever can lock it
knows that the owner is dead and may settle in its name (`recovery.py`). A file of bindings beside it, which exists in outages only,
tells which request was let in under which hold while the database was away.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import struct
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from metering.quotas.quota_rules import Payer

BINDINGS_SUFFIX = ".bindings"


@dataclass(frozen=True, slots=True)
class Bind:
    """A hold that was taken in advance belongs to this request, which was given so many tokens of it."""

    hold_id: uuid.UUID
    payer: Payer
    request_id: uuid.UUID
    payload_hash: bytes
    labels: dict[str, str]
    input_token_count: int
    leased_token_count: int


class BindingLog:
    """The file of this process. Not thread-safe: one event loop writes."""

    def __init__(self, directory: Path, owner_id: uuid.UUID) -> None:
        self._path = directory / f"{owner_id}{BINDINGS_SUFFIX}"
        self._fd = -1
        self._size_bytes = 0
        self._torn = False
        self._open: set[uuid.UUID] = set()

    def record(self, bind: Bind) -> None:
        """Write it down; tokens may then flow under it.

        Raises: OSError if the disk refuses; nothing of it stands there then.
        """
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._size_bytes = os.fstat(self._fd).st_size
        if self._torn:  # the disk took not even that
            self._cut()
        line = encode_binding(bind)
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(f"{self._path} took a part of a record only")
        except OSError:
            self._cut()
            raise
        self._size_bytes += len(line)
        self._open.add(bind.hold_id)

    def _cut(self) -> None:
        """Take half a record away, which would hide all that are written after it. Cutting a file short needs no space."""
        self._torn = True
        os.ftruncate(self._fd, self._size_bytes)
        self._torn = False

    def forget(self, hold_id: uuid.UUID) -> None:
        """The database knows. With the last one the file goes."""
        self._open.discard(hold_id)
        if not self._open:
            self.close(keep=False)

    def close(self, *, keep: bool) -> None:
        """Give the file up. keep: for recovery. Idempotent."""
        if self._fd >= 0:
            if not keep:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd, self._torn = -1, False


def encode_binding(bind: Bind) -> bytes:
    """One line: a check sum and the record."""
    payer = bind.payer
    body = json.dumps(
        {
            "hold_id": str(bind.hold_id),
            "payer": [str(payer.organization_id), str(payer.project_id), str(payer.api_key_id), payer.currency_code],
            "request_id": str(bind.request_id),
            "payload_hash": bind.payload_hash.hex(),
            "labels": bind.labels,
            "input_token_count": bind.input_token_count,
            "leased_token_count": bind.leased_token_count,
        }
    ).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def read_bindings(directory: Path, owner_id: uuid.UUID) -> list[Bind]:
    """What a dead process has written, up to the first torn line: under a binding that was not written whole nothing was sent."""
    try:
        data = (directory / f"{owner_id}{BINDINGS_SUFFIX}").read_bytes()
    except FileNotFoundError:
        return []
    return list(decode_bindings(data))


def decode_bindings(data: bytes) -> Iterator[Bind]:
    """The records of a file."""
    for line in data.splitlines(keepends=True):
        head, _, body = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or head != b"%08x" % zlib.crc32(body):
            return
        fields = json.loads(body)
        organization, project, api_key, currency_code = fields["payer"]
        yield Bind(
            hold_id=uuid.UUID(fields["hold_id"]),
            payer=Payer(uuid.UUID(organization), uuid.UUID(project), uuid.UUID(api_key), currency_code),
            request_id=uuid.UUID(fields["request_id"]),
            payload_hash=bytes.fromhex(fields["payload_hash"]),
            labels=fields["labels"],
            input_token_count=fields["input_token_count"],
            leased_token_count=fields["leased_token_count"],
        )


SUFFIX = ".journal"

NAME_FORM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.[0-9]+\.journal", re.ASCII)  # owner and segment

UNFINISHED_SUFFIX = ".new"

COUNTS = struct.Struct("<16sIIII")  # hold id; input, cached, generated, delivered token counts
RECORD = struct.Struct(f"{COUNTS.format}I")  # with the crc32 of what stands before

LOCKS_REMEDY = "set WEIR_HOME to a directory on a local file system, one for each machine"

ROTATE_BYTES = 16 * 2**20  # half a million records: minutes of a busy process, milliseconds of recovery


log = structlog.get_logger(__name__)


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """What one hold has delivered in all, counts in tokens."""

    hold_id: uuid.UUID
    input_token_count: int
    cached_input_token_count: int
    generated_token_count: int
    delivered_token_count: int


class UsageJournal:
    """The journal that this process writes. Not thread-safe: one event loop writes."""

    def __init__(self, directory: Path, owner_id: uuid.UUID, *, rotate_bytes: int = ROTATE_BYTES) -> None:
        self.directory = directory
        self.owner_id = owner_id
        self._rotate_bytes = self._rotate_at_bytes = rotate_bytes
        self._live: dict[int, Delivered] = {}  # by the number of the hold's id: UUIDs hash in Python
        self._segment = 0
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.bindings = BindingLog(directory, owner_id)
        self._fd, self._path = self._create_segment(())
        self._size_bytes = 0
        self._torn = False
        self._outlived: list[tuple[int, Path]] = []  # segments that the disk would not remove

    @property
    def size_bytes(self) -> int:
        """Of the file that is written now."""
        return self._size_bytes

    @property
    def unsettled_count(self) -> int:
        """Requests that have delivered something the database has yet to hear of."""
        return len(self._live)

    def record(self, entries: Sequence[Delivered]) -> None:
        """Write the new totals of these holds; what stands here may then be sent.

        Raises: OSError if the disk refuses; nothing of it may be sent then, and nothing of it stands here.
        """
        if self._torn:  # the disk took not even that
            self._cut()
        try:
            write_all(self._fd, b"".join(map(encode, entries)))
        except OSError:
            self._cut()
            raise
        self._size_bytes += RECORD.size * len(entries)
        for entry in entries:
            self._live[entry.hold_id.int] = entry
        if self._size_bytes >= self._rotate_at_bytes:
            self._rotate()

    def _cut(self) -> None:
        """Take half a record away, which would hide all that are written after it. Cutting a file short needs no space."""
        self._torn = True
        os.ftruncate(self._fd, self._size_bytes)
        self._torn = False

    def forget(self, hold_id: uuid.UUID) -> None:
        """The hold has been settled: the database knows."""
        self._live.pop(hold_id.int, None)

    def close(self) -> None:
        """Give the file up; it stays for recovery if something in it was never settled. Idempotent."""
        self.bindings.close(keep=bool(self._live))
        if self._fd >= 0:
            self._remove_outlived()
            if not self._live:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
            for fd, _ in self._outlived:
                os.close(fd)

    def _rotate(self) -> None:
        """Begin a new file with what is not settled yet, then remove the old one: at each moment one of them tells everything.

        Where that fails the old file goes on: what was to be recorded stands in it, and may be sent.
        """
        old_fd, old_path = self._fd, self._path
        try:
            self._fd, self._path = self._create_segment(self._live.values())
        except OSError as error:
            log.warning("journal_rotation_delayed", cause=str(error), size_bytes=self._size_bytes)
            self._rotate_at_bytes = self._size_bytes + self._rotate_bytes
            return
        self._size_bytes = RECORD.size * len(self._live)
        self._rotate_at_bytes = self._size_bytes + self._rotate_bytes
        self._outlived.append((old_fd, old_path))
        self._remove_outlived()

    def _remove_outlived(self) -> None:
        """Files that tell nothing which this one does not. One that stays is kept locked: unlocked it says that we are dead."""
        for fd, path in list(self._outlived):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                self._outlived.remove((fd, path))
                os.close(fd)

    def _create_segment(self, entries: Iterable[Delivered]) -> tuple[int, Path]:
        self._segment += 1
        path = self.directory / f"{self.owner_id}.{self._segment}{SUFFIX}"
        unfinished = path.with_suffix(UNFINISHED_SUFFIX)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(fd, b"".join(map(encode, entries)))
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            os.close(fd)
            raise
        return fd, path


def check_locks(directory: Path) -> None:
    """Raise OSError if locks have no effect in the directory: recovery would take journals of living processes for abandoned.

    A lock belongs to the open file, so two in one process conflict exactly as two of different processes do.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / f"{uuid.uuid4()}.locktest"
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        other = os.open(path, os.O_RDWR)
        try:
            if not os.path.samestat(os.fstat(held), os.fstat(other)):
                raise OSError(f"a file that was opened twice in {directory} is not the same file: {LOCKS_REMEDY}")
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
    """Which file of its owner it is, by its name: the higher, the newer."""
    number = path.name.split(".")[1]
    return int(number) if number.isdecimal() else -1


def encode(entry: Delivered) -> bytes:
    """One record."""
    body = COUNTS.pack(
        entry.hold_id.int.to_bytes(16, "big"),
        entry.input_token_count,
        entry.cached_input_token_count,
        entry.generated_token_count,
        entry.delivered_token_count,
    )
    return body + zlib.crc32(body).to_bytes(4, "little")


def decode(data: bytes) -> Iterator[Delivered]:
    """The records up to the first torn one: a record that was not written whole was never followed by its tokens."""
    for offset in range(0, len(data) - RECORD.size + 1, RECORD.size):
        hold_id, *counts, crc = RECORD.unpack_from(data, offset)
        if zlib.crc32(data[offset : offset + RECORD.size - 4]) != crc:
            return
        yield Delivered(uuid.UUID(bytes=hold_id), *counts)


def write_all(fd: int, data: bytes) -> None:
    """Write everything; a disk that takes less raises at the next attempt."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class AbandonedJournal:
    """The journal of a dead process, locked by us. Use as context manager."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.owner_id = uuid.UUID(path.name.split(".")[0])
        self._fd = fd

    def __enter__(self) -> AbandonedJournal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def delivered(self) -> list[Delivered]:
        """The last totals of each hold, in this file and any other of the same owner: what is outdated here stands there."""
        last: dict[uuid.UUID, Delivered] = {}
        for path in sorted(self.path.parent.glob(f"{self.owner_id}.*{SUFFIX}"), key=segment_of):
            with contextlib.suppress(FileNotFoundError):  # another recovery was faster with that one
                last |= {entry.hold_id: entry for entry in decode(path.read_bytes())}
        return list(last.values())

    def bindings(self) -> list[Bind]:
        """The requests that its owner let in while the database was away, in order."""
        return read_bindings(self.path.parent, self.owner_id)

    def remove(self) -> None:
        """Everything in it stands in the database. What its owner had begun to rotate to goes too, and its bindings."""
        self.path.with_name(f"{self.owner_id}{BINDINGS_SUFFIX}").unlink(missing_ok=True)
        for unfinished in self.path.parent.glob(f"{self.owner_id}.*{UNFINISHED_SUFFIX}"):
            unfinished.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def set_aside(self) -> None:
        """Something in it was refused: keep it for a person, out of the way of further recoveries."""
        self.path.rename(self.path.with_suffix(".refused"))


def abandoned_journals(directory: Path) -> Iterator[AbandonedJournal]:
    """Journals in the directory whose owners are dead, each locked while it is looked at."""
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        if NAME_FORM.fullmatch(path.name) is None:
            continue  # whatever it is, it is not ours
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        if not path.exists():  # another recovery was faster
            os.close(fd)
            continue
        with AbandonedJournal(path, fd) as journal:
            yield journal


class JournalBacklog(NamedTuple):
    """Journals that nobody writes any more: those that wait for recovery, for how long, and those that wait for a person."""

    abandoned_count: int
    oldest_age_s: float
    refused_count: int


def journal_backlog(directory: Path) -> JournalBacklog:
    """Look, without taking anything from anybody: a recovery that comes in the same moment passes such a file over once."""
    ages_s = []
    for path in directory.glob(f"*{SUFFIX}"):
        # It is gone meanwhile, or its owner lives.
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            ages_s.append(time.time() - os.fstat(file.fileno()).st_mtime)
    refused_count = sum(1 for _ in directory.glob("*.refused"))
    return JournalBacklog(len(ages_s), max(ages_s, default=0.0), refused_count)
