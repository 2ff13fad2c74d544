"""Reading the month of a customer: what the ledger says it used and owes, and whether that is what it used.

Amounts come from the ledger, never from today's prices.
"""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

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

# One statement, so that all numbers are of one moment: rating may go on meanwhile.
MONTH = text("""
WITH used AS (
    SELECT count(*) FILTER (WHERE part = 0) AS total_count,
           count(*) FILTER (WHERE part = 0 AND outcome = ANY(:completed)) AS completed_count,
           count(*) FILTER (WHERE part = 0 AND outcome = ANY(:cancelled)) AS cancelled_count,
           count(*) FILTER (WHERE part = 0 AND outcome = ANY(:limited)) AS limited_count,
           count(*) FILTER (WHERE part = 0 AND outcome = ANY(:failed)) AS failed_count,
           coalesce(sum(input_token_count + billed_token_count), 0) AS usage_token_count,
           coalesce(sum(input_token_count + billed_token_count) FILTER (WHERE rated_at IS NULL), 0) AS unrated_token_count,
           count(*) FILTER (WHERE rated_at IS NULL) AS unrated_event_count
    FROM usage_events
    WHERE organization_id = :organization_id AND settled_at >= :begins AND settled_at < :ends
), posted AS (
    SELECT p.model, p.id AS price_version, p.currency_code, e.token_kind,
           count(DISTINCT u.hold_id) AS request_count,
           sum(e.token_count) AS token_count,
           coalesce(sum(e.token_count) FILTER (WHERE u.outcome = ANY(:cancelled)), 0) AS cancelled_token_count,
           CASE e.token_kind WHEN 'input' THEN p.input_picos_per_token
                             WHEN 'cached_input' THEN p.cached_input_picos_per_token
                             WHEN 'output' THEN p.output_picos_per_token END AS unit_price_picos,
           -sum(e.amount_picos) AS amount_picos
    FROM ledger_transactions t
    JOIN ledger_entries e ON e.transaction_id = t.id
    JOIN price_versions p ON p.id = e.price_version_id
    JOIN usage_events u ON u.id = t.usage_event_id
    WHERE t.organization_id = :organization_id AND t.effective_at >= :begins AND t.effective_at < :ends
    GROUP BY p.id, e.token_kind
)
SELECT used.*, posted.* FROM used LEFT JOIN posted ON true
""")


async def month_report(session: AsyncSession, *, organization: str, month: str) -> MonthReport:
    """The report of an organization, given by name or id, for a month `YYYY-MM`. Raises: NotFound, InvalidValue."""
    begins, ends = month_bounds(month)
    owner = await find_organization(session, organization)
    parameters = {
        "organization_id": owner.id,
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
