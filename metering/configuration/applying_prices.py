"""The prices of a configuration: a version is added where those that hold then differ; none is ever removed."""

from __future__ import annotations

import uuid
from dataclasses import fields, replace

from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.multipliers import MULTIPLIER_SCALE
from metering.billing.prices import ModelPrice, set_price, versions_in_force
from metering.configuration.attempts import Attempts
from metering.configuration.configuration import Action, Change, PriceSpec, differences
from metering.models import ServiceTier
from metering.tenants.tenants import find_organization

PLACE = ("model", "currency_code", "organization", "effective_at")  # what says which price; the rest is how it is


def price_place(spec: PriceSpec) -> tuple[object, ...]:
    """Which price a document means."""
    return tuple(getattr(spec, name) for name in PLACE)


async def apply_price(work: Attempts, path: str, wanted: PriceSpec) -> None:
    """Make one price what the document says, from its time on or from now. What is unset of it stays."""
    at = None if wanted.effective_at is None or wanted.effective_at <= work.now else wanted.effective_at
    owner = owner_id = None
    if wanted.organization:
        owner = await work.attempt(f"{path}.organization", lambda: find_organization(work.session, wanted.organization))
        if owner is None:
            return
        owner_id = owner.id
    named = replace(wanted, currency_code=wanted.currency_code or (owner.currency_code if owner else "USD"))
    found = await versions_in_force(
        work.session,
        model=named.model,
        currency_code=named.currency_code,
        organization_id=owner_id,
        at=at,
    )
    standing = spec_of([each for each in found if each.organization_id == owner_id and not each.withdrawn], named)
    names = [each.name for each in fields(PriceSpec) if each.name not in PLACE and getattr(named, each.name) is not None]
    changes = differences(standing, named, names)
    if not changes:
        return
    await work.attempt(
        path,
        lambda: set_price(
            work.session,
            model=named.model,
            currency_code=named.currency_code,
            input_picos_per_token=named.input_picos_per_token,
            cached_input_picos_per_token=named.cached_input_picos_per_token,
            output_picos_per_token=named.output_picos_per_token,
            embedding_picos_per_token=named.embedding_picos_per_token,
            organization=named.organization,
            batch_multiplier_milli=named.batch_multiplier_milli,
            effective_at=at,
            actor=work.actor,
        ),
    )
    whose = f" of {named.organization}" if named.organization else ""
    since = f" from {at:%Y-%m-%d %H:%M:%SZ}" if at else ""
    action = Action.UPDATE if standing else Action.CREATE
    work.changes.append(Change(action, "price", f"{named.model} in {named.currency_code}{whose}{since}", changes))


async def price_specs(session: AsyncSession, names: dict[uuid.UUID, str], *, listed: bool) -> tuple[PriceSpec, ...]:
    """The prices in force: own ones of the named organizations, by id, and with `listed` those of the list."""
    found = await versions_in_force(session, everyones=True)
    of_place: dict[tuple[str, str, uuid.UUID | None], list[ModelPrice]] = {}
    for each in found:
        if not each.withdrawn and (each.organization_id in names or (listed and each.organization_id is None)):
            of_place.setdefault((each.model, each.prices.currency_code, each.organization_id), []).append(each)
    specs = []
    for (model, currency_code, owner), versions in of_place.items():
        place = PriceSpec(model, currency_code, 0, 0, 0, organization="" if owner is None else names[owner])
        if (spec := spec_of(versions, place)) is not None:
            multiplier = None if spec.batch_multiplier_milli == MULTIPLIER_SCALE else spec.batch_multiplier_milli
            embedding = spec.embedding_picos_per_token or None
            specs.append(replace(spec, embedding_picos_per_token=embedding, batch_multiplier_milli=multiplier))
    return tuple(specs)


def spec_of(versions: list[ModelPrice], place: PriceSpec) -> PriceSpec | None:
    """The price that versions of one place make, one per tier; None if there is none."""
    tiers = {each.tier: each for each in versions}
    if ServiceTier.INTERACTIVE not in tiers:
        return None
    prices, batch = tiers[ServiceTier.INTERACTIVE].prices, tiers.get(ServiceTier.BATCH)
    return replace(
        place,
        input_picos_per_token=prices.input_picos_per_token,
        cached_input_picos_per_token=prices.cached_input_picos_per_token,
        output_picos_per_token=prices.output_picos_per_token,
        embedding_picos_per_token=prices.embedding_picos_per_token,
        batch_multiplier_milli=batch.multiplier_milli if batch else MULTIPLIER_SCALE,
    )
