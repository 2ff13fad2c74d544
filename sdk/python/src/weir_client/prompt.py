"""Conversion of the arguments of `generate` to a start frame.

Refuses only values that the frame cannot hold; the server checks all other rules, so that each rule
exists once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from google.protobuf.duration_pb2 import Duration
from weir.v1 import inference_service_pb2 as pb

from weir_client.checks import check_known, check_model, check_seconds, invalid, written
from weir_client.money import Money
from weir_client.options import HINTS, GenerateOptions, Message, Prompt
from weir_client.tools import Tool, ToolCall
from weir_client.wire import money_message

_ROLES: Mapping[str, pb.Role.ValueType] = {
    "system": pb.ROLE_SYSTEM,
    "developer": pb.ROLE_SYSTEM,  # OpenAI's newer name
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


_MESSAGE_KEYS = tuple(each.name for each in fields(Message))
_TEXT_PARTS = (
    "text",
    "input_text",
    "output_text",
)  # types of parts with text, as OpenAI names them
_CALL_KEYS = (
    *(each.name for each in fields(ToolCall)),
    *("arguments", "call_id", "function", "index", "type"),  # of OpenAI's calls
)
_TOOL_KEYS = tuple(each.name for each in fields(Tool))
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
    check_known(options, GenerateOptions.__annotations__, hints=HINTS)
    check_model(model)
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
    values = {
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
        "end_user": options.get("end_user") or "",
        "tier": service_tier(options.get("tier")),
        "start_timeout": _start_timeout(options),
        "region": options.get("region") or "",
        "no_fallback": options.get("no_fallback", False),
        "initial_credit_tokens": checked_prefetch(options.get("prefetch_tokens")),
        "tools": tools_shown(options.get("tools")),
        "tool_choice": _tool_choice(options),
    }
    names = {"stop_sequences": "stop", "initial_credit_tokens": "prefetch_tokens"}
    start = written(pb.StartFrame, values, names)
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
        values = {"role": pb.ROLE_USER, "content": prompt}
        return pb.Conversation(messages=[written(pb.Message, values, {"content": "prompt"})])
    if isinstance(prompt, Mapping):
        raise invalid("prompt", "must be a list of messages: put this one into a list")
    if not isinstance(prompt, Iterable):
        raise invalid(
            "prompt", f"must be a string or a list of messages, not {type(prompt).__name__}"
        )
    return pb.Conversation(messages=[_message(index, each) for index, each in enumerate(prompt)])


def _with_options(conversation: pb.Conversation, options: GenerateOptions) -> pb.Conversation:
    """Add the options of the chat template to a conversation. Raises: InvalidRequest."""
    values = {
        name: value for name in CONVERSATION_OPTIONS if (value := options.get(name)) is not None
    }
    conversation.MergeFrom(written(pb.Conversation, values))
    return conversation


def _response_format(options: GenerateOptions) -> pb.ResponseFormat | None:
    schema, regex, lark = options.get("json_schema"), options.get("regex"), options.get("lark")
    given = sum(each is not None for each in (schema, regex, lark))
    if given > 1:
        raise invalid("json_schema", "give at most one of: json_schema=, regex=, lark=")
    if given == 0:
        return None
    if schema is not None:
        if not isinstance(schema, str | Mapping | bool):
            kind = type(schema).__name__
            raise invalid("json_schema", f"must be a mapping, or its JSON text, not {kind}")
        return written(pb.ResponseFormat, {"json_schema": _json("json_schema", schema)})
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
    values = {
        "width": width,
        "length_penalty": length_penalty,
        "early_stopping": _EARLY_STOPPING[early_stopping],
    }
    return written(pb.BeamSearch, values, {"width": "beam_width"})


def tools_shown(tools: Sequence[Tool | Mapping[str, object]] | None) -> list[pb.Tool]:
    """Convert tools to messages. Raises: InvalidRequest for an item that is not a tool."""
    if tools is None:
        return []
    if isinstance(tools, str | Mapping | Tool) or not isinstance(tools, Iterable):
        raise invalid("tools", f"must be a list of tools, not {type(tools).__name__}")
    return [_tool(f"tools[{index}]", each) for index, each in enumerate(tools)]


def _tool(where: str, given: object) -> pb.Tool:
    if isinstance(given, Tool):
        name, description, schema, strict = (getattr(given, each) for each in _TOOL_KEYS)
    else:
        function = _function(where, given, "a Tool")
        _check_keys(function, _TOOL_KEYS, f"{where}.")
        name, description, schema, strict = (function.get(each) for each in _TOOL_KEYS)
    values = {
        "name": name,
        "description": description or "",
        "parameters_json_schema": _json(f"{where}.parameters", schema),
        "strict": strict or False,
    }
    return written(pb.Tool, values, {each: f"{where}.{each}" for each in values})


def _json(field: str, value: object) -> object:
    """Encode a mapping or boolean as JSON text; None is an empty text. Others are unchanged.

    Raises: InvalidRequest naming `field` for values that JSON does not have.
    """
    if value is None:
        return ""
    try:
        return json.dumps(value) if isinstance(value, Mapping | bool) else value
    except (TypeError, ValueError) as error:
        raise invalid(field, f"cannot be encoded as JSON: {error}") from error


def _function(where: str, given: object, kind: str) -> Mapping[str, Any]:
    """Find the function of a tool or call in OpenAI's shape, inside `function` or without it.

    Raises: InvalidRequest if it is not a mapping with a name. `kind` is the class it could be.
    """
    shape = '{"type": "function", "function": {"name": ...}}'
    if not isinstance(given, Mapping):
        raise invalid(where, f"must be {kind} or {shape}, not {type(given).__name__}")
    if given.get("type", "function") != "function":
        raise invalid(f"{where}.type", f'must be "function", not {given["type"]!r}')
    function = given.get("function")
    if function is None:
        function = {key: value for key, value in given.items() if key != "type"}
    if not isinstance(function, Mapping) or not function.get("name"):
        raise invalid(where, f"has no name: give {kind} or {shape}")
    return function


def _check_keys(given: Mapping[str, object], known: Sequence[str], where: str) -> None:
    """Check the keys of a mapping. Others are left out if they are empty, as in OpenAI's answers.

    Raises: InvalidRequest.
    """
    check_known((key for key, value in given.items() if value or value == 0), known, where)


def _tool_choice(options: GenerateOptions) -> pb.ToolChoice | None:
    choice, single = options.get("tool_choice"), options.get("single_tool_call", False)
    if isinstance(choice, Tool):
        return pb.ToolChoice(name=choice.name, single=single)
    if isinstance(choice, Mapping):
        name = _function("tool_choice", choice, "a Tool")["name"]
        return written(pb.ToolChoice, {"name": name, "single": single}, {"name": "tool_choice"})
    if choice is None and not single:
        return None
    if choice not in (None, *_TOOL_MODES):
        raise invalid(
            "tool_choice", f"{choice!r} is neither one of {', '.join(_TOOL_MODES)} nor a tool"
        )
    return pb.ToolChoice(mode=_TOOL_MODES[choice or "auto"], single=single)


def _message(index: int, message: Message | Mapping[str, object]) -> pb.Message:
    where = f"prompt[{index}]"
    if isinstance(message, Message):
        given: Mapping[str, Any] = {each: getattr(message, each) for each in _MESSAGE_KEYS}
    elif isinstance(message, Mapping):
        given = message
        thoughts = given.get("reasoning_content")  # vLLM's name
        if thoughts and not given.get("reasoning"):
            given = {**given, "reasoning": thoughts}
        # A result may name its function, which its call names already.
        more = ("name",) if given.get("role") == "tool" else ("reasoning_content",)
        _check_keys(given, (*_MESSAGE_KEYS, *more), f"{where}.")
        missing = [key for key in ("role", "content") if given.get(key) is None]
        if given.get("tool_calls") and "content" in missing:
            missing.remove("content")
        if missing:
            raise invalid(where, f"needs {' and '.join(missing)}")
    else:
        raise invalid(
            where,
            f"must be a Message or a mapping with role and content, not {type(message).__name__}",
        )
    if not isinstance(role := given["role"], str) or role not in _ROLES:
        raise invalid(f"{where}.role", f"{role!r} is not one of {', '.join(_ROLES)}")
    reasoning = given.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise invalid(f"{where}.reasoning", f"must be a string, not {type(reasoning).__name__}")
    content = given.get("content")
    values = {
        "role": _ROLES[role],
        "content": _text(f"{where}.content", "" if content is None else content),
        "tool_calls": [
            _call(f"{where}.tool_calls[{number}]", each)
            for number, each in enumerate(given.get("tool_calls") or ())
        ],
        "tool_call_id": given.get("tool_call_id") or "",
        "reasoning": reasoning,
    }
    return written(pb.Message, values, {name: f"{where}.{name}" for name in values})


def _text(where: str, content: object) -> str:
    """Join the text parts of a message. Raises: InvalidRequest for parts of other kinds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray) or not content:
        raise invalid(
            where,
            f'must be a string or a list of {{"type": "text", "text": ...}}, not'
            f" {type(content).__name__}; send data as text, for example by json.dumps",
        )
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            wrong = f"type {kind!r}" if kind not in _TEXT_PARTS else type(text).__name__
            raise invalid(
                f"{where}[{number}]",
                f'must be {{"type": "text", "text": "..."}}: models read text only, not {wrong}',
            )
        texts.append(text)
    return "".join(texts)


def _call(where: str, given: object) -> pb.ToolCall:
    arguments: object
    if isinstance(given, ToolCall):
        call_id, name, arguments = given.id, given.name, given.arguments_json
    else:
        function = _function(where, given, "a ToolCall")
        assert isinstance(given, Mapping)
        _check_keys({**given, **function}, _CALL_KEYS, f"{where}.")
        call_id = given.get("id") or given.get("call_id") or ""
        name = function["name"]
        arguments = function.get("arguments", function.get("arguments_json"))
        arguments = _json(f"{where}.arguments", arguments)
    values = {"id": call_id, "name": name, "arguments_json": arguments}
    names = {"id": f"{where}.id", "name": f"{where}.name", "arguments_json": f"{where}.arguments"}
    return written(pb.ToolCall, values, names)
