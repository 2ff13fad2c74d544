"""Reasoning in the output of a model: splits its thinking from its answer, token by token.

A format is data: the markers around the thinking (`MARKERS`), or the tokens of messages with a
channel each (`CHANNEL_TOKENS`). Which format a model writes is read from its tokenizer and its chat
template. Markers that are tokens of their own are found by their ids, so that an answer or a
thought may spell them; the others are found in the text, as stop sequences are.

    before     blank, or the beginning of an opening marker: undecided
    thinking   until the closing marker; also from the start, if the prompt ends with an opening one
    answer     the rest: later markers are text. Only here stop sequences are searched

Each token of thinking and markers counts as reasoning. Markers are in neither text, nor are the
blanks around the thinking and blank lines before the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import tokenizers

from inference.text.detokenizer import NOTHING, Detokenizer, Stops, TextPiece, held_length
from inference.text.tools import marked_call

BLANK_TOKENS_MAX = 8  # before an opening marker; models write one or two
PROMPT_TAIL_TOKENS = 32  # searched for an opening marker at the end of a prompt
HEADER_CHARS_MAX = 1024  # of a message with a channel; longer ones are text

# GPT-OSS (harmony): `<|start|>assistant<|channel|>analysis<|message|>…<|end|>`
CHANNEL_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
THINKING_CHANNEL = "analysis"
RECIPIENT = " to="  # begins the header of a call that no token of the format precedes
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_CALLED = re.compile(r"\bto=functions\.([\w-]+)")


class Markers(NamedTuple):
    """Opening and closing text around the thinking, and around the answer after it, if any."""

    opening: str
    closing: str
    answer_opening: str = ""
    answer_closing: str = ""


# The first that fits is used, so more specific ones come first.
MARKERS = (
    Markers("<think>", "</think>", "<answer>", "</answer>"),  # Hunyuan A13B
    Markers("<think>", "</think>", "<response>", "</response>"),  # Ernie 4.5 and X1
    # Cohere Command A Reasoning
    Markers("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    Markers("<seed:think>", "</seed:think>"),  # Seed-OSS
    Markers("[THINK]", "[/THINK]"),  # Magistral from 2507
    Markers("◁think▷", "◁/think▷"),  # Kimi-VL
    Markers("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Markers("<|channel>thought", "<channel|>"),  # Gemma 4
    Markers("<thought>", "</thought>"),  # EXAONE Deep
    Markers("<reasoning>", "</reasoning>"),  # Reka Flash
    Markers("Here is my thought process:", "Here is my response:"),  # Granite 3.2
    # Qwen3, DeepSeek, GLM, Kimi K2, MiniMax, Nemotron, Phi-4, Step3, Olmo 3, SmolLM3 and others
    Markers("<think>", "</think>"),
)


class Phase(Enum):
    """Part of the output to which the next token belongs."""

    UNDECIDED = 0
    THINKING = 1
    ANSWER = 2


class ReasoningFormat(Protocol):
    """Base of the formats in which models mark their thinking."""

    def opens(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether the prompt ends inside thinking that the output continues."""
        ...

    def closes(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether the prompt ends where thinking was closed, so that an answer follows."""
        ...

    def leaves_open(self, answer: str) -> bool:
        """Return whether the beginning of an answer ends inside thinking."""
        ...

    def split(self, text: Detokenizer, stops: Stops, *, begun: bool, has_ids: bool) -> Split:
        """Build a detokenizer that splits an output into thinking and answer.

        `text` decodes the output, without stop sequences. With `begun`, the prompt has opened the
        thinking. Without `has_ids`, markers are found in the text, since token ids are unknown.
        """
        ...

    @property
    def opening_ids(self) -> tuple[int, ...]:
        """Ids of tokens that may begin the thinking."""
        ...

    @property
    def closing_ids(self) -> tuple[int, ...]:
        """Ids of tokens that end the thinking and begin the answer."""
        ...


def reasoning_format(
    backend: tokenizers.Tokenizer, sources: Sequence[str]
) -> ReasoningFormat | None:
    """Detect the format of a model's reasoning; None if it has none.

    `sources` are its chat templates. Markers count if a template names one, or if both are tokens.
    """
    added = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
    if all(token in added for token in CHANNEL_TOKENS):
        return Channels(backend, *(added[token] for token in CHANNEL_TOKENS))
    for markers in MARKERS:
        is_named = any(
            (markers.opening in source or markers.closing in source)
            and markers.answer_opening in source
            for source in sources
        )
        both = markers.opening in added and markers.closing in added
        if is_named or (both and markers.answer_opening in (added | {"": 0})):
            ids = (added[markers.opening], added[markers.closing]) if both else None
            return Marked(markers, ids, backend)
    return None


@dataclass(frozen=True, slots=True)
class Marked:
    """Format with markers around the thinking, and the markers' ids, if both are single tokens."""

    markers: Markers
    ids: tuple[int, int] | None
    backend: tokenizers.Tokenizer

    def opens(self, prompt_token_ids: Sequence[int]) -> bool:
        """Implement `ReasoningFormat.opens`: only blanks follow the last opening marker."""
        return self._ends_with(prompt_token_ids, 0)

    def closes(self, prompt_token_ids: Sequence[int]) -> bool:
        """Implement `ReasoningFormat.closes`."""
        return self._ends_with(prompt_token_ids, 1)

    def _ends_with(self, prompt_token_ids: Sequence[int], index: int) -> bool:
        tail = list(prompt_token_ids[-PROMPT_TAIL_TOKENS:])
        if self.ids is None:
            text = self.backend.decode(tail, skip_special_tokens=False)
            return text.rstrip().endswith(self.markers[index])
        while tail and tail[-1] != self.ids[index]:
            if self.backend.decode([tail.pop()], skip_special_tokens=False).strip():
                return False
        return bool(tail)

    def leaves_open(self, answer: str) -> bool:
        """Implement `ReasoningFormat.leaves_open`."""
        body = answer.lstrip()
        return body.startswith(self.markers.opening) and self.markers.closing not in body

    def split(self, text: Detokenizer, stops: Stops, *, begun: bool, has_ids: bool) -> Split:
        """Implement `ReasoningFormat.split`."""
        phase = Phase.THINKING if begun else Phase.UNDECIDED
        ids = self.ids if has_ids else None
        return MarkedSplit(stops, frozenset(), text, phase, self.markers, ids)

    @property
    def opening_ids(self) -> tuple[int, ...]:
        """Implement `ReasoningFormat.opening_ids`."""
        return () if self.ids is None else self.ids[:1]

    @property
    def closing_ids(self) -> tuple[int, ...]:
        """Implement `ReasoningFormat.closing_ids`."""
        if self.ids is not None:
            return self.ids[1:]
        closing = f"\n{self.markers.closing}\n"
        return tuple(self.backend.encode(closing, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class Channels:
    """Format with a channel for each message, marked by the ids of `CHANNEL_TOKENS`."""

    backend: tokenizers.Tokenizer
    start: int
    channel: int
    message: int
    end: int
    call: int
    finish: int

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the tokens of the format."""
        return self.start, self.channel, self.message, self.end, self.call, self.finish

    @property
    def inner_ids(self) -> frozenset[int]:
        """Ids of the tokens within an output that may be part of a thought or an answer."""
        return frozenset((self.start, self.channel, self.message, self.end))

    def opens(self, prompt_token_ids: Sequence[int]) -> bool:
        """Implement `ReasoningFormat.opens`: templates begin a message, never a thought."""
        return False

    def closes(self, prompt_token_ids: Sequence[int]) -> bool:
        """Implement `ReasoningFormat.closes`."""
        return False

    def leaves_open(self, answer: str) -> bool:
        """Implement `ReasoningFormat.leaves_open`: thoughts are messages of their own."""
        return False

    def split(self, text: Detokenizer, stops: Stops, *, begun: bool, has_ids: bool) -> Split:
        """Implement `ReasoningFormat.split`. Without ids, messages cannot be told apart."""
        if not has_ids:
            return Split(stops, frozenset(), text, Phase.ANSWER)
        return ChannelSplit(stops, frozenset(), text, Phase.UNDECIDED, self)

    @property
    def opening_ids(self) -> tuple[int, ...]:
        """Implement `ReasoningFormat.opening_ids`."""
        return (self.channel,)

    @property
    def closing_ids(self) -> tuple[int, ...]:
        """Implement `ReasoningFormat.closing_ids`."""
        ids = self.backend.encode("<|end|><|start|>assistant<|channel|>final<|message|>").ids
        return tuple(ids)


@dataclass(slots=True, eq=False)
class Split(Detokenizer):
    """Detokenizer that splits an output into thinking and answer. `text` decodes without a search
    for stops, and returns marks, which are dropped from thoughts.

    `phase` is that of the next token. `marked_functions` are those whose calls are marked, see
    `GenerationRequest`.
    """

    text: Detokenizer
    phase: Phase
    marked_functions: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.marks = self.text.marks

    @property
    def thinks(self) -> bool:
        return self.phase is Phase.THINKING

    def feed(self, text: str, token_count: int, thought: str = "") -> None:
        self.text.feed(text, token_count, thought)

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        return self._answer(self.text.push(token_id, may_stop=may_stop).text, may_stop)

    def finish(self) -> TextPiece:
        return self._last(self.text.finish().text)

    def _answer(self, text: str, may_stop: bool) -> TextPiece:
        return self._search(text) if may_stop and self.stops else TextPiece(text)

    def _last(self, text: str) -> TextPiece:
        return self._search_rest(text) if self.stops else TextPiece(text)


@dataclass(slots=True, eq=False)
class MarkedSplit(Split):
    """Split of an output at markers.

    `waiting` is text that is undecided, or that a marker or the end of its part may remove.
    `undecided_count` counts the tokens of an undecided beginning. `has_thought` tells that the
    thinking has text, `is_opening` that the answer after it has none yet, and `is_wrapped` that the
    marker before the answer was found.
    """

    markers: Markers
    ids: tuple[int, int] | None
    waiting: str = field(init=False, default="")
    undecided_count: int = field(init=False, default=0)
    has_thought: bool = field(init=False, default=False)
    is_opening: bool = field(init=False, default=False)
    is_wrapped: bool = field(init=False, default=False)

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        if self.ids is not None:
            if token_id == self.ids[0] and self._may_open:
                count, self.undecided_count = self.undecided_count + 1, 0
                self.waiting, self.phase = "", Phase.THINKING
                return TextPiece("", reasoning_token_count=count)
            if token_id == self.ids[1] and self.phase is Phase.THINKING:
                thought = self._ready(self.waiting + self.text.finish().text)
                return self._closed(thought, "", may_stop)._replace(reasoning_token_count=1)
        return self._read(self.text.push(token_id, may_stop=may_stop).text, 1, may_stop)

    def finish(self) -> TextPiece:
        """Implement `Detokenizer.finish`. Blanks before an answer without text are dropped."""
        text = self.text.finish().text
        piece = self._read(text, 0, True) if text else NOTHING
        if piece.stopped:
            return piece
        rest, self.waiting = self.waiting, ""
        if self.phase is Phase.THINKING:
            return piece._replace(reasoning=piece.reasoning + rest)
        if self.is_opening:
            rest = _without_blank_lines(rest)
        elif self.is_wrapped and self.markers.answer_closing in rest:
            rest = ""
        last = self._last(rest)
        return TextPiece(piece.text + last.text, last.stop, piece.reasoning)

    def _read(self, text: str, token_count: int, may_stop: bool) -> TextPiece:
        if self.phase is Phase.THINKING:
            return self._thought(text, token_count, may_stop)
        if self.phase is Phase.ANSWER:
            return self._answered(text, may_stop)
        self.waiting += text
        self.undecided_count += token_count
        body, opening = self.waiting.lstrip(), self.markers.opening
        if self.ids is None and body.startswith(opening):
            self.waiting, self.phase = "", Phase.THINKING
            count, self.undecided_count = self.undecided_count, 0
            return self._thought(body[len(opening) :], count, may_stop)
        may_open = self.ids is None and opening.startswith(body)
        if (body and may_open) or (not body and self.undecided_count <= BLANK_TOKENS_MAX):
            return NOTHING
        text, self.waiting, self.phase = self.waiting, "", Phase.ANSWER
        return self._answer(text, may_stop)

    @property
    def _may_open(self) -> bool:
        """True where an opening marker counts as one: several models repeat the prompt's."""
        return self.phase is not Phase.ANSWER and not self.has_thought

    def _thought(self, text: str, token_count: int, may_stop: bool) -> TextPiece:
        self.waiting += self._shown(text)
        kept, closing = 0, self.markers.closing
        if self.ids is None and self._may_open and (body := self.waiting.lstrip()):
            opening = self.markers.opening
            if opening.startswith(body) and body != opening:
                return TextPiece("", reasoning_token_count=token_count)
            self.waiting = body.removeprefix(opening)
        if self.ids is None:
            if (start := self.waiting.find(closing)) >= 0:
                rest = self.waiting[start + len(closing) :]
                piece = self._closed(self._ready(self.waiting[:start]), rest, may_stop)
                return piece._replace(reasoning_token_count=token_count)
            kept = held_length(self.waiting, (closing,))
        end = len(self.waiting) - kept
        ready, waiting = self.waiting[:end], self.waiting[end:]
        thought = self._ready(ready)
        blanks = ready[len(ready.rstrip()) :] if self.has_thought else ""
        self.waiting = blanks + waiting
        return TextPiece("", "", thought, token_count)

    def _ready(self, thought: str) -> str:
        """Strip blanks from the end of a thought, and from the beginning of the first one."""
        thought = thought.rstrip() if self.has_thought else thought.strip()
        self.has_thought |= bool(thought)
        return thought

    def _closed(self, thought: str, rest: str, may_stop: bool) -> TextPiece:
        self.waiting, self.phase, self.is_opening = "", Phase.ANSWER, True
        piece = self._answered(rest, may_stop)
        return piece._replace(reasoning=thought)

    def _answered(self, text: str, may_stop: bool) -> TextPiece:
        if not (self.is_opening or self.is_wrapped):
            return self._answer(text, may_stop)
        self.waiting += text
        opening, closing = self.markers.answer_opening, self.markers.answer_closing
        if self.is_opening:
            body = self.waiting.lstrip()
            if opening and not self.is_wrapped and body.startswith(opening):
                self.is_wrapped, self.waiting = True, body[len(opening) :]
                body = self.waiting.lstrip()
            if not body or (not self.is_wrapped and opening.startswith(body)):
                return NOTHING
            self.waiting, self.is_opening = _without_blank_lines(self.waiting), False
        if not self.is_wrapped:
            text, self.waiting = self.waiting, ""
            return self._answer(text, may_stop)
        body = self.waiting.rstrip()
        kept = len(closing) if body.endswith(closing) else held_length(self.waiting, (closing,))
        end = len((body if body.endswith(closing) else self.waiting)[: -kept or None].rstrip())
        text, self.waiting = self.waiting[:end], self.waiting[end:]
        piece = self._answer(text, may_stop)
        if piece.stopped and (body := piece.text.rstrip()).endswith(closing):
            return piece._replace(text=body.removesuffix(closing).rstrip())
        return piece


def _without_blank_lines(text: str) -> str:
    """Strip blank lines from the beginning of a text."""
    body = text.lstrip()
    return text[text.rfind("\n", 0, len(text) - len(body)) + 1 :] if body else ""


@dataclass(slots=True, eq=False)
class ChannelSplit(Split):
    """Split of an output with a channel for each message.

    `header` is that of the message whose text has not begun, with `header_token_count` tokens; None
    inside its text. With `is_bare`, no token of the format was seen, so the output may be plain
    text. `emitted` has the kinds of text so far. `call_end` is the text to write after the
    arguments of the current call; empty outside of calls. `has_arguments` tells whether the
    arguments have text.
    """

    format: Channels
    header: str | None = field(init=False, default="")
    header_token_count: int = field(init=False, default=0)
    is_bare: bool = field(init=False, default=True)
    emitted: set[Phase] = field(init=False, default_factory=set)
    call_end: str = field(init=False, default="")
    has_arguments: bool = field(init=False, default=False)

    @property
    def thinks(self) -> bool:
        """Implement `Detokenizer.thinks`. Headers do not belong to the answer either."""
        return self.phase is not Phase.ANSWER

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        if token_id in self.format.ids:
            return self._border(token_id, may_stop)
        text = self.text.push(token_id, may_stop=may_stop).text
        if self.header is None:
            return self._emit(text, 1, may_stop)
        # <|constrain|> ends the name of a function.
        ends_name = token_id in self.text.special_token_ids and RECIPIENT in self.header
        self.header += text if self.is_bare else self._shown(text) or " " * ends_name
        self.header_token_count += 1
        is_header = self.header.startswith(RECIPIENT) or RECIPIENT.startswith(self.header)
        if len(self.header) > HEADER_CHARS_MAX or (self.is_bare and not is_header):
            text, self.header, self.phase = self.header, None, Phase.ANSWER
            return self._emit(text, 0, may_stop)
        return NOTHING

    def finish(self) -> TextPiece:
        """Implement `Detokenizer.finish`. A header without a message is dropped."""
        text = self.text.finish().text
        if self.phase is Phase.THINKING:
            return TextPiece("", "", text)
        return self._last(text if self.header is None else "")

    def _border(self, token_id: int, may_stop: bool) -> TextPiece:
        is_thinking, self.is_bare = self.phase is Phase.THINKING, False
        rest = self.text.finish().text
        if self.header is not None:
            self.header_token_count += 1
            if token_id == self.format.channel:
                self.header += CHANNEL_TOKENS[1]
            elif token_id == self.format.message:
                return self._begin(may_stop)
            elif token_id != self.format.start:
                self.header, self.header_token_count = "", 0
            return NOTHING
        mark = "" if is_thinking else self._mark(token_id, may_stop)
        piece = self._emit(rest + mark, is_thinking, may_stop)
        if self.call_end and not piece.stopped:
            end = self.call_end if self.has_arguments else "{}" + self.call_end
            piece = TextPiece(piece.text + self._unsearched(end))
        self.call_end = ""
        begins = token_id in (self.format.start, self.format.channel)
        self.header = CHANNEL_TOKENS[1] if token_id == self.format.channel else ""
        self.header_token_count, self.phase = int(begins), Phase.UNDECIDED
        return piece._replace(reasoning_token_count=int(is_thinking and not begins))

    def _begin(self, may_stop: bool) -> TextPiece:
        """Begin the text of a message, on a new line if one of its kind came before."""
        found, count = _CHANNEL.search(self.header or ""), self.header_token_count
        called = _CALLED.search(self.header or "")
        if called is not None and called[1] in self.marked_functions:
            begin, self.call_end = marked_call(called[1])
            self.header, self.phase, self.has_arguments = None, Phase.ANSWER, False
            return TextPiece(self._unsearched(begin))
        is_thought = found is not None and found[1] == THINKING_CHANNEL
        self.header, self.phase = None, Phase.THINKING if is_thought else Phase.ANSWER
        return self._emit("\n" if self.phase in self.emitted else "", count, may_stop)

    def _emit(self, text: str, token_count: int, may_stop: bool) -> TextPiece:
        is_thought = self.phase is Phase.THINKING
        text = self._shown(text) if is_thought else text
        if self.call_end:
            self.has_arguments |= bool(text.strip())
        elif text:
            self.emitted.add(self.phase)
        if is_thought:
            return TextPiece("", "", text, token_count)
        return self._answer(text, may_stop)

    def _unsearched(self, text: str) -> str:
        """Add text that the model has not written, behind text held back as a possible stop."""
        held, self.held = self._shown(self.held), ""
        return held + text
