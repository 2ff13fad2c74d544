"""Double-entry ledger: balanced transactions, balances as sums, and the billing month of each
posting.

Append-only by triggers, which also refuse a transaction that does not sum to zero in each currency,
and one in a closed month. One statement writes all entries of a transaction. `rating.py` posts
usage, many events at a time; all other postings are written here.

A posting holds its organization's posting lock shared until the transaction ends, and a month close
holds it exclusively: nothing is posted to a month during its close or afterwards. Triggers take the
same locks. Several organizations share a lock, so that a batch takes few locks for any number of
customers. Functions take a session and never commit.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from enum import StrEnum

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import AlreadyExists, InvalidValue, InvariantViolated, MonthClosed

# Maximum locks per batch; a close also delays the postings of about one in 64 organizations.
POSTING_LOCK_COUNT = 64
# First key of the advisory locks, next to that of the quotas; the second is the lock's number.
POSTING_LOCK = 1_466_263_923
# SQL of the lock's number; the triggers of the ledger use the same expression.
POSTING_LOCK_OF = f"get_byte(uuid_send({{organization_id}}), 15) % {POSTING_LOCK_COUNT}"
ACCOUNT_KEYS = """
unnest(
    CAST(:organization_ids AS uuid[]), CAST(:kinds AS text[]), CAST(:currency_codes AS text[])
)
"""
MONTH_FORM = re.compile(r"([2-9]\d{3})-(0[1-9]|1[0-2])", re.ASCII)


class AccountKind(StrEnum):
    """Meaning of a ledger account. Debits are positive.

    receivable: amount owed by the customer. revenue: usage at list price. discount: reductions by
    the plan. commitment: charge for an unreached minimum. prepaid_credit: remaining credit, as a
    negative number. credit_funding: source of granted credit, to which refunds return it.
    credit_breakage: credit that expired unused. adjustment: manual corrections. rounding: amounts
    moved from one invoice to the next by rounding to minor units.
    """

    RECEIVABLE = "receivable"
    REVENUE = "revenue"
    DISCOUNT = "discount"
    COMMITMENT = "commitment"
    PREPAID_CREDIT = "prepaid_credit"
    CREDIT_FUNDING = "credit_funding"
    CREDIT_BREAKAGE = "credit_breakage"
    ADJUSTMENT = "adjustment"
    ROUNDING = "rounding"


class TransactionKind(StrEnum):
    """Reason for a ledger transaction. A source is posted at most once per reason."""

    USAGE = "usage"
    PLAN = "plan"
    CREDIT_GRANTED = "credit_granted"
    CREDIT_APPLIED = "credit_applied"
    CREDIT_EXPIRED = "credit_expired"
    CREDIT_REFUNDED = "credit_refunded"
    ADJUSTMENT = "adjustment"
    ROUNDING = "rounding"


# Accounts that a transaction of each kind may post to. A transaction to another account can balance
# and still be wrong: nothing that sums the account would look for it there.
ACCOUNTS_OF = {
    TransactionKind(kind): frozenset(map(AccountKind, accounts.split()))
    for kind, accounts in (
        ("usage", "receivable revenue"),
        ("plan", "receivable discount commitment"),
        ("credit_granted", "credit_funding prepaid_credit"),
        ("credit_applied", "receivable prepaid_credit"),
        ("credit_expired", "prepaid_credit credit_breakage"),
        ("credit_refunded", "prepaid_credit credit_funding"),
        ("adjustment", "receivable adjustment"),
        ("rounding", "receivable rounding"),
    )
}


class MonthState(StrEnum):
    """State of a customer's month. Open and closing months accept postings; closed ones do not."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


# The month of use, or if later the one after the last closed month: months are closed in order.
POSTING_MONTH = """
SELECT greatest(
    CAST({month} AS date),
    (SELECT CAST(max(b.month) + interval '1 month' AS date)
     FROM billing_months b
     WHERE b.organization_id = {organization_id} AND b.state = 'closed')
)
"""
SHARE_LOCKS = text(f"""
SELECT pg_advisory_xact_lock_shared({POSTING_LOCK}, number)
FROM unnest(CAST(:numbers AS int[])) AS number
""")
TRY_LOCKS = text(f"""
SELECT coalesce(
    array_agg(number) FILTER (WHERE pg_try_advisory_xact_lock_shared({POSTING_LOCK}, number)),
    '{{}}'
)
FROM generate_series(0, {POSTING_LOCK_COUNT - 1}) AS number
""")
TAKE_LOCK = text(f"SELECT pg_advisory_xact_lock({POSTING_LOCK}, :number)")
FIND_POSTING_MONTH = text(
    POSTING_MONTH.format(
        month="CAST(:month AS date)", organization_id="CAST(:organization_id AS uuid)"
    )
)


def posting_lock_of(organization_id: uuid.UUID) -> int:
    """Return the number of the posting lock that the organization uses."""
    return organization_id.bytes[-1] % POSTING_LOCK_COUNT


def month_of(day: date) -> date:
    return date(day.year, day.month, 1)


def month_after(month: date) -> date:
    return date(month.year + month.month // 12, month.month % 12 + 1, 1)


def month_end(month: date) -> datetime:
    """Return the end of a month: the first moment of the next one, in UTC."""
    return datetime.combine(month_after(month), time(), UTC)


def month_text(month: date) -> str:
    """Format a month as `YYYY-MM`."""
    return f"{month:%Y-%m}"


async def share_posting_locks(
    session: AsyncSession, organization_ids: Collection[uuid.UUID]
) -> None:
    """Keep the organizations' months from being closed until the commit. Waits for a close."""
    await session.execute(
        SHARE_LOCKS, {"numbers": sorted({posting_lock_of(each) for each in organization_ids})}
    )


async def try_posting_locks(session: AsyncSession) -> list[int]:
    """Share the posting locks that no close holds, without waiting; return their numbers."""
    numbers: list[int] = (await session.execute(TRY_LOCKS)).scalar_one()
    return numbers


async def take_posting_lock(session: AsyncSession, organization_id: uuid.UUID) -> None:
    """Wait for running postings to an organization and block new ones until the commit.

    A close calls it before it reads.
    """
    await session.execute(TAKE_LOCK, {"number": posting_lock_of(organization_id)})


async def current_month(session: AsyncSession) -> date:
    """Return the first day of the month (UTC) in which the transaction began."""
    today: datetime = (await session.scalars(select(func.timezone("UTC", func.now())))).one()
    return month_of(today.date())


async def posting_month(session: AsyncSession, organization_id: uuid.UUID, month: date) -> date:
    """Find the month that takes a posting for `month`: itself, or the next open one.

    Months are given by their first day. The month found stays open until the transaction ends.
    """
    await share_posting_locks(session, (organization_id,))
    # A separate statement, which sees months closed while the lock was waited for.
    result = await session.execute(
        FIND_POSTING_MONTH, {"organization_id": organization_id, "month": month_of(month)}
    )
    billing_month: date = result.scalar_one()
    return billing_month


@dataclass(frozen=True, slots=True)
class AccountKey:
    """Organization, kind and currency that identify an account."""

    organization_id: uuid.UUID
    kind: AccountKind
    currency_code: str


@dataclass(frozen=True, slots=True)
class Posting:
    """A ledger transaction to write. `billing_month` is the first day of the month.

    `source_id` is the origin of the amounts, which can be posted once per kind. `entries` has
    amounts by account. Debits are positive: a customer's debt is positive, revenue negative.
    """

    kind: TransactionKind
    organization_id: uuid.UUID
    currency_code: str
    billing_month: date
    effective_at: datetime
    description: str
    source_id: uuid.UUID | None
    entries: tuple[tuple[AccountKind, int], ...]

    def __str__(self) -> str:
        return (
            f"{self.kind} of {self.organization_id} in {self.billing_month:%Y-%m}"
            f" ({self.description})"
        )


CLOSED = text("""
SELECT p.organization_id, p.month
FROM unnest(CAST(:organization_ids AS uuid[]), CAST(:months AS date[]))
    AS p(organization_id, month)
JOIN billing_months b
    ON b.organization_id = p.organization_id AND b.month >= p.month AND b.state = 'closed'
LIMIT 1
""")
# Ids are drawn before the insert: an entry finds its transaction's id by the posting's index.
DRAW_IDS = text("""
SELECT nextval(pg_get_serial_sequence('ledger_transactions', 'id'))
FROM generate_series(1, CAST(:posting_count AS int))
""")
POST = text("""
INSERT INTO ledger_transactions
    (id, kind, organization_id, billing_month, effective_at, description, source_id)
OVERRIDING SYSTEM VALUE
SELECT * FROM unnest(
    CAST(:ids AS bigint[]), CAST(:kinds AS text[]), CAST(:organization_ids AS uuid[]),
    CAST(:months AS date[]), CAST(:effective_ats AS timestamptz[]),
    CAST(:descriptions AS text[]), CAST(:source_ids AS uuid[])
)
ON CONFLICT (kind, source_id) WHERE source_id IS NOT NULL DO NOTHING
RETURNING id
""")
POST_ENTRIES = text("""
INSERT INTO ledger_entries (transaction_id, account_id, amount_picos)
SELECT * FROM unnest(
    CAST(:transaction_ids AS bigint[]), CAST(:account_ids AS bigint[]),
    CAST(:amounts AS numeric[])
)
""")


async def post(session: AsyncSession, postings: Sequence[Posting]) -> list[int]:
    """Write transactions, create missing accounts, and return the transaction ids in order.

    Waits for a running close of these organizations. If it raises, the caller must roll back.
    Raises: InvariantViolated if a posting does not balance or has an account that `ACCOUNTS_OF`
    does not list for its kind; MonthClosed; AlreadyExists for a source that was already posted.
    """
    if not postings:
        return []
    for posting in postings:
        if not posting.entries:
            raise InvariantViolated(f"the posting {posting} has no entries")
        if rest := sum(amount_picos for _, amount_picos in posting.entries):
            raise InvariantViolated(
                f"the posting {posting} is off by {rest} {posting.currency_code} picos"
            )
        if wrong := {kind for kind, _ in posting.entries} - ACCOUNTS_OF[posting.kind]:
            raise InvariantViolated(
                f"the posting {posting} has entries of {', '.join(sorted(wrong))}, which a"
                f" transaction of kind {posting.kind} must not post to"
            )
    organization_ids = [posting.organization_id for posting in postings]
    months = [posting.billing_month for posting in postings]
    await share_posting_locks(session, organization_ids)
    if (
        closed := (
            await session.execute(CLOSED, {"organization_ids": organization_ids, "months": months})
        ).first()
    ) is not None:
        raise MonthClosed(closed.organization_id, closed.month)
    entries = [
        (index, AccountKey(posting.organization_id, kind, posting.currency_code), amount_picos)
        for index, posting in enumerate(postings)
        for kind, amount_picos in posting.entries
    ]
    account_ids = await open_accounts(session, {account for _, account, _ in entries})
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
        raise AlreadyExists(
            "ledger transaction",
            str(postings[ids.index(again)]),
            f"from {postings[ids.index(again)].source_id}",
        )
    await session.execute(
        POST_ENTRIES,
        {
            "transaction_ids": [ids[index] for index, _, _ in entries],
            "account_ids": [account_ids[account] for _, account, _ in entries],
            "amounts": [amount_picos for _, _, amount_picos in entries],
        },
    )
    return ids


ACCOUNTS = text(f"""
SELECT * FROM ledger_accounts
WHERE (organization_id, kind, currency_code) IN (SELECT * FROM {ACCOUNT_KEYS})
""")
OPEN_ACCOUNTS = text(f"""
INSERT INTO ledger_accounts (organization_id, kind, currency_code)
SELECT * FROM {ACCOUNT_KEYS}
ON CONFLICT DO NOTHING
""")


async def open_accounts(
    session: AsyncSession, keys: Collection[AccountKey]
) -> Mapping[AccountKey, int]:
    """Return the ids of accounts; create missing ones in an order that prevents deadlocks."""
    identities = sorted((key.organization_id, str(key.kind), key.currency_code) for key in keys)
    names = ("organization_ids", "kinds", "currency_codes")
    columns = map(list, zip(*identities, strict=True))
    parameters = dict(zip(names, columns, strict=True))
    if len(rows := (await session.execute(ACCOUNTS, parameters)).all()) < len(identities):
        await session.execute(OPEN_ACCOUNTS, parameters)
        rows = (await session.execute(ACCOUNTS, parameters)).all()
    return {
        AccountKey(row.organization_id, AccountKind(row.kind), row.currency_code): row.id
        for row in rows
    }


# first_open: the month after the last closed one, or the first month with any content.

CLOSED_AND_OPEN = text("""
SELECT max(month) AS last_closed,
       coalesce(
           CAST(max(month) + interval '1 month' AS date),
           (SELECT min(month)
            FROM (
                SELECT billing_month
                FROM ledger_transactions
                WHERE organization_id = :organization_id
                UNION ALL
                SELECT first_month
                FROM plan_assignments
                WHERE organization_id = :organization_id AND plan_version_id IS NOT NULL
            ) AS used (month))
       ) AS first_open
FROM billing_months
WHERE organization_id = :organization_id AND state = 'closed'
""")


async def first_open_month(session: AsyncSession, organization_id: uuid.UUID) -> date | None:
    """Find the month to close next, by its first day; None if the customer has no postings."""
    month: date | None = (
        (await session.execute(CLOSED_AND_OPEN, {"organization_id": organization_id}))
        .one()
        .first_open
    )
    return month


def month_bounds(month: str) -> tuple[datetime, datetime]:
    """Convert `YYYY-MM` to its first moment and that of the next month. Raises: InvalidValue."""
    parts = MONTH_FORM.fullmatch(month)
    if parts is None or month == "9999-12":
        raise InvalidValue("month", f"{month[:64]!r} is not a month: write it as YYYY-MM")
    begins = datetime(int(parts[1]), int(parts[2]), 1, tzinfo=UTC)
    return begins, month_end(begins.date())
