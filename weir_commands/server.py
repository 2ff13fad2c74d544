"""The commands of `weir` that run a server or look into its database. See `weir_cli.commands`."""

from __future__ import annotations

from collections.abc import Mapping

from weir_cli.commands import FINANCE, OPERATOR, Command

COMMANDS: Mapping[str, Command] = {
    "up": Command("api.cli.stack:up", "Start everything on this machine.", OPERATOR),
    "serve": Command("api.cli.stack:serve", "Start one API server.", OPERATOR),
    "worker": Command("api.cli.stack:worker", "Start one billing worker.", OPERATOR),
    "migrate": Command("api.cli.stack:migrate", "Bring the database to the current schema.", OPERATOR),
    "init": Command("api.cli.stack:init", "Create the first organization and admin key.", OPERATOR),
    "console": Command("api.cli.stack:console", "Tell where the web console is; open it.", OPERATOR),
    "doctor": Command("api.cli.stack:doctor", "Examine the engines of this machine.", OPERATOR),
    "fsck": Command("api.cli.fsck:fsck", "Prove that the books are right.", OPERATOR),
    "reconcile": Command("api.cli.stripe:reconcile", "Compare a month from usage to the biller's invoice.", OPERATOR),
    "stripe": Command("api.cli.stripe:stripe", "Bill with Stripe: sync, status, resend.", OPERATOR),
    "demo": Command("api.cli.demo:demo", "Show the whole path of a request, live.", OPERATOR),
    "chaos": Command("api.chaos.rounds:chaos", "Kill processes under load; account for every token.", OPERATOR),
    "receipt rotate": Command("api.cli.stack:rotate_receipt_key", "Make a new key that signs receipts.", FINANCE),
}
