"""Rendering of conversations to prompts with the checkpoint's Jinja templates.

Templates are untrusted, so they run in a sandbox: no Python attributes, no changes to arguments, a
time limit. Parsing inserts a check of the deadline at the start of each loop and macro. Operations
that produce large results without a loop (powers, repetition, concatenation, padding) have bounded
operands. Templates can use what published templates expect: `raise_exception`, `strftime_now`,
`tojson` without HTML escapes, loop controls, `generation` blocks, and the special tokens by name.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from inference.checkpoint.checkpoint import read_json
from inference.errors import ChatTemplateFailed, CheckpointInvalid
from inference.text.tools import CallFormat, Tool, ToolCall, format_in

RENDER_S_MAX = 1.0  # a thousand times the usual time for a long conversation
NUMBER_MAX = 100_000  # limit of repetitions, widths and exponents, as for `range` in the sandbox
TEXT_CHARS_MAX = 16 << 20  # limit of a text built by an operator: four times the largest message

LOOK_AT_CLOCK, JOINED = "_look_at_clock", "_joined"  # names that templates do not use

# a width above `NUMBER_MAX` in a format, or one passed as an argument
_WIDE = re.compile(r"\*|\d{6}")


# Errors of templates that do not accept a conversation.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class TemplateTooCostly(TemplateError):
    """The template exceeds its time or memory limit."""


class Budget:
    """Time limit of one rendering."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + RENDER_S_MAX

    def look_at_clock(self) -> None:
        """Raise TemplateTooCostly after the deadline."""
        if self._clock() > self._end_s:
            raise TemplateTooCostly(f"the chat template has not ended after {RENDER_S_MAX:g} s")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits of time and size. Call `look_at_clock` in templates ends them."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]  # generates text of any length
        self.globals[JOINED] = _joined
        self.filters |= {
            name: _bounded(self.filters[name])
            for name in ("batch", "center", "format", "indent", "slice", "wordwrap")
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check the operands of the intercepted operators."""
        for one, other in ((left, right), (right, left)):
            if (
                operator == "*"
                and isinstance(one, int)
                and hasattr(other, "__len__")
                and one * len(other) > TEXT_CHARS_MAX
            ):
                raise TemplateTooCostly("the chat template repeats a value too often")
        if (
            operator == "+"
            and isinstance(left, str)
            and isinstance(right, str)
            and len(left) + len(right) > TEXT_CHARS_MAX
        ):
            raise TemplateTooCostly("the chat template builds a text that is too long")
        if operator == "**" and not (abs(left) <= NUMBER_MAX and abs(right) <= 64):
            raise TemplateTooCostly("the chat template computes a power that is too large")
        if operator == "%":
            _refuse_costly(left, ())
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Check calls of string methods, which can pad to any width."""
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        if isinstance(getattr(method, "__self__", None), str):
            _refuse_costly(
                method.__self__ if method.__name__ in ("format", "format_map") else "", args
            )
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Rewriter().visit(template)  # in place
        template.set_environment(self)
        return template


class _Rewriter(NodeTransformer):
    """Inserts deadline checks into a parsed template and replaces `~` by a bounded function."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name(JOINED, "load"), node.nodes, [], None, None).set_lineno(
            node.lineno
        )

    def _begin_with_look(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        look = nodes.Call(nodes.Name(LOOK_AT_CLOCK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(look).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _begin_with_look


def _joined(*parts: Any) -> str:
    """Concatenate like `a ~ b ~ c`."""
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > TEXT_CHARS_MAX:
        raise TemplateTooCostly("the chat template builds a text that is too long")
    return "".join(texts)


def _bounded(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter whose numeric arguments are widths or counts."""

    def bounded(*args: Any, **kwargs: Any) -> Any:
        text = (
            next((argument for argument in args if isinstance(argument, str)), "")
            if apply.__name__ == "do_format"
            else ""
        )
        _refuse_costly(text, (*args, *kwargs.values()))
        return apply(*args, **kwargs)

    # Jinja uses attributes to mark filters that take the environment.
    bounded.__dict__.update(getattr(apply, "__dict__", {}))
    return bounded


def _refuse_costly(layout: Any, arguments: tuple[Any, ...]) -> None:
    """Raise TemplateTooCostly for a width or count above the limit. layout: a format or None."""
    if (isinstance(layout, str) and _WIDE.search(layout)) or any(
        isinstance(argument, int) and abs(argument) > NUMBER_MAX for argument in arguments
    ):
        raise TemplateTooCostly(f"the chat template uses a width or count above {NUMBER_MAX}")


DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"  # replaces the default template when tools are used, as in transformers
_PROBE = "weir_probe"

# Template variables that switch thinking. Requests can set no other variables.
THINKING_SWITCHES = ("enable_thinking", "thinking")

# A role is rendered next to control tokens, so it must be a plain name.
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. The template decides which roles are valid.

    tool_calls: calls that the model made in this turn. call: for the role "tool", the call that
    this is the result of.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    call: ToolCall | None = None


class ChatTemplates:
    """Chat templates of one checkpoint: the default one and, if present, one for tools."""

    def __init__(self, directory: Path) -> None:
        """Load the templates. Raises: CheckpointInvalid for an unreadable or invalid template."""
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        special_tokens = _special_tokens(directory, config)
        self.eos_token = special_tokens.get("eos_token")
        self._by_name = {
            name: _ChatTemplate(source, special_tokens, path)
            for name, (source, path) in _sources(directory, config).items()
            if name in (DEFAULT_TEMPLATE, TOOL_TEMPLATE)
        }

    def call_format(self) -> CallFormat | None:
        """Return the tool call format in the template; None if it is not a supported one."""
        template = self._template(has_tools=True)
        return None if template is None else format_in(template.source)

    def shows_tools(self) -> bool:
        """Return whether the template renders tools."""
        template = self._template(has_tools=True)
        return template is not None and template.shows_tools

    def sources(self) -> tuple[str, ...]:
        """Return all text that is not from the caller: template sources and special tokens."""
        return tuple(text for template in self._by_name.values() for text in template.texts)

    def placeholder_renderings(self) -> Iterator[str]:
        """Render placeholder conversations with every template; the rest is template text."""
        for template in self._by_name.values():
            yield from template.placeholder_renderings()

    def switches_thinking(self, *, has_tools: bool) -> bool:
        """Return whether the template has a variable that switches thinking."""
        template = self._template(has_tools=has_tools)
        return template is not None and template.thinking_switch is not None

    def _template(self, *, has_tools: bool) -> _ChatTemplate | None:
        tool_template = self._by_name.get(TOOL_TEMPLATE) if has_tools else None
        return tool_template or self._by_name.get(DEFAULT_TEMPLATE)

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
    ) -> str:
        """Render a conversation. thinking: None for the template's default.

        Raises: ChatTemplateFailed if the template is missing, rejects it, or does not render tools
        or thinking.
        """
        template = self._template(has_tools=bool(tools))
        if template is None:
            raise ChatTemplateFailed(
                "this model has no chat template; send a prompt instead of messages"
            )
        for message in messages:
            if not _ROLE.fullmatch(message.role):
                raise ChatTemplateFailed(f"role {message.role!r} is not a name")
        if tools and not template.shows_tools:
            raise ChatTemplateFailed("this model's chat template has no place for tools")
        if not template.shows_calls and any(
            message.tool_calls or message.call for message in messages
        ):
            raise ChatTemplateFailed(
                "this model's chat template has no place for tool calls and their results"
            )
        if thinking is not None and template.thinking_switch is None:
            raise ChatTemplateFailed("this model's chat template has no switch for thinking")
        return template.render(
            messages, tools, add_generation_prompt=add_generation_prompt, thinking=thinking
        )


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks trained text; rendering keeps only its content."""

    # An instance variable in the stubs.
    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str], path: Path) -> None:
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointInvalid(path, f"the chat template does not parse: {error}") from error
        variables = meta.find_undeclared_variables(environment.parse(source))
        self.thinking_switch = next((name for name in THINKING_SWITCHES if name in variables), None)
        self.source = source
        self._special_tokens = special_tokens

    @cached_property
    def shows_tools(self) -> bool:
        """Return whether tools appear in the rendered text; some templates drop them silently."""
        return self._shows(
            [ChatMessage("user", "?")],
            (Tool(_PROBE, _PROBE, '{"type": "object", "properties": {}}'),),
        )

    @cached_property
    def shows_calls(self) -> bool:
        """Return whether calls and their results appear in the rendered text."""
        call = ToolCall("a1B2c3D4e", _PROBE, '{"probed": true}')
        turns = [
            ChatMessage("user", "?"),
            ChatMessage("assistant", "", (call,)),
            ChatMessage("tool", "4711", (), call),
        ]
        return self._shows(turns, ()) and "4711" in self.render(turns)

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the template source and the special tokens it can write."""
        return (self.source, *self._special_tokens.values())

    def placeholder_renderings(self) -> Iterator[str]:
        """Render every kind of turn, with and without tools and generation prompt."""
        call = ToolCall("a1B2c3D4e", _PROBE, '{"probed": true}')
        question, answer = ChatMessage("user", _PROBE), ChatMessage("assistant", _PROBE)
        system, result = ChatMessage("system", _PROBE), ChatMessage("tool", _PROBE, (), call)
        called = ChatMessage("assistant", "", (call,))
        conversations: tuple[list[ChatMessage], ...] = (
            [question],
            [question, answer, question, answer],
            [system, question, answer, question],
            [question, called, result, result],
            [system, question, called, result, answer, question],
        )
        tool = Tool(
            _PROBE, _PROBE, '{"type": "object", "properties": {"probed": {"type": "boolean"}}}'
        )
        ends: list[tuple[bool, bool | None]] = [(False, None), (True, None)]
        ends += [(True, False), (True, True)]
        for messages, tools, (is_begun, thinking) in product(conversations, ((), (tool,)), ends):
            with suppress(ChatTemplateFailed):  # not every template accepts every turn
                yield self.render(
                    messages, tools, add_generation_prompt=is_begun, thinking=thinking
                )

    def _shows(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> bool:
        try:
            return _PROBE in self.render(messages, tools)
        except ChatTemplateFailed:
            return False

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
    ) -> str:
        switch = {}
        if thinking is not None and self.thinking_switch is not None:
            switch[self.thinking_switch] = thinking
        try:
            return self._template.render(
                messages=[_as_dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=[_tool_as_dict(tool) for tool in tools] or None,
                documents=None,
                **self._special_tokens,
                **switch,
                **{LOOK_AT_CLOCK: Budget().look_at_clock},
            )
        except RecursionError as error:
            raise ChatTemplateFailed("the chat template recurses too deeply") from error
        except MemoryError as error:
            raise ChatTemplateFailed("the chat template ran out of memory") from error
        except _REFUSALS as error:
            raise ChatTemplateFailed(str(error)) from error


def _as_dict(message: ChatMessage) -> dict[str, Any]:
    """Convert a turn to the form that templates expect.

    Arguments are objects, which templates serialize; malformed ones are text.
    """
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.call is not None:
        turn |= {"tool_call_id": message.call.id, "name": message.call.name}
    return turn


def _tool_as_dict(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": json.loads(tool.parameters),
    }
    return {"type": "function", "function": function}


def _sources(directory: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, Path]]:
    """Return source and file of every template by name. Files override tokenizer_config.json."""
    config_path = directory / "tokenizer_config.json"
    entry = config.get("chat_template") or {}
    if isinstance(entry, str):
        entry = {DEFAULT_TEMPLATE: entry}
    try:
        named = (
            {one["name"]: one["template"] for one in entry}
            if isinstance(entry, list)
            else dict(entry)
        )
    except (KeyError, TypeError, ValueError):
        named = {"": None}
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in named.items()):
        raise CheckpointInvalid(
            config_path, "chat_template is neither a template nor templates by name"
        )
    sources = {name: (source, config_path) for name, source in named.items()}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = (_read_text(path), path)
    path = directory / "chat_template.jinja"
    if path.exists():
        sources[DEFAULT_TEMPLATE] = (_read_text(path), path)
    return sources


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointInvalid(path, f"the chat template cannot be read: {error}") from error


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` etc. by name; tokenizer_config.json overrides special_tokens_map.json."""
    path = directory / "special_tokens_map.json"
    entries = (read_json(path) if path.exists() else {}) | dict(config)
    tokens = {}
    for name, entry in entries.items():
        if name.endswith("_token") and entry and isinstance(entry, str | dict):
            token = entry.get("content") if isinstance(entry, dict) else entry
            if not isinstance(token, str):
                raise CheckpointInvalid(
                    directory / "tokenizer_config.json", f"{name} = {entry!r} has no content"
                )
            tokens[name] = token
    return tokens


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML: the model would see "\u003c".
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
