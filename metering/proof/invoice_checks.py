"""Checks of closed months and invoices.

Invoices match the ledger and the customer's account, add up, and are numbered without a gap; they
are few, so all of them are checked whatever `since` is.
"""

from __future__ import annotations

from metering.proof.check import Check, violations_sql

MONTH_SUBJECT = "concat('organization ', organization_id, ', ', to_char(month, 'YYYY-MM'))"

INVOICE_CHECKS = (
    Check(
        "closed-months-have-digests",
        "A month has digests of its reports exactly if it is closed.",
        violations_sql(
            MONTH_SUBJECT,
            """
            SELECT coalesce(b.organization_id, c.organization_id) AS organization_id,
                   coalesce(b.month, c.month) AS month,
                   b.state, c.json_sha256
            FROM billing_months b
            FULL JOIN month_closings c USING (organization_id, month)
            """,
            {
                "state = 'closed' AND json_sha256 IS NULL": "'is closed but has no digests'",
                "state IS DISTINCT FROM 'closed' AND json_sha256 IS NOT NULL": (
                    "concat('is ', coalesce(state, 'open'), ' but has digests')"
                ),
            },
        ),
    ),
    Check(
        "documents-match-digests",
        "A PDF is the one that was issued.",
        violations_sql(
            "concat('organization ', organization_id, ', document ', name)",
            "SELECT organization_id, name, pdf_sha256, sha256(pdf) AS now FROM issued_documents",
            {
                "now <> pdf_sha256": (
                    "concat('has the SHA-256 ', encode(now, 'hex'), ', and had ',"
                    " encode(pdf_sha256, 'hex'))"
                )
            },
        ),
    ),
    Check(
        "invoices-match-ledger",
        "The usage lines of an invoice have the tokens and amounts of the ledger for the month, by"
        " price version, kind and month of use.",
        violations_sql(
            f"concat({MONTH_SUBJECT}, ', price version ', price_version_id, ', ', token_kind,"
            " ' of ', usage_month)",
            """
            SELECT *
            FROM (
                SELECT organization_id, t.billing_month AS month, price_version_id, token_kind,
                       to_char(t.effective_at AT TIME ZONE 'UTC', 'YYYY-MM') AS usage_month,
                       sum(token_count) AS posted_tokens,
                       -sum(amount_picos) AS posted_picos
                FROM month_closings c
                JOIN ledger_transactions t USING (organization_id)
                JOIN ledger_entries l ON l.transaction_id = t.id
                WHERE t.billing_month = c.month
                  AND t.kind = 'usage'
                  AND token_kind IS NOT NULL
                GROUP BY 1, 2, 3, 4, 5
            ) AS posted
            FULL JOIN (
                SELECT organization_id, month, price_version_id, token_kind, usage_month,
                       sum(token_count) AS invoiced_tokens,
                       sum(l.exact_picos) AS invoiced_picos
                FROM invoices i
                JOIN invoice_lines l ON l.invoice_id = i.id
                WHERE kind IN ('usage', 'late_usage')
                GROUP BY 1, 2, 3, 4, 5
            ) AS invoiced
            USING (organization_id, month, price_version_id, token_kind, usage_month)
            """,
            {
                """(posted_tokens, posted_picos)
            IS DISTINCT FROM (invoiced_tokens, invoiced_picos)""": (
                    "concat(coalesce(posted_tokens, 0), ' tokens for ', coalesce(posted_picos, 0),"
                    " ' picos posted, ', coalesce(invoiced_tokens, 0), ' for ',"
                    " coalesce(invoiced_picos, 0), ' invoiced')"
                )
            },
        ),
    ),
    Check(
        "invoices-match-receivables",
        "The postings of a closed month on the customer's receivable equal its invoice less the"
        " credit notes of the month.",
        violations_sql(
            MONTH_SUBJECT,
            """
            SELECT c.organization_id, c.month,
                   coalesce(i.total_picos, 0) + (
                       SELECT coalesce(sum(a.amount_picos), 0)
                       FROM adjustment_decisions d
                       JOIN adjustments a ON a.id = d.adjustment_id
                       WHERE d.approved
                         AND a.invoice_id IS NOT NULL
                         AND a.organization_id = c.organization_id
                         AND d.billing_month = c.month
                   ) AS invoiced_picos,
                   (
                       SELECT coalesce(sum(l.amount_picos), 0)
                       FROM ledger_transactions t
                       JOIN ledger_entries l ON l.transaction_id = t.id
                       JOIN ledger_accounts r ON r.id = l.account_id AND r.kind = 'receivable'
                       WHERE t.organization_id = c.organization_id
                         AND t.billing_month = c.month
                   ) AS posted_picos
            FROM month_closings c
            LEFT JOIN invoices i USING (organization_id, month)
            """,
            {
                "invoiced_picos <> posted_picos": (
                    "concat(posted_picos, ' picos are on the account, ', invoiced_picos,"
                    " ' on the invoice and credit notes')"
                )
            },
        ),
    ),
    Check(
        "invoices-add-up",
        "An invoice has as many lines as it states, they sum to its totals, exact and rounded, and"
        " it carries in the rounding remainder of the customer's previous invoice.",
        violations_sql(
            "concat('invoice ', number)",
            """
            SELECT i.*, lines.count, lines.exact, lines.rounded,
                   coalesce(
                       lag(carried_out_picos) OVER (PARTITION BY organization_id ORDER BY month), 0
                   ) AS carried_before
            FROM invoices i,
            LATERAL (
                SELECT count(*) AS count,
                       coalesce(sum(l.exact_picos), 0) AS exact,
                       coalesce(sum(l.amount_picos), 0) AS rounded
                FROM invoice_lines l
                WHERE l.invoice_id = i.id
            ) AS lines
            """,
            {
                "count <> line_count": "concat('has ', count, ' lines of ', line_count)",
                "exact <> exact_picos OR rounded <> total_picos": (
                    "concat('is ', exact_picos, ' picos, rounded ', total_picos, "
                    "'; its lines are ', exact, ', rounded ', rounded)"
                ),
                "total_picos + carried_out_picos <> exact_picos + carried_in_picos": (
                    "'loses picos by rounding'"
                ),
                "carried_in_picos <> carried_before": (
                    "concat('carries in ', carried_in_picos,"
                    " ' picos, but the previous invoice carried out ', carried_before)"
                ),
            },
        ),
    ),
    Check(
        "numbers-have-no-gaps",
        "Invoices and credit notes are each numbered from 1 to the counter of their series, without"
        " a gap.",
        violations_sql(
            "concat('series ', series)",
            """
            SELECT series,
                   count(ordinal) AS count,
                   coalesce(min(ordinal), 1) AS first,
                   coalesce(max(ordinal), 0) AS last,
                   coalesce(
                       (SELECT last_ordinal FROM document_series s WHERE s.series = n.series), 0
                   ) AS counter
            FROM (
                SELECT 'INV' AS series, ordinal FROM invoices
                UNION ALL
                SELECT 'CN', credit_note_ordinal FROM adjustment_decisions
            ) AS n
            GROUP BY series
            """,
            {
                "count <> last OR first <> 1 OR last <> counter": (
                    "concat('has ', count, ' numbers from ', first, ' to ', last, "
                    "', and its counter is ', counter)"
                )
            },
        ),
    ),
)
