"""Bindings of an outage: which request was admitted under which pre-authorized hold.

One file per process beside its usage journal, written before the first token of such a request is
sent. Recovery binds the holds of a dead process by it, before it settles them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from metering.core.errors import JournalUnavailable
from metering.quotas.quota_rules import Payer

BINDINGS_SUFFIX = ".bindings"


@dataclass(frozen=True, slots=True)
class Bind:
    """Assignment of a pre-authorized hold to a request, with the tokens that the request uses."""

    hold_id: uuid.UUID
    payer: Payer
    request_id: uuid.UUID
    payload_hash: bytes
    labels: dict[str, str]
    input_token_count: int
    leased_token_count: int
    end_user: str = ""


class BindingLog:
    """File of this process's bindings. Not thread-safe: use it from one event loop."""

    def __init__(
        self,
        directory: Path,
        process_id: uuid.UUID,
        failed: Callable[[OSError], JournalUnavailable] = lambda _: JournalUnavailable(),
    ) -> None:
        """Prepare the log; the first record creates the file.

        `failed` is called when the disk refuses a write, and returns the error to raise.
        """
        self._path = directory / f"{process_id}{BINDINGS_SUFFIX}"
        self._failed = failed
        self._fd = -1
        self._size_bytes = 0
        self._torn = False
        self._open: set[uuid.UUID] = set()

    def record(self, bind: Bind) -> None:
        """Append a binding. Only then may tokens be sent under it.

        Raises: JournalUnavailable if the disk refuses; the file is then unchanged.
        """
        line = encode_binding(bind)
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                self._size_bytes = os.fstat(self._fd).st_size
            if self._torn:  # the truncation failed
                self._cut()
            self._torn = True
            if os.write(self._fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._torn = False
        except OSError as error:
            if self._torn:
                with contextlib.suppress(OSError):
                    self._cut()
            raise self._failed(error) from error
        self._size_bytes += len(line)
        self._open.add(bind.hold_id)

    def _cut(self) -> None:
        """Remove a torn record, which would hide all later ones. Truncation needs no disk space."""
        os.ftruncate(self._fd, self._size_bytes)
        self._torn = False

    def forget(self, hold_id: uuid.UUID) -> None:
        """Drop a binding that the database has stored. After the last one, the file is removed."""
        self._open.discard(hold_id)
        if not self._open:
            self.close(keep=False)

    def close(self, *, keep: bool) -> None:
        """Close the file and, unless `keep` leaves it for recovery, remove it. Idempotent."""
        if self._fd >= 0:
            if not keep:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd, self._torn = -1, False


def encode_binding(bind: Bind) -> bytes:
    """Encode a binding as one line: CRC-32 and JSON."""
    payer = bind.payer
    body = json.dumps(
        {
            "hold_id": str(bind.hold_id),
            "payer": [
                str(payer.organization_id),
                str(payer.project_id),
                str(payer.api_key_id),
                payer.currency_code,
            ],
            "request_id": str(bind.request_id),
            "payload_hash": bind.payload_hash.hex(),
            "labels": bind.labels,
            "input_token_count": bind.input_token_count,
            "leased_token_count": bind.leased_token_count,
            "end_user": bind.end_user,
        }
    ).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def read_bindings(directory: Path, process_id: uuid.UUID) -> list[Bind]:
    """Read a dead process's bindings up to a torn line. Nothing was sent under a torn one."""
    try:
        data = (directory / f"{process_id}{BINDINGS_SUFFIX}").read_bytes()
    except FileNotFoundError:
        return []
    return list(decode_bindings(data))


def decode_bindings(data: bytes) -> Iterator[Bind]:
    """Decode the bindings of a file up to the first torn line."""
    for line in data.splitlines(keepends=True):
        head, _, body = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or head != b"%08x" % zlib.crc32(body):
            return
        fields = json.loads(body)
        organization, project, api_key, currency_code = fields["payer"]
        yield Bind(
            hold_id=uuid.UUID(fields["hold_id"]),
            payer=Payer(
                uuid.UUID(organization), uuid.UUID(project), uuid.UUID(api_key), currency_code
            ),
            request_id=uuid.UUID(fields["request_id"]),
            payload_hash=bytes.fromhex(fields["payload_hash"]),
            labels=fields["labels"],
            input_token_count=fields["input_token_count"],
            leased_token_count=fields["leased_token_count"],
            end_user=fields.get("end_user", ""),  # older versions write none
        )
