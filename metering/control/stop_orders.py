"""Orders to every api process to end a request, or all requests of a key. Written here, read by `control_channel.py`.

An order is a row; the notification that follows its commit only says "look", so that one which gets lost loses nothing.
Functions take a session and never commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.control_models import StopOrder as StopOrderRow

CHANNEL = "weir_control"
LOOK_FOR_ORDERS, REPORT, PEERS = "stop", "report", "peers"  # what a notification can ask of a process
KEPT_FOR = timedelta(days=1)  # far longer than any process can be cut off and still hold its requests


@dataclass(frozen=True, slots=True)
class StopOrder:
    """End one request of a project, or everything of a key. reason: in the words of who ordered it; may be empty.

    changed_key_id: look at that key again, and end what comes from outside of `allowed_networks`; none of them: nothing.
    ended_secrets: hashes of secrets of that key that have ended now; what was begun with one of them ends, too.
    """

    order_id: int
    request_id: uuid.UUID | None
    project_id: uuid.UUID | None
    api_key_id: uuid.UUID | None
    reason: str
    changed_key_id: uuid.UUID | None = None
    allowed_networks: tuple[str, ...] = ()
    ended_secrets: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """Keep this replica of a model out of use. is_moving: what still runs there is to go on elsewhere. See `replica_drains.py`."""

    model: str
    replica: str
    is_moving: bool


async def order_end_of_request(session: AsyncSession, *, project_id: uuid.UUID, request_id: uuid.UUID, reason: str) -> None:
    """Once the transaction is committed, the process that runs the request ends it."""
    await session.execute(insert(StopOrderRow).values(project_id=project_id, request_id=request_id, reason=reason))
    await _announce(session)


async def order_end_of_key(session: AsyncSession, api_key_id: uuid.UUID) -> None:
    """Once the transaction is committed, every process ends what it runs for the key."""
    await session.execute(insert(StopOrderRow).values(api_key_id=api_key_id, reason=""))
    await _announce(session)


async def order_look_at_key(
    session: AsyncSession, api_key_id: uuid.UUID, allowed_networks: Sequence[str], ended_secrets: Sequence[bytes] = ()
) -> None:
    """Once the transaction is committed, every process looks at the key again, and ends what it runs from outside of these.

    ended_secrets: hashes of the secrets whose requests end as well.
    """
    values = {"allowed_networks": list(allowed_networks), "ended_secrets": list(ended_secrets) or None, "reason": ""}
    await session.execute(insert(StopOrderRow).values(changed_key_id=api_key_id, **values))
    await _announce(session)


async def _announce(session: AsyncSession) -> None:
    await session.execute(delete(StopOrderRow).where(StopOrderRow.ordered_at < func.now() - KEPT_FOR))
    await session.execute(select(func.pg_notify(CHANNEL, LOOK_FOR_ORDERS)))
