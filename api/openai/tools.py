"""Tools of requests: functions, also in namespaces, the tool choice, and tool calls.

The chat API nests some objects whose fields the responses API has at the top level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Raw, Struct
from weir.v1 import inference_service_pb2 as pb

from api.generation.parsing.conversation import CALL_COUNT_MAX
from api.generation.parsing.tools import TOOL_COUNT_MAX
from api.openai.error_responses import check_count, invalid_parameter
from api.openai.formats import ABSENT

FUNCTION = "function"
NAMESPACE = "namespace"  # type of a group of functions in the responses API
JOINT = "__"  # between a namespace and a function's name
NAME_CHARS_MAX = 64  # of a function's name
DIGEST_CHARS = 8  # at the end of a longer name
MODES: Mapping[str, pb.ToolMode.ValueType] = {
    "none": pb.TOOL_MODE_NONE,
    "auto": pb.TOOL_MODE_AUTO,
    "required": pb.TOOL_MODE_REQUIRED,
}


class Function(Struct, forbid_unknown_fields=True):
    """Function in the format of the chat API."""

    name: str
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None


class MemberTool(Struct, forbid_unknown_fields=True):
    """Tool in a namespace."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None


class ToolParameter(Struct, forbid_unknown_fields=True):
    """Tool of either API. `tools` are those in a namespace, which only the responses API has."""

    type: str
    function: Function | None = None
    name: str | None = None
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None
    tools: list[MemberTool] | None = None


class FunctionName(Struct, forbid_unknown_fields=True):
    """Name of a function in the format of the chat API."""

    name: str


class NamedChoice(Struct, forbid_unknown_fields=True):
    """Tool choice of either API that names the function to call, and its namespace, if any."""

    type: str
    function: FunctionName | None = None
    name: str | None = None
    namespace: str | None = None


class CalledFunction(Struct, forbid_unknown_fields=True):
    """Called function in the format of the chat API."""

    name: str
    arguments: str


class CallParameter(Struct, forbid_unknown_fields=True):
    """Tool call of an earlier response, in the format of the chat API."""

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
    """Set the tools in a start frame, `wrapped` as in the chat API. Raises: InvalidRequest.

    Without tools, the choices `none` and `auto` are accepted and have no effect.
    """
    check_count(tools, "tools", TOOL_COUNT_MAX)
    for index, tool in enumerate(tools or ()):
        field = f"tools[{index}]"
        function = _function(tool, field, wrapped=wrapped)
        parameters = (
            b"" if bytes(function.parameters) == bytes(ABSENT) else bytes(function.parameters)
        )
        start.tools.add(
            name=function.name,
            description=function.description or "",
            parameters_json_schema=parameters.decode(),
            strict=bool(function.strict),
        )
    if not start.tools:
        if choice not in (None, "none", "auto"):
            raise invalid_parameter("tool_choice", "requires tools: leave it out without tools")
        return
    if isinstance(choice, NamedChoice):
        start.tool_choice.name = _name(choice, wrapped=wrapped)
    else:
        if choice not in (None, *MODES):
            raise invalid_parameter(
                "tool_choice", f"must be one of {', '.join(MODES)}, or name a function"
            )
        start.tool_choice.mode = MODES[choice or "auto"]
    start.tool_choice.single = parallel is False


@dataclass(slots=True)
class Namespaces:
    """Functions of the responses API, by the names that the model sees.

    To the model, a function in a namespace is one tool whose name joins both; calls name them
    separately. `tools` are all functions. `members` maps the joined name of a function in a
    namespace to both parts. `names` maps fields of a start frame to the parameters of the request
    that they came from.
    """

    tools: list[ToolParameter] = field(default_factory=list)
    members: dict[str, tuple[str, str]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[ToolParameter] | None) -> Namespaces:
        """Convert the tools of a request. Raises: InvalidRequest."""
        check_count(tools, "tools", TOOL_COUNT_MAX)
        found = cls()
        for index, tool in enumerate(tools or ()):
            if tool.type == NAMESPACE:
                found._add_members(tool, f"tools[{index}]")
            else:
                found._add(tool, f"tools[{index}]")
        return found

    def chosen(self, choice: Choice | None) -> Choice | None:
        """Replace the name in a tool choice by the name that the model sees."""
        if not isinstance(choice, NamedChoice) or not choice.name:
            return choice
        if choice.namespace:
            return NamedChoice(choice.type, name=name_in(choice.namespace, choice.name))
        alike = [flat for flat, (_, name) in self.members.items() if name == choice.name]
        is_plain = any(tool.name == choice.name for tool in self.tools)
        return NamedChoice(choice.type, name=alike[0]) if alike and not is_plain else choice

    def _add(self, tool: ToolParameter, base: str) -> None:
        number = len(self.tools)
        self.tools.append(tool)
        self.names |= {
            f"tools[{number}]": base,
            f"tools[{number}].parameters_json_schema": f"{base}.parameters",
        }

    def _add_members(self, space: ToolParameter, base: str) -> None:
        if not space.name:
            raise invalid_parameter(f"{base}.name", "is required")
        for index, each in enumerate(space.tools or ()):
            member = f"{base}.tools[{index}]"
            if each.type != FUNCTION:
                continue
            if not each.name:
                raise invalid_parameter(f"{member}.name", "is required")
            flat = name_in(space.name, each.name)
            self.members[flat] = (space.name, each.name)
            self._add(
                ToolParameter(FUNCTION, None, flat, each.description, each.parameters, each.strict),
                member,
            )


def name_in(space: str, name: str) -> str:
    """Join the names of a namespace and its function into the name that the model sees."""
    flat = f"{space}{'' if space.endswith(JOINT) else JOINT}{name}"
    if len(flat) <= NAME_CHARS_MAX:
        return flat
    return flat[: NAME_CHARS_MAX - DIGEST_CHARS] + sha256(flat.encode()).hexdigest()[:DIGEST_CHARS]


def echoed_tools(tools: Sequence[ToolParameter] | None) -> list[dict[str, Any]]:
    """Convert the tools of the responses API to what a response repeats."""
    return [
        {
            "type": NAMESPACE,
            "name": tool.name,
            "description": tool.description,
            "tools": [_echoed(each) for each in tool.tools or () if each.type == FUNCTION],
        }
        if tool.type == NAMESPACE
        else _echoed(tool)
        for tool in tools or ()
    ]


def _echoed(tool: ToolParameter | MemberTool) -> dict[str, Any]:
    return {
        "type": FUNCTION,
        "name": tool.name,
        "description": tool.description,
        "parameters": msgspec.json.decode(tool.parameters),
        "strict": bool(tool.strict),
    }


def echoed_tool_choice(choice: Choice | None) -> str | dict[str, str]:
    """Convert the tool choice of the responses API to what a response repeats."""
    if not isinstance(choice, NamedChoice):
        return choice or "auto"
    space = {"namespace": choice.namespace} if choice.namespace else {}
    return {"type": FUNCTION, "name": choice.name or ""} | space


def call_messages(calls: Sequence[CallParameter], field: str) -> list[pb.ToolCall]:
    """Convert the tool calls of a chat message of the assistant. Raises: InvalidRequest."""
    check_count(calls, field, CALL_COUNT_MAX)
    messages = []
    for index, call in enumerate(calls):
        if call.type != "function" or call.function is None:
            raise invalid_parameter(
                f"{field}[{index}].type", "must be function, with the function beside it"
            )
        messages.append(
            pb.ToolCall(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
        )
    return messages


def _function(tool: ToolParameter, field: str, *, wrapped: bool) -> Function:
    if tool.type != "function":
        raise invalid_parameter(
            f"{field}.type",
            f"must be function: tools of the type {tool.type[:40]!r} are not supported",
        )
    if wrapped:
        if tool.function is None:
            raise invalid_parameter(f"{field}.function", "is required")
        if (
            tool.name is not None
            or tool.description is not None
            or bytes(tool.parameters) != bytes(ABSENT)
        ):
            raise invalid_parameter(
                f"{field}.function", "must hold name, description and parameters: put them there"
            )
        return tool.function
    if tool.function is not None:
        raise invalid_parameter(
            f"{field}.function", "is of the chat API: put its members beside type"
        )
    if tool.name is None:
        raise invalid_parameter(f"{field}.name", "is required")
    return Function(tool.name, tool.description, tool.parameters, tool.strict)


def _name(choice: NamedChoice, *, wrapped: bool) -> str:
    if choice.namespace:
        raise invalid_parameter(
            "tool_choice.namespace", "is of the responses API: leave it out here"
        )
    name = (None if choice.function is None else choice.function.name) if wrapped else choice.name
    if choice.type != "function" or not name:
        where = "function.name" if wrapped else "name"
        raise invalid_parameter("tool_choice", f"must have the type function and a {where}")
    return name
