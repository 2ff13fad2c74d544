"""Examination of a server by its documentation: one connection, and a list of questions."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable
from dataclasses import replace

import grpc

from inference.adapters.external_request import Choice, Output, Request
from inference.adapters.remote_connection import DIALECTS, open_dialect
from inference.adapters.remote_dialects import Dialect, ServerUnfit, quoted
from inference.adapters.remote_examination import Examination
from inference.adapters.remote_files import check_tokenizer, is_unanswered
from inference.adapters.remote_settings import RemoteSettings
from inference.checkpoint.checkpoint import read_external_model
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
from inference.engine import GenerationRequest, ModelInfo, SamplingParams, StopCriteria
from inference.errors import EngineError
from inference.sequences import RequestField
from inference.text.tokenizer import Tokenizer

SILENCE_S = 5.0  # seconds after which a missing answer counts as none
LONG = 400  # output tokens: long enough to abort in the middle


class Patient(Examination):
    """A server under examination. `ends` are the end tokens of the model."""

    def __init__(
        self, dialect: Dialect, settings: RemoteSettings, model: ModelInfo, ends: frozenset[int]
    ) -> None:
        """Load the local tokenizer. Raises CheckpointInvalid if that fails."""
        known = Tokenizer(settings.directory)
        super().__init__(dialect, settings, model, known.decoder)
        self.ends = ends | known.end_token_ids

    def request(self, output_token_count: int, *, salt: str = "") -> GenerationRequest:
        """Build a greedy request with a random prompt."""
        stop = StopCriteria(output_token_count, ignore_eos=True)
        return GenerationRequest(self.probe_prompt(), SamplingParams(), stop, salt)


async def health(patient: Patient) -> tuple[Verdict, str]:
    """Does the server report itself healthy?"""
    fault = await patient.dialect.health_fault()
    return needed(fault is None), fault or "yes"


async def model_facts(patient: Patient) -> tuple[Verdict, str]:
    """Does it serve the checkpoint's model, with at least its context window?"""
    facts = await patient.dialect.facts()
    try:
        patient.fitting(facts)
    except ServerUnfit as error:
        return Verdict.BAD, str(error)
    unknown = [
        name
        for name in ("vocabulary_size", "context_window_tokens", "running_sequence_count_max")
        if not getattr(facts, name)
    ]
    seen = f"{facts.model}, {facts.version}; not reported: {', '.join(unknown) or 'nothing'}"
    return expected(not unknown), seen


async def request_fields(patient: Patient) -> tuple[Verdict, str]:
    """Which request fields does it support?"""
    try:
        found = await patient.dialect.probe(patient.model.vocabulary_size)
    except ServerUnfit as error:
        return Verdict.BAD, str(error)
    missing = sorted(found.unsupported - patient.model.capabilities.unsupported)
    seen = f"all but {', '.join(missing)}" if missing else "all"
    if found.counts_from_usage:
        seen += "; no token ids: outputs are counted from its usage"
    return expected(not missing and not found.counts_from_usage), seen


async def tokenizer(patient: Patient) -> tuple[Verdict, str]:
    """Is its tokenizer the local one?"""
    try:
        files = await patient.tokenizer_files()
        check_tokenizer(files, patient.settings.directory)
    except ServerUnfit as error:
        return Verdict.BAD, str(error)
    except grpc.aio.AioRpcError as error:
        if not is_unanswered(error):
            raise
        return Verdict.OTHER, f"not provided: {error.code().name}"
    return Verdict.EXPECTED, f"yes; it sends {', '.join(sorted(files))}"


async def repeats(patient: Patient) -> tuple[Verdict, str]:
    """Does it generate the requested number of tokens, and the same ones twice?"""
    request = patient.request(16)
    first, second = [(await patient.run(request))[0] for _ in range(2)]
    if len(first.token_ids) != 16 or first.finish_reason != "length":
        return Verdict.BAD, f"{len(first.token_ids)} tokens of 16, ended by {first.finish_reason}"
    same = first.token_ids == second.token_ids
    return expected(same), f"16 tokens, the second time {'the same' if same else 'others'}"


async def end_tokens(patient: Patient) -> tuple[Verdict, str]:
    """Is the token that ends an output in it?"""
    if RequestField.STOP_TOKEN_IDS in patient.dialect.capabilities.unsupported:
        return Verdict.OTHER, "not tested: it does not support stop_token_ids"
    request = patient.request(12)
    free = (await patient.run(request))[0].token_ids
    ends = patient.ends | {free[5]}  # the model's own end token may come earlier
    ended = (
        await patient.run(replace(request, stop=replace(request.stop, ignore_eos=False)), ends)
    )[0]
    first = next(index for index, token_id in enumerate(free) if token_id in ends)
    listed = ended.token_ids[-1:] == free[first : first + 1]
    right = ended.finish_reason == "stop" and len(ended.token_ids) in (first, first + 1)
    seen = (
        f"{len(ended.token_ids)} tokens of {first + 1}, ended by {ended.finish_reason};"
        f" {'listed' if listed else 'cut'}"
    )
    return needed(right), seen


async def cached_tokens(patient: Patient) -> tuple[Verdict, str]:
    """Does it cache prompts, separated by salt?"""
    name = uuid.uuid4().hex
    request = patient.request(1, salt=f"{name}-a")
    # A router may send each of the first ones to another worker.
    others = [f"{name}-{index}" for index in range(1, patient.dialect.salt_count)]
    cold, again, *shared = [
        (await patient.run(replace(request, cache_salt=salt)))[1]
        for salt in (f"{name}-a", f"{name}-a", *others)
    ]
    seen = f"cold {cold}, again {again}, under another salt {max(shared)}"
    if max(shared) and not patient.settings.share_prefixes:
        return Verdict.BAD, f"{seen}: prefixes of one tenant serve others"
    return expected(not cold and again < len(request.prompt_token_ids)), seen


async def abort(patient: Patient) -> tuple[Verdict, str]:
    """Does an abort during the output end it as cancelled?"""
    request_id = f"weir-doctor-{uuid.uuid4().hex}"
    choice = Choice(
        Request(0, patient.request(LONG), frozenset(), 0.0, None), 0, 0, patient.decoder.open()
    )
    call = patient.dialect.generate(request_id, choice)
    output = Output()
    try:
        async for message in call:
            begun = bool(output.token_ids)
            patient.dialect.take(message, choice, output)
            if output.token_ids and not begun:
                await patient.dialect.abort(request_id, call)
                break
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(SILENCE_S):
                async for message in call:
                    patient.dialect.take(message, choice, output)
    finally:
        call.cancel()
    seen = f"{output.finish_reason or 'silence'} after {len(output.token_ids)} tokens of {LONG}"
    return expected(output.finish_reason == "cancelled"), seen


async def serves_afterwards(patient: Patient) -> tuple[Verdict, str]:
    """Does it serve requests after the abort?"""
    output, _ = await patient.run(patient.request(5))
    return needed(len(output.token_ids) == 5), f"{len(output.token_ids)} tokens of 5"


async def log_probabilities(patient: Patient) -> tuple[Verdict, str]:
    """Does every token come with its log-probability and the most likely tokens?"""
    if RequestField.TOP_LOGPROBS in patient.dialect.capabilities.unsupported:
        return Verdict.OTHER, "no: it does not support top_logprobs"
    output, _ = await patient.run(
        replace(patient.request(8), sampling=SamplingParams(top_logprobs=3))
    )
    pairs = list(zip(output.token_ids, output.logprobs, strict=False))
    complete = len(pairs) == 8 and all(
        token_id in known and len(known) >= 3 for token_id, known in pairs
    )
    return needed(complete), f"{len(output.logprobs)} for {len(output.token_ids)} tokens"


async def sampled_log_probabilities(patient: Patient) -> tuple[Verdict, str]:
    """Does every sampled token come with its log-probability, as declared?"""
    declared = patient.dialect.capabilities
    if RequestField.TOP_LOGPROBS in declared.unsupported:
        return Verdict.EXPECTED, "not asked: Weir refuses log-probabilities on this server"
    sampling = SamplingParams(temperature=2.0, top_logprobs=1)
    output, _ = await patient.run(replace(patient.request(32), sampling=sampling))
    pairs = list(zip(output.token_ids, output.logprobs, strict=False))
    missing = 32 - sum(token_id in known for token_id, known in pairs)
    if missing and declared.sampled_logprobs:
        return Verdict.BAD, f"missing for {missing} of 32 tokens"
    return expected(bool(missing) != declared.sampled_logprobs), f"missing for {missing} of 32"


async def biased_logits(patient: Patient) -> tuple[Verdict, str]:
    """Does a logit bias choose the token, as declared?"""
    request = patient.request(4)
    chosen = request.prompt_token_ids[0]
    declared = RequestField.LOGIT_BIAS not in patient.dialect.capabilities.unsupported
    try:
        sampling = SamplingParams(logit_bias=((chosen, 100.0),))
        output, _ = await patient.run(replace(request, sampling=sampling))
        works, seen = output.token_ids == [chosen] * 4, f"{output.token_ids.count(chosen)} of 4"
    except (EngineError, grpc.aio.AioRpcError) as error:
        works, seen = False, repr(error)
    if declared and not works:
        return Verdict.BAD, seen
    return expected(works == declared), seen if declared else f"{seen}; Weir refuses the field"


async def stop_id_beside_ignore_eos(patient: Patient) -> tuple[Verdict, str]:
    """Does a stop id end an output with `ignore_eos`?"""
    request = patient.request(12)
    free = (await patient.run(request))[0].token_ids
    if not free:
        return Verdict.OTHER, "not asked: the server sends no token ids"
    ended = (await patient.run(request, frozenset({free[5]})))[0]
    right = ended.finish_reason == "stop" and len(ended.token_ids) <= free.index(free[5]) + 1
    return expected(right), f"{len(ended.token_ids)} tokens, ended by {ended.finish_reason}"


async def guided_decoding(patient: Patient) -> tuple[Verdict, str]:
    """Does it accept the response formats?"""
    request = replace(patient.request(40), stop=StopCriteria(40))
    return await accepted(
        FORMATS, lambda wanted: patient.run(replace(request, response_format=wanted), patient.ends)
    )


async def loads(patient: Patient) -> tuple[Verdict, str]:
    """Does it report its load?"""
    try:
        load = await patient.dialect.load(16)
    except grpc.aio.AioRpcError as error:
        return Verdict.OTHER, f"no: {error.code().name}"
    held_count, total = load.kv_block_count_held, load.kv_block_count_total
    return expected(total > 0), f"{held_count} of {total} blocks are in use"


async def cache_events(patient: Patient) -> tuple[Verdict, str]:
    """Does it publish cache events?"""
    batches: list[int] = []

    async def listen() -> None:
        async for batch in patient.dialect.kv_batches():
            batches.append(batch.sequence_number)
            return

    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(_answer_of(listen()))
        # A publisher may not have registered its subscriber when the first blocks come.
        for _ in range(round(SILENCE_S / 0.5)):
            await patient.run(patient.request(2))
            if (await asyncio.wait([listening], timeout=0.5))[0]:
                break
        listening.cancel()
    refused = listening.result() if listening.done() and not listening.cancelled() else ""
    return expected(bool(batches)), refused or (
        f"yes, from number {batches[0]}" if batches else "nothing came"
    )


async def _answer_of(listening: Awaitable[None]) -> str:
    try:
        await listening
    except grpc.aio.AioRpcError as error:
        return f"no: {error.code().name}: {quoted(error.details())}"
    return ""


QUESTIONS: tuple[Question[Patient], ...] = (
    health,
    model_facts,
    request_fields,
    tokenizer,
    repeats,
    end_tokens,
    cached_tokens,
    abort,
    serves_afterwards,
    log_probabilities,
    sampled_log_probabilities,
    biased_logits,
    stop_id_beside_ignore_eos,
    guided_decoding,
    loads,
    cache_events,
)


async def examine(settings: RemoteSettings) -> list[Observation]:
    """Connect, ask all questions, disconnect. Raises: CheckpointInvalid, ServerUnfit."""
    model, ends = read_external_model(
        settings.directory,
        name=settings.name,
        engine="remote",
        context_window_tokens_max=settings.context_window_tokens_max,
        capabilities=DIALECTS[settings.target.service].capabilities,
    )
    async with open_dialect(settings) as dialect:
        return await ask_all(QUESTIONS, Patient(dialect, settings, model, ends))
