"""Limits as messages: what is left of each, and which of those that a request meets bind."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from datetime import datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import types_pb2

from api.wire import DIMENSIONS, SUBJECTS, known_duration, known_time
from metering.models import QuotaDimension, QuotaSubject
from metering.quotas.quota_rules import QuotaRule, QuotaState, Weights
from metering.quotas.quota_states import effective

NO_WEIGHTS = Weights(0, 0, 0)  # what is told of a quota that counts no tokens
SUBJECT_ORDER = {subject: index for index, subject in enumerate(QuotaSubject)}
DIMENSION_ORDER = {dimension: index for index, dimension in enumerate(QuotaDimension)}


def quota_status(state: QuotaState) -> types_pb2.QuotaStatus:
    """One limit and what is left of it."""
    status = types_pb2.QuotaStatus()
    fill_quota_status(status, state)
    if state.alert_at:
        status.alert_at.extend(state.alert_at)
    return status


def fill_quota_status(status: types_pb2.QuotaStatus, state: QuotaState) -> None:
    """The same in a message that is there already, and empty."""
    status.CopyFrom(quota_in_force(state.rule, state.subject_name, state.raise_reason))
    status.used_value = state.used
    status.held_value = state.held
    status.remaining_value = status.limit_value - state.used - state.held
    if state.would_refuse_count:
        status.would_refuse_count = state.would_refuse_count
    if state.for_new_keys:
        status.for_new_keys = True
    if (resets_at := state.resets_at) is not None:
        status.reset_time.CopyFrom(reset_time(resets_at))
        status.reset_delay.CopyFrom(reset_delay(resets_at, state.now))


@functools.lru_cache(maxsize=32_768)  # told with every request, and rarely changed; some 20 MB at most
def quota_in_force(rule: QuotaRule, subject_name: str, raise_reason: str) -> types_pb2.QuotaStatus:
    """What of a limit's status is the same from request to request. To be copied, not changed."""
    weights = rule.weights if rule.token_scale is not None else NO_WEIGHTS
    limit_value = rule.limit_value or 0
    status = types_pb2.QuotaStatus(
        quota_id=str(rule.id),
        subject=SUBJECTS[rule.subject],
        subject_id=str(rule.subject_id),
        model=rule.model,
        dimension=DIMENSIONS[rule.dimension],
        limit_value=limit_value,
        subject_name=subject_name,
        enforced=rule.enforced,
        input_weight_milli=weights.input,
        cached_input_weight_milli=weights.cached_input,
        output_weight_milli=weights.output,
        standing_limit_value=limit_value if rule.standing_limit_value is None else rule.standing_limit_value,
        raise_reason=raise_reason,
    )
    if rule.raised_until is not None:
        status.raised_until_time.CopyFrom(known_time(rule.raised_until))
    return status


@functools.lru_cache(maxsize=64)  # the ends of the windows of now
def reset_time(at: datetime) -> Timestamp:
    """The end of a window. To be copied, not changed."""
    return known_time(at)


@functools.lru_cache(maxsize=64)  # several limits of a batch's requests end together
def reset_delay(at: datetime, now: datetime) -> Duration:
    """Time until the end of a window. To be copied, not changed."""
    return known_duration((at - now).total_seconds())


def quota_statuses(states: Iterable[QuotaState]) -> list[types_pb2.QuotaStatus]:
    """One message each, in order."""
    return [quota_status(state) for state in in_order(states)]


def in_order(states: Iterable[QuotaState]) -> list[QuotaState]:
    """Limits in a fixed order: organization, project, key, then dimension."""
    return sorted(states, key=order)


def effective_quota_statuses(states: Iterable[QuotaState]) -> list[types_pb2.QuotaStatus]:
    """All limits that the same requests meet, in that order, and which of them bind."""
    statuses = []
    for each in effective(sorted(states, key=order)):
        status = quota_status(each.state)
        status.binding = each.binding
        status.narrowed_by_quota_id = "" if each.narrowed_by is None else str(each.narrowed_by)
        statuses.append(status)
    return statuses


def order(state: QuotaState) -> tuple[int, int, str]:
    """By subject, from the organization down, then dimension, then model."""
    rule = state.rule
    return SUBJECT_ORDER[rule.subject], DIMENSION_ORDER[rule.dimension], rule.model
