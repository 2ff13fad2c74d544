"""Closing for good: all at once, credit in the final month, and nothing new afterwards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from metering.alerts.webhooks import set_webhook
from metering.closures import (
    close_organization,
    close_project,
    closures_of,
    effects_on_organization,
)
from metering.core.errors import InvalidValue, KeyInvalid, OrganizationClosed, ProjectClosed
from metering.invoicing.month_report import to_json
from metering.invoicing.rentals import RentalTerms, rent_replicas
from metering.ledger.ledger import AccountKind, month_after, month_of, month_text
from metering.plans.plan_admin import assign_plan, has_plan_from
from metering.plans.plans import PlanRules
from metering.plans.prepaid import RemainingCredit, grant_credit, grants_of
from metering.proof.check import Moment
from metering.store.db import Sessions, create_engine, create_sessions
from metering.tenants.api_keys import create_api_key, list_api_keys
from metering.tenants.authentication import authenticate
from metering.tenants.key_terms import KeyTerms
from metering.tenants.suspensions import (
    resume_organization,
    suspend_organization,
    suspensions_of_organizations,
    suspensions_of_projects,
)
from metering.tenants.tenants import create_project, find_organization, find_project
from tests.conftest import as_application
from tests.metering.closing_world import ClosingWorld
from tests.metering.invariants import check_invariants
from tests.metering.planted_faults import faults, unseen
from tests.metering.queries import execute
from tests.metering.test_closing_faults import Planted, fault_at
from tests.metering.test_rentals import BEGINNING, CENT, HOUR, rent, resale_price
from tests.metering.usage import Consumed, Customer, balances, grant

WHY = "acme ended its contract"
UNIT = 10**12
STATEMENTS_MAX = 200
# Closings happen at the database's time, so the final month is the present one.
NOW = datetime.now(UTC)
THIS_MONTH = month_of(NOW.date())
MONTH, NEXT_MONTH = month_text(THIS_MONTH), month_text(month_after(THIS_MONTH))
EARLIER = Consumed(1000, output_token_count=9, settled_at=NOW - timedelta(days=NOW.day))
USED = Consumed(1_000_000, settled_at=NOW)
REFUSED = [
    ({"confirmed_name": "acm"}, "confirm_name: must be acme"),
    ({"confirmed_name": ""}, "confirm_name: must be acme"),
    ({"reason": " "}, "reason: must have"),
]
FAULTS = faults("""
    API key                | UPDATE api_keys SET revoked_at = NULL
    closed-owners          | UPDATE replica_rentals SET ends_at = NULL
    triggers-are-enabled   | DROP TRIGGER suspensions_closed_for_good ON suspensions
""")


@pytest.fixture
async def world(sessions: Sessions, customer: Customer) -> ClosingWorld:
    """Customer `acme` without operators, whose months are closed in the middle of the next one."""
    world = ClosingWorld(sessions, customer)
    await execute(sessions, "UPDATE api_keys SET scopes = '{inference}'")
    later = month_after(month_after(THIS_MONTH))
    world.clock.now = datetime(later.year, later.month, 15, tzinfo=UTC)
    return world


async def close(
    world: ClosingWorld,
    credit: RemainingCredit | None = None,
    *,
    sessions: Sessions | None = None,
    **given: Any,
) -> None:
    fields = {"organization": "acme", "confirmed_name": "acme", "reason": WHY, "actor": "ann"}
    async with (sessions or world.sessions).begin() as session:
        await close_organization(session, **fields | {"remaining_credit": credit} | given)


async def new_key(world: ClosingWorld, project: str = "search", **terms: Any) -> str:
    async with world.sessions.begin() as session:
        _, secret = await create_api_key(
            session,
            organization="acme",
            project=project,
            name="k",
            terms=KeyTerms(**terms),
            actor="ann",
        )
    return secret


async def refusal(sessions: Sessions, secret: str) -> type[Exception]:
    async with sessions() as session:
        with pytest.raises(KeyInvalid) as refused:
            await authenticate(session, secret)
    return refused.type


@pytest.mark.parametrize("choice", RemainingCredit)
async def test_the_close_of_the_final_month_posts_the_rest_of_the_credit(
    world: ClosingWorld, database_url: str, choice: RemainingCredit
) -> None:
    """After late usage took its part of it, once, as chosen; earlier documents stay as they are."""
    price = await world.price(BEGINNING)
    before = month_of(EARLIER.settled_at.date())
    await world.use(price, EARLIER)
    later = month_after(month_after(THIS_MONTH))
    await world.grant(3 * UNIT, month_of(before), later, "paid")
    async with world.sessions.begin() as session:
        await grant(session, 4 * UNIT, first_month=later, last_month=later)
    earlier = to_json((await world.close(month_text(before))).report)
    await world.use(price, USED)
    await close(world, choice)
    await world.use(price, USED)  # settled after it

    report = (await world.close(MONTH)).report

    rest = 7 * UNIT - EARLIER.cost(price) - 2 * USED.cost(price)
    async with world.sessions() as session:
        left = sum(each.remaining_picos for each in await grants_of(session, None))
        accounts = await balances(session, world.customer.organization_id)
    by_kind = {each.kind: picos for each, picos in accounts.items()}
    assert left == -by_kind[AccountKind.PREPAID_CREDIT]
    credit = report.credit
    ended = (credit.refunded_picos, credit.expired_picos, credit.remaining_picos)
    assert (left, ended) == {
        RemainingCredit.REFUND: (0, (rest, 0, 0)),
        RemainingCredit.EXPIRE: (0, (0, rest, 0)),
        RemainingCredit.KEEP: (rest, (0, 0, rest)),
    }[choice]
    returned = rest if choice is RemainingCredit.REFUND else 0
    assert by_kind[AccountKind.CREDIT_FUNDING] == 7 * UNIT - returned
    assert ("refunded" in to_json(report)) == bool(returned)
    for month, document in ((month_text(before), earlier), (MONTH, to_json(report))):
        assert not (await world.verify(month)).differences
        assert to_json(await world.report(month)) == document
    if not left:
        after = (await world.close(NEXT_MONTH)).report.credit
        assert (after.refunded_picos, after.expired_picos, after.remaining_picos) == (0, 0, 0)
    check_invariants(database_url)


async def test_a_closing_ends_all_at_once(world: ClosingWorld) -> None:
    """Keys of all projects, rentals up to the second, planned ones, and the plan with the month."""
    async with world.sessions.begin() as session:
        await create_project(session, organization="acme", name="other", actor="ann")
    secrets = [await new_key(world), await new_key(world, "other", scopes=("billing",), role="")]
    await resale_price(world, BEGINNING, replica_hour_picos=400 * CENT)
    begun = datetime.now(UTC).replace(microsecond=0) - HOUR
    await rent(world, begun, None, end_user="ada")
    await rent(world, begun, begun + 9 * HOUR, end_user="bob")
    await rent(world, begun, begun + HOUR / 2, end_user="cora")
    await rent(world, begun + 5 * HOUR, None, end_user="dan")
    await world.plan("committed", THIS_MONTH, PlanRules(commitment_picos=UNIT))
    async with world.sessions() as session:
        owner = await find_organization(session, "acme")
        seen = await effects_on_organization(session, owner)
    assert (seen.active_key_count, seen.open_project_count, seen.open_rental_count) == (3, 2, 3)
    assert (seen.open_months, seen.has_webhook) == ((MONTH,), False)

    await close(world)

    assert {await refusal(world.sessions, each) for each in secrets} == {OrganizationClosed}
    async with world.sessions() as session:
        keys = (await list_api_keys(session))[0]
        assert all(each.revoked_at for each in keys)
        assert await has_plan_from(session, owner.id, THIS_MONTH) == "committed"
        assert await has_plan_from(session, owner.id, month_after(THIS_MONTH)) == ""
        suspended = await suspensions_of_organizations(session)
        [closure] = (await closures_of(session, suspended.values())).values()
        seen = await effects_on_organization(session, owner)
        lengths = (
            await session.scalars(
                text("SELECT extract(epoch FROM ends_at - starts_at) FROM replica_rentals")
            )
        ).all()
        revoked = await session.scalars(
            text("SELECT subject_id FROM audit_log WHERE action = 'api_key.revoke'")
        )
        assert sorted(revoked) == sorted(str(each.id) for each in keys)
    assert (closure.reason, closure.final_month, closure.is_final_month_closed) == (
        WHY,
        MONTH,
        False,
    )
    assert (seen.active_key_count, seen.open_rental_count, seen.running_request_count) == (0, 0, 0)
    hour = HOUR.total_seconds()
    assert sorted(map(float, lengths))[:2] == [0, hour / 2]
    assert all(hour <= float(each) < hour + 60 for each in sorted(lengths)[2:])


async def test_each_fault_behind_a_closing_is_seen(world: ClosingWorld, database_url: str) -> None:
    await resale_price(world, BEGINNING, replica_hour_picos=400 * CENT)
    await rent(world, NOW.replace(microsecond=0) + HOUR, None, end_user="dan")
    await close(world)
    check_invariants(database_url)

    assert unseen(database_url, FAULTS, Moment.ALWAYS) == []


async def test_a_fault_at_any_statement_leaves_nothing(
    world: ClosingWorld, sessions: Sessions, database_url: str
) -> None:
    """And the same call then closes: a killed one has left nothing, either."""
    secret = await new_key(world)
    await world.grant(UNIT, THIS_MONTH, THIS_MONTH, "paid")
    engine = create_engine(database_url)
    for position in range(STATEMENTS_MAX):
        with fault_at(engine, position) as sent:
            try:
                await close(world, RemainingCredit.REFUND, sessions=create_sessions(engine))
                break
            except Planted:
                pass
        async with sessions() as session:
            assert (await authenticate(session, secret)).suspended is None
            assert await suspensions_of_organizations(session) == {}
    await engine.dispose()

    assert len(sent) > 15
    assert await refusal(sessions, secret) is OrganizationClosed


async def new_rental(session: AsyncSession) -> None:
    owner = await find_organization(session, "acme")
    await rent_replicas(session, owner, RentalTerms("ada", "demo", 1), actor="ann")


def new_things() -> dict[str, Callable[[AsyncSession], Awaitable[object]]]:
    """Return the calls that give an organization something new, by name."""
    return {
        "key": lambda session: create_api_key(
            session, organization="acme", project="search", name="k", actor="ann"
        ),
        "project": lambda session: create_project(
            session, organization="acme", name="more", actor="ann"
        ),
        "credit": lambda session: grant_credit(
            session,
            organization="acme",
            amount_picos=1,
            last_month=date(2200, 1, 1),
            reason="paid",
            actor="ann",
        ),
        "plan": lambda session: assign_plan(session, organization="acme", plan="any", actor="ann"),
        "webhook": lambda session: set_webhook(
            session, organization="acme", url="https://acme.example/", private=False, actor="ann"
        ),
        "suspension": lambda session: suspend_organization(
            session, organization="acme", reason="unpaid", actor="ann"
        ),
        "rental": new_rental,
        "resumption": lambda session: resume_organization(
            session, organization="acme", actor="ann"
        ),
    }


async def test_a_closed_organization_gets_nothing_new(world: ClosingWorld) -> None:
    await close(world)

    for name, act in new_things().items():
        with pytest.raises(InvalidValue, match="organization: is closed for good"):
            async with world.sessions.begin() as session:
                await act(session)
        assert name


@pytest.mark.parametrize("role", ["owner", "application"])
async def test_no_statement_opens_it_again(
    world: ClosingWorld, database_url: str, role: str
) -> None:
    await close(world)
    engine = create_engine(as_application(database_url) if role == "application" else database_url)

    for statement in (
        "DELETE FROM suspensions",
        "UPDATE suspensions SET closed_at = NULL",
        "UPDATE suspensions SET remaining_credit = 'refund'",
    ):
        with pytest.raises(DBAPIError, match="closed for good"):
            async with create_sessions(engine).begin() as session:
                await session.execute(text(statement))
    await engine.dispose()


async def test_a_repetition_changes_nothing(world: ClosingWorld) -> None:
    await world.grant(UNIT, THIS_MONTH, THIS_MONTH, "paid")
    with pytest.raises(InvalidValue, match=r"remaining_credit.*is required"):
        await close(world)
    await close(world, RemainingCredit.EXPIRE)
    first = await world.ask("SELECT count(*), max(id) FROM audit_log")

    await close(world, RemainingCredit.EXPIRE)
    await close(world)

    assert await world.ask("SELECT count(*), max(id) FROM audit_log") == first
    with pytest.raises(InvalidValue, match="was closed with expire"):
        await close(world, RemainingCredit.REFUND)


@pytest.mark.parametrize(("given", "why"), REFUSED)
async def test_a_closing_is_confirmed_and_has_a_reason(
    world: ClosingWorld, given: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidValue, match=why):
        await close(world, **given)


async def test_the_keys_of_the_operator_are_not_revoked(world: ClosingWorld) -> None:
    await new_key(world, scopes=("admin",))

    with pytest.raises(InvalidValue, match=r"keys of the operator, .*: wk_"):
        await close(world)


async def test_a_closed_project_has_no_keys_and_its_organization_works(
    world: ClosingWorld,
) -> None:
    async with world.sessions.begin() as session:
        await create_project(session, organization="acme", name="other", actor="ann")
    secret, other = await new_key(world), await new_key(world, "other")
    async with world.sessions.begin() as session:
        await suspend_organization(session, organization="acme", reason="unpaid", actor="ann")
        for _ in range(2):
            await close_project(
                session,
                project="acme/search",
                confirmed_name="search",
                reason=WHY,
                actor="ann",
                by_operator=False,
            )

    # A closing counts more than a suspension.
    assert await refusal(world.sessions, secret) is ProjectClosed
    with pytest.raises(InvalidValue, match="project: is closed for good"):
        await new_key(world)
    async with world.sessions.begin() as session:
        await resume_organization(session, organization="acme", actor="ann")
        assert (await authenticate(session, other)).suspended is None
        project = await find_project(session, "acme/search")
        suspended = await suspensions_of_projects(session, [project.id])
        [closure] = (await closures_of(session, suspended.values())).values()
        assert (closure.by_operator, closure.remaining_credit) == (False, "")
    await close(world)
    assert await refusal(world.sessions, secret) in (OrganizationClosed, ProjectClosed)
