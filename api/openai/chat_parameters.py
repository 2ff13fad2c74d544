"""The body of `POST /v1/chat/completions`, and the request that it asks for."""

from __future__ import annotations

from typing import Any

from weir.v1 import inference_service_pb2 as pb

from api.generation.decoding import CHOICE_COUNT_MAX, LOGIT_BIAS_COUNT_MAX, STOP_SEQUENCE_COUNT_MAX
from api.openai import formats
from api.openai.messages import Message, conversation
from api.openai.parameters import (
    COMMON_NAMES,
    NO_EFFORT,
    NO_RETENTION,
    NO_VERBOSITY,
    Asked,
    ChatTemplateKwargs,
    Int32,
    Int64,
    SharedParameters,
    TokenId,
    check_count,
    check_shared,
    fill_shared,
    fill_thinking,
    refuse_given,
    refuse_unless,
)
from api.openai.refusals import wrong_parameter
from api.openai.tools import Choice, ToolParameter, fill_tools

NAMES = COMMON_NAMES | {
    "prompt": "messages",
    "tools[].name": "tools[].function.name",
    "tools[].strict": "tools[].function.strict",
    "tools[].parameters_json_schema": "tools[].function.parameters",
    "tool_choice.name": "tool_choice.function.name",
    "tool_choice.single": "parallel_tool_calls",
    "stop_sequences": "stop",
    "choice_count": "n",
    "response_format.json_schema": "response_format.json_schema.schema",
}


class ChatParameters(SharedParameters, forbid_unknown_fields=True, kw_only=True):
    """What `client.chat.completions.create` may send."""

    messages: list[Message]
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    n: Int32 | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    response_format: formats.Format | None = None
    modalities: list[str] | None = None
    tools: list[ToolParameter] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None  # not OpenAI's: as vLLM has it
    # Served by others, not here: refused by name unless they ask for nothing.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    web_search_options: Any = None
    # Of these one value asks for what happens.
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


REFUSED = (
    "audio",
    "function_call",
    "functions",
    "moderation",
    "prediction",
    "prompt_cache_options",
    "web_search_options",
)


def chat_asked(given: ChatParameters) -> Asked:
    """What a chat completion asks for. Raises: InvalidRequest."""
    check_shared(given)
    refuse_given(given, *REFUSED)
    refuse_unless(given.reasoning_effort, "reasoning_effort", *NO_EFFORT)
    refuse_unless(given.verbosity, "verbosity", *NO_VERBOSITY)
    refuse_unless(given.prompt_cache_retention, "prompt_cache_retention", *NO_RETENTION)
    if given.modalities not in (None, [], ["text"]):
        raise wrong_parameter("modalities", "only text is supported")
    limit_name, limit = output_limit(given)
    turns = conversation(given.messages, "messages")
    start = pb.StartFrame(conversation=turns.conversation)
    fill_shared(start, given)
    fill_thinking(start, given.chat_template_kwargs)
    fill_tools(start, given.tools, given.tool_choice, given.parallel_tool_calls, wrapped=True)
    fill_decoding(start, given)
    if limit is not None:
        start.max_output_tokens = limit
    if given.top_logprobs is not None and not given.logprobs:
        raise wrong_parameter("top_logprobs", "needs logprobs to be true")
    if given.logprobs:
        start.top_logprobs = given.top_logprobs or 0
    if (wanted := formats.response_format(given.response_format, "response_format")) is not None:
        start.response_format.CopyFrom(wanted)
    return Asked(
        starts=(start,),
        model=given.model,
        streams=bool(given.stream),
        includes_usage=given.stream_options is not None and bool(given.stream_options.include_usage),
        names=NAMES | turns.names | {"max_output_tokens": limit_name},
        choice_count=1 if given.n is None else given.n,
    )


def output_limit(given: ChatParameters) -> tuple[str, int | None]:
    """The bound on output tokens, and by which name it was given. Raises: InvalidRequest if two disagree."""
    old, new = given.max_tokens, given.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise wrong_parameter("max_tokens", "is the old name of max_completion_tokens, which differs: leave it out")
    return ("max_tokens", old) if new is None and old is not None else ("max_completion_tokens", new)


def fill_decoding(start: pb.StartFrame, given: Any) -> None:
    """Put into a start frame what chat and plain completions say alike of how tokens are chosen. given: parameters of either."""
    for name in ("presence_penalty", "frequency_penalty", "seed"):
        if (value := getattr(given, name)) is not None:
            setattr(start.sampling, name, value)
    check_count(given.logit_bias, "logit_bias", LOGIT_BIAS_COUNT_MAX)
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    check_count(stop, "stop", STOP_SEQUENCE_COUNT_MAX)
    for token_id, bias in (given.logit_bias or {}).items():
        start.sampling.logit_bias[token_id] = bias
    start.stop_sequences.extend(stop or ())
    if given.n is not None:
        if not 1 <= given.n <= CHOICE_COUNT_MAX:  # before anything is made for each of them
            raise wrong_parameter("n", f"must be from 1 to {CHOICE_COUNT_MAX}, not {given.n}")
        start.choice_count = given.n
