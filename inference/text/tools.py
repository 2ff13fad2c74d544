"""Tools that a model may call: their forms by family, and the schemas and grammars that hold its answer to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call. parameters: the JSON schema of an object, as JSON text.

    strict: the arguments of its calls are kept to the schema also where the model is free.
    """

    name: str
    description: str
    parameters: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model has made. arguments: a JSON object, as JSON text."""

    id: str
    name: str
    arguments: str


class CallFormat(StrEnum):
    """How a model writes a call among its text.

    HERMES: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, also Qwen's. LLAMA: `{"name": …, "parameters": {…}}` as the
    whole answer, or behind `<|python_tag|>`. MISTRAL: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`. JSON: what
    `strict_calls` makes of any model: such an object, or a list of them, and nothing else.
    """

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class CallShape:
    """What a form has around its calls.

    opening, closing: around a call or a list of calls; empty if there is nothing. bare: one may begin the output without.
    textless: there is nothing beside calls, so what is left of one that the output's end has cut off is no text either.
    """

    opening: str
    closing: str = ""
    bare: bool = False
    textless: bool = False


CALL_SHAPES: Mapping[CallFormat, CallShape] = {
    CallFormat.HERMES: CallShape("<tool_call>", "</tool_call>"),
    CallFormat.LLAMA: CallShape("<|python_tag|>", bare=True),
    CallFormat.MISTRAL: CallShape("[TOOL_CALLS]"),
    CallFormat.JSON: CallShape("", bare=True, textless=True),
}

MODEL_CALL_FORMATS = (CallFormat.HERMES, CallFormat.LLAMA, CallFormat.MISTRAL)  # those that models know by themselves

# Where one of them is a special token of the tokenizer it is text all the same: without it a call could not be told from text.
MARKERS = frozenset({"<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"})


def format_in(template: str) -> CallFormat | None:
    """The form of calls that a chat template shows to its model; None if it is none of those that are known here."""
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return CallFormat.HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template and "[CALL_ID]" not in template:
        return CallFormat.MISTRAL
    if '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template):
        return CallFormat.LLAMA
    return None


CALL_COUNT_MAX = 16  # in one answer: a model that may go on would otherwise have no reason to end

# Keywords whose values hold schemas: by themselves, in a list, and by names that are the caller's.
_SCHEMA = frozenset(
    {"additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then", "unevaluatedProperties"}
)

_SCHEMAS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_SCHEMAS_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def calls_schema(tools: Sequence[Tool], *, single: bool, arguments_key: str) -> str:
    """Of one call of these tools as an object, or if several are allowed of a list of them; JSON text.

    Each tool's schema stands under `$defs`, and its references are led there.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, arguments_key: {"$ref": f"#/$defs/tool_{index}"}},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    definitions = {
        f"tool_{index}": _moved(json.loads(tool.parameters), f"#/$defs/tool_{index}") for index, tool in enumerate(tools)
    }
    one: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if single:
        return json.dumps({**one, "$defs": definitions}, ensure_ascii=False)
    return json.dumps(
        {"type": "array", "items": one, "minItems": 1, "maxItems": CALL_COUNT_MAX, "$defs": definitions}, ensure_ascii=False
    )


def _moved(schema: Any, place: str) -> Any:
    """The same schema with its references to itself led to another place."""
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            moved[key] = {name: _moved(each, place) for name, each in value.items()}
        elif key in _SCHEMAS and isinstance(value, list):
            moved[key] = [_moved(each, place) for each in value]
        else:
            moved[key] = _moved(value, place) if key in _SCHEMA else value
    return moved


# Blanks between JSON's tokens: room for an indented answer, but an end to a model that would write blanks for ever.
JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A]{0,24}", "lenient": False}
ANYTHING = '{"type": "object"}'


def strict_calls(form: CallFormat, tools: Sequence[Tool], *, single: bool, token_id: Callable[[str], int | None]) -> str:
    """The grammar. single: at most one call, which ends the answer. token_id: of a marker, None if it is no token of its own."""
    kept = [tool if tool.strict else replace(tool, parameters=ANYTHING) for tool in tools]
    schema = calls_schema(kept, single=True, arguments_key="parameters" if form is CallFormat.LLAMA else "arguments")
    call = json.dumps({**json.loads(schema), "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
    rest = CALL_COUNT_MAX - 1
    match form:
        case CallFormat.HERMES:
            opening, opening_rules = _opening("<tool_call>", token_id)
            closing = _marker("</tool_call>", token_id)
            more = "" if single else " TEXT"
            start = f"start: TEXT | called{more}\ncalled: one" + ("" if single else f" | one (one){{0,{rest}}}")
            rules = f"one: {opening} WS call WS {closing}\n{opening_rules}"
            first = ""
        case CallFormat.LLAMA:
            tag = token_id("<|python_tag|>")  # all of these models have it; where it is none it is no opening
            start = "start: TEXT | WS called" + ("" if tag is None else f" | TEXT <[{tag}]> WS called")
            rules = "called: call" + ("" if single else f' (WS ";" WS call){{0,{rest}}}') + "\n"
            first = r"[ \t\r\n]*[{\[](.|\n)*"  # what begins like this is a call in this form, or nothing
        case CallFormat.MISTRAL:
            opening, opening_rules = _opening("[TOOL_CALLS]", token_id)
            start = f"start: TEXT | {opening} WS called"
            rules = 'called: "[" WS call' + ("" if single else f' (WS "," WS call){{0,{rest}}}') + f' WS "]"\n{opening_rules}'
            first = ""
        case _:
            raise AssertionError(f"{form} is no form that a model writes by itself")
    return f"%llguidance {{}}\n{start}\n{rules}{_text(form, first)}call: %json {call}\nWS: /[ \\n]{{0,8}}/\n"


def _text(form: CallFormat, first: str) -> str:
    """Any text without an opening in it, and that does not begin as a call does."""
    marker = {CallFormat.HERMES: "<tool_call>", CallFormat.LLAMA: "<|python_tag|>", CallFormat.MISTRAL: "[TOOL_CALLS]"}[form]
    without = rf"~/(.|\n)*{_escaped(marker)}(.|\n)*/"
    return f"TEXT: /(.|\\n)*/ & {without}" + (f" & ~/{first}/" if first else "") + "\n"


def _opening(marker: str, token_id: Callable[[str], int | None]) -> tuple[str, str]:
    """What stands before a call, with the text in front of it, and the rules that this needs."""
    known = token_id(marker)
    if known is not None:
        return f"TEXT <[{known}]>", ""
    return "opened", f"opened[lazy]: /(.|\\n)*{_escaped(marker)}/\n"


def _marker(marker: str, token_id: Callable[[str], int | None]) -> str:
    known = token_id(marker)
    return json.dumps(marker) if known is None else f"<[{known}]>"


def _escaped(marker: str) -> str:
    return re.escape(marker).replace("/", r"\/")
