"""The prompt of a command: from an argument, a file or standard input, with a system text and a context file around it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from weir_client import Message

ModelOption = Annotated[str, typer.Option("--model", "-m", help="Model to ask, as `weir models` names it.")]
PromptArgument = Annotated[str | None, typer.Argument(help="The question, or - to read it from standard input.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="Instructions that stand before the question.")]
ContextOption = Annotated[
    Path | None, typer.Option("--context", help="File whose text stands before the question, for example search results.")
]
FileOption = Annotated[
    str | None, typer.Option("--file", "-f", help="Read what is asked, or is to be embedded, from this file; - for standard input.")
]


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
