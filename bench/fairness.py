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
import contextlib
import itertools
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weir_client import AsyncClient

from api.cli.demo import percentile
from api.cli.stack import create_key, ensure_tenant, open_sessions, run_stack
from api.core.settings import DEMO_MODEL_NAME, Settings
from bench.harness import Bench, Case, Cases, Figure, Measure, Values, main
from bench.site import database
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


def values_of(run: Run) -> Values:
    """Compute the figures of one run, of the quiet tenant and of both."""
    return {
        "ttft_p99_ms": percentile(run.quiet.ttfts_ms, 99),
        "ttft_p50_ms": percentile(run.quiet.ttfts_ms, 50),
        "queue_p50_ms": percentile(run.quiet.queues_ms, 50),
        "request_count": len(run.quiet.ttfts_ms),
        "tokens_per_s": run.tokens_per_s,
    }


@contextlib.asynccontextmanager
async def prepare(options: argparse.Namespace) -> AsyncIterator[Cases]:
    """Create both tenants, and yield the runs."""
    load = Load(options.agents, options.flood, options.seconds, options.output_tokens)
    seeds = itertools.count()
    with database(None, options.directory) as url, tempfile.TemporaryDirectory() as home:
        await asyncio.to_thread(migrate, url)
        async with open_sessions(url) as sessions:
            for name in ("quiet", "flooding"):
                await ensure_tenant(sessions, name, "default")
            keys = (
                await create_key(sessions, "quiet", "default", "bench", ("inference",)),
                await create_key(sessions, "flooding", "default", "bench", ("inference",)),
            )
        settings = Settings.from_environment().having(
            home=Path(home), database_url=url, listen="127.0.0.1:0"
        )

        def way(order: Literal["fair", "arrival"], *, flooded: bool) -> Measure:
            async def run() -> Values:
                ordered = settings.having(queue_order=order)
                seed = next(seeds)
                return values_of(await run_tenants(ordered, keys, load, flooded=flooded, seed=seed))

            return run

        ways = {
            "alone": way("fair", flooded=False),
            "flooded, fair": way("fair", flooded=True),
            "by arrival": way("arrival", flooded=True),
        }
        yield [Case(f"quiet tenant beside {load.flood_factor} times its load", ways)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    parser.add_argument("--agents", type=int, default=4, help="number of the quiet tenant's agents")
    parser.add_argument(
        "--flood", type=int, default=20, help="the other tenant's agents, as a multiple"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of each run")
    parser.add_argument("--output-tokens", type=int, default=50)
    parser.add_argument("--directory", help="directory of the temporary database")


FIGURES = {
    "ttft_p99_ms": Figure("TTFT p99, ms"),
    "ttft_p50_ms": Figure("TTFT p50, ms"),
    "queue_p50_ms": Figure("in the queue p50, ms"),
    "request_count": Figure("requests", compared="no"),
    "tokens_per_s": Figure("tokens/s of both", ",.1f"),
}
BENCH = Bench(__doc__, FIGURES, prepare, add_options, rounds=1)

if __name__ == "__main__":
    main(BENCH)
