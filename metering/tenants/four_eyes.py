"""Four eyes: whether two keys are in the hands of two persons, judged by the audit log.

All keys of one person are in the same hands. A bound key of a person acts only if that person has
signed in, so who made it before the proposal does not matter. Any other key is also in the hands
of everyone who created, rotated or widened it, or a key that it was made with. Third parties may
make the keys of both, but only before the proposal. Owns nothing; every act that needs two persons
calls `check_two_persons` in its own transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import ApprovalRefused, KeyInvalid
from metering.core.models import ApiKey, ApiKeyOwner, AuditEntry, SupersededSecret
from metering.store.db import database_now
from metering.tenants.api_keys import locked_key

ACTS = {"api_key.create": "created", "api_key.rotate": "rotated", "api_key.update": "widened"}
UNRELATED = "Approve it with an unrelated, older key."

# SQL conditions on an entry `e` of the audit log. A key gets more power to approve by more scopes,
# another role, more networks that may use it, or a longer life. Models and token limits do not
# matter here.
WIDENED = """(
    e.action = 'api_key.update' AND (
        NOT e.before -> 'scopes' @> (e.after -> 'scopes')
        OR coalesce(e.after ->> 'role', '') NOT IN ('', coalesce(e.before ->> 'role', ''))
        OR jsonb_array_length(e.before -> 'allowed_networks') > 0 AND (
            jsonb_array_length(e.after -> 'allowed_networks') = 0
            OR EXISTS (
                SELECT FROM jsonb_array_elements_text(e.after -> 'allowed_networks') AS wide (net)
                WHERE NOT EXISTS (
                    SELECT
                    FROM jsonb_array_elements_text(e.before -> 'allowed_networks') AS known (net)
                    WHERE CAST(wide.net AS inet) <<= CAST(known.net AS inet)
                )
            )
        )
        OR CAST(e.before ->> 'expires_at' AS timestamptz)
            < coalesce(CAST(e.after ->> 'expires_at' AS timestamptz), 'infinity')
    )
)"""
ACTS_ON = text(f"""
SELECT e.action, e.actor, e.created_at
FROM audit_log e
JOIN api_keys k ON k.id::text = e.subject_id
WHERE k.prefix = :key
  AND e.action IN ('api_key.create', 'api_key.rotate', 'api_key.update')
  AND (e.action <> 'api_key.update' OR {WIDENED})
ORDER BY e.created_at, e.id
""")


@dataclass(frozen=True, slots=True)
class KeyAct:
    """Change that gave power to a key: `act` is "created", "rotated" or "widened"."""

    act: str
    actor: str
    at: datetime

    @property
    def gives_secret(self) -> bool:
        return self.act != "widened"


@dataclass(frozen=True, slots=True)
class Hands:
    """Keys in the hands of the person of a key, the key itself included.

    `is_bound` says that only the person itself can act with the key, after signing in.
    """

    keys: frozenset[str]
    is_bound: bool

    def given_by(self, acts: list[KeyAct], proposed_at: datetime) -> list[KeyAct]:
        """Select the acts on the key that put it into other hands too."""
        return [act for act in acts if act.at >= proposed_at] if self.is_bound else acts


async def check_two_persons(
    session: AsyncSession,
    *,
    author: str,
    approver: str,
    proposed_at: datetime,
    what: str,
    secret_hash: bytes = b"",
) -> None:
    """Raise ApprovalRefused unless author and approver are two persons with two keys.

    Both are key prefixes. `what` names the proposal, as in "adjustment 323430cc". `secret_hash` is
    of the approver's secret in use, which has to be older than the proposal; empty means the
    present one. The approver's key stays locked until the transaction ends, so a concurrent
    rotation comes before or after. Raises: KeyInvalid if the secret has ended meanwhile.
    """
    if author == approver:
        raise ApprovalRefused(f"{approver} proposed {what}. Another person has to approve it.")
    of_author, of_approver = await _hands(session, author), await _hands(session, approver)
    if author in of_approver.keys:
        raise ApprovalRefused(
            f"{approver} belongs to the person who proposed {what} with {author}. Another person"
            " has to approve it."
        )
    own = await _acts_of_secret(session, approver, secret_hash)
    given = of_approver.given_by(own, proposed_at)
    if path := await _path(session, of_author.keys, approver, given):
        chain = ", which was ".join(f"{_passive(act)} by {act.actor}" for _, act in path)
        maker = path[-1][1].actor
        belongs = "" if maker == author else f"belongs to the person of {author}, which "
        raise ApprovalRefused(
            f"{approver} was {chain}, which {belongs}proposed {what}. {UNRELATED}"
        )
    given = of_author.given_by(await _acts_on(session, author), proposed_at)
    if path := await _path(session, of_approver.keys, author, given):
        chain = ", which ".join(f"{_active(act)} {key}" for key, act in reversed(path))
        maker = path[-1][1].actor
        belongs = "" if maker == approver else f"belongs to the person of {maker}, which "
        raise ApprovalRefused(f"{approver} {belongs}{chain}, which proposed {what}. {UNRELATED}")
    for act in own:
        if act.at < proposed_at:
            continue
        is_own = act.actor in of_approver.keys
        by = "" if is_own else f" by {act.actor}"
        if not is_own and (shared := await _path(session, {act.actor}, author)):
            by += f", which also {_active(shared[-1][1])} {shared[-1][0]},"
        raise ApprovalRefused(
            f"{approver} was {_passive(act)}{by} after {what} was proposed. {UNRELATED}"
        )


def widened_fields(entry: AuditEntry) -> list[str]:
    """List the fields that an update of a key changed, among those that give it power."""
    before, after = entry.before or {}, entry.after or {}
    fields = ("scopes", "role", "allowed_networks", "expires_at")
    return [field for field in fields if before.get(field) != after.get(field)]


async def _hands(session: AsyncSession, key: str) -> Hands:
    """Find all keys of the person of a key; the key alone if it belongs to no person."""
    owned = (
        select(ApiKey.secret_hash.is_(None), ApiKeyOwner.person_id)
        .join(ApiKeyOwner, ApiKeyOwner.api_key_id == ApiKey.id)
        .where(ApiKey.prefix == key, ApiKeyOwner.person_id.is_not(None))
    )
    if (row := (await session.execute(owned)).one_or_none()) is None:
        return Hands(frozenset({key}), is_bound=False)
    is_bound, person_id = row
    of_person = select(ApiKey.prefix).join(ApiKeyOwner, ApiKeyOwner.api_key_id == ApiKey.id)
    keys = await session.scalars(of_person.where(ApiKeyOwner.person_id == person_id))
    return Hands(frozenset(keys), is_bound)


async def _acts_of_secret(session: AsyncSession, key: str, secret_hash: bytes) -> list[KeyAct]:
    """List the changes behind a key's secret, without those that replaced it; lock the key."""
    key_id = await session.scalar(select(ApiKey.id).where(ApiKey.prefix == key))
    if key_id is None:
        return []  # not a key: an operator's own name
    present = await locked_key(session, key_id)
    acts = await _acts_on(session, key)
    if not secret_hash and present.secret_hash is not None:
        return acts
    now = await database_now(session)
    superseded = await session.get(SupersededSecret, secret_hash) if secret_hash else None
    # A bound key has no secret: `secret_hash` is that of the session, which the call has checked.
    is_valid = present.secret_hash in (None, secret_hash) or (
        superseded is not None and superseded.api_key_id == key_id and superseded.expires_at > now
    )
    is_expired = present.expires_at is not None and present.expires_at <= now
    if not is_valid or is_expired or present.revoked_at is not None:
        raise KeyInvalid()
    if superseded is None:
        return acts
    return [act for act in acts if not act.gives_secret or act.at < superseded.superseded_at]


async def _acts_on(session: AsyncSession, key: str) -> list[KeyAct]:
    rows = await session.execute(ACTS_ON, {"key": key})
    return [KeyAct(ACTS[row.action], row.actor, row.created_at) for row in rows]


async def _path(
    session: AsyncSession, makers: Collection[str], made: str, acts: list[KeyAct] | None = None
) -> list[tuple[str, KeyAct]]:
    """Find the shortest chain of changes from a key to one of these makers; empty without one.

    `acts` are those on the first key, if they are known.
    """
    waiting = deque([(made, list[tuple[str, KeyAct]]())])
    seen = {made}
    while waiting:
        key, path = waiting.popleft()
        for act in acts if acts is not None and key == made else await _acts_on(session, key):
            if act.actor in seen:
                continue
            longer = [*path, (key, act)]
            if act.actor in makers:
                return longer
            seen.add(act.actor)
            waiting.append((act.actor, longer))
    return []


def _passive(act: KeyAct) -> str:
    return "given more rights" if act.act == "widened" else act.act


def _active(act: KeyAct) -> str:
    return "gave more rights to" if act.act == "widened" else act.act
