"""Authentication of API keys, authorization of calls, revocation of the keys of open streams."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from api.access.issuer_keys import IssuerKeys
from api.access.issuers import TokenVerifier, is_token
from api.access.permissions import MODELS, OPERATOR, ROLES_OF, refuse
from api.access.throttle import Throttle
from api.access.token_callers import TokenCallers
from api.core.addresses import FORWARDED_FOR, Origin, Proxies, address_of
from api.core.errors import (
    AddressNotAllowed,
    AuthenticationThrottled,
    BoundToRegion,
    IssuerUnavailable,
    KeyRevokedMidway,
    ModelNotAllowed,
    OrganizationSuspended,
    PermissionDenied,
    ProjectSuspended,
    Unauthenticated,
)
from api.core.interceptor import METHOD, Context
from api.core.rate_limiter import CALL, RateLimiter
from metering.core.errors import (
    DatabaseUnavailable,
    KeyInvalid,
    OrganizationClosed,
    ProjectClosed,
    TokenInvalid,
)
from metering.holds.lease_clock import boot_time_s
from metering.quotas.quota_rules import Payer
from metering.store.db import Sessions, patience
from metering.tenants.authentication import (
    Principal,
    SingleUse,
    Suspended,
    authenticate,
    authenticate_bound,
)
from metering.tenants.client_tokens import (
    authenticate_client_token,
    count_requests,
    is_client_token,
)
from metering.tenants.networks import Network, allows
from metering.tenants.sign_in import authenticate_session, is_session
from metering.tenants.token_issuers import use_token

KEYS_MAX = 10_000  # remembered keys; an older lookup counts as one of a changed key
BEARER = "bearer "
NO_PROXIES = Proxies()
ANSWER_WAIT_S = 5.0  # a call that waits longer for its first lookup should rather be retried
REMEMBERED_COUNT_MAX = 10_000  # keys, of 64 bytes each plus their permissions
KEY_REVOKED = "Your API key was revoked. Ask an administrator for another one."
SECRET_REPLACED = "The secret of your API key was replaced. Use the new one."
TOKEN_REVOKED = "Your token was revoked. Send a new one."


Answer = TypeVar("Answer")
# What a caller is remembered by: the hash of a secret, or the id of a bound key
Credential = bytes | uuid.UUID


@dataclass(slots=True)
class Question(Generic[Answer]):
    """Query that several callers wait for.

    `begun` counts its executions; `answered` is the number of the latest execution that has
    finished.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    asking_count: int = 0
    begun: int = 0
    answered: int = 0
    answer: Answer | Exception | None = None


class SharedLookups(Generic[Answer]):
    """Runs one query for all concurrent callers with the same key.

    If the caller that runs the query is cancelled, the next waiting caller runs it.
    """

    def __init__(self) -> None:
        self._questions: dict[Hashable, Question[Answer]] = {}

    def __len__(self) -> int:
        return len(self._questions)

    async def ask(self, key: Hashable, read: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the result of an execution of `read` that started after this call.

        `key` identifies the query. Raises the error that `read` raised.
        """
        question = self._questions.setdefault(key, Question())
        before = question.begun
        question.asking_count += 1
        try:
            async with question.lock:
                if question.answered <= before:
                    question.begun += 1
                    number = question.begun
                    try:
                        question.answer = await read()
                    except Exception as error:
                        question.answer = error
                    question.answered = number
                answer = question.answer
        finally:
            question.asking_count -= 1
            if not question.asking_count:
                del self._questions[key]
        if isinstance(answer, Exception):
            # One instance raised in many tasks would collect all their tracebacks
            raise copied(answer)
        assert answer is not None, "a lookup answers or raises"
        return answer


def copied(error: Exception) -> Exception:
    """Return a copy of an error without its traceback; `copy.copy` would build it from its text."""
    made: Exception = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    return made


def suspension_error(found: Suspended) -> OrganizationSuspended | ProjectSuspended:
    """Return the error for a call of models with a key of a suspended owner."""
    if found.of_organization:
        return OrganizationSuspended(found.reason)
    return ProjectSuspended(found.reason, by_operator=found.by_operator)


@dataclass(frozen=True, slots=True)
class SuspensionChange:
    """Suspension of an organization or project, or the end of one: `by_operator` is None.

    With `closes` it is closed for good.
    """

    owner_id: uuid.UUID
    reason: str
    by_operator: bool | None
    closes: bool = False

    def refusal_of(self, payer: Payer) -> PermissionDenied | KeyInvalid | None:
        """Return the error for requests of this payer; None if it does not stop them."""
        is_of_organization = self.owner_id == payer.organization_id
        if self.by_operator is None or not (
            is_of_organization or self.owner_id == payer.project_id
        ):
            return None
        if self.closes:
            return (OrganizationClosed if is_of_organization else ProjectClosed)(self.reason)
        return suspension_error(Suspended(is_of_organization, self.reason, self.by_operator))


@dataclass(frozen=True, slots=True)
class BindingChange:
    """Binding of an organization to a region, or to none if it is empty.

    `server_region` is that of this process.
    """

    owner_id: uuid.UUID
    region: str
    server_region: str

    def refusal_of(self, payer: Payer) -> BoundToRegion | None:
        """Return the error for calls of this payer; None if this process may serve them."""
        if self.owner_id != payer.organization_id or self.region in ("", self.server_region):
            return None
        return BoundToRegion(self.region, self.server_region)


OwnerChange = SuspensionChange | BindingChange


class KeyChanges:
    """Log of the API keys that have changed, and of the organizations and projects whose
    suspensions or regions have. `count` is the number of changes so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last: OrderedDict[uuid.UUID, int] = OrderedDict()  # number of the last change, by id
        self._forgotten = 0  # changes up to this number are no longer remembered

    def note(self, changed_id: uuid.UUID) -> None:
        self.count += 1
        self._last[changed_id] = self.count
        self._last.move_to_end(changed_id)
        if len(self._last) > KEYS_MAX:
            self._forgotten = self._last.popitem(last=False)[1]

    def since(self, count: int, *ids: uuid.UUID) -> bool:
        """Return whether one of these may have changed after the log had `count` entries."""
        return self.count > count and any(
            self._last.get(each, self._forgotten) > count for each in ids
        )


def owners_of(principal: Principal) -> tuple[uuid.UUID, uuid.UUID, uuid.UUID]:
    """Return the ids of key, project and organization; a change of each concerns the key."""
    return principal.api_key_id, principal.project_id, principal.organization_id


class Authenticator:
    """Checks the API key of a call against the database, and the address that it comes from.

    A change of a key applies from its next call on, and to open streams once this process is
    notified (`changed`). Concurrent calls with one key share a check that started after the last of
    them arrived. Results are remembered to admit calls in degraded mode, to exempt keys that were
    valid before from the throttle, and for callers that accept answers of some age.
    """

    def __init__(
        self,
        sessions: Sessions,
        *,
        answer_wait_s: float = ANSWER_WAIT_S,
        grace_s: float = 0.0,
        failures_per_minute: int = 0,
        used: Callable[[uuid.UUID], None] = lambda _: None,
        proxies: Proxies = NO_PROXIES,
        pace: RateLimiter | None = None,
        tokens: TokenCallers | None = None,
        region: str = "",
    ) -> None:
        """`grace_s` is how many seconds a key stays valid after its last check while the database
        is unavailable. `failures_per_minute` limits the failed attempts per address; 0 means no
        limit.

        `used` is called with the id of a key each time the key is accepted. `proxies` are the
        trusted proxies. `pace` limits the calls of each key; with None, calls never wait. `tokens`
        verifies tokens of issuers; with None, it cannot read the keys of any. `region` is that of
        this process, empty for none.
        """
        self._sessions = sessions
        self._answer_wait_s = answer_wait_s
        self._grace_s = grace_s
        self._used = used
        self.proxies = proxies
        self._pace = pace
        self._tokens = tokens or TokenCallers(TokenVerifier(IssuerKeys()))
        self.region = region
        # Keys of open streams, and of HTTP requests whose body is awaited
        self.stream_keys = StreamKeys()
        self.throttle = Throttle(failures_per_minute)
        self._changes = KeyChanges()
        # Keys: credentials. Shared, because streams arrive by the thousand
        self._lookups: SharedLookups[Principal] = SharedLookups()
        # Time of the check, count of changes then, and the answer; the latest check is last
        self._remembered: OrderedDict[Credential, tuple[float, int, Principal]] = OrderedDict()

    async def principal(self, context: Context) -> Principal:
        """Authenticate a unary gRPC call, after waiting for the turn of its key.

        Raises the errors of `principal_of`, and Unauthenticated if the call has no secret.
        """
        return await self.principal_of(
            bearer_token(context), method=METHOD.get(), origin=self.origin_of(context)
        )

    def origin_of(self, context: Context) -> Origin:
        """Return where a gRPC call comes from."""
        return self.proxies.origin(context.peer(), metadata_values(context, FORWARDED_FOR))

    async def wait_for_share(self, principal: Principal) -> None:
        """Wait until the principal's rate limit permits this call; a call waits only once.

        Administrators never wait. Raises: TooManyCalls.
        """
        visit = CALL.get()
        if visit is not None:
            visit.belongs_to(principal, is_free=not OPERATOR.isdisjoint(principal.scopes))
            await visit.wait_to_call()
        elif self._pace is not None and OPERATOR.isdisjoint(principal.scopes):
            await self._pace.wait_to_call(principal)

    async def share_to_read(self, context: Context) -> Principal | str:
        """Wait until the rate limit permits another message, and return the payer of the message:
        the principal if its key was valid before, otherwise the client's address.

        Raises: TooManyCalls.
        """
        try:
            known = self._remembered.get(digest_of(bearer_token(context)))
        except Unauthenticated:
            known = None
        if known is None:
            return address_of(context.peer())
        await self.wait_for_share(known[2])
        return known[2]

    async def principal_of(
        self,
        secret: str,
        *,
        method: str,
        origin: Origin,
        age_max_s: float = 0.0,
        call: str = "",
        again: bool = False,
    ) -> Principal:
        """Authenticate a secret or a token, and check that its key permits this call from here.

        `method` is the gRPC path of the call; a call of the HTTP API passes the path of the RPC
        that it corresponds to, and as `call` its own, below `/v1/`. `age_max_s` allows a remembered
        result of at most this age, unless the key is known to have changed. `again` repeats the
        check of a call, which does not use its token again. Raises: KeyInvalid for an unknown,
        expired or revoked key, TokenInvalid, IssuerUnavailable, PermissionDenied, BoundToRegion,
        OrganizationSuspended and ProjectSuspended for a call of models, DatabaseUnavailable,
        AuthenticationThrottled, TooManyCalls.
        """
        principal = await self._permitted(
            digest_of(secret), self._check_of(secret), method, origin, age_max_s
        )
        token = principal.token
        if token is not None and token.client_token_id is not None and token.call != call:
            raise PermissionDenied(
                f"Your client token may only call POST /v1/{token.call} over HTTP. Send this call"
                " from your application's server, with its API key."
            )
        if token is not None and token.use is not None and not again:
            await self._use(token.use, origin.peer)
        return principal

    async def _use(self, use: SingleUse, peer: str) -> None:
        """Use a token that may be used once. Raises: TokenInvalid, DatabaseUnavailable."""
        try:
            with patience(self._answer_wait_s):
                async with self._sessions.begin() as session:
                    await use_token(session, use)
        except TokenInvalid:
            self.throttle.failed(peer)
            raise

    async def principal_of_bound_key(
        self, api_key_id: uuid.UUID, *, method: str, origin: Origin, age_max_s: float = 0.0
    ) -> Principal:
        """Check that a bound key is valid and permits this call from this origin.

        The caller has proved by other means, such as a session or a signed token, that it may act
        with the key; a key with a secret is refused. Otherwise as `principal_of`.
        """
        return await self._permitted(
            api_key_id,
            lambda: self._read(lambda session: authenticate_bound(session, api_key_id)),
            *(method, origin, age_max_s),
        )

    async def _permitted(
        self,
        credential: Credential,
        check: Callable[[], Awaitable[Principal]],
        method: str,
        origin: Origin,
        age_max_s: float,
    ) -> Principal:
        """Look up the principal of a credential, unless it is known, and check its permission."""
        roles = ROLES_OF[method]  # a method without a permission is always refused
        remembered = self._remembered.get(credential)
        if remembered is not None:  # before the lookup, which costs as much as the rest of a call
            await self.wait_for_share(remembered[2])
        principal = self._known(credential, age_max_s) if age_max_s else None
        if principal is None:
            principal = await self._look_up(credential, check, origin.peer)
        if remembered is None or principal is not remembered[2]:
            await self.wait_for_share(principal)
        # After the check of the key, to hide networks from wrong keys; before that of its
        # permissions, to hide these from outside addresses.
        if not allows(principal.networks, origin.address):
            raise AddressNotAllowed(origin.address)
        self._used(principal.api_key_id)
        if principal.region not in ("", self.region) and (
            roles == MODELS or OPERATOR.isdisjoint(principal.scopes)
        ):
            raise BoundToRegion(principal.region, self.region)
        if principal.scopes.isdisjoint(roles):
            refuse(principal, method)
        if principal.suspended is not None and roles == MODELS:
            raise suspension_error(principal.suspended)
        if principal.address is origin.address:
            return principal
        found = replace(principal, address=origin.address)
        remembered = self._remembered.get(credential)
        # The next call probably comes from the same address
        if remembered is not None and remembered[2] is principal:
            self._remembered[credential] = *remembered[:2], found
        return found

    def changed(
        self,
        api_key_id: uuid.UUID,
        networks: Sequence[Network] = (),
        ended_secrets: Collection[bytes] = (),
        *,
        is_revoked: bool = False,
    ) -> None:
        """Discard what is remembered of a changed key, including the results of running lookups.

        Open streams receive nothing more if the key is revoked, their address is outside
        `networks`, or the hash of their secret is in `ended_secrets`. The key stays exempt from the
        throttle. Takes constant time, since thousands of keys may change at once.
        """
        self._changes.note(api_key_id)
        self.stream_keys.changed(api_key_id, networks, ended_secrets, is_revoked=is_revoked)

    def owner_changed(self, change: OwnerChange) -> None:
        """Discard what is remembered of all keys of an organization or project, as `changed` does.

        Their open streams receive nothing more if the change refuses their calls.
        """
        self._changes.note(change.owner_id)
        self.stream_keys.owner_changed(change)

    def _check_of(self, secret: str) -> Callable[[], Awaitable[Principal]]:
        """Return the check of a secret or token: its form alone says which one it is."""
        if is_token(secret):
            return lambda: self._tokens.principal(secret, self._read)
        if is_client_token(secret):
            return lambda: self._read(lambda session: authenticate_client_token(session, secret))
        if is_session(secret):
            return lambda: self._read(lambda session: authenticate_session(session, secret))
        return lambda: self._read(lambda session: authenticate(session, secret))

    async def count_requests(self, principal: Principal, count: int) -> None:
        """Count requests of a client token. Raises: TokenInvalid if it has fewer left."""
        if principal.token is not None and (token_id := principal.token.client_token_id):
            async with self._sessions.begin() as session:
                await count_requests(session, token_id, count)

    async def _read(self, read: Callable[[AsyncSession], Awaitable[Answer]]) -> Answer:
        with patience(self._answer_wait_s):
            async with self._sessions() as session:
                return await read(session)

    def _known(self, credential: Credential, age_max_s: float) -> Principal | None:
        """Return the remembered principal, or None if the result is too old or the secret has
        expired.
        """
        requested_at, change_count, known = self._remembered.get(credential, (0.0, 0, None))
        if known is None or self._changes.since(change_count, *owners_of(known)):
            return None
        age_s, lifetime_s = boot_time_s() - requested_at, known.secret_lifetime_s
        if age_s > age_max_s or (lifetime_s is not None and age_s >= lifetime_s):
            return None
        return known if lifetime_s is None else replace(known, secret_lifetime_s=lifetime_s - age_s)

    async def _look_up(
        self,
        credential: Credential,
        check: Callable[[], Awaitable[Principal]],
        peer: str,
    ) -> Principal:
        # A key that was valid before is not delayed by other attempts from its address.
        is_known = credential in self._remembered
        held_up = (
            contextlib.nullcontext()
            if is_known
            else self.throttle.attempt(peer, lambda: credential in self._remembered)
        )
        try:
            async with held_up:
                while True:
                    begun, requested_at = self._changes.count, boot_time_s()
                    principal = await self._lookups.ask(credential, check)
                    if not self._changes.since(begun, *owners_of(principal)):
                        break
        except DatabaseUnavailable:
            if not self._grace_s or (known := self._known(credential, self._grace_s)) is None:
                raise
            return known
        except KeyInvalid:
            if is_known:
                self.throttle.failed(peer)
            self._remembered.pop(credential, None)
            raise
        self._remembered[credential] = requested_at, begun, principal
        self._remembered.move_to_end(credential)
        if len(self._remembered) > REMEMBERED_COUNT_MAX:
            self._remembered.popitem(last=False)
        return principal


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()


def metadata_values(context: Context, name: str) -> list[str]:
    """Return all values of a metadata key, in the order of the call."""
    return [
        value
        for key, value in context.invocation_metadata() or ()
        if key == name and isinstance(value, str)
    ]


def bearer_token(context: Context) -> str:
    """Read the secret from the `authorization` metadata of a call. Raises: Unauthenticated."""
    for value in metadata_values(context, "authorization"):
        if value.lower().startswith(BEARER):
            return value[len(BEARER) :].strip()
    raise Unauthenticated(
        "Your call has no API key. Send the metadata `authorization: Bearer <API key>`."
    )


def check_model(principal: Principal, model: str) -> None:
    """Raise ModelNotAllowed if the key may not use the model."""
    if not principal.may_use(model):
        raise ModelNotAllowed(principal.key_prefix, model)


def payer(principal: Principal) -> Payer:
    """Build the payer that requests of this principal are billed to."""
    return Payer(
        principal.organization_id,
        principal.project_id,
        principal.api_key_id,
        principal.currency_code,
    )


def ignore_refusal(_: Exception) -> None:
    """Do nothing: default callback of a key without an open stream."""


class StreamKey:
    """Key of an open stream, with the result of its last check.

    If a check refuses the key, new requests fail. A command stops running ones of a revoked key.
    """

    def __init__(
        self,
        principal: Principal,
        look_up: Callable[[], Awaitable[Principal]],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`principal` is the result of the first check, and `look_up` repeats the check.

        A result is used for at most `interval_s` seconds.
        """
        self.principal = principal  # of the last successful check
        self.payer = payer(principal)
        self._look_up = look_up
        self._interval_s = interval_s
        self._clock = clock
        self._read_at = clock()
        self._is_stale = False
        self._refusal: Exception | None = None
        # Called when the secret of the stream has ended, or its address is no longer allowed.
        self.on_excluded: Callable[[Exception], None] = ignore_refusal

    async def refresh(self) -> None:
        """Check the key again if the last check is too old. `check` raises the error, if any."""
        now = self._clock()
        if now - self._read_at < self._interval_s and not self._is_stale:
            return
        self._is_stale = False  # before the lookup: a change during it causes another one
        try:
            self.principal, self._refusal = await self._look_up(), None
            self.payer = payer(self.principal)
        except (KeyInvalid, PermissionDenied) as refusal:
            self._refusal = refusal
        except (DatabaseUnavailable, IssuerUnavailable, AuthenticationThrottled):
            self._is_stale = True
            return  # nothing is known; the next message checks again
        self._read_at = now

    def change(
        self,
        networks: Sequence[Network],
        ended_secrets: Collection[bytes] = (),
        *,
        is_revoked: bool = False,
    ) -> None:
        """Record that the key has changed, so that the next message checks it again.

        Ends what the stream receives if the key is revoked, if its address is outside `networks`,
        the networks that are now allowed, or if the hash of its secret is in `ended_secrets`.
        """
        self._is_stale = True
        principal = self.principal
        if is_revoked:
            self._refusal = KeyRevokedMidway(KEY_REVOKED)
            self.on_excluded(self._refusal)
        elif not principal.credentials.isdisjoint(ended_secrets):
            ended = TOKEN_REVOKED if principal.token else SECRET_REPLACED
            self._refusal = KeyRevokedMidway(ended)
            self.on_excluded(self._refusal)
        elif not allows(networks, principal.address):
            self._refusal = AddressNotAllowed(principal.address)
            self.on_excluded(self._refusal)

    def owner_changed(self, change: OwnerChange) -> None:
        """Record that its organization or project was suspended or resumed, or is bound anew."""
        self._is_stale = True
        if (refusal := change.refusal_of(self.payer)) is not None:
            self._refusal = refusal
            self.on_excluded(refusal)

    def check(self) -> None:
        """Raise Unauthenticated, KeyInvalid or PermissionDenied if the key may start no request."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        lifetime_s = self.principal.secret_lifetime_s
        if lifetime_s is not None and self._clock() >= self._read_at + lifetime_s:
            raise Unauthenticated(
                "Your token has expired. Open a new stream with a new one."
                if self.principal.token
                else "Your API key has expired or was rotated. Open a new stream with the new"
                " secret."
            )


class StreamKeys:
    """Registry of the keys of all open streams, by id of the API key."""

    def __init__(self) -> None:
        self._open: dict[uuid.UUID, set[StreamKey]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    @contextlib.contextmanager
    def hold(self, key: StreamKey) -> Iterator[StreamKey]:
        """Register a key for the duration of the block, so that it is notified of changes."""
        api_key_id = key.principal.api_key_id
        self._open.setdefault(api_key_id, set()).add(key)
        try:
            yield key
        finally:
            held = self._open[api_key_id]
            held.discard(key)
            # Breaks a reference cycle, so that an ended stream is freed without a garbage
            # collection.
            key.on_excluded = ignore_refusal
            if not held:
                del self._open[api_key_id]

    def changed(
        self,
        api_key_id: uuid.UUID,
        networks: Sequence[Network],
        ended_secrets: Collection[bytes] = (),
        *,
        is_revoked: bool = False,
    ) -> None:
        """Notify every stream and waiting HTTP request of a key.

        Arguments as in `StreamKey.change`.
        """
        for key in tuple(self._open.get(api_key_id, ())):
            key.change(networks, ended_secrets, is_revoked=is_revoked)

    def owner_changed(self, change: OwnerChange) -> None:
        """Notify every stream and waiting HTTP request of an organization or project."""
        for key in tuple(itertools.chain.from_iterable(self._open.values())):
            if change.owner_id in (key.payer.organization_id, key.payer.project_id):
                key.owner_changed(change)
