"""Promises of `sdk/conformance.json` for the Python client and a real server: one test each.

`sdk/typescript/tests/conformance.test.ts` does the same for the other client.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message as ProtoMessage
from weir.v1 import inference_service_pb2 as inference_pb
from weir_client import (
    Aborted,
    AlreadyExists,
    AsyncClient,
    Cancelled,
    DeadlineExceeded,
    Delta,
    FailedPrecondition,
    Fault,
    FinishReason,
    GenerateOptions,
    GenerationState,
    IncompleteGeneration,
    InvalidRequest,
    Message,
    ModelTask,
    Money,
    NotFound,
    QuotaExceeded,
    Receipt,
    ReceiptInvalid,
    Resumed,
    Tool,
    ToolCallDelta,
    Unauthenticated,
    Unavailable,
    UsageUpdate,
    verify_receipt,
)
from weir_client.receipts import receipt_problems

from metering.core.models import QuotaDimension
from tests.inference.encoder_checkpoints import DIMENSION
from tests.sdk import scripted
from tests.sdk.conftest import EMBEDDING_PICOS, ENCODER, TIGHT_KEEP_S, TOOL_MODEL
from tests.sdk.scripted import ScriptedInference, ServerStream
from tests.sdk.tcp_proxy import TcpProxy
from tests.service import CACHED_PICOS, INPUT_PICOS, MODEL, OUTPUT_PICOS, POLL_S, Service, Tenant

CONFORMANCE = Path(__file__).resolve().parents[2] / "sdk" / "conformance.json"
DOCS = CONFORMANCE.parents[1] / "docs"
RECEIPTS = (DOCS / "receipts_example.jsonl").read_text().splitlines()
RECEIPT_KEYS = {
    each["key_id"]: bytes.fromhex(each["public_key"])
    for each in json.loads((DOCS / "receipts_example_keys.json").read_text())["keys"]
}
PROMPT = (7, 8, 9, 10)

WRONG_OPTIONS: dict[str, object] = {
    "max_tokens": 3,
    "temperature": "hot",
    "stop": [1],
    "max_cost": 0.05,
    "tier": "cheap",
    "labels": {"a": 1},
    "timeout": "5 s",
    "keep_on_disconnect": "30",
    "prefetch_tokens": 2.5,
    "text": 5,
}
# Its fields are also options.
NESTED = (
    "weir.v1.Sampling",
    "weir.v1.BeamSearch",
    "weir.v1.ResponseFormat",
    "weir.v1.EmbedInput",
    "weir.v1.Conversation",
)


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncClient]:
    """Yield a client with the key of a new tenant."""
    async with AsyncClient(service.address, (await service.tenant()).secret) as client:
        yield client


@pytest.fixture
async def limited(service: Service) -> AsyncIterator[AsyncClient]:
    """Yield a client of an organization with 40 tokens per month."""
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 40})
    async with AsyncClient(service.address, tenant.secret) as client:
        yield client


async def settled(client: AsyncClient, request_id: str) -> str:
    """Wait for the recorded end of a request; return its outcome or state."""
    while (recorded := await client.get_generation(request_id)).state is GenerationState.RUNNING:  # noqa: ASYNC110  # at the server
        await asyncio.sleep(POLL_S)
    return recorded.outcome or recorded.state


def test_each_statement_has_a_test_here() -> None:
    statements = {each["id"].replace("-", "_") for each in json.loads(CONFORMANCE.read_text())}
    assert statements <= {name.removeprefix("test_") for name in globals()}


async def test_streams_in_order(client: AsyncClient) -> None:
    async with client.generate(
        MODEL, token_ids=PROMPT, max_output_tokens=12, ignore_eos=True
    ) as generation:
        deltas = [delta async for delta in generation]
    result = generation.result
    assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
    assert "".join(delta.text for delta in deltas) == result.text
    assert sum(len(delta.token_ids) for delta in deltas) == result.usage.delivered_token_count == 12
    assert result.finish_reason is FinishReason.LENGTH
    assert result.admitted is not None
    assert result.admitted.input_token_count == 4


async def test_reports_the_exact_bill(client: AsyncClient) -> None:
    result = await client.complete(MODEL, token_ids=PROMPT, max_output_tokens=12, ignore_eos=True)
    usage = result.usage
    uncached = usage.input_token_count - usage.cached_input_token_count
    picos = (
        uncached * INPUT_PICOS
        + usage.cached_input_token_count * CACHED_PICOS
        + usage.billed_token_count * OUTPUT_PICOS
    )
    recorded = await client.get_generation(result.request_id)
    assert result.cost.picos == picos
    assert recorded.usage == usage
    assert recorded.cost == result.cost
    assert recorded.state == GenerationState.SETTLED
    assert str(result.cost) == "0.0000078 USD"


async def test_runs_many_at_once(client: AsyncClient) -> None:
    alone = await client.complete(
        MODEL, token_ids=(20, 21, 22), max_output_tokens=12, ignore_eos=True
    )
    calls = [
        client.complete(MODEL, token_ids=(20 + n, 21, 22), max_output_tokens=12, ignore_eos=True)
        for n in range(20)
    ]
    results = await asyncio.gather(*calls)
    assert len({result.request_id for result in results}) == 20
    assert results[0].token_ids == alone.token_ids
    assert {result.usage.delivered_token_count for result in results} == {12}


async def test_leaving_the_loop_cancels(client: AsyncClient) -> None:
    generation = client.generate(MODEL, token_ids=PROMPT, max_output_tokens=3000, ignore_eos=True)
    async for delta in generation:
        if delta.seq == 3:
            break
    assert await settled(client, generation.request_id) == "CANCELLED"
    result = await generation.wait()
    recorded = await client.get_generation(generation.request_id)
    assert result.finish_reason is FinishReason.CANCELLED
    assert result.usage == recorded.usage
    assert 3 <= result.usage.delivered_token_count < 3000


async def test_cancels_from_outside(client: AsyncClient) -> None:
    generation = client.generate(MODEL, token_ids=PROMPT, max_output_tokens=3000, ignore_eos=True)
    assert (await anext(generation)).seq == 1
    generation.cancel()
    result = await generation.wait()
    assert result.finish_reason is FinishReason.CANCELLED
    assert result.usage.delivered_token_count == len(result.token_ids)


async def test_times_out(client: AsyncClient) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        await client.complete(
            MODEL, token_ids=PROMPT, max_output_tokens=3000, ignore_eos=True, timeout=0.4
        )
    partial = caught.value.partial
    assert partial is not None
    assert partial.usage is None or partial.usage.delivered_token_count == len(partial.token_ids)


async def test_refuses_a_bad_key(service: Service) -> None:
    async with AsyncClient(service.address, "weir_nobody") as stranger:
        with pytest.raises(Unauthenticated):
            await stranger.complete(MODEL, token_ids=PROMPT)
        with pytest.raises(Unauthenticated):
            await stranger.list_models()


async def test_names_an_unknown_model(client: AsyncClient) -> None:
    with pytest.raises(NotFound):
        await client.complete("nothing", token_ids=PROMPT)
    with pytest.raises(NotFound):
        await client.count_tokens("nothing", text="x")


async def test_names_the_wrong_field(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.complete(MODEL, token_ids=PROMPT, temperature=9)
    assert any("temperature" in each.field for each in caught.value.field_violations)
    with pytest.raises(InvalidRequest):
        client.generate(MODEL, text="a", token_ids=(7,))


async def test_reports_the_limit_that_was_hit(limited: AsyncClient) -> None:
    with pytest.raises(QuotaExceeded) as caught:
        await limited.complete(MODEL, token_ids=(7,) * 50, max_output_tokens=5)
    quota = caught.value.quota
    assert quota is not None
    assert (quota.limit, str(quota.dimension)) == (40, "tokens-per-month")
    assert not caught.value.retry_helps


async def test_never_bills_twice(client: AsyncClient) -> None:
    request_id = str(uuid.uuid4())
    first = await client.complete(
        MODEL, token_ids=PROMPT, max_output_tokens=12, ignore_eos=True, request_id=request_id
    )
    with pytest.raises(AlreadyExists) as caught:
        await client.complete(
            MODEL, token_ids=PROMPT, max_output_tokens=12, ignore_eos=True, request_id=request_id
        )
    assert caught.value.reason == "REQUEST_SETTLED"
    assert caught.value.partial is not None
    assert caught.value.partial.usage == first.usage


async def test_refuses_what_it_does_not_know(service: Service) -> None:
    server = ScriptedInference(lambda stream: scripted.answer(stream, "a"))
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        for name, value in WRONG_OPTIONS.items():
            prompt = None if name == "text" else "Hi"
            with pytest.raises(InvalidRequest) as refused:
                client.generate(MODEL, prompt, **{name: value})  # type: ignore[arg-type]
            assert [each.field for each in refused.value.field_violations] == [name]
        for wrong, field in (
            (["Hi"], "prompt[0]"),
            (5, "prompt"),
            ([{"role": "user", "content": []}], "prompt[0].content"),
        ):
            with pytest.raises(InvalidRequest, match=re.escape(field)):
                client.generate(MODEL, wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="did you mean truncate"):
            await client.embed(MODEL, "a", truncation=True)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match="resume_ms"):
            client.attach(str(uuid.uuid4()), resume_ms=5)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match="did you mean address"):
            AsyncClient(adress=address)  # type: ignore[call-arg]
    async with AsyncClient(f"https://{service.address}", "key", max_retries=0) as client:
        with pytest.raises(Unavailable, match="tls=False"):
            await client.list_models()
    assert not server.streams
    assert not server.requests


async def test_refuses_too_large_requests_itself(service: Service) -> None:
    tenant = await service.tenant()
    async with AsyncClient(service.address, tenant.secret, max_message_bytes=10_000) as client:
        generation = client.generate(MODEL, token_ids=PROMPT, max_output_tokens=12, ignore_eos=True)
        generation.start()
        with pytest.raises(InvalidRequest) as caught:
            client.generate(MODEL, text="x" * 20_000)
        assert (await generation.wait()).usage.delivered_token_count == 12
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


async def test_keeps_response_formats(client: AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    result = await client.complete(
        MODEL, token_ids=(7, 8, 9), max_output_tokens=200, json_schema=schema
    )
    if result.finish_reason is FinishReason.STOP:
        assert isinstance(json.loads(result.text)["ok"], bool)
    else:
        assert result.text.lstrip().startswith("{")


async def test_names_the_stop(client: AsyncClient) -> None:
    requested = GenerateOptions(token_ids=(7, 8, 9), max_output_tokens=40, ignore_eos=True)
    free = await client.complete(MODEL, **requested)
    stop, token_id = free.text[3:7], free.token_ids[2]
    stopped = await client.complete(MODEL, **(requested | GenerateOptions(stop=["never!", stop])))
    ended = await client.complete(MODEL, **(requested | GenerateOptions(stop_token_ids=[token_id])))
    assert (free.stopped_by, stopped.stopped_by) == (None, stop)
    assert ended.choices[0].stopped_by == token_id


async def test_calls_tools(client: AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    tool = Tool("check", "Checks it.", schema)
    deltas: list[ToolCallDelta] = []
    tools = [tool, Tool("other")]
    async with client.generate(
        TOOL_MODEL, "Is it?", tools=tools, tool_choice=tool, max_output_tokens=400
    ) as stream:
        async for delta in stream:
            deltas += delta.tool_calls
    result = stream.result
    assert result.finish_reason is FinishReason.TOOL_CALLS
    assert result.text == ""
    [call] = result.tool_calls
    assert result.choices[0].tool_calls == (call,)
    assert call.name == "check"
    assert isinstance(call.arguments["ok"], bool)
    assert [(delta.index, delta.id, delta.name) for delta in deltas[:2]] == [
        (0, call.id, "check"),
        (0, "", ""),
    ]
    assert "".join(delta.arguments_json for delta in deltas) == call.arguments_json
    talk = [
        Message("user", "Is it?"),
        Message("assistant", "", result.tool_calls),
        Message("tool", "It is.", (), call.id),
    ]
    after = await client.complete(
        TOOL_MODEL, talk, tools=[tool], tool_choice="none", max_output_tokens=2
    )
    assert after.tool_calls == ()
    with pytest.raises(InvalidRequest) as caught:
        await client.complete(MODEL, "Is it?", tools=[tool], max_output_tokens=2)
    assert caught.value.details.field_violations[0].field == "tools"


async def test_returns_choices_and_logprobs(client: AsyncClient) -> None:
    result = await client.complete(
        MODEL,
        token_ids=PROMPT,
        max_output_tokens=12,
        ignore_eos=True,
        choice_count=3,
        temperature=1.0,
        seed=5,
        top_logprobs=2,
    )
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    for choice in result.choices:
        assert tuple(each.chosen.token_id for each in choice.logprobs) == choice.token_ids
        assert all(each.chosen.logprob <= 0 and len(each.top) == 2 for each in choice.logprobs)
    assert result.usage.billed_token_count == 36


async def test_shows_running_usage(client: AsyncClient) -> None:
    requested = client.generate(
        MODEL, token_ids=PROMPT, max_output_tokens=12, ignore_eos=True, usage_interval_tokens=4
    )
    async with requested as generation:
        counts = [
            event.usage.delivered_token_count
            async for event in generation.events()
            if isinstance(event, UsageUpdate)
        ]
    assert counts
    assert counts == sorted(counts)


async def test_looks_up(client: AsyncClient, limited: AsyncClient) -> None:
    [price] = [model.price for model in await client.list_models() if model.name == MODEL]
    quote = await client.quote(MODEL, token_ids=PROMPT, max_output_tokens=12)
    assert price is not None
    assert price.output_picos_per_token == OUTPUT_PICOS
    assert (await client.count_tokens(MODEL, text="a pool")).input_token_count > 0
    assert quote.input_token_count == 4
    assert quote.max_output_token_count == 12
    assert quote.would_admit is True
    assert await client.get_quota() == []
    assert (await limited.get_quota(MODEL))[0].limit_value == 40
    with pytest.raises(NotFound):
        await client.get_generation(str(uuid.uuid4()))


async def test_reports_own_usage(client: AsyncClient) -> None:
    result = await client.complete(MODEL, token_ids=PROMPT, max_output_tokens=2)
    report = await client.usage(by=["model"], model=MODEL)
    project = await client.usage(project=True, month=report.first_day[:7])
    [row] = report.rows
    assert (row.model, row.day) == (MODEL, "")
    assert row.cost == report.total.cost >= result.cost
    assert row.token_count >= result.usage.input_token_count + result.usage.billed_token_count
    assert project.total.cost >= report.total.cost
    assert {each.day for each in project.rows} == {report.last_day}
    with pytest.raises(InvalidRequest) as caught:
        await client.usage(first_day="2026-01-01", last_day="2026-12-31")
    assert caught.value.details.field_violations[0].field == "last_day"


async def test_counts_tools(client: AsyncClient) -> None:
    tools = [
        Tool("check", "Checks it.", {"type": "object", "properties": {"ok": {"type": "boolean"}}}),
        Tool("other"),
    ]
    without, shown = (
        await client.count_tokens(TOOL_MODEL, "Is it?"),
        await client.count_tokens(TOOL_MODEL, "Is it?", tools=tools),
    )
    result = await client.complete(TOOL_MODEL, "Is it?", tools=tools, max_output_tokens=2)
    assert without.input_token_count < shown.input_token_count == result.usage.input_token_count
    for refused in (
        client.count_tokens(MODEL, "Is it?", tools=tools),
        client.count_tokens(TOOL_MODEL, text="Is it?", tools=tools),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await refused
        assert caught.value.details.field_violations[0].field == "tools"
    with pytest.raises(InvalidRequest, match=r"tools\[0\]"):
        await client.count_tokens(TOOL_MODEL, "Is it?", tools=["check"])  # type: ignore[list-item]


async def test_retries_what_was_not_taken(service: Service) -> None:
    tenant = await service.tenant()
    proxy = TcpProxy(service.address)
    proxy.closed_count = 1
    async with proxy.open(), AsyncClient(proxy.address, tenant.secret, max_retries=5) as client:
        result = await client.complete(
            MODEL, token_ids=PROMPT, max_output_tokens=12, ignore_eos=True
        )
    assert proxy.come_count >= 2
    assert result.usage.delivered_token_count == 12
    assert service.database.delivered(tenant) == {result.request_id: 12}


@pytest.mark.parametrize(
    ("code", "message"),
    [("CANCELLED", "CANCELLED"), ("INTERNAL", "Received RST_STREAM with error code 2")],
)
async def test_makes_a_dropped_call_again(code: str, message: str) -> None:
    """A stopping gRPC server answers CANCELLED without our details to new calls, and a proxy resets
    streams, which gRPC reports as INTERNAL.
    """
    dropped = scripted.status(code, message, "")

    async def drop(stream: scripted.ServerStream) -> None:
        await stream.read_start()
        await scripted.abort(stream.context, dropped, with_details=False)

    server = ScriptedInference(drop, lambda stream: scripted.answer(stream, "Hel", "lo"))
    server.refusals.append((dropped, False))
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        assert (await client.complete(MODEL, token_ids=PROMPT)).text == "Hello"
        assert await client.list_models() == []
    assert (len(server.streams), len(server.requests)) == (2, 2)


@pytest.mark.parametrize("given", [(False,), (True, False)])
async def test_replaces_a_refused_key(service: Service, given: tuple[bool, ...]) -> None:
    """`test_api_key_function.py` has the rest."""
    tenant = await service.tenant()
    for use in (AsyncClient.list_models, lambda each: each.complete(MODEL, token_ids=PROMPT)):
        tokens = iter(["wk_unknown1_secret" if each else tenant.secret for each in given])
        next_token = functools.partial(next, tokens)
        async with AsyncClient(service.address, next_token, max_retries=0) as client:
            await asyncio.gather(*(use(client) for _ in range(3)))
        assert next(tokens, None) is None


async def test_stops_waiting_at_close() -> None:
    hours, requested = 3600.0, asyncio.Event()

    async def refuse(stream: ServerStream) -> None:
        start = await stream.read_start()
        refusal = scripted.status("UNAVAILABLE", "not now", "OVERLOADED", retry_after_s=hours)
        await stream.send(scripted.failed(start.request_id, refusal))
        requested.set()
        await stream.read_to_end()

    async with scripted.serve(ScriptedInference(refuse)) as address:
        async with AsyncClient(address, "key", retry_wait_max_s=2 * hours) as client:
            waiting = asyncio.create_task(client.complete(MODEL, "Hi", timeout=2 * hours))
            await requested.wait()
        with pytest.raises(Cancelled):
            await waiting
        with pytest.raises(RuntimeError, match="is closed"):
            await client.list_models()


async def test_raises_unavailable_without_a_server() -> None:
    async with TcpProxy("127.0.0.1:1").open() as proxy:
        address = proxy.address
    async with AsyncClient(address, "key", max_retries=0) as client:
        with pytest.raises(Unavailable):
            await client.complete(MODEL, token_ids=PROMPT)
        with pytest.raises(Unavailable):
            await client.list_models(timeout=5)


async def test_settles_at_close(service: Service) -> None:
    tenant = await service.tenant()
    async with AsyncClient(service.address, tenant.secret) as other:
        generations = [
            other.generate(MODEL, token_ids=PROMPT, max_output_tokens=3000, ignore_eos=True)
            for _ in range(3)
        ]
        for generation in generations:
            await anext(generation)
    async with AsyncClient(service.address, tenant.secret) as client:
        assert {await settled(client, generation.request_id) for generation in generations} == {
            "CANCELLED"
        }


async def streamed_over_breaks(
    service: Service, tenant: Tenant, cut_count: int, prefetch_tokens: int | None = None
) -> tuple[list[Delta], list[Resumed], str]:
    """Stream 3000 tokens through a proxy that cuts the first delta's connection, and later ones.

    Return the deltas, the news, and the request's id.
    """
    proxy = TcpProxy(service.address)
    deltas: list[Delta] = []
    news: list[Resumed] = []
    cuts_done = 0
    async with proxy.open(), AsyncClient(proxy.address, tenant.secret) as client:
        generation = client.generate(
            MODEL,
            token_ids=PROMPT,
            max_output_tokens=3000,
            ignore_eos=True,
            prefetch_tokens=prefetch_tokens,
        )
        async for event in generation.events():
            if isinstance(event, Delta):
                deltas.append(event)
                if cuts_done < cut_count and cuts_done == len(news):
                    cuts_done += 1
                    proxy.cut()
            elif isinstance(event, Resumed):
                news.append(event)
        assert generation.result.text == "".join(delta.text for delta in deltas)
        assert generation.resume_count == len(news)
    return deltas, news, generation.request_id


async def test_resumes_where_it_broke(service: Service, client: AsyncClient) -> None:
    whole = await client.complete(MODEL, token_ids=PROMPT, max_output_tokens=3000, ignore_eos=True)
    tenant = await service.tenant()
    for cut_count in (1, 2):
        deltas, news, _ = await streamed_over_breaks(service, tenant, cut_count)
        assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
        assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
        assert len(news) == cut_count


async def test_resumes_before_the_first_token(service: Service) -> None:
    tenant = await service.tenant()
    proxy = TcpProxy(service.address)
    async with proxy.open(), AsyncClient(proxy.address, tenant.secret, max_retries=5) as client:
        requested = client.generate(MODEL, token_ids=PROMPT, max_output_tokens=12, ignore_eos=True)
        requested.start()
        while proxy.come_count == 0:  # noqa: ASYNC110  # at the door
            await asyncio.sleep(0)
        proxy.cut()
        at_work = client.generate(MODEL, token_ids=PROMPT, max_output_tokens=12, ignore_eos=True)
        assert not isinstance(await anext(at_work.events()), Delta)
        proxy.cut()
        results = [await requested.wait(), await at_work.wait()]
    assert [len(result.token_ids) for result in results] == [12, 12]
    assert service.database.delivered(tenant) == {result.request_id: 12 for result in results}


async def test_bills_a_resumed_request_once(service: Service) -> None:
    tenant = await service.tenant()
    _, _, request_id = await streamed_over_breaks(service, tenant, 3)
    assert service.database.delivered(tenant) == {request_id: 3000}


async def test_ends_with_its_connection_if_requested(service: Service) -> None:
    tenant = await service.tenant()
    proxy = TcpProxy(service.address)
    async with proxy.open(), AsyncClient(proxy.address, tenant.secret) as client:
        generation = client.generate(
            MODEL,
            token_ids=PROMPT,
            max_output_tokens=3000,
            ignore_eos=True,
            keep_on_disconnect=None,
        )
        await anext(generation)
        proxy.cut()
        with pytest.raises(IncompleteGeneration) as caught:
            await generation.wait()
        assert caught.value.partial is not None
        assert caught.value.partial.token_ids
        assert await settled(client, generation.request_id) == "CANCELLED"


async def test_cancels_while_the_connection_is_broken(service: Service) -> None:
    tenant = await service.tenant()
    proxy = TcpProxy(service.address)
    async with proxy.open(), AsyncClient(proxy.address, tenant.secret) as client:
        generation = client.generate(
            MODEL, token_ids=PROMPT, max_output_tokens=3000, ignore_eos=True, keep_on_disconnect=500
        )
        await anext(generation)
        proxy.cut()
        generation.cancel()
        result = await generation.wait()
        assert result.finish_reason is FinishReason.CANCELLED
        assert result.usage.delivered_token_count == len(result.token_ids) < 3000
        assert (await client.get_generation(generation.request_id)).usage == result.usage


async def test_receives_what_another_client_started(service: Service, client: AsyncClient) -> None:
    tenant = await service.tenant()
    async with (
        AsyncClient(service.address, tenant.secret) as one,
        AsyncClient(service.address, tenant.secret) as other,
    ):
        started = one.generate(
            MODEL, token_ids=PROMPT, max_output_tokens=3000, ignore_eos=True, prefetch_tokens=50
        )
        first = await anext(started)
        attached = other.attach(started.request_id, after_seq=first.seq)
        deltas = [delta async for delta in attached]
        assert [delta.seq for delta in deltas] == list(range(2, len(deltas) + 2))
        assert (
            sum(len(delta.token_ids) for delta in (first, *deltas))
            == attached.result.usage.delivered_token_count
            == 3000
        )
        with pytest.raises(Aborted) as reported:
            await started.wait()
        assert reported.value.reason == "ATTACHED_ELSEWHERE"
        again = await one.attach(started.request_id).wait()  # it is kept for a while after its end
        assert len(again.token_ids) == 3000
        with pytest.raises(NotFound):
            await one.attach(str(uuid.uuid4())).wait()
    with pytest.raises(NotFound):  # of another project
        await client.attach(started.request_id).wait()


async def test_leaves_nothing_behind_at_close(service: Service) -> None:
    tenant = await service.tenant()
    proxy = TcpProxy(service.address)
    async with proxy.open(), AsyncClient(proxy.address, tenant.secret) as client:
        kept = [
            client.generate(
                MODEL,
                token_ids=PROMPT,
                max_output_tokens=3000,
                ignore_eos=True,
                keep_on_disconnect=500,
            )
            for _ in range(3)
        ]
        for generation in kept:
            await anext(generation)
        proxy.cut()
    async with AsyncClient(service.address, tenant.secret) as client:
        assert {await settled(client, generation.request_id) for generation in kept} == {
            "CANCELLED"
        }


async def test_keeps_as_long_as_allowed(service: Service, tight: Service) -> None:
    tenant = await service.tenant()
    proxy = TcpProxy(tight.address)
    async with proxy.open(), AsyncClient(proxy.address, tenant.secret) as client:
        for _ in range(2):  # the second one is cached
            generation = client.generate(
                MODEL, token_ids=PROMPT, max_output_tokens=1000, ignore_eos=True
            )
            await anext(generation)
            proxy.cut()
            assert (await generation.wait()).usage.delivered_token_count == 1000
            assert generation.resume_count == 1
        with pytest.raises(InvalidRequest, match="keep_on_disconnect") as refused:
            await client.complete(MODEL, token_ids=PROMPT, keep_on_disconnect=TIGHT_KEEP_S + 1)
    assert float(refused.value.metadata["keep_on_disconnect_max_s"]) == TIGHT_KEEP_S


async def test_says_when_output_is_gone(service: Service, tight: Service) -> None:
    tenant = await service.tenant()
    proxy = TcpProxy(tight.address)
    async with (
        AsyncClient(tight.address, tenant.secret) as direct,
        proxy.open(),
        AsyncClient(proxy.address, tenant.secret) as client,
    ):
        generation = client.generate(
            MODEL, token_ids=PROMPT, max_output_tokens=3000, ignore_eos=True
        )
        await anext(generation)
        proxy.closed_count = 10**6
        proxy.cut()
        # As many steps for both.
        await direct.complete(MODEL, token_ids=(20, 21), max_output_tokens=2000, ignore_eos=True)
        proxy.closed_count = 0
        with pytest.raises(IncompleteGeneration, match="no longer kept") as caught:
            await generation.wait()
        recorded = await direct.get_generation(generation.request_id)
    partial = caught.value.partial
    assert partial is not None
    assert partial.usage == recorded.usage
    assert 0 < len(partial.token_ids) < recorded.usage.billed_token_count
    assert isinstance(caught.value.__cause__, InvalidRequest)
    assert caught.value.__cause__.reason == "OUTPUT_GONE"


async def test_says_how_it_was_settled(service: Service, client: AsyncClient) -> None:
    tenant = await service.tenant()
    proxy = TcpProxy(service.address)
    async with (
        AsyncClient(service.address, tenant.secret) as one,
        proxy.open(),
        AsyncClient(proxy.address, tenant.secret) as other,
    ):
        started = one.generate(
            MODEL,
            token_ids=PROMPT,
            max_output_tokens=3000,
            ignore_eos=True,
            keep_on_disconnect=0.05,
        )
        await anext(started)
        attached = other.attach(started.request_id, resume_s=60)
        await anext(attached)
        proxy.closed_count = 10**6
        proxy.cut()
        while not await is_forgotten(one, started.request_id):  # noqa: ASYNC110  # at the server
            await asyncio.sleep(POLL_S)
        proxy.closed_count = 0
        with pytest.raises(IncompleteGeneration, match=r"settled \(cancelled\)") as caught:
            await attached.wait()
        recorded = await one.get_generation(started.request_id)
    assert caught.value.partial is not None
    assert caught.value.partial.usage == recorded.usage
    assert caught.value.partial.cost == recorded.cost
    assert isinstance(caught.value.__cause__, AlreadyExists)


async def is_forgotten(client: AsyncClient, request_id: str) -> bool:
    """Return whether a request has ended and its output is no longer kept."""
    await settled(client, request_id)
    try:
        await client.attach(request_id).wait()
    except AlreadyExists:
        return True
    return False


async def test_asks_again_while_the_owner_is_away(service: Service, tight: Service) -> None:
    tenant = await service.tenant()
    async with (
        AsyncClient(tight.address, tenant.secret) as one,
        AsyncClient(service.address, tenant.secret) as other,
    ):
        started = one.generate(MODEL, token_ids=PROMPT, max_output_tokens=3000, ignore_eos=True)
        await anext(started)
        attached = other.attach(started.request_id, resume_s=60)
        deltas = [await anext(attached)]
        tight.kill()
        with pytest.raises(IncompleteGeneration, match=r"settled \(failed\)") as caught:
            deltas += [delta async for delta in attached]
        recorded = await other.get_generation(started.request_id)
        started.cancel()
    assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
    assert caught.value.partial is not None
    assert caught.value.partial.usage == recorded.usage
    assert isinstance(caught.value.__cause__, AlreadyExists)


async def test_costs_no_more_than_requested(client: AsyncClient) -> None:
    limit = Money("USD", 4 * INPUT_PICOS + 10 * OUTPUT_PICOS)
    result = await client.complete(
        MODEL, token_ids=PROMPT, max_output_tokens=3000, ignore_eos=True, max_cost=limit
    )
    assert result.finish_reason is FinishReason.COST_LIMIT
    assert result.usage.billed_token_count >= 10
    assert result.cost <= limit
    assert Money.of(limit.amount, "USD") == limit
    assert Money.of("-1234567890123456789.000000000001", "USD").picos == -(
        1234567890123456789 * 10**12 + 1
    )
    for wrong in ("", "1,5", "0.0000000000001", "NaN", 0.5):
        with pytest.raises(ValueError, match="whole picos"):
            Money.of(wrong, "USD")  # type: ignore[arg-type]  # a float, as a caller may pass
    with pytest.raises(InvalidRequest, match="max_cost"):
        await client.complete(MODEL, token_ids=PROMPT, max_cost=Money("USD", 1))


async def test_changes_limits_while_it_runs(client: AsyncClient) -> None:
    async with client.generate(
        MODEL, token_ids=PROMPT, max_output_tokens=4000, ignore_eos=True
    ) as generation:
        await anext(generation)
        with pytest.raises(InvalidRequest):
            await generation.update(max_output_tokens=100_000)
        limits = await generation.update(max_cost=Money("USD", 5000 * OUTPUT_PICOS))
        assert limits.max_output_tokens == 4000
        assert limits.max_cost == Money("USD", 5000 * OUTPUT_PICOS)
        assert (await generation.update(max_output_tokens=1)).max_output_tokens == 1
        result = await generation.wait()
    assert result.finish_reason is FinishReason.LENGTH
    assert result.usage.delivered_token_count < 4000
    with pytest.raises(FailedPrecondition):
        await generation.update(max_output_tokens=10)


async def test_reads_no_further_ahead_than_requested(service: Service, client: AsyncClient) -> None:
    whole = await client.complete(MODEL, token_ids=PROMPT, max_output_tokens=3000, ignore_eos=True)
    requested = client.generate(
        MODEL,
        token_ids=PROMPT,
        max_output_tokens=3000,
        ignore_eos=True,
        prefetch_tokens=8,
        keep_on_disconnect=None,
    )
    deltas = [await anext(requested)]
    # As many steps for both.
    beside = await client.complete(
        MODEL, token_ids=(20, 21), max_output_tokens=300, ignore_eos=True
    )
    assert beside.usage.delivered_token_count == 300
    assert len(requested.partial.token_ids) <= len(deltas[0].token_ids) + 8
    deltas += [delta async for delta in requested]
    assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
    assert requested.result.token_ids == whole.token_ids
    deltas, news, _ = await streamed_over_breaks(
        service, await service.tenant(), 2, prefetch_tokens=8
    )
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert len(news) == 2
    with pytest.raises(InvalidRequest, match="prefetch_tokens"):
        client.generate(MODEL, token_ids=PROMPT, prefetch_tokens=0)


async def test_takes_nothing_behind_its_cancel(client: AsyncClient) -> None:
    for keep_s in (None, 500):
        requested = client.generate(
            MODEL,
            token_ids=PROMPT,
            max_output_tokens=3000,
            ignore_eos=True,
            prefetch_tokens=8,
            keep_on_disconnect=keep_s,
        )
        first = await anext(requested)
        # As many steps for both.
        await client.complete(MODEL, token_ids=(20, 21), max_output_tokens=300, ignore_eos=True)
        requested.cancel()
        result = await requested.wait()
        assert result.finish_reason is FinishReason.CANCELLED
        assert len(result.token_ids) <= len(first.token_ids) + 8
        assert (result.usage.delivered_token_count == len(result.token_ids)) is (keep_s is None)
        assert (result.usage.delivered_token_count > 200) is (keep_s is not None)


async def test_ends_a_stalled_reader(service: Service, tight: Service) -> None:
    async with AsyncClient(tight.address, (await service.tenant()).secret) as client:
        requested = client.generate(
            MODEL,
            token_ids=PROMPT,
            max_output_tokens=2000,
            ignore_eos=True,
            prefetch_tokens=8,
            keep_on_disconnect=None,
        )
        requested.start()
        while True:  # nothing is read meanwhile
            with contextlib.suppress(NotFound):
                if await settled(client, requested.request_id) == "SLOW_CONSUMER":
                    break
            await asyncio.sleep(POLL_S)
        deltas = [delta async for delta in requested]
    result = requested.result
    assert result.finish_reason is FinishReason.SLOW_CONSUMER
    assert (
        result.usage.delivered_token_count
        == result.usage.billed_token_count
        == len(result.token_ids)
        == 8
    )
    assert tuple(token for delta in deltas for token in delta.token_ids) == result.token_ids


async def test_embeds(client: AsyncClient) -> None:
    quote = await client.quote_embed(ENCODER, ["the garden", [10, 11, 12]])
    result = await client.embed(ENCODER, ["the garden", [10, 11, 12]])
    assert quote.would_admit is True
    assert quote.input_token_count == result.usage.embedding_token_count
    assert quote.worst_case_cost == result.cost
    [encoder] = [model for model in await client.list_models() if model.name == ENCODER]
    assert [len(each.vector) for each in result.embeddings] == [DIMENSION, DIMENSION]
    assert result.embeddings[1].token_count == 3
    assert result.usage.embedding_token_count == sum(each.token_count for each in result.embeddings)
    assert result.cost.picos == result.usage.embedding_token_count * EMBEDDING_PICOS
    assert (encoder.task, encoder.embedding_dimension) == (ModelTask.EMBED, DIMENSION)
    with pytest.raises(InvalidRequest):
        await client.embed(MODEL, "the garden")


async def test_offers_every_field() -> None:
    server = ScriptedInference(lambda stream: scripted.answer(stream, "a"))
    every = GenerateOptions(
        max_output_tokens=5,
        max_cost=Money("USD", 1),
        temperature=1.0,
        top_p=0.5,
        top_k=3,
        seed=1,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={7: 1.0},
        stop="x",
        stop_token_ids=(8,),
        min_output_tokens=1,
        max_reasoning_tokens=1,
        ignore_eos=True,
        choice_count=2,
        beam_width=2,
        length_penalty=0.5,
        early_stopping=True,
        top_logprobs=1,
        usage_interval_tokens=1,
        labels={"a": "b"},
        end_user="alice",
        tier="batch",
        start_timeout=5,
        region="here",
        no_fallback=True,
        keep_on_disconnect=5,
        prefetch_tokens=10,
        tools=[Tool("t")],
        tool_choice="auto",
        single_tool_call=True,
    )
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        talk = GenerateOptions(
            json_schema={}, thinking=True, reasoning_effort="low", continues_last_message=True
        )
        await client.complete(MODEL, "Hi", **(every | talk))
        await client.complete(MODEL, **(every | GenerateOptions(text="Hi", regex="a")))
        await client.complete(MODEL, **(every | GenerateOptions(token_ids=(7,), lark="start: A")))
        for inputs in ("a", [[7]]):
            await client.embed(
                MODEL, inputs, truncate=True, labels={"a": "b"}, end_user="alice", tier="batch"
            )
    starts = [
        frame.start
        for stream in server.streams
        for message in stream.messages
        for frame in message.frames
    ]
    offered = {field for request in (*starts, *server.requests) for field in fields_set(request)}
    everything = {
        field
        for kind in (inference_pb.StartFrame, inference_pb.EmbedRequest)
        for field in fields_of(kind.DESCRIPTOR)
    }
    unoffered = json.loads(CONFORMANCE.with_name("unoffered.json").read_text())
    assert everything - offered == unoffered.keys()
    assert all(unoffered.values())


def fields_of(descriptor: Descriptor) -> Iterator[str]:
    """Yield the full names of the fields of a request."""
    for field in descriptor.fields:
        yield field.full_name
        if field.message_type is not None and field.message_type.full_name in NESTED:
            yield from fields_of(field.message_type)


def fields_set(message: ProtoMessage) -> Iterator[str]:
    """Yield the names of the fields that a request sets."""
    for field, value in message.ListFields():
        yield field.full_name
        if field.message_type is not None and field.message_type.full_name in NESTED:
            for each in [value] if isinstance(value, ProtoMessage) else value:
                yield from fields_set(each)


def test_refuses_half_a_certificate() -> None:
    with pytest.raises(InvalidRequest, match="client_key"):
        AsyncClient("https://weir.example", "key", client_certificate=b"some")
    with pytest.raises(InvalidRequest, match="no/such/file"):
        AsyncClient("https://weir.example", "key", root_certificates="no/such/file")


def test_verifies_receipts() -> None:
    versions = set()
    for line in RECEIPTS:
        receipt = Receipt.from_json(line)
        versions.add(receipt.version)
        faults = [each.fault for each in receipt_problems(receipt, RECEIPT_KEYS)]
        assert faults == ([] if receipt.key_id else [Fault.NOT_SIGNED])

    assert versions == {1, 2, 3, 4}
    nameless = re.sub(r',"end_user":.*}$', "}", RECEIPTS[8])
    assert "4711" not in nameless
    verify_receipt(Receipt.from_json(nameless), RECEIPT_KEYS)


def test_names_altered_receipts() -> None:
    for each in json.loads(CONFORMANCE.with_name("receipt_faults.json").read_text()):
        assert each["was"] in RECEIPTS[8]
        altered = Receipt.from_json(RECEIPTS[8].replace(each["was"], each["now"], 1))
        with pytest.raises(ReceiptInvalid, match=each["says"]) as refused:
            verify_receipt(altered, RECEIPT_KEYS)
        assert refused.value.problem.fault == each["fault"]

    for was, now in (('"version":4', '"version":5'), ('"part":0', '"part":1.5'), ("{", "")):
        with pytest.raises(ValueError, match=r"version: 5|part: 1\.5 is not|Extra data"):
            Receipt.from_json(RECEIPTS[8].replace(was, now, 1))
