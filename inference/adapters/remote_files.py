"""Tokenizer files of a remote server: download, and comparison with the local ones."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import grpc
import msgspec
from smg_grpc_proto.generated import common_pb2

from inference.adapters.remote_connection import DIALECTS, open_channel
from inference.adapters.remote_dialects import (
    GrpcDialect,
    ServerUnfit,
    quoted,
)
from inference.adapters.remote_settings import (
    KeyFile,
    Target,
    TlsFiles,
)

BUNDLE_BYTES_MAX = 64 << 20  # bytes: several times the largest tokenizer that is in use
UNPACKED_BYTES_MAX = 256 << 20
ENTRIES_MAX = 64
NEEDED = ("config.json", "tokenizer.json")
# What `zipfile` raises for odd bytes.
_BAD_ARCHIVE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError),
    *(NotImplementedError, RuntimeError, ValueError, struct.error),
)


class Bundle:
    """Zip archive of tokenizer files, received in chunks."""

    def __init__(self) -> None:
        self._data = io.BytesIO()
        self._sha256 = ""

    def add(self, chunk: common_pb2.GetTokenizerChunk) -> None:
        """Append a chunk. Raises ServerUnfit if the archive exceeds `BUNDLE_BYTES_MAX`."""
        self._data.write(chunk.data)
        self._sha256 = chunk.sha256
        if self._data.tell() > BUNDLE_BYTES_MAX:
            raise ServerUnfit(f"the server's tokenizer files exceed {BUNDLE_BYTES_MAX} bytes")

    def files(self) -> dict[str, bytes]:
        """Unpack the complete archive; return contents by name. Raises ServerUnfit if invalid."""
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
                f"the server's tokenizer files are not a zip archive: {quoted(str(error))}"
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
    """Download a server's tokenizer files into a directory: all of them, or none on an error.
    Blocks.

    Raises ServerUnfit or grpc.RpcError.
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
    """Return whether the server lacks the tokenizer call, or sends file names without contents."""
    return error.code() in (
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INTERNAL,
    )


def _meaning(content: bytes, name: str) -> Any:
    """Parse a tokenizer.json, leaving out truncation and padding, which neither side uses."""
    try:
        read = msgspec.json.decode(content)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ServerUnfit(f"{name} is not valid JSON: {error}") from error
    if isinstance(read, dict):
        read = {key: read[key] for key in read if key not in ("truncation", "padding")}
    return read
