"""What dashboards, alarms and documents say of metrics is so: each name, each label, and nothing left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.reference import metrics_page
from metering.core.models import QuotaDimension
from tests.scraped import Scrape, scrape
from tests.service import Service

ROOT = Path(__file__).resolve().parents[2]
RUNBOOKS = ROOT / "docs" / "how-to" / "monitor.md"
NAME = re.compile(r"\b(?:weir|process)_[a-z0-9_]+\b")
SELECTED = re.compile(r"\b((?:weir|process)_[a-z0-9_]+)\{([^}]*)\}")
MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
PANELS_MIN, ALERTS_MIN = 25, 12


def rules() -> list[dict[str, Any]]:
    """All alarms."""
    document = yaml.safe_load((ROOT / "infra" / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """All panels that show something."""
    dashboard = json.loads((ROOT / "infra" / "dashboards" / "weir.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    """Everything that Prometheus is asked."""
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])


def unknown(expression: str, told: Scrape) -> set[str]:
    """Names and labels of an expression that the scrape does not have. Labels of series that are not there yet are not known."""
    labels: dict[str, set[str]] = {}
    for family in told.families:
        of_family = {label for sample in family.samples for label in sample.labels}
        labels |= {family.name + suffix: of_family for suffix in SUFFIXES[family.type]}
    missing = set(NAME.findall(expression)) - labels.keys()
    for name, matchers in SELECTED.findall(expression):
        if found := labels.get(name, set()):
            missing |= {f"{name}{{{label}}}" for label in MATCHER.findall(matchers) if label not in found}
    return missing


@pytest.fixture
async def told(service: Service) -> Scrape:
    """After a request, a refusal and a failed call, so that their series are there."""
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 100})
    async with service.stream(tenant.secret) as stream:
        await stream.finished(await stream.begin())
        await stream.failed(await stream.begin(prompt=range(7, 250)))
    async with service.stream("weir_not_a_key") as refused:
        await refused.closed()
    return await scrape(service.metrics_url)


async def test_every_metric_that_is_asked_for_is_told(told: Scrape) -> None:
    missing = {expression: found for expression in expressions() if (found := unknown(expression, told))}

    assert not missing
    assert len(panels()) >= PANELS_MIN
    assert len(rules()) >= ALERTS_MIN


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("rate(weir_requests_totl[5m])", {"weir_requests_totl"}),
        ('weir_tokens_total{sort="output"} > 0', {"weir_tokens_total{sort}"}),
        ("weir_stage_seconds > 1", {"weir_stage_seconds"}),
        ('histogram_quantile(0.99, rate(weir_stage_seconds_bucket{stage="queue"}[5m]))', set()),
    ],
)
async def test_a_name_that_is_not_told_is_found(told: Scrape, expression: str, found: set[str]) -> None:
    assert unknown(expression, told) == found


async def test_the_reference_has_every_metric_and_no_other(told: Scrape) -> None:
    rows = re.findall(r"^- `(weir_[a-z0-9_]+)` \(", metrics_page(), re.M)
    names = {family.name + ("_total" if family.type == "counter" else "") for family in told.families}
    traces = {"weir_traces_sent_total", "weir_traces_dropped_total", "weir_traces_waiting"}  # where spans are sent

    assert sorted(rows) == sorted({name for name in names if name.startswith("weir_")} | traces)


def test_the_document_says_what_to_do_about_each_alarm() -> None:
    named = re.findall(r"^### `(Weir\w+)`", RUNBOOKS.read_text(), re.M)

    assert named == [rule["alert"] for rule in rules()]
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] in ("page", "ticket") for rule in rules())
