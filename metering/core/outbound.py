"""Outgoing requests to URLs that customers choose: which are allowed, and reads of documents.

They are sent from inside the operator's network. Unless the operator allows more, only https and
public addresses are used: a name is resolved once, and the checked address itself is connected to,
so a later change of the name has no effect. No redirect is followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from importlib.metadata import version
from socket import AddressFamily
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from metering.core.errors import InvalidValue

URL_CHARS_MAX = 2000
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # the last 32 bits are an IPv4 address
# Networks that some versions of Python treat as global although they are not: addresses of cloud
# services reachable only from their machines (the first network has Oracle's, the second is
# Azure's), and reserved or deprecated networks.
NOT_PUBLIC = tuple(
    ipaddress.ip_network(each)
    for each in (
        "192.0.0.0/24",
        "168.63.129.16/32",
        "192.88.99.0/24",
        "fec0::/10",
        "3fff::/20",
        "64:ff9b:1::/48",
    )
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
NO_HEADERS: Mapping[str, str] = {}
USER_AGENT = f"weir/{version('weir-server')}"


class AddressRefused(Exception):
    """A host resolves to no address that may be called."""


class DocumentUnread(Exception):
    """A document cannot be read; the text says why, without the URL."""


def checked_url(
    url: str,
    *,
    private: bool,
    setting: str,
    field: str = "url",
    example: str = "https://example.com",
) -> str:
    """Validate a URL and return it unchanged. The host name is not resolved.

    `private` also allows plain HTTP and private addresses; `setting` is the operator's setting that
    does. `field` and `example` are for the error. Raises: InvalidValue.
    """
    if not url.isascii() or not url.isprintable() or " " in url or len(url) > URL_CHARS_MAX:
        raise InvalidValue(
            field, f"must have at most {URL_CHARS_MAX} printable ASCII characters without spaces"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise InvalidValue(field, f"{error}: write it as {example}") from error
    if parts.scheme not in ("https", "http") or not host or port == 0:
        raise InvalidValue(field, f"must be a URL such as {example}")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise InvalidValue(field, "must not contain a user, password or fragment")
    if parts.scheme == "http" and not private:
        raise InvalidValue(field, f"must use https, unless the operator sets {setting}=1")
    if (address := literal(host)) is not None and not private and not is_public(address):
        raise InvalidValue(
            field,
            f"{host} is not a public address: use another, or let the operator set {setting}=1",
        )
    return url


def literal(host: str) -> Address | None:
    """Parse a host as an IP address; return None if it is a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Return True if an address, and any IPv4 address embedded in it, is publicly routable."""
    if address in NAT64:  # the embedded IPv4 address decides
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    if (
        not address.is_global
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    ):
        return False
    if any(address in network for network in NOT_PUBLIC):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    return all(is_public(each) for each in inner if each is not None)


async def resolve_allowed(host: str, port: int, *, private: bool) -> list[ResolveResult]:
    """Resolve a host and return the addresses that a webhook may call.

    `private` allows all addresses. Raises: AddressRefused if none is allowed; OSError.
    """
    resolved = [
        ResolveResult(hostname=host, host=str(at[0]), port=port, family=family, proto=0, flags=0)
        for family, _, _, _, at in await resolve(host, port)
    ]
    allowed = [
        each
        for each in resolved
        if private or ((address := literal(each["host"])) is not None and is_public(address))
    ]
    if not allowed:
        raise AddressRefused(f"{host} does not resolve to a public address")
    return allowed


Resolution = list[tuple[int, int, int, str, tuple[object, ...]]]


async def resolve(host: str, port: int) -> Resolution:
    """Resolve a host name in a thread of its own, which can be abandoned if the resolver hangs.

    Raises: OSError.
    """
    answer: Future[Resolution] = Future()
    answer.set_running_or_notify_cancel()  # the caller may be cancelled; the answer is then dropped

    def ask() -> None:
        try:
            answer.set_result([*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)])
        except UnicodeError as error:
            answer.set_exception(OSError(f"{host} is not a valid name: {error}"))
        except OSError as error:
            answer.set_exception(OSError(f"host {host} is not found: {error.strerror or error}"))

    threading.Thread(target=ask, name="webhook resolver", daemon=True).start()
    return await asyncio.wrap_future(answer)


class Resolved(AbstractResolver):
    """aiohttp resolver that returns the addresses checked before, whatever the name."""

    def __init__(self, addresses: list[ResolveResult]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: AddressFamily = AddressFamily.AF_UNSPEC
    ) -> list[ResolveResult]:
        return self._addresses

    async def close(self) -> None:
        """Implement `AbstractResolver.close`."""


def connector(addresses: list[ResolveResult]) -> aiohttp.TCPConnector:
    """Return a connector that connects to these addresses only, once each."""
    return aiohttp.TCPConnector(resolver=Resolved(addresses), use_dns_cache=False, force_close=True)


async def addresses_of(url: str, *, private: bool) -> list[ResolveResult]:
    """Resolve the host of a checked URL. Raises: AddressRefused, OSError."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return await resolve_allowed(parts.hostname or "", port, private=private)


async def get_document(
    url: str,
    *,
    private: bool,
    bytes_max: int,
    wait_s: float,
    headers: Mapping[str, str] = NO_HEADERS,
    form: str | None = None,
) -> bytes:
    """Return the body of a checked URL, of at most `bytes_max` bytes. With `form`, POST it.

    Raises: DocumentUnread.
    """
    try:
        async with asyncio.timeout(wait_s):
            addresses = await addresses_of(url, private=private)
            return await _read(url, addresses, bytes_max, headers, form)
    except TimeoutError:
        raise DocumentUnread(f"no answer within {wait_s:g} s") from None
    except aiohttp.ClientResponseError as unread:  # its text has the whole URL
        raise DocumentUnread(f"the response is not valid HTTP: {unread.message[:200]}") from None
    except aiohttp.InvalidURL:
        raise DocumentUnread("the URL is not valid") from None
    except (AddressRefused, aiohttp.ClientError, OSError, ValueError) as error:
        raise DocumentUnread((str(error) or type(error).__name__)[:200]) from None


async def _read(
    url: str,
    addresses: list[ResolveResult],
    bytes_max: int,
    headers: Mapping[str, str],
    form: str | None,
) -> bytes:
    headers = {"Accept": "application/json", "User-Agent": USER_AGENT, **headers}
    if form is not None:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    async with (
        aiohttp.ClientSession(
            connector=connector(addresses),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a short body could expand to a long one
        ) as session,
        session.request(
            "GET" if form is None else "POST",
            url,
            headers=headers,
            data=form,
            allow_redirects=False,
        ) as answer,
    ):
        if answer.status != 200:
            redirected = ": redirects are not followed" if 300 <= answer.status < 400 else ""
            raise DocumentUnread(f"answered {answer.status}{redirected}")
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise DocumentUnread("answered with a content encoding that was not asked for")
        body = bytearray()
        async for chunk in answer.content.iter_chunked(16_384):
            body += chunk
            if len(body) > bytes_max:
                raise DocumentUnread(f"the document has more than {bytes_max:,} bytes")
        return bytes(body)
