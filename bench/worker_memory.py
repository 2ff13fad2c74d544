"""Private and shared memory of two engine workers of one model.

Compares the native decoder with mapped weights, with weights of its own, and torch.

    python -m bench.worker_memory [--shape S|M|L] [--precision float32|bfloat16|int8]

From `/proc/<pid>/smaps_rollup`: `Private_Dirty` is freed by ending one worker; `Pss` divides shared
pages by their sharers. Each worker has generated some tokens, so that its weights are resident.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from bench import engine_streams as streams
from bench.shapes import SHAPES, Precision, write_checkpoint
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.engine import GenerationRequest, SamplingParams, StopCriteria
from inference.native.loader import SWITCH
from inference.native.packed_file import PackedTarget

WORKERS = 2
KV_CACHE_BYTES = 64 << 20
REQUEST = GenerationRequest(
    tuple(range(20, 84)), SamplingParams(), StopCriteria(max_output_tokens=8, ignore_eos=True)
)
FIELDS = ("Rss", "Pss", "Private_Dirty", "Private_Clean")


def memory_mib(pid: int) -> dict[str, float]:
    """Read the memory of a process in MiB, under the kernel's names."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {
        name: int(rest.split()[0]) / 1024
        for name, _, rest in (line.partition(":") for line in lines)
        if name in FIELDS
    }


async def two_workers(settings: TorchEngineSettings) -> list[dict[str, float]]:
    """Start two workers, let each generate some tokens, and return the memory of both."""
    engines = [TorchEngine(settings) for _ in range(WORKERS)]
    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            tasks.create_task(engine.serve())
            await engine.start()
            async with AsyncExitStack() as stack:
                async for _ in await stack.enter_async_context(streams.stream(engine, REQUEST)):
                    pass
        found = [
            memory_mib(engine.worker_pid) for engine in engines if engine.worker_pid is not None
        ]
        for engine in engines:
            await engine.close()
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="M")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "int8"), default="bfloat16")
    arguments = parser.parse_args()
    stored: Precision = "float32" if arguments.precision == "float32" else "bfloat16"
    directory = Path(tempfile.gettempdir()) / "weir-bench" / f"{arguments.shape}-{stored}"
    write_checkpoint(directory, SHAPES[arguments.shape], stored)
    weights_mib = sum(path.stat().st_size for path in directory.glob("*.safetensors")) / 2**20
    print(
        f"{arguments.shape} in {arguments.precision}: {weights_mib:.0f} MiB of weights in the"
        " checkpoint; MiB per worker"
    )
    settings = TorchEngineSettings(
        directory,
        "model",
        compute_dtype=arguments.precision,
        kv_cache_bytes=KV_CACHE_BYTES,
        torch_thread_count=1,
    )
    packed = replace(settings, packed=PackedTarget(str(directory / "packed"), 1 << 40))
    for name, switch, each in (
        ("mapped", "1", packed),
        ("packed", "1", settings),
        ("torch", "0", settings),
    ):
        os.environ[SWITCH] = switch
        for index, memory in enumerate(asyncio.run(two_workers(each))):
            print(
                f"  {name:6} worker {index + 1}: "
                + "  ".join(f"{field} {memory[field]:7.0f}" for field in FIELDS)
            )


if __name__ == "__main__":
    main()
