"""Parameters of OpenAI's package: each is in the documentation, which describes the API correctly.

A new version of the package with an unknown parameter or kind fails here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import (
    chat_completion_content_part_param,
    chat_completion_message_param,
    chat_completion_tool_choice_option_param,
    chat_completion_tool_union_param,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import (
    input_token_count_params,
    response_create_params,
    response_includable,
    response_input_content_param,
    response_input_item_param,
    tool_param,
)
from typing_extensions import get_type_hints, is_typeddict

from api.core.errors import InvalidRequest
from api.openai.apis import parsed_body
from api.openai.conversations import ROLES
from api.openai.dialects import FIELDS
from api.openai.embeddings import EmbeddingParameters, check_model_sizes, embed_request
from api.openai.gateway import CHAT, COMPLETIONS, MESSAGES, RESPONSES, build_parsers
from api.openai.history import CLIENT_CALLS, CLIENT_RESULTS
from api.openai.parameters import (
    ChatParameters,
    CompletionParameters,
    ResponseParameters,
    decode,
    names_of_all,
    parse_chat,
    parse_completion,
    parse_response,
)
from api.openai.tolerance import shape_of
from inference.engine import ModelInfo
from infra.architecture import ROOT

DOCUMENT = ROOT / "docs" / "reference" / "openai.md"
APIS = ("chat", "responses", "completions", "embeddings")  # columns of the table
BEGUN = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
FUNCTION = {"type": "function", "name": "f"}
WRAPPED = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: Mapping[str, dict[str, Any]] = {
    "chat": {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "tools": [WRAPPED],
    },
    "responses": {"model": "m", "input": "x", "stream": True, "tools": [FUNCTION]},
    "completions": {"model": "m", "prompt": "x", "stream": True},
    "embeddings": {"model": "m", "input": "x"},
}
PACKAGE: Mapping[str, tuple[type, ...]] = {
    "chat": (chat_params.CompletionCreateParamsBase, chat_params.CompletionCreateParamsStreaming),
    "responses": (
        response_create_params.ResponseCreateParamsBase,
        response_create_params.ResponseCreateParamsStreaming,
    ),
    "completions": (
        completion_create_params.CompletionCreateParamsBase,
        completion_create_params.CompletionCreateParamsStreaming,
    ),
    "embeddings": (embedding_create_params.EmbeddingCreateParams,),
}
TAKES: Mapping[str, type[msgspec.Struct]] = {
    "chat": ChatParameters,
    "responses": ResponseParameters,
    "completions": CompletionParameters,
    "embeddings": EmbeddingParameters,
}
# A valid value of every parameter; for partly supported ones, the supported part. By API where they
# differ.
RIGHT: Mapping[str, Any] = {
    "model": "m",
    "messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}],
    "input": ["x", "y"],
    "responses input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
    "prompt": [[1, 2], [3]],
    "instructions": "x",
    "temperature": 0.5,
    "stop": ["x"],
    "logit_bias": {"5": 1},
    "n": 2,
    "best_of": 1,
    "logprobs": True,
    "completions logprobs": 2,
    "stream_options": {"include_usage": True, "include_obfuscation": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "text": {"format": {"type": "json_object"}, "verbosity": "medium"},
    "tools": [WRAPPED],
    "responses tools": [FUNCTION],
    "tool_choice": WRAPPED,
    "responses tool_choice": FUNCTION,
    "metadata": {"a": "b"},
    "user": "x",
    "safety_identifier": "x",
    "service_tier": "flex",
    "prompt_cache_key": "x",
    "reasoning_effort": "none",
    "reasoning": {"effort": "none"},
    "verbosity": "medium",
    "modalities": ["text"],
    "include": ["message.output_text.logprobs"],
    "truncation": "disabled",
    "encoding_format": "base64",
    "dimensions": 8,
    "stop_token_ids": [1],
    "chat_template_kwargs": {"enable_thinking": False},
    "context_management": {"edits": []},
    "normalize": True,
    "truncate": "END",
    "truncate_prompt_tokens": -1,
}
# Further fields that a parameter requires.
BESIDE: Mapping[str, dict[str, Any]] = {
    "chat top_logprobs": {"logprobs": True},
    "responses top_logprobs": {"tools": []},
    "chat echo": {"messages": BEGUN, "continue_final_message": True},
    "chat continue_final_message": {"messages": BEGUN},
    "chat prompt_logprobs": {"stream": False},
    "completions prompt_logprobs": {"stream": False},
    "responses include": {"tools": []},
}
FLAGS = frozenset(
    {
        "stream",
        "parallel_tool_calls",
        "ignore_eos",
        "echo",
        "enable_thinking",
        "continue_final_message",
        "add_generation_prompt",
        "return_token_ids",
        "return_tokens_as_token_ids",
    }
)
WRONG: Mapping[str, Any] = {
    "best_of": 2,
    "stream_options": {"surprise": 1},
    "text": {"verbosity": "low"},
    "tools": [{"type": "custom", "name": "x"}],
    "tool_choice": {"type": "custom", "name": "x"},
    "service_tier": "surprise",
    "store": True,
    "reasoning": {"context": "all_turns"},
    "context_management": [{"type": "compaction"}],
    "normalize": False,
    "truncate": "START",
    "truncate_prompt_tokens": 10,
    "verbosity": "low",
    "modalities": ["text", "audio"],
    "include": ["surprise"],
    "dimensions": 7,
    "chat_template_kwargs": {"bos_token": "x"},
    "add_generation_prompt": False,
}
ENCODER = ModelInfo("encoder", "BertModel", "torch", 512, 30_000, "", embedding_dimension=8)
SHAPES: tuple[Any, ...] = (True, 3, "x", ["x"], {"x": 1})

ITEMS: Mapping[str, dict[str, Any]] = {
    "message": {"role": "user", "content": "x"},
    "function_call": {"call_id": "c", "name": "f", "arguments": "{}"},
    "function_call_output": {"call_id": "c", "output": "x"},
    "reasoning": {"summary": []},
}
CALLED = {"call_id": "c", "name": "f"}
ALLOWED = {"allowed_tools": {"type": "allowed_tools", "tools": []}}


def ask(api: str, body: dict[str, Any]) -> None:
    """Parse a body as the API does. Raises: InvalidRequest."""
    data = msgspec.json.encode(body)
    match api:
        case "chat":
            parse_chat(decode(data, ChatParameters))
        case "responses":
            parse_response(decode(data, ResponseParameters))
        case "completions":
            parse_completion(decode(data, CompletionParameters))
        case _:
            given = decode(data, EmbeddingParameters)
            embed_request(given, "id")
            check_model_sizes(given, ENCODER)


def refused_field(api: str, body: dict[str, Any]) -> str:
    """Return the invalid field of a body, which must be refused."""
    with pytest.raises(InvalidRequest) as refused:
        ask(api, body)
    return refused.value.violations[0].field


def documented() -> dict[str, dict[str, str]]:
    """Return the documented support of each parameter, by API."""
    reported: dict[str, dict[str, str]] = {api: {} for api in APIS}
    for line in (
        DOCUMENT.read_text(encoding="utf-8")
        .partition("### Every parameter")[2]
        .partition("- **Roles**")[0]
        .splitlines()
    ):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `"):
            continue
        for api, mark in zip(APIS, cells[1:5], strict=True):
            if mark:
                reported[api] |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), mark)
    return reported


def words(kind: Any) -> set[str]:
    """Return all literals of a type."""
    return (
        set(get_args(kind))
        if get_origin(kind) is Literal
        else {word for each in get_args(kind) for word in words(each)}
    )


def kinds(union: Any, key: str = "type") -> set[str]:
    """Return the discriminators of the members of a union."""
    if is_typeddict(union):
        return words(get_type_hints(union).get(key))
    return {kind for each in get_args(union) for kind in kinds(each, key)}


@pytest.mark.parametrize("api", APIS)
def test_the_table_has_every_parameter_of_the_package_and_of_the_gateway(api: str) -> None:
    known = {name for form in PACKAGE[api] for name in get_type_hints(form)}

    assert known | set(TAKES[api].__struct_fields__) == documented()[api].keys()


PYTHON_TYPES = re.compile(r"\b(str|int|bool|dict|None|Expected)\b|`(array|object|float)`")


@pytest.mark.parametrize("api", APIS)
def test_a_value_of_another_type_is_refused_in_the_words_of_json(api: str) -> None:
    refused = []
    for name in TAKES[api].__struct_fields__:
        for shape in (*SHAPES, 1.5, None, [], {}, [None], [1.5], [{"x": 1}]):
            try:
                ask(api, BODIES[api] | {name: shape})
            except InvalidRequest as error:
                refused.append(str(error))

    assert len(refused) > 50
    assert [text for text in refused if PYTHON_TYPES.search(text)] == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": "hi"}, "messages: must be an array, got a string"),
        ({"messages": [5]}, "messages[0]: must be an object, got a whole number"),
        ({"temperature": "x"}, "temperature: must be between 0 and 2, got a string"),
        ({"seed": 2**70}, "seed: must be a whole number of 64 bits"),
        ({"stop": {"a": 1}}, "stop: must be a string or an array, got an object"),
        ({"stream": "yes"}, "stream: must be true or false, got a string"),
        ({"n": 1.5}, "n: must be from 1 to 16, got a decimal number"),
        ({"tools": [{"type": 1}]}, "tools[0].type: must be a string, got a whole number"),
    ],
)
def test_a_wrong_type_is_named_as_in_json(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ask("chat", BODIES["chat"] | body)

    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("api", APIS)
def test_the_documented_table_of_parameters_is_correct(api: str) -> None:
    reported = documented()[api]
    assert set(reported.values()) <= {"yes", "part", "idle", "no"}

    for name, mark in reported.items():
        if mark == "no":
            for shape in (*SHAPES, *([RIGHT[name]] if name in RIGHT else [])):
                assert refused_field(api, BODIES[api] | {name: shape}).startswith(name), shape
            continue
        right = RIGHT.get(
            f"{api} {name}",
            RIGHT.get(name, False if name == "store" else True if name in FLAGS else 1),
        )
        ask(api, BODIES[api] | BESIDE.get(f"{api} {name}", {}) | {name: right})
        assert (mark == "part") == (name in WRONG), name
        if mark == "part":
            assert refused_field(api, BODIES[api] | {name: WRONG[name]}).startswith(name), name


def test_counting_tokens_knows_every_parameter_of_the_package() -> None:
    counted = get_type_hints(input_token_count_params.InputTokenCountParams)

    assert set(counted) - set(ResponseParameters.__struct_fields__) == {"personality"}
    assert "personality" in FIELDS


@pytest.mark.parametrize(
    ("union", "taken", "api", "body", "param"),
    [
        (
            chat_completion_content_part_param.ChatCompletionContentPartParam,
            {"text"},
            "chat",
            lambda kind: {"messages": [{"role": "user", "content": [{"type": kind, "text": "x"}]}]},
            "messages[0].content[0]",
        ),
        (
            chat_completion_tool_union_param.ChatCompletionToolUnionParam,
            {"function"},
            "chat",
            lambda kind: {"tools": [WRAPPED | {"type": kind}]},
            "tools[0].type",
        ),
        (
            chat_completion_tool_choice_option_param.ChatCompletionToolChoiceOptionParam,
            {"function", "allowed_tools"},
            "chat",
            lambda kind: {"tool_choice": ALLOWED.get(kind, WRAPPED | {"type": kind})},
            "tool_choice",
        ),
        (
            response_input_item_param.ResponseInputItemParam,
            {*ITEMS, *CLIENT_CALLS, *CLIENT_RESULTS},
            "responses",
            lambda kind: {
                "input": [
                    {"type": kind} | ITEMS.get(kind, CALLED),
                    {"role": "user", "content": "x"},
                ]
            },
            "input[",  # of tools that a server runs by its name
        ),
        (
            response_input_content_param.ResponseInputContentParam,
            {"input_text"},
            "responses",
            lambda kind: {"input": [{"role": "user", "content": [{"type": kind, "text": "x"}]}]},
            "input[0].content[0]",
        ),
        (
            tool_param.ToolParam,
            {"function", "namespace"},
            "responses",
            lambda kind: {"tools": [FUNCTION | {"type": kind}]},
            "tools[0].type",
        ),
        (
            response_create_params.ToolChoice,
            {"function", "allowed_tools"},
            "responses",
            lambda kind: {"tool_choice": ALLOWED.get(kind, FUNCTION | {"type": kind})},
            "tool_choice",
        ),
    ],
)
def test_supported_kinds_of_a_union_are_accepted_and_all_others_refused(
    union: Any, taken: set[str], api: str, body: Callable[[str], dict[str, Any]], param: str
) -> None:
    known = kinds(union)
    assert taken < known

    for kind in known:
        if kind in taken:
            ask(api, BODIES[api] | body(kind))
        else:
            assert refused_field(api, BODIES[api] | body(kind)).startswith(param), kind


def test_every_role_tier_and_extra_is_accepted() -> None:
    tiers = words(get_type_hints(response_create_params.ResponseCreateParamsBase)["service_tier"])
    assert kinds(chat_completion_message_param.ChatCompletionMessageParam, "role") == set(ROLES)

    for tier in tiers:
        ask("responses", BODIES["responses"] | {"service_tier": tier})
    for each in words(response_includable.ResponseIncludable):
        ask("responses", BODIES["responses"] | {"include": [each]})


@pytest.mark.parametrize("name", ["image_url", "input_audio", "file", "refusal"])
def test_a_part_that_is_text_has_nothing_else(name: str) -> None:
    part = {"type": "text", "text": "x", name: {"x": 1}}

    body = BODIES["chat"] | {"messages": [{"role": "user", "content": [part]}]}

    assert refused_field("chat", body) == f"messages[0].content[0].{name}"


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        ("completions", {"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ("completions", {"stop": ["x"] * 17}, "stop"),
        ("completions", {"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ("completions", {"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ("completions", {"prompt": ["x"] * 129}, "prompt"),
        ("embeddings", {"input": [[1]] * 2049}, "input"),
        ("chat", {"tools": [WRAPPED] * 129}, "tools"),
        ("responses", {"input": [{"role": "user", "content": "x"}] * 10_001}, "input"),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [CALL] * 4097}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_too_many_are_refused_unread(api: str, fields: dict[str, Any], param: str) -> None:
    """Reporting each would block all other clients for a million of them."""
    assert refused_field(api, BODIES[api] | fields) == param


def test_several_prompts_share_what_is_requested_of_them_until_it_was_found_right() -> None:
    """A text of a megabyte for each of 128 prompts would be 128 megabytes."""
    body = {"model": "m", "user": "u" * 1_000_000, "prompt": ["x", "y"]}
    requested = parse_completion(decode(msgspec.json.encode(body), CompletionParameters))

    assert [frame.text for frame in requested.starts] == ["x", "y"]
    assert requested.starts[0] is not requested.starts[0], "made when it is looked at"
    assert [frame.text for frame in requested.starts[1:]] == ["y"]


def test_the_first_body_of_a_process_builds_no_parser() -> None:
    """Its key would pay for that: 12 ms in one piece, which count as many times as much."""
    body = b'{"model": "m", "messages": [], "prompt": "x", "input": "x", "max_tokens": 1, "y": 1}'
    caches = (shape_of, names_of_all)
    for cache in caches:
        cache.cache_clear()

    build_parsers()

    misses = [cache.cache_info().misses for cache in caches]
    for api in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        with contextlib.suppress(InvalidRequest):
            parsed_body(body, api, strict=False)
    assert misses == [4, 1]
    assert [cache.cache_info().misses for cache in caches] == misses
