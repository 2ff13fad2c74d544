"""Rentals of replicas: what a customer agrees with one of its end users, for resale statements.

A rental is a number of replicas of a model from one whole second to another, or open. It starts no
replica and has no cost at Weir. Each second of each replica is on the end user's statement
(`resale.py`), at the customer's price per hour that is in force when the second starts. So nothing
of a closed month may change: a rental neither starts nor ends in one.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import ForeignKey, Identity, Select, func, or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, NotFound
from metering.core.models import Base, Organization, QuotaSubject, UsageSubject
from metering.core.pages import ROW_ID_MAX, check_page_size, page_token, page_values
from metering.ledger.ledger import MonthState, month_end, take_posting_lock
from metering.pricing.prices import checked_model
from metering.pricing.resale_prices import resale_price_at
from metering.store.db import database_now
from metering.tenants.tenants import as_uuid, check_open
from metering.tenants.usage_subjects import checked_end_user, create_usage_subject

REPLICAS_MAX = 1000  # more is a mistake
TIME_MIN, TIME_MAX = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)

LAST_CLOSED = text(f"""
SELECT max(month)
FROM billing_months
WHERE organization_id = :organization_id AND state = '{MonthState.CLOSED}'
""")


class ReplicaRental(Base):
    """Rental of replicas of a model to an end user; `ends_at` is None while it is open.

    Only the end changes. A rental that ends when it starts is cancelled.
    """

    __tablename__ = "replica_rentals"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    end_user_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("usage_subjects.id"))
    model: Mapped[str]
    replica_count: Mapped[int]
    starts_at: Mapped[datetime]
    ends_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


@dataclass(frozen=True, slots=True)
class RentalTerms:
    """Terms of a new rental.

    `starts_at` None means with the next second, `ends_at` None that it is open.
    """

    end_user: str
    model: str
    replica_count: int
    starts_at: datetime | None = None
    ends_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ListedRental:
    """A rental with the name of its end user, which is empty if it was erased."""

    rental: ReplicaRental
    end_user: str


async def rent_replicas(
    session: AsyncSession, owner: Organization, terms: RentalTerms, *, actor: str
) -> ReplicaRental:
    """Record a rental. Raises: InvalidValue; AlreadyExists if it overlaps with another one."""
    model = checked_model(terms.model)
    if not (name := checked_end_user(terms.end_user)):
        raise InvalidValue("end_user", "is required: the name that requests give")
    if not 1 <= terms.replica_count <= REPLICAS_MAX:
        raise InvalidValue(
            "replica_count", f"must be between 1 and {REPLICAS_MAX}, got {terms.replica_count}"
        )
    await check_open(session, owner)
    await take_posting_lock(session, owner.id)  # against a close
    starts_at = await _moment(session, owner.id, "start_time", terms.starts_at)
    if terms.starts_at is None:  # a price that was set in this second is in force in the next one
        starts_at += timedelta(seconds=1)
    ends_at = None
    if terms.ends_at is not None:
        ends_at = await _moment(session, owner.id, "end_time", terms.ends_at)
        if ends_at <= starts_at:
            raise InvalidValue(
                "end_time", f"must be after the start, {time_text(starts_at)}, or empty: open"
            )
    own = await resale_price_at(session, owner.id, model, starts_at)
    price = own or await resale_price_at(session, owner.id, "", starts_at)
    if price is None or not price.replica_hour_picos:
        raise InvalidValue(
            "model",
            f"{model} has no price per hour of a replica at {time_text(starts_at)}: set a resale"
            " price with one, or let the rental start when there is one",
        )
    end_user, _ = await create_usage_subject(session, owner.id, QuotaSubject.END_USER, "", name)
    values = {
        "organization_id": owner.id,
        "end_user_id": end_user.id,
        "model": model,
        "replica_count": terms.replica_count,
        "starts_at": starts_at,
        "ends_at": ends_at,
    }
    rental = (
        await session.scalars(insert(ReplicaRental).values(values).returning(ReplicaRental))
    ).one()
    await _refuse_overlap(session, rental)
    await record_change(session, actor, "rental.create", str(rental.id), after=snapshot(rental))
    return rental


async def end_rental(
    session: AsyncSession,
    owner: Organization,
    rental_id: int,
    ends_at: datetime | None,
    *,
    actor: str,
) -> ReplicaRental:
    """Set the end of a rental; None means now, unless it has ended. The start itself cancels it.

    Raises: NotFound; InvalidValue for a bad time, or an end in a closed month; AlreadyExists if it
    would overlap with another one.
    """
    await take_posting_lock(session, owner.id)
    rental = await find_rental(session, owner.id, rental_id)
    closed_until = await _closed_until(session, owner.id)
    if closed_until is not None and rental.ends_at is not None and rental.ends_at < closed_until:
        raise InvalidValue(
            "rental_id",
            f"{rental.id} ended at {time_text(rental.ends_at)}, in a month that is closed and never"
            " changes: record another rental instead",
        )
    now = await database_now(session)
    if ends_at is None and rental.ends_at is not None and rental.ends_at <= now:
        return rental
    end = await _moment(session, owner.id, "end_time", ends_at)
    if ends_at is None and rental.starts_at <= now + timedelta(seconds=1):  # begun just before
        end = max(end, rental.starts_at)
    if end < rental.starts_at:
        raise InvalidValue(
            "end_time",
            f"must not be before the start, {time_text(rental.starts_at)}, which cancels the"
            " rental",
        )
    before = snapshot(rental)
    rental.ends_at = end
    await session.flush()
    await _refuse_overlap(session, rental)
    if (after := snapshot(rental)) != before:
        await record_change(
            session, actor, "rental.end", str(rental.id), before=before, after=after
        )
    return rental


async def find_rental(
    session: AsyncSession, organization_id: uuid.UUID, rental_id: int
) -> ReplicaRental:
    """Look up a rental of an organization by its number. Raises: NotFound."""
    rental = (
        await session.get(ReplicaRental, rental_id, populate_existing=True)
        if 0 < rental_id <= ROW_ID_MAX
        else None
    )
    if rental is None or rental.organization_id != organization_id:
        raise NotFound("rental", str(rental_id))
    return rental


async def list_rentals(
    session: AsyncSession,
    owner: Organization,
    *,
    end_user: str = "",
    page_size: int = 100,
    page_token: str = "",
) -> tuple[Sequence[ListedRental], str]:
    """List a page of rentals, the latest recorded first: of one end user, by name or id, or of all.

    Returns the token of the next page too, empty on the last one. Raises: InvalidValue, NotFound.
    """
    check_page_size(page_size)
    query = listed().where(ReplicaRental.organization_id == owner.id)
    if end_user:
        named = select(UsageSubject.id).where(
            UsageSubject.organization_id == owner.id,
            UsageSubject.kind == QuotaSubject.END_USER,
            or_(UsageSubject.name == end_user, UsageSubject.id == as_uuid(end_user)),
        )
        if not (ids := (await session.scalars(named)).all()):
            raise NotFound("end user", f"{end_user} of {owner.name}")
        query = query.where(ReplicaRental.end_user_id.in_(ids))
    if page_token:
        query = query.where(ReplicaRental.id < page_values(page_token, int)[0])
    rows = await session.execute(query.order_by(ReplicaRental.id.desc()).limit(page_size + 1))
    found = [ListedRental(rental, name or "") for rental, name in rows]
    page = found[:page_size]
    return page, token_of(page[-1]) if len(found) > page_size else ""


async def show_rental(session: AsyncSession, rental: ReplicaRental) -> ListedRental:
    """Return a rental with the name of its end user."""
    name = await session.scalar(
        select(UsageSubject.name).where(UsageSubject.id == rental.end_user_id)
    )
    return ListedRental(rental, name or "")


def listed() -> Select[ReplicaRental, str | None]:
    return select(ReplicaRental, UsageSubject.name).join(
        UsageSubject, UsageSubject.id == ReplicaRental.end_user_id
    )


def token_of(listed: ListedRental) -> str:
    return page_token(listed.rental.id)


def time_text(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


async def _closed_until(session: AsyncSession, organization_id: uuid.UUID) -> datetime | None:
    """Return the end of the last closed month; None if none is closed."""
    month = await session.scalar(LAST_CLOSED, {"organization_id": organization_id})
    return None if month is None else month_end(month)


async def _moment(
    session: AsyncSession, organization_id: uuid.UUID, field: str, at: datetime | None
) -> datetime:
    """Validate a time; None means this second. Raises: InvalidValue."""
    if at is None:
        return (await database_now(session)).replace(microsecond=0)
    if not TIME_MIN <= at <= TIME_MAX:
        raise InvalidValue(field, f"must be a time from {TIME_MIN:%Y} to {TIME_MAX:%Y}")
    if at.microsecond:
        raise InvalidValue(field, f"must be a whole second, got {at.isoformat()}")
    closed_until = await _closed_until(session, organization_id)
    if closed_until is not None and at < closed_until:
        raise InvalidValue(
            field,
            f"must not be before {time_text(closed_until)}, got {time_text(at)}: the months before"
            " are closed and never change",
        )
    return at


async def _refuse_overlap(session: AsyncSession, rental: ReplicaRental) -> None:
    """Raise AlreadyExists if the end user has another rental of the model at the same time."""
    if rental.ends_at == rental.starts_at:
        return
    later = ReplicaRental.ends_at.is_(None) | (ReplicaRental.ends_at > rental.starts_at)
    query = select(ReplicaRental).where(
        ReplicaRental.organization_id == rental.organization_id,
        ReplicaRental.end_user_id == rental.end_user_id,
        ReplicaRental.model == rental.model,
        ReplicaRental.id != rental.id,
        later,
        ReplicaRental.ends_at.is_distinct_from(ReplicaRental.starts_at),
    )
    if rental.ends_at is not None:
        query = query.where(ReplicaRental.starts_at < rental.ends_at)
    other = await session.scalar(query.order_by(ReplicaRental.starts_at).limit(1))
    if other is not None:
        until = "open" if other.ends_at is None else f"until {time_text(other.ends_at)}"
        raise AlreadyExists(
            "rental",
            str(other.id),
            f"for this end user and model at that time, from {time_text(other.starts_at)}, {until}:"
            " end it first, or choose another time",
        )
