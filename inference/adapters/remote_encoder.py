"""Encoder on a remote server. Texts are sent one by one; the server batches them.

At most the configured number of texts is with the server; the rest wait here, ordered by rank.
Answers are validated: token count, vector length, and finite values.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import time
import uuid
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from common.incidents import Retries
from inference.adapters.remote_connection import Link
from inference.adapters.remote_dialects import OVERLOAD_WAIT_S, Dialect, ServerUnfit, engine_error
from inference.adapters.remote_engine import ConnectionWatch
from inference.adapters.remote_examination import Introduction
from inference.adapters.remote_settings import LOSS_MESSAGE, RemoteSettings
from inference.checkpoint.json_files import read_count, read_json, read_json_list
from inference.engine import EmbeddingRequest, Embeddings, EngineStatistics, ModelInfo, Vector
from inference.errors import EngineError, EngineFailed, EngineOverloaded
from inference.limits import embedding_fault
from inference.workers.supervised_backend import SupervisedBackend

# Families whose first position is the row after that of the padding token.
_OFFSET_FAMILIES = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})
LENGTH_ERROR_MAX = 1e-2  # allowed deviation from length 1, for servers that compute in bfloat16


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `embed`. `began_at_s` is the time when its first text was sent."""

    request: EmbeddingRequest
    began_at_s: float | None = None


@dataclass(slots=True, eq=False)
class _Text:
    """One text of a call, queued or sent."""

    index: int
    call: _Call
    result: asyncio.Future[Vector] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.call.request.inputs[self.index]

    def fail(self, error: EngineError) -> None:
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # the gather of the call reports only the first failure


def read_remote_encoder(
    directory: Path, *, name: str, engine: str, input_tokens_max: int | None
) -> tuple[ModelInfo, bool]:
    """Read an embedding model's configuration; return it, and whether its vectors have length 1."""
    path = directory / "config.json"
    raw = read_json(path)
    size = "hidden_size" if "hidden_size" in raw else "dim"
    window = read_count(raw, "max_position_embeddings", path)
    if raw.get("model_type") in _OFFSET_FAMILIES:
        window -= int(raw.get("pad_token_id") or 0) + 1
    limits = [window, input_tokens_max or window]
    if (limit_path := directory / "sentence_bert_config.json").exists():
        limit = read_json(limit_path).get("max_seq_length")
        limits += [limit] if isinstance(limit, int) and limit > 0 else []
    modules = (
        read_json_list(directory / "modules.json") if (directory / "modules.json").exists() else []
    )
    normalized = any(str(module.get("type", "")).endswith("Normalize") for module in modules)
    architectures = raw.get("architectures") or ["unknown"]
    model = ModelInfo(
        name=name,
        architecture=str(architectures[0]),
        engine=engine,
        context_window_tokens=min(limits),
        vocabulary_size=read_count(raw, "vocab_size", path),
        directory=str(directory),
        embedding_dimension=read_count(raw, size, path),
    )
    return model, normalized


class RemoteEncoder(SupervisedBackend):
    """Implement `Encoder` with a server of `trtllm-serve --grpc` or `vllm serve --grpc`."""

    loss_message = LOSS_MESSAGE

    def __init__(self, settings: RemoteSettings) -> None:
        """Read the checkpoint's small files; does not connect. Raises: CheckpointInvalid."""
        engine = f"remote {settings.target.service.value}"
        window = settings.context_window_tokens_max
        model, self._normalized = read_remote_encoder(
            settings.directory, name=settings.name, engine=engine, input_tokens_max=window
        )
        super().__init__(model, settings)
        self._settings = settings
        self._waiting: list[tuple[float, int, _Text]] = []  # min-heap by rank, then by arrival
        self._waiting_token_count = 0
        self._sent: dict[_Text, asyncio.Task[None]] = {}
        self._texts: set[_Text] = set()  # texts whose caller is waiting
        self._number = self._text_count = self._token_count = 0
        self._dialect: Dialect | None = None  # set while connected
        self._tasks: asyncio.TaskGroup | None = None
        self._running_max = settings.running_sequence_count_max
        self._link = Link(settings)
        self._connected_at_s = -math.inf

    def statistics(self) -> EngineStatistics:
        """Implement `Encoder.statistics` for texts sent from here; one text counts as one step."""
        return EngineStatistics(
            waiting_sequence_count=sum(not text.result.done() for *_, text in self._waiting),
            running_sequence_count=len(self._sent),
            step_count=self._text_count,
            prompt_token_count=self._token_count,
        )

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        self._check_ready()
        if (fault := embedding_fault(request, self._model)) is not None:
            raise fault
        if self._waiting_token_count >= self._settings.waiting_token_count_max:
            raise EngineOverloaded("the encoder's queue is full", OVERLOAD_WAIT_S)
        came_at_s, call = time.monotonic(), _Call(request)
        texts = [_Text(index, call) for index in range(len(request.inputs))]
        for text in texts:
            self._number += 1
            self._waiting_token_count += len(text.token_ids)
            heapq.heappush(self._waiting, (request.rank, self._number, text))
            self._texts.add(text)
        self._fill()
        try:
            vectors = await asyncio.gather(*(text.result for text in texts))
        finally:
            for text in texts:
                self._give_up(text)
        assert call.began_at_s is not None, "a finished call has begun"
        return Embeddings(
            tuple(vectors),
            (call.began_at_s - came_at_s) * 1e3,
            (time.monotonic() - call.began_at_s) * 1e3,
        )

    def _give_up(self, text: _Text) -> None:
        """Drop a text whose caller stopped waiting; if it was sent, cancel its call."""
        self._texts.discard(text)
        text.result.cancel()
        if (task := self._sent.get(text)) is not None:
            task.cancel()

    def _fill(self) -> None:
        """Send queued texts while there is capacity."""
        while self._waiting and self._tasks is not None and len(self._sent) < self._running_max:
            *_, text = heapq.heappop(self._waiting)
            self._waiting_token_count -= len(text.token_ids)
            if text.result.done():
                continue
            if text.call.began_at_s is None:
                text.call.began_at_s = time.monotonic()
                text.call.request.on_begin()
            self._sent[text] = self._tasks.create_task(self._send(text))

    async def _send(self, text: _Text) -> None:
        """Embed one text, and resolve its future with the vector or the error."""
        assert self._dialect is not None, "texts are sent over a connection"
        try:
            vector = await self._vector(self._dialect, text.token_ids)
        except EngineError as error:
            text.fail(error)
        except grpc.aio.AioRpcError as error:
            text.fail(engine_error(error, "text", f"inputs[{text.index}]"))
        except Exception as error:  # an answer that cannot be read; the other texts go on
            Retries("engine").failed(error)
            text.fail(EngineFailed(f"an answer of the engine cannot be read: {error!r:.200}"))
        else:
            self._text_count += 1
            self._token_count += len(text.token_ids)
            if not text.result.done():
                text.result.set_result(vector)
        finally:
            self._sent.pop(text, None)
            self._fill()

    async def _vector(self, dialect: Dialect, token_ids: tuple[int, ...]) -> Vector:
        """Embed one text. Raises EngineFailed for an invalid answer, or grpc.aio.AioRpcError."""
        answer: Any = await dialect.embed(
            f"weir-{uuid.uuid4().hex}", token_ids, self._settings.first_token_timeout_s
        )
        if answer.prompt_tokens not in (0, len(token_ids)):
            raise EngineFailed(
                f"the engine reports a text of {answer.prompt_tokens} tokens, {len(token_ids)} were"
                " sent"
            )
        if len(answer.embedding) != self._model.embedding_dimension:
            raise EngineFailed(
                f"the engine sent {len(answer.embedding)} floats for a vector of"
                f" {self._model.embedding_dimension}"
            )
        vector: Vector = array("f", answer.embedding)
        if not all(map(math.isfinite, vector)):
            raise EngineFailed("the engine sent a vector that is not finite")
        return vector

    async def _run(self) -> str:
        self._connected_at_s = time.monotonic()
        return await self._link.run(self._examine, self._use)

    async def _examine(self, dialect: Dialect) -> None:
        """Check that the server has the expected model and embeds. Raises: ServerUnfit."""
        facts = await Introduction(dialect, self._settings, self._model).introduce()
        running_max = self._settings.running_sequence_count_max
        self._running_max = min(running_max, facts.running_sequence_count_max or running_max)
        try:
            vector = await self._vector(dialect, (self._model.vocabulary_size // 2,))
        except EngineError as error:
            raise ServerUnfit(f"embedding a test text failed: {error}") from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ServerUnfit(
                    "the server does not support embeddings: start it with an embedding model"
                    " (vLLM: --runner pooling)"
                ) from error
            raise
        length = math.sqrt(sum(each * each for each in vector))
        if self._normalized and abs(length - 1.0) > LENGTH_ERROR_MAX:
            raise ServerUnfit(
                f"the checkpoint's vectors have length 1, the server's {length:g}, enable"
                " normalization"
            )

    @contextlib.contextmanager
    def _use(self, dialect: Dialect, tasks: asyncio.TaskGroup) -> Iterator[None]:
        watch = ConnectionWatch(dialect, self._settings, self._link.end)
        tasks.create_task(watch.watch_channel())
        tasks.create_task(watch.poll_often())
        self._dialect, self._tasks = dialect, tasks
        self._now_ready(time.monotonic() - self._connected_at_s)
        try:
            yield
        finally:
            self._tasks = None
            self.unreachable()

    def _begin_shutdown(self) -> None:
        self._link.end("closed")

    def _kill(self) -> None:
        self._link.end_at_once()

    def _fail_waiting(self, reason: str) -> None:
        self._waiting, self._waiting_token_count = [], 0
        for text in self._texts:
            text.fail(self._loss(reason))
