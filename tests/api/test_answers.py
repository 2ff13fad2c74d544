"""Events of a streamed chat, whose texts are composed from prepared bytes."""

from __future__ import annotations

import json
import uuid
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from weir.v1 import inference_service_pb2 as pb

from api.generation.delivery.delta import Delta
from api.openai.answers import CONTENT, ChatAnswer, Output, ServedModel
from api.openai.parameters import ParsedRequest
from inference.engine import SamplingParams

MARK = CONTENT.decode()
texts = st.text() | st.sampled_from([MARK, f'"{MARK}"', "\u2028\u0085\u2029", '"}],"usage":', "\0"])


@given(
    models=texts,
    parts=st.lists(st.tuples(st.integers(0, 2), texts), max_size=6),
    usage=st.booleans(),
)
def test_each_text_is_its_own_event(models: str, parts: list[tuple[int, str]], usage: bool) -> None:
    parsed = ParsedRequest(
        (pb.StartFrame(),), models, streams=True, includes_usage=usage, names={}, choice_count=3
    )
    answer = ChatAnswer(
        parsed, ServedModel(cast(Any, None), "fp", SamplingParams()), uuid.uuid4().hex, 1
    )

    for index, text in parts:
        data = answer.delta(Output(index), Delta(text)).decode()
        assert data.startswith("data: ")
        assert data.endswith("\n\n")
        assert len(data.splitlines()) == 2
        reported = json.loads(data.removeprefix("data: "))
        choice = {
            "index": index,
            "delta": {"content": text},
            "finish_reason": None,
            "logprobs": None,
        }
        assert (reported["choices"], reported["model"], reported["object"]) == (
            [choice],
            models,
            "chat.completion.chunk",
        )
        assert ("usage" in reported) is usage
