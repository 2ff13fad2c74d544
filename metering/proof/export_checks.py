"""The export: the batches of an hour are what was used in it, each token once."""

from __future__ import annotations

from metering.proof.checks import KIND_ROWS, KIND_SUMS, SINCE, Check, Moment, rows_with

FIRST_RUN_LOOKS_BACK = "35 days"  # no batch is made of an hour that was older when the export was switched on
LATE_MARGIN = "150 seconds"  # usage that was rated so shortly before the last look may not have been visible to it
FROM_HOUR = f"date_trunc('hour', {SINCE}, 'UTC')"
PLACE = "concat('organization ', organization_id, ', price version ', price_version_id, ', ', token_kind, ', hour ', hour)"


def used_by_hour(condition: str) -> str:
    """SQL of rated tokens by customer, price version, hour and kind."""
    return f"""SELECT organization_id, price_version_id, hour, token_kind, token_count AS used FROM (
        SELECT organization_id, price_version_id, date_trunc('hour', settled_at, 'UTC') AS hour, {KIND_SUMS}
        FROM usage_events WHERE rated_at IS NOT NULL AND settled_at >= {FROM_HOUR} {condition} GROUP BY 1, 2, 3
    ) sums, {KIND_ROWS} WHERE token_count <> 0"""


EXPORTED = f"""SELECT organization_id, price_version_id, hour, token_kind, count(*) AS parts, min(part) AS first, max(part) AS last,
    coalesce(sum(token_count) FILTER (WHERE state <> 'cancelled'), 0) AS exported
    FROM meter_batches WHERE hour >= {FROM_HOUR} GROUP BY 1, 2, 3, 4"""

NOTHING_IS_EXPORTED_TWICE = Check(
    "nothing-is-exported-twice",
    "The parts of an hour are numbered without a gap, and those that are not cancelled have no more tokens than were used in it.",
    rows_with(
        PLACE,
        f"SELECT * FROM ({EXPORTED}) batches LEFT JOIN ({used_by_hour('')}) usage "
        "USING (organization_id, price_version_id, hour, token_kind)",
        {
            "first <> 0 OR parts <> last + 1": "concat('has the parts ', first, ' to ', last, ' in ', parts, ' batches')",
            "exported > coalesce(used, 0)": "concat('exports ', exported, ' tokens of ', coalesce(used, 0), ' used')",
        },
    ),
)


def short_hours(rated: str) -> str:
    """SQL of closed hours of which less is exported than was used."""
    return rows_with(
        PLACE,
        f"""
        SELECT * FROM (
            SELECT closed_until,
                   least((SELECT min(hour) FROM meter_batches), closed_until - interval '{FIRST_RUN_LOOKS_BACK}') AS since
            FROM export_progress
        ) progress,
        ({used_by_hour(rated)}) usage LEFT JOIN ({EXPORTED}) batches USING (organization_id, price_version_id, hour, token_kind)
        WHERE hour >= since AND hour < closed_until
        """,
        {"coalesce(exported, 0) < used": "concat('exports only ', coalesce(exported, 0), ' tokens of ', used, ' used')"},
    )


CLOSED_HOURS_ARE_EXPORTED = Check(
    "closed-hours-are-exported",
    "All that was used in an hour that is closed stands in its batches, if it was rated before the export last looked for late "
    "usage.",
    short_hours(f"AND rated_at < (SELECT scanned_until - interval '{LATE_MARGIN}' FROM export_progress)"),
    Moment.SOON,
)

ALL_IS_EXPORTED = Check(
    "all-is-exported",
    "All rated usage of closed hours stands in batches.",
    short_hours(""),
    Moment.AT_REST,
)

STRIPE_SETTLES_THE_INVOICES = Check(
    "stripe-settles-the-invoices",
    "What is settled with Stripe is the invoice of a closed month, and usage, late usage and items there come to it.",
    rows_with(
        "concat('settlement of organization ', organization_id, ', ', to_char(month, 'YYYY-MM'))",
        """
        SELECT s.*, m.state, coalesce(i.total_picos, 0) AS total_picos,
               (SELECT coalesce(sum(amount_minor), 0) FROM stripe_month_items t
                WHERE (t.organization_id, t.month) = (s.organization_id, s.month)) AS item_minor
        FROM stripe_month_settlements s LEFT JOIN billing_months m USING (organization_id, month)
        LEFT JOIN invoices i USING (organization_id, month)
        """,
        {
            "state IS DISTINCT FROM 'closed'": "'the month is not closed'",
            "due_picos <> total_picos": "concat('is of ', due_picos, ' picos, the invoice of ', total_picos)",
            "settled_at IS NOT NULL AND invoiced_minor + late_minor + item_minor <> due_minor": "concat('comes to ', "
            "invoiced_minor + late_minor + item_minor, ' there, and ', due_minor, ' is due')",
        },
    ),
)

CHECKS = (STRIPE_SETTLES_THE_INVOICES, NOTHING_IS_EXPORTED_TWICE, CLOSED_HOURS_ARE_EXPORTED, ALL_IS_EXPORTED)
