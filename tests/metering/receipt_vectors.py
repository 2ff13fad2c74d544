"""Receipts of `docs/receipts_example.jsonl`, with a public test key. Run to write them."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from metering.receipts.chaining import IssuedReceipt, SignedBatch
from metering.receipts.encoding import EPOCH
from metering.receipts.merkle import RunningRoot
from metering.receipts.signing import Signer
from metering.receipts.subjects import SubjectProof, end_user_hash, end_user_salt, labels_hash
from tests.metering.receipt_reading import Receipt, hash_of
from tests.metering.test_receipt_encoding import KNOWN

DOCS = Path(__file__).resolve().parents[2] / "docs"
# The seed of the test vectors.
SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
# With the bytes 32 to 63 as salt of the usage subject, and 64 to 95 as that of the labels.
PROOF = SubjectProof(
    "user-4711",
    end_user_salt(bytes(range(32, 64)), KNOWN.request_id.bytes),
    {"team": "search", "größe": "m"},
    bytes(range(64, 96)),
)
HASHES = (
    end_user_hash(PROOF.end_user_salt, PROOF.end_user),
    labels_hash(PROOF.labels_salt, PROOF.labels),
)


def vectors() -> list[IssuedReceipt]:
    """Return receipts with and without signature, in several batches."""
    changes: list[dict[str, object]] = [
        {},
        {"cached_input_token_count": 0, "cost_picos": 243_750_000},
        {"outcome": "cancelled", "billed_token_count": 0, "cost_picos": 153_750_000},
        {"model": "modèle", "outcome": "length", "currency_code": "EUR"},
        {
            "part": 1,
            "input_token_count": 0,
            "cached_input_token_count": 0,
            "outcome": "failed",
            "cost_picos": 90_000_000,
        },
        {
            "input_token_count": 0,
            "cached_input_token_count": 0,
            "billed_token_count": 0,
            "embedding_token_count": 512,
        },
        {"reasoning_token_count": 120, "cost_picos": 300_750_000},
        {"times": (48_100, 61_200, 15_900, 31_000, 33_400, 200)},
        {
            "times": (48_100, 61_200, 15_900, 31_000, 33_400, 200),
            "hashes": HASHES,
            "proof": PROOF,
        },
        {"outcome": "failed", "hashes": (HASHES[0], b"")},
    ]
    made: list[IssuedReceipt] = []
    previous = KNOWN.previous_hash
    for index, change in enumerate(changes):
        proof = change.pop("proof", None)
        assert proof is None or isinstance(proof, SubjectProof)
        content: Receipt = replace(
            KNOWN,
            **change,  # type: ignore[arg-type]
            sequence=index + 1,
            settled_at_us=KNOWN.settled_at_us + index * 1_000_003,
            previous_hash=previous,
        )
        encoded = content.encoded
        previous = hash_of(encoded)
        made.append(
            IssuedReceipt(
                encoded,
                EPOCH + timedelta(microseconds=content.settled_at_us),
                content.sequence,
                content.previous_hash,
                previous,
                proof=proof,
            )
        )
    for batch in (made[:1], made[1:4], made[5:6], made[6:7], made[7:8], made[8:]):
        signed = SignedBatch.sign(SIGNER, [receipt.hash for receipt in batch])
        for receipt in batch:
            receipt.batch = signed
    return made


def root_of_vectors() -> bytes:
    """Return the root over all vectors."""
    running = RunningRoot()
    for receipt in vectors():
        running.push(receipt.hash)
    return running.root


def json_lines() -> str:
    """Return the lines in the format of `weir receipt export`."""
    from weir_client.wire import receipt

    from api.core.messages import proven_receipt_message

    return "".join(receipt(proven_receipt_message(each)).to_json() + "\n" for each in vectors())


def keys_json() -> str:
    """Return the keys in the format of `weir receipt keys --json`."""
    return (
        json.dumps(
            {"keys": [{"key_id": SIGNER.key_id, "public_key": SIGNER.public_key.hex()}]}, indent=2
        )
        + "\n"
    )


if __name__ == "__main__":
    (DOCS / "receipts_example.jsonl").write_text(json_lines())
    (DOCS / "receipts_example_keys.json").write_text(keys_json())
    print(KNOWN.encoded.hex(), hash_of(KNOWN.encoded).hex(), root_of_vectors().hex())
