"""`weir key roles`: prints the table of permissions."""

from __future__ import annotations

from weir_cli.render import print_json, show, table

from api.access.permissions import PERMISSIONS
from api.access.roles import Role


def print_roles(*, as_json: bool) -> None:
    """Print each permission with the roles that have it, and with its calls as JSON."""
    rows = [each for permissions in PERMISSIONS.values() for each in permissions]
    if as_json:
        print_json(
            [
                {
                    "permission": each.name,
                    "roles": [role.word for role in Role if role in each.roles],
                    "calls": list(each.calls),
                }
                for each in rows
            ]
        )
        return
    cells = [(each.name, *("yes" if role in each.roles else "" for role in Role)) for each in rows]
    show(table("permission", *(role.word for role in Role), rows=cells))
