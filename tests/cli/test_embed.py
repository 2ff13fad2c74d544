"""`weir embed`: requests and output."""

from __future__ import annotations

import json

import pytest
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from tests.cli.conftest import Run, ScriptedWeir

ANSWER = pb.EmbedResponse(
    embeddings=[
        pb.Embedding(vector=[1.0, 0.0], token_count=5),
        pb.Embedding(vector=[0.6, 0.8], token_count=7, truncated=True),
    ],
    usage=types_pb2.Usage(embedding_token_count=12),
    cost=types_pb2.Money(currency_code="USD", picos=240_000),
)


@pytest.fixture(autouse=True)
def answer(server: ScriptedWeir) -> None:
    server.inference.replies["EmbedRequest"] = ANSWER


def test_shows_the_vectors_and_their_similarities(weir: Run, server: ScriptedWeir) -> None:
    reported = weir("embed --model minilm 'a cat' 'a \u001b[31mkitten' --truncate --tier batch")

    assert reported.exit_code == 0
    assert "+0.6000 +0.8000" in reported.stdout
    assert "7 (cut)" in reported.stdout
    assert "0.600" in reported.stdout
    assert "\x1b" not in reported.stdout
    assert "12 embedded" in reported.stderr
    requested = server.inference.requests[0]
    assert isinstance(requested, pb.EmbedRequest)
    assert [each.text for each in requested.inputs] == ["a cat", "a \x1b[31mkitten"]
    assert requested.model == "minilm"
    assert requested.truncation == pb.TRUNCATION_END
    assert requested.tier == pb.SERVICE_TIER_BATCH


def test_a_quote_is_shown_instead_and_sets_the_exit_code(weir: Run, server: ScriptedWeir) -> None:
    cost = types_pb2.Money(currency_code="USD", picos=240_000)
    quote = pb.QuoteResponse(
        input_token_count=12,
        worst_case_cost=cost,
        expected_cost=cost,
        price_version=3,
        would_admit=True,
    )
    server.inference.replies["QuoteRequest"] = quote

    fits = weir("embed --model minilm 'a cat' --quote")
    quote.would_admit = False
    too_much = weir("embed --model minilm 'a cat' --quote --json")

    assert fits.exit_code == 0
    assert "12 tokens; 0.00000024 USD (price version 3)" in fits.stdout
    assert (too_much.exit_code, json.loads(too_much.stdout)["input_token_count"]) == (3, 12)
    requested = server.inference.requests[0]
    assert isinstance(requested, pb.QuoteRequest)
    assert (requested.embed.model, requested.HasField("start")) == ("minilm", False)


def test_reads_lines_and_prints_one_document(weir: Run, server: ScriptedWeir) -> None:
    document = json.loads(weir("embed -m minilm - --json", stdin="one\n\ntwo\n").stdout)

    assert document["embeddings"][0]["vector"] == [1.0, 0.0]
    assert document["usage"]["embedding_token_count"] == 12
    requested = server.inference.requests[0]
    assert isinstance(requested, pb.EmbedRequest)
    assert [each.text for each in requested.inputs] == ["one", "two"]


@pytest.mark.parametrize(
    "arguments", [("-m", "minilm"), ("a text",), ("-m", "minilm", "a", "--tier", "fast")]
)
def test_missing_arguments_are_named(weir: Run, arguments: tuple[str, ...]) -> None:
    reported = weir("embed", *arguments)

    assert reported.exit_code == 2
