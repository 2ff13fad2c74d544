"""Conversion of quotas to messages."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

from weir.v1 import types_pb2

from api.core.messages import effective_quota_statuses, quota_status, quota_statuses
from metering.core.models import QuotaDimension, QuotaSubject
from metering.quotas.quota_rules import QuotaRule, QuotaState, Weights

NOW = datetime(2026, 11, 20, 23, 59, 54, 750_000, tzinfo=UTC)


def rule(
    subject: QuotaSubject = QuotaSubject.PROJECT,
    dimension: QuotaDimension = QuotaDimension.TOKENS_PER_DAY,
    limit: int = 10,
    model: str = "",
    weights: tuple[int, int, int] = (1000, 1000, 1000),
    *,
    enforced: bool = True,
) -> QuotaRule:
    return QuotaRule(
        uuid.uuid4(), subject, uuid.uuid4(), model, dimension, limit, Weights(*weights), enforced
    )


def test_quotas_follow_the_order_of_the_contract() -> None:
    states = [
        QuotaState(rule(subject, dimension), 0, 0, NOW)
        for dimension in reversed(QuotaDimension)
        for subject in reversed(QuotaSubject)
    ]

    reported = quota_statuses(states)

    subjects = [each.subject for each in reported]
    assert subjects == sorted(subjects)
    assert [
        types_pb2.QuotaDimension.Name(each.dimension).removeprefix("QUOTA_DIMENSION_").lower()
        for each in reported[: len(QuotaDimension)]
    ] == [*QuotaDimension]


def test_the_same_quota_is_shown_with_its_values_at_each_moment() -> None:
    """Constant parts are built once; nothing variable may be cached with them."""
    standing, endless = rule(), rule(dimension=QuotaDimension.CONCURRENT_REQUESTS, limit=20)

    first = quota_status(QuotaState(standing, 2, 1, NOW, "name", would_refuse_count=3))
    second = quota_status(QuotaState(standing, 9, 1, NOW + timedelta(seconds=1), "name"))
    third = quota_status(QuotaState(endless, 0, 1, NOW, "name"))

    amounts = [(each.used_value, each.held_value) for each in (first, second, third)]
    assert amounts == [(2, 1), (9, 1), (0, 1)]
    assert [each.remaining_value for each in (first, second, third)] == [7, 0, 19]
    assert [each.would_refuse_count for each in (first, second, third)] == [3, 0, 0]
    assert (first.reset_delay.seconds, first.reset_delay.nanos) == (5, 250_000_000)
    assert (second.reset_delay.seconds, second.reset_delay.nanos) == (4, 250_000_000)
    assert first.reset_time.ToDatetime(tzinfo=UTC) == datetime(2026, 11, 21, tzinfo=UTC)
    assert not third.HasField("reset_time")
    assert not third.HasField("reset_delay")
    assert {each.subject_name for each in (first, second, third)} == {"name"}


def test_an_override_weights_and_a_shadow_limit_are_shown() -> None:
    until = NOW + timedelta(hours=1)
    raised = QuotaRule(
        uuid.uuid4(),
        QuotaSubject.API_KEY,
        uuid.uuid4(),
        "m",
        QuotaDimension.TOKENS_PER_MINUTE,
        500,
        Weights(1000, 100, 4000),
        enforced=False,
        base_limit_value=100,
        override_until=until,
    )

    reported = quota_status(QuotaState(raised, 700, 0, NOW, override_reason="launch"))

    assert (
        reported.limit_value,
        reported.base_limit_value,
        reported.remaining_value,
        reported.enforced,
    ) == (500, 100, -200, False)
    assert reported.override_end_time.ToDatetime(tzinfo=UTC) == until
    assert reported.override_reason == "launch"
    assert (
        reported.input_weight_milli,
        reported.cached_input_weight_milli,
        reported.output_weight_milli,
    ) == (1000, 100, 4000)
    plain = quota_status(QuotaState(rule(dimension=QuotaDimension.COST_PICOS_PER_DAY), 0, 0, NOW))
    assert (plain.input_weight_milli, plain.enforced) == (0, True)
    assert not plain.HasField("override_end_time")


def test_the_tightest_limit_of_a_key_binds_and_a_looser_one_is_marked_as_without_effect() -> None:
    organization = rule(QuotaSubject.ORGANIZATION, limit=100)
    watching = rule(QuotaSubject.ORGANIZATION, limit=1, enforced=False, model="m")
    # never reached: the organization's limit is smaller
    project = rule(QuotaSubject.PROJECT, limit=200)
    key = rule(QuotaSubject.API_KEY, limit=50)
    # The key's own limit on all models is as small.
    of_model = rule(QuotaSubject.API_KEY, limit=50, model="m")
    weighted = rule(
        QuotaSubject.API_KEY,
        limit=150,
        model="m",
        dimension=QuotaDimension.TOKENS_PER_DAY,
        weights=(1000, 1000, 4000),
    )
    other = rule(QuotaSubject.API_KEY, dimension=QuotaDimension.CONCURRENT_REQUESTS, limit=3)
    used = {
        organization: 95,
        watching: 95,
        project: 60,
        key: 20,
        of_model: 10,
        weighted: 100,
        other: 3,
    }

    reported = effective_quota_statuses(
        QuotaState(each, amount, 0, NOW) for each, amount in used.items()
    )

    by_id = {each.quota_id: each for each in reported}
    binding = {str(organization.id), str(other.id)}
    assert {quota_id for quota_id, each in by_id.items() if each.binding} == binding
    assert by_id[str(project.id)].narrowed_by_quota_id == str(organization.id)
    assert by_id[str(of_model.id)].narrowed_by_quota_id == str(key.id)
    assert by_id[str(key.id)].narrowed_by_quota_id == ""
    # Output alone exhausts it at 37 tokens.
    assert by_id[str(weighted.id)].narrowed_by_quota_id == ""
    assert by_id[str(organization.id)].narrowed_by_quota_id == ""
