"""The limits of a configuration: those of one subject compared with what stands, and set, raised or removed."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable
from dataclasses import fields, replace
from functools import partial

from sqlalchemy import select

from metering.configuration.attempts import Attempts
from metering.configuration.configuration import Action, Change, QuotaPlace, QuotaSpec, differences, named_twice
from metering.models import Quota, QuotaDimension, QuotaSubject
from metering.quotas.quota_admin import delete_quota, raise_quota, set_quota
from metering.quotas.quota_rules import Weights, usual_thresholds

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
    """Which limit of its subject a row is."""
    return QuotaPlace(QuotaDimension(quota.dimension), quota.model, quota.for_new_keys)
