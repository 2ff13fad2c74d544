"""Double-entry ledger: balanced transactions, balances as sums, and the billing month of each
posting.

Append-only by triggers, which also refuse a transaction that does not sum to zero in each currency,
and one in a closed month. One statement writes all entries of a transaction. `rating.py` posts
usage, many events at a time; all other postings are written here.

A posting holds its organization's posting lock (lane) shared until the transaction ends, and a
month close holds it exclusively: nothing enters a month during its close or afterwards. Triggers
take the same locks. Several organizations share a lane, so that a batch takes few locks for any
number of customers. Functions take a session and never commit.
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


class AccountKind(StrEnum):
    """Meaning of a ledger account. Debits are positive.

    receivable: amount owed by the customer. revenue: usage at list price. discount: reductions by
    the plan. commitment: charge for an unreached minimum. prepaid_credit: remaining credit, as a
    negative number. credit_funding: source of granted credit. credit_breakage: credit that expired
    unused. adjustment: manual corrections. rounding: amounts moved from one invoice to the next by
    rounding to minor units.
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
    """Reason for a ledger transaction."""

    USAGE = "usage"
    PLAN = "plan"
    CREDIT_GRANTED = "credit_granted"
    CREDIT_APPLIED = "credit_applied"
    CREDIT_EXPIRED = "credit_expired"
    ADJUSTMENT = "adjustment"
    ROUNDING = "rounding"


class MonthState(StrEnum):
    """State of a customer's month. open, closing: it accepts postings. closed: it never does again."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


# Maximum locks per batch; a close also delays the postings of about one in 64 organizations.
LANE_COUNT = 64
# First key of the advisory locks, next to that of the quotas; the second is the lane.
LANE_LOCK = 1_466_263_923
# The lane of `organization_id` in SQL; the triggers of the ledger use the same expression.
LANE_OF = f"get_byte(uuid_send({{organization_id}}), 15) % {LANE_COUNT}"

# The month of use, or the one after the last closed month: months are closed in order.
POSTING_MONTH = """
SELECT greatest(CAST({month} AS date), (SELECT CAST(max(b.month) + interval '1 month' AS date) FROM billing_months b
                                        WHERE b.organization_id = {organization_id} AND b.state = 'closed'))
"""
SHARE_LANES = text(f"SELECT pg_advisory_xact_lock_shared({LANE_LOCK}, lane) FROM unnest(CAST(:lanes AS int[])) AS lane")
TRY_LANES = text(f"""
SELECT coalesce(array_agg(lane) FILTER (WHERE pg_try_advisory_xact_lock_shared({LANE_LOCK}, lane)), '{{}}')
FROM generate_series(0, {LANE_COUNT - 1}) AS lane
""")
TAKE_LANE = text(f"SELECT pg_advisory_xact_lock({LANE_LOCK}, :lane)")
FIND_POSTING_MONTH = text(POSTING_MONTH.format(month="CAST(:month AS date)", organization_id="CAST(:organization_id AS uuid)"))


def lane_of(organization_id: uuid.UUID) -> int:
    """Return the number of the lock that this organization's postings share."""
    return organization_id.bytes[-1] % LANE_COUNT


def month_of(day: date) -> date:
    return date(day.year, day.month, 1)


def month_after(month: date) -> date:
    return date(month.year + month.month // 12, month.month % 12 + 1, 1)


def month_end(month: date) -> datetime:
    """Return the first moment after a month, UTC."""
    return datetime.combine(month_after(month), time(), UTC)


def month_text(month: date) -> str:
    """Return a month as `YYYY-MM`."""
    return f"{month:%Y-%m}"


async def share_lanes(session: AsyncSession, organization_ids: Collection[uuid.UUID]) -> None:
    """Prevent the months of these organizations from being closed until the transaction ends; wait
    for a running close.
    """
    await session.execute(SHARE_LANES, {"lanes": sorted({lane_of(each) for each in organization_ids})})


async def try_lanes(session: AsyncSession) -> list[int]:
    """Share the lanes that no close holds at present, without waiting, and return them."""
    lanes: list[int] = (await session.execute(TRY_LANES)).scalar_one()
    return lanes


async def take_lane(session: AsyncSession, organization_id: uuid.UUID) -> None:
    """Prevent other postings to this organization until the transaction ends.

    For a close, before it reads; waits for running postings. Later reads are complete.
    """
    await session.execute(TAKE_LANE, {"lane": lane_of(organization_id)})


async def current_month(session: AsyncSession) -> date:
    """Return the month of the transaction's start, UTC, by the database's clock."""
    today: datetime = (await session.scalars(select(func.timezone("UTC", func.now())))).one()
    return month_of(today.date())


async def posting_month(session: AsyncSession, organization_id: uuid.UUID, month: date) -> date:
    """Return the month for a posting of `month`: itself, or the first open one after it. It stays
    open until commit.

    Months are represented by their first day.
    """
    await share_lanes(session, (organization_id,))
    # A separate statement, which sees months closed while the lock was waited for.
    result = await session.execute(FIND_POSTING_MONTH, {"organization_id": organization_id, "month": month_of(month)})
    billing_month: date = result.scalar_one()
    return billing_month


@dataclass(frozen=True, slots=True)
class AccountKey:
    """Identity of an account."""

    organization_id: uuid.UUID
    kind: AccountKind
    currency_code: str


@dataclass(frozen=True, slots=True)
class Posting:
    """A transaction to write. billing_month: its first day. source_id: origin, which is posted once
    per kind.

    legs: amounts by account of the organization. Debits are positive: a customer's debt grows, our
    revenue is negative.
    """

    kind: TransactionKind
    organization_id: uuid.UUID
    currency_code: str
    billing_month: date
    effective_at: datetime
    description: str
    source_id: uuid.UUID | None
    legs: tuple[tuple[AccountKind, int], ...]

    def __str__(self) -> str:
        return f"{self.kind} of {self.organization_id} in {self.billing_month:%Y-%m} ({self.description})"


CLOSED = text("""
SELECT p.organization_id, p.month
FROM unnest(CAST(:organization_ids AS uuid[]), CAST(:months AS date[])) AS p(organization_id, month)
JOIN billing_months b ON b.organization_id = p.organization_id AND b.month >= p.month AND b.state = 'closed' LIMIT 1
""")
# The ids are drawn first, so that entries find their transaction by its index.
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
INSERT INTO ledger_entries (transaction_id, account_id, amount_picos)
SELECT * FROM unnest(CAST(:transaction_ids AS bigint[]), CAST(:account_ids AS bigint[]), CAST(:amounts AS numeric[]))
""")


async def post(session: AsyncSession, postings: Sequence[Posting]) -> list[int]:
    """Write transactions, creating new accounts, and return their ids in order.

    Waits for a running close of these organizations. If it raises, the caller must roll back.
    Raises: InvariantViolated if a posting does not balance; MonthClosed; AlreadyExists for a source
    that was already posted.
    """
    if not postings:
        return []
    for posting in postings:
        if not posting.legs:
            raise InvariantViolated(f"the posting {posting} has no legs")
        if rest := sum(amount_picos for _, amount_picos in posting.legs):
            raise InvariantViolated(f"the posting {posting} is off by {rest} {posting.currency_code} picos")
    organization_ids = [posting.organization_id for posting in postings]
    months = [posting.billing_month for posting in postings]
    await share_lanes(session, organization_ids)
    if (closed := (await session.execute(CLOSED, {"organization_ids": organization_ids, "months": months})).first()) is not None:
        raise MonthClosed(closed.organization_id, closed.month)
    legs = [
        (index, AccountKey(posting.organization_id, kind, posting.currency_code), amount_picos)
        for index, posting in enumerate(postings)
        for kind, amount_picos in posting.legs
    ]
    account_ids = await open_accounts(session, {account for _, account, _ in legs})
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
            "transaction_ids": [ids[index] for index, _, _ in legs],
            "account_ids": [account_ids[account] for _, account, _ in legs],
            "amounts": [amount_picos for _, _, amount_picos in legs],
        },
    )
    return ids


WANTED = "unnest(CAST(:organization_ids AS uuid[]), CAST(:kinds AS text[]), CAST(:currency_codes AS text[]))"
ACCOUNTS = text(f"SELECT * FROM ledger_accounts WHERE (organization_id, kind, currency_code) IN (SELECT * FROM {WANTED})")
OPEN_ACCOUNTS = text(f"""
INSERT INTO ledger_accounts (organization_id, kind, currency_code) SELECT * FROM {WANTED} ON CONFLICT DO NOTHING
""")


async def open_accounts(session: AsyncSession, keys: Collection[AccountKey]) -> Mapping[AccountKey, int]:
    """Return the ids of accounts, creating missing ones in sorted order, so that concurrent calls
    do not deadlock.
    """
    identities = sorted((key.organization_id, str(key.kind), key.currency_code) for key in keys)
    organization_ids, kinds, currency_codes = (list(column) for column in zip(*identities, strict=True))
    parameters = {"organization_ids": organization_ids, "kinds": kinds, "currency_codes": currency_codes}
    if len(rows := (await session.execute(ACCOUNTS, parameters)).all()) < len(identities):
        await session.execute(OPEN_ACCOUNTS, parameters)
        rows = (await session.execute(ACCOUNTS, parameters)).all()
    return {AccountKey(row.organization_id, AccountKind(row.kind), row.currency_code): row.id for row in rows}


# The first open month: the one after the last closed, or the first with any content.
BEFORE = text("""
SELECT max(month) AS last_closed, coalesce(
    CAST(max(month) + interval '1 month' AS date),
    (SELECT min(month) FROM (
        SELECT billing_month FROM ledger_transactions WHERE organization_id = :organization_id
        UNION ALL SELECT first_month FROM plan_assignments WHERE organization_id = :organization_id AND plan_version_id IS NOT NULL
    ) AS used (month))) AS first_open
FROM billing_months WHERE organization_id = :organization_id AND state = 'closed'
""")


async def first_open_month(session: AsyncSession, organization_id: uuid.UUID) -> date | None:
    """Return the month to close next, by its first day; None for a customer without postings."""
    month: date | None = (await session.execute(BEFORE, {"organization_id": organization_id})).one().first_open
    return month


MONTH_FORM = re.compile(r"([2-9]\d{3})-(0[1-9]|1[0-2])", re.ASCII)


def month_bounds(month: str) -> tuple[datetime, datetime]:
    """Return the first moment of a month `YYYY-MM` and of the next, UTC. Raises: InvalidValue."""
    parts = MONTH_FORM.fullmatch(month)
    if parts is None or month == "9999-12":
        raise InvalidValue("month", f"{month[:64]!r} is not a month: write it as YYYY-MM")
    year, number = int(parts[1]), int(parts[2])
    return datetime(year, number, 1, tzinfo=UTC), datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
