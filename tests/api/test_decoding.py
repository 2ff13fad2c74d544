"""Decoding options of a start frame: invalid values are named, valid ones reach the engine."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import InvalidRequest
from api.generation.parsing.decoding import check_against_model
from api.generation.parsing.start_frame import ValidStart, parse_start
from inference.engine import (
    BeamSearchParams,
    EarlyStopping,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
    StopCriteria,
)

NAN = float("nan")
BEAM = {"beam_search": pb.BeamSearch(width=2)}
REGEX = {"response_format": pb.ResponseFormat(regex="a")}
SCHEMA_FIELD = "response_format.json_schema"
DEFAULTS = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.05)


def schema(text: str) -> dict[str, Any]:
    return {"response_format": pb.ResponseFormat(json_schema=text)}


def beam(**fields: Any) -> dict[str, Any]:
    return {"beam_search": pb.BeamSearch(**fields)}


def parse(sampling: dict[str, Any] | None = None, **fields: Any) -> ValidStart:
    fields["sampling"] = pb.Sampling(**(sampling or {}))
    start = pb.StartFrame(model="tiny", text="Hi", **fields)
    return parse_start(str(uuid.uuid4()), start)


def violations(error: pytest.ExceptionInfo[InvalidRequest]) -> list[str]:
    return [violation.field for violation in error.value.violations]


@pytest.mark.parametrize(
    ("sampling", "fields", "field"),
    [
        ({"temperature": 2.1}, {}, "sampling.temperature"),
        ({"temperature": NAN}, {}, "sampling.temperature"),
        ({"top_p": -0.1}, {}, "sampling.top_p"),
        ({"top_k": -2}, {}, "sampling.top_k"),
        ({"min_p": -0.1}, {}, "sampling.min_p"),
        ({"min_p": 1.1}, {}, "sampling.min_p"),
        ({"repetition_penalty": 0.0}, {}, "sampling.repetition_penalty"),
        ({"repetition_penalty": 2.5}, {}, "sampling.repetition_penalty"),
        ({"presence_penalty": -2.1}, {}, "sampling.presence_penalty"),
        ({"frequency_penalty": NAN}, {}, "sampling.frequency_penalty"),
        ({"logit_bias": {5: 101.0}}, {}, "sampling.logit_bias[5]"),
        ({"logit_bias": {5: NAN}}, {}, "sampling.logit_bias[5]"),
        ({"logit_bias": {-1: 1.0}}, {}, "sampling.logit_bias[-1]"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, {}, "sampling.logit_bias"),
        ({}, {"stop_token_ids": [3, -1]}, "stop_token_ids[1]"),
        ({}, {"stop_token_ids": range(65)}, "stop_token_ids"),
        ({}, {"min_output_tokens": -1}, "min_output_tokens"),
        ({}, {"min_output_tokens": 6, "max_output_tokens": 5}, "min_output_tokens"),
        ({}, {"max_output_tokens": 0}, "max_output_tokens"),
        ({}, {"top_logprobs": 21}, "top_logprobs"),
        ({}, {"top_logprobs": -1}, "top_logprobs"),
        ({}, {"prompt_logprobs": 6}, "prompt_logprobs"),
        ({}, BEAM | {"prompt_logprobs": 1}, "prompt_logprobs"),
        ({}, {"choice_count": 0}, "choice_count"),
        ({}, {"choice_count": 17}, "choice_count"),
        ({}, {"response_format": pb.ResponseFormat()}, "response_format"),
        ({}, schema("{"), SCHEMA_FIELD),
        ({}, schema("[]"), SCHEMA_FIELD),
        ({}, schema("[" * 60_000), SCHEMA_FIELD),
        ({}, schema('{"const": "' + "x" * 65_536 + '"}'), SCHEMA_FIELD),
        ({}, {"response_format": pb.ResponseFormat(regex="")}, "response_format.regex"),
        ({}, {"response_format": pb.ResponseFormat(lark="ü" * 32_769)}, "response_format.lark"),
        ({}, beam(), "beam_search.width"),
        ({}, beam(width=1), "beam_search.width"),
        ({}, beam(width=17), "beam_search.width"),
        ({}, beam(width=2, length_penalty=10.5), "beam_search.length_penalty"),
        ({}, beam(width=2, length_penalty=NAN), "beam_search.length_penalty"),
        ({}, beam(width=2, early_stopping=9), "beam_search.early_stopping"),
        ({}, BEAM | {"choice_count": 3}, "choice_count"),
        ({}, BEAM | {"stop_sequences": ["x"]}, "stop_sequences"),
        ({}, BEAM | REGEX, "response_format"),
        ({"temperature": 0.5}, BEAM, "sampling.temperature"),
        ({"top_p": 1.0}, BEAM, "sampling.top_p"),
        ({"top_k": 0}, BEAM, "sampling.top_k"),
        ({"min_p": 0.0}, BEAM, "sampling.min_p"),
        ({"seed": 1}, BEAM, "sampling.seed"),
        ({}, REGEX | {"ignore_eos": True}, "ignore_eos"),
        ({}, REGEX | {"min_output_tokens": 1}, "min_output_tokens"),
        ({}, REGEX | {"stop_token_ids": [5]}, "stop_token_ids"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_field(
    sampling: dict[str, Any], fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(sampling, **fields)

    assert violations(caught) == [field]


def test_every_violation_is_reported_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse({"min_p": 2.0, "presence_penalty": 3.0}, top_logprobs=99)

    assert violations(caught) == ["sampling.min_p", "sampling.presence_penalty", "top_logprobs"]


def test_unset_options_have_the_models_defaults_and_set_ones_win() -> None:
    assert parse().sampling.over(DEFAULTS) == DEFAULTS
    given = {
        "temperature": 0.0,
        "top_k": 0,
        "seed": 4,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {9: 1.5, 3: -100.0},
    }
    assert parse(given, top_logprobs=0).sampling.over(DEFAULTS) == SamplingParams(
        temperature=0.0, top_p=0.8, seed=4, logit_bias=((3, -100.0), (9, 1.5)), top_logprobs=0
    )


def test_a_beam_search_reaches_the_engine_without_the_models_defaults_of_chance() -> None:
    given = pb.BeamSearch(width=4, length_penalty=0.0, early_stopping=pb.EARLY_STOPPING_WHEN_FULL)

    parsed = parse(beam_search=given, choice_count=4)

    assert parsed.sampling.over(DEFAULTS) == SamplingParams(repetition_penalty=1.05)
    assert parsed.beam_search == BeamSearchParams(4, 0.0, EarlyStopping.WHEN_FULL)
    usual = BeamSearchParams(2, 1.0, EarlyStopping.HEURISTIC)
    assert parse(beam_search=pb.BeamSearch(width=2)).beam_search == usual
    assert parse().beam_search is None


def test_the_end_reaches_the_engine_as_it_is() -> None:
    stop = parse(stop_token_ids=[5, 5, 6], min_output_tokens=2, stop_sequences=["x"]).stop

    assert stop.within(90) == StopCriteria(90, ("x",), frozenset({5, 6}), False, 2)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (pb.ResponseFormat(json_schema='{"type": "null"}'), GrammarKind.JSON_SCHEMA),
        (pb.ResponseFormat(json_schema="true"), GrammarKind.JSON_SCHEMA),
        (pb.ResponseFormat(regex="a+"), GrammarKind.REGEX),
        (pb.ResponseFormat(lark='start: "a"'), GrammarKind.LARK),
    ],
)
def test_a_format_reaches_the_engine_unchanged(given: pb.ResponseFormat, kind: GrammarKind) -> None:
    parsed = parse(response_format=given).response_format

    assert parsed == ResponseFormat(kind, getattr(given, kind.value))
    assert parse().response_format is None


@pytest.mark.parametrize(
    ("sampling", "fields", "field"),
    [
        ({"logit_bias": {400: 1.0}}, {}, "sampling.logit_bias[400]"),
        ({}, {"stop_token_ids": [400]}, "stop_token_ids"),
        ({}, {"min_output_tokens": 51}, "min_output_tokens"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused_by_field(
    sampling: dict[str, Any], fields: dict[str, Any], field: str
) -> None:
    start = parse(sampling, **fields)

    def request(room_tokens: int, choice_count: int = 1) -> GenerationRequest:
        sampling = start.sampling.over(SamplingParams(temperature=1.0))
        stop = start.stop.within(room_tokens)
        return GenerationRequest((1,), sampling, stop, choice_count=choice_count)

    with pytest.raises(InvalidRequest) as caught:
        check_against_model(request(50, start.choice_count), vocabulary_size=400)

    assert violations(caught) == [field]
    check_against_model(request(51), vocabulary_size=401)


def test_decoding_is_part_of_what_makes_a_request_the_same() -> None:
    request_id = str(uuid.uuid4())
    hashes = {
        parse_start(request_id, pb.StartFrame(model="tiny", text="Hi", **fields)).payload_hash
        for fields in (
            {},
            {"sampling": pb.Sampling(min_p=0.0)},
            {"sampling": pb.Sampling(logit_bias={3: 1.0})},
            {"top_logprobs": 0},
            {"prompt_logprobs": 0},
            {"beam_search": pb.BeamSearch(width=2)},
            {"beam_search": pb.BeamSearch(width=2, length_penalty=1.0)},
            {"min_output_tokens": 1},
            {"stop_token_ids": [0]},
        )
    }

    assert len(hashes) == 9
