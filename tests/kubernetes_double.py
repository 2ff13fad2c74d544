"""Doubles of a Kubernetes API, strict about what the published API refuses.

`KubernetesApi` has scalable objects, `SlicesApi` the EndpointSlices of a namespace.

It enforces bearer tokens (401), verbs (403), known objects and subresources (404), content types of
patches (415), `metadata.resourceVersion` as a condition (409), and valid numbers (422).
A controller follows after some polls: `status.replicas` lags behind `spec.replicas`, and 0 is left
out of `spec`, as in autoscaling/v1. It does not prove that pods start, nor admission webhooks,
quotas, or an API server that is upgraded meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from aiohttp import web

PATCH_TYPES = {
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
}
TOKEN = "token-of-weir"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class ScaledObject:
    """Object with a number of replicas at `spec.replicas`."""

    count: int = 0
    version: int = 1
    present: int = 0
    has_scale: bool = True
    lag: int = 1  # reads of the status before the controller has followed

    def follow(self) -> None:
        if self.present != self.count:
            self.lag -= 1
            if self.lag <= 0:
                self.present, self.lag = self.count, 1


@dataclass
class KubernetesApi:
    """State of the double. `conflicts` is the number of changes by others before each patch."""

    objects: dict[str, ScaledObject] = field(default_factory=dict)
    verbs: set[str] = field(default_factory=lambda: {"get", "patch"})
    conflicts: int = 0
    patches: list[Any] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return status(401, "Unauthorized")
        verb = {"GET": "get", "PATCH": "patch"}.get(request.method, "")
        if verb not in self.verbs:
            return status(403, f"cannot {verb} resource: forbidden")
        path, mark, subresource = request.path.partition("/scale")
        found = self.objects.get(path)
        if found is None or subresource or (mark and not found.has_scale):
            return status(404, "the server could not find the requested resource")
        if verb == "patch":
            refused = self.patch(found, request.content_type, await request.read())
            if refused is not None:
                return refused
        else:
            found.follow()
        return web.json_response(self.shown(found, is_scale=bool(mark)))

    def patch(self, found: ScaledObject, content_type: str, body: bytes) -> web.Response | None:
        if content_type not in PATCH_TYPES:
            return status(415, "the body of the request was in an unknown format")
        assert content_type == "application/merge-patch+json", "the only one for all kinds"
        sent = json.loads(body)
        if self.conflicts:
            self.conflicts -= 1
            found.version += 1
        wanted = sent.get("metadata", {}).get("resourceVersion")
        if wanted is not None and wanted != str(found.version):
            return status(
                409,
                "the object has been modified; please apply your changes to the"
                " latest version and try again",
            )
        count = sent["spec"]["replicas"]
        if not isinstance(count, int) or count < 0:
            return status(422, "spec.replicas: Invalid value: must be greater than or equal to 0")
        self.patches.append(count)
        found.count, found.version = count, found.version + 1
        return None

    def shown(self, found: ScaledObject, *, is_scale: bool) -> dict[str, Any]:
        kind = {"kind": "Scale", "apiVersion": "autoscaling/v1"} if is_scale else {"kind": "Any"}
        return kind | {
            "metadata": {"name": "chat", "resourceVersion": str(found.version)},
            "spec": {"replicas": found.count} if found.count or not is_scale else {},
            "status": {"replicas": found.present},
        }


def status(code: int, message: str) -> web.Response:
    """Build a Status object, as the API answers a refused request."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}
    return web.json_response(body | {"code": code}, status=code)


@asynccontextmanager
async def kubernetes_api(*paths: str) -> AsyncIterator[KubernetesApi]:
    """Serve an API with objects at these paths."""
    api = KubernetesApi({path: ScaledObject() for path in paths})
    async with served(api.handle) as api.url:
        yield api


@asynccontextmanager
async def served(handle: Handler, port: int = 0) -> AsyncIterator[str]:
    """Serve a handler; yield its URL."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def endpoint(*addresses: str, uid: str = "", **conditions: bool | None) -> dict[str, Any]:
    """Build an endpoint. `uid` is that of its pod."""
    found: dict[str, Any] = {"addresses": list(addresses)}
    if conditions:
        found["conditions"] = {name: each for name, each in conditions.items() if each is not None}
    if uid:
        reference = {"kind": "Pod", "name": uid, "namespace": "models", "uid": uid}
        found |= {"targetRef": reference, "nodeName": "node", "zone": "a"}
    return found


def endpoint_slice(
    name: str,
    *endpoints: dict[str, Any],
    port: int | None = 8001,
    family: str = "IPv4",
    service: str = "vllm",
) -> dict[str, Any]:
    """Build a slice, as the controller of Kubernetes writes it."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": "models",
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": "grpc", "protocol": "TCP"} | ({} if port is None else {"port": port})],
    }


class SlicesApi:
    """EndpointSlices of the namespace `models`, with a history that watches follow.

    It enforces bearer tokens (401), verbs (403), the known path (404), and `resourceVersion`: a
    watch gets exactly the later events, or 410 once they are forgotten. Events of other services
    are left out by the label, but count. A watch ends after `watch_s`, with a bookmark if allowed.
    """

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[int, str, dict[str, Any]]] = []
        self.version = 100
        self.forgotten = 0  # versions up to this one
        self.verbs = {"list", "watch"}
        self.watch_s = 60.0
        self.page_size = 100
        self.refuses = 0  # status of every answer; 0: none
        self.answers_gone_by_status = False
        self.requests: list[str] = []  # "list", or "watch VERSION"
        self.changed = asyncio.Event()

    def put(self, value: dict[str, Any]) -> None:
        """Create or change a slice."""
        name = value["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self._record(kind, value)
        self.slices[name] = self.events[-1][2]

    def delete(self, name: str) -> None:
        """Delete a slice."""
        self._record("DELETED", self.slices.pop(name))

    def forget(self) -> None:
        """Forget all past events, as etcd does after some minutes, and end all watches."""
        self.forgotten, self.events = self.version, []
        self._notify()

    def _record(self, kind: str, value: dict[str, Any]) -> None:
        self.version += 1
        metadata = value["metadata"] | {"resourceVersion": str(self.version)}
        self.events.append((self.version, kind, value | {"metadata": metadata}))
        self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.refuses:
            return status(self.refuses, "not now")
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return status(401, "Unauthorized")
        verb = "watch" if request.query.get("watch") in ("1", "true") else "list"
        if request.method != "GET" or verb not in self.verbs:
            return status(403, f"cannot {verb} resource endpointslices")
        if request.path != "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices":
            return status(404, "the server could not find the requested resource")
        label, _, service = unquote(request.query.get("labelSelector", "")).partition("=")
        assert label == "kubernetes.io/service-name"
        if verb == "list":
            return self.list(request, service)
        return await self.watch(request, service)

    def list(self, request: web.Request, service: str) -> web.Response:
        self.requests.append("list")
        of = [each for name, each in sorted(self.slices.items()) if of_service(each, service)]
        begin = int(request.query.get("continue", 0))
        end = begin + min(int(request.query["limit"]), self.page_size)
        metadata = {"resourceVersion": str(self.version)}
        if end < len(of):
            metadata["continue"] = str(end)
        kind = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList"}
        return web.json_response(kind | {"metadata": metadata, "items": of[begin:end]})

    async def watch(self, request: web.Request, service: str) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        self.requests.append(f"watch {seen}")
        if seen < self.forgotten and self.answers_gone_by_status:
            return status(410, "too old resource version")
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)

        async def send(kind: str, value: dict[str, Any]) -> None:
            await response.write(json.dumps({"type": kind, "object": value}).encode() + b"\n")

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(self.watch_s, float(request.query["timeoutSeconds"]))):
                while not self.refuses:
                    if seen < self.forgotten:
                        gone = {"kind": "Status", "status": "Failure", "reason": "Expired"}
                        await send("ERROR", gone | {"code": 410, "message": "too old"})
                        return response
                    changed = self.changed
                    for version, kind, value in self.events:
                        if version > seen and of_service(value, service):
                            await send(kind, value)
                    seen = self.version
                    await changed.wait()
        if request.query.get("allowWatchBookmarks") == "true":
            metadata = {"resourceVersion": str(seen)}
            await send("BOOKMARK", {"kind": "EndpointSlice", "metadata": metadata})
        return response


def of_service(value: dict[str, Any], service: str) -> bool:
    return bool(value["metadata"]["labels"]["kubernetes.io/service-name"] == service)
