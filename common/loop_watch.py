"""Watchdog thread of an event loop: its heartbeat, its longest block, and the work in it.

No callback may block the loop for long, since every stream waits for it. A thread that finds it
blocked samples the loop's stack; the entry points of work mark what they do in `CURRENT`. Marks are
plain attributes, because a thread cannot read the context variables of another one. The thread
formats and logs, never the loop.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping
from typing import Protocol

from common.incidents import INCIDENT_COUNTS, log_incident

BEAT_S = 0.05  # between two beats of the loop; a block is measured to this accuracy
CHECK_INTERVAL_S = 0.05  # between two polls of the thread
BLOCK_S = 0.2  # a longer block is an incident: every stream is several tokens late
SAMPLE_S = BLOCK_S / 2  # silence before the first sample; each later one doubles it
FRAMES_MAX = 12  # number of innermost frames in the log
SOURCE = "event_loop"  # name of this source of incidents
READERS = ("scrape", "otlp")  # of the longest block since the previous reading
PACKAGES = frozenset({"api", "common", "inference", "metering", "weir_client"})
# Modules whose frames are innermost while the loop waits for something to do.
IDLE_MODULES = frozenset({"asyncio.base_events", "asyncio.runners", "selectors", "uvloop"})


class Doing(Protocol):
    """Work that the loop does for a caller: a request, by its path and API key."""

    def facts(self) -> Mapping[str, str]:
        """Return the path and the ids of key and organization for the log, never a secret."""
        ...


class CurrentWork:
    """Work of the running callback. The loop writes it and the watching thread reads it.

    `work` is None between two pieces of work, and a path where nothing else is known yet. `stage`
    names the phase, such as "parse" or "validate"; it is empty if the code did not set one.
    """

    __slots__ = ("stage", "work")

    def __init__(self) -> None:
        self.work: Doing | str | None = None
        self.stage = ""


CURRENT = CurrentWork()


class Stage:
    """Context manager that names the phase of a block, for the watching thread; must not await."""

    __slots__ = ("_before", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._before = ""

    def __enter__(self) -> None:
        self._before, CURRENT.stage = CURRENT.stage, self._name

    def __exit__(self, *exception: object) -> None:
        CURRENT.stage = self._before


class LoopBlocked(Exception):
    """A callback held the event loop for too long."""


class Sample:
    """Current work of the loop, and its stack, at one moment."""

    def __init__(self, frame: types.FrameType, work: Doing | str | None, stage: str) -> None:
        self.is_idle = frame.f_globals.get("__name__") in IDLE_MODULES
        self.stage = stage
        self.facts = {"path": work} if isinstance(work, str) else work.facts() if work else {}
        self.function = function_of(frame)
        self.stack = "".join(traceback.format_stack(frame, limit=FRAMES_MAX)).rstrip()


def function_of(frame: types.FrameType | None) -> str:
    """Find the innermost function of this project on the stack; empty if there is none."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] in PACKAGES:
            return f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return ""


class LoopWatch:
    """Watchdog of the event loop of the thread that creates it. `start` starts the watching thread.

    Time in which the whole process did not run is not counted: it was stopped, or other processes
    took the CPUs.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0  # block since the start
        self._longest_recent_s = dict.fromkeys(READERS, 0.0)  # since its last `take_longest_s`
        self._beat_at = time.monotonic()
        self._lag_s: float | None = None  # the longest one reported since the last poll
        self._thread_id = threading.get_ident()
        self._checked_at, self._used_s = time.monotonic(), time.process_time()
        self._absent_s = 0.0  # since the last beat
        self._sample: Sample | None = None
        self._sample_at_s = SAMPLE_S
        self._stopping = threading.Event()
        INCIDENT_COUNTS.setdefault(SOURCE, 0)

    def beat(self, lag_s: float) -> None:
        """Report from the loop that it runs. `lag_s` is how many seconds late the report is."""
        self._beat_at = time.monotonic()
        self._lag_s = max(self._lag_s or 0.0, lag_s)

    @property
    def silence_s(self) -> float:
        """Seconds since the last `beat`. Thread-safe."""
        return time.monotonic() - self._beat_at

    def take_longest_s(self, reader: str) -> float:
        """Return the longest block since this reader's previous call, in seconds, and reset it."""
        longest_s, self._longest_recent_s[reader] = self._longest_recent_s[reader], 0.0
        return longest_s

    def start(self) -> None:
        """Start the watching thread, which ends with `stop` or with the process."""
        self._checked_at, self._used_s = time.monotonic(), time.process_time()
        threading.Thread(target=self._run, name="weir-loop-watch", daemon=True).start()

    def stop(self) -> None:
        """Ask the watching thread to end; does not wait for it."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(CHECK_INTERVAL_S):
            self._check()

    def _check(self) -> None:
        now, used_s = time.monotonic(), time.process_time()
        late_s = now - self._checked_at - CHECK_INTERVAL_S
        if late_s > CHECK_INTERVAL_S:  # this thread waited: for the interpreter, or for a CPU
            self._absent_s += max(late_s - (used_s - self._used_s), 0.0)
        self._checked_at, self._used_s = now, used_s
        lag_s, self._lag_s = self._lag_s, None
        if lag_s is not None:
            self._ended(lag_s - self._absent_s)
        elif (silence_s := self.silence_s - BEAT_S - self._absent_s) > self._sample_at_s:
            # The last one is from the second half of the block, where most of its time went.
            self._sample_at_s = 2 * silence_s
            frame = sys._current_frames().get(self._thread_id)
            if frame is not None:
                self._sample = Sample(frame, CURRENT.work, CURRENT.stage)

    def _ended(self, blocked_s: float) -> None:
        """Count a block of the loop; report a long one with the work that was sampled in it."""
        sample, self._sample = self._sample, None
        self._absent_s, self._sample_at_s = 0.0, SAMPLE_S
        self.longest_s = max(self.longest_s, blocked_s)
        for reader, longest_s in self._longest_recent_s.items():
            self._longest_recent_s[reader] = max(longest_s, blocked_s)
        if blocked_s > BLOCK_S and sample is not None and not sample.is_idle:
            INCIDENT_COUNTS[SOURCE] += 1
            log_incident(
                LoopBlocked(f"the event loop was blocked for {blocked_s * 1000:.0f} ms"),
                source=SOURCE,
                blocked_ms=round(blocked_s * 1000),
                stage=sample.stage,
                function=sample.function,
                stack=sample.stack,
                **sample.facts,
            )
