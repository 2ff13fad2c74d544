"""Queue weights: bounds, the audit log, and the notice to running processes."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping

import pytest
from sqlalchemy import text

from metering.control.control_channel import ControlChannel
from metering.core.errors import InvalidValue, NotFound
from metering.store.db import Sessions
from metering.tenants.queue_weights import queue_weight, queue_weights, set_queue_weight
from tests.metering.test_control_channel import until
from tests.metering.usage import Customer


async def weigh(sessions: Sessions, weight_milli: int, organization: str = "acme") -> None:
    async with sessions.begin() as session:
        await set_queue_weight(
            session, organization=organization, weight_milli=weight_milli, actor="ann"
        )


@contextlib.asynccontextmanager
async def following(url: str) -> AsyncIterator[list[dict[uuid.UUID, int]]]:
    """Collect the weights that a process reads from its control channel."""
    read: list[dict[uuid.UUID, int]] = []

    def note(weights: Mapping[uuid.UUID, int]) -> None:
        read.append(dict(weights))

    channel = ControlChannel(
        url,
        uuid.uuid4(),
        "test:1",
        stop=lambda _: None,
        report=list,
        drain=lambda _: None,
        report_replicas=list,
    )
    channel.on_weights = note
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(channel.run())
        await until(lambda: read, "the first weights")
        yield read
        task.cancel()


async def test_each_change_is_in_the_audit_log_with_its_predecessor(
    sessions: Sessions, customer: Customer
) -> None:
    for weight_milli in (2000, 2000, 10, 100_000):
        await weigh(sessions, weight_milli)

    async with sessions() as session:
        query = text(
            "SELECT before, after FROM audit_log WHERE action = 'organization.queue_weight'"
            " ORDER BY id"
        )
        entries = (await session.execute(query)).all()
        assert await queue_weights(session) == {customer.organization_id: 100_000}
    changes = [
        (each.before["queue_weight_milli"], each.after["queue_weight_milli"]) for each in entries
    ]
    assert changes == [(1000, 2000), (2000, 10), (10, 100_000)]


@pytest.mark.parametrize("weight_milli", [-1, 0, 9, 100_001, 2**40])
async def test_a_weight_out_of_range_is_refused_by_name(
    sessions: Sessions, customer: Customer, weight_milli: int
) -> None:
    with pytest.raises(InvalidValue, match=r"queue_weight_milli.*between 10 and 100000"):
        await weigh(sessions, weight_milli)
    with pytest.raises(NotFound):
        await weigh(sessions, 1000, "nobody")

    async with sessions() as session:
        assert await queue_weight(session, customer.organization_id) == 1000


async def test_running_processes_read_the_weights_when_one_is_committed(
    database_url: str, sessions: Sessions, customer: Customer
) -> None:
    async with following(database_url) as read:
        await weigh(sessions, 2500)
        await until(lambda: read[-1] == {customer.organization_id: 2500}, "the new weight")

        with contextlib.suppress(ZeroDivisionError):
            async with sessions.begin() as session:
                await set_queue_weight(session, organization="acme", weight_milli=7000, actor="ann")
                raise ZeroDivisionError
        await weigh(sessions, 500)
        await until(lambda: read[-1] == {customer.organization_id: 500}, "the new weight")

    assert {7000} not in [set(each.values()) for each in read]
    assert len(read) == 3, "weights are read when they change, not at each poll"
