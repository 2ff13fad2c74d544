"""Erasure of end users: the name is gone from every table, and every sum stays."""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from typing import Any

import psycopg
import pytest

from metering.core.models import QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admitted, Settled, Void
from metering.holds.read import BEGIN_ADMITTING
from metering.proof.check import Moment
from metering.quotas.erasure import Erased, Erasure
from metering.quotas.quota_admin import override_quota, set_quota
from metering.quotas.quota_rules import Payer
from metering.store.db import Sessions, psycopg_conninfo
from metering.tenants.admin_requests import take_changes_lock
from metering.tenants.usage_subjects import find_usage_subject
from tests.conftest import as_application
from tests.metering.hold_world import NOON, HoldWorld, admit, of_type, settle
from tests.metering.invariants import check_invariants
from tests.metering.planted_faults import unseen

SEEDS = [int(seed) for seed in os.environ.get("WEIR_TEST_SEEDS", "1,2,3").split(",")]
NAME = "alice-5ecf1a70"  # in no other value of any row
PER_DAY = QuotaDimension.TOKENS_PER_DAY


async def erase(
    sessions: Sessions, organization_id: uuid.UUID, name: str = NAME, rows_max: int = 2
) -> tuple[Erased, int]:
    """Erase a name as the call of administrators does."""
    erasure = Erasure(organization_id, name, "test")
    async with sessions.begin() as session:
        await take_changes_lock(session, alone=True)
        erased = await erasure.erase_names(session)
    return erased, await erasure.erase_labels(sessions, erased, rows_max)


async def limit(sessions: Sessions, payer: Payer, limit_value: int, **key: Any) -> uuid.UUID:
    """Set a limit on tokens per day within the payer's project."""
    async with sessions.begin() as session:
        state = await set_quota(
            session,
            subject=QuotaSubject.PROJECT,
            subject_ref=str(payer.project_id),
            key=QuotaKey(PER_DAY, **key),
            terms=QuotaTerms(limit_value),
            actor="test",
        )
    return state.quota_id


def tables_with(database_url: str, word: str) -> list[str]:
    """Return the tables of which a row has the word, partitions included."""
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        names = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1"
        ).fetchall()
        return [
            name
            for (name,) in names
            if connection.execute(
                f"SELECT FROM {name} t WHERE strpos(t::text, %s) > 0".encode(), [word]
            ).fetchone()
            is not None
        ]


async def test_an_erased_name_is_in_no_row_and_the_counters_agree(
    world: HoldWorld, sessions: Sessions, application: Sessions
) -> None:
    payer = world.tenant()
    labels = {"user": NAME, "team": "search"}
    await limit(sessions, payer, 10_000, for_each="end_user")
    await limit(sessions, payer, 10_000, for_each="label:user")
    own = await limit(sessions, payer, 5_000, end_user=NAME)
    async with sessions.begin() as session:
        until, reason = NOON.replace(hour=20), f"{NAME} asked for more"
        await override_quota(
            session, quota_id=str(own), limit_value=6_000, until=until, reason=reason, actor="test"
        )
    holds = [
        one.hold_id
        for one in of_type(
            Admitted,
            await world.run(*(admit(payer, end_user=NAME, labels=labels) for _ in range(4))),
        )
    ]
    await world.run(settle(holds[0], 5), Void(holds[1]))
    assert {"usage_subjects", "holds", "audit_log", "quotas"} <= set(tables_with(world.url, NAME))

    erased, request_count = await erase(application, payer.organization_id)

    assert tables_with(world.url, NAME) == []
    assert (erased, request_count) == (Erased(subject_count=2, limit_count=2), 4)
    check_invariants(world.url)
    # Those that ran go on, to the same end user without a name, and their events have no name.
    [settled] = await world.run(settle(holds[2], 7))
    assert isinstance(settled, Settled)
    assert tables_with(world.url, NAME) == []
    assert world.one("SELECT count(DISTINCT end_user_id) FROM usage_events") == 1
    assert world.rows("SELECT DISTINCT labels FROM holds") == [({"team": "search"},)]
    # The same name afterwards is a new end user, with the whole limit of the selector.
    [again] = await world.run(admit(payer, end_user=NAME))
    assert isinstance(again, Admitted)
    assert world.one("SELECT count(DISTINCT end_user_id) FROM holds") == 2
    check_invariants(world.url)


async def test_only_one_organization_loses_the_name(
    world: HoldWorld, application: Sessions
) -> None:
    acme, other = world.tenant(), world.tenant("other")
    for payer in (acme, other):
        [admitted] = of_type(
            Admitted, await world.run(admit(payer, end_user=NAME, labels={"user": NAME}))
        )
        await world.run(settle(admitted.hold_id, 1))
    before = world.rows(
        "SELECT t::text FROM holds t WHERE organization_id = %s", other.organization_id
    )

    await erase(application, acme.organization_id)

    assert before == world.rows(
        "SELECT t::text FROM holds t WHERE organization_id = %s", other.organization_id
    )
    async with application() as session:
        assert await find_usage_subject(session, other.organization_id, "end_user", "", NAME)
        assert not await find_usage_subject(session, acme.organization_id, "end_user", "", NAME)
    assert await erase(application, acme.organization_id) == (Erased(0, 0), 0)


async def test_a_selector_set_later_gives_no_limit_to_erased_end_users(
    world: HoldWorld, sessions: Sessions, application: Sessions
) -> None:
    payer = world.tenant()
    for end_user in (NAME, "bob"):
        [one, _] = of_type(
            Admitted, await world.run(*(admit(payer, end_user=end_user) for _ in range(2)))
        )
        await world.run(settle(one.hold_id, 5))
    await erase(application, payer.organization_id)

    await limit(sessions, payer, 10_000, for_each="end_user")

    assert world.one("SELECT count(*) FROM quotas WHERE selector_id IS NOT NULL") == 1
    check_invariants(world.url)
    fault = """
        UPDATE usage_subjects
        SET name = NULL, receipt_salt = NULL, erased_at = now(), archived_at = now()
    """
    planted = [(fault, "is in force for erased end_user")]
    assert unseen(world.url, planted, Moment.ALWAYS) == []


async def test_an_interrupted_erasure_continues_and_is_in_the_audit_log_without_the_name(
    world: HoldWorld, application: Sessions
) -> None:
    payer = world.tenant()
    await world.run(*(admit(payer, end_user=NAME, labels={"user": NAME}) for _ in range(3)))
    async with application.begin() as session:
        await Erasure(payer.organization_id, NAME, "ann").erase_names(session)
    assert tables_with(world.url, NAME) == ["holds"]

    assert await erase(application, payer.organization_id) == (Erased(0, 0), 3)

    assert tables_with(world.url, NAME) == []
    entries = world.rows("SELECT actor, subject_id FROM audit_log WHERE action = 'end_user.erase'")
    subject = world.one("SELECT id::text FROM usage_subjects")
    assert entries == [("ann", subject), ("test", str(payer.organization_id))]


@pytest.mark.parametrize("seed", SEEDS)
async def test_requests_that_are_admitted_meanwhile_belong_to_a_new_end_user(
    world: HoldWorld, application: Sessions, seed: int
) -> None:
    randomly = random.Random(seed)
    payer = world.tenant()
    await limit(application, payer, 10**9, for_each="end_user")
    is_over = asyncio.Event()

    async def send() -> None:
        async with HoldConnection(world.url, uuid.uuid4()) as holds:
            while not is_over.is_set():
                [one] = of_type(
                    Admitted,
                    await holds.execute([admit(payer, end_user=NAME, labels={"user": NAME})]),
                )
                if randomly.random() < 0.5:
                    await holds.execute([settle(one.hold_id, 1)])

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(send())
        for _ in range(3):
            await asyncio.sleep(0.2 * randomly.random())
            await erase(application, payer.organization_id, rows_max=50)
        is_over.set()

    assert (
        world.one("""
            SELECT count(*)
            FROM (
                SELECT end_user_id, labels FROM holds UNION ALL
                SELECT end_user_id, labels FROM usage_events
            ) r
            JOIN usage_subjects u ON u.id = r.end_user_id
            WHERE u.erased_at IS NOT NULL AND r.labels <> '{}'
        """)
        == 0
    )
    check_invariants(world.url)


async def test_erasing_waits_for_admissions_under_way(
    world: HoldWorld, application: Sessions
) -> None:
    payer = world.tenant()
    await world.run(admit(payer, end_user=NAME, labels={"user": NAME}))
    async with await psycopg.AsyncConnection.connect(psycopg_conninfo(world.url)) as admission:
        await admission.execute(BEGIN_ADMITTING.encode())
        await admission.execute("CREATE TEMPORARY TABLE other ON COMMIT DROP AS TABLE holds")
        await admission.execute("UPDATE other SET id = gen_random_uuid(), request_id = id")
        await admission.execute("INSERT INTO holds TABLE other")
        erasing = asyncio.create_task(erase(application, payer.organization_id))
        await asyncio.sleep(0.5)
        assert not erasing.done()
        await admission.commit()

        assert await erasing == (Erased(1, 0), 2)

    assert tables_with(world.url, NAME) == []


# Each with a part of the refusal. {} is the name that the transaction erases.
REFUSED = {
    "holds without erasing": ("", "UPDATE holds SET labels = '{{}}'", "already ended"),
    "events without erasing": ("", "UPDATE usage_events SET labels = '{{}}'", "append-only"),
    "another label": (NAME, "UPDATE holds SET labels = labels - 'team'", "already ended"),
    "all labels": (NAME, "UPDATE usage_events SET labels = '{{}}'", "append-only"),
    "another value": (
        NAME,
        "UPDATE usage_events SET labels = jsonb_set(labels, '{{user}}', '\"bob\"')",
        "append-only",
    ),
    "a cost beside the label": (
        NAME,
        "UPDATE usage_events SET labels = labels - 'user', cost_picos = cost_picos + 1",
        "append-only",
    ),
    "tokens beside the label": (
        NAME,
        "UPDATE holds SET labels = labels - 'user', delivered_token_count = 0",
        "already ended",
    ),
    "rating meanwhile": (
        NAME,
        "UPDATE usage_events SET rated_at = now(), ledger_transaction_id = 1",
        "append-only",
    ),
    "a name": ("", "UPDATE usage_subjects SET name = 'bob'", "only erasing"),
    "reasons of others": (
        NAME,
        """UPDATE audit_log SET after = after || '{{"override_reason": null}}'""",
        "append-only",
    ),
    "an audit entry": (NAME, "UPDATE audit_log SET after = NULL", "append-only"),
}


@pytest.mark.parametrize(("name", "statement", "refusal"), REFUSED.values(), ids=REFUSED)
async def test_the_database_lets_erasing_change_nothing_else(
    world: HoldWorld, sessions: Sessions, name: str, statement: str, refusal: str
) -> None:
    payer = world.tenant()
    await limit(sessions, payer, 5_000, end_user=NAME)
    [one] = of_type(
        Admitted,
        await world.run(admit(payer, end_user=NAME, labels={"user": NAME, "team": "search"})),
    )
    await world.run(settle(one.hold_id, 5))

    with psycopg.connect(psycopg_conninfo(as_application(world.url))) as connection:
        connection.execute("SELECT set_config('weir.erased_name', %s, true)", [name])
        with pytest.raises(psycopg.errors.RestrictViolation, match=refusal):
            connection.execute(statement.format().encode())
