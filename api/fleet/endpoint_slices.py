"""Ready endpoints of a Kubernetes service, followed by its EndpointSlices as they change.

Lists the slices of a service, then watches them from the version of that list on. A watch that ends
goes on from the last version it has seen, which bookmarks keep young; once the API has forgotten
that version (410 Gone), the slices are listed again. While the API cannot be reached, the last
answer counts. Never sends anything but GET.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import aiohttp
import structlog

from common.backoff import Backoff
from common.incidents import Retries
from inference.launchers.kubernetes import read_cluster
from inference.launchers.launcher import LaunchFailed

SERVICE_LABEL = "kubernetes.io/service-name"
PAGE_SIZE = 100  # slices, each of at most 1,000 endpoints
WATCH_S = 60  # after which a watch is renewed, so that a connection that died is noticed
ANSWER_S = 10.0  # for a page of a list, and beyond the end of a watch
ANSWER_BYTES_MAX = 32 << 20  # of a page, or of one event
PAUSE_S_MIN, PAUSE_S_MAX = 0.5, 30.0  # between attempts while the API refuses or is away
# Watches that end one after the other without an event: some proxies end them at once.
EMPTY_WATCHES_MAX = 3
GONE = 410
REMEDIES = {
    401: "renew the token",
    403: "allow the service account the verbs list and watch on endpointslices",
    404: "this API has no EndpointSlices of discovery.k8s.io/v1",
}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SlicesTerms:
    """Service whose endpoints are followed. `kubeconfig` has the credentials; None: the pod's."""

    namespace: str
    service: str
    kubeconfig: Path | None = None

    @property
    def path(self) -> str:
        """Path of the namespace's slices in the HTTP API."""
        return f"/apis/discovery.k8s.io/v1/namespaces/{quote(self.namespace)}/endpointslices"


class Refused(Exception):
    """The API refused a request with a status, or answered something unreadable."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {REMEDIES.get(status, 'see its log')}. {message}")
        self.status = status


class Endpoint(NamedTuple):
    """Address of a pod. `identity` is the pod's uid, equal in the slices of both families."""

    host: str
    identity: str


class EndpointSlices:
    """Slices of one service, and the addresses of its ready endpoints."""

    def __init__(self, terms: SlicesTerms, changed: Callable[[], None]) -> None:
        """`changed` is called after each change of the slices."""
        self._terms = terms
        self._changed = changed
        self._slices: dict[str, Mapping[str, Any]] = {}  # by name
        self._version = ""  # of the last event or list; empty: list them
        self._retries = Retries("endpoint_slices")
        self.listed = asyncio.Event()  # set once there is a first answer
        self.first_attempt = asyncio.Event()  # set once that was tried

    def addresses(self, port: int) -> tuple[str, ...]:
        """Return "host:port" of each endpoint that takes requests at this port, sorted."""
        return ready_addresses(self._slices.values(), port)

    async def run(self) -> None:
        """Follow the slices until cancelled."""
        backoff = Backoff(PAUSE_S_MIN, PAUSE_S_MAX)
        is_failing = was_gone = False
        empty_count = 0
        while True:
            try:
                if not self._version:
                    await self._list()
                event_count = await self._watch()
                if is_failing:
                    log.info("endpoint_slices_followed_again", service=self._terms.service)
                is_failing = was_gone = False
                backoff.reset()
                empty_count = 0 if event_count else empty_count + 1
                if empty_count < EMPTY_WATCHES_MAX:
                    continue
            except Refused as refused:
                if refused.status == GONE:
                    self._version = ""
                    if not was_gone:  # a second one in a row waits
                        was_gone = True
                        continue
                cause: object = refused
            except (aiohttp.ClientError, LaunchFailed, OSError, TimeoutError) as error:
                cause = str(error) or type(error).__name__
            except Exception as error:
                cause = f"unexpected error, incident {self._retries.failed(error)}"
            else:
                cause = "its watches end at once"
            if not is_failing:
                log.warning(
                    "endpoint_slices_not_followed",
                    namespace=self._terms.namespace,
                    service=self._terms.service,
                    cause=str(cause),
                )
            is_failing = True
            self.first_attempt.set()
            # Many processes lose the same API at once.
            await asyncio.sleep(backoff.next_s() * random.uniform(0.5, 1.0))

    async def _list(self) -> None:
        """Read all slices, in pages of one version."""
        found: dict[str, Mapping[str, Any]] = {}
        query = {"labelSelector": f"{SERVICE_LABEL}={self._terms.service}", "limit": str(PAGE_SIZE)}
        while True:
            async with aclosing(self._get(query, ANSWER_S)) as bodies:
                page = await parsed(await anext(bodies))
            for each in page.get("items") or ():
                found[name_of(each)] = each
            metadata = page.get("metadata") or {}
            if not (rest := metadata.get("continue")):
                break
            query["continue"] = rest
        self._slices, self._version = found, str(metadata.get("resourceVersion", ""))
        self.listed.set()
        self.first_attempt.set()
        self._changed()

    async def _watch(self) -> int:
        """Follow events until the watch ends; return their number. Raises: Refused."""
        query = {
            "labelSelector": f"{SERVICE_LABEL}={self._terms.service}",
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_S),
        }
        count = 0
        lines = self._get(query, WATCH_S + ANSWER_S, is_watch=True)
        async with aclosing(lines):
            async for line in lines:
                self._take(await parsed(line))
                count += 1
        return count

    def _take(self, event: Mapping[str, Any]) -> None:
        """Handle one event of a watch. Raises: Refused."""
        kind, of = event.get("type"), event.get("object")
        if not isinstance(of, dict):
            raise Refused(200, "an event without an object")
        if kind == "ERROR":
            raise Refused(int(of.get("code") or 500), str(of.get("message", "")))
        if kind in ("ADDED", "MODIFIED"):
            self._slices[name_of(of)] = of
        elif kind == "DELETED":
            self._slices.pop(name_of(of), None)
        if version := (of.get("metadata") or {}).get("resourceVersion"):
            self._version = str(version)
        if kind != "BOOKMARK":
            self._changed()

    async def _get(
        self, query: Mapping[str, str], timeout_s: float, *, is_watch: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Yield the body of a response, or each of its lines as it comes. Raises: Refused."""
        cluster = await asyncio.to_thread(read_cluster, self._terms.kubeconfig)
        headers = {"accept": "application/json"}
        if cluster.token:
            headers["authorization"] = f"Bearer {cluster.token}"
        options: dict[str, Any] = {} if cluster.tls is None else {"ssl": cluster.tls}
        url = f"{cluster.url}{self._terms.path}?{urlencode(query)}"
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=ANSWER_S)
        async with (
            aiohttp.ClientSession(trust_env=False, timeout=timeout) as session,
            session.get(url, headers=headers, allow_redirects=False, **options) as response,
        ):
            rest = bytearray()
            async for part in response.content.iter_any():
                rest += part
                if len(rest) > ANSWER_BYTES_MAX:
                    raise Refused(response.status, "the answer is longer than 32 MiB")
                if is_watch and response.status == 200 and b"\n" in part:
                    *lines, rest = rest.split(b"\n")
                    for line in lines:
                        yield bytes(line)
            if response.status != 200:
                raise Refused(response.status, message_of(bytes(rest)))
            if not is_watch:
                yield bytes(rest)


async def parsed(body: bytes) -> dict[str, Any]:
    """Parse an object, in a thread: a page may have megabytes. Raises: Refused."""
    try:
        found = await asyncio.to_thread(json.loads, body)
    except ValueError as error:
        raise Refused(200, f"the answer is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused(200, "the answer is not an object")
    return found


def message_of(body: bytes) -> str:
    """Return the message of a Status object, or an empty text."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def name_of(of: Mapping[str, Any]) -> str:
    """Return the name of an object. Raises: Refused."""
    metadata = of.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("name"):
        raise Refused(200, "an object without a name")
    return str(metadata["name"])


def ready_addresses(slices: Iterable[Mapping[str, Any]], port: int) -> tuple[str, ...]:
    """Return "host:port" of the endpoints that take requests at a TCP port, sorted.

    A pod that is in slices of both families counts once, by its IPv4 address.
    """
    families: dict[str, list[Endpoint]] = {"IPv4": [], "IPv6": []}
    for each in slices:
        family = families.get(str(each.get("addressType")))
        if family is None or not has_port(each, port):
            continue
        family += (found for found in map(endpoint_of, each.get("endpoints") or ()) if found)
    hosts = {each.host for each in families["IPv4"]}
    known = {each.identity for each in families["IPv4"]}
    has_four = bool(hosts)
    for six in families["IPv6"]:
        if six.identity not in known and not (has_four and six.identity == six.host):
            hosts.add(six.host)
    return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in sorted(hosts))


def has_port(of: Mapping[str, Any], port: int) -> bool:
    """Return whether the endpoints of a slice listen at a TCP port. Without a number, at any."""
    return any(
        (each.get("protocol") or "TCP") == "TCP" and each.get("port") in (port, None)
        for each in of.get("ports") or ()
    )


def endpoint_of(of: Mapping[str, Any]) -> Endpoint | None:
    """Return an endpoint that takes new requests, by its first address; None for another one.

    An unknown readiness counts as ready. An endpoint that ends may be called ready, too.
    """
    conditions = of.get("conditions") or {}
    if conditions.get("ready") is False or conditions.get("terminating") is True:
        return None
    try:
        host = str(ipaddress.ip_address(of["addresses"][0]))
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    reference = of.get("targetRef") or {}
    return Endpoint(host, str(reference.get("uid") or host))
