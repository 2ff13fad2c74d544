"""Checks of the schema: triggers, constraints and partitions exist and are in force."""

from __future__ import annotations

from metering.proof.check import Check, Moment

# Tables with a trigger `TABLE_append_only`. Some of them have a further trigger, which says what
# may change in their rows.
APPEND_ONLY = """
    adjustment_decisions adjustments alerts audit_log audit_retentions billing_months
    credit_applications credit_grants document_series fleet_versions invoice_letterheads
    invoice_lines invoices issued_documents ledger_accounts ledger_entries ledger_transactions
    meter_batches month_closings plan_assignments plan_versions price_versions receipt_batches
    receipt_keys resale_prices resale_statement_lines resale_statements retired_receipts
    stripe_events stripe_late_items stripe_month_items stripe_month_settlements
    usage_corrections usage_days usage_events
"""

# Each trigger with its function. A migrated database has exactly these; a test compares them.
TRIGGERS = {f"{table}_append_only": "refuse_change" for table in APPEND_ONLY.split()} | {
    "api_keys_no_delete": "refuse_deletion",
    "api_keys_update_recorded": "api_keys_update_recorded",
    "audit_log_expires": "audit_entry_expires",
    "audit_log_keeps_entries": "audit_entry_changed",
    "billing_months_close_in_order": "billing_months_close_in_order",
    "billing_months_close_once": "billing_month_closes_once",
    "credit_applications_within_grant": "credit_within_grant",
    "document_series_consecutive": "document_series_consecutive",
    "holds_belong_together": "holds_belong_together",
    "holds_end_once": "hold_ends_once",
    "holds_no_delete": "refuse_deletion",
    "holds_no_truncate": "refuse_deletion",
    "invoice_lines_add_up": "invoice_adds_up",
    "ledger_entries_balanced": "ledger_balanced",
    "ledger_months_open": "ledger_months_open",
    "meter_batches_invoiced_once": "meter_batch_invoiced_once",
    "meter_batches_restrict_update": "meter_batch_keeps_tokens",
    "organizations_no_delete": "refuse_deletion",
    "price_versions_insert_recorded": "price_versions_insert_recorded",
    "projects_create_receipt_chain": "create_receipt_chain",
    "projects_no_delete": "refuse_deletion",
    "quotas_delete_recorded": "quotas_delete_recorded",
    "quotas_insert_alerts_due": "quotas_alerts_due",
    "quotas_insert_belong_together": "quotas_belong_together",
    "quotas_insert_recorded": "quotas_insert_recorded",
    "quotas_set_changed_at": "quotas_set_changed_at",
    "quotas_update_alerts_due": "quotas_alerts_due",
    "quotas_update_belong_together": "quotas_belong_together",
    "quotas_update_recorded": "quotas_update_recorded",
    "receipt_chains_no_delete": "refuse_change",
    "receipt_chains_only_forward": "refuse_chain_rewind",
    "replica_rentals_keep_terms": "replica_rental_keeps_terms",
    "replica_rentals_no_delete": "refuse_deletion",
    "retired_months_no_delete": "refuse_deletion",
    "stripe_events_restrict_update": "stripe_event_keeps_payload",
    "stripe_late_items_restrict_update": "stripe_late_item_keeps_amount",
    "stripe_month_items_restrict_update": "stripe_month_item_keeps_amount",
    "stripe_month_settlements_restrict_update": "stripe_month_settled_once",
    "suspensions_closed_for_good": "refuse_reopening",
    "usage_events_match_holds": "usage_events_match_holds",
    "usage_events_partition": "refuse_partition",
    "usage_events_posted": "usage_events_posted",
    "usage_events_rated_once": "usage_event_changed",
    "usage_subjects_insert_counted": "usage_subjects_insert_counted",
    "usage_subjects_keep_name": "usage_subject_keeps_name",
    "usage_subjects_keep_salt": "usage_subject_keeps_salt",
    "usage_subjects_no_delete": "refuse_deletion",
    "usage_subjects_update_counted": "usage_subjects_update_counted",
}

TRIGGER_ROWS = ", ".join(f"('{trigger}', '{function}')" for trigger, function in TRIGGERS.items())

SCHEMA_CHECKS = (
    Check(
        "triggers-are-enabled",
        "The triggers that keep journals append-only, holds ended and transactions balanced, and"
        " that notify processes of changes, exist and are enabled.",
        f"""
        SELECT concat('trigger ', x.name) AS subject,
               CASE WHEN t.tgname IS NULL THEN 'is missing'
                    WHEN t.tgenabled NOT IN ('O', 'A') THEN 'is disabled'
                    ELSE concat('calls ', f.proname, ' instead of ', x.function)
               END AS problem
        FROM (VALUES {TRIGGER_ROWS}) AS x (name, function)
        LEFT JOIN pg_trigger t ON t.tgname = x.name AND t.tgparentid = 0
        LEFT JOIN pg_proc f ON f.oid = t.tgfoid
        WHERE t.tgname IS NULL
           OR t.tgenabled NOT IN ('O', 'A')
           OR f.proname <> x.function
        """,
    ),
    Check(
        "constraints-are-valid",
        "Every constraint is validated for all rows, and every index is valid.",
        """
        SELECT concat('constraint ', conname, ' of ', conrelid::regclass) AS subject,
               'is not validated' AS problem
        FROM pg_constraint
        WHERE NOT convalidated
          AND connamespace = 'public'::regnamespace
        UNION ALL
        SELECT concat('index ', indexrelid::regclass), 'is not valid'
        FROM pg_index
        JOIN pg_class c ON c.oid = indexrelid
        WHERE NOT (indisvalid AND indisready)
          AND c.relnamespace = 'public'::regnamespace
        """,
    ),
    Check(
        "partitions-refuse-writes",
        "No partition of the usage events can be written directly, which would bypass the triggers"
        " of the table.",
        """
        SELECT concat('partition ', inhrelid::regclass) AS subject,
               'accepts direct writes: its trigger is missing or disabled' AS problem
        FROM pg_inherits
        WHERE inhparent = 'usage_events'::regclass
          AND NOT EXISTS (
              SELECT
              FROM pg_trigger
              WHERE tgrelid = inhrelid
                AND tgname = 'usage_events_partition'
                AND tgenabled IN ('O', 'A')
          )
        """,
    ),
    Check(
        "partitions-exist",
        "Every usage event is in the partition of its month, and this month and the next have"
        " partitions.",
        """
        SELECT concat('usage events of ', to_char(settled_at AT TIME ZONE 'UTC', 'YYYY-MM'))
                   AS subject,
               concat(count(*), ' are in the default partition') AS problem
        FROM usage_events_default
        GROUP BY 1
        UNION ALL
        SELECT concat('partition ', name), 'is missing'
        FROM (
            SELECT to_char(
                       date_trunc('month', now() AT TIME ZONE 'UTC') + ahead * interval '1 month',
                       '"usage_events_"YYYY_MM'
                   ) AS name
            FROM generate_series(0, 1) AS ahead
        ) AS expected
        WHERE NOT EXISTS (
            SELECT
            FROM pg_inherits
            JOIN pg_class c ON c.oid = inhrelid
            WHERE inhparent = 'usage_events'::regclass
              AND relname = expected.name
        )
        """,
        Moment.SOON,
    ),
)
