"""Tokens for browsers: one call, one model, some requests, some minutes, pages of some origins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest
from grpc import StatusCode

from tests.calls import calls
from tests.service import MODEL, Service, Tenant

CALL = "chat/completions"
APP = "https://app.example.com"
ALLOWED = "access-control-allow-origin"
BODY: Mapping[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 1,
}


class Browser:
    """Requests over HTTP, with a secret and the origin of a page."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def post(
        self, secret: str, call: str = CALL, origin: str = "", /, **fields: Any
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Return status, body and headers of a call; without fields, of a chat."""
        headers = {"authorization": f"Bearer {secret}"} | ({"origin": origin} if origin else {})
        body = dict(BODY) | fields if call == CALL else fields
        async with self._http.post(f"{self._url}/{call}", json=body, headers=headers) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else text, response.headers

    async def make(self, secret: str, **fields: Any) -> Any:
        """Return a client token that this key makes."""
        wanted = {"call": CALL, "model": MODEL} | fields
        status, made, _ = await self.post(secret, "client_tokens", **wanted)
        assert status == 200, made
        return made

    async def preflight(self, call: str, **headers: str) -> tuple[int, Mapping[str, str]]:
        headers_sent = {"origin": APP, "access-control-request-method": "POST"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        async with self._http.options(f"{self._url}/{call}", headers=headers_sent) as response:
            return response.status, response.headers


@pytest.fixture
async def browser(service: Service) -> AsyncIterator[Browser]:
    async with aiohttp.ClientSession() as http:
        yield Browser(http, service.openai_url)


async def test_a_token_makes_one_kind_of_call_and_no_other(
    service: Service, tenant: Tenant, browser: Browser
) -> None:
    made = await browser.make(tenant.secret, max_requests=10, end_user="ada")
    token = made["value"]
    assert 290 < made["expires_at"] - time.time() < 310

    status, answer, _ = await browser.post(token)
    assert (status, answer["object"]) == (200, "chat.completion")
    for call, fields in (
        ("completions", {"model": MODEL, "prompt": "a"}),
        ("responses", {"model": MODEL, "input": "a"}),
        ("messages", dict(BODY)),
        ("embeddings", {"model": "demo-embedding", "input": "a"}),
        ("tokenize", {"model": MODEL, "prompt": "a"}),
        ("client_tokens", {"call": CALL, "model": MODEL}),
        ("client_tokens/revoke", {"end_user": "ada"}),
    ):
        status, refusal, _ = await browser.post(token, call, **fields)
        assert status == 403, (call, refusal)
        assert f"may only call POST /v1/{CALL} over HTTP" in str(refusal)
    async with calls(service, token) as grpc:
        for name in ("ListModels", "GetOwnUsage", "GetQuota", "CreateClientToken"):
            assert (await grpc.refused(name)).code == StatusCode.PERMISSION_DENIED
    async with service.stream(token) as stream:
        assert await stream.closed() == StatusCode.PERMISSION_DENIED
    status, refusal, _ = await browser.post(token, model="another")
    assert (status, refusal["error"]["code"]) == (403, "model_not_allowed")
    status, refusal, _ = await browser.post(token, user="bob")
    assert (status, refusal["error"]["param"]) == (400, "user")
    await service.no_hold_left(tenant)
    [row] = service.database.rows(
        "SELECT count(*) AS n FROM holds h JOIN usage_subjects s ON s.id = h.end_user_id"
        " WHERE h.api_key_id = %s AND s.name = 'ada'",
        tenant.key.id,
    )
    assert row["n"] == 1, "its request is the key's, for the end user"
    nameless = (await browser.make(tenant.secret, max_requests=2))["value"]
    status, refusal, _ = await browser.post(nameless, user="bob")
    assert (status, refusal["error"]["param"]) == (400, "user"), "a page uses up limits of nobody"
    assert (await browser.post(nameless))[0] == 200


async def test_concurrent_requests_never_exceed_the_number(
    service: Service, tenant: Tenant, browser: Browser
) -> None:
    token = (await browser.make(tenant.secret, max_requests=5))["value"]

    answers = await asyncio.gather(*(browser.post(token) for _ in range(20)))

    assert sorted(status for status, _, _ in answers) == [200] * 5 + [401] * 15
    refusals = {answer["error"]["message"] for status, answer, _ in answers if status == 401}
    assert refusals == {
        "Your token is not accepted: it has made all of its requests. Send a new one from your"
        " application's server."
    }
    await service.no_hold_left(tenant)


async def test_each_prompt_is_a_request(tenant: Tenant, browser: Browser) -> None:
    made = await browser.make(tenant.secret, call="completions", max_requests=2)
    three = {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": 1}

    assert (await browser.post(made["value"], "completions", **three))[0] == 401
    three["prompt"] = ["a", "b"]
    assert (await browser.post(made["value"], "completions", **three))[0] == 200
    assert (await browser.post(made["value"], "completions", **three))[0] == 401


async def test_an_invalid_request_is_not_counted(tenant: Tenant, browser: Browser) -> None:
    token = (await browser.make(tenant.secret, max_output_tokens=1))["value"]

    assert (await browser.post(token, temperature=-1))[0] == 400
    assert (await browser.post(token))[0] == 200
    assert (await browser.post(token))[0] == 401


async def test_its_limits_are_within_those_of_the_key(
    service: Service, tenant: Tenant, browser: Browser
) -> None:
    token = (await browser.make(tenant.secret, max_output_tokens=3, max_requests=9))["value"]
    status, refusal, _ = await browser.post(token, max_tokens=4)
    assert (status, refusal["error"]["code"]) == (400, "key_limit_exceeded")
    _, narrow = await service.new_key(tenant, models=["another"])
    status, refusal, _ = await browser.post(narrow, "client_tokens", call=CALL, model=MODEL)
    assert (status, refusal["error"]["code"]) == (403, "model_not_allowed")
    key, secret = await service.new_key(tenant)
    token = (await browser.make(secret))["value"]
    await service.revoke(key)
    await asyncio.sleep(1.1)  # for which HTTP may use an earlier check
    assert (await browser.post(token))[0] == 401


@pytest.mark.parametrize("by", ["id", "end_user"])
async def test_a_revocation_applies_to_the_tokens_of_the_key(
    service: Service, tenant: Tenant, browser: Browser, by: str
) -> None:
    made = await browser.make(tenant.secret, end_user="ada", max_requests=9)
    other = await browser.make(tenant.secret, end_user="bob", max_requests=9)
    assert (await browser.post(made["value"]))[0] == 200
    revoke = {by: made["id"] if by == "id" else "ada"}

    status, revoked, _ = await browser.post(tenant.secret, "client_tokens/revoke", **revoke)

    assert (status, revoked) == (200, {"revoked_count": 1})
    status, refusal, _ = await browser.post(made["value"])
    assert (status, "it was revoked" in refusal["error"]["message"]) == (401, True)
    again = await browser.post(tenant.secret, "client_tokens/revoke", **revoke)
    assert again[1] == {"revoked_count": 0}
    foreign = (await service.tenant()).secret
    revoke = {by: other["id"] if by == "id" else "bob"}
    status, answer, _ = await browser.post(foreign, "client_tokens/revoke", **revoke)
    assert status == 404 if by == "id" else answer == {"revoked_count": 0}
    assert (await browser.post(other["value"]))[0] == 200
    for wrong in ({}, {"id": made["id"], "end_user": "ada"}):
        assert (await browser.post(tenant.secret, "client_tokens/revoke", **wrong))[0] == 400


async def test_an_expired_token_is_refused(tenant: Tenant, browser: Browser) -> None:
    made = await browser.make(tenant.secret, expires_in_s=1, origins=[APP])
    await asyncio.sleep(1.1)

    status, refusal, headers = await browser.post(made["value"], CALL, APP)

    assert (status, refusal["error"]["code"]) == (401, "token_invalid")
    assert "it has expired" in refusal["error"]["message"]
    assert headers[ALLOWED] == APP, "so that the page knows to get another one"


async def test_only_pages_of_its_origins_may_use_it(tenant: Tenant, browser: Browser) -> None:
    token = (await browser.make(tenant.secret, max_requests=9, origins=[APP]))["value"]

    for stream in (False, True):
        status, _, headers = await browser.post(token, CALL, APP, stream=stream)
        assert (status, headers[ALLOWED], headers["vary"]) == (200, APP, "origin")
        assert "weir-request-id" in headers["access-control-expose-headers"]
    status, _, headers = await browser.post(token, CALL, APP, temperature=-1)
    assert (status, headers[ALLOWED]) == (400, APP), "errors are read too"
    for origin in ("https://evil.example.com", "null", "http://app.example.com", ""):
        status, _, headers = await browser.post(token, CALL, origin)
        assert (status, headers.get(ALLOWED)) == (403, None), origin
    # Without origins, and with a key, a page of another server reads nothing.
    bare = (await browser.make(tenant.secret))["value"]
    for secret in (bare, tenant.secret, "wct_" + "a" * 43):
        assert (await browser.post(secret, CALL, APP))[2].get(ALLOWED) is None


async def test_a_preflight_has_no_token(browser: Browser) -> None:
    for call in (CALL, "completions", "responses", "messages", "embeddings"):
        status, headers = await browser.preflight(call)
        assert (status, headers[ALLOWED], headers["vary"]) == (204, APP, "origin")
        assert headers["access-control-allow-methods"] == "POST"
        assert "authorization" in headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in headers
    for call in ("client_tokens", "tokenize", "models"):
        status, headers = await browser.preflight(call)
        assert (status, headers.get(ALLOWED)) == (405, None)
    assert (await browser.preflight(CALL, access_control_request_method="PUT"))[0] == 405


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"call": "models"}, "call"),
        ({"call": ""}, "call"),
        ({"model": ""}, "model"),
        ({"expires_in_s": 0}, "lifetime"),
        ({"expires_in_s": 3601}, "lifetime"),
        ({"expires_in_s": 10**30}, "lifetime"),
        ({"max_requests": 10_001}, "max_requests"),
        ({"max_requests": -1}, "max_requests"),
        ({"max_requests": 2**40}, "body"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"origins": ["*"]}, "origins"),
        ({"origins": ["https://app.example.com/"]}, "origins"),
        ({"origins": ["https://app.example.com/path"]}, "origins"),
        ({"origins": ["https://u@app.example.com"]}, "origins"),
        ({"origins": ["null"]}, "origins"),
        ({"origins": [f"https://{n}.example.com" for n in range(11)]}, "origins"),
        ({"end_user": "sk-" + "a" * 30}, "end_user"),
        ({"unknown": 1}, "unknown"),
    ],
)
async def test_terms_are_checked(
    tenant: Tenant, browser: Browser, fields: dict[str, Any], param: str
) -> None:
    wanted = {"call": CALL, "model": MODEL} | fields
    status, refusal, _ = await browser.post(tenant.secret, "client_tokens", **wanted)
    assert (status, refusal["error"]["param"]) == (400, param), refusal
