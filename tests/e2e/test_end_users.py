"""End users as the APIs name them, and the usage, lookups and traces in which they appear."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest
from grpc import StatusCode

from tests.calls import calls
from tests.e2e.openai_clients import connect, user_message
from tests.service import MODEL, PATIENCE_S, Service, Tenant

HEADER = "weir-end-user"
CHAT: Any = {"model": MODEL, "messages": user_message("Hi"), "max_tokens": 2}
# What is wrong with a name, by example.
WRONG = {
    "long": "é" * 257,
    "blank": " alice",
    "control": "alice\n",
    "separator": "alice\u2028",
    "key": "sk-proj-0123456789abcdefghijklmnop",
    "token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
}


async def looked_up(
    service: Service, tenant: Tenant, request_id: str
) -> tuple[str, dict[str, str]]:
    """Return end user and labels of a recorded request."""
    async with calls(service, tenant.secret) as call:
        found = (await call("GetGeneration", request_id=request_id)).generation
    return found.end_user, dict(found.labels)


def by_header(service: Service, tenant: Tenant, name: bytes) -> tuple[int, dict[str, Any]]:
    """Send a chat with these bytes as the header; return status and error, if there is one."""
    connection = HTTPConnection(urlsplit(service.openai_url).netloc, timeout=PATIENCE_S)
    headers = {
        "authorization": f"Bearer {tenant.secret}",
        "content-type": "application/json",
        HEADER: name.decode("latin-1"),
    }
    with closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT), headers)
        response = connection.getresponse()
        body = json.loads(response.read())
    return response.status, body.get("error", {})


@pytest.mark.parametrize(
    ("sent", "header", "end_user", "labels"),
    [
        ({}, None, "", {}),
        ({"user": "alice"}, None, "alice", {}),
        ({"user": ""}, None, "", {}),
        ({"safety_identifier": "bob"}, None, "bob", {}),
        ({"safety_identifier": "bob", "user": "bob"}, None, "bob", {}),
        ({"safety_identifier": "bob", "user": "alice"}, None, "bob", {"user": "alice"}),
        ({"user": "alice", "metadata": {"team": "a"}}, None, "alice", {"team": "a"}),
        ({"user": "alice"}, "carol", "carol", {}),
    ],
)
async def test_the_end_user_of_a_chat(
    service: Service,
    tenant: Tenant,
    sent: dict[str, Any],
    header: str | None,
    end_user: str,
    labels: dict[str, str],
) -> None:
    headers = {} if header is None else {HEADER: header}

    with connect(service, tenant.secret) as client:
        answer = client.chat.completions.with_raw_response.create(
            **CHAT, extra_body=sent, extra_headers=headers
        )

    request_id = answer.headers["weir-request-id"]
    assert await looked_up(service, tenant, request_id) == (end_user, labels)


async def test_the_end_user_of_each_other_api(service: Service, tenant: Tenant) -> None:
    ids = []
    with connect(service, tenant.secret) as client:
        responses, completions = client.responses, client.completions
        options: Any = {"model": MODEL, "user": "alice"}
        for raw in (
            responses.with_raw_response.create(input="Hi", max_output_tokens=16, **options),
            completions.with_raw_response.create(prompt="Hi", max_tokens=2, **options),
        ):
            ids.append(raw.headers["weir-request-id"])
        url = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=url, api_key=tenant.secret) as claude:
        message = claude.messages.with_raw_response.create(
            model=MODEL,
            max_tokens=2,
            messages=[{"role": "user", "content": "Hi"}],
            metadata={"user_id": "alice"},
        )
        ids.append(message.headers["weir-request-id"])
    async with service.stream(tenant.secret) as stream:
        ids.append(await stream.begin(end_user="alice", labels={"team": "a"}))
        await stream.finished(ids[-1])

    found = [await looked_up(service, tenant, each) for each in ids]
    assert [end_user for end_user, _ in found] == ["alice"] * 4
    assert [labels for _, labels in found] == [{}, {}, {}, {"team": "a"}]
    # One row, however often and by whichever API it is named.
    assert len({event["end_user_id"] for event in service.database.events(tenant)}) == 1


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_a_wrong_name_is_refused_by_the_name_it_was_sent_in(
    service: Service, tenant: Tenant, wrong: str
) -> None:
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(end_user=wrong)
        refusal = await stream.failed(request_id)
    assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, ["end_user"])

    with connect(service, tenant.secret) as client:
        for param in ("user", "safety_identifier"):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**CHAT, extra_body={param: wrong})
            assert refused.value.param == param
            assert wrong not in refused.value.message
    if wrong.isprintable() and wrong == wrong.strip():  # a header cannot have others
        status, error = by_header(service, tenant, wrong.encode())
        assert (status, error["param"]) == (400, HEADER)
    assert service.database.events(tenant) == []


async def test_a_header_that_is_not_utf_8_is_refused(service: Service, tenant: Tenant) -> None:
    status, error = by_header(service, tenant, b"\xff")
    assert (status, error["param"]) == (400, HEADER)


async def test_a_live_request_shows_its_end_user_and_labels(service: Service) -> None:
    tenant = await service.tenant(scopes=("inference", "admin"))
    async with (
        service.stream(tenant.secret) as stream,
        calls(service, tenant.secret) as admin,
    ):
        request_id = await stream.begin(
            end_user="alice", labels={"team": "a"}, initial_credit_tokens=1
        )
        await stream.first(request_id, "admitted")
        answer = await admin("ListLiveRequests", organization=str(tenant.organization_id))
        [live] = answer.requests
        await stream.cancel(request_id)
        await stream.end(request_id)
    assert (live.request_id, live.end_user, dict(live.labels)) == (
        request_id,
        "alice",
        {"team": "a"},
    )
