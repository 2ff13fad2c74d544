"""Invariants of receipts at every commit, computed from the rows alone.

Independent of the product on purpose: the encoding of `docs/reference/receipts.md` is implemented
here a second time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from psycopg.rows import dict_row

from metering.store.db import psycopg_conninfo

Row = dict[str, Any]

EVENTS = """
SELECT e.*, p.currency_code FROM usage_events e JOIN price_versions p ON p.id = e.price_version_id
WHERE e.receipt_sequence IS NOT NULL ORDER BY e.project_id, e.receipt_sequence
"""
BATCHES = "SELECT b.*, k.public_key FROM receipt_batches b JOIN receipt_keys k ON k.id = b.key_id"
COUNTS = ("part", "input_token_count", "cached_input_token_count", "billed_token_count")
TIMES = (
    "ttft_ms",
    "tokens_per_second",
    "itl_p50_ms",
    "itl_p99_ms",
    "itl_max_ms",
    "client_stall_ms",
)


def check_receipts(database_url: str) -> None:
    """Raises: AssertionError with all faults of the receipts and their signatures."""
    with psycopg.connect(psycopg_conninfo(database_url), row_factory=dict_row) as connection:
        found = list(receipt_violations(connection))
    assert not found, "\n".join(found)


def receipt_violations(connection: psycopg.Connection[Row]) -> Iterator[str]:
    """Yield all faults of the receipts."""
    events = connection.execute(EVENTS).fetchall()
    yield from wrong_chains(events, connection.execute("SELECT * FROM receipt_chains").fetchall())
    yield from wrong_batches(events, connection.execute(BATCHES).fetchall())


def wrong_chains(events: list[Row], heads: list[Row]) -> Iterator[str]:
    """Yield faults of chains: a project's receipts are 1, 2, 3 …, and each names the one before."""
    chains: dict[Any, list[Row]] = {head["project_id"]: [] for head in heads}
    for event in events:
        chains.setdefault(event["project_id"], []).append(event)
    for head in heads:
        chain = chains.pop(head["project_id"])
        sequences = [event["receipt_sequence"] for event in chain]
        if sequences != list(range(1, head["last_sequence"] + 1)):
            yield (
                f"the receipts of project {head['project_id']} are {sequences}, its head is"
                f" {head['last_sequence']}"
            )
        before = bytes(32)
        for event in chain:
            name = f"receipt {event['receipt_sequence']} of project {event['project_id']}"
            if event["previous_receipt_hash"] != before:
                yield f"{name} does not name the one before"
            if event["receipt_hash"] != hashlib.sha256(encoded(event)).digest():
                yield f"{name} has not the hash of what it says"
            before = event["receipt_hash"]
        if before != head["last_hash"]:
            yield f"the head of project {head['project_id']} is not its last receipt"
        times = [event["settled_at"] for event in chain]
        if times != sorted(times) or (times and times[-1] > head["last_settled_at"]):
            yield f"the receipts of project {head['project_id']} go back in time"
    if chains:
        yield f"projects without a chain have receipts: {list(chains)}"


def wrong_batches(events: list[Row], batches: list[Row]) -> Iterator[str]:
    """Yield faults of batches: a signature covers exactly the receipts of its batch."""
    of_batch: dict[int, set[bytes]] = {}
    for event in events:
        if event["receipt_batch_id"] is not None:
            of_batch.setdefault(event["receipt_batch_id"], set()).add(event["receipt_hash"])
    for batch in batches:
        hashes = [batch["hashes"][at : at + 32] for at in range(0, len(batch["hashes"]), 32)]
        if of_batch.pop(batch["id"], set()) != set(hashes):
            yield f"receipt batch {batch['id']} has other hashes than its receipts"
        try:
            Ed25519PublicKey.from_public_bytes(batch["public_key"]).verify(
                batch["signature"], b"weir.receipt.batch.v1\n" + root(hashes)
            )
        except InvalidSignature:
            yield f"receipt batch {batch['id']} is not signed by its key"
        if hashlib.sha256(batch["public_key"]).hexdigest()[:16] != batch["key_id"]:
            yield f"key {batch['key_id']} has another name than its public key gives"
    if of_batch:
        yield f"receipts name batches that are not there: {list(of_batch)}"


def encoded(event: Row) -> bytes:
    """Return the encoded receipt."""
    ids = b"".join(
        event[f"{name}_id"].bytes for name in ("organization", "project", "api_key", "request")
    )
    numbers = [event[name] for name in COUNTS] + [
        event.get("embedding_token_count", 0),
    ]
    reasoning = event.get("billed_reasoning_token_count", 0)
    timed = event.get("receipt_is_timed", False)
    hashes = [event.get(f"receipt_{name}_hash") for name in ("end_user", "labels")]
    hidden = any(hashes)
    numbers += [reasoning] if reasoning or timed or hidden else []
    numbers.append(event["price_version_id"])
    numbers += [
        event["cost_picos"],
        micros(event["admitted_at"]),
        micros(event["settled_at"]),
        event["receipt_sequence"],
    ]
    version = 4 if hidden else 3 if timed else 2 if reasoning else 1
    result = f"weir.receipt.v{version}\n".encode() + ids
    result += b"".join(number.to_bytes(8, "big") for number in numbers)
    result += bytes(event["previous_receipt_hash"])
    if hidden:
        result += (timed + 2 * bool(hashes[0]) + 4 * bool(hashes[1])).to_bytes(8, "big")
    for name in TIMES if timed else ():
        value = event["timings"].get(name, 0)
        result += math.floor(value * 1000 + 0.5).to_bytes(8, "big")
    result += b"".join(bytes(each or b"") for each in hashes)
    for name in ("currency_code", "model", "outcome"):
        text = event[name].encode()
        result += len(text).to_bytes(8, "big") + text
    return result


def micros(at: datetime) -> int:
    """Return microseconds since 1970."""
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def root(hashes: list[bytes]) -> bytes:
    """Return the root by the recursive rule of RFC 6962."""
    if len(hashes) == 1:
        return hashes[0]
    left = 1 << ((len(hashes) - 1).bit_length() - 1)
    return hashlib.sha256(b"\1" + root(hashes[:left]) + root(hashes[left:])).digest()
