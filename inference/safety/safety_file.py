"""The file that configures safety rules and classifiers.

It has `[[rule]]` and `[[classifier]]` tables, and `[classifiers]` with their settings. It is
validated when read, except for loading checkpoints, so that errors are reported at startup.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from inference.checkpoint.json_files import TOO_DEEP, deep_line, read_json
from inference.errors import CheckpointInvalid
from inference.safety.classifiers import (
    ClassifierChecker,
    ClassifierProcess,
    ClassifierRule,
    ClassifierTerms,
)
from inference.safety.rules import Rule, RuleChecker
from inference.safety.safety import (
    SafetyChecker,
    SafetyRulesInvalid,
    SafetyStage,
)

RULE_COUNT_MAX = 256  # every rule is searched in every piece of text
CLASSIFIER_COUNT_MAX = 8  # every classifier scores every piece of text, on one core
PATTERN_CHARS_MAX = 2048
WINDOW_CHARS_MAX = 2000  # larger windows delay readers more than the answer takes
TIMEOUT_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Safety:
    """Safety checker of a file, None without one, and the classifier process to be served."""

    checker: SafetyChecker | None = None
    classifiers: ClassifierProcess | None = None


def read_safety(path: Path) -> Safety:
    """Read rules and classifiers from a file, without starting a process.

    Raises SafetyRulesInvalid if the file cannot be used.
    """
    content = ""
    try:
        tables = tomllib.loads(content := path.read_text(encoding="utf-8"))
    except RecursionError:
        raise SafetyRulesInvalid(f"{path}: line {deep_line(content)}: {TOO_DEEP}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SafetyRulesInvalid(f"{path}: {error}") from error
    unknown = tables.keys() - {"rule", "classifier", "classifiers"}
    if unknown:
        raise SafetyRulesInvalid(
            f"{path}: unknown table {', '.join(sorted(unknown))}; allowed are [[rule]],"
            " [[classifier]] and [classifiers]"
        )
    rules = _entries(tables, "rule", RULE_COUNT_MAX, path)
    classifiers = _entries(tables, "classifier", CLASSIFIER_COUNT_MAX, path)
    if not rules and not classifiers:
        raise SafetyRulesInvalid(f"{path}: must hold at least one [[rule]] or [[classifier]] table")
    names = [str(entry["name"]) for _, entry in rules + classifiers]
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
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
    score_calls = [
        _classifier(entry, index, directories[index], where)
        for index, (where, entry) in enumerate(classifiers)
    ]
    checkers.append(ClassifierChecker(process, score_calls, terms))
    return Safety(SafetyStage(checkers), process)


def _entries(
    tables: Mapping[str, Any], kind: str, count_max: int, path: Path
) -> list[tuple[str, dict[str, Any]]]:
    entries = tables.get(kind, [])
    if not isinstance(entries, list) or len(entries) > count_max:
        raise SafetyRulesInvalid(f"{path}: must hold at most {count_max} [[{kind}]] tables")
    named = []
    for number, entry in enumerate(entries, 1):
        where = f"{path}: {kind} {number}"
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("name"), str)
            or not entry["name"]
        ):
            raise SafetyRulesInvalid(f"{where}: needs a name")
        named.append((f"{where} ({entry['name']})", entry))
    return named


def _refuse_unknown(entry: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := entry.keys() - known:
        raise SafetyRulesInvalid(
            f"{where}: unknown key {', '.join(sorted(unknown))}; allowed are"
            f" {', '.join(sorted(known))}"
        )


def _applies_to(entry: Mapping[str, Any], where: str) -> tuple[bool, bool]:
    applies_to = entry.get("applies_to", "both")
    if applies_to not in ("prompt", "output", "both"):
        raise SafetyRulesInvalid(f'{where}: applies_to must be "prompt", "output" or "both"')
    return applies_to != "output", applies_to != "prompt"


def _rule(entry: Mapping[str, Any], where: str) -> Rule:
    _refuse_unknown(entry, {"name", "pattern", "applies_to", "ignore_case"}, where)
    source, ignore_case = entry.get("pattern"), entry.get("ignore_case", True)
    if not isinstance(source, str) or not 1 <= len(source) <= PATTERN_CHARS_MAX:
        raise SafetyRulesInvalid(f"{where}: pattern must have 1 to {PATTERN_CHARS_MAX} characters")
    if not isinstance(ignore_case, bool):
        raise SafetyRulesInvalid(f"{where}: ignore_case must be true or false")
    try:
        pattern = regex.compile(source, flags=regex.IGNORECASE if ignore_case else 0)
    except regex.error as error:
        raise SafetyRulesInvalid(f"{where}: {error}") from error
    if pattern.search(""):
        raise SafetyRulesInvalid(f"{where}: matches the empty text, so it would match everything")
    return Rule(entry["name"], pattern, *_applies_to(entry, where))


def _directory(entry: Mapping[str, Any], base: Path, where: str) -> Path:
    """Resolve the checkpoint directory; relative paths start at the file's directory."""
    given = entry.get("directory")
    if not isinstance(given, str) or not given:
        raise SafetyRulesInvalid(f"{where}: needs the directory of a checkpoint on this machine")
    directory = (base / Path(given).expanduser()).absolute()
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise SafetyRulesInvalid(
                f"{where}: {directory / name} is missing; nothing is downloaded, so the files must"
                " be there"
            )
    if not any(directory.glob("*.safetensors")):
        raise SafetyRulesInvalid(
            f"{where}: {directory} has no *.safetensors file; weights of other kinds are not loaded"
        )
    return directory


def _classifier(
    entry: Mapping[str, Any], index: int, directory: Path, where: str
) -> ClassifierRule:
    _refuse_unknown(entry, {"name", "directory", "applies_to", "thresholds"}, where)
    labels = _labels(directory, where)
    thresholds = entry.get("thresholds")
    if not isinstance(thresholds, dict) or not thresholds:
        raise SafetyRulesInvalid(
            f"{where}: needs thresholds, for example {{ {next(iter(labels))!r} = 0.5 }}"
        )
    for label, threshold in thresholds.items():
        if label not in labels:
            raise SafetyRulesInvalid(
                f"{where}: the checkpoint has no label {label!r}; it has: {', '.join(labels)}"
            )
        if type(threshold) not in (int, float) or not 0 < threshold <= 1:
            raise SafetyRulesInvalid(
                f"{where}: the threshold of {label!r} must be above 0 and at most 1"
            )
    chosen = tuple(
        (labels[label], str(label), float(threshold)) for label, threshold in thresholds.items()
    )
    return ClassifierRule(entry["name"], index, chosen, *_applies_to(entry, where))


def _labels(directory: Path, where: str) -> dict[str, int]:
    """Read a checkpoint's labels, with their indices in its scores."""
    try:
        config = read_json(directory / "config.json")
    except CheckpointInvalid as error:
        raise SafetyRulesInvalid(f"{where}: {error}") from error
    architecture = str((config.get("architectures") or ["(none)"])[0])
    if not architecture.endswith("ForSequenceClassification"):
        raise SafetyRulesInvalid(
            f"{where}: {directory} holds {architecture}, not a sequence classifier"
        )
    if config.get("auto_map"):
        raise SafetyRulesInvalid(
            f"{where}: {directory} requires custom code (auto_map), which is not supported"
        )
    if config.get("problem_type") == "regression":
        raise SafetyRulesInvalid(
            f"{where}: {directory} estimates a number and has no labels to compare"
        )
    # the library's default for a missing entry
    id2label = config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
    if not isinstance(id2label, dict) or {*map(str, id2label)} != {*map(str, range(len(id2label)))}:
        raise SafetyRulesInvalid(
            f"{where}: id2label of {directory / 'config.json'} is not a table of labels"
        )
    return {str(label): int(index) for index, label in id2label.items()}


def _terms(table: Any, where: str) -> ClassifierTerms:
    if not isinstance(table, dict):
        raise SafetyRulesInvalid(f"{where}: must be one table, not several")
    _refuse_unknown(
        table, {"window_chars", "context_chars", "timeout_s", "when_unavailable"}, where
    )
    default = ClassifierTerms()
    window = table.get("window_chars", default.window_chars)
    context = table.get("context_chars", default.context_chars)
    for name, value, minimum in (("window_chars", window, 1), ("context_chars", context, 0)):
        if type(value) is not int or not minimum <= value <= WINDOW_CHARS_MAX:
            raise SafetyRulesInvalid(
                f"{where}: {name} must be a whole number from {minimum} to {WINDOW_CHARS_MAX}"
            )
    timeout_s = table.get("timeout_s", default.timeout_s)
    if type(timeout_s) not in (int, float) or not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise SafetyRulesInvalid(
            f"{where}: timeout_s must be above 0 and at most {TIMEOUT_S_MAX:.0f}"
        )
    when_unavailable = table.get("when_unavailable", default.when_unavailable)
    if when_unavailable not in ("refuse", "allow"):
        raise SafetyRulesInvalid(f'{where}: when_unavailable must be "refuse" or "allow"')
    return ClassifierTerms(window, context, float(timeout_s), when_unavailable)
