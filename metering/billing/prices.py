"""Price versions: what a model's tokens cost, and since when. A version is never changed; a correction is a later one.

Functions take a session and never commit. Time is the database's: `now` is the beginning of the transaction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Select, func, select
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.pricing import TokenPrices
from metering.errors import AlreadyExists, InvalidValue, NotFound, PriceMissing
from metering.models import PriceVersion
from metering.money import checked_currency
from metering.tenants.audit import record_change, snapshot

# As in "meta-llama/Llama-3.1-8B-Instruct" or "demo@2": nothing that a spreadsheet, a shell or a log would take for anything else.
MODEL_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,199}", re.ASCII)
PRICE_MAX_PICOS = 10**13  # 10 units per token; a request of 900,000 such tokens still fits a 64-bit cost


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """A price version with the model that it prices and its beginning."""

    model: str
    prices: TokenPrices
    effective_at: datetime


async def set_price(
    session: AsyncSession,
    *,
    model: str,
    currency_code: str = "USD",
    input_picos_per_token: int,
    cached_input_picos_per_token: int,
    output_picos_per_token: int,
    effective_at: datetime | None = None,
    actor: str,
) -> ModelPrice:
    """Add a version that holds from `effective_at` on, or from now.

    Raises: InvalidValue, also for a time that has passed; AlreadyExists for one at which another version begins.
    """
    rates = {
        "input_picos_per_token": input_picos_per_token,
        "cached_input_picos_per_token": cached_input_picos_per_token,
        "output_picos_per_token": output_picos_per_token,
    }
    for field, picos in rates.items():
        if not 0 <= picos <= PRICE_MAX_PICOS:
            raise InvalidValue(field, f"give 0 to {PRICE_MAX_PICOS} picos")
    now = (await session.scalars(select(func.now()))).one()
    if effective_at is not None and effective_at < now:
        raise InvalidValue("effective_time", f"past prices never change: give a time after {now.isoformat()}, or none for now")
    values = {"model": checked_model(model), "currency_code": checked_currency(currency_code), **rates}
    begins = now if effective_at is None else effective_at
    statement = insert(PriceVersion).values(**values, effective_at=begins).on_conflict_do_nothing().returning(PriceVersion)
    version = await session.scalar(statement)
    if version is None:
        raise AlreadyExists("price", f"{model} in {currency_code} from {begins.isoformat()}")
    await record_change(session, actor=actor, action="price.set", subject_id=str(version.id), before=None, after=snapshot(version))
    return _model_price(version)


async def price_in_force(session: AsyncSession, *, model: str, currency_code: str, at: datetime | None = None) -> TokenPrices:
    """The version that holds at a time, by default now. Raises: PriceMissing."""
    query = _select_in_force(at).where(PriceVersion.model == model, PriceVersion.currency_code == currency_code)
    if (version := await session.scalar(query)) is None:
        raise PriceMissing(model, currency_code)
    return token_prices(version)


async def get_price(session: AsyncSession, version: int) -> ModelPrice:
    """One version by its number. Raises: NotFound."""
    if (row := await session.get(PriceVersion, version)) is None:
        raise NotFound("price version", str(version))
    return _model_price(row)


async def list_current_prices(session: AsyncSession, *, currency_code: str | None = None) -> list[ModelPrice]:
    """The versions in force, by model and currency; only of one currency if it is given."""
    query = _select_in_force(None)
    if currency_code is not None:
        query = query.where(PriceVersion.currency_code == currency_code)
    return [_model_price(version) for version in await session.scalars(query)]


def token_prices(version: PriceVersion) -> TokenPrices:
    """The numbers of a version, to calculate with."""
    return TokenPrices(
        version=version.id,
        currency_code=version.currency_code,
        input_picos_per_token=version.input_picos_per_token,
        cached_input_picos_per_token=version.cached_input_picos_per_token,
        output_picos_per_token=version.output_picos_per_token,
    )


def checked_model(model: str) -> str:
    """A name that a model may have. Raises: InvalidValue."""
    if MODEL_FORM.fullmatch(model) is None:
        raise InvalidValue("model", "give 1 to 200 of letters, digits and . _ : @ / -, starting with a letter or digit")
    return model


def _select_in_force(at: datetime | None) -> Select[PriceVersion]:
    return (
        select(PriceVersion)
        .ext(distinct_on(PriceVersion.model, PriceVersion.currency_code))
        .where(PriceVersion.effective_at <= (func.now() if at is None else at))
        .order_by(PriceVersion.model, PriceVersion.currency_code, PriceVersion.effective_at.desc())
    )


def _model_price(version: PriceVersion) -> ModelPrice:
    return ModelPrice(model=version.model, prices=token_prices(version), effective_at=version.effective_at)
