"""Results with cumulative lists; statistics iterators that end when idle."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any


class RequestError(RuntimeError):
    """Failure of one request."""


@dataclasses.dataclass
class Logprob:
    """Log-probability of a token at a position."""

    logprob: float
    rank: int | None = None


@dataclasses.dataclass
class CompletionOutput:
    """One output. Lists are cumulative; the diffs contain the last response."""

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Any] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    _last_token_ids_len: int = 0
    _last_text_len: int = 0

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        """Return the part added by the last response."""
        return self.token_ids[self._last_token_ids_len :]

    @property
    def text_diff(self) -> str:
        """Return the part added by the last response."""
        return self.text[self._last_text_len :]


@dataclasses.dataclass
class Response:
    """Response of the engine to a request: all token ids so far, or an error."""

    token_ids: list[int]
    logprobs: list[Any]
    cached_tokens: int
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None


class RequestOutput:
    """Awaitable and iterable result, bound to its loop."""

    def __init__(
        self, request_id: int, prompt_token_ids: list[int], abort: Callable[[RequestOutput], None]
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.cached_tokens = 0
        self.outputs = [CompletionOutput(0)]
        self.finished = False
        self._aborted = False
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._responses: asyncio.Queue[Response] = asyncio.Queue()

    @property
    def prompt(self) -> str | None:
        """Always None: the prompt was given as ids."""
        return None

    def abort(self) -> None:
        """Tell the engine, and nothing else."""
        self._abort(self)
        self._aborted = True

    def aborted(self) -> bool:
        """True if an abort was requested, even if it has not happened."""
        return self._aborted

    def put(self, response: Response) -> None:
        """Add a response. Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no caller waits
            self._loop.call_soon_threadsafe(self._responses.put_nowait, response)

    def _handle(self, response: Response) -> None:
        if response.error is not None:
            raise response.error
        output = self.outputs[0]
        output._last_token_ids_len, output._last_text_len = len(output.token_ids), len(output.text)
        output.token_ids, output.text, output.logprobs = (
            response.token_ids,
            response.text,
            response.logprobs,
        )
        output.finish_reason, output.stop_reason = response.finish_reason, response.stop_reason
        self.cached_tokens = response.cached_tokens
        self.finished = response.finish_reason is not None

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        self._handle(await self._responses.get())
        return self

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        raise NotImplementedError("the adapter is asynchronous")

    def result(self, timeout: float | None = None) -> RequestOutput:
        raise NotImplementedError("the adapter is asynchronous")

    async def aresult(self) -> RequestOutput:
        """Wait for the end."""
        async for _ in self:
            pass
        return self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()


class IterationResult:
    """Shared statistics or events; ends after a silent timeout."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._timeout = 2.0
        self._done = True

    def put(self, entry: dict[str, Any]) -> None:
        """Add an entry. Called by the engine's thread."""
        self._queue.put(entry)

    def set_timeout(self, timeout: float) -> None:
        """Set the seconds to wait for the next entry."""
        self._timeout = timeout

    def mark_undone(self) -> None:
        """Note that a request was submitted."""
        self._done = False

    def get_results(self) -> list[dict[str, Any]]:
        """Return the entries so far."""
        entries = []
        while not self._queue.empty():
            entries.append(self._queue.get())
        return entries

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        waited = 0.0
        while self._queue.empty():
            if waited >= self._timeout:
                self._done = True
                raise StopAsyncIteration
            await asyncio.sleep(0.01)
            waited += 0.01
        return self._queue.get()
