"""Fallback from model to model: when, for whom, and by which name it is answered and billed.

The server runs in this process, so that tests can take its engines away. `tiny` falls back to
`other`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from api.core.settings import bundled_models
from inference.routing.replica_set import ReplicaSet
from metering.core.models import QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.pricing.prices import PriceTerms, set_price
from metering.quotas.quota_admin import set_quota
from tests.conftest import new_database
from tests.e2e.openai_clients import user_message
from tests.service import (
    MODEL,
    PLAIN_IDS,
    Inside,
    Service,
    Stream,
    Tenant,
    picos,
    run_inside,
    start,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUEUE_MAX = 40
OTHER = "other"
FACTOR = 3  # of the prices of `other`
FLEET = f"""
models:
  {MODEL}: {{directory: DIRECTORY, fallback: [{OTHER}]}}
  {OTHER}: {{directory: DIRECTORY}}
aliases: {{chat: {MODEL}}}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def inside(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    postgres_server: str,
    template_database: str,
) -> AsyncIterator[Inside]:
    home = tmp_path_factory.mktemp("fallback")
    file = home / "fleet.yaml"
    file.write_text(FLEET.replace("DIRECTORY", str(model)))
    with (
        new_database(postgres_server, template=template_database) as url,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        service = Service(
            home,
            url,
            model,
            models=bundled_models(),
            fleet=str(file),
            queue_requests_max=QUEUE_MAX,
        )
        async with run_inside(service, monkeypatch) as inside:
            await service.tenant()
            async with service.session() as session:
                await set_price(
                    session,
                    PriceTerms(
                        model=OTHER,
                        currency_code="USD",
                        input_picos_per_token=FACTOR,
                        cached_input_picos_per_token=FACTOR,
                        output_picos_per_token=FACTOR,
                    ),
                    actor="test",
                )
            await engine(inside, OTHER).start()
            yield inside


@pytest_asyncio.fixture(loop_scope="module")
async def service(inside: Inside) -> AsyncIterator[Service]:
    yield inside.service
    await inside.check_empty()


@pytest_asyncio.fixture(loop_scope="module")
async def tenant(service: Service) -> Tenant:
    return await service.tenant(
        {QuotaDimension.TOKENS_PER_MONTH: 10**9, QuotaDimension.CONCURRENT_REQUESTS: 10_000}
    )


def engine(inside: Inside, model: str) -> ReplicaSet:
    found = inside.process.router.find(model)
    assert isinstance(found, ReplicaSet)
    return found


@contextlib.contextmanager
def drained(inside: Inside, *models: str) -> Iterator[None]:
    """Drain all replicas of these models, whatever the orders in the database say."""
    router = inside.process.router
    found = {model: [each.name for each in engine(inside, model).reports()] for model in models}
    router.drain(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "drain", lambda _: None)
        yield
    router.drain({})


@contextlib.asynccontextmanager
async def crowded(inside: Inside, tenant: Tenant, count: int = QUEUE_MAX) -> AsyncIterator[None]:
    """Queue `count` requests, or as many as the queue takes, before an engine without room."""
    queue = inside.process.queues[MODEL]
    async with inside.service.stream(tenant.secret) as stream:
        sent: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(queue.window, "has_room", lambda _: False)
            for _ in range(count):
                frame = start(text="Hi", no_fallback=True)
                await stream.send(frame)
                await until(partial(answered, stream, frame.request_id), "an answer")
                if stream.ends(frame.request_id):
                    assert (await stream.failed(frame.request_id)).reason == "QUEUE_FULL"
                    break
                sent.append(frame.request_id)
            assert (len(sent) < count) == (count == QUEUE_MAX)
            yield
        await stream.cancel(*sent)
        for request_id in sent:
            await stream.end(request_id)


@contextlib.contextmanager
def slow(inside: Inside) -> Iterator[None]:
    """Let the queue of the model expect waits of minutes, as after long answers."""
    rate = inside.process.queues[MODEL].interactive.rate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rate, "served", lambda *_: None)
        patch.setattr(rate, "per_s", 10.0)
        yield


def answered(stream: Stream, request_id: str) -> bool:
    return bool(stream.of(request_id, "admitted") or stream.ends(request_id))


@contextlib.asynccontextmanager
async def unable(cause: str, inside: Inside, tenant: Tenant) -> AsyncIterator[dict[str, Any]]:
    """Let the model refuse requests for a cause; yield the fields of a request that it refuses."""
    if cause == "NO_REPLICA":
        with drained(inside, MODEL):
            yield {}
        return
    if cause == "QUEUE_FULL":
        async with crowded(inside, tenant):
            yield {}
        return
    async with crowded(inside, tenant, 2):
        with slow(inside):
            yield {"start_timeout": Duration(seconds=5)}


CAUSES = ["NO_REPLICA", "QUEUE_FULL", "STARTS_TOO_LATE"]


@pytest.mark.parametrize("name", [MODEL, "chat"])
@pytest.mark.parametrize("cause", CAUSES)
async def test_a_request_is_served_and_billed_as_the_fallback(
    inside: Inside, service: Service, tenant: Tenant, cause: str, name: str
) -> None:
    async with (
        unable(cause, inside, tenant) as fields,
        service.stream(tenant.secret) as stream,
    ):
        request_id = await stream.begin(model=name, text="Hi", **fields)
        finished = await stream.finished(request_id)

    [admitted] = stream.of(request_id, "admitted")
    assert (admitted.model, admitted.requested_model) == (OTHER, MODEL)
    assert (finished.model, finished.requested_model) == (OTHER, MODEL)
    event = service.database.event(tenant, request_id)
    tokens = finished.usage.input_token_count + finished.usage.billed_token_count
    assert event["model"] == OTHER
    assert event["cost_picos"] == picos(finished.cost) == FACTOR * tokens
    assert {receipt.model for receipt in finished.receipts} <= {OTHER}
    assert service.database.counters(tenant)["tokens_per_month"][0] >= tokens


async def test_a_request_that_its_model_takes_stays_there(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(text="Hi")
        finished = await stream.finished(request_id)

    assert (finished.model, finished.requested_model) == (MODEL, "")


BOUND: dict[str, dict[str, Any]] = {
    "forbidden": {"text": "Hi", "no_fallback": True},
    "token ids": {"prompt": PLAIN_IDS[:4]},
    "stop token": {"text": "Hi", "stop_token_ids": [5]},
    "bias": {"text": "Hi", "sampling": {"logit_bias": {5: 1.0}}},
}


@pytest.mark.parametrize("why", BOUND)
async def test_a_bound_request_gets_the_refusal_of_its_model(
    inside: Inside, service: Service, tenant: Tenant, why: str
) -> None:
    async with service.stream(tenant.secret) as stream:
        with drained(inside, MODEL):
            lost = await stream.failed(await stream.begin(**BOUND[why]))
        async with crowded(inside, tenant):
            full = await stream.failed(await stream.begin(**BOUND[why]))

    assert lost.code == grpc.StatusCode.UNAVAILABLE
    assert full.reason == "QUEUE_FULL"
    assert {event["model"] for event in service.database.events(tenant)} <= {MODEL}


@pytest.mark.parametrize("cause", CAUSES)
async def test_a_key_gets_only_the_models_that_it_may_use(
    inside: Inside, service: Service, tenant: Tenant, cause: str
) -> None:
    _, bound = await service.new_key(tenant, models=[MODEL])
    _, free = await service.new_key(tenant, models=[MODEL, OTHER])
    async with (
        unable(cause, inside, tenant) as fields,
        service.stream(bound) as bound_stream,
        service.stream(free) as free_stream,
    ):
        refusal = await bound_stream.failed(await bound_stream.begin(text="Hi", **fields))
        finished = await free_stream.finished(await free_stream.begin(text="Hi", **fields))

    expected = {"NO_REPLICA": "ENGINE_UNAVAILABLE"}.get(cause, cause)
    assert refusal.reason == expected
    assert finished.model == OTHER


async def test_a_model_without_a_usable_fallback_answers_itself(
    inside: Inside, service: Service, tenant: Tenant
) -> None:
    async with service.stream(tenant.secret) as stream:
        with drained(inside, MODEL, OTHER):
            lost = await stream.failed(await stream.begin(text="Hi"))
        with drained(inside, OTHER):
            other = await stream.failed(await stream.begin(text="Hi", model=OTHER))

    assert lost.code == other.code == grpc.StatusCode.UNAVAILABLE
    assert service.database.events(tenant) == []


async def test_a_quota_of_the_fallback_leaves_the_refusal_of_the_model(
    inside: Inside, service: Service, tenant: Tenant
) -> None:
    await limit(service, tenant, OTHER)
    async with service.stream(tenant.secret) as stream, crowded(inside, tenant):
        first = await stream.finished(await stream.begin(text="Hi"))
        refusal = await stream.failed(await stream.begin(text="Hi"))

    assert first.model == OTHER
    assert refusal.reason == "QUEUE_FULL"


async def test_a_quota_of_the_model_is_no_cause(
    inside: Inside, service: Service, tenant: Tenant
) -> None:
    await limit(service, tenant, MODEL)
    async with service.stream(tenant.secret) as stream:
        await stream.finished(await stream.begin(text="Hi"))
        refusal = await stream.failed(await stream.begin(text="Hi"))

    assert refusal.reason == "QUOTA_EXCEEDED"


async def limit(service: Service, tenant: Tenant, model: str) -> None:
    """Allow one request in a minute of this model."""
    async with service.session() as session:
        await set_quota(
            session,
            subject=QuotaSubject.ORGANIZATION,
            subject_ref=tenant.name,
            key=QuotaKey(QuotaDimension.REQUESTS_PER_MINUTE, model),
            terms=QuotaTerms(1),
            actor="test",
        )


@pytest.mark.parametrize("streams", [False, True])
async def test_openai_answers_name_the_model_that_answered(
    inside: Inside, service: Service, tenant: Tenant, streams: bool
) -> None:
    body = {
        "model": MODEL,
        "messages": user_message("Hi"),
        "max_tokens": 3,
        "stream": streams,
    }
    headers = {"authorization": f"Bearer {tenant.secret}"}
    url = f"{service.openai_url}/chat/completions"
    async with httpx2.AsyncClient(headers=headers, timeout=30) as client:
        with drained(inside, MODEL):
            answer = await client.post(url, json=body)
            forbidden = await client.post(url, json=body, headers={"weir-no-fallback": "1"})
            wrong = await client.post(url, json=body, headers={"weir-no-fallback": "x"})

    assert answer.status_code == 200, answer.text
    assert f'"model":"{OTHER}"' in answer.text.replace(": ", ":")
    assert f'"model":"{MODEL}"' not in answer.text.replace(": ", ":")
    assert f'"requested_model":"{MODEL}"' in answer.text.replace(": ", ":")
    assert answer.headers["weir-model"] == OTHER
    assert answer.headers["weir-requested-model"] == MODEL
    assert forbidden.status_code == 503
    assert wrong.status_code == 400
    assert "weir-no-fallback" in wrong.text
    assert {event["model"] for event in service.database.events(tenant)} == {OTHER}


async def test_a_completion_of_several_prompts_stays_with_its_model(
    inside: Inside, service: Service, tenant: Tenant
) -> None:
    body = {"model": MODEL, "prompt": ["Hi", "Ho"], "max_tokens": 3}
    headers = {"authorization": f"Bearer {tenant.secret}"}
    async with httpx2.AsyncClient(headers=headers, timeout=30) as client:
        with drained(inside, MODEL):
            answer = await client.post(f"{service.openai_url}/completions", json=body)

    assert answer.status_code == 503


async def test_clients_show_the_model_that_answered(
    inside: Inside, service: Service, tenant: Tenant
) -> None:
    async with service.client(tenant.secret) as client:
        with drained(inside, MODEL):
            result = await client.generate(MODEL, "Hi", max_output_tokens=3).wait()

    assert (result.model, result.requested_model) == (OTHER, MODEL)
    assert result.admitted is not None
    assert (result.admitted.model, result.admitted.requested_model) == (OTHER, MODEL)
