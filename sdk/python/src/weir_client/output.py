"""Received data of one request: its output by choice, its bill, and the result made of them."""

from __future__ import annotations

import time
from operator import itemgetter

from weir.v1 import inference_service_pb2 as pb

from weir_client import wire
from weir_client.generated_values import FinishReason, QuotaStatus, Timings, TokenLogprobs, Usage
from weir_client.money import Money
from weir_client.receipts import Receipt
from weir_client.tools import ToolCall, ToolCallDelta
from weir_client.values import Admitted, Choice, Delta, Partial, Result

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
        """Append the text and tokens of one frame."""
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
        """Build the complete choice number `index`."""
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
    """Received output of all choices. Choices are added as frames of them arrive."""

    def __init__(self) -> None:
        self._outputs = [Output()]

    def of(self, choice_index: int) -> Output:
        """Return the output of one choice. Raises: IndexError if the index is above the maximum."""
        while len(self._outputs) <= min(choice_index, CHOICES_MAX):
            self._outputs.append(Output())
        return self._outputs[choice_index]


class Received:
    """Collector of frames for a `Partial` or a `Result`. `seq` is that of the last output frame."""

    def __init__(self, request_id: str, model: str, after_seq: int) -> None:
        self.seq = after_seq
        self._admitted: Admitted | None = None
        self.usage: Usage | None = None
        self.cost: Money | None = None
        self._request_id = request_id
        self._model = model
        self._outputs = Outputs()
        self._timings: Timings | None = None
        self._receipts: tuple[Receipt, ...] = ()

    @property
    def admitted(self) -> Admitted | None:
        """Facts of the admission, once the request is admitted."""
        return self._admitted

    def admit(self, frame: pb.AdmittedFrame) -> Admitted:
        """Record the admission, which may be to a fallback of the requested model."""
        self._admitted = admitted = wire.read(Admitted, frame)
        if admitted.requested_model:
            self._model = admitted.model
        return admitted

    def add(self, frame: pb.DeltaFrame) -> Delta:
        """Record a frame of output and convert it to a delta."""
        self.seq = frame.seq
        logprobs = wire.logprobs(frame)
        self._outputs.of(frame.choice_index).add(frame, logprobs)
        calls = tuple(
            ToolCallDelta(each.index, each.id, each.name, each.arguments_json)
            for each in frame.tool_calls
        )
        return Delta(
            frame.seq,
            frame.text,
            tuple(frame.token_ids),
            time.monotonic(),
            logprobs,
            frame.choice_index,
            calls,
            frame.reasoning,
            frame.reasoning_token_count,
            wire.finish_reason(frame.end.reason) if frame.HasField("end") else None,
        )

    def bill(self, frame: pb.FinishedFrame | pb.FailedFrame) -> None:
        """Record the settled usage, cost and receipts of a final frame."""
        self.usage, self.cost = wire.read(Usage, frame.usage), wire.money(frame.cost)
        self._receipts = tuple(map(wire.receipt, frame.receipts))

    def finish(self, frame: pb.FinishedFrame) -> FinishReason:
        """Record the final frame and return its reason."""
        self.bill(frame)
        self._timings = wire.read(Timings, frame.timings)
        return wire.finish_reason(frame.reason)

    def partial(self) -> Partial:
        """Build a `Partial` from the output and usage received so far."""
        return Partial(
            request_id=self._request_id,
            model=self._model,
            text="".join(self._outputs.of(0).texts),
            token_ids=tuple(self._outputs.of(0).token_ids),
            usage=self.usage,
            cost=self.cost,
            timings=self._timings,
            admitted=self.admitted,
            receipts=self._receipts,
            reasoning="".join(self._outputs.of(0).thoughts),
        )

    def result(self, frame: pb.FinishedFrame) -> Result:
        """Build the complete result. Call it after `finish`."""
        assert self.usage is not None, "finish comes first"
        assert self.cost is not None, "finish comes first"
        assert self._timings is not None, "finish comes first"
        reason = wire.finish_reason(frame.reason)
        ends: dict[int, pb.ChoiceEnd | pb.FinishedFrame]
        ends = {each.choice_index: each for each in frame.choices} or {0: frame}
        choices = tuple(
            self._outputs.of(index).choice(
                index, wire.finish_reason(end.reason), wire.stopped_by(end)
            )
            for index, end in sorted(ends.items(), key=itemgetter(0))
        )
        return Result(
            request_id=self._request_id,
            model=frame.model if frame.requested_model else self._model,
            finish_reason=reason,
            text=choices[0].text,
            token_ids=choices[0].token_ids,
            usage=self.usage,
            cost=self.cost,
            timings=self._timings,
            admitted=self.admitted,
            exhausted_quotas=tuple(wire.read(QuotaStatus, each) for each in frame.exhausted_quotas),
            logprobs=choices[0].logprobs,
            choices=choices,
            receipts=self._receipts,
            migration_count=frame.migration_count,
            tool_calls=choices[0].tool_calls,
            reasoning=choices[0].reasoning,
            stopped_by=choices[0].stopped_by,
            requested_model=frame.requested_model,
        )
