"""`weir end-user`: the users of your customers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from weir_cli.connection import (
    OrganizationOption,
    Output,
    admin_client,
    calls,
    organization_or_default,
)

if TYPE_CHECKING:
    from weir_client import AdminClient

end_user = typer.Typer(help="Erase the users of your customers.", no_args_is_help=True)


@end_user.command("erase")
@calls(admin_client)
def erase(
    client: AdminClient,
    name: Annotated[str, typer.Argument(help="Its name, as requests gave it.")],
    organization: OrganizationOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    if_exists: Annotated[
        bool,
        typer.Option(
            "--if-exists", help="Succeed if it does not exist, for scripts that run again."
        ),
    ] = False,
) -> Output:
    """Erase an end user's name for ever. Its usage stays in all sums and bills, without a name.

    Its limits end. Labels with the same value are removed from all requests of the organization.
    """
    owner = organization_or_default(organization, client.address)
    if not yes:
        if not has_terminal():
            raise typer.BadParameter("give --yes: there is no terminal to ask", param_hint="--yes")
        question = f"Erase {name!r} of {owner}, its limits, and labels with this value, for ever?"
        typer.confirm(question, abort=True, err=True)
    erased = client.erase_end_user(owner, name, allow_missing=if_exists)
    if not erased.erased:
        return erased, f"{owner} has no such end user: nothing was erased"
    return erased, (
        f"erased an end user of {owner}; limits that ended: {erased.limit_count}, requests that"
        f" lost a label: {erased.labelled_request_count}"
    )


def has_terminal() -> bool:
    """Return True if a person can answer a question."""
    return sys.stdin.isatty()
