"""Service for tests: an api process with a tiny model, tenants in its database, and a gRPC client.

The client uses the generated stub instead of the SDK, so that tests check the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc
from weir.v1 import types_pb2
from weir_client import AsyncClient

import api.serving as api_main
from api.core.endpoint import forget_endpoint, read_endpoint
from api.core.settings import Settings
from api.generation.delivery.output_buffer import OutputBuffer
from api.generation.request.admission import Capacity
from api.queue.fair_queue import QueueStatistics
from common.processes import alive
from inference.native import loader
from inference.routing.replica_set import ReplicaSet
from inference.text.tokenizer import Tokenizer
from metering.core.models import QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.pricing.prices import PriceTerms, set_price
from metering.quotas.quota_admin import set_quota
from metering.store.db import (
    BoundedConnection,
    Sessions,
    create_sessions,
    sqlalchemy_url,
)
from metering.tenants.api_keys import KeyRecord, create_api_key, revoke_api_key
from metering.tenants.key_terms import KeyTerms
from metering.tenants.tenants import create_organization, create_project
from tests import transitions as transitions  # checks them
from tests.conftest import ask
from tests.forked_workers import children_of, start_api
from tests.forks import Forked
from tests.inference.checkpoints import LlamaShape, make_checkpoint

MODEL = "tiny"
CONTEXT_WINDOW_TOKENS = 4096
PATIENCE_S = 180.0  # timeout of every wait, far above the duration on a busy machine
POLL_S = 0.01
INPUT_PICOS, CACHED_PICOS, OUTPUT_PICOS = 150_000, 15_000, 600_000
PLAIN_IDS = range(7, 400)  # token ids of the tiny tokenizer; lower ones are special tokens
SMALL_WINDOWS = (
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.write_buffer_size", 0),
)

Value = TypeVar("Value")
Detail = TypeVar("Detail", bound=Message)
Kind = str


def make_model(directory: Path) -> Path:
    """Write a random checkpoint of 12 thin layers, 3 ms per token; return `directory`."""
    make_checkpoint(
        directory, shape=LlamaShape(layer_count=12, context_window_tokens=CONTEXT_WINDOW_TOKENS)
    )
    return directory


@dataclass(frozen=True, slots=True)
class Tenant:
    """Organization with one project and one key."""

    name: str
    organization_id: uuid.UUID
    project_id: uuid.UUID
    key: KeyRecord
    secret: str


class Database:
    """Queries on the service's database."""

    def __init__(self, database_url: str) -> None:
        self.database_url = database_url

    def rows(self, query: str, *values: object) -> list[dict[str, Any]]:
        """Return the rows of a query as dictionaries."""
        answer = ask(self.database_url, query, *values)
        return [
            dict(zip((column.name for column in answer.description or ()), row, strict=True))
            for row in answer
        ]

    def events(self, tenant: Tenant) -> list[dict[str, Any]]:
        """Return the usage events of a tenant, in order."""
        return self.rows(
            "SELECT * FROM usage_events WHERE organization_id = %s ORDER BY id",
            tenant.organization_id,
        )

    def event(self, tenant: Tenant, request_id: str) -> dict[str, Any]:
        """Return the only usage event of a request."""
        [event] = [event for event in self.events(tenant) if str(event["request_id"]) == request_id]
        return event

    def billed(self, tenant: Tenant) -> dict[str, dict[str, int]]:
        """Return non-zero token counts and costs of usage events by request."""
        return {
            str(event["request_id"]): {
                name: value
                for name, value in event.items()
                if name.endswith(("_token_count", "_picos")) and value
            }
            for event in self.events(tenant)
        }

    def holds(self, tenant: Tenant) -> dict[str, int]:
        """Return the number of a tenant's holds by state."""
        query = "SELECT state, count(*) AS n FROM holds WHERE organization_id = %s GROUP BY state"
        return {row["state"]: row["n"] for row in self.rows(query, tenant.organization_id)}

    def counters(self, tenant: Tenant) -> dict[str, tuple[int, int]]:
        """Return used and held amounts of quotas by dimension, over all windows."""
        query = """SELECT dimension, sum(used)::bigint AS used, sum(held)::bigint AS held
                   FROM quota_counters JOIN quotas ON quotas.id = quota_id
                   WHERE subject_id = ANY(%s) GROUP BY dimension"""
        subjects = [tenant.organization_id, tenant.project_id, tenant.key.id]
        return {row["dimension"]: (row["used"], row["held"]) for row in self.rows(query, subjects)}

    def held_hold_count(self) -> int:
        """Return the number of live holds of all tenants."""
        [row] = self.rows("SELECT count(*) AS n FROM holds WHERE state = 'held'")
        return int(row["n"])

    def delivered(self, tenant: Tenant) -> dict[str, int]:
        """Return delivered tokens by request, over all usage events."""
        totals: dict[str, int] = defaultdict(int)
        for event in self.events(tenant):
            totals[str(event["request_id"])] += event["delivered_token_count"]
        return totals


class Service:
    """Api process and its database."""

    def __init__(self, home: Path, database_url: str, model: Path, **settings: Any) -> None:
        usual: dict[str, Any] = {
            "models": {MODEL: model},
            "listen": "127.0.0.1:0",
            "engine_threads": 1,
            "kv_cache_bytes": 64 << 20,
            "recovery_interval_s": 0.5,
            "issuer_name": "Weir Operations GmbH",
            "issuer_address": "Brückenstraße 12 | 10179 Berlin",
            "issuer_payment": "IBAN DE02 1005",
            "drain_notice_s": 0.01,  # tests have no balancers
            "auth_failures_per_minute": 0,  # off: all tests share an address and use invalid keys
        }
        self.settings = Settings.of(database_url=database_url, home=home, **(usual | settings))
        self.home = home
        self.database_url = database_url
        self.database = Database(database_url)
        self.tokenizer = Tokenizer(model)
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.address = ""
        self.credentials: grpc.ChannelCredentials | None = None  # of clients, if it uses TLS
        self._priced = False

    @property
    def log(self) -> str:
        """Log of the process."""
        path = self.home / "api.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def openai_url(self) -> str:
        """Base URL for OpenAI's clients."""
        url = read_endpoint(self.home).openai_url
        assert url, "the service has no HTTP API"
        return url

    @property
    def metrics_url(self) -> str:
        """URL of the metrics."""
        url = read_endpoint(self.home).metrics_url
        assert url, "the service has no metrics"
        return url

    @property
    def pid(self) -> int:
        """Process id of the api process."""
        assert self.process is not None
        return self.process.pid

    @property
    def worker_pid(self) -> int | None:
        """Process id of the engine worker, which another process may have started."""
        workers = self.worker_pids()
        return workers[0] if workers else None

    def worker_pids(self) -> list[int]:
        """Read the process ids of the engine workers of the machine that this process uses."""
        directory = self.settings.engine_directory
        pids = []
        for lock in sorted(directory.glob("*.lock")):
            pid = json.loads(lock.read_text() or "{}").get("pid")
            if pid is not None and alive(pid):
                pids.append(pid)
        return pids or children_of(self.pid)

    def spawn(self) -> None:
        """Start the process without waiting for it."""
        assert self.process is None or self.process.poll() is not None
        forget_endpoint(self.home)
        environment = {**os.environ, **self.settings.to_environment(), "WEIR_LOG": "info"}
        self.home.mkdir(parents=True, exist_ok=True)
        self.process = start_api(environment, self.home / "api.log")
        if self.process is None:
            with (self.home / "api.log").open("ab") as log:
                command = [sys.executable, "-m", "api"]
                self.process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

    def start(self, *, serving: bool = True) -> None:
        """Start the process and wait until it serves or, without `serving`, until it listens."""
        self.spawn()
        self.address = wait_for(self._endpoint, "the api process to listen")
        if serving:
            self.wait_serving()

    def wait_serving(self) -> None:
        """Wait until the health check reports SERVING."""
        wait_for(self.serving, "the api process to serve")

    def serving(self, name: str = "") -> bool:
        """Return whether the health check of the server, a service or a part reports SERVING."""
        if self.credentials is None:
            opened = grpc.insecure_channel(self.address)
        else:
            opened = grpc.secure_channel(self.address, self.credentials)
        with opened as channel:
            try:
                answer = health_check(channel)(
                    health_pb2.HealthCheckRequest(service=name), timeout=5
                )
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _endpoint(self) -> str | None:
        assert self.process is not None
        assert self.process.poll() is None, f"the api process ended:\n{self.log[-4000:]}"
        return read_endpoint(self.home).address.removeprefix("https://") or None

    def terminate(self) -> None:
        """Begin the drain with SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)

    def wait_ended(self) -> int:
        """Wait until the process has ended; return its exit status."""
        assert self.process is not None
        return self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        """Drain and end the process; return its exit status."""
        self.terminate()
        return self.wait_ended()

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def tenant(
        self,
        quotas: Mapping[QuotaDimension, int] | None = None,
        *,
        scopes: Sequence[str] = ("inference",),
        currency_code: str = "USD",
        lifetime: timedelta | None = None,
    ) -> Tenant:
        """Create an organization with a project, a key and quotas on the organization.

        The first call sets prices of all models.
        """
        name = f"t{uuid.uuid4().hex[:20]}"
        async with self.session() as session:
            if not self._priced:
                models = self.settings.models
                for model in {MODEL, *models.directories, *models.encoders}:
                    await price_model(session, model)
                self._priced = True
            organization = await create_organization(
                session, name=name, currency_code=currency_code, actor="test"
            )
            project = await create_project(session, organization=name, name="main", actor="test")
            key, secret = await create_api_key(
                session,
                organization=name,
                project="main",
                name="key",
                terms=KeyTerms(scopes=tuple(scopes)),
                lifetime=lifetime,
                actor="test",
            )
            for dimension, limit in (quotas or {}).items():
                await set_quota(
                    session,
                    subject=QuotaSubject.ORGANIZATION,
                    subject_ref=name,
                    key=QuotaKey(dimension),
                    terms=QuotaTerms(limit),
                    actor="test",
                )
        return Tenant(name, organization.id, project.id, key, secret)

    async def new_key(
        self,
        tenant: Tenant,
        *scopes: str,
        models: Sequence[str] = (),
        lifetime: timedelta | None = None,
        role: str = "",
    ) -> tuple[KeyRecord, str]:
        """Create another key of the tenant's project."""
        async with self.session() as session:
            return await create_api_key(
                session,
                organization=tenant.name,
                project="main",
                name="more",
                terms=KeyTerms(tuple(scopes), tuple(models), role=role),
                lifetime=lifetime,
                actor="test",
            )

    async def set_limit(self, tenant: Tenant, dimension: QuotaDimension, limit: int) -> None:
        """Set a limit on the tenant's organization."""
        async with self.session() as session:
            await set_quota(
                session,
                subject=QuotaSubject.ORGANIZATION,
                subject_ref=tenant.name,
                key=QuotaKey(dimension),
                terms=QuotaTerms(limit),
                actor="test",
            )

    async def revoke(self, key: KeyRecord) -> None:
        """Revoke a key."""
        async with self.session() as session:
            await revoke_api_key(session, api_key=str(key.id), actor="test")

    @functools.cached_property
    def sessions(self) -> Sessions:
        """Sessions in the service's database, on any event loop.

        They keep a connection and compiled statements; without, a tenant costs three times the CPU.
        They never wait for a connection, which would bind the pool to one loop.
        """
        engine = create_async_engine(
            sqlalchemy_url(self.database_url),
            pool_size=1,
            max_overflow=-1,
            pool_pre_ping=True,
            connect_args={
                "settings": ("application_name=tests",),
                "async_creator_fn": BoundedConnection.connect,
            },
        )

        @sqlalchemy_event.listens_for(engine.sync_engine, "connect")
        def close_with_service(connection: Any, _record: object) -> None:
            weakref.finalize(self, connection.driver_connection.pgconn.finish)

        return create_sessions(engine)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """Yield a session with a transaction in the service's database."""
        async with self.sessions.begin() as session:
            yield session

    @contextlib.asynccontextmanager
    async def channel(
        self, *options: tuple[str, Any], address: str | None = None
    ) -> AsyncIterator[grpc.aio.Channel]:
        """Yield a new connection. address: of a proxy in front of the service."""
        alone, target = ("grpc.use_local_subchannel_pool", 1), address or self.address
        if self.credentials is None:
            opened = grpc.aio.insecure_channel(target, options=[alone, *options])
        else:
            opened = grpc.aio.secure_channel(target, self.credentials, options=[alone, *options])
        async with opened as channel:
            yield channel

    @contextlib.asynccontextmanager
    async def stream(
        self,
        secret: str | None,
        *,
        reading: bool = True,
        timeout: float | None = None,
        options: Sequence[tuple[str, Any]] = (),
        metadata: Sequence[tuple[str, str]] = (),
        address: str | None = None,
    ) -> AsyncIterator[Stream]:
        """Yield a `Generate` call on a new connection; cancel it at the end of the block.

        address: of a proxy in front of the service.
        """
        async with (
            self.channel(*options, address=address) as channel,
            asyncio.TaskGroup() as tasks,
        ):
            call = pb_grpc.InferenceServiceStub(channel).Generate(
                metadata=(*bearer(secret), *metadata), timeout=timeout
            )
            stream = Stream(call)
            reader = tasks.create_task(stream.read_all()) if reading else None
            try:
                yield stream
            finally:
                call.cancel()
                if reader is not None:
                    await reader

    def client(self, secret: str) -> AsyncClient:
        """Return a client of the SDK."""
        return AsyncClient(self.address, secret, max_retries=0)

    async def no_hold_left(self, tenant: Tenant) -> None:
        """Wait until all holds of the tenant have ended; an admission may outlast its client."""

        def nothing_held() -> bool:
            counters = self.database.counters(tenant).values()
            return "held" not in self.database.holds(tenant) and not any(
                held for _, held in counters
            )

        await until(nothing_held, "all holds to end")


class Stream:
    """`Generate` call with its received frames, by request and in order."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.frames: dict[str, list[pb.ServerFrame]] = defaultdict(list)
        self.messages: list[pb.GenerateResponse] = []
        self.error: grpc.aio.AioRpcError | None = None
        self.over = False
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()

    async def read_all(self) -> None:
        """Take frames until the stream ends."""
        try:
            async for message in self.call:
                self.take(message)
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            if not self.call.cancelled():
                raise
        finally:
            self.over = True
            self._wake()

    def take(self, message: pb.GenerateResponse) -> None:
        """Store a received message."""
        self.messages.append(message)
        for frame in message.frames:
            self.frames[frame.request_id].append(frame)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def send(self, *frames: pb.ClientFrame) -> None:
        """Send frames in one message."""
        async with self._writing:  # gRPC allows one write at a time
            await self.call.write(pb.GenerateRequest(frames=frames))

    async def begin(self, **fields: Any) -> str:
        """Send a start frame; return its request id."""
        frame = start(**fields)
        await self.send(frame)
        return frame.request_id

    async def cancel(self, *request_ids: str) -> None:
        """Send cancel frames."""
        await self.send(*map(cancel, request_ids))

    async def attach(self, request_id: str, after_seq: int = 0) -> None:
        """Send an attach frame."""
        await self.send(attach(request_id, after_seq))

    async def update(self, request_id: str, **limits: Any) -> None:
        """Send an update frame."""
        await self.send(pb.ClientFrame(request_id=request_id, update=pb.UpdateFrame(**limits)))

    async def credit(self, request_id: str, token_count: int) -> None:
        """Send a credit frame."""
        await self.send(credit(request_id, token_count))

    async def half_close(self) -> None:
        """Close the sending side."""
        await self.call.done_writing()

    async def hang_up(self) -> None:
        """Cancel the call, and wait for its end."""
        self.call.cancel()
        await self.closed()

    async def wait(self, condition: Callable[[], Value | None], what: str = "frames") -> Value:
        """Wait until the condition is true of the received frames; return its value."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                changed = self._changed
                if (value := condition()) is not None and value is not False:
                    return value
                assert not self.over, f"the stream ended while waiting for {what}: {self.error!r}"
                await changed.wait()

    async def first(self, request_id: str, kind: Kind) -> Any:
        """Wait for the request's first frame of a kind and return it."""
        return await self.wait(
            lambda: next(iter(self.of(request_id, kind)), None), f"{kind} of {request_id}"
        )

    async def received(self, request_id: str, token_count: int) -> None:
        """Wait for this many tokens."""
        await self.wait(
            lambda: len(self.token_ids(request_id)) >= token_count, f"{token_count} tokens"
        )

    async def end(self, request_id: str) -> pb.ServerFrame:
        """Wait for the request's last frame and return it."""
        return await self.wait(
            lambda: next(iter(self.ends(request_id)), None), f"the end of {request_id}"
        )

    async def finished(self, request_id: str) -> pb.FinishedFrame:
        """Wait for the end of a request, which must be `finished`, and return it."""
        frame = await self.end(request_id)
        assert frame.WhichOneof("kind") == "finished", frame
        return frame.finished

    async def failed(self, request_id: str) -> Refusal:
        """Wait for the end of a request, which must be `failed`, and return it."""
        frame = await self.end(request_id)
        assert frame.WhichOneof("kind") == "failed", frame
        return Refusal(frame.failed.status, frame.failed)

    async def closed(self) -> grpc.StatusCode:
        """Wait for the end of the stream; return its status."""
        await until(lambda: self.over, "the stream to end")
        code: grpc.StatusCode = await self.call.code()
        return code

    def of(self, request_id: str, kind: Kind) -> list[Any]:
        """Return the request's frames of a kind."""
        return [
            getattr(frame, kind)
            for frame in self.frames[request_id]
            if frame.WhichOneof("kind") == kind
        ]

    def ends(self, request_id: str) -> list[pb.ServerFrame]:
        """Return the last frames of a request; more than one is an error."""
        return [
            frame
            for frame in self.frames[request_id]
            if frame.WhichOneof("kind") in ("finished", "failed")
            and not frame.failed.duplicate_start
        ]

    def token_ids(self, request_id: str) -> list[int]:
        """Return all received output tokens."""
        return [token_id for delta in self.of(request_id, "delta") for token_id in delta.token_ids]

    def last_token_count(self, request_id: str) -> int:
        """Return the output tokens of a request in the last received message that has any."""
        counts = (
            sum(len(f.delta.token_ids) for f in message.frames if f.request_id == request_id)
            for message in reversed(self.messages)
        )
        return next(filter(None, counts), 0)

    def text(self, request_id: str) -> str:
        """Return all received text."""
        return "".join(delta.text for delta in self.of(request_id, "delta"))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Status with its details."""

    status: status_pb2.Status
    frame: pb.FailedFrame | None = None
    code: grpc.StatusCode = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "code", {code.value[0]: code for code in grpc.StatusCode}[self.status.code]
        )

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Refusal:
        """Return the status of a call's error."""
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                assert isinstance(value, bytes)
                return cls(status_pb2.Status.FromString(value))
        return cls(status_pb2.Status(code=error.code().value[0], message=error.details() or ""))

    def detail(self, kind: type[Detail]) -> Detail | None:
        """Return the detail of a type, or None."""
        for packed in self.status.details:
            message = kind()
            if packed.Unpack(message):
                return message
        return None

    @property
    def info(self) -> error_details_pb2.ErrorInfo:
        """`ErrorInfo`, which every error has."""
        info = self.detail(error_details_pb2.ErrorInfo)
        assert info is not None, self.status
        assert info.domain == "weir.dev"
        return info

    @property
    def reason(self) -> str:
        """Machine-readable reason."""
        return self.info.reason

    @property
    def fields(self) -> list[str]:
        """Invalid fields."""
        bad_request = self.detail(error_details_pb2.BadRequest)
        return (
            []
            if bad_request is None
            else [violation.field for violation in bad_request.field_violations]
        )

    @property
    def retry_after_s(self) -> float | None:
        """Retry-after in seconds, or None."""
        retry = self.detail(error_details_pb2.RetryInfo)
        return None if retry is None else retry.retry_delay.ToTimedelta().total_seconds()


def start(request_id: str | None = None, **fields: Any) -> pb.ClientFrame:
    """Return a start frame; by default 10 input and 20 output tokens, greedy. prompt: token ids."""
    values: dict[str, Any] = {"model": MODEL, "max_output_tokens": 20, "ignore_eos": True} | fields
    prompt = values.pop("prompt", None)
    if prompt is not None or not {"text", "conversation", "token_ids"} & values.keys():
        values["token_ids"] = pb.TokenIds(ids=list(prompt or PLAIN_IDS[:10]))
    values = {name: value for name, value in values.items() if value is not None}
    return pb.ClientFrame(request_id=request_id or str(uuid.uuid4()), start=pb.StartFrame(**values))


def cancel(request_id: str) -> pb.ClientFrame:
    """Return a cancel frame."""
    return pb.ClientFrame(request_id=request_id, cancel=pb.CancelFrame())


def credit(request_id: str, token_count: int) -> pb.ClientFrame:
    """Return a credit frame."""
    return pb.ClientFrame(request_id=request_id, credit=pb.CreditFrame(token_count=token_count))


def attach(request_id: str, after_seq: int = 0) -> pb.ClientFrame:
    """Return an attach frame."""
    return pb.ClientFrame(request_id=request_id, attach=pb.AttachFrame(after_seq=after_seq))


def conversation(*turns: str) -> pb.Conversation:
    """Return a conversation of user and assistant in turn, the user first."""
    roles = (pb.ROLE_USER, pb.ROLE_ASSISTANT)
    return pb.Conversation(
        messages=[pb.Message(role=roles[i % 2], content=text) for i, text in enumerate(turns)]
    )


def cost_picos(usage: types_pb2.Usage) -> int:
    """Return the cost of the usage at the tests' prices."""
    uncached = usage.input_token_count - usage.cached_input_token_count
    return (
        uncached * INPUT_PICOS
        + usage.cached_input_token_count * CACHED_PICOS
        + usage.billed_token_count * OUTPUT_PICOS
    )


def picos(money: types_pb2.Money) -> int:
    """Return an amount in picos."""
    return money.units * 10**12 + money.picos


def health_check(channel: Any) -> Any:
    """Return the health service's `Check` for a blocking or an asyncio channel."""
    return channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )


def bearer(secret: str | None) -> tuple[tuple[str, str], ...]:
    """Return call metadata with the key."""
    return () if secret is None else (("authorization", f"Bearer {secret}"),)


async def price_model(session: AsyncSession, model: str = MODEL) -> None:
    """Set the tests' prices in USD."""
    await set_price(
        session,
        PriceTerms(
            model=model,
            input_picos_per_token=INPUT_PICOS,
            cached_input_picos_per_token=CACHED_PICOS,
            output_picos_per_token=OUTPUT_PICOS,
        ),
        actor="test",
    )


def wait_for(
    condition: Callable[[], Value | None],
    what: str,
    patience_s: float = PATIENCE_S,
    poll_s: float = POLL_S,
) -> Value:
    """Poll until the condition is true; return its value. Blocks the event loop."""
    deadline = time.monotonic() + patience_s
    while (value := condition()) is None or value is False:
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(poll_s)
    return value


async def until(condition: Callable[[], object], what: str, poll_s: float = POLL_S) -> None:
    """Poll until the condition is true, without blocking the event loop."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # depends on another process
            await asyncio.sleep(poll_s)


async def all_taken(output: OutputBuffer) -> None:
    """Wait until a client has taken everything of an output."""
    taken = asyncio.Event()
    output.when_taken(taken.set, None)
    await taken.wait()


async def refused(call: Awaitable[object]) -> Refusal:
    """Return the error of a call, which must fail."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return Refusal.of(error)
    raise AssertionError(f"the call was not refused: {answer!r}")


def log_events(log: str, name: str) -> list[dict[str, Any]]:
    """Return the events of a name in a log of JSON lines; the last line may be half written."""
    whole, _, _ = log.rpartition("\n")
    lines = (json.loads(line) for line in whole.splitlines() if line.startswith("{"))
    return [line for line in lines if line.get("event") == name]


@contextlib.contextmanager
def running(service: Service, *, serving: bool = True) -> Iterator[Service]:
    """Run a service during the block; print its log if the block fails."""
    try:
        service.start(serving=serving)
        yield service
    except BaseException:
        sys.stdout.write(service.log[-6000:])
        raise
    finally:
        if service.process is not None and service.process.poll() is None:
            os.kill(service.pid, signal.SIGCONT)
            service.kill()


class SharedServices:
    """Services shared by the tests of a directory, stopped during other tests to save CPU."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._may_be_killed: dict[Service, bool] = {}
        self._stopped: list[Service] = []

    def add(self, service: Service, *, may_be_killed: bool = False) -> None:
        """Share a running service. may_be_killed: by a test; others must run until `stop`."""
        self._may_be_killed[service] = may_be_killed

    def resume(self) -> None:
        """Restart stopped services; called before each test."""
        while self._stopped:
            self._stopped.pop().start()

    def stop(self, following: pytest.Item | None = None) -> None:
        """Stop all services, the last one first, unless the next test is in the directory."""
        if following is not None and self._directory in following.path.parents:
            return
        for service, may_be_killed in reversed(self._may_be_killed.items()):
            killed = (
                may_be_killed and service.process is not None and service.process.poll() is not None
            )
            if service not in self._stopped and not killed:
                assert service.stop() == 0, service.log[-4000:]
                self._stopped.append(service)


class Inside:
    """Service in this process, with access to its parts."""

    def __init__(self, service: Service, server: api_main.Server) -> None:
        self.service = service
        self.fleet = server.fleet
        self.process = server.registry
        backends = self.process.router.backends()
        self.engine = next(each for each in backends if isinstance(each, ReplicaSet))

    @property
    def capacity(self) -> Capacity:
        """Permits of the process."""
        return self.process.admission.capacity

    def queue_statistics(self) -> list[QueueStatistics]:
        """Return the statistics of each engine's queue."""
        return [queue.statistics() for queue in self.process.queues.values()]

    def left_over(self) -> dict[str, int]:
        """Return non-zero counts of resources that ended requests must have released, by name."""
        statistics = self.engine.statistics()
        counts = {
            "permits": self.capacity.taken_count,
            "places": sum(
                queue.waiting_count + queue.engine_pending_count
                for queue in self.queue_statistics()
            ),
            "live requests": len(self.process.running()),
            "prepared characters": self.process.text_work.taken_chars,
            "executor work": (
                self.process.text_work.waiting_count + self.process.text_work.running_count
            ),
            "live holds": self.process.admission.holds.statistics().live_hold_count,
            "sequences": statistics.running_sequence_count + statistics.waiting_sequence_count,
            "KV blocks": statistics.kv_block_count_held,
            "request tasks": sum(
                task.get_name().startswith("request ") for task in asyncio.all_tasks()
            ),
            "held holds": self.service.database.held_hold_count(),
        }
        return {name: count for name, count in counts.items() if count}

    async def check_empty(self) -> None:
        """Wait until no request runs and all resources are released."""
        async with asyncio.timeout(PATIENCE_S):
            await self.capacity.idle()
        await until(lambda: not self.left_over(), "resources to be released")


@contextlib.asynccontextmanager
async def run_inside(service: Service, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Inside]:
    """Run the service's `Server` as a task of this event loop; drain it at the end of the block."""
    server = api_main.Server(service.settings)
    monkeypatch.setattr(api_main, "stop_signals", lambda _: contextlib.nullcontext())
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.run())
        await until(lambda: read_endpoint(service.home).address, "the server to listen")
        service.address = read_endpoint(service.home).address
        inside = Inside(service, server)
        await inside.engine.start()
        try:
            yield inside
        finally:
            server.stopping.set()
            await serving


def kernels_of_this_machine() -> str:
    """Return the level of native code that the service's engine uses for float32, or `torch`."""
    if (library := loader.load()) is None:
        return "torch"
    return next(iter(loader.available_levels(library, is_bfloat16=False)))
