"""One memory budget for all processes of a machine: it holds, and no request waits for ever.

Budgets of one process stand for those of several: they know each other through the directory only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from inference.adapters.torch_engine import TorchEngine
from inference.engine import EngineState
from inference.routing import memory
from inference.routing.memory import MemoryBudget, Needs
from inference.routing.on_demand import ManagedEngine, ManagedTerms
from inference.workers.process import open_worker
from inference.workers.reservations import Reservations
from inference.workers.sharing import EngineDirectory
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.managed_world import FakeEngine, World, use
from tests.inference.worker_engines import WAIT_S, settings_for, until

MODEL_BYTES = 10


class Machine:
    """Processes of a machine, with what their engines hold. Implements what `FakeEngine` uses."""

    closing = slow_close = False

    def __init__(self, path: Path, total_bytes: int = MODEL_BYTES, gpus: tuple[str, ...] = ()):
        self.path, self.total_bytes, self.gpus = path, total_bytes, gpus
        self.alive: list[FakeEngine] = []
        self.seen: set[str] = set()

    def process(self, names: str) -> dict[str, ManagedEngine]:
        """Start nothing; return the engines of one process by the names of their models."""
        directory = EngineDirectory(self.path)
        reservations = Reservations(directory)
        budget = MemoryBudget(self.total_bytes, gpus=self.gpus, reservations=reservations)

        def build(name: str) -> ManagedEngine:
            replica = directory.replica(name)
            needs = Needs(MODEL_BYTES, gpu_count=len(self.gpus), replica=replica)
            return ManagedEngine(
                lambda: cast(Any, Loading(name, self)), ManagedTerms(0, needs), budget
            )

        return {name: build(name) for name in names}

    def engines_in_use(self, engine: FakeEngine) -> None:
        self.alive.append(engine)
        names = {each.model.name for each in self.alive}
        assert len(names) * MODEL_BYTES <= self.total_bytes, f"{names} are in memory at once"
        self.seen |= names

    def dies(self, engine: FakeEngine) -> None:
        self.alive.remove(engine)


class Loading(FakeEngine):
    """Engine that is loaded as soon as it is started."""

    def __init__(self, name: str, machine: Machine) -> None:
        super().__init__(name, cast(World, machine))

    async def start(self) -> None:
        if self.state is EngineState.COLD:
            self.start_requested = True
            self.load()
        await super().start()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "HANDOVER_S", 0.01)
    monkeypatch.setattr(memory, "WAITING_POLL_S", 0.002)
    monkeypatch.setattr(memory, "WANTED_POLL_S", 0.005)


@contextlib.asynccontextmanager
async def served(*engines: ManagedEngine) -> AsyncIterator[None]:
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        for each in engines:
            tasks.create_task(each.serve())
        yield
        for each in engines:
            await each.close()


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gpus", [(), ("0",)], ids=["memory", "gpu"])
async def test_two_models_are_never_in_memory_together_and_all_are_served(
    tmp_path: Path, seed: int, gpus: tuple[str, ...]
) -> None:
    chance = random.Random(seed)
    machine = Machine(tmp_path, gpus=gpus)
    processes = [machine.process("abc"), machine.process("abc")]
    engines = [engine for each in processes for engine in each.values()]

    async def user(engine: ManagedEngine) -> None:
        for _ in range(10):
            async with use(engine):
                await asyncio.sleep(chance.random() * 0.01)
            await asyncio.sleep(0.02 + chance.random() * 0.02)

    async with served(*engines):
        await asyncio.gather(*map(user, engines))
    assert machine.seen == {*"abc"}
    assert not machine.alive


@pytest.mark.usefixtures("fast")
async def test_processes_hold_the_memory_of_a_shared_engine_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    first, second = machine.process("a")["a"], machine.process("a")["a"]
    async with served(first, second), use(first), use(second):
        assert len(machine.alive) == 2, "the fake ones stand for one worker"


@pytest.mark.usefixtures("fast")
async def test_an_engine_that_another_process_uses_is_not_lost_to_an_eviction(
    tmp_path: Path,
) -> None:
    """The process that waits is served when the other one is idle too."""
    machine = Machine(tmp_path)
    first, second = machine.process("ab"), machine.process("ab")
    async with served(*first.values(), *second.values()):
        async with use(second["a"]):
            async with use(first["a"]):
                pass
            waiting = asyncio.create_task(first["b"].start())
            await until(lambda: not first["a"].healthy())
            await asyncio.sleep(0.1)
            assert second["a"].healthy()
            assert not waiting.done()
        await waiting


HOLDER = """
import sys, time
from pathlib import Path
from inference.routing.memory import MemoryBudget, Needs
from inference.workers.reservations import Reservations
from inference.workers.sharing import EngineDirectory
directory = EngineDirectory(Path(sys.argv[1]))
reservations = Reservations(directory)
with reservations.deciding():
    reservations.queue({})
    replica = directory.replica("held")
    replica.enter()
    replica.declare(10, ())
print("holds", flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("fast")
async def test_a_killed_process_holds_neither_memory_nor_a_ticket(tmp_path: Path) -> None:
    holder = subprocess.Popen(  # noqa: ASYNC220  # it does not wait
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        engine = Machine(tmp_path).process("a")["a"]
        async with served(engine):
            start = asyncio.create_task(engine.start())
            await asyncio.sleep(0.1)
            assert not start.done()
            assert engine.condition().loading_stage == "memory"

            os.kill(holder.pid, signal.SIGKILL)

            await start
    finally:
        holder.kill()
        holder.communicate()


async def test_a_worker_that_nobody_uses_gives_its_memory_to_one_who_waits(
    tmp_path: Path, tiny: TinyCheckpoint
) -> None:
    """It would wait some seconds more for its killed process to come back."""
    directory, settings = EngineDirectory(tmp_path), settings_for(tiny)

    def managed(
        name: str, budget: MemoryBudget, found: Callable[[TorchEngine], None]
    ) -> ManagedEngine:
        replica = directory.replica(name, settings)
        needs = Needs(MODEL_BYTES, is_pinned=name == "a", replica=replica)  # a stays by itself

        def build() -> TorchEngine:
            engine = TorchEngine(settings, replica.opener(open_worker))
            found(engine)
            return engine

        return ManagedEngine(build, ManagedTerms(0, needs), budget)

    engines: list[TorchEngine] = []
    killed, other = (
        managed(
            name, MemoryBudget(MODEL_BYTES, reservations=Reservations(directory)), engines.append
        )
        for name in "ab"
    )
    async with served(killed):
        await killed.start()
        process = engines[0]._worker.process
        assert process is not None
        process._users.leave()  # type: ignore[union-attr]  # as the kernel does for a killed one
        async with served(other):
            async with asyncio.timeout(8):
                await other.start()
