"""The prices and limits of a configuration, compared with what is in force, and changed where they differ.

A price version is added where those in force differ; none is removed. Limits of a subject are set, raised or removed. Each change
runs in a savepoint (`Attempts`).
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from metering.configuration.configuration import Action, Change, Mistake, PriceSpec, QuotaPlace, QuotaSpec, differences, named_twice
from metering.core.errors import InvalidValue, MeteringError
from metering.core.models import Quota, QuotaDimension, QuotaSubject, ServiceTier
from metering.pricing.prices import MULTIPLIER_SCALE, ModelPrice, set_price, versions_in_force
from metering.quotas.quota_admin import delete_quota, raise_quota, set_quota
from metering.quotas.quota_recount import Uncounted, recount
from metering.quotas.quota_rules import Weights, usual_thresholds
from metering.tenants.tenants import find_organization

Value = TypeVar("Value")

# What single calls name otherwise than a document does.
FIELDS = {
    "weights.input_milli": "input_weight_milli",
    "weights.cached_input_milli": "cached_input_weight_milli",
    "weights.output_milli": "output_weight_milli",
    "weights": "input_weight_milli",
    "lifetime": "expire_time",
}


@dataclass(slots=True)
class Attempts:
    """Changes that were made, and those that were refused. now: the time of the transaction; models: those that are served.

    created: subjects of limits that were made. uncounted: limits that do not count the past yet.
    """

    session: AsyncSession
    actor: str
    now: datetime
    models: Collection[str]
    changes: list[Change] = field(default_factory=list)
    kept: list[Change] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    created: set[uuid.UUID] = field(default_factory=set)
    uncounted: list[Uncounted] = field(default_factory=list)

    async def count_past(self) -> None:
        """Make new limits count what was used before: after all else, since nobody is let in from here to the end.

        What did not exist before has used nothing.
        """
        await recount(self.session, [each for each in self.uncounted if each[0].subject_id not in self.created])

    async def attempt(self, path: str, act: Callable[[], Awaitable[Value]], names: dict[str, str] | None = None) -> Value | None:
        """What the act answers; None if it was refused, which is then noted. names: of fields that the document calls otherwise."""
        try:
            async with self.session.begin_nested():
                return await act()
        except InvalidValue as refusal:
            self.wrong(f"{path}.{(names or FIELDS).get(refusal.field, refusal.field)}", refusal.remedy)
        except MeteringError as refusal:
            self.wrong(path, str(refusal))
        return None

    def wrong(self, path: str, message: str) -> None:
        self.mistakes.append(Mistake(path, message))


PLACE = ("model", "currency_code", "organization", "effective_at")  # what says which price; the rest is how it is


def price_place(spec: PriceSpec) -> tuple[object, ...]:
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
        work.session, model=named.model, currency_code=named.currency_code, organization_id=owner_id, at=at
    )
    standing = spec_of([each for each in found if each.organization_id == owner_id and not each.withdrawn], named)
    names = [each.name for each in fields(PriceSpec) if each.name not in PLACE and getattr(named, each.name) is not None]
    changes = differences(standing, named, names)
    if not changes:
        return
    terms = {each.name: getattr(named, each.name) for each in fields(PriceSpec)} | {"effective_at": at}
    await work.attempt(path, lambda: set_price(work.session, **terms, actor=work.actor))
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
    rates = {each.name: getattr(prices, each.name) for each in fields(PriceSpec) if each.name.endswith("_picos_per_token")}
    return replace(place, **rates, batch_multiplier_milli=batch.multiplier_milli if batch else MULTIPLIER_SCALE)


PLAIN = QuotaSpec(limit_value=-1)  # what a new limit is compared with, so that only what it says otherwise is told
RAISE = ("raised_limit_value", "raised_until", "raise_reason")
RAISE_FIELDS = {"limit_value": "raised_limit_value", "expire_time": "raised_until_time", "reason": "raise_reason"}


async def apply_quotas(
    work: Attempts,
    path: str,
    shown: str,
    subject: QuotaSubject,
    subject_id: uuid.UUID,
    wanted: Iterable[tuple[QuotaPlace, QuotaSpec]],
    *,
    prune: bool,
    defaults: Collection[QuotaPlace] = (),
) -> None:
    """The limits of one subject. shown: the subject for people. prune: remove those that are not wanted.

    defaults: what a key has got without being asked; those are as wanted as they are above it, and are left alone.
    """
    query = select(Quota).where(Quota.subject_id == subject_id, Quota.deleted_at.is_(None)).order_by(Quota.created_at, Quota.id)
    query = query.where(Quota.dimension != QuotaDimension.PREPAID_CREDIT_PICOS)  # which follows from grants
    rows = {place_of(row): row for row in await work.session.scalars(query.execution_options(populate_existing=True))}
    listed = list(wanted)
    work.mistakes += named_twice(f"{path}.quotas", "dimension", [place for place, _ in listed])
    for index, (place, spec) in enumerate(listed):
        row = rows.pop(place, None)
        at = f"{path}.quotas[{index}]"
        if place.model and place.model not in work.models:
            work.wrong(f"{at}.model", f"no model of this name is served: give one of {', '.join(sorted(work.models))}, or none")
        await apply_quota(work, at, shown, subject, subject_id, place, spec.without_past_raise(work.now), row)
    for place, row in rows.items():
        if place in defaults:
            continue
        change = Change(Action.DELETE if prune else Action.KEEP, "quota", shown, quota=place)
        if prune:
            await work.attempt(path, partial(delete_quota, work.session, quota_id=str(row.id), actor=work.actor))
        (work.changes if prune else work.kept).append(change)


async def apply_quota(
    work: Attempts,
    path: str,
    shown: str,
    subject: QuotaSubject,
    subject_id: uuid.UUID,
    place: QuotaPlace,
    wanted: QuotaSpec,
    row: Quota | None,
) -> None:
    """One limit. row: as it stands, if it does."""
    standing = None if row is None else QuotaSpec.of(row, work.now)
    named = [each.name for each in fields(QuotaSpec)]
    if wanted.raised_until is None:  # nothing is said of a raise: one that stands stays
        named = [name for name in named if name not in RAISE]
    new_fields = [name for name in named if standing is not None or getattr(wanted, name) != getattr(PLAIN, name)]
    changes = differences(standing, wanted, new_fields)
    if standing is not None and not changes:
        return
    state = await work.attempt(
        path,
        lambda: set_quota(
            work.session,
            subject=subject,
            subject_ref=str(subject_id),
            model=place.model,
            dimension=place.dimension,
            limit_value=wanted.limit_value,
            weights=Weights(wanted.input_weight_milli, wanted.cached_input_weight_milli, wanted.output_weight_milli),
            enforced=wanted.enforced,
            for_new_keys=place.for_new_keys,
            alert_at=usual_thresholds(place.dimension) if wanted.alert_at is None else wanted.alert_at,
            actor=work.actor,
            later=work.uncounted,
        ),
    )
    if state is not None and wanted.raised_until is not None:
        quota_id, limit, until = str(state.quota_id), wanted.raised_limit_value or 0, wanted.raised_until
        reason = wanted.raise_reason or ""
        await work.attempt(
            path,
            lambda: raise_quota(work.session, quota_id=quota_id, limit_value=limit, until=until, reason=reason, actor=work.actor),
            RAISE_FIELDS,
        )
    work.changes.append(Change(Action.UPDATE if standing else Action.CREATE, "quota", shown, changes, quota=place))


async def defaults_of(work: Attempts, *subject_ids: uuid.UUID) -> frozenset[QuotaPlace]:
    """The limits that new keys under these subjects get for themselves."""
    query = select(Quota).where(Quota.subject_id.in_(subject_ids), Quota.for_new_keys, Quota.deleted_at.is_(None))
    return frozenset(replace(place_of(row), for_new_keys=False) for row in await work.session.scalars(query))


def place_of(quota: Quota) -> QuotaPlace:
    return QuotaPlace(QuotaDimension(quota.dimension), quota.model, quota.for_new_keys)
