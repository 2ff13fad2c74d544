"""Quota queries: remaining amounts by subject, and the limits that apply to a key.

Functions take a session and change nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import Select, and_, case, func, literal, or_, select, true, tuple_, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from metering.core.models import (
    ApiKey,
    Organization,
    Project,
    Quota,
    QuotaCounter,
    QuotaDimension,
    QuotaSubject,
    QuotaTerms,
    UsageSubject,
)
from metering.quotas.quota_rules import (
    FOR_END_USERS,
    FOR_LABEL,
    QuotaRule,
    QuotaState,
    Weights,
    window_start,
)
from metering.tenants.key_groups import FOR_KEYS
from metering.tenants.tenants import as_uuid, find_organization

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
    """List all limits, or those of one organization with its projects, keys and label values.

    Those of end users, and those that selectors give, are left out: `limits_of_member`.
    """
    query = select(Quota).where(Quota.selector_id.is_(None), Quota.subject != QuotaSubject.END_USER)
    if organization:
        owner = (await find_organization(session, organization)).id
        projects = select(Project.id).where(Project.organization_id == owner)
        keys = select(ApiKey.id).where(ApiKey.project_id.in_(projects))
        query = query.where(
            or_(
                Quota.subject_id == owner,
                Quota.subject_id.in_(projects),
                Quota.subject_id.in_(keys),
                and_(Quota.within_id.is_not(None), Quota.within_id == owner),
                and_(Quota.within_id.is_not(None), Quota.within_id.in_(projects)),
            )
        )
    return await states(session, query)


async def find_quota(session: AsyncSession, quota_id: str) -> list[QuotaState]:
    """Look up one limit by its id; the list is empty if there is none."""
    key = as_uuid(quota_id)
    return [] if key is None else await states(session, select(Quota).where(Quota.id == key))


async def limits_of_member(
    session: AsyncSession,
    *,
    organization: str,
    end_user: str = "",
    labels: Mapping[str, str] | None = None,
) -> list[QuotaState]:
    """List the limits of an end user or of labels in an organization and its projects.

    Those that a selector would give with the first request are included. Raises: NotFound.
    """
    owner = (await find_organization(session, organization)).id
    projects = await session.scalars(select(Project.id).where(Project.organization_id == owner))
    found = await member_quotas_for(
        session,
        organization_id=owner,
        scopes=[owner, *projects],
        end_user=end_user,
        labels=labels,
    )
    return sorted(found, key=sort_key)


async def member_quotas_for(
    session: AsyncSession,
    *,
    organization_id: uuid.UUID,
    scopes: Collection[uuid.UUID],
    model: str | None = None,
    end_user: str = "",
    labels: Mapping[str, str] | None = None,
) -> list[QuotaState]:
    """List the limits on requests with this end user and these labels, beside those of the key.

    `scopes` are the organization and projects within which they count. A limit that a selector
    would give with the first request is included, without usage.
    """
    names = [(FOR_LABEL + key, "label", key, value) for key, value in (labels or {}).items()]
    if end_user:
        names.append((FOR_END_USERS, "end_user", "", end_user))
    if not names:
        return []
    identity = tuple_(UsageSubject.kind, UsageSubject.label_key, UsageSubject.name)
    rows = await session.scalars(
        select(UsageSubject).where(
            UsageSubject.organization_id == organization_id,
            identity.in_([name[1:] for name in names]),
        )
    )
    ids = {(row.kind, row.label_key, row.name): row.id for row in rows}
    of_model = true() if model is None else Quota.model.in_(("", model))
    present = await states(
        session,
        select(Quota).where(
            Quota.subject_id.in_(ids.values()), Quota.within_id.in_(scopes), of_model
        ),
    )
    own = {(state.subject_id, state.rule.target) for state in present if not state.rule.selector_id}
    found = [
        state
        for state in present
        if not state.rule.selector_id or (state.subject_id, state.rule.target) not in own
    ]
    taken = {(state.subject_id, state.rule.target) for state in found}
    selectors = await states(
        session,
        select(Quota).where(
            Quota.subject_id.in_(scopes), Quota.for_each.in_([name[0] for name in names]), of_model
        ),
    )
    for state in selectors:
        for for_each, *name in names:
            if for_each != state.rule.for_each or not name[2]:
                continue
            subject_id = ids.get((name[0], name[1], name[2]), uuid.uuid4())
            if (subject_id, state.rule.target) not in taken:
                shown = f"{name[1]}={name[2]}" if name[1] else name[2]
                rule = state.rule.of_subject(uuid.uuid4().int, subject_id, shown)
                # It counts within the subject of its selector.
                state = state._replace(within_name=state.subject_name)
                found.append(state._replace(rule=rule, subject_name=shown, is_planned=True))
    return found


async def quotas_for(
    session: AsyncSession, *, subject_ids: Collection[uuid.UUID], model: str | None = None
) -> list[QuotaState]:
    """List the limits on requests of these subjects to a model, or to every model if it is None."""
    query = select(Quota).where(
        Quota.subject_id.in_(subject_ids), Quota.for_new_keys.is_(False), Quota.for_each == ""
    )
    if model is not None:
        query = query.where(Quota.model.in_(("", model)))
    return await states(session, query)


async def states(session: AsyncSession, query: Select[Quota]) -> list[QuotaState]:
    """Run a query for quotas; return the active ones with the counters of the current windows."""
    now: datetime = (await session.scalars(select(func.clock_timestamp()))).one()
    selector = aliased(Quota)
    starts = case(*((Quota.dimension == d, literal(window_start(d, now))) for d in QuotaDimension))
    counted = (
        query.where(Quota.deleted_at.is_(None))
        .outerjoin(
            QuotaCounter,
            and_(QuotaCounter.quota_id == Quota.id, QuotaCounter.window_start == starts),
        )
        .outerjoin(selector, selector.id == Quota.selector_id)
        .where(selector.deleted_at.is_(None))
        .add_columns(
            selector,
            *(
                func.coalesce(each, 0)
                for each in (QuotaCounter.used, QuotaCounter.held, QuotaCounter.would_refuse_count)
            ),
        )
    )
    rows = (await session.execute(counted)).all()
    ids = {each for row in rows for each in (row[0].subject_id, row[0].within_id) if each}
    names = await subject_names(session, ids)
    return sorted((_state(row[0], row[1], row[2:], now, names) for row in rows), key=sort_key)


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
    subject_ids = {state.rule.within_id or state.subject_id}
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
        and includes(other.rule, state.rule)
        and narrows(other.rule, state.rule)
    ]
    return (
        min(above, key=lambda other: (other.limit_value, sort_key(other))).quota_id
        if above
        else None
    )


def includes(parent: QuotaRule, child: QuotaRule) -> bool:
    """Return True if `parent`, one of the same payer, counts all requests of `child`'s subject."""
    if parent.within_id is not None or child.within_id is None:
        return parent.within_id is None or (
            (parent.subject_id, parent.within_id) == (child.subject_id, child.within_id)
        )
    return parent.subject is QuotaSubject.ORGANIZATION or parent.subject_id == child.within_id


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
    """Look up display names: of organizations, projects ("org/project"), keys and usage subjects.

    A key has its prefix, an end user the name that its customer gave it, a label `KEY=VALUE`.
    """
    organizations = select(Organization.id, Organization.name)
    projects = select(Project.id, Organization.name + "/" + Project.name).join(
        Organization, Organization.id == Project.organization_id
    )
    keys = select(ApiKey.id, ApiKey.prefix)
    label = UsageSubject.label_key + "=" + UsageSubject.name
    members = select(
        UsageSubject.id,
        func.coalesce(case((UsageSubject.kind == "label", label), else_=UsageSubject.name), ""),
    )
    queries = (
        organizations.where(Organization.id.in_(subject_ids)),
        projects.where(Project.id.in_(subject_ids)),
        keys.where(ApiKey.id.in_(subject_ids)),
        members.where(UsageSubject.id.in_(subject_ids)),
    )
    return {row[0]: row[1] for row in await session.execute(union_all(*queries))}


def _state(
    quota: Quota,
    selector: Quota | None,
    counts: Sequence[int],
    now: datetime,
    names: Mapping[uuid.UUID, str],
) -> QuotaState:
    used, held, would_refuse_count = counts
    terms = selector or quota
    scope = names.get(quota.within_id or quota.subject_id, "")
    rule = replace(
        rule_now(terms, now),
        id=quota.id,
        subject=QuotaSubject(quota.subject),
        subject_id=quota.subject_id,
        for_each=quota.for_each,
        within_id=quota.within_id,
        selector_id=quota.selector_id,
        subject_name=names.get(quota.subject_id, "") if quota.within_id else "",
        scope_name=scope.partition("/")[2] if quota.within_id or quota.for_each else "",
        group=selector.for_each.removeprefix(FOR_KEYS)
        if selector and quota.subject == QuotaSubject.API_KEY
        else "",
    )
    return QuotaState(
        rule,
        used,
        held,
        now,
        subject_name=names.get(quota.subject_id, ""),
        within_name=scope if quota.within_id else "",
        override_reason=(terms.override_reason or "") if rule.override_until else "",
        would_refuse_count=would_refuse_count,
        for_new_keys=quota.for_new_keys,
        alert_at=tuple(terms.alert_at),
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
