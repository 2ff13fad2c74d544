"""Conversion of the arguments of `generate` to a start frame.

Refuses only values that the frame cannot hold; the server checks all other rules, so that each rule
exists once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence

from google.protobuf.duration_pb2 import Duration
from weir.v1 import inference_service_pb2 as pb

from weir_client.checks import check_known, check_seconds, invalid, written
from weir_client.money import Money
from weir_client.options import GenerateOptions, Message, Prompt
from weir_client.tools import Tool
from weir_client.wire import money_message

_ROLES: Mapping[str, pb.Role.ValueType] = {
    "system": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
}

_TOOL_MODES: Mapping[str, pb.ToolMode.ValueType] = {
    "auto": pb.TOOL_MODE_AUTO,
    "none": pb.TOOL_MODE_NONE,
    "required": pb.TOOL_MODE_REQUIRED,
}

_EARLY_STOPPING: Mapping[bool | str, pb.EarlyStopping.ValueType] = {
    False: pb.EARLY_STOPPING_HEURISTIC,
    True: pb.EARLY_STOPPING_WHEN_FULL,
    "never": pb.EARLY_STOPPING_NEVER,
}


_MESSAGE_KEYS = (
    "role",
    "content",
    "tool_call_id",
    "reasoning",
)  # keys of a mapping; a Message has more fields
CONVERSATION_OPTIONS = ("thinking", "reasoning_effort", "continues_last_message")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)


def build_start(model: str, prompt: Prompt | None, options: GenerateOptions) -> pb.ClientFrame:
    """Build the start frame of a request.

    Raises: InvalidRequest if not exactly one of prompt, text and token_ids is given, or a value
    does not fit its field.
    """
    check_known(options, GenerateOptions.__annotations__)
    for name in ("timeout", "start_timeout"):
        check_seconds(name, options.get(name))
    if (start_timeout := options.get("start_timeout")) is not None and start_timeout <= 0:
        raise invalid(
            "start_timeout",
            f"must be more than 0 seconds, or None for `timeout`, not {start_timeout!r}",
        )
    text, token_ids, max_cost = (
        options.get("text"),
        options.get("token_ids"),
        options.get("max_cost"),
    )
    if sum(given is not None for given in (prompt, text, token_ids)) != 1:
        raise invalid("prompt", "give exactly one of: a prompt, text=, token_ids=")
    if prompt is None:
        for name in CONVERSATION_OPTIONS:
            if options.get(name):
                raise invalid(name, "has a meaning only with a prompt of messages: leave it out")
    if max_cost is not None and not isinstance(max_cost, Money):
        raise invalid(
            "max_cost", f'must be Money, for example Money.of("0.05", "USD"), not {max_cost!r}'
        )
    stop = options.get("stop", ())
    fields = {
        "model": model,
        "conversation": None if prompt is None else _with_options(conversation(prompt), options),
        "text": text,
        "token_ids": None
        if token_ids is None
        else written(pb.TokenIds, {"ids": token_ids}, {"ids": "token_ids"}),
        "sampling": written(pb.Sampling, {name: options.get(name) for name in _SAMPLING}),
        "stop_sequences": [stop] if isinstance(stop, str) else stop,
        "stop_token_ids": options.get("stop_token_ids", ()),
        "min_output_tokens": options.get("min_output_tokens", 0),
        "max_reasoning_tokens": options.get("max_reasoning_tokens"),
        "top_logprobs": options.get("top_logprobs"),
        "response_format": _response_format(options),
        "choice_count": options.get("choice_count"),
        "beam_search": _beam_search(options),
        "max_output_tokens": options.get("max_output_tokens"),
        "max_cost": None if max_cost is None else money_message(max_cost),
        "ignore_eos": options.get("ignore_eos", False),
        "usage_interval_tokens": options.get("usage_interval_tokens"),
        "labels": options.get("labels", {}),
        "tier": service_tier(options.get("tier")),
        "start_timeout": _start_timeout(options),
        "region": options.get("region") or "",
        "initial_credit_tokens": checked_prefetch(options.get("prefetch_tokens")),
        "tools": tools_shown(options.get("tools", ())),
        "tool_choice": _tool_choice(options),
    }
    names = {"stop_sequences": "stop", "initial_credit_tokens": "prefetch_tokens"}
    start = written(pb.StartFrame, fields, names)
    frame = {
        "request_id": options.get("request_id") or str(uuid.uuid4()),
        "start": start,
        "traceparent": options.get("traceparent") or "",
        "tracestate": options.get("tracestate") or "",
    }
    return written(pb.ClientFrame, frame)


def checked_prefetch(token_count: object) -> int | None:
    """Validate the number of tokens to prefetch and return it unchanged.

    Raises: InvalidRequest unless it is None or a whole number of at least 1.
    """
    if token_count is None or (
        isinstance(token_count, int) and not isinstance(token_count, bool) and token_count >= 1
    ):
        return token_count
    raise invalid(
        "prefetch_tokens",
        f"must be a whole number of at least 1, or None for no limit, not {token_count!r}",
    )


def service_tier(name: str | None) -> pb.ServiceTier.ValueType:
    """Convert the name of a tier to its number. Raises: InvalidRequest."""
    tiers = {
        None: pb.SERVICE_TIER_UNSPECIFIED,
        "interactive": pb.SERVICE_TIER_INTERACTIVE,
        "batch": pb.SERVICE_TIER_BATCH,
    }
    if name not in tiers:
        raise invalid("tier", f'must be "interactive" or "batch", not {name!r}')
    return tiers[name]


def update_frame(max_output_tokens: int | None, max_cost: Money | None) -> pb.UpdateFrame:
    """Build the frame that asks for other limits. None leaves a limit unchanged."""
    frame = pb.UpdateFrame(max_output_tokens=max_output_tokens)
    if max_cost is not None:
        frame.max_cost.CopyFrom(money_message(max_cost))
    return frame


def _start_timeout(options: GenerateOptions) -> Duration | None:
    seconds = options.get("start_timeout")
    if seconds is None:
        seconds = options.get("timeout")
    if seconds is None or not 0 < seconds < float("inf"):
        return None  # the caller's own timeout ends the request at once
    duration = Duration()
    duration.FromNanoseconds(max(1, int(seconds * 1e9)))
    return duration


def conversation(prompt: Prompt) -> pb.Conversation:
    """Build a conversation from a question or from a list of messages.

    Raises: InvalidRequest for a message without role or content, or with an unknown role.
    """
    if isinstance(prompt, str):
        fields = {"role": pb.ROLE_USER, "content": prompt}
        return pb.Conversation(messages=[written(pb.Message, fields, {"content": "prompt"})])
    if isinstance(prompt, Mapping):
        raise invalid("prompt", "must be a list of messages: put this one into a list")
    if not isinstance(prompt, Iterable):
        raise invalid(
            "prompt", f"must be a string or a list of messages, not {type(prompt).__name__}"
        )
    return pb.Conversation(messages=[_message(index, each) for index, each in enumerate(prompt)])


def _with_options(conversation: pb.Conversation, options: GenerateOptions) -> pb.Conversation:
    """Add the options of the chat template to a conversation. Raises: InvalidRequest."""
    fields = {
        name: value for name in CONVERSATION_OPTIONS if (value := options.get(name)) is not None
    }
    conversation.MergeFrom(written(pb.Conversation, fields))
    return conversation


def _response_format(options: GenerateOptions) -> pb.ResponseFormat | None:
    schema, regex, lark = options.get("json_schema"), options.get("regex"), options.get("lark")
    given = sum(each is not None for each in (schema, regex, lark))
    if given > 1:
        raise invalid("response_format", "give at most one of: json_schema=, regex=, lark=")
    if given == 0:
        return None
    if schema is not None:
        return pb.ResponseFormat(
            json_schema=schema if isinstance(schema, str) else json.dumps(schema)
        )
    return written(pb.ResponseFormat, {"regex": regex} if regex is not None else {"lark": lark})


def _beam_search(options: GenerateOptions) -> pb.BeamSearch | None:
    width, early_stopping = options.get("beam_width"), options.get("early_stopping", False)
    if width is None:
        for name in ("length_penalty", "early_stopping"):
            if options.get(name):
                raise invalid(name, "has a meaning only with beam_width=")
        return None
    if early_stopping not in _EARLY_STOPPING:
        raise invalid("early_stopping", f"{early_stopping!r} is not one of False, True and 'never'")
    length_penalty = options.get("length_penalty")
    fields = {
        "width": width,
        "length_penalty": length_penalty,
        "early_stopping": _EARLY_STOPPING[early_stopping],
    }
    return written(pb.BeamSearch, fields, {"width": "beam_width"})


def tools_shown(tools: Sequence[Tool]) -> list[pb.Tool]:
    """Convert tools to messages. Raises: InvalidRequest for an item that is not a `Tool`."""
    return [_tool(index, each) for index, each in enumerate(tools)]


def _tool(index: int, tool: object) -> pb.Tool:
    if not isinstance(tool, Tool):
        raise invalid(f"tools[{index}]", f"must be a Tool, not {type(tool).__name__}")
    schema = tool.parameters_json
    return pb.Tool(
        name=tool.name,
        description=tool.description,
        parameters_json_schema=schema,
        strict=tool.strict,
    )


def _tool_choice(options: GenerateOptions) -> pb.ToolChoice | None:
    choice, single = options.get("tool_choice"), options.get("single_tool_call", False)
    if isinstance(choice, Tool):
        return pb.ToolChoice(name=choice.name, single=single)
    if choice is None and not single:
        return None
    if choice not in (None, *_TOOL_MODES):
        raise invalid(
            "tool_choice", f"{choice!r} is neither one of {', '.join(_TOOL_MODES)} nor a Tool"
        )
    return pb.ToolChoice(mode=_TOOL_MODES[choice or "auto"], single=single)


def _message(index: int, message: Message | Mapping[str, str]) -> pb.Message:
    if not isinstance(message, Message | Mapping):
        raise invalid(
            f"messages[{index}]",
            f"must be a Message or a mapping with role and content, not {type(message).__name__}",
        )
    if isinstance(message, Message):
        role, content = str(message.role), message.content
        calls = [
            pb.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
            for call in message.tool_calls
        ]
        call_id, reasoning = message.tool_call_id, message.reasoning
    else:
        missing = {"role", "content"} - message.keys()
        if missing:
            raise invalid(f"messages[{index}]", f"needs {' and '.join(sorted(missing))}")
        check_known(message, _MESSAGE_KEYS, f"messages[{index}].")
        role, content, calls = message["role"], message["content"], []
        call_id, reasoning = message.get("tool_call_id", ""), message.get("reasoning", "")
    if role not in _ROLES:
        raise invalid(f"messages[{index}].role", f"{role!r} is not one of {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise invalid(
            f"messages[{index}].content", f"must be a string, not {type(content).__name__}"
        )
    if not isinstance(reasoning, str):
        raise invalid(
            f"messages[{index}].reasoning", f"must be a string, not {type(reasoning).__name__}"
        )
    fields = {
        "role": _ROLES[role],
        "content": content,
        "tool_calls": calls,
        "tool_call_id": call_id,
        "reasoning": reasoning,
    }
    return written(pb.Message, fields, {name: f"messages[{index}].{name}" for name in fields})
