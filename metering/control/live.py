"""Live control: commands to all api processes to cancel requests or drain replicas, and a view of
all running requests.

Each command is a row; the notification after its commit only triggers a poll, so a lost one loses
nothing. A command to cancel requests is kept for a day; a drain is kept
until it is deleted. Every process reads all new commands at each poll of its control channel
(`control_channel.py`), so one that was cut off finds them too; one that starts later finds all
drains, and the cancels of the last minute. Functions take a session and never commit. The tables of
live control are small and short-lived.

The live view joins the holds, which all processes share, with each process's report of its own
requests. Reports are written on request only, so an unused view costs nothing. Processes that do
not answer in time are named, and their requests are shown by their holds alone. No prompt or
response appears here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change, snapshot
from metering.core.errors import InvalidValue
from metering.core.models import Hold, HoldState, insertion, record_of
from metering.core.pages import check_page_size
from metering.store.db import Sessions

LiveRow = Row[Any]  # row of a statement of this module, with its columns as attributes
CHANNEL = "weir_control"
# Payloads of notifications
POLL, REPORT, PEERS = "poll", "report", "peers"
LAUNCHES, WEIGHTS = "launches", "weights"  # the same, after a change of these rows
KEPT_FOR = timedelta(days=1)  # far longer than a process can be cut off and still hold its requests
FORGET_OLD = text("DELETE FROM cancel_commands WHERE created_at < now() - :kept_for")

REPORT_WAIT_S = 0.3  # a healthy process answers within milliseconds
REPORT_POLL_S = 0.005
STUCK_AGE = "30 seconds"  # three rounds of the sweep
VERSION_MARK = "@"  # between a model and its version, in served names
# No request runs that long; a longer time is a mistake in the unit.
MOVE_AFTER_MAX = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Command to cancel requests: one of a project, or all of a key, project or organization.

    `reason` may be empty. `changed_key_id` names a key to check again: its requests from outside
    `allowed_networks` are cancelled (an empty tuple allows all networks), and those that used a
    secret whose hash is in `ended_secrets`. `owner_id` names an organization or project: all its
    requests are cancelled if it was suspended, by the operator or not; with
    `suspended_by_operator` None it was resumed, with `closes` it was closed for good. With
    `bound_region`, an organization was bound to that region instead, or to none if it is empty:
    requests elsewhere are cancelled.
    """

    command_id: int
    request_id: uuid.UUID | None
    project_id: uuid.UUID | None
    api_key_id: uuid.UUID | None
    reason: str
    changed_key_id: uuid.UUID | None = None
    owner_id: uuid.UUID | None = None
    suspended_by_operator: bool | None = None
    closes: bool = False
    bound_region: str | None = None
    allowed_networks: tuple[str, ...] = ()
    ended_secrets: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainCommand:
    """Command to drain a replica. `is_moving` also moves its running requests elsewhere."""

    model: str
    replica: str
    is_moving: bool


async def cancel_request(
    session: AsyncSession, *, project_id: uuid.UUID, request_id: uuid.UUID, reason: str
) -> None:
    """Write a command to cancel a request. It takes effect when the caller commits."""
    await _command(session, project_id=project_id, request_id=request_id, reason=reason)


async def cancel_requests_of_key(session: AsyncSession, api_key_id: uuid.UUID) -> None:
    """Write a command to cancel all requests of a key. It takes effect when the caller commits."""
    await _command(session, api_key_id=api_key_id)


async def recheck_key(
    session: AsyncSession,
    api_key_id: uuid.UUID,
    allowed_networks: Sequence[str],
    ended_secrets: Sequence[bytes] = (),
) -> None:
    """Write a command to check a key again and cancel requests that it no longer permits.

    These come from outside `allowed_networks`, or used a secret whose hash is in `ended_secrets`.
    The command takes effect when the caller commits.
    """
    networks, secrets = list(allowed_networks), list(ended_secrets) or None
    await _command(
        session, changed_key_id=api_key_id, allowed_networks=networks, ended_secrets=secrets
    )


async def announce_suspension(
    session: AsyncSession,
    owner_id: uuid.UUID,
    reason: str,
    *,
    by_operator: bool | None,
    closes: bool = False,
) -> None:
    """Write a command that an organization or project is suspended, or resumed: `by_operator` None.

    All its requests are cancelled. With `closes` it is closed for good. The command takes effect
    when the caller commits.
    """
    await _command(
        session, reason, owner_id=owner_id, suspended_by_operator=by_operator, closes=closes
    )


async def announce_binding(session: AsyncSession, organization_id: uuid.UUID, region: str) -> None:
    """Write a command that an organization was bound to a region, or to none if it is empty.

    It takes effect when the caller commits.
    """
    await _command(session, owner_id=organization_id, bound_region=region)


async def _command(session: AsyncSession, reason: str = "", **values: object) -> None:
    await session.execute(insertion("cancel_commands", values | {"reason": reason}))
    await session.execute(FORGET_OLD, {"kept_for": KEPT_FOR})
    await announce(session)


async def announce_weights(session: AsyncSession) -> None:
    """Let every process read the queue weights again, once the caller commits."""
    await session.execute(select(func.pg_notify(CHANNEL, WEIGHTS)))


async def announce(session: AsyncSession) -> None:
    """Let every process poll its control channel when the caller commits."""
    await session.execute(select(func.pg_notify(CHANNEL, POLL)))


# A voided attempt left nothing, and may have been followed by another.
SELECT_OWNER = text("""
SELECT h.process_id, h.state = 'held' AS is_held,
       coalesce(r.peer_address, '') AS address,
       coalesce(r.peer_certificate, '') AS certificate
FROM holds h
LEFT JOIN live_reports r ON r.process_id = h.process_id
LEFT JOIN usage_subjects s ON s.id = h.end_user_id
WHERE h.project_id = :project_id
  AND h.request_id = :request_id
  AND h.state <> 'voided'
  AND :end_user IN ('', s.name)
ORDER BY h.admitted_at DESC
LIMIT 1
""")


@dataclass(frozen=True, slots=True)
class Owner:
    """Process that runs or ran a request.

    `is_held` is True if the request has a live hold. `address` is the "host:port" at which other
    processes reach it, `certificate` what it shows there; both are empty if the process is gone.
    """

    process_id: uuid.UUID
    is_held: bool
    address: str
    certificate: str


async def certificate_of(session: AsyncSession, process_id: uuid.UUID) -> str:
    """Read the certificate that a process shows to other processes; empty if there is none."""
    certificate = await session.scalar(
        text("SELECT peer_certificate FROM live_reports WHERE process_id = :id"), {"id": process_id}
    )
    return str(certificate or "")


async def find_owner(
    session: AsyncSession, project_id: uuid.UUID, request_id: uuid.UUID, end_user: str = ""
) -> Owner | None:
    """Find the process that owns a request; None if the project never admitted this request id.

    With `end_user`, requests of others are not found.
    """
    of_request = {"project_id": project_id, "request_id": request_id, "end_user": end_user}
    row = (await session.execute(SELECT_OWNER, of_request)).one_or_none()
    return None if row is None else record_of(Owner, row)


EXPECTED = text(
    "SELECT process_id FROM live_reports UNION SELECT process_id FROM holds WHERE state = 'held'"
)
ANSWERED = text("SELECT process_id FROM live_reports WHERE reported_at >= :asked_at")
# A process that does not answer and holds nothing has ended; one that was cut off writes its row
# again.
FORGET_ENDED = text("""
DELETE FROM live_reports r
WHERE reported_at < :asked_at
  AND NOT EXISTS (SELECT FROM holds WHERE process_id = r.process_id AND state = 'held')
""")

# A report may be older than the holds: its entries for holds that have ended are left out.
RUNNING = f"""
WITH reported AS (
    SELECT l.process_id AS reporter_id, l.process_name, q.*
    FROM live_reports l,
    LATERAL jsonb_to_recordset(l.requests) AS q(
        hold_id uuid, request_id uuid, organization_id uuid, project_id uuid, api_key_id uuid,
        model text, phase text, age_s float8, input_token_count bigint,
        cached_input_token_count bigint, delivered_token_count bigint, tokens_per_second float8
    )
    WHERE l.reported_at >= :asked_at
), running AS (
    SELECT h.id AS hold_id,
           coalesce(h.request_id, r.request_id) AS request_id,
           coalesce(h.organization_id, r.organization_id) AS organization_id,
           coalesce(h.project_id, r.project_id) AS project_id,
           coalesce(h.api_key_id, r.api_key_id) AS api_key_id,
           coalesce(h.model, r.model) AS model,
           coalesce(r.phase, '') AS phase,
           coalesce(r.age_s, extract(epoch FROM clock_timestamp() - h.admitted_at))::float8
               AS age_s,
           greatest(h.input_token_count, r.input_token_count, 0) AS input_token_count,
           greatest(h.cached_input_token_count, r.cached_input_token_count, 0)
               AS cached_input_token_count,
           greatest(h.delivered_token_count, r.delivered_token_count, 0) AS delivered_token_count,
           coalesce(r.tokens_per_second, 0) AS tokens_per_second,
           coalesce(h.leased_token_count, 0) AS leased_token_count,
           coalesce(h.input_token_count + h.leased_token_count - h.posted_token_count, 0)
               AS held_token_count,
           h.admitted_at, h.expires_at, h.end_user_id, coalesce(h.labels, '{{}}') AS labels,
           coalesce(h.process_id, r.reporter_id) AS process_id,
           coalesce(r.process_name, '') AS process_name
    FROM (SELECT * FROM holds WHERE state = 'held') AS h
    FULL JOIN reported r ON r.hold_id = h.id
    WHERE (h.id IS NOT NULL OR r.hold_id IS NULL)
      AND (NOT :stuck_only OR h.expires_at < clock_timestamp() - interval '{STUCK_AGE}')
      AND (
          CAST(:organization_id AS uuid) IS NULL
          OR coalesce(h.organization_id, r.organization_id) = :organization_id
      )
)
"""
SELECT_REQUESTS = text(f"""
{RUNNING}
SELECT r.request_id, r.organization_id, o.name AS organization_name, r.project_id,
       p.name AS project_name, r.api_key_id, k.prefix AS api_key_prefix, r.model, r.phase, r.age_s,
       r.input_token_count, r.cached_input_token_count, r.delivered_token_count,
       r.tokens_per_second, r.leased_token_count, r.admitted_at, r.expires_at, r.process_id,
       r.process_name, coalesce(u.name, '') AS end_user, r.labels
FROM running r
JOIN organizations o ON o.id = r.organization_id
JOIN projects p ON p.id = r.project_id
JOIN api_keys k ON k.id = r.api_key_id
LEFT JOIN usage_subjects u ON u.id = r.end_user_id
ORDER BY r.age_s DESC, r.request_id
LIMIT :page_size
""")
SELECT_ORGANIZATIONS = text(f"""
{RUNNING}
SELECT r.organization_id, o.name,
       count(*) AS request_count,
       count(r.hold_id) AS hold_count,
       sum(r.held_token_count)::bigint AS held_token_count,
       sum(r.tokens_per_second)::float8 AS tokens_per_second
FROM running r
JOIN organizations o ON o.id = r.organization_id
GROUP BY r.organization_id, o.name
ORDER BY o.name
""")
# By project, since request ids are unique and indexed within one. A voided attempt leaves only its
# command.
SELECT_PROJECT_REQUESTS = text("""
SELECT p.id AS project_id, coalesce(h.state, '') AS state
FROM projects p
LEFT JOIN LATERAL (
    SELECT state
    FROM holds
    WHERE project_id = p.id
      AND request_id = :request_id
      AND state <> 'voided'
    ORDER BY admitted_at DESC
    LIMIT 1
) AS h ON true
WHERE (CAST(:project_id AS uuid) IS NULL OR p.id = :project_id)
  AND (
      h.state IS NOT NULL
      OR EXISTS (
          SELECT FROM cancel_commands WHERE project_id = p.id AND request_id = :request_id
      )
  )
""")

SELECT_WAITING = text("""
SELECT DISTINCT q.project_id
FROM live_reports r,
LATERAL jsonb_to_recordset(r.requests) AS q(hold_id uuid, request_id uuid, project_id uuid)
WHERE r.reported_at >= :asked_at
  AND q.hold_id IS NULL
  AND q.request_id = :request_id
  AND (CAST(:project_id AS uuid) IS NULL OR q.project_id = :project_id)
""")


SELECT_OWNERS = text("""
SELECT h.project_id, o.name AS organization_name, p.name AS project_name,
       k.prefix AS api_key_prefix
FROM projects p
JOIN holds h
    ON h.project_id = p.id
   AND h.request_id = :request_id
   AND h.state <> 'voided'
JOIN organizations o ON o.id = p.organization_id
JOIN api_keys k ON k.id = h.api_key_id
WHERE CAST(:project_id AS uuid) IS NULL OR p.id = :project_id
""")


@dataclass(frozen=True, slots=True)
class LiveView:
    """Running requests of all processes.

    `requests` has at most one page of rows of `SELECT_REQUESTS`, the oldest first; the phase is
    empty if the process has not reported, times are None without a hold. `organizations` has sums
    over all requests, rows of `SELECT_ORGANIZATIONS`; `held_token_count` adds input and leased
    output tokens.
    """

    requests: tuple[LiveRow, ...]
    organizations: tuple[LiveRow, ...]
    unresponsive_process_ids: tuple[uuid.UUID, ...]

    @property
    def request_count(self) -> int:
        return sum(each.request_count for each in self.organizations)


@dataclass(frozen=True, slots=True)
class ProjectRequest:
    """A project with a request of the given id. `is_held` is True if the request is running."""

    project_id: uuid.UUID
    is_held: bool


async def live_view(
    sessions: Sessions,
    *,
    organization_id: uuid.UUID | None = None,
    page_size: int = 200,
    stuck_only: bool = False,
) -> LiveView:
    """List the running requests of all processes, of one organization or all.

    Asks every process for a report and waits at most `REPORT_WAIT_S` seconds. `stuck_only` lists
    only overdue holds that the sweep has not ended. Raises: InvalidValue for an invalid page size.
    """
    check_page_size(page_size)
    requested_at, silent = await ask_all(sessions)
    values = {
        "asked_at": requested_at,
        "stuck_only": stuck_only,
        "organization_id": organization_id,
    }
    async with sessions() as session:
        requests = (await session.execute(SELECT_REQUESTS, values | {"page_size": page_size})).all()
        organizations = (await session.execute(SELECT_ORGANIZATIONS, values)).all()
    return LiveView(tuple(requests), tuple(organizations), tuple(sorted(silent)))


async def find_project_requests(
    session: AsyncSession, request_id: uuid.UUID, project_id: uuid.UUID | None = None
) -> list[ProjectRequest]:
    """Find the projects in which a hold or a cancel command names this request id.

    Requests that wait in a queue have neither: `find_waiting` finds them.
    """
    rows = await session.execute(
        SELECT_PROJECT_REQUESTS, {"request_id": request_id, "project_id": project_id}
    )
    return [ProjectRequest(each_id, state == HoldState.HELD) for each_id, state in rows]


async def find_request_owners(
    session: AsyncSession, request_id: uuid.UUID, project_id: uuid.UUID | None = None
) -> Sequence[LiveRow]:
    """Find the requests with this id, with the names of organization, project and key.

    Requests that ended with nothing to bill are not found.
    """
    of_request = {"request_id": request_id, "project_id": project_id}
    return (await session.execute(SELECT_OWNERS, of_request)).all()


async def find_waiting(
    sessions: Sessions, request_id: uuid.UUID, project_id: uuid.UUID | None = None
) -> list[ProjectRequest]:
    """Ask all processes for the projects in which this request id waits without a hold."""
    requested_at, _ = await ask_all(sessions)
    async with sessions() as session:
        values = {"asked_at": requested_at, "request_id": request_id, "project_id": project_id}
        return [
            ProjectRequest(each_id, False)
            for each_id in await session.scalars(SELECT_WAITING, values)
        ]


async def ask_all(sessions: Sessions) -> tuple[datetime, set[uuid.UUID]]:
    """Ask all processes for reports and wait for them at most `REPORT_WAIT_S` seconds.

    Returns the time of asking, after which the reports were written, and the ids of the processes
    that did not answer. A process applies all earlier commands before it reports.
    """
    async with sessions.begin() as session:
        requested_at = (await session.scalars(select(func.clock_timestamp()))).one()
        expected = set(await session.scalars(EXPECTED))
        await session.execute(select(func.pg_notify(CHANNEL, REPORT)))
    deadline = asyncio.get_running_loop().time() + REPORT_WAIT_S
    while True:
        async with sessions() as session:
            silent = expected - set(await session.scalars(ANSWERED, {"asked_at": requested_at}))
        if not silent or asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(REPORT_POLL_S)
    if silent:
        async with sessions.begin() as session:
            await session.execute(FORGET_ENDED, {"asked_at": requested_at})
            silent &= set(await session.scalars(EXPECTED))
    return requested_at, silent


async def find_running_hold(
    session: AsyncSession, project_id: uuid.UUID, request_id: uuid.UUID
) -> Hold | None:
    query = select(Hold).where(
        Hold.project_id == project_id, Hold.request_id == request_id, Hold.state == HoldState.HELD
    )
    hold: Hold | None = await session.scalar(query)
    return hold


SELECT_REPLICAS = text("""
SELECT q.model, q.replica, q.region, q.state, q.reason, q.is_drained, q.request_count,
       q.outstanding_token_count, r.process_id, r.process_name
FROM live_reports r,
LATERAL jsonb_to_recordset(r.replicas) AS q(
    model text, replica text, region text, state text, reason text, is_drained boolean,
    request_count bigint, outstanding_token_count bigint
)
WHERE r.reported_at >= :asked_at
ORDER BY q.model, q.replica, r.process_name, r.process_id
""")


DRAINS = text("SELECT * FROM replica_drains ORDER BY model, replica")
DRAIN = text("SELECT * FROM replica_drains WHERE model = :model AND replica = :replica FOR UPDATE")


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """Replicas of the processes that answered (rows of `SELECT_REPLICAS`), and silent processes.

    A row's `model` is `name` or `name@version`, its `state` that of the model registry.
    """

    replicas: tuple[LiveRow, ...]
    unresponsive_process_ids: tuple[uuid.UUID, ...]

    def named(self, model: str, replica: str) -> list[LiveRow]:
        return [row for row in self.replicas if (row.model, row.replica) == (model, replica)]


def is_of(served: str, model: str) -> bool:
    """Return True if a served name is the model itself or one of its versions (`model@version`)."""
    return served == model or served.startswith(model + VERSION_MARK)


async def replica_view(sessions: Sessions) -> ReplicaView:
    """Ask all processes for their replicas. Those that answer have applied all earlier commands."""
    requested_at, silent = await ask_all(sessions)
    async with sessions() as session:
        rows = (await session.execute(SELECT_REPLICAS, {"asked_at": requested_at})).all()
    return ReplicaView(tuple(rows), tuple(sorted(silent)))


async def list_drains(session: AsyncSession) -> Sequence[LiveRow]:
    """List all drains. Requests are moved `move_after_ms` milliseconds after a drain begins."""
    return (await session.execute(DRAINS)).all()


async def find_drain(session: AsyncSession, model: str, replica: str) -> LiveRow | None:
    """Load and lock the drain of a replica; None if there is none."""
    return (await session.execute(DRAIN, {"model": model, "replica": replica})).one_or_none()


async def drain_replica(
    session: AsyncSession,
    *,
    model: str,
    replica: str,
    reason: str,
    move_after: timedelta | None,
    actor: str,
) -> LiveRow:
    """Start to drain a replica, or change its drain, which keeps its start time; return its row.

    Running requests are moved after `move_after`; with None they finish where they are. Raises:
    InvalidValue if `move_after` is out of range.
    """
    if move_after is not None and not timedelta(0) <= move_after <= MOVE_AFTER_MAX:
        raise InvalidValue(
            "move_after",
            f"must be 0 to {MOVE_AFTER_MAX.days} days, or unset: then nothing is moved",
        )
    before = await find_drain(session, model, replica)
    was = None if before is None else snapshot(before)
    values = {
        "reason": reason,
        "move_after_ms": None if move_after is None else move_after // timedelta(milliseconds=1),
    }
    upsert = insertion("replica_drains", {"model": model, "replica": replica} | values)
    await session.execute(
        upsert.on_conflict_do_update(index_elements=["model", "replica"], set_=values)
    )
    after = await find_drain(session, model, replica)
    assert after is not None, "it was just written"
    if (now := snapshot(after)) != was:
        await record_change(
            session, actor, "replica.drain", f"{model} {replica}", before=was, after=now
        )
    await announce(session)
    return after


async def end_drain(
    session: AsyncSession, *, model: str, replica: str, reason: str, actor: str
) -> bool:
    """End the drain of a replica; return False if there was none."""
    before = await find_drain(session, model, replica)
    if before is None:
        return False
    was = snapshot(before)
    await session.execute(
        text("DELETE FROM replica_drains WHERE model = :model AND replica = :replica"),
        before._asdict(),
    )
    after = {"model": model, "replica": replica, "drained_at": None, "reason": reason}
    await record_change(
        session, actor, "replica.undrain", f"{model} {replica}", before=was, after=after
    )
    await announce(session)
    return True


# Of one model, in the reports of all processes. A request waits until an engine has begun with it;
# `first_token_wait_ms` is the age of the oldest request without a token.
SELECT_LOAD = text("""
SELECT count(*) FILTER (WHERE q.phase IN ('preparing', 'queued', 'loading')) AS waiting_count,
       coalesce(sum(q.waiting_token_count), 0)::bigint AS waiting_token_count,
       count(*) FILTER (WHERE q.phase IN ('prefill', 'decode')) AS running_count,
       coalesce(
           max(q.age_s) FILTER (
               WHERE q.phase IN ('preparing', 'queued', 'loading', 'prefill')
           ) * 1000, 0
       )::float8 AS first_token_wait_ms,
       count(*) FILTER (WHERE q.phase = 'loading') AS loading_count
FROM live_reports r,
LATERAL jsonb_to_recordset(r.requests) AS q(
    model text, phase text, age_s float8, waiting_token_count bigint
)
WHERE r.reported_at >= :asked_at AND q.model = :model
""")
SELECT_STARTING = text("""
SELECT EXISTS (
    SELECT
    FROM launched_replicas
    WHERE state IN ('starting', 'waking')
      AND (served = :model OR starts_with(served, :model || '@'))
)
""")


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Requests of one model in all processes. `is_starting` says whether a server of it starts."""

    waiting_count: int = 0
    waiting_token_count: int = 0
    running_count: int = 0
    first_token_wait_ms: float = 0.0
    is_starting: bool = False

    @property
    def is_active(self) -> bool:
        """True if the model is needed, or is just being loaded."""
        return bool(self.waiting_count or self.running_count or self.is_starting)


async def model_load(sessions: Sessions, model: str) -> ModelLoad:
    """Ask all processes what of a model waits and runs. Waits at most `REPORT_WAIT_S` seconds."""
    requested_at, _ = await ask_all(sessions)
    async with sessions() as session:
        row = (await session.execute(SELECT_LOAD, {"asked_at": requested_at, "model": model})).one()
        is_starting = (await session.scalars(SELECT_STARTING, {"model": model})).one()
    return ModelLoad(
        row.waiting_count,
        row.waiting_token_count,
        row.running_count,
        row.first_token_wait_ms,
        is_starting or row.loading_count > 0,
    )
