"""OpenAI's client works unchanged, and its answers agree with the database."""

from __future__ import annotations

import asyncio
import time
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Literal

import httpx2
import openai
import pytest
from pydantic import BaseModel

from metering.core.models import QuotaDimension
from tests.e2e.openai_clients import (
    TO_THE_END,
    check_billed,
    connect,
    connect_async,
    extension,
    text_of,
    user_message,
)
from tests.service import (
    CONTEXT_WINDOW_TOKENS,
    INPUT_PICOS,
    MODEL,
    OUTPUT_PICOS,
    PLAIN_IDS,
    Service,
    Tenant,
    conversation,
    until,
)

HI: Any = {"model": MODEL, "messages": user_message("Hi"), "max_tokens": 2}


class Verdict(BaseModel):
    """Structured answer that even a model of random output completes."""

    mood: Literal["good", "bad"]
    sure: bool


async def test_a_chat_has_the_text_and_the_bill_of_grpc(service: Service) -> None:
    by_grpc, by_http = await service.tenant(), await service.tenant()
    drawn: dict[str, Any] = {"temperature": 0.9, "seed": 7, "top_p": 0.8}

    async with service.stream(by_grpc.secret) as stream:
        request_id = await stream.begin(
            conversation=conversation("How far is it?"), sampling=drawn, max_output_tokens=30
        )
        await stream.finished(request_id)
    with connect(service, by_http.secret) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=user_message("How far is it?"),
            max_tokens=30,
            extra_body=TO_THE_END,
            **drawn,
        )

    assert answer.choices[0].message.content == stream.text(request_id)
    assert answer.choices[0].finish_reason == "length"
    [there], here = service.database.events(by_grpc), check_billed(service, by_http, answer)
    for name in ("input", "cached_input", "generated", "delivered", "billed"):
        assert here[f"{name}_token_count"] == there[f"{name}_token_count"], name
    for name in ("cost_picos", "price_version_id", "outcome", "model"):
        assert here[name] == there[name], name
    amount = Decimal(there["cost_picos"]).scaleb(-12).normalize()
    assert extension(answer)["cost"]["amount"] == f"{amount:f}"
    [pace] = extension(answer)["timings"]
    assert 0 < pace["itl_p50_ms"] <= pace["itl_p99_ms"] <= pace["itl_max_ms"] < pace["total_ms"]
    assert pace["ttft_ms"] > 0 < pace["tokens_per_second"]
    assert pace["client_stall_ms"] >= 0


async def test_a_stream_is_the_whole_answer_and_its_usage(service: Service) -> None:
    whole_tenant, tenant = await service.tenant(), await service.tenant()
    requested: dict[str, Any] = {
        "model": MODEL,
        "messages": user_message("Tell me."),
        "max_completion_tokens": 40,
        "extra_body": TO_THE_END,
    }

    with connect(service, whole_tenant.secret) as client:
        whole = client.chat.completions.create(**requested)
    with (
        connect(service, tenant.secret) as client,
        client.chat.completions.create(
            **requested, stream=True, stream_options={"include_usage": True}
        ) as stream,
    ):
        *chunks, last = stream

    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk.usage for chunk in chunks} == {None}
    assert {chunk.id for chunk in chunks} == {last.id}
    assert last.choices == []
    assert last.usage == whole.usage
    check_billed(service, tenant, last)


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_usage_so_far_is_part_of_every_event_on_request(service: Service, kind: str) -> None:
    tenant = await service.tenant()
    requested: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 9,
        "n": 2,
        "temperature": 1.0,
        "stream": True,
        "extra_body": TO_THE_END
        | {"stream_options": {"continuous_usage_stats": True, "include_usage": True}},
    }

    with connect(service, tenant.secret) as client:
        stream = (
            client.chat.completions.create(messages=user_message("Tell me."), **requested)
            if kind == "chat"
            else client.completions.create(prompt="Tell me.", **requested)
        )
        *chunks, last = stream

    check_billed(service, tenant, last)
    for chunk in chunks:
        assert chunk.usage.prompt_tokens == last.usage.prompt_tokens
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
    for index in range(2):
        own = [chunk for chunk in chunks if chunk.choices[0].index == index]
        counts = [chunk.usage.completion_tokens for chunk in own]
        assert counts == sorted(counts)
        assert (counts[0] == 0, counts[-1]) == (kind == "chat", 9), "the role costs no token"
    assert last.usage.completion_tokens == 18


async def test_counted_input_tokens_are_those_of_the_response(service: Service) -> None:
    tenant = await service.tenant()
    requested: dict[str, Any] = {"model": MODEL, "input": "Tell me.", "instructions": "Be kind."}

    with connect(service, tenant.secret) as client:
        counted = client.responses.input_tokens.count(**requested)
        answer = client.responses.create(**requested, max_output_tokens=5)
        with pytest.raises(openai.NotFoundError) as unknown:
            client.responses.input_tokens.count(model="none", input="x")
        with pytest.raises(openai.BadRequestError) as empty:
            client.responses.input_tokens.count(model=MODEL, input=[])

    assert answer.usage is not None
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == answer.usage.input_tokens
    assert unknown.value.code == "model_not_found"
    assert empty.value.param == "input"
    assert len(service.database.events(tenant)) == 1, "counting is not billed"


async def test_several_choices_of_one_prompt_are_separate_and_billed_once(service: Service) -> None:
    tenant = await service.tenant()
    requested: dict[str, Any] = {
        "model": MODEL,
        "messages": user_message("Hm."),
        "n": 3,
        "temperature": 1.2,
        "seed": 3,
        "max_tokens": 12,
    }

    with connect(service, tenant.secret) as client:
        whole = client.chat.completions.create(**requested, extra_body=TO_THE_END)
        check_billed(service, tenant, whole)
        streamed = ["", "", ""]
        ends = ["", "", ""]
        for chunk in client.chat.completions.create(
            **requested, extra_body=TO_THE_END, stream=True
        ):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
                ends[choice.index] += choice.finish_reason or ""

    assert [choice.message.content for choice in whole.choices] == streamed
    assert len(set(streamed)) == 3
    assert ends == ["length"] * 3
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 36


async def test_structured_output_is_parsed_into_types(service: Service, tenant: Tenant) -> None:
    with connect(service, tenant.secret) as client:
        chat = client.chat.completions.parse(
            model=MODEL, messages=user_message("And?"), response_format=Verdict, max_tokens=400
        )
        response = client.responses.parse(
            model=MODEL, input="And?", text_format=Verdict, max_output_tokens=400
        )
        with client.responses.stream(
            model=MODEL, input="And?", text_format=Verdict, max_output_tokens=400
        ) as stream:
            streamed = stream.get_final_response()
        anything = client.chat.completions.create(
            model=MODEL,
            messages=user_message("And?"),
            response_format={"type": "json_object"},
            max_tokens=5,
        )

    assert isinstance(chat.choices[0].message.parsed, Verdict)
    assert chat.choices[0].finish_reason == "stop"
    assert response.output_parsed == chat.choices[0].message.parsed == streamed.output_parsed
    assert (anything.choices[0].message.content or "").lstrip().startswith("{")


async def test_a_response_reports_what_was_requested_and_what_it_came_to(service: Service) -> None:
    tenant, same = await service.tenant(), await service.tenant()
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "One"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Two", "annotations": []}],
        },
        {"role": "user", "content": "Three"},
    ]

    with connect(service, tenant.secret) as client:
        response = client.responses.create(
            model=MODEL,
            instructions="Be brief.",
            input=turns,
            max_output_tokens=9,
            metadata={"team": "x"},
            extra_body=TO_THE_END,
        )
    with connect(service, same.secret) as client:
        messages: list[Any] = [{"role": "developer", "content": "Be brief."}, *user_message("One")]
        messages += [{"role": "assistant", "content": "Two"}, *user_message("Three")]
        chat = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=9, extra_body=TO_THE_END
        )

    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.metadata == {"team": "x"}
    assert response.usage is not None
    [event] = service.database.events(tenant)
    assert event["labels"] == {"team": "x"}
    assert response.usage.input_tokens == event["input_token_count"]
    assert response.usage.output_tokens == 9
    assert extension(response)["cost"]["picos"] == event["cost_picos"]


async def test_the_events_of_a_response_are_numbered_and_in_order(service: Service) -> None:
    tenant = await service.tenant()

    with connect(service, tenant.secret) as client:
        events: list[Any] = list(
            client.responses.create(
                model=MODEL, input="Go on", max_output_tokens=8, stream=True, extra_body=TO_THE_END
            )
        )

    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(delta.delta for delta in deltas)
    assert text == events[-4].text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == 8


async def test_completions_take_prompts_in_every_form_and_answer_each(service: Service) -> None:
    tenant = await service.tenant()
    ids = list(PLAIN_IDS[:10])

    with connect(service, tenant.secret) as client:
        alone = client.completions.create(
            model=MODEL, prompt=ids, max_tokens=7, extra_body=TO_THE_END
        )
        text = client.completions.create(
            model=MODEL, prompt="The hotel", max_tokens=7, extra_body=TO_THE_END
        )
        both = client.completions.create(
            model=MODEL, prompt=[ids, [7]], max_tokens=7, extra_body=TO_THE_END
        )
        streamed = ["", ""]
        for chunk in client.completions.create(
            model=MODEL,
            prompt=["The hotel", "Other"],
            max_tokens=7,
            extra_body=TO_THE_END,
            stream=True,
        ):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text

    assert both.choices[0].text == alone.choices[0].text
    assert [choice.index for choice in both.choices] == [0, 1]
    assert streamed[0] == text.choices[0].text
    assert both.usage is not None
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (11, 14)
    events = service.database.events(tenant)
    billed = {str(event["request_id"]): event["cost_picos"] for event in events}
    total = sum(billed[each] for each in extension(both)["request_ids"])
    assert extension(both)["cost"]["picos"] == total


async def test_logprobs_name_every_token_and_its_bytes(service: Service, tenant: Tenant) -> None:
    requested: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "extra_body": TO_THE_END}

    with connect(service, tenant.secret) as client:
        chat = client.chat.completions.create(
            **requested, messages=user_message("Zoë"), logprobs=True, top_logprobs=3
        )
        plain = client.completions.create(**requested, prompt="Zoë", logprobs=2)
        response = client.responses.create(
            model=MODEL,
            input="Zoë",
            max_output_tokens=12,
            include=["message.output_text.logprobs"],
            extra_body=TO_THE_END,
        )

    assert chat.choices[0].logprobs is not None
    tokens = chat.choices[0].logprobs.content or []
    assert len(tokens) == 12
    assert all(len(each.top_logprobs) == 3 for each in tokens)
    assert all(each.top_logprobs[0].token == each.token for each in tokens), "greedy"
    data = b"".join(bytes(token.bytes or []) for token in tokens)
    assert data.decode(errors="replace") == chat.choices[0].message.content
    columns = plain.choices[0].logprobs
    assert columns is not None
    assert columns.tokens is not None
    assert columns.text_offset == [len("".join(columns.tokens[:index])) for index in range(12)]
    content: Any = response.output[0]
    assert [each.token for each in content.content[0].logprobs] == [each.token for each in tokens]


async def test_lm_eval_scores_continuations_by_the_echo(service: Service, tenant: Tenant) -> None:
    """The body is that of `local-completions`; it reads `token_logprobs[ctxlen:-1]`."""
    prompts = [list(PLAIN_IDS[start : start + 30]) for start in (0, 50)]
    requested: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "seed": 1234, "temperature": 0}

    with connect(service, tenant.secret) as client:
        client.completions.create(**requested, prompt=prompts[0])  # cached from now on
        answer = client.completions.create(**requested, prompt=prompts, logprobs=1, echo=True)
        steps = [
            client.completions.create(**requested, prompt=prompts[0][:count], logprobs=1)
            for count in (1, 15, 30)
        ]
        text = client.completions.create(**requested, prompt="Zoë", echo=True)

    for choice, prompt in zip(answer.choices, prompts, strict=True):
        columns: Any = choice.logprobs
        assert [len(each) for each in columns.model_dump().values()] == [31] * 4
        assert (columns.token_logprobs[0], columns.top_logprobs[0]) == (None, None)
        named = [*zip(columns.tokens, columns.top_logprobs, columns.token_logprobs, strict=True)]
        # The most likely token, and the one that is there
        assert all(top[token] == logprob and len(top) <= 2 for token, top, logprob in named[1:])
        assert "".join(columns.tokens) == choice.text
        assert len(columns.tokens) == len(prompt) + 1
    columns = answer.choices[0].logprobs
    for count, step in zip((1, 15, 30), steps, strict=True):
        alone: Any = step.choices[0].logprobs
        [(token, logprob)] = alone.top_logprobs[0].items()
        assert columns.top_logprobs[count][token] == pytest.approx(logprob, abs=1e-4)
    assert text.choices[0].text.startswith("Zoë")
    assert text.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (60, 2)
    details = answer.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 0, "every token is computed"
    event = service.database.event(tenant, extension(answer)["request_ids"][0])
    assert event["cost_picos"] == 30 * INPUT_PICOS + OUTPUT_PICOS


async def test_stop_sequences_penalties_and_biases_reach_the_engine(service: Service) -> None:
    tenant = await service.tenant()
    requested: Any = {"model": MODEL, "messages": user_message("Stop!"), "max_tokens": 20}

    with connect(service, tenant.secret) as client:
        free = (
            client.chat.completions.create(**requested, extra_body=TO_THE_END)
            .choices[0]
            .message.content
            or ""
        )
        stopped = client.chat.completions.create(**requested, stop=free[4:6], extra_body=TO_THE_END)
        biased = client.chat.completions.create(
            **requested, logit_bias={"11": 100}, extra_body=TO_THE_END
        )
        penalised = client.chat.completions.create(
            **requested,
            logit_bias={"11": 100},
            presence_penalty=2.0,
            frequency_penalty=2.0,
            extra_body=TO_THE_END,
        )

    assert stopped.choices[0].message.content == free[: free.index(free[4:6])]
    assert stopped.choices[0].finish_reason == "stop"
    assert extension(stopped)["finish_reasons"] == ["STOP_SEQUENCE"]
    assert biased.choices[0].message.content == service.tokenizer.decode([11] * 20)
    assert penalised.choices[0].message.content == biased.choices[0].message.content, "outweighed"


async def test_labels_hold_caller_and_reason(service: Service, tenant: Tenant) -> None:
    with connect(service, tenant.secret) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=user_message("Hi"),
            max_tokens=2,
            user="u-7",
            metadata={"feature": "search"},
            service_tier="flex",
        )

    [event] = service.database.events(tenant)
    assert event["labels"] == {"feature": "search"}
    assert event["end_user_id"] is not None
    assert answer.service_tier == "flex"


async def test_models_are_listed_and_looked_up(service: Service, tenant: Tenant) -> None:
    with connect(service, tenant.secret) as client:
        [model] = client.models.list().data
        same = client.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError) as unknown:
            client.models.retrieve("gpt-x")

    assert model == same
    assert (model.id, model.owned_by, model.object) == (MODEL, "weir", "model")
    assert extension(model)["context_window_tokens"] == CONTEXT_WINDOW_TOKENS
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


async def test_the_client_waits_as_long_as_a_limit_says(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.CONCURRENT_REQUESTS: 1})
    answers: list[tuple[float, httpx2.Response]] = []

    async def note(response: httpx2.Response) -> None:
        answers.append((time.monotonic(), response))
        if response.status_code == 429:
            await running.close()  # the slot is free when the client retries

    async with (
        connect_async(service, tenant.secret) as client,
        connect_async(
            service,
            tenant.secret,
            max_retries=20,
            http_client=httpx2.AsyncClient(event_hooks={"response": [note]}),
        ) as patient,
    ):
        for _ in range(6):  # needed to predict how long a request takes
            await client.completions.create(model=MODEL, prompt="Hi", max_tokens=1)
        running = await client.chat.completions.create(
            model=MODEL,
            messages=user_message("Long"),
            max_tokens=4000,
            stream=True,
            extra_body=TO_THE_END,
        )
        await anext(aiter(running))
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(**HI)
        answer = await patient.chat.completions.create(**HI)

    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.type == "requests"
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert answer.choices[0].message.content is not None
    refusals = [(at, response) for at, response in answers if response.status_code == 429]
    assert refusals
    for (at, response), (later, _) in zip(refusals, answers[1:], strict=False):
        assert later - at >= int(response.headers["retry-after-ms"]) / 1000
    await service.no_hold_left(tenant)


async def test_every_answer_reports_what_is_left_of_the_limits(service: Service) -> None:
    tenant = await service.tenant(
        {QuotaDimension.TOKENS_PER_MONTH: 1000, QuotaDimension.REQUESTS_PER_MINUTE: 50}
    )

    with connect(service, tenant.secret) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=user_message("Hi"), max_tokens=10, extra_body=TO_THE_END
        )
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt=list(PLAIN_IDS) * 4, max_tokens=1)

    usage = raw.parse().usage
    assert usage is not None
    held = usage.prompt_tokens + 10
    assert raw.headers["x-ratelimit-limit-tokens"] == "1000"
    assert raw.headers["x-ratelimit-remaining-tokens"] == str(1000 - held)
    assert raw.headers["x-ratelimit-reset-tokens"][-1] == "s"
    assert raw.headers["x-ratelimit-limit-requests"] == "50"
    assert int(raw.headers["x-ratelimit-remaining-requests"]) <= 49
    assert refused.value.code == refused.value.type == "insufficient_quota"
    assert refused.value.response.headers["x-ratelimit-remaining-tokens"] == str(1000 - held)
    assert refused.value.response.headers["x-should-retry"] == "false"


async def test_a_key_without_permission_is_refused_with_the_reason(service: Service) -> None:
    tenant = await service.tenant()
    _, admin = await service.new_key(tenant, "billing")

    with (
        connect(service, "wk_abcdefgh_" + "x" * 43) as stranger,
        pytest.raises(openai.AuthenticationError) as unknown,
    ):
        stranger.models.list()
    with (
        connect(service, admin) as reader,
        pytest.raises(openai.PermissionDeniedError) as forbidden,
    ):
        reader.chat.completions.create(model=MODEL, messages=user_message("Hi"))

    assert unknown.value.code == "invalid_api_key"
    assert forbidden.value.code == "insufficient_permissions"


async def test_the_same_idempotency_key_is_billed_once(service: Service, tenant: Tenant) -> None:
    request_id = str(uuid.uuid4())

    with connect(service, tenant.secret) as client:
        for key in (request_id, "order 66".replace(" ", "-")):
            requested: dict[str, Any] = {
                "model": MODEL,
                "messages": user_message("Hi"),
                "extra_headers": {"Idempotency-Key": key},
            }
            raw = client.chat.completions.with_raw_response.create(**requested, max_tokens=3)
            with pytest.raises(openai.ConflictError) as settled:
                client.chat.completions.create(**requested, max_tokens=3)
            with pytest.raises(openai.ConflictError) as reused:
                client.chat.completions.create(**requested, max_tokens=4)
            assert settled.value.code == "request_settled"
            assert reused.value.code == "request_id_reused"
            assert settled.value.response.headers["x-should-retry"] == "false"
            assert settled.value.request_id == raw.headers["x-request-id"]

    first, second = service.database.events(tenant)
    assert str(first["request_id"]) == request_id
    assert str(second["request_id"]) == raw.headers["x-request-id"]


async def test_fifty_streams_at_once_are_fifty_answers(service: Service, tenant: Tenant) -> None:
    async with connect_async(service, tenant.secret) as client:

        async def ask(index: int) -> tuple[str, int]:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=user_message(f"Question {index % 5}"),
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=TO_THE_END,
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage is not None
            return text_of(chunks), chunks[-1].usage.completion_tokens

        answers = await asyncio.gather(*map(ask, range(50)))

    assert {tokens for _, tokens in answers} == {20}
    assert all(answers[index] == answers[index % 5] for index in range(50))
    assert sum(service.database.delivered(tenant).values()) == 50 * 20
    await service.no_hold_left(tenant)


async def test_prompts_of_a_request_fail_together_and_are_free(service: Service) -> None:
    tenant = await service.tenant()

    with (
        connect(service, tenant.secret) as client,
        pytest.raises(openai.BadRequestError) as refused,
    ):
        client.completions.create(
            model=MODEL, prompt=[[7, 8], [7] * CONTEXT_WINDOW_TOKENS, [9]], max_tokens=50
        )

    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "prompt"
    await until(lambda: "held" not in service.database.holds(tenant), "the others to end")
    assert service.database.events(tenant) == []


async def test_a_limit_per_week_refuses_until_monday_and_headers_show_the_tightest(
    service: Service,
) -> None:
    tenant = await service.tenant(
        {
            QuotaDimension.REQUESTS_PER_HOUR: 50,
            QuotaDimension.REQUESTS_PER_WEEK: 2,
            QuotaDimension.INPUT_TOKENS_PER_WEEK: 10**6,
            QuotaDimension.COST_PICOS_PER_WEEK: 10**15,
        }
    )
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0)
    monday = today + timedelta(days=7 - today.weekday())

    with connect(service, tenant.secret) as client:
        ask = partial(client.chat.completions.with_raw_response.create, **HI)
        left = [ask().headers["x-ratelimit-remaining-requests"] for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as refused:
            ask()

    assert left == ["1", "0"]
    assert refused.value.code == "insufficient_quota"
    assert "may make 2 requests per week and has made 2." in refused.value.message
    headers = refused.value.response.headers
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    retry_at = datetime.now(UTC) + timedelta(seconds=int(headers["retry-after"]))
    assert abs(retry_at - monday) < timedelta(minutes=1), "some seconds into the next week"
    await service.no_hold_left(tenant)
