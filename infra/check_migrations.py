"""Run every migration up, down and up again on PostgreSQL; compare columns with mapped classes.

Run as `make migrations-check`. Detects revisions that cannot be undone, leave objects behind, lose
or change rows, read or rewrite a large table under an exclusive lock, or differ from the mapped
classes. `make migration NAME="..."` (`--write`) drafts a revision from the difference instead. Uses
a temporary server and no configured database. `migrated_rows.py` compares the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import Script, ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import create_engine, text

from infra import migrated_rows
from metering.store import embedded_postgres
from metering.store.db import sqlalchemy_url

ROOT = Path(__file__).resolve().parent.parent

# Objects that a full downgrade must remove: of all kinds, except Alembic's own table.
LEFT_OVER = text("""
    SELECT format(
        '%s %s', CASE WHEN relkind IN ('r', 'p') THEN 'table' ELSE 'relation' END, relname
    )
    FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND relname NOT LIKE 'alembic_version%'
    UNION ALL SELECT format('function %s', proname) FROM pg_proc
    WHERE pronamespace = 'public'::regnamespace
    UNION ALL SELECT format('type %s', typname) FROM pg_type
    WHERE typnamespace = 'public'::regnamespace AND typtype IN ('e', 'd')
    ORDER BY 1
""")


@contextlib.contextmanager
def database() -> Iterator[str]:
    """Yield the URL of an empty database on a temporary server, which is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="weir-migrations-") as scratch:
        server = embedded_postgres.start(Path(scratch, "postgres"))
        try:
            yield server.url
        finally:
            server.stop()


def left_over(url: str) -> list[str]:
    """List the tables, sequences, functions and types in the schema."""
    engine = create_engine(sqlalchemy_url(url))
    try:
        with engine.connect() as connection:
            return list(connection.execute(LEFT_OVER).scalars())
    finally:
        engine.dispose()


def configuration(url: str) -> Config:
    """Build Alembic's settings for the database at `url`, without output."""
    config = Config(str(ROOT / "alembic.ini"), stdout=io.StringIO())
    config.attributes["database_url"] = url
    return config


def complaints(url: str) -> Iterator[str]:
    """Run the migrations on the empty database at `url` and yield their faults."""
    config = configuration(url)
    command.upgrade(config, "head")
    command.downgrade(config, "base")
    yield from (f"left over after the downgrade: {name}" for name in left_over(url))
    yield from migrated_rows.complaints(url, config)
    try:
        command.check(config)
    except CommandError as difference:
        yield f"the models differ from the migrated schema: {difference}"


def draft(url: str, name: str) -> Path:
    """Write a draft of the revision that makes the schema equal to the mapped classes.

    Returns the path of the draft.
    """
    config = configuration(url)
    command.upgrade(config, "head")
    head = ScriptDirectory.from_config(config).get_current_head() or "0000"
    written = command.revision(
        config, message=name, autogenerate=True, rev_id=f"{int(head) + 1:04}"
    )
    assert isinstance(written, Script)
    return Path(written.path)


def main() -> int:
    """Check the migrations or draft one. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", metavar="NAME", help="draft a revision of this name from the difference instead"
    )
    name = parser.parse_args().write
    with database() as url:
        if name:
            print(draft(url, name).relative_to(ROOT))
            return 0
        found = list(complaints(url))
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
