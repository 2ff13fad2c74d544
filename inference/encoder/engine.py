"""Encoder in a child process, for the API process: text queue, batches, pending results."""

from __future__ import annotations

import asyncio
import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.cpus import usable_cpus
from inference.encoder.config import read_encoder_info
from inference.encoder.worker import BatchEncoded, EncodeBatch, LoadEncoder
from inference.engine import EmbeddingRequest, Embeddings, EngineStatistics, Vector
from inference.errors import EngineFailed, EngineOverloaded
from inference.limits import embedding_fault
from inference.workers.batches import BatchQueue, Piece
from inference.workers.process import CHILD_ENVIRONMENT
from inference.workers.protocol import (
    Message,
    ProtocolBroken,
    Pulse,
    Ready,
    Shutdown,
    decoder_to_parent,
)
from inference.workers.supervised_backend import SupervisedBackend
from inference.workers.worker import Worker, WorkerKind

OVERLOAD_WAIT_S_MIN = 0.5  # shorter delays would make callers retry in a tight loop


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Settings of an encoder checkpoint. All defaults suit a small model on a laptop.

    `name` is the model name for clients. For `compute_dtype`, `device` and `torch_thread_count` see
    `TorchEngineSettings`.
    """

    directory: Path
    name: str
    compute_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    torch_thread_count: int = 0
    # tokens: larger batches gain no speed on a few cores and delay the next
    batch_token_count_max: int = 1024
    # seconds that a batch is held open: far less than its computation
    batch_window_s: float = 0.001
    # tokens: minutes of work on a laptop; further requests are refused
    waiting_token_count_max: int = 1 << 20
    load_timeout_s: float = 600.0  # seconds: a large checkpoint from a cold disk
    # seconds without an answer to a batch, after which the worker is killed
    step_timeout_s: float = 120.0
    close_timeout_s: float = 5.0  # seconds for the last batch to end
    restart_delay_s_min: float = 0.2
    restart_delay_s_max: float = 30.0
    stable_after_s: float = 60.0  # seconds of service after which the restart delay is reset


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `embed`. `began_at_s` is the start of its first batch, by the loop's clock."""

    request: EmbeddingRequest
    came_at_s: float
    began_at_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    token_ids: tuple[int, ...]
    call: _Call


class TorchEncoder(SupervisedBackend):
    """Implement `Encoder` on torch."""

    def __init__(self, settings: EncoderSettings) -> None:
        """Read the checkpoint's configuration; starts no process. Raises CheckpointInvalid."""
        load = LoadEncoder(
            str(settings.directory),
            settings.compute_dtype,
            settings.device,
            settings.torch_thread_count or usable_cpus().count,
        )
        kind = WorkerKind(
            "inference.encoder.worker",
            CHILD_ENVIRONMENT,
            load,
            decoder=decoder_to_parent(BatchEncoded),
        )
        super().__init__(read_encoder_info(settings.directory, name=settings.name), settings)
        self._worker = Worker(
            self,
            kind,
            settings,
            on_ready=self._worker_ready,
            on_message=self._receive,
            owes_answers=self._owes_answers,
        )
        self._options = settings
        self._queue: BatchQueue[_Text, Vector] = BatchQueue(
            settings.batch_token_count_max, self._taken
        )
        self._window: asyncio.TimerHandle | None = None
        self._batch_token_count = 0  # of the current batch
        self._token_count = 0  # embedded since the child's start
        self._tokens_per_s = 0.0  # of the last full batch; 0 before one
        self._sent_at_s = -math.inf

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, for operators and tests; None without a worker."""
        return self._worker.pid

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            waiting_sequence_count=self._queue.waiting_count,
            running_sequence_count=self._queue.under_way_count,
            step_count=self._queue.batch_count,
            prompt_token_count=self._token_count,
        )

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        self._check_ready()
        if (fault := embedding_fault(request, self._model)) is not None:
            raise fault
        if self._queue.waiting_size >= self._options.waiting_token_count_max:
            raise EngineOverloaded("the encoder's queue is full", self._overload_wait_s())
        clock = asyncio.get_running_loop().time
        call = _Call(request, clock())
        pieces = self._queue.put(
            [(_Text(token_ids, call), len(token_ids)) for token_ids in request.inputs], request.rank
        )
        self._send_soon()
        try:
            vectors = await asyncio.gather(*(piece.result for piece in pieces))
        finally:
            self._queue.drop(pieces)
        assert call.began_at_s is not None, "a finished call has begun"
        queue_ms = (call.began_at_s - call.came_at_s) * 1e3
        return Embeddings(tuple(vectors), queue_ms, (clock() - call.began_at_s) * 1e3)

    def _overload_wait_s(self) -> float:
        """Estimate the seconds to embed half of the queue at the pace of the last batch."""
        if not self._tokens_per_s:
            return OVERLOAD_WAIT_S_MIN
        return max(self._queue.waiting_size / 2 / self._tokens_per_s, OVERLOAD_WAIT_S_MIN)

    def _send_soon(self) -> None:
        """Send a batch: at once if it is full, otherwise after the batching window."""
        if self._queue.under_way_count:
            return
        if self._queue.waiting_size >= self._options.batch_token_count_max:
            self._send_batch()
        elif self._window is None:
            self._window = asyncio.get_running_loop().call_later(
                self._options.batch_window_s, self._send_batch
            )

    def _send_batch(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None
        if not self.healthy() or not (batch := self._queue.take_batch()):
            return
        self._worker.heard()
        self._sent_at_s = asyncio.get_running_loop().time()
        self._batch_token_count = sum(len(text.token_ids) for text in batch)
        self._worker.send(EncodeBatch(self._queue.batch_count, [text.token_ids for text in batch]))

    def _taken(self, piece: Piece[_Text, Vector]) -> None:
        call = piece.payload.call
        if call.began_at_s is None:
            call.began_at_s = asyncio.get_running_loop().time()
            call.request.on_begin()

    def _receive(self, message: Message) -> None:
        if isinstance(message, Pulse):
            self._worker.pulse(message)
            return
        if not isinstance(message, BatchEncoded) or message.number != self._queue.batch_count:
            raise ProtocolBroken(f"unexpected: {message!r}"[:200])
        self._worker.heard()
        if (fault := message.fault) is not None:
            self._queue.fail_batch(lambda: EngineFailed(f"the encoder gave no vectors: {fault}"))
        else:
            if len(message.vectors) != self._queue.under_way_count:
                raise ProtocolBroken(
                    f"{len(message.vectors)} vectors for {self._queue.under_way_count} texts"
                )
            elapsed_s = asyncio.get_running_loop().time() - self._sent_at_s
            self._tokens_per_s = self._batch_token_count / max(elapsed_s, 1e-6)
            self._token_count += self._batch_token_count
            self._queue.answer([array("f", each) for each in message.vectors])  # from their bytes
        self._send_batch()

    def _worker_ready(self, message: Ready, loading_time_s: float) -> None:
        self._now_ready(loading_time_s)

    async def _run(self) -> str:
        return await self._worker.run()

    def _begin_shutdown(self) -> None:
        self._worker.send(Shutdown())

    def _kill(self) -> None:
        self._worker.leave()

    def _owes_answers(self) -> bool:
        return bool(self._queue.under_way_count)

    def _fail_waiting(self, reason: str) -> None:
        self._token_count = 0
        self._queue.fail_all(lambda: self._loss(reason))
