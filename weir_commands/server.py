"""Commands of `weir` that run a server or read its database. See `weir_cli.commands`."""

from __future__ import annotations

from collections.abc import Mapping

from weir_cli.commands import FINANCE, OPERATOR, Command

COMMANDS: Mapping[str, Command] = {
    "up": Command("api.cli.commands:up", "Run a complete Weir on this machine.", OPERATOR),
    "down": Command("api.cli.commands:down", "End the `weir up` of this machine.", OPERATOR),
    "status": Command(
        "api.cli.commands:status_of_server", "Show the health of this machine's server.", OPERATOR
    ),
    "logs": Command("api.cli.commands:logs", "Show the logs of `weir up`.", OPERATOR),
    "serve": Command("api.cli.commands:serve", "Start one API server.", OPERATOR),
    "worker": Command("api.cli.commands:worker", "Start one billing worker.", OPERATOR),
    "migrate": Command(
        "api.cli.commands:migrate", "Bring the database to this version's schema.", OPERATOR
    ),
    "init": Command(
        "api.cli.commands:init", "Create the first organization and admin key.", OPERATOR
    ),
    "console": Command(
        "api.cli.commands:console", "Print the address of the web console.", OPERATOR
    ),
    "doctor": Command(
        "api.cli.commands:doctor", "Find out what this machine's engines can do.", OPERATOR
    ),
    "fsck": Command("api.cli.commands:fsck", "Check that usage and money fit together.", OPERATOR),
    "reconcile": Command(
        "api.cli.commands:reconcile", "Compare usage, ledger, invoices and Stripe.", OPERATOR
    ),
    "key roles": Command("api.cli.commands:roles", "Show what each role may do.", OPERATOR),
    "retention": Command(
        "api.cli.commands:retention", "Remove details of old usage and audit entries.", OPERATOR
    ),
    "stripe": Command("api.cli.commands:stripe", "Let Stripe invoice your customers.", OPERATOR),
    "demo": Command(
        "api.cli.commands:demo", "Show the whole path of a request, and its bill.", OPERATOR
    ),
    "chaos": Command(
        "chaos.commands:chaos", "Kill processes under load; account for every token.", OPERATOR
    ),
    "receipt rotate": Command(
        "api.cli.commands:rotate_receipt_key", "Replace the signing key of receipts.", FINANCE
    ),
}
