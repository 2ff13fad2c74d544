"""End user and labels of a request in its receipt, as two hashes with salts. Pure.

A receipt has the hashes only. A holder with the name and the salt as well can check that they
belong together. Without the salt the name cannot be found, not even by trying likely ones. The salt
of an end user is deleted with its name, and that of labels with them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

from metering.receipts.encoding import LENGTH

SALT_SIZE = 32  # bytes
END_USER = b"weir.receipt.end_user.v1\n"
LABELS = b"weir.receipt.labels.v1\n"


class Subjects(NamedTuple):
    """End user and labels of a request.

    `salt` is that of the usage subject; empty if there is no end user or it was erased.
    """

    end_user: str
    salt: bytes
    labels: Mapping[str, str]

    def with_labels(self, labels: Mapping[str, str]) -> Subjects:
        """Return the same end user with these labels."""
        return Subjects(self.end_user, self.salt, labels)

    def hashed(self, request_id: bytes) -> SubjectHashes:
        """Hash end user and labels for one receipt."""
        end_user, salt, labels = self
        name = end_user_hash(end_user_salt(salt, request_id), end_user) if salt else b""
        if not labels:
            return SubjectHashes(name)
        labels_salt = new_salt()
        return SubjectHashes(name, labels_hash(labels_salt, labels), labels_salt)


class SubjectHashes(NamedTuple):
    """Hashes in a receipt, each empty if there is none, and the salt of the labels."""

    end_user: bytes = b""
    labels: bytes = b""
    labels_salt: bytes = b""


class SubjectProof(NamedTuple):
    """Hashed values with their salts. Values that were erased are empty."""

    end_user: str = ""
    end_user_salt: bytes = b""
    labels: Mapping[str, str] = {}
    labels_salt: bytes = b""


NO_SUBJECTS = Subjects("", b"", {})
NO_HASHES = SubjectHashes()


def new_salt() -> bytes:
    """Make a random salt."""
    return os.urandom(SALT_SIZE)


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
    pack = LENGTH.pack
    parts = [LABELS, salt, pack(len(labels))]
    for key in sorted(labels):
        name, value = key.encode(), labels[key].encode()
        parts += pack(len(name)), name, pack(len(value)), value
    return sha256(b"".join(parts)).digest()


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
