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
from tests.api.openai_bodies import (
    Part,
    assistant,
    call,
    called,
    calling,
    function,
    input_text,
    json_format,
    output,
    result,
    text,
    text_format,
    tool,
    user,
)
from tests.api.test_growth import HTTP

CHAT: dict[str, Any] = {"model": "demo", "messages": [user("Hello")]}
RESPONSE: dict[str, Any] = {"model": "demo", "input": "Hello"}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "Hello"}
QUESTION = user("Paris?")
BOTH: dict[str, Any] = {"city": {"type": "string"}, "sunny": {"type": "boolean"}}
ANSWER: dict[str, Any] = {"type": "object", "properties": BOTH, "required": ["city", "sunny"]}
NAMED = {"city": {"type": "string"}}
CITY: dict[str, Any] = {"type": "object", "properties": NAMED, "required": ["city"]}
CLOSED: dict[str, Any] = {"additionalProperties": False}
DRAFT_7: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#"}
ABOUT = "Weather of a city."
EXTRACTED = "Correctly extracted `Answer`"
SYSTEM = {"role": "system", "content": "Be nice"}
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
CUT_OFF = '{"city": "Par'


def chat(*messages: Part, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [*messages], **fields}


def respond(*items: Part, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": [*items], **fields}


CLIENTS: Mapping[str, tuple[dict[str, Any], list[str]]] = {
    "autogen": (chat(SYSTEM, user("Hello", name="user"), stream=False), ["messages[].name"]),
    "semantic kernel": (
        chat(SYSTEM | {"name": "bot"}, user("Hello"), stream=False),
        ["messages[].name"],
    ),
    "langchain agent, second turn": (
        chat(
            *(user("Hi"), assistant("Hello", name="helper"), QUESTION),
            stream=False,
            tools=[function("weather", description=ABOUT, parameters=CITY)],
        ),
        ["messages[].name"],
    ),
    "langchain agent with a provider's format": (
        chat(
            QUESTION,
            response_format=json_format(ANSWER, "Answer", strict=False),
            stream=False,
            tools=[function("weather", description=ABOUT, parameters=CITY | CLOSED, strict=True)],
        ),
        [],
    ),
    "ai sdk object beside tools": (
        chat(
            QUESTION,
            response_format=json_format(DRAFT_7 | ANSWER | CLOSED, "response", strict=True),
            tools=[function("weather", description=ABOUT, parameters=DRAFT_7 | CITY | CLOSED)],
            tool_choice="auto",
        ),
        [],
    ),
    "ai sdk object beside tools, responses": (
        respond(
            user([input_text("Paris?")]),
            text=text_format(DRAFT_7 | ANSWER | CLOSED, "response", strict=True),
            tools=[tool("weather", description=ABOUT, parameters=DRAFT_7 | CITY | CLOSED)],
            tool_choice="auto",
        ),
        [],
    ),
    "openai agents, after a call that was cut off": (
        chat(
            {"content": "Be brief.", "role": "system"},
            *(QUESTION, calling(call("c", "weather", CUT_OFF)), result("c", "invalid")),
            response_format=json_format(ANSWER | CLOSED, "final_output", strict=True),
            tools=[function("weather", description=ABOUT, parameters=CITY | CLOSED, strict=True)],
        ),
        [],
    ),
    "openai agents, responses after a call that was cut off": (
        respond(
            *(QUESTION, called("c", "weather", CUT_OFF), output("c", "invalid")),
            include=[],
            instructions="Be brief.",
            text=text_format(ANSWER | CLOSED, "final_output", strict=True),
            tools=[tool("weather", description=ABOUT, parameters=CITY | CLOSED, strict=True)],
        ),
        [],
    ),
    "instructor with a forced tool of the same format": (
        respond(
            QUESTION,
            text=text_format(ANSWER | CLOSED, "Answer", strict=True),
            tool_choice=tool("Answer"),
            tools=[tool("Answer", parameters=ANSWER | CLOSED, description=EXTRACTED)],
        ),
        [],
    ),
    "instructor": (
        chat(
            QUESTION,
            tool_choice=function("Answer"),
            tools=[function("Answer", description=EXTRACTED, parameters=ANSWER)],
        ),
        [],
    ),
    "llm with an open schema": (
        chat(user("A person"), response_format=json_format(ANSWER, "output"), stream=False),
        [],
    ),
    "langchain agent": (
        chat(
            user("Hello"),
            calling(call("c", arguments='{"city":\n'), name="helper"),
            result("c", name="f"),
        ),
        ["messages[].name"],
    ),
    "guidellm": (
        CHAT
        | {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 16,
            "ignore_eos": True,
        },
        [],
    ),
    "guidellm responses": (
        RESPONSE | {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        ["stream_options.continuous_usage_stats"],
    ),
    "pydantic-ai": (
        chat(
            user("Hello"),
            response_format=json_format(SCHEMA),
            tool_choice="auto",
            tools=[function(parameters=SCHEMA)],
        ),
        [],
    ),
    "codex": (
        RESPONSE
        | {
            "tools": [
                tool(),
                {"type": "namespace", "name": "multi_agent_v1", "tools": [tool()]},
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
            *("client_metadata", "tools[].external_web_access", "prompt_cache_key"),
            *("tools[].web_search", "reasoning.summary", "include[]"),
        ],
    ),
    "litellm for anthropic": (
        respond(
            user([input_text("Hi")]), include=["reasoning.encrypted_content"], max_output_tokens=50
        ),
        ["include[]"],
    ),
    "earlier reasoning": (
        respond(
            user("Hi"),
            {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
            user([input_text("Go on")]),
            truncation="auto",
        ),
        ["input[].encrypted_content"],
    ),
    "cached parts and earlier thoughts": (
        chat(
            user([text("x", cache_control={"type": "ephemeral"})]),
            assistant(reasoning_content="hm"),
        ),
        ["messages[].content[].cache_control"],
    ),
    "lm-eval": (COMPLETION | {"echo": True, "logprobs": 1, "suffix": None}, []),
    "vllm bench": (CHAT | {"repetition_penalty": 1.0, "skip_special_tokens": True}, []),
    "hints": (CHAT | {"x_client": "a", "priority": 3, "rid": "r"}, ["x_client", "priority", "rid"]),
}
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


@pytest.mark.parametrize(("body", "names"), CLIENTS.values(), ids=CLIENTS)
def test_bodies_of_real_clients_are_accepted(body: dict[str, Any], names: list[str]) -> None:
    assert parse(body)[1] == names


def test_a_strict_request_with_an_unknown_parameter_is_refused() -> None:
    for body in (CHAT | {"x_client": 1}, chat(user("Hello", x_name="x"))):
        parse(body)
        with pytest.raises(InvalidRequest):
            parse(body, strict=True)


def test_parts_that_are_ignored_do_not_reach_the_start_frame() -> None:
    codex, thinking, thoughts = (
        parse(CLIENTS[name][0])[0].starts[0]
        for name in ("codex", "earlier reasoning", "cached parts and earlier thoughts")
    )

    assert [tool.name for tool in codex.tools] == ["f", "multi_agent_v1__f"]
    assert [turn.content for turn in thinking.conversation.messages] == ["Hi", "Go on"]
    assert [turn.reasoning for turn in thoughts.conversation.messages] == ["", "hm"]


def test_earlier_thoughts_belong_to_the_turn_after_them() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    encrypted = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    before = [user("2+2?"), thought("Hm"), assistant("I look."), encrypted, called("c")]
    after = [output("c", "4"), thought("So"), assistant("It is 4."), thought("Cut"), user("And?")]

    [start] = parse(respond(*before, *after))[0].starts

    turns = [(turn.content, turn.reasoning) for turn in start.conversation.messages]
    seen = [("2+2?", ""), ("I look.", "Hm"), ("4", ""), ("It is 4.", "So")]
    assert turns == [*seen, ("", "Cut"), ("And?", "")]
    assert [len(turn.tool_calls) for turn in start.conversation.messages] == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (CHAT | {"temprature": 0.5}, "temprature", "did you mean temperature?"),
        (CHAT | {"max_output_tokens": 5}, "max_output_tokens", "another API"),
        (COMPLETION | {"tools": [tool()]}, "tools", "another API"),
        (CHAT | {"response_format": {"type": "text", "x": 1}}, "response_format.x", "leave it"),
        (CHAT | {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "leave it out"),
        (chat(assistant("a", weight=0)), "messages[].weight", "leave it out"),
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
    def ids(*results: Part) -> list[str]:
        body = chat(user("Hi"), calling(call("c1"), call("c2")), *results)
        frame = parse(body)[0].starts[0]
        return [turn.tool_call_id for turn in frame.conversation.messages[2:]]

    nameless = {"role": "tool", "content": "4"}

    assert ids(nameless, nameless) == ["c1", "c2"]
    assert ids(result("c2"), nameless) == ["c2", "c1"]
    assert ids(nameless, result("c2"), nameless) == ["c1", "c2", ""]


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
