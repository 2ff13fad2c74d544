"""Commands of `weir` that run a server or read its database: names, options and texts.

A command imports its implementation when it runs, so that help and completion do without the
server's packages.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from weir_cli.commands import ExitCode
from weir_cli.render import JsonOption, fail, note, print_json, show, table, wrong_use
from weir_cli.texts import parse_time

if TYPE_CHECKING:
    from inference.adapters.tensorrt_settings import TensorRtSettings
    from inference.doctor.findings import Observation

ListenOption = Annotated[
    str,
    typer.Option(
        "--listen", help="Address and port to listen on. Port 0: any free one.", show_default=False
    ),
]
HomeOption = Annotated[
    Path | None, typer.Option("--home", help="Where your data is. [default: WEIR_HOME or ~/.weir]")
]

GRANT_HELP = (
    "Database role of api processes and workers. It gets the privileges that they need, and loses"
    " all others. Set WEIR_APPLICATION_PASSWORD to create it if it is missing."
)


def up(
    listen: ListenOption = "",
    home: HomeOption = None,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Run in the background once it serves; `weir down` ends it."),
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            max=64,
            help="API processes that share the port and the engines. Unset: one less than the"
            " cores, at most 4.",
        ),
    ] = None,
) -> None:
    """Run a complete Weir on this machine: database, API server, model and billing worker.

    Ctrl-C stops everything. Your data stays in the home directory. If you have a PostgreSQL or a
    Redis already, name it in WEIR_DATABASE_URL or WEIR_BROKER_URL.
    """
    from api.cli.guard import AlreadyRunning, Guard, Role

    if detach:
        from api.cli import local

        local.detach(home_of(home))
        return
    role = Role.taken()
    if role is None or role.guard_fd < 0:
        try:
            raise typer.Exit(Guard(home_of(home), role, _end_left).run())
        except (AlreadyRunning, OSError) as error:
            fail(str(error))
    import asyncio

    from api.cli.stack import clear_failures, run_until_stopped

    with clear_failures():
        asyncio.run(run_until_stopped(listen, home, role, processes))


def _end_left(home: Path) -> None:
    from api.cli.stack import end_left

    end_left(home)


def home_of(home: Path | None) -> Path:
    """Return the home directory: the given one, or that of the environment."""
    return (home or Path(os.environ.get("WEIR_HOME") or "~/.weir")).expanduser().absolute()


def down(home: HomeOption = None) -> None:
    """End the `weir up` of this machine, and wait until it has ended. Running requests finish.

    Its data stays in the home directory. Idempotent.
    """
    from api.cli import local

    local.end(home_of(home))


def status_of_server(as_json: JsonOption = False, home: HomeOption = None) -> None:
    """Show the health of this machine's server: version, address, database, billing worker, models.

    Exit code 1 if it does not run or takes no requests.
    """
    from api.cli import local

    if not local.print_status(home_of(home), as_json=as_json):
        raise typer.Exit(ExitCode.FAILED)


def logs(
    part: Annotated[
        list[str] | None,
        typer.Argument(help="Only of these parts: up, api, worker, webhooks, postgres."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")
    ] = False,
    count: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=10_000, help="Last lines of each log.")
    ] = 20,
    home: HomeOption = None,
) -> None:
    """Show the logs of this machine's server, the latest lines of each part."""
    from api.cli import local

    if wrong := [each for each in part or () if each not in local.LOGS]:
        raise typer.BadParameter(
            f"{wrong[0]!r} is not one of {', '.join(local.LOGS)}", param_hint="PART"
        )
    try:
        local.print_logs(home_of(home), part or (), count=count, follow=follow)
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def serve(listen: ListenOption = "", home: HomeOption = None) -> None:
    """Run one API server on the database of WEIR_DATABASE_URL, until SIGTERM or Ctrl-C.

    Run `weir migrate` first. If one machine is enough, use `weir up`, which starts all you need.
    """
    from api.__main__ import main
    from api.cli.stack import clear_failures, read_settings
    from metering.store.migrations_runner import is_current

    settings = read_settings(home, listen)
    if not settings.database.url:
        wrong_use(
            "WEIR_DATABASE_URL is not set: set it to a PostgreSQL database, or start everything on"
            " this machine with `weir up`"
        )
    with clear_failures():
        if not is_current(settings.database.url):
            fail("the database schema does not match this version: run `weir migrate` first")
        main({**os.environ, **settings.to_environment()})


def worker(home: HomeOption = None) -> None:
    """Run one billing worker on the database of WEIR_DATABASE_URL, until SIGTERM or Ctrl-C.

    It rates usage, expires holds and exports. Run as many as you like, on any machines; give them
    one WEIR_BROKER_URL (Redis) to share their messages. `weir up` has one already.
    """
    from api.cli.stack import read_settings
    from metering.worker import worker_command

    settings = read_settings(home)
    if not settings.database.url:
        wrong_use("WEIR_DATABASE_URL is not set: set it to the worker's database")
    command = worker_command()
    os.execve(command[0], command, {**os.environ, **settings.to_environment()})


def migrate(
    revision: Annotated[str, typer.Argument(help="Revision to migrate to.")] = "head",
    home: HomeOption = None,
    grant: Annotated[str, typer.Option(metavar="ROLE", help=GRANT_HELP, show_default=False)] = "",
) -> None:
    """Bring the database of WEIR_DATABASE_URL, or the embedded one, to this version's schema."""
    from api.cli.stack import clear_failures, read_settings
    from metering.store import embedded_postgres
    from metering.store.migrations_runner import (
        PASSWORD_VARIABLE,
        RoleUnfit,
        prepare_application_role,
    )
    from metering.store.migrations_runner import migrate as migrate_database

    settings = read_settings(home)
    if grant and not settings.database.url:
        wrong_use(
            "--grant needs a separate PostgreSQL: set WEIR_DATABASE_URL; the embedded one has a"
            " single user"
        )
    if grant and revision != "head":
        wrong_use(
            f"--grant {grant} needs the newest schema, revision `head`, got {revision!r}: omit the"
            " revision"
        )
    with clear_failures():
        if settings.database.url:
            migrate_database(settings.database.url, revision)
            if grant:
                try:
                    prepare_application_role(
                        settings.database.url, grant, os.environ.get(PASSWORD_VARIABLE, "")
                    )
                except RoleUnfit as error:
                    fail(str(error))
        else:
            server = embedded_postgres.start(settings.home / "postgres")
            try:
                migrate_database(server.url, revision)
            finally:
                server.stop()
    note("the database has the schema of this version")
    if grant:
        note(f"role {grant} has the privileges of api processes and workers, and no others")


def init(
    organization: Annotated[str, typer.Option(help="Name of the first organization.")] = "main",
    project: Annotated[str, typer.Option(help="Name of its first project.")] = "default",
    json_output: JsonOption = False,
) -> None:
    """Create your first organization, project and admin key, and prices for the models.

    You see the secret of the key once. Run it again, and you get one more admin key; nothing else
    changes. It creates the signing key of receipts on this machine too, unless it exists or
    WEIR_RECEIPT_KEY_FILE is `off`.
    """
    import asyncio

    from api.cli.stack import clear_failures, create_admin, ensure_receipt_key, read_settings
    from api.fleet.fleet_file import model_names
    from metering.store.migrations_runner import is_current

    settings = read_settings()
    if not settings.database.url:
        wrong_use("WEIR_DATABASE_URL is not set: set it to the database of the installation")
    with clear_failures():
        if not is_current(settings.database.url):
            fail("the database schema does not match this version: run `weir migrate` first")
        receipt_key = ensure_receipt_key(settings)
        secret = asyncio.run(
            create_admin(settings.database.url, organization, project, *model_names(settings))
        )
    if json_output:
        print_json({"organization": organization, "project": project, "admin_key": secret})
        return
    typer.echo(secret)
    note("This admin key is shown only once. Store it as WEIR_ADMIN_KEY where you run `weir`.")
    if receipt_key is not None:
        note(f"Receipts will be signed with {receipt_key}: copy it to the other servers.")


def rotate_receipt_key() -> None:
    """Replace the key that signs receipts on this machine, and delete the old one.

    Servers use the new key after a restart. Receipts of the old key stay valid, because its public
    key is kept.
    """
    from api.cli.stack import read_settings
    from metering.receipts.signing import key_path, replace_key

    path = key_path(read_settings().to_environment())
    if path is None:
        wrong_use("WEIR_RECEIPT_KEY_FILE is off: set it to a file to sign receipts")
    try:
        signer = replace_key(path)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}")
    typer.echo(signer.key_id)
    note(f"{path} has the new key: copy it to the other servers, and restart all")


def console(
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open it in your browser, signed in as the operator.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Print the address of the console, where you see your Weir in a browser.

    `weir person sign-in operator@localhost` prints a link that signs you in there.
    """
    import webbrowser

    from api.cli.stack import operator_link, read_settings
    from api.core.endpoint import read_endpoint

    settings = read_settings(home)
    endpoint = read_endpoint(settings.home)
    if not endpoint.serving:
        fail(f"no server is running in {settings.home}: start one with `weir up`")
    if not endpoint.console_url:
        fail(
            "the server has no console: it was started with WEIR_CONSOLE=0 or"
            " WEIR_OPENAI_LISTEN=off"
        )
    typer.echo(endpoint.console_url)
    if not open_browser:
        return
    if not webbrowser.open(operator_link(settings.home) or endpoint.console_url):
        note("no browser could be opened: open the URL yourself")


def fsck(
    check: Annotated[
        list[str] | None, typer.Option("--check", help="Run this check only; repeat for more.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Check only rows written since then: 24h, 7d, or a time in UTC."),
    ] = None,
    at_rest: Annotated[
        bool,
        typer.Option(
            "--at-rest", help="Check that no work is left over too. Stop the system first."
        ),
    ] = False,
    sample: Annotated[
        int,
        typer.Option(
            "--sample", min=1, max=10_000, help="How many violations to show of each check."
        ),
    ] = 10,
    list_checks: Annotated[
        bool, typer.Option("--list", help="List the checks with their invariants, and run none.")
    ] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Check that all usage and money in the database fit together. Changes nothing.

    It looks at one snapshot, so you need not stop anything. Exits with 1 if a check fails.
    """
    from api.cli.fsck import print_checks, prove

    if list_checks:
        print_checks(as_json)
        return
    begins = parse_time(since, datetime.now(UTC), "--since")
    prove(check or [], begins, at_rest=at_rest, sample_max=sample, as_json=as_json, home=home)


def reconcile(
    month: Annotated[str, typer.Argument(help="Month in UTC, such as 2026-11.")],
    organization: Annotated[
        str | None,
        typer.Option("--organization", "--org", help="Only this organization, by name or id."),
    ] = None,
    against_stripe: Annotated[
        bool,
        typer.Option(
            "--against-stripe", help="Ask Stripe for its counts, with one call per meter."
        ),
    ] = False,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the differences as CSV.")] = False,
    home: HomeOption = None,
) -> None:
    """Compare a month: used, posted, invoiced, exported, and counted by the biller.

    It changes nothing, and exits with 1 if anything differs. With WEIR_EXPORT=file, the biller's
    counts are those of the file.
    """
    from api.cli.stripe import compare

    if as_json and as_csv:
        raise typer.BadParameter("give --json or --csv, not both", param_hint="--csv")
    balanced = compare(
        home, month, organization, against_stripe=against_stripe, as_json=as_json, as_csv=as_csv
    )
    if not balanced:
        raise typer.Exit(ExitCode.FAILED)


def roles(as_json: JsonOption = False) -> None:
    """Show the permissions of each role, and with --json the calls that need them."""
    from api.cli.roles import print_roles

    print_roles(as_json=as_json)


retention = typer.Typer(
    help="Keep details of usage and audit entries for a limited time.", no_args_is_help=True
)


@retention.command("show")
def show_retention(as_json: JsonOption = False, home: HomeOption = None) -> None:
    """Show for each month whether its details are kept, due or removed, and each obstacle."""
    from api.cli.retention import print_retention

    print_retention(home, as_json=as_json)


@retention.command("apply")
def apply(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what is due, and remove nothing.")
    ] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Remove the details of usage, and the audit entries, that are older than you keep them.

    WEIR_USAGE_RETENTION_MONTHS and WEIR_AUDIT_RETENTION_MONTHS say for how long; without them,
    everything is kept. Billing workers do the same every hour. Sums by day, invoices, statements
    and the ledger stay. It exits with 1 if a month is due and cannot be removed yet.
    """
    from api.cli.retention import print_retention, remove

    if dry_run:
        print_retention(home, as_json=as_json)
    else:
        remove(home, as_json=as_json)


stripe = typer.Typer(
    help="Let Stripe invoice your customers: sync, status, resend.", no_args_is_help=True
)
BatchArgument = Annotated[
    uuid.UUID,
    typer.Argument(help="Id of the batch, as shown by `weir stripe status`.", metavar="BATCH"),
]


@stripe.command("sync")
def sync(
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what it would create and change, but do nothing."),
    ] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Bring customers, products, meters, prices and subscriptions at Stripe up to date.

    Run it whenever you have changed customers, prices or billing profiles. If a billing profile
    lacks something that Stripe needs, it sends nothing and exits with 1.
    """
    from api.cli.stripe import synchronize

    synchronize(home, dry_run=dry_run, as_json=as_json)


@stripe.command("status")
def status(as_json: JsonOption = False, home: HomeOption = None) -> None:
    """Show how far the export is, unpaid invoices, and problems that need you."""
    from api.cli.stack import run
    from api.cli.stripe import print_status
    from metering.export.stripe_sync import export_status

    found = run(home, export_status)
    if as_json:
        print_json(found)
    else:
        print_status(found)


@stripe.command("portal")
def portal(
    organization: Annotated[
        str, typer.Argument(help="Organization, by name or id.", metavar="ORG")
    ],
    home: HomeOption = None,
) -> None:
    """Print the address of a page where the customer enters a payment method, good for minutes."""
    from api.cli.stack import run
    from api.cli.stripe import gateway
    from metering.export.stripe_sync import payment_method_page

    typer.echo(run(home, lambda sessions: payment_method_page(sessions, gateway(), organization)))


@stripe.command("resend")
def resend_batch(batch: BatchArgument, home: HomeOption = None) -> None:
    """Send a batch again: one that Stripe rejected, or one delivered in the last 24 hours.

    A delivered batch is cancelled at Stripe first.
    """
    from api.cli.stack import run
    from api.cli.stripe import gateway
    from metering.export.stripe_sync import resend

    run(home, lambda sessions: resend(sessions, gateway(), batch))
    note(f"{batch} is cancelled; its tokens are queued as a new part")


@stripe.command("settle")
def settle_batch(
    batch: BatchArgument,
    counted: Annotated[
        bool, typer.Option("--counted/--not-counted", help="Stripe has counted it, or has not.")
    ],
    home: HomeOption = None,
) -> None:
    """Say whether Stripe has counted a parked batch. Look there first.

    `weir reconcile MONTH --against-stripe` shows the sums.
    """
    from api.cli.stack import run
    from metering.export.stripe_sync import settle

    run(home, lambda sessions: settle(sessions, batch, counted=counted))
    note(f"{batch} is resolved")


@stripe.command("webhooks")
def webhooks(home: HomeOption = None) -> None:
    """Receive Stripe's events on WEIR_STRIPE_WEBHOOK_LISTEN behind a TLS proxy, until stopped."""
    from api.cli.stack import clear_failures, run
    from metering.export.export_settings import webhook_settings
    from metering.export.stripe_inbox import serve_webhooks

    with clear_failures():
        settings = webhook_settings(os.environ)
    if settings is None:
        wrong_use(
            "WEIR_STRIPE_WEBHOOK_SECRET is not set: set it to the signing secret of the webhook"
            " endpoint (whsec_…)"
        )
    run(
        home,
        lambda sessions: serve_webhooks(
            sessions, settings, lambda at: note(f"receiving Stripe's events at {at}")
        ),
    )


doctor = typer.Typer(help="Find out what this machine's engines can do.", no_args_is_help=True)


@doctor.command("engine")
def embedded(
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Checkpoint in Hugging Face layout. [default: the demo model]",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find out how fast the embedded engine is here. Takes all CPUs for some seconds.

    It uses the types of WEIR_ENGINE_DTYPE and WEIR_ENGINE_KV_DTYPE, and as many threads as
    WEIR_ENGINE_THREADS.
    """
    # Read when torch is loaded; as in the engine's worker, threads without work sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from api.cli.stack import clear_failures
    from api.core.settings import DEMO_MODEL_NAME, Settings, bundled_models
    from api.fleet.fleet import compute_dtype
    from common.cpus import UsableCpus, usable_cpus
    from inference.doctor.embedded import examine

    with clear_failures():
        settings = Settings.from_environment()
        directory = model or bundled_models()[DEMO_MODEL_NAME]
        cpus = usable_cpus()
        if settings.engine.thread_count:
            cpus = UsableCpus(settings.engine.thread_count, "WEIR_ENGINE_THREADS")
        dtype = compute_dtype(settings, directory)
        found = examine(directory, dtype, settings.engine.kv_dtype, cpus)
    title = f"embedded engine, {directory.name}, {dtype}"
    report(title, found, {}, {str(directory): "[model]"}, as_json)


def examined_settings(
    model: Path,
    config: Path | None,
    tensor_parallel: int | None,
    batch: int,
    window: int,
    lora: Sequence[Path],
) -> TensorRtSettings:
    """Build the settings of `weir doctor tensorrt`; end the command if its file is invalid."""
    import yaml
    from weir_cli.yaml_files import NotYaml, compose
    from yaml.constructor import SafeConstructor

    from api.core.settings import Settings
    from api.fleet.fleet import tensorrt_settings
    from inference.adapters.tensorrt_adapters import read_adapter
    from inference.adapters.tensorrt_settings import with_config

    settings = replace(
        tensorrt_settings(Settings.from_environment(), model.name, model),
        context_window_tokens_max=window,
        step_token_count_max=2048,  # a prompt takes several steps, so that it can be aborted
        running_sequence_count_max=batch,
        adapters=tuple(read_adapter(str(n), each) for n, each in enumerate(lora, 1)),
    )
    if tensor_parallel is not None:
        options = replace(settings.options, tensor_parallel_size=tensor_parallel)
        settings = replace(settings, options=options)
    if config is None:
        return settings
    try:
        root = compose(config.read_text())
        values = None if root is None else SafeConstructor().construct_document(root)
        return with_config(settings, values or {})
    except NotYaml as error:
        wrong_use(f"--config {config}: line {error.line}: {error}")
    except (ValueError, yaml.YAMLError) as error:
        wrong_use(f"--config {config}: {error}")


@doctor.command()
def tensorrt(
    model: Annotated[
        Path,
        typer.Option(
            "--model", help="Checkpoint in Hugging Face layout.", exists=True, file_okay=False
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", help="File for `trtllm-serve --config`.", exists=True, dir_okay=False
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option("--tensor-parallel", min=1, help="Spread the model over this many GPUs."),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="How many sequences run at once.")
    ] = 16,
    window: Annotated[
        int, typer.Option("--window", min=512, help="Context window, in tokens.")
    ] = 8192,
    lora: Annotated[
        list[Path] | None,
        typer.Option(
            "--lora",
            help="LoRA adapter to try; repeat for more.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find out whether TensorRT-LLM works here. Takes the GPUs for some minutes.

    It loads the model twice, with the settings of WEIR_TENSORRT_*, and exits with 1 if Weir's
    engine would not work. You can send the report of `--json` to others: it has no secrets, paths
    or addresses.
    """
    import asyncio
    from dataclasses import asdict

    from api.cli.stack import clear_failures
    from common.gpus import visible_gpus
    from inference.adapters.tensorrt_engine import load_message
    from inference.adapters.tensorrt_settings import VERSION
    from inference.doctor.findings import checkpoint_facts
    from inference.doctor.tensorrt import examine

    with clear_failures():
        settings = examined_settings(model, config, tensor_parallel, batch, window, lora or ())
        info, load = load_message(settings)
        found = asyncio.run(examine(settings, visible_gpus()))
    facts = checkpoint_facts(info) | {
        "tensorrt_llm_version": VERSION,  # no other one loads
        "limits": asdict(load.limits),
        "options": asdict(settings.options),
    }
    words = {str(model.resolve()): "[model]", str(model): "[model]"}
    words |= {each.directory: "[adapter]" for each in settings.adapters}
    report("TensorRT-LLM on this machine", found, facts, words, as_json)


@doctor.command()
def remote(
    target: Annotated[str, typer.Argument(help="Address, as in WEIR_REMOTE_TARGETS.")],
    model: Annotated[
        Path,
        typer.Option("--model", help="Directory with its tokenizer.", exists=True, file_okay=False),
    ],
    share_prefixes: Annotated[
        bool, typer.Option("--share-prefixes", help="Allow tenants to share cached prefixes.")
    ] = False,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="File with the server's key, in one line.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find out whether Weir can use a server of TensorRT-LLM, vLLM or SGLang.

    It uses the certificates of WEIR_REMOTE_TLS_*, and sends the key in the header of
    WEIR_REMOTE_KEY_HEADER. It exits with 1 if Weir could not use the server. You can send the
    report of `--json` to others: it has no secrets, paths or addresses.
    """
    import asyncio

    from api.cli.stack import clear_failures
    from api.core.settings import Settings
    from api.fleet.fleet import remote_settings
    from api.fleet.fleet_file import FleetTarget
    from inference.doctor.remote import examine

    with clear_failures():
        settings = replace(
            remote_settings(
                Settings.from_environment(), "doctor", FleetTarget(target, key_file=key_file), model
            ),
            share_prefixes=share_prefixes,
        )
        found = asyncio.run(examine(settings))
    service = settings.target.service.value
    address = settings.target.address
    words = {target: "[server]", address: "[server]", address.rpartition(":")[0]: "[server]"}
    words |= {str(model.resolve()): "[model]", str(model): "[model]"}
    facts = {"service": service, "share_prefixes": share_prefixes}
    report(f"{target}, as Weir sees it", found, facts, words, as_json)


def report(
    title: str,
    found: Sequence[Observation],
    facts: Mapping[str, object],
    words: Mapping[str, str],
    as_json: bool,
) -> NoReturn:
    """Print the observations and exit, with code 1 if any is bad.

    `facts` and `words` are for the report as JSON; see `report_of` and `Scrubber`.
    """
    from common.scrubbing import Scrubber
    from inference.doctor.findings import Verdict, report_of

    if as_json:
        print_json(report_of(title, found, facts, Scrubber(words)))
    else:
        rows = ((each.question, each.verdict.value, each.seen) for each in found)
        show(table("question", "verdict", "seen", title=title, rows=rows))
    raise typer.Exit(
        ExitCode.FAILED if any(each.verdict is Verdict.BAD for each in found) else ExitCode.DONE
    )


def demo(
    agents: Annotated[
        int, typer.Option("--agents", min=1, max=64, help="How many agents work at once.")
    ] = 50,
) -> None:
    """See all of Weir at once: an answer, agents at work, and the bill of the month.

    It starts everything in a temporary directory on a free port, and removes it at the end.
    """
    from api.cli.demo import run

    run(agents)
