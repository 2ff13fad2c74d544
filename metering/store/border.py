"""Border of an organization: sessions whose transactions see and change its rows only.

A transaction of such a session finds the views of the schema `organization_border` under the names
of the tables, because that schema comes first in its `search_path`. The border thus holds for every
statement of the transaction and under every database role, and costs other transactions nothing.
Revision 0031 has the views; a test demands a decision for each new table.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import Session, SessionTransaction

from metering.store.db import Sessions

SCHEMA = "organization_border"


@dataclass(frozen=True, slots=True)
class Actor:
    """Caller of a transaction: the role, organization, person and address that the audit log names.

    `is_bound` confines the transaction to the organization, and `project_id` to that project of it.
    """

    role: str
    organization_id: uuid.UUID
    is_bound: bool
    project_id: uuid.UUID | None = None
    person_id: uuid.UUID | None = None
    address: IPv4Address | IPv6Address | None = None

    @property
    def settings(self) -> str:
        """SQL that applies to the rest of the transaction. It takes no snapshot."""
        values = {
            "weir.actor_role": self.role,
            "weir.actor_organization": self.organization_id,
            "weir.actor_person": self.person_id or "",
            "weir.actor_address": self.address or "",
        }
        if self.is_bound:
            values |= {
                "weir.organization": self.organization_id,
                "weir.project": self.project_id or "",
            }
        set_all = "; ".join(f"SET LOCAL {name} = '{value}'" for name, value in values.items())
        if not self.is_bound:
            return set_all
        return f"{set_all}; SET LOCAL search_path = {SCHEMA}, public"


class ActorSession(Session):
    """Session whose transactions begin with the settings of the actor in its `info`."""


@event.listens_for(ActorSession, "after_begin")
def apply_settings(session: Session, _: SessionTransaction, connection: Connection) -> None:
    """Apply the settings of a session's actor to a transaction that begins."""
    actor: Actor = session.info["actor"]
    connection.exec_driver_sql(actor.settings)


def acting(sessions: Sessions, actor: Actor) -> Sessions:
    """Return a factory of sessions of the same database for one actor."""
    options = sessions.kw | {"sync_session_class": ActorSession, "info": {"actor": actor}}
    return async_sessionmaker(**options)
