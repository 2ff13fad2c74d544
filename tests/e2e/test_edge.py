"""Three api processes behind the real Envoy, with the file that `docs/how-to/deploy.md` names.

Tests change what an operator changes, and the ages of connections and streams, which are hours in
the file. The processes listen on the same ports of three addresses of the loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import ssl
import struct
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import yaml
from weir.v1 import inference_service_pb2 as pb
from weir_client import AsyncClient

from infra.architecture import ROOT
from tests.certificates import new_certificate
from tests.conftest import new_database
from tests.e2e.openai_clients import TO_THE_END
from tests.inference.real_servers import free_port, needs, python_of, running
from tests.service import MODEL, PATIENCE_S, PLAIN_IDS, Service, Tenant, start, until, wait_for

pytestmark = needs("envoy")

CONFIGURATION = ROOT / "infra" / "edge" / "envoy.yaml"
UPSTREAM_NAME = "weir-api.internal"  # of the file, and in the certificate of the processes
ADDRESSES = ("127.0.0.11", "127.0.0.12", "127.0.0.13")
STREAM_AGE_S, CONNECTION_AGE_S = 2, 1  # in the file: 30 minutes and an hour
TIME_SCALE = 0.25  # of the simulated engine: about 2 ms per token
SLOW_TOKENS = 3000  # an answer that outlives three streams
SHORT_TOKENS = 20
STREAM_COUNT = 30
EVEN = 0.1
ATTEMPTS = 3  # threads of Envoy learn of a process somewhat later than its list of processes shows
TRAILERS = 0x80  # flag of the last frame of gRPC-Web


@dataclass(frozen=True)
class Edge:
    """Envoy and the processes behind it."""

    services: Sequence[Service]
    port: int
    admin: str
    certificate: Path

    @property
    def address(self) -> str:
        """Address for clients of gRPC."""
        return f"https://localhost:{self.port}"

    def hosts(self, cluster: str) -> dict[str, dict[str, int]]:
        """Return counters of each healthy process in a cluster, by its address."""
        found = {}
        statuses = json.loads(self._fetched("clusters?format=json"))["cluster_statuses"]
        [status] = [each for each in statuses if each["name"] == cluster]
        for host in status.get("host_statuses", ()):
            flags = {name for name, value in host["health_status"].items() if value is True}
            if not flags:
                counters = {each["name"]: int(each.get("value", 0)) for each in host["stats"]}
                found[host["address"]["socket_address"]["address"]] = counters
        return found

    def counter(self, name: str) -> int:
        """Return a counter of Envoy."""
        stats = json.loads(self._fetched(f"stats?format=json&filter=^{name}$"))["stats"]
        return int(stats[0]["value"])

    def _fetched(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.admin}/{path}", timeout=PATIENCE_S) as answer:
            content: bytes = answer.read()
        return content

    def serves(self, *services: Service) -> bool:
        """Return whether Envoy sends requests to exactly these processes."""
        wanted = {service.address.rpartition(":")[0] for service in services}
        return all(self.hosts(cluster).keys() == wanted for cluster in ("weir_grpc", "weir_http"))

    def client(self, tenant: Tenant) -> AsyncClient:
        """Return a client of the SDK."""
        return AsyncClient(self.address, tenant.secret, root_certificates=self.certificate)

    @contextlib.asynccontextmanager
    async def http(self, tenant: Tenant) -> AsyncIterator[httpx2.AsyncClient]:
        """Yield an HTTP client that repeats nothing."""
        async with httpx2.AsyncClient(
            base_url=self.address,
            headers={"authorization": f"Bearer {tenant.secret}"},
            verify=ssl.create_default_context(cafile=self.certificate),
            timeout=PATIENCE_S,
        ) as client:
            yield client


@pytest.fixture(scope="module")
def edge(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    postgres_server: str,
    template_database: str,
) -> Iterator[Edge]:
    """Yield Envoy in front of two running processes; the third is not started yet."""
    directory = tmp_path_factory.mktemp("edge")
    (directory / "journal").mkdir()
    authority = new_certificate("authority", authority=True)
    ca, _ = authority.write(directory, "ca")
    certificate, key = new_certificate(
        "server", authority, hosts=[UPSTREAM_NAME, "localhost", *ADDRESSES]
    ).write(directory, "tls")
    grpc_port, http_port, admin_port, port = (free_port() for _ in range(4))
    with ExitStack() as stack:
        url = stack.enter_context(new_database(postgres_server, template=template_database))
        services = []
        for host in ADDRESSES:
            home = directory / host
            home.mkdir()
            (home / "journal").symlink_to(directory / "journal")
            service = Service(
                home,
                url,
                model,
                engine_device="simulated",
                simulated_time_scale=TIME_SCALE,
                recovery_interval_s=0.2,
                listen=f"{host}:{grpc_port}",
                openai_listen=f"{host}:{http_port}",
                metrics_listen=f"{host}:0",
                tls_certificate=str(certificate),
                tls_key=str(key),
                trusted_proxies="127.0.0.1",
                drain_notice_s=3.0,
            )
            service.credentials = grpc.ssl_channel_credentials(authority.pem)
            services.append(service)
            stack.callback(end, service)
        with ThreadPoolExecutor() as threads:
            list(threads.map(Service.start, services[:2]))
        configuration = configured(directory, grpc_port, http_port, admin_port, port)
        command = [str(Path(python_of("envoy")).with_name("envoy")), "--disable-hot-restart"]
        command += ["--concurrency", "2", "-c", str(configuration)]
        stack.enter_context(running(command, directory / "envoy.log", "starting main dispatch"))
        edge = Edge(services, port, f"http://127.0.0.1:{admin_port}", ca)
        wait_for(lambda: edge.serves(*services[:2]), "Envoy to find two processes")
        yield edge


def end(service: Service) -> None:
    """Kill a process of a failed test."""
    if service.process is not None and service.process.poll() is None:
        service.process.send_signal(signal.SIGCONT)
        service.kill()


def configured(directory: Path, grpc_port: int, http_port: int, admin_port: int, port: int) -> Path:
    """Write the file as an operator changes it, with short ages, and return its path."""
    text = CONFIGURATION.read_text().replace("/etc/envoy/tls/", f"{directory}/")
    text = text.replace(f"{directory}/tls.crt", f"{directory}/tls.pem")
    text = text.replace(f"{directory}/ca.crt", f"{directory}/ca.pem")
    text = text.replace("max_stream_duration: 1800s", f"max_stream_duration: {STREAM_AGE_S}s")
    text = text.replace(
        "max_connection_duration: 3600s", f"max_connection_duration: {CONNECTION_AGE_S}s"
    )
    configuration = yaml.safe_load(text)
    configuration["admin"]["address"]["socket_address"]["port_value"] = admin_port
    static = configuration["static_resources"]
    static["listeners"][0]["address"]["socket_address"] |= {
        "address": "127.0.0.1",
        "port_value": port,
    }
    for cluster, its_port in zip(static["clusters"], (grpc_port, http_port), strict=True):
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": {"address": host, "port_value": its_port}}}}
            for host in ADDRESSES
        ]
    path = directory / "envoy.yaml"
    path.write_text(yaml.safe_dump(configuration))
    return path


@pytest.fixture
async def tenant(edge: Edge) -> Tenant:
    """Return a new tenant of the service."""
    return await edge.services[0].tenant()


async def test_load_is_even_after_a_scale_up(edge: Edge, tenant: Tenant) -> None:
    """Streams that run move by `attach` when they reach their age, so the new process gets some."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(edge.client(tenant)) for _ in range(STREAM_COUNT)
        ]
        answers = [asyncio.create_task(long_answer(client)) for client in clients]
        await until(
            lambda: sum(active(edge, "weir_grpc")) == STREAM_COUNT, "streams on two processes"
        )

        await asyncio.to_thread(edge.services[2].start)
        await until(lambda: edge.serves(*edge.services), "Envoy to find the third process")
        for _ in range(ATTEMPTS):
            by_http = await events_by_process(edge, tenant)
            if is_even(by_http):
                break
        await until(lambda: is_even(active(edge, "weir_grpc")), "even streams")
        token_counts = [await answer for answer in answers]

    assert is_even(by_http), by_http
    assert token_counts == [SLOW_TOKENS] * STREAM_COUNT
    delivered = edge.services[0].database.delivered(tenant).values()
    assert sum(count == SLOW_TOKENS for count in delivered) == STREAM_COUNT


async def test_a_stream_outlives_the_age_of_streams_and_connections(
    edge: Edge, tenant: Tenant
) -> None:
    name = "http.clients.downstream_rq_max_duration_reached"
    before = edge.counter(name)

    async with edge.client(tenant) as client:
        token_count = await long_answer(client)

    assert token_count == SLOW_TOKENS
    assert edge.counter(name) > before
    [event] = edge.services[0].database.events(tenant)
    assert event["delivered_token_count"] == event["billed_token_count"] == SLOW_TOKENS


async def test_a_rolling_restart_loses_nothing(edge: Edge, tenant: Tenant) -> None:
    """HTTP requests are not repeated by their client, nor is their status anything but 200."""
    over, sent = asyncio.Event(), {"grpc": 0, "http": 0}

    async def by_grpc(client: AsyncClient) -> None:
        while not over.is_set():
            sent["grpc"] += 1
            assert await answer(client, SHORT_TOKENS) == SHORT_TOKENS

    async def by_http(http: httpx2.AsyncClient) -> None:
        while not over.is_set():
            sent["http"] += 1
            assert await completion(http) == SHORT_TOKENS

    async with (
        edge.client(tenant) as client,
        edge.http(tenant) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(4):
            tasks.create_task(by_grpc(client))
            tasks.create_task(by_http(http))
        for service in edge.services:
            assert await asyncio.to_thread(service.stop) == 0
            await asyncio.to_thread(service.start)
            await until(lambda: edge.serves(*edge.services), "Envoy to find all processes")
        over.set()

    assert min(sent.values()) > 20
    delivered = edge.services[0].database.delivered(tenant)
    assert sorted(delivered.values()) == [SHORT_TOKENS] * sum(sent.values())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda each: each.name)
async def test_a_failed_process_is_left_out(
    edge: Edge, tenant: Tenant, how: signal.Signals
) -> None:
    *others, failed = edge.services
    assert failed.process is not None
    failed.process.send_signal(how)
    if how is signal.SIGSTOP:
        await until(lambda: edge.serves(*others), "Envoy to leave out the process")

    async with edge.client(tenant) as client, edge.http(tenant) as http:
        await completions(http, 20)
        assert await answer(client, SHORT_TOKENS) == SHORT_TOKENS

    await until(lambda: edge.serves(*others), "Envoy to leave out the process")
    if how is signal.SIGKILL:
        failed.process.wait(PATIENCE_S)
        await asyncio.to_thread(failed.start)
    failed.process.send_signal(signal.SIGCONT)
    await until(lambda: edge.serves(*edge.services), "Envoy to find all processes")


async def events_by_process(edge: Edge, tenant: Tenant) -> list[int]:
    """Open streams of events at once; return how many each process has."""
    async with edge.http(tenant) as http, asyncio.TaskGroup() as tasks:
        events = [tasks.create_task(long_events(http)) for _ in range(STREAM_COUNT)]
        await until(lambda: sum(active(edge, "weir_http")) == STREAM_COUNT, "all streams of events")
        counts = active(edge, "weir_http")
        for task in events:
            task.cancel()
    await until(lambda: not any(active(edge, "weir_http")), "the end of the streams")
    return counts


async def long_events(http: httpx2.AsyncClient) -> list[str]:
    """Return the lines of a stream of events that outlives a test."""
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": SLOW_TOKENS, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body | TO_THE_END) as response:
        assert response.status_code == 200
        return [line async for line in response.aiter_lines()]


async def test_events_are_not_buffered(edge: Edge, tenant: Tenant) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": SLOW_TOKENS, "stream": True}

    async with (
        edge.http(tenant) as http,
        http.stream("POST", "/v1/completions", json=body | TO_THE_END) as response,
    ):
        lines = response.aiter_lines()
        while not (await anext(lines)).startswith("data: {"):
            pass
        ended_early = edge.services[0].database.events(tenant)
        rest = [line async for line in lines]

    assert ended_early == []
    assert "data: [DONE]" in rest


async def test_grpc_web_reaches_calls_with_one_request(edge: Edge, tenant: Tenant) -> None:
    """Browsers cannot write to a stream, so `Generate` gets all of its frames at once."""
    path, headers = "/weir.v1.InferenceService", {"content-type": "application/grpc-web+proto"}
    frames = [start(max_output_tokens=SHORT_TOKENS)]

    async with edge.http(tenant) as http:
        models, [status] = web_frames(
            await http.post(
                f"{path}/ListModels", content=web_message(pb.ListModelsRequest()), headers=headers
            )
        )
        output, [ended] = web_frames(
            await http.post(
                f"{path}/Generate",
                content=web_message(pb.GenerateRequest(frames=frames)),
                headers=headers,
            )
        )

    [answer] = map(pb.ListModelsResponse.FromString, models)
    assert [model.name for model in answer.models] == [MODEL]
    assert b"grpc-status:0" in status
    assert b"grpc-status:0" in ended
    received = [f for each in output for f in pb.GenerateResponse.FromString(each).frames]
    assert received[-1].finished.usage.billed_token_count == SHORT_TOKENS


async def long_answer(client: AsyncClient) -> int:
    """Return the number of tokens of an answer that outlives streams."""
    return await answer(client, SLOW_TOKENS)


async def answer(client: AsyncClient, token_count: int) -> int:
    """Ask for an answer of some tokens; return how many it has."""
    generation = client.generate(
        MODEL, token_ids=list(PLAIN_IDS[:10]), max_output_tokens=token_count, ignore_eos=True
    )
    return len((await generation.wait()).token_ids)


async def completions(http: httpx2.AsyncClient, count: int) -> None:
    """Ask for answers, one after the other."""
    for _ in range(count):
        await completion(http)


async def completion(http: httpx2.AsyncClient) -> int:
    """Ask for a short answer by HTTP; return how many tokens it has."""
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": SHORT_TOKENS, "ignore_eos": True}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["completion_tokens"])


def active(edge: Edge, cluster: str) -> list[int]:
    """Return the open requests of each process, those of streams included."""
    return [counters["rq_active"] for counters in edge.hosts(cluster).values()]


def is_even(counts: Sequence[int]) -> bool:
    """Return whether all counts are within 10 % of their mean."""
    mean = sum(counts) / len(counts)
    return mean > 0 and all(abs(count - mean) <= EVEN * mean for count in counts)


def web_message(message: Any) -> bytes:
    """Return a message as gRPC-Web sends it."""
    content: bytes = message.SerializeToString()
    return struct.pack(">BI", 0, len(content)) + content


def web_frames(response: httpx2.Response) -> tuple[list[bytes], list[bytes]]:
    """Return the messages and the trailers of an answer of gRPC-Web."""
    assert response.status_code == 200, response.text
    messages: list[bytes] = []
    trailers: list[bytes] = []
    rest = response.content
    while rest:
        flag, size = struct.unpack(">BI", rest[:5])
        (trailers if flag & TRAILERS else messages).append(rest[5 : 5 + size])
        rest = rest[5 + size :]
    return messages, trailers
