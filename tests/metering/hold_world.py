"""Database with tenants, prices and quotas, and a clock set by the test, for tests of holds.

The clock is a function `now()` in a schema before `pg_catalog` in the search path of the test's
database. So all connections use the test's time, whichever process they belong to.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any

import psycopg
from psycopg import sql

from metering.core.models import Outcome, QuotaDimension, QuotaSubject, ServiceTier
from metering.holds.hold_connection import HoldConnection
from metering.holds.holds import HoldStore
from metering.holds.operations import (
    Admit,
    Admitted,
    HoldAnswer,
    HoldOperation,
    Settle,
    Settled,
    Void,
)
from metering.pricing.prices import TokenPrices
from metering.quotas.quota_rules import Payer
from metering.receipts.signing import Signer
from metering.store.db import psycopg_conninfo
from metering.store.group_commit import awaited
from tests.conftest import close_kept

MODEL = "demo"
WINDOW_MINUTES = 300  # of rolling windows
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
INPUT_PICOS, CACHED_PICOS, OUTPUT_PICOS, EMBEDDING_PICOS = 3, 1, 7, 2
TABLES = """
    organizations projects api_keys quotas quota_counters price_versions holds usage_events
    usage_subjects receipt_chains receipt_batches ledger_accounts ledger_transactions
    ledger_entries audit_log
"""

CLOCK = """
CREATE SCHEMA clock;
CREATE TABLE clock.time (now timestamptz NOT NULL);
INSERT INTO clock.time VALUES ({});
CREATE FUNCTION clock.now() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT now FROM clock.time';
CREATE FUNCTION clock.clock_timestamp() RETURNS timestamptz
LANGUAGE sql STABLE AS 'SELECT now FROM clock.time';
ALTER DATABASE {} SET search_path = clock, public, pg_catalog;
"""


@dataclass
class Clock:
    """Monotonic clock of one machine, set by the test."""

    now: float = 1000.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


class HoldWorld:
    """World of one test's database. A context manager."""

    def __init__(
        self, database_url: str, *, now: datetime | None = NOON, priced: bool = True
    ) -> None:
        """now: None for the database's clock. priced: False if the price exists."""
        self.url = database_url
        self._connection = psycopg.connect(psycopg_conninfo(database_url), autocommit=True)
        self._now = now or datetime.now(UTC)
        if now is not None:
            name = sql.Identifier(str(self.one("SELECT current_database()")))
            self._connection.execute(sql.SQL(CLOCK).format(sql.Literal(now), name))
            self._connection.execute("SET search_path = clock, public, pg_catalog")
            close_kept(database_url)  # they have another clock
        self.price_version = (
            self.set_price() if priced else int(self.one("SELECT min(id) FROM price_versions"))
        )

    def __enter__(self) -> HoldWorld:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    @property
    def now(self) -> datetime:
        """Time of the test's clock."""
        return self._now

    def set_time(self, now: datetime) -> None:
        """Move the clock."""
        self._now = now
        self.execute("UPDATE clock.time SET now = %s", now)

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self.set_time(self._now + timedelta(seconds=seconds))

    def execute(self, statement: str, *parameters: Any) -> None:
        """Run one statement."""
        self._connection.execute(statement.encode(), parameters or None)

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        return self._connection.execute(query.encode(), parameters or None).fetchall()

    def one(self, query: str, *parameters: Any) -> Any:
        """Return the single value of a query."""
        ((value,),) = self.rows(query, *parameters)
        return value

    def set_price(
        self,
        input_picos: int = INPUT_PICOS,
        cached_picos: int = CACHED_PICOS,
        output_picos: int = OUTPUT_PICOS,
        embedding_picos: int = EMBEDDING_PICOS,
        reasoning_picos: int | None = None,
    ) -> int:
        """Set a price of the model from now on; return its version."""
        return int(
            self.one(
                """
                INSERT INTO price_versions (model, currency_code, input_picos_per_token,
                                            cached_input_picos_per_token, output_picos_per_token,
                                            embedding_picos_per_token,
                                            reasoning_picos_per_token, effective_at)
                VALUES (%s, 'USD', %s, %s, %s, %s, %s, %s) RETURNING id
                """,
                MODEL,
                input_picos,
                cached_picos,
                output_picos,
                embedding_picos,
                reasoning_picos,
                self._now
                - timedelta(days=1000)
                + timedelta(microseconds=int(self.one("SELECT count(*) FROM price_versions"))),
            )
        )

    @property
    def prices(self) -> TokenPrices:
        """First price version."""
        return TokenPrices(
            self.price_version, "USD", INPUT_PICOS, CACHED_PICOS, OUTPUT_PICOS, EMBEDDING_PICOS
        )

    def tenant(self, name: str = "acme") -> Payer:
        """Create an organization with one project and one key."""
        organization = self.one(
            "INSERT INTO organizations (name, currency_code) VALUES (%s, 'USD') RETURNING id", name
        )
        project = self.one(
            "INSERT INTO projects (organization_id, name) VALUES (%s, 'search') RETURNING id",
            organization,
        )
        return Payer(organization, project, self.key(project), "USD")

    def key(self, project_id: uuid.UUID) -> uuid.UUID:
        """Create another key of a project."""
        key = uuid.uuid4()
        self.execute(
            "INSERT INTO api_keys (id, project_id, name, prefix, secret_hash, scopes) VALUES (%s,"
            " %s, 'k', %s, %s, '{inference}')",
            key,
            project_id,
            key.hex,
            key.bytes * 2,
        )
        return key

    def quota(
        self,
        payer: Payer,
        dimension: QuotaDimension,
        limit_value: int,
        *,
        subject: QuotaSubject = QuotaSubject.ORGANIZATION,
        model: str = "",
        window_minutes: int = 0,
    ) -> uuid.UUID:
        """Set a limit on the payer's organization, project or key.

        A rolling window has the length `minutes_of` unless another is given.
        """
        window_minutes = window_minutes or minutes_of(dimension)
        subject_id = {
            QuotaSubject.ORGANIZATION: payer.organization_id,
            QuotaSubject.PROJECT: payer.project_id,
            QuotaSubject.API_KEY: payer.api_key_id,
        }[subject]
        quota_id = self.one(
            "INSERT INTO quotas (subject, subject_id, model, dimension, limit_value,"
            " window_minutes) VALUES (%s, %s, %s, %s, %s, %s) RETURNING id",
            str(subject),
            subject_id,
            model,
            str(dimension),
            limit_value,
            window_minutes,
        )
        assert isinstance(quota_id, uuid.UUID)
        return quota_id

    def counters(self, quota_id: uuid.UUID) -> list[tuple[int, int]]:
        """Return `used` and `held` of each window of a quota, the oldest first."""
        return [
            (row[0], row[1])
            for row in self.rows(
                "SELECT used, held FROM quota_counters WHERE quota_id = %s ORDER BY window_start",
                quota_id,
            )
        ]

    def holds(self) -> list[tuple[str, int, int]]:
        """Return state, leased and delivered tokens of each hold, the oldest first."""
        return [
            (row[0], row[1], row[2])
            for row in self.rows(
                "SELECT state, leased_token_count, delivered_token_count FROM holds ORDER BY"
                " admitted_at, id"
            )
        ]

    def hold_count(self, state: str = "held") -> int:
        """Return the number of holds in a state."""
        return int(self.one("SELECT count(*) FROM holds WHERE state = %s", state))

    def events(self) -> list[tuple[int, int, int, str]]:
        """Return part, input, delivered tokens and outcome of each usage event, in order."""
        return [
            (row[0], row[1], row[2], row[3])
            for row in self.rows(
                "SELECT part, input_token_count, delivered_token_count, outcome FROM usage_events"
                " ORDER BY id"
            )
        ]

    def contents(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return all rows of the database."""
        return {
            table: sorted(self.rows(f"SELECT t::text FROM {table} t")) for table in TABLES.split()
        }

    async def run(
        self,
        *operations: HoldOperation,
        process_id: uuid.UUID | None = None,
        expiry_s: float = 60.0,
        signer: Signer | None = None,
    ) -> list[HoldAnswer | Exception]:
        """Run one batch on a new connection."""
        async with HoldConnection(
            self.url, process_id or uuid.uuid4(), expiry_s=expiry_s, signer=signer
        ) as holds:
            return await holds.execute(operations)


def minutes_of(dimension: QuotaDimension) -> int:
    """Return `WINDOW_MINUTES` for a rolling window, 0 for any other dimension."""
    return WINDOW_MINUTES if dimension.endswith("_per_window") else 0


def admit(
    payer: Payer,
    *,
    input_tokens: int = 10,
    slice_tokens: int = 20,
    least_tokens: int = 1,
    request_id: uuid.UUID | None = None,
    payload: bytes = b"p",
    hold_id: uuid.UUID | None = None,
    tier: ServiceTier = ServiceTier.INTERACTIVE,
    embedding: bool = False,
    end_user: str = "",
    labels: dict[str, str] | None = None,
) -> Admit:
    """Return an admission for the model. An embedding request has no output."""
    return Admit(
        hold_id=hold_id or uuid.uuid4(),
        payer=payer,
        request_id=request_id or uuid.uuid4(),
        payload_hash=b"key:" + payload.ljust(28, b"."),
        model=MODEL,
        input_token_count=input_tokens,
        first_slice_token_count=0 if embedding else slice_tokens,
        least_slice_token_count=0 if embedding else least_tokens,
        tier=tier,
        embedding=embedding,
        end_user=end_user,
        labels=labels or {},
    )


def settle(
    hold_id: uuid.UUID,
    delivered_tokens: int,
    *,
    input_tokens: int = 10,
    cached_tokens: int = 0,
    outcome: Outcome = Outcome.STOP,
    recovered: bool = False,
    reasoning_tokens: int = 0,
) -> Settle:
    """Return the settlement of a hold."""
    return Settle(
        hold_id,
        input_tokens,
        cached_tokens,
        delivered_tokens,
        delivered_tokens,
        outcome,
        recovered=recovered,
        reasoning_token_count=reasoning_tokens,
    )


def of_type(kind: type[Any], answers: Iterable[object]) -> list[Any]:
    """Return the answers of one type."""
    return [answer for answer in answers if isinstance(answer, kind)]


class AwaitedStore(HoldStore):
    """Store with awaited calls. Cancelling abandons an admission, but not an end."""

    async def admit(self, op: Admit) -> Admitted:
        """Run `begin_admit` to its end. Raises: its errors."""
        admitted = await awaited(partial(self.begin_admit, op), partial(self._orphaned, op))
        assert isinstance(admitted, Admitted)
        return admitted

    async def settle(self, op: Settle) -> Settled:
        """Run `begin_settle` to its end. Raises: its errors."""
        settled = await self._commits.submit(op)
        assert isinstance(settled, Settled)
        return settled

    async def void(self, hold_id: uuid.UUID) -> None:
        """Run `begin_void` to its end. Raises: its errors."""
        await self._commits.submit(Void(hold_id))


async def until_idle(store: AwaitedStore, payer: Payer) -> None:
    """Wait until all earlier operations and the work after them are done."""
    op = admit(payer)
    await store.admit(op)
    await store.void(op.hold_id)
