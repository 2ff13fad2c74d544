"""What holds for every test of the client: it leaves no task behind, and reads no settings of the machine it runs on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address, key or certificates from outside."""
    for name in ("WEIR_ADDRESS", "WEIR_API_KEY", "WEIR_ADMIN_KEY", "WEIR_ROOT_CERTIFICATES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def no_tasks_left() -> AsyncIterator[None]:
    """After the test, no task of the client is alive in its loop."""
    before = asyncio.all_tasks()

    yield

    left = [task for task in asyncio.all_tasks() - before if "weir_client" in repr(task.get_coro())]
    assert left == []
