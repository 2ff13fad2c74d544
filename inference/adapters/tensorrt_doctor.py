"""Checks a TensorRT-LLM engine on a GPU machine against its documentation: a list of questions, an
observation each.

The adapter handles most answers, and limits the rest by timeouts. The answers show which
precautions this installation needs, and where it differs from the documentation. The last question
kills a worker process, so the engine is unusable afterwards.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from common.processes import descendants
from inference.adapters.findings import (
    FORMATS,
    Observation,
    Verdict,
    accepted,
    ask_all,
    expected,
    needed,
)
from inference.adapters.tensorrt_engine import TensorRtOptions
from inference.adapters.tensorrt_library import TensorRtLibrary
from inference.engine import GenerationRequest, GrammarKind, ResponseFormat, SamplingParams, StopCriteria
from inference.limits import EngineLimits

ANSWER_WAIT_S = 60.0  # a GPU that compiles kernels answers late
SILENCE_S = 3.0  # seconds after which a missing answer counts as none
EXPECTED_STATISTICS = frozenset({"iter", "kvCacheStats", "inflightBatchingStats", "numActiveRequests", "numQueuedRequests"})
# arguments that the adapter passes
SUBMITTED = frozenset({"inputs", "sampling_params", "streaming", "cache_salt"})


@dataclass(slots=True)
class Patient:
    """An engine under test. workers: process ids that it started."""

    library: TensorRtLibrary
    llm: Any
    limits: EngineLimits
    vocabulary_size: int
    workers: list[int]
    statistics: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def prompt(self, seed: int, token_count: int = 200) -> tuple[int, ...]:
        """Return ids from the middle of the vocabulary, where there are no special tokens."""
        low = self.vocabulary_size // 4
        return tuple(low + (seed * 7919 + index * 104_729) % (self.vocabulary_size // 2) for index in range(token_count))

    def start(
        self,
        prompt: tuple[int, ...],
        output_token_count: int,
        *,
        ends: frozenset[int] = frozenset(),
        salt: str = "",
        **changes: Any,
    ) -> Any:
        """Submit a greedy request and return the library's result object."""
        stop = StopCriteria(output_token_count, ignore_eos=not changes.get("response_format"))
        wanted = GenerationRequest(prompt, changes.pop("sampling", SamplingParams()), stop, salt, **changes)
        return self.library.submit(self.llm, wanted, self.library.sampling(wanted, ends, self.vocabulary_size))

    async def finish(self, result: Any) -> Any:
        """Wait for the end of the output and return it. Raises: TimeoutError."""
        async with asyncio.timeout(ANSWER_WAIT_S):
            async for _ in result:
                pass
        return result.outputs[0]

    async def answers_abort(self, result: Any) -> str | None:
        """Return the finish reason that follows an abort; None if the engine stays silent."""
        try:
            async with asyncio.timeout(SILENCE_S):
                async for _ in result:
                    pass
        except TimeoutError:
            return None
        return str(result.outputs[0].finish_reason)

    async def read(self) -> None:
        """Read the pending statistics and cache events."""
        async for entry in self.llm.get_stats_async(0.3):
            self.statistics = entry
        async for told in self.llm.get_kv_cache_events_async(0.3):
            self.events += told if isinstance(told, list) else [told]


Question = Callable[[Patient], Awaitable[tuple[Verdict, str]]]


async def interface(patient: Patient) -> tuple[Verdict, str]:
    """Does `generate_async` accept the adapter's arguments?"""
    missing = SUBMITTED - set(inspect.signature(type(patient.llm).generate_async).parameters)
    return needed(not missing), f"missing: {', '.join(sorted(missing)) or 'nothing'}"


async def end_tokens(patient: Patient) -> tuple[Verdict, str]:
    """Is the token that ends an output in its list?"""
    prompt = patient.prompt(1)
    free = list((await patient.finish(patient.start(prompt, 12))).token_ids)
    first, second = free[5], free[8]
    as_end = list((await patient.finish(patient.start(prompt, 12, ends=frozenset({first})))).token_ids)
    both = await patient.finish(patient.start(prompt, 12, ends=frozenset({min(first, second), max(first, second)})))
    listed = [name for name, ids in (("end id", as_end), ("stop id", list(both.token_ids))) if ids and ids[-1] in (first, second)]
    right = len(as_end) in (free.index(first), free.index(first) + 1)
    seen = f"listed: {', '.join(listed) or 'neither'}; stop_reason {both.stop_reason!r}; {len(as_end)} of {len(free)} tokens"
    return needed(right), seen


async def cached_tokens(patient: Patient) -> tuple[Verdict, str]:
    """Does it cache prompts, separated by salt?"""
    prompt, counts = patient.prompt(2, 333), []
    for salt in ("", "", "another"):
        result = patient.start(prompt, 2, salt=salt)
        await patient.finish(result)
        counts.append(result.cached_tokens)
    cold, warm, salted = counts
    good = cold == 0 and 0 < warm < len(prompt) and salted == 0
    return needed(good), f"cold {cold}, again {warm}, under another salt {salted}, of {len(prompt)}"


async def abort_while_running(patient: Patient) -> tuple[Verdict, str]:
    """Does an abort after the first token end it as cancelled?"""
    result = patient.start(patient.prompt(3), 2000)
    async with asyncio.timeout(ANSWER_WAIT_S):
        await anext(aiter(result))
    result.abort()
    reason = await patient.answers_abort(result)
    return expected(reason == "cancelled"), f"{reason or 'nothing'}, with {len(result.outputs[0].token_ids)} tokens"


async def abort_in_prefill(patient: Patient) -> tuple[Verdict, str]:
    """Does an abort before the first token end it as cancelled, or stay unanswered?"""
    result = patient.start(patient.prompt(4, patient.limits.context_window_tokens - 50), 20)
    result.abort()
    reason = await patient.answers_abort(result)
    return expected(reason in ("cancelled", None)), reason or "nothing"


async def abort_in_queue(patient: Patient) -> tuple[Verdict, str]:
    """Does an abort behind a full batch stay unanswered?"""
    crowd = [patient.start(patient.prompt(10 + index, 20), 500) for index in range(patient.limits.running_sequence_count_max + 16)]
    crowd[-1].abort()
    reason = await patient.answers_abort(crowd[-1])
    await patient.read()
    queued = {name: patient.statistics.get(name) for name in ("numQueuedRequests", "numActiveRequests")}
    for result in crowd[:-1]:
        result.abort()
    for result in crowd[:-1]:
        await patient.answers_abort(result)
    return expected(reason is None), f"{reason or 'nothing'}; meanwhile {queued}"


async def serves_afterwards(patient: Patient) -> tuple[Verdict, str]:
    """Does the engine serve requests after the aborts, with its blocks free?"""
    await patient.finish(patient.start(patient.prompt(5), 5))
    await patient.read()
    used = (patient.statistics.get("kvCacheStats") or {}).get("usedNumBlocks")
    return needed(True), f"yes; blocks in use: {used}"


async def log_probabilities(patient: Patient) -> tuple[Verdict, str]:
    """Does every token come with its own log-probability?"""
    output = await patient.finish(patient.start(patient.prompt(6), 8, sampling=SamplingParams(top_logprobs=3)))
    complete = len(output.logprobs) == len(output.token_ids)
    chosen = complete and all(token in known for token, known in zip(output.token_ids, output.logprobs, strict=True))
    return needed(bool(chosen)), (
        f"{len(output.logprobs)} for {len(output.token_ids)} tokens, the chosen one {'in' if chosen else 'not in'} them"
    )


async def guided_decoding(patient: Patient) -> tuple[Verdict, str]:
    """Does it accept the response formats?"""
    formats = (*FORMATS, ResponseFormat(GrammarKind.LARK, "start: /[0-9]/ /[0-9]/"))
    return await accepted(formats, lambda wanted: patient.finish(patient.start(patient.prompt(7), 40, response_format=wanted)))


async def statistics(patient: Patient) -> tuple[Verdict, str]:
    """Does it report the statistics that the adapter reads?"""
    await patient.finish(patient.start(patient.prompt(8), 5))
    await patient.read()
    missing = EXPECTED_STATISTICS - set(patient.statistics)
    blocks = patient.statistics.get("kvCacheStats") or {}
    known = {"maxNumBlocks", "tokensPerBlock"} <= set(blocks)
    return needed(known), f"missing: {', '.join(sorted(missing)) or 'nothing'}; blocks {blocks}"


async def cache_events(patient: Patient) -> tuple[Verdict, str]:
    """Does it report cache events, numbered without a gap?"""
    ids = [event["event_id"] for event in patient.events]
    kinds = sorted({event["data"]["type"] for event in patient.events})
    gaps = sum(later != earlier + 1 for earlier, later in itertools.pairwise(ids))
    return expected(bool(ids) and not gaps), f"{len(ids)} events of types {', '.join(kinds) or 'none'}, {gaps} gaps"


async def dead_worker(patient: Patient) -> tuple[Verdict, str]:
    """After a worker process is killed, do its sequence and the library's health check stay silent?"""
    if not patient.workers:
        return Verdict.OTHER, "there is no worker process: the engine runs in this one"
    result = patient.start(patient.prompt(9), 2000)
    async with asyncio.timeout(ANSWER_WAIT_S):
        await anext(aiter(result))
    os.kill(patient.workers[-1], signal.SIGKILL)
    began_s = time.monotonic()
    try:
        reason = await patient.answers_abort(result)
        seen = "silence" if reason is None else f"the end: {reason}"
    except Exception as error:  # an error is an answer too
        seen = repr(error)
    healthy = patient.llm._check_health()
    return expected(seen == "silence" and healthy), f"{seen} for {time.monotonic() - began_s:.1f} s; _check_health() is {healthy}"


QUESTIONS: tuple[Question, ...] = (
    interface,
    end_tokens,
    cached_tokens,
    abort_while_running,
    abort_in_prefill,
    abort_in_queue,
    serves_afterwards,
    log_probabilities,
    guided_decoding,
    statistics,
    cache_events,
    dead_worker,
)


def examine(directory: str, vocabulary_size: int, limits: EngineLimits, options: TensorRtOptions) -> list[Observation]:
    """Build an engine, ask all questions, shut it down. Raises: EngineStartFailed."""
    library = TensorRtLibrary()
    before = set(descendants(os.getpid()))
    began_s = time.monotonic()
    llm = library.build(directory, limits, options)
    workers = [pid for pid in descendants(os.getpid()) if pid not in before]
    found = [Observation("How long does it take to start?", Verdict.EXPECTED, f"{time.monotonic() - began_s:.1f} s")]
    found += asyncio.run(ask_all(QUESTIONS, Patient(library, llm, limits, vocabulary_size, workers)))
    began_s = time.monotonic()
    llm.shutdown()
    found.append(Observation("How long does its shutdown take?", Verdict.EXPECTED, f"{time.monotonic() - began_s:.1f} s"))
    return found
