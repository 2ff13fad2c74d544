"""Placement of sequences: never in an unusable replica, and exact accounts of every replica."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bench import engine_streams as streams
from inference import engine
from inference.errors import (
    EngineError,
    EngineFailed,
    EngineOverloaded,
    EngineUnavailable,
    RequestImpossible,
)
from inference.routing.placement import POLICIES, LeastLoaded, PrefixAware, RoundRobin
from inference.routing.replica import (
    RECALLED_MAX,
    UNSHARED_MAX,
    BreakerLimits,
    BreakerState,
    CircuitBreaker,
    Replica,
    ReplicaState,
    SentPrefixes,
    SetStatistics,
    prefix_keys,
)
from inference.routing.replica_set import ReplicaSet
from inference.routing.router import Router
from inference.routing.shared_prefixes import SharedPrefixes
from inference.workers.engine import EngineSequence
from metering.control.control_channel import BYTES_MAX
from tests.inference.running import make_request

MODEL = engine.ModelInfo("m", "", "", 4096, 1000, "", continues_output=True)
LIMITS = BreakerLimits(failure_count_max=2, pause_s_min=5.0, pause_s_max=20.0)
SYSTEM = tuple(range(100, 164))  # four blocks that prompts share


class Puppet:
    """Engine controlled by a test. cached_token_count: its prediction for every prompt."""

    def __init__(self) -> None:
        self.model = MODEL
        self.state = engine.EngineState.READY
        self.is_full = False
        self.is_unable = False
        self.cached_token_count: int | None = None
        self.kv_block_count = 0
        self.sequences: dict[int, EngineSequence] = {}
        self.requests: list[engine.GenerationRequest] = []
        self.started = asyncio.Event()

    async def serve(self) -> None:
        """Do nothing: it has no background work."""

    async def start(self) -> None:
        """Start when the test allows it."""
        await self.started.wait()
        self.state = engine.EngineState.READY

    def submit(self, request: engine.GenerationRequest, sink: engine.EventSink) -> EngineSequence:
        """Implement `Engine.submit`."""
        if self.state is not engine.EngineState.READY:
            raise EngineUnavailable("away", 1.0)
        if self.is_full:
            raise EngineOverloaded("full", 2.0)
        if self.is_unable:
            raise RequestImpossible("not here", "sampling")
        number = len(self.requests)
        self.requests.append(request)
        sequence = self.sequences[number] = EngineSequence(self, number, request, sink)
        return sequence

    def cancel(self, sequence: EngineSequence) -> None:
        """Do nothing: no test waits for it."""

    def forget(self, sequence: EngineSequence) -> None:
        """Implement `SequenceHandle.close`."""
        self.sequences.pop(sequence.number, None)

    def emit(self, sequence: EngineSequence, event: engine.SequenceEvent | EngineError) -> None:
        """Report an event."""
        if isinstance(event, engine.TokensGenerated):
            sequence.outputs[0] += event.token_ids
        if isinstance(event, engine.Scheduled):
            sequence.is_scheduled = True
        if isinstance(event, engine.SequenceFinished | EngineError):
            del self.sequences[sequence.number]
        sequence.sink(event)

    def lose(self) -> None:
        """Die like a process."""
        self.state = engine.EngineState.RESTARTING
        for sequence in tuple(self.sequences.values()):
            self.emit(sequence, EngineFailed("killed"))

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Return the test's number, by default all tokens."""
        return len(prompt_token_ids) if self.cached_token_count is None else self.cached_token_count

    def statistics(self) -> engine.EngineStatistics:
        """Implement `Engine`."""
        return engine.EngineStatistics(kv_block_count_total=self.kv_block_count)

    def healthy(self) -> bool:
        """Implement `Engine`."""
        return self.state is engine.EngineState.READY

    def condition(self) -> engine.EngineCondition:
        """Implement `Engine`."""
        return engine.EngineCondition(self.state, retry_after_s=1.0, reason="test")

    async def close(self) -> None:
        """Implement `Engine`."""
        self.state = engine.EngineState.CLOSED


class Clock:
    """Clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_set(count: int, **options: Any) -> tuple[ReplicaSet, list[Puppet], Clock]:
    """Return replicas `r0`, `r1`, …"""
    clock, puppets = Clock(), [Puppet() for _ in range(count)]
    regions, limits = options.pop("regions", [""] * count), options.pop("limits", LIMITS)
    replicas = [
        Replica(f"r{index}", puppet, regions[index], limits) for index, puppet in enumerate(puppets)
    ]
    return (
        ReplicaSet(MODEL, replicas, clock=clock, **({"recovery_wait_s": 0.0} | options)),
        puppets,
        clock,
    )


def finished(token_count: int) -> engine.SequenceFinished:
    """Return the end of a sequence."""
    return engine.SequenceFinished(
        engine.EngineFinishReason.STOP, "", 1, 0, token_count, engine.EngineTimings(0, 0, 0)
    )


class Followed:
    """Sequence with all its events."""

    def __init__(self, replica_set: ReplicaSet, request: engine.GenerationRequest) -> None:
        self.reported: list[engine.SequenceEvent | EngineError] = []
        self.sequence = replica_set.submit(request, self.reported.append)

    def find(self, puppets: list[Puppet]) -> tuple[Puppet, EngineSequence] | None:
        """Return its current engine."""
        mine = vars(self.sequence)["_sequence"]
        return next(
            ((puppet, mine) for puppet in puppets if mine in puppet.sequences.values()), None
        )


class PlacingMachine(RuleBasedStateMachine):
    """State machine of sequences, while replicas die, fill up, drain and return."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.open: list[Followed] = []

    @initialize(
        count=st.integers(1, 4),
        policy=st.sampled_from(sorted(POLICIES)),
        failures=st.integers(1, 2),
    )
    def make(self, count: int, policy: str, failures: int) -> None:
        limits = replace(LIMITS, failure_count_max=failures)
        self.set, self.puppets, self.clock = make_set(
            count, policy=POLICIES[policy](), limits=limits
        )

    def teardown(self) -> None:
        for each in self.open:
            each.sequence.close()
        self.open.clear()
        if hasattr(self, "set"):
            assert all(report.outstanding_token_count == 0 for report in self.set.reports())
            assert all(report.live_sequence_count == 0 for report in self.set.reports())
        self.loop.close()

    def usable(self) -> list[str]:
        """Return usable replicas by the machine's own accounts."""
        return [
            report.name
            for report in self.set.reports()
            if report.state is ReplicaState.READY or self.may_probe(report.name)
        ]

    def may_probe(self, name: str) -> bool:
        replica = self.set.replicas[int(name[1:])]
        half_open = replica.breaker.state(self.clock.now_s) is BreakerState.HALF_OPEN
        return (
            half_open
            and replica.engine.healthy()
            and not replica.is_draining
            and replica.breaker.admits(self.clock.now_s)
        )

    @rule(kind=st.integers(0, 5), output=st.integers(1, 400))
    def begin(self, kind: int, output: int) -> None:
        usable = [name for name in self.usable() if not self.puppets[int(name[1:])].is_full]
        before = [len(puppet.requests) for puppet in self.puppets]
        request = make_request([*SYSTEM, *range(kind * 40, kind * 40 + 40)], output)
        try:
            followed = Followed(self.set, request)
        except EngineError:
            assert not usable, "it was refused although somebody could take it"
            return
        [index] = [
            index
            for index, puppet in enumerate(self.puppets)
            if len(puppet.requests) > before[index]
        ]
        assert f"r{index}" in usable
        self.open.append(followed)

    @precondition(lambda self: self.open)
    @rule(
        which=st.integers(0, 50), tokens=st.integers(1, 30), ends=st.booleans(), reads=st.booleans()
    )
    def progress(self, which: int, tokens: int, ends: bool, reads: bool) -> None:
        """Report events of one sequence; end it, or close it."""
        followed = self.open[which % len(self.open)]
        found = followed.find(self.puppets)
        if found is not None and reads:
            puppet, mine = found
            events: list[engine.SequenceEvent] = [] if mine.is_scheduled else [engine.Scheduled(32)]
            events.append(engine.TokensGenerated(tuple(range(tokens)), "x"))
            events += [finished(tokens)] if ends else []
            for event in events:
                puppet.emit(mine, event)
            assert type(followed.reported[-1]) is type(events[-1])
            assert sum(isinstance(event, engine.Scheduled) for event in followed.reported) == 1, (
                "that a second engine began is not told"
            )
        if ends or not reads:
            self.open.remove(followed)
            followed.sequence.close()

    @rule(which=st.integers(0, 3), is_back=st.booleans())
    def lose(self, which: int, is_back: bool) -> None:
        """Kill an engine; its sequences move or end. is_back: it is ready again at once."""
        puppet = self.puppets[which % len(self.puppets)]
        self.loop.run_until_complete(self.lost(puppet))
        for followed in tuple(self.open):
            if followed.find(self.puppets) is None:
                assert isinstance(followed.reported[-1], EngineError)
                self.open.remove(followed)
        if is_back:
            puppet.state = engine.EngineState.READY

    async def lost(self, puppet: Puppet) -> None:
        """Wait until all its sequences have looked for another replica."""
        puppet.lose()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    @rule(which=st.integers(0, 3), full=st.booleans())
    def fill(self, which: int, full: bool) -> None:
        self.puppets[which % len(self.puppets)].is_full = full

    @rule(which=st.integers(0, 3))
    def restart(self, which: int) -> None:
        self.puppets[which % len(self.puppets)].state = engine.EngineState.READY

    @rule(which=st.integers(0, 3), draining=st.booleans())
    def drain(self, which: int, draining: bool) -> None:
        self.set.replicas[which % len(self.puppets)].is_drained = draining

    @rule(seconds=st.sampled_from([0.5, 6.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def counts_are_right(self) -> None:
        for report, puppet in zip(
            self.set.reports() if hasattr(self, "set") else (),
            getattr(self, "puppets", ()),
            strict=True,
        ):
            assert report.live_sequence_count == len(puppet.sequences)
            assert (report.outstanding_token_count > 0) == (report.live_sequence_count > 0)


TestPlacing = PlacingMachine.TestCase
TestPlacing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


async def place(
    replica_set: ReplicaSet,
    stack: contextlib.AsyncExitStack,
    request: engine.GenerationRequest,
    **options: int,
) -> str:
    """Return the replica of a request. options: values reported by its engine."""
    before = {report.name: report.live_sequence_count for report in replica_set.reports()}
    stream = await stack.enter_async_context(streams.stream(replica_set, request))
    [name] = [
        report.name
        for report in replica_set.reports()
        if report.live_sequence_count > before[report.name]
    ]
    if options:
        placed = vars(stream.sequence)
        for reported_now in (
            engine.Scheduled(options["cached"]),
            engine.TokensGenerated((1,), "x"),
        ):
            placed["_replica"].engine.emit(placed["_sequence"], reported_now)
        async for event in stream:
            if isinstance(event, engine.TokensGenerated):
                break
    return name


def prompted(*own: int, output: int = 10, salt: str = "") -> engine.GenerationRequest:
    """Return a prompt of the shared prefix and further tokens."""
    return make_request([*SYSTEM, *own], output, cache_salt=salt)


async def test_round_robin_gives_to_each_in_turn() -> None:
    replica_set, _, _ = make_set(3, policy=RoundRobin())
    async with contextlib.AsyncExitStack() as stack:
        assert [await place(replica_set, stack, prompted(1)) for _ in range(6)] == [
            "r0",
            "r1",
            "r2",
        ] * 2


async def test_least_loaded_chooses_the_fewest_outstanding_tokens() -> None:
    replica_set, _, _ = make_set(2, policy=LeastLoaded())
    async with contextlib.AsyncExitStack() as stack:
        assert await place(replica_set, stack, make_request(range(7, 307), 10)) == "r0"
        assert [
            await place(replica_set, stack, make_request(range(7, 57), 10)) for _ in range(3)
        ] == ["r1"] * 3


async def test_a_prefix_stays_with_its_replica_until_that_has_too_much_to_do() -> None:
    """Cached tokens count against outstanding ones, one for one."""
    replica_set, _, _ = make_set(2, policy=PrefixAware())
    async with contextlib.AsyncExitStack() as stack:
        first = await place(replica_set, stack, prompted(1, 2))
        await stack.aclose()
        # 64 cached tokens are worth as much as 64 outstanding ones: each of these has 2 of prompt
        # and 10 of output.
        placed = [await place(replica_set, stack, prompted(1, 2)) for _ in range(12)]

    assert placed[:5] == [first] * 5
    other = {"r0": "r1", "r1": "r0"}[first]
    assert other in placed, "a hot prefix does not overload one replica"


async def test_prefixes_of_one_salt_say_nothing_of_another() -> None:
    replica_set, _, _ = make_set(2, policy=PrefixAware())
    async with contextlib.AsyncExitStack() as stack:
        first = await place(replica_set, stack, prompted(1, salt="a"))
    async with contextlib.AsyncExitStack() as stack:
        assert await place(replica_set, stack, prompted(1, salt="b")) != first, (
            "equal cost: the other one's turn"
        )
    async with contextlib.AsyncExitStack() as stack:
        assert await place(replica_set, stack, prompted(1, salt="a")) == first


async def test_an_engine_that_says_its_cache_is_gone_is_believed() -> None:
    """Before a placement, after serving, and after being lost."""
    long = make_request(range(300, 700), 5)
    keys = prefix_keys(long.prompt_token_ids, "")
    for matches in ("before", "after", "by being away"):
        replica_set, puppets, _ = make_set(2, policy=PrefixAware())
        whole, half = (replica.prefixes for replica in replica_set.replicas)
        for prefixes, count in ((whole, len(keys)), (half, len(keys) // 2)):
            prefixes.sent(keys[:count])
            prefixes.computed(keys[:count])
        async with contextlib.AsyncExitStack() as stack:
            match matches:
                case "before":
                    puppets[0].cached_token_count = 0
                case "after":
                    assert await place(replica_set, stack, long, cached=0) == "r0"
                    assert whole.find(keys).block_count == len(keys), (
                        "it has computed all of it now"
                    )
                    whole.found_missing(whole.find(keys), 0)
                case _:
                    assert replica_set.healthy()
                    puppets[0].state = engine.EngineState.RESTARTING
                    assert replica_set.healthy()
                    puppets[0].state = engine.EngineState.READY
            assert await place(replica_set, stack, long) == "r1"


def test_blocks_used_before_a_missing_block_are_missing_too() -> None:
    prefixes = SentPrefixes()
    old, gone, new = ((index, index + 1, index + 2) for index in (10, 20, 30))
    for keys in (old, gone, new):
        prefixes.sent(keys)
    found = prefixes.find(gone)
    assert found.computed == (), "nobody has said yet that they were computed"
    assert not prefixes.found_missing(found, 0)
    assert prefixes.find(gone).block_count == 3

    for keys in (old, gone, new):
        prefixes.computed(keys)
    many = tuple(range(100, 120))
    prefixes.sent(many)
    prefixes.computed(many)
    assert not prefixes.found_missing(prefixes.find(many), 20 * 16 - 128), (
        "engines count in blocks of up to 128 tokens"
    )
    prefixes.sent(new)
    assert prefixes.found_missing(prefixes.find(many), 0)
    assert [prefixes.find(keys).block_count for keys in (old, gone, many, new)] == [0, 0, 8, 3]


def test_the_index_is_bounded_and_forgets_the_least_recently_used() -> None:
    prefixes = SentPrefixes(block_count_max=6)
    prefixes.sent((1, 2, 3))
    prefixes.sent((4, 5, 6))
    prefixes.sent((1, 2, 3))
    prefixes.sent((7, 8))

    assert len(prefixes) == 6
    assert [prefixes.find(keys).block_count for keys in ((1, 2, 3), (4, 5, 6), (7, 8))] == [
        3,
        1,
        2,
    ], "a head outlives its tail"


def test_a_breaker_opens_after_failures_in_a_row_and_probes_with_one() -> None:
    breaker = CircuitBreaker(LIMITS)
    breaker.failed(began_at_s=0.0, now_s=1.0)
    for _ in range(40):
        breaker.failed(began_at_s=0.5, now_s=1.0)  # the other streams of the dead process
    assert breaker.state(1.0) is BreakerState.CLOSED
    breaker.failed(began_at_s=2.0, now_s=3.0)
    assert breaker.state(7.9) is BreakerState.OPEN
    assert breaker.wait_s(7.0) == 1.0
    assert not breaker.admits(7.9)

    assert breaker.state(8.0) is BreakerState.HALF_OPEN
    assert breaker.begun(8.0)
    assert not breaker.admits(8.0), "one probe at a time"
    breaker.probe_ended()
    assert breaker.begun(8.5)
    breaker.failed(began_at_s=8.5, now_s=9.0)
    assert breaker.wait_s(9.0) == 10.0, "twice as long"
    assert breaker.begun(19.0)
    breaker.succeeded()
    assert breaker.state(19.0) is BreakerState.CLOSED
    breaker.failed(began_at_s=20.0, now_s=21.0)
    assert breaker.admits(21.0), "a success begins the count anew"


async def test_a_drained_replica_keeps_what_it_has_and_gets_nothing_new() -> None:
    replica_set, _, _ = make_set(2, policy=RoundRobin())
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        assert await place(replica_set, stack, prompted(1)) == "r0"
        replica_set.drain(["r0", "of another set"])
        assert [await place(replica_set, stack, prompted(1)) for _ in range(3)] == ["r1"] * 3
        reported = replica_set.reports()
        assert [(report.state, report.is_drained) for report in reported] == [
            (ReplicaState.DRAINING, True),
            (ReplicaState.READY, False),
        ]
        assert (reported[0].live_sequence_count, reported[0].reason) == (1, "1 sequences running")

        replica_set.drain(["r0", "r1"])
        assert not replica_set.healthy()
        with pytest.raises(EngineUnavailable, match="drained") as refused:
            await place(replica_set, stack, prompted(1))
        assert refused.value.retry_after_s > 0

        replica_set.drain([])
        assert await place(replica_set, stack, prompted(1)) == "r0"


async def test_a_request_that_one_replica_refuses_runs_on_another() -> None:
    """Servers of several kinds may serve one model; all must refuse."""
    replica_set, puppets, _ = make_set(2, policy=RoundRobin())
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        puppets[0].is_unable = True
        assert [await place(replica_set, stack, prompted(1)) for _ in range(2)] == ["r1", "r1"]

        puppets[1].is_full = True
        with pytest.raises(EngineOverloaded):
            await place(replica_set, stack, prompted(1))
        puppets[1].is_unable, puppets[1].is_full = True, False
        with pytest.raises(RequestImpossible, match="not here"):
            await place(replica_set, stack, prompted(1))

    assert [report.live_sequence_count for report in replica_set.reports()] == [0, 0]


async def test_requests_that_fail_on_every_replica_do_not_open_all_circuits() -> None:
    """Each failure on a working engine counts against the request."""
    replica_set, puppets, clock = make_set(3, policy=RoundRobin())
    async with asyncio.timeout(60):
        for _ in range(LIMITS.failure_count_max):
            async with streams.stream(replica_set, prompted(1)) as stream:
                reading = asyncio.ensure_future(anext(aiter(stream)))
                while not reading.done():
                    for puppet in puppets:
                        for running in tuple(puppet.sequences.values()):
                            puppet.emit(running, EngineFailed("this one cannot be"))
                    clock.now_s += 0.01
                    await asyncio.sleep(0)
                with pytest.raises(EngineFailed, match="this one"):
                    reading.result()

    assert [len(puppet.requests) for puppet in puppets] == [2, 2, 2]
    assert [report.state for report in replica_set.reports()] == [
        ReplicaState.TRIPPED,
        ReplicaState.READY,
        ReplicaState.READY,
    ]


async def test_a_model_is_as_well_as_the_replicas_that_are_in_use() -> None:
    """Health and progress are those of the other replicas, which get the next request."""
    replica_set, puppets, _ = make_set(2, warm_count=0)
    replica_set.drain(["r0"])
    for state in (engine.EngineState.COLD, engine.EngineState.LOADING, engine.EngineState.FAILED):
        puppets[1].state = state

        assert replica_set.condition().state is state

    replica_set.drain(["r0", "r1"])
    assert replica_set.condition().reason == "it is being drained"


async def test_a_request_goes_to_the_first_region_that_takes_it() -> None:
    replica_set, puppets, _ = make_set(4, regions=["eu", "eu", "us", ""], policy=RoundRobin())
    puppets[3].state = engine.EngineState.CLOSED

    async def placed(*regions: str) -> str:
        async with contextlib.AsyncExitStack() as stack:
            return await place(replica_set, stack, replace(prompted(1), regions=regions))

    assert {await placed("eu", "us") for _ in range(6)} == {"r0", "r1"}
    assert await placed("us") == "r2"
    puppets[0].lose()
    puppets[1].is_full = True
    assert await placed("eu", "us") == "r2"
    with pytest.raises(EngineOverloaded):
        await placed("eu")
    puppets[1].lose()
    with pytest.raises(EngineUnavailable, match="the first is restarting"):
        await placed("eu")
    puppets[3].state = engine.EngineState.READY
    assert await placed("eu") == "r3", "what is nowhere in particular is everywhere"


async def test_a_bound_request_uses_only_replicas_known_to_be_in_its_region() -> None:
    """Not those whose region is only assumed, and not after a loss either."""
    replica_set, puppets, _ = make_set(4, regions=["eu", "eu", "us", ""], policy=RoundRobin())
    replica_set.replicas[1].known_region = ""  # the fleet does not say
    bound = replace(prompted(1), regions=("eu",), is_bound=True)

    async with contextlib.AsyncExitStack() as stack:
        assert {await place(replica_set, stack, bound) for _ in range(4)} == {"r0"}
    assert replica_set.has_room(bound)
    sequence = Followed(replica_set, bound)
    puppets[0].lose()
    assert not replica_set.has_room(bound)
    with pytest.raises(EngineUnavailable, match="the first is restarting"):
        replica_set.submit(bound, lambda _: None)
    sequence.sequence.cancel()
    elsewhere = replace(bound, regions=("mars",))
    with pytest.raises(EngineUnavailable, match="is known to be in 'mars'"):
        replica_set.submit(elsewhere, lambda _: None)
    assert not any(each.requests for each in puppets[1:])


async def test_requests_of_a_region_wait_for_its_replicas_only() -> None:
    """A bound request waits for those that are known to be there."""
    replica_set, puppets, _ = make_set(4, regions=["us", "eu", "", "eu"], warm_count=1)
    replica_set.replicas[3].known_region = ""  # the fleet does not say
    eu = replica_set.within(("eu",), is_bound=False)
    bound = replica_set.within(("eu",), is_bound=True)
    nowhere = replica_set.within(("mars",), is_bound=True)
    assert replica_set.within((), is_bound=False) is replica_set
    for puppet in puppets[1:]:
        puppet.state = engine.EngineState.COLD
    assert [each.healthy() for each in (replica_set, eu, bound)] == [True, False, False]
    assert bound.condition().state is engine.EngineState.COLD
    assert nowhere.condition().state is engine.EngineState.FAILED
    with pytest.raises(EngineUnavailable, match="is known to be in 'mars'"):
        await nowhere.start()

    puppets[2].state = puppets[3].state = engine.EngineState.READY
    assert [each.healthy() for each in (eu, bound)] == [True, False]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(bound.start())
        await asyncio.sleep(0)
        assert not starting.done()
        puppets[1].started.set()
        await starting
    assert bound.healthy()

    replica_set.drain(["r1"])
    assert bound.condition().reason == "it is being drained"
    with pytest.raises(EngineUnavailable, match="being drained"):
        await bound.start()
    replica_set.become([replica_set.replicas[0], *replica_set.replicas[2:]], 1)
    assert nowhere.condition().state is bound.condition().state is engine.EngineState.FAILED


async def test_a_set_is_started_as_soon_as_one_replica_is() -> None:
    replica_set, puppets, _ = make_set(3, warm_count=2)
    for puppet in puppets:
        puppet.state = engine.EngineState.LOADING
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(replica_set.serve())
        starting = tasks.create_task(replica_set.start())
        await asyncio.sleep(0)
        assert not replica_set.healthy()
        assert replica_set.condition().state is engine.EngineState.LOADING
        puppets[1].started.set()
        await starting
        assert replica_set.healthy()
        assert [report.state for report in replica_set.reports()] == [
            ReplicaState.LOADING,
            ReplicaState.READY,
            ReplicaState.LOADING,
        ]
        puppets[0].started.set()
        await serving
        assert puppets[2].state is engine.EngineState.LOADING, "beyond those that are kept warm"
        await replica_set.close()
    assert replica_set.condition().state is engine.EngineState.CLOSED


def test_statistics_are_sums_and_steps_the_mean_pace_of_those_that_work() -> None:
    together = SetStatistics(3)

    def reported(
        *steps: int, running: tuple[int, ...] = (1, 1, 0)
    ) -> list[engine.EngineStatistics]:
        return [
            engine.EngineStatistics(
                step_count=count, running_sequence_count=busy, kv_block_count_total=10
            )
            for count, busy in zip(steps, running, strict=True)
        ]

    assert together.sum_of(reported(4, 4, 0), 3, (0, 0)).step_count == 4
    summed = together.sum_of(reported(8, 6, 0), 2, (1, 2))
    assert summed.step_count == 7
    assert summed.running_sequence_count == 2
    assert summed.kv_block_count_total == 30
    assert (summed.replica_count, summed.migration_count, summed.replacement_count) == (2, 1, 2)
    assert together.sum_of(reported(9, 1, 0), 2, (1, 2)).step_count == 8, (
        "the second was started anew"
    )


class RefusesLater(Puppet):
    """Engine that accepts every sequence and then refuses it as full, as remote servers do."""

    def submit(self, request: engine.GenerationRequest, sink: engine.EventSink) -> EngineSequence:
        """Implement `Engine.submit`."""
        assert len(self.requests) < 20, "it is asked for ever"
        sequence = super().submit(request, sink)
        asyncio.get_running_loop().call_soon(self.emit, sequence, EngineOverloaded("full", 2.0))
        return sequence


async def test_servers_that_refuse_accepted_requests_are_not_retried_endlessly() -> None:
    """If all replicas do so, the request is refused."""
    puppets = [RefusesLater(), RefusesLater()]
    replicas = ReplicaSet(
        MODEL, [Replica(f"r{index}", puppet) for index, puppet in enumerate(puppets)]
    )
    async with asyncio.timeout(60):
        with pytest.raises(EngineOverloaded):
            async with streams.stream(replicas, make_request([1, 2, 3], 4)) as stream:
                await anext(aiter(stream))
    assert all(puppet.requests for puppet in puppets), "each was asked"
    assert not any(replica.live_sequence_count for replica in replicas.replicas)


class Pooled(Puppet):
    """Server that other processes use too."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.pool = pool


def sharing(count: int) -> tuple[SharedPrefixes, list[Replica]]:
    """Return a process before so many servers, which knows another one."""
    puppets: list[Any] = [Pooled(f"vllm://server-{number}:8000") for number in range(count)]
    replicas = [Replica(f"r{number}", each) for number, each in enumerate(puppets)]
    shared = SharedPrefixes(Router({"m": ReplicaSet(MODEL, replicas)}), uuid.uuid4())
    shared.process_count = 2
    return shared, replicas


def test_broadcasts_of_blocks_are_bounded_and_reach_the_same_server() -> None:
    """However many servers and blocks there are; announced blocks are not announced again."""
    (sender, sent), (receiver, received) = sharing(70), sharing(70)
    keys = {number: tuple(range(number * 1000, number * 1000 + 60)) for number in range(70)}
    for number, replica in enumerate(sent):
        replica.prefixes.sent(keys[number])
        replica.prefixes.sent(keys[number])  # known by now
        replica.prefixes.sent((-1 - number,), is_private=True)

    texts = []
    while text := sender.next_broadcast():
        texts.append(text)
        receiver.receive(text)
        sender.receive(text)  # each process hears its own, too
    receiver.receive("")
    receiver.receive('{"owner": "x", "blocks": {"vllm://server-0:8000": "AAAA"}}')

    assert len(texts) < 12
    assert max(len(text.encode()) for text in texts) <= BYTES_MAX
    for number, replica in enumerate(received):
        assert replica.prefixes.find(keys[number]).block_count == 60
        assert len(replica.prefixes) == 60
        assert not replica.prefixes.unshared, "it does not announce them again"


def test_a_process_that_is_alone_announces_nothing_and_keeps_the_newest_blocks() -> None:
    shared, [replica] = sharing(1)
    shared.process_count = 1
    for number in range(100):
        replica.prefixes.sent(tuple(range(number * 100, number * 100 + 100)))

    assert shared.next_broadcast() == ""
    assert len(replica.prefixes.unshared) == UNSHARED_MAX


def test_a_process_that_starts_later_learns_the_newest_blocks_once() -> None:
    """Those that know them share the work. Private blocks stay where they are."""
    (first, known), (second, also), (late, learned) = sharing(20), sharing(20), sharing(20)
    for shared in (first, second):
        while shared.next_broadcast():  # their own questions, without answers
            pass
    keys = {number: tuple(range(number * 10_000, number * 10_000 + 300)) for number in range(20)}
    for number in range(20):
        known[number].prefixes.sent((-1 - number,), is_private=True)
        known[number].prefixes.sent(keys[number])
    many = tuple(range(10**6, 10**6 + RECALLED_MAX))
    also[0].prefixes.sent(keys[0])
    also[0].prefixes.sent(many[::-1])  # the newest, and as many as are told
    for text in (*iter(first.next_broadcast, ""), *iter(second.next_broadcast, "")):
        first.receive(text)
        second.receive(text)
    learned[1].prefixes.sent((5,))

    question = late.next_broadcast()
    answers = []
    first.receive(question)
    second.receive(question)
    while any(each.prefixes.recalled for each in (*known, *also)):
        for shared in (first, second):
            if text := shared.next_broadcast():
                answers.append(text)
                for each in (first, second, late):
                    each.receive(text)

    assert late.next_broadcast() == "", "it asks once"
    assert max(len(text.encode()) for text in (question, *answers)) <= BYTES_MAX
    assert len(answers) < (19 * 300 + RECALLED_MAX) / 600 + 3, "each block is repeated once"
    assert learned[0].prefixes.find(many[::-1]).block_count == RECALLED_MAX
    for number in range(1, 20):
        assert learned[number].prefixes.find(keys[number]).block_count == 300
        assert not learned[number].prefixes.find((-1 - number,)).block_count
    found = learned[1].prefixes
    found.block_count_max = 299
    found.sent((6,))
    assert [found.find((key,)).block_count for key in (5, 6, 10_000, 10_299)] == [1, 1, 1, 0]


def test_a_process_asks_again_once_a_server_is_back() -> None:
    """Not while it is alone."""
    shared, replicas = sharing(2)
    puppet: Any = replicas[1].engine
    puppet.state = engine.EngineState.RESTARTING
    shared.process_count = 1
    assert shared.next_broadcast() == ""
    shared.process_count = 2

    def requested() -> list[str]:
        text = shared.next_broadcast()
        return list(json.loads(text)["requested"]) if text else []

    assert requested() == ["vllm://server-0:8000"]
    assert requested() == []
    puppet.state = engine.EngineState.READY
    assert requested() == ["vllm://server-1:8000"]
    puppet.state = engine.EngineState.RESTARTING
    assert requested() == []
    puppet.state = engine.EngineState.READY
    assert requested() == ["vllm://server-1:8000"]


def test_blocks_that_are_sent_in_public_later_are_announced() -> None:
    _, [replica] = sharing(1)
    replica.prefixes.sent((1, 2), is_private=True)
    replica.prefixes.sent((1, 2, 3))

    assert sorted(replica.prefixes.unshared) == [1, 2, 3]
    replica.prefixes.recall()
    assert sorted(replica.prefixes.recalled) == [1, 2, 3]


def test_a_lost_server_forgets_what_others_have_sent() -> None:
    shared, [replica] = sharing(1)
    sender, [source] = sharing(1)
    source.prefixes.sent((1, 2, 3))
    puppet: Any = replica.engine
    puppet.state = engine.EngineState.RESTARTING

    shared.receive(sender.next_broadcast())

    assert not len(replica.prefixes)
