"""Certificates for tests, with their authorities."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)
LOOPBACK = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Certificate:
    """Certificate with its key."""

    certificate: x509.Certificate
    private_key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        """Certificate in PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """Key in PEM."""
        return self.private_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def encrypted_key_pem(self, passphrase: bytes) -> bytes:
        """Return its key in PEM, encrypted with a passphrase."""
        encryption = serialization.BestAvailableEncryption(passphrase)
        return self.private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )

    def write(self, directory: Path, name: str) -> tuple[Path, Path]:
        """Write both files, each atomically, as renewal tools do."""
        paths = directory / f"{name}.pem", directory / f"{name}.key"
        for path, content in zip(paths, (self.pem, self.key_pem), strict=True):
            unfinished = path.with_suffix(".new")
            unfinished.write_bytes(content)
            unfinished.replace(path)
        return paths


def new_certificate(
    name: str,
    issuer: Certificate | None = None,
    *,
    authority: bool = False,
    hosts: Sequence[str] = (),
) -> Certificate:
    """Return a certificate for hosts, by default the loopback, signed by the issuer or itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + 30 * DAY)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if not authority:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([general_name(host) for host in hosts or LOOPBACK]),
            critical=False,
        )
    return Certificate(
        builder.sign(key if issuer is None else issuer.private_key, hashes.SHA256()), key
    )


def general_name(host: str) -> x509.GeneralName:
    """Return the name of a host in a certificate, an IP address if it is one."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
