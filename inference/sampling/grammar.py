"""Structured output: computes the allowed next tokens for a response format.

A grammar is compiled once by `llguidance` and copied for each sequence, whose tokens the copy
follows. Allowed tokens keep the output a prefix of a valid answer, byte by byte, so characters
split over tokens need no special case. The model's end tokens are allowed exactly where the answer
is complete, and exclusively where nothing can follow.

Imported by the engine worker only; `llguidance` is imported with the first request that needs it.

`GrammarThread` compiles off the step thread, so that a large schema delays only its own request.
Its queue is bounded: the parent sends at most as many sequences as the waiting queue takes.
"""

from __future__ import annotations

import json
import math
import queue
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from inference.engine import GrammarKind, ResponseFormat
from inference.errors import RequestImpossible
from inference.text.reasoning import Phase, ReasoningFormat, Split
from inference.text.tools import with_json_options

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


COMPILED_COUNT_MAX = 64  # cached grammars of about 100 kB: applications reuse few schemas
TOOLS = "tools"  # field of a grammar that is made of the schemas of tools
# What a message says about such a grammar, which the client did not write
_OURS = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: |\n\s*\d+ \| .*", re.DOTALL)
ERROR_CHARS_MAX = 500  # of the library's message, which may contain a dump of its state
_ISO_RULE = re.compile(r"^\s*\w+\s*=[^;]*;\s*$", re.MULTILINE)
Mask = np.ndarray[tuple[int, int], np.dtype[np.int32]]

OVERLAP = (
    "oneOf is supported where no value fits two of its branches: give each branch a required"
    " property with a const of its own, or use anyOf; "
)


class Grammar:
    """Grammar state of one sequence. The step loop modifies it; `fill` may run in a thread."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def fault(self) -> str | None:
        """Reason why the grammar failed, or None. After a failure, the mask is invalid."""
        return _short(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def complete(self) -> bool:
        """True if the output so far is a complete answer in the required format."""
        return self._matcher.is_accepting()

    @property
    def over(self) -> bool:
        """True if the grammar allows any further output."""
        return False

    def copy(self) -> Grammar:
        """Copy the grammar with its state, for another sequence."""
        return Grammar(self._matcher.deep_copy())

    def fill(self, mask: Mask, row: int) -> None:
        """Write the mask of allowed next tokens into a row: one bit per token, 32 per word."""
        words = mask[row]
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def advance(self, token_id: int) -> None:
        """Update the state with the chosen token."""
        self._matcher.consume_token(token_id)


class AfterThinking(Grammar):
    """Grammar of an answer that follows thinking; also ends thinking that has used up its budget.

    The thinking cannot end the output. While it is undecided whether the model thinks, the output
    may begin with thinking or with the answer.
    """

    def __init__(
        self,
        grammar: Grammar | None,
        split: Split,
        format_: ReasoningFormat,
        end_token_ids: frozenset[int],
        token_count_max: int | None = None,
    ) -> None:
        """Wrap a grammar in its initial state; None allows any answer. `split` separates the output
        and takes each token after this grammar has.

        After `token_count_max` tokens of thinking, its closing marks are forced.
        """
        self._grammar = grammar
        self._split = split
        self._opening_ids = format_.opening_ids
        self._closing_ids = format_.closing_ids
        self._end_token_ids = end_token_ids
        self._left = math.inf if token_count_max is None else token_count_max

    @property
    def fault(self) -> str | None:
        return None if self._grammar is None else self._grammar.fault

    @property
    def complete(self) -> bool:
        is_answer = self._split.phase is Phase.ANSWER
        return is_answer and (self._grammar is None or self._grammar.complete)

    @property
    def over(self) -> bool:
        return self._grammar is None and self._split.phase is Phase.ANSWER

    def fill(self, mask: Mask, row: int) -> None:
        words = mask[row].view(np.uint32)
        if self._split.thinks and self._left <= 0:
            index = min(int(-self._left), len(self._closing_ids) - 1)
            words[:] = 0
            _allow(words, self._closing_ids[index])
            return
        if self._grammar is None:
            words[:] = ~np.uint32(0)
        elif self._split.thinks:
            words[:] = ~np.uint32(0)
            for token_id in self._end_token_ids:
                words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        else:
            self._grammar.fill(mask, row)
            for token_id in self._opening_ids if self._split.phase is Phase.UNDECIDED else ():
                _allow(words, token_id)

    def advance(self, token_id: int) -> None:
        opens = self._split.phase is Phase.UNDECIDED and token_id in self._opening_ids
        if self._split.thinks:
            self._left -= 1
        elif self._grammar is not None and not opens:
            self._grammar.advance(token_id)


def _allow(words: np.ndarray[Any, np.dtype[np.uint32]], token_id: int) -> None:
    words[token_id // 32] |= np.uint32(1 << token_id % 32)


class GrammarCompiler:
    """Compiler of response formats for one vocabulary, with an LRU cache. Thread-safe."""

    def __init__(
        self, tokenizer_path: Path, vocabulary_size: int, end_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocabulary_size = vocabulary_size
        self._end_token_ids = end_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._compiled = lru_cache(COMPILED_COUNT_MAX)(self._build)
        self._lock = threading.Lock()  # the cache alone would compile a format twice at once

    def compile(self, response_format: ResponseFormat) -> Grammar:
        """Compile a format to a grammar in its initial state. Raises RequestImpossible."""
        with self._lock:
            return Grammar(self._compiled(response_format).deep_copy())

    def _build(self, response_format: ResponseFormat) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        try:
            source = _grammar_source(response_format)
        except (ValueError, RecursionError) as error:
            raise RequestImpossible(
                f"must be a JSON schema: {error}", response_format.field
            ) from error
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(
            self._load_tokenizer(response_format.field), source, log_level=0, limits=limits
        )
        if matcher.is_error():
            message = matcher.get_error()
            remedy = _remedy(response_format, message)
            if response_format.field == TOOLS:
                message = _OURS.sub("", message)
            message = "" if remedy == OVERLAP else _short(message)  # it names an option of ours
            reason = f"cannot be compiled: {remedy}{message}"
            raise RequestImpossible(reason, response_format.field)
        self._check_beginning(matcher, response_format)
        return matcher

    def _check_beginning(self, matcher: LLMatcher, response_format: ResponseFormat) -> None:
        """Reject a grammar that allows no first token, before the prompt is computed."""
        probe = Grammar(matcher.deep_copy())
        mask: Mask = np.zeros((1, mask_word_count(self._vocabulary_size)), dtype=np.int32)
        probe.fill(mask, 0)
        if probe.fault is not None or not mask.any():
            why = f" ({probe.fault})" if probe.fault is not None else ""
            reason = (
                f"allows no first token{why}: make sure that every rule matches some text of finite"
                " length"
            )
            raise RequestImpossible(reason, response_format.field)

    def _load_tokenizer(self, field: str) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            if not self._end_token_ids:
                raise RequestImpossible(
                    "this model has no end token, so no answer could ever be complete: leave the"
                    " format out, or choose another model",
                    field,
                )
            try:
                ends = sorted(self._end_token_ids)
                self._tokenizer = LLTokenizer(
                    str(self._tokenizer_path), n_vocab=self._vocabulary_size, eos_token=ends
                )
            except Exception as error:  # the library raises exceptions of any type
                raise RequestImpossible(
                    f"this model's tokenizer does not support response formats: {error}; leave the"
                    " format out, or choose another model",
                    field,
                ) from error
        return self._tokenizer


class MaskWorker:
    """Thread that computes masks during the forward pass, on whose result they do not depend.

    It uses at most one core; the library releases the GIL while it computes.
    """

    def __init__(self, vocabulary_size: int) -> None:
        self._word_count = mask_word_count(vocabulary_size)
        self._thread = ThreadPoolExecutor(1, "weir-grammar-masks")  # started when it is used

    def begin(self, grammars: Sequence[Grammar | None]) -> PendingMasks | None:
        """Start computing one mask per grammar; None if there are no grammars."""
        if all(grammar is None for grammar in grammars):
            return None
        by_row = {row: grammar for row, grammar in enumerate(grammars) if grammar is not None}
        return PendingMasks(
            by_row, np.zeros((len(by_row), self._word_count), dtype=np.int32), self._thread
        )


class PendingMasks:
    """Masks that are being computed, one per constrained row of a batch."""

    def __init__(self, by_row: dict[int, Grammar], mask: Mask, thread: ThreadPoolExecutor) -> None:
        self._by_row = by_row
        self._mask = mask
        self._filled = thread.submit(self._fill)

    def apply(self, logits: Tensor) -> None:
        """Set forbidden tokens of logits (R, V) to minus infinity, in place, in the constrained
        rows.

        Rows whose grammar failed stay unchanged: their sequences end with the fault.
        """
        self._filled.result()
        bits = np.unpackbits(
            ~self._mask.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1]
        )
        forbidden = torch.from_numpy(bits).view(torch.bool).to(logits.device)
        # Row by row and in place: gathering and scattering rows took twice as long with 128,000
        # tokens.
        for index, (row, grammar) in enumerate(self._by_row.items()):
            if grammar.fault is None:
                logits[row].masked_fill_(forbidden[index], float("-inf"))

    def _fill(self) -> None:
        for index, grammar in enumerate(self._by_row.values()):
            grammar.fill(self._mask, index)


def mask_word_count(vocabulary_size: int) -> int:
    """Compute the number of 32-bit words that hold one bit per token."""
    return -(-vocabulary_size // 32)


def _grammar_source(response_format: ResponseFormat) -> str:
    from llguidance import LLMatcher

    match response_format.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(response_format.source)
            if not isinstance(schema, dict | bool):
                raise ValueError("a schema is an object or a boolean")
            return json.dumps({"grammars": [{"json_schema": with_json_options(schema)}]})
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(response_format.source)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(response_format.source)


def _remedy(response_format: ResponseFormat, message: str) -> str:
    """Find a hint for a known cause of the library's message, such as another EBNF notation."""
    if "coerce_one_of" in message:
        return OVERLAP
    if response_format.kind is not GrammarKind.LARK:
        return ""
    if "::=" in response_format.source:
        return (
            "rules with ::= are GBNF, but Lark is required: write start: for root ::=, name: for"
            " other rules, /[a-z]/ for [a-z] and // for # comments; python -m"
            " llguidance.gbnf_to_lark converts a file; "
        )
    if _ISO_RULE.search(response_format.source):
        return (
            "rules with = and ; are ISO EBNF, but Lark is required: one rule per line, start: a b"
            " without commas or semicolons; "
        )
    return ""


def _short(message: str) -> str:
    return " ".join(message.split("<state>")[0].split())[:ERROR_CHARS_MAX]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Result of compiling a request's response format: a grammar, or the error."""

    number: int
    result: Grammar | RequestImpossible


class GrammarThread:
    """Thread that compiles grammars in order of arrival."""

    def __init__(self, compiler: GrammarCompiler, deliver: Callable[[Compiled], None]) -> None:
        """Create the thread without starting it. `deliver` is called in it with each result."""
        self._compiler = compiler
        self._deliver = deliver
        self._jobs: queue.SimpleQueue[tuple[int, ResponseFormat]] = queue.SimpleQueue()
        self._started = False

    def begin(self, number: int, response_format: ResponseFormat) -> None:
        """Queue a request's response format for compiling. The first call starts the thread."""
        self._jobs.put((number, response_format))
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="weir-grammars", daemon=True).start()

    def _run(self) -> None:
        while True:
            number, response_format = self._jobs.get()
            try:
                result: Grammar | RequestImpossible = self._compiler.compile(response_format)
            except RequestImpossible as fault:
                result = fault
            self._deliver(Compiled(number, result))
