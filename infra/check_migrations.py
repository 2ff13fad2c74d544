"""Run every migration up, down and up again on a real PostgreSQL, then compare the columns with the mapped classes.

Run as `make migrations-check`. A revision that cannot be undone, that leaves something behind, that loses or changes a row, that
reads or rewrites a large table while nobody else can use it, or that differs from the mapped classes fails here and
not in an operator's terminal. `make migration NAME="..."` (`--write`) drafts a revision from the difference instead. The server
lives in a temporary directory and is gone afterwards; no configured database is touched. `migrated_rows.py` looks at the rows.
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

# What a downgrade to nothing must have removed: all that a migration could have made, but for Alembic's own table.
LEFT_OVER = text("""
    SELECT format('%s %s', CASE WHEN relkind IN ('r', 'p') THEN 'table' ELSE 'relation' END, relname) FROM pg_class
     WHERE relnamespace = 'public'::regnamespace AND relname NOT LIKE 'alembic_version%'
    UNION ALL SELECT format('function %s', proname) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
    UNION ALL SELECT format('type %s', typname) FROM pg_type
     WHERE typnamespace = 'public'::regnamespace AND typtype IN ('e', 'd')
    ORDER BY 1
""")


@contextlib.contextmanager
def database() -> Iterator[str]:
    """The URL of an empty database on a server of its own, which is stopped and deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="weir-migrations-") as scratch:
        server = embedded_postgres.start(Path(scratch, "postgres"))
        try:
            yield server.url
        finally:
            server.stop()


def left_over(url: str) -> list[str]:
    """Tables, sequences, functions and types that are still in the schema."""
    engine = create_engine(sqlalchemy_url(url))
    try:
        with engine.connect() as connection:
            return list(connection.execute(LEFT_OVER).scalars())
    finally:
        engine.dispose()


def configuration(url: str) -> Config:
    """Alembic's settings, for the database at `url` and without its chatter."""
    config = Config(str(ROOT / "alembic.ini"), stdout=io.StringIO())
    config.attributes["database_url"] = url
    return config


def complaints(url: str) -> Iterator[str]:
    """What is wrong with the migrations, tried on the empty database at `url`."""
    config = configuration(url)
    command.upgrade(config, "head")
    command.downgrade(config, "base")
    yield from (f"left over after the downgrade: {name}" for name in left_over(url))
    yield from migrated_rows.complaints(url, config)
    try:
        command.check(config)
    except CommandError as difference:
        yield f"the models are not what the migrations build: {difference}"


def draft(url: str, name: str) -> Path:
    """Write the revision that makes the migrations equal the models; whoever asked for it reads and corrects it."""
    config = configuration(url)
    command.upgrade(config, "head")
    head = ScriptDirectory.from_config(config).get_current_head() or "0000"
    written = command.revision(config, message=name, autogenerate=True, rev_id=f"{int(head) + 1:04}")
    assert isinstance(written, Script)
    return Path(written.path)


def main() -> int:
    """Check or draft; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", metavar="NAME", help="draft a revision of this name from the difference instead")
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
