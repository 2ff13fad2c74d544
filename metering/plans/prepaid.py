"""Prepaid organizations and prepaid credit.

A prepaid organization is limited to its credit by a quota on money that never resets. The quota
counts the cost of all requests of the organization, used and held, like any other. Its limit is

    usage before this month  +  credit usable this month  -  other charges of this month

so its remaining amount is the credit left. The credit usable this month is the amount that earlier
open months leave, computed as their closes will do it. The limit changes only when credit is
granted, another charge is made, or a month begins: usage moves the counter, never the limit. Credit
that ends with this month is part of the limit as a temporary override until the month's end, so it
ends by the database's clock even if no worker runs; credit that begins with a month is added by the
next run of a worker.

Credit consists of grants, the amounts spent of them by month closes, expiries and refunds. Balances
are sums, never stored. A close, in its transaction, passes `usable_grants` to `plans.apply_credit`,
writes the result with `spend`, then posts the rest of ending grants with `expire`; it posts the
ledger transaction `credit_applied` (prepaid_credit against receivable) itself. Grants and expiries
are posted here.

Functions take a session and never commit. Callers that change an organization's credit must call
`refresh` in the same transaction. Months are represented by their first day.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from enum import StrEnum

from sqlalchemy import select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from common.incidents import Retries
from metering.core.audit import record_change, snapshot
from metering.core.errors import DatabaseUnavailable, InvalidValue, NotFound
from metering.core.models import (
    Organization,
    Quota,
    QuotaDimension,
    QuotaSubject,
    insertion,
    record_of,
)
from metering.core.money import to_decimal
from metering.core.pages import FIRST_ID, LAST_ID, PAGE_SIZE, check_page_size, page_values
from metering.core.pages import page_token as token_of
from metering.ledger.ledger import (
    AccountKind,
    MonthState,
    Posting,
    TransactionKind,
    current_month,
    first_open_month,
    month_end,
    month_of,
    post,
    posting_month,
    share_posting_locks,
)
from metering.plans.plan_admin import PrepaidOrganization, has_plan_from
from metering.plans.plans import CreditApplication, UsableGrant, apply_credit
from metering.quotas.quota_admin import (
    NO_OVERRIDE,
    change_quota,
    checked_credit_thresholds,
    lock_subject,
    retire_quota,
)
from metering.quotas.quota_recount import recount
from metering.store.db import Sessions, database_now
from metering.tenants.tenants import check_open, find_organization

AMOUNT_MAX_PICOS = 10**18  # a million units; a limit that sums several grants must fit its column
REASON_CHARS_MAX = 500

GRANTS_WHERE = f"""
SELECT g.id, g.organization_id, g.currency_code, g.amount_picos, g.first_month, g.last_month,
       g.reason, g.granted_by, g.created_at,
       coalesce(spent.picos, 0)::bigint AS spent_picos,
       coalesce(ended.expired_picos, 0)::bigint AS expired_picos,
       coalesce(ended.refunded_picos, 0)::bigint AS refunded_picos
FROM credit_grants g
LEFT JOIN LATERAL (
    SELECT sum(amount_picos) AS picos FROM credit_applications WHERE grant_id = g.id
) spent ON true
LEFT JOIN LATERAL (
    SELECT sum(e.amount_picos) FILTER (WHERE t.kind = '{TransactionKind.CREDIT_EXPIRED}')
               AS expired_picos,
           sum(e.amount_picos) FILTER (WHERE t.kind = '{TransactionKind.CREDIT_REFUNDED}')
               AS refunded_picos
    FROM ledger_transactions t
    JOIN ledger_entries e ON e.transaction_id = t.id
    JOIN ledger_accounts a ON a.id = e.account_id AND a.kind = '{AccountKind.PREPAID_CREDIT}'
    WHERE t.kind IN ('{TransactionKind.CREDIT_EXPIRED}', '{TransactionKind.CREDIT_REFUNDED}')
      AND t.source_id = g.id
) ended ON true
WHERE
"""
GRANT = text(f"{GRANTS_WHERE} g.id = :grant_id")
GRANTS = text(f"""
{GRANTS_WHERE} CAST(:organization_id AS uuid) IS NULL OR g.organization_id = :organization_id
ORDER BY g.organization_id, g.last_month, g.id
""")
GRANTS_PAGE = text(f"""
{GRANTS_WHERE} g.organization_id BETWEEN :first_organization AND :last_organization
  AND (g.organization_id, g.last_month, g.id)
      > (:after_organization, CAST(:after_month AS date), :after_id)
ORDER BY g.organization_id, g.last_month, g.id
LIMIT :row_count
""")
SPEND = text("""
INSERT INTO credit_applications (grant_id, billing_month, amount_picos)
SELECT grant_id, CAST(:month AS date), picos
FROM unnest(CAST(:grant_ids AS uuid[]), CAST(:amounts AS numeric[])) AS spent (grant_id, picos)
""")
# The choice of an organization that was closed before a time; no row before that, or if it is open.
FINAL_CREDIT = text("""
SELECT remaining_credit
FROM suspensions
WHERE organization_id = :organization_id AND project_id IS NULL AND closed_at <= :at
""")

ENDS_WITH_THE_MONTH = "prepaid credit that ends with the month"
# Maximum of the column: 9,223,372 units, for all usage of an organization and its credit. NUMERIC
# would slow down the counters, which every request updates.
LIMIT_MAX = 2**63 - 1


class RemainingCredit(StrEnum):
    """Choice for the credit that the final month of a closed organization leaves.

    refund: it is owed to the customer, and paid outside of Weir. expire: it is forfeited. keep: it
    stays until its grants end.
    """

    REFUND = "refund"
    EXPIRE = "expire"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Grant:
    """Grant of prepaid credit. Amounts are in picos; `spent_picos` was spent by closed months."""

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
    refunded_picos: int = 0

    @property
    def remaining_picos(self) -> int:
        """Amount that closed months have left."""
        spent_or_ended = self.spent_picos + self.expired_picos + self.refunded_picos
        return self.amount_picos - spent_or_ended

    def usable_in(self, month: date) -> bool:
        """Return True if the grant may pay for a month's charges."""
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
    """Grant and post credit for charges from `first_month`, by default this one, to `last_month`.

    Raises: NotFound, InvalidValue.
    """
    owner = await find_organization(session, organization)
    await check_open(session, owner)
    now = await database_now(session)
    this_month = await current_month(session)
    begins = this_month if first_month is None else month_of(first_month)
    ends = month_of(last_month)
    if not 0 < amount_picos <= AMOUNT_MAX_PICOS:
        raise InvalidValue(
            "amount",
            f"must be more than 0 and at most {AMOUNT_MAX_PICOS} picos; split larger amounts into"
            " several grants",
        )
    if ends < this_month:
        raise InvalidValue(
            "last_month", f"must be the present month or a later one, got {ends:%Y-%m}"
        )
    if begins > ends:
        raise InvalidValue("first_month", f"must not be later than the last month, {ends:%Y-%m}")
    if not 1 <= len(reason.strip()) <= REASON_CHARS_MAX or not reason.isprintable():
        raise InvalidValue("reason", f"must have 1 to {REASON_CHARS_MAX} printable characters")
    values = {
        "organization_id": owner.id,
        "currency_code": owner.currency_code,
        "amount_picos": amount_picos,
        "first_month": begins,
        "last_month": ends,
        "reason": reason.strip(),
        "granted_by": actor,
    }
    row = (await session.execute(insertion("credit_grants", values).returning(text("*")))).one()
    grant = record_of(Grant, row)
    # Not after the first month that may spend it, so that no month spends credit granted later.
    await share_posting_locks(session, (owner.id,))
    first_open = await first_open_month(session, owner.id) or this_month
    month = await posting_month(session, owner.id, min(this_month, max(begins, first_open)))
    moved = (AccountKind.CREDIT_FUNDING, AccountKind.PREPAID_CREDIT)
    await post(
        session, [_posting(grant, TransactionKind.CREDIT_GRANTED, month, now, amount_picos, moved)]
    )
    await record_change(session, actor, "credit.grant", str(row.id), after=snapshot(row))
    return grant


async def list_grants(
    session: AsyncSession,
    *,
    organization: str = "",
    page_size: int = PAGE_SIZE,
    page_token: str = "",
) -> tuple[list[Grant], str]:
    """List a page of the grants of one organization or all, the earliest-ending first.

    Returns the token of the next page too. Raises: NotFound, InvalidValue.
    """
    check_page_size(page_size)
    owner_id = (await find_organization(session, organization)).id if organization else None
    after: Sequence[object] = FIRST_ID, "-infinity", FIRST_ID
    if page_token:
        after = page_values(page_token, uuid.UUID, date.fromisoformat, uuid.UUID)
    requested = {
        "first_organization": owner_id or FIRST_ID,
        "last_organization": owner_id or LAST_ID,
        "row_count": page_size + 1,
        **dict(zip(("after_organization", "after_month", "after_id"), after, strict=True)),
    }
    found = [Grant(*row) for row in await session.execute(GRANTS_PAGE, requested)]
    shown = found[:page_size]
    if len(found) <= page_size:
        return shown, ""
    return shown, token_of(shown[-1].organization_id, shown[-1].last_month, shown[-1].id)


async def grants_of(session: AsyncSession, organization_id: uuid.UUID | None) -> list[Grant]:
    """List the grants of an organization by its id; None lists all."""
    return [
        Grant(*row) for row in await session.execute(GRANTS, {"organization_id": organization_id})
    ]


async def find_grant(session: AsyncSession, grant_id: uuid.UUID) -> Grant:
    """Look up a grant by its id. Raises: NotFound."""
    if (row := (await session.execute(GRANT, {"grant_id": grant_id})).one_or_none()) is None:
        raise NotFound("credit grant", str(grant_id))
    return Grant(*row)


async def usable_grants(
    session: AsyncSession, organization_id: uuid.UUID, month: date
) -> list[UsableGrant]:
    """List the grants usable for a month, in the order in which they are spent."""
    grants = [
        each
        for each in await grants_of(session, organization_id)
        if each.usable_in(month) and each.remaining_picos > 0
    ]
    return [UsableGrant(each.id, each.last_month, each.remaining_picos) for each in grants]


async def spend(session: AsyncSession, month: date, spent: Sequence[CreditApplication]) -> None:
    """Record what grants pay for a month. The database rejects excess and repetition."""
    if spent:
        amounts = [each.amount_picos for each in spent]
        await session.execute(
            SPEND,
            {"grant_ids": [each.grant_id for each in spent], "amounts": amounts, "month": month},
        )


async def expire(
    session: AsyncSession, organization_id: uuid.UUID, month: date, *, at: datetime
) -> list[Grant]:
    """Post the expiry of grants that end with a month or before. Idempotent.

    In the final month of a closed organization all grants end, and are refunded if its closing says
    so. Returns the grants as they were. `at` is the effective time, within the month.
    """
    choice = await session.scalar(FINAL_CREDIT, {"organization_id": organization_id, "at": at})
    is_final = choice in (RemainingCredit.REFUND, RemainingCredit.EXPIRE)
    ended = [
        each
        for each in await grants_of(session, organization_id)
        if (is_final or each.last_month <= month) and each.remaining_picos > 0
    ]
    kind, account = TransactionKind.CREDIT_EXPIRED, AccountKind.CREDIT_BREAKAGE
    if choice == RemainingCredit.REFUND:
        kind, account = TransactionKind.CREDIT_REFUNDED, AccountKind.CREDIT_FUNDING
    moved = (AccountKind.PREPAID_CREDIT, account)
    await post(
        session, [_posting(each, kind, month, at, each.remaining_picos, moved) for each in ended]
    )
    return ended


def _posting(
    grant: Grant,
    kind: TransactionKind,
    month: date,
    at: datetime,
    amount_picos: int,
    moved: tuple[AccountKind, AccountKind],
) -> Posting:
    """Build a posting from the second account in `moved` to the first, which is debited."""
    debited, credited = moved
    return Posting(
        kind=kind,
        organization_id=grant.organization_id,
        currency_code=grant.currency_code,
        billing_month=month,
        effective_at=at,
        description=grant.reason,
        source_id=grant.id,
        entries=((debited, amount_picos), (credited, -amount_picos)),
    )


log = logging.getLogger(__name__)
retries = Retries("prepaid_refresh", passing=(DatabaseUnavailable,))  # per organization

# Amounts owed, by billing month: usage of that month and of earlier ones, and other charges.
# Unrated usage will be billed in its month or the first open one after it. Credit notes are paid
# out and do not become spendable.
OWED = text(f"""
SELECT month, sum(usage_now) AS usage_picos, sum(usage_before) AS before_picos,
       sum(other) AS other_picos
FROM (
    SELECT month,
           coalesce(sum(picos) FILTER (WHERE is_usage AND effective_at >= :begins), 0)
               AS usage_now,
           coalesce(sum(picos) FILTER (WHERE is_usage AND effective_at < :begins), 0)
               AS usage_before,
           coalesce(sum(picos) FILTER (WHERE NOT is_usage), 0) AS other
    FROM (
        SELECT t.billing_month, t.kind = '{TransactionKind.USAGE}', t.effective_at, e.amount_picos
        FROM ledger_transactions t
        JOIN ledger_entries e ON e.transaction_id = t.id
        JOIN ledger_accounts a ON a.id = e.account_id AND a.kind = '{AccountKind.RECEIVABLE}'
        WHERE t.organization_id = :organization_id
          AND NOT EXISTS (
              SELECT FROM adjustments n
              WHERE n.id = t.source_id AND n.invoice_id IS NOT NULL
          )
    ) AS posted (month, is_usage, effective_at, picos)
    GROUP BY 1
    UNION ALL
    SELECT greatest(
               date_trunc('month', settled_at AT TIME ZONE 'UTC')::date,
               (SELECT (max(month) + interval '1 month')::date
                FROM billing_months
                WHERE organization_id = :organization_id AND state = '{MonthState.CLOSED}')
           ),
           coalesce(sum(cost_picos) FILTER (WHERE settled_at >= :begins), 0),
           coalesce(sum(cost_picos) FILTER (WHERE settled_at < :begins), 0),
           0
    FROM unrated_usage u
    JOIN usage_events USING (hold_id, part, settled_at)
    WHERE u.organization_id = :organization_id AND rated_at IS NULL
    GROUP BY 1
) AS owed
GROUP BY month
""")
HELD = text("""
SELECT coalesce(c.held, 0)
FROM prepaid_organizations p
LEFT JOIN quota_counters c ON c.quota_id = p.quota_id
WHERE p.organization_id = :organization_id
""")
CLOSED = text(f"""
SELECT month FROM billing_months
WHERE organization_id = :organization_id AND state = '{MonthState.CLOSED}'
""")


@dataclass(frozen=True, slots=True)
class Owed:
    """Amounts of one invoice: usage, late usage of earlier months, and other charges."""

    month: date
    usage_picos: int
    before_picos: int
    other_picos: int

    @property
    def due_picos(self) -> int:
        return self.usage_picos + self.before_picos + self.other_picos


@dataclass(frozen=True, slots=True)
class Allowed:
    """Limit of a credit quota: permanent, and until the end of this month.

    `eventual_picos` is the largest limit that credit granted for later months can lead to.
    """

    lasting_picos: int
    until_month_end_picos: int
    eventual_picos: int


@dataclass(frozen=True, slots=True)
class CreditBalance:
    """Present credit, in picos of the organization's currency.

    `remaining_picos` are grants usable this month or later, less the spending of closed months.
    `unbilled_picos` are usage and other charges of open months. `available_picos` may still be
    spent this month; for a prepaid organization, running requests are subtracted.
    """

    organization: Organization
    prepaid: bool
    remaining_picos: int
    unbilled_picos: int
    available_picos: int
    held_picos: int


async def set_prepaid(
    session: AsyncSession,
    *,
    organization: str,
    prepaid: bool,
    alert_at: Sequence[int] | None = None,
    actor: str,
) -> tuple[Organization, bool]:
    """Limit an organization to its credit, or end that; also return whether it was so already.

    `alert_at` lists amounts of remaining credit in picos; None keeps the thresholds, at first none.
    Running requests count at once. Raises: NotFound; InvalidValue if it has a plan.
    """
    thresholds = None if alert_at is None else list(checked_credit_thresholds(alert_at))
    if thresholds and not prepaid:
        raise InvalidValue("alert_at", "applies to prepaid organizations only: leave it out")
    owner = await find_organization(session, organization)
    await lock_subject(session, QuotaSubject.ORGANIZATION, owner.id)
    present = await session.get(PrepaidOrganization, owner.id, populate_existing=True)
    if (present is not None) == prepaid:
        if present is not None and thresholds is not None:
            await _change(session, present.quota_id, {"alert_at": thresholds}, actor)
        return owner, True
    if present is not None:
        await _end(session, present, actor)
        return owner, False
    if name := await has_plan_from(session, owner.id, await current_month(session)):
        reason = f"{owner.name} has the plan {name}, whose lines are known only at the month's end"
        raise InvalidValue(
            "organization",
            f"{reason}: end it first, with `weir plan assign {owner.name} --from MONTH` and no"
            " plan",
        )
    values = {
        "subject": QuotaSubject.ORGANIZATION,
        "subject_id": owner.id,
        "dimension": QuotaDimension.PREPAID_CREDIT_PICOS,
        "limit_value": 0,
        "alert_at": thresholds or [],
    }
    quota = (await session.scalars(insert(Quota).values(values).returning(Quota))).one()
    row = {"organization_id": owner.id, "quota_id": quota.id, "month": await current_month(session)}
    await session.execute(insert(PrepaidOrganization).values(row))
    # No request is admitted from here to the end: the limit is set before the first request is
    # checked.
    await recount(session, [(quota, owner.id)])
    await record_change(session, actor, "quota.set", str(quota.id), after=snapshot(quota))
    await refresh(session, owner.id, actor=actor, granted_picos=0)
    return owner, False


async def refresh(
    session: AsyncSession,
    organization_id: uuid.UUID,
    *,
    actor: str,
    granted_picos: int | None = None,
) -> None:
    """Set the limit of a prepaid organization to its present credit; do nothing for others.

    `granted_picos` is the credit that this transaction grants, 0 when the organization becomes
    prepaid. It is refused if the limit cannot express it now or in a later month. With None, credit
    beyond the maximum is logged as an error and unusable. Raises: InvalidValue.
    """
    await lock_subject(session, QuotaSubject.ORGANIZATION, organization_id)
    prepaid = await session.get(PrepaidOrganization, organization_id, populate_existing=True)
    if prepaid is None:
        return
    month = await current_month(session)
    credit_needed = await allowance(session, organization_id, month)
    if granted_picos is not None:
        owner = await session.get_one(Organization, organization_id)
        _check_expressible(owner, granted_picos, credit_needed.eventual_picos - LIMIT_MAX)
    if credit_needed.until_month_end_picos > LIMIT_MAX:
        log.error(
            "prepaid organization %s cannot use %s of its credit: the maximum of a quota on money"
            " is %s units",
            organization_id,
            to_decimal(credit_needed.until_month_end_picos - LIMIT_MAX),
            to_decimal(LIMIT_MAX),
        )
    lasting = min(credit_needed.lasting_picos, LIMIT_MAX)
    until_month_end = min(credit_needed.until_month_end_picos, LIMIT_MAX)
    values: dict[str, object] = {"limit_value": lasting, **NO_OVERRIDE}
    if until_month_end > lasting:
        values |= {
            "override_limit_value": until_month_end,
            "override_until": month_end(month),
            "override_reason": ENDS_WITH_THE_MONTH,
        }
    await _change(session, prepaid.quota_id, values, actor)
    prepaid.month = month
    await session.flush()


def _check_expressible(owner: Organization, granted_picos: int, excess_picos: int) -> None:
    """Raise InvalidValue if the limit cannot express the credit."""
    if excess_picos <= 0:
        return
    code, maximum = owner.currency_code, f"{to_decimal(LIMIT_MAX):,.0f} {owner.currency_code}"
    why = f"total usage and credit of a prepaid organization together are limited to {maximum}"
    remedy = (
        f"end prepaid mode of {owner.name} (prepaid off), or continue as another organization with"
        " a currency of larger units"
    )
    if granted_picos:
        room = f"{to_decimal(max(granted_picos - excess_picos, 0)):,f}"
        raise InvalidValue(
            "amount_picos",
            f"must be at most {room} {code}, got {to_decimal(granted_picos):,f}: {why}; {remedy}",
        )
    raise InvalidValue(
        "prepaid",
        f"{owner.name} is {to_decimal(excess_picos):,f} {code} above the maximum: {why}; {remedy}",
    )


async def _change(
    session: AsyncSession, quota_id: uuid.UUID, values: dict[str, object], actor: str
) -> None:
    quota = await session.get_one(Quota, quota_id, populate_existing=True)
    await change_quota(session, quota, values, action="quota.set", actor=actor)


async def refresh_for_the_month(sessions: Sessions) -> int:
    """Refresh the prepaid organizations not refreshed this month; return how many there were."""
    async with sessions() as session:
        month = await current_month(session)
        stale = select(PrepaidOrganization.organization_id).where(PrepaidOrganization.month < month)
        waiting = list(await session.scalars(stale.order_by(PrepaidOrganization.organization_id)))
    refreshed_count = 0
    for organization_id in filter(retries.is_due, waiting):
        with retries.survive(organization_id):
            async with sessions.begin() as session:
                await refresh(session, organization_id, actor="system")
            refreshed_count += 1
    return refreshed_count


async def allowance(session: AsyncSession, organization_id: uuid.UUID, month: date) -> Allowed:
    """Compute the limit of a credit quota for a month, without a maximum."""
    owed, closed = await _owed(session, organization_id, month)
    grants = await grants_of(session, organization_id)
    left = left_for(
        month, grants, [each for each in owed if each.month < month and each.month not in closed]
    )
    used_before = sum(each.before_picos for each in owed)
    else_due = sum(each.before_picos + each.other_picos for each in owed if each.month >= month)
    lasting, ending = (
        sum(
            picos
            for grant, picos in left
            if grant.usable_in(month) and (grant.last_month > month) == lasts
        )
        for lasts in (True, False)
    )
    lasting_limit = used_before + max(lasting - else_due, 0)
    until_end = used_before + max(lasting + ending - else_due, 0)
    eventual = used_before + max(sum(picos for _, picos in left) - else_due, 0)
    return Allowed(lasting_limit, until_end, eventual)


def left_for(
    month: date, grants: Sequence[Grant], open_before: Sequence[Owed]
) -> list[tuple[Grant, int]]:
    """Compute what each grant has left for a month once earlier open months have closed."""
    left = {each.id: each.remaining_picos for each in grants}
    for each in sorted(open_before, key=lambda owed: owed.month):
        usable = [
            UsableGrant(g.id, g.last_month, left[g.id]) for g in grants if g.usable_in(each.month)
        ]
        for spent in apply_credit(usable, each.due_picos):
            left[spent.grant_id] -= spent.amount_picos
    return [(grant, left[grant.id]) for grant in grants if grant.last_month >= month]


async def credit_balance(session: AsyncSession, *, organization: str) -> CreditBalance:
    """Compute an organization's credit balance. Raises: NotFound."""
    owner = await find_organization(session, organization)
    month = await current_month(session)
    owed, closed = await _owed(session, owner.id, month)
    open_months = [each for each in owed if each.month not in closed]
    grants = await grants_of(session, owner.id)
    left = left_for(month, grants, [each for each in open_months if each.month < month])
    usable = sum(picos for grant, picos in left if grant.usable_in(month))
    due = sum(each.due_picos for each in open_months if each.month >= month)
    # None: not prepaid.
    held: int | None = await session.scalar(HELD, {"organization_id": owner.id})
    return CreditBalance(
        organization=owner,
        prepaid=held is not None,
        remaining_picos=sum(each.remaining_picos for each in grants if each.last_month >= month),
        unbilled_picos=sum(each.due_picos for each in open_months),
        available_picos=max(usable - due - (held or 0), 0),
        held_picos=held or 0,
    )


async def _owed(
    session: AsyncSession, organization_id: uuid.UUID, month: date
) -> tuple[list[Owed], set[date]]:
    """Read the amounts that each month bills so far, and which months are closed."""
    begins = datetime.combine(month, time(), UTC)
    rows = await session.execute(OWED, {"organization_id": organization_id, "begins": begins})
    owed = [record_of(Owed, row) for row in rows]
    closed = set((await session.scalars(CLOSED, {"organization_id": organization_id})).all())
    return owed, closed


async def _end(session: AsyncSession, prepaid: PrepaidOrganization, actor: str) -> None:
    quota = await session.get_one(Quota, prepaid.quota_id)
    await session.delete(prepaid)
    await retire_quota(session, quota, actor)
