"""Cold start from no engine to the first token, against the import of torch alone, in one run.

    python -m bench.cold_start [--shape demo|S|M|L] [--precision float32|bfloat16|int8] [--spare]

Measures in turn: `python -c "import torch"`; the engine worker alone, from its process
to its first token (`TorchEngine` in this process); and a request through the whole service without
an engine: gRPC, key, admission, queue, start, first token. Stages are those reported to the client:
`process` until Python runs in the worker, `import` of torch, `weights` until the first token. With
`--spare` the service keeps one worker that has imported torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from weir_client import AsyncClient, Delta, Progress

from api.cli.stack import run_stack
from api.core.settings import DEMO_MODEL_NAME, Settings
from api.fleet.fleet import torch_settings
from bench import engine_streams as streams
from bench.harness import Bench, Case, Cases, Figure, Values, main
from bench.shapes import SHAPES, Precision, write_checkpoint
from bench.site import children_of
from inference.adapters.torch_engine import TorchEngine
from inference.engine import GenerationRequest, SamplingParams, StopCriteria, TokensGenerated

IDLE_TIMEOUT_S = 0.3  # seconds; each round starts without an engine
PROGRESS_INTERVAL_S = 0.02
REPORTED = ("admission", "cold_start", "queue", "prefill")
PROMPT = tuple(range(20, 84))
WORKER = b"inference.adapters.torch_worker"


@dataclass(slots=True)
class ColdStart:
    """Cold request through the service. Times are in ms since it was sent."""

    ttft_ms: float = 0.0
    stage_at_ms: dict[str, float] = field(default_factory=dict)
    reported: dict[str, float] = field(default_factory=dict)  # by the `finished` frame


def import_torch_ms() -> float:
    """Measure a Python process that imports torch and exits."""
    began_at = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return (time.perf_counter() - began_at) * 1000


async def bare_worker_ms(settings: Settings) -> float:
    """Measure a worker without the service, from its start to its first token."""
    directory = settings.models.directories[DEMO_MODEL_NAME]
    engine = TorchEngine(torch_settings(settings, DEMO_MODEL_NAME, directory))
    request = GenerationRequest(
        PROMPT, SamplingParams(), StopCriteria(max_output_tokens=4, ignore_eos=True)
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        began_at = time.perf_counter()
        await engine.start()
        async with streams.stream(engine, request) as stream:
            async for event in stream:
                if isinstance(event, TokensGenerated):
                    break
        took_ms = (time.perf_counter() - began_at) * 1000
        await engine.close()
    return took_ms


async def through_service(client: AsyncClient) -> ColdStart:
    """Send one request and record the start-up stages that the server reports to the client."""
    found, sent_at = ColdStart(), time.perf_counter()
    stream = client.generate(
        DEMO_MODEL_NAME, token_ids=PROMPT, max_output_tokens=4, ignore_eos=True, temperature=0.0
    )
    async with stream:
        async for event in stream.events():
            now_ms = (time.perf_counter() - sent_at) * 1000
            match event:
                case Progress(loading_stage=stage):
                    found.stage_at_ms.setdefault(stage, now_ms)
                case Delta() if not found.ttft_ms:
                    found.ttft_ms = now_ms
                case _:
                    pass
    timings = stream.result.timings
    found.reported = {f"{name}_ms": getattr(timings, f"{name}_ms") for name in REPORTED}
    return found


async def no_engine(pid: int, spare_count: int) -> None:
    """Wait until the API process has no child processes but spare workers."""
    while len(workers_below(pid)) != spare_count:  # noqa: ASYNC110  # of other processes
        await asyncio.sleep(0.05)


def workers_below(pid: int) -> list[int]:
    """Find the engine workers among a process's descendants."""
    found = []
    for child in children_of(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        found += [child] if WORKER in command else []
        found += workers_below(child)
    return found


@contextlib.asynccontextmanager
async def prepare(arguments: argparse.Namespace) -> AsyncIterator[Cases]:
    """Run the service without an engine, and yield the ways to start one."""
    settings = Settings.from_environment()
    if arguments.shape != "demo":
        precision: Precision = "float32" if arguments.precision == "float32" else "bfloat16"
        directory = Path(tempfile.gettempdir()) / "weir-bench" / f"{arguments.shape}-{precision}"
        write_checkpoint(directory, SHAPES[arguments.shape], precision)
        settings = settings.having(models={DEMO_MODEL_NAME: directory})
    settings = settings.having(
        engine_dtype=arguments.precision,
        min_replicas=0,
        model_idle_timeout_s=IDLE_TIMEOUT_S,
        progress_interval_s=PROGRESS_INTERVAL_S,
        spare_workers=int(arguments.spare),
        listen="127.0.0.1:0",
        database_url="",
    )
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as home:
        settings = settings.having(home=Path(home))
        async with run_stack(settings, lambda _: None) as stack:
            connection = stack.connection
            async with AsyncClient(
                address=connection.address, api_key=connection.api_key
            ) as client:

                async def alone() -> Values:
                    return {"ms": await asyncio.to_thread(import_torch_ms)}

                async def worker() -> Values:
                    return {"ms": await bare_worker_ms(settings)}

                async def request() -> Values:
                    await no_engine(os.getpid(), int(arguments.spare))
                    if arguments.spare:
                        await asyncio.sleep(4.0)  # until it has imported torch
                    found = await through_service(client)
                    await no_engine(os.getpid(), int(arguments.spare))
                    stages = {f"at_{name}": at_ms for name, at_ms in found.stage_at_ms.items()}
                    return {"ms": found.ttft_ms} | stages | found.reported

                ways = {"import torch": alone, "worker alone": worker, "request, cold": request}
                yield [Case("to the first token", ways)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    parser.add_argument("--shape", choices=("demo", *SHAPES), default="demo")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "int8"), default="float32")
    parser.add_argument("--spare", action="store_true")


FIGURES = {
    "ms": Figure("ms"),
    "at_": Figure("reported at, ms"),
    **{f"at_{name}": Figure(f"{name} from, ms") for name in ("process", "import", "weights")},
    **{f"{name}_ms": Figure(f"{name.replace('_', ' ')}, ms", ",.1f") for name in REPORTED},
}
BENCH = Bench(__doc__, FIGURES, prepare, add_options, rounds=5)

if __name__ == "__main__":
    main(BENCH)
