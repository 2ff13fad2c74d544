"""Output buffer that delivers into a replay buffer, for a client that may reconnect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from weir.v1 import inference_service_pb2 as pb

from api.core.errors import OutputGone
from api.core.statuses import status_of
from api.generation.delivery import frames
from api.generation.delivery.delta import NO_THOUGHT, Delta, Thought
from api.generation.delivery.encoding import delta_bytes, delta_frame
from api.generation.delivery.output_buffer import FlowControl, OutputBuffer
from api.generation.delivery.replay import ReplayBuffer
from api.generation.delivery.stream_writer import (
    TOKENS_PER_DELTA_MAX,
    Collected,
    FrameSubscription,
    Subscription,
)
from api.generation.state import EndDecision
from inference.engine import TokenLogprobs
from inference.text.call_parser import CallPiece
from metering.core.models import Outcome

UNREAD_TOO_MUCH = (
    "the unread output exceeds the replay buffer: read faster; the server's limit is"
    " WEIR_REPLAY_BYTES_PER_REQUEST_MAX, and less while many requests keep output"
)


class ReplayableBuffer(OutputBuffer):
    """Output buffer that delivers tokens into a replay buffer, for clients that may reconnect.

    A token in the replay buffer counts as delivered: it is journalled before any client can read
    it, and every client of the project can. Reading it again is not counted. If this process dies,
    the buffer is lost, and only the tokens that a transport had taken are billed.
    """

    is_kept = True

    def __init__(
        self,
        subscription: Subscription,
        model: str,
        flow: FlowControl,
        request_state: EndDecision,
        update: Callable[[pb.UpdateFrame], None],
        keep_s: float,
        buffer: ReplayBuffer,
    ) -> None:
        super().__init__(subscription, model, flow, request_state, update)
        self.keep_s = keep_s
        self.buffer = buffer
        self._next_seq = 1  # first delta that was not handed to the subscription
        self._unread = 0  # tokens from `_next_seq` on
        self._unread_reasoning = 0

    def append(
        self,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        calls: Sequence[CallPiece] = (),
        thought: Thought = NO_THOUGHT,
    ) -> None:
        """Implement `OutputBuffer.append`. With flow control, each token is a frame."""
        if not self.fence():
            return
        if token_ids or thought[1]:
            self.buffer.record(self.entry(len(token_ids), thought[1]))
        if token_ids:
            now = self.gaps.note(choice_index)
            if self.ready_at is None:
                self.ready_at = now
            self.usage.journalled_token_count += len(token_ids)
            self.appended_token_count = self.usage.journalled_token_count
            self.usage.delivered_token_count = self.appended_token_count
        self.usage.journalled_reasoning_token_count += thought[1]
        self.usage.delivered_reasoning_token_count = self.usage.journalled_reasoning_token_count
        reasoning_left = thought[1]
        step = 1 if self.flow.credit is not None else TOKENS_PER_DELTA_MAX
        for first in range(0, max(len(token_ids), 1), step):
            part = token_ids[first : first + step]
            is_last = first + step >= len(token_ids)
            delta = Delta(token_ids=part, logprobs=logprobs[first : first + step])
            if is_last:
                delta.text, delta.calls = text, calls
                delta.reasoning, delta.reasoning_token_count = thought
            reasoning = reasoning_left if is_last else min(len(part), reasoning_left)
            reasoning_left -= reasoning
            self._keep(choice_index, delta, reasoning)
        self._note()
        self._watch_credit()

    def end_choice(self, end: pb.ChoiceEnd) -> None:
        if self.fence():
            self._keep(end.choice_index, Delta(end=end))
            self._note()

    def discard(self, *, kept_too: bool = False) -> None:
        if self.flow.credit is None and not kept_too:
            return
        self._skip()
        self._watch_credit()
        if self.flush is not None:
            self.flush.poll()

    def take(self, subscription: Subscription, into: Collected, delta_max: int) -> None:
        assert isinstance(subscription, FrameSubscription), "HTTP answers are not received again"
        flow, count = self.flow, 0
        self.has_more = False
        while self._next_seq <= self._last_seq:
            if count >= delta_max or into.token_room <= 0:
                self.has_more = True
                break
            delta, token_count, reasoning_count = self.buffer.get(self._next_seq)
            if flow.credit is not None:
                if token_count > flow.credit:
                    break
                flow.spend(token_count)
            self._next_seq += 1
            self._unread -= token_count
            self._unread_reasoning -= reasoning_count
            count += 1
            into.token_room -= token_count
            into.parts.append(delta_frame(subscription.head, delta))
            if self.usage_interval is not None and (
                frame := self.usage_interval.due(self.usage, token_count, reasoning_count)
            ):
                into.parts.append(subscription.part(frame))
        if not self._unread:
            self.ready_at = None
        usage = self.usage
        new_count = (
            usage.journalled_token_count
            - self._unread
            - usage.taken_token_count
            - self.in_flight_token_count
        )
        new_reasoning_count = (
            usage.journalled_reasoning_token_count
            - self._unread_reasoning
            - usage.taken_reasoning_token_count
            - self.in_flight_reasoning_token_count
        )
        if count and (new_count > 0 or new_reasoning_count > 0):
            into.replayed.append((self, max(new_count, 0), max(new_reasoning_count, 0)))
        if self._request_state is None and not self.waits():
            self._send_end()

    def forget(self) -> None:
        """End the current subscription, because the replay buffer is dropped."""
        if self.subscription is not None:
            subscription, self.subscription = self.subscription, None
            gone = OutputGone(self._next_seq - 1, self._last_seq + 1, self._last_seq)
            subscription.end(frames.failed(status_of(gone), None))

    def _keep(self, choice_index: int, delta: Delta, reasoning_token_count: int = 0) -> None:
        """Encode a delta and put it into the replay buffer."""
        self._last_seq += 1
        token_count = len(delta.token_ids)
        self._unread += token_count
        self._unread_reasoning += reasoning_token_count
        data = delta_bytes(self._last_seq, choice_index, delta)
        unread_seq = self._next_seq if self.subscription is not None else self._last_seq + 1
        if not self.buffer.put(data, token_count, unread_seq, reasoning_token_count):
            if self._request_state is not None:
                self._request_state.stop(Outcome.SLOW_CONSUMER, detail=UNREAD_TOO_MUCH)
            self._skip()  # the request is over; output outside the buffer cannot be sent

    def _skip(self) -> None:
        self.count_write()
        self._next_seq, self._unread, self._unread_reasoning = self._last_seq + 1, 0, 0
        self.ready_at = None

    def waits(self) -> bool:
        return self._next_seq <= self._last_seq

    def _unread_token_count(self) -> int:
        return self._unread

    def _oldest_seq(self) -> int:
        return self.buffer.first_seq

    def _begin_after(self, after_seq: int) -> None:
        self._next_seq = after_seq + 1
        self._unread, self._unread_reasoning = self.buffer.token_counts_after(after_seq)
        self.ready_at = monotonic() if self._unread else None
        if (interval := self.usage_interval) is not None:
            usage = self.usage
            interval.sent_token_count = usage.delivered_token_count - self._unread
            interval.sent_reasoning_token_count = (
                usage.delivered_reasoning_token_count - self._unread_reasoning
            )
