"""Prepaid credit: grants, what was spent of them at the closes of months, and what has expired. Balances are sums, never stored.

For whoever closes a month, in the transaction of the close: `usable_grants` is what `plans.apply_credit` needs; `spend` writes what
that answers; then `expire` posts the end of what is left of grants whose last month this is. The ledger's transaction of kind
`credit_applied` (prepaid_credit against receivable) is the close's own. Grants and expiries are posted here.

Functions take a session and never commit; every change writes the audit log. Months are given by their first day.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change, snapshot
from metering.core.errors import InvalidValue, NotFound
from metering.ledger.ledger import AccountKey, Leg, Posting, first_open_month, month_of, post, posting_month, share_lanes
from metering.ledger.models import AccountKind, TransactionKind
from metering.plans.models import CreditApplication, CreditGrant
from metering.plans.plans import CreditApplication as Spent
from metering.plans.plans import UsableGrant
from metering.tenants.tenants import find_organization

AMOUNT_MAX_PICOS = 10**18  # a million units; more would be a unit mixed up, and a limit made of several must fit its column
REASON_CHARS_MAX = 500

GRANTS = text(f"""
SELECT g.id, g.organization_id, g.currency_code, g.amount_picos, g.first_month, g.last_month, g.reason, g.granted_by, g.created_at,
       coalesce(spent.picos, 0)::bigint AS spent_picos, coalesce(expired.picos, 0)::bigint AS expired_picos
FROM credit_grants g
LEFT JOIN (SELECT grant_id, sum(amount_picos) AS picos FROM credit_applications GROUP BY 1) spent ON spent.grant_id = g.id
LEFT JOIN (SELECT t.source_id, sum(e.amount_picos) AS picos
           FROM ledger_transactions t JOIN ledger_entries e ON e.transaction_id = t.id
           JOIN ledger_accounts a ON a.id = e.account_id AND a.kind = '{AccountKind.PREPAID_CREDIT}'
           WHERE t.kind = '{TransactionKind.CREDIT_EXPIRED}' GROUP BY 1) expired ON expired.source_id = g.id
WHERE CAST(:organization_id AS uuid) IS NULL OR g.organization_id = :organization_id
ORDER BY g.organization_id, g.last_month, g.id
""")


@dataclass(frozen=True, slots=True)
class Grant:
    """Credit as it stands. spent: for closed months. Amounts in picos."""

    id: uuid.UUID
    organization_id: uuid.UUID
    currency_code: str
    amount_picos: int
    first_month: date
    last_month: date
    reason: str
    granted_by: str
    created_at: datetime
    spent_picos: int = 0
    expired_picos: int = 0

    @property
    def remaining_picos(self) -> int:
        """What closed months have left of it."""
        return self.amount_picos - self.spent_picos - self.expired_picos

    def usable_in(self, month: date) -> bool:
        """Whether it may pay for what is billed in a month."""
        return self.first_month <= month <= self.last_month


async def grant_credit(
    session: AsyncSession,
    *,
    organization: str,
    amount_picos: int,
    first_month: date | None = None,
    last_month: date,
    reason: str,
    actor: str,
) -> Grant:
    """Give an organization credit for what is billed from a month on, by default this one, up to `last_month`. Posts it.

    Raises: NotFound, InvalidValue.
    """
    owner = await find_organization(session, organization)
    now: datetime = (await session.scalars(select(func.now()))).one()
    this_month = await current_month(session)
    begins, ends = this_month if first_month is None else month_of(first_month), month_of(last_month)
    if not 0 < amount_picos <= AMOUNT_MAX_PICOS:
        raise InvalidValue("amount", f"give more than 0 and at most {AMOUNT_MAX_PICOS} picos; grant more than once for more")
    if ends < this_month:
        raise InvalidValue("last_month", f"{ends:%Y-%m} is over: give this month or a later one")
    if begins > ends:
        raise InvalidValue("first_month", f"give a month up to the last one, {ends:%Y-%m}")
    if not 1 <= len(reason.strip()) <= REASON_CHARS_MAX or not reason.isprintable():
        raise InvalidValue("reason", f"say why in 1 to {REASON_CHARS_MAX} printable characters")
    values = {
        "organization_id": owner.id,
        "currency_code": owner.currency_code,
        "amount_picos": amount_picos,
        "first_month": begins,
        "last_month": ends,
        "reason": reason.strip(),
        "granted_by": actor,
    }
    row = (await session.scalars(insert(CreditGrant).values(values).returning(CreditGrant))).one()
    grant = Grant(row.id, owner.id, owner.currency_code, amount_picos, begins, ends, row.reason, actor, row.created_at)
    # No later than the first month that may spend it, so that no month has spent what it did not have.
    await share_lanes(session, (owner.id,))
    first_open = await first_open_month(session, owner.id) or this_month
    month = await posting_month(session, owner.id, min(this_month, max(begins, first_open)))
    moved = (AccountKind.CREDIT_FUNDING, AccountKind.PREPAID_CREDIT)
    await post(session, [_posting(grant, TransactionKind.CREDIT_GRANTED, month, now, amount_picos, moved)])
    await record_change(session, actor=actor, action="credit.grant", subject_id=str(row.id), before=None, after=snapshot(row))
    return grant


async def list_grants(session: AsyncSession, *, organization: str = "") -> list[Grant]:
    """Of one organization or all, those that end first in front. Raises: NotFound."""
    owner_id = (await find_organization(session, organization)).id if organization else None
    return await grants_of(session, owner_id)


async def grants_of(session: AsyncSession, organization_id: uuid.UUID | None) -> list[Grant]:
    """The same by id; None for all."""
    return [Grant(*row) for row in await session.execute(GRANTS, {"organization_id": organization_id})]


async def find_grant(session: AsyncSession, grant_id: uuid.UUID) -> Grant:
    """One grant. Raises: NotFound."""
    row = await session.get(CreditGrant, grant_id)
    for each in [] if row is None else await grants_of(session, row.organization_id):
        if each.id == grant_id:
            return each
    raise NotFound("credit grant", str(grant_id))


async def usable_grants(session: AsyncSession, organization_id: uuid.UUID, month: date) -> list[UsableGrant]:
    """What may be spent on a month, in the order in which it is spent."""
    grants = [each for each in await grants_of(session, organization_id) if each.usable_in(month) and each.remaining_picos > 0]
    return [UsableGrant(each.id, each.last_month, each.remaining_picos) for each in grants]


async def spend(session: AsyncSession, month: date, spent: Sequence[Spent]) -> None:
    """Write what of each grant pays for a month. The database refuses more than was granted, and a second time for a month."""
    if spent:
        rows = [{"grant_id": each.grant_id, "billing_month": month, "amount_picos": each.amount_picos} for each in spent]
        await session.execute(insert(CreditApplication).values(rows))


async def expire(session: AsyncSession, organization_id: uuid.UUID, month: date, *, at: datetime) -> list[Grant]:
    """Post the end of what is left of grants whose last month this is, or an earlier one; the grants as they were before.

    at: when it is effective, in the month. Doing it again does nothing.
    """
    ended = [each for each in await grants_of(session, organization_id) if each.last_month <= month and each.remaining_picos > 0]
    moved = (AccountKind.PREPAID_CREDIT, AccountKind.CREDIT_BREAKAGE)
    kind = TransactionKind.CREDIT_EXPIRED
    await post(session, [_posting(each, kind, month, at, each.remaining_picos, moved) for each in ended])
    return ended


async def current_month(session: AsyncSession) -> date:
    """The month of the transaction's beginning, UTC, by the database's clock."""
    today: datetime = (await session.scalars(select(func.timezone("UTC", func.now())))).one()
    return month_of(today.date())


def _posting(
    grant: Grant,
    kind: TransactionKind,
    month: date,
    at: datetime,
    amount_picos: int,
    moved: tuple[AccountKind, AccountKind],
) -> Posting:
    """An amount from the second account to the first: debits are positive."""
    debited, credited = (AccountKey(grant.organization_id, each, grant.currency_code) for each in moved)
    return Posting(
        kind=kind,
        organization_id=grant.organization_id,
        billing_month=month,
        effective_at=at,
        description=grant.reason,
        source_id=grant.id,
        legs=(Leg(debited, amount_picos), Leg(credited, -amount_picos)),
    )
