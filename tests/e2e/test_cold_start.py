"""Models loaded on demand: two of them, with memory for one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from inference.routing.memory import torch_memory_bytes
from tests.conftest import new_database
from tests.forked_workers import children_of
from tests.metering.invariants import check_invariants
from tests.service import (
    MODEL,
    POLL_S,
    Service,
    Stream,
    Tenant,
    cost_picos,
    picos,
    price_model,
    running,
    until,
)

OTHER = "other"
KV_BYTES = 64 << 20
LOADING = pb.ProgressFrame.STAGE_ENGINE_LOADING


def on_demand(home: Path, url: str, models: dict[str, Path]) -> Service:
    """Return settings of two models loaded on demand, with memory for one."""
    needed_bytes = torch_memory_bytes(models[MODEL], "float32", KV_BYTES)
    return Service(
        home,
        url,
        models[MODEL],
        models=models,
        kv_cache_bytes=KV_BYTES,
        min_replicas=0,
        model_idle_timeout_s=1.0,
        engine_memory_bytes=needed_bytes * 3 // 2,
        progress_interval_s=0.05,
    )


@contextlib.contextmanager
def serving(
    directory: Path, model: Path, postgres_server: str, template_database: str
) -> Iterator[Service]:
    """Yield a server without an engine, which must still end cleanly."""
    other = directory / "models" / OTHER
    shutil.copytree(model, other)
    with new_database(postgres_server, template=template_database) as url:
        with running(on_demand(directory / "cold", url, {MODEL: model, OTHER: other})) as service:
            assert not children_of(service.pid), "nothing is loaded ahead"
            yield service
            assert service.stop() == 0, service.log[-4000:]
        check_invariants(url, all_ended=True)


@pytest.fixture(scope="module")
def cold(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    postgres_server: str,
    template_database: str,
) -> Iterator[Service]:
    """Yield a server for several tests."""
    with serving(
        tmp_path_factory.mktemp("all"), model, postgres_server, template_database
    ) as service:
        yield service


@pytest.fixture
def broken(
    tmp_path: Path, model: Path, postgres_server: str, template_database: str
) -> Iterator[Service]:
    """Yield a server for one test, whose fault lasts for some time."""
    with serving(tmp_path, model, postgres_server, template_database) as service:
        yield service


async def new_tenant(service: Service) -> Tenant:
    """Return a tenant that may use both models."""
    tenant = await service.tenant()
    async with service.session() as session:
        if OTHER not in {
            row["model"] for row in service.database.rows("SELECT model FROM price_versions")
        }:
            await price_model(session, OTHER)
    return tenant


async def engines_gone(service: Service) -> None:
    await until(lambda: not children_of(service.pid), "the engine worker to go")


async def check_finished(
    service: Service, tenant: Tenant, stream: Stream, request_id: str
) -> pb.FinishedFrame:
    """Check that the request ran to its end and is billed exactly."""
    finished = await stream.finished(request_id)
    assert finished.usage.delivered_token_count == len(stream.token_ids(request_id)) == 20
    assert picos(finished.cost) == cost_picos(finished.usage)
    assert service.database.event(tenant, request_id)["delivered_token_count"] == 20
    return finished


@contextlib.asynccontextmanager
async def load_paused(directory: Path) -> AsyncIterator[None]:
    """Pause the next load of a checkpoint within the block, where it opens its configuration."""
    config, aside = directory / "config.json", directory / "aside"
    os.rename(config, aside)
    os.mkfifo(config)
    try:
        yield
        opened: list[int] = []

        def open_for_reader() -> bool:
            with contextlib.suppress(OSError):  # ENXIO until the worker has it open
                opened.append(os.open(config, os.O_WRONLY | os.O_NONBLOCK))
            return bool(opened)

        await until(open_for_reader, "the worker to open the configuration")
    finally:
        os.replace(aside, config)
    with os.fdopen(opened[0], "wb") as pipe:
        pipe.write(config.read_bytes())


async def test_from_nothing_to_tokens_to_nothing_and_again(cold: Service) -> None:
    assert cold.serving(), "a model that is cold by design is no reason to take the server out"
    assert cold.serving(f"engine/{MODEL}")
    await engines_gone(cold)  # of earlier tests
    tenant = await new_tenant(cold)
    async with cold.stream(tenant.secret) as stream:

        def loading_of(request_id: str) -> list[pb.ProgressFrame]:
            return [frame for frame in stream.of(request_id, "progress") if frame.stage == LOADING]

        async with load_paused(Path(cold.settings.models.directories[OTHER])):
            request_ids = [await stream.begin(model=OTHER) for _ in range(20)]
            await stream.wait(
                lambda: all(len(loading_of(request_id)) > 1 for request_id in request_ids),
                "one frame at once, more while the load goes on",
            )

        for request_id in request_ids:
            finished = await check_finished(cold, tenant, stream, request_id)
            loading = loading_of(request_id)
            fractions = [frame.loading_fraction for frame in loading]
            assert fractions == sorted(fractions)
            assert {each.loading_stage for each in loading} <= {"", "process", "import", "weights"}
            waited_ms = finished.timings.ttft_ms - finished.timings.cold_start_ms
            assert 0 < waited_ms < finished.timings.ttft_ms

        await engines_gone(cold)
        assert cold.serving()
        again = await stream.begin(model=OTHER)
        await check_finished(cold, tenant, stream, again)
        first = await stream.first(again, "progress")
        assert first.stage == LOADING
        assert first.HasField("estimated_wait"), "now it is known how long that takes"


async def test_a_cancel_while_a_model_loads_is_immediate_and_free(cold: Service) -> None:
    """It counts as a request, since it had a hold; the model goes on loading for the next one."""
    await engines_gone(cold)  # of earlier tests
    tenant = await new_tenant(cold)
    async with cold.stream(tenant.secret) as stream:
        async with load_paused(Path(cold.settings.models.directories[OTHER])):
            cancelled = await stream.begin(model=OTHER)
            assert (await stream.first(cancelled, "progress")).stage == LOADING
            following = await stream.begin(model=OTHER)
            await stream.first(following, "progress")
            await stream.cancel(cancelled)
            finished = await stream.finished(cancelled)
        await check_finished(cold, tenant, stream, following)

    event = cold.database.event(tenant, cancelled)
    assert finished.reason == types_pb2.FINISH_REASON_CANCELLED
    assert (finished.usage, picos(finished.cost)) == (types_pb2.Usage(), 0)
    assert (event["outcome"], event["input_token_count"]) == ("cancelled", 0)


async def test_two_models_alternate_where_there_is_memory_for_one(cold: Service) -> None:
    tenant = await new_tenant(cold)
    async with cold.stream(tenant.secret) as stream:
        for models in ((MODEL, OTHER), (MODEL,)):
            request_ids = [await stream.begin(model=model) for model in models]
            most = 0

            def both_ended(ids: tuple[str, ...] = tuple(request_ids)) -> bool:
                nonlocal most
                most = max(most, len(children_of(cold.pid)))
                return all(stream.ends(request_id) for request_id in ids)

            await until(both_ended, "both models to answer")
            assert most == 1
            for request_id in request_ids:
                await check_finished(cold, tenant, stream, request_id)
            if len(models) > 1:
                stages = {
                    frame.loading_stage
                    for request_id in request_ids
                    for frame in stream.of(request_id, "progress")
                }
                assert "memory" in stages


async def test_a_worker_killed_while_loading_is_reported_and_replaced(cold: Service) -> None:
    tenant = await new_tenant(cold)
    await engines_gone(cold)
    weights = Path(cold.settings.models.directories[OTHER]) / "model.safetensors"
    aside = weights.with_name("aside")
    os.rename(weights, aside)
    os.mkfifo(weights)  # opening it blocks, so that loading does not end before the kill
    async with cold.stream(tenant.secret) as stream:
        request_ids = [await stream.begin(model=OTHER) for _ in range(20)]
        for request_id in request_ids:
            await stream.first(request_id, "progress")
        [worker_pid] = await cold_workers(cold)
        os.kill(worker_pid, signal.SIGSTOP)
        os.replace(aside, weights)

        os.kill(worker_pid, signal.SIGKILL)

        for request_id in request_ids:
            refusal = await stream.failed(request_id)
            assert (refusal.code, refusal.reason) == (StatusCode.UNAVAILABLE, "ENGINE_START_FAILED")
            assert "was killed" in refusal.status.message
            assert refusal.retry_after_s is not None
        assert cold.database.holds(tenant) == {"voided": 20}
        await check_finished(cold, tenant, stream, await stream.begin(model=OTHER))


async def cold_workers(service: Service) -> list[int]:
    """Wait for the engine workers and return them."""
    await until(lambda: children_of(service.pid), "an engine worker")
    return children_of(service.pid)


async def test_a_missing_checkpoint_is_reported_to_all_waiting_callers(broken: Service) -> None:
    tenant = await new_tenant(broken)
    await engines_gone(broken)
    directory = Path(broken.settings.models.directories[OTHER])
    os.rename(directory, directory.with_name("away"))
    async with broken.stream(tenant.secret) as stream:
        request_ids = [await stream.begin(model=OTHER) for _ in range(20)]

        for request_id in request_ids:
            refusal = await stream.failed(request_id)
            assert (refusal.code, refusal.reason) == (StatusCode.UNAVAILABLE, "ENGINE_START_FAILED")
            assert str(directory) in refusal.status.message
            assert refusal.retry_after_s is not None
        assert broken.database.holds(tenant) == {"voided": 20}
        await until(lambda: not broken.serving(f"engine/{OTHER}"), "health to tell")
        assert broken.serving(), "the other model is served"
        await check_finished(broken, tenant, stream, await stream.begin())


async def test_replicas_follow_the_load_and_a_drain_during_loading_serves_waiting_requests(
    tmp_path: Path, model: Path, postgres_server: str, template_database: str
) -> None:
    settings: dict[str, Any] = {
        "min_replicas": 0,
        "max_replicas": 2,
        "model_idle_timeout_s": 1.0,
        "progress_interval_s": 0.05,
    }
    with (
        new_database(postgres_server, template=template_database) as url,
        running(Service(tmp_path, url, model, **settings)) as service,
    ):
        tenant = await service.tenant()
        async with service.stream(tenant.secret) as stream:
            request_ids: list[str] = []
            # All slots of the first model are taken, and more requests wait.
            while len(children_of(service.pid)) < 2:
                if len(request_ids) - sum(bool(stream.ends(each)) for each in request_ids) < 90:
                    request_ids += [await stream.begin(max_output_tokens=400) for _ in range(30)]
                await asyncio.sleep(POLL_S)
            await stream.cancel(*request_ids)
            for request_id in request_ids:
                await stream.end(request_id)
            await engines_gone(service)

            request_id = await stream.begin()
            await stream.first(request_id, "progress")
            service.terminate()
            await check_finished(service, tenant, stream, request_id)
        assert service.wait_ended() == 0
        check_invariants(url, all_ended=True)
