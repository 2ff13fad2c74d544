"""Sign-in with OpenID Connect: the authorization code flow with PKCE, and back-channel logout.

The provider and its documents are the operator's choice, so addresses of the own network are
allowed. What a browser brings is not trusted: its answer counts only together with the cookie of
the same browser (`Flow`), and only for some minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import time
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from api.access.issuer_keys import (
    DOCUMENT_BYTES_MAX,
    IssuerKeys,
    KeySource,
    checked_issuer_url,
    discover,
    parse_object,
)
from api.access.issuers import (
    LEEWAY_S,
    Issuer,
    TokenUse,
    TokenVerifier,
    parse_token,
    time_claim,
)
from api.access.providers import Provider
from api.core.errors import IssuerUnavailable
from metering.core.errors import InvalidValue, TokenInvalid
from metering.core.outbound import DocumentUnread, get_document
from metering.tenants.billing_profiles import check_email
from metering.tenants.sign_in import Identity

FLOW_S = 600  # to sign in at the provider, with a second factor perhaps
READ_S = 10.0  # of one answer of a provider
EXCHANGES_AT_ONCE = 16  # with one provider
DISCOVERED_S, AGAIN_AFTER_S = 600.0, 30.0  # after a read that failed, if one is known
RANDOM_BYTES = 32
VALUE_CHARS_MAX = 4096  # of `code` and `state`
ID_TOKEN_BYTES_MAX = 64 * 1024  # with the groups of a person
LOGOUT_EVENT = "http://schemas.openid.net/event/backchannel-logout"
LIFETIME_MAX_S = 24 * 3600  # of an ID token, which is used at once


class SignInFailed(Exception):
    """The answer of the browser or of the provider does not prove the caller's identity.

    `reason` is a word for the page; the text is for the log.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


EXPIRED, CANCELLED, UNAVAILABLE, INVALID = "expired", "cancelled", "unavailable", "invalid"


@dataclass(frozen=True, slots=True)
class Flow:
    """A sign-in that has begun: kept by the browser in a cookie, which no page can read.

    `state` binds the provider's answer to this browser, `nonce` the ID token to this flow, and
    `verifier` the code to this server (PKCE). `route` is the page of the console to open then.
    """

    provider: str
    route: str
    state: str
    nonce: str
    verifier: str
    begun_at: int

    @classmethod
    def begin(cls, provider: str, route: str) -> Flow:
        state, nonce, verifier = (secrets.token_urlsafe(RANDOM_BYTES) for _ in range(3))
        return cls(provider, route, state, nonce, verifier, int(time.time()))

    @property
    def challenge(self) -> str:
        digest = hashlib.sha256(self.verifier.encode()).digest()
        return urlsafe_b64encode(digest).decode().rstrip("=")

    def cookie(self) -> str:
        return urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def of_cookie(cls, value: str) -> Flow:
        """Parse a cookie of `cookie`. Raises: SignInFailed."""
        try:
            found = parse_object(urlsafe_b64decode(value[:VALUE_CHARS_MAX]))
        except ValueError:
            found = {}
        names = ("provider", "route", "state", "nonce", "verifier")
        provider, route, state, nonce, verifier = (
            each if isinstance(each, str) and each.isascii() else ""
            for each in map(found.get, names)
        )
        begun_at = found.get("begun_at")
        if (
            not (provider and state and nonce and verifier and isinstance(begun_at, int))
            or not 0 <= int(time.time()) - begun_at < FLOW_S
        ):
            raise SignInFailed(EXPIRED, "the browser has no cookie of a sign-in that has begun")
        return cls(provider, route, state, nonce, verifier, begun_at)


@dataclass(frozen=True, slots=True)
class Proof:
    """Identity of a caller, and the provider's id of the session; empty if it named none."""

    identity: Identity
    session_id: str


@dataclass(frozen=True, slots=True)
class Logout:
    """Sessions that a provider ends: one of its own, all of a subject, or the one of both.

    Those that began after the Unix time `begun_before` are not meant: a token sent again ends none.
    """

    subject: str
    session_id: str
    begun_before: float


@dataclass(frozen=True, slots=True)
class _Endpoints:
    """Addresses that a provider announces. `methods` are those of authenticating this server."""

    authorization: str
    token: str
    userinfo: str
    methods: Sequence[str]
    names_issuer: bool
    read_at: float


class OpenIdClient:
    """Client of all providers. `keys.run` reads their keys in the background."""

    def __init__(self, redirect_uri: str) -> None:
        """`redirect_uri` is the address of this server to which providers send browsers back."""
        self.redirect_uri = redirect_uri
        self.keys = IssuerKeys(private=True)
        self._verifier = TokenVerifier(self.keys, remembered_max=0)  # each token comes once
        self._endpoints: dict[str, _Endpoints] = {}
        self._discoveries: dict[str, asyncio.Task[_Endpoints]] = {}
        self._exchanges: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(EXCHANGES_AT_ONCE)
        )

    async def address(self, provider: Provider, flow: Flow) -> str:
        """Return the address at the provider where a sign-in continues. Raises: SignInFailed."""
        endpoints = await self._discovered(provider)
        query = {
            "response_type": "code",
            "client_id": provider.client_id,
            "redirect_uri": self.redirect_uri,
            "scope": " ".join(provider.scopes),
            "state": flow.state,
            "nonce": flow.nonce,
            "code_challenge": flow.challenge,
            "code_challenge_method": "S256",
        }
        joint = "&" if urlsplit(endpoints.authorization).query else "?"
        return f"{endpoints.authorization}{joint}{urlencode(query)}"

    async def finish(self, provider: Provider, flow: Flow, answer: Mapping[str, str]) -> Proof:
        """Exchange the code in a provider's answer, and return who signed in.

        Raises: SignInFailed.
        """
        state = answer.get("state", "")
        if state != flow.state:  # both are from this browser, so times tell it nothing
            raise SignInFailed(EXPIRED, "`state` is that of another sign-in")
        endpoints = await self._discovered(provider)
        # RFC 9207: another provider must not get a code of this one, or bring one of its own
        if answer.get("iss", provider.issuer if not endpoints.names_issuer else "") != (
            provider.issuer
        ):
            raise SignInFailed(INVALID, "`iss` of the answer is another issuer")
        if error := answer.get("error", ""):
            shown = f"{error}: {answer.get('error_description', '')}"[:300]
            raise SignInFailed(CANCELLED if error == "access_denied" else INVALID, shown)
        code = answer.get("code", "")
        if not 0 < len(code) <= VALUE_CHARS_MAX:
            raise SignInFailed(INVALID, "the answer has no code")
        async with self._exchange_permit(provider):
            tokens = await self._exchange(provider, endpoints, flow, code)
            claims = await self._claims(provider, tokens.get("id_token"), flow.nonce)
            claims = await self._with_userinfo(provider, endpoints, claims, tokens)
        return Proof(identity_of(provider, claims), str(claims.get("sid", "")))

    async def logout(self, provider: Provider, text: str) -> Logout:
        """Verify a logout token, and return what it ends. Raises: TokenInvalid, IssuerUnavailable.

        (OpenID Connect Back-Channel Logout 1.0, section 2.6)
        """
        verified = await self._verifier.verify(
            parse_token(text), issuer_of(provider, TokenUse.LOGOUT)
        )
        issued_at = time_claim(verified.claims, "iat")
        if issued_at is None:
            raise TokenInvalid("`iat` is missing")
        events = verified.claims.get("events")
        if not isinstance(events, dict) or LOGOUT_EVENT not in events:
            raise TokenInvalid(f"`events` does not have {LOGOUT_EVENT}")
        if "nonce" in verified.claims:
            raise TokenInvalid("it has a `nonce`, so it is not a logout token")
        if not verified.subject and not verified.session_id:
            raise TokenInvalid("it has neither `sub` nor `sid`")
        return Logout(verified.subject, verified.session_id, issued_at + LEEWAY_S)

    @contextlib.asynccontextmanager
    async def _exchange_permit(self, provider: Provider) -> AsyncIterator[None]:
        """Wait for one of the exchanges with a provider. Raises: SignInFailed."""
        exchanges = self._exchanges[provider.name]
        try:
            async with asyncio.timeout(READ_S):
                await exchanges.acquire()
        except TimeoutError:
            raise SignInFailed(UNAVAILABLE, "too many sign-ins wait for the provider") from None
        try:
            yield
        finally:
            exchanges.release()

    async def _discovered(self, provider: Provider) -> _Endpoints:
        """Return the addresses of a provider. Callers share a read. Raises: SignInFailed."""
        known = self._endpoints.get(provider.name)
        if known is not None and time.monotonic() - known.read_at < DISCOVERED_S:
            return known
        reading = self._discoveries.get(provider.name)
        if reading is None:
            reading = asyncio.create_task(self._discover(provider, known))
            self._discoveries[provider.name] = reading
            reading.add_done_callback(partial(self._discovery_ended, provider.name))
        try:
            return await asyncio.shield(reading)
        except SignInFailed as failed:  # one instance in many tasks would collect their tracebacks
            raise SignInFailed(failed.reason, str(failed)) from None

    def _discovery_ended(self, name: str, reading: asyncio.Task[_Endpoints]) -> None:
        del self._discoveries[name]
        if not reading.cancelled():
            reading.exception()  # all who waited for it may be gone

    async def _discover(self, provider: Provider, known: _Endpoints | None) -> _Endpoints:
        try:
            found = await discover(provider.issuer, private=True)
        except (DocumentUnread, InvalidValue, ValueError) as error:
            if known is not None:
                known = replace(known, read_at=time.monotonic() - DISCOVERED_S + AGAIN_AFTER_S)
                self._endpoints[provider.name] = known
                return known
            raise SignInFailed(UNAVAILABLE, f"its discovery document: {error}") from error
        methods = found.get("token_endpoint_auth_methods_supported")
        endpoints = _Endpoints(
            authorization=self._endpoint(provider, found, "authorization_endpoint"),
            token=self._endpoint(provider, found, "token_endpoint"),
            userinfo=self._endpoint(provider, found, "userinfo_endpoint", is_needed=False),
            methods=methods if isinstance(methods, list) else ("client_secret_basic",),
            names_issuer=found.get("authorization_response_iss_parameter_supported") is True,
            read_at=time.monotonic(),
        )
        self._endpoints[provider.name] = endpoints
        return endpoints

    def _endpoint(
        self, provider: Provider, found: Mapping[str, Any], name: str, *, is_needed: bool = True
    ) -> str:
        address = found.get(name, "")
        if not address and not is_needed:
            return ""
        try:
            checked = checked_issuer_url(str(address), private=True, field=name)
        except InvalidValue as error:
            raise SignInFailed(UNAVAILABLE, f"its discovery document: {error}") from error
        if urlsplit(checked).scheme not in ("https", urlsplit(provider.issuer).scheme):
            raise SignInFailed(UNAVAILABLE, f"its `{name}` is not an address of https")
        return checked

    async def _exchange(
        self, provider: Provider, endpoints: _Endpoints, flow: Flow, code: str
    ) -> dict[str, Any]:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.redirect_uri,
            "code_verifier": flow.verifier,
        }
        headers = {}
        try:
            secret = provider.client_secret()
        except (OSError, ValueError) as error:
            raise SignInFailed(UNAVAILABLE, f"its client secret cannot be read: {error}") from error
        if not secret:
            form["client_id"] = provider.client_id
        elif "client_secret_basic" in endpoints.methods:
            pair = f"{quote(provider.client_id, safe='')}:{quote(secret, safe='')}"
            headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": provider.client_id, "client_secret": secret}
        return await self._read(endpoints.token, headers, urlencode(form))

    async def _claims(self, provider: Provider, token: object, nonce: str) -> Mapping[str, Any]:
        """Verify an ID token of a sign-in and return its claims. Raises: SignInFailed."""
        if not isinstance(token, str):
            raise SignInFailed(INVALID, "the provider sent no ID token")
        try:
            verified = await self._verifier.verify(
                parse_token(token, ID_TOKEN_BYTES_MAX), issuer_of(provider, TokenUse.SIGN_IN)
            )
        except TokenInvalid as error:
            raise SignInFailed(INVALID, f"its ID token: {error}") from error
        except IssuerUnavailable as error:
            raise SignInFailed(UNAVAILABLE, str(error)) from error
        if verified.claims.get("nonce") != nonce:
            raise SignInFailed(INVALID, "its ID token is that of another sign-in (`nonce`)")
        return verified.claims

    async def _with_userinfo(
        self,
        provider: Provider,
        endpoints: _Endpoints,
        claims: Mapping[str, Any],
        tokens: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """Add what only the provider's endpoint for claims says, if anything is missing."""
        wanted = {"email", *([provider.groups_claim] if provider.rules else [])}
        access = tokens.get("access_token")
        if wanted <= claims.keys() or not endpoints.userinfo or not isinstance(access, str):
            return claims
        if not access.isascii() or not access.isprintable():
            raise SignInFailed(INVALID, "its access token has unprintable characters")
        headers = {"Authorization": f"Bearer {access}"}
        found = await self._read(endpoints.userinfo, headers)
        if found.get("sub") != claims["sub"]:
            raise SignInFailed(INVALID, "its endpoint for claims answered for another `sub`")
        # `email_verified` tells of the address beside it
        known = claims if "email" in claims else found
        verified = {"email_verified": known["email_verified"]} if "email_verified" in known else {}
        merged = {**found, **claims}
        merged.pop("email_verified", None)
        return merged | verified

    async def _read(
        self, url: str, headers: Mapping[str, str], form: str | None = None
    ) -> dict[str, Any]:
        try:
            body = await get_document(
                url,
                private=True,
                bytes_max=DOCUMENT_BYTES_MAX,
                wait_s=READ_S,
                headers=headers,
                form=form,
            )
            return parse_object(body)
        except (DocumentUnread, ValueError) as error:
            raise SignInFailed(UNAVAILABLE, f"{urlsplit(url).path}: {error}") from error


def issuer_of(provider: Provider, use: TokenUse) -> Issuer:
    """Return the provider as an issuer of tokens for this server."""
    source = KeySource(provider.issuer)
    return Issuer(source, provider.client_id, lifetime_max_s=LIFETIME_MAX_S, use=use)


def identity_of(provider: Provider, claims: Mapping[str, Any]) -> Identity:
    """Return what a provider says of a person, without what it may not or does not vouch for.

    Raises: SignInFailed if it leaves groups out.
    """
    email = claims.get("email")
    address = email.strip().lower() if isinstance(email, str) else ""
    if address:
        try:
            check_email(address, "email")
        except InvalidValue:
            address = ""
    is_own = address.rpartition("@")[2] in provider.email_domains
    # Some write it as a text. Some never say it: the operator vouches for their own domains then.
    claimed = claims.get("email_verified", is_own)
    is_verified = claimed is True or claimed == "true"
    if not is_verified or (provider.email_domains and not is_own):
        address = ""
    elsewhere = claims.get("_claim_names")
    if provider.rules and isinstance(elsewhere, dict) and provider.groups_claim in elsewhere:
        # None would end memberships
        raise SignInFailed(
            INVALID,
            f"`{provider.groups_claim}` is left out, because the person has too many: let the"
            " provider send those that the rules name",
        )
    name = claims.get("name")
    return Identity(
        provider=provider.name,
        issuer=provider.issuer,
        subject=str(claims["sub"]),
        email=address,
        display_name=name if isinstance(name, str) else "",
        groups=groups_of(claims.get(provider.groups_claim)),
    )


def groups_of(value: object) -> frozenset[str]:
    """Return the groups in a claim: a list of names, or one name."""
    listed = value if isinstance(value, list) else [value]
    return frozenset(each for each in listed if isinstance(each, str))
