"""Answers and effects of consecutive batches: scenarios on a real database with a movable clock.

Prices are 3 picos per input token, 1 cached, 7 output.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import replace

import psycopg
import pytest
from msgspec import structs

from metering.core.errors import InvariantViolated, KeyInvalid, PriceMissing
from metering.core.models import Outcome, QuotaDimension, QuotaSubject
from metering.holds.operations import Ended, Extend, Renew, Renewed, RequestSettled, Settled, Void
from metering.holds.recovery import sweep_expired_holds
from metering.quotas.quota_admin import SETTABLE
from metering.quotas.quota_rules import Weights
from metering.quotas.quotas import QuotaExceeded
from metering.store.db import Sessions, psycopg_conninfo
from tests.metering.hold_scenarios import Play, Scenario
from tests.metering.hold_world import HoldWorld, admit, settle
from tests.metering.invariants import check_invariants
from tests.metering.test_quota_recount import set_limit


async def test_a_hold_leases_a_slice_and_gives_back_the_rest(play: Play) -> None:
    await play("""
    quota alice tokens_per_month 100        ok
    admit alice r1 10+20                    leased 20
    counter alice tokens_per_month          0/30
    extend r1 15~4 20                       leased 40
    counter alice tokens_per_month          25/25
    settle r1 30~4                          used 10~4+30 cost 232
    counter alice tokens_per_month          40/0
    settle r1 30~4                          used 10~4+30 cost 232
    counter alice tokens_per_month          40/0
    """)


async def test_a_request_without_max_tokens_takes_only_what_is_left(play: Play) -> None:
    """Not more than the rest of the budget (LiteLLM #27539)."""
    await play("""
    quota alice tokens_per_month 100        ok
    admit alice r1 10+20                    leased 20
    admit alice r2 10+128                   leased 60
    admit alice r3 10+20                    refused tokens_per_month
    extend r2 60 128                        refused tokens_per_month
    settle r1 5                             used 10+5 cost 65
    extend r2 60 128                        leased 75
    extend r2 75 1                          refused tokens_per_month
    settle r2 75                            used 10+75 cost 555
    counter alice tokens_per_month          100/0
    """)


async def test_a_slice_smaller_than_the_least_is_refused(play: Play) -> None:
    await play("""
    quota alice tokens_per_month 100        ok
    admit alice r1 10+200>91                refused tokens_per_month
    counter alice tokens_per_month          none
    admit alice r1 10+200>90                leased 90
    """)


async def test_a_refusal_by_the_concurrency_cap_uses_no_request_a_minute(play: Play) -> None:
    """LiteLLM #39309."""
    await play("""
    quota alice concurrent_requests 1       ok
    quota alice requests_per_minute 3       ok
    admit alice r1 1+1                      leased 1
    admit alice r2 1+1                      refused concurrent_requests
    counter alice requests_per_minute       1/0
    counter alice concurrent_requests       0/1
    settle r1 1                             used 1+1 cost 10
    admit alice r2 1+1                      leased 1
    counter alice requests_per_minute       2/0
    """)


async def test_concurrency_is_given_back_by_every_end(play: Play) -> None:
    """LiteLLM #20256: the key stayed locked after provider time-outs."""
    await play("""
    quota alice concurrent_requests 1       ok
    admit alice r1 1+1                      leased 1
    settle r1 0                             used 1+0 cost 3
    admit alice r2 1+1                      leased 1
    void r2                                 done
    admit alice r3 1+1                      leased 1
    clock 2026-11-20 12:01:00               ok
    expire r3                               done
    admit alice r4 1+1                      leased 1
    renew server                            done
    state r4                                voided
    admit alice r5 1+1                      leased 1
    """)


async def test_ends_in_a_batch_make_room_for_its_admissions(play: Play) -> None:
    await play("""
    quota alice concurrent_requests 1       ok
    admit alice r1 1+1                      leased 1
    admit alice r2 1+1 & settle r1 1        leased 1 & used 1+1 cost 10
    """)


async def test_an_extension_posts_to_the_old_window_and_holds_in_the_new(play: Play) -> None:
    await play("""
    clock 2026-10-31 23:59:30               ok
    quota alice tokens_per_minute 100       ok
    quota alice tokens_per_day 100          ok
    quota alice tokens_per_month 100        ok
    quota alice cost_picos_per_month 1000   ok
    admit alice r1 10+40                    leased 40
    counter alice tokens_per_minute         0/50
    counter alice cost_picos_per_month      0/310
    clock 2026-11-01 00:00:10               ok
    extend r1 30 20                         leased 60
    counter alice tokens_per_minute         40/0 0/30
    counter alice tokens_per_day            40/0 0/30
    counter alice tokens_per_month          40/0 0/30
    counter alice cost_picos_per_month      240/0 0/210
    settle r1 50                            used 10+50 cost 380
    counter alice tokens_per_minute         40/0 20/0
    counter alice tokens_per_month          40/0 20/0
    counter alice cost_picos_per_month      240/0 140/0
    """)


async def test_a_refused_extension_changes_nothing_even_over_a_border(play: Play) -> None:
    await play("""
    clock 2026-11-20 12:00:30               ok
    quota alice tokens_per_minute 50        ok
    quota alice tokens_per_month 1000       ok
    admit alice r1 10+40                    leased 40
    clock 2026-11-20 12:01:00               ok
    admit alice r2 10+40                    leased 40
    extend r1 30 20                         refused tokens_per_minute
    counter alice tokens_per_minute         0/50 0/50
    counter alice tokens_per_month          0/100
    settle r1 40                            used 10+40 cost 310
    counter alice tokens_per_minute         50/0 0/50
    """)


async def test_a_window_that_has_passed_limits_nothing_any_more(play: Play) -> None:
    await play("""
    clock 2026-11-20 12:00:59.999999        ok
    quota alice requests_per_minute 1       ok
    quota alice tokens_per_minute 20        ok
    admit alice r1 10+10                    leased 10
    admit alice r2 10+10                    refused requests_per_minute tokens_per_minute
    clock 2026-11-20 12:01:00               ok
    admit alice r2 10+10                    leased 10
    """)


async def test_money_runs_out_to_the_last_token_that_it_pays(play: Play) -> None:
    await play("""
    quota alice cost_picos_per_month 100    ok
    admit alice r1 10+128                   leased 10
    extend r1 10~10 128                     leased 12
    extend r1 12~10 128                     refused cost_picos_per_month
    settle r1 12~10                         used 10~10+12 cost 94
    counter alice cost_picos_per_month      94/0
    """)


async def test_money_is_held_at_the_dearer_input_price_cached_or_not(world: HoldWorld) -> None:
    world.set_price(input_picos=1, cached_picos=5)
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.COST_PICOS_PER_MONTH, 50 + 7 * 20)
    op = admit(payer)
    await world.run(op)

    await world.run(settle(op.hold_id, 20, cached_tokens=10))

    assert world.counters(quota) == [(50 + 7 * 20, 0)]
    check_invariants(world.url)


async def test_cached_tokens_known_late_lower_the_bill_and_its_windows(play: Play) -> None:
    await play("""
    clock 2026-10-31 23:59:30               ok
    quota alice cost_picos_per_month 1000   ok
    admit alice r1 100+10                   leased 10
    extend r1 1 5                           leased 15
    clock 2026-11-01 00:00:00               ok
    extend r1 2 5                           leased 20
    counter alice cost_picos_per_month      314/0 0/126
    settle r1 3~100                         used 100~100+3 cost 121
    counter alice cost_picos_per_month      114/0 7/0
    """)


async def test_a_late_count_of_cached_tokens_never_raises_a_charge(world: HoldWorld) -> None:
    """Bill posted input as it was posted where cached input is dearer."""
    world.set_price(input_picos=1, cached_picos=5)
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.PREPAID_CREDIT_PICOS, 1000)
    op = admit(payer)
    await world.run(op)
    await world.run(Extend(op.hold_id, 20, 0, 20))

    (settled,) = await world.run(settle(op.hold_id, 30, cached_tokens=10))

    assert isinstance(settled, Settled)
    assert (settled.cached_input_token_count, settled.cost_picos) == (0, 10 + 30 * 7)
    assert world.counters(quota) == [(settled.cost_picos, 0)]
    check_invariants(world.url)


@pytest.mark.parametrize("weight", [1000, 333, 100, 0])
@pytest.mark.parametrize("seed", range(3))
async def test_windows_and_credit_equal_the_bill_whenever_the_cached_tokens_are_known(
    world: HoldWorld, sessions: Sessions, seed: int, weight: int
) -> None:
    """Random requests whose count comes at the end are charged like those that had it at first."""
    rng, payer = random.Random(seed), world.tenant()
    weights = Weights(1000, weight, 777)
    credit = world.quota(payer, QuotaDimension.PREPAID_CREDIT_PICOS, 10**9)
    tokens = await set_limit(sessions, payer, QuotaDimension.TOKENS_PER_DAY, 10**9, weights=weights)
    cost = charged = 0
    for _ in range(6):
        sent, delivered = rng.randint(1, 60), 0
        cached = rng.randint(0, sent)
        op = admit(payer, input_tokens=sent, slice_tokens=8)
        await world.run(op)
        for _ in range(rng.randint(0, 3)):
            delivered += rng.randint(0, 8)
            await world.run(Extend(op.hold_id, delivered, 0, 16))
        end = settle(op.hold_id, delivered, input_tokens=sent, cached_tokens=cached)
        (settled,) = await world.run(end)
        assert isinstance(settled, Settled)
        assert settled.cached_input_token_count == cached
        cost += settled.cost_picos
        charged += -(-((sent - cached) * 1000 + cached * weight + delivered * 777) // 1000)

    assert world.counters(credit) == [(cost, 0)]
    assert world.counters(tokens.quota_id) == [(charged, 0)]
    check_invariants(world.url)


async def test_an_expired_hold_bills_what_was_known_and_keeps_its_lease(play: Play) -> None:
    await play("""
    quota alice tokens_per_month 100        ok
    admit alice r1 10+20                    leased 20
    extend r1 15 20                         leased 40
    clock 2026-11-20 12:00:59               ok
    expire r1                               nothing
    clock 2026-11-20 12:01:00               ok
    expire r1                               done
    expire r1                               nothing
    events r1                               10+15
    counter alice tokens_per_month          50/0
    """)


async def test_a_paused_owner_settles_late_and_gives_back_the_rest_once(play: Play) -> None:
    await play("""
    quota alice tokens_per_month 100        ok
    admit alice r1 10+20                    leased 20
    extend r1 15 20                         leased 40
    clock 2026-11-20 13:00:00               ok
    expire r1                               done
    renew server r1                         done
    extend r1 20 20                         hold_ended
    settle r1 33                            used 10+33 cost 261
    settle r1 33                            used 10+33 cost 261
    events r1                               10+15 0+18
    void r1                                 nothing
    counter alice tokens_per_month          43/0
    """)


@pytest.mark.parametrize(
    "order",
    [
        ("expire r1", "settle r1 9 recovered", "settle r1 9"),
        ("settle r1 9 recovered", "expire r1", "settle r1 9"),
        ("settle r1 9", "settle r1 9 recovered", "expire r1"),
        ("expire r1", "settle r1 9", "settle r1 9 recovered"),
        ("expire r1 & settle r1 9", "settle r1 9 recovered", "expire r1"),
        ("settle r1 9 & expire r1 & settle r1 9 recovered", "expire r1", "settle r1 9"),
    ],
    ids=lambda order: ", ".join(order),
)
async def test_expiry_recovery_and_a_late_settlement_in_any_order_record_the_same(
    world: HoldWorld, order: tuple[str, ...]
) -> None:
    scenario = Scenario(world)
    for act in ("admit alice r1 10+20", "clock 2026-11-20 13:00:00", *order):
        await scenario.act(act.split())

    assert [event[1:3] for event in world.events()] == [(10, 9)]
    check_invariants(world.url, all_ended=True)


async def test_an_answer_repeated_reports_the_same_outcome(world: HoldWorld) -> None:
    """The last part gives the outcome, not the first in the alphabet."""
    payer = world.tenant()
    op = admit(payer)
    await world.run(op)
    await world.run(Extend(op.hold_id, 3, 0, 5))
    world.advance(60)
    await run_expiry(world, op.hold_id)
    late = settle(op.hold_id, 9, outcome=Outcome.CANCELLED)

    answers = [
        *await world.run(late),
        *await world.run(late),
        *await world.run(admit(payer, request_id=op.request_id)),
    ]

    settled = [
        answer.settled if isinstance(answer, RequestSettled) else answer for answer in answers
    ]
    assert settled == [replace(late_usage(op.hold_id), outcome="cancelled")] * 3


async def run_expiry(world: HoldWorld, hold_id: uuid.UUID) -> None:
    assert await sweep_expired_holds(world.url) == 1
    assert world.one("SELECT state FROM holds WHERE id = %s", hold_id) == "expired"


def late_usage(hold_id: uuid.UUID) -> Settled:
    return Settled(hold_id, 10, 0, 9, 9, 9, 10 * 3 + 9 * 7, "USD", "cancelled", 0, 9)


async def test_the_same_request_runs_once(play: Play) -> None:
    await play("""
    quota alice requests_per_minute 9                        ok
    admit alice r1 10+20 x                                   leased 20
    admit alice r1 10+20 x                                   request_in_flight
    admit alice r1 10+20 y                                   request_id_reused
    settle r1 5                                              used 10+5 cost 65
    admit alice r1 10+20 x                                   request_settled used 10+5 cost 65
    admit alice r1 10+20 y                                   request_id_reused
    admit alice r2 10+20 x & admit alice r2 10+20 x          leased 20 & request_in_flight
    admit bob r1 10+20 x                                     leased 20
    counter alice requests_per_minute                        2/0
    """)


async def test_a_voided_request_may_run_again_with_any_payload(play: Play) -> None:
    await play("""
    quota alice requests_per_minute 1       ok
    admit alice r1 10+20 x                  leased 20
    void r1                                 done
    counter alice requests_per_minute       0/0
    admit alice r1 10+20 y                  leased 20
    void r1                                 done
    void r1                                 nothing
    """)


async def test_a_refused_request_leaves_no_trace_in_any_table(world: HoldWorld) -> None:
    payer = world.tenant()
    world.quota(payer, QuotaDimension.REQUESTS_PER_MINUTE, 100)
    world.quota(payer, QuotaDimension.COST_PICOS_PER_MONTH, 100, subject=QuotaSubject.PROJECT)
    world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 0, subject=QuotaSubject.API_KEY)
    other = world.tenant("other")
    running = admit(other)
    await world.run(running)
    before = world.contents()

    answers = await world.run(
        admit(payer),
        admit(payer, input_tokens=1000),
        admit(other, request_id=running.request_id),
        admit(replace(other, api_key_id=uuid.uuid4())),
        admit(replace(other, currency_code="EUR")),
        settle(running.hold_id, 21),
        Extend(running.hold_id, 21, 0, 5),
        Void(uuid.uuid4()),
    )

    assert [type(answer) for answer in answers[3:5]] == [KeyInvalid, PriceMissing]
    assert [type(answer) for answer in answers[:2]] == [QuotaExceeded] * 2
    assert not any(isinstance(answer, Settled) for answer in answers)
    assert world.contents() == before


async def test_a_refusal_leaves_no_empty_counters_beside_an_admission(world: HoldWorld) -> None:
    payer, other = world.tenant(), world.tenant("other")
    refusing = world.quota(payer, QuotaDimension.REQUESTS_PER_MINUTE, 0)
    granting = world.quota(other, QuotaDimension.REQUESTS_PER_MINUTE, 1)

    await world.run(admit(payer), admit(other))

    assert (world.counters(refusing), world.counters(granting)) == ([], [(1, 0)])


async def test_a_refusal_names_every_failing_limit_the_first_to_reset_in_front(
    world: HoldWorld,
) -> None:
    payer = world.tenant()
    for dimension in reversed(SETTABLE):
        world.quota(payer, dimension, 0)

    (refusal,) = await world.run(admit(payer))

    assert isinstance(refusal, QuotaExceeded)
    names = [state.dimension for state in refusal.failing]
    assert names[0] == QuotaDimension.CONCURRENT_REQUESTS
    windows = [name.rpartition("_per_")[2] for name in names[1:]]
    assert windows == sorted(windows, key=["minute", "hour", "day", "week", "month"].index)
    assert len(names) == len(SETTABLE)


async def test_a_request_meets_quotas_of_its_subjects_and_model_only(world: HoldWorld) -> None:
    payer, other = world.tenant(), world.tenant("other")
    sibling = replace(payer, api_key_id=world.key(payer.project_id))
    world.quota(other, QuotaDimension.CONCURRENT_REQUESTS, 0)
    world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 0, model="another-model")
    world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 0, subject=QuotaSubject.API_KEY)

    answers = await world.run(admit(payer), admit(other), admit(sibling))

    assert [isinstance(answer, QuotaExceeded) for answer in answers] == [True, True, False]


async def test_a_removed_limit_refuses_nothing_and_stays_exact_for_holds(play: Play) -> None:
    await play("""
    quota alice tokens_per_month 40         ok
    admit alice r1 10+20                    leased 20
    drop alice tokens_per_month             ok
    admit alice r2 10+100                   leased 100
    extend r1 20 500                        leased 520
    settle r1 510                           used 10+510 cost 3600
    counter alice tokens_per_month          520/0
    settle r2 100                           used 10+100 cost 730
    counter alice tokens_per_month          520/0
    """)


async def test_a_limit_below_usage_refuses_and_running_requests_finish(
    world: HoldWorld, play: Play
) -> None:
    played = await play("""
    quota alice tokens_per_month 100        ok
    admit alice r1 10+50                    leased 50
    """)
    world.execute("UPDATE quotas SET limit_value = 5")

    assert await played.act(["extend", "r1", "50", "10"]) == "refused tokens_per_month"
    assert await played.act(["admit", "alice", "r2", "1+1"]) == "refused tokens_per_month"
    assert await played.act(["settle", "r1", "50"]) == "used 10+50 cost 380"
    assert await played.act(["counter", "alice", "tokens_per_month"]) == "60/0"


async def test_a_renewal_keeps_named_or_spared_holds_and_voids_the_rest(world: HoldWorld) -> None:
    payer, owner, other = world.tenant(), uuid.uuid4(), uuid.uuid4()
    known, spared, lost, foreign = (admit(payer) for _ in range(4))
    await world.run(known, spared, lost, process_id=owner)
    await world.run(foreign, process_id=other)
    world.advance(30)

    await world.run(
        Renew(owner, frozenset({known.hold_id}), frozenset({spared.hold_id})), process_id=owner
    )

    states = dict(
        world.rows(
            "SELECT id, state || ' ' || extract(epoch FROM expires_at - now())::int FROM holds"
        )
    )
    assert states[known.hold_id] == "held 60"
    assert states[spared.hold_id] == "held 30"
    assert states[lost.hold_id].startswith("voided")
    assert states[foreign.hold_id] == "held 30"
    check_invariants(world.url)


async def test_a_renewal_reports_which_holds_it_moved(world: HoldWorld) -> None:
    """All but ended holds and those that are about to end elsewhere."""
    payer, owner = world.tenant(), uuid.uuid4()
    kept, ended, being_ended = (admit(payer) for _ in range(3))
    await world.run(kept, ended, being_ended, process_id=owner)
    await world.run(settle(ended.hold_id, 1))
    hold_ids = frozenset({kept.hold_id, ended.hold_id, being_ended.hold_id})
    with psycopg.connect(psycopg_conninfo(world.url)) as sweeper:
        sweeper.execute("SELECT FROM holds WHERE id = %s FOR UPDATE", (being_ended.hold_id,))

        assert await world.run(Renew(owner, hold_ids), process_id=owner) == [
            Renewed(frozenset({kept.hold_id}))
        ]

    assert await world.run(Renew(owner, hold_ids), process_id=owner) == [
        Renewed(frozenset({kept.hold_id, being_ended.hold_id}))
    ]


async def test_a_hold_with_delivered_tokens_is_never_voided(world: HoldWorld) -> None:
    op = admit(world.tenant())
    await world.run(op)
    await world.run(Extend(op.hold_id, 3, 0, 5))

    (answer,) = await world.run(Void(op.hold_id))

    assert isinstance(answer, InvariantViolated)
    assert world.hold_count() == 1


async def test_a_request_extended_and_failed_before_delivery_is_voided(play: Play) -> None:
    """Posted input is reversed; nothing is billed or held."""
    await play("""
    quota alice concurrent_requests 1       ok
    quota alice tokens_per_month 100        ok
    quota alice requests_per_minute 5       ok
    admit alice r1 10+20                    leased 20
    extend r1 0 20                          leased 40
    void r1                                 done
    counter alice concurrent_requests       0/0
    counter alice tokens_per_month          0/0
    counter alice requests_per_minute       0/0
    events r1                               none
    """)


async def test_a_void_takes_back_what_extensions_posted_in_past_windows(play: Play) -> None:
    """Other requests of the same windows keep their usage."""
    await play("""
    clock 2026-11-30 23:59:30               ok
    quota alice tokens_per_minute 100       ok
    quota alice tokens_per_day 100          ok
    quota alice tokens_per_month 100        ok
    quota alice cost_picos_per_month 1000   ok
    quota alice prepaid_credit_picos 1000   ok
    admit alice r0 10+5                     leased 5
    settle r0 5                             used 10+5 cost 65
    admit alice r1 10+10                    leased 10
    extend r1 0~4 10                        leased 20
    clock 2026-12-01 00:00:10               ok
    extend r1 0~4 10                        leased 30
    clock 2026-12-01 00:01:10               ok
    extend r1 0~4 10                        leased 40
    counter alice tokens_per_minute         25/0 0/0 0/40
    counter alice cost_picos_per_month      87/0 0/280
    counter alice prepaid_credit_picos      87/280
    void r1                                 done
    counter alice tokens_per_minute         15/0 0/0 0/0
    counter alice tokens_per_day            15/0 0/0
    counter alice tokens_per_month          15/0 0/0
    counter alice cost_picos_per_month      65/0 0/0
    counter alice prepaid_credit_picos      65/0
    """)


async def test_an_extended_orphan_leaves_nothing_when_its_owner_renews(play: Play) -> None:
    """Journal recovery thus ends requests of a dead process without any delivery."""
    await play("""
    quota alice tokens_per_month 100        ok
    quota alice prepaid_credit_picos 1000   ok
    admit alice r1 10+20                    leased 20
    extend r1 0 10                          leased 30
    renew server                            done
    state r1                                voided
    counter alice tokens_per_month          0/0
    counter alice prepaid_credit_picos      0/0
    """)


async def test_an_expired_hold_keeps_its_lease_but_bills_lifetime_credit(play: Play) -> None:
    """A window ends; unspent credit would be lost. A late report of the owner is added."""
    await play("""
    quota alice tokens_per_month 200        ok
    quota alice prepaid_credit_picos 1000   ok
    admit alice r1 10+20                    leased 20
    admit alice r2 10+20                    leased 20
    admit alice r3 10+20                    leased 20
    extend r2 0 10                          leased 30
    extend r3 5 10                          leased 30
    clock 2026-11-20 12:01:30               ok
    expire r1 & expire r2 & expire r3       done & done & done
    counter alice tokens_per_month          110/0
    counter alice prepaid_credit_picos      65/0
    events r1                               none
    events r3                               10+5
    settle r1 20 recovered                  used 10+20 cost 170
    settle r2 3 recovered                   used 10+3 cost 51
    settle r3 7 recovered                   used 10+7 cost 79
    counter alice tokens_per_month          60/0
    counter alice prepaid_credit_picos      300/0
    """)


@pytest.mark.parametrize("act", ["extend r1 22 5", "extend r1 4 5", "settle r1 41", "settle r1 4"])
async def test_impossible_counts_are_refused_without_a_trace(
    world: HoldWorld, play: Play, act: str
) -> None:
    played = await play("""
    admit alice r1 10+20                    leased 20
    extend r1 5 1                           leased 21
    """)
    before = world.contents()

    assert await played.act(act.split()) == "invariant_violated"
    assert world.contents() == before


async def test_recovery_from_a_cut_journal_bills_what_the_extension_knew(play: Play) -> None:
    """A machine that crashes may lose records that were not yet on disk."""
    await play("""
    quota alice tokens_per_month 100        ok
    admit alice r1 10+20                    leased 20
    extend r1 15 20                         leased 40
    settle r1 4 recovered                   used 10+15 cost 135
    counter alice tokens_per_month          25/0
    """)


async def test_a_voided_hold_cannot_be_settled(play: Play) -> None:
    await play("""
    admit alice r1 10+20                    leased 20
    void r1                                 done
    settle r1 5                             hold_ended
    extend r1 5 5                           hold_ended
    events r1                               none
    """)


async def test_an_unknown_hold_has_its_own_error(world: HoldWorld) -> None:
    answers = await world.run(
        settle(uuid.uuid4(), 1), Extend(uuid.uuid4(), 0, 0, 1), Void(uuid.uuid4())
    )

    assert [getattr(answer, "reason", answer) for answer in answers] == [
        "NOT_FOUND",
        "NOT_FOUND",
        Ended(done=False),
    ]


async def test_an_operation_that_breaks_its_batch_does_not_harm_others(world: HoldWorld) -> None:
    payer = world.tenant()
    poisoned = structs.replace(admit(payer), labels={"a": "\0"})
    fine = [admit(payer), admit(payer)]

    answers = await world.run(fine[0], poisoned, fine[1])

    assert [type(answer).__name__ for answer in answers] == [
        "Admitted",
        "InvariantViolated",
        "Admitted",
    ]
    check_invariants(world.url)
