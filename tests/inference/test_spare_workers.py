"""Spare workers: taken by the next start, replaced when dead, gone with their keeper."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from common.processes import alive, children_of
from inference.adapters.torch_engine import TorchEngine
from inference.workers import process as spare_workers
from inference.workers.process import SpareWorkers
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import make_request
from tests.inference.worker_engines import prompt, run, settings_for, until

pytestmark = pytest.mark.usefixtures("executed_workers")


async def test_a_start_takes_the_spare_and_one_that_died_is_not_taken(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A slow machine would pass it before the checks.
    monkeypatch.setattr(spare_workers, "REPLACE_AFTER_S", 3600.0)
    before = set(children_of(os.getpid()))
    spares = SpareWorkers(1)
    async with asyncio.TaskGroup() as tasks:
        keeper = tasks.create_task(spares.serve())
        await until(lambda: spares.ready_count == 1)
        [spare_pid] = set(children_of(os.getpid())) - before

        engine = TorchEngine(settings_for(tiny), spares.open)
        tasks.create_task(engine.serve())
        await engine.start()
        outcome = await run(engine, make_request(prompt(1), 5))

        assert engine.worker_pid == spare_pid
        assert spares.ready_count == 0
        assert len(outcome.token_ids) == 5
        # The restart finds no spare, and starts a worker.
        os.kill(spare_pid, signal.SIGKILL)
        await until(lambda: not engine.healthy())
        await engine.start()
        assert engine.worker_pid not in (None, spare_pid)
        keeper.cancel()
        await engine.close()
    assert set(children_of(os.getpid())) == before


async def test_spares_go_with_their_keeper_and_a_dead_one_counts_for_nothing() -> None:
    before = set(children_of(os.getpid()))
    spares = SpareWorkers(2)
    async with asyncio.TaskGroup() as tasks:
        keeper = tasks.create_task(spares.serve())
        await until(lambda: spares.ready_count == 2)
        first, second = set(children_of(os.getpid())) - before

        os.kill(first, signal.SIGKILL)
        await until(lambda: spares.ready_count == 1)
        async with spares.open("inference.adapters.torch_worker", {}) as other:  # of another kind
            assert other.pid not in (first, second)
        keeper.cancel()
    assert not alive(first)
    assert not alive(second)
