"""Receipts of one batch of settlements: each appended to its project's chain, all signed together.

The heads of the chains are locked while a batch is decided, like its counters, so that any number
of processes write one chain per project without gap or fork. Pure except for the signature;
`read.py` and `write.py` access the rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import msgspec

from metering.receipts.encoding import HASH_SIZE, NO_HASHES, encode, micros, texts, timed
from metering.receipts.merkle import Step, Tree
from metering.receipts.subjects import SubjectHashes, SubjectProof, Subjects, proof_of


class BatchSigner(Protocol):
    """Signer of the Merkle root over all receipts of a batch, implemented by `signing.Signer`."""

    @property
    def key_id(self) -> str:
        """Id of the signing key."""

    @property
    def public_key(self) -> bytes:
        """Public key, 32 bytes."""

    def sign(self, root: bytes) -> bytes:
        """Sign a root; the signature has 64 bytes."""
        ...


class SignedBatch:
    """Hashes of a transaction's receipts in order, and the signature of their Merkle root."""

    def __init__(
        self, key_id: str, hashes: Sequence[bytes], signature: bytes, tree: Tree | None = None
    ) -> None:
        self.key_id = key_id
        self.hashes = hashes
        self.signature = signature
        self._tree = tree

    @classmethod
    def sign(cls, signer: BatchSigner, hashes: Sequence[bytes]) -> SignedBatch:
        """Sign the root of the hashes."""
        tree = Tree(hashes)
        return cls(signer.key_id, hashes, signer.sign(tree.root), tree)

    def path(self, receipt_hash: bytes) -> tuple[Step, ...]:
        """Compute the Merkle path from a receipt to the signed root."""
        if self._tree is None:
            self._tree = Tree(self.hashes)
        return self._tree.path(self.hashes.index(receipt_hash))


class IssuedReceipt(msgspec.Struct):
    """A receipt with its place in the chain. `batch` is None if signing is off.

    `hashes` are those of end user and labels. `proof` has what was hashed, if the receipt was read
    from the database.
    """

    encoded: bytes
    settled_at: datetime
    sequence: int
    previous_hash: bytes
    hash: bytes
    batch: SignedBatch | None = None
    hashes: SubjectHashes | None = None
    proof: SubjectProof | None = None


class ChainHead(msgspec.Struct):
    """Last receipt of a project. `settled_at_us` is in microseconds since 1970."""

    project_id: bytes
    sequence: int
    hash: bytes
    settled_at: datetime
    settled_at_us: int = 0


class Chains(msgspec.Struct, eq=False):
    """Receipt chains that a batch extends, by project, with the receipts that it adds.

    `changed` has the hash of each project's last receipt before the batch.
    """

    heads: dict[bytes, ChainHead] = msgspec.field(default_factory=dict)
    changed: dict[bytes, bytes] = msgspec.field(default_factory=dict)
    added: list[IssuedReceipt] = msgspec.field(default_factory=list)

    @classmethod
    def of_rows(cls, now: datetime, rows: Iterable[tuple[bytes, int, bytes, datetime]]) -> Chains:
        """Build the chains from locked rows. `now` is the transaction's time."""
        return cls.of_heads(now, {row[0]: ChainHead(*row) for row in rows})

    @classmethod
    def of_heads(cls, now: datetime, heads: dict[bytes, ChainHead]) -> Chains:
        """Build the chains from their last receipts, which are changed, by project.

        No receipt is settled before the previous one, so a month is a contiguous part of the chain.
        """
        for head in heads.values():
            if head.settled_at < now:
                head.settled_at = now
            head.settled_at_us = micros(head.settled_at)
        return cls(heads)

    def append(
        self,
        ids: bytes,
        counts: tuple[int, int, int, int, int, int, int, int],
        admitted_at: datetime,
        labels: tuple[str, str, str],
        timings: Mapping[str, float] | None,
        subjects: Subjects | None,
        labels_salt: bytes,
    ) -> IssuedReceipt:
        """Append a receipt to a project's chain and return it.

        `ids` are as in `encode`. `counts` are part; input, cached input, billed, embedding and
        reasoning tokens; price version; cost in picos. `labels` are currency code, model, outcome.
        `timings` are those of the usage event; None if it has none.
        `subjects` are end user and labels of the request; None if it has neither. `labels_salt` is
        a new salt for the labels.
        """
        project_id = ids[16:32]
        head = self.heads[project_id]
        previous_hash, head.sequence = head.hash, head.sequence + 1
        numbers = (*counts, micros(admitted_at), head.settled_at_us, head.sequence)
        hashes = None if subjects is None else subjects.hashed(ids[48:], labels_salt)
        encoded = encode(
            ids,
            numbers,
            previous_hash,
            texts(*labels),
            timed(timings),
            NO_HASHES if hashes is None else hashes[:2],
        )
        head.hash = sha256(encoded).digest()
        receipt = IssuedReceipt(
            encoded, head.settled_at, head.sequence, previous_hash, head.hash, hashes=hashes
        )
        self.changed.setdefault(project_id, previous_hash)
        self.added.append(receipt)
        return receipt


ISSUED = """
SELECT e.hold_id,
       uuid_send(e.organization_id) || uuid_send(e.project_id) || uuid_send(e.api_key_id)
           || uuid_send(e.request_id),
       e.part, e.input_token_count, e.cached_input_token_count, e.billed_token_count,
       e.embedding_token_count, e.billed_reasoning_token_count, e.price_version_id, e.cost_picos,
       e.admitted_at, e.settled_at, e.receipt_sequence, e.previous_receipt_hash, p.currency_code,
       e.model, e.outcome, CASE WHEN e.receipt_is_timed THEN e.timings::text END,
       e.receipt_end_user_hash, e.receipt_labels_hash, u.name, u.receipt_salt,
       CASE WHEN e.receipt_labels_salt IS NOT NULL THEN e.labels END, e.receipt_labels_salt,
       e.receipt_hash, e.receipt_batch_id
FROM usage_events e
JOIN price_versions p ON p.id = e.price_version_id
LEFT JOIN usage_subjects u ON u.id = e.end_user_id AND e.receipt_end_user_hash IS NOT NULL
WHERE e.receipt_sequence IS NOT NULL
"""

BATCHES = "SELECT id, key_id, hashes, signature FROM receipt_batches"

ISSUED_OF_HOLDS = f"{ISSUED} AND e.hold_id = ANY(%s::uuid[]) ORDER BY e.part"

BATCHES_OF_HOLDS = f"""
{BATCHES}
WHERE id IN (SELECT receipt_batch_id FROM usage_events WHERE hold_id = ANY(%s::uuid[]))
"""


Row = Sequence[Any]


class IssuedRow(NamedTuple):
    """Row of ISSUED. Ids and numbers are as in `encode`, with the times in between."""

    hold_id: uuid.UUID
    ids: bytes
    part: int
    input_token_count: int
    cached_input_token_count: int
    billed_token_count: int
    embedding_token_count: int
    billed_reasoning_token_count: int
    price_version: int
    cost_picos: int
    admitted_at: datetime
    settled_at: datetime
    sequence: int
    previous_hash: bytes
    currency_code: str
    model: str
    outcome: str
    timings: str | None  # JSON, if they are part of the receipt
    end_user_hash: bytes | None
    labels_hash: bytes | None
    end_user: str | None
    end_user_salt: bytes | None  # of the usage subject
    labels: dict[str, str] | None
    labels_salt: bytes | None
    hash: bytes
    batch_id: int | None

    @property
    def project_id(self) -> uuid.UUID:
        return uuid.UUID(bytes=bytes(self.ids[16:32]))

    def issued(self, batch: SignedBatch | None) -> IssuedReceipt:
        """Encode the receipt of the row."""
        numbers = (*self[2:10], micros(self.admitted_at), micros(self.settled_at), self.sequence)
        encoded = encode(
            bytes(self.ids),
            numbers,
            bytes(self.previous_hash),
            texts(self.currency_code, self.model, self.outcome),
            timed(None if self.timings is None else msgspec.json.decode(self.timings)),
            (bytes(self.end_user_hash or b""), bytes(self.labels_hash or b"")),
        )
        request_id = uuid.UUID(bytes=bytes(self.ids[48:]))
        proof = proof_of(
            request_id, self.end_user, self.end_user_salt, self.labels, self.labels_salt
        )
        return IssuedReceipt(
            encoded,
            self.settled_at,
            self.sequence,
            bytes(self.previous_hash),
            bytes(self.hash),
            batch,
            proof=proof,
        )


def issued_of_rows(
    issued: Iterable[Row], batches: Iterable[Row]
) -> Iterator[tuple[uuid.UUID, IssuedReceipt]]:
    """Convert rows of ISSUED to pairs of hold id and receipt, with the rows of BATCHES."""
    signed = {row[0]: SignedBatch(row[1], split(row[2]), row[3]) for row in batches}
    for row in (IssuedRow(*values) for values in issued):
        yield row.hold_id, row.issued(None if row.batch_id is None else signed[row.batch_id])


def split(hashes: bytes) -> list[bytes]:
    """Split concatenated hashes into a list."""
    return [bytes(hashes[start : start + HASH_SIZE]) for start in range(0, len(hashes), HASH_SIZE)]
