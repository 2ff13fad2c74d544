"""Decoding options of a start frame: validation, and conversion to the engine's parameters.

A value that is out of range is rejected, never clamped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import replace

import msgspec
from weir.v1 import inference_service_pb2 as pb

from api.core.texts import Violations
from inference.engine import (
    BeamSearchParams,
    EarlyStopping,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
    StopCriteria,
)

TEMPERATURE_MAX = 2.0
PENALTY_MAX = 2.0  # OpenAI's range, in both directions
REPETITION_PENALTY_MAX = 2.0  # above it the penalty alone decides the output
# OpenAI's range, in both directions; at its ends a token is certain or banned.
LOGIT_BIAS_MAX = 100.0
LOGIT_BIAS_COUNT_MAX = 1024  # each is written into the logits at every step
STOP_SEQUENCE_COUNT_MAX = 16  # each is matched against every token's text
STOP_SEQUENCE_CHARS_MAX = 256
STOP_TOKEN_ID_COUNT_MAX = 64
LOGPROBS_MAX = {"top_logprobs": 20, "prompt_logprobs": 5}  # likely tokens per token
CHOICE_COUNT_MAX = 16  # each takes a slot of the engine's batch
BEAM_WIDTH_MAX = 16  # each takes a slot of the engine's batch
LENGTH_PENALTY_MAX = 10.0  # in both directions; beyond it the length alone would decide
# Compiles in 200 ms at worst, measured on schemas that consist of objects only.
RESPONSE_FORMAT_BYTES_MAX = 65_536

# Allowed values of sampling parameters, by field.
SAMPLING_RANGES: Mapping[str, str] = {
    "temperature": f"between 0 and {TEMPERATURE_MAX:g}",
    "top_p": "between 0 and 1",
    "top_k": "-1 or more",
    "min_p": "between 0 and 1",
    "repetition_penalty": f"more than 0 and at most {REPETITION_PENALTY_MAX:g}",
    "presence_penalty": f"between {-PENALTY_MAX:g} and {PENALTY_MAX:g}",
    "frequency_penalty": f"between {-PENALTY_MAX:g} and {PENALTY_MAX:g}",
}

EARLY_STOPPING: Mapping[int, EarlyStopping] = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_WHEN_FULL: EarlyStopping.WHEN_FULL,
    pb.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


class SamplingOverrides(msgspec.Struct, frozen=True):
    """Sampling parameters of a request. None means the default of the model."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    top_logprobs: int | None
    prompt_logprobs: int | None

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """Merge these parameters with the defaults of the model."""
        if self is NO_OVERRIDES and defaults.seed is None:
            return defaults
        return replace(
            defaults,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            seed=self.seed,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            repetition_penalty=defaults.repetition_penalty
            if self.repetition_penalty is None
            else self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


NO_OVERRIDES = SamplingOverrides(None, None, None, None, None, None, 0.0, 0.0, (), None, None)


class StopRules(msgspec.Struct, frozen=True):
    """Stop conditions of a request."""

    max_output_tokens: int | None
    stop_sequences: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    min_output_tokens: int
    max_reasoning_tokens: int | None = None

    def within(self, room_tokens: int) -> StopCriteria:
        """Convert the stop conditions to the engine's stop criteria.

        `room_tokens` is the context window left after the prompt, the default for
        `max_output_tokens`.
        """
        return StopCriteria(
            self.max_output_tokens or room_tokens,
            self.stop_sequences,
            self.stop_token_ids,
            self.ignore_eos,
            self.min_output_tokens,
            self.max_reasoning_tokens,
        )


NO_STOP_RULES = StopRules(None, (), frozenset(), False, 0)


def check_decoding(start: pb.StartFrame, wrong: Violations) -> None:
    """Check every decoding option that the frame alone allows to check."""
    if start.HasField("sampling"):  # defaults need no check
        _check_sampling(start.sampling, wrong)
        _check_biases(start.sampling, wrong)
    if start.HasField("response_format"):
        _check_response_format(start, wrong)
    if start.HasField("beam_search"):
        _check_beam_search(start, wrong)
    if start.HasField("choice_count"):
        right = 1 <= start.choice_count <= CHOICE_COUNT_MAX
        wrong.check(
            right, "choice_count", f"must be from 1 to {CHOICE_COUNT_MAX}, got {start.choice_count}"
        )
    for name in ("top_logprobs", "prompt_logprobs"):
        if start.HasField(name):
            count, limit = getattr(start, name), LOGPROBS_MAX[name]
            wrong.check(0 <= count <= limit, name, f"must be from 0 to {limit}, got {count}")


def parse_sampling(start: pb.StartFrame) -> SamplingOverrides:
    """Convert the sampling parameters of a frame that passed `check_decoding`."""
    sampling = start.sampling
    has = sampling.HasField
    searches = start.HasField("beam_search")  # beam search ignores the model's sampling defaults
    # A top_p of 0 leaves the likeliest token, like a temperature of 0; a top_k of -1 leaves all.
    is_greedy = has("top_p") and sampling.top_p == 0
    return SamplingOverrides(
        temperature=0.0
        if is_greedy or (searches and not has("temperature"))
        else sampling.temperature
        if has("temperature")
        else None,
        top_p=sampling.top_p if has("top_p") and not is_greedy else 1.0 if searches else None,
        top_k=max(sampling.top_k, 0) if has("top_k") else 0 if searches else None,
        seed=sampling.seed if has("seed") else None,
        min_p=sampling.min_p if has("min_p") else 0.0 if searches else None,
        repetition_penalty=sampling.repetition_penalty if has("repetition_penalty") else None,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        top_logprobs=start.top_logprobs if start.HasField("top_logprobs") else None,
        prompt_logprobs=start.prompt_logprobs if start.HasField("prompt_logprobs") else None,
    )


def parse_response_format(start: pb.StartFrame) -> ResponseFormat:
    """Convert the response format of a frame that passed `check_decoding`."""
    kind = start.response_format.WhichOneof("kind")
    assert kind is not None, "one of the formats is set"
    return ResponseFormat(GrammarKind(kind), getattr(start.response_format, kind))


def parse_beam_search(start: pb.StartFrame) -> BeamSearchParams:
    """Convert the beam search options of a frame that passed `check_decoding`."""
    search = start.beam_search
    length_penalty = search.length_penalty if search.HasField("length_penalty") else 1.0
    return BeamSearchParams(search.width, length_penalty, EARLY_STOPPING[search.early_stopping])


def parse_stop(start: pb.StartFrame, present: Set[str]) -> StopRules:
    """Convert the stop conditions of a frame that passed `check_stop`.

    `present` are the names of the fields that are set.
    """
    return StopRules(
        start.max_output_tokens if "max_output_tokens" in present else None,
        tuple(start.stop_sequences) if "stop_sequences" in present else (),
        frozenset(start.stop_token_ids) if "stop_token_ids" in present else frozenset(),
        start.ignore_eos,
        start.min_output_tokens,
        start.max_reasoning_tokens if "max_reasoning_tokens" in present else None,
    )


def check_against_model(request: GenerationRequest, vocabulary_size: int) -> None:
    """Check the options that depend on the model and the prompt. Raises: InvalidRequest."""
    sampling, stop = request.sampling, request.stop
    output_min, output_max = stop.min_output_tokens, stop.max_output_tokens
    if output_min <= output_max and not (sampling.logit_bias or stop.stop_token_ids):
        return
    wrong = Violations()
    for token_id, _ in sampling.logit_bias:
        wrong.check(
            token_id < vocabulary_size,
            f"sampling.logit_bias[{token_id}]",
            f"must be from 0 to {vocabulary_size - 1}",
        )
    for token_id in sorted(stop.stop_token_ids):
        wrong.check(
            token_id < vocabulary_size,
            "stop_token_ids",
            f"must be from 0 to {vocabulary_size - 1}, got {token_id}",
        )
    wrong.check(
        output_min <= output_max,
        "min_output_tokens",
        f"must be at most {output_max} for this prompt, got {output_min}",
    )
    wrong.raise_if_any()


def _check_sampling(sampling: pb.Sampling, wrong: Violations) -> None:
    """Check the sampling parameters. Comparisons are written so that NaN fails too."""

    def check(name: str, right: bool) -> None:
        value = getattr(sampling, name)
        wrong.check(right, f"sampling.{name}", f"must be {SAMPLING_RANGES[name]}, got {value:g}")

    check("temperature", 0 <= sampling.temperature <= TEMPERATURE_MAX)
    check("top_p", 0 <= sampling.top_p <= 1)
    check("top_k", sampling.top_k >= -1)
    check("min_p", 0 <= sampling.min_p <= 1)
    is_set = sampling.HasField("repetition_penalty")
    penalty = sampling.repetition_penalty
    check("repetition_penalty", not is_set or 0 < penalty <= REPETITION_PENALTY_MAX)
    check("presence_penalty", -PENALTY_MAX <= sampling.presence_penalty <= PENALTY_MAX)
    check("frequency_penalty", -PENALTY_MAX <= sampling.frequency_penalty <= PENALTY_MAX)


def _check_biases(sampling: pb.Sampling, wrong: Violations) -> None:
    biases = sampling.logit_bias
    if not wrong.check_count(len(biases), LOGIT_BIAS_COUNT_MAX, "sampling.logit_bias"):
        return
    for token_id, bias in biases.items():
        field = f"sampling.logit_bias[{token_id}]"
        wrong.check(token_id >= 0, field, "token ids must be at least 0")
        right = -LOGIT_BIAS_MAX <= bias <= LOGIT_BIAS_MAX
        wrong.check(
            right,
            field,
            f"must be between {-LOGIT_BIAS_MAX:g} and {LOGIT_BIAS_MAX:g}, got {bias:g}",
        )


def check_stop(start: pb.StartFrame, wrong: Violations) -> None:
    """Check every stop condition that the frame alone allows to check."""
    output_max, output_min = start.max_output_tokens, start.min_output_tokens
    limited = start.HasField("max_output_tokens")
    if limited and output_max < 1:
        wrong.check(
            False,
            "max_output_tokens",
            f"must be at least 1, got {output_max}; leave it unset for no limit",
        )
    if output_min < 0 or (limited and output_min > max(output_max, 1)):
        wrong.check(
            False, "min_output_tokens", f"must be from 0 to max_output_tokens, got {output_min}"
        )
    if start.HasField("max_reasoning_tokens"):
        count, name = start.max_reasoning_tokens, "max_reasoning_tokens"
        wrong.check(count >= 0, name, f"must be at least 0, got {count}")
        for has, other in (
            (not start.HasField("conversation"), "needs conversation: a prompt is not split"),
            (start.HasField("beam_search"), "cannot be combined with beam_search"),
        ):
            wrong.check(not has, name, other)
    stops, ids = start.stop_sequences, start.stop_token_ids
    if not (stops or ids):
        return
    few = wrong.check_count(len(stops), STOP_SEQUENCE_COUNT_MAX, "stop_sequences")
    for index, stop in enumerate(stops if few else ()):
        right = 1 <= len(stop) <= STOP_SEQUENCE_CHARS_MAX
        wrong.check(
            right,
            f"stop_sequences[{index}]",
            f"must have 1 to {STOP_SEQUENCE_CHARS_MAX} characters, got {len(stop)}",
        )
    few = wrong.check_count(len(ids), STOP_TOKEN_ID_COUNT_MAX, "stop_token_ids")
    for index, token_id in enumerate(ids if few else ()):
        wrong.check(
            token_id >= 0, f"stop_token_ids[{index}]", f"must be at least 0, got {token_id}"
        )


def _check_response_format(start: pb.StartFrame, wrong: Violations) -> None:
    """Check what needs no compiling. The engine rejects the rest, naming the same field."""
    kind = start.response_format.WhichOneof("kind")
    if kind is None:
        wrong.check(False, "response_format", "one of json_schema, regex and lark must be set")
        return
    source: str = getattr(start.response_format, kind)
    size = len(source.encode())
    right = 0 < size <= RESPONSE_FORMAT_BYTES_MAX
    wrong.check(
        right,
        f"response_format.{kind}",
        f"must have 1 to {RESPONSE_FORMAT_BYTES_MAX} bytes, got {size}",
    )
    if kind == "json_schema" and right:
        wrong.check(
            _is_schema(source), "response_format.json_schema", "must be a JSON object or boolean"
        )
    for name in ("ignore_eos", "min_output_tokens", "stop_token_ids"):
        wrong.check(
            not getattr(start, name),
            name,
            "cannot be combined with response_format, which ends the output itself",
        )


def _check_beam_search(start: pb.StartFrame, wrong: Violations) -> None:
    """Check the beam search options. Comparisons are written so that NaN fails too."""
    search, penalty_max = start.beam_search, LENGTH_PENALTY_MAX
    wrong.check(
        not start.HasField("prompt_logprobs"),
        "prompt_logprobs",
        "cannot be combined with beam_search: leave it out",
    )
    right = 2 <= search.width <= BEAM_WIDTH_MAX
    wrong.check(
        right,
        "beam_search.width",
        f"must be from 2 to {BEAM_WIDTH_MAX}, got {search.width}; leave beam_search unset for 1",
    )
    right = -penalty_max <= search.length_penalty <= penalty_max
    wrong.check(
        right,
        "beam_search.length_penalty",
        f"must be between {-penalty_max:g} and {penalty_max:g}, got {search.length_penalty:g}",
    )
    right = search.early_stopping in EARLY_STOPPING
    wrong.check(right, "beam_search.early_stopping", f"unknown value {search.early_stopping}")
    fits = start.choice_count <= max(search.width, 1)
    wrong.check(fits, "choice_count", f"must be at most beam_search.width, which is {search.width}")
    for name in ("top_p", "top_k", "min_p", "seed"):
        given = start.sampling.HasField(name)
        wrong.check(
            not given,
            f"sampling.{name}",
            "cannot be combined with beam_search, which does not sample; leave it unset",
        )
    cold = not start.sampling.temperature > 0
    wrong.check(
        cold, "sampling.temperature", "must be 0 or unset with beam_search, which does not sample"
    )
    wrong.check(
        not start.stop_sequences,
        "stop_sequences",
        "cannot be combined with beam_search; use stop_token_ids",
    )
    free = not start.HasField("response_format")
    wrong.check(
        free, "response_format", "cannot be combined with beam_search; leave one of them out"
    )


def _is_schema(source: str) -> bool:
    try:
        return isinstance(json.loads(source), dict | bool)
    except (ValueError, RecursionError):
        return False
