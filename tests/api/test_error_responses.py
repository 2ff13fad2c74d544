"""Errors and limits in the format of OpenAI's API, and the events of a stream."""

from __future__ import annotations

import json
import os

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from weir.v1 import types_pb2

from api.core.endpoint import local_url
from api.core.errors import (
    Draining,
    FieldViolation,
    InvalidRequest,
    PromptTooLong,
    StartsTooLate,
    Unauthenticated,
)
from api.core.settings import Settings
from api.core.statuses import KINDS, status_of
from api.generation.parsing.conversation import MESSAGE_COUNT_MAX
from api.openai import answers
from api.openai.conversations import Item, Message, conversation, conversation_of
from api.openai.error_responses import (
    HTTP_STATUSES,
    duration_text,
    error_response,
    parameter,
    quota_headers,
    remedy_of,
)
from api.openai.parameters import CHAT_NAMES as NAMES
from api.openai.parameters import RESPONSE_NAMES, ResponseParameters, decode
from common.settings import SettingInvalid
from inference.errors import RequestImpossible
from inference.sequences import RequestField

LEAVES = st.none() | st.booleans() | st.integers() | st.text()
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


def test_every_code_of_the_table_has_a_status() -> None:
    assert KINDS.keys() <= HTTP_STATUSES.keys()
    assert code_pb2.INTERNAL in HTTP_STATUSES


def test_a_remedy_uses_the_terms_of_the_api() -> None:
    left_out = InvalidRequest(
        [
            FieldViolation(
                "response_format",
                "cannot be combined with tools; set tool_choice to TOOL_MODE_NONE",
            )
        ]
    )
    too_long = status_of(PromptTooLong(7, 10, 12))
    taken = code_pb2.ALREADY_EXISTS

    assert error_response(status_of(left_out), NAMES).message.endswith("set tool_choice to none")
    names = NAMES | {"max_output_tokens": "max_tokens"}
    assert "max_tokens of" in error_response(too_long, names).message
    assert "max_output_tokens of" in error_response(too_long, RESPONSE_NAMES).message
    assert (
        error_response(status_pb2.Status(code=taken, message="use a new request_id")).message
        == "use a new Idempotency-Key"
    )


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (RequestField.SEED, "seed"),
        (RequestField.MIN_P, "min_p"),
        (RequestField.PRESENCE_PENALTY, "presence_penalty"),
        (RequestField.FREQUENCY_PENALTY, "frequency_penalty"),
        (RequestField.REPETITION_PENALTY, "repetition_penalty"),
        (RequestField.LOGIT_BIAS, "logit_bias"),
        (RequestField.MIN_OUTPUT_TOKENS, "min_tokens"),
        (RequestField.TOP_LOGPROBS, "top_logprobs"),
        (RequestField.STOP_TOKEN_IDS, "stop_token_ids"),
    ],
)
def test_a_field_ignored_by_the_engine_is_refused_by_name(field: RequestField, param: str) -> None:
    impossible = RequestImpossible("this model's engine does not honour it", field)
    refusal = error_response(status_of(impossible), NAMES)

    assert (refusal.http_status, refusal.param) == (400, param)
    assert refusal.kind == "invalid_request_error"


def test_a_retry_after_is_sent_in_every_form_that_clients_read() -> None:
    refusal = error_response(status_of(StartsTooLate(wait_s=3.0, left_s=1.0, retry_after_s=2.0005)))

    assert refusal.http_status == 503
    assert refusal.headers == {
        "weir-reason": "STARTS_TOO_LATE",
        "retry-after": "3",
        "retry-after-ms": "2001",
    }
    facts = {"reason": "STARTS_TOO_LATE", "estimated_wait_s": "3.000"}
    assert refusal.body()["error"]["weir"] == facts


def test_too_many_messages_are_refused_before_any_is_read() -> None:
    count = MESSAGE_COUNT_MAX + 1
    wrong_role = "nobody"

    with pytest.raises(
        InvalidRequest,
        match=f"messages: must have at most {MESSAGE_COUNT_MAX} elements, got {count}",
    ):
        conversation([Message(role=wrong_role)] * count)
    with pytest.raises(
        InvalidRequest, match=f"input: must have at most {MESSAGE_COUNT_MAX} elements, got {count}"
    ):
        conversation_of([Item(role=wrong_role)] * count, None)


def test_no_client_is_let_to_wait_for_what_is_too_far_away() -> None:
    far = Draining("later")
    far.retry_after_s = 121.0

    assert error_response(status_of(far)).headers["x-should-retry"] == "false"
    assert "x-should-retry" not in error_response(status_of(Draining("soon"))).headers


def test_an_internal_error_reports_its_incident_and_nothing_else() -> None:
    refusal = error_response(status_of(RuntimeError("the secret of the house")))

    assert refusal.http_status == 500
    assert refusal.kind == refusal.code == "server_error"
    assert "secret" not in json.dumps(refusal.body())
    assert refusal.facts["incident_id"] in refusal.message


def test_a_prompt_that_is_too_long_has_the_code_that_clients_expect() -> None:
    refusal = error_response(status_of(PromptTooLong(100, 5, 64)), NAMES)

    assert (refusal.http_status, refusal.param) == (400, "messages")
    assert refusal.code == "context_length_exceeded"
    assert refusal.facts["excess_token_count"] == "41"


def test_a_missing_key_is_requested() -> None:
    refusal = error_response(status_of(Unauthenticated("no key")))

    assert (refusal.http_status, refusal.code) == (401, "invalid_api_key")
    assert refusal.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("sampling.temperature", "temperature"),
        ("sampling.logit_bias[7]", "logit_bias[7]"),
        ("labels['user']", "user"),
        ("labels['a.b']", "metadata['a.b']"),
        ("stop_sequences[3]", "stop[3]"),
        ("response_format.json_schema", "response_format.json_schema.schema"),
        ("nothing.of[ours]", "nothing.of[ours]"),
        ("", ""),
    ],
)
def test_fields_are_called_what_the_request_calls_them(field: str, name: str) -> None:
    assert parameter(field, NAMES) == name


def test_headers_report_the_limit_that_has_least_left() -> None:
    def quota(
        dimension: types_pb2.QuotaDimension.ValueType, limit: int, left: int, reset_s: int
    ) -> types_pb2.QuotaStatus:
        delay = Duration(seconds=reset_s)
        return types_pb2.QuotaStatus(
            dimension=dimension, limit_value=limit, remaining_value=left, reset_delay=delay
        )

    headers = quota_headers(
        [
            quota(types_pb2.QUOTA_DIMENSION_TOKENS_PER_MONTH, 9000, 900, 86_400),
            quota(types_pb2.QUOTA_DIMENSION_TOKENS_PER_MINUTE, 1000, -5, 12),
            quota(types_pb2.QUOTA_DIMENSION_CONCURRENT_REQUESTS, 3, 1, 0),
            quota(types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_MONTH, 3, 1, 9),
        ]
    )

    assert headers == {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "12s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.35, "350ms"), (12, "12s"), (360, "6m0s"), (7205, "2h0m5s"), (-3, "0ms")],
)
def test_durations_read_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@given(st.text(alphabet=st.sampled_from('a\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029😀"\\')))
def test_an_event_is_one_line_for_every_reader_and_keeps_its_text(text: str) -> None:
    data = answers.event({"text": text})

    assert data.decode().splitlines()[0].encode() + b"\n\n" == data
    assert json.loads(data.removeprefix(b"data: "))["text"] == text


@settings(max_examples=int(os.environ.get("WEIR_HTTP_EXAMPLES", "60")))
@given(JSON)
def test_any_json_is_accepted_or_refused_by_parameter(value: object) -> None:
    body = json.dumps({"model": "m", "input": value}).encode()

    reported = {"input"}
    try:
        assert decode(body, ResponseParameters).input is not None
    except InvalidRequest as error:
        reported = {violation.field[:5] for violation in error.violations}

    assert reported == {"input"}


@pytest.mark.parametrize(
    ("grpc", "http", "address"),
    [
        ("127.0.0.1:8443", "", ("127.0.0.1", 9443)),
        ("0.0.0.0:8443", "", ("127.0.0.1", 9443)),
        ("127.0.0.1:0", "", ("127.0.0.1", 0)),
        ("127.0.0.1:65000", "", ("127.0.0.1", 64000)),
        ("unix:/run/weir.sock", "", None),
        ("[::]:8443", "[::1]:80", ("::1", 80)),
        ("127.0.0.1:8443", "off", None),
    ],
)
def test_the_http_address(grpc: str, http: str, address: tuple[str, int] | None) -> None:
    chosen = Settings().having(listen=grpc, openai_listen=http)

    assert chosen.listen.openai_address() == address


def test_an_invalid_address_is_refused_by_name() -> None:
    for text in ("9443", "host:", "host:99999", "on"):
        with pytest.raises(SettingInvalid, match="WEIR_OPENAI_LISTEN"):
            Settings.from_environment({"WEIR_OPENAI_LISTEN": text})
    assert local_url("::1", 9443, "/v1") == "http://[::1]:9443/v1"
    assert local_url("0.0.0.0", 9443, "/v1", tls=True) == "https://127.0.0.1:9443/v1"


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/v1/responses", "answers are not stored"),
        ("/v1/responses/resp_1", "answers are not stored"),
        ("/v1/responses/resp_1/input_items", "answers are not stored"),
        ("/v1/responses/resp_1/cancel", "close its connection"),
        ("/v1/responses/compact", "conversations are not shortened"),
        ("/v1/chat/completions", "answers are not stored"),
        ("/v1/chat/completions/chatcmpl-1/messages", "answers are not stored"),
        ("/v1/chat/completions/input_tokens", "use /tokenize"),
        ("/v1/conversations/conv_1/items", "send the whole conversation"),
        ("/v1/messages/batches", "send each request by itself"),
        ("/v1/batches/batch_1", "send each request by itself"),
        ("/v1/files/file_1/content", "put their text into a message"),
        ("/v1/vector_stores", "put their text into a message"),
        ("/v1/threads/thread_1/runs", "use /v1/responses"),
        ("/v1/models/demo", "the operator adds and removes models"),
        ("/v1/fine_tuning/jobs", "the operator adds and removes models"),
        ("/v1/moderations", "the operator configures the safety checks"),
        ("/v1/images/generations", "send and read text"),
        ("/v1/audio/speech", "send and read text"),
        ("/v1/complete", "use /v1/messages"),
        ("/v2/rerank", "compare vectors"),
        ("/completion", "use /v1/completions"),
        ("/generate_stream", "use /v1/completions"),
        ("/embedding", "use /v1/embeddings"),
        ("/apply-template", "use /tokenize"),
        ("/api/chat", "a base URL that ends in /v1"),
        ("/slots", "GET /v1/models"),
        ("/v1/surprise", ""),
        ("/v1/embeddings", ""),
    ],
)
def test_an_endpoint_that_is_not_served_has_a_remedy(path: str, remedy: str) -> None:
    found = remedy_of(path)

    assert bool(found) is bool(remedy)
    assert remedy in found
