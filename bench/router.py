"""Effect of replica placement: the three policies on one trace, in one run.

    python -m bench.router [--replicas 8] [--conversations 400] [--rate 10] [--turns 3 6] [--seed 1]

Conversations arrive at random times. Each belongs to one of twenty applications, whose system
prompt it begins with; its first turn adds text (500 to 3,000 tokens: a document, a file, search
results), the later ones a question each. Every turn is answered, and the next one follows after a
pause; its prompt is the whole conversation. Engines are simulated, with the costs of Llama 3.3 70B
in FP8 on two H200 (`inference/core/options.py`) and their real schedulers and prefix caches, in
virtual time: figures do not depend on this machine's load, and are reproducible by seed. TTFT is
from the request to its first token, including queueing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from api.cli.demo import percentile
from api.core.settings import DEMO_MODEL_NAME, bundled_models
from bench import engine_streams as streams
from bench.harness import Bench, Case, Cases, Figure, Values, main
from bench.virtual_time import VirtualEngine, VirtualTimeLoop
from inference.core.options import CostModel
from inference.engine import GenerationRequest, SamplingParams, StopCriteria, TokensGenerated
from inference.limits import EngineLimits
from inference.routing.placement import POLICIES
from inference.routing.replica import Replica
from inference.routing.replica_set import ReplicaSet

APPLICATION_COUNT = 20
SYSTEM_TOKENS = (500, 2000)
OWN_TOKENS = (500, 3000)
QUESTION_TOKENS = (20, 150)
ANSWER_TOKENS = (30, 120)
TURNS = (3, 6)
PAUSE_S = (2.0, 8.0)  # a user's reading time
TOKEN_IDS = range(300, 2000)  # plain tokens of the demo model
POLICY_ORDER = ("round_robin", "least_loaded", "prefix_aware")


@dataclass(frozen=True, slots=True)
class Turn:
    """Next input of a conversation, and the length of its answer. It follows after `pause_s`."""

    token_ids: tuple[int, ...]
    answer_token_count: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Conversation whose first turn begins with the system prompt of its application."""

    arrives_at_s: float
    turns: tuple[Turn, ...]


@dataclass(slots=True)
class Seen:
    """Results of one policy on the trace. `loads` has the seconds of computing by replica."""

    ttfts_ms: list[float] = field(default_factory=list)
    prompt_token_count: int = 0
    cached_token_count: int = 0
    loads_s: list[float] = field(default_factory=list)


def make_trace(
    conversation_count: int, per_second: float, seed: int, turns: tuple[int, int] = TURNS
) -> list[Dialogue]:
    """Draw a trace, the same for every policy. `turns` are a conversation's minimum and maximum."""
    rng = random.Random(seed)

    def tokens(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(rng.choices(TOKEN_IDS, k=rng.randint(*bounds)))

    systems = [tokens(SYSTEM_TOKENS) for _ in range(APPLICATION_COUNT)]
    found, now_s = [], 0.0
    for _ in range(conversation_count):
        now_s += rng.expovariate(per_second)
        questions = [
            rng.choice(systems) + tokens(OWN_TOKENS),
            *(tokens(QUESTION_TOKENS) for _ in range(rng.randint(*turns) - 1)),
        ]
        spoken = [
            Turn(each, rng.randint(*ANSWER_TOKENS), rng.uniform(*PAUSE_S)) for each in questions
        ]
        found.append(Dialogue(now_s, tuple(spoken)))
    return found


async def converse(replicas: ReplicaSet, dialogue: Dialogue, number: int, seen: Seen) -> None:
    """Run one conversation from its arrival to its last answer."""
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(dialogue.arrives_at_s)
    so_far: tuple[int, ...] = ()
    for index, turn in enumerate(dialogue.turns):
        if index:
            await asyncio.sleep(turn.pause_s)
        so_far += turn.token_ids
        request = GenerationRequest(
            so_far, SamplingParams(), StopCriteria(turn.answer_token_count, ignore_eos=True)
        )
        requested_at_s, answer = clock(), list[int]()
        async with streams.stream(replicas, request) as stream:
            async for event in stream:
                if isinstance(event, TokensGenerated):
                    if not answer:
                        seen.ttfts_ms.append((clock() - requested_at_s) * 1e3)
                    answer += event.token_ids
        so_far += tuple(answer)


async def run_policy(policy: str, trace: Iterable[Dialogue], replica_count: int) -> Seen:
    """Run the trace on new replicas with this placement policy."""
    directory: Path = bundled_models()[DEMO_MODEL_NAME]
    limits = EngineLimits(
        context_window_tokens=131_072,
        step_token_count_max=8192,
        running_sequence_count_max=512,
        waiting_sequence_count_max=100_000,
    )
    engines = [
        VirtualEngine(directory, f"replica {index}", CostModel(), limits)
        for index in range(replica_count)
    ]
    replicas = [Replica(engine.model.name, engine) for engine in engines]
    loop, seen = asyncio.get_running_loop(), Seen()
    replica_set = ReplicaSet(engines[0].model, replicas, POLICIES[policy](), clock=loop.time)
    async with asyncio.TaskGroup() as background:
        background.create_task(replica_set.serve())
        await replica_set.start()
        async with asyncio.TaskGroup() as conversations:
            for number, dialogue in enumerate(trace):
                conversations.create_task(converse(replica_set, dialogue, number, seen))
        statistics = replica_set.statistics()
        seen.prompt_token_count, seen.cached_token_count = (
            statistics.prompt_token_count,
            statistics.cached_token_count,
        )
        seen.loads_s = [engine.busy_s for engine in engines]
        await replica_set.close()
    return seen


def measure(trace: list[Dialogue], replica_count: int) -> dict[str, Seen]:
    """Run all policies one after the other, each in its own event loop."""
    return {policy: measure_one(policy, trace, replica_count) for policy in POLICY_ORDER}


def measure_one(policy: str, trace: list[Dialogue], replica_count: int) -> Seen:
    """Run one policy in a new event loop."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(run_policy(policy, trace, replica_count))


def measure_side_by_side(trace: list[Dialogue], replica_count: int) -> dict[str, Seen]:
    """Run all policies in parallel processes; with simulated time they do not affect each other."""
    with ProcessPoolExecutor(
        min(len(POLICY_ORDER), os.cpu_count() or 1), mp_context=get_context("spawn")
    ) as processes:
        found = [
            processes.submit(measure_one, policy, trace, replica_count) for policy in POLICY_ORDER
        ]
        return {policy: each.result() for policy, each in zip(POLICY_ORDER, found, strict=True)}


def mean(values: list[float]) -> float:
    """Compute the mean; 0 if there are no values."""
    return sum(values) / max(len(values), 1)


def values_of(seen: Seen) -> Values:
    """Compute the figures of one policy."""
    return {
        "mean_ms": mean(seen.ttfts_ms),
        "p50_ms": percentile(seen.ttfts_ms, 50),
        "p99_ms": percentile(seen.ttfts_ms, 99),
        "hits": seen.cached_token_count / max(seen.prompt_token_count, 1),
        "busiest": max(seen.loads_s) / max(mean(seen.loads_s), 1e-9),
    }


@contextlib.contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Cases]:
    """Draw the trace, and yield it with the policies as its ways. All run side by side at first."""
    turns = tuple(options.turns)
    trace = make_trace(options.conversations, options.rate, options.seed, turns)
    request_count = sum(len(dialogue.turns) for dialogue in trace)
    found = functools.cache(lambda: measure_side_by_side(trace, options.replicas))

    def of(policy: str) -> Values:
        return values_of(found()[policy])

    name = (
        f"{options.replicas} replicas, {len(trace):,} conversations at {options.rate:g}/s,"
        f" {request_count:,} requests"
    )
    ways = {policy: functools.partial(of, policy) for policy in POLICY_ORDER}
    yield [Case(name, ways)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    parser.add_argument("--replicas", type=int, default=8, help="simulated engines")
    parser.add_argument("--conversations", type=int, default=400, help="number of conversations")
    parser.add_argument("--rate", type=float, default=10.0, help="new conversations per second")
    parser.add_argument(
        "--turns",
        type=int,
        nargs=2,
        default=TURNS,
        metavar=("LEAST", "MOST"),
        help="of a conversation",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the trace")


FIGURES = {
    "mean_ms": Figure("TTFT mean, ms"),
    "p50_ms": Figure("TTFT p50, ms"),
    "p99_ms": Figure("TTFT p99, ms"),
    "hits": Figure("prefix hits", ".1%"),
    "busiest": Figure("busiest / mean", ".2f", "no"),
}
BENCH = Bench(__doc__, FIGURES, prepare, add_options, rounds=1, is_timed=False)

if __name__ == "__main__":
    main(BENCH)
