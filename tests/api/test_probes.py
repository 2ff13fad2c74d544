"""Health checks over HTTP: their answers, without a key, from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Mapping

import pytest
from aiohttp import web

from api.core.health import STORE, Health, reasons, services, warnings
from api.metrics import operator_http as scrape
from api.metrics.operator_http import CONNECTIONS_MAX, MetricsServer, Probes
from inference.routing.router import ReplicaReport, ReplicaState
from tests.probing import probe
from tests.service import until

READY, LIVE = (200, {"status": "ready"}), (200, {"status": "live"})
ENGINES_WELL = {STORE: True, "engine/a": True, "engine/b": False}


async def nothing_here(request: web.BaseRequest) -> web.Response:
    """Answer every other path."""
    return web.Response(status=404, headers={"cache-control": "no-store"})


@contextlib.asynccontextmanager
async def answering(health: Health) -> AsyncIterator[str]:
    """Yield the URL of a metrics port that answers health checks."""
    server = MetricsServer(Probes(health).before(nothing_here))
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        await server.shutdown(1.0)


@pytest.mark.parametrize("path", ["/readyz", "/healthz", "/health"])
async def test_a_process_is_ready_when_nothing_keeps_it_from_admitting(path: str) -> None:
    health = Health()
    async with answering(health) as url:
        starting = await asyncio.to_thread(probe, url, path)
        health.reasons = ()
        ready = await asyncio.to_thread(probe, url, path)
        health.reasons = ("draining",)
        draining = await asyncio.to_thread(probe, url, path)

    assert starting == (503, {"status": "not ready", "reasons": ["starting"]})
    assert ready == READY
    assert draining == (503, {"status": "not ready", "reasons": ["draining"]})


async def test_a_ready_process_warns_of_engines_without_native_kernels() -> None:
    health = Health()
    health.reasons, health.warnings = (), warnings([report("avx2"), report("torch")])
    async with answering(health) as url:
        status, body = await asyncio.to_thread(probe, url, "/readyz")

    slow = "an engine computes without native kernels: see `weir doctor engine`"
    assert (status, body) == (200, {"status": "ready", "warnings": [slow]})
    assert warnings([report("avx2"), report("")]) == ()


def report(kernels: str) -> ReplicaReport:
    return ReplicaReport("a#0", "", ReplicaState.READY, 0, 0, kernels=kernels)


async def test_the_liveness_probe_answers_get_and_head_only() -> None:
    async with answering(Health()) as url:
        assert await asyncio.to_thread(probe, url, "/livez") == LIVE
        assert await asyncio.to_thread(lambda: probe(url, "/livez", method="HEAD")) == (200, None)
        assert (await asyncio.to_thread(lambda: probe(url, "/livez", method="POST")))[0] == 405
        assert (await asyncio.to_thread(probe, url, "/livez/"))[0] == 404


async def test_a_loop_that_hangs_does_not_answer() -> None:
    async with answering(Health()) as url:
        waiting = asyncio.ensure_future(
            asyncio.to_thread(lambda: probe(url, "/livez", timeout_s=0.3))
        )
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251  # hangs
        with pytest.raises(TimeoutError):
            await waiting
        assert await asyncio.to_thread(probe, url, "/livez") == LIVE


@pytest.mark.parametrize(
    ("parts", "may_admit_without_store", "told"),
    [
        (ENGINES_WELL, False, ()),
        (ENGINES_WELL | {STORE: False}, False, ("the database does not answer",)),
        (ENGINES_WELL | {STORE: False}, True, ()),
        (ENGINES_WELL | {"engine/a": False}, False, ("no model is ready",)),
        (
            {STORE: False, "engine/a": False},
            True,
            ("no model is ready", "the database does not answer"),
        ),
    ],
)
def test_reasons_name_what_is_missing_and_no_model(
    parts: Mapping[str, bool], may_admit_without_store: bool, told: tuple[str, ...]
) -> None:
    assert reasons(parts, services(parts, may_admit_without_store)[""]) == told


async def test_connections_that_ask_for_nothing_keep_no_probe_from_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with answering(Health()) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        silent = [socket.create_connection(address) for _ in range(CONNECTIONS_MAX)]
        for _ in range(3):
            assert await asyncio.to_thread(probe, url, "/livez") == LIVE
        for each in silent:
            each.close()


async def test_a_connection_to_the_metrics_must_ask_for_something_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scrape, "FIRST_REQUEST_MAX_S", 0.1)
    server = MetricsServer(nothing_here)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    with socket.create_connection(listening.sockets[0].getsockname()) as half:
        half.sendall(b"GET /metrics HTTP/1.1\r\nhost:")
        await until(lambda: server.connections, "it to be taken")
        await until(lambda: not server.connections, "it to be closed")
    listening.close()
    await server.shutdown(1.0)
