"""Schema migrations of a database, and the grants of the application role.

The revisions are in `migrations/`, beside the package even when installed. The owner of the tables
runs them. Api processes and workers connect as the application role, which owns nothing: it cannot
disable a trigger, truncate a table or change a function, so facts stay append-only and closed
months closed even if its password is stolen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString

import psycopg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg import sql
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

import metering
from metering.store.border import SCHEMA as BORDER
from metering.store.db import connection_options, psycopg_conninfo, sqlalchemy_url
from metering.store.refusals import is_conflict

MIGRATION_LOCK_ID = 7_355_608  # arbitrary, but never to be changed
REPEATED_AFTER_S = (0.5, 2.0)  # long enough for a request's transaction to end
SCRIPTS = Path(metering.__file__).resolve().parent.parent / "migrations"
# Development revisions before 0.1.0 had numbers that releases use again. Column numbers never
# change: in those, `description` was the fourth column, after one that was dropped later.
IS_DEVELOPMENT = """
SELECT attnum > 3
FROM pg_attribute
WHERE attrelid = to_regclass('ledger_transactions') AND attname = 'description'
"""

PASSWORD_VARIABLE = "WEIR_APPLICATION_PASSWORD"
# All tables are readable and, unless named here, accept inserts. Partitions are only readable.
READ_ONLY = frozenset(
    {"alembic_version", "audit_retentions", "retired_months", "retired_receipts", "usage_days"}
)
# Functions with the rights of their owner. A database restored without privileges lacks that PUBLIC
# may not call them, as in the migrations.
CALLED = [
    "create_usage_partitions(int)",
    "begin_usage_retirement(date,int)",
    "sum_retiring_day(date)",
    "retire_holds(date,int)",
    "detach_retired_usage(date)",
    "drop_retired_usage(date)",
    "begin_audit_retention(timestamptz,int)",
    "delete_expired_entries(bigint,int)",
]
UPDATED = frozenset(
    {
        "admin_requests",
        "alert_deliveries",
        "alert_scans",
        "alert_webhooks",
        "api_key_owners",
        "api_key_uses",
        "api_keys",
        "billing_months",
        "billing_profiles",
        "client_tokens",
        "document_series",
        "export_progress",
        "holds",
        "invitations",
        "launched_replicas",
        "live_reports",
        "memberships",
        "meter_batches",
        "organization_regions",
        "persons",
        "prepaid_organizations",
        "queue_reports",
        "queue_weights",
        "quota_counters",
        "quotas",
        "receipt_chains",
        "replica_demands",
        "replica_drains",
        "replica_runs",
        "replica_rentals",
        "scim_group_roles",
        "scim_groups",
        "scim_users",
        "service_accounts",
        "sign_in_sessions",
        "stripe_events",
        "stripe_invoices",
        "stripe_late_items",
        "stripe_month_items",
        "stripe_month_settlements",
        "stripe_objects",
        "superseded_secrets",
        "suspensions",
        "token_issuers",
        "token_revocations",
        "traffic",
        "unrated_usage",
        "usage_events",
        "usage_subject_counts",
        "usage_subjects",
        "used_tokens",
        "worker_incidents",
    }
)
# `SELECT … FOR UPDATE` requires UPDATE on one column. Foreign keys keep a referenced key from
# changing.
LOCKED = frozenset({"adjustments", "credit_grants", "invoices", "organizations", "projects"})
RENAMED = frozenset({"organizations", "projects"})  # nothing else of them ever changes
DELETED = frozenset(
    {
        "admin_requests",
        "alert_scans",
        "alert_webhooks",
        "cancel_commands",
        "client_tokens",
        "group_memberships",
        "live_reports",
        "organization_regions",
        "prepaid_organizations",
        "queue_reports",
        "quota_counters",
        "replica_demands",
        "replica_drains",
        "rule_changes",
        "scim_group_members",
        "scim_group_roles",
        "scim_groups",
        "scim_users",
        "sign_in_links",
        "sign_in_sessions",
        "superseded_secrets",
        "suspensions",
        "token_revocations",
        "traffic",
        "unrated_usage",
        "used_tokens",
    }
)


class SchemaUnknown(Exception):
    """This version cannot migrate the database's schema. Nothing was changed."""


def migrate(database_url: str, revision: str = "head") -> None:
    """Upgrade to a revision. Concurrent calls take turns. Raises: SchemaUnknown.

    If live traffic keeps a lock for too long, the revision is tried again.
    """
    _revisions(database_url)
    for pause_s in REPEATED_AFTER_S:
        try:
            command.upgrade(config(database_url), revision)
            return
        except DBAPIError as error:
            if not is_conflict(error):
                raise
        time.sleep(pause_s)
    command.upgrade(config(database_url), revision)


def is_current(database_url: str) -> bool:
    """Return True if the database has the schema of this version.

    Raises: SchemaUnknown; sqlalchemy.exc.OperationalError if the database is unavailable.
    """
    return _revisions(database_url) == set(
        ScriptDirectory.from_config(config(database_url)).get_heads()
    )


def _revisions(database_url: str) -> set[str]:
    """Read the database's revision; nothing if it is empty. Raises: SchemaUnknown."""
    engine = create_engine(
        sqlalchemy_url(database_url),
        poolclass=NullPool,
        connect_args={"options": connection_options()},
    )
    try:
        with engine.connect() as connection:
            current = set(MigrationContext.configure(connection).get_current_heads())
            is_development = connection.execute(text(IS_DEVELOPMENT)).scalar()
    finally:
        engine.dispose()
    named = f"the database is at schema revision {', '.join(current) or 'none'}"
    if is_development:
        raise SchemaUnknown(
            f"{named} of a development version before 0.1.0, which no release migrates: save its"
            " configuration (`weir export` of that version), then migrate an empty database; `weir"
            " up` creates one after you move `postgres` out of its home directory"
        )
    scripts = ScriptDirectory.from_config(config(database_url))
    if current - {script.revision for script in scripts.walk_revisions()}:
        raise SchemaUnknown(
            f"{named}, which this version of Weir does not know: use the version that migrated it"
            " or a newer one"
        )
    return current


def config(database_url: str) -> Config:
    """Build Alembic's configuration for any command, without `alembic.ini`."""
    result = Config()
    result.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    result.set_main_option("path_separator", "os")
    result.attributes["database_url"] = database_url
    return result


# Tables with the rights that the role has directly, as a member of another role, or from PUBLIC.
EFFECTIVE = """
SELECT c.relname,
       array_agg(privilege) FILTER (WHERE has_table_privilege(%(role)s, c.oid, privilege)),
       pg_has_role(%(role)s, c.relowner, 'MEMBER')
FROM pg_class c
CROSS JOIN unnest(ARRAY['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'TRIGGER']) AS privilege
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')
GROUP BY c.oid
"""


BORDERED = """
SELECT relname FROM pg_class WHERE relnamespace = 'organization_border'::regnamespace
"""


class RoleUnfit(Exception):
    """The role cannot be used as the application role. Nothing was granted."""


def prepare_application_role(database_url: str, role: str, password: str = "") -> None:
    """Grant a role the rights that api processes and workers need, and revoke all others.

    Run it as the owner of the tables after each migration. It is idempotent, and connected
    processes continue. `password` creates a missing role, and becomes its password. Raises:
    RoleUnfit; psycopg.OperationalError.
    """
    with psycopg.connect(
        psycopg_conninfo(database_url), options=connection_options()
    ) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK_ID])
        try:
            _ensure(connection, role, password)
            _grant(connection, role)
        except psycopg.errors.InsufficientPrivilege as error:
            reason = (
                f"the user of WEIR_DATABASE_URL may not set up role {role!r}:"
                f" {error.diag.message_primary}"
            )
            raise RoleUnfit(f"{reason}; run this command as the owner of the tables") from error
        _check(connection, role)


def _ensure(connection: psycopg.Connection, role: str, password: str) -> None:
    name = sql.Identifier(role)
    row = connection.execute(
        "SELECT rolsuper OR rolcreaterole OR rolreplication OR rolname = current_user FROM pg_roles"
        " WHERE rolname = %s",
        [role],
    ).fetchone()
    if row is None and not password:
        remedy = (
            f"set {PASSWORD_VARIABLE} to create it, or run CREATE ROLE as a database administrator"
        )
        raise RoleUnfit(f"role {role!r} does not exist: {remedy}")
    if row is not None and row[0]:
        problem = (
            f"role {role!r} must not be a superuser, create roles, replicate, or be the owner"
            " running this command"
        )
        raise RoleUnfit(f"{problem}: name another role")
    if row is None:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
    if password:
        # Hashed here, so that the server's statement log does not contain the password.
        verifier = connection.pgconn.encrypt_password(
            password.encode(), role.encode(), b"scram-sha-256"
        ).decode()
        connection.execute(
            sql.SQL("ALTER ROLE {} LOGIN PASSWORD {}").format(name, sql.Literal(verifier))
        )


def _grant(connection: psycopg.Connection, role: str) -> None:
    name = sql.Identifier(role)

    def run(statement: LiteralString, **parts: sql.Composable) -> None:
        connection.execute(sql.SQL(statement).format(role=name, **parts))

    run("REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {role}")
    run("REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM {role}")
    run("GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
    run("GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}")  # nextval, not setval
    run("REVOKE ALL ON ALL TABLES IN SCHEMA organization_border FROM {role}")
    run("GRANT USAGE ON SCHEMA organization_border TO {role}")
    run("GRANT SELECT ON ALL TABLES IN SCHEMA organization_border TO {role}")
    bordered = {name for (name,) in connection.execute(BORDERED)}

    def named(table: str) -> Iterator[sql.Identifier]:
        yield sql.Identifier("public", table)
        if table in bordered:  # the view needs the same rights as its table
            yield sql.Identifier(BORDER, table)

    for table, rights in _rights(connection).items():
        for each in named(table) if rights else ():
            listed = sql.SQL(", ").join(map(sql.SQL, sorted(rights)))
            run("GRANT {rights} ON {table} TO {role}", rights=listed, table=each)
    for table in LOCKED:
        for each in named(table):
            run("GRANT UPDATE (id) ON {table} TO {role}", table=each)
    for table in RENAMED:
        for each in named(table):
            run("GRANT UPDATE (name) ON {table} TO {role}", table=each)
    # For erasing an end user or a person; a trigger decides what may change.
    run("GRANT UPDATE (before, after) ON public.audit_log TO {role}")
    run("REVOKE EXECUTE ON FUNCTION public.create_usage_partition(date) FROM PUBLIC")
    for signature in CALLED:
        function = sql.SQL("public." + signature)
        run("REVOKE EXECUTE ON FUNCTION {function} FROM PUBLIC", function=function)
        run("GRANT EXECUTE ON FUNCTION {function} TO {role}", function=function)


def _rights(connection: psycopg.Connection) -> dict[str, set[LiteralString]]:
    """List the rights besides SELECT by table, without partitions."""
    query = """
        SELECT relname
        FROM pg_class
        WHERE relnamespace = 'public'::regnamespace
          AND relkind IN ('r', 'p')
          AND NOT relispartition
    """
    rights: dict[str, set[LiteralString]] = {}
    for (table,) in connection.execute(query):
        granted: dict[LiteralString, bool] = {
            "INSERT": table not in READ_ONLY,
            "UPDATE": table in UPDATED,
            "DELETE": table in DELETED,
        }
        rights[table] = {right for right, is_granted in granted.items() if is_granted}
    return rights


def _check(connection: psycopg.Connection, role: str) -> None:
    """Raise RoleUnfit if the role has more rights than were granted."""
    rights = _rights(connection)
    for table, effective, owns in connection.execute(EFFECTIVE, {"role": role}).fetchall():
        excess = sorted(set(effective or ()) - rights.get(table, set()))
        if owns or excess:
            problem = (
                f"has the rights of the owner of table {table}"
                if owns
                else f"has the right {', '.join(excess)} on table {table}"
            )
            raise RoleUnfit(
                f"role {role!r} {problem}: revoke its memberships in other roles and the rights of"
                " PUBLIC"
            )
    query = "SELECT has_schema_privilege(%(role)s, 'public', 'CREATE')"
    if connection.execute(query, {"role": role}).fetchone() == (True,):
        raise RoleUnfit(
            f"role {role!r} can create objects: run REVOKE CREATE ON SCHEMA public FROM PUBLIC,"
            f" {role}"
        )
