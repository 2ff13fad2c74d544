"""The files that `weir receipt verify` reads: receipts as JSON lines, public keys, and the report of a month."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from weir_client import Receipt, ReceiptKey
from weir_client.receipt_months import Totals

PICOS_PER_UNIT = 10**12


class FileInvalid(ValueError):
    """A file that is not what it should be; the message says where and why."""


@dataclass(frozen=True, slots=True)
class ReportedMonth:
    """What a month's report says that receipts can be compared with. totals None: nothing. root None: it has none yet."""

    month: str = ""
    organization_id: str = ""
    root: bytes | None = None
    totals: Totals | None = None


def read_receipts(lines: Iterable[str]) -> Iterator[Receipt]:
    """One for each line that is not empty. Raises: FileInvalid naming the line."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield Receipt.from_json(line)
            except ValueError as error:
                raise FileInvalid(f"line {number} is no receipt: {error}") from error


def keys_document(keys: Iterable[ReceiptKey]) -> str:
    """Public keys as a file."""
    return json.dumps({"keys": [{"key_id": key.key_id, "public_key": key.public_key.hex()} for key in keys]}, indent=2) + "\n"


def read_keys(path: Path) -> list[ReceiptKey]:
    """Raises: FileInvalid, OSError."""
    try:
        return [ReceiptKey(key["key_id"], bytes.fromhex(key["public_key"])) for key in json.loads(path.read_text())["keys"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FileInvalid(f"{path} holds no public keys: write it with `weir receipt keys --json`") from error


def read_report(path: Path) -> ReportedMonth:
    """The report of a month as `weir report month --format json` writes it, or the document of a closed month.

    Lines of late usage are left out: their receipts belong to the month of use. Raises: FileInvalid, OSError.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        root = document.get("receipts_root")
        totals: Counter[tuple[str, ...]] = Counter()
        for line in document["lines"]:
            if not line.get("late_month"):
                priced = (line["model"], str(line["price_version"]))
                totals[(*priced, line["token_kind"].replace("-", "_"))] += line["token_count"]
                totals[priced] += picos_of(line["amount"])
        return ReportedMonth(document["month"], document["organization_id"], bytes.fromhex(root) if root else None, totals)
    except (ValueError, KeyError, TypeError, AttributeError, InvalidOperation) as error:
        raise FileInvalid(f"{path} is no report of a month: write it with `weir report month … --format json`") from error


def picos_of(amount: Any) -> int:
    """An amount of a report: the exact text in units, or an object with picos. Raises: ValueError, KeyError, TypeError."""
    if isinstance(amount, dict):
        return int(amount["picos"])
    return int(Decimal(amount) * PICOS_PER_UNIT)
