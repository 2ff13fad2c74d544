"""Exact recount of past usage for a quota that is new or whose weights changed.

No request is admitted while the sum is computed: admissions share a lock that is held exclusively
here (`read.BEGIN_ADMITTING`), and the live holds of the subject are locked as by any batch. Every
charge is therefore counted exactly once: either in the sum or under the new quota. Live holds are
charged to the quota from then on.

Windows are summed in two steps, so that admissions wait for the second one only: first, without the
lock, all usage settled up to the heads of the receipt chains, before which nothing can be settled
any more; then all usage after them, and all usage that is not settled. Many quotas are counted
together, with one statement of each kind.

Requests of old months are deleted (`metering/retention.py`). Their usage of a lifetime limit or
prepaid credit is its checkpoint, with the weights of then; a recount adds it. A new lifetime limit
counts from the oldest request that is kept; prepaid credit counts all usage.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ARRAY, Uuid, any_, delete, func, literal, or_, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import (
    Hold,
    HoldState,
    Quota,
    QuotaCounter,
    QuotaDimension,
    QuotaSubject,
    TokenKind,
    UsageSubject,
)
from metering.pricing.prices import COUNTS_OF_EVENT, PRICES
from metering.quotas.quota_rules import (
    DIMENSIONS,
    FOR_LABEL,
    MINUTE,
    NO_WINDOW,
    USED_MAX,
    Kind,
    Unit,
    bucket_of,
    token_scale,
    window_end,
    window_start,
)
from metering.quotas.quota_states import weights_of

# Admissions share this lock; a recount holds it exclusively, so that no request is admitted under
# the previous rules while its usage is summed. 0x57656972 is "Weir".
QUOTA_LOCK = "1466263922, 1"

# Recounts share this lock; the deletion of old holds takes it exclusively, for a batch at a time.
CHECKPOINT_LOCK = "1466263922, 3"

# Weighted sum of the leased output if it costs the most.
DEAREST_LEASE = """(reasoning * w_reasoning
    + (leased - reasoning) * greatest(w_output, w_reasoning))"""
# All charges to each subject in each window: those of holds settled since a time, which no longer
# change, and those of other holds. A settled hold has one usage event, and the receipts of a
# project are numbered in commit order, so `beyond` separates commits after the heads of the chains
# were read from those before. An expired hold is charged its lease until its owner reports the
# delivered tokens by a usage event after that of the expiry; prepaid credit is charged the billed
# tokens of an expired hold.
COLUMNS = """
    h.organization_id, h.project_id, h.api_key_id, h.model AS charged_model, h.state,
    h.posted_minutes, h.posted_token_count AS posted_tokens, h.admitted_at, h.charged_at,
    h.input_token_count AS sent, h.cached_input_token_count AS cached,
    h.leased_token_count AS leased, h.reasoning_token_count AS reasoning, h.price_version_id,
    h.embedding, h.end_user_id, h.labels,
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
KINDS_AT_PRICES = ", ".join(
    f"({count}, {PRICES[kind]})" for kind, (count, _) in COUNTS_OF_EVENT.items()
)
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
        CAST(:divisors AS bigint[]), CAST(:credits AS boolean[]),
        CAST(:for_each AS text[]), CAST(:end_users AS uuid[]),
        CAST(:label_keys AS text[]), CAST(:label_values AS text[])
    ) AS a(number, subject_id, model, input, cached_input, output, divisor, is_credit, for_each,
        end_user_id, label_key, label_value)
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
      AND (CAST(:end_user_ids AS uuid[]) IS NULL
           OR e.end_user_id = ANY(CAST(:end_user_ids AS uuid[])))
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
    SELECT c.*, a.number, a.divisor, a.is_credit, CASE
            WHEN a.for_each = '' THEN ''
            WHEN a.for_each = 'end_user' THEN c.end_user_id::text
            ELSE c.labels ->> a.label_key
        END AS member,
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
       AND (a.end_user_id IS NULL OR a.end_user_id = c.end_user_id)
       AND (a.for_each <> 'end_user' OR c.end_user_id IS NOT NULL)
       AND (a.label_key IS NULL
            OR c.labels ->> a.label_key = coalesce(
                a.label_value, nullif(c.labels ->> a.label_key, '')))
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
            WHEN state = 'expired' AND is_credit THEN {REPORTED}
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
SELECT number, member, window_start,
    least(
        sum({posted_at("window_end")} - {posted_at("window_start")}), {USED_MAX}
    )::bigint AS used,
    sum(CASE
        WHEN charged_at >= window_start AND charged_at < window_end THEN held
        ELSE 0
    END)::bigint AS held
FROM charged
JOIN windows USING (number)
WHERE admitted_at < window_end AND charged_at >= window_start
GROUP BY number, member, window_start
"""

REQUESTS = """
SELECT number, member, window_start, count(*) AS used, 0 AS held
FROM weighted
JOIN windows USING (number)
WHERE admitted_at >= window_start AND admitted_at < window_end AND state <> 'voided'
GROUP BY number, member, window_start
"""

CONCURRENCY = """
SELECT number, member, window_start, 0 AS used, count(*) AS held
FROM weighted
JOIN windows USING (number)
WHERE state = 'held'
GROUP BY number, member, window_start
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

# Buckets of a rolling window are closed until the next request opens one.
INSERT_COUNTERS = text("""
INSERT INTO quota_counters (quota_id, window_start, used, held, carried, kept_until)
SELECT c.*, CASE WHEN q.window_minutes = 0 THEN 0 END,
    CASE WHEN q.window_minutes > 0 THEN c.window_start
        + make_interval(hours => 48, mins => q.window_minutes + (q.window_minutes + 59) / 60) END
FROM unnest(
    CAST(:quota_ids AS uuid[]), CAST(:starts AS timestamptz[]),
    CAST(:used AS bigint[]), CAST(:held AS bigint[])
) AS c (quota_id, window_start, used, held)
JOIN quotas q ON q.id = c.quota_id
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


SELECT_ERASED = text("""
SELECT id FROM usage_subjects
WHERE id = ANY(CAST(:subject_ids AS uuid[])) AND erased_at IS NOT NULL
""")
SELECT_MEMBER_QUOTAS = text("""
SELECT subject_id, id, selector_id
FROM quotas
WHERE within_id = :within_id
  AND subject_id = ANY(:subject_ids)
  AND model = :model
  AND dimension = :dimension
  AND window_minutes = :window_minutes
  AND deleted_at IS NULL
  AND (selector_id IS NULL OR selector_id = :selector_id)
""")
INSERT_MEMBER_QUOTAS = text("""
INSERT INTO quotas (id, subject, subject_id, within_id, selector_id, model, dimension,
    window_minutes, limit_value, set_by_organization)
SELECT m.id, :subject, m.subject_id, s.subject_id, s.id, s.model, s.dimension, s.window_minutes,
    s.limit_value, s.set_by_organization
FROM unnest(CAST(:ids AS uuid[]), CAST(:subject_ids AS uuid[])) AS m(id, subject_id),
    quotas s
WHERE s.id = :selector_id
""")
INSERT_LABEL_VALUES = text("""
INSERT INTO usage_subjects (organization_id, kind, label_key, name)
SELECT :organization_id, 'label', :label_key, name
FROM unnest(CAST(:names AS text[])) AS n(name)
ORDER BY name
ON CONFLICT DO NOTHING
""")
CHECKPOINTS = text("""
SELECT k.quota_id, k.used
FROM quota_checkpoints k
JOIN quotas q ON q.id = k.quota_id
WHERE (q.id = ANY(:quota_ids) OR q.selector_id = ANY(:quota_ids)) AND q.deleted_at IS NULL
""")
# All usage whose holds are deleted: sums of months, and events, mostly of a month being retired.
INSERT_CREDIT_CHECKPOINTS = text(f"""
INSERT INTO quota_checkpoints (quota_id, used)
SELECT q.id, coalesce(sum(k.token_count * k.price), 0)
FROM quotas q
LEFT JOIN usage_sums u
    ON u.organization_id = q.subject_id
   AND NOT EXISTS (SELECT FROM holds h WHERE h.id = u.hold_id)
LEFT JOIN price_versions p ON p.id = u.price_version_id
CROSS JOIN LATERAL (VALUES {KINDS_AT_PRICES}) AS k (token_count, price)
WHERE q.id = ANY(CAST(:quota_ids AS uuid[]))
  AND q.dimension = '{QuotaDimension.PREPAID_CREDIT_PICOS}'
  AND EXISTS (SELECT FROM retired_months)
GROUP BY q.id
ON CONFLICT DO NOTHING
""")
# Limits that admissions took from a selector while the subject got one of its own.
RETIRE_GIVEN = text("""
UPDATE quotas q
SET deleted_at = now()
FROM quotas o
WHERE o.id = ANY(:quota_ids)
  AND o.within_id IS NOT NULL
  AND o.selector_id IS NULL
  AND (q.subject_id, q.model, q.dimension, q.window_minutes, q.within_id, q.set_by_organization)
      = (o.subject_id, o.model, o.dimension, o.window_minutes, o.within_id, o.set_by_organization)
  AND q.selector_id IS NOT NULL
  AND q.deleted_at IS NULL
""")

# By project: sequence number and settlement time of its last receipt.
Heads = dict[uuid.UUID, tuple[int, datetime]]


@dataclass(slots=True)
class Recount:
    """Recount of one quota: used and held amounts by member and window, and live holds.

    A selector's members are its end users' ids or label values; any other quota has one, which is
    empty. `label` is the key and value that the quota limits, None for each value of the key.
    `number` is the index among the quotas counted together. `early` are the windows whose
    settlements were summed before admissions were blocked.
    """

    number: int
    quota: Quota
    organization_id: uuid.UUID
    label: tuple[str, str | None] | None = None
    early: frozenset[Window] = frozenset()
    windows: set[Window] = field(default_factory=set)
    live: list[tuple[uuid.UUID, str]] = field(default_factory=list)  # with their member
    used: Counter[tuple[str, datetime]] = field(default_factory=Counter)
    held: Counter[tuple[str, datetime]] = field(default_factory=Counter)

    @property
    def scope_id(self) -> uuid.UUID:
        """Id of the organization, project or key whose holds it counts."""
        return self.quota.within_id or self.quota.subject_id

    @property
    def end_user_id(self) -> uuid.UUID | None:
        """The end user that it limits; None for any other quota."""
        is_one = self.quota.subject == QuotaSubject.END_USER
        return self.quota.subject_id if is_one else None

    def member_of(self, end_user_id: uuid.UUID | None, labels: Mapping[str, str]) -> str | None:
        """Return the member of a hold as in CHARGES; None if the quota does not count it."""
        if self.label is not None:
            key, value = self.label
            given = labels.get(key, "")
            if not given or value not in (None, given):
                return None
            return given if value is None else ""
        if self.quota.for_each:
            return None if end_user_id is None else str(end_user_id)
        return "" if self.end_user_id in (None, end_user_id) else None

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
        """Window that the quota counts over; None for concurrency and prepaid credit."""
        return DIMENSIONS[self.dimension][1]

    def window(self, at: datetime) -> Window:
        """Return the window of the counter that a charge at this time counts in."""
        minutes = self.quota.window_minutes
        start = window_start(self.dimension, at, minutes)
        return start, window_end(self.dimension, at, minutes) or FOR_EVER

    def windows_about(self, now: datetime) -> set[Window]:
        """Return the windows that count now, and the one before while a batch may still use it."""
        before = now - BORDER_AGE
        windows = {self.window(now), self.window(before)}
        if minutes := self.quota.window_minutes:
            bucket = bucket_of(minutes)
            first = self.window(before)[0]
            windows |= {
                (start, start + bucket)
                for step in range(1, minutes * MINUTE // bucket + 1)
                for start in (first - step * bucket,)
            }
        return windows


@dataclass(frozen=True, slots=True)
class Share:
    """Part of the charges to sum: settled holds up to or beyond the chain heads, or the rest."""

    settled: bool
    beyond: bool
    heads: Heads = field(default_factory=dict)
    since: datetime | None = None  # no charge is older; None: the start of the first window


async def recount(session: AsyncSession, uncounted: Sequence[Uncounted]) -> None:
    """Rewrite the counters of quotas, delete past ones, and charge live holds to the quotas.

    Admissions are blocked until the transaction ends: call it last, once for all quotas. One that
    is listed twice is counted once, and one that the transaction has removed is not.
    """
    owners = {quota: owner for quota, owner in uncounted if quota.deleted_at is None}
    if not owners:
        return
    labels = await _labels_of(session, list(owners))
    recounts = [
        Recount(number, quota, organization_id, labels.get(quota.id))
        for number, (quota, organization_id) in enumerate(owners.items())
    ]
    await session.execute(text(f"SET LOCAL statement_timeout = {EARLY_TIMEOUT_MS}"))
    await session.execute(text(f"SELECT pg_advisory_xact_lock_shared({CHECKPOINT_LOCK})"))
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
    ids = [each.quota.id for each in recounts]
    await session.execute(INSERT_CREDIT_CHECKPOINTS, {"quota_ids": ids})
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
        by_subject[each.scope_id].append(each)
    subject_ids = any_(literal(list(by_subject), ARRAY(Uuid())))  # of any number
    of_subjects = or_(
        *(
            column == subject_ids
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
        Hold.end_user_id,
        Hold.labels,
    )
    query = select(*columns).where(Hold.state == HoldState.HELD, of_subjects).order_by(Hold.id)
    live = (await session.execute(query.with_for_update() if lock else query)).all()
    now = await _clock(session)
    for each in recounts:
        each.windows, each.live = each.windows_about(now), []
    for row in live:
        for subject_id in (row.organization_id, row.project_id, row.api_key_id):
            for each in by_subject.get(subject_id, ()):
                member = each.member_of(row.end_user_id, row.labels)
                if member is not None and each.quota.model in ("", row.model):
                    each.live.append((row.id, member))
                    at = row.admitted_at if each.kind is Kind.REQUESTS else row.charged_at
                    each.windows.add(each.window(at))


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
        rows = await session.execute(text(CHARGES + tail), values)
        for number, member, start, used, held in rows:
            by_number[number].used[member, start] += used
            by_number[number].held[member, start] += held


def _values(group: Sequence[tuple[Recount, Collection[Window]]]) -> dict[str, Any]:
    """Build the parameters of CHARGES for these quotas."""
    quotas = [each.quota for each, _ in group]
    scales = [token_scale(each.dimension, weights_of(each.quota)) for each, _ in group]
    end_user_ids = [each.end_user_id for each, _ in group]
    windows = [(each.number, start, end) for each, of_each in group for start, end in of_each]
    return {
        "organization_ids": list({each.organization_id for each, _ in group}),
        "subject_ids": list({each.scope_id for each, _ in group}),
        "numbers": [each.number for each, _ in group],
        "subjects": [each.scope_id for each, _ in group],
        "for_each": [quota.for_each for quota in quotas],
        "end_users": [each.end_user_id for each, _ in group],
        "end_user_ids": end_user_ids if all(end_user_ids) else None,
        "label_keys": [each.label[0] if each.label else None for each, _ in group],
        "label_values": [each.label[1] if each.label else None for each, _ in group],
        "models": [quota.model for quota in quotas],
        "inputs": [scale and scale.input for scale in scales],
        "cached_inputs": [scale and scale.cached_input for scale in scales],
        "outputs": [scale and scale.output for scale in scales],
        "divisors": [scale.divisor if scale else 1 for scale in scales],
        "credits": [each.kind is Kind.MONEY and each.unit is None for each, _ in group],
        "windows": [number for number, _, _ in windows],
        "starts": [start for _, start, _ in windows],
        "ends": [end for _, _, end in windows],
    }


async def _write(session: AsyncSession, recounts: Sequence[Recount]) -> None:
    """Write the summed counters, and charge the live holds to the quotas."""
    ids = [each.quota.id for each in recounts]
    given = select(Quota.id).where(Quota.selector_id.in_(ids), Quota.deleted_at.is_(None))
    await session.execute(
        delete(QuotaCounter).where(
            or_(QuotaCounter.quota_id.in_(ids), QuotaCounter.quota_id.in_(given))
        )
    )
    await session.execute(RETIRE_GIVEN, {"quota_ids": ids})
    members = {
        each.number: await _member_quotas(session, each) if each.quota.for_each else {}
        for each in recounts
    }

    def quota_of(each: Recount, member: str) -> uuid.UUID | None:
        return members[each.number].get(member) if each.quota.for_each else each.quota.id

    counted = {
        (quota_id, start): (each.used[member, start], each.held[member, start])
        for each in recounts
        for member, start in {**each.used, **each.held}
        if each.used[member, start] or each.held[member, start]
        if any(start == present for present, _ in each.windows)
        if (quota_id := quota_of(each, member)) is not None
    }
    for quota_id, before in await session.execute(CHECKPOINTS, {"quota_ids": ids}):
        kept, live = counted.get((quota_id, NO_WINDOW), (0, 0))
        counted[quota_id, NO_WINDOW] = kept + int(before), live
    if counted:
        rows = [(*key, min(kept, USED_MAX), live) for key, (kept, live) in counted.items()]
        quota_ids, starts, used, held = map(list, zip(*rows, strict=True))
        await session.execute(
            INSERT_COUNTERS, {"quota_ids": quota_ids, "starts": starts, "used": used, "held": held}
        )
    charged = [
        (hold_id, quota_id)
        for each in recounts
        for hold_id, member in each.live
        if (quota_id := quota_of(each, member)) is not None
    ]
    if charged:
        hold_ids, quota_ids = map(list, zip(*charged, strict=True))
        await session.execute(CHARGE_HOLDS, {"hold_ids": hold_ids, "quota_ids": quota_ids})


async def _member_quotas(session: AsyncSession, each: Recount) -> dict[str, uuid.UUID]:
    """Find or create the limits that a selector gives to its members with usage.

    Members with a limit of their own are left out: it wins.
    """
    selector = each.quota
    used = {member for counts in (each.used, each.held) for member, _ in counts if member}
    used |= {member for _, member in each.live}
    if each.label is None:
        subject_ids = {member: uuid.UUID(member) for member in used}
        given = {"subject_ids": list(subject_ids.values())}
        for subject_id in await session.scalars(SELECT_ERASED, given):
            del subject_ids[str(subject_id)]
    else:
        of_key = {"organization_id": each.organization_id, "label_key": each.label[0]}
        await session.execute(INSERT_LABEL_VALUES, of_key | {"names": list(used)})
        found = select(UsageSubject.name, UsageSubject.id).where(
            UsageSubject.organization_id == each.organization_id,
            UsageSubject.kind == QuotaSubject.LABEL,
            UsageSubject.label_key == each.label[0],
            UsageSubject.name.in_(used),
        )
        subject_ids = {
            name: subject_id for name, subject_id in await session.execute(found) if name
        }
    values = {
        "within_id": selector.subject_id,
        "subject_ids": list(subject_ids.values()),
        "model": selector.model,
        "dimension": selector.dimension,
        "window_minutes": selector.window_minutes,
        "selector_id": selector.id,
    }
    present = {row[0]: row[1:] for row in await session.execute(SELECT_MEMBER_QUOTAS, values)}
    own = {subject_id for subject_id, row in present.items() if row[1] is None}
    new = {each: uuid.uuid4() for each in subject_ids.values() if each not in present}
    if new:
        subject = QuotaSubject.END_USER if each.label is None else QuotaSubject.LABEL
        created = {"ids": list(new.values()), "subject_ids": list(new)}
        await session.execute(
            INSERT_MEMBER_QUOTAS, created | {"subject": subject, "selector_id": selector.id}
        )
    return {
        member: new[subject_id] if subject_id in new else present[subject_id][0]
        for member, subject_id in subject_ids.items()
        if subject_id not in own
    }


async def _labels_of(
    session: AsyncSession, quotas: Sequence[Quota]
) -> dict[uuid.UUID, tuple[str, str | None]]:
    """Return the label key and value that each quota limits; a selector has no value."""
    labels: dict[uuid.UUID, tuple[str, str | None]] = {
        quota.id: (quota.for_each.removeprefix(FOR_LABEL), None)
        for quota in quotas
        if quota.for_each.startswith(FOR_LABEL)
    }
    of_values = [quota for quota in quotas if quota.subject == QuotaSubject.LABEL]
    if of_values:
        ids = [quota.subject_id for quota in of_values]
        rows = await session.execute(
            select(UsageSubject.id, UsageSubject.label_key, UsageSubject.name).where(
                UsageSubject.id.in_(ids)
            )
        )
        names = {row[0]: (row[1], row[2]) for row in rows}
        labels |= {quota.id: names[quota.subject_id] for quota in of_values}
    return labels


async def _clock(session: AsyncSession) -> datetime:
    """Read the database's clock, not the time at which the transaction began."""
    now: datetime = (await session.scalars(select(func.clock_timestamp()))).one()
    return now
