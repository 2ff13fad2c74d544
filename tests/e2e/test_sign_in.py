"""Sign-in to the console: the flow with a provider, groups and roles, sessions, and forgeries."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import aiohttp
import pytest
import yaml
from aiohttp import web
from sqlalchemy import text

from api.access.auth import Authenticator
from api.access.oidc import Flow
from api.access.providers import Provider, SignInFile
from api.console.sign_in import Cookie, SignIn, csrf_of
from api.core.addresses import Proxies
from metering.core.errors import InvalidValue
from metering.tenants.invitations import accept_invitation, invite
from metering.tenants.members import (
    deactivate_person,
    find_person,
    memberships_of,
    reactivate_person,
    remove_member,
)
from metering.tenants.networks import networks_of
from metering.tenants.sign_in import (
    SessionTerms,
    acting_in,
    authenticate_session,
    begin_session,
    create_link,
    use_link,
)
from metering.tenants.tenants import rename_organization
from tests.conftest import as_application, new_database
from tests.e2e.test_console import missing_headers, reason_of
from tests.e2e.test_console_browser import EVERY_VIEW, browsed, faults
from tests.issuer_double import IssuerDouble, ProviderDouble, provider, served
from tests.service import PATIENCE_S, Service, Tenant, running

NUMBERS = itertools.count()
TESTS_MAX = 100
URL = "http://127.0.0.1:1/console"
SESSION, FLOW = "weir-session", "weir-sign-in"
HOUR = SessionTerms(timedelta(hours=1), timedelta(hours=1))


@dataclass
class Browser:
    """Browser at the console: it keeps cookies, and follows no redirects."""

    http: aiohttp.ClientSession
    service: Service
    cookies: dict[str, str] = field(default_factory=dict)
    csrf: str = ""
    organization: str = ""

    def url(self, path: str) -> str:
        return f"{self.service.openai_url.removesuffix('/v1')}/console/{path}"

    async def send(
        self, method: str, path: str, headers: dict[str, str] | None = None, **options: Any
    ) -> tuple[aiohttp.ClientResponse, Any]:
        sent = dict(headers or {})
        if self.cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        async with self.http.request(
            method, self.url(path), headers=sent, allow_redirects=False, **options
        ) as answer:
            body = await answer.read()
            for name, morsel in answer.cookies.items():
                assert morsel["httponly"], "no page may read it"
                assert morsel["path"] == "/"
                if morsel["max-age"] == "0":
                    self.cookies.pop(name, None)
                else:
                    self.cookies[name] = morsel.value
            assert missing_headers(answer.headers) == {}
            is_json = answer.content_type == "application/json"
            return answer, json.loads(body) if is_json and body else body

    async def call(self, name: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Make a call of the page."""
        own = {"weir-csrf": self.csrf, "weir-organization": self.organization}
        sent = {name: value for name, value in (own | headers).items() if value}
        answer, found = await self.send("POST", f"api/{name}", sent, json=body or {})
        return answer.status, found

    async def session(self) -> Any:
        """Read the session, and act in its first organization from now on."""
        answer, found = await self.send("GET", "api/session")
        if answer.status == 200 and found.get("csrf"):
            self.csrf = found["csrf"]
            self.organization = found["organizations"][0]["id"]
        return found

    async def start(self, double: ProviderDouble, route: str = "/usage") -> dict[str, str]:
        """Go to the provider, and return its answer, which the browser is to take back."""
        answer, _ = await self.send("GET", "sign-in/start/corp", params={"route": route})
        assert answer.status == 303
        address = urlsplit(answer.headers["location"])
        assert address.path == "/authorize"
        query = dict(parse_qsl(address.query))
        assert query.pop("tenant") == "1"
        return double.authorize(query)

    async def finish(self, answer: dict[str, str]) -> str:
        """Take an answer back; return where the browser is sent then."""
        found, _ = await self.send("GET", "sign-in/callback", params=answer)
        assert found.status == 303
        location = found.headers["location"]
        assert location.startswith(f"{URL}/#/")
        return location.removeprefix(f"{URL}/#")

    async def sign_in(self, double: ProviderDouble) -> str:
        return await self.finish(await self.start(double))


@dataclass
class Site:
    """Service with a provider, and browsers at it."""

    service: Service
    double: ProviderDouble
    http: aiohttp.ClientSession
    tenant: Tenant
    number: int

    @property
    def organization(self) -> str:
        return f"acme-{self.number}"

    @property
    def ann(self) -> dict[str, Any]:
        """Claims of the provider about the person of this test."""
        email = f"ann-{self.number}@example.com"
        return {"sub": f"ann-{self.number}", "email": email, "email_verified": True, "name": "Ann"}

    @property
    def email(self) -> str:
        return str(self.ann["email"])

    def groups(self, *names: str) -> list[str]:
        return [f"{name}-{self.number}" for name in names]

    def browser(self) -> Browser:
        return Browser(self.http, self.service)

    async def join(self, role: str = "admin", email: str = "") -> uuid.UUID:
        """Make a person a member, by an invitation; by default the one of this test."""
        self.double.person = self.ann
        async with self.service.session() as session:
            _, token = await invite(
                session,
                organization=self.organization,
                email=email or self.email,
                role=role,
                actor="test",
            )
            return (await accept_invitation(session, token=token)).member.person_id

    async def entered(self, role: str = "admin") -> Browser:
        """Return a browser of a signed-in member."""
        await self.join(role)
        browser = self.browser()
        assert await browser.sign_in(self.double) == "/usage"
        await browser.session()
        return browser

    async def roles(self) -> dict[str, str]:
        async with self.service.session() as session:
            person = await find_person(session, self.email)
            return {
                each.organization_name: each.role
                for each in await memberships_of(session, person.id)
            }


@pytest.fixture(scope="module")
def listening(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    postgres_server: str,
    template_database: str,
) -> Iterator[tuple[Service, int]]:
    """Yield a service, and the port at which it expects its provider."""
    home = tmp_path_factory.mktemp("sign-in")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (home / "secret").write_text(f"{ProviderDouble.SECRET}\n")
    rules = [
        {"group": f"{group}-{number}", "organization": f"acme-{number}", "role": role}
        for number in range(TESTS_MAX)
        for group, role in (("owners", "owner"), ("devs", "developer"), ("ops", "operator"))
    ]
    corp = {
        "issuer": f"http://127.0.0.1:{port}",
        "client_id": ProviderDouble.CLIENT,
        "client_secret_file": "secret",
        "scopes": ["openid", "email", "groups"],
        "groups": [*rules, {"group": "devs-0", "organization": "unknown", "role": "viewer"}],
    }
    file = home / "sign-in.yaml"
    file.write_text(yaml.safe_dump({"url": URL, "providers": {"corp": corp}}))
    with new_database(postgres_server, template=template_database) as url:
        settings = {"sign_in": str(file), "auth_failures_per_minute": 0}
        service = Service(home, url, model, **settings)
        service.settings = service.settings.having(database_url=as_application(url))
        with running(service):
            yield service, port


@pytest.fixture
async def site(listening: tuple[Service, int]) -> AsyncIterator[Site]:
    service, port = listening
    async with (
        provider(port) as double,
        aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(PATIENCE_S), cookie_jar=aiohttp.DummyCookieJar()
        ) as http,
    ):
        double.redirect_uri = f"{URL}/sign-in/callback"
        tenant, number = await service.tenant(), next(NUMBERS)
        async with service.session() as session:
            await rename_organization(
                session, organization=tenant.name, name=f"acme-{number}", actor="test"
            )
        yield Site(service, double, http, tenant, number)


async def test_a_member_signs_in_and_acts_as_itself(site: Site) -> None:
    browser = await site.entered()
    session = await browser.session()
    assert session["email"] == site.email
    assert [each["role"] for each in session["organizations"]] == ["admin"]

    body = {"project": str(site.tenant.project_id), "name": "made here"}
    status, made = await browser.call("AdminService/CreateApiKey", body)

    assert status == 200, made
    async with site.service.session() as session:
        row = (
            await session.execute(
                text(
                    "SELECT a.actor_person_id = p.id AS is_ann, actor_role, actor_address"
                    " FROM audit_log a, persons p WHERE a.action = 'api_key.create'"
                    " AND p.email = :email AND a.after ->> 'name' = 'made here'"
                ),
                {"email": site.email},
            )
        ).one()
    assert tuple(row) == (True, "admin", "127.0.0.1")


async def test_a_call_by_cookie_needs_the_header_of_the_page(site: Site) -> None:
    browser = await site.entered()
    for wrong in ("", "0" * 64, "é"):
        headers = {"weir-csrf": wrong, "weir-organization": browser.organization}
        sent = {name: value for name, value in headers.items() if value}
        answer, found = await browser.send("POST", "api/AdminService/ListApiKeys", sent, json={})
        assert (answer.status, reason_of(found)) == (403, "PERMISSION_DENIED")
    # What a form of another site can send: a cookie, and one of three content types
    form = {"content-type": "text/plain", "weir-csrf": browser.csrf}
    answer, found = await browser.send("POST", "api/sign-out", form, data=b"{}")
    assert answer.status == 415
    assert await browser.call("AdminService/ListApiKeys") != (401, None)
    assert (await browser.call("AdminService/ListApiKeys"))[0] == 200


async def test_a_session_acts_in_own_organizations_only(site: Site) -> None:
    other = await site.service.tenant()
    browser = await site.entered()
    status, found = await browser.call(
        "AdminService/ListApiKeys", **{"weir-organization": str(other.organization_id)}
    )
    assert (status, reason_of(found)) == (401, "UNAUTHENTICATED")
    assert (await browser.call("AdminService/ListApiKeys", {"organization": other.name}))[0] == 404
    for wrong in ("acme", "../x", ""):
        assert (await browser.call("AdminService/ListApiKeys", **{"weir-organization": wrong}))[
            0
        ] in (200 if not wrong else 400, 400)


Ending = Callable[[Site, Browser], Awaitable[None]]


async def sign_out(site: Site, browser: Browser) -> None:
    kept = dict(browser.cookies)
    assert (await browser.call("sign-out"))[0] == 200
    assert SESSION not in browser.cookies
    browser.cookies = kept  # a copy of the cookie is worth nothing


async def logout_by_provider(site: Site, browser: Browser) -> None:
    assert await send_logout(site, browser, sub=None) == 200


async def leave(site: Site, browser: Browser) -> None:
    async with site.service.session() as session:
        await remove_member(
            session, organization=site.organization, member=site.email, actor="test"
        )


async def deactivate(site: Site, browser: Browser) -> None:
    async with site.service.session() as session:
        await deactivate_person(session, person=site.email, actor="test")


async def expire(site: Site, browser: Browser) -> None:
    await change_sessions(site, "expires_at = now()")


async def idle(site: Site, browser: Browser) -> None:
    await change_sessions(site, "last_used_at = now() - interval '61 minutes'")


async def change_sessions(site: Site, change: str) -> None:
    async with site.service.session() as session:
        await session.execute(text(f"UPDATE sign_in_sessions SET {change}"))


async def send_logout(site: Site, browser: Browser, **changes: Any) -> int:
    """Send a logout token of the provider, and return the status of the answer."""
    claims = {
        "aud": ProviderDouble.CLIENT,
        "events": {"http://schemas.openid.net/event/backchannel-logout": {}},
    }
    token = site.double.token({"typ": "logout+jwt"}, **(claims | changes))
    answer, _ = await browser.send("POST", "sign-in/logout/corp", data={"logout_token": token})
    return answer.status


@pytest.mark.parametrize("end", [sign_out, logout_by_provider, leave, deactivate, expire, idle])
async def test_a_session_that_ends_is_refused_at_once(site: Site, end: Ending) -> None:
    browser = await site.entered()
    assert (await browser.call("AdminService/ListApiKeys"))[0] == 200

    await end(site, browser)

    status, found = await browser.call("AdminService/ListApiKeys")
    assert (status, reason_of(found)) == (401, "UNAUTHENTICATED")


async def test_lack_of_use_ends_a_session_whatever_comes_then(site: Site) -> None:
    """A call does not revive it, even if its server has not noted a use for long."""
    await site.join()
    browser = site.browser()
    async with site.service.session() as session:
        person = await find_person(session, site.email)
        browser.cookies[SESSION] = await begin_session(session, person.id, HOUR)
    await change_sessions(site, "last_used_at = now() - interval '61 minutes'")
    browser.csrf, browser.organization = (
        csrf_of(browser.cookies[SESSION]),
        str(site.tenant.organization_id),
    )
    for _ in range(2):
        assert (await browser.call("AdminService/ListApiKeys"))[0] == 401


async def test_a_deactivation_ends_sessions_and_links_for_good(site: Site) -> None:
    browser = await site.entered()
    async with site.service.session() as session:
        link = await create_link(session, await find_person(session, site.email), actor="test")
        await deactivate_person(session, person=site.email, actor="test")
    assert (await site.browser().sign_in(site.double)).startswith("/sign-in?failed=deactivated")
    async with site.service.session() as session:
        with pytest.raises(InvalidValue):
            await create_link(session, await find_person(session, site.email), actor="test")
        await reactivate_person(session, person=site.email, actor="test")
    assert (await browser.call("AdminService/ListApiKeys"))[0] == 401
    assert (await site.browser().call("link", {"secret": link}))[0] == 401
    assert await site.browser().sign_in(site.double) == "/usage"


async def test_the_end_of_a_session_ends_its_requests_alone(site: Site) -> None:
    first, second = await site.entered("developer"), site.browser()
    await second.sign_in(site.double)
    [ended, goes_on] = [
        f"{each.cookies[SESSION]}@{site.tenant.organization_id}" for each in (first, second)
    ]
    async with site.service.stream(ended) as cut, site.service.stream(goes_on) as other:
        running = await cut.begin(max_output_tokens=3000)
        also_running = await other.begin(max_output_tokens=200)
        await cut.received(running, 1)
        assert (await first.call("sign-out"))[0] == 200
        end = await cut.end(running)
        assert end.WhichOneof("kind") == "failed"
        await other.finished(also_running)


async def test_a_principal_lasts_as_long_as_its_session(site: Site) -> None:
    await site.join()
    async with site.service.session() as session:
        person = await find_person(session, site.email)
        secret = await begin_session(session, person.id, HOUR)
        acting = acting_in(secret, site.tenant.organization_id)
        principal = await authenticate_session(session, acting)
        assert principal.secret_lifetime_s == pytest.approx(3600, abs=60)


async def test_a_provider_ends_sessions_of_its_own_only(site: Site) -> None:
    """Two providers may give the same id to a session."""
    browser = await site.entered()
    await change_sessions(site, "provider = 'other'")

    await logout_by_provider(site, browser)

    assert (await browser.call("AdminService/ListApiKeys"))[0] == 200


async def test_a_logout_token_that_comes_again_ends_no_later_session(site: Site) -> None:
    browser = await site.entered()
    earlier = int(time.time()) - 100
    subject = site.ann["sub"]
    for claims in ({"sid": None, "sub": subject}, {"sub": None}):
        assert await send_logout(site, browser, iat=earlier, **claims) == 200
        assert (await browser.call("AdminService/ListApiKeys"))[0] == 200
    assert await send_logout(site, browser, iat=None) == 400
    assert await send_logout(site, browser, sid=None, sub=subject) == 200
    assert (await browser.call("AdminService/ListApiKeys"))[0] == 401


async def test_broken_forms_of_a_logout_are_refused(site: Site) -> None:
    browser = site.browser()
    for form in ("", "a&" * 11, "a=1&" * 11, "logout_token=%ff", "logout_token=a.b.c", "\0"):
        answer, _ = await browser.send("POST", "sign-in/logout/corp", data=form.encode())
        assert answer.status == 400, form
    answer, _ = await browser.send("GET", "sign-in/logout/corp")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    for path in ("start/corp", "callback"):
        answer, _ = await browser.send("POST", f"sign-in/{path}", data=b"")
        assert (answer.status, answer.headers["allow"]) == (405, "GET")
    for path in ("start/other", "logout/other", "callback/corp", "", "x"):
        assert (await browser.send("GET", f"sign-in/{path}"))[0].status == 404


async def test_cookies_that_a_browser_makes_up_are_refused(site: Site) -> None:
    flow = asdict(Flow.begin("corp", "/"))
    for changes in ({"begun_at": 10**400}, {"state": "\ud800"}, {"provider": "other"}):
        browser = site.browser()
        cookie = json.dumps(flow | changes).encode()
        browser.cookies[FLOW] = urlsafe_b64encode(cookie).decode()
        answer = {"code": "c", "state": flow["state"]}
        assert (await browser.finish(answer)).startswith("/sign-in?failed=expired")
        assert FLOW not in browser.cookies


@pytest.mark.parametrize("is_invited", [True, False])
async def test_first_sign_ins_at_once_find_one_person(site: Site, is_invited: bool) -> None:
    if is_invited:
        await site.join()
    site.double.person = site.ann | {"groups": site.groups("devs")}
    browsers = [site.browser() for _ in range(4)]
    answers = [await each.start(site.double) for each in browsers]
    ends = await asyncio.gather(
        *(each.finish(answer) for each, answer in zip(browsers, answers, strict=True))
    )
    assert set(ends) == {"/usage"}
    assert await site.roles() == {site.organization: "admin" if is_invited else "developer"}
    [written] = site.service.database.rows(
        "SELECT count(*) AS n FROM audit_log WHERE action = ANY(%s) AND after ->> 'email' = %s",
        ["person.identify" if is_invited else "person.create"],
        site.email,
    )
    assert written["n"] == 1


async def test_sign_ins_while_members_change_get_in_nobodys_way(site: Site) -> None:
    """Groups change, and an administrator removes and deactivates, all at the same time."""
    await site.join("owner", f"boss-{site.number}@example.com")
    site.double.person = site.ann | {"groups": site.groups("devs")}
    await site.browser().sign_in(site.double)

    async def sign_in(number: int) -> str:
        browser = site.browser()
        answer = await browser.start(site.double)
        site.double.person = site.ann | {
            "groups": site.groups(*(("devs",), ("owners",), ())[number % 3])
        }
        return await browser.finish(answer)

    async def change(number: int) -> str:
        async with site.service.session() as session:
            await reactivate_person(session, person=site.email, actor="test")
        async with site.service.session() as session:
            await deactivate_person(session, person=site.email, actor="test")
        async with site.service.session() as session:
            await reactivate_person(session, person=site.email, actor="test")
        return ""

    ends = await asyncio.gather(
        *(step(number) for number in range(9) for step in (sign_in, change))
    )
    words = {"/usage", "", "/sign-in?failed=not-a-member", "/sign-in?failed=deactivated"}
    assert {each.partition("&")[0] for each in ends} <= words
    site.double.person = site.ann | {"groups": site.groups("owners")}
    assert await site.browser().sign_in(site.double) == "/usage"
    assert await site.roles() == {site.organization: "owner"}


async def test_groups_that_a_provider_leaves_out_end_no_membership(site: Site) -> None:
    site.double.person = site.ann | {"groups": site.groups("devs")}
    await site.browser().sign_in(site.double)
    site.double.person = site.ann | {"_claim_names": {"groups": "src1"}}
    assert (await site.browser().sign_in(site.double)).startswith("/sign-in?failed=invalid")
    assert await site.roles() == {site.organization: "developer"}


@pytest.mark.parametrize(
    "changes",
    [
        {"events": None},
        {"events": {"other": {}}},
        {"nonce": "n"},
        {"aud": "another"},
        {"iss": "https://evil.example"},
        {"exp": 1},
        {"sub": None, "sid": None},
        {"sid": "another session"},
        {"sub": "bob"},
    ],
    ids=str,
)
async def test_a_wrong_logout_token_ends_nothing(site: Site, changes: dict[str, Any]) -> None:
    browser = await site.entered()
    await send_logout(site, browser, **changes)
    assert (await browser.call("AdminService/ListApiKeys"))[0] == 200


async def test_groups_make_change_and_end_memberships(site: Site) -> None:
    site.double.person = site.ann | {"groups": [*site.groups("devs"), "others"]}
    assert await site.browser().sign_in(site.double) == "/usage"
    assert await site.roles() == {site.organization: "developer"}

    await site.join("owner", f"boss-{site.number}@example.com")
    site.double.person = dict(site.double.person)
    site.double.person["groups"] = site.groups(
        "devs", "owners"
    )  # the first rule of the file decides
    await site.browser().sign_in(site.double)
    assert await site.roles() == {site.organization: "owner"}

    site.double.person["groups"] = site.groups("ops")
    browser = site.browser()
    await browser.sign_in(site.double)
    assert await site.roles() == {site.organization: "operator"}
    await browser.session()
    assert (await browser.call("AdminService/ListLiveRequests"))[0] == 200

    site.double.person["groups"] = []
    assert (await site.browser().sign_in(site.double)).startswith("/sign-in?failed=not-a-member")
    assert (await browser.call("AdminService/ListApiKeys"))[0] == 401


async def test_the_last_owner_by_groups_stays(site: Site) -> None:
    site.double.person = site.ann | {"groups": site.groups("owners")}
    await site.browser().sign_in(site.double)
    site.double.person["groups"] = []
    assert await site.browser().sign_in(site.double) == "/usage"
    assert await site.roles() == {site.organization: "owner"}


async def test_groups_leave_memberships_by_invitation_alone(site: Site) -> None:
    await site.join("finance")
    site.double.person["groups"] = site.groups("devs")
    await site.browser().sign_in(site.double)
    assert await site.roles() == {site.organization: "finance"}


@pytest.mark.parametrize(
    ("person", "why"),
    [
        ({"email": "eve@example.com", "email_verified": True}, "not-a-member"),
        ({"email": "ann-0@example.com", "email_verified": False}, "email-unverified"),
        ({"email": "ann-0@example.com"}, "email-unverified"),
        ({}, "email-unverified"),
        ({"email": "not an address", "email_verified": True}, "email-unverified"),
        ({"email": ["ann-0@example.com"], "email_verified": True}, "email-unverified"),
    ],
    ids=str,
)
async def test_an_unknown_person_is_not_let_in(
    site: Site, person: dict[str, Any], why: str
) -> None:
    await site.join()
    site.double.person = {"sub": f"eve-{site.number}"} | person
    browser = site.browser()
    assert (await browser.sign_in(site.double)).startswith(f"/sign-in?failed={why}&number=")
    assert SESSION not in browser.cookies


async def test_another_subject_with_the_address_of_a_member_is_refused(site: Site) -> None:
    await site.entered()
    site.double.person["sub"] = "someone else"
    browser = site.browser()
    assert (await browser.sign_in(site.double)).startswith("/sign-in?failed=other-identity")
    site.double.person |= {
        "sub": f"ann-{site.number}",
        "email": "new@example.com",
    }  # the subject counts
    assert await browser.sign_in(site.double) == "/usage"


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": "another"},
        {"nonce": None},
        {"aud": "another"},
        {"aud": [ProviderDouble.CLIENT, "another"]},
        {"iss": "https://evil.example"},
        {"exp": 1},
        {"iat": 4_000_000_000},
        {"sub": None},
        {"events": {}},
    ],
    ids=str,
)
async def test_a_wrong_id_token_lets_nobody_in(site: Site, changes: dict[str, Any]) -> None:
    await site.join()
    site.double.token_changes = changes
    browser = site.browser()
    assert (await browser.sign_in(site.double)).startswith("/sign-in?failed=invalid")
    assert SESSION not in browser.cookies


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": "another"}, "expired"),
        ({"state": ""}, "expired"),
        ({"iss": "https://evil.example"}, "invalid"),
        ({"iss": ""}, "invalid"),
        ({"code": ""}, "invalid"),
        ({"code": "code-99"}, "unavailable"),
        ({"error": "access_denied"}, "cancelled"),
        ({"error": "server_error", "error_description": "<b>x</b>"}, "invalid"),
    ],
    ids=str,
)
async def test_a_wrong_answer_of_the_browser_is_refused(
    site: Site, changes: dict[str, str], why: str
) -> None:
    await site.join()
    browser = site.browser()
    answer = await browser.start(site.double)
    assert (await browser.finish(answer | changes)).startswith(f"/sign-in?failed={why}&number=")
    assert SESSION not in browser.cookies


async def test_an_answer_counts_in_its_own_browser_only_and_once(site: Site) -> None:
    """A page of an attacker cannot sign a victim in as the attacker."""
    await site.join()
    attacker, victim = site.browser(), site.browser()
    answer = await attacker.start(site.double)
    assert (await victim.finish(answer)).startswith("/sign-in?failed=expired")
    await victim.start(site.double)
    assert (await victim.finish(answer)).startswith("/sign-in?failed=expired")
    kept = dict(attacker.cookies)
    assert await attacker.finish(answer) == "/usage"
    attacker.cookies = kept
    assert (await attacker.finish(answer)).startswith("/sign-in?failed=unavailable")


@pytest.mark.parametrize(
    "route",
    [
        *("//evil.example", "https://evil.example", "/\r\nset-cookie: x=1", "x", "/<b>", "/#"),
        *(
            "/\\evil.example",
            "\\\\evil.example",
            "/\t/evil.example",
            "javascript:alert(1)",
            "/" * 400,
        ),
    ],
)
async def test_a_sign_in_leads_to_no_other_site(site: Site, route: str) -> None:
    await site.join()
    browser = site.browser()
    location = await browser.finish(await browser.start(site.double, route))
    assert location == ("//evil.example" if route == "//evil.example" else "/")  # after the `#`


async def test_a_provider_that_is_down_or_lies_lets_nobody_in(site: Site) -> None:
    await site.join()
    browser = site.browser()
    answer = await browser.start(site.double)

    async def away(_: Any) -> web.Response:
        return web.Response(status=500)

    site.double.answer = away
    assert (await browser.finish(answer)).startswith("/sign-in?failed=unavailable")
    site.double.answer = None
    # Keys of another signer: those that the provider publishes do not verify its tokens
    site.double.signing, published = site.double.published[0], site.double.published
    site.double.rotate("unpublished", keeps=True)
    site.double.published = published
    assert (await browser.sign_in(site.double)).startswith("/sign-in?failed=invalid")


async def test_a_new_sign_in_replaces_a_session_that_was_planted(site: Site) -> None:
    """The secret of a session is never one that the browser brought."""
    await site.join()
    browser = site.browser()
    browser.cookies[SESSION] = planted = "ws_" + "A" * 43
    await browser.sign_in(site.double)
    assert browser.cookies[SESSION] != planted


async def test_a_link_signs_in_once(site: Site) -> None:
    """Asking whom it signs in does not use it up, and begins no session."""
    await site.join()
    async with site.service.session() as session:
        link = await create_link(session, await find_person(session, site.email), actor="test")
    asking = site.browser()
    for _ in range(2):
        status, offer = await asking.call("offer", {"secret": link})
        assert (status, offer["email"], offer["organizations"]) == (
            *(200, site.email),
            [site.organization],
        )
    assert not asking.cookies
    browsers = [site.browser() for _ in range(5)]
    answers = await asyncio.gather(*(each.call("link", {"secret": link}) for each in browsers))
    assert sorted(status for status, _ in answers) == [200, 401, 401, 401, 401]
    [winner] = [each for each in browsers if SESSION in each.cookies]
    assert (await winner.session())["email"] == site.email
    async with site.service.session() as session:
        late = await create_link(session, await find_person(session, site.email), actor="test")
        await session.execute(text("UPDATE sign_in_links SET expires_at = now()"))
    for lifetime in (timedelta(0), timedelta(days=1, seconds=1)):
        async with site.service.session() as session:
            person = await find_person(session, site.email)
            with pytest.raises(InvalidValue):
                await create_link(session, person, lifetime=lifetime, actor="test")
    for name, wrong in itertools.product(
        ("link", "offer"), ({"secret": late}, {}, {"secret": 5}, {"secret": ""}, {"secret": "wl_x"})
    ):
        assert (await site.browser().call(name, wrong))[0] in (400, 401)


@pytest.mark.parametrize("name", ["link", "invitation", "sign-out"])
async def test_no_other_site_begins_or_ends_a_session(site: Site, name: str) -> None:
    """A form of another site has one of three types, and no request of a script is preflighted."""
    browser = site.browser()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        body = json.dumps({"secret": "wl_" + "A" * 43, "token": "wi_x"})
        headers = {"content-type": kind, "origin": "https://evil.example"}
        answer, _ = await browser.send("POST", f"api/{name}", headers, data=body)
        assert answer.status == 415, kind
    answer, _ = await browser.send(
        "OPTIONS",
        f"api/{name}",
        {"origin": "https://evil.example", "access-control-request-method": "POST"},
    )
    assert answer.status >= 400
    assert not any(each.lower().startswith("access-control") for each in answer.headers)
    assert not browser.cookies


async def test_an_invitation_signs_in(site: Site) -> None:
    async with site.service.session() as session:
        _, token = await invite(
            session, organization=site.organization, email=site.email, role="viewer", actor="test"
        )
    browser = site.browser()
    status, offer = await browser.call("offer", {"token": token})
    assert (status, offer) == (
        200,
        {"email": site.email, "organizations": [site.organization]},
    )
    assert (await browser.call("invitation", {"token": token, "displayName": "Ann"}))[0] == 200
    session_ = await browser.session()
    assert (session_["displayName"], session_["organizations"][0]["role"]) == ("Ann", "viewer")
    for name in ("invitation", "offer"):
        status, found = await site.browser().call(name, {"token": token})
        assert (status, reason_of(found)) == (401, "INVITATION_INVALID")


async def test_an_invitation_gives_nothing_of_other_organizations(site: Site) -> None:
    """Check an inviter who accepts the invitation itself, since it knows the token."""
    await site.join("owner")
    evil = await site.service.tenant()
    async with site.service.session() as session:
        _, token = await invite(
            session, organization=evil.name, email=site.email, role="owner", actor="test"
        )
    browser = site.browser()
    assert (await browser.call("invitation", {"token": token}))[0] == 200
    found = await browser.session()
    assert [each["name"] for each in found["organizations"]] == [evil.name]
    assert (await browser.call("AdminService/ListApiKeys"))[0] == 200
    elsewhere = {"weir-organization": str(site.tenant.organization_id)}
    assert (await browser.call("AdminService/ListApiKeys", **elsewhere))[0] == 401


async def test_a_person_has_twenty_sessions_at_most(site: Site) -> None:
    browser = await site.entered()
    async with site.service.session() as session:
        person_id = (await find_person(session, site.email)).id
        for _ in range(20):
            await begin_session(session, person_id, HOUR)
    assert (await browser.call("AdminService/ListApiKeys"))[0] == 401


async def test_use_keeps_a_session(site: Site) -> None:
    browser = await site.entered()
    await change_sessions(site, "last_used_at = now() - interval '59 minutes'")
    assert (await browser.call("AdminService/ListApiKeys"))[0] == 200
    [row] = site.service.database.rows(
        "SELECT now() - last_used_at < interval '1 minute' AS is_noted FROM sign_in_sessions s"
        " JOIN persons p ON p.id = s.person_id WHERE email = %s",
        site.email,
    )
    assert row["is_noted"]


async def test_the_page_offers_the_provider_and_says_why_a_sign_in_failed(site: Site) -> None:
    await site.join()
    stranger = f"evil-{site.number}@example.com"
    async with site.service.session() as session:
        link = await create_link(session, await find_person(session, site.email), actor="test")
        _, token = await invite(
            session, organization=site.organization, email=stranger, role="viewer", actor="test"
        )
        await accept_invitation(session, token=token, display_name="Eve")
        planted = await create_link(session, await find_person(session, stranger), actor="test")
    found = await browsed(
        site.service,
        "",
        site.organization,
        views=EVERY_VIEW,
        pages={},
        start="Sign in with corp",
        link=link,
        another=planted,
    )
    assert faults(found) == {}
    shown = found["link"]
    assert "Sign in as" in shown["card"]
    assert f"{site.email} of {site.organization}" in shown["card"]
    assert "You are signed in as" not in shown["card"]
    assert shown["cookies"] == 0, "nothing begins before the person has agreed"
    assert f"You are signed in as {site.email} in this browser" in shown["second"]
    assert "Sign in as Eve?" in shown["second"]
    assert not any(each in shown[at] for each in (link, planted) for at in ("address", "back"))
    async with site.service.session() as session:
        await use_link(session, planted)  # which the page has not used
    assert "You are not a member of an organization here" in found["signIn"]
    assert "ab12cd34" in found["signIn"]
    assert found["starts"] == [
        "sign-in/start/corp?route=%2F",
        "sign-in/start/corp?route=%2Fusage%3Fmonth%3D2026-11",
    ]


HTTPS, FORWARDED = "https://weir.example/prefix/console", "x-forwarded-proto"


@pytest.mark.parametrize(
    ("url", "tls", "trusted", "forwarded", "is_secure"),
    [
        (HTTPS, False, (), {}, True),
        (URL, True, (), {}, True),
        (URL, False, (), {}, False),
        (URL, False, ("127.0.0.0/8",), {FORWARDED: "https"}, True),
        (URL, False, ("127.0.0.0/8",), {FORWARDED: "https, http"}, True),
        (URL, False, ("127.0.0.0/8",), {FORWARDED: "http, https"}, False),
        (URL, False, ("127.0.0.0/8",), {}, False),
        (URL, False, ("192.0.2.0/24",), {FORWARDED: "https"}, False),
        (URL, False, (), {FORWARDED: "https"}, False),
    ],
)
async def test_cookies_are_of_one_origin_with_tls(
    site: Site,
    url: str,
    tls: bool,
    trusted: tuple[str, ...],
    forwarded: dict[str, str],
    is_secure: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another host of the domain, or a reader of the network, can neither set nor see them.

    TLS of this server, or of a trusted proxy that says so.
    """
    monkeypatch.setattr("api.console.sign_in.peer_of", lambda _: "ipv4:127.0.0.1:1")
    await site.join()
    prefix = "__Host-" if is_secure else ""
    site.double.redirect_uri = f"{url}/sign-in/callback"
    secret = site.service.home / "secret"
    corp = Provider("corp", site.double.url, ProviderDouble.CLIENT, secret)
    sessions = site.service.sessions
    authenticator = Authenticator(sessions, proxies=Proxies(networks_of(trusted)))
    signing_in = SignIn(SignInFile(url, (corp,)), sessions, authenticator, tls=tls)
    seen: list[Cookie | None] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(signing_in.cookie(request))
        if request.path == "/link":
            return await signing_in.use_link(request, await request.json())
        if request.path == "/end":
            return await signing_in.end(request)
        return await signing_in.answer(request, request.path[1:])

    async def send(method: str, path: str, cookies: str = "", **options: Any) -> Any:
        headers = {"cookie": cookies, "weir-csrf": csrf_of(cookies.partition("=")[2])} | forwarded
        async with site.http.request(
            method, f"{front.url}{path}", headers=headers, allow_redirects=False, **options
        ) as answer:
            return answer

    def cookie(answer: Any, name: str, same_site: str) -> str:
        [line] = [
            each
            for each in answer.headers.getall("set-cookie")
            if each.startswith(f"{prefix}{name}=")
        ]
        value, *attributes = line.split("; ")
        assert ("Secure" in attributes) is is_secure
        assert {"HttpOnly", "Path=/", f"SameSite={same_site}"} <= set(attributes)
        assert not any(each.startswith("Domain") for each in attributes)
        return str(value)

    double = IssuerDouble()
    double.answer = handle
    async with served(double) as front, running_task(signing_in.client.keys.run()):
        started = await send("GET", "/start/corp?route=/usage")
        flow = cookie(started, FLOW, "Lax")
        back = site.double.authorize(dict(parse_qsl(urlsplit(started.headers["location"]).query)))
        finished = await send("GET", "/callback", flow, params=back)
        assert finished.headers["location"] == f"{url}/#/usage"
        session_cookie = cookie(finished, SESSION, "Strict")
        assert cookie(finished, FLOW, "Strict") == f'{prefix}{FLOW}=""'
        async with site.service.session() as session:
            link = await create_link(session, await find_person(session, site.email), actor="test")
        cookie(await send("POST", "/link", json={"secret": link}), SESSION, "Strict")
        other = session_cookie.removeprefix(prefix) if prefix else f"__Host-{session_cookie}"
        seen.clear()
        await send("GET", "/start/corp", other)
        ended = await send("POST", "/end", session_cookie)
        assert [each is not None for each in seen] == [False, True]
        assert cookie(ended, SESSION, "Strict") == f'{prefix}{SESSION}=""'


@pytest.mark.parametrize(
    ("host", "is_let_in"),
    [
        ("localhost:8080", True),
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("weir.example", False),
        ("192.168.1.5:8080", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.nip.io", False),
        ("[", False),
    ],
)
async def test_nobody_signs_in_over_plain_http_from_elsewhere(
    site: Site, host: str, is_let_in: bool
) -> None:
    """A session on its way over a network can be read there, and the reason says what to do."""
    await site.join()
    async with site.service.session() as session:
        link = await create_link(session, await find_person(session, site.email), actor="test")
    browser = site.browser()
    for name in ("offer", "link", "invitation"):
        answer, found = await browser.send(
            "POST", f"api/{name}", {"host": host}, json={"secret": link, "token": "wi_x"}
        )
        refused = name == "invitation" or not is_let_in
        assert (answer.status == 200) is not refused
        if not is_let_in:
            assert answer.status == 403
            assert "WEIR_TRUSTED_PROXIES" in found["message"]
    started, _ = await browser.send("GET", "sign-in/start/corp", {"host": host})
    assert (started.status == 303) is is_let_in
    assert bool(browser.cookies) is is_let_in


@contextlib.asynccontextmanager
async def running_task(steps: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(steps)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
