"""Creation, temporary override and removal of quotas. `quotas.py` charges them, `quota_states.py`
reads them.

Functions take a session and never commit. Every change writes the audit log in the same
transaction. Changes to the quotas of one subject are serialized, so that the log lists them in the
order in which they happened.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise

from sqlalchemy import and_, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from metering.core.audit import record_change, snapshot
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import (
    QUOTA_TARGET,
    ApiKey,
    Organization,
    Project,
    Quota,
    QuotaDimension,
    QuotaKey,
    QuotaSubject,
    QuotaTerms,
    UsageSubject,
    record_of,
    values_of,
)
from metering.core.money import to_decimal
from metering.pricing.prices import checked_model
from metering.quotas.quota_recount import Uncounted, recount
from metering.quotas.quota_rules import (
    DIMENSIONS,
    FOR_END_USERS,
    FOR_LABEL,
    MINUTE,
    NO_WINDOW,
    WEIGHT_SCALE,
    WINDOW_MINUTES_MAX,
    Kind,
    QuotaState,
    Unit,
    Weights,
    bucket_of,
    token_scale,
    window_start,
)
from metering.quotas.quota_states import states, weights_of
from metering.store.db import Sessions, database_now
from metering.tenants.api_keys import find_api_key
from metering.tenants.key_groups import FOR_KEYS, align_group_limits, lock_groups
from metering.tenants.key_terms import checked_group
from metering.tenants.tenants import as_uuid, find_organization, find_project
from metering.tenants.usage_subjects import (
    checked_end_user,
    checked_label,
    checked_label_key,
    create_usage_subject,
)

LIMIT_MAX = 2**63 - 1  # maximum of the column; about nine million units for a quota on money
PAST_COUNTER_BATCHES_MAX = 50  # per run: a few seconds, during which the worker does nothing else
# Per statement: far below its timeout, even with a backlog of two days of minutes.
PAST_COUNTERS_MAX = 20_000
WEIGHT_MAX = 1_000_000  # a factor of 1000; a larger one is a mistake in the unit
REASON_CHARS_MAX = 500
OVERRIDE_MAX = timedelta(days=366)  # an override that lasts longer is not temporary

# The new terms, or a function from the present ones to the new ones.
NewTerms = QuotaTerms | Callable[[QuotaTerms], QuotaTerms]

USUAL_PERCENTS = (50, 80, 100)
# A limit that is not enforced may be exceeded; more than tenfold is a mistake in the unit.
PERCENT_MAX = 1000
LEFT_MAX_PICOS = 10**18  # a million units, the maximum of one grant
THRESHOLDS_MAX = 10  # per limit; more alerts would not be acted on
ALERTING_DIMENSIONS = frozenset(
    dimension for dimension, (_, unit, *_) in DIMENSIONS.items() if unit is not None and unit.alerts
)

SUBJECT_TABLES: dict[QuotaSubject, type[Organization | Project | ApiKey]] = {
    QuotaSubject.ORGANIZATION: Organization,
    QuotaSubject.PROJECT: Project,
    QuotaSubject.API_KEY: ApiKey,
}
PAST_DAYS_KEPT = timedelta(days=2)
# From the start of the window. Counters of a unit that is missing here are kept as those of days.
PAST_KEPT = {Unit.WEEK: timedelta(days=16), Unit.MONTH: timedelta(days=93)}
# Finds them by the index on the start of the window, however many counters are kept.
DELETE_PAST_COUNTERS = text("""
WITH past AS (
    SELECT c.quota_id, c.window_start
    FROM unnest(CAST(:after AS timestamptz[]), CAST(:before AS timestamptz[])) AS r(after, before)
    JOIN quota_counters c ON c.window_start > r.after AND c.window_start < r.before
    WHERE c.kept_until IS NULL AND c.held = 0
    LIMIT :limit
), left_windows AS (  -- buckets of rolling windows
    SELECT quota_id, window_start
    FROM quota_counters
    WHERE kept_until < now() AND held = 0
    LIMIT :limit
), deleted AS (
    DELETE FROM quota_counters c
    USING (SELECT * FROM past UNION ALL SELECT * FROM left_windows) AS p
    WHERE (c.quota_id, c.window_start) = (p.quota_id, p.window_start)
    RETURNING 1
)
SELECT count(*) FROM deleted
""")

NO_OVERRIDE: dict[str, object] = {
    "override_limit_value": None,
    "override_until": None,
    "override_reason": None,
}
SETTABLE = tuple(each for each in QuotaDimension if each is not QuotaDimension.PREPAID_CREDIT_PICOS)
OF_SELECTOR = (
    "this limit comes from a selector: change the selector, or set a limit of this end user, label"
    " value or key, which then applies instead"
)
OF_OPERATOR = (
    "this limit was set by the operator of the service: set a lower one of your own on the same,"
    " which applies as well, or ask the operator"
)
# Columns that identify a limit, besides its target.
IDENTITY = ("subject_id", "within_id", "for_new_keys", "for_each", *QUOTA_TARGET)
OF_CREDIT = (
    "prepaid credit cannot be set as a limit: grant credit, or make the organization no longer"
    " prepaid only"
)


async def set_quota(
    session: AsyncSession,
    *,
    subject: QuotaSubject,
    subject_ref: str,
    key: QuotaKey,
    terms: NewTerms,
    actor: str,
    later: list[Uncounted] | None = None,
) -> QuotaState:
    """Set one limit. An existing one with the same subject and key keeps its usage.

    `subject_ref` is as in `find_subject`. `terms` may be a function from the present terms; those
    of a new limit are the defaults. With `for_new_keys` the limit does not apply to the subject,
    but is copied to each key created under it from then on. A new limit includes the past usage of
    its window, counted now or, if the list `later` is given, by a `recount` at the end of the
    transaction. With `for_each` the limit is a selector; with `end_user` or `label` it is one of
    that usage subject, and wins over the selector that would give it one, as does that of a key. A
    temporary override that does not exceed the new limit ends. Raises: NotFound, InvalidValue.
    """
    if key.dimension is QuotaDimension.PREPAID_CREDIT_PICOS:
        raise InvalidValue("dimension", OF_CREDIT)
    check_key(key, subject)
    subject_id, organization_id = await find_subject(session, subject, subject_ref)
    if concerns_groups := _concerns_groups(key, subject):
        await lock_groups(session, organization_id)
    await lock_subject(session, subject, subject_id)
    identity, is_unused = await _identity(session, key, subject, subject_id, organization_id)
    selector = aliased(Quota)
    is_set = and_(
        *(getattr(Quota, column) == value for column, value in identity.items()),
        Quota.deleted_at.is_(None),
        selector.deleted_at.is_(None),
    )
    found = (
        await session.execute(
            select(Quota, selector)
            .outerjoin(selector, selector.id == Quota.selector_id)
            .where(is_set)
            .order_by(Quota.selector_id.nulls_first())
            .limit(1)
            .execution_options(populate_existing=True)
        )
    ).one_or_none()
    old: Quota | None = None
    given_by: Quota | None = None
    if found is not None:
        old, given_by = found
    old_terms = old if given_by is None else given_by
    before = None if old is None else snapshot(old)
    weights_before = None if old_terms is None else weights_of(old_terms)
    if callable(terms):
        terms = terms(QuotaTerms(0) if old_terms is None else record_of(QuotaTerms, old_terms))
    values = checked_terms(key.dimension, terms)
    if key.set_by_organization:
        await _check_below_operator(session, identity, terms.limit_value)
    if old is None:
        quota = (
            await session.scalars(insert(Quota).values(**identity, **values).returning(Quota))
        ).one()
    elif old.selector_id is not None:  # its own limit takes over from the selector's, with the use
        quota = await _update(session, old.id, values | NO_OVERRIDE | {"selector_id": None})
    else:
        if old.override_limit_value is not None and old.override_limit_value <= terms.limit_value:
            values |= NO_OVERRIDE
        quota = await _update(session, old.id, values)
    after = snapshot(quota)
    if before != after:
        await record_change(session, actor, "quota.set", str(quota.id), before=before, after=after)
    uncounted: list[Uncounted] = []
    if (
        not key.for_new_keys
        and not key.for_each.startswith(FOR_KEYS)
        and (not is_unused if weights_before is None else weights_of(quota) != weights_before)
    ):
        uncounted.append((quota, organization_id))
    if concerns_groups:
        aligned = await align_group_limits(session, organization_id, actor)
        uncounted += [(each, organization_id) for each in aligned]
    await _count(session, uncounted, later)
    return await _state(session, quota.id)


async def override_quota(
    session: AsyncSession,
    *,
    quota_id: str,
    limit_value: int,
    until: datetime | None,
    reason: str,
    actor: str,
    by_organization: bool = False,
) -> QuotaState:
    """Raise a limit until a time of the database's clock; `until` None ends the override.

    With `by_organization`, the operator's limits are refused. Raises: NotFound, InvalidValue.
    """
    quota = await _existing(session, quota_id, by_organization=by_organization)
    if until is None:
        values = NO_OVERRIDE
    else:
        now = await database_now(session)
        if quota.selector_id is not None:
            raise InvalidValue("quota_id", OF_SELECTOR)
        if quota.for_new_keys:
            raise InvalidValue(
                "quota_id",
                "a limit for new keys has no temporary override: set it, or override that of a key",
            )
        if not quota.limit_value < limit_value <= LIMIT_MAX:
            raise InvalidValue(
                "limit_value",
                f"must be above {quota.limit_value} and at most"
                f" {LIMIT_MAX}{in_units(QuotaDimension(quota.dimension))}",
            )
        if quota.set_by_organization:
            identity = {name: getattr(quota, name) for name in IDENTITY}
            await _check_below_operator(session, identity, limit_value)
        if not now < until <= now + OVERRIDE_MAX:
            raise InvalidValue(
                "expire_time",
                f"must lie within the next {OVERRIDE_MAX.days} days; the time is {now.isoformat()}",
            )
        if not 1 <= len(reason.strip()) <= REASON_CHARS_MAX or "\0" in reason:
            raise InvalidValue("reason", f"must have 1 to {REASON_CHARS_MAX} characters")
        values = {
            "override_limit_value": limit_value,
            "override_until": until,
            "override_reason": reason.strip(),
        }
    await change_quota(session, quota, values, action="quota.override", actor=actor)
    if quota.for_each.startswith(FOR_KEYS):
        await align_group_limits(session, await _organization_of(session, quota), actor)
    return await _state(session, quota.id)


async def delete_quota(
    session: AsyncSession,
    *,
    quota_id: str,
    actor: str,
    later: list[Uncounted] | None = None,
    by_organization: bool = False,
) -> None:
    """Remove one limit, even for running requests; `later` as in `set_quota`.

    With `by_organization`, the operator's limits are refused. Raises: NotFound, InvalidValue.
    """
    quota = await _existing(session, quota_id, by_organization=by_organization)
    await retire_quota(session, quota, actor, later)


async def retire_quota(
    session: AsyncSession, quota: Quota, actor: str, later: list[Uncounted] | None = None
) -> None:
    """Mark a quota as deleted. Its row is kept for the holds charged to it.

    A limit of a usage subject or key that a selector of the same author also concerns becomes one
    of the selector, and keeps its usage. The limits of a deleted selector end with it.
    """
    if quota.selector_id is not None:
        raise InvalidValue("quota_id", OF_SELECTOR)
    before = snapshot(quota)
    selector, organization_id = await _selector_for(session, quota)
    if selector is None:
        values: dict[str, object] = {"deleted_at": func.now()}
    else:
        values = NO_OVERRIDE | {"selector_id": selector.id} | values_of(QuotaTerms, selector)
    weights = weights_of(quota)
    changed = await _update(session, quota.id, values)
    await record_change(session, actor, "quota.delete", str(quota.id), before=before)
    uncounted: list[Uncounted] = []
    if selector is not None and organization_id is not None and weights_of(selector) != weights:
        uncounted.append((changed, organization_id))
    if _concerns_groups(quota, quota.subject):
        owner_id = await _organization_of(session, quota)
        aligned = await align_group_limits(session, owner_id, actor)
        uncounted += [(each, owner_id) for each in aligned]
    await _count(session, uncounted, later)


def _concerns_groups(quota: Quota | QuotaKey, subject: str) -> bool:
    """Return whether a limit is of a key or for each key of a group."""
    return subject == QuotaSubject.API_KEY or quota.for_each.startswith(FOR_KEYS)


async def _count(
    session: AsyncSession, uncounted: list[Uncounted], later: list[Uncounted] | None
) -> None:
    """Count past usage now or, if the list `later` is given, at the end of the transaction."""
    if later is None:
        await recount(session, uncounted)
    else:
        later += uncounted


async def _organization_of(session: AsyncSession, quota: Quota) -> uuid.UUID:
    """Find the organization of a limit on an organization, project or key."""
    if quota.subject == QuotaSubject.ORGANIZATION:
        return quota.subject_id
    subject = QuotaSubject(quota.subject)
    return (await find_subject(session, subject, str(quota.subject_id)))[1]


async def _selector_for(
    session: AsyncSession, quota: Quota
) -> tuple[Quota | None, uuid.UUID | None]:
    """Find the selector that also concerns a limit's usage subject, and its organization."""
    if quota.within_id is None:
        return None, None
    member = await session.get_one(UsageSubject, quota.subject_id)
    for_each = FOR_LABEL + member.label_key if member.label_key else FOR_END_USERS
    selector = await session.scalar(
        select(Quota).where(
            Quota.subject_id == quota.within_id,
            Quota.for_each == for_each,
            *(getattr(Quota, name) == getattr(quota, name) for name in QUOTA_TARGET),
            Quota.deleted_at.is_(None),
        )
    )
    return selector, member.organization_id


async def delete_past_counters(session: AsyncSession, limit: int = PAST_COUNTERS_MAX) -> int:
    """Delete up to `limit` counters of past windows without holds; return how many were deleted.

    They are kept longer than any request runs (`PAST_KEPT`). Records of rule changes that no
    process needs any more (`holds/hold_cache.py`) are deleted as well.
    """
    await session.execute(
        text("DELETE FROM rule_changes WHERE changed_at < now() - :kept"), {"kept": PAST_DAYS_KEPT}
    )
    ranges = past_ranges(await database_now(session))
    parameters = {
        "after": [after for after, _ in ranges],
        "before": [before for _, before in ranges],
        "limit": limit,
    }
    return int(await session.scalar(DELETE_PAST_COUNTERS, parameters) or 0)


def past_ranges(now: datetime) -> list[tuple[datetime, datetime]]:
    """Return the ranges, without their ends, of the times at which only past windows start.

    They leave out the starts of long windows whose counters are kept, with counters of other units
    that start at the same time, and `NO_WINDOW`.
    """
    kept: set[datetime] = {NO_WINDOW}
    for dimension, (_, unit, *_) in DIMENSIONS.items():
        if unit in PAST_KEPT:
            starts_at = window_start(dimension, now)
            while starts_at >= now - PAST_KEPT[unit]:
                kept.add(starts_at)
                starts_at = window_start(dimension, starts_at - MINUTE)
    ends = [*sorted(each for each in kept if each < now - PAST_DAYS_KEPT), now - PAST_DAYS_KEPT]
    return list(pairwise(ends))


async def delete_all_past_counters(sessions: Sessions, limit: int = PAST_COUNTERS_MAX) -> int:
    """Delete past counters in a bounded number of transactions; return how many were deleted.

    If it is interrupted, the next run continues.
    """
    deleted_count = 0
    for _ in range(PAST_COUNTER_BATCHES_MAX):
        async with sessions.begin() as session:
            batch_count = await delete_past_counters(session, limit)
        deleted_count += batch_count
        if batch_count < limit:
            break
    return deleted_count


def check_key(key: QuotaKey, subject: QuotaSubject) -> None:
    """Validate what a limit is set on. Raises: InvalidValue."""
    given = [
        name for name in ("for_new_keys", "for_each", "end_user", "label") if getattr(key, name)
    ]
    if len(given) > 1:
        raise InvalidValue(given[1], f"cannot be combined with {given[0]}: leave one of them out")
    if given and subject not in (QuotaSubject.ORGANIZATION, QuotaSubject.PROJECT):
        raise InvalidValue(given[0], "must be set on an organization or a project, not on a key")
    if key.for_each.startswith(FOR_KEYS):
        checked_group(key.for_each.removeprefix(FOR_KEYS), "for_each")
    elif key.for_each and key.for_each != FOR_END_USERS:
        if not key.for_each.startswith(FOR_LABEL):
            raise InvalidValue(
                "for_each",
                "must be end_user, label:KEY such as label:team, or key:GROUP such as key:free",
            )
        checked_label_key(key.for_each.removeprefix(FOR_LABEL), "for_each")
    if key.model:
        checked_model(key.model)
    check_window(key)


def check_window(key: QuotaKey) -> None:
    """Validate the length of a rolling window. Raises: InvalidValue."""
    minutes = key.window_minutes
    if DIMENSIONS[key.dimension][1] is not Unit.WINDOW:
        if minutes:
            raise InvalidValue(
                "window_minutes",
                f"{key.dimension.spelling} has no window of minutes: leave it out, or limit"
                " requests-per-window, tokens-per-window or another dimension of a window",
            )
        return
    if not 1 <= minutes <= WINDOW_MINUTES_MAX:
        raise InvalidValue(
            "window_minutes",
            f"{key.dimension.spelling} needs the length of its window, 1 to {WINDOW_MINUTES_MAX}"
            f" minutes, got {minutes}",
        )
    if not is_whole(minutes):
        shorter = next(each for each in range(minutes, 0, -1) if is_whole(each))
        longer = next(each for each in range(minutes, 2 * minutes) if is_whole(each))
        raise InvalidValue(
            "window_minutes",
            f"a window of {minutes} minutes would be counted in steps of"
            f" {bucket_of(minutes) // MINUTE} minutes, and is not a multiple of that: give"
            f" {shorter} or {longer}",
        )


def is_whole(window_minutes: int) -> bool:
    """Return True if a rolling window is a whole number of its buckets."""
    return window_minutes * MINUTE % bucket_of(window_minutes) == timedelta(0)


async def _identity(
    session: AsyncSession,
    key: QuotaKey,
    subject: QuotaSubject,
    subject_id: uuid.UUID,
    organization_id: uuid.UUID,
) -> tuple[dict[str, object], bool]:
    """Build the columns that identify a limit; also return whether it is of a new end user.

    An end user without a row has made no request, so that there is no usage to count.
    """
    columns: dict[str, object] = {
        "subject": subject,
        "subject_id": subject_id,
        "within_id": None,
        "dimension": key.dimension,
        "window_minutes": key.window_minutes,
        "model": key.model,
        "for_new_keys": key.for_new_keys,
        "for_each": key.for_each,
        "set_by_organization": key.set_by_organization,
    }
    if not key.end_user and not key.label:
        return columns, False
    kind, label_key, name = QuotaSubject.END_USER, "", checked_end_user(key.end_user)
    if key.label:
        kind, (label_key, name) = QuotaSubject.LABEL, checked_label(key.label)
    member, is_new = await create_usage_subject(session, organization_id, kind, label_key, name)
    is_unused = is_new and kind is QuotaSubject.END_USER
    of_member = {"subject": kind, "subject_id": member.id, "within_id": subject_id}
    return columns | of_member, is_unused


async def find_subject(
    session: AsyncSession, subject: QuotaSubject, ref: str
) -> tuple[uuid.UUID, uuid.UUID]:
    """Look up a subject; return its id and its organization's id. Raises: NotFound.

    `ref` is an id, an organization's name, "organization/project", or a key's prefix.
    """
    match subject:
        case QuotaSubject.ORGANIZATION:
            organization = await find_organization(session, ref)
            return organization.id, organization.id
        case QuotaSubject.PROJECT:
            project = await find_project(session, ref)
            return project.id, project.organization_id
        case QuotaSubject.API_KEY:
            key = await find_api_key(session, ref)
            return key.id, key.organization_id
        case _:
            raise InvalidValue("subject", "must be an organization, a project or a key")


def in_units(dimension: QuotaDimension) -> str:
    """Format the largest limit in currency units, for error messages; empty unless it is money."""
    if DIMENSIONS[dimension][0] is not Kind.MONEY:
        return ""
    return (
        f", which is {to_decimal(LIMIT_MAX):,.0f} units of the organization's currency: leave the"
        " limit out for more"
    )


def checked_terms(dimension: QuotaDimension, terms: QuotaTerms) -> dict[str, object]:
    """Validate the terms of a limit and convert them to column values. Raises: InvalidValue."""
    if not 0 <= terms.limit_value <= LIMIT_MAX:
        raise InvalidValue("limit_value", f"must be between 0 and {LIMIT_MAX}{in_units(dimension)}")
    _check_weights(dimension, weights_of(terms))
    alert_at = usual_thresholds(dimension) if terms.alert_at is None else terms.alert_at
    return values_of(QuotaTerms, terms) | {
        "alert_at": list(checked_percent_thresholds(dimension, alert_at))
    }


def _check_weights(dimension: QuotaDimension, weights: Weights) -> None:
    if weights == Weights():
        return
    kind, _, counts_input, counts_output = DIMENSIONS[dimension]
    if kind is not Kind.TOKENS:
        raise InvalidValue(
            "input_weight_milli",
            f"{dimension.spelling} does not count tokens: leave the weights out",
        )
    for name, weight, counts in zip(
        Weights._fields, weights, (counts_input, counts_input, counts_output), strict=True
    ):
        if not 0 <= weight <= WEIGHT_MAX:
            raise InvalidValue(
                f"{name}_weight_milli",
                f"must be between 0 and {WEIGHT_MAX} thousandths; 1000 counts a token as one",
            )
        if not counts and weight != WEIGHT_SCALE:
            raise InvalidValue(
                f"{name}_weight_milli",
                f"{dimension.spelling} does not count these tokens: leave it out",
            )
    scale = token_scale(dimension, weights)
    if scale is not None and not any(scale.factors):
        raise InvalidValue(
            "output_weight_milli" if counts_output else "input_weight_milli",
            "at least one weight must be more than 0, otherwise no token is counted",
        )


async def _check_below_operator(
    session: AsyncSession, identity: Mapping[str, object], limit_value: int
) -> None:
    """Raise InvalidValue if an organization's limit is above the operator's on the same.

    A limit that is not enforced refuses nothing, so it bounds no other.
    """
    of_operator = dict(identity) | {"set_by_organization": False}
    selector = aliased(Quota)
    allowed = await session.scalar(
        select(func.min(func.coalesce(selector.limit_value, Quota.limit_value)))
        .select_from(Quota)
        .outerjoin(selector, selector.id == Quota.selector_id)
        .where(
            *(getattr(Quota, column) == value for column, value in of_operator.items()),
            Quota.deleted_at.is_(None),
            func.coalesce(selector.enforced, Quota.enforced),
        )
    )
    if allowed is not None and limit_value > allowed:
        raise InvalidValue(
            "limit_value",
            f"must be at most {allowed}, which is the operator's limit on the same, got"
            f" {limit_value}: a higher one would have no effect",
        )


async def _existing(
    session: AsyncSession, quota_id: str, *, by_organization: bool = False
) -> Quota:
    """Lock a quota's subject and return the quota. Raises: NotFound, InvalidValue."""
    key = as_uuid(quota_id)
    quota = None if key is None else await session.get(Quota, key)
    if quota is None:
        raise NotFound("quota", quota_id)
    if by_organization and not quota.set_by_organization:
        raise InvalidValue("quota_id", OF_OPERATOR)
    if quota.dimension == QuotaDimension.PREPAID_CREDIT_PICOS:
        raise InvalidValue("quota_id", OF_CREDIT)
    if quota.within_id is None:
        if _concerns_groups(quota, quota.subject):
            await lock_groups(session, await _organization_of(session, quota))
        await lock_subject(session, QuotaSubject(quota.subject), quota.subject_id)
    else:
        for scope in (QuotaSubject.ORGANIZATION, QuotaSubject.PROJECT):
            await lock_subject(session, scope, quota.within_id)
    await session.refresh(quota)
    if quota.deleted_at is not None:
        raise NotFound("quota", quota_id)
    return quota


async def change_quota(
    session: AsyncSession, quota: Quota, values: dict[str, object], *, action: str, actor: str
) -> None:
    """Set columns of a quota; write the audit log if anything changes."""
    before = snapshot(quota)
    after = snapshot(await _update(session, quota.id, values))
    if before != after:
        await record_change(session, actor, action, str(quota.id), before=before, after=after)


async def _update(session: AsyncSession, quota_id: uuid.UUID, values: dict[str, object]) -> Quota:
    statement = update(Quota).where(Quota.id == quota_id).values(**values).returning(Quota)
    return (await session.scalars(statement.execution_options(populate_existing=True))).one()


async def _state(session: AsyncSession, quota_id: uuid.UUID) -> QuotaState:
    (state,) = await states(session, select(Quota).where(Quota.id == quota_id))
    return state


async def lock_subject(session: AsyncSession, subject: QuotaSubject, subject_id: uuid.UUID) -> None:
    """Serialize changes of a subject's quotas, without blocking admissions."""
    # FOR NO KEY UPDATE: requests admitted concurrently refer to the row and must not wait.
    table = SUBJECT_TABLES[subject]
    await session.execute(
        select(table.id).where(table.id == subject_id).with_for_update(key_share=True)
    )


def usual_thresholds(dimension: QuotaDimension) -> tuple[int, ...]:
    """Return the default alert thresholds of a dimension."""
    return USUAL_PERCENTS if dimension in ALERTING_DIMENSIONS else ()


def checked_percent_thresholds(
    dimension: QuotaDimension, thresholds: Sequence[int]
) -> tuple[int, ...]:
    """Validate and sort alert thresholds in percent; empty for no alerts. Raises: InvalidValue."""
    if thresholds and dimension not in ALERTING_DIMENSIONS:
        raise InvalidValue(
            "alert_at",
            f"a limit on {dimension.spelling} does not alert: leave it out; limits per day, week,"
            " month and lifetime do",
        )
    return _checked_thresholds(thresholds, PERCENT_MAX, "percent of the limit")


def checked_credit_thresholds(thresholds: Sequence[int]) -> tuple[int, ...]:
    """Validate and sort alert thresholds of prepaid credit, in picos. Raises: InvalidValue."""
    return _checked_thresholds(thresholds, LEFT_MAX_PICOS, "picos of remaining credit")


def _checked_thresholds(thresholds: Sequence[int], maximum: int, unit: str) -> tuple[int, ...]:
    if len(thresholds) > THRESHOLDS_MAX:
        raise InvalidValue("alert_at", f"must have at most {THRESHOLDS_MAX} thresholds")
    for value in thresholds:
        if not 1 <= value <= maximum:
            raise InvalidValue(
                "alert_at", f"thresholds must be between 1 and {maximum} {unit}, got {value}"
            )
    if len(set(thresholds)) != len(thresholds):
        raise InvalidValue("alert_at", "must not repeat a threshold")
    return tuple(sorted(thresholds))
