"""Whole service with client certificates and few allowed failures, through SDK and command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc
from weir_client import AsyncClient, Unavailable

from api.core.endpoint import NOT_STARTED, read_endpoint
from metering.tenants.api_keys import update_api_key
from tests.certificates import Certificate, new_certificate
from tests.conftest import new_database
from tests.service import MODEL, PATIENCE_S, Refusal, Service, bearer, refused, running, wait_for

FAILURES_MAX = 5  # per minute and address
KEY_CHECK_S = 0.05


@dataclass(frozen=True)
class Locked:
    """Service that requires client certificates of its authority."""

    service: Service
    authority: Certificate
    ca: Path
    client_certificate: Path
    client_key: Path


@pytest.fixture(scope="module")
def locked(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    postgres_server: str,
    template_database: str,
) -> Iterator[Locked]:
    with served_by_tls(
        tmp_path_factory.mktemp("locked"), model, postgres_server, template_database
    ) as locked:
        yield locked


@pytest.fixture
def throttling(
    tmp_path: Path, model: Path, postgres_server: str, template_database: str
) -> Iterator[Locked]:
    """Yield a separate service, since wrong keys block new keys of an address for some time."""
    few = {"auth_failures_per_minute": FAILURES_MAX}
    with served_by_tls(tmp_path, model, postgres_server, template_database, **few) as locked:
        yield locked


@contextlib.contextmanager
def served_by_tls(
    home: Path, model: Path, postgres_server: str, template_database: str, **bounds: Any
) -> Iterator[Locked]:
    """Yield a service that requires client certificates; it must end cleanly."""
    authority = new_certificate("authority", authority=True)
    ca, _ = authority.write(home, "authority")
    certificate, key = new_certificate("server", authority).write(home, "server")
    client = new_certificate("client", authority)
    files = {"tls_certificate": str(certificate), "tls_key": str(key), "tls_client_ca": str(ca)}
    with new_database(postgres_server, template=template_database) as url:
        service = Service(home, url, model, **files, stream_key_check_s=KEY_CHECK_S, **bounds)
        service.credentials = grpc.ssl_channel_credentials(
            authority.pem, client.key_pem, client.pem
        )
        with running(service):
            yield Locked(service, authority, ca, *client.write(home, "client"))
            assert service.stop() == 0, service.log[-4000:]


async def test_the_sdk_shows_its_certificate_and_is_served(locked: Locked) -> None:
    tenant = await locked.service.tenant()
    address = f"https://{locked.service.address}"
    shown = {
        "client_certificate": locked.client_certificate,
        "client_key": locked.client_key.read_bytes(),
    }

    async with AsyncClient(address, tenant.secret, root_certificates=locked.ca, **shown) as client:  # type: ignore[arg-type]
        answer = await client.generate(
            MODEL, token_ids=[9, 10, 11], max_output_tokens=5, ignore_eos=True
        ).wait()
    assert answer.usage.billed_token_count == 5
    async with AsyncClient(
        address, tenant.secret, root_certificates=locked.ca, max_retries=0
    ) as client:
        with pytest.raises(Unavailable):
            await client.list_models()
    async with AsyncClient(
        f"http://{locked.service.address}", tenant.secret, max_retries=0
    ) as client:
        with pytest.raises(Unavailable):
            await client.list_models()


async def test_errors_of_the_command_line_name_flags(locked: Locked) -> None:
    tenant = await locked.service.tenant()
    trusting = ("--ca", str(locked.ca))
    showing = (
        "--client-certificate",
        str(locked.client_certificate),
        "--client-key",
        str(locked.client_key),
    )
    requested = ("models", "--address", locked.service.address, "--api-key", tenant.secret)

    served = await weir(*trusting, *showing, *requested)
    hidden = await weir(*trusting, *requested)
    halved = await weir(*trusting, *showing[:2], *requested)

    assert (served.returncode, MODEL in served.stdout) == (0, True), served.stderr
    assert hidden.returncode == halved.returncode == 1
    assert "WEIR_CLIENT_KEY" in halved.stderr


def test_other_listeners_of_this_machine_get_the_advice_to_use_tls(locked: Locked) -> None:
    home, address = locked.service.home, f"https://{locked.service.address}"

    wait_for(lambda: read_endpoint(home).serving or None, "the file to say so")
    assert read_endpoint(home).address == address


async def test_a_server_for_others_does_not_start_in_the_clear(locked: Locked) -> None:
    environment = {"WEIR_DATABASE_URL": locked.service.database_url}

    refused = await weir(
        "serve",
        "--listen",
        "0.0.0.0:0",
        "--home",
        str(locked.service.home / "other"),
        **environment,
    )

    assert refused.returncode == NOT_STARTED
    assert "WEIR_TLS_CERTIFICATE" in refused.stderr
    assert "Traceback" not in refused.stderr


async def test_open_streams_check_the_rights_of_their_key_again(locked: Locked) -> None:
    service, tenant = locked.service, await locked.service.tenant()
    async with service.stream(tenant.secret) as stream:
        await stream.finished(await stream.begin())

        async def change(**fields: Any) -> None:
            async with service.session() as session:
                await update_api_key(
                    session,
                    api_key=tenant.key.prefix,
                    terms=lambda old: replace(old, **fields),
                    actor="test",
                )

        async def ending(ends: Callable[[pb.ServerFrame], bool]) -> pb.ServerFrame:
            """Return the end of the first request that ends in this way."""
            async with asyncio.timeout(PATIENCE_S):
                while not ends(frame := await stream.end(await stream.begin(max_output_tokens=1))):
                    pass
            return frame

        await change(models=("another",))
        limited = Refusal((await ending(lambda frame: frame.HasField("failed"))).failed.status)
        await change(models=())
        await ending(lambda frame: frame.HasField("finished"))
        await change(scopes=("billing",))
        narrowed = Refusal((await ending(lambda frame: frame.HasField("failed"))).failed.status)
        await change(scopes=("inference",))
        await ending(lambda frame: frame.HasField("finished"))

    assert (limited.code, limited.reason) == (StatusCode.PERMISSION_DENIED, "MODEL_NOT_ALLOWED")
    assert (narrowed.code, narrowed.reason) == (StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")


async def test_wrong_keys_are_throttled_and_a_good_one_passes(throttling: Locked) -> None:
    service, tenant = throttling.service, await throttling.service.tenant()
    async with service.channel() as channel:
        stub = pb_grpc.InferenceServiceStub(channel)

        def ask(secret: str) -> Awaitable[object]:
            return stub.ListModels(pb.ListModelsRequest(), metadata=bearer(secret))

        await ask(tenant.secret)
        wrong = [f"{tenant.key.prefix}_{number:043d}" for number in range(10 * FAILURES_MAX)]
        refusals = [await refused(ask(secret)) for secret in wrong]
        async with asyncio.timeout(PATIENCE_S):
            while await how_a_stream_ends(service, wrong[0]) is not StatusCode.RESOURCE_EXHAUSTED:
                pass  # one failure may have expired meanwhile
        await ask(tenant.secret)

    assert [refusal.code for refusal in refusals[:FAILURES_MAX]] == [
        StatusCode.UNAUTHENTICATED
    ] * FAILURES_MAX
    throttled = [refusal for refusal in refusals if refusal.code is StatusCode.RESOURCE_EXHAUSTED]
    assert throttled, "or the fifty took half a minute, in which one drains each twelve seconds"
    assert {refusal.reason for refusal in throttled} == {"AUTHENTICATION_THROTTLED"}
    assert all(0 < (refusal.retry_after_s or 0) <= 60 / FAILURES_MAX for refusal in throttled)


async def how_a_stream_ends(service: Service, secret: str) -> StatusCode:
    """Return the status of a stream."""
    async with service.stream(secret) as stream:
        return await stream.closed()


async def weir(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a separate process."""
    command = [sys.executable, "-m", "weir_cli", *arguments]

    def run() -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, **environment}
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    return await asyncio.to_thread(run)
