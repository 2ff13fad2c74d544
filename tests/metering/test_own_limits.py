"""Limits that an organization sets itself, beside those of the operator: both apply."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from metering.configuration.configuration import present_state
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.holds.operations import Admitted
from metering.quotas.quota_admin import delete_quota, override_quota, set_quota
from metering.quotas.quota_rules import Payer, QuotaState
from metering.quotas.quota_states import list_quotas, quotas_for
from metering.quotas.quotas import QuotaExceeded
from metering.store.border import Actor, acting
from metering.store.db import Sessions, database_now
from metering.tenants.api_keys import create_api_key
from tests.metering.hold_world import HoldWorld, admit, of_type
from tests.metering.invariants import check_invariants

PER_DAY = QuotaDimension.REQUESTS_PER_DAY
ORGANIZATION, PROJECT = QuotaSubject.ORGANIZATION, QuotaSubject.PROJECT


def own(sessions: Sessions, payer: Payer) -> Sessions:
    """Return the sessions of an admin of the payer's organization."""
    return acting(sessions, Actor("admin", payer.organization_id, is_bound=True))


async def limit(
    sessions: Sessions, payer: Payer, value: int, *, by_organization: bool = False, **key: Any
) -> QuotaState:
    """Set a limit on the payer's organization, by the operator or by its admin."""
    used = own(sessions, payer) if by_organization else sessions
    async with used.begin() as session:
        return await set_quota(
            session,
            subject=ORGANIZATION,
            subject_ref=str(payer.organization_id),
            key=QuotaKey(PER_DAY, set_by_organization=by_organization, **key),
            terms=QuotaTerms(value),
            actor="test",
        )


async def test_both_limits_apply_and_each_has_its_own_counter(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    of_operator = await limit(sessions, payer, 5)
    of_own = await limit(sessions, payer, 2, by_organization=True)

    answers = await world.run(*(admit(payer) for _ in range(3)))

    assert len(of_type(Admitted, answers)) == 2
    [refusal] = of_type(QuotaExceeded, answers)
    assert [each.rule.id for each in refusal.failing] == [of_own.quota_id]
    async with sessions() as session:
        found = await quotas_for(session, subject_ids=[payer.organization_id])
    assert sorted((each.rule.set_by_organization, each.limit_value) for each in found) == [
        (False, 5),
        (True, 2),
    ]
    async with own(sessions, payer).begin() as session:
        await delete_quota(
            session, quota_id=str(of_own.quota_id), actor="test", by_organization=True
        )
    assert len(of_type(Admitted, await world.run(*(admit(payer) for _ in range(4))))) == 3
    assert world.counters(of_operator.quota_id) == [(5, 0)]
    check_invariants(world.url)


async def test_setting_again_changes_the_limit_of_the_same_author(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    of_operator, of_own = (
        await limit(sessions, payer, 5),
        await limit(sessions, payer, 2, by_organization=True),
    )

    changed = await limit(sessions, payer, 3, by_organization=True)
    lowered = await limit(sessions, payer, 1)

    assert (changed.quota_id, lowered.quota_id) == (of_own.quota_id, of_operator.quota_id)
    answers = await world.run(*(admit(payer) for _ in range(2)))
    assert len(of_type(Admitted, answers)) == 1, "the operator may set less than the organization"


async def test_a_limit_above_the_operators_is_refused_with_the_figure(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    await limit(sessions, payer, 5)
    of_own = await limit(sessions, payer, 4, by_organization=True)

    with pytest.raises(InvalidValue, match="must be at most 5, which is the operator's limit"):
        await limit(sessions, payer, 6, by_organization=True)
    async with own(sessions, payer).begin() as session:
        until = await database_now(session) + timedelta(hours=1)
        with pytest.raises(InvalidValue, match="must be at most 5"):
            await override_quota(
                session,
                quota_id=str(of_own.quota_id),
                limit_value=6,
                until=until,
                reason="more",
                actor="test",
                by_organization=True,
            )


async def test_an_organization_cannot_change_or_remove_the_operators_limit(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer, other = world.tenant(), world.tenant("bolt")
    of_operator = str((await limit(sessions, payer, 5)).quota_id)
    of_other = str((await limit(sessions, other, 5, by_organization=True)).quota_id)

    async with own(sessions, payer).begin() as session:
        until = await database_now(session) + timedelta(hours=1)
        for quota_id, error in ((of_operator, InvalidValue), (of_other, NotFound)):
            words = re.escape("set by the operator" if error is InvalidValue else of_other)
            with pytest.raises(error, match=words):
                await delete_quota(session, quota_id=quota_id, actor="test", by_organization=True)
            with pytest.raises(error, match=words):
                await override_quota(
                    session,
                    quota_id=quota_id,
                    limit_value=100,
                    until=until,
                    reason="more",
                    actor="test",
                    by_organization=True,
                )
    async with sessions() as session:
        assert [each.limit_value for each in (await list_quotas(session))[0]] == [5, 5]


@pytest.mark.parametrize("is_used_before", [False, True])
async def test_an_own_limit_of_an_end_user_does_not_lift_the_operators_selector(
    world: HoldWorld, sessions: Sessions, is_used_before: bool
) -> None:
    """A limit of its own wins over a selector of the same author only."""
    payer = world.tenant()
    await limit(sessions, payer, 2, for_each="end_user")
    if is_used_before:
        await world.run(admit(payer, end_user="alice"))
    before = int(is_used_before)

    await limit(
        sessions, payer, 1_000 if not is_used_before else 2, by_organization=True, end_user="alice"
    )
    answers = await world.run(*(admit(payer, end_user="alice") for _ in range(4)))

    assert len(of_type(Admitted, answers)) == 2 - before
    check_invariants(world.url)


async def test_selectors_of_both_give_a_limit_each(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    await limit(sessions, payer, 3, for_each="end_user")
    await limit(sessions, payer, 2, for_each="end_user", by_organization=True)

    answers = await world.run(*(admit(payer, end_user="alice") for _ in range(3)))

    assert len(of_type(Admitted, answers)) == 2
    given = world.rows(
        "SELECT set_by_organization, limit_value FROM quotas WHERE selector_id IS NOT NULL"
        " ORDER BY 1"
    )
    assert given == [(False, 3), (True, 2)]
    check_invariants(world.url)


async def test_a_new_key_gets_the_defaults_of_both(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    await limit(sessions, payer, 3, for_new_keys=True)
    await limit(sessions, payer, 2, for_new_keys=True, by_organization=True)

    developer = Actor(
        "developer", payer.organization_id, is_bound=True, project_id=payer.project_id
    )
    async with acting(sessions, developer).begin() as session:
        key, _ = await create_api_key(
            session, organization="acme", project="search", name="new", actor="test"
        )

    async with sessions() as session:
        found = await quotas_for(session, subject_ids=[key.id])
    assert sorted((each.rule.set_by_organization, each.limit_value) for each in found) == [
        (False, 3),
        (True, 2),
    ]


async def test_keys_of_a_group_get_the_limits_of_both(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    world.execute('UPDATE api_keys SET "group" = %s WHERE id = %s', "free", payer.api_key_id)
    await limit(sessions, payer, 3, for_each="key:free")
    await limit(sessions, payer, 2, for_each="key:free", by_organization=True)

    answers = await world.run(*(admit(payer) for _ in range(3)))

    assert len(of_type(Admitted, answers)) == 2
    check_invariants(world.url)


async def test_a_configuration_has_the_operators_limits_only(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    await limit(sessions, payer, 5)
    await limit(sessions, payer, 2, by_organization=True)

    async with sessions() as session:
        exported = await present_state(session)

    [(key, terms)] = exported.organizations[0].quotas
    assert (key.set_by_organization, terms.limit_value) == (False, 5)
