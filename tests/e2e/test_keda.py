"""KEDA's external scaler, asked by a client of the published protocol."""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.core.settings import Settings, bundled_models
from api.keda import externalscaler_pb2 as keda
from api.keda.external_scaler import ExternalScaler
from api.keda.externalscaler_pb2_grpc import ExternalScalerStub
from api.server import build_keda_server
from common.settings import SettingInvalid
from metering.control.live import ModelLoad, model_load
from metering.store.db import create_engine, create_sessions
from tests.conftest import ask, new_database
from tests.remote_servers.certificates import Certificates, make_certificates
from tests.service import MODEL, PLAIN_IDS, Service, running, until

PROCESS_COUNT = 2
PER_PROCESS = 6
INPUT_TOKENS = 10
METRICS = ["waitingRequests", "waitingTokens", "runningRequests", "firstTokenWaitMs"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def services(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    certificates: Certificates,
    postgres_server: str,
    template_database: str,
) -> Iterator[list[Service]]:
    """Yield processes with a model at zero, whose server waits for the file `go`."""
    directory = tmp_path_factory.mktemp("keda")
    (directory / "journal").mkdir()
    server = [sys.executable, "-m", "tests.remote_servers", str(model)]
    wait = f'while [ ! -e "{directory}/go" ]; do sleep 0.05; done; exec "$@"'
    launcher = {
        "kind": "process",
        "command": [
            *("sh", "-c", wait, "sh"),
            *(*server, str(certificates.directory), "{port}", "{second_port}"),
        ],
        "address": "trtllm://127.0.0.1:{port}",
        "state_directory": str(directory / "launched"),
    }
    version = {
        "engine": "remote",
        "directory": str(model),
        "replicas": {"min": 0, "max": 1},
        "idle_timeout_s": 1,
        "launcher": launcher,
    }
    fleet = directory / "fleet.yaml"
    fleet.write_text(json.dumps({"models": {MODEL: version}}))
    with new_database(postgres_server, template=template_database) as url, ExitStack() as stack:
        found = []
        for index in range(PROCESS_COUNT):
            home = directory / f"home{index}"
            home.mkdir()
            (home / "journal").symlink_to(directory / "journal")
            service = Service(
                home,
                url,
                model,
                models=bundled_models(),
                fleet=str(fleet),
                keda_listen="127.0.0.1:0",
            )
            found.append(stack.enter_context(running(service, serving=False)))
        yield found
        for service in found:
            assert service.stop() == 0, service.log[-4000:]


@asynccontextmanager
async def client(service: Service) -> AsyncIterator[Any]:
    """Yield a client of KEDA's service, without any key."""
    port = re.findall(r"keda_port\D+(\d+)", service.log)[-1]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield ExternalScalerStub(channel)


def scaled(**metadata: str) -> keda.ScaledObjectRef:
    return keda.ScaledObjectRef(
        name="chat",
        namespace="models",
        scalerMetadata={"model": MODEL, "scalerAddress": "weir:9095"} | metadata,
    )


async def values(scaler: Any) -> dict[str, float]:
    found = {}
    for name in METRICS:
        request = keda.GetMetricsRequest(scaledObjectRef=scaled(), metricName=name)
        [value] = (await scaler.GetMetrics(request)).metricValues
        assert value.metricName == name
        assert value.metricValue - 1 < value.metricValueFloat <= value.metricValue
        found[name] = value.metricValueFloat
    return found


async def test_any_process_answers_for_all_of_them(services: list[Service]) -> None:
    one, other = services
    tenant = await one.tenant()
    async with client(other) as scaler, one.stream(tenant.secret) as first:
        assert not (await scaler.IsActive(scaled())).result
        assert set((await values(scaler)).values()) == {0.0}
        activity = aiter(scaler.StreamIsActive(scaled()))
        assert not (await anext(activity)).result

        async with other.stream(tenant.secret) as second:
            requests = [
                (stream, await stream.begin(prompt=list(PLAIN_IDS[:INPUT_TOKENS])))
                for stream in (first, second)
                for _ in range(PER_PROCESS)
            ]
            count = PROCESS_COUNT * PER_PROCESS
            await until(lambda: one.database.held_hold_count() == count, "all to be admitted")
            assert (await anext(activity)).result
            found = await values(scaler)
            assert found["firstTokenWaitMs"] > 0
            assert (found["waitingRequests"], found["waitingTokens"]) == (
                count,
                count * INPUT_TOKENS,
            )
            assert found["runningRequests"] == 0

            (one.home.parent / "go").touch()
            for stream, request_id in requests:
                await stream.finished(request_id)
        assert not (await anext(activity)).result
        await one.no_hold_left(tenant)


async def test_targets_come_from_the_metadata(services: list[Service]) -> None:
    async with client(services[0]) as scaler:
        usual = (await scaler.GetMetricSpec(scaled())).metricSpecs
        reference = scaled(waitingTokens="2000", runningRequestsFromEnv="7.5")
        chosen = await scaler.GetMetricSpec(reference)
        streamed = await anext(aiter(scaler.StreamMetricSpec(reference)))

    assert [(each.metricName, each.targetSizeFloat) for each in usual] == [("waitingRequests", 1.0)]
    assert {each.metricName: each.targetSizeFloat for each in chosen.metricSpecs} == {
        "waitingTokens": 2000.0,
        "runningRequests": 7.5,
    }
    assert streamed == chosen


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"model": ""}, "`model` is missing"),
        ({"model": "nobody"}, "There is no model 'nobody'"),
        ({"queueDepth": "3"}, "unknown key 'queueDepth' in the metadata: known are model"),
        ({"waitingTokens": "many"}, "must be a number above 0, got 'many'"),
        ({"waitingTokens": "-1"}, "must be a number above 0"),
        ({"waitingTokens": "inf"}, "must be a number above 0"),
    ],
)
async def test_wrong_metadata_is_refused_by_name(
    services: list[Service], metadata: dict[str, str], message: str
) -> None:
    async with client(services[0]) as scaler:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await scaler.IsActive(scaled(**metadata))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (refused.value.details() or "")


PHASES = ["preparing", "queued", "loading", "prefill", "decode", "ending"]
WAITING = PHASES[:3]
requests_ = st.lists(
    st.fixed_dictionaries(
        {
            "model": st.sampled_from(["chat", "chat2", ""]),
            "phase": st.sampled_from(PHASES),
            "waiting_token_count": st.integers(0, 10**6),
            "age_s": st.floats(0, 10**4),
        }
    ),
    max_size=8,
)


@given(st.lists(requests_, max_size=3))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_the_metrics_equal_what_the_processes_report(
    module_database: str, reports: list[list[dict[str, Any]]]
) -> None:
    ask(module_database, "DELETE FROM live_reports")
    for report in reports:
        ask(
            module_database,
            """INSERT INTO live_reports (process_id, process_name, reported_at, requests)
               VALUES (%s, 'host:1', clock_timestamp() + interval '1 hour', %s::jsonb)""",
            uuid.uuid4(),
            json.dumps(report),
        )
    engine = create_engine(module_database, pool_size=1)

    found = await model_load(create_sessions(engine), "chat")

    await engine.dispose()
    of_model = [each for report in reports for each in report if each["model"] == "chat"]
    waiting = [each for each in of_model if each["phase"] in WAITING]
    first = [each["age_s"] for each in of_model if each["phase"] in [*WAITING, "prefill"]]
    assert found.first_token_wait_ms == pytest.approx(max(first, default=0.0) * 1000)
    assert replace(found, first_token_wait_ms=0.0) == ModelLoad(
        len(waiting),
        sum(each["waiting_token_count"] for each in of_model),
        sum(each["phase"] in ("prefill", "decode") for each in of_model),
        is_starting=any(each["phase"] == "loading" for each in of_model),
    )


async def test_a_client_certificate_can_be_required(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = certificates.directory
    tls = {
        "tls_certificate": str(folder / "server.pem"),
        "tls_key": str(folder / "server.key"),
        "keda_client_ca": str(folder / "authority.pem"),
        "keda_listen": "127.0.0.1:0",
    }
    servicer = cast(ExternalScaler, Answering())
    built = build_keda_server(Settings.of(**tls), servicer)
    assert built is not None
    server, port = built
    await server.start()

    async def is_active(name: str) -> bool:
        files = certificates.client(name)
        assert files.key is not None
        assert files.certificate is not None
        credentials = grpc.ssl_channel_credentials(
            files.authority.read_bytes(),
            files.key.read_bytes(),
            files.certificate.read_bytes(),
        )
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            scaler: Any = ExternalScalerStub(channel)
            return bool((await scaler.IsActive(scaled(), timeout=20)).result)

    assert await is_active("client")
    with pytest.raises(grpc.aio.AioRpcError):
        await is_active("stranger")
    await server.stop(grace=None)

    with pytest.raises(SettingInvalid, match=r"WEIR_KEDA_CLIENT_CA.*needs TLS"):
        build_keda_server(Settings.of(keda_listen="127.0.0.1:0", keda_client_ca="ca.pem"), servicer)


class Answering:
    """Servicer that is always active."""

    async def IsActive(self, request: Any, context: Any) -> keda.IsActiveResponse:
        return keda.IsActiveResponse(result=True)

    GetMetricSpec = GetMetrics = StreamIsActive = StreamMetricSpec = IsActive
