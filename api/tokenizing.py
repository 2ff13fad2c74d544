"""From a prompt in any of its forms to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio

from api.wire import Prompt
from inference.tokenizer import ChatMessage, Tokenizer

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
