"""Tools that a model may call, what it has called, and in which form models write their calls.

A tool is the caller's: here it is a name, words about it, and the JSON schema of what it takes. JSON crosses as text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


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
    `forced_calls.py` makes of any model: such an object, or a list of them, and nothing else.
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
