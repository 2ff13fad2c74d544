"""`weir models`, `count`, `quote`, `embed` and `generate`: models, quotes, vectors and streamed
answers.

Prompts come from arguments and files.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from weir_client import (
    Admitted,
    Delta,
    FinishReason,
    Message,
    ModelTask,
    Money,
    Progress,
    Resumed,
    Stage,
    UsageUpdate,
    WeirError,
)

from weir_cli.commands import ExitCode
from weir_cli.connection import Output, calls, inference_client
from weir_cli.render import (
    JsonOption,
    Table,
    fail,
    make_console,
    note,
    print_found,
    print_json,
    table,
    unreadable,
)
from weir_cli.tenants import OWN_QUOTAS, limits
from weir_cli.terms import option
from weir_cli.texts import (
    counted,
    dimension_amount,
    duration_text,
    labelled,
    parse_picos,
    parsed,
    price_text,
    printable,
    ready_text,
    result_line,
    usage_line,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from weir_client import (
        Client,
        EmbedOptions,
        EmbedResult,
        GenerateOptions,
        GenerationStream,
        Model,
        Quote,
        Result,
    )

ModelOption = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="Model to ask; `weir models` lists them. Default: the only one."
    ),
]
PromptArgument = Annotated[
    str | None, typer.Argument(help="Your question, or - to read it from standard input.")
]
SystemOption = Annotated[
    str | None, typer.Option("--system", help="Instructions to the model, before the question.")
]
ContextOption = Annotated[
    Path | None,
    typer.Option(
        "--context", help="File with text to put before the question, such as search results."
    ),
]

FileOption = Annotated[
    str | None,
    typer.Option(
        "--file",
        "-f",
        help="Read your question, or your texts, from this file; - for standard input.",
    ),
]

TierOption = Annotated[
    Literal["interactive", "batch"] | None,
    typer.Option(
        help="interactive, or batch: cheaper where priced so, and runs when no other request waits."
    ),
]
FLOATS_SHOWN = 4
TEXT_SHOWN_CHARS = 40
LIKENESS_COUNT_MAX = 10  # texts; a larger table of all pairs does not fit a terminal
TextsArgument = Annotated[
    list[str] | None, typer.Argument(help="Your texts; - reads one per line from standard input.")
]

CUT_OFF = (
    FinishReason.QUOTA_EXHAUSTED,
    FinishReason.COST_LIMIT,
    FinishReason.SLOW_CONSUMER,
    FinishReason.FILTERED,
)
EARLY_STOPPING: Mapping[str | None, bool | Literal["never"]] = {
    None: False,
    "no": False,
    "yes": True,
    "never": "never",
}
# Options of `weir generate` by the parameters of the client's call.
GENERATION = {
    "max_output_tokens": option(int, "Most tokens of the answer. Default: the model decides."),
    "max_cost": option(
        str,
        "End the answer before it costs more than this, in your currency.",
        metavar="AMOUNT",
    ),
    "temperature": option(float, "0 to 2. With 0 the model takes the likeliest token each time."),
    "top_p": option(
        float, "Choose among the likeliest tokens that reach this probability together, up to 1."
    ),
    "top_k": option(int, "Choose among this many of the likeliest tokens; 0: among all."),
    "seed": option(int, "A number. The same seed gives the same answer again."),
    "min_p": option(float, "Drop tokens less likely than this part of the likeliest one, 0 to 1."),
    "repetition_penalty": option(
        float, "Above 1, avoid tokens of the prompt and the answer; at most 2."
    ),
    "presence_penalty": option(float, "Avoid tokens that are in the answer already; -2 to 2."),
    "frequency_penalty": option(
        float, "Avoid tokens the more, the more often the answer has them; -2 to 2."
    ),
    "logit_bias": option(
        list[str],
        "Make a token more or less likely, -100 to 100; repeat for more.",
        metavar="ID=BIAS",
    ),
    "stop": option(list[str], "End the answer at this text; repeat for more."),
    "stop_token_ids": option(
        list[int], "End the answer at this token; repeat for more.", "--stop-token-id"
    ),
    "min_output_tokens": option(
        int, "Do not let the answer end before this many tokens.", default=0
    ),
    "json_schema": option(Path, "File with a JSON schema. The answer follows it."),
    "regex": option(str, "Regular expression. The whole answer matches it."),
    "lark": option(Path, "File with an EBNF grammar in Lark's syntax. The answer follows it."),
    "choice_count": option(
        int,
        "How many answers, up to 16. At --temperature 0 they are equal, without --beam-width.",
        "--choices",
    ),
    "beam_width": option(int, "Search for the likeliest answer with 2 to 16 beams."),
    "length_penalty": option(float, "With --beam-width: above 0 favours long answers; -10 to 10."),
    "early_stopping": option(
        Literal["no", "yes", "never"],
        "With --beam-width: yes stops as soon as all beams have answers.",
    ),
    "top_logprobs": option(
        int,
        "With --json, show how likely each token was, and the 0 to 20 likeliest ones.",
    ),
    "timeout": option(float, "Cancel the request after this many seconds."),
    "tier": (TierOption, None),
    "start_timeout": option(
        float, "Wait in the queue for at most this many seconds, or be refused at once."
    ),
    "region": option(str, "Region to run in. Default: that of the server."),
    "no_fallback": option(
        bool, "Let no other model answer if this one cannot.", "--no-fallback", default=False
    ),
    "end_user": option(str, "Your own user for whom you ask: its usage and limits count."),
    "labels": option(
        list[str],
        "Label of the request, to report and limit usage by; repeat for more.",
        "--label",
        metavar="NAME=VALUE",
    ),
}
PRICES = ("input", "cached input", "output", "reasoning", "embedding")
MODELS: Table[Model] = Table(
    {
        "model": "name",
        "also called": lambda each: ", ".join(
            [*(f"@{it.version} {it.share:.0%}" for it in each.versions), *each.aliases]
        ),
        "architecture": "architecture",
        "context": "context_window_tokens",
        "engine": "engine",
        "kernels": lambda each: ", ".join(each.kernels),
        "ready": ready_text,
        **{kind: partial(price_text, kind) for kind in PRICES},
    },
    right=("context", *PRICES),
    empty="no models",
    optional={
        "also called": lambda each: each.aliases or each.versions,
        "kernels": lambda each: each.kernels,
        "ready": lambda each: each.replica_count > 1 or each.drained_replica_count,
        "reasoning": lambda each: (
            each.price is not None
            and each.price.reasoning_picos_per_token != each.price.output_picos_per_token
        ),
        "embedding": lambda each: each.task is ModelTask.EMBED,
    },
    title="prices per million tokens",
    drop=("architecture", "kernels", "engine", "also called", "ready", "context"),
)


def messages(
    prompt: str | None, system: str | None, context: Path | None, file: str | None
) -> list[Message]:
    """Build the conversation to send. After a context, the question follows as `Question: ...`.

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
    conversation = [Message("user", content)]
    return [Message("system", system), *conversation] if system else conversation


def read_file(path: str) -> str:
    """Read a file, or standard input for `-`. Raises: typer.BadParameter if it cannot be read."""
    if path == "-":
        return sys.stdin.read()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(unreadable(path, error)) from error


@calls(inference_client, shown=MODELS)
def models(client: Client) -> list[Model]:
    """List the models and their prices."""
    return client.list_models()


def chosen(client: Client, model: str, task: ModelTask = ModelTask.GENERATE) -> str:
    """Return the given model, or else the only one of a task. Raises: typer.BadParameter."""
    if model:
        return model
    found = [each.name for each in client.list_models() if each.task is task]
    if len(found) != 1:
        several = f"there are {', '.join(found)}" if found else "the server has none for this"
        raise typer.BadParameter(f"name a model: {several}", param_hint="--model")
    return found[0]


@calls(inference_client)
def count(
    client: Client,
    prompt: PromptArgument = None,
    model: ModelOption = "",
    system: SystemOption = None,
    context: ContextOption = None,
    file: FileOption = None,
) -> Output:
    """Count the tokens of a prompt, exactly as the bill would. Nothing runs, nothing is billed."""
    from rich.text import Text

    conversation = messages(prompt, system, context, file)
    found = client.count_tokens(chosen(client, model), conversation)
    return found, Text(
        f"{counted(found.input_token_count, 'token')} of a context window of"
        f" {found.context_window_tokens:,}"
    )


@calls(inference_client, options={each: GENERATION[each] for each in ("end_user", "labels")})
def quote(
    client: Client,
    prompt: PromptArgument = None,
    model: ModelOption = "",
    system: SystemOption = None,
    context: ContextOption = None,
    file: FileOption = None,
    max_output_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of the answer. Default: the rest of the context window."),
    ] = None,
    choices: Annotated[int | None, typer.Option(help="How many answers, up to 16.")] = None,
    *,
    as_json: bool,
    **ones: Any,
) -> None:
    """Show what a request would cost at most, and whether your limits allow it now.

    Nothing runs, nothing is billed. Exits with 3 if a limit would refuse it.
    """
    conversation = messages(prompt, system, context, file)
    # Several answers require a temperature; it does not affect the quote.
    temperature = None if choices is None else 1.0
    found = client.quote(
        chosen(client, model),
        conversation,
        max_output_tokens=max_output_tokens,
        choice_count=choices,
        temperature=temperature,
        end_user=ones["end_user"],
        labels=labelled(ones["labels"] or []),
    )
    print_quote(found, as_json=as_json)


def print_quote(found: Quote, *, as_json: bool) -> None:
    """Print a quote. Raises: typer.Exit if the request would be refused."""
    from rich.text import Text

    quotas = [limits(found.quotas, OWN_QUOTAS)] if found.quotas else []
    print_found(found, Text(quote_text(found)), *quotas, as_json=as_json)
    if not found.would_admit:
        note(why_refused(found))
        raise typer.Exit(ExitCode.NOT_ALL_DONE)


def quote_text(found: Quote) -> str:
    """Format tokens and cost of a quote, in two lines or, for an embedding, in one."""
    if not found.max_output_token_count:
        return (
            f"{counted(found.input_token_count, 'token')}; {found.worst_case_cost} (price version"
            f" {found.price_version})"
        )
    cached = (
        f", {found.predicted_cached_token_count:,} of them probably cached"
        if found.predicted_cached_token_count
        else ""
    )
    expected = counted(found.expected_output_token_count, "output token")
    return (
        f"{counted(found.input_token_count, 'input token')}{cached}; {expected} expected, at most"
        f" {found.max_output_token_count:,}\n{found.expected_cost}"
        f" expected, at most {found.worst_case_cost} (price version {found.price_version})"
    )


def why_refused(found: Quote) -> str:
    """Describe the limits that would refuse the request, and the remedy."""
    limits = ", ".join(str(each) for each in found.failing_quotas)
    if found.retry_helps and found.retry_after_s is not None:
        return f"would be refused by {limits}; try again in {duration_text(found.retry_after_s)}"
    return (
        f"would be refused by {limits}; waiting does not help: reduce the request, or raise the"
        " limit (`weir quota override`)"
    )


@calls(inference_client)
def embed(
    client: Client,
    texts: TextsArgument = None,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="Embedding model, as listed by `weir models`. Default: the only one.",
        ),
    ] = "",
    file: FileOption = None,
    truncate: Annotated[
        bool, typer.Option(help="Cut texts that are too long, or refuse them.")
    ] = False,
    tier: TierOption = None,
    timeout: Annotated[
        float | None, typer.Option(help="Cancel the request after this many seconds.")
    ] = None,
    end_user: Annotated[
        str | None,
        typer.Option(help="Your own user for whom you ask: its usage and limits count."),
    ] = None,
    ask: Annotated[
        bool,
        typer.Option(
            "--quote", help="Only show the cost, and exit with 3 if a limit would refuse it."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn texts into vectors.

    Shows the cosine similarity of each pair; --json prints the vectors. Tokens and cost go to
    stderr.
    """
    given = lines(texts, file)
    model = chosen(client, model, ModelTask.EMBED)
    options: EmbedOptions = {
        "truncate": truncate,
        "tier": tier,
        "timeout": timeout,
        "end_user": end_user,
    }
    if ask:
        print_quote(client.quote_embed(model, given, **options), as_json=as_json)
        return
    result = client.embed(model, given, **options)
    likeness = [likeness_table(result.vectors)] if 1 < len(given) <= LIKENESS_COUNT_MAX else []
    print_found(result, vectors_table(given, result), *likeness, as_json=as_json)
    note(usage_line(result.usage, result.cost, result.timings, result.request_id))


def lines(texts: Sequence[str] | None, file: str | None) -> list[str]:
    """Return the texts, or else the non-empty lines of a file. Raises: typer.BadParameter."""
    if bool(texts) == (file is not None):
        raise typer.BadParameter("give texts, or --file with one per line; - reads standard input")
    if file is not None or list(texts or ()) == ["-"]:
        texts = [line for line in read_file(file or "-").splitlines() if line.strip()]
    if not texts:
        raise typer.BadParameter("there are no texts")
    return list(texts)


def vectors_table(texts: Sequence[str], result: EmbedResult) -> RenderableType:
    """Build a table of texts with the first numbers of their vectors."""
    made = table("", "text", "tokens", "floats", "vector", right=("", "tokens", "floats"))
    for index, (text, each) in enumerate(zip(texts, result.embeddings, strict=True)):
        shown = " ".join(f"{number:+.4f}" for number in each.vector[:FLOATS_SHOWN])
        cut = " (cut)" if each.truncated else ""
        line = printable(text if len(text) <= TEXT_SHOWN_CHARS else f"{text[:TEXT_SHOWN_CHARS]}…")
        made.add_row(
            str(index), line, f"{each.token_count:,}{cut}", f"{len(each.vector):,}", f"{shown} …"
        )
    return made


def likeness_table(vectors: Sequence[Sequence[float]]) -> RenderableType:
    numbers = [str(index) for index in range(len(vectors))]
    made = table("cosine", *numbers, right=("cosine", *numbers))
    for number, one in zip(numbers, vectors, strict=True):
        made.add_row(number, *(f"{cosine(one, other):.3f}" for other in vectors))
    return made


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Compute the cosine of the angle between two vectors; 0 if one has length 0."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(map(mul, one, other)) / lengths if lengths else 0.0


@calls(options=GENERATION)
def generate(
    prompt: PromptArgument = None,
    model: ModelOption = "",
    system: SystemOption = None,
    context: ContextOption = None,
    file: FileOption = None,
    *,
    address: str | None,
    api_key: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Stream a model's answer to the terminal.

    The answer goes to stdout. A line with tokens, cost and speed goes to stderr. With Ctrl-C you
    cancel the request, and pay for the delivered part.
    """
    max_cost, several = given.pop("max_cost"), (given["choice_count"] or 1) > 1
    given["logit_bias"] = biases(given["logit_bias"] or [])
    given["labels"] = labelled(given["labels"] or [])
    given["stop"], given["stop_token_ids"] = given["stop"] or [], given["stop_token_ids"] or []
    given["early_stopping"] = EARLY_STOPPING[given["early_stopping"]]
    for name in ("json_schema", "lark"):
        if given[name] is not None:
            given[name] = read_file(str(given[name]))
    options = cast("GenerateOptions", given)
    conversation = messages(prompt, system, context, file)
    with inference_client(address, api_key) as client:
        model = chosen(client, model)
        if max_cost is not None:
            options["max_cost"] = cost_limit(client, model, max_cost)
        stream = client.generate(model, conversation, **options)
        result, interrupted = run(stream, quiet=as_json or several)  # several answers would mix
    if as_json:
        print_json(result)
    else:
        if several:
            write_choices(result)
        if result.requested_model:
            note(f"{result.requested_model} could not answer now; {result.model} did.")
        note(result_line(result))
    if interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if result.finish_reason in CUT_OFF:
        fail(why_cut_off(result))


def write_choices(result: Result) -> None:
    """Print the answers one after the other, each with its number."""
    for choice in result.choices:
        write(f"[{choice.index + 1}] {choice.text.rstrip()}\n")


def cost_limit(client: Client, model: str, text: str) -> Money:
    """Parse an amount in the currency of the model's price. Exits if it is not valid."""
    picos = parsed("--max-cost", parse_picos, text)
    name = model.partition("@")[0]
    prices = [each.price for each in client.list_models() if name in (each.name, *each.aliases)]
    return Money(next((price.currency_code for price in prices if price is not None), ""), picos)


def biases(texts: Sequence[str]) -> dict[int, float]:
    """Parse `ID=BIAS` pairs. Exits with an error if one is malformed."""
    pairs = {}
    for text in texts:
        token_id, _, bias = text.partition("=")
        try:
            pairs[int(token_id)] = float(bias)
        except ValueError:
            raise typer.BadParameter(
                f"{text!r} is not a token id, an equals sign and a number",
                param_hint="--logit-bias",
            ) from None
    return pairs


def run(stream: GenerationStream, *, quiet: bool) -> tuple[Result, bool]:
    """Print a stream to stdout unless `quiet`. Return its result, and whether Ctrl-C ended it."""
    interrupted = False
    try:
        with stream, WaitingLine() as waiting:
            for event in stream.events():
                match event:
                    case Progress():
                        waiting.update(progress_text(event))
                    case Delta():
                        if event.reasoning_token_count and not event.text:
                            waiting.update("the model thinks")
                            continue
                        waiting.clear()
                        if not quiet:
                            write(event.text)
                    case Admitted() | UsageUpdate() | Resumed():
                        pass
    except KeyboardInterrupt:
        interrupted = True
    except WeirError:
        if not quiet and stream.partial.text:
            typer.echo()  # the error begins on its own line
        raise
    if not quiet and stream.partial.text and not stream.partial.text.endswith("\n"):
        typer.echo()
    if interrupted:
        note("interrupted: the request is cancelled; billed so far:")
    return stream.result, interrupted


def write(text: str) -> None:
    """Print a piece of the answer at once, on a terminal without control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class WaitingLine:
    """Line on stderr that disappears at the first token. Shown only if stderr is a terminal."""

    def __init__(self) -> None:
        self._status = make_console(stderr=True).status(
            "waiting for the first token", spinner="dots"
        )
        self._running = False

    def update(self, text: str) -> None:
        self._status.update(text)
        if not self._running and sys.stderr.isatty():
            self._running = True
            self._status.start()

    def clear(self) -> None:
        if self._running:
            self._running = False
            self._status.stop()

    def __enter__(self) -> WaitingLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def progress_text(progress: Progress) -> str:
    """Format the reason of a wait, and its estimated length."""
    wait = (
        f", about {duration_text(progress.estimated_wait_s)}"
        if progress.estimated_wait_s is not None
        else ""
    )
    match progress.stage:
        case Stage.ENGINE_LOADING:
            if progress.loading_stage == "memory":
                return f"waiting for another model to free memory{wait}"
            done = (
                f", {progress.loading_fraction:.0%} done" if progress.loading_fraction > 0 else ""
            )
            return f"loading the model{done}{wait}"
        case Stage.QUEUED:
            return f"in the queue, {progress.queue_position} ahead{wait}"
        case Stage.RUNNING:
            return "the model is computing"
        case _:
            return f"waiting{wait}"


def why_cut_off(result: Result) -> str:
    if result.finish_reason is not FinishReason.QUOTA_EXHAUSTED:
        return f"the answer was cut off: {result.finish_reason.value}"
    quotas = ", ".join(
        f"{each} (limit"
        f" {dimension_amount(each.dimension, each.limit_value)}"
        + (
            f", resets in {duration_text(each.reset_delay_s)})"
            if each.reset_delay_s is not None
            else ")"
        )
        for each in result.exhausted_quotas
    )
    return f"the answer was cut off: quota exhausted: {quotas or 'see `weir quota show`'}"
