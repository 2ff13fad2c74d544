"""A model on another machine: received tokens are billed, even if that machine dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from google.protobuf.duration_pb2 import Duration
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc
from weir.v1 import types_pb2

from bench.hostile_upstream import marked
from inference.adapters.remote_settings import Service as Wire
from inference.sequences import UNKNOWN_TOKEN_ID
from metering.core.models import QuotaDimension
from tests.e2e.openai_clients import TO_THE_END, connect_async, extension, user_message
from tests.faults.conftest import Start
from tests.metering.invariants import check_invariants
from tests.remote_servers.certificates import make_certificates
from tests.remote_servers.serving import hostile_process, server_process
from tests.service import (
    MODEL,
    PLAIN_IDS,
    Refusal,
    Service,
    Tenant,
    bearer,
    cost_picos,
    picos,
    until,
)

pytestmark = pytest.mark.faults

HOT = {"temperature": 1.0}
WIRES = [Wire.TRTLLM, Wire.OPENAI_HTTP]
FORMS = {
    "an error event": "ENGINE_FAILED_MIDWAY",
    "a negative id": "ENGINE_FAILED",
    "500,000 tokens at once": "ENGINE_FAILED",
    "status 400 with secrets": "REQUEST_IMPOSSIBLE",
    "status 429": "ENGINE_OVERLOADED",
    "status 500 with 100 MiB": "ENGINE_FAILED",
}


async def test_remote_tokens_are_billed_exactly(launch: Start, model: Path, tmp_path: Path) -> None:
    """Before its death, at its death, and after its return at the same address."""
    certificates = make_certificates(tmp_path / "certificates")
    with server_process(model, certificates) as server:
        targets = {MODEL: str(server.target(Wire.TRTLLM))}
        service = launch(engine="remote", remote_targets=targets)
        tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 100_000})
        prompt = list(PLAIN_IDS[:100])
        async with service.stream(tenant.secret) as stream:
            first_id = await stream.begin(prompt=prompt, max_output_tokens=60)
            first = await stream.finished(first_id)
            second = await stream.finished(await stream.begin(prompt=prompt, max_output_tokens=60))
            dying_id = await stream.begin(max_output_tokens=3000)
            await stream.received(dying_id, 20)
            server.process.kill()
            failed = await stream.failed(dying_id)
    assert service.worker_pid is None, "the service has no engine of its own"

    port = int(server.address.rpartition(":")[2])
    with server_process(model, certificates, port=port):
        await until(service.serving, "the engine to be found again")
        async with service.stream(tenant.secret) as again:
            third_id = await again.begin(prompt=prompt, max_output_tokens=60)
            third = await again.finished(third_id)
        await service.no_hold_left(tenant)
        await asyncio.to_thread(service.stop)

    tokens = stream.token_ids(first_id)
    assert again.token_ids(third_id) == tokens
    assert stream.text(first_id) == service.tokenizer.decode(tuple(tokens))
    assert [each.usage.cached_input_token_count for each in (first, second, third)] == [0, 96, 0]
    for each in (first, second, third):
        assert each.reason == types_pb2.FINISH_REASON_LENGTH
        assert (
            each.usage.billed_token_count
            == each.usage.generated_token_count
            == each.usage.delivered_token_count
            == 60
        )
        assert picos(each.cost) == cost_picos(each.usage)
    assert failed.frame is not None
    assert failed.frame.usage.delivered_token_count == len(stream.token_ids(dying_id)) >= 20
    billed = {
        str(event["request_id"]): event["billed_token_count"]
        for event in service.database.events(tenant)
    }
    assert billed[dying_id] == len(stream.token_ids(dying_id))
    assert sum(billed.values()) == 3 * 60 + len(stream.token_ids(dying_id))


async def test_whole_answers_are_billed_alike(launch: Start, model: Path, tmp_path: Path) -> None:
    """A client that leaves gets no output, and is billed for the input alone."""
    with server_process(model, make_certificates(tmp_path / "certificates")) as server:
        targets = {MODEL: str(server.target(Wire.OPENAI_HTTP))}
        service = launch(engine="remote", remote_targets=targets, models={MODEL: model})
        tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 100_000})
        await until(service.serving, "the engine to be checked")
        ask = {"model": MODEL, "messages": user_message("hello"), "extra_body": TO_THE_END}
        async with connect_async(service, tenant.secret) as client:
            create: Any = client.chat.completions.create
            answers, streamed = [], []
            for fields in (
                {"max_tokens": 30},
                {"max_tokens": 30, "logprobs": True},
                {"max_tokens": 400},  # beyond the first slice of the lease
            ):
                answers.append(await create(**(ask | fields)))
                streamed.append(server.state()["bodies"][-1]["stream"])
            server.go_wrong("mute")
            with pytest.raises(openai.APITimeoutError):
                await create(**ask, max_tokens=20, timeout=1.0)
        await service.no_hold_left(tenant)
        server.go_wrong()
        await asyncio.to_thread(service.stop)

    first, *others = answers
    assert streamed == [False, True, True]
    assert [each.choices[0].message.content[:30] for each in others] == (
        [first.choices[0].message.content[:30]] * 2
    )
    timings = [extension(each)["timings"][0] for each in answers]
    assert [each["ttft_ms"] > 0 for each in timings] == [False, True, True]
    billed = [event["billed_token_count"] for event in service.database.events(tenant)]
    assert billed == [30, 30, 400, 0]
    left = service.database.events(tenant)[-1]
    assert left["input_token_count"] == first.usage.prompt_tokens
    check_invariants(service.database_url, all_ended=True)


@pytest.mark.parametrize("wire", WIRES)
async def test_cached_prompt_tokens_are_billed_as_reported(
    launch: Start, model: Path, tmp_path: Path, wire: Wire
) -> None:
    """Usage, cost, receipt and quotas agree, even after extensions, and for each way to end."""
    limits = {QuotaDimension.TOKENS_PER_MONTH: 10**6, QuotaDimension.COST_PICOS_PER_MONTH: 10**15}
    long, prompt = 300, list(PLAIN_IDS[:100])  # longer than a slice of the lease
    with server_process(model, make_certificates(tmp_path / "certificates")) as server:
        targets = {MODEL: str(server.target(wire))}
        service = launch(engine="remote", remote_targets=targets, models={MODEL: model})
        tenant = await service.tenant(limits)
        await until(service.serving, "the engine to be checked")
        async with service.stream(tenant.secret) as stream:
            ended = [
                await stream.finished(await stream.begin(prompt=prompt, **fields))
                for fields in (
                    {"max_output_tokens": long},
                    {"max_output_tokens": long},
                    {"max_output_tokens": 20, "choice_count": 2, "sampling": HOT},
                    {"max_output_tokens": 20, "keep_on_disconnect": Duration(seconds=60)},
                )
            ]
            stopped_id = await stream.begin(prompt=prompt, max_output_tokens=3000)
            await stream.received(stopped_id, 20)
            await stream.cancel(stopped_id)
            ended.append(await stream.finished(stopped_id))
        async with service.client(tenant.secret) as client:
            quote = await client.quote(MODEL, token_ids=prompt, max_output_tokens=20)
        await service.no_hold_left(tenant)
        await asyncio.to_thread(service.stop)

    known = 0 if wire is Wire.OPENAI_HTTP else 96  # no last message over HTTP
    assert [each.usage.cached_input_token_count for each in ended] == [0, 96, 96, 96, known]
    assert quote.predicted_cached_token_count == 96
    events = service.database.events(tenant)
    assert [event["cached_input_token_count"] for event in events] == [0, 96, 96, 96, known]
    assert [event["cost_picos"] for event in events] == [picos(each.cost) for each in ended]
    assert all(picos(each.cost) == cost_picos(each.usage) for each in ended)
    assert service.database.counters(tenant)["cost_picos_per_month"] == (
        sum(event["cost_picos"] for event in events),
        0,
    )
    check_invariants(service.database_url, all_ended=True)


async def test_a_kill_bills_known_cached_tokens(launch: Start, model: Path, tmp_path: Path) -> None:
    """The client holds back credit, so that the count comes after the tokens that it receives."""
    with server_process(model, make_certificates(tmp_path / "certificates")) as server:
        targets = {MODEL: str(server.target(Wire.OPENAI_HTTP))}
        service = launch(engine="remote", remote_targets=targets, models={MODEL: model})
        tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10**6})
        await until(service.serving, "the engine to be checked")
        prompt = list(PLAIN_IDS[:100])
        async with service.stream(tenant.secret) as stream:
            await stream.finished(await stream.begin(prompt=prompt, max_output_tokens=20))
            limits = {"max_output_tokens": 20, "initial_credit_tokens": 5}
            whole_id = await stream.begin(prompt=prompt, **limits)
            await stream.received(whole_id, 5)
            await until(lambda: server.idle, "the engine to end the output")
            running_id = await stream.begin(prompt=prompt, max_output_tokens=3000)
            await stream.received(running_id, 20)
            service.kill()
            await stream.closed()
        service.start()
        await until(service.serving, "the engine to be checked again")
        events = {str(each["request_id"]): each for each in service.database.events(tenant)}
        await asyncio.to_thread(service.stop)

    ends = [
        (events[each]["cached_input_token_count"], events[each]["recovered"])
        for each in (whole_id, running_id)
    ]
    assert ends == [(96, True), (0, True)]
    assert events[whole_id]["billed_token_count"] == 5
    check_invariants(service.database_url, all_ended=True)


async def listed_models(service: Service, tenant: Tenant) -> Sequence[pb.Model]:
    async with service.channel() as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        listed = await stub.ListModels(pb.ListModelsRequest(), metadata=bearer(tenant.secret))
    return listed.models


@pytest.mark.parametrize("faults", [[], ["refuse continuous_usage_stats"]])
async def test_output_without_token_ids_is_billed_by_the_servers_usage(
    launch: Start, model: Path, tmp_path: Path, faults: list[str]
) -> None:
    """A stream that ends without usage is billed for the delivered tokens, at most its messages."""
    with server_process(model, make_certificates(tmp_path / "certificates")) as server:
        server.go_wrong("no_ids", *faults)
        targets = {MODEL: str(server.target(Wire.OPENAI_HTTP))}
        service = launch(engine="remote", remote_targets=targets, models={MODEL: model})
        tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 100_000})
        async with service.stream(tenant.secret) as stream:
            await until(service.serving, "the engine to be checked")
            [listed] = await listed_models(service, tenant)
            refused = await stream.failed(await stream.begin(stop_token_ids=[5]))
            hidden = await stream.failed(await stream.begin(stop_sequences=["a", "a<|end|>"]))
            whole_id = await stream.begin(prompt=list(PLAIN_IDS[:100]), max_output_tokens=60)
            whole = await stream.finished(whole_id)
            stopped_id = await stream.begin(max_output_tokens=3000)
            await stream.received(stopped_id, 20)
            await stream.cancel(stopped_id)
            stopped = await stream.finished(stopped_id)
            dying_id = await stream.begin(max_output_tokens=3000)
            await stream.received(dying_id, 20)
            server.process.kill()
            failed = await stream.failed(dying_id)
        await service.no_hold_left(tenant)
        await asyncio.to_thread(service.stop)

    assert listed.counts_from_usage
    assert {"stop_token_ids", "top_logprobs"} <= {each.field for each in listed.refused_fields}
    assert refused.fields == ["stop_token_ids"]
    assert hidden.fields == ["stop_sequences[1]"], "the server does not send control tokens"
    assert {*stream.token_ids(whole_id)} == {UNKNOWN_TOKEN_ID}
    assert whole.usage.billed_token_count == whole.usage.delivered_token_count == 60
    assert picos(whole.cost) == cost_picos(whole.usage)
    assert failed.frame is not None
    billed = {
        str(event["request_id"]): event["billed_token_count"]
        for event in service.database.events(tenant)
    }
    assert billed == {
        whole_id: 60,
        stopped_id: stopped.usage.delivered_token_count,
        dying_id: failed.frame.usage.delivered_token_count,
    }
    assert 20 <= billed[stopped_id] < 3000
    assert 20 <= billed[dying_id] == len(stream.token_ids(dying_id)) < 3000


async def test_hostile_answers_are_billed_for_valid_tokens_only(launch: Start, model: Path) -> None:
    failed: dict[str, Refusal] = {}
    with hostile_process("bench.hostile_upstream") as address:
        target = f"openai+http://{address}/tiny"
        service = launch(
            engine="remote", remote_targets={MODEL: target}, remote_share_prefixes=True
        )
        tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 100_000})
        async with service.stream(tenant.secret) as stream:
            for form in FORMS:
                await until(service.serving, "the engine to take requests")
                whole_id = await stream.begin(prompt=list(range(40, 50)), max_output_tokens=40)
                failed_id = await stream.begin(prompt=list(marked(form)), max_output_tokens=40)
                failed[failed_id] = await stream.failed(failed_id)
                whole = await stream.finished(whole_id)
                assert whole.usage.billed_token_count == len(stream.token_ids(whole_id)) == 40
    async with service.stream(tenant.secret) as after:
        await until(lambda: not service.serving(), "the loss to be seen")
        refused = await after.failed(await after.begin(max_output_tokens=40))
    await service.no_hold_left(tenant)
    await asyncio.to_thread(service.stop)

    reasons = dict(zip(FORMS, (each.reason for each in failed.values()), strict=True))
    # Two valid ids precede the negative one. They are delivered if they come in an earlier packet.
    assert reasons in (FORMS, FORMS | {"a negative id": "ENGINE_FAILED_MIDWAY"})
    billed = {
        str(event["request_id"]): event["billed_token_count"]
        for event in service.database.events(tenant)
    }
    delivered = {request_id: len(stream.token_ids(request_id)) for request_id in failed}
    assert {each: billed.get(each, 0) for each in failed} == delivered
    counts = dict(zip(FORMS, delivered.values(), strict=True))
    for form, reason in reasons.items():
        assert (counts[form] > 0) == (reason == "ENGINE_FAILED_MIDWAY"), form
    for reported in (*failed.values(), refused):
        for secret in ("hunter2", "10.0.0.5", address, "127.0.0.1"):
            assert secret not in str(reported.status)
    assert service.log.count("hunter2") > 1, "operators see what the server said"
    assert '"event": "incident"' not in service.log
