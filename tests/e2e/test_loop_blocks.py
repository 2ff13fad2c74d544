"""Nothing that a caller sends blocks the event loop of an api process for more than 20 ms.

The whole process runs on the loop of the test; clients are threads. Every path of the HTTP router,
every call and every header gets the costliest bodies (`bench/costly_bodies.py`).
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from sqlalchemy import text

import api.serving as api_main
from api.core import rate_limiter
from api.core.endpoint import read_endpoint
from api.core.interceptor import LARGE_MESSAGES, MESSAGE_BYTES_MAX
from api.openai.tokens import DECODED_COUNT_MAX
from bench.costly_bodies import messages_of
from bench.pages import fill
from metering.core.pages import PAGE_SIZE_MAX
from tests.api.test_growth import BYTES_MAX, ENTRIES, HTTP, METHODS, near
from tests.api.test_pages import lacks, lists
from tests.growth import BLOCK_MAX_S, HOLD_MAX_S, LoopWatch
from tests.service import CONTEXT_WINDOW_TOKENS, MODEL, Service, until

GET_PATHS = {"/v1/models"}  # they have no body; their paths and headers are below
# Their bodies are read and decoded as all others, and have a few short fields.
SHORT_PATHS = {"/v1/client_tokens", "/v1/client_tokens/revoke"}
TEXT_THREADS = "weir-text"
ODD = ("é", "\xff" * 2000, "=," * 6000, "%00" * 4000)
HEADERS = (
    *("authorization", "x-api-key", "idempotency-key", "traceparent", "tracestate", "x-request-id"),
    *("content-type", "content-length", "content-encoding", "transfer-encoding", "expect"),
    *("cookie", "origin", "host", "forwarded", "x-forwarded-for", "user-agent", "accept", "range"),
    *("connection", "retry-after", "weir-odd"),
)
PATHS = ("/v1/models", "/console/api/AdminService/ListApiKeys", "/metrics")
REPEATS = 3
USER, GROUP = (f"urn:ietf:params:scim:schemas:core:2.0:{each}" for each in ("User", "Group"))
PATCH = "urn:ietf:params:scim:api:messages:2.0:PatchOp"
MEMBERS = 10_000
LIST_ROW_COUNT = 10_000


class House:
    """Service whose api process runs in this event loop."""

    def __init__(self, service: Service, watch: LoopWatch, clients: ThreadPoolExecutor) -> None:
        self.service = service
        self.watch = watch
        self._clients = clients
        self.faults: list[str] = []

    async def ask(self, name: str, call: object, *arguments: object) -> object:
        """Run a client's call in a thread, and note it if it blocks the loop again and again."""
        answer: object = None
        for _ in range(REPEATS):
            self.watch.restart()
            answer = await asyncio.get_running_loop().run_in_executor(
                self._clients,
                call,  # type: ignore[arg-type]
                *arguments,
            )
            longest = self.watch.longest
            is_thread = longest.where.startswith("thread ")
            if longest.seconds <= (HOLD_MAX_S if is_thread else BLOCK_MAX_S):
                return answer
        self.faults.append(f"{name}: {longest.seconds * 1e3:.0f} ms in {longest.where}: {answer}")
        return answer


@pytest.fixture
async def house(
    tmp_path: Path, database_url: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[House]:
    monkeypatch.setattr(
        rate_limiter, "REFUSAL_WAIT_S_MAX", 0.01
    )  # all messages are from one address
    service = Service(tmp_path / "home", database_url, model)
    service.home.mkdir()
    serving = asyncio.create_task(api_main.Server(service.settings).run())

    def is_listening() -> bool:
        assert not serving.done(), serving
        return bool(read_endpoint(service.home).address)

    await until(is_listening, "the api process to listen")
    service.address = read_endpoint(service.home).address.removeprefix("https://")
    try:
        with ThreadPoolExecutor(4, "client") as clients, LoopWatch(TEXT_THREADS) as watch:
            yield House(service, watch, clients)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await serving


def post(url: str, path: str, secret: str, body: bytes, method: str = "POST") -> tuple[int, bytes]:
    """Send one body over HTTP; return the status and the beginning of the answer."""
    host = url.removeprefix("http://").partition("/")[0]
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()[:300]
    finally:
        connection.close()


def send(url: str, request: bytes) -> bytes:
    """Send raw bytes; return the first line of the answer."""
    host, _, port = url.removeprefix("http://").partition("/")[0].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        return connection.recv(4096).partition(b"\r\n")[0]


def call(address: str, path: str, secret: str, message: bytes) -> str:
    """Make a call with these bytes; return its status."""
    options = (("grpc.max_send_message_length", -1),)
    with grpc.insecure_channel(address, options) as channel:
        opened: Any = channel.stream_stream(path)
        answers = opened(
            iter([message]), metadata=(("authorization", f"Bearer {secret}"),), timeout=60
        )
        try:
            next(answers, None)
            answers.cancel()
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}"[:300]
    return "OK"


def chosen(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield some bodies at the limit; all of them are parsed in `tests/api/test_growth.py`."""
    _, bodies, size = ENTRIES[path]
    for costly in (*bodies[:4], *bodies[4 :: len(bodies) // 6], *bodies[-4:]):
        yield costly.name, near(costly, size - 200)


async def test_every_path_with_a_body_is_measured(house: House) -> None:
    """A new path needs an entry in `tests/api/test_growth.py`, or its reason here."""
    status, answer = await asyncio.to_thread(
        post, house.service.openai_url, "/v1/none", (await house.service.tenant()).secret, b"{}"
    )

    listed = answer.decode().partition("the API serves ")[2].partition('"')[0]
    served = listed.removesuffix(".").split(", ")

    assert status == 404
    assert set(served) == set(HTTP) | GET_PATHS | SHORT_PATHS


async def test_no_http_body_blocks_the_loop(house: House) -> None:
    tenant = await house.service.tenant()
    for path in HTTP:
        for name, body in chosen(path):
            _, secret = await house.service.new_key(tenant)  # the pace delays a key's next body
            answer = await house.ask(
                f"{path}, {name}", post, house.service.openai_url, path, secret, body
            )
            assert isinstance(answer, tuple)
            assert answer[0] < 500, (path, name, answer)

    assert house.faults == []


async def test_no_number_of_tokens_blocks_the_loop(house: House) -> None:
    wide = "🦄é" * (CONTEXT_WINDOW_TOKENS // 4)
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v1/tokenize": [
            {"prompt": [wide] * 128},
            {"prompt": [wide] * 128, "return_token_strs": True},
            {"prompt": ["🦄" * 400] * 128, "return_token_strs": True},
            {"content": wide, "with_pieces": True},
        ],
        "/v1/detokenize": [{"tokens": [7] * 2_000}, {"tokens": [7] * DECODED_COUNT_MAX}],
    }
    for path, each in bodies.items():
        for body in each:
            tenant = await house.service.tenant()
            data = json.dumps({"model": MODEL} | body).encode()
            name = f"{path}, {len(data)} bytes"
            answer = await house.ask(
                name, post, house.service.openai_url, path, tenant.secret, data
            )
            assert isinstance(answer, tuple)
            assert answer[0] == 200, (name, answer)

    assert house.faults == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_no_number_of_log_probabilities_blocks_the_loop(house: House, path: str) -> None:
    """A completion shows those of the prompt with each choice."""
    text = "é" * (CONTEXT_WINDOW_TOKENS // 10)
    prompt = {"messages": [{"role": "user", "content": text}], "logprobs": True}
    if path == "/v1/completions":
        prompt = {"prompt": text, "echo": True, "logprobs": 5}
    body = {"model": MODEL, "max_tokens": 3, "n": 4, "prompt_logprobs": 5} | prompt
    tenant = await house.service.tenant()

    answer = await house.ask(
        path, post, house.service.openai_url, path, tenant.secret, json.dumps(body).encode()
    )

    assert isinstance(answer, tuple)
    assert answer[0] == 200, answer
    assert house.faults == []


async def test_no_message_blocks_the_loop(house: House) -> None:
    tenant = await house.service.tenant()
    for path, method in METHODS.items():
        size = BYTES_MAX if path in LARGE_MESSAGES else MESSAGE_BYTES_MAX
        costly_messages = list(messages_of(method.input_type))
        for costly in costly_messages[:: max(len(costly_messages) // 6, 6)]:
            message = near(costly, size - 200)
            _, secret = await house.service.new_key(tenant, "inference", "admin", "billing")
            name = f"{path}, {costly.name}"
            answer = await house.ask(name, call, house.service.address, path, secret, message)
            assert not str(answer).startswith(("INTERNAL", "UNKNOWN")), (name, answer)

    assert house.faults == []


def scim_bodies(ids: list[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield costly requests for provisioning: method, path with USER or GROUP, and body."""
    members = [{"value": each, "display": "of usual length"} for each in ids]
    yield "PATCH", "Groups/GROUP", patch({"op": "add", "path": "members", "value": members})
    yield "PUT", "Groups/GROUP", {"schemas": [GROUP], "displayName": "g", "members": members}
    either = " or ".join(f'value eq "{each}"' for each in ids[:90])
    yield "PATCH", "Groups/GROUP", patch({"op": "remove", "path": f"members[{either}]"})
    yield "GET", "Groups/GROUP", {}
    yield "GET", "Groups", {}
    yield "GET", "Users?count=200", {}
    emails = [{"value": f"a{n}@example.com", "type": "work"} for n in range(20_000)]
    yield "POST", "Users", {"schemas": [USER], "userName": "a", "emails": emails}
    unknown = {f"a{n}": {"b": [n]} for n in range(60_000)}
    yield "POST", "Users", {"schemas": [USER], "userName": "a", **unknown}
    yield "POST", "Users", {"schemas": [USER], "userName": "a" * 1_900_000}
    many = [{"op": "replace", "path": "displayName", "value": "b" * 900}] * 1000
    yield "PATCH", "Users/USER", patch(*many)
    dotted = {f"urn:a:{n}": {"b": n} for n in range(60_000)}
    yield "PATCH", "Users/USER", patch({"op": "replace", "value": dotted})
    condition = "emails[" + " and ".join(['type eq "work"'] * 90) + "].value"
    for count in (50, 900):
        operations = [{"op": "add", "path": condition, "value": "c"}] * count
        yield "PATCH", "Users/USER", patch(*operations)
    search = {"schemas": ["urn:ietf:params:scim:api:messages:2.0:SearchRequest"]}
    of_names = " or ".join(["name.familyName co 'x'".replace("'", '"')] * 99)
    yield "POST", "Users/.search", search | {"filter": of_names}
    yield "POST", "Users/.search", search | {"filter": "(" * 4000}
    yield "POST", "Users/.search", search | {"attributes": ["a.b"] * 300_000}


def patch(*operations: object) -> dict[str, Any]:
    return {"schemas": [PATCH], "Operations": list(operations)}


async def test_no_provisioning_blocks_the_loop(house: House) -> None:
    tenant = await house.service.tenant()
    _, secret = await house.service.new_key(tenant, "scim")
    async with house.service.session() as session:
        made = await session.execute(
            text("""
            INSERT INTO scim_users
                (organization_id, user_name, user_name_key, attributes, is_active)
            SELECT :id, 'u' || n, 'u' || n, '{}', true FROM generate_series(1, :count) n
            RETURNING CAST(id AS text)
            """),
            {"id": tenant.organization_id, "count": MEMBERS},
        )
        ids = list(made.scalars())
        group = await session.scalar(
            text("""
            INSERT INTO scim_groups (organization_id, display_name, name_key)
            VALUES (:id, 'g', 'g') RETURNING CAST(id AS text)
            """),
            {"id": tenant.organization_id},
        )

    for method, path, body in scim_bodies(ids):
        where = f"/scim/v2/{path.replace('GROUP', str(group)).replace('USER', ids[0])}"
        content = json.dumps(body).encode() if body else b""
        name = f"{method} {path}, {len(content)} bytes"
        answer = await house.ask(
            name, post, house.service.openai_url, where, secret, content, method
        )
        assert isinstance(answer, tuple)
        assert answer[0] < 500, (name, answer)

    assert house.faults == []


async def test_no_list_of_10_000_rows_blocks_the_loop(house: House) -> None:
    """Lists are read and converted in chunks, whatever the client requests."""
    tenant = await house.service.tenant()
    _, secret = await house.service.new_key(tenant, "inference", "admin", "billing")
    url = house.service.settings.database.url
    large = await asyncio.to_thread(fill, url, "large", LIST_ROW_COUNT, 100)
    refused = []
    for method in lists():
        fields = method.input_type.fields_by_name.keys()
        request = {"organization": large.name, "month": large.values["month"]}
        for page_size in {0, PAGE_SIZE_MAX} if "page_size" in fields else {0}:
            sent: dict[str, Any] = {key: value for key, value in request.items() if key in fields}
            if page_size:
                sent["page_size"] = page_size
            message = GetMessageClass(method.input_type)(**sent).SerializeToString()
            path = f"/{method.containing_service.full_name}/{method.name}"
            name = f"{method.name}, page size {page_size}"
            answer = await house.ask(name, call, house.service.address, path, secret, message)
            if page_size or lacks(method):
                assert answer == "OK", (name, answer)
            elif answer != "OK":
                assert "page_size: is required, because" in str(answer), (name, answer)
                refused.append(method.name)

    assert house.faults == []
    assert {"ListApiKeys", "ListQuotas"} <= set(refused)


async def test_no_header_blocks_the_loop_or_ends_in_an_error_of_ours(house: House) -> None:
    tenant = await house.service.tenant()
    endpoint = read_endpoint(house.service.home)

    for url in (house.service.openai_url, endpoint.metrics_url):
        for path in PATHS:
            for header in HEADERS:
                for value in ODD:
                    request = (
                        f"GET {path} HTTP/1.1\r\nhost: weir\r\n"
                        f"authorization: Bearer {tenant.secret}\r\n{header}: {value}\r\n"
                        "connection: close\r\n\r\n"
                    )
                    name = f"{url}{path}, {header}"
                    line = await house.ask(name, send, url, request.encode("latin-1", "replace"))
                    assert b" 500 " not in bytes(line), (name, value[:20], line)  # type: ignore[call-overload]

    assert house.faults == []
    assert "Traceback" not in house.service.log
