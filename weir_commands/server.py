"""Commands of `weir` that run a server or read its database. See `weir_cli.commands`."""

from __future__ import annotations

from collections.abc import Mapping

from weir_cli.commands import FINANCE, OPERATOR, Command

COMMANDS: Mapping[str, Command] = {
    "up": Command("api.cli.stack:up", "Start everything on this machine.", OPERATOR),
    "serve": Command("api.cli.stack:serve", "Start one API server.", OPERATOR),
    "worker": Command("api.cli.stack:worker", "Start one billing worker.", OPERATOR),
    "migrate": Command("api.cli.stack:migrate", "Migrate the database to the current schema.", OPERATOR),
    "init": Command("api.cli.stack:init", "Create the first organization and admin key.", OPERATOR),
    "console": Command("api.cli.stack:console", "Print the URL of the web console; open it.", OPERATOR),
    "doctor": Command("api.cli.stack:doctor", "Examine the engines of this machine.", OPERATOR),
    "fsck": Command("api.cli.fsck:fsck", "Prove the invariants of the ledger.", OPERATOR),
    "reconcile": Command("api.cli.stripe:reconcile", "Compare a month's usage, ledger and invoices.", OPERATOR),
    "stripe": Command("api.cli.stripe:stripe", "Bill with Stripe: sync, status, resend.", OPERATOR),
    "demo": Command("api.cli.demo:demo", "Demonstrate the whole path of a request.", OPERATOR),
    "chaos": Command("api.chaos.rounds:chaos", "Kill processes under load; account for every token.", OPERATOR),
    "receipt rotate": Command("api.cli.stack:rotate_receipt_key", "Replace the signing key of receipts.", FINANCE),
}
