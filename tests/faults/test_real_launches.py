"""Real servers that launchers start for waiting requests: vLLM, and NVIDIA Dynamo with workers that
simulate vLLM, also with prefill and decode apart.

One scenario per server, since each start takes long: many requests wait for one start whose scaler
is killed in the middle, the idle server sleeps or stops and comes back, it is killed during an
answer, and in the end all bills are exact.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from api.core.settings import bundled_models
from inference.launchers.children import Folder
from metering.core.models import QuotaDimension
from tests.faults.conftest import Start
from tests.faults.test_launched_replicas import is_loading, scaler_pid, states
from tests.inference.checkpoints import make_checkpoint
from tests.inference.real_servers import (
    DYNAMO_MODEL,
    SHAPE,
    VLLM_COMMON,
    VLLM_HTTP,
    VLLM_SETTINGS,
    dynamo_checkpoint,
    dynamo_environment,
    needs,
    python_of,
)
from tests.metering.invariants import check_invariants
from tests.service import MODEL, Service, Tenant, cost_picos, picos, until

pytestmark = pytest.mark.faults

REQUEST_COUNT, PER_STREAM = 40, 20
LONG = 400
Launcher = dict[str, Any]


def vllm(folder: Path) -> tuple[Path, Launcher]:
    """Return a checkpoint and the launcher of a vLLM server on it."""
    directory = make_checkpoint(folder / "checkpoint", seed=3, shape=SHAPE).directory
    command = [python_of("vllm"), "-m", "vllm.entrypoints.openai.api_server"]
    command += [f"--model={directory}", "--port={port}", *VLLM_COMMON, *VLLM_HTTP]
    return directory, {
        "command": [*command, "--enable-prefix-caching"],
        "address": "openai+http://127.0.0.1:{port}/tiny",
        "environment": {**VLLM_SETTINGS, "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"},
        "sleep": {"url": "http://127.0.0.1:{port}"},
    }


def dynamo(folder: Path, *workers: str) -> tuple[Path, Launcher]:
    """Return a checkpoint and the launcher of a frontend with workers, all in one command."""
    checkpoint = make_checkpoint(folder / "small", seed=3, shape=SHAPE).directory
    directory = dynamo_checkpoint(checkpoint, folder)
    python = python_of("dynamo")
    common = [f"--model-path={directory}", f"--model-name={DYNAMO_MODEL}", "--block-size=16"]
    lines = [
        shlex.join([python, "-m", "dynamo.mocker", *common, *worker.split()])
        + " --discovery-backend=file &"
        for worker in workers
    ]
    front = [python, "-m", "dynamo.frontend", "--http-host=127.0.0.1", "--http-port={port}"]
    lines += [f"exec {shlex.join(front)} --discovery-backend=file --router-mode=kv"]
    return directory, {
        "command": ["sh", "-c", "\n".join(lines)],
        "address": f"openai+http://127.0.0.1:{{port}}/{DYNAMO_MODEL}",
        "environment": dynamo_environment(folder, "discovery-{port}") | {"HF_HUB_OFFLINE": "1"},
    }


SERVERS: Mapping[str, Callable[[Path], tuple[Path, Launcher]]] = {
    "vllm": vllm,
    "dynamo": lambda folder: dynamo(folder, ""),
    "dynamo-disaggregated": lambda folder: dynamo(
        folder, "--disaggregation-mode=prefill", "--disaggregation-mode=decode"
    ),
}


def two_processes(launch: Start, folder: Path, server: str) -> list[Service]:
    """Start two api processes of one machine for a model at zero."""
    directory, launcher = SERVERS[server](folder)
    version = {
        "engine": "remote",
        "directory": str(directory),
        "replicas": {"min": 0, "max": 1},
        "idle_timeout_s": 2,
        "launcher": {"kind": "process", "state_directory": str(folder / "launched"), **launcher},
        "share_prefixes": server != "vllm",
    }
    fleet = folder / "fleet.yaml"
    fleet.write_text(json.dumps({"models": {MODEL: version}}))
    (folder / "journal").mkdir()
    services = []
    for index in range(2):
        home = folder / f"home{index}"
        home.mkdir()
        (home / "journal").symlink_to(folder / "journal")
        settings = {
            "models": bundled_models(),
            "progress_interval_s": 0.05,
            "cold_start_wait_s": 600,
        }
        services.append(launch(serving=False, fleet=str(fleet), home=home, **settings))
    return services


def server_folder(folder: Path) -> Folder:
    return Folder(folder / "launched" / f"{MODEL}-0")


def runs(service: Service) -> list[dict[str, Any]]:
    return service.database.rows("SELECT end_reason, ready_at FROM replica_runs ORDER BY id")


async def wait_for_one_start(service: Service, scaler: Service, tenant: Tenant) -> None:
    """Let all requests wait for one start, whose scaler is killed."""
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
            await stream.wait(partial(is_loading, stream, request_id), "progress")
        assert service.database.holds(tenant) == {"held": REQUEST_COUNT}
        await until(lambda: states(service) == {0: "starting"}, "the start")
        scaler.kill()
        await until(lambda: scaler_pid(service) == service.pid, "the next election")
        finished = [await stream.finished(request_id) for stream, request_id in requests]

    for frame in finished:
        assert frame.usage.delivered_token_count == 5
        assert picos(frame.cost) == cost_picos(frame.usage)
    assert len(runs(service)) == 1


@pytest.mark.parametrize(
    "server", [pytest.param(name, marks=needs(name.partition("-")[0])) for name in SERVERS]
)
async def test_a_real_server_is_started_lost_and_started_again(
    launch: Start, tmp_path: Path, server: str
) -> None:
    services = two_processes(launch, tmp_path, server)
    by_pid = {service.pid: service for service in services}
    await until(lambda: scaler_pid(services[0]), "an election")
    scaler = by_pid.pop(scaler_pid(services[0]) or 0)
    [service] = by_pid.values()
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10_000_000})

    await wait_for_one_start(service, scaler, tenant)
    await service.no_hold_left(tenant)
    assert sum(service.database.delivered(tenant).values()) == 5 * REQUEST_COUNT

    rested = "sleeping" if server == "vllm" else "stopped"
    await until(lambda: states(service) == {0: rested}, "the idle server to rest")
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=LONG)
        await stream.received(request_id, 10)
        server_folder(tmp_path).signal(signal.SIGKILL)
        ended = await stream.end(request_id)
        delivered = len(stream.token_ids(request_id))
        usage = ended.finished.usage if ended.HasField("finished") else ended.failed.usage
        assert usage.delivered_token_count == delivered
        again = await stream.end(await stream.begin(max_output_tokens=5))
        if again.HasField("failed"):  # it reached the server before its death was known
            assert not again.failed.HasField("usage")
            again = await stream.end(await stream.begin(max_output_tokens=5))
    assert again.finished.usage.delivered_token_count == 5
    await service.no_hold_left(tenant)
    assert service.database.delivered(tenant)[request_id] == delivered
    assert await asyncio.to_thread(service.stop) == 0
    assert states(service) == {0: "stopped"}
    assert not server_folder(tmp_path).is_running()
    check_invariants(service.database_url, all_ended=True)
