"""Limits of end users and labels: selectors, single limits, recounts, bounds and archives."""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select

from metering.core.errors import EndUsersExhausted, InvalidValue, NotFound, WriteConflict
from metering.core.models import Quota, QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.core.pages import page_token
from metering.holds import hold_cache
from metering.holds.bindings import Bind
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admit, Admitted, Ended, Extend, Renew, Void
from metering.proof.check import Moment
from metering.quotas.quota_admin import delete_quota, set_quota
from metering.quotas.quota_recount import Uncounted, recount
from metering.quotas.quota_rules import Payer, QuotaState
from metering.quotas.quota_states import (
    effective,
    member_quotas_for,
    narrowed_by,
    quotas_for,
    states,
)
from metering.quotas.quotas import QuotaExceeded
from metering.quotas.quoting import quote
from metering.store.db import Sessions
from metering.tenants.api_keys import update_api_key
from metering.tenants.usage_subjects import (
    NOBODY,
    archive_idle,
    checked_end_user,
    create_usage_subject,
    end_users_page,
    find_usage_subject,
)
from tests.metering.hold_world import MODEL, HoldWorld, admit, of_type, settle
from tests.metering.invariants import check_invariants
from tests.metering.planted_faults import faults, unseen

CONCURRENT = QuotaDimension.CONCURRENT_REQUESTS
PER_MINUTE = QuotaDimension.REQUESTS_PER_MINUTE
PER_DAY = QuotaDimension.TOKENS_PER_DAY
SPENT_MONTHLY = QuotaDimension.COST_PICOS_PER_MONTH
GROUPS = "free", "paid"
SEEDS = [int(seed) for seed in os.environ.get("WEIR_TEST_SEEDS", "1,2,3").split(",")]


async def limit(
    sessions: Sessions,
    payer: Payer,
    dimension: QuotaDimension,
    limit_value: int,
    *,
    on_project: bool = True,
    on_key: bool = False,
    **key: Any,
) -> QuotaState:
    """Set a limit within the payer's project or organization, or on its key."""
    subject, subject_id = (
        (QuotaSubject.API_KEY, payer.api_key_id)
        if on_key
        else (QuotaSubject.PROJECT, payer.project_id)
        if on_project
        else (QuotaSubject.ORGANIZATION, payer.organization_id)
    )
    async with sessions.begin() as session:
        return await set_quota(
            session,
            subject=subject,
            subject_ref=str(subject_id),
            key=QuotaKey(dimension, **key),
            terms=QuotaTerms(limit_value),
            actor="test",
        )


async def end_user_limits(sessions: Sessions, payer: Payer, name: str) -> list[QuotaState]:
    """Return the limits of an end user."""
    async with sessions() as session:
        found = await find_usage_subject(session, payer.organization_id, "end_user", "", name)
        return (
            []
            if found is None
            else await states(session, select(Quota).where(Quota.subject_id == found.id))
        )


def connection(world: HoldWorld, **values: Any) -> HoldConnection:
    return HoldConnection(world.url, uuid.uuid4(), **values)


async def admitted_count(holds: HoldConnection, *operations: Admit) -> int:
    return len(of_type(Admitted, await holds.execute(operations)))


async def test_the_first_requests_of_an_end_user_get_the_limit_of_the_selector_in_one_commit(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    await limit(sessions, payer, CONCURRENT, 3, for_each="end_user")

    holds = [connection(world) for _ in range(4)]
    try:
        for number in range(12):
            name = f"user {number}"
            answers = await asyncio.gather(
                *(each.execute([admit(payer, end_user=name)]) for each in holds for _ in (1,)),
            )
            more = await asyncio.gather(
                *(
                    each.execute([admit(payer, end_user=name) for _ in range(2)])
                    for each in holds[:3]
                ),
            )
            answers = [*answers, *more]

            assert sum(len(of_type(Admitted, each)) for each in answers) == 3
            assert sum(len(of_type(QuotaExceeded, each)) for each in answers) == 7
    finally:
        for each in holds:
            await each.close()

    assert world.one("SELECT count(*) FROM usage_subjects") == 12
    assert world.one("SELECT count(*) FROM quotas WHERE selector_id IS NOT NULL") == 12
    assert world.one("SELECT count(*) FROM holds WHERE end_user_id IS NOT NULL") == 36
    check_invariants(world.url)


async def test_a_refused_first_request_leaves_no_row(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    await limit(sessions, payer, PER_MINUTE, 0, for_each="end_user")

    [refused] = await world.run(admit(payer, end_user="alice"))

    assert isinstance(refused, QuotaExceeded)
    assert str(refused).startswith(
        "End user alice of project search may make 0 requests per minute and has made 0."
    )
    assert world.one("SELECT count(*) FROM usage_subjects") == 0
    assert world.one("SELECT count(*) FROM quotas") == 1
    assert world.one("SELECT count(*) FROM quota_counters") == 0


async def test_a_change_of_the_selector_changes_the_limits_of_all_at_once(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    await limit(sessions, payer, CONCURRENT, 1, for_each="end_user")
    async with connection(world) as holds:
        for name in ("alice", "bob"):
            assert await admitted_count(holds, *(admit(payer, end_user=name) for _ in "123")) == 1

        await limit(sessions, payer, CONCURRENT, 2, for_each="end_user")

        for name in ("alice", "bob", "carol"):
            left = 2 if name == "carol" else 1
            assert (
                await admitted_count(holds, *(admit(payer, end_user=name) for _ in "123")) == left
            )
    assert [state.limit_value for state in await end_user_limits(sessions, payer, "bob")] == [2]
    check_invariants(world.url)


async def test_a_single_limit_takes_over_and_gives_back_with_the_use(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    await limit(sessions, payer, PER_DAY, 100, for_each="end_user")
    await limit(sessions, payer, PER_DAY, 1000, for_each="end_user", on_project=False)
    async with connection(world) as holds:
        assert await admitted_count(holds, *(admit(payer, end_user="al") for _ in range(4))) == 3

        own = await limit(sessions, payer, PER_DAY, 150, end_user="al")
        assert (own.used, own.held, own.limit_value) == (0, 90, 150)
        assert len(await end_user_limits(sessions, payer, "al")) == 2
        assert await admitted_count(holds, *(admit(payer, end_user="al") for _ in range(9))) == 2

        async with sessions.begin() as session:
            await delete_quota(session, quota_id=str(own.quota_id), actor="test")
        states = await end_user_limits(sessions, payer, "al")
        assert sorted(state.limit_value for state in states) == [100, 1000]
        assert await admitted_count(holds, admit(payer, end_user="al")) == 0
        with pytest.raises(InvalidValue, match="selector"):
            async with sessions.begin() as session:
                await delete_quota(session, quota_id=str(own.quota_id), actor="test")
    assert world.one("SELECT count(*) FROM quotas WHERE within_id IS NOT NULL") == 2
    check_invariants(world.url, over=[own.quota_id])


async def test_a_selector_set_later_counts_what_its_members_used(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    async with connection(world) as holds:
        operations = {
            name: [admit(payer, end_user=name, labels={"team": "red"}) for _ in range(3)]
            for name in ("alice", "bob")
        }
        for each in operations.values():
            await holds.execute(each)
        await holds.execute([settle(operations["alice"][0].hold_id, 7)])
        await limit(sessions, payer, PER_DAY, 500, end_user="bob")

        for for_each in ("end_user", "label:team"):
            await limit(sessions, payer, PER_DAY, 200, for_each=for_each)

        [alice] = await end_user_limits(sessions, payer, "alice")
        [bob] = await end_user_limits(sessions, payer, "bob")
        assert (alice.used, alice.held, alice.limit_value) == (17, 60, 200)
        assert (bob.used, bob.held, bob.limit_value) == (0, 90, 500)
        check_invariants(world.url)
        # The label counts both: 17 used and 150 held of 200.
        [one, two] = await holds.execute(
            [admit(payer, end_user="carol", labels={"team": "red"}) for _ in range(2)]
        )
        assert isinstance(one, Admitted)
        assert isinstance(two, Admitted | QuotaExceeded)
        [refused] = await holds.execute([admit(payer, labels={"team": "red"}, input_tokens=50)])
        assert "Label team=red of project search" in str(refused)
    check_invariants(world.url)


async def test_a_removed_selector_set_again_starts_with_the_use_of_its_window(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    selector = await limit(sessions, payer, PER_MINUTE, 2, for_each="end_user")
    async with connection(world) as holds:
        assert await admitted_count(holds, *(admit(payer, end_user="a") for _ in "123")) == 2
        async with sessions.begin() as session:
            await delete_quota(session, quota_id=str(selector.quota_id), actor="test")
        assert await admitted_count(holds, *(admit(payer, end_user="a") for _ in "123")) == 3
        await limit(sessions, payer, PER_MINUTE, 6, for_each="end_user")

        assert await admitted_count(holds, *(admit(payer, end_user="a") for _ in "123")) == 1
    check_invariants(world.url)


async def test_a_known_end_user_is_admitted_without_reading_its_row(
    world: HoldWorld, sessions: Sessions
) -> None:
    """With many end users, each row is on a page of its own."""
    payer = world.tenant()
    await limit(sessions, payer, SPENT_MONTHLY, 10**9, for_each="end_user")

    async def read_count(holds: HoldConnection) -> object:
        assert holds._connection is not None
        await holds._connection.execute("SELECT pg_stat_force_next_flush()")
        return world.one(
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname ="
            " 'usage_subjects'"
        )

    async def run_pairs(holds: HoldConnection) -> None:
        operations = [admit(payer, end_user=name, labels={"team": "red"}) for name in "abc"]
        assert await admitted_count(holds, *operations) == 3
        await holds.execute([settle(op.hold_id, 5) for op in operations])

    async with connection(world) as holds:
        for _ in range(2):  # creates the rows, then caches them
            await run_pairs(holds)
        known = await read_count(holds)

        await run_pairs(holds)

        assert await read_count(holds) == known


async def test_the_bound_refuses_a_new_end_user_and_an_archived_one_makes_room(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    await limit(sessions, payer, SPENT_MONTHLY, 10**6, for_each="end_user")
    async with connection(world, end_users_max=2) as holds:
        answers = await holds.execute([admit(payer, end_user=name) for name in "abc"])
        assert len(of_type(Admitted, answers)) == 2
        assert len(of_type(EndUsersExhausted, answers)) == 1
        used_before = (await end_user_limits(sessions, payer, "a"))[0].held

        world.advance(timedelta(days=20).total_seconds())
        async with sessions.begin() as session:
            assert await archive_idle(session, timedelta(days=19)) == 2
        assert await admitted_count(holds, *(admit(payer, end_user=name) for name in "cd")) == 2
        [refused] = await holds.execute([admit(payer, end_user="a")])
        assert isinstance(refused, EndUsersExhausted)

    async with connection(world, end_users_max=3) as holds:
        assert await admitted_count(holds, admit(payer, end_user="a")) == 1
    [state] = await end_user_limits(sessions, payer, "a")
    assert state.held > 0
    assert used_before > 0
    assert world.rows("SELECT end_user_count FROM usage_subject_counts") == [(3,)]
    async with sessions() as session:
        token = page_token("b", NOBODY)
        listed, _ = await end_users_page(session, payer.organization_id, page_token=token)
    assert [(each.name, each.archived_at is None) for each in listed] == [("c", True), ("d", True)]
    check_invariants(world.url)


async def test_labels_without_limits_share_the_terms_of_the_key(
    world: HoldWorld, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    payer = world.tenant()
    await limit(sessions, payer, CONCURRENT, 2, label="team=search", on_project=False)
    monkeypatch.setattr(hold_cache, "MEMBER_COUNT_MAX", 8)
    async with connection(world) as holds:
        for number in range(30):
            op = admit(payer, end_user=f"u{number % 11}", labels={"trace": str(number)})
            assert await admitted_count(holds, op) == 1
        cache = holds._cache
        assert cache is not None
        [terms] = cache.terms.values()
        assert terms.label_keys == ("team",)
        assert len(terms.members) <= 9
        ops = [admit(payer, labels={"team": "search", "trace": str(n)}) for n in range(4)]
        assert await admitted_count(holds, *ops) == 2
        assert await admitted_count(holds, admit(payer, labels={"team": "ads"})) == 1
    check_invariants(world.url)


async def test_a_question_creates_nothing(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    await limit(sessions, payer, PER_DAY, 25, for_each="end_user")

    question = admit(payer, end_user="alice", slice_tokens=10)
    question.only_asks = True
    await world.run(question)
    async with sessions() as session:
        ask = partial(
            quote,
            session,
            payer=payer,
            model=MODEL,
            first_slice_token_count=20,
            least_slice_token_count=20,
            end_user="alice",
        )
        fits, refused = await ask(input_token_count=5), await ask(input_token_count=6)

    assert fits.refusal is None
    assert "End user alice of project search may use 25 tokens per day" in str(refused.refusal)
    assert world.one("SELECT count(*) FROM usage_subjects") == 0


async def test_extended_and_expired_holds_of_an_end_user_are_counted(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    await limit(sessions, payer, PER_DAY, 100, for_each="end_user")
    op = admit(payer, end_user="alice")
    async with connection(world) as holds:
        await holds.execute([op])
        await holds.execute([Extend(op.hold_id, 5, 0, 20)])
        [refused] = await holds.execute([Extend(op.hold_id, 5, 0, 10**6)])
        check_invariants(world.url)
        await holds.execute([settle(op.hold_id, 30)])
    assert refused is not None
    [state] = await end_user_limits(sessions, payer, "alice")
    assert (state.used, state.held) == (40, 0)
    check_invariants(world.url, all_ended=True)


@pytest.mark.parametrize(
    "name",
    [
        "x" * 513,
        "a\nb",
        " alice",
        "alice ",
        "a\u2028b",
        "wk_abcdefgh_" + "A1" * 21,
        "sk-" + "a1" * 12,
    ],
)
def test_names_that_are_no_ids_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        checked_end_user(name, "user")

    assert refused.value.field == "user"
    assert name not in str(refused.value)


@pytest.mark.parametrize("name", ["", "alice", "José Ñ", "user@example.com", "task-42", "sk-1"])
def test_other_names_are_kept(name: str) -> None:
    assert checked_end_user(name) == name


async def change_limits(
    chance: random.Random, sessions: Sessions, payer: Payer, limits: list[uuid.UUID]
) -> uuid.UUID | None:
    """Set, change or remove a random limit; return the id of one that may now be exceeded."""
    if limits and chance.random() < 0.3:
        quota_id = chance.choice(limits)
        try:
            async with sessions.begin() as session:
                await delete_quota(session, quota_id=str(quota_id), actor="test")
        except (InvalidValue, NotFound):  # of a selector, or removed
            return None
        return quota_id
    key: dict[str, Any] = chance.choice(
        [
            {"for_each": "end_user"},
            {"for_each": "label:team"},
            {"end_user": chance.choice("abc")},
            {"label": f"team={chance.choice('xy')}"},
            {"for_each": f"key:{chance.choice(GROUPS)}"},
            {"on_key": True},
        ]
    )
    dimension = chance.choice([CONCURRENT, PER_MINUTE, PER_DAY, SPENT_MONTHLY])
    on_project = chance.random() < 0.7
    value = chance.choice([2, 5, 100, 400])
    state = await limit(sessions, payer, dimension, value, on_project=on_project, **key)
    limits.append(state.quota_id)
    return state.quota_id


async def change_group(chance: random.Random, sessions: Sessions, payer: Payer) -> None:
    """Put the payer's key into a random group, or into none."""
    uncounted: list[Uncounted] = []
    async with sessions.begin() as session:
        await update_api_key(
            session,
            api_key=str(payer.api_key_id),
            terms=partial(replace, group=chance.choice(["", *GROUPS])),
            actor="test",
            uncounted=uncounted,
        )
        await recount(session, uncounted)


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_operations_keep_every_limit_and_counter(
    world: HoldWorld, sessions: Sessions, seed: int
) -> None:
    chance, first = random.Random(seed), world.tenant()
    payers = [first, *(replace(first, api_key_id=world.key(first.project_id)) for _ in "12")]
    limits: list[uuid.UUID] = []
    changed: set[uuid.UUID] = set()
    stores = [connection(world, end_users_max=3) for _ in range(3)]
    live: list[tuple[HoldConnection, uuid.UUID]] = []
    try:
        for step in range(70):
            holds, payer = chance.choice(stores), chance.choice(payers)
            match chance.choice(
                ["admit"] * 5 + ["settle"] * 3 + ["void", "extend", "limit", "group", "day"]
            ):
                case "admit":
                    labels = {"team": chance.choice("xy")} if chance.random() < 0.5 else {}
                    ops = [
                        admit(payer, end_user=chance.choice(["", *"abcd"]), labels=labels)
                        for _ in range(chance.randrange(1, 4))
                    ]
                    answers = await holds.execute(ops)
                    refused = [
                        *of_type(QuotaExceeded, answers),
                        *of_type(EndUsersExhausted, answers),
                    ]
                    assert len(refused) + len(of_type(Admitted, answers)) == len(ops), answers
                    live += [(holds, each.hold_id) for each in of_type(Admitted, answers)]
                case "settle" | "void" | "extend" as kind if live:
                    owner, hold_id = live.pop(chance.randrange(len(live)))
                    if kind == "extend":
                        live.append((owner, hold_id))
                        await owner.execute([Extend(hold_id, 0, 0, 5)])
                    else:
                        end = Void(hold_id) if kind == "void" else settle(hold_id, 1)
                        await owner.execute([end])
                case "limit":
                    if (
                        quota_id := await change_limits(chance, sessions, payer, limits)
                    ) is not None:
                        changed.add(quota_id)
                        changed |= {
                            row[0]
                            for row in world.rows(
                                "SELECT id FROM quotas WHERE selector_id = ANY(%s)", [*changed]
                            )
                        }
                case "group":
                    await change_group(chance, sessions, payer)
                    of_keys = "SELECT id FROM quotas WHERE selector_id IS NOT NULL"
                    changed |= {row[0] for row in world.rows(f"{of_keys} AND within_id IS NULL")}
                case "day":
                    world.advance(chance.choice([30, 3600, 86400]))
                    async with sessions.begin() as session:
                        await archive_idle(session, timedelta(days=0))
            if step % 7 == 0:
                check_invariants(world.url, over=changed)
        for owner, hold_id in live:
            await owner.execute([settle(hold_id, 1)])
        check_invariants(world.url, all_ended=True, over=changed)
    finally:
        for each in stores:
            await each.close()


async def test_an_outage_creates_no_more_end_users_than_the_bound_and_brings_back_archived_ones(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()

    async def bound(holds: HoldConnection, *names: str) -> list[str | None]:
        """Admit without end users, bind with them, and return the names of the holds."""
        standing = [admit(payer) for _ in names]
        for op in standing:
            op.request_id = op.hold_id  # marks it as unbound
        await holds.execute(standing)
        binds = [
            Bind(op.hold_id, payer, uuid.uuid4(), bytes(32), {}, 1, 1, name)
            for op, name in zip(standing, names, strict=True)
        ]
        answers = await holds.bind(binds, Renew(uuid.uuid4(), frozenset(), frozenset()))
        assert answers == [Ended(done=True)] * len(names)
        of_hold = "SELECT (SELECT name FROM usage_subjects u WHERE u.id = end_user_id) FROM holds"
        return [world.one(f"{of_hold} WHERE id = %s", op.hold_id) for op in standing]

    async with connection(world, end_users_max=2) as holds:
        assert await bound(holds, "a", "b", "c", "a") == ["a", "b", None, "a"]
        world.advance(timedelta(days=20).total_seconds())
        async with sessions.begin() as session:
            assert await archive_idle(session, timedelta(days=19)) == 2
        assert await bound(holds, "a", "d", "b") == ["a", "d", "b"], "no room for b, but its row"
    assert world.rows("SELECT name, archived_at IS NULL FROM usage_subjects ORDER BY name") == [
        ("a", True),
        ("b", False),
        ("d", True),
    ]
    assert world.rows("SELECT end_user_count FROM usage_subject_counts") == [(2,)]
    check_invariants(world.url)


@pytest.mark.parametrize("kind", ["end_user", "label"])
async def test_a_first_request_does_not_wait_for_an_administrator_who_sets_its_limit(
    world: HoldWorld, sessions: Sessions, kind: str
) -> None:
    payer = world.tenant()
    label_key = "" if kind == "end_user" else "team"
    await limit(sessions, payer, PER_DAY, 100, for_each=f"label:{label_key}" if label_key else kind)

    def first(name: str) -> Admit:
        if label_key:
            return admit(payer, labels={label_key: name})
        return admit(payer, end_user=name)

    async with connection(world) as holds, sessions() as session:
        await create_usage_subject(session, payer.organization_id, kind, label_key, "alice")
        async with asyncio.timeout(2):  # less than a deadlock or the lock's timeout takes
            [refused, admitted] = await holds.execute([first("alice"), first("bob")])
        assert isinstance(refused, WriteConflict)
        assert isinstance(admitted, Admitted)
        await session.commit()
        assert await admitted_count(holds, first("alice")) == 1
    check_invariants(world.url)


@pytest.mark.parametrize("on_project", [True, False])
async def test_a_limit_is_narrowed_by_those_that_count_all_its_requests(
    world: HoldWorld, sessions: Sessions, on_project: bool
) -> None:
    """A project's limit counts only a part of what an end user of the organization requests."""
    payer = world.tenant()
    project = await limit(sessions, payer, PER_DAY, 10)
    organization = await limit(sessions, payer, PER_DAY, 20, on_project=False)
    await limit(sessions, payer, PER_DAY, 5, label="team=search")

    own = await limit(sessions, payer, PER_DAY, 100, end_user="alice", on_project=on_project)

    async with sessions() as session:
        found = await narrowed_by(session, own)
        labels = {"team": "search"}
        found_states = [
            *await quotas_for(session, subject_ids=payer.subject_ids, model=MODEL),
            *await member_quotas_for(
                session,
                organization_id=payer.organization_id,
                scopes=(payer.organization_id, payer.project_id),
                model=MODEL,
                end_user="alice",
                labels=labels,
            ),
        ]
    assert found == (project if on_project else organization).quota_id
    assert [
        each.narrowed_by for each in effective(found_states) if each.state.limit_value == 100
    ] == [found]


FAULTS = faults("""
    counts 3 end users and 1 label values      | UPDATE usage_subject_counts SET end_user_count = 3
    but has 1 and 1                            | UPDATE usage_subjects SET archived_at = now()
                                               | WHERE name = 'alice'
    counts 0 end users and 0 label values      | DELETE FROM usage_subject_counts
    is charged to a quota of another customer  | UPDATE holds SET end_user_id = u.id
                                               | FROM usage_subjects u
                                               | WHERE u.name = 'bob' AND end_user_id <> u.id
    is charged to a quota of another customer  | UPDATE quotas SET within_id = gen_random_uuid()
                                               | WHERE subject = 'label'
    is charged to a quota of another customer  | UPDATE holds SET quota_ids = ARRAY(
                                               | SELECT id FROM quotas WHERE for_each = 'end_user')
""")


async def test_a_check_reports_each_wrong_count_and_a_limit_of_another_end_user(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    for for_each in ("end_user", "label:team"):
        await limit(sessions, payer, PER_DAY, 1000, for_each=for_each)
    await world.run(
        *(admit(payer, end_user=each, labels={"team": "a"}) for each in ("alice", "bob"))
    )

    assert unseen(world.url, FAULTS, Moment.ALWAYS) == []
    check_invariants(world.url)
