"""`weir requests`, `weir trace` and `weir replicas`: live requests and engines."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from weir_client import (
    GenerationState,
    KillResult,
    NotFound,
    PermissionDenied,
    RequestPhase,
)

from weir_cli.commands import ExitCode
from weir_cli.connection import (
    AddressOption,
    ConnectionProblem,
    KeyOption,
    OnlyOrganizationOption,
    Output,
    admin_client,
    calls,
    inference_client,
    resolve,
)
from weir_cli.render import JsonOption, Table, make_console, print_found, table
from weir_cli.texts import (
    counted,
    duration_text,
    hold_end_text,
    printable,
    time_text,
    usage_line,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from weir_client import (
        AdminClient,
        Generation,
        KilledRequest,
        LiveRequest,
        LiveView,
        RecordedRequest,
        Replica,
        ReplicaDrain,
    )

PHASE_WORDS = {RequestPhase.UNSPECIFIED: "?"}

requests = typer.Typer(help="Show and end running requests.", invoke_without_command=True)

WITHOUT_TIMINGS = {
    GenerationState.RUNNING: "Still running: try again after it has ended.",
    GenerationState.VOIDED: "No timings: it ended before any billable work.",
    GenerationState.EXPIRED: "No timings: it was recovered after the loss of its server.",
}

BROKEN = "No timings: it failed, or was recovered after the loss of its server."


REPLICAS: Table[Replica] = Table(
    {
        "model": "model",
        "replica": "replica",
        "region": lambda each: each.region or None,
        "state": lambda each: (
            f"{each.state.value}, drained"
            if each.drained and each.state.value != "draining"
            else each.state.value
        ),
        "requests": "request_count",
        "tokens left": "outstanding_token_count",
        "process": "process_name",
    },
    right=("requests", "tokens left"),
    optional={"region": lambda each: each.region},
    drop=("process", "region"),
)
REQUESTS: Table[LiveRequest] = Table(
    {
        "id": "request_id",
        "project": lambda each: f"{each.organization_name}/{each.project_name}",
        "key": "api_key_prefix",
        "model": "model",
        "phase": lambda each: PHASE_WORDS.get(each.phase, each.phase.value),
        "age": lambda each: duration_text(each.age_s),
        "in": "input_token_count",
        "cached": "cached_input_token_count",
        "out": "delivered_token_count",
        "tokens/s": lambda each: (
            f"{each.tokens_per_second:,.1f}" if each.tokens_per_second else None
        ),
        "lease": lambda each: each.leased_token_count if each.admit_time else None,
        "hold ends in": hold_end_text,
        "process": lambda each: each.process_name or each.process_id,
    },
    right=("age", "in", "cached", "out", "tokens/s", "lease", "hold ends in"),
    drop=("process", "hold ends in", "cached", "lease", "key", "tokens/s", "project"),
)
STUCK = replace(REQUESTS, drop=("process", "cached", "lease", "key", "tokens/s", "phase", "in"))


@requests.callback()
def list_requests(
    context: typer.Context,
    organization: OnlyOrganizationOption = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between two refreshes of --watch.", min=0.2, max=3600)
    ] = 1.0,
    limit: Annotated[
        int,
        typer.Option(
            help="Show at most this many requests, 1 to 1000. Sums are of all.", min=1, max=1000
        ),
    ] = 200,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Show the running requests of all processes, and totals by organization."""
    if context.invoked_subcommand is not None:
        return
    with admin_client(address, api_key) as client:
        view = client.list_live_requests(organization, page_size=limit)
        if not watch:
            print_view(view, as_json=as_json)
            return
        from rich.live import Live

        console = make_console()
        # Without a terminal, print each refresh for the reading program.
        is_screen = console.is_terminal and not as_json
        with (
            Live(console=console, auto_refresh=False, screen=True) if is_screen else nullcontext()
        ) as screen:
            while True:
                if screen is None:
                    print_view(view, as_json=as_json)
                else:
                    screen.update(live_tables(view), refresh=True)
                time.sleep(interval)
                view = client.list_live_requests(organization, page_size=limit)


@requests.command("kill")
@calls(admin_client)
def kill_request(
    client: AdminClient,
    request_id: Annotated[
        str, typer.Argument(help="Id of the request, as shown by `weir requests`.")
    ],
    project: Annotated[
        str,
        typer.Option(help="Its project, ORG/NAME, if several projects run a request of this id."),
    ] = "",
    reason: Annotated[str, typer.Option(help="Why. The client and the audit log get it.")] = "",
    as_json: JsonOption = False,
) -> None:
    """End a running request, whichever process runs it. Delivered tokens are billed."""
    killed = client.kill_request(request_id, project=project, reason=reason)
    print_found(killed, killed_text(request_id, killed), as_json=as_json)
    if killed.result is KillResult.PENDING:
        raise typer.Exit(ExitCode.NOT_ALL_DONE)


@requests.command("stuck")
@calls(admin_client)
def stuck_requests(
    client: AdminClient,
    end: Annotated[bool, typer.Option("--end", help="End them now, as a worker would.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show holds that should have ended 30 s ago. While a worker runs, there are none."""
    expired_count = client.expire_overdue_holds() if end else 0
    view = client.list_live_requests(page_size=1000, stuck_only=True)
    found = {
        "expired_count": expired_count,
        "stuck_count": view.request_count,
        "requests": view.requests,
    }
    ended = [f"ended {counted(expired_count, 'overdue hold')}"] if end else []
    print_found(found, *ended, *stuck_parts(view), as_json=as_json)
    if view.request_count:
        raise typer.Exit(ExitCode.NOT_ALL_DONE)


def print_view(view: LiveView, *, as_json: bool) -> None:
    has_content = view.request_count or view.unresponsive_process_ids
    print_found(
        view,
        live_tables(view) if has_content else "no running requests",
        as_json=as_json,
    )


def stuck_parts(view: LiveView) -> list[RenderableType]:
    """Build a table of overdue holds, with a remedy below."""
    if not view.request_count:
        return ["no stuck holds"]
    overdue = counted(view.request_count, "overdue hold")
    remedy = (
        f"{overdue} still in the limits: no worker is running."
        " Start one (`weir worker`; `weir up` includes it), or end them with `weir"
        " requests stuck --end`"
    )
    return [STUCK.drawn(view.requests), remedy]


def killed_text(request_id: str, killed: KilledRequest) -> str:
    generation = killed.generation
    used = usage_line(generation.usage, generation.cost, None) if generation else "it had no hold"
    match killed.result:
        case KillResult.ENDED:
            return f"request {request_id} ended: {used}"
        case KillResult.ALREADY_ENDED:
            return f"request {request_id} ended before: {used}"
    return (
        f"request {request_id} was sent a cancel, but its process does not answer; "
        f"if the process is lost, the hold expires at {time_text(killed.expire_time)} at the latest"
    )


def live_tables(view: LiveView) -> RenderableType:
    """Build tables of requests and of totals by organization, with notes on missing data."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        REQUESTS.drawn(view.requests),
        organizations_table(view),
    ]
    if view.request_count > len(view.requests):
        parts.append(
            Text(
                f"{counted(view.request_count - len(view.requests), 'younger request')} not shown:"
                " --limit, --org",
                style="dim",
            )
        )
    if view.unresponsive_process_ids:
        silent = ", ".join(view.unresponsive_process_ids)
        parts.append(
            Text(
                f"no answer from process {silent}: its requests have no phase, and the counts of"
                " their holds",
                style="yellow",
            )
        )
    return Group(*parts)


def organizations_table(view: LiveView) -> RenderableType:
    numbers = ("requests", "holds", "tokens held", "tokens/s")
    rows = [
        (each.request_count, each.hold_count, each.held_token_count, each.tokens_per_second)
        for each in view.organizations
    ]
    made = table("organization", *numbers, right=numbers)
    for organization, (*counts, rate) in zip(view.organizations, rows, strict=True):
        made.add_row(organization.name, *counts, f"{rate:,.1f}")
    if len(rows) > 1:
        _, hold_count, token_count, rate = map(sum, zip(*rows, strict=True))
        made.add_section()
        made.add_row("all", view.request_count, hold_count, token_count, f"{rate:,.1f}")
    return made


def trace(
    request_id: Annotated[
        str,
        typer.Argument(help="Id of the request, as shown by `weir generate` and `weir requests`."),
    ],
    project: Annotated[
        str,
        typer.Option(
            help="For admins: its project, ORG/NAME, if several projects have a request of this id."
        ),
    ] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Show where the time of a request went, its tokens and its cost.

    With your key you see the requests of your project; with an admin key, all.
    """
    generation, record = look_up(request_id, project, address, api_key)
    print_found(
        generation if record is None else record, traced(generation, record), as_json=as_json
    )


def look_up(
    request_id: str, project: str, address: str | None, api_key: str | None
) -> tuple[Generation, RecordedRequest | None]:
    """Find a request with the inference key or else an admin key, which also shows its owner."""
    if not project:
        with inference_client(address, api_key) as client:
            try:
                return client.get_generation(request_id), None
            except (NotFound, PermissionDenied) as error:
                if isinstance(error, NotFound) and not has_admin_key(address, api_key):
                    raise
    with admin_client(address, api_key) as admins:
        found = admins.get_request(request_id, project=project)
    return found.generation, found


def has_admin_key(address: str | None, api_key: str | None) -> bool:
    """Return whether there is an admin key besides the inference key."""
    try:
        return resolve("admin", address, api_key) != resolve("inference", address, api_key)
    except ConnectionProblem:
        return False


def traced(generation: Generation, record: RecordedRequest | None = None) -> RenderableType:
    """Draw a recorded request: state, time per stage, usage and cost."""
    from rich.console import Group
    from rich.text import Text

    from weir_cli.tables import waterfall

    outcome = f", {generation.outcome}" if generation.outcome else ""
    state = (
        f"{generation.state.value.lower()}{outcome} · admitted {time_text(generation.admit_time)}"
    )
    head = Text(f"{generation.request_id} · {generation.model} · {state}")
    if record is not None:
        head.append(f"\n{record.organization_name}/{record.project_name} · {record.api_key_prefix}")
    purpose = [f"end user {generation.end_user}"] if generation.end_user else []
    purpose += [f"{key}={value}" for key, value in sorted(generation.labels.items())]
    if purpose:
        head.append(printable("\n" + ", ".join(purpose)))
    if (count := generation.migration_count) > 0:
        head.append(
            f"\nmoved to another engine {counted(count, 'time')}: the figures below cover all of it"
        )
    parts: list[RenderableType] = [head, Text()]
    if generation.timings is not None:
        parts += [waterfall(generation.timings, usage=generation.usage), Text()]
    else:
        parts += [Text(WITHOUT_TIMINGS.get(generation.state, BROKEN), style="yellow"), Text()]
    parts.append(Text(usage_line(generation.usage, generation.cost, generation.timings)))
    usage = generation.usage
    if (credited := usage.journalled_token_count - usage.billed_token_count) > 0:
        text = (
            f"{usage.journalled_token_count:,} output tokens journalled, "
            f"{usage.delivered_token_count:,} taken by the transport, "
            f"{usage.billed_token_count:,} billed, {credited:,} credited"
        )
        parts.append(Text(text))
    return Group(*parts)


replicas = typer.Typer(
    help="Show the engines of each model. Drain one for a repair, and put it back.",
    no_args_is_help=True,
)

ModelArgument = Annotated[str, typer.Argument(help="Model, or MODEL@VERSION.")]
NameArgument = Annotated[
    str, typer.Argument(help="Name of the replica, as shown by `weir replicas list`.")
]


@replicas.command("list")
@calls(admin_client)
def list_replicas(
    client: AdminClient,
    model: Annotated[str, typer.Option(help="Only this model, or MODEL@VERSION.")] = "",
) -> Output:
    """Show the engines of all models, with process, state and load."""
    found = client.list_replicas(model)
    if not found.replicas and not found.drains and not found.unresponsive_process_ids:
        return found, "no process has reported an engine" + (f" of {model}" if model else "")
    reasons = (
        f"{each.replica} in {each.process_name}: {each.reason}"
        for each in found.replicas
        if each.reason
    )
    tables = [REPLICAS.drawn(found.replicas)] if found.replicas else []
    return (
        found,
        *tables,
        *reasons,
        *map(drain_text, found.drains),
        *silence(found.unresponsive_process_ids),
    )


@replicas.command("drain")
@calls(admin_client)
def drain_replica(
    client: AdminClient,
    model: ModelArgument,
    replica: NameArgument,
    move_after: Annotated[
        float | None,
        typer.Option(help="Seconds to wait before running requests move to other replicas.", min=0),
    ] = None,
    reason: Annotated[
        str, typer.Option(help="Why. You see it in `weir replicas list` and in the audit log.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Give a replica no new requests, in any process. Running ones finish there."""
    drained = client.drain_replica(model, replica, reason=reason, move_after_s=move_after)
    running_count = sum(each.request_count for each in drained.replicas)
    running = f"{counted(running_count, 'request')} still {'runs' if running_count == 1 else 'run'}"
    summary = f"{drain_text(drained.drain)}; {taken_text(drained.replicas)}, {running} in it"
    print_found(drained, summary, *silence(drained.unresponsive_process_ids), as_json=as_json)
    if drained.unresponsive_process_ids:
        raise typer.Exit(ExitCode.NOT_ALL_DONE)


@replicas.command("undrain")
@calls(admin_client)
def undrain_replica(
    client: AdminClient,
    model: ModelArgument,
    replica: NameArgument,
    reason: Annotated[str, typer.Option(help="Why, for the audit log.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Give a drained replica requests again, in all processes."""
    undrained = client.undrain_replica(model, replica, reason=reason)
    was = "is back in service" if undrained.undrained else "was not drained"
    summary = f"replica {replica} {was}; {taken_text(undrained.replicas)}"
    print_found(undrained, summary, *silence(undrained.unresponsive_process_ids), as_json=as_json)
    if undrained.unresponsive_process_ids:
        raise typer.Exit(ExitCode.NOT_ALL_DONE)


def taken_text(found: tuple[Replica, ...]) -> str:
    names = ", ".join(each.process_name or each.process_id for each in found)
    return f"applied by {names}" if names else "no process has it now"


def drain_text(drain: ReplicaDrain) -> str:
    moves = (
        ""
        if drain.move_after_s is None
        else f", running requests move after {duration_text(drain.move_after_s)}"
    )
    why = f" ({drain.reason})" if drain.reason else ""
    return (
        f"replica {drain.replica} of {drain.model} is drained since"
        f" {time_text(drain.drain_time)}{why}{moves}"
    )


def silence(process_ids: tuple[str, ...]) -> list[str]:
    message = (
        f"no answer from process {', '.join(process_ids)}: it applies commands in seconds, or when"
        " it is back"
    )
    return [message] if process_ids else []
