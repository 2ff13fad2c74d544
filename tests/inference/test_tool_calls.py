"""Calls in streamed text are found however the text is cut; nothing is lost."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.text.call_parser import HELD_CHARS_MAX, JsonScanner, ToolCallParser
from inference.text.tools import CallFormat, format_in

NAMES = ("get_weather", "get", "book-room")
WEATHER = '{"name": "get_weather", "arguments": {"city": "Ulm", "days": [1, 2]}}'
CITY = '{"city": "Ulm", "days": [1, 2]}'

Calls = list[tuple[str, str]]

HERMES, LLAMA, MISTRAL, JSON = (
    CallFormat.HERMES,
    CallFormat.LLAMA,
    CallFormat.MISTRAL,
    CallFormat.JSON,
)
IN_ULM, EMPTY = [("get_weather", CITY)], [("get", "{}")]

FRAGMENTS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[",
        "]",
        ",",
        ";",
        " ",
        "\n",
        "{",
        "}",
        '"',
        "x<",
        "\\",
        "{}",
    ),
    *(
        '{"name": "get"',
        ', "arguments": {"a": 1}',
        ', "arguments": "{\\"a\\": 1}"',
        '"arguments": null',
        '"why": [1], ',
        '"parameters": {',
        WEATHER,
        '"id": "',
        "<tool",
        "]}",
        ":",
        '"name":',
        "é🙂",
        "-1e",
    ),
)
DOCUMENTS = (
    '{"a": {"b": [1, -2.5e+3, true], "c": null}, "d": "x\\u00e9\\n\\"", "e": [], "f": {}}',
    '{"a":[{"b":0},{"c":[[],[1,2]]}],"d":false}',
    '{ "a" : "\\\\" , "b" : 10 }',
)


def called(call: str) -> str:
    """Return a call as Hermes writes it."""
    return f"<tool_call>{call}</tool_call>"


def parse(form: CallFormat, pieces: Sequence[str]) -> tuple[str, Calls, list[str]]:
    """Return text, calls by name and arguments, and their ids, of an output in pieces."""
    numbers = itertools.count()
    parser = ToolCallParser(form, NAMES, lambda: f"id{next(numbers)}")
    text, calls, ids = "", list[list[str]](), list[str]()
    for parsed in (*(parser.push(piece) for piece in pieces), parser.finish()):
        text += parsed.text
        for piece in parsed.calls:
            if piece.id:
                assert piece.index == len(calls)
                ids.append(piece.id)
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments
    assert parser.call_count == len(calls)
    return text, [(name, arguments) for name, arguments in calls], ids


CASES: tuple[tuple[CallFormat, str, str | None, Calls], ...] = (
    (HERMES, "Just text.", "Just text.", []),
    (HERMES, called(f"\n{WEATHER}\n"), "", IN_ULM),
    (HERMES, f"Let me see.\n<tool_call>{WEATHER}</tool_call>", "Let me see.", IN_ULM),
    (
        HERMES,
        f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{WEATHER}</tool_call>\n",
        "",
        IN_ULM * 2,
    ),
    (HERMES, f"<tool_call>{WEATHER}</tool_call>\nDone.", "\nDone.", IN_ULM),
    (HERMES, called('{"arguments": {"a": 1}, "name": "get"}'), "", [("get", '{"a": 1}')]),
    (HERMES, called('{"name": "get"}'), "", EMPTY),
    # The model omitted a brace.
    (HERMES, '<tool_call>{"name": "get", "arguments": {}</tool_call>!', "!", EMPTY),
    (
        HERMES,
        '<tool_call>{"name": "get", "arguments": {"a": \'b\'}}</tool_call>x',
        "x",
        [("get", "{\"a\": 'b'}}")],
    ),
    (
        HERMES,
        '<tool_call>{"name": "get", "arguments": {"a": "</tool_call>"}}</tool_call>',
        "",
        [("get", '{"a": "</tool_call>"}')],
    ),
    (HERMES, '<tool_call>{"name": "get", "arguments": {"a"', "", [("get", '{"a"')]),  # cut off
    (HERMES, '<tool_call>{"name": "ge', '<tool_call>{"name": "ge', []),
    # Of functions that were not offered: calls behind an opening, text without one.
    (
        HERMES,
        '<tool_call>{"name": "shop.find it", "arguments": {"a": 1}}</tool_call>!',
        "!",
        [("shop.find it", '{"a": 1}')],
    ),
    (HERMES, called('{"arguments": {}, "name": "new"}'), "", [("new", "{}")]),
    (HERMES, called('{"name": "", "arguments": {}}'), None, []),
    (HERMES, called(f'{{"name": "{"n" * 200}"}}'), None, []),
    (
        HERMES,
        f'<tool_call>{{"name": "n<tool_call>{WEATHER}</tool_call>',
        '<tool_call>{"name": "n',
        IN_ULM,
    ),
    (
        MISTRAL,
        f'[TOOL_CALLS][{{"name": "new"}}, {WEATHER}]',
        "",
        [("new", "{}"), ("get_weather", CITY)],
    ),
    (
        LLAMA,
        '<|python_tag|>{"name": "new", "parameters": {}}; {"name": "newer", "parameters": {}}',
        "",
        [("new", "{}"), ("newer", "{}")],
    ),
    (LLAMA, '{"name": "new", "parameters": {}}', None, []),
    (HERMES, f"<tool_call>no<tool_call>{WEATHER}</tool_call>", "<tool_call>no", IN_ULM),
    (HERMES, f'<tool_call>{{"na<tool_call>{WEATHER}</tool_call>', '<tool_call>{"na', IN_ULM),
    (HERMES, "a < b <tool <tool_cal", "a < b <tool <tool_cal", []),
    (HERMES, " \n", " \n", []),
    (HERMES, called(f"[{WEATHER}, {WEATHER}]"), "", IN_ULM * 2),
    (LLAMA, '\n{"name": "get", "parameters": {"q": "ü\\"}"}}', "", [("get", '{"q": "ü\\"}"}')]),
    (LLAMA, '{"name": "get", "parameters": {}}; {"name": "get", "parameters": {}}', "", EMPTY * 2),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "get", "parameters": {}}', "", EMPTY),
    (LLAMA, '{"city": "Ulm"}', '{"city": "Ulm"}', []),
    (LLAMA, "[1] says: {no}", "[1] says: {no}", []),
    (
        LLAMA,
        'I call {"name": "get", "parameters": {}}',
        'I call {"name": "get", "parameters": {}}',
        [],
    ),
    (LLAMA, '<|python_tag|>brave.call(q="x")', '<|python_tag|>brave.call(q="x")', []),
    (MISTRAL, f"[TOOL_CALLS] [{WEATHER}]", "", IN_ULM),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "get", "arguments": {}, "id": "abcdefghi"}, {"name": "get"}]',
        "",
        EMPTY * 2,
    ),
    (MISTRAL, f"Well [1]: [TOOL_CALLS][{WEATHER}, oops]", "Well [1]:, oops]", IN_ULM),
    # Arguments as JSON text in a string, as Granite 4 writes them, or none.
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "get", "arguments": "{\\"a\\": 1}"}]',
        "",
        [("get", '{"a": 1}')],
    ),
    (LLAMA, '{"parameters": "{\\"a\\": 1}", "name": "get"}', "", [("get", '{"a": 1}')]),
    (HERMES, called('{"name": "get", "arguments": ""}'), "", EMPTY),
    (HERMES, called('{"name": "get", "arguments": null}'), "", EMPTY),
    (HERMES, called('{"name": "get", "arguments": "[1]"}'), None, []),
    (HERMES, called('{"name": "get", "arguments": "{} {}"}'), None, []),
    (HERMES, called('{"name": "get", "arguments": "{NaN}"}'), None, []),
    (HERMES, called('{"name": "get", "arguments": "\\x"}'), None, []),
    (HERMES, called('{"name": "get", "arguments": nil}'), None, []),
    (LLAMA, '{"name": "get", "parameters": "{}, but', None, []),
    # Members of other notations: ignored behind an opening, text without one.
    (
        HERMES,
        '<tool_call>{"index": 0, "x": {"y": [",}"]}, "name": "get", "arguments": {}, "why": "}"}'
        "</tool_call>",
        "",
        EMPTY,
    ),
    (LLAMA, '{"name": "get", "parameters": {}, "why": 1}', ', "why": 1}', EMPTY),
    (LLAMA, '{"why": 1, "name": "get", "parameters": {}}', None, []),
    (
        LLAMA,
        '{"type": "function", "function": "get", "parameters": {"a": 1}}',
        "",
        [("get", '{"a": 1}')],
    ),
    (HERMES, called('{"name": "get", "name": "get"}'), None, []),
    (HERMES, called('{"x": tru, "name": "get"}'), None, []),
    # Several objects, or a brace too many, before a closing.
    (
        HERMES,
        f'<tool_call>{WEATHER}\n{{"name": "get"}}}}</tool_call>!',
        "!",
        [("get_weather", CITY), ("get", "{}")],
    ),
    (JSON, f"[ {WEATHER} , {WEATHER} ]", "", IN_ULM * 2),
    (JSON, WEATHER, "", IN_ULM),
    (JSON, WEATHER[:-10], "", [("get_weather", CITY[:-9])]),
    (JSON, f'[{WEATHER}, {{"name": "ge', "", IN_ULM),
)


@pytest.mark.parametrize(("form", "output", "text", "calls"), CASES)
def test_a_call_is_distinguished_from_text_in_every_form(
    form: CallFormat, output: str, text: str | None, calls: Calls
) -> None:
    """text None: all of the output is text."""
    found_text, found_calls, ids = parse(form, [output])

    assert (found_text, found_calls) == (output if text is None else text, calls)
    assert ids == [f"id{number}" for number in range(len(calls))]


@given(st.sampled_from(CallFormat), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.data())
def test_however_the_text_is_cut_the_calls_are_those_of_the_whole(
    form: CallFormat, parts: list[str], data: st.DataObject
) -> None:
    output = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(output)), max_size=6)))

    pieces = [
        output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)
    ]

    whole = parse(form, [output])
    assert parse(form, pieces) == whole
    assert parse(form, list(output)) == whole
    text, calls, _ = whole
    if not calls and form is not JSON:
        assert text == output, "nothing is lost"


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ),
    st.booleans(),
)
def test_every_json_object_is_followed_to_its_end(value: Any, ascii_only: bool) -> None:
    document = json.dumps({"v": value}, ensure_ascii=ascii_only)
    scanner = JsonScanner()

    complete = [scanner.push(character) and scanner.complete for character in document]

    assert complete == [False] * (len(document) - 1) + [True]


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans()), st.booleans())
def test_arguments_in_a_string_are_its_text(value: dict[str, Any], ascii_only: bool) -> None:
    arguments = json.dumps(value, ensure_ascii=ascii_only)
    quoted = json.dumps(arguments, ensure_ascii=ascii_only)

    text, calls, _ = parse(
        HERMES, list(f'<tool_call>{{"name": "get", "arguments": {quoted}}}</tool_call>')
    )

    assert (text, calls) == ("", [("get", arguments)])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_invalid_json_is_never_accepted_as_an_object(document: str) -> None:
    """Compared with the standard library for slightly damaged documents."""
    characters = (*'{}[]",:\\ue1-+.0tn x', "\n", "\t", "")
    for position, length, character in itertools.product(
        range(1, len(document)), (0, 1), characters
    ):
        text = document[:position] + character + document[position + length :]
        scanner = JsonScanner()

        end = next(
            (
                index
                for index, each in enumerate(text, 1)
                if not scanner.push(each) or scanner.complete
            ),
            None,
        )

        try:
            expected = json.JSONDecoder().raw_decode(text)[1]
        except ValueError:
            assert not scanner.complete, text
        else:
            assert (scanner.complete, end) == (True, expected), text


@pytest.mark.parametrize(
    ("form", "output", "text"),
    [
        (
            HERMES,
            f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{WEATHER}</tool_call>",
            f"\n<tool_call>{WEATHER}</tool_call>",
        ),
        (HERMES, f"<tool_call>[{WEATHER}, {WEATHER}]</tool_call>", f", {WEATHER}]</tool_call>"),
        (LLAMA, f"{WEATHER}; {WEATHER}", f"; {WEATHER}"),
        (LLAMA, f"{WEATHER}<|python_tag|>{WEATHER}", f"<|python_tag|>{WEATHER}"),
        (MISTRAL, f"[TOOL_CALLS][{WEATHER}, {WEATHER}]", f", {WEATHER}]"),
        (MISTRAL, f"[TOOL_CALLS][{WEATHER}][TOOL_CALLS][{WEATHER}]", f"[TOOL_CALLS][{WEATHER}]"),
    ],
)
@pytest.mark.parametrize("piece_length", [1, 1000])
def test_where_one_call_is_wanted_what_comes_behind_it_is_text(
    form: CallFormat, output: str, text: str, piece_length: int
) -> None:
    """One step of an engine may include a second call."""
    parser = ToolCallParser(form, NAMES, single=True)
    pieces = [
        output[position : position + piece_length]
        for position in range(0, len(output), piece_length)
    ]

    parsed = [*map(parser.push, pieces), parser.finish()]

    assert "".join(each.text for each in parsed) == text
    assert "".join(call.arguments for each in parsed for call in each.calls) == CITY
    assert parser.call_count == parser.complete_count == 1


def test_text_that_never_becomes_a_call_is_released() -> None:
    blanks, parser = " " * (HELD_CHARS_MAX + 1), ToolCallParser(CallFormat.HERMES, NAMES)
    early = '<tool_call>{"arguments": {"a": "' + "x" * HELD_CHARS_MAX

    assert parser.push(blanks).text == blanks
    assert parser.push(early).text == early
    assert parser.push("y").text == "y"


@pytest.mark.parametrize(
    ("before", "repeated"),
    [
        ("", '<tool_call>{"arguments": {"<tool_call>{"name": "get", "arguments": {"b": \n'),
        ('<tool_call>{"name": "get", "arguments": {"number": ', "7" * 80),
    ],
)
def test_a_long_output_takes_time_in_proportion_to_its_length(before: str, repeated: str) -> None:
    """Text that always looks like the beginning of a call costs linear time."""
    short = min(seconds(before + repeated * 500) for _ in range(3))

    assert seconds(before + repeated * 5000) < 30 * short


@pytest.mark.parametrize("before", ["Text.", '<tool_call>{"name": "get", "arguments": {}}'])
def test_blanks_that_are_held_cost_no_more_than_the_text_of_a_call(before: str) -> None:
    text = min(
        seconds('<tool_call>{"name": "get", "arguments": {"a": "' + "a" * 30_000) for _ in range(3)
    )

    assert seconds(before + "\n" * 30_000) < 10 * text


def seconds(output: str) -> float:
    """Return the CPU time of reading an output."""
    parser = ToolCallParser(CallFormat.HERMES, NAMES)
    begun = time.process_time()
    parser.push(output)
    return time.process_time() - begun


def test_the_form_of_calls_is_known_by_the_template() -> None:
    assert format_in("{{ '<tool_call>' ~ tool_call.function | tojson }}") is CallFormat.HERMES
    assert format_in("{{ '[TOOL_CALLS] [' }}") is CallFormat.MISTRAL
    assert (
        format_in("{%- if message.role == 'ipython' %}{{ '\"parameters\": ' }}") is CallFormat.LLAMA
    )
    assert format_in("<tool_call>\n<function=example>") is None
    assert format_in("[TOOL_CALLS]name[ARGS]{}") is None
    assert format_in("{{ messages }}") is None
