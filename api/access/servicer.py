"""Base of the gRPC servicers that read and change the database: authentication, transactions,
idempotency, a fair share of the connections for reports, and reads that callers share.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import math
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from google.protobuf.message import Message
from sqlalchemy.ext.asyncio import AsyncSession

from api.access.auth import Authenticator
from api.access.pages import read_page
from api.access.permissions import READERS
from api.access.roles import Role, is_operator, role_of
from api.core import wire
from api.core.errors import TooManyReports
from api.core.interceptor import Context
from metering.core.errors import NotFound
from metering.core.pages import PAGE_SIZE
from metering.store.border import Actor, acting
from metering.store.db import Sessions, patience, read_one_moment
from metering.tenants import admin_requests
from metering.tenants.admin_requests import take_changes_lock
from metering.tenants.authentication import Principal

S = TypeVar("S", bound="AuthenticatedServicer")
R = TypeVar("R", bound="Repeatable")
A = TypeVar("A")
M = TypeVar("M", bound=Message)

# Waiting reports of one key; a page of the console requests several at once.
WAITING_PER_KEY_MAX = 16
# Seconds. A report on a month of many millions of requests takes some; clients time out after 30 s.
REPORT_S = 25.0
SHARED_READS_MAX = 32  # kept results, some 100 kB each at most


class Reports:
    """Database connections for reports, shared fairly between API keys.

    A key can use all connections but one. A limited number of its further reports waits. Keys that
    may use models only, of which there are many, share half of the connections.
    """

    def __init__(self, sessions: Sessions, connections_max: int) -> None:
        """`sessions` uses a separate pool for reports, which has `connections_max` connections."""
        self._sessions = sessions
        self._per_key_max = max(connections_max - 1, 1)
        self._shared = asyncio.Semaphore(max(connections_max // 2, 1))
        self._locks: dict[uuid.UUID, asyncio.Semaphore] = {}
        self._counts: Counter[uuid.UUID] = Counter()  # running and waiting reports by key

    @contextlib.asynccontextmanager
    async def session_of(self, reader: Principal) -> AsyncIterator[Sessions]:
        """Wait until the key may run another report, and yield the sessions for it.

        Raises TooManyReports if too many reports of the key are waiting.
        """
        key_id = reader.api_key_id
        if self._counts[key_id] >= self._per_key_max + WAITING_PER_KEY_MAX:
            raise TooManyReports(self._counts[key_id])
        self._counts[key_id] += 1
        try:
            shared = self._shared if reader.scopes.isdisjoint(READERS) else contextlib.nullcontext()
            async with (
                self._locks.setdefault(key_id, asyncio.Semaphore(self._per_key_max)),
                shared,
            ):
                yield sessions_of(reader, self._sessions)
        finally:
            self._counts[key_id] -= 1
            if not self._counts[key_id]:
                del self._counts[key_id], self._locks[key_id]

    @contextlib.asynccontextmanager
    async def reading(self, reader: Principal) -> AsyncIterator[AsyncSession]:
        """Open a session on one snapshot, with the timeout of reports. Raises: TooManyReports."""
        with patience(REPORT_S + 2):
            async with self.session_of(reader) as sessions, sessions() as session:
                await read_one_moment(session, REPORT_S)
                yield session


class SharedReads:
    """Reads whose results several callers get, so that many open pages cost as much as one.

    A caller gets a result that was begun after its call or, with `age_max_s`, at most that long
    before. Reads with equal keys run one after the other, and begin at least `apart_s` after each
    other.
    """

    def __init__(self, *, age_max_s: float = 0.0, apart_s: float = 0.0) -> None:
        self._age_max_s, self._apart_s = age_max_s, apart_s
        # The latest read by key: when it began, on the clock of the loop, and its result.
        self._latest: dict[Hashable, tuple[float, Any]] = {}
        self._locks: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    async def read(self, key: Hashable, make: Callable[[], Awaitable[A]]) -> A:
        """Return the result of `make`, perhaps of another caller's. Raises: what `make` raises."""
        clock = asyncio.get_running_loop().time
        called_at = clock()
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            begun_at, result = self._latest.get(key, (-math.inf, None))
            if begun_at >= called_at - self._age_max_s:
                shared: A = result
                return shared
            await asyncio.sleep(max(begun_at + self._apart_s - clock(), 0.0))
            begun_at = clock()
            made = await make()
            self._latest.pop(key, None)
            self._latest[key] = begun_at, made
            while len(self._latest) > SHARED_READS_MAX:
                del self._latest[next(iter(self._latest))]
            return made


def sessions_of(caller: Principal, sessions: Sessions) -> Sessions:
    """Return the sessions for a caller's transactions: all but the operator's see one organization.

    A developer sees one project of it.
    """
    own_project = Role.DEVELOPER in caller.scopes
    actor = Actor(
        role=role_of(caller).word,
        organization_id=caller.organization_id,
        is_bound=not is_operator(caller),
        project_id=caller.project_id if own_project else None,
        person_id=caller.person_id,
        address=caller.address,
    )
    return acting(sessions, actor)


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


class AuthenticatedServicer:
    """Base of gRPC servicers that authenticate callers and open a transaction for each RPC."""

    def __init__(self, authenticator: Authenticator, sessions: Sessions) -> None:
        self._authenticator = authenticator
        self._sessions = sessions

    async def _caller(self, context: Context) -> Principal:
        """Authenticate the caller. Raises: Unauthenticated, KeyInvalid, PermissionDenied."""
        return await self._authenticator.principal(context)

    @contextlib.asynccontextmanager
    async def _changing(
        self, caller: Principal, *, alone: bool = False
    ) -> AsyncIterator[AsyncSession]:
        """Open a transaction of the caller that commits at the end of the block.

        With `alone`, no other administrator can make changes until it ends.
        """
        async with sessions_of(caller, self._sessions).begin() as session:
            await take_changes_lock(session, alone=alone)
            yield session

    def _reading(self, reader: Principal) -> AbstractAsyncContextManager[AsyncSession]:
        """Open the session in which the caller's list is read."""
        return self._changing(reader)

    @contextlib.asynccontextmanager
    async def _acting(
        self, context: Context, *, alone: bool = False
    ) -> AsyncIterator[CallerTransaction]:
        """Authenticate the caller, and open a transaction with `_changing`."""
        principal = await self._caller(context)
        async with self._changing(principal, alone=alone) as session:
            yield CallerTransaction(session, principal)

    @contextlib.asynccontextmanager
    async def _transaction(self, context: Context) -> AsyncIterator[tuple[AsyncSession, str]]:
        async with self._acting(context) as acting:
            yield acting.session, acting.actor


Act = Callable[[S, R, CallerTransaction, str], Awaitable[tuple[object, A]]]


def once(act: Act[S, R, A]) -> Callable[[S, R, Context], Awaitable[A]]:
    """Make an RPC that acts only once for each request id. Raises: InvalidRequest, RequestIdReused.

    `act` gets the request, the caller's transaction, and the id of the object that an earlier call
    of this request made; empty for the first call. It returns the object's id and the response.
    """

    @functools.wraps(act)
    async def call(self: S, request: R, context: Context) -> A:
        async with self._acting(context) as acting:
            if not request.request_id:
                return (await act(self, request, acting, ""))[1]
            request_id, rest = (
                own_request_id(request.request_id, acting.principal),
                copy.copy(request),
            )
            rest.request_id = ""  # equal ids may differ in spelling
            earlier = await admin_requests.earlier_subject(
                acting.session,
                request_id,
                type(request).__name__,
                rest.SerializeToString(deterministic=True),
            )
            subject_id, response = await act(self, request, acting, earlier or "")
            if earlier is None:
                await admin_requests.made(acting.session, request_id, str(subject_id))
            return response

    return call


def own_request_id(text: str, caller: Principal) -> uuid.UUID:
    """Parse a request id. Those of an organization cannot be ids of another one's requests."""
    request_id = wire.parse_request_id(text)
    return (
        request_id if is_operator(caller) else uuid.uuid5(caller.organization_id, str(request_id))
    )


def reading(query: Callable[..., Awaitable[M]]) -> Callable[[S, Any, Context], Awaitable[M]]:
    """Make an RPC that reads. Raises: InvalidRequest; what the query raises.

    `query` gets the session and the fields of the request by name (`wire.fields_of`); one with a
    parameter `reader` also gets the caller. It returns the response.
    """
    wants_reader = "reader" in inspect.signature(query).parameters

    async def call(self: S, request: Message, context: Context) -> M:
        reader = await self._caller(context)
        fields = wire.fields_of(request) | ({"reader": reader} if wants_reader else {})
        async with self._reading(reader) as session:
            return await query(session, **fields)

    return call


def listing(
    response: type[M],
    query: Callable[..., Awaitable[Any]],
    message: Callable[[Any], Message],
    *,
    page_size: int = PAGE_SIZE,
) -> Callable[[S, Any, Context], Awaitable[M]]:
    """Make an RPC that lists, as `reading` does. `message` converts the records of the query.

    If the response has pages, the query returns a page of records and the token of the next page.
    Requests without a page size get `page_size`: 0 stands for the whole list, see `read_page`.
    """
    [name] = [each.name for each in response.DESCRIPTOR.fields if each.is_repeated]

    @functools.wraps(query)
    async def whole(session: AsyncSession, **fields: Any) -> M:
        return response(**{name: map(message, await query(session, **fields))})

    @functools.wraps(query)
    async def paged(session: AsyncSession, *, page_token: str, **fields: Any) -> M:
        size = fields.pop("page_size", page_size)
        reads = functools.partial(query, session, **fields)
        messages, following = await read_page(reads, message, page_size=size, page_token=page_token)
        return response(**{name: messages}, next_page_token=following)

    has_pages = "next_page_token" in response.DESCRIPTOR.fields_by_name
    return reading(paged if has_pages else whole)


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
