"""`weir worker`: one billing worker in the foreground, as a deployment runs it."""

from __future__ import annotations

import os

from api.cli.local import HomeOption, fail, read_settings
from metering.worker import worker_command


def worker(home: HomeOption = None) -> None:
    """Start one worker on the database of WEIR_DATABASE_URL: it rates, ends stuck holds and exports, until SIGTERM or Ctrl-C.

    Any number may run. With WEIR_BROKER_URL (Redis) they may be on several machines; `weir up` starts one by itself.
    """
    settings = read_settings(home)
    if not settings.database_url:
        fail("WEIR_DATABASE_URL is not set: name the database that the worker is to work on", 2)
    command = worker_command()
    os.execve(command[0], command, {**os.environ, **settings.to_environment()})
