"""Request fields that an engine supports, and the rejection of the others.

Each engine declares its `Capabilities` once, on its `ModelInfo`. The API checks a request against
them before it makes a hold, and the engine checks again on submission. Supported fields are
translated to the engine's own request; all others are rejected by their name on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from operator import attrgetter

from inference.errors import RequestImpossible
from inference.sequences import (
    GenerationRequest,
    RequestField,
    ResponseFormat,
    SamplingParams,
    StopCriteria,
    ThinkingStart,
)

_NEUTRAL = SamplingParams()
_FORMATS = frozenset({RequestField.JSON_SCHEMA, RequestField.REGEX, RequestField.LARK})
_OF_CHANCE = frozenset(
    {RequestField.TOP_P, RequestField.TOP_K, RequestField.MIN_P, RequestField.SEED}
)
_LOGPROBS = frozenset({RequestField.TOP_LOGPROBS, RequestField.PROMPT_LOGPROBS})
# Fields that only the embedded engine supports
EMBEDDED_ONLY = frozenset(
    {
        RequestField.BEAM_SEARCH,
        RequestField.PROMPT_LOGPROBS,
        RequestField.MAX_REASONING_TOKENS,
    }
)


def is_used(field: RequestField, request: GenerationRequest) -> bool:
    """Return whether a field affects the output. Some fields need a temperature above 0."""
    section, _, name = field.rpartition(".")
    if field in _FORMATS:
        return request.response_format is not None and request.response_format.kind == name
    if section or field in _LOGPROBS:
        drawn = request.sampling.temperature > 0 or field not in _OF_CHANCE
        return drawn and getattr(request.sampling, name) != getattr(_NEUTRAL, name)
    if field is RequestField.MAX_REASONING_TOKENS:
        return request.stop.max_reasoning_tokens is not None
    return bool(getattr(request if field is RequestField.BEAM_SEARCH else request.stop, name))


@cache
def _in_order(fields: frozenset[RequestField]) -> tuple[RequestField, ...]:
    return tuple(field for field in RequestField if field in fields)


@cache
def _values(fields: frozenset[RequestField]) -> attrgetter[object]:
    """Return a function that reads the values of these fields, to compare them all at once."""
    paths = set()
    for field in fields:
        if field in _FORMATS:
            paths.add("response_format")
        elif field in _LOGPROBS:
            paths.add(f"sampling.{field}")
        elif field is RequestField.BEAM_SEARCH or "." in field:
            paths.add(field.value)
        else:
            paths.add(f"stop.{field}")
    return attrgetter(*paths)


@cache
def _neutral_values(fields: frozenset[RequestField]) -> object:
    return _values(fields)(GenerationRequest((), _NEUTRAL, StopCriteria(1)))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Request fields that an engine supports.

    `unsupported` lists the fields that the engine would ignore. `top_logprobs_max` is the maximum
    of top tokens per token; None for Weir's own limit. `sampled_logprobs` tells whether the engine
    reports log-probabilities at a temperature above 0. `logit_bias_max` is the largest absolute
    bias. With `counts_from_usage`, the engine reports numbers of tokens without ids: each token is
    `UNKNOWN_TOKEN_ID`. `after_thinking` lists the response formats that the engine applies after
    thinking which the prompt opens or already contains, even if they are unsupported elsewhere;
    None if it applies all supported formats after any thinking.
    """

    unsupported: frozenset[RequestField] = frozenset()
    top_logprobs_max: int | None = None
    sampled_logprobs: bool = True
    logit_bias_max: float = inf
    counts_from_usage: bool = False
    after_thinking: frozenset[RequestField] | None = None

    def check(self, request: GenerationRequest, engine: str) -> None:
        """Raise RequestImpossible, with the field, if the engine would ignore a field in use."""
        sampling, form = request.sampling, request.response_format
        left = self.unsupported
        if form is not None and self.after_thinking is not None:
            left -= self._check_thinking(request, form, engine)
        if left and _values(left)(request) != _neutral_values(left):
            for field in _in_order(left):
                if is_used(field, request):
                    raise self._refusal(request, field, engine)
        if sampling.top_logprobs is not None:
            top_count_max = self.top_logprobs_max
            if top_count_max is not None and sampling.top_logprobs > top_count_max:
                message = (
                    f"must be at most {top_count_max} on this model's engine ({engine}), got"
                    f" {sampling.top_logprobs}"
                )
                raise RequestImpossible(message, RequestField.TOP_LOGPROBS)
            if sampling.temperature > 0 and not self.sampled_logprobs:
                message = (
                    f"needs a temperature of 0: this model's engine ({engine}) does not report"
                    " sampled tokens"
                )
                raise RequestImpossible(message, RequestField.TOP_LOGPROBS)
        for _, bias in sampling.logit_bias:
            if abs(bias) > self.logit_bias_max:
                message = (
                    f"must be between {-self.logit_bias_max:g} and {self.logit_bias_max:g} on this"
                    f" model's engine ({engine})"
                )
                raise RequestImpossible(message, RequestField.LOGIT_BIAS)

    def _check_thinking(
        self, request: GenerationRequest, form: ResponseFormat, engine: str
    ) -> frozenset[RequestField]:
        """Find the formats that the engine applies after thinking which the prompt opens or
        contains.

        Raises RequestImpossible if the engine would apply the request's format to the thinking.
        """
        known, field = (
            self.after_thinking or frozenset(),
            RequestField(f"response_format.{form.kind}"),
        )
        match request.thinking:
            case ThinkingStart.NONE:
                return frozenset()
            case ThinkingStart.PROMPT | ThinkingStart.ENDED if field in known:
                return known
            case ThinkingStart.ENDED:
                return frozenset()
            case _ if field in self.unsupported - known:
                return frozenset()
        message = (
            f"cannot be combined with thinking on this model's engine ({engine}), which would apply"
            " it to the thinking: switch thinking off (conversation.thinking, or enable_thinking in"
            " chat_template_kwargs, false)"
        )
        raise RequestImpossible(message, form.field)

    def _refusal(
        self, request: GenerationRequest, field: RequestField, engine: str
    ) -> RequestImpossible:
        name = field.rpartition(".")[2]
        message = (
            f"this model's engine ({engine}) does not support {name}: omit it, or use a model whose"
            " engine does"
        )
        if request.response_format is not None and field.startswith("response_format."):
            return RequestImpossible(message, request.response_format.field)
        return RequestImpossible(message, field)

    def refusals(self) -> list[tuple[RequestField, str]]:
        """List the refused fields with the refused values; an empty text means any value in use."""
        found = [(field, "") for field in _in_order(self.unsupported)]
        if RequestField.TOP_LOGPROBS not in self.unsupported:
            if self.top_logprobs_max is not None:
                found.append((RequestField.TOP_LOGPROBS, f"above {self.top_logprobs_max}"))
            if not self.sampled_logprobs:
                found.append((RequestField.TOP_LOGPROBS, "with a temperature above 0"))
        if RequestField.LOGIT_BIAS not in self.unsupported and self.logit_bias_max < inf:
            bias_max = f"{self.logit_bias_max:g}"
            found.append((RequestField.LOGIT_BIAS, f"below -{bias_max} or above {bias_max}"))
        return found

    def honoured(self, defaults: SamplingParams) -> tuple[SamplingParams, frozenset[RequestField]]:
        """Remove unsupported fields from default sampling; return the rest and those removed."""
        left_out = set()
        for field in self.unsupported:
            section, _, name = field.partition(".")
            if section == "sampling" and getattr(defaults, name) != getattr(_NEUTRAL, name):
                defaults = replace(defaults, **{name: getattr(_NEUTRAL, name)})
                left_out.add(field)
        return defaults, frozenset(left_out)


def combined(capabilities: Iterable[Capabilities]) -> Capabilities:
    """Merge capabilities of replicas: one that supports a field is enough, others are skipped."""
    each = tuple(capabilities)
    limits = [one.top_logprobs_max for one in each]
    return Capabilities(
        unsupported=frozenset.intersection(*(one.unsupported for one in each)),
        top_logprobs_max=(
            None if None in limits else max(limit for limit in limits if limit is not None)
        ),
        sampled_logprobs=any(one.sampled_logprobs for one in each),
        logit_bias_max=max(one.logit_bias_max for one in each),
        counts_from_usage=any(one.counts_from_usage for one in each),
        after_thinking=(
            None
            if any(one.after_thinking is None for one in each)
            else frozenset[RequestField]().union(*(one.after_thinking or () for one in each))
        ),
    )
