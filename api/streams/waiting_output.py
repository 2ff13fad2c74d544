"""Output of one choice that no frame carries yet, in some 17 bytes a token: a client that does not read must not cost memory.

As objects, one per token, the same would be some 50 times as large.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

from weir.v1 import inference_service_pb2 as pb


class WaitingOutput:
    """Tokens and text in order. What one `add` brought is given out with its text and calls at its last token."""

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._text = bytearray()
        self._calls = bytearray()  # new of tool calls as serialized frames, of which those that follow each other are one
        self._logprobs: list[bytes] = []  # as messages: with 20 alternatives a tenth of what the objects take
        # One of each per `add`, counted from the first token and byte that were ever added: where it ends.
        self._token_ends = array("Q")
        self._text_ends = array("Q")
        self._call_ends = array("Q")
        self._taken_token_count = 0
        self._taken_byte_count = 0
        self._taken_call_byte_count = 0

    def __len__(self) -> int:
        """Tokens."""
        return len(self._token_ids)

    @property
    def empty(self) -> bool:
        """Whether neither a token nor a piece of text is left."""
        return not self._token_ends

    def add(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs] = (),
        calls: Sequence[pb.ToolCallDelta] = (),
    ) -> None:
        """Put behind what waits. logprobs: one for each token, or none."""
        self._token_ids.extend(token_ids)
        self._text += text.encode()
        self._logprobs += [each.SerializeToString() for each in logprobs]
        self._token_ends.append(self._taken_token_count + len(self._token_ids))
        self._text_ends.append(self._taken_byte_count + len(self._text))
        if calls:
            self._calls += pb.DeltaFrame(tool_calls=calls).SerializeToString()
        self._call_ends.append(self._taken_call_byte_count + len(self._calls))

    def append(self, later: WaitingOutput) -> None:
        """Put all of another behind what waits here."""
        token_base = self._taken_token_count + len(self._token_ids) - later._taken_token_count
        byte_base = self._taken_byte_count + len(self._text) - later._taken_byte_count
        call_base = self._taken_call_byte_count + len(self._calls) - later._taken_call_byte_count
        self._token_ids.extend(later._token_ids)
        self._text += later._text
        self._logprobs += later._logprobs
        self._token_ends.extend(end + token_base for end in later._token_ends)
        self._text_ends.extend(end + byte_base for end in later._text_ends)
        self._calls += later._calls
        self._call_ends.extend(end + call_base for end in later._call_ends)

    def take(self, token_count_max: int) -> tuple[str, list[int], list[pb.TokenLogprobs], list[pb.ToolCallDelta]]:
        """The first so many tokens at most, with the text, the log-probabilities and the pieces of calls that belong to them."""
        token_count = min(token_count_max, len(self._token_ids))
        token_ids, self._token_ids = self._token_ids[:token_count].tolist(), self._token_ids[token_count:]
        logprobs, self._logprobs = self._logprobs[:token_count], self._logprobs[token_count:]
        self._taken_token_count += token_count
        whole_count = bisect_right(self._token_ends, self._taken_token_count)
        text, calls = b"", b""
        if whole_count:
            byte_count = self._text_ends[whole_count - 1] - self._taken_byte_count
            text, self._text = bytes(self._text[:byte_count]), self._text[byte_count:]
            self._taken_byte_count += byte_count
            byte_count = self._call_ends[whole_count - 1] - self._taken_call_byte_count
            calls, self._calls = bytes(self._calls[:byte_count]), self._calls[byte_count:]
            self._taken_call_byte_count += byte_count
            del self._token_ends[:whole_count], self._text_ends[:whole_count], self._call_ends[:whole_count]
        return (
            text.decode(),
            token_ids,
            [pb.TokenLogprobs.FromString(each) for each in logprobs],
            list(pb.DeltaFrame.FromString(calls).tool_calls),
        )
