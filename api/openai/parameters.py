"""Parameters of OpenAI's chat, completion, response and embedding requests, checked and turned into requests of ours.

Tools are functions, and nothing but functions. The chat API wraps what the responses API does not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast, overload

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import astuple
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import Violations
from api.core.wire import LABEL_COUNT_MAX
from api.generation.conversation import CALL_COUNT_MAX, MESSAGE_COUNT_MAX
from api.generation.decoding import CHOICE_COUNT_MAX, LOGIT_BIAS_COUNT_MAX, STOP_SEQUENCE_COUNT_MAX, STOP_TOKEN_ID_COUNT_MAX
from api.generation.tools import TOOL_COUNT_MAX
from api.openai.refusals import HttpFault, check_count, wrong_parameter

ANY_OBJECT = '{"type": "object"}'
ABSENT = Raw(b"null")
CHAT_FIELD = "response_format"  # of the chat API, which wraps the schema
MODES: Mapping[str, pb.ToolMode.ValueType] = {
    "none": pb.TOOL_MODE_NONE,
    "auto": pb.TOOL_MODE_AUTO,
    "required": pb.TOOL_MODE_REQUIRED,
}


class Schema(Struct, forbid_unknown_fields=True):
    """A JSON schema with its name. It is kept strictly, also where `strict` does not ask for that."""

    name: str | None = None
    description: str | None = None
    schema: Raw = ABSENT
    strict: bool | None = None


class Format(Struct, forbid_unknown_fields=True):
    """A format in either API: the chat API wraps the schema into `json_schema`, the responses API does not."""

    type: str
    json_schema: Schema | None = None
    name: str | None = None
    description: str | None = None
    schema: Raw = ABSENT
    strict: bool | None = None


def response_format(given: Format | None, field: str) -> pb.ResponseFormat | None:
    """The format for a start frame; None for plain text. field: the parameter that it stands in. Raises: InvalidRequest."""
    match given:
        case None | Format(type="text"):
            return None
        case Format(type="json_object"):
            return pb.ResponseFormat(json_schema=ANY_OBJECT)
        case Format(type="json_schema"):
            return pb.ResponseFormat(json_schema=bytes(_schema(given, field)).decode())
    raise wrong_parameter(f"{field}.type", "must be text, json_object or json_schema")


def _schema(given: Format, field: str) -> Raw:
    """The schema, from where this API has it. Raises: InvalidRequest."""
    wrapped = given.json_schema
    if field == CHAT_FIELD:
        if wrapped is None:
            raise wrong_parameter(f"{field}.json_schema", "is required: an object with name and schema")
        if bytes(given.schema) != bytes(ABSENT):
            raise wrong_parameter(f"{field}.schema", "belongs into json_schema: leave it out here")
    elif wrapped is not None:
        raise wrong_parameter(f"{field}.json_schema", "is the chat API's form: put name and schema beside type")
    schema, place = (given.schema, field) if wrapped is None else (wrapped.schema, f"{field}.json_schema")
    if bytes(schema) == bytes(ABSENT):
        raise wrong_parameter(f"{place}.schema", "is required")
    return schema


def as_given(given: Format | None) -> object:
    """The format as a reply repeats it."""
    if given is None:
        return {"type": "text"}
    fields = {"type": given.type, "name": given.name, "description": given.description, "strict": given.strict}
    told: dict[str, object] = {name: value for name, value in fields.items() if value is not None}
    if bytes(given.schema) != bytes(ABSENT):
        told["schema"] = msgspec.json.decode(given.schema)
    return told


class Function(Struct, forbid_unknown_fields=True):
    """A function as the chat API writes it."""

    name: str
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None


class ToolParameter(Struct, forbid_unknown_fields=True):
    """A tool in either API."""

    type: str
    function: Function | None = None
    name: str | None = None
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None


class FunctionName(Struct, forbid_unknown_fields=True):
    """Which function, as the chat API says it."""

    name: str


class NamedChoice(Struct, forbid_unknown_fields=True):
    """One function that must be called, in either API."""

    type: str
    function: FunctionName | None = None
    name: str | None = None


class CalledFunction(Struct, forbid_unknown_fields=True):
    """What was called, as the chat API writes it."""

    name: str
    arguments: str


class CallParameter(Struct, forbid_unknown_fields=True):
    """A call of an earlier answer, as the chat API writes it."""

    id: str
    type: str
    function: CalledFunction | None = None
    index: int | None = None


Choice = str | NamedChoice


def fill_tools(
    start: pb.StartFrame,
    tools: Sequence[ToolParameter] | None,
    choice: Choice | None,
    parallel: bool | None,
    *,
    wrapped: bool,
) -> None:
    """Put tools into a start frame. wrapped: as the chat API has them. Raises: InvalidRequest.

    Without tools a choice between none and what the model likes asks for what happens, and is taken.
    """
    check_count(tools, "tools", TOOL_COUNT_MAX)
    for index, tool in enumerate(tools or ()):
        field = f"tools[{index}]"
        function = _function(tool, field, wrapped=wrapped)
        parameters = b"" if bytes(function.parameters) == bytes(ABSENT) else bytes(function.parameters)
        start.tools.add(
            name=function.name,
            description=function.description or "",
            parameters_json_schema=parameters.decode(),
            strict=bool(function.strict),
        )
    if not start.tools:
        if choice not in (None, "none", "auto"):
            raise wrong_parameter("tool_choice", "needs tools: leave it out without any")
        return
    if isinstance(choice, NamedChoice):
        start.tool_choice.name = _name(choice, wrapped=wrapped)
    else:
        if choice not in (None, *MODES):
            raise wrong_parameter("tool_choice", f"must be one of {', '.join(MODES)}, or name a function")
        start.tool_choice.mode = MODES[choice or "auto"]
    start.tool_choice.single = parallel is False


def tools_as_given(tools: Sequence[ToolParameter] | None) -> list[dict[str, Any]]:
    """Tools of the responses API, as its reply repeats them."""
    return [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": msgspec.json.decode(tool.parameters),
            "strict": bool(tool.strict),
        }
        for tool in tools or ()
    ]


def choice_as_given(choice: Choice | None) -> str | dict[str, str]:
    """The choice of the responses API, as its reply repeats it."""
    return {"type": "function", "name": choice.name or ""} if isinstance(choice, NamedChoice) else choice or "auto"


def call_messages(calls: Sequence[CallParameter], field: str) -> list[pb.ToolCall]:
    """Calls of an assistant's turn in the chat API. Raises: InvalidRequest."""
    check_count(calls, field, CALL_COUNT_MAX)
    messages = []
    for index, call in enumerate(calls):
        if call.type != "function" or call.function is None:
            raise wrong_parameter(f"{field}[{index}].type", "must be function, with the function beside it")
        messages.append(pb.ToolCall(id=call.id, name=call.function.name, arguments_json=call.function.arguments))
    return messages


def _function(tool: ToolParameter, field: str, *, wrapped: bool) -> Function:
    if tool.type != "function":
        raise wrong_parameter(f"{field}.type", f"must be function: tools of the type {tool.type[:40]!r} are not supported")
    if wrapped:
        if tool.function is None:
            raise wrong_parameter(f"{field}.function", "is required")
        if tool.name is not None or tool.description is not None or bytes(tool.parameters) != bytes(ABSENT):
            raise wrong_parameter(f"{field}.function", "holds name, description and parameters: put them there")
        return tool.function
    if tool.function is not None:
        raise wrong_parameter(f"{field}.function", "is the chat API's form: put its members beside type")
    if tool.name is None:
        raise wrong_parameter(f"{field}.name", "is required")
    return Function(tool.name, tool.description, tool.parameters, tool.strict)


def _name(choice: NamedChoice, *, wrapped: bool) -> str:
    name = (None if choice.function is None else choice.function.name) if wrapped else choice.name
    if choice.type != "function" or not name:
        where = "function.name" if wrapped else "name"
        raise wrong_parameter("tool_choice", f"must have the type function and a {where}: nothing else can be chosen")
    return name


ROLES: Mapping[str, pb.Role.ValueType] = {
    "system": pb.ROLE_SYSTEM,
    "developer": pb.ROLE_SYSTEM,  # the younger name of the same
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
}
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class ContentPart(Struct, forbid_unknown_fields=True):
    """One part of a message. What replies carry beside the text may come back with it."""

    type: str
    text: str | None = None
    annotations: list[Any] | None = None
    logprobs: Any = None
    refusal: Any = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None


class Message(Struct, forbid_unknown_fields=True):
    """One message. The fields beside role and content are those with which a reply comes back, most of them empty."""

    role: str
    content: str | list[ContentPart] | None = None
    type: str | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    tool_calls: list[CallParameter] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


NO_TEXT = ContentPart.__struct_fields__[ContentPart.__struct_fields__.index("refusal") :]  # what parts of other types have


def conversation(messages: Sequence[Message]) -> pb.Conversation:
    """The conversation for a start frame. Raises: InvalidRequest."""
    if not messages:
        raise wrong_parameter("messages", "must hold at least one message")
    check_count(messages, "messages", MESSAGE_COUNT_MAX)
    turns = [_plain_turn(message) or _turn(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return pb.Conversation(messages=turns)


def _plain_turn(message: Message) -> pb.Message | None:
    """The turn of a message with nothing but a role and a text, as most have; looking at all that there may be takes five times."""
    role, content = ROLES.get(message.role), message.content
    if role is None or role == pb.ROLE_TOOL or not isinstance(content, str) or message.type not in (None, "message"):
        return None
    if message.tool_calls or message.tool_call_id or message.function_call or message.name or message.audio or message.refusal:
        return None
    return pb.Message(role=role, content=content)


def _turn(message: Message, field: str) -> pb.Message:
    if message.role == "function" or message.function_call:
        raise wrong_parameter(field, "functions have become tools: send tool_calls, and the role tool for what came of them")
    if message.role not in ROLES:
        raise wrong_parameter(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    if message.type not in (None, "message"):
        raise wrong_parameter(f"{field}.type", "must be message: other items are not supported")
    for name in ("name", "audio", "refusal"):
        if getattr(message, name):
            raise wrong_parameter(f"{field}.{name}", "is not supported: the model sees role and text alone")
    calls = call_messages(message.tool_calls or (), f"{field}.tool_calls")
    if message.content is None and not calls:
        raise wrong_parameter(f"{field}.content", "must be text")
    content = text_of(message.content or "", f"{field}.content")
    return pb.Message(role=ROLES[message.role], content=content, tool_calls=calls, tool_call_id=message.tool_call_id or "")


def text_of(content: str | Sequence[ContentPart], field: str) -> str:
    """All text parts, one after the other, with nothing between them. Raises: InvalidRequest."""
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise wrong_parameter(f"{field}[{index}]", f"parts of the type {part.type[:40]!r} are not supported: only text is")
        if part.text is None:
            raise wrong_parameter(f"{field}[{index}].text", "is required")
        if any(beside := astuple(part)[-len(NO_TEXT) :]):
            name = next(name for name, value in zip(NO_TEXT, beside, strict=True) if value)
            raise wrong_parameter(f"{field}[{index}].{name}", "is not supported in a part that is text: leave it out")
    return "".join(part.text or "" for part in content)


Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]

# `flex` is OpenAI's tier for what may wait, at a lower price: here the batch tier.
TIERS: Mapping[str, pb.ServiceTier.ValueType] = {
    "auto": pb.SERVICE_TIER_INTERACTIVE,
    "default": pb.SERVICE_TIER_INTERACTIVE,
    "flex": pb.SERVICE_TIER_BATCH,
}

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # called as in a start frame
DECODING = ("presence_penalty", "frequency_penalty", "seed")
# How fields of a start frame are called in all of the APIs; each API adds its own.
COMMON_NAMES: dict[str, str] = {f"sampling.{name}": name for name in (*SAMPLING, *DECODING, "logit_bias")} | {
    "conversation.thinking": "chat_template_kwargs.enable_thinking",
    "min_output_tokens": "min_tokens",
    "labels": "metadata",
    "labels['user']": "user",
    "labels['safety_identifier']": "safety_identifier",
    "tier": "service_tier",
}

_PATH = re.compile(r"^(?P<what>.*) - at `(?P<path>[^`]*)`(?: in `(?P<outer>[^`]*)`)?$", re.DOTALL)  # the second form of a key
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
Body = TypeVar("Body", bound=Struct)
Unserved = Any  # of parameters that others serve: refused by name unless they ask for nothing

# What is taken of parameters that ask for more than there is, and why no more is.
NO_EFFORT = (
    "none",
    "what a model thinks is text of its answer; chat_template_kwargs.enable_thinking switches it where the model has a switch",
)

NO_VERBOSITY = ("medium", "how much a model says is for its prompt and max_tokens to say")
NO_RETENTION = ("in_memory", "what is cached stays as long as there is room")
# Of a chat.
ONE_VALUE = {"reasoning_effort": NO_EFFORT, "verbosity": NO_VERBOSITY, "prompt_cache_retention": NO_RETENTION}
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
    "conversation.messages[].tool_calls[].name": "messages[].tool_calls[].function.name",
    "conversation.messages[].tool_calls[].arguments_json": "messages[].tool_calls[].function.arguments",
}
# By the name that the bound on output tokens was given by.
CHAT_NAMES_BY_LIMIT = {name: CHAT_NAMES | {"max_output_tokens": name} for name in ("max_tokens", "max_completion_tokens")}

SHORT_NAME_CHARS = 64  # a name of a model that is not longer needs no look at the bound
MAX_TOKENS_UNSET = 16  # OpenAI's own default of this API, and of no other
PROMPT_COUNT_MAX = 128  # each is a request of its own, all of which wait for the last one
COMPLETION_NAMES = COMMON_NAMES | {
    "text": "prompt",
    "token_ids.ids": "prompt",
    "stop_sequences": "stop",
    "choice_count": "n",
    "max_output_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}

Prompts = Sequence[str | Sequence[int]]
Prompt = str | list[str | TokenId | list[TokenId]]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatTemplateKwargs(Struct, forbid_unknown_fields=True):
    """Variables of the chat template that a request may set, by either of the names that templates have for the switch."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


def fill_thinking(start: pb.StartFrame, given: ChatTemplateKwargs | None) -> None:
    """Raises: InvalidRequest if both names are given."""
    if given is None or (given.enable_thinking is None and given.thinking is None):
        return
    if given.enable_thinking is not None and given.thinking is not None:
        raise wrong_parameter("chat_template_kwargs", "takes enable_thinking or thinking, not both: they are one switch")
    start.conversation.thinking = bool(given.thinking if given.enable_thinking is None else given.enable_thinking)


class SharedParameters(Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters that every generating API has. The second group are not OpenAI's: send them as `extra_body`."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None  # what is cached is found by its content
    store: bool | None = None

    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None


@dataclass(slots=True)
class Asked:
    """One HTTP request, understood. Not changed by anybody.

    starts: what is to run, one for each prompt. names: what errors call its parameters.
    """

    starts: Sequence[pb.StartFrame]
    model: str
    streams: bool
    includes_usage: bool
    names: Mapping[str, str]
    choice_count: int = 1  # of each prompt
    given: Any = None  # its parameters, of an answer that repeats them


def decode(body: bytes, kind: type[Body]) -> Body:
    """The body of a request. Raises: HttpFault if it is not JSON, InvalidRequest naming the first parameter that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _violation(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpFault(400, f"the body is not valid JSON: {error}", "invalid_json") from None


def _violation(message: str) -> Exception:
    """A violation as msgspec words it: what is wrong, and where."""
    what, param = message, ""
    if (found := _PATH.match(message)) is not None:
        what, param = found["what"], (found["outer"] or found["path"]).removeprefix("$").removeprefix(".")
    for pattern, remedy in ((_UNKNOWN, "is not a parameter of this API; leave it out"), (_MISSING, "is required")):
        if (named := pattern.match(what)) is not None:
            return wrong_parameter(f"{param}.{named['name']}".removeprefix(".")[:200], remedy)
    return wrong_parameter(param, what[:1].lower() + what[1:])


def fill_shared(start: pb.StartFrame, given: SharedParameters) -> None:
    """Put into a start frame what `SharedParameters` has to say of it. Raises: InvalidRequest."""
    check_model_name(given.model)
    start.model = given.model
    for name in SAMPLING:
        if (value := getattr(given, name)) is not None:
            setattr(start.sampling, name, value)
    start.ignore_eos = bool(given.ignore_eos)
    start.min_output_tokens = given.min_tokens or 0
    if given.metadata or given.user or given.safety_identifier:
        check_count(given.metadata, "metadata", LABEL_COUNT_MAX)
        start.labels.update(_labels(given))
    if given.stop_token_ids:
        check_count(given.stop_token_ids, "stop_token_ids", STOP_TOKEN_ID_COUNT_MAX)
        start.stop_token_ids.extend(given.stop_token_ids)
    if given.service_tier is not None:
        if given.service_tier not in TIERS:
            raise wrong_parameter("service_tier", f"must be one of {', '.join(TIERS)}")
        start.tier = TIERS[given.service_tier]


def check_model_name(model: str) -> None:
    """Raises: InvalidRequest for a name that no model has."""
    if 0 < len(model) <= SHORT_NAME_CHARS and model.isprintable():
        return
    wrong = Violations()
    wrong.check(bool(model), "model", "must name a model; GET /v1/models tells which there are")
    wrong.check_text(model, "model")
    wrong.raise_if_any()


def check_shared(given: SharedParameters) -> None:
    """Refuse what asks for something that does not happen here. Raises: InvalidRequest."""
    if given.store:
        raise wrong_parameter("store", "nothing is stored here: leave it out or send false")
    options = given.stream_options
    if options is not None and not given.stream:
        raise wrong_parameter("stream_options", "belongs to a stream: set stream to true or leave it out")
    if options is not None and options.include_obfuscation:
        raise wrong_parameter("stream_options.include_obfuscation", "is not supported: leave it out or send false")


@functools.cache
def unserved(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(name for name, said in kind.__annotations__.items() if said == "Unserved")


def refuse_given(given: Struct, *names: str) -> None:
    """Refuse parameters of OpenAI's API that are not served, unless they ask for nothing. Raises: InvalidRequest."""
    for name in names:
        if getattr(given, name) not in (None, False, [], {}):
            raise wrong_parameter(name, "is not supported: leave it out")


def refuse_unless(given: object, param: str, taken: str, remedy: str) -> None:
    """Refuse every value of a parameter but the one that asks for what happens. Raises: InvalidRequest."""
    if given not in (None, taken):
        raise wrong_parameter(param, f"must be {taken} or left out: {remedy}")


def tier_name(start: pb.StartFrame) -> str:
    """The service tier of a request as OpenAI calls it."""
    return "flex" if start.tier == pb.SERVICE_TIER_BATCH else "default"


def _labels(given: SharedParameters) -> dict[str, str]:
    """Metadata as labels, and beside it who the end user is."""
    labels = dict(given.metadata or {})
    for name in ("user", "safety_identifier"):
        value: str | None = getattr(given, name)
        if value:
            if labels.get(name, value) != value:
                raise wrong_parameter(name, "stands in metadata as well, with another value: leave one of them out")
            labels[name] = value
    return labels


class DecodingParameters(SharedParameters, forbid_unknown_fields=True, kw_only=True):
    """Parameters that chat and plain completions have."""

    max_tokens: Int64 | None = None
    n: Int32 | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None


class ChatParameters(DecodingParameters, forbid_unknown_fields=True, kw_only=True):
    """What `client.chat.completions.create` may send."""

    messages: list[Message]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    response_format: Format | None = None
    modalities: list[str] | None = None
    tools: list[ToolParameter] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None  # not OpenAI's: as vLLM has it
    audio: Unserved = None
    function_call: Unserved = None
    functions: Unserved = None
    moderation: Unserved = None
    prediction: Unserved = None
    prompt_cache_options: Unserved = None
    web_search_options: Unserved = None
    # Of these one value asks for what happens.
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


def chat_asked(given: ChatParameters) -> Asked:
    """What a chat completion asks for. Raises: InvalidRequest."""
    check_shared(given)
    refuse_given(given, *unserved(ChatParameters))
    for name, taken in ONE_VALUE.items():
        if (value := getattr(given, name)) is not None:
            refuse_unless(value, name, *taken)
    if given.modalities not in (None, [], ["text"]):
        raise wrong_parameter("modalities", "only text is supported")
    limit_name, limit = output_limit(given)
    start = pb.StartFrame(conversation=conversation(given.messages))
    fill_shared(start, given)
    fill_thinking(start, given.chat_template_kwargs)
    if given.tools or given.tool_choice is not None:
        fill_tools(start, given.tools, given.tool_choice, given.parallel_tool_calls, wrapped=True)
    fill_decoding(start, given)
    if limit is not None:
        start.max_output_tokens = limit
    if given.top_logprobs is not None and not given.logprobs:
        raise wrong_parameter("top_logprobs", "needs logprobs to be true")
    if given.logprobs:
        start.top_logprobs = given.top_logprobs or 0
    if (wanted := response_format(given.response_format, "response_format")) is not None:
        start.response_format.CopyFrom(wanted)
    return Asked(
        starts=(start,),
        model=given.model,
        streams=bool(given.stream),
        includes_usage=given.stream_options is not None and bool(given.stream_options.include_usage),
        names=CHAT_NAMES_BY_LIMIT[limit_name],
        choice_count=1 if given.n is None else given.n,
    )


def output_limit(given: ChatParameters) -> tuple[str, int | None]:
    """The bound on output tokens, and by which name it was given. Raises: InvalidRequest if two disagree."""
    old, new = given.max_tokens, given.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise wrong_parameter("max_tokens", "is the old name of max_completion_tokens, which differs: leave it out")
    return ("max_tokens", old) if new is None and old is not None else ("max_completion_tokens", new)


def fill_decoding(start: pb.StartFrame, given: DecodingParameters) -> None:
    """Put into a start frame what chat and plain completions say alike of how tokens are chosen."""
    for name in DECODING:
        if (value := getattr(given, name)) is not None:
            setattr(start.sampling, name, value)
    if given.logit_bias:
        check_count(given.logit_bias, "logit_bias", LOGIT_BIAS_COUNT_MAX)
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    if stop:
        check_count(stop, "stop", STOP_SEQUENCE_COUNT_MAX)
        start.stop_sequences.extend(stop)
    for token_id, bias in (given.logit_bias or {}).items():
        start.sampling.logit_bias[token_id] = bias
    if given.n is not None:
        if not 1 <= given.n <= CHOICE_COUNT_MAX:  # before anything is made for each of them
            raise wrong_parameter("n", f"must be from 1 to {CHOICE_COUNT_MAX}, not {given.n}")
        start.choice_count = given.n


class CompletionParameters(DecodingParameters, forbid_unknown_fields=True, kw_only=True):
    """What `client.completions.create` may send."""

    prompt: Prompt
    best_of: Int32 | None = None
    logprobs: Int32 | None = None
    echo: bool | None = None
    suffix: Any = None


class PromptedFrames(Sequence[pb.StartFrame]):
    """One frame for each prompt, made when it is looked at: what is wrong with all of them is refused once the first was made."""

    def __init__(self, start: pb.StartFrame, prompts: Prompts) -> None:
        """start: without a prompt."""
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
        return with_prompt(self._start, self._prompts[index])


def completion_asked(given: CompletionParameters) -> Asked:
    """What a completion asks for. Raises: InvalidRequest."""
    check_shared(given)
    refuse_given(given, "echo", "suffix")
    count = 1 if given.n is None else given.n
    if given.best_of not in (None, count):
        raise wrong_parameter("best_of", "must be what n is: nothing is generated that is not returned")
    start = pb.StartFrame(max_output_tokens=MAX_TOKENS_UNSET if given.max_tokens is None else given.max_tokens)
    fill_shared(start, given)
    fill_decoding(start, given)
    if given.logprobs is not None:
        start.top_logprobs = given.logprobs
    return Asked(
        starts=PromptedFrames(start, prompts_of(given.prompt)),
        model=given.model,
        streams=bool(given.stream),
        includes_usage=given.stream_options is not None and bool(given.stream_options.include_usage),
        names=COMPLETION_NAMES,
        choice_count=count,
    )


def prompts_of(given: Prompt, param: str = "prompt", count_max: int = PROMPT_COUNT_MAX) -> Prompts:
    """The prompts: a text, texts, token ids, or lists of them. Raises: InvalidRequest for a mixture, none, or too many."""
    if isinstance(given, str):
        return [given]
    if given and not isinstance(given[0], int):
        check_count(given, param, count_max)
    kinds = set(map(type, given))  # there may be a million token ids: no loop over them
    if len(kinds) != 1:
        raise wrong_parameter(param, "must be a text, a list of texts, a list of token ids, or a list of such lists")
    return cast(Prompts, [given] if kinds == {int} else given)


def with_prompt(start: pb.StartFrame, prompt: str | Sequence[int]) -> pb.StartFrame:
    complete = pb.StartFrame()
    complete.CopyFrom(start)
    if isinstance(prompt, str):
        complete.text = prompt
    else:
        complete.token_ids.ids.extend(prompt)
    return complete


MESSAGE, CALL, RESULT = "message", "function_call", "function_call_output"
KINDS = (MESSAGE, CALL, RESULT)

# The fields of each kind; `id` and `status` are those with which an answer's items come back.
FIELDS = {
    MESSAGE: frozenset({"type", "id", "status", "role", "content", "phase"}),
    CALL: frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
    RESULT: frozenset({"type", "id", "status", "call_id", "output"}),
}

RESPONSE_NAMES = COMMON_NAMES | {
    "prompt": "input",
    "tools[].parameters_json_schema": "tools[].parameters",
    "tool_choice.single": "parallel_tool_calls",
    "response_format.json_schema": "text.format.schema",
}

LOGPROBS = "message.output_text.logprobs"


class Item(Struct, forbid_unknown_fields=True, kw_only=True):
    """One item of any kind."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    # What others have beside: refused by name.
    caller: Any = None
    namespace: Any = None
    refusal: Any = None
    summary: Any = None
    encrypted_content: Any = None


def conversation_of(items: Sequence[Item], instructions: str | None) -> tuple[pb.Conversation, dict[str, str]]:
    """The conversation for a start frame, and how errors call the fields of its turns.

    Calls belong to the assistant's turn that they follow. Raises: InvalidRequest.
    """
    if not items:
        raise wrong_parameter("input", "must hold at least one item")
    check_count(items, "input", MESSAGE_COUNT_MAX)
    turns: list[pb.Message] = []
    names: dict[str, str] = {}
    if instructions:
        turns.append(pb.Message(role=pb.ROLE_SYSTEM, content=instructions))
        names["conversation.messages[0]"] = "instructions"
    for index, item in enumerate(items):
        field = f"input[{index}]"
        kind = _kind(item, field)
        if kind == CALL:
            if not (turns and turns[-1].role == pb.ROLE_ASSISTANT):
                turns.append(pb.Message(role=pb.ROLE_ASSISTANT))
            turns[-1].tool_calls.append(_call(item, field))
            call = f"conversation.messages[{len(turns) - 1}].tool_calls[{len(turns[-1].tool_calls) - 1}]"
            names |= {f"{call}.id": f"{field}.call_id", f"{call}.arguments_json": f"{field}.arguments", call: field}
            continue
        turns.append(_message(item, field) if kind == MESSAGE else _result(item, field))
        turn = f"conversation.messages[{len(turns) - 1}]"
        names |= {f"{turn}.tool_call_id": f"{field}.call_id", turn: field}
    return pb.Conversation(messages=turns), names | {"conversation.messages": "input"}


def _kind(item: Item, field: str) -> str:
    """Which of the kinds it is, and nothing of another one. Raises: InvalidRequest."""
    kind = item.type or MESSAGE
    if kind not in KINDS:
        raise wrong_parameter(f"{field}.type", f"must be one of {', '.join(KINDS)}: other items are not supported")
    for name in Item.__struct_fields__:
        if name not in FIELDS[kind] and getattr(item, name) is not None:
            raise wrong_parameter(f"{field}.{name}", f"is not supported in an item of the type {kind}: leave it out")
    return kind


def _message(item: Item, field: str) -> pb.Message:
    role = item.role or ""
    if role not in ROLES or role == "tool":
        known = ", ".join(role for role in ROLES if role != "tool")
        raise wrong_parameter(f"{field}.role", f"must be one of {known}; what came of a call is an item {RESULT}")
    if item.content is None:
        raise wrong_parameter(f"{field}.content", "must be text")
    return pb.Message(role=ROLES[role], content=text_of(item.content, f"{field}.content"))


def _call(item: Item, field: str) -> pb.ToolCall:
    for name in ("call_id", "name", "arguments"):
        if getattr(item, name) is None:
            raise wrong_parameter(f"{field}.{name}", "is required")
    return pb.ToolCall(id=item.call_id or "", name=item.name or "", arguments_json=item.arguments or "")


def _result(item: Item, field: str) -> pb.Message:
    for name in ("call_id", "output"):
        if getattr(item, name) is None:
            raise wrong_parameter(f"{field}.{name}", "is required")
    return pb.Message(role=pb.ROLE_TOOL, tool_call_id=item.call_id or "", content=text_of(item.output or "", f"{field}.output"))


class Text(Struct, forbid_unknown_fields=True):
    """How the text of the answer is to be."""

    format: Format | None = None
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
    access_programs: Unserved = None
    background: Unserved = None
    context_management: Unserved = None
    conversation: Unserved = None
    image: Unserved = None
    max_tool_calls: Unserved = None
    moderation: Unserved = None
    prompt: Unserved = None
    prompt_cache_options: Unserved = None
    # Of these one value asks for what happens.
    previous_response_id: Any = None
    prompt_cache_retention: Any = None


def response_asked(given: ResponseParameters) -> Asked:
    """What a response asks for. Raises: InvalidRequest."""
    check_shared(given)
    check_unserved(given)
    items = [Item(role="user", content=given.input)] if isinstance(given.input, str) else given.input
    conversation, names = conversation_of(items, given.instructions)
    start = pb.StartFrame(conversation=conversation)
    fill_shared(start, given)
    fill_thinking(start, given.chat_template_kwargs)
    fill_tools(start, given.tools, given.tool_choice, given.parallel_tool_calls, wrapped=False)
    if given.max_output_tokens is not None:
        start.max_output_tokens = given.max_output_tokens
    if wants_logprobs(given):
        if given.tools:
            raise wrong_parameter("tools", "cannot be combined with log-probabilities: a call has no place for its own")
        start.top_logprobs = given.top_logprobs or 0
    if (wanted := response_format(None if given.text is None else given.text.format, "text.format")) is not None:
        start.response_format.CopyFrom(wanted)
    names = RESPONSE_NAMES | names
    return Asked((start,), given.model, streams=bool(given.stream), includes_usage=True, names=names, given=given)


def check_unserved(given: ResponseParameters) -> None:
    """Refuse what asks for something that does not happen here. Raises: InvalidRequest."""
    if given.previous_response_id is not None:
        raise wrong_parameter("previous_response_id", "responses are not stored: send the conversation so far as input")
    refuse_given(given, *unserved(ResponseParameters))
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
