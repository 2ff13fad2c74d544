"""`weir generate`: one answer, streamed to the terminal as its tokens arrive."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Literal

import typer
from weir_client import (
    Admitted,
    Client,
    Delta,
    FinishReason,
    GenerateOptions,
    GenerationStream,
    Money,
    Progress,
    Result,
    Resumed,
    Stage,
    UsageUpdate,
    WeirError,
)

from api.cli.connection import AddressOption, KeyOption, inference_client
from api.cli.models import ContextOption, FileOption, ModelOption, PromptArgument, SystemOption, TierOption, messages, read_file
from api.cli.render import (
    JsonOption,
    dimension_amount,
    duration_text,
    fail,
    make_console,
    note,
    print_json,
    printable,
    result_line,
    units_to_picos,
)

INTERRUPTED = 130  # exit code of a program that Ctrl-C ended, as shells report it
CUT_OFF = (FinishReason.QUOTA_EXHAUSTED, FinishReason.COST_LIMIT, FinishReason.SLOW_CONSUMER, FinishReason.FILTERED)


EARLY_STOPPING: Mapping[str | None, bool | Literal["never"]] = {None: False, "no": False, "yes": True, "never": "never"}


def generate(
    prompt: PromptArgument = None,
    model: ModelOption = "demo",
    system: SystemOption = None,
    context: ContextOption = None,
    file: FileOption = None,
    max_output_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of the answer. Else the model stops by itself.")
    ] = None,
    max_cost: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="The most that it may cost, in your currency: the answer ends before.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token; up to 2.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability, at most 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep so many of the likeliest tokens; 0 keeps all.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the answer repeatable.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens so many times as likely as the likeliest, 0 to 1.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: avoid tokens of prompt and answer; at most 2.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Avoid tokens that the answer has already; -2 to 2.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="The same once per occurrence; -2 to 2.")] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Make a token more or less likely, -100 to 100; several times.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="Token id that ends the answer; several times.")] = None,
    min_output_tokens: Annotated[int, typer.Option(help="So many tokens come before the answer may end by itself.")] = 0,
    json_schema: Annotated[Path | None, typer.Option(help="File with a JSON schema that the answer follows.")] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the whole answer matches.")] = None,
    lark: Annotated[Path | None, typer.Option(help="File with an EBNF grammar in Lark's syntax that the answer follows.")] = None,
    choices: Annotated[
        int | None, typer.Option(help="So many answers, up to 16; needs a temperature above 0, or --beam-width.")
    ] = None,
    beam_width: Annotated[int | None, typer.Option(help="Search for the likeliest answer with so many beams, 2 to 16.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="With --beam-width: above 0 favours long answers; -10 to 10.")
    ] = None,
    early_stopping: Annotated[
        Literal["no", "yes", "never"] | None,
        typer.Option(help="With --beam-width: when so many answers are complete, stop at once (yes) or not."),
    ] = None,
    top_logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities of each token and so many likeliest ones, 0 to 20; shown with --json.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which the request is cancelled.")] = None,
    tier: TierOption = None,
    start_timeout: Annotated[
        float | None, typer.Option(help="Seconds that it may wait for its turn; else refused at once.")
    ] = None,
    region: Annotated[str | None, typer.Option(help="Where to run, one of the deployment's regions.")] = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Stream a model's answer to the terminal.

    The answer goes to stdout, one line about tokens, cost and speed to stderr.

    Ctrl-C cancels the request: what was delivered until then is billed and shown.
    """
    options = GenerateOptions(
        max_output_tokens=max_output_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=biases(logit_bias or []),
        stop=stop or [],
        stop_token_ids=stop_token_id or [],
        min_output_tokens=min_output_tokens,
        json_schema=None if json_schema is None else read_file(str(json_schema)),
        regex=regex,
        lark=None if lark is None else read_file(str(lark)),
        choice_count=choices,
        beam_width=beam_width,
        length_penalty=length_penalty,
        early_stopping=EARLY_STOPPING[early_stopping],
        top_logprobs=top_logprobs,
        timeout=timeout,
        tier=tier,
        start_timeout=start_timeout,
        region=region,
    )
    conversation = messages(prompt, system, context, file)
    with inference_client(address, api_key) as client:
        if max_cost is not None:
            options["max_cost"] = cost_limit(client, model, max_cost)
        several = (choices or 1) > 1  # streamed, they would run into each other
        result, interrupted = run(client.generate(model, conversation, **options), quiet=as_json or several)
    if as_json:
        print_json(result)
    else:
        if several:
            write(choices_text(result))
        note(result_line(result))
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if result.finish_reason in CUT_OFF:
        fail(why_cut_off(result))


def cost_limit(client: Client, model: str, text: str) -> Money:
    """An amount in the currency that the model's price is in. Exits with what is wrong with one that is none."""
    try:
        picos = units_to_picos(Decimal(text))
    except (InvalidOperation, ValueError):
        raise typer.BadParameter(f"{text!r} is not an amount", param_hint="--max-cost") from None
    name = model.partition("@")[0]
    prices = [each.price for each in client.list_models() if name in (each.name, *each.aliases)]
    return Money(next((price.currency_code for price in prices if price is not None), ""), picos)


def choices_text(result: Result) -> str:
    return "".join(f"[{choice.index + 1}] {choice.text.rstrip()}\n" for choice in result.choices)


def biases(texts: Sequence[str]) -> dict[int, float]:
    """`ID=BIAS` pairs as numbers. Exits with what is wrong with one that is none."""
    pairs = {}
    for text in texts:
        token_id, _, bias = text.partition("=")
        try:
            pairs[int(token_id)] = float(bias)
        except ValueError:
            raise typer.BadParameter(
                f"{text!r} is not a token id, an equals sign and a number", param_hint="--logit-bias"
            ) from None
    return pairs


def run(stream: GenerationStream, *, quiet: bool) -> tuple[Result, bool]:
    """Streams to stdout unless `quiet`; the result, and whether Ctrl-C cut it short. Raises: WeirError."""
    interrupted = False
    try:
        with stream, WaitingLine() as waiting:
            for event in stream.events():
                match event:
                    case Progress():
                        waiting.update(progress_text(event))
                    case Delta():
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
        note("interrupted: the request is cancelled, and this much is billed:")
    return stream.result, interrupted


def write(text: str) -> None:
    """A piece of the answer, at once; without control characters where stdout is a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class WaitingLine:
    """One transient line on stderr while the first token is awaited; silent where stderr is no terminal. Gone at the end."""

    def __init__(self) -> None:
        self._status = make_console(stderr=True).status("waiting for the first token", spinner="dots")
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
    """What is waited for, and how long that may take."""
    wait = f", about {duration_text(progress.estimated_wait_s)}" if progress.estimated_wait_s is not None else ""
    match progress.stage:
        case Stage.ENGINE_LOADING:
            if progress.loading_stage == "memory":
                return f"waiting until another model has given its memory back{wait}"
            done = f", {progress.loading_fraction:.0%} done" if progress.loading_fraction > 0 else ""
            return f"the model is being loaded{done}{wait}"
        case Stage.QUEUED:
            return f"in the queue, {progress.queue_position} ahead{wait}"
        case _:
            return f"waiting{wait}"


def why_cut_off(result: Result) -> str:
    if result.finish_reason is not FinishReason.QUOTA_EXHAUSTED:
        return f"the answer is cut off: {result.finish_reason.value}"
    quotas = ", ".join(
        f"{each.dimension.value} of the {each.subject.value} (limit {dimension_amount(each.dimension, each.limit_value)}"
        + (f", resets in {duration_text(each.reset_delay_s)})" if each.reset_delay_s is not None else ")")
        for each in result.exhausted_quotas
    )
    return f"the answer is cut off: a quota ran out: {quotas or 'see `weir quota show`'}"
