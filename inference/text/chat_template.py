"""Rendering of conversations to prompts with the checkpoint's Jinja templates.

Templates are untrusted, so they run in a sandbox: no Python attributes, no changes to arguments, a
time limit. Parsing inserts a check of the deadline at the start of each loop and macro. Operations
that produce large results without a loop (powers, repetition, concatenation, padding) have bounded
operands. Templates can use what published templates expect: `raise_exception`, `strftime_now`,
`tojson` without HTML escapes, loop controls, `generation` blocks, and the special tokens by name.
All processes of a fleet render the same text: dates are UTC in English, nothing is random.

Templates lose text in silence if they get it in a form that they do not read. So each template is
probed with unique words: the probes choose the form of conversations (`Form`), and a conversation
of which the template leaves out or repeats a part is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from itertools import count, product, takewhile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from inference.checkpoint.checkpoint import entries_of, read_json
from inference.errors import ChatTemplateFailed, CheckpointInvalid
from inference.text.tools import ID_CHARACTERS, ID_LENGTH, CallFormat, Tool, ToolCall, format_in

RENDER_S_MAX = 1.0  # a thousand times the usual time for a long conversation
NUMBER_MAX = 100_000  # limit of repetitions, widths and exponents, as for `range` in the sandbox
TEXT_CHARS_MAX = 16 << 20  # limit of a text built by an operator: four times the largest message

LOOK_AT_CLOCK, JOINED = "_look_at_clock", "_joined"  # names that templates do not use

# a width above `NUMBER_MAX` in a format, or one passed as an argument
_WIDE = re.compile(r"\*|\d{6}")

# Errors of templates that do not accept a conversation.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"  # replaces the default template when tools are used, as in transformers
# Template variables of thinking: switches, and an effort. Requests can set no other variables.
THINKING_SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NOT_THINKING = (False, EFFORTS[0])  # templates without a switch take them, and change nothing
# Fields of a message by which templates read the model's thinking
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")
# A role is rendered next to control tokens, so it must be a plain name.
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
SYSTEM_ROLES = frozenset({"system", "developer"})
COSTLY_MAX = 3  # probes beyond the time limit, after which there are no more
REMEDY = "send it at another place or in another role"
LATE_SYSTEM = (
    "this model's chat template takes system messages at the beginning only; move this one there,"
    " or send it with the role user"
)
REFUSED = "refuses this conversation"
_PROBE = "weirProbe"
_PROBE_TOOL = Tool(
    f"{_PROBE}Tool",
    f"{_PROBE}About",
    f'{{"type": "object", "properties": {{"{_PROBE}Key": {{"type": "string"}}}}}}',
)
_TOOL_WORDS = (_PROBE_TOOL.name, _PROBE_TOOL.description, f"{_PROBE}Key")
# A part of text or the arguments of a call as Python or JSON would print them.
_PRINTED = re.compile(rf"""["']type["']: ["']text["']|{{'{_PROBE}\d""")
# Ends the text of an unfinished turn while it is rendered: templates strip blanks at the ends
END_MARK = f"{_PROBE}End"
_WORD = re.compile(rf"{_PROBE}(?:\d{{5}}Q|Tool|About|Key)")
# Ids that templates might refuse or cut off.
_PROBE_IDS = ("{}", "kQzXvW7_{}YpLm3RtB9Jd{}")
CUT_CHARS = 6  # as many characters of an id without the rest show that a template cuts it
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = """
    January February March April May June July August September October November December
"""
MONTHS = _MONTHS.split()
_DIRECTIVE = re.compile(r"%([-_0^#]*)(\d*)[EO]?([A-Za-z+%])")
# Directives that depend on the locale, as the C locale has them.
_C_LOCALE = {"c": "%a %b %e %H:%M:%S %Y", "x": "%m/%d/%y", "X": "%H:%M:%S", "r": "%I:%M:%S %p"}


class TemplateTooCostly(TemplateError):
    """The template exceeds its time or memory limit."""


class Budget:
    """Limit of the processor time of one rendering: a busy machine makes no template costly."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
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
        del self.globals["lipsum"], self.filters["random"]  # text of any length, random prompts
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


# Whether, or with which effort, the model should think; None for the template's default.
Thinking = bool | str | None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. The template decides which roles are valid.

    tool_calls: calls that the model made in this turn. call: for the role "tool", the call that
    this is the result of. reasoning: thinking in a turn of the model. is_unfinished: the prompt
    ends with the text of this turn, the last one, which the model continues.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    call: ToolCall | None = None
    reasoning: str = ""
    is_unfinished: bool = False


class CallIds(StrEnum):
    """Ids of calls that a template gets.

    CLIENT: those of the client. SHORT: nine letters and digits (Mistral). NAMED:
    `functions.NAME:0`, counted through the conversation, for a template that shows the name of a
    call by its id only (Kimi K2).
    """

    CLIENT = "client"
    SHORT = "short"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Form:
    """Form in which a template gets conversations.

    part_roles: roles whose content is a list of parts; others have a string. text_arguments:
    arguments of calls are JSON text instead of objects. null_content: content is null in turns that
    have only calls. single_calls: each call is a turn, followed by its result. text_apart: text
    before calls is a turn.
    """

    part_roles: frozenset[str] = frozenset()
    text_arguments: bool = False
    null_content: bool = False
    ids: CallIds = CallIds.CLIENT
    single_calls: bool = False
    text_apart: bool = False

    def arranged(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the turns that the template gets, with its ids."""
        if not any(message.tool_calls or message.call for message in messages):
            return list(messages)
        if self.ids is CallIds.SHORT:
            messages = _with_short_ids(messages)
        elif self.ids is CallIds.NAMED:
            messages = _with_named_ids(messages)
        turns: list[ChatMessage] = []
        index = 0
        while index < len(messages):
            turn, index = messages[index], index + 1
            if self.text_apart and turn.tool_calls and turn.content.strip():
                turns.append(replace(turn, tool_calls=()))
                turn = replace(turn, content="", reasoning="")
            if not self.single_calls or len(turn.tool_calls) < 2:
                turns.append(turn)
                continue
            results: dict[str, list[ChatMessage]] = {call.id: [] for call in turn.tool_calls}
            others: list[ChatMessage] = []
            while index < len(messages) and (result_of := messages[index].call) is not None:
                results.get(result_of.id, others).append(messages[index])
                index += 1
            for call in turn.tool_calls:
                turns += [replace(turn, tool_calls=(call,)), *results[call.id]]
                turn = replace(turn, content="", reasoning="")
            turns += others
        return turns


def _with_short_ids(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with call ids of nine letters and digits.

    The ids depend on earlier ids only: each request of a conversation has the same ones, so that
    its beginning stays in the prefix cache.
    """
    short_by_id: dict[str, str] = {}
    taken: set[str] = set()

    def short(call: ToolCall) -> ToolCall:
        if call.id not in short_by_id:
            is_short = len(call.id) == ID_LENGTH and set(ID_CHARACTERS).issuperset(call.id)
            found = call.id if is_short else _digest(call.id)
            for attempt in count():
                if found not in taken:
                    break
                found = _digest(f"{attempt} {call.id}")
            taken.add(found)
            short_by_id[call.id] = found
        return replace(call, id=short_by_id[call.id])

    return [
        replace(
            message,
            tool_calls=tuple(map(short, message.tool_calls)),
            call=message.call and short(message.call),
        )
        for message in messages
    ]


def _with_named_ids(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with call ids of name and number, which depend on earlier calls only."""
    latest: dict[str, str] = {}  # by the client's id, which some providers use again
    number = count()

    def named(call: ToolCall) -> ToolCall:
        latest[call.id] = f"functions.{call.name}:{next(number)}"
        return replace(call, id=latest[call.id])

    def answered(call: ToolCall) -> ToolCall:
        return replace(call, id=latest[call.id]) if call.id in latest else named(call)

    return [
        replace(
            message,
            tool_calls=tuple(map(named, message.tool_calls)),
            call=message.call and answered(message.call),
        )
        for message in messages
    ]


def _digest(text: str) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
    digits = ""
    for _ in range(ID_LENGTH):
        number, digit = divmod(number, len(ID_CHARACTERS))
        digits += ID_CHARACTERS[digit]
    return digits


class ChatTemplates:
    """Chat templates of one checkpoint: the default one and, if present, one for tools."""

    def __init__(self, directory: Path) -> None:
        """Load the templates. Raises: CheckpointInvalid for an unreadable or invalid template."""
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        special_tokens = _special_tokens(directory, config)
        self.eos_token = special_tokens.get("eos_token")
        self._special_tokens = special_tokens
        self._added_tokens = _added_tokens(directory, config)
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

    def takes_one_call_only(self) -> bool:
        """Return whether the next request can have an answer with a call, but not with several."""
        template = self._template(has_tools=True)
        return template is not None and template.takes_one_call_only

    def sources(self) -> tuple[str, ...]:
        """Return all text that is not from the caller: template sources and special tokens."""
        return tuple(text for template in self._by_name.values() for text in template.texts)

    def needed_tokens(self) -> Iterator[tuple[str, str]]:
        """Return name and text of tokens that the tokenizer must have.

        They are the end token and those that a template writes. transformers would add them.
        """
        for name, token in (*self._special_tokens.items(), *self._added_tokens):
            if name == "eos_token" or any(
                name in each.variables or token in each.source for each in self._by_name.values()
            ):
                yield name, token

    def faults(self) -> list[str]:
        """Return what the templates do not show, of the turns that conversations usually have."""
        return sorted({fault for each in self._by_name.values() for fault in each.faults()})

    def turn_ends(self) -> Iterator[Iterator[str]]:
        """Return the texts that each template writes after an answer, in several conversations."""
        return (each.turn_ends() for each in self._by_name.values())

    def placeholder_renderings(self) -> Iterator[str]:
        """Render placeholder conversations with every template; the rest is template text."""
        for template in self._by_name.values():
            yield from template.placeholder_renderings()

    def takes_thinking(self, thinking: bool | str, *, has_tools: bool) -> bool:
        """Return whether the template takes it: only thinking needs a switch or efforts."""
        template = self._template(has_tools=has_tools)
        return thinking in NOT_THINKING or (
            template is not None and bool(template.thinking_variables(thinking))
        )

    def _template(self, *, has_tools: bool) -> _ChatTemplate | None:
        tool_template = self._by_name.get(TOOL_TEMPLATE) if has_tools else None
        return tool_template or self._by_name.get(DEFAULT_TEMPLATE)

    def arranged(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        thinking: Thinking = None,
    ) -> list[ChatMessage]:
        """Return the turns that the template renders, which may differ from those of the caller.

        Raises: ChatTemplateFailed if the template is missing, or would leave out or repeat a part.
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
        if thinking not in (None, *NOT_THINKING) and not template.thinking_variables(thinking):
            raise ChatTemplateFailed("this model's chat template has no switch for thinking")
        has_tools = bool(tools)
        if (accepted := template.accepted(messages, has_tools=has_tools)) is not None:
            return template.form.arranged(accepted)
        if (index := _late_system(messages)) is not None:
            others = [each for each in messages[index:] if each.role not in SYSTEM_ROLES]
            if template.accepted([*messages[:index], *others], has_tools=has_tools) is not None:
                raise ChatTemplateFailed(LATE_SYSTEM, index)
        fault = template.fault(messages, has_tools=has_tools)
        if fault is REFUSED:  # the template gives the reason
            return template.form.arranged(messages)
        raise ChatTemplateFailed(f"this model's chat template {fault}")

    def render(
        self,
        arranged: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        thinking: Thinking = None,
    ) -> str:
        """Render turns from `arranged`. thinking: None for the template's default.

        Raises: ChatTemplateFailed if the template rejects them.
        """
        template = self._template(has_tools=bool(tools))
        assert template is not None, "`arranged` checked it"
        return template.render(
            arranged, tools, add_generation_prompt=add_generation_prompt, thinking=thinking
        )


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks trained text; rendering keeps only its content."""

    # An instance variable in the stubs.
    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TurnKind(NamedTuple):
    """Properties of a turn on which templates decide what they show. calls: at most two."""

    role: str
    has_text: bool = True
    calls: int = 0
    has_reasoning: bool = False


SYSTEM, USER, ANSWER, RESULT = map(TurnKind, ("system", "user", "assistant", "tool"))
CALLED, CALLED_TWICE = (TurnKind("assistant", False, calls) for calls in (1, 2))
SAID_AND_CALLED = TurnKind("assistant", True, 1)

# Usual conversations. Templates that reject or do not show some of them are common.
USUAL: tuple[tuple[TurnKind, ...], ...] = (
    (USER,),
    (SYSTEM, USER),
    (SYSTEM, USER, ANSWER, USER, ANSWER, USER),
    (USER, CALLED, RESULT),
    (USER, CALLED_TWICE, RESULT, RESULT),
    (USER, SAID_AND_CALLED, RESULT, ANSWER, USER),
)
PERIOD_MAX, ROUND_MAX = 4, 3  # a repeated run of up to 4 turns is probed with 3 rounds
# Conversations of which a template's fault is remembered, and the turns of one: at most 5 MB.
KNOWN_FAULTS_MAX, KNOWN_TURNS_MAX = 1024, 64


def _kind_of(message: ChatMessage) -> TurnKind:
    content, reasoning = message.content, message.reasoning
    return TurnKind(
        message.role,
        content != "" and not content.isspace(),
        min(len(message.tool_calls), 2),
        reasoning != "" and not reasoning.isspace(),
    )


def _folded(kinds: Iterable[TurnKind]) -> tuple[TurnKind, ...]:
    """Return the turns without further rounds of repeated runs, which templates treat alike."""
    turns: list[TurnKind] = []
    for kind in kinds:
        turns.append(kind)
        for period in range(1, PERIOD_MAX + 1):
            if (
                len(turns) > ROUND_MAX * period
                and turns[-1 - period] == kind
                and turns[-(ROUND_MAX + 1) * period :] == turns[-period:] * (ROUND_MAX + 1)
            ):
                del turns[-period:]
    return tuple(turns)


def _equivalents(
    messages: Sequence[ChatMessage], *, moves_system: bool
) -> Iterator[Sequence[ChatMessage]]:
    """Yield conversations that mean the same, for templates that do not take this one.

    The last ones have no reasoning, which most templates leave out.
    """
    joined = _with_joined_turns(messages)
    thoughtful = [messages, joined, _with_one_answer(messages), _with_one_answer(joined)]
    silent = [[replace(turn, reasoning="") for turn in each] for each in thoughtful]
    tried: list[Sequence[ChatMessage]] = [messages]
    for each in (*thoughtful, *silent):
        for other in (each, *(_with_system_elsewhere(each) if moves_system else ())):
            if other not in tried:
                tried.append(other)
                yield other


def _with_system_elsewhere(messages: Sequence[ChatMessage]) -> Iterator[list[ChatMessage]]:
    """Yield conversations with the first system messages elsewhere.

    Several become one. One comes to the head of the first question: Mistral's templates write it
    there, but only if a question is the last message.
    """
    systems = list(takewhile(lambda message: message.role in SYSTEM_ROLES, messages))
    others = list(messages[len(systems) :])
    text = "\n\n".join(message.content for message in systems)
    if len(systems) > 1 or [message.role for message in systems] == ["developer"]:
        yield [replace(systems[0], role=SYSTEM.role, content=text), *others]
    roles = [message.role for message in others]
    if systems and USER.role in roles and not SYSTEM_ROLES.intersection(roles):
        index = roles.index(USER.role)
        others[index] = replace(others[index], content=f"{text}\n\n{others[index].content}")
        yield others


def _with_joined_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the conversation with one turn for several of a user, or of an assistant."""
    turns: list[ChatMessage] = []
    for message in messages:
        last = turns[-1] if turns else None
        if last and last.role == message.role in (USER.role, ANSWER.role) and not last.tool_calls:
            texts, thoughts = (
                "\n\n".join(filter(None, pair))
                for pair in ((last.content, message.content), (last.reasoning, message.reasoning))
            )
            turns[-1] = replace(message, content=texts, reasoning=thoughts)
        else:
            turns.append(message)
    return turns


def _late_system(messages: Sequence[ChatMessage]) -> int | None:
    """Return the index of the first system message behind others; None if there is none."""
    systems = [index for index, each in enumerate(messages) if each.role in SYSTEM_ROLES]
    return next((index for place, index in enumerate(systems) if place != index), None)


def _with_one_answer(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the conversation with one answer between two questions, for alternating templates.

    Texts beside calls are in the answer that follows the results. Where no answer follows yet, they
    are a turn before the calls. A question right after results follows an empty answer.
    """
    turns: list[ChatMessage] = []
    begun: list[str] = []  # texts beside calls since the last question
    first_call = 0  # index of the turn with the first of these calls

    def end_round() -> None:
        if begun:
            turns.insert(first_call, ChatMessage(ANSWER.role, "\n\n".join(begun)))
            begun.clear()

    for message in messages:
        if message.tool_calls and message.content.strip():
            first_call = first_call if begun else len(turns)
            begun.append(message.content)
            message = replace(message, content="")
        elif begun and message.role == ANSWER.role and not message.tool_calls:
            text = "\n\n".join(each for each in (*begun, message.content) if each.strip())
            message = replace(message, content=text)
            begun.clear()
        elif message.role not in (ANSWER.role, RESULT.role):
            if turns and turns[-1].role == RESULT.role and not begun:
                turns.append(ChatMessage(ANSWER.role, ""))
            end_round()
        turns.append(message)
    end_round()
    return turns


class _ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str], path: Path) -> None:
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointInvalid(path, f"the chat template does not parse: {error}") from error
        self.variables = meta.find_undeclared_variables(environment.parse(source))
        self.thinking_switch = next(
            (name for name in THINKING_SWITCHES if name in self.variables), None
        )
        self.source = source
        self._thought_names = [name for name in THOUGHT_NAMES if _reads(source, name)]
        self._special_tokens = special_tokens
        self._costly_count = 0
        self._find_fault = lru_cache(KNOWN_FAULTS_MAX)(self._find)

    @cached_property
    def shows_tools(self) -> bool:
        """Return whether tools appear in the rendered text; some templates drop them silently."""
        return self._shows((USER,), self.form, tool_sets=((_PROBE_TOOL,),))

    @cached_property
    def shows_system(self) -> bool:
        """Return whether a system message appears in the usual place."""
        return self._shows((SYSTEM, USER), self.form)

    @cached_property
    def shows_calls(self) -> bool:
        """Return whether calls and their results appear in the rendered text."""
        return self._shows((USER, CALLED, RESULT), self.form)

    @cached_property
    def takes_one_call_only(self) -> bool:
        """Return whether a call appears, but not several of one answer, in one turn or more."""
        several = (USER, CALLED_TWICE, RESULT, RESULT)
        return self.shows_calls and not self._shows(several, self.form)

    @cached_property
    def form(self) -> Form:
        """The first form in which the template shows each kind of turn."""
        form = Form()
        for role, kinds in (
            (USER.role, (USER,)),
            (ANSWER.role, (USER, ANSWER, USER)),
            (SYSTEM.role, (SYSTEM, USER)),
        ):
            form = self._first_of(kinds, [form, replace(form, part_roles=form.part_roles ^ {role})])
        parts = form.part_roles | {RESULT.role}
        calls = [
            replace(
                form,
                part_roles=part_roles,
                null_content=null_content,
                text_arguments=text_arguments,
                ids=ids,
            )
            for part_roles in (
                [parts, form.part_roles] if form.part_roles else [frozenset(), parts]
            )
            for ids in CallIds
            for null_content, text_arguments in product((False, True), repeat=2)
        ]
        form = self._first_of((USER, CALLED, RESULT), calls, _PROBE_IDS)
        form = self._first_of(
            (USER, CALLED_TWICE, RESULT, RESULT), [form, replace(form, single_calls=True)]
        )
        return self._first_of(
            (USER, SAID_AND_CALLED, RESULT, ANSWER, USER), [form, replace(form, text_apart=True)]
        )

    def _first_of(
        self,
        kinds: tuple[TurnKind, ...],
        forms: Sequence[Form],
        id_layouts: Sequence[str] = _PROBE_IDS[-1:],
    ) -> Form:
        """Return the first form that shows this conversation, or the first of all."""
        for form in forms:
            if all(self._shows(kinds, form, id_layout=layout) for layout in id_layouts):
                return form
        return forms[0]

    def faults(self) -> Iterator[str]:
        """Return the usual conversations that the template does not show, by their roles."""
        for kinds in USUAL:
            if not self._shows(kinds, self.form):
                roles = (f"{kind.role}{' with calls' if kind.calls else ''}" for kind in kinds)
                yield ", ".join(roles)

    def turn_ends(self) -> Iterator[str]:
        """Return the text behind an answer: the last one, which some templates leave open, or one
        before a question.
        """
        answered = (USER, ANSWER)
        for kinds in (answered, (SYSTEM, *answered), (*answered, USER), (SYSTEM, *answered, USER)):
            turns, words = _probe(kinds)
            answer, _ = words[kinds.index(ANSWER)]
            with suppress(ChatTemplateFailed):
                rendered = self.render(self.form.arranged(turns), add_generation_prompt=False)
                yield rendered.partition(answer)[2]

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the template source and the special tokens it can write."""
        return (self.source, *self._special_tokens.values())

    def placeholder_renderings(self) -> Iterator[str]:
        """Render every kind of turn, with and without tools and generation prompt."""
        conversations = (
            *USUAL,
            (USER, ANSWER, USER, ANSWER),
            (SYSTEM, USER, CALLED, RESULT, ANSWER, USER),
        )
        ends: list[tuple[bool, bool | None]] = [(False, None), (True, None)]
        ends += [(True, False), (True, True)]
        for kinds, tools, (is_begun, thinking) in product(
            conversations, ((), (_PROBE_TOOL,)), ends
        ):
            with suppress(ChatTemplateFailed):  # not every template accepts every turn
                yield self.render(
                    self.form.arranged(_probe(kinds)[0]),
                    tools,
                    add_generation_prompt=is_begun,
                    thinking=thinking,
                )

    def _shows(
        self,
        kinds: tuple[TurnKind, ...],
        form: Form,
        *,
        tool_sets: Sequence[tuple[Tool, ...]] = ((), (_PROBE_TOOL,)),
        id_layout: str = _PROBE_IDS[-1],
    ) -> bool:
        """Return whether the template shows such a conversation, with one of the sets of tools."""
        for tools in tool_sets:
            while self._costly_count < COSTLY_MAX:
                try:
                    if self._lost(kinds, form, tools, id_layout) is None:
                        return True
                except ChatTemplateFailed as error:
                    if isinstance(error.__cause__, TemplateTooCostly):
                        self._costly_count += 1
                        continue
                break
        return False

    def accepted(
        self, messages: Sequence[ChatMessage], *, has_tools: bool
    ) -> Sequence[ChatMessage] | None:
        """Return the conversation, or one that means the same; None if the template shows none."""
        if self.fault(messages, has_tools=has_tools) is None:
            return messages
        for other in _equivalents(messages, moves_system=self.shows_system):
            if self.fault(other, has_tools=has_tools) is None:
                return other
        return None

    def fault(self, messages: Sequence[ChatMessage], *, has_tools: bool) -> str | None:
        """Return what is wrong with the rendering of such a conversation, or None."""
        kinds = _folded(map(_kind_of, messages))
        find = self._find_fault if len(kinds) <= KNOWN_TURNS_MAX else self._find_fault.__wrapped__
        return find(kinds, (_PROBE_TOOL,) if has_tools else ())

    def _find(self, kinds: tuple[TurnKind, ...], tools: tuple[Tool, ...]) -> str | None:
        try:
            return self._lost(kinds, self.form, tools)
        except ChatTemplateFailed as error:
            # One that is too costly is too costly in every form.
            return None if isinstance(error.__cause__, TemplateTooCostly) else REFUSED

    def _lost(
        self,
        kinds: tuple[TurnKind, ...],
        form: Form,
        tools: tuple[Tool, ...],
        id_layout: str = _PROBE_IDS[-1],
    ) -> str | None:
        """Return what the template does with the first part that it does not show once.

        Raises: ChatTemplateFailed if the template rejects such a conversation.
        """
        turns, words = _probe(kinds, id_layout)
        turns = form.arranged(turns)
        rendered = self.render(turns, tools, form=form)
        if tools:
            words += [(word, "a part of the tools") for word in _TOOL_WORDS]
        if _PRINTED.search(rendered):
            return f"prints parts of messages as Python objects in this conversation: {REMEDY}"
        shown = Counter(_WORD.findall(rendered))
        for word, what in words:
            if not shown[word]:
                return f"leaves out {what} in this conversation: {REMEDY}"
            if shown[word] > 1 and what.startswith("text"):
                return f"repeats {what} in this conversation: {REMEDY}"
        for call_id in [call.id for turn in turns for call in turn.tool_calls][:1]:
            parts = (
                call_id[start : start + CUT_CHARS] for start in range(len(call_id) - CUT_CHARS)
            )
            if call_id not in rendered and any(part in rendered for part in parts):
                return f"cuts the ids of calls: send ids of {ID_LENGTH} letters and digits"
        return None

    def thinking_variables(self, thinking: Thinking) -> dict[str, bool | str]:
        """Return the variables by which the template sets this thinking; empty if it cannot."""
        if isinstance(thinking, str):
            if EFFORT in self.variables:
                return {EFFORT: thinking}
            thinking = thinking != EFFORTS[0]
        if thinking is None or self.thinking_switch is None:
            return {}
        return {self.thinking_switch: thinking}

    def render(
        self,
        arranged: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        thinking: Thinking = None,
        form: Form | None = None,
    ) -> str:
        shown = partial(_as_dict, form=form or self.form)
        if is_unfinished := bool(arranged) and arranged[-1].is_unfinished:
            add_generation_prompt = False
            last = replace(arranged[-1], content=arranged[-1].content + END_MARK)
            arranged = [*arranged[:-1], last]
        try:
            rendered = self._template.render(
                messages=[
                    shown(message) | dict.fromkeys(self._thought_names, message.reasoning)
                    if message.reasoning
                    else shown(message)
                    for message in arranged
                ],
                add_generation_prompt=add_generation_prompt,
                tools=[_tool_as_dict(tool) for tool in tools] or None,
                documents=None,
                strftime_now=partial(utc_text, datetime.now(UTC)),
                **self._special_tokens,
                **self.thinking_variables(thinking),
                **{LOOK_AT_CLOCK: Budget().look_at_clock},
            )
            return _until_mark(rendered) if is_unfinished else rendered
        except RecursionError as error:
            raise ChatTemplateFailed("the chat template recurses too deeply") from error
        except MemoryError as error:
            raise ChatTemplateFailed("the chat template ran out of memory") from error
        except _REFUSALS as error:
            raise ChatTemplateFailed(str(error)) from error


def _until_mark(rendered: str) -> str:
    """Return the text before the end mark. Raises: TemplateError if it is not there."""
    text, mark, _ = rendered.rpartition(END_MARK)
    if not mark:
        raise TemplateError(
            "the chat template leaves out the text of the last message, which is to be continued"
        )
    return text


def _probe(
    kinds: Sequence[TurnKind], id_layout: str = _PROBE_IDS[-1]
) -> tuple[list[ChatMessage], list[tuple[str, str]]]:
    """Return a conversation of these kinds with unique words, and each word with its meaning."""
    turns: list[ChatMessage] = []
    words: list[tuple[str, str]] = []
    number = count()

    def word(meaning: str) -> str:
        words.append((f"{_PROBE}{next(number):05d}Q", meaning))
        return words[-1][0]

    calls: list[ToolCall] = []
    answered = 0
    for kind in kinds:
        content = word(f"text of the role {kind.role!r}") if kind.has_text else ""
        made = tuple(
            ToolCall(
                id_layout.format(*[1000 + len(calls) + index] * 2),
                word("the name of a call"),
                json.dumps({word("arguments of a call"): word("arguments of a call")}),
            )
            for index in range(kind.calls)
        )
        calls += made
        result_of = None
        if kind.role == RESULT.role:
            calls = calls or [ToolCall(id_layout.format(1000, 1000), _PROBE, "{}")]
            result_of = calls[min(answered, len(calls) - 1)]
            answered += 1
        reasoning = f"{_PROBE}Thought" * kind.has_reasoning  # templates may leave it out
        turns.append(ChatMessage(kind.role, content, made, result_of, reasoning))
    return turns, words


def utc_text(moment: datetime, layout: str) -> str:
    """Format a moment in UTC as `strftime` does, in English whatever locale and time zone are."""
    _refuse_costly(layout, ())

    def text(found: re.Match[str]) -> str:
        flags, _, letter = found.groups()
        match letter:
            case "a" | "A":
                name = WEEKDAYS[moment.weekday()][: 3 if letter == "a" else None]
            case "b" | "h" | "B":
                name = MONTHS[moment.month - 1][: None if letter == "B" else 3]
            case "p" | "P":
                name = "AM" if moment.hour < 12 else "PM"
                name = name.lower() if letter == "P" or "#" in flags else name
            case "s":
                name = str(int(moment.timestamp()))
            case _ if letter in _C_LOCALE:
                name = utc_text(moment, _C_LOCALE[letter])
            case _:
                name = moment.strftime(re.sub("[EO]", "", found[0][:-1]) + letter)
        return name.upper() if "^" in flags else name

    return _DIRECTIVE.sub(text, layout)


def _reads(source: str, name: str) -> bool:
    """Return whether a template reads this field of a message."""
    return re.search(rf"""\.{name}\b|['"]{name}['"]""", source) is not None


def _as_dict(message: ChatMessage, form: Form) -> dict[str, Any]:
    """Convert a turn to the form that the template expects.

    Arguments are objects, which templates serialize; malformed ones are text.
    """
    content: Any = message.content
    if message.role in form.part_roles:
        content = [{"type": "text", "text": content}]
    elif form.null_content and message.tool_calls and not content:
        content = None
    turn: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call, form)},
            }
            for call in message.tool_calls
        ]
    if message.call is not None:
        turn |= {"tool_call_id": message.call.id, "name": message.call.name}
    return turn


def _arguments(call: ToolCall, form: Form) -> Any:
    arguments = json.loads(call.arguments)
    return call.arguments if form.text_arguments and isinstance(arguments, dict) else arguments


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


def _added_tokens(directory: Path, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and text of further tokens that tokenizer_config.json adds."""
    with entries_of(directory / "tokenizer_config.json"):
        entries = (config.get("added_tokens_decoder") or {}).values()
        return [("added_tokens_decoder", str(token["content"])) for token in entries]


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
