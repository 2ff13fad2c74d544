"""Verify receipts of Weir without any code of Weir.

Usage: python verify_receipts.py KEYS.json RECEIPTS.jsonl [ROOT]

KEYS.json is the output of `weir receipt keys --json`, RECEIPTS.jsonl that of `weir receipt export`,
and ROOT the root in the report of the month. docs/reference/receipts.md describes the encoding.
Needs the package `cryptography`.
"""

import hashlib
import json
import sys
import uuid

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

IDS = ("organization_id", "project_id", "api_key_id", "request_id")
COUNTS = (
    "part",
    "input_token_count",
    "cached_input_token_count",
    "billed_token_count",
    "embedding_token_count",
)
REST = ("price_version", "cost_picos", "admitted_at_us", "settled_at_us", "sequence")
TIMES = (
    "ttft_us",
    "tokens_per_second_milli",
    "itl_p50_us",
    "itl_p99_us",
    "itl_max_us",
    "client_stall_us",
)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def encoded(receipt: dict) -> bytes:  # type: ignore[type-arg]
    version = receipt["version"]
    reasoning = ("reasoning_token_count",) if version > 1 else ()
    data = f"weir.receipt.v{version}\n".encode()
    data += b"".join(uuid.UUID(receipt[name]).bytes for name in IDS)
    numbers = COUNTS + reasoning + REST
    data += b"".join(receipt[name].to_bytes(8, "big", signed=True) for name in numbers)
    data += bytes.fromhex(receipt["previous_hash"])
    if version > 3:
        parts = ("timings", "end_user_hash", "labels_hash")
        data += sum(2**bit for bit, name in enumerate(parts) if name in receipt).to_bytes(8, "big")
    for name in TIMES if "timings" in receipt else ():
        data += receipt["timings"][name].to_bytes(8, "big", signed=True)
    for name in ("end_user_hash", "labels_hash"):
        data += bytes.fromhex(receipt.get(name, ""))
    return data + texts(receipt["currency_code"], receipt["model"], receipt["outcome"])


def texts(*strings: str) -> bytes:
    encoded = [string.encode() for string in strings]
    return b"".join(len(each).to_bytes(8, "big") + each for each in encoded)


def names_wrong(receipt: dict) -> list[str]:  # type: ignore[type-arg]
    wrong = []
    if "end_user" in receipt:
        data = bytes.fromhex(receipt.get("end_user_salt", "")) + receipt["end_user"].encode()
        if sha256(b"weir.receipt.end_user.v1\n" + data).hex() != receipt.get("end_user_hash"):
            wrong.append(f"is not for end_user {receipt['end_user']!r}")
    if "labels" in receipt:
        pairs = sorted(receipt["labels"].items())
        data = bytes.fromhex(receipt.get("labels_salt", "")) + len(pairs).to_bytes(8, "big")
        data += texts(*(text for pair in pairs for text in pair))
        if sha256(b"weir.receipt.labels.v1\n" + data).hex() != receipt.get("labels_hash"):
            wrong.append(f"does not have labels {receipt['labels']}")
    return wrong


def is_signed(receipt: dict, keys: dict[str, bytes]) -> bool:  # type: ignore[type-arg]
    at = bytes.fromhex(receipt["hash"])
    for step in receipt["path"]:
        neighbour = bytes.fromhex(step[1:])
        at = sha256(b"\1" + neighbour + at) if step[0] == "L" else sha256(b"\1" + at + neighbour)
    try:
        key = Ed25519PublicKey.from_public_bytes(keys[receipt["key_id"]])
        key.verify(bytes.fromhex(receipt["signature"]), b"weir.receipt.batch.v1\n" + at)
    except (KeyError, InvalidSignature):
        return False
    return True


def merkle_root(level: list[bytes]) -> bytes:
    while len(level) > 1:
        pairs = [sha256(b"\1" + level[i] + level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0] if level else sha256(b"")


def main(keys_file: str, receipts_file: str, root: str = "") -> int:
    with open(keys_file) as file:
        keys = {key["key_id"]: bytes.fromhex(key["public_key"]) for key in json.load(file)["keys"]}
    with open(receipts_file) as file:
        receipts = sorted(
            map(json.loads, file), key=lambda receipt: (receipt["project_id"], receipt["sequence"])
        )
    last_signed = {
        receipt["project_id"]: receipt["sequence"] for receipt in receipts if receipt["key_id"]
    }
    wrong = 0
    for before, receipt in zip([None, *receipts], receipts, strict=False):
        if receipt["version"] > 4:
            sys.exit(f"version {receipt['version']} is newer than this program: update it")
        problems = [] if sha256(encoded(receipt)).hex() == receipt["hash"] else ["was altered"]
        problems += names_wrong(receipt)
        vouched_for = (
            not receipt["key_id"]
            and last_signed.get(receipt["project_id"], 0) > receipt["sequence"]
        )
        problems += (
            [] if vouched_for or is_signed(receipt, keys) else ["is not signed by a known key"]
        )
        if before and before["project_id"] == receipt["project_id"]:
            follows = (
                receipt["previous_hash"] == before["hash"]
                and receipt["sequence"] == before["sequence"] + 1
            )
            problems += [] if follows else ["does not follow the receipt before it"]
        wrong += len(problems)
        for problem in problems:
            print(f"receipt {receipt['sequence']} of project {receipt['project_id']} {problem}")
    found = merkle_root([bytes.fromhex(receipt["hash"]) for receipt in receipts]).hex()
    if root and root != found:
        wrong += 1
        print(f"the root is {found}, not {root}")
    print(f"{len(receipts)} receipts, root {found}: {wrong} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
