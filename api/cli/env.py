"""`weir env`: what `weir up` started, for programs that use the SDKs."""

from __future__ import annotations

import shlex

import typer

from api.cli.connection import ConnectionProblem, connection_path, read_connection_file, reported


def env() -> None:
    """Print where `weir up` listens and its keys, for the shell: eval "$(weir env)".

    The SDKs, and every command, then find that server from any directory and any language.
    """
    with reported(None):
        file = read_connection_file()
        if not file.address:
            raise ConnectionProblem(f"there is no {connection_path()}: start a server with `weir up`")
        variables = {"WEIR_ADDRESS": file.address, "WEIR_API_KEY": file.api_key, "WEIR_ADMIN_KEY": file.admin_key}
        for name, value in variables.items():
            if value:
                typer.echo(f"export {name}={shlex.quote(value)}")
