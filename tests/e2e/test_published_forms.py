"""Answers of every path beside the published schemas, read by a parser that takes no name twice."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import anthropic.types
import httpx2
import openai.types
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter

from api.core.settings import DEMO_ENCODER_NAME, bundled_encoders
from tests.e2e.conftest import Serve
from tests.e2e.tool_models import HOTEL, PIECES, SCRIPT, STAY, ending_bias
from tests.inference.tool_checkpoints import make_scripted_checkpoint, make_tool_checkpoint
from tests.service import MODEL, Service, Tenant

PROMPT = [{"role": "user", "content": "Book!"}]
FUNCTION = {"name": "book", "description": "Books a room.", "parameters": HOTEL}
OTHER = {"name": "cook", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
TOOL = {"type": "function", **FUNCTION}
CLAUDE_TOOL = {"name": "book", "input_schema": HOTEL}
ANTHROPIC = {"anthropic-version": "2023-06-01"}
SHORT = {"max_output_tokens": 90}
LOGPROBS = ["message.output_text.logprobs"]
SCHEMA = {"type": "json_schema", "name": "stay", "schema": STAY}

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
REQUESTS: Sequence[tuple[str, dict[str, Any]]] = (
    (CHAT, {"messages": PROMPT, "max_tokens": 5}),
    (CHAT, {"messages": PROMPT, "n": 3, "temperature": 1, "max_tokens": 5, "logprobs": True}),
    (CHAT, {"model": SCRIPT, "messages": PROMPT, "tools": [CHAT_TOOL]}),
    (CHAT, {"messages": PROMPT, "tools": [CHAT_TOOL], "tool_choice": "required", "max_tokens": 90}),
    (COMPLETIONS, {"prompt": ["Hi", "Ho"], "n": 2, "max_tokens": 3, "logprobs": 1}),
    (RESPONSES, {"input": "Hi", "max_output_tokens": 5}),
    (RESPONSES, {"input": "Hi", "text": {"format": SCHEMA}, "reasoning": {"summary": "auto"}}),
    (RESPONSES, {"input": "Hi", "truncation": "auto", "temperature": 0.5, "max_output_tokens": 5}),
    (RESPONSES, {"model": SCRIPT, "input": "Hi", "tools": [TOOL], "include": LOGPROBS}),
    (RESPONSES, {"input": "Hi", "tools": [TOOL], "tool_choice": "required", **SHORT}),
    (MESSAGES, {"messages": PROMPT, "max_tokens": 5}),
    (MESSAGES, {"model": SCRIPT, "messages": PROMPT, "tools": [CLAUDE_TOOL], "max_tokens": 99}),
)
WHOLE: dict[str, Any] = {
    CHAT: openai.types.chat.ChatCompletion,
    COMPLETIONS: openai.types.Completion,
    RESPONSES: openai.types.responses.Response,
    MESSAGES: anthropic.types.Message,
}
EVENT: dict[str, Any] = {
    CHAT: openai.types.chat.ChatCompletionChunk,
    COMPLETIONS: openai.types.Completion,
    RESPONSES: openai.types.responses.ResponseStreamEvent,
    MESSAGES: anthropic.types.RawMessageStreamEvent,
}

DELTA = frozenset({"container", "stop_details", "stop_reason", "stop_sequence"})
BLOCKS = {
    "text": frozenset({"type", "text", "citations"}),
    "tool_use": frozenset({"type", "id", "name", "input", "caller"}),
}


# Members that the published schemas require, null or not; the clients' types forgive their absence.
RESPONSE = frozenset(
    [
        *("id", "object", "created_at", "completed_at", "status", "incomplete_details"),
        *("model", "previous_response_id", "instructions", "output", "error", "tools"),
        *("tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
        *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning"),
        *("usage", "max_output_tokens", "max_tool_calls", "store", "background"),
        *("service_tier", "metadata", "safety_identifier", "prompt_cache_key"),
    ]
)
MESSAGE = frozenset(
    [
        *("id", "type", "role", "content", "model", "stop_reason", "stop_sequence"),
        *("stop_details", "usage", "container"),
    ]
)
MESSAGE_USAGE = frozenset(
    [
        *("cache_creation", "cache_creation_input_tokens", "cache_read_input_tokens"),
        *("inference_geo", "input_tokens", "output_tokens", "output_tokens_details"),
        *("server_tool_use", "service_tier"),
    ]
)
DELTA_USAGE = MESSAGE_USAGE - {"cache_creation", "inference_geo", "service_tier"}
MODEL_INFO = frozenset(
    [
        *("type", "id", "display_name", "created_at", "capabilities", "lifecycle", "line"),
        *("deprecated_at", "retires_at", "max_input_tokens", "max_tokens"),
    ]
)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object, none of whose names may be repeated."""
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), f"repeated: {sorted(names)}"
    return dict(pairs)


def read(text: str) -> Any:
    return json.loads(text, object_pairs_hook=once)


def check_response(value: dict[str, Any]) -> None:
    """Check a response object, and that it has the parameters in force."""
    assert value.keys() >= RESPONSE
    assert isinstance(value["temperature"], int | float)
    assert isinstance(value["top_p"], int | float)
    assert (value["completed_at"] is None) == (value["status"] != "completed")
    assert value["reasoning"].keys() >= {"effort", "summary"}


def check_message(value: dict[str, Any]) -> None:
    assert value.keys() >= MESSAGE
    assert value["usage"].keys() >= MESSAGE_USAGE
    for block in value["content"]:
        assert block.keys() >= BLOCKS[block["type"]]


def check(path: str, text: str, kind: Any) -> dict[str, Any]:
    """Check one object of a path, and return it."""
    value: dict[str, Any] = read(text)
    known = read(text)
    for choice in known["choices"] if path == COMPLETIONS else ():
        choice["finish_reason"] = choice["finish_reason"] or "stop"  # null before the end of one
    TypeAdapter(kind).validate_json(json.dumps(known), strict=True)
    if path in (CHAT, COMPLETIONS):
        assert isinstance(value["system_fingerprint"], str)
    match value:
        case {"object": "response"}:
            check_response(value)
        case {"response": {"object": "response"} as response}:
            check_response(response)
        case {"type": "message"} | {"type": "message_start"}:
            check_message(value.get("message", value))
        case {"type": "message_delta"}:
            assert value["delta"].keys() >= DELTA
            assert value["usage"].keys() >= DELTA_USAGE
        case {"type": "content_block_start", "content_block": block}:
            assert block.keys() >= BLOCKS[block["type"]]
    return value


@pytest.fixture(scope="module")
def service(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """Return a service with a model of tools, one of scripted output, and an encoder."""
    home = tmp_path_factory.mktemp("forms")
    models = {
        MODEL: make_tool_checkpoint(home / "tools"),
        SCRIPT: make_scripted_checkpoint(home / "script", PIECES),
    }
    return serve(models[MODEL], models=models, encoders=bundled_encoders())


def connect(service: Service, tenant: Tenant, **headers: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        base_url=service.openai_url.removesuffix("/v1"),
        headers={"authorization": f"Bearer {tenant.secret}", **headers},
        timeout=60,
    )


async def events_of(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
    """Return the data of the events of a stream."""
    found = []
    async with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                found.append(line.removeprefix("data: "))
    return found


@pytest.mark.parametrize(("path", "fields"), REQUESTS)
async def test_answers_have_their_form(service: Service, path: str, fields: dict[str, Any]) -> None:
    tenant = await service.tenant()
    body = {"model": MODEL, **fields}
    if path == CHAT:
        body["logit_bias"] = ending_bias(service) if "tool_choice" in fields else {}
    usage = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}

    async with connect(service, tenant) as client:
        answer = await client.post(path, json=body)
        events = await events_of(client, path, body | usage)

    assert answer.status_code == 200, answer.text
    whole = check(path, answer.text, WHOLE[path])
    for text in events:
        value = check(path, text, EVENT[path])
        assert len(value.get("choices", ())) <= 1, "an event is of one choice"
        for choice in value.get("choices", ()):
            assert len(choice.get("delta", {}).get("tool_calls", ())) <= 1, "and of one call"
    if path == RESPONSES:
        requested = fields.get("truncation"), fields.get("reasoning", {}).get("summary")
        assert whole["truncation"] == (requested[0] or "disabled")
        assert whole["reasoning"]["summary"] == requested[1]
        assert whole["temperature"] == fields.get("temperature", 0), "the default of this model"
        [last] = [read(text)["response"] for text in events[-1:]]
        assert last.keys() == whole.keys()


@pytest.mark.parametrize(
    ("method", "path", "body", "kind"),
    [
        ("GET", "/v1/models", None, None),
        ("GET", f"/v1/models/{MODEL}", None, openai.types.Model),
        ("POST", EMBEDDINGS, {"input": "Hi"}, openai.types.CreateEmbeddingResponse),
        ("POST", EMBEDDINGS, {"input": ["a", "b"], "encoding_format": "base64"}, None),
        (
            "POST",
            "/v1/messages/count_tokens",
            {"model": MODEL, "messages": PROMPT},
            anthropic.types.MessageTokensCount,
        ),
        ("POST", "/v1/responses/input_tokens", {"model": MODEL, "input": "Hi"}, None),
    ],
)
async def test_other_answers_have_their_published_form(
    service: Service, tenant: Tenant, method: str, path: str, body: dict[str, Any] | None, kind: Any
) -> None:
    model = {"model": DEMO_ENCODER_NAME} if path == EMBEDDINGS else {}

    async with connect(service, tenant) as client:
        answer = await client.request(method, path, json=None if body is None else body | model)

    assert answer.status_code == 200, answer.text
    read(answer.text)
    if kind is not None:
        TypeAdapter(kind).validate_json(answer.text, strict=True)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS, "/v1/x"])
async def test_errors_have_the_form_of_their_api(service: Service, path: str) -> None:
    tenant = await service.tenant()

    async with connect(service, tenant) as client:
        wrong = await client.post(path, json={"model": 1})
        unknown = await client.get(f"/v1/models/none-{len(path)}")
        requested = await client.get("/v1/models/none", headers=ANTHROPIC)

    body = read(wrong.text)
    if path == MESSAGES:
        assert body.keys() == {"type", "error", "request_id"}
        assert body["request_id"] == wrong.headers["request-id"]
    else:
        assert body["error"].keys() >= {"message", "type", "param", "code"}
    assert read(unknown.text)["error"]["code"] == "model_not_found"
    body = read(requested.text)
    assert (requested.status_code, body["type"]) == (404, "error")
    assert body["error"]["type"] == "not_found_error"


async def test_models_are_listed_in_anthropics_form_for_its_clients(service: Service) -> None:
    tenant = await service.tenant()
    url = service.openai_url.removesuffix("/v1")

    with anthropic.Anthropic(base_url=url, api_key=tenant.secret) as client:
        listed = list(client.models.list(limit=1))
        one = client.models.retrieve(MODEL)
    async with connect(service, tenant, **ANTHROPIC) as client_of_any:
        pages = [
            read((await client_of_any.get(f"/v1/models?{query}")).text)
            for query in ("limit=1", f"after_id={SCRIPT}", f"before_id={MODEL}", "limit=1000")
        ]
        refused = [
            read((await client_of_any.get(f"/v1/models?{query}")).text)["error"]["message"]
            for query in ("limit=0", "limit=1001", "limit=x", "after_id=none", "before_id=")
        ]

    assert [model.id for model in listed] == [SCRIPT, MODEL], "models that answer messages"
    assert one.type == "model"
    assert [
        ([each["id"] for each in page["data"]], page["first_id"], page["last_id"], page["has_more"])
        for page in pages
    ] == [
        ([SCRIPT], SCRIPT, SCRIPT, True),
        ([MODEL], MODEL, MODEL, False),
        ([SCRIPT], SCRIPT, SCRIPT, False),
        ([SCRIPT, MODEL], SCRIPT, MODEL, False),
    ]
    for model in pages[-1]["data"]:
        assert model.keys() >= MODEL_INFO
        TypeAdapter(anthropic.types.ModelInfo).validate_json(json.dumps(model), strict=True)
    assert [text.partition(":")[0] for text in refused] == [*["limit"] * 3, "after_id", "before_id"]


async def test_the_first_call_of_each_event_is_all_of_a_call_under_load(service: Service) -> None:
    """Many clients read only `delta.tool_calls[0]`."""
    tenant = await service.tenant()
    body = {
        "model": MODEL,
        "messages": PROMPT,
        "tools": [CHAT_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "book"}},
        "logit_bias": ending_bias(service),
        "temperature": 1,
    }

    async with connect(service, tenant) as client:
        streams = await asyncio.gather(
            *(events_of(client, CHAT, body | {"seed": seed}) for seed in range(16))
        )

    for events in streams:
        arguments = ""
        for text in events:
            for choice in read(text)["choices"]:
                for call in choice["delta"].get("tool_calls", ())[:1]:
                    arguments += call["function"]["arguments"]
        assert json.loads(arguments).keys() == {"hotel", "stay"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_each_choice_ends_when_it_ends(service: Service, tenant: Tenant, path: str) -> None:
    """A choice that meets a stop sequence early does not wait for the others."""
    prompt = {"messages": PROMPT} if path == CHAT else {"prompt": ["Hi", "Hello there"]}
    body = {"model": MODEL, "n": 4, "temperature": 1, "seed": 3, "max_tokens": 200} | prompt

    body |= {"stop": list("aeiountrs"), "stream_options": {"include_usage": True}}
    async with connect(service, tenant) as client:
        events = await events_of(client, path, body)

    ends: dict[int, list[int]] = defaultdict(list)
    lasts: dict[int, int] = {}
    for number, text in enumerate(events):
        for choice in read(text)["choices"]:
            if choice["finish_reason"] is None:
                lasts[choice["index"]] = number
            else:
                ends[choice["index"]].append(number)
    assert all(len(numbers) == 1 for numbers in ends.values())
    assert len(ends) == (4 if path == CHAT else 8)
    assert all(ends[index][0] > last for index, last in lasts.items())
    assert min(numbers[0] for numbers in ends.values()) < max(lasts.values())
    assert read(events[-1])["choices"] == []


async def test_calls_of_functions_that_were_not_offered_are_calls(service: Service) -> None:
    """Without tools, and with none to call, they stay text."""
    tenant = await service.tenant()
    body = {"model": SCRIPT, "messages": PROMPT}
    other = {"tools": [{"type": "function", "function": OTHER}]}

    async with connect(service, tenant) as client:
        offered = (await client.post(CHAT, json=body | other)).json()["choices"][0]
        none = (await client.post(CHAT, json=body | other | {"tool_choice": "none"})).json()
        without = (await client.post(CHAT, json=body)).json()

    calls = offered["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["book", "quit"]
    assert "<tool_call>" not in offered["message"]["content"]
    assert offered["finish_reason"] == "tool_calls"
    for answer in (none, without):
        assert "<tool_call>" in answer["choices"][0]["message"]["content"]
        assert "tool_calls" not in answer["choices"][0]["message"]


async def test_log_probabilities_beside_tools_are_those_of_the_text(service: Service) -> None:
    tenant = await service.tenant()
    body = {"model": SCRIPT, "input": "Hi", "tools": [TOOL], "include": LOGPROBS}

    async with connect(service, tenant) as client:
        whole = (await client.post(RESPONSES, json=body)).json()
        events = [read(text) for text in await events_of(client, RESPONSES, body)]

    [message] = [item for item in whole["output"] if item["type"] == "message"]
    [content] = message["content"]
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [token for each in deltas for token in each["logprobs"]] == content["logprobs"]
    for each in deltas:
        text = "".join(token["token"] for token in each["logprobs"])
        assert text.endswith(each["delta"])
        assert "name" not in text
        assert "end" not in text


async def test_equal_choices_are_served_and_billed(service: Service, tenant: Tenant) -> None:
    body = {"model": MODEL, "messages": PROMPT, "max_tokens": 4, "temperature": 0, "n": 2}

    async with connect(service, tenant) as client:
        answer = (await client.post(CHAT, json=body | {"ignore_eos": True})).json()

    first, second = (choice["message"]["content"] for choice in answer["choices"])
    assert first == second
    assert answer["usage"]["completion_tokens"] == 8


async def test_the_fingerprint_is_that_of_the_weights(service: Service, tenant: Tenant) -> None:
    async with connect(service, tenant) as client:
        found = [
            (
                await client.post(CHAT, json={"model": model, "messages": PROMPT, "max_tokens": 1})
            ).json()["system_fingerprint"]
            for model in (MODEL, MODEL, SCRIPT)
        ]

    assert found[0] == found[1] != found[2]


async def test_paths_of_vllm_need_no_key(service: Service) -> None:
    async with httpx2.AsyncClient(base_url=service.openai_url.removesuffix("/v1")) as client:
        alive, version = await client.get("/ping"), await client.get("/version")

    assert (alive.status_code, alive.content) == (200, b"")
    assert read(version.text).keys() == {"version"}


async def test_wrong_values_are_named_as_the_request_has_them(service: Service) -> None:
    tenant = await service.tenant()
    embed, chat = {"model": DEMO_ENCODER_NAME}, {"model": MODEL, "messages": PROMPT}
    wrong: Sequence[tuple[str, dict[str, Any], str, str]] = (
        (EMBEDDINGS, {**embed, "input": ""}, "input", ""),
        (EMBEDDINGS, {**embed, "input": ["a", ""]}, "input[1]", ""),
        (EMBEDDINGS, {**embed, "input": [2**30]}, "input", ""),
        (EMBEDDINGS, {**embed, "input": [[1], [2**30]]}, "input[1]", ""),
        (CHAT, {**chat, "logit_bias": {"3": 1, "bad1": 1}}, "logit_bias['bad1']", "token id"),
        (CHAT, {**chat, "logit_bias": {"3": 1, "4": "x"}}, "logit_bias['4']", "a string"),
        (CHAT, {**chat, "metadata": {"a": "b", "c": 1}}, "metadata['c']", "a string"),
        (COMPLETIONS, {"model": MODEL, "prompt": "Hi", "max_tokens": 0}, "max_tokens", "-1"),
    )

    async with connect(service, tenant) as client:
        for path, body, param, words in wrong:
            error = (await client.post(path, json=body)).json()["error"]
            assert error["param"] == param, error
            assert words in error["message"], error
        body = {"model": MODEL, "messages": PROMPT, "max_tokens": 0}
        error = (await client.post(MESSAGES, json=body)).json()["error"]

        too_long = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 3000}]}
        longer = (await client.post(MESSAGES, json=too_long | {"max_tokens": 5})).json()["error"]

    assert error["message"].startswith("max_tokens: must be at least 1")
    assert longer["message"].startswith("prompt is too long: "), "agents wait for these words"
