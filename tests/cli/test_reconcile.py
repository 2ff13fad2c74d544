"""`weir reconcile` on a database: its three forms, exit code, and refusals."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from metering.ledger.rating import rate_all_pending
from metering.store.db import create_engine, create_sessions
from tests.cli.conftest import Run
from tests.metering.usage import Consumed, add_usage, new_customer, new_price

MONTH = "2026-10"


@pytest.fixture
def database(database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return a database with rated usage, one unrated event, and an export to an empty file."""
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)
    monkeypatch.setenv("WEIR_EXPORT", "file")
    monkeypatch.setenv("WEIR_EXPORT_FILE", str(tmp_path / "usage.jsonl"))
    asyncio.run(use(database_url))
    return database_url


async def use(database_url: str) -> None:
    """Add usage of seven rated tokens, and three unrated ones."""
    engine = create_engine(database_url)
    sessions = create_sessions(engine)
    at = datetime(2026, 10, 5, 12, tzinfo=UTC)
    async with sessions.begin() as session:
        customer, price = await new_customer(session, "acme"), await new_price(session)
        await add_usage(session, customer, price, [Consumed(output_token_count=7, settled_at=at)])
    await rate_all_pending(sessions)
    async with sessions.begin() as session:
        await add_usage(session, customer, price, [Consumed(output_token_count=3, settled_at=at)])
    await engine.dispose()


def test_differences_have_age_and_remedy_and_exit_code_1(bare_weir: Run, database: str) -> None:
    result = bare_weir("reconcile", MONTH)

    assert result.exit_code == 1
    assert "usage to ledger  acme demo version 1 output: 3 tokens, for " in result.stdout
    assert "ledger to batches  acme demo version 1 output: 10 tokens" in result.stdout
    assert "remedy: the worker rates each second" in result.stdout
    assert "2 differences" in result.stderr


def test_the_ledger_is_the_last_stage_where_nothing_is_exported(
    bare_weir: Run, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_EXPORT", "off")

    result = bare_weir("reconcile", MONTH, "--organization", "acme")

    assert result.exit_code == 1
    assert "1 difference between" in result.stderr
    assert "nothing is exported" in result.stderr


def test_scripts_get_json_and_sheets_get_csv(bare_weir: Run, database: str) -> None:
    document = json.loads(bare_weir("reconcile", MONTH, "--json").stdout)
    rows = list(csv.DictReader(io.StringIO(bare_weir("reconcile", MONTH, "--csv").stdout)))

    assert (document["month"], document["balanced"]) == (MONTH, False)
    [only] = document["sums"]
    assert (only["used"], only["posted"], only["delivered"], only["biller"]) == (10, 7, 0, 0)
    assert [row["stage"] for row in rows] == [each["stage"] for each in document["differences"]]
    assert [row["token_count"] for row in rows] == ["3", "10"]


def test_a_month_without_usage_is_in_order(bare_weir: Run, database: str) -> None:
    result = bare_weir("reconcile 2026-09")

    assert result.exit_code == 0
    assert "all stages agree" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [(("2026-13",), "YYYY-MM"), ((MONTH, "--organization", "nobody"), "nobody")],
)
def test_arguments_that_cannot_be_compared_are_refused(
    bare_weir: Run, database: str, arguments: tuple[str, ...], reported: str
) -> None:
    result = bare_weir("reconcile", *arguments)

    assert result.exit_code == 1
    assert reported in result.stderr
