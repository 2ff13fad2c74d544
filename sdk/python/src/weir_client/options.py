"""What the calls of a client take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from weir_client.money import Money
from weir_client.tools import Tool, ToolCall

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    tool_calls: what the model called in a message of the role "assistant": `Result.tool_calls`. tool_call_id: the call that a
    message of the role "tool" is the result of.
    """

    role: Role
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""


Prompt = str | Sequence[Message | Mapping[str, str]]


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `generate` and `complete`.

    text: a prompt given to the model as it is, without chat template (instead of `prompt`).
    token_ids: a prompt as ids of the model's tokenizer (instead of `prompt`).
    max_output_tokens: at least 1; without it, until the model stops or its context window ends.
    max_cost: the most that the request may cost, in the organization's currency; it ends as COST_LIMIT before a token beyond it.
    temperature: 0 (greedy) to 2. top_p: above 0, at most 1. top_k: 0 keeps all. seed: makes sampling repeatable.
        Each unset one is the model's own default.
    min_p: keeps tokens at least so many times as likely as the likeliest, 0 to 1.
    repetition_penalty: above 0, at most 2; above 1 makes tokens of prompt and output less likely.
    presence_penalty, frequency_penalty: -2 to 2, subtracted for tokens of the output, once or per occurrence.
    logit_bias: added to the logits of these token ids, -100 to 100 each.
    stop: a text, or up to 16, that ends the output and is cut off. stop_token_ids: ids that end it.
    min_output_tokens: so many come before the output may end by itself.
    ignore_eos: goes on where the model would stop by itself; for benchmarks.
    json_schema: the answer is a JSON document valid under it (a mapping, or its text); regex: the answer matches it; lark: it
        follows this EBNF grammar in Lark's syntax. At most one of the three.
    tools: functions that the model may call, if its chat template has a place for them; the calls are in `Result.tool_calls`, and
        come as they grow in `Delta.tool_calls`. Excludes the formats above and beam_width.
    tool_choice: "auto" (default), "none", "required" (at least one call, valid under its schema, and no text), or one of the tools,
        which is then called once. single_tool_call: the output ends with its first call.
    choice_count: 1 to 16 answers to the one prompt, in `Result.choices`; needs a temperature above 0, or beam_width.
    beam_width: 2 to 16 beams that search for the likeliest answers, as num_beams in transformers; choice_count, up to beam_width,
        gets the best ones. Excludes temperature, top_p, top_k, min_p, seed, stop and the formats above.
    length_penalty: with beam_width, -10 to 10, by default 1: above 0 favours long answers.
    early_stopping: with beam_width: False (default), True or "never", as in transformers.
    top_logprobs: 0 to 20; each token's log-probability and those of so many likeliest ones.
    usage_interval_tokens: asks for a running `UsageUpdate` each so many output tokens.
    labels: own labels, stored with the usage event.
    request_id: a UUID that names this request for good (idempotency key); minted if absent.
    timeout: seconds for the whole request, retries included; then it is cancelled and DeadlineExceeded is raised.
    tier: "interactive" (default), or "batch": runs when nothing interactive waits for the same model.
    start_timeout: seconds that the request may wait for its turn; `timeout` if absent. Refused at once if it would wait longer.
    region: where to run, one of the deployment's regions; elsewhere only as the operator lets it. Unset: where the server is.
    max_retries: how often to try again before the first token; the client's setting if absent.
    keep_on_disconnect: seconds for which the server goes on with the request when the connection breaks, and for which the
        client looks for another one; 30, or `timeout` if that is less. What is generated meanwhile is billed, also if nobody
        comes back. None or 0: the request ends with its connection.
    traceparent, tracestate: the trace that the request belongs to, as in W3C's headers; servers that trace go on with it.
    prefetch_tokens: the server sends no further ahead of what is read than so many output tokens; unset, as fast as it generates.
        One who reads nothing for a minute (as the operator says) while output is generated ends as SLOW_CONSUMER.
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
    """The keyword arguments of `attach`.

    after_seq: the number of the last `Delta` that is known already; 0: everything.
    timeout: seconds for all of it; then the request is cancelled and DeadlineExceeded is raised.
    resume_s: seconds to look for another stream when one breaks, or for the request's server if that does not answer; 30.
    prefetch_tokens: as in `GenerateOptions`, for a request that was started with it.
    """

    after_seq: int
    timeout: float | None
    resume_s: float
    prefetch_tokens: int | None
