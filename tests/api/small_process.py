"""Api process without sockets: all code between a stream and the database, in this event loop.

The engine computes nothing and steps once in each turn of the loop, so that a request has the same
suspensions in every run.
"""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from weir.v1 import inference_service_pb2 as pb

from api.access.auth import Authenticator, StreamKey
from api.core.settings import Settings
from api.generation.delivery.replay import ReplayBuffers
from api.generation.delivery.replayable_buffer import ReplayableBuffer
from api.generation.request.admission import Admission, Capacity
from api.generation.request.peers import make_identity
from api.generation.request.registry import Generating, RequestRegistry
from api.generation.request.relay import Relays
from api.rpc.client_stream import ClientStream
from inference.core.engine_core import EngineCore
from inference.core.options import CostModel, EngineOptions
from inference.engine import (
    EmbeddingRequest,
    Embeddings,
    EngineCondition,
    EngineState,
    EngineStatistics,
    ModelInfo,
)
from inference.limits import EngineLimits
from inference.routing.router import Router
from inference.text.tokenizer import Tokenizer
from metering.holds.holds import HoldStore
from metering.holds.journal import UsageJournal
from metering.store.db import Sessions
from metering.tenants.authentication import Principal
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.core_engine import CoreEngine

ENCODER, DIMENSION = "encoder", 4


class PacedEngine(CoreEngine):
    """Engine that steps while its gate is open."""

    def __init__(self, checkpoint: TinyCheckpoint, batch_size: int) -> None:
        limits = EngineLimits(2048, max(256, batch_size), running_sequence_count_max=batch_size)
        options = EngineOptions(
            str(checkpoint.directory), limits, simulation=CostModel(time_scale=0.0)
        )
        super().__init__(checkpoint, lambda: EngineCore(options, sleep=lambda _: None), name="demo")
        self.gate = asyncio.Event()
        self.gate.set()
        self.paused = asyncio.Event()
        self._pause_at: int | None = None  # of all its sequences together

    def pause_after(self, token_count: int) -> None:
        """Close the gate after this many more tokens."""
        self.paused.clear()
        self._pause_at = self.token_count + token_count

    async def serve(self) -> None:
        """Implement `CoreEngine.serve`."""
        while self.state is not EngineState.CLOSED:
            await self._wake.wait()
            await self.gate.wait()
            if self.core is not None:
                self.step()
            if self._pause_at is not None and self.token_count >= self._pause_at:
                self._pause_at = None
                self.gate.clear()
                self.paused.set()
            if self.core is None or self.core.idle:
                self._wake.clear()
            await asyncio.sleep(0)


class PlainEncoder:
    """`Encoder` that returns constant vectors."""

    def __init__(self, engine: CoreEngine) -> None:
        facts = {name: getattr(engine.model, name) for name in ModelInfo.__dataclass_fields__}
        self.model = ModelInfo(**facts | {"name": ENCODER, "embedding_dimension": DIMENSION})
        self.running_count = 0

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Implement `Encoder.embed`."""
        self.running_count += 1
        try:
            await soon()
            request.on_begin()
            await soon()
            return Embeddings(
                tuple(array("f", [1.0] * DIMENSION) for _ in request.inputs), 0.0, 0.0
            )
        finally:
            self.running_count -= 1

    def healthy(self) -> bool:
        """Implement `Backend.healthy`."""
        return True

    def condition(self) -> EngineCondition:
        """Implement `Backend.condition`."""
        return EngineCondition(EngineState.READY)

    def statistics(self) -> EngineStatistics:
        """Implement `Backend.statistics`."""
        return EngineStatistics(running_sequence_count=self.running_count)


def forget_all(replays: ReplayBuffers[ReplayableBuffer]) -> None:
    """Drop the kept output of every ended request, and its timer."""
    for key in tuple(replays._ended):
        replays.forget(key)


async def soon() -> None:
    """Wait for a callback in the next turn of the loop."""
    loop = asyncio.get_running_loop()
    comes: asyncio.Future[None] = loop.create_future()
    loop.call_soon(lambda: None if comes.done() else comes.set_result(None))
    await comes


@dataclass(slots=True)
class Call:
    """Both ends of one `Generate` call. left_s: time until the client's deadline, if it has one."""

    left_s: float | None = 1000.0
    messages: list[pb.GenerateResponse] = field(default_factory=list)
    on_frame: Callable[[pb.ServerFrame], object] = lambda _: None
    _sent: asyncio.Queue[pb.GenerateRequest | None] = field(default_factory=asyncio.Queue)

    def send(self, *frames: pb.ClientFrame) -> None:
        """Send frames as the client."""
        self._sent.put_nowait(pb.GenerateRequest(frames=frames))

    def half_close(self) -> None:
        """Close the client's side."""
        self._sent.put_nowait(None)

    async def requests(self) -> AsyncIterator[pb.GenerateRequest]:
        """Yield the client's messages to the server."""
        while (message := await self._sent.get()) is not None:
            yield message

    async def write(self, data: bytes) -> None:
        """Write as the server. A message counts as delivered once this returns."""
        await soon()
        message = pb.GenerateResponse.FromString(data)
        self.messages.append(message)
        for frame in message.frames:
            self.on_frame(frame)

    def time_remaining(self) -> float | None:
        """Implement `grpc.aio.ServicerContext.time_remaining`."""
        return self.left_s

    @property
    def frames(self) -> list[pb.ServerFrame]:
        """Received frames in order."""
        return [frame for message in self.messages for frame in message.frames]


class WatchedRegistry(RequestRegistry):
    """Process that records its latest request."""

    last: Generating | None = None

    def add(self, request: Generating) -> None:
        """Implement `RequestRegistry.add`."""
        super().add(request)
        self.last = request


class SmallProcess:
    """Parts that `api/serving.py` builds, without servers and unneeded background work."""

    def __init__(
        self,
        settings: Settings,
        checkpoint: TinyCheckpoint,
        sessions: Sessions,
        tasks: asyncio.TaskGroup,
        *,
        batch_size: int = 64,
    ) -> None:
        """Build all parts. batch_size: sequences that the engine runs at once."""
        self.process_id = uuid.uuid4()
        self.engine = PacedEngine(checkpoint, batch_size)
        self.encoder = PlainEncoder(self.engine)
        self.journal = UsageJournal(settings.journal_directory, self.process_id)
        self.holds = HoldStore(settings.database.url, self.process_id)
        self.capacity = Capacity(settings.requests.per_process_max)
        self.identity = make_identity(self.process_id)
        self.relays = Relays(sessions, self.process_id, tasks, self.identity)
        self.authenticator = Authenticator(sessions)
        router = Router({"demo": self.engine}, {ENCODER: cast(Any, self.encoder)})
        tokenizer = Tokenizer(Path(self.engine.model.directory))
        admission = Admission(settings, self.capacity, self.holds, self.journal, tasks)
        self.process = WatchedRegistry(
            admission, router, {"demo": tokenizer, ENCODER: tokenizer}, None, self.relays
        )
        self._background = [
            tasks.create_task(self.holds.run(), name="holds"),
            tasks.create_task(self.engine.serve(), name="engine"),
        ]

    def stream(self, principal: Principal, secret: str) -> ClientStream:
        """Return the stream of a `Generate` call."""
        key = StreamKey(principal, cast(Any, None), 3600.0)
        return ClientStream(self.process, key, 0.0, secret=secret)

    def left_over(self) -> dict[str, int]:
        """Return non-zero counts of resources that ended requests must have released, by name.

        Clears the replay buffers first.
        """
        queues = [queue.statistics() for queue in self.process.queues.values()]
        statistics, replays = self.engine.statistics(), self.process.replays
        forget_all(replays)
        counts = {
            "permits": self.capacity.taken_count,
            "characters in preparation": self.process.text_work.taken_chars,
            "texts that wait": self.process.text_work.waiting_count,
            "places": sum(queue.waiting_count + queue.engine_pending_count for queue in queues),
            "live holds": self.holds.statistics().live_hold_count,
            "sequences": statistics.running_sequence_count
            + statistics.waiting_sequence_count
            + len(self.engine._sequences),
            "KV blocks": statistics.kv_block_count_held,
            "texts": self.encoder.running_count,
            "requests": len(self.process.running()) + len(self.process._by_key),
            "replay buffers": replays.live_count,
            "kept bytes": replays.byte_count,
            "journalled holds": len(self.journal._live),
            "relays": self.relays.running_count,
            "uses of connections": sum(
                each.use_count for each in self.relays.channels._connections.values()
            ),
        }
        return {name: count for name, count in counts.items() if count}

    async def close(self) -> None:
        """Stop the background work."""
        await self.relays.close()
        await self.engine.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self.journal.close()
