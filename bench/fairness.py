"""Effect of one tenant's flood on another: a real api process and engine, two organizations.

    python -m bench.fairness [--agents 4] [--flood 20] [--seconds 40] [--output-tokens 50]

The quiet tenant's agents each send their next request after the end of the previous one; the
flooding tenant has `--flood` times as many. Prompts have the shape of the reference workload: 1,025
random tokens, the first 200 of them shared. Three runs on one database: the quiet tenant alone,
both with the fair queue, and both in order of arrival (WEIR_QUEUE_ORDER), the engine's own order.
Throughput counts the output tokens of both tenants in the same part of each run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weir_client import AsyncClient

from api.cli.demo import percentile
from api.cli.stack import create_key, ensure_tenant, open_sessions, run_stack
from api.core.settings import DEMO_MODEL_NAME, Settings
from metering.store import embedded_postgres
from metering.store.migrations_runner import migrate

WARM_UP_SHARE = 0.2  # of a run: until the queue is in a steady state
SHARED_TOKENS, OWN_TOKENS = 200, 825
TOKEN_IDS = range(300, 2000)  # plain tokens of the demo model


@dataclass(slots=True)
class Seen:
    """Measurements of one tenant's agents after the warm-up, in ms."""

    ttfts_ms: list[float] = field(default_factory=list)
    queues_ms: list[float] = field(default_factory=list)
    token_count: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one run: both tenants, and their output tokens per second together."""

    quiet: Seen
    flooding: Seen
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """Number of agents, factor of the flood, seconds of a run, and tokens of an answer."""

    agent_count: int
    flood_factor: int
    seconds: float
    output_tokens: int


def prompts(seed: int) -> Iterator[list[int]]:
    """Yield prompts of token ids without end. A seed always gives the same prompts."""
    rng = random.Random(seed)
    shared = random.Random(0).choices(TOKEN_IDS, k=SHARED_TOKENS)
    while True:
        yield shared + rng.choices(TOKEN_IDS, k=OWN_TOKENS)


async def keep_asking(
    client: AsyncClient, prompts: Iterator[list[int]], load: Load, began_at: float, seen: Seen
) -> None:
    """Run one agent: send a request, read its answer, and repeat until the time is over."""
    warm_at, ends_at = began_at + WARM_UP_SHARE * load.seconds, began_at + load.seconds
    while (sent_at := time.perf_counter()) < ends_at:
        first_at = None
        async with client.generate(
            DEMO_MODEL_NAME,
            token_ids=next(prompts),
            max_output_tokens=load.output_tokens,
            ignore_eos=True,
            temperature=0.0,
            max_retries=100,
        ) as stream:
            async for delta in stream:
                now = time.perf_counter()
                first_at = first_at or now
                if warm_at <= now < ends_at:
                    seen.token_count += len(delta.token_ids)
        if warm_at <= sent_at and first_at is not None:
            seen.ttfts_ms.append((first_at - sent_at) * 1000)
            seen.queues_ms.append(stream.result.timings.queue_ms)


async def run_tenants(
    settings: Settings, keys: tuple[str, str], load: Load, *, flooded: bool, seed: int
) -> Run:
    """Restart the service, and run the agents of both tenants, or of the quiet one alone."""
    flood_prompts = prompts(seed)
    quiet, flooding = Seen(), Seen()
    async with run_stack(settings, lambda _: None) as stack:
        address = stack.connection.address
        async with (
            AsyncClient(address, keys[0]) as quiet_client,
            AsyncClient(address, keys[1]) as flooding_client,
        ):
            began_at = time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(load.agent_count * load.flood_factor if flooded else 0):
                    tasks.create_task(
                        keep_asking(flooding_client, flood_prompts, load, began_at, flooding)
                    )
                for _ in range(load.agent_count):
                    tasks.create_task(
                        keep_asking(quiet_client, flood_prompts, load, began_at, quiet)
                    )
    counted_s = load.seconds * (1 - WARM_UP_SHARE)
    return Run(quiet, flooding, (quiet.token_count + flooding.token_count) / counted_s)


async def measure(load: Load) -> None:
    """Measure all three runs and print the comparison."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as directory:
        home = Path(directory)
        server = await asyncio.to_thread(embedded_postgres.start, home / "postgres")
        try:
            await asyncio.to_thread(migrate, server.url)
            async with open_sessions(server.url) as sessions:
                for name in ("quiet", "flooding"):
                    await ensure_tenant(sessions, name, "default")
                keys = (
                    await create_key(sessions, "quiet", "default", "bench", ("inference",)),
                    await create_key(sessions, "flooding", "default", "bench", ("inference",)),
                )
            settings = Settings.from_environment().having(
                home=home,
                database_url=server.url,
                listen="127.0.0.1:0",
            )
            runs = {}
            cases: list[tuple[str, Literal["fair", "arrival"], bool]] = [
                ("alone", "fair", False),
                ("flooded, fair", "fair", True),
                ("flooded, in order of arrival", "arrival", True),
            ]
            for index, (name, order, flooded) in enumerate(cases):
                ordered = settings.having(queue_order=order)
                runs[name] = await run_tenants(ordered, keys, load, flooded=flooded, seed=index)
                print_run(name, runs[name])
        finally:
            await asyncio.to_thread(server.stop)
    alone, fair, arrival = runs.values()
    for percent in (50, 99):
        ratio = percentile(fair.quiet.ttfts_ms, percent) / max(
            percentile(alone.quiet.ttfts_ms, percent), 1e-9
        )
        print(
            f"under a flood of {load.flood_factor} x, the quiet tenant's TTFT p{percent} is"
            f" {ratio:.2f} x what it is alone"
        )
    print(
        "throughput with the fair queue is"
        f" {fair.tokens_per_s / max(arrival.tokens_per_s, 1e-9):.1%} of that in order of arrival"
    )


def print_run(name: str, run: Run) -> None:
    """Print the figures of one run."""
    for tenant, seen in (("quiet", run.quiet), ("flooding", run.flooding)):
        if not seen.ttfts_ms:
            continue
        p50, p99 = percentile(seen.ttfts_ms, 50), percentile(seen.ttfts_ms, 99)
        queue = percentile(seen.queues_ms, 50)
        print(
            f"{name:29} {tenant:9} {len(seen.ttfts_ms):4} requests   TTFT p50 {p50:8.0f} ms   p99"
            f" {p99:8.0f} ms   queue p50 {queue:8.0f} ms   both together {run.tokens_per_s:7.1f}"
            " tokens/s"
        )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, default=4, help="number of the quiet tenant's agents")
    parser.add_argument(
        "--flood", type=int, default=20, help="the other tenant's agents, as a multiple"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of each run")
    parser.add_argument("--output-tokens", type=int, default=50)
    arguments = parser.parse_args()
    asyncio.run(
        measure(Load(arguments.agents, arguments.flood, arguments.seconds, arguments.output_tokens))
    )


if __name__ == "__main__":
    main()
