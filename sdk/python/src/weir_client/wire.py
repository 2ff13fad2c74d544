"""Conversion of `weir.v1` messages to values by field name; amounts and enums both ways."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import receipts_pb2, types_pb2

from weir_client import generated_values as values
from weir_client.checks import written
from weir_client.money import PICOS_PER_UNIT, Money
from weir_client.plain import Value
from weir_client.receipts import VERSION_MAX, Receipt

_Value = TypeVar("_Value")
_Message = TypeVar("_Message", bound=Message)
_Enum = TypeVar("_Enum", bound=StrEnum)
Take = Callable[[Any], Any]


def read(kind: Callable[..., _Value], message: Any, **known: Any) -> _Value:
    """Convert a message to a dataclass whose fields have the same names.

    The type hints choose the conversion: times, amounts, other dataclasses and tuples of them. A
    mapping is the JSON mapping of the message; an optional field is None, and any other keeps its
    default, where the message has none. `a_s` is the duration `a` in seconds. `known` gives fields
    a value that is not in the message.
    """
    taken = {
        name: take(message) for name, take in _takes(kind, message.DESCRIPTOR) if name not in known
    }
    return kind(**taken, **known)


@cache
def _takes(kind: Any, descriptor: Descriptor) -> tuple[tuple[str, Take], ...]:
    """Build a converter for each field of a dataclass that the message has."""
    hints = get_type_hints(kind)
    found = []
    for each in fields(kind):
        source = each.metadata.get("source", each.name)
        proto = descriptor.fields_by_name.get(source) or descriptor.fields_by_name.get(
            source.removesuffix("_s")
        )
        if proto is not None:
            found.append((each.name, _take(proto, each, hints[each.name])))
        elif "." in source:
            found.append((each.name, attrgetter(source)))
    return tuple(found)


def _take(proto: FieldDescriptor, target: Field[Any], hint: Any) -> Take:
    """Build the converter from the message field `proto` to the dataclass field `target`."""
    name, get = proto.name, attrgetter(proto.name)
    if isinstance(hint, types.UnionType):
        [inner] = [each for each in get_args(hint) if each is not type(None)]
        convert = _conversion(proto, target, inner)
        if not proto.has_presence:
            return lambda message: get(message) or None
        return lambda message: convert(get(message)) if message.HasField(name) else None
    if get_origin(hint) is tuple:
        convert = _conversion(proto, target, get_args(hint)[0])
        return lambda message: tuple(map(convert, get(message)))
    convert = _conversion(proto, target, hint)
    return get if convert is _same else lambda message: convert(get(message))


def _conversion(proto: FieldDescriptor, target: Field[Any], hint: Any) -> Take:
    """Choose the function that converts a field's value to the type `hint`."""
    if proto.enum_type is not None:
        return _member(proto.enum_type, target, hint)
    if proto.message_type is None:
        return _same
    if get_origin(hint) in (Mapping, dict):
        return (
            dict
            if proto.message_type.GetOptions().map_entry
            else partial(MessageToDict, preserving_proto_field_name=True)
        )
    known: dict[Any, Take] = {datetime: time_of, float: seconds_of, Money: money, Receipt: receipt}
    return known.get(hint) or partial(read, hint)


def _same(value: Any) -> Any:
    return value


def _member(descriptor: EnumDescriptor, target: Field[Any], hint: Any) -> Take:
    """Build the converter from enumeration numbers to members, or to lower-case names.

    Numbers that this client does not know become UNSPECIFIED, or an empty string.
    """
    if hint is str:
        members: dict[int, Any] = {
            number: word.lower() for number, word in _words(descriptor).items()
        }
        unknown: Any = ""
    else:
        members = {
            number: hint[word]
            for number, word in _words(descriptor).items()
            if word in hint.__members__
        }
        unknown = hint.UNSPECIFIED
    members[0] = unknown if target.default is MISSING else target.default  # not set
    return lambda number: members.get(number, unknown)


def _words(descriptor: EnumDescriptor) -> dict[int, str]:
    """Map an enumeration's numbers to names without their prefix: `OPEN` for `MONTH_STATE_OPEN`.

    The suffix `_PICOS` is removed as well, being a unit.
    """
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {
        each.number: each.name.removeprefix(prefix).replace("_PICOS", "")
        for each in descriptor.values
    }


def numbers(kind: type[_Enum], descriptor: EnumDescriptor) -> dict[_Enum, Any]:
    """Map the members of `kind` to the enumeration's numbers, for requests."""
    return {
        kind[word]: number
        for number, word in _words(descriptor).items()
        if word in kind.__members__
    }


DIMENSION_NUMBERS = numbers(values.QuotaDimension, types_pb2.QuotaDimension.DESCRIPTOR)


def request(kind: type[_Message], /, **values: Any) -> _Message:
    """Build a message from values of its fields: the reverse of `read`. None leaves a field unset.

    A mapping is the JSON mapping of a message. Raises: InvalidRequest for a value that does not
    fit; google.protobuf.json_format.ParseError for a malformed mapping.
    """
    by_name: Mapping[str, Any] = kind.DESCRIPTOR.fields_by_name
    return written(
        kind,
        {name: _sent(by_name[name], value) for name, value in values.items() if value is not None},
    )


def _sent(proto: FieldDescriptor, value: Any) -> Any:
    """Convert a value to what the message field `proto` holds."""
    if proto.enum_type is not None:
        if proto.is_repeated:
            return [numbers(type(each), proto.enum_type)[each] for each in value]
        return numbers(type(value), proto.enum_type)[value]
    if proto.message_type is None or proto.is_repeated:
        return value
    kind = GetMessageClass(proto.message_type)
    match value:
        case datetime():
            stamp = Timestamp()
            stamp.FromDatetime(value)
            return stamp
        case timedelta():
            return duration(value.total_seconds())
        case int() | float():
            return duration(value)
        case Money():
            return money_message(value)
        case Mapping():
            return ParseDict(dict(value), kind())
        case Value():
            return kind(**{each.name: getattr(value, each.name) for each in fields(value)})  # type: ignore[arg-type]
        case _:
            return kind(values=value)


def duration(seconds: float) -> Duration:
    """Convert seconds to a message, to the nanosecond."""
    whole, rest = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=rest)


def time_of(stamp: Timestamp) -> datetime:
    """Convert a protobuf timestamp to an aware UTC datetime, with microseconds."""
    return stamp.ToDatetime(tzinfo=UTC)


def micros_of(stamp: Timestamp) -> int:
    """Convert a protobuf timestamp to microseconds since 1970."""
    return stamp.seconds * 1_000_000 + stamp.nanos // 1000


def seconds_of(duration: Duration) -> float:
    """Convert a protobuf duration to seconds."""
    return duration.seconds + duration.nanos / 1e9


def money_message(value: Money) -> types_pb2.Money:
    """Convert an amount to a message. Its whole units and its fraction have the same sign."""
    units, picos = divmod(abs(value.picos), PICOS_PER_UNIT)
    sign = -1 if value.picos < 0 else 1
    return types_pb2.Money(
        currency_code=value.currency_code, units=sign * units, picos=sign * picos
    )


def money(message: types_pb2.Money) -> Money:
    """Convert a `Money` message to an exact amount."""
    return Money(message.currency_code, message.units * PICOS_PER_UNIT + message.picos)


def receipt(message: receipts_pb2.Receipt) -> Receipt:
    """Convert a message to a receipt, without verifying it."""
    times = {
        "admitted_at_us": micros_of(message.admit_time),
        "settled_at_us": micros_of(message.settle_time),
        "newer_version": message.version if message.version > VERSION_MAX else 0,
    }
    return read(Receipt, message, **times)


def stopped_by(end: pb.FinishedFrame | pb.ChoiceEnd) -> str | int | None:
    """Read the stop sequence or the stop token that ended an output; None if it ended otherwise."""
    if end.WhichOneof("stopped_by") == "stop_sequence":
        return end.stop_sequence
    return end.stop_token_id if end.HasField("stop_token_id") else None


def finish_reason(number: types_pb2.FinishReason.ValueType) -> values.FinishReason:
    """Convert a finish reason; UNSPECIFIED if this version of the client does not know it."""
    return _finish_reasons().get(number, values.FinishReason.UNSPECIFIED)


@cache
def _finish_reasons() -> dict[int, values.FinishReason]:
    known = numbers(values.FinishReason, types_pb2.FinishReason.DESCRIPTOR)
    return {number: reason for reason, number in known.items()}


def logprobs(frame: pb.DeltaFrame) -> tuple[values.TokenLogprobs, ...]:
    """Read the log-probabilities of a frame: one per token, or none if they were not requested."""
    return tuple(read(values.TokenLogprobs, each) for each in frame.logprobs)
