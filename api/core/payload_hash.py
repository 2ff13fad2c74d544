"""Hashes of requests, by which the same request id with another payload is told apart. Keyed: they stay in the database for ever.

The key follows from the private key that signs receipts, which every api process has and the database
does not, so that read access to the database is not enough to confirm a guessed prompt. Without such a key the hashes are
plain. A hash begins with the name of its key, and hashes of different keys are not compared
(`metering.holds.operations.is_other_payload`).
"""

from __future__ import annotations

import hashlib
import hmac

from metering.holds.operations import PAYLOAD_KEY_NAME_BYTES
from metering.receipts.signing import Signer

PURPOSE = b"weir.payload.hash.v1"  # so that the key of the receipts is used for nothing else directly
PLAIN = bytes(PAYLOAD_KEY_NAME_BYTES)
_key = b""  # of this process; set once, before it listens


def use_signer(signer: Signer | None) -> None:
    """Take the key from the signer of this process, or hash without a key."""
    global _key
    _key = b"" if signer is None else signer.derived_key(PURPOSE)


def payload_hash(payload: bytes) -> bytes:
    """Return 32 bytes: the name of the key, and the start of the HMAC-SHA-256, or without a key of the SHA-256."""
    if not _key:
        return PLAIN + hashlib.sha256(payload).digest()[: 32 - len(PLAIN)]
    name = hashlib.sha256(_key).digest()[:PAYLOAD_KEY_NAME_BYTES]
    return name + hmac.digest(_key, payload, "sha256")[: 32 - len(name)]
