"""Response in one piece: nothing is sent before its end, and a failure delivers nothing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from weir.v1 import inference_service_pb2 as pb

from api.generation.delivery.output_buffer import FlowControl, SendBuffer
from api.generation.delivery.stream_writer import FrameSubscription, StreamWriter, WholeAnswerWriter
from api.generation.state import EndDecision
from metering.holds.journal import UsageJournal
from tests.service import all_taken

MANY = StreamWriter.frame_max * 64 + 1


class Half:
    """StreamWriter of two requests, and its messages."""

    def __init__(self, journal: UsageJournal) -> None:
        self.failed: list[str] = []
        self.messages: list[list[str]] = []
        self.token_counts: list[int] = []
        self.writer = WholeAnswerWriter(journal, 2, self.failed.append)
        self.one, self.other = self._output("one"), self._output("other")

    def _output(self, given_id: str) -> SendBuffer:
        subscription = FrameSubscription(self.writer, given_id, lambda _: None)
        output = SendBuffer(
            subscription, "m", FlowControl(None, 60.0, lambda: None), EndDecision(), lambda _: None
        )
        output.hold_id = uuid.uuid4()
        return output

    async def write(self, data: bytes) -> None:
        """Take a message as the connection."""
        frames = pb.GenerateResponse.FromString(data).frames
        kinds = [str(frame.WhichOneof("kind")) for frame in frames]
        self.messages.append(
            [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
        )
        self.token_counts.append(sum(len(frame.delta.token_ids) for frame in frames))


@pytest.fixture
def half(tmp_path: Path) -> Iterator[Half]:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    yield Half(journal)
    journal.close()


async def ticks() -> None:
    """Run all tasks until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_all_requests_share_a_message_and_end_after_it(half: Half) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(half.writer.write_all(half.write))
        for _ in range(MANY):
            half.one.append(0, "x", (1,))
        half.one.complete()
        first = tasks.create_task(all_taken(half.one))
        await ticks()
        assert (half.messages, half.one.usage.delivered_token_count, first.done()) == ([], 0, False)

        half.other.append(0, "y", (2,))
        half.other.complete()
        second = tasks.create_task(all_taken(half.other))
        await first
        await second
        assert half.messages == [["delta"]]
        assert half.token_counts == [MANY + 1]
        assert half.one.usage.delivered_token_count == MANY

        half.one.end(pb.ServerFrame(finished=pb.FinishedFrame()))
        half.other.end(pb.ServerFrame(finished=pb.FinishedFrame()))
        half.writer.close()

    assert half.messages[1:] == [["finished"]]


async def test_a_failure_is_sent_at_once_and_discarded_output_is_not_delivered(half: Half) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(half.writer.write_all(half.write))
        half.one.append(0, "x", (1,))
        half.other.end(pb.ServerFrame(failed=pb.FailedFrame()))
        assert half.failed == ["other"]
        half.one.discard()
        await all_taken(half.one)
        half.one.end(pb.ServerFrame(failed=pb.FailedFrame()))
        half.writer.close()

    assert half.messages == [["failed"]]
    assert half.token_counts == [0]
    assert half.one.usage.delivered_token_count == 0


async def test_waiting_callers_are_released_when_the_client_is_closed(half: Half) -> None:
    async with asyncio.TaskGroup() as tasks:
        half.one.append(0, "x", (1,))
        waits = tasks.create_task(all_taken(half.one))
        await ticks()
        half.writer.abandon()
        await waits
        await half.writer.write_all(half.write)

    assert half.messages == []
    assert half.one.usage.delivered_token_count == 0
