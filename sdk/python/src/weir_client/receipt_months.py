"""Verification of many receipts: complete chains, signatures, and the sums and root of a report.

Reports all problems, not only the first. Pure.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from weir_client.plain import Value
from weir_client.receipts import (
    HASH_FIELDS,
    ID_FIELDS,
    TEXT_FIELDS,
    Fault,
    PublicKeys,
    Receipt,
    ReceiptProblem,
    content_hash,
    is_signed,
    node,
    number_fields,
    root_of,
    subject_problems,
    version_problem,
)

SEARCHED_COUNT_MAX = 8  # altered receipts whose field is searched; each takes up to 0.1 s
SEARCHED_NUMBER_MAX = 10_000  # number values tried per field
NUMBERS_BEGIN = 16 + 4 * 16  # offset in bytes of the first number in the encoding
FIRST_PREVIOUS_HASH = bytes(32)

# Tokens by model, price version and token kind; picos by model and price version.
Totals = Mapping[tuple[str, ...], int]


@dataclass(frozen=True, slots=True)
class ReceiptVerdict(Value):
    """Result of a verification, with the Merkle root over all receipts by project and sequence."""

    receipt_count: int
    signed_count: int
    project_count: int
    key_ids: tuple[str, ...]
    root: bytes
    problems: tuple[ReceiptProblem, ...]

    @property
    def valid(self) -> bool:
        """True if there are no problems."""
        return not self.problems


def verify_receipts(
    receipts: Iterable[Receipt],
    keys: PublicKeys,
    *,
    month: str = "",
    organization_id: str = "",
    root: bytes | None = None,
    totals: Totals | None = None,
) -> ReceiptVerdict:
    """Verify receipts of one organization, in any order.

    With `month` (YYYY-MM), they must be all receipts of that month. Otherwise each receipt is
    checked, and the chain between consecutive ones. `root` and `totals` are values of the month's
    report, which reveal missing receipts. Raises: ImportError without the package `cryptography`.
    """
    ordered = sorted(
        receipts, key=lambda receipt: (receipt.project_id, receipt.sequence, receipt.hash)
    )
    found = merkle_root([receipt.hash for receipt in ordered])
    problems = [*content_problems(ordered), *signature_problems(ordered, keys)]
    problems += itertools.chain.from_iterable(map(subject_problems, ordered))
    problems += chain_problems(ordered, complete=bool(month))
    if root != found or problems:  # a matching root also covers unsigned receipts
        problems += unsigned_problems(ordered)
    if month:
        problems += foreign_problems(
            ordered, month, organization_id or (ordered[0].organization_id if ordered else "")
        )
    if totals is not None:
        problems += total_problems(ordered, totals)
    if root is not None and root != found:
        text = (
            f"the root over these receipts is {found.hex()}, the report says {root.hex()}: receipts"
            " are missing or foreign"
        )
        problems.append(ReceiptProblem(Fault.ROOT_DIFFERS, text))
    return ReceiptVerdict(
        receipt_count=len(ordered),
        signed_count=sum(1 for receipt in ordered if receipt.key_id),
        project_count=len({receipt.project_id for receipt in ordered}),
        key_ids=tuple(sorted({receipt.key_id for receipt in ordered if receipt.key_id})),
        root=found,
        problems=tuple(problems),
    )


def merkle_root(hashes: Sequence[bytes]) -> bytes:
    """Compute the Merkle root of hashes in this order; without hashes, the hash of empty input."""
    level = list(hashes)
    while len(level) > 1:
        pairs = [node(left, right) for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0] if level else hashlib.sha256(b"").digest()


def content_problems(ordered: Sequence[Receipt]) -> Iterator[ReceiptProblem]:
    """Yield each receipt that does not match its hash, with the altered field if it is found.

    A receipt of a newer version is a problem of its own.
    """
    yield from (version_problem(receipt) for receipt in ordered if receipt.newer_version)
    known = (receipt for receipt in ordered if not receipt.newer_version)
    altered = [receipt for receipt in known if content_hash(receipt) != receipt.hash]
    for count, receipt in enumerate(altered):
        altered_text = altered_field(receipt, ordered) if count < SEARCHED_COUNT_MAX else ""
        text = altered_text or "its content does not match its hash"
        yield ReceiptProblem(Fault.ALTERED, f"{receipt} was altered: {text}")


def altered_field(receipt: Receipt, others: Iterable[Receipt]) -> str:
    """Search for the altered field; describe it with its original value, or return an empty string.

    Finds a single altered field whose original value is a small number or is in other receipts.
    """
    known = list(others)
    for name in (
        *ID_FIELDS,
        *TEXT_FIELDS,
        "previous_hash",
        *HASH_FIELDS,
        *number_fields(version=2),
    ):
        values = {getattr(other, name) for other in known}
        if name == "reasoning_token_count":
            values.add(0)
        if name == "previous_hash":
            values |= {other.hash for other in known} | {FIRST_PREVIOUS_HASH}
        for value in values - {getattr(receipt, name)}:
            if content_hash(replace(receipt, **{name: value})) == receipt.hash:
                return change_text(receipt, name, value)
    for name in number_fields(receipt.version):
        if (number := original_number(receipt, name)) is not None:
            return change_text(receipt, name, number)
    return ""


def original_number(receipt: Receipt, name: str) -> int | None:
    """Search for the small number that gives the receipt its hash; None if there is none."""
    try:
        encoded = receipt.encoded()
    except (ValueError, OverflowError):
        return None
    at = NUMBERS_BEGIN + 8 * number_fields(receipt.version).index(name)
    before, after = encoded[:at], encoded[at + 8 :]
    for number in range(SEARCHED_NUMBER_MAX):
        if hashlib.sha256(before + number.to_bytes(8, "big") + after).digest() == receipt.hash:
            return number
    return None


def change_text(receipt: Receipt, name: str, value: object) -> str:
    """Describe the change of the field `name` to its present value."""
    now, was = (
        each.hex() if isinstance(each, bytes) else each for each in (getattr(receipt, name), value)
    )
    return f"{name} is {now}, originally {was}"


def signature_problems(ordered: Sequence[Receipt], keys: PublicKeys) -> Iterator[ReceiptProblem]:
    """Yield a problem for each receipt with a wrong signature. Each signature is checked once."""
    checked: dict[tuple[str, bytes, bytes], bool] = {}
    for receipt in ordered:
        if not receipt.key_id:
            continue
        if receipt.key_id not in keys:
            text = (
                f"{receipt} is signed by key {receipt.key_id}, which is not among the public keys"
            )
            yield ReceiptProblem(Fault.KEY_UNKNOWN, text)
            continue
        signed = (receipt.key_id, root_of(receipt), receipt.signature)
        if signed not in checked:
            checked[signed] = is_signed(keys[receipt.key_id], *signed[1:])
        if not checked[signed]:
            text = (
                f"{receipt} is not signed by key {receipt.key_id}: its signature or path was"
                " altered, or another key made it"
            )
            yield ReceiptProblem(Fault.SIGNATURE_WRONG, text)


def unsigned_problems(ordered: Sequence[Receipt]) -> Iterator[ReceiptProblem]:
    """Yield a problem for each unsigned receipt without a later signed receipt in its chain."""
    last_signed: dict[str, int] = {}
    for receipt in ordered:
        if receipt.key_id:
            last_signed[receipt.project_id] = receipt.sequence
    for receipt in ordered:
        if not receipt.key_id and last_signed.get(receipt.project_id, 0) < receipt.sequence:
            text = f"{receipt} is not signed, nor is any later one of its chain here"
            yield ReceiptProblem(Fault.NOT_SIGNED, text)


def chain_problems(ordered: Sequence[Receipt], *, complete: bool) -> Iterator[ReceiptProblem]:
    """Yield breaks of the chains. With `complete`, report gaps between two receipts too."""
    for before, receipt in pairwise(ordered):
        if receipt.project_id != before.project_id:
            continue
        if receipt.sequence == before.sequence:
            if receipt.hash == before.hash:
                yield ReceiptProblem(Fault.REPEATED, f"{receipt} is here twice")
            else:
                text = (
                    f"fork: requests {before.request_id} and {receipt.request_id} both have"
                    f" {receipt}".rpartition(" (")[0]
                )
                yield ReceiptProblem(Fault.FORK, text)
            continue
        if receipt.sequence > before.sequence + 1:
            if complete:
                first, last = before.sequence + 1, receipt.sequence - 1
                missing = (
                    f"receipt {first} is" if first == last else f"receipts {first} to {last} are"
                )
                yield ReceiptProblem(
                    Fault.GAP, f"gap: {missing} missing of project {receipt.project_id}"
                )
            continue
        if receipt.previous_hash != before.hash:
            yield ReceiptProblem(
                Fault.NOT_NEXT,
                f"{receipt} does not name the hash of receipt {before.sequence} before it",
            )
        if receipt.settled_at_us < before.settled_at_us:
            yield ReceiptProblem(
                Fault.TIME_BACK, f"{receipt} is settled before receipt {before.sequence}"
            )
    for receipt in ordered:
        if receipt.sequence < 1 or (receipt.sequence == 1) != (
            receipt.previous_hash == FIRST_PREVIOUS_HASH
        ):
            text = f"{receipt} is misplaced: only the first receipt of a chain has no previous hash"
            yield ReceiptProblem(Fault.NOT_NEXT, text)


def foreign_problems(
    ordered: Sequence[Receipt], month: str, organization_id: str
) -> Iterator[ReceiptProblem]:
    """Yield a problem for each receipt of another month or another organization."""
    for receipt in ordered:
        if receipt.month != month:
            yield ReceiptProblem(
                Fault.OTHER_MONTH, f"{receipt} belongs to {receipt.month}, not to {month}"
            )
        if receipt.organization_id != organization_id:
            text = (
                f"{receipt} is of organization {receipt.organization_id}, not of {organization_id}"
            )
            yield ReceiptProblem(Fault.OTHER_ORGANIZATION, text)


def totals_of(receipts: Iterable[Receipt]) -> Counter[tuple[str, ...]]:
    """Sum tokens and picos of receipts, with the same keys as the lines of a report."""
    totals: Counter[tuple[str, ...]] = Counter()
    for receipt in receipts:
        priced = (receipt.model, str(receipt.price_version))
        totals[(*priced, "input")] += receipt.input_token_count - receipt.cached_input_token_count
        totals[(*priced, "cached_input")] += receipt.cached_input_token_count
        totals[(*priced, "output")] += receipt.billed_token_count - receipt.reasoning_token_count
        totals[(*priced, "reasoning")] += receipt.reasoning_token_count
        totals[(*priced, "embedding")] += receipt.embedding_token_count
        totals[priced] += receipt.cost_picos
    return +totals


def total_problems(ordered: Sequence[Receipt], totals: Totals) -> Iterator[ReceiptProblem]:
    """Yield differences between the sums in the report and those of the receipts."""
    found = totals_of(ordered)
    for key in sorted({*found, *(key for key, total in totals.items() if total)}):
        if found[key] != totals.get(key, 0):
            model, price_version, *kind = key
            what = f"{kind[0].replace('_', ' ')} tokens" if kind else "picos"
            text = (
                f"{model}, price version {price_version}: the receipts add up to {found[key]:,}"
                f" {what}, the report says {totals.get(key, 0):,}"
            )
            yield ReceiptProblem(Fault.TOTALS_DIFFER, text)
