"""`weir trace`: where the milliseconds of one request went."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text
from weir_client import Generation, GenerationState

from api.cli.amounts import time_text
from api.cli.connection import AddressOption, KeyOption, inference_client
from api.cli.output import JsonOption, print_json, show
from api.cli.render import usage_line, waterfall


def trace(
    request_id: Annotated[str, typer.Argument(help="Id of the request, as `weir generate` shows it.")],
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Show where the time of one request went, what it used and what it costs."""
    with inference_client(address, api_key) as client:
        generation = client.get_generation(request_id)
    if as_json:
        print_json(generation)
    else:
        show(traced(generation))


def traced(generation: Generation) -> RenderableType:
    """One recorded request: state, waterfall, usage and cost."""
    outcome = f", {generation.outcome}" if generation.outcome else ""
    state = f"{generation.state.value.lower()}{outcome} · admitted {time_text(generation.admit_time)}"
    head = Text(f"{generation.request_id} · {generation.model} · {state}")
    if generation.labels:
        head.append("\n" + ", ".join(f"{key}={value}" for key, value in sorted(generation.labels.items())))
    parts: list[RenderableType] = [head, Text()]
    if generation.timings is not None:
        parts += [waterfall(generation.timings), Text()]
    elif generation.state is GenerationState.RUNNING:
        parts += [Text("It still runs: ask again when it has ended.", style="yellow"), Text()]
    else:
        parts += [Text("No timings: it was recovered after its server had gone away.", style="yellow"), Text()]
    parts.append(Text(usage_line(generation.usage, generation.cost, generation.timings)))
    return Group(*parts)
