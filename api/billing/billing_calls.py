"""What the calls of `BillingService` share: who may read, which customers exist for whom, and how long a report may take."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from api.access.scopes import Scope
from api.admin.admin_calls import AdminCalls
from metering.errors import NotFound
from metering.models import Organization
from metering.store.bounded_connection import patience
from metering.tenants.tenants import Principal, find_organization

REPORT_S = 25.0  # a month of many millions of requests is summed up in some seconds; clients give a call half a minute


class BillingCalls(AdminCalls):
    """Reading for `billing` and `admin` keys, beside what admins may do: `api/access/scopes.py` says which call is which."""

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncSession]:
        """A session whose statements see one moment and may take as long as a report takes."""
        with patience(REPORT_S + 2):
            async with self._sessions() as session:
                await session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
                await session.execute(text(f"SET LOCAL statement_timeout = {int(REPORT_S * 1000)}"))
                yield session


def may_see(reader: Principal, organization_id: object) -> bool:
    """A `billing` key sees its own organization; any other one does not exist for it."""
    return Scope.ADMIN in reader.scopes or organization_id == reader.organization_id


async def visible(session: AsyncSession, reader: Principal, ref: str) -> Organization:
    """The organization by name or id. Raises: NotFound, also for one that the reader may not see."""
    organization = await find_organization(session, ref)
    if not may_see(reader, organization.id):
        raise NotFound("organization", ref)
    return organization


async def visible_or_own(session: AsyncSession, reader: Principal, ref: str) -> Organization:
    """The same; the reader's own if none is named."""
    return await visible(session, reader, ref or str(reader.organization_id))
