"""New output of a request as a value (`Delta`), and a compact buffer of unsent output."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

import msgspec
from weir.v1 import inference_service_pb2 as pb

from inference.engine import TokenLogprobs
from inference.text.call_parser import CallPiece

# Text of thinking, and the number of tokens now known to be thinking.
Thought = tuple[str, int]
NO_THOUGHT: Thought = ("", 0)

# Rare parts of output: with 20 alternatives, a tenth of the size of the objects.
PACK = msgspec.msgpack.Encoder().encode
UNPACK_LOGPROBS = msgspec.msgpack.Decoder(TokenLogprobs).decode
UNPACK_CALLS = msgspec.msgpack.Decoder(list[tuple[int, str, str, str]]).decode


class Delta(msgspec.Struct):
    """New output of one choice, which each stream encodes for its own protocol.

    `logprobs` has one entry per token, or none. `reasoning` is thinking, which precedes the text,
    and `reasoning_token_count` is how many tokens are now known to be thinking. `end` ends the
    choice.
    """

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    calls: Sequence[CallPiece] = ()
    reasoning: str = ""
    reasoning_token_count: int = 0
    end: pb.ChoiceEnd | None = None

    @property
    def is_plain(self) -> bool:
        """True if the delta has only text and tokens."""
        return not (
            self.logprobs
            or self.calls
            or self.reasoning_token_count
            or self.reasoning
            or self.end is not None
        )


def joined_calls(calls: Sequence[CallPiece]) -> list[CallPiece]:
    """Join the pieces of each tool call, and return the calls in the order in which they began."""
    first: dict[int, CallPiece] = {}
    arguments: dict[int, list[str]] = {}
    for each in calls:
        first.setdefault(each.index, each)
        arguments.setdefault(each.index, []).append(each.arguments)
    return [
        CallPiece(index, each.id, each.name, "".join(arguments[index]))
        for index, each in first.items()
    ]


class PackedOutput:
    """Queue of output that is not sent yet, packed into a few bytes per token.

    The text, tool calls and thinking of one `add` are taken with its last token. A delta shows
    thinking before text, and text before calls. Output that would change its place in this order,
    such as thinking after text, is taken in a separate delta. `end` is taken with the last output.
    """

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._text = bytearray()
        self._calls = bytearray()
        self._logprobs: list[bytes] = []
        # End offset of each `add`, counted from the first token and byte ever added.
        self._token_ends = array("Q")
        self._text_ends = array("Q")
        self._call_ends = array("Q")
        self._taken_token_count = 0
        self._taken_byte_count = 0
        self._taken_call_byte_count = 0
        self._thoughts = bytearray()
        self._thought_ends = array("Q")
        self._taken_thought_byte_count = 0
        self._thought_token_counts = array("I")  # of each `add`
        # Tokens before the first `add` that is not taken as a whole, and its thinking counted yet.
        self._begun_token_count = self._counted_thought_count = 0
        self._has_text = self._has_calls = False  # since the last turn
        self._add_count = self._taken_add_count = 0
        self._ticks: deque[int] = deque()  # calls of `add` before output that begins a delta
        self.end: pb.ChoiceEnd | None = None

    def __len__(self) -> int:
        """Return the number of tokens in the queue."""
        return len(self._token_ids)

    @property
    def empty(self) -> bool:
        """True if neither output nor the end of the choice is left."""
        return not (self._token_ends or self.end is not None)

    def add(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        calls: Sequence[CallPiece] = (),
        thought: Thought = NO_THOUGHT,
    ) -> None:
        """Append output. `logprobs` has one entry per token, or none."""
        if (thought[0] and (self._has_text or self._has_calls)) or (text and self._has_calls):
            self._ticks.append(self._add_count)
            self._has_text = self._has_calls = False
        self._add_count += 1
        self._has_text |= bool(text)
        self._has_calls |= bool(calls)
        self._thoughts += thought[0].encode()
        self._thought_ends.append(self._taken_thought_byte_count + len(self._thoughts))
        self._thought_token_counts.append(thought[1])
        self._token_ids.extend(token_ids)
        self._text += text.encode()
        self._logprobs += [PACK(each) for each in logprobs]
        self._token_ends.append(self._taken_token_count + len(self._token_ids))
        self._text_ends.append(self._taken_byte_count + len(self._text))
        if calls:
            self._calls += PACK(
                [(each.index, each.id, each.name, each.arguments) for each in calls]
            )
        self._call_ends.append(self._taken_call_byte_count + len(self._calls))

    def take(self, token_count_max: int) -> tuple[Delta, int]:
        """Remove at most this many tokens; return them, and how many of them are thinking.

        If the output of one `add` is split, its first tokens count as its thinking, and the delta
        with its text has its `reasoning_token_count`. An empty delta means that no token fits.
        """
        add_count_max = len(self._token_ends)
        if self._ticks:
            add_count_max = self._ticks[0] - self._taken_add_count
            end = self._token_ends[add_count_max - 1]
            token_count_max = min(token_count_max, end - self._taken_token_count)
        token_count = min(token_count_max, len(self._token_ids))
        delta = Delta(token_ids=self._token_ids[:token_count].tolist())
        del self._token_ids[:token_count]
        if self._logprobs:
            delta.logprobs = [UNPACK_LOGPROBS(each) for each in self._logprobs[:token_count]]
            del self._logprobs[:token_count]
        self._taken_token_count += token_count
        whole_count = min(bisect_right(self._token_ends, self._taken_token_count), add_count_max)
        self._taken_add_count += whole_count
        if self._ticks and self._ticks[0] == self._taken_add_count:
            self._ticks.popleft()
        reasoning_count = self._count_thoughts(whole_count)
        if whole_count:
            delta.calls = self._take_calls(whole_count)
            byte_count = self._thought_ends[whole_count - 1] - self._taken_thought_byte_count
            delta.reasoning = self._thoughts[:byte_count].decode()
            del self._thoughts[:byte_count]
            self._taken_thought_byte_count += byte_count
            delta.reasoning_token_count = sum(self._thought_token_counts[:whole_count])
            byte_count = self._text_ends[whole_count - 1] - self._taken_byte_count
            delta.text = self._text[:byte_count].decode()
            del self._text[:byte_count]
            self._taken_byte_count += byte_count
            del (
                self._token_ends[:whole_count],
                self._text_ends[:whole_count],
                self._call_ends[:whole_count],
                self._thought_ends[:whole_count],
                self._thought_token_counts[:whole_count],
            )
        if self.end is not None and not self._token_ends:
            delta.end, self.end = self.end, None
        return delta, reasoning_count

    def _take_calls(self, whole_count: int) -> Sequence[CallPiece]:
        """Remove the tool calls of the first `whole_count` additions, and join their pieces."""
        first, calls = 0, list[CallPiece]()
        if not self._calls:
            return ()
        for end in self._call_ends[:whole_count]:
            if first < (end := end - self._taken_call_byte_count):
                calls += [CallPiece(*each) for each in UNPACK_CALLS(self._calls[first:end])]
                first = end
        del self._calls[:first]
        self._taken_call_byte_count += first
        return calls if whole_count == 1 else joined_calls(calls)

    def _count_thoughts(self, whole_count: int) -> int:
        """Count the thinking among the tokens now taken, with `whole_count` whole additions."""
        counts, before = self._thought_token_counts, self._counted_thought_count
        if whole_count:
            self._begun_token_count = self._token_ends[whole_count - 1]
        self._counted_thought_count = 0
        if whole_count < len(counts):
            taken_count = self._taken_token_count - self._begun_token_count
            self._counted_thought_count = min(counts[whole_count], taken_count)
        return sum(counts[:whole_count]) + self._counted_thought_count - before
