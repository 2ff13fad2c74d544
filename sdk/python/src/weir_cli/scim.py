"""`weir scim`: groups of an organization's identity provider, and the roles that they give."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from weir_cli.connection import OrganizationOption, admin_client, calls, organization_or_default
from weir_cli.members import LimitOption
from weir_cli.render import Table

if TYPE_CHECKING:
    from weir_client import AdminClient, ProvisionedGroup

GROUPS: Table[ProvisionedGroup] = Table(
    {
        "group": "group",
        "members": "member_count",
        "role": lambda each: each.role or "none",
        "project": lambda each: each.project_name or ("oldest" if each.role else ""),
        "state": lambda each: "provisioned" if each.group_id else "not provisioned yet",
        "id": "group_id",
    },
    right=("members",),
    empty="no groups: let your identity provider send some, or set a role with `weir scim role`",
    drop=("id",),
)

scim = typer.Typer(
    help="Show the groups of your identity provider, and set the roles that they give.",
    no_args_is_help=True,
)


@scim.command("groups")
@calls(admin_client, shown=GROUPS)
def list_groups(
    client: AdminClient, organization: OrganizationOption = None, limit: LimitOption = 1000
) -> list[ProvisionedGroup]:
    """List the groups that are provisioned or have a role."""
    found = client.list_provisioned_groups(organization_or_default(organization, client.address))
    return list(islice(found, limit))


@scim.command("role")
@calls(admin_client, shown=GROUPS)
def set_role(
    client: AdminClient,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.")],
    role: Annotated[
        str,
        typer.Argument(
            metavar="ROLE", help="owner, admin, developer, finance or viewer; '' for none."
        ),
    ],
    organization: OrganizationOption = None,
    project: Annotated[
        str,
        typer.Option(
            metavar="PROJECT", help="Project of the members, by name or id. Default: the oldest."
        ),
    ] = "",
) -> ProvisionedGroup:
    """Let a group give its members a role, at once and from now on."""
    return client.set_group_role(
        organization_or_default(organization, client.address), group, role, project=project
    )
