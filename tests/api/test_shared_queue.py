"""Queues of several processes before the same engine, in virtual time: one order for all."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
from msgspec.structs import replace

from api.core.settings import QueueSettings
from api.queue.exchange import INTERVAL_S, Exchange
from api.queue.fair_queue import QueueEntry, ServiceTier
from api.queue.virtual_tokens import (
    INPUT_TOKEN_COST,
    OUTPUT_TOKEN_COST,
    RUNNING_SHARE,
    Line,
    LineReport,
)
from metering.control.queue_reports import QueueReportRow
from tests.api.queue_world import (
    EXCHANGE_S,
    EngineModel,
    Request,
    World,
    agent,
    percentile,
)

# As on a GPU, a decoding step takes the same time for one sequence as for all.
WIDE = EngineModel(running_max=64, step_tokens_max=2048, step_s=0.02, token_s=0.00001)
# A batch of few places, which a flood takes all at once, and steps of one length.
NARROW = EngineModel(running_max=16, step_tokens_max=2048, step_s=0.1, token_s=0.000001)
BOUNDS = QueueSettings(requests_max=60, requests_per_tenant_max=60)
PROCESSES = 4
CUT_OFF_S = 3.0


def run_agents(
    world: World,
    tenant: str,
    count: int,
    processes: Sequence[int],
    until: float,
    weight: float = 1.0,
) -> None:
    """Run agents of a tenant that send each request to one of some processes."""
    rng = random.Random(tenant)
    make = agent(tenant, rng)

    def request() -> Request:
        made = make()
        made.process, made.weight = rng.choice(processes), weight
        return made

    world.keep_busy(tenant, count, request, until)


def service(world: World, begin: float, end: float) -> dict[str, float]:
    """Run until `end`; return the service of each tenant from `begin` on."""
    world.run(begin)
    before = dict(world.service)
    world.run(end)
    return {name: units - before.get(name, 0.0) for name, units in world.service.items()}


def die(world: World, index: int, rng: random.Random | None = None) -> None:
    """Kill a process. Clients send its requests again: to the new one, or to any of the others."""
    others = [each for each in range(len(world.processes)) if each != index]
    for request in world.kill(index):
        again = Request(
            request.tenant,
            request.input_tokens,
            request.output_tokens,
            world.now,
            weight=request.weight,
            process=index if rng is None else rng.choice(others),
        )
        world.send_stubbornly(again, world.end_of(request))


def cut_off(world: World, index: int, for_s: float = CUT_OFF_S) -> None:
    """Let the exchanges of a process fail for some time."""
    process = world.processes[index]
    process.is_cut_off = True
    world.at(world.now + for_s, lambda: setattr(process, "is_cut_off", False))


def unfairness(seed: int, *, exchanges: bool = True) -> float:
    """Return the greatest difference of weighted service between tenants that always wait, as a
    share of the bound.

    While reports are on their way, the others are wrong about a process by at most what the engine
    serves in two intervals, and once more for each process that ends or is cut off.
    """
    rng = random.Random(seed)
    world = World(None, WIDE, process_count=PROCESSES, exchanges=exchanges)
    weights = {name: rng.choice([0.5, 1.0, 1.0, 2.0, 4.0]) for name in "abc"}
    for name, weight in weights.items():
        used = rng.sample(range(PROCESSES), rng.randint(1, PROCESSES))
        run_agents(world, name, rng.randint(70, 120), used, 30.0, weight)
    faults: list[Callable[[World, int], None]] = [die, cut_off]
    event_count = rng.randint(0, 3)
    for _ in range(event_count):
        act, index = rng.choice(faults), rng.randrange(PROCESSES)
        world.at(rng.uniform(6, 20), partial(act, world, index))

    served = service(world, 5.0, 25.0)

    weighted = [served[name] / weights[name] for name in weights]
    rate = sum(served.values()) / 20
    allowed = 2 * INTERVAL_S * rate / min(weights.values()) * (1 + event_count)
    return (max(weighted) - min(weighted)) / allowed


@pytest.mark.parametrize("seed", range(8))
def test_the_service_of_tenants_that_wait_differs_by_at_most_the_bound(seed: int) -> None:
    """Whatever the weights, the processes they use, and the processes that die or are cut off."""
    assert unfairness(seed) <= 1.0


def spread_per_single(*, exchanges: bool = True) -> float:
    """Return the service of a tenant that uses all processes, per service of one that uses one."""
    world = World(None, WIDE, process_count=PROCESSES, exchanges=exchanges)
    run_agents(world, "spread", 100, range(PROCESSES), 25.0)
    run_agents(world, "single", 100, [0], 25.0)
    served = service(world, 5.0, 25.0)
    return served["spread"] / served["single"]


def test_a_tenant_that_uses_all_processes_gets_one_share() -> None:
    assert spread_per_single() == pytest.approx(1.0, abs=0.05)


def excess_of_a_newcomer(begin: float, end: float) -> float:
    """Return the service of a tenant that begins after 15 s, in another process, less that of the
    old one.
    """
    world = World(None, WIDE, process_count=2)
    run_agents(world, "old", 100, [0], 30.0)
    world.at(15.0, lambda: run_agents(world, "new", 100, [1], 30.0))
    served = service(world, begin, end)
    return served["new"] - served["old"]


def test_a_tenant_that_begins_elsewhere_fills_its_part_of_the_batch_and_then_gets_its_share() -> (
    None
):
    in_engine = WIDE.running_max * (1000 * INPUT_TOKEN_COST + 150 * OUTPUT_TOKEN_COST)
    first_s, rate = 5.0, in_engine / 3

    assert 0 <= excess_of_a_newcomer(15.0, 15.0 + first_s) <= 1.2 * RUNNING_SHARE * in_engine
    assert abs(excess_of_a_newcomer(20.0, 25.0)) <= 0.1 * rate * first_s


def read_own_rows(world: World, patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: processes read their own rows too."""
    honest = Exchange.take

    def take(self: Exchange, rows: Sequence[QueueReportRow]) -> Iterator[None]:
        return honest(self, world.rows(uuid.UUID(int=0)))

    patch.setattr(Exchange, "take", take)


def keep_levels_apart(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: lines that meet keep their own levels and counters."""
    honest = Line.absorb

    def absorb(
        self: Line[QueueEntry], process_id: uuid.UUID, report: LineReport, *, is_new: bool
    ) -> float:
        tenants = tuple(replace(each, counter=0.0) for each in report.tenants)
        apart = replace(report, height=0.0, level=0.0, tenants=tenants)
        return honest(self, process_id, apart, is_new=is_new)

    patch.setattr(Line, "absorb", absorb)


def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spread_per_single(exchanges=False) > 2.0
    assert unfairness(5, exchanges=False) > 1.0
    with monkeypatch.context() as patch:
        keep_levels_apart(patch)
        assert excess_of_a_newcomer(20.0, 25.0) > 50_000
    begun: list[World] = []
    honest = World.__init__

    def begin(self: World, *args: object, **options: object) -> None:
        honest(self, *args, **options)  # type: ignore[arg-type]
        read_own_rows(self, patch)
        begun.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(World, "__init__", begin)
        assert spread_per_single() > 1.2


def quiet_ttfts(
    process_count: int,
    flood: int,
    *,
    kills: bool = False,
    counts_steps: bool = True,
    cut_off_s: float = 0.0,
    seeds: int = 3,
) -> tuple[list[float], int]:
    """Return TTFTs of a tenant with four agents, and all output tokens, in some runs.

    Another tenant floods all processes, with requests of one length, so that many end at once. An
    agent pauses for up to a step. Clients of a killed process go to the others. With `cut_off_s`,
    the exchanges of another process fail for so long every five seconds.
    """
    quiet, token_count = list[float](), 0
    for seed in range(seeds):
        world = World(BOUNDS, NARROW, process_count=process_count, counts_steps=counts_steps)
        rng = random.Random(seed)

        def request(tenant: str, rng: random.Random = rng) -> Request:
            return Request(tenant, 256, 20, 0.0, process=rng.randrange(process_count))

        def pause_s(rng: random.Random = rng) -> float:
            return rng.uniform(0.0, NARROW.step_s)

        for tenant, count in (("flood", flood), ("quiet", 4)):
            world.keep_busy(tenant, count, partial(request, tenant), 50.0, pause_s)
        for index in range(9 if kills else 0):
            world.at(5.0 * (index + 1), partial(die, world, index % process_count, rng))
        for index in range(9 if cut_off_s else 0):
            world.at(5.0 * (index + 1), partial(cut_off, world, index % process_count, cut_off_s))
        world.run(50.0)
        token_count += world.output_tokens
        quiet += [
            each.ttft_s for each in world.ended if each.tenant == "quiet" and each.sent_at > 8
        ]
    return quiet, token_count


@pytest.mark.parametrize("counts_steps", [True, False])
def test_a_flood_through_all_processes_is_hardly_noticed_and_costs_no_throughput(
    counts_steps: bool,
) -> None:
    """Not even while a process is killed every five seconds. Remote servers count no steps."""
    alone, _ = quiet_ttfts(PROCESSES, 0)
    one, one_tokens = quiet_ttfts(1, 80, counts_steps=counts_steps)
    four, four_tokens = quiet_ttfts(PROCESSES, 80, counts_steps=counts_steps)
    killed, _ = quiet_ttfts(PROCESSES, 80, kills=True, counts_steps=counts_steps)

    for flooded in (one, four, killed):
        assert percentile(flooded, 50) <= 1.2 * percentile(alone, 50)
        assert percentile(flooded, 99) <= 1.2 * percentile(alone, 99)
    assert four_tokens >= 0.98 * one_tokens


@pytest.mark.parametrize("cut_off_s", [0.5, 1.2, 1.8])
def test_a_process_whose_exchanges_fail_for_a_moment_does_not_delay_a_quiet_tenant(
    cut_off_s: float,
) -> None:
    """Service meanwhile is charged once: its estimate during the cut, or what reports say later."""
    cut, _ = quiet_ttfts(PROCESSES, 80, cut_off_s=cut_off_s, seeds=1)

    assert percentile(cut, 99) <= 1.2 * 2 * NARROW.step_s


def test_a_request_to_an_idle_process_precedes_nobody() -> None:
    """The process knows the level of long ago, until it has read the reports of the others."""
    world = World(BOUNDS, NARROW, process_count=2)
    run_agents(world, "old", 30, [0], 25.0)
    late = Request("late", 256, 20, 20.0, process=1)
    levels: list[float] = []

    def send() -> None:
        world.send(late)
        levels.append(world.queue.interactive.line.level())

    world.at(20.0, send)
    world.run(25.0)

    assert late.entry is not None
    assert late.dispatched_at == pytest.approx(20.0 + EXCHANGE_S)
    assert late.entry.rank == pytest.approx(levels[0], rel=0.02)


def test_windows_of_several_processes_neither_starve_nor_overfill_the_engine() -> None:
    """Together they keep the batch full, and few requests wait in the engine."""
    world = World(None, WIDE, process_count=PROCESSES)
    run_agents(world, "a", 200, range(PROCESSES), 20.0)
    world.run(15.0)

    pending = sum(each.queue.window.pending_count for each in world.processes)
    running = len(world.with_engine) - pending
    assert running >= 0.95 * WIDE.running_max
    assert pending <= 16


def test_a_paused_process_rejoins_without_a_burst() -> None:
    """After ten seconds, its tenant is neither made up for the pause nor delayed by it."""
    world = World(None, WIDE, process_count=2)
    run_agents(world, "a", 100, [0], 40.0)
    run_agents(world, "b", 100, [1], 40.0)
    world.at(10.0, lambda: cut_off(world, 1))
    served = service(world, 10.0 + CUT_OFF_S + INTERVAL_S, 25.0)

    assert served["b"] / served["a"] == pytest.approx(1.0, abs=0.08)


def test_queue_bounds_and_retry_after_hold_for_all_processes() -> None:
    """200 clients through all processes for 60 places: those that return as told are served."""
    limits = QueueSettings(requests_max=60, requests_per_tenant_max=60)
    world = World(limits, EngineModel(running_max=16), process_count=PROCESSES)
    requests = [
        Request(name, 200, 30, 0.01 * index, timeout_s=30.0, process=index % PROCESSES)
        for index in range(200)
        for name in ("ab"[index % 2],)
    ]
    peaks: list[int] = []
    for request in requests:
        world.at(2.0 + request.sent_at, partial(world.send_stubbornly, request))
    world.on_event = lambda: peaks.append(sum(each.queue.waiting.total for each in world.processes))
    world.run(120.0)

    retried = [each for each in requests if each.refusals]
    again = [each for each in retried if len(each.refusals) > 1]
    assert len(world.ended) == len(requests)
    assert len(retried) > 50, "there was no room for all"
    assert len(again) <= 0.05 * len(retried), "promised waits are kept"
    # Arrivals of an interval: the others have not heard of them.
    assert max(peaks) <= limits.requests_max + 100 * INTERVAL_S


def batch_turns(process_count: int) -> int:
    """Return how many of 80 batch requests get a turn in 30 s beside a flood, one each 3 s."""
    world = World(QueueSettings(batch_wait_max_s=3.0), WIDE, process_count=process_count)
    run_agents(world, "a", 150, range(process_count), 40.0)
    batch = [
        Request("b", 500, 20, 5.0, tier=ServiceTier.BATCH, process=index % process_count)
        for index in range(80)
    ]
    for request in batch:
        world.at(5.0, partial(world.send_stubbornly, request))
    world.run(35.0)
    return sum(each.dispatched_at is not None for each in batch)


def test_the_batch_tier_gets_one_turn_among_all_processes() -> None:
    one, four = batch_turns(1), batch_turns(PROCESSES)

    assert 8 <= one <= 11
    assert one - 2 <= four <= one + 2
