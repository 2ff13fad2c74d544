"""Exact recount of past usage for a quota that is new or whose weights changed.

No request is admitted while the sum is computed: admissions share a lock that is held exclusively
here (`read.BEGIN_ADMITTING`), and the live holds of the subject are locked as by any batch. Every
charge is therefore counted exactly once: either in the sum or under the new quota. Live holds are
charged to the quota from then on.

Windows are summed in two steps, so that admissions wait for the second one only: first, without the
lock, all usage settled up to the heads of the receipt chains, before which nothing can be settled
any more; then all usage after them, and all usage that is not settled. Many quotas are counted
together, with one statement of each kind.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import Hold, HoldState, Quota, QuotaCounter, QuotaDimension, TokenKind
from metering.pricing.prices import PRICES
from metering.quotas.quota_rules import (
    DIMENSIONS,
    Kind,
    Unit,
    token_scale,
    window_end,
    window_start,
)
from metering.quotas.quota_states import weights_of
from metering.quotas.quotas import USED_MAX

# Admissions share this lock; a recount holds it exclusively, so that no request is admitted under
# the previous rules while its usage is summed. 0x57656972 is "Weir".
QUOTA_LOCK = "1466263922, 1"

# Weighted sum of the leased output if it costs the most.
DEAREST_LEASE = """(reasoning * w_reasoning
    + (leased - reasoning) * greatest(w_output, w_reasoning))"""
# All charges to each subject in each window: those of holds settled since a time, which no longer
# change, and those of other holds. A settled hold has one usage event, and the receipts of a
# project are numbered in commit order, so `beyond` separates commits after the heads of the chains
# were read from those before. An expired hold is charged its lease until its owner reports the
# delivered tokens by a usage event after that of the expiry; a lifetime quota is charged the billed
# tokens of an expired hold.
COLUMNS = """
    h.organization_id, h.project_id, h.api_key_id, h.model AS charged_model, h.state,
    h.posted_minutes, h.posted_token_count AS posted_tokens, h.admitted_at, h.charged_at,
    h.input_token_count AS sent, h.cached_input_token_count AS cached,
    h.leased_token_count AS leased, h.reasoning_token_count AS reasoning, h.price_version_id,
    h.embedding,
"""
OF_SUBJECTS = """
(
    h.organization_id = ANY(:subject_ids)
    OR h.project_id = ANY(:subject_ids)
    OR h.api_key_id = ANY(:subject_ids)
)
"""
# No transaction is older: a batch of hold operations times out after some seconds, and the server
# ends an idle one.
SETTLED_AGE = timedelta(minutes=2)
# A batch that waited for the lock counts in the window in which it began; its wait is limited by
# the statement timeout.
BORDER_AGE = timedelta(minutes=1)
# A month of a large customer is millions of rows, and no admission waits for them.
EARLY_TIMEOUT_MS = 600_000
# Below the lock timeout of a batch: setting the quota fails before admissions do.
LOCKED_TIMEOUT_MS = 3_000
FOR_EVER = datetime(9999, 1, 1, tzinfo=UTC)
NO_HEAD = 0, datetime(1970, 1, 1, tzinfo=UTC)  # of a newly created project


def amount(sent: str, cached: str, output: str) -> str:
    """Build SQL of a weighted token sum, rounded up as in `quota_rules.Scale.amount`.

    `output` is SQL of the weighted sum of the output.
    """
    return (
        f"(({sent} - {cached}) * w_input + {cached} * w_cached + {output} + divisor - 1) / divisor"
    )


def exact(output: str, reasoning: str) -> str:
    """Build SQL of the weighted sum of output tokens, including reasoning."""
    return f"(({output} - {reasoning}) * w_output + {reasoning} * w_reasoning)"


def posted_output(output: str) -> str:
    """Build SQL of the weighted sum that extensions post for output tokens."""
    return f"({output} * least(w_output, w_reasoning))"


def posted_at(border: str) -> str:
    """Build SQL of the amount charged to a hold before a window border."""
    return f"""CASE
        WHEN charged_at < {border} THEN total
        WHEN admitted_at >= {border} THEN 0
        ELSE coalesce((
            SELECT {amount("sent", "cached", posted_output("(mark - sent)"))}
            FROM (
                SELECT (
                    SELECT max(posted_minutes[i + 1])
                    FROM generate_series(1, cardinality(posted_minutes), 2) AS i
                    WHERE posted_minutes[i] < extract(epoch FROM {border}) / 60
                ) AS mark
            ) m
        ), 0)
    END"""


CHARGES = f"""
WITH quotas AS (
    SELECT * FROM unnest(
        CAST(:numbers AS bigint[]), CAST(:subjects AS uuid[]), CAST(:models AS text[]),
        CAST(:inputs AS bigint[]), CAST(:cached_inputs AS bigint[]), CAST(:outputs AS bigint[]),
        CAST(:divisors AS bigint[]), CAST(:lifetimes AS boolean[])
    ) AS a(number, subject_id, model, input, cached_input, output, divisor, is_lifetime)
), windows AS (
    SELECT * FROM unnest(
        CAST(:windows AS bigint[]), CAST(:starts AS timestamptz[]), CAST(:ends AS timestamptz[])
    ) AS w(number, window_start, window_end)
), heads AS (
    SELECT *
    FROM unnest(CAST(:project_ids AS uuid[]), CAST(:sequences AS bigint[]))
        AS r(project_id, last_sequence)
), charged_holds AS (
    SELECT {COLUMNS}
        true AS is_reported,
        e.input_token_count + e.embedding_token_count AS reported_input,
        e.billed_token_count AS reported_output,
        e.billed_reasoning_token_count AS reported_reasoning
    FROM usage_events e
    LEFT JOIN heads r USING (project_id)
    JOIN holds h ON h.id = e.hold_id
    WHERE :settled
      AND e.organization_id = ANY(:organization_ids)
      AND e.settled_at >= :since
      AND e.part = 0
      AND (coalesce(e.receipt_sequence, 0) > coalesce(r.last_sequence, 0)) = :beyond
      AND h.state = 'settled'
      AND {OF_SUBJECTS}
    UNION ALL
    SELECT {COLUMNS}
        h.state = 'expired'
            AND e.parts > CASE WHEN h.delivered_token_count > 0 THEN 1 ELSE 0 END,
        e.input,
        e.billed,
        e.billed_reasoning
    FROM (
        SELECT * FROM holds
        WHERE :others AND organization_id = ANY(:organization_ids) AND state = 'held'
        UNION ALL
        SELECT * FROM holds
        WHERE :others
          AND organization_id = ANY(:organization_ids)
          AND state = 'expired'
          AND ended_at >= :since
    ) h,
    LATERAL (
        SELECT count(*) AS parts,
               coalesce(sum(input_token_count + embedding_token_count), 0)::bigint AS input,
               coalesce(sum(billed_token_count), 0)::bigint AS billed,
               coalesce(sum(billed_reasoning_token_count), 0)::bigint AS billed_reasoning
        FROM usage_events
        WHERE hold_id = h.id AND settled_at >= h.ended_at
    ) e
    WHERE {OF_SUBJECTS}
), weighted AS (
    SELECT c.*, a.number, a.divisor, a.is_lifetime,
        coalesce(a.input, CASE
            WHEN embedding THEN p.embedding_picos_per_token
            ELSE p.input_picos_per_token
        END) AS w_input,
        coalesce(a.cached_input, CASE
            WHEN embedding THEN p.embedding_picos_per_token
            ELSE p.cached_input_picos_per_token
        END) AS w_cached,
        coalesce(a.output, p.output_picos_per_token) AS w_output,
        coalesce(a.output, {PRICES[TokenKind.REASONING]}) AS w_reasoning
    FROM charged_holds c
    CROSS JOIN LATERAL (
        VALUES (c.organization_id), (c.project_id), (c.api_key_id)
    ) AS s(subject_id)
    JOIN quotas a
        ON a.subject_id = s.subject_id AND (a.model = '' OR a.model = c.charged_model)
    JOIN price_versions p ON p.id = c.price_version_id
)
"""

# Charge by the usage events: the tokens that the owner reported.
REPORTED = amount(
    "reported_input",
    "least(cached, reported_input)",
    exact("reported_output", "reported_reasoning"),
)
AMOUNTS = f"""
, posted AS (
    SELECT *, CASE
        WHEN posted_tokens > 0
            THEN {amount("sent", "cached", posted_output("(posted_tokens - sent)"))}
        ELSE 0
    END AS posted
    FROM weighted
), charged AS (
    SELECT *,
        CASE
            WHEN state = 'expired' AND is_lifetime THEN {REPORTED}
            WHEN is_reported THEN greatest({REPORTED}, posted)
            WHEN state = 'expired'
                THEN greatest({amount("sent", "cached", DEAREST_LEASE)}, posted)
            ELSE posted
        END AS total,
        CASE
            WHEN state <> 'held' THEN 0
            WHEN posted_tokens > 0 THEN {amount("sent", "cached", DEAREST_LEASE)} - posted
            ELSE {
    amount("sent", "(CASE WHEN w_cached > w_input THEN sent ELSE 0 END)", DEAREST_LEASE)
}
        END AS held
    FROM posted
)
SELECT number, window_start,
    least(
        sum({posted_at("window_end")} - {posted_at("window_start")}), {USED_MAX}
    )::bigint AS used,
    sum(CASE
        WHEN charged_at >= window_start AND charged_at < window_end THEN held
        ELSE 0
    END)::bigint AS held
FROM charged
JOIN windows USING (number)
GROUP BY number, window_start
"""

REQUESTS = """
SELECT number, window_start, count(*) AS used, 0 AS held
FROM weighted
JOIN windows USING (number)
WHERE admitted_at >= window_start AND admitted_at < window_end AND state <> 'voided'
GROUP BY number, window_start
"""

CONCURRENCY = """
SELECT number, window_start, 0 AS used, count(*) AS held
FROM weighted
JOIN windows USING (number)
WHERE state = 'held'
GROUP BY number, window_start
"""

TAILS = {
    Kind.CONCURRENCY: CONCURRENCY,
    Kind.REQUESTS: REQUESTS,
    Kind.TOKENS: AMOUNTS,
    Kind.MONEY: AMOUNTS,
}


Window = tuple[datetime, datetime]

Uncounted = tuple[Quota, uuid.UUID]  # with the organization of its subject


SELECT_HEADS = text("""
SELECT c.project_id, c.last_sequence, c.last_settled_at
FROM receipt_chains c
JOIN projects p ON p.id = c.project_id
WHERE p.organization_id = ANY(:organization_ids)
""")

INSERT_COUNTERS = text("""
INSERT INTO quota_counters (quota_id, window_start, used, held)
SELECT * FROM unnest(
    CAST(:quota_ids AS uuid[]), CAST(:starts AS timestamptz[]),
    CAST(:used AS bigint[]), CAST(:held AS bigint[])
)
""")

CHARGE_HOLDS = text("""
UPDATE holds h
SET quota_ids = h.quota_ids || n.quota_ids
FROM (
    SELECT c.hold_id, array_agg(c.quota_id ORDER BY c.ordinal) AS quota_ids
    FROM unnest(CAST(:hold_ids AS uuid[]), CAST(:quota_ids AS uuid[]))
        WITH ORDINALITY AS c(hold_id, quota_id, ordinal)
    JOIN holds o ON o.id = c.hold_id
    WHERE c.quota_id <> ALL (o.quota_ids)
    GROUP BY c.hold_id
) n
WHERE h.id = n.hold_id
""")


# By project: sequence number and settlement time of its last receipt.
Heads = dict[uuid.UUID, tuple[int, datetime]]


@dataclass(slots=True)
class Recount:
    """Recount of one quota: used and held amounts by window, and live holds.

    `number` is the index among the quotas counted together. `early` are the windows whose
    settlements were summed before admissions were blocked.
    """

    number: int
    quota: Quota
    organization_id: uuid.UUID
    early: frozenset[Window] = frozenset()
    windows: set[Window] = field(default_factory=set)
    live_ids: list[uuid.UUID] = field(default_factory=list)
    used: Counter[datetime] = field(default_factory=Counter)
    held: Counter[datetime] = field(default_factory=Counter)

    @property
    def dimension(self) -> QuotaDimension:
        """Dimension that the quota counts."""
        return QuotaDimension(self.quota.dimension)

    @property
    def kind(self) -> Kind:
        """Kind of charge: requests, tokens, money or concurrency."""
        return DIMENSIONS[self.dimension][0]

    @property
    def unit(self) -> Unit | None:
        """Calendar window that the quota counts over; None if it never resets."""
        return DIMENSIONS[self.dimension][1]


@dataclass(frozen=True, slots=True)
class Share:
    """Part of the charges to sum: settled holds up to or beyond the chain heads, or the rest."""

    settled: bool
    beyond: bool
    heads: Heads = field(default_factory=dict)
    since: datetime | None = None  # no charge is older; None: the start of the first window


async def recount(session: AsyncSession, uncounted: Sequence[Uncounted]) -> None:
    """Rewrite the counters of quotas, delete past ones, and charge live holds to the quotas.

    Admissions are blocked until the transaction ends: call it last, once for all quotas.
    """
    if not uncounted:
        return
    recounts = [Recount(number, *each) for number, each in enumerate(uncounted)]
    await session.execute(text(f"SET LOCAL statement_timeout = {EARLY_TIMEOUT_MS}"))
    now = await _clock(session)
    await _find_live(session, recounts, lock=False)
    for each in recounts:
        each.early = frozenset(each.windows)
    heads = await _chain_heads(session, recounts)
    await _sum_up(
        session,
        [(each, each.early) for each in recounts],
        Share(settled=True, beyond=False, heads=heads),
    )
    await session.execute(text(f"SET LOCAL statement_timeout = {LOCKED_TIMEOUT_MS}"))
    await session.execute(text("SET LOCAL enable_seqscan = off"))  # only few of the rows are new
    await session.execute(text(f"SELECT pg_advisory_xact_lock({QUOTA_LOCK})"))
    await _find_live(session, recounts, lock=True)
    heads_now = await _chain_heads(session, recounts)
    grown_since = [
        heads.get(project_id, NO_HEAD)[1]
        for project_id, head in heads_now.items()
        if head != heads.get(project_id)
    ]
    if grown_since:
        since = max(min(grown_since), now - SETTLED_AGE)
        beyond = Share(settled=True, beyond=True, heads=heads, since=since)
        await _sum_up(session, [(each, each.windows & each.early) for each in recounts], beyond)
    await _sum_up(
        session,
        [(each, each.windows - each.early) for each in recounts],
        Share(settled=True, beyond=True),
    )
    await _sum_up(
        session, [(each, each.windows) for each in recounts], Share(settled=False, beyond=False)
    )
    await _write(session, recounts)
    await session.execute(text("SET LOCAL enable_seqscan = DEFAULT"))
    await session.execute(text("SET LOCAL statement_timeout = DEFAULT"))


async def _find_live(session: AsyncSession, recounts: Sequence[Recount], *, lock: bool) -> None:
    """Record the live holds of all subjects and their windows. `lock` also locks the holds."""
    by_subject: defaultdict[uuid.UUID, list[Recount]] = defaultdict(list)
    for each in recounts:
        by_subject[each.quota.subject_id].append(each)
    subject_ids = list(by_subject)
    of_subjects = or_(
        *(
            column.in_(subject_ids)
            for column in (Hold.organization_id, Hold.project_id, Hold.api_key_id)
        )
    )
    columns = (
        Hold.id,
        Hold.organization_id,
        Hold.project_id,
        Hold.api_key_id,
        Hold.model,
        Hold.admitted_at,
        Hold.charged_at,
    )
    query = select(*columns).where(Hold.state == HoldState.HELD, of_subjects).order_by(Hold.id)
    live = (await session.execute(query.with_for_update() if lock else query)).all()
    now = await _clock(session)
    for each in recounts:
        each.windows, each.live_ids = _windows_about(each.dimension, now), []
    for row in live:
        for subject_id in (row.organization_id, row.project_id, row.api_key_id):
            for each in by_subject.get(subject_id, ()):
                if each.quota.model in ("", row.model):
                    each.live_ids.append(row.id)
                    each.windows.add(
                        _window(
                            each.dimension,
                            row.admitted_at if each.kind is Kind.REQUESTS else row.charged_at,
                        )
                    )


async def _chain_heads(session: AsyncSession, recounts: Sequence[Recount]) -> Heads:
    """Read the receipt chain heads of all projects of these organizations."""
    organization_ids = list({each.organization_id for each in recounts})
    rows = await session.execute(SELECT_HEADS, {"organization_ids": organization_ids})
    return {
        project_id: (last_sequence, last_settled_at)
        for project_id, last_sequence, last_settled_at in rows
    }


async def _sum_up(
    session: AsyncSession, requested: Iterable[tuple[Recount, Collection[Window]]], share: Share
) -> None:
    """Add up a share of the charges in these windows."""
    groups: defaultdict[tuple[str, Unit | None], list[tuple[Recount, Collection[Window]]]] = (
        defaultdict(list)
    )
    for each, windows in requested:
        if windows and not (share.settled and each.kind is Kind.CONCURRENCY):
            groups[TAILS[each.kind], each.unit].append((each, windows))
    by_number: dict[int, Recount] = {}
    for (tail, _), group in groups.items():
        by_number.update((each.number, each) for each, _ in group)
        first = min(start for _, windows in group for start, _ in windows)
        values = _values(group) | {
            "since": first if share.since is None else share.since,
            "settled": share.settled,
            "beyond": share.beyond,
            "others": not share.settled,
            "project_ids": list(share.heads),
            "sequences": [last_sequence for last_sequence, _ in share.heads.values()],
        }
        for number, start, used, held in await session.execute(text(CHARGES + tail), values):
            by_number[number].used[start] += used
            by_number[number].held[start] += held


def _values(group: Sequence[tuple[Recount, Collection[Window]]]) -> dict[str, Any]:
    """Build the parameters of CHARGES for these quotas."""
    quotas = [each.quota for each, _ in group]
    scales = [token_scale(each.dimension, weights_of(each.quota)) for each, _ in group]
    windows = [(each.number, start, end) for each, of_each in group for start, end in of_each]
    return {
        "organization_ids": list({each.organization_id for each, _ in group}),
        "subject_ids": list({quota.subject_id for quota in quotas}),
        "numbers": [each.number for each, _ in group],
        "subjects": [quota.subject_id for quota in quotas],
        "models": [quota.model for quota in quotas],
        "inputs": [scale and scale.input for scale in scales],
        "cached_inputs": [scale and scale.cached_input for scale in scales],
        "outputs": [scale and scale.output for scale in scales],
        "divisors": [scale.divisor if scale else 1 for scale in scales],
        "lifetimes": [each.kind is Kind.MONEY and each.unit is None for each, _ in group],
        "windows": [number for number, _, _ in windows],
        "starts": [start for _, start, _ in windows],
        "ends": [end for _, _, end in windows],
    }


async def _write(session: AsyncSession, recounts: Sequence[Recount]) -> None:
    """Write the summed counters, and charge the live holds to the quotas."""
    await session.execute(
        delete(QuotaCounter).where(QuotaCounter.quota_id.in_([each.quota.id for each in recounts]))
    )
    rows = [
        (each.quota.id, start, min(each.used[start], USED_MAX), each.held[start])
        for each in recounts
        for start, _ in each.windows
        if each.used[start] or each.held[start]
    ]
    if rows:
        quota_ids, starts, used, held = map(list, zip(*rows, strict=True))
        await session.execute(
            INSERT_COUNTERS, {"quota_ids": quota_ids, "starts": starts, "used": used, "held": held}
        )
    charged = [(hold_id, each.quota.id) for each in recounts for hold_id in each.live_ids]
    if charged:
        hold_ids, quota_ids = map(list, zip(*charged, strict=True))
        await session.execute(CHARGE_HOLDS, {"hold_ids": hold_ids, "quota_ids": quota_ids})


async def _clock(session: AsyncSession) -> datetime:
    """Read the database's clock, not the time at which the transaction began."""
    now: datetime = (await session.scalars(select(func.clock_timestamp()))).one()
    return now


def _window(dimension: QuotaDimension, at: datetime) -> Window:
    return window_start(dimension, at), window_end(dimension, at) or FOR_EVER


def _windows_about(dimension: QuotaDimension, now: datetime) -> set[Window]:
    """Return the current window, and the previous one while a batch may still count in it."""
    return {_window(dimension, now), _window(dimension, now - BORDER_AGE)}
