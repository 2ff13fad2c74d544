"""GPUs of a machine: one engine each, none leaked, pinned engines always placed."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from api.core.settings import Settings
from api.fleet.fleet import build_serving, memory_of_gpus
from common.gpus import Gpu, GpusUnknown, read_gpus
from common.processes import started_with
from common.settings import SettingInvalid
from inference.routing.memory import HANDOVER_S, GpusTooFew, GpuTooSmall, MemoryBudget, stored_bytes
from tests.inference.checkpoints import TinyCheckpoint, make_checkpoint
from tests.inference.tensorrt_engines import find_double, tensorrt_settings
from tests.inference.worker_engines import serving
from tests.inference.worker_engines import settings_for as torch_settings

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

GPUS = tuple(map(str, range(8)))
SIZES = {gpu: 80 if int(gpu) < 6 else 24 for gpu in GPUS[:-1]}  # the size of the last is unknown
STEPS = 400


@dataclass(eq=False)
class FakeResident:
    """Implement `Resident`. used_at_s: of its last use; None while in use."""

    name: str
    gpu_count: int
    gpus: tuple[str, ...] = ()
    is_pinned: bool = False
    memory_bytes: int = 1
    gpu_memory_bytes: int = 0
    used_at_s: float | None = None
    is_leaving: bool = False
    replica: None = None
    needs = property(lambda self: self)

    def idle_since_s(self) -> float | None:
        return None if self.is_pinned else self.used_at_s

    def evict(self) -> None:
        assert not self.is_pinned
        assert self.used_at_s is not None
        self.is_leaving = True


class World:
    """Engines that start, fail, rest and are evicted at random, on eight pretended GPUs."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now_s = 0.0
        self.budget = MemoryBudget(chance.choice((None, 4, 6)), lambda: self.now_s, GPUS, SIZES)
        pinned = [
            FakeResident("pinned 1", 1, ("2", "3"), True, gpu_memory_bytes=60),
            FakeResident(
                "pinned 2", 2, is_pinned=True, gpu_memory_bytes=chance.choice((0, 24, 25))
            ),
        ]
        pools = ((), (), GPUS[4:], ("0", "1", "4", "5"))
        self.residents = pinned + [
            FakeResident(
                f"resident {index}",
                chance.choice((0, 1, 1, 2)),
                chance.choice(pools),
                gpu_memory_bytes=chance.choice((0, 20, 40)),
            )
            for index in range(8)
        ]
        self.budget.check(self.residents)
        self.waiting: dict[FakeResident, asyncio.Task[bool]] = {}
        self.running: set[FakeResident] = set()

    async def settle(self) -> None:
        """Let granted engines start."""
        for _ in range(3):
            await asyncio.sleep(0)
        for resident, task in list(self.waiting.items()):
            if task.done():
                del self.waiting[resident]
                assert task.result()
                resident.used_at_s, resident.is_leaving = None, False
                self.running.add(resident)

    def start(self, resident: FakeResident) -> None:
        self.waiting[resident] = asyncio.ensure_future(self.budget.reserve(resident))

    def end(self, resident: FakeResident) -> None:
        """Close, crash for good, or leave after an eviction."""
        self.running.remove(resident)
        self.budget.release(resident)

    async def step(self) -> None:
        resident = self.chance.choice(self.residents)
        if resident in self.waiting:
            if self.chance.random() < 0.2:
                self.waiting.pop(resident).cancel()
        elif resident not in self.running:
            self.start(resident)
        elif resident.is_leaving or self.chance.random() < 0.2:
            self.end(resident)
        else:
            resident.used_at_s = self.now_s if resident.used_at_s is None else None
        self.now_s += HANDOVER_S
        self.budget.poll()
        await self.settle()

    def check(self) -> None:
        held = {resident: self.budget.gpus_of(resident) for resident in self.residents}
        given = [gpu for gpus in held.values() for gpu in gpus]
        assert len(set(given)) == len(given), "two engines have one GPU"
        for resident, gpus in held.items():
            assert len(gpus) == (resident.gpu_count if resident in self.running else 0)
            assert set(gpus) <= set(resident.gpus or GPUS)
            assert all(SIZES.get(gpu, 80) >= resident.gpu_memory_bytes for gpu in gpus)


@pytest.mark.parametrize("seed", range(20))
async def test_no_gpu_has_two_engines_and_none_is_leaked(seed: int) -> None:
    world = World(random.Random(seed))
    pinned = [resident for resident in world.residents if resident.is_pinned]
    for _ in range(STEPS):
        await world.step()
        world.check()
    while world.waiting or world.running:
        for resident in list(world.running):
            world.end(resident)
        world.budget.poll()
        await world.settle()
        world.check()

    assert world.budget.held_bytes == 0
    for resident in world.residents:
        assert world.budget.fits_now(resident)
    for resident in pinned:
        world.start(resident)
    await world.settle()
    assert world.running == set(pinned), "pinned engines never wait for a GPU"


def test_pinned_engines_are_placed_if_there_is_any_way() -> None:
    """The first could take a GPU that the second needs."""
    budget = MemoryBudget(gpus=GPUS[:3])
    pinned = [
        FakeResident("any", 1, is_pinned=True),
        FakeResident("pair", 2, ("0", "1"), is_pinned=True),
    ]

    budget.check(pinned)


@pytest.mark.parametrize(
    ("residents", "name"),
    [
        ([FakeResident("large", 9)], "large"),
        ([FakeResident("kept", 7, is_pinned=True), FakeResident("second", 2)], "second"),
        ([FakeResident("one", 1, ("3",), True), FakeResident("two", 1, ("3",), True)], "two"),
        ([FakeResident("unknown", 1, ("8",))], "unknown"),
    ],
)
def test_an_engine_that_never_gets_gpus_is_named(residents: list[FakeResident], name: str) -> None:
    with pytest.raises(GpusTooFew, match=f"model '{name}' needs"):
        MemoryBudget(gpus=GPUS).check(residents)


def test_weights_that_fit_no_gpu_are_refused_with_the_sizes() -> None:
    large = FakeResident("large", 2, ("5", "6"), gpu_memory_bytes=40)
    budget = MemoryBudget(gpus=GPUS, gpu_memory=SIZES)

    with pytest.raises(
        GpuTooSmall, match=r"'large' needs at least 40 bytes on each of 2 GPUs .* GPU 6 has 24"
    ):
        budget.check([large])
    budget.check([replace(large, gpus=("5", "7")), replace(large, gpu_memory_bytes=24)])


def test_only_the_weights_of_an_index_are_counted(tmp_path: Path) -> None:
    """Checkpoints of Mistral have a second copy, `consolidated.safetensors`."""
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(bytes(10))
    assert stored_bytes(tmp_path) == 30
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))

    assert stored_bytes(tmp_path) == 20


@dataclass
class NvmlDouble:
    """Double of NVML's functions in `pynvml`. gpus: total and used bytes by UUID, in order."""

    gpus: dict[str, tuple[int, int]]
    open_count: int = 0

    def nvmlInit(self) -> None:
        self.open_count += 1

    def nvmlShutdown(self) -> None:
        self.open_count -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index >= len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return list(self.gpus)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.gpus:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetName(self, handle: str) -> str:
        return f"NVIDIA {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: Any = None) -> Any:
        total, used = self.gpus[handle]
        return pynvml.c_nvmlMemory_t(total=total, free=total - used, used=used)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> NvmlDouble:
    """Replace NVML's functions by a double with two GPUs; compare it with the package."""
    double = NvmlDouble({"GPU-1a": (80 << 30, 1 << 20), "GPU-2b": (24 << 30, 20 << 30)})
    functions = inspect.getmembers(double, inspect.ismethod)
    for name, function in [each for each in functions if each[0].startswith("nvml")]:
        published = inspect.signature(getattr(pynvml, name)).parameters.values()
        ours = inspect.signature(function).parameters.values()
        assert [(each.name, each.default) for each in ours] == [
            (each.name, each.default) for each in published
        ]
        monkeypatch.setattr(pynvml, name, function)
    return double


def test_gpus_are_known_by_number_and_by_uuid(nvml: NvmlDouble) -> None:
    found = read_gpus(["1", "GPU-1a", "2", "GPU-"])

    assert found == {
        "1": Gpu("NVIDIA GPU-2b", 24 << 30, 20 << 30),
        "GPU-1a": Gpu("NVIDIA GPU-1a", 80 << 30, 1 << 20),
    }
    assert nvml.open_count == 0


def test_a_machine_without_a_driver_has_no_known_gpus() -> None:
    with pytest.raises(GpusUnknown, match="NVML Shared Library Not Found"):
        read_gpus(["0"])
    assert memory_of_gpus(["0"]) == {}


def test_a_model_that_cannot_fit_is_refused_at_start(nvml: NvmlDouble, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    replica_sets = tmp_path / "fleet.yaml"
    settings = Settings.of(home=tmp_path, fleet=str(replica_sets))

    def start(gpus: str, config: str, more: str = "") -> None:
        replica_sets.write_text(
            f"gpus: {gpus}\nmodels: {{m: {{engine: tensorrt, directory: m, memory_bytes: 100GiB,"
            f" engine_config: {config}{more}}}}}"
        )
        build_serving(settings)

    with pytest.raises(
        SettingInvalid, match=r"model 'm' needs at least 107,374,182,400 bytes .*GPU 0 has 85,899"
    ):
        start("[0]", "{}")
    with pytest.raises(SettingInvalid, match=r"53,687,091,200 bytes .*GPU 1 has 25,769,803,776"):
        start("[0, 1]", "{tensor_parallel_size: 2}")
    start("[0, 1, 2, 3, 4]", "{tensor_parallel_size: 4}")


async def test_an_engine_waits_until_an_idle_one_has_left_its_gpu() -> None:
    now_s = 0.0
    budget = MemoryBudget(None, lambda: now_s, GPUS[:2])
    idle, elsewhere, wanting = (
        FakeResident("a", 1, ("0",)),
        FakeResident("b", 1, ("1",)),
        FakeResident("c", 1, ("0",)),
    )
    for resident in (idle, elsewhere):
        assert await budget.reserve(resident)
        resident.used_at_s = now_s
    now_s += HANDOVER_S
    waiting = asyncio.ensure_future(budget.reserve(wanting))
    await asyncio.sleep(0)

    assert (idle.is_leaving, elsewhere.is_leaving, waiting.done()) == (True, False, False)
    budget.release(idle)
    assert await waiting
    assert budget.gpus_of(wanting) == ("0",)


@pytest.mark.usefixtures("executed_workers")
@pytest.mark.parametrize("settings_for", [tensorrt_settings, torch_settings])
async def test_a_worker_sees_its_own_gpus_only(
    settings_for: Any, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_double(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "96,97,98")
    settings = settings_for(tiny)
    assert isinstance(settings.environment, dict)
    async with serving(settings, started=False) as engine:
        settings.environment["CUDA_VISIBLE_DEVICES"] = (
            "97,98"  # after it was built, as a resident does
        )
        await engine.start()
        assert started_with("CUDA_VISIBLE_DEVICES", "97,98")
