"""Alembic's environment: runs the revisions online against `WEIR_DATABASE_URL`, one transaction
each.

An advisory lock serializes migrating processes; timeouts keep a migration from waiting forever on
live traffic.
"""

from __future__ import annotations

import os
import re

from alembic import context
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

import metering.alerts.alerts
import metering.invoicing.rentals
import metering.plans.plan_admin
import metering.pricing.resale_prices  # noqa: F401  # declares mapped classes on the base
from metering.core.models import Base
from metering.store.db import connection_options, settle_statement, sqlalchemy_url
from metering.store.migrations_runner import MIGRATION_LOCK_ID

# Tables used by SQL only, see `docs/internals/tables.md`. All other tables have a mapped class.
UNMAPPED = """
adjustment_decisions adjustments admin_requests alert_scans audit_retentions billing_months
billing_profiles cancel_commands credit_applications credit_grants document_series export_progress
fleet_versions invoice_letterheads invoice_lines launched_replicas
invoices issued_documents ledger_accounts ledger_entries ledger_transactions live_reports
meter_batches month_closings plan_assignments plan_versions queue_reports queue_weights
quota_checkpoints receipt_batches
receipt_chains receipt_keys replica_demands replica_drains replica_runs
resale_statement_lines resale_statements retired_months
retired_receipts rule_changes stripe_events
stripe_invoices stripe_late_items stripe_month_items stripe_month_settlements stripe_objects
traffic unrated_usage usage_corrections usage_days worker_incidents
"""
PARTITION = re.compile(r"usage_events_(\d{4}_\d{2}|default)")  # one per month, created ahead
MONTHS_AHEAD = 3  # time without a worker, which creates partitions too, before one is missing
CAN_MAKE_PARTITIONS = "SELECT to_regprocedure('create_usage_partitions(int)') IS NOT NULL"
# Of the revisions; the wait for another migration, which may run longer, has no limit.
LIMITS = ("statement_timeout=0", "idle_in_transaction_session_timeout=0")
SETTINGS = "SET lock_timeout = '5s'; SET statement_timeout = '10min'"


def database_url() -> str:
    """Return the URL of the caller's attributes, else of the environment."""
    url = context.config.attributes.get("database_url") or os.environ.get("WEIR_DATABASE_URL")
    if not url:
        raise SystemExit(
            "WEIR_DATABASE_URL is not set: name the database to migrate, or run `weir migrate`"
        )
    return str(url)


def is_compared(
    object_: object, name: str | None, type_: str, reflected: bool, compare_to: object
) -> bool:
    """Return whether Alembic compares a database object with the mapped classes.

    It compares all columns of mapped tables; indexes and constraints exist in the revisions only.
    """
    if type_ == "table":
        return name is None or not (name in UNMAPPED.split() or PARTITION.fullmatch(name))
    return type_ == "column" or not reflected or compare_to is not None


def run_migrations() -> None:
    engine = create_engine(
        sqlalchemy_url(database_url()),
        poolclass=NullPool,
        connect_args={"options": connection_options(LIMITS)},
    )
    with engine.connect() as connection:
        # Before the timeouts: another migration may run longer than `lock_timeout`.
        connection.execute(text("SELECT pg_advisory_lock(:id)"), {"id": MIGRATION_LOCK_ID})
        connection.execute(text(settle_statement(LIMITS)))
        connection.execute(text(SETTINGS))
        connection.commit()
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            transaction_per_migration=True,
            include_object=is_compared,
        )
        with context.begin_transaction():
            context.run_migrations()
        connection.commit()
        if connection.execute(text(CAN_MAKE_PARTITIONS)).scalar_one():
            connection.execute(
                text("SELECT create_usage_partitions(:months_ahead)"),
                {"months_ahead": MONTHS_AHEAD},
            )
            connection.commit()
    engine.dispose()


if context.is_offline_mode():
    raise SystemExit(
        "offline migrations are not supported: triggers are checked against a live server"
    )
run_migrations()
