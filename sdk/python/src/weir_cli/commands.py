"""Table of all commands: those of this package, and those added by other distributions.

A distribution adds commands with a module in the namespace package `weir_commands`, whose
`COMMANDS` is such a table. Only tables are imported, so that help and completion are fast. To add a
command, add a line to a table.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module

DEVELOPER, ADMIN, FINANCE, OPERATOR = PERSONAS = ("developer", "admin", "finance", "operator")
PLUGINS = "weir_commands"
WIDE = ContextVar("wide", default=False)  # `--wide`: no column of a table is left out


class ExitCode(IntEnum):
    """Exit code of every command. Scripts rely on the values."""

    DONE = 0
    FAILED = 1
    WRONG_USE = 2
    NOT_ALL_DONE = 3
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """Command in a table: its target (`module:name`) and the line that help shows."""

    target: str
    help: str
    persona: str


CLIENT_COMMANDS: Mapping[str, Command] = {
    "generate": Command(
        "weir_cli.generate:generate", "Stream a model's answer to the terminal.", DEVELOPER
    ),
    "embed": Command("weir_cli.generate:embed", "Turn texts into vectors.", DEVELOPER),
    "models": Command("weir_cli.generate:models", "List the models and their prices.", DEVELOPER),
    "count": Command("weir_cli.generate:count", "Count the tokens of a prompt.", DEVELOPER),
    "quote": Command(
        "weir_cli.generate:quote", "Show the cost of a request, and whether it fits.", DEVELOPER
    ),
    "usage": Command(
        "weir_cli.usage:usage", "Show usage and cost of your key, by day or model.", DEVELOPER
    ),
    "trace": Command(
        "weir_cli.requests:trace", "Show where the time of a request went.", DEVELOPER
    ),
    "env": Command("weir_cli.connection:env", "Let your programs find `weir up`.", DEVELOPER),
    "org": Command("weir_cli.exports:org", "Create, list and export organizations.", ADMIN),
    "project": Command("weir_cli.tenants:project", "Create and list projects.", ADMIN),
    "key": Command(
        "weir_cli.tenants:key", "Create, rotate, change, revoke and list API keys.", ADMIN
    ),
    "member": Command("weir_cli.members:member", "Invite, change and remove members.", ADMIN),
    "service-account": Command(
        "weir_cli.members:service_account", "Manage programs that own keys.", ADMIN
    ),
    "person": Command("weir_cli.members:person", "See and deactivate persons.", ADMIN),
    "token-issuer": Command(
        "weir_cli.token_issuers:token_issuers", "Trust tokens of an identity provider.", ADMIN
    ),
    "quota": Command("weir_cli.tenants:quota", "Set, show and remove limits.", ADMIN),
    "end-user": Command(
        "weir_cli.tenants:end_users", "Show and erase your customers' own users.", ADMIN
    ),
    "requests": Command("weir_cli.requests:requests", "Show and end running requests.", ADMIN),
    "replicas": Command(
        "weir_cli.requests:replicas", "Show the engines of each model; drain one.", ADMIN
    ),
    "fleet": Command(
        "weir_cli.fleet:fleet", "Change models, versions and weights while they run.", ADMIN
    ),
    "apply": Command(
        "weir_cli.configuration:apply", "Make customers, keys and limits as a file says.", ADMIN
    ),
    "export": Command(
        "weir_cli.configuration:export", "Write the current state as such a file.", ADMIN
    ),
    "audit": Command("weir_cli.audit:audit", "See who changed what, and when.", ADMIN),
    "audit-export": Command(
        "weir_cli.audit_export:export", "Write the audit log for another system.", ADMIN
    ),
    "price": Command("weir_cli.plans:price", "Set and list prices, and try new ones.", FINANCE),
    "plan": Command("weir_cli.plans:plan", "Create and assign plans.", FINANCE),
    "credit": Command("weir_cli.plans:credit", "Grant credit, and show balances.", FINANCE),
    "resale": Command(
        "weir_cli.resale:resale", "Charge your own users: prices and statements.", FINANCE
    ),
    "alerts": Command(
        "weir_cli.alerts:alerts", "Read alerts, or have them sent to a URL.", FINANCE
    ),
    "month": Command(
        "weir_cli.months:month", "See what a month costs; close and verify it.", FINANCE
    ),
    "adjustment": Command(
        "weir_cli.months:adjustment", "Correct a bill by a line on the next invoice.", FINANCE
    ),
    "credit-note": Command(
        "weir_cli.months:credit_note", "Refund an invoice or a part of it.", FINANCE
    ),
    "receipt": Command(
        "weir_cli.receipts:receipt", "Export signed receipts, and verify them.", FINANCE
    ),
}


def all_commands() -> dict[str, Command]:
    """Collect all installed commands by name. `receipt rotate` belongs to the group `receipt`."""
    found = dict(CLIENT_COMMANDS)
    try:
        plugins = import_module(PLUGINS)
    except ModuleNotFoundError:  # only the client is installed
        return found
    for module in pkgutil.iter_modules(plugins.__path__):
        found |= import_module(f"{PLUGINS}.{module.name}").COMMANDS
    return found
