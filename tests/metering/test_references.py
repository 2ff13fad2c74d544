"""References of holds and usage events: the database refuses missing or mismatched ones."""

from __future__ import annotations

import psycopg
import pytest

from tests.metering.hold_world import HoldWorld

PLANT_HOLD = """
INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model,
                   price_version_id, labels, process_id, input_token_count, leased_token_count,
                   quota_ids, expires_at)
SELECT gen_random_uuid(), %s, %s, %s, gen_random_uuid(), '', 'demo', %s,
       '{}', gen_random_uuid(), 1, 1, '{}', now() RETURNING id
"""
PLANT_EVENT = """
INSERT INTO usage_events (hold_id, organization_id, project_id, api_key_id, request_id, model,
    outcome, input_token_count, cached_input_token_count, generated_token_count,
    delivered_token_count, billed_token_count, price_version_id, cost_picos, labels, admitted_at)
SELECT {hold_id}, organization_id, {project_id}, api_key_id, request_id, model, 'stop', 0, 0, 0, 0,
       0, {price_version_id}, 0, '{{}}', admitted_at FROM holds
"""


def hold_of(world: HoldWorld, name: str = "acme") -> list[object]:
    """Return the ids of a hold's organization, project, key and price."""
    payer = world.tenant(name)
    return [payer.organization_id, payer.project_id, payer.api_key_id, world.price_version]


@pytest.mark.parametrize("index", [0, 1, 2, 3], ids=["organization", "project", "key", "price"])
def test_a_hold_of_parts_that_do_not_match_is_refused(world: HoldWorld, index: int) -> None:
    own, other = hold_of(world), [*hold_of(world, "other")[:3], 0]
    world.execute(PLANT_HOLD, *own)

    with pytest.raises(psycopg.errors.ForeignKeyViolation, match="must exist and belong together"):
        world.execute(PLANT_HOLD, *own[:index], other[index], *own[index + 1 :])


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("hold_id", "gen_random_uuid()"),
        ("project_id", "gen_random_uuid()"),
        ("price_version_id", "0"),
    ],
)
def test_a_usage_event_not_of_its_hold_fails(world: HoldWorld, column: str, value: str) -> None:
    world.execute(PLANT_HOLD, *hold_of(world))
    world.execute("UPDATE holds SET state = 'settled', ended_at = now()")
    right = {"hold_id": "id", "project_id": "project_id", "price_version_id": "price_version_id"}

    with pytest.raises(psycopg.errors.ForeignKeyViolation, match="no such hold"):
        world.execute(PLANT_EVENT.format(**right | {column: value}))
    world.execute(PLANT_EVENT.format(**right))


@pytest.mark.parametrize("table", ["organizations", "projects", "api_keys", "holds"])
def test_nothing_that_others_refer_to_is_deleted(world: HoldWorld, table: str) -> None:
    world.execute(PLANT_HOLD, *hold_of(world))

    for statement in (f"DELETE FROM {table}", f"TRUNCATE {table} CASCADE"):
        with pytest.raises(psycopg.errors.RestrictViolation, match="cannot be deleted"):
            world.execute(statement)
