"""Fields of other servers on a running service: formats hold, and neutral values are nothing."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest

from tests.api.test_dialects import BODIES, NEUTRAL_OF_ALL, OWN_NEUTRAL
from tests.service import MODEL, Service

PATHS = {
    "chat": "chat/completions",
    "completions": "completions",
    "responses": "responses",
    "messages": "messages",
}
GREEDY = {"temperature": 0, "model": MODEL}
TEXT: dict[str, Callable[[Any], str]] = {
    "chat": lambda answer: answer["choices"][0]["message"]["content"],
    "completions": lambda answer: answer["choices"][0]["text"],
    "responses": lambda answer: answer["output"][0]["content"][0]["text"],
    "messages": lambda answer: answer["content"][0]["text"],
}
PIECES: dict[str, Callable[[Any], str]] = {
    "chat": lambda event: event["choices"][0]["delta"].get("content", ""),
    "completions": lambda event: event["choices"][0]["text"],
    "responses": lambda event: event["delta"] if event["type"].endswith("text.delta") else "",
    "messages": lambda event: event.get("delta", {}).get("text", ""),
}
LIMITS = {"responses": "max_output_tokens"}
FORMATS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"guided_choice": ["yes.", "no(1)"]}, r"yes\.|no\(1\)"),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"grammar": 'root ::= pair pair\npair ::= [0-9] ("-" | "+")'}, r"([0-9][-+]){2}"),
    ({"ebnf": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
    ({"guided_json": {"const": "42"}}, '"42"'),
    ({"json_schema": json.dumps({"const": "42"})}, '"42"'),
    ({"grammar": {"type": "regex", "value": "x{4}"}}, "x{4}"),
)


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx2.AsyncClient]:
    tenant = await service.tenant()
    async with httpx2.AsyncClient(
        base_url=service.openai_url,
        timeout=60.0,
        headers={"authorization": f"Bearer {tenant.secret}"},
    ) as client:
        yield client


async def ask(http: httpx2.AsyncClient, api: str, **fields: Any) -> str:
    """Return the text of the answer to a body with these fields."""
    body = BODIES[api] | GREEDY | {LIMITS.get(api, "max_tokens"): 12} | fields
    if not body.get("stream"):
        answer = await http.post(PATHS[api], json=body)
        assert answer.status_code == 200, answer.text
        text: str = TEXT[api](answer.json())
        return text
    async with http.stream("POST", PATHS[api], json=body) as stream:
        lines = [line async for line in stream.aiter_lines()]
        assert stream.status_code == 200, lines
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(PIECES[api](event) for event in events if event.get("choices") != [])


@pytest.mark.parametrize(("fields", "pattern"), FORMATS)
@pytest.mark.parametrize("api", PATHS)
async def test_formats_of_other_servers_are_enforced(
    http: httpx2.AsyncClient, api: str, fields: dict[str, Any], pattern: str
) -> None:
    assert re.fullmatch(pattern, await ask(http, api, **fields))


@pytest.mark.parametrize("schema", [{"const": "42"}, {"enum": ["a", "b"]}])
async def test_a_json_schema_is_enforced(http: httpx2.AsyncClient, schema: dict[str, Any]) -> None:
    for stream in (False, True):
        requested = {"type": "json_object", "schema": schema}
        text = await ask(http, "chat", response_format=requested, stream=stream)
        assert json.loads(text) in ("42", "a", "b")


@pytest.mark.parametrize("api", PATHS)
async def test_neutral_values_give_the_same_answer(http: httpx2.AsyncClient, api: str) -> None:
    neutral = NEUTRAL_OF_ALL | OWN_NEUTRAL[api]
    plain = await ask(http, api)

    assert plain
    assert await ask(http, api, **neutral) == plain
    assert await ask(http, api, **neutral, stream=True) == plain
    if api != "responses":
        assert await ask(http, api, temperature=1.5, top_p=0) == plain
    assert await ask(http, api, temperature=None, do_sample=False) == plain


async def test_a_refusal_names_the_field_that_was_sent(http: httpx2.AsyncClient) -> None:
    for api, fields, param in (
        ("chat", {"guided_regex": "("}, "guided_regex"),
        ("completions", {"guided_json": {"not": {}}}, "guided_json"),
        ("chat", {"response_format": {"type": "json_object", "schema": {"not": {}}}},
         "response_format.schema"),
        ("responses", {"ebnf": "start: %%"}, "ebnf"),
        ("chat", {"k": -5}, "k"),
        ("chat", {"random_seed": 1.5}, "random_seed"),
        ("embeddings", {"use_activation": False}, "use_activation"),
    ):  # fmt: skip
        path = PATHS.get(api, api)
        answer = await http.post(path, json=BODIES[api] | {"model": MODEL} | fields)

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
