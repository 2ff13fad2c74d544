"""`Embed`: each vector is billed exactly once; refused or lost ones are free and leave no trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import openai
import psycopg
import pytest
from google.rpc import error_details_pb2
from grpc import StatusCode
from weir.v1 import billing_service_pb2
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc
from weir_client import AlreadyExists, Client, InvalidRequest, ModelTask

from inference.adapters.remote_settings import Service as RemoteService
from inference.text.tokenizer import Tokenizer
from metering.core.models import QuotaDimension
from metering.ledger.rating import rate_all_pending
from metering.store.db import psycopg_conninfo
from metering.tenants.api_keys import rotate_api_key
from tests.calls import Calls, calls
from tests.e2e.conftest import Serve
from tests.e2e.encoders import ENCODER, PICOS, price_encoders
from tests.e2e.openai_clients import connect, extension, user_message
from tests.forked_workers import children_of
from tests.inference.encoder_checkpoints import (
    DIMENSION,
    INPUT_TOKENS_MAX,
    PLAIN_IDS,
    make_random_encoder,
)
from tests.remote_servers.certificates import make_certificates
from tests.remote_servers.serving import server_process
from tests.service import MODEL, Service, Tenant, bearer, refused, until, wait_for

FAR = "far"  # same checkpoint, on a remote server
TEXTS = ("the garden is near the sea", "a hotel with breakfast", "poison")
REASONS = {"model": "MODEL_MISMATCH", "inputs[1]": "CONTEXT_EXCEEDED"}  # of an invalid field
LONG = "the garden " * INPUT_TOKENS_MAX


@pytest.fixture(scope="module")
def encoder_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def embedding(
    serve: Serve, tmp_path_factory: pytest.TempPathFactory, model: Path, encoder_directory: Path
) -> Iterator[Service]:
    """Yield a service with a generating and an embedding model, local and on a remote server."""
    certificates = make_certificates(tmp_path_factory.mktemp("remote") / "certificates")
    with server_process(encoder_directory, certificates) as server:
        service = serve(
            model,
            encoders={ENCODER: encoder_directory},
            remote_encoders={FAR: str(server.target(RemoteService.VLLM))},
            hold_expiry_s=3600.0,
        )
        for name in (ENCODER, FAR):
            wait_for(
                lambda name=name: service.serving(f"engine/{name}"),  # type: ignore[misc]
                "the encoders to be loaded",
            )
        yield service
        assert service.stop() == 0, service.log[-4000:]
        assert service.database.held_hold_count() == 0


async def priced_tenant(
    service: Service, quotas: dict[QuotaDimension, int] | None = None, **options: Any
) -> Tenant:
    """Return a tenant with a price for the encoder."""
    tenant = await service.tenant(quotas, **options)
    await price_encoders(service, ENCODER, FAR)
    return tenant


def request_of(*texts: str | Sequence[int], model: str = ENCODER, **fields: Any) -> pb.EmbedRequest:
    """Return a request with a new id."""
    inputs = [
        pb.EmbedInput(text=t) if isinstance(t, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=t))
        for t in texts
    ]
    return pb.EmbedRequest(
        **({"request_id": str(uuid.uuid4()), "model": model, "inputs": inputs} | fields)
    )


def encoder_pid(service: Service) -> int | None:
    """Return the process id of the encoder's worker."""
    return next(iter(children_of(service.pid, "inference.encoder.worker")), None)


@contextlib.contextmanager
def stopped(service: Service) -> Iterator[int]:
    """Suspend the encoder during the block, unless it is gone at the end."""
    pid = wait_for(lambda: encoder_pid(service), "the encoder's process")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def held(service: Service, tenant: Tenant) -> None:
    """Wait until a request of the tenant has its hold."""
    await until(lambda: service.database.holds(tenant).get("held"), "the hold")


async def nothing_billed(service: Service, tenant: Tenant) -> None:
    """Wait until all holds have ended; check that nothing is billed."""
    await service.no_hold_left(tenant)
    assert service.database.events(tenant) == []
    assert all(counts == (0, 0) for counts in service.database.counters(tenant).values()), (
        service.database.counters(tenant)
    )


async def test_a_remote_encoder_gives_the_same_vectors_and_bill(embedding: Service) -> None:
    """Tokenizer and sizes come from the remote server."""
    tenant = await priced_tenant(embedding, {QuotaDimension.TOKENS_PER_MINUTE: 60})
    async with calls(embedding, tenant.secret) as call:
        here, far = [await call("Embed", request_of(*TEXTS, model=name)) for name in (ENCODER, FAR)]
        too_much = await call.refused("Embed", request_of(*TEXTS * 5, model=FAR))
        too_long = await call.refused("Embed", request_of(LONG, model=FAR))

    assert (far.usage, far.cost, far.price_version > 0) == (here.usage, here.cost, True)
    for reported, true in zip(far.embeddings, here.embeddings, strict=True):
        assert reported.token_count == true.token_count
        assert max(abs(a - b) for a, b in zip(reported.vector, true.vector, strict=True)) < 1e-5
    assert too_much.reason == "QUOTA_EXCEEDED"
    assert (too_long.code, too_long.fields) == (StatusCode.INVALID_ARGUMENT, ["inputs[0]"])
    assert [event["model"] for event in embedding.database.events(tenant)] == [ENCODER, FAR]


async def test_tokens_are_billed_once_a_month(embedding: Service, encoder_directory: Path) -> None:
    tenant = await priced_tenant(
        embedding, {QuotaDimension.TOKENS_PER_MINUTE: 10_000}, scopes=("inference", "billing")
    )
    tokenizer = Tokenizer(encoder_directory)
    expected = [len(tokenizer.encode(text)) for text in TEXTS]
    async with calls(embedding, tenant.secret) as call:
        request = request_of(*TEXTS, labels={"job": "index"})
        answer = await call("Embed", request)
        again = await call("Embed", request_of(*TEXTS[::-1]))
        await rate_all_pending(embedding.sessions)
        month = f"{datetime.now(UTC):%Y-%m}"
        report = await call("GetMonthReport", organization=tenant.name, month=month)
        found = await call("GetGeneration", request_id=request.request_id)

    total = sum(expected)
    assert [each.token_count for each in answer.embeddings] == expected
    assert all(len(each.vector) == DIMENSION and not each.truncated for each in answer.embeddings)
    for one, other in zip(answer.embeddings, reversed(again.embeddings), strict=True):
        assert list(one.vector) == pytest.approx(list(other.vector), abs=1e-5)
    length = sum(number * number for number in answer.embeddings[0].vector)
    assert length == pytest.approx(1.0, abs=1e-5)
    assert answer.usage.embedding_token_count == total
    assert answer.usage.input_token_count == answer.usage.billed_token_count == 0
    assert (answer.cost.currency_code, answer.cost.picos) == ("USD", total * PICOS)
    assert answer.timings.prefill_ms > 0
    assert answer.timings.total_ms >= answer.timings.prefill_ms
    assert [receipt.embedding_token_count for receipt in answer.receipts] == [total]
    events = embedding.database.events(tenant)
    assert [event["embedding_token_count"] for event in events] == [total, total]
    assert [event["cost_picos"] for event in events] == [total * PICOS] * 2
    assert found.generation.outcome == "STOP"
    assert dict(found.generation.labels) == {"job": "index"}
    [line] = report.lines
    assert line.token_kind == billing_service_pb2.TOKEN_KIND_EMBEDDING
    assert (line.token_count, line.amount.picos) == (2 * total, 2 * total * PICOS)
    assert report.reconciliation.balanced
    assert embedding.database.counters(tenant) == {"tokens_per_minute": (2 * total, 0)}


async def test_invalid_embedding_requests_are_refused_by_field_and_free(embedding: Service) -> None:
    tenant = await priced_tenant(embedding, {QuotaDimension.TOKENS_PER_MINUTE: 10_000})
    wrong = [
        (request_of("a", model=MODEL), "model"),
        (request_of("a", request_id="x"), "request_id"),
        (request_of(), "inputs"),
        (request_of("a", ""), "inputs[1].text"),
        (request_of("a", []), "inputs[1].token_ids.ids"),
        (request_of([10_000]), "inputs[0].token_ids.ids"),
        (request_of(inputs=[pb.EmbedInput()]), "inputs[0]"),
        (request_of("a", LONG), "inputs[1]"),
        (request_of("a", truncation=7), "truncation"),
        (request_of("a", tier=7), "tier"),
        (request_of(*["a"] * 2049), "inputs"),
    ]
    async with calls(embedding, tenant.secret) as call:
        unknown = await call.refused("Embed", request_of("a", model="nobody"))
        for request, field in wrong:
            refusal = await call.refused("Embed", request)
            reason = REASONS.get(field, "FIELD_INVALID")
            assert (refusal.code, refusal.reason) == (StatusCode.INVALID_ARGUMENT, reason)
            assert refusal.fields[0] == field
        assert refusal.status.message.startswith("inputs: this model takes at most 2048")

        cut = await call("Embed", request_of(LONG, truncation=pb.TRUNCATION_END))

    assert (unknown.code, unknown.reason) == (StatusCode.NOT_FOUND, "MODEL_UNKNOWN")
    [embedded] = cut.embeddings
    assert (embedded.token_count, embedded.truncated) == (INPUT_TOKENS_MAX, True)
    [event] = embedding.database.events(tenant)
    assert event["embedding_token_count"] == INPUT_TOKENS_MAX


async def test_each_model_says_which_call_it_serves(embedding: Service) -> None:
    tenant = await priced_tenant(embedding)
    async with embedding.stream(tenant.secret) as stream:
        refusal = await stream.failed(await stream.begin(model=ENCODER))
    async with calls(embedding, tenant.secret) as call:
        models = (await call("ListModels")).models
        counted = await call("CountTokens", model=ENCODER, text="the sea")

    assert (refusal.code, refusal.reason) == (StatusCode.INVALID_ARGUMENT, "MODEL_MISMATCH")
    assert "serves Embed" in refusal.status.message
    assert [
        (each.name, each.task, each.embedding_dimension, each.embedding_input_count_max)
        for each in models
    ] == [
        (ENCODER, pb.MODEL_TASK_EMBED, DIMENSION, 2048),
        (FAR, pb.MODEL_TASK_EMBED, DIMENSION, 2048),
        (MODEL, pb.MODEL_TASK_GENERATE, 0, 0),
    ]
    assert models[0].context_window_tokens == INPUT_TOKENS_MAX
    assert models[0].price.embedding_picos_per_token == PICOS
    assert counted.input_token_count == 4


async def test_a_quote_is_what_the_call_then_is_and_leaves_no_trace(embedding: Service) -> None:
    tenant = await priced_tenant(embedding, {QuotaDimension.TOKENS_PER_MINUTE: 30})
    async with embedding.client(tenant.secret) as client:
        quote = await client.quote_embed(ENCODER, TEXTS)
        refused_one = await client.quote_embed(ENCODER, TEXTS * 3)
        cut = await client.quote_embed(ENCODER, LONG, truncate=True)
        with pytest.raises(InvalidRequest) as long:
            await client.quote_embed(ENCODER, LONG)
        assert embedding.database.holds(tenant) == {}
        result = await client.embed(ENCODER, TEXTS)
    async with calls(embedding, tenant.secret) as call:
        start = pb.StartFrame(model=MODEL)
        undecided = await call.refused("Quote", start=start, embed=request_of(*TEXTS))

    assert quote.would_admit
    assert quote.input_token_count == result.usage.embedding_token_count
    assert quote.max_output_token_count == 0
    assert quote.worst_case_cost == quote.expected_cost == result.cost
    assert not refused_one.would_admit
    assert [each.dimension.value for each in refused_one.failing_quotas] == ["tokens-per-minute"]
    assert (cut.input_token_count, cut.would_admit) == (INPUT_TOKENS_MAX, False)
    assert [violation.field for violation in long.value.field_violations] == ["inputs[0]"]
    assert (undecided.code, undecided.fields) == (StatusCode.INVALID_ARGUMENT, ["embed"])


async def test_a_quota_without_room_refuses_and_leaves_no_trace(embedding: Service) -> None:
    tenant = await priced_tenant(
        embedding, {QuotaDimension.TOKENS_PER_MINUTE: 6, QuotaDimension.REQUESTS_PER_MINUTE: 5}
    )
    async with calls(embedding, tenant.secret) as call:
        refusal = await call.refused("Embed", request_of(*TEXTS))

    assert (refusal.code, refusal.reason) == (StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    assert refusal.info.metadata["dimension"] == "tokens-per-minute"
    assert refusal.detail(error_details_pb2.QuotaFailure) is not None
    assert embedding.database.holds(tenant) == {}
    await nothing_billed(embedding, tenant)


async def test_an_id_is_billed_once(embedding: Service) -> None:
    tenant = await priced_tenant(embedding)
    request = request_of(*TEXTS)
    other = request_of("another", request_id=request.request_id)
    async with calls(embedding, tenant.secret) as call:
        answer = await call("Embed", request)
        again = await call.refused("Embed", request)
        reused = await call.refused("Embed", other)

    assert (again.code, again.reason) == (StatusCode.ALREADY_EXISTS, "REQUEST_SETTLED")
    assert again.info.metadata["embedding_token_count"] == str(answer.usage.embedding_token_count)
    assert (reused.code, reused.reason) == (StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
    assert len(embedding.database.events(tenant)) == 1


async def test_an_interrupted_embedding_pays_for_texts_begun(embedding: Service) -> None:
    """A call that ends while queued for the encoder only counts, whatever the cause."""
    limits = {QuotaDimension.TOKENS_PER_MINUTE: 1000, QuotaDimension.CONCURRENT_REQUESTS: 3}
    gone, late, revoked, rotated = [await priced_tenant(embedding, limits) for _ in range(4)]
    async with embedding.channel() as channel:
        stub: Any = pb_grpc.InferenceServiceStub(channel)
        with stopped(embedding):
            hanging_up = stub.Embed(request_of(*TEXTS), metadata=bearer(gone.secret))
            timing_out = stub.Embed(request_of(*TEXTS), metadata=bearer(late.secret), timeout=2.0)
            ended = stub.Embed(request_of(*TEXTS), metadata=bearer(revoked.secret))
            replaced = stub.Embed(request_of(*TEXTS), metadata=bearer(rotated.secret))
            calls = asyncio.gather(*(refused(each) for each in (timing_out, ended, replaced)))
            for tenant in (gone, revoked, rotated):
                await held(embedding, tenant)
            hanging_up.cancel()
            await embedding.revoke(revoked.key)
            async with embedding.session() as session:
                await rotate_api_key(
                    session, api_key=rotated.key.prefix, overlap=timedelta(0), actor="test"
                )
            out_of_time, *of_ended_keys = await calls
            for tenant in (gone, late, revoked, rotated):
                await embedding.no_hold_left(tenant)

        events = [
            event
            for tenant in (gone, late, revoked, rotated)
            for event in embedding.database.events(tenant)
        ]
        assert [event["outcome"] for event in events] == ["cancelled"] * 4
        assert out_of_time.code is StatusCode.DEADLINE_EXCEEDED
        reported = {(refusal.code, refusal.reason) for refusal in of_ended_keys}
        assert reported == {(StatusCode.UNAUTHENTICATED, "KEY_REVOKED")}
        answer = await stub.Embed(request_of(*TEXTS), metadata=bearer(gone.secret))
    whole = answer.usage.embedding_token_count
    billed = [event["embedding_token_count"] for event in events]
    assert set(billed) <= {0, whole}
    assert whole in billed, "the encoder has begun with somebody's texts"
    assert [event["cost_picos"] for event in events] == [PICOS * count for count in billed]
    for tenant, count in zip(
        (gone, late, revoked, rotated), (billed[0] + whole, *billed[1:]), strict=True
    ):
        assert embedding.database.counters(tenant)["tokens_per_minute"][1] == 0
        tokens = sum(event["embedding_token_count"] for event in embedding.database.events(tenant))
        assert tokens == count


async def test_the_client_library_embeds(embedding: Service) -> None:
    tenant = await priced_tenant(embedding)

    def blocking(address: str) -> tuple[int, ModelTask]:
        with Client(address, tenant.secret, max_retries=0) as client:
            result = client.embed(ENCODER, "the sea")
            return len(result.vectors[0]), client.list_models()[0].task

    async with embedding.client(tenant.secret) as client:
        result = await client.embed(
            ENCODER,
            ["the sea", list(PLAIN_IDS)[:5], LONG],
            truncate=True,
            labels={"a": "b"},
            tier="batch",
        )
        with pytest.raises(AlreadyExists):
            await client.embed(ENCODER, "the sea", request_id=result.request_id)

    assert [each.token_count for each in result.embeddings] == [4, 5, INPUT_TOKENS_MAX]
    assert [each.truncated for each in result.embeddings] == [False, False, True]
    assert result.usage.embedding_token_count == 9 + INPUT_TOKENS_MAX
    assert result.cost.picos == result.usage.embedding_token_count * PICOS
    assert await asyncio.to_thread(blocking, embedding.address) == (DIMENSION, ModelTask.EMBED)


async def test_openais_client_gets_the_same_vectors_at_the_same_price(embedding: Service) -> None:
    tenant, by_http = (
        await priced_tenant(embedding),
        await priced_tenant(embedding, {QuotaDimension.TOKENS_PER_MONTH: 1000}),
    )

    async with calls(embedding, tenant.secret) as call:
        answer = await call("Embed", request_of(*TEXTS))
    with connect(embedding, by_http.secret) as client:
        # As base64.
        packed = client.embeddings.with_raw_response.create(
            model=ENCODER, input=list(TEXTS), user="u-1"
        )
        plain = client.embeddings.create(
            model=ENCODER,
            input=TEXTS[0],
            encoding_format="float",
            dimensions=DIMENSION,
            extra_headers={"Idempotency-Key": "once"},
        )
        with pytest.raises(openai.ConflictError):
            client.embeddings.create(
                model=ENCODER, input=TEXTS[0], extra_headers={"Idempotency-Key": "once"}
            )
        with pytest.raises(openai.BadRequestError) as shortened:
            client.embeddings.create(model=ENCODER, input=TEXTS[0], dimensions=DIMENSION - 1)
        with pytest.raises(openai.BadRequestError) as long:
            client.embeddings.create(model=ENCODER, input=[TEXTS[0], LONG])
        cutting = {"truncate_prompt_tokens": -1}
        cut = client.embeddings.create(model=ENCODER, input=LONG, extra_body=cutting)
        with pytest.raises(openai.BadRequestError) as talkative:
            client.chat.completions.create(model=ENCODER, messages=user_message("Hi"))

    vectors = [each.embedding for each in packed.parse().data]
    assert vectors == [list(each.vector) for each in answer.embeddings]
    assert plain.data[0].embedding == vectors[0]
    assert packed.headers["x-ratelimit-limit-tokens"] == "1000"
    assert (shortened.value.param, long.value.code) == ("dimensions", "context_length_exceeded")
    assert "exceeds the context window" in long.value.message
    assert "set truncate to cut its end off" in long.value.message
    assert len(cut.data) == 1
    assert talkative.value.code == "model_mismatch"
    [there] = embedding.database.events(tenant)
    [here, other, _] = embedding.database.events(by_http)
    assert (here["embedding_token_count"], here["cost_picos"]) == (
        there["embedding_token_count"],
        there["cost_picos"],
    )
    assert here["embedding_token_count"] == packed.parse().usage.prompt_tokens
    assert (here["end_user_id"] is not None, here["labels"]) == (True, {})
    assert other["cost_picos"] == extension(plain)["cost"]["picos"]


@pytest.mark.faults
async def test_a_dead_encoder_bills_nothing_and_allows_a_retry(embedding: Service) -> None:
    tenant = await priced_tenant(embedding, {QuotaDimension.TOKENS_PER_MINUTE: 1000})
    request = request_of(*TEXTS)
    async with calls(embedding, tenant.secret) as call:
        async with asyncio.TaskGroup() as tasks:
            with stopped(embedding) as pid:
                embedded = tasks.create_task(call.refused("Embed", request))
                await held(embedding, tenant)
                os.kill(pid, signal.SIGKILL)
        refusal = embedded.result()

        assert (refusal.code, refusal.reason) == (StatusCode.UNAVAILABLE, "ENGINE_FAILED")
        assert refusal.info.metadata["retry_with"] == "same_request_id"
        assert refusal.detail(error_details_pb2.RetryInfo) is not None
        await nothing_billed(embedding, tenant)

        # Waits for the restarted encoder.
        answer = await call("Embed", request)

    assert [event["embedding_token_count"] for event in embedding.database.events(tenant)] == [
        answer.usage.embedding_token_count
    ]
    assert encoder_pid(embedding) != pid


@pytest.mark.faults
async def test_a_server_killed_before_settlement_bills_nothing(embedding: Service) -> None:
    """At `kill -9` one request waits for the encoder; another one, embedded, is being settled.

    The answer follows the settlement, so the clients have received nothing.
    """
    waits, leaves = [
        await priced_tenant(embedding, {QuotaDimension.TOKENS_PER_MINUTE: 1000}) for _ in range(2)
    ]
    async with embedding.channel() as channel, asyncio.TaskGroup() as tasks:
        with stopped(embedding):
            call = Calls(channel, leaves.secret)
            first = tasks.create_task(call.refused("Embed", request_of(*TEXTS)))
            await held(embedding, leaves)
            # It settles nothing while its hold is locked.
            with psycopg.connect(psycopg_conninfo(embedding.database_url)) as other:
                other.execute(
                    "SELECT 1 FROM holds WHERE organization_id = %s FOR UPDATE",
                    (leaves.organization_id,),
                )
                os.kill(wait_for(lambda: encoder_pid(embedding), "the encoder"), signal.SIGCONT)
                await until(
                    lambda: embedding.database.rows(
                        "SELECT 1 FROM pg_stat_activity"
                        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
                    ),
                    "the settlement to wait for the lock",
                )
                os.kill(wait_for(lambda: encoder_pid(embedding), "the encoder"), signal.SIGSTOP)
                call = Calls(channel, waits.secret)
                second = tasks.create_task(call.refused("Embed", request_of(*TEXTS)))
                await held(embedding, waits)
                embedding.kill()
            assert {(await first).code, (await second).code} == {StatusCode.UNAVAILABLE}
    embedding.start()
    wait_for(lambda: embedding.serving(f"engine/{ENCODER}"), "the encoder to be loaded")

    for tenant in (waits, leaves):
        await nothing_billed(embedding, tenant)
