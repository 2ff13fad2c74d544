"""The double-entry ledger: writing balanced transactions, and reading balances as sums of what was written.

Append-only by the database's own triggers, which also refuse a transaction that does not sum to zero in each currency. All legs
of a transaction are written by one statement. Functions take a session and never commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select, text, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.pricing import PricedTokens
from metering.errors import InvariantViolated
from metering.models import AccountKind, LedgerAccount, LedgerEntry, TokenKind


@dataclass(frozen=True, slots=True)
class AccountKey:
    """What identifies an account."""

    organization_id: uuid.UUID
    kind: AccountKind
    currency_code: str


@dataclass(frozen=True, slots=True)
class Leg:
    """One side of a posting. Debits are positive: a customer's debt grows, our revenue is negative."""

    account: AccountKey
    amount_picos: int
    token_kind: TokenKind | None = None
    token_count: int | None = None
    price_version_id: int | None = None


@dataclass(frozen=True, slots=True)
class UsagePosting:
    """The transaction of one usage event, which has at most one, ever."""

    usage_event_id: int
    organization_id: uuid.UUID
    effective_at: datetime
    legs: tuple[Leg, ...]


# Legs meet their transaction by the usage event; an event that has its transaction already gets neither again.
POST = text("""
WITH posted AS (
    INSERT INTO ledger_transactions (organization_id, usage_event_id, description, effective_at)
    SELECT organization_id, usage_event_id, 'usage', effective_at
    FROM unnest(CAST(:organization_ids AS uuid[]), CAST(:event_ids AS bigint[]), CAST(:effective_ats AS timestamptz[]))
        AS t(organization_id, usage_event_id, effective_at)
    ORDER BY usage_event_id
    ON CONFLICT (usage_event_id) DO NOTHING
    RETURNING id, usage_event_id
)
INSERT INTO ledger_entries (transaction_id, account_id, amount_picos, token_kind, token_count, price_version_id)
SELECT posted.id, account_id, amount_picos, token_kind, token_count, price_version_id
FROM unnest(
        CAST(:leg_event_ids AS bigint[]), CAST(:account_ids AS bigint[]), CAST(:amounts AS numeric[]),
        CAST(:token_kinds AS text[]), CAST(:token_counts AS bigint[]), CAST(:price_version_ids AS bigint[])
    ) WITH ORDINALITY AS leg(usage_event_id, account_id, amount_picos, token_kind, token_count, price_version_id, position)
    JOIN posted USING (usage_event_id)
ORDER BY posted.id, position
""")


def usage_legs(
    organization_id: uuid.UUID, currency_code: str, price_version_id: int, lines: Sequence[PricedTokens]
) -> tuple[Leg, ...]:
    """The customer owes the total; each kind of token earns its part, and carries its count even where it costs nothing."""
    receivable = AccountKey(organization_id, AccountKind.RECEIVABLE, currency_code)
    revenue = AccountKey(organization_id, AccountKind.REVENUE, currency_code)
    return (
        Leg(receivable, sum(line.amount_picos for line in lines)),
        *(Leg(revenue, -line.amount_picos, line.kind, line.token_count, price_version_id) for line in lines),
    )


async def post(session: AsyncSession, postings: Sequence[UsagePosting]) -> None:
    """Write the transactions, accounts included where they are new. Events that were posted before are left as they are.

    Raises: InvariantViolated, before anything is written, if one does not balance.
    """
    if not postings:
        return
    for posting in postings:
        check_balanced(posting)
    legs = [(posting.usage_event_id, leg) for posting in postings for leg in posting.legs]
    account_ids = await open_accounts(session, {leg.account for _, leg in legs})
    await session.execute(
        POST,
        {
            "organization_ids": [posting.organization_id for posting in postings],
            "event_ids": [posting.usage_event_id for posting in postings],
            "effective_ats": [posting.effective_at for posting in postings],
            "leg_event_ids": [event_id for event_id, _ in legs],
            "account_ids": [account_ids[leg.account] for _, leg in legs],
            "amounts": [leg.amount_picos for _, leg in legs],
            "token_kinds": [leg.token_kind for _, leg in legs],
            "token_counts": [leg.token_count for _, leg in legs],
            "price_version_ids": [leg.price_version_id for _, leg in legs],
        },
    )


def check_balanced(posting: UsagePosting) -> None:
    """Raises: InvariantViolated unless the legs sum to zero in each currency."""
    for currency_code in {leg.account.currency_code for leg in posting.legs}:
        rest = sum(leg.amount_picos for leg in posting.legs if leg.account.currency_code == currency_code)
        if rest:
            raise InvariantViolated(f"the posting of usage event {posting.usage_event_id} is off by {rest} {currency_code} picos")


async def open_accounts(session: AsyncSession, keys: Collection[AccountKey]) -> Mapping[AccountKey, int]:
    """Ids of the accounts, opening those that are new. In one order, so that two who open the same ones do not deadlock."""
    wanted = sorted((key.organization_id, str(key.kind), key.currency_code) for key in keys)
    columns = (LedgerAccount.organization_id, LedgerAccount.kind, LedgerAccount.currency_code)
    known = select(LedgerAccount).where(tuple_(*columns).in_(wanted))
    ids = {_key(account): account.id for account in await session.scalars(known)}
    if len(ids) < len(keys):
        rows = [dict(zip(("organization_id", "kind", "currency_code"), values, strict=True)) for values in wanted]
        await session.execute(insert(LedgerAccount).values(rows).on_conflict_do_nothing())
        ids = {_key(account): account.id for account in await session.scalars(known)}
    return ids


async def balances(session: AsyncSession, organization_id: uuid.UUID) -> dict[AccountKey, int]:
    """Of all accounts of an organization, in picos."""
    query = (
        select(LedgerAccount, func.coalesce(func.sum(LedgerEntry.amount_picos), 0))
        .outerjoin(LedgerEntry, LedgerEntry.account_id == LedgerAccount.id)
        .where(LedgerAccount.organization_id == organization_id)
        .group_by(LedgerAccount.id)
        .order_by(LedgerAccount.id)
    )
    return {_key(account): int(amount) for account, amount in await session.execute(query)}


def _key(account: LedgerAccount) -> AccountKey:
    return AccountKey(account.organization_id, AccountKind(account.kind), account.currency_code)
