"""Scheduled tasks: each exists and does its work when called."""

from __future__ import annotations

import asyncio
import queue
import uuid
from datetime import UTC, datetime

import pytest
from celery.signals import worker_shutting_down  # type: ignore[import-untyped]
from sqlalchemy import insert

from metering import tasks
from metering.celery_app import app
from metering.core.models import Hold
from tests.metering.queries import fetch_value
from tests.metering.usage import Acme, Consumed, add_usage


def test_everything_scheduled_is_a_task_and_expires() -> None:
    app.loader.import_default_modules()

    for entry in app.conf.beat_schedule.values():
        assert entry["task"] in app.tasks
        assert entry["options"]["expires"] > entry["schedule"]


async def test_the_sweep_ends_overdue_holds_and_rating_posts_what_they_cost(
    acme: Acme, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)
    async with acme.sessions.begin() as session:
        await add_usage(session, acme.customer, acme.price, [Consumed(5, 0, 5)])
        await session.execute(
            insert(Hold).values(
                id=uuid.uuid4(),
                organization_id=acme.organization_id,
                project_id=acme.customer.key.project_id,
                api_key_id=acme.customer.key.id,
                request_id=uuid.uuid4(),
                payload_hash=bytes(32),
                model="demo",
                price_version_id=acme.price.prices.version,
                labels={},
                process_id=uuid.uuid4(),
                input_token_count=10,
                leased_token_count=50,
                delivered_token_count=7,
                quota_ids=[],
                expires_at=datetime(2020, 1, 1, tzinfo=UTC),
            )
        )

    for task in (tasks.sweep, tasks.rate_pending, tasks.sweep, tasks.rate_pending):
        await asyncio.to_thread(task)

    held = await fetch_value(acme.sessions, "SELECT count(*) FROM holds WHERE state = 'held'")
    tokens = await fetch_value(acme.sessions, "SELECT sum(token_count) FROM ledger_entries")
    assert held == 0
    assert tokens == 10 + 17


def test_a_task_does_not_fail_for_a_database_that_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEIR_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/weir")

    for task in (tasks.sweep, tasks.rate_pending):
        task()

    assert caplog.text.count("the database is away") == 2


def test_a_stopped_worker_gets_a_message_that_wakes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Celery waits up to two seconds for a message before it looks whether it shall end."""
    sent: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(app, "send_task", lambda name, **_: sent.put(name))

    worker_shutting_down.send(sender="test")

    assert sent.get(timeout=60) == "weir.rate_pending"
