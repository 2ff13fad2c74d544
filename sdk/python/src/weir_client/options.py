"""Options of the calls of a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from weir_client.money import Money
from weir_client.plain import Value
from weir_client.tools import Tool, ToolCall

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message(Value):
    """One message of a conversation.

    A message of the role "assistant" may have `tool_calls` (from `Result.tool_calls`) and
    `reasoning` (from `Result.reasoning`). A message of the role "tool" has the result of the call
    named by `tool_call_id`.
    """

    role: Role
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    reasoning: str = ""


Prompt = str | Sequence[Message | Mapping[str, str]]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `complete`.

    text: a prompt passed to the model without a chat template (instead of `prompt`).
    token_ids: a prompt as ids of the model's tokenizer (instead of `prompt`).
    max_output_tokens: at least 1; by default the output ends when the model stops or its context
        window is full.
    max_cost: limit of the request's cost, in the organization's currency; generation ends as
        COST_LIMIT before the token that would exceed it.
    temperature: 0 (greedy) to 2. top_p: above 0, at most 1. top_k: number of likeliest tokens to
        keep; 0 keeps all. seed: makes sampling repeatable. If unset, the model's own
        defaults apply.
    min_p: 0 to 1; drops tokens less likely than this fraction of the likeliest token's probability.
    repetition_penalty: above 0, at most 2; above 1 makes tokens of prompt and output less likely.
    presence_penalty, frequency_penalty: -2 to 2, subtracted for tokens of the output, once or per
        occurrence.
    logit_bias: added to the logits of these token ids, -100 to 100 each.
    stop: one string, or up to 16, each of which ends the output and is cut off. stop_token_ids: ids
        that end the output.
    min_output_tokens: number of tokens before the output may end by itself.
    thinking: whether the model thinks before it answers, if its chat template has a switch;
        reasoning_effort, instead: "none" to "max". max_reasoning_tokens: limit of tokens of
        thinking, after which the answer follows.
    continues_last_message: the prompt's last message, of the role "assistant", is the beginning of
        the answer; the output follows its text.
    ignore_eos: continue past the model's end of sequence; for benchmarks.
    json_schema: the answer is a JSON document valid under it (a mapping, or its text); regex: the
        answer matches it; lark: it follows this EBNF grammar in Lark's syntax. At most one of the
        three.
    tools: functions that the model may call, if its chat template supports tools; the calls are in
        `Result.tool_calls`, and stream in `Delta.tool_calls`. Excludes the formats above and
        beam_width.
    tool_choice: "auto" (default), "none", "required" (at least one call, valid under its schema,
        and no text), or one of the tools, which is then called once. single_tool_call: the output
        ends after its first call.
    choice_count: 1 to 16 answers to the prompt, in `Result.choices`; with a temperature of 0 all
        are equal, unless beam_width is set. All are billed.
    beam_width: 2 to 16 beams that search for the likeliest answers, as num_beams in transformers;
        choice_count, up to beam_width, returns the best ones. Excludes temperature, top_p, top_k,
        min_p, seed, stop and the formats above.
    length_penalty: with beam_width, -10 to 10, by default 1: above 0 favours long answers.
    early_stopping: with beam_width: False (default), True or "never", as in transformers.
    top_logprobs: 0 to 20; returns the log-probability of each token and of this many likeliest
        tokens.
    usage_interval_tokens: number of output tokens between two `UsageUpdate` events.
    labels: the caller's labels, stored with the usage event.
    request_id: a UUID, the idempotency key of the request; generated if absent.
    timeout: seconds for the whole request, retries included; then it is cancelled and
        DeadlineExceeded is raised.
    tier: "interactive" (default), or "batch": runs when no interactive request waits for the model.
    start_timeout: seconds that the request may wait in the queue; default `timeout`. Refused at
        once if the expected wait is longer.
    region: region of the deployment to run in; another one only if the operator allows it. Default:
        the server's region.
    max_retries: retries before the first token; default: the client's setting.
    keep_on_disconnect: seconds for which the server continues the request after the connection
        breaks, and the client tries to resume it; default 30, or `timeout` if that is less. Output
        generated meanwhile is billed even if no client resumes. None or 0: the request ends with
        its connection.
    traceparent, tracestate: trace context of the request, as in W3C's headers; servers with tracing
        continue it.
    prefetch_tokens: largest number of output tokens that the server sends ahead of the reader;
        unset: no limit. A request whose output is not read for a minute (set by the operator) ends
        as SLOW_CONSUMER.
    """

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
    tools: Sequence[Tool]
    tool_choice: Literal["auto", "none", "required"] | Tool | None
    single_tool_call: bool
    choice_count: int | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"]
    top_logprobs: int | None
    usage_interval_tokens: int | None
    labels: Mapping[str, str]
    request_id: str | None
    timeout: float | None
    tier: Literal["interactive", "batch"] | None
    start_timeout: float | None
    region: str | None
    max_retries: int | None
    keep_on_disconnect: float | None
    traceparent: str | None
    tracestate: str | None
    prefetch_tokens: int | None


class AttachOptions(TypedDict, total=False):
    """Keyword arguments of `attach`.

    after_seq: number of the last `Delta` that you have received; 0 sends all output.
    timeout: seconds until the request is cancelled and DeadlineExceeded is raised.
    resume_s: seconds to look for another stream when one breaks, or for the request's server if
        that does not answer; default 30.
    prefetch_tokens: as in `GenerateOptions`, for a request that was started with it.
    """

    after_seq: int
    timeout: float | None
    resume_s: float
    prefetch_tokens: int | None
