"""`weir quote`: what a request would count and cost, and whether it would be let in, without running it."""

from __future__ import annotations

from typing import Annotated

import typer
from weir_client import Quote

from api.cli.amounts import duration_text
from api.cli.connection import AddressOption, KeyOption, inference_client
from api.cli.output import JsonOption, note, print_json, show
from api.cli.prompting import ContextOption, FileOption, ModelOption, PromptArgument, SystemOption, messages
from api.cli.quotas import quotas_table

WOULD_BE_REFUSED = 3  # exit code: told apart from errors, so that a script can ask first


def quote(
    prompt: PromptArgument = None,
    model: ModelOption = "demo",
    system: SystemOption = None,
    context: ContextOption = None,
    file: FileOption = None,
    max_output_tokens: Annotated[int | None, typer.Option(help="Most tokens of the answer. Else the rest of the window.")] = None,
    choices: Annotated[int | None, typer.Option(help="So many answers, up to 16.")] = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Tell what a request would count and cost, and whether it would be let in now. Nothing is run or billed.

    Exits with 3 if a limit would refuse it.
    """
    conversation = messages(prompt, system, context, file)
    with inference_client(address, api_key) as client:
        temperature = None if choices is None else 1.0  # several answers need one; it changes no number here
        found = client.quote(
            model, conversation, max_output_tokens=max_output_tokens, choice_count=choices, temperature=temperature
        )
    tell_quote(found, as_json=as_json)


def tell_quote(found: Quote, *, as_json: bool) -> None:
    """What it would be. Raises: typer.Exit if it would be refused."""
    if as_json:
        print_json(found)
    else:
        show(told(found))
        if found.quotas:
            show(quotas_table(list(found.quotas), ids=False))
    if not found.would_admit:
        note(why_refused(found))
        raise typer.Exit(WOULD_BE_REFUSED)


def told(found: Quote) -> str:
    """Tokens and money in two lines; in one where there is no output."""
    if not found.max_output_token_count:
        return f"{found.input_token_count:,} tokens; {found.worst_cost} (price version {found.price_version})"
    cached = f", {found.predicted_cached_token_count:,} of them probably cached" if found.predicted_cached_token_count else ""
    return (
        f"{found.input_token_count:,} input tokens{cached}; {found.expected_output_token_count:,} output tokens expected, "
        f"at most {found.max_output_token_count:,}\n"
        f"{found.expected_cost} expected, at most {found.worst_cost} (price version {found.price_version})"
    )


def why_refused(found: Quote) -> str:
    """Which limits are in the way, and what to do."""
    limits = ", ".join(f"{each.dimension.value} of the {each.subject.value.replace('-', ' ')}" for each in found.failing_quotas)
    if found.retry_helps and found.retry_after_s is not None:
        return f"would be refused by {limits}; try again in {duration_text(found.retry_after_s)}"
    return f"would be refused by {limits}; waiting does not help: ask for less, or have the limit raised (`weir quota raise`)"
