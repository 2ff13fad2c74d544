"""Three PostgreSQL servers that Patroni replicates synchronously, with etcd, on this machine.

Each node has an address of the loopback, as machines have. PostgreSQL is the embedded one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import yaml

from common.processes import alive, children_of
from metering.store.db import psycopg_conninfo
from metering.store.embedded_postgres import SUPERUSER, binaries, server_account
from tests.inference.real_servers import free_port, python_of, running
from tests.service import wait_for

ADDRESSES = ("127.0.0.21", "127.0.0.22", "127.0.0.23")
DATABASE = "weir"
# The least that Patroni allows. A primary whose Patroni died keeps its role for `ttl` seconds.
TTL_S, LOOP_WAIT_S, RETRY_TIMEOUT_S = 20, 1, 3
START_S, POLL_S = 60.0, 0.2
# Patroni rewinds a node whose history left that of the primary, with few exceptions.
FAILING_S = 8.0
# Processes die here, not machines: committed data survives without fsync.
PARAMETERS = {
    "max_connections": 100,
    "fsync": "off",
    "full_page_writes": "off",
    "wal_log_hints": "on",
    "shared_buffers": "32MB",
}


@dataclass
class Node:
    """Patroni and its PostgreSQL. `process` is Patroni, the leader of a group of processes."""

    name: str
    address: str
    port: int
    api_port: int
    home: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def data_dir(self) -> Path:
        return self.home / "data"

    @property
    def postmaster(self) -> int | None:
        """Process id of the running PostgreSQL, or None."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            pid = int((self.data_dir / "postmaster.pid").read_text().split("\n", 1)[0])
            return pid if alive(pid) else None
        return None

    @property
    def log(self) -> str:
        """Log of Patroni and PostgreSQL."""
        path = self.home / "patroni.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self) -> list[int]:
        """Return Patroni and all processes of PostgreSQL."""
        postmaster = self.postmaster
        found = [] if postmaster is None else [postmaster, *children_of(postmaster)]
        if self.process is not None and self.process.poll() is None:
            found.append(self.process.pid)
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the node."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill the whole node, as the loss of its machine does."""
        pids = self.processes()
        self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
            self.process = None
        wait_for(lambda: not any(map(alive, pids)), f"{self.name} to be dead")

    def kill_postgres(self) -> None:
        """Kill PostgreSQL alone; Patroni notices."""
        pid = self.postmaster
        assert pid is not None, self.log[-2000:]
        for each in [pid, *children_of(pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


@dataclass
class Cluster:
    """The nodes, with etcd."""

    directory: Path
    etcd: str
    synchronous: bool
    nodes: list[Node] = field(default_factory=list)

    def url(self, name: str = DATABASE, user: str = SUPERUSER) -> str:
        """Return the URL with all hosts, as an operator writes it."""
        hosts = ",".join(f"{node.address}:{node.port}" for node in self.nodes)
        return f"postgresql://{user}@{hosts}/{name}"

    def members(self) -> list[dict[str, Any]]:
        """Return what Patroni knows of the members; empty if no node answers."""
        for node in self.nodes:
            with contextlib.suppress(OSError):
                address = f"http://{node.address}:{node.api_port}/cluster"
                with urllib.request.urlopen(address, timeout=2) as answer:
                    found: list[dict[str, Any]] = json.load(answer)["members"]
                return found
        return []

    def of_role(self, *roles: str) -> list[Node]:
        """Return the running members with a role: `leader`, `sync_standby` or `replica`."""
        names = {
            each["name"]
            for each in self.members()
            if each["role"] in roles and each["state"] in ("running", "streaming")
        }
        return [node for node in self.nodes if node.name in names]

    @property
    def primary(self) -> Node:
        """Return the primary, when there is one."""
        return wait_for(
            lambda: next(iter(self.of_role("leader")), None), "a primary", START_S, POLL_S
        )

    def wait_complete(self) -> None:
        """Wait until all nodes follow the primary, one of them synchronously."""

        failing: dict[str, float] = {}

        def complete() -> bool:
            for member in self.members():
                name = member["name"]
                if member["state"] not in ("starting", "start failed", "stopped"):
                    failing.pop(name, None)
                elif time.monotonic() - failing.setdefault(name, time.monotonic()) > FAILING_S:
                    self.reinitialize(name)
            followers = self.of_role("sync_standby", "replica")
            return (
                len(self.of_role("leader")) == 1
                and len(followers) == len(self.nodes) - 1
                and (not self.synchronous or len(self.of_role("sync_standby")) == 1)
            )

        try:
            wait_for(complete, "all nodes to follow the primary", START_S, POLL_S)
        except AssertionError:
            print(self.members(), *(node.log[-3000:] for node in self.nodes), sep="\n")
            raise

    def reinitialize(self, name: str) -> None:
        """Copy the primary's data to a node anew, as `patronictl reinit` does."""
        [node] = [node for node in self.nodes if node.name == name]
        request = urllib.request.Request(
            f"http://{node.address}:{node.api_port}/reinitialize",
            b'{"force": true}',
            {"content-type": "application/json"},
        )
        with contextlib.suppress(OSError):  # under way, or not allowed yet
            urllib.request.urlopen(request, timeout=2).close()

    def start(self, node: Node) -> None:
        """Start a node, whose data may be that of a former primary."""
        if node.postmaster is None:
            (node.data_dir / "postmaster.pid").unlink(missing_ok=True)
        account = server_account()
        with (node.home / "patroni.log").open("ab") as log:
            node.process = subprocess.Popen(
                [Path(python_of("patroni")).with_name("patroni"), node.home / "patroni.yaml"],
                env={"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(node.home)},
                cwd=node.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=None if account is None else account.pw_uid,
                group=None if account is None else account.pw_gid,
                extra_groups=None if account is None else [],
                start_new_session=True,
            )

    def stop(self) -> None:
        """Kill all nodes."""
        for node in self.nodes:
            node.send(signal.SIGCONT)
            node.kill()


@contextlib.contextmanager
def patroni_cluster(directory: Path, *, synchronous: bool = True) -> Iterator[Cluster]:
    """Start etcd and three nodes in a directory that their account can enter."""
    port, peer_port = free_port(), free_port()
    etcd = [str(Path(python_of("patroni")).with_name("etcd")), "--name=one"]
    etcd += [
        f"--data-dir={directory / 'etcd'}",
        f"--initial-cluster=one=http://127.0.0.1:{peer_port}",
    ]
    for option, its_port in (("client", port), ("peer", peer_port)):
        advertised = "advertise-client" if option == "client" else "initial-advertise-peer"
        etcd += [f"--listen-{option}-urls=http://127.0.0.1:{its_port}"]
        etcd += [f"--{advertised}-urls=http://127.0.0.1:{its_port}"]
    python = Path(python_of("patroni"))
    for programs in (python.parent, python.resolve().parent, binaries()):
        open_to_account(programs)
    with running(etcd, directory / "etcd.log", "ready to serve client requests"):
        cluster = Cluster(directory, f"127.0.0.1:{port}", synchronous)
        postgres_port, api_port = free_port(), free_port()
        for number, address in enumerate(ADDRESSES):
            home = directory / f"node{number}"
            home.mkdir(mode=0o700)
            node = Node(home.name, address, postgres_port, api_port, home)
            (home / "patroni.yaml").write_text(yaml.safe_dump(configuration(cluster, node)))
            if (account := server_account()) is not None:
                os.chown(home, account.pw_uid, account.pw_gid)
            cluster.nodes.append(node)
        open_to_account(directory)
        try:
            for node in cluster.nodes:
                cluster.start(node)
            wait_for(lambda: cluster.of_role("leader"), "the first primary", START_S, POLL_S)
            cluster.wait_complete()
            with psycopg.connect(psycopg_conninfo(cluster.url("postgres")), autocommit=True) as one:
                one.execute(f"CREATE DATABASE {DATABASE}".encode())
            yield cluster
        finally:
            cluster.stop()


def open_to_account(directory: Path) -> None:
    """Let other accounts pass through the parents of a directory, if the server has its own."""
    if server_account() is not None:
        for parent in (directory, *directory.absolute().parents):
            if not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o001)


def configuration(cluster: Cluster, node: Node) -> dict[str, Any]:
    """Return the configuration of a node, as Patroni's documentation describes it."""
    address, password = f"{node.address}:{node.port}", "secret"
    users = {"superuser": SUPERUSER, "replication": "replicator"}
    return {
        "scope": "weir",
        "name": node.name,
        "restapi": {
            "listen": f"{node.address}:{node.api_port}",
            "connect_address": f"{node.address}:{node.api_port}",
        },
        "etcd3": {"hosts": [cluster.etcd]},
        "bootstrap": {
            "dcs": {
                "ttl": TTL_S,
                "loop_wait": LOOP_WAIT_S,
                "retry_timeout": RETRY_TIMEOUT_S,
                "primary_start_timeout": 0,
                "synchronous_mode": cluster.synchronous,
                "postgresql": {"use_pg_rewind": True, "parameters": PARAMETERS},
            },
            "initdb": [{"encoding": "UTF8"}, {"locale": "C"}],
        },
        "postgresql": {
            "listen": address,
            "connect_address": address,
            "data_dir": str(node.data_dir),
            "bin_dir": str(binaries()),
            "basebackup": [{"checkpoint": "fast"}],
            "pgpass": str(node.home / "pgpass"),
            "authentication": {
                use: {"username": name, "password": password} for use, name in users.items()
            },
            "pg_hba": [
                "local all all trust",
                "host all all 127.0.0.0/8 trust",
                "host replication all 127.0.0.0/8 trust",
            ],
            "parameters": {"unix_socket_directories": str(node.home)},
        },
    }
