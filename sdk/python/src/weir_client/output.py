"""Output received so far, by choice."""

from __future__ import annotations

from weir.v1 import inference_service_pb2 as pb

from weir_client.tools import ToolCall
from weir_client.values import Choice, FinishReason, TokenLogprobs

CHOICES_MAX = 1024  # far above a server's limit: a wrong index must not exhaust memory


class Output:
    """Received output of one choice."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.calls: list[tuple[str, str, list[str]]] = []  # id, name and pieces of the arguments

    def add(self, frame: pb.DeltaFrame, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Append the output of one frame."""
        self.texts.append(frame.text)
        self.thoughts.append(frame.reasoning)
        self.token_ids.extend(frame.token_ids)
        self.logprobs.extend(logprobs)
        for piece in frame.tool_calls:
            if piece.id:
                self.calls.append((piece.id, piece.name, []))
            self.calls[-1][2].append(piece.arguments_json)

    def choice(
        self, index: int, reason: FinishReason, stopped_by: str | int | None = None
    ) -> Choice:
        """Return the complete choice."""
        calls = tuple(
            ToolCall(call_id, name, "".join(pieces)) for call_id, name, pieces in self.calls
        )
        return Choice(
            index,
            reason,
            "".join(self.texts),
            tuple(self.token_ids),
            tuple(self.logprobs),
            calls,
            "".join(self.thoughts),
            stopped_by,
        )


class Outputs:
    """Received output of all choices; their number follows from the frames."""

    def __init__(self) -> None:
        self._outputs = [Output()]

    def of(self, choice_index: int) -> Output:
        """Return the output of one choice. Raises: IndexError for an impossible index."""
        while len(self._outputs) <= min(choice_index, CHOICES_MAX):
            self._outputs.append(Output())
        return self._outputs[choice_index]
