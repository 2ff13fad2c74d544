"""Both ends of the wire for `bench.streams`, in separate processes.

A client reads paced streams; a server sends the same messages at the same pace without a backend.

    python -m bench.streams_load client '{"address": …}' | echo '{"step_s": …}'
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

METHOD = "/weir.v1.InferenceService/Generate"
LONG_TOKENS, PROBE_TOKENS, PROBES = 1500, 2, 4


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a client.

    `stream_count` long answers run, each on its own connection, or all on one if `shared`. `step_s`
    is the duration of an engine step. Reading takes `seconds` alone, and as many again with probes.
    `prefetch_tokens` is the initial credit of the long answers, renewed when half of it is used, as
    the SDK does; 0 if no credit is needed.
    """

    address: str
    model: str
    prompt: str
    api_key: str
    stream_count: int
    shared: bool
    step_s: float
    warm_up_s: float
    seconds: float
    prefetch_tokens: int = 0


@dataclass(slots=True)
class Seen:
    """Measurements of a run after its warm-up.

    `ttft_ms` is that of the probe; `gap_ms` has the gaps between messages, in a sample of streams.
    """

    token_count: int = 0
    message_count: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    failures: list[str] = field(default_factory=list)


def start_message(
    load: Load, token_count: int, request_count: int = 1, prefetch_tokens: int = 0
) -> pb.GenerateRequest:
    """Build one message with this many start frames."""
    start = pb.StartFrame(
        model=load.model, text=load.prompt, max_output_tokens=token_count, ignore_eos=True
    )
    if prefetch_tokens:
        start.initial_credit_tokens = prefetch_tokens
    return pb.GenerateRequest(
        frames=[
            pb.ClientFrame(request_id=str(uuid.uuid4()), start=start) for _ in range(request_count)
        ]
    )


def grants(used: Counter[str], prefetch_tokens: int) -> list[pb.ClientFrame]:
    """Build credit frames for the requests that have used half of their credit."""
    due = [
        request_id for request_id, token_count in used.items() if 2 * token_count >= prefetch_tokens
    ]
    return [
        pb.ClientFrame(request_id=each, credit=pb.CreditFrame(token_count=used.pop(each)))
        for each in due
    ]


class Client:
    """gRPC client that holds all streams of one run."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._seen = Seen()
        self._counting = False
        self._begun = 0
        self._all_begun = asyncio.Event()

    async def run(self) -> Seen:
        """Wait until all streams decode, then count. Print a line when counting begins and ends."""
        load = self._load
        async with asyncio.TaskGroup() as tasks:
            calls = 1 if load.shared else load.stream_count
            streams = [
                tasks.create_task(self._decode(load.stream_count if load.shared else 1))
                for _ in range(calls)
            ]
            await self._all_begun.wait()
            await asyncio.sleep(load.warm_up_s)
            self._counting, cpu = True, time.process_time()
            print("begin", flush=True)
            await asyncio.sleep(load.seconds)
            self._counting = False
            print("end", flush=True)
            self._seen.cpu_s = time.process_time() - cpu
            streams += [tasks.create_task(self._probe()) for _ in range(PROBES)]
            await asyncio.sleep(load.seconds)
            for stream in streams:
                stream.cancel()
        return self._seen

    async def _decode(self, request_count: int) -> None:
        """Request long answers one after the other, or several concurrently on a shared stream."""
        await asyncio.sleep(random.random())  # avoids one huge prefill
        async with self._channel() as channel:
            call = self._open(channel)
            prefetch_tokens, used = self._load.prefetch_tokens, Counter[str]()
            await call.write(
                start_message(
                    self._load, LONG_TOKENS, request_count, prefetch_tokens
                ).SerializeToString()
            )
            last = 0.0
            while (data := await call.read()) is not grpc.aio.EOF:
                message, now = pb.GenerateResponse.FromString(data), time.perf_counter()
                token_count = ended_count = 0
                for frame in message.frames:
                    kind = frame.WhichOneof("kind")
                    if kind == "delta":
                        token_count += len(frame.delta.token_ids)
                        used[frame.request_id] += len(frame.delta.token_ids)
                    ended_count += kind in ("finished", "failed")
                    if kind == "failed":
                        self._seen.failures.append(frame.failed.status.message)
                    if kind == "delta" and frame.delta.seq == 1:
                        self._note_begun()
                if self._counting and token_count:
                    self._seen.token_count += token_count
                    self._seen.message_count += 1
                    if last:
                        self._seen.gap_ms.append((now - last) * 1000)
                last = now
                if prefetch_tokens and (granted := grants(used, prefetch_tokens)):
                    await call.write(pb.GenerateRequest(frames=granted).SerializeToString())
                if ended_count:
                    await call.write(
                        start_message(
                            self._load, LONG_TOKENS, ended_count, prefetch_tokens
                        ).SerializeToString()
                    )
            raise ConnectionError(f"the stream ended: {await call.details()}")

    async def _probe(self) -> None:
        """Request short answers on a separate stream, for the time to first token."""
        async with self._channel() as channel:
            call = self._open(channel)
            while True:
                # The last answer ended with a step.
                await asyncio.sleep(random.random() * self._load.step_s)
                sent_at, first = time.perf_counter(), True
                await call.write(start_message(self._load, PROBE_TOKENS).SerializeToString())
                ended = False
                while not ended:
                    data = await call.read()
                    if data is grpc.aio.EOF:
                        raise ConnectionError(f"the stream ended: {await call.details()}")
                    for frame in pb.GenerateResponse.FromString(data).frames:
                        if frame.HasField("delta") and first:
                            first = False
                            self._seen.ttft_ms.append((time.perf_counter() - sent_at) * 1000)
                        ended = ended or frame.HasField("finished") or frame.HasField("failed")

    def _note_begun(self) -> None:
        self._begun += 1
        if self._begun >= self._load.stream_count:
            self._all_begun.set()

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(
            self._load.address, (("grpc.use_local_subchannel_pool", 1),)
        )

    def _open(self, channel: grpc.aio.Channel) -> Any:
        open_stream: Any = channel.stream_stream(METHOD)  # no serializers: bytes in both directions
        return open_stream(metadata=(("authorization", f"Bearer {self._load.api_key}"),))


class Stepped:
    """Server whose answers follow the steps of the simulated engine."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._step = asyncio.Event()

    async def tick(self) -> None:
        """Run the steps of the simulated engine, without drift."""
        due = time.perf_counter()
        while True:
            due = max(due + self._step_s, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            ended, self._step = self._step, asyncio.Event()
            ended.set()


class Echo(Stepped):
    """Server that answers each start frame with one token per step, from the next step on."""

    async def answer(self, requests: AsyncIterator[pb.GenerateRequest], context: Any) -> None:
        """Answer all requests of one stream, with one message per step."""
        left: dict[str, int] = {}
        seqs: dict[str, int] = {}
        joined = asyncio.Event()
        admitted = pb.AdmittedFrame(input_token_count=25, price_version=1)
        finished = pb.FinishedFrame(
            usage=types_pb2.Usage(input_token_count=25), timings=types_pb2.Timings(total_ms=1.0)
        )

        async def read() -> None:
            async for message in requests:
                frames = [
                    pb.ServerFrame(request_id=frame.request_id, admitted=admitted)
                    for frame in message.frames
                ]
                await context.write(pb.GenerateResponse(frames=frames))
                await self._step.wait()  # the current step began before these requests
                left.update(
                    {frame.request_id: frame.start.max_output_tokens for frame in message.frames}
                )
                joined.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            while True:
                await joined.wait()
                await self._step.wait()
                frames = []
                for request_id in list(left):
                    seqs[request_id] = seqs.get(request_id, 0) + 1
                    delta = pb.DeltaFrame(seq=seqs[request_id], text=" This", token_ids=[17])
                    frames.append(pb.ServerFrame(request_id=request_id, delta=delta))
                    left[request_id] -= 1
                    if not left[request_id]:
                        del left[request_id], seqs[request_id]
                        frames.append(pb.ServerFrame(request_id=request_id, finished=finished))
                await context.write(pb.GenerateResponse(frames=frames))
                if not left:
                    joined.clear()


async def serve_echo(step_s: float) -> None:
    """Serve until killed. The first line of the output is the address."""
    echo, server = Echo(step_s), grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(
        echo.answer, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("weir.v1.InferenceService", {"Generate": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await echo.tick()


def run_end(
    run_client: Callable[[dict[str, Any]], Coroutine[Any, Any, Any]],
    serve: Callable[..., Coroutine[Any, Any, None]],
) -> None:
    """Run the client and print its measurements, or the server, with the arguments of the program.

    `run_client` receives the load, and `serve` its parameters by name.
    """
    end, parameters = sys.argv[1], json.loads(sys.argv[2])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if end == "echo":
            runner.run(serve(**parameters))
        else:
            print(json.dumps(dataclasses.asdict(runner.run(run_client(parameters)))))


if __name__ == "__main__":
    run_end(lambda load: Client(Load(**load)).run(), serve_echo)
