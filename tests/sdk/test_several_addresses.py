"""A client with several addresses: servers in turn, the next one when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from weir_client import AsyncClient, Client, InvalidRequest, Unavailable
from weir_client.connection import ConnectionSettings, is_local

from tests.sdk import scripted
from tests.sdk.scripted import ScriptedInference
from tests.sdk.tcp_proxy import TcpProxy
from tests.service import MODEL, PLAIN_IDS, Service

CONNECT_S = 20.0
PROMPT = list(PLAIN_IDS[:10])


@contextlib.asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[list[ScriptedInference], list[str]]]:
    """Yield two scripted servers that answer, and their addresses."""
    servers = [ScriptedInference(answer_one) for _ in range(2)]
    async with scripted.serve(servers[0]) as first, scripted.serve(servers[1]) as second:
        yield servers, [first, second]


async def answer_one(stream: scripted.ServerStream) -> None:
    """Run the script that answers one request and ends the stream."""
    request_id = (await stream.read_start()).request_id
    await stream.send(scripted.admitted(request_id), scripted.delta(request_id, 1, "Hello"))
    await stream.send(scripted.finished(request_id, 1))


async def connected(client: AsyncClient, servers: list[ScriptedInference]) -> None:
    """Call until each server has answered: the first calls go to the first that is connected."""
    async with asyncio.timeout(CONNECT_S):
        while not all(server.requests for server in servers):
            await client.list_models()


@pytest.mark.parametrize("is_list", [True, False])
async def test_calls_are_shared_by_the_servers(is_list: bool) -> None:
    async with two_servers() as (servers, addresses):
        given = addresses if is_list else ", ".join(addresses)
        async with AsyncClient(given, "key") as client:
            await connected(client, servers)
            before = [len(server.requests) for server in servers]

            for _ in range(10):
                await client.list_models()

            served = [len(server.requests) for server in servers]
            assert [now - then for now, then in zip(served, before, strict=True)] == [5, 5]
            assert client.address == ",".join(addresses)


async def test_a_new_stream_goes_to_the_next_server() -> None:
    async with two_servers() as (servers, addresses):
        async with AsyncClient(addresses, "key") as client:
            await connected(client, servers)
            for _ in range(2):
                assert (await client.complete(MODEL, token_ids=PROMPT)).text == "Hello"

        assert sorted(len(server.streams) for server in servers) == [1, 1]


async def test_a_server_that_accepts_nothing_delays_no_call() -> None:
    """Its queue of connections is full, so that the handshake is never answered."""
    silent = socket.create_server(("127.0.0.1", 0), backlog=0)
    host, port = silent.getsockname()
    filling = [socket.socket() for _ in range(2)]
    for each in filling:
        each.setblocking(False)
        each.connect_ex((host, port))
    async with (
        two_servers() as (_, addresses),
        AsyncClient([f"{host}:{port}", addresses[0]], "key", max_retries=0) as client,
        asyncio.timeout(10),
    ):
        assert await client.list_models() == []
        assert (await client.complete(MODEL, token_ids=PROMPT)).text == "Hello"
    for each in (silent, *filling):
        each.close()


async def test_a_lost_server_is_replaced_by_the_next(service: Service) -> None:
    """Both proxies lead to one service: a stream that breaks is resumed through the other."""
    tenant = await service.tenant()
    first, second = TcpProxy(service.address), TcpProxy(service.address)
    async with (
        first.open(),
        second.open(),
        AsyncClient([first.address, second.address], tenant.secret) as client,
    ):
        generation = client.generate(
            MODEL, token_ids=PROMPT, max_output_tokens=400, ignore_eos=True
        )
        token_count = 0
        async for delta in generation:
            if not token_count:
                break_one(first, second)
            token_count += len(delta.token_ids)
        assert await client.list_models()
        result = await generation.wait()

    assert token_count == 400
    assert service.database.delivered(tenant) == {result.request_id: 400}


def break_one(*proxies: TcpProxy) -> None:
    """Cut the proxy that carries the stream, and let it accept no more connections."""
    for proxy in proxies:
        proxy.cut()
    proxies[0].closed_count = 1_000_000


async def test_without_any_server_the_error_names_all() -> None:
    addresses = ["127.0.0.1:1", "127.0.0.1:2"]
    async with AsyncClient(addresses, "key", max_retries=0) as client:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1,127\.0\.0\.1:2 without TLS"):
            await client.list_models()
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1,127\.0\.0\.1:2 without TLS"):
            await client.complete(MODEL, token_ids=PROMPT)


def test_the_environment_has_several_addresses(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = asyncio.run(service.tenant())
    monkeypatch.setenv("WEIR_ADDRESS", f"127.0.0.1:1,{service.address}")

    with Client(api_key=tenant.secret) as client:
        assert MODEL in [model.name for model in client.list_models()]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["https://a:1", "http://b:1"], "the same scheme"),
        (["https://a:1", "b:1"], "the same scheme"),
        ("a:1,", "must be host:port"),
        (["a:1", "b/v1"], "has a path"),
        ([1], "a list of strings"),
    ],
)
def test_impossible_lists_are_refused(given: str | list[str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        ConnectionSettings.resolve(given, "key")


def test_a_list_is_local_if_each_address_is() -> None:
    assert is_local("127.0.0.1:1,unix:/run/weir.sock")
    assert not is_local("127.0.0.1:1,weir.example.com:443")
    settings = ConnectionSettings.resolve("https://a:1, https://b:2/", "key")
    assert settings.address == "a:1,b:2"
    assert settings.tls is not None
    assert ConnectionSettings.resolve("ipv4:10.0.0.1:1,10.0.0.2:1", "key").address.startswith(
        "ipv4"
    )
