"""Text that a rule matches is never released; other text is unchanged."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.safety.rules import HELD_CHARS_MAX
from inference.safety.safety import SafetyChecker, SafetyRulesInvalid, SafetyStage, Verdict
from inference.safety.safety_file import read_safety

PATTERNS = (r"\bsecret\b", r"\d{3}-\d{4}", "abab+c", r"(?<=key: )\w+!", "x{2,5}y?z", "é🙂")
ALPHABET = "abcxyz secret key: 0123-!é🙂"


Value = TypeVar("Value")


def at_once(answer: Coroutine[Any, Any, Value]) -> Value:
    """Return the result of a check that must not suspend."""
    try:
        answer.send(None)
    except StopIteration as done:
        value: Value = done.value
        return value
    raise AssertionError("a check by rules has waited")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def checker(tmp_path: Path, *patterns: str, applies_to: str = "both") -> SafetyChecker:
    tables = [
        f"[[rule]]\nname = 'rule {i}'\npattern = '''{p}'''\napplies_to = '{applies_to}'\n"
        for i, p in enumerate(patterns)
    ]
    found = read_safety(write(tmp_path / "rules.toml", "\n".join(tables))).checker
    assert found is not None
    return found


def stream(rules: SafetyChecker, pieces: list[str]) -> tuple[str, str | None]:
    """Return the text released, and the rule that ended it."""
    check = rules.open_output()
    assert check is not None
    text, safe = "", 0
    for piece in pieces:
        text += piece
        verdict = at_once(check.push(piece))
        assert safe <= verdict.safe_char_count <= len(text), "what was safe stays safe"
        safe = verdict.safe_char_count
        if verdict.hit is not None:
            return text[:safe], verdict.hit
    verdict = at_once(check.finish())
    return text[: verdict.safe_char_count], verdict.hit


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> SafetyChecker:
    return checker(tmp_path_factory.mktemp("rules"), *PATTERNS)


_pieces = st.one_of(
    st.lists(st.text(ALPHABET, max_size=4), max_size=30),
    st.lists(
        st.sampled_from(
            [
                "sec",
                "ret",
                " ",
                "s",
                "555",
                "-",
                "0123",
                "abab",
                "b",
                "c",
                "key: ",
                "w!",
                "xx",
                "y",
                "z",
            ]
        ),
        max_size=20,
    ),
)


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(pieces=_pieces)
def test_released_output_ends_before_a_match(rules: SafetyChecker, pieces: list[str]) -> None:
    """The independent answer looks at the whole text at once."""
    text = "".join(pieces)
    found = [
        match
        for pattern in PATTERNS
        for match in [regex.search(pattern, text, regex.IGNORECASE)]
        if match
    ]

    given_out, hit = stream(rules, pieces)

    if not found:
        assert (given_out, hit) == (text, None)
    else:
        assert hit is not None
        assert text.startswith(given_out)
        assert not any(regex.search(pattern, given_out, regex.IGNORECASE) for pattern in PATTERNS)
        assert len(given_out) <= max(match.start() for match in found)


def test_text_is_held_only_while_a_match_may_follow(rules: SafetyChecker) -> None:
    check = rules.open_output()
    assert check is not None

    safe = [
        at_once(check.push(piece)).safe_char_count
        for piece in ("Hello wor", "ld, a se", "cr", "etary", " knows")
    ]

    assert safe == [9, 15, 15, 24, 30], "'se' and 'secr' may become the word; 'secretary' is none"


def test_a_word_at_the_very_end_counts(rules: SafetyChecker) -> None:
    assert stream(rules, ["my ", "sec", "ret"]) == ("my ", "rule 0")
    assert stream(rules, ["my ", "sec", "ret", "s"]) == ("my secrets", None)


def test_an_unfinished_match_does_not_hold_the_output_endlessly(tmp_path: Path) -> None:
    endless = checker(tmp_path, r"\(.*\)")

    check = endless.open_output()
    assert check is not None
    safe = 0
    for _ in range(3 * HELD_CHARS_MAX // 4):
        safe = at_once(check.push("(abc")).safe_char_count

    assert safe == 3 * HELD_CHARS_MAX - HELD_CHARS_MAX


def test_a_slow_rule_counts_as_matched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that makes a rule time out must not pass."""
    monkeypatch.setattr("inference.safety.rules.SEARCH_TIMEOUT_S", 0.01)
    explosive = checker(tmp_path, "(?:a|b|ab)*!c")

    assert at_once(explosive.check_prompt("ab" * 2000 + "?!c")) == "rule 0"
    assert stream(explosive, ["ab" * 2000, "?!c"])[1] == "rule 0"


def test_rules_apply_where_they_say(tmp_path: Path) -> None:
    prompt_only, output_only = (
        checker(tmp_path, "bad", applies_to=where) for where in ("prompt", "output")
    )

    assert at_once(prompt_only.check_prompt("BAD things")) == "rule 0"
    assert prompt_only.open_output() is None
    assert at_once(output_only.check_prompt("bad things")) is None
    assert stream(output_only, ["too ", "ba", "d"]) == ("too ", "rule 0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one"),
        ("rule = 3", "at most 256"),
        ("rules = 3", "unknown table rules; allowed are"),
        ("[[rule]", "rules.toml"),
        ("[[rule]]\npattern = 'a'", "rule 1: needs a name"),
        ("[[rule]]\nname = 'x'", r"rule 1 \(x\): pattern must have"),
        ("[[rule]]\nname = 'x'\npattern = '('", r"rule 1 \(x\)"),
        ("[[rule]]\nname = 'x'\npattern = 'a*'", "matches the empty text"),
        ("[[rule]]\nname = 'x'\npattern = 'a'\napplies_to = 'all'", "applies_to"),
        ("[[rule]]\nname = 'x'\npattern = 'a'\nignore_case = 1", "ignore_case"),
        ("[[rule]]\nname = 'x'\npattern = 'a'\nseverity = 1", "severity"),
        ("[[rule]]\nname = 'x'\npattern = 'a'\n[[rule]]\nname = 'x'\npattern = 'b'", "same name"),
    ],
)
def test_an_unusable_file_is_refused_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SafetyRulesInvalid, match=words):
        read_safety(write(tmp_path / "rules.toml", text))
    with pytest.raises(SafetyRulesInvalid, match="absent"):
        read_safety(tmp_path / "absent.toml")


class Found:
    """Checker with scripted verdicts."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = list(verdicts)
        self.requested = 0

    async def check_prompt(self, text: str) -> str | None:
        self.requested += 1
        return self.verdicts[0].hit

    def open_output(self) -> Found:
        return self

    async def push(self, text: str) -> Verdict:
        self.requested += 1
        return self.verdicts.pop(0)

    async def finish(self) -> Verdict:
        return await self.push("")

    def fork(self) -> Found:
        raise AssertionError("nobody asks")


def test_of_several_checkers_the_strictest_counts() -> None:
    first, second = (
        Found(Verdict(4), Verdict(7), Verdict(9)),
        Found(Verdict(2), Verdict(7), Verdict(7, "bad")),
    )
    check = SafetyStage([first, second]).open_output()
    assert check is not None

    verdicts = [at_once(check.push("abcd")), at_once(check.push("efg")), at_once(check.finish())]

    assert verdicts == [Verdict(2), Verdict(7), Verdict(7, "bad")]


def test_after_the_first_hit_no_further_checker_is_requested() -> None:
    first, second = Found(Verdict(3, "word")), Found(Verdict(9))
    stage = SafetyStage([first, second])
    check = stage.open_output()
    assert check is not None

    assert at_once(check.push("abcdefghi")) == Verdict(0, "word"), (
        "nor is anything safe that not all have seen"
    )
    assert at_once(check.push("j")) == Verdict(0, "word")
    first.verdicts = [Verdict(0, "word")]
    assert at_once(stage.check_prompt("text")) == "word"
    assert second.requested == 0
