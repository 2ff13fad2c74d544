"""The checker of invariants sees what it is meant to see: each rule is shown one planted fault."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.rows import dict_row

from metering.models import QuotaDimension
from metering.operations import Expire, Extend
from metering.store.db import psycopg_conninfo
from tests.metering.hold_world import HoldWorld, admit, hold_world, settle
from tests.metering.invariants import check_invariants, find_violations, violations_in

EVENT_COLUMNS = """
    organization_id, project_id, api_key_id, request_id, model, outcome, input_token_count, cached_input_token_count,
    generated_token_count, delivered_token_count, billed_token_count, price_version_id, cost_picos, labels, admitted_at
"""


@pytest.fixture
def world(database_url: str) -> Iterator[HoldWorld]:
    with hold_world(database_url) as world:
        yield world


async def busy(world: HoldWorld) -> None:
    """One settled, one voided, one expired, one live and one live and extended hold, charged to a quota of every dimension."""
    payer = world.tenant()
    for dimension in QuotaDimension:
        world.quota(payer, dimension, 10_000)
    settled, expiring, voided = admit(payer), admit(payer), admit(payer)
    await world.run(settled, expiring, voided)
    await world.run(settle(settled.hold_id, 5), Extend(expiring.hold_id, 3, 0, 10))
    world.advance(120)
    await world.run(Expire(expiring.hold_id), Expire(voided.hold_id))
    live, extended = admit(payer), admit(payer)
    await world.run(live, extended)
    world.advance(30)
    await world.run(Extend(extended.hold_id, 2, 4, 10))
    world.advance(60)
    await world.run(Extend(extended.hold_id, 7, 4, 10))


async def test_a_database_in_order_has_no_violations(world: HoldWorld) -> None:
    await busy(world)

    check_invariants(world.url)


RAISED = "UPDATE quotas SET limit_value = 5, raised_limit_value = 6, raise_reason = 'test', raised_until ="
FAULTS = [
    ("UPDATE quota_counters SET held = held + 1 WHERE held > 0", "held"),
    ("UPDATE quota_counters SET used = used + 1 WHERE used > 0", "used"),
    ("UPDATE quota_counters SET used = used - 1 WHERE used > 0", "but holds left"),
    ("DELETE FROM quota_counters WHERE held > 0", "is missing"),
    ("UPDATE quotas SET limit_value = 5", "exceed the limit 5"),
    (f"{RAISED} now() - interval '1 day'", "exceed the limit 5"),
    (f"{RAISED} now() + interval '1 day'", "exceed the limit 6"),
    ("UPDATE quotas SET output_weight_milli = 1001 WHERE dimension = 'tokens_per_day'", "holds left"),
    ("UPDATE quotas SET cached_input_weight_milli = 500 WHERE dimension = 'input_tokens_per_minute'", "holds left"),
    ("UPDATE quotas SET input_weight_milli = 900 WHERE dimension = 'tokens_per_month'", "holds left"),
    ("UPDATE quotas SET output_weight_milli = 900 WHERE dimension = 'tokens_per_month'", "live holds claim"),
    ("UPDATE holds SET posted_minutes[2] = posted_minutes[2] + 1 WHERE cardinality(posted_minutes) > 0", "holds left"),
    ("UPDATE holds SET posted_minutes = '{}'", "holds left"),
    ("UPDATE holds SET leased_token_count = leased_token_count + 1 WHERE state = 'held'", "live holds claim"),
    ("DELETE FROM usage_events WHERE outcome = 'stop'", "0 usage events"),
    ("UPDATE usage_events SET delivered_token_count = 4, billed_token_count = 4 WHERE outcome = 'stop'", "with 4 tokens"),
    ("UPDATE usage_events SET billed_token_count = 4 WHERE outcome = 'stop'", "bills 4 of 5"),
    ("UPDATE usage_events SET cost_picos = cost_picos + 1", "by its price version"),
    ("UPDATE usage_events SET request_id = gen_random_uuid()", "another story"),
    ("UPDATE usage_events SET input_token_count = 9", "9 input tokens"),
    ("UPDATE usage_events SET part = 1", "has the parts [1]"),
    (f"INSERT INTO usage_events (hold_id, part, {EVENT_COLUMNS}) SELECT hold_id, 1, {EVENT_COLUMNS} FROM usage_events", "2 usage"),
    (
        "UPDATE usage_events SET hold_id = (SELECT id FROM holds WHERE state = 'held' LIMIT 1) WHERE part = 0 AND id = 1",
        "has a usage",
    ),
    ("UPDATE usage_events SET hold_id = gen_random_uuid()", "there is no such hold"),
    ("UPDATE holds SET state = 'voided', ended_at = now() WHERE state = 'held'", "held"),
    ("UPDATE holds SET request_id = '00000000-0000-0000-0000-000000000001'", "has 5 holds"),
    ("UPDATE holds SET project_id = (SELECT id FROM projects WHERE name = 'other')", "do not belong together"),
]


async def test_each_planted_fault_is_seen(world: HoldWorld) -> None:
    await busy(world)
    other = world.one("INSERT INTO organizations (name, currency_code) VALUES ('other', 'USD') RETURNING id")
    world.execute("INSERT INTO projects (organization_id, name) VALUES (%s, 'other')", other)
    check_invariants(world.url)

    unseen = []
    with psycopg.connect(psycopg_conninfo(world.url), row_factory=dict_row) as connection:
        for fault, told in FAULTS:
            connection.execute("DROP INDEX uq_holds_request")
            connection.execute("SET LOCAL session_replication_role = replica")  # no triggers, no foreign keys
            connection.execute(fault.encode())
            found = list(violations_in(connection))
            connection.rollback()
            if not any(told in violation for violation in found):
                unseen.append((fault, found))

    assert not unseen


async def test_a_live_hold_is_a_violation_only_once_all_must_have_ended(world: HoldWorld) -> None:
    op = admit(world.tenant(), hold_id=uuid.uuid4())
    await world.run(op)

    check_invariants(world.url)

    assert [str(op.hold_id) in found for found in find_violations(world.url, all_ended=True)] == [True]
