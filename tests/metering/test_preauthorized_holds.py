"""Pre-authorized holds: admissions while the database is unavailable, counted once afterwards."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest
from msgspec.structs import replace

from metering.core.errors import DatabaseUnavailable, RequestIdReused, RequestInFlight
from metering.core.models import QuotaDimension
from metering.holds import hold_connection, preauthorized_holds
from metering.holds.bindings import Bind, BindingLog, read_bindings
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admit, Admitted, Ended, Expire, HoldAnswer, Renew, Settled
from metering.holds.preauthorized_holds import GraceTerms
from metering.quotas.quota_recount import QUOTA_LOCK
from metering.quotas.quota_rules import Payer
from metering.quotas.quotas import QuotaExceeded
from metering.store.db import psycopg_conninfo
from metering.store.pipeline import Connection
from tests.metering.cutting_proxy import CuttingProxy
from tests.metering.hold_world import AwaitedStore, HoldWorld, admit, of_type, settle
from tests.metering.invariants import check_invariants
from tests.metering.test_hold_faults import until

TERMS = GraceTerms(hold_count=2, input_token_count=100, output_token_count=50)


def standing(payer: Payer) -> Admit:
    """Take a hold as the store does."""
    hold_id = uuid.uuid4()
    return admit(
        payer,
        hold_id=hold_id,
        request_id=hold_id,
        input_tokens=100,
        slice_tokens=50,
        least_tokens=50,
    )


def binding(op: Admit, *, request_id: uuid.UUID | None = None) -> Bind:
    """Return the binding of a request: ten input and twenty output tokens."""
    return Bind(
        op.hold_id, op.payer, request_id or uuid.uuid4(), bytes(32), {"team": "search"}, 10, 20
    )


async def bind(world: HoldWorld, *binds: Bind) -> list[HoldAnswer | Exception]:
    process_id = uuid.uuid4()
    async with HoldConnection(world.url, process_id) as holds:
        return await holds.bind(binds, Renew(process_id, frozenset()))


async def test_binding_shrinks_the_charge_to_that_of_the_request_once(world: HoldWorld) -> None:
    payer = world.tenant()
    tokens = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 1_000)
    cost = world.quota(payer, QuotaDimension.COST_PICOS_PER_MONTH, 10**6)
    op = standing(payer)
    await world.run(op)
    assert world.counters(tokens) == [(0, 150)]
    one = binding(op)

    answers = [*await bind(world, one), *await bind(world, one)]

    assert answers == [Ended(done=True)] * 2
    assert world.counters(tokens) == [(0, 30)]
    assert world.counters(cost) == [(0, 10 * 3 + 20 * 7)]
    check_invariants(world.url)
    await world.run(settle(op.hold_id, 15))
    assert world.counters(tokens) == [(25, 0)]
    assert world.rows("SELECT request_id, labels, billed_token_count FROM usage_events") == [
        (one.request_id, {"team": "search"}, 15)
    ]
    check_invariants(world.url, all_ended=True)


async def test_a_hold_expired_before_its_request_gives_back_and_bills_it(world: HoldWorld) -> None:
    payer = world.tenant()
    tokens = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 1_000)
    op = standing(payer)
    await world.run(op)
    world.advance(61)
    await world.run(Expire(op.hold_id))
    assert world.counters(tokens) == [(150, 0)]
    one = binding(op)

    assert await bind(world, one) == await bind(world, one) == [Ended(done=True)]
    assert world.counters(tokens) == [(30, 0)]
    check_invariants(world.url)
    for _ in range(2):
        await world.run(settle(op.hold_id, 5))

    assert world.counters(tokens) == [(15, 0)]
    assert world.rows("SELECT request_id, billed_token_count FROM usage_events") == [
        (one.request_id, 5)
    ]
    check_invariants(world.url, all_ended=True)


async def test_an_ended_hold_can_be_changed_in_no_other_way(world: HoldWorld) -> None:
    op, bound = standing(world.tenant()), standing(world.tenant("b"))
    await world.run(op, bound)
    world.advance(61)
    await world.run(Expire(op.hold_id), Expire(bound.hold_id))
    await bind(world, binding(bound))

    for change in (
        "leased_token_count = leased_token_count + 1",
        "state = 'held', ended_at = NULL",
        "input_token_count = 101",
    ):
        with pytest.raises(psycopg.errors.RestrictViolation):
            world.execute(
                f"UPDATE holds SET request_id = gen_random_uuid(), {change} WHERE id = %s",
                op.hold_id,
            )
    with pytest.raises(psycopg.errors.RestrictViolation):
        world.execute(
            "UPDATE holds SET request_id = gen_random_uuid() WHERE id = %s", bound.hold_id
        )


async def test_a_request_that_was_billed_elsewhere_is_not_billed_again(world: HoldWorld) -> None:
    """It was repeated during the outage: its tokens are recorded, free, and in no quota."""
    payer = world.tenant()
    tokens = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 1_000)
    before, op, other = admit(payer), standing(payer), standing(payer)
    await world.run(before, op, other)
    await world.run(settle(before.hold_id, 7))
    twice = uuid.uuid4()

    answers = await bind(
        world, binding(op, request_id=before.request_id), binding(other, request_id=twice)
    )
    again = await bind(world, binding(op, request_id=twice))

    assert [*answers, *again] == [Ended(done=False), Ended(done=True), Ended(done=False)]
    await world.run(settle(op.hold_id, 9), settle(other.hold_id, 4))
    billed = world.rows(
        "SELECT input_token_count, delivered_token_count, billed_token_count FROM usage_events"
        " ORDER BY id"
    )
    assert sorted(billed) == [(0, 9, 0), (10, 4, 4), (10, 7, 7)]
    assert world.one("SELECT cost_picos FROM usage_events WHERE hold_id = %s", op.hold_id) == 0
    assert world.counters(tokens) == [(17 + 14, 0)]
    check_invariants(world.url, all_ended=True)


@asynccontextmanager
async def store_with_grace(
    url: str, directory: Path, *, expiry_s: float = 60.0
) -> AsyncIterator[AwaitedStore]:
    """Open a process's store that keeps a pre-authorized hold for each key in use."""
    process_id = uuid.uuid4()
    log = BindingLog(directory, process_id)
    store = AwaitedStore(url, process_id, expiry_s=expiry_s, answer_wait_s=1.0, grace=(TERMS, log))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(store.run())
        yield store
        running.cancel()
    log.close(keep=False)


async def in_use(store: AwaitedStore, payer: Payer) -> None:
    """Admit one request of the payer, and wait until a pre-authorized hold exists."""
    op = admit(payer)
    await store.admit(op)
    await until(lambda: store.statistics().preauthorized_hold_count == TERMS.hold_count)
    await store.settle(settle(op.hold_id, 5))


async def test_preauthorized_holds_admit_during_an_outage(world: HoldWorld, tmp_path: Path) -> None:
    payer, stranger = world.tenant(), world.tenant("stranger")
    tokens = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 1_000)
    async with (
        CuttingProxy(world.url).listening() as proxy,
        store_with_grace(proxy.url, tmp_path) as store,
    ):
        await in_use(store, payer)
        assert world.counters(tokens) == [(15, 300)], (
            "held in the database: no other process can give it away"
        )
        proxy.refusing = True
        proxy.cut_now()

        first, second, third = admit(payer), admit(payer), admit(payer)
        admitted = [await store.admit(first), await store.admit(second)]

        assert [answer.leased_token_count for answer in admitted] == [20, 20]
        assert [
            (one.request_id, one.hold_id) for one in read_bindings(tmp_path, store.process_id)
        ] == [
            (op.request_id, answer.hold_id)
            for op, answer in zip((first, second), admitted, strict=True)
        ]
        for op in (third, admit(stranger), admit(payer, input_tokens=101)):
            with pytest.raises(DatabaseUnavailable):
                await store.admit(op)
        with pytest.raises(RequestInFlight):
            await store.admit(first)
        with pytest.raises(RequestIdReused):
            await store.admit(replace(first, payload_hash=bytes(32)))
        endings = [
            asyncio.ensure_future(store.settle(settle(admitted[0].hold_id, 12))),
            asyncio.ensure_future(store.void(admitted[1].hold_id)),
        ]
        proxy.refusing = False
        settled = await endings[0]
        await endings[1]

        assert isinstance(settled, Settled)
        assert settled.billed_token_count == 12
        assert read_bindings(tmp_path, store.process_id) == [], "the database knows"
        again = admit(payer, request_id=second.request_id)
        await store.admit(again)
        await store.settle(settle(again.hold_id, 1))
        await store.release_preauthorized()
        await until(lambda: world.hold_count() == 0)
    events = world.rows("SELECT request_id, billed_token_count FROM usage_events ORDER BY id")
    assert events[1:] == [(first.request_id, 12), (second.request_id, 1)]
    assert world.counters(tokens) == [(15 + 22 + 11, 0)]
    check_invariants(world.url, all_ended=True)


async def test_an_admission_that_comes_too_late_does_not_take_the_request_from_what_was_given_to_it(
    world: HoldWorld, tmp_path: Path
) -> None:
    """The slow database admits it after it was admitted without a database."""
    payer = world.tenant()
    async with store_with_grace(world.url, tmp_path) as store:
        await in_use(store, payer)
        op = admit(payer)
        with psycopg.connect(psycopg_conninfo(world.url)) as slow:
            slow.execute(f"SELECT pg_advisory_xact_lock({QUOTA_LOCK})".encode())
            given = await store.admit(op)
        await store.settle(settle(given.hold_id, 5))

        assert given.hold_id != op.hold_id
        assert world.rows(
            "SELECT request_id, input_token_count, billed_token_count FROM usage_events WHERE"
            " hold_id = %s",
            given.hold_id,
        ) == [(op.request_id, 10, 5)]
        await until(
            lambda: world.rows("SELECT state FROM holds WHERE id = %s", op.hold_id) == [("voided",)]
        )
        check_invariants(world.url)


async def test_an_admission_that_a_frozen_server_commits_late_does_not_take_the_request(
    world: HoldWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delivered tokens of the window in between would not be billed."""
    payer = world.tenant()
    late: list[Admit] = []
    execute_binds = preauthorized_holds.execute_binds

    async def woken(
        connection: Connection, binds: Sequence[Bind], **bounds: int
    ) -> list[HoldAnswer | Exception]:
        if not late:
            late.append(admit(payer, request_id=binds[0].request_id))
            assert of_type(Admitted, await world.run(*late, process_id=store.process_id))
        return await execute_binds(connection, binds)

    monkeypatch.setattr(hold_connection, "execute_binds", woken)
    async with (
        CuttingProxy(world.url).listening() as proxy,
        store_with_grace(proxy.url, tmp_path) as store,
    ):
        await in_use(store, payer)
        proxy.refusing = True
        proxy.cut_now()
        op = admit(payer)
        given = await store.admit(op)
        proxy.refusing = False

        settled = await store.settle(settle(given.hold_id, 5))

        assert settled.billed_token_count == 5
        assert world.rows(
            "SELECT request_id FROM usage_events WHERE hold_id = %s", given.hold_id
        ) == [(op.request_id,)]
        assert world.rows("SELECT state FROM holds WHERE id = %s", late[0].hold_id) == [("voided",)]
        check_invariants(world.url)


async def test_preauthorized_holds_end_with_their_expiry(world: HoldWorld, tmp_path: Path) -> None:
    payer = world.tenant()
    async with (
        CuttingProxy(world.url).listening() as proxy,
        store_with_grace(proxy.url, tmp_path, expiry_s=4.0) as store,
    ):
        await in_use(store, payer)
        proxy.refusing = True
        proxy.cut_now()
        assert (await store.admit(admit(payer))).leased_token_count == 20

        await until(lambda: store.statistics().preauthorized_hold_count == 0)

        with pytest.raises(DatabaseUnavailable):
            await store.admit(admit(payer))


async def test_a_hold_made_during_the_release_is_released(world: HoldWorld, tmp_path: Path) -> None:
    payer = world.tenant()
    with psycopg.connect(psycopg_conninfo(world.url), autocommit=True) as other:
        async with store_with_grace(world.url, tmp_path) as store:
            op = admit(payer)
            await store.admit(op)
            await store.settle(settle(op.hold_id, 1))
            other.execute(f"SELECT pg_advisory_lock({QUOTA_LOCK})".encode())
            await until(
                lambda: (
                    world.one(
                        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
                    )
                    > 0
                )
            )

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(store.release_preauthorized())
                await asyncio.sleep(0)
                other.execute(f"SELECT pg_advisory_unlock({QUOTA_LOCK})".encode())
            await store.void(uuid.uuid4())  # behind all pending operations

            assert world.hold_count() == 0


async def test_a_request_that_needs_the_reserve_gets_it(world: HoldWorld, tmp_path: Path) -> None:
    """Pre-authorized holds cause no refusal; only requests beyond the limit are refused."""
    payer = world.tenant()
    world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 900)
    async with store_with_grace(world.url, tmp_path) as store:
        await in_use(store, payer)  # 15 used, 300 held

        large = admit(payer, input_tokens=600, slice_tokens=25, least_tokens=25)
        await store.admit(large)

        assert store.statistics().preauthorized_hold_count == 0
        with pytest.raises(QuotaExceeded):
            await store.admit(admit(payer, input_tokens=300))
        await store.void(large.hold_id)
    check_invariants(world.url, all_ended=True)


async def test_a_request_that_is_abandoned_while_room_is_made_for_it_takes_none(
    world: HoldWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payer = world.tenant()
    tokens = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 900)
    answers: list[object] = []
    async with store_with_grace(world.url, tmp_path) as store:
        await in_use(store, payer)
        standing = store._preauthorized
        assert standing is not None
        release = standing.release

        def abandoning(organization_id: uuid.UUID) -> list[uuid.UUID]:
            pending.abandon()
            return release(organization_id)

        monkeypatch.setattr(standing, "release", abandoning)
        pending = store.begin_admit(
            admit(payer, input_tokens=600, slice_tokens=25, least_tokens=25), answers.append
        )
        await until(lambda: world.counters(tokens) == [(15, 0)])
        await store.void(uuid.uuid4())

    assert answers == []
    check_invariants(world.url, all_ended=True)


async def test_a_call_never_runs_inside_another_begin(world: HoldWorld, tmp_path: Path) -> None:
    payer = world.tenant()
    answers: list[object] = []
    async with (
        CuttingProxy(world.url).listening() as proxy,
        store_with_grace(proxy.url, tmp_path) as store,
    ):
        await in_use(store, payer)
        proxy.refusing = True
        proxy.cut_now()
        await until(lambda: store.gate.away_s is not None)

        store.begin_admit(admit(payer), answers.append)
        store.begin_admit(admit(payer), answers.append).abandon()
        store.begin_admit(admit(payer), answers.append)
        store.begin_admit(admit(payer), answers.append)

        assert answers == []
        await until(lambda: len(answers) == 3)
        proxy.refusing = False
        await until(lambda: store.gate.away_s is None)
        assert [type(answer) for answer in answers] == [Admitted, Admitted, DatabaseUnavailable]
        for admitted in of_type(Admitted, answers):
            await store.void(admitted.hold_id)
        await store.release_preauthorized()
    check_invariants(world.url, all_ended=True)


async def test_a_half_used_key_has_no_preauthorized_hold(world: HoldWorld, tmp_path: Path) -> None:
    payer = world.tenant()
    concurrent = world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 10)
    watching = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 1)
    # it causes no refusal
    world.execute("UPDATE quotas SET enforced = false WHERE id = %s", watching)
    async with store_with_grace(world.url, tmp_path) as store:
        await in_use(store, payer)
        ops = [admit(payer) for _ in range(6)]
        for op in ops:
            await store.admit(op)

        await until(lambda: world.counters(concurrent) == [(0, 6)])

        assert store.statistics().preauthorized_hold_count == 0
        for op in ops:
            await store.void(op.hold_id)
    check_invariants(world.url, all_ended=True)


def test_a_binding_that_was_not_written_whole_does_not_count(tmp_path: Path) -> None:
    payer = Payer(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "USD")
    binds = [
        Bind(uuid.uuid4(), payer, uuid.uuid4(), bytes(range(32)), {"a": "ü\n"}, 10, 20)
        for _ in range(3)
    ]
    process_id = uuid.uuid4()
    log = BindingLog(tmp_path, process_id)
    for one in binds:
        log.record(one)
    assert read_bindings(tmp_path, process_id) == binds
    path = tmp_path / f"{process_id}.bindings"
    whole = path.read_bytes()

    for size in range(len(whole) - 1, whole.rindex(b"\n", 0, -1), -7):
        path.write_bytes(whole[:size])
        assert read_bindings(tmp_path, process_id) == binds[:2]
    path.write_bytes(whole.replace(b'"input_token_count": 10', b'"input_token_count": 11'))
    assert read_bindings(tmp_path, process_id) == []

    for one in binds:
        log.forget(one.hold_id)
    assert not path.exists()
    assert read_bindings(tmp_path, process_id) == []
