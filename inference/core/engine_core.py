"""Engine core without process or I/O: sequences in, events out, one step at a time.

One step is `Scheduler.schedule`, `ModelRunner.run`, `Scheduler.commit`, then appending the new
tokens. The worker runs it in a child process; tests run it directly.

`StepPace` limits the prompt tokens of a step while other streams decode. A fixed limit does not fit
all models: 512 prompt tokens take 0.1 s with 100 million parameters and over a second with ten
times as many, and every running stream pauses meanwhile. So the limit is estimated from the
measured steps.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from inference.checkpoint.checkpoint import read_config
from inference.checkpoint.rope import rotation_switch_tokens
from inference.core.kv_cache import BlockPool
from inference.core.model_runner import ModelRunner
from inference.core.options import EngineOptions
from inference.core.prompt_lookup import PromptLookup
from inference.core.scheduler import Scheduler
from inference.core.sequence import Sequence
from inference.core.simulated_runner import SimulatedRunner
from inference.engine import (
    ChoiceFinished,
    EngineFinishReason,
    EngineStatistics,
    GenerationRequest,
    Scheduled,
    SequenceEvent,
    SequenceRefused,
    ThinkingStart,
    TokensGenerated,
)
from inference.errors import CheckpointInvalid
from inference.limits import request_fault
from inference.sampling.grammar import AfterThinking, Grammar, GrammarCompiler
from inference.sampling.sampler import Candidates, Chosen
from inference.sequences import choice_seed
from inference.text.detokenizer import NOTHING, Detokenizer
from inference.text.reasoning import Split
from inference.text.tokenizer import Tokenizer

# seconds: steps of a model take longer; those of a simulation without delays do not
CHECK_INTERVAL_S = 0.01
# weight of the newest step: an outlier changes the estimate by a fifth, for about ten steps
SMOOTHING = 0.2
# tokens: smaller chunks read all weights for little work and slow prompts down
PROMPT_TOKENS_MIN = 64


@dataclass(slots=True)
class Choices:
    """Sequences of one request: `running` ones, and the finish reasons of ended ones by index.

    `scores` are the candidates of scored sequences by index.
    """

    first: Sequence
    running: list[Sequence]
    ends: dict[int, EngineFinishReason] = field(default_factory=dict)
    generated_token_count: int = 0
    scores: dict[int, Candidates] = field(default_factory=dict)


NumberedEvent = tuple[int, SequenceEvent | SequenceRefused]


class EngineCore:
    """Scheduler, runner and sequences of one model. Not thread-safe: one thread makes all calls.

    `scheduler` and `pool` are public for checks only. `grammars` can compile grammars outside the
    step loop; `add` compiles those that are missing. The next `step` returns `events`.
    """

    def __init__(
        self,
        options: EngineOptions,
        on_progress: Callable[[float], None] = lambda fraction: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Load the checkpoint, calling `on_progress` with 0 to 1. Tests replace `clock` and
        `sleep`, both in seconds, to simulate time.

        Raises CheckpointInvalid, or EngineStartFailed if the device is missing.
        """
        self.clock = clock
        directory = Path(options.directory)
        config, tokenizer = read_config(directory), Tokenizer(directory)
        self._decoder = tokenizer.decoder
        tokenizer.check_fits(config.vocabulary_size)
        self._model_end_token_ids = config.end_token_ids | tokenizer.end_token_ids
        if not self._model_end_token_ids:
            raise CheckpointInvalid(
                str(directory / "generation_config.json"),
                "no end token: neither config.json nor this file has eos_token_id, and neither"
                " tokenizer_config.json nor the chat template names one; add eos_token_id",
            )
        self._rotation_switch_tokens = rotation_switch_tokens(
            config.rope, options.limits.context_window_tokens
        )
        self.grammars = GrammarCompiler(
            directory / "tokenizer.json", config.vocabulary_size, self._model_end_token_ids
        )
        self._runner: ModelRunner | SimulatedRunner
        if options.simulation is None:
            self._runner = ModelRunner(options, config, on_progress)
            block_count = self._runner.block_count
        else:
            self._runner = SimulatedRunner(options.simulation, tokenizer, clock=clock, sleep=sleep)
            block_count = options.block_count(config)
        self.pool = BlockPool(block_count)
        self._limits = options.limits
        # Returns why a request can never run, or None; to be called before `add`.
        self.request_fault = partial(
            request_fault,
            limits=options.limits,
            vocabulary_size=config.vocabulary_size,
            block_count=self.pool.block_count_total,
        )
        self.scheduler = Scheduler(self.pool, options.limits)
        self._pace = StepPace(options.limits.step_time_target_s)
        # Longrope changes all positions at some length, which may be within a draft.
        may_draft = self._runner.verifies_drafts and self._rotation_switch_tokens is None
        self._lookup = PromptLookup(options.draft_token_count_max if may_draft else 0)
        self._requests: dict[int, Choices] = {}
        self.events: list[NumberedEvent] = []
        self._scores: dict[int, list[Candidates]] = {}
        self._seeds = random.Random()  # for requests without a seed
        self._checked_at_s = -math.inf
        self._step_count = 0
        self._prompt_token_count = 0
        self._cached_token_count = 0
        self.output_token_count = 0  # `BeamSearches` adds its own
        self._accepted_token_count = 0

    @property
    def kernels(self) -> str:
        """Instruction set of the native kernels, or `torch`, `cuda` or `simulated` without them."""
        return self._runner.kernels

    @property
    def idle(self) -> bool:
        """True if there is nothing to compute."""
        return not self._requests

    def add(
        self,
        number: int,
        request: GenerationRequest,
        arrived_at_s: float | None = None,
        grammar: Grammar | None = None,
    ) -> bool:
        """Queue a request's sequences under an unused number; return False if the queue is full.

        `grammar` is the request's, if it was compiled before. Raises RequestImpossible if the
        response format does not compile.
        """
        if self.scheduler.waiting_is_full:
            return False
        if grammar is None and request.response_format is not None:
            grammar = self.grammars.compile(request.response_format)
        seed = (
            self._seeds.getrandbits(63) if request.sampling.seed is None else request.sampling.seed
        )
        arrived_at_s = self.clock() if arrived_at_s is None else arrived_at_s
        open_detokenizer, sequences = self.detokenizer_of(request), []
        for index in range(request.choice_count):
            detokenizer = open_detokenizer()
            sequences.append(
                self._sequence(
                    number,
                    index,
                    request,
                    detokenizer,
                    arrived_at_s,
                    seed=choice_seed(seed, index),
                    grammar=self._grammar_of(request, detokenizer, grammar),
                )
            )
        self._queue(number, sequences)
        if sequences[0].ended_before is not None:
            # a continued request of which only the end was unreported
            self.events.append((number, Scheduled(0)))
            self._finish(sequences[0], sequences[0].ended_before, arrived_at_s)
        return True

    def score(
        self,
        number: int,
        request: GenerationRequest,
        outputs: Iterable[list[int]],
        candidate_count: int,
        cached_token_count: int | None,
        arrived_at_s: float | None = None,
    ) -> list[Sequence]:
        """Queue a sequence for each output of a request; each ends with the candidates of its next
        token, which `take_scores` returns.

        `cached_token_count` is that of the request's prompt if it was computed and counted before;
        None the first time.
        """
        arrived_at_s = self.clock() if arrived_at_s is None else arrived_at_s
        detokenizer, sequences = self.detokenizer_of(request)(), []
        for index, output in enumerate(outputs):
            sequence = self._sequence(
                number, index, request, detokenizer, arrived_at_s, candidate_count=candidate_count
            )
            for token_id in output:
                sequence.take(token_id)
            sequence.cached_token_count = cached_token_count
            sequences.append(sequence)
        self._queue(number, sequences)
        return sequences

    def take_scores(self) -> dict[int, list[Candidates]]:
        """Return the candidates of the scored requests whose last sequence has ended, by number."""
        scores, self._scores = self._scores, {}
        return scores

    def detokenizer_of(self, request: GenerationRequest) -> Callable[[], Detokenizer]:
        """Return a function that opens the detokenizer of an output of a request."""
        return partial(
            self._decoder.open,
            request.stop.stop_sequences,
            request.prompt_token_ids,
            splits=request.splits_reasoning,
            begun=request.thinking is ThinkingStart.PROMPT or None,
            marked_functions=request.marked_functions,
        )

    def end_token_ids(self, request: GenerationRequest) -> frozenset[int]:
        """Return the tokens that end an output of a request."""
        model_ends = frozenset() if request.stop.ignore_eos else self._model_end_token_ids
        return model_ends | request.stop.stop_token_ids

    def _sequence(
        self,
        number: int,
        index: int,
        request: GenerationRequest,
        detokenizer: Detokenizer,
        arrived_at_s: float,
        *,
        seed: int = 0,
        grammar: Grammar | None = None,
        candidate_count: int = 0,
    ) -> Sequence:
        model_ends = frozenset() if request.stop.ignore_eos else self._model_end_token_ids
        return Sequence(
            number=number,
            choice_index=index,
            request=request,
            seed=seed,
            end_token_ids=model_ends | request.stop.stop_token_ids,
            answer_end_token_ids=request.stop.stop_token_ids - model_ends,
            detokenizer=detokenizer,
            arrived_at_s=arrived_at_s,
            grammar=grammar,
            candidate_count=candidate_count,
        )

    def _queue(self, number: int, sequences: list[Sequence]) -> None:
        self._requests[number] = Choices(sequences[0], sequences)
        for sequence in tuple(sequences):
            if self._rotation_switch_tokens is not None:
                sequence.rotary_offset = self._rotary_offset(sequence)
            self.scheduler.add(sequence)

    def _grammar_of(
        self, request: GenerationRequest, detokenizer: Detokenizer, grammar: Grammar | None
    ) -> Grammar | None:
        """Build the grammar of an output. It begins at the answer if the model may think before."""
        copied, budget = grammar and grammar.copy(), request.stop.max_reasoning_tokens
        if not isinstance(detokenizer, Split) or (copied is None and budget is None):
            return copied
        assert self._decoder.reasoning is not None, "it has split the output"
        ends = self._model_end_token_ids
        return AfterThinking(copied, detokenizer, self._decoder.reasoning, ends, budget)

    def cancel(self, number: int) -> None:
        """End a request and free its blocks; the next `step` returns its events. Idempotent."""
        choices = self._requests.get(number)
        if choices is not None:
            now_s = self.clock()
            for sequence in list(choices.running):
                self._finish(sequence, EngineFinishReason.CANCELLED, now_s)

    def drop(self, number: int) -> None:
        """End a request without events, and free its blocks. Idempotent."""
        if (choices := self._requests.pop(number, None)) is not None:
            for sequence in choices.running:
                self.scheduler.remove(sequence)

    def cancel_all(self) -> None:
        for number in list(self._requests):
            self.cancel(number)

    def step(self) -> list[NumberedEvent]:
        """Compute one step, if there is work; return all events since the previous call."""
        if self._requests:
            plan = self.scheduler.schedule(self._pace.prompt_token_count_max())
            self._lookup.extend(plan, self.scheduler)
            began_s = now_s = self.clock()
            for sequence in plan.entered:
                self._note_entered(sequence, now_s)
            chosen = self._runner.run(plan)
            self.scheduler.commit(plan)
            now_s = self.clock()
            self._lookup.note(plan, now_s - began_s)
            if self._limits.step_time_target_s is not None:
                decoded_count = sum(chunk.token_count == 1 for chunk in plan.chunks)
                self._pace.note(decoded_count, plan.token_count - decoded_count, now_s - began_s)
            for sequence, token in chosen.items():
                if token.candidates is not None:
                    self._note_scored(sequence, token.candidates)
                    continue
                is_running = self._append(sequence, token, now_s)
                for following in token.following if is_running else ():
                    self._accepted_token_count += 1
                    self.scheduler.accept(sequence)
                    if not self._append(sequence, following, now_s):
                        break
            if self._rotation_switch_tokens is not None:
                self._rotate()
            self._step_count += 1
            if now_s - self._checked_at_s >= CHECK_INTERVAL_S:
                self._checked_at_s = now_s
                self.scheduler.check_conservation()
        events, self.events = self.events, []
        return events

    def statistics(self) -> EngineStatistics:
        pool, (waiting_count, running_count) = self.pool, self.scheduler.counts()
        free_count, cached_count = pool.block_count_free, pool.block_count_cached
        return EngineStatistics(
            waiting_sequence_count=waiting_count,
            running_sequence_count=running_count,
            kv_block_count_total=pool.block_count_total,
            kv_block_count_free=free_count,
            kv_block_count_cached=cached_count,
            kv_block_count_held=pool.block_count_total - free_count - cached_count,
            step_count=self._step_count,
            prompt_token_count=self._prompt_token_count,
            cached_token_count=self._cached_token_count,
            output_token_count=self.output_token_count,
            preemption_count=self.scheduler.preemption_count,
            running_sequence_count_max=self._limits.running_sequence_count_max,
            draft_token_count=self._lookup.draft_token_count,
            accepted_token_count=self._accepted_token_count,
        )

    def _rotary_offset(self, sequence: Sequence) -> int:
        switch = self._rotation_switch_tokens
        return switch if switch is not None and len(sequence.token_ids) > switch else 0

    def _rotate(self) -> None:
        """Recompute sequences that exceed longrope's original context with the long factors."""
        for sequence in self.scheduler.running:
            if sequence.rotary_offset == 0 and (offset := self._rotary_offset(sequence)):
                self.scheduler.rotate(sequence, offset)

    def _note_entered(self, sequence: Sequence, now_s: float) -> None:
        assert sequence.cached_token_count is not None, "the scheduler has counted"
        sequence.scheduled_at_s = now_s
        if sequence.choice_index > 0:
            # the first choice computes the prompt; cache hits of the other choices save the caller
            # nothing
            return
        self._prompt_token_count += sequence.prompt_token_count
        self._cached_token_count += sequence.cached_token_count
        self.events.append((sequence.number, Scheduled(sequence.cached_token_count)))

    def _append(self, sequence: Sequence, token: Chosen, now_s: float) -> bool:
        """Append a token to a sequence; return whether the sequence continues."""
        if sequence.number not in self._requests:
            return False  # the request was ended by an error in another choice
        fault = sequence.grammar.fault if sequence.grammar is not None else None
        if fault is not None:
            self._break(sequence, fault)
            return False
        appended = sequence.append(token.token_id, now_s)
        self.output_token_count += 1
        logprobs = () if token.logprobs is None else (token.logprobs,)
        prompt_logprobs = (
            tuple(sequence.prompt_logprobs) if sequence.output_token_count == 1 else ()
        )
        piece = appended.piece
        generated = TokensGenerated(
            (token.token_id,),
            piece.text,
            logprobs,
            sequence.choice_index,
            prompt_logprobs,
            piece.reasoning,
            piece.reasoning_token_count,
        )
        self.events.append((sequence.number, generated))
        if appended.finish_reason is not None:
            self._finish(sequence, appended.finish_reason, now_s)
            return False
        return True

    def _note_scored(self, sequence: Sequence, candidates: Candidates) -> None:
        """End a scored sequence; with the last one of its request, release all candidates."""
        self.scheduler.remove(sequence)
        choices = self._requests[sequence.number]
        choices.running.remove(sequence)
        choices.scores[sequence.choice_index] = candidates
        if not choices.running:
            del self._requests[sequence.number]
            self._scores[sequence.number] = [choices.scores[i] for i in sorted(choices.scores)]

    def _break(self, sequence: Sequence, fault: str) -> None:
        """Fail a request because its grammar became too complex; the chosen token is invalid."""
        assert sequence.request.response_format is not None
        self.drop(sequence.number)
        broken = SequenceRefused(
            f"is too complex to follow: {fault}", sequence.request.response_format.field
        )
        self.events.append((sequence.number, broken))

    def _finish(self, sequence: Sequence, reason: EngineFinishReason, now_s: float) -> None:
        """End a choice; if it is the last one, end the request too."""
        piece = NOTHING
        if reason is not EngineFinishReason.STOP_SEQUENCE:
            piece = sequence.detokenizer.finish()
            # Bytes that become final at the end may complete a stop sequence, which is cut off as
            # usual.
            if piece.stop and reason is not EngineFinishReason.CANCELLED:
                reason, sequence.stopped_by = EngineFinishReason.STOP_SEQUENCE, piece.stop
        self.scheduler.remove(sequence)
        choices = self._requests[sequence.number]
        choices.running.remove(sequence)
        choices.ends[sequence.choice_index] = reason
        choices.generated_token_count += sequence.output_token_count
        if sequence.request.choice_count > 1:
            ended = ChoiceFinished(
                sequence.choice_index, reason, piece.text, piece.reasoning, sequence.stopped_by
            )
            self.events.append((sequence.number, ended))
            piece = NOTHING
        if choices.running:
            return
        del self._requests[sequence.number]
        finished = choices.first.finished(
            choices.ends[choices.first.choice_index], piece, choices.generated_token_count, now_s
        )
        self.events.append((sequence.number, finished))


class StepPace:
    """Estimates of the seconds per decoding step and per prompt token, from measured steps."""

    def __init__(self, step_time_target_s: float | None) -> None:
        """`step_time_target_s` limits a step with running streams, in seconds; None: no limit."""
        self._target_s = step_time_target_s
        self._decode_s: float | None = None  # duration of a step that only decodes
        self._prompt_token_s: float | None = None

    def prompt_token_count_max(self) -> int | None:
        """Compute the maximum prompt tokens of a step with running streams; None for no limit."""
        if self._target_s is None:
            return None
        if self._prompt_token_s is None:
            return PROMPT_TOKENS_MIN
        spare_s = self._target_s - (self._decode_s or 0.0)
        return max(int(spare_s / self._prompt_token_s), PROMPT_TOKENS_MIN)

    def note(self, decoded_count: int, prompt_token_count: int, duration_s: float) -> None:
        """Record a step's duration, with its numbers of decoded sequences and prompt tokens."""
        if not prompt_token_count:
            before_s = duration_s if self._decode_s is None else self._decode_s
            self._decode_s = before_s + SMOOTHING * (duration_s - before_s)
        elif prompt_token_count >= PROMPT_TOKENS_MIN:
            # the time of smaller chunks is mostly that of decoding
            own_s = duration_s - (self._decode_s or 0.0) * bool(decoded_count)
            token_s = max(own_s, duration_s / 10) / prompt_token_count
            before_s = token_s if self._prompt_token_s is None else self._prompt_token_s
            self._prompt_token_s = before_s + SMOOTHING * (token_s - before_s)
