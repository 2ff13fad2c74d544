"""Alerts on usage, credit and payments: their tables, the periodic scan of the counters, and their
list.

A limit is crossed in a window when `used` reaches a threshold of the limit in force; amounts held
by running requests do not count. The worker scans the present window, and earlier ones for as long
as their counters are kept, by the limit at their end: a worker that was down finds later the
crossings it missed. A window that ended before its limit was last changed is skipped, since its
limit is no longer known. Prepaid credit is crossed when at most the threshold is left. The
statement that finds crossings writes them, and the database accepts each alert once; alerts are
append-only (trigger). Admissions never read them.

Limits of end users and label values are many, and may all be crossed at once: an organization gets
at most `USAGE_SUBJECT_ALERTS_PER_HOUR` alerts about them, the highest thresholds of a scan first.
The others are scanned again later.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from psycopg.types.json import Jsonb
from sqlalchemy import ForeignKey, Integer, func, select, text, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from metering.core.errors import InvalidValue, NotFound
from metering.core.models import (
    AuditEntry,
    Base,
    GeneratedId,
    Organization,
    Quota,
    QuotaDimension,
)
from metering.core.pages import check_page_size, page_values, utc_time
from metering.core.pages import page_token as token_of
from metering.quotas.quota_admin import ALERTING_DIMENSIONS
from metering.quotas.quota_rules import DIMENSIONS, Unit, window_end, window_start
from metering.quotas.quota_states import subject_names
from metering.store.db import Sessions, database_now
from metering.tenants.four_eyes import ACTS, WIDENED, KeyAct, widened_fields
from metering.tenants.usage_subjects import find_end_user

ALERTS_MAX = 5_000  # per statement: thresholds may be set on very many limits at once
STATEMENTS_MAX = 10  # per scan; the next one continues
# Complete windows of each unit that are scanned; older counters of days are deleted.
WINDOWS_BACK: dict[Unit | None, int] = {Unit.DAY: 2, Unit.WEEK: 1, Unit.MONTH: 1}
USAGE_SUBJECT_ALERTS_PER_HOUR = 1_000  # per organization
POSTPONED_S = 600  # until a limit beyond these is scanned again
# Requests that an enforced limit refuses exceed its rest, so that a limit is hardly ever used to
# the last unit.
USED_UP_MILLI = 995
# Test of a threshold in percent: a float filter with some margin, before the exact integer test.
NEARLY = 0.0099
# The planner cannot know that hardly any selector is taken, and would read all limits.
SCAN_SETTINGS = text("SET LOCAL enable_seqscan = off")
# A worker that was down finds the changes of keys it missed, in the end of the audit log.
KEYS_BACK, ENTRIES_BACK = timedelta(days=2), 50_000
CREDIT = QuotaDimension.PREPAID_CREDIT_PICOS


class DeliveryState(StrEnum):
    """State of an alert's delivery to a webhook; `delivered` and `failed` are final."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


class InvoiceEvent(StrEnum):
    """Payment event of an invoice at Stripe that causes an alert."""

    PAYMENT_FAILED = "invoice_payment_failed"
    PAID = "invoice_paid"


class Alert(Base):
    """Alert about a quota, prepaid credit, a payment event at Stripe or a changed key; or a test.

    `threshold` is the percentage of the limit that was used or, for prepaid credit, the remaining
    picos. `limit_value` and `used` are those that the scan read. `organization_id` owns the quota's
    subject. `invoice` has the fields of `InvoiceFacts`.
    """

    __tablename__ = "alerts"

    id: Mapped[GeneratedId]
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    quota_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("quotas.id"))
    window_start: Mapped[datetime | None]
    threshold: Mapped[int | None]
    limit_value: Mapped[int | None]
    used: Mapped[int | None]
    stripe_invoice_id: Mapped[str | None]
    invoice_event: Mapped[str | None]
    invoice: Mapped[dict[str, Any] | None]
    api_key_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("api_keys.id"))
    audit_entry_id: Mapped[int | None] = mapped_column(ForeignKey("audit_log.id"))
    fired_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AlertWebhook(Base):
    """Webhook that receives an organization's alerts.

    `secret` signs the requests; it is shown once and never logged. `failure_count` counts the
    failed attempts since the last success, and no attempt is made before `paused_until`.
    """

    __tablename__ = "alert_webhooks"

    organization_id: Mapped[uuid.UUID] = mapped_column(
        ForeignKey("organizations.id"), primary_key=True
    )
    url: Mapped[str]
    secret: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    failure_count: Mapped[int] = mapped_column(Integer(), server_default="0")
    paused_until: Mapped[datetime | None]


class AlertDelivery(Base):
    """Delivery of an alert to the webhook that its organization had when it fired."""

    __tablename__ = "alert_deliveries"

    alert_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("alerts.id"), primary_key=True)
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    state: Mapped[str] = mapped_column(server_default="pending")
    attempt_count: Mapped[int] = mapped_column(Integer(), server_default="0")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    attempted_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    last_error: Mapped[str | None]


@dataclass(frozen=True, slots=True)
class ListedAlert:
    """An alert with its organization.

    `quota` is the limit it is about, `entry` the audit entry of a changed key; at most one is set.
    `delivery` is None if the organization had no webhook when the alert fired. `within_name` is the
    organization or project within which the limit of an end user or label value counts.
    """

    alert: Alert
    organization: Organization
    quota: Quota | None
    delivery: AlertDelivery | None
    entry: AuditEntry | None
    subject_name: str = ""
    within_name: str = ""

    @property
    def kind(self) -> str:
        """Type of the alert for webhooks, such as `quota`, `credit`, `test` or `key_rotated`."""
        if self.alert.invoice_event is not None:
            return self.alert.invoice_event
        if self.entry is not None:
            return f"key_{ACTS[self.entry.action]}"
        if self.quota is None:
            return "test"
        return "credit" if self.quota.dimension == QuotaDimension.PREPAID_CREDIT_PICOS else "quota"


LISTED = (
    select(Alert, Organization, Quota, AlertDelivery, AuditEntry)
    .join(Organization, Organization.id == Alert.organization_id)
    .outerjoin(Quota, Quota.id == Alert.quota_id)
    .outerjoin(AlertDelivery, AlertDelivery.alert_id == Alert.id)
    .outerjoin(AuditEntry, AuditEntry.id == Alert.audit_entry_id)
)


# Limits that a usage subject has or had, by an index of each. Their alerts are few, where those of
# the organization may be millions.
LIMITS_EVER = text("""
SELECT id FROM quotas WHERE subject_id = :subject_id AND deleted_at IS NULL
UNION ALL
SELECT id FROM quotas
WHERE subject_id = :subject_id AND within_id IS NOT NULL AND deleted_at IS NOT NULL
""")


async def list_alerts(
    session: AsyncSession,
    *,
    organization_id: uuid.UUID | None,
    end_user: str = "",
    page_size: int = 100,
    page_token: str = "",
) -> tuple[list[ListedAlert], str]:
    """List alerts, the newest first, of one organization or, with None, of all.

    With the name or id of an end user of the organization, lists those on its limits only. Returns
    a page and the token of the next page, empty on the last one. Raises: InvalidValue for an
    invalid page size or token; NotFound for an unknown end user.
    """
    check_page_size(page_size)
    query = LISTED.order_by(Alert.fired_at.desc(), Alert.id.desc()).limit(page_size + 1)
    if organization_id is not None:
        query = query.where(Alert.organization_id == organization_id)
    if end_user:
        if organization_id is None:
            raise InvalidValue("organization", "is required with an end user")
        if (subject := await find_end_user(session, organization_id, end_user)) is None:
            raise NotFound("end user", end_user)
        limits = await session.scalars(LIMITS_EVER, {"subject_id": subject.id})
        query = query.where(Alert.quota_id.in_(limits.all()))
    if page_token:
        query = query.where(
            tuple_(Alert.fired_at, Alert.id) < tuple_(*page_values(page_token, utc_time, uuid.UUID))
        )
    found = [ListedAlert(*row) for row in await session.execute(query)]
    page = await _named(session, found[:page_size])
    return page, (
        token_of(page[-1].alert.fired_at, page[-1].alert.id) if len(found) > page_size else ""
    )


async def find_alert(session: AsyncSession, alert_id: uuid.UUID) -> ListedAlert:
    """Look up an alert by its id. Raises: NotFound."""
    row = (await session.execute(LISTED.where(Alert.id == alert_id))).one_or_none()
    if row is None:
        raise NotFound("alert", str(alert_id))
    [found] = await _named(session, [ListedAlert(*row)])
    return found


async def _named(session: AsyncSession, found: list[ListedAlert]) -> list[ListedAlert]:
    quotas = [each.quota for each in found if each.quota is not None]
    names = await subject_names(
        session, {each for quota in quotas for each in (quota.subject_id, quota.within_id) if each}
    )
    return [
        (
            each
            if each.quota is None
            else replace(
                each,
                # An erased end user has no name.
                subject_name=names.get(each.quota.subject_id) or str(each.quota.subject_id),
                within_name="" if each.quota.within_id is None else names[each.quota.within_id],
            )
        )
        for each in found
    ]


# End of a statement that has fired alerts: queues them for the webhook, and counts them.
QUEUE_FIRED = """queued AS (
    INSERT INTO alert_deliveries (alert_id, organization_id, created_at)
    SELECT f.id, f.organization_id, now()
    FROM fired f
    JOIN alert_webhooks USING (organization_id)
)
SELECT count(*) FROM fired
"""
FIRE = text(f"""
WITH fired AS (
    INSERT INTO alerts (organization_id, stripe_invoice_id, invoice_event, invoice, fired_at)
    VALUES (:organization_id, :stripe_invoice_id, :event, :invoice, now())
    ON CONFLICT DO NOTHING
    RETURNING id, organization_id
), {QUEUE_FIRED}
""")


@dataclass(frozen=True, slots=True)
class KeyChange:
    """Change of an API key that an alert reports.

    `changed_by` is the actor's name in the audit log, `changed` the names of the changed fields.
    """

    id: str
    prefix: str
    name: str
    changed_by: str
    changed: tuple[str, ...]

    @classmethod
    def of(cls, entry: AuditEntry) -> KeyChange:
        key = entry.before or {}
        changed = ("secret",) if entry.action == "api_key.rotate" else widened_fields(entry)
        return cls(entry.subject_id, key["prefix"], key["name"], entry.actor, tuple(changed))

    @property
    def text(self) -> str:
        """Describe the change in one English sentence."""
        what = "rotated" if self.changed == ("secret",) else "given more rights"
        return (
            f"The API key {self.prefix} ({self.name}) was {what} by {self.changed_by}"
            f" ({', '.join(self.changed)})."
        )


async def latest_key_change(session: AsyncSession, api_key_id: uuid.UUID) -> KeyAct | None:
    """Find the latest rotation or widening of a key that was alerted; None if there was none."""
    reported = (
        select(AuditEntry)
        .join(Alert, Alert.audit_entry_id == AuditEntry.id)
        .where(Alert.api_key_id == api_key_id)
        .order_by(Alert.audit_entry_id.desc())
        .limit(1)
    )
    entry = await session.scalar(reported)
    return None if entry is None else KeyAct(ACTS[entry.action], entry.actor, entry.created_at)


FIRE_KEY_CHANGES = text(f"""
WITH fired AS (
    INSERT INTO alerts (organization_id, api_key_id, audit_entry_id, fired_at)
    SELECT p.organization_id, k.id, e.id, now()
    FROM audit_log e
    JOIN api_keys k ON k.id::text = e.subject_id
    JOIN projects p ON p.id = k.project_id
    WHERE e.action IN ('api_key.rotate', 'api_key.update')
      AND e.id > (SELECT max(id) FROM audit_log) - :entries
      AND e.created_at > now() - :since
      AND (e.action = 'api_key.rotate' OR {WIDENED})
      AND NOT EXISTS (SELECT FROM alerts a WHERE a.audit_entry_id = e.id)
    ORDER BY e.id  -- one order for all workers prevents deadlocks
    LIMIT :limit
    ON CONFLICT DO NOTHING
    RETURNING id, organization_id
), {QUEUE_FIRED}
""")


@dataclass(frozen=True, slots=True)
class InvoiceFacts:
    """Content of an invoice alert, stored so that every delivery attempt sends the same."""

    stripe_number: str
    month: str
    currency_code: str
    amount_due_picos: int
    amount_paid_picos: int
    hosted_url: str


async def fire_invoice_alert(
    session: AsyncSession,
    organization_id: uuid.UUID,
    stripe_invoice_id: str,
    event: InvoiceEvent,
    facts: InvoiceFacts,
) -> None:
    """Insert an invoice alert and queue it, unless it was inserted before. The caller commits."""
    # Picos are strings: not every JSON reader supports integers of their size.
    fields = asdict(facts) | {
        "amount_due_picos": str(facts.amount_due_picos),
        "amount_paid_picos": str(facts.amount_paid_picos),
    }
    parameters = {
        "organization_id": organization_id,
        "stripe_invoice_id": stripe_invoice_id,
        "event": event,
        "invoice": Jsonb(fields),
    }
    await session.execute(FIRE, parameters)


def facts_of(alert: Alert) -> InvoiceFacts:
    fields = alert.invoice
    assert fields is not None
    return InvoiceFacts(
        **fields | {name: int(fields[name]) for name in ("amount_due_picos", "amount_paid_picos")}
    )


def _fire(scanned: str, quotas: str, chosen: str, limit: str = "", bounded: str = "") -> str:
    """Build the statement that fires alerts of the limits `chosen` among `quotas`.

    `scanned` are CTEs that the condition needs; `bounded` are those that choose `due` of `owned`.
    """
    return f"""windows AS (
    SELECT *
    FROM unnest(
        CAST(:dimensions AS text[]), CAST(:starts AS timestamptz[]), CAST(:ends AS timestamptz[])
    ) AS w (dimension, starts_at, ends_at)
), {scanned}limits AS MATERIALIZED (
    -- limit_value: the limit in force at the end of the window, or now. used_min: usage below it
    -- crosses no threshold.
    SELECT q.id, q.subject, q.subject_id, q.within_id, q.dimension, q.enforced, q.alert_at,
           w.starts_at, l.limit_value,
           CASE WHEN q.dimension = '{CREDIT}' THEN 0
                ELSE l.limit_value::float8 * q.alert_at[1] * {NEARLY} END AS used_min
    FROM {quotas}
    JOIN windows w
        ON w.dimension = q.dimension
       AND (w.ends_at > now() OR w.ends_at > q.changed_at)
    CROSS JOIN LATERAL (
        SELECT CASE WHEN q.override_until >= least(w.ends_at, now()) THEN q.override_limit_value
                    ELSE q.limit_value END
    ) AS l (limit_value)
    WHERE q.alert_at <> '{{}}'
      AND q.deleted_at IS NULL
      AND NOT q.for_new_keys
      AND q.for_each = ''
      AND {chosen}
      AND l.limit_value > 0
), near AS MATERIALIZED (
    SELECT l.*, c.used
    FROM limits l, LATERAL (  -- OFFSET 0: always by its key
        SELECT used
        FROM quota_counters
        WHERE quota_id = l.id AND window_start = l.starts_at
        OFFSET 0
    ) c
    WHERE c.used >= l.used_min
), crossed AS (
    SELECT n.*, t.threshold
    FROM near n
    CROSS JOIN LATERAL unnest(n.alert_at) AS t (threshold)
    WHERE CASE WHEN n.dimension = '{CREDIT}' THEN n.limit_value - n.used <= t.threshold
               WHEN n.enforced AND t.threshold = 100
                   THEN n.used::numeric * 1000 >= n.limit_value::numeric * {USED_UP_MILLI}
               ELSE n.used::numeric * 100 >= n.limit_value::numeric * t.threshold
          END
      -- In the first seconds of a month its new credit has not been added yet.
      AND (
          n.dimension <> '{CREDIT}'
          OR EXISTS (
              SELECT FROM prepaid_organizations p WHERE p.quota_id = n.id AND p.month >= :month
          )
      )
      AND NOT EXISTS (
          SELECT
          FROM alerts a
          WHERE (a.quota_id, a.window_start, a.threshold, a.limit_value)
              = (n.id, n.starts_at, t.threshold, n.limit_value)
      )
    {limit}
), owned AS MATERIALIZED (
    SELECT c.*, coalesce(p.organization_id, c.within_id, c.subject_id) AS organization_id
    FROM crossed c
    LEFT JOIN api_keys k ON c.subject = 'api_key' AND k.id = c.subject_id
    LEFT JOIN projects p
        ON p.id = CASE c.subject WHEN 'project' THEN c.subject_id
                                 WHEN 'api_key' THEN k.project_id
                                 ELSE c.within_id END
), {bounded}fired AS (
    INSERT INTO alerts
        (organization_id, quota_id, window_start, threshold, limit_value, used, fired_at)
    SELECT d.organization_id, d.id, d.starts_at, d.threshold, d.limit_value, d.used, now()
    FROM {"due" if bounded else "owned"} d
    ORDER BY d.id, d.starts_at, d.threshold  -- one order for all workers prevents deadlocks
    ON CONFLICT DO NOTHING
    RETURNING id, organization_id
), {QUEUE_FIRED}
"""


FIRE_CROSSED = text(f"""
WITH {_fire("", "quotas q", "q.within_id IS NULL", limit="LIMIT :limit")}
""")
# Limits of usage subjects may be a million. Only those are read whose use or terms have changed
# since the last scan, which takes them from `alert_scans`; a changed selector concerns all of its,
# so many at a time.
_taken = """taken AS (
    DELETE FROM alert_scans
    WHERE ctid = ANY(ARRAY(
        SELECT ctid
        FROM alert_scans
        WHERE due_at <= now()
        ORDER BY due_at, quota_id
        LIMIT :limit
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING quota_id, after_id
), given AS MATERIALIZED (
    SELECT quota_id AS selector_id, q.*
    FROM taken, LATERAL (
        SELECT id, subject_id
        FROM quotas
        WHERE selector_id = quota_id AND subject_id > after_id AND deleted_at IS NULL
        ORDER BY subject_id
        LIMIT :limit
    ) q
), continued AS (
    INSERT INTO alert_scans (quota_id, after_id)
    SELECT selector_id, (array_agg(subject_id ORDER BY subject_id DESC))[1]
    FROM given
    GROUP BY selector_id
    HAVING count(*) = :limit
    ON CONFLICT DO NOTHING  -- it has changed again
), scanned AS MATERIALIZED (
    SELECT quota_id FROM taken UNION SELECT id FROM given
), """
# Alerts of the last hour lessen those that may follow. The limits left out are scanned again.
_bounded = f"""recent AS (
    SELECT a.organization_id, count(*) AS alert_count
    FROM alerts a
    JOIN quotas q ON q.id = a.quota_id
    WHERE a.fired_at > now() - interval '1 hour' AND q.within_id IS NOT NULL
    GROUP BY 1
), ranked AS MATERIALIZED (
    SELECT o.*, o.place <= :per_hour - coalesce(r.alert_count, 0) AS is_due
    FROM (
        SELECT *, row_number() OVER (
                   PARTITION BY organization_id ORDER BY threshold DESC, starts_at DESC, id
               ) AS place
        FROM owned
    ) AS o
    LEFT JOIN recent r USING (organization_id)
), due AS (
    SELECT * FROM ranked WHERE is_due
), postponed AS (
    INSERT INTO alert_scans (quota_id, due_at)
    SELECT DISTINCT id, now() + interval '{POSTPONED_S} seconds'
    FROM ranked
    WHERE NOT is_due
    ON CONFLICT DO NOTHING  -- it has changed again
), """
_of_key = "LATERAL (SELECT * FROM quota_terms WHERE id = quota_id OFFSET 0) q"
FIRE_OF_USAGE_SUBJECTS = text(f"""
WITH {_fire(_taken, f"scanned, {_of_key}", "q.within_id IS NOT NULL", bounded=_bounded)}
""")
IS_SCAN_DUE = text("SELECT EXISTS (SELECT FROM alert_scans WHERE due_at <= now())")


async def fire_due_alerts(sessions: Sessions) -> int:
    """Insert alerts for newly crossed thresholds and for keys that were rotated or widened.

    Returns the number of alerts. Concurrent scans are safe.
    """
    fired_count = 0
    for statement in (FIRE_CROSSED, FIRE_OF_USAGE_SUBJECTS):
        for _ in range(STATEMENTS_MAX):
            async with sessions.begin() as session:
                now = await database_now(session)
                windows = scanned_windows(now)
                if statement is FIRE_OF_USAGE_SUBJECTS:
                    await session.execute(SCAN_SETTINGS)
                parameters = {
                    "dimensions": [str(dimension) for dimension, _, _ in windows],
                    "starts": [starts_at for _, starts_at, _ in windows],
                    "ends": [ends_at for _, _, ends_at in windows],
                    "month": window_start(QuotaDimension.COST_PICOS_PER_MONTH, now).date(),
                    "limit": ALERTS_MAX,
                }
                if statement is FIRE_OF_USAGE_SUBJECTS:
                    parameters["per_hour"] = USAGE_SUBJECT_ALERTS_PER_HOUR
                found = int((await session.execute(statement, parameters)).scalar_one())
                is_due = statement is not FIRE_CROSSED and await session.scalar(IS_SCAN_DUE)
            fired_count += found
            if found < ALERTS_MAX and not is_due:
                break
    async with sessions.begin() as session:
        changes = {"since": KEYS_BACK, "entries": ENTRIES_BACK, "limit": ALERTS_MAX}
        return fired_count + int((await session.execute(FIRE_KEY_CHANGES, changes)).scalar_one())


def scanned_windows(now: datetime) -> list[tuple[QuotaDimension, datetime, datetime]]:
    """Compute the quota windows to scan, as tuples of dimension, start and end."""
    never = datetime.max.replace(tzinfo=now.tzinfo)
    windows: list[tuple[QuotaDimension, datetime, datetime]] = []
    for dimension in (QuotaDimension.PREPAID_CREDIT_PICOS, *ALERTING_DIMENSIONS):
        starts_at, unit = window_start(dimension, now), DIMENSIONS[dimension][1]
        for _ in range(1 + WINDOWS_BACK.get(unit, 0)):
            windows.append((dimension, starts_at, window_end(dimension, starts_at) or never))
            starts_at = window_start(dimension, starts_at - timedelta(days=1))
    return windows
