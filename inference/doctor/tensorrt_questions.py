"""Questions to a TensorRT-LLM engine on a GPU machine, an observation each, in a child process:
`python -m inference.doctor.tensorrt_questions --fd N`. `tensorrt.py` starts it.

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
import socket
import statistics as figures
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import PurePath
from typing import Any

from common.processes import command_line, descendants
from inference.adapters.tensorrt_adapters import EFFECTIVE
from inference.adapters.tensorrt_library import TensorRtLibrary, ranks
from inference.adapters.tensorrt_settings import LoadTensorRt
from inference.adapters.tensorrt_worker import kill_workers
from inference.doctor.findings import (
    FORMATS,
    Observation,
    Question,
    Verdict,
    accepted,
    ask_all,
    expected,
    needed,
)
from inference.engine import (
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
    StopCriteria,
)
from inference.errors import EngineStartFailed
from inference.limits import EngineLimits
from inference.workers.child import EXIT_LOAD_FAILED, EXIT_PROTOCOL_BROKEN, Inbox, serve_parent
from inference.workers.protocol import LoadFailed, Message, decoder_to_worker, encode

ANSWER_WAIT_S = 60.0  # a GPU that compiles kernels answers late
SILENCE_S = 3.0  # seconds after which a missing answer counts as none
HELPERS_END_S = 90.0  # idle time after which the library's compilers have ended
SUBMIT_US_MAX = 1000.0  # a submission blocks the event loop, and all other sequences with it
SUBMISSION_COUNT = 50
PACKAGES = ("tensorrt_llm", "torch", "transformers", "tokenizers", "mpi4py", "xgrammar")
EXPECTED_STATISTICS = frozenset(
    {"iter", "kvCacheStats", "inflightBatchingStats", "numActiveRequests", "numQueuedRequests"}
)
# arguments that the adapter passes
SUBMITTED = frozenset({"inputs", "sampling_params", "streaming", "cache_salt"})


@dataclass(slots=True)
class Patient:
    """Engine under test, with the ids of the processes it needs and the names of its adapters."""

    library: TensorRtLibrary
    llm: Any
    limits: EngineLimits
    vocabulary_size: int
    workers: list[int]
    adapters: tuple[str, ...] = ()
    statistics: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def prompt(self, seed: int, token_count: int = 200) -> tuple[int, ...]:
        """Draw random ids from the middle of the vocabulary, where there are no special tokens."""
        low = self.vocabulary_size // 4
        return tuple(
            low + (seed * 7919 + index * 104_729) % (self.vocabulary_size // 2)
            for index in range(token_count)
        )

    def start(
        self,
        prompt: tuple[int, ...],
        output_token_count: int,
        *,
        ends: frozenset[int] = frozenset(),
        salt: str = "",
        library_values: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Any:
        """Submit a greedy request and return the library's result object.

        `library_values` are fields of `SamplingParams` in addition to those that the adapter sets.
        """
        stop = StopCriteria(output_token_count, ignore_eos=not changes.get("response_format"))
        request = GenerationRequest(
            prompt, changes.pop("sampling", SamplingParams()), stop, salt, **changes
        )
        values = self.library.sampling(request, ends, self.vocabulary_size)
        for name, value in (library_values or {}).items():
            setattr(values, name, value)
        return self.library.submit(self.llm, request, values)

    async def output(self, *values: Any, **named: Any) -> Any:
        """Run a request to its end and return the output. The parameters are those of `start`."""
        return await self.finish(self.start(*values, **named))

    async def tokens(self, *values: Any, **named: Any) -> list[int]:
        """Run a request and return the output's tokens. The parameters are those of `start`."""
        return list((await self.output(*values, **named)).token_ids)

    async def finish(self, result: Any) -> Any:
        """Wait for the end of an output and return it. Raises TimeoutError."""
        async with asyncio.timeout(ANSWER_WAIT_S):
            async for _ in result:
                pass
        return result.outputs[0]

    async def answers_abort(self, result: Any) -> str | None:
        """Wait for the answer to an abort; return its finish reason, None if there is no answer."""
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
        async for event in self.llm.get_kv_cache_events_async(0.3):
            self.events += event if isinstance(event, list) else [event]


async def interface(patient: Patient) -> tuple[Verdict, str]:
    """Does `generate_async` accept the adapter's arguments?"""
    missing = SUBMITTED - set(inspect.signature(type(patient.llm).generate_async).parameters)
    return needed(not missing), f"missing: {', '.join(sorted(missing)) or 'nothing'}"


async def versions(patient: Patient) -> tuple[Verdict, str]:
    """Which packages are installed?"""
    found = [f"python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} not found")
    return Verdict.EXPECTED, ", ".join(found)


async def account(patient: Patient) -> tuple[Verdict, str]:
    """Does MPI start its processes under this account?"""
    if os.geteuid():
        return Verdict.EXPECTED, "yes; not root"
    allowed = "OMPI_ALLOW_RUN_AS_ROOT" in os.environ
    return Verdict.EXPECTED, f"yes; root, OMPI_ALLOW_RUN_AS_ROOT is {'' if allowed else 'not '}set"


async def context_window(patient: Patient) -> tuple[Verdict, str]:
    """Does the KV cache hold a full context window?"""
    await patient.output(patient.prompt(17), 2)
    await patient.read()
    blocks = patient.statistics.get("kvCacheStats") or {}
    tokens = blocks.get("maxNumBlocks", 0) * blocks.get("tokensPerBlock", 0)
    window = patient.limits.context_window_tokens
    return needed(tokens >= window), f"{tokens} tokens; the window has {window}"


async def submit_time(patient: Patient) -> tuple[Verdict, str]:
    """Does a submission return at once?"""
    prompt, took_us, results = patient.prompt(18), [], []
    for _ in range(SUBMISSION_COUNT):
        began_s = time.perf_counter()
        results.append(patient.start(prompt, 1))
        took_us.append((time.perf_counter() - began_s) * 1e6)
        await asyncio.sleep(0)
    for result in results:
        await patient.finish(result)
    median, longest = figures.median(took_us), max(took_us)
    return expected(median < SUBMIT_US_MAX), f"median {median:.0f} µs, longest {longest:.0f} µs"


def program(pid: int) -> str:
    """Name the program of a process and its module, without paths and other arguments."""
    words = command_line(pid).split()
    module = words[words.index("-m") + 1 : words.index("-m") + 2] if "-m" in words else []
    return " ".join([PurePath(words[0]).name, *module]) if words else "ended"


async def processes(patient: Patient) -> tuple[Verdict, str]:
    """Do the processes that the engine needs, and no others, live on when it is idle?"""
    now = {pid: program(pid) for pid in descendants(os.getpid())}
    await asyncio.sleep(HELPERS_END_S)
    later = set(descendants(os.getpid()))
    ended = [name for pid, name in now.items() if pid not in later]
    lost = [pid for pid in patient.workers if pid not in later]
    seen = f"now: {', '.join(now.values()) or 'none'}; needed: {len(patient.workers)};"
    return needed(not lost), f"{seen} ended after {HELPERS_END_S:g} s: {', '.join(ended) or 'none'}"


async def end_tokens(patient: Patient) -> tuple[Verdict, str]:
    """Is the token that ends an output in its list?"""
    prompt = patient.prompt(1)
    free = await patient.tokens(prompt, 12)
    first, second = free[5], free[8]
    as_end = await patient.tokens(prompt, 12, ends=frozenset({first}))
    both = await patient.output(prompt, 12, ends=frozenset({first, second}))
    listed = [
        name
        for name, ids in (("end id", as_end), ("stop id", list(both.token_ids)))
        if ids and ids[-1] in (first, second)
    ]
    right = len(as_end) in (free.index(first), free.index(first) + 1)
    seen = (
        f"listed: {', '.join(listed) or 'neither'}; stop_reason {both.stop_reason!r}; {len(as_end)}"
        f" of {len(free)} tokens"
    )
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
    seen = f"{reason or 'nothing'}, with {len(result.outputs[0].token_ids)} tokens"
    return expected(reason == "cancelled"), seen


async def abort_in_prefill(patient: Patient) -> tuple[Verdict, str]:
    """Does an abort before the first token end it as cancelled, or stay unanswered?"""
    result = patient.start(patient.prompt(4, patient.limits.context_window_tokens - 50), 20)
    result.abort()
    reason = await patient.answers_abort(result)
    return expected(reason in ("cancelled", None)), reason or "nothing"


async def abort_in_queue(patient: Patient) -> tuple[Verdict, str]:
    """Does an abort behind a full batch stay unanswered?"""
    crowd = [
        patient.start(patient.prompt(10 + index, 20), 500)
        for index in range(patient.limits.running_sequence_count_max + 16)
    ]
    crowd[-1].abort()
    reason = await patient.answers_abort(crowd[-1])
    await patient.read()
    queued = {
        name: patient.statistics.get(name) for name in ("numQueuedRequests", "numActiveRequests")
    }
    for result in crowd[:-1]:
        result.abort()
    for result in crowd[:-1]:
        await patient.answers_abort(result)
    return expected(reason is None), f"{reason or 'nothing'}; meanwhile {queued}"


async def serves_afterwards(patient: Patient) -> tuple[Verdict, str]:
    """Does the engine serve requests after the aborts, with its blocks free?"""
    await patient.output(patient.prompt(5), 5)
    await patient.read()
    used = (patient.statistics.get("kvCacheStats") or {}).get("usedNumBlocks")
    return needed(True), f"yes; blocks in use: {used}"


async def log_probabilities(patient: Patient) -> tuple[Verdict, str]:
    """Does every token come with its own log-probability?"""
    sampling = SamplingParams(top_logprobs=3)
    output = await patient.output(patient.prompt(6), 8, sampling=sampling)
    counts = len(output.logprobs), len(output.token_ids)
    pairs = zip(output.token_ids, output.logprobs, strict=False)
    chosen = counts[0] == counts[1] and all(token in known for token, known in pairs)
    seen = f"{counts[0]} for {counts[1]} tokens, the chosen one {'in' if chosen else 'not in'} them"
    return needed(chosen), seen


async def sampled_log_probabilities(patient: Patient) -> tuple[Verdict, str]:
    """May a sampled token lack its log-probability, as in release 1.2.1?"""
    sampling = SamplingParams(temperature=2.0, top_logprobs=1)
    output = await patient.output(patient.prompt(11), 32, sampling=sampling)
    missing = sum(
        token not in known for token, known in zip(output.token_ids, output.logprobs, strict=False)
    )
    return expected(missing > 0), f"missing for {missing} of {len(output.token_ids)} tokens"


async def penalties(patient: Patient) -> tuple[Verdict, str]:
    """Are penalties and `min_p` without effect, as in release 1.2.1?"""
    prompt = patient.prompt(12, 1) * 32
    plain = await patient.tokens(prompt, 24)
    effective = [
        name
        for name, value in (
            ("repetition_penalty", 2.0),
            ("presence_penalty", 2.0),
            ("frequency_penalty", 2.0),
        )
        if await patient.tokens(prompt, 24, library_values={name: value}) != plain
    ]
    # a token must be as likely as the most likely one: greedy decoding
    hot = SamplingParams(temperature=2.0)
    if await patient.tokens(prompt, 24, sampling=hot, library_values={"min_p": 1.0}) == plain:
        effective.append("min_p")
    return expected(not effective), f"with effect: {', '.join(effective) or 'none'}"


async def seeds(patient: Patient) -> tuple[Verdict, str]:
    """Are seeds without effect, as in release 1.2.1?"""
    sampling, seed = SamplingParams(temperature=2.0), {"seed": 5}
    first, second = [
        await patient.tokens(patient.prompt(13), 24, sampling=sampling, library_values=seed)
        for _ in range(2)
    ]
    return expected(first != second), "the same tokens" if first == second else "other tokens"


async def minimum_output(patient: Patient) -> tuple[Verdict, str]:
    """May an output with two end tokens be shorter than `min_tokens`, as in release 1.2.1?"""
    prompt = patient.prompt(1)
    free = await patient.tokens(prompt, 12)
    ends = frozenset({free[3], free[5]})
    ended = await patient.tokens(prompt, 12, ends=ends, library_values={"min_tokens": 10})
    return expected(len(ended) < 10), f"{len(ended)} tokens instead of at least 10"


async def lora_adapters(patient: Patient) -> tuple[Verdict, str]:
    """Do LoRA adapters change the output?"""
    if not patient.adapters:
        return Verdict.EXPECTED, "not asked: --lora names no adapter"
    async with asyncio.timeout(ANSWER_WAIT_S * (len(patient.adapters) + 2)):
        once, outputs = [
            await patient.library.adapted_outputs(patient.llm, patient.vocabulary_size, names)
            for names in ([""], ["", *patient.adapters])
        ]
    base = outputs.pop("")
    if once[""] != base:
        return Verdict.OTHER, "not known: the same request without an adapter varies"
    if ignored := [output for output in outputs.values() if output == base]:
        return Verdict.OTHER, f"no: the base model answers for {len(ignored)} of {len(outputs)}"
    if any(one == other for one, other in itertools.combinations(outputs.values(), 2)):
        return Verdict.OTHER, "no: different adapters give the same output"
    return Verdict.EXPECTED, EFFECTIVE


async def biased_logits(patient: Patient) -> tuple[Verdict, str]:
    """Does a logit bias choose the token?"""
    chosen = patient.prompt(14, 1)[0]
    sampling = SamplingParams(logit_bias=((chosen, 100.0),))
    found = await patient.tokens(patient.prompt(15), 4, sampling=sampling)
    return needed(found == [chosen] * 4), f"{found.count(chosen)} of {len(found)} tokens"


async def invalid_token(patient: Patient) -> tuple[Verdict, str]:
    """Is a token id out of range refused, and the engine unharmed?"""
    try:
        tokens = await patient.tokens((patient.vocabulary_size + 1000,), 2)
        seen = f"accepted, {len(tokens)} tokens"
    except Exception as error:  # a refusal of any type
        seen = repr(error)
    await patient.output(patient.prompt(16), 2)
    return expected(not seen.startswith("accepted")), seen


async def guided_decoding(patient: Patient) -> tuple[Verdict, str]:
    """Does it accept the response formats?"""
    formats = (*FORMATS, ResponseFormat(GrammarKind.LARK, "start: /[0-9]/ /[0-9]/"))
    return await accepted(
        formats,
        lambda wanted: patient.output(patient.prompt(7), 40, response_format=wanted),
    )


async def statistics(patient: Patient) -> tuple[Verdict, str]:
    """Does it report the statistics that the adapter reads?"""
    await patient.output(patient.prompt(8), 5)
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
    seen = f"{len(ids)} events of types {', '.join(kinds) or 'none'}, {gaps} gaps"
    return expected(bool(ids) and not gaps), seen


async def dead_worker(patient: Patient) -> tuple[Verdict, str]:
    """After a worker's death, do its sequence and the library's health check stay silent?"""
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
    return (
        expected(seen == "silence" and healthy),
        f"{seen} for {time.monotonic() - began_s:.1f} s; _check_health() is {healthy}",
    )


QUESTIONS: tuple[Question[Patient], ...] = (
    interface,
    versions,
    account,
    context_window,
    end_tokens,
    cached_tokens,
    abort_while_running,
    abort_in_prefill,
    abort_in_queue,
    serves_afterwards,
    log_probabilities,
    sampled_log_probabilities,
    penalties,
    seeds,
    minimum_output,
    biased_logits,
    lora_adapters,
    invalid_token,
    guided_decoding,
    statistics,
    cache_events,
    submit_time,
    processes,
    dead_worker,
)


def ask(load: LoadTensorRt, observe: Callable[[Observation], None]) -> None:
    """Build an engine, ask all questions, and shut it down. Each observation goes to `observe`.

    Raises EngineStartFailed if the engine cannot be built.
    """
    library = TensorRtLibrary()
    began_s = time.monotonic()
    llm = library.build(load.directory, load.limits, load.options, load.adapters)
    took = f"{time.monotonic() - began_s:.1f} s"
    observe(Observation("How long does it take to start?", Verdict.EXPECTED, took))
    names = tuple(each.name for each in load.adapters)
    patient = Patient(library, llm, load.limits, load.vocabulary_size, ranks(), names)
    asyncio.run(ask_all(QUESTIONS, patient, observe))
    began_s = time.monotonic()
    llm.shutdown()
    took = f"{time.monotonic() - began_s:.1f} s"
    observe(Observation("How long does its shutdown take?", Verdict.EXPECTED, took))


class Observed(Message, tag="observed", frozen=True):
    """Message from the child process to the doctor: one observation."""

    observation: Observation


def examine(connection: socket.socket) -> int:
    """Ask all questions of the engine that the first message describes; return the exit status."""
    inbox: Inbox[Message] = Inbox(connection, decoder_to_worker(LoadTensorRt), kill_workers)
    load = inbox.wait()
    if not isinstance(load, LoadTensorRt):
        return EXIT_PROTOCOL_BROKEN
    try:
        ask(load, lambda each: connection.sendall(encode(Observed(each))))
    except EngineStartFailed as error:
        connection.sendall(encode(LoadFailed(str(error))))
        return EXIT_LOAD_FAILED
    kill_workers()
    return 0


if __name__ == "__main__":
    # Not sys.exit: the library's exit handlers have hung.
    status = serve_parent("inference.doctor.tensorrt_questions", examine)
    sys.stderr.flush()
    os._exit(status)
