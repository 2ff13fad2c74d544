"""Plans and their assignments: versions of rules, stored as JSON, and the plan of an organization from a month on.

Neither is ever changed. For a close, the rules of `plan_in_force` are what `plans.plan_lines` needs. Functions
take a session and never commit; every change writes the audit log. Months are given by their first day.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass
from datetime import date, datetime
from typing import Any

from sqlalchemy import ForeignKey, Identity, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, MonthClosed, NotFound
from metering.core.models import Base, Organization, ServiceTier, TokenKind, record_of
from metering.core.money import checked_currency
from metering.ledger.ledger import BillingMonth, MonthState, current_month, month_of, share_lanes
from metering.plans.plans import Allowance, LineKind, PlanRules, PriceStep, Selector, TieredPrice
from metering.tenants.tenants import checked_name, find_organization


class PlanVersion(Base):
    """Rules of a plan, as `plan_admin.py` writes them. Another set of rules is another version."""

    __tablename__ = "plan_versions"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    name: Mapped[str]
    version: Mapped[int]
    currency_code: Mapped[str]
    rules: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class PlanAssignment(Base):
    """Which plan an organization has from a month on, until the next one; none for no plan. Of two for a month the later counts."""

    __tablename__ = "plan_assignments"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    first_month: Mapped[date]
    plan_version_id: Mapped[int | None] = mapped_column(ForeignKey("plan_versions.id"))
    assigned_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class PrepaidOrganization(Base):
    """An organization that pays in advance: which quota keeps it to its credit, and for which month that was last worked out."""

    __tablename__ = "prepaid_organizations"

    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"), primary_key=True)
    quota_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("quotas.id"), unique=True)
    month: Mapped[date]


Document = dict[str, Any]


def rules_document(rules: PlanRules) -> Document:
    """The rules, each in a fixed order: the same rules are the same document, however they were given."""
    return {
        "allowances": [
            asdict(each.selector) | {"token_count": each.token_count}
            for each in sorted(rules.allowances, key=lambda each: each.selector.order)
        ],
        "tiered_prices": [
            asdict(each.selector) | {"kind": each.kind, "steps": [asdict(step) for step in each.steps]}
            for each in sorted(rules.tiered_prices, key=lambda each: each.selector.order)
        ],
        "commitment_picos": rules.commitment_picos,
    }


def rules_of(document: Document) -> PlanRules:
    return PlanRules(
        tuple(Allowance(_selector_of(each), each["token_count"]) for each in document["allowances"]),
        tuple(
            TieredPrice(LineKind(each["kind"]), _selector_of(each), tuple(PriceStep(**step) for step in each["steps"]))
            for each in document["tiered_prices"]
        ),
        document["commitment_picos"],
    )


def _selector_of(document: Document) -> Selector:
    kind, tier = document["token_kind"], document["tier"]
    return Selector(document["model"], None if kind is None else TokenKind(kind), None if tier is None else ServiceTier(tier))


NO_PLAN = PlanRules()


@dataclass(frozen=True, slots=True)
class Plan:
    """One version of a plan."""

    id: int
    name: str
    version: int
    currency_code: str
    rules: PlanRules
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Assignment:
    """The plan of an organization from a month on; None for no plan."""

    id: int
    organization_id: uuid.UUID
    first_month: date
    plan: Plan | None
    assigned_by: str
    created_at: datetime


async def create_plan(
    session: AsyncSession, *, name: str, currency_code: str = "USD", rules: PlanRules, actor: str
) -> tuple[Plan, bool]:
    """A plan, or the next version of one; and whether its latest version says the same, which is then answered.

    Customers keep the version that they were assigned. Raises: InvalidValue; AlreadyExists if somebody else makes one this moment.
    """
    values: dict[str, object] = {"currency_code": checked_currency(currency_code), "rules": rules_document(rules)}
    latest = await session.scalar(
        select(PlanVersion).where(PlanVersion.name == checked_name(name)).order_by(PlanVersion.version.desc()).limit(1)
    )
    if latest is not None and (latest.currency_code, latest.rules) == (values["currency_code"], values["rules"]):
        return _plan(latest), True
    values |= {"name": name, "version": 1 if latest is None else latest.version + 1}
    made = await session.scalar(insert(PlanVersion).values(values).on_conflict_do_nothing().returning(PlanVersion))
    if made is None:
        raise AlreadyExists("plan", name, "in another version that was made this moment: call again")
    before = None if latest is None else snapshot(latest)
    await record_change(session, actor=actor, action="plan.create", subject_id=name, before=before, after=snapshot(made))
    return _plan(made), False


async def list_plans(session: AsyncSession, *, name: str = "") -> list[Plan]:
    """All versions, or those of one plan, by name, the latest version first."""
    query = select(PlanVersion).order_by(PlanVersion.name, PlanVersion.version.desc())
    return [_plan(row) for row in await session.scalars(query.where(PlanVersion.name == name) if name else query)]


async def find_plan(session: AsyncSession, name: str, version: int = 0) -> Plan:
    """A version of a plan, 0 for the latest. Raises: NotFound."""
    query = select(PlanVersion).where(PlanVersion.name == name).order_by(PlanVersion.version.desc()).limit(1)
    row = await session.scalar(query.where(PlanVersion.version == version) if version else query)
    if row is None:
        raise NotFound("plan", f"{name} version {version}" if version else name)
    return _plan(row)


async def assign_plan(
    session: AsyncSession, *, organization: str, plan: str, version: int = 0, first_month: date | None = None, actor: str
) -> tuple[Assignment, bool]:
    """Give an organization a plan from a month on, by default this one; and whether it had it from then on already.

    plan: empty for none. Months before stay as they are; an assignment of a later month stays too. Raises: NotFound, InvalidValue,
    MonthClosed if that month is closed or being closed.
    """
    owner = await find_organization(session, organization)
    chosen = await find_plan(session, plan, version) if plan else None
    month = await current_month(session) if first_month is None else month_of(first_month)
    await share_lanes(session, (owner.id,))
    # In turn with whoever makes it pay in advance, which goes with no plan.
    await session.execute(select(Organization.id).where(Organization.id == owner.id).with_for_update(key_share=True))
    if (closed := await _closed_from(session, owner.id, month)) is not None:
        raise MonthClosed(owner.id, closed)
    if chosen is not None and chosen.currency_code != owner.currency_code:
        raise InvalidValue("plan", f"{plan} is in {chosen.currency_code}, and {owner.name} is billed in {owner.currency_code}")
    if chosen is not None and chosen.rules != NO_PLAN and await session.get(PrepaidOrganization, owner.id) is not None:
        remedy = f"{owner.name} is prepaid only, and what {plan} gives or asks is known at a month's end only: end that first"
        raise InvalidValue("plan", remedy)
    before = await _latest(session, owner.id, month)
    chosen_id = None if chosen is None else chosen.id
    if before is not None and before.first_month == month and before.plan_version_id == chosen_id:
        return await _assignment(session, before), True
    values = {"organization_id": owner.id, "first_month": month, "plan_version_id": chosen_id, "assigned_by": actor}
    made = (await session.scalars(insert(PlanAssignment).values(values).returning(PlanAssignment))).one()
    await record_change(
        session,
        actor=actor,
        action="plan.assign",
        subject_id=str(owner.id),
        before=None if before is None else snapshot(before),
        after=snapshot(made),
    )
    return await _assignment(session, made), False


async def list_assignments(session: AsyncSession, *, organization: str = "") -> list[Assignment]:
    """Of one organization or all: by organization, then month, without those that a later one for the same month replaced."""
    query = select(PlanAssignment).order_by(PlanAssignment.organization_id, PlanAssignment.first_month, PlanAssignment.id)
    if organization:
        query = query.where(PlanAssignment.organization_id == (await find_organization(session, organization)).id)
    last = {(row.organization_id, row.first_month): row for row in await session.scalars(query)}
    return [await _assignment(session, row) for row in last.values()]


async def plan_in_force(session: AsyncSession, organization_id: uuid.UUID, month: date) -> Plan | None:
    """The plan of an organization in a month; None for no plan."""
    row = await _latest(session, organization_id, month)
    return None if row is None else (await _assignment(session, row)).plan


async def has_plan_from(session: AsyncSession, organization_id: uuid.UUID, month: date) -> str:
    """The name of a plan with rules that an organization has in a month or any later one; empty if it has none."""
    rows = list(await session.scalars(select(PlanAssignment).where(PlanAssignment.organization_id == organization_id)))
    months = {month, *(row.first_month for row in rows if row.first_month > month)}
    for each in sorted(months):
        plan = await plan_in_force(session, organization_id, each)
        if plan is not None and plan.rules != NO_PLAN:
            return plan.name
    return ""


async def _latest(session: AsyncSession, organization_id: uuid.UUID, month: date) -> PlanAssignment | None:
    query = select(PlanAssignment).where(PlanAssignment.organization_id == organization_id, PlanAssignment.first_month <= month)
    row: PlanAssignment | None = await session.scalar(
        query.order_by(PlanAssignment.first_month.desc(), PlanAssignment.id.desc()).limit(1)
    )
    return row


async def _closed_from(session: AsyncSession, organization_id: uuid.UUID, month: date) -> date | None:
    """The last month from one on that is closed or being closed."""
    states = (MonthState.CLOSING, MonthState.CLOSED)
    query = select(func.max(BillingMonth.month)).where(
        BillingMonth.organization_id == organization_id, BillingMonth.month >= month, BillingMonth.state.in_(states)
    )
    found: date | None = await session.scalar(query)
    return found


async def _assignment(session: AsyncSession, row: PlanAssignment) -> Assignment:
    plan = None if row.plan_version_id is None else _plan(await session.get_one(PlanVersion, row.plan_version_id))
    return record_of(Assignment, row, plan=plan)


def _plan(row: PlanVersion) -> Plan:
    return record_of(Plan, row, rules=rules_of(row.rules))
