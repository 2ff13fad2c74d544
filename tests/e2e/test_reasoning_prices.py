"""A model's thinking at its own price: on the wire, in quotes, credit, months and after a kill."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2
from weir_client import AsyncBillingClient, UsageGrouping

from metering.core.models import QuotaDimension
from metering.pricing.prices import PriceTerms, set_price
from tests.calls import calls
from tests.e2e.conftest import Serve
from tests.e2e.openai_clients import connect, user_message
from tests.faults.billed import rate
from tests.inference.tool_checkpoints import make_scripted_checkpoint
from tests.metering.invariants import check_invariants
from tests.service import (
    CACHED_PICOS,
    INPUT_PICOS,
    MODEL,
    OUTPUT_PICOS,
    Service,
    Stream,
    Tenant,
    conversation,
    picos,
)

PIECES = (
    "<think>",
    *(f"Hm-{number} " for number in range(30)),
    "</think>",
    *(f"so-{number} " for number in range(10)),
)
THOUGHT_TOKENS = PIECES.index("</think>") + 1
HOT = pb.Sampling(temperature=1.0, seed=11)
DEARER, CHEAPER = 3 * OUTPUT_PICOS, OUTPUT_PICOS // 4
PRICES = [DEARER, CHEAPER, 0, None]


@pytest.fixture(scope="module")
def service(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """Return a service whose model thinks."""
    directory = tmp_path_factory.mktemp("reasoning")
    model = make_scripted_checkpoint(directory / "thinks", PIECES)
    return serve(model)


async def tenant_of(
    service: Service, reasoning_picos: int | None, quotas: dict[QuotaDimension, int] | None = None
) -> Tenant:
    """Create a customer with this price of reasoning."""
    tenant = await service.tenant(quotas, scopes=("inference", "billing"))
    async with service.session() as session:
        await set_price(
            session,
            PriceTerms(
                model=MODEL,
                organization=tenant.name,
                input_picos_per_token=INPUT_PICOS,
                cached_input_picos_per_token=CACHED_PICOS,
                output_picos_per_token=OUTPUT_PICOS,
                reasoning_picos_per_token=reasoning_picos,
            ),
            actor="test",
        )
    return tenant


def cost_at(usage: types_pb2.Usage, reasoning_picos: int | None) -> int:
    price = OUTPUT_PICOS if reasoning_picos is None else reasoning_picos
    answer = usage.billed_token_count - usage.reasoning_token_count
    return (
        (usage.input_token_count - usage.cached_input_token_count) * INPUT_PICOS
        + usage.cached_input_token_count * CACHED_PICOS
        + answer * OUTPUT_PICOS
        + usage.reasoning_token_count * price
    )


async def begin(stream: Stream, **fields: Any) -> str:
    usual: dict[str, Any] = {"conversation": conversation("2+2?"), "ignore_eos": False}
    return await stream.begin(**usual | {"max_output_tokens": 60} | fields)


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_output_tokens": 20},
        {"max_output_tokens": 36},
        {"usage_interval_tokens": 5},
        {"keep_on_disconnect": {"seconds": 60}, "usage_interval_tokens": 7},
        {"choice_count": 3, "sampling": HOT},
        {"choice_count": 2, "sampling": HOT, "max_output_tokens": 40},
    ],
    ids=["whole", "in the thinking", "in the answer", "usage", "kept", "choices", "cut choices"],
)
async def test_every_token_costs_the_price_of_its_kind(
    service: Service, price: int | None, fields: dict[str, Any]
) -> None:
    tenant = await tenant_of(service, price)

    async with service.stream(tenant.secret) as stream:
        request_id = await begin(stream, **fields)
        finished = await stream.finished(request_id)

    usage = finished.usage
    assert picos(finished.cost) == cost_at(usage, price)
    assert 0 < usage.reasoning_token_count <= usage.billed_token_count
    [receipt] = finished.receipts
    assert (receipt.version, receipt.reasoning_token_count) == (3, usage.reasoning_token_count)
    for frame in stream.frames[request_id]:
        if frame.HasField("usage"):
            reported = frame.usage.usage
            assert picos(frame.usage.cost) == cost_at(reported, price)
            assert reported.reasoning_token_count == min(
                reported.billed_token_count, THOUGHT_TOKENS
            )
    check_invariants(service.database_url)


@pytest.mark.parametrize("price", [DEARER, CHEAPER])
async def test_a_cancel_while_thinking_bills_reasoning(service: Service, price: int) -> None:
    tenant = await tenant_of(service, price)

    async with service.stream(tenant.secret) as stream:
        request_id = await begin(stream, initial_credit_tokens=7)
        await stream.received(request_id, 7)
        await stream.cancel(request_id)
        finished = await stream.finished(request_id)

    assert finished.usage.billed_token_count == finished.usage.reasoning_token_count == 7
    assert picos(finished.cost) == cost_at(finished.usage, price)


async def test_a_limit_on_money_is_kept_at_the_dearer_price(service: Service) -> None:
    limit = 30 * DEARER  # of 31 reasoning tokens
    quotas = {QuotaDimension.COST_PICOS_PER_MONTH: limit}
    tenant = await tenant_of(service, DEARER, quotas)

    async with service.stream(tenant.secret) as stream:
        first = await stream.finished(await begin(stream))
        refusal = await stream.failed(await begin(stream))

    assert first.reason == types_pb2.FINISH_REASON_QUOTA_EXHAUSTED
    assert first.usage.reasoning_token_count == first.usage.billed_token_count
    assert limit - 2 * DEARER < picos(first.cost) <= limit
    assert refusal.reason == "QUOTA_EXCEEDED"
    check_invariants(service.database_url)


@pytest.mark.parametrize("price", [DEARER, CHEAPER])
async def test_limits_and_quotes_use_the_dearer_price(service: Service, price: int) -> None:
    tenant = await tenant_of(service, price)
    each = max(price, OUTPUT_PICOS)

    async with service.stream(tenant.secret) as stream:
        max_cost = types_pb2.Money(currency_code="USD", picos=40 * DEARER)
        request_id = await begin(stream, max_cost=max_cost)
        finished = await stream.finished(request_id)
    start = pb.StartFrame(model=MODEL, conversation=conversation("2+2?"), max_output_tokens=60)
    async with calls(service, tenant.secret) as call:
        quoted = await call("Quote", start=start)

    assert picos(finished.cost) <= 40 * DEARER
    worst = quoted.input_token_count * INPUT_PICOS + quoted.max_output_token_count * each
    assert picos(quoted.worst_case_cost) == worst
    cached = quoted.predicted_cached_token_count
    fresh = quoted.input_token_count - cached
    known = finished.usage.reasoning_token_count
    expected = quoted.expected_output_token_count
    assert picos(quoted.expected_cost) == (
        fresh * INPUT_PICOS
        + cached * CACHED_PICOS
        + (expected - known) * OUTPUT_PICOS
        + known * price
    )


async def test_completion_tokens_of_chats_include_reasoning(service: Service) -> None:
    tenant = await tenant_of(service, DEARER)

    with connect(service, tenant.secret) as client:
        usage: Any = client.chat.completions.create(
            model=MODEL, messages=user_message("2+2?")
        ).usage

    assert usage.completion_tokens == len(PIECES) + 1
    assert usage.completion_tokens_details.reasoning_tokens == THOUGHT_TOKENS


@pytest.mark.parametrize("price", PRICES)
async def test_the_month_has_a_line_for_reasoning(service: Service, price: int | None) -> None:
    tenant = await tenant_of(service, price)
    async with service.stream(tenant.secret) as stream:
        begun = [await begin(stream, max_output_tokens=count) for count in (60, 20)]
        ends = [await stream.finished(each) for each in begun]
        short = await begin(stream, conversation=None, text="a", max_output_tokens=3)
        none = await stream.finished(short)
    await rate(service)
    month = f"{datetime.now(UTC):%Y-%m}"

    async with AsyncBillingClient(service.address, tenant.secret) as client:
        report = await client.get_month_report(tenant.name, month)
        [page] = [page async for page in client.get_usage(month, [UsageGrouping.MODEL])]

    lines = {line.token_kind.value: line for line in report.lines}
    known = sum(end.usage.reasoning_token_count for end in ends)
    billed = sum(end.usage.billed_token_count for end in [*ends, none])
    assert none.usage.reasoning_token_count == 0
    assert lines["reasoning"].token_count == known
    assert lines["output"].token_count == billed - known
    assert lines["reasoning"].unit_price_picos == (OUTPUT_PICOS if price is None else price)
    assert lines["reasoning"].request_count == 2
    total = sum(picos(end.cost) for end in [*ends, none])
    assert sum(line.amount.picos for line in report.lines) == report.total.picos == total
    assert page.total is not None
    assert page.total.output_token_count == billed - known
    assert page.total.reasoning_token_count == known
    check_invariants(service.database_url)
