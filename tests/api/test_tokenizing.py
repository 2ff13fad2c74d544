"""Input of the safety stage: the prompt as the model sees it, in whatever form it was sent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import regex
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import InvalidRequest, PromptFiltered
from api.core.texts import Violations
from api.generation.parsing.conversation import check_prompt as check_prompt_form
from api.generation.parsing.conversation import thinking_of
from api.generation.parsing.start_frame import ValidStart
from api.generation.parsing.text_work import TextWork
from api.generation.parsing.tokenizing import TextJob, check_prompt, tokenize
from api.generation.request.preparation import thinking_start
from api.openai.parameters import ChatParameters, decode, parse_chat
from inference.safety.rules import Rule, RuleChecker
from inference.sequences import ThinkingStart
from inference.text.tokenizer import ChatMessage, Thinking, Tokenizer
from inference.text.tools import Tool, ToolCall
from metering.quotas.quota_rules import Payer
from tests.api.openai_bodies import user
from tests.inference.checkpoints import make_checkpoint

NO_TOKENIZER = cast("Tokenizer", None)  # a conversation is checked as text
CHECKER = RuleChecker(
    [Rule("topic", regex.compile(r"forbidden\s+topic"), in_prompt=True, in_output=False)]
)
ESCAPED = r"forbidden\u0020\u0074opic"

SWITCHED_OFF = "{% if enable_thinking is false %}<think></think>{% endif %}"  # as Qwen3's
SWITCHED_ON = "{% if enable_thinking %}<think>{% else %}</think>{% endif %}"  # as DeepSeek V3.1's
SILENT = "{# <think> #}{% if thinking %}Think.{% endif %}"  # as Granite's
OPENED = "<think>\n"  # as DeepSeek R1's


def called(arguments: str, call_id: str = "a") -> ChatMessage:
    """Return a turn with a call."""
    return ChatMessage("assistant", "", (ToolCall(call_id, "book", arguments),))


@pytest.mark.parametrize(
    ("message", "parameters"),
    [
        (called(f'{{"a": ["{ESCAPED}"]}}'), "{}"),
        (called(f'{{"{ESCAPED}": 1}}'), "{}"),
        (called(r'{"a": "forbidden\ntopic"}'), "{}"),
        (called("{}", "forbidden topic"), "{}"),
        (ChatMessage("user", "Hello"), f'{{"description": "{ESCAPED}"}}'),
    ],
)
async def test_escapes_in_tools_are_decoded(message: ChatMessage, parameters: str) -> None:
    with pytest.raises(PromptFiltered):
        await check_prompt(CHECKER, NO_TOKENIZER, (message,), [Tool("book", "", parameters)])


async def test_permitted_text_in_calls_and_tools_passes() -> None:
    turn = called(r'{"forbidden": "a\nquiet topic"}')

    book = Tool("book", "", '{"description": "a topic"}')
    await check_prompt(CHECKER, NO_TOKENIZER, (turn,), [book])


@pytest.mark.parametrize(("thinking", "field"), [(True, "thinking"), ("low", "reasoning_effort")])
async def test_thinking_needs_a_template(tmp_path: Path, thinking: Thinking, field: str) -> None:
    make_checkpoint(tmp_path)
    work = cast("TextWork", None)  # a short prompt needs none
    job = TextJob(work, cast("Payer", None), Tokenizer(tmp_path), 100, thinking=thinking)

    with pytest.raises(InvalidRequest) as refused:
        await tokenize(job, (ChatMessage("user", "Hello"),))

    assert [violation.field for violation in refused.value.violations] == [f"conversation.{field}"]
    for neutral in (None, False, "none"):
        assert await tokenize(replace(job, thinking=neutral), (ChatMessage("user", "Hello"),))


@pytest.mark.parametrize("effort", ["much", "low"])
def test_an_effort_is_one_of_those_known_and_sent_without_a_switch(effort: str) -> None:
    turn = pb.Message(role=pb.ROLE_USER, content="x")
    conversation = pb.Conversation(messages=[turn], thinking=True, reasoning_effort=effort)
    wrong = Violations()

    check_prompt_form(pb.StartFrame(conversation=conversation), wrong)

    with pytest.raises(InvalidRequest, match="reasoning_effort"):
        wrong.raise_if_any()


async def test_thinking_reaches_the_template_that_has_a_switch(tmp_path: Path) -> None:
    template = "{% if enable_thinking %}on{% else %}off{% endif %}: {{ messages[0].content }}"
    make_checkpoint(tmp_path, chat_template=template)
    tokenizer = Tokenizer(tmp_path)

    job = TextJob(cast("TextWork", None), cast("Payer", None), tokenizer, 100, thinking=True)

    token_ids, _ = await tokenize(job, (ChatMessage("user", "Hello"),))

    assert tokenizer.decode(token_ids) == "on: Hello"


@pytest.mark.parametrize(
    ("template", "by_default", "on", "off"),
    [
        (SWITCHED_OFF, "model", "model", "ended"),
        (SWITCHED_ON, "ended", "prompt", "ended"),
        (SILENT, "none", "model", "none"),
        (OPENED, "prompt", None, "none"),
        ("{# <think> #}", "none", None, "none"),
        ("no mark", "none", None, "none"),
    ],
)
def test_it_is_known_what_begins_the_thinking(
    tmp_path: Path, template: str, by_default: str, on: str | None, off: str
) -> None:
    make_checkpoint(tmp_path, chat_template="{{ messages[0].content }}" + template)
    tokenizer, messages = Tokenizer(tmp_path), (ChatMessage("user", "Hello"),)
    for thinking, expected in ((None, by_default), (True, on), (False, off)):
        if expected is None:
            continue  # the template has no switch, so it is refused
        start = cast("ValidStart", SimpleNamespace(prompt=messages, thinking=thinking))
        token_ids = tokenizer.encode_chat(messages, thinking=thinking)
        assert thinking_start(start, tokenizer, token_ids) == ThinkingStart(expected)
        plain = cast("ValidStart", SimpleNamespace(prompt=("Hello",), thinking=None))
        assert thinking_start(plain, tokenizer, token_ids) is ThinkingStart.NONE


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"enable_thinking": False}, False),
        ({"thinking": True}, True),
        ({"enable_thinking": None}, None),
    ],
)
def test_both_names_switch_thinking(given: dict[str, bool | None], expected: bool | None) -> None:
    body = {"model": "m", "messages": [user("x")], "chat_template_kwargs": given}

    (start,) = parse_chat(decode(json.dumps(body).encode(), ChatParameters)).starts

    assert thinking_of(start) is expected


def test_thinking_is_also_a_parameter_of_its_own_and_sent_once() -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    body["enable_thinking"] = False

    (start,) = parse_chat(decode(json.dumps(body).encode(), ChatParameters)).starts

    assert thinking_of(start) is False
    body["chat_template_kwargs"] = {"enable_thinking": False}
    with pytest.raises(InvalidRequest, match="must be sent once") as refused:
        parse_chat(decode(json.dumps(body).encode(), ChatParameters))
    assert refused.value.violations[0].field == "chat_template_kwargs.enable_thinking"


@pytest.mark.parametrize(
    "given",
    [{"enable_thinking": True, "thinking": True}, {"bos_token": "x"}, {"enable_thinking": 1}],
)
def test_no_other_variable_of_a_template_can_be_set(given: dict[str, object]) -> None:
    body = {"model": "m", "messages": [user("x")], "chat_template_kwargs": given}

    with pytest.raises(InvalidRequest) as refused:
        parse_chat(decode(json.dumps(body).encode(), ChatParameters))

    assert refused.value.violations[0].field.startswith("chat_template_kwargs")
