"""Server of all services in a process, with faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import msgspec
from smg_grpc_proto.generated import (
    sglang_scheduler_pb2_grpc,
    trtllm_service_pb2_grpc,
    vllm_engine_pb2_grpc,
)

from inference.adapters.remote_settings import Service, Target
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.encoder.engine import EncoderSettings, TorchEncoder
from tests.remote_servers.backend import Backend
from tests.remote_servers.certificates import Certificates
from tests.remote_servers.openai import OpenAiServer
from tests.remote_servers.sglang import SglangServicer
from tests.remote_servers.trtllm import TrtllmServicer
from tests.remote_servers.vllm import VllmServicer

CONTROL = "/weir.test.Control/Do"
PATIENCE_S = 60.0


@dataclass(frozen=True)
class ServerProcess:
    """Server process. address: without TLS; tls_address: with client certificates; both for gRPC.
    http_address, https_address: the same for HTTP.
    """

    address: str
    tls_address: str
    http_address: str
    https_address: str
    certificates: Certificates
    process: subprocess.Popen[str]

    def target(self, service: Service) -> Target:
        """Return the target address of a service."""
        if service.is_http:
            return Target(service, self.http_address, "tiny")
        return Target(service, self.address)

    def tls_target(self, service: Service) -> Target:
        """Return the target address of a service with TLS."""
        if service.is_http:
            return Target(Service.OPENAI_HTTPS, self.https_address, "tiny")
        return Target(service, self.tls_address)

    def go_wrong(self, *faults: str) -> None:
        """Replace the injected faults; calls held by an earlier fault continue."""
        self._do({"faults": faults})

    def cache(self, *, clear: bool = False, remove: tuple[int, ...] = ()) -> None:
        """Tell subscribers that the cache was flushed, or that a prompt's blocks were evicted."""
        self._do({"clear": clear, "remove": remove})

    def require_key(self, value: str, header: str = "authorization") -> None:
        """Refuse requests without this header; an empty value accepts all again."""
        self._do({"key": [header, value] if value else None})

    def state(self) -> dict[str, Any]:
        """Return the statistics of its engine and its recorded requests."""
        return self._do({})

    @property
    def idle(self) -> bool:
        """Return whether nothing runs and no block is held."""
        state = self.state()
        return not (
            state["kv_block_count_held"]
            or state["running_sequence_count"]
            or state["waiting_sequence_count"]
        )

    def _do(self, order: dict[str, Any]) -> dict[str, Any]:
        with grpc.insecure_channel(self.address) as channel:
            call: Any = channel.unary_unary(CONTROL)  # bytes without conversion
            return cast(
                dict[str, Any],
                json.loads(
                    call(json.dumps(order).encode(), timeout=PATIENCE_S, wait_for_ready=True)
                ),
            )


@contextlib.contextmanager
def server_process(
    directory: Path, certificates: Certificates, *, port: int = 0, http_port: int = 0
) -> Iterator[ServerProcess]:
    """Start a server process, wait until it serves, and kill it at the end of the block.

    port, http_port: of a previous process, which outgoing connections may have used since; 0 for
    any.
    """
    command = [
        sys.executable,
        "-m",
        "tests.remote_servers",
        str(directory),
        str(certificates.directory),
        str(port),
        str(http_port),
    ]
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline().split()
                if line[:1] == ["serving"]:
                    yield ServerProcess(line[1], line[2], line[3], line[4], certificates, process)
                    return
            finally:
                process.kill()
        assert port or http_port, f"the server did not start: {line}"
        assert time.monotonic() < give_up_at, f"nobody lets go of port {port}"


@contextlib.contextmanager
def hostile_process(module: str, *options: str) -> Iterator[str]:
    """Run a hostile server; yield its address."""
    command = [sys.executable, "-m", module, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            word, port = process.stdout.readline().split()
            assert word == "serving"
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


async def serve(
    directory: str, certificates: str, port: str, http_port: str, host: str = "127.0.0.1"
) -> None:
    """Serve until killed."""
    # A port in use must not be shared with another process.
    keys = KeyCheck()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)], interceptors=[keys])
    engine: TorchEngine | TorchEncoder
    if os.path.exists(os.path.join(directory, "modules.json")):  # noqa: ASYNC240 - nothing is served yet
        engine = TorchEncoder(EncoderSettings(Path(directory), "remote", torch_thread_count=1))
    else:
        engine = TorchEngine(
            TorchEngineSettings(
                Path(directory), "remote", kv_cache_bytes=8 << 20, torch_thread_count=1
            )
        )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        await engine.start()
        backend = keys.backend = Backend(engine, Path(directory))
        cast(Any, trtllm_service_pb2_grpc).add_TrtllmServiceServicer_to_server(
            TrtllmServicer(backend), server
        )
        cast(Any, vllm_engine_pb2_grpc).add_VllmEngineServicer_to_server(
            VllmServicer(backend), server
        )
        cast(Any, sglang_scheduler_pb2_grpc).add_SglangSchedulerServicer_to_server(
            SglangServicer(backend), server
        )
        server.add_generic_rpc_handlers((Control(control(backend)),))
        plain = server.add_insecure_port(f"{host}:{port}")
        secure = server.add_secure_port(
            "127.0.0.1:0", Certificates(Path(certificates)).server_credentials()
        )
        http = await OpenAiServer(backend).start(
            int(http_port), Certificates(Path(certificates)).server_context()
        )
        await server.start()
        print("serving", f"{host}:{plain}", f"127.0.0.1:{secure}", *http, flush=True)
        await asyncio.Event().wait()


class KeyCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without the key that the backend requires."""

    backend: Backend

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        fault = self.backend.key_fault(dict(details.invocation_metadata))
        handler = await continuation(details)
        if not fault or details.method == CONTROL or handler is None:
            return handler

        async def refuse(request: Any, context: Any) -> Any:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, fault)

        async def refuse_all(request: Any, context: Any) -> AsyncIterator[Any]:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, fault)
            yield None

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                refuse_all, handler.request_deserializer, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            refuse, handler.request_deserializer, handler.response_serializer
        )


Handler = Callable[[bytes, Any], Awaitable[bytes]]


class Control(grpc.GenericRpcHandler):
    """Control call, which the services do not have."""

    def __init__(self, handler: Handler) -> None:
        self._handler: Any = grpc.unary_unary_rpc_method_handler(cast(Any, handler))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handler if handler_call_details.method == CONTROL else None


def control(backend: Backend) -> Handler:
    """Return the handler of control calls."""

    async def do(order: bytes, context: Any) -> bytes:
        requested = json.loads(order)
        if "faults" in requested:
            backend.go_wrong(requested["faults"])
        if "key" in requested:
            backend.key = None if requested["key"] is None else tuple(requested["key"])
        if requested.get("clear"):
            backend.publish_cleared()
        if requested.get("remove"):
            backend.publish_removed(tuple(requested["remove"]))
        reported = msgspec.structs.asdict(backend.engine.statistics())
        reported |= {
            "aborted": backend.aborted,
            "seen": backend.seen_count,
            "bodies": backend.bodies[-3:],
            "subscribers": backend.subscriber_count,
        }
        return json.dumps(reported).encode()

    return do
