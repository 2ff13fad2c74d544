"""Price versions: what a model's tokens cost a customer in a tier from a moment on. None is
changed; a correction is a later one.

`TokenPrices` is what tokens cost by one version, here and in SQL.

A version belongs to the list, or to one customer as its own price; `PriceBook` decides which one a
request has. A tier may multiply prices, exactly or not at all. Functions take a session and never
commit. Time is the database's: `now` is the beginning of the transaction.
"""

from __future__ import annotations

import functools
import math
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from sqlalchemy import Select, and_, func, or_, select, true
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, NotFound, PriceMissing
from metering.core.models import Organization, PriceVersion, ServiceTier, TokenKind, record_of
from metering.core.money import checked_currency
from metering.tenants.tenants import find_organization

# By kind of token, as `TokenPrices.lines` has it: how a usage event's tokens are counted, and the
# column of their price.
COUNTS_OF_EVENT = {
    TokenKind.INPUT: ("input_token_count - cached_input_token_count", "input_picos_per_token"),
    TokenKind.CACHED_INPUT: ("cached_input_token_count", "cached_input_picos_per_token"),
    TokenKind.OUTPUT: ("billed_token_count", "output_picos_per_token"),
    TokenKind.EMBEDDING: ("embedding_token_count", "embedding_picos_per_token"),
}
# A join that makes of each usage event one row per kind of token.
TOKENS_BY_KIND = "LATERAL (VALUES {}) AS kind (token_kind, token_count)".format(
    ", ".join(f"('{kind}', {count})" for kind, (count, _) in COUNTS_OF_EVENT.items())
)


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """One price version of one model: picos (1e-12 of the currency unit) per token and kind."""

    version: int
    currency_code: str
    input_picos_per_token: int
    cached_input_picos_per_token: int
    output_picos_per_token: int
    embedding_picos_per_token: int = 0

    def cost_picos(
        self, input_token_count: int, cached_input_token_count: int, output_token_count: int, embedding_token_count: int = 0
    ) -> int:
        """Return the exact cost. Cached tokens are part of the input and priced separately;
        embedded ones are not.
        """
        return (
            (input_token_count - cached_input_token_count) * self.input_picos_per_token
            + cached_input_token_count * self.cached_input_picos_per_token
            + output_token_count * self.output_picos_per_token
            + embedding_token_count * self.embedding_picos_per_token
        )

    def lines(
        self, input_token_count: int, cached_input_token_count: int, output_token_count: int, embedding_token_count: int = 0
    ) -> Iterator[PricedTokens]:
        """Return the cost by kind of token, in the order of `TokenKind`, without kinds that have no
        tokens.
        """
        counts = (
            (TokenKind.INPUT, input_token_count - cached_input_token_count, self.input_picos_per_token),
            (TokenKind.CACHED_INPUT, cached_input_token_count, self.cached_input_picos_per_token),
            (TokenKind.OUTPUT, output_token_count, self.output_picos_per_token),
            (TokenKind.EMBEDDING, embedding_token_count, self.embedding_picos_per_token),
        )
        return (PricedTokens(kind, count, price) for kind, count, price in counts if count)


@functools.lru_cache(maxsize=4096)
def embedding_terms(prices: TokenPrices) -> TokenPrices:
    """Return the version for a request with embedded input, which pays the embedding price only."""
    each = prices.embedding_picos_per_token
    return replace(prices, input_picos_per_token=each, cached_input_picos_per_token=each)


@dataclass(frozen=True, slots=True)
class PricedTokens:
    """Tokens of one kind and their unit price."""

    kind: TokenKind
    token_count: int
    unit_price_picos: int

    @property
    def amount_picos(self) -> int:
        """Exact amount: a price is a whole number of picos per token."""
        return self.token_count * self.unit_price_picos


# Of a price: model, currency, the number of the organization whose own it is or None for the list,
# and service tier.
PricePlace = tuple[str, str, int | None, str]


@dataclass(slots=True)
class PriceBook:
    """The versions in force at one moment, and which of them a request has.

    A customer's own price wins over the list's; within each, a tier without a row of its own has
    the interactive one. None stands for an own price that was withdrawn.
    """

    in_force: dict[PricePlace, TokenPrices | None] = field(default_factory=dict)

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

    def find(self, model: str, currency_code: str, organization_id: uuid.UUID, tier: str) -> TokenPrices | None:
        """Return the price for the customer; None if there is none."""
        get = self.in_force.get
        for owner in (organization_id.int, None):
            for each in (tier, ServiceTier.INTERACTIVE) if tier != ServiceTier.INTERACTIVE else (tier,):
                if (model, currency_code, owner, each) in self.in_force:
                    if (prices := get((model, currency_code, owner, each))) is not None:
                        return prices
                    break  # withdrawn: as the list has it
        return None


FIELD = "batch_multiplier_milli"  # as the contract calls it
MULTIPLIER_SCALE = 1000  # multipliers are in thousandths
MULTIPLIER_MAX_MILLI = 1_000_000  # a factor of 1000; a larger one is a mistake in the unit


def multiplied_rates(rates: Sequence[int], multiplier_milli: int) -> list[int]:
    """Prices times thousandths, exactly. Raises: InvalidValue telling the nearest multipliers that
    leave no fraction of a pico.
    """
    if not 0 <= multiplier_milli <= MULTIPLIER_MAX_MILLI:
        raise InvalidValue(FIELD, f"give 0 to {MULTIPLIER_MAX_MILLI} thousandths")
    step = math.lcm(*(MULTIPLIER_SCALE // math.gcd(rate, MULTIPLIER_SCALE) for rate in rates))
    if rest := multiplier_milli % step:
        below, above = multiplier_milli - rest, multiplier_milli - rest + step
        told = f"{multiplier_milli} thousandths make fractions of a pico of these prices"
        raise InvalidValue(
            FIELD, f"{told}: give {below} or {above}, which is {below / MULTIPLIER_SCALE:g} or {above / MULTIPLIER_SCALE:g}"
        )
    return [rate * multiplier_milli // MULTIPLIER_SCALE for rate in rates]


# As in "meta-llama/Llama-3.1-8B-Instruct" or "demo@2": nothing that a spreadsheet, a shell or a log
# would take for anything else.
MODEL_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,199}", re.ASCII)
# 10 units per token; a request of 900,000 such tokens still fits a 64-bit cost.
PRICE_MAX_PICOS = 10**13
Row = dict[str, object]  # column values of one version
RATES = ("input_picos_per_token", "cached_input_picos_per_token", "output_picos_per_token", "embedding_picos_per_token")


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """A price version with the model, tier and customer that it prices, and its beginning.

    organization_id: None for the list. multiplier_milli: thousandths of the interactive prices that
    it was made with. withdrawn: it only ends the customer's own price.
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
    """What one customer pays for a model in a tier. price: the version, which is another tier's
    where this one has none.
    """

    tier: ServiceTier
    price: ModelPrice


async def set_price(
    session: AsyncSession,
    *,
    model: str,
    currency_code: str = "",
    input_picos_per_token: int,
    cached_input_picos_per_token: int,
    output_picos_per_token: int,
    embedding_picos_per_token: int | None = None,
    organization: str = "",
    batch_multiplier_milli: int | None = None,
    effective_at: datetime | None = None,
    actor: str,
) -> ModelPrice:
    """Add a version that holds from `effective_at` on, or from now; tells the interactive one.

    currency_code: empty for the organization's, or USD. organization: by name or id, whose own
    price it is; empty for the list. batch_multiplier_milli: thousandths of these prices that the
    batch tier pays; None keeps what is in force for it then, if anything is.
    embedding_picos_per_token: None likewise. Raises: NotFound, InvalidValue, also for a time that
    has passed; AlreadyExists for one at which another version begins.
    """
    owner = await find_organization(session, organization) if organization else None
    currency_code = _currency_of(owner, currency_code)
    begins = await _beginning(session, effective_at)
    owner_id = None if owner is None else owner.id
    standing = await versions_in_force(
        session, model=checked_model(model), currency_code=currency_code, organization_id=owner_id, at=begins
    )
    before = {price.tier: price for price in customer_prices(standing, owner_id, model)}
    interactive, batch = (before.get(tier) for tier in (ServiceTier.INTERACTIVE, ServiceTier.BATCH))
    if embedding_picos_per_token is None:
        embedding_picos_per_token = interactive.price.prices.embedding_picos_per_token if interactive else 0
    if batch_multiplier_milli is None and batch is not None and batch.price.tier is ServiceTier.BATCH:
        batch_multiplier_milli = batch.price.multiplier_milli
    rates = (input_picos_per_token, cached_input_picos_per_token, output_picos_per_token, embedding_picos_per_token)
    for name, picos in zip(RATES, rates, strict=True):
        if not 0 <= picos <= PRICE_MAX_PICOS:
            raise InvalidValue(name, f"give 0 to {PRICE_MAX_PICOS} picos")
    place: Row = {"model": model, "currency_code": currency_code, "organization_id": owner_id, "effective_at": begins}
    rows = [place | dict(zip(RATES, rates, strict=True)) | {"tier": ServiceTier.INTERACTIVE, "multiplier_milli": MULTIPLIER_SCALE}]
    if batch_multiplier_milli is not None:
        multiplied = multiplied_rates(rates, batch_multiplier_milli)
        rows.append(
            place
            | dict(zip(RATES, multiplied, strict=True))
            | {"tier": ServiceTier.BATCH, "multiplier_milli": batch_multiplier_milli}
        )
    return (await _add(session, rows, "price.set", actor))[0]


async def withdraw_price(
    session: AsyncSession, *, model: str, organization: str, effective_at: datetime | None = None, actor: str
) -> list[ModelPrice]:
    """End a customer's own price of a model: from `effective_at` on, or from now, it pays as the
    list says.

    Raises: NotFound if it has none then; InvalidValue for a time that has passed; AlreadyExists.
    """
    owner = await find_organization(session, organization)
    begins = await _beginning(session, effective_at)
    standing = await versions_in_force(
        session, model=checked_model(model), currency_code=owner.currency_code, organization_id=owner.id, at=begins
    )
    own = [price for price in standing if price.organization_id == owner.id and not price.withdrawn]
    if not own:
        raise NotFound("own price", f"{model} of {owner.name} at {begins.isoformat()}")
    nothing: Row = dict.fromkeys(RATES, 0)
    place: Row = {"model": model, "currency_code": owner.currency_code, "organization_id": owner.id, "effective_at": begins}
    rows = [place | nothing | {"tier": price.tier, "withdrawn": True} for price in own]
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
    """Return the price for a customer, or without a customer the list's, at a time, by default now.
    Raises: PriceMissing.
    """
    found = await versions_in_force(session, model=model, currency_code=currency_code, organization_id=organization_id, at=at)
    for each in customer_prices(found, organization_id, model):
        if each.tier is tier:
            return each.price.prices
    raise PriceMissing(model, currency_code)


async def get_price(session: AsyncSession, version: int) -> ModelPrice:
    """Return a version by its number. Raises: NotFound."""
    if (row := await session.get(PriceVersion, version)) is None:
        raise NotFound("price version", str(version))
    return _model_price(row)


async def written_with(session: AsyncSession, price: ModelPrice) -> list[ModelPrice]:
    """The versions that one call wrote, one per tier: those of the same model, customer and time."""
    of_owner = PriceVersion.organization_id.is_not_distinct_from(price.organization_id)
    query = select(PriceVersion).where(
        PriceVersion.model == price.model,
        PriceVersion.currency_code == price.prices.currency_code,
        PriceVersion.effective_at == price.effective_at,
        of_owner,
    )
    return sorted(map(_model_price, await session.scalars(query)), key=_order)


async def list_current_prices(session: AsyncSession, *, currency_code: str | None = None) -> list[ModelPrice]:
    """Return the list's interactive versions in force, by model and currency; optionally of one
    currency.
    """
    found = await versions_in_force(session, currency_code=currency_code)
    return [price for price in found if price.tier is ServiceTier.INTERACTIVE]


async def versions_in_force(
    session: AsyncSession,
    *,
    model: str | None = None,
    currency_code: str | None = None,
    organization_id: uuid.UUID | None = None,
    everyones: bool = False,
    at: datetime | None = None,
) -> list[ModelPrice]:
    """Of each tier the list's version in force, and the customer's own if one is given, withdrawn
    ones among them.

    By model, currency, the list before the own, and tier. everyones: the own ones of all customers.
    at: by default now.
    """
    query = _of(model, currency_code, organization_id, everyones=everyones).ext(distinct_on(*_PLACE))
    query = query.where(PriceVersion.effective_at <= (func.now() if at is None else at))
    rows = await session.scalars(query.order_by(*_PLACE, PriceVersion.effective_at.desc()))
    return sorted(map(_model_price, rows), key=_order)


async def price_history(
    session: AsyncSession,
    *,
    model: str | None = None,
    currency_code: str | None = None,
    organization_id: uuid.UUID | None = None,
) -> list[ModelPrice]:
    """Every version there ever was and will be of the list, and of the customer if one is given;
    the oldest of each place first.
    """
    rows = await session.scalars(_of(model, currency_code, organization_id))
    return sorted(map(_model_price, rows), key=lambda price: (*_order(price), price.effective_at))


def customer_prices(
    versions: Sequence[ModelPrice], organization_id: uuid.UUID | None, model: str | None = None
) -> list[CustomerPrice]:
    """What one customer, or somebody without a price of its own, pays for each model in each tier,
    of versions in force.
    """
    book, by_version = PriceBook(), {each.prices.version: each for each in versions}
    for each in versions:
        book.add(each.prices, model=each.model, organization_id=each.organization_id, tier=each.tier, withdrawn=each.withdrawn)
    places = dict.fromkeys((each.model, each.prices.currency_code) for each in versions if model in (None, each.model))
    nobody = uuid.UUID(int=0)
    return [
        CustomerPrice(tier, by_version[prices.version])
        for place in places
        for tier in ServiceTier
        if (prices := book.find(*place, organization_id or nobody, tier)) is not None
    ]


def checked_model(model: str) -> str:
    """Return a valid model name. Raises: InvalidValue."""
    if MODEL_FORM.fullmatch(model) is None:
        raise InvalidValue("model", "give 1 to 200 of letters, digits and . _ : @ / -, starting with a letter or digit")
    return model


_PLACE = (PriceVersion.model, PriceVersion.currency_code, PriceVersion.organization_id, PriceVersion.tier)


def _of(
    model: str | None, currency_code: str | None, organization_id: uuid.UUID | None, *, everyones: bool = False
) -> Select[PriceVersion]:
    """Versions of the list, and of a customer if one is given, or of all."""
    wanted = [or_(PriceVersion.organization_id.is_(None), PriceVersion.organization_id == organization_id)]
    if everyones:
        wanted = [true()]
    if model is not None:
        wanted.append(PriceVersion.model == model)
    if currency_code is not None:
        wanted.append(PriceVersion.currency_code == currency_code)
    return select(PriceVersion).where(and_(*wanted))


def _order(price: ModelPrice) -> tuple[str, str, bool, int]:
    own, tier = price.organization_id is not None, list(ServiceTier).index(price.tier)
    return price.model, price.prices.currency_code, own, tier


def _currency_of(owner: Organization | None, currency_code: str) -> str:
    if owner is None:
        return checked_currency(currency_code or "USD")
    if currency_code not in ("", owner.currency_code):
        raise InvalidValue("currency_code", f"{owner.name} is billed in {owner.currency_code}: give that, or leave it out")
    return owner.currency_code


async def _beginning(session: AsyncSession, effective_at: datetime | None) -> datetime:
    now: datetime = (await session.scalars(select(func.now()))).one()
    if effective_at is not None and effective_at < now:
        raise InvalidValue("effective_time", f"past prices never change: give a time after {now.isoformat()}, or none for now")
    return now if effective_at is None else effective_at


async def _add(session: AsyncSession, rows: Sequence[Row], action: str, actor: str) -> list[ModelPrice]:
    """Insert versions and write the audit log. Raises: AlreadyExists."""
    added = []
    for row in rows:
        version = await session.scalar(insert(PriceVersion).values(row).on_conflict_do_nothing().returning(PriceVersion))
        if version is None:
            how = "and never changes: give another time"
            raise AlreadyExists("price", f"{row['model']} in {row['currency_code']} from {row['effective_at']}", how)
        await record_change(session, actor=actor, action=action, subject_id=str(version.id), before=None, after=snapshot(version))
        added.append(_model_price(version))
    return added


def _model_price(version: PriceVersion) -> ModelPrice:
    return record_of(ModelPrice, version, prices=record_of(TokenPrices, version, version=version.id))
