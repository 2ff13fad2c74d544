"""Machines as network namespaces, on a network with delay and loss.

A thread carries each packet between TUN devices, one in each namespace and one on the host: the
kernel's own delays (`netem`) are missing in many containers. It needs root and `/dev/net/tun`.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.service import Service

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_BYTES_MAX = 65_536
NETWORK = f"10.231.{os.getpid() % 250}"  # another one beside a second run of the tests
GATEWAY = f"{NETWORK}.1"
POLL_S = 0.1


class Network:
    """Network of the host and some machines. Each packet is late, and some are lost."""

    def __init__(self, delay_s: float, loss: float, seed: int) -> None:
        """`delay_s` is that of one direction; `loss` is the share of packets that are lost."""
        self.packet_count = self.lost_count = 0
        self._delay_s, self._loss, self._random = delay_s, loss, random.Random(seed)
        self._devices: dict[bytes, int] = {}  # by address
        self._late: list[tuple[float, int, int, bytes]] = []  # due time, order, device, packet
        self._stopping = threading.Event()

    def join(self, address: str, device: int) -> None:
        self._devices[bytes(map(int, address.split(".")))] = device

    def run(self) -> None:
        """Carry packets until stopped."""
        while not self._stopping.is_set():
            due_s = self._late[0][0] - time.monotonic() if self._late else POLL_S
            wait_s = min(max(due_s, 0.0), POLL_S)
            for device in select.select([*self._devices.values()], (), (), wait_s)[0]:
                self._take(os.read(device, PACKET_BYTES_MAX))
            while self._late and self._late[0][0] <= time.monotonic():
                *_, device, packet = heapq.heappop(self._late)
                with contextlib.suppress(OSError):  # the device is down
                    os.write(device, packet)

    def stop(self) -> None:
        self._stopping.set()

    def _take(self, packet: bytes) -> None:
        device = self._devices.get(packet[16:20])  # destination in an IPv4 header
        if device is None:
            return
        self.packet_count += 1
        if self._random.random() < self._loss:
            self.lost_count += 1
            return
        due_at_s = time.monotonic() + self._delay_s
        heapq.heappush(self._late, (due_at_s, self.packet_count, device, packet))


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Machine:
    """Namespace with an address that the host and the other machines reach."""

    namespace: str
    address: str


@contextlib.contextmanager
def machines(count: int, delay_s: float, loss: float, seed: int) -> Iterator[list[Machine]]:
    """Yield machines. Raises OSError or CalledProcessError where namespaces are not permitted."""
    network = Network(delay_s, loss, seed)
    with contextlib.ExitStack() as stack:
        found = [
            Machine(f"weir{os.getpid()}-{index}", f"{NETWORK}.{index + 2}")
            for index in range(count)
        ]
        for address, machine in ((GATEWAY, None), *((each.address, each) for each in found)):
            name = f"wt{os.getpid() % 100_000}{address.rpartition('.')[2]}"
            device = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, device)
            request = struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI)
            fcntl.ioctl(device, TUNSETIFF, request)
            within: tuple[str, ...] = ()
            if machine is not None:
                run("ip", "netns", "add", machine.namespace)
                stack.callback(run, "ip", "netns", "del", machine.namespace)
                run("ip", "link", "set", name, "netns", machine.namespace)
                within = ("ip", "netns", "exec", machine.namespace)
                run(*within, "ip", "link", "set", "lo", "up")
            run(*within, "ip", "address", "add", f"{address}/24", "dev", name)
            run(*within, "ip", "link", "set", name, "up")
            network.join(address, device)
        thread = threading.Thread(target=network.run, name="network", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(network.stop)
        yield found
        assert network.packet_count, "the machines used the network"


@contextlib.contextmanager
def permitted_machines(
    count: int, delay_s: float, loss: float, seed: int
) -> Iterator[list[Machine]]:
    """Yield machines; skip the test where namespaces are not permitted."""
    if os.geteuid() != 0 or not TUN.exists():
        pytest.skip(f"network namespaces need root and {TUN}")
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(machines(count, delay_s, loss, seed))
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", error)
            pytest.skip(f"network namespaces are not permitted: {reason}")
        yield found


class FarService(Service):
    """Api process on a machine."""

    def __init__(
        self, machine: Machine, far_url: str, home: Path, url: str, model: Path, **settings: Any
    ) -> None:
        """`far_url` is the database's URL there, `url` here."""
        address = f"{machine.address}:0"
        super().__init__(home, url, model, listen=address, allow_plaintext=True, **settings)
        self._machine, self._far_url = machine, far_url

    def spawn(self) -> None:
        """Start the process in the namespace."""
        ours = {"WEIR_LOG": "info", "WEIR_DATABASE_URL": self._far_url}
        environment = {**os.environ, **self.settings.to_environment(), **ours}
        self.home.mkdir(parents=True, exist_ok=True)
        command = ["ip", "netns", "exec", self._machine.namespace, sys.executable, "-m", "api"]
        with (self.home / "api.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
