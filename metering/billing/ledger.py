"""The double-entry ledger: writing balanced transactions, and reading balances as sums of what was written.

Append-only by the database's own triggers, which also refuse a transaction that does not sum to zero in each currency, and one in a
month that is closed. All legs of a transaction are written by one statement. Usage is posted by `rating.py`, many events at a time;
everything else is posted here. Functions take a session and never commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime

from sqlalchemy import func, select, text, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.models import AccountKind, LedgerAccount, LedgerEntry, TransactionKind
from metering.billing.months import share_lanes
from metering.errors import AlreadyExists, InvariantViolated, MonthClosed
from metering.models import TokenKind


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
class Posting:
    """A transaction to write. billing_month: by its first day. source_id: what it stems from, which is posted once per kind."""

    kind: TransactionKind
    organization_id: uuid.UUID
    billing_month: date
    effective_at: datetime
    description: str
    source_id: uuid.UUID | None
    legs: tuple[Leg, ...]

    def __str__(self) -> str:
        return f"{self.kind} of {self.organization_id} in {self.billing_month:%Y-%m} ({self.description})"


CLOSED = text("""
SELECT p.organization_id, p.month
FROM unnest(CAST(:organization_ids AS uuid[]), CAST(:months AS date[])) AS p(organization_id, month)
JOIN billing_months b ON b.organization_id = p.organization_id AND b.month >= p.month AND b.state = 'closed' LIMIT 1
""")
# The ids are drawn first, so that legs meet their transaction by its place in the list.
DRAW_IDS = text(
    "SELECT nextval(pg_get_serial_sequence('ledger_transactions', 'id')) FROM generate_series(1, CAST(:posting_count AS int))"
)
POST = text("""
INSERT INTO ledger_transactions (id, kind, organization_id, billing_month, effective_at, description, source_id)
OVERRIDING SYSTEM VALUE
SELECT * FROM unnest(
    CAST(:ids AS bigint[]), CAST(:kinds AS text[]), CAST(:organization_ids AS uuid[]), CAST(:months AS date[]),
    CAST(:effective_ats AS timestamptz[]), CAST(:descriptions AS text[]), CAST(:source_ids AS uuid[]))
ON CONFLICT (kind, source_id) WHERE source_id IS NOT NULL DO NOTHING RETURNING id
""")
POST_LEGS = text("""
INSERT INTO ledger_entries (transaction_id, account_id, amount_picos, token_kind, token_count, price_version_id)
SELECT * FROM unnest(
    CAST(:transaction_ids AS bigint[]), CAST(:account_ids AS bigint[]), CAST(:amounts AS numeric[]),
    CAST(:token_kinds AS text[]), CAST(:token_counts AS bigint[]), CAST(:price_version_ids AS bigint[]))
""")


async def post(session: AsyncSession, postings: Sequence[Posting]) -> list[int]:
    """Write transactions, accounts included where they are new; their ids in the order given.

    Waits for a close of one of the organizations that goes on. What it has written so far is for the caller to roll back when it
    raises. Raises: InvariantViolated if one does not balance; MonthClosed; AlreadyExists for a source that was posted before.
    """
    if not postings:
        return []
    for posting in postings:
        check_balanced(posting)
    organization_ids = [posting.organization_id for posting in postings]
    months = [posting.billing_month for posting in postings]
    await share_lanes(session, organization_ids)
    if (closed := (await session.execute(CLOSED, {"organization_ids": organization_ids, "months": months})).first()) is not None:
        raise MonthClosed(closed.organization_id, closed.month)
    legs = [(index, leg) for index, posting in enumerate(postings) for leg in posting.legs]
    account_ids = await open_accounts(session, {leg.account for _, leg in legs})
    ids = list((await session.execute(DRAW_IDS, {"posting_count": len(postings)})).scalars())
    written = await session.execute(
        POST,
        {
            "ids": ids,
            "kinds": [str(posting.kind) for posting in postings],
            "organization_ids": organization_ids,
            "months": months,
            "effective_ats": [posting.effective_at for posting in postings],
            "descriptions": [posting.description for posting in postings],
            "source_ids": [posting.source_id for posting in postings],
        },
    )
    for again in set(ids) - set(written.scalars()):
        raise AlreadyExists("ledger transaction", str(postings[ids.index(again)]), f"from {postings[ids.index(again)].source_id}")
    await session.execute(
        POST_LEGS,
        {
            "transaction_ids": [ids[index] for index, _ in legs],
            "account_ids": [account_ids[leg.account] for _, leg in legs],
            "amounts": [leg.amount_picos for _, leg in legs],
            "token_kinds": [leg.token_kind for _, leg in legs],
            "token_counts": [leg.token_count for _, leg in legs],
            "price_version_ids": [leg.price_version_id for _, leg in legs],
        },
    )
    return ids


def check_balanced(posting: Posting) -> None:
    """Raises: InvariantViolated unless there are legs, all of the posting's organization, that sum to zero in each currency."""
    if not posting.legs:
        raise InvariantViolated(f"the posting {posting} has no legs")
    if any(leg.account.organization_id != posting.organization_id for leg in posting.legs):
        raise InvariantViolated(f"the posting {posting} has a leg of another organization")
    for currency_code in sorted({leg.account.currency_code for leg in posting.legs}):
        rest = sum(leg.amount_picos for leg in posting.legs if leg.account.currency_code == currency_code)
        if rest:
            raise InvariantViolated(f"the posting {posting} is off by {rest} {currency_code} picos")


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
