"""The torch engine on the reference workload, against `transformers` one request after another, in the same run.

The workload is that of `design.md` section 8: 50 requests at once, 1,025 tokens in of which 200 are the same for all, 150 out,
greedy, end tokens ignored. Through the child process and its protocol, as the API uses it, but without API or database.

    python -m bench.engine CHECKPOINT [--requests 50] [--threads N] [--reference 5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inference.engine import (
    GenerationRequest,
    SamplingParams,
    Scheduled,
    SequenceFinished,
    SequenceId,
    StopCriteria,
    TokensGenerated,
)
from inference.torch_engine import TorchEngine, TorchEngineSettings

SHARED_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS = 200, 1025, 150
FIRST_PLAIN_TOKEN = 16  # ids below are special tokens in the bundled model


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of the workload. Times in ms are of the stream as its caller sees it."""

    request_count: int
    thread_count: int
    start_s: float
    alone_ttft_ms: float
    total_s: float
    output_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    cached_token_count: int
    reference_tokens_per_s: float
    ratio: float


@dataclass(slots=True)
class Timeline:
    """When one stream's tokens came, in seconds since the start of the run."""

    token_at_s: list[float]
    cached_token_count: int = 0


def workload(request_count: int, vocabulary_size: int) -> list[GenerationRequest]:
    """Random tokens: the engine's work does not depend on what they mean."""
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_PLAIN_TOKEN, vocabulary_size) for _ in range(count))

    shared = tokens(SHARED_TOKENS)
    return [_request(str(index), shared + tokens(PROMPT_TOKENS - SHARED_TOKENS)) for index in range(request_count)]


def _request(name: str, prompt: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(SequenceId(name), prompt, SamplingParams(), StopCriteria(OUTPUT_TOKENS, ignore_eos=True))


async def follow(engine: TorchEngine, request: GenerationRequest, clock_start_s: float) -> Timeline:
    """Run one sequence to its end and note when its tokens came."""
    timeline = Timeline([])
    async with engine.generate(request) as stream:
        async for event in stream:
            match event:
                case Scheduled():
                    timeline.cached_token_count = event.cached_token_count
                case TokensGenerated():
                    timeline.token_at_s += [time.perf_counter() - clock_start_s] * len(event.token_ids)
                case SequenceFinished():
                    pass
    return timeline


async def measure_engine(checkpoint: Path, request_count: int, thread_count: int) -> dict[str, Any]:
    """Start the engine, run one request alone, then the workload."""
    engine = TorchEngine(TorchEngineSettings(checkpoint, "bench", torch_thread_count=thread_count))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        begin_s = time.perf_counter()
        await engine.start()
        start_s = time.perf_counter() - begin_s
        requests = workload(request_count + 1, engine.model.vocabulary_size)
        # Other tokens throughout, so that it is cold and warms nothing.
        lone = _request("alone", tuple(reversed(requests.pop().prompt_token_ids)))
        alone = await follow(engine, lone, time.perf_counter())
        begin_s = time.perf_counter()
        timelines = await asyncio.gather(*(follow(engine, request, begin_s) for request in requests))
        total_s = time.perf_counter() - begin_s
        await engine.close()
    gaps = [later - sooner for line in timelines for sooner, later in zip(line.token_at_s, line.token_at_s[1:], strict=False)]
    firsts = [line.token_at_s[0] for line in timelines]
    return {
        "start_s": start_s,
        "alone_ttft_ms": alone.token_at_s[0] * 1e3,
        "total_s": total_s,
        "output_tokens_per_s": sum(len(line.token_at_s) for line in timelines) / total_s,
        "ttft_ms_p50": statistics.median(firsts) * 1e3,
        "ttft_ms_p99": _percentile(firsts, 99) * 1e3,
        "itl_ms_p50": statistics.median(gaps) * 1e3,
        "itl_ms_p99": _percentile(gaps, 99) * 1e3,
        "cached_token_count": sum(line.cached_token_count for line in timelines),
    }


def measure_reference(checkpoint: Path, request_count: int, thread_count: int) -> float:
    """Output tokens per second of `transformers`, one request after another, each in full."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(thread_count)
    model: Any = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
    begin_s = time.perf_counter()
    for request in workload(request_count, model.config.vocab_size):
        ids = torch.tensor([request.prompt_token_ids])
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=None)
    return request_count * OUTPUT_TOKENS / (time.perf_counter() - begin_s)


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def main() -> None:
    """Print what was measured, with the command's own settings beside it."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--reference", type=int, default=5, help="requests for transformers; its rate does not depend on how many")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    measured = asyncio.run(measure_engine(arguments.checkpoint, arguments.requests, arguments.threads))
    reference = measure_reference(arguments.checkpoint, arguments.reference, arguments.threads)
    result = Measured(
        request_count=arguments.requests,
        thread_count=arguments.threads,
        reference_tokens_per_s=reference,
        ratio=measured["output_tokens_per_s"] / reference,
        **measured,
    )
    if arguments.json:
        print(json.dumps(asdict(result)))
        return
    for name, value in asdict(result).items():
        print(f"{name:24} {value:,.2f}" if isinstance(value, float) else f"{name:24} {value:,}")


if __name__ == "__main__":
    main()
