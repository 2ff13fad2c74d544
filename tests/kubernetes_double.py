"""Double of a Kubernetes API with scalable objects, strict about what the published API refuses.

It enforces bearer tokens (401), verbs (403), known objects and subresources (404), content types of
patches (415), `metadata.resourceVersion` as a condition (409), and valid numbers (422).
A controller follows after some polls: `status.replicas` lags behind `spec.replicas`, and 0 is left
out of `spec`, as in autoscaling/v1. It does not prove that pods start, nor admission webhooks,
quotas, or an API server that is upgraded meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PATCH_TYPES = {
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
}
TOKEN = "token-of-weir"


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
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        await runner.cleanup()
