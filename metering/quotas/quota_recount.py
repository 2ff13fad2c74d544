"""Makes a quota that is new, or counts differently from now on, count what its subject has used already, to the token.

Nobody admits while the sum is taken: admissions share a lock that is held alone here (`hold_rows.BEGIN_ADMITTING`), and the live
holds of the subject are locked like by any batch. So every charge is either in the sum or made under the new quota, never both and
never neither. Live holds are charged to the quota from then on.

A long window is summed up in two steps, so that admissions wait for the second one only: first, without the lock, what had ended
before `SETTLED_AGE`, of which no transaction can be open any more; then the rest.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Boolean,
    ColumnElement,
    DateTime,
    Select,
    Text,
    TextClause,
    Uuid,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncSession

from metering.holds.hold_rows import QUOTA_LOCK
from metering.models import Hold, HoldState, Quota, QuotaCounter, QuotaDimension, QuotaSubject
from metering.quotas.quota_rules import DIMENSIONS, NO_WINDOW, Kind, Unit, Weights, token_scale, window_end, window_start
from metering.quotas.quotas import USED_MAX

# A batch of hold operations is given up after some seconds, and the server ends a transaction that idles.
SETTLED_AGE = timedelta(minutes=2)
# A batch that waited for the lock counts in the window of its beginning; it waits no longer than a statement may take.
BORDER_AGE = timedelta(minutes=1)
EARLY_TIMEOUT_MS = 600_000  # a month of a large customer is millions of rows, and nobody waits for them
LOCKED_TIMEOUT_MS = 3_000  # below what a batch waits for a lock: rather no quota than no admissions
FOR_EVER = datetime(9999, 1, 1, tzinfo=UTC)

SUBJECT_COLUMNS = {
    QuotaSubject.ORGANIZATION: Hold.organization_id,
    QuotaSubject.PROJECT: Hold.project_id,
    QuotaSubject.API_KEY: Hold.api_key_id,
}

Window = tuple[datetime, datetime]
Uncounted = tuple[Quota, uuid.UUID]  # with the organization of its subject


def amount(sent: str, cached: str, output: str) -> str:
    """SQL of a weighted sum, rounded up, as `quota_rules.Scale.amount` has it."""
    return f"(({sent} - {cached}) * w_input + {cached} * w_cached + {output} * w_output + :divisor - 1) / :divisor"


def posted_at(border: str) -> str:
    """SQL of what a hold had been charged before a border between two windows, by the marks of its extensions."""
    posted = f"""(SELECT max(posted_minutes[i + 1]) FROM generate_series(1, cardinality(posted_minutes), 2) AS i
                  WHERE posted_minutes[i] < extract(epoch FROM {border}) / 60)"""
    return f"""CASE WHEN charged_at < {border} THEN total WHEN admitted_at >= {border} THEN 0
               ELSE coalesce((SELECT {amount("sent", "cached", "(mark - sent)")} FROM (SELECT {posted} AS mark) m), 0) END"""


# All that was charged to the subject in each of some windows by holds that ended in a time, and by live ones. A settled hold has
# one usage event. An expired one is charged its lease, until its owner has told by a usage event beyond the one of its expiry what
# it delivered.
COLUMNS = """
    h.state, h.posted_minutes, h.posted_token_count AS posted_tokens, h.admitted_at, h.charged_at, h.input_token_count AS sent,
    h.cached_input_token_count AS cached, h.leased_token_count AS leased, h.price_version_id, h.embedding,
"""
OF_SUBJECT = "h.{subject_column} = :subject_id AND (:model = '' OR h.model = :model)"
CHARGES = f"""
WITH charged_holds AS (
    SELECT {COLUMNS}
        true AS told, e.input_token_count + e.embedding_token_count AS told_input, e.delivered_token_count AS told_output
    FROM usage_events e JOIN holds h ON h.id = e.hold_id
    WHERE e.organization_id = :organization_id AND e.settled_at >= :since AND e.settled_at < :until AND e.part = 0
        AND h.state = 'settled' AND {OF_SUBJECT}
    UNION ALL
    SELECT {COLUMNS}
        h.state = 'expired' AND e.parts > CASE WHEN h.delivered_token_count > 0 THEN 1 ELSE 0 END, e.input, e.delivered
    FROM (
        SELECT * FROM holds WHERE organization_id = :organization_id AND state = 'held' AND :live
        UNION ALL
        SELECT * FROM holds
        WHERE organization_id = :organization_id AND (state = 'expired' OR (state = 'voided' AND posted_token_count > 0))
            AND ended_at >= :since AND ended_at < :until
    ) h,
    LATERAL (SELECT count(*) AS parts, coalesce(sum(input_token_count + embedding_token_count), 0)::bigint AS input,
                    coalesce(sum(delivered_token_count), 0)::bigint AS delivered
             FROM usage_events WHERE hold_id = h.id) e
    WHERE {OF_SUBJECT}
), found AS (
    SELECT c.*,
        coalesce(CAST(:input AS bigint), CASE WHEN embedding THEN p.embedding_picos_per_token ELSE p.input_picos_per_token END)
            AS w_input,
        coalesce(CAST(:cached AS bigint),
                 CASE WHEN embedding THEN p.embedding_picos_per_token ELSE p.cached_input_picos_per_token END) AS w_cached,
        coalesce(CAST(:output AS bigint), p.output_picos_per_token) AS w_output
    FROM charged_holds c JOIN price_versions p ON p.id = c.price_version_id
)
"""
AMOUNTS = f"""
, posted AS (
    SELECT *, CASE WHEN posted_tokens > 0 THEN {amount("sent", "cached", "(posted_tokens - sent)")} ELSE 0 END AS posted FROM found
), charged AS (
    SELECT *,
        CASE WHEN told THEN greatest({amount("told_input", "least(cached, told_input)", "told_output")}, posted)
             WHEN state = 'expired' THEN greatest({amount("sent", "cached", "leased")}, posted) ELSE posted END AS total,
        CASE WHEN state <> 'held' THEN 0
             WHEN posted_tokens > 0 THEN {amount("sent", "cached", "leased")} - posted
             ELSE {amount("sent", "(CASE WHEN w_cached > w_input THEN sent ELSE 0 END)", "leased")} END AS held
    FROM posted
)
SELECT window_start, least(sum({posted_at("window_end")} - {posted_at("window_start")}), {USED_MAX})::bigint AS used,
    sum(CASE WHEN charged_at >= window_start AND charged_at < window_end THEN held ELSE 0 END)::bigint AS held
FROM charged, unnest(CAST(:starts AS timestamptz[]), CAST(:ends AS timestamptz[])) AS s(window_start, window_end)
GROUP BY 1
"""
REQUESTS = """
SELECT s.window_start, count(*) AS used, 0 AS held
FROM found f JOIN unnest(CAST(:starts AS timestamptz[]), CAST(:ends AS timestamptz[])) AS s(window_start, window_end)
    ON admitted_at >= s.window_start AND admitted_at < s.window_end
WHERE state <> 'voided'
GROUP BY 1
"""
CONCURRENCY = """
SELECT window_start, 0 AS used, count(*) AS held FROM found, unnest(CAST(:starts AS timestamptz[])) AS s(window_start)
WHERE state = 'held' GROUP BY 1
"""
TAILS = {Kind.CONCURRENCY: CONCURRENCY, Kind.REQUESTS: REQUESTS, Kind.TOKENS: AMOUNTS, Kind.MONEY: AMOUNTS}
TIME = DateTime(timezone=True)
PARAMETERS: dict[str, BindParameter[Any]] = {
    "organization_id": bindparam("organization_id", type_=Uuid()),
    "subject_id": bindparam("subject_id", type_=Uuid()),
    "model": bindparam("model", type_=Text()),
    "starts": bindparam("starts", type_=ARRAY(TIME)),
    "ends": bindparam("ends", type_=ARRAY(TIME)),
    "since": bindparam("since", type_=TIME),
    "until": bindparam("until", type_=TIME),
    "live": bindparam("live", type_=Boolean()),
    **{name: bindparam(name, type_=BigInteger()) for name in ("input", "cached", "output", "divisor")},
}


@dataclass(frozen=True, slots=True)
class Charges:
    """What was used and held in each window by its start, of holds that ended before `until`."""

    windows: frozenset[Window] = frozenset()
    until: datetime = NO_WINDOW
    used: Counter[datetime] = field(default_factory=Counter)
    held: Counter[datetime] = field(default_factory=Counter)


async def recount(session: AsyncSession, uncounted: Sequence[Uncounted]) -> None:
    """Write the counters of quotas anew, and charge the live holds of their subjects to them. Counters of past windows go.

    From here to the end of the transaction nobody admits: whoever makes many changes in one does this last, and for all at once.
    """
    if not uncounted:
        return
    await session.execute(text(f"SET LOCAL statement_timeout = {EARLY_TIMEOUT_MS}"))
    early = [await _ended_long_ago(session, *each) for each in uncounted]
    await session.execute(text(f"SET LOCAL statement_timeout = {LOCKED_TIMEOUT_MS}"))
    await session.execute(text(f"SELECT pg_advisory_xact_lock({QUOTA_LOCK})"))
    if len(uncounted) > 1:  # all at once, since one subject's after another's would not be in the order of every batch
        await session.execute(_locked(or_(*(_of_subject(quota) for quota, _ in uncounted))).with_only_columns(Hold.id))
    for (quota, organization_id), charges in zip(uncounted, early, strict=True):
        await _write(session, quota, organization_id, charges)
    await session.execute(text("SET LOCAL statement_timeout = DEFAULT"))


async def _write(session: AsyncSession, quota: Quota, organization_id: uuid.UUID, early: Charges) -> None:
    """Count one quota, with the lock."""
    dimension = QuotaDimension(quota.dimension)
    live = (await session.execute(_locked(_of_subject(quota)))).all()
    windows = _windows_about(dimension, await _clock(session))
    by_admission = DIMENSIONS[dimension][0] is Kind.REQUESTS
    windows |= {_window(dimension, row.admitted_at if by_admission else row.charged_at) for row in live}
    late = [
        await _charges(session, quota, organization_id, windows & early.windows, since=early.until),
        await _charges(session, quota, organization_id, windows - early.windows),
    ]
    used, held = early.used + late[0].used + late[1].used, late[0].held + late[1].held
    await session.execute(delete(QuotaCounter).where(QuotaCounter.quota_id == quota.id))
    starts = [start for start, _ in windows if used[start] or held[start]]
    if starts:
        counted = {start: {"used": min(used[start], USED_MAX), "held": held[start]} for start in starts}
        rows = [{"quota_id": quota.id, "window_start": start} | columns for start, columns in counted.items()]
        await session.execute(insert(QuotaCounter), rows)
    uncharged = update(Hold).where(Hold.id.in_([row.id for row in live]), ~Hold.quota_ids.contains([quota.id]))
    await session.execute(uncharged.values(quota_ids=func.array_append(Hold.quota_ids, quota.id)))


async def _ended_long_ago(session: AsyncSession, quota: Quota, organization_id: uuid.UUID) -> Charges:
    """The part of a long window that can be summed up while others admit."""
    dimension = QuotaDimension(quota.dimension)
    kind, unit, *_ = DIMENSIONS[dimension]
    if unit is Unit.MINUTE or (unit is None and kind is not Kind.MONEY):
        return Charges()
    now = await _clock(session)
    windows = _windows_about(dimension, now)
    return await _charges(session, quota, organization_id, windows, until=now - SETTLED_AGE, live=False)


async def _charges(
    session: AsyncSession,
    quota: Quota,
    organization_id: uuid.UUID,
    windows: Collection[Window],
    *,
    since: datetime | None = None,
    until: datetime = FOR_EVER,
    live: bool = True,
) -> Charges:
    """Charges of holds that ended in a time, by default since the first window began, and of live ones."""
    if not windows:
        return Charges()
    dimension = QuotaDimension(quota.dimension)
    kind = DIMENSIONS[dimension][0]
    weights = Weights(quota.input_weight_milli, quota.cached_input_weight_milli, quota.output_weight_milli)
    scale = token_scale(dimension, weights)
    statement = CHARGES.replace("{subject_column}", SUBJECT_COLUMNS[QuotaSubject(quota.subject)].key) + TAILS[kind]
    values = {
        "organization_id": organization_id,
        "subject_id": quota.subject_id,
        "model": quota.model,
        "starts": [start for start, _ in windows],
        "ends": [end for _, end in windows],
        "since": min(start for start, _ in windows) if since is None else since,
        "until": until,
        "live": live,
        "input": scale and scale.input,
        "cached": scale and scale.cached_input,
        "output": scale and scale.output,
        "divisor": scale.divisor if scale else 1,
    }
    charges = Charges(frozenset(windows), until)
    for start, used, held in await session.execute(_statement(statement), values):
        charges.used[start] += used
        charges.held[start] += held
    return charges


def _statement(sql: str) -> TextClause:
    """The statement with those parameters that it names."""
    return text(sql).bindparams(*(parameter for name, parameter in PARAMETERS.items() if f":{name}" in sql))


def _of_subject(quota: Quota) -> ColumnElement[bool]:
    """The holds that a quota applies to."""
    of_subject = SUBJECT_COLUMNS[QuotaSubject(quota.subject)] == quota.subject_id
    return and_(of_subject, Hold.model == quota.model) if quota.model else of_subject


def _locked(which: ColumnElement[bool]) -> Select[uuid.UUID, datetime, datetime]:
    """Locks live holds in the order of every batch."""
    query = select(Hold.id, Hold.admitted_at, Hold.charged_at).where(Hold.state == HoldState.HELD, which)
    return query.order_by(Hold.id).with_for_update()


async def _clock(session: AsyncSession) -> datetime:
    """The database's time now, not that of the transaction's beginning: it may have waited for locks since."""
    now: datetime = (await session.scalars(select(func.clock_timestamp()))).one()
    return now


def _window(dimension: QuotaDimension, at: datetime) -> Window:
    return window_start(dimension, at), window_end(dimension, at) or FOR_EVER


def _windows_about(dimension: QuotaDimension, now: datetime) -> set[Window]:
    """The window of now, and the one before as long as a batch may still count in it."""
    return {_window(dimension, now), _window(dimension, now - BORDER_AGE)}
