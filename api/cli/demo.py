"""`weir demo`: the whole path of a request on this machine, in a minute; leaves no files behind."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from weir_cli.commands import ExitCode
from weir_cli.render import fail, make_console, table
from weir_cli.tables import Sheet, month_report, waterfall
from weir_cli.texts import result_line
from weir_client import (
    AsyncAdminClient,
    AsyncBillingClient,
    AsyncClient,
    FinishReason,
    MonthReport,
    QuotaDimension,
    QuotaStatus,
    QuotaSubject,
    Result,
    WeirError,
)

from api.cli.stack import Stack, clear_failures, read_settings, run_stack
from api.core.endpoint import read_endpoint
from api.core.settings import DEMO_MODEL_NAME, Settings
from demo import corpus, messages
from inference.text.tokenizer import ChatMessage, Tokenizer

OUTPUT_TOKENS = 150
Conversation = list[dict[str, str]]
ORGANIZATION = "hotel-search"
PROJECT = "copilot"
TOKENS_PER_MONTH = 250_000
CONCURRENT_REQUESTS = 64
CANCEL_EVERY = 12  # one agent in this many cancels in mid-stream
LEDGER_TIMEOUT_S = 30.0
PROGRESS_S = 5.0  # between two lines of progress in a pipe
# Seed of the query shown live: its answer is correct, as most are (see the model card).
ANSWER_SEED = 7

console = make_console()


@dataclass(slots=True)
class AgentRun:
    """Measurements of one agent, in ms after sending. Gaps are between messages with tokens."""

    ttft_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    received_token_count: int = 0
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class WorkloadRun:
    """Measurements of all agents in one run, and its duration in seconds."""

    agents: tuple[AgentRun, ...]
    duration_s: float

    @property
    def results(self) -> list[Result]:
        return [agent.result for agent in self.agents if agent.result is not None]

    @property
    def received_token_count(self) -> int:
        """Output tokens received by the agents."""
        return sum(agent.received_token_count for agent in self.agents)


def percentile(values: Sequence[float], percent: float) -> float:
    """Compute a percentile by the nearest-rank method; 0 if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def reference_prompts(model_directory: Path, count: int, first_seed: int = 0) -> list[Conversation]:
    """Generate distinct conversations of exactly 1,025 tokens of the model's tokenizer."""
    tokenizer = Tokenizer(model_directory)

    def count_tokens(messages: list[messages.Message]) -> int:
        return len(
            tokenizer.encode_chat(
                [ChatMessage(message["role"], message["content"]) for message in messages]
            )
        )

    return [
        [
            {"role": message["role"], "content": message["content"]}
            for message in corpus.reference_messages(first_seed + index, count_tokens)
        ]
        for index in range(count)
    ]


async def run_agents(
    client: AsyncClient,
    model: str,
    prompts: Sequence[Conversation],
    cancel_after: Mapping[int, int],
    on_tokens: Callable[[int], None],
) -> WorkloadRun:
    """Send all prompts at once and read all answers.

    `cancel_after` maps an agent's index to the number of tokens after which it cancels; `on_tokens`
    gets the number of each message's tokens. Raises: WeirError if a request fails.
    """
    started_at = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(run_agent(client, model, prompt, cancel_after.get(index), on_tokens))
            for index, prompt in enumerate(prompts)
        ]
    return WorkloadRun(tuple(task.result() for task in running), time.perf_counter() - started_at)


async def run_agent(
    client: AsyncClient,
    model: str,
    prompt: Conversation,
    cancel_after: int | None,
    on_tokens: Callable[[int], None],
) -> AgentRun:
    """Run one agent: send a request, read its answer, and perhaps cancel in mid-stream."""
    run = AgentRun()
    sent_at = last_at = time.perf_counter()
    async with client.generate(
        model, prompt, max_output_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0
    ) as stream:
        async for delta in stream:
            if not delta.token_ids:
                continue
            now = time.perf_counter()
            if run.received_token_count:
                run.gaps_ms.append((now - last_at) * 1000)
            else:
                run.ttft_ms = (now - sent_at) * 1000
            last_at = now
            run.received_token_count += len(delta.token_ids)
            on_tokens(len(delta.token_ids))
            if cancel_after is not None and run.received_token_count >= cancel_after:
                stream.cancel()
                cancel_after = None
    run.result = stream.result
    return run


def run(agents: int) -> None:
    """Run the demo in a temporary directory. Exits with 1 if its token counts differ at the end."""
    home = Path(tempfile.mkdtemp(prefix="weir-demo-"))
    settings = read_settings(home, "127.0.0.1:0").having(database_url="")
    try:
        with clear_failures():
            balanced = asyncio.run(run_demo(settings, agents))
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if not balanced:
        fail("tokens delivered, usage events and ledger differ: please report this")


async def run_demo(settings: Settings, agent_count: int) -> bool:
    """Run the demo. Return whether delivered tokens, usage events and ledger agree."""
    began_at = time.monotonic()
    model_directory = settings.models.directories[DEMO_MODEL_NAME]
    # Their texts are drawn and tokenized while the database starts.
    prompts = asyncio.get_running_loop().run_in_executor(
        None, reference_prompts, model_directory, agent_count + 1, ANSWER_SEED
    )
    with console.status("Starting") as status:
        # A status draws nothing into a pipe.
        report = status.update if console.is_terminal else console.print
        async with run_stack(settings, report) as stack:
            status.stop()
            console.print(
                f"Everything runs, {time.monotonic() - began_at:.1f} s after the start: PostgreSQL,"
                " API server, engine, worker."
            )
            console.print(
                f"gRPC on {stack.connection.address}, OpenAI's clients on"
                f" {read_endpoint(settings.home).openai_url}."
            )
            try:
                balanced = await run_chapters(stack, await prompts)
            except* WeirError as errors:
                fail(f"the demo failed: {errors.exceptions[0]}")
            report("Stopping")
            status.start()
    console.print(f"Stopped and cleaned up after {time.monotonic() - began_at:.0f} s.")
    return balanced


async def run_chapters(stack: Stack, prompts: Sequence[Conversation]) -> bool:
    """Run the demo's chapters on a running stack. Return whether its token counts agree."""
    address, admin_key = stack.connection.address, stack.connection.admin_key
    async with AsyncAdminClient(address=address, api_key=admin_key) as admin:
        api_key, month = await create_tenant(admin), f"{datetime.now(UTC):%Y-%m}"
    async with AsyncClient(address=address, api_key=api_key) as client:
        before = await client.get_quota()
        shown = await show_answer(client, prompts[0])
        run = await show_workload(client, prompts[1:])
        after = await client.get_quota()
    console.print(Rule("Stages of the first request", align="left"))
    console.print(waterfall(shown.timings), crop=False)
    console.print(Rule("Measurements of the agents", align="left"))
    console.print(measurements(run), crop=False)
    console.print(Rule("Quotas, before and after", align="left"))
    console.print(quota_table(before, after), crop=False)
    async with AsyncBillingClient(address=address, api_key=admin_key) as billing:
        waiting = "Waiting for the billing worker"
        if not console.is_terminal:
            console.print(waiting)
        with console.status(waiting):
            report = await rated_report(billing, month, len(run.results) + 1)
    console.print(Rule("The month's bill", align="left"))
    console.print(month_report(report), crop=False)
    return check(shown, run, report)


async def create_tenant(admin: AsyncAdminClient) -> str:
    """Create the demo's customer and return an API key for its application."""
    await admin.create_organization(ORGANIZATION)
    await admin.create_project(ORGANIZATION, PROJECT)
    created = await admin.create_api_key(ORGANIZATION, PROJECT, name="demo")
    for dimension, limit in (
        (QuotaDimension.CONCURRENT_REQUESTS, CONCURRENT_REQUESTS),
        (QuotaDimension.TOKENS_PER_MONTH, TOKENS_PER_MONTH),
    ):
        await admin.set_quota(QuotaSubject.ORGANIZATION, ORGANIZATION, dimension, limit)
    console.print(
        f"Created organization [bold]{ORGANIZATION}[/bold] with key {created.api_key.prefix}… and"
        f" quotas: {TOKENS_PER_MONTH:,} tokens a month, {CONCURRENT_REQUESTS} requests at once."
    )
    return created.secret


async def show_answer(client: AsyncClient, prompt: Conversation) -> Result:
    """Stream one answer to the terminal as its tokens arrive."""
    console.print(Rule("A question, answered live", align="left"))
    *listings, found, _, question = prompt[-1]["content"].split("\n")
    console.print(
        f"[dim]{len(listings)} lines of hotel listings, then the result of the search step, and the"
        " question:[/dim]"
    )
    console.print(f"[dim]{found}[/dim]")
    console.print(f"[bold]{question}[/bold]\n")
    async with client.generate(
        DEMO_MODEL_NAME, prompt, max_output_tokens=OUTPUT_TOKENS, temperature=0.0
    ) as stream:
        async for delta in stream:
            console.print(delta.text, end="", markup=False, soft_wrap=True)
    console.print("\n")
    console.print(f"[dim]{result_line(stream.result)}[/dim]")
    return stream.result


async def show_workload(client: AsyncClient, prompts: Sequence[Conversation]) -> WorkloadRun:
    """Run the reference workload with a progress bar; some agents cancel in mid-stream."""
    console.print(Rule(f"{len(prompts)} agents at once", align="left"))
    cancel_after = {
        index: 20 + 10 * (index % 9)
        for index in range(CANCEL_EVERY // 2, len(prompts), CANCEL_EVERY)
    }
    total = sum(cancel_after.get(index, OUTPUT_TOKENS) for index in range(len(prompts)))
    console.print(
        f"1,025 tokens in, {OUTPUT_TOKENS} out each, the first 200 the same for all;"
        f" {len(cancel_after)} cancel in mid-stream."
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("tokens", total=total)
        counted = progress.tasks[0]
        next_line_s = PROGRESS_S

        def count_tokens(count: int) -> None:
            nonlocal next_line_s
            progress.advance(bar, count)
            if not console.is_terminal and (counted.elapsed or 0.0) >= next_line_s:
                next_line_s += PROGRESS_S
                console.print(f"{counted.completed:,.0f} of {total:,} tokens")

        run = await run_agents(client, DEMO_MODEL_NAME, prompts, cancel_after, count_tokens)
        progress.update(bar, total=run.received_token_count, completed=run.received_token_count)
    return run


def measurements(run: WorkloadRun) -> Sheet:
    """Build a table of the latency percentiles, throughput and cache hits of a run."""
    figures = table("", "p50", "p90", "p99", right=("p50", "p90", "p99"))
    ttfts_ms = [agent.ttft_ms for agent in run.agents if agent.received_token_count]
    gaps_ms = [gap for agent in run.agents for gap in agent.gaps_ms]
    for name, values in (
        ("time to first token, ms", ttfts_ms),
        ("time between tokens, ms", gaps_ms),
    ):
        figures.add_row(name, *(f"{percentile(values, percent):,.1f}" for percent in (50, 90, 99)))
    sent = sum(result.usage.input_token_count for result in run.results)
    cached = sum(result.usage.cached_input_token_count for result in run.results)
    cancelled_count = sum(result.finish_reason is FinishReason.CANCELLED for result in run.results)
    received, rate = run.received_token_count, run.received_token_count / run.duration_s
    figures.caption = (
        f"{received:,} tokens in {run.duration_s:.1f} s: {rate:,.0f} tokens/s. Prefix cache:"
        f" {cached:,} of {sent:,} input tokens ({cached / max(sent, 1):.0%}). Cancelled:"
        f" {cancelled_count}."
    )
    return figures


def quota_table(before: Sequence[QuotaStatus], after: Sequence[QuotaStatus]) -> Sheet:
    """Build a table of each limit's usage before and after, with its held and remaining amount."""
    numbers = ("limit", "before", "after", "held", "remaining")
    rows = table("quota", *numbers, right=numbers)
    used_before = {quota.quota_id: quota.used_value for quota in before}
    for quota in after:
        used = used_before.get(quota.quota_id, 0), quota.used_value
        values = (quota.limit_value, *used, quota.held_value, quota.remaining_value)
        rows.add_row(f"{quota.dimension} of {quota.subject}", *values)
    return rows


async def rated_report(billing: AsyncBillingClient, month: str, request_count: int) -> MonthReport:
    """Wait until every request is in the ledger, or a timeout passes. Return the report."""
    deadline = time.monotonic() + LEDGER_TIMEOUT_S
    while True:
        report = await billing.get_month_report(ORGANIZATION, month)
        complete = (
            report.unrated_event_count == 0 and report.request_counts.total_count == request_count
        )
        if complete or time.monotonic() > deadline:
            return report
        await asyncio.sleep(0.2)


def check(shown: Result, run: WorkloadRun, report: MonthReport) -> bool:
    """Compare the clients' tokens with usage events and ledger, and print the result."""
    results = [shown, *run.results]
    sent = sum(result.usage.input_token_count for result in results)
    received = run.received_token_count + len(shown.token_ids)
    usage = report.reconciliation.usage_token_count
    ledger = report.reconciliation.ledger_token_count
    balanced = sent + received == usage == ledger
    sign, style = ("=", "bold green") if balanced else ("≠", "bold red")
    console.print(
        f"[{style}]{sent:,} in + {received:,} received by clients {sign} {usage:,} in usage events"
        f" {sign} {ledger:,} in the ledger[/{style}]"
    )
    cost = sum(result.cost.picos for result in results)
    agreed = cost == report.total.picos
    console.print(
        f"[{'bold green' if agreed else 'bold red'}]clients' cost {'=' if agreed else '≠'} the"
        f" month's bill: {report.total}"
    )
    return balanced and agreed
