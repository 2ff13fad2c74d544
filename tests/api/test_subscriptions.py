"""Subscriptions to a running request: streams attach and detach; only one has control."""

from __future__ import annotations

import uuid

import pytest

from api.generation.delivery.output_buffer import FlowControl, OutputBuffer, SendBuffer
from api.generation.delivery.replay import ReplayBuffers
from api.generation.delivery.replayable_buffer import ReplayableBuffer
from api.generation.delivery.stream_writer import FrameSubscription, StreamWriter, Subscription
from api.generation.state import EndDecision
from metering.core.errors import RequestInFlight
from metering.core.models import Outcome
from metering.holds.journal import UsageJournal

ORGANIZATION = uuid.uuid4()


class World:
    """Request without an engine."""

    def __init__(self, journal: UsageJournal, keep_s: float | None) -> None:
        self.journal = journal
        self.stopped: list[Outcome] = []
        self.request_state = EndDecision(lambda end: self.stopped.append(end.outcome))
        self.ended: list[Subscription] = []
        self.first = self.subscription()
        flow, update = FlowControl(None, 60.0, lambda: None), lambda _: None
        self.output: OutputBuffer = SendBuffer(self.first, "m", flow, self.request_state, update)
        if keep_s is not None:
            buffer = ReplayBuffers[ReplayableBuffer](
                journal, bytes_max=10**6, bytes_per_request_max=10**6
            ).open(ORGANIZATION)
            self.output = ReplayableBuffer(
                self.first, "m", flow, self.request_state, update, keep_s, buffer
            )
        self.output.hold_id = uuid.uuid4()

    def subscription(self) -> FrameSubscription:
        """Return the subscription of a new stream."""
        return FrameSubscription(StreamWriter(self.journal), "r", self.ended.append)


async def test_without_keep_a_request_ends_with_its_stream(journal: UsageJournal) -> None:
    world = World(journal, None)

    world.output.leave(world.first, Outcome.DEADLINE)

    assert world.stopped == [Outcome.DEADLINE]


async def test_a_stream_that_received_it_before_has_no_say_in_it(journal: UsageJournal) -> None:
    """Each stream leaves more than once, and another one may have attached in between."""
    world = World(journal, None)
    second = world.subscription()
    world.output.attach(second, 0, 0)

    world.output.leave(world.first, Outcome.CANCELLED)

    assert world.ended == [world.first]
    assert world.stopped == []
    assert world.output.subscription is second


async def test_a_client_that_returns_in_time_continues(journal: UsageJournal) -> None:
    world = World(journal, 3600.0)
    world.output.leave(world.first, Outcome.CANCELLED)
    timer = world.output._unattended
    assert timer is not None
    assert not timer.cancelled()
    assert world.output.subscription is None

    second = world.subscription()
    world.output.attach(second, 0, 0)
    world.output.leave(world.first, Outcome.CANCELLED)

    assert timer.cancelled()
    assert world.output._unattended is None
    assert world.output.subscription is second
    assert second.source is world.output
    assert world.stopped == []
    world.output.end(None)
    assert second.source is world.output
    assert world.ended == [second]


async def test_an_ending_request_is_attached_only_if_kept(journal: UsageJournal) -> None:
    plain, kept = World(journal, None), World(journal, 3600.0)
    for world in (plain, kept):
        world.request_state.stop(Outcome.CANCELLED)

    with pytest.raises(RequestInFlight):
        plain.output.attach(plain.subscription(), 0, 0)
    second = kept.subscription()
    kept.output.attach(second, 0, 0)

    assert plain.output.subscription is plain.first
    assert kept.output.subscription is second
