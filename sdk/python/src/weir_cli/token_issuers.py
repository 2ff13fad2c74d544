"""`weir token-issuer`: issuers whose tokens authenticate callers, and revocations of tokens."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir_cli.connection import (
    OnlyOrganizationOption,
    OrganizationOption,
    Output,
    admin_client,
    calls,
    organization_or_default,
)
from weir_cli.render import Table
from weir_cli.terms import TERMS, options_of, values_of
from weir_cli.texts import parse_span, parsed, time_text

if TYPE_CHECKING:
    from weir_client import AdminClient, TokenIssuer

token_issuers = typer.Typer(
    help="Let tokens of your identity provider authenticate calls instead of API keys.",
    no_args_is_help=True,
)

IssuerArgument = Annotated[
    str, typer.Argument(metavar="ISSUER_ID", help="Id of the issuer, as the list shows it.")
]
ISSUERS: Table[TokenIssuer] = Table(
    {
        "issuer": "issuer",
        "audience": "audience",
        "organization": "organization_name",
        "projects and keys": lambda each: ", ".join(map(_project_text, each.projects)),
        "since": "create_time",
        "id": "token_issuer_id",
    },
    empty="there is no token issuer",
    drop=("id", "since", "organization"),
)


def _project_text(found: object) -> str:
    value = getattr(found, "claim_value", "")
    shown = f"{getattr(found, 'project_name', '')} ({getattr(found, 'prefix', '')})"
    return f"{value}={shown}" if value else shown


@token_issuers.command("add")
@calls(admin_client, options=options_of(TERMS["token issuer"]), shown=ISSUERS)
def add_issuer(
    client: AdminClient,
    issuer: Annotated[
        str, typer.Argument(help="URL of the issuer, exactly as its tokens have it in `iss`.")
    ],
    audience: Annotated[
        str, typer.Option(help="Audience of tokens for Weir, which they have in `aud`.")
    ],
    project: Annotated[
        list[str],
        typer.Option(help="Project, or VALUE=PROJECT with --project-claim; repeatable."),
    ],
    organization: OrganizationOption = None,
    keys_file: Annotated[
        Path | None,
        typer.Option(
            help="File with its public keys, a JSON Web Key Set.", exists=True, dir_okay=False
        ),
    ] = None,
    lifetime_max: Annotated[str, typer.Option(help="Longest life of a token: 15m or 12h.")] = "1h",
    leeway: Annotated[
        int,
        typer.Option(min=0, max=300, help="Seconds by which the clocks of both may differ."),
    ] = 30,
    **terms: Any,
) -> TokenIssuer:
    """Trust an issuer. A key without a secret acts for its tokens, in each project."""
    return client.create_token_issuer(
        organization_or_default(organization, client.address),
        issuer,
        audience,
        project,
        keys=keys_file.read_text() if keys_file is not None else "",
        leeway=timedelta(seconds=leeway),
        lifetime_max=parsed("--lifetime-max", parse_span, lifetime_max),
        **values_of(TERMS["token issuer"], terms),
    )


@token_issuers.command("list")
@calls(admin_client, shown=ISSUERS)
def list_issuers(
    client: AdminClient, organization: OnlyOrganizationOption = ""
) -> list[TokenIssuer]:
    """List the trusted issuers, with the keys that act for their tokens."""
    return list(client.list_token_issuers(organization))


@token_issuers.command("revoke")
@calls(admin_client)
def revoke(
    client: AdminClient,
    issuer: IssuerArgument,
    claim: Annotated[
        str,
        typer.Argument(help="jti for one token, sid for a session, sub for a subject until now."),
    ],
    value: Annotated[str, typer.Argument(help="Value of the claim.")],
) -> Output:
    """Refuse tokens that were issued, and end their running requests on all servers."""
    revocation = client.revoke_tokens(issuer, claim, value)
    until = time_text(revocation.expire_time)
    return revocation, f"tokens with {claim} {value} are refused; the last of them ends {until}"


@token_issuers.command("remove")
@calls(admin_client)
def remove_issuer(
    client: AdminClient,
    issuer: IssuerArgument,
    if_exists: Annotated[
        bool,
        typer.Option("--if-exists", help="Succeed if there is none, for scripts that run again."),
    ] = False,
) -> Output:
    """Trust an issuer no more, and end the running requests of its tokens on all servers."""
    deleted = client.delete_token_issuer(issuer, allow_missing=if_exists)
    message = (
        f"issuer {issuer} is no longer trusted"
        if deleted
        else f"there is no issuer {issuer}: nothing was removed"
    )
    return {"token_issuer_id": issuer, "deleted": deleted}, message
