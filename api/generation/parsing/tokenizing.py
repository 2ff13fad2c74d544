"""Tokenization of prompts without blocking the event loop.

Short prompts are tokenized at once. Longer ones need a permit, are refused if their size alone
shows that they cannot fit, and run in the threads of `TextWork`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from api.core.errors import FieldViolation, InvalidRequest, PromptFiltered, PromptTooLarge
from api.generation.parsing.conversation import Prompt
from api.generation.parsing.json_text import shown_texts
from api.generation.parsing.text_work import (
    INLINE_COST_MAX,
    MESSAGE_COST_CHARS,
    TextWork,
    conversation_size,
)
from inference.safety.safety import SafetyChecker
from inference.text.tokenizer import ChatMessage, Thinking, Tokenizer
from inference.text.tools import Tool
from metering.quotas.quota_rules import Payer

NO_SWITCH = "cannot be set: this model's chat template cannot switch thinking; leave it out"
NO_EFFORT = (
    "cannot be set: this model's chat template has no efforts of thinking and no switch; leave it"
    " out, or send none"
)
INLINE_S_PER_CHAR = 0.3e-6  # processor time, if too short to measure
CHARS_PER_TOKEN_MAX = 16  # characters per token without a tokenizer bound: four times the average


# Token ids of a prompt, and processor seconds spent on them, measured in a thread or estimated.
Tokenized = tuple[tuple[int, ...], float]


@dataclass(frozen=True, slots=True)
class TextJob:
    """Owner and limits of a text to tokenize.

    `window` is the model's context window in tokens. `token_count_max` limits the prompt; None if
    it is only counted. `check_room` is awaited before long text is tokenized, with a lower bound of
    its tokens, and raises the refusal of a request of that size; if `asks_first`, because the key
    was just refused, before any text. `thinking` says whether, or how much, the model should think;
    None: the template decides. `adds_special_tokens` applies to plain text.
    """

    work: TextWork
    payer: Payer
    tokenizer: Tokenizer
    window: int
    token_count_max: int | None = None
    check_room: Callable[[int], Awaitable[None]] | None = None
    thinking: Thinking = None
    asks_first: bool = False
    adds_special_tokens: bool = True


def tokenize_at_once(
    tokenizer: Tokenizer,
    prompt: Prompt,
    tools: Sequence[Tool],
    thinking: Thinking,
    *,
    adds_special_tokens: bool = True,
) -> Tokenized | None:
    """Tokenize a short prompt on the event loop.

    Returns None if the prompt is too long for that. Raises: ChatTemplateFailed, InvalidRequest.
    """
    if isinstance(prompt, str):
        cost = len(prompt)
        if cost > INLINE_COST_MAX:
            return None
        ids = tokenizer.words.encode(prompt, add_special_tokens=adds_special_tokens)
        return ids, INLINE_S_PER_CHAR * cost
    if isinstance(prompt[0], int):
        return prompt, 0.0
    if thinking is not None and not tokenizer.takes_thinking(thinking, has_tools=bool(tools)):
        if isinstance(thinking, str):
            raise InvalidRequest([FieldViolation("conversation.reasoning_effort", NO_EFFORT)])
        raise InvalidRequest([FieldViolation("conversation.thinking", NO_SWITCH)])
    chars, part_count = conversation_size(prompt, tools)
    cost = chars + MESSAGE_COST_CHARS * part_count
    if cost > INLINE_COST_MAX:
        return None
    return tokenizer.encode_chat(prompt, tools, thinking=thinking), INLINE_S_PER_CHAR * cost


async def tokenize(job: TextJob, prompt: Prompt, tools: Sequence[Tool] = ()) -> Tokenized:
    """Tokenize a prompt, after rendering a conversation and its tools with the template.

    Raises: ChatTemplateFailed, InvalidRequest, TokenLimitExceeded, PromptTooLarge,
    PreparationLimit, Overloaded, and the errors of `check_room`.
    """
    tokenizer = job.tokenizer
    if job.asks_first and job.check_room is not None and not isinstance(prompt[0], int):
        await job.check_room(1)
    adds = job.adds_special_tokens
    tokenized = tokenize_at_once(tokenizer, prompt, tools, job.thinking, adds_special_tokens=adds)
    if tokenized is not None:
        return tokenized
    if isinstance(prompt, str):
        check_chars("prompt", len(prompt), tokenizer.chars_max(job.window), job.window)
        lower_bound = -(-len(prompt) // (tokenizer.chars_max(1) or len(prompt)))
        return await prepared(
            job,
            len(prompt),
            lower_bound,
            partial(
                tokenizer.encode,
                prompt,
                add_special_tokens=adds,
                token_count_max=job.token_count_max,
            ),
        )
    messages = [message for message in prompt if isinstance(message, ChatMessage)]
    chars, part_count = conversation_size(messages, tools)
    # A template may leave out parts of a conversation, so the tokenizer's bound does not apply.
    chars_max = max(tokenizer.chars_max(job.window) or 0, CHARS_PER_TOKEN_MAX * job.window)
    check_chars("conversation.messages", chars, chars_max, job.window)
    encode = partial(
        tokenizer.encode_chat,
        messages,
        tools,
        token_count_max=job.token_count_max,
        thinking=job.thinking,
    )
    return await prepared(job, chars + MESSAGE_COST_CHARS * part_count, 1, encode)


async def prepared(
    job: TextJob, chars: int, least_token_count: int, encode: Callable[[], tuple[int, ...]]
) -> Tokenized:
    """Tokenize in a thread, with a permit and after `check_room`. Raises what `tokenize` raises."""
    with job.work.permit(job.payer, chars):
        if job.check_room is not None:
            await job.check_room(least_token_count)
        return await job.work.run(job.payer.organization_id, chars, encode)


def check_chars(field: str, chars: int, chars_max: int | None, window: int) -> None:
    """Raise PromptTooLarge if a text has too many characters for the context window.

    `chars_max` is the maximum that fits; None if the tokenizer has no such limit.
    """
    limit = CHARS_PER_TOKEN_MAX * window if chars_max is None else chars_max
    if chars > limit:
        raise PromptTooLarge(field, chars, limit, window)


async def check_prompt(
    checker: SafetyChecker, tokenizer: Tokenizer, prompt: Prompt, tools: Sequence[Tool] = ()
) -> None:
    """Run the safety checks on a prompt: messages, tool calls, tools, and decoded token ids.

    Raises: PromptFiltered, SafetyUnavailable.
    """
    field, text = _text_of(tokenizer, prompt, tools)
    rule = await checker.check_prompt(text)
    if rule is not None:
        raise PromptFiltered(rule, field)


def _text_of(tokenizer: Tokenizer, prompt: Prompt, tools: Sequence[Tool]) -> tuple[str, str]:
    """Collect all text of a prompt. Returns the field that contains it, and the text."""
    if isinstance(prompt, str):
        return "text", prompt
    token_ids = [part for part in prompt if isinstance(part, int)]
    if token_ids:
        return "token_ids.ids", tokenizer.decode(token_ids)
    messages = [part for part in prompt if isinstance(part, ChatMessage)]
    shown = [message.content for message in messages]
    shown += [message.reasoning for message in messages if message.reasoning]
    for message in messages:
        for call in message.tool_calls:
            shown += (call.id, call.name, *shown_texts(call.arguments))
    for tool in tools:
        shown += (tool.name, tool.description, *shown_texts(tool.parameters))
    return "conversation.messages", "\n".join(shown)
