"""Parameters of OpenAI's chat, completion and response requests; conversion to start frames."""

from __future__ import annotations

import functools
import json
import math
import re
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, repeat
from operator import is_not
from typing import Annotated, Any, ClassVar, TypeVar, cast, overload

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import astuple
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import InvalidRequest
from api.core.texts import Violations
from api.core.wire import LABEL_COUNT_MAX
from api.generation.parsing.decoding import (
    CHOICE_COUNT_MAX,
    LOGIT_BIAS_COUNT_MAX,
    LOGIT_BIAS_MAX,
    LOGPROBS_MAX,
    SAMPLING_RANGES,
    STOP_SEQUENCE_COUNT_MAX,
    STOP_TOKEN_ID_COUNT_MAX,
)
from api.openai.conversations import ROLES, Item, Message, conversation, conversation_of
from api.openai.dialects import NEUTRAL, field_of, is_neutral
from api.openai.error_responses import HttpFault, check_count, invalid_parameter
from api.openai.formats import ABSENT, CHAT_FIELD, Format, fill_format
from api.openai.history import REASONING
from api.openai.tolerance import (
    EMPTY,
    NO_LIMIT,
    STRICT_REMEDY,
    UNKNOWN_COUNT_MAX,
    Notes,
    as_known,
    check_kept,
    is_nothing,
    shape_of,
    smaller_limit,
)
from api.openai.tools import FUNCTION, NAMESPACE, Choice, Namespaces, ToolParameter, fill_tools
from metering.core.errors import InvalidValue
from metering.tenants.usage_subjects import checked_end_user

TOKEN_ID_MAX = 2**31 - 1
# `flex` is OpenAI's cheaper tier without latency targets: here the batch tier.
TIERS: Mapping[str, pb.ServiceTier.ValueType] = {
    # No tier is faster, so the response says `default`.
    **dict.fromkeys(
        ("auto", "default", "priority", "scale", "fast", "ultrafast"), pb.SERVICE_TIER_INTERACTIVE
    ),
    "flex": pb.SERVICE_TIER_BATCH,
}
# Parameters of some APIs that are copied to a field of a start frame
COPIED: Mapping[str, str] = {
    **{name: f"sampling.{name}" for name in (*SAMPLING_RANGES, "seed")},
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_output_tokens",
    "reasoning_effort": "conversation.reasoning_effort",
    "thinking_token_budget": "max_reasoning_tokens",
}
COPIES = tuple((name, *field.rpartition(".")[::2]) for name, field in COPIED.items())
# Parameters of all APIs by field of a start frame; each API adds its own.
COMMON_NAMES: dict[str, str] = {field: name for name, field in COPIED.items()} | {
    "sampling.logit_bias": "logit_bias",
    "conversation.thinking": "chat_template_kwargs.enable_thinking",
    "labels": "metadata",
    "end_user": "user",
    "labels['user']": "user",
    "tier": "service_tier",
}
# msgspec's error messages. The second form of a path concerns a key of an object.
_PATH = re.compile(r"^(?P<what>.*) - at `(?P<path>[^`]*)`(?: in `(?P<outer>[^`]*)`)?$", re.DOTALL)
# Values and keys of an object whose keys are free
_IN_FREE_KEYS = re.compile(r"at `(?:\$\.(?P<value>\w+)\[\.\.\.\]|key` in `\$\.(?P<key>\w+))`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_TYPES = re.compile(r"`((?:str|int|float|bool|array|object|null)(?: \| \w+)*)`")
# Types of JSON, with their article, by msgspec's names.
JSON_TYPES: Mapping[str, str] = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
}
NULL = ", got `null`"  # end of a message of msgspec
MODEL_REQUIRED = "is required: name a model that GET /v1/models lists"
# The one accepted value, and the reason.
NO_VERBOSITY = ("medium", "control the length by the prompt and max_tokens")
CHAT_NAMES = COMMON_NAMES | {
    "prompt": "messages",
    "tools[].name": "tools[].function.name",
    "tools[].strict": "tools[].function.strict",
    "tools[].parameters_json_schema": "tools[].function.parameters",
    "tool_choice.name": "tool_choice.function.name",
    "tool_choice.single": "parallel_tool_calls",
    "stop_sequences": "stop",
    "choice_count": "n",
    "response_format.json_schema": "response_format.json_schema.schema",
    "conversation.messages": "messages",
    "conversation.continues_last_message": "continue_final_message",
    "conversation.messages[].tool_calls[].name": "messages[].tool_calls[].function.name",
    "conversation.messages[].tool_calls[].arguments_json": (
        "messages[].tool_calls[].function.arguments"
    ),
}
# Allowed values of numbers, by parameter
RANGES: Mapping[str, str] = {
    **SAMPLING_RANGES,
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_output_tokens"),
        f"at least 1, or {NO_LIMIT} for no limit",
    ),
    "best_of": "the value of n",
    "dimensions": "the dimension of the model",
    "logit_bias": f"an object of token ids and numbers between -{LOGIT_BIAS_MAX:g} and"
    f" {LOGIT_BIAS_MAX:g}",
    "min_tokens": "from 0 to the limit on output tokens",
    "n": f"from 1 to {CHOICE_COUNT_MAX}",
    "prompt_logprobs": f"from 0 to {LOGPROBS_MAX['prompt_logprobs']}",
    "seed": "a whole number of 64 bits",
    "thinking_token_budget": "at least 0",
    "top_logprobs": f"from 0 to {LOGPROBS_MAX['top_logprobs']}",
}
# Keys: the name of the output token limit that the request used.
CHAT_NAMES_BY_LIMIT = {
    name: CHAT_NAMES | {"max_output_tokens": name}
    for name in ("max_tokens", "max_completion_tokens")
}
QUOTED_KEY_CHARS_MAX = 40
QUOTED_CHARS_MAX = 200  # of the beginning, and of the end, of msgspec's message
# Bytes. Longer bodies are parsed in a thread; a shorter one has few elements.
SHORT_BYTES_MAX = 16_384
# Elements of a body outside of strings. msgspec keeps the interpreter while it parses: at these
# counts for some 40 ms, without them for 400. A conversation of the most turns with the most calls
# and tools has half of them; a million values are token ids.
ELEMENT_COUNTS_MAX = {
    "objects and lists": 32_768,
    "members of objects": 65_536,
    "strings": 131_072,
    "values": 1_048_576,
}
SHORT_NAME_CHARS = 64  # below the limit of model names, so no further check
MAX_TOKENS_UNSET = 16  # OpenAI's default, of this API only
PROMPT_COUNT_MAX = 128  # each is a request of its own; the response waits for all of them
COMPLETION_NAMES = COMMON_NAMES | {
    "text": "prompt",
    "token_ids.ids": "prompt",
    "stop_sequences": "stop",
    "choice_count": "n",
    "max_output_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}
ECHO_NAMES = {"prompt_logprobs": "echo"}  # field that `echo` with `logprobs` sets
OUT_OF_RANGE = "Number out of range"  # of msgspec, for 1e999
HALF_PAIR = re.compile("[\ud800-\udfff]")
RESPONSE_NAMES = COMMON_NAMES | {
    "prompt": "input",
    "tools[].parameters_json_schema": "tools[].parameters",
    "tool_choice.single": "parallel_tool_calls",
    "response_format.json_schema": "text.format.schema",
    "conversation.reasoning_effort": "reasoning.effort",
}
LOGPROBS = "message.output_text.logprobs"
# Facts of reasoning and of tools that a server runs: accepted; responses have none.
IDLE_FACTS = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
NEUTRAL_REASONING = {"context": "auto", "mode": "standard"}


Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]


Body = TypeVar("Body", bound=Struct)
Unsupported = Any  # type of OpenAI's parameters that are refused unless empty
Idle = Any  # type of parameters that change nothing


Prompts = Sequence[str | Sequence[int]]
Prompt = str | list[str | TokenId | list[TokenId]]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream. `continuous_usage_stats`, from vLLM, adds the usage to each event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ChatTemplateKwargs(Struct, forbid_unknown_fields=True):
    """Variables of the chat template that a request may set: two names for the thinking switch."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


def fill_thinking(
    start: pb.StartFrame, requested: ChatTemplateKwargs | None, at_top: bool | None
) -> dict[str, str]:
    """Set the thinking switch in a start frame; return the parameter that it came from.

    `at_top` is the parameter `enable_thinking`. Raises InvalidRequest if several names are sent.
    """
    sent = {"enable_thinking": at_top}
    if requested is not None:
        sent["chat_template_kwargs.enable_thinking"] = requested.enable_thinking
        sent["chat_template_kwargs.thinking"] = requested.thinking
    named = [(name, value) for name, value in sent.items() if value is not None]
    if len(named) > 1:
        names = " and ".join(name for name, _ in named)
        raise invalid_parameter(named[-1][0], f"must be sent once: {names} are the same switch")
    for name, value in named:
        start.conversation.thinking = value
        return {"conversation.thinking": name}
    return {}


class SharedParameters(Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters of all generating APIs of OpenAI. The second group extends them, by `extra_body`.

    `api` is the name of the API in `dialects.py`.
    """

    api: ClassVar[str]

    model: str
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: Idle = None  # the cache is keyed by content
    store: bool | None = None

    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None


@dataclass(slots=True)
class ParsedRequest:
    """Validated request, as start frames and options of the response. Immutable.

    `starts` has a start frame for each prompt. `includes_usage` adds the usage to the last event of
    a stream, `repeats_usage` to every event. `echoes` puts the prompt before each choice, or before
    a chat answer the message that it continues. `shows_token_ids` adds token ids to the text, and
    `names_tokens_by_id` replaces tokens by their ids in log-probabilities. `names` maps fields of a
    start frame to parameters.
    """

    starts: Sequence[pb.StartFrame]
    model: str
    streams: bool
    includes_usage: bool
    names: Mapping[str, str]
    choice_count: int = 1  # for each prompt
    repeats_usage: bool = False
    echoes: bool = False
    shows_token_ids: bool = False
    names_tokens_by_id: bool = False
    prompt_logprobs: int | None = None  # likely tokens of each token of the prompt to show
    parameters: Any = None  # for responses that repeat them

    def for_end_user(self, end_user: str, param: str) -> ParsedRequest:
        """Return a copy for the end user that `param` names, whatever the body says."""
        for start in self.starts:
            start.end_user = end_user
        return replace(self, names={**self.names, "end_user": param})


@functools.cache
def outline_of(kind: type[Struct]) -> type[Struct]:
    """Create a type with the same parameters, left undecoded. Unknown parameters are skipped."""
    return msgspec.defstruct("Outline", [(name, Raw, ABSENT) for name in kind.__struct_fields__])


def element_counts(data: bytes) -> dict[str, int]:
    """Count the elements of a JSON text by kind; if there are too many strings, only those."""
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    counts = {"strings": unescaped.count(b'"') // 2}
    if counts["strings"] <= ELEMENT_COUNTS_MAX["strings"]:
        outside = b"".join(unescaped.split(b'"')[::2])
        counts["objects and lists"] = outside.count(b"{") + outside.count(b"[")
        counts["members of objects"] = outside.count(b":")
        counts["values"] = outside.count(b",")
    return counts


def check_elements(body: bytes, kind: type[Struct]) -> None:
    """Limit the number of elements of a body, which msgspec decodes in one piece.

    Raises InvalidRequest, which names the parameter with the most elements; msgspec.DecodeError,
    RecursionError.
    """
    for what, count in element_counts(body).items():
        if count > (limit := ELEMENT_COUNTS_MAX[what]):
            wrong = f"the body may have {limit:,} {what} in total, got {count:,}, most of them"
            name = parameter_with_most(body, kind, what, count)
            if name is not None:
                raise invalid_parameter(name, f"{wrong} here: send less in one request")
            raise invalid_parameter(
                None,
                f"{wrong} in parameters that this API does not know, or in repeated ones: leave out"
                f" unknown parameters, of which a body may have {UNKNOWN_COUNT_MAX}, and send each"
                " parameter once",
            )


def parameter_with_most(body: bytes, kind: type[Struct], what: str, count: int) -> str | None:
    """Find the parameter with the most elements; None if unknown parameters have more.

    Raises: msgspec.DecodeError, RecursionError.
    """
    outline = msgspec.json.decode(body, type=outline_of(kind))
    counts = {
        name: element_counts(bytes(getattr(outline, name))).get(what, 0)
        for name in kind.__struct_fields__
    }
    most = max(counts, key=lambda name: counts[name])
    return most if counts[most] >= count - sum(counts.values()) else None


def decode(body: bytes, kind: type[Body], notes: Notes | None = None) -> Body:
    """Decode and validate the body of a request.

    `notes` collects fields that are not parameters of this API (see `tolerance.py`); with None,
    unknown parameters are refused. Raises HttpFault if the body is not JSON, InvalidRequest for the
    first invalid parameter.
    """
    notes = Notes(strict=True) if notes is None else notes
    body = body.removeprefix(BOM_UTF8)  # .NET and PowerShell write one
    try:
        if not body.isascii():
            body.decode()  # msgspec does not check what it skips or keeps unparsed
        if len(body) > SHORT_BYTES_MAX:
            check_elements(body, kind)
        try:
            requested = msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            # Parsed again only where a client sends fields of other servers, or wrong values
            other_names = names_of_all() - set(kind.__struct_fields__)
            known = as_known(body, kind, api_of(kind), other_names, notes)
            requested = msgspec.json.decode(known, type=kind)
    except msgspec.ValidationError as error:
        if OUT_OF_RANGE in str(error) and (named := _impossible_value(body)) is not None:
            raise invalid_parameter(*named) from None
        raise notes.as_sent(_violation(str(error), _wrong_key(body, kind, str(error)))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        named = None if isinstance(error, UnicodeDecodeError) else _impossible_value(body)
        param, what = named or (None, str(error))
        location = "" if param is None else f"{param}: "
        raise HttpFault(
            400,
            f"{location}the body is not valid JSON: {what}. Send one JSON object",
            "invalid_json",
            param=param,
        ) from None
    if api_of(kind):
        drop_empty(requested)
    return requested


def _wrong_key(body: bytes, kind: type[Struct], message: str) -> str | None:
    """Find the key whose value msgspec has refused, in an object with arbitrary keys.

    The error message names only the object. Returns None for any other message.
    """
    if (found := _IN_FREE_KEYS.search(message[-QUOTED_CHARS_MAX:])) is None:
        return None
    name = found["value"] or found["key"]
    [kept] = (each.type for each in msgspec.structs.fields(kind) if each.encode_name == name)
    members = msgspec.json.decode(getattr(msgspec.json.decode(body, type=outline_of(kind)), name))
    for key, value in members.items():
        try:
            msgspec.convert({key: value}, kept, str_keys=True)
        except msgspec.ValidationError:
            return str(key)
    return None


def api_of(kind: type[Struct]) -> str:
    """Return the name of the body's API in `dialects.py`; empty if it has none."""
    name: str = kind.api  # type: ignore[attr-defined]
    return name


def drop_empty(requested: Struct) -> None:
    """Set optional parameters with empty values to None, as if they were not sent."""
    optional, values = shape_of(type(requested)).optional, astuple(requested)
    sent = compress(requested.__struct_fields__, map(is_not, values, repeat(None)))
    for name in optional.intersection(sent):
        if is_nothing(getattr(requested, name)):
            setattr(requested, name, None)
    if getattr(requested, "seed", None) == -1:
        requested.seed = None  # type: ignore[attr-defined]


class _NotFinite(str):
    """Literal that Python's JSON parser accepts although it is not JSON, such as `NaN`."""

    __slots__ = ()


def _impossible_value(body: bytes) -> tuple[str, str] | None:
    """Find a value that JSON or Unicode does not allow; return its path and a description.

    Returns None if there is none, or if the body is long.
    """
    if len(body) > SHORT_BYTES_MAX:
        return None
    try:
        waiting = [("", json.loads(body, parse_constant=_NotFinite))]
    except (ValueError, RecursionError):
        return None
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _NotFinite) or (isinstance(value, float) and math.isinf(value)):
            return path[:200], f"{range_of(path)}, got {value}"
        if isinstance(value, str) and HALF_PAIR.search(value):
            wrong = "has half of a surrogate pair, such as \\ud83d: send both halves"
            return path[:200], wrong
        if isinstance(value, dict):
            half = next((name for name in value if HALF_PAIR.search(name)), None)
            waiting += [(f"{path}.{name}".lstrip("."), each) for name, each in value.items()]
            waiting += [(path, half)] if half is not None else []
        elif isinstance(value, list):
            waiting += [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    return None


def range_of(param: str) -> str:
    """Describe the values that a parameter may have, for an error message."""
    allowed = RANGES.get(param.partition(".")[0].partition("[")[0])
    return "must be a finite number" if allowed is None else f"must be {allowed}"


def _violation(message: str, key: str | None = None) -> InvalidRequest:
    """Convert an error message of msgspec, which consists of a text and a path, to an error.

    `key` is the member at fault of an object with arbitrary keys. The text may quote a value of the
    body of any length, so it is truncated first.
    """
    if len(message) > 2 * QUOTED_CHARS_MAX:
        message = f"{message[:QUOTED_CHARS_MAX]}...{message[-QUOTED_CHARS_MAX:]}"
    what, param = message, ""
    if (found := _PATH.match(message)) is not None:
        what, param = (
            found["what"],
            (found["outer"] or found["path"]).removeprefix("$").removeprefix("."),
        )
        if key is not None:
            if found["outer"]:
                what = f"the key must be a token id: a whole number from 0 to {TOKEN_ID_MAX}"
            param = f"{param.removesuffix('[...]')}[{key[:QUOTED_KEY_CHARS_MAX]!r}]"
    for pattern, remedy in (
        (_UNKNOWN, STRICT_REMEDY),
        (_MISSING, "is required"),
    ):
        if (named := pattern.match(what)) is not None:
            name = f"{param}.{named['name']}".removeprefix(".")[:200]
            return invalid_parameter(name, MODEL_REQUIRED if name == "model" else remedy)
    if param == "model" and what.endswith(NULL):
        return invalid_parameter(param, MODEL_REQUIRED)
    what = in_json_words(what)
    if param.partition(".")[0].partition("[")[0] in RANGES:
        _, got, sent = what.partition(", got ")
        what = f"{range_of(param)}{got}{sent}" if got else f"{range_of(param)}: {what}"
    return invalid_parameter(param, what)


def in_json_words(what: str) -> str:
    """Replace Python's types in a message of msgspec by those of JSON."""

    def named(types: re.Match[str]) -> str:
        names = types[1].split(" | ")
        # null only says that a parameter may be left out.
        names = [name for name in names if name != "null"] or names
        return " or ".join(JSON_TYPES.get(name, name) for name in names)

    allowed, got, sent = _TYPES.sub(named, what).partition(", got ")
    sent = sent.replace(JSON_TYPES["float"], "a decimal number")
    if allowed.startswith("Expected "):
        allowed = f"must be {allowed.removeprefix('Expected ')}"
    return f"{allowed[:1].lower()}{allowed[1:]}{got}{sent}"


def fill_copied(start: pb.StartFrame, requested: Struct) -> None:
    """Copy the parameters of `COPIED` that were sent to a start frame."""
    for name, group, field in COPIES:
        if (value := getattr(requested, name, None)) is not None:
            setattr(getattr(start, group) if group else start, field, value)


def fill_shared(start: pb.StartFrame, requested: SharedParameters) -> None:
    """Set the shared parameters in a start frame. Raises: InvalidRequest."""
    check_model_name(requested.model)
    start.model = requested.model
    fill_copied(start, requested)
    if requested.metadata:
        check_count(requested.metadata, "metadata", LABEL_COUNT_MAX)
        start.labels.update(requested.metadata)
    if requested.user or requested.safety_identifier:
        set_end_user(start, requested)
    if requested.stop_token_ids:
        check_count(requested.stop_token_ids, "stop_token_ids", STOP_TOKEN_ID_COUNT_MAX)
        start.stop_token_ids.extend(requested.stop_token_ids)
    if requested.service_tier is not None:
        if requested.service_tier not in TIERS:
            raise invalid_parameter("service_tier", f"must be one of {', '.join(TIERS)}")
        start.tier = TIERS[requested.service_tier]


def check_model_name(model: str) -> None:
    """Check the length and the characters of a model name. Raises: InvalidRequest."""
    if 0 < len(model) <= SHORT_NAME_CHARS and model.isprintable():
        return
    wrong = Violations()
    wrong.check(bool(model), "model", MODEL_REQUIRED)
    wrong.check_text(model, "model")
    wrong.raise_if_any()


def check_shared(requested: SharedParameters) -> None:
    """Check the shared parameters that are supported only in part. Raises: InvalidRequest."""
    if requested.store:
        raise invalid_parameter(
            "store", "is not supported, since nothing is stored: leave it out or send false"
        )


@functools.cache
def names_annotated(kind: type[Struct], annotation: str) -> tuple[str, ...]:
    """List the parameters of a body, even inherited ones, with this annotation in the source."""
    return tuple(
        name
        for each in kind.__mro__
        for name, declared in getattr(each, "__annotations__", {}).items()
        if declared == annotation
    )


@functools.cache
def names_of_all() -> frozenset[str]:
    """List the parameters of all generating APIs."""
    kinds = (ChatParameters, CompletionParameters, ResponseParameters)
    return frozenset(name for kind in kinds for name in kind.__struct_fields__) | NEUTRAL.keys()


def tolerate(requested: Struct, notes: Notes) -> None:
    """Remove parts of a request that are not served, and note parameters that change nothing.

    Tools that are not functions are offers, which the model is not shown. Earlier reasoning is left
    out, as chat templates do.
    """
    for name in names_annotated(type(requested), "Idle"):
        if getattr(requested, name) not in EMPTY:
            notes.add(name)
    if getattr(requested, "context_management", None) not in EMPTY:
        notes.add("context_management")
    options = getattr(requested, "stream_options", None)
    if options is not None and options.include_obfuscation:
        notes.add("stream_options.include_obfuscation")
    if isinstance(requested, ChatParameters) and any(
        message.name and ROLES.get(message.role) != pb.ROLE_TOOL for message in requested.messages
    ):
        notes.add("messages[].name")
    if isinstance(requested, ChatParameters | ResponseParameters) and requested.tools:
        kinds = (FUNCTION, NAMESPACE) if isinstance(requested, ResponseParameters) else (FUNCTION,)
        for tool in requested.tools:
            if tool.type not in kinds:
                notes.add(f"tools[].{tool.type}")
            for each in tool.tools or ():
                if each.type != FUNCTION:
                    notes.add(f"tools[].tools[].{each.type}")
        requested.tools = [tool for tool in requested.tools if tool.type in kinds]
    if isinstance(requested, ResponseParameters):
        if requested.reasoning is not None:
            for name in names_annotated(Reasoning, "Idle"):
                if getattr(requested.reasoning, name) not in EMPTY:
                    notes.add(f"reasoning.{name}")
        if options is not None and options.continuous_usage_stats:
            notes.add("stream_options.continuous_usage_stats")
        if not IDLE_FACTS.isdisjoint(requested.include or ()):
            notes.add("include[]")
        if not isinstance(requested.input, str) and any(
            item.name and item.role for item in requested.input
        ):
            notes.add("input[].name")
        if not isinstance(requested.input, str) and any(
            item.type == REASONING and item.encrypted_content for item in requested.input
        ):
            notes.add("input[].encrypted_content")


def refuse_unsupported(requested: Struct, *names: str) -> None:
    """Refuse unsupported parameters unless their values change nothing. Raises: InvalidRequest."""
    for name in names:
        value = getattr(requested, name)
        if value is not None and not is_neutral(value, NEUTRAL.get(name, ())):
            entry = field_of(name, api_of(type(requested)))
            remedy = entry.note if entry is not None and entry.note else "leave it out"
            raise invalid_parameter(name, f"is not supported: {remedy}")


def fill_limit(start: pb.StartFrame, limit: int | None, param: str) -> None:
    """Set the limit on output tokens in a start frame, if there is one. Raises: InvalidRequest."""
    if limit is None or limit == NO_LIMIT:
        return
    if limit < 1:
        raise invalid_parameter(param, f"{range_of(param)}, got {limit}")
    start.max_output_tokens = limit


def refuse_unless(requested: object, param: str, allowed: str, reason: str) -> None:
    """Refuse any value except `allowed` and None. Raises: InvalidRequest."""
    if requested not in (None, allowed):
        raise invalid_parameter(param, f"must be {allowed} or left out: {reason}")


def tier_name(start: pb.StartFrame) -> str:
    """Convert the service tier of a request to OpenAI's name for it."""
    return "flex" if start.tier == pb.SERVICE_TIER_BATCH else "default"


def set_end_user(start: pb.StartFrame, requested: SharedParameters) -> None:
    """Set the end user from `safety_identifier`, which succeeds `user`, or else from `user`.

    If both are sent and differ, `user` becomes a label. Raises: InvalidRequest for an invalid name,
    or if `user` has another value in `metadata`.
    """
    if requested.safety_identifier:
        check_end_user(requested.safety_identifier, "safety_identifier")
    start.end_user = requested.safety_identifier or requested.user or ""
    if (user := requested.user) and user != start.end_user:
        if start.labels.get("user", user) != user:
            raise invalid_parameter(
                "user", "differs from the value in metadata: leave one of them out"
            )
        start.labels["user"] = user


def check_end_user(name: str, param: str) -> None:
    """Check the name of an end user. Raises: InvalidRequest."""
    try:
        checked_end_user(name)
    except InvalidValue as error:
        raise invalid_parameter(param, error.remedy) from error


class DecodingParameters(SharedParameters, forbid_unknown_fields=True, kw_only=True):
    """Parameters that chat and plain completions share."""

    max_tokens: Int64 | None = None
    n: Int32 | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | list[Any] | None = None  # llama.cpp: pairs
    response_format: Format | None = None
    echo: bool | None = None  # for chat an extension, as in vLLM and SGLang
    # Extensions, as in vLLM
    prompt_logprobs: Int32 | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class ChatParameters(DecodingParameters, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `client.chat.completions.create`."""

    api: ClassVar[str] = "chat"

    messages: list[Message]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    modalities: list[str] | None = None
    tools: list[ToolParameter] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None  # extension, as in vLLM
    enable_thinking: bool | None = None  # extension, as in the API of Qwen
    thinking_token_budget: Int64 | None = None  # extension, as in vLLM
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None  # extensions, as in vLLM and SGLang
    add_generation_prompt: bool | None = None
    audio: Idle = None  # the voice of `modalities` with audio, which are refused
    prediction: Idle = None
    prompt_cache_options: Idle = None
    prompt_cache_retention: Idle = None
    function_call: Unsupported = None
    functions: Unsupported = None
    moderation: Unsupported = None
    web_search_options: Unsupported = None
    verbosity: Any = None  # one value is accepted


def parse_chat(requested: ChatParameters) -> ParsedRequest:
    """Convert the parameters of a chat completion. Raises: InvalidRequest."""
    check_shared(requested)
    refuse_unsupported(requested, *names_annotated(ChatParameters, "Unsupported"))
    refuse_unless(requested.verbosity, "verbosity", *NO_VERBOSITY)
    if requested.modalities not in (None, [], ["text"]):
        raise invalid_parameter("modalities", 'must be ["text"] or left out')
    limit_name, limit = output_limit(requested)
    start = pb.StartFrame(conversation=conversation(requested.messages))
    fill_continuation(start, requested)
    fill_shared(start, requested)
    switch = fill_thinking(start, requested.chat_template_kwargs, requested.enable_thinking)
    if requested.tools or requested.tool_choice is not None:
        fill_tools(
            start,
            requested.tools,
            requested.tool_choice,
            requested.parallel_tool_calls,
            wrapped=True,
        )
    fill_decoding(start, requested)
    fill_limit(start, limit, limit_name)
    if requested.top_logprobs and not requested.logprobs:
        raise invalid_parameter("top_logprobs", "requires logprobs: set logprobs to true")
    if requested.logprobs:
        start.top_logprobs = requested.top_logprobs or 0
    names = CHAT_NAMES_BY_LIMIT[limit_name] | fill_format(
        start, requested.response_format, CHAT_FIELD
    )
    return completion_of(requested, (start,), names | switch)


def completion_of(
    requested: DecodingParameters, starts: Sequence[pb.StartFrame], names: Mapping[str, str]
) -> ParsedRequest:
    """Build the result of parsing a chat or plain completion."""
    options = requested.stream_options or StreamOptions()
    includes_usage = options.include_usage is True
    return ParsedRequest(
        starts,
        requested.model,
        streams=bool(requested.stream),
        includes_usage=includes_usage,
        names=names,
        choice_count=1 if requested.n is None else requested.n,
        repeats_usage=includes_usage and options.continuous_usage_stats is True,
        echoes=bool(requested.echo),
        shows_token_ids=bool(requested.return_token_ids),
        names_tokens_by_id=bool(requested.return_tokens_as_token_ids),
        prompt_logprobs=requested.prompt_logprobs,
    )


def fill_continuation(start: pb.StartFrame, requested: ChatParameters) -> None:
    """Make the answer continue the last message, if requested. Raises: InvalidRequest."""
    *earlier, last = requested.messages
    for index, message in enumerate(earlier):
        if message.prefix:
            raise invalid_parameter(
                f"messages[{index}].prefix", "is allowed in the last message only: leave it out"
            )
    if last.prefix and requested.continue_final_message is False:
        raise invalid_parameter(
            "continue_final_message", "must be true or left out beside a message with prefix"
        )
    continues = bool(last.prefix or requested.continue_final_message)
    if (begins := requested.add_generation_prompt) is not None and begins == continues:
        raise invalid_parameter(
            "add_generation_prompt",
            "must be false or left out with continue_final_message"
            if continues
            else "must be true or left out, unless continue_final_message is true",
        )
    if requested.echo and not continues:
        raise invalid_parameter("echo", "requires continue_final_message, whose text it repeats")
    start.conversation.continues_last_message = continues


def output_limit(requested: ChatParameters) -> tuple[str, int | None]:
    """Return the parameter that limits output tokens, and its value; of two, the smaller one."""
    old, new = requested.max_tokens, requested.max_completion_tokens
    return (
        ("max_tokens", old)
        if old is not None and smaller_limit(old, new) != new
        else ("max_completion_tokens", new)
    )


def fill_decoding(start: pb.StartFrame, requested: DecodingParameters) -> None:
    """Set the parameters that completions share in a start frame. Raises: InvalidRequest."""
    stop = [requested.stop] if isinstance(requested.stop, str) else requested.stop
    if stop:
        check_count(stop, "stop", STOP_SEQUENCE_COUNT_MAX)
        start.stop_sequences.extend(stop)
    if requested.logit_bias:
        check_count(requested.logit_bias, "logit_bias", LOGIT_BIAS_COUNT_MAX)
        start.sampling.logit_bias.update(biases_of(requested.logit_bias))
    if (count := requested.prompt_logprobs) is not None:
        if requested.stream:
            raise invalid_parameter(
                "prompt_logprobs", "cannot be combined with stream: leave one of them out"
            )
        limit = LOGPROBS_MAX["prompt_logprobs"]
        if not 0 <= count <= limit:
            raise invalid_parameter("prompt_logprobs", f"must be from 0 to {limit}, got {count}")
        start.prompt_logprobs = count
    if requested.n is not None:
        if not 1 <= requested.n <= CHOICE_COUNT_MAX:  # checked before allocations per choice
            raise invalid_parameter("n", f"must be from 1 to {CHOICE_COUNT_MAX}, got {requested.n}")
        start.choice_count = requested.n


def biases_of(requested: dict[int, float] | list[Any]) -> dict[int, float]:
    """Convert biases to a dict by token id; in pairs, `false` bans it. Raises: InvalidRequest."""
    if isinstance(requested, dict):
        return requested
    biases: dict[int, float] = {}
    for index, pair in enumerate(requested):
        match pair:
            case [int(token_id), int() | float() | False as bias] if (
                bias is not True and not isinstance(token_id, bool) and 0 <= token_id < 2**31
            ):
                biases[token_id] = -LOGIT_BIAS_MAX if bias is False else float(bias)
            case _:
                raise invalid_parameter(
                    f"logit_bias[{index}]", "must be a token id and a number: [5, -1.5]"
                )
    return biases


class CompletionParameters(DecodingParameters, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `client.completions.create`."""

    api: ClassVar[str] = "completions"

    prompt: Prompt
    best_of: Int32 | None = None
    logprobs: Int32 | None = None
    suffix: Any = None


class PromptedFrames(Sequence[pb.StartFrame]):
    """Start frames of several prompts, built on access, so that an error stops at the first."""

    def __init__(self, start: pb.StartFrame, prompts: Prompts) -> None:
        """`start` is the frame without a prompt."""
        self._start = start
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> pb.StartFrame: ...

    @overload
    def __getitem__(self, index: slice) -> PromptedFrames: ...

    def __getitem__(self, index: int | slice) -> pb.StartFrame | PromptedFrames:
        if isinstance(index, slice):
            return PromptedFrames(self._start, self._prompts[index])
        return frame_with_prompt(self._start, self._prompts[index])


def parse_completion(requested: CompletionParameters) -> ParsedRequest:
    """Convert the parameters of a plain completion. Raises: InvalidRequest."""
    check_shared(requested)
    refuse_unsupported(requested, "suffix")
    count = 1 if requested.n is None else requested.n
    if requested.best_of not in (None, count):
        raise invalid_parameter("best_of", "must equal n: all generated choices are returned")
    start = pb.StartFrame()
    limit = MAX_TOKENS_UNSET if requested.max_tokens is None else requested.max_tokens
    fill_limit(start, limit, "max_tokens")
    fill_shared(start, requested)
    fill_decoding(start, requested)
    names = COMPLETION_NAMES | fill_format(start, requested.response_format, CHAT_FIELD)
    if requested.logprobs is not None:
        start.top_logprobs = requested.logprobs
    if requested.echo:
        fill_echo(start, requested)
    names = names if requested.prompt_logprobs is not None else names | ECHO_NAMES
    return completion_of(requested, PromptedFrames(start, prompts_of(requested.prompt)), names)


def fill_echo(start: pb.StartFrame, requested: CompletionParameters) -> None:
    """Request the log-probabilities that an echoed prompt needs. Raises: InvalidRequest."""
    if (count := requested.logprobs) is not None:
        if count > (limit := LOGPROBS_MAX["prompt_logprobs"]):
            raise invalid_parameter("logprobs", f"must be from 0 to {limit} with echo, got {count}")
        if requested.prompt_logprobs not in (None, count):
            raise invalid_parameter(
                "prompt_logprobs", "must equal logprobs with echo: leave it out"
            )
        start.prompt_logprobs = count


def prompts_of(
    requested: Prompt, param: str = "prompt", count_max: int = PROMPT_COUNT_MAX
) -> Prompts:
    """List the prompts of a request: a string, strings, token ids, or lists of token ids.

    Raises InvalidRequest for a mixture, for no prompt, and for too many.
    """
    if isinstance(requested, str):
        return [requested]
    if requested and not isinstance(requested[0], int):
        check_count(requested, param, count_max)
    kinds = set(map(type, requested))  # there may be a million token ids: no loop over them
    if len(kinds) != 1:
        raise invalid_parameter(
            param, "must be a text, a list of texts, a list of token ids, or a list of such lists"
        )
    return cast(Prompts, [requested] if kinds == {int} else requested)


def frame_with_prompt(start: pb.StartFrame, prompt: str | Sequence[int]) -> pb.StartFrame:
    complete = pb.StartFrame()
    complete.CopyFrom(start)
    if isinstance(prompt, str):
        complete.text = prompt
    else:
        complete.token_ids.ids.extend(prompt)
    return complete


class Text(Struct, forbid_unknown_fields=True):
    """Parameter `text` of the responses API."""

    format: Format | None = None
    verbosity: Any = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """Parameter `reasoning` of the responses API."""

    effort: str | None = None
    summary: Idle = None
    generate_summary: Idle = None
    context: Any = None
    mode: Any = None


class ResponseParameters(SharedParameters, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `client.responses.create`."""

    api: ClassVar[str] = "responses"

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
    chat_template_kwargs: ChatTemplateKwargs | None = None  # extension, as in vLLM
    enable_thinking: bool | None = None  # extension, as in the API of Qwen
    thinking_token_budget: Int64 | None = None  # extension, as in vLLM
    access_programs: Unsupported = None
    background: Unsupported = None
    conversation: Unsupported = None
    image: Unsupported = None
    moderation: Unsupported = None
    previous_response_id: Unsupported = None
    prompt: Unsupported = None
    max_tool_calls: Idle = None  # of tools that run on the server
    prompt_cache_options: Idle = None
    prompt_cache_retention: Idle = None
    context_management: Any = None  # what changes nothing is accepted


def parse_response(requested: ResponseParameters) -> ParsedRequest:
    """Convert the parameters of a response. Raises: InvalidRequest."""
    check_shared(requested)
    check_unsupported(requested)
    items = (
        [Item(role="user", content=requested.input)]
        if isinstance(requested.input, str)
        else requested.input
    )
    conversation, names = conversation_of(items, requested.instructions)
    start = pb.StartFrame(conversation=conversation)
    fill_shared(start, requested)
    names |= fill_thinking(start, requested.chat_template_kwargs, requested.enable_thinking)
    if requested.reasoning is not None:
        start.conversation.reasoning_effort = requested.reasoning.effort or ""
    spaces = Namespaces.of(requested.tools)
    choice = spaces.chosen(requested.tool_choice)
    fill_tools(start, spaces.tools, choice, requested.parallel_tool_calls, wrapped=False)
    names |= spaces.names
    fill_limit(start, requested.max_output_tokens, "max_output_tokens")
    if wants_logprobs(requested):
        start.top_logprobs = requested.top_logprobs or 0
    names = RESPONSE_NAMES | names
    if requested.text is not None:
        names |= fill_format(start, requested.text.format, "text.format")
    return ParsedRequest(
        (start,),
        requested.model,
        streams=bool(requested.stream),
        includes_usage=True,
        names=names,
        parameters=requested,
    )


def check_unsupported(requested: ResponseParameters) -> None:
    """Check parameters that are not supported, or only in part. Raises: InvalidRequest."""
    if requested.context_management is not None:
        check_kept(requested.context_management, "context_management")
    refuse_unsupported(requested, *names_annotated(ResponseParameters, "Unsupported"))
    if requested.text is not None:
        refuse_unless(requested.text.verbosity, "text.verbosity", *NO_VERBOSITY)
    if requested.reasoning is not None:
        for name in ("context", "mode"):
            value = getattr(requested.reasoning, name)
            if value not in (None, "", NEUTRAL_REASONING[name]):
                raise invalid_parameter(
                    f"reasoning.{name}", f"must be {NEUTRAL_REASONING[name]} or left out"
                )
    if requested.truncation not in (None, "disabled", "auto"):
        raise invalid_parameter("truncation", "must be disabled or auto")
    for index, each in enumerate(requested.include or ()):
        if each != LOGPROBS and each not in IDLE_FACTS:
            raise invalid_parameter(
                f"include[{index}]", f"must be one of {', '.join([LOGPROBS, *sorted(IDLE_FACTS)])}"
            )


def wants_logprobs(requested: ResponseParameters) -> bool:
    """Return whether the response needs log-probabilities, which two parameters can request."""
    return LOGPROBS in (requested.include or ()) or bool(requested.top_logprobs)
