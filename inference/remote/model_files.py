"""The tokenizer that a server uses: whether it is ours, and, where we have none, its files.

Servers send them as a zip archive in pieces, the last of which names the archive's hash. An archive is taken for hostile until it
is looked at: sizes, number and names of its entries are bounded before anything is unpacked.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, cast

import grpc
from smg_grpc_proto.generated import common_pb2, trtllm_service_pb2_grpc, vllm_engine_pb2_grpc

from inference.remote.channel import open_blocking_channel
from inference.remote.dialect import ServerUnfit
from inference.remote.settings import Service, Target, TlsFiles

BUNDLE_BYTES_MAX = 200 << 20  # bytes: ten times the largest tokenizer that is in use
UNPACKED_BYTES_MAX = 500 << 20
ENTRIES_MAX = 64
NEEDED = ("config.json", "tokenizer.json")

# The generated code has no types.
STUBS: Mapping[Service, Callable[[grpc.Channel], Any]] = {
    Service.TRTLLM: cast(Any, trtllm_service_pb2_grpc).TrtllmServiceStub,
    Service.VLLM: cast(Any, vllm_engine_pb2_grpc).VllmEngineStub,
}


class Chunk(Protocol):
    """A piece of an archive."""

    @property
    def data(self) -> bytes: ...
    @property
    def sha256(self) -> str: ...


class Bundle:
    """An archive while it comes, and then its files."""

    def __init__(self) -> None:
        self._data = io.BytesIO()
        self._sha256 = ""

    def add(self, chunk: Chunk) -> None:
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
    with open_blocking_channel(target, tls) as channel:
        stub = STUBS[target.service](channel)
        chunks: Iterable[Chunk] = stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=timeout_s)
        for chunk in chunks:
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
