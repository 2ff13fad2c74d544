"""`weir embed`: the vectors of texts, and how like each other they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Annotated

import typer
from rich.console import RenderableType
from weir_client import EmbedOptions, EmbedResult

from api.cli.connection import AddressOption, KeyOption, inference_client
from api.cli.output import JsonOption, note, print_json, show
from api.cli.prompting import FileOption, read_file
from api.cli.quote import tell_quote
from api.cli.render import printable, table, usage_line

FLOATS_SHOWN = 4
TEXT_SHOWN_CHARS = 40
LIKENESS_COUNT_MAX = 12  # texts, beyond which a table of all pairs fits no terminal

TextsArgument = Annotated[list[str] | None, typer.Argument(help="The texts; - reads one per line from standard input.")]


def embed(
    texts: TextsArgument = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Model that embeds, as `weir models` names it.")] = "",
    file: FileOption = None,
    truncate: Annotated[bool, typer.Option(help="Leave out the end of texts that are too long, instead of refusing them.")] = False,
    tier: Annotated[str | None, typer.Option(help="interactive (default), or batch: runs when nothing else waits.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which the request is cancelled.")] = None,
    ask: Annotated[
        bool, typer.Option("--quote", help="Tell only what it would cost, and whether it fits (else exit code 3).")
    ] = False,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Turn texts into vectors.

    Shows how like each other they are (the cosine of each pair); --json prints the vectors. Tokens and cost go to stderr.
    """
    given = lines(texts, file)
    if tier not in (None, "interactive", "batch"):
        raise typer.BadParameter("--tier is interactive or batch")
    if not model:
        raise typer.BadParameter("--model is missing; `weir models` lists those that embed")
    with inference_client(address, api_key) as client:
        options: EmbedOptions = {"truncate": truncate, "tier": "batch" if tier == "batch" else None, "timeout": timeout}
        if ask:
            tell_quote(client.quote_embed(model, given, **options), as_json=as_json)
            return
        result = client.embed(model, given, **options)
    if as_json:
        print_json(result)
    else:
        show(vectors_table(given, result))
        if 1 < len(given) <= LIKENESS_COUNT_MAX:
            show(likeness_table(result.vectors))
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
    """The cosine of each pair."""
    numbers = [str(index) for index in range(len(vectors))]
    made = table("cosine", *numbers, right=("cosine", *numbers))
    for number, one in zip(numbers, vectors, strict=True):
        made.add_row(number, *(f"{cosine(one, other):.3f}" for other in vectors))
    return made


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Of the angle between two vectors; 0 if one of them has no direction."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(map(mul, one, other)) / lengths if lengths else 0.0
