"""Channels to remote engines: their options and credentials. One that waits and one that blocks, opened alike."""

from __future__ import annotations

import grpc

from inference.remote.dialect import ServerUnfit
from inference.remote.settings import Target, TlsFiles

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


def channel_options(tls: TlsFiles | None) -> list[tuple[str, int | str]]:
    """What a channel to a server is opened with."""
    name = "" if tls is None else tls.server_name
    return [*_OPTIONS, *([("grpc.ssl_target_name_override", name)] if name else [])]


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


def open_channel(target: Target, tls: TlsFiles | None) -> grpc.aio.Channel:
    """Of the running event loop. Raises: ServerUnfit."""
    if tls is None:
        return grpc.aio.insecure_channel(target.address, options=channel_options(tls))
    return grpc.aio.secure_channel(target.address, credentials(tls), options=channel_options(tls))


def open_blocking_channel(target: Target, tls: TlsFiles | None) -> grpc.Channel:
    """For what is asked before there is an event loop. Raises: ServerUnfit."""
    if tls is None:
        return grpc.insecure_channel(target.address, options=channel_options(tls))
    return grpc.secure_channel(target.address, credentials(tls), options=channel_options(tls))
