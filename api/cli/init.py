"""`weir init`: the first customer and admin key of a new installation, straight in the database."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from api.cli.local import clear_failures, fail, read_settings, stderr
from api.cli.output import JsonOption, print_json


def init(
    organization: Annotated[str, typer.Option(help="Name of the first organization.")] = "main",
    project: Annotated[str, typer.Option(help="Name of its first project.")] = "default",
    json_output: JsonOption = False,
) -> None:
    """Create the first organization, project and admin key in the database of WEIR_DATABASE_URL, and prices for the models.

    On this machine it makes the key that signs receipts, where there is none and WEIR_RECEIPT_KEY_FILE does not say `off`.
    What exists stays as it is; each run makes one more admin key. Its secret is printed once and can never be shown again.
    """
    from api.cli.bootstrap import create_admin, ensure_receipt_key
    from api.fleet.fleet_file import model_names
    from metering.store.migrations_runner import is_current

    settings = read_settings()
    if not settings.database_url:
        fail("WEIR_DATABASE_URL is not set: name the database of the installation", 2)
    with clear_failures():
        if not is_current(settings.database_url):
            fail("the database has not the schema of this version: run `weir migrate` first")
        receipt_key = ensure_receipt_key(settings)
        secret = asyncio.run(create_admin(settings.database_url, organization, project, *model_names(settings)))
    if json_output:
        print_json({"organization": organization, "project": project, "admin_key": secret})
        return
    typer.echo(secret)
    stderr.print("This admin key is shown once. Keep it as WEIR_ADMIN_KEY where you run `weir`.")
    if receipt_key is not None:
        stderr.print(f"Receipts will be signed with {receipt_key}: copy it to the other machines that serve.")
