"""Memory of a thousand unread requests: some bytes per token, not a kilobyte per frame."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from api.generation.delivery.encoding import logprobs_field
from api.generation.delivery.output_buffer import FlowControl, OutputBuffer, SendBuffer
from api.generation.delivery.replay import ReplayBuffers
from api.generation.delivery.replayable_buffer import ReplayableBuffer
from api.generation.delivery.stream_writer import FrameSubscription, StreamWriter
from api.generation.state import EndDecision
from inference.engine import TokenLogprob, TokenLogprobs
from metering.holds.journal import UsageJournal
from tests.api.small_process import forget_all

ORGANIZATION = uuid.uuid4()
REQUEST_COUNT = 1000
# Each; the first tokens fill buffers that every request has.
TOKENS_AT_FIRST, TOKENS_THEN = 20, 100
BYTES_PER_TOKEN_MAX = 100  # arrays with their reserve; one object per token would need far more
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def live(writer: StreamWriter, credit: int | None, given_id: str = "r") -> SendBuffer:
    """Return the output of a request that is not kept."""
    subscription = FrameSubscription(writer, given_id, lambda _: None)
    output = SendBuffer(
        subscription, "m", FlowControl(credit, 60.0, lambda: None), EndDecision(), lambda _: None
    )
    output.hold_id = uuid.uuid4()
    return output


def begun(
    journal: UsageJournal, replays: ReplayBuffers[ReplayableBuffer], organization_id: uuid.UUID
) -> ReplayableBuffer:
    """Return kept output of a request without a subscriber."""
    subscription = FrameSubscription(StreamWriter(journal), "r", lambda _: None)
    flow, buffer = FlowControl(None, 60.0, lambda: None), replays.open(organization_id)
    output = ReplayableBuffer(subscription, "m", flow, EndDecision(), lambda _: None, 60.0, buffer)
    output.hold_id = uuid.uuid4()
    output.detach()
    return output


def append(outputs: Sequence[OutputBuffer], token_count: int) -> None:
    """Output this many steps of all requests."""
    for index in range(token_count):
        for output in outputs:
            output.usage.generated_token_count += 1
            output.append(0, " word", (index,))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells memory by Linux's /proc")
@pytest.mark.parametrize(
    "credit", [None, 0], ids=["nobody reads the stream", "nobody grants credit"]
)
async def test_stalled_requests_are_small(journal: UsageJournal, credit: int | None) -> None:
    writer = StreamWriter(journal)
    outputs = [live(writer, credit, str(uuid.uuid4())) for _ in range(REQUEST_COUNT)]

    append(outputs, TOKENS_AT_FIRST)
    before = resident_bytes()
    append(outputs, TOKENS_THEN)
    grown = resident_bytes() - before

    assert grown / (REQUEST_COUNT * TOKENS_THEN) < BYTES_PER_TOKEN_MAX
    assert sum(output.unsent_token_count for output in outputs) == REQUEST_COUNT * (
        TOKENS_AT_FIRST + TOKENS_THEN
    )
    for output in outputs:
        output.discard()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells memory by Linux's /proc")
async def test_waiting_log_probabilities_take_little_memory(journal: UsageJournal) -> None:
    """Twenty alternatives for each token took three kilobytes as objects."""
    alternatives = [TokenLogprob(100 + entry, -float(entry)) for entry in range(20)]
    reported = TokenLogprobs(alternatives[0], tuple(alternatives))
    output = live(StreamWriter(journal), 0)
    before = resident_bytes()

    for index in range(20_000):
        again = TokenLogprobs(
            reported.chosen,
            tuple(TokenLogprob(each.token_id, each.logprob) for each in reported.top),
        )
        output.append(0, " word", (index,), [again])
    grown = resident_bytes() - before

    assert grown / 20_000 < 2 * len(logprobs_field(reported))
    output.discard()


async def test_kept_output_stays_within_its_bounds(journal: UsageJournal) -> None:
    """The bounds are per request and in total, for any number of unread requests."""
    replays = ReplayBuffers[ReplayableBuffer](
        journal, bytes_max=200_000, bytes_per_request_max=20_000
    )
    outputs = [begun(journal, replays, ORGANIZATION) for _ in range(50)]

    append(outputs[:5], 1000)
    assert replays.byte_count <= 50 * replays.allowance(ORGANIZATION)
    append(outputs, 200)

    assert all(output.buffer.byte_count <= replays.allowance(ORGANIZATION) for output in outputs)
    assert replays.byte_count == sum(output.buffer.byte_count for output in outputs) <= 200_000
    assert outputs[0].usage.delivered_token_count == 1200, "dropped or not, it was delivered"


def answered(
    journal: UsageJournal,
    replays: ReplayBuffers[ReplayableBuffer],
    organization_id: uuid.UUID,
    token_count: int,
) -> tuple[uuid.UUID, uuid.UUID]:
    """Return the key of an ended request with this many tokens of kept output."""
    key = uuid.uuid4(), uuid.uuid4()
    output = begun(journal, replays, organization_id)
    append([output], token_count)
    output.end(None)
    replays.keep(key, output, 60.0)
    return key


async def test_answers_of_a_customer_evict_its_own(journal: UsageJournal) -> None:
    replays = ReplayBuffers[ReplayableBuffer](
        journal, bytes_max=65_536, bytes_per_request_max=65_536
    )
    victim, flooding = uuid.uuid4(), uuid.uuid4()
    theirs = answered(journal, replays, victim, 300)
    flood = [answered(journal, replays, flooding, 300) for _ in range(20)]
    running = [begun(journal, replays, flooding) for _ in range(5)]
    append(running, 300)

    there = [replays.find(key) is not None for key in flood]
    assert replays.find(theirs) is not None
    assert there == sorted(there)
    assert not there[0]
    assert replays.allowance(flooding) == 65_536 // 2 // 5
    assert replays.allowance(victim) == 65_536 // 2
    assert replays.byte_count <= 65_536
    for output in running:
        replays.close(output.buffer)
    forget_all(replays)  # and their timers
    assert replays.byte_count == replays.live_count == replays.ended_count == 0


async def test_an_organization_above_its_share_is_evicted(journal: UsageJournal) -> None:
    replays = ReplayBuffers[ReplayableBuffer](
        journal, bytes_max=65_536, bytes_per_request_max=65_536
    )
    first, later = uuid.uuid4(), uuid.uuid4()
    before = [answered(journal, replays, first, 100) for _ in range(12)]
    after = [answered(journal, replays, later, 100) for _ in range(4)]

    assert all(replays.find(key) is not None for key in after)
    kept = [replays.find(key) is not None for key in before]
    assert kept == sorted(kept)
    assert not all(kept)
    forget_all(replays)


async def test_requests_that_ended_first_are_dropped_first(journal: UsageJournal) -> None:
    replays = ReplayBuffers[ReplayableBuffer](
        journal, bytes_max=65_536, bytes_per_request_max=65_536
    )
    keys = [answered(journal, replays, ORGANIZATION, 300) for _ in range(5)]

    there = [replays.find(key) is not None for key in keys]
    assert there == sorted(there)
    assert not there[0]
    assert there[-1]
    assert replays.byte_count <= 65_536
    for key in keys:
        replays.forget(key)  # and its timers
    assert replays.byte_count == 0
