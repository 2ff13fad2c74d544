"""A first structured output and a first tool call with the demo model, by OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import inference.demo_model
from demo.first_attempts import ADD, PERSON, SEARCH, WEATHER
from tests.conftest import new_database
from tests.e2e.openai_clients import connect, says
from tests.service import MODEL, Service, running

WEIGHTS = Path(inference.demo_model.__file__).parent / "weights"
TOOLS: list[Any] = [function.chat() for function in (WEATHER, SEARCH, ADD)]
CHOICES: tuple[Any, ...] = (
    "auto",
    "required",
    {"type": "function", "function": {"name": "get_weather"}},
)


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: str, template_database: str
) -> Iterator[Service]:
    """Yield a service whose model is the demo model."""
    home = tmp_path_factory.mktemp("home")
    with (
        new_database(postgres_server, template=template_database) as url,
        running(Service(home, url, WEIGHTS)) as service,
    ):
        yield service


async def test_the_first_structured_outputs_are_valid(service: Service) -> None:
    tenant = await service.tenant()
    formats: tuple[Any, ...] = (
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        {"type": "json_object"},
    )

    with connect(service, tenant.secret) as client:
        answers = [
            client.chat.completions.create(
                model=MODEL,
                messages=says("Give me a person as JSON"),
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
async def test_the_first_tool_call_is_valid_and_its_result_is_answered(
    service: Service, choice: Any
) -> None:
    tenant = await service.tenant()
    question = says("What is the weather in Paris?")
    asked: dict[str, Any] = {
        "model": MODEL,
        "tools": TOOLS,
        "max_tokens": 200,
        "temperature": 0,
    }

    with connect(service, tenant.secret) as client:
        message: Any = (
            client.chat.completions.create(messages=question, tool_choice=choice, **asked)
            .choices[0]
            .message
        )
        [call] = message.tool_calls
        result: Any = {
            "role": "tool",
            "tool_call_id": call.id,
            "content": '{"temperature": 21, "condition": "sunny"}',
        }
        answer = client.chat.completions.create(messages=[*question, message, result], **asked)

    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert answer.choices[0].finish_reason == "stop"
    assert "21" in (answer.choices[0].message.content or "")
