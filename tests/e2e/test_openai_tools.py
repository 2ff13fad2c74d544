"""Tools with OpenAI's client, unchanged: chats and responses, streamed and whole, with results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.openai_clients import check_billed, connect, extension, user_message
from tests.e2e.tool_models import (
    HOTEL,
    PIECES,
    PLAIN,
    SCRIPT,
    STAY,
    STRICT,
    check_arguments,
    ending_bias,
    running_with_tools,
)
from tests.service import MODEL, Service, Tenant

BOOK = {"name": "book", "description": "Books a room.", "parameters": HOTEL}
QUIT = {
    "name": "quit",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": function} for function in (BOOK, QUIT)]
TOOLS: list[Any] = [{"type": "function", "strict": None, **function} for function in (BOOK, QUIT)]
BOOKED, TEXT = '{"hotel": "Ulm", "nights": 2}', "Let me see.\n Bye"


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: str, template_database: str
) -> Iterator[Service]:
    """Yield a service with the models of `tool_models.py`."""
    with running_with_tools(
        tmp_path_factory.mktemp("tools"), postgres_server, template_database
    ) as service:
        yield service


@pytest.mark.parametrize("given_ids", [None, ("call_1", "call_2"), ("toolu_01ABCdef", "x" * 40)])
async def test_strict_templates_continue(
    given_ids: tuple[str, str] | None, service: Service, tenant: Tenant
) -> None:
    """The server accepts what it wrote itself, and ids of other servers."""
    requested: Any = {"model": STRICT, "messages": user_message("Book!"), "tools": CHAT_TOOLS}

    with connect(service, tenant.secret) as client:
        first: Any = client.chat.completions.create(**requested).choices[0].message
        turn = first.model_dump(exclude_none=True)
        for call, given in zip(turn["tool_calls"], given_ids or (), strict=False):
            call["id"] = given
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"done {call['id']}"}
            for call in turn["tool_calls"]
        ]
        talk = [*user_message("Book!"), turn, *reversed(results)]
        second: Any = client.chat.completions.create(**requested | {"messages": talk})
        again: Any = client.chat.completions.create(**requested | {"messages": talk})

    assert [call.function.name for call in first.tool_calls] == ["book", "quit"]
    assert [call.function.name for call in second.choices[0].message.tool_calls] == ["book", "quit"]
    assert second.usage.prompt_tokens == again.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens > 0, "ids are the same in each request"


async def test_a_chat_calls_tools_and_continues_with_the_results(service: Service) -> None:
    tenant, streaming = await service.tenant(), await service.tenant()
    requested: Any = {"model": SCRIPT, "messages": user_message("Book!"), "tools": CHAT_TOOLS}

    with connect(service, tenant.secret) as client:
        answer: Any = client.chat.completions.create(**requested)
        check_billed(service, tenant, answer)
        message = answer.choices[0].message
        results: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": "done"}
            for call in message.tool_calls or ()
        ]
        after: Any = client.chat.completions.create(
            **requested | {"messages": [*user_message("Book!"), message, *results]}
        )
    with (
        connect(service, streaming.secret) as client,
        client.chat.completions.stream(**requested) as stream,
    ):
        events: list[Any] = list(stream)
        final: Any = stream.get_final_completion().choices[0]

    assert answer.choices[0].finish_reason == final.finish_reason == "tool_calls"
    assert message.content == final.message.content == TEXT
    for calls in (message.tool_calls or (), final.message.tool_calls or ()):
        assert [
            (call.type, call.function.name, call.function.arguments)
            for call in calls
            if call.type == "function"
        ] == [("function", "book", BOOKED), ("function", "quit", "{}")]
    grown = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert {event.name for event in grown} == {"book", "quit"}
    [event] = service.database.events(streaming)
    assert event["billed_token_count"] == len(PIECES) + 1
    assert after.usage is not None
    assert answer.usage is not None
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens + 20


async def test_the_client_chooses_which_tools_are_called(service: Service, tenant: Tenant) -> None:
    requested: dict[str, Any] = {
        "messages": user_message("Book!"),
        "tools": CHAT_TOOLS,
        "max_tokens": 400,
        "temperature": 1.0,
        "seed": 3,
    }
    named: Any = {"type": "function", "function": {"name": "book"}}

    with connect(service, tenant.secret) as client:
        create = client.chat.completions.create
        free = create(model=SCRIPT, tool_choice="none", **requested)
        single = create(model=SCRIPT, parallel_tool_calls=False, **requested)
        ending: Any = {str(token_id): bias for token_id, bias in ending_bias(service).items()}
        required = create(model=MODEL, tool_choice="required", logit_bias=ending, **requested)
        this_one = create(model=MODEL, tool_choice=named, logit_bias=ending, **requested)

    assert free.choices[0].message.content == "".join(PIECES)
    assert [call.function.name for call in calls_of(single)] == ["book"]
    assert single.choices[0].finish_reason == "tool_calls"
    assert extension(single)["finish_reasons"] == ["TOOL_CALLS"]
    assert [call.function.name for call in calls_of(this_one)] == ["book"]
    for answer in (required, this_one):
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
        for call in calls_of(answer):
            check_arguments(call.function.name, json.loads(call.function.arguments))


async def test_beside_tools_an_answer_has_the_format_or_is_a_call(service: Service) -> None:
    tenant = await service.tenant()
    format: Any = {"type": "json_schema", "json_schema": {"name": "stay", "schema": STAY}}
    requested: dict[str, Any] = {
        "model": MODEL,
        "messages": user_message("Book!"),
        "tools": CHAT_TOOLS,
        "response_format": format,
        "logit_bias": {str(each): bias for each, bias in ending_bias(service).items()},
        "temperature": 1.0,
    }

    with connect(service, tenant.secret) as client:
        answers = [client.chat.completions.create(seed=seed, **requested) for seed in range(6)]
        forced = client.chat.completions.create(tool_choice="required", **requested)

    for answer in answers:
        message = answer.choices[0].message
        if message.tool_calls:
            assert {call.function.name for call in calls_of(answer)} <= {"book", "quit"}
        else:
            assert json.loads(message.content)["nights"] in (1, 2)
    assert calls_of(forced)


async def test_calls_that_were_cut_off_are_shown_to_the_model_as_they_are(service: Service) -> None:
    tenant = await service.tenant()

    def talk(arguments: str) -> list[Any]:
        call = {"id": "c", "type": "function", "function": {"name": "book", "arguments": arguments}}
        return [
            *user_message("Book!"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "name": "book", "content": "invalid"},
        ]

    with connect(service, tenant.secret) as client:
        create = client.chat.completions.with_raw_response.create
        sizes = {}
        for arguments in ('{"hotel": "Ulm"}', '{"hotel": "Ul', "", "[1]"):
            raw = create(model=SCRIPT, messages=talk(arguments), tools=CHAT_TOOLS)
            sizes[arguments] = prompt_token_count(raw.parse())
            assert "weir-ignored-parameters" not in raw.headers, "a result has the name of its call"
        empty = create(model=SCRIPT, messages=talk("{}"), tools=CHAT_TOOLS).parse()

    assert sizes['{"hotel": "Ul'] > sizes["[1]"]
    assert sizes[""] == prompt_token_count(empty)


def prompt_token_count(answer: Any) -> int:
    return int(answer.usage.prompt_tokens)


class Book(BaseModel):
    """Arguments of the script's first call."""

    hotel: str
    nights: int


async def test_calls_of_strict_tools_are_parsed_into_types(service: Service) -> None:
    tenant = await service.tenant()
    tools = [openai.pydantic_function_tool(Book, name="book")]

    with connect(service, tenant.secret) as client:
        answer = client.chat.completions.parse(
            model=SCRIPT, messages=user_message("Book!"), tools=tools, parallel_tool_calls=False
        )
        response: Any = client.responses.parse(
            model=SCRIPT,
            input="Book!",
            tools=[openai.pydantic_function_tool(Book, name="book")],
            parallel_tool_calls=False,
        )

    assert [
        call.function.parsed_arguments for call in answer.choices[0].message.tool_calls or ()
    ] == [Book(hotel="Ulm", nights=2)]
    assert [item.parsed_arguments for item in response.output[1:]] == [Book(hotel="Ulm", nights=2)]


def calls_of(answer: Any) -> list[Any]:
    """Return the calls of the first choice; there must be some."""
    calls: list[Any] = answer.choices[0].message.tool_calls
    assert calls
    return calls


async def test_a_response_has_calls_as_separate_items(service: Service, tenant: Tenant) -> None:
    requested: dict[str, Any] = {"model": SCRIPT, "instructions": "Be brief.", "tools": TOOLS}

    with connect(service, tenant.secret) as client:
        response: Any = client.responses.create(input="Book!", **requested)
        events: list[Any] = list(client.responses.create(input="Book!", stream=True, **requested))
        with client.responses.stream(input="Book!", **requested) as stream:
            gathered: Any = stream.get_final_response()
        items: list[Any] = [{"role": "user", "content": "Book!"}, *response.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
            for item in response.output
            if item.type == "function_call"
        ]
        after: Any = client.responses.create(input=items, **requested)

    final = events[-1].response
    for reported in (response, final, gathered):
        assert reported.status == "completed"
        assert reported.output_text == TEXT
        types = [item.type for item in reported.output]
        assert types == ["message", "function_call", "function_call"]
        calls = [(item.name, item.arguments) for item in reported.output[1:]]
        assert calls == [("book", BOOKED), ("quit", "{}")]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    check_events(events, final.output)
    assert response.tool_choice == "auto"
    assert response.parallel_tool_calls
    assert [tool.type for tool in response.tools] == ["function", "function"]
    assert response.usage is not None
    assert after.usage is not None
    assert after.usage.input_tokens > response.usage.input_tokens + 20


def check_events(events: list[Any], output: list[Any]) -> None:
    """Check that items begin, grow and end with the same index and id, and deltas add up."""
    for index, item in enumerate(output):
        of_item = [event for event in events if getattr(event, "output_index", None) == index]
        assert of_item[0].type == "response.output_item.added"
        assert of_item[-1].type == "response.output_item.done"
        assert of_item[-1].item == item
        assert {event.item_id for event in of_item if hasattr(event, "item_id")} == {item.id}
        grown = "".join(event.delta for event in of_item if event.type.endswith(".delta"))
        if item.type == "function_call":
            [done] = [
                event for event in of_item if event.type == "response.function_call_arguments.done"
            ]
            assert grown == done.arguments == item.arguments
        else:
            assert grown == item.content[0].text


async def test_a_truncated_call_is_reported_as_truncated(service: Service, tenant: Tenant) -> None:
    with connect(service, tenant.secret) as client:
        chat = client.chat.completions.create(
            model=SCRIPT, messages=user_message("Book!"), tools=CHAT_TOOLS, max_tokens=6
        )
        response: Any = client.responses.create(
            model=SCRIPT, input="Book!", tools=TOOLS, max_output_tokens=6
        )
        events: list[Any] = list(
            client.responses.create(
                model=SCRIPT, input="Book!", tools=TOOLS, max_output_tokens=6, stream=True
            )
        )

    assert chat.choices[0].finish_reason == "length"
    assert calls_of(chat)[0].function.arguments == '{"hotel": "Ulm"'
    assert response.status == "incomplete"
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    assert events[-1].type == "response.incomplete"
    check_events(events, events[-1].response.output)


async def test_wrong_tools_and_items_are_refused_by_their_own_names(service: Service) -> None:
    tenant = await service.tenant()
    call = {"type": "function_call", "call_id": "c", "name": "book", "arguments": "{}"}
    deep: Any = json.loads('{"a":' * 70 + "1" + "}" * 70)
    large = {"description": "x" * 60_000}
    too_deep: Any = [{"type": "function", "function": BOOK | {"parameters": deep}}]
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("tools", {"model": PLAIN}),
        ("tools[0].parameters", {"tools": [TOOLS[0] | {"parameters": deep}]}),
        (
            "tools",
            {
                "tools": [
                    TOOLS[0] | {"name": f"t{index}", "parameters": large} for index in range(5)
                ]
            },
        ),
        ("tool_choice", {"tool_choice": {"type": "function", "name": ""}}),
        ("tool_choice.name", {"tool_choice": {"type": "function", "name": "gone"}}),
        (
            "input[0].call_id",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        ),
        (
            "input[1].call_id",
            {"input": [call, {"type": "function_call_output", "call_id": "d", "output": "x"}]},
        ),
        ("input[0].summary", {"input": [{"role": "user", "content": "x", "summary": []}]}),
        ("input[0].type", {"input": [{"type": "computer_call", "id": "r"}]}),
        ("input", {"input": [{"type": "reasoning", "id": "r", "summary": []}]}),
    ]

    with connect(service, tenant.secret) as client:
        for param, fields in wrong:
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(
                    **{"model": SCRIPT, "input": "Book!", "tools": TOOLS, "instructions": "Hm."}
                    | fields
                )
            assert caught.value.param == param, caught.value
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=SCRIPT, messages=user_message("x"), tools=too_deep)
        assert caught.value.param == "tools[0].function.parameters"

    assert service.database.events(tenant) == []


@pytest.mark.parametrize("space", ["mcp__hotel", "mcp__hotel__", "mcp__" + "x" * 59])
async def test_a_namespaces_functions_have_both_names(space: str, service: Service) -> None:
    """Coding agents send the tools of MCP servers in this form."""
    tenant = await service.tenant()
    group: Any = {"type": "namespace", "name": space, "description": "Hotels.", "tools": [TOOLS[1]]}
    requested: dict[str, Any] = {
        "model": SCRIPT,
        "input": "Quit!",
        "tools": [TOOLS[0], group],
        "tool_choice": {"type": "function", "name": "quit", "namespace": space},
    }

    with connect(service, tenant.secret) as client:
        response: Any = client.responses.create(**requested)
        chosen = {"tool_choice": {"type": "function", "name": "quit"}}
        by_name: Any = client.responses.create(**requested | chosen)
        events: list[Any] = list(client.responses.create(stream=True, **requested))
        [call] = [item for item in response.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        after: Any = client.responses.create(
            **requested
            | {
                "input": [{"role": "user", "content": "Quit!"}, *response.output, result],
                "tool_choice": "none",
            }
        )

    final = events[-1].response
    for reported in (response, by_name, final):
        [called] = [item for item in reported.output if item.type == "function_call"]
        assert (called.name, called.namespace, called.arguments) == ("quit", space, "{}")
    check_events(events, final.output)
    assert [each.name for each in events if each.type.endswith("arguments.done")] == ["quit"]
    assert [tool.type for tool in response.tools] == ["function", "namespace"]
    assert [tool.name for tool in response.tools[1].tools] == ["quit"]
    assert after.status in ("completed", "incomplete")


async def test_wrong_functions_of_a_namespace_are_named(service: Service, tenant: Tenant) -> None:
    wrong: list[tuple[str, list[Any]]] = [
        ("tools[0].name", [{"type": "namespace", "tools": [TOOLS[1]]}]),
        ("tools[1].tools[0].name", [{"name": "a", "tools": [{"type": "function"}]}]),
        ("tools[1].tools[0].name", [{"name": "a", "tools": [TOOLS[1] | {"name": "ä"}]}]),
        (
            "tools[1].tools[1].parameters",
            [{"name": "a", "tools": [TOOLS[1], TOOLS[0] | {"parameters": {"type": "wrong"}}]}],
        ),
    ]

    with connect(service, tenant.secret) as client:
        for param, groups in wrong:
            tools: Any = [TOOLS[0], *({"type": "namespace"} | each for each in groups)]
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(
                    model=SCRIPT, input="x", tools=tools if "[1]" in param else tools[1:]
                )
            assert caught.value.param == param, caught.value
