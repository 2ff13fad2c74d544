"""`weir trace`: where the milliseconds of one request went, for whoever made it and for admins."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text
from weir_client import Generation, GenerationState, NotFound, PermissionDenied, RecordedRequest

from api.cli.amounts import time_text
from api.cli.connection import AddressOption, ConnectionProblem, KeyOption, admin_client, inference_client, resolve
from api.cli.output import JsonOption, print_json, show
from api.cli.render import usage_line, waterfall

WITHOUT_TIMINGS = {
    GenerationState.RUNNING: "It still runs: ask again when it has ended.",
    GenerationState.VOIDED: "No timings: it ended before anything was to be billed.",
    GenerationState.EXPIRED: "No timings: it was recovered after its server had gone away.",
}
BROKEN = "No timings: it broke, or was recovered after its server had gone away."


def trace(
    request_id: Annotated[str, typer.Argument(help="Id of the request, as `weir generate` and `weir requests` show it.")],
    project: Annotated[str, typer.Option(help="For admins: its project as ORG/NAME, where several have one of this id.")] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Show where the time of one request went, what it used and what it costs.

    A key sees the requests of its own project, an admin's key those of all.
    """
    generation, whose = look_up(request_id, project, address, api_key)
    if as_json:
        print_json(generation if whose is None else whose)
    else:
        show(traced(generation, whose))


def look_up(request_id: str, project: str, address: str | None, api_key: str | None) -> tuple[Generation, RecordedRequest | None]:
    """The request, and whose it is if an admin's key was needed to find it."""
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
    """Whether there is another key to ask with, for admins."""
    try:
        return resolve("admin", address, api_key) != resolve("inference", address, api_key)
    except ConnectionProblem:
        return False


def traced(generation: Generation, whose: RecordedRequest | None = None) -> RenderableType:
    """One recorded request: state, waterfall, usage and cost."""
    outcome = f", {generation.outcome}" if generation.outcome else ""
    state = f"{generation.state.value.lower()}{outcome} · admitted {time_text(generation.admit_time)}"
    head = Text(f"{generation.request_id} · {generation.model} · {state}")
    if whose is not None:
        head.append(f"\n{whose.organization_name}/{whose.project_name} · {whose.api_key_prefix}")
    if generation.labels:
        head.append("\n" + ", ".join(f"{key}={value}" for key, value in sorted(generation.labels.items())))
    if (count := generation.migration_count) > 0:
        head.append(f"\nwent on in another engine {count} {'time' if count == 1 else 'times'}: what follows is all of it")
    parts: list[RenderableType] = [head, Text()]
    if generation.timings is not None:
        parts += [waterfall(generation.timings, usage=generation.usage), Text()]
    else:
        parts += [Text(WITHOUT_TIMINGS.get(generation.state, BROKEN), style="yellow"), Text()]
    parts.append(Text(usage_line(generation.usage, generation.cost, generation.timings)))
    return Group(*parts)
