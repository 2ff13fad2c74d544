"""What the admin and billing clients share: where to connect, opening, closing, one call."""

from __future__ import annotations

from types import TracebackType
from typing import ClassVar, Self, TypeVar, Unpack

from grpc.aio import UnaryUnaryMultiCallable

from weir_client.connection import UNARY_TIMEOUT_S, Connection, ConnectionSettings
from weir_client.tls import TlsOptions

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class UnaryClient:
    """A client of unary calls only: opening, closing, and where to connect."""

    key_variables: ClassVar[tuple[str, ...]] = ("WEIR_ADMIN_KEY", "WEIR_API_KEY")

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
        self._settings = ConnectionSettings.resolve(address, api_key, key_variables=self.key_variables, **tls)
        self._timeout_s = timeout
        self._connection: Connection | None = None

    @property
    def address(self) -> str:
        """Where this client connects to."""
        return self._settings.address

    async def __aenter__(self) -> Self:
        if self._connection is not None:
            raise RuntimeError("this client is open already")
        self._connection = Connection(self._settings)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _opened(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("the client is not open: use it inside its `with` or `async with` block")
        return self._connection

    async def _call(
        self, method: UnaryUnaryMultiCallable[_Request, _Response], request: _Request, *, idempotent: bool = True
    ) -> _Response:
        return await self._opened().call(method, request, timeout=self._timeout_s, idempotent=idempotent)
