"""Stream writer: one message per burst, in order; no token is sent before the journal has it."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weir.v1 import inference_service_pb2 as pb

from api.generation.delivery.output_buffer import FlowControl, SendBuffer
from api.generation.delivery.stream_writer import FrameSubscription, StreamWriter
from api.generation.state import End, EndDecision
from metering.core.errors import JournalUnavailable
from metering.core.models import Outcome
from metering.holds.journal import FORMAT, Delivered, UsageJournal, decode
from tests.service import all_taken

ACT = st.one_of(
    st.tuples(st.just("say"), st.integers(0, 2), st.integers(0, 4)),
    st.tuples(st.just("push"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("discard"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("write"), st.just(0), st.just(0)),
    st.tuples(st.just("turn"), st.just(0), st.just(0)),
    st.tuples(st.just("abandon"), st.just(0), st.just(0)),
    st.tuples(st.just("accept"), st.integers(0, 1), st.just(0)),
)


class Transport:
    """Transport that takes one message at a time; each write waits until it is released.

    `write_now` waits for nothing if `accepts`.
    """

    def __init__(self, *, flowing: bool = True, accepts: bool = True) -> None:
        self.messages: list[list[int]] = []
        self.accepts = accepts
        self.may_write = asyncio.Semaphore(10**9 if flowing else 0)
        self.entered = asyncio.Semaphore(0)

    async def write(self, data: bytes) -> None:
        self.entered.release()
        await self.may_write.acquire()
        if data:
            self.messages.append(tokens_of(data))

    def write_now(self, data: bytes) -> bool:
        self.messages.append(tokens_of(data))
        return self.accepts


def tokens_of(data: bytes) -> list[int]:
    """Return the token ids of all deltas in a message."""
    return [
        token_id
        for frame in pb.GenerateResponse.FromString(data).frames
        for token_id in frame.delta.token_ids
    ]


def recorded(journal: UsageJournal) -> dict[uuid.UUID | None, int]:
    """Return the last delivered total of each hold in the journal's file."""
    data = next(journal.directory.glob(f"*{FORMAT.suffix}")).read_bytes()
    return {entry.hold_id: entry.delivered_token_count for entry in decode(data)}


def marked(journal: UsageJournal) -> dict[uuid.UUID | None, int]:
    """Return the tokens of each hold that the file of marks counts as taken."""
    data = next(journal.directory.glob(f"*{FORMAT.marks_suffix}")).read_bytes()
    marks = {
        uuid.UUID(bytes=number): word % 2**32 for number, word in FORMAT.mark.iter_unpack(data)
    }
    return {hold_id: count for hold_id, count in marks.items() if hold_id.int}


def output_on(writer: StreamWriter) -> SendBuffer:
    """Return the output of a request that this stream receives."""
    output = SendBuffer(
        FrameSubscription(writer, "r", lambda _: None),
        "m",
        FlowControl(None, 60.0, lambda: None),
        EndDecision(),
        lambda _: None,
    )
    output.hold_id = uuid.uuid4()
    output.usage.input_token_count, output.usage.generated_token_count = 10, 100
    return output


def append(output: SendBuffer, *token_ids: int) -> None:
    """Output one step."""
    output.append(0, "x", token_ids)


async def ticks(count: int = 10) -> None:
    """Let the writer run until it waits."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_all_that_waits_goes_out_in_one_message_and_in_order(journal: UsageJournal) -> None:
    writer, transport = StreamWriter(journal), Transport(flowing=False)
    first, second = output_on(writer), output_on(writer)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.write_all(transport.write))
        append(first, 1)
        await transport.entered.acquire()
        for number in range(2, 6):
            append(first if number % 2 else second, number, number)
        writer.close()
        transport.may_write.release()
        transport.may_write.release()

    assert transport.messages == [[1], [2, 2, 4, 4, 3, 3, 5, 5]]
    assert recorded(journal) == {first.hold_id: 5, second.hold_id: 4}


async def test_messages_are_sent_at_once_without_the_task_of_the_writer(
    journal: UsageJournal,
) -> None:
    writer, transport = StreamWriter(journal), Transport()
    one = output_on(writer)

    async def write(data: bytes) -> None:
        raise AssertionError("the task has nothing to write")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.write_all(write))
        await ticks()
        writer.write_now = transport.write_now
        for token_id in (1, 2):
            append(one, token_id)
            append(one, token_id)
            assert one.usage.journalled_token_count == 2 * (token_id - 1)
            await ticks(1)
            assert one.usage.delivered_token_count == 2 * token_id
        writer.close()

    assert transport.messages == [[1, 1], [2, 2]]
    assert recorded(journal) == marked(journal) == {one.hold_id: 4}


async def test_a_message_sent_at_once_counts_as_delivered_when_the_transport_has_taken_it(
    journal: UsageJournal,
) -> None:
    writer, transport = StreamWriter(journal), Transport(flowing=False, accepts=False)
    one = output_on(writer)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.write_all(transport.write))
        await ticks()
        writer.write_now = transport.write_now
        append(one, 1)
        await transport.entered.acquire()
        append(one, 2)
        await ticks()
        assert transport.messages == [[1]], "one message at a time"
        assert (one.usage.journalled_token_count, one.usage.delivered_token_count) == (1, 0)
        assert writer.writing_since is not None

        transport.accepts = True
        transport.may_write.release()
        transport.may_write.release()
        await ticks()
        assert one.usage.delivered_token_count == 2
        writer.close()

    assert transport.messages == [[1], [2]]


async def test_an_error_of_a_message_sent_at_once_ends_the_writer(journal: UsageJournal) -> None:
    writer, one = StreamWriter(journal), Transport()
    output = output_on(writer)

    def write_now(data: bytes) -> bool:
        raise ConnectionResetError("the client disconnected")

    writing = asyncio.ensure_future(writer.write_all(one.write))
    await ticks()
    writer.write_now = write_now
    append(output, 1)
    with pytest.raises(ConnectionResetError):
        await writing
    writer.abandon()

    assert output.usage.delivered_token_count == 0
    async with asyncio.timeout(1):
        await all_taken(output)


async def test_a_burst_is_split_at_the_bound_of_a_message(
    journal: UsageJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamWriter, "frame_max", 2)
    writer, transport = StreamWriter(journal), Transport()
    outputs = [output_on(writer) for _ in range(5)]
    for number, output in enumerate(outputs):
        append(output, number)
    writer.close()

    await writer.write_all(transport.write)

    assert transport.messages == [[0, 1], [2, 3], [4]]
    assert [output.usage.delivered_token_count for output in outputs] == [1] * 5


async def test_requests_take_turns(journal: UsageJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamWriter, "token_max", 100)
    writer, transport = StreamWriter(journal), Transport()
    much, little = output_on(writer), output_on(writer)
    for _ in range(300):
        append(much, 1)
    append(little, 2)
    writer.close()

    await writer.write_all(transport.write)

    assert [len(message) for message in transport.messages] == [128, 129, 44]
    assert 2 in transport.messages[1]


async def test_the_journal_has_a_token_before_the_transport_gets_it(journal: UsageJournal) -> None:
    writer = StreamWriter(journal)
    one, seen = output_on(writer), list[int]()

    async def write(data: bytes) -> None:
        seen.append(recorded(journal).get(one.hold_id, 0))

    append(one, 1, 2, 3)
    writer.close()
    await writer.write_all(write)

    assert seen == [3]


async def test_an_unwritable_journal_fails_only_requests_with_tokens(
    journal: UsageJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, sent = StreamWriter(journal), list[pb.ServerFrame]()
    one, other = output_on(writer), output_on(writer)
    ends: list[End] = []
    one._request_state = EndDecision(ends.append)

    async def write(data: bytes) -> None:
        sent.extend(pb.GenerateResponse.FromString(data).frames)

    def refusing(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    one.push(pb.ServerFrame(admitted=pb.AdmittedFrame()))
    append(one, 1, 2, 3)
    other.push(pb.ServerFrame(progress=pb.ProgressFrame()))
    writer.close()
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", refusing)
        await writer.write_all(write)

    assert [frame.WhichOneof("kind") for frame in sent] == ["admitted", "progress"]
    assert [(each.outcome, type(each.error)) for each in ends] == [
        (Outcome.FAILED, JournalUnavailable)
    ]
    usage = one.usage
    assert usage.journalled_token_count == usage.delivered_token_count == 0
    assert one.unsent_token_count == 0, "no gap in the output is ever sent"
    async with asyncio.timeout(1):
        await all_taken(one)


async def test_a_broken_output_breaks_its_own_stream_alone(journal: UsageJournal) -> None:
    transport, broken, whole = Transport(), StreamWriter(journal), StreamWriter(journal)
    bad, good = output_on(broken), output_on(whole)
    bad.hold_id = None  # tokens without a hold
    async with asyncio.TaskGroup() as tasks:
        failing = asyncio.ensure_future(broken.write_all(transport.write))
        tasks.create_task(whole.write_all(transport.write))
        await ticks()
        append(bad, 1)
        append(good, 2)
        await ticks()
        whole.close()
    with pytest.raises(AssertionError, match="under a hold"):
        await failing

    assert transport.messages == [[2]]
    assert (bad.usage.delivered_token_count, good.usage.delivered_token_count) == (0, 1)


async def test_frames_without_tokens_do_not_touch_the_journal(
    journal: UsageJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, transport = StreamWriter(journal), Transport()
    monkeypatch.setattr(journal, "record", None)
    output_on(writer).push(pb.ServerFrame(progress=pb.ProgressFrame()))
    writer.push(pb.ServerFrame(request_id="unknown", failed=pb.FailedFrame()))
    writer.close()

    await writer.write_all(transport.write)

    assert transport.messages == [[]]


async def test_only_written_output_is_delivered(journal: UsageJournal) -> None:
    """A cancel at token k settles exactly the tokens that were handed to the transport."""
    writer, transport = StreamWriter(journal), Transport(flowing=False)
    one, other = output_on(writer), output_on(writer)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.write_all(transport.write))
        append(one, 1, 1)
        await transport.entered.acquire()
        append(one, 2, 2, 2)
        append(other, 3, 3, 3, 3)

        one.discard()
        taken = tasks.create_task(all_taken(one))
        await ticks()
        assert one.usage.journalled_token_count == 2
        assert one.usage.delivered_token_count == 0
        assert not taken.done(), "the message under way is still to be taken"
        one.push(pb.ServerFrame(progress=pb.ProgressFrame()))
        writer.close()
        for _ in range(2):
            transport.may_write.release()

    assert transport.messages == [[1, 1], [3, 3, 3, 3]]
    assert recorded(journal) == marked(journal) == {one.hold_id: 2, other.hold_id: 4}
    assert one.usage.delivered_token_count == 2


async def test_abandoning_releases_waiters_and_drops_frames(journal: UsageJournal) -> None:
    writer, transport = StreamWriter(journal), Transport(flowing=False)
    sending, waiting = output_on(writer), output_on(writer)
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(writer.write_all(transport.write))
        append(sending, 1, 1)
        await transport.entered.acquire()
        append(waiting, 2, 2, 2)
        writing.cancel()

        writer.abandon()
        append(waiting, 3, 3, 3, 3, 3)
        await all_taken(sending)
        await all_taken(waiting)

    assert (sending.usage.journalled_token_count, waiting.usage.journalled_token_count) == (2, 0)
    assert (sending.usage.delivered_token_count, waiting.usage.delivered_token_count) == (0, 0)
    assert transport.messages == []


@settings(max_examples=100, deadline=None, print_blob=True)
@given(acts=st.lists(ACT, max_size=25), at_once=st.booleans())
def test_any_order_of_acts_delivers_no_more_than_was_appended_and_frees_every_waiter(
    acts: list[tuple[str, int, int]], at_once: bool
) -> None:
    async def scenario() -> None:
        records: dict[uuid.UUID, int] = {}
        taken: dict[uuid.UUID, int] = {}

        class Journal:
            def took(
                self, hold_id: uuid.UUID, token_count: int, reasoning_token_count: int = 0
            ) -> None:
                assert taken.get(hold_id, 0) <= token_count <= records[hold_id]
                taken[hold_id] = token_count

            def record(self, entries: Sequence[Delivered]) -> None:
                for entry in entries:
                    assert entry.delivered_token_count > records.get(entry.hold_id, 0), (
                        "totals grow"
                    )
                    records[entry.hold_id] = entry.delivered_token_count

        writer, transport = StreamWriter(cast(UsageJournal, Journal())), Transport(flowing=False)
        outputs = [output_on(writer) for _ in range(3)]
        appended = [0, 0, 0]
        gone = False
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(writer.write_all(transport.write))
            if at_once:
                await ticks(2)
                writer.write_now = transport.write_now
            for act, index, token_count in acts:
                match act:
                    case "say":
                        append(outputs[index], *[1] * token_count)
                        appended[index] += token_count
                    case "push":
                        outputs[index].push(pb.ServerFrame(progress=pb.ProgressFrame()))
                    case "discard":
                        outputs[index].discard()
                    case "write":
                        transport.may_write.release()
                    case "accept":
                        transport.accepts = bool(index)
                    case "abandon":
                        writing.cancel()
                        writer.abandon()
                        gone = True
                    case _:
                        await ticks(2)
                for one, most in zip(outputs, appended, strict=True):
                    assert one.hold_id is not None
                    assert records.get(one.hold_id, 0) == one.usage.journalled_token_count <= most
                    assert taken.get(one.hold_id, 0) == one.usage.delivered_token_count
                    assert 0 <= one.unsent_token_count <= most
                    assert one.subscription is not None
                    assert one.subscription.unsent_frame_count >= 0
                assert writer.frame_count >= 0
            writer.close()
            for _ in range(len(acts) + 1):
                transport.may_write.release()
            if not gone:
                await writing
            for one in outputs:
                async with asyncio.timeout(5):
                    await all_taken(one)
                assert gone or one.unsent_token_count == 0

    asyncio.run(scenario())


async def test_a_discarded_request_sends_its_admission_first(journal: UsageJournal) -> None:
    """Otherwise the client would see the end of an unknown request."""
    writer = StreamWriter(journal)
    request, kinds = output_on(writer), list[str]()
    subscription = request.subscription
    assert subscription is not None

    async def write(data: bytes) -> None:
        frames = pb.GenerateResponse.FromString(data).frames
        kinds.extend(str(frame.WhichOneof("kind")) for frame in frames)

    request.push(pb.ServerFrame(admitted=pb.AdmittedFrame()))
    append(request, 1, 2)
    request.discard()
    request.end(pb.ServerFrame(finished=pb.FinishedFrame()))
    writer.close()
    await writer.write_all(write)

    assert kinds == ["admitted", "finished"]
    assert subscription.unsent_frame_count == 0
    assert request.usage.delivered_token_count == 0
