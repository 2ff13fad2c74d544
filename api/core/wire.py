"""Conversion between values and protobuf messages: times, durations, money, enums, names and
labels.

Payload hashes detect a request id that is reused with another payload. The database keeps them
forever, so they are keyed: the key is derived from the private key that signs receipts, which api
processes have and the database does not. Read access to the database therefore cannot confirm a
guessed prompt. Without such a key the hashes are plain. A hash begins with the name of its key, and
hashes of different keys are not compared (`metering.holds.operations.is_other_payload`).
"""

from __future__ import annotations

import enum
import functools
import hashlib
import hmac
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core.errors import FieldViolation, InvalidRequest
from api.core.texts import Violations
from inference.engine import EngineFinishReason
from metering.core.errors import InvalidValue
from metering.core.models import Outcome, QuotaDimension, QuotaSubject, ServiceTier
from metering.holds.operations import PAYLOAD_KEY_NAME_BYTES
from metering.receipts.signing import Signer
from metering.receipts.subjects import NO_LABELS, Labels
from metering.tenants.usage_subjects import checked_end_user

M = TypeVar("M", bound=Message)
MODEL_MISSING = "must name a model; see ListModels"
PICOS_PER_UNIT = 10**12
LABEL_COUNT_MAX = 16
LABEL_KEY_CHARS_MAX = 64
LABEL_VALUE_CHARS_MAX = 512  # as OpenAI's metadata
KNOWN_LABELS_CHARS_MAX, KNOWN_LABELS_MAX = 512, 1024  # kept: at most about 12 MiB
INT64_MAX = 2**63 - 1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
MICROS_PER_SECOND = 10**6
TIERS: Mapping[int, ServiceTier] = {
    pb.SERVICE_TIER_UNSPECIFIED: ServiceTier.INTERACTIVE,
    pb.SERVICE_TIER_INTERACTIVE: ServiceTier.INTERACTIVE,
    pb.SERVICE_TIER_BATCH: ServiceTier.BATCH,
}
TIER_NUMBERS = {tier: pb.ServiceTier.Value(f"SERVICE_TIER_{tier.name}") for tier in ServiceTier}
SUBJECTS = {
    subject: types_pb2.QuotaSubject.Value(f"QUOTA_SUBJECT_{subject.name}")
    for subject in QuotaSubject
}
DIMENSION_NUMBERS = {
    each: types_pb2.QuotaDimension.Value(f"QUOTA_DIMENSION_{each.name}") for each in QuotaDimension
}
SUBJECTS_BY_NUMBER = {int(number): subject for subject, number in SUBJECTS.items()}
DIMENSIONS_BY_NUMBER = {int(number): dimension for dimension, number in DIMENSION_NUMBERS.items()}
FINISH_REASONS: Mapping[Outcome, types_pb2.FinishReason.ValueType] = {
    outcome: types_pb2.FinishReason.Value(f"FINISH_REASON_{outcome.name}")
    for outcome in Outcome
    if outcome is not Outcome.FAILED
}
OUTCOMES_BY_REASON = {reason: Outcome[reason.name] for reason in EngineFinishReason}

PURPOSE = b"weir.payload.hash.v1"  # so that the receipt key itself has one purpose only
PLAIN = bytes(PAYLOAD_KEY_NAME_BYTES)


def parse_request_id(text: str) -> uuid.UUID:
    """Parse a request id, which must be a UUID. Raises: InvalidRequest."""
    try:
        return uuid.UUID(text)
    except ValueError:
        raise InvalidRequest(
            [FieldViolation("request_id", f"must be a UUID, got {text[:64]!r}")]
        ) from None


def check_purpose(message: pb.StartFrame | pb.EmbedRequest, wrong: Violations) -> Labels:
    """Check the service tier, the end user and the labels of a request, and return the labels."""
    wrong.check(
        message.tier in TIERS, "tier", "must be SERVICE_TIER_INTERACTIVE or SERVICE_TIER_BATCH"
    )
    return check_usage_subjects(message, wrong)


def check_usage_subjects(
    message: pb.StartFrame | pb.EmbedRequest | pb.GetQuotaRequest, wrong: Violations
) -> Labels:
    """Check the end user and the labels of a request, and return the labels."""
    if end_user := message.end_user:
        check_end_user(end_user, "end_user", wrong)
    labels = message.labels
    count = len(labels)
    if not count or not wrong.check_count(count, LABEL_COUNT_MAX, "labels"):
        return NO_LABELS
    keys = [*labels]
    text = "\0".join(keys + [labels[key] for key in keys])  # their `items` are slower
    parse = plain_labels if len(text) <= KNOWN_LABELS_CHARS_MAX else plain_labels.__wrapped__
    if text.count("\0") == 2 * count - 1 and (plain := parse(text)) is not None:
        return plain
    for key, value in labels.items():
        right = 1 <= len(key) <= LABEL_KEY_CHARS_MAX and len(value) <= LABEL_VALUE_CHARS_MAX
        limits = (
            f"keys have 1 to {LABEL_KEY_CHARS_MAX} characters, values up to {LABEL_VALUE_CHARS_MAX}"
        )
        field = f"labels[{key[:LABEL_KEY_CHARS_MAX]!r}]"
        wrong.check(right, field, limits)
        if right:
            wrong.check_text(key, field)
            wrong.check_text(value, field, "labels")
    return Labels(labels)


@functools.lru_cache(maxsize=KNOWN_LABELS_MAX)
def plain_labels(text: str) -> Labels | None:
    """Return labels from their keys, then values, separated by NUL; None if one is not printable or
    too long.
    """
    parts = text.split("\0")
    count = len(parts) // 2
    labels = Labels(zip(parts[:count], parts[count:], strict=True))
    for key, value in labels.items():
        right = 1 <= len(key) <= LABEL_KEY_CHARS_MAX and len(value) <= LABEL_VALUE_CHARS_MAX
        if not (right and key.isprintable() and value.isprintable()):
            return None
    return labels


def check_end_user(name: str, field: str, wrong: Violations) -> None:
    """Check the name of an end user."""
    try:
        checked_end_user(name)
    except InvalidValue as error:
        wrong.check(False, field, error.remedy)


def finish_reason(outcome: Outcome, *, called: bool) -> types_pb2.FinishReason.ValueType:
    """Convert an outcome to the finish reason of an output.

    `called` says that the output has tool calls, whose results the model needs to continue.
    """
    return (
        types_pb2.FINISH_REASON_TOOL_CALLS
        if called and outcome is Outcome.STOP
        else FINISH_REASONS[outcome]
    )


def money(currency_code: str, picos: int) -> types_pb2.Money:
    sign = -1 if picos < 0 else 1
    units, rest = divmod(abs(picos), PICOS_PER_UNIT)
    return types_pb2.Money(currency_code=currency_code, units=sign * units, picos=sign * rest)


def picos_of(amount: types_pb2.Money) -> int:
    return amount.units * PICOS_PER_UNIT + amount.picos


def timestamp(at: datetime | None) -> Timestamp | None:
    """Convert a time to a message. None becomes None, which leaves a field unset."""
    return None if at is None else known_time(at)


def known_time(at: datetime) -> Timestamp:
    """Convert a time to a message, ten times as fast as `FromDatetime`."""
    seconds, micros = divmod((at - EPOCH) // MICROSECOND, MICROS_PER_SECOND)
    return Timestamp(seconds=seconds, nanos=micros * 1000)


def parse_timestamp(message: Timestamp, field: str) -> datetime:
    """Convert a message to an aware UTC datetime. Raises: InvalidRequest if it is out of range."""
    try:
        return message.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            [FieldViolation(field, "must be a time between the years 1 and 9999")]
        ) from None


def parse_duration(message: Duration, field: str) -> timedelta:
    """Convert a message to a timedelta. Raises: InvalidRequest if it is out of range."""
    try:
        return message.ToTimedelta()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            [FieldViolation(field, "must be a duration of less than 10,000 years")]
        ) from None


def seconds_of(message: Duration) -> float:
    """Convert a duration to seconds, with the precision of a float."""
    return message.seconds + message.nanos / 1e9


def given(message: Message, field: str) -> Any:
    """Return the value of an optional field; None if it is unset."""
    return getattr(message, field) if message.HasField(field) else None


def stated(message: Message, field: str) -> Any:
    """Return the value of a field, lists as a tuple; None if it is unset or an empty list."""
    kind = message.DESCRIPTOR.fields_by_name[field]
    if kind.is_repeated:
        return tuple(getattr(message, field)) or None
    return given(message, field) if kind.has_presence else getattr(message, field)


def stated_terms(message: Message, kind: Any) -> dict[str, Any]:
    """Read the fields of a dataclass that a message states, by name."""
    known = message.DESCRIPTOR.fields_by_name
    pairs = ((each.name, stated(message, each.name)) for each in fields(kind) if each.name in known)
    return {name: value for name, value in pairs if value is not None}


def given_time(message: Message, field: str, path: str = "") -> datetime | None:
    """Read the time in an optional field; None if it is unset.

    Raises InvalidRequest, which names `path` or, if that is empty, the field.
    """
    return (
        parse_timestamp(getattr(message, field), path or field) if message.HasField(field) else None
    )


def given_duration(message: Message, field: str) -> timedelta | None:
    """Read the duration in an optional field; None if it is unset. Raises: InvalidRequest."""
    return parse_duration(getattr(message, field), field) if message.HasField(field) else None


def fields_of(message: Message) -> dict[str, Any]:
    """Read the fields of a request by name, with times and durations as values.

    A time or duration that is unset, and a page size of 0, are left out. Raises: InvalidRequest.
    """
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            if value or field.name != "page_size":
                found[field.name] = value
        elif message.HasField(field.name):
            parse = parse_timestamp if isinstance(value, Timestamp) else parse_duration
            found[field.name] = parse(value, field.name)
    return found


def message_of(kind: type[M], record: object, currency: str = "", /, **values: Any) -> M:
    """Convert a record to a message. Fields come from `values`, else from the record.

    The field `x` comes from the attribute `x`; an amount `x` from `x_picos`, in `currency` or the
    record's currency; a time `close_time` from `closed_at`. Fields that are None stay unset. Raises
    AttributeError for a field that has no source.
    """
    assert set(values) <= set(kind.DESCRIPTOR.fields_by_name), (
        f"{kind.__name__} has not all of {', '.join(values)}"
    )
    currency = currency or getattr(record, "currency_code", "")
    converted = {}
    for name, convert, attribute in _fields(kind.DESCRIPTOR):
        value = (
            values[name]
            if name in values
            else getattr(record, name if hasattr(record, name) else attribute)
        )
        if value is not None:
            converted[name] = convert(value, currency)
    return kind(**converted)


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Callable[[Any, str], Any], str]]:
    """List the name, conversion and alternative attribute of each field of a message type."""
    found: list[tuple[str, Callable[[Any, str], Any], str]] = []
    for field in kind.fields:
        attribute, convert = field.name, lambda value, _: value
        if field.enum_type is not None:
            convert = functools.partial(_enum_value, field.enum_type)
        elif field.type == field.TYPE_STRING and not field.is_repeated:
            convert = _text
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            made = message_factory.GetMessageClass(field.message_type)
            convert = functools.partial(_messages if field.is_repeated else _message, made)
            attribute = (
                f"{field.name}_picos"
                if made is types_pb2.Money
                else field.name.removesuffix("_time") + "d_at"
            )
        found.append((field.name, convert, attribute))
    return found


def _text(value: Any, _: str) -> str:
    return str(value)


def _enum_value(kind: Any, value: Any, _: str) -> int:
    if isinstance(value, enum.Enum):
        value = value.name
    prefix = kind.values[0].name.removesuffix("UNSPECIFIED")
    return (
        value
        if isinstance(value, int)
        else kind.values_by_name[prefix + (value.upper() or "UNSPECIFIED")].number
    )


def _message(kind: type[Message], value: Any, currency: str) -> Message:
    if isinstance(value, Message):
        return value
    if isinstance(value, datetime):
        return known_time(value)
    return money(currency, value) if isinstance(value, int) else message_of(kind, value, currency)


def _messages(kind: type[Message], values: Iterable[Any], currency: str) -> list[Message]:
    return [_message(kind, value, currency) for value in values]


def duration(seconds: float | None) -> Duration | None:
    """Convert seconds to a message. None becomes None, which leaves a field unset."""
    if seconds is None:
        return None
    micros = timedelta(seconds=seconds) // MICROSECOND  # rounded as the library does
    sign = -1 if micros < 0 else 1
    whole, rest = divmod(abs(micros), MICROS_PER_SECOND)
    return Duration(seconds=sign * whole, nanos=sign * rest * 1000)


_key = b""  # of this process; set once, before it listens
_key_name = PLAIN


def use_signer(signer: Signer | None) -> None:
    """Derive the key of payload hashes from this process's signer; None: hash without a key."""
    global _key, _key_name
    _key = b"" if signer is None else signer.derived_key(PURPOSE)
    _key_name = hashlib.sha256(_key).digest()[:PAYLOAD_KEY_NAME_BYTES] if _key else PLAIN


def payload_hash(payload: bytes) -> bytes:
    """Hash a payload. Returns 32 bytes: the key's name, then the start of the HMAC-SHA-256.

    Without a key, it is a plain SHA-256.
    """
    found = hmac.digest(_key, payload, "sha256") if _key else hashlib.sha256(payload).digest()
    return _key_name + found[: 32 - PAYLOAD_KEY_NAME_BYTES]
