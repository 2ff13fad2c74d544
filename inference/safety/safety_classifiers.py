"""Classifiers as checkers of prompts and outputs: which labels count from which score on, and which text they see when.

    output   [ given out ... | context | window ]      scored together: context and window; let go after it: the window
                                                       held: never more than a window and a token's text

Prompts are scored in overlapping pieces, a few at a time, so that a long one takes turns with others.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from inference.errors import SafetyUnavailable
from inference.safety.classifier_process import ClassifierProcess
from inference.safety.safety import OutputCheck, Verdict

HOLD_S_MAX = 1.0  # seconds: text of a slow model is checked after so long, though its window is not full
PIECE_CHARS = 1000  # of a prompt: some 250 tokens, one row of any classifier in most scripts
PIECE_OVERLAP_CHARS = 200  # so that what lies across a border is whole in one of both pieces
PIECES_AT_ONCE = 4  # of one prompt in the queue: the rest of it comes after what others have put there meanwhile

_log = logging.getLogger("weir.inference.safety")


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
        """See `SafetyChecker.check_prompt`."""
        if not self._prompt_rules or not text:
            return None
        pieces = pieces_of(text)
        for start in range(0, len(pieces), PIECES_AT_ONCE):
            hit = await self._find(pieces[start : start + PIECES_AT_ONCE], self._prompt_rules)
            if hit is not None:
                return hit
        return None

    def open_output(self) -> OutputCheck | None:
        """See `SafetyChecker.open_output`."""
        if not self._output_rules:
            return None
        return ClassifierOutputCheck(lambda text: self._find(pieces_of(text), self._output_rules), self._terms)

    async def _find(self, texts: Sequence[str], rules: Sequence[ClassifierRule]) -> str | None:
        """The first rule that one of the texts breaks."""
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
        """See `OutputCheck.finish`."""
        if self._window:
            await self._check()
        return Verdict(self._safe_char_count, self._hit)

    def fork(self) -> OutputCheck:
        """See `OutputCheck.fork`."""
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
