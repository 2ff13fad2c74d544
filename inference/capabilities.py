"""Request fields that an engine supports, and the rejection of the others.

Each engine declares its `Capabilities` once, on its `ModelInfo`. The API checks a request against
them before it makes a hold, and the engine checks again on submission. Supported fields are
translated to the engine's own request; all others are rejected by their name on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from inference.errors import RequestImpossible
from inference.sequences import (
    GenerationRequest,
    RequestField,
    ResponseFormat,
    SamplingParams,
    ThinkingStart,
)

SAMPLINGS_MAX = 256  # parameters whose fields are kept: most requests have the model's defaults
_NEUTRAL = SamplingParams()
_OF_CHANCE = frozenset(
    {RequestField.TOP_P, RequestField.TOP_K, RequestField.MIN_P, RequestField.SEED}
)
_OF_SAMPLING = frozenset(
    {
        *(field for field in RequestField if field.startswith("sampling.")),
        *(RequestField.TOP_LOGPROBS, RequestField.PROMPT_LOGPROBS),
    }
)
# Fields that only the embedded engine supports
EMBEDDED_ONLY = frozenset(
    {
        RequestField.BEAM_SEARCH,
        RequestField.PROMPT_LOGPROBS,
        RequestField.MAX_REASONING_TOKENS,
    }
)


def used_fields(request: GenerationRequest) -> frozenset[RequestField]:
    """Find the fields that affect the output. Some fields need a temperature above 0."""
    used, stop, form = _sampling_fields(request.sampling), request.stop, request.response_format
    if stop.ignore_eos:
        used |= {RequestField.IGNORE_EOS}
    if stop.min_output_tokens:
        used |= {RequestField.MIN_OUTPUT_TOKENS}
    if stop.stop_token_ids:
        used |= {RequestField.STOP_TOKEN_IDS}
    if stop.max_reasoning_tokens is not None:
        used |= {RequestField.MAX_REASONING_TOKENS}
    if form is not None:
        used |= {RequestField(f"response_format.{form.kind}")}
    if request.beam_search is not None:
        used |= {RequestField.BEAM_SEARCH}
    return used


@lru_cache(maxsize=SAMPLINGS_MAX)
def _sampling_fields(sampling: SamplingParams) -> frozenset[RequestField]:
    left_out = frozenset() if sampling.temperature > 0 else _OF_CHANCE
    names = {field: field.rpartition(".")[2] for field in _OF_SAMPLING - left_out}
    return frozenset(
        field for field, name in names.items() if getattr(sampling, name) != getattr(_NEUTRAL, name)
    )


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
        if left and not left.isdisjoint(used := used_fields(request)):
            first = next(field for field in RequestField if field in left & used)
            raise self._refusal(request, first, engine)
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
        found = [(field, "") for field in RequestField if field in self.unsupported]
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
