"""Starts servers of other projects on checkpoints. `WEIR_TEST_<PEER>_PYTHON` names the interpreter
of a peer; `infra/peers.py` installs it and sets the variable.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
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

VLLM_COMMON = ("--host=127.0.0.1", "--dtype=float32", "--enforce-eager")
VLLM_HTTP = ("--enable-prompt-tokens-details", "--served-model-name=tiny")
VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
DYNAMO_VOCABULARY_SIZE = 2048
DYNAMO_MODEL = "tiny"
DYNAMO_ROUTING = ("kv", "round-robin")  # one frontend for each
# Their outputs are random, so tests that compare outputs do not apply.
WITH_RANDOM_OUTPUTS = frozenset({"dynamo-mocker"})


@dataclass(frozen=True)
class RealServer:
    """A running server. workers: those behind a router. directory: of its checkpoint, if it is
    another one. shares_prefixes: between all tenants.
    """

    target: Target
    process: subprocess.Popen[bytes]
    workers: Sequence[RealServer] = ()
    directory: Path | None = None
    shares_prefixes: bool = False


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
        message = log.read_text(errors="replace")
        assert process.poll() is None, message[-4000:]
        return readiness in message

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
    readiness = "Application startup complete" if is_http else "ready to accept requests"
    with running(command, log, readiness, VLLM_SETTINGS) as process:
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


@dataclass
class Dynamo:
    """Frontends of NVIDIA Dynamo by their routing, and the workers behind all of them.

    The workers simulate vLLM: they answer with random tokens from 1000 to 1999, at 5 to 10 ms each.
    """

    directory: Path
    log: Path
    environment: dict[str, str]
    ports: dict[str, int]
    stack: contextlib.ExitStack
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def settings(self, routing: str = "kv", **changes: Any) -> RemoteSettings:
        """Return settings of an engine that uses a frontend."""
        target = Target(Service.OPENAI_HTTP, f"127.0.0.1:{self.ports[routing]}", DYNAMO_MODEL)
        waits = {"poll_interval_s": 0.2, "restart_delay_s_max": 1.0, "share_prefixes": True}
        return RemoteSettings(self.directory, "dynamo", target, **(waits | changes))

    def front(self, routing: str, *options: str) -> None:
        """Start a frontend."""
        port = self.ports[routing] = free_port()
        command = [python_of("dynamo"), "-m", "dynamo.frontend", "--http-host=127.0.0.1"]
        command += [f"--http-port={port}", "--discovery-backend=file", *options]
        log = self.log / f"front-{routing}.log"
        self.stack.enter_context(
            running(command, log, "completion endpoints enabled", self.environment)
        )

    def work(self) -> None:
        """Start a worker."""
        command = [python_of("dynamo"), "-m", "dynamo.mocker", f"--model-path={self.directory}"]
        command += [f"--model-name={DYNAMO_MODEL}", "--discovery-backend=file", "--block-size=16"]
        log = self.log / f"worker-{len(self.workers)}.log"
        self.workers.append(self.stack.enter_context(running(command, log, "", self.environment)))

    def worker_count(self, routing: str) -> int:
        """Return the number of workers that a frontend knows."""
        message = json.loads(self.get(routing, "/health"))
        return sum(each["endpoint"] == "generate" for each in message.get("instances", ()))

    def running_count(self, routing: str) -> int:
        """Return the number of requests that a frontend has not ended."""
        found = re.search(
            r"^dynamo_frontend_inflight_requests\{.*\} (\d+)", self.get(routing, "/metrics"), re.M
        )
        return int(found[1]) if found else 0

    def get(self, routing: str, path: str) -> str:
        address = f"http://127.0.0.1:{self.ports[routing]}{path}"
        with urllib.request.urlopen(address) as response:
            return str(response.read().decode())


def dynamo_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint, so that its tokenizer has the tokens of simulated workers."""
    directory = shutil.copytree(checkpoint, folder / "checkpoint")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "config.json").read_text())
    for token_id in range(config["vocab_size"], DYNAMO_VOCABULARY_SIZE):
        tokenizer["model"]["vocab"][f"w{token_id}"] = token_id
    config["vocab_size"] = DYNAMO_VOCABULARY_SIZE
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def dynamo_environment(folder: Path, discovery: str) -> dict[str, str]:
    """Return variables of frontends and workers that find each other by files."""
    hosts = ("TCP_RPC_HOST", "TCP_RESPONSE_STREAM_HOST", "EVENT_PLANE_HOST", "SYSTEM_HOST")
    environment = {f"DYN_{name}": "127.0.0.1" for name in hosts}
    return environment | {"DYN_FILE_KV": str(folder / discovery), "HOME": str(folder)}


@contextlib.contextmanager
def dynamo_servers(
    checkpoint: Path, folder: Path, routings: Sequence[str] = DYNAMO_ROUTING
) -> Iterator[Dynamo]:
    """Yield frontends and two workers."""
    directory = dynamo_checkpoint(checkpoint, folder)
    environment = dynamo_environment(folder, "discovery")
    with contextlib.ExitStack() as stack:
        dynamo = Dynamo(directory, folder, environment, {}, stack)
        for _ in range(2):
            dynamo.work()
        for routing in routings:
            dynamo.front(routing, f"--router-mode={routing}")
        for routing in routings:
            wait_for(lambda: dynamo.worker_count(routing) == 2, "two workers", 60.0)  # noqa: B023
        yield dynamo


@contextlib.contextmanager
def dynamo_server(checkpoint: Path, log: Path) -> Iterator[RealServer]:
    """Yield a frontend whose workers share prefixes and answer with random tokens."""
    [routing, *_] = DYNAMO_ROUTING
    with dynamo_servers(checkpoint, log.with_suffix(""), [routing]) as dynamo:
        target = dynamo.settings(routing).target
        yield RealServer(target, dynamo.workers[0], (), dynamo.directory, shares_prefixes=True)


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
    ("dynamo", "dynamo-mocker"): dynamo_server,
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
    server = servers.get(name)
    options = {"connect_timeout_s": 120.0, "share_prefixes": server.shares_prefixes} | changes
    directory = server.directory or servers.checkpoint.directory
    return RemoteSettings(directory, "tiny", server.target, **options)
