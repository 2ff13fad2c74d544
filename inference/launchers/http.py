"""Short HTTP requests to the servers of models and to Kubernetes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from inference.launchers.launcher import LaunchFailed

TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of an HTTP response."""

    status: int
    body: bytes


async def send(
    method: str,
    url: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Send one request on a new connection. Redirects are not followed.

    Raises LaunchFailed without a complete response of at most `ANSWER_BYTES_MAX`.
    """
    options: dict[str, Any] = {} if tls is None else {"ssl": tls}
    try:
        async with (
            asyncio.timeout(timeout_s),
            aiohttp.ClientSession(trust_env=False) as session,
            session.request(
                method, url, data=body, headers=headers, allow_redirects=False, **options
            ) as response,
        ):
            content = await response.content.read(ANSWER_BYTES_MAX)
            while not response.content.at_eof():
                more = await response.content.read(ANSWER_BYTES_MAX)
                content += more
                if len(content) > ANSWER_BYTES_MAX:
                    raise LaunchFailed(f"{method} {url} returned more than 1 MiB")
            return Answer(response.status, content)
    except TimeoutError as error:
        raise LaunchFailed(f"{method} {url} had no response within {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise LaunchFailed(f"{method} {url} failed: {error}") from error
