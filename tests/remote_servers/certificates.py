"""Authority with server and client certificates, and an unknown client."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from inference.adapters.remote_settings import TlsFiles


@dataclass(frozen=True)
class Certificates:
    """Directory of PEM files."""

    directory: Path

    def client(self, name: str = "client") -> TlsFiles:
        """Return the TLS files of "client" or of "stranger"."""
        return TlsFiles(
            self.directory / "authority.pem",
            self.directory / f"{name}.pem",
            self.directory / f"{name}.key",
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials that require a client certificate of the authority."""
        pair = (
            (self.directory / "server.key").read_bytes(),
            (self.directory / "server.pem").read_bytes(),
        )
        return grpc.ssl_server_credentials(
            [pair], (self.directory / "authority.pem").read_bytes(), require_client_auth=True
        )

    def server_context(self) -> ssl.SSLContext:
        """Ask each HTTP client for a certificate of the authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.directory / "server.pem", self.directory / "server.key")
        context.load_verify_locations(self.directory / "authority.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        return context


def make_certificates(directory: Path) -> Certificates:
    """Write all certificates."""
    directory.mkdir(parents=True, exist_ok=True)
    issuer_key, issuer = _issue(directory, "authority", None)
    _issue(directory, "server", (issuer_key, issuer))
    _issue(directory, "client", (issuer_key, issuer))
    _issue(directory, "stranger", _issue(directory, "elsewhere", None))
    return Certificates(directory)


Issuer = tuple[ec.EllipticCurvePrivateKey, x509.Certificate]


def _issue(directory: Path, name: str, issuer: Issuer | None) -> Issuer:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[1].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
    )
    certificate = builder.sign(key if issuer is None else issuer[0], hashes.SHA256())
    (directory / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (directory / f"{name}.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return key, certificate
