"""A model free to call tools writes any text, and only valid calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.engine import GrammarKind, ResponseFormat
from inference.errors import RequestImpossible
from inference.sampling.grammar import GrammarCompiler
from inference.text.tokenizer import Tokenizer
from inference.text.tools import CallFormat, Tool, strict_calls
from tests.inference.tool_checkpoints import make_scripted_checkpoint, make_tool_checkpoint

A = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],'
    ' "additionalProperties": false}'
)
TOOLS = [Tool("f", "", A, strict=True), Tool("g", "", A)]
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
F, G, WRONG = (
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "g", "arguments": {"b": []}}',  # not strict
    '{"name": "f", "arguments": {"b": 1}}',
)
# The same calls in the format of Llama.
LLAMA_F, LLAMA_G, LLAMA_WRONG = (call.replace("arguments", "parameters") for call in (F, G, WRONG))
Compiled = tuple[Tokenizer, GrammarCompiler]
HERMES, LLAMA, MISTRAL = CallFormat.HERMES, CallFormat.LLAMA, CallFormat.MISTRAL

ANSWER = "%json " + A


FREE = {
    HERMES: (
        "",
        "hi",
        f"<tool_call>{F}</tool_call>",
        f"x <tool_call>\n{G}\n</tool_call>",
        "a < b <tool <tool_cal",
    ),
    LLAMA: ("", "hi { x }", LLAMA_F, "\n" + LLAMA_G, "a <| b"),
    MISTRAL: ("", "hi [1]", f"[TOOL_CALLS][{F}]", f"x[TOOL_CALLS] [{G}]", "[TOOL"),
}
SEVERAL = {
    HERMES: f"<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call> y",
    LLAMA: f"{LLAMA_F}; {LLAMA_G}",
    MISTRAL: f"[TOOL_CALLS][{F}, {G}]",
}
FORBIDDEN = {
    HERMES: (
        f"x<tool_call>{WRONG}</tool_call>",
        "x<tool_call>no",
        f"<tool_call>{F}",
        '<tool_call>{"name": "h"',
    ),
    LLAMA: (LLAMA_WRONG, "{no", "[1]", LLAMA_F[:-1], " {", "<|python_tag|>no"),
    MISTRAL: (f"[TOOL_CALLS][{WRONG}]", "[TOOL_CALLS]f", f"[TOOL_CALLS][{F}"),
}
ANSWERED = {
    HERMES: (
        ('{"a": 2}', f"<tool_call>{F}</tool_call>"),
        ("", "hi", f"x <tool_call>{F}</tool_call>"),
    ),
    LLAMA: (('{"a": 2}', LLAMA_F), ("", "hi", "{no")),
    MISTRAL: (('{"a": 2}', f"[TOOL_CALLS][{F}]"), ("", "hi", f"x[TOOL_CALLS][{F}]")),
}


@pytest.fixture(scope="module", params=["markers are tokens", "markers are spelt"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Return a tokenizer with its grammar compiler."""
    directory: Path = tmp_path_factory.mktemp("model")
    if request.param == "markers are tokens":
        make_scripted_checkpoint(directory, MARKERS)
    else:
        make_tool_checkpoint(directory)
    tokenizer = Tokenizer(directory)
    size = tokenizer.backend.get_vocab_size()
    return tokenizer, GrammarCompiler(directory / "tokenizer.json", size, frozenset({2, 6}))


def is_allowed(compiled: Compiled, source: str, output: str) -> bool:
    """Return whether a grammar allows exactly this output."""
    tokenizer, compiler = compiled
    grammar = compiler.compile(ResponseFormat(GrammarKind.LARK, source, "tools"))
    for token_id in tokenizer.encode(output, add_special_tokens=False):
        grammar.advance(token_id)
        if grammar.fault is not None:
            return False
    return grammar.complete


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize("single", [False, True])
def test_text_is_free_but_calls_valid(compiled: Compiled, form: CallFormat, single: bool) -> None:
    source = strict_calls(form, TOOLS, single=single, token_id=compiled[0].token_id)

    for output in FREE[form]:
        assert is_allowed(compiled, source, output), output
    assert is_allowed(compiled, source, SEVERAL[form]) is not single
    for output in FORBIDDEN[form]:
        assert not is_allowed(compiled, source, output), output


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
def test_with_a_format_output_is_a_call_or_the_format(compiled: Compiled, form: CallFormat) -> None:
    token_id = compiled[0].token_id
    source = strict_calls(form, TOOLS, single=False, token_id=token_id, answer=ANSWER)
    right, wrong = ANSWERED[form]

    for output in right:
        assert is_allowed(compiled, source, output), output
    for output in wrong:
        assert not is_allowed(compiled, source, output), output


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        ('"x"', "schema must be an object or boolean"),
        ('{"type": "text"}', "Invalid type: text"),
        ('{"type": "string", "pattern": "(?<=a)b"}', "look-behind"),
    ],
)
def test_a_schema_that_does_not_compile_fails(compiled: Compiled, member: str, reason: str) -> None:
    schema = f'{{"type": "object", "properties": {{"a": {member}}}}}'
    tools = [Tool("f", "", schema, strict=True)]
    source = strict_calls(HERMES, tools, single=False, token_id=compiled[0].token_id)

    with pytest.raises(RequestImpossible, match=reason) as refused:
        compiled[1].compile(ResponseFormat(GrammarKind.LARK, source, "tools"))

    assert "%json" not in str(refused.value)
    assert " | " not in str(refused.value)
