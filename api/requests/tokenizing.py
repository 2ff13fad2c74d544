"""From a prompt in any of its forms to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio

from api.errors import PromptFiltered
from api.wire import Prompt
from inference.safety.safety import SafetyChecker
from inference.text.tokenizer import ChatMessage, Tokenizer

LONG_PROMPT_CHARS = 16_384  # beyond it tokenizing takes milliseconds, which belong into a thread


async def tokenize(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a prompt, chat template included. Raises: ChatTemplateFailed."""
    if isinstance(prompt, str):
        if len(prompt) > LONG_PROMPT_CHARS:
            return await asyncio.to_thread(tokenizer.encode, prompt)
        return tokenizer.encode(prompt)
    messages = [part for part in prompt if isinstance(part, ChatMessage)]
    if not messages:
        return tuple(part for part in prompt if isinstance(part, int))
    if sum(len(message.content) for message in messages) > LONG_PROMPT_CHARS:
        return await asyncio.to_thread(tokenizer.encode_chat, messages)
    return tokenizer.encode_chat(messages)


async def check_prompt(checker: SafetyChecker, tokenizer: Tokenizer, prompt: Prompt) -> None:
    """Let the safety stage look at a prompt: every message of a conversation, ids as the text they stand for.

    Raises: PromptFiltered, SafetyUnavailable.
    """
    field, text = _text_of(tokenizer, prompt)
    rule = await checker.check_prompt(text)
    if rule is not None:
        raise PromptFiltered(rule, field)


def _text_of(tokenizer: Tokenizer, prompt: Prompt) -> tuple[str, str]:
    """The field that a prompt came in, and its text."""
    if isinstance(prompt, str):
        return "text", prompt
    token_ids = [part for part in prompt if isinstance(part, int)]
    if token_ids:
        return "token_ids.ids", tokenizer.decode(token_ids)
    return "conversation.messages", "\n".join(part.content for part in prompt if isinstance(part, ChatMessage))
