"""Addresses of targets that stand for several servers: from DNS, or Kubernetes' EndpointSlices.

A name is looked up every few seconds. One with several addresses stands for as many servers, such
as the pods of a headless Kubernetes service. A name with one address stays a name: its connection
looks it up itself. Only names of gRPC servers are looked up, since HTTP servers behind one name are
often the same one behind a balancer.

A target with `slices` stands for the ready endpoints of a service, which are watched: their number
may be any. Without an answer, or without an endpoint, it is one server of that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor

import structlog

from api.fleet.endpoint_slices import EndpointSlices, SlicesTerms
from api.fleet.fleet_file import REPLICA_COUNT_MAX, Fleet
from inference.adapters.remote_settings import Target, parse_target

INTERVAL_S = 5.0  # between look-ups: cluster DNS answers with a time to live of 5 to 30 s
LOOKUP_S = 5.0  # after which the last answer counts
SETTLE_S = 0.1  # after a change of slices: a rollout changes many
THREAD_COUNT = 4  # look-ups at a time; one that hangs delays no other work
Addresses = Mapping[str, tuple[str, ...]]  # "host:port" by target; of names only with several
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
    """Last answers for the targets of a fleet that stand for several servers."""

    _tasks: asyncio.TaskGroup | None = None  # without it, only names are followed

    def __init__(self, lookup: Lookup = addresses_of) -> None:
        self.addresses: Addresses = {}
        self.lookup = lookup
        self._threads = ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="dns")
        self._failing: set[str] = set()
        self._watches: dict[SlicesTerms, tuple[EndpointSlices, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()  # set when a watch has news

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Watch slices as tasks from now on."""
        self._tasks = tasks

    async def wait(self, timeout_s: float) -> None:
        """Wait until a watch has news, or so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
                await asyncio.sleep(SETTLE_S)

    async def poll(self, fleet: Fleet) -> bool:
        """Ask for all targets of a fleet; return whether an answer differs from the last one."""
        versions = [version for model in fleet.models for version in model.versions]
        targets = {target for version in versions for target in version.targets}
        slices = {each.address: each.slices for each in targets if each.slices is not None}
        await self._watch(set(slices.values()))
        plain = sorted({each.address for each in targets} - slices.keys())
        names = [(each, name) for each in plain if (name := followed_name(each))]
        async with asyncio.TaskGroup() as tasks:
            answers = [
                (address, tasks.create_task(self._answer(address, target), name="target name"))
                for address, target in names
            ]
        found = {address: task.result() for address, task in answers}
        found = {address: each for address, each in found.items() if len(each) > 1}
        self._changed.clear()
        for address, terms in slices.items():
            if (watch := self._watches.get(terms)) is not None and watch[0].listed.is_set():
                port = int(parse_target(address).address.rpartition(":")[2])
                found[address] = self._most(address, watch[0].addresses(port))
        before, self.addresses = self.addresses, found
        return before != self.addresses

    async def _watch(self, followed: Set[SlicesTerms]) -> None:
        """Watch exactly these slices, and wait for the first answers."""
        if self._tasks is None:
            return
        for terms in self._watches.keys() - followed:
            self._watches.pop(terms)[1].cancel()
        for terms in followed - self._watches.keys():
            watch = EndpointSlices(terms, self._changed.set)
            name = f"endpoint slices of {terms.service}"
            self._watches[terms] = watch, self._tasks.create_task(watch.run(), name=name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOKUP_S):
                for watch, _ in self._watches.values():
                    await watch.first_attempt.wait()

    def close(self) -> None:
        """Stop watches and threads, without waiting for answers."""
        for _, task in self._watches.values():
            task.cancel()
        self._watches.clear()
        self._tasks = None
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
        shown = [f"[{each}]" if ":" in each else each for each in hosts]
        return self._most(address, tuple(f"{each}:{port}" for each in shown))

    def _most(self, target: str, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Return as many addresses as a target may have, and say if some are left out."""
        if len(addresses) > REPLICA_COUNT_MAX:
            log.warning("target_addresses_left_out", target=target, address_count=len(addresses))
        return addresses[:REPLICA_COUNT_MAX]
