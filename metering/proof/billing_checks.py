"""Checks of the ledger, of closed months and of the export.

Every usage event is posted once, every transaction balances, and its legs are the tokens used, at their prices. Invoices are what
the ledger says, add up, are numbered without a gap, and are what the customer owes; they are few beside usage, so all of them are
checked whatever the time to begin with. The batches of an hour are what was used in it, each token once.
"""

from __future__ import annotations

from metering.proof.checks import KIND_ROWS, KIND_SUMS, NOT_CORRECTED, SINCE, TOKEN_KINDS, Check, Moment, rows_with

UNRATED_FOR = "10 minutes"  # rating runs every second
POSTED_EVENTS = "usage_events e JOIN ledger_transactions t ON t.id = e.ledger_transaction_id"
PRICES = " ".join(f"WHEN '{kind}' THEN p.{price}" for kind, (_, price) in TOKEN_KINDS.items())
PRICE = f"CASE token_kind {PRICES} END"
DIFFERENT = "(used_tokens, used_picos) IS DISTINCT FROM (posted_tokens, posted_picos)"
USED_AND_POSTED = """concat(coalesce(used_tokens, 0), ' tokens for ', coalesce(used_picos, 0), ' picos used, ',
    coalesce(posted_tokens, 0), ' tokens for ', coalesce(posted_picos, 0), ' picos posted')"""

RATED_IS_POSTED = Check(
    "rated-is-posted",
    "A usage event points to a transaction exactly if it is rated: one for usage, of its own customer and day.",
    rows_with(
        "concat('usage event ', id)",
        f"""
        SELECT e.id, e.rated_at, e.ledger_transaction_id, t.id AS transaction_id, t.kind,
               (t.organization_id, t.effective_at) = (e.organization_id, date_trunc('day', e.settled_at, 'UTC')) AS is_own
        FROM usage_events e LEFT JOIN ledger_transactions t ON t.id = e.ledger_transaction_id
        WHERE e.settled_at >= {SINCE}
        """,
        {
            "rated_at IS NULL AND ledger_transaction_id IS NOT NULL": "concat('is not rated and stands in transaction ', "
            "ledger_transaction_id)",
            "rated_at IS NOT NULL AND transaction_id IS NULL": "concat('was rated at ', rated_at, ' and is not posted')",
            "kind <> 'usage' OR NOT is_own": "concat('stands in transaction ', transaction_id, ', which is another customer''s, '"
            ", 'of another day, or not for usage')",
        },
    ),
)

POSTINGS_ARE_THEIR_USAGE = Check(
    "postings-are-their-usage",
    "The legs of a transaction are the tokens of the usage events behind it, by price version and kind, at exactly their price.",
    rows_with(
        "concat('ledger transaction ', transaction_id, ', price version ', price_version_id, ', ', token_kind)",
        f"""
        SELECT * FROM (
            SELECT transaction_id, price_version_id, token_kind, token_count AS used_tokens, token_count * {PRICE} AS used_picos
            FROM (SELECT t.id AS transaction_id, e.price_version_id, {KIND_SUMS} FROM {POSTED_EVENTS}
                  WHERE t.recorded_at >= {SINCE} GROUP BY 1, 2) sums
            JOIN price_versions p ON p.id = price_version_id, {KIND_ROWS} WHERE token_count <> 0
        ) used FULL JOIN (
            SELECT transaction_id, price_version_id, token_kind, sum(token_count) AS posted_tokens,
                   -sum(amount_picos) AS posted_picos
            FROM ledger_entries l JOIN ledger_transactions t ON t.id = l.transaction_id
            WHERE token_kind IS NOT NULL AND t.recorded_at >= {SINCE} GROUP BY 1, 2, 3
        ) posted USING (transaction_id, price_version_id, token_kind)
        """,
        {DIFFERENT: USED_AND_POSTED},
    ),
)

USAGE_EQUALS_LEDGER = Check(
    "usage-equals-ledger",
    "Per customer, month, model and kind, the tokens and the money of rated usage events are those of the ledger.",
    rows_with(
        "concat('organization ', organization_id, ', ', to_char(month, 'YYYY-MM'), ', model ', model, ', ', token_kind)",
        f"""
        SELECT * FROM (
            SELECT sums.organization_id, month, model, token_kind, sum(token_count) AS used_tokens,
                   sum(token_count * {PRICE}) AS used_picos
            FROM (SELECT organization_id, date_trunc('month', settled_at, 'UTC') AS month, price_version_id, {KIND_SUMS}
                  FROM usage_events WHERE rated_at IS NOT NULL AND settled_at >= date_trunc('month', {SINCE}, 'UTC')
                  GROUP BY 1, 2, 3) sums
            JOIN price_versions p ON p.id = price_version_id, {KIND_ROWS} WHERE token_count <> 0 GROUP BY 1, 2, 3, 4
        ) used FULL JOIN (
            SELECT t.organization_id, date_trunc('month', t.effective_at, 'UTC') AS month, p.model, token_kind,
                   sum(token_count) AS posted_tokens, -sum(amount_picos) AS posted_picos
            FROM ledger_transactions t JOIN ledger_entries l ON l.transaction_id = t.id
            JOIN price_versions p ON p.id = l.price_version_id
            WHERE t.effective_at >= date_trunc('month', {SINCE}, 'UTC') GROUP BY 1, 2, 3, 4
        ) posted USING (organization_id, month, model, token_kind)
        """,
        {DIFFERENT: USED_AND_POSTED},
    ),
)

TRANSACTIONS_BALANCE = Check(
    "transactions-balance",
    "Every ledger transaction has legs that sum to zero in each currency, on accounts of its own customer, in the currency of "
    "their price.",
    f"""
    SELECT concat('ledger transaction ', t.id) AS subject, 'has no legs' AS problem FROM ledger_transactions t
    WHERE t.recorded_at >= {SINCE} AND NOT EXISTS (SELECT FROM ledger_entries l WHERE l.transaction_id = t.id)
    UNION ALL
    SELECT concat('ledger transaction ', l.transaction_id),
           concat('does not sum to zero: ', sum(l.amount_picos), ' ', a.currency_code)
    FROM ledger_entries l JOIN ledger_accounts a ON a.id = l.account_id JOIN ledger_transactions t ON t.id = l.transaction_id
    WHERE t.recorded_at >= {SINCE} GROUP BY l.transaction_id, a.currency_code HAVING sum(l.amount_picos) <> 0
    UNION ALL
    SELECT concat('ledger entry ', l.id), 'stands on an account of another customer, or in another currency than its price'
    FROM ledger_entries l JOIN ledger_accounts a ON a.id = l.account_id JOIN ledger_transactions t ON t.id = l.transaction_id
    LEFT JOIN price_versions p ON p.id = l.price_version_id
    WHERE t.recorded_at >= {SINCE} AND (a.organization_id <> t.organization_id OR p.currency_code <> a.currency_code)
    """,
)

UNRATED_IS_LISTED = Check(
    "unrated-is-listed",
    "The list of what waits for rating is exactly the usage events that are not rated, each once.",
    f"""
    SELECT concat('usage event ', e.id) AS subject, 'is not rated, and not in the list of what waits for it' AS problem
    FROM usage_events e LEFT JOIN unrated_usage w USING (hold_id, part, settled_at)
    WHERE e.rated_at IS NULL AND w.event_id IS NULL AND e.settled_at >= {SINCE} AND {NOT_CORRECTED}
    UNION ALL
    SELECT concat('usage event ', w.event_id), concat('is ', count(*), ' times in the list of what waits for rating')
    FROM unrated_usage w LEFT JOIN usage_events e
        ON (e.id, e.hold_id, e.part, e.settled_at, e.organization_id)
            = (w.event_id, w.hold_id, w.part, w.settled_at, w.organization_id) AND e.rated_at IS NULL
    GROUP BY w.event_id HAVING count(*) > 1 OR count(e.id) = 0
    """,
)

USAGE_IS_RATED = Check(
    "usage-is-rated",
    f"No usage event is unrated {UNRATED_FOR} after it was written: somebody rates, and nothing stands in the way.",
    f"""
    SELECT concat('usage event ', id) AS subject, concat('was settled at ', settled_at, ' and is not rated') AS problem
    FROM usage_events e WHERE rated_at IS NULL AND settled_at < now() - interval '{UNRATED_FOR}' AND {NOT_CORRECTED}
    """,
    Moment.SOON,
)

ALL_IS_RATED = Check(
    "all-is-rated",
    "Nothing is waiting to be rated.",
    f"SELECT concat('usage event ', id) AS subject, 'is not rated' AS problem FROM usage_events e WHERE rated_at IS NULL "
    f"AND {NOT_CORRECTED}",
    Moment.AT_REST,
)

LEDGER_CHECKS = (
    UNRATED_IS_LISTED,
    RATED_IS_POSTED,
    POSTINGS_ARE_THEIR_USAGE,
    USAGE_EQUALS_LEDGER,
    TRANSACTIONS_BALANCE,
    USAGE_IS_RATED,
    ALL_IS_RATED,
)


MONTH = "concat('organization ', organization_id, ', ', to_char(month, 'YYYY-MM'))"

CLOSED_MONTHS_ARE_FROZEN = Check(
    "closed-months-are-frozen",
    "Every closed month has its digests, and only a closed one.",
    rows_with(
        MONTH,
        """
        SELECT coalesce(b.organization_id, c.organization_id) AS organization_id, coalesce(b.month, c.month) AS month, b.state,
               c.json_sha256 FROM billing_months b FULL JOIN month_closings c USING (organization_id, month)
        """,
        {
            "state = 'closed' AND json_sha256 IS NULL": "'is closed, and nothing was frozen'",
            "state IS DISTINCT FROM 'closed' AND json_sha256 IS NOT NULL": "concat('is ', coalesce(state, 'open'), "
            "', and was frozen')",
        },
    ),
)

INVOICES_ARE_THE_LEDGER = Check(
    "invoices-are-the-ledger",
    "The usage lines of an invoice are the tokens and amounts that the ledger has for the month, by price version, kind and month "
    "of use.",
    rows_with(
        f"concat({MONTH}, ', price version ', price_version_id, ', ', token_kind, ' of ', usage_month)",
        """
        SELECT * FROM (
            SELECT organization_id, t.billing_month AS month, price_version_id, token_kind,
                   to_char(t.effective_at AT TIME ZONE 'UTC', 'YYYY-MM') AS usage_month, sum(token_count) AS posted_tokens,
                   -sum(amount_picos) AS posted_picos
            FROM month_closings c JOIN ledger_transactions t USING (organization_id)
            JOIN ledger_entries l ON l.transaction_id = t.id
            WHERE t.billing_month = c.month AND t.kind = 'usage' AND token_kind IS NOT NULL GROUP BY 1, 2, 3, 4, 5
        ) posted FULL JOIN (
            SELECT organization_id, month, price_version_id, token_kind, usage_month, sum(token_count) AS invoiced_tokens,
                   sum(l.exact_picos) AS invoiced_picos
            FROM invoices i JOIN invoice_lines l ON l.invoice_id = i.id WHERE kind IN ('usage', 'late_usage') GROUP BY 1, 2, 3, 4, 5
        ) invoiced USING (organization_id, month, price_version_id, token_kind, usage_month)
        """,
        {
            "(posted_tokens, posted_picos) IS DISTINCT FROM (invoiced_tokens, invoiced_picos)": "concat("
            "coalesce(posted_tokens, 0), ' tokens for ', coalesce(posted_picos, 0), ' picos posted, ', "
            "coalesce(invoiced_tokens, 0), ' for ', coalesce(invoiced_picos, 0), ' invoiced')"
        },
    ),
)

INVOICES_ARE_OWED = Check(
    "invoices-are-owed",
    "What a closed month has moved on the customer's account is the total of its invoice, less the credit notes of the month.",
    rows_with(
        MONTH,
        """
        SELECT c.organization_id, c.month, coalesce(i.total_picos, 0) + (
                   SELECT coalesce(sum(a.amount_picos), 0) FROM adjustment_decisions d JOIN adjustments a ON a.id = d.adjustment_id
                   WHERE d.approved AND a.invoice_id IS NOT NULL AND a.organization_id = c.organization_id
                     AND d.billing_month = c.month
               ) AS owed, (
                   SELECT coalesce(sum(l.amount_picos), 0) FROM ledger_transactions t
                   JOIN ledger_entries l ON l.transaction_id = t.id
                   JOIN ledger_accounts r ON r.id = l.account_id AND r.kind = 'receivable'
                   WHERE t.organization_id = c.organization_id AND t.billing_month = c.month) AS posted
        FROM month_closings c LEFT JOIN invoices i USING (organization_id, month)
        """,
        {"owed <> posted": "concat(posted, ' picos are on the account, invoice and credit notes say ', owed)"},
    ),
)

INVOICES_ADD_UP = Check(
    "invoices-add-up",
    "An invoice has as many lines as it says, they add up to it, exactly and rounded, and what rounding left of the customer's "
    "invoice before is carried into it.",
    rows_with(
        "concat('invoice ', number)",
        """
        SELECT i.*, lines.count, lines.exact, lines.rounded,
               coalesce(lag(carried_out_picos) OVER (PARTITION BY organization_id ORDER BY month), 0) AS carried_before
        FROM invoices i, LATERAL (
            SELECT count(*) AS count, coalesce(sum(l.exact_picos), 0) AS exact, coalesce(sum(l.amount_picos), 0) AS rounded
            FROM invoice_lines l WHERE l.invoice_id = i.id) AS lines
        """,
        {
            "count <> line_count": "concat('has ', count, ' lines of ', line_count)",
            "exact <> exact_picos OR rounded <> total_picos": "concat('is ', exact_picos, ' picos, rounded ', total_picos, "
            "'; its lines are ', exact, ', rounded ', rounded)",
            "total_picos + carried_out_picos <> exact_picos + carried_in_picos": "'loses picos by rounding'",
            "carried_in_picos <> carried_before": "concat('carries in ', carried_in_picos, ' picos, the one before carried out ', "
            "carried_before)",
        },
    ),
)

NUMBERS_HAVE_NO_GAPS = Check(
    "numbers-have-no-gaps",
    "Invoices and credit notes are numbered from 1 on without a gap, as far as their series has counted.",
    rows_with(
        "concat('series ', series)",
        """
        SELECT series, count(ordinal) AS count, coalesce(min(ordinal), 1) AS first, coalesce(max(ordinal), 0) AS last,
               coalesce((SELECT last_ordinal FROM document_series s WHERE s.series = numbered.series), 0) AS counted
        FROM (SELECT 'INV' AS series, ordinal FROM invoices
              UNION ALL SELECT 'CN', credit_note_ordinal FROM adjustment_decisions) AS numbered GROUP BY series
        """,
        {
            "count <> last OR first <> 1 OR last <> counted": "concat('has ', count, ' numbers from ', first, ' to ', last, "
            "', and has counted to ', counted)"
        },
    ),
)

INVOICE_CHECKS = (CLOSED_MONTHS_ARE_FROZEN, INVOICES_ARE_THE_LEDGER, INVOICES_ARE_OWED, INVOICES_ADD_UP, NUMBERS_HAVE_NO_GAPS)


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

EXPORT_CHECKS = (STRIPE_SETTLES_THE_INVOICES, NOTHING_IS_EXPORTED_TWICE, CLOSED_HOURS_ARE_EXPORTED, ALL_IS_EXPORTED)
