"""Issuer of tokens for tests: keys, tokens signed with them, and the two documents on a port.

Tokens are made by hand or with joserfc, the second so that a forged one differs in one thing only.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache
from typing import Any

from aiohttp import web
from joserfc import jws
from joserfc.jwk import ECKey, KeyParameters, OKPKey, RSAKey

AUDIENCE = "weir"
DISCOVERY = "/.well-known/openid-configuration"
SigningKey = RSAKey | ECKey | OKPKey


@cache
def key_of(kind: str, key_id: str, size: int = 2048) -> SigningKey:
    """Return a key pair by type and id: always the same one."""
    options: KeyParameters = {"kid": key_id}
    if kind == "RSA":
        with warnings.catch_warnings(action="ignore"):  # of weak ones
            return RSAKey.generate_key(size, options)
    if kind == "Ed25519":
        return OKPKey.generate_key("Ed25519", options)
    return ECKey.generate_key(kind, options)


def encoded(value: object) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return urlsafe_b64encode(raw).decode().rstrip("=")


class Signatures(jws.JWSRegistry):
    """All algorithms, without warnings of weak ones, and headers of any size."""

    max_header_length = 100_000

    def get_alg(self, name: str) -> Any:
        return self.algorithms[name]

    def check_header(self, header: Any) -> None:
        """Accept what no issuer writes."""


def signed(header: Mapping[str, Any], payload: bytes, key: Any) -> str:
    """Sign any payload with any header that joserfc signs."""
    registry = Signatures(strict_check_header=False)
    return jws.serialize_compact(dict(header), payload, key, registry=registry)


class IssuerDouble:
    """Issuer with a key of each kind. `published` are the ids of the keys in its set."""

    def __init__(self, url: str = "https://login.example.com", clock: Any = time.time) -> None:
        self.url = url
        self.clock = clock
        self.algorithm = "ES256"
        self.signing = key_of("P-256", "first")
        self.published: list[SigningKey] = [self.signing]
        self.read_count = 0
        self.answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] | None = None

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Return the claims of a token for five minutes; a change to None removes a claim."""
        now = int(self.clock())
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "ada",
            "iat": now,
            "exp": now + 300,
            "jti": f"token-{now}",
            "sid": "session-1",
        } | changes
        return {name: value for name, value in claims.items() if value is not None}

    def token(self, header: Mapping[str, Any] | None = None, **changes: Any) -> str:
        """Return a token that is accepted, unless a change says otherwise."""
        head = {"alg": self.algorithm, "kid": self.signing.kid} | dict(header or {})
        head = {name: value for name, value in head.items() if value is not None}
        return signed(head, json.dumps(self.claims(**changes)).encode(), self.signing)

    def rotate(self, key_id: str, *, keeps: bool = True) -> None:
        """Sign with a new key from now on, which is published beside the old ones."""
        self.signing = key_of("P-256", key_id)
        self.published = [*(self.published if keeps else ()), self.signing]

    def key_set(self) -> bytes:
        keys = [each.as_dict(private=False) for each in self.published]
        return json.dumps({"keys": keys}).encode()

    async def read(self, *_: object) -> bytes:
        """Answer as the source of keys without a network."""
        self.read_count += 1
        return self.key_set()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.answer is not None:
            return await self.answer(request)
        if request.path == DISCOVERY:
            return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})
        return web.Response(body=await self.read(), content_type="application/json")


@contextlib.asynccontextmanager
async def issuer() -> AsyncIterator[IssuerDouble]:
    """Serve an issuer on a port of the loopback interface."""
    double = IssuerDouble()
    server = web.Server(double._answer)
    runner = web.ServerRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    double.url = f"http://{host}:{port}"
    try:
        yield double
    finally:
        await runner.cleanup()
