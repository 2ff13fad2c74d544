"""Health checks over HTTP, like those of a load balancer."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 30.0


def probe(
    url: str, path: str, *, method: str = "GET", timeout_s: float = TIMEOUT_S
) -> tuple[int, dict[str, Any] | None]:
    """Return status and body, without the list of parts, of a path on the host of a URL.

    Raises: OSError, TimeoutError.
    """
    status, body = _probed(url, path, method, timeout_s)
    if body is not None:
        body.pop("parts", None)
    return status, body


def parts_of(url: str) -> dict[str, dict[str, str]]:
    """Return the parts that the readiness check of a metrics port lists."""
    _, body = _probed(url, "/readyz", "GET", TIMEOUT_S)
    assert body is not None
    parts: dict[str, dict[str, str]] = body["parts"]
    return parts


def _probed(
    url: str, path: str, method: str, timeout_s: float
) -> tuple[int, dict[str, Any] | None]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        assert response.headers["cache-control"] == "no-store"
        body = response.read()
        return response.status, json.loads(body) if body else None
    finally:
        connection.close()
