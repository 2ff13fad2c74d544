"""Launcher of kind `kubernetes`: the number of replicas of an object, through the plain HTTP API.

It sets the number by a PATCH of the object's `scale` subresource, or of a field of the object if it
has none. The number is absolute, so a repeated call changes nothing. A change is made on condition
of the version that was read, and repeated if another program was faster. Credentials are those of
the pod's service account, or of a kubeconfig file with a token or a client certificate.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from inference.adapters.remote_settings import parse_target
from inference.launchers.http import Answer, send
from inference.launchers.launcher import LaunchedId, LaunchFailed, filled
from inference.launchers.readiness import wait_ready

PLACEHOLDERS = frozenset({"number"})
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MERGE_PATCH = "application/merge-patch+json"
CONFLICTS_MAX = 10  # of changes in a row
POLL_S = 0.5
REMEDIES = {
    401: "renew the token",
    403: "allow the service account the verbs get and patch on it",
    404: "check what names the object; if it has no scale subresource, set field",
}


@dataclass(frozen=True, slots=True)
class KubernetesTerms:
    """Object that is scaled, and the address of its servers.

    With `{number}` in the address, each replica is a pod of its own, as in a StatefulSet. Without
    it, the address stands for all pods together, which are `count` or none. `field` is the path of
    the number in an object without a scale subresource, such as `spec.replicas`.
    """

    group: str
    version: str
    resource: str
    namespace: str
    name: str
    address: str
    count: int = 1
    field: str = ""
    kubeconfig: Path | None = None
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 60.0

    @property
    def path(self) -> str:
        """Path of the object in the HTTP API."""
        parts = (self.version, "namespaces", self.namespace, self.resource, self.name)
        base = f"/apis/{quote(self.group)}" if self.group else "/api"
        return "/".join((base, *map(quote, parts)))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Address and credentials of a Kubernetes API."""

    url: str
    token: str
    tls: ssl.SSLContext | None


class KubernetesLauncher:
    """Implement `Launcher` with the number of replicas of one object."""

    def __init__(self, terms: KubernetesTerms) -> None:
        self._terms = terms
        self._running: frozenset[int] = frozenset()
        self._changing = asyncio.Lock()

    def expect(self, numbers: frozenset[int]) -> None:
        """Implement `Launcher.expect`."""
        self._running = numbers

    async def start(self, replica: LaunchedId) -> str:
        """Implement `Launcher.start`."""
        await self._scale(replica)
        address = filled(self._terms.address, {"number": replica.number})
        await wait_ready(parse_target(address), self._terms.start_timeout_s, lambda: "")
        return address

    async def wake(self, replica: LaunchedId, address: str) -> str:
        """Implement `Launcher.wake`: such a replica never sleeps."""
        raise LaunchFailed("it cannot sleep")

    async def stop(self, replica: LaunchedId) -> None:
        """Implement `Launcher.stop`. Waits until the pods are gone, as far as the object says."""
        await self._scale(replica, is_stopping=True)
        give_up_at_s = time.monotonic() + self._terms.stop_timeout_s
        while await self._present() > self._count(self._running - {replica.number}):
            if time.monotonic() > give_up_at_s:
                raise LaunchFailed(f"{self._terms.path} still has pods that were to stop")
            await asyncio.sleep(POLL_S)

    async def sleep(self, replica: LaunchedId) -> None:
        """Implement `Launcher.sleep`: such a replica never sleeps."""
        raise LaunchFailed("it cannot sleep")

    async def runs(self, replica: LaunchedId, address: str) -> bool:
        """Implement `Launcher.runs`: false if another program has scaled it down."""
        wanted, _ = self._read(await self._get())
        return wanted > (replica.number if "{number}" in self._terms.address else 0)

    def _count(self, running: frozenset[int]) -> int:
        """Return the number of replicas of the object with which these run."""
        if "{number}" in self._terms.address:
            return max(running, default=-1) + 1
        return self._terms.count if running else 0

    async def _scale(self, replica: LaunchedId, *, is_stopping: bool = False) -> None:
        """Set the number of replicas, with or without one, unless it is set.

        Raises: LaunchFailed.
        """
        async with self._changing:
            for _ in range(CONFLICTS_MAX):
                found = await self._get()
                now, version = self._read(found)
                one = frozenset({replica.number})
                count = self._count(self._running - one if is_stopping else self._running | one)
                if now == count:
                    return
                answer = await self._send("PATCH", self._patch(count, version))
                if answer.status == 200:
                    return
                if answer.status != 409:
                    raise self._refused(answer, "PATCH")
            raise LaunchFailed(f"{self._terms.path} is changed by another program all the time")

    async def _present(self) -> int:
        """Return the number of pods, as the object's controller has counted them."""
        found = await self._get()
        status = found.get("status") or {}
        count = status.get("replicas", 0) if isinstance(status, dict) else 0
        return count if isinstance(count, int) else 0

    async def _get(self) -> dict[str, Any]:
        answer = await self._send("GET", None)
        if answer.status != 200:
            raise self._refused(answer, "GET")
        try:
            found = json.loads(answer.body)
        except ValueError as error:
            raise LaunchFailed(f"GET {self._terms.path} returned no JSON") from error
        if not isinstance(found, dict):
            raise LaunchFailed(f"GET {self._terms.path} returned no object")
        return found

    def _read(self, found: Mapping[str, Any]) -> tuple[int, str]:
        """Return the number of replicas that is set, and the version of the object."""
        value: Any = found
        for name in self._field():
            value = value.get(name) if isinstance(value, dict) else None
        metadata = found.get("metadata")
        version = metadata.get("resourceVersion", "") if isinstance(metadata, dict) else ""
        # A scale without replicas has 0 of them; a field that is missing has its default, 1.
        missing = 1 if self._terms.field else 0
        return value if isinstance(value, int) else missing, str(version)

    def _field(self) -> list[str]:
        return (self._terms.field or "spec.replicas").split(".")

    def _patch(self, count: int, version: str) -> bytes:
        """Build a merge patch that fails if the object has another version."""
        value: Any = count
        for name in reversed(self._field()):
            value = {name: value}
        return json.dumps(value | {"metadata": {"resourceVersion": version}}).encode()

    async def _send(self, method: str, body: bytes | None) -> Answer:
        cluster = await asyncio.to_thread(read_cluster, self._terms.kubeconfig)
        suffix = "" if self._terms.field else "/scale"
        headers = {"accept": "application/json"}
        if cluster.token:
            headers["authorization"] = f"Bearer {cluster.token}"
        if body is not None:
            headers["content-type"] = MERGE_PATCH
        url = f"{cluster.url}{self._terms.path}{suffix}"
        return await send(method, url, body=body, headers=headers, tls=cluster.tls)

    def _refused(self, answer: Answer, method: str) -> LaunchFailed:
        try:
            message = str(json.loads(answer.body)["message"])
        except (ValueError, KeyError, TypeError):
            message = ""
        remedy = REMEDIES.get(answer.status, "see the log of the Kubernetes API")
        suffix = "" if self._terms.field else "/scale"
        return LaunchFailed(
            f"{method} {self._terms.path}{suffix} returned status {answer.status}: {remedy}."
            f" {message}".strip()
        )


def read_cluster(kubeconfig: Path | None, account: Path = ACCOUNT) -> Cluster:
    """Read address and credentials, again for each request, since tokens are renewed.

    Raises: LaunchFailed.
    """
    try:
        return _of_account(account) if kubeconfig is None else _of_file(kubeconfig)
    except (OSError, ssl.SSLError, yaml.YAMLError, binascii.Error) as error:
        source = account if kubeconfig is None else kubeconfig
        raise LaunchFailed(f"credentials of Kubernetes in {source}: {error}") from error


def _of_account(account: Path) -> Cluster:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        raise LaunchFailed("this is not a pod of Kubernetes: name a kubeconfig file")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    host = f"[{host}]" if ":" in host else host
    return Cluster(f"https://{host}:{port}", (account / "token").read_text().strip(), context)


def _of_file(path: Path) -> Cluster:
    """Read the current context of a kubeconfig file."""
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        context = _named(found, "contexts", "context", found["current-context"])
        cluster = _named(found, "clusters", "cluster", context["cluster"])
        user = _named(found, "users", "user", context["user"])
        url = str(cluster["server"]).rstrip("/")
    except (KeyError, TypeError, IndexError) as error:
        raise LaunchFailed(f"{path} is not a kubeconfig file with a current-context") from error
    if unknown := {"exec", "auth-provider", "username"} & user.keys():
        raise LaunchFailed(
            f"{path}: {', '.join(sorted(unknown))} of a user is not supported: create a service"
            " account, and write its token"
        )
    token = user.get("token", "")
    if file := user.get("tokenFile"):
        token = (path.parent / file).read_text().strip()
    if not url.startswith("https://"):
        return Cluster(url, token, None)
    authority = _data(path, cluster, "certificate-authority")
    tls = ssl.create_default_context(cadata=None if authority is None else authority.decode())
    if cluster.get("insecure-skip-tls-verify"):
        raise LaunchFailed(f"{path}: insecure-skip-tls-verify: name the certificate-authority")
    certificate, key = _data(path, user, "client-certificate"), _data(path, user, "client-key")
    if certificate is not None and key is not None:
        with tempfile.NamedTemporaryFile() as pair:  # the library reads files only
            pair.write(certificate + b"\n" + key)
            pair.flush()
            tls.load_cert_chain(pair.name)
    return Cluster(url, token, tls)


def _named(found: Any, kind: str, key: str, name: str) -> dict[str, Any]:
    [value] = [each[key] for each in found[kind] if each["name"] == name] or [None]
    if not isinstance(value, dict):
        raise KeyError(name)
    return value


def _data(path: Path, of: Mapping[str, Any], name: str) -> bytes | None:
    """Return the PEM of `name-data`, else of the file that `name` gives; None without both."""
    if data := of.get(f"{name}-data"):
        return base64.b64decode(data)
    return (path.parent / of[name]).read_bytes() if name in of else None
