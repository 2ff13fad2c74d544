"""Changes of the limits of a running request: the frames and the pending answers."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from weir.v1 import inference_service_pb2 as pb

from weir_client import errors, wire
from weir_client.money import Money
from weir_client.plain import Value
from weir_client.status import error_from_status


@dataclass(frozen=True, slots=True)
class Limits(Value):
    """Limits of a running request."""

    max_output_tokens: int  # of each choice
    max_cost: Money | None  # None: limited by the quotas only


def update_frame(max_output_tokens: int | None, max_cost: Money | None) -> pb.UpdateFrame:
    """Return the frame that requests other limits; None: unchanged."""
    frame = pb.UpdateFrame(max_output_tokens=max_output_tokens)
    if max_cost is not None:
        frame.max_cost.CopyFrom(wire.money_message(max_cost))
    return frame


class LimitChanges:
    """Requested changes without an answer yet, in their order."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[Limits]] = deque()

    def expect(self) -> asyncio.Future[Limits]:
        """Return a future for the answer to the change that is being sent."""
        answer: asyncio.Future[Limits] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        return answer

    def answer(self, frame: pb.UpdatedFrame, request_id: str) -> None:
        """Resolve the oldest pending change."""
        answer = self._waiting.popleft() if self._waiting else None
        if answer is None or answer.done():
            return
        if frame.HasField("refusal"):
            answer.set_exception(error_from_status(frame.refusal, request_id=request_id))
        else:
            max_cost = wire.money(frame.max_cost) if frame.HasField("max_cost") else None
            answer.set_result(Limits(frame.max_output_tokens, max_cost))

    def fail(self, error: errors.WeirError) -> None:
        """Fail all pending changes."""
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(error)
