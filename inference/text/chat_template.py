"""Rendering of conversations to prompts with the checkpoint's Jinja templates.

A template silently drops text that it gets in a form it does not read. So each template is
probed with unique words: the probes choose the form of conversations (`Form`), and a conversation
of which the template leaves out or repeats a part is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache, partial
from itertools import count, product
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, meta
from jinja2.ext import loopcontrols

from inference.checkpoint.json_files import entries_of, read_json
from inference.errors import ChatTemplateFailed, CheckpointInvalid
from inference.text.call_parser import ID_LENGTH
from inference.text.conversation import (
    ANSWER,
    CALLED,
    CALLED_TWICE,
    RESULT,
    SYSTEM,
    SYSTEM_ROLES,
    TEXT_AND_CALL,
    USER,
    USUAL,
    CallIds,
    ChatMessage,
    Form,
    TurnKind,
    equivalents,
    folded,
    kind_of,
    late_system,
)
from inference.text.template_sandbox import (
    READ_CLOCK,
    BoundedEnvironment,
    Budget,
    GenerationBlock,
    TemplateTooCostly,
    refuse,
    to_json,
    utc_text,
)
from inference.text.tools import CallFormat, Tool, ToolCall, format_in

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
# Whether, or with which effort, the model should think; None for the template's default.
Thinking = bool | str | None
# Conversations of which a template's fault is remembered, and the turns of one: at most 5 MB.
KNOWN_FAULTS_MAX, KNOWN_TURNS_MAX = 1024, 64
COMPILED_MAX = 32  # templates whose code is kept, for the replicas and restarts of their models


class ChatTemplates:
    """Chat templates of one checkpoint: the default, and if present one for tools."""

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
        """Detect the format in which the template shows tool calls; None if it is not supported."""
        template = self._template(has_tools=True)
        return None if template is None else format_in(template.source)

    def shows_tools(self) -> bool:
        """Return whether the template renders the definitions of tools."""
        template = self._template(has_tools=True)
        return template is not None and template.shows_tools

    def takes_one_call_only(self) -> bool:
        """Return whether the template can show an answer with one call, but not with several."""
        template = self._template(has_tools=True)
        return template is not None and template.takes_one_call_only

    def sources(self) -> tuple[str, ...]:
        """List all text that is not written by callers: template sources and special tokens."""
        return tuple(text for template in self._by_name.values() for text in template.texts)

    def needed_tokens(self) -> Iterator[tuple[str, str]]:
        """Yield name and text of the tokens that the tokenizer must have.

        They are the end token and those that a template writes. transformers would add them.
        """
        for name, token in (*self._special_tokens.items(), *self._added_tokens):
            if name == "eos_token" or any(
                name in each.variables or token in each.source for each in self._by_name.values()
            ):
                yield name, token

    def faults(self) -> list[str]:
        """List the kinds of turns, of those in usual conversations, that are not rendered."""
        return sorted({fault for each in self._by_name.values() for fault in each.faults()})

    def turn_ends(self) -> Iterator[Iterator[str]]:
        """Yield for each template the texts it writes after an answer, in several conversations."""
        return (each.turn_ends() for each in self._by_name.values())

    def placeholder_renderings(self) -> Iterator[str]:
        """Render placeholder conversations with every template; the rest is the template's text."""
        for template in self._by_name.values():
            yield from template.placeholder_renderings()

    def takes_thinking(self, thinking: bool | str, *, has_tools: bool) -> bool:
        """Return whether the template has this switch or effort; thinking off needs none."""
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
        """Rearrange a conversation into turns that the template renders, which may differ from the
        caller's.

        Raises ChatTemplateFailed if the template is missing, or would leave out or repeat a part.
        """
        template = self._template(has_tools=bool(tools))
        if template is None:
            raise ChatTemplateFailed(
                "this model has no chat template; send a prompt instead of messages"
            )
        for message in messages:
            if not _ROLE.fullmatch(message.role):
                raise ChatTemplateFailed(
                    f"role {message.role!r} is not a name: use a role such as user"
                )
        if tools and not template.shows_tools:
            raise ChatTemplateFailed(
                "this model's chat template has no place for tools: leave them out, or choose"
                " another model"
            )
        if not template.shows_calls and any(
            message.tool_calls or message.call for message in messages
        ):
            raise ChatTemplateFailed(
                "this model's chat template has no place for tool calls and their results: send"
                " them as text, or choose another model"
            )
        if thinking not in (None, *NOT_THINKING) and not template.thinking_variables(thinking):
            raise ChatTemplateFailed(
                "this model's chat template has no switch for thinking: leave it unset, or choose"
                " another model"
            )
        has_tools = bool(tools)
        if (accepted := template.accepted(messages, has_tools=has_tools)) is not None:
            return template.form.arranged(accepted)
        if (index := late_system(messages)) is not None:
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
        """Render turns from `arranged`, which has checked that the template can show them.

        `thinking` is None for the template's default. Raises ChatTemplateFailed if the template
        rejects the conversation.
        """
        template = self._template(has_tools=bool(tools))
        assert template is not None, "`arranged` checked it"
        return template.render(
            arranged, tools, add_generation_prompt=add_generation_prompt, thinking=thinking
        )


@lru_cache(COMPILED_MAX)
def _compiled(source: str) -> tuple[Template, Set[str]]:
    """Compile a template; return it and the variables that it reads. Raises: TemplateError."""
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = to_json
    template = environment.from_string(source)
    # Copied at each rendering, which takes longer from the `ChainMap` that Jinja makes.
    template.globals = dict(template.globals)
    return template, meta.find_undeclared_variables(environment.parse(source))


class _ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str], path: Path) -> None:
        try:
            self._template, self.variables = _compiled(source)
        except TemplateError as error:
            raise CheckpointInvalid(path, f"the chat template does not parse: {error}") from error
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
        """True if tools appear in the rendered text; some templates drop them silently."""
        return self._shows((USER,), self.form, tool_sets=((_PROBE_TOOL,),))

    @cached_property
    def shows_system(self) -> bool:
        """True if a system message in the usual place appears in the rendered text."""
        return self._shows((SYSTEM, USER), self.form)

    @cached_property
    def shows_calls(self) -> bool:
        """True if calls and their results appear in the rendered text."""
        return self._shows((USER, CALLED, RESULT), self.form)

    @cached_property
    def takes_one_call_only(self) -> bool:
        """True if an answer can show one call, but not several, neither in one turn nor in more."""
        several = (USER, CALLED_TWICE, RESULT, RESULT)
        return self.shows_calls and not self._shows(several, self.form)

    @cached_property
    def form(self) -> Form:
        """First form in which the template shows each kind of turn."""
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
            (USER, TEXT_AND_CALL, RESULT, ANSWER, USER), [form, replace(form, text_apart=True)]
        )

    def _first_of(
        self,
        kinds: tuple[TurnKind, ...],
        forms: Sequence[Form],
        id_layouts: Sequence[str] = _PROBE_IDS[-1:],
    ) -> Form:
        """Find the first form in which this conversation is shown, or return the first of all."""
        for form in forms:
            if all(self._shows(kinds, form, id_layout=layout) for layout in id_layouts):
                return form
        return forms[0]

    def faults(self) -> Iterator[str]:
        """Yield the usual conversations that the template does not show, by their roles."""
        for kinds in USUAL:
            if not self._shows(kinds, self.form):
                roles = (f"{kind.role}{' with calls' if kind.calls else ''}" for kind in kinds)
                yield ", ".join(roles)

    def turn_ends(self) -> Iterator[str]:
        """Yield the text behind an answer: the last one, which some templates leave open, and one
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
        """Template source, and the special tokens that it can write."""
        return (self.source, *self._special_tokens.values())

    def placeholder_renderings(self) -> Iterator[str]:
        """Render every kind of turn, with and without tools and the generation prompt."""
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
        """Return whether the template shows this conversation with any of the sets of tools."""
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
        """Find a conversation that the template shows: this one or an equivalent, else None."""
        if self.fault(messages, has_tools=has_tools) is None:
            return messages
        for other in equivalents(messages, moves_system=self.shows_system):
            if self.fault(other, has_tools=has_tools) is None:
                return other
        return None

    def fault(self, messages: Sequence[ChatMessage], *, has_tools: bool) -> str | None:
        """Probe a conversation of these kinds of turns; return what is wrong with it, or None."""
        kinds = folded(map(kind_of, messages))
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
        """Describe the first part of a conversation that the template does not show exactly once.

        Raises ChatTemplateFailed if the template rejects the conversation.
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
        """Choose the variables that set this thinking in the template; empty if it has none."""
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
                **{READ_CLOCK: Budget().read_clock},
            )
            return _until_mark(rendered) if is_unfinished else rendered
        except RecursionError as error:
            raise ChatTemplateFailed(
                "the chat template recurses too deeply: send a shorter conversation"
            ) from error
        except MemoryError as error:
            raise ChatTemplateFailed(
                "the chat template ran out of memory: send a shorter conversation"
            ) from error
        except _REFUSALS as error:
            raise ChatTemplateFailed(str(error)) from error


def _until_mark(rendered: str) -> str:
    """Cut a rendered text at the end mark. Raises TemplateError if the mark is missing."""
    text, mark, _ = rendered.rpartition(END_MARK)
    if not mark:
        raise TemplateError(
            "the chat template leaves out the text of the last message, which is to be continued"
        )
    return text


def _probe(
    kinds: Sequence[TurnKind], id_layout: str = _PROBE_IDS[-1]
) -> tuple[list[ChatMessage], list[tuple[str, str]]]:
    """Build a conversation of these kinds with unique words; return it, and each word's meaning."""
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


def _reads(source: str, name: str) -> bool:
    """Return whether a template's source reads this field of a message."""
    return re.search(rf"""\.{name}\b|['"]{name}['"]""", source) is not None


def _as_dict(message: ChatMessage, form: Form) -> dict[str, Any]:
    """Convert a turn to the message that the template expects.

    Arguments become objects, which templates serialize; malformed ones stay text.
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
    """Map each template's name to its source and file. Files override tokenizer_config.json."""
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
    """Map `bos_token` etc. to text; tokenizer_config.json overrides special_tokens_map.json."""
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
    """List name and text of further tokens that tokenizer_config.json adds."""
    with entries_of(directory / "tokenizer_config.json"):
        entries = (config.get("added_tokens_decoder") or {}).values()
        return [("added_tokens_decoder", str(token["content"])) for token in entries]
