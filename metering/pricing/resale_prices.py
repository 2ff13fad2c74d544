"""Resale prices: what a customer charges its own end users, by model and from a time on.

A version is a markup on Weir's cost in thousandths, prices of its own for some kinds of token, a
price per request, and one per hour of a rented replica (`invoicing/rentals.py`). A version without
a model is for all models that have none of their own; usage without any version is charged at cost.
As with Weir's prices, a request pays the version in force when it starts, and versions never change
and never begin in the past. They affect statements only (`invoicing/resale.py`), never what the
customer pays.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ForeignKey, Identity, func, select, text, tuple_
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, aliased, mapped_column

from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, NotFound
from metering.core.models import Base, Organization, record_of, values_of
from metering.core.pages import check_page_size, page_token, page_values, utc_time
from metering.pricing.prices import (
    MULTIPLIER_MAX_MILLI,
    MULTIPLIER_SCALE,
    PRICE_MAX_PICOS,
    RATES,
    beginning,
    checked_model,
)

REQUEST_MAX_PICOS = 10**15  # 1,000 units per request; more is a mistake in the unit
REPLICA_HOUR_MAX_PICOS = 10**17  # 100,000 units per hour


class ResalePrice(Base):
    """Version of a customer's resale price. `model` is empty for all models.

    A price per token that is None means the markup; for reasoning, the own price of output if there
    is one. A `withdrawn` version only ends the price: the one for all models, or the cost, applies
    from then on.
    """

    __tablename__ = "resale_prices"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    model: Mapped[str]
    markup_milli: Mapped[int]
    input_picos_per_token: Mapped[int | None]
    cached_input_picos_per_token: Mapped[int | None]
    output_picos_per_token: Mapped[int | None]
    reasoning_picos_per_token: Mapped[int | None]
    embedding_picos_per_token: Mapped[int | None]
    request_picos: Mapped[int]
    replica_hour_picos: Mapped[int] = mapped_column(server_default="0")
    withdrawn: Mapped[bool] = mapped_column(server_default=text("false"))
    effective_at: Mapped[datetime]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


@dataclass(frozen=True, slots=True, kw_only=True)
class ResaleTerms:
    """Terms of a resale price by the columns of `ResalePrice`. None: not given."""

    model: str = ""
    markup_milli: int | None = None
    input_picos_per_token: int | None = None
    cached_input_picos_per_token: int | None = None
    output_picos_per_token: int | None = None
    reasoning_picos_per_token: int | None = None
    embedding_picos_per_token: int | None = None
    request_picos: int | None = None
    replica_hour_picos: int | None = None
    withdrawn: bool = False
    effective_at: datetime | None = None

    def check(self) -> None:
        """Raise InvalidValue for the first term that is out of range, or if there is none."""
        maxima = {
            "markup_milli": (MULTIPLIER_MAX_MILLI, "thousandths of the cost: 1250 adds a quarter"),
            **dict.fromkeys(RATES, (PRICE_MAX_PICOS, "picos")),
            "request_picos": (REQUEST_MAX_PICOS, "picos"),
            "replica_hour_picos": (REPLICA_HOUR_MAX_PICOS, "picos"),
        }
        given = {name: each for name in maxima if (each := getattr(self, name)) is not None}
        if self.model:
            checked_model(self.model)
        for name, value in given.items():
            maximum, unit = maxima[name]
            if not 0 <= value <= maximum:
                raise InvalidValue(name, f"must be between 0 and {maximum} {unit}, got {value}")
        if self.withdrawn and given:
            raise InvalidValue("withdrawn", f"ends the price: leave out {next(iter(given))}")
        if not self.withdrawn and not given:
            raise InvalidValue("markup_milli", "is required, unless a price is given")


async def set_resale_price(
    session: AsyncSession, owner: Organization, terms: ResaleTerms, *, actor: str
) -> ResalePrice:
    """Add a version to a customer's resale prices.

    Raises: InvalidValue, also for a past time; AlreadyExists if a version of the model starts then;
    NotFound if there is nothing to withdraw.
    """
    terms.check()
    begins = await beginning(session, terms.effective_at)
    values = values_of(ResaleTerms, whole_terms(terms)) | {
        "organization_id": owner.id,
        "effective_at": begins,
    }
    if terms.withdrawn and await resale_price_at(session, owner.id, terms.model, begins) is None:
        of = terms.model or "all models"
        raise NotFound("resale price", f"{of} of {owner.name} at {begins.isoformat()}")
    statement = insert(ResalePrice).values(values).on_conflict_do_nothing().returning(ResalePrice)
    if (price := await session.scalar(statement)) is None:
        raise AlreadyExists(
            "resale price",
            f"{terms.model or 'all models'} from {begins.isoformat()}",
            "and never changes: choose another time",
        )
    await record_change(session, actor, "resale_price.set", str(price.id), after=snapshot(price))
    return price


async def resale_price_at(
    session: AsyncSession, organization_id: uuid.UUID, model: str, at: datetime
) -> ResalePrice | None:
    """Find the version of a model, or of all models, that is in force at a time, if any."""
    price = await session.scalar(
        select(ResalePrice)
        .where(
            ResalePrice.organization_id == organization_id,
            ResalePrice.model == model,
            ResalePrice.effective_at <= at,
        )
        .order_by(ResalePrice.effective_at.desc())
        .limit(1)
    )
    return None if price is None or price.withdrawn else price


async def prices_in_force(
    session: AsyncSession, organization_ids: Collection[uuid.UUID]
) -> Sequence[ResalePrice]:
    """List the versions in force of these organizations, by organization and model."""
    key = ResalePrice.organization_id, ResalePrice.model
    query = (
        select(ResalePrice)
        .where(
            ResalePrice.organization_id.in_(organization_ids),
            ResalePrice.effective_at <= func.now(),
        )
        .ext(distinct_on(*key))
        .order_by(*key, ResalePrice.effective_at.desc())
    )
    return [each for each in await session.scalars(query) if not each.withdrawn]


def whole_terms(terms: ResalePrice | ResaleTerms) -> ResaleTerms:
    """Return the terms of a price with the values that terms not given have, without its time."""
    return record_of(
        ResaleTerms,
        terms,
        markup_milli=MULTIPLIER_SCALE if terms.markup_milli is None else terms.markup_milli,
        request_picos=terms.request_picos or 0,
        replica_hour_picos=terms.replica_hour_picos or 0,
        effective_at=None,
    )


async def get_resale_price(session: AsyncSession, version: int) -> ResalePrice:
    """Look up a version by its number. Raises: NotFound."""
    if (price := await session.get(ResalePrice, version)) is None:
        raise NotFound("resale price", str(version))
    return price


async def list_resale_prices(
    session: AsyncSession,
    organization_id: uuid.UUID,
    *,
    history: bool,
    page_size: int = 100,
    page_token: str = "",
) -> tuple[Sequence[ResalePrice], str]:
    """List a page of the versions in force by model, or with `history` of all, by model and time.

    Returns the token of the next page too, empty on the last one. Raises: InvalidValue.
    """
    check_page_size(page_size)
    order = ResalePrice.model, ResalePrice.effective_at
    query = select(ResalePrice).where(ResalePrice.organization_id == organization_id)
    if not history:
        later = aliased(ResalePrice)
        replaced = select(later.id).where(
            later.organization_id == organization_id,
            later.model == ResalePrice.model,
            later.effective_at > ResalePrice.effective_at,
            later.effective_at <= func.now(),
        )
        query = query.where(
            ResalePrice.effective_at <= func.now(),
            ResalePrice.withdrawn.is_(False),
            ~replaced.exists(),
        )
    if page_token:
        query = query.where(tuple_(*order) > tuple_(*page_values(page_token, str, utc_time)))
    found = (await session.scalars(query.order_by(*order).limit(page_size + 1))).all()
    page = found[:page_size]
    rest = token_of(page[-1]) if len(found) > page_size else ""
    return page, rest


def token_of(price: ResalePrice) -> str:
    return page_token(price.model, utc_time(price.effective_at.isoformat()))
