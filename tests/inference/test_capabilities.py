"""Every request field is translated for the engine, refused by name, or handled here."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest

from inference.adapters.external_request import Choice, Request
from inference.adapters.remote_connection import DIALECTS
from inference.adapters.remote_dialects import SglangDialect, TrtllmDialect, VllmDialect
from inference.adapters.remote_settings import RemoteSettings, Service, Target
from inference.adapters.tensorrt_library import TensorRtLibrary
from inference.adapters.tensorrt_settings import TENSORRT_LLM
from inference.capabilities import EMBEDDED_ONLY, Capabilities, combined, used_fields
from inference.checkpoint.checkpoint import read_external_model, read_model_info
from inference.engine import (
    BeamSearchParams,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
    StopCriteria,
)
from inference.errors import RequestImpossible
from inference.sequences import RequestField, ThinkingStart, choice_seed
from inference.text.text_decoder import TextDecoder
from inference.text.tokenizer import Tokenizer
from infra.architecture import ROOT
from tests.inference.checkpoints import TinyCheckpoint, make_checkpoint
from tests.inference.running import make_request
from tests.inference.tensorrt_queue import double_imported

Translate = Callable[[GenerationRequest], object]

SAMPLED = make_request(
    [9, 10, 11], 24, sampling=SamplingParams(temperature=0.9, seed=1), ignore_eos=False
)
GREEDY = replace(SAMPLED, sampling=SamplingParams())

# Fields that every engine gets, or that act outside the engine, with the reason.
ALWAYS = {
    "sequence_id": "never crosses",
    "prompt_token_ids": "translated by all",
    "sampling": "its own fields are listed",
    "stop": "its own fields are listed",
    "response_format": "by its kind",
    "cache_salt": "a wire that has none is not used for more than one tenant",
    "choice_count": "one sequence for each choice",
    "rank": "what waits here is ordered here",
    "output_token_ids": "a part of the prompt, or refused where that makes a difference",
    "regions": "chooses the engine",
    "is_bound": "chooses the engine",
    "adapter": "refused by engines that do not have it",
    "beam_search": "listed",
    "splits_reasoning": "the text is split where it is decoded",
    "thinking": "by the formats after thinking",
    "marked_functions": "the text is marked where it is decoded",
    "is_whole": "changes only when the output is reported",
    "temperature": "translated by all",
    "max_output_tokens": "translated by all",
    "stop_sequences": "matched in the text here",
}


def sampling(**changes: Any) -> GenerationRequest:
    return replace(SAMPLED, sampling=replace(SAMPLED.sampling, **changes))


def stop(**changes: Any) -> GenerationRequest:
    return replace(SAMPLED, stop=replace(SAMPLED.stop, **changes))


def formatted(kind: GrammarKind, source: str) -> GenerationRequest:
    return replace(SAMPLED, response_format=ResponseFormat(kind, source))


# A request that differs from `SAMPLED` (the last one: from `GREEDY`) only in this field.
CHANGED: dict[RequestField, GenerationRequest] = {
    RequestField.TOP_P: sampling(top_p=0.5),
    RequestField.TOP_K: sampling(top_k=7),
    RequestField.MIN_P: sampling(min_p=0.25),
    RequestField.SEED: sampling(seed=2),
    RequestField.REPETITION_PENALTY: sampling(repetition_penalty=1.5),
    RequestField.PRESENCE_PENALTY: sampling(presence_penalty=0.5),
    RequestField.FREQUENCY_PENALTY: sampling(frequency_penalty=0.5),
    RequestField.LOGIT_BIAS: sampling(logit_bias=((9, 4.0),)),
    RequestField.STOP_TOKEN_IDS: stop(stop_token_ids=frozenset({33})),
    RequestField.IGNORE_EOS: stop(ignore_eos=True),
    RequestField.MIN_OUTPUT_TOKENS: stop(min_output_tokens=5),
    RequestField.JSON_SCHEMA: formatted(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
    RequestField.REGEX: formatted(GrammarKind.REGEX, "[0-9]+"),
    RequestField.LARK: formatted(GrammarKind.LARK, 'start: "a"'),
    RequestField.BEAM_SEARCH: replace(SAMPLED, beam_search=BeamSearchParams(2)),
    RequestField.MAX_REASONING_TOKENS: stop(max_reasoning_tokens=0),
    RequestField.TOP_LOGPROBS: replace(GREEDY, sampling=SamplingParams(top_logprobs=3)),
    RequestField.PROMPT_LOGPROBS: replace(GREEDY, sampling=SamplingParams(prompt_logprobs=3)),
}


class RecordingChannel:
    """Double of a channel whose calls only record the bytes of their requests."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def unary_stream(
        self, path: str, request_serializer: Callable[[Any], bytes]
    ) -> Callable[[Any], AsyncIterator[bytes]]:
        """Implement `grpc.aio.Channel.unary_stream`."""

        def call(request: Any) -> AsyncIterator[bytes]:
            self.sent.append(request_serializer(request))
            return no_messages()

        return call


async def no_messages() -> AsyncIterator[bytes]:
    """Answer without messages."""
    messages: tuple[bytes, ...] = ()
    for message in messages:
        yield message


def choice_of(request: GenerationRequest, decoder: TextDecoder) -> Choice:
    ends = frozenset() if request.stop.ignore_eos else frozenset({2, 6})
    made = Request(1, request, ends | request.stop.stop_token_ids, 0.0, None)
    return Choice(made, 0, choice_seed(request.sampling.seed or 0, 0), decoder.open())


@pytest.fixture(params=["tensorrt", "trtllm", "vllm", "sglang"])
def adapter(
    request: pytest.FixtureRequest, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Capabilities, Translate]]:
    """Declared capabilities of an engine, and its translation of a request."""
    tokenizer = Tokenizer(tiny.directory)
    decoder = TextDecoder(tokenizer.backend, tokenizer.special_token_ids, "")
    with contextlib.ExitStack() as stack:
        if request.param == "tensorrt":
            stack.enter_context(double_imported(monkeypatch))
            library = TensorRtLibrary()

            def translate(wanted: GenerationRequest) -> object:
                ends = choice_of(wanted, decoder).request.end_token_ids
                return repr(vars(library.sampling(wanted, ends, 400)))

            yield TENSORRT_LLM["1.2.1"], translate
        else:
            kind = DIALECTS[Service(request.param)]
            channel = RecordingChannel()
            target = Target(Service(request.param), "127.0.0.1:1")
            dialect = cast(Any, kind)(channel, RemoteSettings(Path(), "tiny", target))

            def translate(wanted: GenerationRequest) -> object:
                dialect.generate("id", choice_of(wanted, decoder))
                return channel.sent.pop()

            yield kind.capabilities, translate


def unaccounted(capabilities: Capabilities, translate: Translate) -> set[str]:
    """Return fields neither refused nor translated, and fields both refused and translated."""
    found = set()
    for field, changed in CHANGED.items():
        base = (
            GREEDY
            if field in (RequestField.TOP_LOGPROBS, RequestField.PROMPT_LOGPROBS)
            else SAMPLED
        )
        if field in capabilities.unsupported:
            continue
        if translate(changed) == translate(base):
            found.add(field.value)
    return found


def test_every_field_is_listed() -> None:
    assert set(CHANGED) == set(RequestField)
    known = {field.rpartition(".")[2] for field in RequestField} | ALWAYS.keys()
    for kind in (GenerationRequest, SamplingParams, StopCriteria):
        assert {each.name for each in fields(kind)} <= known


@pytest.mark.parametrize("field", RequestField)
def test_a_changed_field_is_seen_as_used(field: RequestField) -> None:
    neutral = (
        GREEDY
        if field in (RequestField.TOP_LOGPROBS, RequestField.PROMPT_LOGPROBS)
        else replace(SAMPLED, sampling=SamplingParams(temperature=0.9))
    )

    assert field in used_fields(CHANGED[field])
    assert field not in used_fields(neutral)


def test_every_field_is_translated_or_refused(adapter: tuple[Capabilities, Translate]) -> None:
    capabilities, translate = adapter

    assert unaccounted(capabilities, translate) == set()
    for field in capabilities.unsupported:
        with pytest.raises(
            RequestImpossible, match=r"engine \(this one\) does not support .*omit it"
        ) as refused:
            capabilities.check(CHANGED[field], "this one")
        assert refused.value.field in used_fields(CHANGED[field])


@pytest.mark.parametrize(
    "field", [RequestField.TOP_K, RequestField.STOP_TOKEN_IDS, RequestField.JSON_SCHEMA]
)
def test_a_field_that_a_translation_forgets_is_found(
    adapter: tuple[Capabilities, Translate], field: RequestField
) -> None:
    capabilities, translate = adapter

    def forgetful(request: GenerationRequest) -> object:
        return translate(SAMPLED if request is CHANGED[field] else request)

    assert unaccounted(capabilities, forgetful) == {field.value}


def test_which_engine_honours_seeds() -> None:
    honour = {
        name: RequestField.SEED not in capabilities.unsupported
        for name, capabilities in {
            "tensorrt": TENSORRT_LLM["1.2.1"],
            "trtllm": TrtllmDialect.capabilities,
            "vllm": VllmDialect.capabilities,
            "sglang": SglangDialect.capabilities,
        }.items()
    }

    assert honour == {"tensorrt": False, "trtllm": False, "vllm": True, "sglang": False}


def test_parameters_without_effect_are_not_refused() -> None:
    """Seed and sampling limits of a greedy request, and every neutral value."""
    capabilities = TENSORRT_LLM["1.2.1"]

    capabilities.check(replace(GREEDY, sampling=SamplingParams(seed=5, min_p=0.5)), "tensorrt_llm")
    capabilities.check(
        replace(SAMPLED, sampling=SamplingParams(temperature=1.0, repetition_penalty=1.0)),
        "tensorrt_llm",
    )


@pytest.mark.parametrize(
    ("capabilities", "request_", "field", "words"),
    [
        (
            VllmDialect.capabilities,
            sampling(top_logprobs=20),
            "top_logprobs",
            "at most 19 .*got 20",
        ),
        (
            VllmDialect.capabilities,
            sampling(logit_bias=((9, -101.0),)),
            "sampling.logit_bias",
            "between -100 and 100",
        ),
        (
            TrtllmDialect.capabilities,
            sampling(seed=None, top_logprobs=2),
            "top_logprobs",
            "needs a temperature of 0",
        ),
    ],
)
def test_values_beyond_an_engine_s_range_are_refused(
    capabilities: Capabilities, request_: GenerationRequest, field: str, words: str
) -> None:
    with pytest.raises(RequestImpossible, match=words) as refused:
        capabilities.check(request_, "this one")
    assert refused.value.field == field


def test_the_ranges_of_an_engine_are_listed_with_its_fields() -> None:
    assert VllmDialect.capabilities.refusals() == [
        ("prompt_logprobs", ""),
        ("response_format.lark", ""),
        ("beam_search", ""),
        ("max_reasoning_tokens", ""),
        ("top_logprobs", "above 19"),
        ("sampling.logit_bias", "below -100 or above 100"),
    ]
    assert Capabilities().refusals() == []


def test_the_documentation_lists_the_fields_of_each_version_of_tensorrt_llm() -> None:
    page = (ROOT / "docs" / "reference" / "engines.md").read_text()
    table = page.partition("| field | behaviour of TensorRT-LLM |")[2].partition("\n\n")[0]
    names = "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `"))
    documented = set(re.findall(r"`(\w+)`", names))

    for version, capabilities in TENSORRT_LLM.items():
        assert version.removesuffix("rc") in page
        assert documented == {field.rpartition(".")[2] for field, _ in capabilities.refusals()}


def test_a_model_of_several_engines_takes_what_one_of_them_honours() -> None:
    both = combined([VllmDialect.capabilities, TrtllmDialect.capabilities])

    assert both.unsupported == EMBEDDED_ONLY | {RequestField.LARK}
    assert both.sampled_logprobs
    assert both.top_logprobs_max is None


def test_defaults_of_a_checkpoint_that_its_engine_ignores_are_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise every request without these fields would be refused."""
    make_checkpoint(
        tmp_path,
        generation_config={
            "repetition_penalty": 1.05,
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
        },
    )

    model, _ = read_external_model(
        tmp_path,
        name="m",
        engine="tensorrt_llm",
        context_window_tokens_max=None,
        capabilities=TENSORRT_LLM["1.2.1"],
    )

    assert model.default_sampling == SamplingParams(temperature=0.7, top_k=20)
    assert "tensorrt_llm does not support sampling.repetition_penalty" in caplog.text
    assert (
        read_model_info(tmp_path, name="m", engine="torch").default_sampling.repetition_penalty
        == 1.05
    )


REGEX, LARK = RequestField.REGEX, RequestField.LARK


@pytest.mark.parametrize(
    ("unsupported", "after_thinking", "refused"),
    [
        # An embedded engine, and servers without and with a switch of their own.
        (set(), None, {}),
        (set(), set(), {"prompt": "thinking off", "model": "thinking off"}),
        (set(), {REGEX}, {"model": "thinking off"}),
        ({REGEX}, {REGEX}, {"none": "omit it", "model": "thinking off"}),
        ({REGEX}, set(), dict.fromkeys(ThinkingStart, "omit it")),
        ({REGEX}, {LARK}, dict.fromkeys(ThinkingStart, "omit it")),
    ],
)
def test_a_format_and_thinking_are_combined_only_where_the_engine_keeps_both(
    unsupported: set[RequestField],
    after_thinking: set[RequestField] | None,
    refused: dict[str, str],
) -> None:
    known = None if after_thinking is None else frozenset(after_thinking)
    capabilities = Capabilities(frozenset(unsupported), after_thinking=known)
    for thinking in ThinkingStart:
        form = ResponseFormat(GrammarKind.REGEX, "a", "response_format.regex")
        requested = replace(GREEDY, response_format=form, thinking=thinking)
        if (message := refused.get(thinking)) is None:
            capabilities.check(requested, "this one")
            continue
        with pytest.raises(RequestImpossible, match=message) as refusal:
            capabilities.check(requested, "this one")
        assert refusal.value.field == "response_format.regex"
    assert combined([capabilities, Capabilities(after_thinking=None)]).after_thinking is None
    other = Capabilities(after_thinking=frozenset({LARK}))
    assert combined([capabilities, other]).after_thinking == (
        None if known is None else known | {LARK}
    )
