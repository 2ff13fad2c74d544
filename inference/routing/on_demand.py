"""On-demand engines and encoders: started by the first request, closed when idle or evicted.

A managed engine is one engine at a time; each start builds a new one. A running engine restarts
itself after a crash, with its own delays; this module does not. Requests that arrive while it is
cold, closing or starting wait for the start, which `condition` reports; none is lost in between.
Everything runs on the caller's event loop, in `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
    EventSink,
    GenerationRequest,
    ModelInfo,
    SequenceHandle,
    pool_of,
)
from inference.errors import EngineError, EngineStartFailed, EngineUnavailable
from inference.routing.memory import MemoryBudget, Needs

# Seconds for which a permanent fault is reported without a retry: a retry costs a start.
FAULT_KEPT_S = 30.0
Served = TypeVar("Served", bound=Backend)
_log = logging.getLogger("weir.inference.routing")


@dataclass(frozen=True, slots=True)
class ManagedTerms:
    """Terms of a managed engine. It is closed after `idle_timeout_s` seconds without requests, 0
    for never, unless its needs are pinned. `place` is called with the ids of its GPUs before each
    start.
    """

    idle_timeout_s: float = 0.0
    needs: Needs = field(default_factory=Needs)
    place: Callable[[tuple[str, ...]], None] = lambda gpus: None


@dataclass(frozen=True, slots=True)
class _Fault:
    """Reason why the engine cannot start, and the time until which it is not retried. For
    `client_message` see `EngineError`.
    """

    reason: str
    until_s: float
    client_message: str


class _Starts:
    """Starts of an engine: the last fault while it is reported, and the time that loading takes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.load_time_s: float | None = None  # of the last start, with the wait for memory
        self._clock = clock
        self._began_at_s = -math.inf
        self._fault: _Fault | None = None

    def begun(self) -> None:
        """Record that a start begins now."""
        self._began_at_s = self._clock()

    def loaded(self) -> None:
        """Record that the engine is loaded now."""
        self.load_time_s = self._clock() - self._began_at_s

    def wait_s(self, guess_s: float) -> float:
        """Estimate the seconds until ready by the last load time; without one, use `guess_s`."""
        left_s = self._began_at_s + (self.load_time_s or 0.0) - self._clock()
        return left_s if left_s > 0 else guess_s

    def fault(self) -> _Fault | None:
        """Return the fault for which no start is tried now, or None."""
        if self._fault is not None and self._clock() >= self._fault.until_s:
            self._fault = None
        return self._fault

    def failed(self, name: str, reason: str, client_message: str) -> None:
        """Record why the engine cannot be started, unless an earlier reason still stands."""
        if self.fault() is None:
            _log.error("engine %s cannot be started: %s", name, reason)
            self._fault = _Fault(reason, self._clock() + FAULT_KEPT_S, client_message)


class ManagedBackend(Generic[Served]):
    """Backend that starts at its first use, and stops when idle or evicted for another model."""

    def __init__(
        self,
        build: Callable[[], Served],
        terms: ManagedTerms,
        budget: MemoryBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the first engine. `build` returns an engine, not started; called once per start."""
        self._build = build
        self.needs = terms.needs
        self._terms = terms
        self._budget = budget or MemoryBudget()
        self._clock = clock
        self._unused: Served | None = build()  # known to be usable, and the first to be started
        self._model = self._unused.model
        shared = terms.needs.replica
        # Implements `Pooled.pool`
        self.pool = pool_of(self._unused) if shared is None else shared.pool
        self._engine: Served | None = None  # set from its start until it is closed
        self._is_stopping = False
        self._stopping = asyncio.Event()  # set while `_is_stopping`
        self._changed = asyncio.Event()
        self._served = asyncio.Event()
        self._serving = self._closed = False
        self._user_count = 0
        self._last_used_s = -math.inf  # never
        self._idle_timer: asyncio.TimerHandle | None = None
        self._starts = _Starts(clock)
        self._retries = Retries("engine")

    @property
    def name(self) -> str:
        """Name of the model."""
        return self._model.name

    @property
    def model(self) -> ModelInfo:
        """Implement `Backend.model`."""
        return self._model

    def idle_since_s(self) -> float | None:
        """Implement `Resident.idle_since_s`."""
        in_use = self._user_count > 0 or self.needs.is_pinned or self._running() is None
        return None if in_use else self._last_used_s

    @property
    def is_leaving(self) -> bool:
        """Implement `Resident.is_leaving`; also true after an idle timeout or a failed start."""
        return self._is_stopping

    def change_terms(self, *, idle_timeout_s: float, is_pinned: bool) -> None:
        """Change when the engine stops. One that is pinned from now on starts by itself."""
        if (idle_timeout_s, is_pinned) == (self._terms.idle_timeout_s, self.needs.is_pinned):
            return
        self.needs = replace(self.needs, is_pinned=is_pinned)
        self._terms = replace(self._terms, idle_timeout_s=idle_timeout_s, needs=self.needs)
        if not (self._user_count or is_pinned):
            self._rest()
        self._notify()

    def fits_now(self) -> bool:
        """Return whether the engine could be started without evicting another one."""
        return self._budget.fits_now(self)

    def evict(self) -> None:
        """Implement `Resident.evict`."""
        assert self.idle_since_s() is not None, "an engine in use is not evicted"
        self._stop()

    def healthy(self) -> bool:
        """Implement `Backend.healthy`."""
        engine = self._engine
        return engine is not None and not self._is_stopping and engine.healthy()

    def statistics(self) -> EngineStatistics:
        """Implement `Backend.statistics`."""
        return EngineStatistics() if self._engine is None else self._engine.statistics()

    def condition(self) -> EngineCondition:
        """Implement `Backend.condition`. LOADING in stage `memory` means waiting for evictions."""
        if self._closed:
            return EngineCondition(EngineState.CLOSED, reason="closed")
        if (fault := self._starts.fault()) is not None:
            wait_s = fault.until_s - self._clock()
            return EngineCondition(
                EngineState.FAILED,
                retry_after_s=wait_s,
                reason=fault.reason,
                client_message=fault.client_message,
            )
        engine = self._running()
        if engine is None:
            return replace(self._without_engine(), starts_on_demand=not self.needs.is_pinned)
        condition = engine.condition()
        if condition.state is not EngineState.LOADING:
            return condition
        return replace(
            condition,
            retry_after_s=self._starts.wait_s(condition.retry_after_s),
            starts_on_demand=not self.needs.is_pinned,
        )

    async def start(self) -> None:
        """Implement `Backend.start`."""
        with self._in_use():
            await self.started()

    async def close(self) -> None:
        """Implement `Backend.close`."""
        self._closed = True
        self._budget.withdraw(self)
        self._stop()
        if self._serving:
            await self._served.wait()

    async def serve(self) -> None:
        """Implement `Backend.serve`."""
        assert not self._serving, "an engine is served once"
        self._serving = True
        try:
            while not self._closed:
                is_wanted = self._user_count > 0 or self.needs.is_pinned
                if is_wanted and self._starts.fault() is None:
                    await self._live()
                else:
                    await self._changed.wait()
        finally:
            self._closed = True
            self._forget_timer()
            self._notify()
            self._served.set()

    async def _live(self) -> None:
        """Wait for memory, run one engine, release the memory."""
        self._is_stopping = False
        self._stopping.clear()
        self._starts.begun()
        if not await self._budget.reserve(self):
            return
        try:
            if self._closed:
                return
            self._terms.place(self._budget.gpus_of(self))
            engine, self._unused = self._unused, None
            engine = engine or await self._built()
            if engine is not None:
                await self._run(engine)
        except (EngineError, OSError) as error:  # the checkpoint has changed
            self._fail(str(error))
        except Exception as error:
            self._fail(f"unexpected error, incident {self._retries.failed(error, self.name)}")
        finally:
            self._budget.release(self)
            self._notify()

    async def _built(self) -> Served | None:
        """Build a new engine; None after any error, since a changed file may raise any."""
        try:
            # In a thread: reads the checkpoint's directory, which may hang with its disk.
            return await asyncio.to_thread(self._build)
        except Exception as error:
            self._fail(str(error) or type(error).__name__)
            return None

    async def _run(self, engine: Served) -> None:
        """Serve an engine until it is stopped."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(engine.serve(), name=f"engine {self.name}")
                self._engine = engine
                tasks.create_task(self._load(engine), name=f"start of {self.name}")
                self._notify()
                if not (self._user_count or self.needs.is_pinned):
                    self._rest()
                await self._stopping.wait()
                await engine.close()
        finally:
            self._engine = None

    async def _load(self, engine: Served) -> None:
        """Start the engine, even if its callers give up, and measure the load time."""
        try:
            await engine.start()
        except EngineStartFailed as error:
            if engine.condition().state is EngineState.FAILED:
                self._fail(str(error), error.client_message)
        except EngineUnavailable:
            pass  # closed while it loaded
        else:
            self._starts.loaded()
            self._notify()

    async def started(self) -> Served:
        """Wait until the engine takes requests; return it, still ready. Raises like `start`."""
        engine = self._engine
        if engine is not None and not self._is_stopping and engine.healthy():  # the common case
            return engine
        while True:
            if self._closed:
                raise EngineUnavailable("the engine is closed", retry_after_s=0.0)
            if (fault := self._starts.fault()) is not None:
                failed = EngineStartFailed(fault.reason, fault.until_s - self._clock())
                raise failed.with_client_message(fault.client_message)
            engine = self._running()
            if engine is None:
                self._notify()  # so that `serve` starts an engine
                await self._changed.wait()
                continue
            try:
                if not engine.healthy():
                    await engine.start()
            except (EngineStartFailed, EngineUnavailable) as error:
                if engine.condition().state is EngineState.FAILED:
                    self._fail(str(error), error.client_message)
                elif self._running() is engine:
                    raise  # temporary: the engine retries by itself
            else:
                if self._running() is engine:
                    return engine

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the engine in use inside the block: neither idle nor evicted."""
        self.begin_use()
        try:
            yield
        finally:
            self.end_use()

    def begin_use(self) -> None:
        """Implement `Stoppable.begin_use`."""
        self._user_count += 1
        if self._idle_timer is not None:
            self._forget_timer()

    def end_use(self) -> None:
        """Implement `Stoppable.end_use`."""
        self._user_count -= 1
        if not (self._user_count or self.needs.is_pinned):
            self._rest()

    def _rest(self) -> None:
        """Become idle: start the idle timer, and allow evictions."""
        self._last_used_s = self._clock()
        self._budget.withdraw(self)
        self._budget.poll()
        if self._terms.idle_timeout_s and self._running() is not None:
            self._forget_timer()
            self._idle_timer = asyncio.get_running_loop().call_later(
                self._terms.idle_timeout_s, self._end_idling
            )

    def _end_idling(self) -> None:
        engine = self._running()
        if engine is None or self._user_count:
            return
        if engine.condition().state is EngineState.LOADING:
            self._rest()  # its caller has gone; idle once it is loaded
            return
        _log.info("stopping engine %s: no request for %g s", self.name, self._terms.idle_timeout_s)
        self._stop()

    def _running(self) -> Served | None:
        """Return the engine that takes new requests, loaded or not; None if there is none."""
        return None if self._is_stopping else self._engine

    def _fail(self, reason: str, client_message: str = "") -> None:
        """Report a permanent fault to all requests and release the memory."""
        self._starts.failed(self.name, reason, client_message)
        self._stop()

    def _stop(self) -> None:
        self._forget_timer()
        self._is_stopping = True
        self._stopping.set()
        self._notify()

    def _forget_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _without_engine(self) -> EngineCondition:
        if self._budget.is_waiting(self):
            reason = f"waiting for memory held by {self._budget.who_holds()}"
            return EngineCondition(
                EngineState.LOADING, 0.0, "memory", self._starts.wait_s(0.0), reason
            )
        if self._user_count:
            return EngineCondition(
                EngineState.LOADING,
                0.0,
                "process",
                self._starts.load_time_s or 0.0,
                "about to start",
            )
        return EngineCondition(
            EngineState.COLD,
            retry_after_s=self._starts.load_time_s or 0.0,
            reason="started by the next request",
        )


class ManagedEngine(ManagedBackend[Engine]):
    """Engine that starts at its first use, and stops when idle or evicted. Implements `Engine`."""

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Implement `Engine.predict_cached_token_count`."""
        engine = self._running()
        return (
            0 if engine is None else engine.predict_cached_token_count(prompt_token_ids, cache_salt)
        )

    def submit(self, request: GenerationRequest, sink: EventSink) -> SequenceHandle:
        """Implement `Engine.submit`. Does not start a cold engine: `start` does.

        The caller keeps the engine in use until it closes the sequence.
        """
        if (engine := self._running()) is None:
            condition = self.condition()
            raise condition.fault(condition.retry_after_s)
        return engine.submit(request, sink)


class ManagedEncoder(ManagedBackend[Encoder]):
    """Encoder that starts at its first use, even while cold. Implements `Encoder`."""

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Implement `Encoder.embed`; start a cold encoder first. Raises like `start`, too."""
        with self._in_use():
            encoder = await self.started()
            return await encoder.embed(request)
