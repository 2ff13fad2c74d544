"""Checkers that use rules and classifiers, and the file that configures them.

Rules are regular expressions. No part of a matching span is released: text is released once no rule
can match from there.

Classifiers run in a child process. Callers wait a bounded time for scores or `SafetyUnavailable`;
other requests are not delayed. A process that ends or hangs is restarted after a delay.

    output   [ released ... | context | window ]      context and window are scored together; then
                                                      the window is released held back: at most a
                                                      window and a token's text

Prompts are scored in overlapping pieces, a few at a time, so that long prompts do not block others.

The file has `[[rule]]` and `[[classifier]]` tables, and `[classifiers]` with their settings. It is
validated when read, except for loading checkpoints, so that errors are reported at startup.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import logging
import math
import time
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import regex

from common.backoff import Backoff
from inference.checkpoint.checkpoint import TOO_DEEP, deep_line, read_json
from inference.errors import CheckpointInvalid, SafetyUnavailable
from inference.safety.classifier_host import BatchScored, ClassifyBatch, LoadClassifiers
from inference.safety.safety import (
    OutputCheck,
    SafetyChecker,
    SafetyRulesInvalid,
    SafetyStage,
    Verdict,
)
from inference.workers.batches import BatchQueue
from inference.workers.process import HostProcess, Watchdog, open_host
from inference.workers.protocol import LoadFailed, Message, ProtocolBroken, Ready, decoder_to_parent

# characters held back for the end of a match: longer spans would stop streaming
HELD_CHARS_MAX = 1024
# characters before the held text that are visible to look-behinds and word boundaries
CONTEXT_CHARS = 256
# far above the time of a reasonable rule; a search that exceeds it counts as a match
SEARCH_TIMEOUT_S = 0.25
THREAD_COUNT = 2  # for long prompts
# prompts up to this length take well below 1 ms per rule, so they are checked in the event loop
QUICK_CHARS_MAX = 16_384

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
HOLD_S_MAX = 1.0  # seconds after which text of a slow model is checked before its window is full
PIECE_CHARS = 1000  # of a prompt: about 250 tokens, one classifier row in most scripts
PIECE_OVERLAP_CHARS = 200  # so that passages across a border are whole in one piece
PIECES_AT_ONCE = 4  # queued per prompt: the rest is queued behind the texts of other callers
RULE_COUNT_MAX = 256  # every rule is searched in every piece of text
CLASSIFIER_COUNT_MAX = 8  # every classifier scores every piece of text, on one core
PATTERN_CHARS_MAX = 2048
WINDOW_CHARS_MAX = 2000  # larger windows delay readers more than the answer takes
TIMEOUT_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Rule:
    """A named regular expression, and the texts it applies to."""

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
        """Return where a match that needs more text may begin; records a complete match."""
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


RESTART_DELAY_S_MIN, RESTART_DELAY_S_MAX = 0.2, 30.0

_log = logging.getLogger("weir.inference.safety")


class ClassifierProcess:
    """Classifiers of this API process, in one child process. Bound to one event loop."""

    def __init__(self, directories: Sequence[Path], *, timeout_s: float) -> None:
        """Start nothing; `serve` does. timeout_s: seconds that callers wait for scores."""
        self._directories = tuple(directories)
        self._timeout_s = timeout_s
        self._child: HostProcess | None = None
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
        """Return scores of texts by classifier index. Raises: SafetyUnavailable."""
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
        """Wait for the first attempt of `serve` to load; return the failure, or None on success."""
        await self._tried.wait()
        return self._first_failure

    async def serve(self) -> None:
        """Keep a child process running until cancelled."""
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
            async with open_host("inference.safety.classifier_host", CHILD_ENVIRONMENT) as child:
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

    async def _load(self, child: HostProcess) -> bool:
        """Return whether the child loaded everything; otherwise set `_reason`."""
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

    index: of the classifier in its process. thresholds: (index of the label in the scores, label,
    lowest forbidden score).
    """

    name: str
    index: int
    thresholds: tuple[tuple[int, str, float], ...]
    in_prompt: bool
    in_output: bool

    def hit(self, scores: Sequence[float]) -> str | None:
        """Return classifier and label of the first threshold reached; None if there is none."""
        for place, label, threshold in self.thresholds:
            if scores[place] >= threshold:
                return f"{self.name}: {label}"
        return None


@dataclass(frozen=True, slots=True)
class ClassifierTerms:
    """Windows of output checks, and behaviour without an answer. Durations in seconds."""

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
        asked = [rule for _ in texts for rule in rules]
        hits = (rule.hit(scores) for rule, scores in zip(asked, scored, strict=True))
        return next((hit for hit in hits if hit is not None), None)


class ClassifierOutputCheck:
    """Implement `OutputCheck` window by window."""

    def __init__(
        self,
        find: Callable[[str], Awaitable[str | None]],
        terms: ClassifierTerms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """find: returns the name of a match in a text, or None."""
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
    """Split a text into overlapping pieces; one if it is short."""
    step = PIECE_CHARS - PIECE_OVERLAP_CHARS
    return [
        text[start : start + PIECE_CHARS]
        for start in range(0, max(len(text) - PIECE_OVERLAP_CHARS, 1), step)
    ]


@dataclass(frozen=True, slots=True)
class Safety:
    """Checker configured by a file, None without one. classifiers: process that must be served."""

    checker: SafetyChecker | None = None
    classifiers: ClassifierProcess | None = None


def read_safety(path: Path) -> Safety:
    """Read rules and classifiers from a file; starts no process.

    Raises: SafetyRulesInvalid.
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
    asked = [
        _classifier(entry, index, directories[index], where)
        for index, (where, entry) in enumerate(classifiers)
    ]
    checkers.append(ClassifierChecker(process, asked, terms))
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
    """Return the checkpoint directory; relative paths start at the file's directory."""
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
    """Return a checkpoint's labels with their indices in its scores."""
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
    return {str(label): int(place) for place, label in id2label.items()}


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
