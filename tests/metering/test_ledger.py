"""Ledger: statements that the database always refuses, and the postings of usage."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import date

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import AlreadyExists, InvariantViolated, MonthClosed
from metering.ledger.ledger import (
    ACCOUNTS_OF,
    AccountKey,
    AccountKind,
    Posting,
    TransactionKind,
    open_accounts,
    post,
    posting_month,
    take_posting_lock,
)
from metering.pricing.prices import ModelPrice
from metering.store.db import Sessions
from tests.metering.queries import execute, fetch_column
from tests.metering.usage import (
    NOVEMBER,
    Acme,
    Consumed,
    Customer,
    add_usage,
    balances,
    new_customer,
    rate_pending,
)
from tests.metering.workers import wait_until

APPEND_ONLY = (
    "audit_log",
    "ledger_accounts",
    "ledger_entries",
    "ledger_transactions",
    "price_versions",
    "usage_events",
)
MONTH = date(2026, 11, 1)
CLOSE = (
    "INSERT INTO billing_months (organization_id, month, state, closed_at, closed_by) VALUES ('{}',"
    " '{}', 'closed', now(), 'test')"
)


def adjustment(
    customer: Customer,
    amount_picos: int,
    *,
    month: date = MONTH,
    source_id: uuid.UUID | None = None,
) -> Posting:
    """Return the posting of an amount that the customer owes besides usage."""
    entries = ((AccountKind.RECEIVABLE, amount_picos), (AccountKind.ADJUSTMENT, -amount_picos))
    return Posting(
        TransactionKind.ADJUSTMENT,
        customer.organization_id,
        "USD",
        month,
        NOVEMBER,
        "test",
        source_id,
        entries,
    )


def transaction(
    customer: Customer, kind: TransactionKind, accounts: Sequence[AccountKind]
) -> Posting:
    """Return a balanced transaction between two accounts."""
    debited, credited = accounts
    return replace(adjustment(customer, 1), kind=kind, entries=((debited, 1), (credited, -1)))


async def refused(session: AsyncSession, statement: str) -> str:
    """Return the error of a statement that the database must refuse; keep the session usable."""
    with pytest.raises(DBAPIError) as error:
        async with session.begin_nested():
            await session.execute(text(statement))
    return str(error.value.orig)


@pytest.fixture
async def posted(acme: Acme) -> Customer:
    """Customer with one rated event: 100 input tokens, 40 of them cached, 20 output tokens."""
    async with acme.sessions.begin() as session:
        await add_usage(session, acme.customer, acme.price, [Consumed(100, 40, 20)])
        assert await rate_pending(session) == 1
    return acme.customer


@pytest.mark.parametrize("table", APPEND_ONLY)
async def test_history_cannot_be_changed(sessions: Sessions, posted: Customer, table: str) -> None:
    async with sessions() as session:
        for statement in (
            f"UPDATE {table} SET id = DEFAULT",
            f"DELETE FROM {table}",
            f"TRUNCATE {table} CASCADE",
        ):
            assert "append-only" in await refused(session, statement)


async def test_a_rated_event_stays_rated_where_it_is(sessions: Sessions, posted: Customer) -> None:
    async with sessions() as session:
        for change in (
            "rated_at = NULL",
            "rated_at = now()",
            "ledger_transaction_id = 7",
            "cost_picos = cost_picos + 1",
        ):
            assert "append-only" in await refused(session, f"UPDATE usage_events SET {change}")


async def test_nothing_else_of_an_event_changes_when_it_is_rated(acme: Acme) -> None:
    """Checks all columns: later ones need a new call of `guard_usage_events`."""
    async with acme.sessions() as session:
        await add_usage(session, acme.customer, acme.price, [Consumed(1)])
        columns = await session.execute(
            text(
                """SELECT column_name, data_type FROM information_schema.columns
                   WHERE table_schema = 'public' AND table_name = 'usage_events'
                    AND is_identity = 'NO' AND column_name NOT IN ('rated_at',
                    'ledger_transaction_id', 'settled_at')"""
            )
        )
        other_values = {
            "uuid": "gen_random_uuid()",
            "text": "'x'",
            "bytea": "'x'",
            "jsonb": "'{\"x\": 1}'",
            "boolean": "true",
        }
        for column, data_type in columns.all():
            value = other_values.get(data_type, "now()" if "timestamp" in data_type else "99")
            change = (
                f"UPDATE usage_events SET rated_at = now(), ledger_transaction_id = 1, {column} ="
                f" {value}"
            )
            assert "append-only" in await refused(session, change)
        assert "append-only" in await refused(session, "UPDATE usage_events SET outcome = 'failed'")


async def test_an_event_points_to_its_own_transaction_that_debits_it(
    sessions: Sessions, posted: Customer, price: ModelPrice
) -> None:
    async with sessions.begin() as session:
        bolt = await new_customer(session, "bolt")
        await add_usage(session, bolt, price, [Consumed(100, 40, 20)])
    async with sessions() as session:
        mark = (
            "UPDATE usage_events SET rated_at = now(), ledger_transaction_id = {} WHERE rated_at IS"
            " NULL"
        )
        assert "ck_usage_events_rated_and_posted" in await refused(session, mark.format("NULL"))
        assert "is not for usage" in await refused(session, mark.format("4711"))
        assert "is not for usage" in await refused(
            session, mark.format("(SELECT max(id) FROM ledger_transactions)")
        )
        short = f"""INSERT INTO ledger_transactions (organization_id, kind, billing_month,
                    effective_at, description)
                    VALUES ('{bolt.organization_id}', 'usage', '2026-11-01', '2026-11-15',
                        'short')"""
        await session.execute(text(short))
        assert "debits 0" in await refused(
            session, mark.format("(SELECT max(id) FROM ledger_transactions)")
        )
        assert await rate_pending(session) == 1


async def test_an_unbalanced_transaction_is_refused(sessions: Sessions, posted: Customer) -> None:
    def insert(*amounts: int) -> str:
        rows = ", ".join(
            "((SELECT max(id) FROM ledger_transactions), (SELECT min(id) FROM ledger_accounts),"
            f" {amount})"
            for amount in amounts
        )
        return (
            f"INSERT INTO ledger_entries (transaction_id, account_id, amount_picos) VALUES {rows}"
        )

    async with sessions() as session:
        for amounts in ((1,), (5, -4), (10**30, -(10**30) + 1)):
            assert "does not sum to zero" in await refused(session, insert(*amounts))
        await session.execute(text(insert(10**30, -(10**30))))


async def test_legs_balance_in_each_currency_and_not_across_them(
    sessions: Sessions, posted: Customer, price: ModelPrice
) -> None:
    dollars = AccountKey(posted.organization_id, AccountKind.RECEIVABLE, "USD")
    euros = AccountKey(posted.organization_id, AccountKind.REVENUE, "EUR")
    async with sessions() as session:
        ids = await open_accounts(session, {dollars, euros})
        assert "does not sum to zero" in await refused(
            session,
            f"""INSERT INTO ledger_entries (transaction_id, account_id, amount_picos)
                SELECT max(t.id), a.id, a.amount FROM ledger_transactions t,
                (VALUES ({ids[dollars]}, 7), ({ids[euros]}, -7)) AS a(id, amount)
                GROUP BY a.id, a.amount""",
        )
        crooked = replace(
            adjustment(posted, 7), entries=((AccountKind.RECEIVABLE, 7), (AccountKind.REVENUE, -14))
        )
        with pytest.raises(InvariantViolated, match=r"off by -7 USD picos"):
            await post(session, [crooked])
        with pytest.raises(InvariantViolated, match="no entries"):
            await post(session, [replace(crooked, entries=())])


@pytest.mark.parametrize("kind", TransactionKind)
async def test_a_balanced_transaction_to_an_account_of_another_kind_is_refused(
    sessions: Sessions, posted: Customer, kind: TransactionKind
) -> None:
    async with sessions() as session:
        owed = await balances(session, posted.organization_id)
        for wrong in set(AccountKind) - ACCOUNTS_OF[kind]:
            with pytest.raises(InvariantViolated, match=rf"entries of {wrong}, .* of kind {kind}"):
                await post(session, [transaction(posted, kind, (min(ACCOUNTS_OF[kind]), wrong))])
        assert await balances(session, posted.organization_id) == owed


async def test_rating_posts_to_usage_accounts_only(sessions: Sessions, posted: Customer) -> None:
    kinds = await fetch_column(
        sessions,
        "SELECT DISTINCT a.kind FROM ledger_entries e JOIN ledger_accounts a ON a.id ="
        " e.account_id JOIN ledger_transactions t ON t.id = e.transaction_id"
        " WHERE t.kind = 'usage'",
    )
    assert set(kinds) == ACCOUNTS_OF[TransactionKind.USAGE]


async def test_postings_other_than_usage_have_a_source_and_are_made_once(
    sessions: Sessions, customer: Customer
) -> None:
    source = uuid.uuid4()
    async with sessions.begin() as session:
        bolt = await new_customer(session, "bolt")
        first, second, third = await post(
            session,
            [
                adjustment(customer, 5, source_id=source),
                adjustment(bolt, 10**30),
                adjustment(customer, -2),
            ],
        )
    async with sessions() as session:
        with pytest.raises(AlreadyExists, match=str(source)):
            await post(
                session, [adjustment(customer, 1), adjustment(customer, 5, source_id=source)]
            )
        await session.rollback()
        assert "uq_ledger_transactions_source" in await refused(
            session,
            f"""INSERT INTO ledger_transactions (organization_id, kind, billing_month, effective_at,
                description, source_id)
                SELECT organization_id, kind, billing_month, effective_at, description, source_id
                FROM ledger_transactions
                WHERE id = {first}""",
        )
        kept = await session.execute(
            text(
                "SELECT id, organization_id, kind, billing_month, source_id FROM"
                " ledger_transactions"
            )
        )
        owed = await balances(session, customer.organization_id)

    assert first < second < third
    assert sorted(tuple(row) for row in kept) == [
        (first, customer.organization_id, "adjustment", MONTH, source),
        (second, bolt.organization_id, "adjustment", MONTH, None),
        (third, customer.organization_id, "adjustment", MONTH, None),
    ]
    assert {key.kind: amount for key, amount in owed.items()} == {
        AccountKind.RECEIVABLE: 3,
        AccountKind.ADJUSTMENT: -3,
    }


async def test_every_kind_is_known_to_the_database(sessions: Sessions, customer: Customer) -> None:
    async with sessions() as session:
        ids = await open_accounts(
            session, {AccountKey(customer.organization_id, kind, "USD") for kind in AccountKind}
        )
        written = await post(
            session,
            [
                transaction(customer, kind, sorted(ACCOUNTS_OF[kind])[:2])
                for kind in TransactionKind
            ],
        )

    assert (len(set(ids.values())), len(written)) == (len(AccountKind), len(TransactionKind))


async def test_a_closed_month_takes_nothing_and_stays_closed(
    sessions: Sessions, posted: Customer, price: ModelPrice
) -> None:
    await execute(sessions, CLOSE.format(posted.organization_id, MONTH))
    async with sessions() as session:
        with pytest.raises(MonthClosed, match="2026-11"):
            await post(session, [adjustment(posted, 1)])
        insert = """INSERT INTO ledger_transactions (organization_id, kind, billing_month,
                    effective_at, description)
                    SELECT organization_id, 'adjustment', billing_month, effective_at, 'by hand'
                    FROM ledger_transactions"""
        assert "2026-11 of organization" in await refused(session, insert)
        for change in (
            "state = 'open', closed_at = NULL, closed_by = NULL",
            "closed_by = 'x'",
            "month = '2026-12-01'",
        ):
            assert "cannot be changed or reopened" in await refused(
                session, f"UPDATE billing_months SET {change}"
            )
        for statement in ("DELETE FROM billing_months", "TRUNCATE billing_months CASCADE"):
            assert "append-only" in await refused(session, statement)
        december = await posting_month(session, posted.organization_id, date(2026, 11, 30))
        assert december == date(2026, 12, 1)
        # Closed with it.
        assert await posting_month(session, posted.organization_id, date(2026, 10, 31)) == december
        await post(session, [adjustment(posted, 1, month=december)])


@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_close_and_postings_wait_for_each_other(
    sessions: Sessions, customer: Customer, database_url: str, by_hand: bool
) -> None:
    """A close sees all earlier postings, and a posting sees the close."""
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with psycopg.connect(database_url, autocommit=True) as watching:

        def somebody_waits() -> bool:
            return watching.execute(waiting).fetchone() == (1,)

        async def close() -> int:
            async with sessions.begin() as session:
                if not by_hand:
                    await take_posting_lock(session, customer.organization_id)
                await session.execute(text(CLOSE.format(customer.organization_id, MONTH)))
                return int(
                    (
                        await session.execute(text("SELECT count(*) FROM ledger_transactions"))
                    ).scalar_one()
                )

        async with sessions() as posting:
            await post(posting, [adjustment(customer, 1)])
            closing = asyncio.create_task(close())
            await asyncio.to_thread(wait_until, somebody_waits, "the close to wait for the posting")
            await posting.commit()
        assert await closing == 1

        async with sessions() as session:
            await take_posting_lock(session, customer.organization_id)
            late = asyncio.create_task(
                post_in(sessions, adjustment(customer, 1, month=date(2026, 12, 1)))
            )
            await asyncio.to_thread(wait_until, somebody_waits, "the posting to wait for the close")
            await session.execute(text(CLOSE.format(customer.organization_id, "2026-12-01")))
            await session.commit()
        with pytest.raises(MonthClosed):
            await late


async def post_in(sessions: Sessions, posting: Posting) -> None:
    """Post in a separate transaction."""
    async with sessions.begin() as session:
        await post(session, [posting])


async def test_balances_are_what_is_owed_and_earned(sessions: Sessions, posted: Customer) -> None:
    async with sessions.begin() as session:
        other = await new_customer(session, "bolt")
    async with sessions() as session:
        found = await balances(session, posted.organization_id)
        none = await balances(session, other.organization_id)

    owed = 60 * 150_000 + 40 * 15_000 + 20 * 600_000
    assert {key.kind: amount for key, amount in found.items()} == {
        AccountKind.RECEIVABLE: owed,
        AccountKind.REVENUE: -owed,
    }
    assert none == {}
