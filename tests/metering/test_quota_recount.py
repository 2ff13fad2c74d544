"""A quota set within a window counts its subject's earlier usage exactly."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import uuid
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event, select, update

from metering.core.models import Quota, QuotaDimension, QuotaKey, QuotaSubject
from metering.holds.operations import Admit, Expire, Extend, Void
from metering.plans.prepaid import set_prepaid
from metering.quotas import quota_recount
from metering.quotas.quota_admin import SETTABLE, delete_quota, set_quota
from metering.quotas.quota_recount import recount
from metering.quotas.quota_rules import Payer, QuotaState, Weights
from metering.quotas.quotas import QuotaExceeded
from metering.store.db import Sessions
from tests.metering.hold_world import MODEL, HoldWorld, admit, minutes_of, of_type, settle
from tests.metering.invariants import check_invariants
from tests.metering.test_hold_concurrency import running_stores

TOKEN_DIMENSIONS = [dimension for dimension in QuotaDimension if "tokens" in dimension]
SEEDS = [int(seed) for seed in os.environ.get("WEIR_TEST_SEEDS", "1").split(",")]

BETWEEN = [
    *(
        (dimension, (17 + 14 + 35 + 15 + 35 + 13, 15 + 30))
        for dimension in (
            QuotaDimension.TOKENS_PER_WINDOW,
            QuotaDimension.TOKENS_PER_DAY,
            QuotaDimension.TOKENS_PER_LIFETIME,
        )
    ),
    (QuotaDimension.TOKENS_PER_MINUTE, (13, 15 + 30)),
    (QuotaDimension.CONCURRENT_REQUESTS, (0, 2)),
    (QuotaDimension.REQUESTS_PER_MINUTE, (2, 0)),
]


END_USER, LABEL = "alice", "team=search"


def with_subjects(payer: Payer, **values: Any) -> Admit:
    """Return an admission of the end user, with the label."""
    return admit(payer, end_user=END_USER, labels=dict([LABEL.split("=")]), **values)


def subject_of(payer: Payer, subject: QuotaSubject) -> str:
    """Return the reference of a subject in admin calls."""
    ids = {
        QuotaSubject.ORGANIZATION: payer.organization_id,
        QuotaSubject.PROJECT: payer.project_id,
        QuotaSubject.API_KEY: payer.api_key_id,
    }
    return str(ids[subject])


async def set_limit(
    sessions: Sessions,
    payer: Payer,
    dimension: QuotaDimension,
    limit_value: int = 10**9,
    *,
    subject: QuotaSubject = QuotaSubject.ORGANIZATION,
    model: str = "",
    weights: Weights | None = None,
    enforced: bool | None = None,
) -> QuotaState:
    """Set a limit as an admin does."""
    given: dict[str, Any] = {"limit_value": limit_value}
    if weights is not None:
        given |= {f"{name}_weight_milli": each for name, each in weights._asdict().items()}
    if enforced is not None:
        given["enforced"] = enforced
    key = QuotaKey(dimension, model, window_minutes=minutes_of(dimension))
    if subject is QuotaSubject.END_USER:
        subject, key = QuotaSubject.PROJECT, replace(key, end_user=END_USER)
    elif subject is QuotaSubject.LABEL:
        subject, key = QuotaSubject.ORGANIZATION, replace(key, label=LABEL)
    async with sessions.begin() as session:
        return await set_quota(
            session,
            subject=subject,
            subject_ref=subject_of(payer, subject),
            key=key,
            terms=partial(replace, **given),
            actor="test",
        )


async def busy(world: HoldWorld, payer: Payer) -> uuid.UUID:
    """Create usage of every kind around the start of this minute."""
    long, old = with_subjects(payer), with_subjects(payer)
    await world.run(long, old)
    await world.run(Extend(long.hold_id, 5, 4, 10))
    world.advance(61)
    await world.run(Extend(long.hold_id, 9, 4, 10))  # posts 9 to the minute before
    settled, voided, expired, posted, live = (with_subjects(payer) for _ in range(5))
    await world.run(settled, voided, expired, posted, live)
    await world.run(Extend(posted.hold_id, 0, 0, 5), Extend(expired.hold_id, 3, 0, 5))
    await world.run(
        settle(settled.hold_id, 7, cached_tokens=6), Void(voided.hold_id), Void(posted.hold_id)
    )
    world.advance(20)
    await world.run(Extend(long.hold_id, 14, 4, 10))  # posts 5 more to this minute
    world.execute(
        "UPDATE holds SET expires_at = now() WHERE id = ANY(%s)", [expired.hold_id, old.hold_id]
    )
    await world.run(Expire(expired.hold_id), Expire(old.hold_id))
    return long.hold_id


@pytest.mark.parametrize("subject", QuotaSubject)
async def test_a_new_limit_counts_what_was_used_and_is_held_in_its_window(
    world: HoldWorld, sessions: Sessions, subject: QuotaSubject
) -> None:
    payer, other = world.tenant(), world.tenant("other")
    await busy(world, other)
    await busy(world, payer)
    check_invariants(world.url)

    states = [
        await set_limit(sessions, payer, dimension, subject=subject) for dimension in SETTABLE
    ]

    reported = {state.dimension: (state.used, state.held) for state in states}
    # This minute: settled 10+7, expired with its lease 10+25, nothing of the voided one; the long
    # one posted 5 and holds 50-14 more; the live one 10+20. The day also has the one that expired
    # with its first lease, 10+20, and the long one's input and first 9.
    assert reported[QuotaDimension.CONCURRENT_REQUESTS] == (0, 2)
    assert reported[QuotaDimension.REQUESTS_PER_MINUTE] == (3, 0)
    assert reported[QuotaDimension.TOKENS_PER_MINUTE] == (17 + 35 + 5, 36 + 30)
    assert reported[QuotaDimension.INPUT_TOKENS_PER_MINUTE] == (10 + 10, 10)
    assert reported[QuotaDimension.OUTPUT_TOKENS_PER_MINUTE] == (7 + 25 + 5, 36 + 20)
    assert reported[QuotaDimension.TOKENS_PER_DAY] == (57 + 30 + 19, 66)
    for measure in ("requests", "tokens", "input_tokens", "output_tokens", "cost_picos"):
        # At noon on a Friday, usage before this minute belongs to this hour, day, week and month,
        # and to any 300 minutes up to now.
        longer = {
            reported[QuotaDimension(f"{measure}_per_{unit}")]
            for unit in ("window", "hour", "day", "week", "month", "lifetime")
        }
        assert len(longer) == 1, measure
    check_invariants(world.url)


async def test_live_holds_are_held_to_a_new_limit_from_their_next_extension_on(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    op = admit(payer)
    await world.run(op)
    state = await set_limit(sessions, payer, QuotaDimension.TOKENS_PER_MONTH, 40)

    answers = [
        *await world.run(admit(payer, least_tokens=20)),
        *await world.run(Extend(op.hold_id, 20, 0, 500)),
    ]
    refused = await world.run(Extend(op.hold_id, 30, 0, 1))
    await world.run(settle(op.hold_id, 30))

    assert isinstance(answers[0], QuotaExceeded)
    assert answers[1].leased_token_count == 30  # type: ignore[union-attr]
    assert isinstance(refused[0], QuotaExceeded)
    assert world.counters(state.quota_id) == [(40, 0)]
    check_invariants(world.url, all_ended=True)


async def test_a_models_limit_counts_that_model_only(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    await busy(world, payer)

    mine = await set_limit(sessions, payer, QuotaDimension.TOKENS_PER_DAY, model=MODEL)
    other = await set_limit(sessions, payer, QuotaDimension.TOKENS_PER_DAY, model="another")

    assert (mine.used, mine.held) == (106, 66)
    assert (other.used, other.held) == (0, 0)
    check_invariants(world.url)


async def test_a_limit_set_again_counted_all_along(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    op, other = admit(payer), admit(payer)
    first = await set_limit(sessions, payer, QuotaDimension.TOKENS_PER_DAY, 100)
    await world.run(op)
    async with sessions.begin() as session:
        await delete_quota(session, quota_id=str(first.quota_id), actor="test")
    await world.run(other)

    again = await set_limit(sessions, payer, QuotaDimension.TOKENS_PER_DAY, 100)
    await world.run(settle(op.hold_id, 20), settle(other.hold_id, 20))

    assert (again.used, again.held) == (0, 60)
    assert world.counters(again.quota_id) == [(60, 0)]
    check_invariants(world.url, all_ended=True)


async def test_other_weights_recount_this_window(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    state = await set_limit(sessions, payer, QuotaDimension.TOKENS_PER_MINUTE)
    long = await busy(world, payer)
    assert world.counters(state.quota_id)[-1] == (57, 66)

    weighed = await set_limit(
        sessions, payer, QuotaDimension.TOKENS_PER_MINUTE, weights=Weights(1000, 100, 1500)
    )

    # 4 + .6 + 10.5, 10 + 37.5, the long one: 6 + .4 + 1.5 * 14, of it posted before 6 + .4 + 13.5;
    # each rounded up once.
    assert (weighed.used, weighed.held) == (16 + 48 + 28 - 20, (6 + 76) - 28 + 40)
    assert weighed.quota_id == state.quota_id
    check_invariants(world.url)
    await world.run(settle(long, 20))
    check_invariants(world.url)


async def test_a_window_that_began_while_an_admission_waited_is_counted_in_full(
    world: HoldWorld, sessions: Sessions
) -> None:
    """A batch counts in the window in which it began."""
    payer = world.tenant()
    before, after = admit(payer), admit(payer)
    await world.run(before)
    await world.run(settle(before.hold_id, 5))
    world.advance(60)
    state = await set_limit(sessions, payer, QuotaDimension.TOKENS_PER_MINUTE)
    world.advance(-30)

    await world.run(after)

    assert world.counters(state.quota_id) == [(15, 30)]
    check_invariants(world.url)


@pytest.mark.parametrize("seed", SEEDS)
async def test_limits_set_in_any_order_while_requests_run_are_exact_at_every_commit(
    world: HoldWorld, sessions: Sessions, seed: int
) -> None:
    """Three processes admit, extend and end; an admin changes limits meanwhile."""
    chance = random.Random(seed)
    payers = [world.tenant(f"t{number}") for number in range(2)]
    running = 0
    made = 0

    async with running_stores(world.url, 3) as stores:

        async def request() -> None:
            nonlocal running
            store, embeds = chance.choice(stores), chance.random() < 0.2
            op = admit(chance.choice(payers), input_tokens=chance.randint(0, 30), embedding=embeds)
            leased = (await store.admit(op)).leased_token_count
            running += 1
            delivered = 0
            for _ in range(0 if embeds else chance.randint(0, 3)):
                delivered = chance.randint(delivered, leased)
                cached = chance.randint(0, op.input_token_count)
                leased = (
                    await store.extend(Extend(op.hold_id, delivered, cached, chance.randint(1, 30)))
                ).leased_token_count
            if chance.random() < 0.2 and not delivered:
                await store.void(op.hold_id)
            elif chance.random() < 0.8:
                await store.settle(
                    settle(
                        op.hold_id,
                        chance.randint(delivered, leased),
                        input_tokens=op.input_token_count,
                    )
                )
            running -= 1

        async def admin() -> None:
            nonlocal made
            dimension = chance.choice(SETTABLE)
            weights = Weights(*(chance.choice([0, 250, 1000, 3000]) for _ in range(3)))
            plain = not dimension.startswith("tokens_per_")
            state = await set_limit(
                sessions,
                chance.choice(payers),
                dimension,
                subject=chance.choice(list(QuotaSubject)),
                model=chance.choice(["", MODEL]),
                weights=None if plain or not any(weights) else weights,
            )
            made += 1
            if chance.random() < 0.3:
                async with sessions.begin() as session:
                    await delete_quota(session, quota_id=str(state.quota_id), actor="test")

        for _ in range(8):
            requests = [asyncio.ensure_future(request()) for _ in range(40)]
            for _ in range(4):
                await admin()
                check_invariants(world.url)
            await asyncio.gather(*requests)
            check_invariants(world.url)
            world.advance(chance.choice([1, 20, 61, 3_600, 86_400]))
    overdue = world.rows("SELECT id FROM holds WHERE state = 'held'")
    world.execute("UPDATE holds SET expires_at = now() WHERE state = 'held'")
    await world.run(*(Expire(row[0]) for row in overdue))

    assert made == 32
    check_invariants(world.url, all_ended=True)


async def test_of_many_admissions_during_the_making_of_a_limit_none_goes_uncounted(
    world: HoldWorld, sessions: Sessions
) -> None:
    """Earlier admissions are in the sum, later ones meet the limit exactly."""
    payer = world.tenant()
    async with running_stores(world.url, 3) as stores:
        requests = [
            asyncio.ensure_future(stores[number % 3].admit(admit(payer, least_tokens=20)))
            for number in range(120)
        ]
        await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        state = await set_limit(sessions, payer, QuotaDimension.CONCURRENT_REQUESTS, 200)
        answers = await asyncio.gather(*requests, return_exceptions=True)
        more = await asyncio.gather(
            *(stores[number % 3].admit(admit(payer, least_tokens=20)) for number in range(120)),
            return_exceptions=True,
        )

    assert not of_type(BaseException, answers)
    assert len(of_type(QuotaExceeded, more)) == 40
    assert world.counters(state.quota_id) == [(0, 200)]
    check_invariants(world.url)


@pytest.mark.parametrize(
    ("dimension", "reported"), BETWEEN, ids=[dimension for dimension, _ in BETWEEN]
)
async def test_changes_between_the_sums_without_and_with_the_lock_are_counted_once(
    world: HoldWorld,
    sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    dimension: QuotaDimension,
    reported: tuple[int, int],
) -> None:
    """Ends, extensions, admissions, a lapsed hold, a new project, a new minute."""
    payer = world.tenant()
    old, lapsed, overdue, long, live = (admit(payer) for _ in range(5))
    await world.run(old, lapsed, overdue, long, live)
    await world.run(
        settle(old.hold_id, 7), Extend(overdue.hold_id, 3, 0, 5), Extend(long.hold_id, 20, 0, 10)
    )
    world.advance(61)
    await world.run(Expire(lapsed.hold_id))
    world.advance(180)
    sum_up, sums = quota_recount._sum_up, itertools.count()

    async def interrupted(*arguments: Any) -> None:
        await sum_up(*arguments)
        if next(sums) == 0:
            new = world.one(
                "INSERT INTO projects (organization_id, name) VALUES (%s, 'new') RETURNING id",
                payer.organization_id,
            )
            other = admit(replace(payer, project_id=new, api_key_id=world.key(new)))
            await world.run(
                settle(lapsed.hold_id, 4), Expire(overdue.hold_id), settle(live.hold_id, 5)
            )
            world.advance(60)
            await world.run(Extend(long.hold_id, 25, 0, 10), other, admit(payer))
            await world.run(settle(other.hold_id, 3))

    monkeypatch.setattr(quota_recount, "_sum_up", interrupted)
    state = await set_limit(sessions, payer, dimension)

    assert (state.used, state.held) == reported
    check_invariants(world.url)


async def test_the_shared_lock_keeps_the_sum_exact(world: HoldWorld, sessions: Sessions) -> None:
    """A quota is not counted while an admission without it is under way."""
    payer = world.tenant()
    op = admit(payer)
    world.execute(
        "SELECT pg_advisory_lock_shared(1466263922, 1)"
    )  # like a batch that has read the rules
    setting = asyncio.ensure_future(set_limit(sessions, payer, QuotaDimension.TOKENS_PER_DAY))
    async with asyncio.timeout(30):
        while not world.one(  # noqa: ASYNC110
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        ):
            await asyncio.sleep(0.001)
    assert not setting.done()
    world.execute("SELECT pg_advisory_unlock_shared(1466263922, 1)")
    await setting
    await world.run(op)

    async with sessions() as session:
        [quota] = (await session.scalars(select(Quota))).all()
    assert world.counters(quota.id) == [(0, 30)]


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "counted afterwards"])
async def test_usage_beyond_the_range_of_a_counter_is_settled(
    world: HoldWorld, sessions: Sessions, watched: bool
) -> None:
    """Nine million units are little in some currencies; shadow limits are unbounded."""
    payer = world.tenant()
    world.set_price(10**13, 10**13, 10**13)
    money = QuotaDimension.COST_PICOS_PER_MONTH
    if watched:
        await set_limit(sessions, payer, money, 100, enforced=False)

    answers: list[object] = []
    for batch in (1, 1, 2):  # settled alone and together, so with read and unread counters
        ops = [admit(payer, input_tokens=400_000, slice_tokens=10) for _ in range(batch)]
        answers += await world.run(*ops)
        answers += await world.run(*(settle(op.hold_id, 10, input_tokens=400_000) for op in ops))
    state = await set_limit(sessions, payer, money, 100, enforced=True)

    assert [type(answer) for answer in answers if isinstance(answer, Exception)] == []
    assert world.counters(state.quota_id) == [(2**63 - 1, 0)]
    assert of_type(QuotaExceeded, await world.run(admit(payer)))
    check_invariants(world.url, over=[state.quota_id])


async def test_late_settlements_reach_newer_limits(world: HoldWorld, sessions: Sessions) -> None:
    """Otherwise the lease of lost prepaid credit would never return."""
    payer, other = world.tenant(), world.tenant("other")
    before = await set_limit(sessions, payer, QuotaDimension.TOKENS_PER_DAY)
    early, reported, theirs = admit(payer), admit(payer), admit(other)
    await world.run(early, reported, theirs)
    await world.run(Extend(early.hold_id, 5, 4, 10))
    world.execute("UPDATE holds SET expires_at = now()")
    await world.run(*(Expire(op.hold_id) for op in (early, reported, theirs)))
    await world.run(settle(reported.hold_id, 8))
    made = {
        "month": await set_limit(sessions, payer, QuotaDimension.TOKENS_PER_MONTH),
        "key": await set_limit(
            sessions, payer, QuotaDimension.OUTPUT_TOKENS_PER_MINUTE, subject=QuotaSubject.API_KEY
        ),
        "model": await set_limit(sessions, payer, QuotaDimension.TOKENS_PER_MONTH, model="another"),
    }
    async with sessions.begin() as session:
        await set_prepaid(session, organization="acme", prepaid=True, actor="test")
    assert [state.used for state in made.values()] == [10 + 30 + 18, 30 + 8, 0]

    for _ in range(2):
        await world.run(
            settle(early.hold_id, 7), settle(reported.hold_id, 8), settle(theirs.hold_id, 1)
        )

    assert [world.counters(state.quota_id) for state in (before, *made.values())] == [
        [(35, 0)],
        [(35, 0)],
        [(15, 0)],
        [],
    ]
    credit = world.one("SELECT id FROM quotas WHERE dimension = 'prepaid_credit_picos'")
    assert world.counters(credit) == [(16 * 3 + 4 * 1 + 15 * 7, 0)]
    check_invariants(world.url, all_ended=True, over=[credit])


@pytest.mark.parametrize("seconds", [0, 61], ids=["in its window", "in a later one"])
async def test_a_late_settlement_gives_back_by_the_weights_of_now(
    world: HoldWorld, sessions: Sessions, seconds: int
) -> None:
    """Its expiry was charged with former weights; the windows were recounted since."""
    payer = world.tenant()
    for dimension in TOKEN_DIMENSIONS:
        await set_limit(sessions, payer, dimension)
    early, moved = admit(payer), admit(payer)
    await world.run(early, moved)
    await world.run(Extend(moved.hold_id, 5, 4, 10))
    world.advance(61)
    await world.run(Extend(moved.hold_id, 9, 4, 10))
    world.execute("UPDATE holds SET expires_at = now()")
    await world.run(Expire(early.hold_id), Expire(moved.hold_id))
    check_invariants(world.url)

    for weights in (Weights(1000, 100, 1500), Weights(333, 1001, 7)):
        for dimension in (
            QuotaDimension.TOKENS_PER_MINUTE,
            QuotaDimension.TOKENS_PER_DAY,
            QuotaDimension.TOKENS_PER_MONTH,
        ):
            await set_limit(sessions, payer, dimension, weights=weights)
    world.advance(seconds)
    await world.run(
        settle(early.hold_id, 7, cached_tokens=10), settle(moved.hold_id, 12, cached_tokens=4)
    )

    check_invariants(world.url, all_ended=True)


async def test_many_quotas_are_recounted_by_as_many_statements_as_few(
    world: HoldWorld, sessions: Sessions
) -> None:
    """Admissions wait for it, so its time must not depend on the number of keys."""
    owner = world.tenant()
    payers = [replace(owner, api_key_id=world.key(owner.project_id)) for _ in range(12)]
    dimensions = (
        QuotaDimension.TOKENS_PER_MONTH,
        QuotaDimension.TOKENS_PER_MINUTE,
        QuotaDimension.COST_PICOS_PER_DAY,
    )
    for payer in payers:
        for dimension in dimensions:
            await set_limit(sessions, payer, dimension, subject=QuotaSubject.API_KEY)
    ops = [admit(payer) for payer in payers for _ in range(2)]
    await world.run(*ops)
    await world.run(*(settle(op.hold_id, index % 20) for index, op in enumerate(ops[::2])))
    statements: list[str] = []
    event.listen(
        sessions.kw["bind"].sync_engine,
        "before_cursor_execute",
        lambda *arguments: statements.append(arguments[2]),
    )

    counts = []
    for weight, subjects in ((2000, payers[:1]), (1500, payers)):
        async with sessions.begin() as session:
            of_keys = Quota.subject_id.in_([payer.api_key_id for payer in subjects])
            await session.execute(
                update(Quota)
                .where(of_keys, Quota.dimension != dimensions[-1])
                .values(output_weight_milli=weight)
            )
            quotas = (await session.scalars(select(Quota).where(of_keys))).all()
            statements.clear()
            await recount(session, [(quota, owner.organization_id) for quota in quotas])
            counts.append(len(statements))

    assert len(quotas) == 3 * len(payers)
    assert counts[0] == counts[1]
    assert sum("FOR UPDATE" in statement for statement in statements) == 1
    check_invariants(world.url)
