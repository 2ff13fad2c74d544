"""Where the client commands connect, and with which key: decided here and nowhere else. And how their failures are told.

Flags win over the environment, the environment over `connection.json`, which `weir up` writes into `$WEIR_HOME` (`~/.weir`).
A key from the file is used only for the address in the file: it is never sent to another server.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from weir_client import AdminClient, BillingClient, Client, ReceiptClient

Role = Literal["inference", "admin"]
KEY_VARIABLES: Mapping[Role, tuple[str, ...]] = {
    "inference": ("WEIR_API_KEY",),
    "admin": ("WEIR_ADMIN_KEY", "WEIR_API_KEY"),
}
UNARY_TIMEOUT_S = 30.0  # of calls to admins' and finance's APIs
RETRY_WAIT_MAX_S = 1.0  # a person at a terminal is told to wait rather than left waiting

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Server to connect to: host:port, https://host:port or unix:/path. Else $WEIR_ADDRESS, else what `weir up` started.",
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key", help="API key. Else $WEIR_API_KEY (admin commands: $WEIR_ADMIN_KEY first).", show_default=False),
]


@dataclass(frozen=True, slots=True)
class ConnectionFile:
    """What `weir up` left behind for the other commands. Empty where it did not run."""

    address: str = ""
    api_key: str = ""
    admin_key: str = ""
    organization: str = ""
    project: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the key to use there."""

    address: str
    api_key: str


class ConnectionProblem(Exception):
    """No connection can be tried. The message says what to do."""


def connection_path() -> Path:
    """The file that `weir up` writes."""
    return Path(os.environ.get("WEIR_HOME") or Path.home() / ".weir") / "connection.json"


def read_connection_file() -> ConnectionFile:
    """What the file says; all empty if there is none. Raises: ConnectionProblem if it cannot be understood."""
    path = connection_path()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ConnectionFile()
    except (OSError, ValueError) as error:
        raise ConnectionProblem(f"{path} cannot be read ({error}): remove it, or run `weir up` again") from error
    if not isinstance(document, dict):
        raise ConnectionProblem(f"{path} is not a JSON object: remove it, or run `weir up` again")
    known = {field.name for field in fields(ConnectionFile)}
    return ConnectionFile(**{name: str(value) for name, value in document.items() if name in known and value})


def resolve(role: Role, address: str | None, api_key: str | None) -> Target:
    """Where to connect and with which key. Raises: ConnectionProblem if there is no key to be found."""
    file = read_connection_file()
    chosen = address or os.environ.get("WEIR_ADDRESS") or file.address
    if not chosen:
        from weir_client import DEFAULT_ADDRESS

        chosen = DEFAULT_ADDRESS
    if api_key is None:
        api_key = next((os.environ[name] for name in KEY_VARIABLES[role] if os.environ.get(name)), None)
    if api_key is None and chosen == file.address:
        api_key = (file.admin_key if role == "admin" else "") or file.api_key or None
    if api_key is None:
        variable = KEY_VARIABLES[role][0]
        raise ConnectionProblem(f"no API key for {chosen}: pass --api-key, set {variable}, or start a server with `weir up`")
    return Target(chosen, api_key)


def organization_or_default(organization: str | None, address: str) -> str:
    """The organization asked for, or the one that `weir up` made on that server. Raises: typer.BadParameter if there is neither."""
    return _or_default(organization, "organization", "--org", address)


def project_or_default(project: str | None, address: str) -> str:
    """The project asked for, or the one that `weir up` made on that server. Raises: typer.BadParameter if there is neither."""
    return _or_default(project, "project", "--project", address)


def _or_default(given: str | None, field: Literal["organization", "project"], flag: str, address: str) -> str:
    file = read_connection_file()
    chosen = given or (getattr(file, field) if file.address == address else "")
    if not chosen:
        raise typer.BadParameter(f"say which {field}", param_hint=flag)
    return str(chosen)


@contextmanager
def inference_client(address: str | None, api_key: str | None) -> Iterator[Client]:
    """A client for the inference API. Leaves the program with a clear line and exit code 1 if something fails."""
    with reported(address):
        target = resolve("inference", address, api_key)
        from weir_client import Client

        with (
            reported(target.address),
            Client(target.address, target.api_key, retry_wait_max_s=RETRY_WAIT_MAX_S) as client,
        ):
            yield client


@contextmanager
def admin_client(address: str | None, api_key: str | None, *, timeout: float = UNARY_TIMEOUT_S) -> Iterator[AdminClient]:
    """A client for the admin API; fails like `inference_client`. timeout: seconds for each call."""
    with reported(address):
        target = resolve("admin", address, api_key)
        from weir_client import AdminClient

        with reported(target.address), AdminClient(target.address, target.api_key, timeout=timeout) as client:
            yield client


@contextmanager
def billing_client(address: str | None, api_key: str | None, *, timeout: float = UNARY_TIMEOUT_S) -> Iterator[BillingClient]:
    """A client for the billing API; fails like `inference_client`. timeout: seconds for each call."""
    with reported(address):
        target = resolve("admin", address, api_key)
        from weir_client import BillingClient

        with reported(target.address), BillingClient(target.address, target.api_key, timeout=timeout) as client:
            yield client


@contextmanager
def receipt_client(address: str | None, api_key: str | None) -> Iterator[ReceiptClient]:
    """A client for the receipt API; fails like `inference_client`."""
    with reported(address):
        target = resolve("admin", address, api_key)
        from weir_client import ReceiptClient

        with reported(target.address), ReceiptClient(target.address, target.api_key) as client:
            yield client


@contextmanager
def reported(address: str | None) -> Iterator[None]:
    """Turns what the SDK raises into one line on stderr and exit code 1, an interrupt into exit code 130."""
    from weir_client import WeirError

    from api.cli.failures import explain

    try:
        yield
    except ConnectionProblem as problem:
        fail(str(problem))
    except WeirError as error:
        fail(explain(error, address or ""))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the reader of our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None


def fail(message: str, status: int = 1) -> NoReturn:
    """One line on stderr, then the exit code: 2 where the command line or a file of the user is what is wrong."""
    typer.secho(f"error: {message}", fg="red", err=True)
    raise typer.Exit(status) from None
