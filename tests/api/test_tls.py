"""Certificates: accepted clients, refusals at start with reasons, and renewal without a restart."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from aiohttp import web
from grpc import StatusCode
from weir_cli.connection import explain
from weir_client import AsyncClient, Unavailable
from weir_client.tls import TlsOptions

from api.access.tls import Tls, open_tls
from api.core.settings import Settings
from api.openai.listener import Listener
from common.settings import SettingInvalid
from tests.api.bare_server import TIMEOUT_S, bare_server, check, connection
from tests.certificates import Certificate, new_certificate


@dataclass(frozen=True)
class World:
    """One authority, its certificates, and the paths of the server's files."""

    authority: Certificate
    client: Certificate
    stranger: Certificate
    directory: Path
    certificate: Path
    key: Path
    client_ca: Path

    def credentials(self, shown: Certificate | None = None) -> grpc.ChannelCredentials:
        """Return credentials of a client that trusts the authority, maybe with a certificate."""
        key, certificate = (None, None) if shown is None else (shown.key_pem, shown.pem)
        return grpc.ssl_channel_credentials(self.authority.pem, key, certificate)

    def renew(self, issuer: Certificate) -> Certificate:
        """Write another certificate to the same files."""
        renewed = new_certificate("server", issuer)
        renewed.write(self.directory, "server")
        return renewed


@pytest.fixture
def world(tmp_path: Path) -> World:
    authority = new_certificate("authority", authority=True)
    certificate, key = new_certificate("server", authority).write(tmp_path, "server")
    client_ca, _ = authority.write(tmp_path, "authority")
    client = new_certificate("client", authority)
    stranger = new_certificate("client", new_certificate("authority", authority=True))
    return World(authority, client, stranger, tmp_path, certificate, key, client_ca)


async def presented(address: str) -> str:
    """Return the certificate that a server presents."""
    host, _, port = address.partition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=TIMEOUT_S)


async def test_a_connection_is_encrypted_and_trusts_its_authority_alone(world: World) -> None:
    strange = grpc.ssl_channel_credentials(world.stranger.pem)
    async with bare_server(Settings(), Tls(world.certificate, world.key, None)) as address:
        async with connection(address, world.credentials()) as channel:
            assert await check(channel) is StatusCode.OK
        async with connection(address, strange) as channel:
            assert await check(channel) is StatusCode.UNAVAILABLE
        async with connection(address) as channel:
            assert await check(channel) is StatusCode.UNAVAILABLE, "in plaintext"


async def test_the_command_line_says_what_is_wrong_between_client_and_server(world: World) -> None:
    """By real handshakes: the words are gRPC's, and may change with it."""
    tls = Tls(world.certificate, world.key, None)
    mutual = Tls(world.certificate, world.key, world.client_ca)
    other = new_certificate("server", world.authority, hosts=("weir.internal",)).write(
        world.directory, "other"
    )
    trusting: TlsOptions = {"root_certificates": world.authority.pem}
    cases: list[tuple[Tls | None, TlsOptions, str]] = [
        (tls, {"tls": True}, "weir --ca"),
        (Tls(*other, None), trusting, "another name"),
        (None, trusting, "http://"),
        (tls, {"tls": False}, "https://"),
        (mutual, trusting, "--client-certificate"),
    ]
    for server_tls, options, message in cases:
        async with (
            bare_server(Settings(), server_tls) as address,
            AsyncClient(address, "key", max_retries=0, **options) as client,
        ):
            with pytest.raises(Unavailable) as refused:
                await client.list_models()
        assert message in explain(refused.value, address)


async def test_client_authorities_exclude_other_certificates(world: World) -> None:
    async with bare_server(
        Settings(), Tls(world.certificate, world.key, world.client_ca)
    ) as address:
        for shown, code in (
            (world.client, StatusCode.OK),
            (world.stranger, StatusCode.UNAVAILABLE),
            (None, StatusCode.UNAVAILABLE),
        ):
            async with connection(address, world.credentials(shown)) as channel:
                assert await check(channel) is code


async def test_a_renewed_certificate_counts_from_the_next_connection_on(world: World) -> None:
    async with (
        bare_server(Settings(), Tls(world.certificate, world.key, None)) as address,
        connection(address, world.credentials()) as before,
    ):
        assert await check(before) is StatusCode.OK
        renewed = world.renew(world.authority)

        assert await presented(address) == renewed.pem.decode()
        assert await check(before) is StatusCode.OK, "those who are connected notice nothing"
        again = world.renew(world.authority)
        assert await presented(address) == again.pem.decode()


async def test_a_renewal_that_cannot_be_used_leaves_the_one_before(world: World) -> None:
    tls = Tls(world.certificate, world.key, None)
    first = world.certificate.read_text()
    async with bare_server(Settings(), tls) as address:
        world.key.write_bytes(new_certificate("other").key_pem)
        assert await presented(address) == first, "a key of another certificate"
        world.certificate.write_bytes(b"half of a")
        assert await presented(address) == first
        world.certificate.unlink()
        assert await presented(address) == first
        renewed = world.renew(world.authority)
        assert await presented(address) == renewed.pem.decode()


async def test_other_servers_of_the_process_take_the_same_certificate(world: World) -> None:
    """With Python's TLS, renewal and client certificates; gRPC follows a renewal later."""
    tls = Tls(world.certificate, world.key, world.client_ca)
    trusting = ssl.create_default_context(cadata=world.authority.pem.decode())
    showing = ssl.create_default_context(cadata=world.authority.pem.decode())
    showing.set_alpn_protocols(["http/1.1"])
    showing.load_cert_chain(*world.client.write(world.directory, "client"))

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        writer.close()

    async def ask(port: int, context: ssl.SSLContext) -> tuple[bytes, bytes | None, str | None]:
        """Return the server's bytes, its certificate, and the protocol."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        connection_ = writer.get_extra_info("ssl_object")
        try:  # with TLS 1.3 a client learns only now that its certificate was refused
            data = await reader.read()
        except (ssl.SSLError, ConnectionError):
            data = b""
        writer.close()
        return data, connection_.getpeercert(binary_form=True), connection_.selected_alpn_protocol()

    secured = tls.ssl_context(("h2", "http/1.1"))
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=secured)
    async with bare_server(Settings(), tls) as address, server:
        port = server.sockets[0].getsockname()[1]
        first = ssl.PEM_cert_to_DER_cert(world.certificate.read_text())
        assert await ask(port, showing) == (b"here", first, "http/1.1")
        assert (await ask(port, trusting))[0] == b""
        renewed = world.renew(world.authority)
        data, shown, _ = await ask(port, showing)
        assert (data, shown) == (b"here", ssl.PEM_cert_to_DER_cert(renewed.pem.decode()))
        assert (await ask(port, trusting))[0] == b""
        assert await presented(address) == renewed.pem.decode()


async def test_openais_clients_are_listened_to_by_the_same_certificates(world: World) -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        return web.Response(text="well")

    listener = Listener(handle, Settings(), Tls(world.certificate, world.key, world.client_ca))
    port = listener.bind(("127.0.0.1", 0))
    await listener.start()
    message: list[bytes] = []
    for shown in (world.client, None):
        context = ssl.create_default_context(cadata=world.authority.pem.decode())
        if shown is not None:
            context.load_cert_chain(*shown.write(world.directory, "shown"))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(b"GET / HTTP/1.1\r\nhost: weir\r\nconnection: close\r\n\r\n")
            message.append(await reader.read())
            writer.close()
        except OSError:
            message.append(b"")
    await listener.stop()

    assert [answer.endswith(b"well") for answer in message] == [True, False]


def test_the_http_api_refuses_plaintext_on_public_addresses_too() -> None:
    with pytest.raises(SettingInvalid, match="WEIR_OPENAI_LISTEN"):
        open_tls(Settings.of(openai_listen="0.0.0.0:9443"))
    assert open_tls(Settings.of(openai_listen="0.0.0.0:9443", allow_plaintext=True)) is None
    assert open_tls(Settings.of(openai_listen="127.0.0.1:9443")) is None


def test_files_that_cannot_be_used_are_refused_at_start_by_name(world: World) -> None:
    encrypted = world.directory / "encrypted.key"
    encrypted.write_bytes(world.client.encrypted_key_pem(b"secret"))
    nonsense = world.directory / "nonsense"
    nonsense.write_text("no certificate")
    certificate, key = str(world.certificate), str(world.key)
    for fields, message in (
        ({"tls_certificate": certificate}, "WEIR_TLS_KEY is not set"),
        ({"tls_key": key}, "WEIR_TLS_CERTIFICATE is not set"),
        ({"tls_client_ca": certificate}, "WEIR_TLS_CLIENT_CA: .* WEIR_TLS_CERTIFICATE too"),
        (
            {"tls_certificate": certificate, "tls_key": "/no/such/key"},
            "WEIR_TLS_KEY.*No such file.*/no/such/key",
        ),
        (
            {"tls_certificate": certificate, "tls_key": str(encrypted)},
            "WEIR_TLS_KEY='.*encrypted.key'",
        ),
        ({"tls_certificate": key, "tls_key": certificate}, "a certificate and its unencrypted key"),
        (
            {"tls_certificate": certificate, "tls_key": key, "tls_client_ca": str(nonsense)},
            "WEIR_TLS_CLIENT_CA='.*nonsense'",
        ),
    ):
        with pytest.raises(SettingInvalid, match=message):
            open_tls(Settings.of(**fields))


@pytest.mark.parametrize(
    "address", ["0.0.0.0:8443", "[::]:8443", "weir.example.com:8443", "10.1.2.3:8443"]
)
def test_public_listeners_refuse_plaintext_unless_it_is_allowed(address: str) -> None:
    with pytest.raises(
        SettingInvalid,
        match=r"WEIR_LISTEN=.*WEIR_TLS_CERTIFICATE.*127\.0\.0\.1.*WEIR_ALLOW_PLAINTEXT=1",
    ):
        open_tls(Settings.of(listen=address))
    data = Settings.from_environment({"WEIR_LISTEN": address, "WEIR_ALLOW_PLAINTEXT": "1"})
    assert open_tls(data) is None
    assert Settings.from_environment(data.to_environment()) == data


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8443", "localhost:0", "[::1]:1", "unix:/run/weir.sock"]
)
def test_loopback_addresses_may_be_without_tls(address: str) -> None:
    assert open_tls(Settings.of(listen=address)) is None
