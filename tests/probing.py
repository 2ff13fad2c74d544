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
    """Return status and body of a path on the host of a URL. Raises: OSError, TimeoutError."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        assert response.headers["cache-control"] == "no-store"
        body = response.read()
        return response.status, json.loads(body) if body else None
    finally:
        connection.close()
