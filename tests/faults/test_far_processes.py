"""Api processes on machines that are far from each other and from the database: 50 ms from one to
another, and 1 % of the packets lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from metering.core.models import QuotaDimension
from tests.far_machines import GATEWAY, FarService, Machine, permitted_machines
from tests.metering.cutting_proxy import CuttingProxy
from tests.metering.invariants import check_invariants
from tests.service import Service, attach, credit, until

pytestmark = pytest.mark.faults

DELAY_S, LOSS, SEED = 0.05, 0.01, 36
REQUEST_COUNT, TOKENS = 12, 150
KEEP = {"seconds": 60}


@pytest.fixture
def far_machines() -> Iterator[list[Machine]]:
    """Yield two machines."""
    with permitted_machines(2, DELAY_S, LOSS, SEED) as found:
        yield found


@pytest_asyncio.fixture
async def services(
    far_machines: list[Machine], database_url: str, model: Path, tmp_path: Path
) -> AsyncIterator[Sequence[Service]]:
    """Yield an api process on each machine, started at once."""
    proxy = CuttingProxy(database_url, GATEWAY)
    async with proxy.listening(), AsyncExitStack() as stack:
        found = [
            FarService(machine, proxy.url, tmp_path / f"home{index}", database_url, model)
            for index, machine in enumerate(far_machines)
        ]
        for service in found:
            service.spawn()
        for service in found:
            await until(lambda: service._endpoint(), "the api process to listen")  # noqa: B023
            service.address = service._endpoint() or ""
            stack.push_async_callback(asyncio.to_thread, service.stop)
            await asyncio.to_thread(service.wait_serving)
        yield found


async def test_streams_limits_and_bills_are_exact_across_a_bad_network(
    services: Sequence[Service],
) -> None:
    near, far = services
    limit = REQUEST_COUNT // 2 * TOKENS
    tenant = await near.tenant({QuotaDimension.OUTPUT_TOKENS_PER_MONTH: limit})

    async with near.stream(tenant.secret) as first, far.stream(tenant.secret) as second:
        # A stream moves in the middle to the other process, which relays it.
        moving = await first.begin(
            max_output_tokens=TOKENS, initial_credit_tokens=10, keep_on_disconnect=KEEP
        )
        await first.received(moving, 10)
        await second.send(attach(moving), credit(moving, TOKENS))
        finished = await second.finished(moving)
        assert len(second.token_ids(moving)) == finished.usage.delivered_token_count == TOKENS

        # Both processes admit at once, and neither admits too much.
        streams = [first, second] * (REQUEST_COUNT // 2)
        ids = [await stream.begin(max_output_tokens=TOKENS) for stream in streams]
        ends = [await stream.end(each) for stream, each in zip(streams, ids, strict=True)]

    refused = [each for each in ends if each.HasField("failed")]
    reported = TOKENS + sum(each.finished.usage.delivered_token_count for each in ends)
    assert refused
    assert all(b"QUOTA_EXCEEDED" in each.SerializeToString() for each in refused)
    assert limit - TOKENS < reported <= limit
    await near.no_hold_left(tenant)
    assert sum(near.database.delivered(tenant).values()) == reported
    check_invariants(near.database_url, all_ended=True)
