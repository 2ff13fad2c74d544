"""What the safety stage is shown of a prompt: all that the model is shown, however it was spelt on its way."""

from __future__ import annotations

from typing import cast

import pytest
import regex

from api.errors import PromptFiltered
from api.requests.tokenizing import check_prompt
from inference.safety.safety_rules import Rule, RuleChecker
from inference.text.tokenizer import ChatMessage, Tokenizer
from inference.text.tools import Tool, ToolCall

NO_TOKENIZER = cast("Tokenizer", None)  # a conversation is checked as text
CHECKER = RuleChecker([Rule("topic", regex.compile(r"forbidden\s+topic"), in_prompt=True, in_output=False)])
ESCAPED = r"forbidden\u0020\u0074opic"


def called(arguments: str, call_id: str = "a") -> ChatMessage:
    """A turn with a call."""
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
async def test_what_is_escaped_in_calls_and_tools_is_checked_as_the_model_is_shown_it(
    message: ChatMessage, parameters: str
) -> None:
    with pytest.raises(PromptFiltered):
        await check_prompt(CHECKER, NO_TOKENIZER, (message,), [Tool("book", "", parameters)])


async def test_what_no_rule_forbids_in_calls_and_tools_passes() -> None:
    turn = called(r'{"forbidden": "a\nquiet topic"}')

    await check_prompt(CHECKER, NO_TOKENIZER, (turn,), [Tool("book", "", '{"description": "a topic"}')])
