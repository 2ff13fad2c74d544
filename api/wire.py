"""The only mapping between proto messages and domain values, both ways.

Parsing happens once, at the door, into values that cannot be wrong; every violation of a message is reported at once, by field.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.embedding.embedding_limits import input_count_max
from api.errors import FieldViolation, InvalidRequest, PromptTooLong
from api.payload_hash import payload_hash
from api.queue.places import ServiceTier
from api.requests.conversation import Prompt, check_prompt, parse_prompt, thinking_of
from api.requests.decoding import (
    SamplingOverrides,
    StopRules,
    check_decoding,
    parse_beam_search,
    parse_response_format,
    parse_sampling,
    parse_stop,
)
from api.requests.output_limits import Cost, check_cost, cost_of
from api.requests.tools import NO_TOOLS, ToolUse, check_tool_use, check_tools, parse_tool_use, parse_tools
from api.violations import Violations
from inference.engine import BeamSearchParams, EngineFinishReason, ModelInfo, ResponseFormat
from inference.router import ReplicaCounts
from inference.text.tokenizer import ChatMessage
from inference.text.tools import Tool
from metering.billing.prices import CustomerPrice
from metering.models import Outcome, QuotaDimension, QuotaSubject

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


@dataclass(slots=True)
class ValidStart:
    """A start frame that is right in itself; whether model, context window and quotas allow it is decided later.

    Not changed by anybody; `frozen` would cost a microsecond for each. given_id: the request id as the client spelt it, for the
    frames of its answer. model: as the client named it, and by its own name from when it is routed.
    """

    request_id: uuid.UUID
    given_id: str
    payload_hash: bytes
    model: str
    prompt: Prompt
    sampling: SamplingOverrides
    stop: StopRules
    response_format: ResponseFormat | None
    choice_count: int
    beam_search: BeamSearchParams | None
    usage_interval_tokens: int | None
    labels: dict[str, str]
    tier: ServiceTier
    start_timeout_s: float | None
    keep_s: float | None = None  # how long it goes on, and is kept, without a stream that receives it; None: not at all
    initial_credit_tokens: int | None = None
    max_cost: Cost | None = None
    region: str = ""
    tool_use: ToolUse = NO_TOOLS
    thinking: bool | None = None

    @property
    def operation(self) -> str:
        """What it is, by OpenTelemetry's names."""
        return "chat" if self.prompt and isinstance(self.prompt[0], ChatMessage) else "text_completion"


def parse_request_id(text: str) -> uuid.UUID:
    """Raises: InvalidRequest."""
    try:
        return uuid.UUID(text)
    except ValueError:
        raise InvalidRequest([FieldViolation("request_id", f"must be a UUID, not {text[:64]!r}")]) from None


def parse_start(request_id: str, start: pb.StartFrame, window_tokens_max: int | None = None) -> ValidStart:
    """Check everything that the frame alone can tell. window_tokens_max: the largest context window of any served model.

    Raises: InvalidRequest with every violation, PromptTooLong.
    """
    parsed_id = parse_request_id(request_id)
    wrong = Violations()
    if window_tokens_max is not None and (count := len(start.token_ids.ids)) > window_tokens_max:
        raise PromptTooLong(count, None, window_tokens_max)  # before they are copied: a million take a tenth of a second
    check_model_name(start.model, wrong)
    check_prompt(start, wrong)
    check_decoding(start, wrong)
    check_tool_use(start, wrong)
    check_limits(start, wrong)
    wrong.raise_if_any()
    return ValidStart(
        request_id=parsed_id,
        given_id=request_id,
        payload_hash=payload_hash(start.SerializeToString(deterministic=True)),
        model=start.model,
        prompt=parse_prompt(start),
        sampling=parse_sampling(start),
        stop=parse_stop(start),
        response_format=parse_response_format(start),
        choice_count=start.choice_count if start.HasField("choice_count") else 1,
        beam_search=parse_beam_search(start),
        usage_interval_tokens=start.usage_interval_tokens if start.HasField("usage_interval_tokens") else None,
        labels=dict(start.labels),
        tier=TIERS[start.tier],
        start_timeout_s=seconds_of(start.start_timeout) if start.HasField("start_timeout") else None,
        keep_s=seconds_of(start.keep_on_disconnect) if start.HasField("keep_on_disconnect") else None,
        initial_credit_tokens=start.initial_credit_tokens if start.HasField("initial_credit_tokens") else None,
        max_cost=cost_of(start.max_cost) if start.HasField("max_cost") else None,
        region=start.region,
        tool_use=parse_tool_use(start),
        thinking=thinking_of(start),
    )


def check_model_name(model: str, wrong: Violations) -> None:
    """A model is named, by a name that any model may have."""
    wrong.check(bool(model), "model", "must name a model; ListModels tells which there are")
    wrong.check_text(model, "model")


def check_limits(start: pb.StartFrame, wrong: Violations) -> None:
    """What a start frame says beside prompt and decoding."""
    if start.region:
        wrong.check_text(start.region, "region")
    if start.HasField("usage_interval_tokens"):
        interval = start.usage_interval_tokens
        wrong.check(interval >= 1, "usage_interval_tokens", f"must be at least 1, not {interval}")
    if start.HasField("start_timeout"):
        wrong.check(seconds_of(start.start_timeout) > 0, "start_timeout", "must be more than 0 s")
    if start.HasField("keep_on_disconnect"):
        wrong.check(seconds_of(start.keep_on_disconnect) > 0, "keep_on_disconnect", "must be more than 0 s; unset: not at all")
    if start.HasField("initial_credit_tokens"):
        credit = start.initial_credit_tokens
        wrong.check(credit >= 0, "initial_credit_tokens", f"must be at least 0, not {credit}")
    if start.HasField("max_cost"):
        check_cost(start.max_cost, "max_cost", wrong)
    check_tier_and_labels(start, wrong)


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


def parse_count_tokens(message: pb.CountTokensRequest) -> tuple[Prompt, tuple[Tool, ...]]:
    """The prompt, and the tools that the model is shown with it. Raises: InvalidRequest."""
    wrong = Violations()
    check_model_name(message.model, wrong)
    check_prompt(message, wrong)
    check_tools(message.tools, wrong)
    right = not message.tools or message.WhichOneof("prompt") != "text"
    wrong.check(right, "tools", "need a conversation: only that shows them to the model")
    wrong.raise_if_any()
    return parse_prompt(message), parse_tools(message.tools)


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


ONE_REPLICA = ReplicaCounts(ready=1, total=1, drained=0)


def model_message(
    model: ModelInfo,
    prices: Sequence[CustomerPrice],
    aliases: Sequence[str] = (),
    versions: Mapping[str, float] = MappingProxyType({}),
    replicas: ReplicaCounts = ONE_REPLICA,
) -> pb.Model:
    """One model that can be asked for. prices: what the caller pays for it, by tier, the interactive one first.

    versions: their shares.
    """
    tier_prices = [price_message(each) for each in prices]
    return pb.Model(
        name=model.name,
        architecture=model.architecture,
        context_window_tokens=model.context_window_tokens,
        vocabulary_size=model.vocabulary_size,
        engine=model.engine,
        price=tier_prices[0] if tier_prices else None,
        tier_prices=tier_prices,
        task=pb.MODEL_TASK_EMBED if model.embedding_dimension else pb.MODEL_TASK_GENERATE,
        embedding_dimension=model.embedding_dimension,
        embedding_input_count_max=input_count_max(model),
        aliases=aliases,
        versions=[pb.ModelVersion(version=version, share=share) for version, share in versions.items()],
        ready_replica_count=replicas.ready,
        replica_count=replicas.total,
        drained_replica_count=replicas.drained,
    )


def price_message(paid: CustomerPrice) -> pb.Price:
    """What a model costs in one tier."""
    prices = paid.price.prices
    return pb.Price(
        version=prices.version,
        currency_code=prices.currency_code,
        input_picos_per_token=prices.input_picos_per_token,
        cached_input_picos_per_token=prices.cached_input_picos_per_token,
        output_picos_per_token=prices.output_picos_per_token,
        embedding_picos_per_token=prices.embedding_picos_per_token,
        effective_time=timestamp(paid.price.effective_at),
        tier=TIER_NUMBERS[paid.tier],
        own=paid.price.organization_id is not None,
    )
