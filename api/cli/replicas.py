"""`weir replicas`: the engines behind each model in all processes, and how one is taken out of use and put back."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType
from weir_client import Replica, ReplicaDrain, ReplicaList

from api.cli.connection import AddressOption, KeyOption, admin_client
from api.cli.render import JsonOption, duration_text, note, print_json, show, table, time_text

REMAINS = 3  # exit code: some process has not answered

replicas = typer.Typer(help="Show the engines behind each model; take one out of use, and put it back.", no_args_is_help=True)

ModelArgument = Annotated[str, typer.Argument(help="The model, or MODEL@VERSION.")]
NameArgument = Annotated[str, typer.Argument(help="Name of the replica, as `weir replicas list` shows it.")]


@replicas.command("list")
def list_replicas(
    model: Annotated[str, typer.Option(help="Only of this model, or MODEL@VERSION.")] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Show the engines of all models: where they run, what they do, what runs in them."""
    with admin_client(address, api_key) as client:
        found = client.list_replicas(model)
    if as_json:
        print_json(found)
    elif not found.replicas and not found.drains and not found.silent_owner_ids:
        note("no process has told of an engine" + (f" of {model}" if model else ""))
    else:
        if found.replicas:
            show(replicas_table(found.replicas))
        for each in found.replicas:
            if each.reason:
                note(f"{each.replica} in {each.owner_name}: {each.reason}")
        tell_drains(found)
        tell_silent(found.silent_owner_ids)


@replicas.command("drain")
def drain_replica(
    model: ModelArgument,
    replica: NameArgument,
    move_after: Annotated[
        float | None, typer.Option(help="Seconds after which what still runs there is moved elsewhere, where it can be.", min=0)
    ] = None,
    reason: Annotated[str, typer.Option(help="Why; for the audit log and for whoever lists replicas.")] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Take a replica out of use in all processes: what runs there ends by itself, and nothing new begins. Safe to repeat."""
    with admin_client(address, api_key) as client:
        drained = client.drain_replica(model, replica, reason=reason, move_after_s=move_after)
    if as_json:
        print_json(drained)
    else:
        running_count = sum(each.request_count for each in drained.replicas)
        note(f"{drain_text(drained.drain)}; {taken_text(drained.replicas)}, {running_count} requests still run in it")
        tell_silent(drained.silent_owner_ids)
    if drained.silent_owner_ids:
        raise typer.Exit(REMAINS)


@replicas.command("undrain")
def undrain_replica(
    model: ModelArgument,
    replica: NameArgument,
    reason: Annotated[str, typer.Option(help="Why; for the audit log.")] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Put a replica into use again in all processes. Safe to repeat."""
    with admin_client(address, api_key) as client:
        undrained = client.undrain_replica(model, replica, reason=reason)
    if as_json:
        print_json(undrained)
    else:
        was = "is in use again" if undrained.undrained else "was not drained"
        note(f"replica {replica} {was}; {taken_text(undrained.replicas)}")
        tell_silent(undrained.silent_owner_ids)
    if undrained.silent_owner_ids:
        raise typer.Exit(REMAINS)


def taken_text(found: tuple[Replica, ...]) -> str:
    """Who has answered."""
    names = ", ".join(each.owner_name or each.owner_id for each in found)
    return f"taken by {names}" if names else "no process has it now"


def drain_text(drain: ReplicaDrain) -> str:
    """One order, in a line."""
    moves = "" if drain.move_after_s is None else f", what runs there is moved after {duration_text(drain.move_after_s)}"
    why = f" ({drain.reason})" if drain.reason else ""
    return f"replica {drain.replica} of {drain.model} is drained since {time_text(drain.drain_time)}{why}{moves}"


def tell_drains(found: ReplicaList) -> None:
    """The orders."""
    for drain in found.drains:
        note(drain_text(drain))


def tell_silent(owner_ids: tuple[str, ...]) -> None:
    """Who did not answer."""
    if owner_ids:
        note(f"no answer from process {', '.join(owner_ids)}: it learns of orders within seconds, or when it is back")


def replicas_table(found: tuple[Replica, ...]) -> RenderableType:
    """One line per replica and process."""
    numbers = ("requests", "tokens to go")
    regions = ("region",) if any(each.region for each in found) else ()
    made = table("model", "replica", *regions, "state", *numbers, "process", right=numbers)
    for each in found:
        state = f"{each.state.value}, drained" if each.drained and each.state.value != "draining" else each.state.value
        where = [each.region or "—"] if regions else []
        counts = f"{each.request_count:,}", f"{each.outstanding_token_count:,}"
        made.add_row(each.model, each.replica, *where, state, *counts, each.owner_name)
    return made
