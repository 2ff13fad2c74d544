"""The server's TLS: certificate, key and client authorities from files that may be renewed while it runs.

Owns reading them and looking whether they have changed, once per handshake. What cannot be used is refused at start; later, while a
renewal is half written or wrong, the ones before stay in use and the log says why.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from api.core.addresses import is_local
from api.core.settings import SettingInvalid, Settings

log = structlog.get_logger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Material:
    """What one handshake uses. context: the same for servers that speak TLS by Python's `ssl`."""

    key: bytes
    certificate: bytes
    client_ca: bytes | None
    context: ssl.SSLContext

    def for_grpc(self) -> grpc.ServerCertificateConfiguration:
        """The same as gRPC takes it."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.client_ca)


class Tls:
    """TLS by three files. All that listens in this process shares one of these."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        """Raises: SettingInvalid naming the variable of a file that cannot be used."""
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        try:
            self._stamp = self._look()
            self._material = self._read()
        except OSError as error:
            raise SettingInvalid(f"WEIR_TLS_CERTIFICATE, WEIR_TLS_KEY, WEIR_TLS_CLIENT_CA: {error}") from error

    @property
    def needs_client_certificate(self) -> bool:
        return self._client_ca is not None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`. The files are looked at in each handshake, on a thread of gRPC's."""
        given = self._material

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            before, given = given, self.present()
            return None if given is before else given.for_grpc()

        first, needed = given.for_grpc(), self.needs_client_certificate
        return grpc.dynamic_ssl_server_credentials(first, fetch, needed)  # type: ignore[arg-type]  # None is "as before"

    def ssl_context(self, alpn: Sequence[str]) -> ssl.SSLContext:
        """For servers that take Python's: the files are looked at in each handshake. alpn: protocols to offer, the best first."""

        def take(connection: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
            """What a handshake begins with, whether the client names a server or not: take the present certificate."""
            connection.context = self.present().context
            connection.context.set_alpn_protocols(list(alpn))

        outer = self._read().context
        outer.set_alpn_protocols(list(alpn))
        outer.sni_callback = take
        return outer

    def present(self) -> Material:
        """What the files hold, read again if they have changed; what they held before if that cannot be used."""
        try:
            stamp = self._look()
            if stamp != self._stamp:
                material = self._read()
                if self._look() == stamp:  # else they are being written: the next handshake looks again
                    self._material, self._stamp = material, stamp
                    log.info("tls_renewed", certificate=str(self._certificate))
        except (OSError, SettingInvalid) as error:
            log.error("tls_not_renewed", cause=str(error))
        return self._material

    def _look(self) -> Stamp:
        """By what a changed file is recognised."""
        found = [path.stat() for path in (self._certificate, self._key, self._client_ca) if path is not None]
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)

    def _read(self) -> Material:
        """Raises: SettingInvalid, OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for path in (self._certificate, self._key):
            path.read_bytes()  # first, since the next call does not say which of them is missing
        try:
            context.load_cert_chain(self._certificate, self._key, password="")  # else OpenSSL asks at the terminal
        except ssl.SSLError as error:
            raise SettingInvalid(
                f"WEIR_TLS_CERTIFICATE={str(self._certificate)!r}, WEIR_TLS_KEY={str(self._key)!r}: give PEM files of a "
                f"certificate and its own key, which must not be encrypted ({error.reason or error})"
            ) from error
        client_ca = None
        if self._client_ca is not None:
            client_ca = self._client_ca.read_bytes()
            try:
                context.load_verify_locations(self._client_ca)
            except ssl.SSLError as error:
                raise SettingInvalid(f"WEIR_TLS_CLIENT_CA={str(self._client_ca)!r}: give a PEM file of certificates") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return Material(self._key.read_bytes(), self._certificate.read_bytes(), client_ca, context)


def open_tls(settings: Settings) -> Tls | None:
    """The TLS of these settings; None for plaintext. Raises: SettingInvalid, also for plaintext where others could listen."""
    files = settings.tls_files()
    if files is not None:
        return Tls(*files)
    listening = {"WEIR_LISTEN": settings.listen_address}
    if settings.openai_listen not in ("", "off"):
        listening["WEIR_OPENAI_LISTEN"] = settings.openai_listen
    for variable, address in listening.items():
        if is_local(address) or settings.allow_plaintext:
            continue
        raise SettingInvalid(
            f"{variable}={address!r} is reachable from other machines, and API keys and prompts would travel in "
            "the clear: set WEIR_TLS_CERTIFICATE and WEIR_TLS_KEY, or listen on 127.0.0.1, or set WEIR_ALLOW_PLAINTEXT=1 if a "
            "proxy that speaks TLS stands before this server"
        )
    return None
