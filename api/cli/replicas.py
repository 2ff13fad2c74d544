"""`weir replicas`: the engines behind each model in all processes, and how one is taken out of use and put back."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType
from weir_client import AdminClient, Replica, ReplicaDrain

from api.cli.connection import Output, admin_client, calls
from api.cli.render import JsonOption, duration_text, table, tell_found, time_text

REMAINS = 3  # exit code: some process has not answered

replicas = typer.Typer(help="Show the engines behind each model; take one out of use, and put it back.", no_args_is_help=True)

ModelArgument = Annotated[str, typer.Argument(help="The model, or MODEL@VERSION.")]
NameArgument = Annotated[str, typer.Argument(help="Name of the replica, as `weir replicas list` shows it.")]


@replicas.command("list")
@calls(admin_client)
def list_replicas(
    client: AdminClient,
    model: Annotated[str, typer.Option(help="Only of this model, or MODEL@VERSION.")] = "",
) -> Output:
    """Show the engines of all models: where they run, what they do, what runs in them."""
    found = client.list_replicas(model)
    if not found.replicas and not found.drains and not found.silent_owner_ids:
        return found, "no process has told of an engine" + (f" of {model}" if model else "")
    reasons = (f"{each.replica} in {each.owner_name}: {each.reason}" for each in found.replicas if each.reason)
    tables = [replicas_table(found.replicas)] if found.replicas else []
    return found, *tables, *reasons, *map(drain_text, found.drains), *silence(found.silent_owner_ids)


@replicas.command("drain")
@calls(admin_client)
def drain_replica(
    client: AdminClient,
    model: ModelArgument,
    replica: NameArgument,
    move_after: Annotated[
        float | None, typer.Option(help="Seconds after which what still runs there is moved elsewhere, where it can be.", min=0)
    ] = None,
    reason: Annotated[str, typer.Option(help="Why; for the audit log and for whoever lists replicas.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Take a replica out of use in all processes: what runs there ends by itself, and nothing new begins. Safe to repeat."""
    drained = client.drain_replica(model, replica, reason=reason, move_after_s=move_after)
    running_count = sum(each.request_count for each in drained.replicas)
    told = f"{drain_text(drained.drain)}; {taken_text(drained.replicas)}, {running_count} requests still run in it"
    tell_found(drained, told, *silence(drained.silent_owner_ids), as_json=as_json)
    if drained.silent_owner_ids:
        raise typer.Exit(REMAINS)


@replicas.command("undrain")
@calls(admin_client)
def undrain_replica(
    client: AdminClient,
    model: ModelArgument,
    replica: NameArgument,
    reason: Annotated[str, typer.Option(help="Why; for the audit log.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Put a replica into use again in all processes. Safe to repeat."""
    undrained = client.undrain_replica(model, replica, reason=reason)
    was = "is in use again" if undrained.undrained else "was not drained"
    told = f"replica {replica} {was}; {taken_text(undrained.replicas)}"
    tell_found(undrained, told, *silence(undrained.silent_owner_ids), as_json=as_json)
    if undrained.silent_owner_ids:
        raise typer.Exit(REMAINS)


def taken_text(found: tuple[Replica, ...]) -> str:
    names = ", ".join(each.owner_name or each.owner_id for each in found)
    return f"taken by {names}" if names else "no process has it now"


def drain_text(drain: ReplicaDrain) -> str:
    moves = "" if drain.move_after_s is None else f", what runs there is moved after {duration_text(drain.move_after_s)}"
    why = f" ({drain.reason})" if drain.reason else ""
    return f"replica {drain.replica} of {drain.model} is drained since {time_text(drain.drain_time)}{why}{moves}"


def silence(owner_ids: tuple[str, ...]) -> list[str]:
    told = f"no answer from process {', '.join(owner_ids)}: it learns of orders within seconds, or when it is back"
    return [told] if owner_ids else []


def replicas_table(found: tuple[Replica, ...]) -> RenderableType:
    numbers = ("requests", "tokens to go")
    regions = ("region",) if any(each.region for each in found) else ()
    made = table("model", "replica", *regions, "state", *numbers, "process", right=numbers)
    for each in found:
        state = f"{each.state.value}, drained" if each.drained and each.state.value != "draining" else each.state.value
        where = [each.region or "—"] if regions else []
        counts = f"{each.request_count:,}", f"{each.outstanding_token_count:,}"
        made.add_row(each.model, each.replica, *where, state, *counts, each.owner_name)
    return made
