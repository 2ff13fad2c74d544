"""Effect of one tenant's flood on another: a real api process and engine, two organizations.

    python -m bench.fairness [--agents 4] [--flood 20] [--seconds 40] [--output-tokens 50]
        [--gateways 4]

The quiet tenant's agents each send their next request after the end of the previous one; the
flooding tenant has `--flood` times as many. Prompts have the shape of the reference workload: 1,025
random tokens, the first 200 of them shared. Three runs on one database: the quiet tenant alone,
both with the fair queue, and both in order of arrival (WEIR_QUEUE_ORDER), the engine's own order.
Throughput counts the output tokens of both tenants in the same part of each run.

With `--gateways`, that many api processes share one simulated engine on a server (`bench.pool`),
and each request of the flood goes to any of them. Runs: the quiet tenant alone, both through one
gateway, both through all, and the same while a gateway is killed every five seconds. The queue has
fewer entries than the flood has agents, so that some requests are told when to come back. They do,
with their ids, and `kept` is the share of these that find room then. A request that a killed
gateway loses is sent again, and its first token counts from then on. Steps of the engine are so
slow that the cores of a small machine are mostly idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weir_client import AsyncClient, IncompleteGeneration, Internal, Unavailable, WeirError

from api.cli.demo import percentile
from api.cli.stack import create_key, ensure_tenant, open_sessions, run_stack
from api.core.settings import DEMO_MODEL_NAME, Settings, bundled_models
from bench.harness import Bench, Case, Cases, Figure, Measure, Values, main
from bench.site import MODEL, api_process, create_keys, database
from metering.store.migrations_runner import migrate

WARM_UP_SHARE = 0.2  # of a run: until the queue is in a steady state
START_SHARE = 0.1  # of a run: agents start then, since gateways know nothing of the first 200 ms
SHARED_TOKENS, OWN_TOKENS = 200, 825
TOKEN_IDS = range(300, 2000)  # plain tokens of the demo model
SHORT_TOKENS = 20  # for the shared engine: three such prompts fit into a step beside a full batch
KILL_EACH_S = 5.0
LOST_RETRY_S = 0.05  # after a connection to a killed gateway
# In the queue: so few that half of the flood is told to come back, some 70 requests in 24 seconds.
QUEUE_ENTRIES = 30


@dataclass(slots=True)
class Seen:
    """Measurements of one tenant's agents after the warm-up, in ms."""

    ttfts_ms: list[float] = field(default_factory=list)
    queues_ms: list[float] = field(default_factory=list)
    token_count: int = 0
    returned_count: int = 0
    kept_count: int = 0


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


def prompts(seed: int, own_tokens: int = OWN_TOKENS) -> Iterator[list[int]]:
    """Yield prompts of token ids without end. A seed always gives the same prompts."""
    rng = random.Random(seed)
    shared = random.Random(0).choices(TOKEN_IDS, k=SHARED_TOKENS)
    while True:
        yield shared + rng.choices(TOKEN_IDS, k=own_tokens)


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


@dataclass(slots=True, eq=False)
class Gateway:
    """Running api process, and the clients of both tenants."""

    stack: contextlib.AsyncExitStack
    pid: int
    clients: tuple[AsyncClient, AsyncClient]


class Gateways:
    """Api processes before one shared engine."""

    def __init__(self, settings: Settings, keys: tuple[str, str]) -> None:
        self._settings, self._keys = settings, keys
        self._cores = sorted(os.sched_getaffinity(0))
        self._started_count = 0
        self.running: list[Gateway] = []

    async def start(self) -> None:
        """Start another gateway with a home directory of its own."""
        stack = contextlib.AsyncExitStack()
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._started_count += 1
        core = self._cores[self._started_count % len(self._cores)]
        serving = api_process(self._settings.having(home=home), core, core)
        server = await asyncio.to_thread(serving.__enter__)
        stack.push(serving)
        clients = [
            await stack.enter_async_context(AsyncClient(server.address, key)) for key in self._keys
        ]
        # The first request waits until the server of the engine has been examined.
        await clients[0].complete(MODEL, token_ids=[300], max_output_tokens=1, max_retries=100)
        [pid] = server.processes["api"]()
        self.running.append(Gateway(stack, pid, (clients[0], clients[1])))

    async def kill_one(self) -> None:
        """Kill the gateway that has run longest, and start another."""
        gateway = self.running.pop(0)
        os.kill(gateway.pid, signal.SIGKILL)
        await self.start()
        await gateway.stack.aclose()

    async def close(self) -> None:
        for gateway in self.running:
            await gateway.stack.aclose()


async def keep_asking_any(
    gateways: Gateways,
    tenant: int,
    prompts: Iterator[list[int]],
    load: Load,
    began_at: float,
    seen: Seen,
) -> None:
    """Run one agent: send each request to any gateway, and come back as told if it has no room."""
    warm_at, ends_at = began_at + WARM_UP_SHARE * load.seconds, began_at + load.seconds
    prompt, is_retried = next(prompts), False
    request_id = str(uuid.uuid4())  # room is kept for a refused request, which returns as itself
    rng = random.Random(sum(prompt))
    gateway = rng.choice(gateways.running)
    await asyncio.sleep(START_SHARE * load.seconds * rng.random())
    while (sent_at := time.perf_counter()) < ends_at:
        first_at = None
        try:
            async with gateway.clients[tenant].generate(
                MODEL,
                token_ids=prompt,
                max_output_tokens=load.output_tokens,
                ignore_eos=True,
                temperature=0.0,
                max_retries=0,
                request_id=request_id,
            ) as stream:
                async for delta in stream:
                    now = time.perf_counter()
                    first_at = first_at or now
                    if warm_at <= now < ends_at:
                        seen.token_count += len(delta.token_ids)
            seen.returned_count += is_retried
            seen.kept_count += is_retried
            is_retried = False
        except WeirError as error:
            if not isinstance(error, Unavailable | Internal | IncompleteGeneration):
                raise
            is_refused = error.reason == "QUEUE_FULL"
            if is_retried and (is_refused or first_at is not None):
                seen.returned_count += 1
                seen.kept_count += not is_refused
            is_retried = is_refused and warm_at <= sent_at
            if not is_refused:
                request_id = str(uuid.uuid4())
            await asyncio.sleep(error.retry_after_s or LOST_RETRY_S)
            if gateway not in gateways.running:
                is_retried, gateway = False, rng.choice(gateways.running)
            continue
        if warm_at <= sent_at and first_at is not None:
            seen.ttfts_ms.append((first_at - sent_at) * 1000)
            seen.queues_ms.append(stream.result.timings.queue_ms)
        prompt, gateway = next(prompts), rng.choice(gateways.running)
        request_id = str(uuid.uuid4())


async def run_gateways(
    settings: Settings,
    keys: tuple[str, str],
    load: Load,
    count: int,
    *,
    flooded: bool,
    kills: bool = False,
    seed: int,
) -> Run:
    """Start gateways, and run the agents of both tenants, or of the quiet one alone."""
    gateways, quiet, flooding = Gateways(settings, keys), Seen(), Seen()
    drawn = prompts(seed, SHORT_TOKENS)
    await asyncio.gather(*(gateways.start() for _ in range(count)))
    try:
        began_at = time.perf_counter()

        async def kill_regularly() -> None:
            while time.perf_counter() < began_at + load.seconds - KILL_EACH_S:
                await asyncio.sleep(KILL_EACH_S)
                await gateways.kill_one()

        async with asyncio.TaskGroup() as tasks:
            if kills:
                tasks.create_task(kill_regularly())
            for _ in range(load.agent_count * load.flood_factor if flooded else 0):
                tasks.create_task(keep_asking_any(gateways, 1, drawn, load, began_at, flooding))
            for _ in range(load.agent_count):
                tasks.create_task(keep_asking_any(gateways, 0, drawn, load, began_at, quiet))
    finally:
        await gateways.close()
    counted_s = load.seconds * (1 - WARM_UP_SHARE)
    return Run(quiet, flooding, (quiet.token_count + flooding.token_count) / counted_s)


@contextlib.asynccontextmanager
async def shared_engine(options: argparse.Namespace) -> AsyncIterator[str]:
    """Run the server of the shared engine; yield its target."""
    command = [sys.executable, "-m", "bench.pool", "--step-ms", str(options.step_ms)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        _, port = (await process.stdout.readline()).split()
        yield f"openai+http://127.0.0.1:{int(port)}/tiny"
    finally:
        process.terminate()
        await process.wait()


def gateway_case(
    options: argparse.Namespace, settings: Settings, keys: tuple[str, str], load: Load
) -> Case:
    """Build the case of several gateways before one engine."""
    seeds = itertools.count()

    def way(count: int, *, flooded: bool, kills: bool = False) -> Measure:
        async def run() -> Values:
            done = await run_gateways(
                settings, keys, load, count, flooded=flooded, kills=kills, seed=next(seeds)
            )
            found, returned = values_of(done), done.flooding.returned_count
            if not returned:
                return found
            return {
                **found,
                "returned_count": returned,
                "kept": done.flooding.kept_count / returned,
            }

        return run

    ways = {
        "alone": way(options.gateways, flooded=False),
        "one gateway": way(1, flooded=True),
        "all": way(options.gateways, flooded=True),
        "all, kills": way(options.gateways, flooded=True, kills=True),
    }
    return Case(f"{options.gateways} gateways before one engine", ways)


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
        if options.gateways:
            quiet_key, flooding_key = await asyncio.to_thread(create_keys, url, 2)
            async with shared_engine(options) as target:
                shared = settings.having(
                    engine="remote",
                    models={MODEL: next(iter(bundled_models().values()))},
                    remote_targets={MODEL: target},
                    queue_requests_max=QUEUE_ENTRIES,
                    queue_requests_per_tenant_max=QUEUE_ENTRIES,
                    requests_per_process_max=10_000,
                )
                yield [gateway_case(options, shared, (quiet_key, flooding_key), load)]
            return

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
    parser.add_argument(
        "--gateways", type=int, default=0, help="measure api processes before one engine instead"
    )
    parser.add_argument(
        "--step-ms", type=float, default=100.0, help="a step of the shared engine (default: 100)"
    )
    parser.add_argument("--directory", help="directory of the temporary database")


FIGURES = {
    "ttft_p99_ms": Figure("TTFT p99, ms"),
    "ttft_p50_ms": Figure("TTFT p50, ms"),
    "queue_p50_ms": Figure("in the queue p50, ms"),
    "request_count": Figure("requests", compared="no"),
    "tokens_per_s": Figure("tokens/s of both", ",.1f"),
    "returned_count": Figure("returned as told", compared="no"),
    "kept": Figure("of these found room", ".3f", "no"),
}
BENCH = Bench(__doc__, FIGURES, prepare, add_options, rounds=1)

if __name__ == "__main__":
    main(BENCH)
