"""Channels to the addresses of a client, used in turn.

A channel without a connection gets no calls while another one has one. So a call goes to the next
server when one is lost, and the first call to the server that answers first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

# gRPC uses all addresses of a name in turn, too, and connects to each at once.
ROUND_ROBIN = ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}')
READY = grpc.ChannelConnectivity.READY
FAILED = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)


class BalancedChannel:
    """Channel over several others, with the methods of `grpc.aio.Channel` that stubs call."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._channels = channels
        self._last = -1

    async def connected(self) -> None:
        """Wait until a call can be made: one channel is connected, or none can connect."""
        if len(self._channels) == 1:
            return  # gRPC waits itself
        while True:
            states = [channel.get_state(try_to_connect=True) for channel in self._channels]
            if READY in states or all(state in FAILED for state in states):
                return
            async with asyncio.TaskGroup() as tasks:
                changes = [
                    tasks.create_task(changed(channel, state))
                    for channel, state in zip(self._channels, states, strict=True)
                ]
                await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
                for change in changes:
                    change.cancel()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """Return a call with one response on the next channel."""
        return self._balanced([c.unary_unary(*arguments, **options) for c in self._channels])

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """Return a call with streamed responses on the next channel."""
        return self._balanced([c.unary_stream(*arguments, **options) for c in self._channels])

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """Return a call with streamed requests on the next channel."""
        return self._balanced([c.stream_unary(*arguments, **options) for c in self._channels])

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """Return a call with streams in both directions on the next channel."""
        return self._balanced([c.stream_stream(*arguments, **options) for c in self._channels])

    async def close(self) -> None:
        """Close all channels."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def _balanced(self, calls: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        if len(calls) == 1:
            return calls[0]
        return lambda *arguments, **options: calls[self._next()](*arguments, **options)

    def _next(self) -> int:
        """Choose the next channel that is connected; without one, the next that has not failed."""
        count = len(self._channels)
        order = [(self._last + 1 + step) % count for step in range(count)]
        states = [self._channels[index].get_state(try_to_connect=True) for index in order]
        rank = [0 if state is READY else 2 if state in FAILED else 1 for state in states]
        self._last = order[rank.index(min(rank))]
        return self._last


async def changed(channel: grpc.aio.Channel, state: grpc.ChannelConnectivity) -> None:
    """Wait until the state of a channel changes, or the channel is closed."""
    with contextlib.suppress(grpc.aio.UsageError):
        await channel.wait_for_state_change(state)
