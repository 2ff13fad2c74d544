"""Running service shared by all end-to-end tests; each test has its own tenants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from metering.receipts.signing import KEY_FILE, ensure_key
from tests.conftest import as_application, new_database
from tests.service import Service, SharedServices, make_model, running

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
