"""Structured output: finished answers are in the format, and other requests are unaffected."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import jsonschema
import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference.core.engine_core import EngineCore
from inference.engine import (
    EngineFinishReason,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
    SequenceRefused,
)
from inference.errors import RequestImpossible
from inference.text.tokenizer import Tokenizer
from inference.text.tools import with_json_options
from tests.inference import json_schemas
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import Outcome, make_core, make_request, random_prompt, run_all

OUTPUT_TOKENS = 160
PROMPT = (30, 31, 32)

CLOSED = {"additionalProperties": False}
CAT: dict[str, object] = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}},
    "required": ["kind", "n"],
}
DOG: dict[str, object] = {
    "type": "object",
    "properties": {"kind": {"const": "dog"}},
    "required": ["kind"],
}
STRING, BLANKS = regex.compile(r'"(?:[^"\\]|\\.)*"'), regex.compile(r"[ ]{2}|[\t\n\r]")


def json_format(schema: object) -> ResponseFormat:
    return ResponseFormat(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def regex_format(pattern: str) -> ResponseFormat:
    return ResponseFormat(GrammarKind.REGEX, pattern)


def closing_bias(tiny: TinyCheckpoint) -> tuple[tuple[int, float], ...]:
    """Return a bias that ends noise: a random model would write one string for ever."""
    tokenizer = Tokenizer(tiny.directory)
    ids = {2, 6} | {
        token_id
        for text in ('"', "}", "]", ",")
        for token_id in tokenizer.encode(text, add_special_tokens=False)
    }
    return tuple((token_id, 4.0) for token_id in sorted(ids))


def constrained(
    tiny: TinyCheckpoint,
    response_format: ResponseFormat | None,
    seed: int = 1,
    max_output_tokens: int = OUTPUT_TOKENS,
    **options: object,
) -> GenerationRequest:
    sampling = SamplingParams(
        temperature=1.0, seed=seed, logit_bias=closing_bias(tiny), top_logprobs=0
    )
    return make_request(
        PROMPT,
        max_output_tokens,
        sampling=sampling,
        ignore_eos=False,
        response_format=response_format,
        **options,  # type: ignore[arg-type]
    )


def reason(outcome: Outcome) -> EngineFinishReason:
    assert outcome.finished is not None
    return outcome.finished.reason


def check_json(outcomes: Iterable[Outcome], schemas: Iterable[object]) -> int:
    """Check every finished answer against its schema; return their number.

    Blanks cost tokens, so there is at most one space between two tokens of JSON.
    """
    finished = 0
    for outcome, schema in zip(outcomes, schemas, strict=True):
        if reason(outcome) is EngineFinishReason.STOP:
            finished += 1
            assert not BLANKS.search(STRING.sub('""', outcome.text)), outcome.text
            jsonschema.Draft202012Validator(schema).validate(json.loads(outcome.text, strict=True))  # type: ignore[arg-type]
        else:
            assert reason(outcome) is EngineFinishReason.LENGTH
            assert len(outcome.token_ids) == OUTPUT_TOKENS
    return finished


def test_finished_answers_validate_under_own_schemas(tiny: TinyCheckpoint) -> None:
    schemas = [schema for schema in json_schemas.OWN for _ in range(3)]
    core = make_core(tiny.directory, kv_cache_bytes=32 << 20)

    outcomes = run_all(
        core, [constrained(tiny, json_format(schema), seed) for seed, schema in enumerate(schemas)]
    )

    assert check_json(outcomes, schemas) > 0.8 * len(schemas)


@settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(schemas=st.lists(json_schemas.random_schemas(), min_size=4, max_size=8))
def test_finished_answers_validate_under_random_schemas(
    tiny: TinyCheckpoint, schemas: list[json_schemas.Schema]
) -> None:
    core = make_core(tiny.directory)

    outcomes = run_all(
        core, [constrained(tiny, json_format(schema), seed) for seed, schema in enumerate(schemas)]
    )

    check_json(outcomes, schemas)


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z]{3,9}",
        "(yes|no|maybe)",
        r"\d{4}-\d{2}-\d{2}",
        "[🙂北京é]{4,9}",
        "(ab)*c",
        "x?",
        "The hotel (is|was) (near|far)[.!]",
    ],
)
def test_answers_match_an_expression_or_begin_a_match(tiny: TinyCheckpoint, pattern: str) -> None:
    requests = [constrained(tiny, regex_format(pattern), seed) for seed in range(6)]
    cut_requests = [
        constrained(tiny, regex_format(pattern), seed, max_output_tokens=3) for seed in range(6)
    ]

    outcomes = run_all(make_core(tiny.directory), requests)
    cut = run_all(make_core(tiny.directory), cut_requests)

    for outcome in outcomes:
        assert reason(outcome) is EngineFinishReason.STOP
        assert regex.fullmatch(pattern, outcome.text)
    for outcome in cut:
        # A character whose bytes are cut by the limit.
        text = outcome.text.removesuffix("\N{REPLACEMENT CHARACTER}")
        assert regex.fullmatch(pattern, text, partial=True)


def test_answers_follow_a_grammar(tiny: TinyCheckpoint) -> None:
    """Balanced brackets around a letter, which no regular expression describes."""
    source = 'start: "(" start ")" | LETTER\nLETTER: /[a-e]/'

    outcomes = run_all(
        make_core(tiny.directory),
        [constrained(tiny, ResponseFormat(GrammarKind.LARK, source), s) for s in range(5)],
    )

    for outcome in outcomes:
        if reason(outcome) is EngineFinishReason.STOP:
            depth = outcome.text.count("(")
            assert regex.fullmatch(rf"\({{{depth}}}[a-e]\){{{depth}}}", outcome.text)
    assert any(reason(outcome) is EngineFinishReason.STOP for outcome in outcomes)


def test_the_end_is_forced_where_nothing_can_follow(tiny: TinyCheckpoint) -> None:
    """Even with the end banned by a bias, since a complete format allows nothing else."""
    sampling = SamplingParams(temperature=1.0, seed=5, logit_bias=((2, -100.0), (6, -100.0)))
    request = make_request(
        PROMPT, 50, sampling=sampling, ignore_eos=False, response_format=regex_format("abc")
    )

    outcome = run_all(make_core(tiny.directory), [request])[0]

    assert (outcome.text, reason(outcome)) == ("abc", EngineFinishReason.STOP)
    assert outcome.token_ids[-1] in (2, 6)


@pytest.mark.parametrize(
    ("schema", "words"),
    json_schemas.UNSUPPORTED,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_schema_that_cannot_be_kept_is_refused_by_its_field(
    tiny: TinyCheckpoint, schema: json_schemas.Schema, words: str
) -> None:
    core = make_core(tiny.directory)

    with pytest.raises(RequestImpossible, match=words) as caught:
        core.add(0, constrained(tiny, json_format(schema)))

    assert caught.value.field == "response_format.json_schema"
    assert core.idle, "a refused request leaves no trace"


@pytest.mark.parametrize(
    ("response_format", "field"),
    [
        (regex_format("(a"), "response_format.regex"),
        (regex_format("(?=a)b"), "response_format.regex"),
        (ResponseFormat(GrammarKind.LARK, "start: nowhere"), "response_format.lark"),
        (ResponseFormat(GrammarKind.LARK, "start"), "response_format.lark"),
        (ResponseFormat(GrammarKind.JSON_SCHEMA, "{"), "response_format.json_schema"),
        (ResponseFormat(GrammarKind.JSON_SCHEMA, "[" * 20_000), "response_format.json_schema"),
        (ResponseFormat(GrammarKind.JSON_SCHEMA, '"text"'), "response_format.json_schema"),
    ],
)
def test_invalid_grammars_are_refused_by_field(
    tiny: TinyCheckpoint, response_format: ResponseFormat, field: str
) -> None:
    with pytest.raises(RequestImpossible) as caught:
        make_core(tiny.directory).grammars.compile(response_format)

    assert caught.value.field == field
    assert 0 < len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ('root ::= item+\nitem ::= "- " [^\\n]+ "\\n"', "GBNF"),
        ('root ::= "yes" | "no"', "write start: for root ::="),
        ('start = "a" , "b" ;', "ISO EBNF"),
        ('start = "a" | "b";\nother = "c";', "without commas or semicolons"),
    ],
)
def test_other_notations_of_ebnf_are_refused_with_what_to_write_instead(
    tiny: TinyCheckpoint, source: str, remedy: str
) -> None:
    with pytest.raises(RequestImpossible, match=remedy) as caught:
        make_core(tiny.directory).grammars.compile(ResponseFormat(GrammarKind.LARK, source))

    assert caught.value.field == "response_format.lark"


def test_the_remedy_in_the_message_works(tiny: TinyCheckpoint) -> None:
    """The library's converter, named by the message, gives accepted grammars."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    source = gbnf_to_lark('root ::= "(" root ")" | letter # nested\nletter ::= [a-e]')
    grammars = make_core(tiny.directory).grammars

    assert not grammars.compile(ResponseFormat(GrammarKind.LARK, source)).complete
    assert not grammars.compile(
        ResponseFormat(GrammarKind.LARK, 'start: "::=" | "a = b ;"')
    ).complete, "in quotes it is text"


def test_a_format_excludes_what_would_break_it(tiny: TinyCheckpoint) -> None:
    core = make_core(tiny.directory)
    own_format = regex_format("a+")

    requests = [
        make_request(PROMPT, 9, ignore_eos=True, response_format=own_format),
        make_request(PROMPT, 9, ignore_eos=False, response_format=own_format, min_output_tokens=1),
        make_request(
            PROMPT, 9, ignore_eos=False, response_format=own_format, stop_token_ids=frozenset({40})
        ),
    ]

    for request in requests:
        assert "response format excludes" in str(core.request_fault(request))


def mixed_requests(tiny: TinyCheckpoint) -> list[GenerationRequest]:
    """Return requests: half of them constrained, in four kinds; the rest free."""
    rng = random.Random(12)
    formats = [
        json_format({}),
        regex_format("[a-z ]{50,90}"),
        json_format({"type": "array", "items": {"type": "integer"}}),
    ]
    requests = []
    for row in range(10):
        sampling = SamplingParams(temperature=1.0 if row % 4 else 0.0, seed=row, top_logprobs=2)
        chosen = formats[row % 3] if row % 2 else None
        prompt = random_prompt(rng, 60)
        requests.append(
            make_request(prompt, 120, sampling=sampling, ignore_eos=False, response_format=chosen)
        )
    return requests


def test_constrained_and_free_sequences_do_not_change_each_other(tiny: TinyCheckpoint) -> None:
    requests = mixed_requests(tiny)

    alone = [run_all(make_core(tiny.directory), [request])[0] for request in requests]
    together = run_all(make_core(tiny.directory), requests)

    assert [(outcome.token_ids, outcome.text) for outcome in together] == [
        (outcome.token_ids, outcome.text) for outcome in alone
    ]


def test_preemption_does_not_lose_the_position_in_the_grammar(tiny: TinyCheckpoint) -> None:
    crowded = make_core(
        tiny.directory, kv_cache_bytes=1, context_window_tokens=512, owed_output_token_count_max=1
    )

    undisturbed = run_all(make_core(tiny.directory), mixed_requests(tiny))
    preempted = run_all(crowded, mixed_requests(tiny))

    assert crowded.statistics().preemption_count > 0
    assert [outcome.token_ids for outcome in preempted] == [
        outcome.token_ids for outcome in undisturbed
    ]


def test_a_stop_sequence_cuts_an_answer_and_says_so(tiny: TinyCheckpoint) -> None:
    free, stopped = run_all(
        make_core(tiny.directory),
        [
            make_request(
                PROMPT,
                80,
                ignore_eos=False,
                response_format=regex_format("(abcd){9}"),
                stop_sequences=stops,
            )
            for stops in ((), ("dab",))
        ],
    )

    assert free.text == "abcd" * 9
    assert (stopped.text, reason(stopped)) == ("abc", EngineFinishReason.STOP_SEQUENCE)


def test_logprobs_stay_the_models_own_under_a_format(tiny: TinyCheckpoint) -> None:
    """The forced token may be unlikely, and its log-probability shows it."""
    sampling = SamplingParams(top_logprobs=5)
    free = run_all(make_core(tiny.directory), [make_request(PROMPT, 1, sampling=sampling)])[0]
    forced = run_all(
        make_core(tiny.directory),
        [
            make_request(
                PROMPT, 1, sampling=sampling, ignore_eos=False, response_format=regex_format("Q+")
            )
        ],
    )[0]

    assert forced.logprobs[0].top == free.logprobs[0].top
    assert forced.logprobs[0].chosen.logprob < free.logprobs[0].chosen.logprob


def test_a_format_that_becomes_too_much_to_compute_ends_its_own_sequence(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(tiny.directory)
    other = make_request([50], 10)
    core.add(0, constrained(tiny, json_format({})))
    core.add(1, other)
    events = core.step()
    broken = core.scheduler.running[0].grammar
    monkeypatch.setattr(
        "inference.sampling.grammar.Grammar.fault",
        property(lambda self: "too many items" if self is broken else None),
    )

    events = [event for _ in range(12) for event in core.step()]

    assert (
        0,
        SequenceRefused("is too complex to follow: too many items", "response_format.json_schema"),
    ) in events
    assert [number for number, _ in events].count(0) == 1
    assert [number for number, _ in events].count(1) >= 9
    assert core.pool.block_count_held == 0


def test_compiled_grammars_are_kept_and_not_shared(tiny: TinyCheckpoint) -> None:
    core: EngineCore = make_core(tiny.directory)

    outcomes = run_all(
        core, [constrained(tiny, regex_format("[a-z]{8}"), seed) for seed in range(4)]
    )

    assert core.grammars._compiled.cache_info().currsize == 1
    assert len({outcome.text for outcome in outcomes}) == 4


@pytest.mark.parametrize("source", ["start: start", "start: a\na: b\nb: a", "start: /[^\\s\\S]/"])
def test_a_grammar_that_allows_no_first_token_is_refused_before_its_prompt_is_computed(
    tiny: TinyCheckpoint, source: str
) -> None:
    core = make_core(tiny.directory)

    with pytest.raises(RequestImpossible, match="allows no first token") as refusal:
        core.add(1, constrained(tiny, ResponseFormat(GrammarKind.LARK, source)))

    assert refusal.value.field == "response_format.lark"
    assert core.step() == []
    assert core.statistics().prompt_token_count == 0


def branch(**properties: object) -> dict[str, object]:
    """Return the schema of an object that must have these properties."""
    return {"type": "object", "properties": properties, "required": [*properties]}


EXCLUSIVE: dict[str, tuple[list[object], dict[str, object]]] = {
    "references": ([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], {"A": CAT, "B": DOG}),
    "definitions": (
        [{"$ref": "#/definitions/A"}, {"$ref": "#/definitions/B"}],
        {"A": CAT, "B": DOG},
    ),
    "one reference": ([{"$ref": "#/$defs/A"}, DOG], {"A": CAT}),
    "reference to a reference": (
        [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/B"}],
        {"A": CAT, "B": DOG, "C": {"$ref": "#/$defs/A"}},
    ),
    "constant behind a reference": (
        [branch(kind={"$ref": "#/$defs/K"}), DOG],
        {"K": {"const": "cat"}},
    ),
    "enumerations": (
        [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        {"A": branch(k={"enum": ["a", "b"]}), "B": branch(k={"enum": ["c", 1, None]})},
    ),
    "types": ([{"$ref": "#/$defs/A"}, {"type": "null"}], {"A": CAT}),
    "types of references": (
        [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        {"A": {"type": ["integer", "boolean"]}, "B": {"type": "string"}},
    ),
    "types of a property": (
        [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        {"A": branch(x={"type": "integer"}), "B": branch(x={"type": "string"})},
    ),
    "property that the other forbids": (
        [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        {"A": branch(a={"type": "integer"}) | CLOSED, "B": branch(b={"type": "integer"}) | CLOSED},
    ),
    "nested property": (
        [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        {"A": branch(meta=CAT), "B": branch(meta=DOG)},
    ),
    "escaped names": (
        [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c%20d"}],
        {"a/b": CAT, "c d": DOG},
    ),
    "itself": (
        [{"$ref": "#/$defs/Leaf"}, {"$ref": "#/$defs/Node"}],
        {
            "Leaf": branch(kind={"const": "leaf"}),
            "Node": branch(
                kind={"const": "node"},
                child={"oneOf": [{"$ref": "#/$defs/Leaf"}, {"$ref": "#/$defs/Node"}]},
            ),
        },
    ),
    "three": (
        [{"$ref": f"#/$defs/{name}"} for name in "ABC"],
        {"A": CAT, "B": DOG, "C": {"type": "string", "maxLength": 3}},
    ),
}


@pytest.mark.parametrize("name", EXCLUSIVE)
@pytest.mark.parametrize("nested", [False, True])
def test_exclusive_branches_are_supported(name: str, nested: bool, tiny: TinyCheckpoint) -> None:
    """Tagged unions as pydantic writes them, with references and without a discriminator."""
    branches, definitions = EXCLUSIVE[name]
    one_of: dict[str, object] = {"oneOf": branches}
    index = "definitions" if name == "definitions" else "$defs"
    schema = (branch(pet=one_of) if nested else one_of) | {index: definitions}
    core = make_core(tiny.directory)
    requests = [constrained(tiny, json_format(schema), seed) for seed in range(6)]

    outcomes = run_all(core, requests)

    assert check_json(outcomes, [schema] * len(outcomes)), "some answers are complete"


OVERLAPPING: dict[str, list[object]] = {
    "equal": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}],
    "integer and number": [{"type": "integer"}, {"type": "number"}],
    "one equals one": [{"const": 1}, {"const": 1.0}],
    "without a type": [{"properties": {"k": {"const": 1}}}, {"$ref": "#/$defs/A"}],
    "not required": [
        {"type": "object", "properties": {"kind": {"const": "dog"}}},
        {"type": "object", "properties": {"kind": {"const": "cat"}}},
    ],
    "open": [branch(a={"type": "integer"}), branch(b={"type": "integer"})],
    "two of three": [{"$ref": "#/$defs/A"}, {"type": "string"}, {"$ref": "#/$defs/A"}],
    "circle": [{"$ref": "#/$defs/B"}, {"$ref": "#/$defs/B"}],
    "unknown place": [{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/A"}],
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_branches_that_may_overlap_have_a_remedy(name: str, tiny: TinyCheckpoint) -> None:
    schema = {
        "oneOf": OVERLAPPING[name],
        "$defs": {"A": CAT, "B": {"allOf": [{"$ref": "#/$defs/B"}]}},
    }
    compiler = make_core(tiny.directory).grammars

    with pytest.raises(RequestImpossible, match="cannot be compiled") as refusal:
        compiler.compile(json_format(schema))

    assert "coerce_one_of" not in str(refusal.value)


def test_proofs_about_branches_are_bounded() -> None:
    members = [{"$ref": f"#/$defs/{index}"} for index in range(100)]
    many = {"allOf": members * 3}
    schema = {"oneOf": [many] * 40, "$defs": {str(index): many for index in range(100)}}

    assert "oneOf" in with_json_options(schema)
