"""Several choices through the service: one billed input, all outputs, holds of the exact sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2
from weir_client import FinishReason

from metering.core.models import QuotaDimension
from tests.service import MODEL, PLAIN_IDS, Service, Tenant, cost_picos, picos

HOT = pb.Sampling(temperature=1.0, seed=11)
FOUR = {"choice_count": 4, "sampling": HOT}


def tokens_by_choice(deltas: Sequence[pb.DeltaFrame]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = defaultdict(list)
    for delta in deltas:
        tokens[delta.choice_index] += delta.token_ids
    return tokens


async def test_the_input_is_billed_once_and_the_output_of_all(service: Service) -> None:
    tenant = await service.tenant()
    prompt = list(PLAIN_IDS[:70])

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(prompt=prompt, max_output_tokens=30, **FOUR)
        finished = await stream.finished(request_id)
        single = await stream.begin(prompt=prompt, max_output_tokens=30, sampling=HOT)
        await stream.finished(single)

    deltas = stream.of(request_id, "delta")
    assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
    tokens = tokens_by_choice(deltas)
    assert {index: len(ids) for index, ids in tokens.items()} == dict.fromkeys(range(4), 30)
    assert tokens[0] == stream.token_ids(single), "the first choice is what a single one would be"
    assert (finished.usage.input_token_count, finished.usage.cached_input_token_count) == (70, 0)
    assert finished.usage.billed_token_count == finished.usage.generated_token_count == 120
    assert picos(finished.cost) == cost_picos(finished.usage)
    assert [(end.choice_index, end.reason) for end in finished.choices] == [
        (i, types_pb2.FINISH_REASON_LENGTH) for i in range(4)
    ]
    event = service.database.event(tenant, request_id)
    assert (event["input_token_count"], event["delivered_token_count"]) == (70, 120)


async def test_the_hold_covers_the_sum_and_a_quota_cuts_it_exactly(service: Service) -> None:
    """With room for the input and 100 output tokens, four choices of 40 share exactly these."""
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 110})

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(choice_count=4, max_output_tokens=40, sampling=HOT)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_QUOTA_EXHAUSTED
    assert {end.reason for end in finished.choices} == {types_pb2.FINISH_REASON_QUOTA_EXHAUSTED}
    assert len(stream.token_ids(request_id)) == finished.usage.billed_token_count <= 100
    assert finished.usage.billed_token_count >= 97, "a step of four tokens may not fit any more"
    await service.no_hold_left(tenant)
    used, _ = service.database.counters(tenant)["tokens_per_month"]
    assert used == 10 + finished.usage.billed_token_count


async def test_an_output_that_just_fits_is_let_through(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10 + 4 * 40})

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(choice_count=4, max_output_tokens=40, sampling=HOT)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert finished.usage.billed_token_count == 160


async def test_a_cancel_ends_all_choices_and_bills_what_was_delivered(service: Service) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(choice_count=3, max_output_tokens=1000, sampling=HOT)
        await stream.received(request_id, 30)
        await stream.cancel(request_id)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_CANCELLED
    assert {end.reason for end in finished.choices} == {types_pb2.FINISH_REASON_CANCELLED}
    assert finished.usage.billed_token_count == len(stream.token_ids(request_id)) < 3000
    await service.no_hold_left(tenant)


async def test_the_sdk_distinguishes_the_choices(service: Service, tenant: Tenant) -> None:
    async with service.client(tenant.secret) as client:
        result = await client.complete(
            MODEL,
            "Hello",
            choice_count=3,
            max_output_tokens=12,
            temperature=1.0,
            seed=2,
            top_logprobs=1,
        )
        single = await client.complete(MODEL, "Hello", max_output_tokens=12, temperature=1, seed=2)

    assert [choice.index for choice in result.choices] == [0, 1, 2]
    assert result.usage.billed_token_count == sum(len(each.token_ids) for each in result.choices)
    assert (result.text, result.token_ids, result.finish_reason) == (
        single.text,
        single.token_ids,
        single.finish_reason,
    )
    for choice in result.choices:
        assert [each.chosen.token_id for each in choice.logprobs] == list(choice.token_ids)
        assert choice.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert [choice.text for choice in single.choices] == [single.text]
