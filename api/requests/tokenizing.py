"""From a prompt in any of its forms to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from api.errors import PromptFiltered
from api.requests.conversation import Prompt
from api.requests.json_text import shown_texts
from inference.safety.safety import SafetyChecker
from inference.text.tokenizer import ChatMessage, Tokenizer
from inference.text.tools import Tool

LONG_PROMPT_CHARS = 16_384  # beyond it tokenizing takes milliseconds, which belong into a thread


async def tokenize(tokenizer: Tokenizer, prompt: Prompt, tools: Sequence[Tool] = ()) -> tuple[int, ...]:
    """Token ids of a prompt, chat template and tools included. Raises: ChatTemplateFailed."""
    if isinstance(prompt, str):
        if len(prompt) > LONG_PROMPT_CHARS:
            return await asyncio.to_thread(tokenizer.encode, prompt)
        return tokenizer.encode(prompt)
    messages = [part for part in prompt if isinstance(part, ChatMessage)]
    if not messages:
        return tuple(part for part in prompt if isinstance(part, int))
    if _length(messages, tools) > LONG_PROMPT_CHARS:
        return await asyncio.to_thread(tokenizer.encode_chat, messages, tools)
    return tokenizer.encode_chat(messages, tools)


async def check_prompt(checker: SafetyChecker, tokenizer: Tokenizer, prompt: Prompt, tools: Sequence[Tool] = ()) -> None:
    """Let the safety stage look at a prompt: every message and call of a conversation, the tools, ids as the text they stand for.

    Raises: PromptFiltered, SafetyUnavailable.
    """
    field, text = _text_of(tokenizer, prompt, tools)
    rule = await checker.check_prompt(text)
    if rule is not None:
        raise PromptFiltered(rule, field)


def _text_of(tokenizer: Tokenizer, prompt: Prompt, tools: Sequence[Tool]) -> tuple[str, str]:
    """The field that a prompt came in, and its text."""
    if isinstance(prompt, str):
        return "text", prompt
    token_ids = [part for part in prompt if isinstance(part, int)]
    if token_ids:
        return "token_ids.ids", tokenizer.decode(token_ids)
    messages = [part for part in prompt if isinstance(part, ChatMessage)]
    shown = [message.content for message in messages]
    for message in messages:
        for call in message.tool_calls:
            shown += (call.id, call.name, *shown_texts(call.arguments))
    for tool in tools:
        shown += (tool.name, tool.description, *shown_texts(tool.parameters))
    return "conversation.messages", "\n".join(shown)


def _length(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> int:
    """Characters that turns, their calls, and tools have."""
    calls = sum(len(call.name) + len(call.arguments) for message in messages for call in message.tool_calls)
    told = sum(len(tool.name) + len(tool.description) + len(tool.parameters) for tool in tools)
    return sum(len(message.content) for message in messages) + calls + told
