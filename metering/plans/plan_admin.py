"""Plans and their assignments: versioned rules, stored as JSON, and an organization's plan from a
month on.

Neither is ever changed. A close passes the rules of `plan_in_force` to `plans.plan_lines`.
Functions take a session and never commit; every change writes the audit log. Months are represented
by their first day.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime
from typing import Any

from psycopg.types.json import Jsonb
from sqlalchemy import ForeignKey, Row, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, MonthClosed, NotFound
from metering.core.models import Base, QuotaSubject, ServiceTier, TokenKind, insertion, record_of
from metering.core.money import checked_currency
from metering.core.pages import FIRST_ID, LAST_ID, PAGE_SIZE, check_page_size, page_values
from metering.core.pages import page_token as token_of
from metering.ledger.ledger import MonthState, current_month, month_of, share_posting_locks
from metering.plans.plans import Allowance, LineKind, PlanRules, PriceStep, Selector, TieredPrice
from metering.quotas.quota_admin import lock_subject
from metering.tenants.tenants import check_open, checked_name, find_organization

# Rules of a plan, as `rules_document` writes them. Other rules are another version.
PLANS = text("""
SELECT * FROM plan_versions
WHERE :id IN (0, id) AND :name IN ('', name) AND :version IN (0, version)
ORDER BY name, version DESC
""")
LAST_CLOSED = text(f"""
SELECT max(month)
FROM billing_months
WHERE organization_id = :organization_id
  AND month >= :month
  AND state IN ('{MonthState.CLOSING}', '{MonthState.CLOSED}')
""")
# An organization's plan from a month until the next assignment; NULL for no plan. The latest row of
# a month counts.
ASSIGNED = text("""
SELECT DISTINCT ON (organization_id, first_month) *
FROM plan_assignments
WHERE CAST(:organization_id AS uuid) IS NULL OR organization_id = :organization_id
ORDER BY organization_id, first_month, id DESC
""")

# Rows of `ASSIGNED` of one organization or all, after the last of a page; those of a plan if named.
ASSIGNED_PAGE = text("""
SELECT a.*
FROM (
    SELECT DISTINCT ON (organization_id, first_month) *
    FROM plan_assignments
    WHERE organization_id BETWEEN :first_organization AND :last_organization
      AND (organization_id, first_month) > (:after_organization, CAST(:after_month AS date))
    ORDER BY organization_id, first_month, id DESC
) a
LEFT JOIN plan_versions p ON p.id = a.plan_version_id
WHERE :name IN ('', p.name)
ORDER BY a.organization_id, a.first_month
LIMIT :row_count
""")
PLANS_OF_PAGE = text("SELECT * FROM plan_versions WHERE id = ANY(CAST(:ids AS bigint[]))")

NO_PLAN = PlanRules()


class PrepaidOrganization(Base):
    """A prepaid organization, its credit quota, and the month in which it was last refreshed."""

    __tablename__ = "prepaid_organizations"

    organization_id: Mapped[uuid.UUID] = mapped_column(
        ForeignKey("organizations.id"), primary_key=True
    )
    quota_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("quotas.id"), unique=True)
    month: Mapped[date]


Document = dict[str, Any]


def rules_document(rules: PlanRules) -> Document:
    """Convert rules to a document in a fixed order, so that equal rules give equal documents."""
    return {
        "allowances": [
            asdict(each.selector) | {"token_count": each.token_count}
            for each in sorted(rules.allowances, key=lambda each: each.selector.order)
        ],
        "tiered_prices": [
            asdict(each.selector)
            | {
                "kind": each.kind,
                "steps": [asdict(step) for step in each.steps],
            }
            for each in sorted(rules.tiered_prices, key=lambda each: each.selector.order)
        ],
        "commitment_picos": rules.commitment_picos,
    }


def rules_of(document: Document) -> PlanRules:
    return PlanRules(
        tuple(
            Allowance(_selector_of(each), each["token_count"]) for each in document["allowances"]
        ),
        tuple(
            TieredPrice(
                LineKind(each["kind"]),
                _selector_of(each),
                tuple(PriceStep(**step) for step in each["steps"]),
            )
            for each in document["tiered_prices"]
        ),
        document["commitment_picos"],
    )


def _selector_of(document: Document) -> Selector:
    kind, tier = document["token_kind"], document["tier"]
    return Selector(
        document["model"],
        None if kind is None else TokenKind(kind),
        None if tier is None else ServiceTier(tier),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """One version of a plan. Versions are immutable; customers keep the one they were assigned."""

    id: int
    name: str
    version: int
    currency_code: str
    rules: PlanRules
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Assignment:
    """Plan of an organization from `first_month` on. `plan` None means no plan."""

    id: int
    organization_id: uuid.UUID
    first_month: date
    plan: Plan | None
    assigned_by: str
    created_at: datetime


async def create_plan(
    session: AsyncSession, *, name: str, currency_code: str = "USD", rules: PlanRules, actor: str
) -> tuple[Plan, bool]:
    """Create a plan or its next version, unless the latest version has these rules already.

    Returns the version, and True if it existed. Customers keep their assigned version. Raises:
    InvalidValue; AlreadyExists after a concurrent creation.
    """
    document = rules_document(rules)
    latest = next(iter(await _plans(session, checked_name(name))), None)
    if latest is not None and (latest.currency_code, latest.rules) == (
        checked_currency(currency_code),
        document,
    ):
        return _plan(latest), True
    values = {
        "name": name,
        "version": latest.version + 1 if latest else 1,
        "rules": Jsonb(document),
    }
    making = insertion(
        "plan_versions", values | {"currency_code": checked_currency(currency_code)}
    ).on_conflict_do_nothing()
    made = (await session.execute(making.returning(text("*")))).one_or_none()
    if made is None:
        raise AlreadyExists("plan", name, "in another version that was just created: call again")
    before = None if latest is None else snapshot(latest)
    await record_change(session, actor, "plan.create", name, before=before, after=snapshot(made))
    return _plan(made), False


async def list_plans(session: AsyncSession, *, name: str = "") -> list[Plan]:
    """List plan versions, or those of one plan, by name with the latest version first."""
    return [_plan(row) for row in await _plans(session, name)]


async def find_plan(session: AsyncSession, name: str, version: int = 0) -> Plan:
    """Look up a version of a plan; 0 means the latest. Raises: NotFound."""
    if not (rows := await _plans(session, name, version)):
        raise NotFound("plan", f"{name} version {version}" if version else name)
    return _plan(rows[0])


async def assign_plan(
    session: AsyncSession,
    *,
    organization: str,
    plan: str,
    version: int = 0,
    first_month: date | None = None,
    actor: str,
) -> tuple[Assignment, bool]:
    """Assign a plan from a month on, by default the present one.

    An empty `plan` means no plan. Earlier months keep theirs, as do later months with their own
    assignment. Also returns whether it was assigned already. Raises: NotFound; InvalidValue;
    MonthClosed if an affected month is closed or closing.
    """
    owner = await find_organization(session, organization)
    if plan:
        await check_open(session, owner)
    chosen = await find_plan(session, plan, version) if plan else None
    month = await current_month(session) if first_month is None else month_of(first_month)
    await share_posting_locks(session, (owner.id,))
    # Serialized with `set_prepaid`: a prepaid organization cannot have a plan.
    await lock_subject(session, QuotaSubject.ORGANIZATION, owner.id)
    if (
        closed := await session.scalar(LAST_CLOSED, {"organization_id": owner.id, "month": month})
    ) is not None:
        raise MonthClosed(owner.id, closed)
    if chosen is not None and chosen.currency_code != owner.currency_code:
        raise InvalidValue(
            "plan",
            f"{plan} is in {chosen.currency_code}, and {owner.name} is billed in"
            f" {owner.currency_code}",
        )
    if (
        chosen is not None
        and chosen.rules != NO_PLAN
        and await session.get(PrepaidOrganization, owner.id) is not None
    ):
        remedy = (
            f"{owner.name} is prepaid only, and the lines of {plan} are known only at the month's"
            " end: end that first"
        )
        raise InvalidValue("plan", remedy)
    before = await _latest(session, owner.id, month)
    chosen_id = None if chosen is None else chosen.id
    if before is not None and before.first_month == month and before.plan_version_id == chosen_id:
        return await _assignment(session, before), True
    values = {
        "organization_id": owner.id,
        "first_month": month,
        "plan_version_id": chosen_id,
        "assigned_by": actor,
    }
    made = (await session.execute(insertion("plan_assignments", values).returning(text("*")))).one()
    await record_change(
        session,
        actor,
        "plan.assign",
        str(owner.id),
        before=None if before is None else snapshot(before),
        after=snapshot(made),
    )
    return await _assignment(session, made), False


async def list_assignments(
    session: AsyncSession,
    *,
    name: str = "",
    organization: str = "",
    page_size: int = PAGE_SIZE,
    page_token: str = "",
) -> tuple[list[Assignment], str]:
    """List a page of the assignments of one organization or all, or only those of a plan.

    Those that were replaced are left out. Returns the token of the next page too. Raises: NotFound,
    InvalidValue.
    """
    check_page_size(page_size)
    owner_id = (await find_organization(session, organization)).id if organization else None
    after: Sequence[object] = FIRST_ID, "-infinity"
    if page_token:
        after = page_values(page_token, uuid.UUID, date.fromisoformat)
    requested = {
        "first_organization": owner_id or FIRST_ID,
        "last_organization": owner_id or LAST_ID,
        "name": name,
        "row_count": page_size + 1,
        **dict(zip(("after_organization", "after_month"), after, strict=True)),
    }
    rows = (await session.execute(ASSIGNED_PAGE, requested)).all()
    ids = list({each.plan_version_id for each in rows if each.plan_version_id})
    plans = {row.id: _plan(row) for row in await session.execute(PLANS_OF_PAGE, {"ids": ids})}
    shown = [
        record_of(Assignment, each, plan=plans.get(each.plan_version_id))
        for each in rows[:page_size]
    ]
    if len(rows) <= page_size:
        return shown, ""
    return shown, token_of(shown[-1].organization_id, shown[-1].first_month)


async def plan_in_force(
    session: AsyncSession, organization_id: uuid.UUID, month: date
) -> Plan | None:
    """Look up an organization's plan in a month; None if it has none."""
    row = await _latest(session, organization_id, month)
    return None if row is None else (await _assignment(session, row)).plan


async def has_plan_from(session: AsyncSession, organization_id: uuid.UUID, month: date) -> str:
    """Return the name of a plan with rules that applies from a month on; empty if there is none."""
    months = (
        row.first_month
        for row in await session.execute(ASSIGNED, {"organization_id": organization_id})
    )
    for each in (month, *(later for later in months if later > month)):
        plan = await plan_in_force(session, organization_id, each)
        if plan is not None and plan.rules != NO_PLAN:
            return plan.name
    return ""


async def _latest(
    session: AsyncSession, organization_id: uuid.UUID, month: date
) -> Row[Any] | None:
    rows = (await session.execute(ASSIGNED, {"organization_id": organization_id})).all()
    return next((row for row in reversed(rows) if row.first_month <= month), None)


async def _assignment(session: AsyncSession, row: Row[Any]) -> Assignment:
    plan = (
        _plan((await _plans(session, plan_id=row.plan_version_id))[0])
        if row.plan_version_id
        else None
    )
    return record_of(Assignment, row, plan=plan)


async def _plans(
    session: AsyncSession, name: str = "", version: int = 0, plan_id: int = 0
) -> Sequence[Row[Any]]:
    """Query plan versions; the latest of each plan comes first."""
    return (await session.execute(PLANS, {"id": plan_id, "name": name, "version": version})).all()


def _plan(row: Row[Any]) -> Plan:
    return record_of(Plan, row, rules=rules_of(row.rules))
