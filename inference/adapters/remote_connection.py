"""Connection to a remote server: channel, dialect, and successive connections to one target."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc

from inference.adapters.remote_dialects import (
    Dialect,
    GrpcDialect,
    ServerUnfit,
    SglangDialect,
    TrtllmDialect,
    VllmDialect,
    quoted,
)
from inference.adapters.remote_http import HttpDialect, open_connections
from inference.adapters.remote_settings import (
    KeyUnusable,
    RemoteSettings,
    Service,
    Target,
    TlsFiles,
)

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
DIALECTS: Mapping[Service, type[GrpcDialect | HttpDialect]] = {
    Service.TRTLLM: TrtllmDialect,
    Service.VLLM: VllmDialect,
    Service.SGLANG: SglangDialect,
    Service.OPENAI_HTTP: HttpDialect,
    Service.OPENAI_HTTPS: HttpDialect,
}


def credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Load the TLS files, again for each connection since they are renewed. Raises: ServerUnfit."""
    try:
        return grpc.ssl_channel_credentials(
            tls.authority.read_bytes(),
            None if tls.key is None else tls.key.read_bytes(),
            None if tls.certificate is None else tls.certificate.read_bytes(),
        )
    except OSError as error:
        raise ServerUnfit(f"a certificate file cannot be read: {error}") from error


def open_channel(target: Target, tls: TlsFiles | None, api: Any = grpc.aio) -> Any:
    """Open a channel on the running event loop; `api=grpc` blocks instead. Raises: ServerUnfit."""
    bytes_max = WHOLE_ANSWER_BYTES_MAX if target.service is Service.TRTLLM else MESSAGE_BYTES_MAX
    options = [*_OPTIONS, ("grpc.max_receive_message_length", bytes_max)]
    if target.name:
        options.append(("grpc.default_authority", target.name))
    if tls is None:
        return api.insecure_channel(target.address, options=options)
    if server_name := tls.server_name or target.name.rpartition(":")[0]:
        options.append(("grpc.ssl_target_name_override", server_name))
    return api.secure_channel(target.address, credentials(tls), options=options)


@contextlib.asynccontextmanager
async def open_dialect(settings: RemoteSettings) -> AsyncIterator[Dialect]:
    """Open a connection and its dialect. Leaving the context ends its calls.

    Raises: ServerUnfit.
    """
    dialect = DIALECTS[settings.target.service]
    if settings.key is not None:
        try:
            settings.key.header()
        except KeyUnusable as error:
            raise ServerUnfit(str(error)) from error
    if not issubclass(dialect, GrpcDialect):
        async with open_connections(settings) as connections:
            yield dialect(connections, settings)
        return
    channel = open_channel(settings.target, settings.tls)
    try:
        yield dialect(channel, settings)
    finally:
        await channel.close()


class _Over(Exception):
    """Exception that ends the tasks of a connection."""


class Link:
    """Successive connections to one server: each is opened, checked, and used until it is lost."""

    def __init__(self, settings: RemoteSettings) -> None:
        self._settings = settings
        self._connecting: asyncio.Timeout | None = None  # while the checks run
        # Resolves to the reason when the connection ends.
        self._ended: asyncio.Future[str] | None = None

    async def run(self, examine: Callable[[Dialect], Awaitable[None]], use: Use) -> str:
        """Run one connection and return why it ended. `use` is entered after all checks passed."""
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
            failed = f"a call to {target} failed: {error.code().name}: {quoted(error.details())}"
            return failed + self._about_key(error.code())

    def _about_key(self, code: grpc.StatusCode) -> str:
        """Explain how to fix the key if the server refused it or requires one."""
        if code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return ""
        if self._settings.key is not None:
            return f"; the server does not accept the key in {self._settings.key.path}"
        return "; set WEIR_REMOTE_KEY_FILES (in the fleet file, key_file) if it requires a key"

    def end(self, reason: str) -> None:
        """End the connection. If it is called again, the first reason is kept."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    def end_at_once(self) -> None:
        """End the connection even while its checks run."""
        if self._connecting is not None:
            self._connecting.reschedule(asyncio.get_running_loop().time())
        self.end("closed")
