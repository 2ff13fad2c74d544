"""Conversations of every API with models whose templates and checkpoints have rules of their own:
an end token that only the tokenizer names, one call in a turn, ids of nine characters, alternating
turns, one system message, no switch for thinking.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from tests.e2e.conftest import Serve
from tests.inference.checkpoints import CHAT_TEMPLATE
from tests.inference.family_templates import KIMI_K2
from tests.inference.tool_checkpoints import TOOL_TEMPLATE, make_scripted_checkpoint
from tests.service import MODEL, Service, Stream, Tenant, conversation

ENDS, MISTRAL, SINGLE, KIMI = "ends", "mistral", "single", "kimi"
PIECES = (
    "Let me see.",
    "<tool_call>",
    '{"name": "book", "arguments": {"hotel": "Ulm"}}',
    "</tool_call>",
    "\n<tool_call>\n",
    '{"name": "quit", "arguments": {}}',
    "\n</tool_call>",
)
TEXT = "Let me see."
RAISE = "{{ raise_exception('This is against the rules.') }}"
# One system message at the beginning; turns alternate, those with calls have no text.
MISTRAL_TEMPLATE = (
    "{%- set ns = namespace(i=0) -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' and not loop.first -%}" + RAISE + "{%- endif -%}"
    "{%- if m.role in ['user', 'assistant'] and not m.tool_calls -%}"
    "{%- if (m.role == 'user') != (ns.i % 2 == 0) -%}" + RAISE + "{%- endif -%}"
    "{%- set ns.i = ns.i + 1 -%}{%- endif -%}"
    "{%- if m.tool_calls -%}{%- for call in m.tool_calls -%}"
    "{%- if call.id | length != 9 -%}" + RAISE + "{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{%- if m.role == 'tool' and m.tool_call_id | length != 9 -%}" + RAISE + "{%- endif -%}"
    "{%- endfor -%}"
) + TOOL_TEMPLATE.replace(
    "+ message['content'] }}\n{%- for call",
    "+ ('' if message.tool_calls else message['content']) }}\n{%- for call",
).replace(
    "{{ '<|user|><tool_response>'", "{{ '<|user|>' + message.tool_call_id + ' <tool_response>'"
)
# One call between two questions, whether as one turn or as several.
SINGLE_TEMPLATE = (
    "{%- set ns = namespace(calls=0) -%}{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{%- set ns.calls = 0 -%}{%- endif -%}"
    "{%- set ns.calls = ns.calls + (m.tool_calls or []) | length -%}"
    "{%- if ns.calls > 1 -%}" + RAISE + "{%- endif -%}{%- endfor -%}" + TOOL_TEMPLATE
)
KIMI_TEMPLATE = (
    KIMI_K2.replace("<|im_system|>", "<|system|>").replace(
        "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>",
        "{%- if add_generation_prompt -%}<|assistant|>",
    )
    + "{#- <tool_call> -#}"
)

SCHEMA = {"type": "object", "properties": {"hotel": {"type": "string"}}}
FUNCTIONS = [{"name": name, "description": name, "parameters": SCHEMA} for name in ("book", "quit")]
CHAT_TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
TOOLS = [{"type": "function", **function} for function in FUNCTIONS]
MESSAGE_TOOLS = [
    {"name": name, "description": name, "input_schema": SCHEMA} for name in ("book", "quit")
]
USER = {"role": "user", "content": "Hello"}
IDS = ("call_abc123DEF456ghi789", "toolu_01ABCdef"), ("1", "functions.book:7"), ("call_0", "call_1")


def make_fine_tune(directory: Path, script: tuple[str, ...]) -> Path:
    """Write a model whose end token only the tokenizer names: it goes on after it."""
    make_scripted_checkpoint(directory, script, CHAT_TEMPLATE.replace("<|end|>", "<|im_end|>"))
    (directory / "generation_config.json").unlink()
    for name, entries in (
        ("config.json", {"eos_token_id": 2}),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}),
    ):
        raw = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(raw | entries))
    raw = json.loads((directory / "tokenizer.json").read_text())
    for token in raw["added_tokens"]:
        token["special"] |= token["content"] == "<|im_end|>"
    (directory / "tokenizer.json").write_text(json.dumps(raw))
    return directory


@pytest.fixture(scope="module")
def service(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Service:
    directory = tmp_path_factory.mktemp("templates")
    models = {
        ENDS: make_fine_tune(directory / "ends", ("{}", "<|im_end|>", "Run", "away", "!!")),
        MISTRAL: make_scripted_checkpoint(directory / "mistral", PIECES, MISTRAL_TEMPLATE),
        SINGLE: make_scripted_checkpoint(directory / "single", PIECES, SINGLE_TEMPLATE),
        KIMI: make_scripted_checkpoint(directory / "kimi", PIECES, KIMI_TEMPLATE),
    }
    models[MODEL] = models[ENDS]
    return serve(models[MODEL], models=models)


class Api:
    """Raw requests with the key of a tenant."""

    def __init__(self, service: Service, tenant: Tenant) -> None:
        self._url = service.openai_url
        self._headers = {"authorization": f"Bearer {tenant.secret}"}

    def _post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        url = f"{self._url}/{path}"
        return httpx2.post(url, json=body, headers=self._headers, timeout=60)

    def post(self, path: str, **body: Any) -> Any:
        answer = self._post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """Return the events of a stream."""
        answer = self._post(path, body | {"stream": True})
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    def refused(self, path: str, **body: Any) -> Any:
        answer = self._post(path, body)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]


# The end token that only the tokenizer names.


async def test_an_answer_ends_where_the_tokenizer_says_in_every_api(service: Service) -> None:
    tenant = await service.tenant()
    api = Api(service, tenant)
    chat = {"model": ENDS, "messages": [USER], "max_tokens": 50, "temperature": 0}

    whole = api.post("chat/completions", **chat)
    as_json = api.post("chat/completions", **chat, response_format={"type": "json_object"})
    streamed = api.events("chat/completions", **chat, stream_options={"include_usage": True})
    message = api.post("messages", **chat)
    message_events = api.events("messages", **chat)
    response = api.post("responses", model=ENDS, input="Hello", max_output_tokens=50)
    [*_, last] = api.events("responses", model=ENDS, input="Hello", max_output_tokens=50)
    async with service.stream(tenant.secret) as stream:
        finished, text = await generated(stream)

    for answer in (whole, as_json):
        choice = answer["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("{}", "stop")
        assert answer["usage"]["completion_tokens"] == 2
    assert streamed[-1]["usage"]["completion_tokens"] == 2
    assert [block["text"] for block in message["content"]] == ["{}"]
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("end_turn", 2)
    [delta] = [event for event in message_events if event["type"] == "message_delta"]
    assert (delta["delta"]["stop_reason"], delta["usage"]["output_tokens"]) == ("end_turn", 2)
    for each in (response, last["response"]):
        assert (each["status"], each["usage"]["output_tokens"]) == ("completed", 2)
    assert (text, finished.usage.billed_token_count) == ("{}", 2)
    assert finished.reason == types_pb2.FINISH_REASON_STOP
    assert {event["billed_token_count"] for event in service.database.events(tenant)} == {2}


async def generated(stream: Stream) -> tuple[pb.FinishedFrame, str]:
    request_id = await stream.begin(
        model=ENDS, conversation=conversation("Hello"), max_output_tokens=50, ignore_eos=False
    )
    return await stream.finished(request_id), stream.text(request_id)


# What the server writes, it reads in the next request, with the client's ids.


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("model", [MISTRAL, KIMI])
async def test_a_chat_keeps_foreign_ids(model: str, ids: tuple[str, str], service: Service) -> None:
    api = Api(service, await service.tenant())
    requested: dict[str, Any] = {"model": model, "tools": CHAT_TOOLS, "temperature": 0}
    first = api.post("chat/completions", **requested, messages=[USER])["choices"][0]["message"]
    made = first["tool_calls"]
    for call, given in zip(made, ids, strict=True):
        call["id"] = given
    results = [{"role": "tool", "tool_call_id": given, "content": f"Done {given}"} for given in ids]
    talk = [USER, first, *results]

    second = api.post("chat/completions", **requested, messages=talk)
    streamed = api.events("chat/completions", **requested, messages=talk)
    reply = {"role": "assistant", "content": "All done."}
    third = api.post("chat/completions", **requested, messages=[*talk, reply, USER])

    assert first["content"] == TEXT
    assert [call["function"]["name"] for call in made] == ["book", "quit"]
    for answer in (second, third):
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"
    again = api.post("chat/completions", **requested, messages=talk)["usage"]
    assert again["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert again["prompt_tokens_details"]["cached_tokens"] > again["prompt_tokens"] // 2


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("model", [MISTRAL, KIMI])
async def test_a_response_goes_on_with_ids_of_other_providers(
    model: str, ids: tuple[str, str], service: Service
) -> None:
    api = Api(service, await service.tenant())
    requested: dict[str, Any] = {"model": model, "tools": TOOLS, "temperature": 0}
    requested_first = [USER]
    first = api.post("responses", **requested, input=requested_first)["output"]
    calls = [item for item in first if item["type"] == "function_call"]
    for call, given in zip(calls, ids, strict=True):
        call["call_id"] = given
    results = [
        {"type": "function_call_output", "call_id": given, "output": f"Done {given}"}
        for given in ids
    ]
    talk = [*requested_first, *first, *results]

    counted = api.post("responses/input_tokens", model=model, tools=TOOLS, input=talk)
    second = api.post("responses", **requested, input=talk)
    [*_, last] = api.events("responses", **requested, input=talk)

    assert [item["type"] for item in first] == ["message", "function_call", "function_call"]
    assert counted["input_tokens"] == second["usage"]["input_tokens"]
    assert last["response"]["usage"]["input_tokens"] == counted["input_tokens"]
    assert last["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("model", [MISTRAL, KIMI])
async def test_a_message_goes_on_with_ids_of_other_providers(
    model: str, ids: tuple[str, str], service: Service
) -> None:
    api = Api(service, await service.tenant())
    requested: dict[str, Any] = {"model": model, "tools": MESSAGE_TOOLS, "max_tokens": 40}
    first = api.post("messages", **requested, messages=[USER])["content"]
    calls = [block for block in first if block["type"] == "tool_use"]
    for call, given in zip(calls, ids, strict=True):
        call["id"] = given
    results = [{"type": "tool_result", "tool_use_id": given, "content": "Done"} for given in ids]
    talk = [USER, {"role": "assistant", "content": first}, {"role": "user", "content": results}]

    counted = api.post("messages/count_tokens", model=model, tools=MESSAGE_TOOLS, messages=talk)
    second = api.post("messages", **requested, messages=talk)
    events = api.events("messages", **requested, messages=talk)

    assert [block["type"] for block in first] == ["text", "tool_use", "tool_use"]
    usage = second["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert second["stop_reason"] == "tool_use"
    [delta] = [event for event in events if event["type"] == "message_delta"]
    assert delta["delta"]["stop_reason"] == "tool_use"
    assert delta["usage"]["cache_read_input_tokens"] > 0


async def test_an_answer_has_one_call_where_the_template_takes_no_more(service: Service) -> None:
    api = Api(service, await service.tenant())
    requested: dict[str, Any] = {"model": SINGLE, "tools": CHAT_TOOLS, "temperature": 0}

    first = api.post("chat/completions", **requested, messages=[USER])["choices"][0]
    streamed = api.events("chat/completions", **requested, messages=[USER])
    forced = api.post("chat/completions", **requested, messages=[USER], tool_choice="required")
    response = api.post("responses", model=SINGLE, tools=TOOLS, input="Hello")
    message = first["message"]
    [call] = message["tool_calls"]
    done = {"role": "tool", "tool_call_id": call["id"], "content": "Done"}
    second = api.post("chat/completions", **requested, messages=[USER, message, done])
    several = api.refused("chat/completions", **requested, messages=[USER], n=2)

    assert (call["function"]["name"], message["content"]) == ("book", TEXT)
    assert first["finish_reason"] == "tool_calls"
    indexes = {
        call["index"]
        for event in streamed
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls") or ()
    }
    assert indexes == {0}
    assert len(forced["choices"][0]["message"]["tool_calls"]) == 1
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["message", "function_call"]
    assert second["choices"][0]["finish_reason"] == "tool_calls"
    assert several["param"] == "n"
    assert "one call in a turn" in several["message"]


# System messages.


async def test_system_messages_at_the_beginning_are_joined_in_every_api(service: Service) -> None:
    api = Api(service, await service.tenant())
    system, developer = (
        {"role": role, "content": role.title()} for role in ("system", "developer")
    )
    joined = {"role": "system", "content": "System\n\nDeveloper"}

    def chat_tokens(*messages: dict[str, Any]) -> int:
        requested = {"model": MISTRAL, "messages": [*messages, USER], "max_tokens": 1}
        return int(api.post("chat/completions", **requested)["usage"]["prompt_tokens"])

    response = api.post(
        "responses",
        model=MISTRAL,
        instructions="System",
        input=[developer, USER],
        max_output_tokens=16,
    )

    expected = chat_tokens(joined)
    assert chat_tokens(system, developer) == expected
    assert response["usage"]["input_tokens"] == expected


async def test_a_later_system_message_is_refused_by_its_index(service: Service) -> None:
    api = Api(service, await service.tenant())
    late = {"role": "system", "content": "Late"}
    reply = {"role": "assistant", "content": "Hi."}
    talk = [USER, reply, late, USER]

    chat = api.refused("chat/completions", model=MISTRAL, messages=talk)
    response = api.refused("responses", model=MISTRAL, instructions="First", input=talk)

    assert (chat["param"], response["param"]) == ("messages[2]", "input[2]")
    for error in (chat, response):
        assert (
            "this model's chat template takes system messages at the beginning"
            in (error["message"])
        )


# Thinking.


async def test_without_a_switch_thinking_cannot_be_on(service: Service) -> None:
    api = Api(service, await service.tenant())
    chat = {"model": ENDS, "messages": [USER], "max_tokens": 5}
    response = {"model": ENDS, "input": "Hello"}

    for path, usual, off, on, name in (
        ("chat/completions", chat, {"enable_thinking": False}, {"enable_thinking": True}, None),
        ("responses", response, {"enable_thinking": False}, {"enable_thinking": True}, None),
        (
            "chat/completions",
            chat,
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
        (
            "responses",
            response,
            {"chat_template_kwargs": {"thinking": False}},
            {"chat_template_kwargs": {"thinking": True}},
            "chat_template_kwargs.thinking",
        ),
        (
            "messages",
            chat,
            {"thinking": {"type": "disabled"}},
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking.type",
        ),
        (
            "responses",
            response,
            {"reasoning": {"effort": "none"}},
            {"reasoning": {"effort": "high"}},
            "reasoning.effort",
        ),
        (
            "chat/completions",
            chat,
            {"reasoning_effort": "none"},
            {"reasoning_effort": "low"},
            "reasoning_effort",
        ),
    ):
        api.post(path, **usual, **off)
        api.events(path, **usual, **off)
        error = api.refused(path, **usual, **on)
        assert (name or "enable_thinking") in (error.get("param") or error["message"])
