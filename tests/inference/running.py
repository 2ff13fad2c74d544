"""Runs sequences on an engine core without a process, and collects their events."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from inference import engine
from inference.adapters.torch_beams import BeamSearches
from inference.core.engine_core import EngineCore, NumberedEvent
from inference.core.kv_cache import BlockPool
from inference.core.options import ComputeDtype, EngineOptions, KvDtype
from inference.errors import InvariantViolated
from inference.limits import EngineLimits

SMALL_KV_BYTES = 8 << 20  # bytes: 1,024 blocks of the default tiny shape
FIRST_PLAIN_TOKEN = 7  # ids below are special tokens


@dataclass(slots=True)
class Outcome:
    """All events of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[engine.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[engine.TokenLogprobs] = field(default_factory=list)
    cached_token_count: int | None = None
    finished: engine.SequenceFinished | None = None


def make_core(
    directory: Path,
    *,
    kv_cache_bytes: int = SMALL_KV_BYTES,
    step_token_count_max: int = 256,
    compute_dtype: ComputeDtype = "float32",
    kv_dtype: KvDtype = "auto",
    **limits: int,
) -> EngineCore:
    """Return a core with small pools. limits: other fields of `EngineLimits`."""
    bounds = {"context_window_tokens": 2048, "step_token_count_max": step_token_count_max} | limits
    engine_limits = EngineLimits(**bounds)
    return EngineCore(
        EngineOptions(
            str(directory),
            engine_limits,
            compute_dtype,
            kv_cache_bytes=kv_cache_bytes,
            kv_dtype=kv_dtype,
        )
    )


def make_request(
    prompt: Sequence[int],
    max_output_tokens: int = 24,
    *,
    sampling: engine.SamplingParams | None = None,
    stop_sequences: tuple[str, ...] = (),
    stop_token_ids: frozenset[int] = frozenset(),
    ignore_eos: bool = True,
    min_output_tokens: int = 0,
    cache_salt: str = "",
    response_format: engine.ResponseFormat | None = None,
    choice_count: int = 1,
    rank: float = 0.0,
) -> engine.GenerationRequest:
    """Return a request, greedy by default."""
    return engine.GenerationRequest(
        prompt_token_ids=tuple(prompt),
        sampling=sampling or engine.SamplingParams(),
        stop=engine.StopCriteria(
            max_output_tokens, stop_sequences, stop_token_ids, ignore_eos, min_output_tokens
        ),
        cache_salt=cache_salt,
        response_format=response_format,
        choice_count=choice_count,
        rank=rank,
    )


def random_prompt(rng: random.Random, token_count: int, vocabulary_size: int = 400) -> list[int]:
    """Return plain tokens without special ones."""
    return [rng.randrange(FIRST_PLAIN_TOKEN, vocabulary_size) for _ in range(token_count)]


def run_all(
    core: EngineCore, requests: Iterable[engine.GenerationRequest], first_number: int = 0
) -> list[Outcome]:
    """Start all at once and step until nothing runs. first_number: above all earlier ones."""
    outcomes, searches = {}, BeamSearches(core)
    for number, request in enumerate(requests, first_number):
        assert searches.add(number, request)
        outcomes[number] = Outcome()
    while not searches.idle:
        collect(searches.step(), outcomes)
        check_deeply(core.pool, [sequence.block_table for sequence in core.scheduler.running])
    return list(outcomes.values())


def collect(events: Iterable[NumberedEvent], outcomes: dict[int, Outcome]) -> None:
    """Add events to the outcomes of their sequences."""
    for number, event in events:
        outcome = outcomes[number]
        assert outcome.finished is None, "nothing follows the last event"
        assert not isinstance(event, engine.SequenceRefused), event.message
        match event:
            case engine.Scheduled():
                assert outcome.cached_token_count is None, "scheduled is reported once"
                outcome.cached_token_count = event.cached_token_count
            case engine.TokensGenerated():
                outcome.token_ids += event.token_ids
                outcome.text += event.text
                outcome.logprobs += event.logprobs
                outcome.prompt_logprobs += event.prompt_logprobs
            case engine.ChoiceFinished():
                raise AssertionError("these requests have one choice")
            case engine.SequenceFinished():
                outcome.text += event.text
                outcome.finished = event


def check_deeply(pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
    """Raise `InvariantViolated` unless counts, lists and index agree for every block."""
    expected = np.zeros_like(pool._reference_counts)
    for table in tables:
        np.add.at(expected, list(table), 1)
    if not np.array_equal(expected, pool._reference_counts):
        wrong = np.flatnonzero(expected != pool._reference_counts).tolist()
        raise InvariantViolated(f"KV blocks {wrong} have wrong reference counts")
    states = (expected > 0).astype(np.int32)
    for listed in (pool._free, pool._evictable):
        np.add.at(states, list(listed), 1)
    if (misplaced := np.flatnonzero(states != 1)).size:
        raise InvariantViolated(f"KV block {misplaced[0]} is in {states[misplaced[0]]} states")
    filled = {
        block_id: content for block_id, content in enumerate(pool._contents) if content is not None
    }
    if wrong_ids := (pool._evictable.keys() - filled.keys()) | (filled.keys() & set(pool._free)):
        raise InvariantViolated(f"KV blocks {sorted(wrong_ids)} are listed as what they are not")
    for block_id, content in filled.items():
        if content.block_id != block_id or pool._index.get(content.key) is not content:
            raise InvariantViolated(f"KV block {block_id} is not where the index says")
