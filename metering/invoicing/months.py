"""Months of a customer: reports, states, and verification of closed ones. Reads only.

Verification builds the report again from the ledger and compares four things: the documents
with their digests, the receipts with their root, the invoice's lines with the report's, and the
month's postings to the customer's account with the invoiced amount.

Amounts come from the ledger, never from today's prices. Plan, adjustments and prepaid credit of an
open month are computed here; those of a closed month are the lines of its invoice.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any

from sqlalchemy import Row, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvariantViolated, MonthOpen
from metering.core.models import Organization, Outcome, PriceVersion, TokenKind, record_of
from metering.core.money import exact_text
from metering.invoicing.documents import kept_document
from metering.invoicing.invoices import invoice_lines, invoice_of_month, read_lines
from metering.invoicing.month_report import (
    Closed,
    CreditNoteIssued,
    Digests,
    MonthReport,
    PrepaidCredit,
    Reconciliation,
    ReportLine,
    RequestCounts,
    digests,
)
from metering.ledger.ledger import (
    AccountKind,
    MonthState,
    TransactionKind,
    month_bounds,
    month_text,
)
from metering.plans.plan_admin import plan_in_force
from metering.plans.plans import LineKind, MonthUsage, PlanLine, apply_credit, plan_lines
from metering.plans.prepaid import grants_of, usable_grants
from metering.pricing.prices import COUNTS_OF_EVENT, PRICE_OF_KIND
from metering.receipts.months import month_root
from metering.store.db import patience
from metering.tenants.billing_profiles import BillingProfile, billing_profile
from metering.tenants.tenants import find_organization

CLOSING = text("""
SELECT c.*, b.closed_at, b.closed_by
FROM month_closings c
JOIN billing_months b USING (organization_id, month)
WHERE organization_id = :organization_id AND month = :month
""")
ALL_CLOSED = text(
    "SELECT organization_id, month FROM month_closings ORDER BY month, organization_id"
)
# Manual postings, except those of credit notes, which are documents of their own.
ADJUSTMENTS = text(f"""
SELECT t.id, t.source_id,
       coalesce('adjustment: ' || a.reason, t.description) AS description,
       sum(e.amount_picos) AS amount_picos
FROM ledger_transactions t
JOIN ledger_entries e ON e.transaction_id = t.id
JOIN ledger_accounts c ON c.id = e.account_id AND c.kind = '{AccountKind.RECEIVABLE}'
LEFT JOIN adjustments a ON a.id = t.source_id
WHERE t.organization_id = :organization_id
  AND t.billing_month = :month
  AND t.kind = '{TransactionKind.ADJUSTMENT}'
  AND a.invoice_id IS NULL
GROUP BY t.id, t.source_id, t.description, a.reason
ORDER BY t.id
""")
CREDIT_NOTES = text("""
SELECT d.credit_note_number AS number, i.number AS invoice_number,
       -a.amount_picos AS amount_picos, a.reason
FROM adjustment_decisions d
JOIN adjustments a ON a.id = d.adjustment_id
JOIN invoices i ON i.id = a.invoice_id
WHERE a.organization_id = :organization_id
  AND d.billing_month = :month
  AND d.credit_note_number IS NOT NULL
ORDER BY d.credit_note_ordinal
""")
CARRIED = text(f"""
SELECT coalesce(sum(e.amount_picos), 0)
FROM ledger_accounts c
JOIN ledger_entries e ON e.account_id = c.id
WHERE c.organization_id = :organization_id AND c.kind = '{AccountKind.ROUNDING}'
""")
PREPAID = text(f"""
SELECT -coalesce(sum(e.amount_picos), 0) AS remaining_picos,
       -coalesce(sum(e.amount_picos) FILTER (
           WHERE t.billing_month = :month AND t.kind = '{TransactionKind.CREDIT_GRANTED}'
       ), 0) AS granted_picos,
       coalesce(sum(e.amount_picos) FILTER (
           WHERE t.billing_month = :month AND t.kind = '{TransactionKind.CREDIT_EXPIRED}'
       ), 0) AS expired_picos,
       coalesce(sum(e.amount_picos) FILTER (
           WHERE t.billing_month = :month AND t.kind = '{TransactionKind.CREDIT_REFUNDED}'
       ), 0) AS refunded_picos
FROM ledger_accounts c
JOIN ledger_entries e ON e.account_id = c.id
JOIN ledger_transactions t ON t.id = e.transaction_id
WHERE c.organization_id = :organization_id
  AND c.kind = '{AccountKind.PREPAID_CREDIT}'
  AND t.billing_month <= :month
""")

TOKEN_KIND_ORDER = list(TokenKind)
COMPLETED = (Outcome.STOP, Outcome.STOP_SEQUENCE, Outcome.LENGTH)
CANCELLED = (Outcome.CANCELLED, Outcome.DEADLINE)
LIMITED = (Outcome.QUOTA_EXHAUSTED, Outcome.COST_LIMIT, Outcome.SLOW_CONSUMER, Outcome.FILTERED)
FAILED = (Outcome.FAILED,)
LONG_READ_S = 300.0  # for some ten million events, at a few microseconds each
LONG_STATEMENTS = text(f"SET LOCAL statement_timeout = '{LONG_READ_S:.0f}s'")
MONTH_OF = "CAST(date_trunc('month', {}, 'UTC') AS date)"
TOKEN_AND_REQUEST_SUMS = ", ".join(
    f"sum({count}) AS {kind}_tokens,"
    f" coalesce(sum(event_count) FILTER (WHERE {count} > 0), 0) AS {kind}_requests"
    for kind, (count, _) in COUNTS_OF_EVENT.items()
)
ALL_TOKENS = " + ".join(f"{kind}_tokens" for kind in COUNTS_OF_EVENT)
BY_KIND = "LATERAL (VALUES {}) AS of_kind (token_kind, token_count, request_count)".format(
    ", ".join(f"('{kind}', {kind}_tokens, {kind}_requests)" for kind in COUNTS_OF_EVENT)
)
OUTCOME_GROUPS = {
    "completed": COMPLETED,
    "cancelled": CANCELLED,
    "limited": LIMITED,
    "failed": FAILED,
}
REQUESTS = ", ".join(
    f"coalesce(sum(event_count) FILTER (WHERE part = 0{condition}), 0)::bigint AS {name}_count"
    for name, condition in {
        "total": "",
        **{name: f" AND outcome = ANY(:{name})" for name in OUTCOME_GROUPS},
    }.items()
)


async def draft_charges(
    session: AsyncSession, organization_id: uuid.UUID, month: date, lines: Sequence[ReportLine]
) -> tuple[PlanLine, ...]:
    """Compute the present charges in invoice order: plan, adjustments, applied credit.

    The plan applies to late usage too. Adjustments are in order of posting, credit grants by
    earliest end.
    """
    versions = select(PriceVersion).where(
        PriceVersion.id.in_({line.price_version for line in lines})
    )
    begins = {version.id: version.effective_at for version in await session.scalars(versions)}
    usage = [record_of(MonthUsage, line, effective_at=begins[line.price_version]) for line in lines]
    plan = await plan_in_force(session, organization_id, month)
    charges = list(plan_lines(plan.rules, usage) if plan else ())
    rows = await session.execute(ADJUSTMENTS, {"organization_id": organization_id, "month": month})
    charges += [
        PlanLine(
            LineKind.ADJUSTMENT, row.description, int(row.amount_picos), source_id=row.source_id
        )
        for row in rows
    ]
    due_picos = sum(line.amount_picos for line in lines) + sum(
        charge.amount_picos for charge in charges
    )
    reasons = {
        grant.id: f"prepaid credit: {grant.reason}"
        for grant in await grants_of(session, organization_id)
    }
    spent = apply_credit(await usable_grants(session, organization_id, month), due_picos)
    credit = LineKind.CREDIT
    charges += [
        PlanLine(credit, reasons[each.grant_id], -each.amount_picos, source_id=each.grant_id)
        for each in spent
    ]
    return tuple(charges)


async def prepaid_credit_of(
    session: AsyncSession, organization_id: uuid.UUID, month: date
) -> PrepaidCredit:
    """Read the prepaid credit posted for a month, and the credit remaining at its end."""
    of_month = {"organization_id": organization_id, "month": month}
    return record_of(PrepaidCredit, (await session.execute(PREPAID, of_month)).one())


def _qualified(row: str, count: str) -> str:
    """Prefix each column in the SQL of a token count with a table alias."""
    return re.sub(r"[a-z_]+", lambda column: f"{row}.{column[0]}", count)


BOTH_HAVE = ", ".join(
    f"('{kind}', {_qualified('first', count)} > 0 AND {_qualified('second', count)} > 0)"
    for kind, (count, _) in COUNTS_OF_EVENT.items()
)
# Without statistics of days the planner assumes one group per timestamp, and would sort all events
# on disk.
BY_HASH = text("SET LOCAL enable_sort = off")
# One statement, and so one snapshot, since rating may continue meanwhile. Tokens and amounts come
# from the ledger; the number of requests and their outcomes come from the events that refer to its
# transactions, or from the sums that replaced the events of an old month. Events are read once,
# into sums. A request whose parts 0 and 1 both have tokens of a kind is counted once.
MONTH = text(f"""
WITH transactions AS MATERIALIZED (
    SELECT id, effective_at, {MONTH_OF.format("effective_at")} AS usage_month
    FROM ledger_transactions
    WHERE organization_id = :organization_id
      AND billing_month = :month
      AND kind = '{TransactionKind.USAGE}'
), events AS MATERIALIZED (
    SELECT u.price_version_id, {MONTH_OF.format("u.settled_at")} AS usage_month,
           u.outcome, u.part, u.rated_at IS NULL AS is_unrated, u.repeated_kinds,
           sum(u.event_count) AS event_count,
           array_agg(u.hold_id) FILTER (WHERE u.part > 0) AS hold_ids, {TOKEN_AND_REQUEST_SUMS}
    FROM usage_sums u
    LEFT JOIN transactions t ON t.id = u.ledger_transaction_id
    WHERE u.organization_id = :organization_id
      AND u.settled_at < :ends
      AND u.settled_at >= least(:begins, (SELECT min(effective_at) FROM transactions))
      AND (t.id IS NOT NULL
           OR u.billing_month = :month
           OR :with_unrated AND u.rated_at IS NULL AND u.settled_at >= :begins)
    GROUP BY 1, 2, 3, 4, 5, 6
), used AS (
    SELECT {REQUESTS},
           coalesce(sum({ALL_TOKENS}), 0) AS usage_token_count,
           coalesce(sum({ALL_TOKENS}) FILTER (WHERE is_unrated), 0) AS unrated_token_count,
           coalesce(sum(event_count) FILTER (WHERE is_unrated), 0)::bigint AS unrated_event_count
    FROM events
), repeated AS (
    SELECT second.price_version_id, kind.token_kind,
           {MONTH_OF.format("second.settled_at")} AS usage_month, count(*) AS request_count
    FROM (SELECT unnest(hold_ids) AS hold_id FROM events) late
    JOIN usage_events second ON second.hold_id = late.hold_id AND second.part > 0
    JOIN transactions ON transactions.id = second.ledger_transaction_id
    JOIN usage_events first
        ON first.hold_id = late.hold_id
       AND first.part = 0
       AND {MONTH_OF.format("first.settled_at")} = {MONTH_OF.format("second.settled_at")}
    JOIN transactions earlier ON earlier.id = first.ledger_transaction_id,
         LATERAL (VALUES {BOTH_HAVE}) AS kind (token_kind, both_have)
    WHERE kind.both_have
    GROUP BY 1, 2, 3
    UNION ALL
    SELECT price_version_id, kind, usage_month, sum(event_count)
    FROM events, unnest(repeated_kinds) AS kind
    GROUP BY 1, 2, 3
), reported AS (
    SELECT price_version_id, of_kind.token_kind, usage_month,
           sum(of_kind.request_count) AS request_count,
           coalesce(
               sum(of_kind.token_count) FILTER (WHERE outcome = ANY(:cancelled)), 0
           ) AS cancelled_token_count
    FROM events, {BY_KIND}
    WHERE NOT is_unrated
    GROUP BY 1, 2, 3
), posted AS (
    SELECT e.price_version_id, e.token_kind, t.usage_month,
           sum(e.token_count) AS token_count, -sum(e.amount_picos) AS amount_picos
    FROM transactions t
    JOIN ledger_entries e ON e.transaction_id = t.id
    WHERE e.token_kind IS NOT NULL
    GROUP BY 1, 2, 3
), lines AS (
    SELECT p.model, p.id AS price_version, p.currency_code, p.tier,
           posted.token_kind, posted.usage_month,
           (coalesce(reported.request_count, 0) - coalesce(repeated.request_count, 0))::bigint
               AS request_count,
           posted.token_count,
           coalesce(reported.cancelled_token_count, 0) AS cancelled_token_count,
           {PRICE_OF_KIND.format("posted.token_kind")} AS unit_price_picos,
           posted.amount_picos
    FROM posted
    JOIN price_versions p ON p.id = posted.price_version_id
    LEFT JOIN reported USING (price_version_id, token_kind, usage_month)
    LEFT JOIN repeated USING (price_version_id, token_kind, usage_month)
)
SELECT used.*, lines.*
FROM used
LEFT JOIN lines ON true
""")


async def allow_long_reads(session: AsyncSession) -> None:
    """Raise this transaction's statement timeout to `LONG_READ_S`.

    Needed for months of millions of events. Call it within `patience(LONG_READ_S)`.
    """
    await session.execute(LONG_STATEMENTS)


async def month_report(session: AsyncSession, *, organization: str, month: str) -> MonthReport:
    """Build the report of a month `YYYY-MM`. Raises: NotFound, InvalidValue."""
    begins, _ = month_bounds(month)
    return await read_month(session, await find_organization(session, organization), begins.date())


async def read_month(
    session: AsyncSession, owner: Organization, month: date, *, to_close: bool = False
) -> MonthReport:
    """Build the report of the month that begins on `month`; if closed, from immutable data only.

    `to_close` leaves unrated usage to the next month, as a close does.
    """
    of_month = {"organization_id": owner.id, "month": month}
    closing = (await session.execute(CLOSING, of_month)).one_or_none()
    lines, counts = await _usage(
        session, owner, month, with_unrated=closing is None and not to_close
    )
    notes = await session.execute(CREDIT_NOTES, of_month)
    report = MonthReport(
        organization_name=owner.name,
        organization_id=owner.id,
        month=month_text(month),
        currency_code=owner.currency_code,
        lines=lines,
        request_counts=record_of(RequestCounts, counts),
        unrated_event_count=counts.unrated_event_count,
        reconciliation=Reconciliation(
            usage_token_count=int(counts.usage_token_count),
            ledger_token_count=sum(line.token_count for line in lines),
            unrated_token_count=int(counts.unrated_token_count),
        ),
        credit=await prepaid_credit_of(session, owner.id, month),
        credit_notes=tuple(record_of(CreditNoteIssued, note) for note in notes),
    )
    if closing is not None:
        return await _as_closed(session, report, closing)
    charges = await draft_charges(session, owner.id, month, lines)
    spent = sum(charge.amount_picos for charge in charges if charge.kind is LineKind.CREDIT)
    credit = replace(report.credit, remaining_picos=report.credit.remaining_picos + spent)
    return replace(
        report,
        charges=charges,
        credit=credit,
        # Only closes post these.
        carried_in_picos=int((await session.execute(CARRIED, of_month)).scalar_one()),
        billing_profile=await billing_profile(session, owner.id),
    )


async def _as_closed(session: AsyncSession, report: MonthReport, closing: Row[Any]) -> MonthReport:
    """Replace values that may have changed since the close by those it stored."""
    invoice = await invoice_of_month(session, closing.organization_id, closing.month)
    lines = () if invoice is None else await read_lines(session, invoice.id)
    return replace(
        report,
        organization_name=closing.organization_name,
        currency_code=closing.currency_code,
        charges=tuple(
            record_of(PlanLine, line, amount_picos=line.exact_picos)
            for line in lines
            if line.kind.is_charge
        ),
        carried_in_picos=int(closing.carried_in_picos),
        closed=Closed(
            closing.closed_at,
            closing.closed_by,
            "" if invoice is None else invoice.number,
            closing.receipts_root,
        ),
        format_version=closing.report_format,
        billing_profile=(
            None
            if closing.billing_profile is None
            else BillingProfile.from_json(closing.billing_profile)
        ),
    )


async def _usage(
    session: AsyncSession, owner: Organization, month: date, *, with_unrated: bool
) -> tuple[tuple[ReportLine, ...], Row[Any]]:
    """Read a month's lines and request counts. Raises: InvariantViolated for mixed currencies."""
    begins, ends = month_bounds(month_text(month))
    parameters = {
        "organization_id": owner.id,
        "month": month,
        "begins": begins,
        "ends": ends,
        "with_unrated": with_unrated,
    } | {name: list(outcomes) for name, outcomes in OUTCOME_GROUPS.items()}

    await session.execute(BY_HASH)
    rows = (await session.execute(MONTH, parameters)).all()
    lines = []
    for row in rows:
        if row.model is None:
            continue  # no postings: the row holds the counts only
        if row.currency_code != owner.currency_code:
            raise InvariantViolated(
                f"organization {owner.name} has postings in {row.currency_code}: it is billed in"
                f" {owner.currency_code}"
            )
        late_month = "" if row.usage_month == month else month_text(row.usage_month)
        lines.append(record_of(ReportLine, row, late_month=late_month))
    lines.sort(
        key=lambda line: (
            line.late_month,
            line.model,
            line.price_version,
            TOKEN_KIND_ORDER.index(line.token_kind),
        )
    )
    return tuple(lines), rows[0]


# From the first month with any content to the present one. A month before a closed one is closed
# with it.
MONTHS = text("""
WITH known AS (
    SELECT min(month) AS first, max(month) AS last
    FROM (
        SELECT billing_month AS month
        FROM ledger_transactions
        WHERE organization_id = :organization_id
        UNION ALL
        SELECT first_month
        FROM plan_assignments
        WHERE organization_id = :organization_id AND first_month <= now()
        UNION ALL
        SELECT month
        FROM billing_months
        WHERE organization_id = :organization_id
        UNION ALL
        SELECT CAST(date_trunc('month', settled_at, 'UTC') AS date)
        FROM unrated_usage
        WHERE organization_id = :organization_id
        UNION ALL
        SELECT CAST(date_trunc('month', now(), 'UTC') AS date)
    ) months
)
SELECT CAST(each.month AS date) AS month, b.state,
       b.closing_at, b.closing_by, b.closed_at, b.closed_by,
       c.organization_name, c.report_format, c.json_sha256, c.csv_sha256, d.pdf_sha256,
       c.receipts_root, i.number AS invoice_number, i.total_picos
FROM known,
     generate_series(
         coalesce(CAST(:only AS date), known.first),
         coalesce(CAST(:only AS date), known.last),
         interval '1 month'
     ) AS each (month)
LEFT JOIN billing_months b ON b.organization_id = :organization_id AND b.month = each.month
LEFT JOIN month_closings c ON c.organization_id = :organization_id AND c.month = each.month
LEFT JOIN invoices i ON i.organization_id = :organization_id AND i.month = each.month
LEFT JOIN issued_documents d
       ON d.organization_id = :organization_id AND d.name = to_char(each.month, 'YYYY-MM')
ORDER BY 1 DESC
""")


@dataclass(frozen=True, slots=True)
class MonthEntry:
    """State of one month. Digests are hexadecimal; `total_picos` is None without an invoice."""

    organization_id: uuid.UUID
    organization_name: str
    currency_code: str
    month: str
    state: MonthState
    closing_at: datetime | None = None
    closing_by: str = ""
    closed_at: datetime | None = None
    closed_by: str = ""
    invoice_number: str = ""
    total_picos: int | None = None
    json_sha256: str = ""
    csv_sha256: str = ""
    pdf_sha256: str = ""
    report_format: int = 0
    receipts_root: str = ""


async def list_months(session: AsyncSession, organization: Organization) -> list[MonthEntry]:
    """List all months of an organization, the latest first."""
    return await _read(session, organization, None)


async def month_entry(session: AsyncSession, organization: Organization, month: str) -> MonthEntry:
    """Read the state of a month `YYYY-MM`, even of an empty one. Raises: InvalidValue."""
    return (await _read(session, organization, month_bounds(month)[0].date()))[0]


async def _read(
    session: AsyncSession, organization: Organization, only: date | None
) -> list[MonthEntry]:
    rows = await session.execute(MONTHS, {"organization_id": organization.id, "only": only})
    return [
        record_of(
            MonthEntry,
            row,
            organization_id=organization.id,
            organization_name=row.organization_name or organization.name,
            currency_code=organization.currency_code,
            month=month_text(row.month),
            state=MonthState(row.state or MonthState.OPEN),
            json_sha256=(row.json_sha256 or b"").hex(),
            csv_sha256=(row.csv_sha256 or b"").hex(),
            pdf_sha256=(row.pdf_sha256 or b"").hex(),
        )
        for row in rows
    ]


OWED = text(f"""
SELECT coalesce(sum(e.amount_picos), 0)
FROM ledger_transactions t
JOIN ledger_entries e ON e.transaction_id = t.id
JOIN ledger_accounts c ON c.id = e.account_id AND c.kind = '{AccountKind.RECEIVABLE}'
WHERE t.organization_id = :organization_id AND t.billing_month = :month
""")


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of recomputing a closed month.

    `differences` lists every deviation from the figures stored at the close; empty if there is
    none.
    """

    report: MonthReport
    digests: Digests
    differences: tuple[str, ...]


async def changed_months(session: AsyncSession) -> AsyncIterator[tuple[str, str, str]]:
    """Verify all closed months; yield organization name, month and description per difference."""
    for organization_id, month in (await session.execute(ALL_CLOSED)).all():
        owner = await session.get_one(Organization, organization_id)
        for difference in (await verify_month(session, owner, month_text(month))).differences:
            yield owner.name, month_text(month), difference


async def verify_month(
    session: AsyncSession, organization: Organization, month: str
) -> Verification:
    """Recompute a closed month `YYYY-MM` and compare it. Raises: InvalidValue, MonthOpen."""
    first_day = month_bounds(month)[0].date()
    of_month = {"organization_id": organization.id, "month": first_day}
    closing = (await session.execute(CLOSING, of_month)).one_or_none()
    if closing is None:
        raise MonthOpen(
            f"{month} of {organization.name} is not closed, so there is no close to compare it"
            " with. Close the month first."
        )
    await allow_long_reads(session)
    with patience(LONG_READ_S):
        report = await read_month(session, organization, first_day)
    recomputed = digests(report)
    differences: list[str] = []
    try:
        await kept_document(session, organization.id, month)
    except InvariantViolated as changed:
        differences.append(str(changed))
    for name, now, then in (
        ("JSON", recomputed.json_sha256, closing.json_sha256),
        ("CSV", recomputed.csv_sha256, closing.csv_sha256),
    ):
        if now != then:
            differences.append(
                f"the report as {name} has the SHA-256 {now.hex()}, and had {then.hex()} at its"
                " close"
            )
    invoice = await invoice_of_month(session, organization.id, first_day)
    lines = () if invoice is None else await read_lines(session, invoice.id)
    if lines != invoice_lines(report):
        differences.append("the lines of the invoice differ from those of the report")
    root = (await month_root(session, organization.id, first_day)).hex()
    if closing.receipts_root and root != closing.receipts_root:
        differences.append(
            f"the root of the receipts is {root}, and was {closing.receipts_root} at the close"
        )
    refunded = sum(note.amount_picos for note in report.credit_notes)
    owed = int((await session.execute(OWED, of_month)).scalar_one())
    if owed != report.total_rounded_picos - refunded:
        invoiced = exact_text(report.total_rounded_picos - refunded, report.currency_code)
        posted = exact_text(owed, report.currency_code)
        differences.append(
            f"the ledger has {posted} on the customer's account for the month, the invoice and"
            f" credit notes {invoiced}"
        )
    return Verification(report, recomputed, tuple(differences))
