"""The reference workload as a client sees it: agents of a hotel-search copilot, all at once, each with a long prompt.

Each has 1,025 tokens in (a system prompt of 200 that all share, some 800 of hotel listings, a query) and 150 out. Measures on the
client's side: time to first token, from the moment a request is sent, and time between tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weir_client import AsyncClient, FinishReason, Result

from demo import corpus
from inference.text.tokenizer import ChatMessage, Tokenizer

OUTPUT_TOKENS = 150

Conversation = list[dict[str, str]]


@dataclass(slots=True)
class AgentRun:
    """What one agent saw. Times in ms from sending; gaps are between messages that brought tokens."""

    ttft_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    received_token_count: int = 0
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class WorkloadRun:
    """All agents of one run, and how long it took in seconds."""

    agents: tuple[AgentRun, ...]
    duration_s: float

    @property
    def results(self) -> list[Result]:
        """How each request ended."""
        return [agent.result for agent in self.agents if agent.result is not None]

    @property
    def received_token_count(self) -> int:
        """Output tokens that reached the agents."""
        return sum(agent.received_token_count for agent in self.agents)

    @property
    def ttfts_ms(self) -> list[float]:
        """Of every agent that got a token."""
        return [agent.ttft_ms for agent in self.agents if agent.received_token_count]

    @property
    def gaps_ms(self) -> list[float]:
        """Of all agents together."""
        return [gap for agent in self.agents for gap in agent.gaps_ms]

    @property
    def cancelled_count(self) -> int:
        """Requests that were cancelled."""
        return sum(1 for result in self.results if result.finish_reason is FinishReason.CANCELLED)


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def reference_prompts(model_directory: Path, count: int, first_seed: int = 0) -> list[Conversation]:
    """Conversations of exactly 1,025 tokens with the tokenizer of the model, all different."""
    tokenizer = Tokenizer(model_directory)

    def count_tokens(messages: list[corpus.Message]) -> int:
        return len(tokenizer.encode_chat([ChatMessage(message["role"], message["content"]) for message in messages]))

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

    cancel_after: agent index → tokens after which it cancels. on_tokens: told of tokens as they arrive. Raises: WeirError if a
    request fails.
    """
    started_at = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(run_agent(client, model, prompt, cancel_after.get(index), on_tokens))
            for index, prompt in enumerate(prompts)
        ]
    return WorkloadRun(tuple(task.result() for task in running), time.perf_counter() - started_at)


async def run_agent(
    client: AsyncClient, model: str, prompt: Conversation, cancel_after: int | None, on_tokens: Callable[[int], None]
) -> AgentRun:
    """One agent: ask, read, perhaps cancel in the middle."""
    run = AgentRun()
    sent_at = last_at = time.perf_counter()
    async with client.generate(model, prompt, max_output_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0) as stream:
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
