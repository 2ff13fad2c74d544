"""One model that embeds as several encoders, each in its own place: sharing out, losing, draining. Implements `Encoder`.

Texts are shared out call by call, to whoever has the fewest tokens to embed. A call that loses its encoder begins anew in another:
nothing of it was told before all of it was there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from common.incidents import IncidentTaskGroup, Retries
from inference.engine import (
    EmbeddingRequest,
    Embeddings,
    Encoder,
    EngineCondition,
    EngineState,
    EngineStatistics,
    ModelInfo,
)
from inference.errors import EngineError, EngineFailed, EngineOverloaded, EngineStartFailed, EngineUnavailable
from inference.routing.replica import ReplicaReport, ReplicaState, SetStatistics, all_drained, nobody_takes, standing
from inference.routing.scaling import Stoppable

LOSS_COUNT_MAX = 2  # encoders that may break under one call: it may be what breaks them
FULL_TOKENS = 16_384  # that each encoder has to embed before another is started: seconds of work on a CPU
_log = logging.getLogger("weir.inference.routing")


class EncoderReplica:
    """An encoder as one of several. name: unique among them. outstanding_token_count: of calls that were given to it."""

    def __init__(self, name: str, encoder: Encoder) -> None:
        self.name = name
        self.encoder = encoder
        self.is_drained = False
        self.call_count = 0
        self.outstanding_token_count = 0

    @property
    def takes(self) -> bool:
        """Whether it may be given a call now."""
        return self.encoder.healthy() and not self.is_drained

    @contextlib.contextmanager
    def given(self, token_count: int) -> Iterator[None]:
        """It has a call inside the block."""
        self.call_count += 1
        self.outstanding_token_count += token_count
        try:
            yield
        finally:
            self.call_count -= 1
            self.outstanding_token_count -= token_count

    def report(self) -> ReplicaReport:
        """For operators."""
        condition = self.encoder.condition()
        state, reason = ReplicaState(condition.state.value), condition.reason
        if self.is_drained and condition.state is EngineState.READY:
            state, reason = ReplicaState.DRAINING, f"{self.call_count} calls to go"
        counts = self.call_count, self.outstanding_token_count
        return ReplicaReport(self.name, "", state, *counts, reason, self.encoder.statistics(), self.is_drained)


class EncoderSet:
    """Several encoders as one. See `Encoder` for the contract. The first `warm_count` are started with it, others under load."""

    def __init__(self, model: ModelInfo, replicas: Sequence[EncoderReplica], *, warm_count: int) -> None:
        """model: as it is called outside, whatever its replicas call it."""
        assert replicas, "a set has replicas"
        self._model = model
        self._replicas = tuple(replicas)
        self._warm_count = warm_count
        self._is_closing = False
        self._start_requested = asyncio.Event()
        self._wanted = asyncio.Event()  # set when another one is to be started
        self._replacement_count = 0
        self._statistics = SetStatistics(len(replicas))

    @property
    def model(self) -> ModelInfo:
        """See `Backend.model`."""
        return self._model

    def reports(self) -> list[ReplicaReport]:
        """How each replica stands; never blocks."""
        return [replica.report() for replica in self._replicas]

    def drain(self, names: Collection[str]) -> None:
        """Give these replicas nothing new from now on, and the others what they take."""
        for replica in self._replicas:
            replica.is_drained = replica.name in names
        if not any(replica.takes for replica in self._replicas):
            self._wanted.set()

    def move_out(self, name: str) -> int:
        """Nothing is moved: a call takes seconds, and half of it would be computed twice."""
        return 0

    async def serve(self) -> None:
        """See `Backend.serve`: all replicas' lives."""
        async with asyncio.TaskGroup() as tasks:
            scaling = Retries("replica_scaling")
            growing = tasks.create_task(scaling.keep_running(self._grow), name=f"scaling of {self._model.name}")
            async with IncidentTaskGroup() as lives:
                for replica in self._replicas:
                    lives.create_task(replica.encoder.serve(), name=f"replica {replica.name}")
                for replica in self._replicas[: self._warm_count]:
                    lives.create_task(self._warm(replica), name=f"replica start {replica.name}")
            growing.cancel()

    async def start(self) -> None:
        """See `Backend.start`; returns when the first of them takes calls."""
        self._start_requested.set()
        while not self.healthy():
            if self._is_closing:
                raise EngineUnavailable("the engine is closed", retry_after_s=0.0)
            usable = [replica for replica in self._replicas if not replica.is_drained]
            if not usable:
                raise all_drained(len(self._replicas))
            await self._first_start([each for each in usable if each in self._replicas[: self._warm_count]] or usable[:1])

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """See `Encoder.embed`; by the replica with the least to do, and by another one if that is lost or refuses."""
        token_count = sum(map(len, request.inputs))
        begun = False

        def begin() -> None:
            nonlocal begun
            if not begun:
                begun = True
                request.on_begin()

        once, loss_count = replace(request, on_begin=begin), 0
        refusal: EngineError | None = None
        for replica in sorted(self._replicas, key=lambda each: each.outstanding_token_count):
            if not replica.takes:
                continue
            try:
                with replica.given(token_count):
                    self._look()
                    return await replica.encoder.embed(once)
            except EngineFailed as error:
                refusal, loss_count = error, loss_count + 1
                if self._is_closing or loss_count > LOSS_COUNT_MAX:
                    raise
            except (EngineUnavailable, EngineOverloaded, EngineStartFailed) as error:
                if refusal is None or isinstance(error, EngineOverloaded):
                    refusal = error
            self._replacement_count += 1
            _log.info("texts of %d tokens were not embedded by %s: %s", token_count, replica.name, refusal)
        if refusal is not None:
            raise refusal
        raise nobody_takes(self._conditions(), len(self._replicas))

    def statistics(self) -> EngineStatistics:
        """See `Backend.statistics`: sums, but for the steps."""
        ready_count = sum(replica.encoder.healthy() for replica in self._replicas)
        told = [replica.encoder.statistics() for replica in self._replicas]
        return self._statistics.sum_of(told, ready_count, (0, self._replacement_count))

    def healthy(self) -> bool:
        """See `Backend.healthy`."""
        return not self._is_closing and any(replica.takes for replica in self._replicas)

    def condition(self) -> EngineCondition:
        """See `Backend.condition`: that of the replica that is likeliest to take calls first."""
        if self._is_closing:
            return EngineCondition(EngineState.CLOSED, reason="closed")
        if self.healthy():
            return EngineCondition(EngineState.READY, loading_fraction=1.0)
        return standing(self._conditions(), self._warm_count)

    async def close(self) -> None:
        """See `Backend.close`."""
        self._is_closing = True
        self._start_requested.set()
        async with asyncio.TaskGroup() as tasks:
            for replica in self._replicas:
                tasks.create_task(replica.encoder.close(), name=f"replica close {replica.name}")

    def _conditions(self) -> list[EngineCondition]:
        """Of those that no operator keeps out of use."""
        return [replica.encoder.condition() for replica in self._replicas if not replica.is_drained]

    def _look(self) -> None:
        """Another one is wanted where all that take calls have enough to do."""
        if min((each.outstanding_token_count for each in self._replicas if each.takes), default=0) > FULL_TOKENS:
            self._wanted.set()

    async def _grow(self) -> None:
        """Start one at a time, where there is free memory for it. They stop by themselves when they are idle."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            for replica in self._replicas:
                encoder = replica.encoder
                is_cold = encoder.condition().state is EngineState.COLD and not replica.is_drained
                if is_cold and isinstance(encoder, Stoppable) and encoder.fits_now() and not self._is_closing:
                    _log.info("replica %s is started: the others are full, or drained", replica.name)
                    with contextlib.suppress(EngineError):
                        await encoder.start()
                    break

    async def _warm(self, replica: EncoderReplica) -> None:
        """Start a replica once the set is asked to start. Its failure is its own to tell."""
        await self._start_requested.wait()
        if not self._is_closing:
            with contextlib.suppress(EngineError):
                await replica.encoder.start()

    async def _first_start(self, replicas: Sequence[EncoderReplica]) -> None:
        """Wait until one of them is ready. Raises the first error once none of them can be."""
        errors: list[EngineError] = []
        decided = asyncio.Event()

        async def start(replica: EncoderReplica) -> None:
            try:
                await replica.encoder.start()
            except EngineError as error:
                errors.append(error)
                if len(errors) < len(replicas):
                    return
            decided.set()

        async with asyncio.TaskGroup() as tasks:
            starting = [tasks.create_task(start(replica)) for replica in replicas]
            await decided.wait()
            for task in starting:
                task.cancel()
        if len(errors) == len(replicas):
            raise errors[0]
