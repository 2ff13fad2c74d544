"""Exporter interface between batches of tokens and the biller, and the exporter that writes a file.

An exporter counts each quantity once by its identifier, however often it is delivered, for as long
as it guarantees. Identifiers are derived from the content they identify: a database that lost
commits in a failover derives the same ones again, so the biller counts nothing twice. The quantity
is not part of its identifier: if some usage was lost as well, the biller keeps the first count, and
`weir reconcile` names the difference.

A line of the file is on disk before its quantity counts as delivered, and each identifier is
written once even with several workers: each writer holds the file's lock and has read all lines
written by others. A torn last line, left by a crash, was never acknowledged.
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

HALF_AN_HOUR = timedelta(minutes=30)


def derived_id(*parts: str) -> str:
    """Build SQL that derives a UUID from SQL expressions: the first 16 bytes of their SHA-256."""
    digest = f"sha256(convert_to(concat_ws(':', {', '.join(parts)}), 'UTF8'))"
    versioned = f"set_byte(substr({digest}, 1, 16), 6, get_byte({digest}, 6) & 15 | 128)"
    return f"encode(set_byte({versioned}, 8, get_byte({digest}, 8) & 63 | 128), 'hex')::uuid"


class BatchState(StrEnum):
    """State of an exported batch of tokens (`meter_batches`).

    pending: the biller has certainly not counted it. sent: sent, and the answer is unknown.
    delivered: counted. rejected: refused permanently. parked: possibly counted, so sending it again
    might count it twice; an operator decides. cancelling: being cancelled at the biller. cancelled:
    certainly not counted, and its tokens are in a later part.
    """

    PENDING = "pending"
    SENT = "sent"
    DELIVERED = "delivered"
    REJECTED = "rejected"
    PARKED = "parked"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class Verdict(StrEnum):
    """Outcome of delivering a quantity.

    delivered: counted, by this attempt or an earlier one. refused: never will be counted. later:
    retry. blocked: nothing is accepted until an operator changes the configuration.
    """

    DELIVERED = "delivered"
    REFUSED = "refused"
    LATER = "later"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of a delivery and its reason.

    `certain` is False if an undelivered quantity may have been counted. `retry_after_s` is the
    delay that the biller asks for, None if it names none.
    """

    verdict: Verdict
    reason: str = ""
    certain: bool = True
    retry_after_s: float | None = None


DELIVERED = Answer(Verdict.DELIVERED)


@dataclass(frozen=True, slots=True)
class Stream:
    """Tokens of one kind at one price for one customer: one meter, delivered in order."""

    organization_id: uuid.UUID
    price_version: int
    token_kind: TokenKind

    @property
    def lock_name(self) -> str:
        return f"meter stream {self.organization_id} {self.price_version} {self.token_kind}"


@dataclass(frozen=True, slots=True)
class Quantity:
    """Tokens of one stream in the hour from `hour` on. `customer` is the biller's customer id."""

    identifier: str
    stream: Stream
    hour: datetime
    token_count: int
    attempt: int
    customer: str = ""

    @property
    def at(self) -> datetime:
        """Timestamp for the biller: the middle of the hour, far from period borders."""
        return self.hour + HALF_AN_HOUR


class Exporter(Protocol):
    """Destination of exported usage: delivers quantities to a biller."""

    @property
    def account(self) -> str:
        """Biller's account that has the customers and meters; empty if none are needed."""

    @property
    def remembers_for(self) -> timedelta:
        """Time after the first attempt in which the biller recognizes a retry."""

    async def deliver(self, quantity: Quantity) -> Answer:
        """Deliver a quantity. Failures of the biller are returned in the answer, never raised."""


class FileExporter:
    """Exporter that appends to one file, which has each quantity once.

    If you move the file away, the exporter starts a new one and forgets the lines of the old one.
    """

    account = ""
    remembers_for = timedelta(days=36_500)  # the file is never truncated

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: set[str] = set()
        self._read_until = 0  # bytes of the file covered by `_known`
        self._line_count = 0  # within these bytes
        self._last_line = b""  # of these bytes
        self._lock = Lock()

    async def deliver(self, quantity: Quantity) -> Answer:
        """Append a quantity as a JSON line and fsync the file, unless it already has the line."""
        try:
            await asyncio.to_thread(self._write, quantity)
        except OSError as error:
            # Reading the file again shows whether the line was written, so a retry is safe.
            return Answer(Verdict.LATER, f"{self._path} cannot be written: {error}", certain=False)
        except (ValueError, KeyError, TypeError) as error:
            reason = (
                f"line {self._line_count + 1} of {self._path} is not a quantity: repair it, or move"
                f" the file away ({error!r})"
            )
            return Answer(Verdict.LATER, reason)
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
                # Even for an existing line: its writer may have died before the sync.
                os.fsync(file.fileno())
            if is_another:
                # Otherwise a crash of the machine could lose the file itself.
                sync_directory(self._path.parent)

    def _read_new_lines(self, file: IO[bytes]) -> bool:
        """Read the lines added since the last call; return True if the file was replaced."""
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
    """Sum the tokens of each stream for hours in [begins, ends), ignoring a torn last line."""
    totals: Counter[Stream] = Counter()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            entry = json.loads(line)
            if begins <= datetime.fromisoformat(entry["hour"]) < ends:
                stream = Stream(
                    uuid.UUID(entry["organization_id"]),
                    entry["price_version"],
                    TokenKind(entry["token_kind"]),
                )
                totals[stream] += entry["token_count"]
    return totals


def line_of(quantity: Quantity) -> bytes:
    stream = quantity.stream
    record = {
        "identifier": quantity.identifier,
        "organization_id": str(stream.organization_id),
        "price_version": stream.price_version,
        "token_kind": str(stream.token_kind),
        "hour": quantity.hour.isoformat(),
        "token_count": quantity.token_count,
    }
    return json.dumps(record).encode() + b"\n"


def sync_directory(path: Path) -> None:
    """Fsync a directory, so that new file names in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
