"""Anthropic's client, unchanged, against the messages API; and the documented parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from typing_extensions import get_type_hints

from api.core.errors import InvalidRequest
from api.openai.messages import (
    MessageParameters,
    parse_counted_message,
    parse_message,
    tolerate_message,
)
from api.openai.parameters import decode
from api.openai.tolerance import Notes
from infra.architecture import ROOT
from tests.e2e.tool_models import HOTEL, PIECES, SCRIPT, STAY, running_with_tools
from tests.service import MODEL, Service, Tenant

anthropic: Any = pytest.importorskip("anthropic")

TOOLS: list[dict[str, Any]] = [
    {"name": "book", "description": "Books a room.", "input_schema": HOTEL},
    {"name": "quit", "input_schema": {"type": "object", "properties": {}}},
]
TEXT, BOOKED = "Let me see.\n Bye", {"hotel": "Ulm", "nights": 2}
BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "x"}],
}


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: str, template_database: str
) -> Iterator[Service]:
    """Yield a service with models that call tools."""
    with running_with_tools(
        tmp_path_factory.mktemp("messages"), postgres_server, template_database
    ) as service:
        yield service


def connect(service: Service, secret: str, **options: Any) -> Any:
    """Return Anthropic's client, which sends its key as `x-api-key`."""
    url = service.openai_url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=url, api_key=secret, max_retries=0, **options)


def user_message(text: str) -> list[dict[str, Any]]:
    """Return a conversation of one turn."""
    return [{"role": "user", "content": text}]


def check_usage(service: Service, tenant: Any, usage: Any) -> None:
    """Check the usage of an answer against the tenant's only usage event."""
    [event] = service.database.events(tenant)
    assert usage.input_tokens + usage.cache_read_input_tokens == event["input_token_count"]
    assert usage.cache_read_input_tokens == event["cached_input_token_count"]
    assert usage.output_tokens == event["billed_token_count"]


def parse(body: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return the start frame of a body, and the names of ignored parameters."""
    ignored = Notes()
    requested = decode(msgspec.json.encode(body), MessageParameters, ignored)
    tolerate_message(requested, ignored)
    return parse_message(requested).starts[0], list(ignored.names)


async def test_a_message_is_the_same_whole_and_streamed(service: Service) -> None:
    tenant, streaming = await service.tenant(), await service.tenant()
    requested: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 20,
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "messages": user_message("Tell me."),
        "extra_body": {"temperature": 0.9, "top_k": 1},
    }

    with connect(service, tenant.secret) as client:
        answer = client.messages.create(**requested)
        counted = client.messages.count_tokens(
            **{name: requested[name] for name in ("model", "system", "messages")}
        )
    with (
        connect(service, streaming.secret) as client,
        client.messages.stream(**requested) as stream,
    ):
        events = list(stream)
        final = stream.get_final_message()

    assert [block.type for block in answer.content] == ["text"]
    assert final.content[0].text == answer.content[0].text
    assert final.stop_reason == answer.stop_reason
    assert final.usage.output_tokens == answer.usage.output_tokens
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert (answer.role, answer.model, answer.id[:4]) == ("assistant", MODEL, "msg_")
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert events[0].message.usage.input_tokens == counted.input_tokens
    check_usage(service, tenant, answer.usage)
    check_usage(service, streaming, final.usage)
    assert answer.model_extra["weir"]["cost"]["picos"] > 0


async def test_calls_are_blocks_and_results_continue(service: Service) -> None:
    tenant, streaming = await service.tenant(), await service.tenant()
    requested: dict[str, Any] = {
        "model": SCRIPT,
        "max_tokens": 50,
        "messages": user_message("Book!"),
        "tools": TOOLS,
    }

    with connect(service, tenant.secret) as client:
        answer = client.messages.create(**requested)
        check_usage(service, tenant, answer.usage)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        after = client.messages.create(
            **requested
            | {
                "messages": [
                    *user_message("Book!"),
                    {"role": "assistant", "content": answer.content},
                    {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
                ]
            }
        )
        free = client.messages.create(**requested, tool_choice={"type": "none"})
        one_call: Any = {"type": "auto", "disable_parallel_tool_use": True}
        single = client.messages.create(**requested, tool_choice=one_call)
        cut = client.messages.create(**requested | {"max_tokens": 6})
    with (
        connect(service, streaming.secret) as client,
        client.messages.stream(**requested) as stream,
    ):
        kinds = [event.type for event in stream]
        final = stream.get_final_message()

    calls = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
    assert calls == [("book", BOOKED), ("quit", {})]
    assert "".join(block.text for block in answer.content if block.type == "text") == TEXT
    assert answer.stop_reason == final.stop_reason == "tool_use"
    assert [(each.name, each.input) for each in final.content if each.type == "tool_use"] == calls
    assert "".join(block.text for block in final.content if block.type == "text") == TEXT
    assert kinds.count("input_json") >= 2
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") >= 3
    assert after.usage.input_tokens + after.usage.cache_read_input_tokens > 20
    assert free.content[0].text == "".join(PIECES)
    assert [block.name for block in single.content if block.type == "tool_use"] == ["book"]
    assert cut.stop_reason == "max_tokens"
    assert cut.content[-1].input == {}


async def test_a_format_and_a_forced_tool_are_enforced(service: Service, tenant: Tenant) -> None:
    requested: Any = {"model": MODEL, "max_tokens": 300, "messages": user_message("Book!")}

    with connect(service, tenant.secret) as client:
        formatted = client.messages.create(
            **requested, output_config={"format": {"type": "json_schema", "schema": STAY}}
        )
        forced = client.messages.create(
            **requested, tools=TOOLS[1:], tool_choice={"type": "tool", "name": "quit"}
        )

    assert json.loads(formatted.content[0].text)["nights"] in (1, 2)
    assert [(block.type, block.name) for block in forced.content] == [("tool_use", "quit")]


async def test_errors_have_the_form_and_the_type_of_the_client(service: Service) -> None:
    tenant = await service.tenant()
    requested: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": user_message("x")}

    with connect(service, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as key:
        client.messages.create(**requested)
    with connect(service, tenant.secret) as client:
        with pytest.raises(anthropic.NotFoundError) as model:
            client.messages.create(**requested | {"model": "none"})
        with pytest.raises(anthropic.BadRequestError) as parameter:
            client.messages.create(**requested | {"stop_sequences": [""]})
        with pytest.raises(anthropic.BadRequestError) as counted:
            client.messages.count_tokens(model=MODEL, messages=[])
        with pytest.raises(anthropic.BadRequestError) as streamed:
            list(client.messages.create(**requested | {"max_tokens": 0}, stream=True))
        with pytest.raises(anthropic.NotFoundError) as path:
            client.messages.batches.list()

    for raised, kind in (
        (key, "authentication_error"),
        (model, "not_found_error"),
        (parameter, "invalid_request_error"),
        (counted, "invalid_request_error"),
        (streamed, "invalid_request_error"),
        (path, "not_found_error"),
    ):
        assert raised.value.type == kind
        assert raised.value.body["type"] == "error"
        assert raised.value.request_id
    assert "stop_sequences[0]" in parameter.value.api_message
    assert "max_tokens" in streamed.value.api_message
    assert counted.value.api_message.startswith("messages: ")
    assert service.database.events(tenant) == []


async def test_a_stop_sequence_and_a_bearer_key(service: Service, tenant: Tenant) -> None:
    url = service.openai_url.removesuffix("/v1")

    with anthropic.Anthropic(base_url=url, auth_token=tenant.secret, max_retries=0) as client:
        stopped = client.messages.create(
            model=SCRIPT, max_tokens=50, messages=user_message("x"), stop_sequences=["see"]
        )

    assert stopped.content[0].text == "Let me "
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "see")


def test_a_body_of_an_agent_is_accepted_and_what_is_ignored_is_named() -> None:
    start, ignored = parse(
        BODY
        | {
            "system": [
                {"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "B"},
            ],
            "messages": [
                *user_message("one"),
                *user_message("two"),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": "x"},
                        {"type": "text", "text": "Sure"},
                        {"type": "tool_use", "id": "c", "name": "book", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "so?"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "text", "text": "full"}],
                            "is_error": True,
                        },
                    ],
                },
            ],
            "metadata": {"user_id": "u"},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
        }
    )

    turns = [(turn.role, turn.content) for turn in start.conversation.messages]
    assert turns == [(1, "A\nB"), (2, "one\ntwo"), (3, "Sure"), (4, "full"), (2, "so?")]
    assert start.conversation.messages[2].reasoning == "Hm"
    [call] = start.conversation.messages[2].tool_calls
    assert (call.id, call.name, json.loads(call.arguments_json)) == ("c", "book", {"a": 1})
    assert [tool.name for tool in start.tools] == ["book", "quit"]
    assert (start.end_user, start.labels) == ("u", {})
    assert not start.conversation.HasField("thinking")
    assert set(ignored) == {
        "system[].cache_control",
        "tools[].max_uses",
        "output_config.effort",
        "tools[].web_search_20250305",
        "messages[].content[].is_error",
    }


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {"messages": [*user_message("x"), {"role": "assistant", "content": "So "}]},
            "messages[1].content",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"service_tier": "batch"}, "service_tier"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"context_management": {"edits": [1]}}, "context_management"),
        ({"stop": ["x"] * 17}, "stop_sequences"),
        ({"n": 2}, "n"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
    ],
)
def test_what_would_change_the_answer_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(BODY | fields)

    assert refused.value.violations[0].field == field


def test_the_thinking_switch_is_that_of_the_conversation() -> None:
    for kind, expected in (("enabled", True), ("disabled", False)):
        start, ignored = parse(BODY | {"thinking": {"type": kind, "budget_tokens": 1024}})
        assert start.conversation.thinking is expected
        assert ignored == ["thinking.budget_tokens"]


def test_a_prompt_is_counted_without_a_limit() -> None:
    requested = decode(
        msgspec.json.encode({name: BODY[name] for name in ("model", "messages")}), MessageParameters
    )

    assert parse_counted_message(requested).starts[0].max_output_tokens == 0


def test_the_documented_parameters_are_those_of_the_code_and_of_the_package() -> None:
    page = (ROOT / "docs" / "reference" / "anthropic.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \| (\w+) \|", page.partition("## Parameters")[2], re.MULTILINE)
    reported = {name: mark for cell, mark in rows for name in re.findall(r"`(\w+)`", cell)}
    known = {
        name
        for form in (
            anthropic.types.message_create_params.MessageCreateParamsNonStreaming,
            anthropic.types.message_count_tokens_params.MessageCountTokensParams,
        )
        for name in get_type_hints(form)
    }

    assert reported.keys() == set(MessageParameters.__struct_fields__)
    assert known <= reported.keys()
    for name, mark in reported.items():
        kind = MessageParameters.__annotations__[name]
        assert (mark == "no") == (kind == "Unsupported"), name
        assert (mark == "idle") == (kind == "Idle"), name
