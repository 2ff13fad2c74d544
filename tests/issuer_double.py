"""Issuer of tokens for tests: keys, tokens signed with them, and the two documents on a port.

Tokens are made by hand or with joserfc, the second so that a forged one differs in one thing only.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from base64 import b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache
from hashlib import sha256
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote

from aiohttp import web
from joserfc import jws
from joserfc.jwk import ECKey, KeyParameters, OKPKey, RSAKey

AUDIENCE = "weir"
DISCOVERY = "/.well-known/openid-configuration"
SigningKey = RSAKey | ECKey | OKPKey
Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Double = TypeVar("Double", bound="IssuerDouble")


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
        self.answer: Answer | None = None

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


class ProviderDouble(IssuerDouble):
    """OpenID provider with the rules that OpenID Connect Core 1.0 and RFC 7636 have for a client.

    `person` has the claims of the person that signs in. `in_userinfo` are those that only the
    endpoint for claims says. Each code works once, for its client, address and verifier. `instead`
    has the answers of paths that are not those of a provider.
    """

    CLIENT, SECRET = "weir-console", "s3cret/with:signs"

    def __init__(self) -> None:
        super().__init__()
        self.redirect_uri = ""
        self.person: dict[str, Any] = {}
        self.in_userinfo: frozenset[str] = frozenset({"email", "email_verified", "groups"})
        self.token_changes: dict[str, Any] = {}
        self.methods: list[str] | None = None  # of authenticating the client, as announced
        self.instead: dict[str, Answer] = {}
        self._codes: dict[str, dict[str, str]] = {}
        self._access: dict[str, dict[str, Any]] = {}

    def authorize(self, query: Mapping[str, str]) -> dict[str, str]:
        """Answer an authorization request as after a sign-in; the browser takes it to the client.

        Raises AssertionError for a request that a provider refuses.
        """
        assert query["response_type"] == "code"
        assert query["client_id"] == self.CLIENT
        assert query["redirect_uri"] == self.redirect_uri
        assert "openid" in query["scope"].split()
        assert query["code_challenge_method"] == "S256"
        assert len(query["code_challenge"]) == 43
        assert all(len(query[name]) >= 32 for name in ("state", "nonce"))
        code = f"code-{len(self._codes)}"
        self._codes[code] = dict(query)
        return {"code": code, "state": query["state"], "iss": self.url}

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if (answer := self.instead.get(request.path, self.answer)) is not None:
            return await answer(request)
        match request.path:
            case "/.well-known/openid-configuration":
                return web.json_response(self.document())
            case "/token":
                return await self._token(request)
            case "/userinfo":
                access = request.headers["authorization"].removeprefix("Bearer ")
                if access not in self._access:
                    return web.Response(status=401)
                return web.json_response(self._access[access])
        return await super()._answer(request)

    def document(self) -> dict[str, Any]:
        """Return what the provider says of itself."""
        methods = self.methods
        return {
            "issuer": self.url,
            "jwks_uri": f"{self.url}/keys",
            "authorization_endpoint": f"{self.url}/authorize?tenant=1",
            "token_endpoint": f"{self.url}/token",
            "userinfo_endpoint": f"{self.url}/userinfo",
            "authorization_response_iss_parameter_supported": True,
        } | ({} if methods is None else {"token_endpoint_auth_methods_supported": methods})

    def _is_client(self, request: web.BaseRequest, form: Mapping[str, str]) -> bool:
        """Return whether a request has the client's secret, in the way that was announced."""
        if "client_secret_basic" in (self.methods or ("client_secret_basic",)):
            sent = b64decode(request.headers.get("authorization", "").removeprefix("Basic "))
            client, _, secret = sent.decode().partition(":")
            return (unquote(client), unquote(secret)) == (self.CLIENT, self.SECRET)
        secret = "" if self.methods == ["none"] else self.SECRET
        return (form.get("client_id"), form.get("client_secret", "")) == (self.CLIENT, secret)

    async def _token(self, request: web.BaseRequest) -> web.Response:
        form = {name: values[0] for name, values in parse_qs(await request.text()).items()}
        if not self._is_client(request, form):
            return web.json_response({"error": "invalid_client"}, status=401)
        requested = self._codes.pop(form.get("code", ""), {})
        digest = sha256(form.get("code_verifier", "").encode()).digest()
        is_own = (
            form.get("grant_type") == "authorization_code"
            and form.get("redirect_uri") == requested.get("redirect_uri")
            and encoded(digest) == requested.get("code_challenge")
        )
        if not is_own:
            return web.json_response({"error": "invalid_grant"}, status=400)
        claims = {"sub": "ada"} | self.person
        access = f"access-{len(self._access)}"
        self._access[access] = claims
        own = {name: value for name, value in claims.items() if name not in self.in_userinfo}
        id_token = self.token(
            **(
                {"aud": self.CLIENT, "nonce": requested["nonce"], "jti": None}
                | own
                | self.token_changes
            )
        )
        return web.json_response(
            {"access_token": access, "token_type": "Bearer", "id_token": id_token}
        )


@contextlib.asynccontextmanager
async def issuer() -> AsyncIterator[IssuerDouble]:
    """Serve an issuer on a port of the loopback interface."""
    async with served(IssuerDouble()) as double:
        yield double


@contextlib.asynccontextmanager
async def provider(port: int = 0) -> AsyncIterator[ProviderDouble]:
    """Serve a provider on a port of the loopback interface."""
    async with served(ProviderDouble(), port) as double:
        yield double


@contextlib.asynccontextmanager
async def served(double: Double, port: int = 0) -> AsyncIterator[Double]:
    server = web.Server(double._answer)
    runner = web.ServerRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    host, port = runner.addresses[0][:2]
    double.url = f"http://{host}:{port}"
    try:
        yield double
    finally:
        await runner.cleanup()
