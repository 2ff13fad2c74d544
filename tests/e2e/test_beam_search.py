"""Beam search through the service: best outputs billed, all beams counted, exact quotas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from metering.core.models import QuotaDimension
from tests.service import PLAIN_IDS, Service, cost_picos, picos

SEARCH = pb.BeamSearch(width=5, length_penalty=1.2, early_stopping=pb.EARLY_STOPPING_NEVER)


def tokens_by_choice(deltas: Sequence[pb.DeltaFrame]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = defaultdict(list)
    for delta in deltas:
        tokens[delta.choice_index] += delta.token_ids
    return tokens


async def test_the_best_outputs_are_billed_and_all_beams_counted(service: Service) -> None:
    tenant = await service.tenant()
    prompt = list(PLAIN_IDS[:70])

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(
            prompt=prompt,
            choice_count=3,
            max_output_tokens=30,
            beam_search=SEARCH,
            ignore_eos=True,
            top_logprobs=0,
        )
        finished = await stream.finished(request_id)
        greedy = await stream.begin(
            prompt=prompt,
            max_output_tokens=30,
            sampling=pb.Sampling(temperature=0.0),
            ignore_eos=True,
            top_logprobs=0,
        )
        await stream.finished(greedy)

    deltas = stream.of(request_id, "delta")
    tokens = tokens_by_choice(deltas)
    assert {index: len(ids) for index, ids in tokens.items()} == dict.fromkeys(range(3), 30)
    assert len({tuple(ids) for ids in tokens.values()}) == 3
    scores = [
        sum(each.chosen.logprob for d in deltas if d.choice_index == index for each in d.logprobs)
        for index in range(3)
    ]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] >= sum(
        each.chosen.logprob for d in stream.of(greedy, "delta") for each in d.logprobs
    ), "why one searches"
    assert finished.usage.billed_token_count == finished.usage.delivered_token_count == 90
    assert finished.usage.generated_token_count == 150, "a token of each beam at each step"
    assert finished.usage.input_token_count == 70
    assert picos(finished.cost) == cost_picos(finished.usage)
    assert [end.reason for end in finished.choices] == [types_pb2.FINISH_REASON_LENGTH] * 3
    event = service.database.event(tenant, request_id)
    assert (
        event["input_token_count"],
        event["delivered_token_count"],
        event["generated_token_count"],
    ) == (70, 90, 150)


async def test_a_quota_that_ends_in_the_middle_of_an_output_cuts_it_there(service: Service) -> None:
    """With room for 10 input and 55 output tokens, the second output of 40 is cut exactly."""
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 65})

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(
            choice_count=2, max_output_tokens=40, beam_search=SEARCH, ignore_eos=True
        )
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_QUOTA_EXHAUSTED
    assert len(stream.token_ids(request_id)) == finished.usage.billed_token_count == 55
    await service.no_hold_left(tenant)
    assert service.database.counters(tenant)["tokens_per_month"][0] == 65


async def test_a_cancel_ends_the_search_and_bills_the_reported_tokens(service: Service) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=1000, beam_search=SEARCH, ignore_eos=True)
        await stream.first(request_id, "admitted")
        await stream.cancel(request_id)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_CANCELLED
    assert len(stream.token_ids(request_id)) == finished.usage.billed_token_count
    assert finished.usage.generated_token_count >= finished.usage.billed_token_count
    await service.no_hold_left(tenant)


async def test_options_excluded_by_beam_search_are_refused_by_field(service: Service) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(
            max_output_tokens=10,
            beam_search=pb.BeamSearch(width=40),
            sampling=pb.Sampling(temperature=0.5),
            stop_sequences=["x"],
        )
        refusal = await stream.failed(request_id)

    assert refusal.fields == ["beam_search.width", "sampling.temperature", "stop_sequences"]
