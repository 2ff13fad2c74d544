"""Who receives a request while it runs: streams come and go, and only the one that receives it has a say."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.generation.attendance import Attendance
from api.generation.feed import Feed, FlowControl
from api.generation.life import Life
from api.generation.mailbox import Mailboxes
from api.generation.outbox import Outbox
from api.generation.receiver import Receiver
from metering.core.errors import RequestInFlight
from metering.core.models import Outcome
from metering.holds.journal import UsageJournal


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[UsageJournal]:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    yield journal
    journal.close()


ORGANIZATION = uuid.uuid4()


class World:
    """A request that nothing runs."""

    def __init__(self, journal: UsageJournal, keep_s: float | None) -> None:
        self.journal = journal
        self.stopped: list[Outcome] = []
        self.life = Life(lambda end: self.stopped.append(end.outcome))
        self.ended: list[Receiver] = []
        self.first = self.receiver()
        mailboxes = Mailboxes(journal, bytes_max=10**6, bytes_per_request_max=10**6)
        mailbox = None if keep_s is None else mailboxes.open(ORGANIZATION)
        self.feed = Feed(self.first, "m", FlowControl(None, 60.0, lambda: None), mailbox)
        self.feed.tally.hold_id = uuid.uuid4()
        self.attendance = Attendance(self.feed, keep_s, self.life, lambda _: None)

    def receiver(self) -> Receiver:
        """Of one more stream."""
        return Receiver(Outbox(self.journal), "r", self.ended.append)


async def test_without_keep_the_request_ends_with_the_stream_that_receives_it(journal: UsageJournal) -> None:
    world = World(journal, None)

    world.attendance.leave(world.first, Outcome.DEADLINE)

    assert world.stopped == [Outcome.DEADLINE]


async def test_a_stream_that_received_it_before_has_no_say_in_it(journal: UsageJournal) -> None:
    """Each stream leaves more than once, and another one may have come in between."""
    world = World(journal, None)
    second = world.receiver()
    world.attendance.attach(second, 0, 0)

    world.attendance.leave(world.first, Outcome.CANCELLED)

    assert world.ended == [world.first]
    assert world.stopped == []
    assert world.feed.receiver is second


async def test_whoever_comes_back_in_time_finds_it_running_for_as_long_as_it_takes(journal: UsageJournal) -> None:
    world = World(journal, 3600.0)
    world.attendance.leave(world.first, Outcome.CANCELLED)
    timer = world.attendance._unattended
    assert timer is not None
    assert not timer.cancelled()
    assert world.feed.receiver is None

    second = world.receiver()
    world.attendance.attach(second, 0, 0)
    world.attendance.leave(world.first, Outcome.CANCELLED)

    assert timer.cancelled()
    assert world.attendance._unattended is None
    assert world.feed.receiver is second
    assert second.source is world.attendance
    assert world.stopped == []
    world.attendance.ended()
    assert second.source is world.feed


async def test_a_request_that_is_being_ended_is_no_ones_to_take_over_unless_it_is_kept(journal: UsageJournal) -> None:
    plain, kept = World(journal, None), World(journal, 3600.0)
    for world in (plain, kept):
        world.life.stop(Outcome.CANCELLED)

    with pytest.raises(RequestInFlight):
        plain.attendance.attach(plain.receiver(), 0, 0)
    second = kept.receiver()
    kept.attendance.attach(second, 0, 0)

    assert plain.feed.receiver is plain.first
    assert kept.feed.receiver is second
