"""Load generator over gRPC: whole start frames as bytes, each with its own id."""

from __future__ import annotations

import uuid

from weir.v1 import inference_service_pb2 as pb

from api.generation.parsing.start_frame import parse_start
from bench.grpc_load import MARK, Load, RequestMaker


def test_a_message_holds_the_given_number_of_starts_with_unique_ids() -> None:
    sent_at: dict[str, float] = {}

    load = Load(["x"], "m", [f"a hotel {MARK}"], ["key"], 1, 0.0, 0.0)

    message = pb.GenerateRequest.FromString(
        RequestMaker(load, load.prompts, load.output_tokens).make(3, sent_at)
    )

    assert [frame.request_id for frame in message.frames] == list(sent_at)
    assert len(sent_at) == 3
    for frame in message.frames:
        start = parse_start(frame.request_id, frame.start)
        assert start.request_id == uuid.UUID(frame.request_id)
        prompt = f"a hotel {frame.request_id[: len(MARK)]}"
        assert (start.model, start.prompt, start.stop.max_output_tokens) == ("m", prompt, 1)
