"""Organization bound to a region: what a process of another region, PostgreSQL and the wire get."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import select
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode
from sqlalchemy.engine import make_url
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core.settings import bundled_models
from inference.routing.replica_set import ReplicaSet
from metering.pricing.prices import PriceTerms, set_price
from tests.calls import calls
from tests.conftest import as_application
from tests.e2e.conftest import Serve
from tests.inference.checkpoints import LlamaShape, make_checkpoint
from tests.otlp_receiver import Receiver, receiving
from tests.service import MODEL, Refusal, Service, Tenant, run_inside, running, start, until

WITHIN_S = 2.0  # of the commit, for every process
PROMPT, LABEL, END_USER = "kumquat-prompt-5b1e", "kumquat-label-5b1e", "kumquat-user-5b1e"
# Parts of what a client sends that must not leave the region; `kumquat` begins each.
MARK = b"kumquat"
FLEET = """
regions: {{eu: [us], us: [eu]}}
models:
  {model}: {{versions: {{v1: {{directory: {directory}}}}}}}
"""
REACH = """
regions: {eu: [us], us: [eu]}
models:
  MODEL: {directory: DIRECTORY, replicas: {min: 1, max: 2}, fallback: [far, other]}
  far: {directory: DIRECTORY}
  alone: {directory: DIRECTORY, replicas: {min: 1, max: 2}}
  other: {directory: DIRECTORY}
"""
ADDRESSES = {"eu": "127.0.0.2", "us": "127.0.0.3"}
MESSAGES = [{"role": "user", "content": PROMPT}]
START = pb.StartFrame(model=MODEL, text=PROMPT, max_output_tokens=2)
EMBED = pb.EmbedRequest(
    request_id=str(uuid.uuid4()), model=MODEL, inputs=[pb.EmbedInput(text=PROMPT)]
)


class Wire:
    """Bridge from a TCP port to PostgreSQL's Unix socket, which looks for marks in both ways."""

    def __init__(self, host: str, server_url: str) -> None:
        url = make_url(server_url)
        directory, port = url.query["host"], url.port or url.query.get("port", "5432")
        self._behind = f"{directory}/.s.PGSQL.{port}"
        self._listener = socket.create_server((host, 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.marked: list[bytes] = []
        port = self._listener.getsockname()[1]
        self.url = url.set(host=host, port=port, query={}).render_as_string(hide_password=False)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                bridge = threading.Thread(target=self._bridge, args=self._listener.accept()[:1])
                self._threads.append(bridge)
                bridge.start()

    def _bridge(self, here: socket.socket) -> None:
        """Forward between both ends until one has closed."""
        with here, socket.socket(socket.AF_UNIX) as there, contextlib.suppress(OSError):
            there.connect(self._behind)
            other, seen = {here: there, there: here}, {here: b"", there: b""}
            while True:
                for source in select.select([here, there], [], [])[0]:
                    if not (part := source.recv(1 << 16)):
                        return
                    seen[source] = seen[source][-64:] + part  # a mark may come in two parts
                    if MARK in seen[source]:
                        self.marked.append(seen[source])
                    other[source].sendall(part)

    def close(self) -> None:
        """Accept no more connections, and wait for the end of those that are open."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


@dataclass
class Capture:
    """All TCP segments on the loopback interface: ports of both ends, and the bytes."""

    segments: list[tuple[str, int, str, int, bytes]] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[Capture]:
        """Capture while the block runs. Skips the test where that is not permitted."""
        try:
            sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
            sniffer.bind(("lo", 0))
        except (AttributeError, OSError) as refusal:
            pytest.skip(f"this user may not capture packets (it needs CAP_NET_RAW): {refusal}")
        sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        sniffer.settimeout(0.2)
        ended = threading.Event()
        thread = threading.Thread(target=self._read, args=(sniffer, ended))
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()
            sniffer.close()

    def _read(self, sniffer: socket.socket, ended: threading.Event) -> None:
        while not ended.is_set():
            try:
                frame, origin = sniffer.recvfrom(1 << 17)
            except TimeoutError:
                continue
            if origin[2] != socket.PACKET_OUTGOING:  # each packet of `lo` is seen twice
                continue
            packet = frame[14:]  # after the Ethernet header
            if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
                continue
            segment = packet[(packet[0] & 15) * 4 :]
            ends = [int.from_bytes(segment[at : at + 2], "big") for at in (0, 2)]
            source, target = socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20])
            payload = segment[(segment[12] >> 4) * 4 :]
            self.segments.append((source, ends[0], target, ends[1], payload))


@dataclass
class Regions:
    """A process in each of two regions, with one database, and the wires to it."""

    services: dict[str, Service]
    wires: dict[str, Wire]
    spans: dict[str, Receiver]

    @property
    def eu(self) -> Service:
        """Process in the region eu."""
        return self.services["eu"]

    @property
    def us(self) -> Service:
        """Process in the region us."""
        return self.services["us"]


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of 3 ms per token, so that answers still run on the quickest machine."""
    directory = tmp_path_factory.mktemp("slow")
    make_checkpoint(directory, shape=LlamaShape(layer_count=120, context_window_tokens=4096))
    return directory


@pytest.fixture(scope="module")
def regions(
    slow_model: Path, module_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Regions]:
    """Yield a process in eu and one in us, each with its own engine."""
    file = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    file.write_text(FLEET.format(model=MODEL, directory=slow_model))
    url = as_application(module_database)
    wires = {name: Wire(host, url) for name, host in ADDRESSES.items()}
    services, spans = {}, {}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name, host in ADDRESSES.items():
            service = Service(
                tmp_path_factory.mktemp(name),
                module_database,
                slow_model,
                models=bundled_models(),
                fleet=str(file),
                region=name,
                listen=f"{host}:0",
            )
            spans[name] = stack.enter_context(receiving())
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", spans[name].address)
            service.settings = service.settings.having(database_url=wires[name].url)
            services[name] = stack.enter_context(running(service))
        yield Regions(services, wires, spans)
    for wire in wires.values():
        wire.close()


async def operator(service: Service, name: str, **fields: Any) -> Any:
    """Make a call as the operator."""
    secret = (await service.tenant(scopes=("admin",))).secret
    async with calls(service, secret) as call:
        return await call(name, **fields)


async def bind(service: Service, tenant: Tenant, region: str) -> Any:
    """Bind the organization of a tenant."""
    return await operator(service, "BindOrganization", organization=tenant.name, region=region)


@pytest.fixture
async def bound(regions: Regions) -> Tenant:
    """Return a tenant whose organization is bound to eu."""
    tenant = await regions.eu.tenant()
    await bind(regions.us, tenant, "eu")
    return tenant


async def generate(service: Service, secret: str, **fields: Any) -> str:
    """Send a request with the prompt; return the reason of its refusal, or an empty text."""
    async with service.stream(secret) as stream:
        frame = start(text=PROMPT, max_output_tokens=2, **fields)
        await stream.send(frame)
        await until(lambda: stream.over or stream.ends(frame.request_id), "an answer")
        if not (ends := stream.ends(frame.request_id)):
            assert stream.error is not None
            return Refusal.of(stream.error).reason
    [end] = ends
    return "" if end.HasField("finished") else Refusal(end.failed.status).reason


async def unary(service: Service, secret: str, name: str, **fields: Any) -> str:
    """Make a call; return the reason of its refusal, or an empty text."""
    async with calls(service, secret) as call:
        try:
            await call(name, **fields)
        except grpc.aio.AioRpcError as error:
            return Refusal.of(error).reason
    return ""


async def post(service: Service, secret: str, path: str, **body: Any) -> str:
    """Send a body to the HTTP API; return the code of its refusal, or an empty text."""
    url = f"{service.openai_url}/{path}"
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {secret}"}) as http,
        http.post(url, json={"model": MODEL, **body}) as response,
    ):
        answer = json.loads(await response.read())
    return str(error["weir"]["reason"]) if (error := answer.get("error")) else ""


# Every call that takes text, with that text.
WITH_TEXT: dict[str, Callable[[Service, str], Awaitable[str]]] = {
    "Generate": generate,
    "Generate, stop sequence": partial(generate, stop_sequences=[PROMPT]),
    "Embed": partial(
        unary, name="Embed", request_id=EMBED.request_id, model=MODEL, inputs=EMBED.inputs
    ),
    "CountTokens": partial(unary, name="CountTokens", model=MODEL, text=PROMPT),
    "Quote": partial(unary, name="Quote", start=START),
    "Quote, embedding": partial(unary, name="Quote", embed=EMBED),
    "chat completions": partial(post, path="chat/completions", messages=MESSAGES, max_tokens=2),
    "completions": partial(post, path="completions", prompt=PROMPT, max_tokens=2),
    "responses": partial(post, path="responses", input=PROMPT, max_output_tokens=2),
    "messages": partial(post, path="messages", messages=MESSAGES, max_tokens=2),
    "embeddings": partial(post, path="embeddings", input=PROMPT),
    "tokenize": partial(post, path="tokenize", prompt=PROMPT),
    "detokenize": partial(post, path="detokenize", tokens=[7, 8]),
    "count tokens": partial(post, path="messages/count_tokens", messages=MESSAGES),
    "input tokens": partial(post, path="responses/input_tokens", input=PROMPT),
}
# Every call of a key for models that takes a label or the name of an end user.
WITH_NAMES: dict[str, Callable[[Service, str], Awaitable[str]]] = {
    "label": partial(generate, labels={"team": LABEL}),
    "key of a label": partial(generate, labels={LABEL: ""}),
    "end user": partial(generate, end_user=END_USER),
    "end user of an embedding": partial(
        unary,
        name="Quote",
        embed=pb.EmbedRequest(model=MODEL, inputs=EMBED.inputs, end_user=END_USER),
    ),
    "label of a quote": partial(
        unary, name="Quote", start=pb.StartFrame(model=MODEL, text=PROMPT, labels={"team": LABEL})
    ),
    "limits of an end user": partial(unary, name="GetQuota", end_user=END_USER),
    "limits of a label": partial(unary, name="GetQuota", labels={"team": LABEL}),
    "usage of an end user": partial(unary, name="GetOwnUsage", end_user=END_USER),
    "user": partial(post, path="completions", prompt=PROMPT, max_tokens=2, user=END_USER),
    "metadata": partial(
        post, path="responses", input=PROMPT, max_output_tokens=2, metadata={"team": LABEL}
    ),
    "user of a message": partial(
        post, path="messages", messages=MESSAGES, max_tokens=2, metadata={"user_id": END_USER}
    ),
}


def found_in(regions: Regions) -> list[str]:
    """List where a mark was found: wires to the database, tables, logs and spans."""
    found = [f"wire of {name}" for name, wire in regions.wires.items() if wire.marked]
    found += [
        f"log of {name}" for name, each in regions.services.items() if MARK.decode() in each.log
    ]
    found += [f"spans of {name}" for name, each in regions.spans.items() if MARK in each.data]
    database = regions.eu.database
    for row in database.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
        table = row["tablename"]
        [count] = database.rows(
            f"SELECT count(*) AS n FROM {table} AS t WHERE t::text LIKE any(%s)",
            [f"%{MARK.decode()}%", f"%{MARK.hex()}%"],
        )
        found += [f"table {table}"] * (count["n"] > 0)
    return found


async def test_a_process_elsewhere_refuses_every_call_with_text(
    regions: Regions, bound: Tenant
) -> None:
    calls_with_text = WITH_TEXT | WITH_NAMES

    reasons = {name: await send(regions.us, bound.secret) for name, send in calls_with_text.items()}

    assert reasons == dict.fromkeys(calls_with_text, "BOUND_TO_REGION")
    assert found_in(regions) == []


async def test_text_stays_in_the_process_of_its_region(regions: Regions, bound: Tenant) -> None:
    """Nothing of it is in PostgreSQL, on the wire to it, in a log or in a span."""
    reasons = {name: await send(regions.eu, bound.secret) for name, send in WITH_TEXT.items()}

    refused = {name: reason for name, reason in reasons.items() if reason}
    # The fleet has no embedding model.
    assert refused == dict.fromkeys(("Embed", "Quote, embedding", "embeddings"), "MODEL_MISMATCH")
    assert found_in(regions) == []


async def test_names_that_the_database_would_keep_are_refused(
    regions: Regions, bound: Tenant
) -> None:
    """The database is not known to be in the region."""
    reasons = {name: await send(regions.eu, bound.secret) for name, send in WITH_NAMES.items()}

    assert reasons == dict.fromkeys(WITH_NAMES, "FIELD_INVALID")
    _, owner = await regions.eu.new_key(bound, role="owner")
    limit = {
        "subject": types_pb2.QUOTA_SUBJECT_ORGANIZATION,
        "subject_ref": bound.name,
        "dimension": types_pb2.QUOTA_DIMENSION_REQUESTS_PER_DAY,
        "limit_value": 1,
    }
    async with calls(regions.eu, owner) as call:
        for field, value in (("end_user", END_USER), ("label", f"team={LABEL}")):
            refusal = await call.refused("SetQuota", **limit, **{field: value})
            assert (refusal.reason, refusal.fields) == ("FIELD_INVALID", [field])
            assert "WEIR_DATABASE_REGION" in refusal.status.message
    # Spans go to the collector of that process, which belongs in the region. The names of limits
    # are looked up before they are refused: the operator's or an administrator's calls are theirs.
    assert not {each for each in found_in(regions) if each.startswith(("table", "log"))}


async def test_names_are_kept_in_a_database_of_the_region(
    serve: Serve, model: Path, tmp_path: Path
) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET.format(model=MODEL, directory=model))
    settings = {"region": "eu", "database_region": "eu", "fleet": str(fleet)}
    service = serve(model, is_drained=True, models=bundled_models(), **settings)
    tenant = await service.tenant()
    await bind(service, tenant, "eu")

    assert await generate(service, tenant.secret, labels={"team": "a"}, end_user="u") == ""

    [event] = service.database.events(tenant)
    assert event["labels"] == {"team": "a"}


async def test_a_request_cannot_name_another_region(regions: Regions, bound: Tenant) -> None:
    async with regions.eu.stream(bound.secret) as stream:
        away = await stream.failed(await stream.begin(region="us"))
        near = await stream.finished(await stream.begin(region="eu", max_output_tokens=1))

    assert (away.code, away.fields) == (StatusCode.INVALID_ARGUMENT, ["region"])
    assert "'eu'" in away.status.message
    assert near.usage.billed_token_count == 1


async def test_running_requests_end_everywhere_when_an_organization_is_bound(
    regions: Regions,
) -> None:
    """They are billed what was delivered. In the region the next request runs, on its engine."""
    tenant, other = await regions.eu.tenant(), await regions.eu.tenant()
    async with (
        regions.eu.stream(tenant.secret) as near,
        regions.us.stream(tenant.secret) as far,
        regions.us.stream(other.secret) as untouched,
    ):
        spared = await untouched.begin(max_output_tokens=4000)
        running_ids = {await each.begin(max_output_tokens=3000): each for each in (near, far)}
        for request_id, stream in running_ids.items():
            await stream.received(request_id, 5)

        await bind(regions.us, tenant, "eu")
        ends = {each: await stream.failed(each) for each, stream in running_ids.items()}
        await near.finished(await near.begin(max_output_tokens=1))
        late = await far.failed(await far.begin())

        for request_id, end in ends.items():
            assert (end.code, end.reason) == (StatusCode.PERMISSION_DENIED, "BOUND_TO_REGION")
            assert end.info.metadata["region"] == "eu"
            event = regions.eu.database.event(tenant, request_id)
            assert event["delivered_token_count"] >= 5
            assert regions.eu.database.billed(tenant)[request_id]
        assert late.reason == "BOUND_TO_REGION"
        [row] = regions.eu.database.rows(
            """SELECT max(extract(epoch FROM settled_at - c.created_at))::float8 AS elapsed_s
               FROM usage_events u JOIN cancel_commands c ON c.owner_id = u.organization_id
               WHERE u.request_id = any(%s)""",
            [uuid.UUID(each) for each in ends],
        )
        assert 0 < row["elapsed_s"] < WITHIN_S
        going_on = await near.begin(max_output_tokens=200)
        await near.received(going_on, 1)
        await bind(regions.us, tenant, "")
        await near.finished(going_on)
        await until_served(regions.us, tenant)
        await untouched.cancel(spared)
        await untouched.finished(spared)


async def until_served(service: Service, tenant: Tenant) -> None:
    """Wait until a process serves a tenant again."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            if not await post(service, tenant.secret, "tokenize", prompt="a"):
                return


async def test_all_but_the_operators_calls_are_refused_elsewhere(regions: Regions) -> None:
    """A report shows names that are kept; and the operator must be able to end a binding."""
    tenant = await regions.eu.tenant(scopes=("admin", "inference"))
    keys = {role: (await regions.eu.new_key(tenant, role=role))[1] for role in ("owner", "viewer")}
    await bind(regions.us, tenant, "eu")

    for secret in keys.values():
        for name in ("ListOrganizations", "GetUsage", "ListReceiptKeys"):
            assert await unary(regions.us, secret, name) == "BOUND_TO_REGION"
        assert await unary(regions.eu, secret, "ListOrganizations") == ""
    assert await unary(regions.us, tenant.secret, "ListModels") == "BOUND_TO_REGION"
    assert await unary(regions.us, tenant.secret, "ListOrganizations") == ""
    unbind = {"name": "BindOrganization", "organization": tenant.name}
    assert await unary(regions.us, tenant.secret, **unbind) == ""
    assert await unary(regions.us, tenant.secret, "ListModels") == ""


async def test_a_binding_is_recorded_once(regions: Regions) -> None:
    tenant = await regions.eu.tenant()
    for region in ("eu", "eu", "us", ""):
        answer = await bind(regions.eu, tenant, region)
        assert answer.organization.region == region
    async with calls(regions.eu, (await regions.eu.tenant(scopes=("admin",))).secret) as call:
        for wrong in ("mars", "e u"):
            refusal = await call.refused("BindOrganization", organization=tenant.name, region=wrong)
            assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, ["region"])
            assert "eu, us" in refusal.status.message
    rows = regions.eu.database.rows(
        """SELECT before ->> 'region' AS before, after ->> 'region' AS after
           FROM audit_log WHERE subject_id = %s AND action = 'organization.bind' ORDER BY id""",
        str(tenant.organization_id),
    )
    assert [tuple(row.values()) for row in rows] == [("", "eu"), ("eu", "us"), ("us", "")]


async def test_a_configuration_binds_and_exports(regions: Regions) -> None:
    tenant = await regions.eu.tenant()
    async with calls(regions.eu, (await regions.eu.tenant(scopes=("admin",))).secret) as call:
        changes = []
        for stated in ({"region": "eu"}, {}, {"region": ""}):
            organization = {"name": tenant.name, **stated}
            answer = await call(
                "ApplyConfiguration", configuration={"organizations": [organization]}
            )
            changes += [(each.before_json, each.after_json) for each in fields_of(answer)]
            [exported] = (
                await call("ExportConfiguration", organization=tenant.name)
            ).configuration.organizations
            assert exported.region == ("" if stated.get("region") == "" else "eu")

    assert changes == [("", '"eu"'), ('"eu"', "")]


def fields_of(answer: Any) -> list[Any]:
    """Return the changes of regions."""
    return [each for change in answer.changes for each in change.fields if each.field == "region"]


async def test_the_wires_of_another_region_carry_nothing(regions: Regions, bound: Tenant) -> None:
    """Prompt, output, attaching from elsewhere: seen on every TCP connection of the machine."""
    with Capture().running() as capture:
        async with regions.eu.stream(bound.secret) as stream:
            frame = start(text=PROMPT, max_output_tokens=60, keep_on_disconnect=Duration(seconds=9))
            await stream.send(frame)
            await stream.received(frame.request_id, 20)
            async with regions.us.stream(bound.secret) as elsewhere:
                await elsewhere.attach(frame.request_id)
                await until(lambda: elsewhere.over, "the refusal")
            await stream.finished(frame.request_id)
        output = await answer_of(regions.eu, bound.secret)
        for send in (WITH_TEXT | WITH_NAMES).values():
            await send(regions.us, bound.secret)

    assert elsewhere.error is not None
    assert Refusal.of(elsewhere.error).reason == "BOUND_TO_REGION"
    endpoints = {
        name: {int(each.address.rpartition(":")[2]), make_url(each.openai_url).port}
        for name, each in regions.services.items()
    }
    peers = [
        int(row["peer_address"].rpartition(":")[2])
        for row in regions.eu.database.rows("SELECT peer_address FROM live_reports")
    ]
    marks = (MARK, *words(output))
    marked = set()
    for _, source, _, target, payload in capture.segments:
        assert source not in peers, "no process connects to another one"
        assert target not in peers, "no process connects to another one"
        if any(mark in payload for mark in marks):
            marked.add((source, target))
    clients = {each for each in marked if set(each) & endpoints["eu"]}
    ways = {(source in endpoints["eu"], target in endpoints["eu"]) for source, target in clients}
    assert ways == {(True, False), (False, True)}, "the capture has output and prompt of the client"
    # Clients send their text to the wrong server. It sends none of it to anyone.
    assert {target for _, target in marked - clients} <= endpoints["us"]


async def answer_of(service: Service, secret: str) -> str:
    """Return the output for the prompt."""
    headers, body = {"authorization": f"Bearer {secret}"}, {"prompt": "Go", "max_tokens": 60}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{service.openai_url}/completions", json={"model": MODEL, **body}) as response,
    ):
        return str((await response.json())["choices"][0]["text"])


async def test_a_bound_request_takes_a_fallback_in_its_region_or_waits_for_an_engine_there(
    tmp_path: Path, model: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model and the first fallback have a ready engine in `us` only."""
    file = tmp_path / "fleet.yaml"
    file.write_text(REACH.replace("MODEL", MODEL).replace("DIRECTORY", str(model)))
    service = Service(
        tmp_path / "home",
        database_url,
        model,
        models=bundled_models(),
        fleet=str(file),
        region="eu",
    )
    async with run_inside(service, monkeypatch) as inside:
        free, bound = await service.tenant(), await service.tenant()
        await bind(service, bound, "eu")
        for name in ("far", "alone", "other"):
            await price(service, name)
        router = inside.process.router
        monkeypatch.setattr(router, "drain", lambda _: None)  # whatever the database says
        names = (MODEL, "far", "alone", "other")
        sets = {name: replica_set(router.find(name)) for name in names}
        for each in sets.values():
            await each.start()
        tiny, alone = sets[MODEL], sets["alone"]
        away = [each.replicas[0] for name, each in sets.items() if name != "other"]
        for replica in away:
            replica.region = replica.known_region = "us"
        tiny.drain([tiny.replicas[1].name])

        near = await models(service, bound.secret)
        assert not any(each.placed_at for each in away)
        assert alone.replicas[1].placed_at, "it was started for the bound request"
        far = await models(service, free.secret, region="us")

        assert near == ["other", "alone"]
        assert far == [MODEL, "alone"]
        assert [bool(each.placed_at) for each in away] == [True, False, True]


def replica_set(backend: object) -> ReplicaSet:
    assert isinstance(backend, ReplicaSet)
    return backend


async def price(service: Service, model: str) -> None:
    """Set a price for a model."""
    async with service.session() as session:
        terms = PriceTerms(
            model=model,
            currency_code="USD",
            input_picos_per_token=1,
            cached_input_picos_per_token=1,
            output_picos_per_token=1,
        )
        await set_price(session, terms, actor="test")


async def models(service: Service, secret: str, **fields: Any) -> list[str]:
    """Send a request to both models that have an engine in each region; return who answered."""
    async with service.stream(secret) as stream:
        sent = [await stream.begin(model=name, text="Hi", **fields) for name in (MODEL, "alone")]
        return [(await stream.finished(request_id)).model for request_id in sent]


def words(output: str) -> list[bytes]:
    """Return the parts of an output that are long enough to be no coincidence."""
    found = [each.encode() for each in re.findall(r"[ -!#-\[\]-~]{8,}", output)]
    assert found, output
    return found
