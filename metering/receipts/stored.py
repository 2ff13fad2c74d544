"""Receipts as they are stored: in the columns of their usage events, with the signature in the row of their batch.

The bytes are made again from the columns and nothing is checked here: who verifies a receipt would notice any column that changed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from metering.receipts.chaining import IssuedReceipt, SignedBatch
from metering.receipts.encoding import HASH_SIZE, encode, micros, texts

ISSUED = """
SELECT e.hold_id, uuid_send(e.organization_id) || uuid_send(e.project_id) || uuid_send(e.api_key_id) || uuid_send(e.request_id),
    e.part, e.input_token_count, e.cached_input_token_count, e.billed_token_count, e.embedding_token_count, e.price_version_id,
    e.cost_picos, e.admitted_at, e.settled_at, e.receipt_sequence, e.previous_receipt_hash, p.currency_code, e.model, e.outcome,
    e.receipt_hash, e.receipt_batch_id
FROM usage_events e JOIN price_versions p ON p.id = e.price_version_id
WHERE e.receipt_sequence IS NOT NULL
"""
BATCHES = "SELECT id, key_id, hashes, signature FROM receipt_batches"
ISSUED_OF_HOLDS = f"{ISSUED} AND e.hold_id = ANY(%s::uuid[]) ORDER BY e.part"
BATCHES_OF_HOLDS = f"{BATCHES} WHERE id IN (SELECT receipt_batch_id FROM usage_events WHERE hold_id = ANY(%s::uuid[]))"

Row = Sequence[Any]


class IssuedRow(NamedTuple):
    """A row of ISSUED. ids and numbers as for `encode`, the numbers in two parts around the times."""

    hold_id: uuid.UUID
    ids: bytes
    part: int
    input_token_count: int
    cached_input_token_count: int
    billed_token_count: int
    embedding_token_count: int
    price_version: int
    cost_picos: int
    admitted_at: datetime
    settled_at: datetime
    sequence: int
    previous_hash: bytes
    currency_code: str
    model: str
    outcome: str
    hash: bytes
    batch_id: int | None

    def issued(self, batch: SignedBatch | None) -> IssuedReceipt:
        """The receipt."""
        numbers = (*self[2:9], micros(self.admitted_at), micros(self.settled_at), self.sequence)
        encoded = encode(bytes(self.ids), numbers, bytes(self.previous_hash), texts(self.currency_code, self.model, self.outcome))
        return IssuedReceipt(encoded, self.settled_at, self.sequence, bytes(self.previous_hash), bytes(self.hash), batch)


def issued_of_rows(issued: Iterable[Row], batches: Iterable[Row]) -> Iterator[tuple[uuid.UUID, IssuedReceipt]]:
    """The hold and the receipt of each row of ISSUED, from it and the rows of BATCHES."""
    signed = {row[0]: SignedBatch(row[1], split(row[2]), row[3]) for row in batches}
    for row in (IssuedRow(*values) for values in issued):
        yield row.hold_id, row.issued(None if row.batch_id is None else signed[row.batch_id])


def split(hashes: bytes) -> list[bytes]:
    """The hashes of a batch, one by one."""
    return [bytes(hashes[start : start + HASH_SIZE]) for start in range(0, len(hashes), HASH_SIZE)]
