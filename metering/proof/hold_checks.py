"""Checks of holds and of quota counters.

Each hold ends once, with the usage events of its end, and is charged to nobody else's account. A counter is a sum over holds: what
a live hold claims and its extensions have posted, by calendar window; what the usage events of a settled hold bill; the lease of an
expired hold until its owner reports; nothing of a voided hold. `held` and `used` together are within the limit.
"""

from __future__ import annotations

from metering.proof.checks import EVENT_COST, SINCE, Check, Moment, rows_with

OVERDUE = "10 minutes"  # sixty sweeps: whoever has not come by then does not come

# A hold with what its usage events add up to. There are two at most, which `usage-parts` proves, so nothing has to be grouped.
HOLDS_WITH_EVENTS = """
SELECT h.id, h.organization_id, h.project_id, h.api_key_id, h.model, h.price_version_id, h.state, h.quota_ids, h.admitted_at,
       h.charged_at, h.ended_at, h.input_token_count, h.cached_input_token_count, h.leased_token_count, h.delivered_token_count,
       h.posted_token_count, h.posted_minutes, h.embedding,
       num_nonnulls(first.id, second.id) AS parts,
       coalesce(first.input_token_count + first.embedding_token_count, 0)
       + coalesce(second.input_token_count + second.embedding_token_count, 0) AS event_input,
       coalesce(first.embedding_token_count, 0) + coalesce(second.embedding_token_count, 0) AS event_embedding,
       coalesce(first.delivered_token_count, 0) + coalesce(second.delivered_token_count, 0) AS event_delivered,
       coalesce(first.billed_token_count, 0) + coalesce(second.billed_token_count, 0) AS event_billed,
       first.outcome
FROM holds h
LEFT JOIN usage_events first ON first.hold_id = h.id AND first.part = 0
LEFT JOIN usage_events second ON second.hold_id = h.id AND second.part = 1
"""

HOLDS_END_ONCE = Check(
    "holds-end-once",
    "A hold is live or has ended one way, and its usage events are those of that end: none for a live or voided one, one with what "
    "was delivered for a settled one, what is known of an expired one.",
    rows_with(
        "concat('hold ', id, ' (', state, ')')",
        f"{HOLDS_WITH_EVENTS} WHERE h.ended_at IS NULL OR h.ended_at >= {SINCE}",
        {
            "(ended_at IS NULL) <> (state = 'held')": "concat('ended at ', coalesce(ended_at::text, 'no time'))",
            "state IN ('held', 'voided') AND parts > 0": "'has a usage event'",
            "state = 'settled' AND (parts <> 1 OR event_delivered <> delivered_token_count)": "concat(parts, "
            "' usage events with ', event_delivered, ' tokens of ', delivered_token_count, ' delivered')",
            "state = 'expired' AND event_delivered NOT BETWEEN delivered_token_count AND leased_token_count": "concat("
            "'usage events with ', event_delivered, ' tokens, known to be delivered ', delivered_token_count, ', leased ', "
            "leased_token_count)",
            "state = 'expired' AND parts > 1 AND delivered_token_count = 0": "concat(parts, "
            "' usage events, though nothing was known when it expired')",
            "event_embedding <> CASE WHEN embedding THEN event_input ELSE 0 END": "concat(event_embedding, ' embedded tokens of ', "
            "event_input, CASE WHEN embedding THEN ' to be embedded' ELSE ' to be continued' END)",
            # Of an embedding that was cut off, the texts that the encoder had begun with are billed.
            "event_input NOT IN (0, input_token_count) AND NOT "
            "(embedding AND event_input < input_token_count AND outcome <> 'stop')": "concat("
            "event_input, ' input tokens in usage events, ', "
            "input_token_count, ' in the request')",
        },
    ),
)

REQUESTS_RUN_ONCE = Check(
    "requests-run-once",
    "A request id of a project has one hold at most, but for voided ones.",
    f"""
    SELECT concat('request ', request_id, ' of project ', project_id) AS subject,
           concat('has ', count(*), ' holds that were not voided') AS problem
    FROM holds WHERE state <> 'voided' AND admitted_at >= {SINCE} GROUP BY project_id, request_id HAVING count(*) > 1
    """,
)

# Few different combinations stand in many rows: they are told apart first, and looked up then.
HOLDS_OF_ONE_CUSTOMER = Check(
    "holds-of-one-customer",
    "The key, the project and the organization of a hold belong together, and so do the quotas that it is charged to.",
    rows_with(
        "concat('hold ', one_of_them)",
        f"""
        SELECT DISTINCT ON (c.api_key_id, c.project_id, c.organization_id, c.quota_ids) c.*, k.project_id AS key_project_id,
               p.organization_id AS project_organization_id,
               NOT EXISTS (SELECT FROM unnest(c.quota_ids) AS charged(id) LEFT JOIN quotas q ON q.id = charged.id
                    AND q.subject_id IN (c.organization_id, c.project_id, c.api_key_id) AND NOT q.for_new_keys
                WHERE q.id IS NULL) AS own_quotas
        FROM (SELECT min(id::text) AS one_of_them, api_key_id, project_id, organization_id, quota_ids FROM holds
              WHERE admitted_at >= {SINCE} GROUP BY 2, 3, 4, 5) c
        LEFT JOIN api_keys k ON k.id = c.api_key_id
        LEFT JOIN projects p ON p.id = c.project_id
        """,
        {
            "(key_project_id, project_organization_id) IS DISTINCT FROM (project_id, organization_id)": "'is charged to a key, a "
            "project and an organization that do not belong together'",
            "NOT own_quotas": "'is charged to a quota of somebody else'",
        },
    ),
)

HOLDS_ARE_SWEPT = Check(
    "holds-are-swept",
    f"No hold is live {OVERDUE} after its expiry: somebody sweeps.",
    f"""
    SELECT concat('hold ', id) AS subject,
           concat('of owner ', owner_id, ' has expired at ', expires_at, ' and is still live') AS problem
    FROM holds WHERE state = 'held' AND expires_at < now() - interval '{OVERDUE}'
    """,
    Moment.SOON,
)

NO_HOLD_IS_LEFT = Check(
    "no-hold-is-left",
    "Nothing runs, so no hold is live.",
    """
    SELECT concat('hold ', id) AS subject, concat('of owner ', owner_id, ' is still live') AS problem
    FROM holds WHERE state = 'held'
    """,
    Moment.AT_REST,
)

HOLD_CHECKS = (HOLDS_END_ONCE, REQUESTS_RUN_ONCE, HOLDS_OF_ONE_CUSTOMER, HOLDS_ARE_SWEPT, NO_HOLD_IS_LEFT)


# What each dimension counts: how, over which window, and which tokens (input, output).
DIMENSIONS = """(VALUES
    ('concurrent_requests', 'running', NULL, 0, 0), ('requests_per_minute', 'requests', 'minute', 0, 0),
    ('tokens_per_minute', 'tokens', 'minute', 1, 1), ('input_tokens_per_minute', 'tokens', 'minute', 1, 0),
    ('output_tokens_per_minute', 'tokens', 'minute', 0, 1), ('tokens_per_day', 'tokens', 'day', 1, 1),
    ('tokens_per_month', 'tokens', 'month', 1, 1), ('cost_picos_per_day', 'money', 'day', 1, 1),
    ('cost_picos_per_month', 'money', 'month', 1, 1), ('prepaid_credit_picos', 'money', NULL, 1, 1))
    AS d (dimension, charge, unit, counts_input, counts_output)"""
USED_MAX = 2**63 - 1  # where a counter ends: it says "so much or more" from there on
MONTHS_KEPT, DAYS_KEPT = "93 days", "2 days"  # so old counters of months, and of minutes and days, get before they are deleted

# A quota counts what was used before it was there if an admin has set it, and from then on what it is charged.
RULES = f"""
SELECT q.id AS quota_id, q.subject_id, q.model, q.dimension, q.deleted_at, d.charge, d.unit, d.counts_input * q.input_weight_milli
       AS input_weight, d.counts_input * q.cached_input_weight_milli AS cached_weight,
       d.counts_output * q.output_weight_milli AS output_weight, a.subject_id IS NOT NULL AS audited,
       a.subject_id IS NOT NULL AND q.deleted_at IS NULL AND NOT q.for_new_keys AS counts_past
FROM quotas q JOIN {DIMENSIONS} USING (dimension)
LEFT JOIN (SELECT DISTINCT subject_id FROM audit_log WHERE action = 'quota.set') a ON a.subject_id = q.id::text
"""


def weighed(sent: str, cached: str, output: str) -> str:
    """SQL of what tokens count for a quota, rounded up to a whole."""
    return f"(({sent} - {cached}) * w_input + {cached} * w_cached + {output} * w_output + divisor - 1) / divisor"


def window(unit: str, at: str) -> str:
    """SQL of the start of the calendar window that a moment lies in; the epoch for one that never ends."""
    return f"CASE WHEN {unit} IS NULL THEN 'epoch' ELSE date_trunc({unit}, {at}, 'UTC') END"


def charges(moved: str, charged: str) -> str:
    """SQL of each hold beside each quota that counts it, with what its end counts: of some holds, and of some ways to charge.

    An expired hold counts its whole lease, until its owner has told by a further usage event what it delivered. OFFSET 0 keeps the
    planner from looking up the usage events of each pair: it does not see how many quotas a hold has.
    """
    return f"""
    SELECT h.*, r.quota_id, r.charge, r.unit, h.input_token_count AS sent, h.cached_input_token_count AS cached,
           h.posted_token_count AS posted, r.quota_id = ANY(h.quota_ids) AS is_charged,
           CASE WHEN r.charge <> 'money' THEN r.input_weight WHEN h.embedding THEN p.embedding_picos_per_token
                ELSE p.input_picos_per_token END AS w_input,
           CASE WHEN r.charge <> 'money' THEN r.cached_weight WHEN h.embedding THEN p.embedding_picos_per_token
                ELSE p.cached_input_picos_per_token END AS w_cached,
           CASE r.charge WHEN 'money' THEN p.output_picos_per_token ELSE r.output_weight END AS w_output,
           CASE r.charge WHEN 'money' THEN 1 ELSE 1000 END AS divisor,
           h.state = 'expired' AND h.parts > CASE WHEN h.delivered_token_count > 0 THEN 1 ELSE 0 END AS told_late
    FROM ({HOLDS_WITH_EVENTS} WHERE ({LOOKED_AT}) AND {moved} OFFSET 0) h
    CROSS JOIN unnest(ARRAY[h.organization_id, h.project_id, h.api_key_id]) AS s (subject_id)
    JOIN rules r ON r.subject_id = s.subject_id AND (r.quota_id = ANY(h.quota_ids) OR (r.counts_past AND r.model IN ('', h.model)))
        AND {charged}
    JOIN price_versions p ON p.id = h.price_version_id
    """


# Holds that may count in a window of which the counter is still kept.
LOOKED_AT = f"""h.state = 'held'
    OR h.organization_id IN (SELECT subject_id FROM quotas WHERE dimension = 'prepaid_credit_picos' AND deleted_at IS NULL)
    OR h.charged_at >= (
    SELECT least(min(window_start), now() - interval '{MONTHS_KEPT}') FROM quota_counters WHERE window_start > 'epoch')"""
# A lifetime quota (without a unit) never keeps the lease of an expired hold: that would be credit lost for ever.
TOTAL = f"""CASE WHEN state = 'settled' OR told_late OR (state = 'expired' AND unit IS NULL)
    THEN {weighed("event_input", "least(cached, event_input)", "event_billed")}
    WHEN state = 'expired' THEN {weighed("sent", "least(cached, sent)", "leased_token_count")} ELSE 0 END"""
POSTED = f"CASE WHEN posted > 0 AND state = 'held' THEN {weighed('sent', 'cached', '(posted - sent)')} ELSE 0 END"
HELD = f"""CASE WHEN state <> 'held' THEN 0 WHEN charge = 'running' THEN 1 WHEN charge = 'requests' THEN 0
    WHEN posted > 0 THEN {weighed("sent", "cached", "leased_token_count")} - {weighed("sent", "cached", "(posted - sent)")}
    ELSE greatest({weighed("sent", "0", "leased_token_count")}, {weighed("sent", "sent", "leased_token_count")}) END"""
# What may be missing in the counter: it was given back while the quota was made.
DOUBTFUL = f"""CASE WHEN told_late AND NOT is_charged AND charge IN ('tokens', 'money')
    THEN {weighed("sent", "0", "leased_token_count")} ELSE 0 END"""
# A hold that never left the minute of its admission has all in one window, which is nearly every hold.
PLAIN = f"""
SELECT quota_id, {window("unit", "CASE WHEN charge = 'requests' THEN admitted_at ELSE charged_at END")} AS window_start,
       CASE charge WHEN 'requests' THEN (state <> 'voided')::int WHEN 'running' THEN 0 ELSE greatest({TOTAL}, {POSTED}) END AS used,
       {HELD} AS held, {DOUBTFUL} AS doubtful
FROM ({charges("true", "(cardinality(h.posted_minutes) = 0 OR r.charge IN ('requests', 'running'))")}) AS charges
"""
# The others have left in each minute that they were extended in what they had delivered by then.
MOVED = f"""
SELECT quota_id, {window("unit", "left_at")} AS window_start, so_far - lag(so_far, 1, 0) OVER story AS used,
       CASE WHEN number = 0 THEN held ELSE 0 END AS held, CASE WHEN number = 0 THEN doubtful ELSE 0 END AS doubtful
FROM (
    SELECT id, quota_id, unit, number,
           CASE WHEN number = 0 THEN charged_at ELSE to_timestamp(posted_minutes[number] * 60) END AS left_at,
           {HELD} AS held, {DOUBTFUL} AS doubtful, CASE WHEN number = 0 THEN greatest({TOTAL}, {POSTED})
           WHEN state <> 'voided' AND posted_minutes[number + 1] > 0 AND NOT (state = 'expired' AND unit IS NULL)
           THEN {weighed("sent", "cached", "(posted_minutes[number + 1] - sent)")}
           ELSE 0 END AS so_far
    FROM ({charges("cardinality(h.posted_minutes) > 0", "r.charge IN ('tokens', 'money')")}) AS charges,
         LATERAL (SELECT generate_series(1, cardinality(posted_minutes), 2) UNION ALL SELECT 0) AS mark (number)
) AS marks
WINDOW story AS (PARTITION BY id, quota_id ORDER BY number = 0, number)
"""

COUNTERS_EQUAL_HOLDS = Check(
    "counters-equal-holds",
    "Of every counter, held is the sum of what live holds claim, and used what usage events bill and live holds have posted in its "
    "window, besides leases of expired holds; no charge is without a counter. Always looks at whole windows.",
    "WITH rules AS ("
    + RULES
    + ") "
    + rows_with(
        "concat('counter of quota ', quota_id, ' (', dimension, ') from ', window_start)",
        f"""
        SELECT quota_id, window_start, r.dimension, c.used, c.held, c.quota_id IS NOT NULL AS stands,
               coalesce(x.used, 0) AS least, coalesce(x.held, 0) AS claimed,
               -- Of a quota that an admin set and removed again nobody knows any more what it counted when it was made.
               CASE WHEN r.deleted_at IS NOT NULL AND r.audited THEN greatest(coalesce(x.used, 0), c.used)
                    ELSE coalesce(x.used + x.doubtful, 0) END AS most,
               -- One that an admin has set has no counters of the windows before it.
               window_start = {window("r.unit", "now()")} OR (NOT r.audited AND window_start >= now()
                    - CASE r.unit WHEN 'month' THEN interval '{MONTHS_KEPT}' ELSE interval '{DAYS_KEPT}' END) AS kept
        FROM (SELECT quota_id, window_start, sum(used) AS used, sum(held) AS held, sum(doubtful) AS doubtful
              FROM ({PLAIN} UNION ALL {MOVED}) AS charged GROUP BY 1, 2) x
        FULL JOIN quota_counters c USING (quota_id, window_start)
        JOIN rules r USING (quota_id)
        """,
        {
            "stands AND held <> claimed": "concat('held ', held, ', but live holds claim ', claimed)",
            f"stands AND used < {USED_MAX} AND used NOT BETWEEN least AND most": "concat('used ', used, ', but holds left ', "
            "least, ' to ', most)",
            "NOT stands AND (claimed > 0 OR (least > 0 AND kept))": "concat('is missing: holds claim ', claimed, ' and left ', "
            "least)",
        },
    ),
)

# What an admin made tighter may be over its limit until the windows of then have ended. A lifetime quota may be over it by what
# owners of expired holds reported later: their leases had been given back.
LIMITS_HOLD = Check(
    "limits-hold",
    "Used and held together are within the limit of every enforced quota, unless it was made tighter while the window ran.",
    rows_with(
        "concat('counter of quota ', quota_id, ' (', dimension, ') from ', window_start)",
        """
        SELECT c.*, q.dimension, reported_late.picos AS late,
               CASE WHEN q.raised_until IS NOT NULL AND q.dimension = 'prepaid_credit_picos'
                                        OR q.raised_until > coalesce(nullif(c.window_start, 'epoch'), running.since)
                                      THEN q.raised_limit_value ELSE q.limit_value END AS bound
        FROM quota_counters c JOIN quotas q ON q.id = c.quota_id,
        LATERAL (SELECT min(admitted_at) AS since FROM holds
                 WHERE c.window_start = 'epoch' AND state = 'held' AND q.id = ANY(quota_ids)) AS running,
        LATERAL (SELECT coalesce(sum(e.cost_picos), 0) AS picos FROM holds h JOIN usage_events e ON e.hold_id = h.id
                 WHERE q.dimension = 'prepaid_credit_picos' AND h.organization_id = q.subject_id AND h.state = 'expired'
                   AND e.part = (h.delivered_token_count > 0)::int) AS reported_late
        WHERE q.deleted_at IS NULL AND q.enforced AND NOT EXISTS (
            SELECT FROM audit_log a WHERE a.action IN ('quota.set', 'quota.raise') AND a.subject_id = q.id::text
                AND a.created_at >= c.window_start AND (
                greatest((after->>'limit_value')::numeric, (after->>'raised_limit_value')::numeric)
                < greatest((before->>'limit_value')::numeric, (before->>'raised_limit_value')::numeric)
                OR (after->>'enforced')::bool > (before->>'enforced')::bool))
        """,
        {"used + held > bound + late": "concat('used ', used, ' + held ', held, ' exceed the limit ', bound)"},
    ),
)

# Exact: usage that an adjustment bills in place of its own cost was counted at its price, and is rated nowhere.
LIFETIME_QUOTAS_EQUAL_THE_LEDGER = Check(
    "lifetime-quotas-equal-the-ledger",
    "Of a prepaid organization's credit, used is what the ledger and usage events that are not rated yet bill, and what extensions "
    "of live holds have posted. Always looks at all time.",
    rows_with(
        "concat('prepaid credit of organization ', organization_id)",
        f"""
        SELECT o.organization_id, coalesce(c.used, 0) AS used, coalesce(posted.picos, 0) AS billed,
               coalesce(waiting.picos, 0) AS waiting, coalesce(running.picos, 0) AS running,
               coalesce(posted.picos, 0) + coalesce(waiting.picos, 0) + coalesce(running.picos, 0) AS explained
        FROM prepaid_organizations o LEFT JOIN quota_counters c USING (quota_id),
        LATERAL (SELECT -sum(l.amount_picos) AS picos FROM ledger_transactions t
                 JOIN ledger_entries l ON l.transaction_id = t.id AND l.token_kind IS NOT NULL
                 WHERE t.organization_id = o.organization_id AND t.kind = 'usage') AS posted,
        LATERAL (SELECT sum({EVENT_COST}) AS picos FROM usage_events e JOIN price_versions p ON p.id = e.price_version_id
                 WHERE e.organization_id = o.organization_id AND e.ledger_transaction_id IS NULL) AS waiting,
        LATERAL (SELECT sum(posted_cost_picos) AS picos FROM holds
                 WHERE state = 'held' AND organization_id = o.organization_id) AS running
        """,
        {
            f"used < {USED_MAX} AND used <> explained": "concat('used ', used, ' picos, but ', billed, ' are in the ledger, ', "
            "waiting, ' wait to be rated and ', running, ' are posted by live holds')",
        },
    ),
)

COUNTER_CHECKS = (COUNTERS_EQUAL_HOLDS, LIMITS_HOLD, LIFETIME_QUOTAS_EQUAL_THE_LEDGER)
