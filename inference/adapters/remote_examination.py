"""Checks of a remote server before its first request."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import uuid
from dataclasses import replace

import grpc

from inference.adapters.external_request import Choice, Output, Request
from inference.adapters.remote_dialects import SHARES, Dialect, ServerFacts, ServerUnfit
from inference.adapters.remote_files import Bundle, check_tokenizer, is_unanswered
from inference.adapters.remote_settings import RemoteSettings
from inference.engine import (
    GenerationRequest,
    GrammarKind,
    ModelInfo,
    ResponseFormat,
    SamplingParams,
    StopCriteria,
)
from inference.errors import EngineError
from inference.sequences import RequestField, ThinkingStart
from inference.text.text_decoder import TextDecoder

# Formats of which the first tokens are an output of this form.
PROBE_FORMATS = (
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "enum": ["' + 64 * "weir " + '"]}', '"[weir ]*'),
    (GrammarKind.REGEX, "[0-9]{200}", "[0-9]+"),
)
PROBE_FORMAT_TOKENS = 8
PROBE_BIAS = 100.0
# Length of the prompt for cache probes: two of the largest blocks in use, plus one.
PROBE_TOKENS = 513
_log = logging.getLogger("weir.inference.adapters")


class Introduction:
    """Checks of any server before its first request, which raise ServerUnfit or AioRpcError."""

    def __init__(self, dialect: Dialect, settings: RemoteSettings, model: ModelInfo) -> None:
        self.dialect = dialect
        self.settings = settings
        self.model = model

    async def introduce(self) -> ServerFacts:
        """Check that the server is healthy and serves the expected model; return its facts.

        Raises: ServerUnfit.
        """
        if (fault := await self.dialect.health_fault()) is not None:
            raise ServerUnfit(f"the server reports itself unhealthy: {fault}")
        facts = self.fitting(await self.dialect.facts())
        try:
            files, directory = await self.tokenizer_files(), self.settings.directory.absolute()
            await asyncio.to_thread(check_tokenizer, files, directory)
        except grpc.aio.AioRpcError as error:
            if not is_unanswered(error):
                raise
            _log.warning(
                "%s does not provide its tokenizer (%s), assuming that it matches",
                self.settings.target,
                error.code().name,
            )
        return facts

    def fitting(self, facts: ServerFacts) -> ServerFacts:
        """Check vocabulary and context window against the checkpoint; return completed facts.

        Raises: ServerUnfit.
        """
        window, size = self.model.context_window_tokens, self.model.vocabulary_size
        if facts.vocabulary_size > size:
            raise ServerUnfit(
                f"the server's vocabulary has {facts.vocabulary_size} tokens,"
                f" {self.model.directory} has {size}: a different model"
            )
        if facts.context_window_tokens and facts.context_window_tokens < window:
            raise ServerUnfit(
                f"the server's context window of {facts.context_window_tokens} tokens is smaller"
                f" than the {window} configured here: raise it on the server (vLLM:"
                " --max-model-len; TensorRT-LLM: --max_seq_len) or set WEIR_REMOTE_CONTEXT_TOKENS"
            )
        return replace(facts, vocabulary_size=facts.vocabulary_size or size)

    async def tokenizer_files(self) -> dict[str, bytes]:
        """Download the server's tokenizer files; return their contents by name."""
        bundle = Bundle()
        async for chunk in self.dialect.tokenizer_chunks():
            bundle.add(chunk)
        return await asyncio.to_thread(bundle.files)


class Examination(Introduction):
    """Checks of a server that generates text."""

    def __init__(
        self, dialect: Dialect, settings: RemoteSettings, model: ModelInfo, decoder: TextDecoder
    ) -> None:
        super().__init__(dialect, settings, model)
        self.decoder = decoder

    async def pass_all(self) -> ServerFacts:
        """Run all checks and return the server's facts. Raises: ServerUnfit if one fails."""
        facts = await self.introduce()
        await self.dialect.probe(self.model.vocabulary_size)
        await self.find_formats_after_thinking()
        if self.settings.share_prefixes:
            await self.cached_tokens(self.probe_prompt(), "weir-probe")
        elif await self.shares_prefixes():
            raise ServerUnfit(SHARES)
        return facts

    async def find_formats_after_thinking(self) -> None:
        """Find the response formats that the server applies after thinking, and record them in its
        capabilities.

        A logit bias closes the thinking at once; from then on the output must match the format.
        """
        capabilities, reasoning = self.dialect.capabilities, self.decoder.reasoning
        is_testable = RequestField.LOGIT_BIAS not in capabilities.unsupported
        if reasoning is None or len(reasoning.closing_ids) != 1 or not is_testable:
            return
        prompt = (*self.probe_prompt()[:16], *reasoning.opening_ids)
        begun = ThinkingStart.PROMPT, prompt, reasoning.closing_ids
        ended = ThinkingStart.ENDED, prompt + reasoning.closing_ids, ()
        found = {
            RequestField(f"response_format.{kind}")
            for kind, source, expected in PROBE_FORMATS
            if all([await self._keeps(kind, source, expected, *each) for each in (begun, ended)])
        }
        self.dialect.capabilities = replace(capabilities, after_thinking=frozenset(found))

    async def _keeps(
        self,
        kind: GrammarKind,
        source: str,
        expected: str,
        thinking: ThinkingStart,
        prompt: tuple[int, ...],
        closing_ids: tuple[int, ...],
    ) -> bool:
        """Return whether the output after these closing ids matches a format."""
        request = GenerationRequest(
            prompt,
            SamplingParams(logit_bias=tuple((each, PROBE_BIAS) for each in closing_ids)),
            StopCriteria(PROBE_FORMAT_TOKENS),  # servers take no other criteria with a format
            response_format=ResponseFormat(kind, source, "response_format"),
            thinking=thinking,
        )
        try:
            ids = tuple((await self.run(request))[0].token_ids)
        except (EngineError, grpc.aio.AioRpcError) as error:
            _log.info("%s: no %s after thinking: %r", self.settings.target, kind, error)
            return False
        count = len(closing_ids)
        text = self.decoder.text_of(ids[count:])
        return ids[:count] == closing_ids and bool(re.fullmatch(expected, text))

    async def shares_prefixes(self) -> bool:
        """Test whether a random prompt sent under one salt is cached under another.

        Several salts are tried, since a router may send the first prompts to different workers.
        """
        prompt, name = self.probe_prompt(), uuid.uuid4().hex
        for index in range(self.dialect.salt_count):
            if await self.cached_tokens(prompt, f"weir-probe-{name}-{index}") > 0:
                return True
        return False

    def probe_prompt(self) -> tuple[int, ...]:
        """Draw random ids from the middle of the vocabulary, where there are no special tokens."""
        size = self.model.vocabulary_size
        count = min(PROBE_TOKENS, self.model.context_window_tokens - 1)
        return tuple(random.choices(range(size // 4, size // 4 + size // 2), k=count))

    async def cached_tokens(self, prompt: tuple[int, ...], salt: str) -> int:
        """Generate one token; return the number of cached prompt tokens. Raises: ServerUnfit."""
        stop = StopCriteria(1, ignore_eos=True)
        try:
            output, cached_token_count = await self.run(
                GenerationRequest(prompt, SamplingParams(), stop, salt)
            )
        except EngineError as error:
            raise ServerUnfit(f"generating a test token failed: {error}") from error
        token_count = len(output.token_ids)
        if token_count != 1:
            raise ServerUnfit(f"the server generated {token_count} tokens for a request of one")
        return cached_token_count

    async def run(
        self, request: GenerationRequest, ends: frozenset[int] = frozenset()
    ) -> tuple[Output, int]:
        """Generate one output, bypassing the queue; return it and the number of cached prompt
        tokens. Raises EngineFailed or grpc.aio.AioRpcError.
        """
        choice = Choice(Request(0, request, ends, 0.0, None), 0, 0, self.decoder.open())
        output, cached_token_count = Output(), 0
        call = self.dialect.generate(f"weir-probe-{uuid.uuid4().hex}", choice)
        try:
            async for message in call:
                reported = self.dialect.take(message, choice, output)
                cached_token_count = max(cached_token_count, reported or 0)
        finally:
            call.cancel()
        return output, cached_token_count
