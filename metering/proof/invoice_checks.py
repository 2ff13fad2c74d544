"""Closed months: their invoices are what the ledger says, add up, are numbered without a gap, and are what the customer owes.

Invoices are few beside usage, so these checks look at all of them, whatever the time to begin with.
"""

from __future__ import annotations

from metering.proof.checks import Check, rows_with

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

CHECKS = (CLOSED_MONTHS_ARE_FROZEN, INVOICES_ARE_THE_LEDGER, INVOICES_ARE_OWED, INVOICES_ADD_UP, NUMBERS_HAVE_NO_GAPS)
