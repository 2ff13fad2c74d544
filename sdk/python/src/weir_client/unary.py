"""Base of the clients of unary calls."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, Unpack

from grpc.aio import UnaryUnaryMultiCallable

from weir_client import wire
from weir_client.api_key import KeySource
from weir_client.checks import check_known
from weir_client.connection import (
    UNARY_OPTIONS,
    UNARY_TIMEOUT_S,
    Addresses,
    ConnectionSettings,
    LazyClient,
    RetryPolicy,
)
from weir_client.tls import TlsOptions

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Item = TypeVar("_Item")
_Arguments = ParamSpec("_Arguments")


class UnaryClient(LazyClient):
    """Base of the asyncio clients of unary calls, which owns their settings and connection."""

    key_variables: ClassVar[tuple[str, ...]] = ("WEIR_ADMIN_KEY", "WEIR_API_KEY")

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
        check_known(tls, (*TlsOptions.__annotations__, *UNARY_OPTIONS))
        super().__init__(
            ConnectionSettings.resolve(
                address,
                api_key,
                key_variables=self.key_variables,
                retry=RetryPolicy(max_retries),
                timeout=timeout,
                **tls,
            )
        )
        self._timeout_s = timeout

    async def _call(
        self,
        method: UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        *,
        idempotent: bool = True,
    ) -> _Response:
        return await self._opened().call(
            method, request, timeout=self._timeout_s, idempotent=idempotent
        )

    async def _list(
        self,
        kind: type[_Item],
        field: str,
        method: UnaryUnaryMultiCallable[_Request, Any],
        request: _Request,
    ) -> list[_Item]:
        """Call `method` and convert the messages in `field` of its response to `kind`."""
        response = await self._call(method, request)
        return [wire.read(kind, each) for each in getattr(response, field)]

    async def _pages(
        self, method: UnaryUnaryMultiCallable[Any, _Response], request: Any
    ) -> AsyncIterator[_Response]:
        """Yield the pages of a list. Each page is fetched when the caller asks for it."""
        while True:
            response: Any = await self._call(method, request)
            yield response
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token


def items_of(
    pages: Callable[Concatenate[Any, _Arguments], AsyncIterator[Sequence[_Item]]],
) -> Callable[Concatenate[Any, _Arguments], AsyncIterator[_Item]]:
    """Wrap a method that yields pages in one that yields their items (see `blocking_items`)."""

    @functools.wraps(pages)
    async def items(
        self: Any, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> AsyncIterator[_Item]:
        async for page in pages(self, *args, **kwargs):
            for each in page:
                yield each

    return items
