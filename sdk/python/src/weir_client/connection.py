"""How a client reaches the server: address, TLS, API key, channel options, and one unary call with typed errors.

Owns the channel. Knows nothing of generations.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar, Unpack

import grpc.aio

from weir_client import errors
from weir_client.checks import check_known
from weir_client.status import error_from_rpc
from weir_client.tls import Tls, TlsOptions, resolve_tls, without_scheme

DEFAULT_ADDRESS = "127.0.0.1:8443"  # where a server listens unless told otherwise
UNARY_TIMEOUT_S = 30.0  # look-ups answer in milliseconds; a report over a large month may take seconds
MESSAGE_BYTES_MAX = 4 * 1024 * 1024  # gRPC's own default for what a server accepts
RECEIVE_BYTES_MAX = 32 * 1024 * 1024  # lists and batched deltas of many requests; far above what a server sends at once
KEEPALIVE_S = 60.0  # below the idle limit of common load balancers (60 to 350 s); Weir's server allows pings each 10 s
KEEPALIVE_TIMEOUT_S = 20.0  # a peer that does not answer a ping for so long is gone
RETRY_BASE_S = 0.1  # first back-off where the server gives no hint; doubles each time
RETRY_WAIT_MAX_S = 10.0  # a longer wait is the caller's decision, so the error is raised instead

CLIENT_OPTIONS = ("address", "api_key", "timeout", "max_retries", "retry_wait_max_s", "max_message_bytes", "keepalive_s")

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


def _version() -> str:
    try:
        return version("weir-client")
    except PackageNotFoundError:  # a source tree on the path
        return "0"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to try again: at most `max_retries` times, never after a wait of more than `wait_max_s`."""

    max_retries: int = 2
    wait_max_s: float = RETRY_WAIT_MAX_S

    def wait_s(self, error: errors.WeirError, attempt: int) -> float | None:
        """Seconds to wait before retry number `attempt` (from 0), with jitter; None if the error is to be raised.

        A hint of the server is a lower bound, and the jitter comes on top, so that refused clients do not return all at once.
        """
        if attempt >= self.max_retries:
            return None
        hint_s = error.retry_after_s
        if isinstance(error, errors.QuotaExceeded):
            if hint_s is None or not error.retry_helps:
                return None
        elif not isinstance(error, errors.Unavailable):
            return None
        spread_s = RETRY_BASE_S * 2**attempt
        wait_s = random.uniform(spread_s / 2, spread_s) if hint_s is None else hint_s + random.uniform(0, spread_s)
        return wait_s if (hint_s or 0.0) <= self.wait_max_s else None


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Where the server is and how to talk to it. See `AsyncClient` for the meaning of each."""

    address: str
    api_key: str = field(repr=False)
    tls: Tls | None
    max_message_bytes: int = MESSAGE_BYTES_MAX
    keepalive_s: float = KEEPALIVE_S
    retry: RetryPolicy = RetryPolicy()

    @classmethod
    def resolve(
        cls,
        address: str | None,
        api_key: str | None,
        *,
        key_variables: Sequence[str] = ("WEIR_API_KEY",),
        max_message_bytes: int = MESSAGE_BYTES_MAX,
        keepalive_s: float = KEEPALIVE_S,
        retry: RetryPolicy | None = None,
        **tls: Unpack[TlsOptions],
    ) -> ConnectionSettings:
        """Fills in what is not given from the environment.

        Raises: Unauthenticated if no key is given and none of `key_variables` is set (an empty key means: call without one);
        InvalidRequest for certificates that cannot be used, and for options that there are not.
        """
        check_known(tls, (*TlsOptions.__annotations__, *CLIENT_OPTIONS))
        target, scheme = without_scheme(address or os.environ.get("WEIR_ADDRESS") or DEFAULT_ADDRESS)
        if api_key is None:
            api_key = next((os.environ[name] for name in key_variables if os.environ.get(name)), None)
        if api_key is None:
            raise errors.Unauthenticated(f"no API key: pass api_key= or set {' or '.join(key_variables)}")
        if not api_key.isascii():
            raise errors.Unauthenticated("the API key holds characters that no key has; was it copied in full?")
        resolved = resolve_tls(tls, scheme=scheme, local=is_local(target))
        return cls(target, api_key.strip(), resolved, max_message_bytes, keepalive_s, retry or RetryPolicy())


def is_local(address: str) -> bool:
    """Whether an address never leaves this machine: a unix socket, `localhost`, or a loopback IP."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition("/")[2].rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Connection:
    """One channel with its credentials. Create it inside the event loop that uses it; `close` it at the end."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings
        self.metadata: tuple[tuple[str, str], ...] = ()
        if settings.api_key:
            self.metadata = (("authorization", f"Bearer {settings.api_key}"),)
        self._closing = asyncio.Event()
        options = _channel_options(settings)
        if settings.tls is not None:
            self.channel = grpc.aio.secure_channel(settings.address, settings.tls.credentials(), options)
        else:
            self.channel = grpc.aio.insecure_channel(settings.address, options)

    async def close(self) -> None:
        """Closes the channel; calls that still run, or wait to be made again, end as Cancelled."""
        self._closing.set()
        await self.channel.close()

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        *,
        timeout: float | None = None,
        idempotent: bool = True,
    ) -> _Response:
        """One unary call; `timeout` in seconds covers the retries too, and is 30 s if None.

        Only an idempotent call is tried again: whether one that creates something was done is not known after UNAVAILABLE.
        Raises: WeirError.
        """
        return await self._attempt(
            lambda remaining_s: method(request, timeout=remaining_s, metadata=grpc.aio.Metadata(*self.metadata)),
            UNARY_TIMEOUT_S if timeout is None else timeout,
            idempotent=idempotent,
        )

    async def collect(
        self, method: grpc.aio.UnaryStreamMultiCallable[_Request, _Response], request: _Request, *, timeout: float
    ) -> list[_Response]:
        """All answers of one call that streams them and changes nothing; tried again from the start like `call`.

        Raises: WeirError.
        """

        async def read(remaining_s: float) -> list[_Response]:
            stream = method(request, timeout=remaining_s, metadata=grpc.aio.Metadata(*self.metadata))
            return [response async for response in stream]

        return await self._attempt(read, timeout, idempotent=True)

    async def _attempt(self, call: Callable[[float], Awaitable[_Response]], timeout: float, *, idempotent: bool) -> _Response:
        """Makes a call of what is left of the time, and again if that may help."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        attempt = 0
        while True:
            if self._closing.is_set():
                raise errors.Cancelled("the client is closed")
            try:
                return await call(max(0.0, deadline - loop.time()))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._closing.is_set() or task is None or task.cancelling():
                    raise
                raise errors.Cancelled("the client was closed") from None  # gRPC cancels the call, and nobody the caller
            except grpc.aio.AioRpcError as broken:
                error = error_from_rpc(broken)
                wait_s = self.settings.retry.wait_s(error, attempt) if idempotent else None
                if wait_s is None or loop.time() + wait_s >= deadline:
                    raise error from broken
            attempt += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._closing.wait()


def _channel_options(settings: ConnectionSettings) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.primary_user_agent", f"weir-client/{_version()}"),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", max(RECEIVE_BYTES_MAX, settings.max_message_bytes)),
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 0),
        # A restarted server is found again quickly: gRPC would wait a second before the second attempt and minutes later on.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 5000),
        # Clients in one process keep their own connections, so that one's back-off or GOAWAY is not the other's.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if is_local(settings.address):
        options.append(("grpc.enable_http_proxy", 0))  # a proxy for the outside cannot reach this machine's loopback
    return options
