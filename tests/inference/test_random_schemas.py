"""Structured output at scale: random answers under hundreds of schemas validate.

No model is needed: chance may choose any token that a model may choose, at a thousandth of the
cost. `test_grammar.py` tests the engine's use of grammars.
"""

from __future__ import annotations

import json
import os
import random

import jsonschema
import numpy as np
import pytest

from inference.checkpoint.checkpoint import read_config
from inference.engine import GrammarKind, ResponseFormat
from inference.sampling.grammar import GrammarCompiler
from inference.text.tokenizer import Tokenizer
from tests.inference import json_schemas
from tests.inference.checkpoints import TinyCheckpoint

# Random schemas; more take longer.
SCHEMA_COUNT = int(os.environ.get("WEIR_TEST_SCHEMA_COUNT", "1000"))
FREE_TOKENS = 120  # after this many, only tokens that lead to an end are preferred
TOKENS_MAX = 1500


class Writer:
    """Writes random answers from allowed tokens, preferring those that close."""

    def __init__(self, tiny: TinyCheckpoint) -> None:
        config = read_config(tiny.directory)
        self.compiler = GrammarCompiler(
            tiny.directory / "tokenizer.json", config.vocabulary_size, config.end_token_ids
        )
        self._tokenizer = Tokenizer(tiny.directory)
        self._ends = config.end_token_ids
        self._size = config.vocabulary_size
        closing = {
            token_id
            for text in ('"', "}", "]", ",")
            for token_id in self._tokenizer.encode(text, add_special_tokens=False)
        }
        self._weights = np.ones(self._size)
        self._weights[[*closing, *self._ends]] = 30.0
        self._closing = self._weights > 1
        self.answer_count = 0

    def write(self, response_format: ResponseFormat, seed: int) -> str:
        """Return a finished answer; check that the end is allowed only where it is complete."""
        rng, grammar = np.random.default_rng(seed), self.compiler.compile(response_format)
        mask = np.zeros((1, -(-self._size // 32)), dtype=np.int32)
        ids: list[int] = []
        while len(ids) < TOKENS_MAX:
            grammar.fill(mask, 0)
            allowed = np.unpackbits(
                mask.view(np.uint8), bitorder="little", count=self._size
            ).astype(bool)
            assert grammar.fault is None
            assert any(allowed[end] for end in self._ends) == grammar.complete
            if len(ids) > FREE_TOKENS and (allowed & self._closing).any():
                allowed &= self._closing
            weights = self._weights * allowed
            token_id = int(
                np.searchsorted(weights.cumsum(), rng.random() * weights.sum(), side="right")
            )
            if token_id in self._ends:
                self.answer_count += 1
                return self._tokenizer.decode(ids)
            ids.append(token_id)
            grammar.advance(token_id)
        raise AssertionError(
            f"no end after {TOKENS_MAX} tokens: {self._tokenizer.decode(ids)[:300]}"
        )


@pytest.fixture(scope="module")
def writer(tiny: TinyCheckpoint) -> Writer:
    return Writer(tiny)


def json_answer(writer: Writer, schema: object, seed: int) -> object:
    return json.loads(
        writer.write(ResponseFormat(GrammarKind.JSON_SCHEMA, json.dumps(schema)), seed), strict=True
    )


def validate(answer: object, schema: json_schemas.Schema) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(answer)


def test_every_answer_validates_under_own_schemas(writer: Writer) -> None:
    for index, schema in enumerate(json_schemas.OWN):
        for seed in range(5):
            validate(json_answer(writer, schema, 100 * index + seed), schema)


def test_every_answer_validates_under_random_schemas(writer: Writer) -> None:
    """Two answers to each of 1,000 schemas, which must cover the keywords."""
    rng = random.Random(20)
    seen: set[str] = set()
    while len(seen) < SCHEMA_COUNT:
        schema = json_schemas.random_schema(rng)
        source = json.dumps(schema, sort_keys=True)
        if source not in seen:
            seen.add(source)
            for seed in range(2):
                validate(json_answer(writer, schema, seed), schema)

    for keyword in (
        "pattern",
        "prefixItems",
        "anyOf",
        "$ref",
        "exclusiveMaximum",
        "minLength",
        "required",
        "enum",
        "const",
    ):
        assert sum(f'"{keyword}"' in source for source in seen) > SCHEMA_COUNT / 20, keyword


def test_an_answer_to_another_schema_would_be_seen(writer: Writer) -> None:
    """A planted fault: answers of one schema are validated by another."""
    rng, seen = random.Random(1), 0
    for seed in range(60):
        written, other = rng.sample(json_schemas.OWN, 2)
        try:
            validate(json_answer(writer, written, seed), other)
        except jsonschema.ValidationError:
            seen += 1

    assert seen > 30
