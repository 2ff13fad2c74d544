"""Tokens over HTTP: ids in and out, log-probabilities of prompts, answers that have begun."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.openai_clients import connect, user_message
from tests.service import CONTEXT_WINDOW_TOKENS, MODEL, Service, Tenant

BEGUN = [*user_message("How far is it?"), {"role": "assistant", "content": "It is"}]
REQUESTED: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}


@pytest.fixture
def client(service: Service, tenant: Tenant) -> Iterator[openai.OpenAI]:
    with connect(service, tenant.secret) as client:
        yield client


def tokens_of(client: openai.OpenAI, **body: Any) -> list[int]:
    found: Any = client.post("/tokenize", body={"model": MODEL, **body}, cast_to=object)
    assert found["count"] == len(found["tokens"])
    tokens: list[int] = found["tokens"]
    return tokens


@pytest.mark.parametrize("mark", ["continue", "both", "prefix"])
def test_an_answer_continues_the_last_message(client: openai.OpenAI, mark: str) -> None:
    talk: Any = BEGUN
    more = {"continue_final_message": True}
    if mark == "both":
        more |= {"add_generation_prompt": False}
    if mark == "prefix":
        talk, more = [BEGUN[0], {**BEGUN[1], "prefix": True}], {}
    ids = tokens_of(client, messages=BEGUN, continue_final_message=True)
    by_ids = client.completions.create(**REQUESTED, prompt=ids)

    whole = client.chat.completions.create(**REQUESTED, messages=talk, extra_body=more)
    more = more | {"echo": True}
    echoed = client.chat.completions.create(**REQUESTED, messages=talk, extra_body=more)
    chunks = client.chat.completions.create(
        **REQUESTED, messages=talk, extra_body=more, stream=True
    )

    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(ids)
    assert whole.choices[0].message.content == by_ids.choices[0].text
    assert echoed.choices[0].message.content == f"It is{by_ids.choices[0].text}"
    streamed = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert streamed == echoed.choices[0].message.content


async def test_an_anthropic_message_continues_the_last_turn(
    service: Service, client: openai.OpenAI, tenant: Tenant
) -> None:
    body = {"model": MODEL, "max_tokens": 6, "temperature": 0, "messages": BEGUN}
    wanted = client.chat.completions.create(
        **REQUESTED,
        messages=BEGUN,  # type: ignore[arg-type]
        extra_body={"continue_final_message": True},
    )

    answer: Any = client.post("/messages", body=body, cast_to=object)
    counted: Any = client.post(
        "/messages/count_tokens", body={"model": MODEL, "messages": BEGUN}, cast_to=object
    )

    assert answer["content"][0]["text"] == wanted.choices[0].message.content
    assert wanted.usage is not None
    assert counted["input_tokens"] == wanted.usage.prompt_tokens
    blank = [BEGUN[0], {"role": "assistant", "content": "It is "}]
    with pytest.raises(openai.BadRequestError, match="blanks"):
        client.post("/messages", body=body | {"messages": blank}, cast_to=object)


@pytest.mark.parametrize(
    ("messages", "more", "param"),
    [
        (user_message("a"), {"continue_final_message": True}, "continue_final_message"),
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": True}, "add_generation"),
        (BEGUN, {"add_generation_prompt": False}, "add_generation_prompt"),
        (BEGUN, {"echo": True}, "echo"),
        ([{**BEGUN[1], "prefix": True}, *user_message("a")], {}, "messages[0].prefix"),
        ([BEGUN[0], {"role": "assistant", "content": " "}], {"continue_final_message": True}, "co"),
        (
            BEGUN,
            {"continue_final_message": True, "chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
        (
            BEGUN,
            {"continue_final_message": True, "thinking_token_budget": 5},
            "thinking_token_budget",
        ),
        (BEGUN, {"prompt_logprobs": 6}, "prompt_logprobs"),
        (BEGUN, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (BEGUN, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_continued_or_shown_is_refused_by_name(
    client: openai.OpenAI, messages: Any, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**REQUESTED, messages=messages, extra_body=more)

    assert (refused.value.param or "").startswith(param), refused.value


@pytest.mark.parametrize("count", [1, 2])
def test_answers_show_the_ids_of_their_tokens(client: openai.OpenAI, count: int) -> None:
    drawn = {"temperature": 0.9, "seed": 7, "n": count} if count > 1 else {}
    body = {"return_token_ids": True}
    prompt = tokens_of(client, messages=user_message("Zoë 🙂"))
    plain = tokens_of(client, prompt="Zoë 🙂")
    requested: Any = REQUESTED | drawn | {"extra_body": body}

    chat: Any = client.chat.completions.create(**requested, messages=user_message("Zoë 🙂"))
    chunks: list[Any] = [
        *client.chat.completions.create(**requested, messages=user_message("Zoë 🙂"), stream=True)
    ]
    text: Any = client.completions.create(**requested, prompt="Zoë 🙂")
    texts: list[Any] = [*client.completions.create(**requested, prompt="Zoë 🙂", stream=True)]

    assert chat.prompt_token_ids == prompt == chunks[0].prompt_token_ids
    assert all(choice.prompt_token_ids == plain for choice in text.choices)
    for whole, events in ((chat, chunks), (text, texts)):
        usage = whole.usage
        assert sum(len(choice.token_ids) for choice in whole.choices) == usage.completion_tokens
        for choice in whole.choices:
            ids = [
                id_
                for each in events
                for part in each.choices
                if part.index == choice.index
                for id_ in getattr(part, "token_ids", ())
            ]
            assert ids == choice.token_ids
            shown: Any = client.post(
                "/detokenize",
                body={"model": MODEL, "tokens": ids, "skip_special_tokens": True},
                cast_to=object,
            )
            answer_text = choice.text if hasattr(choice, "text") else choice.message.content
            assert answer_text.strip("\ufffd") in shown["text"]
    assert [each.choices[0].prompt_token_ids for each in texts[:1]] == [plain]
    assert all(hasattr(part, "token_ids") for each in texts for part in each.choices)


def test_log_probabilities_name_tokens_by_their_ids(client: openai.OpenAI) -> None:
    body = {"return_token_ids": True, "return_tokens_as_token_ids": True}

    chat: Any = client.chat.completions.create(
        **REQUESTED, messages=user_message("Hi"), logprobs=True, top_logprobs=2, extra_body=body
    )
    text: Any = client.completions.create(**REQUESTED, prompt="Hi", logprobs=2, extra_body=body)

    named = [f"token_id:{id_}" for id_ in chat.choices[0].token_ids]
    content = chat.choices[0].logprobs.content
    assert [each.token for each in content] == named
    assert all(top.token.startswith("token_id:") for each in content for top in each.top_logprobs)
    columns = text.choices[0].logprobs
    assert columns.tokens == [f"token_id:{id_}" for id_ in text.choices[0].token_ids]
    assert all(name in top for name, top in zip(columns.tokens, columns.top_logprobs, strict=True))


def test_the_log_probabilities_of_a_prompt_are_those_of_its_echo(client: openai.OpenAI) -> None:
    ids = tokens_of(client, prompt="Zoë 🙂 ok")
    echo: Any = client.completions.create(**REQUESTED, prompt=ids, logprobs=2, echo=True)
    talk = tokens_of(client, messages=user_message("Hi"))

    text: Any = client.completions.create(
        **REQUESTED, prompt=ids, extra_body={"prompt_logprobs": 2}
    )
    chat: Any = client.chat.completions.create(
        **REQUESTED, messages=user_message("Hi"), extra_body={"prompt_logprobs": 0}
    )

    shown = text.choices[0].prompt_logprobs
    assert shown[0] is None
    assert len(shown) == len(ids)
    columns = echo.choices[0].logprobs
    for id_, position, logprob in zip(ids[1:], shown[1:], columns.token_logprobs[1:], strict=False):
        assert position[str(id_)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert {1, 2} <= {each["rank"] for each in position.values()}
    assert [None if each is None else [*each] for each in chat.prompt_logprobs] == [
        None,
        *[[str(id_)] for id_ in talk[1:]],
    ]
    assert text.choices[0].logprobs is None


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_a_streamed_echo_is_the_whole_one(client: openai.OpenAI, logprobs: int | None) -> None:
    ids = tokens_of(client, prompt="Zoë 🙂 ok")
    requested: Any = REQUESTED | {"prompt": [ids, [5, 6, 7]], "echo": True, "logprobs": logprobs}

    whole = client.completions.create(**requested)
    parts: list[Any] = [
        part
        for each in client.completions.create(**requested, stream=True)
        for part in each.choices
    ]

    for choice in whole.choices:
        own = [part for part in parts if part.index == choice.index]
        assert "".join(part.text for part in own) == choice.text
        if logprobs is not None:
            streamed = [part.logprobs.model_dump() for part in own if part.logprobs is not None]
            for name, column in choice.logprobs.model_dump().items():
                joined = [value for each in streamed for value in each[name]]
                if name == "token_logprobs":
                    column = pytest.approx(column, abs=1e-3)
                assert name == "top_logprobs" or joined == column, name


def test_tokenize_and_detokenize(client: openai.OpenAI, service: Service) -> None:
    def post(path: str, **body: Any) -> Any:
        return client.with_options(base_url=service.openai_url.removesuffix("/v1")).post(
            path, body=body, cast_to=object
        )

    vllm = post("/tokenize", model=MODEL, prompt="Zoë 🙂", return_token_strs=True)
    bare = post("/tokenize", model=MODEL, prompt="Zoë 🙂", add_special_tokens=False)
    llama = post("/tokenize", content="Zoë 🙂", with_pieces=True)
    several = post("/tokenize", model=MODEL, prompt=["Zoë 🙂", "a"])

    assert vllm["count"] == len(vllm["tokens"]) == len(vllm["token_strs"])
    assert vllm["max_model_len"] == CONTEXT_WINDOW_TOKENS
    assert vllm["tokens"][1:] == bare["tokens"], "the post-processor adds the beginning"
    assert [each["id"] for each in llama["tokens"]] == bare["tokens"]
    pieces = [each["piece"] for each in llama["tokens"]]
    data = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces)
    assert data.decode() == "Zoë 🙂"
    assert several["tokens"][0] == vllm["tokens"]
    assert several["count"] == [len(each) for each in several["tokens"]]
    given: list[list[int]] = [vllm["tokens"], []]
    for tokens in given:
        back = post("/detokenize", tokens=tokens, skip_special_tokens=True)
        assert set(back.values()) == {"Zoë 🙂" if tokens else ""}
    assert post("/detokenize", model=MODEL, tokens=vllm["tokens"])["prompt"].endswith("Zoë 🙂")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "content"),
        ("/tokenize", {"prompt": ["a"] * 129}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"content": ""}, "content"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        (
            "/tokenize",
            {"messages": user_message("a"), "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
        ("/tokenize", {"messages": [{"role": "x", "content": "a"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_bodies_that_cannot_be_tokenized_are_refused_by_name(
    client: openai.OpenAI, path: str, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(path, body={"model": MODEL} | body, cast_to=object)

    assert refused.value.param == param, refused.value


async def test_tokens_need_a_model_that_the_key_may_use(service: Service, tenant: Tenant) -> None:
    _, secret = await service.new_key(tenant, models=["other"])
    with connect(service, secret) as client:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            with pytest.raises(openai.PermissionDeniedError):
                client.post(path, body={"model": MODEL} | body, cast_to=object)
            with pytest.raises(openai.BadRequestError, match="0 models"):
                client.post(path, body=body, cast_to=object)
