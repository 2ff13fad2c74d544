"""Engines and encoders that run while they are wanted: slots that take requests while they are cold, and start for them.

One replica that runs while it is wanted: started by the first request, closed when idle or to make room, started anew later.

Around engines that live once: each start builds a new one. That one restarts itself after a crash, with its own
pauses; this module never does it for it. Whoever comes while a slot is cold, closing or starting waits for the start and is told of
it by `condition`; nobody is lost between two lives. Everything runs on the caller's event loop, in `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from common.incidents import Retries
from inference.engine import (
    Backend,
    EmbeddingRequest,
    Embeddings,
    Encoder,
    Engine,
    EngineCondition,
    EngineState,
    EngineStatistics,
    GenerationRequest,
    ModelInfo,
    Sequence,
    Tell,
)
from inference.errors import EngineError, EngineStartFailed, EngineUnavailable
from inference.routing.memory import MemoryBudget

# Seconds for which a fault that needs a person is told without trying again: looking costs a start, and mending takes longer.
FAULT_STANDS_S = 30.0
Served = TypeVar("Served", bound=Backend)
_log = logging.getLogger("weir.inference.routing")


@dataclass(frozen=True, slots=True)
class SlotTerms:
    """When a slot runs. idle_timeout_s: without a request until it is closed, 0 never closes it for that.

    keep_warm: it starts by itself, and is closed neither when idle nor for others. memory_bytes: what it holds while it runs.
    """

    idle_timeout_s: float = 0.0
    keep_warm: bool = False
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why it cannot start, and until when it is not looked at again."""

    reason: str
    until_s: float


class OnDemandSlot(Generic[Served]):
    """A slot for one engine at a time, of any kind. See `Backend` for the contract."""

    def __init__(
        self,
        build: Callable[[], Served],
        terms: SlotTerms,
        budget: MemoryBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """build: makes an engine that nothing has started; called now and before each later start. Raises as it does."""
        self._build = build
        self._terms = terms
        self._budget = budget or MemoryBudget()
        self._clock = clock
        self._unused: Served | None = build()  # known to be usable, and the first to be started
        self._model = self._unused.model
        self._engine: Served | None = None  # from its start until it is closed
        self._is_stopping = False
        self._stopping = asyncio.Event()  # the same, for who waits for it
        self._changed = asyncio.Event()
        self._served = asyncio.Event()
        self._serving = self._closed = False
        self._user_count = 0
        self._last_used_s = -math.inf  # never
        self._idle_timer: asyncio.TimerHandle | None = None
        self._fault: _Fault | None = None
        self._retries = Retries("engine")
        self._started_at_s = -math.inf
        self._load_time_s: float | None = None  # what loading took last, with the wait for memory

    @property
    def name(self) -> str:
        """The model's."""
        return self._model.name

    @property
    def model(self) -> ModelInfo:
        """See `Backend.model`."""
        return self._model

    @property
    def memory_bytes(self) -> int:
        """See `Resident.memory_bytes`."""
        return self._terms.memory_bytes

    @property
    def is_pinned(self) -> bool:
        """See `Resident.is_pinned`."""
        return self._terms.keep_warm

    def idle_since_s(self) -> float | None:
        """See `Resident.idle_since_s`."""
        in_use = self._user_count > 0 or self._terms.keep_warm or self._running() is None
        return None if in_use else self._last_used_s

    @property
    def is_leaving(self) -> bool:
        """See `Resident.is_leaving`: also one that was idle for too long, or cannot be started."""
        return self._is_stopping

    def fits_now(self) -> bool:
        """Whether it could be started without anybody giving way."""
        return self._budget.fits_now(self)

    def evict(self) -> None:
        """See `Resident.evict`."""
        assert self.idle_since_s() is not None, "a slot in use is not closed for others"
        self._stop()

    def healthy(self) -> bool:
        """See `Backend.healthy`."""
        engine = self._engine
        return engine is not None and not self._is_stopping and engine.healthy()

    def statistics(self) -> EngineStatistics:
        """See `Backend.statistics`."""
        return EngineStatistics() if self._engine is None else self._engine.statistics()

    def condition(self) -> EngineCondition:
        """See `Backend.condition`. LOADING with the stage `memory` is the wait for others to give way."""
        if self._closed:
            return EngineCondition(EngineState.CLOSED, reason="closed")
        if (fault := self._standing_fault()) is not None:
            wait_s = fault.until_s - self._clock()
            return EngineCondition(EngineState.FAILED, retry_after_s=wait_s, reason=fault.reason)
        engine = self._running()
        if engine is None:
            return replace(self._without_engine(), starts_on_demand=not self._terms.keep_warm)
        condition = engine.condition()
        if condition.state is not EngineState.LOADING:
            return condition
        return replace(condition, retry_after_s=self._wait_s(condition.retry_after_s), starts_on_demand=not self._terms.keep_warm)

    async def start(self) -> None:
        """See `Backend.start`."""
        with self._in_use():
            await self.started()

    async def close(self) -> None:
        """See `Backend.close`."""
        self._closed = True
        self._budget.withdraw(self)
        self._stop()
        if self._serving:
            await self._served.wait()

    async def serve(self) -> None:
        """See `Backend.serve`."""
        assert not self._serving, "an engine is served once"
        self._serving = True
        try:
            while not self._closed:
                if self._is_wanted():
                    await self._live()
                else:
                    await self._changed.wait()
        finally:
            self._closed = True
            self._forget_timer()
            self._tell()
            self._served.set()

    async def _live(self) -> None:
        """From cold to cold: wait for memory, run one engine, give the memory back."""
        self._is_stopping = False
        self._stopping.clear()
        self._started_at_s = self._clock()
        if not await self._budget.reserve(self):
            return
        try:
            if self._closed:
                return
            # In a thread: it reads the checkpoint's directory, and a disk that hangs must not stop other models' streams.
            engine, self._unused = self._unused, None
            engine = engine or await self._built()
            if engine is not None:
                await self._run(engine)
        except (EngineError, OSError) as error:  # the checkpoint is not what it was
            self._condemn(str(error))
        except Exception as error:
            self._condemn(f"unexpected error, incident {self._retries.failed(error, self.name)}")
        finally:
            self._budget.release(self)
            self._tell()

    async def _built(self) -> Served | None:
        """A new engine; None if there can be none now, whatever a file that was changed meanwhile makes of its reader."""
        try:
            return await asyncio.to_thread(self._build)
        except Exception as error:
            self._condemn(str(error) or type(error).__name__)
            return None

    async def _run(self, engine: Served) -> None:
        """Be an engine's life."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(engine.serve(), name=f"engine of slot {self.name}")
                self._engine = engine
                tasks.create_task(self._load(engine), name=f"start of slot {self.name}")
                self._tell()
                if not self._user_count:
                    self._rest()
                await self._stopping.wait()
                await engine.close()
        finally:
            self._engine = None

    async def _load(self, engine: Served) -> None:
        """Start it, whoever of those that wait for it goes away, and learn how long that takes."""
        try:
            await engine.start()
        except EngineStartFailed as error:
            if engine.condition().state is EngineState.FAILED:
                self._condemn(str(error))
        except EngineUnavailable:
            pass  # closed while it loaded
        else:
            self._load_time_s = self._clock() - self._started_at_s
            self._tell()

    async def started(self) -> Served:
        """The engine, once it takes requests; nothing is awaited between that and the return. Raises as `start`."""
        engine = self._engine
        if engine is not None and not self._is_stopping and engine.healthy():  # as it mostly is
            return engine
        while True:
            if self._closed:
                raise EngineUnavailable("the engine is closed", retry_after_s=0.0)
            if (fault := self._standing_fault()) is not None:
                raise EngineStartFailed(fault.reason, fault.until_s - self._clock())
            engine = self._running()
            if engine is None:
                self._tell()  # so that `serve` sees who waits
                await self._changed.wait()
                continue
            try:
                if not engine.healthy():
                    await engine.start()
            except (EngineStartFailed, EngineUnavailable) as error:
                if engine.condition().state is EngineState.FAILED:
                    self._condemn(str(error))
                elif self._running() is engine:
                    raise  # its own trouble: it tries again by itself
            else:
                if self._running() is engine:
                    return engine

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Neither idle nor to be closed for others meanwhile."""
        self.begin_use()
        try:
            yield
        finally:
            self.end_use()

    def begin_use(self) -> None:
        """From now on somebody uses it, until `end_use`."""
        self._user_count += 1
        if self._idle_timer is not None:
            self._forget_timer()

    def end_use(self) -> None:
        """One of those who use it does not any more."""
        self._user_count -= 1
        if not self._user_count:
            self._rest()

    def _rest(self) -> None:
        """Nobody uses it any more."""
        self._last_used_s = self._clock()
        if self._terms.keep_warm:
            return
        self._budget.withdraw(self)
        self._budget.look()
        if self._terms.idle_timeout_s and self._running() is not None:
            self._forget_timer()
            self._idle_timer = asyncio.get_running_loop().call_later(self._terms.idle_timeout_s, self._end_idling)

    def _end_idling(self) -> None:
        engine = self._running()
        if engine is None or self._user_count:
            return
        if engine.condition().state is EngineState.LOADING:
            self._rest()  # whoever it was for has gone; it is idle once it is loaded
            return
        _log.info("engine %s is stopped: no request for %g s", self.name, self._terms.idle_timeout_s)
        self._stop()

    def _running(self) -> Served | None:
        """The engine that new requests may go to, loaded or not."""
        return None if self._is_stopping else self._engine

    def _is_wanted(self) -> bool:
        return (self._user_count > 0 or self._terms.keep_warm) and self._standing_fault() is None

    def _standing_fault(self) -> _Fault | None:
        if self._fault is not None and self._clock() >= self._fault.until_s:
            self._fault = None
        return self._fault

    def _condemn(self, reason: str) -> None:
        """It needs a person: tell so to all that come, and give its memory back."""
        if self._standing_fault() is None:
            _log.error("engine %s cannot be started: %s", self.name, reason)
            self._fault = _Fault(reason, self._clock() + FAULT_STANDS_S)
        self._stop()

    def _stop(self) -> None:
        self._forget_timer()
        self._is_stopping = True
        self._stopping.set()
        self._tell()

    def _forget_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _without_engine(self) -> EngineCondition:
        if self._budget.is_waiting(self):
            reason = f"waiting for memory, which is held for {self._budget.who_holds()}"
            return EngineCondition(EngineState.LOADING, 0.0, "memory", self._wait_s(0.0), reason)
        if self._user_count:
            return EngineCondition(EngineState.LOADING, 0.0, "process", self._load_time_s or 0.0, "about to start")
        return EngineCondition(EngineState.COLD, retry_after_s=self._load_time_s or 0.0, reason="started by the next request")

    def _wait_s(self, guess_s: float) -> float:
        """Until it is ready, from what that took last; the engine's own guess where that is not known, or over."""
        left_s = self._started_at_s + (self._load_time_s or 0.0) - self._clock()
        return left_s if left_s > 0 else guess_s


class OnDemandEngine(OnDemandSlot[Engine]):
    """A slot for one engine at a time. See `Engine` for the contract."""

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """See `Engine.predict_cached_token_count`."""
        engine = self._running()
        return 0 if engine is None else engine.predict_cached_token_count(prompt_token_ids, cache_salt)

    def submit(self, request: GenerationRequest, tell: Tell) -> SlotSequence:
        """See `Engine.submit`. A slot that is cold is not started by that, but by `start`."""
        if (engine := self._running()) is None:
            condition = self.condition()
            raise EngineUnavailable(f"the engine is {condition.state.value}: {condition.reason}", condition.retry_after_s)
        sequence = SlotSequence(self, engine.submit(request, tell))
        self.begin_use()
        return sequence


class OnDemandEncoder(OnDemandSlot[Encoder]):
    """A slot for one encoder at a time. See `Encoder` for the contract. It takes requests while it is cold, too."""

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """See `Encoder.embed`; waits for the start if it is cold. Raises as `start` does, too."""
        with self._in_use():
            encoder = await self.started()
            return await encoder.embed(request)


class SlotSequence:
    """Implements `Sequence`: one in a slot, which is in use until it is closed."""

    def __init__(self, slot: OnDemandEngine, sequence: Sequence) -> None:
        self._slot: OnDemandEngine | None = slot  # until it is closed
        self._sequence = sequence

    @property
    def outputs(self) -> list[list[int]]:
        """See `Sequence.outputs`."""
        return self._sequence.outputs

    def cancel(self) -> None:
        """See `Sequence.cancel`."""
        self._sequence.cancel()

    def close(self) -> None:
        """See `Sequence.close`."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._sequence.close()
            slot.end_use()
