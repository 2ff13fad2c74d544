"""What subjects of quotas were charged in windows of the past, as SQL: from usage events, from holds that expired, from live ones.

It says the same as `quota_rules.py` does of one request, and rounds as that does.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, BindParameter, Boolean, DateTime, Text, Uuid, bindparam
from sqlalchemy.dialects.postgresql import ARRAY

from metering.quotas.quota_rules import Kind
from metering.quotas.quotas import USED_MAX


def amount(sent: str, cached: str, output: str) -> str:
    """SQL of a weighted sum, rounded up, as `quota_rules.Scale.amount` has it."""
    return f"(({sent} - {cached}) * w_input + {cached} * w_cached + {output} * w_output + divisor - 1) / divisor"


def posted_at(border: str) -> str:
    """SQL of what a hold had been charged before a border between two windows, by the marks of its extensions."""
    posted = f"""(SELECT max(posted_minutes[i + 1]) FROM generate_series(1, cardinality(posted_minutes), 2) AS i
                  WHERE posted_minutes[i] < extract(epoch FROM {border}) / 60)"""
    return f"""CASE WHEN charged_at < {border} THEN total WHEN admitted_at >= {border} THEN 0
               ELSE coalesce((SELECT {amount("sent", "cached", "(mark - sent)")} FROM (SELECT {posted} AS mark) m), 0) END"""


# All that was charged to each of some subjects in each of some windows: by holds that were settled since a time, which change no
# more, and by others. A settled hold has one usage event, and the receipts of a project are numbered in the order of their commits:
# so `beyond` tells what was committed after the heads of the chains were read from what was before. An expired hold is charged its
# lease, until its owner has told by a usage event beyond the one of its expiry what it delivered; by a lifetime quota it is charged
# what is billed.
COLUMNS = """
    h.organization_id, h.project_id, h.api_key_id, h.model AS charged_model, h.state, h.posted_minutes,
    h.posted_token_count AS posted_tokens, h.admitted_at, h.charged_at, h.input_token_count AS sent,
    h.cached_input_token_count AS cached, h.leased_token_count AS leased, h.price_version_id, h.embedding,
"""
OF_SUBJECTS = """
(h.organization_id = ANY(:subject_ids) OR h.project_id = ANY(:subject_ids) OR h.api_key_id = ANY(:subject_ids))
"""
CHARGES = f"""
WITH asked AS (
    SELECT * FROM unnest(CAST(:numbers AS bigint[]), CAST(:subjects AS uuid[]), CAST(:models AS text[]), CAST(:inputs AS bigint[]),
                         CAST(:cached_inputs AS bigint[]), CAST(:outputs AS bigint[]), CAST(:divisors AS bigint[]),
                         CAST(:lifetimes AS boolean[]))
        AS a(number, subject_id, model, input, cached_input, output, divisor, is_lifetime)
), windows AS (
    SELECT * FROM unnest(CAST(:windows AS bigint[]), CAST(:starts AS timestamptz[]), CAST(:ends AS timestamptz[]))
        AS w(number, window_start, window_end)
), heads AS (
    SELECT * FROM unnest(CAST(:project_ids AS uuid[]), CAST(:sequences AS bigint[])) AS r(project_id, last_sequence)
), charged_holds AS (
    SELECT {COLUMNS}
        true AS told, e.input_token_count + e.embedding_token_count AS told_input, e.billed_token_count AS told_output
    FROM usage_events e LEFT JOIN heads r USING (project_id) JOIN holds h ON h.id = e.hold_id
    WHERE :settled AND e.organization_id = ANY(:organization_ids) AND e.settled_at >= :since AND e.part = 0
        AND (coalesce(e.receipt_sequence, 0) > coalesce(r.last_sequence, 0)) = :beyond AND h.state = 'settled' AND {OF_SUBJECTS}
    UNION ALL
    SELECT {COLUMNS}
        h.state = 'expired' AND e.parts > CASE WHEN h.delivered_token_count > 0 THEN 1 ELSE 0 END, e.input, e.billed
    FROM (
        SELECT * FROM holds WHERE :others AND organization_id = ANY(:organization_ids) AND state = 'held'
        UNION ALL
        SELECT * FROM holds
        WHERE :others AND organization_id = ANY(:organization_ids)
            AND state = 'expired' AND ended_at >= :since
    ) h,
    LATERAL (SELECT count(*) AS parts, coalesce(sum(input_token_count + embedding_token_count), 0)::bigint AS input,
                    coalesce(sum(billed_token_count), 0)::bigint AS billed
             FROM usage_events WHERE hold_id = h.id AND settled_at >= h.ended_at) e
    WHERE {OF_SUBJECTS}
), found AS (
    SELECT c.*, a.number, a.divisor, a.is_lifetime,
        coalesce(a.input, CASE WHEN embedding THEN p.embedding_picos_per_token ELSE p.input_picos_per_token END) AS w_input,
        coalesce(a.cached_input, CASE WHEN embedding THEN p.embedding_picos_per_token ELSE p.cached_input_picos_per_token END)
            AS w_cached,
        coalesce(a.output, p.output_picos_per_token) AS w_output
    FROM charged_holds c CROSS JOIN LATERAL (VALUES (c.organization_id), (c.project_id), (c.api_key_id)) AS s(subject_id)
    JOIN asked a ON a.subject_id = s.subject_id AND (a.model = '' OR a.model = c.charged_model)
    JOIN price_versions p ON p.id = c.price_version_id
)
"""
AMOUNTS = f"""
, posted AS (
    SELECT *, CASE WHEN posted_tokens > 0 THEN {amount("sent", "cached", "(posted_tokens - sent)")} ELSE 0 END AS posted FROM found
), charged AS (
    SELECT *,
        CASE WHEN state = 'expired' AND is_lifetime THEN {amount("told_input", "least(cached, told_input)", "told_output")}
             WHEN told THEN greatest({amount("told_input", "least(cached, told_input)", "told_output")}, posted)
             WHEN state = 'expired' THEN greatest({amount("sent", "cached", "leased")}, posted) ELSE posted END AS total,
        CASE WHEN state <> 'held' THEN 0
             WHEN posted_tokens > 0 THEN {amount("sent", "cached", "leased")} - posted
             ELSE {amount("sent", "(CASE WHEN w_cached > w_input THEN sent ELSE 0 END)", "leased")} END AS held
    FROM posted
)
SELECT number, window_start, least(sum({posted_at("window_end")} - {posted_at("window_start")}), {USED_MAX})::bigint AS used,
    sum(CASE WHEN charged_at >= window_start AND charged_at < window_end THEN held ELSE 0 END)::bigint AS held
FROM charged JOIN windows USING (number) GROUP BY number, window_start
"""
REQUESTS = """
SELECT number, window_start, count(*) AS used, 0 AS held
FROM found JOIN windows USING (number)
WHERE admitted_at >= window_start AND admitted_at < window_end AND state <> 'voided' GROUP BY number, window_start
"""
CONCURRENCY = """
SELECT number, window_start, 0 AS used, count(*) AS held FROM found JOIN windows USING (number)
WHERE state = 'held' GROUP BY number, window_start
"""
TAILS = {Kind.CONCURRENCY: CONCURRENCY, Kind.REQUESTS: REQUESTS, Kind.TOKENS: AMOUNTS, Kind.MONEY: AMOUNTS}
IDS, NUMBERS, TIMES, TIME = ARRAY(Uuid()), ARRAY(BigInteger()), ARRAY(DateTime(timezone=True)), DateTime(timezone=True)
PARAMETERS: tuple[BindParameter[Any], ...] = (
    *(bindparam(name, type_=IDS) for name in ("organization_ids", "subject_ids", "subjects", "project_ids")),
    *(
        bindparam(name, type_=NUMBERS)
        for name in ("numbers", "inputs", "cached_inputs", "outputs", "divisors", "windows", "sequences")
    ),
    *(bindparam(name, type_=TIMES) for name in ("starts", "ends")),
    bindparam("since", type_=TIME),
    bindparam("models", type_=ARRAY(Text())),
    bindparam("lifetimes", type_=ARRAY(Boolean())),
    *(bindparam(name, type_=Boolean()) for name in ("settled", "beyond", "others")),
)
