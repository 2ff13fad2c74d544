"""`weir migrate`: brings the database to the schema of this version."""

from __future__ import annotations

from typing import Annotated

import typer

from api.cli.local import HomeOption, clear_failures, read_settings, stderr


def migrate(
    revision: Annotated[str, typer.Argument(help="Where to stop.")] = "head",
    home: HomeOption = None,
) -> None:
    """Bring the database of WEIR_DATABASE_URL to the schema of this version; without one, the embedded database of the home."""
    from metering.store import embedded_postgres
    from metering.store.migrations_runner import migrate as upgrade

    settings = read_settings(home)
    with clear_failures():
        if settings.database_url:
            upgrade(settings.database_url, revision)
        else:
            server = embedded_postgres.start(settings.home / "postgres")
            try:
                upgrade(server.url, revision)
            finally:
                server.stop()
    stderr.print("the database is at the schema of this version")
