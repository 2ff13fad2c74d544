"""The reference workload through the whole service, beside the bare engine in the same run.

    python -m bench.service [--agents 50] [--rounds 3]

Both get the same prompts on the same model with the same settings: the engine through `TorchEngine` in this process (its host is a
child process either way), the service through gRPC, authentication, admission, journal and settlement, with the billing worker
beside it. Rounds alternate, with fresh prompts each, so that neither finds the other's prefixes cached.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weir_client import AsyncClient

from api.cli.stack import run_stack
from api.cli.workload import OUTPUT_TOKENS, Conversation, percentile, reference_prompts, run_agents
from api.settings import DEMO_MODEL_NAME, Settings
from inference.engine import GenerationRequest, SamplingParams, SequenceFinished, SequenceId, StopCriteria, TokensGenerated
from inference.tokenizer import ChatMessage, Tokenizer
from inference.torch_engine import TorchEngine, TorchEngineSettings


async def run_bare(
    engine: TorchEngine, tokenizer: Tokenizer, prompts: Sequence[Conversation], label: str
) -> tuple[float, list[float]]:
    """All prompts at once through the engine alone; output tokens per second, and times to first token in ms."""

    async def one(index: int, prompt: Conversation) -> tuple[int, float]:
        token_ids = tokenizer.encode_chat([ChatMessage(message["role"], message["content"]) for message in prompt])
        request = GenerationRequest(
            sequence_id=SequenceId(f"{label}-{index}"),
            prompt_token_ids=token_ids,
            sampling=SamplingParams(),
            stop=StopCriteria(max_output_tokens=OUTPUT_TOKENS, ignore_eos=True),
        )
        sent_at, ttft_ms, token_count = time.perf_counter(), 0.0, 0
        async with engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, TokensGenerated):
                    ttft_ms = ttft_ms or (time.perf_counter() - sent_at) * 1000
                if isinstance(event, SequenceFinished):
                    token_count = event.generated_token_count
        return token_count, ttft_ms

    began_at = time.perf_counter()
    ends = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
    return sum(count for count, _ in ends) / (time.perf_counter() - began_at), [ttft for _, ttft in ends]


async def run_service(client: AsyncClient, prompts: Sequence[Conversation]) -> tuple[float, list[float]]:
    """The same through the service."""
    run = await run_agents(client, DEMO_MODEL_NAME, prompts, {}, lambda _: None)
    return run.received_token_count / run.duration_s, run.ttfts_ms


async def measure(agent_count: int, round_count: int) -> None:
    """Run both in turns and print medians and their ratio."""
    settings = Settings.from_environment()
    directory = settings.models[DEMO_MODEL_NAME]
    prompts = reference_prompts(directory, agent_count * round_count * 2)
    bare: list[tuple[float, list[float]]] = []
    service: list[tuple[float, list[float]]] = []
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as home:
        settings = replace(settings, home=Path(home), database_url="", listen_address="127.0.0.1:0")
        engine = TorchEngine(
            TorchEngineSettings(
                directory=directory,
                name=DEMO_MODEL_NAME,
                kv_cache_bytes=settings.kv_cache_bytes,
                torch_thread_count=settings.engine_thread_count,
            )
        )
        async with asyncio.TaskGroup() as tasks, run_stack(settings, lambda _: None) as stack:
            tasks.create_task(engine.serve())
            await engine.start()
            connection = stack.connection
            async with AsyncClient(address=connection.address, api_key=connection.api_key) as client:
                for index in range(round_count):
                    first = prompts[2 * index * agent_count :][: 2 * agent_count]
                    bare.append(await run_bare(engine, Tokenizer(directory), first[:agent_count], f"round-{index}"))
                    service.append(await run_service(client, first[agent_count:]))
            await engine.close()
    for name, runs in (("bare engine", bare), ("whole service", service)):
        ttfts = [ttft for _, values in runs for ttft in values]
        rate = statistics.median(rate for rate, _ in runs)
        print(f"{name:14} {rate:8.1f} tokens/s   TTFT p50 {percentile(ttfts, 50):8.1f} ms   p99 {percentile(ttfts, 99):8.1f} ms")
    ratio = statistics.median(rate for rate, _ in service) / statistics.median(rate for rate, _ in bare)
    print(
        f"the service reaches {ratio:.1%} of the bare engine's throughput ({round_count} rounds of {agent_count} agents, medians)"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.agents, arguments.rounds))


if __name__ == "__main__":
    main()
