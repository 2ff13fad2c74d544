"""Handling of request fields that belong to other servers, as listed in `dialects.py`.

A field takes effect as a parameter of this API, changes nothing, or is refused with a remedy. The
same goes for parameters of the other APIs, and for names that resemble a parameter. Any other field
is a hint or telemetry: it is ignored, and the header `weir-ignored-parameters` names it.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeGuard

import msgspec
from msgspec import Struct
from msgspec.inspect import ListType, StructType, UnionType

from api.core.errors import FieldViolation, InvalidRequest
from api.openai.dialects import ABLE, LIMIT, NEUTRAL, OTHER_FORMS, field_of, is_neutral
from api.openai.effects import Effect, Field
from api.openai.error_responses import invalid_parameter, parameter
from api.openai.history import convert_history

IGNORED_HEADER = "weir-ignored-parameters"
NAMES_MAX = 20  # in the header
# Different names that a body may bring beside the parameters; each is compared with all of these.
UNKNOWN_COUNT_MAX = 64
SIMILAR_CHARS_MAX = 32  # a longer name resembles no parameter
SIMILARITY_MIN = 0.85  # "temprature" and "temperature" have 0.95
VISIBLE = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)
EMPTY: tuple[object, ...] = (None, False, [], {}, "")  # requests nothing of an idle parameter

NO_PARAMETER = "is not a parameter of this API; leave it out"
STRICT_REMEDY = (
    "is not a parameter of this API; leave it out, since strict=1 in the URL or the key's"
    " strict_parameters refuses unknown ones"
)
# Objects whose members all direct the answer, by path
CLOSED = frozenset(
    {
        "chat_template_kwargs",
        "output_config.format",
        "reasoning",
        "response_format",
        "text.format",
        "thinking",
        "tool_choice",
    }
)
# Unknown members that direct the answer, by path: values that change nothing
DIRECTING: Mapping[str, tuple[object, ...]] = {
    "messages[].images": (),  # Ollama
    "messages[].partial": (False,),  # DashScope, Moonshot
    "messages[].prefix": (False,),  # Mistral, DeepSeek
    "messages[].thinking": (),  # Ollama, if it is not a text
    "messages[].tool_plan": (),  # Cohere
    "messages[].tools": (),  # SGLang
    "messages[].weight": (1,),  # OpenAI's training data
    "reasoning.exclude": (False,),  # OpenRouter
}
# Edits of a conversation that keep all of it
KEPT_EDIT = {"type": "clear_thinking_20251015", "keep": "all"}
FORMAT_PLACES: Mapping[str, tuple[str, ...]] = {
    "chat": ("response_format",),
    "completions": ("response_format",),
    "responses": ("text", "format"),
    "messages": ("output_config", "format"),
}
ALLOWED_TOOLS = "allowed_tools"
# A float is encoded in 40 ns, so in parts of this many elements nothing waits longer than 3 ms.
ENCODED_COUNT_MAX = 65_536
ENTERED_LEVELS, ENTERED_COUNT_MAX = 4, 256  # the objects with the parameters, not free ones
NO_LIMIT = -1  # as a limit on tokens, as in llama.cpp
HIDES = "tool_choice"  # its value `none` changes nothing without tools
Tree = dict[str, Any]

STRUCTURED: Mapping[str, Callable[[Any], Tree]] = {
    "json": lambda value: {"type": "json", "value": value},
    "regex": lambda value: {"type": "regex", "value": value},
    "choice": lambda value: {"type": "choice", "value": value},
    "grammar": lambda value: {"type": "grammar", "value": value},
    "json_object": lambda _: {"type": "json_object"},
}
STRUCTURED_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "json_object": (False,),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "disable_fallback": (False, True),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Known members of a JSON value: `members` of an object by name, or `element` of a list.

    `optional` are the members that have a default.
    """

    members: Mapping[str, Shape] | None = None
    element: Shape | None = None
    optional: frozenset[str] = frozenset()


@dataclass(slots=True)
class Notes:
    """Fields of a body that are not parameters of its API.

    `names` are ignored parameters, each once, in the order of the body. `sent` maps parameters of
    this API to the names that the client used instead. If `strict`, nothing may be ignored.
    """

    strict: bool = False
    names: dict[str, None] = field(default_factory=dict)
    sent: dict[str, str] = field(default_factory=dict)

    def add(self, name: str) -> None:
        """Add the name of an ignored parameter. Raises: InvalidRequest if there are too many."""
        self.names[name] = None
        check_unknown_count(len(self.names))

    def ignore(self, name: str) -> None:
        """Ignore an unknown parameter. Raises InvalidRequest if strict or if there are too many."""
        if self.strict:
            raise invalid_parameter(name[:200], STRICT_REMEDY)
        self.add(name)

    def headers(self) -> dict[str, str]:
        """Build the header that names the ignored parameters; empty if there are none."""
        shown = [name if VISIBLE.fullmatch(name) else "?" for name in islice(self.names, NAMES_MAX)]
        if (more_count := len(self.names) - len(shown)) > 0:
            shown.append(f"and {more_count} more")
        return {IGNORED_HEADER: ", ".join(shown)} if shown else {}

    def as_sent(self, error: InvalidRequest) -> InvalidRequest:
        """Replace the parameters in an error by the names that the client used."""
        if not self.sent:
            return error
        return InvalidRequest(
            [
                FieldViolation(parameter(each.field, self.sent), each.description)
                for each in error.violations
            ]
        )

    def names_as_sent(self, names: Mapping[str, str]) -> Mapping[str, str]:
        """Replace parameters, given by field of a start frame, by the names the client used."""
        if not self.sent:
            return names
        return self.sent | {frame: parameter(name, self.sent) for frame, name in names.items()}


def check_unknown_count(count: int) -> None:
    """Limit the number of unknown parameters. Raises: InvalidRequest."""
    if count > UNKNOWN_COUNT_MAX:
        raise invalid_parameter(
            None,
            f"the body may have {UNKNOWN_COUNT_MAX} different parameters that this API does not"
            f" know, got {count} or more: leave them out",
        )


def is_nothing(value: object) -> bool:
    """Return whether a value is null or empty, which means that the parameter is not set."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def is_limit(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer, and so can be a limit on tokens."""
    return isinstance(value, int) and not isinstance(value, bool)


def smaller_limit(one: int, other: int | None) -> int:
    """Return the smaller of two limits on tokens, which satisfies both; -1 means no limit."""
    return one if other is None else min(one, other, key=lambda limit: (limit == NO_LIMIT, limit))


def is_hollow(value: object) -> bool:
    """Return whether a value is null or empty, or an object whose members are all null."""
    return is_nothing(value) or (
        isinstance(value, dict) and all(each is None for each in value.values())
    )


def as_known(
    body: bytes, kind: type[Struct], api: str, other_names: frozenset[str], notes: Notes
) -> bytes:
    """Convert the body so that it has only parameters of its API.

    `api` is its name in `dialects.py`. `other_names` are parameters of the other APIs. Raises
    InvalidRequest for a field that would change the answer and has no equivalent;
    msgspec.DecodeError, RecursionError.
    """
    tree = msgspec.json.decode(body)
    shape = shape_of(kind)
    if isinstance(tree, dict) and shape.members is not None:
        unknown = [name for name in tree if name not in shape.members]
        check_unknown_count(len(unknown))
        forms = OTHER_FORMS.get(api, {})
        for name in [name for name in shape.optional if name in tree and api]:
            is_form = is_neutral(tree[name], forms.get(name, ()))
            if is_hollow(tree[name]) or (is_form and not (name == HIDES and tree.get("tools"))):
                del tree[name]
        reader = Reader(tree, shape.members, api, other_names, notes)
        for name in unknown:
            reader.read(name, tree.pop(name))
        convert_history(tree, api, notes.ignore)
        _restrict_tools(tree)
        if not notes.strict:  # otherwise the types refuse them, with their place
            for name, value in tree.items():
                _strip(value, shape.members[name], name, notes)
    return encoded(tree)


def encoded(value: object, levels: int = ENTERED_LEVELS) -> bytes:
    """Encode a value as JSON; long lists in parts, since one call would block other threads."""
    if isinstance(value, list) and len(value) > ENCODED_COUNT_MAX:
        parts = (
            msgspec.json.encode(value[start : start + ENCODED_COUNT_MAX])[1:-1]
            for start in range(0, len(value), ENCODED_COUNT_MAX)
        )
        return b"[" + b",".join(parts) + b"]"
    if isinstance(value, dict) and levels and len(value) <= ENTERED_COUNT_MAX:
        members = (
            msgspec.json.encode(name) + b":" + encoded(each, levels - 1)
            for name, each in value.items()
        )
        return b"{" + b",".join(members) + b"}"
    return msgspec.json.encode(value)


class Reader:
    """Converts the fields of one body that its API does not have, one by one."""

    def __init__(
        self,
        tree: Tree,
        members: Mapping[str, Shape],
        api: str,
        other_names: frozenset[str],
        notes: Notes,
    ) -> None:
        """`tree` has the parameters of the API; the effects of other fields are added to it."""
        self._tree = tree
        self._members = members
        self._api = api
        self._other_names = other_names
        self._notes = notes

    def read(self, name: str, value: Any) -> None:
        """Apply the effect of a field, or ignore the field. Raises: InvalidRequest."""
        if is_hollow(value):
            return
        entry = field_of(name, self._api)
        neutral = NEUTRAL.get(name, ()) + (() if entry is None else entry.neutral)
        if is_neutral(value, neutral):
            return
        if entry is None:
            self._read_unlisted(name)
            return
        if self._api not in ABLE.get(entry.effect, {self._api}):
            raise invalid_parameter(name, NO_PARAMETER)
        match entry.effect:
            case Effect.REFUSED:
                raise invalid_parameter(name, f"is not supported: {entry.note}")
            case Effect.HINT:
                self._notes.ignore(name)
            case Effect.KEPT:
                check_kept(value, name)
                self._notes.ignore(name)
            case Effect.ALIAS:
                self._rename(name, entry, value)
            case Effect.FORMAT:
                self._format(name, value)
            case Effect.THINKING:
                self._think(name, value)
            case Effect.GREEDY:
                self._sample(name, value)

    def _read_unlisted(self, name: str) -> None:
        if name in self._other_names:
            raise invalid_parameter(name, "is a parameter of another API; leave it out")
        if len(name) <= SIMILAR_CHARS_MAX and (
            similar := difflib.get_close_matches(name, self._members, n=1, cutoff=SIMILARITY_MIN)
        ):
            raise invalid_parameter(
                name[:200], f"is not a parameter of this API; did you mean {similar[0]}?"
            )
        self._notes.ignore(name)

    def _rename(self, name: str, entry: Field, value: Any) -> None:
        target = next((each for each in entry.means if each in self._members), None)
        if target is None:
            raise invalid_parameter(name, NO_PARAMETER)
        if "stop" in entry.means:  # one text means a list of it
            value = [value] if isinstance(value, str) else value
            if isinstance(given := self._tree.get(target), str):
                self._tree[target] = [given]
        given = self._tree.get(target)
        if entry.means == LIMIT and is_limit(given) and is_limit(value):
            if smaller_limit(given, value) != given:
                self._tree[target] = value
                self._notes.sent[target] = name
            return
        self._set(target, name, value)

    def _set(self, target: str, name: str, value: Any) -> None:
        """Set a parameter or a member of one. Raises InvalidRequest if it has a different value."""
        location = self._tree
        *outer, last = target.split(".")
        for each in outer:
            if not isinstance(inner := location.get(each), dict):
                if inner is not None:  # refused later for its type
                    return
                inner = location[each] = {}
            location = inner
        given = location.get(last)
        if given is not None and (
            given != value or isinstance(given, bool) != isinstance(value, bool)
        ):
            other = self._notes.sent.get(target, target)
            raise invalid_parameter(
                name, f"differs from {other}, which means the same: leave one of them out"
            )
        if given is None:
            location[last] = value
            self._notes.sent[target] = name

    def _format(self, name: str, value: Any) -> None:
        """Set the format of the answer. Raises InvalidRequest if another format is set."""
        found = format_of(name, value)
        if found is None:
            return
        name, requested = found
        location = FORMAT_PLACES[self._api]
        path = ".".join(location)
        outer = self._tree
        for each in location[:-1]:
            if not isinstance(inner := outer.get(each), dict):
                inner = outer[each] = {}
            outer = inner
        given = outer.get(location[-1])
        if not is_nothing(given) and given != {"type": "text"}:
            other = self._notes.sent.get(path, path)
            raise invalid_parameter(
                name, f"cannot be combined with {other}: send one format of the answer"
            )
        outer[location[-1]] = requested
        sent = {"": name, ".value": name, ".type": f"{name}.type" if name == "grammar" else name}
        self._notes.sent |= {path + end: shown for end, shown in sent.items()}

    def _sample(self, name: str, value: Any) -> None:
        """Apply `do_sample`: false means temperature 0."""
        temperature = self._tree.get("temperature")
        if not isinstance(temperature, int | float | None):  # refused later for its type
            return
        if value is False:
            if temperature not in (None, 0):
                raise invalid_parameter(
                    name,
                    f"is false, which means temperature 0, and temperature is {temperature:g}:"
                    " leave one of them out",
                )
            if temperature is None:
                self._set("temperature", name, 0)
        elif value is not True:
            raise invalid_parameter(name, "must be true or false")
        elif temperature in (None, 0):
            raise invalid_parameter(name, "requires a temperature above 0: send temperature")

    def _think(self, name: str, value: Any) -> None:
        """Apply a field that switches thinking, or sets its effort or budget."""
        match name:
            case "think" if isinstance(value, str):
                self._set_effort(name, value)
            case "enable_thinking" | "think":
                self._switch(name, value)
            case "disable_reasoning":
                self._switch(name, value is not True if isinstance(value, bool) else value)
            case "thinking" if not isinstance(value, dict):
                self._switch(name, value)
            case _:
                self._think_by_members(name, value)

    def _think_by_members(self, name: str, members: Any) -> None:
        """Apply the members of `thinking`, `reasoning` or `chat_template_kwargs`."""
        if not isinstance(members, dict):
            raise invalid_parameter(name, "must be an object")
        for each, value in members.items():
            path = f"{name}.{each}"
            match each:
                case _ if is_nothing(value) or is_neutral(value, DIRECTING.get(path, ())):
                    pass
                case "type" if name == "thinking":
                    if value in ("enabled", "disabled"):
                        self._switch(path, value == "enabled")
                    elif value not in ("adaptive", "auto"):
                        raise invalid_parameter(path, "must be enabled, disabled or adaptive")
                case "enabled" if name == "reasoning":
                    self._switch(path, value)
                case "enable_thinking" | "thinking" if name == "chat_template_kwargs":
                    self._switch(path, value)
                case "budget_tokens" if name == "thinking":
                    self._set_budget(path, value)
                case "max_tokens" if name == "reasoning":
                    self._set_budget(path, value)
                case "effort" if name == "reasoning":
                    self._set_effort(path, value)
                case "summary" if name == "reasoning":
                    self._notes.ignore(path)
                case _:
                    raise invalid_parameter(path[:200], NO_PARAMETER)

    def _switch(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise invalid_parameter(name, "must be true or false")
        if self._api == "messages":
            self._set("thinking.type", name, "enabled" if value else "disabled")
            return
        variables = self._tree.get("chat_template_kwargs")
        other = "thinking"  # the other name of the switch
        is_other = isinstance(variables, dict) and variables.get(other) is not None
        self._set(f"chat_template_kwargs.{other if is_other else 'enable_thinking'}", name, value)

    def _set_effort(self, name: str, value: Any) -> None:
        targets = {"chat": "reasoning_effort", "responses": "reasoning.effort"}
        if self._api not in targets:
            raise invalid_parameter(name, NO_PARAMETER)
        self._set(targets[self._api], name, value)

    def _set_budget(self, name: str, value: Any) -> None:
        if "thinking_token_budget" not in self._members:
            raise invalid_parameter(name, NO_PARAMETER)
        self._set("thinking_token_budget", name, value)


def format_of(name: str, value: Any) -> tuple[str, Tree] | None:
    """Convert a format of another server to this API's; return the name it was sent by with it.

    Returns None if the field sets no format. Raises: InvalidRequest.
    """
    kinds: Mapping[str, str] = {
        "guided_json": "json",
        "json_schema": "json",
        "guided_regex": "regex",
        "regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
        "ebnf": "grammar",
    }
    match name, value:
        case "structured_outputs", dict():
            return _structured(value)
        case "structured_outputs", _:
            raise invalid_parameter(name, "must be an object")
        case "format", "json":
            return name, {"type": "json_object"}
        case "format", dict():
            return name, {"type": "json", "value": value}
        case "format", _:
            raise invalid_parameter(name, "must be json or a JSON schema")
        case (("grammar" | "output_format"), dict()):
            return name, value
        case "output_format", _:
            raise invalid_parameter(name, "must be an object")
        case "grammar", _:
            return name, {"type": "grammar", "value": value}
    return name, {"type": kinds[name], "value": value}


def _structured(members: Tree) -> tuple[str, Tree] | None:
    """Convert the format in vLLM's `structured_outputs`. Raises: InvalidRequest."""
    found: tuple[str, Tree] | None = None
    for name, value in members.items():
        path = f"structured_outputs.{name}"
        if is_nothing(value) or is_neutral(value, STRUCTURED_NEUTRAL.get(name, ())):
            continue
        if name not in STRUCTURED:
            raise invalid_parameter(
                path[:200], f"is not supported: send one of {', '.join(STRUCTURED)}"
            )
        if found is not None:
            raise invalid_parameter(
                path, f"cannot be combined with {found[0]}: send one format of the answer"
            )
        found = path, STRUCTURED[name](value)
    return found


def _restrict_tools(tree: Tree) -> None:
    """Apply a tool choice of type `allowed_tools`: remove other tools. Raises: InvalidRequest."""
    choice = tree.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != ALLOWED_TOOLS:
        return
    nested = ALLOWED_TOOLS in choice  # in the form of the chat API
    location = f"tool_choice.{ALLOWED_TOOLS}" if nested else "tool_choice"
    members = choice[ALLOWED_TOOLS] if nested else choice
    allowed = members.get("tools") if isinstance(members, dict) else None
    if not isinstance(allowed, list):
        raise invalid_parameter(f"{location}.tools", "must be a list of tools")
    tools = tree.get("tools")
    offered = {_name_of(tool): tool for tool in (tools if isinstance(tools, list) else ())}
    for index, tool in enumerate(allowed):
        if (name := _name_of(tool)) is not None and name not in offered:
            raise invalid_parameter(f"{location}.tools[{index}]", "must be one of tools")
    names = {_name_of(tool) for tool in allowed} - {None}
    tree["tools"] = [tool for name, tool in offered.items() if name in names]
    tree["tool_choice"] = members.get("mode") or "auto"


def _name_of(tool: object) -> str | None:
    """Return the name of a function in the format of either API; None for other tools."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return None
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else None


def check_kept(value: object, name: str) -> None:
    """Check that `context_management` keeps the whole conversation. Raises: InvalidRequest."""
    edits = value.get("edits") if isinstance(value, dict) else value
    others = [each for each in value if each != "edits"] if isinstance(value, dict) else []
    if others or not (edits is None or isinstance(edits, list)):
        raise invalid_parameter(name, "is not supported: leave it out")
    for index, edit in enumerate(edits or ()):
        if edit != KEPT_EDIT:
            named = edit.get("type") if isinstance(edit, dict) else None
            kind = named[:64] if isinstance(named, str) else "this edit"
            raise invalid_parameter(
                name,
                f"edits[{index}]: {kind} is not supported, since conversations are not shortened:"
                " leave it out, or send clear_thinking_20251015 with keep: all",
            )


def _strip(value: Any, shape: Shape, path: str, notes: Notes) -> None:
    """Remove unknown members of a value recursively. Raises InvalidRequest if one matters."""
    if isinstance(value, list) and shape.element is not None:
        for each in value:
            _strip(each, shape.element, f"{path}[]", notes)
    elif isinstance(value, dict) and shape.members is not None:
        for name in [name for name in value if name not in shape.members]:
            given = value.pop(name)
            location = f"{path}.{name}"
            if is_nothing(given) or is_neutral(given, DIRECTING.get(location, ())):
                continue
            if path in CLOSED or location in DIRECTING:
                raise invalid_parameter(location[:200], NO_PARAMETER)
            notes.ignore(location)
        for name, each in value.items():
            _strip(each, shape.members[name], f"{path}.{name}", notes)


@functools.cache
def shape_of(kind: type[Struct]) -> Shape:
    """Build the shape of a body from its type."""
    return _shape(msgspec.inspect.type_info(kind))


def _shape(info: msgspec.inspect.Type) -> Shape:
    match info:
        case StructType(fields=fields):
            return Shape(
                {each.encode_name: _shape(each.type) for each in fields},
                optional=frozenset(each.encode_name for each in fields if not each.required),
            )
        case ListType(item_type=item):
            return Shape(element=_shape(item))
        case UnionType(types=types):
            shapes = [_shape(each) for each in types]
            return Shape(
                next((each.members for each in shapes if each.members is not None), None),
                next((each.element for each in shapes if each.element is not None), None),
            )
    return Shape()
