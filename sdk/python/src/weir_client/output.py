"""What has arrived of the choices of a request."""

from __future__ import annotations

from weir.v1 import inference_service_pb2 as pb

from weir_client.tools import ToolCall
from weir_client.values import Choice, FinishReason, TokenLogprobs

CHOICES_MAX = 1024  # far above what a server allows: a wrong index must not take all memory


class Output:
    """What has arrived of one choice."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.calls: list[tuple[str, str, list[str]]] = []  # id, name and the pieces of the arguments

    def add(self, frame: pb.DeltaFrame, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """One more frame of it."""
        self.texts.append(frame.text)
        self.token_ids.extend(frame.token_ids)
        self.logprobs.extend(logprobs)
        for piece in frame.tool_calls:
            if piece.id:
                self.calls.append((piece.id, piece.name, []))
            self.calls[-1][2].append(piece.arguments_json)

    def choice(self, index: int, reason: FinishReason) -> Choice:
        """All of it."""
        calls = tuple(ToolCall(call_id, name, "".join(pieces)) for call_id, name, pieces in self.calls)
        return Choice(index, reason, "".join(self.texts), tuple(self.token_ids), tuple(self.logprobs), calls)


class Outputs:
    """All choices; the server says by its frames how many there are."""

    def __init__(self) -> None:
        self._outputs = [Output()]

    def of(self, choice_index: int) -> Output:
        """One choice. Raises: IndexError for one that cannot be."""
        while len(self._outputs) <= min(choice_index, CHOICES_MAX):
            self._outputs.append(Output())
        return self._outputs[choice_index]
