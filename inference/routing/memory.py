"""Memory budget of on-demand engines, and estimates of the memory that an engine needs."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

# Python, torch and the tokenizer, per process: measured with a worker of a tiny model, rounded up.
HOST_BYTES = 192 << 20
_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_COMPUTED_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_SAME_TYPE = {"float32": "F32", "bfloat16": "BF16"}


def torch_memory_bytes(directory: Path, compute_dtype: Literal["float32", "bfloat16", "int8"], kv_cache_bytes: int) -> int:
    """Return the peak memory of a torch worker: weights while loading, plus its full KV cache."""
    weights_bytes = 0
    for dtype, count in _tensors(directory):
        converted = dtype != _SAME_TYPE.get(compute_dtype)
        # Converting holds two copies; a tensor used in its own type is mapped from the file.
        weights_bytes += count * _COMPUTED_BYTES[compute_dtype] * (2 if converted else 1)
    return weights_bytes + kv_cache_bytes + HOST_BYTES


def stored_bytes(directory: Path) -> int:
    """Return the size of the weights in the checkpoint's files."""
    return sum(count * _STORED_BYTES.get(dtype, 1) for dtype, count in _tensors(directory))


def _tensors(directory: Path) -> list[tuple[str, int]]:
    """Return type and element count of each tensor. Skips invalid files: loading reports them."""
    tensors = []
    for path in sorted(directory.glob("*.safetensors")):
        try:
            header = _header(path)
            tensors += [
                (str(entry["dtype"]), math.prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__"
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


# Seconds for which an engine is not evicted after its last use: a request that has just waited for
# it enters within milliseconds and would otherwise load it again.
HANDOVER_S = 0.25
_log = logging.getLogger("weir.inference.routing")


class BudgetTooSmall(ValueError):
    """A model can never fit the budget. needed_bytes: smallest budget that would fit it."""

    def __init__(self, model: str, needed_bytes: int, message: str) -> None:
        super().__init__(message)
        self.model = model
        self.needed_bytes = needed_bytes


class Resident(Protocol):
    """Engine that holds or requests memory."""

    @property
    def name(self) -> str:
        """Name of the engine for messages."""

    @property
    def memory_bytes(self) -> int:
        """Memory that it holds from its start to its close."""

    @property
    def is_pinned(self) -> bool:
        """True if it is never evicted."""

    def idle_since_s(self) -> float | None:
        """Return its last use, in seconds of the budget's clock; None if not evictable now."""

    @property
    def is_leaving(self) -> bool:
        """True if it is about to release its memory, for whatever reason."""

    def evict(self) -> None:
        """Begin to close, then release the memory. Never blocks; sets `is_leaving`."""


class MemoryBudget:
    """Memory of one machine that engines may use; requests are granted in order."""

    def __init__(self, total_bytes: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the budget. total_bytes: None sets no limit. clock: returns seconds."""
        self._total_bytes = total_bytes
        self._clock = clock
        self._held: dict[Resident, None] = {}
        self._waiting: dict[Resident, asyncio.Future[bool]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held_bytes(self) -> int:
        """Memory reserved now, including that of engines about to release it."""
        return sum(resident.memory_bytes for resident in self._held)

    def check(self, residents: Iterable[Resident]) -> None:
        """Check that each engine fits. Raises: BudgetTooSmall for the first that does not."""
        if self._total_bytes is None:
            return
        pinned_bytes = 0
        for resident in sorted(residents, key=lambda each: not each.is_pinned):
            needed_bytes = pinned_bytes + resident.memory_bytes
            if needed_bytes > self._total_bytes:
                beside = f" beside {pinned_bytes:,} bytes of models that stay loaded" if pinned_bytes else ""
                raise BudgetTooSmall(
                    resident.name,
                    needed_bytes,
                    f"model {resident.name!r} needs {resident.memory_bytes:,} bytes{beside}, but all engines together may use "
                    f"{self._total_bytes:,} bytes",
                )
            if resident.is_pinned:
                pinned_bytes = needed_bytes

    async def reserve(self, resident: Resident) -> bool:
        """Wait for memory, which must be released later; return False if withdrawn meanwhile."""
        assert not {resident} & (self._held.keys() | self._waiting.keys()), "a slot has one engine"
        granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[resident] = granted
        self.look()
        try:
            return await granted
        except asyncio.CancelledError:
            self._waiting.pop(resident, None)
            self.release(resident)  # may have been granted at the same moment
            raise

    def withdraw(self, resident: Resident) -> None:
        """Cancel a pending request for memory, if there is one."""
        granted = self._waiting.pop(resident, None)
        if granted is not None:
            if not granted.done():  # else its waiter was cancelled
                granted.set_result(False)
            self.look()

    def release(self, resident: Resident) -> None:
        """Release the memory of an engine."""
        self._held.pop(resident, None)
        self.look()

    def fits_now(self, resident: Resident) -> bool:
        """Return whether memory would be granted at once, without an eviction."""
        free = self._total_bytes is None or self.held_bytes + resident.memory_bytes <= self._total_bytes
        return free and not self._waiting

    def is_waiting(self, resident: Resident) -> bool:
        """Return whether the engine waits for memory."""
        return resident in self._waiting

    def who_holds(self) -> str:
        """Return the names of the engines that hold memory, for messages."""
        return ", ".join(sorted(resident.name for resident in self._held)) or "no engine"

    def look(self) -> None:
        """Grant free memory in order, and make room for the next. Call when an engine is idle."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            resident = next(iter(self._waiting))
            missing_bytes = 0 if self._total_bytes is None else self.held_bytes + resident.memory_bytes - self._total_bytes
            if missing_bytes > 0:
                self._make_room(missing_bytes - sum(each.memory_bytes for each in self._held if each.is_leaving))
                return
            granted = self._waiting.pop(resident)
            if not granted.done():  # else its waiter was cancelled and will release it
                self._held[resident] = None
                granted.set_result(True)

    def _make_room(self, missing_bytes: int) -> None:
        """Evict idle engines, the least recently used first.

        Also if they do not suffice: engines that are idle in turn would starve a larger one.
        """
        idle = [
            (since_s, resident)
            for resident in self._held
            if not resident.is_leaving and (since_s := resident.idle_since_s()) is not None
        ]
        for since_s, resident in sorted(idle, key=lambda each: each[0]):
            if missing_bytes <= 0:
                return
            wait_s = since_s + HANDOVER_S - self._clock()
            if wait_s > 0:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self.look)
                return
            _log.info("evicting engine %s: another engine needs its memory", resident.name)
            missing_bytes -= resident.memory_bytes
            resident.evict()
