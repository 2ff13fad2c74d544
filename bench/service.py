"""Reference workload through the whole service, against the bare engine in the same run.

    python -m bench.service [--shape demo|S|M|L] [--precision bfloat16] [--agents 50] [--rounds 3]

Both get the same token ids on the same model with the same settings: the engine through
`TorchEngine` in this process (with a worker process in both cases), the service through gRPC,
authentication, admission, queue, journal and settlement, with the billing worker and the client in
this process. Rounds alternate, with fresh prompts each, so that neither uses the other's cached
prefixes. `demo` is the bundled model, with steps so short that a machine of two cores is sensitive
to every message; the shapes are those of `bench.engine`, random weights of realistic sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weir_client import AsyncClient

from api.cli.demo import OUTPUT_TOKENS, percentile, reference_prompts
from api.cli.stack import run_stack
from api.core.settings import DEMO_MODEL_NAME, Settings
from bench import engine_streams as streams
from bench.engine import KV_CACHE_BYTES, Prompts
from bench.shapes import SHAPES, write_checkpoint
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.engine import GenerationRequest, SamplingParams, SequenceFinished, StopCriteria, TokensGenerated
from inference.text.tokenizer import ChatMessage, Tokenizer

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the workload. ttfts_ms: of each request."""

    tokens_per_s: float
    ttfts_ms: list[float]


async def run_bare(engine: TorchEngine, prompts: Sequence[Prompt]) -> Run:
    """Send all prompts concurrently to the engine alone."""

    async def one(index: int, prompt: Prompt) -> tuple[int, float]:
        request = GenerationRequest(
            prompt_token_ids=prompt,
            sampling=SamplingParams(),
            stop=StopCriteria(max_output_tokens=OUTPUT_TOKENS, ignore_eos=True),
        )
        sent_at, ttft_ms, token_count = time.perf_counter(), 0.0, 0
        async with streams.stream(engine, request) as stream:
            async for event in stream:
                if isinstance(event, TokensGenerated):
                    ttft_ms = ttft_ms or (time.perf_counter() - sent_at) * 1000
                if isinstance(event, SequenceFinished):
                    token_count = event.generated_token_count
        return token_count, ttft_ms

    return await timed(one(index, prompt) for index, prompt in enumerate(prompts))


async def run_service(client: AsyncClient, prompts: Sequence[Prompt]) -> Run:
    """Send all prompts concurrently through the service."""

    async def one(prompt: Prompt) -> tuple[int, float]:
        sent_at, ttft_ms, token_count = time.perf_counter(), 0.0, 0
        asked = client.generate(
            DEMO_MODEL_NAME, token_ids=prompt, max_output_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0
        )
        async with asked as stream:
            async for delta in stream:
                if delta.token_ids:
                    ttft_ms = ttft_ms or (time.perf_counter() - sent_at) * 1000
                    token_count += len(delta.token_ids)
        return token_count, ttft_ms

    return await timed(one(prompt) for prompt in prompts)


async def timed(requests: Iterable[Coroutine[None, None, tuple[int, float]]]) -> Run:
    """Run all requests concurrently; each returns its output tokens and its time to first token."""
    began_at = time.perf_counter()
    ends = await asyncio.gather(*requests)
    return Run(sum(count for count, _ in ends) / (time.perf_counter() - began_at), [ttft_ms for _, ttft_ms in ends])


def demo_prompts(directory: Path, count: int) -> list[Prompt]:
    """Return the copilot's conversations as tokens of the bundled model."""
    tokenizer = Tokenizer(directory)
    return [
        tokenizer.encode_chat([ChatMessage(message["role"], message["content"]) for message in prompt])
        for prompt in reference_prompts(directory, count)
    ]


def model_and_prompts(arguments: argparse.Namespace, settings: Settings) -> tuple[Settings, list[Prompt]]:
    """Return settings with the measured model, and prompts for all rounds."""
    count = arguments.agents * arguments.rounds * 2
    if arguments.shape == "demo":
        return settings, demo_prompts(settings.models[DEMO_MODEL_NAME], count)
    directory = Path(tempfile.gettempdir()) / "weir-bench" / f"{arguments.shape}-{arguments.precision}"
    write_checkpoint(directory, SHAPES[arguments.shape], arguments.precision)
    settings = replace(
        settings, models={DEMO_MODEL_NAME: directory}, engine_dtype=arguments.precision, kv_cache_bytes=KV_CACHE_BYTES
    )
    return settings, [tuple(prompt) for prompt in Prompts(0).workload(count)]


async def measure(arguments: argparse.Namespace) -> None:
    """Run both in turn and print medians and their ratio."""
    settings, prompts = model_and_prompts(arguments, Settings.from_environment())
    bare: list[Run] = []
    service: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as home:
        settings = replace(settings, home=Path(home), database_url="", listen_address="127.0.0.1:0")
        engine = TorchEngine(
            TorchEngineSettings(
                directory=settings.models[DEMO_MODEL_NAME],
                name=DEMO_MODEL_NAME,
                compute_dtype=settings.engine_dtype,
                kv_cache_bytes=settings.kv_cache_bytes,
                torch_thread_count=settings.engine_thread_count,
            )
        )
        async with asyncio.TaskGroup() as tasks, run_stack(settings, lambda _: None) as stack:
            tasks.create_task(engine.serve())
            await engine.start()
            connection = stack.connection
            async with AsyncClient(address=connection.address, api_key=connection.api_key) as client:
                for index in range(arguments.rounds):
                    first = prompts[2 * index * arguments.agents :][: 2 * arguments.agents]
                    bare.append(await run_bare(engine, first[: arguments.agents]))
                    service.append(await run_service(client, first[arguments.agents :]))
            await engine.close()
    for name, runs in (("bare engine", bare), ("whole service", service)):
        ttfts = [ttft_ms for run in runs for ttft_ms in run.ttfts_ms]
        rate = statistics.median(run.tokens_per_s for run in runs)
        print(f"{name:14} {rate:8.1f} tokens/s   TTFT p50 {percentile(ttfts, 50):8.1f} ms   p99 {percentile(ttfts, 99):8.1f} ms")
    ratios = [ours.tokens_per_s / alone.tokens_per_s for ours, alone in zip(service, bare, strict=True)]
    print(
        f"the service reaches {statistics.median(ratios):.1%} of the bare engine's throughput"
        f" ({arguments.rounds} rounds of {arguments.agents} agents: {min(ratios):.1%} to {max(ratios):.1%})"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("demo", *SHAPES), default="demo")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--agents", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
