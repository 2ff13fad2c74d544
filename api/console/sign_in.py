"""Sign-in of persons to the console, by a provider, a link or an invitation, and their sessions.

A session is a cookie that no page can read. A call with it also needs the header `weir-csrf`, whose
value only a page of this origin can learn: browsers send cookies with requests of other sites too.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import structlog
from aiohttp import web

from api.access.auth import Authenticator
from api.access.oidc import UNAVAILABLE, Flow, OpenIdClient, SignInFailed
from api.access.providers import Provider, SignInFile
from api.core.addresses import FORWARDED_FOR, FORWARDED_PROTO, is_local
from api.core.errors import IssuerUnavailable, PermissionDenied
from api.openai.error_responses import HttpFault
from api.openai.listener import peer_of, read_body
from metering.core.errors import DatabaseUnavailable, InvalidValue, TokenInvalid
from metering.store.db import Sessions
from metering.tenants.invitations import accept_invitation, offered
from metering.tenants.members import memberships_of
from metering.tenants.networks import Address
from metering.tenants.sign_in import (
    SESSION_FORM,
    Refusal,
    SessionTerms,
    SignedIn,
    SignInRefused,
    acting_in,
    begin_session,
    end_session,
    end_sessions_of,
    identify,
    person_of_link,
    signed_in,
    touch_session,
    use_link,
)

PAGES = "/console/sign-in/"
CALLBACK = "callback"
CSRF_HEADER, ORGANIZATION_HEADER = "weir-csrf", "weir-organization"
BODY_BYTES_MAX = 16_384  # a logout token, or a small object
FIELDS_MAX = 10  # of a form
FLOW_COOKIE_S = 600
TOUCHED_EVERY_S, TOUCHED_MAX = 60.0, 10_000
ROUTE = re.compile(r"/[\w/.@%&=?,:-]{0,300}", re.ASCII)
PLAIN_HTTP = (
    "This console is open over plain HTTP, so a network could read your session. Open it by https,"
    " or as localhost through a tunnel. For https, its operator sets WEIR_TLS_CERTIFICATE and"
    " WEIR_TLS_KEY, or WEIR_TRUSTED_PROXIES to a proxy that ends TLS and sends X-Forwarded-Proto."
)
# Of sessions that no provider bounds: those of links and invitations
TERMS = SessionTerms(timedelta(hours=12), timedelta(hours=1))

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Cookie:
    """Session in a request: its secret, and the secret by which it acts in the chosen organization.

    `acting` is None if the request names no organization and the person has several, or none.
    """

    secret: str
    acting: str | None


class SignIn:
    """Sign-in of persons, and the sessions of requests."""

    def __init__(
        self, file: SignInFile, sessions: Sessions, authenticator: Authenticator, *, tls: bool
    ) -> None:
        """`tls` says whether this server's HTTP port has TLS."""
        self._file = file
        self._sessions = sessions
        self._authenticator = authenticator
        self._is_secure = tls or file.url.startswith("https:")
        self.client = OpenIdClient(f"{file.url}/sign-in/{CALLBACK}")
        # Monotonic times at which the use of sessions was noted, by hash; the latest is last
        self._touched: OrderedDict[bytes, float] = OrderedDict()

    @property
    def server_url(self) -> str:
        """Address of this server, as browsers reach it; empty if it is not known."""
        return self._file.url.removesuffix("/console")

    @property
    def providers(self) -> list[dict[str, str]]:
        """The providers that the page offers."""
        return [{"name": each.name, "title": each.title} for each in self._file.providers]

    # Pages, which browsers open

    async def answer(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """Answer a request below `/console/sign-in/`. Raises: HttpFault."""
        step, _, name = path.partition("/")
        match step:
            case "start":
                return await self._start(request, self._provider(name))
            case "callback" if not name:
                return await self._finish(request)
            case "logout":
                return await self._logout(request, self._provider(name))
        raise HttpFault(404, "there is no such page: open /console/", "unknown_url")

    def _provider(self, name: str) -> Provider:
        if (provider := self._file.provider(name)) is None:
            known = ", ".join(each.name for each in self._file.providers) or "none"
            raise HttpFault(404, f"there is no such provider; known: {known}", "unknown_url")
        return provider

    async def _start(self, request: web.BaseRequest, provider: Provider) -> web.StreamResponse:
        """Send the browser to a provider."""
        method_is(request, "GET")
        self._check_network(request)
        route = request.query.get("route", "/")
        flow = Flow.begin(provider.name, route if ROUTE.fullmatch(route) else "/")
        try:
            address = await self.client.address(provider, flow)
        except SignInFailed as failed:
            return self._failed(request, provider.name, failed.reason, failed)
        response = found(address)
        # Lax: the provider sends the browser back with a link, across sites
        self._set(request, response, "sign-in", flow.cookie(), FLOW_COOKIE_S, same_site="Lax")
        return response

    async def _finish(self, request: web.BaseRequest) -> web.StreamResponse:
        """Let a person in whom a provider sends back."""
        method_is(request, "GET")
        provider_name = "unknown"
        try:
            flow = Flow.of_cookie(request.cookies.get(self._cookie(request, "sign-in"), ""))
            provider_name = flow.provider
            provider = self._file.provider(flow.provider)
            if provider is None:
                raise SignInFailed("expired", "the provider of the sign-in is not known any more")
            proof = await self.client.finish(provider, flow, request.query)
            async with self._sessions.begin() as session:
                person = await identify(session, proof.identity, provider.rules)
                secret = ""
                memberships = await memberships_of(session, person.id)
                if any(each.deactivated_at is None for each in memberships):
                    secret = await begin_session(
                        session,
                        person.id,
                        provider.terms,
                        provider=provider.name,
                        provider_session=proof.session_id,
                        address=self._address_text(request),
                    )
            if not secret:  # after the commit of what the groups end
                raise SignInRefused(Refusal.NOT_A_MEMBER)
        except SignInFailed as failed:
            return self._failed(request, provider_name, failed.reason, failed)
        except SignInRefused as refused:
            return self._failed(request, provider_name, refused.why, refused)
        except DatabaseUnavailable as away:
            return self._failed(request, provider_name, UNAVAILABLE, away)
        route = flow.route if ROUTE.fullmatch(flow.route) else "/"
        response = found(f"{self._file.url}/#{route}")
        self._set_session(request, response, secret, provider.terms)
        self._clear(request, response, "sign-in")
        return response

    async def _logout(self, request: web.BaseRequest, provider: Provider) -> web.StreamResponse:
        """End sessions that a provider says have ended (OpenID Connect Back-Channel Logout)."""
        method_is(request, "POST")
        body = await read_body(request, BODY_BYTES_MAX)
        try:
            form = dict(parse_qsl(body.decode(errors="replace"), max_num_fields=FIELDS_MAX))
        except ValueError:
            reason = f"the form has more than {FIELDS_MAX} fields"
            return plain(400, {"error": "invalid_request", "error_description": reason})
        try:
            ended = await self.client.logout(provider, form.get("logout_token", ""))
        except TokenInvalid as invalid:
            log.warning("logout_token_refused", provider=provider.name, cause=str(invalid))
            return plain(400, {"error": "invalid_request", "error_description": str(invalid)})
        except IssuerUnavailable as unavailable:
            log.warning("logout_token_unchecked", provider=provider.name, cause=str(unavailable))
            return plain(503, {"error": "temporarily_unavailable"})
        async with self._sessions.begin() as session:
            await end_sessions_of(
                session,
                provider=provider.name,
                issuer=provider.issuer,
                subject=ended.subject,
                provider_session=ended.session_id,
                begun_before=ended.begun_before,
            )
        return plain(200, {})

    def _failed(
        self, request: web.BaseRequest, provider: str, reason: str, cause: Exception
    ) -> web.Response:
        """Send the browser to the page, with a word that says why the sign-in failed."""
        incident = secrets.token_hex(4)
        log.warning(
            "sign_in_failed", provider=provider, reason=reason, cause=str(cause), number=incident
        )
        response = found(f"{self._file.url}/#/sign-in?failed={reason}&number={incident}")
        self._clear(request, response, "sign-in")
        return response

    # Calls, which the page makes

    async def offer(self, request: web.BaseRequest, body: Mapping[str, Any]) -> web.Response:
        """Answer whom a link or an invitation would sign in, so that the page can ask.

        Anyone can send a person a link of their own, to be told what that person does then. Raises:
        KeyInvalid, InvitationInvalid, InvalidValue, AuthenticationThrottled, PermissionDenied.
        """
        self._check_network(request)
        link = text_of(body, "secret", is_needed=False)
        async with self._guarded(request), self._sessions() as session:
            if link:
                person = await person_of_link(session, link)
                members = await memberships_of(session, person.id)
                organizations = [each.organization_name for each in members]
                return plain(
                    200,
                    {
                        "email": person.email,
                        "displayName": person.display_name,
                        "organizations": organizations,
                    },
                )
            invitation = await offered(session, text_of(body, "token"))
        organizations = [invitation.organization_name]
        return plain(200, {"email": invitation.email, "organizations": organizations})

    async def use_link(self, request: web.BaseRequest, body: Mapping[str, Any]) -> web.Response:
        """Let in the caller with a link.

        Raises: KeyInvalid, InvalidValue, AuthenticationThrottled.
        """
        self._check_network(request)
        link = text_of(body, "secret")
        async with self._guarded(request), self._sessions.begin() as session:
            person_id = await use_link(session, link)
            secret = await begin_session(
                session, person_id, TERMS, address=self._address_text(request)
            )
        return self._begun(request, secret)

    async def accept(self, request: web.BaseRequest, body: Mapping[str, Any]) -> web.Response:
        """Let in the caller with an invitation.

        Raises: InvitationInvalid, InvalidValue, AuthenticationThrottled.
        """
        self._check_network(request)
        token, name = text_of(body, "token"), text_of(body, "displayName", is_needed=False)
        async with self._guarded(request), self._sessions.begin() as session:
            accepted = await accept_invitation(
                session,
                token=token,
                display_name=name,
                address=self._address(request),
            )
            secret = await begin_session(
                session,
                accepted.member.person_id,
                TERMS,
                # Who invites knows the token too, and must not get what the person has elsewhere
                organization_id=accepted.member.organization_id,
                address=self._address_text(request),
            )
        return self._begun(request, secret)

    async def end(self, request: web.BaseRequest) -> web.Response:
        """End the session of a request, if there is one."""
        cookie = self.cookie(request)
        if cookie is not None:
            async with self._sessions.begin() as session:
                await end_session(session, cookie.secret)
        response = plain(200, {})
        self._clear(request, response, "session")
        return response

    def _guarded(self, request: web.BaseRequest) -> AbstractAsyncContextManager[None]:
        """Count failures of an address with those of API keys."""
        return self._authenticator.throttle.attempt(peer_of(request), lambda: False)

    def _begun(self, request: web.BaseRequest, secret: str) -> web.Response:
        response = plain(200, {})
        self._set_session(request, response, secret, TERMS)
        return response

    # Sessions of requests

    def cookie(self, request: web.BaseRequest) -> Cookie | None:
        """Return the session of a request that has no API key; None if it has none.

        Raises: PermissionDenied without the header that only a page of this origin can send.
        """
        secret = request.cookies.get(self._cookie(request, "session"), "")
        if not SESSION_FORM.fullmatch(secret) or "authorization" in request.headers:
            return None
        if request.method != "GET":
            sent = request.headers.get(CSRF_HEADER, "")
            if not secrets.compare_digest(sent.encode(), csrf_of(secret).encode()):
                raise PermissionDenied(
                    f"The header {CSRF_HEADER} is missing or wrong: open the page again."
                )
        return Cookie(secret, self._acting(secret, request.headers.get(ORGANIZATION_HEADER)))

    def _acting(self, secret: str, organization: str | None) -> str | None:
        if organization is None:
            return None
        try:
            return acting_in(secret, uuid.UUID(organization))
        except ValueError:
            raise InvalidValue(ORGANIZATION_HEADER, "must be the id of an organization") from None

    async def noted(self, cookie: Cookie) -> None:
        """Note that a session is used, once a minute at most."""
        digest, now = hashlib.sha256(cookie.secret.encode()).digest(), time.monotonic()
        if now - self._touched.get(digest, -TOUCHED_EVERY_S) < TOUCHED_EVERY_S:
            return
        self._touched[digest] = now
        self._touched.move_to_end(digest)
        if len(self._touched) > TOUCHED_MAX:
            self._touched.popitem(last=False)
        try:
            async with self._sessions.begin() as session:
                await touch_session(session, cookie.secret)
        except BaseException:
            self._touched.pop(digest, None)
            raise

    async def person_of(self, cookie: Cookie) -> SignedIn:
        """Return the person of a session, and its memberships. Raises: KeyInvalid."""
        async with self._sessions() as session:
            return await signed_in(session, cookie.secret)

    # Cookies

    def _has_tls(self, request: web.BaseRequest) -> bool:
        """Return whether the browser speaks TLS, to this server or to a proxy before it."""
        forwarded = request.headers.getall(FORWARDED_PROTO, ())
        return self._is_secure or self._authenticator.proxies.ended_tls(peer_of(request), forwarded)

    def _check_network(self, request: web.BaseRequest) -> None:
        """Refuse to sign in over a network that can read the session.

        Raises: PermissionDenied.
        """
        if not self._has_tls(request) and not is_local(f"{hostname_of(request.host)}:0"):
            raise PermissionDenied(PLAIN_HTTP)

    def _cookie(self, request: web.BaseRequest, name: str) -> str:
        """Return the name of a cookie. With the prefix, only this very host can have set it."""
        return f"{'__Host-' if self._has_tls(request) else ''}weir-{name}"

    def _set_session(
        self,
        request: web.BaseRequest,
        response: web.Response,
        secret: str,
        terms: SessionTerms,
    ) -> None:
        self._set(request, response, "session", secret, int(terms.lifetime.total_seconds()))

    def _set(
        self,
        request: web.BaseRequest,
        response: web.Response,
        name: str,
        value: str,
        lifetime_s: int,
        same_site: str = "Strict",
    ) -> None:
        response.set_cookie(
            self._cookie(request, name),
            value,
            max_age=lifetime_s,
            path="/",
            secure=self._has_tls(request),
            httponly=True,
            samesite=same_site,
        )

    def _clear(self, request: web.BaseRequest, response: web.Response, name: str) -> None:
        self._set(request, response, name, "", 0)

    def _address(self, request: web.BaseRequest) -> Address | None:
        forwarded = request.headers.getall(FORWARDED_FOR, ())
        return self._authenticator.proxies.origin(peer_of(request), forwarded).address

    def _address_text(self, request: web.BaseRequest) -> str:
        address = self._address(request)
        return "" if address is None else str(address)


def hostname_of(host: str) -> str:
    """Return the name or address in a header `Host`; empty if it is not valid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def csrf_of(secret: str) -> str:
    """Return the value of the header that a call with a session's cookie needs."""
    return hashlib.sha256(f"csrf {secret}".encode()).hexdigest()


def text_of(body: Mapping[str, Any], name: str, *, is_needed: bool = True) -> str:
    """Return a text of a JSON object. Raises: InvalidValue."""
    value = body.get(name, "")
    if not isinstance(value, str) or (is_needed and not value):
        raise InvalidValue(name, "must be a text")
    return value


def method_is(request: web.BaseRequest, method: str) -> None:
    if request.method != method:
        raise HttpFault(405, f"send {method}", "method_not_allowed", {"allow": method})


def found(address: str) -> web.Response:
    return web.Response(status=303, headers={"location": address, "cache-control": "no-store"})


def plain(status: int, body: Mapping[str, Any]) -> web.Response:
    return web.Response(
        status=status,
        body=json.dumps(body).encode(),
        headers={"content-type": "application/json", "cache-control": "no-store"},
    )
