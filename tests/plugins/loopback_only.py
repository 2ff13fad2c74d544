"""No test talks to another machine: a connection to anything but this one raises.

An audit hook sees every connect, datagram and name look-up that goes through Python's `socket`, however it was reached (asyncio,
requests, redis). C libraries that open their own sockets (grpc's core, libpq) are not seen.
"""

from __future__ import annotations

import ipaddress
import sys

LOCAL_NAMES = frozenset({"", "localhost", "localhost.localdomain", "ip6-localhost"})
EVENTS = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})


class OutsideConnection(RuntimeError):
    """A test tried to reach another machine."""


def is_local(host: object) -> bool:
    """Whether a host, as given to `connect` or `getaddrinfo`, is this machine. None and the empty name are."""
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
    """Audit hook: raises OutsideConnection for another machine; says nothing of Unix sockets, whose addresses are no tuples."""
    if event in EVENTS:
        address = arguments[1]
        if isinstance(address, tuple) and isinstance(address[0], str) and not is_local(address[0]):
            raise OutsideConnection(f"a test tried to reach {address}: stand a server up on 127.0.0.1 instead")
    elif event == "socket.getaddrinfo" and not is_local(arguments[0]):
        raise OutsideConnection(f"a test tried to look up {arguments[0]!r}: tests know this machine only")


sys.addaudithook(refuse_outside)
