"""Receipts of usage and cost, and the offline check of a single one with a public key.

`docs/reference/receipts.md` of the server specifies the bytes. Signatures need the package
`cryptography`, which `pip install './sdk/python[receipts]'` installs in a clone of the repository.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, get_type_hints

from weir_client.plain import Value

SIGNED_PREFIX = b"weir.receipt.batch.v1\n"
END_USER_PREFIX = b"weir.receipt.end_user.v1\n"
LABELS_PREFIX = b"weir.receipt.labels.v1\n"
HASH_SIZE = 32  # bytes
VERSION_MAX = 4
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ID_FIELDS = ("organization_id", "project_id", "api_key_id", "request_id")
NUMBER_FIELDS = (
    "part",
    "input_token_count",
    "cached_input_token_count",
    "billed_token_count",
    "embedding_token_count",
    "price_version",
    "cost_picos",
    "admitted_at_us",
    "settled_at_us",
    "sequence",
)
TEXT_FIELDS = ("currency_code", "model", "outcome")

TIME_FIELDS = (
    "ttft_us",
    "tokens_per_second_milli",
    "itl_p50_us",
    "itl_p99_us",
    "itl_max_us",
    "client_stall_us",
)
HASH_FIELDS = ("end_user_hash", "labels_hash")  # of version 4
SALT_FIELDS = ("end_user_salt", "labels_salt")

PublicKeys = Mapping[str, bytes]  # 32 bytes each, by key id


@dataclass(frozen=True, slots=True)
class ReceiptStep(Value):
    """Step of the path from a receipt to the signed Merkle root."""

    on_left: bool  # whether the sibling is the left node
    hash: bytes


@dataclass(frozen=True, slots=True)
class ReceiptKey(Value):
    """Public key that verifies signatures of receipts."""

    key_id: str
    public_key: bytes
    first_used_at_us: int = 0  # microseconds since 1970


@dataclass(frozen=True, slots=True)
class ReceiptChain(Value):
    """Hash chain of the receipts of one project in a month."""

    project_id: str
    first_sequence: int
    last_sequence: int
    previous_hash: bytes  # of the receipt before the first
    last_hash: bytes
    receipt_count: int


@dataclass(frozen=True, slots=True)
class ReceiptMonth(Value):
    """Summary of a month's receipts. Its root changes until the month is closed."""

    organization_id: str
    month: str
    root: bytes
    receipt_count: int
    chains: tuple[ReceiptChain, ...]
    missing_receipt_count: int  # usage recorded before receipts existed


@dataclass(frozen=True, slots=True)
class ReceiptTimings(Value):
    """Latency and pace of an answer, as in `Timings`, in whole microseconds."""

    ttft_us: int
    tokens_per_second_milli: int  # thousandths of tokens per second
    itl_p50_us: int
    itl_p99_us: int
    itl_max_us: int
    client_stall_us: int


@dataclass(frozen=True, slots=True)
class Receipt(Value):
    """Usage and cost of one request, with its place in the project's hash chain and a signature.

    Times are microseconds since 1970 (UTC), costs picos of `currency_code`. `verify_receipt` checks
    it. `end_user` and `labels` are not parts of the receipt, which has their hashes; the salts
    prove them. They are empty in the answer to a request, if the server hides them, and after an
    erasure.
    """

    organization_id: str
    project_id: str
    api_key_id: str
    request_id: str
    part: int  # 1: usage found after part 0 was settled
    input_token_count: int  # including cached ones
    cached_input_token_count: int
    billed_token_count: int  # output
    embedding_token_count: int
    price_version: int
    cost_picos: int  # before plan and tax
    admitted_at_us: int
    settled_at_us: int
    sequence: int  # from 1
    previous_hash: bytes
    currency_code: str
    model: str
    outcome: str
    hash: bytes
    key_id: str = ""  # empty: not signed
    signature: bytes = b""
    path: tuple[ReceiptStep, ...] = ()
    reasoning_token_count: int = 0  # part of `billed_token_count`, priced separately
    timings: ReceiptTimings | None = None  # None before version 3
    end_user_hash: bytes = b""  # empty: the request had no end user
    labels_hash: bytes = b""
    end_user: str = ""
    end_user_salt: bytes = b""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    labels_salt: bytes = b""
    newer_version: int = 0  # of a receipt that this client cannot verify, else 0

    @property
    def version(self) -> int:
        """Version of the encoding: 4 with the hash of an end user or labels, 3 with timings, 2 with
        reasoning tokens, else 1.
        """
        if self.newer_version:
            return self.newer_version
        if self.end_user_hash or self.labels_hash:
            return 4
        if self.timings is not None:
            return 3
        return 2 if self.reasoning_token_count else 1

    @property
    def admit_time(self) -> datetime:
        """Time when the request was admitted."""
        return EPOCH + timedelta(microseconds=self.admitted_at_us)

    @property
    def settle_time(self) -> datetime:
        """Time when the request was settled."""
        return EPOCH + timedelta(microseconds=self.settled_at_us)

    @property
    def month(self) -> str:
        """Calendar month (UTC) of the receipt, as YYYY-MM."""
        return f"{self.settle_time:%Y-%m}"

    def __str__(self) -> str:
        return f"receipt {self.sequence} of project {self.project_id} (request {self.request_id})"

    def encoded(self) -> bytes:
        """Encode the receipt to the bytes that are hashed.

        Raises: ValueError for an id that is not a UUID or an unknown version, OverflowError for a
        number beyond 64 bits.
        """
        if self.newer_version:
            raise ValueError(f"version {self.newer_version} is not known")
        ids = [uuid.UUID(getattr(self, name)).bytes for name in ID_FIELDS]
        numbers = [
            getattr(self, name).to_bytes(8, "big", signed=True) for name in self._number_fields
        ]
        texts = [getattr(self, name).encode() for name in TEXT_FIELDS]
        lengths_and_texts = [
            part for text in texts for part in (len(text).to_bytes(8, "big"), text)
        ]
        times = [
            getattr(self.timings, name).to_bytes(8, "big", signed=True)
            for name in (TIME_FIELDS if self.timings is not None else ())
        ]
        magic = f"weir.receipt.v{self.version}\n".encode()
        hashes = [getattr(self, name) for name in HASH_FIELDS]
        if any(len(each) not in (0, HASH_SIZE) for each in hashes):
            raise ValueError(f"a hash of an end user or of labels has {HASH_SIZE} bytes")
        has = bool(times), *map(bool, hashes)
        content = sum(2**bit for bit, is_there in enumerate(has) if is_there)
        if self.version == 4:
            hashes.insert(0, b"".join(times))
            times = [content.to_bytes(8, "big")]
        return b"".join(
            (magic, *ids, *numbers, self.previous_hash, *times, *hashes, *lengths_and_texts)
        )

    @property
    def _number_fields(self) -> tuple[str, ...]:
        return number_fields(self.version)

    def to_json(self, *, indent: int | None = None) -> str:
        """Format as JSON for `from_json`: bytes in hexadecimal, steps as `L` or `R` with a hash.

        Args:
            indent: Number of spaces of each level; by default all is on one line.
        """
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("previous_hash", "hash", "signature", *HASH_FIELDS, *SALT_FIELDS):
            values[name] = values[name].hex()
        values["path"] = [("L" if step.on_left else "R") + step.hash.hex() for step in self.path]
        if self.version == 1:
            del values["reasoning_token_count"]
        if self.timings is None:
            del values["timings"]
        else:
            values["timings"] = {name: getattr(self.timings, name) for name in TIME_FIELDS}
        del values["newer_version"]
        values["labels"] = dict(sorted(self.labels.items()))
        for name in (*HASH_FIELDS, *SALT_FIELDS, "end_user", "labels"):
            if not values[name]:
                del values[name]
        return json.dumps(
            {"version": self.version, **values},
            ensure_ascii=False,
            indent=indent,
            separators=(",", ":" if indent is None else ": "),
        )

    @classmethod
    def from_json(cls, line: str) -> Receipt:
        """Parse a line of `to_json`. Raises: ValueError naming the missing or wrong field."""
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("a receipt is a JSON object")
        version = values.pop("version", None)
        if version not in range(1, VERSION_MAX + 1):
            raise ValueError(
                f"version: {version!r} is not 1, 2, 3 or 4, the versions that this client knows:"
                " update it"
            )
        types = get_type_hints(cls)
        for name in (*ID_FIELDS, *TEXT_FIELDS, "key_id", *number_fields(version)):
            if type(values.get(name)) is not types[name]:
                raise ValueError(
                    f"{name}: {values.get(name)!r} is not"
                    f" {'a number' if types[name] is int else 'a string'}"
                )
        for name in ("previous_hash", "hash", "signature"):
            values[name] = _from_hex(name, values.get(name))
        path = values.get("path", [])
        if not isinstance(path, list) or not all(
            isinstance(step, str) and step[:1] in ("L", "R") for step in path
        ):
            raise ValueError("path: must be a list of steps, each L or R with a hash")
        values["path"] = tuple(
            ReceiptStep(step[0] == "L", _from_hex("path", step[1:])) for step in path
        )
        unknown = values.keys() - types.keys() | values.keys() & {"newer_version"}
        if version == 1:
            unknown |= values.keys() & {"reasoning_token_count"}
        elif version == 2 and not values["reasoning_token_count"]:
            raise ValueError("reasoning_token_count: a receipt of version 2 has such tokens")
        if version == 3 or (version == 4 and "timings" in values):
            values["timings"] = _timings(values.get("timings"))
        else:
            unknown |= values.keys() & {"timings"}
        if version == 4:
            _take_subjects(values)
        else:
            unknown |= values.keys() & {*HASH_FIELDS, *SALT_FIELDS, "end_user", "labels"}
        if unknown:
            raise ValueError(f"{min(unknown)}: no such field in a receipt of version {version}")
        return cls(**values)


def number_fields(version: int) -> tuple[str, ...]:
    """Return the names of the numbers in a version of the encoding, in their order."""
    if version == 1:
        return NUMBER_FIELDS
    return (*NUMBER_FIELDS[:5], "reasoning_token_count", *NUMBER_FIELDS[5:])


def _timings(value: object) -> ReceiptTimings:
    """Parse the timings of a receipt. Raises: ValueError."""
    if not isinstance(value, dict) or value.keys() != {*TIME_FIELDS}:
        raise ValueError(f"timings: must be an object with {', '.join(TIME_FIELDS)}")
    for name in TIME_FIELDS:
        if type(value[name]) is not int:
            raise ValueError(f"timings.{name}: {value[name]!r} is not a number")
    return ReceiptTimings(**value)


def _take_subjects(values: dict[str, Any]) -> None:
    """Parse the hashes of end user and labels, with the salts. Raises: ValueError."""
    for name in (*HASH_FIELDS, *SALT_FIELDS):
        if name in values:
            values[name] = _from_hex(name, values[name])
            if len(values[name]) != HASH_SIZE:
                raise ValueError(f"{name}: must have {HASH_SIZE} bytes in hexadecimal")
    if not values.keys() & {*HASH_FIELDS}:
        raise ValueError(f"{HASH_FIELDS[0]}: a receipt of version 4 has it, or {HASH_FIELDS[1]}")
    if type(values.get("end_user", "")) is not str:
        raise ValueError(f"end_user: {values['end_user']!r} is not a string")
    labels = values.get("labels", {})
    if not isinstance(labels, dict) or not all(type(each) is str for each in labels.values()):
        raise ValueError("labels: must be an object of strings")


def _from_hex(name: str, text: object) -> bytes:
    try:
        return bytes.fromhex(str(text))
    except ValueError:
        raise ValueError(f"{name}: {text!r} is not hexadecimal") from None


class Fault(StrEnum):
    """Kind of problem with a receipt, or with the receipts of a month."""

    VERSION_UNKNOWN = "version_unknown"  # this client is too old to verify the receipt
    ALTERED = "altered"  # the content does not match the hash
    END_USER_DIFFERS = "end_user_differs"  # from the hash in the receipt
    LABELS_DIFFER = "labels_differ"
    SIGNATURE_WRONG = "signature_wrong"  # the named key did not make it
    KEY_UNKNOWN = "key_unknown"
    NOT_SIGNED = "not_signed"
    OTHER_ORGANIZATION = "other_organization"
    OTHER_MONTH = "other_month"
    REPEATED = "repeated"  # the same receipt twice
    FORK = "fork"  # two receipts with one sequence number
    GAP = "gap"
    NOT_NEXT = "not_next"  # it does not have the hash of the previous one
    TIME_BACK = "time_back"
    TOTALS_DIFFER = "totals_differ"  # from the report
    ROOT_DIFFERS = "root_differs"  # from the report


@dataclass(frozen=True, slots=True)
class ReceiptProblem(Value):
    """Problem with a receipt, and its description."""

    fault: Fault
    message: str

    def __str__(self) -> str:
        return self.message


class ReceiptInvalid(Exception):
    """The verification of a receipt failed; `problem` has the reason."""

    def __init__(self, problem: ReceiptProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def verify_receipt(receipt: Receipt, keys: PublicKeys) -> None:
    """Verify one receipt offline: its content is unaltered, and one of the keys signed it.

    Get `keys` from a trusted source; see `public_keys`. Raises: ReceiptInvalid with the reason;
    ImportError without the package `cryptography`.
    """
    for problem in receipt_problems(receipt, keys):
        raise ReceiptInvalid(problem)


def receipt_problems(receipt: Receipt, keys: PublicKeys) -> Iterable[ReceiptProblem]:
    """Yield the problems of a single receipt, regardless of its chain."""
    yield from subject_problems(receipt)
    if receipt.newer_version:
        yield version_problem(receipt)
    elif content_hash(receipt) != receipt.hash:
        yield ReceiptProblem(
            Fault.ALTERED, f"{receipt} was altered: its content does not match its hash"
        )
    elif not receipt.key_id:
        yield ReceiptProblem(Fault.NOT_SIGNED, f"{receipt} is not signed")
    elif receipt.key_id not in keys:
        yield ReceiptProblem(
            Fault.KEY_UNKNOWN,
            f"{receipt} is signed by key {receipt.key_id}, which is not among the public keys",
        )
    elif not is_signed(keys[receipt.key_id], root_of(receipt), receipt.signature):
        text = (
            f"{receipt} is not signed by key {receipt.key_id}: its signature or path was altered,"
            " or another key made it"
        )
        yield ReceiptProblem(Fault.SIGNATURE_WRONG, text)


def subject_problems(receipt: Receipt) -> Iterable[ReceiptProblem]:
    """Yield a problem if the end user, or the labels, are not those of the hash in the receipt.

    Nothing is checked where the receipt comes with the hash only.
    """
    if receipt.end_user or receipt.end_user_salt:
        found = end_user_hash(receipt.end_user_salt, receipt.end_user)
        if found != receipt.end_user_hash:
            yield ReceiptProblem(
                Fault.END_USER_DIFFERS,
                f"{receipt} is not for end_user {receipt.end_user!r}: the name or its salt was"
                " altered",
            )
    if receipt.labels or receipt.labels_salt:
        found = labels_hash(receipt.labels_salt, receipt.labels)
        if found != receipt.labels_hash:
            yield ReceiptProblem(
                Fault.LABELS_DIFFER,
                f"{receipt} does not have labels {dict(receipt.labels)}: one of them or their salt"
                " was altered",
            )


def end_user_hash(salt: bytes, name: str) -> bytes:
    """Hash the name of an end user as in a receipt."""
    encoded = name.encode(errors="surrogatepass")  # JSON may have what no receipt has
    return hashlib.sha256(END_USER_PREFIX + salt + encoded).digest()


def labels_hash(salt: bytes, labels: Mapping[str, str]) -> bytes:
    """Hash labels as in a receipt."""
    pairs = sorted(labels.items())
    texts = [text.encode(errors="surrogatepass") for pair in pairs for text in pair]
    parts = [part for text in texts for part in (len(text).to_bytes(8, "big"), text)]
    content = len(labels).to_bytes(8, "big") + b"".join(parts)
    return hashlib.sha256(LABELS_PREFIX + salt + content).digest()


def version_problem(receipt: Receipt) -> ReceiptProblem:
    """Describe a receipt of a version that this client does not know."""
    return ReceiptProblem(
        Fault.VERSION_UNKNOWN,
        f"{receipt} has version {receipt.version}, and this client knows 1 to {VERSION_MAX}:"
        " update it",
    )


def content_hash(receipt: Receipt) -> bytes | None:
    """Hash a receipt's content with SHA-256; None if the content cannot be encoded."""
    try:
        return hashlib.sha256(receipt.encoded()).digest()
    except (ValueError, OverflowError):
        return None


def root_of(receipt: Receipt) -> bytes:
    """Compute the Merkle root that was signed, along the receipt's path."""
    at = receipt.hash
    for step in receipt.path:
        at = node(step.hash, at) if step.on_left else node(at, step.hash)
    return at


def node(left: bytes, right: bytes) -> bytes:
    """Hash two child nodes of the Merkle tree to their parent."""
    return hashlib.sha256(b"\1" + left + right).digest()


def is_signed(public_key: bytes, root: bytes, signature: bytes) -> bool:
    """Return whether the key has signed the root. Raises: ImportError without `cryptography`."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as missing:
        raise ImportError(
            "signatures need the package `cryptography`: pip install cryptography"
        ) from missing
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, SIGNED_PREFIX + root)
    except (InvalidSignature, ValueError):
        return False
    return True


def key_id_of(public_key: bytes) -> str:
    """Derive the id of a public key."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def public_keys(keys: Iterable[ReceiptKey]) -> dict[str, bytes]:
    """Map the ids of keys to the keys. Raises: ValueError for a key whose id does not match it."""
    for key in keys:
        if key_id_of(key.public_key) != key.key_id:
            raise ValueError(
                f"key {key.key_id} does not match its id: its id would be"
                f" {key_id_of(key.public_key)}"
            )
    return {key.key_id: key.public_key for key in keys}
