"""First requests to the demo model: structured outputs, tool calls, and bodies of clients."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

import inference.demo_model
from demo.first_attempts import ADD, PERSON, SEARCH, WEATHER
from metering.tenants.api_keys import update_api_key
from tests.api.test_tolerance import CLIENTS
from tests.e2e.conftest import Serve
from tests.e2e.openai_clients import connect, user_message
from tests.probing import probe
from tests.service import MODEL, Service, Tenant

WEIGHTS = Path(inference.demo_model.__file__).parent / "weights"
TOOLS: list[Any] = [function.chat() for function in (WEATHER, SEARCH, ADD)]
CHOICES: tuple[Any, ...] = (
    "auto",
    "required",
    {"type": "function", "function": {"name": "get_weather"}},
)


@pytest.fixture(scope="module")
def service(serve: Serve) -> Service:
    """Return a service whose model is the demo model."""
    return serve(WEIGHTS)


async def test_the_first_structured_outputs_are_valid(service: Service, tenant: Tenant) -> None:
    formats: tuple[Any, ...] = (
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        {"type": "json_object"},
    )

    with connect(service, tenant.secret) as client:
        answers = [
            client.chat.completions.create(
                model=MODEL,
                messages=user_message("Give me a person as JSON"),
                response_format=response_format,
                max_tokens=200,
                temperature=0,
            ).choices[0]
            for response_format in formats
        ]

    assert [answer.finish_reason for answer in answers] == ["stop", "stop"]
    jsonschema.validate(json.loads(answers[0].message.content or ""), PERSON)
    assert isinstance(json.loads(answers[1].message.content or ""), dict)


@pytest.mark.parametrize("choice", CHOICES, ids=["auto", "required", "named"])
async def test_a_tool_call_is_valid_and_its_result_answered(service: Service, choice: Any) -> None:
    tenant = await service.tenant()
    question = user_message("What is the weather in Paris?")
    requested: Any = {"model": MODEL, "tools": TOOLS, "max_tokens": 200, "temperature": 0}

    with connect(service, tenant.secret) as client:
        message: Any = (
            client.chat.completions.create(messages=question, tool_choice=choice, **requested)
            .choices[0]
            .message
        )
        [call] = message.tool_calls
        result: Any = {
            "role": "tool",
            "tool_call_id": call.id,
            "content": '{"temperature": 21, "condition": "sunny"}',
        }
        answer = client.chat.completions.create(messages=[*question, message, result], **requested)

    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert answer.choices[0].finish_reason == "stop"
    assert "21" in (answer.choices[0].message.content or "")


@pytest.mark.parametrize(("body", "names"), CLIENTS.values(), ids=CLIENTS)
async def test_each_body_is_served(
    service: Service, tenant: Tenant, body: dict[str, Any], names: list[str]
) -> None:
    """Most have no maximum of their own, so the key has one."""
    async with service.session() as session:
        await update_api_key(
            session,
            api_key=tenant.key.prefix,
            terms=lambda old: replace(old, max_output_tokens=50),
            actor="test",
        )
    path = next(
        path
        for member, path in (
            ("messages", "chat/completions"),
            ("input", "responses"),
            ("prompt", "completions"),
        )
        if member in body
    )

    async with httpx2.AsyncClient(base_url=service.openai_url, timeout=60.0) as client:
        response = await client.post(
            path, json=body | {"model": MODEL}, headers={"authorization": f"Bearer {tenant.secret}"}
        )

    assert response.status_code == 200, response.text
    assert response.headers.get("weir-ignored-parameters", "") == ", ".join(names)
    [event] = service.database.events(tenant)
    assert 0 < event["billed_token_count"] <= 50


def test_load_generators_find_the_health_of_the_server_without_a_key(service: Service) -> None:
    """GuideLLM asks before it begins."""
    assert probe(service.openai_url, "/health")[0] == 200
