"""Which request was let in under which hold while the database was away, on disk before its first token.

One append-only file per process, beside its usage journal and with the same guarantees: one write, not synced, read by whoever
holds the journal's lock after its owner died. Outside of outages it does not exist.
"""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from metering.operations import Payer

SUFFIX = ".bindings"


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
        self._path = directory / f"{owner_id}{SUFFIX}"
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
        line = encode(bind)
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


def encode(bind: Bind) -> bytes:
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
        data = (directory / f"{owner_id}{SUFFIX}").read_bytes()
    except FileNotFoundError:
        return []
    return list(decode(data))


def decode(data: bytes) -> Iterator[Bind]:
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
