"""Limits on each key of a group: selectors, a key's own limits, and changes of the group."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest

from metering.alerts.alerts import fire_due_alerts
from metering.core.errors import InvalidValue
from metering.core.models import QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admit, Admitted
from metering.ledger.rating import rate_all_pending
from metering.proof.check import Moment
from metering.quotas.quota_admin import SETTABLE, delete_quota, override_quota, set_quota
from metering.quotas.quota_recount import Uncounted, recount
from metering.quotas.quota_rules import Payer, QuotaState
from metering.quotas.quota_states import list_quotas, quotas_for
from metering.quotas.quotas import QuotaExceeded
from metering.store.db import Sessions
from metering.tenants.api_keys import create_api_key, update_api_key
from metering.tenants.key_terms import KeyTerms
from tests.metering.hold_world import HoldWorld, admit, minutes_of, of_type, settle
from tests.metering.invariants import check_invariants
from tests.metering.planted_faults import faults, unseen

CONCURRENT = QuotaDimension.CONCURRENT_REQUESTS
PER_DAY = QuotaDimension.REQUESTS_PER_DAY
TOKENS_PER_DAY = QuotaDimension.TOKENS_PER_DAY


async def limit(
    sessions: Sessions,
    subject: QuotaSubject,
    subject_id: uuid.UUID,
    dimension: QuotaDimension,
    value: int,
    for_each: str = "",
    minutes: int | None = None,
    **terms: Any,
) -> QuotaState:
    """Set a limit, or a selector."""
    async with sessions.begin() as session:
        return await set_quota(
            session,
            subject=subject,
            subject_ref=str(subject_id),
            key=QuotaKey(
                dimension,
                for_each=for_each,
                window_minutes=minutes_of(dimension) if minutes is None else minutes,
            ),
            terms=QuotaTerms(value, **terms),
            actor="test",
        )


async def of_group(
    sessions: Sessions, payer: Payer, dimension: QuotaDimension, value: int, group: str = "free"
) -> QuotaState:
    """Set a limit on each key of a group of the payer's organization."""
    subject = QuotaSubject.ORGANIZATION, payer.organization_id
    return await limit(sessions, *subject, dimension, value, f"key:{group}")


async def join(sessions: Sessions, payer: Payer, group: str) -> None:
    """Put the payer's key into a group; an empty one is none."""
    async with sessions.begin() as session:
        uncounted: list[Uncounted] = []
        await update_api_key(
            session,
            api_key=str(payer.api_key_id),
            terms=lambda terms: replace(terms, group=group),
            actor="test",
            uncounted=uncounted,
        )
        await recount(session, uncounted)


async def limits(sessions: Sessions, payer: Payer) -> list[tuple[str, int, int, int]]:
    """Return group, limit, used and held of the limits of the payer's key."""
    async with sessions() as session:
        found = await quotas_for(session, subject_ids=[payer.api_key_id])
    return sorted((each.rule.group, each.limit_value, each.used, each.held) for each in found)


async def admitted_count(holds: HoldConnection, *operations: Admit) -> int:
    return len(of_type(Admitted, await holds.execute(operations)))


def three_keys(world: HoldWorld) -> list[Payer]:
    first = world.tenant()
    return [first, *(replace(first, api_key_id=world.key(first.project_id)) for _ in "12")]


async def test_each_key_of_a_group_has_a_counter_of_its_own(
    world: HoldWorld, sessions: Sessions
) -> None:
    one, two, other = three_keys(world)
    await join(sessions, one, "free")
    selector = await of_group(sessions, one, PER_DAY, 2)
    await join(sessions, two, "free")

    answers = await world.run(*(admit(each) for each in (one, two, other) for _ in range(3)))

    refused = of_type(QuotaExceeded, answers)
    assert len(of_type(Admitted, answers)) == 7
    assert [each.failing[0].rule.selector_id for each in refused] == [selector.quota_id] * 2
    assert str(refused[0]).startswith(
        "This API key of group free may make 2 requests per day and has made 2."
    )
    assert [await limits(sessions, each) for each in (one, two, other)] == [
        [("free", 2, 2, 0)],
        [("free", 2, 2, 0)],
        [],
    ]
    async with sessions() as session:
        assert [each.rule.for_each for each in (await list_quotas(session))[0]] == ["key:free"]
    check_invariants(world.url)


async def test_a_change_or_removal_of_the_selector_concerns_all_keys_at_once(
    world: HoldWorld, sessions: Sessions
) -> None:
    one, two, _ = three_keys(world)
    for each in (one, two):
        await join(sessions, each, "free")
    selector = await of_group(sessions, one, CONCURRENT, 1)
    async with HoldConnection(world.url, uuid.uuid4()) as holds:
        for each in (one, two):
            assert await admitted_count(holds, admit(each), admit(each)) == 1
        await of_group(sessions, one, CONCURRENT, 2)
        for each in (one, two):
            assert await admitted_count(holds, admit(each), admit(each)) == 1
        async with sessions.begin() as session:
            until = world.now.replace(hour=23)
            await override_quota(
                session,
                quota_id=str(selector.quota_id),
                limit_value=3,
                until=until,
                reason="launch",
                actor="test",
            )
        assert await admitted_count(holds, admit(one), admit(one)) == 1
        async with sessions.begin() as session:
            await delete_quota(session, quota_id=str(selector.quota_id), actor="test")
        assert await admitted_count(holds, admit(one), admit(one)) == 2
    assert await limits(sessions, one) == []
    check_invariants(world.url)


async def test_a_keys_own_limit_wins_and_gives_back_with_the_use(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer, *_ = three_keys(world)
    await join(sessions, payer, "free")
    await of_group(sessions, payer, TOKENS_PER_DAY, 100)
    await limit(sessions, QuotaSubject.PROJECT, payer.project_id, TOKENS_PER_DAY, 1000, "key:free")
    async with HoldConnection(world.url, uuid.uuid4()) as holds:
        assert await admitted_count(holds, *(admit(payer) for _ in range(4))) == 3

        own = await limit(sessions, QuotaSubject.API_KEY, payer.api_key_id, TOKENS_PER_DAY, 150)
        assert await limits(sessions, payer) == [("", 150, 0, 90)]
        assert await admitted_count(holds, *(admit(payer) for _ in range(9))) == 2
        async with sessions.begin() as session:
            await delete_quota(session, quota_id=str(own.quota_id), actor="test")

        assert await limits(sessions, payer) == [("free", 100, 0, 150), ("free", 1000, 0, 150)]
        assert await admitted_count(holds, admit(payer)) == 0
        [given, _] = world.rows(
            "SELECT id FROM quotas WHERE selector_id IS NOT NULL"
            " AND deleted_at IS NULL ORDER BY limit_value"
        )
        with pytest.raises(InvalidValue, match="selector"):
            async with sessions.begin() as session:
                await delete_quota(session, quota_id=str(given[0]), actor="test")
    check_invariants(world.url, over=[given[0]])


async def test_a_group_can_limit_whatever_a_key_can(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    await join(sessions, payer, "free")
    selectors = [await of_group(sessions, payer, each, 10_000) for each in SETTABLE]

    async with sessions() as session:
        given = await quotas_for(session, subject_ids=[payer.api_key_id])
    identity = attrgetter("dimension", "window_minutes", "model", "weights")
    assert {identity(each.rule) for each in given} == {identity(each.rule) for each in selectors}
    assert len(given) == len(SETTABLE)


async def test_limits_of_a_group_on_windows_of_two_lengths_stand_beside_each_other(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer, dimension = world.tenant(), QuotaDimension.REQUESTS_PER_WINDOW
    await join(sessions, payer, "free")
    group = QuotaSubject.ORGANIZATION, payer.organization_id, dimension
    await limit(sessions, *group, 2, "key:free", minutes=5)
    await limit(sessions, *group, 8, "key:free", minutes=300)

    async with HoldConnection(world.url, uuid.uuid4()) as holds:
        assert await admitted_count(holds, *(admit(payer) for _ in range(4))) == 2
        own = QuotaSubject.API_KEY, payer.api_key_id, dimension
        await limit(sessions, *own, 6, minutes=5)
        assert await limits(sessions, payer) == [("", 6, 2, 0), ("free", 8, 2, 0)]
        assert await admitted_count(holds, *(admit(payer) for _ in range(5))) == 4
    check_invariants(world.url)


async def test_a_key_that_changes_its_group_keeps_what_it_used(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer, *_ = three_keys(world)
    await of_group(sessions, payer, TOKENS_PER_DAY, 100, "free")
    await of_group(sessions, payer, TOKENS_PER_DAY, 200, "paid")
    async with HoldConnection(world.url, uuid.uuid4()) as holds:
        first = [admit(payer) for _ in range(3)]
        await holds.execute(first)
        await holds.execute([settle(first[0].hold_id, 20)])

        await join(sessions, payer, "free")
        assert await limits(sessions, payer) == [("free", 100, 30, 60)]
        assert await admitted_count(holds, admit(payer)) == 0
        check_invariants(world.url)
        await join(sessions, payer, "paid")
        assert await limits(sessions, payer) == [("paid", 200, 30, 60)]
        assert await admitted_count(holds, admit(payer), admit(payer)) == 2
        await join(sessions, payer, "free")
        assert await limits(sessions, payer) == [("free", 100, 30, 120)]
        await holds.execute([settle(each.hold_id, 0) for each in first[1:]])
        await join(sessions, payer, "")
        assert await limits(sessions, payer) == []
    check_invariants(world.url)


async def test_a_new_key_has_the_limits_of_its_group_from_its_first_request_on(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    await of_group(sessions, payer, PER_DAY, 1, "né, 'free'")
    async with sessions.begin() as session:
        key, _ = await create_api_key(
            session,
            organization=str(payer.organization_id),
            project=str(payer.project_id),
            name="new",
            terms=KeyTerms(group="né, 'free'"),
            actor="test",
        )

    member = replace(payer, api_key_id=key.id)
    answers = await world.run(admit(member), admit(member))

    assert len(of_type(Admitted, answers)) == 1
    assert await limits(sessions, member) == [("né, 'free'", 1, 1, 0)]
    check_invariants(world.url)


@pytest.mark.parametrize("group", ["x" * 101, " free", "free ", "a\nb", "a\0b"])
async def test_bad_names_of_groups_are_refused(
    world: HoldWorld, sessions: Sessions, group: str
) -> None:
    payer = world.tenant()

    with pytest.raises(InvalidValue) as of_key:
        await join(sessions, payer, group)
    with pytest.raises(InvalidValue) as of_selector:
        await of_group(sessions, payer, PER_DAY, 1, group)

    assert (of_key.value.field, of_selector.value.field) == ("group", "for_each")


async def test_a_selector_and_a_key_that_joins_at_the_same_time_give_one_limit(
    world: HoldWorld, sessions: Sessions
) -> None:
    payers = three_keys(world)

    await asyncio.gather(
        *(join(sessions, each, "free") for each in payers),
        of_group(sessions, payers[0], PER_DAY, 5),
        of_group(sessions, payers[0], CONCURRENT, 5),
        *(
            limit(sessions, QuotaSubject.API_KEY, each.api_key_id, PER_DAY, 7)
            for each in payers[:2]
        ),
    )

    of_keys = [sorted(await limits(sessions, each)) for each in payers]
    assert of_keys == [[("", 7, 0, 0), ("free", 5, 0, 0)]] * 2 + [[("free", 5, 0, 0)] * 2]
    check_invariants(world.url)


async def test_a_key_of_a_group_alerts_by_the_terms_of_the_selector(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer, other, _ = three_keys(world)
    for each in (payer, other):
        await join(sessions, each, "free")
    organization = QuotaSubject.ORGANIZATION, payer.organization_id

    async def fired() -> list[tuple[object, ...]]:
        await rate_all_pending(sessions)
        await fire_due_alerts(sessions)
        return world.rows(
            "SELECT q.subject_id, a.threshold, a.limit_value FROM alerts a"
            " JOIN quotas q ON q.id = a.quota_id ORDER BY a.id"
        )

    await limit(sessions, *organization, TOKENS_PER_DAY, 100, "key:free", alert_at=(80,))
    for each, token_count in ((payer, 85), (other, 60)):
        begun = admit(each, input_tokens=token_count, slice_tokens=0, least_tokens=0)
        await world.run(begun)
        await world.run(settle(begun.hold_id, 0, input_tokens=token_count))

    assert await fired() == [(payer.api_key_id, 80, 100)]
    assert len(await fired()) == 1
    await limit(sessions, *organization, TOKENS_PER_DAY, 70, "key:free", alert_at=(80,))
    assert sorted(await fired(), key=str) == sorted(
        [
            (payer.api_key_id, 80, 100),
            (payer.api_key_id, 80, 70),
            (other.api_key_id, 80, 70),
        ],
        key=str,
    )


FAULTS = faults("""
    is in the group without its limit          | UPDATE quotas SET deleted_at = now()
                                               | WHERE selector_id IS NOT NULL
    has its limit without being in the group   | UPDATE api_keys SET "group" = 'other'
    has a limit of 7, and the selector 5       | UPDATE quotas SET limit_value = 7
                                               | WHERE selector_id IS NOT NULL
""")


async def test_a_check_reports_a_key_without_the_limits_of_its_group(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    await join(sessions, payer, "free")
    await of_group(sessions, payer, PER_DAY, 5)

    assert unseen(world.url, FAULTS, Moment.ALWAYS) == []
    check_invariants(world.url)
