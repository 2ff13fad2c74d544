"""End user and labels of a request in its receipt, as two hashes with salts. Pure.

A receipt has the hashes only. A holder with the name and the salt as well can check that they
belong together. Without the salt the name cannot be found, not even by trying likely ones. The salt
of an end user is deleted with its name, and that of labels with them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

import msgspec

from metering.receipts.encoding import LENGTH
from metering.store.pipeline import text_array

SALT_SIZE = 32  # bytes
END_USER = b"weir.receipt.end_user.v1\n"
LABELS = b"weir.receipt.labels.v1\n"
# Hashes of end user and of labels in a receipt, each empty if there is none, and the labels' salt.
SubjectHashes = tuple[bytes, bytes, bytes]
NO_HASHES: SubjectHashes = (b"", b"", b"")


class Labels(dict[str, str]):
    """Labels of all requests that have the same: never changed, and encoded once."""

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> Labels:
        """Return the labels themselves, or a copy if they are another kind of mapping."""
        return labels if isinstance(labels, cls) else cls(labels)

    @cached_property
    def element(self) -> str:
        """JSON object as an element of an array for the database; NULL if there are none."""
        return text_array([msgspec.json.encode(self).decode() if self else None])[1:-1]

    @cached_property
    def packed(self) -> bytes:
        """Content of a hash of the labels after its salt."""
        pack = LENGTH.pack
        parts = [pack(len(self))]
        for key in sorted(self):
            name, value = key.encode(), self[key].encode()
            parts += pack(len(name)), name, pack(len(value)), value
        return b"".join(parts)


class Subjects(msgspec.Struct, frozen=True):
    """End user and labels of a request.

    `salt` is that of the usage subject; empty if there is no end user or it was erased.
    """

    end_user: str
    salt: bytes
    labels: Labels

    def hashed(self, request_id: bytes, labels_salt: bytes) -> SubjectHashes:
        """Hash end user and labels for one receipt."""
        salt, labels, name = self.salt, self.labels, b""
        if salt:
            name = end_user_hash(end_user_salt(salt, request_id), self.end_user)
        if not labels:
            return name, b"", b""
        return name, labels_hash(labels_salt, labels), labels_salt


class SubjectProof(NamedTuple):
    """Hashed values with their salts. Values that were erased are empty."""

    end_user: str = ""
    end_user_salt: bytes = b""
    labels: Mapping[str, str] = {}
    labels_salt: bytes = b""


NO_LABELS = Labels()
NO_SUBJECTS = Subjects("", b"", NO_LABELS)


def new_salt() -> bytes:
    """Make a random salt."""
    return os.urandom(SALT_SIZE)


def new_salts(count: int) -> list[bytes]:
    """Make several random salts with one system call."""
    random = os.urandom(SALT_SIZE * count)
    return [random[start : start + SALT_SIZE] for start in range(0, len(random), SALT_SIZE)]


def end_user_salt(salt: bytes, request_id: bytes) -> bytes:
    """Derive the salt of one request from that of the usage subject.

    It proves the receipts of this request, and no others.
    """
    return sha256(salt + request_id).digest()


def end_user_hash(salt: bytes, name: str) -> bytes:
    """Hash the name of an end user with the salt of the request."""
    return sha256(END_USER + salt + name.encode()).digest()


def labels_hash(salt: bytes, labels: Mapping[str, str]) -> bytes:
    """Hash labels, by key, with their salt."""
    return sha256(LABELS + salt + Labels.of(labels).packed).digest()


def proof_of(
    request_id: uuid.UUID,
    end_user: str | None,
    salt: bytes | None,
    labels: Mapping[str, str] | None,
    labels_salt: bytes | None,
) -> SubjectProof:
    """Build the proof of a request from rows; None where there is nothing, or it was erased."""
    name, name_salt = "", b""
    if end_user is not None and salt is not None:
        name, name_salt = end_user, end_user_salt(bytes(salt), request_id.bytes)
    if labels is None or labels_salt is None:
        labels, labels_salt = {}, b""
    return SubjectProof(name, name_salt, labels, bytes(labels_salt))
