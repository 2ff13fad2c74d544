"""Connection settings of the client commands: server, key, and the text of errors.

Flags override the environment, the environment overrides `connection.json`, which `weir up` writes
to `$WEIR_HOME` (`~/.weir`). A key from the file is used only for the address in the file, never for
another server.
"""

from __future__ import annotations

import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import weir_client
from typer._click.globals import get_current_context
from weir_client import (
    AlreadyExists,
    DeadlineExceeded,
    IncompleteGeneration,
    InvalidRequest,
    Unauthenticated,
    Unavailable,
    WeirError,
)

from weir_cli.commands import ExitCode
from weir_cli.render import JsonOption, Table, fail, note, print_found
from weir_cli.texts import checked_month, duration_text

if TYPE_CHECKING:
    from weir_client import (
        AdminClient,
        BillingClient,
        Client,
        ReceiptClient,
    )

CONNECTION_FILE = "connection.json"

# Fields of the API whose flag differs from their name with dashes.
_FLAGS = {
    "emails": "--email",
    "stop": "--stop",
    "limit_value": "VALUE",
    "for_each": "--each",
    "window_minutes": "--minutes",
    "end_user": "--end-user",
    "label": "--label",
    "replica_count": "--replicas",
    "first_day": "--from",
    "last_day": "--to",
    "prompt": "PROMPT",
    "messages": "PROMPT",
    "conversation": "PROMPT",
}

_FIELDS_WITH_FLAGS = frozenset(
    {
        "model",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "max_output_tokens",
        "currency_code",
        "lifetime",
        "organization",
        "project",
    }
    | {
        "legal_name",
        "address_line1",
        "address_line2",
        "city",
        "postal_code",
        "state",
        "country",
        "tax_id",
        "language",
    }
)

# Advice by the transport's error text.
_TLS_ADVICE = {
    "CERTIFICATE_VERIFY_FAILED": (
        "its certificate is not signed by a trusted CA: name the CA with `weir --ca FILE`"
    ),
    "Hostname Verification": (
        "its certificate is for another name: use an address in the certificate"
    ),
    "WRONG_VERSION_NUMBER": "it does not use TLS: prefix the address with http:// for plaintext",
    "Socket closed": (
        "it closed the connection: it may require TLS (prefix the address with https://), or a"
        " client certificate (`weir --client-certificate FILE --client-key FILE`)"
    ),
}

Role = Literal["inference", "admin"]
KEY_VARIABLES: Mapping[Role, tuple[str, ...]] = {
    "inference": ("WEIR_API_KEY",),
    "admin": ("WEIR_ADMIN_KEY", "WEIR_API_KEY"),
}

UNARY_TIMEOUT_S = 30.0  # calls to the admin and billing APIs
RETRY_WAIT_MAX_S = 1.0  # report a longer wait instead of blocking the terminal
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        help=(
            "Server: host:port, https://host:port or unix:/path; several with commas between."
            " Default: $WEIR_ADDRESS, then the server of `weir up`."
        ),
    ),
]

KeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        help="Your API key. Default: $WEIR_API_KEY; for admin commands $WEIR_ADMIN_KEY.",
        show_default=False,
    ),
]

OrganizationOption = Annotated[
    str | None,
    typer.Option("--org", help="Organization, by name or id. Default: the one of `weir up`."),
]
EveryOption = Annotated[
    bool,
    typer.Option("--all-orgs", help="All organizations, one after the other. Needs an admin key."),
]
OnlyOrganizationOption = Annotated[
    str, typer.Option("--org", help="Only this organization, by name or id.")
]
MonthArgument = Annotated[
    str,
    typer.Argument(
        help="Month in UTC, such as 2026-11.",
        metavar="MONTH",
        callback=lambda month: month and checked_month(month),
    ),
]
PresentMonthArgument = Annotated[
    str,
    typer.Argument(
        help="Month in UTC, such as 2026-11. Default: the current one until today.",
        metavar="MONTH",
        callback=lambda month: month and checked_month(month),
        show_default=False,
    ),
]


def explain(error: WeirError, address: str) -> str:
    """Format the message for a failed call to `address`, with a remedy."""
    message = error.message.removesuffix(".")
    match error:
        case Unavailable() if not error.details.reason and (advice := _tls_advice(error.message)):
            return f"no secure connection to {address}: {advice}"
        case Unavailable() if not error.details.reason:
            return _no_server(address, error.message)
        case InvalidRequest() if error.field_violations:
            return "; ".join(
                f"{flag_of(each.field)}: {each.description}" for each in error.field_violations
            )
        case Unauthenticated():
            return f"{message}; set WEIR_API_KEY or pass --api-key (server {address})"
        case IncompleteGeneration() | AlreadyExists() if error.request_id:
            return f"{message}; `weir trace {error.request_id}` shows its record"
        case DeadlineExceeded():
            return f"{message}; allow more time with --timeout"
    # The messages of the server say when.
    if error.retry_after_s is not None and "Try again " not in error.message:
        return f"{error}; try again in {duration_text(error.retry_after_s)}"
    return str(error)


def _tls_advice(message: str) -> str | None:
    """Find the remedy for a failed TLS connection; None if the failure is another one."""
    if "failed to connect" not in message:
        return None
    return next((advice for sign, advice in _TLS_ADVICE.items() if sign in message), None)


def _no_server(address: str, message: str) -> str:
    """Format the message for a server that does not answer, with a remedy for local servers."""
    from weir_client.connection import is_local
    from weir_client.status import HINTS

    for hint in HINTS.values():  # words about the SDK
        message = message.removesuffix(f"; {hint}")
    if "HTTP/2" in message:
        return (
            f"no gRPC server at {address}: the server there speaks another protocol; gRPC's default"
            " port is 8443, OpenAI's API and metrics have their own ports"
        )
    cause = message.rpartition(": ")[2].rstrip("])")
    # gRPC: "Domain name not found", "Misformatted domain name"; or an invalid port.
    if "omain name" in cause or cause == address:
        return f"no server at {address}: no such host or port; write them as 127.0.0.1:8443"
    remedy = (
        "start one with `weir up`"
        if is_local(address)
        else "check that it is running and that the address is right"
    )
    return f"no server at {address}: {remedy} ({cause})"


def flag_of(field: str) -> str:
    """Return the flag or argument for an API field, or the field's own name if there is none."""
    name = field.partition("[")[0].rpartition(".")[2]
    if name in _FLAGS:
        return _FLAGS[name]
    running = get_current_context(silent=True)
    for parameter in running.command.params if running is not None else ():
        if parameter.name == name and parameter.param_type_name == "option":
            return parameter.opts[0]
    return "--" + name.replace("_", "-") if name in _FIELDS_WITH_FLAGS else field


@dataclass(frozen=True, slots=True)
class Connection:
    """Address and keys of the local server that `weir up` has written. Empty if it never ran."""

    address: str = ""
    api_key: str = ""
    admin_key: str = ""
    organization: str = ""
    project: str = ""
    openai_url: str = ""

    def write(self, home: Path) -> None:
        """Write the settings for the commands of this user. Only the file's owner may read them."""
        path = home / CONNECTION_FILE
        unfinished = path.with_suffix(".new")
        unfinished.unlink(missing_ok=True)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(asdict(self), file, indent=2)
        unfinished.replace(path)


@dataclass(frozen=True, slots=True)
class Target:
    """Address and key that a command uses."""

    address: str
    api_key: str


class ConnectionProblem(Exception):
    """The connection settings are incomplete or malformed. The message has the remedy."""


def connection_path() -> Path:
    """Return the path of the connection file, which `weir up` writes."""
    return Path(os.environ.get("WEIR_HOME") or Path.home() / ".weir") / CONNECTION_FILE


def read_connection_file(path: Path | None = None) -> Connection:
    """Read the connection file; empty if it is missing. Raises: ConnectionProblem if malformed."""
    path = path or connection_path()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Connection()
    except (OSError, ValueError) as error:
        raise ConnectionProblem(
            f"{path} cannot be read ({error}): remove it, or run `weir up` again"
        ) from error
    if not isinstance(document, dict):
        raise ConnectionProblem(f"{path} is not a JSON object: remove it, or run `weir up` again")
    known = {field.name for field in fields(Connection)}
    return Connection(
        **{name: str(value) for name, value in document.items() if name in known and value}
    )


def resolve(role: Role, address: str | None, api_key: str | None) -> Target:
    """Choose the server and the key of a command. Raises: ConnectionProblem if there is no key."""
    file = read_connection_file()
    chosen = (
        address or os.environ.get("WEIR_ADDRESS") or file.address or weir_client.DEFAULT_ADDRESS
    )
    if api_key is None:
        api_key = next(
            (os.environ[name] for name in KEY_VARIABLES[role] if os.environ.get(name)), None
        )
    if api_key is None and chosen == file.address:
        api_key = (file.admin_key if role == "admin" else "") or file.api_key or None
    if api_key is None:
        variable = KEY_VARIABLES[role][0]
        raise ConnectionProblem(
            f"no API key for {chosen}: pass --api-key, set {variable}, or start a server with"
            " `weir up`"
        )
    return Target(chosen, api_key)


def organization_or_default(organization: str | None, address: str) -> str:
    """Return `organization` or, if empty, that of `weir up`. Raises: typer.BadParameter if none."""
    return _or_default(organization, "organization", "--org", address)


def organizations(given: str | None, admin: AdminClient, *, every: bool) -> list[str]:
    """Choose the organizations. Raises: typer.BadParameter if one and all are selected."""
    if not every:
        return [organization_or_default(given, admin.address)]
    if given:
        raise typer.BadParameter("give an organization or --all-orgs, not both", param_hint="--org")
    return [each.name for each in admin.list_organizations()]


def project_or_default(project: str | None, address: str) -> str:
    """Return `project` or, if empty, that of `weir up`. Raises: typer.BadParameter if none."""
    return _or_default(project, "project", "--project", address)


def _or_default(
    given: str | None, field: Literal["organization", "project"], flag: str, address: str
) -> str:
    file = read_connection_file()
    chosen = given or (getattr(file, field) if file.address == address else "")
    if not chosen:
        raise typer.BadParameter(f"{field} is missing", param_hint=flag)
    if not given:
        note(f"{field} {chosen}, that of `weir up`; {flag} chooses another")
    return str(chosen)


def _opener(role: Role, kind: str, **usual: Any) -> Callable[..., AbstractContextManager[Any]]:
    """Make a context manager that opens a client with the role's key. Errors exit with code 1."""

    @contextmanager
    def opened(address: str | None, api_key: str | None, **settings: Any) -> Iterator[Any]:
        with reported(address):
            target = resolve(role, address, api_key)
            make = getattr(weir_client, kind)
            with (
                reported(target.address),
                make(target.address, target.api_key, **usual | settings) as client,
            ):
                yield client

    return opened


inference_client: Callable[..., AbstractContextManager[Client]] = _opener(
    "inference", "Client", retry_wait_max_s=RETRY_WAIT_MAX_S
)
admin_client: Callable[..., AbstractContextManager[AdminClient]] = _opener(
    "admin", "AdminClient", timeout=UNARY_TIMEOUT_S
)
billing_client: Callable[..., AbstractContextManager[BillingClient]] = _opener(
    "admin", "BillingClient", timeout=UNARY_TIMEOUT_S
)
receipt_client: Callable[..., AbstractContextManager[ReceiptClient]] = _opener(
    "admin", "ReceiptClient"
)

Output = tuple[Any, ...]  # value for `--json`, tables for people, remarks as plain text
Opener = Callable[..., AbstractContextManager[Any]]


def calls(
    *openers: Opener,
    options: Mapping[str, tuple[Any, Any]] | None = None,
    shown: Table[Any] | None = None,
    **settings: Any,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a decorator that turns a function into a command and opens a client with each opener.

    The clients are the function's first arguments. It returns its output, or None if it has printed
    it; with `shown`, a row of this table or a list of rows. The command also takes `--json`,
    `--address` and `--api-key`; a function with a parameter `as_json`, `address` or `api_key` gets
    its value. `options` has annotations and defaults of options that the function takes as
    keyword-only or `**` parameters.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        clients = list(inspect.signature(function).parameters)[: len(openers)]
        for name in (*clients, "return"):
            del function.__annotations__[name]  # would load gRPC to show help
        own = inspect.signature(function, eval_str=True)
        shared = {
            "as_json": (JsonOption, False),
            "address": (AddressOption, None),
            "api_key": (KeyOption, None),
        }
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = {
            parameter.name: parameter
            for parameter in list(own.parameters.values())[len(openers) :]
            if parameter.kind is kind
        }
        for name, (annotation, default) in chain((options or {}).items(), shared.items()):
            parameters.setdefault(
                name, inspect.Parameter(name, kind, default=default, annotation=annotation)
            )

        def command(**given: Any) -> None:
            target = given["address"], given["api_key"]
            with ExitStack() as opened:
                clients = [opened.enter_context(each(*target, **settings)) for each in openers]
                own_values = (
                    (name, value)
                    for name, value in given.items()
                    if name in own.parameters or name not in shared
                )
                output = function(*clients, **dict(own_values))
                if shown is not None:
                    output = output, shown.of(output if isinstance(output, list) else [output])
                if output is not None:
                    print_found(*output, as_json=given["as_json"])

        command.__doc__ = function.__doc__
        command.__annotations__ = {
            name: parameter.annotation for name, parameter in parameters.items()
        }
        command.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=list(parameters.values())
        )
        return command

    return decorate


@contextmanager
def reported(address: str | None) -> Iterator[None]:
    """Report an error as one line on stderr and exit with code 1; with 130 for an interrupt."""
    try:
        yield
    except ConnectionProblem as problem:
        fail(str(problem))
    except WeirError as error:
        fail(explain(error, address or ""))
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(ExitCode.FAILED) from None


def env() -> None:
    """Let your programs find `weir up`: eval "$(weir env)".

    After this the SDKs, all commands and OpenAI's clients use that server, in any directory.
    """
    with reported(None):
        file = read_connection_file()
        if not file.address:
            raise ConnectionProblem(
                f"there is no {connection_path()}: start a server with `weir up`"
            )
        variables = {
            "WEIR_ADDRESS": file.address,
            "WEIR_API_KEY": file.api_key,
            "WEIR_ADMIN_KEY": file.admin_key,
        }
        if file.openai_url:  # for clients of OpenAI
            variables |= {"OPENAI_BASE_URL": file.openai_url, "OPENAI_API_KEY": file.api_key}
        for name, value in variables.items():
            if value:
                typer.echo(f"export {name}={shlex.quote(value)}")
