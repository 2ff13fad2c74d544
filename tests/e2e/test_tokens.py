"""Callers with tokens of a trusted issuer: their rights, the end of them, and trust."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode

from metering.core.models import QuotaDimension
from metering.tenants.tenants import create_project
from tests.calls import Calls, calls
from tests.e2e.conftest import Serve
from tests.inference.checkpoints import LlamaShape, make_checkpoint
from tests.issuer_double import AUDIENCE, IssuerDouble, issuer
from tests.service import MODEL, Service, Tenant, start

WITHIN_S = 2.0  # of a revocation, in every process
Pair = tuple[Service, Service]


@pytest.fixture(scope="module")
def pair(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return two processes whose model takes 3 ms per token, so that answers still run."""
    directory = tmp_path_factory.mktemp("slow")
    make_checkpoint(directory, shape=LlamaShape(layer_count=120, context_window_tokens=4096))
    one, other = (serve(directory, is_drained=True, token_issuers_private=True) for _ in range(2))
    return one, other


@dataclass(frozen=True, slots=True)
class World:
    """Two processes, an issuer, and a tenant that trusts it."""

    pair: Pair
    issuer: IssuerDouble
    tenant: Tenant
    operator: Calls
    trusted: Any

    async def trust(self, **fields: Any) -> Any:
        """Trust the issuer with other terms, for another audience."""
        wanted = {
            "organization": self.tenant.name,
            "issuer": self.issuer.url,
            "audience": "other",
            "projects": ["main"],
        } | fields
        return (await self.operator("CreateTokenIssuer", **wanted)).token_issuer

    async def refused(self, token: str) -> tuple[str, str]:
        """Return code and message of a refusal, which is the same over gRPC and HTTP."""
        one, other = self.pair
        async with calls(one, token) as call:
            refusal = await call.refused("ListModels")
        assert (refusal.code, refusal.reason) == (StatusCode.UNAUTHENTICATED, "TOKEN_INVALID")
        status, error = await complete(other, token)
        assert (status, error["code"]) == (401, "token_invalid")
        assert error["message"] == refusal.status.message
        assert error["message"].count("Your token is not accepted: ") == 1
        return error["code"], error["message"]

    async def models(self, token: str) -> list[str]:
        """Return the models that both processes list for a token."""
        found = []
        for each in self.pair:
            async with calls(each, token) as call:
                found += [[model.name for model in (await call("ListModels")).models]]
        assert found[0] == found[1]
        return found[0]


@pytest.fixture
async def world(pair: Pair) -> AsyncIterator[World]:
    tenant, operator = await pair[0].tenant(), await pair[0].tenant(scopes=("admin",))
    async with issuer() as double, calls(pair[0], operator.secret) as call:
        made = World(pair, double, tenant, call, None)
        trusted = await made.trust(audience=AUDIENCE, end_user_claim="sub")
        yield World(pair, double, tenant, call, trusted)
        for listed in (await call("ListTokenIssuers", organization=tenant.name)).token_issuers:
            await call("DeleteTokenIssuer", token_issuer_id=listed.token_issuer_id)


async def complete(
    service: Service, token: str, header: str = "authorization", **fields: Any
) -> tuple[int, Any]:
    """Request a completion over HTTP; return the status, and the answer or the error."""
    value = f"Bearer {token}" if header == "authorization" else token
    async with aiohttp.ClientSession(headers={header: value}) as http:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1} | fields
        async with http.post(f"{service.openai_url}/completions", json=body) as response:
            answer = await response.json()
            return response.status, answer.get("error", answer)


async def test_a_token_is_served_as_its_bound_key(world: World) -> None:
    """Over gRPC and HTTP, in each process, with the end user and the limits of the key."""
    [project] = world.trusted.projects
    for service in world.pair:
        async with service.stream(world.issuer.token()) as stream:
            request_id = await stream.begin(max_output_tokens=2)
            await stream.finished(request_id)
        assert (await complete(service, world.issuer.token()))[0] == 200
        assert (await complete(service, world.issuer.token(), "x-api-key"))[0] == 200
    async with calls(world.pair[0], world.issuer.token()) as call:
        generation = (await call("GetGeneration", request_id=request_id)).generation
        assert (generation.end_user, generation.usage.delivered_token_count) == ("ada", 2)
        restrictions = (await call("GetQuota")).restrictions
        assert restrictions.prefix == project.prefix
        remaining_s = restrictions.secret_expire_time.seconds - time.time()
        assert 290 < remaining_s < 340, "the token's life, not that of the key"
        assert (await call.refused("ListOrganizations")).code == StatusCode.PERMISSION_DENIED
    async with calls(world.pair[0], world.issuer.token(sub="bob")) as call:
        lost = await call.refused("GetGeneration", request_id=request_id)
        assert lost.code == StatusCode.NOT_FOUND, "of another end user"
        for name in ("GetQuota", "GetOwnUsage"):
            refusal = await call.refused(name, end_user="ada")
            assert refusal.code == StatusCode.PERMISSION_DENIED
        assert not (await call("GetOwnUsage")).rows
    for service in world.pair:
        await service.no_hold_left(world.tenant)

    await world.pair[0].set_limit(world.tenant, QuotaDimension.REQUESTS_PER_DAY, 0)
    async with world.pair[0].stream(world.issuer.token()) as stream:
        assert (await stream.failed(await stream.begin())).reason == "QUOTA_EXCEEDED"


async def test_claims_narrow_what_the_key_may_do(world: World) -> None:
    await world.trust(
        audience="narrow",
        models=[MODEL],
        max_output_tokens=50,
        models_claim="models",
        max_output_tokens_claim="limit",
        label_claims=["team"],
    )
    claims: dict[str, Any] = {"aud": "narrow", "models": [MODEL], "limit": 5, "team": "search"}
    token, one = world.issuer.token(**claims), world.pair[0]

    async with one.stream(token) as stream:
        request_id = await stream.begin(max_output_tokens=5, labels={"own": "x"})
        await stream.finished(request_id)
        over = await stream.failed(await stream.begin(max_output_tokens=6))
        assert over.reason == "KEY_LIMIT_EXCEEDED"
        other = await stream.failed(await stream.begin(max_output_tokens=1, labels={"team": "b"}))
        assert other.fields == ["labels['team']"]
    async with calls(one, token) as call:
        generation = (await call("GetGeneration", request_id=request_id)).generation
        assert dict(generation.labels) == {"own": "x", "team": "search"}
    async with one.stream(world.issuer.token(**claims | {"limit": 51})) as stream:
        over = await stream.failed(await stream.begin(max_output_tokens=51))
        assert over.reason == "KEY_LIMIT_EXCEEDED", "a claim gives nothing that the key lacks"
    for change, why in (
        ({"models": ["other"]}, "permits no model"),
        ({"models": []}, "`models` must have"),
        ({"models": {"demo": 1}}, "`models` must have"),
        ({"models": None}, "`models` must have"),
        ({"limit": 0}, "`limit` must be"),
        ({"limit": True}, "`limit` must be"),
        ({"team": None}, "`team` is missing"),
        ({"team": "x" * 300}, "`team` is not a text"),
    ):
        assert why in (await world.refused(world.issuer.token(**claims | change)))[1], change


async def test_another_end_user_is_refused(world: World) -> None:
    token = world.issuer.token()
    async with world.pair[0].stream(token) as stream:
        await stream.finished(await stream.begin(max_output_tokens=1, end_user="ada"))
        refusal = await stream.failed(await stream.begin(max_output_tokens=1, end_user="bob"))
    assert refusal.fields == ["end_user"]
    assert (await complete(world.pair[1], token, user="ada"))[0] == 200
    status, error = await complete(world.pair[1], token, user="bob")
    assert (status, error["param"]) == (400, "user")
    bad = await world.refused(world.issuer.token(sub="sk-" + "a" * 30))
    assert "looks like an API key" in bad[1]


async def test_a_claim_chooses_among_the_listed_projects(world: World) -> None:
    async with world.pair[0].session() as session:
        await create_project(session, organization=world.tenant.name, name="second", actor="test")
    trusted = await world.trust(
        audience="teams", project_claim="team", projects=["a=main", "b=second"]
    )
    prefixes = {each.claim_value: each.prefix for each in trusted.projects}

    for team in ("a", "b"):
        async with calls(world.pair[0], world.issuer.token(aud="teams", team=team)) as call:
            assert (await call("GetQuota")).restrictions.prefix == prefixes[team]
    assert (
        "`team` is not one" in (await world.refused(world.issuer.token(aud="teams", team="c")))[1]
    )
    assert "`team` is missing" in (await world.refused(world.issuer.token(aud="teams")))[1]


async def test_tokens_that_are_not_trusted_are_refused(world: World) -> None:
    other = await world.trust(audience="another")
    for changes, why in (
        ({"aud": "unknown"}, "no trusted issuer"),
        ({"iss": "https://other.example.com"}, "no trusted issuer"),
        ({"iss": None}, "must have `iss`"),
        ({"aud": [AUDIENCE, "another"]}, "several of its audiences"),
        ({"aud": [str(number) for number in range(21)]}, "must have `iss`"),
        ({"exp": int(time.time()) - 60}, "expired"),
    ):
        assert why in (await world.refused(world.issuer.token(**changes)))[1]
    await world.operator("DeleteTokenIssuer", token_issuer_id=other.token_issuer_id)
    assert await world.models(world.issuer.token(aud=[AUDIENCE, "another"])) == [MODEL]


async def test_a_token_that_works_once_is_refused_in_every_process_then(world: World) -> None:
    """One of concurrent calls succeeds. A stream stays open, and can move with another token."""
    once = await world.trust(audience="once", single_use=True, end_user_claim="sub")
    assert once.requires_id
    token, numbers = world.issuer.token, iter(range(100))
    used = "SELECT * FROM used_tokens WHERE expires_at > now()"
    database = world.pair[0].database

    def fresh(**changes: Any) -> str:
        return token(**{"aud": "once", "jti": f"once-{next(numbers)}"} | changes)

    raced = fresh()
    answers = await asyncio.gather(
        *(complete(service, raced) for service in world.pair for _ in range(4)),
    )
    assert sorted(status for status, _ in answers) == [200] + [401] * 7
    assert "it was used before" in (await world.refused(raced))[1]
    assert len(database.rows(used)) == 1

    one, other = world.pair
    kept = fresh()
    async with one.stream(kept) as stream, other.stream(fresh()) as moved:
        request_id = await stream.begin(
            max_output_tokens=200, keep_on_disconnect=Duration(seconds=60)
        )
        await stream.received(request_id, 1)
        changed = {"api_key": once.projects[0].prefix, "max_output_tokens": 500}
        await world.operator("UpdateApiKey", **changed)  # so that the key is read again
        await stream.finished(await stream.begin(max_output_tokens=1))
        await moved.attach(request_id)
        await moved.finished(request_id)
        assert "it was used before" in (await world.refused(kept))[1]
    padded: dict[str, Any] = {
        "prompt": "a",
        "metadata": {str(each): "x" * 512 for each in range(40)},
    }
    status, error = await complete(one, fresh(), **padded)  # a long body: the key is read again
    assert (status, error["param"]) == (400, "metadata")
    assert "`jti` is missing" in (await world.refused(fresh(jti=None)))[1]

    database.rows("UPDATE used_tokens SET expires_at = now() RETURNING 1")
    await world.models(token())
    assert len(database.rows("SELECT 1 FROM used_tokens")) >= 4, "other tokens cost nothing"
    assert (await complete(one, fresh()))[0] == 200
    assert (await complete(one, fresh()))[0] == 200
    assert len(database.rows("SELECT 1 FROM used_tokens")) == 2, "what has expired goes"


async def test_a_token_of_an_end_user_reaches_nothing_of_others(world: World) -> None:
    """By whatever names a request by its id: running or over, here or in another process."""
    one, other = world.pair
    ada, bob = world.issuer.token(), world.issuer.token(sub="bob")
    long: dict[str, Any] = {"max_output_tokens": 3000}
    short: dict[str, Any] = {"max_output_tokens": 2}
    keeping = {"keep_on_disconnect": Duration(seconds=60)}
    async with one.stream(ada) as owner:
        requests: dict[str, dict[str, Any]] = {}
        for fields in (long | keeping, long):
            requests[await owner.begin(**fields)] = fields
        running = next(iter(requests))
        for each in requests:
            await owner.received(each, 3)
        for fields in (short | keeping, short):
            over = await owner.begin(**fields)
            await owner.finished(over)
            requests[over] = fields

        for service, (request_id, fields) in itertools.product(world.pair, requests.items()):
            async with service.stream(bob) as stream:
                await stream.attach(request_id)
                attached = await stream.failed(request_id)
                assert attached.reason == "REQUEST_UNKNOWN"
                assert attached.frame is not None
                assert not attached.frame.HasField("usage")
            async with service.stream(bob) as stream:
                await stream.update(request_id, max_output_tokens=1)
                await stream.cancel(request_id)
                assert (await stream.failed(request_id)).reason == "REQUEST_UNKNOWN"
            async with service.stream(bob) as stream:  # the same payload is not the same request
                await stream.send(start(request_id, **fields))
                assert (await stream.failed(request_id)).reason == "REQUEST_ID_REUSED"
        for service in world.pair:
            async with calls(service, bob) as call:
                for request_id in (*requests, str(uuid.uuid4())):
                    lost = await call.refused("GetGeneration", request_id=request_id)
                    assert (lost.code, lost.reason) == (StatusCode.NOT_FOUND, "NOT_FOUND")

        # The same end user with another token, and the application with its key
        for secret in (world.issuer.token(jti="later"), world.tenant.secret):
            async with other.stream(secret) as joined:
                await joined.attach(running)
                await joined.received(running, 1)
                await joined.attach(over)
                assert (await joined.failed(over)).reason != "REQUEST_UNKNOWN"
        async with one.stream(ada) as again:
            await again.send(start(running, **requests[running]))
            await again.received(running, 1)
            await again.cancel(running)
            await again.end(running)
    for service in world.pair:
        await service.no_hold_left(world.tenant)


async def test_idempotency_keys_of_end_users_are_their_own(world: World) -> None:
    """Two end users with one key over HTTP: the second one gets nothing of the first one."""
    key = {"idempotency-key": str(uuid.uuid4())}
    headers = [
        {"authorization": f"Bearer {world.issuer.token(sub=each)}", **key}
        for each in ("ada", "ada", "bob")
    ]
    answers = []
    for each in headers:
        async with (
            aiohttp.ClientSession(headers=each) as http,
            http.post(
                f"{world.pair[0].openai_url}/completions",
                json={"model": MODEL, "prompt": "a", "max_tokens": 1},
            ) as response,
        ):
            answers.append((response.status, (await response.json()).get("error", {}).get("code")))
    assert answers == [(200, None), (409, "request_settled"), (409, "request_id_reused")]


CLAIMS = [("jti", "token-1"), ("sid", "session-1"), ("sub", "ada")]


@pytest.mark.parametrize(("claim", "value"), CLAIMS)
async def test_revoked_tokens_end_in_every_process(world: World, claim: str, value: str) -> None:
    """Their requests too; other tokens of the issuer are untouched."""
    one, other = world.pair
    token = world.issuer.token(jti="token-1")
    spared = world.issuer.token(jti="token-2", sid="session-2", sub="bob")
    async with (
        one.stream(token) as here,
        other.stream(token) as there,
        other.stream(spared) as untouched,
    ):
        streams = {here: "", there: "", untouched: ""}
        for stream in streams:
            streams[stream] = await stream.begin(max_output_tokens=3000)
            await stream.received(streams[stream], 3)
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {token}"}) as http:
            body = {"model": MODEL, "prompt": "a", "max_tokens": 3000, "stream": True}
            async with http.post(f"{one.openai_url}/completions", json=body) as response:
                await response.content.readline()

                started = time.monotonic()
                answer = await world.operator(
                    "RevokeTokens",
                    token_issuer_id=world.trusted.token_issuer_id,
                    claim=claim,
                    value=value,
                )
                ends = [await each.failed(streams[each]) for each in (here, there)]
                text = (await response.content.read()).decode()
                assert time.monotonic() - started < WITHIN_S

        assert {end.reason for end in ends} == {"KEY_REVOKED"}
        assert "Your token was revoked." in text
        assert all(end.frame and end.frame.usage.delivered_token_count >= 3 for end in ends)
        late = await here.failed(await here.begin(max_output_tokens=1))
        assert "revoked" in late.status.message
        await untouched.finished(await untouched.begin(max_output_tokens=1))
        await untouched.cancel(streams[untouched])
    assert "it was revoked" in (await world.refused(token))[1]
    assert await world.models(spared) == [MODEL]
    lasts_s = answer.revocation.expire_time.seconds - time.time()
    assert 3600 < lasts_s < 3700, "until the last token that it concerns has expired"
    for service in world.pair:
        await service.no_hold_left(world.tenant)


async def test_a_revoked_client_token_ends_its_request_in_another_process(world: World) -> None:
    one, other = world.pair
    fields = {"call": "completions", "model": MODEL, "end_user": "ada"}
    async with calls(one, world.tenant.secret) as call:
        token = (await call("CreateClientToken", **fields)).value
        headers = {"authorization": f"Bearer {token}"}
        body = {"model": MODEL, "prompt": "a", "max_tokens": 3000, "stream": True}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{other.openai_url}/completions", json=body) as response,
        ):
            await response.content.readline()
            started = time.monotonic()
            revoked = await call("RevokeClientTokens", end_user="ada")
            text = (await response.content.read()).decode()
            assert time.monotonic() - started < WITHIN_S
    assert revoked.revoked_count == 1
    assert "Your token was revoked." in text
    async with calls(one, world.issuer.token()) as call:
        refusal = await call.refused("CreateClientToken", **fields)
    assert refusal.code == StatusCode.PERMISSION_DENIED, "no token makes tokens"
    await other.no_hold_left(world.tenant)


async def test_a_subject_may_come_back_and_a_session_may_not(world: World) -> None:
    trusted = {"token_issuer_id": world.trusted.token_issuer_id}
    await world.operator("RevokeTokens", **trusted, claim="sub", value="ada")
    later = int(time.time()) + 2
    assert await world.models(world.issuer.token(iat=later, jti="new")) == [MODEL]
    assert "revoked" in (await world.refused(world.issuer.token(iat=None)))[1]

    await world.operator("RevokeTokens", **trusted, claim="sid", value="session-1")
    assert "revoked" in (await world.refused(world.issuer.token(iat=later, jti="new")))[1]
    for claim, value in (("iss", "x"), ("sub", ""), ("sub", "x" * 300)):
        refusal = await world.operator.refused("RevokeTokens", **trusted, claim=claim, value=value)
        assert refusal.code == StatusCode.INVALID_ARGUMENT


async def test_a_revocation_is_forgotten_when_its_tokens_have_expired(world: World) -> None:
    trusted = {"token_issuer_id": world.trusted.token_issuer_id, "claim": "jti"}
    database = world.pair[0].database
    await world.operator("RevokeTokens", **trusted, value="old")
    database.rows("UPDATE token_revocations SET expires_at = now() RETURNING 1")

    await world.operator("RevokeTokens", **trusted, value="new")

    assert len(database.rows("SELECT 1 FROM token_revocations")) == 1


async def test_an_issuer_that_is_no_longer_trusted_ends_its_requests(world: World) -> None:
    token = world.issuer.token()
    async with world.pair[1].stream(token) as stream:
        request_id = await stream.begin(max_output_tokens=3000)
        await stream.received(request_id, 3)
        await world.operator("DeleteTokenIssuer", token_issuer_id=world.trusted.token_issuer_id)
        assert (await stream.failed(request_id)).reason == "KEY_REVOKED"
    assert "no trusted issuer" in (await world.refused(token))[1]
    again = await world.trust(audience=AUDIENCE)
    assert again.projects[0].prefix != world.trusted.projects[0].prefix
    assert await world.models(token) == [MODEL]


async def test_a_stream_outlives_its_token_but_starts_nothing_more(world: World) -> None:
    await world.trust(audience="short", leeway=Duration())
    token = world.issuer.token(aud="short", exp=int(time.time()) + 2)
    async with world.pair[0].stream(token) as stream:
        request_id = await stream.begin(max_output_tokens=1200)
        await stream.received(request_id, 3)
        await asyncio.sleep(2.1)
        late = await stream.failed(await stream.begin(max_output_tokens=1))
        await stream.finished(request_id)
    assert late.reason == "UNAUTHENTICATED"
    assert "Your token has expired" in late.status.message
    assert "expired" in (await world.refused(token))[1]


async def test_keys_rotate_while_tokens_are_used(world: World) -> None:
    old = world.issuer.token()
    assert await world.models(old) == [MODEL]
    world.issuer.rotate("second")

    assert await world.models(world.issuer.token()) == [MODEL]
    assert await world.models(old) == [MODEL]


async def test_an_issuer_that_is_away_is_no_fault_of_the_caller(world: World) -> None:
    async with issuer() as gone:
        await world.trust(issuer=gone.url, audience="gone")
    async with calls(world.pair[0], gone.token(aud="gone")) as call:
        refusal = await call.refused("ListModels")
    assert (refusal.code, refusal.reason) == (StatusCode.UNAVAILABLE, "ISSUER_UNAVAILABLE")
    assert refusal.retry_after_s == 5
    await world.trust(issuer=gone.url, audience="inline", keys=gone.key_set().decode())
    assert await world.models(gone.token(aud="inline")) == [MODEL]


async def test_who_may_trust_issuers_and_which(service: Service, world: World) -> None:
    """`service` allows public addresses only, and its administrators may trust."""
    tenant, other = await service.tenant(), await service.tenant()
    _, secret = await service.new_key(tenant, role="admin")
    wanted = {
        "organization": tenant.name,
        "issuer": "https://login.example.com",
        "audience": f"weir-{tenant.name}",
        "projects": ["main"],
    }
    async with calls(service, secret) as call:
        trusted = (await call("CreateTokenIssuer", **wanted)).token_issuer
        taken = await call.refused("CreateTokenIssuer", **wanted)
        assert taken.code == StatusCode.ALREADY_EXISTS
        for change, field in (
            ({"issuer": "http://login.example.com"}, "issuer"),
            ({"issuer": "https://10.0.0.1"}, "issuer"),
            ({"issuer": "https://169.254.169.254/"}, "issuer"),
            ({"issuer": "login.example.com"}, "issuer"),
            ({"keys_url": "https://[::1]/keys"}, "keys_url"),
            ({"keys": "{}"}, "keys"),
            ({"algorithms": ["HS256"]}, "algorithms"),
            ({"algorithms": ["none"]}, "algorithms"),
            ({"audience": ""}, "audience"),
            ({"projects": []}, "projects"),
            ({"projects": ["a=main"]}, "projects"),
            ({"project_claim": "team"}, "projects"),
            ({"project_claim": "team", "projects": ["a=main", "a=main"]}, "projects"),
            ({"leeway": Duration(seconds=301)}, "leeway"),
            ({"lifetime_max": Duration(seconds=86_401)}, "lifetime_max"),
            ({"lifetime_max": Duration(nanos=5)}, "lifetime_max"),
            ({"label_claims": [str(n) for n in range(9)]}, "label_claims"),
        ):
            refusal = await call.refused(
                "CreateTokenIssuer", **wanted | {"audience": "new"} | change
            )
            assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, [field]), change
        foreign = await call.refused("CreateTokenIssuer", **wanted | {"organization": other.name})
        assert foreign.code == StatusCode.NOT_FOUND
        entries = (await call("ListAuditEntries", action_prefix="token_issuer.")).entries
        assert [each.action for each in entries] == ["token_issuer.create"]
    _, foreign_secret = await service.new_key(other, role="admin")
    async with calls(service, foreign_secret) as call:
        assert not (await call("ListTokenIssuers")).token_issuers
        stolen = await call.refused("CreateTokenIssuer", **wanted | {"organization": other.name})
        assert stolen.code == StatusCode.ALREADY_EXISTS, "tokens lead to one organization"
        for name in ("DeleteTokenIssuer", "RevokeTokens"):
            fields = {"token_issuer_id": trusted.token_issuer_id}
            fields |= {"claim": "sub", "value": "ada"} if name == "RevokeTokens" else {}
            assert (await call.refused(name, **fields)).code == StatusCode.NOT_FOUND
    _, own = await world.pair[0].new_key(world.tenant, role="admin")
    async with calls(world.pair[0], own) as call:
        refusal = await call.refused(
            "CreateTokenIssuer",
            organization=world.tenant.name,
            issuer=world.issuer.url,
            audience="mine",
            projects=["main"],
        )
        assert refusal.code == StatusCode.PERMISSION_DENIED, "it may read private addresses"


async def test_forged_tokens_count_against_the_throttle(serve: Serve, model: Path) -> None:
    """By address, before the database; a token that was valid before is exempt."""
    service = serve(model, token_issuers_private=True, auth_failures_per_minute=3)
    tenant, operator = await service.tenant(), await service.tenant(scopes=("admin",))
    async with issuer() as double:
        async with calls(service, operator.secret) as call:
            await call(
                "CreateTokenIssuer",
                organization=tenant.name,
                issuer=double.url,
                audience="throttled",
                projects=["main"],
            )
        known = double.token(aud="throttled")
        async with calls(service, known) as call:
            await call("ListModels")
        codes = []
        for number in range(5):
            async with calls(service, double.token(aud=f"unknown-{number}")) as call:
                codes.append((await call.refused("ListModels")).reason)
        assert codes == ["TOKEN_INVALID"] * 3 + ["AUTHENTICATION_THROTTLED"] * 2
        async with calls(service, known) as call:
            await call("ListModels")
