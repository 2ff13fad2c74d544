"""Recovery from journals of dead processes: once, completely, by the first process that tries."""

from __future__ import annotations

import asyncio
import signal
import sys
import uuid
from pathlib import Path

import psycopg
import pytest

from metering.core.errors import DatabaseUnavailable
from metering.core.models import QuotaDimension
from metering.holds import recovery
from metering.holds.hold_connection import HoldConnection
from metering.holds.journal import FORMAT, Delivered, UsageJournal
from metering.holds.operations import Admit, Expire, Extend, Void
from metering.holds.recovery import Recovered, recover_journals, sweep_expired_holds
from metering.store.db import psycopg_conninfo
from tests.metering.cutting_proxy import CuttingProxy
from tests.metering.hold_world import HoldWorld, admit, settle
from tests.metering.invariants import check_invariants
from tests.service import until

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"


def files(directory: Path) -> list[Path]:
    """Return the files of a directory."""
    return list(directory.iterdir())


async def dead_process(
    world: HoldWorld, directory: Path, *, delivered: tuple[int, ...], in_flight: int = 0
) -> list[Admit]:
    """Create holds and journal of a dead process with these delivered tokens per request.

    in_flight: journalled tokens per request beyond those, whose message no transport has taken.
    """
    journal = UsageJournal(directory, uuid.uuid4())
    payer = world.tenant(f"t{uuid.uuid4().hex[:8]}")
    for dimension in QuotaDimension:
        world.quota(payer, dimension, 10_000)
    requests = [admit(payer) for _ in delivered]
    await world.run(*requests, process_id=journal.process_id)
    for op, tokens in zip(requests, delivered, strict=True):
        for total in range(1, tokens + in_flight + 1):
            journal.record([Delivered(op.hold_id, 10, 4, total, total)])
            if total <= tokens:
                journal.took(op.hold_id, total)
    journal.close()
    # Only a process that stops normally removes its journal.
    if not any(delivered) and not in_flight:
        directory.joinpath(f"{journal.process_id}.1{FORMAT.suffix}").touch()
    return requests


async def test_delivered_tokens_are_settled_others_voided(world: HoldWorld, tmp_path: Path) -> None:
    await dead_process(world, tmp_path, delivered=(3, 0, 7))

    done = await recover_journals(tmp_path, world.url)

    assert done == Recovered(1, 2, 10)
    assert sorted(world.events()) == [(0, 10, 3, "failed"), (0, 10, 7, "failed")]
    assert world.hold_count("voided") == 1
    assert not files(tmp_path)
    check_invariants(world.url, all_ended=True)


@pytest.mark.parametrize("expired", [False, True])
async def test_tokens_that_no_transport_has_taken_are_not_billed(
    world: HoldWorld, tmp_path: Path, *, expired: bool
) -> None:
    """The journal is the upper bound; without a taken token the input is free, too."""
    requests = await dead_process(world, tmp_path, delivered=(3, 0, 7), in_flight=5)
    if expired:
        world.advance(61)
        await world.run(*(Expire(op.hold_id) for op in requests))

    done = await recover_journals(tmp_path, world.url)

    nothing = [(0, 0, 0, "failed")] if expired else []
    assert done == Recovered(1, 2 + len(nothing), 10)
    assert sorted(world.events()) == [*nothing, (0, 10, 3, "failed"), (0, 10, 7, "failed")]
    assert world.rows("SELECT generated_token_count FROM usage_events ORDER BY 1")[-1] == (12,)
    assert world.hold_count("voided") == (0 if expired else 1)
    assert not files(tmp_path)
    used = world.rows(
        "SELECT used, held FROM quota_counters c JOIN quotas q ON q.id = c.quota_id"
        " WHERE q.dimension = 'tokens_per_month'"
    )
    assert used == [(30, 0)]
    check_invariants(world.url, all_ended=True)


async def test_a_late_admission_of_a_dead_process_fails(world: HoldWorld, tmp_path: Path) -> None:
    """The server still runs the batch of a dead process when recovery begins."""
    await dead_process(world, tmp_path, delivered=())
    [process_id] = {uuid.UUID(path.name.partition(".")[0]) for path in files(tmp_path)}
    payer = world.tenant("slow")
    world.quota(payer, QuotaDimension.TOKENS_PER_DAY, 10_000)
    process = HoldConnection(world.url, process_id)
    first = admit(payer)
    # From now on, an admission is one message, which the server runs without the process.
    await process.execute([first])
    await process.execute([Void(first.hold_id)])
    async with await psycopg.AsyncConnection.connect(psycopg_conninfo(world.url)) as blocker:
        await blocker.execute("SELECT 1 FROM quota_counters FOR UPDATE")
        batch = asyncio.create_task(process.execute([admit(payer)]))
        await until(lambda: world.one(WAITING) == 1, "the batch to wait for the lock")
        assert process._connection is not None
        process._connection.abort()  # closes the socket, as the kernel does for a dead process
        [refusal] = await batch
        assert isinstance(refusal, DatabaseUnavailable)
        assert await recover_journals(tmp_path, world.url) == Recovered(1, 0, 0)
    await until(lambda: world.one(WAITING) == 0, "the batch to end")

    assert world.hold_count("held") == 0
    check_invariants(world.url, all_ended=True)


async def test_a_process_without_delivery_leaves_nothing(world: HoldWorld, tmp_path: Path) -> None:
    await dead_process(world, tmp_path, delivered=(0, 0))

    assert await recover_journals(tmp_path, world.url) == Recovered(1, 0, 0)

    assert world.hold_count("voided") == 2
    check_invariants(world.url, all_ended=True)


async def test_recovery_after_recovery_changes_nothing(world: HoldWorld, tmp_path: Path) -> None:
    await dead_process(world, tmp_path, delivered=(3, 0))
    kept = {path: path.read_bytes() for path in files(tmp_path)}
    await recover_journals(tmp_path, world.url)
    before = world.contents()
    for path, data in kept.items():
        path.write_bytes(data)

    assert await recover_journals(tmp_path, world.url) == Recovered(1, 1, 3)

    assert world.contents() == before


async def test_recoveries_and_a_sweeper_settle_each_once(world: HoldWorld, tmp_path: Path) -> None:
    for _ in range(4):
        await dead_process(world, tmp_path, delivered=(3, 0, 5))
    world.advance(61)

    done = await asyncio.gather(
        recover_journals(tmp_path, world.url),
        sweep_expired_holds(world.url),
        recover_journals(tmp_path, world.url),
    )

    assert sum(one.journal_count for one in done if isinstance(one, Recovered)) == 4
    assert sorted(delivered for _, _, delivered, _ in world.events()) == [3] * 4 + [5] * 4
    check_invariants(world.url, all_ended=True)


async def test_expiry_then_recovery_bills_in_two_parts(world: HoldWorld, tmp_path: Path) -> None:
    [op] = await dead_process(world, tmp_path, delivered=(9,))
    await world.run(Extend(op.hold_id, 6, 4, 10))
    world.advance(61)
    await world.run(Expire(op.hold_id))

    await recover_journals(tmp_path, world.url)

    assert world.events() == [(0, 10, 6, "failed"), (1, 0, 3, "failed")]
    check_invariants(world.url, all_ended=True)


async def test_a_hold_settled_before_death_stays_so(world: HoldWorld, tmp_path: Path) -> None:
    [op] = await dead_process(world, tmp_path, delivered=(9,))
    await world.run(settle(op.hold_id, 9, cached_tokens=4))

    assert await recover_journals(tmp_path, world.url) == Recovered(1, 1, 9)

    assert world.events() == [(0, 10, 9, "stop")]


async def test_a_refused_entry_is_kept_and_stops_no_other(world: HoldWorld, tmp_path: Path) -> None:
    """Other processes must start all the same."""
    await dead_process(world, tmp_path, delivered=(3,))
    broken = UsageJournal(tmp_path, uuid.uuid4())
    unknown_id = uuid.uuid4()
    broken.record([Delivered(unknown_id, 1, 1, 1, 1)])
    broken.took(unknown_id, 1)
    broken.close()
    [beyond] = await dead_process(world, tmp_path, delivered=(20,))
    world.execute("UPDATE holds SET leased_token_count = 4 WHERE id = %s", beyond.hold_id)

    done = await recover_journals(tmp_path, world.url)

    assert (done.journal_count, done.settled_hold_count) == (3, 1)
    assert (
        sorted(path.suffix for path in files(tmp_path))
        == [".refused"] * 2 + [FORMAT.marks_suffix] * 2
    )
    assert world.events() == [(0, 10, 3, "failed")]


async def test_a_journal_stays_until_it_is_committed(world: HoldWorld, tmp_path: Path) -> None:
    await dead_process(world, tmp_path, delivered=(3,))
    async with CuttingProxy(world.url).listening() as proxy:
        proxy.refusing = True
        with pytest.raises(DatabaseUnavailable):
            await recover_journals(tmp_path, proxy.url)
        proxy.refusing = False
        for number in range(1, 300):  # far more messages than one recovery takes
            proxy.cut_before("server", number)
            try:
                await recover_journals(tmp_path, proxy.url)
            except DatabaseUnavailable:
                continue
            break
        assert proxy.cut_count > 10

    assert not files(tmp_path)
    assert world.events() == [(0, 10, 3, "failed")]
    check_invariants(world.url, all_ended=True)


async def test_journals_larger_than_one_batch_are_recovered_whole(
    world: HoldWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "BATCH_SIZE_MAX", 2)
    await dead_process(world, tmp_path, delivered=(1, 2, 3, 4, 5))

    assert await recover_journals(tmp_path, world.url) == Recovered(1, 5, 15)

    check_invariants(world.url, all_ended=True)


@pytest.mark.faults
async def test_a_killed_recovery_is_finished_by_the_next(world: HoldWorld, tmp_path: Path) -> None:
    await dead_process(world, tmp_path, delivered=(3, 5, 0, 7))
    program = (
        "import asyncio, os, sys, pathlib\n"
        "from metering.holds import hold_connection\n"
        "from metering.holds.recovery import recover_journals\n"
        "real, left = hold_connection.execute_slow, int(sys.argv[3])\n"
        "async def killed(*a, **n):\n"
        "    global left\n"
        "    answer = await real(*a, **n)\n"
        "    left -= 1\n"
        "    if left == 0: os.kill(os.getpid(), 9)\n"
        "    return answer\n"
        "hold_connection.execute_slow = killed\n"
        "asyncio.run(recover_journals(pathlib.Path(sys.argv[1]), sys.argv[2]))\n"
    )
    for batches in ("1", "2"):
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            str(tmp_path),
            world.url,
            batches,
        )
        assert await child.wait() == -signal.SIGKILL

    assert await recover_journals(tmp_path, world.url) == Recovered(1, 3, 15)

    assert sorted(delivered for _, _, delivered, _ in world.events()) == [3, 5, 7]
    check_invariants(world.url, all_ended=True)
