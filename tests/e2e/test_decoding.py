"""Decoding options through the whole service: from a start frame to the frames of the answer and the usage event."""

from __future__ import annotations

import math

from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from tests.service import MODEL, Service

MARK = 42  # a token that a strong bias makes certain


async def test_a_bias_and_a_stop_id_decide_the_answer(service: Service) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        biased = pb.Sampling(temperature=1.0, seed=1, logit_bias={MARK: 100.0})
        forced = await stream.begin(max_output_tokens=5, sampling=biased)
        stopped = await stream.begin(max_output_tokens=5, sampling=biased, stop_token_ids=[MARK], min_output_tokens=2)
        ends = [await stream.finished(forced), await stream.finished(stopped)]

    assert stream.token_ids(forced) == [MARK] * 5
    assert stream.token_ids(stopped)[2:] == [MARK]
    assert MARK not in stream.token_ids(stopped)[:2]
    assert [end.reason for end in ends] == [types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_STOP]
    assert ends[1].usage.billed_token_count == 3, "the id that ended it is counted"


async def test_logprobs_come_with_their_tokens(service: Service) -> None:
    tenant = await service.tenant()

    async with service.client(tenant.secret) as client:
        result = await client.complete(
            MODEL, "Hello", max_output_tokens=12, ignore_eos=True, temperature=1.0, seed=3, top_logprobs=4
        )
        plain = await client.complete(MODEL, "Hello", max_output_tokens=12, ignore_eos=True, temperature=1.0, seed=3)

    assert [each.chosen.token_id for each in result.logprobs] == list(result.token_ids) == list(plain.token_ids)
    assert plain.logprobs == ()
    for each in result.logprobs:
        assert len(each.top) == 4
        assert sum(math.exp(token.logprob) for token in each.top) <= 1 + 1e-6
        assert each.chosen.logprob <= each.top[0].logprob


async def test_penalties_reach_the_engine(service: Service) -> None:
    """With nothing ever said twice, forty tokens are forty different ones."""
    tenant = await service.tenant()

    async with service.client(tenant.secret) as client:
        result = await client.complete(
            MODEL, "Hello", max_output_tokens=40, ignore_eos=True, temperature=0, presence_penalty=2.0, frequency_penalty=2.0
        )
        plain = await client.complete(MODEL, "Hello", max_output_tokens=40, ignore_eos=True, temperature=0)

    assert len(set(result.token_ids)) > len(set(plain.token_ids)) or result.token_ids != plain.token_ids


async def test_what_the_model_cannot_do_is_refused_by_field_and_holds_nothing(service: Service) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(stop_token_ids=[100_000], max_output_tokens=5)
        refusal = await stream.failed(request_id)

    assert refusal.status.code == 3
    assert "stop_token_ids" in refusal.status.message
    assert service.books.holds(tenant) == {}
