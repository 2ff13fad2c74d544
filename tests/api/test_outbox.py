"""The outbox: one message per burst, in order, and no token sent that the journal does not know."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weir.v1 import inference_service_pb2 as pb

from api.generation import outbox as outbox_module
from api.generation.outbox import Delivery, Outbox, Tally, UsageSoFar
from metering.holds.journal import Delivered, UsageJournal, decode


class Transport:
    """Takes messages one at a time; each write waits until it is let through."""

    def __init__(self, *, flowing: bool = True) -> None:
        self.messages: list[list[int]] = []
        self.may_write = asyncio.Semaphore(10**9 if flowing else 0)
        self.entered = asyncio.Semaphore(0)
        self.breaks: Exception | None = None

    async def write(self, message: pb.GenerateResponse) -> None:
        self.entered.release()
        await self.may_write.acquire()
        if self.breaks is not None:
            raise self.breaks
        self.messages.append([frame.delta.seq for frame in message.frames])


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[UsageJournal]:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    yield journal
    journal.close()


def recorded(journal: UsageJournal) -> dict[uuid.UUID | None, int]:
    """The last delivered total of each hold, as the file tells it."""
    data = next(journal.directory.glob("*.journal")).read_bytes()
    return {entry.hold_id: entry.delivered_token_count for entry in decode(data)}


def delivery() -> Delivery:
    return Delivery("r", Tally(UsageSoFar(input_token_count=10, generated_token_count=100), hold_id=uuid.uuid4()))


def delta(seq: int) -> pb.ServerFrame:
    return pb.ServerFrame(delta=pb.DeltaFrame(seq=seq))


async def turns(count: int = 10) -> None:
    """Let the writer run until it waits."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_all_that_waits_goes_out_in_one_message_and_in_order(journal: UsageJournal) -> None:
    outbox, transport, first, second = Outbox(journal), Transport(flowing=False), delivery(), delivery()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(outbox.write_all(transport.write))
        outbox.push(first, delta(1), 1)
        await transport.entered.acquire()
        for seq in range(2, 6):
            outbox.push(first if seq % 2 else second, delta(seq), 2)
        outbox.close()
        transport.may_write.release()
        transport.may_write.release()

    assert transport.messages == [[1], [2, 3, 4, 5]]
    assert recorded(journal) == {first.tally.hold_id: 5, second.tally.hold_id: 4}


async def test_a_burst_is_split_at_the_bound_of_a_message(journal: UsageJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "FRAMES_PER_MESSAGE_MAX", 2)
    outbox, transport, one = Outbox(journal), Transport(), delivery()
    for seq in range(5):
        outbox.push(one, delta(seq), 1)
    outbox.close()

    await outbox.write_all(transport.write)

    assert transport.messages == [[0, 1], [2, 3], [4]]
    assert one.tally.usage.delivered_token_count == 5


async def test_the_journal_has_a_token_before_the_transport_gets_it(journal: UsageJournal) -> None:
    outbox, one = Outbox(journal), delivery()
    seen: list[int] = []

    async def write(message: pb.GenerateResponse) -> None:
        seen.append(recorded(journal).get(one.tally.hold_id, 0))

    outbox.push(one, delta(1), 3)
    outbox.close()
    await outbox.write_all(write)

    assert seen == [3]


async def test_a_journal_that_cannot_be_written_stops_delivery_and_frees_whoever_waits(
    journal: UsageJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, transport, one = Outbox(journal), Transport(), delivery()

    def full(entries: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "record", full)
    outbox.push(one, delta(1), 3)
    with pytest.raises(OSError, match="No space"):
        await outbox.write_all(transport.write)
    outbox.abandon()

    assert transport.messages == []
    assert one.tally.usage.delivered_token_count == 0
    async with asyncio.timeout(1):
        await outbox.flushed(one)


async def test_frames_without_tokens_do_not_touch_the_journal(journal: UsageJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox, transport, one = Outbox(journal), Transport(), Delivery("r")
    monkeypatch.setattr(journal, "record", None)
    outbox.push(one, delta(1))
    outbox.close()

    await outbox.write_all(transport.write)

    assert transport.messages == [[1]]


async def test_what_is_discarded_was_not_delivered_but_what_is_on_its_way_was(journal: UsageJournal) -> None:
    """A cancel at token k is settled as exactly the tokens that were handed to the transport."""
    outbox, transport, one, other = Outbox(journal), Transport(flowing=False), delivery(), delivery()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(outbox.write_all(transport.write))
        outbox.push(one, delta(1), 2)
        await transport.entered.acquire()
        outbox.push(one, delta(2), 3)
        outbox.push(other, delta(3), 4)

        outbox.discard(one)
        flushed = tasks.create_task(outbox.flushed(one))
        await turns()
        assert one.tally.usage.delivered_token_count == 2
        assert not flushed.done(), "the message under way is still to be taken"
        outbox.push(one, delta(4))
        outbox.close()
        for _ in range(2):
            transport.may_write.release()

    assert transport.messages == [[1], [3, 4]]
    assert recorded(journal) == {one.tally.hold_id: 2, other.tally.hold_id: 4}


async def test_abandoning_frees_everybody_and_drops_what_comes_later(journal: UsageJournal) -> None:
    outbox, transport, sending, waiting = Outbox(journal), Transport(flowing=False), delivery(), delivery()
    async with asyncio.TaskGroup() as tasks:
        writer = tasks.create_task(outbox.write_all(transport.write))
        outbox.push(sending, delta(1), 2)
        await transport.entered.acquire()
        outbox.push(waiting, delta(2), 3)
        writer.cancel()

        outbox.abandon()
        outbox.push(waiting, delta(3), 5)
        await outbox.flushed(sending)
        await outbox.flushed(waiting)

    assert (sending.tally.usage.delivered_token_count, waiting.tally.usage.delivered_token_count) == (2, 0)
    assert waiting.unsent_token_count == 0


ACT = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 2), st.integers(0, 4)),
    st.tuples(st.just("discard"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("write"), st.just(0), st.just(0)),
    st.tuples(st.just("turn"), st.just(0), st.just(0)),
    st.tuples(st.just("abandon"), st.just(0), st.just(0)),
)


@settings(max_examples=100, deadline=None, print_blob=True)
@given(acts=st.lists(ACT, max_size=25))
def test_any_order_of_acts_delivers_no_more_than_was_pushed_and_frees_every_waiter(acts: list[tuple[str, int, int]]) -> None:
    async def scenario() -> None:
        records: dict[uuid.UUID, int] = {}

        class Journal:
            def record(self, entries: list[Delivered]) -> None:
                for entry in entries:
                    assert entry.delivered_token_count > records.get(entry.hold_id, 0), "totals only grow"
                    records[entry.hold_id] = entry.delivered_token_count

        outbox, transport = Outbox(Journal()), Transport(flowing=False)  # type: ignore[arg-type]
        deliveries = [delivery() for _ in range(3)]
        pushed = [0, 0, 0]
        gone = False
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(outbox.write_all(transport.write))
            for act, index, tokens in acts:
                match act:
                    case "push":
                        outbox.push(deliveries[index], delta(1), tokens)
                        pushed[index] += tokens
                    case "discard":
                        outbox.discard(deliveries[index])
                    case "write":
                        transport.may_write.release()
                    case "abandon":
                        writer.cancel()
                        outbox.abandon()
                        gone = True
                    case _:
                        await turns(2)
                for one, most in zip(deliveries, pushed, strict=True):
                    assert one.tally.hold_id is not None
                    assert records.get(one.tally.hold_id, 0) == one.tally.usage.delivered_token_count <= most
                    assert 0 <= one.unsent_token_count <= most
                    assert one.unsent_frame_count >= 0 or gone
            outbox.close()
            for _ in range(len(acts) + 1):
                transport.may_write.release()
            if not gone:
                await writer
            for one in deliveries:
                async with asyncio.timeout(5):
                    await outbox.flushed(one)
                assert one.unsent_token_count == 0

    asyncio.run(scenario())


async def test_a_discarded_request_keeps_its_admission_before_its_end(journal: UsageJournal) -> None:
    """A cancel may come before the admission was written; the client would hear of the end of something that never began."""
    outbox, request = Outbox(journal), delivery()
    kinds: list[str | None] = []

    async def write(message: pb.GenerateResponse) -> None:
        kinds.extend(frame.WhichOneof("kind") for frame in message.frames)

    outbox.push(request, pb.ServerFrame(admitted=pb.AdmittedFrame()))
    outbox.push(request, delta(1), 2)
    outbox.discard(request)
    outbox.push(request, pb.ServerFrame(finished=pb.FinishedFrame()))
    outbox.close()
    await outbox.write_all(write)

    assert kinds == ["admitted", "finished"]
    assert request.unsent_frame_count == 0
    assert request.tally.usage.delivered_token_count == 0
