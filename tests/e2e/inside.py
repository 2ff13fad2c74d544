"""Fixtures of test modules whose server runs in this process, so that tests can inspect it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import api.fleet.fleet as api_engines
from metering.core.models import QuotaDimension
from tests.conftest import new_database
from tests.service import Inside, Service, Tenant, run_inside


def inside_fixtures(
    *,
    running_max: int | None = None,
    patch: Callable[[pytest.MonkeyPatch], object] = nullcontext,
    **settings: Any,
) -> tuple[Any, Any, Any]:
    """Return the fixtures `inside`, `service` and `tenant` of a module.

    running_max: sequences that the engine runs at once. patch: called before the server starts.
    """

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def inside(
        tmp_path_factory: pytest.TempPathFactory,
        model: Path,
        postgres_server: str,
        template_database: str,
    ) -> AsyncIterator[Inside]:
        with (
            new_database(postgres_server, template=template_database) as url,
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            patch(monkeypatch)
            if running_max is not None:
                build = api_engines.torch_settings
                monkeypatch.setattr(
                    api_engines,
                    "torch_settings",
                    lambda *given: replace(build(*given), running_sequence_count_max=running_max),
                )
            home = tmp_path_factory.mktemp("inside")
            async with run_inside(Service(home, url, model, **settings), monkeypatch) as inside:
                yield inside

    @pytest_asyncio.fixture(loop_scope="module")
    async def service(inside: Inside) -> AsyncIterator[Service]:
        """Yield the service; each test leaves it empty."""
        yield inside.service
        await inside.check_empty()

    @pytest_asyncio.fixture(loop_scope="module")
    async def tenant(service: Service) -> Tenant:
        """Return a tenant with quotas on tokens and on requests, which reveal leaks."""
        return await service.tenant(
            {QuotaDimension.TOKENS_PER_MONTH: 10**9, QuotaDimension.CONCURRENT_REQUESTS: 10_000}
        )

    return inside, service, tenant
