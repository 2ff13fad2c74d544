"""Clients of `bench.adversary`, in separate processes: the attacker, and a bystander with an
administrator.

    python -m bench.adversary_load attacker '{"target": …}' | bystander '{"target": …}'

Both print a line when they are ready, start when they read one, and print one JSON object at the
end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop
from weir.v1 import inference_service_pb2 as pb

from bench.adversary_attacks import (
    ATTACKS,
    AWAY_PAUSE_S,
    GENERATE,
    Target,
    connect,
    frames,
    http,
    run_attack,
    start_rest,
)

LONG_TOKENS, PROBE_TOKENS = 1500, 2
PROBE_PAUSE_S = 0.05
POLL_INTERVAL_S = 1.0
BEGIN_MAX_S = 30.0
ATTACKER_NICE = 10  # below the bystander, the database and the engine on their core
LIST_LIVE_REQUESTS = "/weir.v1.AdminService/ListLiveRequests"
LIST_API_KEYS = "/weir.v1.AdminService/ListApiKeys"


@dataclass(slots=True)
class Seen:
    """Measurements of bystander and administrator. A wait that has not ended counts until now."""

    gap_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    live_requests_ms: list[float] = field(default_factory=list)
    keys_ms: list[float] = field(default_factory=list)
    metrics_ms: list[float] = field(default_factory=list)
    livez_ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Bystander:
    """Customer with steady streams and short requests, and an administrator who polls."""

    def __init__(self, target: Target, admin_key: str, stream_count: int, probe_count: int) -> None:
        self._target = target
        self._admin_key = admin_key
        self._stream_count = stream_count
        self._probe_count = probe_count
        self._seen = Seen()
        self._measuring = False
        self._waits: dict[object, tuple[list[float], float]] = {}
        self._begun: set[int] = set()

    async def run(self, seconds: float) -> Seen:
        """Begin all streams, print that they are ready, and measure for `seconds`."""
        work: list[Callable[[], Awaitable[None]]] = [
            *[self._stream] * self._stream_count,
            *[self._probe] * self._probe_count,
            lambda: self._poll(LIST_LIVE_REQUESTS, self._seen.live_requests_ms),
            lambda: self._poll(LIST_API_KEYS, self._seen.keys_ms),
            self._scrape,
            self._check_health,
        ]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._again(each)) for each in work]
            begin_by = time.perf_counter() + BEGIN_MAX_S
            while len(self._begun) < self._stream_count and time.perf_counter() < begin_by:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            self._seen.errors.clear()
            self._measuring = True
            await asyncio.sleep(seconds)
            for times_ms, since in self._waits.values():
                times_ms.append((time.perf_counter() - since) * 1000)
            for task in running:
                task.cancel()
        return self._seen

    async def _again(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat the work after each error, and count the errors."""
        while True:
            try:
                await work()
            except (
                grpc.aio.AioRpcError,
                OSError,
                TimeoutError,
                asyncio.InvalidStateError,
            ) as error:
                text = (
                    f"{error.code().name}: {error.details()}"
                    if isinstance(error, grpc.aio.AioRpcError)
                    else repr(error)
                )
                self._seen.errors.append(text[:200])
                await asyncio.sleep(AWAY_PAUSE_S)

    @contextlib.contextmanager
    def _wait(self, times_ms: list[float]) -> Iterator[None]:
        """Measure the duration of the block and append it to `times_ms`."""
        wait, since = object(), time.perf_counter()
        self._waits[wait] = times_ms, since
        try:
            yield
            if self._measuring:
                times_ms.append((time.perf_counter() - since) * 1000)
        finally:
            del self._waits[wait]

    async def _stream(self) -> None:
        """Request long answers, one after the other."""
        worker, discarded = id(asyncio.current_task()), list[float]()
        async with connect(self._target) as channel:
            opened = self._open(channel)
            rest = start_rest(self._target, max_output_tokens=LONG_TOKENS, ignore_eos=True)
            while True:
                await opened.write(frames(rest))
                with self._wait(discarded):
                    ended = await self._next_token(opened)
                self._begun.add(worker)
                while not ended:
                    with self._wait(self._seen.gap_ms):
                        ended = await self._next_token(opened)

    async def _probe(self) -> None:
        """Request short answers, for the time to first token."""
        async with connect(self._target) as channel:
            opened = self._open(channel)
            rest = start_rest(self._target, max_output_tokens=PROBE_TOKENS, ignore_eos=True)
            while True:
                await asyncio.sleep(PROBE_PAUSE_S)
                await opened.write(frames(rest))
                with self._wait(self._seen.ttft_ms):
                    ended = await self._next_token(opened)
                while not ended:
                    ended = await self._next_token(opened)

    def _open(self, channel: grpc.aio.Channel) -> Any:
        # No serializers: bytes in both directions.
        open_stream: Any = channel.stream_stream(GENERATE)
        return open_stream(metadata=(("authorization", f"Bearer {self._target.key}"),))

    async def _next_token(self, opened: Any) -> bool:
        """Read until tokens arrive. Return whether the request has ended.

        Raises: AioRpcError or OSError if it failed.
        """
        while True:
            data = await opened.read()
            if data is grpc.aio.EOF:
                raise ConnectionError(
                    f"stream ended: {(await opened.code()).name} {await opened.details()}"
                )
            has_tokens = False
            for frame in pb.GenerateResponse.FromString(data).frames:
                has_tokens = has_tokens or bool(frame.delta.token_ids)
                if frame.HasField("failed"):
                    raise ConnectionError(f"request failed: {frame.failed.status.message}")
                if frame.HasField("finished"):
                    return True
            if has_tokens:
                return False

    async def _poll(self, path: str, times_ms: list[float]) -> None:
        """Make an administrator's call at regular intervals."""
        async with connect(self._target) as channel:
            make: Any = channel.unary_unary(path)
            while True:
                with self._wait(times_ms):
                    await make(
                        b"", metadata=(("authorization", f"Bearer {self._admin_key}"),), timeout=60
                    )
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _check_health(self) -> None:
        """Ask `/livez` on the client port at an interval, as an orchestrator does."""
        while True:
            with self._wait(self._seen.livez_ms):
                await http(self._target, "livez", "GET", "/livez")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _scrape(self) -> None:
        """Scrape the metrics at regular intervals."""
        while True:
            with self._wait(self._seen.metrics_ms):
                await http(
                    self._target, "scrape", "GET", "/metrics", port=self._target.metrics_port
                )
            await asyncio.sleep(POLL_INTERVAL_S)


async def attack(target: Target, kinds: list[str], seconds: float) -> None:
    """Build the payloads, report readiness, wait for a line, and run the attacks for `seconds`."""
    payloads = {kind: ATTACKS[kind].build(target) for kind in kinds}
    print("ready", flush=True)
    sys.stdin.readline()
    async with asyncio.TaskGroup() as tasks:
        for kind, payload in payloads.items():
            tasks.create_task(run_attack(target, kind, payload))
        await asyncio.sleep(seconds)
        print(json.dumps(target.answers), flush=True)
        os._exit(0)  # at once, like a killed client: ending thousands of calls would take long


def main() -> None:
    """Run the attacker or the bystander."""
    role, options = sys.argv[1], json.loads(sys.argv[2])
    target = Target(**options.pop("target"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if role == "attacker":
            os.nice(ATTACKER_NICE)
            runner.run(attack(target, options["kinds"], options["seconds"]))
        else:
            seconds = options.pop("seconds")
            print(
                json.dumps(
                    dataclasses.asdict(runner.run(Bystander(target, **options).run(seconds)))
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
