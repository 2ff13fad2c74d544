"""From the secret that a call brings to a principal, and what its scopes allow."""

from __future__ import annotations

import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from api.access.key_changes import KeyChanges
from api.access.scopes import SCOPES, Scope
from api.access.shared_lookups import SharedLookups
from api.access.standing_key import StandingKeys
from api.access.throttle import Throttle
from api.core.addresses import FORWARDED_FOR, Origin, Proxies, address_of
from api.core.errors import AddressNotAllowed, ModelNotAllowed, PermissionDenied, Unauthenticated
from api.core.interceptor import METHOD, Context
from api.core.pace import VISIT, FramePace
from metering.core.errors import KeyInvalid, StoreAway
from metering.holds.lease_clock import boot_time_s
from metering.quotas.quota_rules import Payer
from metering.store.db import Sessions, patience
from metering.tenants.networks import Network, allows
from metering.tenants.tenants import Principal, authenticate

BEARER = "bearer "
NO_PROXIES = Proxies()
ANSWER_WAIT_S = 5.0  # a call that waits longer for its first lookup is better told to come again
REMEMBERED_COUNT_MAX = 10_000  # keys, of 64 bytes each and what they may


class Authenticator:
    """Checks the API key of a call against the database, and from where it comes.

    So what has changed of a key holds from its next call on, and for open streams as soon as this process hears of it (`changed`).

    Calls that come with one key at the same time share a check that began after the last of them had come.

    What was found is remembered for three things: to let calls in while the database is away, if the deployment wants that, to
    look at keys that were good before, whatever else comes from their address, and for callers who say how old an answer may be.
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
        pace: FramePace | None = None,
    ) -> None:
        """grace_s: for so long after its last check a key is good while the database is away.

        failures_per_minute: that one address may have; 0: any number. used: told of a key, by its id, each time that it is good.
        proxies: whose word on addresses is taken. pace: of the calls of each key; None: they do not wait.
        """
        self._sessions = sessions
        self._answer_wait_s = answer_wait_s
        self._grace_s = grace_s
        self._used = used
        self._proxies = proxies
        self._pace = pace
        self.standing = StandingKeys()  # of open streams, and of HTTP requests that wait for their body
        self.throttle = Throttle(failures_per_minute)
        self._changes = KeyChanges()
        self._lookups: SharedLookups[Principal] = SharedLookups()  # by hash of the secret: streams come by the thousand
        # When it was asked, how many changes were known then, and the answer; by hash of the secret; checked last stands last.
        self._remembered: OrderedDict[bytes, tuple[float, int, Principal]] = OrderedDict()

    @property
    def throttled_count(self) -> int:
        """Addresses whose keys are not looked at for now."""
        return self.throttle.refused_count

    async def principal(self, context: Context) -> Principal:
        """Return the principal of a unary gRPC call, after waiting for its key's turn.

        Raises as `principal_of` and `turn`, and Unauthenticated if the call brings no secret.
        """
        principal = await self.principal_of(bearer_token(context), method=METHOD.get(), origin=self.origin(context))
        await self.turn(principal)
        return principal

    async def turn(self, principal: Principal) -> None:
        """Wait for the turn of a call, unless it has had it. Administrators' calls have no turns. Raises: TooManyCalls."""
        visit = VISIT.get()
        if visit is not None:
            visit.belongs_to(principal, is_free=Scope.ADMIN in principal.scopes)
            await visit.turn_to_call()
        elif self._pace is not None and Scope.ADMIN not in principal.scopes:
            await self._pace.turn_to_call(principal)

    async def turn_to_read(self, context: Context) -> uuid.UUID | str:
        """Whose message a call is about to bring, after waiting for its turn: of a key that was good before, else of an address.

        Raises: TooManyCalls.
        """
        try:
            known = self._remembered.get(digest_of(bearer_token(context)))
        except Unauthenticated:
            known = None
        if known is None:
            return address_of(context.peer())
        await self.turn(known[2])
        return known[2].api_key_id

    def origin(self, context: Context) -> Origin:
        """From where a call over gRPC comes."""
        return self.origin_of(context.peer(), metadata_values(context, FORWARDED_FOR))

    def origin_of(self, peer: str, forwarded: Iterable[str]) -> Origin:
        """The same of any wire. peer: as gRPC names who has connected; forwarded: values of `X-Forwarded-For`, in order."""
        return self._proxies.origin(peer, forwarded)

    async def principal_of(self, secret: str, *, method: str, origin: Origin, age_max_s: float = 0.0) -> Principal:
        """Who has this secret, whatever wire it came over, if it is good for the call, and from where it comes.

        method: path of the call in the contract, as in `api/access/scopes.py`; another wire names the call that it stands for.
        age_max_s: how old what is known of the key may be, where this process has heard of no change of it.
        Raises: PermissionDenied, StoreAway, AuthenticationThrottled, TooManyCalls;
        KeyInvalid for an unknown, expired or revoked key.
        """
        needed = SCOPES[method]  # a call that is missing there is nobody's
        digest = digest_of(secret)
        if digest in self._remembered:  # before it is looked up, which costs as much as the rest of a call
            await self.turn(self._remembered[digest][2])
        principal = self._known(digest, age_max_s) if age_max_s else None
        if principal is None:
            principal = await self._look_up(digest, secret, origin.peer)
        await self.turn(principal)
        # After the key: who has a wrong one learns nothing of networks. Before its scopes: who is outside learns nothing of them.
        if not allows(principal.networks, origin.address):
            raise AddressNotAllowed(origin.address)
        self._used(principal.api_key_id)
        if principal.scopes.isdisjoint(needed):
            raise PermissionDenied(
                f"key {principal.key_prefix} has the scopes {', '.join(sorted(principal.scopes))}; this call needs "
                f"{' or '.join(sorted(needed))}"
            )
        return replace(principal, address=origin.address)

    def changed(self, api_key_id: uuid.UUID, networks: Sequence[Network] = (), ended_secrets: Collection[bytes] = ()) -> None:
        """A key was revoked, or is good for something else: what was found of it counts no more, also of look-ups under way.

        networks: streams from outside of these are shut out at once, and so are those that were opened with a secret of which the
        hash is among `ended_secrets`. That the key was good before stays known, to ask the database
        for it again whatever else comes from its address. Looks at nothing that is remembered: thousands may change at once.
        """
        self._changes.note(api_key_id)
        self.standing.changed(api_key_id, networks, ended_secrets)

    async def _check(self, secret: str) -> Principal:
        with patience(self._answer_wait_s):
            async with self._sessions() as session:
                return await authenticate(session, secret)

    def _known(self, digest: bytes, age_max_s: float) -> Principal | None:
        """What was asked so long ago at most, if the secret still works by that."""
        asked_at, change_count, known = self._remembered.get(digest, (0.0, 0, None))
        if known is None or self._changes.since(change_count, known.api_key_id):
            return None
        age_s, lifetime_s = boot_time_s() - asked_at, known.secret_lifetime_s
        if age_s > age_max_s or (lifetime_s is not None and age_s >= lifetime_s):
            return None
        return known if lifetime_s is None else replace(known, secret_lifetime_s=lifetime_s - age_s)

    async def _look_up(self, digest: bytes, secret: str, peer: str) -> Principal:
        try:
            async with self.throttle.attempt(peer, lambda: digest in self._remembered):
                while True:
                    begun, asked_at = self._changes.count, boot_time_s()
                    principal = await self._lookups.ask(digest, lambda: self._check(secret))
                    if not self._changes.since(begun, principal.api_key_id):
                        break
        except StoreAway:
            if not self._grace_s or (known := self._known(digest, self._grace_s)) is None:
                raise
            return known
        except KeyInvalid:
            self._remembered.pop(digest, None)
            raise
        self._remembered[digest] = asked_at, begun, principal
        self._remembered.move_to_end(digest)
        if len(self._remembered) > REMEMBERED_COUNT_MAX:
            self._remembered.popitem(last=False)
        return principal


def digest_of(secret: str) -> bytes:
    """What a secret is remembered by."""
    return hashlib.sha256(secret.encode(errors="replace")).digest()


def metadata_values(context: Context, name: str) -> list[str]:
    """The texts of this name in the metadata of a call, in order."""
    return [value for key, value in context.invocation_metadata() or () if key == name and isinstance(value, str)]


def bearer_token(context: Context) -> str:
    """The secret in the metadata of a call. Raises: Unauthenticated saying how to send it."""
    for value in metadata_values(context, "authorization"):
        if value.lower().startswith(BEARER):
            return value[len(BEARER) :].strip()
    raise Unauthenticated("no API key: send the metadata `authorization: Bearer <API key>`")


def check_model(principal: Principal, model: str) -> None:
    """Raises: ModelNotAllowed."""
    if not principal.may_use(model):
        raise ModelNotAllowed(principal.key_prefix, model)


def payer(principal: Principal) -> Payer:
    """Whom this principal's requests are charged to."""
    return Payer(principal.organization_id, principal.project_id, principal.api_key_id, principal.currency_code)
