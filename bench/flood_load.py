"""Hostile client of `bench.flood`, in a separate process.

python -m bench.flood_load '["127.0.0.1:8443", "weir_…", "cancel", 50]'
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from typing import Any

import grpc
import uvloop
from weir.v1 import inference_service_pb2 as pb

from bench.streams_load import METHOD

FRAMES = 1000  # frames of a message


def message(kind: str) -> bytes:
    """Build one message of a flood."""
    frames = [pb.ClientFrame(request_id=str(uuid.uuid4())) for _ in range(FRAMES)]
    for frame in frames:
        getattr(frame, kind).SetInParent()
    return pb.GenerateRequest(frames=frames).SerializeToString()


async def flood(address: str, api_key: str, kind: str, stream_count: int) -> None:
    """Send the flood until killed."""
    data = message(kind)

    async def send(call: Any) -> None:
        while True:
            await call.write(data)

    async def one() -> None:
        async with grpc.aio.insecure_channel(
            address, (("grpc.use_local_subchannel_pool", 1),)
        ) as channel:
            # No serializers: bytes in both directions.
            open_stream: Any = channel.stream_stream(METHOD)
            call = open_stream(metadata=(("authorization", f"Bearer {api_key}"),))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(send(call))
                while await call.read() is not grpc.aio.EOF:
                    pass

    async with asyncio.TaskGroup() as tasks:
        for _ in range(stream_count):
            tasks.create_task(one())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(flood(*json.loads(sys.argv[1])))
