"""What runs now, over all api processes: the holds, which all share, joined with what each process says of its own requests.

A process writes its report when somebody asks (`control_channel.py`), so a view that nobody looks at costs nothing. Who does not
answer in time is named, and its requests are told by their holds alone. Nothing here knows a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.stop_orders import CHANNEL, REPORT
from metering.core.errors import InvalidValue
from metering.core.models import Hold, HoldState
from metering.store.db import Sessions

# A voided attempt has left nothing, and may have been followed by another.
SELECT_OWNER = text("""
SELECT h.owner_id, h.state, coalesce(r.peer_address, '') AS address, coalesce(r.peer_certificate, '') AS certificate
FROM holds h LEFT JOIN live_reports r ON r.owner_id = h.owner_id
WHERE h.project_id = :project_id AND h.request_id = :request_id AND h.state <> 'voided'
ORDER BY h.admitted_at DESC LIMIT 1
""")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a request is. is_held: it runs, as far as the books know.

    address: "host:port" where other processes reach its process, which shows that certificate; both empty where it has gone.
    """

    owner_id: uuid.UUID
    is_held: bool
    address: str
    certificate: str


async def certificate_of(session: AsyncSession, owner_id: uuid.UUID) -> str:
    """What the process of this id shows the others; empty if there is none."""
    found = await session.scalar(text("SELECT peer_certificate FROM live_reports WHERE owner_id = :id"), {"id": owner_id})
    return str(found or "")


async def find_owner(session: AsyncSession, project_id: uuid.UUID, request_id: uuid.UUID) -> Owner | None:
    """None if no request of this id has been admitted in the project."""
    row = (await session.execute(SELECT_OWNER, {"project_id": project_id, "request_id": request_id})).one_or_none()
    return None if row is None else Owner(row.owner_id, row.state == HoldState.HELD, row.address, row.certificate)


PAGE_SIZE_MAX = 1000  # requests; one page is one answer, and an answer must fit a message
REPORT_WAIT_S = 0.3  # a process that is well answers within some milliseconds
REPORT_POLL_S = 0.005
STUCK_AGE = "30 seconds"  # three rounds of the sweep

EXPECTED = text("SELECT owner_id FROM live_reports UNION SELECT owner_id FROM holds WHERE state = 'held'")
ANSWERED = text("SELECT owner_id FROM live_reports WHERE reported_at >= :asked_at")
# What does not answer and holds nothing has ended; one that was only cut off writes its row again when it is back.
FORGET_ENDED = text("""
DELETE FROM live_reports r WHERE reported_at < :asked_at
AND NOT EXISTS (SELECT FROM holds WHERE owner_id = r.owner_id AND state = 'held')
""")

# A report may be older than the holds are now: what it says of a hold that has ended is left out.
RUNNING = f"""
WITH told AS (
    SELECT r.owner_id AS reporter_id, r.owner_name, q.*
    FROM live_reports r, LATERAL jsonb_to_recordset(r.requests) AS q(
        hold_id uuid, request_id uuid, organization_id uuid, project_id uuid, api_key_id uuid, model text, phase text,
        age_s float8, input_token_count bigint, cached_input_token_count bigint, delivered_token_count bigint,
        tokens_per_second float8)
    WHERE r.reported_at >= :asked_at
), running AS (
    SELECT h.id AS hold_id, coalesce(h.request_id, t.request_id) AS request_id,
        coalesce(h.organization_id, t.organization_id) AS organization_id, coalesce(h.project_id, t.project_id) AS project_id,
        coalesce(h.api_key_id, t.api_key_id) AS api_key_id, coalesce(h.model, t.model) AS model, coalesce(t.phase, '') AS phase,
        coalesce(t.age_s, extract(epoch FROM clock_timestamp() - h.admitted_at))::float8 AS age_s,
        greatest(h.input_token_count, t.input_token_count, 0) AS input_token_count,
        greatest(h.cached_input_token_count, t.cached_input_token_count, 0) AS cached_input_token_count,
        greatest(h.delivered_token_count, t.delivered_token_count, 0) AS delivered_token_count,
        coalesce(t.tokens_per_second, 0) AS tokens_per_second, coalesce(h.leased_token_count, 0) AS leased_token_count,
        coalesce(h.input_token_count + h.leased_token_count - h.posted_token_count, 0) AS held_token_count,
        h.admitted_at, h.expires_at, coalesce(h.owner_id, t.reporter_id) AS owner_id, coalesce(t.owner_name, '') AS owner_name
    FROM (SELECT * FROM holds WHERE state = 'held') h FULL JOIN told t ON t.hold_id = h.id
    WHERE (h.id IS NOT NULL OR t.hold_id IS NULL)
        AND (NOT :stuck_only OR h.expires_at < clock_timestamp() - interval '{STUCK_AGE}')
        AND (CAST(:organization_id AS uuid) IS NULL OR coalesce(h.organization_id, t.organization_id) = :organization_id)
)
"""
SELECT_REQUESTS = text(f"""{RUNNING}
SELECT r.request_id, r.organization_id, o.name AS organization_name, r.project_id, p.name AS project_name, r.api_key_id,
    k.prefix AS api_key_prefix, r.model, r.phase, r.age_s, r.input_token_count, r.cached_input_token_count,
    r.delivered_token_count, r.tokens_per_second, r.leased_token_count, r.admitted_at, r.expires_at, r.owner_id, r.owner_name
FROM running r JOIN organizations o ON o.id = r.organization_id JOIN projects p ON p.id = r.project_id
JOIN api_keys k ON k.id = r.api_key_id
ORDER BY r.age_s DESC, r.request_id LIMIT :page_size
""")
SELECT_ORGANIZATIONS = text(f"""{RUNNING}
SELECT r.organization_id, o.name, count(*) AS request_count, count(r.hold_id) AS hold_count,
    sum(r.held_token_count)::bigint AS held_token_count, sum(r.tokens_per_second)::float8 AS tokens_per_second
FROM running r JOIN organizations o ON o.id = r.organization_id GROUP BY r.organization_id, o.name ORDER BY o.name
""")
# By project, because request ids are unique, and indexed, within one. A voided attempt has left no trace but its order.
SELECT_PLACES = text("""
SELECT p.id AS project_id, coalesce(h.state, '') AS state
FROM projects p
LEFT JOIN LATERAL (
    SELECT state FROM holds WHERE project_id = p.id AND request_id = :request_id AND state <> 'voided'
    ORDER BY admitted_at DESC LIMIT 1
) h ON true
WHERE (CAST(:project_id AS uuid) IS NULL OR p.id = :project_id)
    AND (h.state IS NOT NULL OR EXISTS (SELECT FROM stop_orders WHERE project_id = p.id AND request_id = :request_id))
""")

SELECT_WAITING = text("""
SELECT DISTINCT q.project_id
FROM live_reports r, LATERAL jsonb_to_recordset(r.requests) AS q(hold_id uuid, request_id uuid, project_id uuid)
WHERE r.reported_at >= :asked_at AND q.hold_id IS NULL AND q.request_id = :request_id
    AND (CAST(:project_id AS uuid) IS NULL OR q.project_id = :project_id)
""")


SELECT_OWNERS = text("""
SELECT h.project_id, o.name AS organization_name, p.name AS project_name, k.prefix AS api_key_prefix
FROM projects p JOIN holds h ON h.project_id = p.id AND h.request_id = :request_id AND h.state <> 'voided'
JOIN organizations o ON o.id = p.organization_id JOIN api_keys k ON k.id = h.api_key_id
WHERE CAST(:project_id AS uuid) IS NULL OR p.id = :project_id
""")


@dataclass(frozen=True, slots=True)
class RequestOwner:
    """Whose a request is."""

    project_id: uuid.UUID
    organization_name: str
    project_name: str
    api_key_prefix: str


@dataclass(frozen=True, slots=True)
class LiveRequestRow:
    """One request that runs or waits. phase: empty where its process has not told; times None without a hold."""

    request_id: uuid.UUID
    organization_id: uuid.UUID
    organization_name: str
    project_id: uuid.UUID
    project_name: str
    api_key_id: uuid.UUID
    api_key_prefix: str
    model: str
    phase: str
    age_s: float
    input_token_count: int
    cached_input_token_count: int
    delivered_token_count: int
    tokens_per_second: float
    leased_token_count: int
    admitted_at: datetime | None
    expires_at: datetime | None
    owner_id: uuid.UUID
    owner_name: str


@dataclass(frozen=True, slots=True)
class OrganizationLoad:
    """All that runs for one organization. held_token_count: input and leased output of its holds."""

    organization_id: uuid.UUID
    name: str
    request_count: int
    hold_count: int
    held_token_count: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class LiveView:
    """What runs: at most a page of requests, the oldest first, and the sums over all of them."""

    requests: tuple[LiveRequestRow, ...]
    organizations: tuple[OrganizationLoad, ...]
    silent_owner_ids: tuple[uuid.UUID, ...]

    @property
    def request_count(self) -> int:
        return sum(each.request_count for each in self.organizations)


@dataclass(frozen=True, slots=True)
class Place:
    """A project that knows a request. is_held: it runs there."""

    project_id: uuid.UUID
    is_held: bool


async def live_view(
    sessions: Sessions, *, organization_id: uuid.UUID | None = None, page_size: int = 200, stuck_only: bool = False
) -> LiveView:
    """What runs in all processes. stuck_only: holds that no sweep has ended though their time is over.

    Asks every process and waits for their answers, `REPORT_WAIT_S` at most. Raises: InvalidValue.
    """
    if not 1 <= page_size <= PAGE_SIZE_MAX:
        raise InvalidValue("page_size", f"give 1 to {PAGE_SIZE_MAX}")
    asked_at, silent = await ask_all(sessions)
    values = {"asked_at": asked_at, "stuck_only": stuck_only, "organization_id": organization_id}
    async with sessions() as session:
        requests = (await session.execute(SELECT_REQUESTS, values | {"page_size": page_size})).all()
        organizations = (await session.execute(SELECT_ORGANIZATIONS, values)).all()
    return LiveView(
        tuple(LiveRequestRow(*row) for row in requests),
        tuple(OrganizationLoad(*row) for row in organizations),
        tuple(sorted(silent)),
    )


async def find_places(session: AsyncSession, request_id: uuid.UUID, project_id: uuid.UUID | None = None) -> list[Place]:
    """The projects whose books know a request of this id, or only this one. What waits without a hold is in none."""
    rows = await session.execute(SELECT_PLACES, {"request_id": request_id, "project_id": project_id})
    return [Place(found_id, state == HoldState.HELD) for found_id, state in rows]


async def find_request_owners(
    session: AsyncSession, request_id: uuid.UUID, project_id: uuid.UUID | None = None
) -> list[RequestOwner]:
    """Every project that has a request of this id, or only this one. What ended with nothing to bill is nobody's."""
    rows = await session.execute(SELECT_OWNERS, {"request_id": request_id, "project_id": project_id})
    return [RequestOwner(*row) for row in rows]


async def find_waiting(sessions: Sessions, request_id: uuid.UUID, project_id: uuid.UUID | None = None) -> list[Place]:
    """The projects for which a request of this id waits without a hold, as all processes tell; of one project if it is given."""
    asked_at, _ = await ask_all(sessions)
    async with sessions() as session:
        values = {"asked_at": asked_at, "request_id": request_id, "project_id": project_id}
        return [Place(found_id, False) for found_id in await session.scalars(SELECT_WAITING, values)]


async def ask_all(sessions: Sessions) -> tuple[datetime, set[uuid.UUID]]:
    """Ask every process for its report, and wait for them. Since when reports count, and who has not answered.

    A process reads all orders before it reports.
    """
    async with sessions.begin() as session:
        asked_at = (await session.scalars(select(func.clock_timestamp()))).one()
        expected = set(await session.scalars(EXPECTED))
        await session.execute(select(func.pg_notify(CHANNEL, REPORT)))
    deadline = asyncio.get_running_loop().time() + REPORT_WAIT_S
    while True:
        async with sessions() as session:
            silent = expected - set(await session.scalars(ANSWERED, {"asked_at": asked_at}))
        if not silent or asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(REPORT_POLL_S)
    if silent:
        async with sessions.begin() as session:
            await session.execute(FORGET_ENDED, {"asked_at": asked_at})
            silent &= set(await session.scalars(EXPECTED))
    return asked_at, silent


async def find_running_hold(session: AsyncSession, project_id: uuid.UUID, request_id: uuid.UUID) -> Hold | None:
    query = select(Hold).where(Hold.project_id == project_id, Hold.request_id == request_id, Hold.state == HoldState.HELD)
    found: Hold | None = await session.scalar(query)
    return found
