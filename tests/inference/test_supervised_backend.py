"""Restarts of a supervised backend: failed starts lengthen the delay, service resets it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from inference.engine import ModelInfo
from inference.workers.supervised_backend import SupervisedBackend

LIFETIME_S = 0.03  # of each engine, longer than the policy's `stable_after_s`


@dataclass(frozen=True)
class Policy:
    close_timeout_s: float = 1.0
    restart_delay_s_min: float = 0.001
    restart_delay_s_max: float = 1.0
    stable_after_s: float = 0.01


class ShortLived(SupervisedBackend):
    """Engine that ends after a moment: while it loads, or while it serves. Notes the delays."""

    def __init__(self, *, serves: bool) -> None:
        super().__init__(ModelInfo("m", "fake", "fake", 100, 100, "/nowhere"), Policy())
        self.delays_s: list[float] = []
        self.has_failed_often = asyncio.Event()
        self.serves = serves

    async def _run(self) -> str:
        if self.serves:
            self._now_ready(0.0)
        await asyncio.sleep(LIFETIME_S)
        return "it ended"

    async def _pause(self, delay_s: float) -> None:
        self.delays_s.append(delay_s)
        if len(self.delays_s) == 5:
            self.has_failed_often.set()

    def _begin_shutdown(self) -> None: ...

    def _kill(self) -> None: ...

    def _fail_waiting(self, reason: str) -> None: ...


@pytest.mark.parametrize("serves", [True, False])
async def test_only_service_resets_the_delay_of_restarts(serves: bool) -> None:
    """A model that takes long to load and then fails is not started again at once for ever."""
    backend = ShortLived(serves=serves)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(backend.serve())
        backend._start_requested.set()
        await backend.has_failed_often.wait()
        await backend.close()

    least = Policy().restart_delay_s_min
    if serves:
        assert max(backend.delays_s) <= 2 * least
    else:
        assert max(backend.delays_s) > 4 * least
