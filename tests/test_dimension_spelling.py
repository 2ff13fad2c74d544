"""A quota's dimension has one spelling everywhere, and each kind of price is shown."""

from __future__ import annotations

import json
import re
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest
import weir_client
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2
from weir_cli.document_fields import dimension_of
from weir_client import Price
from weir_client.errors import QuotaExceeded as ClientQuotaExceeded
from weir_client.status import error_from_status
from weir_client.wire import read

from api.core.statuses import status_of
from api.core.wire import DIMENSION_NUMBERS
from api.observability.observer import RequestCounts
from api.openai.error_responses import error_response
from api.openai.models_list import ListedModel
from metering.alerts.alerts import Alert, ListedAlert
from metering.alerts.webhooks import body_of
from metering.core.models import (
    Organization,
    Quota,
    QuotaDimension,
    QuotaSubject,
    ServiceTier,
    TokenKind,
)
from metering.pricing.prices import COUNTS_OF_EVENT
from metering.quotas.quota_rules import QuotaRule, QuotaState
from metering.quotas.quotas import QuotaExceeded

ROOT = Path(__file__).parent.parent
NOW = datetime(2026, 11, 26, tzinfo=UTC)
SERIES = "demo", ServiceTier.INTERACTIVE, "chat", ""
MEASURES = {
    "requests": "requests",
    "tokens": "tokens",
    "input_tokens": "input-tokens",
    "output_tokens": "output-tokens",
    "cost_picos": "cost",
}
# Unit of an amount in the text of an alert, by the first word of the dimension.
UNITS = {
    "concurrent": " requests",
    "requests": " 4 requests of 5 requests.",
    "tokens": " 4 tokens of 5 tokens.",
    "input": " 4 input tokens of 5 input tokens.",
    "output": " 4 output tokens of 5 output tokens.",
    "cost": " USD",
    "prepaid": " USD",
}
SPELLINGS = {
    QuotaDimension.CONCURRENT_REQUESTS: "concurrent-requests",
    QuotaDimension.PREPAID_CREDIT_PICOS: "prepaid-credit",
} | {
    QuotaDimension(f"{measure}_per_{window}"): f"{spelling}-per-{window}"
    for measure, spelling in MEASURES.items()
    for window in ("minute", "window", "hour", "day", "week", "month", "lifetime")
    if (measure, window) != ("cost_picos", "minute")
}


def exceeded(
    dimension: QuotaDimension, subject: QuotaSubject = QuotaSubject.PROJECT
) -> QuotaExceeded:
    rule = QuotaRule(uuid.uuid4(), subject, uuid.uuid4(), "", dimension, 5)
    return QuotaExceeded([QuotaState(rule, 5, 0, NOW)], [1], "USD")


def test_the_table_has_every_dimension() -> None:
    assert set(SPELLINGS) == set(QuotaDimension)
    assert {*SPELLINGS.values(), "unspecified"} == {
        each.value for each in weir_client.QuotaDimension
    }


@pytest.mark.parametrize(("dimension", "spelling"), SPELLINGS.items())
def test_a_dimension_has_one_spelling_everywhere(dimension: QuotaDimension, spelling: str) -> None:
    status = status_of(exceeded(dimension))
    client_error = error_from_status(status)
    answer = str(error_response(status))
    alert = Alert(
        id=uuid.uuid4(), window_start=NOW, threshold=80, limit_value=5, used=4, fired_at=NOW
    )
    quota = Quota(
        id=uuid.uuid4(), subject="project", subject_id=uuid.uuid4(), model="", dimension=dimension
    )
    organization = Organization(id=uuid.uuid4(), name="acme", currency_code="USD")
    webhook = json.loads(body_of(ListedAlert(alert, organization, quota, None, None)))
    message = types_pb2.QuotaStatus(dimension=DIMENSION_NUMBERS[dimension])

    assert dimension.spelling == spelling
    assert f"dimension': '{spelling}'" in answer
    assert isinstance(client_error, ClientQuotaExceeded)
    assert client_error.quota is not None
    assert client_error.quota.dimension is weir_client.QuotaDimension(spelling)
    assert webhook["quota"]["dimension"] == spelling
    assert UNITS[spelling.partition("-")[0]] in webhook["text"]
    assert read(weir_client.QuotaStatus, message).dimension == spelling
    assert dimension_of(types_pb2.QuotaDimension.Name(DIMENSION_NUMBERS[dimension])) == spelling
    for text in (status.message, answer, json.dumps(webhook)):
        assert dimension.value not in text or dimension.value == spelling


def test_other_files_name_the_dimensions_of_the_table() -> None:
    typescript = (ROOT / "sdk/typescript/src/generated_values.ts").read_text()
    listed = typescript.partition("QUOTA_DIMENSIONS = [")[2].partition("]")[0]
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("sdk/*/README.md")]
    internal = [
        f"{page.name}: {dimension.value}"
        for page in pages
        if "internals" not in page.parts
        for dimension in QuotaDimension
        if re.search(rf"`{dimension.value}`|\"{dimension.value}\"", page.read_text())
    ]

    assert set(re.findall(r'"([a-z-]+)"', listed)) == {*SPELLINGS.values(), "unspecified"}
    assert internal == []


def test_the_metric_of_refusals_has_the_same_names() -> None:
    counts = RequestCounts(["demo"])
    for dimension in QuotaDimension:
        counts.failed(SERIES, exceeded(dimension), None)

    assert {labels[2] for labels in counts.refusals} == set(SPELLINGS.values())


@pytest.mark.parametrize("subject", QuotaSubject)
def test_the_owner_of_a_limit_has_one_spelling_everywhere(subject: QuotaSubject) -> None:
    error = exceeded(QuotaDimension.TOKENS_PER_DAY, subject)
    status, spelling = status_of(error), subject.spelling
    client_error = error_from_status(status)
    alert = Alert(
        id=uuid.uuid4(), window_start=NOW, threshold=80, limit_value=5, used=4, fired_at=NOW
    )
    quota = Quota(
        id=uuid.uuid4(),
        subject=subject,
        subject_id=uuid.uuid4(),
        model="",
        dimension="tokens_per_day",
    )
    organization = Organization(id=uuid.uuid4(), name="acme", currency_code="USD")
    webhook = json.loads(body_of(ListedAlert(alert, organization, quota, None, None)))
    counts = RequestCounts(["demo"])
    counts.failed(SERIES, error, None)

    assert isinstance(client_error, ClientQuotaExceeded)
    assert client_error.quota is not None
    assert client_error.metadata["subject"] == spelling
    assert client_error.quota.subject is weir_client.QuotaSubject(spelling)
    assert client_error.details.quota_violations[0].subject.partition(":")[0] == spelling
    assert webhook["quota"]["subject"] == spelling
    assert {labels[3] for labels in counts.refusals} == {spelling}
    assert f'"{spelling}"' in (ROOT / "sdk/typescript/src/generated_values.ts").read_text()


@pytest.mark.parametrize("kind", TokenKind)
def test_a_model_shows_the_price_of_every_kind_of_token(kind: TokenKind) -> None:
    _, name = COUNTS_OF_EVENT[kind]
    price = pb.Price(version=1, currency_code="USD")
    setattr(price, name, 7)
    model = pb.Model(name="demo", price=price)

    assert ListedModel(model, "m", "", 1).facts()["price"][name] == 7
    assert getattr(read(Price, model.price), name) == 7
    typescript = (ROOT / "sdk/typescript/src/generated_values.ts").read_text()
    assert re.search(rf"\b{camel(name)}\b", typescript)
    assert camel(name) in (ROOT / "console/src/pages/overview.tsx").read_text()


def camel(name: str) -> str:
    return re.sub("_([a-z])", lambda found: found[1].upper(), name)
