"""Construction of the server frames of one request. The sender sets the request id."""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import status_pb2
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core import wire
from api.core.messages import order, quota_in_force, quota_statuses, receipt_message, reset_of
from api.generation.delivery.encoding import logprob_messages
from api.generation.endings import UsageSoFar
from api.generation.request.limits import OutputLimits
from inference.engine import EngineCondition, GenerationRequest, StoppedBy, TokenLogprobs
from metering.core.models import Outcome
from metering.holds.operations import Admitted, Settled
from metering.pricing.prices import TokenPrices
from metering.quotas.quota_rules import QuotaRule, QuotaState

MetQuota = tuple[int, types_pb2.QuotaStatus, int, int, Timestamp, Duration]
PROMPT_TOKENS_MAX = 4096  # per frame, of up to 0.4 MB

NO_STOPS: Mapping[int, StoppedBy] = {}
TIMING_FIELDS = types_pb2.Timings.DESCRIPTOR.fields
TIMING_NAMES = tuple(field.name for field in TIMING_FIELDS)
TIMING_TAGS = tuple(field.number << 3 | 1 for field in TIMING_FIELDS)  # of doubles, in one byte
NO_TIMINGS = (0.0,) * len(TIMING_FIELDS)
TIMINGS = struct.Struct("<" + "Bd" * len(TIMING_FIELDS))


def admitted(
    admission: Admitted,
    request: GenerationRequest,
    predicted_cached_token_count: int,
    model: str,
    requested_model: str = "",
    *,
    limited_by_key: bool,
) -> pb.ServerFrame:
    """Build the `admitted` frame, with the remainder of each quota that applies to the request.

    `model` has taken it, as the fallback of `requested_model` if that is not empty. The next call
    reuses the frame, so send it before. `limited_by_key`: the API key limits the output, because
    the request sets no limit.
    """
    frame, quotas = _met_quotas(admission.quotas.rules, model, requested_model)
    now, counts = admission.quotas.now, admission.quotas.counts
    for index, status, limit_value, window, reset_time, delay in quotas:
        used, held = counts[index]
        status.used_value = used
        status.held_value = held
        status.remaining_value = limit_value - used - held
        if (reset := reset_of(window, now)) is not None:
            reset_time.seconds, delay.seconds, delay.nanos = reset
    message = frame.admitted
    message.input_token_count = len(request.prompt_token_ids)
    message.predicted_cached_token_count = predicted_cached_token_count
    message.price_version = admission.prices.version
    message.max_output_token_count = request.stop.max_output_tokens * request.choice_count
    message.limited_by_key = limited_by_key
    return frame


@functools.lru_cache(maxsize=8192)  # keys in use, by their limits; some 20 MB at most
def _met_quotas(
    rules: tuple[QuotaRule, ...],
    model: str,
    requested_model: str,
) -> tuple[pb.ServerFrame, list[MetQuota]]:
    """Build a frame with these models and quotas; return for each quota: index in `rules`, message,
    limit, window, and the messages of its reset.

    Later only numbers are set: setting a string again would grow the message's memory each time.
    """
    frame = pb.ServerFrame(admitted=pb.AdmittedFrame(model=model, requested_model=requested_model))
    order_of_rules = sorted(range(len(rules)), key=lambda index: order(rules[index]))
    frame.admitted.quotas.extend(quota_in_force(rules[index], "", "") for index in order_of_rules)
    found = zip(order_of_rules, frame.admitted.quotas, strict=True)
    return frame, [
        (
            index,
            status,
            status.limit_value,
            rules[index].window,
            status.reset_time,
            status.reset_delay,
        )
        for index, status in found
    ]


def queued(position: int, estimated_wait_s: float | None) -> pb.ServerFrame:
    """Build the progress frame of a waiting request. `estimated_wait_s` is None if unknown."""
    wait = wire.duration(estimated_wait_s)
    frame = pb.ProgressFrame(
        stage=pb.ProgressFrame.STAGE_QUEUED, queue_position=position, estimated_wait=wait
    )
    return pb.ServerFrame(progress=frame)


def loading(engine: EngineCondition) -> pb.ServerFrame:
    """Build the progress frame of a request that waits for an engine to start."""
    frame = pb.ProgressFrame(
        stage=pb.ProgressFrame.STAGE_ENGINE_LOADING,
        estimated_wait=wire.duration(engine.retry_after_s) if engine.retry_after_s > 0 else None,
        loading_fraction=engine.loading_fraction,
        loading_stage=engine.loading_stage,
    )
    return pb.ServerFrame(progress=frame)


def running() -> pb.ServerFrame:
    """Build the progress frame of a running request that has no new output yet."""
    return pb.ServerFrame(progress=pb.ProgressFrame(stage=pb.ProgressFrame.STAGE_RUNNING))


def prompts(logprobs: Sequence[TokenLogprobs]) -> Iterator[pb.ServerFrame]:
    """Yield the log-probabilities of a prompt in frames of at most `PROMPT_TOKENS_MAX` tokens."""
    for first in range(0, len(logprobs), PROMPT_TOKENS_MAX):
        part = logprob_messages(logprobs[first : first + PROMPT_TOKENS_MAX])
        yield pb.ServerFrame(prompt=pb.PromptFrame(logprobs=part))


def usage(
    so_far: UsageSoFar,
    delivered_token_count: int,
    reasoning_token_count: int,
    prices: TokenPrices,
) -> pb.ServerFrame:
    """Build a usage frame, with the counts and the cost so far.

    Counts the tokens sent before this frame: `delivered_token_count` in all, of which
    `reasoning_token_count` are thinking.
    """
    cost = prices.cost_picos(
        so_far.input_token_count,
        so_far.cached_input_token_count,
        delivered_token_count,
        reasoning_token_count=reasoning_token_count,
    )
    counts = types_pb2.Usage(
        input_token_count=so_far.input_token_count,
        cached_input_token_count=so_far.cached_input_token_count,
        generated_token_count=so_far.generated_token_count,
        delivered_token_count=delivered_token_count,
        billed_token_count=delivered_token_count,
        reasoning_token_count=reasoning_token_count,
    )
    return pb.ServerFrame(
        usage=pb.UsageFrame(usage=counts, cost=wire.money(prices.currency_code, cost))
    )


def updated(limits: OutputLimits | None, refusal: status_pb2.Status | None) -> pb.ServerFrame:
    """Build the answer to a change of limits.

    `limits` are those now in force; None before admission. `refusal` is why nothing changed, or
    None.
    """
    frame = pb.UpdatedFrame(refusal=refusal)
    if limits is not None:
        frame.max_output_tokens = limits.requested_token_count_max
        if limits.max_cost is not None:
            frame.max_cost.CopyFrom(
                wire.money(limits.max_cost.currency_code, limits.max_cost.picos)
            )
    return pb.ServerFrame(updated=frame)


def attached(after_seq: int, last_seq: int, so_far: UsageSoFar, *, running: bool) -> pb.ServerFrame:
    """Build the first frame for a stream that attaches to a request."""
    return pb.ServerFrame(
        attached=pb.AttachedFrame(
            after_seq=after_seq,
            last_seq=last_seq,
            delivered_token_count=so_far.delivered_token_count,
            running=running,
        )
    )


def set_settlement(
    settled: Settled, message: pb.FinishedFrame | pb.FailedFrame | pb.EmbedResponse
) -> None:
    """Set the billed usage, the cost and the receipts in a response.

    Changes the message in place, since assigning a message copies it.
    """
    usage, cost = message.usage, message.cost
    usage.input_token_count = settled.input_token_count
    usage.cached_input_token_count = settled.cached_input_token_count
    usage.generated_token_count = settled.generated_token_count
    usage.delivered_token_count = settled.delivered_token_count
    usage.billed_token_count = settled.billed_token_count
    usage.embedding_token_count = settled.embedding_token_count
    usage.journalled_token_count = settled.journalled_token_count
    usage.reasoning_token_count = settled.reasoning_token_count
    cost.currency_code = settled.currency_code
    cost.units, cost.picos = divmod(settled.cost_picos, wire.PICOS_PER_UNIT)
    for receipt in settled.receipts:
        receipt_message(receipt, message.receipts.add)


def finished(
    outcome: Outcome,
    settled: Settled | None,
    currency_code: str,
    timings: Mapping[str, float],
    exhausted: Sequence[QuotaState],
    choice_ends: Mapping[int, Outcome],
    migration_count: int = 0,
    called_choices: Collection[int] = (),
    detail: str = "",
    stops: Mapping[int, StoppedBy] = NO_STOPS,
) -> pb.ServerFrame:
    """Build the last frame of a request that ran, or was stopped after admission.

    `settled` is None if nothing was billed. `choice_ends` has the outcome of each choice if there
    are several; `called_choices` are the indices of the choices with tool calls. `stops` has the
    stop sequence or token of the request that ended a choice, by its index.
    """
    frame = pb.ServerFrame()
    message = frame.finished
    message.reason = wire.finish_reason(outcome, called=0 in called_choices)
    if settled is None:
        message.usage.SetInParent()
        message.cost.currency_code = currency_code
    else:
        set_settlement(settled, message)
    # Serialized: less than half the time of setting the fields.
    fields: list[float] = [0] * (2 * len(TIMING_TAGS))
    fields[::2] = TIMING_TAGS
    fields[1::2] = list(map(timings.get, TIMING_NAMES, NO_TIMINGS))
    message.timings.MergeFromString(TIMINGS.pack(*fields))
    message.migration_count = migration_count
    if detail:
        message.detail = detail
    if exhausted:
        message.exhausted_quotas.extend(quota_statuses(exhausted))
    if 0 in stops:
        set_stop(message, stops[0])
    for index, end in sorted(choice_ends.items()):
        reason = wire.finish_reason(end, called=index in called_choices)
        choice = message.choices.add(choice_index=index, reason=reason)
        if index in stops:
            set_stop(choice, stops[index])
    return frame


def set_stop(message: pb.FinishedFrame | pb.ChoiceEnd, stop: StoppedBy) -> None:
    """Set the stop sequence or token that ended an output."""
    if isinstance(stop, str):
        message.stop_sequence = stop
    elif stop is not None:
        message.stop_token_id = stop


def stop_of(message: pb.FinishedFrame | pb.ChoiceEnd) -> StoppedBy:
    """Return the stop sequence or token that ended an output; None if neither did."""
    if message.WhichOneof("stopped_by") == "stop_sequence":
        return message.stop_sequence
    return message.stop_token_id if message.HasField("stop_token_id") else None


def failed(
    status: status_pb2.Status, settled: Settled | None, *, duplicate_start: bool = False
) -> pb.ServerFrame:
    """Build the last frame of a request that was refused or failed; `settled` was billed."""
    frame = pb.ServerFrame(failed=pb.FailedFrame(status=status, duplicate_start=duplicate_start))
    if settled is not None:
        set_settlement(settled, frame.failed)
    return frame
