"""Safety checks by classifiers, which run in a child process.

Callers wait a bounded time for scores or `SafetyUnavailable`; other requests are not delayed. A
process that ends or hangs is restarted after a delay.

    output   [ released ... | context | window ]      context and window are scored together; then
                                                      the window is released held back: at most a
                                                      window and a token's text

Prompts are scored in overlapping pieces, a few at a time, so that long prompts do not block others.
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
from inference.safety.classifier_worker import BatchScored, ClassifyBatch, LoadClassifiers
from inference.safety.safety import (
    OutputCheck,
    Verdict,
)
from inference.workers.batches import BatchQueue
from inference.workers.process import WorkerProcess, open_worker
from inference.workers.protocol import LoadFailed, Message, ProtocolBroken, Ready, decoder_to_parent
from inference.workers.worker import Watchdog

HOLD_S_MAX = 1.0  # seconds after which text of a slow model is checked before its window is full
PIECE_CHARS = 1000  # of a prompt: about 250 tokens, one classifier row in most scripts
PIECE_OVERLAP_CHARS = 200  # so that passages across a border are whole in one piece
PIECES_AT_ONCE = 4  # queued per prompt: the rest is queued behind the texts of other callers
_log = logging.getLogger("weir.inference.safety")
WAITING_COUNT_MAX = 256  # texts: more cannot be scored within a reasonable timeout on one core
BATCH_CHARS_MAX = 4000  # about 1,000 tokens: larger batches only increase latency on one core
LOAD_TIMEOUT_S = 120.0
HANG_TIMEOUTS = 4  # a batch that takes this many caller timeouts counts as hanging
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
RESTART_DELAY_S_MIN, RESTART_DELAY_S_MAX = 0.2, 30.0


class ClassifierProcess:
    """Safety classifiers of this API process, in one child process. Bound to one event loop."""

    def __init__(self, directories: Sequence[Path], *, timeout_s: float) -> None:
        """Start nothing; `serve` does. Callers wait at most `timeout_s` seconds for scores."""
        self._directories = tuple(directories)
        self._timeout_s = timeout_s
        self._child: WorkerProcess | None = None
        self.queue: BatchQueue[tuple[int, str], list[float]] = BatchQueue(BATCH_CHARS_MAX)
        self.restart_count = 0
        self._reason = "they are being loaded"
        self._tried = asyncio.Event()  # set after the first attempt to load
        self._first_failure: str | None = None
        self._watchdog = Watchdog(HANG_TIMEOUTS * timeout_s, self._kill_hanging)

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while it is not serving."""
        return None if self._child is None else self._child.pid

    async def score(self, asks: Sequence[tuple[int, str]]) -> list[list[float]]:
        """Score texts, each by the classifier at its index. Raises SafetyUnavailable."""
        if self.queue.waiting_count + len(asks) > WAITING_COUNT_MAX:
            raise SafetyUnavailable(
                f"{self.queue.waiting_count} texts wait for the safety classifiers", self._timeout_s
            )
        waiting = self.queue.put((ask, len(ask[1])) for ask in asks)
        self._send_next()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.gather(*(each.result for each in waiting))
        except TimeoutError:
            why = "they are slow" if self._child is not None else self._reason
            raise SafetyUnavailable(
                f"the safety classifiers have not answered within {self._timeout_s:g} s: {why}",
                self._timeout_s,
            ) from None
        finally:
            self.queue.drop(waiting)

    async def loaded(self) -> str | None:
        """Wait until `serve` has first tried to load; return the failure, or None on success."""
        await self._tried.wait()
        return self._first_failure

    async def serve(self) -> None:
        """Keep a child process running, restarting it after it ends, until cancelled."""
        backoff = Backoff(RESTART_DELAY_S_MIN, RESTART_DELAY_S_MAX)
        clock = asyncio.get_running_loop().time
        while True:
            started_at_s = clock()
            await self._run_child()
            if not self._tried.is_set():
                self._first_failure = self._reason
                self._tried.set()
            _log.error("classifiers: %s", self._reason)
            self.restart_count += 1
            if clock() - started_at_s > STABLE_AFTER_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _run_child(self) -> None:
        """Run one child process until it ends, and record the reason."""
        try:
            async with open_worker(
                "inference.safety.classifier_worker", CHILD_ENVIRONMENT
            ) as child:
                try:
                    if await self._load(child):
                        while (message := await child.receive(MESSAGES)) is not None:
                            self._take(message)
                        await child.wait_gone(self._timeout_s)
                        self._reason = f"their process ended with status {child.exit_status}"
                finally:
                    self._child = None
                    self._watchdog.disarm()
                    # The batch may be the cause, so it fails; other texts wait.
                    self.queue.fail_batch(lambda: self._unavailable("their process ended"))
        except (ProtocolBroken, OSError) as error:
            self._reason = f"their process could not be started: {error}"

    async def _load(self, child: WorkerProcess) -> bool:
        """Load the child's classifiers; return whether that worked, otherwise set `_reason`."""
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
        if not isinstance(message, BatchScored) or message.number != self.queue.batch_count:
            raise ProtocolBroken(f"unexpected: {message!r}"[:200])
        if message.fault is None and len(message.scores) != self.queue.under_way_count:
            raise ProtocolBroken(
                f"{len(message.scores)} scores for {self.queue.under_way_count} texts"
            )
        self._watchdog.heard()
        if (fault := message.fault) is None:
            self.queue.answer(message.scores)
        else:
            self.queue.fail_batch(lambda: self._unavailable(fault))
        self._send_next()

    def _send_next(self) -> None:
        """Send the next batch of waiting texts, unless a batch is in progress."""
        if self._child is not None and (batch := self.queue.take_batch()):
            self._watchdog.heard()
            self._child.send(ClassifyBatch(self.queue.batch_count, batch))

    def _unavailable(self, why: str) -> SafetyUnavailable:
        return SafetyUnavailable(
            f"the safety classifiers have not answered: {why}", self._timeout_s
        )

    def _kill_hanging(self, silence_s: float) -> None:
        if self._child is not None and self.queue.under_way_count:
            _log.error("classifiers: no answer for %.0f s, killing the process", silence_s)
            self._child.kill()


@dataclass(frozen=True, slots=True)
class ClassifierRule:
    """Score thresholds of one classifier.

    `index` is that of the classifier in its process. Each threshold is (index of the label in the
    scores, label, lowest forbidden score).
    """

    name: str
    index: int
    thresholds: tuple[tuple[int, str, float], ...]
    in_prompt: bool
    in_output: bool

    def hit(self, scores: Sequence[float]) -> str | None:
        """Name the classifier and label of the first threshold reached; None if there is none."""
        for index, label, threshold in self.thresholds:
            if scores[index] >= threshold:
                return f"{self.name}: {label}"
        return None


@dataclass(frozen=True, slots=True)
class ClassifierTerms:
    """Window sizes of output checks, timeouts in seconds, and behaviour without an answer."""

    window_chars: int = 200
    context_chars: int = 400
    timeout_s: float = 5.0
    when_unavailable: Literal["refuse", "allow"] = "refuse"


class ClassifierChecker:
    """Implement `SafetyChecker` with the classifier process."""

    def __init__(
        self, process: ClassifierProcess, rules: Sequence[ClassifierRule], terms: ClassifierTerms
    ) -> None:
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
        return ClassifierOutputCheck(
            lambda text: self._find(pieces_of(text), self._output_rules), self._terms
        )

    async def _find(self, texts: Sequence[str], rules: Sequence[ClassifierRule]) -> str | None:
        asks = [(rule.index, text) for text in texts for rule in rules]
        try:
            scored = await self._process.score(asks)
        except SafetyUnavailable as error:
            if self._terms.when_unavailable == "refuse":
                raise
            _log.warning("let through unchecked, as configured: %s", error)
            return None
        requested = [rule for _ in texts for rule in rules]
        hits = (rule.hit(scores) for rule, scores in zip(requested, scored, strict=True))
        return next((hit for hit in hits if hit is not None), None)


class ClassifierOutputCheck:
    """Implement `OutputCheck` window by window."""

    def __init__(
        self,
        find: Callable[[str], Awaitable[str | None]],
        terms: ClassifierTerms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a check. `find` returns the name of a match in a text, or None."""
        self._find = find
        self._terms = terms
        self._clock = clock
        self._context = ""
        self._window = ""
        self._window_since_s = -math.inf
        self._safe_char_count = 0
        self._hit: str | None = None

    async def push(self, text: str) -> Verdict:
        """Implement `OutputCheck.push`. Waits for the classifier when the window is full or old."""
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
    """Split a text into overlapping pieces; a short text is one piece."""
    step = PIECE_CHARS - PIECE_OVERLAP_CHARS
    return [
        text[start : start + PIECE_CHARS]
        for start in range(0, max(len(text) - PIECE_OVERLAP_CHARS, 1), step)
    ]
