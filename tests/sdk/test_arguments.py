"""Arguments as programmers know them: dicts in OpenAI's shape, defaults of the client, hints."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from typing import Any

import pytest
import weir_client
from google.rpc import error_details_pb2
from weir.v1 import inference_service_pb2 as pb
from weir_client import (
    AdminClient,
    AsyncClient,
    BillingClient,
    Client,
    InvalidRequest,
    Message,
    Prompt,
    ReceiptClient,
    Tool,
    ToolCall,
)
from weir_client.embedding import EmbedOptions
from weir_client.options import AttachOptions, GenerateOptions
from weir_client.prompt import build_start
from weir_client.status import error_from_status

from tests.sdk import scripted
from tests.sdk.scripted import ScriptedInference, ServerStream

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Now.", "parameters": SCHEMA, "strict": True}
TOOL = Tool("weather", "Now.", SCHEMA, strict=True)
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def start(prompt: Any = "Hi", **options: Any) -> pb.StartFrame:
    """Build a start frame."""
    return build_start("demo", prompt, options).start  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"type": "function", "function": FUNCTION}, FUNCTION])
def test_a_tool_is_a_dict_or_a_class(given: Any) -> None:
    of_class = start(tools=[TOOL], tool_choice=TOOL)

    assert start(tools=[given], tool_choice=given) == of_class
    assert start(tools=None) == start()


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
            Message("user", "ab"),
        ),
        ({"role": "developer", "content": "Be terse."}, Message("system", "Be terse.")),
        (
            # as in `response.choices[0].message.model_dump()` of OpenAI's client
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "tool_calls": [CALL],
            },
            Message("assistant", "", [ToolCall("1", "weather", "{}")]),
        ),
        (
            {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
            Message("assistant", "Yes.", reasoning="Hm."),
        ),
        (
            {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "Rain."},
            Message("tool", "Rain.", tool_call_id="1"),
        ),
        (
            Message("assistant", "", [CALL]),
            Message("assistant", "", [ToolCall("1", "weather", "{}")]),
        ),
        (
            Message("user", [{"type": "input_text", "text": "a"}]),
            Message("user", "a"),
        ),
    ],
)
def test_a_message_is_a_dict_or_a_class(given: Any, same: Message) -> None:
    assert start([given]) == start([same])


async def test_type_checkers_take_dicts_and_classes() -> None:
    """Checked by mypy, as these lines have no `Any`."""
    plain = [{"role": "user", "content": "Hi"}]
    annotated: Prompt = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        Message("tool", "Rain.", tool_call_id="1"),
    ]
    tools = [{"type": "function", "function": FUNCTION}]
    server = ScriptedInference(scripted.answer)
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        await client.complete("demo", plain, tools=tools, tool_choice="auto")
        await client.complete("demo", annotated, tools=[TOOL, FUNCTION], tool_choice=tools[0])
        await client.count_tokens("demo", annotated, tools=tools)

    (counted,) = server.requests
    assert isinstance(counted, pb.CountTokensRequest)
    assert len(counted.conversation.messages) == 3


WRONG: dict[str, dict[str, Any]] = {
    "tools[0].type": {"tools": [{"type": "web_search"}]},
    "tools[0]": {"tools": [5]},
    "tools": {"tools": FUNCTION},
    "tools[0].parameterz": {"tools": [{"name": "a", "parameterz": SCHEMA}]},
    "tools[0].name": {"tools": [{"name": 5}]},
    "tools[0].parameters": {"tools": [{"name": "a", "parameters": {"a": {1}}}]},
    "tool_choice.type": {"tool_choice": {"type": "auto"}},
    "json_schema": {"json_schema": [1]},
    "temperature": {"temperature": "hot"},
    "prompt[0].content[1]": {
        "prompt": [{"role": "user", "content": ["a", {"type": "image_url", "image_url": {}}]}]
    },
    "prompt[0].content": {"prompt": [{"role": "tool", "content": {"a": 1}}]},
    "prompt[0].role": {"prompt": [{"role": ["user"], "content": "a"}]},
    "prompt[0].nmae": {"prompt": [{"role": "user", "content": "a", "nmae": "b"}]},
    "prompt[0]": {"prompt": [{"role": "assistant"}]},
    "prompt[0].tool_calls[0]": {"prompt": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
}


@pytest.mark.parametrize("field", WRONG)
def test_an_error_names_the_argument_that_is_wrong(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        start(**WRONG[field])

    assert [each.field for each in caught.value.field_violations] == [field]
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("system", r'begin the prompt with \{"role": "system"'),
        ("messages", "second argument, `prompt`"),
        ("max_tokens", "did you mean max_output_tokens"),
        ("temprature", "did you mean temperature"),
        ("response_format", "json_schema"),
        ("zzz", "$"),
    ],
)
def test_an_unknown_option_has_a_hint(option: str, hint: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{option}: no such option.*{hint}"):
        start(**{option: 1})


@pytest.mark.parametrize("model", [None, "", 5])
def test_a_model_is_a_name(model: Any) -> None:
    async def calls(client: AsyncClient) -> None:
        for call in (client.complete, client.count_tokens, client.quote, client.embed):
            with pytest.raises(InvalidRequest, match=r"^model: .*list_models\(\)"):
                await call(model, "Hi")

    asyncio.run(calls(AsyncClient("127.0.0.1:1", "key")))


@pytest.mark.parametrize(
    ("field", "description", "argument"),
    [
        ("sampling.temperature", "must be 0 to 2", "temperature"),
        ("start.sampling.top_p", "must be 0 to 1", "top_p"),
        ("conversation.messages[0].content", "is too long", "prompt[0].content"),
        ("conversation.reasoning_effort", "must be low", "reasoning_effort"),
        ("response_format.json_schema", "cannot be compiled", "json_schema"),
        ("beam_search.width", "must be 2 to 16", "beam_width"),
        ("beam_search.length_penalty", "must be small", "length_penalty"),
        ("stop_sequences[1]", "must not be empty", "stop[1]"),
        ("initial_credit_tokens", "must be positive", "prefetch_tokens"),
        ("tools[0].parameters_json_schema", "must be a schema", "tools[0].parameters"),
        ("tool_choice.name", "must be one of tools", "tool_choice"),
        ("token_ids.ids", "must be small", "token_ids"),
        ("max_cost.currency_code", "must be USD", "max_cost"),
        ("limit_value", "must be positive", "limit_value"),
    ],
)
def test_errors_of_the_server_name_arguments(field: str, description: str, argument: str) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    details = error_details_pb2.BadRequest(field_violations=[violation])
    for message in (description, f"{field}: {description}"):
        status = scripted.status("INVALID_ARGUMENT", message, "FIELD_INVALID", details)

        error = error_from_status(status)

        assert isinstance(error, InvalidRequest)
        assert error.field_violations[0].field == argument
        assert error.message == f"{argument}: {description}"


async def test_labels_of_the_client_are_those_of_each_request() -> None:
    server = ScriptedInference(scripted.answer)
    labels = {"team": "search", "env": "test"}
    async with (
        scripted.serve(server) as address,
        AsyncClient(address, "key", labels=labels) as client,
    ):
        await client.complete("demo", "Hi", labels={"env": "prod", "user": "7"})
        await client.complete("demo", "Hi")
        await client.quote("demo", "Hi")
        await client.embed("demo", "Hi", labels={"user": "7"})

    frames = [frame for message in server.streams[0].messages for frame in message.frames]
    found = [dict(each.start.labels) for each in frames if each.HasField("start")]
    assert found == [{"team": "search", "env": "prod", "user": "7"}, labels]
    quote, embed = server.requests
    assert isinstance(quote, pb.QuoteRequest)
    assert isinstance(embed, pb.EmbedRequest)
    assert (dict(quote.start.labels), dict(embed.labels)) == (labels, {**labels, "user": "7"})
    for wrong in (["a"], {"a": 1}):
        with pytest.raises(InvalidRequest, match=r"^labels: must map names to texts"):
            AsyncClient(address, "key", labels=wrong)  # type: ignore[arg-type]


async def test_the_end_user_of_the_client_is_that_of_each_request() -> None:
    server = ScriptedInference(scripted.answer)
    async with (
        scripted.serve(server) as address,
        AsyncClient(address, "key", end_user="alice") as client,
    ):
        await client.complete("demo", "Hi", end_user="bob")
        await client.complete("demo", "Hi", end_user="")
        await client.complete("demo", "Hi")
        await client.quote("demo", "Hi")
        await client.embed("demo", "Hi", end_user="bob")

    frames = [frame for message in server.streams[0].messages for frame in message.frames]
    assert [each.start.end_user for each in frames if each.HasField("start")] == [
        "bob",
        "",
        "alice",
    ]
    quote, embed = server.requests
    assert isinstance(quote, pb.QuoteRequest)
    assert isinstance(embed, pb.EmbedRequest)
    assert (quote.start.end_user, embed.end_user) == ("alice", "bob")
    with pytest.raises(InvalidRequest, match=r"^end_user: must be a text"):
        AsyncClient(address, "key", end_user=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(("of_client", "of_call", "count"), [(0, None, 1), (2, 0, 1), (0, 1, 2)])
async def test_a_number_of_retries_holds_for_the_client_or_one_call(
    of_client: int, of_call: int | None, count: int
) -> None:
    server = ScriptedInference(scripted.answer)
    draining = scripted.status("UNAVAILABLE", "the server drains", "DRAINING", retry_after_s=0.01)
    server.refusals = [(draining, True)] * 9
    async with (
        scripted.serve(server) as address,
        AsyncClient(address, "key", max_retries=of_client) as client,
    ):
        with pytest.raises(weir_client.Unavailable):
            await client.embed("demo", "Hi", max_retries=of_call)

    assert len(server.requests) == count


def test_every_unary_call_takes_a_timeout_and_a_number_of_retries() -> None:
    calls = "count_tokens quote quote_embed embed list_models get_quota get_restrictions usage"
    for of in (AsyncClient, weir_client.Client):
        for name in (*calls.split(), "get_generation"):
            parameters = inspect.signature(getattr(of, name)).parameters
            assert {"timeout", "max_retries"} <= parameters.keys() or "options" in parameters, name


@pytest.mark.parametrize("call", ["list_models", "get_quota", "get_restrictions", "usage"])
async def test_a_call_without_retries_is_made_once(call: str) -> None:
    server = ScriptedInference(scripted.answer)
    draining = scripted.status("UNAVAILABLE", "the server drains", "DRAINING", retry_after_s=0.01)
    server.refusals = [(draining, True)] * 9
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        with pytest.raises(weir_client.Unavailable):
            await getattr(client, call)(max_retries=0)

    assert len(server.refusals) == 8


async def test_the_log_says_retries_and_resumptions_and_nothing_of_the_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    draining = scripted.status("UNAVAILABLE", "the server drains", "DRAINING", retry_after_s=0.01)

    async def refuse(stream: ServerStream) -> None:
        await stream.send(scripted.failed((await stream.read_start()).request_id, draining))

    server = ScriptedInference(refuse, scripted.answer)
    server.refusals = [(draining, True)]
    with caplog.at_level(logging.DEBUG, "weir"):
        async with scripted.serve(server) as address, AsyncClient(address, "wk_key") as client:
            await client.complete("demo", "a private question")
            await client.list_models()

    lines = [f"{each.levelname} {each.getMessage()}" for each in caplog.records]
    report = "\n".join(lines)
    assert any(re.match(r"INFO request .*: retry 1 in .* s", line) for line in lines), report
    assert any(re.match(r"INFO call failed .*: retry 1 in .* s", line) for line in lines), report
    assert "private" not in report
    assert "wk_key" not in report
    assert logging.getLogger("weir.client").handlers, "silent unless the program configures it"


def documented(call: Any) -> set[str]:
    """Return the arguments that a docstring describes."""
    text = inspect.getdoc(call) or ""
    section = re.search(r"^Args:\n(.*?)(?:^\S|\Z)", text, re.M | re.S)
    return set(re.findall(r"^    \*{0,2}(\w+): ", section[1], re.M)) if section else set()


OPTIONS: dict[str, Any] = {
    "generate": GenerateOptions,
    "complete": GenerateOptions,
    "attach": AttachOptions,
    "embed": EmbedOptions,
    "quote_embed": EmbedOptions,
}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_each_argument_is_described_where_it_is_used(kind: type[Any]) -> None:
    calls = {
        name: call
        for name, call in vars(kind).items()
        if inspect.isfunction(call) and (name == "__init__" or not name.startswith("_"))
    }

    assert len(calls) >= 12
    for name, call in calls.items():
        own = set(inspect.signature(call).parameters) - {"self"}
        if name in OPTIONS:
            own = own - {"options"} | set(OPTIONS[name].__annotations__)
        assert documented(call) == own, name
        assert inspect.getdoc(call) == inspect.getdoc(getattr(AsyncClient, name)), name
        assert "see `" not in (inspect.getdoc(call) or "").lower()


@pytest.mark.parametrize("kind", [AdminClient, BillingClient, ReceiptClient])
def test_settings_of_the_other_clients_are_described(kind: type[Any]) -> None:
    call = kind.__init__

    assert documented(call) == set(inspect.signature(call).parameters) - {"self"}


def test_a_conversation_can_be_kept_as_json() -> None:
    talk = [Message("user", "Hi"), Message("assistant", "", [ToolCall("1", "weather", "{}")])]

    kept = json.loads(json.dumps([each.to_dict() for each in talk]))

    assert start(kept) == start(talk)
