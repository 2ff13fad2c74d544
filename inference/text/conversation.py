"""Messages of a conversation, and the forms in which chat templates accept them.

A template decides what it shows of a turn by its kind (`TurnKind`). It may take calls and their
results in one form only (`Form`), and a conversation only in an equivalent one (`equivalents`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count, takewhile
from typing import NamedTuple

from inference.text.call_parser import ID_CHARACTERS, ID_LENGTH
from inference.text.tools import ToolCall

SYSTEM_ROLES = frozenset({"system", "developer"})
PERIOD_MAX, ROUND_MAX = 4, 3  # a repeated run of up to 4 turns is probed with 3 rounds


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. The template decides which roles are valid.

    `tool_calls` are calls that the model made in this turn. With the role "tool", `call` is the
    call that this turn answers. `reasoning` is the thinking in a turn of the model. With
    `is_unfinished`, the prompt ends with the text of this last turn, which the model continues.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    call: ToolCall | None = None
    reasoning: str = ""
    is_unfinished: bool = False


class CallIds(StrEnum):
    """Ids of tool calls as a template expects them.

    CLIENT: the client's own ids. SHORT: nine letters and digits (Mistral). NAMED:
    `functions.NAME:0`, counted through the conversation, for a template that shows the name of a
    call only in its id (Kimi K2).
    """

    CLIENT = "client"
    SHORT = "short"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Form:
    """Variant of conversations that a template expects.

    The content is a list of parts for `part_roles`, and a string for other roles. With
    `text_arguments`, arguments of calls are JSON text instead of objects. With `null_content`,
    content is null in turns that have only calls. With `single_calls`, each call is a turn,
    followed by its result. With `text_apart`, text before calls is a turn of its own.
    """

    part_roles: frozenset[str] = frozenset()
    text_arguments: bool = False
    null_content: bool = False
    ids: CallIds = CallIds.CLIENT
    single_calls: bool = False
    text_apart: bool = False

    def arranged(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Rearrange the turns for the template, and replace the ids of calls."""
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
    """Replace the ids of calls by ids of nine letters and digits.

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
    """Replace the ids of calls by name and number, which depend on earlier calls only."""
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


class TurnKind(NamedTuple):
    """Properties of a turn by which templates decide what to show. `calls` is at most two."""

    role: str
    has_text: bool = True
    calls: int = 0
    has_reasoning: bool = False


SYSTEM, USER, ANSWER, RESULT, CALLED, CALLED_TWICE, TEXT_AND_CALL = (
    *map(TurnKind, ("system", "user", "assistant", "tool")),
    *(TurnKind("assistant", False, calls) for calls in (1, 2)),
    TurnKind("assistant", True, 1),
)
# Usual conversations. Templates that reject or do not show some of them are common.
USUAL: tuple[tuple[TurnKind, ...], ...] = (
    (USER,),
    (SYSTEM, USER),
    (SYSTEM, USER, ANSWER, USER, ANSWER, USER),
    (USER, CALLED, RESULT),
    (USER, CALLED_TWICE, RESULT, RESULT),
    (USER, TEXT_AND_CALL, RESULT, ANSWER, USER),
)


def kind_of(message: ChatMessage) -> TurnKind:
    content, reasoning = message.content, message.reasoning
    return TurnKind(
        message.role,
        content != "" and not content.isspace(),
        min(len(message.tool_calls), 2),
        reasoning != "" and not reasoning.isspace(),
    )


def folded(kinds: Iterable[TurnKind]) -> tuple[TurnKind, ...]:
    """Drop further rounds of repeated runs of turns, since templates treat them alike."""
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


def equivalents(
    messages: Sequence[ChatMessage], *, moves_system: bool
) -> Iterator[Sequence[ChatMessage]]:
    """Yield conversations with the same meaning, for templates that do not take this one.

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
    """Yield conversations with the first system messages moved.

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
    """Join consecutive turns of a user, or of an assistant, into one."""
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


def late_system(messages: Sequence[ChatMessage]) -> int | None:
    """Return the index of the first system message that follows one of another role; None without
    one.
    """
    systems = [index for index, each in enumerate(messages) if each.role in SYSTEM_ROLES]
    return next((index for expected, index in enumerate(systems) if expected != index), None)


def _with_one_answer(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Rearrange a conversation to one answer between two questions, for templates that alternate.

    Texts beside calls move to the answer that follows the results. Where no answer follows yet,
    they become a turn before the calls. A question right after results follows an empty answer.
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
