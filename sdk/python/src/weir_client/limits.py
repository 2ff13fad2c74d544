"""Changing the limits of a request that runs: what is asked, and the answers in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from weir.v1 import inference_service_pb2 as pb

from weir_client import errors, wire
from weir_client.money import Money
from weir_client.status import error_from_status


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a request that runs."""

    max_output_tokens: int  # of each choice
    max_cost: Money | None  # None: none beside the quotas


def update_frame(max_output_tokens: int | None, max_cost: Money | None) -> pb.UpdateFrame:
    """Asks for other limits; None: as it is."""
    frame = pb.UpdateFrame(max_output_tokens=max_output_tokens)
    if max_cost is not None:
        frame.max_cost.CopyFrom(wire.money_message(max_cost))
    return frame


class LimitChanges:
    """The changes that were asked for and not answered yet."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[Limits]] = deque()

    def expect(self) -> asyncio.Future[Limits]:
        """The answer to the change that is asked for now."""
        answer: asyncio.Future[Limits] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        return answer

    def answer(self, frame: pb.UpdatedFrame, request_id: str) -> None:
        """The server has answered the oldest."""
        answer = self._waiting.popleft() if self._waiting else None
        if answer is None or answer.done():
            return
        if frame.HasField("refusal"):
            answer.set_exception(error_from_status(frame.refusal, request_id=request_id))
        else:
            max_cost = wire.money(frame.max_cost) if frame.HasField("max_cost") else None
            answer.set_result(Limits(frame.max_output_tokens, max_cost))

    def fail(self, error: errors.WeirError) -> None:
        """No answer comes any more."""
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(error)
