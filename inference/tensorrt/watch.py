"""Finds out that a TensorRT-LLM engine is dead or stuck, since it does not say so itself: its own health check stays green.

Looks twice a second at the silence of each sequence, at the engine's own word, at the processes that it started and at this one's
memory; and lets it generate one token when it has been idle for a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inference.outside.core import OutsideCore
from inference.outside.stalls import StallWatch
from inference.tensorrt.library import TensorRtLibrary
from inference.tensorrt.settings import TensorRtOptions

LOOK_EVERY_S = 0.5
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_log = logging.getLogger("weir.inference.tensorrt")


class EngineWatch:
    """Looks after one engine. broken: called once, with the reason. recycle: called when the engine is idle and too large."""

    def __init__(
        self,
        library: TensorRtLibrary,
        llm: Any,
        core: OutsideCore,
        options: TensorRtOptions,
        *,
        broken: Callable[[str], None],
        recycle: Callable[[str], None],
    ) -> None:
        self._library = library
        self._llm = llm
        self._core = core
        self._options = options
        self._broken = broken
        self._recycle = recycle
        self._workers = descendants(os.getpid())
        self._stalls = StallWatch(core, options.first_token_timeout_s, options.inter_token_timeout_s)
        self._busy_at_s = time.monotonic()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            reason = self._dead() or self._stalls.look()
            if reason is not None:
                self._broken(reason)
                return
            now_s = time.monotonic()
            if not self._core.idle:
                self._busy_at_s = now_s
            elif self._options.host_memory_bytes_max and resident_bytes() > self._options.host_memory_bytes_max:
                self._recycle(f"the engine process has grown to {resident_bytes() >> 20} MiB")
                return
            elif now_s - self._busy_at_s > self._options.canary_interval_s:
                if (reason := await self.canary_fault()) is not None:
                    self._broken(reason)
                    return
                self._busy_at_s = time.monotonic()

    async def canary_fault(self) -> str | None:
        """What was wrong when the engine was to generate one token; None if it did."""
        try:
            async with asyncio.timeout(self._options.canary_timeout_s):
                token_count = 0
                async for response in self._library.canary(self._llm, 0):
                    token_count = len(response.outputs[0].token_ids)
        except TimeoutError:
            return f"no token within {self._options.canary_timeout_s:g} s from an idle engine"
        except Exception as error:  # whatever it is, the engine cannot do what it is there for
            return f"a test token could not be generated: {error!r}"
        return None if token_count == 1 else f"a test for one token gave {token_count}"

    def _dead(self) -> str | None:
        try:
            healthy = self._llm._check_health()
        except Exception as error:  # the executor may be gone altogether
            return f"the engine's health cannot be asked for: {error!r}"
        if not healthy:
            return "the engine says that it is shutting down"
        gone = [pid for pid in self._workers if not alive(pid)]
        return f"the engine's process {gone[0]} is gone" if gone else None


def descendants(pid: int) -> list[int]:
    """Processes below one, as far as they are there now. Source: /proc/PID/task/TID/children."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids = [int(word) for word in children.read_text().split()]
        except OSError:
            continue  # the thread has ended
        for child in pids:
            found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
