"""Regular expressions as checkers of prompts and outputs.

A span of output that a rule matches never leaves, not even its beginning: text is let go once no rule can begin in it any more.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import regex

from inference.safety.safety import OutputCheck, Verdict

HELD_CHARS_MAX = 1024  # characters that may wait for the end of a match: a rule for longer spans would stop all streaming
CONTEXT_CHARS = 256  # characters before the held text that look-behind and word borders can see
SEARCH_TIMEOUT_S = 0.25  # far above any sane rule on a piece of output; beyond it the text is refused unread
THREAD_COUNT = 2  # for long prompts
QUICK_CHARS_MAX = 16_384  # a prompt up to here is checked in well under a millisecond per rule, beside the requests of others


@dataclass(frozen=True, slots=True)
class Rule:
    """One regular expression with a name, and what it is searched for in."""

    name: str
    pattern: regex.Pattern[str]
    in_prompt: bool
    in_output: bool


class RuleChecker:
    """Implements `SafetyChecker` by regular expressions."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._prompt_rules = tuple(rule for rule in rules if rule.in_prompt)
        self._output_rules = tuple(rule for rule in rules if rule.in_output)
        self._threads = ThreadPoolExecutor(THREAD_COUNT, "weir-safety")  # prompts wait for each other alone

    async def check_prompt(self, text: str) -> str | None:
        """See `SafetyChecker.check_prompt`. A rule that takes too long to search counts as matched. Long ones go into a thread."""
        if len(text) > QUICK_CHARS_MAX:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._search_prompt, text)
        return self._search_prompt(text)

    def open_output(self) -> OutputCheck | None:
        """See `SafetyChecker.open_output`."""
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
    """Implements `OutputCheck`, at once: a piece of output is a few characters beside at most `HELD_CHARS_MAX` held ones.

    text   [ forgotten | context, given out | held: a match may begin here ]
                       ^ base               ^ base + _context_length       ^ end
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        self._text = ""
        self._base = 0  # characters of the output before `_text`
        self._context_length = 0
        self._hit: str | None = None

    async def push(self, text: str) -> Verdict:
        """See `OutputCheck.push`."""
        return self._check(text, final=False)

    async def finish(self) -> Verdict:
        """See `OutputCheck.finish`."""
        return self._check("", final=True)

    def fork(self) -> OutputCheck:
        """See `OutputCheck.fork`."""
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
            # Beyond the bound the beginning of a match is let go: a rule that waits for ever must not hold all of an output.
            held_from = max(held_from, len(self._text) - HELD_CHARS_MAX)
        self._let_go(max(held_from, self._context_length))
        return Verdict(self._base + self._context_length, self._hit)

    def _first_possible(self, rule: Rule, *, final: bool) -> int:
        """Where a match of the rule may begin that more text could complete; notes a match that is complete."""
        try:
            found = rule.pattern.search(self._text, pos=self._context_length, partial=not final, timeout=SEARCH_TIMEOUT_S)
        except TimeoutError:
            self._hit = rule.name
            return self._context_length
        if found is None:
            return len(self._text)
        # A match at the very end may not be one when the next character is there: a word border, a look-ahead.
        if not found.partial and (final or found.end() < len(self._text)):
            self._hit = rule.name
        return found.start()

    def _let_go(self, position: int) -> None:
        forgotten = max(position - CONTEXT_CHARS, 0)
        self._text = self._text[forgotten:]
        self._base += forgotten
        self._context_length = position - forgotten
