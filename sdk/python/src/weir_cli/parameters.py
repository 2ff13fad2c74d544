"""Parameters of all commands: placeholders, spellings, completion, and options that most share.

Placeholder and completion follow from a parameter's name, so that they are the same everywhere.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperOption

from weir_cli.commands import WIDE

COMPLETION_TIMEOUT_S = 1.0
END_USERS_COMPLETED = 100
# By the name of the parameter; others have the placeholder of their type.
PLACEHOLDERS: Mapping[str, str] = {
    "role": "ROLE",
    "group": "GROUP",
    "organization": "ORG",
    "project": "PROJECT",
    "model": "MODEL",
    "models": "MODEL",
    "key": "KEY",
    "api_key_ref": "KEY",
    "api_key": "SECRET",
    "dimension": "DIMENSION",
    "each": "SELECTOR",
    "end_user": "END_USER",
    "label": "KEY=VALUE",
    "value": "VALUE",
    "month": "MONTH",
    "first_month": "MONTH",
    "last_month": "MONTH",
    "day": "DAY",
    "address": "ADDRESS",
    "amount": "AMOUNT",
    "currency": "CURRENCY",
    "listen": "ADDRESS",
    "home": "DIR",
    "directory": "DIR",
    "since": "TIME",
    "until": "TIME",
    "expires_in": "DURATION",
    "unused_for": "DURATION",
    "overlap": "DURATION",
    "lasting": "DURATION",
    "quota_id": "ID",
    "request_id": "ID",
    "file": "FILE",
    "by": "LIST",
    "tags": "LIST",
    "alert_at": "LIST",
    "alert_remaining": "LIST",
    "emails": "EMAIL",
    "scopes": "SCOPE",
    "allowed_networks": "NETWORK",
    "batch_multiplier_milli": "NUMBER",
    "markup_milli": "NUMBER",
    "prefix": "PREFIX",
}
# Of other parameters, by the type; the first that is part of it.
TYPES: Mapping[type, str] = {datetime: "TIME", Path: "FILE", int: "N", float: "NUMBER", str: "TEXT"}
ORGANIZATION = ["--org", "--organization"]  # both spellings, wherever there is one
# Placeholders of names. An empty text is none; other texts may be empty, to clear a value.
NAMES = {"ORG", "PROJECT", "KEY", "MODEL", "SELECTOR", "END_USER", "KEY=VALUE"}


class Argument(TyperArgument):
    """Argument with its placeholder alone in the usage, and values of the server to complete it."""

    def get_usage_pieces(self, ctx: Any) -> list[str]:
        """Write the placeholder, in brackets if the argument can be left out."""
        shown = self.display_name_raw + ("..." if self.nargs != 1 else "")
        return [shown if self.required else f"[{shown}]"]

    def display_type_rich(self, ctx: Any) -> str:
        """Return no type: the placeholder says what belongs there."""
        return ""

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the possible values that begin with the text."""
        return completed(self, ctx, incomplete) or super().shell_complete(ctx, incomplete)


class Option(TyperOption):
    """Option with values of the server to complete it. One that names something has a name."""

    def consume_value(self, ctx: Any, opts: Mapping[str, Any]) -> Any:
        """Refuse an empty name, as of an unset variable of the shell: it would select everything.

        Raises: BadParameter.
        """
        written = opts.get(self.name or "")
        if self.metavar in NAMES and "" in (written if isinstance(written, list) else [written]):
            raise typer.BadParameter("is empty: name one, or leave it out", ctx, self)
        return super().consume_value(ctx, opts)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the possible values that begin with the text."""
        return completed(self, ctx, incomplete) or super().shell_complete(ctx, incomplete)


def wide_and_home(
    wide: Annotated[
        bool,
        typer.Option(
            "--wide",
            help="Leave out no column of a table.",
            callback=lambda given: WIDE.set(given) and None,
        ),
    ] = False,
    home: Annotated[
        Path | None,
        typer.Option(
            "--home",
            help="Home directory of `weir up`, for its address and keys. Default: $WEIR_HOME.",
            callback=lambda given: given and os.environ.update(WEIR_HOME=str(given)),
            is_eager=True,
        ),
    ] = None,
) -> None:
    """Apply the options that most commands share."""


def unify(command: Any, shared: Mapping[str, Any]) -> Any:
    """Give the parameters of a command, and of those below it, their form; add shared options.

    `shared` has the options `--wide`, for commands that can print a table, and `--home`, for those
    that connect to a server.
    """
    for each in getattr(command, "commands", {}).values():
        unify(each, shared)
    names = {name for parameter in command.params for name in parameter.opts}
    for name, option in shared.items():
        if name not in names and {"--wide": "--json", "--home": "--address"}[name] in names:
            command.params.append(option)
    for parameter in command.params:
        option = parameter.param_type_name == "option"
        if isinstance(parameter, Argument | Option):
            continue
        parameter.__class__ = Option if option else Argument
        if option and set(ORGANIZATION) & set(parameter.opts):
            parameter.opts = ORGANIZATION
        if parameter.metavar is None and not (option and parameter.is_flag):
            parameter.metavar = placeholder(parameter)
    return command


def placeholder(parameter: Any) -> str | None:
    """Choose the placeholder of a parameter; None if its type lists the values."""
    if parameter.type_descriptor.is_choice:
        return None if parameter.param_type_name == "option" else parameter.name.upper()
    if parameter.name.endswith("_picos_per_token"):
        return "PRICE"
    if parameter.name in PLACEHOLDERS:
        return PLACEHOLDERS[parameter.name]
    if parameter.name.endswith("_picos"):
        return PLACEHOLDERS["amount"]
    if parameter.param_type_name == "argument":
        return str(parameter.name.upper())
    kind = repr(parameter.type_descriptor.annotation)
    return next(text for type_, text in TYPES.items() if type_.__name__ in kind or type_ is str)


def completed(parameter: Any, ctx: Any, incomplete: str) -> list[Any]:
    """Return the values of a parameter that begin with the text; none if the server is silent."""
    from typer._click.shell_completion import CompletionItem

    found: Iterable[tuple[str, str]] = ()
    with contextlib.suppress(Exception):  # a message would be in the way of the command line
        found = list(VALUES[parameter.metavar](ctx.params))
    return [
        CompletionItem(value, help=about) for value, about in found if value.startswith(incomplete)
    ]


def client_for(role: Any, kind: str, given: Mapping[str, Any]) -> Any:
    """Make a client for one short question, with the address and key on the command line."""
    import weir_client

    from weir_cli.connection import resolve

    target = resolve(role, given.get("address"), given.get("api_key"))
    return getattr(weir_client, kind)(target.address, target.api_key, timeout=COMPLETION_TIMEOUT_S)


def organizations(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    with client_for("admin", "AdminClient", given) as client:
        return [(each.name, each.currency_code) for each in client.list_organizations()]


def own_organization(given: Mapping[str, Any]) -> str:
    from weir_cli.connection import read_connection_file

    return str(given.get("organization") or read_connection_file().organization)


def projects(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    with client_for("admin", "AdminClient", given) as client:
        return [(each.name, "") for each in client.list_projects(own_organization(given))]


def end_users(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    with client_for("admin", "BillingClient", given) as client:
        found = client.list_end_users(own_organization(given), page_size=END_USERS_COMPLETED)
        return [(each.name, each.last_use_day) for each in islice(found, END_USERS_COMPLETED)]


def keys(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    with client_for("admin", "AdminClient", given) as client:
        return [
            (each.prefix, f"{each.name} of {each.organization_name}/{each.project_name}")
            for each in client.list_api_keys(given.get("organization") or "")
            if each.revoke_time is None
        ]


def models(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    with client_for("inference", "Client", given) as client:
        return [(each.name, each.task.value.lower()) for each in client.list_models()]


def months(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    with client_for("admin", "BillingClient", given) as client:
        found = client.list_months(own_organization(given))
        return [(each.month, each.state.value) for each in found]


def dimensions(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    from weir_cli.tenants import DIMENSIONS

    return [(each.value, "") for each in DIMENSIONS]


# Of the values that complete a parameter, by its placeholder: each with a remark.
VALUES: Mapping[str, Callable[[Mapping[str, Any]], Iterable[tuple[str, str]]]] = {
    "DIMENSION": dimensions,
    "KEY": keys,
    "MODEL": models,
    "MONTH": months,
    "END_USER": end_users,
    "ORG": organizations,
    "SELECTOR": lambda _: [("end-user", "each end user"), ("label:", "each value of this label")],
    "PROJECT": projects,
}
