"""Checks of holds.

Each hold ends once, has the usage events of that end, and is charged to its own organization only.
"""

from __future__ import annotations

from metering.proof.check import HOLDS_SINCE, SINCE, Check, Moment, violations_sql

OVERDUE = "10 minutes"  # sixty sweeps: the owner and every sweep have had their chance

# A hold with the sums of its usage events. `usage-parts` proves that it has two at most, so that
# nothing has to be grouped.
HOLDS_WITH_EVENTS = """
SELECT h.id, h.organization_id, h.project_id, h.api_key_id, h.model, h.price_version_id, h.state,
       h.quota_ids, h.admitted_at, h.charged_at, h.ended_at,
       h.input_token_count, h.cached_input_token_count, h.leased_token_count,
       h.delivered_token_count, h.posted_token_count, h.posted_minutes, h.embedding,
       h.reasoning_token_count, h.end_user_id, h.labels,
       num_nonnulls(first.id, second.id) AS parts,
       coalesce(first.input_token_count + first.embedding_token_count, 0)
           + coalesce(second.input_token_count + second.embedding_token_count, 0) AS event_input,
       coalesce(first.embedding_token_count, 0)
           + coalesce(second.embedding_token_count, 0) AS event_embedding,
       coalesce(first.delivered_token_count, 0)
           + coalesce(second.delivered_token_count, 0) AS event_delivered,
       coalesce(first.billed_token_count, 0)
           + coalesce(second.billed_token_count, 0) AS event_billed,
       coalesce(first.billed_reasoning_token_count, 0)
           + coalesce(second.billed_reasoning_token_count, 0) AS event_reasoning,
       first.outcome
FROM holds h
LEFT JOIN usage_events first ON first.hold_id = h.id AND first.part = 0
LEFT JOIN usage_events second ON second.hold_id = h.id AND second.part = 1
"""

NO_LIVE_HOLDS = Check(
    "no-live-holds",
    "No hold is live when no process runs.",
    """
    SELECT concat('hold ', id) AS subject,
           concat('of process ', process_id, ' is still live') AS problem
    FROM holds
    WHERE state = 'held'
    """,
    Moment.AT_REST,
)

HOLD_CHECKS = (
    Check(
        "holds-end-once",
        "A hold is live or has ended in one way, with the usage events of that end: none if it is"
        " live or voided, one with the delivered tokens if settled, the known tokens if expired.",
        violations_sql(
            "concat('hold ', id, ' (', state, ')')",
            f"""
            {HOLDS_WITH_EVENTS}
            WHERE h.ended_at IS NULL OR h.ended_at >= {HOLDS_SINCE}
            """,
            {
                "(ended_at IS NULL) <> (state = 'held')": (
                    "concat('ended at ', coalesce(ended_at::text, 'no time'))"
                ),
                "state IN ('held', 'voided') AND parts > 0": "'has a usage event'",
                "state = 'settled' AND (parts <> 1 OR event_delivered <> delivered_token_count)": (
                    "concat(parts, ' usage events with ', event_delivered, ' tokens of ',"
                    " delivered_token_count, ' delivered')"
                ),
                """state = 'expired'
            AND event_delivered NOT BETWEEN delivered_token_count AND leased_token_count""": (
                    "concat('usage events with ', event_delivered, ' tokens, known to be delivered"
                    " ', delivered_token_count, ', leased ', leased_token_count)"
                ),
                "state = 'expired' AND parts > 1 AND delivered_token_count = 0": (
                    "concat(parts, ' usage events, but no tokens were known when it expired')"
                ),
                "event_embedding <> CASE WHEN embedding THEN event_input ELSE 0 END": (
                    "concat(event_embedding, ' embedding tokens of ', event_input, CASE WHEN"
                    " embedding THEN ' in an embedding' ELSE ' in a completion' END)"
                ),
                # An embedding that was cut off bills the texts that the encoder had begun with.
                """event_input NOT IN (0, input_token_count)
            AND NOT (embedding AND event_input < input_token_count AND outcome <> 'stop')""": (
                    "concat(event_input, ' input tokens in usage events, ', input_token_count,"
                    " ' in the request')"
                ),
            },
        ),
    ),
    Check(
        "requests-run-once",
        "A request id of a project has at most one hold that is not voided.",
        f"""
        SELECT concat('request ', request_id, ' of project ', project_id) AS subject,
               concat('has ', count(*), ' holds that were not voided') AS problem
        FROM holds
        WHERE state <> 'voided'
          AND admitted_at >= {SINCE}
        GROUP BY project_id, request_id
        HAVING count(*) > 1
        """,
    ),
    # Many holds have the same few combinations: they are grouped first, then looked up.
    Check(
        "holds-have-one-customer",
        "The key, project, organization and end user of a hold belong together, and its quotas"
        " belong to one of them.",
        violations_sql(
            "concat('hold ', any_hold_id)",
            f"""
            SELECT DISTINCT ON (
                   c.api_key_id, c.project_id, c.organization_id, c.end_user_id, c.quota_ids)
                   c.*, k.project_id AS key_project_id,
                   p.organization_id AS project_organization_id,
                   u.organization_id AS end_user_organization_id,
                   NOT EXISTS (
                       SELECT
                       FROM unnest(c.quota_ids) AS charged (id)
                       LEFT JOIN quotas q
                           ON q.id = charged.id
                          AND (
                              q.subject_id IN (c.organization_id, c.project_id, c.api_key_id)
                              OR q.within_id IN (c.organization_id, c.project_id)
                                 AND (q.subject = 'label' OR q.subject_id = c.end_user_id)
                          )
                          AND NOT q.for_new_keys
                          AND q.for_each = ''
                       WHERE q.id IS NULL
                   ) AS has_own_quotas
            FROM (
                SELECT min(id::text) AS any_hold_id,
                       api_key_id, project_id, organization_id, end_user_id, quota_ids
                FROM holds
                WHERE admitted_at >= {SINCE}
                GROUP BY 2, 3, 4, 5, 6
            ) AS c
            LEFT JOIN api_keys k ON k.id = c.api_key_id
            LEFT JOIN projects p ON p.id = c.project_id
            LEFT JOIN usage_subjects u ON u.id = c.end_user_id AND u.kind = 'end_user'
            """,
            {
                """end_user_id IS NOT NULL
            AND end_user_organization_id IS DISTINCT FROM organization_id""": (
                    "'has an end user of another customer'"
                ),
                """(key_project_id, project_organization_id)
            IS DISTINCT FROM (project_id, organization_id)""": (
                    "'has a key, a project and an organization that do not belong together'"
                ),
                "NOT has_own_quotas": "'is charged to a quota of another customer'",
            },
        ),
    ),
    Check(
        "usage-subjects-are-counted",
        "The numbers of an organization's end users and label values are those of its rows that are"
        " not archived.",
        violations_sql(
            "concat('organization ', organization_id)",
            """
            SELECT organization_id,
                   coalesce(c.end_user_count, 0) AS end_user_count,
                   coalesce(c.label_value_count, 0) AS label_value_count,
                   coalesce(u.end_users, 0) AS end_users,
                   coalesce(u.label_values, 0) AS label_values
            FROM usage_subject_counts c
            FULL JOIN (
                SELECT organization_id,
                       count(*) FILTER (WHERE kind = 'end_user') AS end_users,
                       count(*) FILTER (WHERE kind = 'label') AS label_values
                FROM usage_subjects
                WHERE archived_at IS NULL
                GROUP BY 1
            ) AS u USING (organization_id)
            """,
            {
                "(end_user_count, label_value_count) <> (end_users, label_values)": (
                    "concat('counts ', end_user_count, ' end users and ', label_value_count,"
                    " ' label values, but has ', end_users, ' and ', label_values)"
                ),
            },
        ),
    ),
    Check(
        "keys-have-the-limits-of-their-group",
        "A key has a limit, with the same terms, from each selector of its group, unless it has one"
        " of its own instead; and no other limit from a selector.",
        violations_sql(
            "concat('key ', key_id, ' and selector ', selector_id)",
            """
            SELECT *
            FROM (
                SELECT k.id AS key_id, s.id AS selector_id, s.limit_value, s.alert_at,
                       true AS is_due
                FROM quotas s
                JOIN projects p ON s.subject_id IN (p.id, p.organization_id)
                JOIN api_keys k
                    ON k.project_id = p.id AND s.for_each = concat('key:', k."group")
                WHERE s.for_each <> ''
                  AND s.deleted_at IS NULL
                  AND k.revoked_at IS NULL
                  AND NOT EXISTS (
                      SELECT
                      FROM quotas o
                      WHERE o.subject_id = k.id
                        AND o.selector_id IS NULL
                        AND o.deleted_at IS NULL
                        AND (o.model, o.dimension, o.window_minutes, o.set_by_organization)
                            = (s.model, s.dimension, s.window_minutes, s.set_by_organization)
                  )
            ) AS due
            FULL JOIN (
                SELECT q.subject_id AS key_id, q.selector_id, q.limit_value AS given_value,
                       q.alert_at AS given_alert_at, true AS is_given
                FROM quotas q
                JOIN api_keys k ON k.id = q.subject_id
                WHERE q.selector_id IS NOT NULL
                  AND q.deleted_at IS NULL
                  AND k.revoked_at IS NULL
            ) AS given USING (key_id, selector_id)
            """,
            {
                "is_given IS NULL": "'is in the group without its limit'",
                "is_due IS NULL": "'has its limit without being in the group'",
                "(limit_value, alert_at) <> (given_value, given_alert_at)": (
                    "concat('has a limit of ', given_value, ', and the selector ', limit_value)"
                ),
            },
        ),
    ),
    Check(
        "erased-subjects-have-no-limits",
        "No limit is in force for an end user or label value that was erased.",
        """
        SELECT concat('limit ', q.id) AS subject,
               concat('is in force for erased ', u.kind, ' ', u.id) AS problem
        FROM usage_subjects u
        JOIN quotas q ON q.subject_id = u.id
        WHERE u.erased_at IS NOT NULL
          AND q.deleted_at IS NULL
        """,
    ),
    Check(
        "holds-are-swept",
        f"No hold is live {OVERDUE} after its expiry: a sweep ends it.",
        f"""
        SELECT concat('hold ', id) AS subject,
               concat('of process ', process_id, ' has expired at ', expires_at,
                      ' and is still live')
                   AS problem
        FROM holds
        WHERE state = 'held'
          AND expires_at < now() - interval '{OVERDUE}'
        """,
        Moment.SOON,
    ),
    NO_LIVE_HOLDS,
)
