"""Parameters outside OpenAI's API: bodies that real clients send, and parameters that are refused.

The bodies are those of the clients that were recorded against a running server.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from api.core.errors import InvalidRequest
from api.openai.error_responses import HttpFault
from api.openai.parameters import (
    ChatParameters,
    CompletionParameters,
    ParsedRequest,
    ResponseParameters,
    decode,
    parse_chat,
    parse_completion,
    parse_response,
    tolerate,
)
from api.openai.tolerance import (
    ENCODED_COUNT_MAX,
    ENTERED_COUNT_MAX,
    IGNORED_HEADER,
    NAMES_MAX,
    Notes,
    encoded,
)
from bench.costly_bodies import bodies_of
from tests.api.test_growth import HTTP

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
RESPONSE: dict[str, Any] = {"model": "demo", "input": "Hello"}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "Hello"}
FUNCTION = {"type": "function", "name": "f"}
QUESTION: list[Any] = [{"role": "user", "content": "Paris?"}]
BOTH: dict[str, Any] = {"city": {"type": "string"}, "sunny": {"type": "boolean"}}
ANSWER: dict[str, Any] = {"type": "object", "properties": BOTH, "required": ["city", "sunny"]}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
CLOSED: dict[str, Any] = {"additionalProperties": False}
DRAFT_7: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#"}
WEATHER: dict[str, Any] = {"name": "weather", "description": "Weather of a city."}
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}

CLIENTS: tuple[tuple[str, dict[str, Any], list[str]], ...] = (
    (
        "autogen",
        {
            "model": "demo",
            "messages": [
                {"role": "system", "content": "Be nice"},
                {"role": "user", "name": "user", "content": "Hello"},
            ],
            "stream": False,
        },
        ["messages[].name"],
    ),
    (
        "semantic kernel",
        {
            "model": "demo",
            "messages": [
                {"role": "system", "content": "be nice", "name": "bot"},
                {"role": "user", "content": "Hello"},
            ],
            "stream": False,
        },
        ["messages[].name"],
    ),
    (
        "langchain agent, second turn",
        {
            "model": "demo",
            "messages": [
                {"content": "Hi", "role": "user"},
                {"content": "Hello", "name": "helper", "role": "assistant"},
                *QUESTION,
            ],
            "stream": False,
            "tools": [{"type": "function", "function": WEATHER | {"parameters": CITY}}],
        },
        ["messages[].name"],
    ),
    (
        "langchain agent with a provider's format",
        {
            "model": "demo",
            "messages": QUESTION,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "Answer", "strict": False, "schema": ANSWER},
            },
            "stream": False,
            "tools": [
                {
                    "type": "function",
                    "function": WEATHER | {"parameters": CITY | CLOSED, "strict": True},
                }
            ],
        },
        [],
    ),
    (
        "ai sdk object beside tools",
        {
            "model": "demo",
            "messages": QUESTION,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "schema": DRAFT_7 | ANSWER | CLOSED,
                    "strict": True,
                    "name": "response",
                },
            },
            "tools": [
                {"type": "function", "function": WEATHER | {"parameters": DRAFT_7 | CITY | CLOSED}}
            ],
            "tool_choice": "auto",
        },
        [],
    ),
    (
        "ai sdk object beside tools, responses",
        {
            "model": "demo",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Paris?"}]}],
            "text": {
                "format": {
                    "type": "json_schema",
                    "strict": True,
                    "name": "response",
                    "schema": DRAFT_7 | ANSWER | CLOSED,
                }
            },
            "tools": [{"type": "function", **WEATHER, "parameters": DRAFT_7 | CITY | CLOSED}],
            "tool_choice": "auto",
        },
        [],
    ),
    (
        "openai agents, after a call that was cut off",
        {
            "messages": [
                {"content": "Be brief.", "role": "system"},
                *QUESTION,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Par'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "invalid"},
            ],
            "model": "demo",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "final_output", "strict": True, "schema": ANSWER | CLOSED},
            },
            "tools": [
                {
                    "type": "function",
                    "function": WEATHER | {"parameters": CITY | CLOSED, "strict": True},
                }
            ],
        },
        [],
    ),
    (
        "openai agents, responses after a call that was cut off",
        {
            "include": [],
            "input": [
                *QUESTION,
                {
                    "type": "function_call",
                    "call_id": "c",
                    "name": "weather",
                    "arguments": '{"city": "Par',
                },
                {"type": "function_call_output", "call_id": "c", "output": "invalid"},
            ],
            "instructions": "Be brief.",
            "model": "demo",
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "final_output",
                    "schema": ANSWER | CLOSED,
                    "strict": True,
                }
            },
            "tools": [{**WEATHER, "parameters": CITY | CLOSED, "strict": True, "type": "function"}],
        },
        [],
    ),
    (
        "instructor with a forced tool of the same format",
        {
            "input": QUESTION,
            "model": "demo",
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "Answer",
                    "strict": True,
                    "schema": ANSWER | CLOSED,
                }
            },
            "tool_choice": {"type": "function", "name": "Answer"},
            "tools": [
                {
                    "type": "function",
                    "name": "Answer",
                    "parameters": ANSWER | CLOSED,
                    "description": "Correctly extracted `Answer`",
                }
            ],
        },
        [],
    ),
    (
        "instructor",
        {
            "messages": QUESTION,
            "model": "demo",
            "tool_choice": {"type": "function", "function": {"name": "Answer"}},
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "Answer",
                        "description": "Correctly extracted `Answer`",
                        "parameters": ANSWER,
                    },
                }
            ],
        },
        [],
    ),
    (
        "llm with an open schema",
        {
            "messages": [{"role": "user", "content": "A person"}],
            "model": "demo",
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "output",
                    "schema": {
                        "type": "object",
                        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                        "required": ["name", "age"],
                    },
                },
            },
            "stream": False,
        },
        [],
    ),
    (
        "langchain agent",
        {
            "model": "demo",
            "messages": [
                *CHAT["messages"],
                {
                    "role": "assistant",
                    "name": "helper",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"city":\n'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "name": "f", "content": "x"},
            ],
        },
        ["messages[].name"],
    ),
    (
        "guidellm",
        CHAT
        | {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 16,
            "ignore_eos": True,
        },
        [],
    ),
    (
        "guidellm responses",
        RESPONSE | {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        ["stream_options.continuous_usage_stats"],
    ),
    (
        "pydantic-ai",
        CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            },
            "tool_choice": "auto",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        },
        [],
    ),
    (
        "codex",
        RESPONSE
        | {
            "tools": [
                FUNCTION,
                {"type": "namespace", "name": "multi_agent_v1", "tools": [FUNCTION]},
                {"type": "web_search", "external_web_access": True},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "client_metadata": {"a": "b"},
            "reasoning": {"summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "x",
            "store": False,
            "stream": True,
        },
        [
            "client_metadata",
            "tools[].external_web_access",
            "prompt_cache_key",
            "tools[].web_search",
            "reasoning.summary",
            "include[]",
        ],
    ),
    (
        "litellm for anthropic",
        {
            "model": "demo",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "include": ["reasoning.encrypted_content"],
            "max_output_tokens": 50,
        },
        ["include[]"],
    ),
    (
        "earlier reasoning",
        {
            "model": "demo",
            "input": [
                {"role": "user", "content": "Hi"},
                {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
                {"role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
            ],
            "truncation": "auto",
        },
        ["input[].encrypted_content"],
    ),
    (
        "cached parts and earlier thoughts",
        {
            "model": "demo",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
                    ],
                },
                {"role": "assistant", "content": None, "reasoning_content": "hm"},
            ],
        },
        ["messages[].content[].cache_control"],
    ),
    ("lm-eval", COMPLETION | {"echo": True, "logprobs": 1, "suffix": None}, []),
    ("vllm bench", CHAT | {"repetition_penalty": 1.0, "skip_special_tokens": True}, []),
    ("hints", CHAT | {"x_client": "a", "priority": 3, "rid": "r"}, ["x_client", "priority", "rid"]),
)
MANY: Mapping[str, tuple[Callable[[str], str], bool]] = {
    "unknown parameters": (lambda _: ",".join(f'"p{n:x}":1' for n in range(70_000)), False),
    "an unknown parameter": (lambda _: '"p":[' + "{}," * 40_000 + "{}]", False),
    "a repeated parameter": (lambda name: ",".join([f'"{name}":1'] * 70_000), False),
    "objects": (lambda name: f'"{name}":[' + "{}," * 40_000 + "{}]", True),
    "members": (
        lambda name: (
            f'"{name}":{{' + ",".join(f'"p{n:x}":1' for n in range(70_000)) + '},"q":1,"r":1'
        ),
        True,
    ),
    "strings": (lambda name: f'"{name}":[' + '"",' * 140_000 + '""]', True),
    "values": (lambda name: f'"{name}":[' + "1," * 1_100_000 + "1]", True),
}


def parse(body: dict[str, Any], *, strict: bool = False) -> tuple[ParsedRequest, list[str]]:
    """Parse a body by the API that its members belong to; return the ignored names too."""
    ignored = None if strict else Notes()
    kind, convert = (
        (ChatParameters, parse_chat)
        if "messages" in body
        else (ResponseParameters, parse_response)
        if "input" in body
        else (CompletionParameters, parse_completion)
    )
    requested: Any = decode(msgspec.json.encode(body), kind, ignored)
    if ignored is not None:
        tolerate(requested, ignored)
    parsed = convert(requested)
    return parsed, [] if ignored is None else list(ignored.names)


@pytest.mark.parametrize(
    ("body", "names"), [each[1:] for each in CLIENTS], ids=[n for n, *_ in CLIENTS]
)
def test_bodies_of_real_clients_are_accepted(body: dict[str, Any], names: list[str]) -> None:
    assert parse(body)[1] == names


def test_a_strict_request_with_an_unknown_parameter_is_refused() -> None:
    for body in (
        CHAT | {"x_client": 1},
        CHAT | {"messages": [CHAT["messages"][0] | {"x_name": "x"}]},
    ):
        parse(body)
        with pytest.raises(InvalidRequest):
            parse(body, strict=True)


def test_parts_that_are_ignored_do_not_reach_the_start_frame() -> None:
    bodies = {name: body for name, body, _ in CLIENTS}

    codex = parse(bodies["codex"])[0].starts[0]
    thinking = parse(bodies["earlier reasoning"])[0].starts[0]

    assert [tool.name for tool in codex.tools] == ["f", "multi_agent_v1__f"]
    assert [turn.content for turn in thinking.conversation.messages] == ["Hi", "Go on"]
    thoughts = parse(bodies["cached parts and earlier thoughts"])[0].starts[0]
    assert [turn.reasoning for turn in thoughts.conversation.messages] == ["", "hm"]


def test_earlier_thoughts_belong_to_the_turn_after_them() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "4"}
    answer = {"role": "assistant", "content": "It is 4."}
    requested, more = ({"role": "user", "content": text} for text in ("2+2?", "And?"))
    reply = {"role": "assistant", "content": "I look."}
    encrypted = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    items = [requested, thought("Hm"), reply, encrypted, call, result, thought("So"), answer]
    items += [thought("Cut"), more]

    [start] = parse({"model": "demo", "input": items})[0].starts

    turns = [(turn.content, turn.reasoning) for turn in start.conversation.messages]
    before = [("2+2?", ""), ("I look.", "Hm"), ("4", ""), ("It is 4.", "So")]
    assert turns == [*before, ("", "Cut"), ("And?", "")]
    assert [len(turn.tool_calls) for turn in start.conversation.messages] == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (CHAT | {"temprature": 0.5}, "temprature", "did you mean temperature?"),
        (CHAT | {"max_output_tokens": 5}, "max_output_tokens", "another API"),
        (COMPLETION | {"tools": [FUNCTION]}, "tools", "another API"),
        (CHAT | {"response_format": {"type": "text", "x": 1}}, "response_format.x", "leave it out"),
        (
            CHAT | {"chat_template_kwargs": {"bos_token": "x"}},
            "chat_template_kwargs.bos_token",
            "leave it out",
        ),
        (
            CHAT | {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
            "messages[].weight",
            "leave it out",
        ),
        (
            RESPONSE | {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
            "requires tools",
        ),
    ],
)
def test_meaningful_parameters_are_refused(body: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(body)

    assert refused.value.violations[0].field == field
    assert words in refused.value.violations[0].description


def test_the_header_is_bounded_and_has_no_text_that_is_not_a_name() -> None:
    body = CHAT | {f"hint_{index}": 1 for index in range(NAMES_MAX + 5)}
    hostile = CHAT | {"a\r\nset-cookie: x": 1, "ü" * 9: 1, "y" * 100: 1}

    for sent, shown in ((body, "and 5 more"), (hostile, "?, ?, ?")):
        ignored = Notes()
        decode(msgspec.json.encode(sent), ChatParameters, ignored)
        assert ignored.headers()[IGNORED_HEADER].endswith(shown)
    assert Notes().headers() == {}


@pytest.mark.parametrize("what", MANY)
@pytest.mark.parametrize("path", HTTP)
def test_the_error_names_the_parameter_with_most_elements(path: str, what: str) -> None:
    """Another parameter has more bytes."""
    enter, kind, _ = HTTP[path]
    names = ("metadata", "dimensions", "messages", "tokens")
    name = next(each for each in names if each in kind.__struct_fields__)
    make, is_named = MANY[what]
    body = f'{{"model":"{"x" * 1_500_000}",{make(name)}}}'

    with pytest.raises(InvalidRequest) as refusal:
        enter(body.encode())

    [violation] = refusal.value.violations
    assert violation.field == (name if is_named else "")
    assert "the body may have " in violation.description
    assert ("a body may have 64" in violation.description) is not is_named


@pytest.mark.parametrize("path", HTTP)
def test_a_body_that_is_no_object_is_refused_for_that(path: str) -> None:
    enter, _, _ = HTTP[path]

    with pytest.raises(InvalidRequest, match="object"):
        enter(b"[" + b"{}," * 40_000 + b"{}]")
    with pytest.raises(HttpFault, match="not valid JSON"):
        enter(b'{"p":[' + b"{}," * 40_000)


@pytest.mark.parametrize("path", HTTP)
def test_text_that_is_not_utf_8_is_refused_wherever_it_is(path: str) -> None:
    """msgspec does not check text that it keeps unparsed, like the schema of a tool."""
    enter, kind, plain = HTTP[path]
    for costly in bodies_of(kind, plain):
        body = costly.build(100)
        for index in [found.start() + 1 for found in re.finditer(rb'"[xa\\]', body)][:3]:
            broken = body[:index] + b"\xff" + body[index:]
            with pytest.raises(HttpFault, match="not valid JSON"):
                enter(broken)


def test_a_byte_order_mark_before_the_body_is_skipped() -> None:
    body = BOM_UTF8 + msgspec.json.encode(CHAT | {"x_client": 1})
    notes = Notes()

    assert decode(body, ChatParameters, notes).model == CHAT["model"]
    assert [*notes.names] == ["x_client"]


def test_results_without_an_id_answer_the_calls_in_order() -> None:
    def call(number: int) -> dict[str, Any]:
        function = {"name": "f", "arguments": "{}"}
        return {"id": f"c{number}", "type": "function", "function": function}

    def ids(*results: dict[str, Any]) -> list[str]:
        requested = {"role": "assistant", "tool_calls": [call(1), call(2)]}
        reply = [{"role": "user", "content": "Hi"}, requested, *results]
        frame = parse(CHAT | {"messages": reply})[0].starts[0]
        return [turn.tool_call_id for turn in frame.conversation.messages[2:]]

    result = {"role": "tool", "content": "4"}

    assert ids(result, result) == ["c1", "c2"]
    assert ids(result | {"tool_call_id": "c2"}, result) == ["c2", "c1"]
    assert ids(result, result | {"tool_call_id": "c2"}, result) == ["c1", "c2", ""]


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": [], "b\n": {"c": {"d": {"e": {"f": ["é", None, True, 1.5e9]}}}}},
        [*range(ENCODED_COUNT_MAX)],
        {"format": {"value": [1.5] * (2 * ENCODED_COUNT_MAX + 1)}},
        {str(number): [number] for number in range(ENTERED_COUNT_MAX + 1)},
    ],
)
def test_a_value_encoded_in_parts_has_the_text_of_one_encoded_at_once(value: object) -> None:
    assert encoded(value) == msgspec.json.encode(value)
