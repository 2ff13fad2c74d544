"""Base of the servicers of administrators: authentication, transactions, repeated requests."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncSession

from api.access.auth import Authenticator
from api.core import wire
from api.core.interceptor import Context
from metering.core.errors import NotFound
from metering.store.db import Sessions
from metering.tenants import admin_requests
from metering.tenants.admin_requests import take_changes_lock
from metering.tenants.authentication import Principal


class Repeatable(Protocol):
    """Request with a client-made id."""

    request_id: str

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes:
        """Return the encoded request."""


@dataclass(frozen=True, slots=True)
class CallerTransaction:
    """Transaction of the caller of an RPC. actor: name of the caller in the audit log."""

    session: AsyncSession
    principal: Principal

    @property
    def actor(self) -> str:
        return self.principal.key_prefix

    async def earlier(self, request: Repeatable) -> str | None:
        """Return the id that the same request created before, or None for its first call.

        After a None the caller must call `record`. Raises: InvalidRequest.
        """
        if not request.request_id:
            return None
        request_id, rest = wire.parse_request_id(request.request_id), copy.copy(request)
        rest.request_id = ""  # equal ids may differ in spelling
        payload = rest.SerializeToString(deterministic=True)
        return await admin_requests.earlier_subject(
            self.session, request_id, type(request).__name__, payload
        )

    async def record(self, request: Repeatable, subject_id: object) -> None:
        """Record the object that the first call created."""
        if request.request_id:
            await admin_requests.made(
                self.session, wire.parse_request_id(request.request_id), str(subject_id)
            )


class AuthenticatedServicer:
    """Base of servicers: authenticates the caller of an RPC and opens its transaction."""

    def __init__(self, authenticator: Authenticator, sessions: Sessions) -> None:
        self._authenticator = authenticator
        self._sessions = sessions

    async def _caller(self, context: Context) -> Principal:
        """Return the caller. Raises: Unauthenticated, KeyInvalid, PermissionDenied."""
        return await self._authenticator.principal(context)

    @contextlib.asynccontextmanager
    async def _acting(
        self, context: Context, *, alone: bool = False
    ) -> AsyncIterator[CallerTransaction]:
        """Open a transaction that commits at the end of the block. alone: block other changes."""
        principal = await self._caller(context)
        async with self._sessions.begin() as session:
            await take_changes_lock(session, alone=alone)
            yield CallerTransaction(session, principal)

    @contextlib.asynccontextmanager
    async def _transaction(self, context: Context) -> AsyncIterator[tuple[AsyncSession, str]]:
        async with self._acting(context) as acting:
            yield acting.session, acting.actor


async def removed(removal: Awaitable[object], *, allow_missing: bool) -> bool:
    """Await a removal; return whether there was an object to remove.

    Raises: NotFound unless `allow_missing`.
    """
    try:
        await removal
    except NotFound:
        if not allow_missing:
            raise
        return False
    return True
