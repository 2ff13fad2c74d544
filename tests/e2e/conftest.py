"""Running service shared by all end-to-end tests; each test has its own tenants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from metering.receipts.signing import KEY_FILE, ensure_key
from tests.calls import Calls, calls
from tests.conftest import as_application, new_database
from tests.service import Service, SharedServices, Tenant, make_model, running

Serve = Callable[..., Service]

SHARED = SharedServices(Path(__file__).parent)


def pytest_runtest_setup() -> None:
    SHARED.resume()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    SHARED.stop(nextitem)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny checkpoint."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def service(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    postgres_server: str,
    template_database: str,
) -> Iterator[Service]:
    """Yield a service with its own database and signed receipts, in the application role.

    It must still run at the end, and have reported no incident.
    """
    home = tmp_path_factory.mktemp("home")
    ensure_key(home / KEY_FILE)
    with new_database(postgres_server, template=template_database) as url:
        unprivileged = Service(home, url, model)
        unprivileged.settings = unprivileged.settings.having(database_url=as_application(url))
        with running(unprivileged) as service:
            SHARED.add(service)
            yield service
            SHARED.stop()
        assert service.database.held_hold_count() == 0


@pytest.fixture
async def tenant(service: Service) -> Tenant:
    """Return a new tenant of the service."""
    return await service.tenant()


@pytest.fixture
async def admin(service: Service) -> AsyncIterator[Calls]:
    """Yield calls with the admin key of a new tenant."""
    tenant = await service.tenant(scopes=("admin",))
    async with calls(service, tenant.secret) as admin:
        yield admin


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, module_database: str) -> Iterator[Serve]:
    """Yield a function that starts a service of the module: with a checkpoint, and settings.

    With `is_drained` it must still run at the end, and leave no hold.
    """
    drained: list[Service] = []
    with ExitStack() as stack:

        def start(model: Path, *, is_drained: bool = False, **settings: Any) -> Service:
            service = Service(tmp_path_factory.mktemp("home"), module_database, model, **settings)
            drained.extend([service] * is_drained)
            return stack.enter_context(running(service))

        yield start
        for service in drained:
            assert service.stop() == 0, service.log[-4000:]
        assert not drained or drained[0].database.held_hold_count() == 0
