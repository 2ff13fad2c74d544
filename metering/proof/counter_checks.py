"""Checks of quota counters.

A counter is a sum over holds: the reservations of live holds and the tokens that their extensions
posted, by window or by bucket of a rolling one; the usage events of settled holds; the leases of
expired holds until their owners report; nothing for voided holds. `held` plus `used` is within the
limit.
"""

from __future__ import annotations

from metering.proof.check import DAY_SUMS, HOLDS_KEPT_FROM, Check, violations_sql
from metering.proof.hold_checks import HOLDS_WITH_EVENTS
from metering.proof.usage_checks import EVENT_COST, EVENT_COUNTS, REASONING_PRICE

USED_MAX = 2**63 - 1  # a counter saturates here
# Nearly every hold has its whole charge in one window, that of the minute of its admission.
ONE_WINDOW = "(cardinality(h.posted_minutes) = 0 OR r.charge IN ('requests', 'running'))"
CHARGED_AT = "CASE charge WHEN 'requests' THEN admitted_at ELSE charged_at END"
# A hold that was extended later leaves in each such minute the charge of the tokens delivered by
# then, less that of the minutes before. `posted_minutes` alternates minutes and posted totals; mark
# 0 is the end of the hold.
SEVERAL_MINUTES = "cardinality(h.posted_minutes) > 0"
TOKENS_OR_MONEY = "r.charge IN ('tokens', 'money')"
# Output of a live request may turn out to be thinking: it is held at the higher of the two weights,
# and posted at the lower one.
HIGHER, LOWER = "greatest(w_output, w_reasoning)", "least(w_output, w_reasoning)"

# For each quota dimension: kind of charge, calendar unit of its window, and whether it counts
# input and output tokens.
DIMENSION_ROWS = """(
    SELECT measure || '_per_' || unit, charge, unit, counts_input, counts_output
    FROM (VALUES
        ('requests', 'requests', 0, 0),
        ('tokens', 'tokens', 1, 1),
        ('input_tokens', 'tokens', 1, 0),
        ('output_tokens', 'tokens', 0, 1),
        ('cost_picos', 'money', 1, 1)
    ) AS m (measure, charge, counts_input, counts_output),
    (VALUES ('minute'), ('hour'), ('day'), ('week'), ('month'), ('lifetime'), ('window'))
        AS w (unit)
    UNION ALL
    VALUES ('concurrent_requests', 'running', NULL, 0, 0),
           ('prepaid_credit_picos', 'money', NULL, 1, 1)
) AS d (dimension, charge, unit, counts_input, counts_output)"""

# Age at which counters of months, of weeks, and of minutes, hours and days are deleted.
MONTHS_KEPT, WEEKS_KEPT, DAYS_KEPT = "93 days", "16 days", "2 days"

# A quota that an admin has set also counts usage from before it existed; any other counts only the
# holds that are charged to it.
RULES = f"""
SELECT q.id AS quota_id, q.subject_id, q.within_id, q.model, q.dimension, q.deleted_at, d.charge,
       d.unit, q.window_minutes AS minutes,
       d.counts_input * q.input_weight_milli AS input_weight,
       d.counts_input * q.cached_input_weight_milli AS cached_weight,
       d.counts_output * q.output_weight_milli AS output_weight,
       a.subject_id IS NOT NULL AS audited,
       a.subject_id IS NOT NULL AND q.deleted_at IS NULL AND NOT q.for_new_keys
           AND q.for_each = '' AS counts_past
FROM quota_terms q
JOIN {DIMENSION_ROWS} USING (dimension)
LEFT JOIN (
    SELECT DISTINCT subject_id FROM audit_log WHERE action = 'quota.set'
) AS a ON a.subject_id = coalesce(q.selector_id, q.id)::text
"""

# Hold h may be charged in a window whose counter has not been deleted yet.
HOLD_MAY_COUNT = f"""h.state = 'held'
    OR h.organization_id IN (
        SELECT subject_id
        FROM quotas
        WHERE dimension = 'prepaid_credit_picos' AND deleted_at IS NULL
    )
    OR ARRAY[h.organization_id, h.project_id, h.api_key_id] && ARRAY(
        SELECT DISTINCT coalesce(within_id, subject_id)
        FROM quotas
        WHERE position('_per_lifetime' IN dimension) > 0 AND for_each = ''
    )
    OR h.charged_at >= (
        SELECT least(min(window_start), now() - interval '{MONTHS_KEPT}')
        FROM quota_counters
        WHERE window_start > 'epoch'
    )"""


# A hold charged to the limit of a label value has lost the label if the value was erased.
ERASED_LABEL = "u.kind = 'label' AND u.erased_at IS NOT NULL"


def weighted_sql(
    input_count: str,
    cached_count: str,
    output_count: str,
    reasoning_count: str = "0",
    w_output: str = "w_output",
) -> str:
    """Build SQL of the charge for tokens, rounded up to an integer.

    `reasoning_count` is the part of the output known to be thinking, `w_output` the weight of the
    rest.
    """
    return (
        f"(({input_count} - {cached_count}) * w_input + {cached_count} * w_cached"
        f" + ({output_count} - {reasoning_count}) * {w_output}"
        f" + {reasoning_count} * w_reasoning + divisor - 1) / divisor"
    )


def window_start_sql(unit: str, at: str, minutes: str = "minutes") -> str:
    """Build SQL of the start of the window around a time, of the bucket for a rolling one.

    The epoch if `unit` is null, and for the lifetime.
    """
    return f"""CASE
        WHEN {unit} IS NULL OR {unit} = 'lifetime' THEN 'epoch'
        WHEN {unit} = 'window' THEN {bucket_start_sql(at, minutes)}
        ELSE date_trunc({unit}, {at}, 'UTC')
    END"""


def bucket_start_sql(at: str, minutes: str) -> str:
    """Build SQL of the start of a rolling window's bucket: a sixtieth of it, in whole minutes."""
    seconds = f"(60 * ceil({minutes} / 60.0))"
    return f"to_timestamp(floor(extract(epoch FROM {at}) / {seconds}) * {seconds})"


def charges_sql(hold_condition: str, rule_condition: str) -> str:
    """Build SQL that selects each hold with each quota that counts it, and the weights.

    An expired hold is charged its whole lease until its owner reports, in a further usage event,
    the tokens that it delivered. OFFSET 0 keeps the planner, which does not know how many quotas a
    hold has, from looking up usage events once for each pair.
    """
    return f"""
    SELECT h.*, r.quota_id, r.charge, r.unit, r.minutes,
           h.input_token_count AS sent,
           h.cached_input_token_count AS cached,
           h.posted_token_count AS posted,
           r.quota_id = ANY(h.quota_ids) AS is_charged,
           CASE WHEN r.charge <> 'money' THEN r.input_weight
                WHEN h.embedding THEN p.embedding_picos_per_token
                ELSE p.input_picos_per_token END AS w_input,
           CASE WHEN r.charge <> 'money' THEN r.cached_weight
                WHEN h.embedding THEN p.embedding_picos_per_token
                ELSE p.cached_input_picos_per_token END AS w_cached,
           CASE r.charge WHEN 'money' THEN p.output_picos_per_token
                ELSE r.output_weight END AS w_output,
           CASE r.charge WHEN 'money' THEN {REASONING_PRICE}
                ELSE r.output_weight END AS w_reasoning,
           CASE r.charge WHEN 'money' THEN 1 ELSE 1000 END AS divisor,
           h.state = 'expired'
               AND h.parts > CASE WHEN h.delivered_token_count > 0 THEN 1 ELSE 0 END
               AS reported_late
    FROM (
        {HOLDS_WITH_EVENTS}
        WHERE ({HOLD_MAY_COUNT}) AND {hold_condition}
        OFFSET 0
    ) AS h
    CROSS JOIN LATERAL (
        SELECT unnest(ARRAY[h.organization_id, h.project_id, h.api_key_id, h.end_user_id])
        UNION ALL
        SELECT u.id
        FROM jsonb_each_text(h.labels) AS l
        JOIN usage_subjects u
            ON u.organization_id = h.organization_id
           AND u.kind = 'label'
           AND (u.label_key, u.name) = (l.key, l.value)
        UNION ALL
        SELECT DISTINCT q.subject_id
        FROM quotas q
        JOIN usage_subjects u ON u.id = q.subject_id AND {ERASED_LABEL}
        WHERE q.id = ANY(h.quota_ids)
          AND EXISTS (SELECT FROM usage_subjects u WHERE {ERASED_LABEL})
    ) AS s (subject_id)
    JOIN rules r
        ON r.subject_id = s.subject_id
       AND (r.within_id IS NULL OR r.within_id IN (h.organization_id, h.project_id))
       AND (r.quota_id = ANY(h.quota_ids) OR (r.counts_past AND r.model IN ('', h.model)))
       AND {rule_condition}
    JOIN price_versions p ON p.id = h.price_version_id
    """


def final_charge_sql() -> str:
    """Build SQL of the charge of a hold that has ended.

    Prepaid credit, which has no unit, does not keep the lease of an expired hold: it was paid for,
    and would be lost for ever.
    """
    return f"""CASE
    WHEN state = 'settled' OR reported_late OR (state = 'expired' AND unit IS NULL)
        THEN {
        weighted_sql("event_input", "least(cached, event_input)", "event_billed", "event_reasoning")
    }
    WHEN state = 'expired'
        THEN {
        weighted_sql(
            "sent", "least(cached, sent)", "leased_token_count", "reasoning_token_count", HIGHER
        )
    }
    ELSE 0
END"""


def posted_charge_sql() -> str:
    """Build SQL of the part of a live hold's charge that its extensions have posted."""
    return f"""CASE
    WHEN posted > 0 AND state = 'held'
        THEN {weighted_sql("sent", "cached", "(posted - sent)", w_output=LOWER)}
    ELSE 0
END"""


def held_charge_sql() -> str:
    """Build SQL of the part of a live hold's charge that is still held."""
    return f"""CASE
    WHEN state <> 'held' THEN 0
    WHEN charge = 'running' THEN 1
    WHEN charge = 'requests' THEN 0
    WHEN posted > 0
        THEN {weighted_sql("sent", "cached", "leased_token_count", "reasoning_token_count", HIGHER)}
           - {weighted_sql("sent", "cached", "(posted - sent)", w_output=LOWER)}
    ELSE greatest(
        {weighted_sql("sent", "0", "leased_token_count", w_output=HIGHER)},
        {weighted_sql("sent", "sent", "leased_token_count", w_output=HIGHER)}
    )
END"""


def uncertain_charge_sql() -> str:
    """Build SQL of the charge that a counter may lack because it ended as the quota was created."""
    return f"""CASE
    WHEN reported_late AND NOT is_charged AND charge IN ('tokens', 'money')
        THEN {weighted_sql("sent", "0", "leased_token_count", w_output=HIGHER)}
    ELSE 0
END"""


CHARGES_IN_ONE_WINDOW = f"""
SELECT quota_id,
       {window_start_sql("unit", CHARGED_AT)} AS window_start,
       CASE charge WHEN 'requests' THEN (state <> 'voided')::int WHEN 'running' THEN 0
            ELSE greatest({final_charge_sql()}, {posted_charge_sql()}) END AS used,
       {held_charge_sql()} AS held,
       {uncertain_charge_sql()} AS uncertain
FROM ({charges_sql("true", ONE_WINDOW)}) AS charges
"""

CHARGES_IN_SEVERAL_WINDOWS = f"""
SELECT quota_id,
       {window_start_sql("unit", "posted_at")} AS window_start,
       total - lag(total, 1, 0) OVER history AS used,
       CASE WHEN mark = 0 THEN held ELSE 0 END AS held,
       CASE WHEN mark = 0 THEN uncertain ELSE 0 END AS uncertain
FROM (
    SELECT id, quota_id, unit, minutes, mark,
           CASE WHEN mark = 0 THEN charged_at
                ELSE to_timestamp(posted_minutes[mark] * 60) END AS posted_at,
           {held_charge_sql()} AS held,
           {uncertain_charge_sql()} AS uncertain,
           CASE WHEN mark = 0 THEN greatest({final_charge_sql()}, {posted_charge_sql()})
                WHEN state <> 'voided' AND posted_minutes[mark + 1] > 0
                     AND NOT (state = 'expired' AND unit IS NULL)
                    THEN {
    weighted_sql("sent", "cached", "(posted_minutes[mark + 1] - sent)", w_output=LOWER)
}
                ELSE 0 END AS total
    FROM ({charges_sql(SEVERAL_MINUTES, TOKENS_OR_MONEY)}) AS charges,
    LATERAL (
        SELECT generate_series(1, cardinality(posted_minutes), 2)
        UNION ALL
        SELECT 0
    ) AS marks (mark)
) AS totals
WINDOW history AS (PARTITION BY id, quota_id ORDER BY mark = 0, mark)
"""

# First of the counters of a rolling window up to a row's bucket: all that counted when a request
# was admitted there. A row of another window counts alone.
WINDOW_FROM = "c.window_start - make_interval(mins => q.window_minutes)"
# Start of the last bucket in a window with the row's.
WINDOW_UNTIL = "c.window_start + make_interval(mins => q.window_minutes)"

# A counter may exceed a limit that an admin set or lowered below what was used, until the windows
# of that time have ended. After such a change nothing is admitted: a hold of later, beyond the time
# of an administrator's transaction, shows that the limit failed. Prepaid credit may be exceeded by
# usage that owners of expired holds reported late: the leases had been released.
WITHIN_LIMITS = Check(
    "counters-within-limits",
    "Used plus held is within the limit of every enforced quota, unless the limit was set or"
    " lowered during the window and nothing was admitted since.",
    violations_sql(
        "concat('counter of quota ', quota_id, ' (', dimension, ') from ', window_start)",
        f"""
        SELECT c.quota_id, c.window_start, q.dimension, late.picos AS late_picos,
               c.used + before.amount AS used, c.held,
               CASE WHEN (q.override_until IS NOT NULL
                           AND (q.dimension = 'prepaid_credit_picos'
                                OR position('_per_lifetime' IN q.dimension) > 0))
                      OR q.override_until > coalesce(nullif({WINDOW_FROM}, 'epoch'), running.since)
                    THEN q.override_limit_value
                    ELSE q.limit_value
               END AS limit_value
        FROM quota_counters c
        JOIN quota_terms q ON q.id = c.quota_id,
        LATERAL (
            SELECT coalesce(sum(b.used + b.held), 0) AS amount
            FROM quota_counters b
            WHERE q.window_minutes > 0
              AND b.quota_id = q.id
              AND b.window_start < c.window_start
              AND b.window_start >= {WINDOW_FROM}
        ) AS before,
        LATERAL (
            SELECT min(admitted_at) AS since
            FROM holds
            WHERE c.window_start = 'epoch'
              AND state = 'held'
              AND q.id = ANY(quota_ids)
        ) AS running,
        LATERAL (
            SELECT coalesce(sum(e.cost_picos), 0) AS picos
            FROM holds h
            JOIN usage_events e ON e.hold_id = h.id
            WHERE q.dimension = 'prepaid_credit_picos'
              AND h.organization_id = q.subject_id
              AND h.state = 'expired'
              AND e.part = (h.delivered_token_count > 0)::int
        ) AS kept,
        LATERAL (
            SELECT kept.picos + coalesce(
                (SELECT late_picos FROM quota_checkpoints k WHERE k.quota_id = q.id), 0
            ) AS picos
        ) AS late
        WHERE q.deleted_at IS NULL
          AND q.enforced
          AND NOT EXISTS (
              SELECT
              FROM audit_log a
              WHERE a.action IN ('quota.set', 'quota.override')
                AND a.subject_id IN (q.id::text, q.selector_id::text)
                AND a.created_at >= {WINDOW_FROM}
                AND (
                    coalesce(before, 'null') = 'null'
                    OR before->>'deleted_at' IS NOT NULL
                    OR (after->>'limit_value')::numeric < (before->>'limit_value')::numeric
                    OR (after->>'override_limit_value')::numeric
                       < coalesce((before->>'override_limit_value')::numeric,
                                  (before->>'limit_value')::numeric)
                    OR greatest((after->>'limit_value')::numeric,
                                (after->>'override_limit_value')::numeric)
                       < greatest((before->>'limit_value')::numeric,
                                  (before->>'override_limit_value')::numeric)
                    OR (after->>'input_weight_milli', after->>'cached_input_weight_milli',
                        after->>'output_weight_milli')
                       <> (before->>'input_weight_milli', before->>'cached_input_weight_milli',
                           before->>'output_weight_milli')
                    OR (after->>'enforced')::bool > (before->>'enforced')::bool
                )
                AND NOT EXISTS (
                    SELECT
                    FROM holds h
                    WHERE q.id = ANY(h.quota_ids)
                      AND h.admitted_at > a.created_at + interval '1 minute'
                      AND h.state <> 'voided'
                      -- What costs nothing is admitted by a limit on money that is overdrawn.
                      AND (
                          position('picos' IN q.dimension) = 0
                          OR h.posted_cost_picos > 0
                          OR EXISTS (
                              SELECT FROM usage_events e WHERE e.hold_id = h.id AND e.cost_picos > 0
                          )
                      )
                )
          )
        """,
        {
            "used + held > limit_value + late_picos": (
                "concat('used ', used, ' + held ', held, ' exceed the limit ', limit_value)"
            )
        },
    ),
)

# An open bucket carries at least what the others count; those are closed while it is open.
ROLLING_CARRIED = Check(
    "open-buckets-carry-others",
    "The open counter of a rolling window carries at least what the other counters of the window"
    " have used and hold, and no other is open.",
    violations_sql(
        "concat('counter of quota ', quota_id, ' from ', window_start)",
        f"""
        SELECT c.quota_id, c.window_start, c.carried, others.amount, others.is_open
        FROM quota_counters c
        JOIN quotas q ON q.id = c.quota_id,
        LATERAL (
            SELECT coalesce(sum(b.used + b.held), 0) AS amount,
                   coalesce(bool_or(b.carried IS NOT NULL), false) AS is_open
            FROM quota_counters b
            WHERE b.quota_id = q.id
              AND b.window_start <> c.window_start
              AND b.window_start BETWEEN {WINDOW_FROM} AND {WINDOW_UNTIL}
        ) AS others
        WHERE q.window_minutes > 0 AND c.carried IS NOT NULL
        """,
        {
            "carried < amount": "concat('carries ', carried, ', but the others count ', amount)",
            "is_open": "'is open, and so is another one of its window'",
        },
    ),
)

COUNTER_CHECKS = (
    Check(
        "counters-equal-holds",
        "The held value of a counter is the sum over live holds; its used value is the sum of usage"
        " events, postings of live holds and leases of expired holds in its window; no counter is"
        " missing. Reads whole windows, whatever `since` is. Lifetimes and prepaid credit count"
        " deleted holds by their checkpoints.",
        f"WITH rules AS ({RULES})"
        + violations_sql(
            "concat('counter of quota ', quota_id, ' (', dimension, ') from ', window_start)",
            f"""
            SELECT quota_id, window_start, r.dimension, c.used, c.held,
                   c.quota_id IS NOT NULL AS has_counter,
                   coalesce(x.held, 0) AS expected_held,
                   coalesce(x.used, 0) AS used_min,
                   -- What a deleted quota of an admin counted when it was created is not recorded.
                   CASE WHEN r.deleted_at IS NOT NULL AND r.audited
                        THEN greatest(coalesce(x.used, 0), c.used)
                        ELSE coalesce(x.used + x.uncertain, 0)
                   END AS used_max,
                   -- A quota that an admin set has no counters for the windows before it existed.
                   window_start = {window_start_sql("r.unit", "now()", "r.minutes")}
                   OR (
                       NOT r.audited
                       AND window_start >= now() - CASE r.unit
                           WHEN 'month' THEN interval '{MONTHS_KEPT}'
                           WHEN 'week' THEN interval '{WEEKS_KEPT}'
                           WHEN 'window' THEN make_interval(mins => r.minutes)
                           ELSE interval '{DAYS_KEPT}' END
                   ) AS needs_counter
            FROM (
                SELECT quota_id, window_start, sum(used) AS used, sum(held) AS held,
                       sum(uncertain) AS uncertain
                FROM (
                    {CHARGES_IN_ONE_WINDOW}
                    UNION ALL
                    {CHARGES_IN_SEVERAL_WINDOWS}
                    UNION ALL
                    SELECT quota_id, 'epoch', used, 0, 0
                    FROM quota_checkpoints
                ) AS charged
                GROUP BY 1, 2
            ) AS x
            FULL JOIN quota_counters c USING (quota_id, window_start)
            JOIN rules r USING (quota_id)
            WHERE window_start = 'epoch' OR window_start >= {HOLDS_KEPT_FROM}
            """,
            {
                "has_counter AND held <> expected_held": (
                    "concat('held ', held, ', but live holds reserve ', expected_held)"
                ),
                f"""has_counter
            AND used < {USED_MAX}
            AND used NOT BETWEEN used_min AND used_max""": (
                    "concat('used ', used, ', but holds used ', used_min, ' to ', used_max)"
                ),
                """NOT has_counter
            AND (expected_held > 0 OR (used_min > 0 AND needs_counter))""": (
                    "concat('is missing: holds reserve ', expected_held, ' and used ', used_min)"
                ),
            },
        ),
    ),
    WITHIN_LIMITS,
    ROLLING_CARRIED,
    # Exact, even with corrections: usage that an adjustment bills is counted here at its own price,
    # and is never rated.
    Check(
        "prepaid-credit-equals-ledger",
        "The used credit of a prepaid organization is its usage in the ledger, plus usage events"
        " that are not rated yet, plus postings of its live holds. Reads all rows, whatever"
        " `since` is.",
        violations_sql(
            "concat('prepaid credit of organization ', organization_id)",
            f"""
            SELECT o.organization_id,
                   coalesce(c.used, 0) AS used,
                   coalesce(posted.picos, 0) AS posted_picos,
                   coalesce(unrated.picos, 0) AS unrated_picos,
                   coalesce(live.picos, 0) AS live_picos,
                   coalesce(posted.picos, 0) + coalesce(unrated.picos, 0) + coalesce(live.picos, 0)
                       AS expected_used
            FROM prepaid_organizations o
            LEFT JOIN quota_counters c USING (quota_id),
            LATERAL (
                SELECT -sum(l.amount_picos) AS picos
                FROM ledger_transactions t
                JOIN ledger_entries l ON l.transaction_id = t.id AND l.token_kind IS NOT NULL
                WHERE t.organization_id = o.organization_id AND t.kind = 'usage'
            ) AS posted,
            LATERAL (
                SELECT sum({EVENT_COST}) AS picos
                FROM (
                    SELECT price_version_id, {EVENT_COUNTS}
                    FROM usage_events
                    WHERE organization_id = o.organization_id AND ledger_transaction_id IS NULL
                    UNION ALL
                    SELECT price_version_id, {EVENT_COUNTS}
                    FROM {DAY_SUMS}
                    WHERE organization_id = o.organization_id AND billing_month IS NULL
                ) AS e
                JOIN price_versions p ON p.id = e.price_version_id
            ) AS unrated,
            LATERAL (
                SELECT sum(posted_cost_picos) AS picos
                FROM holds
                WHERE state = 'held' AND organization_id = o.organization_id
            ) AS live
            """,
            {
                f"used < {USED_MAX} AND used <> expected_used": (
                    "concat('used ', used, ' picos, but ', posted_picos, ' are in the ledger, ',"
                    " unrated_picos, ' wait to be rated and ', live_picos,"
                    " ' are posted by live holds')"
                ),
            },
        ),
    ),
)
