"""The feed of one request against a model: whoever receives gets what it asked for, in order, once, as far as it has credit."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import OutputGone
from api.generation.feed import FRAMES_IN_OUTBOX_MAX, TOKENS_PER_FRAME_MAX, Feed, FlowControl, WaitingOutput
from api.generation.mailbox import Mailboxes
from api.generation.outbox import Outbox
from api.generation.receiver import Receiver
from metering.holds.journal import Delivered, UsageJournal

EXAMPLES = int(os.environ.get("WEIR_TEST_FEED_EXAMPLES", "100"))
CHOICES = 2
ORGANIZATION = uuid.uuid4()


class Journal:
    """Remembers the last total of the one request."""

    def __init__(self) -> None:
        self.total = 0

    def record(self, entries: Sequence[Delivered]) -> None:
        """As the real one, which writes first."""
        [entry] = entries
        assert entry.delivered_token_count > self.total, "totals only grow"
        self.total = entry.delivered_token_count


class End:
    """One stream's end: what its transport has been handed."""

    def __init__(self, journal: Journal, after_seq: int, credit: int | None) -> None:
        self.after_seq = after_seq
        self.credit = credit
        self.outbox = Outbox(cast(UsageJournal, journal))
        self.receiver = Receiver(self.outbox, "r", lambda _: None)
        self.frames: list[pb.ServerFrame] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.ended = False

    async def write(self, message: pb.GenerateResponse) -> None:
        """Handed over is counted at once; the client may take its time."""
        self.frames += message.frames
        await self.may_write.wait()

    @property
    def deltas(self) -> list[pb.DeltaFrame]:
        """In order."""
        return [frame.delta for frame in self.frames if frame.HasField("delta")]

    @property
    def token_count(self) -> int:
        """Of all deltas."""
        return sum(len(delta.token_ids) for delta in self.deltas)


class World:
    """A feed, the streams that have received it, and what the model expects of them."""

    def __init__(self, tasks: asyncio.TaskGroup, *, kept: bool, credit: int | None) -> None:
        self.tasks = tasks
        self.journal = Journal()
        self.kept = kept
        self.first_credit = credit
        self.end: End | None = self.open(0, credit)
        self.ends = [self.end]
        mailboxes = Mailboxes(cast(UsageJournal, self.journal), bytes_max=10**9, bytes_per_request_max=10**9)
        flow = FlowControl(credit, 60.0, lambda: None)
        self.feed = Feed(self.end.receiver, "m", flow, mailboxes.open(ORGANIZATION) if kept else None)
        self.feed.tally.hold_id = uuid.uuid4()
        self.said: list[list[int]] = [[] for _ in range(CHOICES)]
        self.over = False

    def open(self, after_seq: int, credit: int | None) -> End:
        """A stream with a writer of its own."""
        end = End(self.journal, after_seq, credit)
        self.tasks.create_task(end.outbox.write_all(end.write))
        return end

    @property
    def said_count(self) -> int:
        """Tokens."""
        return sum(map(len, self.said))

    def say(self, choice: int, count: int) -> None:
        """A step of so many tokens, each with a number that tells its place."""
        if self.over or (self.end is None and not self.kept):
            return
        first = len(self.said[choice])
        ids = list(range(first, first + count))
        self.said[choice] += ids
        self.feed.tally.usage.generated_token_count += count
        calls = [pb.ToolCallDelta(index=choice, arguments_json=f"<{index}>") for index in ids]
        self.feed.say(choice, "".join(f"<{index}>" for index in ids), ids, (), calls)

    def grant(self, count: int) -> None:
        """Credit from whoever receives."""
        if self.end is not None:
            self.feed.grant(count)
            if self.end.credit is not None:
                self.end.credit += count

    def attach(self, wanted: int, credit: int) -> None:
        """Another stream asks for the rest: of what is kept from anywhere, else from where the last one stands."""
        last_seq = max((delta.seq for end in self.ends for delta in end.deltas), default=0)
        after_seq = min(wanted, last_seq) if self.kept else last_seq
        end = self.open(after_seq, None if self.first_credit is None else credit)
        end.receiver.source = self.feed
        self.feed.attach(end.receiver, after_seq, credit, running=not self.over)
        self.end = end
        self.ends.append(end)

    def refuse(self) -> None:
        """What is not there, or not any more, changes nothing."""
        before = self.feed.receiver
        with pytest.raises(OutputGone):
            self.feed.attach(self.open(0, None).receiver, 10**6, 0)
        handed = max((delta.seq for end in self.ends for delta in end.deltas), default=0)
        if not self.kept and handed:
            with pytest.raises(OutputGone):
                self.feed.attach(self.open(0, None).receiver, handed - 1, 0)
        assert self.feed.receiver is before

    def detach(self) -> None:
        """The stream goes away; without a mailbox that ends the request."""
        if self.kept and self.end is not None and not self.over:
            self.end.outbox.abandon()
            self.feed.leave(self.end.receiver, cast(Any, None))
            self.end = None

    def finish(self) -> None:
        """The request ends; without a mailbox once all was taken."""
        nothing_waits = not self.feed.unsent_token_count
        if not self.over and (self.kept or (self.end is not None and nothing_waits)):
            self.feed.end(pb.ServerFrame(finished=pb.FinishedFrame()))
            self.over = True

    def check(self) -> None:
        """What holds at every moment."""
        for end in self.ends:
            seqs = [delta.seq for delta in end.deltas]
            assert seqs == list(range(end.after_seq + 1, end.after_seq + 1 + len(seqs))), "no gap, no repetition"
            assert end.credit is None or end.token_count <= end.credit, "never more than granted"
            assert len([frame for frame in end.frames if frame.HasField("finished")]) <= 1
            assert end.receiver.delivery.unsent_frame_count <= FRAMES_IN_OUTBOX_MAX + 3
        by_seq: dict[int, pb.DeltaFrame] = {}
        for end in self.ends:
            for delta in end.deltas:
                assert by_seq.setdefault(delta.seq, delta) == delta, "a number means one delta"
                assert len(delta.token_ids) <= TOKENS_PER_FRAME_MAX
        for choice in range(CHOICES):
            told = [delta for _, delta in sorted(by_seq.items()) if delta.choice_index == choice]
            ids = [token_id for delta in told for token_id in delta.token_ids]
            if len(by_seq) == max(by_seq, default=0):  # nobody has skipped any
                assert ids == self.said[choice][: len(ids)], "in order"
                text = "".join(delta.text for delta in told)
                assert "".join(f"<{index}>" for index in ids).startswith(text), "text never runs ahead of its tokens"
                assert "".join(call.arguments_json for delta in told for call in delta.tool_calls) == text, "nor do calls"
        delivered = self.feed.tally.usage.delivered_token_count
        assert delivered == self.journal.total
        if self.kept:
            assert delivered == self.said_count, "what is kept is delivered"
        else:
            assert delivered == sum(end.token_count for end in self.ends), "delivered is what was handed over, once"
            assert delivered + self.feed.unsent_token_count == self.said_count

    def check_settled(self) -> None:
        """What holds once everybody has had the time to take what it may: exactly as much as that is."""
        if self.end is None:
            return
        before = self.said_count - self.end.token_count - self.waiting_of(self.end)
        due = self.said_count - before
        allowed = due if self.end.credit is None else min(due, self.end.credit)
        assert self.end.token_count == allowed, "as much as there is, as far as credit reaches"
        if self.over and allowed == due:
            assert self.end.frames[-1].HasField("finished")

    def waiting_of(self, end: End) -> int:
        """Tokens that this stream has still to get, by what is told elsewhere: all that was said, less what came before it."""
        if not self.kept:
            return self.said_count - sum(each.token_count for each in self.ends)
        mailbox = self.feed.mailbox
        assert mailbox is not None
        last = end.deltas[-1].seq if end.deltas else end.after_seq
        return sum(mailbox.get(seq)[1] for seq in range(last + 1, mailbox.last_seq + 1))


ACT = st.one_of(
    st.tuples(st.just("say"), st.integers(0, CHOICES - 1), st.integers(0, 3)),
    st.tuples(st.just("say"), st.just(0), st.integers(1, 40)),
    st.tuples(st.just("grant"), st.integers(1, 30), st.just(0)),
    st.tuples(st.just("attach"), st.integers(0, 20), st.integers(0, 20)),
    st.tuples(st.sampled_from(["stall", "flow", "turn", "refuse", "detach", "finish"]), st.just(0), st.just(0)),
)


async def turns(count: int) -> None:
    """Let the writers run until they wait."""
    for _ in range(count):
        await asyncio.sleep(0)


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(kept=st.booleans(), credit=st.one_of(st.none(), st.integers(0, 20)), acts=st.lists(ACT, max_size=30))
def test_a_feed_does_what_its_model_says(kept: bool, credit: int | None, acts: list[tuple[str, int, int]]) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks, kept=kept, credit=credit)
            for act, first, second in acts:
                match act:
                    case "say":
                        world.say(first, second)
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
                        await turns(3)
                world.check()
            for end in world.ends:
                end.may_write.set()
            await turns(400)
            world.check()
            world.check_settled()
            for task in list(asyncio.all_tasks()):
                if task is not asyncio.current_task():
                    task.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("kept", [False, True])
async def test_who_grants_nothing_while_output_waits_is_given_up_in_time(kept: bool) -> None:
    journal, stalled = Journal(), asyncio.Event()
    mailboxes = Mailboxes(cast(UsageJournal, journal), bytes_max=10**9, bytes_per_request_max=10**9)
    receiver = Receiver(Outbox(cast(UsageJournal, journal)), "r", lambda _: None)
    feed = Feed(receiver, "m", FlowControl(1, 0.01, stalled.set), mailboxes.open(ORGANIZATION) if kept else None)
    feed.tally.hold_id = uuid.uuid4()

    feed.say(0, "a", (1,))
    assert feed._stall_timer is None, "nothing waits"
    feed.say(0, "b", (2,))
    first = feed._stall_timer
    assert first is not None
    feed.grant(1)
    assert first.cancelled()
    assert feed._stall_timer is None, "nothing waits any more"
    feed.say(0, "c", (3,))
    async with asyncio.timeout(60):
        await stalled.wait()


async def test_who_needs_no_credit_or_is_away_is_not_waited_for() -> None:
    journal = Journal()
    mailboxes = Mailboxes(cast(UsageJournal, journal), bytes_max=10**9, bytes_per_request_max=10**9)
    for credit in (None, 0):
        receiver = Receiver(Outbox(cast(UsageJournal, journal)), "r", lambda _: None)
        feed = Feed(receiver, "m", FlowControl(credit, 60.0, lambda: None), mailboxes.open(ORGANIZATION))
        feed.tally.hold_id, journal.total = uuid.uuid4(), 0
        if credit is not None:
            feed.detach()
        for index in range(100):
            feed.say(0, "a", (index,))
        assert feed._stall_timer is None


def test_what_waits_behind_what_waits_is_told_in_order() -> None:
    def output(*words: str) -> WaitingOutput:
        waiting = WaitingOutput()
        for word in words:
            waiting.add(f"{word} ", (1, 2), (), [pb.ToolCallDelta(index=0, arguments_json=word)])
        return waiting

    first, later = output("a", "b", "c"), output("d", "e", "f")
    taken = [first.take(2), later.take(2)]
    first.append(later)
    while not first.empty:
        taken.append(first.take(3))

    assert "".join(text for text, _, _, _ in taken) == "a d b c e f "
    assert [call.arguments_json for _, _, _, calls in taken for call in calls] == ["a", "d", "b", "c", "e", "f"]
