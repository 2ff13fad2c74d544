"""Token counts and quotes of requests without running them, and decoding of tokens to text."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from weir.v1 import inference_service_pb2 as pb

from api.access.auth import check_model
from api.access.auth import payer as payer_of
from api.core import wire
from api.core.errors import FieldViolation, InvalidRequest
from api.core.messages import effective_quota_statuses, input_count_max, quota_status
from api.generation.parsing.conversation import Prompt, thinking_of
from api.generation.parsing.embed_request import (
    ValidEmbed,
    check_against_model,
    parse_embed,
    token_count_of,
    tokenize_inputs,
)
from api.generation.parsing.start_frame import ValidStart, parse_start
from api.generation.parsing.text_work import INLINE_COST_MAX
from api.generation.parsing.tokenizing import TextJob, tokenize
from api.generation.parsing.tools import ToolUse, call_reading
from api.generation.request.preparation import (
    check_input_bound,
    max_output_token_count,
    prepared,
)
from api.generation.request.registry import RequestRegistry
from inference.text.tools import Tool
from metering.quotas import quoting
from metering.store.db import Sessions
from metering.tenants.authentication import Principal

DECODED_TOKEN_COST = 4  # characters of text to encode that cost as much as a token to decode
Value = TypeVar("Value")


async def count_tokens(
    registry: RequestRegistry,
    principal: Principal,
    message: pb.CountTokensRequest,
    parsed: tuple[Prompt, tuple[Tool, ...]],
) -> pb.CountTokensResponse:
    """Count the tokens of a prompt as admission does. Raises the errors that the request would get.

    `parsed` is the result of `parse_count_tokens`.
    """
    token_ids, window = await token_ids_of(registry, principal, message, parsed)
    return pb.CountTokensResponse(input_token_count=len(token_ids), context_window_tokens=window)


async def token_ids_of(
    registry: RequestRegistry,
    principal: Principal,
    message: pb.CountTokensRequest,
    parsed: tuple[Prompt, tuple[Tool, ...]],
    *,
    adds_special_tokens: bool = True,
) -> tuple[tuple[int, ...], int]:
    """Tokenize a prompt; return ids and context window. Raises what `count_tokens` raises."""
    prompt, tools = parsed
    check_model(principal, registry.router.canonical_name(message.model))
    model = registry.router.find(message.model).model
    tokenizer = registry.tokenizers[model.name]
    # Rejects tools that the model does not support.
    call_reading(ToolUse(tools, forced=True), tokenizer, message.model)
    window, thinking = model.context_window_tokens, thinking_of(message)
    job = TextJob(
        registry.text_work,
        payer_of(principal),
        tokenizer,
        window,
        thinking=thinking,
        adds_special_tokens=adds_special_tokens,
    )
    token_ids, work_s = await tokenize(job, prompt, tools)
    registry.pace.charge(principal, work_s)
    return token_ids, window


async def text_of(
    registry: RequestRegistry,
    principal: Principal,
    model: str,
    token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
) -> str:
    """Decode tokens to text.

    Raises: ModelNotAllowed, ModelUnknown, InvalidRequest for an unknown token, PreparationLimit,
    Overloaded.
    """
    check_model(principal, registry.router.canonical_name(model))
    info = registry.router.find(model).model
    tokenizer, size = registry.tokenizers[info.name], info.vocabulary_size
    if token_ids and max(token_ids) >= size:
        wrong = f"must each be from 0 to {size - 1}, the vocabulary of this model"
        raise InvalidRequest([FieldViolation("tokens", wrong)])
    decode = partial(tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
    return await in_thread(registry, principal, DECODED_TOKEN_COST * len(token_ids), decode)


async def in_thread(
    registry: RequestRegistry, principal: Principal, chars: int, call: Callable[[], Value]
) -> Value:
    """Run text work in a thread, or at once if it is short.

    `chars` is its size: the number of characters that take as long to encode. Raises:
    PreparationLimit, Overloaded, and the errors of the call.
    """
    if chars <= INLINE_COST_MAX:
        return call()
    payer = payer_of(principal)
    with registry.text_work.permit(payer, chars):
        value, work_s = await registry.text_work.run(payer.organization_id, chars, call)
    registry.pace.charge(principal, work_s)
    return value


def parse_quoted_start(message: pb.QuoteRequest, window_tokens_max: int) -> ValidStart:
    """Parse and check the start frame of a quote. Raises the errors of `parse_start`."""
    return parse_start(str(uuid.uuid4()), message.start, window_tokens_max)


def parse_quoted_embed(message: pb.QuoteRequest) -> ValidEmbed:
    """Parse the embedding of a quote, whose id selects a version. Raises: InvalidRequest."""
    message.embed.request_id = message.embed.request_id or str(uuid.uuid4())
    return parse_embed(message.embed)


async def quote(
    registry: RequestRegistry, sessions: Sessions, principal: Principal, start: ValidStart
) -> pb.QuoteResponse:
    """Quote a generate request. Raises what the request would raise, except for quotas."""
    check_model(principal, registry.router.canonical_name(start.model))
    registry.check_kept(principal.region, end_user=start.end_user, labels=start.labels)
    route = registry.router.route(start.model, start.request_id, start.region, principal.region)
    start.model, payer, tokenizer = (
        route.model,
        payer_of(principal),
        registry.tokenizers[route.served],
    )
    if start.tool_use.tools:
        # Rejects tools that the model does not support.
        call_reading(start.tool_use, tokenizer, start.model, start.choice_count)
    job = TextJob(registry.text_work, payer, tokenizer, route.engine.model.context_window_tokens)
    request, work_s = await prepared(start, route, job, registry.safety, principal.bounds)
    registry.pace.charge(principal, work_s)
    input_count = len(request.prompt_token_ids)
    output_count_max = max_output_token_count(request)
    first, least = registry.settings.leases.first_slice(output_count_max)
    async with sessions() as session:
        found = await quoting.quote(
            session,
            payer=payer,
            model=start.model,
            input_token_count=input_count,
            first_slice_token_count=first,
            least_slice_token_count=least,
            tier=start.tier,
            end_user=start.end_user,
            labels=start.labels,
        )
    cached = route.engine.predict_cached_token_count(request.prompt_token_ids, request.cache_salt)
    return response(found, input_count, cached, output_count_max)


def response(
    found: quoting.Quote, input_count: int, cached: int, output_count_max: int
) -> pb.QuoteResponse:
    """Build the response of a quote. `cached` input tokens are expected to be cached."""
    prices, refusal = found.prices, found.refusal
    expected = (
        output_count_max
        if found.expected_token_count is None
        else min(found.expected_token_count, output_count_max)
    )
    worst = prices.worst_cost_picos(input_count, output_count_max)
    answer = pb.QuoteResponse(
        input_token_count=input_count,
        predicted_cached_token_count=cached,
        max_output_token_count=output_count_max,
        expected_output_token_count=expected,
        worst_case_cost=wire.money(prices.currency_code, worst),
        expected_cost=wire.money(
            prices.currency_code,
            prices.cost_picos(
                input_count,
                cached,
                expected,
                reasoning_token_count=min(found.expected_reasoning_token_count, expected),
            ),
        ),
        price_version=prices.version,
        would_admit=refusal is None,
        quotas=effective_quota_statuses(found.quotas),
    )
    if refusal is not None:
        answer.failing_quotas.extend(quota_status(state) for state in refusal.failing)
        answer.retry_helps = refusal.retry_helps
        if refusal.retry_helps:
            answer.retry_delay.FromMilliseconds(math.ceil(refusal.retry_after_s * 1000))
    return answer


async def quote_embed(
    registry: RequestRegistry, sessions: Sessions, principal: Principal, start: ValidEmbed
) -> pb.QuoteResponse:
    """Quote an embedding request. Raises what the request would raise, except for quotas."""
    check_model(principal, registry.router.canonical_name(start.model))
    registry.check_kept(principal.region, end_user=start.end_user, labels=start.labels)
    route = registry.router.route_encoder(start.model, str(start.request_id))
    start = replace(start, model=route.model)
    check_against_model(start, route.encoder.model, input_count_max(route.encoder.model))
    payer = payer_of(principal)
    window = route.encoder.model.context_window_tokens
    texts, work_s = await tokenize_inputs(
        start, TextJob(registry.text_work, payer, registry.tokenizers[route.served], window)
    )
    registry.pace.charge(principal, work_s)
    sent = token_count_of(texts)
    check_input_bound(principal.bounds, sent, "inputs")
    async with sessions() as session:
        found = await quoting.quote(
            session,
            payer=payer,
            model=start.model,
            input_token_count=sent,
            first_slice_token_count=0,
            least_slice_token_count=0,
            tier=start.tier,
            embedding=True,
            end_user=start.end_user,
            labels=start.labels,
        )
    return response(found, sent, 0, 0)
