"""Addresses of the targets that are given by name, as DNS answers, looked up again every seconds.

A name with several addresses stands for as many servers, such as the pods of a headless Kubernetes
service. A name with one address stays a name: its connection looks it up itself. Only targets over
gRPC are followed, since HTTP servers behind one name are often the same one behind a balancer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import structlog

from api.fleet.fleet_file import REPLICA_COUNT_MAX, Fleet
from inference.adapters.remote_settings import Target, parse_target

INTERVAL_S = 5.0  # between look-ups: cluster DNS answers with a time to live of 5 to 30 s
LOOKUP_S = 5.0  # after which the last answer counts
THREAD_COUNT = 4  # look-ups at a time; one that hangs delays no other work
Addresses = Mapping[str, tuple[str, ...]]  # "host:port" by target; only of names with several
Lookup = Callable[[str, int], list[str]]

log = structlog.get_logger(__name__)


def addresses_of(host: str, port: int) -> list[str]:
    """Look up the IP addresses of a name: those of IPv4, or else of IPv6. Raises: OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family in (socket.AF_INET, socket.AF_INET6):  # one server often has both
        if hosts := {str(each[4][0]) for each in found if each[0] == family}:
            return sorted(hosts)
    return []


def followed_name(address: str) -> Target | None:
    """Return the target if its host is a name that is followed, else None."""
    target = parse_target(address)
    host = target.address.rpartition(":")[0].strip("[]")
    if target.service.is_http or host == "localhost":
        return None
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return target
    return None


class TargetNames:
    """Last answers of DNS for the names of a fleet's targets."""

    def __init__(self, lookup: Lookup = addresses_of) -> None:
        self.addresses: Addresses = {}
        self.lookup = lookup
        self._threads = ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="dns")
        self._failing: set[str] = set()

    async def poll(self, fleet: Fleet) -> bool:
        """Look up all names of a fleet; return whether an answer differs from the last one."""
        versions = [version for model in fleet.models for version in model.versions]
        targets = {target.address for version in versions for target in version.targets}
        names = [(each, name) for each in sorted(targets) if (name := followed_name(each))]
        async with asyncio.TaskGroup() as tasks:
            answers = [
                (address, tasks.create_task(self._answer(address, target), name="target name"))
                for address, target in names
            ]
        found = {address: task.result() for address, task in answers}
        before, self.addresses = (
            self.addresses,
            {address: each for address, each in found.items() if len(each) > 1},
        )
        return before != self.addresses

    def close(self) -> None:
        """Stop the threads, without waiting for answers."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, address: str, target: Target) -> tuple[str, ...]:
        """Look up one name. If that fails, return the last answer."""
        host, _, port = target.address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LOOKUP_S):
                hosts = await loop.run_in_executor(self._threads, self.lookup, host, int(port))
        except (OSError, TimeoutError) as error:
            if address not in self._failing:
                self._failing.add(address)
                log.warning("target_name_unknown", target=address, cause=str(error) or "no answer")
            return self.addresses.get(address, ())
        self._failing.discard(address)
        if len(hosts) > REPLICA_COUNT_MAX:
            log.warning("target_addresses_left_out", target=address, address_count=len(hosts))
        shown = [f"[{each}]" if ":" in each else each for each in hosts[:REPLICA_COUNT_MAX]]
        return tuple(f"{each}:{port}" for each in shown)
