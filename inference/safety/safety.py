"""Safety stage: interfaces of prompt and output checkers, and their combination.

Disabled unless configured. A checker sees text only; the caller acts on a hit. Output is checked
while streaming: text is released once its checker has cleared it. Rules, classifiers and their
configuration file are in `rules.py`, `classifiers.py` and `safety_file.py`.
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# An escape, a surrogate pair of escapes, or an incomplete escape at the end of the text.
_ESCAPE = re.compile(
    r"\\(?:u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?P<part>(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?))?\Z)"
    r"|u(?P<unit>[0-9a-fA-F]{4})"
    r"|(?P<short>[\"\\/bfnrt]))"
)

_SHORT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_NO_CHARACTER = "\ufffd"  # replaces lone surrogates, which classifiers' tokenizers reject


class Unescaper:
    """Streaming decoder of JSON escapes. Other text is unchanged, even if it is not valid JSON."""

    def __init__(self) -> None:
        self.pending = ""  # an incomplete escape

    def push(self, text: str) -> str:
        """Add text and return the part that can be decoded so far."""
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
    """The safety file is invalid. The message names the file, the entry, and how to fix it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of an output check after a piece of text.

    The first `safe_char_count` characters of the output may be released; the count never decreases.
    `hit` is the name of the match, after which nothing more is safe.
    """

    safe_char_count: int
    hit: str | None = None


class OutputCheck(Protocol):
    """Safety check of one output while it is streamed. Only one call at a time."""

    async def push(self, text: str) -> Verdict:
        """Check more text. Raises SafetyUnavailable if a required check is not possible."""
        ...

    async def finish(self) -> Verdict:
        """Check the end of the output; without a match, all is safe. Raises SafetyUnavailable."""
        ...

    def fork(self) -> OutputCheck:
        """Copy the check with its state, so that both continue independently."""
        ...


class SafetyChecker(Protocol):
    """Checker of prompts and outputs, many at a time. Blocking work runs off the event loop."""

    async def check_prompt(self, text: str) -> str | None:
        """Search a prompt; return a forbidden match's name or None. Raises SafetyUnavailable."""
        ...

    def open_output(self) -> OutputCheck | None:
        """Open a check for a new output, or return None if outputs are not checked."""
        ...


class SafetyStage:
    """Combination of several checkers. The first hit counts, and cheap checkers come first."""

    def __init__(self, checkers: Sequence[SafetyChecker]) -> None:
        self._checkers = tuple(checkers)

    async def check_prompt(self, text: str) -> str | None:
        for checker in self._checkers:
            hit = await checker.check_prompt(text)
            if hit is not None:
                return hit
        return None

    def open_output(self) -> OutputCheck | None:
        checks = [
            check for checker in self._checkers if (check := checker.open_output()) is not None
        ]
        if len(checks) < 2:
            return checks[0] if checks else None
        return _SeveralOutputChecks(checks)


class _SeveralOutputChecks:
    """Combination of output checks: text is safe once it is safe for all of them."""

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
        """Run the checks in order until the first hit. `text` is None at the end."""
        safe_char_counts = []
        for check in self._checks:
            if self._hit is not None:
                break
            verdict = await check.finish() if text is None else await check.push(text)
            safe_char_counts.append(verdict.safe_char_count)
            self._hit = verdict.hit
        if len(safe_char_counts) == len(self._checks):
            # a skipped check has no result for this text
            self._safe_char_count = max(self._safe_char_count, min(safe_char_counts))
        return Verdict(self._safe_char_count, self._hit)


class EscapedOutputCheck:
    r"""Check of an output that contains JSON, both as written and with its escapes decoded.

    `forbidden\u0020topic` in a call's arguments is a forbidden topic once parsed. So a second check
    sees the decoded output; until the first escape, both are the same and there is only one.
    """

    def __init__(self, check: OutputCheck) -> None:
        """Wrap a check that has not seen any output."""
        self._as_written = check
        self._as_read: OutputCheck | None = None  # created at the first escape
        self._unescaper = Unescaper()
        # length of all text so far, and of its part that is safe when decoded:
        self._char_count = 0
        self._safe_char_count = 0
        self._read_char_count = 0
        self._common_char_count = 0  # length before the first escape
        # of each piece: its length as written, and the decoded length that must be safe to release
        # it
        self._ends: deque[tuple[int, int]] = deque()

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
        # The beginning of an escape is released only with the character that it encodes.
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
