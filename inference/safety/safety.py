"""The safety stage: what a prompt and an output are checked for, and what a check answers.

Off unless configured. A checker sees text only; what follows from a hit is its caller's business. The output is checked while it
comes: text is let go once its checker has found nothing in it. Rules, classifiers and the file that names them are in
`safety_file.py`.
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# An escape, two that are one character, and at the end of the text what may become one.
_ESCAPE = re.compile(
    r"\\(?:u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?P<part>(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?))?\Z)"
    r"|u(?P<unit>[0-9a-fA-F]{4})"
    r"|(?P<short>[\"\\/bfnrt]))"
)

_SHORT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_NO_CHARACTER = "\ufffd"  # for half a pair of surrogates, which no classifier's tokenizer takes


class Unescaper:
    """Reads the escapes of JSON in text that comes in pieces. All else stays as it is, also what is no JSON."""

    def __init__(self) -> None:
        self.pending = ""  # the beginning of an escape, which is not read yet

    def push(self, text: str) -> str:
        """More text; what of it can be read now."""
        text, self.pending = self.pending + text, ""
        return _ESCAPE.sub(self._read, text)

    def _read(self, found: re.Match[str]) -> str:
        if found["part"] is not None:
            self.pending = found[0]
            return ""
        if found["high"] is not None:
            high, low = int(found["high"], 16), int(found["low"], 16)
            return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))
        if found["unit"] is not None:
            unit = int(found["unit"], 16)
            return _NO_CHARACTER if 0xD800 <= unit <= 0xDFFF else chr(unit)
        return _SHORT[found["short"]]


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

    def fork(self) -> OutputCheck:
        """Another check that has seen the same so far, and goes on by itself."""
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
        for checker in self._checkers:
            hit = await checker.check_prompt(text)
            if hit is not None:
                return hit
        return None

    def open_output(self) -> OutputCheck | None:
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
        return await self._ask(text)

    async def finish(self) -> Verdict:
        return await self._ask(None)

    def fork(self) -> OutputCheck:
        twin = copy.copy(self)
        twin._checks = tuple(check.fork() for check in self._checks)
        return twin

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


class EscapedOutputCheck:
    r"""A check of an output that is JSON or has JSON in it: as the model writes it, and as whoever parses it reads it.

    `forbidden\u0020topic` in the arguments of a call is a forbidden topic for whoever makes the call. So a second check sees the
    same output with its escapes read. Up to the first escape both see the same, and there is but one.
    """

    def __init__(self, check: OutputCheck) -> None:
        """check: of an output from its beginning."""
        self._as_written = check
        self._as_read: OutputCheck | None = None  # from the first escape on
        self._unescaper = Unescaper()
        self._char_count = 0  # of all text so far; of that what is known to be safe as it is read:
        self._safe_char_count = 0
        self._read_char_count = 0
        self._common_char_count = 0  # before the first escape, where both are the same
        self._ends: deque[tuple[int, int]] = deque()  # of pieces: characters as written, and how many as read must be safe for them

    async def push(self, text: str) -> Verdict:
        if self._as_read is None and "\\" in text:
            self._as_read = self._as_written.fork()
            self._common_char_count = self._read_char_count = self._char_count
        self._char_count += len(text)
        verdict = await self._as_written.push(text)
        if self._as_read is None or verdict.hit is not None:
            return verdict
        read = self._unescaper.push(text)
        self._read_char_count += len(read)
        # What an escape has begun must not leave before the character that it becomes may.
        self._ends.append((self._char_count, self._read_char_count + bool(self._unescaper.pending)))
        return self._both(verdict, await self._as_read.push(read))

    async def finish(self) -> Verdict:
        verdict = await self._as_written.finish()
        if self._as_read is None or verdict.hit is not None:
            return verdict
        read = await self._as_read.push(self._unescaper.pending)
        if read.hit is None:
            read = await self._as_read.finish()
        return verdict if read.hit is None else self._both(verdict, read)

    def fork(self) -> OutputCheck:
        twin = copy.copy(self)
        twin._as_written = self._as_written.fork()
        twin._as_read = None if self._as_read is None else self._as_read.fork()
        twin._unescaper, twin._ends = copy.copy(self._unescaper), self._ends.copy()
        return twin

    def _both(self, written: Verdict, read: Verdict) -> Verdict:
        while self._ends and self._ends[0][1] <= read.safe_char_count:
            self._safe_char_count = self._ends.popleft()[0]
        safe = max(self._safe_char_count, min(read.safe_char_count, self._common_char_count))
        return Verdict(min(written.safe_char_count, safe), read.hit)
