"""Embedding model served by several encoders: load balancing, failover, draining.

Implements `Encoder`. Each call goes to the encoder with the fewest outstanding tokens. A call that
loses its encoder is repeated on another one: results are returned only when complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from common.incidents import Retries
from inference.engine import (
    EmbeddingRequest,
    Embeddings,
    Encoder,
    EngineState,
    EngineStatistics,
    ModelInfo,
)
from inference.errors import (
    EngineError,
    EngineFailed,
    EngineOverloaded,
    EngineStartFailed,
    EngineUnavailable,
)
from inference.routing.replica import Member, Replicas, Stoppable, absent, unavailable

LOSS_COUNT_MAX = 2  # encoders that may fail during one call: the call may be the cause
FULL_TOKENS = 16_384  # outstanding per encoder before another is started: seconds of work on a CPU
_log = logging.getLogger("weir.inference.routing")


class EncoderReplica(Member):
    """Encoder of a set under a unique name. `outstanding_token_count` counts its running calls."""

    work = "calls"

    def __init__(self, name: str, encoder: Encoder, known_region: str = "") -> None:
        super().__init__(name, encoder, known_region)
        self.encoder = encoder

    @contextlib.contextmanager
    def given(self, token_count: int) -> Iterator[None]:
        """Count a call of so many tokens as outstanding while the block runs."""
        self.live_sequence_count += 1
        self.outstanding_token_count += token_count
        try:
            yield
        finally:
            self.live_sequence_count -= 1
            self.outstanding_token_count -= token_count


class EncoderSet(Replicas[EncoderReplica]):
    """Several encoders as one. The first `warm_count` are started at once, others under load."""

    def __init__(
        self, model: ModelInfo, replicas: Sequence[EncoderReplica], *, warm_count: int
    ) -> None:
        """Create the set. Callers see `model`, whatever its replicas report."""
        super().__init__(model, replicas, warm_count)
        self._growth_due = asyncio.Event()  # set when another replica should be started

    def drain(self, names: Collection[str]) -> None:
        """Drain exactly the replicas with these names: they get no new calls."""
        super().drain(names)
        is_any_drained = any(replica.is_drained for replica in self._replicas)
        if is_any_drained and not any(each.takes(self.clock()) for each in self._replicas):
            self._growth_due.set()

    def move_out(self, name: str) -> int:
        """Move nothing and return 0: a call takes seconds, and moving it would repeat work."""
        return 0

    async def serve(self) -> None:
        """Implement `Backend.serve` by serving all replicas."""
        async with asyncio.TaskGroup() as tasks:
            scaling = Retries("replica_scaling")
            growing = tasks.create_task(
                scaling.keep_running(self._grow), name=f"scaling of {self._model.name}"
            )
            await super().serve()
            growing.cancel()

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Embed on the least loaded replica; if that fails, on another. See `Encoder.embed`."""
        token_count = sum(map(len, request.inputs))
        begun = False

        def begin() -> None:
            nonlocal begun
            if not begun:
                begun = True
                request.on_begin()

        once, loss_count = replace(request, on_begin=begin), 0
        refusal: EngineError | None = None
        allowed = self._allowed(request.bound_region)
        for replica in sorted(allowed, key=lambda each: each.outstanding_token_count):
            if not replica.takes(self.clock()):
                continue
            try:
                with replica.given(token_count):
                    self._check_load()
                    return await replica.encoder.embed(once)
            except EngineFailed as error:
                refusal, loss_count = error, loss_count + 1
                if self.is_closing or loss_count > LOSS_COUNT_MAX:
                    raise
            except (EngineUnavailable, EngineOverloaded, EngineStartFailed) as error:
                if refusal is None or isinstance(error, EngineOverloaded):
                    refusal = error
            self._replacement_count += 1
            _log.info(
                "replica %s did not embed %d tokens, trying another: %s",
                replica.name,
                token_count,
                refusal,
            )
        if refusal is not None:
            raise refusal
        raise unavailable(self._conditions(allowed), len(self._replicas))

    def _allowed(self, bound_region: str) -> Sequence[EncoderReplica]:
        """List the replicas for calls that may not leave a region. Raises: EngineUnavailable."""
        if not bound_region:
            return self._replicas
        regions = (bound_region,)
        found = [each for each in self._replicas if each.serves(regions, is_bound=True)]
        if not found:
            raise absent(self._model, regions, is_bound=True)
        return found

    def statistics(self) -> EngineStatistics:
        """Implement `Backend.statistics` by sums; steps are averaged."""
        ready_count = sum(replica.encoder.healthy() for replica in self._replicas)
        statistics = [replica.encoder.statistics() for replica in self._replicas]
        return self._statistics.sum_of(statistics, ready_count, (0, self._replacement_count))

    def _check_load(self) -> None:
        """Request another replica if all available ones have over FULL_TOKENS outstanding."""
        now_s = self.clock()
        loads = [each.outstanding_token_count for each in self._replicas if each.takes(now_s)]
        if min(loads, default=0) > FULL_TOKENS:
            self._growth_due.set()

    async def _grow(self) -> None:
        """Start requested replicas one by one while memory is free. Idle ones stop themselves."""
        while True:
            await self._growth_due.wait()
            self._growth_due.clear()
            for replica in self._replicas:
                encoder = replica.encoder
                is_cold = encoder.condition().state is EngineState.COLD and not replica.is_drained
                if (
                    is_cold
                    and isinstance(encoder, Stoppable)
                    and encoder.fits_now()
                    and not self.is_closing
                ):
                    _log.info("starting replica %s: the others are full or drained", replica.name)
                    with contextlib.suppress(EngineError):
                        await encoder.start()
                    break
