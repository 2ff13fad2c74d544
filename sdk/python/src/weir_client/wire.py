"""From the messages of `weir.v1` to the client's values. The only reader of inference protos."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from weir_client import models, values
from weir_client.money import PICOS_PER_UNIT, Money
from weir_client.quote import Quote
from weir_client.wire_receipts import receipts

_FINISH_REASONS = {
    number: values.FinishReason(name.removeprefix("FINISH_REASON_")) for name, number in types_pb2.FinishReason.items()
}
_STAGES = {number: values.Stage(name.removeprefix("STAGE_")) for name, number in pb.ProgressFrame.Stage.items()}
_STATES = {number: values.GenerationState(name.removeprefix("STATE_")) for name, number in pb.Generation.State.items()}
_TASKS = {
    pb.MODEL_TASK_UNSPECIFIED: models.ModelTask.GENERATE,  # of a server that knows no other
    pb.MODEL_TASK_GENERATE: models.ModelTask.GENERATE,
    pb.MODEL_TASK_EMBED: models.ModelTask.EMBED,
}
SUBJECTS = {
    types_pb2.QUOTA_SUBJECT_ORGANIZATION: values.QuotaSubject.ORGANIZATION,
    types_pb2.QUOTA_SUBJECT_PROJECT: values.QuotaSubject.PROJECT,
    types_pb2.QUOTA_SUBJECT_API_KEY: values.QuotaSubject.API_KEY,
}
DIMENSIONS = {
    types_pb2.QUOTA_DIMENSION_CONCURRENT_REQUESTS: values.QuotaDimension.CONCURRENT_REQUESTS,
    types_pb2.QUOTA_DIMENSION_REQUESTS_PER_MINUTE: values.QuotaDimension.REQUESTS_PER_MINUTE,
    types_pb2.QUOTA_DIMENSION_TOKENS_PER_MINUTE: values.QuotaDimension.TOKENS_PER_MINUTE,
    types_pb2.QUOTA_DIMENSION_TOKENS_PER_DAY: values.QuotaDimension.TOKENS_PER_DAY,
    types_pb2.QUOTA_DIMENSION_TOKENS_PER_MONTH: values.QuotaDimension.TOKENS_PER_MONTH,
    types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_MONTH: values.QuotaDimension.COST_PER_MONTH,
    types_pb2.QUOTA_DIMENSION_INPUT_TOKENS_PER_MINUTE: values.QuotaDimension.INPUT_TOKENS_PER_MINUTE,
    types_pb2.QUOTA_DIMENSION_OUTPUT_TOKENS_PER_MINUTE: values.QuotaDimension.OUTPUT_TOKENS_PER_MINUTE,
    types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_DAY: values.QuotaDimension.COST_PER_DAY,
    types_pb2.QUOTA_DIMENSION_PREPAID_CREDIT_PICOS: values.QuotaDimension.PREPAID_CREDIT,
}


def time_of(stamp: Timestamp) -> datetime:
    """An aware datetime in UTC, to the microsecond."""
    return stamp.ToDatetime(tzinfo=UTC)


def seconds_of(duration: Duration) -> float:
    """A duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def money_message(value: Money) -> types_pb2.Money:
    """An amount for the server."""
    units, picos = divmod(value.picos, PICOS_PER_UNIT)
    return types_pb2.Money(currency_code=value.currency_code, units=units, picos=picos)


def money(message: types_pb2.Money) -> Money:
    """An exact amount."""
    return Money(message.currency_code, message.units * PICOS_PER_UNIT + message.picos)


def usage(message: types_pb2.Usage) -> values.Usage:
    """The token counts of a request."""
    return values.Usage(
        input_token_count=message.input_token_count,
        cached_input_token_count=message.cached_input_token_count,
        generated_token_count=message.generated_token_count,
        delivered_token_count=message.delivered_token_count,
        billed_token_count=message.billed_token_count,
        embedding_token_count=message.embedding_token_count,
    )


def timings(message: types_pb2.Timings) -> values.Timings:
    """The stages of a request in milliseconds."""
    return values.Timings(
        auth_ms=message.auth_ms,
        tokenize_ms=message.tokenize_ms,
        admission_ms=message.admission_ms,
        queue_ms=message.queue_ms,
        cold_start_ms=message.cold_start_ms,
        prefill_ms=message.prefill_ms,
        decode_ms=message.decode_ms,
        client_stall_ms=message.client_stall_ms,
        settle_ms=message.settle_ms,
        ttft_ms=message.ttft_ms,
        total_ms=message.total_ms,
    )


def quota(message: types_pb2.QuotaStatus) -> values.QuotaStatus:
    """One limit as it stands."""
    return values.QuotaStatus(
        quota_id=message.quota_id,
        subject=SUBJECTS.get(message.subject, values.QuotaSubject.UNSPECIFIED),
        subject_id=message.subject_id,
        model=message.model,
        dimension=DIMENSIONS.get(message.dimension, values.QuotaDimension.UNSPECIFIED),
        limit_value=message.limit_value,
        used_value=message.used_value,
        held_value=message.held_value,
        remaining_value=message.remaining_value,
        reset_time=time_of(message.reset_time) if message.HasField("reset_time") else None,
        reset_delay_s=seconds_of(message.reset_delay) if message.HasField("reset_delay") else None,
        subject_name=message.subject_name,
        enforced=message.enforced,
        would_refuse_count=message.would_refuse_count,
        input_weight_milli=message.input_weight_milli,
        cached_input_weight_milli=message.cached_input_weight_milli,
        output_weight_milli=message.output_weight_milli,
        standing_limit_value=message.standing_limit_value,
        raised_until_time=time_of(message.raised_until_time) if message.HasField("raised_until_time") else None,
        raise_reason=message.raise_reason,
        binding=message.binding,
        narrowed_by_quota_id=message.narrowed_by_quota_id,
        for_new_keys=message.for_new_keys,
        alert_at=tuple(message.alert_at),
    )


def quote(message: pb.QuoteResponse) -> Quote:
    """What a request would be."""
    return Quote(
        input_token_count=message.input_token_count,
        predicted_cached_token_count=message.predicted_cached_token_count,
        max_output_token_count=message.max_output_token_count,
        expected_output_token_count=message.expected_output_token_count,
        worst_cost=money(message.worst_cost),
        expected_cost=money(message.expected_cost),
        price_version=message.price_version,
        would_admit=message.would_admit,
        retry_helps=message.retry_helps,
        retry_after_s=seconds_of(message.retry_delay) if message.HasField("retry_delay") else None,
        failing_quotas=tuple(quota(each) for each in message.failing_quotas),
        quotas=tuple(quota(each) for each in message.quotas),
    )


def admitted(frame: pb.AdmittedFrame) -> values.Admitted:
    """What admission told."""
    return values.Admitted(
        input_token_count=frame.input_token_count,
        predicted_cached_token_count=frame.predicted_cached_token_count,
        quotas=tuple(quota(each) for each in frame.quotas),
        price_version=frame.price_version,
        max_output_token_count=frame.max_output_token_count,
        bounded_by_key=frame.bounded_by_key,
    )


def restrictions(message: pb.KeyRestrictions) -> values.KeyRestrictions:
    """What a key is good for."""
    return values.KeyRestrictions(
        prefix=message.prefix,
        scopes=tuple(message.scopes),
        models=tuple(message.models),
        max_input_tokens=message.max_input_tokens or None,
        max_output_tokens=message.max_output_tokens or None,
        allowed_networks=tuple(message.allowed_networks),
        secret_expire_time=time_of(message.secret_expire_time) if message.HasField("secret_expire_time") else None,
    )


def logprobs(frame: pb.DeltaFrame) -> tuple[values.TokenLogprobs, ...]:
    """One per token of the frame, or none."""
    return tuple(
        values.TokenLogprobs(_token_logprob(each.chosen), tuple(_token_logprob(token) for token in each.top))
        for each in frame.logprobs
    )


def _token_logprob(message: pb.TokenLogprob) -> values.TokenLogprob:
    return values.TokenLogprob(message.token_id, message.logprob)


def progress(frame: pb.ProgressFrame) -> values.Progress:
    """What a request waits for."""
    return values.Progress(
        stage=_STAGES.get(frame.stage, values.Stage.UNSPECIFIED),
        queue_position=frame.queue_position,
        estimated_wait_s=seconds_of(frame.estimated_wait) if frame.HasField("estimated_wait") else None,
        loading_fraction=frame.loading_fraction,
        loading_stage=frame.loading_stage,
    )


def finish_reason(number: types_pb2.FinishReason.ValueType) -> values.FinishReason:
    """Why a request ended; UNSPECIFIED for a reason that is newer than this client."""
    return _FINISH_REASONS.get(number, values.FinishReason.UNSPECIFIED)


TIERS = {pb.SERVICE_TIER_INTERACTIVE: "interactive", pb.SERVICE_TIER_BATCH: "batch"}


def price(message: pb.Price) -> models.Price:
    """A price version."""
    return models.Price(
        version=message.version,
        currency_code=message.currency_code,
        input_picos_per_token=message.input_picos_per_token,
        cached_input_picos_per_token=message.cached_input_picos_per_token,
        output_picos_per_token=message.output_picos_per_token,
        effective_time=time_of(message.effective_time) if message.HasField("effective_time") else None,
        embedding_picos_per_token=message.embedding_picos_per_token,
        tier=TIERS.get(message.tier, "interactive"),
        own=message.own,
    )


def model(message: pb.Model) -> models.Model:
    """A model with its price."""
    return models.Model(
        name=message.name,
        architecture=message.architecture,
        context_window_tokens=message.context_window_tokens,
        vocabulary_size=message.vocabulary_size,
        engine=message.engine,
        price=price(message.price) if message.HasField("price") else None,
        tier_prices=tuple(map(price, message.tier_prices)),
        task=_TASKS.get(message.task, models.ModelTask.UNSPECIFIED),
        embedding_dimension=message.embedding_dimension,
        embedding_input_count_max=message.embedding_input_count_max,
        aliases=tuple(message.aliases),
        versions=tuple(models.ModelVersion(each.version, each.share) for each in message.versions),
        ready_replica_count=message.ready_replica_count,
        replica_count=message.replica_count,
        drained_replica_count=message.drained_replica_count,
    )


def generation(message: pb.Generation) -> values.Generation:
    """What is recorded of a request."""
    return values.Generation(
        request_id=message.request_id,
        state=_STATES.get(message.state, values.GenerationState.UNSPECIFIED),
        model=message.model,
        admit_time=time_of(message.admit_time) if message.HasField("admit_time") else None,
        settle_time=time_of(message.settle_time) if message.HasField("settle_time") else None,
        usage=usage(message.usage),
        cost=money(message.cost) if message.HasField("cost") else None,
        timings=timings(message.timings) if message.HasField("timings") else None,
        outcome=message.outcome,
        labels=dict(message.labels),
        receipts=receipts(message.receipts),
        migration_count=message.migration_count,
    )
