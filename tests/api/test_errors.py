"""Table from domain error to status: complete, in the right order, with helpful details."""

from __future__ import annotations

import base64
import importlib
import inspect
import pkgutil
import string
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import api
import inference
import metering
from api.core import errors
from api.core.errors import ApiError, FieldViolation
from api.core.statuses import CODES_BY_CLASS, KINDS, code_of, status_of
from inference.errors import EngineError, EngineFailed, EngineOverloaded, EngineUnavailable
from metering.core.errors import (
    DatabaseUnavailable,
    InvalidValue,
    MeteringError,
    MonthNotClosable,
    NotFound,
    Obstacle,
    ObstacleKind,
)
from metering.core.models import QuotaDimension, QuotaSubject
from metering.holds.operations import RequestSettled, Settled
from metering.quotas.quota_rules import QuotaRule, QuotaState, window_end
from metering.quotas.quotas import QuotaExceeded
from tests.service import Refusal

BASES = (ApiError, EngineError, MeteringError)
LOADED_ELSEWHERE = (
    "api.cli",
    "api.serving",
    "inference.adapters.torch_worker",
    "inference.demo_model",
)
NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)

TEXTS = st.one_of(
    st.text(max_size=300),
    st.text(alphabet="a%é漢🙂", min_size=200, max_size=2000),
    st.text(alphabet="x", min_size=256, max_size=256),
)


def concrete_errors() -> Iterator[type[Exception]]:
    """Return every concrete error class of our packages."""
    for package in (api, inference, metering):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith(LOADED_ELSEWHERE):
                importlib.import_module(module.name)
    waiting: list[type[Exception]] = list(BASES)
    while waiting:
        for derived in waiting.pop().__subclasses__():
            if derived.__module__.split(".")[0] in ("api", "inference", "metering"):
                waiting.append(derived)
                yield derived


@pytest.fixture(scope="module")
def classes() -> list[type[Exception]]:
    return list(concrete_errors())


def test_every_error_class_has_its_row(classes: list[type[Exception]]) -> None:
    """A class without a row would silently become INTERNAL."""
    missing = [kind.__qualname__ for kind in classes if kind not in CODES_BY_CLASS]

    assert missing == []
    assert len(classes) > 25


def test_no_class_has_two_rows_and_none_takes_that_of_its_base() -> None:
    assert len(CODES_BY_CLASS) == sum(map(len, KINDS.values()))
    for code, kinds in KINDS.items():
        assert [code_of(kind.__new__(kind)) for kind in kinds] == [code] * len(kinds), code


def test_every_class_has_a_reason_in_upper_case(classes: list[type[Exception]]) -> None:
    for kind in classes:
        reason = getattr(kind, "reason", "")
        assert reason == reason.upper() != "", kind
        assert reason.replace("_", "").isalpha(), kind


def test_every_class_says_what_it_is(classes: list[type[Exception]]) -> None:
    for kind in classes:
        assert inspect.getdoc(kind), kind


class Unforeseen(Exception):
    """Error without a row in the table."""


@pytest.mark.parametrize(
    "error",
    [
        Unforeseen("SELECT secret"),
        EngineFailed("SIGSEGV at 0x7f"),
        AssertionError("x"),
        KeyError("y"),
    ],
)
def test_internal_errors_are_sent_without_their_text(error: Exception) -> None:
    refusal = Refusal(status_of(error))

    assert refusal.status.code == code_pb2.INTERNAL
    assert refusal.reason == "INTERNAL"
    assert str(error) not in refusal.status.message
    assert refusal.info.metadata["incident_id"] in refusal.status.message


def test_two_incidents_have_two_ids() -> None:
    ids = {Refusal(status_of(Unforeseen())).info.metadata["incident_id"] for _ in range(50)}

    assert len(ids) == 50


def test_a_violation_names_its_field() -> None:
    invalid = errors.InvalidRequest(
        [FieldViolation("a", "must be b"), FieldViolation("c[0]", "must be d")]
    )

    too_long = Refusal(status_of(errors.KeepTooLong(30.0, 20.5)))

    assert Refusal(status_of(invalid)).fields == ["a", "c[0]"]
    assert too_long.fields == ["keep_on_disconnect"]
    assert too_long.info.metadata["keep_on_disconnect_max_s"] == "20.5"
    assert Refusal(status_of(InvalidValue("name", "give one"))).fields == ["name"]


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (DatabaseUnavailable("x", retry_after_s=2.5), 2.5),
        (EngineUnavailable("x", retry_after_s=7.25), 7.25),
        (EngineOverloaded("x", retry_after_s=0.5), 0.5),
        (errors.Draining("x"), 1.0),
        (errors.Overloaded("x"), 1.0),
        (errors.QueueFull(3, 9, 2.5), 2.5),
        (errors.StartsTooLate(10.0, 4.0, 6.5), 6.5),
    ],
)
def test_temporary_errors_have_a_retry_after(error: Exception, seconds: float) -> None:
    refusal = Refusal(status_of(error))

    assert refusal.status.code == code_pb2.UNAVAILABLE
    assert refusal.retry_after_s == seconds


def test_a_wait_that_is_too_long_is_raised() -> None:
    refusal = Refusal(status_of(errors.StartsTooLate(10.0, 4.0, 6.5)))

    assert refusal.reason == "STARTS_TOO_LATE"
    assert refusal.info.metadata["estimated_wait_s"] == "10.000"


def test_permanent_errors_have_no_retry_after() -> None:
    for error in (
        NotFound("organization", "x"),
        InvalidValue("a", "b"),
        errors.Unauthenticated("x"),
    ):
        assert Refusal(status_of(error)).retry_after_s is None


def quota(
    dimension: QuotaDimension,
    *,
    limit: int,
    used: int = 0,
    held: int = 0,
    resets_in_s: float | None = 60,
) -> QuotaState:
    """Return a limit with this much time until its window ends."""
    rule = QuotaRule(uuid.uuid4(), QuotaSubject.PROJECT, uuid.uuid4(), "m", dimension, limit)
    ends = window_end(dimension, NOW)
    return QuotaState(
        rule,
        used,
        held,
        NOW if ends is None or resets_in_s is None else ends - timedelta(seconds=resets_in_s),
    )


def test_a_quota_is_returned_with_all_its_numbers() -> None:
    state = quota(QuotaDimension.TOKENS_PER_MINUTE, limit=100, used=60, held=35)

    refusal = Refusal(status_of(QuotaExceeded([state], [20], "USD")))

    assert dict(refusal.info.metadata) == {
        "quota_id": str(state.quota_id),
        "subject": "project",
        "subject_id": str(state.subject_id),
        "model": "m",
        "dimension": "tokens-per-minute",
        "limit": "100",
        "used": "60",
        "held": "35",
        "remaining": "5",
        "requested": "20",
        "retry_helps": "true",
        "reset_time": "2026-11-20T12:01:00Z",
    }
    assert refusal.retry_after_s == 60
    failure = refusal.detail(error_details_pb2.QuotaFailure)
    assert failure is not None
    assert failure.violations[0].description == "tokens-per-minute: 5 of 100 left"


def test_every_exceeded_limit_is_reported() -> None:
    dimensions = QuotaDimension.TOKENS_PER_MINUTE, QuotaDimension.TOKENS_PER_MONTH
    states = [quota(each, limit=10) for each in dimensions]

    failure = Refusal(status_of(QuotaExceeded(states, [5, 5], "USD"))).detail(
        error_details_pb2.QuotaFailure
    )

    assert failure is not None
    assert len(failure.violations) == 2


def test_the_wait_is_that_for_the_last_limit_in_the_way() -> None:
    """A client that waits only for the first limit is refused again by the second."""
    minute = quota(QuotaDimension.TOKENS_PER_MINUTE, limit=10, used=9, resets_in_s=30)
    month = quota(QuotaDimension.TOKENS_PER_MONTH, limit=10, used=9, resets_in_s=900_000)

    assert (
        Refusal(status_of(QuotaExceeded([minute, month], [5, 5], "USD"))).retry_after_s == 900_000
    )
    never = Refusal(status_of(QuotaExceeded([minute, month], [5, 50], "USD")))
    assert (never.retry_after_s, never.info.metadata["retry_helps"]) == (None, "false")


def test_a_lowered_limit_has_nothing_left_rather_than_less() -> None:
    state = quota(QuotaDimension.TOKENS_PER_DAY, limit=10, used=50)
    refusal = Refusal(status_of(QuotaExceeded([state], [5], "USD")))

    assert refusal.info.metadata["remaining"] == "0"


def test_a_settled_request_is_returned_with_its_usage() -> None:
    settled = Settled(uuid.uuid4(), 10, 4, 33, 32, 32, 12_345, "USD", "length")

    refusal = Refusal(status_of(RequestSettled(settled)))

    assert refusal.status.code == code_pb2.ALREADY_EXISTS
    assert refusal.info.metadata["delivered_token_count"] == "32"
    assert refusal.info.metadata["cost_picos"] == "12345"


def test_a_status_survives_the_wire() -> None:
    status = status_of(errors.InvalidRequest([FieldViolation("ünï", "✓" * 50)]))

    assert status_pb2.Status.FromString(status.SerializeToString()) == status


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=120),
    st.dictionaries(st.text("abc_", min_size=1, max_size=20), TEXTS, max_size=5),
)
def test_a_status_fits_metadata(violations: list[tuple[str, str]], facts: dict[str, str]) -> None:
    """Otherwise the client reports the size, and neither message nor details."""
    error = errors.InvalidRequest([FieldViolation(*each) for each in violations], **facts)
    obstacles = [Obstacle(ObstacleKind.USAGE_UNRATED, text) for _, text in violations]

    for each in (error, MonthNotClosable(obstacles), ApiError(violations[0][1], **facts)):
        status = status_of(each)
        details = status.SerializeToString()
        assert size_on_the_wire(status.message, details) < 6 * 1024


def size_on_the_wire(message: str, details: bytes) -> int:
    """Return the bytes of gRPC's trailers with a status: names, message and details."""
    names = "grpc-statusgrpc-messagegrpc-status-details-bin16"
    encoded = quote(message, safe=string.printable.replace("%", ""))
    return 3 * 32 + len(names) + len(encoded) + len(base64.b64encode(details))


@pytest.mark.parametrize("word", ["a", "é"])
def test_a_status_says_how_many_violations_it_has_no_room_for(word: str) -> None:
    found = [FieldViolation(f"items[{index}]", word * 256) for index in range(100)]

    status = status_of(errors.InvalidRequest(found))

    shown = status.message.split("; ")
    assert shown[-1] == f"and {100 - len(shown) + 1} more"
    bad_request = Refusal(status).detail(error_details_pb2.BadRequest)
    assert bad_request is not None
    *listed, rest = bad_request.field_violations
    assert [each.field for each in listed] == [f"items[{i}]" for i in range(len(listed))]
    assert listed
    assert rest.description == f"and {100 - len(listed)} more"
