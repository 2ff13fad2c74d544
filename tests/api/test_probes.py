"""Health checks over HTTP: their answers, without a key, whatever the event loop does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping

import pytest
from aiohttp import web

from api.core.health import BILLING_WORKER, JOURNAL, STORE, Health, reasons, services, warnings
from api.metrics import operator_http as scrape
from api.metrics.operator_http import CONNECTIONS_MAX, MetricsListener, MetricsServer, Probes
from common.loop_watch import LoopWatch
from inference.routing.router import ReplicaReport, ReplicaState
from tests.probing import parts_of, probe
from tests.service import until

READY, LIVE = (200, {"status": "ready"}), (200, {"status": "live"})
ENGINES_WELL = {STORE: True, JOURNAL: True, "engine/a": True, "engine/b": False}


async def nothing_here(request: web.BaseRequest) -> web.Response:
    """Answer every other path."""
    return web.Response(status=404, headers={"cache-control": "no-store"})


@contextlib.asynccontextmanager
async def answering(health: Health, watch: LoopWatch | None = None) -> AsyncIterator[str]:
    """Yield the URL of a metrics port that answers health checks."""
    listener = MetricsListener(("127.0.0.1", 0))
    await listener.start(Probes(health, watch or LoopWatch()).before(nothing_here, with_parts=True))
    try:
        yield listener.url.removesuffix(scrape.PATH)
    finally:
        await listener.stop()


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


class SilentLoop(LoopWatch):
    """Watch over a loop that showed its last sign of life some time ago."""

    def __init__(self, silence_s: float) -> None:
        super().__init__()
        self._silence_s = silence_s

    @property
    def silence_s(self) -> float:
        return self._silence_s


async def test_probes_are_answered_while_the_loop_is_held() -> None:
    health = Health()
    health.reasons = ()
    async with answering(health) as url:
        # Called on the loop: it answers nothing meanwhile.
        assert probe(url, "/livez") == LIVE
        assert probe(url, "/readyz") == READY


@pytest.mark.parametrize(
    ("silence_s", "live", "ready"), [(0.1, 200, 200), (20.0, 200, 503), (61.0, 503, 503)]
)
async def test_a_blocked_loop_fails_both_probes(silence_s: float, live: int, ready: int) -> None:
    health = Health()
    health.reasons = ()
    async with answering(health, SilentLoop(silence_s)) as url:
        is_live, is_ready = probe(url, "/livez"), probe(url, "/readyz")

    hung = [f"the event loop has not answered for {silence_s:.0f} s"]
    assert is_live == (live, {"status": "live"} if live == 200 else dead(hung))
    assert is_ready == (ready, READY[1] if ready == 200 else {**dead(hung), "status": "not ready"})


def dead(reasons: list[str]) -> dict[str, object]:
    return {"status": "dead", "reasons": reasons}


async def test_each_part_has_a_state_since_a_time_and_a_reason() -> None:
    health = Health()
    health.report(STORE, "")
    health.report("engine/a", "no sign of life for 4 s")
    async with answering(health) as url:
        before = parts_of(url)
        health.report("engine/a", "no sign of life for 5 s")
        longer = parts_of(url)
        health.report("engine/a", "")
        after = parts_of(url)

    assert before.keys() == {STORE, JOURNAL, "engine/a"}
    assert (before[STORE]["state"], before["engine/a"]["state"]) == ("serving", "not serving")
    assert longer["engine/a"] == {**before["engine/a"], "reason": "no sign of life for 5 s"}, (
        "a stall that goes on is not a new one"
    )
    assert (after["engine/a"]["state"], "reason" in after["engine/a"]) == ("serving", False)
    assert after["engine/a"]["since"] >= before["engine/a"]["since"]


@pytest.mark.parametrize(
    ("parts", "may_admit_without_store", "reported"),
    [
        (ENGINES_WELL, False, ()),
        (ENGINES_WELL | {STORE: False}, False, ("the database does not answer",)),
        (ENGINES_WELL | {STORE: False}, True, ()),
        (ENGINES_WELL | {"engine/a": False}, False, ("no model is ready",)),
        (ENGINES_WELL | {JOURNAL: False}, False, ("the usage journal cannot be written",)),
        (ENGINES_WELL | {BILLING_WORKER: False}, False, ()),
        (
            {STORE: False, JOURNAL: True, "engine/a": False},
            True,
            ("no model is ready", "the database does not answer"),
        ),
    ],
)
def test_reasons_name_what_is_missing_and_no_model(
    parts: Mapping[str, bool], may_admit_without_store: bool, reported: tuple[str, ...]
) -> None:
    assert reasons(parts, services(parts, may_admit_without_store)[""]) == reported


async def test_silent_connections_block_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(Health()) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        silent = [socket.create_connection(address) for _ in range(CONNECTIONS_MAX)]
        for _ in range(3):
            assert await asyncio.to_thread(probe, url, "/livez") == LIVE
        for each in silent:
            each.close()


async def test_a_metrics_connection_must_send_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "FIRST_REQUEST_MAX_S", 0.1)
    server = MetricsServer(nothing_here)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    with socket.create_connection(listening.sockets[0].getsockname()) as half:
        half.sendall(b"GET /metrics HTTP/1.1\r\nhost:")
        await until(lambda: server.connections, "it to be taken")
        await until(lambda: not server.connections, "it to be closed")
    listening.close()
    await server.shutdown(1.0)
