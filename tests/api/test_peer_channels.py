"""Connections to other processes: kept while used and for some time, and bounded in number."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from api.generation.request import peers as peer_channels
from api.generation.request.peers import Peer, PeerChannels, make_certificate
from tests.service import until

CERTIFICATE = make_certificate()[1].decode()


@contextlib.asynccontextmanager
async def open_channels(idle_s: float) -> AsyncIterator[PeerChannels]:
    """Yield channels that are closed at the end."""
    async with asyncio.TaskGroup() as tasks:
        channels = PeerChannels(tasks, idle_s=idle_s)
        yield channels
        await channels.close()
    assert len(channels) == 0


def peer(port: int) -> Peer:
    """Return a peer that need not exist."""
    return Peer(f"127.0.0.1:{port}", CERTIFICATE)


async def test_users_share_a_connection_and_later_users_find_it() -> None:
    async with open_channels(3600.0) as channels:
        with channels.use(peer(1)) as first, channels.use(peer(1)) as second:
            assert first is second
        with channels.use(peer(1)) as third:
            assert third is first
        assert len(channels) == 1


async def test_an_unused_connection_is_closed_and_a_used_one_is_not() -> None:
    async with open_channels(0.01) as channels:
        with channels.use(peer(1)) as used:
            with channels.use(peer(2)):
                pass
            await until(lambda: len(channels) == 1, "the other one to be closed")
            with channels.use(peer(1)) as again:
                assert again is used
        await until(lambda: len(channels) == 0, "it to be closed as well")
        with channels.use(peer(1)) as anew:
            assert anew is not used


async def test_a_restarting_peer_leaves_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_channels, "IDLE_COUNT_MAX", 3)
    async with open_channels(3600.0) as channels:
        for port in range(1, 10):
            with channels.use(peer(port)):
                pass
        assert len(channels) == 3
        with channels.use(peer(9)) as latest, channels.use(peer(1)), channels.use(peer(9)) as same:
            assert latest is same
