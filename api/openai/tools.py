"""Tools as OpenAI's APIs write them: functions, and nothing but functions. The chat API wraps what the responses API does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct
from weir.v1 import inference_service_pb2 as pb

from api.generation.conversation import CALL_COUNT_MAX
from api.generation.tools import TOOL_COUNT_MAX
from api.openai.parameters import check_count
from api.openai.refusals import wrong_parameter

ABSENT = Raw(b"null")
MODES: Mapping[str, pb.ToolMode.ValueType] = {
    "none": pb.TOOL_MODE_NONE,
    "auto": pb.TOOL_MODE_AUTO,
    "required": pb.TOOL_MODE_REQUIRED,
}


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
