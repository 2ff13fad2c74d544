"""Blocking twin of the asyncio client: the same calls, usable from many threads at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Self, Unpack

from weir_client.aio import AsyncClient
from weir_client.blocking import BlockingClient, blocking
from weir_client.connection import KEEPALIVE_S, MESSAGE_BYTES_MAX, RETRY_WAIT_MAX_S
from weir_client.generation import AsyncGeneration
from weir_client.loop_thread import LoopThread
from weir_client.money import Money
from weir_client.options import AttachOptions, GenerateOptions, Prompt
from weir_client.tls import TlsOptions
from weir_client.values import Admitted, Delta, Event, Limits, Partial, Result


class GenerationStream:
    """Stream of one answer, made by `Client.generate`. Nothing is sent before the first use.

    Leaving the `with` block cancels a running request and waits (at most 2 s) until the server has
    settled it, so that `result` has usage and cost. Breaking out of `for`, and an interrupt
    (Ctrl-C), cancel it as well; `next(stream)` takes single deltas without that. One thread reads;
    `cancel` may be called from any.

    >>> with client.generate("demo", "Which hotel has a pool?", max_output_tokens=20) as stream:
    ...     text = "".join(delta.text for delta in stream)
    >>> text == stream.result.text
    True
    """

    def __init__(
        self, thread: LoopThread[AsyncClient], generation: AsyncGeneration, owner: Client
    ) -> None:
        """Wrap a generation that runs in `thread`.

        The stream keeps its client, `owner`, open as long as it is used.
        """
        self._owner = owner
        self._thread = thread
        self._generation = generation
        self._unread: deque[Event] = deque()

    @property
    def request_id(self) -> str:
        """Id of the request, and its idempotency key."""
        return self._generation.request_id

    @property
    def model(self) -> str:
        """Model that the request asked for."""
        return self._generation.model

    @property
    def admitted(self) -> Admitted | None:
        """Admission, with input tokens and remaining quotas; None before it arrives."""
        return self._generation.admitted

    @property
    def resume_count(self) -> int:
        """Number of times the request moved to another stream."""
        return self._generation.resume_count

    @property
    def partial(self) -> Partial:
        """Output received so far, whether or not the request has ended."""
        return self._generation.partial

    @property
    def done(self) -> bool:
        """True if the request has ended, with any outcome."""
        return self._generation.done

    @property
    def result(self) -> Result:
        """Whole answer with finish reason, usage and cost. After a cancel, the delivered part.

        Raises: the WeirError that the request ended with; RuntimeError while it still runs.
        """
        return self._generation.result

    def cancel(self) -> None:
        """Ask the server to stop, without waiting. Output up to that point can still be read."""
        self._thread.run_soon(self._generation.cancel)

    def update(
        self, *, max_output_tokens: int | None = None, max_cost: Money | None = None
    ) -> Limits:
        """Change the limits of the running request; see `AsyncGeneration.update`.

        May be called from any thread. Raises: WeirError.
        """
        return self._thread.run(
            lambda: self._generation.update(max_output_tokens=max_output_tokens, max_cost=max_cost)
        )

    def close(self) -> None:
        """Cancel the request if it still runs, and wait at most 2 s. Raises no WeirError."""
        self._thread.run(self._generation.aclose)

    def wait(self) -> Result:
        """Wait for the end of the request and return its result. Raises: WeirError."""
        return self._thread.run(self._generation.wait)

    def events(self) -> Iterator[Event]:
        """Yield every event: `Admitted`, `Progress`, `Delta`, `UsageUpdate`, `Resumed`."""
        while (event := self._next_event()) is not None:
            yield event

    def __iter__(self) -> Iterator[Delta]:
        """Iterate over the deltas. Leaving the iterator early (`break`) cancels the request."""
        return _Deltas(self)

    def __next__(self) -> Delta:
        while (event := self._next_event()) is not None:
            if isinstance(event, Delta):
                return event
        raise StopIteration

    def __enter__(self) -> Self:
        self._thread.run(self._begin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _next_event(self) -> Event | None:
        if self._generation.holds_back:  # one by one, so that credit follows what is read
            return self._thread.run(self._generation.next_event)
        if not self._unread:
            self._unread.extend(self._thread.run(self._generation.take))
        return self._unread.popleft() if self._unread else None

    async def _begin(self) -> None:
        self._generation.start()


class _Deltas:
    """Iterator over the deltas of a generation. Dropping it early cancels the generation."""

    def __init__(self, stream: GenerationStream) -> None:
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        return next(self._stream)

    def __del__(self) -> None:
        if not self._stream.done:
            self._stream.cancel()


class Client(BlockingClient[AsyncClient]):
    """Blocking client of the inference API, which connects on first use.

    Close it with `close()`, or use it as `with Client() as client`. `AsyncClient` documents every
    argument.

    >>> client = Client()
    >>> result = client.complete("demo", "Which hotel has a pool?", max_output_tokens=20)
    >>> result.usage.billed_token_count <= 20
    True
    """

    def __init__(
        self,
        address: str | None = None,
        api_key: str | None = None,
        *,
        max_retries: int = 2,
        retry_wait_max_s: float = RETRY_WAIT_MAX_S,
        max_message_bytes: int = MESSAGE_BYTES_MAX,
        keepalive_s: float = KEEPALIVE_S,
        timeout: float | None = None,
        **tls: Unpack[TlsOptions],
    ) -> None:
        """Resolve the settings; the client connects on first use.

        See `AsyncClient` for the arguments. Raises: Unauthenticated without a key; InvalidRequest
        for invalid settings.
        """
        client = AsyncClient(
            address,
            api_key,
            max_retries=max_retries,
            retry_wait_max_s=retry_wait_max_s,
            max_message_bytes=max_message_bytes,
            keepalive_s=keepalive_s,
            timeout=timeout,
            **tls,
        )
        super().__init__(client)

    def generate(
        self, model: str, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerationStream:
        """Stream an answer. See `AsyncClient.generate` for arguments and errors."""
        self._thread.open()
        generation = self._client.generate(model, prompt, **options)
        return GenerationStream(self._thread, generation, self)

    def attach(self, request_id: str, **options: Unpack[AttachOptions]) -> GenerationStream:
        """Receive a request that any client started earlier; see `AsyncClient.attach`."""
        self._thread.open()
        return GenerationStream(self._thread, self._client.attach(request_id, **options), self)

    complete = blocking(AsyncClient.complete)
    count_tokens = blocking(AsyncClient.count_tokens)
    quote = blocking(AsyncClient.quote)
    quote_embed = blocking(AsyncClient.quote_embed)
    embed = blocking(AsyncClient.embed)
    list_models = blocking(AsyncClient.list_models)
    get_quota = blocking(AsyncClient.get_quota)
    get_restrictions = blocking(AsyncClient.get_restrictions)
    get_generation = blocking(AsyncClient.get_generation)
    usage = blocking(AsyncClient.usage)
