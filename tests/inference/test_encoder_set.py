"""Several encoders as one: load balancing, failover, draining."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest

from inference import engine
from inference.errors import EngineError, EngineFailed, EngineOverloaded, EngineUnavailable
from inference.routing.encoder_set import FULL_TOKENS, LOSS_COUNT_MAX, EncoderReplica, EncoderSet
from inference.routing.replica import ReplicaState

MODEL = engine.ModelInfo("m", "fake", "fake", 100_000, 100, "/nowhere", embedding_dimension=1)


class Puppet:
    """Encoder whose calls the test ends. It can be started and stopped like a slot."""

    model = MODEL

    def __init__(self, number: int, *, cold: bool = False) -> None:
        self.number = number
        self.state = engine.EngineState.COLD if cold else engine.EngineState.READY
        self.has_room = True
        self.calls: list[tuple[engine.EmbeddingRequest, asyncio.Future[None]]] = []
        self._closed = asyncio.Event()

    def healthy(self) -> bool:
        return self.state is engine.EngineState.READY

    def condition(self) -> engine.EngineCondition:
        return engine.EngineCondition(
            self.state,
            retry_after_s=3.0,
            reason="test",
            starts_on_demand=self.state is engine.EngineState.COLD,
        )

    def statistics(self) -> engine.EngineStatistics:
        return engine.EngineStatistics(running_sequence_count=len(self.calls))

    def begin_use(self) -> None:
        """Implement `Stoppable.begin_use`: it is not stopped in use here."""

    def end_use(self) -> None:
        """Implement `Stoppable.end_use`."""

    def fits_now(self) -> bool:
        return self.has_room

    def idle_since_s(self) -> float | None:
        return None

    def evict(self) -> None:
        raise AssertionError("it stops by itself")

    async def serve(self) -> None:
        await self._closed.wait()

    async def start(self) -> None:
        self.state = engine.EngineState.READY

    async def close(self) -> None:
        self.state = engine.EngineState.CLOSED
        self._closed.set()

    async def embed(self, request: engine.EmbeddingRequest) -> engine.Embeddings:
        request.on_begin()
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls.append((request, end))
        await end
        return engine.Embeddings(tuple(array("f", [self.number]) for _ in request.inputs), 1.0, 1.0)

    def end(self, error: EngineError | None = None) -> None:
        """End its first call."""
        _, end = self.calls.pop(0)
        end.set_result(None) if error is None else end.set_exception(error)


@contextlib.asynccontextmanager
async def serving(puppets: Sequence[Puppet], warm_count: int = 1) -> AsyncIterator[EncoderSet]:
    encoders = EncoderSet(
        MODEL, [EncoderReplica(f"m#{each.number}", each) for each in puppets], warm_count=warm_count
    )
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(encoders.serve())
        await encoders.start()
        yield encoders
        await encoders.close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - the set acts by itself
        await asyncio.sleep(0)


def texts(*lengths: int) -> engine.EmbeddingRequest:
    return engine.EmbeddingRequest(tuple((1,) * length for length in lengths))


async def test_calls_go_to_the_least_loaded_encoder_and_not_to_a_drained_one() -> None:
    puppets = [Puppet(0), Puppet(1)]
    async with serving(puppets) as encoders, asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(encoders.embed(texts(length))) for length in (50, 10, 10, 10)]
        await until(lambda: sum(len(each.calls) for each in puppets) == 4)
        assert [len(each.calls) for each in puppets] == [1, 3]
        assert [reported.outstanding_token_count for reported in encoders.reports()] == [50, 30]

        encoders.drain(["m#1"])
        last = tasks.create_task(encoders.embed(texts(10)))
        await until(lambda: len(puppets[0].calls) == 2)
        assert [(reported.state, reported.is_drained) for reported in encoders.reports()] == [
            (ReplicaState.READY, False),
            (ReplicaState.DRAINING, True),
        ]
        for puppet in puppets:
            while puppet.calls:
                puppet.end()
        assert [(await call).vectors[0][0] for call in (*calls, last)] == [0, 1, 1, 1, 0]

        encoders.drain(["m#0", "m#1"])
        assert not encoders.healthy()
        with pytest.raises(EngineUnavailable, match="drained") as refused:
            await encoders.embed(texts(1))
        assert refused.value.retry_after_s > 0


async def test_a_call_that_loses_its_encoder_restarts_elsewhere_up_to_a_bound() -> None:
    puppets, begun = [Puppet(number) for number in range(LOSS_COUNT_MAX + 2)], []
    async with serving(puppets) as encoders, asyncio.TaskGroup() as tasks:
        call = tasks.create_task(
            encoders.embed(engine.EmbeddingRequest(((1,),), on_begin=lambda: begun.append(1)))
        )
        await until(lambda: puppets[0].calls)
        puppets[0].end(EngineFailed("killed"))
        await until(lambda: puppets[1].calls)
        puppets[1].end(EngineOverloaded("full", 2.0))
        await until(lambda: puppets[2].calls)
        puppets[2].end()
        assert (await call).vectors[0][0] == 2
        assert begun == [1], "told once"

    puppets = [Puppet(number) for number in range(LOSS_COUNT_MAX + 2)]
    async with serving(puppets) as encoders:

        async def fatal() -> None:
            with pytest.raises(EngineFailed, match="killed"):
                await encoders.embed(texts(1))

        async with asyncio.TaskGroup() as tasks:
            ended = tasks.create_task(fatal())
            for _ in range(LOSS_COUNT_MAX + 1):
                await until(lambda: any(each.calls for each in puppets))
                next(each for each in puppets if each.calls).end(EngineFailed("killed"))
            await ended
        assert not any(each.calls for each in puppets), "it may be what breaks them"


async def test_a_cold_set_stays_cold_while_none_of_its_encoders_is_drained() -> None:
    puppet = Puppet(0, cold=True)
    encoders = EncoderSet(MODEL, [EncoderReplica("m#0", puppet)], warm_count=0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(encoders.serve())
        for names in ([], ["other#0"]):
            encoders.drain(names)
            await asyncio.sleep(0.01)
        assert puppet.state is engine.EngineState.COLD
        await encoders.close()


async def test_another_encoder_starts_if_all_are_full_or_drained_and_memory_allows() -> None:
    puppets = [Puppet(0), Puppet(1, cold=True), Puppet(2, cold=True)]
    async with serving(puppets) as encoders, asyncio.TaskGroup() as tasks:
        tasks.create_task(encoders.embed(texts(FULL_TOKENS - 1)))
        await until(lambda: len(puppets[0].calls) == 1)
        assert puppets[1].state is engine.EngineState.COLD
        puppets[1].has_room = False
        tasks.create_task(encoders.embed(texts(2)))
        await until(lambda: puppets[2].healthy())
        assert puppets[1].state is engine.EngineState.COLD, "there is no memory for it"
        while puppets[0].calls:
            puppets[0].end()

        puppets[1].has_room = True
        encoders.drain(["m#0", "m#2"])
        await until(encoders.healthy)
        assert puppets[1].healthy()


async def test_bound_texts_go_only_to_encoders_known_to_be_in_their_region() -> None:
    puppets = [Puppet(0), Puppet(1), Puppet(2)]
    replicas = [
        EncoderReplica(f"m#{each.number}", each, region)
        for each, region in zip(puppets, ("us", "eu", ""), strict=True)
    ]
    encoders = EncoderSet(MODEL, replicas, warm_count=3)
    for puppet in puppets:
        await puppet.start()
    bound = replace(texts(1), bound_region="eu")

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(encoders.embed(bound)) for _ in range(3)]
        await until(lambda: len(puppets[1].calls) == 3)
        for _ in calls:
            puppets[1].end()
    puppets[1].state = engine.EngineState.CLOSED
    with pytest.raises(EngineUnavailable):
        await encoders.embed(bound)
    with pytest.raises(EngineUnavailable, match="is known to be in 'mars'"):
        await encoders.embed(replace(bound, bound_region="mars"))
    assert not puppets[0].calls
    assert not puppets[2].calls
