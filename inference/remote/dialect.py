"""What the two services have in common, and what each must translate. One dialect speaks over one channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2

from inference.capabilities import Capabilities
from inference.engine import EngineStatistics, TokenLogprob
from inference.errors import EngineError, EngineFailed, EngineOverloaded, RequestImpossible
from inference.outside.sequence import Choice

SHARES = (
    "the server serves prefixes that one tenant has sent to others: turn its prefix cache off "
    "(vLLM: --no-enable-prefix-caching; TensorRT-LLM: kv_cache_config.enable_block_reuse: false), "
    "or set WEIR_REMOTE_SHARE_PREFIXES=1 if your tenants may share them"
)
OVERLOAD_WAIT_S = 1.0  # the services name no wait when they are full


class ServerUnfit(Exception):
    """The server answers, but this model cannot be served by it as it is; the message says why and what to mend."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself; 0 and empty where it does not. block_tokens: how many tokens it caches as one."""

    model: str
    version: str = ""
    vocabulary_size: int = 0
    context_window_tokens: int = 0
    running_sequence_count_max: int = 0
    block_tokens: int = 0


@dataclass(slots=True)
class WireOutput:
    """One output as far as it has come. Implements `outside.sequence.Output`."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, TokenLogprob]] = field(default_factory=list)


class Dialect(ABC):
    """One service. Calls raise `grpc.aio.AioRpcError`."""

    carries_salt: bool  # whether requests can say whose prefixes they may share
    capabilities: Capabilities

    def __init__(self, stub: Any, call_timeout_s: float) -> None:
        """stub: generated, of the service; the generated code has no types."""
        self._stub = stub
        self._call_timeout_s = call_timeout_s

    @abstractmethod
    async def health_fault(self) -> str | None:
        """What the server says is wrong with it."""

    @abstractmethod
    async def facts(self) -> ServerFacts:
        """What the server says of itself."""

    @abstractmethod
    async def load(self, block_tokens: int) -> EngineStatistics | None:
        """Blocks in use by the server's own word; None if it has none to say."""

    @abstractmethod
    def generate(self, request_id: str, choice: Choice) -> Any:
        """Send one sequence; the call, to be iterated and cancelled."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Ask for its end."""

    @abstractmethod
    def take(self, message: Any, choice: Choice, output: WireOutput) -> int:
        """Add a message to the output. Returns how many prompt tokens were cached. Raises: EngineFailed if it cannot be."""

    @abstractmethod
    def embed(self, request_id: str, token_ids: tuple[int, ...], timeout_s: float) -> Any:
        """Send one text to be embedded; the call, to be awaited and cancelled. Its answer has `embedding` and `prompt_tokens`."""

    def tokenizer_chunks(self) -> AsyncIterable[common_pb2.GetTokenizerChunk]:
        """The server's tokenizer files, zipped and in pieces."""
        chunks: AsyncIterable[common_pb2.GetTokenizerChunk] = self._stream("GetTokenizer", common_pb2.GetTokenizerRequest())
        return chunks

    def kv_batches(self) -> AsyncIterable[common_pb2.KvEventBatch]:
        """What comes into the server's prefix cache and goes, without end."""
        batches: AsyncIterable[common_pb2.KvEventBatch] = self._stream("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest())
        return batches

    async def _call(self, name: str, request: Any) -> Any:
        return await getattr(self._stub, name)(request, timeout=self._call_timeout_s)

    def _stream(self, name: str, request: Any) -> Any:
        return getattr(self._stub, name)(request)


@dataclass(frozen=True, slots=True)
class Asked:
    """A choice as the wire says it: output that was begun elsewhere is a part of the prompt there."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int


def asked(choice: Choice) -> Asked:
    """What a choice asks of its server."""
    wanted = choice.request.wanted
    before = len(wanted.output_token_ids)
    return Asked(
        wanted.prompt_token_ids + wanted.output_token_ids,
        wanted.stop.max_output_tokens - before,
    )


def block_counts(token_count_max: int, usage: float, block_tokens: int) -> EngineStatistics:
    """A server's cache in blocks. usage: the part of it that is in use, from 0 to 1."""
    total, held = token_count_max // block_tokens, round(usage * token_count_max) // block_tokens
    return EngineStatistics(kv_block_count_total=total, kv_block_count_free=total - held, kv_block_count_held=held)


def check_prompt_count(told: int, choice: Choice) -> None:
    """Raises: EngineFailed if the server says to have computed another prompt than it was given; 0 says nothing."""
    given = len(asked(choice).prompt_token_ids)
    if told not in (0, given):
        raise EngineFailed(f"the engine says that the prompt had {told} tokens: it was given {given}")


def check_length(choice: Choice, output: WireOutput) -> None:
    """Raises: EngineFailed if an output is over for its length and shorter than it may be: then something of it was lost."""
    most, sent = asked(choice).max_tokens, len(output.token_ids)
    if output.finish_reason == "length" and sent < most:
        raise EngineFailed(f"the engine says that {most} tokens were reached, and sent {sent}")


def engine_error(error: grpc.aio.AioRpcError, choice: Choice) -> EngineError:
    """What a call's status means for its sequence. Once there are tokens, the request cannot be what was wrong."""
    said = f"{error.code().name}: {error.details() or 'no details'}"
    if choice.token_count == 0:
        match error.code():
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE:
                return RequestImpossible(f"the remote engine refused the request: {error.details()}")
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return EngineOverloaded(f"the remote engine is full: {error.details()}", OVERLOAD_WAIT_S)
    return EngineFailed(f"the remote engine gave the sequence up: {said}")
