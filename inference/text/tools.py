"""Tool calls: formats by model family, and the schemas and grammars that constrain them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations, product
from typing import Any
from urllib.parse import unquote

# Around a marked call: code points that no text contains, since Unicode reserves them for this.
CALL_MARKS = "\ufdd0", "\ufdd1"
WITHOUT_MARKS = dict.fromkeys(map(ord, CALL_MARKS))
# Treated as text even if they are special tokens: otherwise calls could not be told from text.
MARKERS = frozenset({"<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"})
CALL_COUNT_MAX = 16  # per output: bounds models that repeat calls
# Keywords whose values are a schema, a list of schemas, or schemas by user-defined names.
_SCHEMA = frozenset(
    {
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedProperties",
    }
)
_SCHEMAS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_SCHEMAS_BY_NAME = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
# Whitespace between JSON tokens: at most one space. Small models repeat blanks where they may, and
# the caller pays for them.
JSON_OPTIONS = {"whitespace_pattern": r"[\x20]?", "lenient": False}
ANYTHING = '{"type": "object"}'
PROOF_STEPS_MAX = 10_000  # pairs of schemas compared, some 10 ms; beyond it nothing is proven
PROOF_DEPTH_MAX = 4  # references and properties within each other
_TYPES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of an object, as text.

    With `strict`, the arguments must match the schema even where the model is otherwise
    unconstrained.
    """

    name: str
    description: str
    parameters: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call made by a model.

    `arguments` is a JSON object as text, or a JSON string if the model wrote no object.
    """

    id: str
    name: str
    arguments: str


class CallFormat(StrEnum):
    """Syntax of calls in a model's output.

    HERMES: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, also used by Qwen.
    LLAMA: `{"name": …, "parameters": {…}}` as the whole output, or after `<|python_tag|>`.
    MISTRAL: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`.
    HARMONY: messages to `functions.NAME`, as of GPT-OSS. Only token ids tell them from text, so
    they are marked where the output is decoded, see `marked_call`.
    JSON: only such an object or a list of them, as constrained by a schema for any model.
    """

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"
    HARMONY = "harmony"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class CallShape:
    """Delimiters of calls in one format.

    `opening` and `closing` are around a call or a list of calls, and may be empty. With `bare`, a
    call may begin the output without `opening`. With `textless`, the output consists of calls only,
    so a truncated call is not text.
    """

    opening: str
    closing: str = ""
    bare: bool = False
    textless: bool = False


CALL_SHAPES: Mapping[CallFormat, CallShape] = {
    CallFormat.HERMES: CallShape("<tool_call>", "</tool_call>"),
    CallFormat.LLAMA: CallShape("<|python_tag|>", bare=True),
    CallFormat.MISTRAL: CallShape("[TOOL_CALLS]"),
    CallFormat.HARMONY: CallShape(*CALL_MARKS),
    CallFormat.JSON: CallShape("", bare=True, textless=True),
}


# formats that models are trained on
MODEL_CALL_FORMATS = (
    *(CallFormat.HERMES, CallFormat.LLAMA, CallFormat.MISTRAL, CallFormat.HARMONY),
)


def format_in(template: str) -> CallFormat | None:
    """Detect the format of calls in a chat template; None if it is not a supported one."""
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return CallFormat.HERMES
    if "<|channel|>" in template and "functions." in template:
        return CallFormat.HARMONY
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template and "[CALL_ID]" not in template:
        return CallFormat.MISTRAL
    if '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template):
        return CallFormat.LLAMA
    return None


def marked_call(name: str) -> tuple[str, str]:
    """Build the text before and after the arguments of a call that was found by its token ids."""
    return f'{CALL_MARKS[0]}{{"name": {json.dumps(name)}, "arguments": ', f"}}{CALL_MARKS[1]}"


def calls_schema(tools: Sequence[Tool], *, single: bool, arguments_key: str) -> str:
    """Build the JSON schema of one call of these tools, or of a list of calls unless `single`.

    Each tool's schema is placed under `$defs`, and its references are adjusted.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                arguments_key: {"$ref": f"#/$defs/tool_{index}"},
            },
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    definitions = {
        f"tool_{index}": _moved(json.loads(tool.parameters), f"#/$defs/tool_{index}")
        for index, tool in enumerate(tools)
    }
    one: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if single:
        return json.dumps({**one, "$defs": definitions}, ensure_ascii=False)
    return json.dumps(
        {
            "type": "array",
            "items": one,
            "minItems": 1,
            "maxItems": CALL_COUNT_MAX,
            "$defs": definitions,
        },
        ensure_ascii=False,
    )


def _moved(schema: Any, base: str) -> Any:
    """Prefix the internal references in a schema with `base`."""
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = base + value[1:]
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            moved[key] = {name: _moved(each, base) for name, each in value.items()}
        elif key in _SCHEMAS and isinstance(value, list):
            moved[key] = [_moved(each, base) for each in value]
        else:
            moved[key] = _moved(value, base) if key in _SCHEMA else value
    return moved


def with_json_options(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """Convert the schema to an object with our options for llguidance, which override its own.

    The library supports `oneOf` only if it sees that no value fits two branches, and it does not
    follow references. So each `oneOf` whose branches `_Exclusive` proves disjoint becomes `anyOf`.
    """
    plain = {} if schema is True else {"enum": []} if schema is False else schema
    if "oneOf" in json.dumps(plain):
        plain = _Exclusive(plain).replaced(plain)
    return {**plain, "x-guidance": JSON_OPTIONS}


class _Exclusive:
    """Proofs that branches of `oneOf` exclude each other by type, constant or property."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._steps_left = PROOF_STEPS_MAX

    def replaced(self, schema: Any) -> Any:
        """Replace each `oneOf` whose branches exclude each other by `anyOf`."""
        if not isinstance(schema, Mapping):
            return schema
        changed: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
                changed[key] = {name: self.replaced(each) for name, each in value.items()}
            elif key in _SCHEMAS and isinstance(value, list):
                changed[key] = [self.replaced(each) for each in value]
            else:
                changed[key] = self.replaced(value) if key in _SCHEMA else value
        branches = schema.get("oneOf")
        if (
            isinstance(branches, list)
            and "anyOf" not in schema
            and branches
            and all(self._excludes(*pair) for pair in combinations(branches, 2))
        ):
            changed["anyOf"] = changed.pop("oneOf")
            changed.pop("discriminator", None)  # an annotation beside oneOf
        return changed

    def _excludes(self, one: Any, other: Any, depth: int = PROOF_DEPTH_MAX) -> bool:
        """Return whether it is certain that no value fits both schemas."""
        return any(
            self._part_excludes(*pair, depth)
            for pair in product(self._parts(one, depth), self._parts(other, depth))
        )

    def _parts(self, schema: Any, depth: int) -> Iterator[Mapping[str, Any]]:
        """Yield all schemas that apply: this one, its reference, and those of `allOf`."""
        if not isinstance(schema, Mapping) or self._steps_left < 0:
            return
        self._steps_left -= 1
        yield schema
        if depth > 0:
            members = schema.get("allOf")
            for part in (
                self._referenced(schema.get("$ref")),
                *(members if isinstance(members, list) else ()),
            ):
                yield from self._parts(part, depth - 1)

    def _referenced(self, reference: object) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        base: Any = self._root
        for name in reference[1:].split("/")[1:]:
            key = unquote(name).replace("~1", "/").replace("~0", "~")
            base = base.get(key) if isinstance(base, Mapping) else None
        return base

    def _part_excludes(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        self._steps_left -= 1
        if self._steps_left < 0:
            return False
        values, other_values = _values(one), _values(other)
        if values is not None and other_values is not None and values.isdisjoint(other_values):
            return True
        types, other_types = _types(one), _types(other)
        if types.isdisjoint(other_types):
            return True
        if depth <= 0 or types & other_types != {"object"}:
            return False
        return any(
            self._property_excludes(*pair, depth - 1) for pair in ((one, other), (other, one))
        )

    def _property_excludes(
        self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int
    ) -> bool:
        """Return whether one object must have a property that is impossible in the other."""
        properties, other_properties = one.get("properties"), other.get("properties")
        required = one.get("required")
        if not isinstance(required, list) or not isinstance(other_properties, Mapping):
            return False
        closed = other.get("additionalProperties") is False and "patternProperties" not in other
        own = properties if isinstance(properties, Mapping) else {}
        return any(
            self._excludes(own.get(name, {}), other_properties[name], depth)
            if name in other_properties
            else closed
            for name in required
            if isinstance(name, str)
        )


def _values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Convert a constant or enumeration to JSON values; None if they are not comparable."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(
        isinstance(each, float | list | dict) for each in values
    ):
        return None
    return frozenset(map(json.dumps, values))


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """List the types that values of a schema may have; integers count as numbers."""
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    if declared is not None and all(isinstance(name, str) for name in names):
        return frozenset("number" if name == "integer" else str(name) for name in names)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_TYPES.get(type(each), "number") for each in values)
    return frozenset({*_TYPES.values(), "number"})


def strict_calls(
    form: CallFormat,
    tools: Sequence[Tool],
    *,
    single: bool,
    token_id: Callable[[str], int | None],
    answer: str | None = None,
) -> str:
    """Build the Lark grammar of output with calls.

    With `single`, there is at most one call, which ends the output. `token_id` returns the id of a
    marker, or None. `answer` is the body of the rule for output without a call: the output then has
    calls or this and nothing else; None allows any text.
    """
    kept = [tool if tool.strict else replace(tool, parameters=ANYTHING) for tool in tools]
    schema = calls_schema(
        kept, single=True, arguments_key="parameters" if form is CallFormat.LLAMA else "arguments"
    )
    call = json.dumps(with_json_options(json.loads(schema)), ensure_ascii=False)
    rest, shape = CALL_COUNT_MAX - 1, CALL_SHAPES[form]
    other, first = "TEXT" if answer is None else "answer", ""
    opening, opening_rules = _marker(shape.opening, token_id), ""
    if answer is None:
        opening, opening_rules = _opening(shape.opening, token_id)
    match form:
        case CallFormat.HERMES:
            closing = _marker(shape.closing, token_id)
            more = "" if single or answer is not None else " TEXT"
            start = f"start: {other} | called{more}\ncalled: one" + (
                "" if single else f" | one (one){{0,{rest}}}"
            )
            rules = f"one: {opening} WS call WS {closing}\n{opening_rules}"
        case CallFormat.LLAMA:
            # all models of this format have the token; without it there is no opening
            tag = token_id(shape.opening)
            text = "TEXT " if answer is None else ""
            start = f"start: {other} | WS called" + (
                "" if tag is None else f" | {text}<[{tag}]> WS called"
            )
            rules = "called: call" + ("" if single else f' (WS ";" WS call){{0,{rest}}}') + "\n"
            first = r"[ \t\r\n]*[{\[](.|\n)*"  # output that begins like this must be a call
        case CallFormat.MISTRAL:
            start = f"start: {other} | {opening} WS called"
            rules = (
                'called: "[" WS call'
                + ("" if single else f' (WS "," WS call){{0,{rest}}}')
                + f' WS "]"\n{opening_rules}'
            )
        case _:
            raise AssertionError(f"{form} is not a format that models are trained on")
    without_call = _text(shape.opening, first) if answer is None else f"answer: {answer}\n"
    return (
        f"%llguidance {{}}\n{start}\n{rules}{without_call}call: %json {call}\nWS: /[ \\n]{{0,8}}/\n"
    )


def _text(marker: str, first: str) -> str:
    """Build the rule for text that neither contains an opening nor begins like a call."""
    without = rf"~/(.|\n)*{_escaped(marker)}(.|\n)*/"
    return f"TEXT: /(.|\\n)*/ & {without}" + (f" & ~/{first}/" if first else "") + "\n"


def _opening(marker: str, token_id: Callable[[str], int | None]) -> tuple[str, str]:
    """Build the opening of a call with the text before it, and the rules it needs."""
    known = token_id(marker)
    if known is not None:
        return f"TEXT <[{known}]>", ""
    return "opened", f"opened[lazy]: /(.|\\n)*{_escaped(marker)}/\n"


def _marker(marker: str, token_id: Callable[[str], int | None]) -> str:
    known = token_id(marker)
    return json.dumps(marker) if known is None else f"<[{known}]>"


def _escaped(marker: str) -> str:
    return re.escape(marker).replace("/", r"\/")
