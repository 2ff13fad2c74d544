"""Client addresses of calls: the address of the connection, or the one that a trusted proxy
reports.

In `X-Forwarded-For`, only the entries that trusted proxies added count: those at the right end. A
client could forge the others.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from metering.tenants.networks import Address, Network, allows, parse_address

FORWARDED_FOR = "x-forwarded-for"  # header and gRPC metadata key that proxies add to
FORWARDED_PROTO = "x-forwarded-proto"  # header of proxies that end TLS
# Prefix of an IPv6 address: a provider's customer has all addresses of such a network.
NETWORK_BITS = 64
# Format of some proxies.
WITH_PORT = re.compile(r"\[(?P<six>[^\]]*)\](?::\d+)?|(?P<four>[^:]*):\d+")


@dataclass(frozen=True, slots=True)
class Origin:
    """Client address of a call. `peer` is in gRPC's notation, such as `ipv4:192.0.2.1:4711`.

    `address` is None if it is unknown, as with Unix sockets.
    """

    peer: str
    address: Address | None


class Proxies:
    """Proxies whose `X-Forwarded-For` entries are trusted."""

    def __init__(self, networks: Sequence[Network] = ()) -> None:
        """`networks` are the networks of the proxies. If empty, no proxy is trusted."""
        self._networks = networks

    def origin(self, peer: str, forwarded: Iterable[str]) -> Origin:
        """Find the origin of a call: the right-most address that is not a trusted proxy.

        `forwarded` are the values of `X-Forwarded-For`, in order.
        """
        seen = connected(peer.rpartition(":")[0])
        if not self._trusts(seen):
            return Origin(peer, seen)
        for entry in reversed([entry.strip() for value in forwarded for entry in value.split(",")]):
            if not entry:
                continue
            address = parse_entry(entry)
            if address is None:
                return Origin(peer, None)  # a trusted proxy does not know the address
            seen = address
            if not allows(self._networks, seen):
                break
        assert seen is not None, "a trusted address is known"
        return Origin(named(seen), seen)

    def ended_tls(self, peer: str, forwarded: Iterable[str]) -> bool:
        """Return whether a client spoke TLS to a trusted proxy.

        `forwarded` are the values of `X-Forwarded-Proto`; the first one is of the client.
        """
        schemes = [each.strip().lower() for value in forwarded for each in value.split(",")]
        return schemes[:1] == ["https"] and self._trusts(connected(peer.rpartition(":")[0]))

    def _trusts(self, address: Address | None) -> bool:
        return bool(self._networks) and allows(self._networks, address)


def host_of(target: str) -> str | None:
    """Parse the host of a peer in gRPC's notation, without port; None for a Unix socket."""
    kind, _, host = target.partition(":")
    return unquote(host).strip("[]") if kind in ("ipv4", "ipv6") else None


@functools.lru_cache(maxsize=4096)
def connected(target: str) -> Address | None:
    """Parse the address of a connection from a target without port; None for a Unix socket."""
    return None if (host := host_of(target)) is None else parse_address(host)


def parse_entry(text: str) -> Address | None:
    """Parse an address as proxies write it, with or without a port; None if it is invalid."""
    if (address := parse_address(text)) is not None:
        return address
    match = WITH_PORT.fullmatch(text)
    return None if match is None else parse_address(match["six"] or match["four"] or "")


def named(address: Address) -> str:
    """Write an address in gRPC's notation of a peer, with port 0."""
    return f"ipv4:{address}:0" if address.version == 4 else f"ipv6:[{address}]:0"


@functools.lru_cache(maxsize=4096)
def address_of(peer: str) -> str:
    """Return the address by which a peer is rate limited: for IPv6, its network instead.

    All clients on Unix sockets count as one.
    """
    if (host := host_of(peer.rpartition(":")[0])) is None:
        return peer.partition(":")[0]
    host = host.partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, NETWORK_BITS), strict=False))
    return str(address)


def is_local(address: str) -> bool:
    """Return whether only this machine can reach a listening address: a Unix socket or loopback."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
