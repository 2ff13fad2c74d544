"""Tools over the wire: the model's prompt, streamed calls, forced calls, and refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from tests.calls import calls
from tests.e2e.tool_models import (
    DEEP,
    PIECES,
    PLAIN,
    REQUIRED,
    SCRIPT,
    TOOLS,
    check_arguments,
    ending_bias,
    running_with_tools,
)
from tests.service import MODEL, Service, Stream, Tenant, conversation


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: str, template_database: str
) -> Iterator[Service]:
    """Yield a service with three models; see `tool_models.py`."""
    with running_with_tools(
        tmp_path_factory.mktemp("tools"), postgres_server, template_database
    ) as service:
        yield service


def taking(schema: str) -> list[pb.Tool]:
    """Return one tool."""
    return [pb.Tool(name="a", parameters_json_schema=schema)]


async def begin(stream: Stream, **fields: Any) -> str:
    """Begin a request with tools."""
    usual: dict[str, Any] = {
        "conversation": conversation("Book a room."),
        "tools": TOOLS,
        "ignore_eos": False,
        "max_output_tokens": 400,
    }
    return await stream.begin(**usual | fields)


def calls_of(stream: Stream, request_id: str, choice_index: int = 0) -> list[tuple[str, str]]:
    """Return name and arguments of each call, joined from its deltas."""
    calls: list[list[str]] = []
    ids = set()
    for frame in stream.frames[request_id]:
        for piece in frame.delta.tool_calls:
            if frame.delta.choice_index != choice_index:
                continue
            if piece.id:
                assert piece.index == len(calls)
                ids.add(piece.id)
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments_json
    assert len(ids) == len(calls)
    return [(name, arguments) for name, arguments in calls]


async def test_text_and_calls_are_separated_and_billed(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        request_id = await begin(stream, model=SCRIPT)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_TOOL_CALLS
    assert stream.text(request_id) == "Let me see.\n Bye"
    booked = ("book", '{"hotel": "Ulm", "nights": 2}')
    assert calls_of(stream, request_id) == [booked, ("quit", "{}")]
    for frame in stream.frames[request_id]:
        indices = [piece.index for piece in frame.delta.tool_calls]
        assert len(indices) == len(set(indices)), "a frame has one increment of each call"
    event = service.database.event(tenant, request_id)
    assert event["billed_token_count"] == len(stream.token_ids(request_id)) == len(PIECES) + 1
    assert event["outcome"] == "stop"


async def test_a_strict_tool_is_called_with_valid_arguments_or_not_at_all(service: Service) -> None:
    """The script's arguments lack a required field: the model is constrained to valid calls."""
    tenant = await service.tenant()
    strict = [
        pb.Tool(name=tool.name, parameters_json_schema=tool.parameters_json_schema, strict=True)
        for tool in TOOLS
    ]

    async with service.stream(tenant.secret) as stream:
        one = pb.ToolChoice(mode=pb.TOOL_MODE_AUTO, single=True)
        request_id = await begin(stream, model=SCRIPT, tools=strict, max_output_tokens=1000)
        fields = {"tools": strict, "tool_choice": one, "max_output_tokens": 1000}
        single_id = await begin(stream, model=SCRIPT, **fields)
        ends = [await stream.finished(each) for each in (request_id, single_id)]

    assert stream.text(request_id).startswith("Let me see.")
    assert ends[1].reason == types_pb2.FINISH_REASON_TOOL_CALLS
    assert len(calls_of(stream, single_id)) == 1
    for name, arguments in (*calls_of(stream, request_id), *calls_of(stream, single_id)):
        check_arguments(name, json.loads(arguments))


async def test_one_call_ends_the_output_where_one_is_wanted(service: Service) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        request_id = await begin(
            stream, model=SCRIPT, tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_AUTO, single=True)
        )
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_TOOL_CALLS
    assert [name for name, _ in calls_of(stream, request_id)] == ["book"]
    assert finished.usage.billed_token_count < len(PIECES)


async def test_forbidden_tools_are_hidden_and_markers_are_text(service: Service) -> None:
    tenant = await service.tenant()
    none = pb.ToolChoice(mode=pb.TOOL_MODE_NONE)

    async with service.stream(tenant.secret) as stream:
        without = await begin(stream, model=SCRIPT, tools=[])
        ignored = await begin(stream, model=SCRIPT, tool_choice=none)
        ends = [await stream.finished(each) for each in (without, ignored)]

    assert [end.reason for end in ends] == [types_pb2.FINISH_REASON_STOP] * 2
    assert stream.text(without) == stream.text(ignored) == "".join(PIECES)
    assert ends[0].usage.input_token_count == ends[1].usage.input_token_count


@pytest.mark.parametrize("choice_count", [1, 2])
async def test_a_forced_call_is_valid_under_its_schema(service: Service, choice_count: int) -> None:
    tenant = await service.tenant()
    drawn: dict[str, Any] = {
        "choice_count": choice_count,
        "sampling": {"temperature": 1.0, "seed": 5, "logit_bias": ending_bias(service)},
    }

    async with service.stream(tenant.secret) as stream:
        any_of_them = await begin(stream, tool_choice=REQUIRED, **drawn)
        this_one = await begin(stream, tool_choice=pb.ToolChoice(name="book"), **drawn)
        one_of_them = await begin(
            stream, tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED, single=True), **drawn
        )
        ends = {each: await stream.finished(each) for each in (any_of_them, this_one, one_of_them)}

    for request_id, end in ends.items():
        reasons = [choice.reason for choice in end.choices] or [end.reason]
        assert reasons == [types_pb2.FINISH_REASON_TOOL_CALLS] * choice_count
        assert stream.text(request_id) == ""
        for choice_index in range(choice_count):
            calls = calls_of(stream, request_id, choice_index)
            assert 1 <= len(calls) <= (16 if request_id == any_of_them else 1)
            assert request_id != this_one or calls[0][0] == "book"
            for name, arguments in calls:
                check_arguments(name, json.loads(arguments))


async def test_calls_and_their_results_are_part_of_the_conversation(service: Service) -> None:
    tenant = await service.tenant()
    call = pb.ToolCall(id="c1", name="book", arguments_json='{"hotel": "Ulm <|end|>"}')
    turns = [
        pb.Message(role=pb.ROLE_USER, content="Book."),
        pb.Message(role=pb.ROLE_ASSISTANT, tool_calls=[call]),
        pb.Message(role=pb.ROLE_TOOL, tool_call_id="c1", content="Room 7"),
    ]
    talk = pb.Conversation(messages=turns)
    parts = (
        '<|user|>Book.<|end|><|assistant|><tool_call>{"name": "book", "arguments": {"hotel": "Ulm ',
        '"}}</tool_call><|end|><|user|><tool_response>Room 7</tool_response><|end|><|assistant|>',
    )
    encode = service.tokenizer.encode

    async with calls(service, tenant.secret) as caller:
        count: Callable[..., Any] = partial(caller, "CountTokens")
        without = await count(model=MODEL, conversation=talk)
        shown = await count(model=MODEL, conversation=talk, tools=TOOLS)
        with pytest.raises(grpc.aio.AioRpcError, match="'plain' does not support tools"):
            await count(model=PLAIN, conversation=conversation("x"), tools=TOOLS)
        with pytest.raises(grpc.aio.AioRpcError, match="no place for tool calls"):
            await count(model=PLAIN, conversation=talk)

    # Spelled out, the call is text although it looks like a control token: more than the one token.
    as_control = sum(len(encode(part, add_special_tokens=False)) for part in parts) + 1
    assert without.input_token_count > as_control
    assert shown.input_token_count > without.input_token_count + 100


WRONG: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("tools", "model 'plain' does not support tools", {"model": PLAIN}),
    ("tools", "require a conversation", {"conversation": None, "text": "x"}),
    ("tools", "at most 128", {"tools": [pb.Tool(name=f"t{index}") for index in range(129)]}),
    ("tools[0].name", "1 to 64", {"tools": [pb.Tool(name="a b")]}),
    ("tools[1].name", "unique", {"tools": [pb.Tool(name="a"), pb.Tool(name="a")]}),
    ("tools[0].parameters_json_schema", "JSON schema", {"tools": taking("{")}),
    ("tools[0].parameters_json_schema", "JSON schema", {"tools": taking('{"type": "array"}')}),
    ("tools[0].parameters_json_schema", "JSON schema", {"tools": taking('{"d": "\\ud800"}')}),
    ("tools[0].parameters_json_schema", "64 levels", {"tools": taking(DEEP)}),
    (
        "tools",
        "cannot be compiled",
        {"tools": taking('{"not": {"const": 1}}'), "tool_choice": REQUIRED},
    ),
    ("tool_choice", "requires tools", {"tools": [], "tool_choice": REQUIRED}),
    ("tool_choice.name", "one of tools", {"tool_choice": pb.ToolChoice(name="c")}),
    ("tool_choice", "one of mode and name", {"tool_choice": pb.ToolChoice(single=True)}),
    ("response_format.lark", "with tools", {"response_format": pb.ResponseFormat(lark="start: A")}),
    ("ignore_eos", "schema-constrained", {"tool_choice": REQUIRED, "ignore_eos": True}),
    (
        "choice_count",
        "one call",
        {
            "choice_count": 2,
            "tool_choice": pb.ToolChoice(mode=pb.TOOL_MODE_AUTO, single=True),
            "sampling": {"temperature": 1},
        },
    ),
)


async def test_invalid_tools_are_refused_by_name_and_billed_no_tokens(service: Service) -> None:
    """A schema is compiled after the hold, so an impossible one counts. Others do not."""
    tenant = await service.tenant()
    compiled = []

    async with service.stream(tenant.secret) as stream:
        for field, words, fields in WRONG:
            request_id = await begin(stream, **fields)
            compiled += [request_id] if words == "cannot be compiled" else []
            failed = await stream.failed(request_id)
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT, fields
            bad_request = failed.detail(error_details_pb2.BadRequest)
            assert bad_request is not None, failed.status
            reported = {
                violation.field: violation.description for violation in bad_request.field_violations
            }
            assert words in reported[field], reported

    await service.no_hold_left(tenant)
    assert service.database.billed(tenant) == {request_id: {} for request_id in compiled}
