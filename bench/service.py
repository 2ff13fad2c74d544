"""Reference workload through the whole service, against the bare engine in the same run.

    python -m bench.service [--shape demo|S|M|L] [--precision bfloat16] [--agents 50]
        [--vllm-python VENV/bin/python] [--load-generators]

Both get the same token ids on the same model with the same settings: the engine through
`TorchEngine` in this process (with a worker process in both cases), the service through gRPC,
authentication, admission, queue, journal and settlement, with the billing worker and the client in
this process. Each run has fresh prompts, so that neither uses the other's cached prefixes. `demo`
is the bundled model, with steps so short that a machine of two cores is sensitive to every message;
the shapes are those of `bench.engine`, random weights of realistic sizes.

With `--vllm-python`, the engine is vLLM's CPU build behind its HTTP server, and the bare engine is
that server with the same load over HTTP, after one run that warms both up.

With `--load-generators`, GuideLLM and AIPerf also send the same load to the service over HTTP, each
agent one request in each round, and report figures of their own (`bench.load_generators`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from weir_client import AsyncClient

from api.cli.demo import OUTPUT_TOKENS, percentile, reference_prompts
from api.cli.stack import run_stack
from api.core.settings import DEMO_MODEL_NAME, Settings
from api.fleet.fleet import torch_settings
from bench import engine_streams as streams
from bench import load_generators
from bench.engine import KV_CACHE_BYTES, Prompts
from bench.harness import Bench, Case, Cases, Figure, Measure, Unusable, Values, main
from bench.peers import PeerMissing, vllm_serving, vllm_version
from bench.shapes import SHAPES, write_checkpoint
from common.cpus import usable_cpus
from inference.adapters.torch_engine import TorchEngine
from inference.engine import (
    GenerationRequest,
    SamplingParams,
    SequenceFinished,
    StopCriteria,
    TokensGenerated,
)
from inference.text.tokenizer import ChatMessage, Tokenizer
from infra.clients import Client

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one run of the workload. `ttfts_ms` has the time to first token of each request."""

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


async def run_vllm(session: aiohttp.ClientSession, prompts: Sequence[Prompt]) -> Run:
    """Send all prompts concurrently to vLLM's HTTP server."""

    async def one(prompt: Prompt) -> tuple[int, float]:
        body = {
            "model": DEMO_MODEL_NAME,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_at, ttft_ms, token_count = time.perf_counter(), 0.0, 0
        async with session.post("/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                message = json.loads(line.removeprefix(b"data: "))
                if message["choices"]:
                    ttft_ms = ttft_ms or (time.perf_counter() - sent_at) * 1000
                if message.get("usage"):
                    token_count = message["usage"]["completion_tokens"]
        return token_count, ttft_ms

    return await timed(one(prompt) for prompt in prompts)


async def run_service(client: AsyncClient, prompts: Sequence[Prompt]) -> Run:
    """Send all prompts concurrently to the service."""

    async def one(prompt: Prompt) -> tuple[int, float]:
        sent_at, ttft_ms, token_count = time.perf_counter(), 0.0, 0
        stream_options = client.generate(
            DEMO_MODEL_NAME,
            token_ids=prompt,
            max_output_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            temperature=0.0,
        )
        async with stream_options as stream:
            async for delta in stream:
                if delta.token_ids:
                    ttft_ms = ttft_ms or (time.perf_counter() - sent_at) * 1000
                    token_count += len(delta.token_ids)
        return token_count, ttft_ms

    return await timed(one(prompt) for prompt in prompts)


async def timed(requests: Iterable[Coroutine[None, None, tuple[int, float]]]) -> Run:
    """Run all requests concurrently. Each returns its output tokens and its time to first token."""
    began_at = time.perf_counter()
    ends = await asyncio.gather(*requests)
    return Run(
        sum(count for count, _ in ends) / (time.perf_counter() - began_at),
        [ttft_ms for _, ttft_ms in ends],
    )


def demo_prompts(directory: Path, count: int) -> list[Prompt]:
    """Encode the copilot's conversations as tokens of the bundled model."""
    tokenizer = Tokenizer(directory)
    return [
        tokenizer.encode_chat(
            [ChatMessage(message["role"], message["content"]) for message in prompt]
        )
        for prompt in reference_prompts(directory, count)
    ]


def model_and_prompts(
    arguments: argparse.Namespace, settings: Settings
) -> tuple[Settings, list[Prompt]]:
    """Choose settings with the measured model, and draw prompts for all rounds."""
    count = arguments.agents * (arguments.rounds + 1) * 2
    if arguments.shape == "demo":
        return settings, demo_prompts(settings.models.directories[DEMO_MODEL_NAME], count)
    directory = (
        Path(tempfile.gettempdir()) / "weir-bench" / f"{arguments.shape}-{arguments.precision}"
    )
    write_checkpoint(directory, SHAPES[arguments.shape], arguments.precision)
    settings = settings.having(
        models={DEMO_MODEL_NAME: directory},
        engine_dtype=arguments.precision,
        kv_cache_bytes=KV_CACHE_BYTES,
    )
    return settings, [tuple(prompt) for prompt in Prompts(0).workload(count)]


RunBare = Callable[[Sequence[Prompt]], Awaitable[Run]]


@contextlib.asynccontextmanager
async def engine_alone(settings: Settings) -> AsyncIterator[tuple[Settings, RunBare]]:
    """Open an engine; yield the service's settings, and a function to run prompts on it alone."""
    directory = settings.models.directories[DEMO_MODEL_NAME]
    engine = TorchEngine(torch_settings(settings, DEMO_MODEL_NAME, directory))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        await engine.start()
        yield settings, functools.partial(run_bare, engine)
        await engine.close()


@contextlib.asynccontextmanager
async def vllm_alone(
    settings: Settings, python: Path, precision: str
) -> AsyncIterator[tuple[Settings, RunBare]]:
    """Serve vLLM; yield settings of a service in front of it, and a function to run prompts."""
    directory = settings.models.directories[DEMO_MODEL_NAME]
    with vllm_serving(
        python, directory, precision, DEMO_MODEL_NAME, usable_cpus().count
    ) as address:
        targets = {DEMO_MODEL_NAME: f"openai+http://{address}"}
        async with aiohttp.ClientSession(
            f"http://{address}", timeout=aiohttp.ClientTimeout(total=None)
        ) as session:
            yield (
                settings.having(engine="remote", remote_targets=targets),
                functools.partial(run_vllm, session),
            )


def values_of(run: Run) -> Values:
    """Compute the figures of one run."""
    return {
        "tokens_per_s": run.tokens_per_s,
        "ttft_p50_ms": percentile(run.ttfts_ms, 50),
        "ttft_p99_ms": percentile(run.ttfts_ms, 99),
    }


@contextlib.asynccontextmanager
async def prepare(arguments: argparse.Namespace) -> AsyncIterator[Cases]:
    """Open the bare engine and the service, and yield them as the ways of the workload."""
    generators = load_generators.installed() if arguments.load_generators else {}
    settings, prompts = model_and_prompts(arguments, Settings.from_environment())
    drawn = iter(prompts)
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as home:
        settings = settings.having(home=Path(home), database_url="", listen="127.0.0.1:0")
        alone = (
            vllm_alone(settings, arguments.vllm_python, arguments.precision)
            if arguments.vllm_python
            else engine_alone(settings)
        )
        async with alone as (served, run_alone), run_stack(served, lambda _: None) as stack:
            connection = stack.connection
            async with AsyncClient(
                address=connection.address, api_key=connection.api_key
            ) as client:

                def fresh() -> list[Prompt]:
                    return list(itertools.islice(drawn, arguments.agents))

                async def bare() -> Values:
                    return values_of(await run_alone(fresh()))

                async def service() -> Values:
                    return values_of(await run_service(client, fresh()))

                def reported(name: str, program: Client) -> Measure:
                    load = load_generators.Load(
                        connection.openai_url.removesuffix("/v1"),
                        connection.api_key,
                        DEMO_MODEL_NAME,
                        settings.models.directories[DEMO_MODEL_NAME],
                        arguments.agents,
                        arguments.agents,
                    )

                    async def run() -> Values:
                        return await asyncio.to_thread(
                            load_generators.measured, name, program, load
                        )

                    return run

                ways: dict[str, Measure] = {
                    "bare vLLM" if arguments.vllm_python else "bare engine": bare,
                    "whole service": service,
                }
                if arguments.vllm_python:  # which compiles while it serves
                    for way in (bare, service):
                        await way()
                ways |= {name: reported(name, program) for name, program in generators.items()}
                yield [Case(f"{arguments.agents} agents at once, {arguments.shape}", ways)]


def check(arguments: argparse.Namespace) -> dict[str, object]:
    """Check the options, and return vLLM's version. Raises: Unusable."""
    if arguments.load_generators and arguments.shape != "demo":
        raise Unusable("--load-generators sends chats: it needs the demo model")
    if not arguments.vllm_python:
        return {}
    if arguments.shape == "demo":
        raise Unusable("--vllm-python needs a --shape that vLLM supports: S, M or L")
    try:
        return {"vllm": vllm_version(arguments.vllm_python)}
    except PeerMissing as error:
        raise Unusable(str(error)) from error


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    parser.add_argument("--shape", choices=("demo", *SHAPES), default="demo")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--agents", type=int, default=50)
    parser.add_argument("--load-generators", action="store_true")
    parser.add_argument("--vllm-python", type=lambda text: Path(text).absolute())


FIGURES = {
    "tokens_per_s": Figure("output tokens/s", ",.1f"),
    "ttft_p50_ms": Figure("TTFT p50, ms", ",.1f"),
    "ttft_p99_ms": Figure("TTFT p99, ms", ",.1f"),
    "gap_p50_ms": Figure("between tokens p50, ms", ",.1f"),
    "gap_p99_ms": Figure("between tokens p99, ms", ",.1f"),
    "request_count": Figure("requests", compared="no"),
    "input_tokens": Figure("input tokens", compared="no"),
    "output_tokens": Figure("output tokens", compared="no"),
}
BENCH = Bench(__doc__, FIGURES, prepare, add_options, facts=check)

if __name__ == "__main__":
    main(BENCH)
