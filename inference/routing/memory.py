"""Memory and GPUs of a machine for its engines, and estimates of the memory of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from inference.workers.reservations import Reservation, Reservations
from inference.workers.sharing import SharedReplica

# Python, torch and the tokenizer, per process: measured with a worker of a tiny model, rounded up.
HOST_BYTES = 192 << 20
_COMPUTED_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_SAME_TYPE = {"float32": "F32", "bfloat16": "BF16"}

# Seconds for which an engine is not evicted after its last use: a request that waited for it enters
# within milliseconds and would otherwise load it again.
HANDOVER_S = 0.25
# Seconds between two looks at what other processes have released, and at what they wait for.
WAITING_POLL_S, WANTED_POLL_S = 0.05, 0.25


def torch_memory_bytes(
    directory: Path, compute_dtype: Literal["float32", "bfloat16", "int8"], kv_cache_bytes: int
) -> int:
    """Estimate the peak memory of a torch worker: weights while loading, and its full KV cache."""
    weights_bytes = 0
    for dtype, count in _tensors(directory):
        converted = dtype != _SAME_TYPE.get(compute_dtype)
        # Converting holds two copies; a tensor used in its own type is mapped from the file.
        weights_bytes += count * _COMPUTED_BYTES[compute_dtype] * (2 if converted else 1)
    return weights_bytes + kv_cache_bytes + HOST_BYTES


def is_stored_in_bfloat16(directory: Path) -> bool:
    """Return whether bfloat16 represents most of the checkpoint's numbers exactly."""
    tensors = _tensors(directory)
    count = sum(count for dtype, count in tensors if dtype == "BF16")
    return 2 * count > sum(count for _, count in tensors)


def stored_bytes(directory: Path) -> int:
    """Measure the weights in the checkpoint's files: those of its index, if it has one.

    Some checkpoints have a second copy in another layout (`consolidated.safetensors`).
    """
    paths = set(directory.glob("*.safetensors"))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        paths &= {directory / name for name in index["weight_map"].values()}
    return sum(path.stat().st_size for path in paths)


def _tensors(directory: Path) -> list[tuple[str, int]]:
    """List type and element count of each tensor. Skips invalid files: loading reports them."""
    tensors = []
    for path in sorted(directory.glob("*.safetensors")):
        try:
            header = _header(path)
            tensors += [
                (str(entry["dtype"]), math.prod(entry["shape"]))
                for name, entry in header.items()
                if name != "__metadata__"
            ]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return tensors


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header: dict[str, Any] = json.loads(file.read(length))
        return header


_log = logging.getLogger("weir.inference.routing")


class GpusTooFew(ValueError):
    """A model needs more GPUs than it can ever have."""


class GpuTooSmall(ValueError):
    """A model's share of weights does not fit a GPU that it may have."""


class BudgetTooSmall(ValueError):
    """A model does not fit the budget. `needed_bytes` is the smallest budget that would do."""

    def __init__(self, model: str, needed_bytes: int, message: str) -> None:
        super().__init__(message)
        self.model = model
        self.needed_bytes = needed_bytes


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that an engine holds from its start to its close.

    It holds `memory_bytes` and `gpu_count` GPUs, and needs `gpu_memory_bytes` on each of them.
    `gpus` lists the ids of those that it may have; empty for all. With `is_pinned` it starts by
    itself and is never evicted. Processes that have the same `replica` hold all this once; None if
    other processes do not count.
    """

    memory_bytes: int = 0
    gpu_count: int = 0
    gpu_memory_bytes: int = 0
    gpus: tuple[str, ...] = ()
    is_pinned: bool = False
    replica: SharedReplica | None = None


class Resident(Protocol):
    """Interface of an engine that holds or requests memory.

    With `is_leaving` it is about to release its memory.
    """

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> Needs: ...
    @property
    def is_leaving(self) -> bool: ...

    def idle_since_s(self) -> float | None:
        """Return the last use, in seconds of the budget's clock; None if not evictable now."""

    def evict(self) -> None:
        """Start to close, and release the memory afterwards. Never blocks; sets `is_leaving`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stranger:
    """Engine that another process waits for."""

    name: str
    needs: Needs
    is_leaving: bool = False

    def idle_since_s(self) -> float | None:
        return None

    def evict(self) -> None:
        raise AssertionError("it holds nothing")


class MemoryBudget:
    """Memory and GPUs of one machine for engines. Requests are granted in order.

    A GPU serves one engine at a time. Engines that are never evicted keep theirs from `check` on.
    With `reservations`, all processes of the machine have one budget and one order.
    """

    def __init__(
        self,
        total_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        gpus: Sequence[str] = (),
        gpu_memory: Mapping[str, int] | None = None,
        reservations: Reservations | None = None,
    ) -> None:
        """Create the budget. `total_bytes` is None for no limit, and `clock` returns seconds.

        `gpus` are the ids of the GPUs; without any, engines choose theirs. `gpu_memory` has the
        bytes of the GPUs whose memory is known.
        """
        self._total_bytes = total_bytes
        self._clock = clock
        self._gpus = tuple(gpus)
        self._gpu_memory = dict(gpu_memory or {})
        self._kept: dict[Resident, tuple[str, ...]] = {}  # GPUs of pinned engines
        self._held: dict[Resident, tuple[str, ...]] = {}  # with its GPUs
        self._waiting: dict[Resident, asyncio.Future[bool]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reservations = reservations
        self._others: dict[str, Reservation] = {}  # of other processes alone, by key of the replica
        self._tickets: dict[Resident, str] = {}  # of engines that wait

    def resize(
        self, total_bytes: int | None, gpus: Sequence[str], gpu_memory: Mapping[str, int]
    ) -> None:
        """Use another budget, with the arguments of the constructor. Engines keep what they hold.

        `check` and `poll` follow.
        """
        self._total_bytes = total_bytes
        self._gpus, self._gpu_memory = tuple(gpus), dict(gpu_memory)

    @property
    def held_bytes(self) -> int:
        """Bytes reserved now, including those of engines about to release them."""
        return sum(resident.needs.memory_bytes for resident in self._held)

    def check(self, residents: Iterable[Resident]) -> None:
        """Check that each engine fits, and assign GPUs to pinned ones.

        Raises: BudgetTooSmall, GpuTooSmall, GpusTooFew for the first engine that does not fit.
        """
        residents = list(residents)
        self._assign_gpus([each for each in residents if each.needs.is_pinned])
        for resident in residents if self._gpus else ():
            needs = resident.needs
            if len(self._fitting_gpus(resident)) < needs.gpu_count:
                self._check_gpu_memory(resident)
            free = self._kept.get(resident) or self._free_gpus(resident, {})
            if len(free) < needs.gpu_count:
                raise GpusTooFew(
                    f"model {resident.name!r} needs {needs.gpu_count} GPUs, but only"
                    f" {len(free)} of {', '.join(needs.gpus or self._gpus)} are left beside"
                    " models that stay loaded"
                )
        if self._total_bytes is None:
            return
        pinned_bytes = 0
        for resident in sorted(residents, key=lambda each: not each.needs.is_pinned):
            needed_bytes = pinned_bytes + resident.needs.memory_bytes
            if needed_bytes > self._total_bytes:
                beside = (
                    f" beside {pinned_bytes:,} bytes of models that stay loaded"
                    if pinned_bytes
                    else ""
                )
                raise BudgetTooSmall(
                    resident.name,
                    needed_bytes,
                    f"model {resident.name!r} needs {resident.needs.memory_bytes:,} bytes{beside},"
                    f" but all engines together may use {self._total_bytes:,} bytes",
                )
            if resident.needs.is_pinned:
                pinned_bytes = needed_bytes

    def _check_gpu_memory(self, resident: Resident) -> None:
        """Raise GpuTooSmall if a GPU that the engine may have has too little memory."""
        needs = resident.needs
        small = [
            f"{gpu} has {self._gpu_memory[gpu]:,}"
            for gpu in needs.gpus or self._gpus
            if self._gpu_memory.get(gpu, math.inf) < needs.gpu_memory_bytes
        ]
        if small:
            raise GpuTooSmall(
                f"model {resident.name!r} needs at least {needs.gpu_memory_bytes:,} bytes on"
                f" each of {needs.gpu_count} GPUs for its weights, but GPU {', '.join(small)}"
            )

    def _fitting_gpus(self, resident: Resident) -> tuple[str, ...]:
        """List the GPUs that the engine may have and that have enough memory."""
        needs = resident.needs
        return tuple(
            gpu
            for gpu in self._gpus
            if (not needs.gpus or gpu in needs.gpus)
            and self._gpu_memory.get(gpu, math.inf) >= needs.gpu_memory_bytes
        )

    def _assign_gpus(self, pinned: Sequence[Resident]) -> None:
        """Assign GPUs to as many of these engines as possible, by bipartite matching.

        An assigned GPU moves to another engine if its owner can have a different one. An engine
        that runs keeps its GPUs.
        """
        held = {gpu: each for each in pinned for gpu in self._held.get(each, ())}
        owners: dict[str, Resident] = {gpu: each for gpu, each in held.items() if gpu in self._gpus}

        def claim(resident: Resident, tried: set[str]) -> bool:
            for gpu in self._fitting_gpus(resident):
                if gpu in tried or gpu in held:
                    continue
                tried.add(gpu)
                if gpu not in owners or (owners[gpu] is not resident and claim(owners[gpu], tried)):
                    owners[gpu] = resident
                    return True
            return False

        for resident in pinned:
            for _ in range(resident.needs.gpu_count - len(self._held.get(resident, ()))):
                claim(resident, set())
        self._kept = {
            each: tuple(gpu for gpu in self._gpus if owners.get(gpu) is each) for each in pinned
        }

    def _free_gpus(
        self, resident: Resident, holders: Mapping[Resident, tuple[str, ...]]
    ) -> tuple[str, ...]:
        """List the GPUs that an engine could have besides those of these holders."""
        if resident in self._kept:
            # Before a change of the fleet, another engine may have got one of them.
            others = {gpu for each, gpus in holders.items() if each is not resident for gpu in gpus}
            return tuple(gpu for gpu in self._kept[resident] if gpu not in others)
        taken = {gpu for gpus in (*holders.values(), *self._kept.values()) for gpu in gpus}
        taken |= {gpu for other in self._others.values() for gpu in other.gpus}
        return tuple(gpu for gpu in self._fitting_gpus(resident) if gpu not in taken)

    def _missing_bytes(self, resident: Resident, holders: Iterable[Resident]) -> int:
        held_bytes = sum(each.needs.memory_bytes for each in holders)
        held_bytes += sum(other.memory_bytes for other in self._others.values())
        total_bytes = self._total_bytes
        return 0 if total_bytes is None else held_bytes + resident.needs.memory_bytes - total_bytes

    def _lacks_gpus(self, resident: Resident, holders: Mapping[Resident, tuple[str, ...]]) -> bool:
        wanted_count = resident.needs.gpu_count if self._gpus else 0
        return len(self._free_gpus(resident, holders)) < wanted_count

    def gpus_of(self, resident: Resident) -> tuple[str, ...]:
        """List the GPUs that an engine holds now."""
        return self._held.get(resident, ())

    async def reserve(self, resident: Resident) -> bool:
        """Wait for memory, to be released later. Return False if the request was withdrawn."""
        assert not {resident} & (self._held.keys() | self._waiting.keys()), (
            "a managed engine runs once"
        )
        granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[resident] = granted
        self.poll()
        try:
            return await granted
        except asyncio.CancelledError:
            self._waiting.pop(resident, None)
            self.release(resident)  # may have been granted at the same moment
            raise

    def withdraw(self, resident: Resident) -> None:
        """Cancel an engine's pending request for memory, if there is one."""
        granted = self._waiting.pop(resident, None)
        if granted is not None:
            self._leave_queue(resident)
            if not granted.done():  # else its waiter was cancelled
                granted.set_result(False)
            self.poll()

    def release(self, resident: Resident) -> None:
        """Release the memory of an engine."""
        self._held.pop(resident, None)
        if resident.needs.replica is not None:
            resident.needs.replica.leave()
        self._leave_queue(resident)
        self.poll()

    def fits_now(self, resident: Resident) -> bool:
        """Return whether the engine would get its memory at once, without an eviction."""
        if self._reservations is not None:
            with self._reservations.deciding() as may_decide:
                if not may_decide:
                    return False
                self._read_others(self._reservations)
        fits = self._missing_bytes(resident, self._held) <= 0
        return fits and not self._lacks_gpus(resident, self._held) and not self._waiting

    def fit_now(self, residents: Iterable[Resident]) -> bool:
        """Return whether all of these engines would get their memory at once."""
        holders = dict(self._held)
        for resident in residents:
            if self._missing_bytes(resident, holders) > 0 or self._lacks_gpus(resident, holders):
                return False
            gpu_count = resident.needs.gpu_count if self._gpus else 0
            holders[resident] = self._free_gpus(resident, holders)[:gpu_count]
        return not self._waiting

    def is_waiting(self, resident: Resident) -> bool:
        """Return whether the engine waits for memory."""
        return resident in self._waiting

    def who_holds(self) -> str:
        """List the names of the engines that hold memory, for messages."""
        return ", ".join(sorted(resident.name for resident in self._held)) or "no engine"

    def poll(self) -> None:
        """Grant free memory in order, and make room for the next. Call when an engine is idle."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reservations is None:
            self._grant_waiting()
            return
        if not (self._waiting or self._held):
            return
        with self._reservations.deciding() as may_decide:
            if may_decide:
                self._decide(self._reservations)
        if self._waiting:
            self._poll_after(WAITING_POLL_S)
        elif self._is_limited and any(not each.needs.is_pinned for each in self._held):
            self._poll_after(WANTED_POLL_S)

    @property
    def _is_limited(self) -> bool:
        return self._total_bytes is not None or bool(self._gpus)

    def _poll_after(self, delay_s: float) -> None:
        """Poll after a time, or sooner if that is planned already."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + delay_s:
                return
            self._timer.cancel()
        self._timer = loop.call_later(delay_s, self.poll)

    def _decide(self, reservations: Reservations) -> None:
        """Grant memory as long as no other process decides, or make room for the first that waits
        on this machine.
        """
        self._read_others(reservations)
        for resident in list(self._waiting):  # a running engine takes nothing more
            other = self._others.get(key_of(resident))
            if other is not None and self._enter(resident, other.gpus):
                self._others.pop(key_of(resident))
        for resident in self._waiting:
            if resident not in self._tickets:
                self._tickets[resident] = reservations.queue(written_needs(resident))
        first = reservations.first()
        while self._waiting and first is not None:
            resident = next(iter(self._waiting))
            if first.name != self._tickets[resident]:
                self._make_room(_Stranger(first.name, read_needs(first.needs)))
                return
            lacks_gpus = self._lacks_gpus(resident, self._held)
            if lacks_gpus or self._missing_bytes(resident, self._held) > 0:
                self._make_room(resident)
                return
            gpu_count = resident.needs.gpu_count if self._gpus else 0
            if not self._enter(resident, self._free_gpus(resident, self._held)[:gpu_count]):
                return
            first = reservations.first()
        if first is not None:
            self._make_room(_Stranger(first.name, read_needs(first.needs)))

    def _enter(self, resident: Resident, gpus: tuple[str, ...]) -> bool:
        """Grant memory to an engine. Return False if its replica is just being ended."""
        replica = resident.needs.replica
        granted = self._waiting[resident]
        if not granted.done() and replica is not None:
            if not replica.enter():
                return False
            replica.declare(resident.needs.memory_bytes, gpus)
        del self._waiting[resident]
        self._leave_queue(resident)
        if not granted.done():  # else its waiter was cancelled and will release it
            self._held[resident] = gpus
            granted.set_result(True)
        return True

    def _read_others(self, reservations: Reservations) -> None:
        self._others = reservations.of_others({key_of(each) for each in self._held})

    def _leave_queue(self, resident: Resident) -> None:
        if (ticket := self._tickets.pop(resident, None)) is not None:
            assert self._reservations is not None, "it gave the ticket"
            self._reservations.leave_queue(ticket)

    def _grant_waiting(self) -> None:
        """Grant memory without regard to other processes."""
        while self._waiting:
            resident = next(iter(self._waiting))
            lacks_gpus = self._lacks_gpus(resident, self._held)
            if lacks_gpus or self._missing_bytes(resident, self._held) > 0:
                self._make_room(resident)
                return
            granted = self._waiting.pop(resident)
            if not granted.done():  # else its waiter was cancelled and will release it
                gpu_count = resident.needs.gpu_count if self._gpus else 0
                self._held[resident] = self._free_gpus(resident, self._held)[:gpu_count]
                granted.set_result(True)

    def _make_room(self, wanting: Resident) -> None:
        """Evict idle engines, the least recently used first.

        It does so even if they do not suffice: engines that are idle in turn would starve a larger
        one. Workers that only wait for a process to come back go first.
        """
        for key, other in list(self._others.items()):
            if not other.is_used and self._is_short(wanting, self._held):
                assert self._reservations is not None, "it knows of others"
                self._reservations.end_unused(key)
                del self._others[key]
        idle = [
            (since_s, resident)
            for resident in self._held
            if not resident.is_leaving and (since_s := resident.idle_since_s()) is not None
        ]
        staying = {each: gpus for each, gpus in self._held.items() if not each.is_leaving}
        for since_s, resident in sorted(idle, key=lambda each: each[0]):
            if not self._is_short(wanting, staying):
                return
            has_wanted_gpu = set(staying[resident]) & set(self._fitting_gpus(wanting))
            if self._missing_bytes(wanting, staying) <= 0 and not has_wanted_gpu:
                continue
            wait_s = since_s + HANDOVER_S - self._clock()
            if wait_s > 0:
                self._poll_after(wait_s)
                return
            _log.info("evicting engine %s: another engine needs its memory", resident.name)
            del staying[resident]
            resident.evict()

    def _is_short(self, wanting: Resident, holders: Mapping[Resident, tuple[str, ...]]) -> bool:
        return self._missing_bytes(wanting, holders) > 0 or self._lacks_gpus(wanting, holders)


def key_of(resident: Resident) -> str:
    """Return the key of an engine's replica on this machine."""
    replica = resident.needs.replica
    assert replica is not None, "engines that share a machine have replicas"
    return replica.key


def written_needs(resident: Resident) -> dict[str, object]:
    """Write what an engine needs, for other processes."""
    needs = resident.needs
    return {
        "memory_bytes": needs.memory_bytes,
        "gpu_count": needs.gpu_count,
        "gpu_memory_bytes": needs.gpu_memory_bytes,
        "gpus": list(needs.gpus),
    }


def read_needs(content: Mapping[str, object]) -> Needs:
    """Read what another process needs; nothing if it was killed while it wrote."""
    try:
        return msgspec.convert(content, Needs)
    except msgspec.ValidationError:
        return Needs()
