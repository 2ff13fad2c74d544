"""Mutual TLS between the api processes of one deployment, on a separate port.

At startup, a process makes a self-signed certificate and publishes it in the database
(`live_reports`). On the peer port, both sides present their certificates and accept only published
ones. A relayed call also carries the API key of the client, which is checked again, and a signed
statement of the client's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from api.core.addresses import is_local
from api.core.settings import ListenSettings
from metering.tenants.networks import Address, parse_address

NAME = "weir-peer"  # in every certificate; the public key tells processes apart
LIFETIME = datetime.timedelta(days=3650)  # longer than any process runs
CLOCK_SLACK = datetime.timedelta(days=1)  # maximum difference of clocks between machines
# Metadata with the address of a relayed client, signed by the relaying process.
VOUCHER = "weir-client-address"
# Covers clock differences; a voucher never leaves TLS, so it need not expire sooner.
VOUCHER_LIFETIME_S = 300.0
# Addresses to listen on to which no connection can be made.
ANY_HOST = frozenset({"", "*", "0.0.0.0", "[::]"})
# Detects lost machines; sent only during a relay.
PEER_KEEPALIVE_MS, PEER_KEEPALIVE_TIMEOUT_MS = 10_000, 5_000

IDLE_S = 60.0  # how long an unused connection is kept; a new handshake takes some ms
IDLE_COUNT_MAX = 32  # unused connections, of some 100 kB each with TLS


@dataclass(frozen=True, slots=True)
class Peer:
    """Address ("host:port") and certificate (PEM) at which peers reach a process."""

    address: str
    certificate: str

    def channel(self, identity: Identity | None = None) -> grpc.aio.Channel:
        """Open a connection that only this process can accept.

        `identity` is the certificate to present; peers reject calls without one.
        """
        credentials = grpc.ssl_channel_credentials(
            root_certificates=self.certificate.encode(),
            private_key=None if identity is None else identity.private_key,
            certificate_chain=None if identity is None else identity.certificate,
        )
        options = (
            ("grpc.ssl_target_name_override", NAME),
            ("grpc.enable_retries", 0),
            ("grpc.keepalive_time_ms", PEER_KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", PEER_KEEPALIVE_TIMEOUT_MS),
        )
        return grpc.aio.secure_channel(self.address, credentials, options=options)


@dataclass(frozen=True, slots=True)
class Identity:
    """Private key and certificate of this process, both PEM.

    Peers verify its signatures with the certificate.
    """

    process_id: uuid.UUID
    private_key: bytes = field(repr=False)
    certificate: bytes

    def vouch(self, secret: str, address: Address) -> str:
        """Sign the address of the client with this secret, as metadata of a call to a peer."""
        statement = f"{self.process_id.hex} {time.time():.0f} {address}"
        key = serialization.load_pem_private_key(self.private_key, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey), "`make_certificate` makes an EC key"
        signature = key.sign(_statement(statement, secret), ec.ECDSA(hashes.SHA256()))
        return f"{statement} {signature.hex()}"


class PeerCertificates:
    """Certificates of all running processes: the clients that the peer port accepts."""

    def __init__(self, identity: Identity) -> None:
        """Accept only the certificate of `identity`, this process, until `replace` is called."""
        self._identity = identity
        self._accepted = identity.certificate

    def replace(self, certificates: Iterable[str]) -> None:
        """Accept exactly these certificates (PEM) from the next handshake on."""
        published = "".join(sorted({each.strip() + "\n" for each in certificates if each}))
        # gRPC requires at least one.
        self._accepted = published.encode() or self._identity.certificate

    def credentials(self) -> grpc.ServerCredentials:
        """Create server credentials for the peer port.

        gRPC asks for the accepted certificates at each handshake, on a thread of its own.
        """
        used = self._accepted

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            before, used = used, self._accepted
            return None if used == before else self._configuration(used)

        return grpc.dynamic_ssl_server_credentials(self._configuration(used), fetch, True)  # type: ignore[arg-type]  # None: as before

    def _configuration(self, accepted: bytes) -> grpc.ServerCertificateConfiguration:
        pair = (self._identity.private_key, self._identity.certificate)
        return grpc.ssl_server_certificate_configuration([pair], accepted)


def make_identity(process_id: uuid.UUID) -> Identity:
    """Create an identity with a new key and certificate."""
    return Identity(process_id, *make_certificate())


def voucher_of(text: str) -> uuid.UUID | None:
    """Parse the id of the process that signed a voucher; None if the voucher is malformed."""
    try:
        return uuid.UUID(hex=text.partition(" ")[0])
    except ValueError:
        return None


def vouched_address(text: str, secret: str, certificate: str, now: float) -> Address | None:
    """Verify a voucher and return its address; None if it is too old or not signed for this secret.

    `certificate` is that of the signing process. `now` is in seconds since 1970.
    """
    statement, _, signature = text.rpartition(" ")
    _, _, rest = statement.partition(" ")
    made_at, _, address = rest.partition(" ")
    try:
        key = x509.load_pem_x509_certificate(certificate.encode()).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey), "`make_certificate` makes an EC key"
        key.verify(
            bytes.fromhex(signature), _statement(statement, secret), ec.ECDSA(hashes.SHA256())
        )
        is_new = abs(now - int(made_at)) <= VOUCHER_LIFETIME_S
    except (InvalidSignature, ValueError):
        return None
    return parse_address(address) if is_new else None


def _statement(statement: str, secret: str) -> bytes:
    """Build the bytes to sign: valid for one secret only, without revealing it."""
    return (
        f"weir voucher {statement} ".encode()
        + hashlib.sha256(secret.encode(errors="replace")).digest()
    )


def peer_listen_address(settings: ListenSettings) -> str:
    """Return the address to listen on for peers; by default a free port on the clients' host."""
    if settings.peer:
        return settings.peer
    host = "127.0.0.1" if is_local(settings.address) else settings.address.rpartition(":")[0]
    return f"{host}:0"


def advertised(advertise_address: str, address: str, port: int) -> str:
    """Build the address at which peers reach a listener. A wildcard host becomes the host name."""
    host = advertise_address or address.rpartition(":")[0]
    if advertise_address and ":" in advertise_address.rpartition("]")[2]:
        return advertise_address
    return f"{socket.gethostname() if host in ANY_HOST else host}:{port}"


def make_certificate() -> tuple[bytes, bytes]:
    """Create a private key and a self-signed certificate, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    # A unique subject: OpenSSL looks up accepted certificates by subject and compares only the
    # first match.
    serial = x509.random_serial_number()
    subject = {NameOID.COMMON_NAME: NAME, NameOID.SERIAL_NUMBER: f"{serial:x}"}
    name = x509.Name([x509.NameAttribute(oid, value) for oid, value in subject.items()])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


@dataclass(slots=True, eq=False)
class Connection:
    """Connection to a peer. `idle` is the timer that closes it while it is unused."""

    channel: grpc.aio.Channel
    use_count: int = 0
    idle: asyncio.TimerHandle | None = None


class PeerChannels:
    """Connections of this process to its peers, which are shared and closed when unused."""

    def __init__(
        self, tasks: asyncio.TaskGroup, identity: Identity | None = None, *, idle_s: float = IDLE_S
    ) -> None:
        """`tasks` is the task group of the process.

        `identity` is presented to peers. An unused connection is kept for `idle_s` seconds.
        """
        self._tasks = tasks
        self._identity = identity
        self._idle_s = idle_s
        self._connections: dict[Peer, Connection] = {}
        self._idle: dict[Peer, Connection] = {}  # unused connections, longest unused first

    def __len__(self) -> int:
        return len(self._connections)

    @contextlib.contextmanager
    def use(self, peer: Peer) -> Iterator[grpc.aio.Channel]:
        """Keep the connection to a process open for the duration of the block."""
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = Connection(peer.channel(self._identity))
        connection.use_count += 1
        self._idle.pop(peer, None)
        if connection.idle is not None:
            connection.idle.cancel()
            connection.idle = None
        try:
            yield connection.channel
        finally:
            connection.use_count -= 1
            if not connection.use_count and self._connections.get(peer) is connection:
                self._rest(peer, connection)

    def _rest(self, peer: Peer, connection: Connection) -> None:
        """Close a connection after `idle_s` without use; if too many are unused, the oldest now."""
        connection.idle = asyncio.get_running_loop().call_later(self._idle_s, self._drop, peer)
        self._idle[peer] = connection
        if len(self._idle) > IDLE_COUNT_MAX:
            self._drop(next(iter(self._idle)))

    def _drop(self, peer: Peer) -> None:
        connection = self._idle.pop(peer)
        del self._connections[peer]
        if connection.idle is not None:
            connection.idle.cancel()
        self._tasks.create_task(connection.channel.close(), name="closing of a peer's channel")

    async def close(self) -> None:
        """Close all connections. Called at shutdown."""
        connections = list(self._connections.values())
        self._connections.clear()
        self._idle.clear()
        for connection in connections:
            if connection.idle is not None:
                connection.idle.cancel()
            await connection.channel.close()
