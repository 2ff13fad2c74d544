"""Sign-in with `oidc-provider`, a certified OpenID provider of others, run by Node.

It runs if `WEIR_TEST_OIDC_PROVIDER` names the folder of its programs (`python -m infra.peers`).
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import parse_qsl, urljoin, urlsplit

import aiohttp
import pytest
import yaml

from metering.tenants.tenants import rename_organization
from tests.conftest import as_application, new_database
from tests.e2e.test_sign_in import URL, Browser
from tests.service import PATIENCE_S, Service, running

INSTALLED = os.environ.get("WEIR_TEST_OIDC_PROVIDER", "")
pytestmark = pytest.mark.skipif(not INSTALLED, reason="oidc-provider is not installed")

SCRIPT = Path(__file__).parent / "real_provider.mjs"
CLIENT, SECRET = "weir-console", "s3cret/with:signs+%"
CALLBACK = f"{URL}/sign-in/callback"
ACCOUNTS = {
    "ann": {
        "email": "ann@example.com",
        "email_verified": True,
        "name": "Ann",
        "groups": ["devs", "others"],
    },
    "bob": {"email": "bob@example.com", "email_verified": False, "groups": ["devs"]},
    "eve": {"email": "eve@example.com", "email_verified": True, "groups": []},
}
FORM = re.compile(r'<form[^>]*action="([^"]+)"')
HIDDEN = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)"')


class ProviderBrowser:
    """The part of a browser that visits the provider, with its cookies."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def visit(self, address: str, form: dict[str, str] | None = None) -> tuple[str, str]:
        """Open an address, follow redirects but not to Weir; return the last one, and the page."""
        while not address.startswith(URL):
            method = "GET" if form is None else "POST"
            async with self._http.request(
                method, address, data=form, allow_redirects=False
            ) as answer:
                page = await answer.text()
                if answer.status not in (302, 303):
                    assert answer.status == 200, page
                    return address, page
                address, form = urljoin(address, answer.headers["location"]), None
        return address, ""

    async def submit(self, at: str, page: str, **fields: str) -> tuple[str, str]:
        """Fill in the form of a page."""
        [action] = FORM.findall(page)[:1]
        hidden = dict(HIDDEN.findall(page))
        return await self.visit(urljoin(at, html.unescape(action)), hidden | fields)

    async def sign_in(self, address: str, account: str) -> dict[str, str]:
        """Sign in and consent. Return what the provider sends back to Weir."""
        at, page = await self.visit(address)
        at, page = await self.submit(at, page, login=account, password="any")
        at, page = await self.submit(at, page)
        return dict(parse_qsl(urlsplit(at).query))

    async def sign_out(self, issuer: str) -> None:
        at, page = await self.visit(f"{issuer}/session/end")
        await self.submit(at, page, logout="yes")


@pytest.fixture(scope="module")
def listening(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    postgres_server: str,
    template_database: str,
) -> Iterator[tuple[Service, str]]:
    """Yield a service, and the issuer that it knows."""
    home = tmp_path_factory.mktemp("real-provider")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        issuer = f"http://127.0.0.1:{probe.getsockname()[1]}"
    (home / "secret").write_text(SECRET)
    corp = {
        "issuer": issuer,
        "client_id": CLIENT,
        "client_secret_file": "secret",
        "scopes": ["openid", "email", "profile", "groups"],
        "groups": [{"group": "devs", "organization": "acme", "role": "developer"}],
    }
    file = home / "sign-in.yaml"
    file.write_text(yaml.safe_dump({"url": URL, "providers": {"corp": corp}}))
    with new_database(postgres_server, template=template_database) as url:
        service = Service(home, url, model, sign_in=str(file))
        service.settings = service.settings.having(database_url=as_application(url))
        with running(service):
            asyncio.run(customer(service))
            yield service, issuer


async def customer(service: Service) -> None:
    """Make the organization that the rules name."""
    tenant = await service.tenant()
    async with service.session() as session:
        await rename_organization(session, organization=tenant.name, name="acme", actor="test")


@pytest.fixture(params=["client_secret_basic", "client_secret_post"])
async def issuer(
    listening: tuple[Service, str], request: pytest.FixtureRequest
) -> AsyncIterator[str]:
    """Yield the issuer, which runs and knows the service."""
    service, found = listening
    console = f"{service.openai_url.removesuffix('/v1')}/console"
    client = {
        "client_id": CLIENT,
        "client_secret": SECRET,
        "redirect_uris": [CALLBACK],
        "token_endpoint_auth_method": request.param,
        "backchannel_logout_uri": f"{console}/sign-in/logout/corp",
        "backchannel_logout_session_required": True,
    }
    options = {"port": urlsplit(found).port, "client": client, "accounts": ACCOUNTS}
    process = await asyncio.create_subprocess_exec(
        *("node", SCRIPT, Path(INSTALLED).parent, json.dumps(options)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            while b"listening" not in (line := await process.stdout.readline()):
                assert line, "it ended"
        yield found
    finally:
        process.kill()
        await process.wait()


@pytest.fixture
async def browser(listening: tuple[Service, str]) -> AsyncIterator[Browser]:
    timeout = aiohttp.ClientTimeout(PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as http:
        yield Browser(http, listening[0])


@pytest.fixture
async def at_provider() -> AsyncIterator[ProviderBrowser]:
    jar = aiohttp.CookieJar(unsafe=True)  # of an address without a name
    async with aiohttp.ClientSession(cookie_jar=jar) as http:
        yield ProviderBrowser(http)


async def sign_in(browser: Browser, at_provider: ProviderBrowser, account: str) -> str:
    answer, _ = await browser.send("GET", "sign-in/start/corp", params={"route": "/usage"})
    assert answer.status == 303
    found = await at_provider.sign_in(answer.headers["location"], account)
    return await browser.finish(found)


async def test_a_person_signs_in_and_the_provider_signs_it_out(
    issuer: str, browser: Browser, at_provider: ProviderBrowser
) -> None:
    assert await sign_in(browser, at_provider, "ann") == "/usage"
    session = await browser.session()
    assert (session["email"], session["displayName"]) == ("ann@example.com", "Ann")
    assert [(each["name"], each["role"]) for each in session["organizations"]] == [
        ("acme", "developer")
    ]
    assert (await browser.call("InferenceService/ListModels"))[0] == 200

    await at_provider.sign_out(issuer)

    assert (await browser.call("InferenceService/ListModels"))[0] == 401


@pytest.mark.parametrize(("account", "why"), [("bob", "email-unverified"), ("eve", "not-a-member")])
async def test_others_are_not_let_in(
    issuer: str, browser: Browser, at_provider: ProviderBrowser, account: str, why: str
) -> None:
    assert (await sign_in(browser, at_provider, account)).startswith(f"/sign-in?failed={why}&")


async def test_a_cancelled_sign_in_is_named(
    issuer: str, browser: Browser, at_provider: ProviderBrowser
) -> None:
    answer, _ = await browser.send("GET", "sign-in/start/corp")
    at, _ = await at_provider.visit(answer.headers["location"])
    back, _ = await at_provider.visit(f"{at}/abort")
    ended = await browser.finish(dict(parse_qsl(urlsplit(back).query)))
    assert ended.startswith("/sign-in?failed=cancelled&")
