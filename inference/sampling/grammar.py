"""Structured output: from a response format to the set of tokens that may come next.

A grammar is compiled once, by `llguidance`, and copied for each sequence; the copy follows the sequence's tokens. What it allows
keeps the output a beginning of an answer in the format, byte by byte, so a character split over tokens is no special case. The
model's own end tokens are allowed exactly where the answer is complete, and alone where nothing can follow.

Imported by the engine host only, and `llguidance` with the first request that needs it.

`GrammarThread` compiles off the step thread, so that a large schema delays its own request only. It is bounded like the inbox:
the parent sends no more sequences than the waiting queue takes."""

from __future__ import annotations

import json
import queue
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from inference.engine import GrammarKind, ResponseFormat
from inference.errors import RequestImpossible
from inference.text.tools import JSON_OPTIONS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


COMPILED_COUNT_MAX = 64  # grammars kept: applications send the same few schemas; each takes some 100 kB
ERROR_CHARS_MAX = 500  # of the library's words: enough for the reason, not for a dump of its state
_ISO_RULE = re.compile(r"^\s*\w+\s*=[^;]*;\s*$", re.MULTILINE)
Mask = np.ndarray[tuple[int, int], np.dtype[np.int32]]


class Grammar:
    """Where one sequence stands in its format. Changed by the step loop; `fill` may run in another thread meanwhile."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def fault(self) -> str | None:
        """Why it cannot be followed any further; None while it can. Nothing may be chosen by its mask then."""
        return _short(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def complete(self) -> bool:
        """Whether the output so far is an answer in the format."""
        return self._matcher.is_accepting()

    def copy(self) -> Grammar:
        """Another one that stands at the same place, for another sequence."""
        return Grammar(self._matcher.deep_copy())

    def fill(self, mask: Mask, row: int) -> None:
        """Write which tokens may come next into a row of bits, 32 to a word."""
        words = mask[row]
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def advance(self, token_id: int) -> None:
        """The token has been chosen."""
        self._matcher.consume_token(token_id)


class GrammarCompiler:
    """Compiles response formats for one model's vocabulary, and keeps the latest. Safe to use from several threads."""

    def __init__(self, tokenizer_path: Path, vocabulary_size: int, end_token_ids: frozenset[int]) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocabulary_size = vocabulary_size
        self._end_token_ids = end_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[ResponseFormat, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, response_format: ResponseFormat) -> Grammar:
        """A grammar at its beginning. Raises: RequestImpossible with the reason and its field."""
        with self._lock:
            matcher = self._compiled.get(response_format) or self._build(response_format)
            self._compiled[response_format] = matcher
            self._compiled.move_to_end(response_format)
            if len(self._compiled) > COMPILED_COUNT_MAX:
                self._compiled.popitem(last=False)
            return Grammar(matcher.deep_copy())

    def _build(self, response_format: ResponseFormat) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        try:
            source = _grammar_source(response_format)
        except (ValueError, RecursionError) as error:
            raise RequestImpossible(f"not a JSON schema: {error}", response_format.field) from error
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._load_tokenizer(response_format.field), source, log_level=0, limits=limits)
        if matcher.is_error():
            reason = f"cannot be compiled: {_remedy(response_format)}{_short(matcher.get_error())}"
            raise RequestImpossible(reason, response_format.field)
        self._check_beginning(matcher, response_format)
        return matcher

    def _check_beginning(self, matcher: LLMatcher, response_format: ResponseFormat) -> None:
        """Refuse a grammar that fails at the first token: its request would have been computed up to there in vain."""
        probe = Grammar(matcher.deep_copy())
        mask: Mask = np.zeros((1, mask_word_count(self._vocabulary_size)), dtype=np.int32)
        probe.fill(mask, 0)
        if probe.fault is not None or not mask.any():
            why = f" ({probe.fault})" if probe.fault is not None else ""
            reason = f"allows no first token{why}: make sure that every rule matches some text of finite length"
            raise RequestImpossible(reason, response_format.field)

    def _load_tokenizer(self, field: str) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            if not self._end_token_ids:
                raise RequestImpossible("this model has no end token, so no answer could ever be complete", field)
            try:
                ends = sorted(self._end_token_ids)
                self._tokenizer = LLTokenizer(str(self._tokenizer_path), n_vocab=self._vocabulary_size, eos_token=ends)
            except Exception as error:  # the library raises whatever its parts raise
                raise RequestImpossible(f"this model's tokenizer does not support response formats: {error}", field) from error
        return self._tokenizer


class MaskWorker:
    """Computes masks beside the forward pass: they depend on the tokens before it, not on its result.

    One thread, so that masks take at most one core from the pass; the library releases Python's lock while it computes.
    """

    def __init__(self, vocabulary_size: int) -> None:
        self._word_count = mask_word_count(vocabulary_size)
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, grammars: Sequence[Grammar | None]) -> PendingMasks | None:
        """Start on one mask per grammar; None if there is no grammar among them."""
        if all(grammar is None for grammar in grammars):
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "weir-grammar-masks")
        by_row = {row: grammar for row, grammar in enumerate(grammars) if grammar is not None}
        return PendingMasks(by_row, np.zeros((len(by_row), self._word_count), dtype=np.int32), self._thread)


class PendingMasks:
    """Masks that are being computed, one per constrained row of a batch."""

    def __init__(self, by_row: dict[int, Grammar], mask: Mask, thread: ThreadPoolExecutor) -> None:
        self._by_row = by_row
        self._mask = mask
        self._filled = thread.submit(self._fill)

    def apply(self, logits: Tensor) -> None:
        """Set to minus infinity, in place, what the constrained rows of logits (R, V) must not choose.

        A row whose grammar has failed is left as it is: its sequence ends with the fault instead of a token.
        """
        self._filled.result()
        bits = np.unpackbits(~self._mask.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
        forbidden = torch.from_numpy(bits).view(torch.bool)
        # Row by row and in place: gathering rows and scattering them again cost twice as much, measured at 128,000 tokens.
        for index, (row, grammar) in enumerate(self._by_row.items()):
            if grammar.fault is None:
                logits[row].masked_fill_(forbidden[index], float("-inf"))

    def _fill(self) -> None:
        for index, grammar in enumerate(self._by_row.values()):
            grammar.fill(self._mask, index)


def mask_word_count(vocabulary_size: int) -> int:
    """Return how many words of 32 bits have one bit for each token."""
    return -(-vocabulary_size // 32)


def _grammar_source(response_format: ResponseFormat) -> str:
    from llguidance import LLMatcher

    match response_format.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(response_format.source)
            if not isinstance(schema, dict | bool):
                raise ValueError("a schema is an object or a boolean")
            # An extension of the library that would let a schema overrule our options.
            plain = schema if isinstance(schema, bool) else {name: part for name, part in schema.items() if name != "x-guidance"}
            return json.dumps({"grammars": [{"json_schema": _with_options(plain)}]})
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(response_format.source)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(response_format.source)


def _with_options(schema: dict[str, object] | bool) -> dict[str, object]:
    plain = {} if schema is True else {"enum": []} if schema is False else schema
    return {**plain, "x-guidance": JSON_OPTIONS}


def _remedy(response_format: ResponseFormat) -> str:
    """What to do about a grammar in another notation that goes by the name of EBNF too; empty if it is none that is known."""
    if response_format.kind is not GrammarKind.LARK:
        return ""
    if "::=" in response_format.source:
        return (
            "rules with ::= are GBNF, and Lark is wanted here: write start: for root ::=, name: for other rules, /[a-z]/ for [a-z]"
            " and // for # comments; python -m llguidance.gbnf_to_lark converts a file; "
        )
    if _ISO_RULE.search(response_format.source):
        return (
            "rules with = and ; are ISO EBNF, and Lark is wanted here: one rule a line, start: a b without commas or semicolons; "
        )
    return ""


def _short(message: str) -> str:
    return " ".join(message.split("<state>")[0].split())[:ERROR_CHARS_MAX]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of a request's response format: a grammar, or why there is none."""

    number: int
    result: Grammar | RequestImpossible


class GrammarThread:
    """One thread that compiles in order of arrival."""

    def __init__(self, compiler: GrammarCompiler, deliver: Callable[[Compiled], None]) -> None:
        """deliver: called in the thread, with each result."""
        self._compiler = compiler
        self._deliver = deliver
        self._jobs: queue.SimpleQueue[tuple[int, ResponseFormat]] = queue.SimpleQueue()
        self._started = False

    def begin(self, number: int, response_format: ResponseFormat) -> None:
        """Compile a request's response format; the thread starts with the first."""
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
