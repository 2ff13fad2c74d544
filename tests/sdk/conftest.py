"""Fixtures of the clients' tests: no remaining tasks, no settings of the machine.

Tests of both clients and their documentation share the servers; each test has its own tenants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from infra import typescript_sdk
from metering.pricing.prices import PriceTerms, set_price
from tests.conftest import new_database
from tests.inference.encoder_checkpoints import make_random_encoder
from tests.inference.tool_checkpoints import make_tool_checkpoint
from tests.node import node_of
from tests.service import MODEL, Service, SharedServices, make_model, price_model, running, wait_for

ENCODER = "encoder"
TOOL_MODEL = "tooled"
EMBEDDING_PICOS = 20_000
TIGHT_KEEP_S = 20.0
SHARED = SharedServices(Path(__file__).parent)


def pytest_runtest_setup() -> None:
    SHARED.resume()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    SHARED.stop(nextitem)


@pytest.fixture(scope="session")
def service(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: str, template_database: str
) -> Iterator[Service]:
    """Yield a server with a model and an encoder."""
    model = make_model(tmp_path_factory.mktemp("model"))
    with new_database(postgres_server, template=template_database) as url:
        encoders = {ENCODER: make_random_encoder(tmp_path_factory.mktemp("encoder"))}
        models = {MODEL: model, TOOL_MODEL: make_tool_checkpoint(tmp_path_factory.mktemp("tooled"))}
        with running(
            Service(tmp_path_factory.mktemp("home"), url, model, models=models, encoders=encoders)
        ) as service:
            wait_for(lambda: service.serving(f"engine/{ENCODER}"), "the encoder to be loaded")
            wait_for(
                lambda: service.serving(f"engine/{TOOL_MODEL}"), "the model for tools to be loaded"
            )
            asyncio.run(price_encoder(service))
            SHARED.add(service)
            yield service
            SHARED.stop()
        assert service.database.held_hold_count() == 0


async def price_encoder(service: Service) -> None:
    """Set the prices of the encoder and of the model that calls tools."""
    async with service.session() as session:
        await set_price(
            session,
            PriceTerms(
                model=ENCODER,
                input_picos_per_token=0,
                cached_input_picos_per_token=0,
                output_picos_per_token=0,
                embedding_picos_per_token=EMBEDDING_PICOS,
            ),
            actor="test",
        )
        await price_model(session, TOOL_MODEL)


@pytest.fixture(scope="session")
def tight_process(tmp_path_factory: pytest.TempPathFactory, service: Service) -> Iterator[Service]:
    """Yield a second server of the same machine with small replay buffers and a short time limit.

    Each of them recovers the other's journal if it is killed.
    """
    home = tmp_path_factory.mktemp("tight")
    (home / "journal").symlink_to(service.home / "journal")
    model = service.settings.models.directories[MODEL]
    bounds = {
        "keep_on_disconnect_max_s": TIGHT_KEEP_S,
        "replay_bytes_per_request_max": 100_000,
        "outbox_tokens_per_request_max": 500,
    }
    with running(Service(home, service.database_url, model, **bounds)) as tight:
        SHARED.add(tight, may_be_killed=True)
        yield tight


@pytest.fixture
def tight(tight_process: Service) -> Service:
    """Return the second server, running."""
    return alive(tight_process)


def alive(service: Service) -> Service:
    """Return the service, restarted if a test has killed it."""
    assert service.process is not None
    if service.process.poll() is not None:
        service.start()
    return service


@pytest.fixture(scope="session")
def built() -> Path:
    """Return the directory of the compiled TypeScript client."""
    node_of(typescript_sdk.missing())
    typescript_sdk.build()
    return typescript_sdk.SDK / "dist"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove address, key and certificates from the environment."""
    for name in ("WEIR_ADDRESS", "WEIR_API_KEY", "WEIR_ADMIN_KEY", "WEIR_ROOT_CERTIFICATES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def no_tasks_left() -> AsyncIterator[None]:
    """Check after the test that no task of the client is alive."""
    before = asyncio.all_tasks()

    yield

    left = [task for task in asyncio.all_tasks() - before if "weir_client" in repr(task.get_coro())]
    assert left == []
