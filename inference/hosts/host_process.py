"""The parent's end of an engine host: which kinds there are, what is said over the socket, the environment it needs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from inference.hosts.backend_life import LifeWaits
from inference.hosts.child_process import ChildProcess, open_child
from inference.hosts.host_protocol import ToHost, ToParent, decode_to_parent, encode

# Settings of the C library, read before main: they cannot be made inside the child. Each can be overridden from outside.
CHILD_ENVIRONMENT = {
    # Keep freed memory. Otherwise every large temporary is mapped afresh, and touching its pages costs more than computing:
    # decode attention at batch 50 takes 21 ms per layer instead of 5, the reference workload 25 s instead of 10.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    # Threads sleep at the end of a parallel loop. Spinning is faster on an idle machine (427 tokens/s alone, not 270), but as soon
    # as anything else runs, and the API process always does, a spinning thread waits for one that was taken off its core: measured
    # 5 tokens/s.
    "OMP_WAIT_POLICY": "PASSIVE",
}


class HostWaits(LifeWaits, Protocol):
    """How long what may take, in seconds; part of every such backend's settings."""

    @property
    def load_timeout_s(self) -> float:
        """From the child's start until it takes sequences."""

    @property
    def step_timeout_s(self) -> float:
        """Without a report while sequences run: the host hangs, and is killed."""


class HostOpener(Protocol):
    """Where hosts come from."""

    def __call__(self, module: str, environment: Mapping[str, str]) -> AbstractAsyncContextManager[HostProcess]:
        """See `open_host`."""


class HostProcess(ChildProcess):
    """One running engine host. Made by `open_host`."""

    def send(self, message: ToHost) -> None:
        """Queue a message; never blocks. What is buffered is bounded by the sequences that the engine takes."""
        self.write(encode(message))

    async def receive(self) -> ToParent | None:
        """The child's next message; None when it is gone. Raises `ProtocolBroken`."""
        body = await self.read()
        return None if body is None else decode_to_parent(body)


@contextlib.asynccontextmanager
async def open_host(module: str, environment: Mapping[str, str]) -> AsyncIterator[HostProcess]:
    """Start an engine host; on leaving it is dead and reaped."""
    async with open_child(HostProcess, module, environment) as host:
        yield host


@dataclass(frozen=True, slots=True)
class HostKind:
    """What sets one backend apart: the module that is run and the environment it needs, its first message, the tokens of a block of
    its prefix cache, if it has one, and where its processes come from.
    """

    module: str
    environment: Mapping[str, str]
    load: ToHost
    block_tokens: int = 1
    opener: HostOpener = open_host
