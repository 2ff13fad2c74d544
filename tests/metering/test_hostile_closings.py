"""Months, ledger and corrections on a database with hostile defaults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from metering.store.db import Sessions
from tests.conftest import new_database
from tests.metering.closing_world import ClosingWorld
from tests.metering.hostile import hostile

# The same tests as of a friendly database, here with this module's fixtures.
from tests.metering.test_closing import (
    test_many_customers_numbers_have_no_gaps as test_many_customers,
)
from tests.metering.test_closing import test_two_closers_at_once_issue_one_invoice as test_closers
from tests.metering.test_rating import (
    test_raters_at_the_same_time_share_the_work as test_raters,
)
from tests.metering.usage import Customer

__all__ = ["test_closers", "test_many_customers", "test_raters"]


@pytest.fixture(params=["serializable", "repeatable read"])
def database_url(
    postgres_server: str, acme_template: tuple[str, Customer], request: pytest.FixtureRequest
) -> Iterator[str]:
    """Yield the URL of a migrated database with hostile defaults."""
    with (
        new_database(postgres_server, template=acme_template[0]) as url,
        hostile(url, request.param) as hostile_url,
    ):
        yield hostile_url


@pytest.fixture
async def world(sessions: Sessions, customer: Customer) -> ClosingWorld:
    """Customer `acme` in December 2025."""
    return ClosingWorld(sessions, customer)
