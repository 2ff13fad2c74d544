"""Keys that refuse unknown parameters over HTTP, with bodies that clients send, on every path."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from grpc import StatusCode

from tests.calls import Calls, calls
from tests.e2e.conftest import Serve
from tests.e2e.encoders import ENCODER, price_encoders
from tests.inference.encoder_checkpoints import make_random_encoder
from tests.service import MODEL, Service, Tenant

IGNORED = "weir-ignored-parameters"
AUTOGEN: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be nice"},
        {"role": "user", "name": "user", "content": "Hello"},
    ],
    "x_agent": {"id": 1},
}
CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    ],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "prompt_cache_key": "x",
    "client_metadata": {"a": "b"},
}
AGENT: dict[str, Any] = {
    "model": MODEL,
    "system": [{"type": "text", "text": "Be nice.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "Hello"}],
}
# Path, body, what a lenient key ignores, and what a strict one refuses
BODIES: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("chat/completions", AUTOGEN | {"max_tokens": 2}, "x_agent, messages[].name", "x_agent"),
    (
        "completions",
        {"model": MODEL, "prompt": "Hello", "max_tokens": 2, "priority": 3},
        "priority",
        "priority",
    ),
    (
        "responses",
        CODEX | {"max_output_tokens": 2},
        "client_metadata, prompt_cache_key, reasoning.summary, include[]",
        "client_metadata",
    ),
    (
        "responses/input_tokens",
        {"model": MODEL, "input": "Hello", "client_metadata": {"a": "b"}},
        "client_metadata",
        "client_metadata",
    ),
    (
        "embeddings",
        {"model": ENCODER, "input": ["a hotel"], "encoding_format": "float", "priority": 3},
        "priority",
        "priority",
    ),
    ("messages", AGENT | {"max_tokens": 2}, "system[].cache_control", "system[0].cache_control"),
    ("messages/count_tokens", AGENT, "system[].cache_control", "system[0].cache_control"),
)


@pytest.fixture(scope="module")
def service(serve: Serve, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Service:
    """Return a service with a generating and an embedding model."""
    encoder = make_random_encoder(tmp_path_factory.mktemp("encoder"))
    return serve(model, encoders={ENCODER: encoder})


@pytest.fixture
async def keys(service: Service, admin: Calls) -> AsyncIterator[Keys]:
    """Yield a lenient and a strict key, and an admin."""
    await price_encoders(service, ENCODER)
    lenient, strict = await service.tenant(), await service.tenant()
    async with httpx2.AsyncClient(base_url=service.openai_url, timeout=60.0) as http:
        made = Keys(service, lenient, strict, admin, http)
        await made.admin("UpdateApiKey", api_key=strict.key.prefix, strict_parameters=True)
        yield made


@dataclass(frozen=True, slots=True)
class Keys:
    """Two tenants' keys, calls of an admin, and requests over HTTP."""

    service: Service
    lenient: Tenant
    strict: Tenant
    admin: Calls
    http: httpx2.AsyncClient

    async def post(
        self, secret: str, path: str, body: dict[str, Any], query: str = ""
    ) -> httpx2.Response:
        """Send a body and return the whole response."""
        return await self.http.post(
            f"{path}{query}", json=body, headers={"authorization": f"Bearer {secret}"}
        )


@pytest.mark.parametrize(("path", "body", "ignored", "named"), BODIES, ids=[b[0] for b in BODIES])
async def test_a_strict_key_refuses_what_a_lenient_one_ignores_and_names(
    keys: Keys, path: str, body: dict[str, Any], ignored: str, named: str
) -> None:
    taken = await keys.post(keys.lenient.secret, path, body)
    by_url = await keys.post(keys.lenient.secret, path, body, "?strict=1")
    by_key = await keys.post(keys.strict.secret, path, body)
    not_relaxed = await keys.post(keys.strict.secret, path, body, "?strict=0")

    assert (taken.status_code, taken.headers[IGNORED]) == (200, ignored), taken.text
    for response in (by_url, by_key, not_relaxed):
        assert (response.status_code, IGNORED in response.headers) == (400, False)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"] == (
            f"{named}: is not a parameter of this API; leave it out, since strict=1 in the URL or"
            " the key's strict_parameters refuses unknown ones"
        )
        assert error.get("param", named) == named
    assert keys.service.database.events(keys.strict) == []


async def test_a_strict_key_takes_known_parameters_and_no_other_value_of_strict(keys: Keys) -> None:
    body = {"model": MODEL, "messages": AUTOGEN["messages"][:1], "max_tokens": 2}

    answer = await keys.post(keys.strict.secret, "chat/completions", body)
    wrong = await keys.post(keys.strict.secret, "chat/completions", body, "?strict=yes")

    assert (answer.status_code, IGNORED in answer.headers) == (200, False)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "strict")
    assert "must be 0 or 1" in wrong.json()["error"]["message"]


async def test_strictness_is_set_shown_kept_by_other_changes_and_recorded(keys: Keys) -> None:
    prefix, path = keys.strict.key.prefix, "chat/completions"
    body = AUTOGEN | {"max_tokens": 2}
    renamed = (await keys.admin("UpdateApiKey", api_key=prefix, name="renamed")).api_key
    rotated = await keys.admin("RotateApiKey", api_key=prefix)
    async with calls(keys.service, rotated.secret) as call:
        own = await call("GetQuota")
    kept = await keys.post(rotated.secret, path, body)
    relaxed = (await keys.admin("UpdateApiKey", api_key=prefix, strict_parameters=False)).api_key
    while (taken := await keys.post(rotated.secret, path, body)).status_code != 200:
        assert taken.status_code == 400
    changes = {"subject": prefix, "action_prefix": "api_key.update"}
    entries = (await keys.admin("ListAuditEntries", **changes)).entries

    assert (renamed.strict_parameters, rotated.api_key.strict_parameters) == (True, True)
    assert (own.restrictions.strict_parameters, kept.status_code) == (True, 400)
    assert not relaxed.strict_parameters
    assert taken.headers[IGNORED] == "x_agent, messages[].name"
    before, after = (json.loads(text) for text in (entries[0].before_json, entries[0].after_json))
    assert (before["strict_parameters"], after["strict_parameters"]) == (True, False)


async def test_a_key_is_created_strict_and_found_again_only_as_such(keys: Keys) -> None:
    named = {
        "organization": keys.lenient.name,
        "project": "main",
        "name": f"k{uuid.uuid4().hex}",
        "allow_existing": True,
    }

    made = await keys.admin("CreateApiKey", **named, strict_parameters=True)
    again = await keys.admin("CreateApiKey", **named, strict_parameters=True)
    other = await keys.admin.refused("CreateApiKey", **named)
    [listed] = (await keys.admin("ListApiKeys", api_key=made.api_key.prefix)).api_keys
    answer = await keys.post(made.secret, "chat/completions", AUTOGEN)

    assert (made.existed, again.existed, listed.strict_parameters) == (False, True, True)
    assert answer.status_code == 400
    assert other.code == StatusCode.ALREADY_EXISTS
    assert "with strict_parameters true: change that with UpdateApiKey" in other.status.message
