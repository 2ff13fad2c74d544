"""Growth of processor time with the size of an input, and the longest block of an event loop.

`check_growth` runs a call at sizes n and 2n. If its time more than doubles, it also runs the call
at n/4 and n/2, and fails if the time more than doubles in both steps from n/2 to 2n and grows more
than 16 times from n/4 to 2n: caches, and new pages of memory, make one step of linear work up to
nine times as long as the step before, but not two steps in a row.

`LoopWatch` measures the longest block of the running event loop: processor time of one callback, or
processor time of another thread while the loop could not run, because that thread held the
interpreter. `longest_hold` measures the same for one call in a thread. All figures are processor
time, the least of several runs, so other programs on the machine do not change them.

Garbage collection is set as in an api process: objects of the test run are not walked. While growth
is measured it is off: a collection falls on some calls and not on others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import TracebackType
from typing import Any

from api.serving import COLLECT_AFTER, SWITCH_INTERVAL_S

GROWTH_MAX = 2.3  # time of twice the input, in times of the input
GROWTH_OF_THREE_MAX = 16.0  # the same of eight times the input; quadratic work takes 64
BLOCK_MAX_S = 0.020  # of the event loop by Python code of one callback
HOLD_MAX_S = 0.050  # of the interpreter by one call of a library in C
RUNS_MIN = 2  # since a disturbed first run could hide growth
RUNS_MAX = 15  # of a measurement that exceeds its limit
SMALLER_SIZES = {1: (1,), 4: (4, 2)}  # parts of the size that are measured from this run on
SHORT_S = 0.010  # below it, fixed costs and the caches of the processor decide
BEAT_S = 0.001

Call = Callable[[], object]
Prepare = Callable[[int], Call]  # from a size to the call on an input of that size


@dataclass(frozen=True, slots=True)
class Growth:
    """Processor seconds of a call by the size of its input, each size twice the one before."""

    seconds: tuple[float, ...]
    short_s: float = SHORT_S

    @property
    def largest_s(self) -> float:
        """Seconds of the largest input."""
        return self.seconds[-1]

    @property
    def is_linear(self) -> bool:
        """Return whether the time is short, doubles at most in a step, or grows little in all."""
        if self.largest_s <= self.short_s:
            return True
        if len(self.seconds) == 4 and self.largest_s <= GROWTH_OF_THREE_MAX * self.seconds[0]:
            return True
        seconds = [max(seconds, self.short_s / 8) for seconds in self.seconds[-3:]]
        return any(two_s <= GROWTH_MAX * one_s for one_s, two_s in pairwise(seconds))


@dataclass(frozen=True, slots=True)
class Hold:
    """Longest time without a turn for other threads, and the code that ran.

    call_s, error: time of the whole call, and the error in which it ended.
    """

    seconds: float
    where: str
    call_s: float = 0.0
    error: str = ""


@contextlib.contextmanager
def as_in_service() -> Iterator[None]:
    """Set garbage collection and the switch interval as an api process does.

    Objects stay frozen afterwards: each later collection would walk all that the test run has
    imported, 0.2 s and more.
    """
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    callbacks, gc.callbacks[:] = list(gc.callbacks), []  # of test tools
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what earlier tests left behind
        gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        gc.callbacks[:] = callbacks
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)


def cpu_s(call: Call) -> float:
    """Return the processor seconds of one call on this thread. Its errors count as answers."""
    began_at = time.thread_time()
    with contextlib.suppress(Exception):
        call()
    return time.thread_time() - began_at


def growth(prepare: Prepare, size: int, short_s: float = SHORT_S) -> Growth:
    """Measure a call at a size and at twice the size, until it is linear or a few times.

    If the time of the larger size is short, that is all there is to measure.
    """
    calls = [prepare(2 * size)]
    with without_collecting():
        found = Growth((cpu_s(calls[0]),), short_s)
        if found.is_linear:
            return found
        for run in range(1, RUNS_MAX + 1):
            if run in SMALLER_SIZES:
                smaller = [prepare(size // part) for part in SMALLER_SIZES[run]]
                calls = smaller + calls
                found = replace(found, seconds=(*(math.inf for _ in smaller), *found.seconds))
            found = replace(
                found,
                seconds=tuple(
                    min(seconds, cpu_s(call))
                    for seconds, call in zip(found.seconds, calls, strict=True)
                ),
            )
            if run >= RUNS_MIN and found.is_linear:
                break
    return found


def check_growth(name: str, prepare: Prepare, size: int, short_s: float = SHORT_S) -> Growth:
    """Fail if the time of a call grows faster than its input; return the times.

    short_s: time of twice the size below which the processor's caches decide.
    """
    found = growth(prepare, size, short_s)
    assert found.is_linear, f"{name}: " + ", ".join(
        f"{seconds * 1e3:.1f} ms for {2 * size // 2**step}"
        for step, seconds in enumerate(reversed(found.seconds))
    )
    return found


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Collect no garbage in the block."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def check_cost(name: str, call: Call, seconds_max: float) -> None:
    """Fail if a call takes more processor time."""
    seconds = cpu_s(call)
    for _ in range(RUNS_MAX - 1):
        if seconds <= seconds_max:
            return
        seconds = min(seconds, cpu_s(call))
    assert seconds <= seconds_max, f"{name} took {seconds * 1e3:.1f} ms"


def check_hold(
    name: str, call: Call, seconds_max: float = HOLD_MAX_S, call_s_max: float = math.inf
) -> Hold:
    """Fail if a call in a thread keeps others from running for too long, or takes more time.

    Return the least of both.
    """
    found = longest_hold(call)
    for _ in range(RUNS_MAX - 1):
        if found.seconds <= seconds_max and found.call_s <= call_s_max:
            return found
        again = longest_hold(call)
        least = min(found, again, key=lambda hold: hold.seconds)
        found = replace(least, call_s=min(found.call_s, again.call_s))
    assert found.call_s <= call_s_max, f"{name} took {found.call_s * 1e3:.1f} ms"
    assert found.seconds <= seconds_max, (
        f"{name} kept the interpreter for {found.seconds * 1e3:.1f} ms near {found.where};"
        f" longest stretch: {longest_stretch(call)}"
    )
    return found


def longest_hold(call: Call) -> Hold:
    """Run a call in a thread; return the longest time in which this thread had no turn."""
    call_s, ended_in = 0.0, ""

    def run() -> None:
        nonlocal call_s, ended_in
        started.set()
        try:
            call()
        except Exception as error:
            ended_in = str(error)
        call_s = time.thread_time()

    started = threading.Event()
    worker = threading.Thread(target=run)
    worker.start()
    started.wait()
    found = Hold(0.0, "nothing")
    seen_s = 0.0
    while worker.is_alive():
        worker.join(BEAT_S)
        if (now_s := thread_cpu_s(worker)) is None:
            break
        found = max(found, Hold(now_s - seen_s, location_of(worker)), key=lambda hold: hold.seconds)
        seen_s = now_s
    worker.join()
    # The thread may end before this one has a turn.
    last = Hold(call_s - seen_s, "the end of the call")
    longest = max(found, last, key=lambda hold: hold.seconds)
    return replace(longest, call_s=call_s, error=ended_in)


def longest_stretch(call: Call) -> str:
    """Return the place and time of the longest stretch of a call without another call in Python."""
    before, longest = (time.thread_time(), "the beginning"), (0.0, "")

    def profile(frame: Any, event: str, function: Any) -> None:
        nonlocal before, longest
        now_s = time.thread_time()
        longest = max(longest, (now_s - before[0], before[1]))
        what = repr(function) if event.startswith("c_") else event
        before = time.thread_time(), f"{frame.f_code.co_qualname}:{frame.f_lineno} {what}"

    sys.setprofile(profile)
    try:
        with contextlib.suppress(Exception):
            call()
    finally:
        sys.setprofile(None)
    return f"{longest[1]}, {longest[0] * 1e3:.1f} ms"


def thread_cpu_s(thread: threading.Thread) -> float | None:
    """Return the processor seconds of another thread; None if it has ended."""
    if thread.ident is None or not thread.is_alive():
        return None
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except (OSError, OverflowError):
        return None


def location_of(thread: threading.Thread) -> str:
    """Return the function that a thread runs, with its line."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "the end of the thread"
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


class LoopWatch:
    """Longest block of the event loop of this thread while the context is open.

    A step of a task or a callback counts with its processor time. Threads whose name begins with
    one of `threads` count with the processor time that they used between two turns of the loop: a
    thread that gives up the interpreter lets the loop have its turn.
    """

    def __init__(self, *threads: str) -> None:
        """threads: beginnings of the names of threads that work for the loop."""
        self._threads = threads
        self._seen: dict[threading.Thread, float] = {}
        self.longest = Hold(0.0, "nothing")
        self.steps = 0

    def __enter__(self) -> LoopWatch:
        self._service = as_in_service()
        self._service.__enter__()
        self._loop_thread = threading.get_ident()
        self._run = asyncio.events.Handle._run
        watch, run = self, self._run

        def timed(handle: asyncio.Handle) -> None:
            if threading.get_ident() != watch._loop_thread:
                run(handle)
                return
            began_at = time.thread_time()
            name = name_of(handle)
            run(handle)
            watch._note(Hold(time.thread_time() - began_at, name))

        self._sample_threads()
        self.longest = Hold(0.0, "nothing")
        asyncio.events.Handle._run = timed  # type: ignore[assignment, method-assign]
        self._beat = asyncio.get_running_loop().call_soon(self._sample)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._beat.cancel()
        self._sample_threads()
        asyncio.events.Handle._run = self._run  # type: ignore[method-assign]
        self._service.__exit__(None, None, None)

    def restart(self) -> None:
        """Forget what was measured so far."""
        self._sample_threads()
        self.longest = Hold(0.0, "nothing")

    def _note(self, hold: Hold) -> None:
        self.steps += 1
        if hold.seconds > self.longest.seconds:
            self.longest = hold

    def _sample(self) -> None:
        self._sample_threads()
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._sample)

    def _sample_threads(self) -> None:
        for thread in threading.enumerate():
            if thread.name.startswith(self._threads) and self._threads:
                if (now_s := thread_cpu_s(thread)) is None:
                    continue
                used_s = now_s - self._seen.get(thread, 0.0)
                self._seen[thread] = now_s
                self._note(Hold(used_s, f"thread {thread.name}: {location_of(thread)}"))


def name_of(handle: Any) -> str:
    """Return the name of a callback, or of the coroutines whose task it steps."""
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    names: list[str] = []
    coroutine: Any = task.get_coro()
    while (name := getattr(coroutine, "__qualname__", None)) is not None:
        names.append(str(name))
        coroutine = getattr(coroutine, "cr_await", None)
    return " > ".join(names)
