"""Calls of GPT-OSS: messages to functions are calls by their tokens, however the output is cut."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from inference.adapters.external_request import Choice, Output, Request
from inference.engine import TokensGenerated
from inference.text.call_parser import ToolCallParser
from inference.text.reasoning import CHANNEL_TOKENS
from inference.text.tools import CallFormat, format_in
from tests.inference.reasoning_families import Family
from tests.inference.running import make_request

NAMES = ("get_weather", "add-2")
HM = "<|channel|>analysis<|message|>Hm.<|end|>"
WEATHER = '{"city": "Köln", "days": [1, 2]}'
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"

CASES = [
    ("a call after a thought", f"{HM}<|start|>assistant{CALL}{WEATHER}<|call|>",
     "Hm.", "", [["get_weather", WEATHER]]),
    ("the recipient before the channel",
     f"{HM}<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
     f"{WEATHER}<|call|>", "Hm.", "", [["get_weather", WEATHER]]),
    ("the recipient first of all",
     " to=functions.add-2<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
     "", "", [["add-2", "{}"]]),
    ("no blank after the name",
     "<|channel|>commentary to=functions.add-2<|constrain|>json<|message|>{}<|call|>",
     "", "", [["add-2", "{}"]]),
    ("in the channel of thoughts",
     "<|channel|>analysis to=functions.add-2 code<|message|>{}<|call|>",
     "", "", [["add-2", "{}"]]),
    ("a preamble, two calls and an answer",
     f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}{WEATHER}<|end|>"
     f"<|start|>assistant{CALL}{{}}<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
     "", "I look.\n4", [["get_weather", WEATHER], ["get_weather", "{}"]]),
    ("no arguments", f"{CALL}<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
     "", "4", [["get_weather", "{}"]]),
    ("cut in its arguments", f'{HM}<|start|>assistant{CALL}{{"city": "K',
     "Hm.", "", [["get_weather", '{"city": "K']]),
    ("cut in its header", f"{HM}<|start|>assistant<|channel|>commentary to=functions.get_",
     "Hm.", "", []),
    ("spelled in an answer",
     "<|channel|>final<|message|>< |channel|>commentary to=functions.get_weather {}<|return|>",
     "", "< |channel|>commentary to=functions.get_weather {}", []),
    ("to another recipient",
     "<|channel|>commentary to=python code<|message|>1+1<|call|>", "", "1+1", []),
    ("a function that is not offered",
     "<|channel|>commentary to=functions.other json<|message|>{}<|call|>", "", "{}", []),
]  # fmt: skip


@dataclass
class Found:
    reasoning: str = ""
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    reasoning_token_count: int = 0
    complete_count: int = 0


def family(output: str) -> Family:
    tokens = (*CHANNEL_TOKENS, "<|constrain|>")
    return Family("gpt-oss", tokens, "", "<|start|>assistant", output, "", "", special=True)


def found_in(
    output: str,
    step: int,
    *,
    functions: tuple[str, ...] = NAMES,
    stops: tuple[str, ...] = (),
) -> Found:
    """Read an output as the core of an engine does, with so many tokens at once."""
    made, found = family(output), Found()
    ids = made.ids
    request = make_request(made.prompt_ids, 1000, stop_sequences=stops, ignore_eos=False)
    # The end tokens of the model, as its generation_config.json has them.
    ends = frozenset(map(made.id_of, ("<|return|>", "<|call|>")))
    detokenizer = made.decoder.open(stops, made.prompt_ids, splits=True, marked_functions=functions)
    choice = Choice(Request(1, request, ends, 0.0, None), 0, 1, detokenizer)
    parser = ToolCallParser(CallFormat.HARMONY, NAMES, lambda: "id")

    def add(text: str, *, is_last: bool = False) -> None:
        for parsed in (parser.push(text), *([parser.finish()] if is_last else [])):
            found.text += parsed.text
            for piece in parsed.calls:
                if piece.id:
                    found.calls.append([piece.name, ""])
                found.calls[-1][1] += piece.arguments

    for end in range(step, len(ids) + step, step):
        if choice.ended is None:
            for event in choice.take(Output(ids[:end]), 1.0):
                assert isinstance(event, TokensGenerated)
                found.reasoning += event.reasoning
                found.reasoning_token_count += event.reasoning_token_count
                add(event.text)
    rest = choice.rest()
    found.reasoning += rest.reasoning
    add(rest.text, is_last=True)
    found.complete_count = parser.complete_count
    return found


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
@pytest.mark.parametrize(("name", "output", "reasoning", "text", "calls"), CASES)
def test_a_message_to_a_function_is_a_call(
    name: str, output: str, reasoning: str, text: str, calls: list[list[str]], step: int
) -> None:
    found = found_in(output, step)

    assert (found.reasoning, found.text, found.calls) == (reasoning, text, calls), name
    whole = [each for each in calls if each[1].endswith("}")]
    assert found.complete_count == len(whole)
    assert found == found_in(output, 1)
    for _, arguments in whole:
        json.loads(arguments)


def test_without_tools_the_message_is_text() -> None:
    found = found_in(f"{CALL}{WEATHER}<|call|>", 1, functions=())

    assert found.text == WEATHER


def test_a_stop_sequence_is_searched_in_what_the_model_wrote() -> None:
    found = found_in(f"{CALL}{WEATHER}<|call|>", 1, stops=("name", "days", "\ufdd0"))

    assert found.calls == [["get_weather", '{"city": "Köln", "']]


def test_the_form_is_found_in_the_template() -> None:
    template = "<|start|>assistant to=functions.{{ name }}<|channel|>commentary json<|message|>"
    assert format_in(template) is CallFormat.HARMONY
