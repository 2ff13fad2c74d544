"""Changes of a running request's limits, on tokens and cost: exact delivery and billing."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from metering.core.models import QuotaDimension
from tests.service import (
    CONTEXT_WINDOW_TOKENS,
    INPUT_PICOS,
    OUTPUT_PICOS,
    Refusal,
    Service,
    Stream,
    Tenant,
    cost_picos,
    picos,
    start,
)

PROMPT = tuple(range(300, 310))  # used by no other test, so that nothing is cached at first
INPUT_COST = len(PROMPT) * INPUT_PICOS


def usd(amount_picos: int) -> types_pb2.Money:
    """Return an amount."""
    return types_pb2.Money(currency_code="USD", picos=amount_picos)


async def update(stream: Stream, request_id: str, **limits: Any) -> pb.UpdatedFrame:
    """Change limits; return the answer."""
    count = len(stream.of(request_id, "updated"))
    await stream.update(request_id, **limits)
    answers: list[pb.UpdatedFrame] = await stream.wait(
        lambda: (
            found
            if len(found := stream.of(request_id, "updated")) > count or stream.ends(request_id)
            else None
        ),
        "an answer",
    )
    return answers[-1]


async def undisturbed(stream: Stream, token_count: int, **fields: Any) -> list[int]:
    """Return the tokens of an unchanged request."""
    request_id = await stream.begin(max_output_tokens=token_count, **fields)
    await stream.finished(request_id)
    return stream.token_ids(request_id)


@pytest.mark.parametrize(
    ("fields", "limits"),
    [({}, (1200, 1500)), ({"sampling": pb.Sampling(temperature=1.0, seed=7)}, (500,))],
    ids=["greedy", "seeded"],
)
async def test_a_raised_limit_gives_the_same_tokens_as_one_set_at_the_start(
    service: Service, fields: dict[str, Any], limits: tuple[int, ...]
) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10**9})
    async with service.stream(tenant.secret) as stream:
        expected = await undisturbed(stream, limits[-1], **fields)
        request_id, reached = await stream.begin(max_output_tokens=300, **fields), 5
        for limit in limits:
            await stream.received(request_id, reached)
            updated = await update(stream, request_id, max_output_tokens=limit)
            assert updated.max_output_tokens == limit
            reached = 310  # the engine has restarted it

        finished = await stream.finished(request_id)

    assert stream.token_ids(request_id) == expected
    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert finished.usage.delivered_token_count == limits[-1]
    assert len(stream.of(request_id, "admitted")) == 1
    assert picos(finished.cost) == cost_picos(finished.usage)
    event = service.database.event(tenant, request_id)
    assert (
        event["input_token_count"],
        event["generated_token_count"],
        event["delivered_token_count"],
    ) == (10, limits[-1], limits[-1])
    await service.no_hold_left(tenant)


async def test_a_lowered_limit_ends_it_there(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10**9})
    async with service.stream(tenant.secret) as stream:
        expected = await undisturbed(stream, 300)
        request_id = await stream.begin(max_output_tokens=3000)
        await stream.received(request_id, 5)
        await update(stream, request_id, max_output_tokens=300)
        finished = await stream.finished(request_id)
        late = await stream.begin(max_output_tokens=3000)
        await stream.received(late, 20)
        await update(stream, late, max_output_tokens=1)
        cut = await stream.finished(late)

    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert stream.token_ids(request_id) == expected
    assert service.database.event(tenant, request_id)["delivered_token_count"] == 300
    assert cut.reason == types_pb2.FINISH_REASON_LENGTH
    assert 20 <= cut.usage.delivered_token_count == len(stream.token_ids(late)) < 3000
    await service.no_hold_left(tenant)


async def test_a_cost_limit_is_used_up_and_never_exceeded(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        limit = INPUT_COST + 7 * OUTPUT_PICOS + OUTPUT_PICOS // 2
        request_id = await stream.begin(prompt=PROMPT, max_output_tokens=100, max_cost=usd(limit))
        finished = await stream.finished(request_id)
        again = await stream.begin(prompt=PROMPT, max_output_tokens=3000)
        await stream.received(again, 10)
        answer = await update(stream, again, max_cost=usd(INPUT_COST + 900 * OUTPUT_PICOS))
        lowered = await stream.finished(again)
        raised = await stream.begin(
            prompt=PROMPT, max_output_tokens=200, max_cost=usd(INPUT_COST + 100 * OUTPUT_PICOS)
        )
        await stream.received(raised, 5)
        await update(stream, raised, max_cost=usd(10**12 - 1))
        whole = await stream.finished(raised)

    assert finished.reason == types_pb2.FINISH_REASON_COST_LIMIT
    assert finished.usage.delivered_token_count == 7
    assert picos(finished.cost) == INPUT_COST + 7 * OUTPUT_PICOS
    assert picos(answer.max_cost) == INPUT_COST + 900 * OUTPUT_PICOS
    assert lowered.reason == types_pb2.FINISH_REASON_COST_LIMIT
    assert 0 <= picos(answer.max_cost) - picos(lowered.cost) < OUTPUT_PICOS
    assert whole.reason == types_pb2.FINISH_REASON_LENGTH
    assert whole.usage.delivered_token_count == 200
    assert service.database.event(tenant, request_id)["outcome"] == "cost_limit"
    await service.no_hold_left(tenant)


async def test_a_cost_limit_below_the_prompt_is_refused_and_free(service: Service) -> None:
    """Cost and currency are compared after the hold, so these count. Invalid amounts do not."""
    tenant = await service.tenant(
        {QuotaDimension.TOKENS_PER_MONTH: 1000, QuotaDimension.REQUESTS_PER_MINUTE: 1000}
    )
    settled = []
    async with service.stream(tenant.secret) as stream:
        for wrong, field, has_hold in [
            (usd(INPUT_COST + OUTPUT_PICOS - 1), "max_cost", True),
            (usd(0), "max_cost", False),
            (types_pb2.Money(currency_code="USD", units=-1), "max_cost", False),
            (types_pb2.Money(currency_code="EUR", units=1), "max_cost.currency_code", True),
            (types_pb2.Money(units=1), "max_cost.currency_code", False),
        ]:
            request_id = await stream.begin(prompt=PROMPT, max_cost=wrong)
            refusal = await stream.failed(request_id)
            settled += [request_id] if has_hold else []
            assert (refusal.code, refusal.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    await service.no_hold_left(tenant)
    assert service.database.billed(tenant) == {request_id: {} for request_id in settled}
    assert service.database.counters(tenant) == {
        "requests_per_minute": (2, 0),
        "tokens_per_month": (0, 0),
    }


async def test_an_impossible_change_is_refused_and_the_request_continues(service: Service) -> None:
    tenant = await service.tenant()
    async with service.stream(tenant.secret) as stream:
        plain = await stream.begin(max_output_tokens=700)
        formatted = await stream.begin(
            max_output_tokens=700,
            ignore_eos=False,
            response_format=pb.ResponseFormat(regex="[a-z ]{4000,}"),
        )
        several = await stream.begin(
            max_output_tokens=700, choice_count=2, sampling=pb.Sampling(temperature=1.0)
        )
        for request_id in (plain, formatted, several):
            await stream.received(request_id, 1)
        changes: list[tuple[str, str, dict[str, Any]]] = [
            (plain, "update", {}),
            (plain, "update.max_output_tokens", {"max_output_tokens": 0}),
            (plain, "update.max_output_tokens", {"max_output_tokens": CONTEXT_WINDOW_TOKENS}),
            (plain, "update.max_cost", {"max_cost": usd(0)}),
            (
                plain,
                "update.max_cost.currency_code",
                {"max_cost": types_pb2.Money(currency_code="EUR", units=1)},
            ),
            (formatted, "update.max_output_tokens", {"max_output_tokens": 800}),
            (several, "update.max_output_tokens", {"max_output_tokens": 10}),
        ]
        for request_id, field, limits in changes:
            answer = await update(stream, request_id, **limits)
            refusal = Refusal(answer.refusal)
            assert (refusal.code, refusal.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
            assert answer.max_output_tokens == 700
        for request_id in (plain, formatted):
            assert (await stream.finished(request_id)).usage.delivered_token_count == 700
        assert (await stream.finished(several)).usage.delivered_token_count == 1400
    await service.no_hold_left(tenant)


async def test_updates_before_admission_after_the_end_and_unchanged(service: Service) -> None:
    tenant = await service.tenant()
    async with service.stream(tenant.secret) as stream:
        frame = start(max_output_tokens=30)
        change = pb.ClientFrame(
            request_id=frame.request_id, update=pb.UpdateFrame(max_output_tokens=20)
        )
        await stream.send(frame, change)
        early = await stream.first(frame.request_id, "updated")
        finished = await stream.finished(frame.request_id)
        unknown = start().request_id
        await stream.send(
            change, pb.ClientFrame(request_id=unknown, update=pb.UpdateFrame(max_output_tokens=20))
        )
        nobody = await stream.failed(unknown)

    assert Refusal(early.refusal).reason == "NOT_ADMITTED_YET"
    assert (early.max_output_tokens, finished.usage.delivered_token_count) == (0, 30)
    assert (nobody.code, nobody.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_UNKNOWN")
    assert len(stream.of(frame.request_id, "updated")) == 1


async def test_a_raise_beyond_the_quota_ends_where_the_quota_does(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10 + 400})
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=300)
        await stream.received(request_id, 5)
        await update(stream, request_id, max_output_tokens=3000)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_QUOTA_EXHAUSTED
    assert finished.usage.delivered_token_count == 400
    assert service.database.counters(tenant)["tokens_per_month"] == (410, 0)
