"""Connection file: the addresses and state of this machine's api process, for other local
processes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

ENDPOINT_FILE = "serve.json"
# Addresses for a local client of a process that listens on all addresses.
LOOPBACK = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "[::]": "[::1]"}

# Variable of a process that imports its modules, then waits for its settings on standard input.
HELD = "WEIR_HELD"

# Exit status of a process that its configuration prevents from starting: EX_CONFIG of sysexits.h
NOT_STARTED = 78


@dataclass(frozen=True, slots=True)
class ConnectionFile:
    """Content of the connection file. All fields are empty if no process has written it.

    `openai_url` is the base URL for OpenAI clients, `console_url` for browsers, `metrics_url` for
    Prometheus; each is empty if that listener is off. `serving`: the process accepts requests.
    """

    address: str = ""
    openai_url: str = ""
    console_url: str = ""
    metrics_url: str = ""
    pid: int = 0
    serving: bool = False


class Endpoint:
    """Writer of this process's connection file."""

    def __init__(
        self, home: Path, listen_address: str, port: int, *, tls: bool, urls: Mapping[str, str]
    ) -> None:
        """`port` is the port that gRPC is bound to.

        `urls` has the URLs of the HTTP listeners, by field of `ConnectionFile`.
        """
        host = listen_address.rpartition(":")[0]
        local = (
            listen_address
            if listen_address.startswith("unix")
            else f"{LOOPBACK.get(host, host)}:{port}"
        )
        self.address = f"https://{local}" if tls else local
        self._urls = dict(urls)
        self._home = home
        self._serving: bool | None = None

    def write(self, *, serving: bool) -> None:
        """Write the file atomically if `serving` has changed."""
        if serving is self._serving:
            return
        self._serving = serving
        content = ConnectionFile(self.address, **self._urls, pid=os.getpid(), serving=serving)
        unfinished = self._home / f"{ENDPOINT_FILE}.{os.getpid()}"
        unfinished.write_bytes(msgspec.json.encode(content))
        unfinished.replace(self._home / ENDPOINT_FILE)


def read_endpoint(home: Path) -> ConnectionFile:
    try:
        return msgspec.json.decode((home / ENDPOINT_FILE).read_bytes(), type=ConnectionFile)
    except (OSError, msgspec.MsgspecError):
        return ConnectionFile()


def make_private(directory: Path) -> None:
    """Create a directory that only its owner can access, or restrict an existing one.

    The group may still traverse it; `embedded_postgres.py` has the reason.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o067:
        directory.chmod(status.st_mode & 0o710)


def local_url(host: str, port: int, path: str, *, tls: bool = False) -> str:
    """Build the URL of an HTTP listener for clients on this machine."""
    named = f"[{host}]" if ":" in host else host
    return f"http{'s' if tls else ''}://{LOOPBACK.get(named, named)}:{port}{path}"


class AddressUnavailable(OSError):
    """A listening address is in use or not of this machine. The message says what to do."""


def bound_socket(
    address: tuple[str, int],
    purpose: str,
    variable: str,
    *,
    port_count: int = 1,
    options: Mapping[int, int] = MappingProxyType({}),
    backlog: int | None = None,
) -> socket.socket:
    """Bind a socket to the first free port of a range of `port_count` ports.

    `options` are socket options, which connections inherit. With `backlog`, the socket listens at
    once: two sockets may bind a port, but only one may listen. Raises AddressUnavailable, which
    names the address and the variable.
    """
    host, first = address
    try:
        family, kind, number, _, _ = socket.getaddrinfo(
            host, first, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        for port in range(first, first + port_count):
            found = socket.socket(family, kind, number)
            try:
                for option, value in {socket.SO_REUSEADDR: 1, **options}.items():
                    found.setsockopt(socket.SOL_SOCKET, option, value)
                found.setblocking(False)
                found.bind((host, port))
                if backlog is not None:
                    found.listen(backlog)
                return found
            except OSError:
                found.close()
                if port == first + port_count - 1:
                    raise
    except (OSError, OverflowError) as error:
        ports = f"ports {first} to {first + port_count - 1}" if port_count > 1 else f"port {first}"
        wrong = (
            f"cannot listen on {host}, {ports}, {purpose}: {error}; set {variable} to another"
            " address, or to off"
        )
        raise AddressUnavailable(wrong) from error
    raise AssertionError("there is at least one port")


def forget_endpoint(home: Path) -> None:
    """Delete the connection file of an earlier process. Called before the start."""
    (home / ENDPOINT_FILE).unlink(missing_ok=True)
