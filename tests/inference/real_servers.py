"""Starts servers of other projects on checkpoints. `WEIR_TEST_<PEER>_PYTHON` names the interpreter
of a peer; `infra/peers.py` installs it and sets the variable.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from inference.adapters.remote_settings import RemoteSettings, Service, Target
from infra.peers import PEERS
from tests.inference.checkpoints import LlamaShape, TinyCheckpoint
from tests.service import wait_for

START_S = 480.0  # vLLM imports for half a minute, compiles, and measures its memory
# Its heads have a size that vLLM's attention on the CPU supports.
SHAPE = LlamaShape(hidden_size=256, head_count=4, kv_head_count=2)


@dataclass(frozen=True)
class RealServer:
    """A running server. workers: those behind a router."""

    target: Target
    process: subprocess.Popen[bytes]
    workers: Sequence[RealServer] = ()


def python_of(peer: str) -> str:
    """Return the interpreter of a peer, or an empty string."""
    return os.environ.get(f"WEIR_TEST_{peer.upper()}_PYTHON", "")


def needs(peer: str) -> list[pytest.MarkDecorator]:
    """Return marks of tests that need a peer: skipped without it, and slow to start."""
    reason = f"WEIR_TEST_{peer.upper()}_PYTHON is not set: `make test-peers` sets it"
    return [pytest.mark.skipif(not python_of(peer), reason=reason), pytest.mark.timeout(900)]


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, readiness: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a process group; end the group afterwards. readiness: words of its log."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "WEIR_"))
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=kept | {"HF_HUB_OFFLINE": "1"} | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )

    def is_ready() -> bool:
        said = log.read_text(errors="replace")
        assert process.poll() is None, said[-4000:]
        return readiness in said

    try:
        wait_for(is_ready, f"{log.name} to say {readiness!r}", START_S)
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a server and its workers, as `kill -9` or the kernel does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


VLLM_COMMON = ("--host=127.0.0.1", "--dtype=float32", "--enforce-eager")
VLLM_HTTP = ("--enable-prompt-tokens-details", "--served-model-name=tiny")


@contextlib.contextmanager
def vllm_server(
    directory: Path, log: Path, service: Service, *options: str, port: int = 0
) -> Iterator[RealServer]:
    """Yield vLLM on a checkpoint. port: of a server that was killed; 0 for any."""
    is_http = service.is_http
    module = "openai.api_server" if is_http else "grpc_server"
    port = port or free_port()
    command = [python_of("vllm"), "-m", f"vllm.entrypoints.{module}", f"--model={directory}"]
    command += [f"--port={port}", *VLLM_COMMON, *(VLLM_HTTP if is_http else ()), *options]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    readiness = "Application startup complete" if is_http else "ready to accept requests"
    with running(command, log, readiness, settings) as process:
        yield RealServer(Target(service, f"127.0.0.1:{port}"), process)


@contextlib.contextmanager
def smg_gateway(directory: Path, log: Path) -> Iterator[RealServer]:
    """Yield SMG in front of two vLLM servers over gRPC, without prefix caches: there is no salt."""
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                vllm_server(
                    directory,
                    log.with_name(f"{log.stem}-worker-{index}.log"),
                    Service.VLLM,
                    "--no-enable-prefix-caching",
                )
            )
            for index in range(2)
        ]
        port = free_port()
        command = [python_of("smg"), "-m", "smg", "launch", "--host=127.0.0.1", f"--port={port}"]
        command += [f"--prometheus-port={free_port()}", "--prometheus-host=127.0.0.1"]
        command += ["--policy=round_robin", f"--model-path={directory}", "--worker-urls"]
        command += [f"grpc://{each.target.address}" for each in workers]
        process = stack.enter_context(running(command, log, "Starting server on"))

        def ready_count() -> int:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/workers") as response:
                return sum(each["is_healthy"] for each in json.load(response)["workers"])

        wait_for(lambda: ready_count() == len(workers), "SMG's workers", START_S)
        target = Target(Service.OPENAI_HTTP, f"127.0.0.1:{port}", str(directory))
        yield RealServer(target, process, workers)


Start = Callable[[Path, Path], contextlib.AbstractContextManager[RealServer]]
# Servers that the contract of all engines is tested with, by peer and name.
STARTS: Mapping[tuple[str, str], Start] = {
    # Over gRPC there is no salt, so the prefix cache is off.
    ("vllm", "vllm-grpc"): lambda directory, log: vllm_server(
        directory, log, Service.VLLM, "--no-enable-prefix-caching"
    ),
    ("vllm", "vllm-http"): lambda directory, log: vllm_server(
        directory, log, Service.OPENAI_HTTP, "--enable-prefix-caching"
    ),
    ("smg", "smg-vllm"): smg_gateway,
}
AVAILABLE = {
    name: start
    for (peer, name), start in STARTS.items()
    if all(map(python_of, (peer, *PEERS[peer].needs)))
}


@dataclass
class RealServers:
    """Servers of `STARTS` on one checkpoint, started when they are first used."""

    checkpoint: TinyCheckpoint
    folder: Path
    stack: contextlib.ExitStack
    started: dict[str, RealServer] = field(default_factory=dict)

    def get(self, name: str) -> RealServer:
        if name not in self.started:
            start = AVAILABLE[name](self.checkpoint.directory, self.folder / f"{name}.log")
            self.started[name] = self.stack.enter_context(start)
        return self.started[name]


def real_settings(servers: RealServers, name: str, **changes: Any) -> RemoteSettings:
    """Return settings of an engine that uses a server, started if necessary."""
    return RemoteSettings(
        servers.checkpoint.directory,
        "tiny",
        servers.get(name).target,
        **({"connect_timeout_s": 120.0} | changes),
    )
