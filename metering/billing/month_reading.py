"""Reading the month of a customer: what the ledger says it used and owes, and whether that is what it used.

Amounts come from the ledger, never from today's prices.
"""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.models import TransactionKind
from metering.billing.pricing import COUNTS_OF_EVENT, TOKENS_BY_KIND
from metering.billing.reports import MonthReport, Reconciliation, ReportLine, RequestCounts, month_bounds
from metering.errors import InvariantViolated
from metering.models import TokenKind
from metering.operations import Outcome
from metering.tenants.tenants import find_organization

TOKEN_KIND_ORDER = list(TokenKind)

COMPLETED = (Outcome.STOP, Outcome.STOP_SEQUENCE, Outcome.LENGTH)
CANCELLED = (Outcome.CANCELLED, Outcome.DEADLINE)
LIMITED = (Outcome.QUOTA_EXHAUSTED, Outcome.COST_LIMIT, Outcome.SLOW_CONSUMER, Outcome.FILTERED)
FAILED = (Outcome.FAILED,)

UNIT_PRICES = " ".join(f"WHEN '{kind}' THEN p.{price}" for kind, (_, price) in COUNTS_OF_EVENT.items())
# One statement, so that all numbers are of one moment: rating may go on meanwhile. Tokens and amounts are the ledger's; how many
# requests they were of, and how those ended, is told by the events that point to its transactions.
MONTH = text(f"""
WITH transactions AS MATERIALIZED (
    SELECT id, effective_at FROM ledger_transactions
    WHERE organization_id = :organization_id AND billing_month = :month AND kind = '{TransactionKind.USAGE}'
), events AS MATERIALIZED (
    SELECT u.* FROM usage_events u LEFT JOIN transactions t ON t.id = u.ledger_transaction_id
    WHERE u.organization_id = :organization_id AND u.settled_at < :ends
      AND u.settled_at >= least(:begins, (SELECT min(effective_at) FROM transactions))
      AND (t.id IS NOT NULL OR u.rated_at IS NULL AND u.settled_at >= :begins)
), used AS (
    SELECT count(*) FILTER (WHERE part = 0) AS total_count,
           count(*) FILTER (WHERE part = 0 AND outcome = ANY(:completed)) AS completed_count,
           count(*) FILTER (WHERE part = 0 AND outcome = ANY(:cancelled)) AS cancelled_count,
           count(*) FILTER (WHERE part = 0 AND outcome = ANY(:limited)) AS limited_count,
           count(*) FILTER (WHERE part = 0 AND outcome = ANY(:failed)) AS failed_count,
           coalesce(sum(input_token_count + billed_token_count), 0) AS usage_token_count,
           coalesce(sum(input_token_count + billed_token_count) FILTER (WHERE rated_at IS NULL), 0) AS unrated_token_count,
           count(*) FILTER (WHERE rated_at IS NULL) AS unrated_event_count
    FROM events
), told AS (
    SELECT price_version_id, kind.token_kind, count(DISTINCT hold_id) AS request_count,
           coalesce(sum(kind.token_count) FILTER (WHERE outcome = ANY(:cancelled)), 0) AS cancelled_token_count
    FROM events, {TOKENS_BY_KIND} WHERE rated_at IS NOT NULL AND kind.token_count > 0 GROUP BY price_version_id, kind.token_kind
), posted AS (
    SELECT p.model, p.id AS price_version, p.currency_code, e.token_kind, coalesce(told.request_count, 0) AS request_count,
           sum(e.token_count) AS token_count, coalesce(told.cancelled_token_count, 0) AS cancelled_token_count,
           CASE e.token_kind {UNIT_PRICES} END AS unit_price_picos, -sum(e.amount_picos) AS amount_picos
    FROM transactions t
    JOIN ledger_entries e ON e.transaction_id = t.id
    JOIN price_versions p ON p.id = e.price_version_id
    LEFT JOIN told ON (told.price_version_id, told.token_kind) = (e.price_version_id, e.token_kind)
    GROUP BY p.id, e.token_kind, told.request_count, told.cancelled_token_count
)
SELECT used.*, posted.* FROM used LEFT JOIN posted ON true
""")


async def month_report(session: AsyncSession, *, organization: str, month: str) -> MonthReport:
    """The report of an organization, given by name or id, for a month `YYYY-MM`. Raises: NotFound, InvalidValue."""
    begins, ends = month_bounds(month)
    owner = await find_organization(session, organization)
    parameters = {
        "organization_id": owner.id,
        "month": begins.date(),
        "begins": begins,
        "ends": ends,
        "completed": list(COMPLETED),
        "cancelled": list(CANCELLED),
        "limited": list(LIMITED),
        "failed": list(FAILED),
    }
    rows = (await session.execute(MONTH, parameters)).all()
    lines = []
    for row in rows:
        if row.model is None:
            continue  # nothing is posted: the row is there for the counts
        if row.currency_code != owner.currency_code:
            raise InvariantViolated(
                f"organization {owner.name} has postings in {row.currency_code}: it is billed in {owner.currency_code}"
            )
        lines.append(
            ReportLine(
                model=row.model,
                price_version=row.price_version,
                token_kind=TokenKind(row.token_kind),
                request_count=row.request_count,
                token_count=int(row.token_count),
                cancelled_token_count=int(row.cancelled_token_count),
                unit_price_picos=row.unit_price_picos,
                amount_picos=int(row.amount_picos),
            )
        )
    lines.sort(key=lambda line: (line.model, line.price_version, TOKEN_KIND_ORDER.index(line.token_kind)))
    counts = rows[0]
    return MonthReport(
        organization_name=owner.name,
        organization_id=owner.id,
        month=month,
        currency_code=owner.currency_code,
        lines=tuple(lines),
        request_counts=RequestCounts(
            total_count=counts.total_count,
            completed_count=counts.completed_count,
            cancelled_count=counts.cancelled_count,
            limited_count=counts.limited_count,
            failed_count=counts.failed_count,
        ),
        unrated_event_count=counts.unrated_event_count,
        reconciliation=Reconciliation(
            usage_token_count=int(counts.usage_token_count),
            ledger_token_count=sum(line.token_count for line in lines),
            unrated_token_count=int(counts.unrated_token_count),
        ),
    )
