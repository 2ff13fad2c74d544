"""Options of the calls of a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Literal, TypedDict

from weir_client.money import Money
from weir_client.plain import Value
from weir_client.tools import Tool, ToolCall

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message(Value):
    """One message of a conversation. A dict in OpenAI's shape does as well.

    `content` is a text, or a list of parts `{"type": "text", "text": ...}`. A message of the role
    "assistant" may have `tool_calls` (from `Result.tool_calls`) and `reasoning` (from
    `Result.reasoning`). A message of the role "tool" has the result of the call named by
    `tool_call_id`.
    """

    role: Role
    content: str | Sequence[Mapping[str, object]]
    tool_calls: Sequence[ToolCall | Mapping[str, object]] = ()
    tool_call_id: str = ""
    reasoning: str = ""


# A question, or messages: each a `Message` or a dict in OpenAI's shape.
Prompt = str | Sequence[Message | Mapping[str, object]]

# Options of other clients, and what to use here.
HINTS = {
    "system": 'begin the prompt with {"role": "system", "content": ...}',
    "messages": "give the messages as the second argument, `prompt`",
    "input": "give the question or the messages as the second argument, `prompt`",
    "response_format": "use json_schema=",
    "n": "use choice_count=",
    "num_beams": "use beam_width=",
    "logprobs": "use top_logprobs=",
    "stream": "generate() streams, and complete() returns the whole answer",
    "user": "use end_user=",
    "safety_identifier": "use end_user=",
    "metadata": "use labels=, which are stored with the usage",
    "parallel_tool_calls": "use single_tool_call=True for at most one call",
    "service_tier": "use tier=",
}


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `complete` and `quote`; the first two describe them."""

    text: str | None
    token_ids: Sequence[int] | None
    max_output_tokens: int | None
    max_cost: Money | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_output_tokens: int
    thinking: bool | None
    reasoning_effort: str | None
    max_reasoning_tokens: int
    continues_last_message: bool
    ignore_eos: bool
    json_schema: Mapping[str, object] | str | None
    regex: str | None
    lark: str | None
    tools: Sequence[Tool | Mapping[str, object]] | None
    tool_choice: Literal["auto", "none", "required"] | Tool | Mapping[str, object] | None
    single_tool_call: bool
    choice_count: int | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"]
    top_logprobs: int | None
    usage_interval_tokens: int | None
    labels: Mapping[str, str] | None
    end_user: str | None
    request_id: str | None
    timeout: float | None
    tier: Literal["interactive", "batch"] | None
    start_timeout: float | None
    region: str | None
    no_fallback: bool
    max_retries: int | None
    keep_on_disconnect: float | None
    traceparent: str | None
    tracestate: str | None
    prefetch_tokens: int | None


class UsageOptions(TypedDict, total=False):
    """Keyword arguments of `get_usage`, which describes them."""

    organization: str
    day: str
    project: str
    api_key: str
    model: str
    page_size: int
    first_day: date | str
    last_day: date | str
    end_user: str
    labels: Mapping[str, str]
    largest_first: bool
    latest_first: bool


class AttachOptions(TypedDict, total=False):
    """Keyword arguments of `attach`, which describes them."""

    after_seq: int
    timeout: float | None
    resume_s: float
    prefetch_tokens: int | None
