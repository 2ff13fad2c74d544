"""Queue before an engine, in virtual time: order of service, refusals, announced times."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import itertools
import random
import uuid
from collections.abc import Callable

import pytest

from api.core.errors import QueueFull, StartsTooLate
from api.core.settings import QueueSettings
from api.queue.fair_queue import (
    COMPILING_MAX,
    PENDING_MAX,
    WINDOW_FIRST,
    WINDOW_MAX,
    WINDOW_MIN,
    DispatchWindow,
    FairQueue,
    QueueEntry,
    ServiceTier,
    State,
)
from api.queue.queue_admission import Arrival
from inference.engine import EngineStatistics
from tests.api.queue_world import EngineModel, Request, World, agent, percentile, tenant_id

# As on a GPU, a decoding step takes the same time for one sequence as for all, and a prompt is one
# piece.
WIDE = EngineModel(running_max=64, step_tokens_max=2048, step_s=0.02, token_s=0.00001)
SMALL = EngineModel(running_max=16)


class Clock:
    """Clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def arrival(name: str = "a", **changes: object) -> Arrival:
    values: dict[str, object] = {
        "request_id": uuid.uuid4(),
        "tenant_id": tenant_id(name),
        "input_token_count": 10,
        "output_token_count_max": 10,
    }
    return Arrival(**(values | changes))  # type: ignore[arg-type]


def new_queue(
    limits: QueueSettings | None = None, clock: Callable[[], float] | None = None
) -> FairQueue:
    return FairQueue(limits or QueueSettings(), EngineStatistics, clock or Clock())


def ranked(rank: float, **changes: object) -> QueueEntry:
    """Return a entry of this rank."""
    entry = new_queue().enter(arrival("a", **changes))
    entry.rank = rank
    return entry


def do_nothing() -> None:
    """Serve as the callback of requests whose turn is irrelevant."""


def ttfts(
    agents: dict[str, int], *, fair: bool = True, engine: EngineModel = WIDE, until: float = 40.0
) -> tuple[list[float], float]:
    """Return TTFTs of the tenant "quiet" after a warm-up, and all output tokens per second."""
    world = World(QueueSettings(order="fair" if fair else "arrival"), engine, has_window=fair)
    for seed, (name, count) in enumerate(sorted(agents.items())):
        world.keep_busy(name, count, agent(name, random.Random(seed)), until)
    world.run(until)
    return [
        each.ttft_s for each in world.ended if each.tenant == "quiet" and each.sent_at > 10
    ], world.output_tokens / until


def test_a_flood_of_one_tenant_is_hardly_noticed_by_another_and_costs_no_throughput() -> None:
    """With 20 times the load: TTFT at most doubles in fair order, and throughput stays."""
    alone, _ = ttfts({"quiet": 4})
    fair, fair_rate = ttfts({"quiet": 4, "flood": 80})
    arrival_order, arrival_rate = ttfts({"quiet": 4, "flood": 80}, fair=False)

    step_s = WIDE.step_s + WIDE.token_s * WIDE.step_tokens_max
    assert percentile(fair, 50) <= 2 * percentile(alone, 50)
    assert percentile(fair, 99) <= 2 * percentile(alone, 99) + step_s / 2, (
        "half a step is what the model's time is exact to"
    )
    assert percentile(arrival_order, 50) > 20 * percentile(alone, 50)
    assert fair_rate >= 0.99 * arrival_rate


@pytest.mark.parametrize(("input_tokens", "output_tokens"), [(20, 5), (300, 30), (1000, 150)])
def test_the_queue_keeps_the_engine_busy(input_tokens: int, output_tokens: int) -> None:
    """Many requests enter at one step, or one in several steps: the window adapts."""
    rates = []
    for has_window in (True, False):
        world = World(QueueSettings(), EngineModel(running_max=64), has_window=has_window)
        make = agent("a", random.Random(0), input_tokens=input_tokens, output_tokens=output_tokens)
        world.keep_busy("a", 200, make, 15.0)
        world.run(15.0)
        rates.append(world.output_tokens)

    assert rates[0] >= 0.98 * rates[1]


def test_a_tenant_that_is_alone_loses_nothing() -> None:
    _, fair = ttfts({"flood": 100}, until=30.0)
    _, given_all = ttfts({"flood": 100}, fair=False, until=30.0)

    assert fair >= 0.99 * given_all


@pytest.mark.parametrize("tenant_count", [1, 5])
@pytest.mark.parametrize("cause", ["bounds", "deadlines"])
def test_clients_that_wait_for_retry_after_are_admitted(tenant_count: int, cause: str) -> None:
    """300 clients for 60 entries, or with 3 s, too short for most; admitted ones start in time.

    Holds after some seconds of observing the rate of service; before, it is unknown.
    """
    limits = (
        QueueSettings(requests_max=60, requests_per_tenant_max=40)
        if cause == "bounds"
        else QueueSettings()
    )
    timeout_s = 3.0 if cause == "deadlines" else None
    world, rng = World(limits, SMALL), random.Random(0)
    returns: list[bool] = []
    requests: list[Request] = []

    def ask(name: str) -> None:
        request = Request(
            name, rng.randint(50, 400), rng.randint(10, 100), world.now, timeout_s=timeout_s
        )
        requests.append(request)
        attempt(request, came_back=False)

    def attempt(request: Request, *, came_back: bool) -> None:
        let_in = world.send(
            request,
            lambda _: world.at(world.now + rng.expovariate(1.0), lambda: ask(request.tenant)),
        )
        if came_back and world.now > 15.0:
            returns.append(let_in)
        if not let_in:
            world.at(
                world.now + request.refusals[-1].retry_after_s,
                lambda: attempt(request, came_back=True),
            )

    for index in range(300):
        world.at(rng.uniform(0, 2), lambda name=f"t{index % tenant_count}": ask(name))  # type: ignore[misc]
    world.run(45.0)

    assert len(returns) > 300
    assert sum(returns) >= 0.95 * len(returns)
    if timeout_s is not None:
        observed = [each for each in requests if each.joined_at is not None and each.joined_at > 5]
        waits = [
            each.begun_at - each.joined_at
            for each in observed
            if each.begun_at is not None and each.joined_at is not None
        ]
        assert sum(wait_s > timeout_s for wait_s in waits) <= 0.01 * len(waits)


def test_a_thousand_clients_refused_at_once_return_one_after_the_other() -> None:
    """They arrive before a rate is known, so that the first returns are refused as well."""
    rng, limits = random.Random(0), QueueSettings(requests_max=60, requests_per_tenant_max=40)
    world = World(limits, SMALL)
    requests = [Request("a", rng.randint(50, 400), rng.randint(10, 100), 0.0) for _ in range(1000)]
    for request in requests:
        world.at(rng.uniform(0, 0.2), functools.partial(world.send_stubbornly, request))
    world.run(65.0)

    assert len(world.ended) == 1000, "the queue was never empty for long"
    assert sum(len(request.refusals) for request in requests) < 3200
    firsts = sorted(request.refusals[0].retry_after_s for request in requests if request.refusals)
    assert max(bisect.bisect(firsts, at + 0.1) - index for index, at in enumerate(firsts)) < 150


def test_a_wait_is_reported_as_it_ends() -> None:
    world, rng = World(engine=SMALL), random.Random(0)
    reported: list[tuple[float, Request]] = []

    def ask(name: str) -> None:
        request = Request(
            name, rng.randint(50, 400), rng.randint(10, 100), world.now, output_tokens_max=1000
        )
        wait_s = world.queue.wait_s(
            arrival(name, input_token_count=request.input_tokens, output_token_count_max=1000)
        )
        world.send(request, lambda _: ask(name))
        if wait_s and world.now > 10:
            reported.append((wait_s, request))

    for index in range(120):
        world.at(0.0, lambda name=f"t{index % 5}": ask(name))  # type: ignore[misc]
    world.run(40.0)

    ratios = [
        request.wait_s / wait_s for wait_s, request in reported if request.begun_at is not None
    ]
    assert len(ratios) > 300
    assert 0.9 <= percentile(ratios, 50) <= 1.2
    assert percentile(ratios, 95) <= 1.5


def test_before_any_service_no_request_is_refused_for_its_deadline() -> None:
    queue = new_queue(QueueSettings(requests_max=100, requests_per_tenant_max=50))
    for _ in range(20):
        queue.enter(arrival()).join(do_nothing)

    assert queue.wait_s(arrival()) is None
    queue.enter(arrival(deadline=100.001))


def test_a_request_that_would_start_too_late_is_refused_at_once_with_the_wait() -> None:
    world = World(engine=SMALL)
    world.keep_busy("a", 100, agent("a", random.Random(0)), until=30.0)
    world.run(20.0)
    expected = world.queue.wait_s(arrival("a"))
    assert expected is not None

    with pytest.raises(StartsTooLate) as refusal:
        world.queue.enter(arrival("a", deadline=world.now + 1.0))

    assert refusal.value.wait_s == pytest.approx(expected)
    assert expected - 1.0 < refusal.value.retry_after_s < 2 * expected
    # Another tenant does not wait for the first one's queue.
    world.queue.enter(arrival("b", deadline=world.now + 1.0))


def test_an_engine_that_is_still_loading_counts_against_the_deadline() -> None:
    queue = new_queue()
    with pytest.raises(StartsTooLate):
        queue.enter(arrival(deadline=105.0), engine_wait_s=30.0)


def test_no_tenant_takes_more_entries_than_it_leaves_free_and_newcomers_find_one() -> None:
    queue = new_queue(QueueSettings(requests_max=100, requests_per_tenant_max=90))
    counts = {}
    for name in ("a", "b", "c"):
        counts[name] = 0
        with contextlib.suppress(QueueFull):
            while True:
                queue.enter(arrival(name))
                counts[name] += 1

    assert counts["a"] == 40, "half of what newcomers may have, which is four fifths"
    assert counts["a"] > counts["b"] > counts["c"] > 0
    queue.enter(arrival("d"))


def test_a_tenant_has_at_most_as_many_entries_as_the_setting_says() -> None:
    queue = new_queue(QueueSettings(requests_max=1000, requests_per_tenant_max=10))
    entries = [queue.enter(arrival()) for _ in range(8)]
    with pytest.raises(QueueFull):
        queue.enter(arrival())
    entries[0].leave()
    entries[1].leave()

    queue.enter(arrival())


def test_an_entry_is_reserved_for_the_refused_client_for_a_limited_time() -> None:
    clock = Clock()
    queue = new_queue(QueueSettings(requests_max=10, requests_per_tenant_max=10), clock)
    waiting = [queue.enter(arrival("a")) for _ in range(4)]
    refused = arrival("a")
    with pytest.raises(QueueFull) as refusal:
        queue.enter(refused)
    waiting.pop().leave()

    with pytest.raises(QueueFull):
        queue.enter(arrival("a"))  # a new request queues behind the one that was told to retry
    clock.now += refusal.value.retry_after_s
    queue.enter(refused)


def test_a_client_that_does_not_return_delays_others_only_briefly() -> None:
    clock = Clock()
    queue = new_queue(QueueSettings(requests_max=10, requests_per_tenant_max=10), clock)
    waiting = [queue.enter(arrival("a")) for _ in range(4)]
    with pytest.raises(QueueFull):
        queue.enter(arrival("a"))
    waiting.pop().leave()
    clock.now += 60.0

    queue.enter(arrival("a"))


def test_batch_runs_only_where_nothing_interactive_waits() -> None:
    world = World(QueueSettings(batch_wait_max_s=1e9), SMALL)
    batch = [Request("b", 100, 20, 0.0, tier=ServiceTier.BATCH) for _ in range(20)]
    interactive = [Request("a", 100, 20, 0.0) for _ in range(60)]
    for each in (*batch, *interactive):
        world.at(0.0, functools.partial(world.send_stubbornly, each))
    world.run(60.0)

    last_interactive = max(each.dispatched_at or 0.0 for each in interactive)
    later = [
        each
        for each in batch
        if each.dispatched_at is not None and each.dispatched_at >= last_interactive
    ]
    assert len(later) >= 12, "all but those that the engine had taken before the others came"
    assert len(world.ended) == 80


def test_batch_is_served_within_its_bound_however_much_interactive_work_comes() -> None:
    """A batch request starts every `batch_wait_s_max`, plus the time until there is room."""
    world = World(QueueSettings(batch_wait_max_s=2.0), SMALL)
    busy = agent("a", random.Random(0), input_tokens=100, output_tokens=20)
    world.keep_busy("a", 200, busy, until=40.0)
    world.run(1.0)
    batch = [Request("b", 100, 20, 1.0, tier=ServiceTier.BATCH) for _ in range(10)]
    for each in batch:
        world.send(each)
    world.run(40.0)

    starts = [1.0, *(each.dispatched_at for each in batch if each.dispatched_at is not None)]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert len(gaps) == 10
    assert min(gaps) >= 2.0 - 1e-9
    assert max(gaps) <= 2.0 + 0.5


def test_positions_and_waits_follow_the_order_of_the_turns() -> None:
    world = World(engine=SMALL)
    for name, count in (("a", 40), ("b", 20)):
        world.keep_busy(
            name,
            count,
            agent(name, random.Random(1), input_tokens=100, output_tokens=20),
            until=5.0,
        )
    world.run(5.0)
    expected = world.queue.expected_waits()

    positions = [each.position for each in expected]
    waits = [each.wait_s for each in expected if each.wait_s is not None]
    assert positions == list(range(positions[0], positions[0] + len(positions)))
    assert len(waits) == len(expected) > 20
    assert waits == sorted(waits)
    reported = [each.entry for each in expected]
    world.run(8.0)
    dispatches = [
        each.entry
        for each in sorted(world.ended, key=lambda each: each.dispatched_at or 0.0)
        if each.entry in reported
    ]
    assert len(dispatches) > 20
    assert sum(
        abs(dispatches.index(entry) - reported.index(entry)) for entry in dispatches
    ) <= 2 * len(dispatches), "about that order, that is"


@pytest.mark.parametrize("seed", range(3))
def test_after_any_operations_on_entries_the_counts_agree(seed: int) -> None:
    """Random operations against plain counting: bounds, queued and running requests, leaks."""
    rng, clock = random.Random(seed), Clock()
    limits = QueueSettings(requests_max=40, requests_per_tenant_max=15)
    queue = FairQueue(
        limits,
        lambda: EngineStatistics(step_count=rng.randint(0, 9), running_sequence_count_max=8),
        clock,
    )
    alive: list[QueueEntry] = []
    refused: list[float] = []
    for _ in range(3000):
        clock.now += rng.expovariate(10)
        by_state = {state: [entry for entry in alive if entry.state is state] for state in State}
        match rng.choice(("enter", "enter", "join", "join", "begun", "generated", "leave")):
            case "enter":
                try:
                    tier = rng.choice(list(ServiceTier))
                    sequences = rng.choice((1, 1, 4))
                    alive.append(
                        queue.enter(
                            arrival(
                                rng.choice("abcd"),
                                tier=tier,
                                sequence_count=sequences,
                                compiles=rng.random() < 0.2,
                            )
                        )
                    )
                except QueueFull as refusal:
                    refused.append(refusal.retry_after_s)
            case "join" if by_state[State.ENTERED]:
                rng.choice(by_state[State.ENTERED]).join(do_nothing)
            case "begun" if by_state[State.DISPATCHED]:
                rng.choice(by_state[State.DISPATCHED]).begun()
            case "generated" if by_state[State.RUNNING]:
                rng.choice(by_state[State.RUNNING]).generated(rng.randint(1, 3))
            case "leave" if alive:
                leaving = alive.pop(rng.randrange(len(alive)))
                leaving.leave()
                leaving.leave()
        waiting = [entry for entry in alive if entry.state in (State.ENTERED, State.WAITING)]
        dispatched = [entry for entry in alive if entry.state is State.DISPATCHED]
        statistics = queue.statistics()
        assert statistics.waiting_count == len(waiting) <= 40
        sequence_count = sum(entry.arrival.sequence_count for entry in dispatched)
        assert statistics.engine_pending_count == sequence_count
        if [entry for entry in alive if entry.state is State.WAITING]:
            assert any(entry.state in (State.DISPATCHED, State.RUNNING) for entry in alive), (
                "the engine idles while something waits"
            )
    for entry in alive:
        entry.leave()
    statistics = queue.statistics()
    assert (statistics.waiting_count, statistics.engine_pending_count) == (0, 0)
    assert not queue.window.dispatched
    assert all(not tier.line.waiting_count for tier in queue.tiers.values())
    assert not queue.waiting.by_tenant
    assert len(refused) > 10
    assert min(refused) > 0


async def test_a_request_cancelled_while_it_waits_lets_the_next_enter() -> None:
    queue = new_queue()
    dispatches: list[str] = []

    async def wait(name: str, entry: QueueEntry) -> None:
        with entry:
            await entry.wait_for_dispatch()
            dispatches.append(name)
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(wait(str(index), queue.enter(arrival()))) for index in range(12)
        ]
        while len(dispatches) < 8:  # noqa: ASYNC110 the first window
            await asyncio.sleep(0)
        running[9].cancel()
        running[0].cancel()
        while len(dispatches) < 9:  # noqa: ASYNC110 the one after it
            await asyncio.sleep(0)
        assert dispatches[8] == "8"
        running[8].cancel()
        while len(dispatches) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert dispatches[9] == "10", "the cancelled one was passed over"
        for task in running:
            task.cancel()
    assert queue.statistics().waiting_count == queue.statistics().engine_pending_count == 0


def test_requests_that_wait_for_their_grammar_do_not_hold_up_the_others() -> None:
    window = DispatchWindow()
    for _ in range(COMPILING_MAX):
        window.add(ranked(1.0, compiles=True))
    assert window.has_room(1.0)
    for _ in range(int(window.size)):
        assert window.has_room(1.0)
        window.add(ranked(1.0))
    assert not window.has_room(1.0)


def test_a_request_ranked_before_the_engines_ones_is_dispatched_at_once() -> None:
    window = DispatchWindow()
    while window.has_room(5.0):
        window.add(ranked(5.0))
    assert window.has_room(4.0)
    window.size = 1e9
    while window.has_room(4.0):
        window.add(ranked(4.0))

    assert window.pending_count == PENDING_MAX, "as many as the engine takes, and no more"


def test_the_window_follows_what_the_engine_takes() -> None:
    window = DispatchWindow()
    for _ in range(1000):  # enters at once, with others behind
        while window.has_room(1.0):
            window.add(ranked(1.0))
        window.adapt(1, behind=True)
        window.remove(next(iter(window.dispatched)))
    assert window.size == WINDOW_MAX
    for _ in range(1000):
        window.adapt(50, behind=True)
    assert window.size == WINDOW_MIN
    window.adapt(-7, behind=True)  # the engine was restarted
    assert window.size == WINDOW_MIN


def test_several_engines_have_as_many_times_the_room() -> None:
    """The window and its bounds grow with each new engine and shrink with each lost one."""
    window = DispatchWindow()
    window.spread(3, 1)
    assert window.size == 3 * WINDOW_FIRST
    window.size = 3 * WINDOW_MAX - 1
    while window.has_room(1.0):
        window.add(ranked(1.0))
    assert window.pending_count == 3 * WINDOW_MAX - 1
    window.adapt(1, behind=True)
    window.adapt(1, behind=True)
    assert window.size == 3 * WINDOW_MAX
    window.spread(1, 1)
    assert window.size == WINDOW_MAX
    assert not window.has_room(1.0), "what the others had is still pending"
    window.spread(2, 1)
    for _ in range(1000):
        window.adapt(9, behind=True)
    assert window.size == 2 * WINDOW_MIN
