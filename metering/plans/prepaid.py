"""Organizations that pay in advance: kept to their credit by a quota on money that no window resets.

The quota counts what all requests of the organization ever cost and hold, exactly, like any other. Its limit is

    what was used before this month  +  what credit this month may spend  -  what else is billed this month

so what remains of it is the credit that is left. What credit this month may spend is what open months before it leave, worked out
as their closes will do it. The limit changes only when credit is granted, something else is billed, or a month begins: usage moves
the counter, never the limit. Credit that ends with this month is in the limit as a raise until the month's end, so the database's
clock takes it away at that very moment, whether or not a worker is there; what begins with a month comes when a worker next looks.

Functions take a session and never commit. Whoever changes an organization's credit calls `refresh` in the same transaction.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from common.incidents import Retries
from metering.core.audit import record_change, snapshot
from metering.core.errors import InvalidValue, StoreAway
from metering.core.models import Organization, Quota, QuotaDimension, QuotaSubject
from metering.core.money import to_decimal
from metering.ledger.models import AccountKind, MonthState, TransactionKind
from metering.plans.credits import Grant, current_month, grants_of
from metering.plans.models import PrepaidOrganization
from metering.plans.plan_admin import has_plan_from
from metering.plans.plans import UsableGrant, apply_credit
from metering.quotas.quota_recount import recount
from metering.quotas.quota_rules import checked_lefts, window_end
from metering.store.db import Sessions
from metering.tenants.tenants import find_organization

ENDS_WITH_THE_MONTH = "prepaid credit that ends with the month"
# Greatest value of the column: 9,223,372 units, for all that an organization ever uses and its credit. NUMERIC would
# make counters slower, which every request updates.
LIMIT_MAX = 2**63 - 1

log = logging.getLogger(__name__)
retries = Retries("prepaid_refresh", passing=(StoreAway,))  # by organization

# What is owed by the month that bills it: usage of that month and of earlier ones, and all else. What is not rated yet will be
# billed in its month, or the first open one after it. What a credit note gives back is paid out: nothing more to spend.
OWED = text(f"""
SELECT month, coalesce(sum(picos) FILTER (WHERE is_usage AND effective_at >= :begins), 0) AS usage_now,
       coalesce(sum(picos) FILTER (WHERE is_usage AND effective_at < :begins), 0) AS usage_before,
       coalesce(sum(picos) FILTER (WHERE NOT is_usage), 0) AS other
FROM (SELECT t.billing_month, t.kind = '{TransactionKind.USAGE}', t.effective_at, e.amount_picos
      FROM ledger_transactions t JOIN ledger_entries e ON e.transaction_id = t.id
      JOIN ledger_accounts a ON a.id = e.account_id AND a.kind = '{AccountKind.RECEIVABLE}'
      WHERE t.organization_id = :organization_id
        AND NOT EXISTS (SELECT FROM adjustments n WHERE n.id = t.source_id AND n.invoice_id IS NOT NULL)
) AS posted (month, is_usage, effective_at, picos) GROUP BY 1
UNION ALL
SELECT greatest(date_trunc('month', settled_at AT TIME ZONE 'UTC')::date,
                (SELECT (max(month) + interval '1 month')::date FROM billing_months
                 WHERE organization_id = :organization_id AND state = '{MonthState.CLOSED}')),
       coalesce(sum(cost_picos) FILTER (WHERE settled_at >= :begins), 0),
       coalesce(sum(cost_picos) FILTER (WHERE settled_at < :begins), 0), 0
FROM unrated_usage u JOIN usage_events USING (hold_id, part, settled_at)
WHERE u.organization_id = :organization_id AND rated_at IS NULL GROUP BY 1
""")
CLOSED = text(f"SELECT month FROM billing_months WHERE organization_id = :organization_id AND state = '{MonthState.CLOSED}'")


@dataclass(frozen=True, slots=True)
class Owed:
    """What one month bills. before: of it, usage of earlier months than this one; other: what is no usage."""

    month: date
    usage_picos: int
    before_picos: int
    other_picos: int

    @property
    def due_picos(self) -> int:
        return self.usage_picos + self.before_picos + self.other_picos


@dataclass(frozen=True, slots=True)
class Allowed:
    """The limit of the quota: for ever, and until this month ends.

    eventual: the greatest limit that credit granted for later months can lead to.
    """

    lasting_picos: int
    until_month_end_picos: int
    eventual_picos: int


@dataclass(frozen=True, slots=True)
class CreditBalance:
    """Credit at this moment. In picos of the organization's currency.

    left: of grants that may be used this month or later, by the months that are closed. unbilled: what open months have used and
    otherwise owe so far. available: what this month may still spend; for a prepaid organization less what running requests hold.
    """

    organization: Organization
    prepaid: bool
    left_picos: int
    unbilled_picos: int
    available_picos: int
    held_picos: int


async def set_prepaid(
    session: AsyncSession, *, organization: str, prepaid: bool, alert_at: Sequence[int] | None = None, actor: str
) -> tuple[Organization, bool]:
    """Keep an organization to its credit from now on, or no longer; and whether that was so already.

    alert_at: picos of credit that are left; None leaves it as it stands, at first none. Requests that run count at once. Raises:
    NotFound; InvalidValue where it has a plan.
    """
    thresholds = None if alert_at is None else list(checked_lefts(alert_at))
    if thresholds and not prepaid:
        raise InvalidValue("alert_at", "only what keeps an organization to its credit alerts: leave it out")
    owner = await find_organization(session, organization)
    await _lock(session, owner.id)
    standing = await session.get(PrepaidOrganization, owner.id, populate_existing=True)
    if (standing is not None) == prepaid:
        if standing is not None and thresholds is not None:
            await _change(session, standing.quota_id, {"alert_at": thresholds}, actor)
        return owner, True
    if standing is not None:
        await _end(session, standing, actor)
        return owner, False
    if name := await has_plan_from(session, owner.id, await current_month(session)):
        reason = f"{owner.name} has the plan {name}, whose lines are known at a month's end only"
        raise InvalidValue("organization", f"{reason}: end it first, with `weir plan assign {owner.name} --from MONTH` and no plan")
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
    # Nobody is let in from here to the end: the limit is set before the first request meets it.
    await recount(session, [(quota, owner.id)])
    await record_change(session, actor=actor, action="quota.set", subject_id=str(quota.id), before=None, after=snapshot(quota))
    await refresh(session, owner.id, actor=actor, granted_picos=0)
    return owner, False


async def refresh(session: AsyncSession, organization_id: uuid.UUID, *, actor: str, granted_picos: int | None = None) -> None:
    """Set the limit of a prepaid organization to what its credit is now; nothing for any other.

    granted_picos: credit that this transaction has granted, 0 where the organization begins to pay in advance. It is
    refused where the limit cannot express it, now or in a later month. If None, credit beyond the greatest limit is
    logged as an error and cannot be used. Raises: InvalidValue.
    """
    await _lock(session, organization_id)
    prepaid = await session.get(PrepaidOrganization, organization_id, populate_existing=True)
    if prepaid is None:
        return
    month = await current_month(session)
    asked = await allowance(session, organization_id, month)
    if granted_picos is not None:
        owner = await session.get_one(Organization, organization_id)
        _check_expressible(owner, granted_picos, asked.eventual_picos - LIMIT_MAX)
    if asked.until_month_end_picos > LIMIT_MAX:
        log.error(
            "prepaid organization %s cannot use %s of its credit: the greatest limit of a quota on money is %s units",
            organization_id,
            to_decimal(asked.until_month_end_picos - LIMIT_MAX),
            to_decimal(LIMIT_MAX),
        )
    lasting, until_month_end = min(asked.lasting_picos, LIMIT_MAX), min(asked.until_month_end_picos, LIMIT_MAX)
    values: dict[str, Any] = {"limit_value": lasting}
    values |= {"raised_limit_value": None, "raised_until": None, "raise_reason": None}
    if until_month_end > lasting:
        values |= {
            "raised_limit_value": until_month_end,
            "raised_until": _end_of(month),
            "raise_reason": ENDS_WITH_THE_MONTH,
        }
    await _change(session, prepaid.quota_id, values, actor)
    prepaid.month = month
    await session.flush()


def _check_expressible(owner: Organization, granted_picos: int, excess_picos: int) -> None:
    """Refuse credit that the limit cannot express. Raises: InvalidValue."""
    if excess_picos <= 0:
        return
    code, most = owner.currency_code, f"{to_decimal(LIMIT_MAX):,.0f} {owner.currency_code}"
    why = f"what a prepaid organization has used in all and its credit together are limited to {most}"
    remedy = f"let {owner.name} pay afterwards (prepaid off), or go on as another organization with a currency of larger units"
    if granted_picos:
        room = f"{to_decimal(max(granted_picos - excess_picos, 0)):,f}"
        raise InvalidValue("amount_picos", f"give at most {room} {code}, got {to_decimal(granted_picos):,f}: {why}; {remedy}")
    raise InvalidValue("prepaid", f"{owner.name} is {to_decimal(excess_picos):,f} {code} above the maximum: {why}; {remedy}")


async def _change(session: AsyncSession, quota_id: uuid.UUID, values: dict[str, Any], actor: str) -> None:
    """Set columns of the quota, and log it if that changes anything."""
    before = snapshot(await session.get_one(Quota, quota_id, populate_existing=True))
    changed = update(Quota).where(Quota.id == quota_id).values(values).returning(Quota)
    after = snapshot((await session.scalars(changed.execution_options(populate_existing=True))).one())
    if before != after:
        await record_change(session, actor=actor, action="quota.set", subject_id=str(quota_id), before=before, after=after)


async def refresh_for_the_month(sessions: Sessions) -> int:
    """After a month's begin: set the limit of each prepaid organization for which that was not done; tells how many."""
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
    """What the quota's limit has to be in a month, however much that is."""
    owed, closed = await _owed(session, organization_id, month)
    grants = await grants_of(session, organization_id)
    left = left_for(month, grants, [each for each in owed if each.month < month and each.month not in closed])
    used_before = sum(each.before_picos for each in owed)
    else_due = sum(each.before_picos + each.other_picos for each in owed if each.month >= month)
    lasting, ending = (
        sum(picos for grant, picos in left if grant.usable_in(month) and (grant.last_month > month) == lasts)
        for lasts in (True, False)
    )
    lasting_limit = used_before + max(lasting - else_due, 0)
    until_end = used_before + max(lasting + ending - else_due, 0)
    eventual = used_before + max(sum(picos for _, picos in left) - else_due, 0)
    return Allowed(lasting_limit, until_end, eventual)


def left_for(month: date, grants: Sequence[Grant], open_before: Sequence[Owed]) -> list[tuple[Grant, int]]:
    """What of each grant the open months before a month leave, when they are closed one after the other. Pure."""
    left = {each.id: each.remaining_picos for each in grants}
    for each in sorted(open_before, key=lambda owed: owed.month):
        usable = [UsableGrant(g.id, g.last_month, left[g.id]) for g in grants if g.usable_in(each.month)]
        for spent in apply_credit(usable, each.due_picos):
            left[spent.grant_id] -= spent.amount_picos
    return [(grant, left[grant.id]) for grant in grants if grant.last_month >= month]


async def credit_balance(session: AsyncSession, *, organization: str) -> CreditBalance:
    """What there is of an organization's credit. Raises: NotFound."""
    owner = await find_organization(session, organization)
    month = await current_month(session)
    owed, closed = await _owed(session, owner.id, month)
    open_months = [each for each in owed if each.month not in closed]
    left = left_for(month, await grants_of(session, owner.id), [each for each in open_months if each.month < month])
    usable = sum(picos for grant, picos in left if grant.usable_in(month))
    due = sum(each.due_picos for each in open_months if each.month >= month)
    held = await _held(session, owner.id)
    return CreditBalance(
        organization=owner,
        prepaid=held is not None,
        left_picos=sum(each.remaining_picos for each in await grants_of(session, owner.id) if each.last_month >= month),
        unbilled_picos=sum(each.due_picos for each in open_months),
        available_picos=max(usable - due - (held or 0), 0),
        held_picos=held or 0,
    )


async def _owed(session: AsyncSession, organization_id: uuid.UUID, month: date) -> tuple[list[Owed], set[date]]:
    """What each month bills so far, and the months that are closed."""
    begins = datetime.fromisoformat(f"{month:%Y-%m-%d}T00:00:00+00:00")
    sums: dict[date, Owed] = {}
    for row in await session.execute(OWED, {"organization_id": organization_id, "begins": begins}):
        known = sums.get(row.month, Owed(row.month, 0, 0, 0))
        sums[row.month] = Owed(
            row.month,
            known.usage_picos + int(row.usage_now),
            known.before_picos + int(row.usage_before),
            known.other_picos + int(row.other),
        )
    closed = set((await session.scalars(CLOSED, {"organization_id": organization_id})).all())
    return list(sums.values()), closed


async def _held(session: AsyncSession, organization_id: uuid.UUID) -> int | None:
    """What requests of a prepaid organization hold of its credit; None for any other."""
    query = text("""
        SELECT coalesce(c.held, 0) FROM prepaid_organizations p
        LEFT JOIN quota_counters c ON c.quota_id = p.quota_id WHERE p.organization_id = :organization_id
    """)
    held: int | None = await session.scalar(query, {"organization_id": organization_id})
    return held


async def _end(session: AsyncSession, standing: PrepaidOrganization, actor: str) -> None:
    quota = await session.get_one(Quota, standing.quota_id)
    before = snapshot(quota)
    await session.delete(standing)
    await session.execute(update(Quota).where(Quota.id == quota.id).values(deleted_at=func.now()))
    await record_change(session, actor=actor, action="quota.delete", subject_id=str(quota.id), before=before, after=None)


async def _lock(session: AsyncSession, organization_id: uuid.UUID) -> None:
    """Changes of one organization's credit take turns; requests that are admitted refer to the row and must not wait."""
    locking = select(Organization.id).where(Organization.id == organization_id)
    await session.execute(locking.with_for_update(key_share=True))


def _end_of(month: date) -> datetime:
    begins = datetime.fromisoformat(f"{month:%Y-%m-%d}T00:00:00+00:00")
    end = window_end(QuotaDimension.COST_PICOS_PER_MONTH, begins + timedelta(0))
    assert end is not None
    return end
