"""Both ends of the wire for benchmarks over gRPC, in separate processes.

A client writes start frames as bytes and counts the frames of the answers; the SDK would dominate
the measurement, since it does a caller's work for each request. A server sends the same messages
without a backend, at the pace of a simulated engine.

    python -m bench.grpc_load client < LOAD.json
    python -m bench.grpc_load echo '{"step_s": …}'
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

METHOD = "/weir.v1.InferenceService/Generate"
PROBE_TOKENS, PROBES = 2, 4
ID, MARK = "x" * 36, "m" * 8  # in the text of a start frame: the request id, a unique word
START_ALL_MAX_S = 180.0
# Stages of a request before the engine's batch.
STAGES = ("auth", "tokenize", "admission", "queue", "cold_start")


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a client: one stream for each of `api_keys`, each with `outstanding_count` requests.

    Requests have one of `prompts`, the first ones one of `first_prompts` if there are any; as a
    `chat` or as text. `rate_per_s` asks for random arrivals on all streams together instead; 0 for
    none. With `step_s`, the duration of an engine step, probes follow for another `seconds`. Each
    request has one of `end_users`, if there are any, and all `labels`.
    """

    addresses: list[str]
    model: str
    prompts: list[str]
    api_keys: list[str]
    output_tokens: int
    warm_up_s: float
    seconds: float
    outstanding_count: int = 1
    rate_per_s: float = 0.0
    step_s: float = 0.0
    first_prompts: list[str] = field(default_factory=list)
    chat: bool = False
    ignore_eos: bool = True
    end_users: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Seen:
    """Measurements of a run after its warm-up. `request_count` is that of the finished ones.

    `ttft_ms` is that of the probes; `gap_ms` has the gaps between a stream's messages; `stages_ms`
    are the server's, by name.
    """

    token_count: int = 0
    message_count: int = 0
    request_count: int = 0
    admitted_count: int = 0
    input_token_count: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    admitted_ms: list[float] = field(default_factory=list)
    finished_ms: list[float] = field(default_factory=list)
    stages_ms: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES})
    wall_s: float = 0.0
    cpu_s: float = 0.0
    failures: list[str] = field(default_factory=list)


class RequestMaker:
    """Builder of start frames as bytes, with an id of their own in place of `ID` and `MARK`."""

    def __init__(self, load: Load, prompts: list[str], output_tokens: int) -> None:
        self._bodies = []
        for prompt, end_user in itertools.product(prompts, load.end_users or [""]):
            start = pb.StartFrame(
                model=load.model,
                max_output_tokens=output_tokens,
                ignore_eos=load.ignore_eos,
                labels=load.labels,
            )
            if end_user:  # an older tree has no such field
                start.end_user = end_user
            if load.chat:
                start.conversation.messages.add(role=pb.ROLE_USER, content=prompt)
            else:
                start.text = prompt
            frame = pb.ClientFrame(request_id=ID, start=start)
            self._bodies.append(pb.GenerateRequest(frames=[frame]).SerializeToString())

    def make(self, count: int, sent_at: dict[str, float]) -> bytes:
        """Build a message with this many start frames, and record their ids."""
        now, parts = time.perf_counter(), []
        for _ in range(count):
            request_id = str(uuid.uuid4())
            sent_at[request_id] = now
            own = request_id.encode()
            body = random.choice(self._bodies).replace(ID.encode(), own)
            parts.append(body.replace(MARK.encode(), own[: len(MARK)]))
        return b"".join(parts)  # repeated fields of concatenated messages are merged


class Client:
    """gRPC client that holds all streams of one run."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._maker = RequestMaker(load, load.prompts, load.output_tokens)
        first = load.first_prompts or load.prompts
        self._first_maker = RequestMaker(load, first, load.output_tokens)
        self._seen = Seen()
        self._counting = False
        self._begun_count = 0
        self._all_begun = asyncio.Event()
        self._random = random.Random(0)

    async def run(self) -> Seen:
        """Wait until all requests decode, then count. Print a line when counting begins and ends.

        With random arrivals, waits for the warm-up only.
        """
        load, seen = self._load, self._seen
        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(self._stream(load.addresses[index % len(load.addresses)], key))
                for index, key in enumerate(load.api_keys)
            ]
            if not load.rate_per_s:
                await self._all_begun.wait()
            await asyncio.sleep(load.warm_up_s)
            self._counting, began_at, cpu_s = True, time.perf_counter(), time.process_time()
            print("begin", flush=True)
            await asyncio.sleep(load.seconds)
            self._counting = False
            print("end", flush=True)
            seen.wall_s, seen.cpu_s = time.perf_counter() - began_at, time.process_time() - cpu_s
            if load.step_s:
                streams += [tasks.create_task(self._probe()) for _ in range(PROBES)]
                await asyncio.sleep(load.seconds)
            for stream in streams:
                stream.cancel()
        return seen

    @contextlib.asynccontextmanager
    async def _call(self, address: str, key: str) -> AsyncIterator[Any]:
        """Open a stream on a connection of its own, with bytes in both directions."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(address, options) as channel:
            open_stream: Any = channel.stream_stream(METHOD)
            yield open_stream(metadata=(("authorization", f"Bearer {key}"),))

    async def _stream(self, address: str, key: str) -> None:
        load, sent_at, last_at = self._load, dict[str, float](), 0.0
        async with self._call(address, key) as call, asyncio.TaskGroup() as tasks:
            if load.rate_per_s:
                tasks.create_task(self._arrive(call, sent_at))
            else:
                await asyncio.sleep(random.random())  # avoids one huge prefill
                await call.write(self._first_maker.make(load.outstanding_count, sent_at))
            while (data := await call.read()) is not grpc.aio.EOF:
                now = time.perf_counter()
                has_tokens, ended_count = self._take(pb.GenerateResponse.FromString(data), sent_at)
                if self._counting and has_tokens:
                    self._seen.message_count += 1
                    if last_at:
                        self._seen.gap_ms.append((now - last_at) * 1000)
                last_at = now
                if ended_count and not load.rate_per_s:
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

    def _take(self, answer: pb.GenerateResponse, sent_at: dict[str, float]) -> tuple[bool, int]:
        """Record the frames of a message.

        Return whether it has tokens, and the number of requests that it ends.
        """
        now, has_tokens, ended_count, seen = time.perf_counter(), False, 0, self._seen
        for frame in answer.frames:
            kind = frame.WhichOneof("kind")
            if kind == "delta":
                has_tokens = True
                if frame.delta.seq == 1:
                    self._note_begun()
                if self._counting:
                    seen.token_count += len(frame.delta.token_ids)
            elif kind == "admitted" and self._counting:
                seen.admitted_count += 1
                seen.input_token_count += frame.admitted.input_token_count
                seen.admitted_ms.append((now - sent_at[frame.request_id]) * 1000)
            elif kind == "finished":
                ended_count += 1
                began_at = sent_at.pop(frame.request_id)
                if self._counting:
                    seen.request_count += 1
                    seen.finished_ms.append((now - began_at) * 1000)
                    for name, times_ms in seen.stages_ms.items():
                        times_ms.append(getattr(frame.finished.timings, f"{name}_ms"))
            elif kind == "failed":
                ended_count += 1
                del sent_at[frame.request_id]
                seen.failures.append(frame.failed.status.message)
        return has_tokens, ended_count

    def _note_begun(self) -> None:
        self._begun_count += 1
        if self._begun_count >= len(self._load.api_keys) * self._load.outstanding_count:
            self._all_begun.set()

    async def _probe(self) -> None:
        """Request short answers on a separate stream, for the time to first token."""
        load = self._load
        maker = RequestMaker(load, load.prompts, PROBE_TOKENS)
        async with self._call(load.addresses[0], load.api_keys[0]) as call:
            while True:
                # The last answer ended with a step.
                await asyncio.sleep(random.random() * load.step_s)
                sent_at, ended, is_first = dict[str, float](), False, True
                await call.write(maker.make(1, sent_at))
                while not ended:
                    if (data := await call.read()) is grpc.aio.EOF:
                        raise ConnectionError(f"the stream ended: {await call.details()}")
                    for frame in pb.GenerateResponse.FromString(data).frames:
                        if frame.HasField("delta") and is_first:
                            is_first, [began_at] = False, sent_at.values()
                            self._seen.ttft_ms.append((time.perf_counter() - began_at) * 1000)
                        ended = ended or frame.HasField("finished") or frame.HasField("failed")


class Stepped:
    """Server whose answers follow the steps of the simulated engine. Step 0 takes no time."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._step = asyncio.Event()

    async def tick(self) -> None:
        """Run the steps of the simulated engine, without drift."""
        if not self._step_s:
            await asyncio.Event().wait()
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
        admitted = pb.AdmittedFrame(
            input_token_count=25, price_version=1, quotas=[types_pb2.QuotaStatus()] * 5
        )
        finished = pb.FinishedFrame(
            usage=types_pb2.Usage(input_token_count=25), timings=types_pb2.Timings(total_ms=1.0)
        )

        async def step() -> None:
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

        async def read() -> None:
            async for message in requests:
                frames = [
                    pb.ServerFrame(request_id=frame.request_id, admitted=admitted)
                    for frame in message.frames
                ]
                await context.write(pb.GenerateResponse(frames=frames))
                if self._step_s:
                    await self._step.wait()  # the current step began before these requests
                for frame in message.frames:
                    left[frame.request_id] = frame.start.max_output_tokens
                while left and not self._step_s:
                    await step()
                joined.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            while self._step_s:
                await joined.wait()
                await self._step.wait()
                await step()
                if not left:
                    joined.clear()


async def serve_echo(step_s: float = 0.0) -> None:
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


def await_replicas(address: str, key: str) -> None:
    """Wait until `ListModels` reports all replicas ready. Raises: RuntimeError after a timeout."""
    deadline = time.monotonic() + START_ALL_MAX_S
    with grpc.insecure_channel(address) as channel:
        list_models: Any = channel.unary_unary(
            "/weir.v1.InferenceService/ListModels",
            request_serializer=pb.ListModelsRequest.SerializeToString,
            response_deserializer=pb.ListModelsResponse.FromString,
        )
        while time.monotonic() < deadline:
            # The database may be slow while so many processes start.
            with contextlib.suppress(grpc.RpcError):
                [model] = list_models(
                    pb.ListModelsRequest(), metadata=(("authorization", f"Bearer {key}"),)
                ).models
                if model.ready_replica_count == model.replica_count:
                    return
            time.sleep(0.1)
    raise RuntimeError(f"not all replicas are ready after {START_ALL_MAX_S:g} s")


def run_end(
    run_client: Callable[[dict[str, Any]], Coroutine[Any, Any, Any]],
    serve: Callable[..., Coroutine[Any, Any, None]],
) -> None:
    """Run the client and print its measurements, or the server.

    `run_client` receives the load from the input; `serve` gets the program's argument by name.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if sys.argv[1] == "client":
            load = json.load(sys.stdin)
            print(json.dumps(dataclasses.asdict(runner.run(run_client(load)))))
        else:
            runner.run(serve(**json.loads(sys.argv[2])))


if __name__ == "__main__":
    run_end(lambda load: Client(Load(**load)).run(), serve_echo)
