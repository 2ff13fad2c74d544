"""Outputs with JSON: rules see through escapes, wherever the output is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.safety.classifiers import ClassifierOutputCheck, ClassifierTerms
from inference.safety.rules import Rule, RuleChecker
from inference.safety.safety import EscapedOutputCheck, SafetyStage, Unescaper, Verdict
from tests.inference.test_safety import at_once

PATTERN = regex.compile(r"\bsecret\s+\d\d|🙂x")
RULES = RuleChecker([Rule("secret", PATTERN, in_prompt=False, in_output=True)])


def opened() -> EscapedOutputCheck:
    """Return a check by the rule above, as one of two."""
    check = SafetyStage([RULES, RULES]).open_output()
    assert check is not None
    return EscapedOutputCheck(check)


def stream(check: EscapedOutputCheck, pieces: Sequence[str]) -> tuple[str, str | None]:
    """Return the text released, as by `OutputFilter`, and the hit that ended it."""
    text, safe = "".join(pieces), 0
    ends = [sum(map(len, pieces[: index + 1])) for index in range(len(pieces))]
    verdict = Verdict(0)
    for piece, end in zip(pieces, ends, strict=True):
        verdict = at_once(check.push(piece))
        assert safe <= verdict.safe_char_count <= end, "what was safe stays safe"
        safe = verdict.safe_char_count
        if verdict.hit is not None:
            break
    else:
        verdict = at_once(check.finish())
    return text[
        : max((end for end in ends if end <= verdict.safe_char_count), default=0)
    ], verdict.hit


def units(character: str) -> str:
    """Return a character as escapes by number."""
    data = character.encode("utf-16-be")
    return "".join(f"\\u{data[index : index + 2].hex()}" for index in range(0, len(data), 2))


@st.composite
def written(draw: st.DrawFn) -> list[str]:
    """Draw spellings of each character of a text that JSON allows."""
    words = st.sampled_from(
        ["secret", " ", "\n", "1", "12", "a", "🙂", "x", '"', "\\", "s", "ü", "u0020", "sec"]
    )
    text = "".join(draw(st.lists(words, max_size=12)))
    forms = [
        [json.dumps(character, ensure_ascii=False)[1:-1], units(character)] for character in text
    ]
    return [form[draw(st.integers(0, 1))] for form in forms]


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(written(), st.data())
def test_rules_find_the_same_in_escaped_text(characters: list[str], data: st.DataObject) -> None:
    """The independent answer parses all of the JSON, and searches the result."""
    output = "".join(characters)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(output)), max_size=8)))
    pieces = [
        output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)
    ]
    read = json.loads(f'"{output}"')
    found = PATTERN.search(read)

    given_out, hit = stream(opened(), pieces)

    unescaper = Unescaper()
    assert "".join(map(unescaper.push, pieces)) + unescaper.pending == read
    if found is None and PATTERN.search(output) is None:
        assert (given_out, hit) == (output, None)
    else:
        assert hit == "secret"
    if found is not None:
        assert len(given_out) <= len("".join(characters[: found.start()])), (
            "not even its beginning leaves"
        )


@pytest.mark.parametrize(
    ("pieces", "given_out", "hit"),
    [
        (["a ", r"\u007", "3ecret", " 12", "!"], "a ", "secret"),
        (["a ", r"\u00", r"73ecre", "t is none"], r"a \u0073ecret is none", None),
        (["secret", r"\n", "12", "."], "", "secret"),
        ([r"\ud83d", r"\ude", "42", "x"], "", "secret"),
        ([r"secret\\n12 "], r"secret\\n12 ", None),  # an escaped backslash, and then an n
        # Not JSON: released unchanged.
        (["C:\\dir\\x ", "\\", "uzz \\ud83d ", "\\"], "C:\\dir\\x \\uzz \\ud83d \\", None),
    ],
)
def test_escapes_are_read_across_tokens(pieces: list[str], given_out: str, hit: str | None) -> None:
    assert stream(opened(), pieces) == (given_out, hit)


def test_text_is_released_once_no_rule_can_begin_in_it() -> None:
    check = opened()

    safe = [
        at_once(check.push(piece)).safe_char_count
        for piece in ("one ", r"\u0061", " ", "\\", "n", "sec", "ond")
    ]

    assert safe == [4, 10, 11, 11, 13, 13, 19], (
        "half an escape waits for its other half, and 'sec' for what it becomes"
    )


async def test_classifiers_see_both_and_the_second_only_from_the_first_escape_on() -> None:
    seen: list[str] = []

    async def find(text: str) -> str | None:
        seen.append(text)
        return "bad" if "bad" in text else None

    check = EscapedOutputCheck(
        ClassifierOutputCheck(
            find, ClassifierTerms(window_chars=4, context_chars=4), clock=lambda: 0.0
        )
    )
    verdicts = [await check.push(piece) for piece in ("abcd", "ef", r"\u0062", "ad")]

    assert verdicts == [Verdict(4), Verdict(4), Verdict(4), Verdict(4, "bad")]
    assert seen == ["abcd", r"abcdef\u0062", "abcdefbad"]
