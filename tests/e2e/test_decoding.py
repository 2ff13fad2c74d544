"""Decoding options through the service: from a start frame to the answer and the usage event."""

from __future__ import annotations

import json
import math

import pytest
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2
from weir_client import FinishReason, InvalidRequest

from metering.core.models import QuotaDimension
from tests.service import MODEL, Service, Tenant

MARK = 42  # token that a strong bias makes certain


async def test_a_bias_and_a_stop_id_decide_the_answer(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        biased = pb.Sampling(temperature=1.0, seed=1, logit_bias={MARK: 100.0})
        forced = await stream.begin(max_output_tokens=5, sampling=biased)
        stopped = await stream.begin(
            max_output_tokens=5, sampling=biased, stop_token_ids=[MARK], min_output_tokens=2
        )
        ends = [await stream.finished(forced), await stream.finished(stopped)]

    assert stream.token_ids(forced) == [MARK] * 5
    assert stream.token_ids(stopped)[2:] == [MARK]
    assert MARK not in stream.token_ids(stopped)[:2]
    reasons = [types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_STOP]
    assert [end.reason for end in ends] == reasons
    assert ends[1].usage.billed_token_count == 3, "the id that ended it is counted"


async def test_logprobs_come_with_their_tokens(service: Service, tenant: Tenant) -> None:
    async with service.client(tenant.secret) as client:
        result = await client.complete(
            MODEL,
            "Hello",
            max_output_tokens=12,
            ignore_eos=True,
            temperature=1.0,
            seed=3,
            top_logprobs=4,
        )
        plain = await client.complete(
            MODEL, "Hello", max_output_tokens=12, ignore_eos=True, temperature=1.0, seed=3
        )

    chosen = [each.chosen.token_id for each in result.logprobs]
    assert chosen == list(result.token_ids) == list(plain.token_ids)
    assert plain.logprobs == ()
    for each in result.logprobs:
        assert len(each.top) == 4
        assert sum(math.exp(token.logprob) for token in each.top) <= 1 + 1e-6
        assert each.chosen.logprob <= each.top[0].logprob


async def test_penalties_reach_the_engine(service: Service, tenant: Tenant) -> None:
    """If no token may repeat, forty tokens are distinct."""
    async with service.client(tenant.secret) as client:
        result = await client.complete(
            MODEL,
            "Hello",
            max_output_tokens=40,
            ignore_eos=True,
            temperature=0,
            presence_penalty=2.0,
            frequency_penalty=2.0,
        )
        plain = await client.complete(
            MODEL, "Hello", max_output_tokens=40, ignore_eos=True, temperature=0
        )

    assert (
        len(set(result.token_ids)) > len(set(plain.token_ids))
        or result.token_ids != plain.token_ids
    )


async def test_unsupported_options_are_refused_without_a_hold(service: Service) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(stop_token_ids=[100_000], max_output_tokens=5)
        refusal = await stream.failed(request_id)

    assert refusal.status.code == 3
    assert "stop_token_ids" in refusal.status.message
    assert service.database.holds(tenant) == {}


async def test_an_answer_is_in_the_format_that_was_requested(service: Service) -> None:
    tenant = await service.tenant()
    schema = {
        "type": "object",
        "properties": {"stars": {"enum": [1, 2, 3]}},
        "required": ["stars"],
        "additionalProperties": False,
    }

    async with service.client(tenant.secret) as client:
        answer = await client.complete(
            MODEL, "Hello", json_schema=schema, temperature=1.0, seed=1, max_output_tokens=300
        )
        match = await client.complete(MODEL, "Hello", regex="(yes|no){2}")
        bracketed = await client.complete(MODEL, "Hello", lark='start: "<" /[ab]{2}/ ">"')

    assert json.loads(answer.text)["stars"] in (1, 2, 3)
    assert answer.finish_reason is FinishReason.STOP
    assert match.text in ("yesyes", "yesno", "noyes", "nono")
    assert bracketed.text[1:-1] in ("aa", "ab", "ba", "bb")
    assert answer.usage.billed_token_count == len(answer.token_ids)


async def test_a_format_that_cannot_compile_is_refused_and_free(service: Service) -> None:
    dimensions = QuotaDimension.REQUESTS_PER_MINUTE, QuotaDimension.TOKENS_PER_MONTH
    tenant = await service.tenant(dict.fromkeys(dimensions, 1000))

    async with service.client(tenant.secret) as client:
        with pytest.raises(InvalidRequest, match="uniqueItems") as caught:
            await client.complete(MODEL, "Hi", json_schema={"type": "array", "uniqueItems": True})

    [violation] = caught.value.details.field_violations
    assert violation.field == "json_schema"
    await service.no_hold_left(tenant)
    assert list(service.database.billed(tenant).values()) == [{}]
    assert service.database.counters(tenant) == {
        "requests_per_minute": (1, 0),
        "tokens_per_month": (0, 0),
    }


async def test_a_large_schema_delays_no_other_stream(service: Service, tenant: Tenant) -> None:
    """While the grammar is compiled, other requests stream on, and a cancel is answered."""
    branch = {
        "type": "object",
        "properties": {f"field_{index}": {"type": "string"} for index in range(30)},
    }
    schema = json.dumps(
        {"type": "object", "properties": {f"part_{index}": branch for index in range(40)}}
    )

    async with service.stream(tenant.secret) as stream:
        other = await stream.begin(max_output_tokens=300)
        await stream.first(other, "delta")
        large = await stream.begin(
            response_format=pb.ResponseFormat(json_schema=schema),
            ignore_eos=None,
            max_output_tokens=20,
        )
        dropped = await stream.begin(
            response_format=pb.ResponseFormat(json_schema=schema + " "), ignore_eos=None
        )
        await stream.first(dropped, "admitted")
        await stream.cancel(dropped)
        ends = [await stream.finished(request_id) for request_id in (dropped, large, other)]

    assert [end.reason for end in ends] == [
        types_pb2.FINISH_REASON_CANCELLED,
        types_pb2.FINISH_REASON_LENGTH,
        types_pb2.FINISH_REASON_LENGTH,
    ]
    assert ends[0].usage.billed_token_count == 0
    assert stream.text(large).lstrip(" \n").startswith("{")
