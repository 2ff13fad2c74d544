"""What the calls of `BillingService` share: who may read, which customers exist for whom, and how long a report may take."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from api.access.auth import Authenticator
from api.access.scopes import Scope
from api.admin.admin_calls import AdminCalls
from api.core.errors import TooManyReports
from metering.core.errors import NotFound
from metering.core.models import Organization
from metering.store.db import Sessions, patience
from metering.tenants.tenants import Principal, find_organization

WAITING_PER_KEY_MAX = 16  # reports of one key, beside those that run: a page of the console asks for some at once
REPORT_S = 25.0  # a month of many millions of requests is summed up in some seconds; clients give a call half a minute


class Reports:
    """The database connections for reports, of which one key has all but one at most. Others of the key wait, a bounded number."""

    def __init__(self, sessions: Sessions, connections_max: int) -> None:
        """sessions: on a pool of so many connections, which nothing else uses."""
        self._sessions = sessions
        self._per_key_max = max(connections_max - 1, 1)
        self._turns: dict[uuid.UUID, asyncio.Semaphore] = {}
        self._counts: Counter[uuid.UUID] = Counter()  # of each key, its reports that run or wait

    @contextlib.asynccontextmanager
    async def turn(self, reader: Principal) -> AsyncIterator[Sessions]:
        """Sessions for one report, once the key may have one. Raises: TooManyReports."""
        key_id = reader.api_key_id
        if self._counts[key_id] >= self._per_key_max + WAITING_PER_KEY_MAX:
            raise TooManyReports(self._counts[key_id])
        self._counts[key_id] += 1
        try:
            async with self._turns.setdefault(key_id, asyncio.Semaphore(self._per_key_max)):
                yield self._sessions
        finally:
            self._counts[key_id] -= 1
            if not self._counts[key_id]:
                del self._counts[key_id], self._turns[key_id]


class BillingCalls(AdminCalls):
    """Reading for `billing` and `admin` keys, beside what admins may do: `api/access/scopes.py` says which call is which."""

    def __init__(self, authenticator: Authenticator, sessions: Sessions, reports: Reports) -> None:
        """sessions: for what admins change. reports: for everything that only reads."""
        super().__init__(authenticator, sessions)
        self._reports = reports

    @contextlib.asynccontextmanager
    async def _reading(self, reader: Principal) -> AsyncIterator[AsyncSession]:
        """A session whose statements see one moment and may take as long as a report takes. Raises: TooManyReports."""
        with patience(REPORT_S + 2):
            async with self._reports.turn(reader) as sessions, sessions() as session:
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
