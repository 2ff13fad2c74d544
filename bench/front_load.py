"""Both ends of the wire for `bench.front`, in separate processes.

A client writes whole requests as bytes; a server answers the same frames without a backend.

    python -m bench.front_load client '{"address": …}' | echo

The SDK would dominate the measurement, since it does a caller's work for each request; this client
only counts.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from bench.streams_load import METHOD, run_end

UUID_CHARS = 36
# Stages of a request before the engine's batch.
STAGES = ("auth", "tokenize", "admission", "queue", "cold_start")


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a client: one stream for each of `api_keys`, each with `outstanding_count` requests.

    `rate_per_s` asks for random arrivals on all streams together instead; 0 for none.
    """

    address: str
    model: str
    prompt: str
    api_keys: list[str]
    outstanding_count: int
    rate_per_s: float
    warm_up_s: float
    seconds: float


@dataclass(slots=True)
class Seen:
    """Measurements of a run after its warm-up, in ms by request.

    `stages` are the server's, by name. `request_count_total` includes the warm-up.
    """

    request_count: int = 0
    request_count_total: int = 0
    failures: list[str] = field(default_factory=list)
    stages_ms: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES})
    admitted_ms: list[float] = field(default_factory=list)
    finished_ms: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0


class RequestMaker:
    """Builder of start frames as bytes, which differ only in their request id."""

    def __init__(self, model: str, prompt: str) -> None:
        start = pb.StartFrame(model=model, text=prompt, max_output_tokens=1, ignore_eos=True)
        message = pb.GenerateRequest(
            frames=[pb.ClientFrame(request_id="x" * UUID_CHARS, start=start)]
        )
        self._head, _, self._tail = message.SerializeToString().partition(b"x" * UUID_CHARS)

    def make(self, count: int, sent_at: dict[str, float]) -> bytes:
        """Build a message with this many start frames, and record their ids."""
        now, parts = time.perf_counter(), []
        for _ in range(count):
            request_id = str(uuid.uuid4())
            sent_at[request_id] = now
            parts.append(self._head + request_id.encode() + self._tail)
        return b"".join(parts)  # repeated fields of concatenated messages are merged


class Client:
    """gRPC client that holds all streams of one run."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._maker = RequestMaker(load.model, load.prompt)
        self._seen = Seen()
        self._counting = False
        self._random = random.Random(0)

    async def run(self) -> Seen:
        """Load the server for the given time and return the measurements."""
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(self._stream(key)) for key in self._load.api_keys]
            await asyncio.sleep(self._load.warm_up_s)
            self._counting, begin, cpu = True, time.perf_counter(), time.process_time()
            await asyncio.sleep(self._load.seconds)
            self._counting = False
            self._seen.wall_s, self._seen.cpu_s = (
                time.perf_counter() - begin,
                time.process_time() - cpu,
            )
            for stream in streams:
                stream.cancel()
        return self._seen

    async def _stream(self, key: str) -> None:
        async with grpc.aio.insecure_channel(
            self._load.address, (("grpc.use_local_subchannel_pool", 1),)
        ) as channel:
            # No serializers: bytes in both directions.
            open_stream: Any = channel.stream_stream(METHOD)
            call = open_stream(metadata=(("authorization", f"Bearer {key}"),))
            sent_at: dict[str, float] = {}
            async with asyncio.TaskGroup() as tasks:
                if self._load.rate_per_s:
                    tasks.create_task(self._arrive(call, sent_at))
                else:
                    await call.write(self._maker.make(self._load.outstanding_count, sent_at))
                while (data := await call.read()) is not grpc.aio.EOF:
                    ended_count = self._take(pb.GenerateResponse.FromString(data), sent_at)
                    if ended_count and not self._load.rate_per_s:
                        await call.write(self._maker.make(ended_count, sent_at))
                raise ConnectionError(f"the stream ended: {await call.details()}")

    async def _arrive(self, call: Any, sent_at: dict[str, float]) -> None:
        """Send requests of one stream at random times, catching up on delays."""
        due = time.perf_counter()
        while True:
            due += self._random.expovariate(self._load.rate_per_s / len(self._load.api_keys))
            if (wait_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            await call.write(self._maker.make(1, sent_at))

    def _take(self, answer: pb.GenerateResponse, sent_at: dict[str, float]) -> int:
        """Record the frames of a message. Return the number of requests that it ends."""
        now, ended_count = time.perf_counter(), 0
        for frame in answer.frames:
            kind = frame.WhichOneof("kind")
            if kind == "admitted" and self._counting:
                self._seen.admitted_ms.append((now - sent_at[frame.request_id]) * 1000)
            elif kind == "finished":
                ended_count += 1
                self._seen.request_count_total += 1
                began = sent_at.pop(frame.request_id)
                if self._counting:
                    self._seen.request_count += 1
                    self._seen.finished_ms.append((now - began) * 1000)
                    for name, time_ms in until_batch_ms(frame.finished.timings).items():
                        self._seen.stages_ms[name].append(time_ms)
            elif kind == "failed":
                ended_count += 1
                del sent_at[frame.request_id]
                self._seen.failures.append(frame.failed.status.message)
        return ended_count


def until_batch_ms(timings: types_pb2.Timings) -> dict[str, float]:
    """Extract the durations of the stages before the engine's batch, in ms by name."""
    return {name: getattr(timings, f"{name}_ms") for name in STAGES}


async def answer_all(requests: AsyncIterator[pb.GenerateRequest], context: Any) -> None:
    """Answer each start frame with the frames of a successful request, in two messages."""
    admitted = pb.AdmittedFrame(
        input_token_count=25, price_version=1, quotas=[types_pb2.QuotaStatus()] * 5
    )
    delta = pb.DeltaFrame(seq=1, text="This", token_ids=[1])
    finished = pb.FinishedFrame(
        usage=types_pb2.Usage(input_token_count=25), timings=types_pb2.Timings(total_ms=1.0)
    )
    async for message in requests:
        ids = [frame.request_id for frame in message.frames]
        await context.write(
            pb.GenerateResponse(
                frames=[pb.ServerFrame(request_id=each, admitted=admitted) for each in ids]
            )
        )
        ends = [
            frame
            for each in ids
            for frame in (pb.ServerFrame(request_id=each, delta=delta), end_frame(each, finished))
        ]
        await context.write(pb.GenerateResponse(frames=ends))


def end_frame(request_id: str, finished: pb.FinishedFrame) -> pb.ServerFrame:
    """Build the last frame of a request."""
    return pb.ServerFrame(request_id=request_id, finished=finished)


async def serve_echo() -> None:
    """Serve until killed. The first line of the output is the address."""
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(
        answer_all, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("weir.v1.InferenceService", {"Generate": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    run_end(lambda load: Client(Load(**load)).run(), serve_echo)
