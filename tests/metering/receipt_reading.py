"""Reading and verification of receipts, as by their holders."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from metering.receipts.encoding import NO_HASHES, encode, owners_in, parts_of, texts
from metering.receipts.merkle import Step, node
from metering.receipts.signing import SIGNED_PREFIX


@dataclass(frozen=True, slots=True)
class Receipt:
    """One receipt. Counts in tokens, cost in picos of `currency_code`, times in µs since 1970
    (UTC).

    part: 0 for the settlement of a request; 1 for usage found after it. sequence: from 1 in each
    project.
    """

    organization_id: uuid.UUID
    project_id: uuid.UUID
    api_key_id: uuid.UUID
    request_id: uuid.UUID
    part: int
    input_token_count: int
    cached_input_token_count: int
    billed_token_count: int
    embedding_token_count: int
    reasoning_token_count: int
    price_version: int
    cost_picos: int
    admitted_at_us: int
    settled_at_us: int
    sequence: int
    previous_hash: bytes
    currency_code: str
    model: str
    outcome: str
    times: tuple[int, ...] = ()
    hashes: tuple[bytes, bytes] = NO_HASHES  # of end user and labels

    @property
    def encoded(self) -> bytes:
        """Encoded receipt, from which its hash is computed."""
        ids = (self.organization_id, self.project_id, self.api_key_id, self.request_id)
        return encode(
            b"".join(each.bytes for each in ids),
            (
                self.part,
                self.input_token_count,
                self.cached_input_token_count,
                self.billed_token_count,
                self.embedding_token_count,
                self.reasoning_token_count,
                self.price_version,
                self.cost_picos,
                self.admitted_at_us,
                self.settled_at_us,
                self.sequence,
            ),
            self.previous_hash,
            texts(self.currency_code, self.model, self.outcome),
            self.times,
            self.hashes,
        )


def decode(encoded: bytes) -> Receipt:
    """Return the receipt of an encoding. Raises: ValueError if no receipt has it."""
    ids, numbers, previous_hash, found, times, hashes = parts_of(encoded)
    values: tuple[Any, ...] = (
        *owners_in(ids[:48]),
        uuid.UUID(bytes=ids[48:]),
        *numbers,
        previous_hash,
        *found,
        times,
        hashes,
    )
    return Receipt(*values)


def hash_of(encoded: bytes) -> bytes:
    """Return the SHA-256 of the encoding, which the next receipt covers."""
    return hashlib.sha256(encoded).digest()


def root_by_path(leaf: bytes, path: Iterable[Step]) -> bytes:
    """Return the root that results from a path."""
    at = leaf
    for on_left, neighbour in path:
        at = node(neighbour, at) if on_left else node(at, neighbour)
    return at


def is_signed(public_key: bytes, root: bytes, signature: bytes) -> bool:
    """Return whether the signature over the root is by this key."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, SIGNED_PREFIX + root)
    except (InvalidSignature, ValueError):
        return False
    return True
