"""Background loops of an api process restart after an unexpected failure, and stop nothing else."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from api import serving as root
from api.core.settings import Settings
from api.generation.request.phases import AdmittedRequest, Queued
from api.generation.request.registry import RequestRegistry
from common import incidents
from common.incidents import INCIDENT_COUNTS, IncidentTaskGroup

LOOPS = {
    "control_channel": "control.run",
    "queue_exchange": "exchange.run",
    "usage_notices": "notices.run",
    "fleet_changes": "fleet.run",
    "target_names": "fleet.follow_names",
    "launching": "launching.run",
    "traffic": "traffic.run",
    "key_uses": "uses.run",
    "issuer_keys": "issuer_keys.run",
    "provider_keys": "sign_in.client.keys.run",
    "progress": "registry.report_progress_regularly",
    "loop_lag": "observer.loop_lag.measure",
    "spare_workers": "spares.serve",
}
OTHERS = ("recovery", "statistics_log")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make retries immediate."""
    monkeypatch.setattr(incidents.Retries, "wait_s", lambda self, item=None: 0.0)


async def test_a_loop_that_raises_is_restarted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = MagicMock()
    running: dict[str, int] = dict.fromkeys([*LOOPS, "holds", *OTHERS], 0)
    started_again = asyncio.Event()

    def loop(name: str) -> Any:
        async def run(*_: Any) -> None:
            running[name] += 1
            if running[name] == 1 and name != "holds":
                raise ValueError("planted")
            if sum(running.values()) == 2 * len(running) - 1:
                started_again.set()
            await asyncio.Event().wait()

        return AsyncMock(side_effect=run)

    for name, path in LOOPS.items():
        parts.configure_mock(**{path: loop(name)})
    parts.holds.run = loop("holds")
    monkeypatch.setattr(root, "log_statistics_regularly", loop("statistics_log"))
    server = root.Server(Settings(), parts.spares)
    followers = ("control", "exchange", "fleet", "launching", "notices", "uses", "issuer_keys")
    for name in (*followers, "sign_in", "registry", "observer", "holds", "pace", "traffic"):
        setattr(server, name, getattr(parts, name))
    monkeypatch.setattr(server, "recover_regularly", loop("recovery"))
    before = INCIDENT_COUNTS.copy()

    async with IncidentTaskGroup() as server.tasks:
        server.start_loops()
        async with asyncio.timeout(60):
            await started_again.wait()
        for task in server.background:
            task.cancel()

    grown = {
        source: count - before[source]
        for source, count in INCIDENT_COUNTS.items()
        if count != before[source]
    }
    assert grown == dict.fromkeys([*LOOPS, *OTHERS], 1)


async def test_a_request_whose_progress_cannot_be_sent_delays_no_other() -> None:
    reported: list[str] = []

    class Request:
        def __init__(self, name: str) -> None:
            self.name, self.start = name, MagicMock(request_id=name)
            self.phase = Queued(AdmittedRequest(MagicMock(), MagicMock()))

        def end_if_lapsed(self) -> None:
            self.report_progress(None)

        def report_progress(self, outlook: object) -> None:
            if self.name == "bad":
                raise ValueError("planted")
            reported.append(self.name)

    process = object.__new__(RequestRegistry)
    process._progress = incidents.Retries("progress")
    process.queue_of = {}
    process._live = {Request(name): None for name in ("first", "bad", "last")}  # type: ignore[misc]

    process.end_lapsed()
    process._report_progress(0)

    assert reported == ["last", "first", "first", "last"]
