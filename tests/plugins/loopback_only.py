"""Ban on connections to other machines: a test that opens one fails.

An audit hook sees every connect, datagram and name look-up through Python's `socket`, by any
library (asyncio, requests, redis). C libraries that open their own sockets (grpc's core, libpq) are
not seen.
"""

from __future__ import annotations

import ipaddress
import sys

LOCAL_NAMES = frozenset({"", "localhost", "localhost.localdomain", "ip6-localhost"})
EVENTS = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})


class OutsideConnection(RuntimeError):
    """Attempt of a test to reach another machine."""


def is_local(host: object) -> bool:
    """Return whether a host of `connect` or `getaddrinfo` is this machine, like None and ""."""
    if isinstance(host, (bytes, bytearray)):
        host = bytes(host).decode("ascii", "replace")
    if host is None or host in LOCAL_NAMES:
        return True
    try:
        address = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def refuse_outside(event: str, arguments: tuple[object, ...]) -> None:
    """Raise OutsideConnection for another machine; ignore Unix sockets."""
    if event in EVENTS:
        address = arguments[1]
        if isinstance(address, tuple) and isinstance(address[0], str) and not is_local(address[0]):
            raise OutsideConnection(
                f"a test tried to reach {address}: stand a server up on 127.0.0.1 instead"
            )
    elif event == "socket.getaddrinfo" and not is_local(arguments[0]):
        raise OutsideConnection(
            f"a test tried to look up {arguments[0]!r}: tests know this machine only"
        )


sys.addaudithook(refuse_outside)
