"""Charges by cause of the end: frames, holds, counters, usage events and ledger agree."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncIterator, Awaitable

import openai
import psycopg
import pytest
import pytest_asyncio
from grpc import StatusCode
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import CancelledByAdmin, FieldViolation, InvalidRequest
from api.generation.request.live_request import LiveRequest
from inference.errors import EngineFailed
from metering.core.models import Outcome, QuotaDimension
from metering.ledger.ledger import current_month
from metering.ledger.rating import rate_all_pending
from metering.plans.prepaid import credit_balance, grant_credit, refresh, set_prepaid
from metering.store.db import psycopg_conninfo
from tests.e2e.inside import inside_fixtures
from tests.e2e.openai_clients import TO_THE_END, connect_async
from tests.metering.invariants import check_invariants
from tests.service import MODEL, Inside, Service, Stream, Tenant, cost_picos, picos, start, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLICE = 24
PICOS_OF_CREDIT = 10**12
LIMITS = {
    QuotaDimension.TOKENS_PER_MONTH: 10**9,
    QuotaDimension.REQUESTS_PER_MINUTE: 1000,
    QuotaDimension.COST_PICOS_PER_MONTH: 10**15,
}
LOOPING = pb.ResponseFormat(lark="start: start")
FAULTING_LATER = pb.ResponseFormat(lark='start: "a" b\nb: b')


inside, _, _ = inside_fixtures(
    lease_slice_tokens=SLICE, lease_margin_tokens=4, client_stall_max_s=60.0
)


@pytest_asyncio.fixture(loop_scope="module")
async def service(inside: Inside) -> AsyncIterator[Service]:
    """Yield the service; each test leaves it empty, and `weir fsck` finds nothing."""
    yield inside.service
    await inside.check_empty()
    await asyncio.to_thread(check_invariants, inside.service.database_url, all_ended=True)


def own_prompt() -> list[int]:
    """Return a unique prompt of 200 tokens."""
    seed = uuid.uuid4().int
    return [22 + (seed >> index) % 60 for index in range(200)]


def counted(service: Service, tenant: Tenant) -> tuple[int, int, int]:
    """Return the used quotas on requests, tokens and money; fail if any amount is held."""
    counters = service.database.counters(tenant)
    assert all(held == 0 for _, held in counters.values())
    names = ("requests_per_minute", "tokens_per_month", "cost_picos_per_month")
    requests, tokens, cost = (counters.get(name, (0, 0))[0] for name in names)
    return requests, tokens, cost


async def failure(requested: Awaitable[object]) -> openai.APIStatusError:
    """Return the error of a call, which must fail."""
    with pytest.raises(openai.APIStatusError) as caught:
        await requested
    return caught.value


async def running_until(inside: Inside, tenant: Tenant, token_count: int) -> list[LiveRequest]:
    """Return the tenant's requests, once each has generated this many tokens."""

    def found() -> list[LiveRequest]:
        running = [
            each
            for each in inside.process.running()
            if each.caller.payer.organization_id == tenant.organization_id
        ]
        return [
            each
            for each in running
            if isinstance(each, LiveRequest) and each.usage.generated_token_count >= token_count
        ]

    await until(found, "tokens")
    return found()


async def test_invalid_credit_bills_the_input(inside: Inside, service: Service) -> None:
    """Repeated requests are refused in the end, by the token quota and by the request quota."""
    tenant = await service.tenant(LIMITS)
    prompts = [own_prompt() for _ in range(3)]
    async with service.stream(tenant.secret) as stream:
        for prompt in prompts:
            limits = {"initial_credit_tokens": 0, "max_output_tokens": 100}
            request_id = await stream.begin(prompt=prompt, **limits)
            await running_until(inside, tenant, 5)
            await stream.credit(request_id, -1)
            end = (await stream.end(request_id)).failed
            refusal = await stream.failed(request_id)
            assert (refusal.code, refusal.reason, refusal.fields) == (
                StatusCode.INVALID_ARGUMENT,
                "FIELD_INVALID",
                ["credit.token_count"],
            )
            assert (end.usage.input_token_count, end.usage.delivered_token_count) == (200, 0)
            assert picos(end.cost) == cost_picos(end.usage) > 0
        again = await stream.finished(await stream.begin(prompt=prompts[0], max_output_tokens=1))

    events = service.database.events(tenant)
    assert [
        (event["outcome"], event["input_token_count"], event["billed_token_count"])
        for event in events
    ] == [("cancelled", 200, 0), ("cancelled", 200, 0), ("cancelled", 200, 0), ("length", 200, 1)]
    assert again.usage.cached_input_token_count > 0, "computed once, and paid in full then"
    assert counted(service, tenant) == (4, 801, sum(event["cost_picos"] for event in events))
    assert service.database.holds(tenant) == {"settled": 4}


def answered(stream: Stream, request_id: str) -> bool:
    """Return whether a request was admitted or refused."""
    return bool(stream.of(request_id, "admitted") or stream.ends(request_id))


async def test_requests_with_invalid_credit_count(inside: Inside, service: Service) -> None:
    tenant = await service.tenant(
        {QuotaDimension.TOKENS_PER_MONTH: 500, QuotaDimension.REQUESTS_PER_MINUTE: 1000}
    )
    reasons = []
    async with service.stream(tenant.secret) as stream:
        for _ in range(4):
            request_id = await stream.begin(
                prompt=own_prompt(), initial_credit_tokens=0, max_output_tokens=20
            )
            await stream.wait(functools.partial(answered, stream, request_id))
            if not stream.ends(request_id):
                await running_until(inside, tenant, 5)
                await stream.credit(request_id, -1)
            reasons.append((await stream.failed(request_id)).reason)

    assert reasons == ["FIELD_INVALID", "FIELD_INVALID", "QUOTA_EXCEEDED", "QUOTA_EXCEEDED"]


async def test_an_empty_grammar_is_refused_first(inside: Inside, service: Service) -> None:
    tenant = await service.tenant(LIMITS)
    before = inside.engine.statistics().prompt_token_count
    async with service.stream(tenant.secret) as stream:
        fields = {"response_format": LOOPING, "ignore_eos": None, "prompt": own_prompt()}
        refusal = await stream.failed(await stream.begin(**fields))

    assert (refusal.code, refusal.reason) == (StatusCode.INVALID_ARGUMENT, "REQUEST_IMPOSSIBLE")
    assert refusal.fields == ["response_format.lark"]
    assert "allows no first token" in refusal.status.message
    assert inside.engine.statistics().prompt_token_count == before
    assert counted(service, tenant) == (1, 0, 0)


async def test_a_fault_in_a_grammar_is_billed_like_a_cancellation(service: Service) -> None:
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(
            response_format=FAULTING_LATER, ignore_eos=None, prompt=own_prompt()
        )
        refusal = await stream.failed(request_id)
        end = (await stream.end(request_id)).failed

    assert (refusal.code, refusal.reason) == (StatusCode.INVALID_ARGUMENT, "REQUEST_IMPOSSIBLE")
    [event] = service.database.events(tenant)
    assert (event["outcome"], event["input_token_count"]) == ("cancelled", 200)
    assert event["billed_token_count"] == end.usage.delivered_token_count <= 1
    assert counted(service, tenant) == (1, 200 + event["billed_token_count"], event["cost_picos"])


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_prompts_ended_by_the_fault_of_another_are_billed(
    inside: Inside, service: Service, streams: bool
) -> None:
    tenant = await service.tenant(LIMITS)
    wrong = InvalidRequest([FieldViolation("credit.token_count", "must be at least 1, got -1")])

    async def ask(client: openai.AsyncOpenAI) -> openai.APIError:
        prompt = ["one two three", "four five six", "seven eight nine"]
        try:
            requested = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=2000, stream=streams, extra_body=TO_THE_END
            )
            if isinstance(requested, openai.AsyncStream):
                async for _ in requested:
                    pass
        except openai.APIError as error:
            return error
        pytest.fail("it was answered")

    async with connect_async(service, tenant.secret) as client, asyncio.TaskGroup() as tasks:
        call = tasks.create_task(ask(client))
        await until(
            lambda: (
                sum(each.usage.generated_token_count > 5 for each in inside.process.running()) == 3
            ),
            "tokens of all",
        )
        inside.process.running()[1].stop(Outcome.CANCELLED, wrong)
        error = await call

    assert error.code == "invalid_value"
    await until(lambda: service.database.holds(tenant) == {"settled": 3}, "all to be settled")
    events = service.database.events(tenant)
    assert {event["outcome"] for event in events} == {"cancelled"}
    assert all(event["input_token_count"] > 0 for event in events)
    assert all(event["billed_token_count"] == 0 for event in events if not streams)
    tokens = sum(event["input_token_count"] + event["billed_token_count"] for event in events)
    assert counted(service, tenant) == (3, tokens, sum(event["cost_picos"] for event in events))


async def test_an_administrators_end_is_billed(inside: Inside, service: Service) -> None:
    """In one piece, so that nothing has been delivered."""
    tenant = await service.tenant(LIMITS)
    async with connect_async(service, tenant.secret) as client, asyncio.TaskGroup() as tasks:
        requested = client.completions.create(
            model=MODEL, prompt="Go on", max_tokens=2000, extra_body=TO_THE_END
        )
        call = tasks.create_task(failure(requested))
        [request] = await running_until(inside, tenant, 5)
        request.stop(Outcome.CANCELLED, CancelledByAdmin("an administrator has ended this request"))
        error = await call

    assert error.code == "cancelled_by_admin"
    await until(lambda: service.database.events(tenant), "the settlement")
    [event] = service.database.events(tenant)
    assert (event["outcome"], event["billed_token_count"]) == ("cancelled", 0)
    assert counted(service, tenant) == (1, event["input_token_count"], event["cost_picos"])


async def test_a_free_request_costs_no_prepaid_credit(inside: Inside, service: Service) -> None:
    """The engine fails repeatedly after an extension of the lease and before any delivery."""
    tenant = await service.tenant(LIMITS)
    async with service.session() as session:
        await set_prepaid(session, organization=tenant.name, prepaid=True, actor="test")
        await grant_credit(
            session,
            organization=tenant.name,
            amount_picos=PICOS_OF_CREDIT,
            first_month=None,
            last_month=await current_month(session),
            reason="paid",
            actor="test",
        )
        await refresh(session, tenant.organization_id, actor="test", granted_picos=PICOS_OF_CREDIT)
    messages = []
    for _ in range(4):
        async with connect_async(service, tenant.secret) as client, asyncio.TaskGroup() as tasks:
            requested = client.completions.create(
                model=MODEL, prompt="Go on", max_tokens=2000, extra_body=TO_THE_END
            )
            call = tasks.create_task(failure(requested))
            [request] = await running_until(inside, tenant, 3 * SLICE)
            request.stop(Outcome.FAILED, EngineFailed("it broke"))
            error = await call
        assert isinstance(error, openai.InternalServerError)
        messages.append(error.message)
    await until(lambda: service.database.holds(tenant) == {"voided": 4}, "all to be voided")

    assert all("Nothing is billed" in message for message in messages)
    assert service.database.events(tenant) == []
    assert counted(service, tenant) == (0, 0, 0)
    assert service.database.counters(tenant)["prepaid_credit_picos"] == (0, 0)
    await rate_all_pending(service.sessions)
    async with service.session() as session:
        balance = await credit_balance(session, organization=tenant.name)
        assert balance.available_picos == PICOS_OF_CREDIT
    with psycopg.connect(psycopg_conninfo(service.database_url)) as connection:
        query = (
            "SELECT count(*) FROM ledger_transactions WHERE organization_id = %s AND kind = 'usage'"
        )
        assert connection.execute(query, (tenant.organization_id,)).fetchone() == (0,)


async def test_a_cancel_in_the_queue_is_free(inside: Inside, service: Service) -> None:
    """It counts in the quota on requests, and its id cannot be reused."""
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        crowd = [start(max_output_tokens=2400) for _ in range(64)]
        await stream.send(*crowd)
        for frame in crowd:
            await stream.received(frame.request_id, 1)
        waiting = start(prompt=own_prompt())
        await stream.send(waiting)
        await stream.first(waiting.request_id, "progress")
        await stream.cancel(waiting.request_id)
        finished = await stream.finished(waiting.request_id)
        await stream.cancel(*(frame.request_id for frame in crowd))
        for frame in crowd:
            await stream.finished(frame.request_id)

    event = service.database.event(tenant, waiting.request_id)
    assert (finished.usage.input_token_count, picos(finished.cost)) == (0, 0)
    assert (event["input_token_count"], event["cost_picos"]) == (0, 0)
    assert event["outcome"] == "cancelled"
    assert counted(service, tenant)[0] == 65
