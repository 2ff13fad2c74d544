"""`weir migrate`: brings the database to the schema of this version."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from api.cli.local import HomeOption, clear_failures, fail, read_settings, stderr

GRANT_HELP = (
    "Database role of api processes and workers: gets the rights that they need on every table, and loses all others. "
    "WEIR_APPLICATION_PASSWORD creates it where it is missing and sets its password."
)


def migrate(
    revision: Annotated[str, typer.Argument(help="Where to stop.")] = "head",
    home: HomeOption = None,
    grant: Annotated[str, typer.Option(metavar="ROLE", help=GRANT_HELP, show_default=False)] = "",
) -> None:
    """Bring the database of WEIR_DATABASE_URL to the schema of this version; without one, the embedded database of the home."""
    from metering.store import embedded_postgres
    from metering.store.migrations_runner import PASSWORD_VARIABLE, RoleUnfit, prepare_application_role
    from metering.store.migrations_runner import migrate as upgrade

    settings = read_settings(home)
    if grant and not settings.database_url:
        fail("--grant is for a PostgreSQL of your own: set WEIR_DATABASE_URL; the embedded one has a single user", 2)
    if grant and revision != "head":
        fail(f"--grant {grant} needs the newest schema, revision `head`, got {revision!r}: leave the revision out", 2)
    with clear_failures():
        if settings.database_url:
            upgrade(settings.database_url, revision)
            if grant:
                try:
                    prepare_application_role(settings.database_url, grant, os.environ.get(PASSWORD_VARIABLE, ""))
                except RoleUnfit as error:
                    fail(str(error))
        else:
            server = embedded_postgres.start(settings.home / "postgres")
            try:
                upgrade(server.url, revision)
            finally:
                server.stop()
    stderr.print("the database is at the schema of this version")
    if grant:
        stderr.print(f"role {grant} has the rights that api processes and workers need, and no others")
