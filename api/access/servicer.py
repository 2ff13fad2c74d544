"""Base of the gRPC servicers for administrators: authentication, transactions, idempotency."""

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
    """Request message with an id that the client chose, so that a retry is recognized."""

    request_id: str

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes:
        """Encode the request."""


@dataclass(frozen=True, slots=True)
class CallerTransaction:
    """Transaction of the caller of an RPC. The audit log names the caller as `actor`."""

    session: AsyncSession
    principal: Principal

    @property
    def actor(self) -> str:
        return self.principal.key_prefix

    async def earlier(self, request: Repeatable) -> str | None:
        """Return the id of the object that an earlier call with this request created.

        None if this is the first call; the caller must then call `record`. Raises: InvalidRequest.
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
        """Store the id of the object that this request created, for retries to return."""
        if request.request_id:
            await admin_requests.made(
                self.session, wire.parse_request_id(request.request_id), str(subject_id)
            )


class AuthenticatedServicer:
    """Base of gRPC servicers that authenticate callers and open a transaction for each RPC."""

    def __init__(self, authenticator: Authenticator, sessions: Sessions) -> None:
        self._authenticator = authenticator
        self._sessions = sessions

    async def _caller(self, context: Context) -> Principal:
        """Authenticate the caller. Raises: Unauthenticated, KeyInvalid, PermissionDenied."""
        return await self._authenticator.principal(context)

    @contextlib.asynccontextmanager
    async def _acting(
        self, context: Context, *, alone: bool = False
    ) -> AsyncIterator[CallerTransaction]:
        """Open a transaction for the caller, which commits at the end of the block.

        With `alone`, no other administrator can make changes until it ends.
        """
        principal = await self._caller(context)
        async with self._sessions.begin() as session:
            await take_changes_lock(session, alone=alone)
            yield CallerTransaction(session, principal)

    @contextlib.asynccontextmanager
    async def _transaction(self, context: Context) -> AsyncIterator[tuple[AsyncSession, str]]:
        async with self._acting(context) as acting:
            yield acting.session, acting.actor


async def removed(removal: Awaitable[object], *, allow_missing: bool) -> bool:
    """Await a removal, and return whether the object existed.

    Raises NotFound if it did not, unless `allow_missing`.
    """
    try:
        await removal
    except NotFound:
        if not allow_missing:
            raise
        return False
    return True
