"""Price versions: prices of a model's tokens for a customer and service tier, from a time on.

Versions are immutable; a correction is a later version. A version is part of the price list, or the
own price of one customer; `PriceBook` selects the version of a request. The prices of the batch
tier are the interactive ones times a multiplier that leaves no fraction of a pico. Functions take a
session and never commit. Time is the database's: `now` is the start of the transaction.
"""

from __future__ import annotations

import functools
import math
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from sqlalchemy import Select, and_, func, or_, select, true
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, NotFound, PriceMissing
from metering.core.models import Organization, PriceVersion, ServiceTier, TokenKind, record_of
from metering.core.money import checked_currency
from metering.store.db import database_now
from metering.tenants.tenants import find_organization

# By kind of token: SQL of the number of a usage event's tokens, and the name of their price.
COUNTS_OF_EVENT = {
    TokenKind.INPUT: ("input_token_count - cached_input_token_count", "input_picos_per_token"),
    TokenKind.CACHED_INPUT: ("cached_input_token_count", "cached_input_picos_per_token"),
    TokenKind.OUTPUT: (
        "billed_token_count - billed_reasoning_token_count",
        "output_picos_per_token",
    ),
    TokenKind.REASONING: ("billed_reasoning_token_count", "reasoning_picos_per_token"),
    TokenKind.EMBEDDING: ("embedding_token_count", "embedding_picos_per_token"),
}
# SQL for the price of each kind of token at price version p. Reasoning has the price of output
# unless the version states another one.
PRICES = {kind: f"p.{price}" for kind, (_, price) in COUNTS_OF_EVENT.items()} | {
    TokenKind.REASONING: "coalesce(p.reasoning_picos_per_token, p.output_picos_per_token)"
}
# Unit price at price version p of the kind of token that the SQL in braces gives.
PRICE_OF_KIND = "CASE {{}} {} END".format(
    " ".join(f"WHEN '{kind}' THEN {price}" for kind, price in PRICES.items())
)
# Columns of `TokenPrices` at price version p, in the order of its fields.
TOKEN_PRICES = f"""p.id AS version, p.currency_code,
    p.input_picos_per_token, p.cached_input_picos_per_token, p.output_picos_per_token,
    p.embedding_picos_per_token, {PRICES[TokenKind.REASONING]} AS reasoning_picos_per_token"""
# Join that turns each usage event into one row per kind of token.
TOKENS_BY_KIND = "LATERAL (VALUES {}) AS kind (token_kind, token_count)".format(
    ", ".join(f"('{kind}', {count})" for kind, (count, _) in COUNTS_OF_EVENT.items())
)

FIELD = "batch_multiplier_milli"  # name in the API
MULTIPLIER_SCALE = 1000  # multipliers are in thousandths
MULTIPLIER_MAX_MILLI = 1_000_000  # a factor of 1000; a larger one is a mistake in the unit
# Such as "meta-llama/Llama-3.1-8B-Instruct" or "demo@2": no characters that are special in a
# spreadsheet, a shell or a log.
MODEL_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,199}", re.ASCII)
# 10 units per token; a request of 900,000 such tokens still fits a 64-bit cost.
PRICE_MAX_PICOS = 10**13
RATES = (
    "input_picos_per_token",
    "cached_input_picos_per_token",
    "output_picos_per_token",
    "embedding_picos_per_token",
    "reasoning_picos_per_token",
)
_KEY = (
    PriceVersion.model,
    PriceVersion.currency_code,
    PriceVersion.organization_id,
    PriceVersion.tier,
)


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Prices of one version in picos (1e-12 of the currency unit) per token of each kind.

    `reasoning_picos_per_token` is the output price unless the version has its own.
    """

    version: int
    currency_code: str
    input_picos_per_token: int
    cached_input_picos_per_token: int
    output_picos_per_token: int
    embedding_picos_per_token: int = 0
    reasoning_picos_per_token: int = -1  # a negative number: as output

    def __post_init__(self) -> None:
        """Set the reasoning price to the output price if it is not given."""
        if self.reasoning_picos_per_token < 0:
            object.__setattr__(self, "reasoning_picos_per_token", self.output_picos_per_token)

    @property
    def dearest_output_picos_per_token(self) -> int:
        """Highest price of an output token, whether reasoning or not."""
        return max(self.output_picos_per_token, self.reasoning_picos_per_token)

    def cost_picos(
        self,
        input_token_count: int,
        cached_input_token_count: int,
        output_token_count: int,
        embedding_token_count: int = 0,
        reasoning_token_count: int = 0,
    ) -> int:
        """Compute the exact cost in picos.

        Cached tokens are part of the input and reasoning tokens part of the output; each kind is
        charged at its own price.
        """
        return (
            (input_token_count - cached_input_token_count) * self.input_picos_per_token
            + cached_input_token_count * self.cached_input_picos_per_token
            + (output_token_count - reasoning_token_count) * self.output_picos_per_token
            + reasoning_token_count * self.reasoning_picos_per_token
            + embedding_token_count * self.embedding_picos_per_token
        )

    def worst_cost_picos(self, input_token_count: int, output_token_count: int) -> int:
        """Compute the highest possible cost, whichever tokens are cached or reasoning."""
        each = max(self.input_picos_per_token, self.cached_input_picos_per_token)
        return input_token_count * each + output_token_count * self.dearest_output_picos_per_token


@functools.lru_cache(maxsize=4096)
def embedding_terms(prices: TokenPrices) -> TokenPrices:
    """Return prices for embedded input, which is charged the embedding price only."""
    each = prices.embedding_picos_per_token
    return replace(prices, input_picos_per_token=each, cached_input_picos_per_token=each)


# Model, currency, the organization's id as an integer (None for the list), and service tier.
PriceKey = tuple[str, str, int | None, str]


@dataclass(slots=True)
class PriceBook:
    """Prices in force at one time, from which the price of a request is chosen.

    A customer's own price takes precedence over the list's; within each, a tier without its own
    version uses the interactive one. A withdrawn own price is stored as None.
    """

    in_force: dict[PriceKey, TokenPrices | None] = field(default_factory=dict)

    def add(
        self,
        prices: TokenPrices,
        *,
        model: str,
        organization_id: uuid.UUID | None,
        tier: str,
        withdrawn: bool,
    ) -> None:
        owner = None if organization_id is None else organization_id.int
        self.in_force[model, prices.currency_code, owner, tier] = None if withdrawn else prices

    def find(
        self, model: str, currency_code: str, organization_id: uuid.UUID, tier: str
    ) -> TokenPrices | None:
        """Choose the price for a customer's request; None if there is none."""
        get = self.in_force.get
        for owner in (organization_id.int, None):
            for each in (
                (tier, ServiceTier.INTERACTIVE) if tier != ServiceTier.INTERACTIVE else (tier,)
            ):
                if (model, currency_code, owner, each) in self.in_force:
                    if (prices := get((model, currency_code, owner, each))) is not None:
                        return prices
                    break  # withdrawn: the list price applies
        return None


def multiplied_rates(rates: Sequence[int], multiplier_milli: int) -> list[int]:
    """Multiply prices by a multiplier in thousandths, exactly.

    Raises: InvalidValue if a fraction of a pico would be left; it names the nearest valid
    multipliers.
    """
    if not 0 <= multiplier_milli <= MULTIPLIER_MAX_MILLI:
        raise InvalidValue(FIELD, f"must be between 0 and {MULTIPLIER_MAX_MILLI} thousandths")
    step = math.lcm(*(MULTIPLIER_SCALE // math.gcd(rate, MULTIPLIER_SCALE) for rate in rates))
    if rest := multiplier_milli % step:
        below, above = multiplier_milli - rest, multiplier_milli - rest + step
        raise InvalidValue(
            FIELD,
            f"{multiplier_milli} thousandths of these prices are not whole picos: use {below} or"
            f" {above}, which is {below / MULTIPLIER_SCALE:g} or {above / MULTIPLIER_SCALE:g}",
        )
    return [rate * multiplier_milli // MULTIPLIER_SCALE for rate in rates]


Row = dict[str, object]  # column values of one version


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """A price version with its model, tier, customer and start.

    `organization_id` is None for the price list. `multiplier_milli` is the factor, in thousandths,
    on the interactive prices. A `withdrawn` version ends the customer's own price.
    """

    model: str
    prices: TokenPrices
    effective_at: datetime
    tier: ServiceTier = ServiceTier.INTERACTIVE
    organization_id: uuid.UUID | None = None
    multiplier_milli: int = MULTIPLIER_SCALE
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class CustomerPrice:
    """Price of a model and tier for one customer; `price` may be the interactive tier's."""

    tier: ServiceTier
    price: ModelPrice


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTerms:
    """Terms of a price, on the list or one customer's own, named as in calls and configurations.

    `currency_code` may be empty: the organization's currency, or USD for the list. `organization`
    is the name or id of the customer with its own price; empty for the list. None keeps the
    embedding price and the batch multiplier in force then, at first 0 and the interactive price;
    `reasoning_picos_per_token` None means the output price. `batch_multiplier_milli` is what the
    batch tier pays, in thousandths of these prices. `effective_at` None means now.
    """

    model: str
    currency_code: str = ""
    input_picos_per_token: int
    cached_input_picos_per_token: int
    output_picos_per_token: int
    embedding_picos_per_token: int | None = None
    reasoning_picos_per_token: int | None = None
    batch_multiplier_milli: int | None = None
    organization: str = ""
    effective_at: datetime | None = None

    @property
    def rates(self) -> dict[str, int]:
        """Prices per token that are given, by column."""
        return {name: getattr(self, name) for name in RATES if getattr(self, name) is not None}


async def set_price(session: AsyncSession, terms: PriceTerms, *, actor: str) -> ModelPrice:
    """Add the versions of a price, one for each tier; return the interactive one.

    Raises: NotFound; InvalidValue, also for a past time; AlreadyExists if another version starts at
    that time.
    """
    owner = await find_organization(session, terms.organization) if terms.organization else None
    model, currency_code = terms.model, _currency_of(owner, terms.currency_code)
    begins = await beginning(session, terms.effective_at)
    owner_id = None if owner is None else owner.id
    in_force = await versions_in_force(
        session,
        model=checked_model(model),
        currency_code=currency_code,
        organization_id=owner_id,
        at=begins,
    )
    before = {price.tier: price for price in customer_prices(in_force, owner_id, model)}
    interactive, batch = (before.get(tier) for tier in (ServiceTier.INTERACTIVE, ServiceTier.BATCH))
    rates, multiplier_milli = terms.rates, terms.batch_multiplier_milli
    rates.setdefault(
        "embedding_picos_per_token",
        interactive.price.prices.embedding_picos_per_token if interactive else 0,
    )
    if multiplier_milli is None and batch is not None and batch.price.tier is ServiceTier.BATCH:
        multiplier_milli = batch.price.multiplier_milli
    for name, picos in rates.items():
        if not 0 <= picos <= PRICE_MAX_PICOS:
            raise InvalidValue(name, f"must be between 0 and {PRICE_MAX_PICOS} picos")
    identity: Row = {
        "model": model,
        "currency_code": currency_code,
        "organization_id": owner_id,
        "effective_at": begins,
    }
    multipliers = {ServiceTier.INTERACTIVE: MULTIPLIER_SCALE}
    if multiplier_milli is not None:
        multipliers[ServiceTier.BATCH] = multiplier_milli
    rows = [
        identity
        | dict(zip(rates, multiplied_rates(list(rates.values()), multiplier), strict=True))
        | {"tier": tier, "multiplier_milli": multiplier}
        for tier, multiplier in multipliers.items()
    ]
    return (await _add(session, rows, "price.set", actor))[0]


async def withdraw_price(
    session: AsyncSession,
    *,
    model: str,
    organization: str,
    effective_at: datetime | None = None,
    actor: str,
) -> list[ModelPrice]:
    """End a customer's own price from `effective_at` on, or from now; the list price applies then.

    Raises: NotFound if it has no own price then; InvalidValue for a past time; AlreadyExists.
    """
    owner = await find_organization(session, organization)
    begins = await beginning(session, effective_at)
    in_force = await versions_in_force(
        session,
        model=checked_model(model),
        currency_code=owner.currency_code,
        organization_id=owner.id,
        at=begins,
    )
    own = [price for price in in_force if price.organization_id == owner.id and not price.withdrawn]
    if not own:
        raise NotFound("own price", f"{model} of {owner.name} at {begins.isoformat()}")
    zero_rates: Row = dict.fromkeys(RATES, 0)
    identity: Row = {
        "model": model,
        "currency_code": owner.currency_code,
        "organization_id": owner.id,
        "effective_at": begins,
    }
    rows = [identity | zero_rates | {"tier": price.tier, "withdrawn": True} for price in own]
    return await _add(session, rows, "price.withdraw", actor)


async def price_in_force(
    session: AsyncSession,
    *,
    model: str,
    currency_code: str,
    organization_id: uuid.UUID | None = None,
    tier: ServiceTier = ServiceTier.INTERACTIVE,
    at: datetime | None = None,
) -> TokenPrices:
    """Look up the price of a customer, or of the list, at a time. Raises: PriceMissing."""
    versions = await versions_in_force(
        session, model=model, currency_code=currency_code, organization_id=organization_id, at=at
    )
    for each in customer_prices(versions, organization_id, model):
        if each.tier is tier:
            return each.price.prices
    raise PriceMissing(model, currency_code)


async def get_price(session: AsyncSession, version: int) -> ModelPrice:
    """Look up a price version by its number. Raises: NotFound."""
    if (row := await session.get(PriceVersion, version)) is None:
        raise NotFound("price version", str(version))
    return _model_price(row)


async def versions_of_change(session: AsyncSession, price: ModelPrice) -> list[ModelPrice]:
    """Find the versions added by the same call: one per tier of the model."""
    of_owner = PriceVersion.organization_id.is_not_distinct_from(price.organization_id)
    query = select(PriceVersion).where(
        PriceVersion.model == price.model,
        PriceVersion.currency_code == price.prices.currency_code,
        PriceVersion.effective_at == price.effective_at,
        of_owner,
    )
    return sorted(map(_model_price, await session.scalars(query)), key=_order)


async def list_current_prices(
    session: AsyncSession, *, currency_code: str | None = None
) -> list[ModelPrice]:
    """List the interactive list prices in force, in one currency or all, by model and currency."""
    versions = await versions_in_force(session, currency_code=currency_code)
    return [price for price in versions if price.tier is ServiceTier.INTERACTIVE]


async def versions_in_force(
    session: AsyncSession,
    *,
    model: str | None = None,
    currency_code: str | None = None,
    organization_id: uuid.UUID | None = None,
    all_customers: bool = False,
    at: datetime | None = None,
) -> list[ModelPrice]:
    """List the versions in force, of the price list and of one customer or all; withdrawn ones too.

    Sorted by model, currency, list before own price, and tier. `organization_id` adds this
    customer's own prices, `all_customers` those of all. `at` is by default now.
    """
    query = _select_versions(
        model, currency_code, organization_id, all_customers=all_customers
    ).ext(distinct_on(*_KEY))
    query = query.where(PriceVersion.effective_at <= (func.now() if at is None else at))
    rows = await session.scalars(query.order_by(*_KEY, PriceVersion.effective_at.desc()))
    return sorted(map(_model_price, rows), key=_order)


async def price_history(
    session: AsyncSession,
    *,
    model: str | None = None,
    currency_code: str | None = None,
    organization_id: uuid.UUID | None = None,
) -> list[ModelPrice]:
    """List all past, present and future versions of the list and, if given, of a customer.

    Sorted as in `versions_in_force`, then by start.
    """
    rows = await session.scalars(_select_versions(model, currency_code, organization_id))
    return sorted(map(_model_price, rows), key=lambda price: (*_order(price), price.effective_at))


def customer_prices(
    versions: Sequence[ModelPrice], organization_id: uuid.UUID | None, model: str | None = None
) -> list[CustomerPrice]:
    """Choose a customer's price of each model and tier from the versions in force.

    `organization_id` is None for a customer without prices of its own.
    """
    book, by_version = PriceBook(), {each.prices.version: each for each in versions}
    for each in versions:
        book.add(
            each.prices,
            model=each.model,
            organization_id=each.organization_id,
            tier=each.tier,
            withdrawn=each.withdrawn,
        )
    models = dict.fromkeys(
        (each.model, each.prices.currency_code) for each in versions if model in (None, each.model)
    )
    no_customer = uuid.UUID(int=0)
    return [
        CustomerPrice(tier, by_version[prices.version])
        for key in models
        for tier in ServiceTier
        if (prices := book.find(*key, organization_id or no_customer, tier)) is not None
    ]


def checked_model(model: str) -> str:
    """Validate a model name and return it unchanged. Raises: InvalidValue."""
    if MODEL_FORM.fullmatch(model) is None:
        raise InvalidValue(
            "model",
            "must have 1 to 200 letters, digits or . _ : @ / -, and begin with a letter or digit",
        )
    return model


def _select_versions(
    model: str | None,
    currency_code: str | None,
    organization_id: uuid.UUID | None,
    *,
    all_customers: bool = False,
) -> Select[PriceVersion]:
    """Build the query for versions of the list, and of one customer or all."""
    conditions = [
        or_(PriceVersion.organization_id.is_(None), PriceVersion.organization_id == organization_id)
    ]
    if all_customers:
        conditions = [true()]
    if model is not None:
        conditions.append(PriceVersion.model == model)
    if currency_code is not None:
        conditions.append(PriceVersion.currency_code == currency_code)
    return select(PriceVersion).where(and_(*conditions))


def _order(price: ModelPrice) -> tuple[str, str, bool, int]:
    own, tier = price.organization_id is not None, list(ServiceTier).index(price.tier)
    return price.model, price.prices.currency_code, own, tier


def _currency_of(owner: Organization | None, currency_code: str) -> str:
    if owner is None:
        return checked_currency(currency_code or "USD")
    if currency_code not in ("", owner.currency_code):
        raise InvalidValue(
            "currency_code",
            f"{owner.name} is billed in {owner.currency_code}: use that, or leave the field empty",
        )
    return owner.currency_code


async def beginning(session: AsyncSession, effective_at: datetime | None) -> datetime:
    """Return when a new version begins; None means now. Raises: InvalidValue for a past time."""
    now = await database_now(session)
    if effective_at is not None and effective_at < now:
        raise InvalidValue(
            "effective_time",
            f"must be after {now.isoformat()}, or empty for now: past prices never change",
        )
    return now if effective_at is None else effective_at


async def _add(
    session: AsyncSession, rows: Sequence[Row], action: str, actor: str
) -> list[ModelPrice]:
    """Insert versions and write the audit log. Raises: AlreadyExists."""
    added = []
    for row in rows:
        version = await session.scalar(
            insert(PriceVersion).values(row).on_conflict_do_nothing().returning(PriceVersion)
        )
        if version is None:
            raise AlreadyExists(
                "price",
                f"{row['model']} in {row['currency_code']} from {row['effective_at']}",
                "and never changes: choose another time",
            )

        await record_change(session, actor, action, str(version.id), after=snapshot(version))
        added.append(_model_price(version))
    return added


def _model_price(version: PriceVersion) -> ModelPrice:
    reasoning = version.reasoning_picos_per_token
    prices = record_of(
        TokenPrices,
        version,
        version=version.id,
        reasoning_picos_per_token=-1 if reasoning is None else reasoning,
    )
    return record_of(ModelPrice, version, prices=prices)
