"""Request fields of other servers: each takes effect, changes nothing, or is refused by its name.

The fields are those of published protocols, in `dialect_fields.txt`.
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import FieldViolation, InvalidRequest
from api.generation.parsing.decoding import SAMPLING_RANGES
from api.generation.parsing.start_frame import ValidStart, parse_start
from api.openai.apis import parsed_body
from api.openai.dialects import ABLE, FIELDS, FIELDS_BY_API, NEUTRAL, field_of
from api.openai.effects import Effect
from api.openai.embeddings import EmbeddingParameters, embed_request, embedding_names, normalized
from api.openai.error_responses import HttpFault, parameter
from api.openai.formats import lark_of
from api.openai.gateway import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from api.openai.parameters import RANGES, decode
from api.openai.tolerance import Notes, shape_of

FIELDS_FILE = Path(__file__).with_name("dialect_fields.txt")
APIS = {"chat": CHAT, "completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
KINDS = {name: api.parameters for name, api in APIS.items()} | {"embeddings": EmbeddingParameters}
ENDPOINTS = (*APIS, "embeddings")
USER = [{"role": "user", "content": "Hi"}]
BODIES: Mapping[str, dict[str, Any]] = {
    "chat": {"model": "demo", "messages": USER},
    "completions": {"model": "demo", "prompt": "Hi"},
    "responses": {"model": "demo", "input": "Hi"},
    "messages": {"model": "demo", "messages": USER, "max_tokens": 20},
    "embeddings": {"model": "demo", "input": "Hi"},
}
LIMITS = {
    "chat": "max_completion_tokens",
    "completions": "max_tokens",
    "responses": "max_output_tokens",
    "messages": "max_tokens",
}
STOPS = {"chat": "stop", "completions": "stop", "messages": "stop_sequences"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}}}
GBNF = 'root ::= "a" | digit+\ndigit ::= [0-9]'

NEUTRAL_OF_ALL: dict[str, Any] = {
    "top_k": -1,
    "top_p": 1,
    "min_p": 0,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logprobs": False,
    "top_logprobs": 0,
    "n": 1,
    "best_of": 1,
    "seed": -1,
    "stop": "",
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
    "stream_options": None,
    "service_tier": "auto",
    "store": False,
    "background": False,
    "previous_response_id": None,
    "metadata": {},
    "ignore_eos": False,
    "min_tokens": 0,
    "echo": False,
    "mirostat": 0,
    "use_beam_search": False,
    "skip_special_tokens": True,
    "cache_prompt": True,
    "min_new_tokens": None,
    "structured_outputs": None,
    "guided_json": {},
    "n_probs": 0,
    "modalities": ["text"],
    "reasoning": {"effort": None},
    "thinking": {},
    "prompt_logprobs": False,
    "return_token_ids": False,
    "continue_final_message": False,
}
OWN_NEUTRAL: Mapping[str, dict[str, Any]] = {
    "chat": {"stream_options": {}, "reasoning_effort": "", "tool_choice": "auto"},
    "completions": {"suffix": ""},
    "responses": {
        "reasoning": {"effort": None},
        "truncation": "disabled",
        "context_management": [],
        "include": [],
        "text": {"format": {"type": "text"}},
    },
    "messages": {
        "context_management": {"edits": []},
        "thinking": None,
        "inference_geo": "global",
        "betas": [],
    },
    "embeddings": {"encoding_format": "float", "truncate": "NONE", "embed_dtype": "float32"},
}
WRONG: Mapping[str, tuple[Any, ...]] = {
    "temperature": (-0.1, 2.1, True, "0.5", [1]),
    "top_p": (-0.1, 1.1, False, "1"),
    "top_k": (-2, True, "3", 1.5),
    "min_p": (-0.1, 1.1, True),
    "repetition_penalty": (0, -1, 3, "1"),
    "presence_penalty": (-2.5, 2.5, True),
    "frequency_penalty": (-2.5, "0"),
    "n": (0, -1, 17, True),
    "seed": ("1", 1.5, 2**63),
    "min_tokens": (-1, True),
}
HALF = '"\\ud83d"'
FORMATS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"guided_json": SCHEMA}, "json_schema", ""),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", ""),
    ({"json_schema": SCHEMA}, "json_schema", ""),
    ({"json_schema": json.dumps(SCHEMA)}, "json_schema", ""),
    ({"format": SCHEMA}, "json_schema", ""),
    ({"grammar": {"type": "json", "value": SCHEMA}}, "json_schema", ""),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", ""),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"regex": "a+"}, "regex", "a+"),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"grammar": {"type": "regex", "value": "a+"}}, "regex", "a+"),
    ({"guided_choice": ["a.b", "(c)"]}, "regex", r"a\.b|\(c\)"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "regex", "a|b"),
    ({"guided_grammar": GBNF}, "lark", lark_of(GBNF, "")),
    ({"ebnf": GBNF}, "lark", lark_of(GBNF, "")),
    ({"grammar": GBNF}, "lark", lark_of(GBNF, "")),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
    ({"format": "json"}, "json_schema", '{"type": "object"}'),
    ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
)
CHAT_FORMATS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"type": "json_object", "schema": SCHEMA}, "json_schema", ""),
    ({"type": "json_object", "schema": {}}, "json_schema", '{"type": "object"}'),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "json_schema", ""),
    ({"type": "json", "value": SCHEMA}, "json_schema", ""),
    ({"type": "json_object", "value": SCHEMA}, "json_schema", ""),
    ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, "json_schema", ""),
    ({"type": "regex", "value": "a+"}, "regex", "a+"),
    ({"type": "regex_schema", "regex_schema": "a+"}, "regex", "a+"),
    ({"type": "grammar", "grammar": GBNF}, "lark", lark_of(GBNF, "")),
)


def published() -> Iterator[tuple[str, str, str]]:
    """Yield endpoint, protocol and name of each published field."""
    for block in FIELDS_FILE.read_text(encoding="utf-8").split("\n["):
        if (found := re.match(r"(\w+)\] (.*)\n# .*\n([^#]*)", block)) is not None:
            for name in found[3].split():
                yield found[1], found[2], name


PUBLISHED = sorted({(endpoint, name) for endpoint, _, name in published()})


def read(api: str, body: dict[str, Any], *, strict: bool = False) -> tuple[Any, list[str], Notes]:
    """Return what a body requests, the ignored names, and the notes on it."""
    data = msgspec.json.encode(body)
    notes = Notes(strict=strict)
    if api == "embeddings":
        requested = decode(data, EmbeddingParameters, notes)
        return embed_request(requested, str(uuid.UUID(int=1))), list(notes.names), notes
    parsed, headers = parsed_body(data, APIS[api], strict=strict)
    shown = headers.get("weir-ignored-parameters", "").split(", ") if headers else []
    return parsed, shown, notes


def frame(api: str, **fields: Any) -> Any:
    """Return the start frame, or the request to embed, of a body with these fields."""
    parsed, _, _ = read(api, BODIES[api] | fields)
    return parsed if api == "embeddings" else parsed.starts[0]


def check(api: str, body: dict[str, Any]) -> None:
    """Read a body, and check its start frame. Raises: InvalidRequest with the API's names."""
    names: Mapping[str, str] = {}
    notes = Notes()
    try:
        if api == "embeddings":
            requested = decode(msgspec.json.encode(body), EmbeddingParameters, notes)
            names = notes.names_as_sent({})
            embed_request(requested, str(uuid.UUID(int=1)))
        else:
            parsed, _, _ = read(api, body)
            names = parsed.names
            valid(parsed.starts[0])
    except InvalidRequest as error:
        [first, *_] = error.violations
        raise InvalidRequest(
            [FieldViolation(parameter(first.field, names), first.description)]
        ) from error


def valid(start: pb.StartFrame) -> ValidStart:
    return parse_start(str(uuid.UUID(int=1)), start)


def refusal(api: str, **fields: Any) -> tuple[str, str]:
    """Return parameter and description of the refusal that these fields get."""
    with pytest.raises(InvalidRequest) as refused:
        check(api, BODIES[api] | fields)
    violation = refused.value.violations[0]
    return violation.field, violation.description


def test_the_published_fields_are_read_from_their_file() -> None:
    servers = {protocol.split(",")[0] for _, protocol, _ in published()}

    assert len(PUBLISHED) > 600
    assert {"vLLM", "SGLang", "LMDeploy", "llama.cpp", "TGI", "Aphrodite", "Ollama"} < servers
    assert {endpoint for endpoint, _ in PUBLISHED} == set(ENDPOINTS)


def test_every_published_field_is_classified() -> None:
    """Served, in the table, or a parameter of another API, which is refused."""
    others = {each for kind in KINDS.values() for each in kind.__struct_fields__}
    for api, name in PUBLISHED:
        served = set(KINDS[api].__struct_fields__)
        entry = field_of(name, api)
        assert name in served | others or entry is not None, (api, name)
        if name not in served and entry is not None and entry.effect is Effect.REFUSED:
            assert entry.note, (api, name)
            assert refusal(api, **{name: "nothing of the kind"})[0] == name


@pytest.mark.parametrize("api", ENDPOINTS)
def test_a_field_has_its_effect_and_changes_nothing_where_its_value_says_so(api: str) -> None:
    plain, served = frame(api), set(KINDS[api].__struct_fields__)
    for name in FIELDS:
        entry = field_of(name, api)
        assert entry is not None, name
        if name in served:
            continue
        for value in (None, "", [], {}, *entry.neutral, *NEUTRAL.get(name, ())):
            assert frame(api, **{name: value}) == plain, (name, value)
        if entry.effect is Effect.HINT:
            assert read(api, BODIES[api] | {name: "x"})[1] == [name]
        elif api not in ABLE.get(entry.effect, {api}) or entry.effect is Effect.REFUSED:
            assert refusal(api, **{name: [{"x": 1}]})[0] == name
        elif entry.effect is Effect.ALIAS and not set(entry.means) & served:
            assert refusal(api, **{name: 7})[0] == name


def test_entries_by_api_differ_from_the_others() -> None:
    for fields in FIELDS_BY_API.values():
        for name, entry in fields.items():
            assert FIELDS.get(name) != entry, name


# Nothing means nothing


@pytest.mark.parametrize("api", ENDPOINTS)
def test_every_optional_parameter_may_be_null_or_empty(api: str) -> None:
    own: frozenset[str] = shape_of(KINDS[api]).optional  # type: ignore[arg-type]
    optional = {*own, *FIELDS, *NEUTRAL} - set(BODIES[api])
    plain = frame(api)

    nothing: tuple[Any, ...] = (None, "", [], {})
    for name, value in itertools.product(optional, nothing):
        assert frame(api, **{name: value}) == plain, (name, value)
    for names in (own - set(BODIES[api]), sorted(FIELDS)[:60]):
        assert frame(api, **dict.fromkeys(names)) == plain


def optional_indexes(
    info: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the optional members below a type, and whether each may be null."""
    match info:
        case msgspec.inspect.StructType(fields=fields):
            for each in fields:
                types = (
                    each.type.types
                    if isinstance(each.type, msgspec.inspect.UnionType)
                    else (each.type,)
                )
                nullable = any(
                    isinstance(
                        kind,
                        msgspec.inspect.NoneType
                        | msgspec.inspect.AnyType
                        | msgspec.inspect.RawType,
                    )
                    for kind in types
                )
                if not each.required:
                    yield (*path, each.encode_name), nullable
                yield from optional_indexes(each.type, (*path, each.encode_name))
        case msgspec.inspect.ListType(item_type=item):
            yield from optional_indexes(item, path)
        case msgspec.inspect.UnionType(types=types):
            for kind in types:
                yield from optional_indexes(kind, path)


@pytest.mark.parametrize("api", ENDPOINTS)
def test_optional_members_may_be_null_at_any_depth(api: str) -> None:
    entries = dict(optional_indexes(msgspec.inspect.type_info(KINDS[api])))

    assert len(entries) > 3
    assert [entry for entry, nullable in entries.items() if not nullable] == []


def sampling_without(request: Any, *names: str) -> Any:
    """Return a start frame without these fields of its sampling."""
    copy = type(request)()
    copy.CopyFrom(request)
    for name in names:
        copy.sampling.ClearField(name)
    for name in ("choice_count", "tier"):
        copy.ClearField(name)
    if not copy.sampling.ListFields():
        copy.ClearField("sampling")
    return copy


@given(data=st.data())
@pytest.mark.parametrize("api", ENDPOINTS)
def test_neutral_values_in_any_combination_change_nothing(api: str, data: st.DataObject) -> None:
    """A model whose defaults are neutral then answers the same, since the engine gets the same."""
    every = NEUTRAL_OF_ALL | OWN_NEUTRAL[api]
    fields = {name: every[name] for name in data.draw(st.sets(st.sampled_from(sorted(every))))}

    requested, plain = frame(api, **fields), frame(api)

    if api == "embeddings":
        assert requested == plain
        return
    neutral = ("top_k", "top_p", "min_p", "repetition_penalty")
    penalties = ("frequency_penalty", "presence_penalty")
    assert sampling_without(requested, *neutral, *penalties) == sampling_without(plain)
    found = valid(requested).sampling
    assert (found.top_k or 0, found.top_p or 1, found.min_p or 0) == (0, 1, 0)


# Served parameters: the border between neutral and refused


@pytest.mark.parametrize("api", ["chat", "completions", "messages"])
def test_top_p_of_0_is_the_most_likely_token_and_top_k_of_minus_1_is_all(api: str) -> None:
    certain = valid(frame(api, top_p=0, temperature=1.5)).sampling
    every = valid(frame(api, top_k=-1)).sampling

    assert (certain.temperature, certain.top_p) == (0.0, None)
    assert every.top_k == 0


@pytest.mark.parametrize("api", LIMITS)
def test_a_limit_of_minus_1_is_no_limit_and_0_names_the_parameter(api: str) -> None:
    name = LIMITS[api]

    assert not frame(api, **{name: -1}).HasField("max_output_tokens")
    for value in (0, -2):
        param, description = refusal(api, **{name: value})
        assert param == name
        assert description == f"must be at least 1, or -1 for no limit, got {value}"


@pytest.mark.parametrize("api", APIS)
def test_a_value_out_of_range_is_refused_by_name_with_the_range(api: str) -> None:
    ranges = {**RANGES, "min_tokens": "from 0"}
    names = [name for name in WRONG if name in KINDS[api].__struct_fields__]

    assert len(names) > 2
    for name in names:
        for value in WRONG[name]:
            param, description = refusal(api, **{name: value})
            assert param == name
            assert description.startswith(f"must be {ranges[name]}"), value


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", SAMPLING_RANGES)
def test_a_number_that_is_not_finite_is_refused_by_name(name: str, literal: str) -> None:
    body = json.dumps(BODIES["chat"])[:-1] + f', "{name}": {literal}}}'

    with pytest.raises((InvalidRequest, HttpFault)) as refused:
        parsed_body(body.encode(), CHAT, strict=False)

    error = refused.value
    assert f"must be {SAMPLING_RANGES[name]}" in str(error)
    if isinstance(error, HttpFault):
        assert error.refusal.param == name
    else:
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field == name


@pytest.mark.parametrize(
    ("entry", "param"),
    [
        ('"stop": ["a", %s]', "stop[1]"),
        ('"messages": [{"role": "user", "content": %s}]', "messages[0].content"),
        ('"metadata": {"a": %s}', "metadata.a"),
        ('"user": %s', "user"),
        (
            '"tools": [{"type": "function", "function": {"name": "f", "description": %s}}]',
            "tools[0].function.description",
        ),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_its_offset(entry: str, param: str) -> None:
    body = json.dumps(BODIES["chat"])[:-1] + f", {entry % HALF}}}"

    with pytest.raises(HttpFault, match="surrogate") as refused:
        parsed_body(body.encode(), CHAT, strict=False)

    assert (refused.value.refusal.param, refused.value.refusal.code) == (param, "invalid_json")
    whole = body.replace("\\ud83d", "\\ud83d\\ude42")
    parsed_body(whole.encode(), CHAT, strict=False)
    with pytest.raises(HttpFault, match="not valid JSON"):
        parsed_body(body[:-1].encode(), CHAT, strict=False)


def test_biases_may_be_pairs() -> None:
    start = frame("chat", logit_bias=[[5, 1.5], [6, False]])

    assert dict(start.sampling.logit_bias) == {5: 1.5, 6: -100}
    for wrong in ([[5]], [["a", 1]], [[5, True]], [[-1, 1]], [5]):
        assert refusal("chat", logit_bias=wrong)[0] == "logit_bias[0]"
    assert refusal("chat", logit_bias={"bad1": 1})[0] == "logit_bias['bad1']"


def test_nothing_of_a_stream_is_requested_without_one() -> None:
    for api in ("chat", "completions", "responses"):
        assert frame(api, stream_options={"include_usage": True}) == frame(api)
    both, one = (
        read("chat", BODIES["chat"] | {"stream": True, "stream_options": options})[0]
        for options in (
            {"include_usage": True, "continuous_usage_stats": True},
            {"include_usage": False, "continuous_usage_stats": True},
        )
    )
    assert (both.includes_usage, both.repeats_usage) == (True, True)
    assert (one.includes_usage, one.repeats_usage) == (False, False)


# Other names of our parameters


@pytest.mark.parametrize("name", ["max_new_tokens", "n_predict", "num_predict"])
@pytest.mark.parametrize("api", LIMITS)
def test_other_names_of_a_limit_take_effect(api: str, name: str) -> None:
    body = {key: value for key, value in BODIES[api].items() if key != "max_tokens"}

    parsed, ignored, _ = read(api, body | {name: 7})

    assert parsed.starts[0].max_output_tokens == 7
    assert ignored == []
    assert read(api, body | {name: 7}, strict=True)[0].starts[0].max_output_tokens == 7
    with pytest.raises(InvalidRequest) as refused:
        read(api, body | {name: 0})
    assert refused.value.violations[0].field == name


@pytest.mark.parametrize(
    ("api", "fields", "limit", "named"),
    [
        ("chat", {"max_tokens": 5, "max_completion_tokens": 6}, 5, "max_tokens"),
        ("chat", {"max_tokens": 6, "max_completion_tokens": 5}, 5, "max_completion_tokens"),
        ("chat", {"max_tokens": 5, "n_predict": 6}, 5, "max_tokens"),
        ("chat", {"max_completion_tokens": 7, "n_predict": 6}, 6, "n_predict"),
        ("chat", {"max_new_tokens": 9, "n_predict": 8, "max_tokens": -1}, 8, "n_predict"),
        ("completions", {"max_completion_tokens": 16, "max_tokens": 200}, 16, None),
        ("completions", {"max_completion_tokens": -1, "max_tokens": 200}, 200, "max_tokens"),
        ("responses", {"max_output_tokens": 7, "n_predict": 5}, 5, "n_predict"),
        ("messages", {"max_tokens": 7, "max_completion_tokens": 5}, 5, "max_completion_tokens"),
    ],
)
def test_of_two_limits_the_smaller_applies(
    api: str, fields: dict[str, Any], limit: int, named: str | None
) -> None:
    base = {key: value for key, value in BODIES[api].items() if key != "max_tokens"}

    parsed, ignored, _ = read(api, base | fields)

    assert parsed.starts[0].max_output_tokens == limit
    assert ignored == []
    if named is not None:
        assert parameter("max_output_tokens", parsed.names) == named


@pytest.mark.parametrize("api", LIMITS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spaces_between_special_tokens", False),
        ("spaces_between_special_tokens", True),
        ("truncation_side", "left"),
        ("length_penalty", 1.2),
        ("n_keep", 5),
        ("logprob_start_len", 0),
    ],
)
def test_options_of_an_unused_feature_change_nothing(api: str, name: str, value: Any) -> None:
    body = BODIES[api] | {name: value}

    parsed, ignored, _ = read(api, body)

    assert parsed.starts[0] == frame(api)
    assert ignored == [name]


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate": True},
        {"truncate": "END"},
        {"truncation": True},
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": -1, "truncation_side": "right"},
        {"truncate_prompt_tokens": 512},
    ],
)
def test_texts_to_embed_are_cut_at_their_end_on_request(fields: dict[str, Any]) -> None:
    parsed, ignored, _ = read("embeddings", BODIES["embeddings"] | fields)

    assert parsed.truncation == pb.TRUNCATION_END
    assert ignored == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate": "START"}, "truncate"),
        ({"truncation": "left"}, "truncation"),
        ({"truncate": True, "truncation_side": "left"}, "truncation_side"),
    ],
)
def test_texts_to_embed_are_not_cut_elsewhere(fields: dict[str, Any], param: str) -> None:
    assert refusal("embeddings", **fields)[0] == param


@pytest.mark.parametrize(
    ("api", "name", "value", "ours", "same"),
    [
        ("chat", "random_seed", 5, "seed", 5),
        ("chat", "stop_sequences", ["a"], "stop", ["a"]),
        ("chat", "stop_sequence", ["a"], "stop", "a"),
        ("messages", "stop", "a", "stop_sequences", ["a"]),
        ("chat", "min_new_tokens", 2, "min_tokens", 2),
        ("completions", "num_return_sequences", 2, "n", 2),
        ("completions", "max_completion_tokens", 9, "max_tokens", 9),
        ("chat", "k", 4, "top_k", 4),
        ("messages", "p", 0.5, "top_p", 0.5),
        ("chat", "thinking_budget", 9, "thinking_token_budget", 9),
        ("responses", "reasoning_budget_tokens", 9, "thinking_token_budget", 9),
        ("chat", "do_sample", False, "temperature", 0),
        ("responses", "think", True, "chat_template_kwargs", {"enable_thinking": True}),
        ("messages", "enable_thinking", False, "thinking", {"type": "disabled"}),
        ("messages", "chat_template_kwargs", {"thinking": True}, "thinking", {"type": "enabled"}),
        ("chat", "thinking", {"type": "disabled"}, "chat_template_kwargs", {"thinking": False}),
        ("chat", "thinking", {"budget_tokens": 8}, "thinking_token_budget", 8),
        ("chat", "think", "high", "reasoning_effort", "high"),
        ("chat", "reasoning", {"effort": "low"}, "reasoning_effort", "low"),
        ("chat", "reasoning", {"max_tokens": 8}, "thinking_token_budget", 8),
        ("chat", "disable_reasoning", True, "chat_template_kwargs", {"thinking": False}),
        ("embeddings", "normalized", True, "normalize", True),
    ],
)
def test_other_names_take_effect(api: str, name: str, value: Any, ours: str, same: Any) -> None:
    assert frame(api, **{name: value}) == frame(api, **{ours: same})
    assert frame(api, **{name: value, ours: same}) == frame(api, **{ours: same})


@pytest.mark.parametrize(
    ("api", "fields", "param", "other"),
    [
        ("completions", {"seed": 5, "random_seed": 6}, "random_seed", "seed"),
        ("chat", {"temperature": 1, "do_sample": False}, "do_sample", "temperature"),
        ("chat", {"do_sample": True}, "do_sample", "temperature"),
        ("chat", {"temperature": 0, "do_sample": True}, "do_sample", "temperature"),
        (
            "messages",
            {"thinking": {"type": "enabled"}, "enable_thinking": False},
            "enable_thinking",
            "thinking.type",
        ),
        (
            "responses",
            {"chat_template_kwargs": {"thinking": True}, "think": False},
            "think",
            "chat_template_kwargs.thinking",
        ),
        ("chat", {"guided_json": SCHEMA, "regex": "a"}, "regex", "guided_json"),
        (
            "chat",
            {"response_format": {"type": "json_object"}, "grammar": GBNF},
            "grammar",
            "response_format",
        ),
        (
            "responses",
            {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"},
            "guided_regex",
            "text.format",
        ),
        ("messages", {"guided_regex": "a", "guided_json": SCHEMA}, "guided_json", "guided_regex"),
        (
            "chat",
            {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
            "structured_outputs.regex",
            "structured_outputs.json",
        ),
    ],
)
def test_two_names_must_agree(api: str, fields: dict[str, Any], param: str, other: str) -> None:
    found, description = refusal(api, **fields)

    assert found == param
    assert other in description


def test_errors_name_the_parameter_that_was_sent() -> None:
    assert refusal("chat", random_seed="x")[0] == "random_seed"
    assert refusal("chat", k=-5)[0] == "k"
    assert refusal("chat", stop_sequences=["a"] * 17)[0] == "stop_sequences"
    assert refusal("completions", guided_choice=[1])[0] == "guided_choice"
    assert refusal("responses", ebnf="root ::= x")[0] == "ebnf"
    parsed, _, _ = read("responses", BODIES["responses"] | {"regex": "("})
    assert parsed.names["response_format.regex"] == "regex"


# Formats of the answer


@pytest.mark.parametrize(("fields", "kind", "source"), FORMATS)
@pytest.mark.parametrize("api", APIS)
def test_guided_formats_apply(api: str, fields: dict[str, Any], kind: str, source: str) -> None:
    found = frame(api, **fields).response_format

    assert found.WhichOneof("kind") == kind
    if source:
        assert getattr(found, kind) == source
    else:
        assert json.loads(found.json_schema) == SCHEMA


@pytest.mark.parametrize(("requested", "kind", "source"), CHAT_FORMATS)
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_response_formats_apply(
    api: str, requested: dict[str, Any], kind: str, source: str
) -> None:
    found = frame(api, response_format=requested).response_format

    assert found.WhichOneof("kind") == kind
    if source:
        assert getattr(found, kind) == source
    else:
        assert json.loads(found.json_schema) == SCHEMA


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        (
            "chat",
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
        ),
        ("chat", {"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ("chat", {"response_format": {"type": "regex"}}, "response_format.value"),
        ("chat", {"response_format": {"type": "xml"}}, "response_format.type"),
        (
            "chat",
            {"response_format": {"type": "json_object", "schema": SCHEMA, "value": {"a": 1}}},
            "response_format.value",
        ),
        (
            "chat",
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            "chat",
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            "chat",
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
        ),
        ("chat", {"structured_outputs": "x"}, "structured_outputs"),
        ("chat", {"grammar": {"type": "xml"}}, "grammar.type"),
        ("chat", {"grammar": 'a ::= "b"'}, "grammar"),
        ("chat", {"format": "yaml"}, "format"),
        ("embeddings", {"guided_json": SCHEMA}, "guided_json"),
        ("responses", {"response_format": {"type": "json_object"}}, "response_format"),
        ("messages", {"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_unenforceable_formats_are_refused(api: str, fields: dict[str, Any], param: str) -> None:
    assert refusal(api, **fields)[0] == param


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root ::= x", "no rule x"),
        ('a ::= "b"', "no rule root"),
        ("root ::= (", "without its )"),
        ('root ::= "a" )', "without its ("),
        ("root ::= *?", "has * after nothing"),
        ("root ::= {2}+", "has {2} after nothing"),
        ("root ::= <[3]>", "line 1"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
    ],
)
def test_a_grammar_that_is_not_gbnf_says_where(grammar: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        lark_of(grammar, "grammar")


# False, and conversations


@pytest.mark.parametrize(
    ("api", "name"),
    [
        ("chat", "skip_special_tokens"),
        ("chat", "add_generation_prompt"),
        ("completions", "add_special_tokens"),
        ("embeddings", "add_special_tokens"),
        ("chat", "cache_prompt"),
        ("chat", "do_preprocess"),
        ("chat", "include_reasoning"),
        ("embeddings", "normalize"),
        ("embeddings", "use_activation"),
    ],
)
def test_false_is_refused_where_it_is_not_the_default(api: str, name: str) -> None:
    assert refusal(api, **{name: False})[0] == name


def test_a_choice_without_tools_is_nothing_and_one_with_tools_is_checked() -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]

    assert frame("messages", tool_choice="none") == frame("messages")
    assert refusal("messages", tools=tools, tool_choice="none")[0] == "tool_choice"


@pytest.mark.parametrize("name", ["images", "partial", "thinking", "tools"])
def test_members_of_messages_that_direct_the_answer_are_refused(name: str) -> None:
    messages = [*USER, {"role": "assistant", "content": "a", name: True}]

    assert refusal("chat", messages=messages)[0] == f"messages[].{name}"
    messages[1][name] = None  # type: ignore[index]
    frame("chat", messages=messages)


@pytest.mark.parametrize("api", ENDPOINTS)
@pytest.mark.parametrize(
    "name",
    [
        "max_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    ],
)
def test_what_cannot_change_the_answer_is_accepted_by_each_api(api: str, name: str) -> None:
    _, ignored, _ = read(api, BODIES[api] | {name: "24h"})

    labels = name in KINDS[api].__struct_fields__ and name in ("user", "safety_identifier")
    assert ignored == ([] if labels else [name])


@pytest.mark.parametrize(
    ("api", "fields", "remedy"),
    [
        ("chat", {"functions": [{"name": "f"}]}, "use tools"),
        ("chat", {"function_call": {"name": "f"}}, "use tool_choice"),
        ("chat", {"web_search_options": {"search_context_size": "low"}}, "search yourself"),
        ("chat", {"moderation": {"model": "m"}}, "the operator configures the safety checks"),
        ("chat", {"store": True}, "nothing is stored"),
        ("responses", {"conversation": "conv_1"}, "send the whole conversation"),
        ("responses", {"previous_response_id": "resp_1"}, "send the whole conversation"),
        ("responses", {"prompt": {"id": "pmpt_1"}}, "as input and instructions"),
        ("responses", {"background": True}, "from the connection of its request"),
        ("completions", {"suffix": "x"}, "put it into the prompt"),
        ("messages", {"container": "c"}, "no tool runs on the server"),
        ("messages", {"inference_geo": "us"}, "the operator decides"),
    ],
)
def test_what_is_not_supported_has_a_remedy(api: str, fields: dict[str, Any], remedy: str) -> None:
    param, description = refusal(api, **fields)

    assert [param] == list(fields)
    assert remedy in description


@pytest.mark.parametrize("api", ENDPOINTS)
@pytest.mark.parametrize("model", [None, "", "left out"])
def test_a_request_without_a_model_says_where_they_are_listed(api: str, model: str | None) -> None:
    body = BODIES[api] | {"model": model}
    if model == "left out":
        del body["model"]

    with pytest.raises(InvalidRequest, match=r"GET /v1/models") as refused:
        check(api, body)

    assert refused.value.violations[0].field == "model"


def test_an_unknown_false_is_named() -> None:
    assert read("chat", BODIES["chat"] | {"x_flag": False})[1] == ["x_flag"]
    message = USER[0] | {"partial": False, "x": False}
    assert read("chat", BODIES["chat"] | {"messages": [message]})[1] == ["messages[].x"]
    variables = {"chat_template_kwargs": {"add_date": False}}
    assert refusal("chat", **variables)[0] == "chat_template_kwargs.add_date"


@pytest.mark.parametrize("api", ["messages", "responses", "chat"])
def test_context_management_that_keeps_everything_is_named(api: str) -> None:
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

    kept: dict[str, Any]
    for kept in ({"edits": []}, keep):
        _, ignored, _ = read(api, BODIES[api] | {"context_management": kept})
        assert ignored == ["context_management"]
    for edit in ({"type": "clear_tool_uses_20250919"}, keep["edits"][0] | {"keep": 1}):
        param, description = refusal(api, context_management={"edits": [edit]})
        assert param == "context_management"
        assert str(edit["type"]) in description


def test_vectors_get_the_length_of_1_that_is_requested() -> None:
    assert list(normalized([3.0, 4.0])) == pytest.approx([0.6, 0.8])
    assert list(normalized([0.0, 0.0])) == [0.0, 0.0]
    unit = [1.0, 0.0]
    assert normalized(unit) is unit


def test_the_input_of_one_text_has_no_index_in_errors() -> None:
    for sent, param in (([], "input[]"), ([""], "input[]"), ("", "input"), ([1], "input")):
        requested = EmbeddingParameters(model="demo", input=sent)  # type: ignore[arg-type]
        assert embedding_names(requested)["inputs[].text"] == param
    assert frame("embeddings", input=["a"]).inputs[0].text == "a"
    assert refusal("embeddings", encoding_format="bytes")[0] == "encoding_format"
    assert isinstance(frame("embeddings"), pb.EmbedRequest)
