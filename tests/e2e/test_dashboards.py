"""Dashboards, alerts and documents name existing metrics and labels, and all of them."""

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
    """Return all alerts."""
    document = yaml.safe_load((ROOT / "infra" / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """Return all panels with a query."""
    dashboard = json.loads((ROOT / "infra" / "dashboards" / "weir.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    """Return all PromQL expressions."""
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])


def unknown(expression: str, full_scrape: Scrape) -> set[str]:
    """Return names and labels of an expression that the scrape lacks, if the series exist."""
    labels: dict[str, set[str]] = {}
    for family in full_scrape.families:
        of_family = {label for sample in family.samples for label in sample.labels}
        labels |= {family.name + suffix: of_family for suffix in SUFFIXES[family.type]}
    missing = set(NAME.findall(expression)) - labels.keys()
    for name, matchers in SELECTED.findall(expression):
        if found := labels.get(name, set()):
            missing |= {
                f"{name}{{{label}}}" for label in MATCHER.findall(matchers) if label not in found
            }
    return missing


@pytest.fixture
async def full_scrape(service: Service) -> Scrape:
    """Return a scrape with the series of a request, a refusal and a failed call."""
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 100})
    async with service.stream(tenant.secret) as stream:
        await stream.finished(await stream.begin())
        await stream.failed(await stream.begin(prompt=range(7, 250)))
    async with service.stream("weir_not_a_key") as refused:
        await refused.closed()
    return await scrape(service.metrics_url)


async def test_every_required_metric_is_exported(full_scrape: Scrape) -> None:
    missing = {
        expression: found
        for expression in expressions()
        if (found := unknown(expression, full_scrape))
    }

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
async def test_a_missing_name_is_detected(
    full_scrape: Scrape, expression: str, found: set[str]
) -> None:
    assert unknown(expression, full_scrape) == found


async def test_the_reference_has_every_metric_and_no_other(full_scrape: Scrape) -> None:
    rows = re.findall(r"^- `(weir_[a-z0-9_]+)` \(", metrics_page(), re.M)
    names = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in full_scrape.families
    }
    # With the address of a collector.
    traces = {"weir_traces_sent_total", "weir_traces_dropped_total", "weir_traces_waiting"}
    traces.add("weir_metric_exports_total")

    assert sorted(rows) == sorted({name for name in names if name.startswith("weir_")} | traces)


def test_the_document_says_what_to_do_about_each_alarm() -> None:
    named = re.findall(r"^### `(Weir\w+)`", RUNBOOKS.read_text(), re.M)

    assert named == [rule["alert"] for rule in rules()]
    assert all(
        rule["annotations"]["summary"] and rule["labels"]["severity"] in ("page", "ticket")
        for rule in rules()
    )
