"""An answer in one piece: nothing of it leaves before all of it is there, and what breaks half-way delivers nothing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from weir.v1 import inference_service_pb2 as pb

from api.generation.outbox import FRAMES_PER_MESSAGE_MAX, Delivery, Tally, UsageSoFar, WholeOutbox
from metering.holds.journal import UsageJournal


class Half:
    """An outbox of two requests, and what came out of it."""

    def __init__(self, journal: UsageJournal) -> None:
        self.failed: list[str] = []
        self.messages: list[list[str]] = []
        self.outbox = WholeOutbox(journal, 2, self.failed.append)
        self.one, self.other = [Delivery(name, Tally(UsageSoFar(3, 0, 5), uuid.uuid4())) for name in ("one", "other")]

    async def write(self, message: pb.GenerateResponse) -> None:
        """The connection takes a message."""
        self.messages.append([str(frame.WhichOneof("kind")) for frame in message.frames])

    def push_token(self, delivery: Delivery) -> None:
        """One token of a request."""
        self.outbox.push(delivery, pb.ServerFrame(delta=pb.DeltaFrame(seq=1)), 1)

    def push_end(self, delivery: Delivery) -> None:
        """The end of a request that ran."""
        self.outbox.push(delivery, pb.ServerFrame(finished=pb.FinishedFrame()))


@pytest.fixture
def half(tmp_path: Path) -> Iterator[Half]:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    yield Half(journal)
    journal.close()


async def turns() -> None:
    """Let everything run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_all_requests_go_out_together_in_one_message_and_their_ends_after_it(half: Half) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(half.outbox.write_all(half.write))
        for _ in range(FRAMES_PER_MESSAGE_MAX + 1):
            half.push_token(half.one)
        half.outbox.complete(half.one)
        first = tasks.create_task(half.outbox.flushed(half.one))
        await turns()
        assert (half.messages, half.one.tally.usage.delivered_token_count, first.done()) == ([], 0, False)

        half.push_token(half.other)
        half.outbox.complete(half.other)
        second = tasks.create_task(half.outbox.flushed(half.other))
        await first
        await second
        assert half.messages == [["delta"] * (FRAMES_PER_MESSAGE_MAX + 2)]
        assert half.one.tally.usage.delivered_token_count == FRAMES_PER_MESSAGE_MAX + 1

        half.push_end(half.one)
        half.push_end(half.other)
        half.outbox.close()

    assert half.messages[1:] == [["finished", "finished"]]


async def test_a_failure_is_told_at_once_and_what_was_discarded_is_not_delivered(half: Half) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(half.outbox.write_all(half.write))
        half.push_token(half.one)
        half.outbox.push(half.other, pb.ServerFrame(failed=pb.FailedFrame()))
        assert half.failed == ["other"]
        half.outbox.discard(half.one)
        await half.outbox.flushed(half.one)
        half.outbox.push(half.one, pb.ServerFrame(failed=pb.FailedFrame()))
        half.outbox.close()

    assert [kind for message in half.messages for kind in message] == ["failed", "failed"]
    assert half.one.tally.usage.delivered_token_count == 0


async def test_who_waits_is_let_go_when_the_client_is_gone(half: Half) -> None:
    async with asyncio.TaskGroup() as tasks:
        half.push_token(half.one)
        waits = tasks.create_task(half.outbox.flushed(half.one))
        await turns()
        half.outbox.abandon()
        await waits
        await half.outbox.write_all(half.write)

    assert half.messages == []
    assert half.one.tally.usage.delivered_token_count == 0
