"""The body of `POST /v1/responses`, and the request that it asks for. Nothing is stored, so nothing can be continued by its id."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from weir.v1 import inference_service_pb2 as pb

from api.openai import formats
from api.openai.items import Item, conversation_of
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
    check_shared,
    fill_shared,
    fill_thinking,
    refuse_given,
    refuse_unless,
)
from api.openai.refusals import wrong_parameter
from api.openai.tools import Choice, ToolParameter, fill_tools

NAMES = COMMON_NAMES | {
    "prompt": "input",
    "tools[].parameters_json_schema": "tools[].parameters",
    "tool_choice.single": "parallel_tool_calls",
    "response_format.json_schema": "text.format.schema",
}
LOGPROBS = "message.output_text.logprobs"


class Text(Struct, forbid_unknown_fields=True):
    """How the text of the answer is to be."""

    format: formats.Format | None = None
    verbosity: Any = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """`reasoning` of a response. Thinking is part of the answer's text, so no field can be set apart from effort `none`."""

    effort: Any = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class ResponseParameters(SharedParameters, forbid_unknown_fields=True, kw_only=True):
    """What `client.responses.create` may send."""

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Int64 | None = None
    text: Text | None = None
    include: list[str] | None = None
    top_logprobs: Int32 | None = None
    truncation: str | None = None
    reasoning: Reasoning | None = None
    tools: list[ToolParameter] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None  # not OpenAI's: as vLLM has it
    # Served by others, not here: refused by name unless they ask for nothing.
    access_programs: Any = None
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None  # one value asks for what happens


REFUSED = (
    "access_programs",
    "background",
    "context_management",
    "conversation",
    "image",
    "max_tool_calls",
    "moderation",
    "prompt",
    "prompt_cache_options",
)


def response_asked(given: ResponseParameters) -> Asked:
    """What a response asks for. Raises: InvalidRequest."""
    check_shared(given)
    check_unserved(given)
    items = [Item(role="user", content=given.input)] if isinstance(given.input, str) else given.input
    turns = conversation_of(items, given.instructions)
    start = pb.StartFrame(conversation=turns.conversation)
    fill_shared(start, given)
    fill_thinking(start, given.chat_template_kwargs)
    fill_tools(start, given.tools, given.tool_choice, given.parallel_tool_calls, wrapped=False)
    if given.max_output_tokens is not None:
        start.max_output_tokens = given.max_output_tokens
    if wants_logprobs(given):
        if given.tools:
            raise wrong_parameter("tools", "cannot be combined with log-probabilities: a call has no place for its own")
        start.top_logprobs = given.top_logprobs or 0
    if (wanted := formats.response_format(None if given.text is None else given.text.format, "text.format")) is not None:
        start.response_format.CopyFrom(wanted)
    return Asked(starts=(start,), model=given.model, streams=bool(given.stream), includes_usage=True, names=NAMES | turns.names)


def check_unserved(given: ResponseParameters) -> None:
    """Refuse what asks for something that does not happen here. Raises: InvalidRequest."""
    if given.previous_response_id is not None:
        raise wrong_parameter("previous_response_id", "responses are not stored: send the conversation so far as input")
    refuse_given(given, *REFUSED)
    refuse_unless(given.prompt_cache_retention, "prompt_cache_retention", *NO_RETENTION)
    if given.text is not None:
        refuse_unless(given.text.verbosity, "text.verbosity", *NO_VERBOSITY)
    if given.reasoning is not None:
        refuse_unless(given.reasoning.effort, "reasoning.effort", *NO_EFFORT)
        for name in ("summary", "generate_summary", "context", "mode"):
            if getattr(given.reasoning, name) is not None:
                raise wrong_parameter(f"reasoning.{name}", f"is not supported: {NO_EFFORT[1]}; leave it out")
    if given.truncation not in (None, "disabled"):
        raise wrong_parameter("truncation", "must be disabled: an input that does not fit is refused, not cut")
    for index, each in enumerate(given.include or ()):
        if each != LOGPROBS:
            raise wrong_parameter(f"include[{index}]", f"only {LOGPROBS} is supported")


def wants_logprobs(given: ResponseParameters) -> bool:
    """Whether the answer carries log-probabilities: they are asked for in either of two ways."""
    return LOGPROBS in (given.include or ()) or given.top_logprobs is not None
