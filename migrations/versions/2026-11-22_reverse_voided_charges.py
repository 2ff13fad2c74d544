"""Reverse charges that voided holds left in quotas and prepaid credit, since they bill nothing.

Also return to prepaid credit the unbilled part of expired holds.
"""

from __future__ import annotations

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

# One row for each minute in which a voided hold has posted and each quota that counted it: those it
# was charged to, and those that an administrator set later, which counted past usage.
TAKE_BACK_FROM_WINDOWS = """
WITH rules AS (
    SELECT q.*, d.unit, d.is_money, d.counts_input, d.counts_output,
           q.deleted_at IS NULL AND NOT q.for_new_keys AND EXISTS (
               SELECT FROM audit_log a WHERE a.action = 'quota.set' AND a.subject_id = q.id::text) AS counts_past
    FROM quotas q JOIN (VALUES
        ('tokens_per_minute', 'minute', false, 1, 1), ('input_tokens_per_minute', 'minute', false, 1, 0),
        ('output_tokens_per_minute', 'minute', false, 0, 1), ('tokens_per_day', 'day', false, 1, 1),
        ('tokens_per_month', 'month', false, 1, 1), ('cost_picos_per_day', 'day', true, 1, 1),
        ('cost_picos_per_month', 'month', true, 1, 1), ('prepaid_credit_picos', NULL, true, 1, 1)
    ) AS d (dimension, unit, is_money, counts_input, counts_output) USING (dimension)
), postings AS (
    SELECT h.id, r.id AS quota_id, m.number,
           CASE WHEN r.unit IS NULL THEN 'epoch' ELSE date_trunc(r.unit, m.at, 'UTC') END AS window_start,
           CASE WHEN r.is_money THEN (h.input_token_count - h.cached_input_token_count) * p.input_picos_per_token
                + h.cached_input_token_count * p.cached_input_picos_per_token
                + (m.token_count - h.input_token_count) * p.output_picos_per_token
           ELSE (r.counts_input * ((h.input_token_count - h.cached_input_token_count) * r.input_weight_milli
                 + h.cached_input_token_count * r.cached_input_weight_milli)
                 + r.counts_output * (m.token_count - h.input_token_count) * r.output_weight_milli + 999) / 1000 END AS so_far
    FROM holds h
    JOIN price_versions p ON p.id = h.price_version_id
    CROSS JOIN LATERAL (
        SELECT i AS number, to_timestamp(h.posted_minutes[i] * 60) AS at, h.posted_minutes[i + 1] AS token_count
        FROM generate_series(1, cardinality(h.posted_minutes), 2) AS i
        UNION ALL SELECT cardinality(h.posted_minutes) + 1, h.charged_at, h.posted_token_count
    ) AS m
    JOIN rules r ON r.subject_id IN (h.organization_id, h.project_id, h.api_key_id)
        AND (r.id = ANY(h.quota_ids) OR (r.counts_past AND r.model IN ('', h.model)))
    WHERE h.state = 'voided' AND h.posted_token_count > 0
), amounts AS (
    SELECT quota_id, window_start, so_far - lag(so_far, 1, 0) OVER (PARTITION BY id, quota_id ORDER BY number) AS amount
    FROM postings
)
UPDATE quota_counters c SET used = greatest(c.used - a.amount, 0)
FROM (SELECT quota_id, window_start, sum(amount)::bigint AS amount FROM amounts GROUP BY 1, 2) a
WHERE (c.quota_id, c.window_start) = (a.quota_id, a.window_start) AND c.used < 9223372036854775807
"""
# Expired holds without a late settlement: the quota was charged the whole lease.
TAKE_BACK_LEASES = """
UPDATE quota_counters c SET used = greatest(c.used - a.amount, 0)
FROM (
    SELECT q.id AS quota_id, sum(
        CASE WHEN h.embedding THEN h.input_token_count * p.embedding_picos_per_token
             ELSE (h.input_token_count - h.cached_input_token_count) * p.input_picos_per_token
             + h.cached_input_token_count * p.cached_input_picos_per_token + h.leased_token_count * p.output_picos_per_token END
        - e.picos)::bigint AS amount
    FROM quotas q
    JOIN holds h ON h.organization_id = q.subject_id AND h.state = 'expired'
    JOIN price_versions p ON p.id = h.price_version_id
    CROSS JOIN LATERAL (SELECT count(*) AS parts, coalesce(sum(cost_picos), 0) AS picos FROM usage_events
                        WHERE hold_id = h.id AND settled_at >= h.ended_at) AS e
    WHERE q.dimension = 'prepaid_credit_picos' AND q.deleted_at IS NULL
        AND e.parts <= CASE WHEN h.delivered_token_count > 0 THEN 1 ELSE 0 END
    GROUP BY 1
) a
WHERE c.quota_id = a.quota_id AND c.used < 9223372036854775807
"""


def upgrade() -> None:
    """Run without a time limit: the tables may be of any size."""
    op.execute("SET LOCAL statement_timeout = 0")
    op.execute(TAKE_BACK_FROM_WINDOWS)
    op.execute(TAKE_BACK_LEASES)


def downgrade() -> None:
    """Keep the reversed charges."""
