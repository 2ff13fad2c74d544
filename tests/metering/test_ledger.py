"""The ledger: what the database itself refuses, whoever asks, and what posting makes of usage."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.ledger import AccountKey, Leg, UsagePosting, balances, open_accounts, post, usage_legs
from metering.billing.prices import ModelPrice
from metering.billing.rating import rate_pending
from metering.errors import InvariantViolated
from metering.models import AccountKind, TokenKind
from metering.store.db import Sessions
from tests.metering.books import NOVEMBER, Consumed, Customer, add_usage, new_customer

APPEND_ONLY = ("audit_log", "ledger_accounts", "ledger_entries", "ledger_transactions", "price_versions", "usage_events")


async def refused(session: AsyncSession, statement: str) -> str:
    """What the database says to a statement that it must refuse; the session goes on."""
    with pytest.raises(DBAPIError) as error:
        async with session.begin_nested():
            await session.execute(text(statement))
    return str(error.value.orig)


@pytest.fixture
async def posted(sessions: Sessions, customer: Customer, price: ModelPrice) -> Customer:
    """A customer with one rated event: 100 tokens in, 40 of them cached, 20 out."""
    async with sessions.begin() as session:
        await add_usage(session, customer, price, [Consumed(100, 40, 20)])
        assert await rate_pending(session) == 1
    return customer


@pytest.mark.parametrize("table", APPEND_ONLY)
async def test_history_cannot_be_changed_deleted_or_emptied(sessions: Sessions, posted: Customer, table: str) -> None:
    async with sessions() as session:
        for statement in (f"UPDATE {table} SET id = DEFAULT", f"DELETE FROM {table}", f"TRUNCATE {table} CASCADE"):
            assert "append-only" in await refused(session, statement)


async def test_a_rated_event_stays_rated_and_a_posted_one_has_one_transaction(sessions: Sessions, posted: Customer) -> None:
    async with sessions() as session:
        for change in ("rated_at = NULL", "rated_at = now()", "cost_picos = cost_picos + 1"):
            assert "append-only" in await refused(session, f"UPDATE usage_events SET {change}")
        assert "uq_ledger_transactions_usage_event_id" in await refused(
            session,
            """INSERT INTO ledger_transactions (organization_id, usage_event_id, description, effective_at)
               SELECT organization_id, usage_event_id, 'again', effective_at FROM ledger_transactions""",
        )


async def test_an_unrated_event_may_be_marked_and_nothing_else(sessions: Sessions, customer: Customer, price: ModelPrice) -> None:
    async with sessions() as session:
        await add_usage(session, customer, price, [Consumed(1)])
        assert "append-only" in await refused(session, "UPDATE usage_events SET rated_at = now(), cost_picos = 0")
        assert "append-only" in await refused(session, "UPDATE usage_events SET outcome = 'failed'")
        await session.execute(text("UPDATE usage_events SET rated_at = now()"))


async def test_a_transaction_that_does_not_sum_to_zero_is_refused(sessions: Sessions, posted: Customer) -> None:
    def insert(*amounts: int) -> str:
        rows = ", ".join(
            f"((SELECT max(id) FROM ledger_transactions), (SELECT min(id) FROM ledger_accounts), {amount})" for amount in amounts
        )
        return f"INSERT INTO ledger_entries (transaction_id, account_id, amount_picos) VALUES {rows}"

    async with sessions() as session:
        for amounts in ((1,), (5, -4), (10**30, -(10**30) + 1)):
            assert "does not sum to zero" in await refused(session, insert(*amounts))
        await session.execute(text(insert(10**30, -(10**30))))


async def test_legs_balance_in_each_currency_and_not_across_them(sessions: Sessions, posted: Customer, price: ModelPrice) -> None:
    dollars = AccountKey(posted.organization_id, AccountKind.RECEIVABLE, "USD")
    euros = AccountKey(posted.organization_id, AccountKind.REVENUE, "EUR")
    async with sessions() as session:
        ids = await open_accounts(session, {dollars, euros})
        assert "does not sum to zero" in await refused(
            session,
            f"""INSERT INTO ledger_entries (transaction_id, account_id, amount_picos)
                SELECT max(t.id), a.id, a.amount FROM ledger_transactions t,
                (VALUES ({ids[dollars]}, 7), ({ids[euros]}, -7)) AS a(id, amount) GROUP BY a.id, a.amount""",
        )
        (event_id,) = await add_usage(session, posted, price, [Consumed(1)])
        crooked = UsagePosting(event_id, posted.organization_id, NOVEMBER, (Leg(dollars, 7), Leg(euros, -7)))
        with pytest.raises(InvariantViolated, match=f"usage event {event_id} is off by"):
            await post(session, [crooked])


async def test_posting_twice_posts_once(sessions: Sessions, posted: Customer, price: ModelPrice) -> None:
    version = price.prices
    async with sessions.begin() as session:
        (event_id,) = await add_usage(session, posted, price, [Consumed(10, 0, 10)])
        legs = usage_legs(posted.organization_id, "USD", version.version, tuple(version.lines(10, 0, 10)))
        for _ in range(2):
            await post(session, [UsagePosting(event_id, posted.organization_id, NOVEMBER, legs)])
    async with sessions() as session:
        entries = (
            await session.execute(
                text(
                    """SELECT e.token_kind, e.token_count, e.amount_picos FROM ledger_entries e
                       JOIN ledger_transactions t ON t.id = e.transaction_id WHERE t.usage_event_id = :id ORDER BY e.id"""
                ),
                {"id": event_id},
            )
        ).all()

    assert [tuple(entry) for entry in entries] == [
        (None, None, 10 * 150_000 + 10 * 600_000),
        (TokenKind.INPUT, 10, -10 * 150_000),
        (TokenKind.OUTPUT, 10, -10 * 600_000),
    ]


async def test_balances_are_what_the_customer_owes_and_what_was_earned(sessions: Sessions, posted: Customer) -> None:
    async with sessions.begin() as session:
        other = await new_customer(session, "bolt")
    async with sessions() as session:
        found = await balances(session, posted.organization_id)
        none = await balances(session, other.organization_id)

    owed = 60 * 150_000 + 40 * 15_000 + 20 * 600_000
    assert {key.kind: amount for key, amount in found.items()} == {AccountKind.RECEIVABLE: owed, AccountKind.REVENUE: -owed}
    assert none == {}
