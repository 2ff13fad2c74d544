"""From where a call comes: the address of who has connected, or what a trusted proxy says of who has connected to it.

What a client writes about itself is never believed: of `X-Forwarded-For` only the entries that trusted proxies have added count,
which are those at its right end.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from metering.tenants.networks import Address, Network, allows, parse_address

FORWARDED_FOR = "x-forwarded-for"  # the header, and the metadata of gRPC, that proxies add to
NETWORK_BITS = 64  # of an IPv6 address: one customer of a provider has all addresses behind them
WITH_PORT = re.compile(r"\[(?P<six>[^\]]*)\](?::\d+)?|(?P<four>[^:]*):\d+")  # as some proxies write an address


@dataclass(frozen=True, slots=True)
class Origin:
    """From where a call comes. peer: as gRPC names it: `ipv4:192.0.2.1:4711`. address: None where none is known."""

    peer: str
    address: Address | None


class Proxies:
    """Those whose word on addresses is taken."""

    def __init__(self, networks: Sequence[Network] = ()) -> None:
        """networks: where they are; none: nobody is believed."""
        self._networks = networks

    def origin(self, peer: str, forwarded: Iterable[str]) -> Origin:
        """forwarded: values of `X-Forwarded-For`, in order. The right-most entry that is no trusted proxy is who has called."""
        seen = connected(peer.rpartition(":")[0])
        if not self._networks or not allows(self._networks, seen):
            return Origin(peer, seen)
        for entry in reversed([entry.strip() for value in forwarded for entry in value.split(",")]):
            if not entry:
                continue
            address = parse_entry(entry)
            if address is None:
                return Origin(peer, None)  # a trusted proxy does not know it either
            seen = address
            if not allows(self._networks, seen):
                break
        assert seen is not None, "what is trusted is known"
        return Origin(named(seen), seen)


def host_of(place: str) -> str | None:
    """The host of a peer as gRPC names it, without its port; None for a socket of this machine."""
    kind, _, host = place.partition(":")
    return unquote(host).strip("[]") if kind in ("ipv4", "ipv6") else None


@functools.lru_cache(maxsize=4096)
def connected(place: str) -> Address | None:
    """The address of a peer as gRPC names it, without its port: by that alone the connections of one client differ."""
    return None if (host := host_of(place)) is None else parse_address(host)


def parse_entry(text: str) -> Address | None:
    """An address as proxies write it: alone, or with its port."""
    if (address := parse_address(text)) is not None:
        return address
    match = WITH_PORT.fullmatch(text)
    return None if match is None else parse_address(match["six"] or match["four"] or "")


def named(address: Address) -> str:
    """An address as gRPC names a peer, of no port."""
    return f"ipv4:{address}:0" if address.version == 4 else f"ipv6:[{address}]:0"


@functools.lru_cache(maxsize=4096)
def address_of(peer: str) -> str:
    """The address of a peer as gRPC names it, without its port; of IPv6 the network. All sockets of this machine are one."""
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
    """Whether a listening address is a Unix socket or on the loopback, so that no other machine reaches it."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
