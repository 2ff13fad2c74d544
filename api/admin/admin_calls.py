"""What all calls of `AdminService` share: one transaction each, an admin's key, and ids that make a repetition safe."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncSession

from api.access.auth import Authenticator
from api.core import wire
from api.core.interceptor import Context
from metering.store.db import Sessions
from metering.tenants import admin_requests
from metering.tenants.admin_requests import take_changes_lock
from metering.tenants.tenants import Principal


class Repeatable(Protocol):
    """A request with an id that its client minted."""

    request_id: str

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes:
        """Its bytes."""


@dataclass(frozen=True, slots=True)
class Acting:
    """One transaction of a caller. actor: as the audit log names them."""

    session: AsyncSession
    principal: Principal

    @property
    def actor(self) -> str:
        return self.principal.key_prefix

    async def earlier(self, request: Repeatable) -> str | None:
        """The id of what the same call made before; None for the first, which then must call `made`. Raises: InvalidRequest."""
        if not request.request_id:
            return None
        request_id, rest = wire.parse_request_id(request.request_id), copy.copy(request)
        rest.request_id = ""  # which may be written in several ways
        payload = rest.SerializeToString(deterministic=True)
        return await admin_requests.earlier_subject(self.session, request_id, type(request).__name__, payload)

    async def made(self, request: Repeatable, subject_id: object) -> None:
        """Remember what the first call made."""
        if request.request_id:
            await admin_requests.made(self.session, wire.parse_request_id(request.request_id), str(subject_id))


class AdminCalls:
    """The base of the classes that each answer some of the calls."""

    def __init__(self, authenticator: Authenticator, sessions: Sessions) -> None:
        self._authenticator = authenticator
        self._sessions = sessions

    async def _caller(self, context: Context) -> Principal:
        """Who calls. Raises: Unauthenticated, KeyInvalid, PermissionDenied."""
        return await self._authenticator.principal(context)

    @contextlib.asynccontextmanager
    async def _acting(self, context: Context, *, alone: bool = False) -> AsyncIterator[Acting]:
        """A transaction that commits at the end of the block. alone: no other change is made meanwhile."""
        principal = await self._caller(context)
        async with self._sessions.begin() as session:
            await take_changes_lock(session, alone=alone)
            yield Acting(session, principal)

    @contextlib.asynccontextmanager
    async def _transaction(self, context: Context) -> AsyncIterator[tuple[AsyncSession, str]]:
        async with self._acting(context) as acting:
            yield acting.session, acting.actor
