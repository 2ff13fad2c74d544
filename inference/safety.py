"""The safety stage: what a prompt and an output are checked for, and by whom.

Off unless configured. A checker sees text only; what follows from a hit is its caller's business. The output is checked while it
comes: text is let go once no rule can begin in it any more, so a span that a rule matches never leaves, not even its beginning.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import regex

RULE_COUNT_MAX = 256  # each is searched for in every piece of text
PATTERN_CHARS_MAX = 2048
HELD_CHARS_MAX = 1024  # characters that may wait for the end of a match: a rule for longer spans would stop all streaming
CONTEXT_CHARS = 256  # characters before the held text that look-behind and word borders can see
SEARCH_TIMEOUT_S = 0.25  # far above any sane rule on a piece of output; beyond it the text is refused unread
QUICK_CHARS_MAX = 16_384  # a prompt up to here is checked in well under a millisecond per rule, beside the requests of others


class SafetyRulesInvalid(ValueError):
    """The file of rules cannot be used; the message names the file, the rule, and what to mend."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check of output knows after another piece of text.

    safe_char_count: how much of all text so far may be given out; never shrinks. hit: the rule that matched; nothing more is safe.
    """

    safe_char_count: int
    hit: str | None = None


class OutputCheck(Protocol):
    """Checks one output while it comes."""

    def push(self, text: str) -> Verdict:
        """More text."""
        ...

    def finish(self) -> Verdict:
        """No more text comes: all of it is safe, or a rule has matched."""
        ...


class SafetyChecker(Protocol):
    """Checks prompts and outputs. Used from several threads at once; an `OutputCheck` from one at a time."""

    @property
    def quick(self) -> bool:
        """Whether checking a piece of output takes so little that it may be done on the event loop."""
        ...

    def check_prompt(self, text: str) -> str | None:
        """The rule that forbids the prompt, by name; None if none does."""
        ...

    def open_output(self) -> OutputCheck | None:
        """A check for a new output; None if outputs are not checked."""
        ...


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

    @property
    def quick(self) -> bool:
        """See `SafetyChecker.quick`: a piece of output is a few characters beside at most `HELD_CHARS_MAX` held ones."""
        return True

    def check_prompt(self, text: str) -> str | None:
        """See `SafetyChecker.check_prompt`. A rule that takes too long to search counts as matched."""
        for rule in self._prompt_rules:
            try:
                if rule.pattern.search(text, concurrent=True, timeout=SEARCH_TIMEOUT_S):
                    return rule.name
            except TimeoutError:
                return rule.name
        return None

    def open_output(self) -> OutputCheck | None:
        """See `SafetyChecker.open_output`."""
        return RuleOutputCheck(self._output_rules) if self._output_rules else None


class RuleOutputCheck:
    """Implements `OutputCheck`.

    text   [ forgotten | context, given out | held: a match may begin here ]
                       ^ base               ^ base + _context_length       ^ end
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        self._text = ""
        self._base = 0  # characters of the output before `_text`
        self._context_length = 0
        self._hit: str | None = None

    def push(self, text: str) -> Verdict:
        """See `OutputCheck.push`."""
        return self._check(text, final=False)

    def finish(self) -> Verdict:
        """See `OutputCheck.finish`."""
        return self._check("", final=True)

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


def read_rules(path: Path) -> RuleChecker:
    """Rules from a TOML file: `[[rule]]` tables with `name` and `pattern`, and optionally `applies_to` ("prompt", "output" or
    "both", the default) and `ignore_case` (default true).

    Raises: SafetyRulesInvalid.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("rule", [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SafetyRulesInvalid(f"{path}: {error}") from error
    if not isinstance(tables, list) or not 1 <= len(tables) <= RULE_COUNT_MAX:
        raise SafetyRulesInvalid(f"{path}: must hold 1 to {RULE_COUNT_MAX} [[rule]] tables")
    rules = [_rule(table, f"{path}: rule {number}") for number, table in enumerate(tables, 1)]
    if len({rule.name for rule in rules}) < len(rules):
        raise SafetyRulesInvalid(f"{path}: two rules have the same name")
    return RuleChecker(rules)


def _rule(table: Any, where: str) -> Rule:
    if not isinstance(table, dict) or not isinstance(table.get("name"), str) or not table["name"]:
        raise SafetyRulesInvalid(f"{where}: needs a name")
    where = f"{where} ({table['name']})"
    unknown = table.keys() - {"name", "pattern", "applies_to", "ignore_case"}
    if unknown:
        raise SafetyRulesInvalid(f"{where}: has no {', '.join(sorted(unknown))}")
    source, applies_to, ignore_case = table.get("pattern"), table.get("applies_to", "both"), table.get("ignore_case", True)
    if not isinstance(source, str) or not 1 <= len(source) <= PATTERN_CHARS_MAX:
        raise SafetyRulesInvalid(f"{where}: needs a pattern of 1 to {PATTERN_CHARS_MAX} characters")
    if applies_to not in ("prompt", "output", "both") or not isinstance(ignore_case, bool):
        raise SafetyRulesInvalid(f'{where}: applies_to is "prompt", "output" or "both", ignore_case true or false')
    try:
        pattern = regex.compile(source, flags=regex.IGNORECASE if ignore_case else 0)
    except regex.error as error:
        raise SafetyRulesInvalid(f"{where}: {error}") from error
    if pattern.search(""):
        raise SafetyRulesInvalid(f"{where}: matches nothing at all, so it would match everything")
    return Rule(table["name"], pattern, applies_to != "output", applies_to != "prompt")
