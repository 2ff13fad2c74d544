"""An engine worker that stands still: it is seen within seconds, and requests avoid it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from api.core.settings import bundled_models
from metering.core.models import QuotaDimension
from tests.faults.conftest import Start
from tests.faults.test_lost_replicas import fleet_file
from tests.forked_workers import children_of
from tests.probing import parts_of, probe
from tests.service import MODEL, start, until, wait_for

pytestmark = pytest.mark.faults

LIMITS = {QuotaDimension.TOKENS_PER_MONTH: 10**9}
PART = f"engine/{MODEL}"


async def test_a_stopped_engine_is_not_serving_and_requests_wait(launch: Start) -> None:
    service = launch()
    tenant = await service.tenant(LIMITS)
    worker_pid = service.worker_pid
    assert worker_pid is not None
    async with service.stream(tenant.secret) as stream:
        running = await stream.begin(max_output_tokens=1000)
        await stream.received(running, 10)
        os.kill(worker_pid, signal.SIGSTOP)
        try:
            await until(lambda: not service.serving(PART), "the engine to be found standing still")
            part = parts_of(service.metrics_url)[PART]
            ready = probe(service.metrics_url, "/readyz")
            waiting = start(max_output_tokens=5)
            await stream.send(waiting)
            await stream.first(waiting.request_id, "progress")
        finally:
            os.kill(worker_pid, signal.SIGCONT)
        finished = [await stream.finished(running), await stream.finished(waiting.request_id)]

    await until(lambda: service.serving(PART), "the engine to serve again")
    assert part["state"] == "not serving"
    assert part["reason"].startswith("no sign of life for")
    assert ready == (503, {"status": "not ready", "reasons": ["no model is ready"]})
    assert [each.usage.delivered_token_count for each in finished] == [1000, 5]
    assert service.worker_pid == worker_pid, "nothing was restarted"


async def test_requests_avoid_a_stopped_replica(launch: Start, model: Path, tmp_path: Path) -> None:
    service = launch(fleet=fleet_file(tmp_path / "fleet", model), models=bundled_models())
    tenant = await service.tenant(LIMITS)
    workers = wait_for(
        lambda: found if len(found := children_of(service.pid)) == 2 else None,
        "both workers to start",
    )
    wait_for(lambda: service.log.count("loaded ") >= 2, "both workers to load")
    async with service.stream(tenant.secret) as stream:
        os.kill(workers[0], signal.SIGSTOP)
        try:
            await until(
                lambda: "makes no progress" in service.log, "the replica to be found standing still"
            )
            frames = [start(max_output_tokens=5) for _ in range(20)]
            await stream.send(*frames)
            for frame in frames:
                await stream.finished(frame.request_id)
            served = service.serving(PART)
        finally:
            os.kill(workers[0], signal.SIGCONT)

    assert served, "the other replica serves the model"
    await until(lambda: "makes progress again" in service.log, "the replica to come back")
