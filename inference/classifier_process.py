"""The parent's side of the classifier process: its queue, its batches, its life.

Whatever happens there, callers here wait a bounded time and get scores or `SafetyUnavailable`; nobody else waits at all. A process
that ends or hangs is started again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inference.child_process import ChildProcess, open_child
from inference.classifier_protocol import (
    BatchScored,
    ClassifiersFailed,
    ClassifiersReady,
    ClassifyBatch,
    FromClassifiers,
    LoadClassifiers,
    ToClassifiers,
    decode_from_classifiers,
    encode,
)
from inference.errors import SafetyUnavailable
from inference.host_protocol import ProtocolBroken
from inference.watchdog import Watchdog

WAITING_COUNT_MAX = 256  # texts: more than that cannot be scored within any sane timeout on one core
BATCH_CHARS_MAX = 4000  # some 1,000 tokens: a larger batch makes everybody wait longer and computes no faster on one core
LOAD_TIMEOUT_S = 120.0
HANG_TIMEOUTS = 4  # a batch that takes so many times what a caller waits is not slow, it hangs
RESTART_DELAY_S_MIN, RESTART_DELAY_S_MAX = 0.2, 30.0
STABLE_AFTER_S = 60.0
CHILD_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}

_log = logging.getLogger("weir.inference.classifiers")


@dataclass(frozen=True, slots=True)
class ClassifierStatistics:
    """Counts since the start. waiting_count_peak: of texts that waited at once."""

    waiting_count: int
    waiting_count_peak: int
    scored_count: int
    batch_count: int
    restart_count: int


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    index: int
    text: str
    scores: asyncio.Future[list[float]]


class _Child(ChildProcess):
    def send(self, message: ToClassifiers) -> None:
        self.write(encode(message))

    async def receive(self) -> FromClassifiers | None:
        body = await self.read()
        return None if body is None else decode_from_classifiers(body)


class ClassifierProcess:
    """All classifiers of this API process, in one child. Belongs to one event loop."""

    def __init__(self, directories: Sequence[Path], *, timeout_s: float) -> None:
        """Starts nothing. timeout_s: what a caller waits for scores."""
        self._directories = tuple(directories)
        self._timeout_s = timeout_s
        self._child: _Child | None = None
        self._waiting: deque[_Waiting] = deque()
        self._under_way: list[_Waiting] = []
        self._number = 0
        self._waiting_count_peak = self._scored_count = self._restart_count = 0
        self._reason = "they are being loaded"
        self._first_load: asyncio.Future[str | None] | None = None
        self._watchdog = Watchdog(HANG_TIMEOUTS * timeout_s, self._kill_hanging)

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none that scores."""
        return None if self._child is None else self._child.pid

    def statistics(self) -> ClassifierStatistics:
        """As of now."""
        return ClassifierStatistics(
            len(self._waiting), self._waiting_count_peak, self._scored_count, self._number, self._restart_count
        )

    async def score(self, asks: Sequence[tuple[int, str]]) -> list[list[float]]:
        """Scores of each text by the classifier of that index. Raises `SafetyUnavailable`."""
        if len(self._waiting) + len(asks) > WAITING_COUNT_MAX:
            raise SafetyUnavailable(f"{len(self._waiting)} texts wait for the safety classifiers", self._timeout_s)
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(index, text, loop.create_future()) for index, text in asks]
        self._waiting.extend(waiting)
        self._waiting_count_peak = max(self._waiting_count_peak, len(self._waiting))
        self._send_next()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.gather(*(each.scores for each in waiting))
        except TimeoutError:
            why = "they are slow" if self._child is not None else self._reason
            raise SafetyUnavailable(
                f"the safety classifiers have not answered within {self._timeout_s:g} s: {why}", self._timeout_s
            ) from None
        finally:
            for each in waiting:
                each.scores.cancel()
            # What nobody waits for any more is not computed.
            self._waiting = deque(each for each in self._waiting if not each.scores.done())

    async def loaded(self) -> str | None:
        """Wait until the first attempt to load is over, which `serve` makes; why it failed, None if it did not."""
        if self._first_load is None:
            self._first_load = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._first_load)

    async def serve(self) -> None:
        """Keep a child alive until cancelled."""
        if self._first_load is None:
            self._first_load = asyncio.get_running_loop().create_future()
        delay_s, clock = RESTART_DELAY_S_MIN, asyncio.get_running_loop().time
        while True:
            started_at_s = clock()
            await self._run_child()
            if not self._first_load.done():
                self._first_load.set_result(self._reason)
            _log.error("classifiers: %s", self._reason)
            self._restart_count += 1
            delay_s = RESTART_DELAY_S_MIN if clock() - started_at_s > STABLE_AFTER_S else min(2 * delay_s, RESTART_DELAY_S_MAX)
            await asyncio.sleep(delay_s)

    async def _run_child(self) -> None:
        """One life of a child. Leaves the reason of its end."""
        reason = "their process could not be started"
        try:
            async with open_child(_Child, "inference.classifier_host", CHILD_ENVIRONMENT) as child:
                try:
                    if await self._load(child):
                        while (message := await child.receive()) is not None:
                            self._take(message)
                        await child.wait_gone(self._timeout_s)
                        self._reason = f"their process ended with status {child.exit_status}"
                finally:
                    self._lose(child)
        except (ProtocolBroken, OSError) as error:
            self._reason = f"{reason}: {error}"

    async def _load(self, child: _Child) -> bool:
        """Whether the child has loaded everything; else `_reason` tells."""
        child.send(LoadClassifiers([str(directory) for directory in self._directories]))
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                message = await child.receive()
        except TimeoutError:
            self._reason = f"loading took more than {LOAD_TIMEOUT_S:.0f} s"
            return False
        match message:
            case ClassifiersReady():
                self._child = child
                assert self._first_load is not None
                if not self._first_load.done():
                    self._first_load.set_result(None)
                self._watchdog.arm()
                self._send_next()
                return True
            case ClassifiersFailed(message=why):
                self._reason = why
            case _:
                self._reason = "their process ended while it was loading"
        return False

    def _take(self, message: FromClassifiers) -> None:
        if not isinstance(message, BatchScored) or message.number != self._number:
            raise ProtocolBroken(f"unexpected: {message!r}"[:200])
        if message.fault is None and len(message.scores) != len(self._under_way):
            raise ProtocolBroken(f"{len(message.scores)} scores for {len(self._under_way)} texts")
        self._watchdog.heard()
        done, self._under_way = self._under_way, []
        if message.fault is None:
            self._scored_count += len(done)
        for place, each in enumerate(done):
            if each.scores.done():
                continue  # its caller has left
            if message.fault is None:
                each.scores.set_result(message.scores[place])
            else:
                each.scores.set_exception(self._unavailable(message.fault))
        self._send_next()

    def _send_next(self) -> None:
        """Send what waits, as far as it fits one batch, unless a batch is under way."""
        if self._child is None or self._under_way:
            return
        char_count = 0
        while self._waiting and (not self._under_way or char_count + len(self._waiting[0].text) <= BATCH_CHARS_MAX):
            each = self._waiting.popleft()
            if not each.scores.done():
                self._under_way.append(each)
                char_count += len(each.text)
        if self._under_way:
            self._number += 1
            self._watchdog.heard()
            self._child.send(ClassifyBatch(self._number, [(each.index, each.text) for each in self._under_way]))

    def _lose(self, child: _Child) -> None:
        """The child is gone: what it had fails, since it may be the cause; what waits goes on waiting for the next one."""
        if self._child is child:
            self._child = None
            self._watchdog.disarm()
        lost, self._under_way = self._under_way, []
        for each in lost:
            if not each.scores.done():
                each.scores.set_exception(self._unavailable("their process ended"))

    def _unavailable(self, why: str) -> SafetyUnavailable:
        return SafetyUnavailable(f"the safety classifiers have not answered: {why}", self._timeout_s)

    def _kill_hanging(self, silence_s: float) -> None:
        if self._child is not None and self._under_way:
            _log.error("classifiers: no answer for %.0f s, killing the process", silence_s)
            self._child.kill()
