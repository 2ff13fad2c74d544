"""Parts shared by tests of the OpenAI HTTP API: the official client against a test service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionUserMessageParam

from tests.service import CACHED_PICOS, INPUT_PICOS, OUTPUT_PICOS, Service, Tenant

TO_THE_END = {"ignore_eos": True}  # so that an answer has exactly the requested number of tokens


@contextlib.contextmanager
def connect(service: Service, secret: str, **options: Any) -> Iterator[openai.OpenAI]:
    """Return the synchronous client, by default without retries."""
    with openai.OpenAI(
        base_url=service.openai_url, api_key=secret, **({"max_retries": 0} | options)
    ) as client:
        yield client


@contextlib.asynccontextmanager
async def connect_async(
    service: Service, secret: str, **options: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    """Return the asynchronous client."""
    async with openai.AsyncOpenAI(
        base_url=service.openai_url, api_key=secret, **({"max_retries": 0} | options)
    ) as client:
        yield client


def user_message(text: str) -> list[ChatCompletionMessageParam]:
    """Return a conversation of one turn."""
    return [ChatCompletionUserMessageParam(role="user", content=text)]


def text_of(chunks: Iterable[Any]) -> str:
    """Return all text of a chat stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def extension(answer: Any) -> dict[str, Any]:
    """Return the fields of an answer that OpenAI's API lacks."""
    reported: dict[str, Any] = answer.model_extra["weir"]
    return reported


def check_billed(service: Service, tenant: Tenant, answer: Any) -> dict[str, Any]:
    """Check the tenant's only usage event against the answer; return the event."""
    [event] = service.database.events(tenant)
    usage, reported = answer.usage, extension(answer)
    assert usage.prompt_tokens == event["input_token_count"]
    assert usage.prompt_tokens_details.cached_tokens == event["cached_input_token_count"]
    assert usage.completion_tokens == event["billed_token_count"] == event["delivered_token_count"]
    assert reported["cost"]["picos"] == event["cost_picos"] == cost_of(event)
    assert reported["price_version"] == event["price_version_id"]
    assert reported["request_ids"] == [str(event["request_id"])]
    return event


def cost_of(event: dict[str, Any]) -> int:
    """Return the cost of an event at the tests' prices."""
    cached = event["cached_input_token_count"]
    uncached = event["input_token_count"] - cached
    return int(
        uncached * INPUT_PICOS + cached * CACHED_PICOS + event["billed_token_count"] * OUTPUT_PICOS
    )
