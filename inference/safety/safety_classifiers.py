"""Classifiers as checkers of prompts and outputs, and the parent's side of the process that runs them.

Whatever happens there, callers wait a bounded time and get scores or `SafetyUnavailable`; nobody else waits at all. A process
that ends or hangs is started again after a pause.

    output   [ given out ... | context | window ]      scored together: context and window; let go after it: the window
                                                       held: never more than a window and a token's text

Prompts are scored in overlapping pieces, a few at a time, so that a long one takes turns with others.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.backoff import Backoff
from inference.errors import SafetyUnavailable
from inference.safety.classifier_host import BatchScored, ClassifyBatch, LoadClassifiers
from inference.safety.safety import OutputCheck, Verdict
from inference.workers.batches import BatchQueue
from inference.workers.process import HostProcess, Watchdog, open_host
from inference.workers.protocol import LoadFailed, Message, ProtocolBroken, Ready, decoder_to_parent

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

MESSAGES = decoder_to_parent(BatchScored)
_log = logging.getLogger("weir.inference.safety")


@dataclass(frozen=True, slots=True)
class ClassifierStatistics:
    """Counts since the start. waiting_count_peak: of texts that waited at once."""

    waiting_count: int
    waiting_count_peak: int
    scored_count: int
    batch_count: int
    restart_count: int


class ClassifierProcess:
    """All classifiers of this API process, in one child. Belongs to one event loop."""

    def __init__(self, directories: Sequence[Path], *, timeout_s: float) -> None:
        """Starts nothing. timeout_s: what a caller waits for scores."""
        self._directories = tuple(directories)
        self._timeout_s = timeout_s
        self._child: HostProcess | None = None
        self._queue: BatchQueue[tuple[int, str], list[float]] = BatchQueue(BATCH_CHARS_MAX)
        self._restart_count = 0
        self._reason = "they are being loaded"
        self._tried = asyncio.Event()  # the first attempt to load is over
        self._first_failure: str | None = None
        self._watchdog = Watchdog(HANG_TIMEOUTS * timeout_s, self._kill_hanging)

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none that scores."""
        return None if self._child is None else self._child.pid

    def statistics(self) -> ClassifierStatistics:
        queue = self._queue
        return ClassifierStatistics(
            queue.waiting_count, queue.waiting_count_peak, queue.done_count, queue.batch_count, self._restart_count
        )

    async def score(self, asks: Sequence[tuple[int, str]]) -> list[list[float]]:
        """Scores of each text by the classifier of that index. Raises `SafetyUnavailable`."""
        if self._queue.waiting_count + len(asks) > WAITING_COUNT_MAX:
            raise SafetyUnavailable(f"{self._queue.waiting_count} texts wait for the safety classifiers", self._timeout_s)
        waiting = self._queue.put((ask, len(ask[1])) for ask in asks)
        self._send_next()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.gather(*(each.result for each in waiting))
        except TimeoutError:
            why = "they are slow" if self._child is not None else self._reason
            raise SafetyUnavailable(
                f"the safety classifiers have not answered within {self._timeout_s:g} s: {why}", self._timeout_s
            ) from None
        finally:
            self._queue.drop(waiting)

    async def loaded(self) -> str | None:
        """Wait until the first attempt to load is over, which `serve` makes; why it failed, None if it did not."""
        await self._tried.wait()
        return self._first_failure

    async def serve(self) -> None:
        """Keep a child alive until cancelled."""
        backoff, clock = Backoff(RESTART_DELAY_S_MIN, RESTART_DELAY_S_MAX), asyncio.get_running_loop().time
        while True:
            started_at_s = clock()
            await self._run_child()
            if not self._tried.is_set():
                self._first_failure = self._reason
                self._tried.set()
            _log.error("classifiers: %s", self._reason)
            self._restart_count += 1
            if clock() - started_at_s > STABLE_AFTER_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _run_child(self) -> None:
        """One life of a child. Leaves the reason of its end."""
        try:
            async with open_host("inference.safety.classifier_host", CHILD_ENVIRONMENT) as child:
                try:
                    if await self._load(child):
                        while (message := await child.receive(MESSAGES)) is not None:
                            self._take(message)
                        await child.wait_gone(self._timeout_s)
                        self._reason = f"their process ended with status {child.exit_status}"
                finally:
                    self._lose(child)
        except (ProtocolBroken, OSError) as error:
            self._reason = f"their process could not be started: {error}"

    async def _load(self, child: HostProcess) -> bool:
        """Whether the child has loaded everything; else `_reason` tells."""
        child.send(LoadClassifiers([str(directory) for directory in self._directories]))
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                message = await child.receive(MESSAGES)
        except TimeoutError:
            self._reason = f"loading took more than {LOAD_TIMEOUT_S:.0f} s"
            return False
        match message:
            case Ready():
                self._child = child
                self._tried.set()
                self._watchdog.arm()
                self._send_next()
                return True
            case LoadFailed(message=why):
                self._reason = why
            case _:
                self._reason = "their process ended while it was loading"
        return False

    def _take(self, message: Message) -> None:
        if not isinstance(message, BatchScored) or message.number != self._queue.batch_count:
            raise ProtocolBroken(f"unexpected: {message!r}"[:200])
        if message.fault is None and len(message.scores) != self._queue.under_way_count:
            raise ProtocolBroken(f"{len(message.scores)} scores for {self._queue.under_way_count} texts")
        self._watchdog.heard()
        if message.fault is None:
            self._queue.answer(message.scores)
        else:
            fault = message.fault
            self._queue.fail_batch(lambda: self._unavailable(fault))
        self._send_next()

    def _send_next(self) -> None:
        """Send what waits, as far as it fits one batch, unless a batch is under way."""
        if self._child is not None and (batch := self._queue.take_batch()):
            self._watchdog.heard()
            self._child.send(ClassifyBatch(self._queue.batch_count, batch))

    def _lose(self, child: HostProcess) -> None:
        """The child is gone: what it had fails, since it may be the cause; what waits goes on waiting for the next one."""
        if self._child is child:
            self._child = None
            self._watchdog.disarm()
        self._queue.fail_batch(lambda: self._unavailable("their process ended"))

    def _unavailable(self, why: str) -> SafetyUnavailable:
        return SafetyUnavailable(f"the safety classifiers have not answered: {why}", self._timeout_s)

    def _kill_hanging(self, silence_s: float) -> None:
        if self._child is not None and self._queue.under_way_count:
            _log.error("classifiers: no answer for %.0f s, killing the process", silence_s)
            self._child.kill()


HOLD_S_MAX = 1.0  # seconds: text of a slow model is checked after so long, though its window is not full
PIECE_CHARS = 1000  # of a prompt: some 250 tokens, one row of any classifier in most scripts
PIECE_OVERLAP_CHARS = 200  # so that what lies across a border is whole in one of both pieces
PIECES_AT_ONCE = 4  # of one prompt in the queue: the rest of it comes after what others have put there meanwhile


@dataclass(frozen=True, slots=True)
class ClassifierRule:
    """Which scores of one classifier forbid a text.

    index: of the classifier in its process. thresholds: (place of the label in the scores, label, lowest score that forbids).
    """

    name: str
    index: int
    thresholds: tuple[tuple[int, str, float], ...]
    in_prompt: bool
    in_output: bool

    def hit(self, scores: Sequence[float]) -> str | None:
        """The forbidden label with its classifier's name; None if none reaches its threshold."""
        for place, label, threshold in self.thresholds:
            if scores[place] >= threshold:
                return f"{self.name}: {label}"
        return None


@dataclass(frozen=True, slots=True)
class ClassifierTerms:
    """How outputs are cut, and what happens when no answer comes. Durations in seconds."""

    window_chars: int = 200
    context_chars: int = 400
    timeout_s: float = 5.0
    when_unavailable: Literal["refuse", "allow"] = "refuse"


class ClassifierChecker:
    """Implements `SafetyChecker` by asking the classifier process."""

    def __init__(self, process: ClassifierProcess, rules: Sequence[ClassifierRule], terms: ClassifierTerms) -> None:
        self._process = process
        self._prompt_rules = tuple(rule for rule in rules if rule.in_prompt)
        self._output_rules = tuple(rule for rule in rules if rule.in_output)
        self._terms = terms

    async def check_prompt(self, text: str) -> str | None:
        if not self._prompt_rules or not text:
            return None
        pieces = pieces_of(text)
        for start in range(0, len(pieces), PIECES_AT_ONCE):
            hit = await self._find(pieces[start : start + PIECES_AT_ONCE], self._prompt_rules)
            if hit is not None:
                return hit
        return None

    def open_output(self) -> OutputCheck | None:
        if not self._output_rules:
            return None
        return ClassifierOutputCheck(lambda text: self._find(pieces_of(text), self._output_rules), self._terms)

    async def _find(self, texts: Sequence[str], rules: Sequence[ClassifierRule]) -> str | None:
        asks = [(rule.index, text) for text in texts for rule in rules]
        try:
            scored = await self._process.score(asks)
        except SafetyUnavailable as error:
            if self._terms.when_unavailable == "refuse":
                raise
            _log.warning("let through unchecked, as configured: %s", error)
            return None
        hits = (rule.hit(scores) for rule, scores in zip([rule for _ in texts for rule in rules], scored, strict=True))
        return next((hit for hit in hits if hit is not None), None)


class ClassifierOutputCheck:
    """Implements `OutputCheck`: window by window."""

    def __init__(
        self,
        find: Callable[[str], Awaitable[str | None]],
        terms: ClassifierTerms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """find: what is wrong with a text, if anything."""
        self._find = find
        self._terms = terms
        self._clock = clock
        self._context = ""
        self._window = ""
        self._window_since_s = -math.inf
        self._safe_char_count = 0
        self._hit: str | None = None

    async def push(self, text: str) -> Verdict:
        """See `OutputCheck.push`. Waits for the classifier when the window is full, or its oldest text old."""
        if text and not self._window:
            self._window_since_s = self._clock()
        self._window += text
        full = len(self._window) >= self._terms.window_chars
        if full or (self._window and self._clock() - self._window_since_s >= HOLD_S_MAX):
            await self._check()
        return Verdict(self._safe_char_count, self._hit)

    async def finish(self) -> Verdict:
        if self._window:
            await self._check()
        return Verdict(self._safe_char_count, self._hit)

    def fork(self) -> OutputCheck:
        return copy.copy(self)

    async def _check(self) -> None:
        if self._hit is not None:
            return
        text = self._context + self._window
        self._hit = await self._find(text)
        if self._hit is None:
            self._safe_char_count += len(self._window)
            self._context = text[-self._terms.context_chars :] if self._terms.context_chars else ""
            self._window = ""


def pieces_of(text: str) -> list[str]:
    """The text in overlapping pieces; one if it is short."""
    step = PIECE_CHARS - PIECE_OVERLAP_CHARS
    return [text[start : start + PIECE_CHARS] for start in range(0, max(len(text) - PIECE_OVERLAP_CHARS, 1), step)]
