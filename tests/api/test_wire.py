"""Conversion between messages and domain values: parsed values are valid, written ones complete."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core import wire
from api.core.errors import InvalidRequest
from api.core.texts import VIOLATION_COUNT_MAX
from api.generation.parsing import tools
from api.generation.parsing.start_frame import parse_count_tokens, parse_start
from api.generation.parsing.tools import SCHEMA_BYTES_MAX, SCHEMAS_BYTES_MAX
from inference.engine import EngineFinishReason
from inference.text.tokenizer import ChatMessage
from metering.core.models import Outcome, QuotaDimension, QuotaSubject

Parsed = TypeVar("Parsed")

ID = "0b5e5ad6-4f0e-4f3e-9d4c-1f6f7b3a2c11"

floats = st.floats(allow_nan=True, allow_infinity=True)
int64s = st.integers(-(2**63), 2**63 - 1)
int32s = st.integers(-(2**31), 2**31 - 1)
starts = st.builds(
    pb.StartFrame,
    model=st.text(max_size=5),
    text=st.text(max_size=5),
    sampling=st.builds(
        pb.Sampling,
        temperature=st.none() | floats,
        top_p=st.none() | floats,
        top_k=st.none() | int32s,
        seed=st.none() | int64s,
    ),
    stop_sequences=st.lists(st.text(max_size=300), max_size=20),
    max_output_tokens=st.none() | int64s,
    usage_interval_tokens=st.none() | int64s,
    labels=st.dictionaries(st.text(max_size=70), st.text(max_size=300), max_size=20),
)

FLOODS: dict[str, Callable[[], pb.StartFrame]] = {
    "conversation.messages": lambda: pb.StartFrame(
        conversation=pb.Conversation(messages=[pb.Message()] * 100_000)
    ),
    "conversation.messages[0].tool_calls[0].id": lambda: pb.StartFrame(
        conversation=pb.Conversation(
            messages=[pb.Message(role=pb.ROLE_ASSISTANT, tool_calls=[pb.ToolCall()] * 4000)]
        )
    ),
    "tools": lambda: pb.StartFrame(tools=[pb.Tool(name=str(index)) for index in range(100_000)]),
    "stop_sequences": lambda: pb.StartFrame(stop_sequences=["."] * 100_000),
    "sampling.logit_bias": lambda: pb.StartFrame(
        sampling=pb.Sampling(logit_bias=dict.fromkeys(range(100_000), 1.0))
    ),
    "labels": lambda: pb.StartFrame(labels={str(index): "" for index in range(100_000)}),
}


def refused(parse: Callable[[], Parsed]) -> Parsed | InvalidRequest:
    """Return the parsed value or its refusal; let any other error pass."""
    try:
        return parse()
    except InvalidRequest as refusal:
        return refusal


@given(starts)
def test_a_start_is_refused_with_reasons_or_right_in_everything(start: pb.StartFrame) -> None:
    parsed = refused(lambda: parse_start(ID, start))
    if isinstance(parsed, InvalidRequest):
        assert parsed.violations
        assert all(violation.field and violation.description for violation in parsed.violations)
        return

    sampling = start.sampling
    assert start.model
    assert start.text
    assert not sampling.HasField("temperature") or 0 <= sampling.temperature <= 2
    assert not sampling.HasField("top_p") or 0 <= sampling.top_p <= 1
    assert not sampling.HasField("top_k") or sampling.top_k >= 0
    assert not start.HasField("max_output_tokens") or start.max_output_tokens >= 1
    assert len(start.stop_sequences) <= 16
    assert all(1 <= len(stop) <= 256 for stop in start.stop_sequences)
    assert parsed.labels == dict(start.labels)
    assert parsed.request_id == uuid.UUID(ID)


@given(starts, starts)
def test_payloads_are_equal_like_their_frames(one: pb.StartFrame, other: pb.StartFrame) -> None:
    hashes = []
    for frame in (one, other):
        frame.model, frame.text = (
            frame.model if frame.model.isprintable() else "",
            frame.text or "t",
        )
        frame.model = frame.model or "m"
        del frame.stop_sequences[:]
        for field in ("max_output_tokens", "usage_interval_tokens", "sampling", "labels"):
            frame.ClearField(field)
        hashes.append(parse_start(ID, frame).payload_hash)

    assert (hashes[0] == hashes[1]) == (one == other)
    assert all(len(each) == 32 for each in hashes)


def test_the_order_of_labels_does_not_make_another_payload() -> None:
    one = pb.StartFrame(model="m", text="t", labels={"a": "1", "b": "2", "c": "3"})
    other = pb.StartFrame(model="m", text="t", labels={"c": "3", "b": "2", "a": "1"})

    assert parse_start(ID, one).payload_hash == parse_start(ID, other).payload_hash


@pytest.mark.parametrize(
    "labels",
    [
        {"a\0c\0b": "d"},
        {"a": "c\0b\0d"},
        {"a\0c": "b\0d"},
        {"a": "b", "c\0": "d"},
        {"a": "b", "": "d"},
        {"a": "b", "c": "\0"},
        {"a": "b", "c": "x" * (wire.LABEL_VALUE_CHARS_MAX + 1)},
        {"a": "b", "c" * (wire.LABEL_KEY_CHARS_MAX + 1): "d"},
    ],
)
def test_labels_that_resemble_known_ones_are_checked(labels: dict[str, str]) -> None:
    for _ in range(2):
        parse_start(ID, pb.StartFrame(model="m", text="t", labels={"a": "b", "c": "d"}))
        with pytest.raises(InvalidRequest) as refused:
            parse_start(ID, pb.StartFrame(model="m", text="t", labels=labels))
        assert all(each.field.startswith("labels[") for each in refused.value.violations)


@pytest.mark.parametrize(
    ("labels", "is_kept"),
    [
        ({"team": "search", "run": "4711"}, True),
        ({"team": "", "run": ""}, True),
        ({"a": "x" * wire.KNOWN_LABELS_CHARS_MAX}, False),
        ({str(index): "é" * 100 for index in range(16)}, False),
    ],
)
def test_labels_are_encoded_once_unless_they_are_long(
    labels: dict[str, str], is_kept: bool
) -> None:
    one, same = (
        parse_start(ID, pb.StartFrame(model="m", text="t", labels=labels)).labels for _ in range(2)
    )

    assert one == same == labels
    assert (one is same) == is_kept


@pytest.mark.parametrize(
    ("field", "prompt"),
    [
        ({"text": "hello"}, "hello"),
        ({"token_ids": pb.TokenIds(ids=[1, 2])}, (1, 2)),
        (
            {
                "conversation": pb.Conversation(
                    messages=[pb.Message(role=pb.ROLE_SYSTEM, content="s")]
                )
            },
            (ChatMessage("system", "s"),),
        ),
    ],
)
def test_a_prompt_comes_in_three_forms(field: dict[str, Any], prompt: object) -> None:
    assert parse_start(ID, pb.StartFrame(model="m", **field)).prompt == prompt


@pytest.mark.parametrize(
    "spelling", [ID, ID.upper(), ID.replace("-", ""), "{" + ID + "}", f"urn:uuid:{ID}"]
)
def test_an_id_is_known_in_every_spelling_and_answered_in_its_own(spelling: str) -> None:
    parsed = parse_start(spelling, pb.StartFrame(model="m", text="t"))

    assert parsed.request_id == uuid.UUID(ID)
    assert parsed.given_id == spelling


@given(st.integers(-(10**24), 10**24), st.sampled_from(["USD", "JPY"]))
def test_money_loses_no_pico(picos: int, currency_code: str) -> None:
    message = wire.money(currency_code, picos)

    assert message.units * 10**12 + message.picos == picos
    assert abs(message.picos) < 10**12
    assert message.units == 0 or message.picos == 0 or (message.units < 0) == (message.picos < 0)
    assert message.currency_code == currency_code


@given(st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC)))
def test_a_time_comes_back_to_the_microsecond(at: datetime) -> None:
    message = wire.timestamp(at)

    assert message is not None
    assert wire.parse_timestamp(message, "f") == at


@given(int64s, int32s)
def test_any_time_and_duration_is_read_or_refused(seconds: int, nanos: int) -> None:
    at = refused(lambda: wire.parse_timestamp(Timestamp(seconds=seconds, nanos=nanos), "f"))
    length = refused(lambda: wire.parse_duration(Duration(seconds=seconds, nanos=nanos), "f"))

    assert isinstance(at, datetime) or at.violations[0].field == "f"
    assert isinstance(length, timedelta) or length.violations[0].field == "f"


def test_unset_values_stay_unset() -> None:
    assert wire.timestamp(None) is None
    assert wire.duration(None) is None
    assert wire.duration(1.5) == Duration(seconds=1, nanos=500_000_000)


def test_every_domain_value_has_its_word_on_the_wire() -> None:
    """A value that is missing here would break an answer in production."""
    assert set(wire.SUBJECTS) == set(QuotaSubject)
    assert set(wire.DIMENSION_NUMBERS) == set(QuotaDimension)
    assert set(wire.FINISH_REASONS) == set(Outcome) - {Outcome.FAILED}
    assert set(wire.OUTCOMES_BY_REASON) == set(EngineFinishReason)
    for table, enum in (
        (wire.SUBJECTS, types_pb2.QuotaSubject),
        (wire.DIMENSION_NUMBERS, types_pb2.QuotaDimension),
        (wire.FINISH_REASONS, types_pb2.FinishReason),
    ):
        # An output that ends with calls has ended by itself, except for its reader.
        reported_otherwise = (
            {types_pb2.FINISH_REASON_TOOL_CALLS} if enum is types_pb2.FinishReason else set()
        )
        assert sorted(table.values()) == sorted(set(enum.values()) - {0} - reported_otherwise), (
            enum.DESCRIPTOR.name
        )


@given(at=st.datetimes(timezones=st.just(UTC)))
def test_times_are_those_of_the_library(at: datetime) -> None:
    expected = Timestamp()
    expected.FromDatetime(at)

    assert wire.timestamp(at) == expected


@given(seconds=st.floats(-1e9, 1e9))
def test_durations_are_those_of_the_library(seconds: float) -> None:
    expected = Duration()
    expected.FromTimedelta(timedelta(seconds=seconds))

    assert wire.duration(seconds) == expected


@pytest.mark.parametrize("field", FLOODS)
def test_many_wrong_elements_are_refused_without_reading_all(field: str) -> None:
    """Checking a hundred thousand elements would block all other clients for a second."""
    flood, reads = FLOODS[field](), 0

    def read_element(frame: object, event: str, _: object) -> None:
        nonlocal reads
        reads += event == "call"

    sys.setprofile(read_element)
    refusal = refused(lambda: parse_start(ID, flood))
    sys.setprofile(None)

    assert isinstance(refusal, InvalidRequest)
    assert field in {violation.field for violation in refusal.violations}
    assert len(refusal.violations) <= VIOLATION_COUNT_MAX
    assert reads < 5000


@pytest.mark.parametrize("strict", [False, True])
def test_large_schemas_are_refused_unread(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have the maximum size; reading all of them would block all other clients."""
    schema = '{"description": "' + "x" * (SCHEMA_BYTES_MAX - 20) + '"}'
    within, beyond = SCHEMAS_BYTES_MAX // SCHEMA_BYTES_MAX, SCHEMAS_BYTES_MAX // len(schema) + 1
    start = pb.StartFrame(
        model="demo",
        conversation=pb.Conversation(messages=[pb.Message(role=pb.ROLE_USER, content="x")]),
    )
    start.tools.extend(
        pb.Tool(name=f"t{index}", parameters_json_schema=schema, strict=strict)
        for index in range(within)
    )

    parse_start(ID, start)
    start.tools.extend(
        pb.Tool(name=f"u{index}", parameters_json_schema=schema) for index in range(beyond - within)
    )
    monkeypatch.setattr(tools, "json_object", None)
    count = pb.CountTokensRequest(model="demo", conversation=start.conversation, tools=start.tools)
    refusals = [refused(lambda: parse_start(ID, start)), refused(lambda: parse_count_tokens(count))]

    for refusal in refusals:
        assert isinstance(refusal, InvalidRequest)
        [violation] = refusal.violations
        assert violation.field == "tools"
        assert str(SCHEMAS_BYTES_MAX) in violation.description
