"""The body of `POST /v1/completions`, and the requests that it asks for: one for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

from weir.v1 import inference_service_pb2 as pb

from api.openai.chat_parameters import fill_decoding
from api.openai.parameters import (
    COMMON_NAMES,
    Asked,
    Int32,
    Int64,
    SharedParameters,
    TokenId,
    check_count,
    check_shared,
    fill_shared,
    refuse_given,
)
from api.openai.refusals import wrong_parameter

MAX_TOKENS_UNSET = 16  # OpenAI's own default of this API, and of no other
PROMPT_COUNT_MAX = 128  # each is a request of its own, all of which wait for the last one

NAMES = COMMON_NAMES | {
    "text": "prompt",
    "token_ids.ids": "prompt",
    "stop_sequences": "stop",
    "choice_count": "n",
    "max_output_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}

Prompts = Sequence[str | Sequence[int]]
Prompt = str | list[str | TokenId | list[TokenId]]


class CompletionParameters(SharedParameters, forbid_unknown_fields=True, kw_only=True):
    """What `client.completions.create` may send."""

    prompt: Prompt
    max_tokens: Int64 | None = None
    n: Int32 | None = None
    best_of: Int32 | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    logprobs: Int32 | None = None
    echo: bool | None = None
    suffix: Any = None


class PromptedFrames(Sequence[pb.StartFrame]):
    """One frame for each prompt, made when it is looked at: what is wrong with all of them is refused once the first was made."""

    def __init__(self, start: pb.StartFrame, prompts: Prompts) -> None:
        """start: without a prompt."""
        self._start = start
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> pb.StartFrame: ...

    @overload
    def __getitem__(self, index: slice) -> PromptedFrames: ...

    def __getitem__(self, index: int | slice) -> pb.StartFrame | PromptedFrames:
        if isinstance(index, slice):
            return PromptedFrames(self._start, self._prompts[index])
        return with_prompt(self._start, self._prompts[index])


def completion_asked(given: CompletionParameters) -> Asked:
    """What a completion asks for. Raises: InvalidRequest."""
    check_shared(given)
    refuse_given(given, "echo", "suffix")
    count = 1 if given.n is None else given.n
    if given.best_of not in (None, count):
        raise wrong_parameter("best_of", "must be what n is: nothing is generated that is not returned")
    start = pb.StartFrame(max_output_tokens=MAX_TOKENS_UNSET if given.max_tokens is None else given.max_tokens)
    fill_shared(start, given)
    fill_decoding(start, given)
    if given.logprobs is not None:
        start.top_logprobs = given.logprobs
    return Asked(
        starts=PromptedFrames(start, prompts_of(given.prompt)),
        model=given.model,
        streams=bool(given.stream),
        includes_usage=given.stream_options is not None and bool(given.stream_options.include_usage),
        names=NAMES,
        choice_count=count,
    )


def prompts_of(given: Prompt, param: str = "prompt", count_max: int = PROMPT_COUNT_MAX) -> Prompts:
    """The prompts: a text, texts, token ids, or lists of them. Raises: InvalidRequest for a mixture, none, or too many."""
    if isinstance(given, str):
        return [given]
    if given and not isinstance(given[0], int):
        check_count(given, param, count_max)
    kinds = set(map(type, given))  # there may be a million token ids: no loop over them
    if len(kinds) != 1:
        raise wrong_parameter(param, "must be a text, a list of texts, a list of token ids, or a list of such lists")
    return cast(Prompts, [given] if kinds == {int} else given)


def with_prompt(start: pb.StartFrame, prompt: str | Sequence[int]) -> pb.StartFrame:
    """The same request with a prompt."""
    complete = pb.StartFrame()
    complete.CopyFrom(start)
    if isinstance(prompt, str):
        complete.text = prompt
    else:
        complete.token_ids.ids.extend(prompt)
    return complete
