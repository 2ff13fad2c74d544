"""Models whose servers start on demand: one start for all requests, even if processes die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from weir.v1 import inference_service_pb2 as pb

from api.core.settings import bundled_models
from inference.launchers.children import Folder
from inference.launchers.process import free_ports
from metering.core.models import QuotaDimension
from tests.far_machines import Machine, permitted_machines
from tests.faults.conftest import Start
from tests.metering.invariants import check_invariants
from tests.remote_servers.certificates import make_certificates
from tests.service import MODEL, Service, Stream, Tenant, cost_picos, picos, until

pytestmark = pytest.mark.faults

REQUEST_COUNT = 200
PER_STREAM = 50
LOADING = pb.ProgressFrame.STAGE_ENGINE_LOADING
Fleet = Callable[..., Path]


@pytest.fixture
def fleet(tmp_path: Path, model: Path) -> Fleet:
    """Return a function that writes a fleet file, whose server notes each of its starts."""
    certificates = make_certificates(tmp_path / "certificates")

    def write(script: str = "", machine: Machine | None = None, **keys: Any) -> Path:
        server = [sys.executable, "-m", "tests.remote_servers", str(model)]
        words = [*server, str(certificates.directory), "{port}", "{second_port}"]
        host, within = "127.0.0.1", []
        if machine is not None:
            host, within = machine.address, ["ip", "netns", "exec", machine.namespace]
        words.append(host)
        shell = f'echo "$WEIR_REPLICA_ID" >> "{tmp_path}/starts"; {script or ""} exec "$@"'
        launcher = {
            "kind": "process",
            "command": [*within, "sh", "-c", shell, "sh", *words],
            "address": f"trtllm://{host}:{{port}}",
            "state_directory": str(tmp_path / "launched"),
        }
        version = {
            "engine": "remote",
            "directory": str(model),
            "replicas": {"min": 0, "max": 1},
            "idle_timeout_s": 1,
            "launcher": launcher,
        }
        path = tmp_path / "fleet.yaml"
        path.write_text(json.dumps({"models": {MODEL: version | keys}}))
        return path

    return write


def start_count(tmp_path: Path) -> int:
    path = tmp_path / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def states(service: Service) -> dict[int, str]:
    rows = service.database.rows("SELECT number, state FROM launched_replicas")
    return {row["number"]: row["state"] for row in rows}


def serve(launch: Start, fleet: Path, **settings: Any) -> Service:
    settings = {
        "fleet": str(fleet),
        "models": bundled_models(),
        "progress_interval_s": 0.05,
    } | settings
    return launch(serving=False, **settings)


async def new_tenant(service: Service) -> Tenant:
    return await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10_000_000})


def is_loading(stream: Stream, request_id: str) -> bool:
    return any(frame.stage == LOADING for frame in stream.of(request_id, "progress"))


async def check_all_served(
    service: Service, tenant: Tenant, during: Callable[[], Any] | None = None
) -> None:
    """Send all requests, and check that each waits with its hold, is served and billed exactly."""
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(service.stream(tenant.secret))
            for _ in range(REQUEST_COUNT // PER_STREAM)
        ]
        requests = [
            (stream, await stream.begin(max_output_tokens=5))
            for stream in streams
            for _ in range(PER_STREAM)
        ]
        for stream, request_id in requests:
            await stream.wait(partial(is_loading, stream, request_id), "progress of the start")
        assert service.database.holds(tenant) == {"held": REQUEST_COUNT}
        if during is not None:
            await during()
        finished = [await stream.finished(request_id) for stream, request_id in requests]

    for frame in finished:
        assert frame.usage.delivered_token_count == 5
        assert picos(frame.cost) == cost_picos(frame.usage)
    await service.no_hold_left(tenant)
    assert sum(service.database.delivered(tenant).values()) == 5 * REQUEST_COUNT


async def test_all_who_wait_are_served_by_one_start(
    launch: Start, fleet: Fleet, tmp_path: Path
) -> None:
    service = serve(launch, fleet())
    tenant = await new_tenant(service)

    await check_all_served(service, tenant)

    assert start_count(tmp_path) == 1
    await until(lambda: states(service) == {0: "stopped"}, "the idle server to stop")
    [lifetime] = service.database.rows("SELECT * FROM replica_runs")
    assert lifetime["started_at"] < lifetime["ready_at"] < lifetime["ended_at"]
    assert lifetime["end_reason"] == "stopped"
    check_invariants(service.database_url, all_ended=False)
    assert await asyncio.to_thread(service.stop) == 0


async def test_all_who_wait_are_served_by_one_start_on_another_machine(
    launch: Start, fleet: Fleet, tmp_path: Path
) -> None:
    """The scaler is killed in the middle of it. The network is slow and loses packets."""
    with permitted_machines(1, delay_s=0.005, loss=0.005, seed=36) as [machine]:
        services = two_processes(launch, fleet(machine=machine), tmp_path)
        await until(lambda: scaler_pid(services[0]), "an election")
        pid = scaler_pid(services[0])
        [scaler] = [each for each in services if each.pid == pid]
        [other] = [each for each in services if each.pid != pid]
        tenant = await new_tenant(other)

        async def kill() -> None:
            await until(lambda: start_count(tmp_path), "the start")
            scaler.kill()

        await check_all_served(other, tenant, kill)

        assert start_count(tmp_path) == 1
        await until(lambda: states(other) == {0: "stopped"}, "the idle server to stop")
        check_invariants(other.database_url, all_ended=False)
        assert await asyncio.to_thread(other.stop) == 0


def scaler_pid(service: Service) -> int | None:
    """Return the process that holds the election; None if no process does."""
    rows = service.database.rows(
        """SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid)
           WHERE locktype = 'advisory' AND objid = 7355609 AND granted"""
    )
    return int(rows[0]["application_name"].rpartition("_")[2]) if rows else None


async def test_one_start_when_the_scaler_is_killed_during_it(
    launch: Start, fleet: Fleet, tmp_path: Path
) -> None:
    """The next scaler adopts the server that the first one has started."""
    services = two_processes(launch, fleet(), tmp_path)
    by_pid = {service.pid: service for service in services}
    await until(lambda: scaler_pid(services[0]), "an election")
    pid = scaler_pid(services[0])
    assert pid is not None
    scaler = by_pid.pop(pid)
    [other] = by_pid.values()
    tenant = await new_tenant(other)

    async def kill() -> None:
        await until(lambda: start_count(tmp_path), "the start")
        scaler.kill()
        await until(lambda: scaler_pid(other) == other.pid, "the next election")
        assert states(other) == {0: "starting"}

    await check_all_served(other, tenant, kill)

    assert start_count(tmp_path) == 1
    await until(lambda: states(other) == {0: "stopped"}, "the idle server to stop")
    assert len(other.database.rows("SELECT * FROM replica_runs")) == 1


def two_processes(launch: Start, file: Path, tmp_path: Path) -> list[Service]:
    """Start two api processes of one machine with one journal directory."""
    (tmp_path / "journal").mkdir()
    services = []
    for index in range(2):
        home = tmp_path / f"home{index}"
        home.mkdir()
        (home / "journal").symlink_to(tmp_path / "journal")
        services.append(serve(launch, file, home=home))
    return services


@pytest.mark.parametrize("other_ends_by", ["kill", "stop"])
async def test_the_last_process_stops_the_servers_however_the_others_ended(
    launch: Start, fleet: Fleet, tmp_path: Path, other_ends_by: str
) -> None:
    """A process that was killed is in the table for 30 s, like one that lives."""
    file = fleet(replicas={"min": 1, "max": 1}, idle_timeout_s=0)
    first, last = two_processes(launch, file, tmp_path)
    await until(lambda: states(last) == {0: "ready"}, "the start")

    if other_ends_by == "kill":
        first.kill()
    else:
        assert await asyncio.to_thread(first.stop) == 0
        assert states(last) == {0: "ready"}, "another process lives"
    await until(lambda: scaler_pid(last) == last.pid, "the election")
    assert await asyncio.to_thread(last.stop) == 0

    assert states(last) == {0: "stopped"}
    assert start_count(tmp_path) == 1
    assert not Folder(tmp_path / "launched" / f"{MODEL}-0").is_running()


async def test_a_start_that_fails_ends_all_requests_that_wait(
    launch: Start, fleet: Fleet, tmp_path: Path
) -> None:
    """Operators see why; the next request after the delay starts the server again."""
    broken = tmp_path / "broken"
    broken.touch()
    service = serve(launch, fleet(f'[ -e "{broken}" ] && echo no weights here && exit 3;'))
    tenant = await new_tenant(service)

    async with service.stream(tenant.secret) as stream:
        requests = [await stream.begin(max_output_tokens=5) for _ in range(20)]
        failed = [await stream.failed(request_id) for request_id in requests]

    assert {each.info.reason for each in failed} == {"ENGINE_START_FAILED"}
    assert start_count(tmp_path) == 1
    [row] = service.database.rows("SELECT * FROM launched_replicas")
    assert (row["state"], row["failure_count"]) == ("failed", 1)
    assert "with status 3" in row["error"]
    assert "no weights here" in row["error"]
    assert not service.database.delivered(tenant)
    await service.no_hold_left(tenant)


async def test_a_server_that_dies_is_started_again(
    launch: Start, fleet: Fleet, tmp_path: Path
) -> None:
    service = serve(launch, fleet(replicas={"min": 1, "max": 1}, idle_timeout_s=0))
    tenant = await new_tenant(service)
    await until(lambda: states(service) == {0: "ready"}, "the first start")
    pid = int((tmp_path / "launched" / f"{MODEL}-0" / "pid").read_text())
    os.killpg(pid, signal.SIGKILL)

    await until(lambda: start_count(tmp_path) == 2, "the second start")
    await until(service.serving, "the model to be served")
    async with service.stream(tenant.secret) as stream:
        finished = await stream.finished(await stream.begin(max_output_tokens=5))

    assert finished.usage.delivered_token_count == 5
    reasons = [
        row["end_reason"]
        for row in service.database.rows("SELECT end_reason FROM replica_runs ORDER BY id")
    ]
    assert reasons == ["its server has ended soon after its start", ""]
    # The last api process stops its servers.
    assert await asyncio.to_thread(service.stop) == 0
    assert states(service) == {0: "stopped"}


async def test_a_server_sleeps_and_wakes_for_the_next_request(
    launch: Start, fleet: Fleet, model: Path, tmp_path: Path
) -> None:
    """Its sleep is a stopped process, so that no request could pass it."""
    [port, other] = free_ports()
    server = [sys.executable, "-m", "tests.remote_servers", str(model)]
    command = " ".join([*server, str(tmp_path / "certificates"), str(port), str(other)])
    pid = tmp_path / "server.pid"
    scripts = {
        "start": f"[ -e {pid} ] || {{ {command} > {tmp_path}/server.log 2>&1 & echo $! > {pid}; }}",
        "stop": f"kill -9 $(cat {pid}); rm {pid}",
        "sleep": f"kill -STOP $(cat {pid}); echo sleep >> {tmp_path}/calls",
        "wake": f"kill -CONT $(cat {pid}); echo wake >> {tmp_path}/calls",
        "status": f"test -e /proc/$(cat {pid})",
    }
    launcher = {
        "kind": "command",
        **{name: ["sh", "-c", text] for name, text in scripts.items()},
        "address": f"trtllm://127.0.0.1:{port}",
        "stop_after_s": 4,
    }
    service = serve(launch, fleet(launcher=launcher))
    tenant = await new_tenant(service)
    async with service.stream(tenant.secret) as stream:
        for _ in range(2):
            finished = await stream.finished(await stream.begin(max_output_tokens=5))
            assert finished.usage.delivered_token_count == 5
            await until(lambda: states(service) == {0: "sleeping"}, "its sleep")

    assert (tmp_path / "calls").read_text().split() == ["sleep", "wake", "sleep"]
    await until(lambda: states(service) == {0: "stopped"}, "the end of a long sleep")
    assert not pid.exists()
    lifetimes = service.database.rows(
        "SELECT end_reason, ready_at <= ended_at AS ended FROM replica_runs ORDER BY id"
    )
    assert lifetimes == [{"end_reason": "sleeping", "ended": True}] * 2


async def test_an_idle_server_makes_room_for_another_model(
    launch: Start, fleet: Fleet, tmp_path: Path
) -> None:
    """In either process, whose requests it has served."""
    file = fleet(idle_timeout_s=0)
    document = json.loads(file.read_text())
    version = document["models"][MODEL]
    version["launcher"]["pool"] = "gpus"
    document["pools"] = {"gpus": {"max": 1}}
    document["models"] = {MODEL: {"versions": {"v1": version, "v2": version}}}
    file.write_text(json.dumps(document))
    services = two_processes(launch, file, tmp_path)
    tenant = await new_tenant(services[0])

    for version_name in ("v1", "v2", "v1"):
        for service in services:
            async with service.stream(tenant.secret) as stream:
                request_id = await stream.begin(model=f"{MODEL}@{version_name}")
                await stream.finished(request_id)
        rows = services[0].database.rows(
            "SELECT served FROM launched_replicas WHERE state IN ('ready', 'starting', 'stopping')"
        )
        assert [row["served"] for row in rows] == [f"{MODEL}@{version_name}"]
    assert start_count(tmp_path) == 3
