"""Closing of organizations and projects, for good.

A closing is one transaction: the suspension that nothing ends, the revocation of all keys, the end
of open rentals, and the command that ends running requests in every process. So it happens whole or
not at all, whatever is killed, and a repetition finds it done. The caller holds the lock of changes
alone (`tenants/admin_requests.py`): no key, project or rental is created meanwhile, and
`check_open` refuses it afterwards. An admission that was under way is found by the command.

The months of a closed organization close as always, with late usage, and finance can still adjust
them. The close of the final month posts what the closing chose for the credit that is left then
(`plans/prepaid.py`). Functions take a session and never commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import announce_suspension
from metering.core.errors import InvalidValue
from metering.core.models import ApiKey, Organization, Project, Suspension
from metering.invoicing.rentals import ReplicaRental, end_rental
from metering.ledger.ledger import MonthState, month_after, month_of, month_text
from metering.plans.plan_admin import assign_plan, has_plan_from
from metering.plans.prepaid import RemainingCredit, credit_balance
from metering.store.db import database_now
from metering.tenants.api_keys import revoke_keys_of
from metering.tenants.suspensions import (
    OF_OPERATOR,
    checked_reason,
    locked_suspension,
    write_suspension,
)
from metering.tenants.tenants import find_organization, find_project, kind_of

# Of an organization, or of one of its projects. A hold whose request id is its own id was
# pre-authorized for an outage: no request runs under it.
COUNTS = text("""
WITH chosen AS (
    SELECT p.id, NOT EXISTS (
        SELECT FROM suspensions s WHERE s.project_id = p.id AND s.closed_at IS NOT NULL
    ) AS is_open
    FROM projects p
    WHERE p.organization_id = :organization_id
      AND (CAST(:project_id AS uuid) IS NULL OR p.id = :project_id)
), keys AS (
    SELECT id, revoked_at IS NULL AND coalesce(expires_at > now(), true) AS is_active
    FROM api_keys
    WHERE project_id IN (SELECT id FROM chosen)
), limits AS (
    SELECT override_until > now() AS is_overridden
    FROM quotas
    WHERE deleted_at IS NULL
      AND (
          subject_id IN (SELECT id FROM keys UNION ALL SELECT id FROM chosen)
          OR CAST(:project_id AS uuid) IS NULL
          AND :organization_id IN (subject_id, within_id)
      )
)
SELECT (SELECT count(*) FROM holds
        WHERE state = 'held' AND request_id <> id AND project_id IN (SELECT id FROM chosen)
       ) AS running_request_count,
       (SELECT count(*) FROM keys WHERE is_active) AS active_key_count,
       (SELECT count(*) FROM limits) AS limit_count,
       (SELECT count(*) FROM limits WHERE is_overridden) AS overridden_limit_count,
       (SELECT count(*) FROM chosen WHERE is_open) AS open_project_count
""")
# The present month, which usage may still reach, and those with postings or unrated usage.
OPEN_MONTHS = text(f"""
SELECT month
FROM (
    SELECT date_trunc('month', now() AT TIME ZONE 'UTC')::date AS month
    UNION SELECT billing_month FROM ledger_transactions WHERE organization_id = :organization_id
    UNION SELECT date_trunc('month', settled_at AT TIME ZONE 'UTC')::date
    FROM unrated_usage WHERE organization_id = :organization_id
) AS known
WHERE NOT EXISTS (
    SELECT FROM billing_months b
    WHERE b.organization_id = :organization_id AND b.month >= known.month
      AND b.state = '{MonthState.CLOSED}'
)
ORDER BY month
""")
HAS_WEBHOOK = text(
    "SELECT EXISTS (SELECT FROM alert_webhooks WHERE organization_id = :organization_id)"
)
CLOSED_UNTIL = text(f"""
SELECT organization_id, max(month) AS month FROM billing_months
WHERE state = '{MonthState.CLOSED}'
  AND organization_id = ANY(CAST(:organization_ids AS uuid[]))
GROUP BY organization_id
""")


@dataclass(frozen=True, slots=True)
class Effects:
    """Objects of an owner that a closing changes. Amounts are in picos, None for a project."""

    running_request_count: int
    active_key_count: int
    limit_count: int
    overridden_limit_count: int
    open_project_count: int = 0
    open_rental_count: int = 0
    has_webhook: bool = False
    open_months: tuple[str, ...] = ()
    unbilled_picos: int | None = None
    remaining_credit_picos: int | None = None


@dataclass(frozen=True, slots=True)
class Closure:
    """Closing of an organization or project. `remaining_credit` is empty if none was chosen."""

    reason: str
    closed_at: datetime
    by_operator: bool
    remaining_credit: str
    final_month: str
    is_final_month_closed: bool


async def closures_of(
    session: AsyncSession, suspensions: Collection[Suspension]
) -> dict[uuid.UUID, Closure]:
    """Describe the closed ones of some suspensions, by the id of the project or organization."""
    closed = [each for each in suspensions if each.closed_at is not None]
    if not closed:
        return {}
    ids = {each.organization_id for each in closed}
    rows = await session.execute(CLOSED_UNTIL, {"organization_ids": list(ids)})
    closed_until = {row.organization_id: row.month for row in rows}
    found = {}
    for each in closed:
        assert each.closed_at is not None, "chosen above"
        final, last = month_of(each.closed_at), closed_until.get(each.organization_id)
        found[each.project_id or each.organization_id] = Closure(
            reason=each.reason,
            closed_at=each.closed_at,
            by_operator=each.by_operator,
            remaining_credit=each.remaining_credit,
            final_month=month_text(final),
            is_final_month_closed=last is not None and last >= final,
        )
    return found


async def effects_on_organization(session: AsyncSession, owner: Organization) -> Effects:
    """Find what closing an organization would change at present."""
    of_owner = {"organization_id": owner.id}
    counts = (await session.execute(COUNTS, of_owner | {"project_id": None})).one()
    months = (await session.scalars(OPEN_MONTHS, of_owner)).all()
    balance = await credit_balance(session, organization=str(owner.id))
    return Effects(
        **counts._mapping,
        open_rental_count=len(await _open_rentals(session, owner)),
        has_webhook=bool(await session.scalar(HAS_WEBHOOK, of_owner)),
        open_months=tuple(map(month_text, months)),
        unbilled_picos=balance.unbilled_picos,
        remaining_credit_picos=balance.remaining_picos,
    )


async def effects_on_project(session: AsyncSession, owner: Project) -> Effects:
    """Find what closing a project would change at present."""
    of_owner = {"organization_id": owner.organization_id, "project_id": owner.id}
    return Effects(**(await session.execute(COUNTS, of_owner)).one()._mapping)


async def close_organization(
    session: AsyncSession,
    *,
    organization: str,
    confirmed_name: str,
    reason: str,
    remaining_credit: RemainingCredit | None,
    actor: str,
) -> tuple[Organization, Effects]:
    """Close an organization for good; return it with what that changed. Idempotent.

    `remaining_credit` may be None if no credit remains. Raises: NotFound, InvalidValue.
    """
    owner = await find_organization(session, organization)
    reason = checked_reason(reason)
    _check_name(owner, confirmed_name)
    present = await locked_suspension(session, owner)
    effects = await effects_on_organization(session, owner)
    if present is not None and present.closed_at is not None:
        if remaining_credit is not None and remaining_credit != present.remaining_credit:
            chosen = present.remaining_credit or "no choice, as no credit remained"
            raise InvalidValue(
                "remaining_credit", f"cannot change: the organization was closed with {chosen}"
            )
        return owner, effects
    if effects.remaining_credit_picos and remaining_credit is None:
        raise InvalidValue(
            "remaining_credit",
            "is required, because prepaid credit remains: refund it, let it expire, or keep it"
            " until its grants end",
        )
    project_ids = list(
        await session.scalars(select(Project.id).where(Project.organization_id == owner.id))
    )
    await _refuse_operators(session, owner, project_ids)
    for rental in await _open_rentals(session, owner):
        begun = rental.starts_at <= await database_now(session)
        await end_rental(
            session, owner, rental.id, None if begun else rental.starts_at, actor=actor
        )
    await _end_plan(session, owner, actor)
    await revoke_keys_of(session, project_ids, actor=actor)
    await _close(session, owner, present, reason, actor, remaining_credit or "", by_operator=True)
    return owner, effects


async def close_project(
    session: AsyncSession,
    *,
    project: str,
    confirmed_name: str,
    reason: str,
    actor: str,
    by_operator: bool,
) -> tuple[Project, Effects]:
    """Close a project for good; return it with what that changed. Idempotent.

    Raises: NotFound; InvalidValue, also for a project that the operator suspended, unless the
    operator closes it.
    """
    owner = await find_project(session, project)
    reason = checked_reason(reason)
    _check_name(owner, confirmed_name)
    present = await locked_suspension(session, owner)
    effects = await effects_on_project(session, owner)
    if present is not None and present.closed_at is not None:
        return owner, effects
    if present is not None and present.by_operator and not by_operator:
        raise InvalidValue("project", OF_OPERATOR)
    await _refuse_operators(session, owner, [owner.id])
    await revoke_keys_of(session, [owner.id], actor=actor)
    await _close(session, owner, present, reason, actor, "", by_operator=by_operator)
    return owner, effects


async def _close(
    session: AsyncSession,
    owner: Organization | Project,
    present: Suspension | None,
    reason: str,
    actor: str,
    remaining_credit: str,
    *,
    by_operator: bool,
) -> None:
    values = {
        "reason": reason,
        "by_operator": by_operator,
        "closed_at": await database_now(session),
        "remaining_credit": str(remaining_credit),
    }
    await write_suspension(session, owner, present, values, f"{kind_of(owner)}.close", actor)
    await announce_suspension(session, owner.id, reason, by_operator=by_operator, closes=True)


def _check_name(owner: Organization | Project, confirmed: str) -> None:
    if confirmed != owner.name:
        raise InvalidValue(
            "confirm_name",
            f"must be {owner.name}, the name of the {kind_of(owner)}: nothing undoes a closing",
        )


async def _refuse_operators(
    session: AsyncSession, owner: Organization | Project, project_ids: list[uuid.UUID]
) -> None:
    """Raise InvalidValue if the operator has keys there, which a closing would take from them."""
    operators = select(ApiKey.prefix).where(
        ApiKey.project_id.in_(project_ids),
        ApiKey.revoked_at.is_(None),
        ApiKey.scopes.contains(["admin"]),
        func.coalesce(ApiKey.expires_at > func.now(), True),
    )
    if prefixes := sorted(await session.scalars(operators)):
        raise InvalidValue(
            kind_of(owner),
            f"has keys of the operator, which would be revoked: {', '.join(prefixes[:10])}. Create"
            " others elsewhere and revoke these first",
        )


async def _open_rentals(session: AsyncSession, owner: Organization) -> list[ReplicaRental]:
    now = await database_now(session)
    rentals = select(ReplicaRental).where(
        ReplicaRental.organization_id == owner.id,
        ReplicaRental.ends_at.is_(None)
        | (ReplicaRental.ends_at > now) & (ReplicaRental.ends_at > ReplicaRental.starts_at),
    )
    return list(await session.scalars(rentals.order_by(ReplicaRental.id)))


async def _end_plan(session: AsyncSession, owner: Organization, actor: str) -> None:
    """Let the plan end with the final month, so that no later one has a commitment to pay."""
    final = month_of(await database_now(session))
    after = month_after(final)
    if await has_plan_from(session, owner.id, after):
        await assign_plan(
            session, organization=str(owner.id), plan="", first_month=after, actor=actor
        )
