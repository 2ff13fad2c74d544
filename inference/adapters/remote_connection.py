"""Connection to a remote engine: channel, model files, model facts, checks before first use."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import lzma
import os
import random
import re
import struct
import tempfile
import uuid
import zipfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import grpc
import msgspec
from smg_grpc_proto.generated import common_pb2

from inference.adapters.external_core import Choice, Output, Request
from inference.adapters.remote_dialects import (
    SHARES,
    Dialect,
    GrpcDialect,
    ServerFacts,
    ServerUnfit,
    SglangDialect,
    TrtllmDialect,
    VllmDialect,
    said,
)
from inference.adapters.remote_http import HttpDialect, open_session
from inference.adapters.remote_settings import (
    KeyFile,
    KeyUnusable,
    RemoteSettings,
    Service,
    Target,
    TlsFiles,
)
from inference.capabilities import RequestField
from inference.checkpoint.checkpoint import read_count, read_json, read_json_list
from inference.engine import (
    GenerationRequest,
    GrammarKind,
    ModelInfo,
    ResponseFormat,
    SamplingParams,
    StopCriteria,
)
from inference.errors import EngineError
from inference.sequences import ThinkingStart
from inference.text.detokenizer import TextDecoder

Use = Callable[[Dialect, asyncio.TaskGroup], contextlib.AbstractContextManager[None]]
# Bytes of a message, which is copied by one call in C: gRPC's own default; for the last message of
# TensorRT-LLM, which repeats an answer with its log-probabilities. Each call has a lower bound.
MESSAGE_BYTES_MAX, WHOLE_ANSWER_BYTES_MAX = 4 << 20, 16 << 20
METADATA_BYTES_MAX = 16 << 10

# Library defaults unsuitable for engines are off: HTTP proxy and automatic retries. No keepalive
# pings: a server that does not expect them closes the connection; the health poll replaces them.
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_send_message_length", 64 << 20),  # a prompt of ten million tokens
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    # Nothing is decompressed: some bytes may become gigabytes. Identity only, as a bit set.
    ("grpc.per_message_decompression", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]

BUNDLE_BYTES_MAX = 64 << 20  # bytes: several times the largest tokenizer that is in use
UNPACKED_BYTES_MAX = 256 << 20
ENTRIES_MAX = 64
NEEDED = ("config.json", "tokenizer.json")
# What `zipfile` raises for odd bytes.
_BAD_ARCHIVE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError),
    *(NotImplementedError, RuntimeError, ValueError, struct.error),
)
# Families whose first position is the row after that of the padding token.
_OFFSET_FAMILIES = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})
DIALECTS: Mapping[Service, type[GrpcDialect | HttpDialect]] = {
    Service.TRTLLM: TrtllmDialect,
    Service.VLLM: VllmDialect,
    Service.SGLANG: SglangDialect,
    Service.OPENAI_HTTP: HttpDialect,
    Service.OPENAI_HTTPS: HttpDialect,
}
# Formats of which the first tokens are an output of this form.
PROBE_FORMATS = (
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "enum": ["' + 64 * "weir " + '"]}', '"[weir ]*'),
    (GrammarKind.REGEX, "[0-9]{200}", "[0-9]+"),
)
PROBE_FORMAT_TOKENS = 8
PROBE_BIAS = 100.0
# Length of the prompt for cache probes: two of the largest blocks in use, plus one.
PROBE_TOKENS = 513


def credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Load the TLS files, per connection since certificates are renewed. Raises: ServerUnfit."""
    try:
        return grpc.ssl_channel_credentials(
            tls.authority.read_bytes(),
            None if tls.key is None else tls.key.read_bytes(),
            None if tls.certificate is None else tls.certificate.read_bytes(),
        )
    except OSError as error:
        raise ServerUnfit(f"a certificate file cannot be read: {error}") from error


def open_channel(target: Target, tls: TlsFiles | None, api: Any = grpc.aio) -> Any:
    """Open a channel on the running event loop. api: `grpc` to block. Raises: ServerUnfit."""
    bytes_max = WHOLE_ANSWER_BYTES_MAX if target.service is Service.TRTLLM else MESSAGE_BYTES_MAX
    options = [*_OPTIONS, ("grpc.max_receive_message_length", bytes_max)]
    if tls is None:
        return api.insecure_channel(target.address, options=options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return api.secure_channel(target.address, credentials(tls), options=options)


class Bundle:
    """An archive of tokenizer files, received in chunks."""

    def __init__(self) -> None:
        self._data = io.BytesIO()
        self._sha256 = ""

    def add(self, chunk: common_pb2.GetTokenizerChunk) -> None:
        """Append a chunk. Raises: ServerUnfit if the archive is larger than `BUNDLE_BYTES_MAX`."""
        self._data.write(chunk.data)
        self._sha256 = chunk.sha256
        if self._data.tell() > BUNDLE_BYTES_MAX:
            raise ServerUnfit(f"the server's tokenizer files exceed {BUNDLE_BYTES_MAX} bytes")

    def files(self) -> dict[str, bytes]:
        """Return the contents by file name, once complete. Raises: ServerUnfit if invalid."""
        if hashlib.sha256(self._data.getbuffer()).hexdigest() != self._sha256.lower():
            raise ServerUnfit(
                "the server's tokenizer files do not match the hash that the server sent"
            )
        try:
            with zipfile.ZipFile(self._data) as archive:
                entries = archive.infolist()
                if (
                    len(entries) > ENTRIES_MAX
                    or sum(entry.file_size for entry in entries) > UNPACKED_BYTES_MAX
                ):
                    raise ServerUnfit("the server's tokenizer files are too many or too large")
                if any(
                    entry.is_dir() or PurePosixPath(entry.filename).name != entry.filename
                    for entry in entries
                ):
                    raise ServerUnfit(
                        "the server's tokenizer files have names with directories in them"
                    )
                return {entry.filename: archive.read(entry) for entry in entries}
        except _BAD_ARCHIVE as error:
            raise ServerUnfit(
                f"the server's tokenizer files are not a zip archive: {said(str(error))}"
            ) from error


def check_tokenizer(files: dict[str, bytes], directory: Path) -> None:
    """Raise ServerUnfit if the server's tokenizer differs from the local one."""
    content = files.get("tokenizer.json")
    ours = directory / "tokenizer.json"
    if content is None or content == (known := ours.read_bytes()):
        return
    if len(content) > 4 * len(known) or (
        _meaning(content, "the server's tokenizer.json") != _meaning(known, str(ours))
    ):
        raise ServerUnfit(
            f"the server's tokenizer differs from {ours}: its tokens would decode to different text"
        )


def fetch_model_files(
    target: Target, tls: TlsFiles | None, key: KeyFile | None, destination: Path, timeout_s: float
) -> None:
    """Download a server's tokenizer files into a directory, all or none. Blocks.

    Raises: ServerUnfit, grpc.RpcError.
    """
    bundle, dialect = Bundle(), DIALECTS[target.service]
    if not issubclass(dialect, GrpcDialect):
        raise ServerUnfit("HTTP servers do not send tokenizer files")
    with open_channel(target, tls, grpc) as channel:
        stub = dialect.stub_type(channel)
        metadata = None if key is None else tuple(key.header().items())
        request = common_pb2.GetTokenizerRequest()
        for chunk in stub.GetTokenizer(request, timeout=timeout_s, metadata=metadata):
            bundle.add(chunk)
    files = bundle.files()
    if missing := [name for name in NEEDED if name not in files]:
        raise ServerUnfit(
            f"the server does not send {' or '.join(missing)}: set the checkpoint's directory in"
            " WEIR_MODELS"
        )
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".incoming-") as staging:
        fresh = Path(staging, "fresh")
        fresh.mkdir()
        for name, content in files.items():
            (fresh / name).write_bytes(content)
        if destination.exists():  # replace an older copy only with a complete new one
            os.rename(destination, Path(staging, "old"))
        os.rename(fresh, destination)


def is_unanswered(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the server lacks the tokenizer call, or sends files by name only."""
    return error.code() in (
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INTERNAL,
    )


def _meaning(content: bytes, name: str) -> Any:
    """Return a tokenizer.json without truncation and padding, which neither side uses."""
    try:
        read = msgspec.json.decode(content)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ServerUnfit(f"{name} is not valid JSON: {error}") from error
    if isinstance(read, dict):
        read = {key: read[key] for key in read if key not in ("truncation", "padding")}
    return read


def read_remote_encoder(
    directory: Path, *, name: str, engine: str, input_tokens_max: int | None
) -> tuple[ModelInfo, bool]:
    """Return an embedding model, and whether its vectors have length 1."""
    path = directory / "config.json"
    raw = read_json(path)
    size = "hidden_size" if "hidden_size" in raw else "dim"
    window = read_count(raw, "max_position_embeddings", path)
    if raw.get("model_type") in _OFFSET_FAMILIES:
        window -= int(raw.get("pad_token_id") or 0) + 1
    limits = [window, input_tokens_max or window]
    if (limit_path := directory / "sentence_bert_config.json").exists():
        limit = read_json(limit_path).get("max_seq_length")
        limits += [limit] if isinstance(limit, int) and limit > 0 else []
    modules = (
        read_json_list(directory / "modules.json") if (directory / "modules.json").exists() else []
    )
    normalized = any(str(module.get("type", "")).endswith("Normalize") for module in modules)
    architectures = raw.get("architectures") or ["unknown"]
    model = ModelInfo(
        name=name,
        architecture=str(architectures[0]),
        engine=engine,
        context_window_tokens=min(limits),
        vocabulary_size=read_count(raw, "vocab_size", path),
        directory=str(directory),
        embedding_dimension=read_count(raw, size, path),
    )
    return model, normalized


_log = logging.getLogger("weir.inference.adapters")


@contextlib.asynccontextmanager
async def open_dialect(settings: RemoteSettings) -> AsyncIterator[Dialect]:
    """Open a connection and its dialect. Leaving the context ends its calls."""
    dialect = DIALECTS[settings.target.service]
    if settings.key is not None:
        try:
            settings.key.header()
        except KeyUnusable as error:
            raise ServerUnfit(str(error)) from error
    if not issubclass(dialect, GrpcDialect):
        async with open_session(settings) as session:
            yield dialect(session, settings)
        return
    channel = open_channel(settings.target, settings.tls)
    try:
        yield dialect(channel, settings)
    finally:
        await channel.close()


class _Over(Exception):
    """Ends the tasks of a connection."""


class Link:
    """Successive connections to one server: each is opened, checked, and used until it is lost."""

    def __init__(self, settings: RemoteSettings) -> None:
        self._settings = settings
        self._connecting: asyncio.Timeout | None = None  # while the checks run
        # Resolves to the reason when the connection ends.
        self._ended: asyncio.Future[str] | None = None

    async def run(self, examine: Callable[[Dialect], Awaitable[None]], use: Use) -> str:
        """Run one connection and return why it ended. use: context entered after the checks."""
        target = self._settings.target
        self._ended = ended = asyncio.get_running_loop().create_future()
        try:
            async with open_dialect(self._settings) as dialect:
                try:
                    async with asyncio.timeout(
                        self._settings.connect_timeout_s
                    ) as self._connecting:
                        await examine(dialect)
                finally:
                    self._connecting = None
                reason = ""
                try:
                    async with asyncio.TaskGroup() as tasks:
                        with use(dialect, tasks):
                            reason = await ended
                        raise _Over
                except* _Over:
                    pass
                return reason
        except TimeoutError:
            return f"{target} did not answer within {self._settings.connect_timeout_s:g} s"
        except ServerUnfit as error:
            return f"{target}: {error}"
        except grpc.aio.AioRpcError as error:
            failed = f"a call to {target} failed: {error.code().name}: {said(error.details())}"
            return failed + self._about_key(error.code())

    def _about_key(self, code: grpc.StatusCode) -> str:
        """Return the remedy if the server refused the key, or requires one."""
        if code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return ""
        if self._settings.key is not None:
            return f"; the server does not accept the key in {self._settings.key.path}"
        return "; set WEIR_REMOTE_KEY_FILES (in the fleet file, key_file) if it requires a key"

    def end(self, reason: str) -> None:
        """End the connection. The first reason is kept."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    def end_at_once(self) -> None:
        """End the connection even while its checks run."""
        if self._connecting is not None:
            self._connecting.reschedule(asyncio.get_running_loop().time())
        self.end("closed")


class Introduction:
    """Checks of every server before the first request. Raise ServerUnfit, grpc.aio.AioRpcError."""

    def __init__(self, dialect: Dialect, settings: RemoteSettings, model: ModelInfo) -> None:
        self.dialect = dialect
        self.settings = settings
        self.model = model

    async def introduce(self) -> ServerFacts:
        """Return the server's facts if it is healthy and serves the expected model."""
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
        """Return the facts, compared with the checkpoint; its tokenizer may have fewer tokens."""
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
        """Return the server's tokenizer files by name."""
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
        """Run all checks and return the server's facts."""
        facts = await self.introduce()
        await self.dialect.probe(self.model.vocabulary_size)
        await self.find_formats_after_thinking()
        if self.settings.share_prefixes:
            await self.cached_tokens(self.probe_prompt(), "weir-probe")
        elif await self.shares_prefixes():
            raise ServerUnfit(SHARES)
        return facts

    async def find_formats_after_thinking(self) -> None:
        """Find the response formats that the server applies after thinking, for its capabilities.

        A bias closes the thinking at once; from then on the output must be as the format says.
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
        """Return whether an output is, after these ids, as a format says."""
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
        """Return whether a random prompt sent under one salt is cached under another.

        A router may send each of the first ones to another worker.
        """
        prompt, name = self.probe_prompt(), uuid.uuid4().hex
        for index in range(self.dialect.salt_count):
            if await self.cached_tokens(prompt, f"weir-probe-{name}-{index}") > 0:
                return True
        return False

    def probe_prompt(self) -> tuple[int, ...]:
        """Return random ids from the middle of the vocabulary, without special tokens."""
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
        """Generate one output, bypassing the queue. Returns it and the number of cached prompt
        tokens. Raises: EngineFailed, grpc.aio.AioRpcError.
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
