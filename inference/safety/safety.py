"""The safety stage: what a prompt and an output are checked for, and what a check answers.

Off unless configured. A checker sees text only; what follows from a hit is its caller's business. The output is checked while it
comes: text is let go once its checker has found nothing in it. Rules are in `safety_rules.py`, classifiers in
`safety_classifiers.py`, and the file that names both is read by `safety_file.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class SafetyRulesInvalid(ValueError):
    """The file of rules and classifiers cannot be used; the message names the file, the entry, and what to mend."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check of output knows after another piece of text.

    safe_char_count: how much of all text so far may be given out; never shrinks. hit: what was found; nothing more is safe.
    """

    safe_char_count: int
    hit: str | None = None


class OutputCheck(Protocol):
    """Checks one output while it comes. One call at a time."""

    async def push(self, text: str) -> Verdict:
        """More text. Raises `SafetyUnavailable` if it cannot be checked and must be."""
        ...

    async def finish(self) -> Verdict:
        """No more text comes: all of it is safe, or something was found. Raises `SafetyUnavailable`."""
        ...


class SafetyChecker(Protocol):
    """Checks prompts and outputs, any number at once. What would hold up the event loop is done elsewhere."""

    async def check_prompt(self, text: str) -> str | None:
        """What forbids the prompt, by name; None if nothing does. Raises `SafetyUnavailable`."""
        ...

    def open_output(self) -> OutputCheck | None:
        """A check for a new output; None if outputs are not checked."""
        ...


class SafetyStage:
    """Implements `SafetyChecker` by several: what one of them finds is found. The cheap ones stand first."""

    def __init__(self, checkers: Sequence[SafetyChecker]) -> None:
        self._checkers = tuple(checkers)

    async def check_prompt(self, text: str) -> str | None:
        """See `SafetyChecker.check_prompt`."""
        for checker in self._checkers:
            hit = await checker.check_prompt(text)
            if hit is not None:
                return hit
        return None

    def open_output(self) -> OutputCheck | None:
        """See `SafetyChecker.open_output`."""
        checks = [check for checker in self._checkers if (check := checker.open_output()) is not None]
        if len(checks) < 2:
            return checks[0] if checks else None
        return _SeveralOutputChecks(checks)


class _SeveralOutputChecks:
    """Text is safe as far as it is for all checks."""

    def __init__(self, checks: Sequence[OutputCheck]) -> None:
        self._checks = tuple(checks)
        self._safe_char_count = 0
        self._hit: str | None = None

    async def push(self, text: str) -> Verdict:
        """See `OutputCheck.push`."""
        return await self._ask(text)

    async def finish(self) -> Verdict:
        """See `OutputCheck.finish`."""
        return await self._ask(None)

    async def _ask(self, text: str | None) -> Verdict:
        """Ask all, the first hit wins. text: None at the end."""
        safe_char_counts = []
        for check in self._checks:
            if self._hit is not None:
                break
            verdict = await check.finish() if text is None else await check.push(text)
            safe_char_counts.append(verdict.safe_char_count)
            self._hit = verdict.hit
        if len(safe_char_counts) == len(self._checks):  # one that was not asked has said nothing about this text
            self._safe_char_count = max(self._safe_char_count, min(safe_char_counts))
        return Verdict(self._safe_char_count, self._hit)
