"""Values as proto messages and back: times, durations, money, enums, names and labels."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core.errors import FieldViolation, InvalidRequest
from api.core.violations import Violations
from inference.engine import EngineFinishReason
from metering.core.models import Outcome, QuotaDimension, QuotaSubject, ServiceTier

PICOS_PER_UNIT = 10**12
LABEL_COUNT_MAX = 16
LABEL_KEY_CHARS_MAX = 64
LABEL_VALUE_CHARS_MAX = 256
INT64_MAX = 2**63 - 1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
MICROS_PER_SECOND = 10**6
TIERS: Mapping[int, ServiceTier] = {
    pb.SERVICE_TIER_UNSPECIFIED: ServiceTier.INTERACTIVE,
    pb.SERVICE_TIER_INTERACTIVE: ServiceTier.INTERACTIVE,
    pb.SERVICE_TIER_BATCH: ServiceTier.BATCH,
}
TIER_NUMBERS: Mapping[ServiceTier, pb.ServiceTier.ValueType] = {
    ServiceTier.INTERACTIVE: pb.SERVICE_TIER_INTERACTIVE,
    ServiceTier.BATCH: pb.SERVICE_TIER_BATCH,
}
SUBJECTS: Mapping[QuotaSubject, types_pb2.QuotaSubject.ValueType] = {
    QuotaSubject.ORGANIZATION: types_pb2.QUOTA_SUBJECT_ORGANIZATION,
    QuotaSubject.PROJECT: types_pb2.QUOTA_SUBJECT_PROJECT,
    QuotaSubject.API_KEY: types_pb2.QUOTA_SUBJECT_API_KEY,
}
DIMENSIONS: Mapping[QuotaDimension, types_pb2.QuotaDimension.ValueType] = {
    QuotaDimension.CONCURRENT_REQUESTS: types_pb2.QUOTA_DIMENSION_CONCURRENT_REQUESTS,
    QuotaDimension.REQUESTS_PER_MINUTE: types_pb2.QUOTA_DIMENSION_REQUESTS_PER_MINUTE,
    QuotaDimension.TOKENS_PER_MINUTE: types_pb2.QUOTA_DIMENSION_TOKENS_PER_MINUTE,
    QuotaDimension.TOKENS_PER_DAY: types_pb2.QUOTA_DIMENSION_TOKENS_PER_DAY,
    QuotaDimension.TOKENS_PER_MONTH: types_pb2.QUOTA_DIMENSION_TOKENS_PER_MONTH,
    QuotaDimension.COST_PICOS_PER_MONTH: types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_MONTH,
    QuotaDimension.INPUT_TOKENS_PER_MINUTE: types_pb2.QUOTA_DIMENSION_INPUT_TOKENS_PER_MINUTE,
    QuotaDimension.OUTPUT_TOKENS_PER_MINUTE: types_pb2.QUOTA_DIMENSION_OUTPUT_TOKENS_PER_MINUTE,
    QuotaDimension.COST_PICOS_PER_DAY: types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_DAY,
    QuotaDimension.PREPAID_CREDIT_PICOS: types_pb2.QUOTA_DIMENSION_PREPAID_CREDIT_PICOS,
}
FINISH_REASONS: Mapping[Outcome, types_pb2.FinishReason.ValueType] = {
    Outcome.STOP: types_pb2.FINISH_REASON_STOP,
    Outcome.STOP_SEQUENCE: types_pb2.FINISH_REASON_STOP_SEQUENCE,
    Outcome.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    Outcome.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    Outcome.DEADLINE: types_pb2.FINISH_REASON_DEADLINE,
    Outcome.QUOTA_EXHAUSTED: types_pb2.FINISH_REASON_QUOTA_EXHAUSTED,
    Outcome.COST_LIMIT: types_pb2.FINISH_REASON_COST_LIMIT,
    Outcome.SLOW_CONSUMER: types_pb2.FINISH_REASON_SLOW_CONSUMER,
    Outcome.FILTERED: types_pb2.FINISH_REASON_FILTERED,
}
OUTCOMES: Mapping[EngineFinishReason, Outcome] = {
    EngineFinishReason.STOP: Outcome.STOP,
    EngineFinishReason.STOP_SEQUENCE: Outcome.STOP_SEQUENCE,
    EngineFinishReason.LENGTH: Outcome.LENGTH,
    EngineFinishReason.CANCELLED: Outcome.CANCELLED,
}


def parse_request_id(text: str) -> uuid.UUID:
    """Raises: InvalidRequest."""
    try:
        return uuid.UUID(text)
    except ValueError:
        raise InvalidRequest([FieldViolation("request_id", f"must be a UUID, not {text[:64]!r}")]) from None


def check_model_name(model: str, wrong: Violations) -> None:
    """A model is named, by a name that any model may have."""
    wrong.check(bool(model), "model", "must name a model; ListModels tells which there are")
    wrong.check_text(model, "model")


def check_tier_and_labels(message: pb.StartFrame | pb.EmbedRequest, wrong: Violations) -> None:
    """What every request says beside what it asks for."""
    wrong.check(message.tier in TIERS, "tier", "must be SERVICE_TIER_INTERACTIVE or SERVICE_TIER_BATCH")
    labels = message.labels
    if not wrong.check_count(len(labels), LABEL_COUNT_MAX, "labels"):
        return
    for key, value in labels.items():
        right = 1 <= len(key) <= LABEL_KEY_CHARS_MAX and len(value) <= LABEL_VALUE_CHARS_MAX
        limits = f"keys have 1 to {LABEL_KEY_CHARS_MAX} characters, values up to {LABEL_VALUE_CHARS_MAX}"
        field = f"labels[{key[:LABEL_KEY_CHARS_MAX]!r}]"
        wrong.check(right, field, limits)
        if right:
            wrong.check_text(key, field)
            wrong.check_text(value, field)


def finish_reason(outcome: Outcome, *, called: bool) -> types_pb2.FinishReason.ValueType:
    """Why an output ended. called: whether there are tool calls in it, whose results the model then waits for."""
    return types_pb2.FINISH_REASON_TOOL_CALLS if called and outcome is Outcome.STOP else FINISH_REASONS[outcome]


def money(currency_code: str, picos: int) -> types_pb2.Money:
    """An exact amount."""
    sign = -1 if picos < 0 else 1
    units, rest = divmod(abs(picos), PICOS_PER_UNIT)
    return types_pb2.Money(currency_code=currency_code, units=sign * units, picos=sign * rest)


def timestamp(at: datetime | None) -> Timestamp | None:
    """A point in time; None stays unset."""
    if at is None:
        return None
    return known_time(at)


def known_time(at: datetime) -> Timestamp:
    """A point in time, in a tenth of what the library's `FromDatetime` takes."""
    seconds, micros = divmod((at - EPOCH) // MICROSECOND, MICROS_PER_SECOND)
    return Timestamp(seconds=seconds, nanos=micros * 1000)


def parse_timestamp(message: Timestamp, field: str) -> datetime:
    """A point in time. Raises: InvalidRequest for one that no calendar has."""
    try:
        return message.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest([FieldViolation(field, "must be a time between the years 1 and 9999")]) from None


def parse_duration(message: Duration, field: str) -> timedelta:
    """A length of time. Raises: InvalidRequest for one beyond what a duration may hold."""
    try:
        return message.ToTimedelta()
    except (ValueError, OverflowError):
        raise InvalidRequest([FieldViolation(field, "must be a duration of less than 10,000 years")]) from None


def seconds_of(message: Duration) -> float:
    """A length of time in seconds, as far as a float tells it."""
    return message.seconds + message.nanos / 1e9


def duration(seconds: float | None) -> Duration | None:
    """A length of time in seconds; None stays unset."""
    if seconds is None:
        return None
    return known_duration(seconds)


def known_duration(seconds: float) -> Duration:
    """A length of time, in a tenth of what the library's `FromTimedelta` takes."""
    micros = timedelta(seconds=seconds) // MICROSECOND  # rounded as the library does
    sign = -1 if micros < 0 else 1
    whole, rest = divmod(abs(micros), MICROS_PER_SECOND)
    return Duration(seconds=sign * whole, nanos=sign * rest * 1000)
