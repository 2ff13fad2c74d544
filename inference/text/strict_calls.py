"""The grammar of an answer in which a model may call tools as it likes, but not with any arguments: in Lark, for llguidance.

It says what the model's own form allows: text, in which no call can begin, and calls that are whole and valid. Markers are named by
their tokens where they are tokens, since those are what the model writes them with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from inference.text.forced_calls import CALL_COUNT_MAX, calls_schema
from inference.text.tools import CallFormat, Tool

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
