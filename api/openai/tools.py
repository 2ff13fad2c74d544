"""Tools as OpenAI's APIs write them: functions, and nothing but functions. The chat API wraps what the responses API does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct
from weir.v1 import inference_service_pb2 as pb

from api.generation.conversation import CALL_COUNT_MAX
from api.generation.tools import TOOL_COUNT_MAX
from api.openai.refusals import check_count, wrong_parameter

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
