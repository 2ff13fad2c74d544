"""Bodies of every shape for the OpenAI HTTP API: answered, or refused in OpenAI's form.

Bodies are generated from the types of the parameters, so that a new parameter is included at
once. `WEIR_TEST_WIRE_EXAMPLES` sets the number of attacks.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import inspect

from api.openai.embeddings import EmbeddingParameters
from api.openai.parameters import ChatParameters, CompletionParameters, ResponseParameters
from metering.core.models import QuotaDimension
from tests.service import MODEL, PATIENCE_S, Service, Tenant, log_events

RETRIES_MAX = 60  # of a body that a slow machine does not take at once
EXAMPLES = int(os.environ.get("WEIR_TEST_WIRE_EXAMPLES", "60"))
APIS: dict[str, type[msgspec.Struct]] = {
    "/chat/completions": ChatParameters,
    "/completions": CompletionParameters,
    "/responses": ResponseParameters,
    "/embeddings": EmbeddingParameters,
}
PLAIN: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 2,
    },
    "/completions": {"model": MODEL, "prompt": "Hi", "max_tokens": 2},
    "/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 2},
    "/embeddings": {"model": MODEL, "input": "Hi"},
}
WORDS = [
    *(
        MODEL,
        "user",
        "assistant",
        "system",
        "tool",
        "text",
        "input_text",
        "output_text",
        "message",
        "auto",
        "none",
        "default",
        "flex",
    ),
    *(
        "json_object",
        "json_schema",
        "float",
        "base64",
        "message.output_text.logprobs",
        "concise",
        "disabled",
        "in-memory",
    ),
]
NUMBERS = [
    -(2**63),
    -(2**31),
    -1,
    0,
    1,
    2,
    5,
    21,
    399,
    400,
    2**31 - 1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    10**30,
]

SHAPES: list[Any] = [True, -1, 2**63, 0.5, "x", [], ["x"], {"x": 1}]
AT_ONCE = 50  # requests
Attack = tuple[str, bytes, dict[str, str]]  # path, body, headers

texts = st.sampled_from(WORDS) | st.text(max_size=6)
whole_numbers = st.sampled_from(NUMBERS) | st.integers(0, 3)
fractions = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, 0.5, 1.0, 2.0, -2.0, 1e300, 5e-324]
)
any_json = st.recursive(
    st.none() | st.booleans() | whole_numbers | fractions | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(texts | whole_numbers.map(str), inner, max_size=3)
    ),
    max_leaves=6,
)


def values(kind: inspect.Type) -> SearchStrategy[Any]:
    """Draw values of a type, and slightly beyond its bounds."""
    match kind:
        case inspect.StructType(fields=fields):
            required = {each.encode_name: values(each.type) for each in fields if each.required}
            optional = {each.encode_name: values(each.type) for each in fields if not each.required}
            return st.fixed_dictionaries(required, optional=optional)
        case inspect.UnionType(types=kinds):
            return st.one_of([values(each) for each in kinds])
        case inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=3)
        case inspect.DictType(key_type=keys, value_type=held):
            return st.dictionaries(values(keys).map(str), values(held), max_size=3)
        case inspect.LiteralType(values=words):
            return st.sampled_from(words)
        case inspect.StrType():
            return texts
        case inspect.IntType():
            return whole_numbers
        case inspect.FloatType():
            return fractions
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
    return any_json


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """Draw a request with up to three wrong, surplus or missing parameters, sometimes damaged."""
    kinds = fields_of(path)
    body = dict(PLAIN[path])
    for name in draw(st.lists(st.sampled_from(sorted(kinds)), max_size=3)):
        body[name] = draw(values(kinds[name]) | any_json)
    match draw(st.integers(0, 19)):
        case 0:
            body[draw(texts)] = draw(any_json)
        case 1:
            del body[draw(st.sampled_from(sorted(body)))]
    content = json.dumps(body).encode(errors="surrogatepass")
    if draw(st.integers(0, 19)) == 0:
        index = draw(st.integers(0, len(content)))
        content = (
            content[:index]
            + draw(st.binary(max_size=4))
            + content[index + draw(st.integers(0, 4)) :]
        )
    return content


header_values = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=300)
headers = st.dictionaries(
    st.sampled_from(["Idempotency-Key", "X-Request-Id", "Content-Type", "Accept", "OpenAI-Beta"]),
    header_values,
    max_size=2,
)
attacks = st.sampled_from(sorted(APIS)).flatmap(
    lambda path: st.tuples(st.just(path), bodies(path), headers | st.just({}))
)


def fields_of(path: str) -> dict[str, inspect.Type]:
    """Return the parameters of an API by name."""
    form = inspect.type_info(APIS[path])
    assert isinstance(form, inspect.StructType)
    return {field.encode_name: field.type for field in form.fields}


@pytest.fixture
def attack(service: Service) -> Iterator[Callable[[Sequence[Attack]], None]]:
    """Send attacks at once; check that some succeed, some fail, none remains or is an incident."""
    incidents = incident_count(service)
    seen: Counter[int] = Counter()
    with asyncio.Runner() as runner:
        tenant = runner.run(service.tenant({QuotaDimension.CONCURRENT_REQUESTS: 500}))
        yield lambda some: runner.run(send_all(service, tenant, some, seen))
        runner.run(service.no_hold_left(tenant))
    assert incident_count(service) == incidents
    assert {200, 400} <= seen.keys()


@pytest.mark.parametrize("path", APIS)
def test_any_parameter_is_answered(attack: Callable[[Sequence[Attack]], None], path: str) -> None:
    shaped = [PLAIN[path] | {name: shape} for name in fields_of(path) for shape in SHAPES]

    attack([("/completions", json.dumps(PLAIN["/completions"]).encode(), {})])
    for first in range(0, len(shaped), AT_ONCE):
        attack([(path, json.dumps(body).encode(), {}) for body in shaped[first : first + AT_ONCE]])


def test_bodies_are_answered_or_refused(attack: Callable[[Sequence[Attack]], None]) -> None:
    # Not minimized: a body is small, and each attempt would be another request.
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
    )
    @given(some=st.lists(attacks, min_size=1, max_size=6))
    def search(some: list[Attack]) -> None:
        attack(some)

    search()


def incident_count(service: Service) -> int:
    """Return the number of errors of the service itself."""
    return len(log_events(service.log, "incident")) + len(
        log_events(service.log, "http_handler_failed")
    )


async def send_all(
    service: Service, tenant: Tenant, some: Sequence[Attack], seen: Counter[int]
) -> None:
    """Send all bodies at once."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for path, body, more in some:
            tasks.create_task(
                send(session, service.openai_url + path, tenant.secret, body, more, seen)
            )


async def send(
    session: aiohttp.ClientSession,
    url: str,
    secret: str,
    body: bytes,
    more: dict[str, str],
    seen: Counter[int],
) -> None:
    """Send one body, again if a slow machine finds them too many; check the answer."""
    headers = {"authorization": f"Bearer {secret}"} | more
    for _ in range(RETRIES_MAX):
        async with session.post(url, data=body, headers=headers) as response:
            content = await response.read()
        if response.status not in (429, 503):
            break
        await asyncio.sleep(float(response.headers["Retry-After"]))
    seen[response.status] += 1
    assert response.status in (200, 400, 404, 409), (response.status, content, url, body)
    if response.status != 200:
        check_error(json.loads(content))
    elif response.content_type == "text/event-stream":
        check_events(content)
    else:
        assert json.loads(content)["usage"] is not None


def check_events(content: bytes) -> None:
    """Check that a stream ends with its end event, or with an error in OpenAI's form."""
    lines = [
        line.removeprefix(b"data: ") for line in content.split(b"\n") if line.startswith(b"data: ")
    ]
    reported = [json.loads(line) for line in lines if line != b"[DONE]"]
    assert reported
    if "error" in reported[-1] and reported[-1]["error"] is not None:
        check_error(reported[-1])
    else:
        assert lines[-1] == b"[DONE]" or reported[-1]["type"] in (
            "response.completed",
            "response.incomplete",
            "response.failed",
        )


def check_error(reported: dict[str, Any]) -> None:
    """Check that an error has all fields that clients read."""
    error = reported["error"]
    assert error["message"]
    assert isinstance(error["type"], str)
    assert isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
