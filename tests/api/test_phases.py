"""Phases of a request, and the decision how it ends."""

from __future__ import annotations

import asyncio
import uuid
from types import SimpleNamespace
from typing import Any, cast

import pytest
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import Cause, Draining
from api.core.settings import Settings
from api.generation.delivery.stream_writer import FrameSubscription, StreamWriter
from api.generation.parsing.start_frame import parse_start
from api.generation.request.caller import Caller
from api.generation.request.live_request import LiveRequest
from api.generation.request.phases import NEXT, PHASE_NAMES, Ended, Phase, Preparing
from api.generation.state import EndDecision, Interruptible, Stopped, error_before_hold
from inference.errors import EngineFailed
from metering.core.models import Outcome
from metering.quotas.quota_rules import Payer

LOST = EngineFailed("lost")
DRAINING = Draining("shutting down")


def concrete(kind: type[Phase]) -> set[type[Phase]]:
    """Return the phases below a class that have none below them, or are moved to."""
    moved_to = {phase for phases in NEXT.values() for phase in phases}
    below = {each for sub in kind.__subclasses__() for each in {sub, *concrete(sub)}}
    return {each for each in below if each in NEXT or each in moved_to or not each.__subclasses__()}


def test_every_phase_has_a_row_in_the_table_and_a_name_in_metrics() -> None:
    assert concrete(Phase) == set(NEXT)
    assert {phase.name for phase in NEXT} == set(PHASE_NAMES)


@pytest.mark.parametrize("phase", NEXT, ids=lambda phase: phase.__name__)
def test_every_phase_leads_to_the_end(phase: type[Phase]) -> None:
    reached, before = {phase}, set[type[Phase]]()
    while reached != before:
        before = reached
        reached = reached | {after for each in reached for after in NEXT[each]}

    assert Ended in reached


@pytest.mark.parametrize("phase", NEXT, ids=lambda phase: phase.__name__)
def test_a_phase_without_more_output_is_followed_by_such_phases_only(phase: type[Phase]) -> None:
    assert all(after.is_over for after in NEXT[phase]) or not phase.is_over


def live_request() -> LiveRequest:
    """Return a request that was just received."""
    payer = Payer(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "USD")
    start = parse_start(str(uuid.uuid4()), pb.StartFrame(model="tiny", text="x"))
    subscription = FrameSubscription(StreamWriter(cast(Any, None)), start.given_id, lambda _: None)
    registry = cast(Any, SimpleNamespace(settings=Settings()))
    return LiveRequest(Caller(payer, 0.0, 0.0), start, registry, subscription)


def test_a_request_that_has_ended_enters_no_other_phase() -> None:
    request = live_request()
    request.phase = Ended(Cause.CLIENT)

    with pytest.raises(AssertionError, match="does not follow"):
        request.phase = Preparing(cast(Any, None))


@pytest.mark.parametrize(
    ("stop", "result", "stored", "end"),
    [
        (None, Outcome.LENGTH, Outcome.LENGTH, Outcome.LENGTH),
        (None, LOST, None, LOST),
        ((Outcome.CANCELLED, None), Outcome.CANCELLED, Outcome.CANCELLED, Outcome.CANCELLED),
        ((Outcome.SLOW_CONSUMER, None), Outcome.STOP, Outcome.SLOW_CONSUMER, Outcome.SLOW_CONSUMER),
        ((Outcome.DEADLINE, None), Stopped(), Outcome.DEADLINE, Outcome.DEADLINE),
        # A stop with an error keeps its outcome, unless it is a failure.
        ((Outcome.CANCELLED, DRAINING), Outcome.CANCELLED, Outcome.CANCELLED, DRAINING),
        ((Outcome.FAILED, DRAINING), Outcome.CANCELLED, None, DRAINING),
        ((Outcome.FILTERED, None), LOST, None, LOST),
    ],
)
def test_a_failure_decides_alone_and_a_stop_decides_over_the_engine(
    stop: tuple[Outcome, Exception | None] | None,
    result: Outcome | Exception,
    stored: Outcome | None,
    end: Outcome | Exception,
) -> None:
    decision = EndDecision()
    if stop is not None:
        decision.stop(*stop)

    assert decision.close(result) == (stored, end)


def test_an_engine_that_is_closed_under_a_request_has_failed() -> None:
    stored, end = EndDecision().close(Outcome.CANCELLED)

    assert stored is None
    assert isinstance(end, EngineFailed)


def test_the_first_stop_decides_and_none_does_after_the_end() -> None:
    stopped: list[Outcome] = []
    decision = EndDecision(lambda end: stopped.append(end.outcome))

    decision.stop(Outcome.DEADLINE)
    decision.stop(Outcome.CANCELLED)
    late = EndDecision(lambda end: stopped.append(end.outcome))
    late.close(Outcome.STOP)
    late.stop(Outcome.CANCELLED)

    assert stopped == [Outcome.DEADLINE]
    assert late.end is None


async def test_a_stop_interrupts_the_wait_for_an_engine_with_the_error_of_the_request() -> None:
    decision = EndDecision()
    asyncio.get_running_loop().call_soon(decision.stop, Outcome.CANCELLED, DRAINING)

    with pytest.raises(Draining), Interruptible(decision, error_before_hold):
        await asyncio.Event().wait()
