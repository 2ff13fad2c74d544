"""Relay whose other process and database have both failed."""

from __future__ import annotations

import asyncio
import socket
import uuid
from types import SimpleNamespace
from typing import Any, cast

from grpc import StatusCode
from sqlalchemy.exc import OperationalError
from weir.v1 import inference_service_pb2 as pb

from api.generation.delivery.stream_writer import FrameSubscription, StreamWriter
from api.generation.request.peers import make_certificate
from api.generation.request.relay import FRAMES_UNWRITTEN_MAX, Relays
from metering.holds.journal import UsageJournal
from metering.store.db import Sessions

UNAVAILABLE = StatusCode.UNAVAILABLE.value[0]


class UnavailableDatabase:
    """Session that finds the owner once, and then fails to reach the database."""

    def __init__(self, owner: SimpleNamespace) -> None:
        self._owner = owner
        self.call_count = 0

    def __call__(self) -> UnavailableDatabase:
        return self

    async def __aenter__(self) -> UnavailableDatabase:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def execute(self, *_: object) -> SimpleNamespace:
        """Return the owner's row. Raises: OperationalError from the second time on."""
        self.call_count += 1
        if self.call_count > 1:
            raise OperationalError("select", {}, ConnectionRefusedError("the database is away"))
        return SimpleNamespace(one_or_none=lambda: self._owner)


async def test_losing_owner_and_database_ends_the_request_alone() -> None:
    with socket.socket() as taken:  # bound but not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        certificate = make_certificate()[1].decode()
        database = UnavailableDatabase(
            SimpleNamespace(
                process_id=uuid.uuid4(), is_held=True, address=address, certificate=certificate
            )
        )
        writer, ended = StreamWriter(cast(UsageJournal, None)), asyncio.Event()
        reported: list[pb.ServerFrame] = []
        subscription = FrameSubscription(writer, "id", lambda _: ended.set())
        cast(Any, subscription).push = reported.append
        async with asyncio.TaskGroup() as process_tasks:
            relays = Relays(cast(Sessions, database), uuid.uuid4(), process_tasks)
            key = uuid.uuid4(), uuid.uuid4()
            relays.begin(subscription, key, "secret", after_seq=0, credit_token_count=0)
            async with asyncio.timeout(60):
                await ended.wait()
            await relays.close()
    assert database.call_count == 2
    assert [frame.failed.status.code for frame in reported] == [UNAVAILABLE]


async def test_a_client_that_says_more_than_the_other_process_reads_is_ended() -> None:
    """Otherwise its messages would be buffered here without bound."""
    owner = SimpleNamespace(process_id=uuid.uuid4(), is_held=True, address="", certificate="")
    writer, ended = StreamWriter(cast(UsageJournal, None)), asyncio.Event()
    reported: list[pb.ServerFrame] = []
    subscription = FrameSubscription(writer, "id", lambda _: ended.set())
    cast(Any, subscription).push = reported.append
    async with asyncio.TaskGroup() as process_tasks:
        relays = Relays(cast(Sessions, UnavailableDatabase(owner)), uuid.uuid4(), process_tasks)
        key = uuid.uuid4(), uuid.uuid4()
        relays.begin(subscription, key, "secret", after_seq=0, credit_token_count=0)
        for _ in range(FRAMES_UNWRITTEN_MAX):
            assert not ended.is_set()
            subscription.source.update(pb.UpdateFrame(max_output_tokens=1))
        assert ended.is_set()
        assert relays.running_count == 0
        await relays.close()
    assert [frame.failed.status.code for frame in reported] == [UNAVAILABLE]


async def test_a_client_relayed_through_an_ending_process_gets_the_reason() -> None:
    owner = SimpleNamespace(process_id=uuid.uuid4(), is_held=True, address="", certificate="")
    reported: list[pb.ServerFrame] = []
    subscription = FrameSubscription(StreamWriter(cast(UsageJournal, None)), "id", lambda _: None)
    cast(Any, subscription).push = reported.append
    async with asyncio.TaskGroup() as process_tasks:
        relays = Relays(cast(Sessions, UnavailableDatabase(owner)), uuid.uuid4(), process_tasks)
        key = uuid.uuid4(), uuid.uuid4()
        relays.begin(subscription, key, "secret", after_seq=0, credit_token_count=0)
        await relays.close()
    assert [frame.failed.status.code for frame in reported] == [UNAVAILABLE]
