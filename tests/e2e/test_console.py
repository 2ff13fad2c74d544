"""HTTP listener of the console: files and headers, available calls, and access to data."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from yarl import URL

from api.console.console import BODY_BYTES_MAX, HEADERS, NAMES, read_files
from api.core.endpoint import read_endpoint
from api.core.health import SERVICES
from metering.core.models import QuotaDimension
from tests.conftest import new_database
from tests.e2e.test_console_changes import STEPS
from tests.service import PATIENCE_S, Service, Tenant, bearer, log_events, running

# Each of them is compared with gRPC in test_console_changes.py, except the first.
CHANGES = {"AdminService/KillRequest"} | {name for name, _ in STEPS}


def console_url(service: Service, path: str = "") -> str:
    """Return an address of the console."""
    return f"{service.openai_url.removesuffix('/v1')}/console/{path}"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a client that follows no redirects and stores no cookies."""
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(PATIENCE_S), cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        yield session


async def ask(
    http: aiohttp.ClientSession, service: Service, name: str, secret: str | None, body: Any = None
) -> tuple[int, Any]:
    """Make a call; return the status and the parsed body."""
    headers = {"content-type": "application/json"} | (
        {} if secret is None else {"authorization": f"Bearer {secret}"}
    )
    content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    async with http.post(
        console_url(service, f"api/{name}"), data=content, headers=headers
    ) as response:
        assert missing_headers(response.headers) == {}, name
        assert response.headers["cache-control"] == "no-store", name
        text = await response.read()
        return response.status, json.loads(
            text
        ) if response.content_type == "application/json" else text


def missing_headers(found: Any) -> dict[str, str]:
    """Return the console's headers that an answer lacks."""
    return {name: value for name, value in HEADERS.items() if found.get(name) != value}


def reason_of(text: Any) -> str:
    """Return the reason of a refusal from `google.rpc.Status` in JSON."""
    status = json_format.ParseDict(text, status_pb2.Status())
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert status.code != code_pb2.OK
    assert status.message
    return info.reason


async def test_files_have_security_headers(service: Service, http: aiohttp.ClientSession) -> None:
    for name, file in read_files().items():
        async with http.get(console_url(service, name)) as response:
            content, found = await response.read(), response.headers
        async with http.get(
            console_url(service, name), headers={"if-none-match": found["etag"]}
        ) as again:
            unchanged = (
                await again.read(),
                again.status,
                missing_headers(again.headers),
                again.headers["content-type"],
            )
        async with http.head(console_url(service, name)) as head:
            packed = int(head.headers["content-length"])
        plainly = {"accept-encoding": "identity"}
        async with http.get(console_url(service, name), headers=plainly) as plain:
            length = int(plain.headers["content-length"])
            assert "content-encoding" not in plain.headers

        assert content == file.content
        assert missing_headers(found) == {}
        assert found["content-type"] == file.media_type
        assert found["cache-control"] == "no-cache"
        assert "set-cookie" not in found
        assert not {each for each in found if each.lower().startswith("access-control")}
        assert unchanged == (b"", 304, {}, file.media_type)
        assert found["content-encoding"] == "gzip"
        assert (length, packed) == (len(content), len(file.packed))
    policy = HEADERS["content-security-policy"].split("; ")
    assert {
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "frame-ancestors 'none'",
    } <= set(policy)
    assert "unsafe" not in HEADERS["content-security-policy"]


async def test_a_missing_slash_redirects(service: Service, http: aiohttp.ClientSession) -> None:
    async with http.get(console_url(service).removesuffix("/"), allow_redirects=False) as response:
        assert (response.status, response.headers["location"]) == (307, "console/")
        assert missing_headers(response.headers) == {}
    async with http.get(console_url(service).removesuffix("/")) as response:
        assert response.status == 200
        assert (await response.text()).startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "nothing", 404),
        ("GET", "../api/core/settings.py", 404),
        ("GET", "%2e%2e/calls.py", 404),
        ("GET", "static/index.html", 404),
        ("POST", "", 405),
        ("OPTIONS", "console.js", 405),
        ("GET", "api/", 404),
        ("GET", "api/BillingService/GetUsage", 405),
        ("OPTIONS", "api/BillingService/GetUsage", 405),
        ("POST", "api/session", 405),
        ("POST", "api/AdminService/ApplyFleet", 404),
        ("POST", "api/weir.v1.BillingService/GetUsage", 404),
    ],
)
async def test_unknown_paths_and_methods_get_a_status_in_json(
    service: Service, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    async with http.request(method, URL(console_url(service, path), encoded=True)) as response:
        text = await response.json()

        assert response.status == status
        if not path.startswith((".", "%")):  # these belong to the other listener
            assert missing_headers(response.headers) == {}
            assert reason_of(text)


async def test_a_valid_key_is_required(service: Service, http: aiohttp.ClientSession) -> None:
    tenant = await service.tenant(scopes=("admin", "billing", "inference"))
    for name in NAMES:
        for secret in (None, "", "nonsense"):
            status, text = await ask(http, service, name, secret)
            assert (status, reason_of(text)) == (401, "UNAUTHENTICATED"), name
    async with http.get(console_url(service, "api/session")) as response:
        assert await response.json() == {"providers": []}, "the ways to sign in"
    elsewhere = {
        "cookie": f"weir.key={tenant.secret}; authorization={tenant.secret}",
        "content-type": "application/json",
    }
    query = urllib.parse.urlencode(
        {"key": tenant.secret, "authorization": f"Bearer {tenant.secret}"}
    )
    async with http.post(
        f"{console_url(service, 'api/AdminService/ListOrganizations')}?{query}", headers=elsewhere
    ) as response:
        assert response.status == 401


async def test_only_calls_of_the_list_are_offered_and_changes_are_named() -> None:
    every = {f"{method.containing_service.name}/{method.name}": method for method in methods()}
    offered = set(NAMES)

    assert offered < every.keys()
    assert all(
        name.partition("/")[2].startswith(("Get", "List", "Export", "Verify"))
        for name in offered - CHANGES
    )
    assert offered & CHANGES == CHANGES


async def test_other_calls_are_refused(service: Service, http: aiohttp.ClientSession) -> None:
    tenant = await service.tenant(scopes=("admin", "billing", "inference"))
    offered = set(NAMES)
    before = service.database.rows("SELECT count(*) AS n FROM audit_log")

    for method in methods():
        name = f"{method.containing_service.name}/{method.name}"
        if name not in offered:
            status, text = await ask(http, service, name, tenant.secret)
            assert (status, reason_of(text)) == (404, "URL_UNKNOWN"), name

    assert service.database.rows("SELECT count(*) AS n FROM audit_log") == before


async def test_calls_answer_like_grpc(service: Service, http: aiohttp.ClientSession) -> None:
    """Equal bytes or refusals, except for calls whose answer changes with time."""
    tenant = await service.tenant(
        {QuotaDimension.TOKENS_PER_MONTH: 1000}, scopes=("admin", "billing", "inference")
    )
    fields = {
        "organization": tenant.name,
        "month": "2026-01",
        "request_id": str(uuid.uuid4()),
        "format": 1,
        "group_by": [2],
    }
    moving = {
        *(
            "ListLiveRequests",
            "ListReplicas",
            "GetForecast",
            "ListQuotas",
            "GetQuota",
            "ListAuditEntries",
            "ExportMonth",
            "ExportOrganization",
        ),
        "ListApiKeys",  # last uses
    }

    async with service.channel() as channel:
        for method in methods():
            name = f"{method.containing_service.name}/{method.name}"
            if name not in set(NAMES) - CHANGES:
                continue
            known = {
                field: value
                for field, value in fields.items()
                if field in method.input_type.fields_by_name
            }
            requested = json_format.ParseDict(known, message_of(method.input_type))
            status, text = await ask(
                http, service, name, tenant.secret, json_format.MessageToDict(requested)
            )
            try:
                call: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
                path = f"/{method.containing_service.full_name}/{method.name}"
                made = call(path, request_serializer=type(requested).SerializeToString)(
                    requested, metadata=bearer(tenant.secret)
                )
                over_grpc = (
                    b"".join([part async for part in made])
                    if method.server_streaming
                    else bytes(await made)
                )
            except aiohttp.ClientError:
                raise
            except Exception as error:
                refusal: Any = error
                assert status >= 400, (name, text)
                assert text["message"] == refusal.details(), name
                assert text["code"] == refusal.code().value[0], name
                continue
            assert status == 200, (name, text)
            if method.name not in moving:
                answer = json_format.ParseDict(text, message_of(method.output_type))
                assert answer == type(answer).FromString(over_grpc), name
            elif method.name == "ExportMonth":
                assert text.startswith(b"%PDF-"), name
            elif method.name == "ExportOrganization":
                assert text.startswith(b"PK"), name
            else:
                json_format.ParseDict(text, message_of(method.output_type))


async def test_the_session_lists_the_calls(service: Service, http: aiohttp.ClientSession) -> None:
    tenant = await service.tenant()
    key, secret = await service.new_key(tenant, "billing")

    async with http.get(
        console_url(service, "api/session"), headers={"authorization": f"Bearer {secret}"}
    ) as response:
        text = await response.json()

    assert text["keyPrefix"] == key.prefix
    assert text["organizationId"] == str(tenant.organization_id)
    assert text["scopes"] == ["billing"]
    services = {name.partition("/")[0] for name in text["calls"]}
    assert services == {"BillingService", "ReceiptService"}


async def test_an_end_by_an_admin_is_audited(service: Service, http: aiohttp.ClientSession) -> None:
    tenant = await service.tenant()
    admin = await service.tenant(scopes=("admin",))
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=3900, ignore_eos=True)
        await stream.received(request_id, 1)

        own_status, own = await ask(
            http, service, "AdminService/KillRequest", tenant.secret, {"requestId": request_id}
        )
        status, text = await ask(
            http,
            service,
            "AdminService/KillRequest",
            admin.secret,
            {"requestId": request_id, "reason": "test"},
        )
        failed = await stream.failed(request_id)

    assert (own_status, reason_of(own)) == (403, "PERMISSION_DENIED")
    assert (status, text["result"]) == (200, "RESULT_ENDED")
    assert failed.reason == "CANCELLED_BY_ADMIN"
    query = "SELECT actor, action FROM audit_log WHERE subject_id = %s"
    [entry] = service.database.rows(query, request_id)
    assert (entry["actor"], entry["action"]) == (admin.key.prefix, "request.kill")


async def test_bodies_have_bounds_and_a_type(service: Service, http: aiohttp.ClientSession) -> None:
    tenant = await service.tenant(scopes=("admin",))
    url, key = (
        console_url(service, "api/AdminService/ListQuotas"),
        {"authorization": f"Bearer {tenant.secret}"},
    )
    as_json = key | {"content-type": "application/json"}

    async def refusal(data: Any, headers: dict[str, str]) -> tuple[int, str]:
        async with http.post(url, data=data, headers=headers) as response:
            return response.status, reason_of(await response.json())

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * (BODY_BYTES_MAX // 2)

    assert await refusal(b" " * (BODY_BYTES_MAX + 1), as_json) == (413, "MESSAGE_TOO_LARGE")
    assert await refusal(pieces(), as_json) == (413, "MESSAGE_TOO_LARGE")
    as_text = key | {"content-type": "text/plain"}
    assert await refusal(b"{}", as_text) == (415, "HTTP_INVALID")
    packed = as_json | {"content-encoding": "gzip"}
    assert await refusal(b"{}", packed) == (415, "HTTP_INVALID")
    assert await refusal(b'{"nothing": 1}', as_json) == (400, "MESSAGE_UNREADABLE")
    assert await refusal(b"[" * BODY_BYTES_MAX, as_json) == (400, "MESSAGE_UNREADABLE")


def message_of(kind: Any) -> Any:
    """Return a new message of a type."""
    return GetMessageClass(kind)()


def methods() -> Iterator[MethodDescriptor]:
    """Return all calls of the contract."""
    for name in SERVICES:
        yield from Default().FindServiceByName(name).methods


any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.just("2026-11"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def attacks(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a reading call with an almost valid or damaged body."""
    name = draw(st.sampled_from(sorted(set(NAMES) - CHANGES)))
    described = (
        Default()
        .FindServiceByName(f"weir.v1.{name.partition('/')[0]}")
        .methods_by_name[name.partition("/")[2]]
    )
    body: dict[str, Any] = {}
    for field in (
        draw(st.lists(st.sampled_from([*described.input_type.fields]), max_size=3))
        if described.input_type.fields
        else ()
    ):
        plausible = (
            st.sampled_from(["", "2026-11", str(uuid.uuid4()), "demo"])
            if field.type == FieldDescriptor.TYPE_STRING
            else any_json
        )
        body[draw(st.sampled_from([field.json_name, field.name]))] = draw(plausible | any_json)
    content = json.dumps(draw(st.just(body) | any_json)).encode()
    if draw(st.integers(0, 9)) == 0:
        index = draw(st.integers(0, len(content)))
        content = content[:index] + draw(st.binary(max_size=4)) + content[index + 1 :]
    return name, content


def test_no_body_is_our_mistake(service: Service) -> None:
    """Any body gets JSON of the contract: a message, or a status that blames the request."""

    async def poll(cases: list[tuple[str, bytes]], tenant: Tenant) -> None:
        async with aiohttp.ClientSession() as session:
            for name, body in cases:
                status, text = await ask(session, service, name, tenant.secret, body)
                assert status in (200, 400, 404), (name, body, text)
                assert status == 200 or reason_of(text), (name, body)

    tenant = asyncio.run(service.tenant(scopes=("admin", "billing", "inference")))
    incidents = len(log_events(service.log, "incident"))

    @settings(
        max_examples=25,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(attacks(), min_size=1, max_size=8))
    def run(cases: list[tuple[str, bytes]]) -> None:
        asyncio.run(poll(cases, tenant))

    run()

    assert len(log_events(service.log, "incident")) == incidents


def test_a_process_without_the_console_answers_nothing_there(
    tmp_path: Path, model: Path, postgres_server: str, template_database: str
) -> None:
    """`WEIR_CONSOLE=0` disables the page and its calls, and logs no address."""
    with (
        new_database(postgres_server, template=template_database) as url,
        running(Service(tmp_path, url, model, console=False)) as service,
    ):
        refused = []
        for path in ("", "app.mjs", "api/session", "api/AdminService/ListOrganizations"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(console_url(service, path), timeout=PATIENCE_S)
            refused.append((caught.value.code, json.loads(caught.value.read())["error"]["code"]))
            caught.value.close()
        reported = read_endpoint(service.home).console_url

        assert set(refused) == {(404, "unknown_url")}
        assert reported == ""
        assert service.stop() == 0
