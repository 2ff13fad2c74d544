"""TLS options: encryption, trusted certificates, client certificates."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import grpc

from weir_client import errors

Pem = bytes | str | Path
SCHEMES = (("https://", True), ("grpcs://", True), ("http://", False), ("grpc://", False))


class TlsOptions(TypedDict, total=False):
    """TLS options of every client. Certificates and keys are PEM: bytes, or the path of a file.

    tls: on or off. Default: by the scheme of the address (`https://`, `grpcs://`, `http://`,
        `grpc://`), then `WEIR_TLS` (1 or 0), then on if certificates are given here or the address
        is not this machine (loopback, unix socket).
    root_certificates: trusted instead of the system's authorities; default
        `WEIR_ROOT_CERTIFICATES`, a file.
    client_certificate, client_key: for mutual TLS; default `WEIR_CLIENT_CERTIFICATE`,
        `WEIR_CLIENT_KEY`, files.
    """

    tls: bool | None
    root_certificates: Pem | None
    client_certificate: Pem | None
    client_key: Pem | None


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates and key of one connection, as PEM bytes."""

    root_certificates: bytes | None = field(default=None, repr=False)
    client_certificate: bytes | None = field(default=None, repr=False)
    client_key: bytes | None = field(default=None, repr=False)

    def credentials(self) -> grpc.ChannelCredentials:
        """Build gRPC channel credentials from the certificates."""
        return grpc.ssl_channel_credentials(
            self.root_certificates, self.client_key, self.client_certificate
        )


def without_scheme(address: str) -> tuple[str, bool | None]:
    """Return an address without its scheme, and whether that means TLS; None without a scheme."""
    for scheme, secure in SCHEMES:
        if address.startswith(scheme):
            return address.removeprefix(scheme).rstrip("/"), secure
    return address, None


def resolve_tls(options: TlsOptions, *, scheme: bool | None, local: bool) -> Tls | None:
    """Choose the certificates to use, or None for a connection without TLS.

    `scheme` tells whether the address's scheme requires TLS, `local` whether the server is on this
    machine. Raises: InvalidRequest for an unreadable file, a certificate without a key, or a key
    without a certificate.
    """
    enabled = options.get("tls")
    if enabled is None:
        enabled = scheme
    if enabled is None and (value := os.environ.get("WEIR_TLS")):
        if value not in ("0", "1"):
            raise errors.InvalidRequest(
                f"WEIR_TLS={value!r}: must be 1 or 0", reason="FIELD_INVALID"
            )
        enabled = value == "1"
    if enabled is None:
        given = (
            options.get("root_certificates") is not None
            or options.get("client_certificate") is not None
        )
        enabled = given or not local
    if not enabled:
        return None
    tls = Tls(
        _read("root_certificates", options.get("root_certificates"), "WEIR_ROOT_CERTIFICATES"),
        _read("client_certificate", options.get("client_certificate"), "WEIR_CLIENT_CERTIFICATE"),
        _read("client_key", options.get("client_key"), "WEIR_CLIENT_KEY"),
    )
    if (tls.client_certificate is None) != (tls.client_key is None):
        missing = (
            "client_key (WEIR_CLIENT_KEY)"
            if tls.client_key is None
            else "client_certificate (WEIR_CLIENT_CERTIFICATE)"
        )
        raise errors.InvalidRequest(
            f"{missing} is missing: a certificate and its key go together", reason="FIELD_INVALID"
        )
    return tls


def _read(name: str, given: Pem | None, variable: str) -> bytes | None:
    """Read PEM bytes from a file. Raises: InvalidRequest naming the option or the variable."""
    if isinstance(given, bytes):
        return given or None
    where, path = (name, given) if given else (variable, os.environ.get(variable))
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise errors.InvalidRequest(
            f"{where}: {path} cannot be read ({error.strerror})", reason="FIELD_INVALID"
        ) from error
