"""Erasure of an end user: its name leaves the database, and every sum stays.

Holds and usage events refer to an end user by a random id, so that only one row has its name. The
name may also be the value of a label, because customers named their users so before, or still do
with some APIs: these labels are removed from the requests of the organization.

First, one transaction takes the name and the limits while no request is admitted: later requests
with the name are of a new end user. Further transactions of bounded size then remove the labels of
earlier requests. If they are interrupted, erasing the same name again continues.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change
from metering.core.models import AuditEntry, Quota, UsageSubject, UsageSubjectCount
from metering.quotas.quota_recount import QUOTA_LOCK
from metering.store.db import Sessions, database_now

ACTION = "end_user.erase"
REASON, STATES = "override_reason", (AuditEntry.before, AuditEntry.after)
ROWS_MAX = 10_000  # per statement: far below its timeout, and other transactions wait briefly
# A statement may read all requests of the organization that are left.
LONG_STATEMENTS = text("SET LOCAL statement_timeout = '300s'")
LOCK_ADMISSIONS = text(f"SELECT pg_advisory_xact_lock({QUOTA_LOCK})")
# Lets the triggers of append-only tables pass statements that remove labels with this value.
ALLOW = text("SELECT set_config('weir.erased_name', :name, true)")
NAMED = """
    organization_id = :organization_id
    AND admitted_at <= :until
    AND jsonb_path_exists(
        labels, '$.* ? (@ == $name)', jsonb_build_object('name', CAST(:name AS text)))
"""
FIRST_KEY = uuid.UUID(int=0), -1, datetime.min.replace(tzinfo=UTC)  # before all others
# Each with the key before all rows. Holds first: an event that is written afterwards copies the
# labels of its hold. A statement begins after the last row of the one before it.
ERASE_LABELS = tuple(
    (
        text(f"""
            UPDATE {table} SET labels = labels_without(labels, :name){more}
            WHERE ({key}) IN (
                SELECT {key} FROM {table}
                WHERE {NAMED} AND ({key}) > ({", ".join(f":after_{i}" for i in range(length))})
                ORDER BY {key} LIMIT :rows_max
                FOR NO KEY UPDATE)
            RETURNING {key}
        """),
        FIRST_KEY[:length],
    )
    for table, key, length, more in (
        ("holds", "id", 1, ""),
        # The hash of the labels in its receipt cannot be recomputed any more.
        ("usage_events", "hold_id, part, settled_at", 3, ", receipt_labels_salt = NULL"),
    )
)


@dataclass(frozen=True, slots=True)
class Erased:
    """Numbers of rows that had the name: subjects, which are one end user and label values, and
    limits.
    """

    subject_count: int
    limit_count: int


@dataclass(frozen=True, slots=True)
class Erasure:
    """Erasure of a name from the rows of one organization. `actor` is for the audit log."""

    organization_id: uuid.UUID
    name: str
    actor: str

    async def erase_names(self, session: AsyncSession) -> Erased:
        """Erase the name from the end user's row, and from those of label values that are equal.

        Their limits end, and the reasons of their overrides are erased. The caller has excluded
        other administrators. Admissions of all customers wait until the transaction ends.
        """
        await session.execute(LOCK_ADMISSIONS)
        # Locked first, as by all who create, archive or count usage subjects.
        await session.execute(
            select(UsageSubjectCount)
            .where(UsageSubjectCount.organization_id == self.organization_id)
            .with_for_update()
        )
        named = (
            update(UsageSubject)
            .where(
                UsageSubject.organization_id == self.organization_id,
                UsageSubject.name == self.name,
            )
            .values(
                name=None,
                erased_at=func.now(),
                archived_at=func.coalesce(UsageSubject.archived_at, func.now()),
            )
            .returning(UsageSubject.id, UsageSubject.kind)
        )
        subjects = (await session.execute(named)).all()
        of_subjects = Quota.subject_id.in_([each.id for each in subjects])
        ended = await session.scalars(
            update(Quota)
            .where(of_subjects, Quota.deleted_at.is_(None))
            .values(deleted_at=func.now())
            .returning(Quota.id)
        )
        limit_count = len(ended.all())
        await session.execute(
            update(Quota)
            .where(of_subjects, Quota.override_reason.is_not(None))
            .values(override_limit_value=None, override_until=None, override_reason=None)
        )
        quotas = await session.scalars(select(Quota.id).where(of_subjects))
        await session.execute(
            update(AuditEntry)
            .where(
                AuditEntry.subject_id.in_([str(each) for each in quotas]),
                or_(*(state[REASON].astext.is_not(None) for state in STATES)),
            )
            .values({state: state.concat({REASON: None}) for state in STATES})
        )
        for subject in subjects:
            await self._record(session, str(subject.id))
        return Erased(len(subjects), limit_count)

    async def erase_labels(
        self, sessions: Sessions, erased: Erased, rows_max: int = ROWS_MAX
    ) -> int:
        """Remove labels with the name as value from all earlier requests; return how many had one.

        `erased` is the result of `erase_names`, whose transaction is committed.
        """
        until: datetime | None = None
        counts: list[int] = []
        for statement, after in ERASE_LABELS:
            counts.append(0)
            is_done = False
            while not is_done:
                async with sessions.begin() as session:
                    until = until or await database_now(session)
                    await session.execute(LONG_STATEMENTS)
                    await session.execute(ALLOW, {"name": self.name})
                    values: dict[str, object] = {
                        "organization_id": self.organization_id,
                        "until": until,
                        "name": self.name,
                        "rows_max": rows_max,
                        **{f"after_{index}": part for index, part in enumerate(after)},
                    }
                    changed = [tuple(row) for row in await session.execute(statement, values)]
                counts[-1] += len(changed)
                after = max(changed, default=after)
                is_done = len(changed) < rows_max
        if any(counts) and not erased.subject_count:
            async with sessions.begin() as session:
                await self._record(session, str(self.organization_id))
        return max(counts)

    async def _record(self, session: AsyncSession, subject_id: str) -> None:
        facts = {"organization_id": str(self.organization_id)}
        await record_change(session, self.actor, ACTION, subject_id, before=facts)
