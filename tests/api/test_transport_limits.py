"""Limits of the transport: values at each bound pass, and values just beyond it fail."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import grpc
from grpc import StatusCode
from structlog.testing import capture_logs

from api.core.settings import Settings
from api.process import allow_open_files
from tests.api.bare_server import TIMEOUT_S, bare_server, check, connection

METADATA_BYTES = 4096
OVERHEAD_BYTES = 1024  # gRPC's own entries, and 32 bytes per entry


async def test_metadata_passes_to_the_bound_and_not_a_byte_beyond() -> None:
    """The bound includes gRPC's own entries: the test searches for it, and it is exact."""
    async with (
        bare_server(Settings.of(metadata_bytes_max=METADATA_BYTES)) as address,
        connection(address) as channel,
    ):

        async def passes(size: int) -> bool:
            code = await check(channel, (("x", "a" * size),))
            assert code in (StatusCode.OK, StatusCode.RESOURCE_EXHAUSTED)
            return code is StatusCode.OK

        most, least_refused = 0, METADATA_BYTES
        assert await passes(most)
        assert not await passes(least_refused)
        while least_refused - most > 1:
            middle = (most + least_refused) // 2
            most, least_refused = (
                (middle, least_refused) if await passes(middle) else (most, middle)
            )
        assert METADATA_BYTES - OVERHEAD_BYTES < most < METADATA_BYTES
        assert await passes(most), "the connection has borne it all"
        assert not await passes(most + 1)


async def wait_until_left(channel: grpc.aio.Channel) -> None:
    """Wait until the server has ended the connection."""
    async with asyncio.timeout(TIMEOUT_S):
        while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)


async def test_a_connection_without_calls_is_closed_and_opened_again_when_it_is_used() -> None:
    async with (
        bare_server(Settings.of(connection_idle_max_s=0.2)) as address,
        connection(address) as channel,
    ):
        assert await check(channel) is StatusCode.OK

        await wait_until_left(channel)

        assert await check(channel) is StatusCode.OK


async def test_an_old_connection_refuses_new_calls_and_its_running_ones_continue() -> None:
    """The watcher's stream is still open when the next call uses another connection."""
    async with (
        bare_server(Settings.of(connection_age_max_s=0.2)) as address,
        connection(address) as channel,
    ):
        watching: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watch = watching(b"")
        assert await watch.read() is not grpc.aio.EOF

        await wait_until_left(channel)

        assert await check(channel) is StatusCode.OK
        assert not watch.done()
        watch.cancel()


async def test_a_silent_connection_is_closed() -> None:
    async with bare_server(Settings.of(handshake_max_s=0.2)) as address:
        host, _, port = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(TIMEOUT_S):
            while await reader.read(1000):
                pass
        writer.close()


async def greeted(address: str) -> tuple[bool, asyncio.StreamWriter]:
    """Return whether the server speaks to a new connection, or closes it at once."""
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(TIMEOUT_S):
        try:
            return bool(await reader.read(1)), writer
        except ConnectionError:
            return False, writer


async def test_connections_are_limited_and_an_end_makes_room() -> None:
    async with bare_server(Settings.of(connections_max=3)) as address:
        there = [await greeted(address) for _ in range(3)]
        refused, lost = await greeted(address)
        lost.close()
        there[0][1].close()
        while not (again := await greeted(address))[0]:
            again[1].close()
        again[1].close()
        for _, writer in there:
            writer.close()

    assert [spoken_to for spoken_to, _ in there] == [True] * 3
    assert not refused


def test_a_process_may_open_as_many_files_as_its_connections_need() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
        with capture_logs() as logs:
            allow_open_files(Settings.of(connections_max=1000, http_connections_max=1000))
            raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            allow_open_files(Settings.of(connections_max=10, http_connections_max=10))
            kept = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            allow_open_files(Settings.of(connections_max=1_000_000, http_connections_max=1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert raised == kept == min(3000, hard)
    assert [line["event"] for line in logs] == ["open_files_too_few"] * (
        1 if hard >= 3000 else 2
    ) or hard > 2_001_000
