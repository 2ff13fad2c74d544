"""Health checks over HTTP for load balancers and Kubernetes: `/livez`, `/readyz`, `/healthz`, `/health`. They need no key.

They answer on the port for HTTP and on the one for metrics, from what `health.py` has found last: no lookup, no thread, no queue.
The event loop answers, so a process whose loop hangs does not answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from aiohttp import web

from api.core.health import Health

LIVE, READY = "/livez", frozenset({"/readyz", "/healthz", "/health"})
METHODS = ("GET", "HEAD")
HEADERS = {"content-type": "application/json", "cache-control": "no-store"}

Handle = Callable[[web.BaseRequest], Coroutine[Any, Any, web.StreamResponse]]


class Probes:
    """Answers health checks."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def before(self, handle: Handle) -> Handle:
        """A handler that answers health checks itself and passes on every other request."""

        async def answer_or_pass_on(request: web.BaseRequest) -> web.StreamResponse:
            answer = self.answer(request)
            return await handle(request) if answer is None else answer

        return answer_or_pass_on

    def answer(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a health check; None for any other path."""
        path = request.path
        if path != LIVE and path not in READY:
            return None
        if request.method not in METHODS:
            wrong = {"status": "error", "reasons": [f"{path} takes {' and '.join(METHODS)}"]}
            return answered(405, wrong, {"allow": ", ".join(METHODS)})
        if path == LIVE:
            return answered(200, {"status": "live"})
        reasons = self._health.reasons
        if reasons:
            return answered(503, {"status": "not ready", "reasons": list(reasons)})
        return answered(200, {"status": "ready"})


def answered(status: int, body: Mapping[str, object], more: Mapping[str, str] | None = None) -> web.Response:
    """A response that no proxy keeps. more: further headers."""
    return web.Response(status=status, body=json.dumps(body).encode() + b"\n", headers={**HEADERS, **(more or {})})
