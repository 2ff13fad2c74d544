"""Mutual TLS between the api processes of one deployment, on a port of its own.

A process makes a self-signed certificate when it starts and publishes it in the database (`live_reports`). On the peer port both
sides present their certificates and accept only published ones. A relayed call also carries the API key of the client, which is
checked again, and a signed statement of the client's address.
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
from api.core.settings import Settings
from metering.tenants.networks import Address, parse_address

NAME = "weir-peer"  # in every such certificate; which process it is, the certificate itself says
LIFETIME = datetime.timedelta(days=3650)  # longer than any process lives
CLOCK_SLACK = datetime.timedelta(days=1)  # machines' clocks may differ
VOUCHER = "weir-client-address"  # metadata: from where the client comes that another process comes for, signed by that one
VOUCHER_LIFETIME_S = 300.0  # clocks of machines may differ by so much; a voucher never leaves TLS, so it need not be shorter
ANY_HOST = frozenset({"", "*", "0.0.0.0", "[::]"})  # what to listen on, and nothing to connect to
PEER_KEEPALIVE_MS, PEER_KEEPALIVE_TIMEOUT_MS = 10_000, 5_000  # finds a machine that is gone; only while a relay is under way


@dataclass(frozen=True, slots=True)
class Peer:
    """How a process is reached by the others. address: "host:port"; certificate: PEM."""

    address: str
    certificate: str

    def channel(self, identity: Identity | None = None) -> grpc.aio.Channel:
        """A connection to this process only. identity: the certificate to present; a peer refuses calls without one."""
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
    """Who this process is to the others: what it signs they check by the certificate that it has handed them. Both PEM."""

    owner_id: uuid.UUID
    private_key: bytes = field(repr=False)
    certificate: bytes

    def vouch(self, secret: str, address: Address) -> str:
        """Says from where the client with this secret comes, for the metadata of a call to another process."""
        said = f"{self.owner_id.hex} {time.time():.0f} {address}"
        key = serialization.load_pem_private_key(self.private_key, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey), "as `make_certificate` makes it"
        signature = key.sign(_statement(said, secret), ec.ECDSA(hashes.SHA256()))
        return f"{said} {signature.hex()}"


class PeerCertificates:
    """The certificates that the peer port accepts from clients: those that running processes have published."""

    def __init__(self, identity: Identity) -> None:
        """identity: what this process presents. Until `replace` is called its own certificate alone is accepted."""
        self._identity = identity
        self._accepted = identity.certificate

    def replace(self, certificates: Iterable[str]) -> None:
        """Accept these from the next handshake on, and no others; each is PEM. Open connections are kept."""
        published = "".join(sorted({each.strip() + "\n" for each in certificates if each}))
        self._accepted = published.encode() or self._identity.certificate  # gRPC demands at least one

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`. gRPC asks for the accepted certificates in each handshake, on a thread of its own."""
        used = self._accepted

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            before, used = used, self._accepted
            return None if used == before else self._configuration(used)

        return grpc.dynamic_ssl_server_credentials(self._configuration(used), fetch, True)  # type: ignore[arg-type]  # None: as before

    def _configuration(self, accepted: bytes) -> grpc.ServerCertificateConfiguration:
        pair = (self._identity.private_key, self._identity.certificate)
        return grpc.ssl_server_certificate_configuration([pair], accepted)


def make_identity(owner_id: uuid.UUID) -> Identity:
    """A new one."""
    return Identity(owner_id, *make_certificate())


def voucher_of(text: str) -> uuid.UUID | None:
    """Which process has signed a voucher, as it says; None for what is none."""
    try:
        return uuid.UUID(hex=text.partition(" ")[0])
    except ValueError:
        return None


def vouched_address(text: str, secret: str, certificate: str, now: float) -> Address | None:
    """The address in a voucher for this secret; None unless it is signed by whose certificate it is, and new. now: since 1970."""
    said, _, signature = text.rpartition(" ")
    _, _, rest = said.partition(" ")
    made_at, _, address = rest.partition(" ")
    try:
        key = x509.load_pem_x509_certificate(certificate.encode()).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey), "as `make_certificate` makes it"
        key.verify(bytes.fromhex(signature), _statement(said, secret), ec.ECDSA(hashes.SHA256()))
        is_new = abs(now - int(made_at)) <= VOUCHER_LIFETIME_S
    except (InvalidSignature, ValueError):
        return None
    return parse_address(address) if is_new else None


def _statement(said: str, secret: str) -> bytes:
    """What is signed: good for one secret, which is not in it."""
    return f"weir voucher {said} ".encode() + hashlib.sha256(secret.encode(errors="replace")).digest()


def peer_listen_address(settings: Settings) -> str:
    """Where the others are let in: unless it is said, any free port of where clients are."""
    if settings.peer_listen_address:
        return settings.peer_listen_address
    host = "127.0.0.1" if is_local(settings.listen_address) else settings.listen_address.rpartition(":")[0]
    return f"{host}:0"


def advertised(advertise_address: str, address: str, port: int) -> str:
    """Where the others find a door that listens there; the machine's name stands for all of its addresses."""
    host = advertise_address or address.rpartition(":")[0]
    if advertise_address and ":" in advertise_address.rpartition("]")[2]:
        return advertise_address
    return f"{socket.gethostname() if host in ANY_HOST else host}:{port}"


def make_certificate() -> tuple[bytes, bytes]:
    """A new private key and a certificate that it has signed itself, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    # The subject is unique: OpenSSL looks up accepted certificates by their subject and compares the first one only.
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
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return private, certificate.public_bytes(serialization.Encoding.PEM)


IDLE_S = 60.0  # a connection that nobody uses is kept so long: shaking hands anew costs some ms
IDLE_COUNT_MAX = 32  # connections that nobody uses; of some 100 kB each, with TLS


@dataclass(slots=True, eq=False)
class Connection:
    """One of them. idle: the timer that closes it while nobody uses it."""

    channel: grpc.aio.Channel
    use_count: int = 0
    idle: asyncio.TimerHandle | None = None


class PeerChannels:
    """All of this process."""

    def __init__(self, tasks: asyncio.TaskGroup, identity: Identity | None = None, *, idle_s: float = IDLE_S) -> None:
        """tasks: those of the process. identity: presented to peers. idle_s: how long an unused connection is kept."""
        self._tasks = tasks
        self._identity = identity
        self._idle_s = idle_s
        self._connections: dict[Peer, Connection] = {}
        self._idle: dict[Peer, Connection] = {}  # those that nobody uses; the one that is idle for longest stands first

    def __len__(self) -> int:
        return len(self._connections)

    @contextlib.contextmanager
    def use(self, peer: Peer) -> Iterator[grpc.aio.Channel]:
        """The connection to a process, open for as long as the block lasts."""
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
        """Nobody uses it any more: close it later, or where there are too many of them the one that rests for longest."""
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
        """Close all of them, as this process ends."""
        connections = list(self._connections.values())
        self._connections.clear()
        self._idle.clear()
        for connection in connections:
            if connection.idle is not None:
                connection.idle.cancel()
            await connection.channel.close()
