"""Output of one request against a model: each token arrives once, in order, within the credit."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core.errors import OutputGone
from api.generation.delivery.delta import NO_THOUGHT, Delta, PackedOutput
from api.generation.delivery.encoding import delta_bytes, delta_frame
from api.generation.delivery.output_buffer import FlowControl, OutputBuffer, SendBuffer
from api.generation.delivery.replay import ReplayBuffers
from api.generation.delivery.replayable_buffer import ReplayableBuffer
from api.generation.delivery.stream_writer import (
    TOKENS_PER_DELTA_MAX,
    FrameSubscription,
    StreamWriter,
    token_frame,
)
from api.generation.state import EndDecision
from api.observability import observer
from inference.engine import TokenLogprob, TokenLogprobs
from inference.text.call_parser import CallPiece
from metering.core.models import Outcome
from metering.holds.journal import Delivered, UsageJournal

THINKING = 7  # tokens at the beginning of each choice
EXAMPLES = int(os.environ.get("WEIR_TEST_OUTPUT_EXAMPLES", "100"))
CHOICES = 2
ORGANIZATION = uuid.uuid4()

ACT = st.one_of(
    st.tuples(st.just("say"), st.integers(0, CHOICES - 1), st.integers(0, 3)),
    st.tuples(st.just("say"), st.just(0), st.integers(1, 40)),
    st.tuples(st.just("grant"), st.integers(1, 30), st.just(0)),
    st.tuples(st.just("attach"), st.integers(0, 20), st.integers(0, 20)),
    st.tuples(
        st.sampled_from(["stall", "flow", "turn", "refuse", "detach", "finish"]),
        st.just(0),
        st.just(0),
    ),
)


class Journal:
    """Journal that keeps the last totals of the only request."""

    def __init__(self) -> None:
        self.total = self.taken = self.reasoning_total = self.reasoning_taken = 0

    def record(self, entries: Sequence[Delivered]) -> None:
        """Implement `UsageJournal.record`."""
        [entry] = entries
        assert entry.delivered_token_count > self.total, "totals only grow"
        assert self.reasoning_total <= entry.reasoning_token_count <= entry.delivered_token_count
        self.total = entry.delivered_token_count
        self.reasoning_total = entry.reasoning_token_count

    def took(self, hold_id: uuid.UUID, token_count: int, reasoning_token_count: int) -> None:
        """Implement `UsageJournal.took`."""
        assert self.taken < token_count <= self.total, "marks only grow, up to the journal"
        assert self.reasoning_taken <= reasoning_token_count <= self.reasoning_total
        self.taken, self.reasoning_taken = token_count, reasoning_token_count


def output_of(
    subscription: FrameSubscription, journal: Journal, *, kept: bool, flow: FlowControl
) -> OutputBuffer:
    """Return the output of a running request with a hold."""
    output: OutputBuffer = SendBuffer(subscription, "m", flow, EndDecision(), lambda _: None)
    if kept:
        replays = ReplayBuffers[ReplayableBuffer](
            cast(UsageJournal, journal), bytes_max=10**9, bytes_per_request_max=10**9
        )
        output = ReplayableBuffer(
            subscription, "m", flow, EndDecision(), lambda _: None, 60.0, replays.open(ORGANIZATION)
        )
    output.hold_id = uuid.uuid4()
    return output


class End:
    """End of one stream: the messages handed to its transport."""

    def __init__(self, journal: Journal, after_seq: int, credit: int | None) -> None:
        self.after_seq = after_seq
        self.credit = credit
        self.writer = StreamWriter(cast(UsageJournal, journal))
        self.subscription = FrameSubscription(self.writer, "r", lambda _: None)
        self.frames: list[pb.ServerFrame] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.ended = False

    async def write(self, data: bytes) -> None:
        """Count the message at once; the client may read it later."""
        self.frames += pb.GenerateResponse.FromString(data).frames
        await self.may_write.wait()

    @property
    def deltas(self) -> list[pb.DeltaFrame]:
        """Deltas in order."""
        return [frame.delta for frame in self.frames if frame.HasField("delta")]

    @property
    def token_count(self) -> int:
        """Tokens of all deltas."""
        return sum(len(delta.token_ids) for delta in self.deltas)


class World:
    """Output, the streams that have received it, and their expected state."""

    def __init__(self, tasks: asyncio.TaskGroup, *, kept: bool, credit: int | None) -> None:
        self.tasks = tasks
        self.journal = Journal()
        self.kept = kept
        self.first_credit = credit
        self.end: End | None = self.open(0, credit)
        self.ends = [self.end]
        self.output = output_of(
            self.end.subscription,
            self.journal,
            kept=kept,
            flow=FlowControl(credit, 60.0, lambda: None),
        )
        self.appended: list[list[int]] = [[] for _ in range(CHOICES)]
        self.over = False

    def open(self, after_seq: int, credit: int | None) -> End:
        """Open a stream with its own writer."""
        end = End(self.journal, after_seq, credit)
        self.tasks.create_task(end.writer.write_all(end.write))
        return end

    @property
    def appended_count(self) -> int:
        """Number of output tokens."""
        return sum(map(len, self.appended))

    @property
    def appended_thinking(self) -> int:
        """Number of output tokens that are thinking."""
        return sum(map(thinking_of, self.appended))

    def append(self, choice: int, count: int) -> None:
        """Output a step of this many tokens, numbered by position."""
        if self.over or (self.end is None and not self.kept):
            return
        first = len(self.appended[choice])
        ids = list(range(first, first + count))
        self.appended[choice] += ids
        self.output.usage.generated_token_count += count
        calls = [CallPiece(choice, "", "", f"<{index}>") for index in ids]
        text, thought = "".join(f"<{index}>" for index in ids), thinking_of(ids)
        self.output.append(choice, text, ids, (), calls, ("", thought) if thought else NO_THOUGHT)

    def grant(self, count: int) -> None:
        """Grant credit as the current subscriber."""
        if self.end is not None:
            self.output.grant(count)
            if self.end.credit is not None:
                self.end.credit += count

    def attach(self, wanted: int, credit: int) -> None:
        """Attach another stream: anywhere in kept output, else at the previous one's position."""
        last_seq = max((delta.seq for end in self.ends for delta in end.deltas), default=0)
        after_seq = min(wanted, last_seq) if self.kept else last_seq
        end = self.open(after_seq, None if self.first_credit is None else credit)
        self.output.attach(end.subscription, after_seq, credit)
        self.end = end
        self.ends.append(end)

    def refuse(self) -> None:
        """Check that an impossible attach is refused without effect."""
        before = self.output.subscription
        with pytest.raises(OutputGone):
            self.output.attach(self.open(0, None).subscription, 10**6, 0)
        dispatched = max((delta.seq for end in self.ends for delta in end.deltas), default=0)
        if not self.kept and dispatched:
            with pytest.raises(OutputGone):
                self.output.attach(self.open(0, None).subscription, dispatched - 1, 0)
        assert self.output.subscription is before

    def detach(self) -> None:
        """Disconnect the stream; without a replay buffer that ends the request."""
        if self.kept and self.end is not None and not self.over:
            self.end.writer.abandon()
            self.output.leave(self.end.subscription, Outcome.CANCELLED)
            self.end = None

    def finish(self) -> None:
        """End the request; without a replay buffer only once all output was taken."""
        nothing_waits = not self.output.unsent_token_count
        if not self.over and (self.kept or (self.end is not None and nothing_waits)):
            self.output.end(pb.ServerFrame(finished=pb.FinishedFrame()))
            self.over = True

    def check(self) -> None:
        """Check the invariants of every moment."""
        for end in self.ends:
            seqs = [delta.seq for delta in end.deltas]
            assert seqs == list(range(end.after_seq + 1, end.after_seq + 1 + len(seqs))), "no gap"
            assert end.credit is None or end.token_count <= end.credit, "never more than granted"
            assert len([frame for frame in end.frames if frame.HasField("finished")]) <= 1
        by_seq: dict[int, pb.DeltaFrame] = {}
        for end in self.ends:
            for delta in end.deltas:
                assert by_seq.setdefault(delta.seq, delta) == delta, "a number means one delta"
                assert len(delta.token_ids) <= TOKENS_PER_DELTA_MAX
        for choice in range(CHOICES):
            reported = [
                delta for _, delta in sorted(by_seq.items()) if delta.choice_index == choice
            ]
            ids = [token_id for delta in reported for token_id in delta.token_ids]
            if len(by_seq) == max(by_seq, default=0):  # no sequence number was skipped
                assert ids == self.appended[choice][: len(ids)], "in order"
                text = "".join(delta.text for delta in reported)
                assert "".join(f"<{index}>" for index in ids).startswith(text), (
                    "text follows tokens"
                )
                assert (
                    "".join(call.arguments_json for delta in reported for call in delta.tool_calls)
                    == text
                ), "nor do calls"
        usage, in_flight = self.output.usage, self.output.in_flight_token_count
        journalled, delivered = usage.journalled_token_count, usage.delivered_token_count
        assert journalled == self.journal.total
        assert usage.taken_token_count == self.journal.taken
        assert usage.taken_token_count + in_flight <= journalled
        assert usage.journalled_reasoning_token_count == self.journal.reasoning_total
        assert usage.taken_reasoning_token_count == self.journal.reasoning_taken
        thinking = usage.delivered_reasoning_token_count
        dispatched = usage.taken_reasoning_token_count + self.output.in_flight_reasoning_token_count
        sent = [delta.token_ids for _, delta in sorted(by_seq.items())]
        if sum(map(len, sent)) == usage.taken_token_count + in_flight:
            assert dispatched == sum(map(thinking_of, sent)), "exactly the thinking among them"
        if self.kept:
            assert delivered == self.appended_count, "what is kept is delivered"
            assert thinking == self.appended_thinking
        else:
            assert journalled == sum(end.token_count for end in self.ends), (
                "each is journalled once"
            )
            assert delivered == usage.taken_token_count == journalled - in_flight
            assert thinking == usage.taken_reasoning_token_count
            assert journalled + self.output.unsent_token_count == self.appended_count

    def check_settled(self) -> None:
        """Check, once all writers are idle, that exactly the permitted tokens were sent."""
        if self.end is None:
            return
        before = self.appended_count - self.end.token_count - self.waiting_of(self.end)
        due = self.appended_count - before
        allowed = due if self.end.credit is None else min(due, self.end.credit)
        assert self.end.token_count == allowed, "as much as there is, as far as credit reaches"
        if self.over and allowed == due:
            assert self.end.frames[-1].HasField("finished")

    def waiting_of(self, end: End) -> int:
        """Return the number of tokens that this stream has yet to get."""
        if not self.kept:
            return self.appended_count - sum(each.token_count for each in self.ends)
        assert isinstance(self.output, ReplayableBuffer)
        buffer, last = self.output.buffer, end.deltas[-1].seq if end.deltas else end.after_seq
        return sum(buffer.get(seq)[1] for seq in range(last + 1, buffer.last_seq + 1))


def thinking_of(ids: Iterable[int]) -> int:
    """Return how many of these tokens of a choice are thinking."""
    return sum(token_id < THINKING for token_id in ids)


async def ticks(count: int) -> None:
    """Let the writers run until they wait."""
    for _ in range(count):
        await asyncio.sleep(0)


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(
    kept=st.booleans(),
    credit=st.one_of(st.none(), st.integers(0, 20)),
    acts=st.lists(ACT, max_size=30),
)
def test_an_output_does_what_its_model_says(
    kept: bool, credit: int | None, acts: list[tuple[str, int, int]]
) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks, kept=kept, credit=credit)
            for act, first, second in acts:
                match act:
                    case "say":
                        world.append(first, second)
                    case "grant":
                        world.grant(first)
                    case "attach" if world.kept or (world.end is not None and not world.over):
                        world.attach(first, second)
                    case "stall" if world.end is not None:
                        world.end.may_write.clear()
                    case "flow":
                        for end in world.ends:
                            end.may_write.set()
                    case "refuse":
                        world.refuse()
                    case "detach":
                        world.detach()
                    case "finish":
                        world.finish()
                    case _:
                        await ticks(3)
                world.check()
            for end in world.ends:
                end.may_write.set()
            await ticks(400)
            world.check()
            world.check_settled()
            for task in list(asyncio.all_tasks()):
                if task is not asyncio.current_task():
                    task.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("kept", [False, True])
async def test_a_client_without_grants_while_output_waits_is_stopped_in_time(kept: bool) -> None:
    journal, stalled = Journal(), asyncio.Event()
    subscription = FrameSubscription(StreamWriter(cast(UsageJournal, journal)), "r", lambda _: None)
    flow = FlowControl(1, 0.01, stalled.set)
    output = output_of(subscription, journal, kept=kept, flow=flow)

    output.append(0, "a", (1,))
    assert flow.timer is None, "nothing waits for credit"
    output.append(0, "b", (2,))
    first = flow.timer
    assert first is not None
    output.grant(1)
    assert first.cancelled()
    assert flow.timer is None, "nothing waits for credit any more"
    output.append(0, "c", (3,))
    async with asyncio.timeout(60):
        await stalled.wait()


async def test_clients_that_need_no_credit_or_have_left_are_not_awaited() -> None:
    for credit in (None, 0):
        journal, flow = Journal(), FlowControl(credit, 60.0, lambda: None)
        subscription = FrameSubscription(
            StreamWriter(cast(UsageJournal, journal)), "r", lambda _: None
        )
        output = output_of(subscription, journal, kept=True, flow=flow)
        if credit is not None:
            output.detach()
        for index in range(100):
            output.append(0, "a", (index,))
        assert flow.timer is None


@given(
    seq=st.integers(1, 2**40),
    choice=st.integers(0, 200),
    text=st.text(max_size=300),
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=70),
    given_id=st.text(max_size=200),
    called=st.booleans(),
    thinks=st.booleans(),
)
def test_a_delta_in_bytes_is_the_message(
    seq: int, choice: int, text: str, ids: list[int], given_id: str, called: bool, thinks: bool
) -> None:
    tokens = [TokenLogprob(each, -1.5 * entry) for entry, each in enumerate(ids)]
    values = Delta(
        text,
        ids,
        [TokenLogprobs(token, tuple(tokens[:20])) for token in tokens],
        [CallPiece(1, "", text, "")] if called else [],
        text if thinks else "",
        len(ids) if thinks else 0,
        pb.ChoiceEnd(choice_index=choice) if called else None,
    )
    delta = delta_bytes(seq, choice, values)
    writer = StreamWriter(cast(UsageJournal, Journal()))
    head = FrameSubscription(writer, given_id, lambda _: None).head
    data = delta_frame(head, delta)

    messages = [pb.TokenLogprob(token_id=each.token_id, logprob=each.logprob) for each in tokens]
    expected = pb.DeltaFrame(
        seq=seq,
        choice_index=choice,
        text=text,
        token_ids=ids,
        logprobs=[pb.TokenLogprobs(chosen=token, top=messages[:20]) for token in messages],
        tool_calls=[pb.ToolCallDelta(index=1, name=text)] if called else [],
        reasoning=values.reasoning,
        reasoning_token_count=values.reasoning_token_count,
        end=values.end,
    )
    assert pb.DeltaFrame.FromString(delta) == expected
    assert (
        pb.GenerateResponse.FromString(data * 2).frames
        == [pb.ServerFrame(request_id=given_id, delta=expected)] * 2
    )

    for token_id in ids[:3]:
        frame = token_frame(head, seq, text, token_id)
        whole = pb.DeltaFrame(seq=seq, text=text, token_ids=[token_id])
        one = pb.ServerFrame(request_id=given_id, delta=whole)
        assert pb.GenerateResponse.FromString(frame * 2).frames == [one] * 2


def test_packed_output_is_taken_with_its_last_token() -> None:
    packed = PackedOutput()
    for word in ("a", "b", "c"):
        packed.add("", (1, 2), (), [CallPiece(0, "", "", word)])
    taken = []
    while not packed.empty:
        delta, _ = packed.take(3)
        taken.append((delta.text, delta.token_ids, [call.arguments for call in delta.calls]))

    assert taken == [("", [1, 2, 1], ["a"]), ("", [2, 1, 2], ["bc"])]


def test_a_delta_has_one_increment_of_each_call_and_text_only_before_calls() -> None:
    packed = PackedOutput()
    begun = CallPiece(0, "1", "get", "{")
    packed.add("Let me", (1,))
    packed.add(" see", (2,), (), [begun])
    packed.add("", (3,), (), [CallPiece(0, "", "", "}")])
    packed.add("", (4,), (), [CallPiece(1, "2", "put", "{}")])
    packed.add("", (5,))
    packed.add(" Bye", ())  # held back to the end
    packed.end = pb.ChoiceEnd(choice_index=3, reason=types_pb2.FINISH_REASON_STOP)
    taken = []
    while not packed.empty:
        delta, _ = packed.take(64)
        calls = [(call.index, call.id, call.arguments) for call in delta.calls]
        taken.append((delta.text, delta.token_ids, calls, delta.end is not None))

    assert taken == [
        ("Let me see", [1, 2, 3, 4, 5], [(0, "1", "{}"), (1, "2", "{}")], False),
        (" Bye", [], [], True),
    ]


@pytest.mark.parametrize("kept", [False, True])
def test_gaps_are_between_token_messages(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text without tokens, such as held-back text at the end, is none."""
    journal = Journal()
    writer = StreamWriter(cast(UsageJournal, journal))
    subscription = FrameSubscription(writer, "r", lambda _: None)
    output = output_of(subscription, journal, kept=kept, flow=FlowControl(None, 60.0, lambda: None))

    for at_ms, token_ids in ((0, [1]), (20, [2, 3]), (100, []), (170, [4]), (200, [5])):
        monkeypatch.setattr(observer, "monotonic", partial(float, 50 + at_ms / 1000))
        output.append(0, "a", token_ids)

    facts = {"itl_p50_ms": 30, "itl_p99_ms": 150, "itl_max_ms": 150}
    assert output.gaps.facts() == pytest.approx(facts)


def test_thinking_that_follows_text_is_not_taken_with_it() -> None:
    """The thinking of a delta precedes its text."""
    packed = PackedOutput()
    appended = [("", "Hm. "), ("", "So."), ("I look.", ""), ("", "Well."), (" It", "")]
    for text, thought in appended:
        packed.add(text, (1, 2), (), (), (thought, 2 if thought else 0))
    taken = []
    while not packed.empty:
        delta, count = packed.take(64)
        assert delta.reasoning_token_count == count
        taken.append((delta.reasoning, delta.text, len(delta.token_ids), count))

    assert taken == [("Hm. So.", "I look.", 6, 4), ("Well.", " It", 4, 2)]
