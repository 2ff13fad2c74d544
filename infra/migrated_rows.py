"""Check of migrations on rows: no row is lost or changed, no large table is locked for long.

`rows_0008.sql` is a small installation at revision 0008, the schema of release 0.1.0, with rows in
every table. Each later revision is run on it separately. It must not read or rewrite tables that
grow with every request, since it locks them until it ends: constraints are added NOT VALID and
validated by a later revision, and indexes are built CONCURRENTLY.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from metering.store.db import psycopg_conninfo

REVISION = "0008"  # the head of release 0.1.0
ROWS = Path(__file__).with_name(f"rows_{REVISION}.sql")
LARGE = (
    "'{holds,usage_events,unrated_usage,ledger_transactions,ledger_entries,meter_batches,"
    "audit_log}'::regclass[]"
)

COLUMNS = """
SELECT relname, array_agg(attname ORDER BY attnum)
FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
AND relname <> 'alembic_version'
    AND attnum > 0 AND NOT attisdropped
GROUP BY 1 ORDER BY 1
"""
DRAWN = "SELECT sequencename, coalesce(last_value, 0) FROM pg_sequences WHERE schemaname = 'public'"
# Constraints, indexes and files of large tables and their partitions; a new file means a rewrite.
MADE = f"""
WITH large AS (SELECT c.oid, c.relname FROM pg_class c LEFT JOIN pg_inherits ON inhrelid = c.oid
               WHERE c.oid = ANY({LARGE}) OR inhparent = ANY({LARGE}))
SELECT format('constraint %s of %s is checked', conname, relname), pg_constraint.oid::text
FROM pg_constraint JOIN large ON large.oid = conrelid WHERE convalidated AND contype IN ('c', 'f')
UNION ALL SELECT format('index %s of %s is built', indexrelid::regclass, relname), indexrelid::text
FROM pg_index JOIN large ON large.oid = indrelid
UNION ALL SELECT format('table %s is rewritten', relname), pg_relation_filenode(large.oid)::text
FROM large WHERE pg_relation_filenode(large.oid) IS NOT NULL
"""
VALIDATED = """
    SELECT format('constraint %s of %s is checked', conname, conrelid::regclass), oid::text
      FROM pg_constraint
     WHERE NOT convalidated
"""

Connection = psycopg.Connection[tuple[object, ...]]
Contents = dict[str, tuple[list[str], Counter[str]]]


def complaints(url: str, config: Config) -> Iterator[str]:
    """Migrate the empty database to the head and yield the faults of revisions after `REVISION`."""
    command.upgrade(config, REVISION)
    with psycopg.connect(psycopg_conninfo(url), autocommit=True) as connection:
        connection.execute(ROWS.read_bytes())
        before, drawn = contents(connection), numbers(connection)
        yield from (
            f"{table} has no row to check: add one to {ROWS.name}"
            for table in before
            if not rows_of(before, table)
        )
        for revision in revisions(config):
            made, unread = objects(connection, MADE), objects(connection, VALIDATED)
            command.upgrade(config, revision)
            new = sorted(objects(connection, MADE) - made - unread)
            yield from (f"{revision}: {description} while it is locked" for description, _ in new)
        yield from lost(connection, before, drawn, "after the upgrade")
        command.downgrade(config, REVISION)
        yield from lost(connection, before, drawn, "after the downgrade")
        command.upgrade(config, "head")
        yield from lost(connection, before, drawn, "after the second upgrade")


def revisions(config: Config) -> list[str]:
    """List the revisions after `REVISION`, in order."""
    script = ScriptDirectory.from_config(config)
    return [each.revision for each in script.iterate_revisions("head", REVISION)][::-1]


def objects(connection: Connection, query: str) -> set[tuple[str, str]]:
    """Run a query of the catalog that lists objects, each with a description and an id."""
    return {
        (str(description), str(number))
        for description, number in connection.execute(query.encode())
    }


def contents(connection: Connection, columns: dict[str, list[str]] | None = None) -> Contents:
    """Read the rows of these tables and columns, by default of all."""
    rows_by_table: Contents = {}
    for table, names in (columns or columns_of(connection)).items():
        row = ", ".join(f'"{name}"::text' for name in names)
        rows = connection.execute(f"SELECT ARRAY[{row}]::text FROM {table}".encode()).fetchall()
        rows_by_table[table] = names, Counter(str(text) for (text,) in rows)
    return rows_by_table


def columns_of(connection: Connection) -> dict[str, list[str]]:
    """Read the columns of every table."""
    return {
        str(table): list(map(str, names))
        for table, names in connection.execute(COLUMNS.encode())
        if isinstance(names, list)
    }


def rows_of(rows_by_table: Contents, table: str) -> Counter[str]:
    """Look up a table's rows in the result of `contents`, each with its count."""
    return rows_by_table[table][1]


def numbers(connection: Connection) -> dict[str, int]:
    """Read the last value that each sequence of the database has returned."""
    return {str(name): int(str(value)) for name, value in connection.execute(DRAWN.encode())}


def lost(
    connection: Connection, before: Contents, drawn: dict[str, int], when: str
) -> Iterator[str]:
    """Compare with the present database; yield columns, rows and sequence values that differ."""
    present = columns_of(connection)
    kept: dict[str, list[str]] = {}
    for table, (names, _) in before.items():
        gone = [name for name in names if name not in present.get(table, ())]
        yield from (f"{when}: column {name} of {table} is gone" for name in gone)
        if left := [name for name in names if name not in gone]:
            kept[table] = left
    now = contents(connection, kept)
    for table, (names, rows) in before.items():
        if kept.get(table) == names:
            yield from (
                f"{when}: {table} has lost or changed {row}" for row in rows - rows_of(now, table)
            )
    counted = numbers(connection)
    yield from (
        f"{when}: {name} counts from an earlier number"
        for name, last in drawn.items()
        if counted.get(name, 0) < last
    )
