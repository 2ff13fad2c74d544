"""Configuration applied beside requests: new limits count earlier use, and requests do not wait."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import timedelta

from metering.configuration.configuration import (
    Action,
    Attempts,
    Configuration,
    KeySpec,
    OrganizationSpec,
    ProjectSpec,
    QuotaSpec,
    apply_configuration,
    present_state,
)
from metering.core.models import QuotaDimension, QuotaKey
from metering.pricing.resale_prices import ResaleTerms
from metering.store.db import Sessions
from tests.metering.hold_world import MODEL, HoldWorld, admit, settle
from tests.metering.invariants import check_invariants

LIMITS = (
    (QuotaKey(QuotaDimension.TOKENS_PER_MINUTE), QuotaSpec(1000)),
    (QuotaKey(QuotaDimension.TOKENS_PER_MONTH), QuotaSpec(1000, output_weight_milli=2000)),
)
# Every admission takes this lock.
LOCK_IS_FREE = "SELECT pg_try_advisory_xact_lock_shared(1466263922, 1)"


def limited(name: str) -> OrganizationSpec:
    """Return an organization with limits at every level."""
    key = KeySpec(name="laptop", quotas=LIMITS)
    return OrganizationSpec(
        name, quotas=LIMITS, projects=(ProjectSpec("search", quotas=LIMITS, keys=(key,)),)
    )


async def applied(
    sessions: Sessions, world: HoldWorld, *wanted: OrganizationSpec, dry_run: bool = False
) -> tuple[Attempts, bool]:
    """Return the changes, and whether requests could be admitted meanwhile."""
    async with sessions.begin() as session:
        work = await apply_configuration(
            session,
            Configuration(wanted),
            actor="test",
            own_key_id=uuid.uuid4(),
            models=[MODEL],
            dry_run=dry_run,
        )
        free = world.one(LOCK_IS_FREE)
        if work.violations or dry_run:
            await session.rollback()
    return work, free


async def test_dry_runs_and_new_objects_take_no_lock(world: HoldWorld, sessions: Sessions) -> None:
    world.tenant("acme")
    acme, new = OrganizationSpec("acme", quotas=LIMITS), limited("new")
    wrong = OrganizationSpec("acme", quotas=LIMITS, projects=(ProjectSpec("No"),))

    dry, free_in_dry_run = await applied(sessions, world, acme, new, dry_run=True)
    mistaken, free_with_errors = await applied(sessions, world, wrong)
    made, free_for_new = await applied(sessions, world, new)
    _, free_for_used = await applied(sessions, world, acme)

    assert len(dry.changes) == 2 + 9
    assert mistaken.violations
    assert len(made.changes) == 9
    assert (free_in_dry_run, free_with_errors, free_for_new) == (True, True, True)
    assert not free_for_used, "a limit that counts the past is not counted beside admissions"


async def test_limits_applied_at_once_count_usage(world: HoldWorld, sessions: Sessions) -> None:
    payers = [world.tenant(name) for name in ("acme", "bolt")]
    for payer in payers:
        done = admit(payer)
        await world.run(done, admit(payer))  # 10 in and 20 leased, each
        await world.run(settle(done.hold_id, 7))

    await applied(
        sessions, world, *(OrganizationSpec(name, quotas=LIMITS) for name in ("acme", "bolt"))
    )

    rows = world.rows(
        "SELECT dimension, used, held FROM quotas JOIN quota_counters ON quota_id = id ORDER BY"
        " dimension, subject_id"
    )
    assert rows == [("tokens_per_minute", 17, 30)] * 2 + [("tokens_per_month", 24, 50)] * 2
    check_invariants(world.url)


def reselling(*prices: ResaleTerms, prune: bool = False) -> OrganizationSpec:
    return OrganizationSpec("acme", resale_prices=prices, prune_resale_prices=prune)


def made(work: Attempts) -> list[tuple[Action, str, list[str]]]:
    return [(each.action, each.path, [each.name for each in each.fields]) for each in work.changes]


async def test_resale_prices_are_added_where_they_differ_and_ended_if_pruned(
    world: HoldWorld, sessions: Sessions
) -> None:
    world.tenant("acme")
    general = ResaleTerms(markup_milli=1250)
    demo = ResaleTerms(model="demo", output_picos_per_token=7, replica_hour_picos=9)
    later = replace(demo, output_picos_per_token=8, effective_at=world.now + timedelta(days=3))

    async def step(*prices: ResaleTerms, **terms: bool) -> list[tuple[Action, str, list[str]]]:
        world.advance(60)
        wanted = reselling(*prices, **terms)
        dry, _ = await applied(sessions, world, wanted, dry_run=True)
        work, free = await applied(sessions, world, wanted)
        assert free, "prices block no admissions"
        assert not work.violations
        assert made(dry) == made(work)
        return made(work)

    created = await step(general, demo, later)
    assert await step(general, demo, later) == []
    assert await step(replace(demo, markup_milli=1000, request_picos=0)) == []
    async with sessions() as session:
        [present] = (await present_state(session, organization="acme")).organizations
    assert await step(*present.resale_prices, prune=True) == []
    changed = await step(general, replace(demo, replica_hour_picos=None, request_picos=3))
    pruned = await step(general, prune=True)
    assert await step(general, prune=True) == []

    assert created == [
        (Action.CREATE, "all models of acme", ["markup_milli"]),
        (Action.CREATE, "demo of acme", ["output_picos_per_token", "replica_hour_picos"]),
        (
            Action.UPDATE,
            f"demo of acme from {later.effective_at:%Y-%m-%d %H:%M:%SZ}",
            ["output_picos_per_token"],
        ),
    ]
    assert changed == [(Action.UPDATE, "demo of acme", ["request_picos", "replica_hour_picos"])]
    assert pruned == [(Action.DELETE, "demo of acme", [])]
    assert world.rows("SELECT model, withdrawn FROM resale_prices ORDER BY effective_at, id") == [
        ("", False),
        ("demo", False),
        ("demo", False),
        ("demo", True),
        ("demo", False),
    ], "the price of later has been announced, and stays"


async def test_bad_resale_prices_are_reported_by_path(world: HoldWorld, sessions: Sessions) -> None:
    world.tenant("acme")
    bad = ResaleTerms(model="demo", markup_milli=-1)

    work, _ = await applied(
        sessions, world, reselling(bad, ResaleTerms(), ResaleTerms(markup_milli=1))
    )

    assert [each.path for each in work.violations] == [
        "organizations[0].resale_prices[2].model",
        "organizations[0].resale_prices[0].markup_milli",
        "organizations[0].resale_prices[1].markup_milli",
    ]
