"""Quota queries: remaining amounts by subject, and the limits that apply to a key.

Functions take a session and change nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any, NamedTuple

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Integer,
    Select,
    Text,
    case,
    cast,
    func,
    literal,
    select,
    text,
    true,
    tuple_,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from metering.core.models import (
    ApiKey,
    Organization,
    Person,
    Project,
    Quota,
    QuotaCounter,
    QuotaDimension,
    QuotaSubject,
    QuotaTerms,
    ServiceAccount,
    UsageSubject,
)
from metering.core.pages import PAGE_SIZE, SortKey, page_of
from metering.quotas.quota_rules import (
    BUCKETS_MAX,
    FOR_END_USERS,
    FOR_LABEL,
    NO_WINDOW,
    UNITS,
    USED_MAX,
    QuotaRule,
    QuotaState,
    Weights,
    window_starts,
)
from metering.tenants.key_groups import FOR_KEYS
from metering.tenants.tenants import as_uuid, find_organization

LATEST = datetime.max.replace(tzinfo=UTC)
SUBJECT_ORDER = list(QuotaSubject)
DIMENSION_ORDER = list(QuotaDimension)
# Limits that are set one by one: the index `ix_quotas_listed` finds them by the organization,
# project or key within which they count. The others may be as many as there are end users.
LISTED = text("quotas.selector_id IS NULL AND quotas.subject <> 'end_user'")


@dataclass(frozen=True, slots=True)
class EffectiveQuota:
    """A limit compared with the other limits on the same requests.

    `binding` is True if it has the least remaining of the enforced limits on its dimension and
    window.
    `narrowed_by` is the enforced limit of a wider scope that always runs out first or at the same
    time; None if there is none.
    """

    state: QuotaState
    binding: bool
    narrowed_by: uuid.UUID | None


async def list_quotas(
    session: AsyncSession,
    *,
    organization: str | None = None,
    page_size: int = PAGE_SIZE,
    page_token: str = "",
) -> tuple[list[QuotaState], str]:
    """List a page of all limits, or of those of one organization with its projects and keys.

    Those of label values are included. Those of end users, and those that selectors give, are left
    out: `limits_of_member`. Returns the token of the next page too. Raises: NotFound, InvalidValue.
    """
    query = select(Quota.id).where(LISTED, Quota.deleted_at.is_(None))
    if organization:
        owner = (await find_organization(session, organization)).id
        projects = select(Project.id).where(Project.organization_id == owner)
        keys = select(ApiKey.id).join(Project).where(Project.organization_id == owner)
        owners = union_all(select(literal(owner)), projects, keys)
        query = query.where(func.coalesce(Quota.within_id, Quota.subject_id).in_(owners))
    rows, following = await page_of(
        session,
        query,
        SortKey(_position_in(SUBJECT_ORDER, Quota.subject), int),  # the order of `sort_key`
        SortKey(Quota.subject_id, uuid.UUID),
        SortKey(_position_in(DIMENSION_ORDER, Quota.dimension), int),
        SortKey(Quota.window_minutes, int),
        SortKey(Quota.model.collate("C")),
        SortKey(Quota.id, uuid.UUID),
        page_size=page_size,
        page_token=page_token,
    )
    found = await states(session, select(Quota).where(Quota.id.in_([each for (each,) in rows])))
    return found, following


def _position_in(order: Sequence[str], column: Any) -> ColumnElement[int]:
    return func.array_position(literal(order, ARRAY(Text)), cast(column, Text), type_=Integer)


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
    # Selectors give no limit to an empty value.
    labelled = ((key, value) for key, value in (labels or {}).items() if value)
    names = [(FOR_LABEL + key, "label", key, value) for key, value in labelled]
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
    # A subject without a row gets one with its first request.
    members = [
        Member(for_each, ids.get((kind, key, name), uuid.uuid4()), f"{key}={name}" if key else name)
        for for_each, kind, key, name in names
    ]
    return await _quotas_of(session, members, scopes, model)


async def quotas_of_end_users(
    session: AsyncSession, organization_id: uuid.UUID, end_users: Iterable[UsageSubject]
) -> dict[uuid.UUID, list[QuotaState]]:
    """List the limits of end users in their organization and its projects, by id and sorted.

    Those that a selector would give with the first request are included. An erased end user has
    none.
    """
    projects = await session.scalars(
        select(Project.id).where(Project.organization_id == organization_id)
    )
    members = [Member(FOR_END_USERS, each.id, each.name) for each in end_users if each.name]
    found: dict[uuid.UUID, list[QuotaState]] = {member.id: [] for member in members}
    for state in await _quotas_of(session, members, [organization_id, *projects], None):
        found[state.subject_id].append(state)
    return {subject_id: sorted(states, key=sort_key) for subject_id, states in found.items()}


def tightest(quotas: Iterable[QuotaState]) -> QuotaState | None:
    """Find the enforced limit of which the largest share is used or held; None without one.

    Of equal ones, the first. A limit of zero is used up.
    """

    def share(state: QuotaState) -> Fraction:
        if state.limit_value <= 0:
            return Fraction(max(state.used + state.held, 1))
        return Fraction(state.used + state.held, state.limit_value)

    return max((state for state in quotas if state.rule.enforced), key=share, default=None)


class Member(NamedTuple):
    """End user or label value that selectors with this `for_each` give limits to."""

    for_each: str
    id: uuid.UUID
    shown: str


async def _quotas_of(
    session: AsyncSession,
    members: Sequence[Member],
    scopes: Collection[uuid.UUID],
    model: str | None,
) -> list[QuotaState]:
    """List the limits of members within some organizations and projects; own ones win."""
    if not members:
        return []
    of_model = true() if model is None else Quota.model.in_(("", model))
    ids = [member.id for member in members]
    present = await states(
        session,
        select(Quota).where(Quota.subject_id.in_(ids), Quota.within_id.in_(scopes), of_model),
    )
    own = {(state.subject_id, state.rule.target) for state in present if not state.rule.selector_id}
    found = [
        state
        for state in present
        if not state.rule.selector_id or (state.subject_id, state.rule.target) not in own
    ]
    taken = {(state.subject_id, state.rule.target) for state in found}
    for_each = {member.for_each for member in members}
    selectors = await states(
        session,
        select(Quota).where(Quota.subject_id.in_(scopes), Quota.for_each.in_(for_each), of_model),
    )
    for state in selectors:
        # It counts within the subject of its selector.
        given = state._replace(within_name=state.subject_name, is_planned=True)
        for member in members:
            is_given = member.for_each == state.rule.for_each
            if is_given and (member.id, state.rule.target) not in taken:
                rule = state.rule.of_subject(uuid.uuid4().int, member.id, member.shown)
                found.append(given._replace(rule=rule, subject_name=member.shown))
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
    rolls = Quota.window_minutes > 0
    starts = [(unit, window_starts(now)[number]) for number, unit in enumerate(UNITS) if unit]
    first = case(
        (rolls, _counted_from(now)),
        *((Quota.dimension.endswith(f"_per_{unit}"), literal(start)) for unit, start in starts),
        else_=literal(NO_WINDOW),
    )
    counters = (
        select(
            *(
                func.coalesce(func.sum(each), 0).label(name)
                for name, each in (
                    ("used", QuotaCounter.used),
                    ("held", QuotaCounter.held),
                    ("would_refuse", QuotaCounter.would_refuse_count),
                )
            ),
            func.array_agg(QuotaCounter.window_start).label("starts"),
            func.array_agg(QuotaCounter.used + QuotaCounter.held).label("amounts"),
        )
        .where(
            QuotaCounter.quota_id == Quota.id,
            QuotaCounter.window_start.between(first, case((rolls, literal(LATEST)), else_=first)),
        )
        .correlate(Quota)
        .lateral("counters")
    )
    counted = (
        query.where(Quota.deleted_at.is_(None))
        .outerjoin(selector, selector.id == Quota.selector_id)
        .join(counters, true())
        .where(selector.deleted_at.is_(None))
        .add_columns(
            selector,
            counters.c.used,
            counters.c.held,
            counters.c.would_refuse,
            counters.c.starts,
            counters.c.amounts,
        )
    )
    rows = (await session.execute(counted)).all()
    ids = {each for row in rows for each in (row[0].subject_id, row[0].within_id) if each}
    names = await subject_names(session, ids)
    return sorted((_state(row[0], row[1], row[2:], now, names) for row in rows), key=sort_key)


def _counted_from(now: datetime) -> ColumnElement[datetime]:
    """Build SQL of `QuotaRule.counted_from`: the first bucket that a rolling window counts."""
    bucket = (Quota.window_minutes + BUCKETS_MAX - 1) // BUCKETS_MAX
    present = func.date_bin(func.make_interval(0, 0, 0, 0, 0, bucket), now, NO_WINDOW)
    return present - func.make_interval(0, 0, 0, 0, 0, Quota.window_minutes)


def effective(quotas: Sequence[QuotaState]) -> list[EffectiveQuota]:
    """Compare limits on the same requests with each other; those for new keys are left out."""
    applied = [state for state in quotas if not state.for_new_keys]
    binding: dict[tuple[QuotaDimension, int], QuotaState] = {}
    for state in applied:
        counted = state.dimension, state.rule.window_minutes
        tightest = binding.get(counted)
        if state.rule.enforced and (tightest is None or state.remaining < tightest.remaining):
            binding[counted] = state
    return [
        EffectiveQuota(
            state,
            binding.get((state.dimension, state.rule.window_minutes)) is state,
            _narrowed_by(state, applied),
        )
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
    if (parent.dimension, parent.window_minutes) != (child.dimension, child.window_minutes):
        return False
    own_limit, parent_limit = child.limit_value or 0, parent.limit_value or 0
    if parent.token_scale is None or child.token_scale is None:
        return parent_limit <= own_limit
    shares = zip(parent.token_scale.factors, child.token_scale.factors, strict=True)
    by_parent = own_limit * child.token_scale.divisor
    by_child = parent_limit * parent.token_scale.divisor
    return all(factor * by_parent >= other * by_child for factor, other in shares)


def sort_key(state: QuotaState) -> tuple[int, str, int, int, str, bool]:
    """Build a key that sorts by subject, dimension, window and model."""
    first = (
        SUBJECT_ORDER.index(state.subject),
        str(state.subject_id),
        DIMENSION_ORDER.index(state.dimension),
        state.rule.window_minutes,
    )
    return *first, state.model, state.for_new_keys


async def subject_names(
    session: AsyncSession, subject_ids: Collection[uuid.UUID]
) -> dict[uuid.UUID, str]:
    """Look up display names: of organizations, projects ("org/project"), keys, persons, service
    accounts and usage subjects.

    A key has its prefix, an end user the name that its customer gave it, a label `KEY=VALUE`.
    """
    organizations = select(Organization.id, Organization.name)
    projects = select(Project.id, Organization.name + "/" + Project.name).join(
        Organization, Organization.id == Project.organization_id
    )
    keys = select(ApiKey.id, ApiKey.prefix)
    persons = select(Person.id, Person.display_name)
    accounts = select(ServiceAccount.id, ServiceAccount.name)
    label = UsageSubject.label_key + "=" + UsageSubject.name
    members = select(
        UsageSubject.id,
        func.coalesce(case((UsageSubject.kind == "label", label), else_=UsageSubject.name), ""),
    )
    queries = (
        organizations.where(Organization.id.in_(subject_ids)),
        projects.where(Project.id.in_(subject_ids)),
        keys.where(ApiKey.id.in_(subject_ids)),
        persons.where(Person.id.in_(subject_ids)),
        accounts.where(ServiceAccount.id.in_(subject_ids)),
        members.where(UsageSubject.id.in_(subject_ids)),
    )
    return {row[0]: row[1] for row in await session.execute(union_all(*queries))}


def _state(
    quota: Quota,
    selector: Quota | None,
    counts: Sequence[Any],
    now: datetime,
    names: Mapping[uuid.UUID, str],
) -> QuotaState:
    used, held, would_refuse_count, starts, amounts = counts
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
        set_by_organization=quota.set_by_organization,
        subject_name=names.get(quota.subject_id, "") if quota.within_id else "",
        scope_name=scope.partition("/")[2] if quota.within_id or quota.for_each else "",
        group=selector.for_each.removeprefix(FOR_KEYS)
        if selector and quota.subject == QuotaSubject.API_KEY
        else "",
    )
    return QuotaState(
        rule,
        min(int(used), USED_MAX),
        min(int(held), USED_MAX),
        now,
        subject_name=names.get(quota.subject_id, ""),
        within_name=scope if quota.within_id else "",
        override_reason=(terms.override_reason or "") if rule.override_until else "",
        would_refuse_count=int(would_refuse_count),
        for_new_keys=quota.for_new_keys,
        alert_at=tuple(terms.alert_at),
        buckets=tuple(sorted(zip(starts, amounts, strict=True)))
        if rule.window_minutes and starts
        else (),
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
        window_minutes=quota.window_minutes,
    )
