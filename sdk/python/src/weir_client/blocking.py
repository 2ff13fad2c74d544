"""What the blocking clients share: an asyncio client in a thread of its own, and its calls made to wait."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack

from weir_client.connection import UNARY_TIMEOUT_S
from weir_client.loop_thread import LoopThread
from weir_client.tls import TlsOptions
from weir_client.unary import UnaryClient

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class AddressedClient(Protocol):
    """An asyncio client, as far as its blocking twin needs it."""

    @property
    def address(self) -> str:
        """Where it connects to."""

    async def __aenter__(self) -> Any:
        """Open it."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Close it."""


_AsyncClient = TypeVar("_AsyncClient", bound=AddressedClient)


class BlockingClient(Generic[_AsyncClient]):
    """To be used as `with` block, from any number of threads at once."""

    def __init__(self, client: _AsyncClient) -> None:
        self._client = client
        self._thread = LoopThread(client)

    @property
    def address(self) -> str:
        """Where this client connects to."""
        return self._client.address

    def __enter__(self) -> Self:
        self._thread.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.close()


class BlockingUnaryClient(BlockingClient[UnaryClient]):
    """The twin of a client of unary calls: which one, its subclass says."""

    _async_class: type[UnaryClient]

    def __init__(
        self,
        address: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = UNARY_TIMEOUT_S,
        **tls: Unpack[TlsOptions],
    ) -> None:
        """Settles where to connect: see `AsyncClient`. The key comes from `WEIR_ADMIN_KEY` first, then `WEIR_API_KEY`.

        timeout: seconds for each call, retries included. Raises: Unauthenticated if there is no key.
        """
        super().__init__(self._async_class(address, api_key, timeout=timeout, **tls))


def blocking(
    call: Callable[Concatenate[_AsyncClient, _Arguments], Coroutine[Any, Any, _Result]],
) -> Callable[Concatenate[Any, _Arguments], _Result]:
    """A method of the asyncio client as one of its blocking twin: the same arguments, result, errors and documentation."""

    @functools.wraps(call)
    def wait(self: Any, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        result: _Result = self._thread.run(lambda: call(self._client, *args, **kwargs))
        return result

    return wait


def blocking_items(
    pages: Callable[Concatenate[_AsyncClient, _Arguments], AsyncIterator[Sequence[_Result]]],
) -> Callable[Concatenate[Any, _Arguments], Iterator[_Result]]:
    """A method of the asyncio client that yields pages as one of its blocking twin that yields their items."""

    @functools.wraps(pages)
    def items(self: Any, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Iterator[_Result]:
        unread = pages(self._client, *args, **kwargs)

        async def next_page() -> Sequence[_Result] | None:
            return await anext(unread, None)

        while (page := self._thread.run(next_page)) is not None:
            yield from page

    return items
