"""Networks that a key may be used from, and the check of an address. Pure.

An IPv4-mapped IPv6 address (`::ffff:192.0.2.1`) is treated as the IPv4 address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from functools import lru_cache

from metering.core.errors import InvalidValue

NETWORKS_PER_KEY_MAX = 100  # each call checks all of them
KNOWN_ADDRESSES_MAX = 4096  # cached parsed addresses, some 200 bytes each
KNOWN_LISTS_MAX = 1024  # cached parsed lists of networks, some 50 kB each at most

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@lru_cache(maxsize=KNOWN_ADDRESSES_MAX)
def parse_address(text: str) -> Address | None:
    """Parse an IP address; return None if it is invalid."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def parse_network(text: str) -> Network:
    """Parse `203.0.113.0/24`, `2001:db8::/32`, or one address. Raises: ValueError."""
    try:
        if "%" in text:
            raise ValueError("a zone is valid on one machine only")
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(
            f"{text[:64]!r} is not a valid network: write it as 203.0.113.0/24 or 2001:db8::/32"
        ) from None
    mapped = (
        network.network_address.ipv4_mapped if isinstance(network, ipaddress.IPv6Network) else None
    )
    if mapped is not None and network.prefixlen >= 96:
        raise ValueError(
            f"{text[:64]!r} is an IPv4-mapped IPv6 network: write {mapped}/{network.prefixlen - 96}"
        )
    if "/" in text and ipaddress.ip_interface(text).ip != network.network_address:
        raise ValueError(f"{text[:64]!r} has host bits set: write {network}, or the address alone")
    return network


def checked_networks(texts: Collection[str]) -> list[str]:
    """Validate networks; return them in canonical form, sorted. Raises: InvalidValue."""
    if len(set(texts)) > NETWORKS_PER_KEY_MAX:
        raise InvalidValue(
            "allowed_networks", f"must have at most {NETWORKS_PER_KEY_MAX}, or none for everywhere"
        )
    try:
        return sorted({str(parse_network(text)) for text in texts})
    except ValueError as wrong:
        raise InvalidValue("allowed_networks", str(wrong)) from None


def normalized(texts: Collection[str]) -> tuple[str, ...]:
    """Convert networks to canonical form, to compare them. Invalid ones are kept unchanged."""
    return tuple(sorted({_normalized(text) for text in texts}))


def _normalized(text: str) -> str:
    try:
        return str(parse_network(text))
    except ValueError:
        return text


@lru_cache(maxsize=KNOWN_LISTS_MAX)
def networks_of(texts: tuple[str, ...]) -> tuple[Network, ...]:
    """Parse networks that are known to be valid."""
    return tuple(map(parse_network, texts))


def contains(wide: Network, narrow: Network) -> bool:
    """Return True if every address of the second network is one of the first."""
    return narrow.network_address in wide and narrow.broadcast_address in wide


def allows(networks: Sequence[Network], address: Address | None) -> bool:
    """Return True if a key limited to these networks may be used from the address.

    Without networks every address is allowed; with some, None is not.
    """
    return not networks or (address is not None and any(address in network for network in networks))


def excludes(texts: Collection[str], address: Address | None) -> bool:
    """Return True if the networks exclude an address. Invalid networks are ignored."""
    try:
        return not allows([parse_network(text) for text in texts], address)
    except ValueError:
        return False
