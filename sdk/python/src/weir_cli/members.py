"""`weir member`, `weir service-account`, `weir person`: who acts in an organization.

A token or secret is printed once, alone on stdout.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from weir_cli.connection import (
    OrganizationOption,
    Output,
    admin_client,
    calls,
    organization_or_default,
)
from weir_cli.render import JsonOption, Table, note, print_json
from weir_cli.tenants import has_terminal
from weir_cli.texts import parse_span, parsed, time_text

if TYPE_CHECKING:
    from weir_client import (
        AdminClient,
        Invitation,
        Member,
        Person,
        ProvisionedGroup,
        ServiceAccount,
    )

MEMBERS: Table[Member] = Table(
    {
        "member": "email",
        "name": "display_name",
        "role": "role",
        "project": "project_name",
        "key": "key_prefix",
        "state": lambda each: state_of(each),
        "since": "create_time",
        "person id": "person_id",
    },
    empty="no members: invite one with `weir member invite EMAIL --role ROLE`",
    drop=("person id", "since", "project", "key"),
)
INVITATIONS: Table[Invitation] = Table(
    {
        "invited": "email",
        "role": "role",
        "project": "project_name",
        "expires": "expire_time",
        "id": "invitation_id",
    },
    empty="no open invitations",
    drop=("id", "project"),
)
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
    empty="no groups: let your identity provider send some, or use `weir member group-role`",
    drop=("id",),
)
SERVICE_ACCOUNTS: Table[ServiceAccount] = Table(
    {
        "service account": "name",
        "role": lambda each: each.role or "none, for models",
        "keys": "key_count",
        "created": "create_time",
        "id": "service_account_id",
    },
    right=("keys",),
    empty="no service accounts: create one with `weir service-account create NAME`",
    drop=("id", "created"),
)
PERSONS: Table[Person] = Table(
    {
        "person": "email",
        "name": "display_name",
        "state": lambda each: state_of(each),
        "since": "create_time",
        "id": "person_id",
    },
    empty="no persons: invite one with `weir member invite EMAIL --role ROLE`",
    drop=("id", "since"),
)

member = typer.Typer(
    help="Invite, list, change and remove the members of an organization.", no_args_is_help=True
)
service_account = typer.Typer(
    help="Create, list, change and delete service accounts.", no_args_is_help=True
)
person = typer.Typer(
    help="List, rename, deactivate, reactivate and erase persons of all organizations.",
    no_args_is_help=True,
)

MemberArgument = Annotated[
    str, typer.Argument(metavar="MEMBER", help="E-mail address, or id of the person.")
]
InvitationArgument = Annotated[
    str, typer.Argument(metavar="INVITATION", help="Id, as `weir member invitations` shows it.")
]
AccountArgument = Annotated[
    str, typer.Argument(metavar="ACCOUNT", help="Service account, by name or id.")
]
PersonArgument = Annotated[str, typer.Argument(metavar="PERSON", help="E-mail address or id.")]
RoleOption = Annotated[
    str,
    typer.Option(
        "--role",
        metavar="ROLE",
        help="owner, admin, developer, finance or viewer; or operator of the service.",
    ),
]
AccountRoleOption = Annotated[
    str,
    typer.Option(
        "--role",
        metavar="ROLE",
        help="owner, admin, developer, finance or viewer. Default: none, for models.",
    ),
]
ExpiresOption = Annotated[
    str,
    typer.Option(
        "--expires-in", metavar="SPAN", help="How long the token works: 12h, 7d, at most 30d."
    ),
]
SearchOption = Annotated[
    str, typer.Option(metavar="PREFIX", help="Only addresses that begin like this.")
]
LimitOption = Annotated[int, typer.Option(help="Show at most this many.", min=1, max=100_000)]


def state_of(each: Member | Person) -> str:
    """Describe whether a person is active."""
    return f"deactivated {time_text(each.deactivate_time)}" if each.deactivate_time else "active"


@member.command("invite")
@calls(admin_client)
def invite(
    client: AdminClient,
    email: Annotated[str, typer.Argument(metavar="EMAIL", help="E-mail address of the person.")],
    role: RoleOption,
    organization: OrganizationOption = None,
    project: Annotated[
        str,
        typer.Option(
            metavar="PROJECT", help="Project of the member, by name or id. Default: the oldest."
        ),
    ] = "",
    expires_in: ExpiresOption = "7d",
    as_json: JsonOption = False,
) -> None:
    """Invite a person. You see the token once, on stdout: send it to the person yourself."""
    invited = client.invite_member(
        organization_or_default(organization, client.address),
        email,
        role,
        project=project,
        lifetime=parsed("--expires-in", parse_span, expires_in),
    )
    if as_json:
        print_json(invited)
        return
    show_token(invited.invitation, invited.token)


@member.command("resend")
@calls(admin_client)
def resend(
    client: AdminClient,
    invitation: InvitationArgument,
    expires_in: ExpiresOption = "7d",
    as_json: JsonOption = False,
) -> None:
    """Make a new token for an invitation. The former token is refused from now on."""
    sent = client.resend_invitation(
        invitation, lifetime=parsed("--expires-in", parse_span, expires_in)
    )
    if as_json:
        print_json(sent)
        return
    show_token(sent.invitation, sent.token)


def show_token(invitation: Invitation | None, token: str) -> None:
    """Print a token alone on stdout, and its purpose on stderr."""
    if invitation is not None:
        note(
            f"{invitation.email} is invited to {invitation.organization_name} as {invitation.role}"
            f" until {time_text(invitation.expire_time)}. Send this token to the person, who"
            " accepts with `weir member accept`. It is shown only now"
        )
    typer.echo(token)


@member.command("accept")
@calls(admin_client)
def accept(
    client: AdminClient,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Your name. Default: the begin of the address.")
    ] = "",
    create_key: Annotated[
        bool,
        typer.Option("--create-key", help="Also create a key of your own, shown once on stdout."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Accept an invitation: pass its token with --api-key, or in WEIR_ADMIN_KEY."""
    accepted = client.accept_invitation(name, create_key=create_key)
    if as_json:
        print_json(accepted)
        return
    if (made := accepted.member) is not None:
        note(f"{made.email} is {made.role} of {made.organization_name}")
    if accepted.secret:
        note("The secret of your key is shown only now")
        typer.echo(accepted.secret)


@member.command("invitations")
@calls(admin_client, shown=INVITATIONS)
def list_invitations(
    client: AdminClient, organization: OrganizationOption = None, limit: LimitOption = 1000
) -> list[Invitation]:
    """List the invitations that are neither accepted nor revoked, without their tokens."""
    found = client.list_invitations(organization_or_default(organization, client.address))
    return list(islice(found, limit))


@member.command("uninvite")
@calls(admin_client)
def revoke_invitation(client: AdminClient, invitation: InvitationArgument) -> Output:
    """Revoke an invitation: its token is refused from now on."""
    client.revoke_invitation(invitation)
    return {"revoked": invitation}, f"the invitation {invitation} is revoked"


@member.command("list")
@calls(admin_client, shown=MEMBERS)
def list_members(
    client: AdminClient,
    organization: OrganizationOption = None,
    search: SearchOption = "",
    limit: LimitOption = 1000,
) -> list[Member]:
    """List the members of an organization by e-mail address."""
    found = client.list_members(
        organization_or_default(organization, client.address), search=search
    )
    return list(islice(found, limit))


@member.command("role")
@calls(admin_client, shown=MEMBERS)
def change_role(
    client: AdminClient,
    member_ref: MemberArgument,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="The new role.")],
    organization: OrganizationOption = None,
) -> Member:
    """Give a member another role, and its keys with it, at once on all servers."""
    return client.update_member(
        organization_or_default(organization, client.address), member_ref, role
    )


@member.command("remove")
@calls(admin_client)
def remove(
    client: AdminClient,
    member_ref: MemberArgument,
    organization: OrganizationOption = None,
    revoke_keys: Annotated[
        bool | None,
        typer.Option(
            "--revoke-keys/--keep-keys",
            help="Revoke or keep the keys that the person made for others. Required if any work.",
            show_default=False,
        ),
    ] = None,
) -> Output:
    """Remove a member, and revoke its own keys. Keys that it made for others are your choice."""
    removed = client.remove_member(
        organization_or_default(organization, client.address), member_ref, revoke_keys=revoke_keys
    )
    kept = f"; these stay: {', '.join(removed.kept_keys)}" if removed.kept_keys else ""
    revoked = ", ".join(removed.revoked_keys)
    return removed, f"{member_ref} is removed, and these keys are revoked: {revoked}{kept}"


@member.command("groups")
@calls(admin_client, shown=GROUPS)
def list_groups(
    client: AdminClient, organization: OrganizationOption = None, limit: LimitOption = 1000
) -> list[ProvisionedGroup]:
    """List the groups of your identity provider, and the roles that they give."""
    found = client.list_provisioned_groups(organization_or_default(organization, client.address))
    return list(islice(found, limit))


@member.command("group-role")
@calls(admin_client, shown=GROUPS)
def set_group_role(
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


@service_account.command("create")
@calls(admin_client, shown=SERVICE_ACCOUNTS)
def create_account(
    client: AdminClient,
    name: Annotated[str, typer.Argument(help="A name, such as that of the program.")],
    role: AccountRoleOption = "",
    organization: OrganizationOption = None,
) -> ServiceAccount:
    """Create a service account. Make its keys with `weir key create --service-account NAME`."""
    return client.create_service_account(
        organization_or_default(organization, client.address), name, role=role
    )


@service_account.command("list")
@calls(admin_client, shown=SERVICE_ACCOUNTS)
def list_accounts(
    client: AdminClient, organization: OrganizationOption = None, limit: LimitOption = 1000
) -> list[ServiceAccount]:
    """List the service accounts of an organization."""
    found = client.list_service_accounts(organization_or_default(organization, client.address))
    return list(islice(found, limit))


@service_account.command("role")
@calls(admin_client, shown=SERVICE_ACCOUNTS)
def change_account(
    client: AdminClient,
    account: AccountArgument,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="The new role; '' for none.")],
    organization: OrganizationOption = None,
) -> ServiceAccount:
    """Give a service account another role, and its keys with it, at once on all servers."""
    return client.update_service_account(
        organization_or_default(organization, client.address), account, role
    )


@service_account.command("delete")
@calls(admin_client)
def delete_account(
    client: AdminClient, account: AccountArgument, organization: OrganizationOption = None
) -> Output:
    """Delete a service account and revoke its keys."""
    client.delete_service_account(organization_or_default(organization, client.address), account)
    return {"deleted": account}, f"the service account {account} and its keys are out of force"


@person.command("list")
@calls(admin_client, shown=PERSONS)
def list_persons(
    client: AdminClient, search: SearchOption = "", limit: LimitOption = 1000
) -> list[Person]:
    """List the persons of all organizations by e-mail address."""
    return list(islice(client.list_persons(search=search), limit))


@person.command("rename")
@calls(admin_client, shown=PERSONS)
def rename_person(
    client: AdminClient,
    person_ref: PersonArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.")],
) -> Person:
    """Change the name of a person."""
    return client.update_person(person_ref, name)


@person.command("deactivate")
@calls(admin_client, shown=PERSONS)
def deactivate_person(client: AdminClient, person_ref: PersonArgument) -> Person:
    """Refuse all keys of a person in every organization, and end its running requests."""
    return client.deactivate_person(person_ref)


@person.command("reactivate")
@calls(admin_client, shown=PERSONS)
def reactivate_person(client: AdminClient, person_ref: PersonArgument) -> Person:
    """Accept the keys of a person again, as they were."""
    return client.reactivate_person(person_ref)


@person.command("erase")
@calls(admin_client)
def erase_person(
    client: AdminClient,
    person_ref: PersonArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be erased, and erase nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> Output:
    """Erase a person for ever: name, address and sign-in, in all organizations.

    Its memberships and keys end. Usage, bills and audit log keep its acts, under its id.
    """
    if not (yes or dry_run):
        if not has_terminal():
            raise typer.BadParameter("give --yes: there is no terminal to ask", param_hint="--yes")
        question = f"Erase {person_ref!r} from all organizations, for ever?"
        typer.confirm(question, abort=True, err=True)
    erased = client.erase_person(person_ref, dry_run=dry_run)
    left = ", ".join(erased.organizations) or "none"
    return erased, (
        f"{'would erase' if dry_run else 'erased'} the person {erased.person_id}; memberships that"
        f" end: {left}; keys: {erased.key_count}, sessions: {erased.session_count}, invitations:"
        f" {erased.invitation_count}, provisioned users: {erased.provisioned_user_count}, audit"
        f" entries that lose a name: {erased.audit_entry_count}"
    )


@person.command("sign-in")
@calls(admin_client)
def sign_in(
    client: AdminClient,
    person_ref: PersonArgument,
    expires_in: Annotated[
        str, typer.Option(metavar="SPAN", help="How long the link works: 15m, or up to 1d.")
    ] = "15m",
) -> None:
    """Create a link with which a person signs in to the console, once. It is printed on stdout."""
    lifetime = parsed("--expires-in", parse_span, expires_in)
    link = client.create_sign_in_link(person_ref, lifetime=lifetime)
    note("the link signs its opener in as the person, once. It is shown only now")
    typer.echo(link)
