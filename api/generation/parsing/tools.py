"""Tools of a request: validation, constraints on the output, and the format of tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from weir.v1 import inference_service_pb2 as pb

from api.core.errors import FieldViolation, InvalidRequest
from api.core.texts import Violations
from api.generation.parsing.decoding import RESPONSE_FORMAT_BYTES_MAX
from api.generation.parsing.json_text import LEVELS_MAX, json_object
from inference.engine import GrammarKind, ResponseFormat
from inference.text.call_parser import ToolCallParser
from inference.text.tokenizer import Tokenizer
from inference.text.tools import CallFormat, Tool, calls_schema, strict_calls, with_json_options

TOOL_COUNT_MAX = 128
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_ARGUMENTS = '{"type": "object", "properties": {}, "additionalProperties": false}'
SCHEMA_BYTES_MAX = RESPONSE_FORMAT_BYTES_MAX
# A delimiter or a line feed in a regular expression, and pairs that are escaped already
LARK_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)
LARK_ESCAPES = {"/": r"\/", "\n": r"\n"}
# Bytes of all tools of a request together: checking blocks the event loop for 45 µs per kB.
SCHEMAS_BYTES_MAX = 256 * 1024

NOT_STRICT = (
    "cannot be strict, or combined with response_format, for this model's form of calls: leave"
    " strict out, or force a call with tool_choice"
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request. If `forced`, the output calls at least one of `callable_names`.

    If `single`, the output has at most one call.
    """

    tools: tuple[Tool, ...] = ()
    callable_names: tuple[str, ...] = ()
    forced: bool = False
    single: bool = False


NO_TOOLS = ToolUse()


@dataclass(frozen=True, slots=True)
class CallReading:
    """Instructions for parsing the tool calls of an output.

    If `ends_with_call`, the output ends after its first call.
    """

    form: CallFormat
    names: tuple[str, ...]
    ends_with_call: bool

    def open(self) -> ToolCallParser:
        """Create a parser for one output."""
        return ToolCallParser(self.form, self.names, single=self.ends_with_call)


def check_tools(tools: Sequence[pb.Tool], wrong: Violations) -> None:
    """Check the number and size of the tools, and each tool."""
    if not wrong.check_count(len(tools), TOOL_COUNT_MAX, "tools"):
        return
    sizes = [len(tool.parameters_json_schema.encode()) for tool in tools]
    if (size := sum(sizes)) > SCHEMAS_BYTES_MAX:
        remedy = (
            f"their schemas may have {SCHEMAS_BYTES_MAX} bytes in total, got {size}; offer fewer"
            " tools, or shorten them"
        )
        wrong.check(False, "tools", remedy)
        return
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        right = NAME.fullmatch(tool.name) is not None
        wrong.check(
            right, f"{field}.name", "must be 1 to 64 letters, digits, underscores and hyphens"
        )
        wrong.check(tool.name not in seen, f"{field}.name", "must be unique in the request")
        seen.add(tool.name)
        if tool.parameters_json_schema:
            right = sizes[index] <= SCHEMA_BYTES_MAX and _is_schema(tool.parameters_json_schema)
            remedy = (
                f"must be the JSON schema of an object, of up to {SCHEMA_BYTES_MAX} bytes and"
                f" {LEVELS_MAX} levels"
            )
            wrong.check(right, f"{field}.parameters_json_schema", remedy)


def check_tool_use(start: pb.StartFrame, wrong: Violations) -> None:
    """Check the tools of a frame, its tool choice, and fields that tools exclude."""
    check_tools(start.tools, wrong)
    if len(start.tools) > TOOL_COUNT_MAX:
        return
    choice, kind = start.tool_choice, start.tool_choice.WhichOneof("kind")
    if not start.tools:
        wrong.check(
            not start.HasField("tool_choice"), "tool_choice", "requires tools; leave it out"
        )
        return
    right = start.WhichOneof("prompt") in (None, "conversation")
    wrong.check(right, "tools", "require a conversation, which shows them to the model")
    if start.HasField("tool_choice"):
        wrong.check(kind is not None, "tool_choice", "one of mode and name must be set")
        right = kind != "mode" or choice.mode in pb.ToolMode.values()
        wrong.check(
            right,
            "tool_choice.mode",
            "must be TOOL_MODE_AUTO, TOOL_MODE_NONE or TOOL_MODE_REQUIRED",
        )
        right = kind != "name" or choice.name in {tool.name for tool in start.tools}
        wrong.check(right, "tool_choice.name", "must be the name of one of tools")
    if kind == "mode" and choice.mode == pb.TOOL_MODE_NONE:
        return
    wrong.check(
        not start.HasField("beam_search"),
        "beam_search",
        "cannot be combined with tools; set tool_choice to TOOL_MODE_NONE",
    )
    wrong.check(
        start.response_format.WhichOneof("kind") != "lark",
        "response_format.lark",
        "cannot be combined with tools; use json_schema or regex, or set tool_choice to"
        " TOOL_MODE_NONE",
    )
    if _is_forced(choice) or any(tool.strict for tool in start.tools):
        for name in ("ignore_eos", "min_output_tokens", "stop_token_ids"):
            remedy = (
                "cannot be combined with schema-constrained calls, which end the output themselves"
            )
            wrong.check(not getattr(start, name), name, remedy)
    if choice.single and not _is_forced(choice):
        remedy = "must be 1 with tool_choice.single, where one call ends the output"
        wrong.check(start.choice_count <= 1, "choice_count", remedy)


def parse_tool_use(start: pb.StartFrame) -> ToolUse:
    """Convert the tools of a frame that passed `check_tool_use`; none if no call is allowed."""
    choice, kind = start.tool_choice, start.tool_choice.WhichOneof("kind")
    if not start.tools or (kind == "mode" and choice.mode == pb.TOOL_MODE_NONE):
        return NO_TOOLS
    tools = parse_tools(start.tools)
    names = (choice.name,) if kind == "name" else tuple(tool.name for tool in tools)
    return ToolUse(tools, names, forced=_is_forced(choice), single=choice.single or kind == "name")


def parse_tools(tools: Sequence[pb.Tool]) -> tuple[Tool, ...]:
    """Convert tools that passed `check_tools`."""
    return tuple(
        Tool(tool.name, tool.description, tool.parameters_json_schema or NO_ARGUMENTS, tool.strict)
        for tool in tools
    )


def format_with_tools(
    use: ToolUse, requested: ResponseFormat | None, tokenizer: Tokenizer
) -> ResponseFormat | None:
    """Build the format of an output that may call tools; None if it is not constrained.

    `requested` is the format of output without a call; a forced call replaces it. Raises
    InvalidRequest if the grammar is too large.
    """
    if use.forced:
        tools = [tool for tool in use.tools if tool.name in use.callable_names]
        # The key that the model was trained on.
        key = "parameters" if tokenizer.call_format is CallFormat.LLAMA else "arguments"
        kept = ResponseFormat(
            GrammarKind.JSON_SCHEMA,
            calls_schema(tools, single=_single(use, tokenizer), arguments_key=key),
            "tools",
        )
    elif (
        requested is not None or any(tool.strict for tool in use.tools)
    ) and tokenizer.call_format is not None:
        if tokenizer.call_format is CallFormat.HARMONY:
            raise InvalidRequest([FieldViolation("tools", NOT_STRICT)])
        grammar = strict_calls(
            tokenizer.call_format,
            use.tools,
            single=_single(use, tokenizer),
            token_id=tokenizer.token_id,
            answer=None if requested is None else _rule_of(requested),
        )
        kept = ResponseFormat(GrammarKind.LARK, grammar, "tools")
    else:
        return None
    if (size := len(kept.source.encode())) > SCHEMA_BYTES_MAX:
        remedy = (
            f"the schemas of constrained calls may have {SCHEMA_BYTES_MAX} bytes in total, got"
            f" {size}; offer fewer"
        )
        raise InvalidRequest([FieldViolation("tools", remedy)])
    return kept


def _rule_of(response_format: ResponseFormat) -> str:
    """Build the body of a Lark rule from a JSON schema or a regular expression."""
    source = response_format.source
    if response_format.kind is GrammarKind.JSON_SCHEMA:
        return "%json " + json.dumps(with_json_options(json.loads(source)), ensure_ascii=False)
    escaped = LARK_ESCAPED.sub(lambda found: LARK_ESCAPES.get(found[0], found[0]), source)
    return f"/{escaped}/"


def call_reading(
    use: ToolUse, tokenizer: Tokenizer, model: str, choice_count: int = 1
) -> CallReading | None:
    """Choose how tool calls are parsed; None if the request has no tools.

    Raises InvalidRequest if the model does not support tools, or not for this many choices.
    """
    if not use.tools:
        return None
    if not tokenizer.shows_tools():
        remedy = (
            f"model {model!r} does not support tools in its chat template; use another model, or"
            " leave them out"
        )
        raise InvalidRequest([FieldViolation("tools", remedy)])
    if use.forced:
        return CallReading(CallFormat.JSON, use.callable_names, ends_with_call=False)
    if tokenizer.call_format is None:
        remedy = (
            f"the tool call format of model {model!r} is unknown; force a call with tool_choice, or"
            " ask the operator to set WEIR_TOOL_CALL_FORMATS"
        )
        raise InvalidRequest([FieldViolation("tool_choice", remedy)])
    single = _single(use, tokenizer)
    if single and choice_count > 1:
        remedy = (
            f"must be 1 with tools for model {model!r}, whose chat template takes one call in a"
            " turn, so that a call ends the output"
        )
        raise InvalidRequest([FieldViolation("choice_count", remedy)])
    return CallReading(tokenizer.call_format, use.callable_names, ends_with_call=single)


def _single(use: ToolUse, tokenizer: Tokenizer) -> bool:
    """Return whether an output has at most one call, as requested or as the template demands.

    The next request repeats the calls of this output, and must not be refused because of them.
    """
    return use.single or tokenizer.takes_one_call_only()


def _is_forced(choice: pb.ToolChoice) -> bool:
    return choice.WhichOneof("kind") == "name" or choice.mode == pb.TOOL_MODE_REQUIRED


def _is_schema(source: str) -> bool:
    schema = json_object(source)
    return schema is not None and schema.get("type", "object") == "object"
