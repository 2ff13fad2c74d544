"""`weir models` and `weir count`: what can be asked, and how large a prompt is."""

from __future__ import annotations

import typer
from rich.console import RenderableType
from weir_client import Model, ModelTask

from api.cli.amounts import price_text
from api.cli.connection import AddressOption, KeyOption, inference_client
from api.cli.output import JsonOption, note, print_json, show
from api.cli.prompting import ContextOption, FileOption, ModelOption, PromptArgument, SystemOption, messages
from api.cli.render import table


def models(as_json: JsonOption = False, address: AddressOption = None, api_key: KeyOption = None) -> None:
    """List the models and their prices."""
    with inference_client(address, api_key) as client:
        found = client.list_models()
    if as_json:
        print_json(found)
    elif found:
        show(models_table(found))
    else:
        note("no model is served")


def count(
    prompt: PromptArgument = None,
    model: ModelOption = "demo",
    system: SystemOption = None,
    context: ContextOption = None,
    file: FileOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Count the tokens of a prompt as admission would, without running or billing anything."""
    conversation = messages(prompt, system, context, file)
    with inference_client(address, api_key) as client:
        counted = client.count_tokens(model, conversation)
    if as_json:
        print_json(counted)
    else:
        typer.echo(f"{counted.input_token_count:,} tokens of a context window of {counted.context_window_tokens:,}")


def models_table(models: list[Model]) -> RenderableType:
    """Models with prices per million tokens, and with what only some deployments have: other names, several or drained engines."""
    embeds = any(each.task is ModelTask.EMBED for each in models)
    prices = ("input", "cached input", "output", *(["embedding"] if embeds else []))
    names = ("also called",) if any(each.aliases or each.versions for each in models) else ()
    ready = ("ready",) if any(each.replica_count > 1 or each.drained_replica_count for each in models) else ()
    columns = ("model", *names, "architecture", "context", "engine", *ready, *prices)
    made = table(*columns, right=("context", *prices), title="prices per million tokens")
    for each in models:
        price = each.price
        made.add_row(
            each.name,
            *([other_names(each)] if names else []),
            each.architecture,
            f"{each.context_window_tokens:,}",
            each.engine,
            *([ready_text(each)] if ready else []),
            price_text(price, price.input_picos_per_token if price else 0),
            price_text(price, price.cached_input_picos_per_token if price else 0),
            price_text(price, price.output_picos_per_token if price else 0),
            *([price_text(price, price.embedding_picos_per_token if price else 0)] if embeds else []),
        )
    return made


def ready_text(model: Model) -> str:
    """How many engines take requests, of how many, and how many of these an admin keeps out of use."""
    drained = f", {model.drained_replica_count} drained" if model.drained_replica_count else ""
    return f"{model.ready_replica_count} of {model.replica_count}{drained}"


def other_names(model: Model) -> str:
    """Versions with their shares, and aliases."""
    return ", ".join([*(f"@{version.version} {version.share:.0%}" for version in model.versions), *model.aliases])
