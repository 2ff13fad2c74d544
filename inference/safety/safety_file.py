"""The file that says what is checked: `[[rule]]` and `[[classifier]]` tables, and `[classifiers]` with how the latter are asked.

Everything that can be known without loading a checkpoint is checked here, so that a mistake is told at start and by name. Rules
are regular expressions. A span of output that one matches never leaves, not even its beginning: text is let go once no rule can
begin in it any more."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from inference.checkpoint.checkpoint import read_json
from inference.errors import CheckpointInvalid
from inference.safety.safety import OutputCheck, SafetyChecker, SafetyRulesInvalid, SafetyStage, Verdict
from inference.safety.safety_classifiers import ClassifierChecker, ClassifierProcess, ClassifierRule, ClassifierTerms

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


RULE_COUNT_MAX = 256  # each is searched for in every piece of text
CLASSIFIER_COUNT_MAX = 8  # each scores every piece of text, on one core for all
PATTERN_CHARS_MAX = 2048
WINDOW_CHARS_MAX = 2000  # beyond it a reader waits longer for a window than for the answer
TIMEOUT_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Safety:
    """What a file asks for; nothing without one. classifiers: to be served as long as the checker is used."""

    checker: SafetyChecker | None = None
    classifiers: ClassifierProcess | None = None


def read_safety(path: Path) -> Safety:
    """Rules and classifiers of a file; starts nothing.

    Raises: SafetyRulesInvalid.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SafetyRulesInvalid(f"{path}: {error}") from error
    unknown = tables.keys() - {"rule", "classifier", "classifiers"}
    if unknown:
        raise SafetyRulesInvalid(f"{path}: has no {', '.join(sorted(unknown))}; it has [[rule]], [[classifier]] and [classifiers]")
    rules = _entries(tables, "rule", RULE_COUNT_MAX, path)
    classifiers = _entries(tables, "classifier", CLASSIFIER_COUNT_MAX, path)
    if not rules and not classifiers:
        raise SafetyRulesInvalid(f"{path}: must hold at least one [[rule]] or [[classifier]] table")
    names = [str(entry["name"]) for _, entry in rules + classifiers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SafetyRulesInvalid(f"{path}: two rules have the same name: {twice[0]}")
    checkers: list[SafetyChecker] = []
    if rules:
        checkers.append(RuleChecker([_rule(entry, where) for where, entry in rules]))
    if not classifiers:
        return Safety(SafetyStage(checkers))
    terms = _terms(tables.get("classifiers", {}), f"{path}: [classifiers]")
    if importlib.util.find_spec("transformers") is None:
        raise SafetyRulesInvalid(
            f"{path}: classifiers need the package transformers, in a clone of the repository: "
            "pip install -e sdk/python -e '.[safety]'"
        )
    directories = [_directory(entry, path.parent, where) for where, entry in classifiers]
    process = ClassifierProcess(directories, timeout_s=terms.timeout_s)
    asked = [_classifier(entry, index, directories[index], where) for index, (where, entry) in enumerate(classifiers)]
    checkers.append(ClassifierChecker(process, asked, terms))
    return Safety(SafetyStage(checkers), process)


def _entries(tables: Mapping[str, Any], kind: str, count_max: int, path: Path) -> list[tuple[str, dict[str, Any]]]:
    entries = tables.get(kind, [])
    if not isinstance(entries, list) or len(entries) > count_max:
        raise SafetyRulesInvalid(f"{path}: must hold at most {count_max} [[{kind}]] tables")
    named = []
    for number, entry in enumerate(entries, 1):
        where = f"{path}: {kind} {number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
            raise SafetyRulesInvalid(f"{where}: needs a name")
        named.append((f"{where} ({entry['name']})", entry))
    return named


def _refuse_unknown(entry: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := entry.keys() - known:
        raise SafetyRulesInvalid(f"{where}: has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")


def _applies_to(entry: Mapping[str, Any], where: str) -> tuple[bool, bool]:
    applies_to = entry.get("applies_to", "both")
    if applies_to not in ("prompt", "output", "both"):
        raise SafetyRulesInvalid(f'{where}: applies_to is "prompt", "output" or "both"')
    return applies_to != "output", applies_to != "prompt"


def _rule(entry: Mapping[str, Any], where: str) -> Rule:
    _refuse_unknown(entry, {"name", "pattern", "applies_to", "ignore_case"}, where)
    source, ignore_case = entry.get("pattern"), entry.get("ignore_case", True)
    if not isinstance(source, str) or not 1 <= len(source) <= PATTERN_CHARS_MAX:
        raise SafetyRulesInvalid(f"{where}: needs a pattern of 1 to {PATTERN_CHARS_MAX} characters")
    if not isinstance(ignore_case, bool):
        raise SafetyRulesInvalid(f"{where}: ignore_case is true or false")
    try:
        pattern = regex.compile(source, flags=regex.IGNORECASE if ignore_case else 0)
    except regex.error as error:
        raise SafetyRulesInvalid(f"{where}: {error}") from error
    if pattern.search(""):
        raise SafetyRulesInvalid(f"{where}: matches nothing at all, so it would match everything")
    return Rule(entry["name"], pattern, *_applies_to(entry, where))


def _directory(entry: Mapping[str, Any], base: Path, where: str) -> Path:
    """Where the checkpoint lies; a relative path is one from the file's own directory."""
    given = entry.get("directory")
    if not isinstance(given, str) or not given:
        raise SafetyRulesInvalid(f"{where}: needs the directory of a checkpoint on this machine")
    directory = (base / Path(given).expanduser()).absolute()
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise SafetyRulesInvalid(f"{where}: {directory / name} is missing; nothing is downloaded, so the files must be there")
    if not any(directory.glob("*.safetensors")):
        raise SafetyRulesInvalid(f"{where}: {directory} has no *.safetensors file; weights of other kinds are not loaded")
    return directory


def _classifier(entry: Mapping[str, Any], index: int, directory: Path, where: str) -> ClassifierRule:
    _refuse_unknown(entry, {"name", "directory", "applies_to", "thresholds"}, where)
    labels = _labels(directory, where)
    thresholds = entry.get("thresholds")
    if not isinstance(thresholds, dict) or not thresholds:
        raise SafetyRulesInvalid(f"{where}: needs thresholds, for example {{ {next(iter(labels))!r} = 0.5 }}")
    for label, threshold in thresholds.items():
        if label not in labels:
            raise SafetyRulesInvalid(f"{where}: the checkpoint has no label {label!r}; it has: {', '.join(labels)}")
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
            raise SafetyRulesInvalid(f"{where}: the threshold of {label!r} must be above 0 and at most 1")
    chosen = tuple((labels[label], str(label), float(threshold)) for label, threshold in thresholds.items())
    return ClassifierRule(entry["name"], index, chosen, *_applies_to(entry, where))


def _labels(directory: Path, where: str) -> dict[str, int]:
    """A checkpoint's labels with their places in its scores."""
    try:
        config = read_json(directory / "config.json")
    except CheckpointInvalid as error:
        raise SafetyRulesInvalid(f"{where}: {error}") from error
    architecture = str((config.get("architectures") or ["(none)"])[0])
    if not architecture.endswith("ForSequenceClassification"):
        raise SafetyRulesInvalid(f"{where}: {directory} holds {architecture}, not a sequence classifier")
    if config.get("auto_map"):
        raise SafetyRulesInvalid(f"{where}: {directory} wants to run code of its own, which is not done here")
    if config.get("problem_type") == "regression":
        raise SafetyRulesInvalid(f"{where}: {directory} estimates a number and has no labels to compare")
    id2label = config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}  # what the library takes an absent entry for
    if not isinstance(id2label, dict) or sorted(map(str, id2label)) != sorted(map(str, range(len(id2label)))):
        raise SafetyRulesInvalid(f"{where}: id2label of {directory / 'config.json'} is not a table of labels")
    return {str(label): int(place) for place, label in id2label.items()}


def _terms(table: Any, where: str) -> ClassifierTerms:
    if not isinstance(table, dict):
        raise SafetyRulesInvalid(f"{where}: must be one table, not several")
    _refuse_unknown(table, {"window_chars", "context_chars", "timeout_s", "when_unavailable"}, where)
    default = ClassifierTerms()
    window, context = table.get("window_chars", default.window_chars), table.get("context_chars", default.context_chars)
    for name, value, least in (("window_chars", window, 1), ("context_chars", context, 0)):
        if type(value) is not int or not least <= value <= WINDOW_CHARS_MAX:
            raise SafetyRulesInvalid(f"{where}: {name} must be a whole number from {least} to {WINDOW_CHARS_MAX}")
    timeout_s = table.get("timeout_s", default.timeout_s)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise SafetyRulesInvalid(f"{where}: timeout_s must be above 0 and at most {TIMEOUT_S_MAX:.0f}")
    when_unavailable = table.get("when_unavailable", default.when_unavailable)
    if when_unavailable not in ("refuse", "allow"):
        raise SafetyRulesInvalid(f'{where}: when_unavailable is "refuse" or "allow"')
    return ClassifierTerms(window, context, float(timeout_s), when_unavailable)
