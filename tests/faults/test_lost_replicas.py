"""An engine worker dies under load while another serves the same model: no stream is affected."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core.settings import bundled_models
from metering.core.models import QuotaDimension
from tests.faults.billed import check_ledger, rate
from tests.faults.conftest import Start
from tests.forked_workers import children_of
from tests.metering.invariants import check_invariants
from tests.service import MODEL, PLAIN_IDS, Stream, cost_picos, picos, start, wait_for

pytestmark = pytest.mark.faults

LIMITS = {QuotaDimension.TOKENS_PER_MONTH: 10**9, QuotaDimension.CONCURRENT_REQUESTS: 10_000}
LONG, SHORT = 250, 20  # output tokens of requests begun before the kill, and of the others
PROMPTS = [[*PLAIN_IDS[index : index + 30]] for index in range(10)]


def fleet_file(path: Path, model: Path, replicas: int = 2) -> str:
    """Write a fleet file that serves the tests' model on several workers; return its path."""
    path.mkdir(parents=True, exist_ok=True)
    file = path / "fleet.yaml"
    of_model = (
        f"directory: {model}, replicas: {{min: {replicas}, max: {replicas}}}, recovery_wait_s: 60,"
        " policy: round_robin"
    )
    file.write_text(f"models: {{{MODEL}: {{{of_model}}}}}")
    return str(file)


def requests(output_tokens: int) -> list[pb.ClientFrame]:
    """Return fifty requests with ten different prompts."""
    return [
        start(prompt=PROMPTS[index % len(PROMPTS)], max_output_tokens=output_tokens)
        for index in range(50)
    ]


async def answers(stream: Stream, output_tokens: int) -> list[list[int]]:
    """Return the output of each prompt without a fault."""
    starts = [start(prompt=prompt, max_output_tokens=output_tokens) for prompt in PROMPTS]
    await stream.send(*starts)
    for frame in starts:
        await stream.finished(frame.request_id)
    return [stream.token_ids(frame.request_id) for frame in starts]


async def check_whole(
    stream: Stream, starts: Sequence[pb.ClientFrame], expected: Sequence[list[int]]
) -> int:
    """Check that each stream ended with the expected output; return the number of migrations."""
    migration_count = 0
    for index, frame in enumerate(starts):
        finished = await stream.finished(frame.request_id)
        deltas = stream.of(frame.request_id, "delta")
        assert stream.token_ids(frame.request_id) == expected[index % len(PROMPTS)]
        assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
        assert len(stream.of(frame.request_id, "admitted")) == 1
        assert len(stream.ends(frame.request_id)) == 1
        assert finished.reason == types_pb2.FINISH_REASON_LENGTH
        usage, count = finished.usage, frame.start.max_output_tokens
        assert (
            usage.generated_token_count,
            usage.delivered_token_count,
            usage.billed_token_count,
        ) == (count, count, count)
        assert usage.input_token_count == len(PROMPTS[0])
        assert picos(finished.cost) == cost_picos(usage)
        migration_count += finished.migration_count
    return migration_count


async def test_no_stream_notices_a_killed_worker(
    launch: Start, model: Path, tmp_path: Path
) -> None:
    """A hundred streams on two workers; one is killed when half of the streams have tokens."""
    service = launch(fleet=fleet_file(tmp_path / "fleet", model), models=bundled_models())
    tenant = await service.tenant(LIMITS)
    workers = wait_for(
        lambda: found if len(found := children_of(service.pid)) == 2 else None,
        "both workers to start",
    )
    wait_for(lambda: service.log.count("loaded ") >= 2, "both workers to load")
    async with service.stream(tenant.secret) as stream:
        begun, waiting = requests(LONG), requests(SHORT)
        await stream.send(*begun)
        for frame in begun:
            await stream.received(frame.request_id, 3)
        os.kill(workers[0], signal.SIGSTOP)  # later requests have no token when it dies
        await stream.send(*waiting)
        for frame in waiting:
            await stream.first(frame.request_id, "admitted")
        unbegun_count = sum(not stream.token_ids(frame.request_id) for frame in waiting)

        os.kill(workers[0], signal.SIGKILL)

        for frame in (*begun, *waiting):
            await stream.finished(frame.request_id)
        migration_count = await check_whole(stream, begun, await answers(stream, LONG))
        assert await check_whole(stream, waiting, await answers(stream, SHORT)) == 0
        async with service.client(tenant.secret) as client:
            recorded = [await client.get_generation(frame.request_id) for frame in begun]
    assert sum(each.migration_count for each in recorded) == migration_count, (
        "and so it stays in the books"
    )
    assert migration_count <= 25, (
        "half of what ran was on the worker that died; where workers are fast, it had ended by then"
    )
    assert unbegun_count >= 25, (
        "half of what came was given to the worker that stood still, or waited behind that"
    )
    assert service.database.holds(tenant) == {"settled": 120}
    delivered = service.database.delivered(tenant)
    assert {
        str(each.request_id): each.start.max_output_tokens for each in (*begun, *waiting)
    }.items() <= delivered.items()
    events = service.database.events(tenant)
    assert (len(events), sum(event["migration_count"] for event in events)) == (
        120,
        migration_count,
    ), "and it is recorded"
    check_invariants(service.database_url, all_ended=True)
    await rate(service)
    check_ledger(service)
