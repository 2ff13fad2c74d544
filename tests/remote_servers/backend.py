"""Common part of both servers: sequences, faults, tokenizer files, cache events."""

from __future__ import annotations

import asyncio
import hashlib
import io
import math
import zipfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2
from tokenizers import Tokenizer

from bench import engine_streams as streams
from bench.engine_streams import SequenceStream
from inference.adapters.torch_engine import TorchEngine
from inference.encoder.engine import TorchEncoder
from inference.engine import (
    EmbeddingRequest,
    GenerationRequest,
    Scheduled,
    SequenceFinished,
    TokensGenerated,
)
from inference.errors import EngineError, RequestImpossible

Context = grpc.aio.ServicerContext[object, object]

FAULTS = frozenset(
    {
        "unhealthy",  # reports that it is unhealthy
        "mute",  # generates nothing and does not answer
        "wedge",  # the same after three messages
        "drop",  # drops each sequence after three messages
        "refuse",  # refuses requests as a full server
        "mute_abort",  # ignores aborts
        "wrong_prompt",  # reports another count of prompt tokens
        "wrong_cached",  # reports more cached tokens than prompt tokens
        "running_cached",  # reports other cached tokens, one more, until the last message
        "lose_chunk",  # omits one message
        "reasoning_parser",  # holds grammars back until `</think>`, as vLLM and SGLang do with one
        "reasoning_content",  # splits thinking from text, and counts it without its marks
        "reasoning",  # the same by this name
        "reasoning_total",  # counts all output as thinking
        "reasoning_zero",  # counts none
        "reasoning_hidden",  # counts it, and sends none of it
        "preempt",  # ends sequences as aborted without an abort, after three messages
        "unsalted",  # shares cached prefixes between tenants
        "cut_end",  # omits the end token from the output
        "no_tokenizer",
        "other_tokenizer",
        "corrupt_tokenizer",
        "no_events",
        "lose_event",
        "short_vector",  # sends one float too few
        "no_number",  # sends a vector with a NaN
        "long_vector",  # sends vectors that are not normalized
        # HTTP only, by the name of a field:
        "refuse return_token_ids",  # and returns them as NVIDIA Dynamo does
        "refuse continuous_usage_stats",
        "refuse min_p",
        "refuse cache_salt",
        "refuse nvext.cache_salt",
        "ignore cache_salt",
        "ignore extra_key",
        "tenant_header",  # separates prefixes by `x-tenant-id` if it is there, as NVIDIA Dynamo
        "ignore logit_bias",
        "ignore seed",
        "ignore stop",
        "early_stop",  # ends outputs at the first letter of a stop sequence
        "ignore structured_outputs",
        "no_ids",  # ignores every request for token ids
        "generate",  # serves `/generate`, and refuses token ids elsewhere, as SMG does
        "no_usage",  # ends streams without usage
        "only_streams",  # refuses requests without a stream
        "overcount",  # counts one token more than requested at the end
        "undercount",  # counts one token at the end
        "no_counts",  # does not report cached tokens
        "no_zeros",  # reports cached tokens only if there are some
        "ranks",  # accepts priorities
    }
)
MESSAGES_BEFORE_FAULT = 3
BLOCK_TOKENS = 16


@dataclass
class Backend:
    """Engine behind a server. faults: of `FAULTS`; may change while it serves."""

    engine: TorchEngine | TorchEncoder
    directory: Path
    faults: set[str] = field(default_factory=set)
    running: dict[str, SequenceStream] = field(default_factory=dict)
    seen_count: int = 0
    aborted: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of HTTP requests
    key: tuple[str, str] | None = None  # required header with its value
    _release: asyncio.Event = field(default_factory=asyncio.Event)
    _subscribers: list[asyncio.Queue[common_pb2.KvEventBatch]] = field(default_factory=list)
    _stored: set[int] = field(default_factory=set)
    _sequence_number: int = 0

    def go_wrong(self, faults: Iterable[str]) -> None:
        """Set the faults; calls held by earlier ones continue."""
        assert set(faults) <= FAULTS, f"unknown faults: {set(faults) - FAULTS}"
        self.faults = set(faults)
        self._release.set()
        self._release = asyncio.Event()

    async def run(
        self, request_id: str, request: GenerationRequest, context: Context
    ) -> AsyncIterator[Scheduled | TokensGenerated | SequenceFinished]:
        """Yield the events of a sequence, with injected faults."""
        self.seen_count += 1
        if "refuse" in self.faults:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        if "mute" in self.faults:
            await self._release.wait()
        message_count = 0
        assert isinstance(self.engine, TorchEngine), "it generates"
        try:
            async with streams.stream(self.engine, request) as stream:
                self.running[request_id] = stream
                async for event in stream:
                    if isinstance(event, TokensGenerated):
                        message_count += 1
                        if message_count == MESSAGES_BEFORE_FAULT and "lose_chunk" in self.faults:
                            continue
                        if message_count > MESSAGES_BEFORE_FAULT:
                            await self._go_wrong(stream, context)
                    elif isinstance(event, Scheduled):
                        self._publish(request.prompt_token_ids)
                    assert not isinstance(event, type(None))
                    yield event  # type: ignore[misc]  # one choice: no `ChoiceFinished` comes
        except RequestImpossible as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except EngineError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        finally:
            self.running.pop(request_id, None)

    def held_back(self, request: GenerationRequest, *, waits: bool) -> GenerationRequest:
        """Return a request whose grammar begins where the server's reasoning parser lets it begin.

        waits: the request leaves that to the parser, which looks for the last mark in the prompt.
        """
        if "reasoning_parser" not in self.faults or request.response_format is None or not waits:
            return request
        tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        marks = [tokenizer.token_to_id(each) for each in ("<think>", "</think>")]
        last = next((each for each in reversed(request.prompt_token_ids) if each in marks), None)
        if last is None:  # until the model closes thinking that it has not begun
            return replace(request, response_format=None)
        return replace(request, splits_reasoning=last == marks[0])

    async def embed(self, token_ids: tuple[int, ...], context: Context) -> tuple[list[float], int]:
        """Return the vector of a text and its number of tokens, changed by the faults."""
        self.seen_count += 1
        if not isinstance(self.engine, TorchEncoder):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this model does not embed")
            raise AssertionError("aborted")
        if "refuse" in self.faults:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        if "drop" in self.faults:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is gone")
        if "mute" in self.faults:
            await self._release.wait()
        [vector] = (await self.engine.embed(EmbeddingRequest((token_ids,)))).vectors
        floats = list(vector)[: -1 if "short_vector" in self.faults else None]
        if "no_number" in self.faults:
            floats[0] = math.nan
        scale = 2.0 if "long_vector" in self.faults else 1.0
        return [scale * each for each in floats], len(token_ids) + ("wrong_prompt" in self.faults)

    async def _go_wrong(self, stream: SequenceStream, context: Context) -> None:
        if "wedge" in self.faults:
            await self._release.wait()
        if "drop" in self.faults:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is gone")
        if "preempt" in self.faults:
            stream.cancel()

    def key_fault(self, headers: Mapping[str, str]) -> str:
        """Return an error that repeats the key of a request, as some gateways do; empty if right.

        headers: with names in lower case.
        """
        if self.key is None or headers.get(self.key[0]) == self.key[1]:
            return ""
        return f"Incorrect API key provided: {headers.get(self.key[0], 'none')}"

    def running_cached(self, cached_token_count: int) -> int:
        """Return the cached tokens to report while an output runs."""
        return cached_token_count + ("running_cached" in self.faults)

    def abort(self, request_id: str) -> bool:
        """Abort a request. Return whether it was running."""
        self.aborted.append(request_id)
        stream = self.running.get(request_id)
        if stream is None or "mute_abort" in self.faults:
            return False
        stream.cancel()
        return True

    async def tokenizer_chunks(
        self, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Yield the checkpoint's small files in chunks."""
        if "no_tokenizer" in self.faults:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(self.directory.glob("*.json")):
                content = path.read_bytes()
                if path.name == "tokenizer.json" and "other_tokenizer" in self.faults:
                    content = content.replace(b"<|pad|>", b"<|dap|>").replace(b"[PAD]", b"[DAP]")
                archive.writestr(path.name, content)
        data = buffer.getvalue()
        digest = hashlib.sha256(data).hexdigest()
        if "corrupt_tokenizer" in self.faults:
            data = data[:-1] + bytes([data[-1] ^ 1])
        pieces = [data[start : start + 4096] for start in range(0, len(data), 4096)]
        for index, piece in enumerate(pieces):
            yield common_pb2.GetTokenizerChunk(
                data=piece, sha256=digest if index == len(pieces) - 1 else ""
            )

    async def kv_batches(self, context: Context) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Stream the cache events from now on."""
        if "no_events" in self.faults:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "cache events are not enabled")
        queue: asyncio.Queue[common_pb2.KvEventBatch] = asyncio.Queue()
        self._subscribers.append(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._subscribers.remove(queue)

    @property
    def subscriber_count(self) -> int:
        """Return the number of subscribers to cache events."""
        return len(self._subscribers)

    def publish_cleared(self) -> None:
        """Publish an event as if the cache was flushed."""
        self._stored.clear()
        self._send(common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared()))

    def publish_removed(self, prompt: tuple[int, ...]) -> None:
        """Publish an event as if a prompt's blocks were evicted."""
        hashes = [own for _, own, _ in _blocks(prompt)]
        self._stored -= set(hashes)
        self._send(common_pb2.KvCacheEvent(removed=common_pb2.KvBlocksRemoved(block_hashes=hashes)))

    def _publish(self, prompt: tuple[int, ...]) -> None:
        for parent, own, tokens in _blocks(prompt):
            if own in self._stored:
                continue
            self._stored.add(own)
            block = common_pb2.KvBlock(block_hash=own, token_ids=tokens, block_size=BLOCK_TOKENS)
            stored = common_pb2.KvBlocksStored(blocks=[block])
            if parent:
                stored.parent_block_hash = parent
            self._send(common_pb2.KvCacheEvent(stored=stored))

    def _send(self, event: common_pb2.KvCacheEvent) -> None:
        self._sequence_number += 2 if "lose_event" in self.faults else 1
        for queue in self._subscribers:
            queue.put_nowait(
                common_pb2.KvEventBatch(sequence_number=self._sequence_number, events=[event])
            )


def _blocks(prompt: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield parent, hash and tokens of each full block."""
    parent = 0
    for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        tokens = prompt[start : start + BLOCK_TOKENS]
        own = int.from_bytes(
            hashlib.sha256(repr((parent, tokens)).encode()).digest()[:8], "big", signed=True
        )
        yield parent, own, tokens
        parent = own
