"""The networks that a key may be used from, and whether an address is in one of them. Pure.

An IPv4 address that comes in the form of IPv6 (`::ffff:192.0.2.1`) is the IPv4 address that it is.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from functools import lru_cache

from metering.core.errors import InvalidValue

NETWORKS_PER_KEY_MAX = 100  # each call looks at all of them
KNOWN_ADDRESSES_MAX = 4096  # addresses that are kept read, of some 200 bytes each
KNOWN_LISTS_MAX = 1024  # different lists of networks that are kept read, of some 50 kB at most

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@lru_cache(maxsize=KNOWN_ADDRESSES_MAX)
def parse_address(text: str) -> Address | None:
    """The address that a text is; None if it is none."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def parse_network(text: str) -> Network:
    """`203.0.113.0/24`, `2001:db8::/32`, or one address. Raises: ValueError saying what would do."""
    try:
        if "%" in text:
            raise ValueError("a zone means something on one machine alone")
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text[:64]!r} is no network: write it as 203.0.113.0/24 or 2001:db8::/32") from None
    mapped = network.network_address.ipv4_mapped if isinstance(network, ipaddress.IPv6Network) else None
    if mapped is not None and network.prefixlen >= 96:
        raise ValueError(f"{text[:64]!r} is IPv4 in the form of IPv6: write {mapped}/{network.prefixlen - 96}")
    if "/" in text and ipaddress.ip_interface(text).ip != network.network_address:
        raise ValueError(f"{text[:64]!r} has bits set beside its network: write {network}, or the address alone")
    return network


def checked_networks(texts: Collection[str]) -> list[str]:
    """Networks in order, each once and in its one form; none means everywhere. Raises: InvalidValue."""
    if len(set(texts)) > NETWORKS_PER_KEY_MAX:
        raise InvalidValue("allowed_networks", f"give at most {NETWORKS_PER_KEY_MAX}, or none for everywhere")
    try:
        return sorted({str(parse_network(text)) for text in texts})
    except ValueError as wrong:
        raise InvalidValue("allowed_networks", str(wrong)) from None


def in_one_form(texts: Collection[str]) -> tuple[str, ...]:
    """The same as far as they are right: so the same networks are equal, however they are written."""
    return tuple(sorted({_in_one_form(text) for text in texts}))


def _in_one_form(text: str) -> str:
    try:
        return str(parse_network(text))
    except ValueError:
        return text


@lru_cache(maxsize=KNOWN_LISTS_MAX)
def networks_of(texts: tuple[str, ...]) -> tuple[Network, ...]:
    """Networks that were found right before."""
    return tuple(map(parse_network, texts))


def allows(networks: Sequence[Network], address: Address | None) -> bool:
    """Whether a key that is limited to these may be used from there; none mean everywhere, and no address is in no network."""
    return not networks or (address is not None and any(address in network for network in networks))


def shuts_out(texts: Collection[str], address: Address | None) -> bool:
    """The opposite for networks as an admin gives them; what is wrong with them is told elsewhere."""
    try:
        return not allows([parse_network(text) for text in texts], address)
    except ValueError:
        return False
