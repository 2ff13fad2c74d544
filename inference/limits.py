"""Limits of an engine, and validation of requests against them.

Used by the parent on submission, and again by the worker. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from inference.engine import (
    EmbeddingRequest,
    GenerationRequest,
    ModelInfo,
    SamplingParams,
    StopCriteria,
)
from inference.errors import RequestImpossible
from inference.kv_blocks import KV_BLOCK_TOKENS, blocks_for

CHOICE_COUNT_MAX = 16  # per request: each takes a place in the batch
BEAM_WIDTH_MAX = 16  # each takes a place in the batch
LENGTH_PENALTY_MAX = 10.0  # absolute value: above it the length alone would decide
# Top tokens per token: common in other APIs; each takes about 20 bytes per frame
LOGPROBS_MAX = {"top_logprobs": 20, "prompt_logprobs": 5}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one engine. The names end in the unit."""

    context_window_tokens: int
    # tokens: limits a step's memory, and its time if only prompts run
    step_token_count_max: int = 512
    # seconds: time limit of prompts while streams run; None for no limit
    step_time_target_s: float | None = None
    running_sequence_count_max: int = 64  # sequences: the reference workload has 50 at once
    # sequences: beyond this, callers should use another server
    waiting_sequence_count_max: int = 256
    # tokens reserved per sequence for future output; preemption handles more
    owed_output_token_count_max: int = 256

    def __post_init__(self) -> None:
        """Raise ValueError if a limit is not positive or a step is too small for all sequences."""
        if (
            min(
                self.context_window_tokens,
                self.running_sequence_count_max,
                self.waiting_sequence_count_max,
            )
            < 1
        ):
            raise ValueError("the context window and both sequence counts must be at least 1")
        if self.step_token_count_max < self.running_sequence_count_max:
            raise ValueError("step_token_count_max must be at least running_sequence_count_max")
        if self.step_time_target_s is not None and not self.step_time_target_s > 0:
            raise ValueError("step_time_target_s must be above 0, or None for no limit")


def request_fault(
    request: GenerationRequest,
    limits: EngineLimits,
    vocabulary_size: int,
    block_count: int,
    valid_sampling: SamplingParams | None = None,
) -> str | None:
    """Find out why a request can never run; None if it can. `block_count` counts all KV blocks.

    `valid_sampling` is the sampling of an earlier request without a fault: most requests share the
    model's default.
    """
    prompt, output_token_count = request.prompt_token_ids, request.stop.max_output_tokens
    if not prompt:
        return "the prompt has no tokens: send at least one"
    if min(prompt) < 0 or max(prompt) >= vocabulary_size:
        return f"token ids must be from 0 to {vocabulary_size - 1}"
    if not 1 <= request.choice_count <= CHOICE_COUNT_MAX:
        return f"choice_count must be from 1 to {CHOICE_COUNT_MAX}"
    if not math.isfinite(request.rank):
        return "rank must be a number"
    if output_token_count < 1:
        return "max_output_tokens must be at least 1"
    fault = _stop_fault(request.stop, vocabulary_size)
    if fault is None and request.sampling is not valid_sampling:
        fault = sampling_fault(request.sampling, vocabulary_size)
    if fault is not None:
        return fault
    if request.output_token_ids:
        fault = _continuation_fault(request, vocabulary_size)
        if fault is not None:
            return fault
    if request.response_format is not None and not request.stop.leaves_end_open:
        return "a response format excludes ignore_eos, min_output_tokens and stop_token_ids"
    total = len(prompt) + output_token_count
    if total > limits.context_window_tokens:
        return (
            f"{total} tokens (prompt {len(prompt)}) exceed the context window of"
            f" {limits.context_window_tokens}: shorten the prompt or ask for less output"
        )
    if blocks_for(total) > block_count:
        return (
            f"{total} tokens need {blocks_for(total)} KV blocks, and the engine has {block_count}:"
            " shorten the prompt or ask for less output"
        )
    return None if request.beam_search is None else _beam_fault(request, limits, block_count)


def _continuation_fault(request: GenerationRequest, vocabulary_size: int) -> str | None:
    output = request.output_token_ids
    if not request.may_be_continued:
        return "output_token_ids exclude a response format, beam search and several choices"
    if min(output) < 0 or max(output) >= vocabulary_size:
        return f"output_token_ids must be from 0 to {vocabulary_size - 1}"
    if len(output) > request.stop.max_output_tokens:
        return (
            f"output_token_ids are {len(output)}, more than max_output_tokens,"
            f" {request.stop.max_output_tokens}"
        )
    return None


def external_continuation_fault(request: GenerationRequest) -> str | None:
    """Explain why sending output as part of the prompt changes the result; None if it does not."""
    if not (request.output_token_ids and request.sampling.counts_output):
        return None
    if request.sampling.presence_penalty or request.sampling.frequency_penalty:
        return "this engine cannot count output that was generated elsewhere"
    return "this engine cannot resume a seeded random sequence"


def _beam_fault(request: GenerationRequest, limits: EngineLimits, block_count: int) -> str | None:
    """Check the parameters of a beam search; return the fault or None. Comparisons reject NaN."""
    params, sampling, stop = request.beam_search, request.sampling, request.stop
    assert params is not None
    width, prompt_token_count = params.width, len(request.prompt_token_ids)
    if not 2 <= width <= min(BEAM_WIDTH_MAX, limits.running_sequence_count_max):
        return (
            "beam_search.width must be from 2 to"
            f" {min(BEAM_WIDTH_MAX, limits.running_sequence_count_max)}"
        )
    if not -LENGTH_PENALTY_MAX <= params.length_penalty <= LENGTH_PENALTY_MAX:
        return (
            f"beam_search.length_penalty must be between {-LENGTH_PENALTY_MAX:g} and"
            f" {LENGTH_PENALTY_MAX:g}"
        )
    if request.choice_count > width:
        return "choice_count must be at most beam_search.width"
    if sampling.temperature > 0 or stop.stop_sequences or request.response_format is not None:
        return "beam_search excludes a temperature above 0, stop_sequences and response_format"
    shared = prompt_token_count // KV_BLOCK_TOKENS
    needed = shared + width * (blocks_for(prompt_token_count + stop.max_output_tokens) - shared)
    if needed > block_count:
        return (
            f"beam_search.width = {width} with {stop.max_output_tokens} output tokens needs"
            f" {needed} KV blocks of {block_count}"
        )
    return None


def _stop_fault(stop: StopCriteria, vocabulary_size: int) -> str | None:
    if not all(stop.stop_sequences):
        return "a stop sequence is empty"
    if stop.stop_token_ids and not (
        min(stop.stop_token_ids) >= 0 and max(stop.stop_token_ids) < vocabulary_size
    ):
        return f"stop_token_ids must be from 0 to {vocabulary_size - 1}"
    if not 0 <= stop.min_output_tokens <= stop.max_output_tokens:
        return "min_output_tokens must be from 0 to max_output_tokens"
    return None


def sampling_fault(sampling: SamplingParams, vocabulary_size: int) -> str | None:
    """Check sampling parameters; return the fault or None. Comparisons reject NaN."""
    if not (
        sampling.temperature >= 0
        and 0 < sampling.top_p <= 1
        and sampling.top_k >= 0
        and 0 <= sampling.min_p <= 1
    ):
        return (
            "temperature must be at least 0, top_p above 0 and at most 1, top_k at least 0, min_p"
            " from 0 to 1"
        )
    if sampling.seed is not None and not -(1 << 63) <= sampling.seed < 1 << 63:
        return "seed must fit 64 bits"
    if not (sampling.repetition_penalty > 0 and math.isfinite(sampling.repetition_penalty)):
        return "repetition_penalty must be above 0"
    if not (math.isfinite(sampling.presence_penalty) and math.isfinite(sampling.frequency_penalty)):
        return "presence_penalty and frequency_penalty must be numbers"
    for token_id, bias in sampling.logit_bias:
        if not (0 <= token_id < vocabulary_size and math.isfinite(bias)):
            return (
                f"logit_bias must map token ids from 0 to {vocabulary_size - 1} to finite numbers"
            )
    for name, limit in LOGPROBS_MAX.items():
        if (count := getattr(sampling, name)) is not None and not 0 <= count <= limit:
            return f"{name} must be from 0 to {limit}"
    return None


def embedding_fault(request: EmbeddingRequest, model: ModelInfo) -> RequestImpossible | None:
    """Check texts against the model's limits; return the error if it can never embed them."""
    limit, size = model.context_window_tokens, model.vocabulary_size
    for index, token_ids in enumerate(request.inputs):
        if not 1 <= len(token_ids) <= limit:
            return RequestImpossible(
                f"a text must have 1 to {limit} tokens, not {len(token_ids)}", f"inputs[{index}]"
            )
        if min(token_ids) < 0 or max(token_ids) >= size:
            return RequestImpossible(f"token ids must be from 0 to {size - 1}", f"inputs[{index}]")
    return None
