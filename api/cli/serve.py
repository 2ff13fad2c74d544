"""`weir serve`: one api process in the foreground, as a deployment runs it."""

from __future__ import annotations

import os

from api.cli.local import HomeOption, ListenOption, clear_failures, fail, read_settings


def serve(listen: ListenOption = "", home: HomeOption = None) -> None:
    """Start one API server on the database of WEIR_DATABASE_URL, until SIGTERM or Ctrl-C.

    `weir up` starts a whole installation on one machine instead. Migrate first: `weir migrate`.
    """
    from api.__main__ import main
    from metering.store.migrations_runner import is_current

    settings = read_settings(home, listen)
    if not settings.database_url:
        fail("WEIR_DATABASE_URL is not set: name a PostgreSQL database, or start everything on this machine with `weir up`", 2)
    with clear_failures():
        if not is_current(settings.database_url):
            fail("the database has not the schema of this version: run `weir migrate` first")
        main({**os.environ, **settings.to_environment()})
