"""How much of the machine's memory the engines of models that start on demand may take, and what each will."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

# Of Python, torch and the tokenizer, per process; measured as what a host of a tiny model has for itself, rounded up.
HOST_BYTES = 192 << 20
_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_COMPUTED_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_SAME_TYPE = {"float32": "F32", "bfloat16": "BF16"}


def torch_memory_bytes(directory: Path, compute_dtype: Literal["float32", "bfloat16", "int8"], kv_cache_bytes: int) -> int:
    """The most that a host of the torch engine takes: of its weights while it loads, of its KV cache when all of it is in use."""
    weights_bytes = 0
    for dtype, count in _tensors(directory):
        converted = dtype != _SAME_TYPE.get(compute_dtype)
        # Packing reads one copy and writes another; a tensor in its own type is read from the file and takes no memory there.
        weights_bytes += count * _COMPUTED_BYTES[compute_dtype] * (2 if converted else 1)
    return weights_bytes + kv_cache_bytes + HOST_BYTES


def stored_bytes(directory: Path) -> int:
    """The weights as they are in the checkpoint's files."""
    return sum(count * _STORED_BYTES.get(dtype, 1) for dtype, count in _tensors(directory))


def _tensors(directory: Path) -> list[tuple[str, int]]:
    """Type and number of elements of each tensor. A file that is not what it should be counts nothing: loading will say so."""
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        try:
            header = _header(path)
            found += [(str(entry["dtype"]), math.prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header: dict[str, Any] = json.loads(file.read(length))
        return header


# Seconds for which a slot is left alone after its last use: whoever has just waited for it enters within some ms, and would have to
# load it again. Nothing breaks if that takes longer.
HANDOVER_S = 0.25
_log = logging.getLogger("weir.inference.routing")


class BudgetTooSmall(ValueError):
    """A model could never be loaded within the budget. model: its name; needed_bytes: what the budget would have to be."""

    def __init__(self, model: str, needed_bytes: int, message: str) -> None:
        super().__init__(message)
        self.model = model
        self.needed_bytes = needed_bytes


class Resident(Protocol):
    """Who holds memory, or wants to."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def memory_bytes(self) -> int:
        """What it holds from its start to its close."""

    @property
    def is_pinned(self) -> bool:
        """Whether it never gives way."""

    def idle_since_s(self) -> float | None:
        """When it was last used, in seconds of the budget's clock; None while it is in use, or never gives way."""

    @property
    def is_leaving(self) -> bool:
        """Whether it is about to release what it holds, for whatever reason."""

    def evict(self) -> None:
        """Give way: close, and then release what it holds. Never blocks; `is_leaving` from now on."""


class MemoryBudget:
    """The memory of one machine, as far as engines may have it. Without a total nobody waits."""

    def __init__(self, total_bytes: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """total_bytes: None sets no limit."""
        self._total_bytes = total_bytes
        self._clock = clock
        self._held: dict[Resident, None] = {}
        self._waiting: dict[Resident, asyncio.Future[bool]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held_bytes(self) -> int:
        """What is reserved now, by those too that are about to give it back."""
        return sum(resident.memory_bytes for resident in self._held)

    def check(self, residents: Iterable[Resident]) -> None:
        """Whether each of them can be loaded at some time. Raises: BudgetTooSmall, naming the first that cannot."""
        if self._total_bytes is None:
            return
        pinned_bytes = 0
        for resident in sorted(residents, key=lambda each: not each.is_pinned):
            needed_bytes = pinned_bytes + resident.memory_bytes
            if needed_bytes > self._total_bytes:
                beside = f" beside {pinned_bytes:,} of models that are always kept loaded" if pinned_bytes else ""
                raise BudgetTooSmall(
                    resident.name,
                    needed_bytes,
                    f"model {resident.name!r} needs {resident.memory_bytes:,} bytes{beside}, and all engines together may have "
                    f"{self._total_bytes:,}",
                )
            if resident.is_pinned:
                pinned_bytes = needed_bytes

    async def reserve(self, resident: Resident) -> bool:
        """Wait for memory; False if it was withdrawn meanwhile. What was reserved must be released."""
        assert not {resident} & (self._held.keys() | self._waiting.keys()), "a slot has one engine"
        granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[resident] = granted
        self.look()
        try:
            return await granted
        except asyncio.CancelledError:
            self._waiting.pop(resident, None)
            self.release(resident)  # it may have been granted at the same moment
            raise

    def withdraw(self, resident: Resident) -> None:
        """It wants no memory any more, if it did."""
        granted = self._waiting.pop(resident, None)
        if granted is not None:
            if not granted.done():  # else its waiter was cancelled
                granted.set_result(False)
            self.look()

    def release(self, resident: Resident) -> None:
        """What it held is free."""
        self._held.pop(resident, None)
        self.look()

    def fits_now(self, resident: Resident) -> bool:
        """Whether it would get its memory at once, and nobody have to give way."""
        free = self._total_bytes is None or self.held_bytes + resident.memory_bytes <= self._total_bytes
        return free and not self._waiting

    def is_waiting(self, resident: Resident) -> bool:
        """Whether it waits for memory."""
        return resident in self._waiting

    def who_holds(self) -> str:
        """The names of those who have memory, for whoever waits."""
        return ", ".join(sorted(resident.name for resident in self._held)) or "nobody"

    def look(self) -> None:
        """Give out what is free, in order, and make room for the next. To be called when a slot is no longer in use."""
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
            if not granted.done():  # else its waiter was cancelled, and is about to say so
                self._held[resident] = None
                granted.set_result(True)

    def _make_room(self, missing_bytes: int) -> None:
        """Let idle slots give way, the least recently used first.

        Also where all of them are not enough: else those that take turns in being idle would keep a larger one waiting for ever.
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
            _log.info("engine %s gives way: memory is wanted for another", resident.name)
            missing_bytes -= resident.memory_bytes
            resident.evict()
