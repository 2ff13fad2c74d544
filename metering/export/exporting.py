"""The interface of an exporter, the border between our batches of tokens and the biller; and the one that writes a file.

An exporter counts each quantity once by its identifier, however often it is delivered, for as long as it promises to. Identifiers
are derived from what they identify: a database that has lost commits in a failover makes the same ones again, so the biller counts
nothing twice. A quantity is not part of its identifier: where some usage was lost as well, the biller keeps what it counted first,
and `weir reconcile` names the difference.

A line of the file is on disk before its quantity counts as delivered, and an identifier is written once, also by several workers:
each writer holds the file's lock and has read all that others wrote. A torn last line, left by a crash, was never acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import uuid
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import IO, Protocol

from metering.core.models import TokenKind


def derived_id(*parts: str) -> str:
    """SQL of a UUID (version 8) that is made of these SQL expressions: the first 16 bytes of their SHA-256."""
    digest = f"sha256(convert_to(concat_ws(':', {', '.join(parts)}), 'UTF8'))"
    versioned = f"set_byte(substr({digest}, 1, 16), 6, get_byte({digest}, 6) & 15 | 128)"
    return f"encode(set_byte({versioned}, 8, get_byte({digest}, 8) & 63 | 128), 'hex')::uuid"


HALF_AN_HOUR = timedelta(minutes=30)


class BatchState(StrEnum):
    """Where a batch of tokens stands, in `meter_batches`.

    pending: certainly not counted by the biller. sent: asked to be, the answer is not known (yet). delivered: counted. rejected:
    refused for good. parked: may or may not be counted, and asking again could count it twice; a person decides. cancelling: to be
    taken back. cancelled: certainly not counted, and its tokens are in a later part.
    """

    PENDING = "pending"
    SENT = "sent"
    DELIVERED = "delivered"
    REJECTED = "rejected"
    PARKED = "parked"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class Verdict(StrEnum):
    """What became of handing a quantity over.

    delivered: it is counted, now or before. refused: it never will be. later: try again. blocked: nothing will be taken until
    somebody changes the configuration.
    """

    DELIVERED = "delivered"
    REFUSED = "refused"
    LATER = "later"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True)
class Answer:
    """A verdict and its reason. certain: that the quantity was not counted, where the verdict is not `delivered`."""

    verdict: Verdict
    reason: str = ""
    certain: bool = True
    retry_after_s: float | None = None


DELIVERED = Answer(Verdict.DELIVERED)


@dataclass(frozen=True, slots=True)
class Stream:
    """What is handed over one at a time: a customer's tokens of one kind at one price, which is one meter."""

    organization_id: uuid.UUID
    price_version: int
    token_kind: TokenKind

    @property
    def lock_name(self) -> str:
        return f"meter stream {self.organization_id} {self.price_version} {self.token_kind}"


@dataclass(frozen=True, slots=True)
class Quantity:
    """Tokens of one stream in the hour from `hour` on. customer: what the biller calls the organization, if it has customers."""

    identifier: str
    stream: Stream
    hour: datetime
    token_count: int
    attempt: int
    customer: str = ""

    @property
    def at(self) -> datetime:
        """The moment it is counted at: the middle of its hour, so no clock and no border of a period puts it elsewhere."""
        return self.hour + HALF_AN_HOUR


class Exporter(Protocol):
    """Hands quantities over."""

    @property
    def account(self) -> str:
        """Whose customers and meters a quantity needs (`stripe_objects`); empty where it needs none."""
        ...

    @property
    def remembers_for(self) -> timedelta:
        """How long after the first attempt an identifier is surely still known, so that asking again is harmless."""
        ...

    async def deliver(self, quantity: Quantity) -> Answer:
        """Hand it over. Never raises for what the other side says or does not say."""
        ...


class FileExporter:
    """Appends to one file, which may be moved away between two runs; then what was in it is not known here any more."""

    account = ""
    remembers_for = timedelta(days=36_500)  # the file is never cut

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: set[str] = set()
        self._read_until = 0  # bytes of the file that `_known` covers
        self._line_count = 0  # in them
        self._last_line = b""  # of them
        self._lock = Lock()

    async def deliver(self, quantity: Quantity) -> Answer:
        """Write the line and sync it, unless it is there."""
        try:
            await asyncio.to_thread(self._write, quantity)
        except OSError as error:
            # Whether the line got there is seen when the file is read again, so asking again is harmless.
            return Answer(Verdict.LATER, f"{self._path} cannot be written: {error}", certain=False)
        except (ValueError, KeyError, TypeError) as error:
            told = f"line {self._line_count + 1} of {self._path} is no quantity: mend it, or move the file away ({error!r})"
            return Answer(Verdict.LATER, told)
        return DELIVERED

    def _write(self, quantity: Quantity) -> None:
        with self._lock:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                is_another = self._read_new_lines(file)
                if quantity.identifier not in self._known:
                    file.write(line_of(quantity))
                    file.flush()
                os.fsync(file.fileno())  # also a line that was there: whoever wrote it may have died before this
            if is_another:
                sync_directory(self._path.parent)  # without it, a crash of the machine could forget the file itself

    def _read_new_lines(self, file: IO[bytes]) -> bool:
        """Whether it is another file than the last time: then what was read last does not stand where it was read."""
        file.seek(self._read_until - len(self._last_line))
        is_another = self._read_until == 0 or file.read(len(self._last_line)) != self._last_line
        if is_another:
            self._known.clear()
            self._read_until, self._line_count, self._last_line = 0, 0, b""
        file.seek(self._read_until)
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(self._read_until)
                break
            self._known.add(str(json.loads(line)["identifier"]))
            self._read_until += len(line)
            self._line_count += 1
            self._last_line = line
        file.seek(0, os.SEEK_END)
        return is_another


def counted(path: Path, begins: datetime, ends: datetime) -> Counter[Stream]:
    """Tokens of each stream in the file, of the hours in a range: the biller's own count. A torn last line does not count."""
    totals: Counter[Stream] = Counter()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            entry = json.loads(line)
            if begins <= datetime.fromisoformat(entry["hour"]) < ends:
                stream = Stream(uuid.UUID(entry["organization_id"]), entry["price_version"], TokenKind(entry["token_kind"]))
                totals[stream] += entry["token_count"]
    return totals


def line_of(quantity: Quantity) -> bytes:
    stream = quantity.stream
    document = {
        "identifier": quantity.identifier,
        "organization_id": str(stream.organization_id),
        "price_version": stream.price_version,
        "token_kind": str(stream.token_kind),
        "hour": quantity.hour.isoformat(),
        "token_count": quantity.token_count,
    }
    return json.dumps(document).encode() + b"\n"


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
