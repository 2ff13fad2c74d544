"""`weir fsck`: each check detects planted faults."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.configuration.configuration import (
    Configuration,
    OrganizationSpec,
    QuotaSpec,
    apply_configuration,
)
from metering.core.models import QuotaDimension, QuotaKey
from metering.export.deliveries import form_batches
from metering.holds.operations import Expire, Extend, Void
from metering.ledger.rating import rate_all_pending
from metering.plans.prepaid import set_prepaid
from metering.proof.check import Moment
from metering.proof.counter_checks import WITHIN_LIMITS
from metering.proof.fsck import CHECKS, fsck
from metering.proof.schema_checks import TRIGGERS
from metering.quotas.quota_admin import delete_quota, override_quota
from metering.receipts.signing import Signer
from metering.store.db import Sessions
from tests.metering.hold_world import HoldWorld, admit, settle
from tests.metering.invariants import check_invariants, find_violations
from tests.metering.planted_faults import faults, unseen
from tests.metering.usage import new_limit

EVENT_COLUMNS = (
    "organization_id, project_id, api_key_id, request_id, model, outcome, input_token_count,"
    " cached_input_token_count, generated_token_count, delivered_token_count, billed_token_count,"
    " price_version_id, cost_picos, labels, admitted_at"
)

# Halves of a thousandth, and numbers whose product is not exact, are rounded alike everywhere.
TIMINGS = {
    "ttft_ms": 48.1005,
    "itl_p50_ms": 0.0015,
    "itl_p99_ms": 1.0005,
    "itl_max_ms": 31.000499999999995,
    "tokens_per_second": 1e-05,
    "client_stall_ms": 123456.7895,
    "total_ms": 3.5,
}
SCHEMA_FAULTS = faults("""
    accepts direct writes                | ALTER TABLE usage_events_default DISABLE TRIGGER
                                         | usage_events_partition
    is disabled                          | ALTER TABLE ledger_entries DISABLE TRIGGER
                                         | ledger_entries_append_only
    is missing                           | DROP TRIGGER holds_end_once ON holds
    calls allow instead of refuse_change | CREATE FUNCTION allow() RETURNS trigger LANGUAGE plpgsql
                                         | AS 'BEGIN RETURN NEW; END'; DROP TRIGGER
                                         | audit_log_append_only ON audit_log; CREATE TRIGGER
                                         | audit_log_append_only BEFORE UPDATE ON audit_log FOR EACH
                                         | ROW EXECUTE FUNCTION allow()
    is not validated                     | ALTER TABLE holds ADD CONSTRAINT few CHECK (part_count <
                                         | 2) NOT VALID
""")
LATER = datetime.now(UTC) + timedelta(hours=1)


async def busy(world: HoldWorld) -> None:
    """A settled, a voided, an expired, a live, and a live and extended hold, charged to a quota of
    every dimension.

    Receipts are signed.
    """
    signer = Signer(Ed25519PrivateKey.generate())
    payer = world.tenant()
    for dimension in QuotaDimension:
        world.quota(payer, dimension, 10_000)
    labels = {"team": "search", "größe": "m"}
    settled = admit(payer, end_user="user-4711", labels=labels)
    expiring, voided = admit(payer), admit(payer)
    await world.run(settled, expiring, voided)
    timed = msgspec.structs.replace(settle(settled.hold_id, 5), timings=TIMINGS)
    await world.run(timed, Extend(expiring.hold_id, 3, 0, 10), signer=signer)
    world.advance(120)
    await world.run(Expire(expiring.hold_id), Expire(voided.hold_id), signer=signer)
    live, extended = admit(payer), admit(payer)
    await world.run(live, extended)
    world.advance(30)
    await world.run(Extend(extended.hold_id, 2, 4, 10))
    world.advance(60)
    await world.run(Extend(extended.hold_id, 7, 4, 10))


async def test_a_database_in_order_has_no_violations(world: HoldWorld) -> None:
    await busy(world)

    check_invariants(world.url)


RAISED = (
    "UPDATE quotas SET limit_value = 5, override_limit_value = 6, override_reason = 'test',"
    " override_until ="
)
FAULTS = faults(f"""
    missing from unrated_usage          | DELETE FROM unrated_usage
    held                                | UPDATE quota_counters SET held = held + 1 WHERE held > 0
    used                                | UPDATE quota_counters SET used = used + 1 WHERE used > 0
    but holds used                      | UPDATE quota_counters SET used = used - 1 WHERE used > 0
    is missing                          | DELETE FROM quota_counters WHERE held > 0
    exceed the limit 5                  | UPDATE quotas SET limit_value = 5
    exceed the limit 5                  | {RAISED} now() - interval '1 day'
    exceed the limit 6                  | {RAISED} now() + interval '1 day'
    holds used                          | UPDATE quotas SET output_weight_milli = 1001 WHERE
                                        | dimension = 'tokens_per_day'
    holds used                          | UPDATE quotas SET cached_input_weight_milli = 500 WHERE
                                        | dimension = 'input_tokens_per_minute'
    holds used                          | UPDATE quotas SET input_weight_milli = 900 WHERE dimension
                                        | = 'tokens_per_month'
    live holds reserve                  | UPDATE quotas SET output_weight_milli = 900 WHERE
                                        | dimension = 'tokens_per_month'
    holds used                          | UPDATE holds SET posted_minutes[2] = posted_minutes[2] + 1
                                        | WHERE cardinality(posted_minutes) > 0
    holds used                          | UPDATE holds SET posted_minutes = '{{}}'
    live holds reserve                  | UPDATE holds SET leased_token_count = leased_token_count +
                                        | 1 WHERE state = 'held'
    0 usage events                      | DELETE FROM usage_events WHERE outcome = 'stop'
    with 4 tokens                       | UPDATE usage_events SET delivered_token_count = 4,
                                        | billed_token_count = 4 WHERE outcome = 'stop'
    bills 4 of 5                        | UPDATE usage_events SET billed_token_count = 4 WHERE
                                        | outcome = 'stop'
    has 6 reasoning tokens of 5         | UPDATE usage_events SET reasoning_token_count = 6 WHERE
                                        | outcome = 'stop'
    bills 3 of 4 reasoning tokens       | UPDATE usage_events SET reasoning_token_count = 4,
                                        | billed_reasoning_token_count = 3 WHERE outcome = 'stop'
    by its price version                | UPDATE usage_events SET cost_picos = cost_picos + 1
    differs from its hold               | UPDATE usage_events SET request_id = gen_random_uuid()
    9 input tokens                      | UPDATE usage_events SET input_token_count = 9
    has the parts 1 to 1                | UPDATE usage_events SET part = 1
    2 usage                             | INSERT INTO usage_events (hold_id, part, {EVENT_COLUMNS})
                                        | SELECT hold_id, 1, {EVENT_COLUMNS} FROM usage_events
    has a usage                         | UPDATE usage_events SET hold_id = (SELECT id FROM holds
                                        | WHERE state = 'held' LIMIT 1) WHERE part = 0 AND id = 1
    the hold does not exist             | UPDATE usage_events SET hold_id = gen_random_uuid()
    held                                | UPDATE holds SET state = 'voided', ended_at = now() WHERE
                                        | state = 'held'
    has 5 holds                         | UPDATE holds SET request_id =
                                        | '00000000-0000-0000-0000-000000000001'
    do not belong together              | UPDATE holds SET project_id = (SELECT id FROM projects
                                        | WHERE name = 'other')
    end user of another customer        | UPDATE holds SET end_user_id = gen_random_uuid() WHERE
                                        | state = 'settled'
    end user of another customer        | UPDATE usage_subjects SET organization_id = (SELECT id
                                        | FROM organizations WHERE name = 'other')
    quota of another customer           | UPDATE holds SET quota_ids = (SELECT array_agg(id) FROM
                                        | quotas WHERE limit_value = 9)
    priced as model demo                | UPDATE holds SET model = 'another'
    before the price began              | UPDATE price_versions SET effective_at = now() + interval
                                        | '1 day'
    another customer's own              | UPDATE price_versions SET organization_id = (SELECT id
                                        | FROM organizations WHERE name = 'other')
    ends a price                        | UPDATE price_versions SET organization_id = (SELECT
                                        | organization_id FROM holds LIMIT 1), withdrawn = true
    is not posted                       | UPDATE usage_events SET rated_at = now() WHERE id = 1
    is not posted                       | UPDATE usage_events SET rated_at = now(),
                                        | ledger_transaction_id = 4711 WHERE id = 1
    receipt-matches-usage               | UPDATE usage_events SET outcome = 'length'
    receipt-matches-usage               | UPDATE usage_events SET timings = jsonb_set(timings,
                                        | '{{itl_max_ms}}', '0.001')
    receipt-matches-usage               | UPDATE usage_events SET receipt_is_timed = NOT
                                        | receipt_is_timed
    receipt-matches-usage               | UPDATE usage_events SET settled_at = settled_at + interval
                                        | '1 microsecond'
    receipt-matches-usage               | UPDATE usage_events SET receipt_labels_hash =
                                        | receipt_end_user_hash
    receipt-matches-usage               | UPDATE usage_events SET receipt_end_user_hash = NULL
    hash of another end user            | UPDATE usage_subjects SET name = 'user-4712'
    hash of another end user            | UPDATE usage_subjects SET receipt_salt =
                                        | decode(repeat('01', 32), 'hex')
    hash of other labels                | UPDATE usage_events SET labels = labels ||
                                        | '{{"team": "x"}}'
    hash of other labels                | UPDATE usage_events SET labels = labels - 'team'
    hash of other labels                | UPDATE usage_events SET labels = '{{}}'
    comes after receipt 0               | UPDATE usage_events SET receipt_sequence =
                                        | receipt_sequence + 1
    exists twice                        | UPDATE usage_events SET receipt_sequence = 1
    does not name the receipt before it | UPDATE usage_events SET previous_receipt_hash =
                                        | receipt_hash
    before the receipt before it        | UPDATE usage_events SET settled_at = settled_at - interval
                                        | '1 day' WHERE receipt_sequence = 2
    another hash than its last receipt  | UPDATE receipt_chains SET last_hash = decode(repeat('01',
                                        | 32), 'hex')
    its last one is 2                   | UPDATE receipt_chains SET last_sequence = 1 WHERE
                                        | last_sequence = 2
    ends at 2020-01-01                  | UPDATE receipt_chains SET last_settled_at = '2020-01-01'
    has no chain of receipts            | DELETE FROM receipt_chains
    is not among the receipts of batch  | UPDATE receipt_batches SET hashes = decode(repeat('01',
                                        | 32), 'hex')
    more or fewer hashes                | UPDATE receipt_batches SET hashes = hashes || hashes
    does not exist                      | DELETE FROM receipt_batches
    does not match its public key       | UPDATE receipt_keys SET public_key = decode(repeat('01',
                                        | 32), 'hex')
""")


LEDGER_FAULTS = faults("""
    1 times in unrated_usage    | INSERT INTO unrated_usage SELECT id, hold_id, part, settled_at,
                                | organization_id FROM usage_events
    is not rated but is in      | UPDATE usage_events SET rated_at = NULL WHERE id = (SELECT min(id)
                                | FROM usage_events)
    0 tokens for 0 picos used   | UPDATE usage_events SET rated_at = NULL, ledger_transaction_id =
                                | NULL
    or is not for usage         | UPDATE ledger_transactions SET kind = 'plan'
    tokens for                  | UPDATE ledger_entries SET token_count = token_count + 1 WHERE
                                | token_kind = 'output'
    does not sum to zero:       | UPDATE ledger_entries SET amount_picos = amount_picos + 1 WHERE
                                | token_kind = 'output'
    picos posted                | UPDATE ledger_entries SET amount_picos = amount_picos * 2
    0 tokens for 0 picos posted | UPDATE ledger_entries SET token_kind = 'input' WHERE token_kind =
                                | 'output'
    another customer            | UPDATE ledger_transactions SET organization_id = (SELECT id FROM
                                | organizations WHERE name = 'other')
    another currency            | UPDATE ledger_accounts SET currency_code = 'EUR'
    has no entries              | DELETE FROM ledger_entries
    usage-equals-ledger         | UPDATE ledger_transactions SET effective_at = effective_at -
                                | interval '1 month'
    nothing-is-exported-twice   | UPDATE meter_batches SET token_count = token_count + 1
    has the parts 1 to 1        | UPDATE meter_batches SET part = 1
    all-usage-is-exported       | UPDATE meter_batches SET state = 'cancelled'
    exports only 0              | DELETE FROM meter_batches WHERE token_kind = 'output'
    closed-hours-are-exported   | DELETE FROM meter_batches WHERE token_kind = 'output'
""")


def add_stranger(world: HoldWorld) -> None:
    """Create another customer with a project and a quota."""
    other = world.one(
        "INSERT INTO organizations (name, currency_code) VALUES ('other', 'USD') RETURNING id"
    )
    world.execute("INSERT INTO projects (organization_id, name) VALUES (%s, 'other')", other)
    world.execute(
        "INSERT INTO quotas (subject, subject_id, dimension, limit_value) VALUES ('organization',"
        " %s, 'tokens_per_day', 9)",
        other,
    )


async def test_each_fault_planted_in_holds_and_usage_is_seen(world: HoldWorld) -> None:
    await busy(world)
    add_stranger(world)
    check_invariants(world.url)

    assert unseen(world.url, FAULTS, Moment.ALWAYS) == []


async def test_each_fault_behind_the_usage_is_seen(world: HoldWorld, sessions: Sessions) -> None:
    await busy(world)
    add_stranger(world)
    await rate_all_pending(sessions)
    world.advance(7200)
    await form_batches(sessions)
    every_moment = [verdict for verdict in fsck(world.url, CHECKS) if verdict.violation_count]
    assert {verdict.check.name for verdict in every_moment} <= {
        "no-live-holds",
        "holds-are-swept",
    }

    assert unseen(world.url, LEDGER_FAULTS, *Moment) == []


LIFETIME_FAULTS = faults("""
    are in the ledger            | UPDATE quota_counters SET used = used + 1
    are in the ledger            | UPDATE quota_counters SET used = used - 1
    used 0 picos, but            | DELETE FROM quota_counters
    prepaid-credit-equals-ledger | UPDATE ledger_entries SET amount_picos = amount_picos * 2
    0 wait to be rated           | DELETE FROM usage_events WHERE rated_at IS NULL
    posted by live holds         | UPDATE holds SET posted_cost_picos = posted_cost_picos + 1 WHERE
                                 | state = 'held'
    0 are posted by live holds   | UPDATE holds SET state = 'voided', ended_at = now() WHERE state =
                                 | 'held'
""")


async def test_each_fault_of_prepaid_credit_is_seen(world: HoldWorld, sessions: Sessions) -> None:
    """Holds in every state: settled, rated, extended, voided and expired."""
    payer = world.tenant()
    async with sessions.begin() as session:
        await set_prepaid(session, organization="acme", prepaid=True, actor="test")
    world.execute("UPDATE quotas SET limit_value = 100000")
    rated, waiting, voided, expired, live = (admit(payer) for _ in range(5))
    await world.run(rated, waiting, voided, expired, live)
    await world.run(settle(rated.hold_id, 5))
    await rate_all_pending(sessions)
    await world.run(
        settle(waiting.hold_id, 6),
        *(Extend(op.hold_id, 0, 2, 10) for op in (voided, expired, live)),
    )
    await world.run(Void(voided.hold_id))
    world.execute("UPDATE holds SET expires_at = now() WHERE id = %s", expired.hold_id)
    await world.run(Expire(expired.hold_id))
    check_invariants(world.url)
    assert world.one("SELECT used FROM quota_counters") == 65 + 72 + 26

    assert unseen(world.url, LIFETIME_FAULTS, Moment.ALWAYS) == []


async def test_amounts_that_a_void_leaves_in_a_window_are_detected(world: HoldWorld) -> None:
    """Counters of tokens and of money, of this window and of an earlier one."""
    payer = world.tenant()
    for dimension in (
        QuotaDimension.TOKENS_PER_MINUTE,
        QuotaDimension.COST_PICOS_PER_DAY,
        QuotaDimension.TOKENS_PER_MONTH,
    ):
        world.quota(payer, dimension, 10_000)
    op = admit(payer)
    await world.run(op)
    await world.run(Extend(op.hold_id, 0, 0, 10))
    world.advance(60)
    await world.run(Extend(op.hold_id, 0, 0, 10))
    left = world.rows("SELECT quota_id, window_start, used FROM quota_counters WHERE used > 0")
    await world.run(Void(op.hold_id))
    check_invariants(world.url)
    left_over = [
        (
            (
                f"UPDATE quota_counters SET used = {used} WHERE quota_id = '{quota_id}' AND"
                f" window_start = '{start}'"
            ),
            "used",
        )
        for quota_id, start, used in left
    ]

    assert len(left_over) == 3
    assert unseen(world.url, left_over, Moment.ALWAYS) == []


async def test_each_fault_planted_in_the_schema_is_seen(world: HoldWorld) -> None:
    world.execute("ALTER TABLE holds ADD part_count int")

    assert unseen(world.url, SCHEMA_FAULTS, Moment.ALWAYS) == []


def test_the_guards_that_are_required_are_those_of_a_migrated_database(world: HoldWorld) -> None:
    """A new trigger belongs in `metering/proof/schema_checks.py`, so that its loss is detected."""
    query = """SELECT tgname, proname FROM pg_trigger t JOIN pg_proc p ON p.oid = tgfoid
               WHERE NOT tgisinternal AND tgparentid = 0"""

    assert dict(world.rows(query)) == TRIGGERS


def test_every_check_has_a_description_and_a_unique_name() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.proves.endswith(".") for check in CHECKS)


async def test_a_live_hold_is_a_violation_only_once_all_must_have_ended(world: HoldWorld) -> None:
    op = admit(world.tenant(), hold_id=uuid.uuid4())
    await world.run(op)

    check_invariants(world.url)

    assert [str(op.hold_id) in found for found in find_violations(world.url, all_ended=True)] == [
        True
    ]


async def test_a_new_limit_below_what_is_used_is_no_violation_and_a_failed_limit_is(
    database_url: str, sessions: Sessions
) -> None:
    with HoldWorld(database_url, now=None) as world:
        await check_new_limits(world, sessions)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limit on an organization, and the ways to change it. used: of it so far."""

    session: AsyncSession
    organization: uuid.UUID
    dimension: QuotaDimension
    used: int

    async def set(self, limit_value: int, **terms: Any) -> str:
        """Set the limit and return its id."""
        state = await new_limit(
            self.session, str(self.organization), self.dimension, limit_value, **terms
        )
        return str(state.rule.id)

    async def override(self, quota_id: str, limit_value: int, until: datetime | None) -> None:
        """Set a temporary override, or end it without a time."""
        await override_quota(
            self.session,
            quota_id=quota_id,
            limit_value=limit_value,
            until=until,
            reason="test",
            actor="test",
        )

    async def raised(self) -> str:
        """Set a limit below what is used, and an override above it; return the limit's id."""
        quota_id = await self.set(2)
        await self.override(quota_id, self.used + 9, LATER)
        return quota_id

    async def apply(self, limit_value: int) -> None:
        """Apply a configuration with the limit."""
        limit = QuotaKey(self.dimension), QuotaSpec(limit_value)
        work = await apply_configuration(
            self.session,
            Configuration((OrganizationSpec("acme", quotas=(limit,)),)),
            actor="test",
            own_key_id=uuid.uuid4(),
            models=[],
            dry_run=False,
        )
        assert not work.violations
        assert work.changes


async def newly_set(limits: Limits) -> None:
    await limits.set(2)


async def lowered(limits: Limits) -> None:
    await limits.set(limits.used + 5)
    await limits.set(2)


async def applied(limits: Limits) -> None:
    await limits.apply(2)


async def lowered_by_apply(limits: Limits) -> None:
    await limits.apply(limits.used + 5)
    await limits.apply(2)


async def override_lowered(limits: Limits) -> None:
    quota_id = await limits.raised()
    await limits.override(quota_id, 3, LATER)


async def override_ended_by_hand(limits: Limits) -> None:
    quota_id = await limits.raised()
    await limits.override(quota_id, 0, None)


async def override_ended_by_time(limits: Limits) -> None:
    quota_id = await limits.raised()
    await limits.session.execute(
        text("UPDATE quotas SET override_until = clock_timestamp() WHERE id = :id"),
        {"id": quota_id},
    )


async def override_ended_by_a_limit(limits: Limits) -> None:
    quota_id = await limits.set(2)
    await limits.override(quota_id, 4, LATER)
    await limits.set(4)


async def enforced_again(limits: Limits) -> None:
    await limits.set(2, enforced=False)
    await limits.set(2, enforced=True)


async def set_again(limits: Limits) -> None:
    await delete_quota(limits.session, quota_id=await limits.set(limits.used + 5), actor="test")
    await limits.set(2)


async def weighed_more(limits: Limits) -> None:
    await limits.set(limits.used + 5)
    weights = ("input_weight_milli", "cached_input_weight_milli", "output_weight_milli")
    await limits.set(limits.used + 5, **dict.fromkeys(weights, 9000))


WAYS = [
    newly_set,
    lowered,
    applied,
    lowered_by_apply,
    override_lowered,
    override_ended_by_hand,
    override_ended_by_time,
    override_ended_by_a_limit,
    enforced_again,
    set_again,
    weighed_more,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_limit_below_what_is_used_is_no_violation_however_it_came_about(
    database_url: str, sessions: Sessions, way: Callable[[Limits], Awaitable[None]]
) -> None:
    """Each change is a transaction of its own, as every administrator's is."""
    with HoldWorld(database_url, now=None) as world:
        payer = world.tenant()
        used = admit(payer)
        await world.run(used)
        await world.run(settle(used.hold_id, 5))
        dimensions = {QuotaDimension.COST_PICOS_PER_DAY: 65} if way is not weighed_more else {}
        dimensions |= {QuotaDimension.TOKENS_PER_MONTH: 15, QuotaDimension.TOKENS_PER_DAY: 15}
        for dimension, amount in dimensions.items():
            async with sessions.begin() as session:
                await way(Limits(session, payer.organization_id, dimension, amount))
        counters = world.rows(
            "SELECT used FROM quota_counters c JOIN quotas q ON q.id = quota_id"
            " WHERE q.deleted_at IS NULL AND used > limit_value"
        )

        assert len(counters) >= 2, "a limit is exceeded"
        assert [each for each in find_violations(world.url) if WITHIN_LIMITS.name in each] == []


async def check_new_limits(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    used = admit(payer)
    await world.run(used)
    await world.run(settle(used.hold_id, 5))
    dimensions = (QuotaDimension.TOKENS_PER_MONTH, QuotaDimension.COST_PICOS_PER_DAY)
    for dimension in dimensions:
        for model in ("", used.model):
            for limit_value in (3, 2):  # new, and lowered
                async with sessions.begin() as session:
                    state = await new_limit(
                        session, str(payer.organization_id), dimension, limit_value, model=model
                    )

    assert [each for each in find_violations(world.url) if WITHIN_LIMITS.name in each] == []
    admitted_since = (
        f"UPDATE holds SET quota_ids = quota_ids || '{state.rule.id}'::uuid, admitted_at ="
        " (SELECT max(created_at) FROM audit_log) + interval '2 minutes'"
    )
    no_change = "UPDATE audit_log SET action = 'quota.note' WHERE action = 'quota.set'"
    assert unseen(world.url, [(admitted_since, "exceed the limit 2")], Moment.ALWAYS) == []
    assert unseen(world.url, [(no_change, "exceed the limit 2")], Moment.ALWAYS) == []
