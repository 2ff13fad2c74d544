"""Quota queries: remaining amounts by subject, and the limits that apply to a key.

Functions take a session and change nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Select, and_, case, func, literal, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import (
    ApiKey,
    Organization,
    Project,
    Quota,
    QuotaCounter,
    QuotaDimension,
    QuotaSubject,
    QuotaTerms,
)
from metering.quotas.quota_rules import QuotaRule, QuotaState, Weights, window_start
from metering.tenants.tenants import find_organization

SUBJECT_ORDER = list(QuotaSubject)
DIMENSION_ORDER = list(QuotaDimension)


@dataclass(frozen=True, slots=True)
class EffectiveQuota:
    """A limit compared with the other limits on the same requests.

    `binding` is True if it has the least remaining of the enforced limits on its dimension.
    `narrowed_by` is the enforced limit of a wider scope that always runs out first or at the same
    time; None if there is none.
    """

    state: QuotaState
    binding: bool
    narrowed_by: uuid.UUID | None


async def list_quotas(
    session: AsyncSession, *, organization: str | None = None
) -> list[QuotaState]:
    """List all limits, or those of one organization with its projects and keys."""
    query = select(Quota)
    if organization:
        owner = (await find_organization(session, organization)).id
        projects = select(Project.id).where(Project.organization_id == owner)
        keys = select(ApiKey.id).where(ApiKey.project_id.in_(projects))
        query = query.where(
            or_(
                Quota.subject_id == owner,
                Quota.subject_id.in_(projects),
                Quota.subject_id.in_(keys),
            )
        )
    return await states(session, query)


async def quotas_for(
    session: AsyncSession, *, subject_ids: Collection[uuid.UUID], model: str | None = None
) -> list[QuotaState]:
    """List the limits on requests of these subjects to a model, or to every model if it is None."""
    query = select(Quota).where(Quota.subject_id.in_(subject_ids), Quota.for_new_keys.is_(False))
    if model is not None:
        query = query.where(Quota.model.in_(("", model)))
    return await states(session, query)


async def states(session: AsyncSession, query: Select[Quota]) -> list[QuotaState]:
    """Run a query for quotas; return the active ones with the counters of the current windows."""
    now: datetime = (await session.scalars(select(func.clock_timestamp()))).one()
    starts = case(*((Quota.dimension == d, literal(window_start(d, now))) for d in QuotaDimension))
    counted = (
        query.where(Quota.deleted_at.is_(None))
        .outerjoin(
            QuotaCounter,
            and_(QuotaCounter.quota_id == Quota.id, QuotaCounter.window_start == starts),
        )
        .add_columns(
            *(
                func.coalesce(each, 0)
                for each in (QuotaCounter.used, QuotaCounter.held, QuotaCounter.would_refuse_count)
            )
        )
    )
    rows = (await session.execute(counted)).all()
    names = await subject_names(session, {row[0].subject_id for row in rows})
    return sorted((_state(row[0], row[1:], now, names) for row in rows), key=sort_key)


def effective(quotas: Sequence[QuotaState]) -> list[EffectiveQuota]:
    """Compare limits on the same requests with each other; those for new keys are left out."""
    applied = [state for state in quotas if not state.for_new_keys]
    binding: dict[QuotaDimension, QuotaState] = {}
    for state in applied:
        tightest = binding.get(state.dimension)
        if state.rule.enforced and (tightest is None or state.remaining < tightest.remaining):
            binding[state.dimension] = state
    return [
        EffectiveQuota(state, binding.get(state.dimension) is state, _narrowed_by(state, applied))
        for state in applied
    ]


async def narrowed_by(session: AsyncSession, state: QuotaState) -> uuid.UUID | None:
    """Find the limit of a wider scope that makes this one ineffective; None if there is none."""
    subject_ids = {state.subject_id}
    if state.subject is QuotaSubject.API_KEY:
        project_id = await session.scalar(
            select(ApiKey.project_id).where(ApiKey.id == state.subject_id)
        )
        subject_ids |= {project_id} if project_id else set()
    if state.subject is not QuotaSubject.ORGANIZATION:
        above = select(Project.organization_id).where(Project.id.in_(subject_ids))
        subject_ids |= set(await session.scalars(above))
    return _narrowed_by(state, await quotas_for(session, subject_ids=subject_ids))


def _narrowed_by(state: QuotaState, others: Iterable[QuotaState]) -> uuid.UUID | None:
    """Find the tightest enforced limit of a wider scope that always runs out no later."""
    rank = SUBJECT_ORDER.index(state.subject), state.model != ""
    above = [
        other
        for other in others
        if other.rule.enforced
        and (SUBJECT_ORDER.index(other.subject), other.model != "") != rank
        and SUBJECT_ORDER.index(other.subject) <= rank[0]
        and other.model in ("", state.model)
        and narrows(other.rule, state.rule)
    ]
    return (
        min(above, key=lambda other: (other.limit_value, sort_key(other))).quota_id
        if above
        else None
    )


def narrows(parent: QuotaRule, child: QuotaRule) -> bool:
    """Return True if `parent`, which counts all that `child` counts, runs out no later.

    That is so if each kind of token uses at least as large a share of the parent's limit as of the
    child's.
    """
    if parent.dimension is not child.dimension:
        return False
    own_limit, parent_limit = child.limit_value or 0, parent.limit_value or 0
    if parent.token_scale is None or child.token_scale is None:
        return parent_limit <= own_limit
    shares = zip(parent.token_scale.factors, child.token_scale.factors, strict=True)
    by_parent = own_limit * child.token_scale.divisor
    by_child = parent_limit * parent.token_scale.divisor
    return all(factor * by_parent >= other * by_child for factor, other in shares)


def sort_key(state: QuotaState) -> tuple[int, str, int, str, bool]:
    """Build a key that sorts by subject, dimension and model."""
    first = (
        SUBJECT_ORDER.index(state.subject),
        str(state.subject_id),
        DIMENSION_ORDER.index(state.dimension),
    )
    return *first, state.model, state.for_new_keys


async def subject_names(
    session: AsyncSession, subject_ids: Collection[uuid.UUID]
) -> dict[uuid.UUID, str]:
    """Look up display names: of organizations, projects ("org/project"), and key prefixes."""
    organizations = select(Organization.id, Organization.name)
    projects = select(Project.id, Organization.name + "/" + Project.name).join(
        Organization, Organization.id == Project.organization_id
    )
    keys = select(ApiKey.id, ApiKey.prefix)
    queries = (
        organizations.where(Organization.id.in_(subject_ids)),
        projects.where(Project.id.in_(subject_ids)),
        keys.where(ApiKey.id.in_(subject_ids)),
    )
    return {row[0]: row[1] for row in await session.execute(union_all(*queries))}


def _state(
    quota: Quota, counts: Sequence[int], now: datetime, names: Mapping[uuid.UUID, str]
) -> QuotaState:
    used, held, would_refuse_count = counts
    rule = rule_now(quota, now)
    return QuotaState(
        rule,
        used,
        held,
        now,
        subject_name=names.get(quota.subject_id, ""),
        override_reason=(quota.override_reason or "") if rule.override_until else "",
        would_refuse_count=would_refuse_count,
        for_new_keys=quota.for_new_keys,
        alert_at=tuple(quota.alert_at),
    )


def weights_of(terms: Quota | QuotaTerms) -> Weights:
    return Weights(
        terms.input_weight_milli, terms.cached_input_weight_milli, terms.output_weight_milli
    )


def rule_now(quota: Quota, now: datetime) -> QuotaRule:
    """Convert a quota's row to the rule in force at a time."""
    raised = quota.override_until is not None and quota.override_until > now
    return QuotaRule(
        id=quota.id,
        subject=QuotaSubject(quota.subject),
        subject_id=quota.subject_id,
        model=quota.model,
        dimension=QuotaDimension(quota.dimension),
        limit_value=quota.override_limit_value if raised else quota.limit_value,
        weights=weights_of(quota),
        enforced=quota.enforced,
        base_limit_value=quota.limit_value,
        override_until=quota.override_until if raised else None,
    )
