"""Streaming detokenization, and the search for stop sequences.

Text that was emitted is final: the pieces joined equal the text of all ids decoded at once. So text
is held back only while a later token could change it (half an emoji) or complete a stop sequence.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from inference.errors import EngineFailed

# A control token has no text, but a stop sequence may name it. While text is searched, a lone
# surrogate stands for it, which no text contains.
MARK_FIRST = 0xD800
_MARKS = re.compile("[\ud800-\udfff]")
Stops = Mapping[str, str]  # texts to search for, with the stop sequence of the request


class TextPiece(NamedTuple):
    """Final text, and the request's stop sequence that followed it, empty if none did.

    `reasoning` is thinking before the text. `reasoning_token_count` counts the tokens now known to
    be thinking, including earlier undecided ones.
    """

    text: str
    stop: str = ""
    reasoning: str = ""
    reasoning_token_count: int = 0

    @property
    def stopped(self) -> bool:
        """True if a stop sequence followed the text."""
        return bool(self.stop)


NOTHING = TextPiece("")


@dataclass(slots=True, eq=False)
class Detokenizer(ABC):
    """Streaming decoder of one output: finds stop sequences, and holds text back where necessary.

    The stop sequence completed first wins, or the longer one if two end at the same character,
    however the text is split into tokens. No text follows it.
    """

    stops: Stops
    special_token_ids: frozenset[int]
    held: str = field(default="", init=False)  # text whose end could begin a stop sequence
    # Marks of the control tokens that stop sequences name, by id.
    marks: Mapping[int, str] | None = field(default=None, init=False)
    # Whether the prompt ends within a character, where others decode prompt and output together.
    is_torn: bool = field(default=False, init=False)

    @property
    def thinks(self) -> bool:
        """True if the next token belongs to the model's thinking."""
        return False

    def feed(self, text: str, token_count: int, thought: str = "") -> None:
        """Add a message of an engine that decodes its own output; ignored by other detokenizers.

        `thought` is thinking that the engine has split from the text.
        """
        return

    def settle(self, reported: int | None, token_count: int) -> int:
        """Count the tokens, of `token_count` in the whole output, that the engine reports as
        thinking beyond those known. Raises EngineFailed if the report contradicts the output.
        """
        if reported is not None and not 0 <= reported <= token_count:
            raise EngineFailed(
                f"the engine says that {reported} of {token_count} output tokens were thinking"
            )
        return 0

    @abstractmethod
    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        """Decode a token; return the text it releases. `may_stop` must not be False after True."""

    def push_all(self, token_ids: Sequence[int]) -> str | None:
        """Decode tokens like `push`, and return their text; None, without an effect, if some of
        them have to be pushed one by one.
        """
        return None

    @abstractmethod
    def finish(self) -> TextPiece:
        """Flush the held-back text at the end of generation.

        A stop sequence in it still cuts the text off (`stopped`).
        """

    def _search(self, new_text: str) -> TextPiece:
        if not new_text or not self.stops:  # marks are left to a `Split`, which searches
            return TextPiece(new_text)
        text = self.held + new_text
        if (found := _first_completed(text, self.stops)) is not None:
            self.held = ""
            start, stop = found
            return TextPiece(self._shown(text[:start]), self.stops[stop])
        kept = held_length(text, self.stops)
        self.held = text[len(text) - kept :]
        return TextPiece(self._shown(text[: len(text) - kept]))

    def _search_rest(self, new_text: str) -> TextPiece:
        piece = self._search(new_text)
        rest, self.held = ("" if piece.stopped else self._shown(self.held)), ""
        return TextPiece(piece.text + rest, piece.stop)

    def _mark(self, token_id: int, may_stop: bool) -> str:
        """Return the mark that stands for a control token; empty if no stop sequence names it."""
        return self.marks.get(token_id, "") if self.marks and may_stop else ""

    def _shown(self, text: str) -> str:
        return _MARKS.sub("", text) if self.marks else text


@dataclass(slots=True, eq=False)
class GivenText(Detokenizer):
    """Detokenizer for an engine that decodes its own output. Each message is fed, then its tokens
    are pushed as unknown ones; the last of them releases the text.
    """

    fed: str = field(default="", init=False)
    token_count: int = field(default=0, init=False)  # tokens of `fed` that are not pushed yet

    def feed(self, text: str, token_count: int, thought: str = "") -> None:
        """Add a message. Text without tokens waits for the next message, or for the end."""
        self.fed += text
        self.token_count += token_count

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        self.token_count -= 1
        if self.token_count > 0:
            return TextPiece("")
        text, self.fed = self.fed, ""
        return self._search(text) if may_stop and self.stops else TextPiece(text)

    def finish(self) -> TextPiece:
        text, self.fed = self.fed, ""
        return self._search_rest(text) if self.stops else TextPiece(text)


@dataclass(slots=True, eq=False)
class GivenParts(Detokenizer):
    """Detokenizer for an engine that decodes its own output and may split off the thinking. `text`
    reads the text, and splits it if the engine does not.

    `thought` is not released yet. `thinking_count` and `answer_count` are the tokens of messages
    that had only the one or the other, `known_count` those reported as thinking so far.
    """

    text: Detokenizer
    thought: str = field(default="", init=False)
    thoughts_left: int = field(default=0, init=False)  # tokens of thoughts that are not pushed yet
    thinking_count: int = field(default=0, init=False)
    answer_count: int = field(default=0, init=False)
    known_count: int = field(default=0, init=False)

    @property
    def thinks(self) -> bool:
        return self.text.thinks or (self.thinking_count > 0 == self.answer_count)

    def feed(self, text: str, token_count: int, thought: str = "") -> None:
        self.thought += thought
        if thought and not text:
            self.thinking_count += token_count
            self.thoughts_left += token_count
        elif text and not thought:
            self.answer_count += token_count
        self.text.feed(text, token_count)

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        piece, thought = self.text.push(token_id, may_stop=may_stop), self.thought
        count = piece.reasoning_token_count + (self.thoughts_left > 0)
        self.thought, self.thoughts_left = "", max(self.thoughts_left - 1, 0)
        self.known_count += count
        return piece._replace(reasoning=thought + piece.reasoning, reasoning_token_count=count)

    def finish(self) -> TextPiece:
        piece, thought = self.text.finish(), self.thought
        self.thought = ""
        return piece._replace(reasoning=thought + piece.reasoning)

    def settle(self, reported: int | None, token_count: int) -> int:
        """Implement `Detokenizer.settle`: the engine's count is settled where it splits, or where
        nothing of the thinking was seen.
        """
        Detokenizer.settle(self, reported, token_count)
        if reported is None or (self.known_count and not self.thinking_count):
            return 0  # Weir's own split counts the marks, too
        least, most = self.thinking_count, token_count
        if self.thinking_count:
            most -= self.answer_count
        if not least <= reported <= most:
            raise EngineFailed(
                f"the engine says that {reported} of {token_count} output tokens were thinking, and"
                f" has sent {least} to {most}"
            )
        return reported - self.known_count


def _first_completed(text: str, stops: Stops) -> tuple[int, str] | None:
    """Find the stop sequence that is completed first; return its start and text."""
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found)[1:] if found else None


def held_length(text: str, stops: Collection[str]) -> int:
    """Measure the longest suffix of `text` that begins a stop sequence."""
    longest = min(len(text), max(map(len, stops)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
