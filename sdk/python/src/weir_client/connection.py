"""Connection to the server: address, TLS, API key, channel options, unary calls with typed errors.

Owns the channel; independent of generations.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import IO, Any, Self, TypeVar, Unpack, cast

import grpc.aio

from weir_client import errors
from weir_client.api_key import CurrentKey, KeySource, checked_key
from weir_client.balancing import ROUND_ROBIN, BalancedChannel
from weir_client.checks import (
    check_end_user,
    check_known,
    check_labels,
    check_retries,
    check_seconds,
    invalid,
)
from weir_client.status import error_from_rpc
from weir_client.tls import Tls, TlsOptions, resolve_tls, without_scheme

DEFAULT_ADDRESS = "127.0.0.1:8443"  # the server's default address
UNARY_TIMEOUT_S = 30.0  # look-ups take milliseconds; a report over a large month may take seconds
MESSAGE_BYTES_MAX = 4 * 1024 * 1024  # gRPC's default limit of a server
RECEIVE_BYTES_MAX = 32 * 1024 * 1024  # far above the largest response of a server
KEEPALIVE_S = 60.0  # below the idle limit of common load balancers (60 to 350 s)
KEEPALIVE_TIMEOUT_S = 20.0  # time without an answer to a ping after which a peer counts as lost
RETRY_BASE_S = 0.1  # first back-off without a retry-after of the server; doubles each time
RETRY_WAIT_MAX_S = 10.0  # the error is raised if the wait would be longer

# Other names of servers that gRPC takes, such as dns:///host:port.
LISTS = ("ipv4:", "ipv6:")  # those that are lists themselves
RESOLVER = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):")
UNARY_OPTIONS = (
    "address",
    "api_key",
    "timeout",
    "max_retries",
)  # of every client, beside those of TLS

# Retries, broken streams and their resumption at INFO, requests at DEBUG; never a prompt or a key.
log = logging.getLogger("weir.client")
log.addHandler(logging.NullHandler())

Addresses = str | Sequence[str]  # several: a list, or with commas between

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


def _version() -> str:
    try:
        return version("weir-client")
    except PackageNotFoundError:  # running from a source tree
        return "0"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Policy of retries: at most `max_retries`, each after at most `wait_max_s` seconds."""

    max_retries: int = 2
    wait_max_s: float = RETRY_WAIT_MAX_S

    def limited(self, max_retries: int | None) -> RetryPolicy:
        """Return this policy with another number of retries; None leaves it unchanged."""
        if max_retries is None:
            return self
        check_retries(max_retries)
        return RetryPolicy(max_retries, self.wait_max_s)

    def wait_s(self, error: errors.WeirError, attempt: int) -> float | None:
        """Return the seconds to wait before retry `attempt` (0 is the first); None to give up.

        The server's retry-after is a lower bound; jitter is added to it so that refused clients do
        not all return at once.
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
        wait_s = (
            random.uniform(spread_s / 2, spread_s)
            if hint_s is None
            else hint_s + random.uniform(0, spread_s)
        )
        return wait_s if (hint_s or 0.0) <= self.wait_max_s else None


@dataclass(frozen=True, slots=True)
class Purpose:
    """Labels and end user of each request of a client, unless a request has its own.

    Raises: InvalidRequest for values of another type.
    """

    labels: Mapping[str, str] | None = None
    end_user: str | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_labels(self.labels or {})
        check_end_user(self.end_user)


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Resolved address and options of a connection. `AsyncClient` documents each of them."""

    address: str
    api_key: KeySource = field(repr=False)
    tls: Tls | None
    max_message_bytes: int = MESSAGE_BYTES_MAX
    keepalive_s: float = KEEPALIVE_S
    retry: RetryPolicy = RetryPolicy()
    timeout_s: float | None = None
    purpose: Purpose = Purpose()

    @classmethod
    def resolve(
        cls,
        address: Addresses | None,
        api_key: KeySource | None,
        *,
        key_variables: Sequence[str] = ("WEIR_API_KEY",),
        max_message_bytes: int = MESSAGE_BYTES_MAX,
        keepalive_s: float = KEEPALIVE_S,
        retry: RetryPolicy | None = None,
        timeout: float | None = None,
        purpose: Purpose | None = None,
        options: Sequence[str] = UNARY_OPTIONS,
        **tls: Unpack[TlsOptions],
    ) -> ConnectionSettings:
        """Take missing values from the environment, and check all values.

        `options` has the names of the client's own options, which the error for an unknown option
        lists. Raises: Unauthenticated if no key is given and none of `key_variables` is set (an
        empty key means a call without one); InvalidRequest for invalid addresses, certificates,
        times and unknown options.
        """
        check_known(tls, (*TlsOptions.__annotations__, *options))
        check_seconds("timeout", timeout)
        check_retries(retry.max_retries if retry else None)
        if timeout is not None and timeout <= 0:
            raise invalid("timeout", f"must be above 0 s, not {timeout!r}; None sets no limit")
        field = "address" if address else "WEIR_ADDRESS"
        target, scheme = resolve_addresses(
            field, address or os.environ.get("WEIR_ADDRESS") or DEFAULT_ADDRESS
        )
        if api_key is None:
            api_key = next(
                (os.environ[name] for name in key_variables if os.environ.get(name)), None
            )
        if api_key is None:
            raise errors.Unauthenticated(
                f"no API key: pass api_key= or set {' or '.join(key_variables)}"
            )
        resolved = resolve_tls(tls, scheme=scheme, local=is_local(target))
        return cls(
            target,
            api_key if callable(api_key) else checked_key(api_key),
            resolved,
            max_message_bytes,
            keepalive_s,
            retry or RetryPolicy(),
            timeout,
            purpose or Purpose(),
        )


def split_addresses(address: str) -> list[str]:
    """Split addresses at their commas. A list that gRPC resolves, such as ipv4:…, is one."""
    if address.startswith(LISTS):
        return [address]
    return [each.strip() for each in address.split(",")]


def resolve_addresses(field: str, given: Addresses) -> tuple[str, bool | None]:
    """Return the addresses without schemes, with commas between, and whether they require TLS.

    Raises: InvalidRequest naming `field`, their source, for an invalid address, or schemes of
    which some mean TLS and others do not.
    """
    addresses = split_addresses(given) if isinstance(given, str) else list(given)
    if not all(isinstance(each, str) for each in addresses):
        raise invalid(field, f"must be a string or a list of strings, not {given!r}")
    parsed = [without_scheme(each) for each in addresses]
    for target, _ in parsed:
        check_address(field, target or ":")
    schemes = {scheme for _, scheme in parsed}
    if len(schemes) > 1:
        raise invalid(
            field, "must have the same scheme for all servers: https:// or http://, or none"
        )
    return ",".join(target for target, _ in parsed), schemes.pop()


def check_address(field: str, address: str) -> None:
    """Check the syntax of an address. Raises: InvalidRequest naming `field`, its source."""
    if RESOLVER.match(address):
        return
    right = "must be host:port, such as weir.example.com:443, or unix:/path"
    if "/" in address:
        wrong = "has a path: the SDK calls gRPC, not the HTTP API"
        raise invalid(field, f"{right}; {address!r} {wrong}")
    host, colon, port = address.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):  # a name or an IPv6 address alone
        return
    if not host or not (port.isdecimal() and 0 < int(port) < 65_536):
        raise invalid(field, f"{right}, with a port from 1 to 65535; got {address!r}")


def is_local(address: str) -> bool:
    """Return whether an address is on this machine: Unix socket, `localhost` or a loopback IP.

    Several addresses are if each of them is.
    """
    if "," in address and not address.startswith(LISTS):
        return all(map(is_local, split_addresses(address)))
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition("/")[2].rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Connection:
    """gRPC channel with its credentials. Create it in the event loop that uses it."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings
        self.key = CurrentKey(settings.api_key)
        self._closing = asyncio.Event()
        self._channels = BalancedChannel(
            [_opened(settings, address) for address in split_addresses(settings.address)]
        )
        self.channel = cast(grpc.aio.Channel, self._channels)  # has what stubs use of it

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return (("authorization", f"Bearer {self.key.text}"),) if self.key.text else ()

    async def connected(self) -> None:
        """Wait until a call can be made: for a server, if there are several, and for a key.

        Raises: WeirError.
        """
        await self._channels.connected()
        if self._closing.is_set():
            raise errors.Cancelled("the client was closed")
        await self.key.renew()

    async def close(self) -> None:
        """Close the channel. Calls that still run or wait for a retry end as Cancelled."""
        self._closing.set()
        await self._channels.close()

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        *,
        timeout: float | None = None,
        max_retries: int | None = None,
        idempotent: bool = True,
    ) -> _Response:
        """Make one unary call. `timeout` is in seconds and includes retries; None means 30 s.

        `max_retries` replaces the client's. Only an idempotent call is retried, since after
        UNAVAILABLE the server may have run it. Raises: WeirError.
        """
        return await self._attempt(
            lambda remaining_s: method(
                request, timeout=remaining_s, metadata=grpc.aio.Metadata(*self.metadata)
            ),
            self._limit_s(timeout),
            self.settings.retry.limited(max_retries) if idempotent else None,
        )

    def _limit_s(self, timeout: float | None) -> float:
        """Choose the time limit of a unary call: its own, the client's, or the default."""
        return next(
            each for each in (timeout, self.settings.timeout_s, UNARY_TIMEOUT_S) if each is not None
        )

    async def collect(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[_Request, _Response],
        request: _Request,
        *,
        timeout: float,
    ) -> list[_Response]:
        """Collect all responses of a read-only streaming call, retried from the start like `call`.

        Raises: WeirError.
        """

        async def read(remaining_s: float) -> list[_Response]:
            stream = method(
                request, timeout=remaining_s, metadata=grpc.aio.Metadata(*self.metadata)
            )
            return [response async for response in stream]

        return await self._attempt(read, timeout, self.settings.retry)

    async def save(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[_Request, _Response],
        request: _Request,
        file: IO[bytes],
        *,
        timeout: float,
    ) -> None:
        """Write the chunks of all responses to a file, retried from its start like `call`.

        Raises: WeirError.
        """

        async def read(remaining_s: float) -> None:
            file.seek(0)
            file.truncate()
            stream = method(
                request, timeout=remaining_s, metadata=grpc.aio.Metadata(*self.metadata)
            )
            async for response in stream:
                file.write(cast(Any, response).chunk)

        await self._attempt(read, timeout, self.settings.retry)

    async def _attempt(
        self,
        call: Callable[[float], Awaitable[_Response]],
        timeout: float,
        retry: RetryPolicy | None,
    ) -> _Response:
        """Make a call within `timeout` seconds, with the retries of a policy, if there is one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        attempt, is_renewed = 0, False
        while True:
            if self._closing.is_set():
                raise errors.Cancelled("the client is closed")
            try:
                with contextlib.suppress(TimeoutError):  # the call then fails with the reason
                    async with asyncio.timeout_at(deadline):
                        await self.connected()
                key = self.key.text
                return await call(max(0.0, deadline - loop.time()))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._closing.is_set() or task is None or task.cancelling():
                    raise
                # gRPC cancelled only the call.
                raise errors.Cancelled("the client was closed") from None
            except grpc.aio.AioRpcError as broken:
                error = error_from_rpc(broken, tried=tried(self.settings))
                is_refused = isinstance(error, errors.Unauthenticated) and self.key.refused(key)
                if is_refused and not is_renewed:
                    is_renewed = True  # the call has not run, so it may be repeated
                    continue
                wait_s = retry.wait_s(error, attempt) if retry is not None else None
                if wait_s is None or loop.time() + wait_s >= deadline:
                    raise error from broken
                log.info("call failed (%s): retry %d in %.2f s", error, attempt + 1, wait_s)
            attempt += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._closing.wait()


def tried(settings: ConnectionSettings) -> str:
    """Format the address and whether TLS is used, for the message of a failed connection."""
    how = "without TLS" if settings.tls is None else "with TLS"
    return f"{settings.address} {how}"


class LazyClient:
    """Base of the asyncio clients. Connects on first use, or when its `async with` block begins."""

    # A blocking twin has an event loop of its own, and calls from threads with others.
    _checks_loop = True

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._connection: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_entered = self._is_closed = False

    @property
    def address(self) -> str:
        """Address of the server; several with commas between."""
        return self._settings.address

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    async def aclose(self) -> None:
        """Close the connection and cancel running calls. The client cannot be used afterwards."""
        connection, self._connection = self._connection, None
        self._is_closed, self._is_entered = True, False
        if connection is not None and self._loop is asyncio.get_running_loop():
            await self._close(connection)

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise RuntimeError("this client is open already")
        self._is_closed = False
        self._opened()
        self._is_entered = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _opened(self) -> Connection:
        """Return the connection, opened if this is the first use in this event loop.

        Raises: RuntimeError if the client is closed, or belongs to another running event loop.
        """
        if self._connection is not None and not self._checks_loop:
            return self._connection
        if self._is_closed:
            raise RuntimeError(
                "the client is closed: make a new one, or close it after its last use"
            )
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "an asyncio client needs a running event loop: call it in a coroutine that"
                " asyncio.run runs, or use the blocking client of the same name without `Async`"
            ) from None
        if self._connection is not None and self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError(
                    "the client belongs to another event loop, which still runs: make one client"
                    " in each event loop, or use the blocking client, which any thread can call"
                )
            self._connection = None  # it ended with its event loop
        if self._connection is None:
            self._loop = loop
            self._connection = Connection(self._settings)
            self._open(self._connection)
        return self._connection

    def _open(self, connection: Connection) -> None:
        """Prepare the parts of the client that need the new connection. Subclasses extend it."""

    async def _close(self, connection: Connection) -> None:
        await connection.close()


def _opened(settings: ConnectionSettings, address: str) -> grpc.aio.Channel:
    options = _channel_options(settings, address)
    if settings.tls is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, settings.tls.credentials(), options)


def _channel_options(settings: ConnectionSettings, address: str) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.primary_user_agent", f"weir-client/{_version()}"),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", max(RECEIVE_BYTES_MAX, settings.max_message_bytes)),
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 0),
        # Fast reconnection to a restarted server: gRPC's default delays grow from 1 s to minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 5000),
        # One subchannel per client, so that the back-off or GOAWAY of one does not affect another.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if is_local(address):
        # A proxy cannot reach this machine's loopback.
        options.append(("grpc.enable_http_proxy", 0))
    else:
        options.append(ROUND_ROBIN)
    return options
