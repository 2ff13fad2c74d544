"""A connection to a remote engine: opened, and found fit for a model before anything of a tenant crosses it."""

from __future__ import annotations

import contextlib
import logging
import random
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import grpc

from inference.engine import GenerationRequest, ModelInfo, SamplingParams, SequenceId, StopCriteria
from inference.errors import EngineError
from inference.outside.sequence import Choice, Request
from inference.remote.channel import open_channel
from inference.remote.dialect import SHARES, Dialect, ServerFacts, ServerUnfit, WireOutput
from inference.remote.model_files import Bundle, check_tokenizer, is_unanswered
from inference.remote.settings import RemoteSettings, Service, Target
from inference.remote.trtllm import TrtllmDialect
from inference.remote.vllm import VllmDialect
from inference.text.detokenizer import Detokenizer, TextDecoder

DIALECTS: Mapping[Service, type[TrtllmDialect | VllmDialect]] = {Service.TRTLLM: TrtllmDialect, Service.VLLM: VllmDialect}
PROBE_TOKENS = 513  # of a prompt that is sent to find out what the server caches: two of the largest blocks in use, and one

_log = logging.getLogger("weir.inference.remote")


@contextlib.asynccontextmanager
async def open_dialect(settings: RemoteSettings) -> AsyncIterator[tuple[Dialect, grpc.aio.Channel]]:
    """A channel and what speaks over it. On leaving, its calls are ended."""
    channel = open_channel(settings.target, settings.tls)
    try:
        yield make_dialect(settings.target, channel, settings.call_timeout_s), channel
    finally:
        await channel.close()


def make_dialect(target: Target, channel: grpc.aio.Channel, call_timeout_s: float) -> Dialect:
    """What speaks the target's service."""
    return DIALECTS[target.service](channel, call_timeout_s)


class Introduction:
    """The questions that any server is asked before the first request. Raises throughout: ServerUnfit, grpc.aio.AioRpcError."""

    def __init__(self, dialect: Dialect, settings: RemoteSettings, model: ModelInfo) -> None:
        self.dialect = dialect
        self._settings = settings
        self._model = model

    async def introduce(self) -> ServerFacts:
        """What the server is, if it is well and has the model that is meant."""
        if (fault := await self.dialect.health_fault()) is not None:
            raise ServerUnfit(f"the server says of its health: {fault}")
        facts = self.fitting(await self.dialect.facts())
        await self.check_tokenizer()
        return facts

    def fitting(self, facts: ServerFacts) -> ServerFacts:
        """Compared with the checkpoint here. A tokenizer may count fewer tokens than the model has rows for, never more."""
        window, size = self._model.context_window_tokens, self._model.vocabulary_size
        if facts.vocabulary_size > size:
            raise ServerUnfit(f"the server has {facts.vocabulary_size} tokens, {self._model.directory} has {size}: another model")
        if facts.context_window_tokens and facts.context_window_tokens < window:
            raise ServerUnfit(
                f"the server's context window of {facts.context_window_tokens} tokens is smaller than the {window} that are "
                "promised here: raise it there (vLLM: --max-model-len; TensorRT-LLM: --max_seq_len) "
                "or set WEIR_REMOTE_CONTEXT_TOKENS"
            )
        return replace(facts, vocabulary_size=facts.vocabulary_size or size)

    async def check_tokenizer(self) -> None:
        """A server that cannot tell is believed: nothing else can be done."""
        bundle = Bundle()
        try:
            async for chunk in self.dialect.tokenizer_chunks():
                bundle.add(chunk)
        except grpc.aio.AioRpcError as error:
            if not is_unanswered(error):
                raise
            _log.warning(
                "%s does not tell its tokenizer (%s), it is taken for the right one", self._settings.target, error.code().name
            )
            return
        check_tokenizer(bundle.files(), self._settings.directory.absolute())


class Examination(Introduction):
    """Those that one which generates is asked."""

    def __init__(self, dialect: Dialect, settings: RemoteSettings, model: ModelInfo, decoder: TextDecoder) -> None:
        super().__init__(dialect, settings, model)
        self._decoder = decoder

    async def pass_all(self) -> ServerFacts:
        """What the server is, once it is fit."""
        facts = await self.introduce()
        if self._settings.share_prefixes:
            await self.cached_tokens(self.probe_prompt(), "weir-probe")
        elif await self.shares_prefixes():
            raise ServerUnfit(SHARES)
        return facts

    async def shares_prefixes(self) -> bool:
        """Whether a prompt that was sent under one salt is found under another. Nobody else has ever sent this one."""
        prompt, name = self.probe_prompt(), uuid.uuid4().hex
        await self.cached_tokens(prompt, f"weir-probe-{name}-a")
        return await self.cached_tokens(prompt, f"weir-probe-{name}-b") > 0

    def probe_prompt(self) -> tuple[int, ...]:
        """Ids from the middle of the vocabulary, where no special ones are."""
        size = self._model.vocabulary_size
        count = min(PROBE_TOKENS, self._model.context_window_tokens - 1)
        return tuple(random.choices(range(size // 4, size // 4 + size // 2), k=count))

    async def cached_tokens(self, prompt: tuple[int, ...], salt: str) -> int:
        """Let the server generate one token. Returns how many of the prompt's it had cached. Raises also if it gives none."""
        wanted = GenerationRequest(SequenceId("probe"), prompt, SamplingParams(), StopCriteria(1, ignore_eos=True), salt)
        try:
            output, cached_token_count = await one_output(self.dialect, self._model.vocabulary_size, self._decoder, wanted)
        except EngineError as error:
            raise ServerUnfit(f"a test token cannot be: {error}") from error
        token_count = len(output.token_ids)
        if token_count != 1:
            raise ServerUnfit(f"the server was asked for one test token and gave {token_count}")
        return cached_token_count


async def one_output(
    dialect: Dialect, vocabulary_size: int, decoder: TextDecoder, wanted: GenerationRequest, ends: frozenset[int] = frozenset()
) -> tuple[WireOutput, int]:
    """One output, outside of any queue, and how many prompt tokens were cached. Raises: EngineFailed, grpc.aio.AioRpcError."""
    choice = Choice(Request(0, wanted, ends, 0.0), 0, 0, Detokenizer(decoder.open(), ()))
    output, cached_token_count = WireOutput(), 0
    call = dialect.generate(f"weir-probe-{uuid.uuid4().hex}", choice)
    try:
        async for message in call:
            cached_token_count = max(cached_token_count, dialect.take(message, choice, output))
    finally:
        call.cancel()
    return output, cached_token_count
