"""Fixtures of the api's tests: a database with a clock, and a usage journal."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from metering.holds.journal import UsageJournal
from tests import transitions as transitions  # checks them
from tests.metering.hold_world import HoldWorld


@pytest.fixture
def world(database_url: str) -> Iterator[HoldWorld]:
    """Yield the test's database with a clock at `NOON`."""
    with HoldWorld(database_url) as world:
        yield world


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[UsageJournal]:
    """Yield the usage journal of a process."""
    journal = UsageJournal(tmp_path, uuid.uuid4())
    yield journal
    journal.close()
