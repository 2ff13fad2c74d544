"""Two api processes of a machine share their engine workers: kills of either harm no other one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from api.core.settings import bundled_models
from common.processes import alive
from metering.core.models import QuotaDimension
from tests.faults.conftest import Start
from tests.faults.test_lost_replicas import answers, check_whole, fleet_file, requests
from tests.metering.invariants import check_invariants
from tests.service import Service, until, wait_for

pytestmark = pytest.mark.faults

LIMITS = {QuotaDimension.TOKENS_PER_MONTH: 10**9, QuotaDimension.CONCURRENT_REQUESTS: 10_000}
TOKENS = 300


def launch_two(launch: Start, tmp_path: Path, model: Path) -> tuple[Service, Service]:
    """Start two api processes with two replicas of a model, which both use."""
    fleet = fleet_file(tmp_path / "fleet", model)
    first, second = (
        launch(
            home=tmp_path / name,
            engine_directory=str(tmp_path / "engines"),
            fleet=fleet,
            models=bundled_models(),
        )
        for name in ("first", "second")
    )
    wait_for(lambda: len(first.worker_pids()) == 2, "both workers to start")
    return first, second


async def test_the_kill_of_one_process_is_not_seen_in_the_streams_of_another(
    launch: Start, model: Path, tmp_path: Path
) -> None:
    """The killed one had started the workers. A process that comes back finds them loaded."""
    starter, other = launch_two(launch, tmp_path, model)
    workers = starter.worker_pids()
    tenant = await starter.tenant(LIMITS)
    async with other.stream(tenant.secret) as stream:
        expected = await answers(stream, TOKENS)
        async with starter.stream(tenant.secret) as lost:
            begun, ending = requests(TOKENS), requests(TOKENS)
            await stream.send(*begun)
            await lost.send(*ending)
            for frame in begun:
                await stream.received(frame.request_id, 3)
            for frame in ending[:5]:
                await lost.received(frame.request_id, 3)

            starter.kill()

            assert await check_whole(stream, begun, expected) == 0, "no engine was lost"
            await lost.closed()
        assert other.worker_pids() == workers
        starter.start()
        assert starter.log.count("loaded ") == 2, "of its first start"
        async with starter.stream(tenant.secret) as again:
            assert await answers(again, TOKENS) == expected
    assert starter.worker_pids() == workers
    await until(lambda: starter.database.held_hold_count() == 0, "the killed requests to end")
    check_invariants(starter.database_url, all_ended=True)


async def test_a_process_that_is_stopped_leaves_its_engines_to_the_other_one(
    launch: Start, model: Path, tmp_path: Path
) -> None:
    """It had started them. The other one ends them when it is stopped, without a wait."""
    starter, other = launch_two(launch, tmp_path, model)
    workers = starter.worker_pids()
    tenant = await starter.tenant(LIMITS)
    async with other.stream(tenant.secret) as stream:
        expected = await answers(stream, TOKENS)
        begun = requests(TOKENS)
        await stream.send(*begun)
        for frame in begun:
            await stream.received(frame.request_id, 3)

        assert starter.process is not None
        starter.process.send_signal(signal.SIGTERM)
        await until(lambda: not alive(starter.pid), "the process to end")

        assert await check_whole(stream, begun, expected) == 0, "no engine was lost"
        assert await answers(stream, TOKENS) == expected
    assert other.worker_pids() == workers
    assert other.process is not None
    other.process.send_signal(signal.SIGTERM)
    await until(lambda: not alive(other.pid), "the last process to end")
    assert not any(map(alive, workers))


async def test_a_killed_worker_is_replaced_once_and_all_streams_continue(
    launch: Start, model: Path, tmp_path: Path
) -> None:
    first, second = launch_two(launch, tmp_path, model)
    workers = first.worker_pids()
    tenant = await first.tenant(LIMITS)
    async with first.stream(tenant.secret) as one, second.stream(tenant.secret) as other:
        expected = await answers(one, TOKENS)
        begun, also_begun = requests(TOKENS), requests(TOKENS)
        await one.send(*begun)
        await other.send(*also_begun)
        for frame in (*begun, *also_begun):
            await (one if frame in begun else other).received(frame.request_id, 3)

        os.kill(workers[0], signal.SIGKILL)

        moved = [
            await check_whole(one, begun, expected),
            await check_whole(other, also_begun, expected),
        ]
        assert all(moved), "both had requests there"

        def replaced() -> bool:
            return len(first.worker_pids()) == 2

        await until(replaced, "the worker to be replaced")
        assert len({*first.worker_pids(), *workers}) == 3
    loads = first.log.count("loaded ") + second.log.count("loaded ")
    assert loads == 3
    left = first.worker_pids()
    first.kill()
    second.kill()
    await until(lambda: not any(map(alive, left)), "the workers to end")
