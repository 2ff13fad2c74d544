"""One connection to a remote engine: its channel, its model's files and facts, and the examination before its first request."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import os
import random
import tempfile
import uuid
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2

from inference.adapters.external_core import Choice, Output, Request
from inference.adapters.remote_dialects import (
    SHARES,
    Dialect,
    ServerFacts,
    ServerUnfit,
    TrtllmDialect,
    VllmDialect,
)
from inference.adapters.remote_settings import RemoteSettings, Service, Target, TlsFiles
from inference.capabilities import Capabilities
from inference.checkpoint.checkpoint import read_default_sampling, read_end_token_ids, read_json, read_json_list
from inference.engine import GenerationRequest, ModelInfo, SamplingParams, StopCriteria
from inference.errors import CheckpointInvalid, EngineError
from inference.text.detokenizer import TextDecoder

Use = Callable[[Dialect, grpc.aio.Channel, asyncio.TaskGroup], contextlib.AbstractContextManager[None]]
MESSAGE_BYTES_MAX = 64 << 20  # bytes: the last message of a long answer with log-probabilities

# Of the library's defaults, a proxy for the outer world and silent repetitions are not for engines. There are no keepalive pings: a
# server that has not been told to expect them ends the connection for it. Our own look at its health does their work.
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


def credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Read anew for each connection, since certificates are renewed. Raises: ServerUnfit naming a file that cannot be read."""
    try:
        return grpc.ssl_channel_credentials(
            tls.authority.read_bytes(),
            None if tls.key is None else tls.key.read_bytes(),
            None if tls.certificate is None else tls.certificate.read_bytes(),
        )
    except OSError as error:
        raise ServerUnfit(f"a certificate file cannot be read: {error}") from error


def open_channel(target: Target, tls: TlsFiles | None, api: Any = grpc.aio) -> Any:
    """A channel of the running event loop. api: `grpc` for one that blocks, of no event loop. Raises: ServerUnfit."""
    if tls is None:
        return api.insecure_channel(target.address, options=_OPTIONS)
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return api.secure_channel(target.address, credentials(tls), options=[*_OPTIONS, *name])


BUNDLE_BYTES_MAX = 200 << 20  # bytes: ten times the largest tokenizer that is in use
UNPACKED_BYTES_MAX = 500 << 20
ENTRIES_MAX = 64
NEEDED = ("config.json", "tokenizer.json")


class Bundle:
    """An archive while it comes, and then its files."""

    def __init__(self) -> None:
        self._data = io.BytesIO()
        self._sha256 = ""

    def add(self, chunk: common_pb2.GetTokenizerChunk) -> None:
        """The next piece. Raises: ServerUnfit if there is no end to it."""
        self._data.write(chunk.data)
        self._sha256 = chunk.sha256
        if self._data.tell() > BUNDLE_BYTES_MAX:
            raise ServerUnfit(f"the server's tokenizer files exceed {BUNDLE_BYTES_MAX} bytes")

    def files(self) -> dict[str, bytes]:
        """All files by name, once all pieces are there. Raises: ServerUnfit."""
        if hashlib.sha256(self._data.getbuffer()).hexdigest() != self._sha256.lower():
            raise ServerUnfit("the server's tokenizer files do not have the hash that the server names")
        try:
            with zipfile.ZipFile(self._data) as archive:
                entries = archive.infolist()
                if len(entries) > ENTRIES_MAX or sum(entry.file_size for entry in entries) > UNPACKED_BYTES_MAX:
                    raise ServerUnfit("the server's tokenizer files are too many or too large")
                if any(entry.is_dir() or PurePosixPath(entry.filename).name != entry.filename for entry in entries):
                    raise ServerUnfit("the server's tokenizer files have names with directories in them")
                return {entry.filename: archive.read(entry) for entry in entries}
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise ServerUnfit(f"the server's tokenizer files are no archive: {error}") from error


def check_tokenizer(files: dict[str, bytes], directory: Path) -> None:
    """Raises: ServerUnfit if the server's tokens mean other text than ours."""
    theirs = files.get("tokenizer.json")
    ours = directory / "tokenizer.json"
    if theirs is not None and _meaning(theirs, "the server's tokenizer.json") != _meaning(ours.read_bytes(), str(ours)):
        raise ServerUnfit(f"the server's tokenizer is another one than {ours}: its tokens would become other text")


def fetch_model_files(target: Target, tls: TlsFiles | None, destination: Path, timeout_s: float) -> None:
    """Ask a server for its tokenizer files and put them into a directory, all or none; blocks.

    Raises: ServerUnfit, grpc.RpcError.
    """
    bundle = Bundle()
    with open_channel(target, tls, grpc) as channel:
        stub = DIALECTS[target.service].stub_type(channel)
        for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=timeout_s):
            bundle.add(chunk)
    files = bundle.files()
    if missing := [name for name in NEEDED if name not in files]:
        raise ServerUnfit(f"the server sends no {' and no '.join(missing)}: name the checkpoint's directory in WEIR_MODELS")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".incoming-") as staging:
        fresh = Path(staging, "fresh")
        fresh.mkdir()
        for name, content in files.items():
            (fresh / name).write_bytes(content)
        if destination.exists():  # an older copy makes way only for a whole new one
            os.rename(destination, Path(staging, "old"))
        os.rename(fresh, destination)


def is_unanswered(error: grpc.RpcError) -> bool:
    """Whether a server cannot tell its tokenizer: it knows no such call, or has the files by name only."""
    code = error.code() if isinstance(error, grpc.aio.AioRpcError | grpc.Call) else None
    return code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INTERNAL)


def _meaning(content: bytes, name: str) -> Any:
    """What a tokenizer.json says of tokens; how it would cut and pad is neither used by us nor by servers."""
    try:
        said = json.loads(content)
    except ValueError as error:
        raise ServerUnfit(f"{name} is no JSON: {error}") from error
    return {key: value for key, value in said.items() if key not in ("truncation", "padding")} if isinstance(said, dict) else said


def read_remote_model(
    directory: Path, *, name: str, engine: str, context_window_tokens_max: int | None, capabilities: Capabilities
) -> tuple[ModelInfo, frozenset[int]]:
    """The model, and the tokens that end its outputs. Raises: CheckpointInvalid naming the file and what to mend."""
    path = directory / "config.json"
    raw = read_json(path)
    text = raw.get("text_config") or raw  # of models that also see or hear
    vocabulary_size = _count(text, "vocab_size", path)
    window = _count(text, "max_position_embeddings", path)
    try:
        ends = read_end_token_ids(directory, raw) or read_end_token_ids(directory, text)
    except (TypeError, ValueError) as error:
        raise CheckpointInvalid(str(path), f"eos_token_id is no token: {error}") from error
    if any(not 0 <= end < vocabulary_size for end in ends):
        raise CheckpointInvalid(str(path), f"eos_token_id {sorted(ends)} is not within vocab_size {vocabulary_size}")
    architectures = raw.get("architectures") or ["unknown"]
    model = ModelInfo(
        name=name,
        architecture=str(architectures[0]),
        engine=engine,
        context_window_tokens=min(window, context_window_tokens_max or window),
        vocabulary_size=vocabulary_size,
        directory=str(directory),
        default_sampling=read_default_sampling(directory, vocabulary_size, capabilities, engine),
        capabilities=capabilities,
        continues_output=True,
    )
    return model, ends


# Families whose first position is the row behind that of the padding token.
_OFFSET_FAMILIES = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})


def read_remote_encoder(directory: Path, *, name: str, engine: str, input_tokens_max: int | None) -> tuple[ModelInfo, bool]:
    """A model that embeds, and whether its vectors have the length 1. Raises: CheckpointInvalid naming the file."""
    path = directory / "config.json"
    raw = read_json(path)
    size = "hidden_size" if "hidden_size" in raw else "dim"
    window = _count(raw, "max_position_embeddings", path)
    if raw.get("model_type") in _OFFSET_FAMILIES:
        window -= int(raw.get("pad_token_id") or 0) + 1
    limits = [window, input_tokens_max or window]
    if (limit_path := directory / "sentence_bert_config.json").exists():
        limit = read_json(limit_path).get("max_seq_length")
        limits += [limit] if isinstance(limit, int) and limit > 0 else []
    modules = read_json_list(directory / "modules.json") if (directory / "modules.json").exists() else []
    normalized = any(str(module.get("type", "")).endswith("Normalize") for module in modules)
    architectures = raw.get("architectures") or ["unknown"]
    model = ModelInfo(
        name=name,
        architecture=str(architectures[0]),
        engine=engine,
        context_window_tokens=min(limits),
        vocabulary_size=_count(raw, "vocab_size", path),
        directory=str(directory),
        embedding_dimension=_count(raw, size, path),
    )
    return model, normalized


def _count(raw: dict[str, Any], entry: str, path: Path) -> int:
    value = raw.get(entry)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointInvalid(str(path), f"entry {entry} = {value!r} is not a count of at least 1")
    return value


DIALECTS: Mapping[Service, type[TrtllmDialect | VllmDialect]] = {Service.TRTLLM: TrtllmDialect, Service.VLLM: VllmDialect}
PROBE_TOKENS = 513  # of a prompt that is sent to find out what the server caches: two of the largest blocks in use, and one
_log = logging.getLogger("weir.inference.adapters")


@contextlib.asynccontextmanager
async def open_dialect(settings: RemoteSettings) -> AsyncIterator[tuple[Dialect, grpc.aio.Channel]]:
    """A channel and what speaks over it. On leaving, its calls are ended."""
    channel = open_channel(settings.target, settings.tls)
    try:
        yield DIALECTS[settings.target.service](channel, settings.call_timeout_s), channel
    finally:
        await channel.close()


class _Over(Exception):
    """Ends the tasks of a connection."""


class Link:
    """Connections to one server, one after the other: each is opened, examined, and used until it is of no use any more."""

    def __init__(self, settings: RemoteSettings) -> None:
        self._settings = settings
        self._connecting: asyncio.Timeout | None = None  # while it is asked whether it is fit
        self._ended: asyncio.Future[str] | None = None  # the reason, once the connection is of no use any more

    async def run(self, examine: Callable[[Dialect], Awaitable[None]], use: Use) -> str:
        """One connection to its end; returns why it ended. use: what is done with it, entered once it is examined."""
        target = self._settings.target
        self._ended = ended = asyncio.get_running_loop().create_future()
        try:
            async with open_dialect(self._settings) as (dialect, channel):
                try:
                    async with asyncio.timeout(self._settings.connect_timeout_s) as self._connecting:
                        await examine(dialect)
                finally:
                    self._connecting = None
                reason = ""
                try:
                    async with asyncio.TaskGroup() as tasks:
                        with use(dialect, channel, tasks):
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
            return f"{target} cannot be asked: {error.code().name}: {error.details()}"

    def end(self, reason: str) -> None:
        """The connection is of no use any more; the first to say why is believed."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    def end_at_once(self) -> None:
        """Also one that is only being examined."""
        if self._connecting is not None:
            self._connecting.reschedule(asyncio.get_running_loop().time())
        self.end("closed")


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
        wanted = GenerationRequest(prompt, SamplingParams(), StopCriteria(1, ignore_eos=True), salt)
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
) -> tuple[Output, int]:
    """One output, outside of any queue, and how many prompt tokens were cached. Raises: EngineFailed, grpc.aio.AioRpcError."""
    choice = Choice(Request(0, wanted, ends, 0.0), 0, 0, decoder.open())
    output, cached_token_count = Output(), 0
    call = dialect.generate(f"weir-probe-{uuid.uuid4().hex}", choice)
    try:
        async for message in call:
            cached_token_count = max(cached_token_count, dialect.take(message, choice, output))
    finally:
        call.cancel()
    return output, cached_token_count
