"""TLS of the server: certificate, private key and client CA, from files that may be renewed while
the server runs.

The files are checked for changes at each handshake. At startup, unusable files are an error. Later,
while a renewal is incomplete or invalid, the previous files stay in use and the reason is logged.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from api.core.addresses import is_local
from api.core.settings import Settings
from common.settings import SettingInvalid

log = structlog.get_logger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Material:
    """Private key, certificate chain and client CA of a handshake.

    `context` is the same for servers that use Python's `ssl`.
    """

    key: bytes
    certificate: bytes
    client_ca: bytes | None
    context: ssl.SSLContext

    def for_grpc(self) -> grpc.ServerCertificateConfiguration:
        """Convert the material to gRPC's certificate configuration."""
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.certificate)], self.client_ca
        )


class Tls:
    """Certificate, key and client CA from files, shared by all listeners of this process."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        """Read the files. Raises SettingInvalid, which names the variable of an unusable file."""
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        try:
            self._stamp = self._read_stamp()
            self._material = self._read()
        except OSError as error:
            raise SettingInvalid(
                f"WEIR_TLS_CERTIFICATE, WEIR_TLS_KEY, WEIR_TLS_CLIENT_CA: {error}"
            ) from error

    @property
    def needs_client_certificate(self) -> bool:
        return self._client_ca is not None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Create server credentials for `add_secure_port`.

        gRPC checks the files in each handshake, on a thread of its own.
        """
        given = self._material

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            before, given = given, self.present()
            return None if given is before else given.for_grpc()

        first, needed = given.for_grpc(), self.needs_client_certificate
        return grpc.dynamic_ssl_server_credentials(first, fetch, needed)  # type: ignore[arg-type]  # None is "as before"

    def ssl_context(self, alpn: Sequence[str]) -> ssl.SSLContext:
        """Create an SSL context that checks the files at each handshake.

        `alpn` lists the protocols that the server offers, preferred first.
        """

        def take(connection: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
            """Select the current certificate.

            `ssl` calls this at the start of each handshake, even if the client sends no server
            name.
            """
            connection.context = self.present().context
            connection.context.set_alpn_protocols(list(alpn))

        outer = self._read().context
        outer.set_alpn_protocols(list(alpn))
        outer.sni_callback = take
        return outer

    def present(self) -> Material:
        """Return the current material, or the previous one if changed files are unusable."""
        try:
            stamp = self._read_stamp()
            if stamp != self._stamp:
                material = self._read()
                # Otherwise they are being written: the next handshake checks again.
                if self._read_stamp() == stamp:
                    self._material, self._stamp = material, stamp
                    log.info("tls_renewed", certificate=str(self._certificate))
        except (OSError, SettingInvalid) as error:
            log.error("tls_not_renewed", cause=str(error))
        return self._material

    def _read_stamp(self) -> Stamp:
        """Return the modification time, size and inode of each file, to detect changes."""
        found = [
            path.stat()
            for path in (self._certificate, self._key, self._client_ca)
            if path is not None
        ]
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)

    def _read(self) -> Material:
        """Read and check the files. Raises: SettingInvalid, OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for path in (self._certificate, self._key):
            path.read_bytes()  # first, because the next call does not name the missing file
        try:
            # Without a password OpenSSL prompts for one.
            context.load_cert_chain(self._certificate, self._key, password="")
        except ssl.SSLError as error:
            raise SettingInvalid(
                f"WEIR_TLS_CERTIFICATE={str(self._certificate)!r}, WEIR_TLS_KEY={str(self._key)!r}:"
                " must be PEM files of a certificate and its unencrypted key"
                f" ({error.reason or error})"
            ) from error
        client_ca = None
        if self._client_ca is not None:
            client_ca = self._client_ca.read_bytes()
            try:
                context.load_verify_locations(self._client_ca)
            except ssl.SSLError as error:
                raise SettingInvalid(
                    f"WEIR_TLS_CLIENT_CA={str(self._client_ca)!r}: must be a PEM file of"
                    " certificates"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return Material(self._key.read_bytes(), self._certificate.read_bytes(), client_ca, context)


def open_tls(settings: Settings) -> Tls | None:
    """Read the TLS files that the settings name.

    Returns None if the server uses plaintext. Raises SettingInvalid for unusable files, and for
    plaintext on an address that other machines can reach, unless the settings allow it.
    """
    files = settings.tls.files()
    if files is not None:
        return Tls(*files)
    listening = {"WEIR_LISTEN": settings.listen.address}
    if settings.listen.openai not in ("", "off"):
        listening["WEIR_OPENAI_LISTEN"] = settings.listen.openai
    for variable, address in listening.items():
        if is_local(address) or settings.tls.allow_plaintext:
            continue
        raise SettingInvalid(
            f"{variable}={address!r} is reachable from other machines, and would receive API keys"
            " and prompts in plaintext: set WEIR_TLS_CERTIFICATE and WEIR_TLS_KEY, or listen on"
            " 127.0.0.1, or set WEIR_ALLOW_PLAINTEXT=1 if a TLS proxy is in front of this server"
        )
    return None
