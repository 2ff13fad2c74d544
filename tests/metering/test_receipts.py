"""Receipts of settlements: one unbroken chain per project, for every settler, end and crash."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import uuid
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from metering.core.models import Outcome, QuotaDimension
from metering.holds.bindings import Bind
from metering.holds.hold_connection import HoldConnection
from metering.holds.journal import Delivered, UsageJournal
from metering.holds.operations import Expire, Extend, Renew, Settled, Void
from metering.holds.recovery import recover_journals, sweep_expired_holds
from metering.quotas.quotas import QuotaExceeded
from metering.receipts.chaining import IssuedReceipt
from metering.receipts.encoding import NO_HASH, micros
from metering.receipts.merkle import Step
from metering.receipts.months import month_root, receipts_of_hold
from metering.receipts.signing import Signer, ensure_key
from metering.receipts.subjects import SubjectProof, end_user_hash, labels_hash
from metering.store.db import Sessions
from tests.metering.hold_world import (
    NOON,
    AwaitedStore,
    HoldWorld,
    admit,
    of_type,
    settle,
)
from tests.metering.invariants import check_invariants
from tests.metering.receipt_invariants import check_receipts
from tests.metering.receipt_reading import decode, is_signed, root_by_path
from tests.service import until

PROCESSES, SETTLED_LEAST = 3, 60  # processes that settle for one project until they are killed

SETTLING = """
import asyncio, sys, uuid
from metering.quotas.quota_rules import Payer
from metering.receipts.signing import (read_key)
from pathlib import Path
from tests.metering.hold_world import AwaitedStore, admit, settle

async def main():
    payer = Payer(*map(uuid.UUID, sys.argv[3:6]), "USD")
    store = AwaitedStore(sys.argv[1], uuid.uuid4(), signer=read_key(Path(sys.argv[2])))
    async def client():
        while True:
            op = admit(payer)
            await store.admit(op)
            await store.settle(settle(op.hold_id, 3))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(store.run())
        for _ in range(8):
            tasks.create_task(client())

asyncio.run(main())
"""


LABELS = {"größe": "m", "team": "search"}


def new_signer() -> Signer:
    return Signer(Ed25519PrivateKey.generate())


def proof(receipt: IssuedReceipt) -> tuple[str, bytes, tuple[Step, ...]]:
    """Return key id, signature and path to the signed root; empty if unsigned."""
    batch = receipt.batch
    return (batch.key_id, batch.signature, batch.path(receipt.hash)) if batch else ("", b"", ())


def holds(receipt: IssuedReceipt, signer: Signer) -> bool:
    """Return whether the receipt verifies."""
    _, signature, path = proof(receipt)
    return is_signed(signer.public_key, root_by_path(receipt.hash, path), signature)


async def settled(
    world: HoldWorld, *operations: object, signer: Signer | None = None
) -> list[Settled]:
    """Run operations that all must settle usage; return their answers."""
    answers = await world.run(*operations, signer=signer)  # type: ignore[arg-type]
    found = of_type(Settled, answers)
    assert len(found) == len(operations), answers
    return found


async def test_a_settlement_answers_with_its_receipt(world: HoldWorld) -> None:
    payer, signer = world.tenant(), new_signer()
    op = admit(payer)
    await world.run(op)
    world.advance(1.5)

    [done] = await settled(world, settle(op.hold_id, 5, cached_tokens=4), signer=signer)

    [receipt] = done.receipts
    content = decode(receipt.encoded)
    assert content.organization_id == payer.organization_id
    assert content.project_id == payer.project_id
    assert content.api_key_id == payer.api_key_id
    assert content.request_id == op.request_id
    assert content.part == 0
    assert content.model == "demo"
    assert content.outcome == "stop"
    assert content.input_token_count == 10
    assert content.cached_input_token_count == 4
    assert content.billed_token_count == 5
    assert content.price_version == world.price_version
    assert content.currency_code == "USD"
    assert content.cost_picos == done.cost_picos
    assert content.admitted_at_us == micros(NOON)
    assert content.settled_at_us == micros(NOON) + 1_500_000
    assert (content.sequence, content.previous_hash) == (1, NO_HASH)
    assert holds(receipt, signer)
    assert not holds(receipt, new_signer())
    check_invariants(world.url)
    check_receipts(world.url)


async def test_receipts_of_one_batch_share_a_signature_and_each_verifies(world: HoldWorld) -> None:
    """For several projects, each with its own chain."""
    signer = new_signer()
    requests = [
        admit(payer)
        for payer in (world.tenant("one"), world.tenant("two"), world.tenant("three"))
        for _ in range(5)
    ]
    await world.run(*requests)

    done = await settled(world, *(settle(op.hold_id, 3) for op in requests), signer=signer)

    receipts = [receipt for each in done for receipt in each.receipts]
    assert {proof(receipt)[1] for receipt in receipts} == {proof(receipts[0])[1]}
    assert all(holds(receipt, signer) for receipt in receipts)
    assert sorted(receipt.sequence for receipt in receipts) == sorted([1, 2, 3, 4, 5] * 3)
    assert world.one("SELECT count(*) FROM receipt_batches") == 1
    check_invariants(world.url, all_ended=True)
    check_receipts(world.url)


async def test_settling_again_answers_with_the_same_receipt(world: HoldWorld) -> None:
    """The answer may have been lost."""
    signer = new_signer()
    first, other = admit(world.tenant()), admit(world.tenant("other"))
    await world.run(first, other)
    [before, _] = await settled(
        world, settle(first.hold_id, 5), settle(other.hold_id, 5), signer=signer
    )

    [again] = await settled(world, settle(first.hold_id, 5), signer=new_signer())

    [receipt], [same] = before.receipts, again.receipts
    assert same.encoded == receipt.encoded
    assert (same.hash, proof(same)) == (receipt.hash, proof(receipt))
    assert len(proof(same)[2]) == 1
    assert holds(same, signer)


async def test_unbilled_requests_have_no_receipt(world: HoldWorld) -> None:
    payer = world.tenant()
    world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 2)
    voided, expired = admit(payer), admit(payer)
    answers = await world.run(voided, expired, admit(payer), signer=new_signer())
    assert len(of_type(QuotaExceeded, answers)) == 1
    await world.run(Void(voided.hold_id), signer=new_signer())
    world.advance(120)

    await world.run(Expire(expired.hold_id), signer=new_signer())

    assert world.one("SELECT max(last_sequence) FROM receipt_chains") == 0
    assert world.one("SELECT count(*) FROM receipt_batches") == 0


@pytest.mark.parametrize("outcome", Outcome)
async def test_every_way_to_end_has_its_receipt(world: HoldWorld, outcome: Outcome) -> None:
    op = admit(world.tenant())
    await world.run(op)

    [done] = await settled(world, settle(op.hold_id, 0, input_tokens=0, outcome=outcome))

    [receipt] = done.receipts
    assert decode(receipt.encoded).outcome == outcome
    assert decode(receipt.encoded).cost_picos == 0
    assert proof(receipt)[1] == b""
    check_invariants(world.url, all_ended=True)
    check_receipts(world.url)


async def test_usage_found_after_expiry_has_its_own_receipt(world: HoldWorld) -> None:
    signer = new_signer()
    op = admit(world.tenant())
    await world.run(op)
    await world.run(Extend(op.hold_id, 3, 0, 10))
    world.advance(120)
    assert await sweep_expired_holds(world.url, signer=signer) == 1

    [late] = await settled(world, settle(op.hold_id, 8), signer=signer)
    [again] = await settled(world, settle(op.hold_id, 8), signer=signer)

    contents = [(decode(receipt.encoded), receipt.sequence) for receipt in late.receipts]
    assert [(each.part, each.billed_token_count, sequence) for each, sequence in contents] == [
        (0, 3, 1),
        (1, 5, 2),
    ]
    assert [receipt.hash for receipt in again.receipts] == [
        receipt.hash for receipt in late.receipts
    ]
    assert all(holds(receipt, signer) for receipt in late.receipts)
    check_invariants(world.url, all_ended=True)
    check_receipts(world.url)


async def test_recovery_continues_the_chain(world: HoldWorld, tmp_path: Path) -> None:
    payer, signer, process_id = world.tenant(), new_signer(), uuid.uuid4()
    requests = [admit(payer) for _ in range(3)]
    await world.run(*requests, process_id=process_id)
    await settled(world, settle(requests[0].hold_id, 1))
    journal = UsageJournal(tmp_path, process_id)
    journal.record([Delivered(op.hold_id, 10, 0, 4, 4) for op in requests[1:]])
    for op in requests[1:]:
        journal.took(op.hold_id, 4)
    journal.close()

    await recover_journals(tmp_path, world.url, signer=signer)

    assert world.rows(
        "SELECT receipt_sequence, receipt_batch_id IS NOT NULL FROM usage_events ORDER BY 1"
    ) == [
        (1, False),
        (2, True),
        (3, True),
    ]
    check_invariants(world.url, all_ended=True)
    check_receipts(world.url)


async def test_end_user_and_labels_are_in_a_receipt_as_hashes_that_their_salts_prove(
    world: HoldWorld, sessions: Sessions
) -> None:
    """Settled by its owner and by another process, twice, after its expiry, and found by id."""
    payer, signer = world.tenant(), new_signer()
    own, other = (admit(payer, end_user="user-4711", labels=LABELS) for _ in range(2))
    late = admit(payer, end_user="user-4711")
    plain, labelled = admit(payer), admit(payer, labels={"team": "search"})
    async with HoldConnection(world.url, uuid.uuid4(), signer=signer) as connection:
        await connection.execute([own, late, plain, labelled, other])
        await connection.execute([Extend(late.hold_id, 3, 0, 10)])
        done = of_type(
            Settled,
            await connection.execute([settle(op.hold_id, 5) for op in (own, plain, labelled)]),
        )
    done += await settled(world, settle(other.hold_id, 5), signer=signer)
    world.advance(120)
    await sweep_expired_holds(world.url, signer=signer)
    done += await settled(world, settle(late.hold_id, 8), signer=signer)

    check_invariants(world.url, all_ended=True)
    check_receipts(world.url)
    versions = [[each.encoded[14:15] for each in answer.receipts] for answer in done]
    assert versions == [[b"4"], [b"1"], [b"4"], [b"4"], [b"4", b"4"]]
    proofs = []
    for answer in done:
        async with sessions() as session:
            found = await receipts_of_hold(session, answer.hold_id)
        for before, receipt in zip(answer.receipts, found, strict=True):
            assert receipt.encoded == before.encoded
            assert b"4711" not in receipt.encoded
            assert b"search" not in receipt.encoded
            assert holds(receipt, signer)
            proven = receipt.proof
            assert proven is not None
            end_user, labels = decode(receipt.encoded).hashes
            assert (proven.end_user, proven.labels) == expected_subjects(end_user, labels, proven)
            proofs.append(proven)
    assert len({each.end_user_salt for each in proofs if each.end_user}) == 3, "one per request"
    assert len({each.labels_salt for each in proofs if each.labels}) == 3


def expected_subjects(
    end_user: bytes, labels: bytes, proven: SubjectProof
) -> tuple[str, dict[str, str]]:
    """Return what the hashes of a receipt stand for, by trying what these tests use."""
    names = [
        name for name in ("user-4711",) if end_user_hash(proven.end_user_salt, name) == end_user
    ]
    values = [
        each
        for each in (LABELS, {"team": "search"})
        if labels_hash(proven.labels_salt, each) == labels
    ]
    assert (len(names), len(values)) == (bool(end_user), bool(labels))
    return "".join(names), values[0] if values else {}


async def test_a_request_bound_during_an_outage_has_its_end_user_in_the_receipt(
    world: HoldWorld,
) -> None:
    payer, hold_id, process_id = world.tenant(), uuid.uuid4(), uuid.uuid4()
    await world.run(admit(payer, hold_id=hold_id, request_id=hold_id))
    bind = Bind(hold_id, payer, uuid.uuid4(), bytes(32), LABELS, 10, 20, end_user="user-4711")
    async with HoldConnection(world.url, process_id) as connection:
        await connection.bind([bind], Renew(process_id, frozenset()))

    [done] = await settled(world, settle(hold_id, 5))

    assert all(decode(done.receipts[0].encoded).hashes)
    check_invariants(world.url)
    check_receipts(world.url)


async def test_a_receipt_outlives_the_erasure_of_its_end_user(
    world: HoldWorld, sessions: Sessions
) -> None:
    """It verifies as before, the root of its month is the same, and its name cannot be guessed."""
    payer, signer = world.tenant(), new_signer()
    first, running = (admit(payer, end_user="user-4711", labels=LABELS) for _ in range(2))
    await world.run(first, running)
    [done] = await settled(world, settle(first.hold_id, 5), signer=signer)
    async with sessions() as session:
        root = await month_root(session, payer.organization_id, NOON.date())

    world.execute("UPDATE usage_subjects SET name = NULL, erased_at = now(), archived_at = now()")
    world.execute("SET session_replication_role = replica")  # as the erasure of labels does
    world.execute("UPDATE usage_events SET labels = '{}', receipt_labels_salt = NULL")
    world.execute("SET session_replication_role = DEFAULT")

    assert world.rows("SELECT receipt_salt FROM usage_subjects") == [(None,)]
    async with sessions() as session:
        [receipt] = await receipts_of_hold(session, first.hold_id)
        assert await month_root(session, payer.organization_id, NOON.date()) == root
    assert receipt.encoded == done.receipts[0].encoded
    assert receipt.proof == SubjectProof()
    assert holds(receipt, signer)
    [late] = await settled(world, settle(running.hold_id, 5), signer=signer)
    end_user, labels = decode(late.receipts[0].encoded).hashes
    assert not end_user, "the name is not known any more"
    assert labels
    check_invariants(world.url)
    check_receipts(world.url)


async def test_labels_erased_while_their_request_runs_leave_no_salt(world: HoldWorld) -> None:
    op = admit(world.tenant(), labels=LABELS)
    async with HoldConnection(world.url, uuid.uuid4()) as connection:
        await connection.execute([op])
        world.execute("UPDATE holds SET labels = labels - 'team'")

        [done] = of_type(Settled, await connection.execute([settle(op.hold_id, 5)]))

    assert decode(done.receipts[0].encoded).hashes[1], "as in the memory of the process"
    assert world.rows("SELECT labels, receipt_labels_salt FROM usage_events") == [
        ({"größe": "m"}, None)
    ]
    check_invariants(world.url)
    check_receipts(world.url)


async def test_only_an_erasure_deletes_a_salt_and_nothing_changes_one(world: HoldWorld) -> None:
    await world.run(admit(world.tenant(), end_user="user-4711"))
    [(salt,)] = world.rows("SELECT receipt_salt FROM usage_subjects")

    for change in ("NULL", "decode(repeat('01', 32), 'hex')"):
        world.execute(f"UPDATE usage_subjects SET receipt_salt = {change}")
        assert world.rows("SELECT receipt_salt FROM usage_subjects") == [(salt,)]


async def test_a_chain_does_not_go_back_in_time(world: HoldWorld) -> None:
    """A month is thus one piece of the chain, whichever transaction began first."""
    payer = world.tenant()
    first, second = admit(payer), admit(payer)
    await world.run(first, second)
    world.set_time(NOON + timedelta(seconds=10))
    await settled(world, settle(first.hold_id, 1))
    world.set_time(NOON + timedelta(seconds=9))

    [done] = await settled(world, settle(second.hold_id, 1))

    assert decode(done.receipts[0].encoded).settled_at_us == micros(NOON) + 10_000_000
    assert world.rows("SELECT DISTINCT settled_at FROM usage_events") == [
        (NOON + timedelta(seconds=10),)
    ]


async def test_an_operation_that_breaks_its_batch_leaves_no_gap(world: HoldWorld) -> None:
    payer = world.tenant()
    good, bad = admit(payer), admit(payer)
    await world.run(good, bad)
    broken = settle(bad.hold_id, 3)
    broken = structs.replace(broken, timings={"total_ms": "\0"})  # the database refuses it

    answers = await world.run(settle(good.hold_id, 3), broken)

    assert isinstance(answers[0], Settled)
    assert world.one("SELECT last_sequence FROM receipt_chains WHERE last_sequence > 0") == 1
    check_invariants(world.url)
    check_receipts(world.url)


async def test_many_processes_write_one_chain(world: HoldWorld) -> None:
    """Four processes, one without a key; batches mix projects."""
    payers = [world.tenant("shared"), world.tenant("other"), world.tenant("third")]
    signers = [new_signer(), new_signer(), new_signer(), None]
    stores = [AwaitedStore(world.url, uuid.uuid4(), signer=each) for each in signers]
    answers: list[Settled] = []

    async def client(store: AwaitedStore, number: int) -> None:
        for attempt in range(6):
            op = admit(payers[(number + attempt) % 4 % 3])
            await store.admit(op)
            answers.append(await store.settle(settle(op.hold_id, attempt + 1)))

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(store.run()) for store in stores]
        async with asyncio.TaskGroup() as clients:
            for number in range(40):
                clients.create_task(client(stores[number % 4], number))
        for task in running:
            task.cancel()

    receipts = [answer.receipts[0] for answer in answers]
    assert (
        len({(decode(receipt.encoded).project_id, receipt.sequence) for receipt in receipts})
        == len(receipts)
        == 240
    )
    by_key = {signer.key_id: signer for signer in signers if signer is not None}
    key_ids = [proof(receipt)[0] for receipt in receipts]
    pairs = zip(receipts, key_ids, strict=True)
    assert all(holds(receipt, by_key[key_id]) for receipt, key_id in pairs if key_id)
    assert {*key_ids} == {*by_key, ""}
    assert world.one("SELECT count(*) FROM receipt_keys") == 3
    check_invariants(world.url, all_ended=True)
    check_receipts(world.url)


@pytest.mark.faults
async def test_kill_9_leaves_neither_gap_nor_fork(world: HoldWorld, tmp_path: Path) -> None:
    payer, key = world.tenant(), tmp_path / "key.pem"
    ensure_key(key)
    ids = [str(each) for each in (payer.organization_id, payer.project_id, payer.api_key_id)]
    children = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", SETTLING, world.url, str(key), *ids
        )
        for _ in range(PROCESSES)
    ]

    for killed, child in enumerate(children, 1):
        await until(lambda: sequence(world) >= SETTLED_LEAST * killed, "settlements")  # noqa: B023
        child.send_signal(signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
    await until(lambda: backends(world) == 0, "the server to notice")

    assert world.one("SELECT count(*) FROM usage_events") == sequence(world)
    check_invariants(world.url)
    check_receipts(world.url)


def sequence(world: HoldWorld) -> int:
    """Return the last sequence number of the only chain."""
    return int(world.one("SELECT last_sequence FROM receipt_chains"))


def backends(world: HoldWorld) -> int:
    """Return the other connections to this database."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <>"
        " pg_backend_pid()"
    )
    return int(world.one(f"{query} AND backend_type = 'client backend'"))


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE receipt_chains SET last_sequence = 0",
        "UPDATE receipt_chains SET last_hash = decode(repeat('01', 32), 'hex')",
        "UPDATE receipt_chains SET last_sequence = 2",
        "UPDATE receipt_chains SET last_settled_at = last_settled_at - interval '1 second'",
        "DELETE FROM receipt_chains",
        "TRUNCATE receipt_chains",
        "UPDATE receipt_batches SET signature = decode(repeat('01', 64), 'hex')",
        "DELETE FROM receipt_batches",
        "UPDATE receipt_keys SET public_key = decode(repeat('01', 32), 'hex')",
        "UPDATE usage_events SET receipt_sequence = 2",
    ],
)
async def test_the_database_refuses_to_rewrite_receipts(world: HoldWorld, change: str) -> None:
    op = admit(world.tenant())
    await world.run(op)
    await settled(world, settle(op.hold_id, 5), signer=new_signer())

    with pytest.raises(psycopg.errors.RestrictViolation):
        world.execute(change)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("UPDATE usage_events SET cost_picos = cost_picos + 1", "has not the hash of what it says"),
        ("UPDATE usage_events SET receipt_sequence = 2", "are [2], its head is 1"),
        (
            "UPDATE usage_events SET previous_receipt_hash = receipt_hash",
            "does not name the one before",
        ),
        (
            "UPDATE receipt_batches SET signature = decode(repeat('01', 64), 'hex')",
            "is not signed by its key",
        ),
        (
            "UPDATE receipt_keys SET public_key = decode(repeat('01', 32), 'hex')",
            "is not signed by its key",
        ),
    ],
)
async def test_the_checker_sees_planted_faults(world: HoldWorld, fault: str, message: str) -> None:
    op = admit(world.tenant())
    await world.run(op)
    await settled(world, settle(op.hold_id, 5), signer=new_signer())
    check_receipts(world.url)

    world.execute("SET session_replication_role = replica")  # without triggers
    world.execute(fault)

    with pytest.raises(AssertionError, match=re.escape(message)):
        check_receipts(world.url)
