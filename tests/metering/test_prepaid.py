"""Prepaid organizations: admissions and streams never exceed the credit, and none within it is
refused.

Prices are 3 picos per input token, 1 cached, 7 output.
"""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metering.core.errors import InvalidValue
from metering.core.models import QuotaDimension
from metering.holds.operations import Admitted, Extend, Extended, Settled, Void
from metering.holds.recovery import sweep_expired_holds
from metering.invoicing.closing import close_month
from metering.ledger.rating import rate_all_pending
from metering.plans.plan_admin import assign_plan, create_plan
from metering.plans.plans import Allowance, PlanRules, Selector
from metering.plans.prepaid import (
    Grant,
    Owed,
    credit_balance,
    grant_credit,
    left_for,
    list_grants,
    refresh,
    refresh_for_the_month,
    set_prepaid,
)
from metering.quotas.quota_admin import delete_quota, override_quota
from metering.quotas.quota_rules import Payer
from metering.quotas.quota_states import quotas_for
from metering.quotas.quotas import InsufficientCredit, QuotaExceeded
from metering.store.db import Sessions
from tests.metering.closing_world import ISSUER
from tests.metering.hold_world import NOON, HoldWorld, admit, of_type, settle
from tests.metering.invariants import check_invariants
from tests.metering.usage import grant, new_limit
from tests.metering.workers import wait_until

NOVEMBER, DECEMBER, JANUARY = date(2026, 11, 1), date(2026, 12, 1), date(2027, 1, 1)
EACH = 10 * 3 + 20 * 7  # price of the request that `admit` makes


async def prepaid(
    sessions: Sessions, world: HoldWorld, amount: int, *, last_month: date = DECEMBER
) -> Payer:
    """Create a prepaid organization with credit."""
    payer = world.tenant()
    async with sessions.begin() as session:
        await set_prepaid(session, organization="acme", prepaid=True, actor="test")
        if amount:
            await grant(session, amount, last_month=last_month)
    return payer


async def available(sessions: Sessions) -> int:
    async with sessions() as session:
        return (await credit_balance(session, organization="acme")).available_picos


async def remaining(sessions: Sessions, payer: Payer) -> int:
    async with sessions() as session:
        states = await quotas_for(session, subject_ids=payer.subject_ids)
    [credit] = [each for each in states if each.dimension is QuotaDimension.PREPAID_CREDIT_PICOS]
    return credit.remaining


async def test_credit_for_fifty_admits_fifty_of_two_hundred_over_twenty_connections(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = await prepaid(sessions, world, 50 * EACH + EACH - 1)

    batches = [[admit(payer, least_tokens=20) for _ in range(10)] for _ in range(20)]
    answers = await asyncio.gather(*(world.run(*batch) for batch in batches))

    admitted = of_type(Admitted, [answer for each in answers for answer in each])
    refused = of_type(InsufficientCredit, [answer for each in answers for answer in each])
    assert (len(admitted), len(refused)) == (50, 150)
    assert not any(each.retry_helps for each in refused)
    assert await available(sessions) == await remaining(sessions, payer) == EACH - 1
    await world.run(*(settle(each.hold_id, 20) for each in admitted))
    assert isinstance((await world.run(admit(payer, least_tokens=20)))[0], InsufficientCredit)
    check_invariants(world.url)


async def test_a_stream_ends_with_the_credit_and_continues_after_a_grant(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = await prepaid(sessions, world, EACH + 5 * 7)
    [admitted] = await world.run(admit(payer))
    assert isinstance(admitted, Admitted)

    extend = Extend(admitted.hold_id, 20, 0, 20)
    [first] = await world.run(extend)
    [refused] = await world.run(Extend(admitted.hold_id, 25, 0, 20))
    async with sessions.begin() as session:
        await grant(session, 2 * 7, last_month=DECEMBER)
    [second] = await world.run(Extend(admitted.hold_id, 25, 0, 20))
    [settled] = await world.run(settle(admitted.hold_id, 26))

    assert first == Extended(25)
    assert isinstance(refused, InsufficientCredit)
    # A streaming request ends with QUOTA_EXHAUSTED, as for any quota.
    assert isinstance(refused, QuotaExceeded)
    assert second == Extended(27)
    assert isinstance(settled, Settled)
    assert await available(sessions) == 7
    check_invariants(world.url)


async def test_no_request_is_admitted_without_credit_and_the_error_has_the_missing_amount(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = await prepaid(sessions, world, 0)
    world.quota(payer, QuotaDimension.REQUESTS_PER_MINUTE, 0)

    [refused] = await world.run(admit(payer))

    assert isinstance(refused, InsufficientCredit)
    assert [each.dimension for each in refused.failing] == [
        QuotaDimension.PREPAID_CREDIT_PICOS,
        QuotaDimension.REQUESTS_PER_MINUTE,
    ]
    assert "0.00 USD of prepaid credit left" in str(refused)
    assert "this request needs at least 0.000000000037 USD." in str(refused)
    assert "Add credit" in str(refused)
    assert world.rows("SELECT used, held FROM quota_counters") == []


async def test_earlier_and_running_requests_count_from_the_change_to_prepaid(
    world: HoldWorld, sessions: Sessions
) -> None:
    """Earlier usage is paid first; running requests hold credit at once."""
    payer = world.tenant()
    [done, runs] = of_type(Admitted, await world.run(admit(payer), admit(payer)))
    await world.run(settle(done.hold_id, 20))
    async with sessions.begin() as session:
        await grant_credit(
            session,
            organization="acme",
            amount_picos=3 * EACH,
            last_month=DECEMBER,
            reason="paid",
            actor="test",
        )
        await set_prepaid(session, organization="acme", prepaid=True, actor="test")
        _, again = await set_prepaid(session, organization="acme", prepaid=True, actor="test")

    answers = await world.run(admit(payer, least_tokens=20), admit(payer, least_tokens=20))

    assert again
    assert [type(each) for each in answers] == [Admitted, InsufficientCredit]
    await rate_all_pending(sessions)
    assert await available(sessions) == await remaining(sessions, payer) == 0
    await world.run(settle(runs.hold_id, 1))
    assert await available(sessions) == await remaining(sessions, payer) == 19 * 7
    check_invariants(world.url)
    async with sessions.begin() as session:
        await set_prepaid(session, organization="acme", prepaid=False, actor="test")
    assert of_type(Admitted, await world.run(*(admit(payer) for _ in range(5))))
    check_invariants(world.url)


async def test_credit_ends_with_its_month_by_the_clock_and_later_credit_remains(
    world: HoldWorld, sessions: Sessions
) -> None:
    """Also before a worker has run; requests across the border are paid by the new month."""
    payer = await prepaid(sessions, world, 3 * EACH, last_month=NOVEMBER)
    async with sessions.begin() as session:
        await grant(session, EACH, last_month=DECEMBER)
        await grant(session, EACH, first_month=DECEMBER, last_month=JANUARY)
    assert await remaining(sessions, payer) == 4 * EACH
    [done, runs] = of_type(Admitted, await world.run(admit(payer), admit(payer)))
    await world.run(settle(done.hold_id, 20))

    world.set_time(datetime(2026, 12, 1, tzinfo=UTC) + timedelta(microseconds=1))
    unlooked = await remaining(sessions, payer)
    refreshed = await refresh_for_the_month(sessions)

    # Lasting credit, less the used and held amounts; never more than is available.
    assert unlooked == EACH - EACH - EACH
    assert refreshed == 1
    assert await refresh_for_the_month(sessions) == 0
    # November owes one request, paid by its own credit; the rest of that credit expires, and the
    # running request holds December's.
    assert await available(sessions) == await remaining(sessions, payer) == 2 * EACH - EACH
    await world.run(settle(runs.hold_id, 20))
    await rate_all_pending(sessions)
    async with sessions.begin() as session:
        await refresh(session, payer.organization_id, actor="test")
    assert await available(sessions) == await remaining(sessions, payer) == EACH
    check_invariants(world.url)


async def test_a_close_changes_nothing_of_what_is_available(
    world: HoldWorld, sessions: Sessions
) -> None:
    """The open month's preview equals its close; expiring credit is gone before and after."""
    payer = await prepaid(sessions, world, 3 * EACH + 5, last_month=NOVEMBER)
    async with sessions.begin() as session:
        await grant(session, 2 * EACH, last_month=DECEMBER)
    for each in of_type(Admitted, await world.run(*(admit(payer) for _ in range(4)))):
        await world.run(settle(each.hold_id, 20))
    world.set_time(datetime(2026, 12, 3, tzinfo=UTC))
    await refresh_for_the_month(sessions)
    before = await available(sessions), await remaining(sessions, payer)

    await close_month(sessions, organization="acme", month="2026-11", actor="test", issuer=ISSUER)

    assert (
        before
        == (await available(sessions), await remaining(sessions, payer))
        == (EACH + 5, EACH + 5)
    )
    async with sessions() as session:
        found = (await list_grants(session, organization="acme"))[0]
    assert [(each.spent_picos, each.expired_picos, each.remaining_picos) for each in found] == [
        (3 * EACH + 5, 0, 0),
        (EACH - 5, 0, EACH + 5),
    ]
    assert of_type(
        Admitted, await world.run(admit(payer, least_tokens=20), admit(payer, least_tokens=20))
    )
    check_invariants(world.url)


async def test_a_lost_request_takes_credit_only_for_what_is_billed(
    world: HoldWorld, sessions: Sessions
) -> None:
    """Its lease is unspent credit. The owner's late report is billed, even beyond the credit."""
    payer = await prepaid(sessions, world, EACH)
    [lost] = of_type(Admitted, await world.run(admit(payer)))
    world.advance(61)

    await sweep_expired_holds(world.url)
    assert await remaining(sessions, payer) == EACH
    [admitted] = of_type(Admitted, await world.run(admit(payer)))
    await world.run(settle(admitted.hold_id, 20))
    await world.run(settle(lost.hold_id, 10, recovered=True))

    assert await remaining(sessions, payer) == -(10 * 3 + 10 * 7)
    check_invariants(world.url)
    await rate_all_pending(sessions)
    check_invariants(world.url)


async def test_a_voided_request_returns_all(world: HoldWorld, sessions: Sessions) -> None:
    payer = await prepaid(sessions, world, EACH)
    [admitted] = of_type(Admitted, await world.run(admit(payer)))

    await world.run(Void(admitted.hold_id))

    assert await remaining(sessions, payer) == EACH


async def test_a_request_that_is_voided_after_an_extension_leaves_the_credit_as_it_was(
    world: HoldWorld, sessions: Sessions
) -> None:
    """Its client was told that nothing is billed, so no part may bill it."""
    payer = await prepaid(sessions, world, 2 * EACH)
    for _ in range(4):
        [admitted] = of_type(Admitted, await world.run(admit(payer)))
        await world.run(Extend(admitted.hold_id, 0, 0, 10))
        await world.run(Void(admitted.hold_id))

    await rate_all_pending(sessions)

    assert await remaining(sessions, payer) == 2 * EACH
    assert world.counters(world.one("SELECT quota_id FROM prepaid_organizations")) == [(0, 0)]
    assert world.one("SELECT count(*) FROM usage_events") == 0
    assert world.one("SELECT count(*) FROM ledger_transactions WHERE kind = 'usage'") == 0
    check_invariants(world.url)


async def test_credit_beyond_what_a_limit_can_say_is_refused_and_not_left_unused(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = await prepaid(sessions, world, 0)
    async with sessions.begin() as session:
        for _ in range(9):
            await grant(session, 10**18, last_month=DECEMBER)

    for first_month in (None, DECEMBER):
        with pytest.raises(
            InvalidValue, match=r"must be at most 223,372\.036854775807 USD, got 1,000,000"
        ) as refusal:
            async with sessions.begin() as session:
                await grant(session, 10**18, first_month=first_month, last_month=DECEMBER)
        assert refusal.value.field == "amount_picos"

    assert await available(sessions) == await remaining(sessions, payer) == 9 * 10**18


async def test_plans_and_limits_by_hand_are_refused_with_the_remedy(
    world: HoldWorld, sessions: Sessions
) -> None:
    await prepaid(sessions, world, EACH)
    quota_id = str(world.one("SELECT id FROM quotas"))
    async with sessions.begin() as session:
        await create_plan(
            session, name="some", rules=PlanRules((Allowance(Selector(), 5),)), actor="test"
        )
        await create_plan(session, name="nothing", rules=PlanRules(), actor="test")
        with pytest.raises(InvalidValue, match="acme is prepaid only"):
            await assign_plan(session, organization="acme", plan="some", actor="test")
        await assign_plan(session, organization="acme", plan="nothing", actor="test")
        with pytest.raises(InvalidValue, match="grant credit"):
            await delete_quota(session, quota_id=quota_id, actor="test")
        with pytest.raises(InvalidValue, match="grant credit"):
            await override_quota(
                session, quota_id=quota_id, limit_value=9, until=NOON, reason="no", actor="test"
            )
        with pytest.raises(InvalidValue, match="grant credit"):
            await new_limit(session, "acme", QuotaDimension.PREPAID_CREDIT_PICOS, 5)
        await set_prepaid(session, organization="acme", prepaid=False, actor="test")
        await assign_plan(
            session, organization="acme", plan="some", first_month=DECEMBER, actor="test"
        )
        with pytest.raises(InvalidValue, match="has the plan some"):
            await set_prepaid(session, organization="acme", prepaid=True, actor="test")


months = st.sampled_from([date(2026, month, 1) for month in range(9, 13)])


@st.composite
def grants(draw: st.DrawFn) -> list[Grant]:
    """Draw credit grants, each for some months."""
    found = []
    for index in range(draw(st.integers(0, 4))):
        first, last = sorted([draw(months), draw(months)])
        amount = draw(st.integers(1, 100))
        found.append(
            Grant(uuid.UUID(int=index), uuid.UUID(int=99), "USD", amount, first, last, "", "", NOON)
        )
    return found


@given(grants(), st.dictionaries(months, st.integers(0, 150)))
def test_open_months_leave_what_closes_leave(found: list[Grant], due: dict[date, int]) -> None:
    """Closes one after the other, as the ledger sees them; the available credit never grows."""
    now = date(2026, 12, 1)
    left = {each.id: each.amount_picos for each in found}
    for month in sorted(due):
        if month < now:
            rest = due[month]
            for each in sorted(found, key=lambda grant: (grant.last_month, grant.id)):
                if each.first_month <= month <= each.last_month:
                    taken = min(rest, left[each.id])
                    left[each.id] -= taken
                    rest -= taken

    worked_out = left_for(
        now, found, [Owed(month, picos, 0, 0) for month, picos in due.items() if month < now]
    )

    assert {grant.id: picos for grant, picos in worked_out} == {
        each.id: left[each.id] for each in found if each.last_month >= now
    }


async def test_assigning_a_plan_and_switching_to_prepaid_are_serialized(
    world: HoldWorld, sessions: Sessions
) -> None:
    world.tenant()
    async with sessions.begin() as session:
        await create_plan(
            session,
            name="free",
            rules=PlanRules(allowances=(Allowance(Selector(), 5),)),
            actor="test",
        )
    async with sessions() as first, sessions() as second:
        await assign_plan(first, organization="acme", plan="free", actor="test")
        pays = asyncio.create_task(
            set_prepaid(second, organization="acme", prepaid=True, actor="test")
        )
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND"
            " wait_event_type = 'Lock'"
        )
        await asyncio.to_thread(
            wait_until, lambda: world.one(waiting) == 1, "the second of them to wait"
        )
        await first.commit()
        with pytest.raises(InvalidValue, match="has the plan free"):
            await pays
