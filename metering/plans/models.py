"""The tables of plans, of prepaid credit, and of organizations that pay in advance. All but the last are append-only (triggers)."""

from __future__ import annotations

import uuid
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from metering.core.models import Base

MONTH_IS_WHOLE = "extract(day FROM {}) = 1"


class PlanVersion(Base):
    """Rules of a plan, as `plan_admin.py` writes them. Another set of rules is another version."""

    __tablename__ = "plan_versions"
    __table_args__ = (
        UniqueConstraint("name", "version"),
        CheckConstraint("name ~ '^[a-z][a-z0-9-]{0,62}$'", name="name_form"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    name: Mapped[str]
    version: Mapped[int]
    currency_code: Mapped[str]
    rules: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class PlanAssignment(Base):
    """Which plan an organization has from a month on, until the next one; none for no plan. Of two for a month the later counts."""

    __tablename__ = "plan_assignments"
    __table_args__ = (
        CheckConstraint(MONTH_IS_WHOLE.format("first_month"), name="whole_month"),
        Index("ix_plan_assignments_organization_id_first_month", "organization_id", "first_month", "id"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    first_month: Mapped[date]
    plan_version_id: Mapped[int | None] = mapped_column(ForeignKey("plan_versions.id"))
    assigned_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class CreditGrant(Base):
    """Credit that an organization may use for what is billed in some months, the last one included."""

    __tablename__ = "credit_grants"
    __table_args__ = (
        CheckConstraint("amount_picos > 0", name="more_than_nothing"),
        CheckConstraint(
            f"{MONTH_IS_WHOLE.format('first_month')} AND {MONTH_IS_WHOLE.format('last_month')} AND first_month <= last_month",
            name="whole_months",
        ),
        Index("ix_credit_grants_organization_id", "organization_id"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    currency_code: Mapped[str]
    amount_picos: Mapped[int]
    first_month: Mapped[date]
    last_month: Mapped[date]
    reason: Mapped[str]
    granted_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class CreditApplication(Base):
    """What of a grant paid for a month, written when that is closed. Never more than was granted (trigger)."""

    __tablename__ = "credit_applications"
    __table_args__ = (
        UniqueConstraint("grant_id", "billing_month"),
        CheckConstraint("amount_picos > 0", name="more_than_nothing"),
        CheckConstraint(MONTH_IS_WHOLE.format("billing_month"), name="whole_month"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    grant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("credit_grants.id"))
    billing_month: Mapped[date]
    amount_picos: Mapped[Decimal]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class PrepaidOrganization(Base):
    """An organization that pays in advance: which quota keeps it to its credit, and for which month that was last worked out."""

    __tablename__ = "prepaid_organizations"
    __table_args__ = (CheckConstraint(MONTH_IS_WHOLE.format("month"), name="whole_month"),)

    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"), primary_key=True)
    quota_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("quotas.id"), unique=True)
    month: Mapped[date]
