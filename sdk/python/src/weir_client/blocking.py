"""Blocking twins of asyncio clients, which run in a thread of their own."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack

from weir_client.api_key import KeySource
from weir_client.connection import UNARY_TIMEOUT_S, Addresses
from weir_client.loop_thread import LoopThread
from weir_client.tls import TlsOptions
from weir_client.unary import UnaryClient

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class AddressedClient(Protocol):
    """Protocol of the asyncio clients that a blocking client can wrap."""

    _checks_loop: bool

    @property
    def address(self) -> str:
        """Address of the server."""

    async def __aenter__(self) -> Any:
        """Open the client."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        """Close the client."""


_AsyncClient = TypeVar("_AsyncClient", bound=AddressedClient)


class BlockingClient(Generic[_AsyncClient]):
    """Base of the blocking clients. Any number of threads can use one; it connects on first use."""

    def __init__(self, client: _AsyncClient) -> None:
        client._checks_loop = False
        self._client = client
        self._thread = LoopThread(client)

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._client.address

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    def close(self) -> None:
        """Close the connection and cancel running calls. The client cannot be used afterwards."""
        self._thread.close()

    def __del__(self) -> None:
        if (thread := getattr(self, "_thread", None)) is not None:  # the settings were valid
            thread.forget()

    def __enter__(self) -> Self:
        self._thread.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class BlockingUnaryClient(BlockingClient[UnaryClient]):
    """Base of the blocking clients of unary calls. `_async_class` is the asyncio client to run."""

    _async_class: type[UnaryClient]

    def __init__(
        self,
        address: Addresses | None = None,
        api_key: KeySource | None = None,
        *,
        timeout: float = UNARY_TIMEOUT_S,
        max_retries: int = 2,
        **tls: Unpack[TlsOptions],
    ) -> None:
        """Store the settings; the client connects on first use.

        Args:
            address: `host:port`, `unix:/path`, or either after `https://` or `http://`; default
                `WEIR_ADDRESS`, then this machine. Several servers: a list, or commas between.
            api_key: The key; default `WEIR_ADMIN_KEY`, then `WEIR_API_KEY`. An empty text calls
                without a key. Or a function that returns a token.
            timeout: Seconds for each call, retries included.
            max_retries: Further attempts of calls that can be repeated, for UNAVAILABLE and for a
                quota that resets soon.
            **tls: Options of TLS: `tls`, `root_certificates`, `client_certificate`,
                `client_key`.

        Raises:
            Unauthenticated: There is no key.
            InvalidRequest: An option is unknown or has an invalid value.
        """
        super().__init__(
            self._async_class(address, api_key, timeout=timeout, max_retries=max_retries, **tls)
        )


def blocking(
    call: Callable[Concatenate[_AsyncClient, _Arguments], Coroutine[Any, Any, _Result]],
) -> Callable[Concatenate[Any, _Arguments], _Result]:
    """Wrap an asyncio method in a blocking one with the same signature and errors."""

    @functools.wraps(call)
    def wait(self: Any, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        result: _Result = self._thread.run(lambda: call(self._client, *args, **kwargs))
        return result

    return wait


def blocking_items(
    pages: Callable[Concatenate[_AsyncClient, _Arguments], AsyncIterator[Sequence[_Result]]],
) -> Callable[Concatenate[Any, _Arguments], Iterator[_Result]]:
    """Wrap an asyncio method that yields pages in a blocking one that yields their items."""

    @functools.wraps(pages)
    def items(
        self: Any, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Iterator[_Result]:
        unread = pages(self._client, *args, **kwargs)

        async def next_page() -> Sequence[_Result] | None:
            return await anext(unread, None)

        while (page := self._thread.run(next_page)) is not None:
            yield from page

    return items
