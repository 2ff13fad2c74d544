"""Checks of the export: the batches of an hour contain the tokens used in it, each token once."""

from __future__ import annotations

from metering.proof.check import EVENTS_SINCE, Check, Moment, violations_sql
from metering.proof.usage_checks import KIND_ROWS, KIND_SUMS

# Hours older than this at the first run of the export have no batches.
FIRST_RUN_LOOKBACK = "35 days"
# Usage that was rated this shortly before the last scan may not have been visible to it.
LATE_MARGIN = "150 seconds"
FROM_HOUR = f"date_trunc('hour', {EVENTS_SINCE}, 'UTC')"

BATCH_SUBJECT = (
    "concat('organization ', organization_id, ', price version ', price_version_id, ', ',"
    " token_kind, ', hour ', hour)"
)

EXPORTED_SQL = f"""
SELECT organization_id, price_version_id, hour, token_kind,
       count(*) AS parts, min(part) AS first, max(part) AS last,
       coalesce(sum(token_count) FILTER (WHERE state <> 'cancelled'), 0) AS exported
FROM meter_batches
WHERE hour >= {FROM_HOUR}
GROUP BY 1, 2, 3, 4
"""


def rated_usage_sql(condition: str = "true") -> str:
    """Build SQL of rated tokens by customer, price version, hour and kind."""
    return f"""
    SELECT organization_id, price_version_id, hour, token_kind, token_count AS used
    FROM (
        SELECT organization_id, price_version_id,
               date_trunc('hour', settled_at, 'UTC') AS hour, {KIND_SUMS}
        FROM usage_events
        WHERE rated_at IS NOT NULL
          AND settled_at >= {FROM_HOUR}
          AND {condition}
        GROUP BY 1, 2, 3
    ) AS sums,
    {KIND_ROWS}
    WHERE token_count <> 0
    """


def missing_export_sql(condition: str = "true") -> str:
    """Build SQL of the completed hours in which fewer tokens were exported than used."""
    return violations_sql(
        BATCH_SUBJECT,
        f"""
        SELECT *
        FROM (
            SELECT closed_until,
                   least(
                       (SELECT min(hour) FROM meter_batches),
                       closed_until - interval '{FIRST_RUN_LOOKBACK}'
                   ) AS exported_from
            FROM export_progress
        ) AS progress,
        ({rated_usage_sql(condition)}) AS usage
        LEFT JOIN ({EXPORTED_SQL}) AS batches
            USING (organization_id, price_version_id, hour, token_kind)
        WHERE hour >= exported_from
          AND hour < closed_until
        """,
        {
            "coalesce(exported, 0) < used": (
                "concat('exports only ', coalesce(exported, 0), ' tokens of ', used, ' used')"
            )
        },
    )


EXPORT_CHECKS = (
    Check(
        "stripe-matches-invoices",
        "A settlement with Stripe is for the invoice of a closed month, and Stripe's usage, late"
        " usage and items sum to it.",
        violations_sql(
            "concat('settlement of organization ', organization_id, ', ',"
            " to_char(month, 'YYYY-MM'))",
            """
            SELECT s.*, m.state, coalesce(i.total_picos, 0) AS total_picos,
                   invoiced_minor + late_minor + (
                       SELECT coalesce(sum(amount_minor), 0)
                       FROM stripe_month_items t
                       WHERE (t.organization_id, t.month) = (s.organization_id, s.month)
                   ) AS stripe_minor
            FROM stripe_month_settlements s
            LEFT JOIN billing_months m USING (organization_id, month)
            LEFT JOIN invoices i USING (organization_id, month)
            """,
            {
                "state IS DISTINCT FROM 'closed'": "'the month is not closed'",
                "due_picos <> total_picos": (
                    "concat('is ', due_picos, ' picos, the invoice is ', total_picos)"
                ),
                "settled_at IS NOT NULL AND stripe_minor <> due_minor": (
                    "concat('is ', stripe_minor, ' minor units at Stripe, and ', due_minor,"
                    " ' is due')"
                ),
            },
        ),
    ),
    Check(
        "nothing-is-exported-twice",
        "The batches of an hour are numbered without a gap, and those that are not cancelled have"
        " no more tokens than were used in it.",
        violations_sql(
            BATCH_SUBJECT,
            f"""
            SELECT *
            FROM ({EXPORTED_SQL}) AS batches
            LEFT JOIN ({rated_usage_sql()}) AS usage
                USING (organization_id, price_version_id, hour, token_kind)
            """,
            {
                "first <> 0 OR parts <> last + 1": (
                    "concat('has the parts ', first, ' to ', last, ' in ', parts, ' batches')"
                ),
                "exported > coalesce(used, 0)": (
                    "concat('exports ', exported, ' tokens of ', coalesce(used, 0), ' used')"
                ),
            },
        ),
    ),
    Check(
        "closed-hours-are-exported",
        "All usage of a closed hour is in its batches, if it was rated before the export last"
        " scanned for late usage.",
        missing_export_sql(f"""rated_at < (
              SELECT scanned_until - interval '{LATE_MARGIN}' FROM export_progress
          )"""),
        Moment.SOON,
    ),
    Check(
        "all-usage-is-exported",
        "All rated usage of closed hours is in batches.",
        missing_export_sql(),
        Moment.AT_REST,
    ),
)
