"""The thinking of a model, apart from its answer: on the wire, in all HTTP APIs, and counted."""

from __future__ import annotations

from typing import Any

import pytest
from google.rpc import error_details_pb2
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from tests.calls import calls
from tests.e2e.conftest import Serve
from tests.e2e.openai_clients import check_billed, connect, user_message
from tests.inference.tool_checkpoints import ASSISTANT_ID, make_scripted_checkpoint
from tests.service import MODEL, Service, Stream, Tenant, conversation

# A thought that looks like what ends or is an answer, and an answer that spells a mark.
PIECES = (
    "<think>",
    "\n",
    "Hm, END",
    ' <tool_call>{"name": "book", "arguments": {}}',
    "</tool_call>",
    " maybe.",
    "\n\n\n",
    "</think>",
    "\n\n",
    "It is",
    " 4, END",
    " of </think",
    "> it.",
)
THOUGHT = 'Hm, END <tool_call>{"name": "book", "arguments": {}}</tool_call> maybe.'
ANSWER = "It is 4, END of </think> it."
THOUGHT_TOKENS = PIECES.index("</think>") + 1
TOOL = pb.Tool(name="book")
USER, ASSISTANT = pb.ROLE_USER, pb.ROLE_ASSISTANT


@pytest.fixture(scope="module")
def service(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """Return a service whose model thinks."""
    directory = tmp_path_factory.mktemp("reasoning")
    model = make_scripted_checkpoint(directory / "thinks", PIECES)
    return serve(model)


async def begin(stream: Stream, **fields: Any) -> str:
    usual: dict[str, Any] = {"conversation": conversation("2+2?"), "ignore_eos": False}
    return await stream.begin(**usual | {"max_output_tokens": 40} | fields)


def reasoning(stream: Stream, request_id: str) -> str:
    return "".join(frame.delta.reasoning for frame in stream.frames[request_id])


async def test_thinking_is_sent_apart_and_counted_in_every_record(service: Service) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        request_id = await begin(stream)
        finished = await stream.finished(request_id)
    async with calls(service, tenant.secret) as call:
        found = await call("GetGeneration", request_id=request_id)

    assert (reasoning(stream, request_id), stream.text(request_id)) == (THOUGHT, ANSWER)
    assert finished.reason == types_pb2.FINISH_REASON_STOP
    assert finished.usage.reasoning_token_count == THOUGHT_TOKENS
    assert finished.usage.billed_token_count == len(PIECES) + 1
    counted = [frame.delta.reasoning_token_count for frame in stream.frames[request_id]]
    assert sum(counted) == THOUGHT_TOKENS
    assert found.generation.usage == finished.usage
    event = service.database.event(tenant, request_id)
    assert event["reasoning_token_count"] == THOUGHT_TOKENS


async def test_stops_and_calls_in_the_thinking_are_none(service: Service, tenant: Tenant) -> None:
    hm = service.tokenizer.token_id(PIECES[2])

    async with service.stream(tenant.secret) as stream:
        stopped = await begin(stream, stop_sequences=["END"])
        by_token = await begin(stream, stop_token_ids=[hm, service.tokenizer.token_id("> it.")])
        with_tools = await begin(stream, tools=[TOOL])
        ends = [await stream.finished(each) for each in (stopped, by_token, with_tools)]

    assert [stream.text(each) for each in (stopped, by_token, with_tools)] == [
        "It is 4, ",
        "It is 4, END of </think",
        ANSWER,
    ]
    assert {reasoning(stream, each) for each in (stopped, by_token, with_tools)} == {THOUGHT}
    assert (ends[0].stop_sequence, ends[2].WhichOneof("stopped_by")) == ("END", None)
    assert ends[1].stop_token_id == service.tokenizer.token_id("> it.")
    assert [end.reason for end in ends] == [
        types_pb2.FINISH_REASON_STOP_SEQUENCE,
        types_pb2.FINISH_REASON_STOP,
        types_pb2.FINISH_REASON_STOP,
    ]


@pytest.mark.parametrize("count", range(1, len(PIECES) + 1))
async def test_a_cut_output_begins_the_same(service: Service, tenant: Tenant, count: int) -> None:
    async with service.stream(tenant.secret) as stream:
        request_id = await begin(stream, max_output_tokens=count)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert finished.usage.reasoning_token_count == min(count, THOUGHT_TOKENS)
    assert THOUGHT.startswith(reasoning(stream, request_id).rstrip())
    assert ANSWER.startswith(stream.text(request_id))
    assert bool(stream.text(request_id)) is (count > THOUGHT_TOKENS + 1)


async def test_a_cancel_during_the_thinking_bills_thinking_only(service: Service) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        request_id = await begin(stream, initial_credit_tokens=4)
        await stream.received(request_id, 4)
        await stream.cancel(request_id)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_CANCELLED
    assert stream.text(request_id) == ""
    assert finished.usage.billed_token_count == finished.usage.reasoning_token_count == 4


async def test_kept_output_is_received_again_with_its_parts(service: Service) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        request_id = await begin(stream, keep_on_disconnect={"seconds": 60})
        finished = await stream.finished(request_id)
    async with service.stream(tenant.secret) as stream:
        attach = pb.ClientFrame(request_id=request_id, attach=pb.AttachFrame())
        await stream.send(attach)
        await stream.finished(request_id)

    assert finished.usage.reasoning_token_count == THOUGHT_TOKENS
    assert (reasoning(stream, request_id), stream.text(request_id)) == (THOUGHT, ANSWER)


@pytest.mark.parametrize(("budget", "thought"), [(0, ""), (2, "Hm, END"), (40, THOUGHT)])
async def test_a_budget_ends_the_thinking(service: Service, budget: int, thought: str) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        request_id = await begin(stream, max_reasoning_tokens=budget)
        finished = await stream.finished(request_id)
    with connect(service, tenant.secret) as client:
        answer: Any = client.chat.completions.create(
            model=MODEL, messages=user_message("2+2?"), extra_body={"thinking_token_budget": budget}
        )

    assert (reasoning(stream, request_id), stream.text(request_id)) == (thought, ANSWER)
    marks = 2
    assert finished.usage.reasoning_token_count == min(budget + marks, THOUGHT_TOKENS)
    assert finished.reason == types_pb2.FINISH_REASON_STOP
    assert answer.choices[0].message.content == ANSWER


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens"),
        ({"max_reasoning_tokens": 1, "beam_search": {"width": 2}}, "max_reasoning_tokens"),
        ({"max_reasoning_tokens": 1, "conversation": None, "text": "a"}, "max_reasoning_tokens"),
    ],
)
async def test_a_bad_budget_is_refused(
    service: Service, tenant: Tenant, fields: dict[str, Any], field: str
) -> None:
    async with service.stream(tenant.secret) as stream:
        refusal = await stream.failed(await begin(stream, **fields))

    bad = refusal.detail(error_details_pb2.BadRequest)
    assert bad is not None
    assert field in [violation.field for violation in bad.field_violations]


def begun(*roles: pb.Role.ValueType, text: str = "It is", **fields: Any) -> pb.Conversation:
    messages = [pb.Message(role=role, content=text) for role in roles]
    return pb.Conversation(messages=messages, continues_last_message=True, **fields)


async def test_a_begun_answer_goes_on_without_thinking(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        requested = begun(USER, ASSISTANT)
        request_id = await begin(stream, conversation=requested)
        finished = await stream.finished(request_id)

    assert (reasoning(stream, request_id), stream.text(request_id)) == ("", ANSWER[len("It is") :])
    assert finished.usage.reasoning_token_count == 0


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>", (THOUGHT, ANSWER)),
        ("<think>\nHm, END", (THOUGHT.removeprefix("Hm, END").lstrip(), ANSWER)),
        ("<think>\nHm.</think>\n\nIt is", ("", ANSWER.removeprefix("It is"))),
    ],
)
async def test_a_thought_continues(service: Service, text: str, left: tuple[str, str]) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        requested = begun(USER, ASSISTANT, text=text)
        request_id = await begin(stream, conversation=requested)
        finished = await stream.finished(request_id)

    assert (reasoning(stream, request_id), stream.text(request_id)) == left
    assert bool(finished.usage.reasoning_token_count) is bool(left[0])


@pytest.mark.parametrize(
    ("requested", "field"),
    [
        (begun(ASSISTANT, USER), "conversation.continues_last_message"),
        (begun(USER, ASSISTANT, text=" \n"), "conversation.continues_last_message"),
        (begun(), "conversation.continues_last_message"),
        (begun(USER, ASSISTANT, thinking=True), "conversation.thinking"),
        (begun(USER, ASSISTANT, reasoning_effort="low"), "conversation.reasoning_effort"),
    ],
)
async def test_what_cannot_be_continued_is_refused(
    service: Service, tenant: Tenant, requested: pb.Conversation, field: str
) -> None:
    async with service.stream(tenant.secret) as stream:
        refusal = await stream.failed(await begin(stream, conversation=requested))

    bad = refusal.detail(error_details_pb2.BadRequest)
    assert bad is not None
    assert field in [violation.field for violation in bad.field_violations]


async def test_a_plain_prompt_is_continued_as_it_is(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        prompt = pb.TokenIds(ids=[ASSISTANT_ID])
        request_id = await stream.begin(token_ids=prompt, max_output_tokens=40, ignore_eos=False)
        finished = await stream.finished(request_id)

    assert stream.text(request_id) == "".join(PIECES)
    assert finished.usage.reasoning_token_count == 0


async def test_a_chat_has_reasoning_content_whole_and_streamed(service: Service) -> None:
    tenant, streaming, cut = [await service.tenant() for _ in range(3)]
    requested: dict[str, Any] = {"model": MODEL, "messages": user_message("2+2?")}

    with connect(service, tenant.secret) as client:
        answer: Any = client.chat.completions.create(**requested, logprobs=True)
        check_billed(service, tenant, answer)
    with connect(service, streaming.secret) as client:
        options: Any = {"include_usage": True}
        chunks: list[Any] = list(
            client.chat.completions.create(**requested, stream=True, stream_options=options)
        )
    with connect(service, cut.secret) as client:
        unfinished: Any = client.chat.completions.create(**requested, max_tokens=3)

    choice, usage = answer.choices[0], answer.usage
    assert (choice.message.reasoning_content, choice.message.content) == (THOUGHT, ANSWER)
    assert choice.message.reasoning == THOUGHT
    assert usage.completion_tokens_details.reasoning_tokens == THOUGHT_TOKENS
    shown = "".join(each.token for each in choice.logprobs.content)
    assert shown.removesuffix("<|end|>").strip() == ANSWER
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(each, "reasoning_content", None) or "" for each in deltas) == THOUGHT
    assert "".join(each.content or "" for each in deltas) == ANSWER
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == THOUGHT_TOKENS
    assert unfinished.choices[0].finish_reason == "length"
    assert unfinished.choices[0].message.content is None
    assert unfinished.choices[0].message.reasoning_content == "Hm, END"


async def test_a_response_has_a_reasoning_item_whole_and_streamed(service: Service) -> None:
    tenant, streaming, cut = [await service.tenant() for _ in range(3)]
    requested: dict[str, Any] = {"model": MODEL, "input": "2+2?"}

    with connect(service, tenant.secret) as client:
        whole = client.responses.create(**requested)
        check_parts(whole)
    with (
        connect(service, streaming.secret) as client,
        client.responses.stream(**requested) as stream,
    ):
        events: list[Any] = list(stream)
        check_parts(stream.get_final_response())
    with (
        connect(service, cut.secret) as client,
        client.responses.stream(**requested, max_output_tokens=3) as stream,
    ):
        cut_events: list[Any] = list(stream)

    kinds = [event.type for event in events]
    grown = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(grown) == THOUGHT
    begun = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert begun == ["reasoning", "message"]
    first_done = kinds.index("response.output_item.done")
    assert events[first_done].item.type == "reasoning"
    assert first_done < kinds.index("response.output_text.delta")
    unfinished = cut_events[-1].response
    assert unfinished.status == "incomplete"
    assert [item.type for item in unfinished.output] == ["reasoning"]
    assert cut_events[-2].type == "response.output_item.done"
    assert cut_events[-2].item == unfinished.output[0]


def check_parts(response: Any) -> None:
    thought, message = response.output
    assert (thought.type, message.type) == ("reasoning", "message")
    assert thought.content[0].text == THOUGHT
    assert response.output_text == ANSWER
    assert response.usage.output_tokens_details.reasoning_tokens == THOUGHT_TOKENS


async def test_a_message_has_a_thinking_block_whole_and_streamed(service: Service) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    tenant = await service.tenant()
    url = service.openai_url.removesuffix("/v1")
    requested: dict[str, Any] = {"model": MODEL, "max_tokens": 40}
    requested["messages"] = [{"role": "user", "content": "2+2?"}]

    with anthropic.Anthropic(base_url=url, api_key=tenant.secret, max_retries=0) as client:
        whole = client.messages.create(**requested)
        with client.messages.stream(**requested) as stream:
            events = list(stream)
            streamed = stream.get_final_message()
        cut = client.messages.create(**requested | {"max_tokens": 3})

    for message in (whole, streamed):
        thought, text = message.content
        assert (thought.type, thought.thinking) == ("thinking", THOUGHT)
        assert (text.type, text.text) == ("text", ANSWER)
    grown = [event.thinking for event in events if event.type == "thinking"]
    assert "".join(grown) == THOUGHT
    assert [block.type for block in cut.content] == ["thinking"]
