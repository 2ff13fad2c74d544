"""Safety rules: regular expressions searched in prompts and outputs.

No part of a matching span is released: text is released once no rule can match from there.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import regex

from inference.safety.safety import (
    OutputCheck,
    Verdict,
)

# characters held back for the end of a match: longer spans would stop streaming
HELD_CHARS_MAX = 1024
# characters before the held text that are visible to look-behinds and word boundaries
CONTEXT_CHARS = 256
# far above the time of a reasonable rule; a search that exceeds it counts as a match
SEARCH_TIMEOUT_S = 0.25
THREAD_COUNT = 2  # for long prompts
# prompts up to this length take well below 1 ms per rule, so they are checked in the event loop
QUICK_CHARS_MAX = 16_384


@dataclass(frozen=True, slots=True)
class Rule:
    """A named regular expression, and the kinds of text that it applies to."""

    name: str
    pattern: regex.Pattern[str]
    in_prompt: bool
    in_output: bool


class RuleChecker:
    """Implement `SafetyChecker` with regular expressions."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._prompt_rules = tuple(rule for rule in rules if rule.in_prompt)
        self._output_rules = tuple(rule for rule in rules if rule.in_output)
        # long prompts delay only each other
        self._threads = ThreadPoolExecutor(THREAD_COUNT, "weir-safety")

    async def check_prompt(self, text: str) -> str | None:
        """Implement `SafetyChecker.check_prompt`; a timeout counts as a match."""
        if len(text) > QUICK_CHARS_MAX:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, self._search_prompt, text
            )
        return self._search_prompt(text)

    def open_output(self) -> OutputCheck | None:
        return RuleOutputCheck(self._output_rules) if self._output_rules else None

    def _search_prompt(self, text: str) -> str | None:
        for rule in self._prompt_rules:
            try:
                if rule.pattern.search(text, concurrent=True, timeout=SEARCH_TIMEOUT_S):
                    return rule.name
            except TimeoutError:
                return rule.name
        return None


class RuleOutputCheck:
    """Implement `OutputCheck` synchronously: each piece is short, and at most `HELD_CHARS_MAX` are
    held.

    text   [ dropped | context, released | held: a match may begin here ]
                     ^ base              ^ base + _context_length       ^ end
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        self._text = ""
        self._base = 0  # characters of the output before `_text`
        self._context_length = 0
        self._hit: str | None = None

    async def push(self, text: str) -> Verdict:
        return self._check(text, final=False)

    async def finish(self) -> Verdict:
        return self._check("", final=True)

    def fork(self) -> OutputCheck:
        return copy.copy(self)

    def _check(self, text: str, *, final: bool) -> Verdict:
        if self._hit is not None:
            return Verdict(self._base + self._context_length, self._hit)
        self._text += text
        held_from = len(self._text)
        for rule in self._rules:
            if self._hit is not None:
                break
            held_from = min(held_from, self._first_possible(rule, final=final))
        if self._hit is None:
            # Beyond the limit the start of a match is released: an endless match must not hold back
            # all output.
            held_from = max(held_from, len(self._text) - HELD_CHARS_MAX)
        self._let_go(max(held_from, self._context_length))
        return Verdict(self._base + self._context_length, self._hit)

    def _first_possible(self, rule: Rule, *, final: bool) -> int:
        """Find where a match that needs more text may begin; record a complete match."""
        try:
            found = rule.pattern.search(
                self._text, pos=self._context_length, partial=not final, timeout=SEARCH_TIMEOUT_S
            )
        except TimeoutError:
            self._hit = rule.name
            return self._context_length
        if found is None:
            return len(self._text)
        # A match at the very end may depend on the next character (word boundary, look-ahead).
        if not found.partial and (final or found.end() < len(self._text)):
            self._hit = rule.name
        return found.start()

    def _let_go(self, position: int) -> None:
        forgotten = max(position - CONTEXT_CHARS, 0)
        self._text = self._text[forgotten:]
        self._base += forgotten
        self._context_length = position - forgotten
