"""Load generator of `bench.front`: whole start frames as bytes, each with its own id."""

from __future__ import annotations

import uuid

from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.generation.parsing.start_frame import parse_start
from bench.front_load import RequestMaker, until_batch_ms


def test_a_message_holds_the_given_number_of_starts_with_unique_ids() -> None:
    sent_at: dict[str, float] = {}

    message = pb.GenerateRequest.FromString(RequestMaker("m", "a hotel").make(3, sent_at))

    assert [frame.request_id for frame in message.frames] == list(sent_at)
    assert len(sent_at) == 3
    for frame in message.frames:
        start = parse_start(frame.request_id, frame.start)
        assert start.request_id == uuid.UUID(frame.request_id)
        assert (start.model, start.prompt, start.stop.max_output_tokens) == ("m", "a hotel", 1)


def test_the_stages_before_the_batch_are_all_but_those_of_the_engine_and_the_end() -> None:
    timings = types_pb2.Timings(
        auth_ms=1,
        tokenize_ms=2,
        admission_ms=4,
        queue_ms=8,
        cold_start_ms=16,
        prefill_ms=32,
        decode_ms=64,
        settle_ms=128,
        total_ms=255,
    )

    assert list(until_batch_ms(timings).values()) == [1, 2, 4, 8, 16]
