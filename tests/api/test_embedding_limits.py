"""Limits of one `Embed` call: the size of its answer, and the parts in which it is embedded."""

from __future__ import annotations

from array import array
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from weir.v1 import inference_service_pb2 as pb

from api.core.messages import input_count_max
from api.generation.parsing.embed_request import TokenizedText, embedding_message
from api.generation.request.live_embedding import parts_of
from inference.engine import ModelInfo

ENCODER = ModelInfo("encoder", "BertModel", "torch", 512, 30_000, "", embedding_dimension=384)
CLIENTS_TAKE_BYTES = 4 * 2**20  # default limit of a message


def test_the_largest_answer_fits_what_clients_take() -> None:
    for dimension in (1, 384, 1024, 4096, 100_000):
        count = input_count_max(replace(ENCODER, embedding_dimension=dimension))
        vector = array("f", [0.1]) * dimension
        message = embedding_message(TokenizedText((1,) * 512, truncated=True), vector)
        answer = pb.EmbedResponse(embeddings=[message] * count)

        assert 1 <= count <= 2048
        assert answer.ByteSize() < CLIENTS_TAKE_BYTES
    assert input_count_max(replace(ENCODER, embedding_dimension=0)) == 0


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=300))
def test_a_vector_arrives_as_it_was_computed(floats: list[float]) -> None:
    """The message is parsed from its own encoding; setting the field by numbers gives the same."""
    message = embedding_message(TokenizedText((1, 2), truncated=True), array("f", floats))

    assert message == pb.Embedding(vector=floats, token_count=2, truncated=True)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 100))
def test_parts_keep_order_and_bounds(lengths: list[int], token_count_max: int) -> None:
    texts = [tuple([index] * length) for index, length in enumerate(lengths)]

    parts = parts_of(texts, token_count_max)

    assert [text for part in parts for text in part] == texts
    for index, part in enumerate(parts):
        assert part
        assert len(part) == 1 or sum(map(len, part)) <= token_count_max
        if index:  # no part had room for the next one's first text
            assert sum(map(len, parts[index - 1])) + len(part[0]) > token_count_max
