"""Messages that several services send: limits, models, prices, receipts, billing profiles,
requests, usage.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import alerts_pb2, receipts_pb2, types_pb2
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import usage_reports_pb2 as usage_pb

from api.core import wire
from api.core.wire import DIMENSION_NUMBERS, MICROS_PER_SECOND, SUBJECTS, known_time, message_of
from inference.engine import ModelInfo
from inference.routing.router import Router
from metering.alerts.alerts import KeyChange, ListedAlert, facts_of
from metering.alerts.webhooks import WebhookState
from metering.core.errors import InvalidValue
from metering.core.models import (
    Hold,
    HoldState,
    QuotaDimension,
    QuotaSubject,
    TokenKind,
    UsageEvent,
)
from metering.pricing.prices import CustomerPrice, customer_prices, versions_in_force
from metering.quotas.quota_rules import (
    NO_WINDOW,
    QuotaRule,
    QuotaState,
    Weights,
    window_resets,
)
from metering.quotas.quota_states import effective
from metering.receipts.chaining import IssuedReceipt
from metering.receipts.encoding import NO_HASHES, owners_in, parts_of
from metering.receipts.months import receipts_of_hold
from metering.reports.usage_reports import (
    Grouping,
    OwnUsage,
    UsageRow,
    find_recorded_request,
)
from metering.store.db import Sessions
from metering.tenants.authentication import Principal
from metering.tenants.billing_profiles import BillingProfile
from metering.tenants.four_eyes import KeyAct

NO_WEIGHTS = Weights(0, 0, 0)  # of a quota that counts no tokens
SUBJECT_ORDER = {subject: index for index, subject in enumerate(QuotaSubject)}
DIMENSION_ORDER = {dimension: index for index, dimension in enumerate(QuotaDimension)}
INPUT_COUNT_MAX = 2048  # texts per call, as elsewhere; more gain nothing, since a batch is smaller
# Default limit of gRPC clients, less room for fields besides the vectors.
ANSWER_BYTES_MAX = 4 * 2**20 - 2**16
EMBEDDING_BYTES = 24  # of a message besides its vector

STATES = {
    HoldState.HELD: pb.Generation.STATE_RUNNING,
    HoldState.SETTLED: pb.Generation.STATE_SETTLED,
    HoldState.VOIDED: pb.Generation.STATE_VOIDED,
    HoldState.EXPIRED: pb.Generation.STATE_EXPIRED,
}

GROUPINGS: Mapping[int, Grouping] = {
    usage_pb.UsageGrouping.Value(f"USAGE_GROUPING_{each.name}"): each for each in Grouping
}
# Each kind of token has a field: tokens of a kind without one would be billed but not shown.
COUNT_FIELDS: Mapping[TokenKind, str] = {kind: f"{kind}_token_count" for kind in TokenKind}
TIME_ZONE = "UTC"


def quota_status(state: QuotaState) -> types_pb2.QuotaStatus:
    status = types_pb2.QuotaStatus()
    name = state.subject_name or state.rule.subject_name
    status.CopyFrom(quota_in_force(state.rule, name, state.override_reason))
    status.used_value = state.used
    status.held_value = state.held
    status.remaining_value = status.limit_value - state.used - state.held
    status.would_refuse_count = state.would_refuse_count
    status.for_new_keys = state.for_new_keys
    if state.within_name:
        status.within_name = state.within_name
    if state.is_planned:
        status.quota_id = ""
    if (reset := reset_of(state.rule.window, state.now)) is not None:
        status.reset_time.seconds, status.reset_delay.seconds, status.reset_delay.nanos = reset
    if state.alert_at:
        status.alert_at.extend(state.alert_at)
    return status


@functools.lru_cache(maxsize=512)  # requests admitted together have one time
def reset_of(window: int, now: datetime) -> tuple[int, int, int] | None:
    """Compute when a window is reset: seconds since 1970, then the seconds and nanoseconds left.

    None for a window that never is.
    """
    end = window_resets(now)[window]
    if end is None:
        return None
    rest = end - now
    return int(end.timestamp()), rest.days * 86_400 + rest.seconds, rest.microseconds * 1000


# Sent with every request and rarely changed; some 20 MB at most.
@functools.lru_cache(maxsize=32_768)
def quota_in_force(
    rule: QuotaRule, subject_name: str, override_reason: str
) -> types_pb2.QuotaStatus:
    """Build the part of a quota's status that is the same for every request.

    The message is cached: copy it before you change it.
    """
    weights = rule.weights if rule.token_scale is not None else NO_WEIGHTS
    limit_value = rule.limit_value or 0
    status = types_pb2.QuotaStatus(
        quota_id=str(rule.id),
        subject=SUBJECTS[rule.subject],
        subject_id=str(rule.subject_id),
        model=rule.model,
        dimension=DIMENSION_NUMBERS[rule.dimension],
        window_minutes=rule.window_minutes,
        limit_value=limit_value,
        subject_name=subject_name,
        enforced=rule.enforced,
        input_weight_milli=weights.input,
        cached_input_weight_milli=weights.cached_input,
        output_weight_milli=weights.output,
        base_limit_value=limit_value if rule.base_limit_value is None else rule.base_limit_value,
        override_reason=override_reason,
        for_each=rule.for_each,
        within_id=str(rule.within_id or ""),
        selector_id=str(rule.selector_id or ""),
        group=rule.group,
        set_by_organization=rule.set_by_organization,
    )
    if rule.override_until is not None:
        status.override_end_time.CopyFrom(known_time(rule.override_until))
    return status


def quota_statuses(states: Iterable[QuotaState]) -> list[types_pb2.QuotaStatus]:
    """Convert quotas to messages, sorted by organization, project and key, then by dimension."""
    return [quota_status(state) for state in sorted(states, key=lambda state: order(state.rule))]


def effective_quota_statuses(states: Iterable[QuotaState]) -> list[types_pb2.QuotaStatus]:
    """Convert all quotas on the same requests to messages, sorted, and mark the effective ones."""
    statuses = []
    for each in effective(sorted(states, key=lambda state: order(state.rule))):
        status = quota_status(each.state)
        status.binding = each.binding
        status.narrowed_by_quota_id = "" if each.narrowed_by is None else str(each.narrowed_by)
        statuses.append(status)
    return statuses


def order(rule: QuotaRule) -> tuple[int, int, int, str]:
    """Sort key of quotas: subject (organization, project, key), dimension, window, then model."""
    subject, dimension = SUBJECT_ORDER[rule.subject], DIMENSION_ORDER[rule.dimension]
    return subject, dimension, rule.window_minutes, rule.model


def input_count_max(model: ModelInfo) -> int:
    """Return how many texts one `Embed` call may have, so that the vectors fit into the response.

    0 if the model is not an embedding model.
    """
    if not model.embedding_dimension:
        return 0
    return min(
        INPUT_COUNT_MAX, ANSWER_BYTES_MAX // (4 * model.embedding_dimension + EMBEDDING_BYTES)
    )


def receipt_messages(receipts: Iterable[IssuedReceipt]) -> list[receipts_pb2.Receipt]:
    return [receipt_message(each) for each in receipts]


def receipt_message(
    receipt: IssuedReceipt, new: Callable[..., receipts_pb2.Receipt] = receipts_pb2.Receipt
) -> receipts_pb2.Receipt:
    """Convert a receipt with its proof to a message.

    `new` creates the message, for example in place: assigning a message copies it. Fields are set
    one by one, and only those with a value: by keyword each costs twice as much.
    """
    ids, numbers, previous_hash, ends, timings, hashes = parts_of(receipt.encoded)
    part, sent, cached, billed, embedded, reasoning, *others = numbers
    price_version, cost_picos, admitted_us, settled_us, sequence = others
    message = new()
    message.version = 3 if timings else 2 if reasoning else 1
    message.organization_id, message.project_id, message.api_key_id = _owners(ids[:48])
    request = ids[48:].hex()
    message.request_id = (
        f"{request[:8]}-{request[8:12]}-{request[12:16]}-{request[16:20]}-{request[20:]}"
    )
    message.currency_code, message.model, message.outcome = ends
    message.input_token_count, message.billed_token_count = sent, billed
    if part or cached or embedded or reasoning:
        message.part, message.cached_input_token_count = part, cached
        message.embedding_token_count, message.reasoning_token_count = embedded, reasoning
    message.price_version, message.cost_picos = price_version, cost_picos
    message.sequence = sequence
    message.previous_hash, message.hash = previous_hash, receipt.hash
    _set_micros(message.admit_time, admitted_us)
    _set_micros(message.settle_time, settled_us)
    if timings:
        summary = message.timings
        summary.ttft_us, summary.tokens_per_second_milli, summary.itl_p50_us = timings[:3]
        summary.itl_p99_us, summary.itl_max_us, summary.client_stall_us = timings[3:]
        summary.SetInParent()
    if hashes != NO_HASHES:
        message.version = 4
        message.end_user_hash, message.labels_hash = hashes
    if (batch := receipt.batch) is not None:
        message.key_id, message.signature = batch.key_id, batch.signature
        for on_left, neighbour in batch.path(receipt.hash):
            step = message.path.add()
            step.hash = neighbour
            if on_left:
                step.on_left = True
    return message


def proven_receipt_message(receipt: IssuedReceipt) -> receipts_pb2.Receipt:
    """Convert a receipt to a message with the end user and labels behind its hashes."""
    message = receipt_message(receipt)
    if (proof := receipt.proof) is not None:
        message.end_user, message.end_user_salt = proof.end_user, proof.end_user_salt
        message.labels.update(proof.labels)
        message.labels_salt = proof.labels_salt
    return message


def _set_micros(time: Timestamp, micros: int) -> None:
    """Set a time in microseconds since 1970, even if it is 0."""
    time.seconds, rest = divmod(micros, MICROS_PER_SECOND)
    time.nanos = rest * 1000


@functools.lru_cache(maxsize=4096)  # the keys in use
def _owners(ids: bytes) -> list[str]:
    """Decode the ids of organization, project and API key as text."""
    return list(map(str, owners_in(ids)))


def alert_message(listed: ListedAlert) -> alerts_pb2.Alert:
    alert, quota, delivery = listed.alert, listed.quota, listed.delivery
    delivery_message = None
    if delivery is not None:
        times = {"attempt_time": delivery.attempted_at, "end_time": delivery.ended_at}
        delivery_message = message_of(alerts_pb2.AlertDelivery, delivery, **times)
    paid = None
    if alert.invoice_event is not None:
        paid = message_of(
            alerts_pb2.AlertInvoice, facts_of(alert), stripe_invoice_id=alert.stripe_invoice_id
        )
    return message_of(
        alerts_pb2.Alert,
        alert,
        alert_id=alert.id,
        organization_id=listed.organization.id,
        organization_name=listed.organization.name,
        currency_code=listed.organization.currency_code,
        kind=listed.kind,
        quota_id=quota and quota.id,
        subject=quota and quota.subject,
        subject_id=quota and quota.subject_id,
        subject_name=listed.subject_name,
        within_id=quota and quota.within_id,
        within_name=listed.within_name,
        model=quota and quota.model,
        dimension=quota and quota.dimension,
        used_value=alert.used,
        window_start_time=None
        if quota is None or alert.window_start == NO_WINDOW
        else alert.window_start,
        invoice=paid,
        key=None
        if listed.entry is None
        else message_of(alerts_pb2.AlertKey, KeyChange.of(listed.entry)),
        delivery=delivery_message,
    )


def webhook_message(state: WebhookState) -> alerts_pb2.AlertWebhook:
    return message_of(
        alerts_pb2.AlertWebhook,
        state.webhook,
        organization_name=state.organization.name,
        pending_count=state.pending_count,
        pause_end_time=state.webhook.paused_until,
        last_error=state.last_error,
    )


def parse_billing_profile(message: types_pb2.BillingProfile) -> BillingProfile:
    """Convert the message of a billing profile, without validation."""
    texts = {
        field.name: getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if field.name != "emails"
    }
    return BillingProfile(emails=tuple(message.emails), **texts)


async def models_for(router: Router, sessions: Sessions, principal: Principal) -> list[pb.Model]:
    """List the models that the caller may use, with the prices that it pays."""
    owner = principal.organization_id
    async with sessions() as session:
        found = await versions_in_force(
            session, currency_code=principal.currency_code, organization_id=owner
        )
    paid = customer_prices(found, owner)
    return [
        model_message(
            model, [price_message(each) for each in paid if each.price.model == model.name], router
        )
        for model in router.models()
        if principal.may_use(model.name)
    ]


def model_message(model: ModelInfo, prices: Sequence[pb.Price], router: Router) -> pb.Model:
    """Convert a model to a message. `prices` are the caller's by tier, interactive first."""
    replicas = router.replicas(model.name)
    return wire.message_of(
        pb.Model,
        model,
        price=prices[0] if prices else None,
        tier_prices=prices,
        task=pb.MODEL_TASK_EMBED if model.embedding_dimension else pb.MODEL_TASK_GENERATE,
        embedding_input_count_max=input_count_max(model),
        aliases=router.aliases(model.name),
        versions=[
            pb.ModelVersion(version=version, share=share)
            for version, share in router.versions(model.name).items()
        ],
        ready_replica_count=replicas.ready,
        replica_count=replicas.total,
        drained_replica_count=replicas.drained,
        kernels=router.kernels(model.name),
        counts_from_usage=model.capabilities.counts_from_usage,
        refused_fields=[
            pb.RefusedField(field=field, values=values)
            for field, values in (
                () if model.embedding_dimension else model.capabilities.refusals()
            )
        ],
    )


def price_message(paid: CustomerPrice) -> pb.Price:
    is_own = paid.price.organization_id is not None
    return wire.message_of(
        pb.Price,
        paid.price.prices,
        effective_time=paid.price.effective_at,
        tier=paid.tier,
        own=is_own,
    )


def restrictions(principal: Principal, change: KeyAct | None) -> pb.KeyRestrictions:
    """Convert the restrictions of an API key to a message.

    `change` is the latest change that gave the key its powers; None if there was none.
    """
    lifetime_s = principal.secret_lifetime_s
    return wire.message_of(
        pb.KeyRestrictions,
        principal.terms,
        prefix=principal.key_prefix,
        latest_change=change and wire.message_of(pb.KeyChange, change, change_time=change.at),
        secret_expire_time=None
        if lifetime_s is None
        else datetime.now(UTC) + timedelta(seconds=lifetime_s),
    )


async def find_generation(
    session: AsyncSession, project_id: uuid.UUID, request_id: uuid.UUID
) -> pb.Generation:
    """Find the record of a request. Raises NotFound if the project has no such request."""
    hold, currency_code, events, end_user = await find_recorded_request(
        session, project_id, request_id
    )
    generation = pb.Generation(
        request_id=str(request_id),
        state=STATES[HoldState(hold.state)],
        model=hold.model,
        admit_time=wire.timestamp(hold.admitted_at),
        usage=running_usage(hold) if hold.state == HoldState.HELD else total_usage(events),
        labels={str(key): str(value) for key, value in hold.labels.items()},
        end_user=end_user,
        receipts=receipt_messages(await receipts_of_hold(session, hold.id)),
    )
    if hold.ended_at is not None:
        generation.settle_time.CopyFrom(wire.known_time(hold.ended_at))
        generation.cost.CopyFrom(
            wire.money(currency_code, sum(event.cost_picos for event in events))
        )
    if events:
        generation.outcome = events[-1].outcome.upper()
        generation.migration_count = sum(event.migration_count for event in events)
        if events[0].timings is not None:
            generation.timings.CopyFrom(types_pb2.Timings(**events[0].timings))
    return generation


def running_usage(hold: Hold) -> types_pb2.Usage:
    """Convert the usage of a running request, as recorded when its lease was last extended."""
    if hold.embedding:
        return types_pb2.Usage(embedding_token_count=hold.input_token_count)
    return types_pb2.Usage(
        input_token_count=hold.input_token_count,
        cached_input_token_count=hold.cached_input_token_count,
        generated_token_count=hold.delivered_token_count,
        delivered_token_count=hold.delivered_token_count,
    )


def total_usage(events: Sequence[UsageEvent]) -> types_pb2.Usage:
    names = types_pb2.Usage.DESCRIPTOR.fields_by_name
    return types_pb2.Usage(
        **{name: sum(getattr(event, name) for event in events) for name in names}
    )


def groupings(numbers: Iterable[int]) -> list[Grouping]:
    """Convert the groupings of a request for usage. Raises: InvalidValue."""
    found = [GROUPINGS.get(each) for each in numbers]
    if None in found:
        raise InvalidValue("group_by", "must name the dimensions of the rows")
    return [each for each in found if each is not None]


def usage_row(row: UsageRow, currency_code: str) -> usage_pb.UsageRow:
    """Convert a row of usage to a message. Fields that the report does not group by stay empty."""
    return wire.message_of(
        usage_pb.UsageRow,
        row,
        currency_code,
        outcome=row.outcome and row.outcome.upper(),
        pending_amount=row.pending_picos,
        hour=row.hour and f"{row.hour.astimezone(UTC):%Y-%m-%dT%H:%MZ}",
        **{COUNT_FIELDS[kind]: count for kind, count in row.token_counts.items()},
    )


def own_usage_message(report: OwnUsage, currency_code: str) -> usage_pb.GetOwnUsageResponse:
    """Convert the usage of a key or a project to a message, which does not name its owner."""
    unnamed = [replace(row, organization_id=None, organization_name=None) for row in report.rows]
    return usage_pb.GetOwnUsageResponse(
        rows=[usage_row(each, currency_code) for each in unnamed],
        total=usage_row(report.total, currency_code),
        first_day=str(report.days.first),
        last_day=str(report.days.last),
        time_zone=TIME_ZONE,
    )
