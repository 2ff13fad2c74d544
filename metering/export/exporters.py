"""The exporter that the settings name: Stripe, or a file of JSON lines for other billers.

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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Lock
from typing import IO

from common.incidents import Retries
from metering.core.errors import StoreAway
from metering.core.models import TokenKind
from metering.export.deliveries import deliver_pending, form_batches
from metering.export.export_settings import Destination, export_settings
from metering.export.exporting import DELIVERED, Answer, Quantity, Stream, Verdict
from metering.store.db import Sessions


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


retries = Retries("usage_export", passing=(StoreAway,))  # by stage


async def export_usage(sessions: Sessions, environment: Mapping[str, str]) -> None:
    """Make the batches of hours that are over, hand over what waits, and handle what Stripe told. Nothing where the export is off.

    Raises: InvalidValue naming a setting.
    """
    settings = export_settings(environment)
    if settings.destination is Destination.OFF:
        return
    stages: list[Callable[[], Awaitable[object]]] = [partial(form_batches, sessions)]
    if settings.stripe is None:
        stages.append(partial(deliver_pending, sessions, FileExporter(settings.file)))
        await run_stages(stages)
        return
    # Imported here: it takes a second, and only those who bill with Stripe have to wait for it.
    from metering.export.invoice_items import invoice_late_usage, settle_months
    from metering.export.stripe_gateway import StripeGateway
    from metering.export.stripe_inbox import handle_events

    gateway = StripeGateway(settings.stripe)
    stages += (partial(stage, sessions, gateway) for stage in (deliver_pending, handle_events, invoice_late_usage, settle_months))
    await run_stages(stages)


async def run_stages(stages: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Run one after the other, those that are due. A stage that fails unexpectedly rests, and the others go on."""
    for number, stage in enumerate(stages):
        if retries.is_due(number):
            with retries.survive(number):
                await stage()
