"""`weir models`, `count`, `quote` and `embed`: the models, and what a request to one costs; prompts from arguments and files."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from operator import mul
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import RenderableType
from rich.text import Text
from weir_client import Client, EmbedOptions, EmbedResult, Message, Model, ModelTask, Quote

from api.cli.connection import Output, calls, inference_client
from api.cli.quotas import quotas_table
from api.cli.render import JsonOption, duration_text, note, price_text, printable, table, tell_found, usage_line

ModelOption = Annotated[str, typer.Option("--model", "-m", help="Model to ask, as `weir models` names it.")]
PromptArgument = Annotated[str | None, typer.Argument(help="The question, or - to read it from standard input.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="Instructions that stand before the question.")]
ContextOption = Annotated[
    Path | None, typer.Option("--context", help="File whose text stands before the question, for example search results.")
]

FileOption = Annotated[
    str | None, typer.Option("--file", "-f", help="Read what is asked, or is to be embedded, from this file; - for standard input.")
]

TierOption = Annotated[
    Literal["interactive", "batch"] | None,
    typer.Option(help="interactive (default), or batch: runs when nothing else waits."),
]
WOULD_BE_REFUSED = 3  # exit code: told apart from errors, so that a script can ask first
FLOATS_SHOWN = 4
TEXT_SHOWN_CHARS = 40
LIKENESS_COUNT_MAX = 12  # texts, beyond which a table of all pairs fits no terminal
TextsArgument = Annotated[list[str] | None, typer.Argument(help="The texts; - reads one per line from standard input.")]


def messages(prompt: str | None, system: str | None, context: Path | None, file: str | None) -> list[Message]:
    """The conversation to send. With a context, the question follows it after a blank line as `Question: ...`.

    Raises: typer.BadParameter if there is not exactly one question, or a file cannot be read.
    """
    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either a PROMPT or --file; - reads standard input")
    question = read_file(file) if file is not None else prompt
    if question == "-":
        question = sys.stdin.read()
    if not question or not question.strip():
        raise typer.BadParameter("the question is empty")
    content = question.rstrip("\n")
    if context is not None:
        content = f"{read_file(str(context)).rstrip()}\n\nQuestion: {content}"
    said = [Message("user", content)]
    return [Message("system", system), *said] if system else said


def read_file(path: str) -> str:
    """A file's text, or standard input's for -. Raises: typer.BadParameter if it cannot be read."""
    if path == "-":
        return sys.stdin.read()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error


@calls(inference_client)
def models(client: Client) -> Output:
    """List the models and their prices."""
    found = client.list_models()
    return found, models_table(found) if found else "no model is served"


@calls(inference_client)
def count(
    client: Client,
    prompt: PromptArgument = None,
    model: ModelOption = "demo",
    system: SystemOption = None,
    context: ContextOption = None,
    file: FileOption = None,
) -> Output:
    """Count the tokens of a prompt as admission would, without running or billing anything."""
    conversation = messages(prompt, system, context, file)
    counted = client.count_tokens(model, conversation)
    return counted, Text(f"{counted.input_token_count:,} tokens of a context window of {counted.context_window_tokens:,}")


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
            each.context_window_tokens,
            each.engine,
            *([ready_text(each)] if ready else []),
            *(price_text(price, kind) for kind in prices),
        )
    return made


def ready_text(model: Model) -> str:
    """How many engines take requests, of how many, and how many of these an admin keeps out of use."""
    drained = f", {model.drained_replica_count} drained" if model.drained_replica_count else ""
    return f"{model.ready_replica_count} of {model.replica_count}{drained}"


def other_names(model: Model) -> str:
    return ", ".join([*(f"@{version.version} {version.share:.0%}" for version in model.versions), *model.aliases])


@calls(inference_client)
def quote(
    client: Client,
    prompt: PromptArgument = None,
    model: ModelOption = "demo",
    system: SystemOption = None,
    context: ContextOption = None,
    file: FileOption = None,
    max_output_tokens: Annotated[int | None, typer.Option(help="Most tokens of the answer. Else the rest of the window.")] = None,
    choices: Annotated[int | None, typer.Option(help="So many answers, up to 16.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what a request would count and cost, and whether it would be let in now. Nothing is run or billed.

    Exits with 3 if a limit would refuse it.
    """
    conversation = messages(prompt, system, context, file)
    temperature = None if choices is None else 1.0  # several answers need one; it changes no number here
    found = client.quote(model, conversation, max_output_tokens=max_output_tokens, choice_count=choices, temperature=temperature)
    tell_quote(found, as_json=as_json)


def tell_quote(found: Quote, *, as_json: bool) -> None:
    """What it would be. Raises: typer.Exit if it would be refused."""
    quotas = [quotas_table(list(found.quotas), ids=False)] if found.quotas else []
    tell_found(found, Text(told(found)), *quotas, as_json=as_json)
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


@calls(inference_client)
def embed(
    client: Client,
    texts: TextsArgument = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Model that embeds, as `weir models` names it.")] = "",
    file: FileOption = None,
    truncate: Annotated[bool, typer.Option(help="Leave out the end of texts that are too long, instead of refusing them.")] = False,
    tier: TierOption = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which the request is cancelled.")] = None,
    ask: Annotated[
        bool, typer.Option("--quote", help="Tell only what it would cost, and whether it fits (else exit code 3).")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn texts into vectors.

    Shows how like each other they are (the cosine of each pair); --json prints the vectors. Tokens and cost go to stderr.
    """
    given = lines(texts, file)
    if not model:
        raise typer.BadParameter("--model is missing; `weir models` lists those that embed")
    options: EmbedOptions = {"truncate": truncate, "tier": tier, "timeout": timeout}
    if ask:
        tell_quote(client.quote_embed(model, given, **options), as_json=as_json)
        return
    result = client.embed(model, given, **options)
    likeness = [likeness_table(result.vectors)] if 1 < len(given) <= LIKENESS_COUNT_MAX else []
    tell_found(result, vectors_table(given, result), *likeness, as_json=as_json)
    note(usage_line(result.usage, result.cost, result.timings, result.request_id))


def lines(texts: Sequence[str] | None, file: str | None) -> list[str]:
    """The texts, or the lines of a file that are not empty. Raises: typer.BadParameter if there are none."""
    if bool(texts) == (file is not None):
        raise typer.BadParameter("give texts, or --file with one per line; - reads standard input")
    if file is not None or list(texts or ()) == ["-"]:
        texts = [line for line in read_file(file or "-").splitlines() if line.strip()]
    if not texts:
        raise typer.BadParameter("there are no texts")
    return list(texts)


def vectors_table(texts: Sequence[str], result: EmbedResult) -> RenderableType:
    """Each text with the beginning of its vector."""
    made = table("", "text", "tokens", "floats", "vector", right=("", "tokens", "floats"))
    for index, (text, each) in enumerate(zip(texts, result.embeddings, strict=True)):
        shown = " ".join(f"{number:+.4f}" for number in each.vector[:FLOATS_SHOWN])
        cut = " (cut)" if each.truncated else ""
        line = printable(text if len(text) <= TEXT_SHOWN_CHARS else f"{text[:TEXT_SHOWN_CHARS]}…")
        made.add_row(str(index), line, f"{each.token_count:,}{cut}", f"{len(each.vector):,}", f"{shown} …")
    return made


def likeness_table(vectors: Sequence[Sequence[float]]) -> RenderableType:
    numbers = [str(index) for index in range(len(vectors))]
    made = table("cosine", *numbers, right=("cosine", *numbers))
    for number, one in zip(numbers, vectors, strict=True):
        made.add_row(number, *(f"{cosine(one, other):.3f}" for other in vectors))
    return made


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Of the angle between two vectors; 0 if one of them has no direction."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(map(mul, one, other)) / lengths if lengths else 0.0
