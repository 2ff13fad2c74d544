"""Client of OpenID providers: broken and hostile answers, slow providers, and cancelled callers."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from api.access import oidc
from api.access.issuer_keys import DOCUMENT_BYTES_MAX
from api.access.oidc import EXCHANGES_AT_ONCE, Flow, OpenIdClient, Proof, SignInFailed
from api.access.providers import Provider
from metering.core.errors import TokenInvalid
from metering.tenants.sign_in import GroupRule
from tests.issuer_double import DISCOVERY, Answer, ProviderDouble, encoded, provider, served

REDIRECT = "https://weir.example/console/sign-in/callback"
ANN = {"sub": "ann", "email": " Ann@Example.com", "email_verified": True, "name": "Ann"}
LOGOUT = {"events": {oidc.LOGOUT_EVENT: {}}, "aud": ProviderDouble.CLIENT}
GZIP: dict[str, Any] = {"content-encoding": "gzip"}
LARGE = b'{"a": "' + b"x" * DOCUMENT_BYTES_MAX + b'"}'


class World:
    """A client, and the provider that it is registered at."""

    def __init__(self, double: ProviderDouble, folder: Path) -> None:
        self.double = double
        self.client = OpenIdClient(REDIRECT)
        double.redirect_uri = REDIRECT
        double.person = dict(ANN)
        self.secret = folder / "secret"
        self.secret.write_text(f"{double.SECRET}\n")
        rules = (GroupRule("devs", "acme", "developer"),)
        self.provider = Provider("corp", double.url, double.CLIENT, self.secret, rules=rules)

    async def answer(self, flow: Flow) -> dict[str, str]:
        """Begin a sign-in at the provider, and return what the browser brings back."""
        address = URL(await self.client.address(self.provider, flow))
        return self.double.authorize(address.query)

    async def sign_in(self) -> Proof:
        flow = Flow.begin("corp", "/")
        return await self.client.finish(self.provider, flow, await self.answer(flow))

    async def refused(self) -> SignInFailed:
        with pytest.raises(SignInFailed) as failed:
            await self.sign_in()
        return failed.value

    def announces(self, **changes: Any) -> None:
        """Announce something else than usual; a change to None leaves it out."""
        found = self.double.document() | changes
        body = json.dumps({name: value for name, value in found.items() if value is not None})
        self.double.instead[DISCOVERY] = fixed(body.encode())


def fixed(body: bytes, status: int = 200, **headers: Any) -> Answer:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=body, status=status, headers=headers)

    return answer


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with provider() as double:
        client_world = World(double, tmp_path)
        reading = asyncio.create_task(client_world.client.keys.run())
        yield client_world
        reading.cancel()
        await asyncio.wait([reading])


async def test_a_proof_has_what_the_provider_says(world: World) -> None:
    world.double.person["groups"] = ["devs", 5, "others"]
    proof = await world.sign_in()
    found = proof.identity
    assert (found.provider, found.issuer, found.subject) == ("corp", world.double.url, "ann")
    assert (found.email, found.display_name) == ("ann@example.com", "Ann")
    assert (found.groups, proof.session_id) == (frozenset({"devs", "others"}), "session-1")


@pytest.mark.parametrize("methods", [["client_secret_post"], ["none"], ["client_secret_basic"]])
async def test_the_server_authenticates_as_the_provider_wants(
    world: World, methods: list[str]
) -> None:
    world.double.methods = methods
    if methods == ["none"]:
        world.provider = replace(world.provider, client_secret_file=None)
    assert (await world.sign_in()).identity.subject == "ann"


async def test_the_secret_is_read_at_each_sign_in(world: World) -> None:
    for wrong in (b"", b"x" * 5000, b"\xff"):
        world.secret.write_bytes(wrong)
        assert (await world.refused()).reason == "unavailable"
    world.secret.unlink()
    assert "client secret" in str(await world.refused())
    world.secret.write_text(ProviderDouble.SECRET)
    await world.sign_in()


async def test_an_id_token_may_have_hundreds_of_groups(world: World) -> None:
    world.double.in_userinfo = frozenset()
    world.double.person["groups"] = [f"{number:036}" for number in range(1000)]
    assert len((await world.sign_in()).identity.groups) == 1000


@pytest.mark.parametrize("source", ["ID token", "endpoint for claims"])
async def test_groups_that_are_left_out_are_not_taken_for_none(world: World, source: str) -> None:
    world.double.in_userinfo = frozenset({"_claim_names"} if source != "ID token" else ())
    world.double.person["_claim_names"] = {"groups": "src1"}
    failed = await world.refused()
    assert failed.reason == "invalid"
    assert "too many" in str(failed)
    world.provider = replace(world.provider, rules=())
    await world.sign_in()


@pytest.mark.parametrize(
    ("own", "of_endpoint", "email"),
    [
        ({"email": "a@x.example", "email_verified": True}, {}, "a@x.example"),
        ({"email": "a@x.example"}, {"email_verified": True}, ""),
        ({"email": "a@x.example"}, {"email": "b@x.example", "email_verified": True}, ""),
        ({"email_verified": True}, {"email": "b@x.example"}, ""),
        ({"email_verified": True}, {"email": "b@x.example", "email_verified": False}, ""),
        ({}, {"email": "b@x.example", "email_verified": "true"}, "b@x.example"),
        ({}, {"email": "b@x.example", "email_verified": 1}, ""),
        ({}, {"email": "b@x.example", "email_verified": "yes"}, ""),
    ],
)
async def test_a_verification_counts_for_the_address_beside_it(
    world: World, own: dict[str, Any], of_endpoint: dict[str, Any], email: str
) -> None:
    world.double.person = {"sub": "ann"}
    world.double.token_changes = own
    body = json.dumps({"sub": "ann", **of_endpoint}).encode()
    world.double.instead["/userinfo"] = fixed(body)
    assert (await world.sign_in()).identity.email == email


@pytest.mark.parametrize(
    ("email", "claims", "known"),
    [
        ("a@own.example", {}, "a@own.example"),
        ("a@OWN.example", {}, "a@own.example"),
        ("a@own.example", {"email_verified": False}, ""),
        ("a@own.example", {"email_verified": None}, ""),
        ("a@other.example", {"email_verified": True}, ""),
        ("a@evil.own.example", {"email_verified": True}, ""),
        ("a@own.example@evil.example", {"email_verified": True}, ""),
    ],
)
async def test_a_provider_vouches_for_its_own_domains_only(
    world: World, email: str, claims: dict[str, Any], known: str
) -> None:
    found = {"sub": "ann", "email": email, **claims}
    world.provider = replace(world.provider, email_domains=("own.example",))
    assert oidc.identity_of(world.provider, found).email == known


@pytest.mark.parametrize(
    "changes",
    [
        {"authorization_endpoint": None},
        {"token_endpoint": None},
        {"authorization_endpoint": 5},
        {"authorization_endpoint": ["https://x.example"]},
        {"authorization_endpoint": "https://["},
        {"authorization_endpoint": "https:///x"},
        {"authorization_endpoint": "https://x.example/\r\nset-cookie: a=b"},
        {"authorization_endpoint": "https://x.example/#fragment"},
        {"authorization_endpoint": "javascript:alert(1)"},
        {"token_endpoint": "ftp://x.example/"},
        {"userinfo_endpoint": "gopher://x.example/"},
        {"issuer": "https://evil.example"},
    ],
    ids=str,
)
async def test_wrong_discovery_documents_are_refused(world: World, changes: dict[str, Any]) -> None:
    world.announces(**changes)
    assert (await world.refused()).reason == "unavailable"


async def test_a_provider_of_https_announces_nothing_without_it(world: World) -> None:
    of_https = replace(world.provider, issuer="https://login.example")
    with pytest.raises(SignInFailed, match="https"):
        world.client._endpoint(of_https, {"token_endpoint": "http://x.example/"}, "token_endpoint")


@pytest.mark.parametrize("path", [DISCOVERY, "/token", "/userinfo"])
@pytest.mark.parametrize(
    "answer",
    [
        fixed(b"[]"),
        fixed(b"null"),
        fixed(b""),
        fixed(b"<html>"),
        fixed(b"[" * 100_000),
        fixed(b'{"a": 1, "a": 2}'),
        fixed(LARGE),
        fixed(b"{}", 500),
        fixed(b"", 302, location="/other"),
        fixed(b"{}", 200, **GZIP),
    ],
    ids=("list", "null", "empty", "HTML", "deep", "twice", "large", "500", "redirect", "gzip"),
)
async def test_broken_answers_of_a_provider_let_nobody_in(
    world: World, path: str, answer: Answer
) -> None:
    world.double.instead[path] = answer
    assert (await world.refused()).reason == "unavailable"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/token", {}),
        ("/token", {"id_token": 5}),
        ("/token", {"id_token": ""}),
        ("/token", {"id_token": "a.b"}),
        ("/token", {"id_token": "e30.e30.e30"}),
        ("/token", {"id_token": "e30." + "A" * oidc.ID_TOKEN_BYTES_MAX + ".e30"}),
        ("/userinfo", {}),
        ("/userinfo", {"sub": 5}),
        ("/userinfo", {"sub": "eve", "email": "ann@example.com", "email_verified": True}),
    ],
    ids=str,
)
async def test_answers_without_proof_let_nobody_in(
    world: World, path: str, body: dict[str, Any]
) -> None:
    world.double.instead[path] = fixed(json.dumps(body).encode())
    assert (await world.refused()).reason == "invalid"


async def test_an_access_token_cannot_add_a_header(world: World) -> None:
    real = world.double._token

    async def token(request: web.BaseRequest) -> web.StreamResponse:
        body = json.loads((await real(request)).text or "")
        return web.json_response(body | {"access_token": "a\r\nx-evil: 1"})

    world.double.instead["/token"] = token
    assert (await world.refused()).reason == "invalid"


@pytest.mark.parametrize("subject", [5, True, None, [], "", "a" * 256, "a\x00b", "a\ud800"])
async def test_a_subject_is_a_text(world: World, subject: object) -> None:
    world.double.token_changes = {"sub": subject}
    assert (await world.refused()).reason == "invalid"


@pytest.mark.parametrize(
    "changes",
    [{"nonce": 5}, {"nonce": "a\ud800"}, {"nonce": None}, {"sid": 5}, {"iss": "https://x.example"}],
    ids=str,
)
async def test_wrong_claims_let_nobody_in(world: World, changes: dict[str, Any]) -> None:
    world.double.token_changes = changes
    assert (await world.refused()).reason == "invalid"


def cookie_of(**changes: object) -> str:
    found = asdict(Flow.begin("corp", "/")) | changes
    return urlsafe_b64encode(json.dumps(found).encode()).decode()


@pytest.mark.parametrize(
    "cookie",
    [
        "",
        "é",
        "AAA",
        encoded([]),
        encoded({}),
        *(cookie_of(**{name: ""}) for name in ("provider", "state", "nonce", "verifier")),
        *(cookie_of(**{name: 5}) for name in ("provider", "state", "nonce", "verifier")),
        *(cookie_of(**{name: "a\ud800"}) for name in ("provider", "state", "nonce", "verifier")),
        cookie_of(begun_at=None),
        cookie_of(begun_at="5"),
        cookie_of(begun_at=10**400),
        cookie_of(begun_at=int(time.time()) - oidc.FLOW_S),
        cookie_of(begun_at=int(time.time()) + 86_400),
    ],
)
async def test_a_cookie_that_a_browser_makes_up_is_refused(cookie: str) -> None:
    with pytest.raises(SignInFailed) as failed:
        Flow.of_cookie(cookie)
    assert failed.value.reason == "expired"


async def test_an_answer_without_its_state_is_refused(world: World) -> None:
    flow = Flow.begin("corp", "/")
    answer = await world.answer(flow)
    for state in ("", flow.state + "x", "é"):
        with pytest.raises(SignInFailed) as failed:
            await world.client.finish(world.provider, flow, answer | {"state": state})
        assert failed.value.reason == "expired"
    await world.client.finish(world.provider, flow, answer)


async def test_keys_may_change_between_two_sign_ins(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.access.issuer_keys.INTERVAL_S", 0.0)
    await world.sign_in()
    world.double.rotate("next", keeps=False)
    await world.sign_in()


async def test_a_slow_provider_delays_no_other(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, goes_on = asyncio.Semaphore(0), asyncio.Event()

    async def slow(_: web.BaseRequest) -> web.StreamResponse:
        arrived.release()
        await goes_on.wait()
        return web.Response(status=500)

    async with served(ProviderDouble()) as double:
        other = World(double, tmp_path)
        other.client = world.client
        other.provider = replace(other.provider, name="slow")
        double.instead["/token"] = slow
        waiting = [asyncio.create_task(other.sign_in()) for _ in range(EXCHANGES_AT_ONCE)]
        for _ in waiting:
            await arrived.acquire()
        assert (await world.sign_in()).identity.subject == "ann"
        # One more at the slow provider is told so
        monkeypatch.setattr(oidc, "READ_S", 0.05)
        assert "too many" in str(await other.refused())
        # A caller that goes away gives its place free
        monkeypatch.setattr(oidc, "READ_S", 10.0)
        waiting.pop().cancel()
        waiting.append(asyncio.create_task(other.sign_in()))
        await asyncio.wait_for(arrived.acquire(), 5)
        goes_on.set()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(each) for each in ends} == {SignInFailed}


async def test_callers_share_a_read_of_the_discovery_document(world: World) -> None:
    reads = 0
    arrived, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(_: web.BaseRequest) -> web.StreamResponse:
        nonlocal reads
        reads += 1
        arrived.set()
        await goes_on.wait()
        return web.json_response(world.double.document())

    world.double.instead[DISCOVERY] = slow
    flow = Flow.begin("corp", "/")
    waiting = [asyncio.create_task(world.client.address(world.provider, flow)) for _ in range(100)]
    await arrived.wait()
    waiting[0].cancel()  # the one that began the read
    goes_on.set()
    addresses = (await asyncio.gather(*waiting, return_exceptions=True))[1:]
    assert {str(each).partition("?")[0] for each in addresses} == {f"{world.double.url}/authorize"}
    assert reads == 1


async def test_a_provider_whose_document_is_away_for_a_while_is_still_known(world: World) -> None:
    await world.sign_in()
    known = world.client._endpoints
    known["corp"] = replace(known["corp"], read_at=float("-inf"))
    reads = 0

    async def away(_: web.BaseRequest) -> web.StreamResponse:
        nonlocal reads
        reads += 1
        return web.Response(status=500)

    world.double.instead[DISCOVERY] = away
    for _ in range(2):
        await world.sign_in()
    assert reads == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"iat": None}, "`iat` is missing"),
        ({"events": None}, "`events`"),
        ({"events": []}, "`events`"),
        ({"nonce": "n"}, "`nonce`"),
        ({"sub": None, "sid": None}, "neither"),
        ({"sub": 5}, "`sub`"),
        ({"aud": "other"}, "`aud`"),
        ({"exp": None}, "`exp`"),
    ],
)
async def test_wrong_logout_tokens_are_refused(
    world: World, changes: dict[str, Any], why: str
) -> None:
    token = world.double.token({"typ": "logout+jwt"}, **(LOGOUT | changes))
    with pytest.raises(TokenInvalid, match=why):
        await world.client.logout(world.provider, token)


async def test_an_id_token_ends_no_session(world: World) -> None:
    token = world.double.token(aud=ProviderDouble.CLIENT)
    with pytest.raises(TokenInvalid):
        await world.client.logout(world.provider, token)


async def test_a_logout_token_says_what_ends_and_until_when(world: World) -> None:
    now = int(time.time())
    token = world.double.token({"typ": "logout+jwt"}, **LOGOUT)
    found = await world.client.logout(world.provider, token)
    assert (found.subject, found.session_id) == ("ada", "session-1")
    assert now <= found.begun_before - 30 <= now + 5
