"""Ban on connections to other machines: it refuses them, and permits this machine."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from tests.plugins.loopback_only import OutsideConnection

OUTSIDE = "192.0.2.1"  # TEST-NET-1 of RFC 5737: no machine has it


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_another_machine_is_refused(family: socket.AddressFamily) -> None:
    host = OUTSIDE if family == socket.AF_INET else "2001:db8::1"

    with socket.socket(family) as sock, pytest.raises(OutsideConnection):
        sock.connect((host, 443))


def test_a_datagram_to_another_machine_is_refused() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as sock, pytest.raises(OutsideConnection):
        sock.sendto(b"hello", (OUTSIDE, 53))


async def test_asyncio_is_refused_the_name_and_the_address() -> None:
    with pytest.raises(OutsideConnection):
        await asyncio.open_connection("example.test", 443)
    with pytest.raises(OutsideConnection):
        await asyncio.open_connection(OUTSIDE, 443)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_is_reached(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = (host, server.getsockname()[1])

        with socket.create_connection(address, timeout=5) as client:
            assert client.getpeername()[0] == "127.0.0.1"


def test_a_unix_socket_is_reached(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()

        client.connect(path)
