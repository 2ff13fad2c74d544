"""Client of `bench.cluster`: many concurrent requests on a few streams, written as bytes, read
frame by frame.

    python -m bench.cluster_load '{"addresses": …}'

Prompts have the lengths of the reference workload. The simulated engine ends answers, so that their
lengths vary. The first requests of a run have short prompts: otherwise all would be in prefill at
the same time, and a steady state would take long.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop
from weir.v1 import inference_service_pb2 as pb

METHOD = "/weir.v1.InferenceService/Generate"
WORDS = (
    "hotel",
    "night",
    "family",
    "guest",
    "kitchen",
    "garden",
    "airport",
    "terrace",
    "price",
    "coffee",
    "lobby",
    "staff",
)
# Each is one token of the demo model; with the mark, the length of the reference workload's
# prompts.
SHARED_WORDS, OWN_WORDS = 200, 816
OUTPUT_TOKENS_MAX = 800  # few answers reach it, so that the mean is kept
UUID_CHARS, MARK_CHARS = 36, 8
BODY_COUNT = 64
START_ALL_MAX_S = 180.0


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a client: a stream for each of `api_keys`, `outstanding_count` requests in total."""

    addresses: list[str]
    model: str
    api_keys: list[str]
    outstanding_count: int
    warm_up_s: float
    seconds: float


@dataclass(slots=True)
class Seen:
    """Measurements of a run. `input_token_count` is that of the admitted requests."""

    token_count: int = 0
    message_count: int = 0
    admitted_count: int = 0
    input_token_count: int = 0
    finished_count: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    failures: list[str] = field(default_factory=list)


class RequestMaker:
    """Builder of start frames as bytes: first words that all share, then a unique mark."""

    def __init__(self, model: str, own_words: int) -> None:
        rng, self._parts = random.Random(0), []
        shared = " ".join(rng.choices(WORDS, k=SHARED_WORDS))
        for _ in range(BODY_COUNT):
            text = f"{shared} {'m' * MARK_CHARS} {' '.join(rng.choices(WORDS, k=own_words))}"
            start = pb.StartFrame(model=model, text=text, max_output_tokens=OUTPUT_TOKENS_MAX)
            message = pb.GenerateRequest(
                frames=[pb.ClientFrame(request_id="x" * UUID_CHARS, start=start)]
            ).SerializeToString()
            head, _, rest = message.partition(b"x" * UUID_CHARS)
            self._parts.append((head, *rest.split(b"m" * MARK_CHARS)))

    def make(self, count: int) -> bytes:
        """Build a message with this many start frames."""
        found = []
        for _ in range(count):
            request_id = str(uuid.uuid4()).encode()
            head, middle, tail = random.choice(self._parts)
            found += [head, request_id, middle, request_id[:MARK_CHARS], tail]
        return b"".join(found)  # repeated fields of concatenated messages are merged


class Client:
    """gRPC client that holds all streams of one run."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._maker = RequestMaker(load.model, OWN_WORDS)
        self._first_maker = RequestMaker(load.model, 1)
        self._seen = Seen()
        self._counting = False

    async def run(self) -> Seen:
        """Load the server for the given time. Print a line when counting begins and ends."""
        load, seen = self._load, self._seen
        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(self._stream(load.addresses[index % len(load.addresses)], key))
                for index, key in enumerate(load.api_keys)
            ]
            await asyncio.sleep(load.warm_up_s)
            self._counting, begin, cpu = True, time.perf_counter(), time.process_time()
            print("begin", flush=True)
            await asyncio.sleep(load.seconds)
            self._counting = False
            print("end", flush=True)
            seen.wall_s, seen.cpu_s = time.perf_counter() - begin, time.process_time() - cpu
            for stream in streams:
                stream.cancel()
        return seen

    async def _stream(self, address: str, key: str) -> None:
        async with grpc.aio.insecure_channel(
            address, (("grpc.use_local_subchannel_pool", 1),)
        ) as channel:
            # No serializers: bytes in both directions.
            open_stream: Any = channel.stream_stream(METHOD)
            call = open_stream(metadata=(("authorization", f"Bearer {key}"),))
            for _ in range(self._load.outstanding_count // len(self._load.api_keys)):
                await call.write(self._first_maker.make(1))
            while (data := await call.read()) is not grpc.aio.EOF:
                ended_count = self._take(pb.GenerateResponse.FromString(data))
                if ended_count:
                    await call.write(self._maker.make(ended_count))
            raise ConnectionError(f"the stream ended: {await call.details()}")

    def _take(self, answer: pb.GenerateResponse) -> int:
        """Count the frames of a message. Return the number of requests that it ends."""
        seen, counting, ended_count = self._seen, self._counting, 0
        seen.message_count += counting
        for frame in answer.frames:
            kind = frame.WhichOneof("kind")
            if kind == "delta":
                if counting:
                    seen.token_count += len(frame.delta.token_ids)
            elif kind == "admitted":
                if counting:
                    seen.admitted_count += 1
                    seen.input_token_count += frame.admitted.input_token_count
            elif kind == "finished":
                ended_count += 1
                seen.finished_count += counting
            elif kind == "failed":
                ended_count += 1
                seen.failures.append(frame.failed.status.message)
        return ended_count


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


def main() -> None:
    """Run the load and print the measurements."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(
            json.dumps(
                dataclasses.asdict(runner.run(Client(Load(**json.loads(sys.argv[1]))).run()))
            )
        )


if __name__ == "__main__":
    main()
