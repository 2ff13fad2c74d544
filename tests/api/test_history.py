"""Conversations that began at another server: what the model sees of each form."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import InvalidRequest
from api.core.texts import Violations
from api.generation.parsing.conversation import CALL_ID_CHARS_MAX, check_messages
from api.openai.apis import Api, parsed_body
from api.openai.gateway import CHAT, MESSAGES, RESPONSES
from tests.api.openai_bodies import (
    Part,
    assistant,
    call,
    called,
    calling,
    function,
    input_text,
    output,
    text,
    tool,
    user,
)

APIS: dict[str, tuple[Api, str, dict[str, Any]]] = {
    "chat": (CHAT, "messages", {"model": "m"}),
    "responses": (RESPONSES, "input", {"model": "m"}),
    "messages": (MESSAGES, "messages", {"model": "m", "max_tokens": 9}),
}
USER = user("Hi")
Turn = tuple[str, str, str]  # role, calls or the id of the result's call, text after its thinking

F = {"name": "f", "arguments": "{}"}
ANSWERED = [("assistant", "c=f{}", ""), ("tool", "c", "ok")]
PLAIN = {"type": "text", "media_type": "text/plain", "data": "d"}
BLOCKS = {"type": "content", "content": [text("d")]}
FOUND = {"source": "u", "title": "T", "content": [text("d")], "citations": {"enabled": True}}
USER_BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "document": ({"type": "document", "title": "T", "source": PLAIN}, "T\nd"),
    "document of blocks": ({"type": "document", "source": BLOCKS}, "d"),
    "search result": ({"type": "search_result", **FOUND}, "T\nu\nd"),
    "compaction": ({"type": "compaction", "content": "d"}, "d"),
}
FIRST = "messages[0].content[0]"
NULLS = ("function_call", "tool_calls", "refusal", "audio", "reasoning")
REFUSED = {"type": "refusal", "refusal": "No."}


def used(call_id: str, content: Any) -> list[Part]:
    """Return a use of a tool and its result in the form of Anthropic's API."""
    use = {"type": "tool_use", "id": call_id, "name": "f", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": call_id, "content": content}
    return [assistant([use]), user([answer])]


def conversation(api: str, turns: list[Any], **more: Any) -> tuple[pb.Conversation, str]:
    """Return the conversation of a body, which must be right, and the names that it ignores."""
    kind, name, body = APIS[api]
    data = msgspec.json.encode({**body, name: turns, **more})
    parsed, headers = parsed_body(data, kind, strict=False)
    [start] = parsed.starts
    wrong = Violations()
    check_messages(start.conversation.messages, wrong)
    wrong.raise_if_any()
    return start.conversation, headers.get("weir-ignored-parameters", "")


def shown(api: str, turns: list[Any]) -> list[Turn]:
    """Return what the model sees of these turns, which follow a user's."""
    found, _ = conversation(api, [USER, *turns])
    return [
        (
            pb.Role.Name(turn.role).removeprefix("ROLE_").lower(),
            turn.tool_call_id
            or " ".join(f"{call.id}={call.name}{call.arguments_json}" for call in turn.tool_calls),
            f"<{turn.reasoning}>{turn.content}" if turn.reasoning else turn.content,
        )
        for turn in found.messages[1:]
    ]


def replied(**members: Any) -> Part:
    """Return a result as other servers write it."""
    return {"role": "tool", "content": "ok", **members}


@pytest.mark.parametrize(
    "form",
    [
        calling({"id": "c", "function": F}),
        calling({"id": "c", "type": None, "function": F}),
        calling({"id": "c", "type": "function", "function": F | {"arguments": {}}}),
        calling(call("c"), content=[]),
        calling(call("c") | {"index": 0}),
    ],
    ids=["no type", "type null", "arguments as an object", "content as a list", "index"],
)
def test_forms_of_a_call_are_one_call(form: dict[str, Any]) -> None:
    assert shown("chat", [form, replied(tool_call_id="c")]) == ANSWERED


@pytest.mark.parametrize(
    ("arguments", "written"),
    [(None, ""), ("", ""), ({"a": "ü"}, '{"a": "ü"}'), ([1], "[1]"), ('{"a', '{"a')],
)
def test_arguments_of_any_form_are_text(arguments: Any, written: str) -> None:
    [turn] = shown("chat", [calling(call("c", arguments=arguments))])

    assert turn[1] == f"c=f{written}"


@pytest.mark.parametrize("given", ["1", "toolu_x", "a|b", "日本", " ", "x" * CALL_ID_CHARS_MAX])
def test_ids_of_any_form_belong_together_on_all_apis(given: str) -> None:
    chat = [calling(call(given)), replied(tool_call_id=given)]
    items = [called(given), output(given, "ok")]
    blocks = used(given, "ok")

    for api, turns in (("chat", chat), ("responses", items), ("messages", blocks)):
        assert shown(api, turns) == [("assistant", f"{given}=f{{}}", ""), ("tool", given, "ok")]


@pytest.mark.parametrize("absent", ["", None])
@pytest.mark.parametrize(
    ("names", "sent", "answered"),
    [
        (["f", "g"], [None, None], ["call_0", "call_1"]),  # in the order of the calls
        (["f", "g"], ["g", "f"], ["call_1", "call_0"]),  # by the name of the function
        (["f", "f", "g"], ["f", "g", "f"], ["call_0", "call_2", "call_1"]),
        (["f", "g"], ["h", None], ["call_0", "call_1"]),  # a function without a call
    ],
)
def test_results_without_ids_answer_the_first_open_call(
    absent: Any, names: list[str], sent: list[str | None], answered: list[str]
) -> None:
    calls = [{"id": absent, "function": {"name": name, "arguments": "{}"}} for name in names]
    results = [replied(tool_call_id=absent, name=name) for name in sent]

    turns = shown("chat", [calling(*calls), *results])

    assert [turn[1] for turn in turns[1:]] == answered


def test_equal_ids_of_a_message_are_distinguished_in_their_order() -> None:
    calls = [call("c", name) for name in "fgh"]

    turns = shown("chat", [calling(*calls), *[replied(tool_call_id="c")] * 4])

    assert turns[0][1] == "c=f{} c_1=g{} c_2=h{}"
    assert [turn[1] for turn in turns[1:]] == ["c", "c_1", "c_2", "c_2"]


def test_a_result_without_an_open_call_is_refused() -> None:
    for turns in ([replied()], [calling(call("")), replied(), replied()]):
        with pytest.raises(InvalidRequest, match="earlier message"):
            shown("chat", turns)


def test_thousands_of_results_are_paired_in_linear_steps() -> None:
    calls = [{"id": "", "function": F | {"name": "fg"[number % 2]}} for number in range(4000)]
    results = [replied(name="gf"[number % 2]) for number in range(90)]

    turns = shown("chat", [calling(*calls), *results])

    assert turns[-1][1] == "call_88"


CHAT_FORMS: dict[str, tuple[list[Any], list[Turn]]] = {
    "legacy call": (
        [assistant(function_call=F), {"role": "function", "name": "f", "content": "ok"}],
        [("assistant", "call_0=f{}", ""), ("tool", "call_0", "ok")],
    ),
    "nulls": ([assistant("a", **dict.fromkeys(NULLS), annotations=[])], [("assistant", "", "a")]),
    "custom call": (
        [
            calling({"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** x"}}),
            replied(tool_call_id="c"),
        ],
        [("assistant", 'c=patch{"input": "*** x"}', ""), ("tool", "c", "ok")],
    ),
    "null result": (
        [calling(call("c")), replied(tool_call_id="c", content=None)],
        [("assistant", "c=f{}", ""), ("tool", "c", "")],
    ),
    "refusal": ([assistant(refusal="No.")], [("assistant", "", "No.")]),
    "refusal as a part": ([assistant([REFUSED])], [("assistant", "", "No.")]),
    "thinking of Mistral": (
        [assistant([{"type": "thinking", "thinking": [text("t")]}, text("a")])],
        [("assistant", "", "<t>a")],
    ),
    "thinking of Anthropic": (
        [
            assistant(
                [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("a"),
                ]
            )
        ],
        [("assistant", "", "<t>a")],
    ),
    "thinking of Ollama": ([assistant("a", thinking="t")], [("assistant", "", "<t>a")]),
}


@pytest.mark.parametrize("form", CHAT_FORMS)
def test_messages_of_other_servers_are_shown(form: str) -> None:
    turns, seen = CHAT_FORMS[form]

    assert shown("chat", turns) == seen


def answered(kind: str, output: Any, given: dict[str, Any], **ids: Any) -> list[dict[str, Any]]:
    return [
        {"type": kind, "status": "completed", "call_id": "c", **given},
        {"type": f"{kind}_output", "output": output, **(ids or {"call_id": "c"})},
    ]


ITEM_FORMS: dict[str, tuple[list[Any], list[Turn]]] = {
    "custom": (
        answered("custom_tool_call", "ok", {"name": "patch", "input": "*** x"}),
        [("assistant", 'c=patch{"input": "*** x"}', ""), ("tool", "c", "ok")],
    ),
    "local shell": (
        answered("local_shell_call", "ok", {"action": {"command": ["ls"]}}, id="c"),
        [("assistant", 'c=local_shell{"command": ["ls"]}', ""), ("tool", "c", "ok")],
    ),
    "shell": (
        answered("shell_call", [{"stdout": "a"}], {"action": {"commands": ["ls"]}}),
        [("assistant", 'c=shell{"commands": ["ls"]}', ""), ("tool", "c", '[{"stdout": "a"}]')],
    ),
    "patch": (
        answered("apply_patch_call", None, {"operation": {"path": "a"}}),
        [("assistant", 'c=apply_patch{"path": "a"}', ""), ("tool", "c", "")],
    ),
    "tool search": (
        [
            {"type": "tool_search_call", "call_id": "c", "arguments": {"q": "a"}},
            {"type": "tool_search_output", "call_id": "c", "tools": [{"name": "f"}]},
        ],
        [("assistant", 'c=tool_search{"q": "a"}', ""), ("tool", "c", '[{"name": "f"}]')],
    ),
    "refusal": ([assistant([REFUSED])], [("assistant", "", "No.")]),
    "null content": (
        [{"type": "message", "role": "assistant", "content": None, "id": "m"}],
        [("assistant", "", "")],
    ),
    "thinking as text": (
        [{"type": "reasoning", "summary": [], "content": [text("t")]}, assistant("a")],
        [("assistant", "", "<t>a")],
    ),
    "call of a namespace": (
        [called("c", namespace="n", caller={"type": "x"})],
        [("assistant", "c=f{}", "")],
    ),
    "parts of a result": (
        [called("c"), output("c", [input_text("ok")]) | {"type": "custom_tool_call_output"}],
        ANSWERED,
    ),
}


@pytest.mark.parametrize("form", ITEM_FORMS)
def test_items_of_other_servers_are_shown(form: str) -> None:
    turns, seen = ITEM_FORMS[form]

    assert shown("responses", turns) == seen


def test_items_of_tools_that_a_server_runs_are_left_out_and_named() -> None:
    items = [
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "other"}},
        {"type": "mcp_list_tools", "server_label": "s", "tools": []},
        {"type": "tool_search_call", "execution": "server", "call_id": None, "arguments": {}},
        assistant("a"),
    ]

    assert shown("responses", items) == [("assistant", "", "a")]
    _, ignored = conversation("responses", [USER, *items])
    assert ignored == "input[].web_search_call, input[].mcp_list_tools, input[].tool_search_call"


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("item_reference", "send the item itself"),
        ("compaction", "summary of it as text"),
        ("computer_call", "cannot see screens"),
        ("surprise", "must be one of message, function_call"),
    ],
)
def test_items_that_nothing_replaces_are_refused_with_a_remedy(kind: str, remedy: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        conversation("responses", [USER, {"type": kind, "id": "x"}])

    [violation] = refused.value.violations
    assert violation.field == "input[1].type"
    assert remedy in violation.description


@pytest.mark.parametrize("form", USER_BLOCKS)
def test_blocks_of_text_are_text_also_in_results(form: str) -> None:
    block, seen = USER_BLOCKS[form]

    assert shown("messages", used("c", [block]))[-1] == ("tool", "c", seen)
    assert shown("messages", [assistant("a"), user([block])])[-1] == ("user", "", seen)


@pytest.mark.parametrize(
    "kind",
    [
        "server_tool_use",
        "mcp_tool_use",
        *(f"{tool}_tool_result" for tool in ("mcp", "web_search", "web_fetch", "code_execution")),
    ],
)
@pytest.mark.parametrize("content", [[], "x", {"type": "error"}, [{"type": "web_search_result"}]])
def test_blocks_of_tools_that_a_server_runs_are_left_out_and_named(kind: str, content: Any) -> None:
    block = {"type": kind, "id": "s", "tool_use_id": "s", "name": "n", "content": content}
    turn = assistant([block, text("a")])

    assert shown("messages", [turn, USER]) == [("assistant", "", "a"), ("user", "", "Hi")]
    assert conversation("messages", [USER, turn, USER])[1] == f"messages[].content[].{kind}"


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({"type": "image", "source": {}}, FIRST),
        ({"type": "document", "source": {"type": "base64"}}, f"{FIRST}.source"),
        ({"type": "container_upload", "file_id": "f"}, FIRST),
        ({"type": "tool_result", "content": [{"type": "image"}]}, f"{FIRST}.content[0]"),
    ],
)
def test_blocks_that_the_model_cannot_read_are_refused(block: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        conversation("messages", [USER | {"content": [block]}])

    assert [each.field for each in refused.value.violations] == [field]


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_allowed_tools_are_the_only_ones_that_are_offered(api: str, mode: str) -> None:
    make = function if api == "chat" else tool
    members = {"mode": mode, "tools": [make("g")]}
    choice = {"allowed_tools": members} if api == "chat" else members
    kind, name, body = APIS[api]

    def start(names: str) -> pb.StartFrame:
        tools = [make(each) for each in names]
        allowed = {"type": "allowed_tools", **choice}
        fields = {**body, name: [USER], "tools": tools, "tool_choice": allowed}
        return parsed_body(msgspec.json.encode(fields), kind, strict=True)[0].starts[0]

    assert [each.name for each in start("fgh").tools] == ["g"]
    assert pb.ToolMode.Name(start("fgh").tool_choice.mode) == f"TOOL_MODE_{mode.upper()}"
    with pytest.raises(InvalidRequest, match="must be one of tools"):
        start("fh")


def test_a_strict_key_accepts_what_is_shown_and_refuses_what_is_left_out() -> None:
    shown_body = {"model": "m", "input": [USER, *ITEM_FORMS["custom"][0]]}
    left_out = {"model": "m", "input": [USER, {"type": "web_search_call", "id": "w"}]}

    parsed_body(json.dumps(shown_body).encode(), RESPONSES, strict=True)
    with pytest.raises(InvalidRequest, match="web_search_call"):
        parsed_body(json.dumps(left_out).encode(), RESPONSES, strict=True)
