"""Conversion of a start frame into the requests for engine, queue and admission; checks of changes.

Reserves no resources.
"""

from __future__ import annotations

import functools
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

from api.core.errors import FieldViolation, InvalidRequest, KeyBoundExceeded, PromptTooLong
from api.core.settings import LeaseSettings
from api.generation.parsing.decoding import check_against_model
from api.generation.parsing.start_frame import ValidStart
from api.generation.parsing.tokenizing import TextJob, check_prompt, tokenize
from api.generation.parsing.tools import format_with_tools
from api.generation.request.admission import Admission
from api.generation.request.limits import LimitChange, OutputLimits
from api.queue.queue_admission import Arrival
from inference.engine import GenerationRequest, ModelInfo, ThinkingStart
from inference.routing.router import Route
from inference.safety.safety import SafetyChecker
from inference.text.tokenizer import NOT_THINKING, ChatMessage, Tokenizer, TokenLimitExceeded
from inference.text.tools import CallFormat
from metering.holds.operations import Admit, new_hold_id
from metering.quotas.quota_rules import Payer
from metering.tenants.authentication import TokenBounds

NO_MARKS = "cannot be set: this model does not mark its thinking; leave it out"
HAS_BEGUN = "cannot be set: the output continues an answer, before which the model would think"


async def prepared(
    start: ValidStart, route: Route, job: TextJob, safety: SafetyChecker | None, bounds: TokenBounds
) -> tuple[GenerationRequest, float]:
    """Tokenize and check a prompt; return the request for the engine, and the processor time in s.

    `start` has the canonical model name. The token limit of `job` is set here. Raises:
    KeyBoundExceeded, PromptTooLong, PromptTooLarge, InvalidRequest, PromptFiltered,
    SafetyUnavailable, ChatTemplateFailed, PreparationLimit, Overloaded, and the errors of the job's
    `check_room`.
    """
    window, requested = route.engine.model.context_window_tokens, start.stop.max_output_tokens
    most_sent = window - (requested or 1)
    if bounds.max_input_tokens is not None:
        most_sent = min(most_sent, bounds.max_input_tokens)
    job = replace(job, token_count_max=max(most_sent, 0), thinking=start.thinking)
    try:
        token_ids, work_s = await tokenize(job, start.prompt, start.tool_use.tools)
    except TokenLimitExceeded as exceeded:
        check_input_bound(bounds, exceeded.least_token_count, "prompt", is_least=True)
        raise PromptTooLong(exceeded.least_token_count, requested, window, is_least=True) from None
    request = checked_request(start, route, job.tokenizer, token_ids, job.payer, bounds)
    if safety is not None:
        await check_prompt(safety, job.tokenizer, start.prompt, start.tool_use.tools)
    return request, work_s


def checked_request(
    start: ValidStart,
    route: Route,
    tokenizer: Tokenizer,
    token_ids: tuple[int, ...],
    payer: Payer,
    bounds: TokenBounds,
) -> GenerationRequest:
    """Build the request for the engine; check it against model, context window and key limits.

    `token_ids` is the prompt. Raises: KeyBoundExceeded, PromptTooLong, InvalidRequest,
    RequestImpossible.
    """
    model, requested = route.engine.model, start.stop.max_output_tokens
    room = model.context_window_tokens - len(token_ids)
    if bounds.max_input_tokens is not None:
        check_input_bound(bounds, len(token_ids), "prompt")
    default = (
        room
        if bounds.max_output_tokens is None
        else output_room(bounds, requested, start.choice_count, room)
    )
    if (requested or 1) > room:
        raise PromptTooLong(len(token_ids), requested, model.context_window_tokens)
    last, size = start.prompt[-1], model.vocabulary_size
    is_too_high = bool(token_ids) and max(token_ids) >= size
    if is_too_high or (isinstance(last, int) and min(token_ids) < 0):
        raise InvalidRequest(
            [FieldViolation("token_ids.ids", f"must each be from 0 to {size - 1}")]
        )
    # A plain prompt is continued as it is: its text may be about the marks of thinking.
    splits_reasoning, thinking = False, ThinkingStart.NONE
    if isinstance(last, ChatMessage):
        splits_reasoning = not last.is_unfinished or leaves_thinking_open(last, tokenizer)
        if tokenizer.reasoning is not None:
            thinking = thinking_start(start, tokenizer, token_ids)
    if start.stop.max_reasoning_tokens is not None:
        if tokenizer.reasoning is None:
            raise InvalidRequest([FieldViolation("max_reasoning_tokens", NO_MARKS)])
        if not splits_reasoning:
            raise InvalidRequest([FieldViolation("max_reasoning_tokens", HAS_BEGUN)])
    response_format = start.response_format
    marked_functions: tuple[str, ...] = ()  # those whose calls the engine marks in its text
    if (tool_use := start.tool_use).tools:
        response_format = format_with_tools(tool_use, response_format, tokenizer)
        if tokenizer.call_format is CallFormat.HARMONY and not tool_use.forced:
            marked_functions = tool_use.callable_names
    salt = salt_of(payer.organization_id.int)
    request = GenerationRequest(
        prompt_token_ids=token_ids,
        sampling=start.sampling.over(model.default_sampling),
        stop=start.stop.within(default),
        # KV blocks that one adapter has computed are wrong for another.
        cache_salt=f"{salt}:{route.adapter}" if route.adapter else salt,
        response_format=response_format,
        choice_count=start.choice_count,
        beam_search=start.beam_search,
        regions=route.regions,
        adapter=route.adapter,
        splits_reasoning=splits_reasoning,
        thinking=thinking,
        marked_functions=marked_functions,
        is_bound=route.is_bound,
    )
    check_against_model(request, size)
    if model.capabilities.counts_from_usage:
        check_stops_shown(request.stop.stop_sequences, tokenizer)
    model.capabilities.check(request, model.engine)
    return request


def leaves_thinking_open(begun: ChatMessage, tokenizer: Tokenizer) -> bool:
    """Return whether an answer was cut off while thinking, so that the output continues it."""
    return tokenizer.reasoning is not None and tokenizer.reasoning.leaves_open(begun.content)


def thinking_start(
    start: ValidStart, tokenizer: Tokenizer, token_ids: tuple[int, ...]
) -> ThinkingStart:
    """Determine whether the model thinks first, and if the prompt begins the thinking."""
    last = start.prompt[-1]
    if tokenizer.reasoning is None or not isinstance(last, ChatMessage):
        return ThinkingStart.NONE
    if last.is_unfinished:
        is_open = leaves_thinking_open(last, tokenizer)
        return ThinkingStart.PROMPT if is_open else ThinkingStart.NONE
    if tokenizer.reasoning.closes(token_ids):
        return ThinkingStart.ENDED
    if start.thinking in NOT_THINKING:
        return ThinkingStart.NONE
    if tokenizer.reasoning.opens(token_ids):
        return ThinkingStart.PROMPT
    is_on = start.thinking is not None or tokenizer.thinks_by_default
    return ThinkingStart.MODEL if is_on else ThinkingStart.NONE


def check_stops_shown(stops: Sequence[str], tokenizer: Tokenizer) -> None:
    """Refuse stop sequences that contain control tokens, which never appear in the output text.

    Raises: InvalidRequest.
    """
    for index, stop in enumerate(stops):
        if (control := tokenizer.decoder.control_token_in(stop)) is not None:
            wrong = (
                f"contains {control!r}, a control token of this model, which its engine never"
                " sends as text: leave it out, the model's end tokens end the output anyway"
            )
            raise InvalidRequest([FieldViolation(f"stop_sequences[{index}]", wrong)])


@functools.lru_cache(maxsize=8192)  # organizations in use; the text of an id is made in Python
def salt_of(organization_number: int) -> str:
    """Return the prefix cache salt of an organization: its id as text, given as an integer."""
    return str(uuid.UUID(int=organization_number))


def arrival_of(
    start: ValidStart,
    request: GenerationRequest,
    payer: Payer,
    weights: Mapping[int, float],
    received_at: float,
    deadline: float | None,
) -> Arrival:
    """Build the queue's view of a request.

    `weights` are by organization id as an integer, 1 if missing. `received_at` and `deadline`, the
    call's, are monotonic seconds.
    """
    if start.start_timeout_s is not None:
        deadline = min(
            received_at + start.start_timeout_s, math.inf if deadline is None else deadline
        )
    return Arrival(
        request_id=start.request_id,
        tenant_id=payer.organization_id,
        input_token_count=len(request.prompt_token_ids),
        output_token_count_max=request.stop.max_output_tokens * request.choice_count,
        tier=start.tier,
        weight=weights.get(payer.organization_id.int, 1.0),
        sequence_count=(
            request.choice_count if request.beam_search is None else request.beam_search.width
        ),
        compiles=request.response_format is not None,
        deadline=deadline,
    )


def admission_request(
    start: ValidStart, request: GenerationRequest, payer: Payer, leases: LeaseSettings
) -> Admit:
    """Build the `Admit` operation, asking for the first slice of the output."""
    first, least = leases.first_slice(max_output_token_count(request))
    return Admit(
        new_hold_id(),
        payer,
        start.request_id,
        start.payload_hash,
        start.model,
        len(request.prompt_token_ids),
        first_slice_token_count=first,
        least_slice_token_count=least,
        labels=start.labels,
        tier=start.tier,
        end_user=start.end_user,
    )


def max_output_token_count(request: GenerationRequest) -> int:
    """Compute the output tokens of all choices together at most."""
    return request.stop.max_output_tokens * request.choice_count


async def check_room(
    admission: Admission, start: ValidStart, payer: Payer, least_token_count: int
) -> None:
    """Raise the refusal of a prompt that quotas cannot admit, before it is tokenized.

    `least_token_count` is a lower bound of its tokens.
    """
    ids = new_hold_id(), payer, start.request_id, start.payload_hash
    counts = least_token_count, 1, 1
    await admission.check_room(
        Admit(*ids, start.model, *counts, start.labels, start.tier, end_user=start.end_user)
    )


def check_input_bound(
    bounds: TokenBounds, token_count: int, field: str, *, is_least: bool = False
) -> None:
    """Raise KeyBoundExceeded if the input is larger than the API key allows.

    `field` is the path of the input. If `is_least`, `token_count` is a lower bound.
    """
    limit = bounds.max_input_tokens
    if limit is not None and token_count > limit:
        at_least = "at least " if is_least else ""
        raise KeyBoundExceeded(
            field,
            f"has {at_least}{token_count} tokens, {token_count - limit} more than the limit of"
            f" {limit} per request for this key; send less, or ask an administrator to raise the"
            " key's max_input_tokens",
            token_count,
            limit,
        )


def output_room(bounds: TokenBounds, requested: int | None, choice_count: int, room: int) -> int:
    """Return how many output tokens each choice may have if the request sets no limit.

    `requested` is the limit of the request or None, `room` what is left of the context window.
    Raises KeyBoundExceeded if `requested` is above the key's limit, and InvalidRequest if the key
    allows fewer tokens than there are choices.
    """
    limit = bounds.max_output_tokens
    if limit is None:
        return room
    if choice_count > limit:
        wrong = (
            f"must be at most {limit}: this key may have {limit} output tokens per request, over"
            " all choices"
        )
        raise InvalidRequest([FieldViolation("choice_count", wrong)])
    if requested is not None:
        check_output_bound(bounds, requested, choice_count, "max_output_tokens")
    return min(room, limit // choice_count)


def is_bounded(bounds: TokenBounds, requested: int | None, request: GenerationRequest) -> bool:
    """Return whether the API key limits the output, because the request sets no limit itself."""
    limit = bounds.max_output_tokens
    return (
        requested is None
        and limit is not None
        and request.stop.max_output_tokens == limit // request.choice_count
    )


def check_output_bound(bounds: TokenBounds, requested: int, choice_count: int, field: str) -> None:
    """Raise KeyBoundExceeded if `requested` tokens per choice are more than the API key allows."""
    limit = bounds.max_output_tokens
    if limit is not None and requested * choice_count > limit:
        each = "" if choice_count == 1 else f" for each of {choice_count} choices"
        raise KeyBoundExceeded(
            field,
            f"must be at most {limit // choice_count}{each}, got {requested}: this key may have"
            f" {limit} output tokens per request; ask for less, or ask an administrator to raise"
            " the key's max_output_tokens",
            requested * choice_count,
            limit,
        )


def check_change(
    change: LimitChange,
    limits: OutputLimits,
    request: GenerationRequest,
    model: ModelInfo,
    bounds: TokenBounds,
) -> None:
    """Raise InvalidRequest or KeyBoundExceeded if a running request cannot have these limits.

    `bounds` are the limits of its API key.
    """
    if change.max_cost is not None:
        limits.check_currency(change.max_cost, "update.max_cost")
    if change.max_output_tokens is not None:
        field = "update.max_output_tokens"
        check_output_bound(bounds, change.max_output_tokens, request.choice_count, field)
        check_output_change(request, model, change.max_output_tokens)


def check_output_change(
    request: GenerationRequest, model: ModelInfo, max_output_tokens: int
) -> None:
    """Raise InvalidRequest if a running request cannot be extended to this many output tokens."""
    wrong, room = "", model.context_window_tokens - len(request.prompt_token_ids)
    if request.choice_count > 1 or request.beam_search is not None:
        wrong = "cannot be changed for several choices or beam search"
    elif max_output_tokens > room:
        wrong = f"must be at most {room} in this context window, got {max_output_tokens}"
    elif max_output_tokens > request.stop.max_output_tokens and not model.can_continue(request):
        why = "by the engine of this model"
        if request.response_format is not None:
            why = "with a response format"
        elif model.continues_output:
            why += " with a seed or penalties"
        wrong = f"cannot be raised above {request.stop.max_output_tokens} {why}"
    if wrong:
        raise InvalidRequest([FieldViolation("update.max_output_tokens", wrong)])
