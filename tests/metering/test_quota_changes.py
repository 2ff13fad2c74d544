"""Overrides, shadow mode, weights and limits for new keys, for admins."""

from __future__ import annotations

import uuid
from datetime import timedelta
from functools import partial

import pytest
from sqlalchemy import select

from metering.core.audit import list_audit_entries
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import (
    ApiKey,
    Organization,
    QuotaDimension,
    QuotaKey,
    QuotaSubject,
    QuotaTerms,
)
from metering.holds.operations import Admitted, Extend
from metering.quotas.quota_admin import delete_quota, override_quota, set_quota
from metering.quotas.quota_rules import QuotaState, Weights
from metering.quotas.quota_states import list_quotas, quotas_for
from metering.quotas.quotas import QuotaExceeded
from metering.store.db import Sessions
from metering.tenants.api_keys import create_api_key
from tests.metering.hold_world import NOON, HoldWorld, admit, settle
from tests.metering.invariants import check_invariants
from tests.metering.test_quota_recount import set_limit

DAY, MINUTE = QuotaDimension.TOKENS_PER_DAY, QuotaDimension.TOKENS_PER_MINUTE


async def raise_limit(
    sessions: Sessions,
    state: QuotaState,
    limit_value: int,
    seconds: float | None,
    reason: str = "launch day",
) -> QuotaState:
    async with sessions.begin() as session:
        until = None if seconds is None else NOON + timedelta(seconds=seconds)
        return await override_quota(
            session,
            quota_id=str(state.quota_id),
            limit_value=limit_value,
            until=until,
            reason=reason,
            actor="ann",
        )


async def test_a_raise_ends_by_the_databases_clock(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    state = await set_limit(sessions, payer, DAY, 50)
    raised = await raise_limit(sessions, state, 100, 60)
    first, second, third, fourth = (admit(payer, least_tokens=20) for _ in range(4))

    assert raised.limit_value == 100
    assert raised.rule.base_limit_value == 50
    assert raised.override_reason == "launch day"
    assert [type(answer) for answer in await world.run(first, second, third, fourth)] == [
        Admitted
    ] * 3 + [QuotaExceeded]
    check_invariants(world.url)
    await world.run(settle(third.hold_id, 0))
    world.advance(59.999)
    (extended,) = await world.run(Extend(first.hold_id, 20, 0, 5))
    assert extended.leased_token_count == 25  # type: ignore[union-attr]
    world.advance(0.001)
    refused = await world.run(Extend(second.hold_id, 20, 0, 1), admit(payer))
    assert [type(answer) for answer in refused] == [QuotaExceeded] * 2
    assert refused[0].failing[0].limit_value == 50  # type: ignore[union-attr]
    check_invariants(world.url)
    async with sessions() as session:
        (over,) = (await list_quotas(session))[0]
    assert over.limit_value == 50
    assert over.remaining == 50 - 75
    assert over.override_reason == ""
    assert over.rule.override_until is None


async def test_an_override_may_be_prolonged_and_ended_and_every_change_is_broadcast(
    world: HoldWorld, sessions: Sessions
) -> None:
    state = await set_limit(sessions, world.tenant(), DAY, 50)

    await raise_limit(sessions, state, 100, 60)
    await raise_limit(sessions, state, 100, 60)  # an equal raise changes nothing
    await raise_limit(sessions, state, 100, 120, "longer")
    ended = await raise_limit(sessions, state, 0, None)
    await raise_limit(sessions, state, 0, None)

    assert (ended.limit_value, ended.override_reason) == (50, "")
    async with sessions() as session:
        changes = [
            entry for entry in await list_audit_entries(session) if entry.action == "quota.override"
        ]
    assert [entry.after and entry.after["override_reason"] for entry in changes] == [
        None,
        "longer",
        "launch day",
    ]
    assert {entry.actor for entry in changes} == {"ann"}


async def test_a_limit_set_above_its_raise_ends_that(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    state = await set_limit(sessions, payer, DAY, 50)
    await raise_limit(sessions, state, 100, 60)

    higher = await set_limit(sessions, payer, DAY, 60)
    above = await set_limit(sessions, payer, DAY, 100)

    assert (higher.limit_value, higher.rule.base_limit_value) == (100, 60)
    assert (above.limit_value, above.rule.override_until) == (100, None)


@pytest.mark.parametrize(
    ("limit_value", "seconds", "reason", "field"),
    [
        (50, 60, "r", "limit_value"),
        (2**63, 60, "r", "limit_value"),
        (60, 0, "r", "expire_time"),
        (60, 367 * 86_400, "r", "expire_time"),
        (60, 60, "  ", "reason"),
        (60, 60, "r" * 501, "reason"),
    ],
)
async def test_an_invalid_raise_names_the_field(
    world: HoldWorld, sessions: Sessions, limit_value: int, seconds: float, reason: str, field: str
) -> None:
    state = await set_limit(sessions, world.tenant(), DAY, 50)

    with pytest.raises(InvalidValue) as refused:
        await raise_limit(sessions, state, limit_value, seconds, reason)

    assert refused.value.field == field


async def test_a_shadow_limit_counts_refuses_no_request_and_counts_would_be_refusals(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    watching = await set_limit(sessions, payer, DAY, 40, enforced=False)
    first, second = admit(payer, slice_tokens=200), admit(payer)

    answers = [*await world.run(first), *await world.run(second)]
    (extended,) = await world.run(Extend(first.hold_id, 200, 0, 50))
    # For another reason: no trace remains.
    refused = await world.run(admit(payer, request_id=second.request_id))
    async with sessions() as session:
        (state,) = (await list_quotas(session))[0]

    assert [answer.leased_token_count for answer in answers] == [200, 20]  # type: ignore[union-attr]
    assert extended.leased_token_count == 250  # type: ignore[union-attr]
    assert not isinstance(refused[0], Admitted)
    assert (state.remaining, state.would_refuse_count) == (40 - 260 - 30, 1)
    check_invariants(world.url)
    enforced = await set_limit(sessions, payer, DAY, 40)
    assert not enforced.rule.enforced  # unset fields are kept
    await set_limit(sessions, payer, DAY, 40, enforced=True)
    assert isinstance((await world.run(admit(payer)))[0], QuotaExceeded)
    assert world.counters(watching.quota_id)[-1] == (210, 80)
    check_invariants(world.url)


async def test_cached_tokens_have_a_weight_of_own(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    state = await set_limit(sessions, payer, MINUTE, 200, weights=Weights(1000, 100, 4000))
    op, long = admit(payer, input_tokens=45), admit(payer, input_tokens=45, slice_tokens=10)

    (answer,) = await world.run(op)
    assert answer.leased_token_count == 20  # type: ignore[union-attr]
    assert world.counters(state.quota_id) == [(0, 45 + 80)]  # held as if nothing were cached
    await world.run(settle(op.hold_id, 5, input_tokens=45, cached_tokens=45))
    assert world.counters(state.quota_id) == [(5 + 20, 0)]  # 4.5 rounded up with the rest: 24.5
    await world.run(long)
    await world.run(Extend(long.hold_id, 10, 41, 1000))
    check_invariants(world.url)
    # 4 + 4.1 + 40 are posted: 49 of 175; the other 126 are 31 output tokens, with the half that was
    # rounded up.
    assert world.counters(state.quota_id) == [(25 + 49, 124)]


async def test_a_weighted_limit_admits_what_fits(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    await set_limit(sessions, payer, DAY, 100, weights=Weights(500, 250, 1500))

    (first,) = await world.run(admit(payer, slice_tokens=500))
    (second,) = await world.run(admit(payer, input_tokens=1))

    assert first.leased_token_count == 63  # type: ignore[union-attr]  # 5 + 94.5; one more would be 101
    assert isinstance(second, QuotaExceeded)
    assert second.requested == (2,)
    check_invariants(world.url)


@pytest.mark.parametrize(
    ("dimension", "weights", "field"),
    [
        (QuotaDimension.REQUESTS_PER_MINUTE, (1000, 1000, 2000), "input_weight_milli"),
        (QuotaDimension.COST_PICOS_PER_DAY, (1, 1, 1), "input_weight_milli"),
        (QuotaDimension.INPUT_TOKENS_PER_MINUTE, (1000, 100, 2000), "output_weight_milli"),
        (QuotaDimension.OUTPUT_TOKENS_PER_MINUTE, (1000, 100, 1000), "cached_input_weight_milli"),
        (QuotaDimension.TOKENS_PER_DAY, (-1, 1000, 1000), "input_weight_milli"),
        (QuotaDimension.TOKENS_PER_DAY, (1000, 1000, 1_000_001), "output_weight_milli"),
        (QuotaDimension.TOKENS_PER_DAY, (0, 0, 0), "output_weight_milli"),
    ],
)
async def test_weights_that_mean_nothing_are_refused_by_name(
    world: HoldWorld,
    sessions: Sessions,
    dimension: QuotaDimension,
    weights: tuple[int, int, int],
    field: str,
) -> None:
    payer = world.tenant()

    with pytest.raises(InvalidValue) as refused:
        await set_limit(sessions, payer, dimension, weights=Weights(*weights))

    assert refused.value.field == field


async def test_a_new_key_gets_the_limits_kept_for_it_the_projects_before_the_organizations(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()

    async def keep(
        subject: QuotaSubject, ref: uuid.UUID, dimension: QuotaDimension, limit_value: int
    ) -> QuotaState:
        async with sessions.begin() as session:
            return await set_quota(
                session,
                subject=subject,
                subject_ref=str(ref),
                key=QuotaKey(dimension, for_new_keys=True),
                terms=QuotaTerms(limit_value),
                actor="ann",
            )

    async def new_key(name: str) -> ApiKey:
        async with sessions.begin() as session:
            organization = await session.get_one(Organization, payer.organization_id)
            key, _ = await create_api_key(
                session, organization=organization.name, project="search", name=name, actor="bob"
            )
            return await session.get_one(ApiKey, key.id)

    await keep(QuotaSubject.ORGANIZATION, payer.organization_id, DAY, 70)
    await keep(
        QuotaSubject.ORGANIZATION, payer.organization_id, QuotaDimension.CONCURRENT_REQUESTS, 5
    )
    kept = await keep(QuotaSubject.PROJECT, payer.project_id, DAY, 30)
    key = await new_key("one")
    await keep(QuotaSubject.PROJECT, payer.project_id, DAY, 10)
    async with sessions.begin() as session:
        of_key = await quotas_for(
            session, subject_ids=(payer.organization_id, payer.project_id, key.id)
        )
        listed = (await list_quotas(session))[0]
        entries = [entry for entry in await list_audit_entries(session) if entry.actor == "bob"]
        await delete_quota(session, quota_id=str(kept.quota_id), actor="ann")
    later = await new_key("two")

    assert {(state.dimension, state.limit_value) for state in of_key} == {
        (DAY, 30),
        (QuotaDimension.CONCURRENT_REQUESTS, 5),
    }
    assert {state.subject for state in of_key} == {QuotaSubject.API_KEY}
    assert sorted(state.for_new_keys for state in listed) == [False, False, True, True, True]
    assert [entry.action for entry in reversed(entries)] == [
        "api_key.create",
        "quota.set",
        "quota.set",
    ]
    async with sessions() as session:
        of_later = await quotas_for(session, subject_ids=(later.id,))
    assert {(state.dimension, state.limit_value) for state in of_later} == {
        (DAY, 70),
        (QuotaDimension.CONCURRENT_REQUESTS, 5),
    }
    # Defaults for new keys limit no request themselves.
    assert isinstance(
        (await world.run(admit(payer, slice_tokens=500, least_tokens=500)))[0], Admitted
    )


async def test_limits_for_new_keys_are_not_raised(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    async with sessions.begin() as session:
        keep = partial(set_quota, session, terms=QuotaTerms(5), actor="ann")
        day = QuotaKey(DAY, for_new_keys=True)
        project = str(payer.project_id)
        with pytest.raises(InvalidValue, match="for_new_keys"):
            await keep(subject=QuotaSubject.API_KEY, subject_ref=str(payer.api_key_id), key=day)
        kept = await keep(subject=QuotaSubject.PROJECT, subject_ref=project, key=day)
        with pytest.raises(InvalidValue, match="quota_id"):
            await override_quota(
                session,
                quota_id=str(kept.quota_id),
                limit_value=9,
                until=NOON + timedelta(hours=1),
                reason="r",
                actor="ann",
            )
        with pytest.raises(NotFound):
            await override_quota(
                session,
                quota_id=str(uuid.uuid4()),
                limit_value=9,
                until=None,
                reason="",
                actor="ann",
            )
        # Besides it, one of the project.
        standing = await keep(subject=QuotaSubject.PROJECT, subject_ref=project, key=QuotaKey(DAY))
        assert standing.quota_id != kept.quota_id
        ids = (await session.scalars(select(ApiKey.id))).all()
    assert ids == [payer.api_key_id]
